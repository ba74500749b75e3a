"""Resize: linear in its input, and separable by axis.

onnxruntime deviates from the specification: it does not interpolate an axis of scale one, nor any
axis if no length changes. The gradient is computed by Resize too, and so follows the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.attributes import int_attribute, string_attribute
from onnxgrad.operators.axes import OutputAxis, axes_named_by, named_axes, only_first_operand
from onnxgrad.operators.member_forms import write_each_member
from onnxgrad.operators.records import ListedAxes, Unsupported, ValueRange, declare_operators, rule
from onnxgrad.operators.rule_nodes import attributes_of, wide_dtype
from onnxgrad.operators.shapes import Dims, constant, dims, equal, known_shape, rank, static


def _shape_of_resize(inputs: Sequence, attributes: Mapping[str, Any]) -> Dims:
    """Return the shape after a Resize: axes of constant scale 1 keep their length."""
    shape, scales = known_shape(inputs[0]), constant(inputs[2]) if len(inputs) > 2 else None
    axes = axes_named_by("Resize", inputs, attributes) or ()
    result = [None if i in axes else d for i, d in enumerate(shape)]
    if scales is not None and len(scales) == len(axes):
        for axis, scale in zip(axes, scales, strict=True):
            result[axis] = shape[axis] if scale == 1 else None
    return tuple(result)


def _axis_after_resize(node: Any, _operand: int, axis: int) -> OutputAxis:
    # each axis is resized independently; a scale other than 1 may keep the length
    x, _, scales, sizes = (*node.inputs, None, None, None)[:4]
    named, option = named_axes(node) or [], node.attributes.get_string
    if axis not in named:
        return axis
    if option("coordinate_transformation_mode", "") == "tf_crop_and_resize":
        return None
    if sizes is None:
        factors = constant(scales)
        return axis if factors is not None and factors[named.index(axis)] == 1 else None
    before, after = ((dims(v) or {axis: None})[axis] for v in (x, node.outputs[0]))
    stretches = option("keep_aspect_ratio_policy", "stretch") == "stretch"
    return axis if stretches and before == after is not None else None


def _range_of_resize(node: ir.Node, ranges: Sequence[ValueRange]) -> ValueRange:
    """Return the range of values of the image, or an infinite range for cubic interpolation, which
    may exceed it.
    """
    is_cubic = node.attributes.get_string("mode", "nearest") == "cubic"
    return (-inf, inf) if is_cubic else ranges[0]


_RESIZE: dict[str, Any] = {"traits": "real_settings aligned", "straight_through": (0,)}

declare_operators(
    "Resize",
    **_RESIZE,
    shape=_shape_of_resize,
    naming=ListedAxes("axes", default=lambda n, *_: range(n)),
    axes=only_first_operand(_axis_after_resize),
    value_range=_range_of_resize,
    members=write_each_member,
    roles="xl",
    settings=(1, 2, 3),
    float32_operand=2,
)
declare_operators("Upsample", **_RESIZE, roles="xc", settings=(1,), float32_operand=1)

LARGEST_BLOCK = 64  # in larger blocks, float32 positions may round to a neighbor
# modes in which positions may change at scale one
_MOVES_AT_SCALE_ONE = ("tf_crop_and_resize", "tf_half_pixel_for_nn")


@rule("Resize")
def resize(op, node, g):
    """y = A1 ... An x, one matrix per axis:  dx = A1T ... AnT g.

    Each matrix is the result of the same Resize for an identity matrix, which is right for every
    mode and for dynamic scales and sizes.
    """
    x, n = node.inputs[0], rank(node.inputs[0]) or rank(node.outputs[0])
    if n is None:
        return Unsupported("the rank of its input is not known; state its shape in the model")
    stated = node.attributes.get_ints("axes", None) or range(n)
    axes = {axis % n: index for index, axis in enumerate(stated)}  # index in scales, sizes and roi
    dtype = wide_dtype(x.dtype)
    dx, factors = op.Cast(g, to=dtype), _repeats_by_axis(op, node, axes)
    if factors is not None:
        dx = _block_sums(op, dx, x, n, factors)
    else:
        for axis in sorted(axes, reverse=True):
            if not _is_unchanged_axis(op, node, axis, axes[axis]):
                matrix = _interpolation_matrix(op, node, axis, axes, dtype)
                dx = _multiply_along_axis(op, dx, matrix, x, axis, n)
    return (op.reshape_like(op.Cast(dx, to=x.dtype), x), *_roi_and_scale_gradients(node))


def _roi_and_scale_gradients(node):
    """Return the gradients of the operands roi, scales and sizes of a Resize: None where y is
    constant in them.
    """
    smooth, transform = string_attribute(node, "mode") != "nearest", _coordinate_mode(node)
    cropped = transform == "tf_crop_and_resize"
    by_scale = int_attribute(node, "antialias") or not (cropped or transform == "align_corners")
    return (
        _unsupported_gradient("roi") if smooth and cropped else None,
        _unsupported_gradient("scales") if smooth and by_scale else None,
        None,
    )


def _unsupported_gradient(name: str) -> Unsupported:
    return Unsupported(
        f"the gradient of its {name} is not covered; make it a constant, or select other inputs"
    )


def _coordinate_mode(node) -> str:
    return string_attribute(node, "coordinate_transformation_mode")


def _keeps_aspect_ratio(node) -> bool:
    """Return whether `keep_aspect_ratio_policy` scales all axes by one number."""
    return string_attribute(node, "keep_aspect_ratio_policy") != "stretch"


def _known_axis_scale(op, node, index: int) -> float | None:
    """Return the scale of one axis, or None if it is computed at run time."""
    scales = op.known_value(node.inputs[2]) if len(node.inputs) > 2 else None
    return float(scales[index]) if scales is not None and scales.size else None


def _is_unchanged_axis(op, node, axis: int, index: int) -> bool:
    """Return whether it is proven that Resize does not change the elements along an axis."""
    if _coordinate_mode(node) in _MOVES_AT_SCALE_ONE:
        return False
    if _sizes_operand(node) is None:
        return _known_axis_scale(op, node, index) == 1
    before, after = dims(node.inputs[0]), dims(node.outputs[0])
    if before is None or after is None or _keeps_aspect_ratio(node):
        return False
    return before[axis] == after[axis] is not None


def _sizes_operand(node):
    return node.inputs[3] if len(node.inputs) > 3 else None


# -- integer scales -----------------------------------------------------------------------------


def _repeats_by_axis(op, node, axes: dict[int, int]) -> dict[int, int] | None:
    """Return the number of repeats along each axis, or None if y is not x with repeats."""
    modes = _coordinate_mode(node), string_attribute(node, "nearest_mode")
    halves = ("half_pixel", "pytorch_half_pixel"), ("round_prefer_floor", "round_prefer_ceil")
    repeats = modes == ("asymmetric", "floor") or all(map(tuple.__contains__, halves, modes))
    if string_attribute(node, "mode") != "nearest" or not repeats:
        return None
    scales = {axis: _known_axis_scale(op, node, index) for axis, index in axes.items()}
    if _sizes_operand(node) is not None:
        before, after = static(dims(node.inputs[0])), static(dims(node.outputs[0]))
        if before is None or after is None or _keeps_aspect_ratio(node):
            return None
        scales = {axis: after[axis] / before[axis] if before[axis] else None for axis in axes}
    if all(s is not None and s.is_integer() and s <= LARGEST_BLOCK for s in scales.values()):
        return {axis: int(s) for axis, s in scales.items() if s and s > 1}
    return None


def _block_sums(op, g, x, n: int, factors: dict[int, int]):
    """Return the sums of g over blocks of elements, `factors[axis]` long along each axis."""
    split = [(op.dim(x, axis), factors.get(axis)) for axis in range(n)]
    lengths = [m for pair in split for m in pair if m is not None]
    inner = [axis + sum(a <= axis for a in factors) for axis in sorted(factors)]
    return op.ReduceSum(op.Reshape(g, op.vector(*lengths)), inner, keepdims=0) if factors else g


# -- matrices -----------------------------------------------------------------------------------


def _multiply_along_axis(op, g, matrix, x, axis: int, n: int):
    """Return g multiplied by a matrix (length before, length after) along one axis.

    The axes after it already have the lengths of x, so that they can be merged.
    """
    if axis == n - 1:
        return op.MatMul(g, op.Transpose(matrix, perm=[1, 0]))
    if axis < n - 2:
        g = op.Reshape(g, op.vector(*[0] * (axis + 1), op.numel(x, axis + 1)))
    return op.MatMul(matrix, g)


def _interpolation_matrix(op, node, axis: int, axes: dict[int, int], dtype):
    """Return the interpolation matrix (length before, length after) of one axis of a Resize.

    The identity matrix has four axes, of which the first two keep their lengths: runtimes have
    kernels for that.
    """
    x, y, index = node.inputs[0], node.outputs[0], axes[axis]
    n, scales, sizes = op.dim(x, axis), None, _sizes_operand(node)
    eye = op.EyeLike(op.Expand(op.const(0.0, dtype), op.vector(n, n)))
    if sizes is not None and _keeps_aspect_ratio(node):
        return _aspect_ratio_matrix(op, node, axis, axes, eye)
    if sizes is None:
        others = _scales_of_constant_axes(op, node, index)
        scales = op.Concat(others, _vector_element(op, node.inputs[2], index), axis=0)
    else:
        sizes = op.vector(n, 1, 1, op.dim(y, axis))
    roi = _matrix_resize_roi(op, node, index, len(axes), [0, 0, 0, 1])
    eye = op.Reshape(eye, op.vector(n, 1, 1, n))
    matrix = op.Resize(eye, roi, scales, sizes, **_matrix_resize_attributes(node))
    return op.Squeeze(op.Slice(matrix, [0], [1], [2]), [1, 2])


def _aspect_ratio_matrix(op, node, axis: int, axes: dict[int, int], eye):
    """Return the interpolation matrix of one axis of a Resize whose `keep_aspect_ratio_policy`
    scales all axes by one number.

    As the scale depends on all lengths, the other axes are resized too. The rows of their matrices
    add up to one, so that any element along them can be taken.
    """
    x, index = node.inputs[0], axes[axis]
    n, resized = op.dim(x, axis), list(axes)
    lead = 3 if len(axes) == 1 else 2
    lengths = [n if a == axis else 1 for a in resized]
    full = op.vector(n, *[1] * (lead - 1), *(op.dim(x, a) for a in resized))
    rows = op.Expand(op.Reshape(eye, op.vector(n, *[1] * (lead - 1), *lengths)), full)
    attributes = _matrix_resize_attributes(node) | {
        "keep_aspect_ratio_policy": string_attribute(node, "keep_aspect_ratio_policy"),
        "axes": [lead + i for i in range(len(axes))],
    }
    roi = _matrix_resize_roi(op, node, index, len(axes), [int(a == axis) for a in resized])
    matrix = op.Resize(rows, roi, None, _sizes_operand(node), **attributes)
    others = [i for i in range(1, lead + len(axes)) if i != lead + index]
    zeros, ones = [0] * len(others), [1] * len(others)
    return op.Squeeze(op.Slice(matrix, zeros, ones, others), others)


def _matrix_resize_attributes(node) -> dict:
    """Return the attributes of the Resize that computes an interpolation matrix."""
    omitted = ("keep_aspect_ratio_policy", "axes", "extrapolation_value")
    return {k: v for k, v in attributes_of(node).items() if k not in omitted}


def _scales_of_constant_axes(op, node, index: int):
    """Return the scales of the three constant axes of the Resize that computes an interpolation
    matrix: 1, or 2 for one of them.

    onnxruntime copies its input if no length changes. If this axis keeps its length while another
    axis of the node does not, one of the three is resized to prevent that.
    """
    before, after = (dims(v) for v in (node.inputs[0], node.outputs[0]))
    scale = _known_axis_scale(op, node, index)
    changes = scale is not None and (scale <= 0.5 or scale >= 2)
    if changes or scale == 1 or equal(before, after):
        return np.array([1, 1, 1], np.float32)
    if static(before) is not None and static(after) is not None:
        return np.array([1, 1, 2], np.float32)
    same = op.Equal(op.Shape(node.inputs[0]), op.Shape(node.outputs[0]))
    changed = op.ReduceMax(op.Cast(op.Not(same), to=ir.DataType.FLOAT), keepdims=1)
    return op.Concat(np.array([1, 1], np.float32), changed + 1.0, axis=0)


def _matrix_resize_roi(op, node, index: int, count: int, own: list[int]):
    """Return the roi of the Resize that computes an interpolation matrix: the roi of `node` for the
    axes where `own` is 1, else the full range; None if no roi is read.
    """
    roi = node.inputs[1] if len(node.inputs) > 1 else None
    if roi is None or _coordinate_mode(node) != "tf_crop_and_resize":
        return None
    if roi.dtype.itemsize < 4:  # onnxruntime takes the roi of a float32 matrix for float32
        roi = op.Cast(roi, to=ir.DataType.FLOAT)
    start, end = (_vector_element(op, roi, i) for i in (index, count + index))
    zero, one = roi.dtype.numpy().type(0).reshape(1), roi.dtype.numpy().type(1).reshape(1)
    starts, ends = [start if i else zero for i in own], [end if i else one for i in own]
    return op.Concat(*starts, *ends, axis=0)


def _vector_element(op, vector, index: int):
    return op.Slice(vector, [index], [index + 1], [0])
