"""The backward pass of Loop and Scan: the iterations in reverse."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.autodiff.control.copies import Copy, Pairs, is_tensor, new
from onnxgrad.autodiff.reverse import dependent
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import release
from onnxgrad.graph.traversal import captured, reads
from onnxgrad.operators.shapes import dims, equal


@dataclass
class Carried:
    """A gradient that is carried from one backward iteration to the next."""

    of: ir.Value | None  # the value outside of the body that it is the gradient of
    start: ir.Value  # its initial value, outside of the body
    before: ir.Value  # it at the start of a backward iteration, in the body
    after: ir.Value  # it at the end of a backward iteration, in the body


@dataclass
class Deferred:
    """A node y = f(a, x) of the body; the gradient w.r.t. a captured x is computed after the loop.

    `a` differs from iteration to iteration.
    """

    y: ir.Value
    a: ir.Value
    x: ir.Value
    hidden: ir.Value  # replaces `x` while the body is differentiated
    adjoint: Callable[..., ir.Value]  # (op, x, a, g) -> the gradient of `x`, as in `gradient`

    def gradient(self, op: Emit, a: ir.Value, g: ir.Value) -> ir.Value:
        """Return the gradient of x, from the a and g of all iterations, stacked along axis 0."""
        return op.set_type_like(self.adjoint(op, self.x, a, g), self.x)


class Iterations:
    """The iterations of `node`, and a copy of its body that becomes the backward body."""

    # set by `differentiate`
    carried: list[Carried]  # gradients of states, and sums of those of captured values
    gradients: dict[ir.Value, ir.Value]  # in one iteration: of elements, and results of `deferred`
    deferred: list[Deferred]  # those whose results have a gradient

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
        # carried from iteration to iteration: operands -> inputs -> outputs of the body -> results
        self.initial, self.states, self.ends = operands[:states], inputs[:states], outputs[:states]
        self.results, self._result_gs = node.outputs[:states], gs[:states]
        self.sequences, self.elements = operands[states:], inputs[states:]  # and their slices
        self.slices = outputs[states:]  # of the body, which `node` stacks
        pairs = zip(self.slices, gs[states:], strict=True)
        self.stack_cotangents = {y: g for y, g in pairs if g is not None}
        self.captured = [v for v in captured(node) if v in active]
        self.varied = self._varied(active)
        self.cotangents = {y: new(op, y) for y in self.stack_cotangents}  # in the backward body

    def original(self, state: ir.Value) -> ir.Value:
        """Return the input of the forward body of which `state` is the copy."""
        return self.copy.original.inputs[self.copy.inputs.index(state)]

    def _varied(self, active: Collection[ir.Value]) -> set[ir.Value]:
        """Return the values of the body that depend on active values, in some iteration."""
        outer, inner = [*self.initial, *self.sequences], [*self.states, *self.elements]
        start = {*self.captured, *(v for x, v in zip(outer, inner, strict=True) if x in active)}
        while True:
            varied, _ = dependent(self.copy.graph, start)
            more = {a for a, b in zip(self.states, self.ends, strict=True) if b in varied} - start
            if not more:
                return varied
            start |= more

    def _differentiated_states(self) -> list[int]:
        """Return the indices of the states that have a gradient."""
        indices = {i for i, g in enumerate(self._result_gs) if g is not None}
        while True:
            needed = self._needed_by([*self.stack_cotangents, *(self.ends[i] for i in indices)])
            more = {i for i, a in enumerate(self.states) if a in needed}
            if more <= indices:
                return [i for i in sorted(indices) if self.states[i] in self.varied]
            indices |= more

    def _needed_by(self, ends: Iterable[ir.Value]) -> set[ir.Value]:
        """Return the values of the body that are needed to compute `ends`."""
        needed = set(ends)
        for node in reversed(self.copy.graph):
            if not needed.isdisjoint(node.outputs):
                needed.update(reads(node))
        return needed

    def defer(self, node: ir.Node, a: int, x: int, adjoint: Callable[..., ir.Value]) -> Deferred:
        """Hide the captured input `x` of `node` from the sweep; `a` is its other input."""
        y, factor, captured = node.outputs[0], node.inputs[a], node.inputs[x]
        assert factor is not None
        assert captured is not None
        hidden = new(self.op, captured)
        node.replace_input_with(x, hidden)
        return Deferred(y, factor, captured, hidden, adjoint)

    def differentiate(self, deferred: Sequence[Deferred]) -> bool:
        """Append the gradient of one iteration to the copy of the body; return if there is any."""
        op, inner, indices = self.op, self.copy.op, self._differentiated_states()
        ds = {i: new(inner, self.ends[i]) for i in indices}
        seeds = [*((self.ends[i], d) for i, d in ds.items()), *self.cotangents.items()]
        single = [a for a in self.elements if a in self.varied] + [one.y for one in deferred]
        wrt = [*(self.states[i] for i in indices), *single, *self.captured]
        gradients = self.copy.sweep(seeds, wrt)
        for one in deferred:
            ir.convenience.replace_all_uses_with(one.hidden, one.x)
        self.carried, self.gradients = [], {v: gradients[v] for v in single if v in gradients}
        self.deferred = [one for one in deferred if one.y in gradients]
        with inner:
            for i, d in ds.items():
                a, start = self.states[i], self._result_gs[i]
                same = is_tensor(a) and equal(dims(a), dims(d))
                after = gradients[a] if a in gradients else inner.zeros_like(d if same else a)
                start = op.zeros_like(self.results[i]) if start is None else start
                self.carried.append(Carried(self.initial[i], start, d, after))
            for v in self.captured:
                if v in gradients:
                    before = new(inner, v)
                    after = inner.total([before, gradients[v]])
                    self.carried.append(Carried(v, op.zeros_like(v), before, after))
        if not self.carried and not self.gradients:
            release([self.copy.graph])
        return bool(self.carried or self.gradients)

    def final_gradients(self, results: Iterable[ir.Value]) -> Pairs:
        """Return pairs of a value outside of the body and its gradient, which is in `results`."""
        pairs = zip(self.carried, results, strict=False)
        return [(c.of, self.op.set_type_like(d, c.of)) for c, d in pairs if c.of is not None]
