"""Attention by blocks of queries, so that the scores of all of them are never in memory together.

softmax(Q KT) V of some queries does not depend on other queries. A `Scan` over blocks of queries
writes it, and the gradient of a Scan computes each iteration again: it keeps Q, K, V and the
result, not the scores (Rabe and Staats 2021, arXiv:2112.05682). Masks that the graph computes from
positions are computed for each block, too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.operators import ELEMENTWISE, REORDERS, SELECTS, made_by, marks
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.shapes import constant, dims, is_stated, rank

# the most queries of a block, for up to `KEYS` keys; for more keys, a block has down to half of
# them, as each block adds to the gradients of all keys
ROWS, KEYS = 512, 2048
LEAST = 1024  # queries: shorter attentions are not cut
_AFTER_SOFTMAX = (ELEMENTWISE & REORDERS) | SELECTS | {"IsNaN", "Where"}


# how many keys before and behind its own position a query sees; None: all keys
_Window: TypeAlias = tuple[int | None, int | None]


def compute_attention_by_blocks(op: Emit, keep: Collection[ir.Value]) -> None:
    """Rewrite each attention of long sequences in the graph of `op`: a Scan over blocks of queries.

    An attention is a Softmax over keys between two products, with elementwise operators around it.
    An attention stays unchanged if it is in a body of the graph, if anything else, such as a
    Dropout, reads its scores or weights, or if it has few queries.

    Args:
        op: emitter of a prepared graph. Nodes that are no longer needed stay in it.
        keep: values that somebody refers to, which stay.
    """
    kept = {*keep, *op.graph.outputs}
    for node in list(op.graph):
        if node.op_type in ("MatMul", "Reshape") and (found := _AttentionNodes.match(node, kept)):
            with op.at(node):
                ir.convenience.replace_all_uses_with(found.y, found.write_scan(op))


@dataclass(frozen=True)
class _MatrixProduct:
    """The matrix product a b of two values, and the `nodes` that compute it.

    With `heads`, the numbers of heads of a and of b, several heads of a share one of b.
    """

    a: ir.Value
    b: ir.Value
    nodes: tuple[ir.Node, ...]
    heads: tuple[int, int] | None = None

    @classmethod
    def match(cls, y: ir.Value | None) -> _MatrixProduct | None:
        """Return the matrix product that computes `y` with as many axes as its operand a; else
        None.
        """
        node = made_by(y, "MatMul")
        if node is not None and y is not None:
            a, b = node.inputs
            if a is None or b is None or rank(y) != rank(a) or (rank(b) or 0) < 2:
                return None
            return cls(a, b, (node,))
        apart = _match_head_split(y)
        one = None if apart is None else cls.match(apart[0])
        joined = None if one is None or one.heads else _match_head_split(one.a)
        if y is None or apart is None or one is None or joined is None:
            return None
        (_, heads, after), (a, shared, before), b = apart, joined, one.b
        shape, want = dims(a) or (None,) * 4, dims(y) or ()
        if shape[:3] != want[:3] or None in shape[1:3] or shape[1] != heads or rank(b) != 4:
            return None
        if (dims(b) or ())[1] != shared:
            return None
        return cls(a, b, (before, *one.nodes, after), (heads, shared))

    def write_for_block(self, op: Emit, a: ir.Value, b: ir.Value) -> ir.Value:
        """Write the product of a block's rows of `a` and the columns or rows of `b` that it may
        see.
        """
        if self.heads is None:
            return op.emit("MatMul", [a, b], {}, fresh=True)
        heads, shared = self.heads
        y = op.MatMul(op.Reshape(a, [0, shared, -1, 0]), b)
        return op.emit("Reshape", [y, op.const([0, heads, -1, 0])], {}, fresh=True)


def _match_head_split(y: ir.Value | None) -> tuple[ir.Value, int, ir.Node] | None:
    """Return x, n and the Reshape node if `y` = Reshape(x, [0, n, -1, 0]); None otherwise."""
    node = made_by(y, "Reshape")
    x = None if node is None else node.inputs[0]
    if node is None or x is None or "allowzero" in node.attributes or rank(x) != 4:
        return None
    target = constant(node.inputs[1])
    if target is None or target.shape != (4,) or target[[0, 2, 3]].tolist() != [0, -1, 0]:
        return None
    return x, int(target[1]), node


@dataclass
class _AttentionNodes:
    """The nodes of softmax(scores) V, where `rows` is the number of queries, the length of the last
    axis but one.

    - `y`: the result.
    - `last`: the product with V.
    - `inner`: the nodes and products that compute the weights, by their results, in topological
      order.
    - `sliced`: the values with the axis of the queries that `inner` reads.
    """

    y: ir.Value
    last: _MatrixProduct
    rows: Any
    inner: dict[ir.Value, ir.Node | _MatrixProduct] = field(default_factory=dict)
    sliced: list[ir.Value] = field(default_factory=list)

    @classmethod
    def match(cls, node: ir.Node, keep: Collection[ir.Value]) -> _AttentionNodes | None:
        """Return the attention whose result `node` computes; None for other nodes."""
        y = node.outputs[0]
        last, shape = _MatrixProduct.match(y), dims(y)
        if last is None or shape is None or len(shape) < 3:
            return None
        if any(n.outputs[0] in keep for n in last.nodes):
            return None
        rows = shape[-2]
        if not is_stated(rows) or (isinstance(rows, int) and rows < LEAST):
            return None
        found = cls(y, last, rows)
        return found if found._collect_value(last.a, keep) and found._is_attention() else None

    def _collect_value(self, v: ir.Value, keep: Collection[ir.Value]) -> bool:
        """Collect the value `v` and the nodes that compute it; return whether `v` can be cut into
        blocks of queries.
        """
        shape = dims(v)
        if shape is None or v in self.inner or v in self.sliced:
            return shape is not None
        if len(shape) < 2 or shape[-2] == 1:  # `v` is the same for all queries
            return True
        if shape[-2] != self.rows:
            return False
        node, product = v.producer(), None if v in keep else _MatrixProduct.match(v)
        if product is not None and any(n.outputs[0] in keep for n in product.nodes):
            product = None
        if product is not None and (dims(product.a) or (None, None))[-2] == self.rows:
            if product.a not in self.sliced:
                self.sliced.append(product.a)
            self.inner[v] = product
        elif node is None or v in keep or not _computes_by_row(node):
            self.sliced.append(v)
        elif all(x is None or self._collect_value(x, keep) for x in node.inputs):
            self.inner[v] = node
        else:
            return False
        return True

    def _is_attention(self) -> bool:
        """Return whether the collected nodes are an attention: one Softmax, of matrix products,
        whose scores and weights no other node reads.
        """
        own, after, large = set(self.last.nodes), set[ir.Value](), list[ir.Value]()
        for v, one in self.inner.items():
            if isinstance(one, _MatrixProduct):
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

    def write_scan(self, op: Emit) -> ir.Value:
        """Write the Scan over blocks of queries, and return the result of the attention."""
        near = self._visible_key_distances()
        keys_of_all = op.dim(self.last.b, -2)
        blocks = _QueryBlocks.choose(op, self.rows, self.sliced[0], keys_of_all, near)
        inner = Emit(ir.Graph([], [], nodes=[], name="queries"), outer=op)
        size: Any = blocks.size if isinstance(blocks.size, int) else op.name("queries")
        shapes = {x: [*(dims(x) or ())[:-2], size, (dims(x) or ())[-1]] for x in self.sliced}
        stacks, new = [], {}
        for x, shape in shapes.items():
            stacks.append(blocks.stack_blocks(op, x))
            stacks[-1].type, stacks[-1].shape = x.type, ir.Shape([blocks.length, *shape])
            name = inner.name(f"{x.name}_of_some")
            new[x] = ir.Value(name=name, type=x.type, shape=ir.Shape(shape))
        inner.graph.inputs[:] = list(new.values())
        keys = _KeyRange.locate(op, inner, blocks, near, keys_of_all) if near else None
        stacks += [] if keys is None else [keys.firsts]
        with inner:
            for v, one in (*self.inner.items(), (self.y, self.last)):
                z = self._copy_for_block(inner, one, new, keys)
                lengths = [*(dims(v) or ())]
                if len(lengths) > 1 and lengths[-2] == self.rows:
                    lengths[-2] = size
                if keys is not None and v is not self.y and lengths[-1] == self.key_count:
                    lengths[-1] = keys.length
                z.type, z.shape = v.type, ir.Shape(lengths)
                new[v] = z
            inner.give([new[self.y]])
        attributes = {"body": inner.graph, "num_scan_inputs": len(stacks)}
        found = op.emit("Scan", stacks, attributes, fresh=True)
        scan = found.producer()
        assert scan is not None
        scan.meta[marks.KEEPS_NOTHING] = True
        found.type = self.y.type
        found.shape = ir.Shape([blocks.length, *(dims(new[self.y]) or ())])
        return blocks.join_blocks(op, found, self.y, op.dim(self.last.b, -1))

    def _copy_for_block(
        self, inner: Emit, one: Any, new: dict[ir.Value, ir.Value], keys: _KeyRange | None
    ) -> ir.Value:
        """Write a copy of `one`, a node or a product, for a block of queries and the keys near
        it.
        """
        if isinstance(one, _MatrixProduct):
            axis = -2 if one is self.last else -1
            b = one.b if keys is None else keys.nearby_part(one.b, axis)
            return one.write_for_block(inner, new[one.a], b)
        operands = []
        for x in one.inputs:
            some = None if x is None else new.get(x, x)
            over_keys = x not in self.inner and (dims(x) or (1,))[-1] == self.key_count
            if some is not None and keys is not None and over_keys:
                some = keys.nearby_part(some, -1)
            operands.append(some)
        return inner.copy_node(one, operands)[0]

    @property
    def key_count(self) -> Any:
        """The number of keys: the length of the last axis of the weights."""
        return (dims(self.last.a) or (None,))[-1]

    def _visible_key_distances(self) -> _Window | None:
        """Return how many keys before and behind its own position a query sees; None if unknown."""
        nodes = [one for one in self.inner.values() if isinstance(one, ir.Node)]
        [masked] = [n.inputs[0] for n in nodes if n.op_type == "Softmax"]
        total = made_by(masked, "Add")
        where = made_by(masked if total is None else total.inputs[1], "Where")
        hidden = None if where is None else constant(where.inputs[2])
        if where is None or hidden is None or not np.isneginf(hidden).all():
            return None
        conditions, found = [where.inputs[0]], dict[str, Any]()
        while conditions:
            condition = conditions.pop()
            if condition is not None:
                found |= condition.meta
                both = made_by(condition, "And")
                conditions += [] if both is None else both.inputs
        alike = all(
            one.op_type in ELEMENTWISE | {"Softmax"}
            and all((dims(x) or (1,))[-1] in (1, self.key_count) for x in one.inputs)
            for one in nodes
        )
        near = found.get(marks.FIRST_KEY), found.get(marks.LAST_KEY)
        return near if alike and is_stated(self.key_count) and near != (None, None) else None


@dataclass
class _KeyRange:
    """The keys that the queries of a block may see, from `begin` (None: the first key) to `end`.

    `firsts` are the first queries of all blocks, and `length` stands for the number of these keys.
    """

    inner: Emit
    firsts: ir.Value
    begin: ir.Value | None
    end: ir.Value
    length: str
    parts: dict[tuple[ir.Value, int], ir.Value] = field(default_factory=dict)

    @classmethod
    def locate(
        cls, op: Emit, inner: Emit, blocks: _QueryBlocks, near: _Window, keys: Any
    ) -> _KeyRange:
        """Write nodes that compute the first and the last key that the queries of a block see.

        The rows that are repeated at the end see keys that are that much further in front.
        """
        before, behind = near
        more = blocks.count * blocks.size - blocks.rows
        firsts = op.arange(blocks.count) * blocks.size
        firsts.shape = ir.Shape([blocks.length])
        first = ir.Value(name=inner.name("first"), type=firsts.type, shape=ir.Shape([]))
        inner.graph.inputs.append(first)
        begin, end = None, op.const(op.vector(keys))
        back = None if before is None else op.const(op.vector(more + before))
        ahead = None if behind is None else op.const(op.vector(blocks.size + behind))
        row = inner.Reshape(first, [1])
        if back is not None:
            begin = inner.Max(inner.Sub(row, back), [0])
        if ahead is not None:
            end = inner.Min(inner.Add(row, ahead), end)
        return cls(inner, firsts, begin, end, op.name("keys"))

    def nearby_part(self, x: ir.Value, axis: int) -> ir.Value:
        """Return the slice of `x` along its axis of keys, `axis`, for the keys that a block
        sees.
        """
        if (x, axis) not in self.parts:
            lengths = [*(dims(x) or ())]
            lengths[axis] = self.length
            # of each of the two Slices, the gradient is one Pad
            at, op = [len(lengths) + axis], self.inner
            y = op.emit("Slice", [x, [0], self.end, at], {}, fresh=True)
            y.type, y.shape = x.type, ir.Shape([*lengths])
            if self.begin is not None:
                y.shape[axis] = op.name("keys_before")
                y = op.emit("Slice", [y, self.begin, [np.iinfo(np.int64).max], at], {}, fresh=True)
            y.type, y.shape = x.type, ir.Shape(lengths)
            self.parts[x, axis] = y
        return self.parts[x, axis]


@dataclass
class _QueryBlocks:
    """The number and the size of the blocks into which the queries, the last axis but one, are cut.

    - `rows`, `count`, `size`: of all, of blocks and of one block: ints, or int64 tensors [1].
    - `repeats`: whether blocks have more rows than there are: then the last ones are there twice,
      so that no row is one that the model would not compute.
    """

    rows: Any
    count: Any
    size: Any
    repeats: bool

    @classmethod
    def choose(
        cls, op: Emit, rows: Any, x: ir.Value, keys: Any, near: _Window | None
    ) -> _QueryBlocks:
        """Choose the number and the size of the blocks of `x`, which has `rows` queries."""
        bounds = [n for n in near or () if n is not None]
        narrow = len(bounds) == 2
        most = min(ROWS, max(ROWS // 2, sum(bounds))) if narrow else ROWS
        if isinstance(rows, int):
            if isinstance(keys, int) and not narrow:
                most = min(most, max(ROWS // 2, ROWS * KEYS // max(keys, 1)))
            least = -(-rows // most)
            count = next((n for n in range(least, 2 * least) if rows % n == 0), least)
            size = -(-rows // count)
            return cls(rows, count, size, count * size != rows)
        total = op.dim(x, -2)
        count = op.Max((total + (most - 1)) / most, [1])
        if not narrow:
            many = (total * keys + (ROWS * KEYS - 1)) / (ROWS * KEYS)
            count = op.Max(count, op.Min(many, (total + (ROWS // 2 - 1)) / (ROWS // 2)))
        size = (total + count - 1) / count
        return cls(total, count, size, True)

    @property
    def length(self) -> int | None:
        """The number of blocks if it is static; None otherwise."""
        return self.count if isinstance(self.count, int) else None

    def stack_blocks(self, op: Emit, x: ir.Value) -> ir.Value:
        """Return `x` cut into blocks of queries, which are stacked along a new first axis."""
        n, last = len(dims(x) or ()), op.dim(x, -1)
        if self.repeats:
            start = 2 * self.rows - self.count * self.size
            end = op.const([np.iinfo(np.int64).max])
            x = op.Concat(x, op.Slice(x, op.vector(start), end, [n - 2]), axis=n - 2)
        parts = op.Reshape(x, op.vector(*[0] * (n - 2), self.count, self.size, last))
        return op.Transpose(parts, perm=[n - 2, *range(n - 2), n - 1, n])

    def join_blocks(self, op: Emit, stack: ir.Value, like: ir.Value, width: Any) -> ir.Value:
        """Return the stacked blocks of queries as one tensor, of the type and shape of `like`."""
        n = len(dims(like) or ())
        y = op.Transpose(stack, perm=[*range(1, n - 1), 0, n - 1, n])
        total = self.count * self.size
        y = op.Reshape(y, op.vector(*[0] * (n - 2), total, width))
        if self.repeats:
            y = op.Slice(y, [0], op.vector(self.rows), [n - 2])
        return op.set_type_like(y, like)


def _computes_by_row(node: ir.Node) -> bool:
    """Return whether each row of a node's result depends on the same row of the operands only.

    Rows are along the last axis but one, and operands may be broadcast along it.
    """
    n = rank(node.outputs[0])
    if node.domain or n is None or len(node.outputs) > 1:
        return False
    last, at = (-1, n - 1), {"Slice": 3, "ReduceMax": 1}.get(node.op_type)
    if node.op_type in ("Softmax", "Concat"):
        lengths = {(dims(x) or (None, None))[-2] for x in (*node.inputs, *node.outputs)}
        return int_attribute(node, "axis") in last and len(lengths) == 1
    if at is None:
        return node.op_type in ELEMENTWISE
    axes = constant(node.inputs[at]) if len(node.inputs) > at else None
    keeps = node.op_type == "Slice" or int_attribute(node, "keepdims") == 1
    return keeps and axes is not None and axes.size == 1 and int(axes.ravel()[0]) in last
