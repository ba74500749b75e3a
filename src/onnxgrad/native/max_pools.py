"""Gradients of MaxPool over windows of images that do not overlap, without indices.

onnxruntime's MaxPool takes 15 to 30 times as long with its output of indices as without. Here, the
positions of maxima are compared: an element is a maximum if it equals that of its window, repeated
over the window; of several, the first one has the largest code.

Pools of one axis keep their indices: without them, a training step of 1-D convolutions takes 1.4 to
1.5 times as long, as it moves more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.operators import POOL_GRADIENT
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.graph.shapes import static
from onnxgrad.graph.tidy import current
from onnxgrad.native.blocked_layout import DOMAIN, Layout, sizes
from onnxgrad.native.phases import BLOCKS, PLAIN

_FLOAT = ir.DataType.FLOAT
_LEAST = 1 << 9  # elements of a row of the batch, from which the nodes cost less than the indices
Pixels = Sequence[int]


@dataclass(frozen=True)
class _Pool:
    """A MaxPool node of disjoint windows: numbers of each spatial axis, and its gradient."""

    node: ir.Node
    kernel: Pixels
    strides: Pixels
    begin: Pixels  # padding
    counts: Pixels  # windows
    lengths: Pixels  # of x
    gradient: ir.Value
    cotangent: ir.Value  # of its result

    @property
    def x(self) -> Any:
        """The input."""
        return self.node.inputs[0]

    @property
    def padding(self) -> list[list[int]]:
        """What to add before and after each axis of x, so that it consists of windows."""
        rows = zip(self.counts, self.strides, self.lengths, self.begin, strict=True)
        return [list(self.begin), [n * s - m - p for n, s, m, p in rows]]


def pool_of(node: ir.Node) -> _Pool | None:
    """Return the pool if `node` is a MaxPool whose indices only its gradient reads, as above."""
    if node.op_type != "MaxPool" or node.domain or len(node.outputs) < 2:
        return None
    x, (y, indices) = node.inputs[0], node.outputs
    get, lengths, counts = node.attributes.get_ints, static(sizes(x)[2:]), static(sizes(y)[2:])
    gradient, cotangent = y.meta.get(POOL_GRADIENT, (None, None))
    if gradient is None or x is None or x.dtype != _FLOAT or not counts:
        return None
    if lengths is None or len(lengths) != 2:
        return None
    if gradient.producer() is None or gradient.producer().graph is not node.graph:
        return None
    channels, kernel = sizes(x)[1], get("kernel_shape", ())
    strides, dilations = get("strides", (1, 1)), get("dilations", (1, 1))
    disjoint = all(k <= s for k, s in zip(kernel, strides, strict=True)) and max(dilations) == 1
    explicit = node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
    if not disjoint or not explicit or not isinstance(channels, int):
        return None
    if prod(lengths) * channels < _LEAST or 0 in counts or not _read_only_by(indices, gradient):
        return None
    pads = get("pads", (0,) * 4)
    begin, cotangent = pads[:2], current(cotangent)
    return _Pool(node, kernel, strides, begin, counts, lengths, gradient, cotangent)


def _read_only_by(indices: ir.Value, gradient: ir.Value) -> bool:
    """Return whether the nodes that compute the gradient read the indices, and no others."""
    own, node = {gradient.producer()}, gradient.producer()
    if node is not None and node.op_type == "Reshape" and node.inputs[0] is not None:
        scatter = node.inputs[0].producer()
        flat = None if scatter is None else scatter.inputs[1]
        own |= {None if flat is None else flat.producer()}
    users = {user for user, _ in indices.uses()}
    return bool(users) and not indices.is_graph_output() and users <= own


def _pool_before(node: ir.Node) -> _Pool | None:
    """Return the pool if `node` computes its gradient by indices."""
    scatter = node.inputs[0].producer() if node.op_type == "Reshape" and node.inputs[0] else node
    if scatter is None or scatter.op_type not in ("MaxUnpool", "ScatterElements"):
        return None
    indices = scatter.inputs[1]
    producer = None if indices is None else indices.producer()
    if producer is not None and producer.op_type == "Reshape" and producer.inputs[0] is not None:
        producer = producer.inputs[0].producer()
    pool = None if producer is None else pool_of(producer)
    return pool if pool is not None and pool.gradient is node.outputs[0] else None


@rewrites("MaxUnpool", "Reshape", group=PLAIN)
def gradient_without_indices(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """The gradient of a pool that is not in blocks of channels."""
    pool = _pool_before(node)
    if pool is None:
        return None
    y = current(pool.node.outputs[0])
    dx = _on_plane(op, pool, _padded(op, pool.x, pool.padding), y)
    return [_cropped(op, dx, pool.x, pool.padding)]


@rewrites("MaxPool", group=PLAIN)
def pool_without_indices(op: Emit, node: ir.Node) -> list[ir.Value | None] | None:
    """A pool whose indices nothing reads."""
    if len(node.outputs) < 2 or node.outputs[1].uses() or node.outputs[1].is_graph_output():
        return None
    attributes = {a.name: a.value for a in node.attributes.values()}
    return [op.MaxPool(node.inputs[0], **attributes), None]


def _padded(op: Emit, x: ir.Value, padding: list[list[int]], inner: Pixels = ()) -> ir.Value:
    if not any(map(any, padding)):
        return x
    return op.Pad(x, [n for side in padding for n in (0, 0, *side, *inner)])


def _cropped(
    op: Emit, dx: ir.Value, x: ir.Value, padding: list[list[int]], inner: Pixels = ()
) -> ir.Value:
    if not any(map(any, padding)):
        return op.reshape_like(dx, x)
    counts = [p + m + q for p, m, q in zip(padding[0], sizes(x)[2:], padding[1], strict=False)]
    dx = op.Reshape(dx, [-1, sizes(x)[1], *counts, *sizes(x)[2 + len(counts) :]])
    back = [[-n for n in side] for side in padding]
    return op.set_type_like(_padded(op, dx, back, inner), x)


def _on_plane(op: Emit, pool: _Pool, x: ir.Value, y: ir.Value) -> ir.Value:
    """Return the gradient of x, in the plain layout."""
    channels = sizes(pool.x)[1]
    whole = [n * s for n, s in zip(pool.counts, pool.strides, strict=True)]
    scales = op.const(np.array([1, 1, *pool.strides], np.float32))
    floor = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}

    def pooled(v: ir.Value) -> ir.Value:
        image = op.Reshape(v, [-1, channels, *whole])
        return op.MaxPool(image, kernel_shape=pool.kernel, strides=pool.strides)

    def repeated(v: ir.Value) -> ir.Value:
        return op.Resize(v, None, scales, mode="nearest", **floor)

    codes = _codes(pool, 1)
    return _gradient(op, (x, y, pool.cotangent), (pooled, repeated), codes, [-1, codes.size])


@rewrites("MaxPool", group=BLOCKS)
def pool_in_blocks(op: Emit, node: ir.Node) -> list[ir.Value | None] | None:
    """A pool in blocks, without the indices that only its gradient reads."""
    pool, layout = pool_of(node), Layout(op)
    if pool is None or not layout.has(pool.x):
        return None
    rows = zip(pool.counts, pool.strides, pool.kernel, pool.begin, pool.lengths, strict=True)
    end = [max(0, (n - 1) * s + k - p - m) for n, s, k, p, m in rows]
    y = _blocked_pool(op, pool, layout.blocked(pool.x), [*pool.begin, *end])
    return [layout.plain(y, node.outputs[0]), None]


@rewrites("MaxUnpool", "Reshape", group=BLOCKS)
def gradient_in_blocks(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """The gradient of a pool in blocks."""
    pool, layout = _pool_before(node), Layout(op)
    y = None if pool is None else current(pool.node.outputs[0])
    if pool is None or y is None or not layout.has(y) or not layout.has(pool.x):
        return None
    channels, inner = sizes(pool.x)[1], [0]
    whole = [n * s for n, s in zip(pool.counts, pool.strides, strict=True)]

    def pooled(v: ir.Value) -> ir.Value:
        return _blocked_pool(op, pool, op.Reshape(v, [-1, channels, *whole]))

    def repeated(v: ir.Value) -> ir.Value:
        image = op.Reshape(v, [-1, channels, *pool.counts])
        y = op.emit("Upsample", [image], {"scales": [1, 1, *pool.strides]}, domain=DOMAIN)
        y.dtype = _FLOAT
        return y

    x, codes = layout.cells(layout.blocked(pool.x)), _codes(pool, layout.block)
    values = (
        _padded(op, x, pool.padding, inner),
        layout.blocked(y),
        layout.blocked(pool.cotangent),
    )
    dx = _gradient(op, values, (pooled, repeated), codes, [-1, codes.size])
    dx = _cropped(op, dx, x, pool.padding, inner)
    return [layout.plain(layout.view(dx, [0, channels, *pool.lengths]), node.outputs[0])]


def _blocked_pool(op: Emit, pool: _Pool, x: ir.Value, pads: Pixels = (0, 0, 0, 0)) -> ir.Value:
    windows = {"kernel_shape": pool.kernel, "strides": pool.strides, "pads": pads}
    return op.set_type_like(op.emit("MaxPool", [x], windows, domain=DOMAIN), pool.node.outputs[0])


def _gradient(
    op: Emit,
    values: tuple[ir.Value, ir.Value, ir.Value],
    forms: tuple[Callable[[ir.Value], ir.Value], Callable[[ir.Value], ir.Value]],
    codes: np.ndarray,
    shape: Pixels,
) -> ir.Value:
    """Return the gradient of x in `shape`.

    Args:
        values: x with its padding, y and the cotangent of y.
        forms: return the maxima of windows of `shape`, and numbers of windows repeated over them.
        codes: see `_codes`; they broadcast to `shape`.
        shape: of all elements.
    """
    x, y, g = values
    pooled, repeated = forms

    def spread(v: ir.Value) -> ir.Value:
        return op.Reshape(repeated(v), list(shape))

    maximal = op.Equal(op.Reshape(x, list(shape)), spread(y))
    maximal = op.Mul(op.Cast(maximal, to=_FLOAT), codes)
    # at least 1, so that a window without maximum, as of NaN, has none
    highest = op.Max(pooled(maximal), np.float32(1))
    return op.Mul(op.Cast(op.Equal(maximal, spread(highest)), to=_FLOAT), spread(g))


def _codes(pool: _Pool, block: int) -> np.ndarray:
    """Return numbers of a row of windows: the larger, the earlier in the window; 0 outside of it.

    It has one more than the elements of a window at its beginning, and 2 at its end. With padding,
    all rows of windows are there, as elements beyond x are in none.
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
