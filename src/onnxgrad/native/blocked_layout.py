"""`BlockedLayout`: NCHWc, onnxruntime's layout for convolutions on the CPU: channels in blocks.

A tensor (N, C, H, W) is stored as (N, C / block, H, W, block). The operators of the domain `DOMAIN`
read and write it under the shape (N, C, H, W). onnxruntime's optimizer chooses these operators for
constant weights only, and a training step has no constant weights. A sequence (N, C, W) is stored
as an image of height 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from onnxgrad.graph.emit import Emit
from onnxgrad.model.convert import to_proto
from onnxgrad.operators import marks
from onnxgrad.operators.shapes import Dims, dims
from onnxgrad.runtime.device import CPU

DOMAIN = "com.microsoft.nchwc"
BLOCKS = "native.blocks"  # the group of rewrites into this layout
_WIDEST = 32  # channels: a multiple of every possible block
Pixels = Sequence[int]  # lengths of the two spatial axes


@cache
def block_size() -> int:
    """Return the channels per block of the NCHWc layout; 0 if onnxruntime has no such kernels.

    The number depends on the instructions of the processor: 16 with AVX-512, else 8. No function of
    onnxruntime returns it, and a wrong number gives wrong results, so that a convolution in blocks
    is compared with a plain one.
    """
    random = np.random.default_rng(0)
    x = random.standard_normal((1, _WIDEST, 5, 4), dtype=np.float32)
    w = random.standard_normal((_WIDEST, _WIDEST, 3, 3), dtype=np.float32)
    for block in (16, 8):
        try:
            plain, blocked = _convolve_plain_and_blocked(x, w, block)
        except Exception:
            continue
        if np.allclose(plain, blocked, rtol=1e-3, atol=1e-3):
            return block
    return 0


def _convolve_plain_and_blocked(x: np.ndarray, w: np.ndarray, block: int) -> list[np.ndarray]:
    """Return onnxruntime's results of a convolution in NCHW, and in NCHWc with this `block`."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="blocks")
    op = Emit(graph)
    layout, image, weight = BlockedLayout(op, block), op.const(x), op.const(w)
    y = layout.convolve(layout.to_nchwc(image), layout.conv_weight(weight), (3, 2), {})
    graph.outputs.extend([op.Conv(image, weight), layout.to_nchw(y)])
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    proto = to_proto(ir.Model(graph, ir_version=10))
    running = ort.InferenceSession(proto.SerializeToString(), options, providers=CPU.providers)
    return running.run(None, {})


def known_dims(x: ir.Value | None) -> tuple[Any, ...]:
    """Return the dimensions of `x`, or () if its shape is unknown."""
    return dims(x) or ()


def image_dims(x: ir.Value | None) -> tuple[Any, ...]:
    """Return the dimensions of `x` as an image, with the height 1 of a sequence (N, C, W); () if
    its shape is unknown.
    """
    shape = known_dims(x)
    return (*shape[:2], 1, shape[2]) if len(shape) == 3 else shape


class BlockedLayout:
    """Writes operators in onnxruntime's NCHWc layout, and reorders each value at most once.

    The `meta` of a value in the plain layout refers to the same value in blocks, if there is one.
    """

    def __init__(self, op: Emit, block: int | None = None) -> None:
        self.op = op
        self._block = block

    @property
    def block(self) -> int:
        """The channels per block; 0 if onnxruntime has no kernels for NCHWc."""
        return block_size() if self._block is None else self._block

    # -- values ------------------------------------------------------------------------------

    def is_whole_blocks(self, channels: Any) -> bool:
        """Return whether `channels`, a number or a symbol, is a multiple of the block."""
        size = self.block
        return isinstance(channels, int) and channels > 0 and size > 0 and channels % size == 0

    def has_blocked(self, x: ir.Value) -> bool:
        """Return whether an earlier node has computed `x` in the NCHWc layout."""
        node = x.meta[marks.BLOCKED_IMAGE].producer() if marks.BLOCKED_IMAGE in x.meta else None
        return node is not None and self.op.precedes(node)

    def as_image(self, x: ir.Value) -> ir.Value:
        """Return a sequence (N, C, W) as an image of height 1, and an image unchanged."""
        if len(known_dims(x)) != 3:
            return x
        image = self.op.Unsqueeze(x, [2])
        image.shape = ir.Shape(image_dims(x))
        return image

    def to_nchwc(self, x: ir.Value) -> ir.Value:
        """Return an image or sequence `x` in the NCHWc layout, reordered by new nodes if needed."""
        if not self.has_blocked(x):
            image = self.as_image(x)
            x.meta[marks.BLOCKED_IMAGE] = self._reorder_to_blocks(image, dims(image))
        return x.meta[marks.BLOCKED_IMAGE]

    def known_layouts(self, x: ir.Value) -> list[ir.Value]:
        """Return [x], or [x, x in the NCHWc layout] if a node has already computed the second
        value.
        """
        return [x, x.meta[marks.BLOCKED_IMAGE]] if self.has_blocked(x) else [x]

    def to_nchw(self, y: ir.Value, like: ir.Value | None = None) -> ir.Value:
        """Return `y`, a value in the NCHWc layout, reordered to the plain layout with the shape of
        `like`, an image or a sequence.
        """
        if like is not None:
            y.shape = None if like.shape is None else ir.Shape(image_dims(like))
        attributes = {"channels": known_dims(y)[1], "channels_last": 0}
        result = self._emit_blocked("ReorderOutput", [y], attributes, dims(y))
        if like is not None and len(known_dims(like)) == 3:
            result = self.op.set_type_like(self.op.Squeeze(result, [2]), like)
        result.meta[marks.BLOCKED_IMAGE] = y
        return result

    def record_blocked(self, x: ir.Value, blocked: ir.Value) -> bool:
        """Record `blocked` as `x` in the NCHWc layout; return False if another value is recorded
        already.
        """
        known = marks.BLOCKED_IMAGE in x.meta
        x.meta.setdefault(marks.BLOCKED_IMAGE, blocked)
        return not known

    def split_channels(self, x: ir.Value) -> ir.Value:
        """Return `x`, a value in the NCHWc layout, as a tensor (N, C / block, H, W, block)."""
        _, channels, *pixels = known_dims(x)
        return self.reshape(x, [0, channels // self.block, *pixels, self.block])

    def reshape(self, x: ir.Value, shape: Sequence[int | ir.Value]) -> ir.Value:
        """Return `x` reshaped to `shape`, where 0 copies a length of `x`, and -1 is inferred."""
        y = self.op.Reshape(x, self.op.vector(*shape))
        if y.shape is None or None in known_dims(y):
            old = dims(x) or (None,) * len(shape)
            kept: list[Any] = [old[i] if d == 0 else d for i, d in enumerate(shape)]
            known = (isinstance(d, str) or (isinstance(d, int) and d > 0) for d in kept)
            y.shape = ir.Shape([d if k else None for d, k in zip(kept, known, strict=True)])
        return y

    # -- operators ---------------------------------------------------------------------------

    def convolve(
        self,
        x: ir.Value,
        weight: ir.Value,
        pixels: Sequence[Any],
        attributes: dict[str, Any],
        bias: ir.Value | None = None,
        plus: ir.Value | None = None,
    ) -> ir.Value:
        """Return conv(x, weight) + bias + plus in the NCHWc layout.

        Args:
            x: an image in blocks, or with fewer channels than a block.
            weight: the weight, in the layout of `conv_weight`.
            pixels: lengths of the spatial axes of the result.
            attributes: attributes of the Conv.
            bias: a number per channel, or None.
            plus: an image in blocks, or None.
        """
        inputs = [x, weight, bias, plus]
        while inputs[-1] is None:
            inputs.pop()
        shape = (known_dims(x)[0], known_dims(weight)[0], *pixels)
        return self._emit_blocked("Conv", inputs, attributes, shape)

    def scale_and_shift(
        self,
        x: ir.Value,
        factor: ir.Value | None,
        bias: ir.Value | None = None,
        plus: ir.Value | None = None,
    ) -> ir.Value:
        """Return x * factor + bias + plus, factor and bias one number per channel, as a 1 x 1
        convolution.
        """
        channels, *pixels = known_dims(x)[1:]
        if factor is None:
            factor = self.op.const(np.ones(channels, np.float32))
        weight = self.reshape(factor, [channels, 1, 1, 1])
        attributes = {"group": channels, "kernel_shape": [1, 1]}
        return self.convolve(x, weight, pixels, attributes, bias, plus)

    def fuse_into(self, x: ir.Value, op_type: str, plus: ir.Value | None) -> ir.Value | None:
        """Return `x` + `plus`, or the Relu of `x`, fused into the Conv node that computes `x`.

        None if `x` is no convolution, or a convolution that already has a sum or an activation. The
        node of `x` is no longer used.
        """
        conv = x.producer()
        if conv is None or conv.op_type != "Conv" or conv.domain != DOMAIN:
            return None
        inputs, attributes = list(conv.inputs), {a.name: a.value for a in conv.attributes.values()}
        if "activation" in attributes or (plus is not None and len(inputs) > 3):
            return None
        if plus is None:
            attributes["activation"] = op_type
        else:
            inputs = [*[*inputs, None, None][:3], plus]
        return self._emit_blocked("Conv", inputs, attributes, dims(x))

    def mean_of_pixels(self, x: ir.Value) -> ir.Value:
        """Return the means (N, C) over the pixels of `x`, a value in the NCHWc layout."""
        shape = known_dims(x)[:2]
        means = self._emit_blocked("GlobalAveragePool", [x], {}, (*shape, 1, 1))
        return self.reshape(means, [0, shape[1]])

    def conv_weight(self, weight: ir.Value) -> ir.Value:
        """Return a Conv's weight (M, C, kernel) in the layout of NCHWc convolutions.

        The layout is (M / block, C / block, kernel, block of C, block of M) if C is a multiple of
        the block; else (M / block, C, kernel, block of M), for depthwise convolutions and plain
        channels.
        """
        rows, channels, *kernel = known_dims(weight)
        taps, b = prod(kernel), self.block
        flat = self.reshape(weight, [1, rows, channels * taps, 1])
        cells = self._reorder_to_blocks(flat, (1, rows, channels * taps, 1))
        if self.is_whole_blocks(channels):
            cells = self.reshape(cells, [-1, b, taps, b])
            cells = self.op.Transpose(cells, perm=[0, 2, 1, 3])
        return self.reshape(cells, [rows, channels, *kernel])

    def kernel_elements(self, weight: ir.Value) -> ir.Value:
        """Return a weight (M, C, kernel) as (M, C / block, kernel elements, block)."""
        rows, channels, *kernel = known_dims(weight)
        shape = (rows, channels, prod(kernel), 1)
        cells = self._reorder_to_blocks(self.reshape(weight, list(shape)), shape)
        return self.reshape(cells, [rows, channels // self.block, prod(kernel), self.block])

    def _reorder_to_blocks(self, x: ir.Value, shape: Dims | None) -> ir.Value:
        """Return `x` reordered from NCHW to NCHWc; `shape` is the result's (N, C, H, W)."""
        return self._emit_blocked("ReorderInput", [x], {"channels_last": 0}, shape)

    def _emit_blocked(
        self, op_type: str, inputs: list[Any], attributes: dict[str, Any], shape: Dims | None
    ) -> ir.Value:
        """Return the result of an operator of onnxruntime's NCHWc domain, typed as float32."""
        self.op.root.graph.opset_imports.setdefault(DOMAIN, 1)
        y = self.op.emit(op_type, inputs, attributes, domain=DOMAIN)
        y.type = ir.TensorType(ir.DataType.FLOAT)
        y.shape = None if shape is None else ir.Shape(shape)
        return y
