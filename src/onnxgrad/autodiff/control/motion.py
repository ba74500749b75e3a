"""Work that is moved out of the iterations of a backward Scan or Loop.

The gradient of a captured matrix by which the iterations multiply is computed once, by one product
of the stacked factors of all iterations. Products and transcendental functions of the forward pass
are saved rather than computed again. Both only for tensors that are not larger than all that an
iteration carries, reads and returns, so that memory stays proportional to that.

So is the gradient of a captured tensor of which they gather rows, such as x[t] of a sequence, by
one scatter: adding in every iteration would take time and memory in proportion to all of it.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import onnx_ir as ir

from onnxgrad.autodiff.control.iterations import Deferred, Iterations
from onnxgrad.graph import tidy
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.traversal import reads
from onnxgrad.operators import TRANSCENDENTAL
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.indexing import scatter_rows
from onnxgrad.operators.shapes import dims, is_stated, rank, volume

_NEVER_FAIL = frozenset("Cast Identity Shape Size Transpose".split())


def lookups(back: Iterations) -> list[Deferred]:
    """Defer the gradients of captured tensors of which the body gathers single rows, y = x[i]."""
    return [
        back.defer(node, 1, 0, scatter_rows)
        for node in back.copy.graph
        if (node.domain, node.op_type) == ("", "Gather")
        and int_attribute(node, "axis") == 0
        and node.inputs[0] in back.captured
        and rank(node.inputs[0])
        and rank(node.inputs[1]) == 0
    ]


def products(back: Iterations) -> list[Deferred]:
    """Defer the gradients of captured matrices by which the body multiplies, y = alpha a w."""
    budget, deferred = _Budget(back), []
    for node in back.copy.graph:
        get = node.attributes
        if node.domain or node.op_type not in ("MatMul", "Gemm") or get.get_int("transA", 0) == 1:
            continue
        (a, w), y = node.inputs[:2], node.outputs[0]
        fits = rank(w) == 2 and (rank(a) or 0) >= 2 and budget.covers(a, y)
        if w in back.captured and fits:
            how = get.get_int("transB", 0), get.get_float("alpha", 1.0)
            deferred.append(back.defer(node, 0, 1, partial(_product_adjoint, *how)))
    return deferred


def _product_adjoint(transposed, alpha, op, w, a, g):
    """Return alpha Σ aT g, or its transpose if y = alpha a wT."""
    factors = (g, a) if transposed else (a, g)
    left, right = (op.Reshape(v, op.vector(-1, op.dim(w, i))) for i, v in enumerate(factors))
    return op.Gemm(left, right, transA=1, alpha=alpha)


def transcendental(back: Iterations) -> list[ir.Value]:
    """Return the results of transcendental functions in the body that are small enough to save."""
    budget = _Budget(back)
    results = (n.outputs[0] for n in back.copy.graph if n.op_type in TRANSCENDENTAL)
    return [y for y in results if budget.covers(y)]


def move_out(graph: ir.Graph, op: Emit, may_not_run: bool = False) -> None:
    """Move nodes that compute the same in every iteration from the body `graph` to that of `op`.

    With `may_not_run`, the body may run zero times, and only nodes that cannot fail are moved.
    """

    def worth(node: ir.Node) -> bool:
        is_output = any(y.is_graph_output() for y in node.outputs)
        return not is_output and (not may_not_run or node.op_type in _NEVER_FAIL)

    free = (v for n in graph for v in reads(n) if v.producer() is None and not v.is_initializer())
    tidy.move_out(graph, op, worth, {v for v in free if not v.is_graph_input()})


class _Budget:
    """How many elements an iteration of the forward pass carries, reads and returns."""

    def __init__(self, back: Iterations) -> None:
        self._elements: Counter[tuple[str, ...]] = Counter()
        for v in (*back.states, *back.elements, *back.slices):
            size = _size(v)
            if size is not None:
                self._elements[size[1]] += size[0]

    def covers(self, *values: ir.Value | None) -> bool:
        """Return whether each of `values` is proven to have no more elements."""
        sizes = [(0, ()) if v is None else _size(v) for v in values]
        return all(s is not None and s[0] <= self._elements[s[1]] for s in sizes)


def _size(v: ir.Value) -> tuple[int, tuple[str, ...]] | None:
    """Return the number of elements of `v` as (factor, symbols), or None if it is unknown."""
    shape = dims(v)
    return volume(shape) if shape is not None and all(map(is_stated, shape)) else None
