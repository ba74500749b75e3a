"""Copies of the last layers of a language model for chunks of positions or blocks of words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.autodiff.reverse import sweep
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.traversal import dependents
from onnxgrad.operators import ELEMENTWISE, VIEWS, made_by, marks
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.quantization import unpacked_weight
from onnxgrad.operators.shapes import Dims, dims, is_real, rank


class Head:
    """The last layers of a language model: from features of positions to logits over the
    vocabulary.

    Attributes:
        leaves: the features of positions that the nodes read, (rows, tokens, width); the logits
            themselves if there is no such node.
        shared: the other values that the nodes read, such as weights.
        written: the nodes that `write_logits` has written.
    """

    def __init__(self, op: Emit, logits: ir.Value) -> None:
        self.op, self.logits, self.width = op, logits, (dims(logits) or (None,))[-1]
        inputs = [x for x in op.graph.inputs if x.const_value is None]
        self._data = dependents(list(op.graph), inputs)
        self.leaves: list[ir.Value] = []
        self.nodes: dict[ir.Value, ir.Node] = {}  # by their results, in topological order
        self.written: list[ir.Node] = []
        self._collect_head_nodes(logits)
        read = (x for n in self.nodes.values() for x in self._fold_transpose(n)[1] if x is not None)
        self.shared = [x for x in dict.fromkeys(read) if x not in self._data]

    def _collect_head_nodes(self, y: ir.Value) -> None:
        """Add the nodes that compute `y` from features to `nodes`, and the features themselves to
        `leaves`.
        """
        if y in self.nodes or y in self.leaves:
            return
        operands = self._positionwise_operands(y)
        for x in operands:
            if (dims(x) or (None,))[-1] == self.width:
                self._collect_head_nodes(x)
            elif x not in self.leaves:
                self.leaves.append(x)
        node = y.producer()
        if operands and node is not None:
            self.nodes[y] = node
        else:
            self.leaves.append(y)

    def _positionwise_operands(self, y: ir.Value) -> list[ir.Value]:
        """Return the data operands of the node of `y` if each position of `y` depends on the same
        position of the operands only, else [].
        """
        node, shape = y.producer(), dims(y)
        if node is None or node.graph is not self.op.graph or not shape or len(node.outputs) > 1:
            return []
        data = [x for x in node.inputs if x in self._data]
        rest = [x for x in node.inputs if x is not None and x not in self._data]
        kind = "" if node.domain else node.op_type
        if kind in VIEWS and kind not in ("Shape", "Size", "Identity"):
            kept = [x for x in data[:1] if (dims(x) or (None,))[-1] == shape[-1]]
            return [x for x in kept if len(data) == 1 and rank(x) in (2, 3)]
        if kind in ELEMENTWISE:
            # the other operands are broadcast along positions
            fits = all((s := dims(x)) is not None and set(s[:-1]) <= {1} for x in rest)
        elif kind == "MatMul":
            fits = data == [node.inputs[0]] and rank(node.inputs[1]) == 2
        elif kind == "Gemm":
            fits = data == [node.inputs[0]] and not int_attribute(node, "transA")
        else:
            fits = node.op_type == "MatMulNBits" and data == [node.inputs[0]]
        alike = all(_differ_only_in_last_axis(dims(x), shape) and is_real(x) for x in data)
        return data if fits and alike else []

    def write_logits(
        self,
        inner: Emit,
        given: Mapping[ir.Value, ir.Value],
        width: Any = None,
        gate: ir.Value | None = None,
    ) -> ir.Value:
        """Write a copy of the head's nodes for a chunk of positions or words; return the logits.

        Args:
            inner: emitter of a body of the graph.
            given: the values that replace the leaves, and shared values in blocks of words.
            width: the number of words of the block; None: all.
            gate: a value computed before weights of few bits are unpacked, once and outside of the
                body; None: they are not unpacked.
        """
        new = dict(given)
        for y, node in self.nodes.items():
            first = node.inputs[0]
            if not node.domain and node.op_type in VIEWS:
                new[y] = new[first]  # type: ignore[index]
                continue
            kind, operands, attributes = self._fold_transpose(node)
            inputs = [x if x is None else new.get(x, x) for x in operands]
            [z] = inner.emit_many(kind, inputs, attributes, 1, node.domain, fresh=True)
            some = next(new[x] for x in node.inputs if x in new and x not in self.shared)
            last = dims(y)[-1:] if width is None else [width]  # type: ignore[index]
            z.type, z.shape = y.type, ir.Shape([*dims(some)[:1], *last])  # type: ignore[index]
            new[y] = z
            made = z.producer()
            assert made is not None
            self.written.append(made)
            if node.op_type == "MatMulNBits" and gate is not None:
                with self.op:
                    made.meta[marks.UNPACKED] = unpacked_weight(self.op, node, gate)
        return new[self.logits]

    def write_gradients(
        self, inner: Emit, logits: ir.Value, dz: ir.Value, of: Sequence[ir.Value]
    ) -> list[ir.Value]:
        """Write the gradients of the loss w.r.t. the values in `of`, given the gradient `dz` of the
        loss w.r.t. the logits.
        """
        seeds = {logits: inner.set_type_like(inner.Cast(dz, to=logits.dtype), logits)}
        found = sweep(inner, seeds, of, nodes=self.written) | seeds
        return [found[x] if x in found else inner.zeros_like(x) for x in of]

    def vocabulary_axes(self) -> dict[ir.Value, int] | None:
        """Return {weight: axis} for the head's weights that have an axis of the vocabulary.

        None: the logits of a block of words cannot be computed without the other words.
        """
        axes: dict[ir.Value, int] = {}
        if any((dims(x) or (None,))[-1] == self.width for x in self.leaves):
            return None
        for node in self.nodes.values():
            if not node.domain and node.op_type in VIEWS:
                continue
            if node.domain or (self._is_matrix_product(node) and node.inputs[0] not in self.leaves):
                return None
            _, operands, attributes = self._fold_transpose(node)
            transposed = self._is_matrix_product(node) and attributes.get("transB", 0)
            for i, x in enumerate(operands):
                if x is None or x not in self.shared:
                    continue
                shape = dims(x) or ()
                axis = 0 if transposed and i == 1 else len(shape) - 1
                if not all(isinstance(d, int) for d in shape):
                    return None
                if shape and shape[axis] == self.width and axes.setdefault(x, axis) != axis:
                    return None
                if (not shape or shape[axis] != self.width) and (x in axes or set(shape) - {1}):
                    return None
        return axes

    @staticmethod
    def _is_matrix_product(node: ir.Node) -> bool:
        return not node.domain and node.op_type in ("MatMul", "Gemm")

    def _fold_transpose(self, node: ir.Node) -> tuple[str, list[ir.Value | None], dict[str, Any]]:
        """Return (op type, operands, attributes) of a node, where a MatMul with transposed weights
        becomes a Gemm with `transB`.

        A product with the result of a Transpose becomes a Gemm that reads the operand of the
        Transpose, so that there is no copy of the matrix.
        """
        operands = list(node.inputs)
        attributes = {a.name: a.value for a in node.attributes.values()}
        matrix = _matrix_before_transpose(operands[1]) if self._is_matrix_product(node) else None
        if matrix is None or matrix in self._data:
            return node.op_type, operands, attributes
        kept = {"transB": 1 - int(attributes.get("transB", 0))}
        operands[1] = matrix
        return "Gemm", operands, attributes | kept


def _matrix_before_transpose(x: ir.Value | None) -> ir.Value | None:
    """Return the matrix whose two axes a Transpose swaps to compute `x`, else None."""
    node = made_by(x, "Transpose")
    exact = x is not None and x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    if node is None or not exact or rank(node.inputs[0]) != 2:
        return None
    return node.inputs[0] if list(node.attributes.get_ints("perm", (1, 0))) == [1, 0] else None


def _differ_only_in_last_axis(shape: Dims | None, other: Dims) -> bool:
    """Return whether two shapes are equal except for the last axis, and the last axis is static."""
    if shape is None or not isinstance(shape[-1], int) or len(shape) not in (2, 3):
        return False
    return shape[:-1] == other[:-1] and None not in shape
