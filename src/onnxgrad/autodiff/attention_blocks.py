"""Attention by blocks of queries, so that the scores of all of them are never in memory together.

softmax(Q KT) V of some queries needs nothing of the others. A `Scan` over blocks of queries writes
it, and the gradient of a Scan computes each iteration again: it keeps Q, K, V and the result, not
the scores (Rabe and Staats 2021, arXiv:2112.05682). Masks that the graph computes from positions
are computed for each block, too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.control.scan import KEEPS_NOTHING
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.operators import ELEMENTWISE
from onnxgrad.graph.shapes import constant, dims, is_stated, rank
from onnxgrad.graph.traversal import made_by

ROWS = 512  # queries of a block, at most
LEAST = 1024  # fewer queries stay together
_AFTER_SOFTMAX = frozenset("Cast Identity IsNaN Slice Where".split())


def attention_by_blocks(op: Emit, keep: Collection[ir.Value]) -> None:
    """Let the graph of `op` compute each attention of long sequences by blocks of queries.

    An attention is a Softmax over keys between two products, with elementwise operators around it.
    One stays as it is that is in a body of the graph, whose scores or weights are read by anything
    else, such as a Dropout, or that has few queries.

    Args:
        op: emitter of a prepared graph. Nodes that are no longer needed stay in it.
        keep: values that somebody refers to, which stay.
    """
    kept = {*keep, *op.graph.outputs}
    for node in list(op.graph):
        if node.op_type in ("MatMul", "Reshape") and (found := _Attention.of(node, kept)):
            with op.at(node):
                ir.convenience.replace_all_uses_with(found.y, found.write(op))


@dataclass(frozen=True)
class _Product:
    """A product a b, computed by `nodes`.

    With `heads`, the numbers of those of a and of b, several heads of a share one of b.
    """

    a: ir.Value
    b: ir.Value
    nodes: tuple[ir.Node, ...]
    heads: tuple[int, int] | None = None

    @classmethod
    def of(cls, y: ir.Value | None) -> _Product | None:
        """Return the product that is `y`, where a has as many axes, or None."""
        node = made_by(y, "MatMul")
        if node is not None and y is not None:
            a, b = node.inputs
            fits = a is not None and b is not None and rank(y) == rank(a) and (rank(b) or 0) >= 2
            return cls(a, b, (node,)) if fits else None  # type: ignore[arg-type]
        apart = _reshaped(y)
        one = None if apart is None else cls.of(apart[0])
        joined = None if one is None or one.heads else _reshaped(one.a)
        if y is None or apart is None or one is None or joined is None:
            return None
        (_, heads, after), (a, shared, before), b = apart, joined, one.b
        shape, want = dims(a) or (None,) * 4, dims(y) or ()
        if shape[:3] != want[:3] or None in shape[1:3] or shape[1] != heads or rank(b) != 4:
            return None
        if (dims(b) or ())[1] != shared:
            return None
        return cls(a, b, (before, *one.nodes, after), (heads, shared))

    def again(self, op: Emit, a: ir.Value) -> ir.Value:
        """Write it for some rows of a."""
        if self.heads is None:
            return op.emit("MatMul", [a, self.b], {}, fresh=True)
        heads, shared = self.heads
        y = op.MatMul(op.Reshape(a, [0, shared, -1, 0]), self.b)
        return op.emit("Reshape", [y, op.const([0, heads, -1, 0])], {}, fresh=True)


def _reshaped(y: ir.Value | None) -> tuple[ir.Value, int, ir.Node] | None:
    """Return x, n and the node where y = Reshape(x, [0, n, -1, 0])."""
    node = made_by(y, "Reshape")
    if node is None or "allowzero" in node.attributes or rank(node.inputs[0]) != 4:
        return None
    target = constant(node.inputs[1])
    if target is None or target.shape != (4,) or target[[0, 2, 3]].tolist() != [0, -1, 0]:
        return None
    return node.inputs[0], int(target[1]), node  # type: ignore[return-value]


@dataclass
class _Attention:
    """softmax(...) V of the queries along the last axis but one, of length `rows`.

    - `y`: the result.
    - `last`: the product with V.
    - `inner`: what computes the weights, by the results, in topological order.
    - `sliced`: what that reads that has the axis of the queries.
    """

    y: ir.Value
    last: _Product
    rows: Any
    inner: dict[ir.Value, ir.Node | _Product] = field(default_factory=dict)
    sliced: list[ir.Value] = field(default_factory=list)

    @classmethod
    def of(cls, node: ir.Node, keep: Collection[ir.Value]) -> _Attention | None:
        """Return the attention whose result `node` computes, or None."""
        y = node.outputs[0]
        last, shape = _Product.of(y), dims(y)
        if last is None or shape is None or len(shape) < 3 or y in keep:
            return None
        rows = shape[-2]
        if not is_stated(rows) or (isinstance(rows, int) and rows < LEAST):
            return None
        found = cls(y, last, rows)
        return found if found._visit(last.a, keep) and found._is_attention() else None

    def _visit(self, v: ir.Value, keep: Collection[ir.Value]) -> bool:
        """Collect `v` and what computes it; return whether all of it can be cut into blocks."""
        shape = dims(v)
        if shape is None or v in self.inner or v in self.sliced:
            return shape is not None
        if len(shape) < 2 or shape[-2] == 1:  # the same for all queries
            return True
        if shape[-2] != self.rows:
            return False
        node, product = v.producer(), None if v in keep else _Product.of(v)
        if product is not None and (dims(product.a) or (None, None))[-2] == self.rows:
            if product.a not in self.sliced:
                self.sliced.append(product.a)
            self.inner[v] = product
        elif node is None or v in keep or not _is_by_rows(node):
            self.sliced.append(v)
        elif all(x is None or self._visit(x, keep) for x in node.inputs):
            self.inner[v] = node
        else:
            return False
        return True

    def _is_attention(self) -> bool:
        """Return whether it has one Softmax, of products, and nothing else reads what is large."""
        own, after, large = set(self.last.nodes), set[ir.Value](), list[ir.Value]()
        for v, one in self.inner.items():
            if isinstance(one, _Product):
                own.update(one.nodes)
                large.append(v)
                continue
            own.add(one)
            if one.op_type == "Softmax":
                if after or not large:
                    return False
                after.add(v)
            elif not after.isdisjoint(one.inputs):
                if one.op_type not in _AFTER_SOFTMAX:
                    return False
                after.add(v)
        return self.last.a in after and own.issuperset(
            user for v in (*large, *after) for user, _ in v.uses()
        )

    # -- writing ------------------------------------------------------------------------------

    def write(self, op: Emit) -> ir.Value:
        """Write the Scan, and return the result."""
        blocks = _Blocks.of(op, self.rows, self.sliced[0])
        inner = Emit(ir.Graph([], [], nodes=[], name="queries"), outer=op)
        size: Any = blocks.size if isinstance(blocks.size, int) else op.name("queries")

        def shape_of_block(x: ir.Value) -> ir.Shape:
            lengths = dims(x) or ()
            return ir.Shape([*lengths[:-2], size, lengths[-1]])

        stacks = [blocks.stack(op, x) for x in self.sliced]
        new = {
            x: ir.Value(name=inner.name(f"{x.name}_of_some"), type=x.type, shape=shape_of_block(x))
            for x in self.sliced
        }
        for x, stack in zip(self.sliced, stacks, strict=True):
            stack.type, stack.shape = x.type, ir.Shape([blocks.length, *new[x].shape])  # type: ignore[misc]
        inner.graph.inputs[:] = list(new.values())
        with inner:
            for v, one in (*self.inner.items(), (self.y, self.last)):
                if isinstance(one, _Product):
                    z = one.again(inner, new[one.a])
                else:
                    operands = [x if x is None else new.get(x, x) for x in one.inputs]
                    [z] = inner.again(one, operands)
                lengths = dims(v) or ()
                z.type, z.shape = v.type, v.shape
                if len(lengths) > 1 and lengths[-2] == self.rows:
                    z.shape = shape_of_block(v)
                new[v] = z
            inner.give([new[self.y]])
        attributes = {"body": inner.graph, "num_scan_inputs": len(stacks)}
        found = op.emit("Scan", stacks, attributes, fresh=True)
        found.producer().meta[KEEPS_NOTHING] = True  # type: ignore[union-attr]
        found.type = self.y.type
        found.shape = ir.Shape([blocks.length, *shape_of_block(self.y)])
        return blocks.joined(op, found, self.y, op.dim(self.last.b, -1))


@dataclass
class _Blocks:
    """How the axis of the queries is cut, the last but one.

    - `rows`, `count`, `size`: of all, of blocks and of one block: ints, or int64 tensors [1].
    - `repeats`: whether blocks have more rows than there are: then the last ones are there twice,
      so that no row is one that the model would not compute.
    """

    rows: Any
    count: Any
    size: Any
    repeats: bool

    @classmethod
    def of(cls, op: Emit, rows: Any, x: ir.Value) -> _Blocks:
        """Return the blocks of `x`, which has so many rows."""
        if isinstance(rows, int):
            least = -(-rows // ROWS)
            count = next((n for n in range(least, 2 * least) if rows % n == 0), least)
            size = -(-rows // count)
            return cls(rows, count, size, count * size != rows)
        total = op.dim(x, -2)
        count = op.Max((total + (ROWS - 1)) / ROWS, [1])
        size = (total + count - 1) / count
        return cls(total, count, size, True)

    @property
    def length(self) -> int | None:
        """The number of blocks, if it is known."""
        return self.count if isinstance(self.count, int) else None

    def stack(self, op: Emit, x: ir.Value) -> ir.Value:
        """Return `x` as blocks, stacked in front."""
        n, last = len(dims(x) or ()), op.dim(x, -1)
        if self.repeats:
            start = 2 * self.rows - self.count * self.size
            end = op.const([np.iinfo(np.int64).max])
            x = op.Concat(x, op.Slice(x, op.vector(start), end, [n - 2]), axis=n - 2)
        parts = op.Reshape(x, op.vector(*[0] * (n - 2), self.count, self.size, last))
        return op.Transpose(parts, perm=[n - 2, *range(n - 2), n - 1, n])

    def joined(self, op: Emit, stack: ir.Value, like: ir.Value, width: Any) -> ir.Value:
        """Return the result `like`, of rows of that width, from those of blocks."""
        n = len(dims(like) or ())
        y = op.Transpose(stack, perm=[*range(1, n - 1), 0, n - 1, n])
        total = self.count * self.size
        y = op.Reshape(y, op.vector(*[0] * (n - 2), total, width))
        if self.repeats:
            y = op.Slice(y, [0], op.vector(self.rows), [n - 2])
        return op.set_type_like(y, like)


def _is_by_rows(node: ir.Node) -> bool:
    """Return whether a row of the result is computed from the same row of operands that have it.

    Rows are along the last axis but one, and operands may be broadcast along it.
    """
    n, get = rank(node.outputs[0]), node.attributes
    if node.domain or n is None or len(node.outputs) > 1:
        return False
    last, at = (-1, n - 1), {"Slice": 3, "ReduceMax": 1}.get(node.op_type)
    if node.op_type in ("Softmax", "Concat"):
        lengths = {(dims(x) or (None, None))[-2] for x in (*node.inputs, *node.outputs)}
        return get.get_int("axis", -1) in last and len(lengths) == 1
    if at is None:
        return node.op_type in ELEMENTWISE
    axes = constant(node.inputs[at]) if len(node.inputs) > at else None
    keeps = node.op_type == "Slice" or get.get_int("keepdims", 1) == 1
    return keeps and axes is not None and axes.size == 1 and int(axes.ravel()[0]) in last
