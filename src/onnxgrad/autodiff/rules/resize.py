"""Resize: linear in its input, and separable by axis.

Where onnxruntime leaves the specification (an axis of scale one is not interpolated, nor is
anything where no length changes) the gradient follows the runtime that computes it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.rules.common import attributes_of, wide
from onnxgrad.autodiff.rules.registry import Unsupported, rule
from onnxgrad.graph.shapes import dims, equal, rank, static

_LARGEST_BLOCK = 64  # float32 positions of larger blocks may round to a neighbour
_MOVED = ("tf_crop_and_resize", "tf_half_pixel_for_nn")  # modes that may move at scale one, too


@rule("Resize")
def resize(op, node, g):
    """y = A1 ... An x, one matrix per axis:  dx = A1T ... AnT g.

    Each matrix is what the same Resize makes of an identity matrix: right for every mode, and for
    scales and sizes known only at run time.
    """
    x, n = node.inputs[0], rank(node.inputs[0]) or rank(node.outputs[0])
    if n is None:
        return Unsupported("the rank of its input is not known")
    axes = _places(node, n)
    dtype = wide(x.dtype)
    dx, factors = op.Cast(g, to=dtype), _blocks(op, node, axes)
    if factors is not None:
        dx = _block_sums(op, dx, x, n, factors)
    else:
        for axis in sorted(axes, reverse=True):
            if not _is_kept(op, node, axis, axes[axis]):
                dx = _contracted(op, dx, _matrix(op, node, axis, axes, dtype), x, axis, n)
    return (op.reshape_like(op.Cast(dx, to=x.dtype), x), *_of_places(node))


def _of_places(node):
    """Return the gradients of roi, scales and sizes: none where they only choose elements."""
    mode, places = _text(node, "mode"), _text(node, "coordinate_transformation_mode")
    smooth = mode != "nearest"
    cropped, antialiased = places == "tf_crop_and_resize", node.attributes.get_int("antialias", 0)
    by_scale = antialiased or places not in ("align_corners", "tf_crop_and_resize")
    refused = "the gradient of its {} is not covered: make it a constant, or name other inputs"
    return (
        Unsupported(refused.format("roi")) if smooth and cropped else None,
        Unsupported(refused.format("scales")) if smooth and by_scale else None,
        None,
    )


_DEFAULTS = {
    "mode": "nearest",
    "coordinate_transformation_mode": "half_pixel",
    "nearest_mode": "round_prefer_floor",
    "keep_aspect_ratio_policy": "stretch",
}


def _text(node, name: str) -> str:
    return node.attributes.get_string(name, _DEFAULTS[name])


def _places(node, n: int) -> dict[int, int]:
    """Return for every axis that is resized its place in scales, sizes and roi."""
    axes = node.attributes.get_ints("axes", None) or range(n)
    return {axis % n: place for place, axis in enumerate(axes)}


def _scale(op, node, place: int) -> float | None:
    """Return the scale of one axis when it is a constant."""
    known = op.known_value(node.inputs[2]) if len(node.inputs) > 2 else None
    return float(known[place]) if known is not None and known.size else None


def _is_kept(op, node, axis: int, place: int) -> bool:
    """Tell whether the lengths and elements of an axis are proven to stay."""
    if _text(node, "coordinate_transformation_mode") in _MOVED:
        return False
    if _sizes(node) is None:
        return _scale(op, node, place) == 1
    before, after = dims(node.inputs[0]), dims(node.outputs[0])
    if before is None or after is None or _text(node, "keep_aspect_ratio_policy") != "stretch":
        return False
    return before[axis] == after[axis] is not None


def _sizes(node):
    return node.inputs[3] if len(node.inputs) > 3 else None


# -- whole numbers of copies --------------------------------------------------------------------


def _blocks(op, node, axes: dict[int, int]) -> dict[int, int] | None:
    """Return how often each element is repeated along each axis, where it just is."""
    places = _text(node, "coordinate_transformation_mode"), _text(node, "nearest_mode")
    halves = ("half_pixel", "pytorch_half_pixel"), ("round_prefer_floor", "round_prefer_ceil")
    repeats = places == ("asymmetric", "floor") or all(map(tuple.__contains__, halves, places))
    if _text(node, "mode") != "nearest" or not repeats:
        return None
    scales = {axis: _scale(op, node, place) for axis, place in axes.items()}
    if _sizes(node) is not None:
        before, after = static(dims(node.inputs[0])), static(dims(node.outputs[0]))
        if before is None or after is None or _text(node, "keep_aspect_ratio_policy") != "stretch":
            return None
        scales = {axis: after[axis] / before[axis] if before[axis] else None for axis in axes}
    if all(s is not None and s.is_integer() and s <= _LARGEST_BLOCK for s in scales.values()):
        return {axis: int(s) for axis, s in scales.items() if s and s > 1}
    return None


def _block_sums(op, g, x, n: int, factors: dict[int, int]):
    """Return g with each block of elements added up."""
    split = [(op.dim(x, axis), factors.get(axis)) for axis in range(n)]
    lengths = [m for pair in split for m in pair if m is not None]
    inner = [axis + sum(a <= axis for a in factors) for axis in sorted(factors)]
    return op.ReduceSum(op.Reshape(g, op.vector(*lengths)), inner, keepdims=0) if factors else g


# -- matrices -----------------------------------------------------------------------------------


def _contracted(op, g, matrix, x, axis: int, n: int):
    """Return the sum over one axis of g times a matrix (length before, length after).

    The axes after it have the lengths of x already, and may be merged.
    """
    if axis == n - 1:
        return op.MatMul(g, op.Transpose(matrix, perm=[1, 0]))
    if axis < n - 2:
        g = op.Reshape(g, op.vector(*[0] * (axis + 1), op.numel(x, axis + 1)))
    return op.MatMul(matrix, g)


def _matrix(op, node, axis: int, axes: dict[int, int], dtype):
    """Return the matrix (length before, length after) of one axis.

    The identity matrix is laid out over four axes of which the first two stay: runtimes have
    kernels for that.
    """
    x, y, place = node.inputs[0], node.outputs[0], axes[axis]
    n, scales, sizes = op.dim(x, axis), None, _sizes(node)
    eye = op.EyeLike(op.Expand(op.const(0.0, dtype), op.vector(n, n)))
    if sizes is not None and _text(node, "keep_aspect_ratio_policy") != "stretch":
        return _matrix_of_policy(op, node, axis, axes, eye)
    if sizes is None:
        scales = op.Concat(_others(op, node, place), _part(op, node.inputs[2], place), axis=0)
    else:
        sizes = op.vector(n, 1, 1, op.dim(y, axis))
    roi = _roi(op, node, place, len(axes), [0, 0, 0, 1])
    eye = op.Reshape(eye, op.vector(n, 1, 1, n))
    made = op.Resize(eye, roi, scales, sizes, **_attributes(node))
    return op.Squeeze(op.Slice(made, [0], [1], [2]), [1, 2])


def _matrix_of_policy(op, node, axis: int, axes: dict[int, int], eye):
    """Return the matrix of one axis where the scale of all is that of the largest or smallest.

    So the others are there in full, and as rows of a matrix add up to one, any element will do.
    """
    x, place = node.inputs[0], axes[axis]
    n, listed = op.dim(x, axis), list(axes)
    lead = 3 if len(axes) == 1 else 2
    laid = [n if a == axis else 1 for a in listed]
    full = op.vector(n, *[1] * (lead - 1), *(op.dim(x, a) for a in listed))
    rows = op.Expand(op.Reshape(eye, op.vector(n, *[1] * (lead - 1), *laid)), full)
    attributes = _attributes(node) | {
        "keep_aspect_ratio_policy": _text(node, "keep_aspect_ratio_policy"),
        "axes": [lead + i for i in range(len(axes))],
    }
    roi = _roi(op, node, place, len(axes), [int(a == axis) for a in listed])
    made = op.Resize(rows, roi, None, _sizes(node), **attributes)
    others = [i for i in range(1, lead + len(axes)) if i != lead + place]
    zeros, ones = [0] * len(others), [1] * len(others)
    return op.Squeeze(op.Slice(made, zeros, ones, others), others)


def _attributes(node) -> dict:
    """Return those attributes that a matrix depends on: what lies outside is no part of x."""
    left = ("keep_aspect_ratio_policy", "axes", "extrapolation_value")
    return {k: v for k, v in attributes_of(node).items() if k not in left}


def _others(op, node, place: int):
    """Return the scales of the three other axes.

    onnxruntime copies where no length changes. If this is so of one axis and not of all, one of the
    others is made longer.
    """
    before, after = (dims(v) for v in (node.inputs[0], node.outputs[0]))
    scale = _scale(op, node, place)
    changes = scale is not None and (scale <= 0.5 or scale >= 2)
    if changes or scale == 1 or equal(before, after):
        return np.array([1, 1, 1], np.float32)
    if static(before) is not None and static(after) is not None:
        return np.array([1, 1, 2], np.float32)
    same = op.Equal(op.Shape(node.inputs[0]), op.Shape(node.outputs[0]))
    changed = op.ReduceMax(op.Cast(op.Not(same), to=ir.DataType.FLOAT), keepdims=1)
    return op.Concat(np.array([1, 1], np.float32), changed + 1.0, axis=0)


def _roi(op, node, place: int, count: int, laid: list[int]):
    """Return the roi in which one axis, that where `laid` is one, has its own, and others all."""
    roi = node.inputs[1] if len(node.inputs) > 1 else None
    if roi is None or _text(node, "coordinate_transformation_mode") != "tf_crop_and_resize":
        return None
    start, end = (_part(op, roi, at) for at in (place, count + place))
    zero, one = roi.dtype.numpy().type(0).reshape(1), roi.dtype.numpy().type(1).reshape(1)
    return op.Concat(
        *(start if own else zero for own in laid), *(end if own else one for own in laid), axis=0
    )


def _part(op, vector, place: int):
    return op.Slice(vector, [place], [place + 1], [0])
