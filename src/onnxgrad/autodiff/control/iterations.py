"""The backward pass of Loop and Scan: the iterations in reverse, and work moved out of them.

The gradient of a captured matrix by which the iterations multiply is computed once, by one product
of the stacked factors of all iterations. Products and transcendental functions of the forward pass
are saved rather than computed again. Both only for tensors that are not larger than all that an
iteration carries, reads and returns, so that memory stays proportional to that.

So is the gradient of a captured tensor of which they gather rows, such as x[t] of a sequence, by
one scatter: adding in every iteration would take time and memory in proportion to all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx_ir as ir

from onnxgrad.autodiff.control.copies import Pairs, SubgraphCopy, is_tensor, unbound_gradient
from onnxgrad.autodiff.reverse import dependent_values
from onnxgrad.graph import tidy
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import detach_graphs
from onnxgrad.graph.traversal import captured, reads
from onnxgrad.operators import TRANSCENDENTAL, operator_of
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.indexing import scatter_rows
from onnxgrad.operators.shapes import dims, equal, is_stated, rank, volume


@dataclass
class CarriedGrad:
    """A gradient that the backward loop carries from one iteration to the next."""

    of: ir.Value | None  # the value outside of the body whose gradient this is
    start: ir.Value  # the initial gradient, outside of the body
    before: ir.Value  # the gradient at the start of a backward iteration, in the body
    after: ir.Value  # the gradient at the end of the iteration, in the body


@dataclass
class Deferral:
    """A node y = f(a, x) of the body of a loop, whose gradient w.r.t. a captured x is computed
    after the loop.

    `a` differs from iteration to iteration.
    """

    y: ir.Value
    a: ir.Value
    x: ir.Value
    hidden: ir.Value  # replaces `x` while the body is differentiated
    adjoint: Callable[..., ir.Value]  # (op, x, a, g of all iterations) -> the gradient of `x`


class LoopIterations:
    """The iterations of a Loop or Scan `node`, and a copy of its body that becomes the backward
    body.
    """

    # set by `differentiate`
    carried: list[CarriedGrad]  # gradients of states, and sums of the gradients of captured values
    gradients: dict[ir.Value, ir.Value]  # of an iteration: of elements and deferred results
    deferred: list[Deferral]  # only nodes whose result has a gradient

    def __init__(
        self,
        op: Emit,
        node: ir.Node,
        gs: Sequence[ir.Value | None],
        active: Collection[ir.Value],
        states: int,
        before: tuple[int, int] = (0, 0),
    ) -> None:
        """Copy the body of `node`; `before` is how many of its inputs and outputs precede the
        `states`.
        """
        self.op, self.node = op, node
        self.copy = copy = SubgraphCopy(op, node, "body")
        inputs, outputs = copy.inputs[before[0] :], copy.outputs[before[1] :]
        operands = node.inputs[len(node.inputs) - len(inputs) :]
        # carried from iteration to iteration: operands -> inputs -> outputs of the body -> results
        self.initial, self.states, self.ends = operands[:states], inputs[:states], outputs[:states]
        self.results, self._result_gs = node.outputs[:states], gs[:states]
        self.sequences, self.elements = operands[states:], inputs[states:]  # stacks and slices
        self.slices = outputs[states:]  # outputs of the body, which `node` stacks
        pairs = zip(self.slices, gs[states:], strict=True)
        self.stack_cotangents = {y: g for y, g in pairs if g is not None}
        self.captured = [v for v in captured(node) if v in active]
        self.varied = self._varying_values(active)
        self.cotangents = {
            y: unbound_gradient(op, y) for y in self.stack_cotangents
        }  # in the backward body

    def original_state(self, state: ir.Value) -> ir.Value:
        """Return the input of the forward body of which `state` is the copy."""
        return self.copy.original.inputs[self.copy.inputs.index(state)]

    def _varying_values(self, active: Collection[ir.Value]) -> set[ir.Value]:
        """Return the values of the body that depend, in some iteration, on values to
        differentiate.
        """
        outer, inner = [*self.initial, *self.sequences], [*self.states, *self.elements]
        start = {*self.captured, *(v for x, v in zip(outer, inner, strict=True) if x in active)}
        while True:
            varied, _ = dependent_values(self.copy.graph, start)
            more = {a for a, b in zip(self.states, self.ends, strict=True) if b in varied} - start
            if not more:
                return varied
            start |= more

    def _differentiated_state_indices(self) -> list[int]:
        """Return the indices of the states that have a gradient."""
        indices = {i for i, g in enumerate(self._result_gs) if g is not None}
        while True:
            needed = self._values_behind([*self.stack_cotangents, *(self.ends[i] for i in indices)])
            more = {i for i, a in enumerate(self.states) if a in needed}
            if more <= indices:
                return [i for i in sorted(indices) if self.states[i] in self.varied]
            indices |= more

    def _values_behind(self, ends: Iterable[ir.Value]) -> set[ir.Value]:
        """Return the values `ends`, and the values of the body that `ends` are computed from."""
        needed = set(ends)
        for node in reversed(self.copy.graph):
            if not needed.isdisjoint(node.outputs):
                needed.update(reads(node))
        return needed

    def defer_gradient(
        self, node: ir.Node, a: int, x: int, adjoint: Callable[..., ir.Value]
    ) -> Deferral:
        """Defer the gradient w.r.t. the captured input number `x` of `node` until after the loop;
        number `a` is the other input.
        """
        y, factor, captured = node.outputs[0], node.inputs[a], node.inputs[x]
        assert factor is not None
        assert captured is not None
        hidden = unbound_gradient(self.op, captured)
        node.replace_input_with(x, hidden)
        return Deferral(y, factor, captured, hidden, adjoint)

    def differentiate(self, deferred: Sequence[Deferral]) -> bool:
        """Append the gradient of one iteration to the copy of the body; return whether any gradient
        exists.
        """
        op, inner, indices = self.op, self.copy.op, self._differentiated_state_indices()
        ds = {i: unbound_gradient(inner, self.ends[i]) for i in indices}
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
                self.carried.append(CarriedGrad(self.initial[i], start, d, after))
            for v in self.captured:
                if v in gradients:
                    before = unbound_gradient(inner, v)
                    after = inner.total([before, gradients[v]])
                    self.carried.append(CarriedGrad(v, op.zeros_like(v), before, after))
        if not self.carried and not self.gradients:
            detach_graphs([self.copy.graph])
        return bool(self.carried or self.gradients)

    def write_backward(
        self,
        op_type: str,
        before: Mapping[ir.Value, Any],
        after: Mapping[ir.Value, ir.Value],
        attributes: Mapping[str, Any],
        stacked: int,
    ) -> list[ir.Value]:
        """Append the backward node; return the carried gradients, then its `stacked` outputs.

        `before` and `after` have the operand for each input of the body in front of the carried
        gradients, and behind them.
        """
        body, carried = self.copy.graph, self.carried
        body.inputs[:] = [*before, *(c.before for c in carried), *after]
        operands = [*before.values(), *(c.start for c in carried), *after.values()]
        width = len(carried) + stacked
        return self.op.emit_many(op_type, operands, {"body": body, **attributes}, width, fresh=True)

    def outer_gradients(
        self, results: Iterable[ir.Value], deferred: Iterable[tuple[Deferral, ir.Value, ir.Value]]
    ) -> Pairs:
        """Return pairs of a value outside of the loop's body and the gradient of that value.

        `results` are the outputs of the backward node. `deferred` has the a and the g of all
        iterations, stacked along axis 0.
        """
        pairs = [(c.of, d) for c, d in zip(self.carried, results, strict=False) if c.of is not None]
        pairs += [(late.x, late.adjoint(self.op, late.x, a, g)) for late, a, g in deferred]
        return [(x, self.op.set_type_like(dx, x)) for x, dx in pairs]


# -- work that is moved out of the iterations ------------------------------------------------------


def defer_lookups(back: LoopIterations) -> list[Deferral]:
    """Defer, until after the loop, the gradients of captured tensors from which the body gathers
    single rows, y = x[i].
    """
    return [
        back.defer_gradient(node, 1, 0, scatter_rows)
        for node in back.copy.graph
        if (node.domain, node.op_type) == ("", "Gather")
        and int_attribute(node, "axis") == 0
        and node.inputs[0] in back.captured
        and rank(node.inputs[0])
        and rank(node.inputs[1]) == 0
    ]


def defer_products(back: LoopIterations) -> list[Deferral]:
    """Defer, until after the loop, the gradients of captured matrices by which the body
    multiplies, y = alpha a w.
    """
    budget, deferred = _ElementBudget(back), []
    for node in back.copy.graph:
        get = node.attributes
        if node.domain or node.op_type not in ("MatMul", "Gemm") or get.get_int("transA", 0) == 1:
            continue
        (a, w), y = node.inputs[:2], node.outputs[0]
        fits = rank(w) == 2 and (rank(a) or 0) >= 2 and budget.has_room_for(a, y)
        if w in back.captured and fits:
            how = get.get_int("transB", 0), get.get_float("alpha", 1.0)
            deferred.append(back.defer_gradient(node, 0, 1, partial(_matrix_gradient, *how)))
    return deferred


def _matrix_gradient(transposed, alpha, op, w, a, g):
    """Return the gradient of w in y = alpha a w from a and the cotangents g of all iterations:
    alpha Σ aT g, transposed if y = alpha a wT.
    """
    factors = (g, a) if transposed else (a, g)
    left, right = (op.Reshape(v, op.vector(-1, op.dim(w, i))) for i, v in enumerate(factors))
    return op.Gemm(left, right, transA=1, alpha=alpha)


def results_worth_saving(back: LoopIterations) -> list[ir.Value]:
    """Return the results of transcendental functions in the body that are small enough to save."""
    budget = _ElementBudget(back)
    results = (n.outputs[0] for n in back.copy.graph if n.op_type in TRANSCENDENTAL)
    return [y for y in results if budget.has_room_for(y)]


def move_constant_work(graph: ir.Graph, op: Emit, may_not_run: bool = False) -> None:
    """Move nodes that compute the same in every iteration from the body `graph` to the graph of
    `op`.

    With `may_not_run`, the body may run zero times, and only nodes that cannot fail are moved.
    """

    def is_worth_moving(node: ir.Node) -> bool:
        is_output = any(y.is_graph_output() for y in node.outputs)
        return not is_output and (not may_not_run or "never_fails" in operator_of(node).traits)

    free = (v for n in graph for v in reads(n) if v.producer() is None and not v.is_initializer())
    tidy.move_out_of_body(graph, op, is_worth_moving, {v for v in free if not v.is_graph_input()})


class _ElementBudget:
    """The number of elements that one iteration of the forward pass carries, reads and returns."""

    def __init__(self, back: LoopIterations) -> None:
        self._elements: Counter[tuple[str, ...]] = Counter()
        for v in (*back.states, *back.elements, *back.slices):
            if (size := _symbolic_element_count(v)) is not None:
                self._elements[size[1]] += size[0]

    def has_room_for(self, *values: ir.Value | None) -> bool:
        """Return whether each of `values` is proven to have at most the number of elements of the
        budget.
        """
        sizes = [(0, ()) if v is None else _symbolic_element_count(v) for v in values]
        return all(s is not None and s[0] <= self._elements[s[1]] for s in sizes)


def _symbolic_element_count(v: ir.Value) -> tuple[int, tuple[str, ...]] | None:
    """Return the number of elements of a value as (factor, symbols), or None if it is unknown."""
    shape = dims(v)
    return volume(shape) if shape is not None and all(map(is_stated, shape)) else None
