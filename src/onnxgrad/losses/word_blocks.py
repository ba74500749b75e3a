"""Cross-entropy over a large vocabulary by blocks of words; logits of a block are computed twice.

One pass over the blocks computes the logarithm of the sum of the exponentials. Another one computes
the logits of each block again, and the gradients (Wijmans et al. 2024, arXiv:2411.09009).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.losses.head import Head
from onnxgrad.losses.positions import LabelPositions, logit_gradient, weighted_sum
from onnxgrad.losses.spec import where_const, widen_to_float32
from onnxgrad.operators.shapes import dims

BLOCK = 1024  # approximate number of words in a block
_LEAST = {ir.DataType.FLOAT: np.finfo(np.float32).min, ir.DataType.DOUBLE: np.finfo(np.float64).min}

Pairs = list[tuple[ir.Value, ir.Value]]


def block_sizes(words: Any) -> tuple[int, int] | None:
    """Return (number of words, words in a block): a divisor of the number of words near `BLOCK`.

    None: the number of words is not static, or has no such divisor.
    """
    if not isinstance(words, int):
        return None
    near = range(min(8 * BLOCK, words), BLOCK // 4 - 1, -1)
    divisors = (d for d in near if words % d == 0)
    block = min(divisors, key=lambda d: abs(log2(d / BLOCK)), default=None)
    return None if block is None else (words, block)


class BlockwiseLoss:
    """The cross-entropy over a large vocabulary, computed by a Scan over blocks of words; `total`
    is the weighted sum of the losses.

    Args:
        op: emitter of the graph.
        head: the nodes that compute the logits.
        positions: the positions, all in one chunk.
        axes: the axis of the words of each shared value that has one.
        sizes: the numbers of all words and of the words in a block.
        smoothing: as `label_smoothing` of `cross_entropy`.
    """

    def __init__(
        self,
        op: Emit,
        head: Head,
        positions: LabelPositions,
        axes: dict[ir.Value, int],
        sizes: tuple[int, int],
        smoothing: float,
    ) -> None:
        self.op, self.head, self.axes, self.smoothing = op, head, axes, smoothing
        (self.words, self.block), self.dtype = sizes, positions.weights.dtype
        self.length = op.name("positions")
        self.leaves = {x: self._squeeze_only_chunk(positions.gather_chunks(x)) for x in head.leaves}
        self.target = op.Unsqueeze(self._squeeze_only_chunk(positions.target), [1])
        self.target.shape = ir.Shape([self.length, 1])
        self.weights = op.Unsqueeze(self._squeeze_only_chunk(positions.weights), [1])
        self.weights.shape = ir.Shape([self.length, 1])
        self.lse, losses = self._write_position_losses()
        self.total = weighted_sum(op, losses, self.weights)

    def _squeeze_only_chunk(self, chunks: ir.Value) -> ir.Value:
        """Write the only chunk without its first axis: (size, ...) for `chunks` (1, size, ...)."""
        rows = self.op.Squeeze(chunks, [0])
        rows.type = chunks.type
        rows.shape = ir.Shape([self.length, *(dims(chunks) or ())[2:]])
        return rows

    def _write_position_losses(self) -> tuple[ir.Value, ir.Value]:
        """Write for each position the logsumexp of its logits and its cross-entropy, both
        (positions, 1).
        """
        op, zero, dtype = self.op, self.op.zeros_like(self.weights), self.dtype
        assert dtype is not None
        least = op.set_type_like(zero + op.const(_LEAST[dtype], dtype), zero)
        starts = [least, zero, zero, *([zero] if self.smoothing else [])]
        inner, operands, sliced = self._begin_scan_body(starts)
        most, total, chosen, *sums = inner.graph.inputs[: len(starts)]
        with inner:
            z = self.head.write_logits(inner, self.leaves | sliced, self.block)
            z = widen_to_float32(inner, z)
            new = inner.Max(most, inner.ReduceMax(z, [1], keepdims=1))
            total = total * inner.Exp(most - new)
            total = total + inner.ReduceSum(inner.Exp(z - new), [1], keepdims=1)
            index, inside = self._label_index_in_block(inner)
            here = inner.GatherElements(z, index, axis=1)
            chosen = chosen + inner.Where(inside, here, inner.const(0.0, self.dtype))
            sums = [s + inner.ReduceSum(z, [1], keepdims=1) for s in sums]
            inner.give([new, total, chosen, *sums])
        found = self._write_block_scan(inner, operands, len(starts), len(starts))
        most, total, chosen, *sums = (op.set_type_like(y, zero) for y in found)
        lse = op.set_type_like(most + op.Log(total), zero)
        for s in sums:
            chosen = (1.0 - self.smoothing) * chosen + (self.smoothing / self.words) * s
        return lse, lse - chosen

    def write_gradients(
        self, shared: Sequence[ir.Value], wanted: Sequence[ir.Value], op: Emit, scale: ir.Value
    ) -> Pairs:
        """Write the gradients of `scale` times the loss w.r.t. the weights in `shared` and the
        features in `wanted`.
        """
        self.op = op
        scanned = [x for x in shared if x in self.axes]
        summed = [*(x for x in shared if x not in self.axes), *(self.leaves[x] for x in wanted)]
        weights = self.weights * op.Cast(scale, to=self.dtype)
        inner, operands, sliced = self._begin_scan_body([op.zeros_like(x) for x in summed])
        before = inner.graph.inputs[: len(summed)]
        with inner:
            z = self.head.write_logits(inner, self.leaves | sliced, self.block)
            p = inner.Exp(widen_to_float32(inner, z) - self.lse)
            index, inside = self._label_index_in_block(inner)
            hit = where_const(inner, inside, self.smoothing - 1.0, 0.0, self.weights)
            dz = logit_gradient(inner, p, (index, hit), weights, self.smoothing / self.words)
            found = self.head.write_gradients(
                inner, z, dz, [*summed, *(sliced[x] for x in scanned)]
            )
            sums = [b + g for b, g in zip(before, found, strict=False)]
            inner.give([*sums, *found[len(summed) :]])
        results = self._write_block_scan(inner, operands, len(summed), len(summed) + len(scanned))
        whole = [
            self._join_gradients(y, x) for x, y in zip(scanned, results[len(summed) :], strict=True)
        ]
        totals = (op.set_type_like(y, x) for y, x in zip(results, summed, strict=False))
        return [*zip(summed, totals, strict=True), *zip(scanned, whole, strict=True)]

    def _begin_scan_body(
        self, starts: Sequence[ir.Value]
    ) -> tuple[Emit, list[ir.Value], dict[ir.Value, ir.Value]]:
        """Return a Scan body over blocks of words, the operands of the Scan, and the slice of each
        weight in the body.

        The last input of the body is the first word of the block.
        """
        op = self.op
        inner = Emit(ir.Graph([], [], nodes=[], name="words"), outer=op)
        inputs = [ir.Value(name=inner.name("sum"), type=v.type, shape=v.shape) for v in starts]
        operands, sliced = list(starts), {}
        for x, axis in self.axes.items():
            shape = list(dims(x) or ())
            shape[axis] = self.block
            if axis == 0:  # a Scan takes slices along axis 0 without a copy
                stack = op.Reshape(x, [self.words // self.block, *shape])
                operands.append(op.set_type_like(stack, x))
                stack.shape = ir.Shape([self.words // self.block, *shape])
                name = inner.name(f"{x.name}_of_some")
                sliced[x] = ir.Value(name=name, type=x.type, shape=ir.Shape(shape))
                inputs.append(sliced[x])
        first = ir.Value(
            name=inner.name("first"), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([])
        )
        operands.append(op.const(np.arange(0, self.words, self.block)))
        inner.graph.inputs[:] = [*inputs, first]
        with inner:
            begin = inner.Reshape(first, [1])
            end = begin + np.int64(self.block)
            for x, axis in self.axes.items():
                if axis:
                    shape = list(dims(x) or ())
                    shape[axis] = self.block
                    bounds = begin, end, inner.const([axis])
                    sliced[x] = inner.emit("Slice", [x, *bounds], {}, fresh=True)
                    sliced[x].type, sliced[x].shape = x.type, ir.Shape(shape)
        return inner, operands, sliced

    def _label_index_in_block(self, inner: Emit) -> tuple[ir.Value, ir.Value]:
        """Write (index of each label within the block, or 0; whether the label is in the block)."""
        index = self.target - inner.graph.inputs[-1]
        inside = inner.And(
            inner.GreaterOrEqual(index, np.int64(0)), inner.Less(index, np.int64(self.block))
        )
        return inner.Where(inside, index, np.int64(0)), inside

    def _write_block_scan(
        self, inner: Emit, operands: Sequence[ir.Value], states: int, outputs: int
    ) -> list[ir.Value]:
        attributes = {"body": inner.graph, "num_scan_inputs": len(operands) - states}
        return self.op.emit_many("Scan", operands, attributes, outputs, fresh=True)

    def _join_gradients(self, stack: ir.Value, like: ir.Value) -> ir.Value:
        """Write the gradient w.r.t. the weight `like` from the stack of its gradients for each
        block.
        """
        op, axis, shape = self.op, self.axes[like], dims(like) or ()
        part = [*shape[:axis], self.block, *shape[axis + 1 :]]
        stack.type = like.type
        stack.shape = ir.Shape([self.words // self.block, *part])
        if axis:
            order = [*range(1, axis + 1), 0, *range(axis + 1, len(shape) + 1)]
            stack = op.Transpose(stack, perm=order)
        whole = op.emit("Reshape", [stack, op.const(list(shape))], {}, fresh=True)
        return op.set_type_like(whole, like)
