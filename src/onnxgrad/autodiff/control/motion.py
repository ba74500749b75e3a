"""Work that the iterations of a backward Scan need not do.

A matrix by which they multiply gets its gradient from one product of all iterations, for which the
factors are stacked; products and transcendental functions of the forward pass are kept. All that if
it is no larger than what an iteration carries, reads and returns: memory stays proportional to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.autodiff.control.copies import new
from onnxgrad.autodiff.control.iterations import Iterations
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.operators import RANDOM, TRANSCENDENTAL
from onnxgrad.graph.shapes import dims, is_stated, rank
from onnxgrad.graph.traversal import reads, subgraphs

_NEVER_FAIL = frozenset("Cast Identity Shape Size Transpose".split())


@dataclass
class Product:
    """y = alpha a w, or alpha a wT, of which the gradient by w is worked out after the Scan."""

    y: ir.Value
    a: ir.Value
    w: ir.Value
    hidden: ir.Value  # stands for w while the body is differentiated
    transposed: bool
    alpha: float

    def gradient(self, op: Emit, a: ir.Value, g: ir.Value) -> ir.Value:
        """Return alpha Σ aT g, or its transpose, of the stacks of a and of the gradient of y."""
        rows, columns = op.dim(self.w, 0), op.dim(self.w, 1)
        if self.transposed:
            a, g = g, a
        left = op.Reshape(a, op.vector(-1, rows))
        right = op.Reshape(g, op.vector(-1, columns))
        return op.set_type_like(op.Gemm(left, right, transA=1, alpha=self.alpha), self.w)


def put_off(back: Iterations) -> list[Product]:
    """Hide matrices from around the body, by which it multiplies, from the sweep."""
    room, found = _Room(back), []
    for node in back.copy.graph:
        get = node.attributes
        if node.domain or node.op_type not in ("MatMul", "Gemm") or get.get_int("transA", 0) == 1:
            continue
        (a, w), y = node.inputs[:2], node.outputs[0]
        fits = rank(w) == 2 and (rank(a) or 0) >= 2 and room.holds(a, y)
        if a is None or w is None or w not in back.around or not fits:
            continue
        hidden = new(back.op, w)
        node.replace_input_with(1, hidden)
        transposed, alpha = bool(get.get_int("transB", 0)), get.get_float("alpha", 1.0)
        found.append(Product(y, a, w, hidden, transposed, alpha))
    return found


def transcendental(back: Iterations) -> list[ir.Value]:
    """Return the results in the body that are worth keeping, and small enough."""
    room = _Room(back)
    found = (node for node in back.copy.graph if node.op_type in TRANSCENDENTAL)
    return [node.outputs[0] for node in found if room.holds(node.outputs[0])]


def show(products: Iterable[Product]) -> None:
    """Undo the hiding."""
    for p in products:
        ir.convenience.replace_all_uses_with(p.hidden, p.w)


def move_out(graph: ir.Graph, op: Emit, may_not_run: bool = False) -> None:
    """Move out of a body what is the same in every iteration.

    Where the body may not run at all, only what cannot fail is moved.
    """
    for node in list(graph):
        given = any(y.is_graph_output() for y in node.outputs)
        if given or node.op_type in RANDOM or any(subgraphs(node)):
            continue
        if may_not_run and node.op_type not in _NEVER_FAIL:
            continue
        if all(_is_outside(v, graph) for v in reads(node)):
            graph.remove(node)
            node.name = None  # the names of nodes are those of one graph
            op.graph.append(node)


def _is_outside(v: ir.Value, graph: ir.Graph) -> bool:
    node = v.producer()
    if node is not None:
        return node.graph is not graph
    return v.is_initializer() or (v.is_graph_input() and v.graph is not graph)


class _Room:
    """How many elements an iteration of the forward pass carries, reads and returns."""

    def __init__(self, back: Iterations) -> None:
        self._elements: Counter[tuple[str, ...]] = Counter()
        for v in (*back.states, *back.elements, *back.slices):
            size = _size(v)
            if size is not None:
                self._elements[size[1]] += size[0]

    def holds(self, *values: ir.Value | None) -> bool:
        """Tell whether each of `values` is proven to be no larger."""
        sizes = [(0, ()) if v is None else _size(v) for v in values]
        return all(s is not None and s[0] <= self._elements[s[1]] for s in sizes)


def _size(v: ir.Value) -> tuple[int, tuple[str, ...]] | None:
    """Return the number of elements of `v`: a number, times symbols; None where it is not known."""
    shape = dims(v)
    if shape is None or not all(is_stated(d) for d in shape):
        return None
    number = 1
    for d in shape:
        number *= d if isinstance(d, int) else 1
    return number, tuple(sorted(d for d in shape if isinstance(d, str)))
