"""Positions (row, token) at which logits of a large vocabulary are compared with labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.losses.classification import weight_array
from onnxgrad.operators.shapes import dims, rank

_END = np.iinfo(np.int64).max


@dataclass(frozen=True)
class WeightedLabels:
    """The labels and weights of a cross entropy over a large vocabulary.

    - `label`: class indices, of the shape of the logits without the last axis.
    - `weight`: sample weights of rows or of labels; None: 1.
    - `ignore_index`: the label that has no loss.
    - `shift`: the logits at a position of axis 1 are compared with the label at the next one.
    - `smoothing`, `class_weight`: as `label_smoothing` and `class_weight` of `cross_entropy`, one
      of which may be set.
    """

    label: ir.Value
    weight: ir.Value | None
    ignore_index: int
    shift: bool = False
    smoothing: float = 0.0
    class_weight: Any = None


class LabelPositions:
    """The positions (row, token) whose labels are not ignored, in chunks of equal size, padded by
    positions of weight 0.

    A chunk has at most `most` positions; None: all positions are one chunk.

    Attributes:
        total: the sum of the weights, computed from labels and weights only.
        target, weights: the label at each position, and its weight, (count, size).
    """

    def __init__(
        self, op: Emit, labels: WeightedLabels, words: Any, dtype: ir.DataType, most: int | None
    ) -> None:
        self.op, label, last = op, labels.label, None
        ignored = np.int64(labels.ignore_index)
        target = label
        if labels.shift:
            last = op.vector(op.dim(label, 0), 1)
            none = op.Expand(ignored, last)
            target = op.Concat(op.Slice(label, [1], [_END], [1]), none, axis=1)
        target = op.Reshape(target, [-1])
        kept = op.Not(op.Equal(target, ignored))
        weights = op.Cast(kept, to=dtype)
        if labels.weight is not None:
            weights = weights * self._weight_vector(op.Cast(labels.weight, to=dtype), label, last)
        at = op.Squeeze(op.NonZero(kept), [0])
        if labels.class_weight is not None:
            table = weight_array(labels.class_weight, words).astype(dtype.numpy())
            weights = weights * op.Gather(op.const(table), op.Where(kept, target, np.int64(0)))
        self.total = op.ReduceSum(weights, keepdims=0)
        self.total.shape = ir.Shape([])
        number, one = op.Size(at), np.int64(1)
        count: Any = one
        if most is not None:
            count = op.Max((number + np.int64(most - 1)) / np.int64(most), one)
        size = op.Max((number + count - one) / count, one)
        self.lengths = [op.Reshape(v, [1]) for v in (count, size)]
        pads = op.Concat([0], op.Reshape(count * size - number, [1]), axis=0)
        self.at = op.Pad(at, pads)
        self.target, self.weights = (
            self._reshape_to_chunks(op.Pad(op.Gather(v, at), pads)) for v in (target, weights)
        )

    def _weight_vector(self, weight: ir.Value, label: ir.Value, last: Any) -> ir.Value:
        """Write sample weights as a vector with one weight for each position, shifted as the labels
        if `last` is given.
        """
        op = self.op
        if rank(weight) == 1:
            weight = op.Reshape(weight, [-1] + [1] * ((rank(label) or 1) - 1))
        every = op.Expand(weight, op.Shape(label))
        if last is not None:
            zero = op.Expand(op.const(0.0, weight.dtype), last)
            every = op.Concat(op.Slice(every, [1], [_END], [1]), zero, axis=1)
        return op.Reshape(every, [-1])

    def _reshape_to_chunks(self, x: ir.Value, *width: int) -> ir.Value:
        """Reshape `x` (positions, *width) to chunks, (count of chunks, size of a chunk, *width)."""
        y = self.op.Reshape(x, self.op.vector(*self.lengths, *width))
        y.type, y.shape = x.type, ir.Shape([None, None, *width])
        return y

    def gather_chunks(self, x: ir.Value) -> ir.Value:
        """Write the elements of `x` (..., width) at the positions with labels, in chunks."""
        width = (dims(x) or (None,))[-1]
        assert isinstance(width, int)
        flat = x if rank(x) == 2 else self.op.Reshape(x, [-1, width])
        rows = self.op.Gather(flat, self.at, axis=0)
        rows.type = x.type
        return self._reshape_to_chunks(rows, width)


def weighted_sum(op: Emit, values: ir.Value, weights: ir.Value) -> ir.Value:
    """Write sum(values * weights), where a value of weight 0 adds 0 even if it is infinite."""
    zero = op.const(0.0, weights.dtype)
    total = op.ReduceSum(op.Where(op.Equal(weights, zero), zero, values * weights), keepdims=0)
    total.shape = ir.Shape([])
    return total


def logit_gradient(
    op: Emit, p: ir.Value, hits: tuple[ir.Value, ir.Value], weights: ir.Value, share: float
) -> ir.Value:
    """Write the gradient of the cross-entropy w.r.t. logits, w (p - t), from the probabilities p,
    weights w and smoothed one-hot labels t.
    """
    index, minus_t = hits
    dz = op.ScatterElements(p, index, minus_t, axis=1, reduction="add")
    return (dz - share if share else dz) * weights
