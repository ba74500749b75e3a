"""Rewrites of single nodes into nodes that onnxruntime computes faster."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.model.draft import Draft
from onnxgrad.native.blocked_layout import known_dims
from onnxgrad.operators import VIEWS, made_by
from onnxgrad.operators.attributes import int_attribute, string_attribute
from onnxgrad.operators.axes import named_axes
from onnxgrad.operators.shapes import constant, dims, equal, static
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.session import session

NODES = "native.nodes"  # the group of the first rewrites: they see which gradients a Conv computes
PLAIN = "native.plain"  # the group of rewrites of sums, and of nodes that are in no NCHWc layout

# Pixels of an image below which all images of a batch are joined into a wide one.
LEAST_PIXELS = 16
# Elements of an axis up to which a cubic Resize is faster as a product of matrices.
LONGEST_CUBIC_AXIS = 2048

# Elements from which onnxruntime divides a Mul or an Add among threads.
LEAST_DIVIDED_ELEMENTS = 1 << 17

_FLOAT = ir.DataType.FLOAT
_NEAR = 8  # most nodes between a convolution and a mask
_MICROSOFT = "com.microsoft"
_HAS_GATED_ADD = tuple(int(n) for n in ort.__version__.split(".")[:2]) >= (1, 32)


@rewrites("ScatterElements", group=NODES)
def scattered_rows(op, node):
    """Rewrite the ScatterElements of an embedding's gradient as a ScatterND, on one thread.

    ScatterElements takes an index for each element, and 5 to 10 times as long as ScatterND, which
    takes one for each row. On several threads ScatterND loses sums where an index occurs twice.
    """
    x, indices, u = node.inputs
    expand = made_by(indices, "Expand")
    adds = string_attribute(node, "reduction") == "add" and int_attribute(node, "axis") == 0
    if op.target.threads != 1 or not adds or not expand or x.dtype != _FLOAT:
        return None
    rows = expand.inputs[0]
    index, row, update = dims(rows), dims(x), dims(u)
    if index is None or row is None or update is None:
        return None
    width = static(row[1:])
    one_each = index[0] == update[0] is not None and index[1:] == (1,) * (len(index) - 1)
    whole = len(index) == len(row) == len(update) and width is not None and width == update[1:]
    if not one_each or not whole:
        return None
    rows = op.Reshape(op.Cast(rows, to=ir.DataType.INT64), [-1, 1])
    return [op.ScatterND(x, rows, u, reduction="add")]


@rewrites("Where", group=NODES)
def clip_gradient(op, node):
    """Rewrite Where(mask, g, 0) as g * mask, in a Clip's gradient behind a convolution's.

    onnxruntime's `Where` runs on one thread, in three passes that branch at every element: where
    signs are random, it takes 6 to 20 times as long as a Cast and a Mul. A Where of the file may
    hide NaN, and 0 times it is NaN.
    """
    mask, g, other = node.inputs
    array, equality, shape = constant(other), made_by(mask, "Equal"), dims(node.outputs[0])
    if array is None or array.any() or not equality:
        return None
    x, y = equality.inputs
    clip = made_by(y, "Clip")
    inside = clip is not None and clip.inputs[0] is x
    same = equal(dims(mask), shape) and equal(dims(g), shape)
    if not inside or not same or g.dtype != _FLOAT or not _is_from_convolution(g):
        return None
    return [op.Mul(g, op.set_type_like(op.Cast(mask, to=_FLOAT), g))]


def _is_from_convolution(g: ir.Value | None, near: int = _NEAR) -> bool:
    """Return whether `g` is a sum of convolution results, scaled by numbers per channel.

    If such a value is not finite, it is not finite in a whole image or channel, so that a mask of
    elements would not hide it.
    """
    if not near or made_by(g, "Conv", "ConvTranspose"):
        return near > 0
    if node := made_by(g, "Add", "Sub", "Mul"):
        return all(
            (equal(dims(x), dims(g)) and _is_from_convolution(x, near - 1)) or _has_one_long_axis(x)
            for x in node.inputs
        )
    view = made_by(g, *VIEWS)
    return view is not None and _is_from_convolution(view.inputs[0], near - 1)


def _has_one_long_axis(x: ir.Value | None) -> bool:
    """Return whether at most one axis of `x` is longer than 1, as in a number per channel."""
    shape = static(dims(x))
    return shape is not None and prod(shape) == max(shape, default=1)


@rewrites("Add", group=PLAIN)
def scaled_sum(op, node):
    """Rewrite x + s y, of vectors x, y and a number s in a weight's update, as one GatedAdd.

    `com.microsoft.GatedAdd` passes over memory once instead of twice, and rounds the product as a
    Mul does, so that no bit changes. For 65,536 elements it takes a third of the time of a Mul and
    an Add, and for few elements no more than an Add. It runs on one thread.
    """
    shape = static(dims(node.outputs[0]))
    if shape is None or not _fits_gated_add(node.outputs[0]):
        return None
    if op.target.threads > 1 and shape[0] >= LEAST_DIVIDED_ELEMENTS:
        return None
    for x, product in (node.inputs, node.inputs[::-1]):
        mul = made_by(product, "Mul")
        for y, s in () if mul is None else (mul.inputs, mul.inputs[::-1]):
            if y is not None and dims(x) == dims(y) == shape and static(dims(s)) in ((), (1,)):
                op.root.graph.opset_imports[_MICROSOFT] = 1
                operands = [x, y, _scalar_as_vector(op, s)]
                return [op.emit("GatedAdd", operands, {}, domain=_MICROSOFT)]
    return None


def _fits_gated_add(y: ir.Value) -> bool:
    """Return whether a GatedAdd can compute `y`: a vector of float32 with several elements."""
    shape = static(dims(y)) or ()
    return _HAS_GATED_ADD and y.dtype == _FLOAT and len(shape) == 1 and shape[0] > 1


def _scalar_as_vector(op: Emit, s: Any) -> ir.Value:
    """Return the scalar `s` in the shape (1,), reshaped in the graph that computes `s`."""
    while s.graph is not op.graph and isinstance(op.outer, Emit):
        op = op.outer
    return s if len(dims(s) or ()) else op.Unsqueeze(s, [0])


@rewrites("PRelu", group=NODES)
def prelu_by_extrema(op, node):
    """Rewrite PRelu(x, s) as max(x, 0) + s min(x, 0), with a ninth of the time for random signs."""
    x, slope = node.inputs
    if x.dtype != _FLOAT:
        return None
    zero = np.zeros((), np.float32)
    return [op.Add(op.Max(x, zero), op.Mul(slope, op.Min(x, zero)))]


@rewrites("Softplus", group=NODES)
def softplus_by_exponential(op, node):
    """Rewrite Softplus(x) as max(x, 0) + log(1 + t), t = e^-|x|, with a third of its time.

    With u = 1 + t, rounded, log(1 + t) = log u + (t - (u - 1)) / u keeps the digits of a small t:
    Goldberg 1991, What every computer scientist should know about floating-point arithmetic.
    """
    (x,) = node.inputs
    if x.dtype != _FLOAT:
        return None
    one = np.ones((), np.float32)
    t = op.Exp(op.Neg(op.Abs(x)))
    u = op.Add(t, one)
    lost = op.Div(op.Sub(t, op.Sub(u, one)), u)
    return [op.Add(op.Max(x, np.zeros((), np.float32)), op.Add(op.Log(u), lost))]


_CUBIC_ATTRIBUTES = "antialias coordinate_transformation_mode cubic_coeff_a exclude_outside".split()


@rewrites("Resize", group=NODES)
def cubic_by_products(op, node):
    """Rewrite a cubic Resize of images as one matrix product for each resized axis."""
    x, get = node.inputs[0], node.attributes
    before, after, scales = dims(x), dims(node.outputs[0]), _resize_axis_scales(node)
    if before is None or after is None or scales is None or scales[:2] != [1, 1]:
        return None
    if (
        x.dtype != ir.DataType.FLOAT
        or get.get_string("mode", "nearest") != "cubic"
        or get.get_string("coordinate_transformation_mode", "") == "tf_crop_and_resize"
        or get.get_string("keep_aspect_ratio_policy", "stretch") != "stretch"
    ):
        return None
    matrices = []
    for axis in (2, 3):
        old, new = before[axis], after[axis]
        if not isinstance(old, int) or not isinstance(new, int):
            return None
        # onnxruntime interpolates with equal lengths only if another axis changes
        if (old == new) != (scales[axis] == 1) or max(old, new) > LONGEST_CUBIC_AXIS:
            return None
        matrix = (
            None if old == new else _interpolation_matrix(node, op.opset, old, new, scales[axis])
        )
        if matrix is not None and matrix.shape != (old, new):
            return None
        matrices.append(matrix)
    high, wide = matrices
    if wide is not None:
        x = op.MatMul(x, wide)
    return [x if high is None else op.MatMul(np.ascontiguousarray(high.T), x)]


def _resize_axis_scales(node: ir.Node) -> list[float] | None:
    """Return a Resize's scale of each axis of an image, NaN for a dynamic one; None if unknown."""
    _, _, scales, sizes = (*node.inputs, None, None)[:4]
    before, after, named = dims(node.inputs[0]), dims(node.outputs[0]), named_axes(node)
    if before is None or after is None or named is None or len(before) != 4:
        return None
    if (array := constant(scales)) is not None and array.size == len(named):
        by_axis = dict(zip(named, array.tolist(), strict=True))
        return [by_axis.get(axis, 1.0) for axis in range(4)]
    if sizes is None:
        return None
    return [
        1.0 if a == b else b / a if isinstance(a, int) and isinstance(b, int) and a else np.nan
        for a, b in zip(before, after, strict=True)
    ]


def _interpolation_matrix(
    node: ir.Node, opset: int, old: int, new: int, scale: float
) -> np.ndarray:
    """Return the matrix (old, new) by which onnxruntime's Resize maps one axis of an image."""
    draft = Draft("interpolation", opset=opset)
    eye = draft.input("eye", [1, 1, old, old])
    attributes = {k: v.value for k, v in node.attributes.items() if k in _CUBIC_ATTRIBUTES}
    scales = np.array([1, 1, 1, scale], np.float32)
    by_scale = len(node.inputs) > 2 and constant(node.inputs[2]) is not None
    operands = [eye, None, scales] if by_scale else [eye, None, None, np.array([1, 1, old, new])]
    y = draft.op.Resize(*operands, mode="cubic", **attributes)
    model = draft.model({"matrix": y})
    run = session(model, CPU, work=0.0).run
    return run(None, {"eye": np.eye(old, dtype=np.float32)[None, None]})[0][0, 0]


@rewrites("Conv", "ConvTranspose", group=PLAIN)
def images_side_by_side(op, node):
    """Rewrite a convolution of a batch of tiny images as a convolution of one wide image.

    onnxruntime multiplies matrices image by image, and prepares the weight for each. For 8 images
    (512, 2, 2) and 3 x 3, a convolution takes 3 ms instead of 8, a transposed one 5 instead of 25.
    """
    (y,), (x, w) = node.outputs, node.inputs[:2]
    lengths, counts, kernel = (static(known_dims(v)[2:]) for v in (x, y, w))
    if not (lengths and counts and kernel and len(lengths) == 2):
        return None
    get, auto = node.attributes.get_ints, node.attributes.get_string("auto_pad", "NOTSET")
    if prod(lengths) >= LEAST_PIXELS or node.attributes.get_int("group", 1) > 1 or auto != "NOTSET":
        return None
    if "output_shape" in node.attributes or known_dims(x)[0] == 1:
        return None
    # the rows of a batch, in a gradient of weights
    if static((known_dims(x)[1], known_dims(y)[1])) is None:
        return None
    (_, s), (_, d) = get("strides", (1, 1)), get("dilations", (1, 1))
    top, left, bottom, _ = get("pads", (0,) * 4)
    extent = (kernel[1] - 1) * d + 1
    right = extent - s - left  # padding with which a convolution has one window per stride
    attributes = {a.name: a.value for a in node.attributes.values()}
    forward = node.op_type == "Conv"
    before, after = (lengths[1], counts[1]) if forward else (counts[1], lengths[1])
    reach = (after - 1) * s + extent - left
    steps = -(-max(before + left, reach, after * s if forward else 0) // s)
    pitch, result_pitch = (steps * s, steps) if forward else (steps, steps * s)
    if right < 0 and (forward or -right >= s):
        return None
    if not forward:
        attributes["output_padding"] = [get("output_padding", (0, 0))[0], max(-right, 0)]
    attributes["pads"] = [top, left, bottom, max(right, 0)]
    wide = _place_images_side_by_side(op, x, pitch)
    result = op.emit(node.op_type, [wide, *node.inputs[1:]], attributes)
    images = op.dim(x, 0)
    rows = known_dims(y)[1]
    split = op.Reshape(result, op.vector(rows, counts[0], images, result_pitch))
    if result_pitch > counts[1]:
        split = op.Slice(split, [0], [counts[1]], [3])
    return [op.Transpose(split, perm=[2, 0, 1, 3])]


def _place_images_side_by_side(op: Emit, x: ir.Value, pitch: int) -> ir.Value:
    """Return x (N, C, H, W) as (1, C, H, N * `pitch`), each image padded to `pitch` columns."""
    _, channels, height, width = known_dims(x)
    if pitch > width:
        x = op.Pad(x, [0] * 7 + [pitch - width])
    wide = op.Reshape(op.Transpose(x, perm=[1, 2, 0, 3]), [1, channels, height, -1])
    wide.shape = ir.Shape([1, channels, height, None])
    return wide
