"""What the body of a Scan computes from scanned values, for all iterations at once.

A node costs about a microsecond, as much as the arithmetic on a few thousand elements. In the
backward pass of a recurrent layer, most nodes compute slopes of gates that are known beforehand.
"""

from __future__ import annotations

from math import prod
from typing import Any

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.operators import ELEMENTWISE
from onnxgrad.graph.shapes import dims
from onnxgrad.graph.tidy import drop_unused
from onnxgrad.graph.traversal import subgraphs

_MOST = 1 << 15  # elements of a value in one iteration: larger ones would leave the cache


def scanned_outside(op: Emit, target: Any) -> None:
    """Move the nodes of Scans that depend on scanned values only in front of them.

    Products are put in the order in which most of their factors can move.
    """
    for node in list(op.graph):
        if node.op_type == "Scan" and not node.domain and _simple(node):
            _Body(op, node, target.rows).move_out()
    if op.wrote:
        drop_unused(op.graph)


def _simple(scan: ir.Node) -> bool:
    """Return whether all scanned values are slices along the first axis, in one direction."""
    directions = scan.attributes.get_ints("scan_input_directions", ())
    return not any(scan.attributes.get_ints("scan_input_axes", ())) and len(set(directions)) < 2


class _Body:
    """The body of a Scan; `stacks` has the values of all iterations, [T, ...], by the value."""

    def __init__(self, op: Emit, scan: ir.Node, rows: int) -> None:
        self.rows = rows
        (self.body,) = subgraphs(scan)
        self.op, self.scan, self.inner = op, scan, Emit(self.body, outer=op)
        self.count = len(scan.inputs) - scan.attributes["num_scan_inputs"].as_int()
        pairs = zip(self.body.inputs, scan.inputs, strict=True)
        self.stacks = {x: whole for x, whole in list(pairs)[self.count :] if whole is not None}

    def move_out(self) -> None:
        """Move what can be computed for all iterations at once; set the inputs of the Scan."""
        for node in list(self.body):
            if self._can_move(node):
                self._move(node)
            elif node.op_type == "Mul" and not node.domain:
                self._join_factors(node)
            elif node.op_type == "Concat" and not node.domain:
                self._join_products(node)
        if not self.op.wrote:
            return
        drop_unused(self.body)
        self._flatten()
        states = list(self.body.inputs)[: self.count]
        scanned = [x for x in self.stacks if x.uses()] or list(self.stacks)[:1]
        inputs = [*list(self.scan.inputs)[: self.count], *(self.stacks[x] for x in scanned)]
        self.body.inputs[:] = [*states, *scanned]
        self.scan.resize_inputs(len(inputs))
        for i, x in enumerate(inputs):
            self.scan.replace_input_with(i, x)
        attributes = self.scan.attributes
        backward = attributes.get_ints("scan_input_directions", (0,))[0]
        attributes.pop("scan_input_axes", None)
        attributes.add(ir.AttrInt64("num_scan_inputs", len(scanned)))
        attributes.add(ir.AttrInt64s("scan_input_directions", [backward] * len(scanned)))

    # -- moving ------------------------------------------------------------------------------

    def _can_move(self, node: ir.Node) -> bool:
        """Return whether `node` reads only scanned values and what stays the same."""
        operands = [x for x in node.inputs if x is not None]
        scanned = [x for x in operands if x in self.stacks]
        fixed = [x for x in operands if x not in self.stacks]
        if node.domain or not scanned or not all(map(self._is_fixed, fixed)):
            return False
        if any(y.is_graph_output() or not self._is_small(y) for y in node.outputs):
            return False
        if node.op_type == "Concat":
            return not fixed
        if node.op_type == "Split":
            return scanned == [node.inputs[0]]
        rank = len(dims(node.outputs[0]) or ())
        ranks = [len(shape) if (shape := dims(x)) is not None else -1 for x in scanned]
        low = all((shape := dims(x)) is not None and len(shape) <= rank for x in fixed)
        return node.op_type in ELEMENTWISE and low and all(n == rank for n in ranks)

    def _is_fixed(self, x: ir.Value) -> bool:
        """Return whether `x` comes from outside of the body, or is a constant."""
        node = x.producer()
        if node is not None:
            return node.graph is not self.body
        return x not in self.body.inputs

    def _move(self, node: ir.Node) -> None:
        attributes = {name: a.value for name, a in node.attributes.items()}
        if node.op_type in ("Concat", "Split"):
            axis = attributes.get("axis", 0)
            attributes["axis"] = axis if axis < 0 else axis + 1
        operands = [None if x is None else self._outside(x) for x in node.inputs]
        with self.op.at(self.scan):
            wholes = self.op.emit_many(node.op_type, operands, attributes, len(node.outputs))
        for y, whole in zip(list(node.outputs), wholes, strict=True):
            ir.convenience.replace_all_uses_with(y, self._scanned(y, whole))

    def _outside(self, x: ir.Value) -> ir.Value:
        """Return what stands for `x` in the graph around the body."""
        if x in self.stacks:
            return self.stacks[x]
        if x.is_initializer() and x.graph is self.body and x.const_value is not None:
            return self.op.const(x.const_value.numpy())
        return x

    def _scanned(self, like: ir.Value, whole: ir.Value) -> ir.Value:
        """Return a new scanned value, of the shape and type of `like`; `whole` is its stack."""
        length = (dims(next(iter(self.stacks.values()))) or (None,))[0]
        whole.type, whole.shape = like.type, ir.Shape([length, *(dims(like) or ())])
        x = ir.Value(name=self.inner.name("scanned"), type=like.type, shape=like.shape)
        self.stacks[x] = whole
        return x

    # -- regrouping ----------------------------------------------------------------------------

    def _factor(self, y: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
        """Return (x, k) where `y` = x k is read once, k is scanned, and all have one shape."""
        node = None if y is None else y.producer()
        if node is None or node.op_type != "Mul" or node.graph is not self.body:
            return None
        if y is None or len(y.uses()) != 1 or y.is_graph_output():
            return None
        return self._split(node)

    def _split(self, node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
        a, b = node.inputs
        for x, k in ((a, b), (b, a)):
            if k in self.stacks and x is not None and x not in self.stacks:
                same = dims(x) == dims(node.outputs[0]) == dims(k)
                return (x, k) if same and self._is_small(x) else None
        return None

    def _join_factors(self, node: ir.Node) -> None:
        """(x a) b = x (a b)"""
        if (outer := self._split(node)) is None or (inner := self._factor(outer[0])) is None:
            return
        (_, b), (x, a) = outer, inner
        with self.op.at(self.scan):
            whole = self.op.Mul(self.stacks[a], self.stacks[b])
        node.replace_input_with(0, x)
        node.replace_input_with(1, self._scanned(b, whole))

    def _join_products(self, node: ir.Node) -> None:
        """[x a, y b] = [x, y] [a, b]"""
        pairs = [pair for x in node.inputs if (pair := self._factor(x)) is not None]
        y, axis = node.outputs[0], node.attributes["axis"].as_int()
        if len(pairs) < len(node.inputs) or axis < 0 or not self._is_small(y):
            return
        with self.op.at(self.scan):
            whole = self.op.Concat(*(self.stacks[k] for _, k in pairs), axis=axis + 1)
        factor = self._scanned(y, whole)
        with self.inner.at(node):
            joined = self.inner.Concat(*(x for x, _ in pairs), axis=axis)
            joined = self.inner.set_type_like(joined, y)
            product = self.inner.emit("Mul", [joined, factor], {}, fresh=True)
        product = self.inner.set_type_like(product, y)
        ir.convenience.replace_all_uses_with(y, product, replace_graph_outputs=True)

    def _flatten(self) -> None:
        """[[x, y], z] = [x, y, z]"""
        for node in [n for n in self.body if n.op_type == "Concat" and not n.domain]:
            y, uses = node.outputs[0], list(node.outputs[0].uses())
            if len(uses) != 1 or y.is_graph_output() or uses[0].node.op_type != "Concat":
                continue
            around, i = uses[0]
            if around.domain or around.attributes["axis"].value != node.attributes["axis"].value:
                continue
            parts = [*around.inputs[:i], *node.inputs, *around.inputs[i + 1 :]]
            around.resize_inputs(len(parts))
            for j, part in enumerate(parts):
                around.replace_input_with(j, part)
        drop_unused(self.body)

    def _is_small(self, value: ir.Value) -> bool:
        """Return whether `value` has few elements: those of unknown lengths count the rows."""
        shape = dims(value)
        if shape is None or None in shape:
            return False
        return prod(d if isinstance(d, int) else self.rows for d in shape) <= _MOST
