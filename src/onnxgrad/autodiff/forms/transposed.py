"""Gradients of convolutions and pools w.r.t. their inputs, which rules write as a ConvTranspose."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.forms.arithmetic import GRADIENT
from onnxgrad.autodiff.forms.correlation import copies_exceed_cache, weight_exceeds_cache
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.resize import LARGEST_BLOCK
from onnxgrad.operators.shapes import constant, dims, static
from onnxgrad.operators.windows import (
    Windows,
    spatial_lengths,
    stated_windows,
    weigh_windows,
    window_extents,
    windows_tile,
)

_LAST = 2**63 - 1  # end of a Slice up to the last element


@rewrites("ConvTranspose", group=GRADIENT)
def scatter_cotangents(op, node):
    """The sum over windows of g times a weight (M, C / group, kernel), in the fastest form."""
    (g, weight, *bias), (dx,) = node.inputs, node.outputs
    shape, counts, sizes = spatial_lengths(dx), spatial_lengths(g), static(dims(weight))
    windows, group = stated_windows(node, weight), int_attribute(node, "group")
    if not op.is_own(node) or bias or not windows or not shape or not counts or not sizes:
        return None
    added = node.attributes.get_ints("output_padding", (0,) * len(windows.strides))
    reached = replace(windows, end=windows.end - added)  # to the end of the last window
    if _repeats_elements(op, weight, dx, reached):
        return [_as_repeats(op, g, windows)]
    # onnxruntime has Col2Im for float32, and along one axis it is wrong
    has_col2im = dx.dtype == ir.DataType.FLOAT and len(counts) == 2
    if has_col2im and group == 1 and weight_exceeds_cache(sizes, counts):
        return [_as_one_product(op, g, weight, windows, shape)]
    # measured for one core, 1.1 to 2.5 times faster for kernels of one element, 1.3 to 1.4 times
    # for one channel a group, 1.1 to 1.7 times for large images
    one_channel, one_element = sizes[:2] == (group, 1), prod(sizes[2:]) == 1
    converts = one_channel or one_element or copies_exceed_cache(sizes, counts)
    if max(windows.strides) > 1 or not converts:
        return None
    extents = window_extents(op, windows) - 1
    mirrored = replace(windows, begin=extents - windows.begin, end=extents - reached.end)
    if mirrored.pads is None:
        return None
    return [weigh_windows(op, g, _flipped_kernel(op, weight, windows, group), mirrored, group)]


def _repeats_elements(op, weight, dx, windows: Windows) -> bool:
    """Return whether `dx` has each element of g once per element of its window.

    It is the gradient of an average over windows that do not overlap. Only of constants that the
    rule of a pool has written, the values decide.
    """
    if op.primal is None or op.primal.op_type not in ("AveragePool", "LpPool"):
        return False
    ones = constant(weight)
    short = dx.dtype == ir.DataType.FLOAT and 1 < max(windows.kernel) <= LARGEST_BLOCK
    return short and windows_tile(dx, windows) and ones is not None and bool(np.all(ones == 1))


def _as_repeats(op, g, windows: Windows):
    """Return each element of g once per element of its window: 0.25 to 0.8 of the time."""
    scales = op.const(np.array([1, 1, *windows.kernel], np.float32))
    floor = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return op.Resize(g, None, scales, mode="nearest", **floor)


def _as_one_product(op, g, weight, windows: Windows, shape: tuple[int, ...]):
    """Return the sum as one product for the windows of all images, and their Col2Im."""
    rows, channels, *kernel = static(dims(weight)) or ()
    matrix = op.Reshape(op.Transpose(g, perm=[0, *windows.axes, 1]), [-1, rows])
    columns = op.MatMul(matrix, op.Reshape(weight, [rows, channels * prod(kernel)]))
    columns = op.Reshape(columns, [-1, prod(spatial_lengths(g) or ()), channels * prod(kernel)])
    attributes = {"strides": windows.strides, "dilations": windows.dilations, "pads": windows.pads}
    return op.Col2Im(op.Transpose(columns, perm=[0, 2, 1]), list(shape), kernel, **attributes)


def _flipped_kernel(op, weight, windows: Windows, group: int):
    """Return the weight of a convolution that is this transposed convolution of stride 1.

    onnxruntime's ConvTranspose stores all windows at once, its Conv a few at a time.
    """
    if group == 1:
        flipped = op.Transpose(weight, perm=[1, 0, *windows.axes])
    else:  # (group M, C / group, ...) -> (C, M, ...)
        rows, per_group, *kernel = static(dims(weight)) or ()
        split = op.Reshape(weight, [group, rows // group, per_group, *kernel])
        split = op.Transpose(split, perm=[0, 2, 1, *(axis + 1 for axis in windows.axes)])
        flipped = op.Reshape(split, [group * per_group, rows // group, *kernel])
    if max(windows.kernel) == 1:
        return flipped
    last = [-1] * len(windows.axes)
    turned = op.Slice(flipped, last, [-_LAST] * len(windows.axes), windows.axes, last)
    return op.set_type_like(turned, flipped)
