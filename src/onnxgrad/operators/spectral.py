"""Fourier transforms, which are linear: the gradient is a transform too.

Complex numbers are pairs of reals on the last axis. The adjoint of a complex matrix F is F^H. The
gradients have no one-sided inverse transforms, only full ones.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.layouts import scatter_flat
from onnxgrad.operators.records import declare_operators, rule
from onnxgrad.operators.shapes import dims, rank
from onnxgrad.operators.windows import Vector, all_numbers_or_values, floor_quotient

declare_operators("STFT DFT", roles="xc")


@rule("DFT")
def dft(op, node, g):
    """y = F x:  dx = F^H g = n F^-1 g;  y = F^-1 x:  dx = F g / n.

    The half that a one-sided y omits has no gradient; a one-sided x stands for both halves. If the
    length n of the transform is shorter than x, the gradient of the rest of x is zero.
    """
    x, inverse = node.inputs[0], int_attribute(node, "inverse")
    onesided, axis = int_attribute(node, "onesided"), _axis_of_dft(op, node)
    n = have = _axis_length(op, x, axis)
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        n = _length_vector(op, node.inputs[1])
    if inverse and onesided:
        n = _axis_length(op, g, axis)
        dx = _full_length_dft(op, g, axis, onesided=1) * _one_sided_multiplicities(op, x, n, axis)
        n = floor_quotient(op, n, 2) + 1
    else:
        dx = _adjoint_of_dft(op, g, x, n, axis, inverse, onesided)
    dx = op.set_type_like(_crop_or_pad_axis(op, dx, axis, n, have), x)
    return (dx, *(None for _ in node.inputs[1:]))


@rule("STFT")
def stft(op, node, g):
    """y = F u of each frame u = w x:  du = F^H g,  dx = w du summed over frames,  dw = sum x du.

    Allen & Rabiner 1977, doi:10.1109/PROC.1977.10770.
    """
    signal, step, w, length = (*node.inputs, None, None)[:4]
    x = op.Reshape(signal, [0, 0, -1])  # onnxruntime also takes signals without the last axis
    if w is not None or length is None:
        n = _axis_length(op, signal, 1) if w is None else _axis_length(op, w, 0)
    else:
        n = _length_vector(op, length)
    onesided = int_attribute(node, "onesided")
    du = _adjoint_of_dft(op, g, x, n, -2, inverse=0, onesided=onesided)
    frames, offsets = (op.arange(op.const(v)) for v in (_axis_length(op, g, 1), n))
    times = op.Unsqueeze(frames * op.Cast(step, to=ir.DataType.INT64), [1]) + offsets
    flat = op.Reshape(op.arange(op.Size(x)), op.Shape(x), allowzero=1)
    windowed = du if w is None else du * op.Unsqueeze(w, [1])
    dx = op.reshape_like(scatter_flat(op, x, op.Gather(flat, times, axis=1), windowed), signal)
    if w is None:
        return dx, None
    return dx, None, op.ReduceSum(du * op.Gather(x, times, axis=1), [0, 1, 3], keepdims=0)


def _adjoint_of_dft(op, g, x, n: Vector, axis, inverse: int, onesided: int):
    """Return n F^-1 g along `axis`, or F g / n if `inverse`; only the real part if x is real."""
    if onesided:
        g = _crop_or_pad_axis(op, g, axis, floor_quotient(op, n, 2) + 1, n)
    transformed = _full_length_dft(op, g, axis, inverse=1 - inverse)
    scale = op.Cast(n, to=x.dtype) if isinstance(n, ir.Value) else float(n[0])
    dx = transformed / scale if inverse else transformed * scale
    if (dims(x) or (None,))[-1] == 2:
        return dx
    return op.Slice(dx, [0], op.Shape(x, start=-1), [-1])


def _full_length_dft(op, g, axis, **attributes):
    """Return the DFT of g over the whole `axis`, without the operand `dft_length`."""
    if op.opset < 20:
        return op.DFT(g, axis=axis, **attributes)
    axis = op.Reshape(axis, []) if isinstance(axis, ir.Value) else np.int64(axis)
    return op.DFT(g, None, axis, **attributes)


def _crop_or_pad_axis(op, v, axis, have: Vector, want: Vector):
    """Return v, of length `have` along `axis`, cropped or padded with zeros to length `want`."""
    have, want = all_numbers_or_values(op, have, want)
    if isinstance(have, ir.Value):
        return op.Pad(v, op.Concat([0], op.Sub(want, have), axis=0), None, _as_axes_operand(axis))
    more = int(want[0] - have[0])
    return op.Pad(v, [0, more], None, _as_axes_operand(axis)) if more else v


def _one_sided_multiplicities(op, x, n: Vector, axis):
    """Return how often each element of a one-sided x along `axis` occurs in the full spectrum,
    divided by its length n.

    It is 2, as an element stands for its conjugate too, and 1 for the first and, if n is even, the
    middle one. The shape broadcasts against x.
    """
    n, r = op.const(n), rank(x)
    k = op.arange(n / 2 + 1)
    once = op.Or(op.Equal(k, 0), op.Equal(k * 2, n))
    times = op.Where(once, op.const(1.0, x.dtype), op.const(2.0, x.dtype)) / op.Cast(n, to=x.dtype)
    if r is not None and isinstance(axis, int):
        return op.Reshape(times, [-1 if i == axis % r else 1 for i in range(r)])
    r = op.Size(op.Shape(x))
    is_axis = op.Equal(op.arange(r), op.Mod(op.const(_as_axes_operand(axis)), r))
    return op.Reshape(times, op.Where(is_axis, op.const(np.int64(-1)), np.int64(1)))


def _axis_of_dft(op, node) -> int | ir.Value:
    """Return the axis of a DFT: an attribute up to opset 19, an input since opset 20."""
    if op.opset < 20:
        return node.attributes.get_int("axis", 1)  # the newest schema lacks it
    axis = node.inputs[2] if len(node.inputs) > 2 else None
    number = op.known_value(axis)
    if axis is None:
        return -2
    return op.Reshape(axis, [1]) if number is None else int(number)


def _as_axes_operand(axis):
    return axis if isinstance(axis, ir.Value) else [axis]


def _axis_length(op, v, axis) -> Vector:
    """Return the length of v along `axis`."""
    if isinstance(axis, ir.Value):
        return op.Gather(op.Shape(v), axis, axis=0)
    n = op.dim(v, axis)
    return np.array([n]) if isinstance(n, int) else n


def _length_vector(op, number) -> Vector:
    """Return an integer input as a vector of one element."""
    array = op.known_value(number)
    if array is not None:
        return array.reshape(1).astype(np.int64)
    return op.Reshape(op.Cast(number, to=ir.DataType.INT64), [1])
