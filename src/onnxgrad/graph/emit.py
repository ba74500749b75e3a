"""Emit: the only class that creates ONNX nodes; the same call again returns the same node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.writer import Writer
from onnxgrad.operators.shapes import dims, equal, rank, static

_DETACHED = 2.0**100


class Emit(Writer):
    """Writes nodes into a graph: the argument `op` of rules, lowerings, losses and optimizers.

    `op.MatMul(a, b)` writes a node and returns its output; inside `with op:`, so does `a * b`. The
    methods of its base, `Writer`, create nodes, names and constants. Those of this class count,
    split, broadcast, and undo broadcasting.

    Examples:
        >>> import onnx_ir as ir
        >>> from onnxgrad import Emit
        >>> x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", 3]))
        >>> graph = ir.Graph([x], [], nodes=[], opset_imports={"": 20})
        >>> with Emit(graph) as op:
        ...     y = op.sum_to(2.0 * x, op.ReduceSum(x, [0], keepdims=1))
        >>> [node.op_type for node in graph], tuple(y.shape)
        (['Mul', 'ReduceSum', 'ReduceSum'], (1, 3))
    """

    def again(self, node: ir.Node, inputs: Sequence[ir.Value | None]) -> list[ir.Value]:
        """Return the outputs of a new node like `node`, without subgraphs, that reads `inputs`."""
        attributes = {a.name: a.value for a in node.attributes.values()}
        outputs = self.emit_many(
            node.op_type, inputs, attributes, len(node.outputs), node.domain, fresh=True
        )
        return [self.set_type_like(y, old) for y, old in zip(outputs, node.outputs, strict=True)]

    def detached(self, x: ir.Value) -> ir.Value:
        """Return `x`, float32 below 2^28, without a gradient.

        Floor has none, and scaled so, it changes no number above 2^-76.
        """
        return self.Mul(self.Floor(self.Mul(x, _DETACHED)), 1 / _DETACHED)

    def arange(self, n: int | ir.Value) -> ir.Value:
        """Return 0, 1, ..., n - 1 as int64; `n` may be an int64 tensor of one element."""
        if isinstance(n, int):
            return self.const(np.arange(n))
        if rank(n) != 0:
            n = self.Reshape(n, []) if rank(n) is None else self.Squeeze(n, [0])
        return self.Range(np.int64(0), n, np.int64(1))

    def split(self, x: ir.Value, parts: Any, axis: int) -> list[ir.Value]:
        """Return the parts of `x` along `axis`: so many equal ones, or of these lengths."""
        shape, attributes, operands = dims(x), {"axis": axis}, [x]
        if isinstance(parts, int):
            whole, attributes["num_outputs"] = (shape or {axis: None})[axis], parts
            lengths = [whole // parts if isinstance(whole, int) else None] * parts
        else:
            operands.append(self.const(parts))
            [count] = static(dims(operands[1])) or ()
            lengths = [None] * count if isinstance(parts, ir.Value) else list(parts)
        outputs = self.emit_many("Split", operands, attributes, len(lengths))
        if shape is not None:
            for y, length in zip(outputs, lengths, strict=True):
                y.shape = ir.Shape(shape)
                y.shape[axis] = length
        return outputs

    def expand_to(self, g: ir.Value, like: ir.Value) -> ir.Value:
        """Return `g` broadcast to the shape of `like`; both have the same dtype."""
        have, want = dims(g), dims(like)
        if equal(have, want):
            return g
        if want is not None and 0 in want:  # onnxruntime drops an Expand to length 0
            return self.zeros_like(like)
        if have is not None and want is not None and len(have) == len(want):
            target = [1 if h == w is not None else w for h, w in zip(have, want, strict=True)]
            if static(tuple(target)) is not None:  # where the target is 1, g keeps its length
                return self.set_type_like(self.Expand(g, target), like)
        return self.set_type_like(self.Expand(g, self.shape_of(like)), like)

    def sum_to(self, g: ir.Value, x: ir.Value) -> ir.Value:
        """Return `g` summed to the shape of `x`, over the axes along which `x` was broadcast.

        Args:
            g: the gradient with respect to `x` after broadcasting, of the dtype of `x`.
            x: the operand before broadcasting.
        """
        have, want = dims(g), dims(x)
        if equal(have, want):
            return g
        if have is not None and want is not None and len(have) >= len(want):
            lead = len(have) - len(want)
            pairs = list(enumerate(zip(have[lead:], want, strict=True), lead))
            if all(h == w is not None or isinstance(w, int) for _, (h, w) in pairs):
                axes = [i for i, (h, w) in pairs if w == 1 and h != 1]
                if axes:
                    g = self.ReduceSum(g, axes, keepdims=1)
                if lead:
                    g = self.ReduceSum(g, list(range(lead)), keepdims=0)
                return self.set_type_like(g, x)
        return self._sum_to_at_run_time(g, x)

    def _sum_to_at_run_time(self, g: ir.Value, x: ir.Value) -> ir.Value:
        g_rank, x_rank, shape = rank(g), rank(x), self.Shape(x)
        if g_rank is not None and x_rank is not None:
            ones = self.const([1] * (g_rank - x_rank))
        else:
            missing = self.Shape(self.Shape(g)) - self.Shape(shape)
            ones = self.ConstantOfShape(missing, value=ir.tensor(np.ones(1, np.int64)))
            ones.dtype = ir.DataType.INT64
        padded = self.Concat(ones, shape, axis=0)
        axes = self.Squeeze(self.NonZero(self.Equal(padded, [1])), [0])
        summed = self.ReduceSum(g, axes, keepdims=1, noop_with_empty_axes=1)
        return self.set_type_like(self.Reshape(summed, shape, allowzero=1), x)

    def mT(self, x: ir.Value) -> ir.Value:  # noqa: N802 - its name in NumPy and PyTorch
        """Return `x` with its last two axes swapped; it must have at least two."""
        n = rank(x)
        if n is None:
            y = self.Cast(x, to=ir.DataType.FLOAT) if x.dtype == ir.DataType.BFLOAT16 else x
            return self.Cast(self.Einsum(y, equation="...ij->...ji"), to=x.dtype)
        return self.Transpose(x, perm=[*range(n - 2), n - 1, n - 2])
