"""The backward pass of what runs a body many times: its iterations in reverse."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.autodiff.control.copies import Copy, is_tensor, new
from onnxgrad.autodiff.reverse import dependent
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import dims, equal
from onnxgrad.graph.traversal import captured, reads


@dataclass
class Carried:
    """A gradient that goes from one backward iteration to the next.

    It is that of `of`, a value outside; it starts as `start`; `before` and `after` are in the body.
    """

    of: ir.Value | None
    start: ir.Value
    before: ir.Value
    after: ir.Value


class Iterations:
    """The iterations of `node`, and the copy of its body that becomes that of the backward pass.

    `states` are handed from an iteration to the next; each has the value that it starts with in
    `initial`, what an iteration makes of it in `ends`, and what is left in `results`. `elements`
    are slices of `sequences`; `slices` are stacked, and `arriving` is the gradient of the stack.
    """

    def __init__(
        self,
        op: Emit,
        node: ir.Node,
        gs: Sequence[ir.Value | None],
        active: Collection[ir.Value],
        states: int,
        before: tuple[int, int] = (0, 0),
    ) -> None:
        """`before`: how many inputs and outputs of the body precede the `states`."""
        self.op, self.node = op, node
        self.copy = copy = Copy(op, node, "body")
        inputs, outputs = copy.inputs[before[0] :], copy.outputs[before[1] :]
        operands = node.inputs[len(node.inputs) - len(inputs) :]
        self.initial, self.sequences = operands[:states], operands[states:]
        self.states, self.elements = inputs[:states], inputs[states:]
        self.ends, self.slices = outputs[:states], outputs[states:]
        self.results, self._result_gs = node.outputs[:states], gs[:states]
        pairs = zip(self.slices, gs[states:], strict=True)
        self.arriving = {y: g for y, g in pairs if g is not None}
        self.around = [v for v in captured(node) if v in active]
        self.varied = self._varied(active)

    def original(self, state: ir.Value) -> ir.Value:
        """Return a state in the body of the forward pass."""
        return self.copy.original.inputs[self.copy.inputs.index(state)]

    def _varied(self, active: Collection[ir.Value]) -> set[ir.Value]:
        """Return the values of the body that depend on what is asked for, in some iteration."""
        outer, inner = [*self.initial, *self.sequences], [*self.states, *self.elements]
        start = {*self.around, *(v for x, v in zip(outer, inner, strict=True) if x in active)}
        while True:
            found, _ = dependent(self.copy.graph, start)
            more = {a for a, b in zip(self.states, self.ends, strict=True) if b in found} - start
            if not more:
                return found
            start |= more

    def _places(self) -> list[int]:
        """Return the places of the states that have a gradient."""
        places = {i for i, g in enumerate(self._result_gs) if g is not None}
        while True:
            needed = self._needed_by([*self.arriving, *(self.ends[i] for i in places)])
            found = {i for i, a in enumerate(self.states) if a in needed}
            if found <= places:
                return [i for i in sorted(places) if self.states[i] in self.varied]
            places |= found

    def _needed_by(self, ends: Iterable[ir.Value]) -> set[ir.Value]:
        found = set(ends)
        for node in reversed(self.copy.graph):
            if not found.isdisjoint(node.outputs):
                found.update(reads(node))
        return found

    def differentiate(
        self, arriving: Mapping[ir.Value, ir.Value], also: Iterable[ir.Value] = ()
    ) -> tuple[list[Carried], dict[ir.Value, ir.Value]]:
        """Append the gradient of an iteration, given what is `arriving` at its slices.

        Return what goes from iteration to iteration: gradients of states, and sums of those of
        the values around; and the gradients of the elements and of what is asked for `also`.
        """
        op, inner, places = self.op, self.copy.op, self._places()
        ds = {i: new(inner, self.ends[i]) for i in places}
        seeds = [*((self.ends[i], d) for i, d in ds.items()), *arriving.items()]
        single = [*(a for a in self.elements if a in self.varied), *also]
        found = self.copy.sweep(seeds, [*(self.states[i] for i in places), *single, *self.around])
        carried = []
        with inner:
            for i, d in ds.items():
                a, start = self.states[i], self._result_gs[i]
                same = is_tensor(a) and equal(dims(a), dims(d))
                went = found[a] if a in found else inner.zeros_like(d if same else a)
                start = op.zeros_like(self.results[i]) if start is None else start
                carried.append(Carried(self.initial[i], start, d, went))
            for v in self.around:
                if v in found:
                    before = new(inner, v)
                    after = inner.total([before, found[v]])
                    carried.append(Carried(v, op.zeros_like(v), before, after))
        return carried, {v: found[v] for v in single if v in found}
