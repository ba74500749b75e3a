"""Gradients of MaxPool, computed without the indices of the maxima.

onnxruntime's MaxPool takes 15 to 30 times as long with its output of indices as without. Instead,
an element is a maximum if it equals the maximum of its window, repeated over the window; among
several equal elements, the first has the largest code and gets the gradient.

Pools of one axis keep their indices: without them, a training step of 1-D convolutions takes 1.4 to
1.5 times as long, as it moves more memory.

On devices, whose execution providers often lack the output of indices, windows that overlap, too,
have a form without indices: the elements of the windows are stacked along an axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.graph.tidy import latest_replacement
from onnxgrad.native.blocked_layout import BLOCKS, DOMAIN, BlockedLayout, Pixels, known_dims
from onnxgrad.native.device_forms import DEVICES
from onnxgrad.native.single_nodes import PLAIN
from onnxgrad.operators import made_by, marks
from onnxgrad.operators.shapes import static
from onnxgrad.operators.windows import auto_pad, explicit_windows

# Elements of a row of a pool from which comparing elements costs less than the output of indices.
LEAST_POOL_ELEMENTS = 1 << 9
_FLOAT = ir.DataType.FLOAT


@dataclass(frozen=True)
class _Pool:
    """A MaxPool node whose indices only its gradient reads, and the gradient of its input.

    Attributes:
        node: the node.
        kernel, strides: lengths along each spatial axis.
        begin: padding before each spatial axis.
        counts: number of windows along each spatial axis.
        lengths: lengths of the spatial axes of x.
        gradient: gradient of x.
        cotangent: cotangent of the result.
    """

    node: ir.Node
    kernel: Pixels
    strides: Pixels
    begin: Pixels
    counts: Pixels
    lengths: Pixels
    gradient: ir.Value
    cotangent: ir.Value

    @property
    def x(self) -> Any:
        """The input of the MaxPool node."""
        return self.node.inputs[0]

    @property
    def padding(self) -> list[list[int]]:
        """The padding [before, after] of the spatial axes that makes x a grid of whole windows."""
        rows = zip(self.counts, self.strides, self.lengths, self.begin, strict=True)
        return [list(self.begin), [n * s - m - p for n, s, m, p in rows]]


def match_disjoint_pool(node: ir.Node | None) -> _Pool | None:
    """Return the pool if `node` is a MaxPool of images whose windows do not overlap, and whose
    indices only its gradient reads; else None.
    """
    pool, windows = _match_pool(node), None if node is None else explicit_windows(node)
    if node is None or pool is None or windows is None:
        return None
    channels = known_dims(pool.x)[1]
    if len(pool.lengths) != 2 or not isinstance(channels, int):
        return None
    small = prod(pool.lengths) * channels < LEAST_POOL_ELEMENTS
    return pool if windows.are_disjoint and not small else None


def _match_pool(node: ir.Node | None) -> _Pool | None:
    """Return the pool if `node` is a MaxPool of known lengths and padding, without dilations, whose
    indices only its gradient reads; else None.
    """
    if node is None or node.op_type != "MaxPool" or len(node.outputs) < 2:
        return None
    x, (y, indices), windows = node.inputs[0], node.outputs, explicit_windows(node)
    gradient, cotangent = y.meta.get(marks.POOL_GRADIENT, (None, None))
    if gradient is None or x is None or x.dtype != _FLOAT or windows is None:
        return None
    lengths, counts = static(known_dims(x)[2:]), static(known_dims(y)[2:])
    if not counts or not lengths or 0 in counts:
        return None
    if max(windows.dilations) > 1 or auto_pad(node) != "NOTSET":
        return None
    last = gradient.producer()
    if last is None or last.graph is not node.graph or indices.is_graph_output():
        return None
    users, scatter = {user for user, _ in indices.uses()}, _scatter_of_gradient(last)
    if not users or not users <= {last, scatter and scatter.inputs[1].producer()}:
        return None
    begin, g = windows.begin.tolist(), latest_replacement(cotangent)
    return _Pool(node, windows.kernel, windows.strides, begin, counts, lengths, gradient, g)


def _scatter_of_gradient(node: ir.Node) -> Any:
    """Return the scatter node of a MaxPool gradient: the input of the Reshape `node`, or `node`."""
    return made_by(node.inputs[0], "ScatterElements") if node.op_type == "Reshape" else node


def _pool_of_gradient(
    node: ir.Node, match: Callable[[ir.Node | None], _Pool | None] = match_disjoint_pool
) -> _Pool | None:
    """Return the pool whose gradient `node` computes from its indices; None for other nodes."""
    scatter = _scatter_of_gradient(node)
    indices = scatter.inputs[1] if scatter else None
    flat = made_by(indices, "Reshape")
    pool = match(made_by(flat.inputs[0] if flat else indices, "MaxPool"))
    return pool if pool is not None and pool.gradient is node.outputs[0] else None


@rewrites("MaxUnpool", "Reshape", group=PLAIN)
def gradient_without_indices(op, node):
    """Rewrite the gradient of a MaxPool in NCHW layout, so that it reads no indices."""
    pool = _pool_of_gradient(node)
    if pool is None:
        return None
    x, y = _pad_pixels(op, pool.x, pool.padding), latest_replacement(pool.node.outputs[0])
    dx = _max_pool_gradient(op, pool, x, y, pool.cotangent)
    return [_crop_pixels(op, dx, pool.x, pool.padding)]


@rewrites("MaxUnpool", "Reshape", group=DEVICES)
def gradient_of_stacked_windows(op, node):
    """Rewrite the gradient of a MaxPool by the elements of its windows, without indices.

    dx = ConvTranspose(g m), where m is 1 for the first element of each window that equals y.
    """
    pool = _pool_of_gradient(node, _match_pool)
    if pool is None or len(pool.lengths) > 2:
        return None

    def as_image(numbers: Pixels, missing: int) -> list[int]:
        """Return the numbers of two axes; a pool of one axis has a first axis of length 1."""
        return [*[missing] * (2 - len(numbers)), *numbers]

    kernel, strides = as_image(pool.kernel, 1), as_image(pool.strides, 1)
    begin, lengths = as_image(pool.begin, 0), as_image(pool.lengths, 1)
    counts, size = as_image(pool.counts, 1), prod(kernel)
    covered = [(n - 1) * s + k for n, s, k in zip(counts, strides, kernel, strict=True)]
    # elements behind the last window, negative for padding
    behind = [m + p - c for m, p, c in zip(lengths, begin, covered, strict=True)]
    padding = [0, 0, *begin, 0, 0, *(max(0, -n) for n in behind)]
    x = op.Reshape(pool.x, [-1, 1, *lengths])
    if any(padding):
        x = op.Pad(x, padding, np.finfo(np.float32).min)
    offsets = list(np.ndindex(*kernel))
    stacked = op.Concat(
        *(
            op.Slice(
                x,
                at,
                [i + (n - 1) * s + 1 for i, n, s in zip(at, counts, strides, strict=True)],
                [2, 3],
                strides,
            )
            for at in offsets
        ),
        axis=1,
    )
    shape = [-1, 1, *counts]
    y, g = (
        op.Reshape(v, shape) for v in (latest_replacement(pool.node.outputs[0]), pool.cotangent)
    )
    ranks = np.arange(size, 0, -1, dtype=np.float32).reshape(1, size, 1, 1)
    maximal = op.Mul(op.Cast(op.Equal(stacked, y), to=_FLOAT), ranks)
    # at least 1, so that no element of a window of NaN counts as a maximum
    highest = op.Max(op.ReduceMax(maximal, [1], keepdims=1), np.float32(1))
    first = op.Mul(op.Cast(op.Equal(maximal, highest), to=_FLOAT), g)
    places = np.eye(size, dtype=np.float32).reshape(size, 1, *kernel)
    dx = op.ConvTranspose(
        first,
        places,
        strides=strides,
        pads=[*begin, *(max(0, -n) for n in behind)],
        output_padding=[max(0, n) for n in behind],
    )
    return [op.reshape_like(dx, pool.gradient)]


@rewrites("MaxPool", group=DEVICES)
@rewrites("MaxPool", group=PLAIN)
def pool_without_indices(op, node):
    """Drop the output `Indices` of a MaxPool if no node reads it."""
    if len(node.outputs) < 2 or node.outputs[1].uses() or node.outputs[1].is_graph_output():
        return None
    attributes = {a.name: a.value for a in node.attributes.values()}
    return [op.MaxPool(node.inputs[0], **attributes), None]


@rewrites("MaxPool", group=BLOCKS)
def pool_in_blocks(op, node):
    """Rewrite a MaxPool as a MaxPool in NCHWc layout, without the output of indices."""
    pool, layout = match_disjoint_pool(node), BlockedLayout(op)
    if pool is None or not layout.has_blocked(pool.x):
        return None
    rows = zip(pool.counts, pool.strides, pool.kernel, pool.begin, pool.lengths, strict=True)
    end = [max(0, (n - 1) * s + k - p - m) for n, s, k, p, m in rows]
    y = _max_pool_in_blocks(op, pool, layout.to_nchwc(pool.x), [*pool.begin, *end])
    return [layout.to_nchw(y, node.outputs[0]), None]


@rewrites("MaxUnpool", "Reshape", group=BLOCKS)
def gradient_in_blocks(op, node):
    """Rewrite the gradient of a MaxPool of an NCHWc image, so that it reads no indices."""
    pool, layout = _pool_of_gradient(node), BlockedLayout(op)
    y = None if pool is None else latest_replacement(pool.node.outputs[0])
    if pool is None or y is None or not layout.has_blocked(y) or not layout.has_blocked(pool.x):
        return None
    x, inner = layout.split_channels(layout.to_nchwc(pool.x)), [0]
    padded, y = _pad_pixels(op, x, pool.padding, inner), layout.to_nchwc(y)
    dx = _max_pool_gradient(op, pool, padded, y, layout.to_nchwc(pool.cotangent), layout.block)
    dx = _crop_pixels(op, dx, x, pool.padding, inner)
    shape = [0, known_dims(pool.x)[1], *pool.lengths]
    return [layout.to_nchw(layout.reshape(dx, shape), node.outputs[0])]


def _pad_pixels(op: Emit, x: ir.Value, padding: list[list[int]], inner: Pixels = ()) -> ir.Value:
    """Return `x` (N, C, pixels, ...) with padded pixels; `inner`: padding of the last axes."""
    if not any(map(any, padding)):
        return x
    return op.Pad(x, [n for side in padding for n in (0, 0, *side, *inner)])


def _crop_pixels(
    op: Emit, dx: ir.Value, x: ir.Value, padding: list[list[int]], inner: Pixels = ()
) -> ir.Value:
    """Return `dx`, the gradient of the padded `x`, cropped to the shape of `x`."""
    if not any(map(any, padding)):
        return op.reshape_like(dx, x)
    counts = [p + m + q for p, m, q in zip(padding[0], known_dims(x)[2:], padding[1], strict=False)]
    dx = op.Reshape(dx, [-1, known_dims(x)[1], *counts, *known_dims(x)[2 + len(counts) :]])
    back = [[-n for n in side] for side in padding]
    return op.set_type_like(_pad_pixels(op, dx, back, inner), x)


def _max_pool_in_blocks(
    op: Emit, pool: _Pool, x: ir.Value, pads: Pixels = (0, 0, 0, 0)
) -> ir.Value:
    """Return the MaxPool of `x`, an image in NCHWc layout, over the windows of `pool`."""
    windows = {"kernel_shape": pool.kernel, "strides": pool.strides, "pads": pads}
    return op.set_type_like(op.emit("MaxPool", [x], windows, domain=DOMAIN), pool.node.outputs[0])


def _max_pool_gradient(
    op: Emit, pool: _Pool, x: ir.Value, y: ir.Value, g: ir.Value, block: int = 1
) -> ir.Value:
    """Return a MaxPool's gradient w.r.t. its padded input, (-1, elements of a row of windows).

    Args:
        op: writes nodes.
        pool: the pool.
        x: the padded input.
        y: the result.
        g: the cotangent of the result.
        block: number of channels of a block, if values are in blocks.
    """
    channels, codes = known_dims(pool.x)[1], _window_position_codes(pool, block)
    whole = [n * s for n, s in zip(pool.counts, pool.strides, strict=True)]

    def pool_windows(v: ir.Value) -> ir.Value:
        """Return the maximum over each window of `v`."""
        image = op.Reshape(v, [-1, channels, *whole])
        if block > 1:
            return _max_pool_in_blocks(op, pool, image)
        return op.MaxPool(image, kernel_shape=pool.kernel, strides=pool.strides)

    def repeat_over_windows(v: ir.Value) -> ir.Value:
        """Return `v`, one number per window, repeated for each element of the window."""
        scales = [1, 1, *pool.strides]
        if block > 1:
            image = op.Reshape(v, [-1, channels, *pool.counts])
            cells = op.emit("Upsample", [image], {"scales": scales}, domain=DOMAIN)
            cells.dtype = _FLOAT
        else:
            floor = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
            cells = op.Resize(v, None, np.array(scales, np.float32), mode="nearest", **floor)
        return op.Reshape(cells, [-1, codes.size])

    maximal = op.Equal(op.Reshape(x, [-1, codes.size]), repeat_over_windows(y))
    maximal = op.Mul(op.Cast(maximal, to=_FLOAT), codes)
    # at least 1, so that no element of a window of NaN counts as a maximum
    highest = op.Max(pool_windows(maximal), np.float32(1))
    return op.Mul(
        op.Cast(op.Equal(maximal, repeat_over_windows(highest)), to=_FLOAT), repeat_over_windows(g)
    )


def _window_position_codes(pool: _Pool, block: int) -> np.ndarray:
    """Return numbers that rank the elements of each window, greatest for its first element.

    The first element of a window has one more than the number of its elements, the last has 2, and
    elements outside of windows have 0. With padding, the codes of all rows of windows are returned,
    as elements of the padding have 0.
    """
    grid = np.zeros(list(pool.strides), np.float32)
    inside = tuple(slice(k) for k in pool.kernel)
    grid[inside] = np.arange(prod(pool.kernel) + 1, 1, -1).reshape(pool.kernel)
    padded = max(map(max, pool.padding)) > 0
    rows = list(pool.counts) if padded else [1, pool.counts[-1]]
    codes = np.tile(grid, rows)
    if padded:
        inner = [slice(p, p + m) for p, m in zip(pool.begin, pool.lengths, strict=True)]
        kept = np.zeros(codes.shape, np.float32)
        kept[tuple(inner)] = 1
        codes *= kept
    return np.repeat(codes.ravel(), block)
