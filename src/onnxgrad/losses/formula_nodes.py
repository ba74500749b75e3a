"""Helpers that write ONNX nodes which several losses need."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.shapes import Dims, dims

LOWEST = -1e30  # a logit of probability zero, finite so that differences are not NaN
_LOWEST_FLOAT16 = -1e4


def dims_of(x: ir.Value) -> Dims:
    """Return the dimensions of a value whose rank is known."""
    shape = dims(x)
    assert shape is not None
    return shape


def lowest(op: Any, like: ir.Value) -> ir.Value:
    """Write a constant that is a logit of probability zero, in the dtype of `like`."""
    return op.const(_LOWEST_FLOAT16 if like.dtype == ir.DataType.FLOAT16 else LOWEST, like.dtype)


def choose(op: Any, condition: ir.Value, yes: Any, no: Any, like: ir.Value) -> ir.Value:
    """Write the number `yes` where `condition` is true, else `no`, in the dtype of `like`."""
    return op.Where(condition, op.const(yes, like.dtype), op.const(no, like.dtype))


def wide(op: Any, x: ir.Value) -> ir.Value:
    """Write `x` in float32 if it has a narrower dtype, in which sums overflow or lose digits."""
    is_wide = x.dtype in (None, ir.DataType.FLOAT, ir.DataType.DOUBLE)
    return x if is_wide else op.Cast(x, to=ir.DataType.FLOAT)


def softplus(op: Any, x: ir.Value) -> ir.Value:
    """log(1 + e^x), smooth at 0, without overflow.

    onnxruntime has a kernel of Softplus for float32 only. For other dtypes it expands the function
    body of the opset, which overflows or fails. For float64: max(x, 0) - log sigmoid |x|.
    """
    if x.dtype != ir.DataType.DOUBLE:
        return op.Cast(op.Softplus(op.Cast(x, to=ir.DataType.FLOAT)), to=x.dtype)
    positive = op.Greater(x, 0.0)
    return op.Where(positive, x, 0.0) - op.Log(op.Sigmoid(op.Where(positive, x, -x)))


def positions(op: Any, x: ir.Value, axis: int) -> ir.Value:
    """Write the vector 0, 1, ..., length - 1 for the length of an axis of `x`, in int64."""
    y = op.arange(op.dim(x, axis))
    y.shape = ir.Shape([dims_of(x)[axis]])
    return y


def class_numbers(op: Any, x: ir.Value, axis: int = 1) -> ir.Value:
    """Write the class indices along an axis of `x`, in a shape that is broadcast to `x`."""
    return op.Reshape(positions(op, x, axis), [-1] + [1] * (len(dims_of(x)) - 1 - axis))


def at_index(op: Any, x: ir.Value, i: int) -> ir.Value:
    """Write the elements at index `i` of axis 1: (N, ...) of (N, k, ...)."""
    y = op.Gather(x, np.int64(i), axis=1)
    n, _, *rest = dims_of(x)
    y.shape = ir.Shape([n, *rest])
    return y


def classes_second(op: Any, x: ir.Value, axis: int | None) -> ir.Value:
    """Write `x` with its class axis moved to axis 1; `axis=None` means axis 1 already."""
    n = len(dims_of(x))
    axis = 1 if axis is None else axis % n
    if axis == 1:
        return x
    rest = [i for i in range(n) if i != axis]
    return op.Transpose(x, perm=[rest[0], axis, *rest[1:]])
