"""BatchNormalization in training mode in blocks of channels, and its gradient.

Statistics are means of the pixels of each image, then of the images; what else there is for each
pixel are convolutions of 1 x 1, one channel a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.graph.operators import NORM_GRADIENT
from onnxgrad.graph.shapes import static
from onnxgrad.native.blocked_layout import Layout, sizes

_FLOAT = ir.DataType.FLOAT
Reads = Callable[[ir.Value, set[ir.Value]], bool]


@dataclass(frozen=True)
class _Gradient:
    """A normalization of which the gradient is written when its first node is met."""

    centred: ir.Value  # x less its mean, in blocks
    inverse: ir.Value  # of the standard deviation
    scale: ir.Value
    cotangent: ir.Value
    results: tuple[ir.Value, ...]  # the gradients of x, scale and bias


class Normalizations:
    """Rewrites normalizations in training mode, and their gradients.

    Args:
        layout: of the graph.
        reads: returns whether a value is computed from all of some others.
    """

    def __init__(self, layout: Layout, reads: Reads) -> None:
        self.layout, self.reads = layout, reads
        self._waiting: dict[ir.Node, _Gradient] = {}

    def rewrite(self, node: ir.Node) -> bool:
        """Rewrite `node`, if it is one or the first of its gradient; return whether it was."""
        gradient = self._waiting.pop(node, None)
        if gradient is not None:
            self._write_gradient(gradient)
            return True
        training = node.attributes.get_int("training_mode", 0)
        if node.op_type != "BatchNormalization" or node.domain or not training:
            return False
        x, real = node.inputs[0], all(v is not None and v.dtype == _FLOAT for v in node.inputs)
        if x is None or not real or not self.layout.has(x) or static(sizes(x)[1:]) is None:
            return False
        self._write(node, x)
        return True

    def _write(self, node: ir.Node, x: ir.Value) -> None:
        layout, op = self.layout, self.layout.op
        _, scale, bias, *running = node.inputs
        assert scale is not None
        mean = self._mean(layout.blocked(x))
        centred = layout.affine(layout.blocked(x), None, op.Neg(mean))
        variance = self._mean(op.set_type_like(op.Mul(centred, centred), centred))
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        inverse = op.Reciprocal(op.Sqrt(op.Add(variance, epsilon)))
        y = node.outputs[0]
        g, *results = y.meta.get(NORM_GRADIENT, (None,))
        first = {v.producer() for v in results}
        if results and None not in first and self.reads(results[0], {x, layout.current(g)}):
            start = next(n for n in op.graph if n in first)
            self._waiting[start] = _Gradient(centred, inverse, scale, g, tuple(results))
        momentum = node.attributes.get_float("momentum", 0.9)
        for new, old, batch in zip(node.outputs[1:], running, (mean, variance), strict=False):
            if momentum:
                batch = op.Add(op.Mul(old, momentum), op.Mul(batch, 1.0 - momentum))
            layout.replace_plain(new, batch)
        layout.replace(y, layout.affine(centred, op.Mul(scale, inverse), bias))

    def _write_gradient(self, gradient: _Gradient) -> None:
        """dx = s (g - mean g - c mean(g c) / r^2) / r,  ds = sum(g c) / r,  db = sum g;
        c = x - m, r the standard deviation.
        """
        layout, op, c = self.layout, self.layout.op, gradient.centred
        g = layout.blocked(layout.current(gradient.cotangent))
        images, products = layout.mean_of_pixels(g), op.set_type_like(op.Mul(g, c), c)
        products = layout.mean_of_pixels(products)
        mean, covariance = (op.ReduceMean(v, [0], keepdims=0) for v in (images, products))
        inverse = gradient.inverse
        slope = op.Mul(gradient.scale, inverse)
        of_centred = op.Neg(op.Mul(op.Mul(slope, covariance), op.Mul(inverse, inverse)))
        dx = layout.affine(c, of_centred, op.Neg(op.Mul(slope, mean)))
        dx = layout.affine(g, slope, plus=dx)
        pixels = static(sizes(c)[2:])
        assert pixels is not None
        count = float(pixels[0] * pixels[1])
        dbias, dscale = (
            op.Mul(op.ReduceSum(v, [0], keepdims=0), count) for v in (images, products)
        )
        old = gradient.results
        layout.replace(old[0], dx)
        layout.replace_plain(old[1], op.reshape_like(op.Mul(dscale, inverse), old[1]))
        layout.replace_plain(old[2], op.reshape_like(dbias, old[2]))

    def _mean(self, x: ir.Value) -> ir.Value:
        """Return the mean of each channel of `x`, which is in blocks."""
        return self.layout.op.ReduceMean(self.layout.mean_of_pixels(x), [0], keepdims=0)
