"""BatchNormalization by the statistics of the rows of all processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import printable
from onnxgrad.operators.shapes import dims, rank
from onnxgrad.parallel import Part, all_reduce


def normalized_across(
    op: Any, operands: Sequence[ir.Value], epsilon: float, part: Part
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return y, and the mean and the unbiased variance (C,) of the rows of all processes.

    Each process sends the number, the mean and the sum of squared deviations of its own values, in
    a row of its own of a sum over the processes. They are combined as in Chan, Golub and LeVeque,
    Algorithms for Computing the Sample Variance (1983), which loses no digits where a mean is far
    from zero.

    Args:
        op: the emitter.
        operands: x (N, C, ...), scale and bias (C,).
        epsilon: added to the variance, which is biased there.
        part: that of this process.

    Raises:
        ValueError: the rank of x is unknown.
    """
    x, scale, bias = operands
    count = rank(x)
    if count is None:
        raise ValueError(
            f"sync_batch_norm: the rank of {printable(x.name)}, which a BatchNormalization reads, "
            "is unknown: declare the shapes of the model's inputs, or leave out sync_batch_norm"
        )
    axes = [axis for axis in range(count) if axis != 1]
    assert x.dtype is not None
    with op:
        mean = op.ReduceMean(x, axes)
        squares = op.ReduceSum((x - mean) * (x - mean), axes)
        channels = op.Shape(scale)
        own, deviations = (op.Reshape(v, op.Concat([1], channels, axis=0)) for v in (mean, squares))
        size = op.Div(op.Size(x), op.Size(scale))
        count = op.Cast(op.Reshape(size, [1, 1]), to=x.dtype)
        row = np.zeros((part.size, 1), x.dtype.numpy())
        row[part.rank] = 1
        sent = [op.Mul(op.const(row), v) for v in (count, own, deviations)]
        sent[0].shape = ir.Shape([part.size, 1])
        for value in sent[1:]:
            value.shape = ir.Shape([part.size, *(dims(scale) or (None,))])
        counts, means, squares = (all_reduce(op, v) for v in sent)
        total = op.ReduceSum(counts, [0], keepdims=0)
        middle = op.ReduceSum(counts * means, [0], keepdims=0) / total
        apart = means - middle
        summed = op.ReduceSum(squares + counts * apart * apart, [0], keepdims=0)
        over = op.Concat(channels, np.ones(len(axes) - 1, np.int64), axis=0)
        scaled = scale / op.Sqrt(summed / total + epsilon)
        y = (x - op.Reshape(middle, over)) * op.Reshape(scaled, over) + op.Reshape(bias, over)
        variance = summed / (total - 1.0)
    y = op.copy_of(op.set_type_like(y, x))
    return y, op.set_type_like(middle, scale), op.set_type_like(variance, scale)
