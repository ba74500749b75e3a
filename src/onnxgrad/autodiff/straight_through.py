"""Gradients through quantized layers: those of their formulas without the rounding.

The straight-through estimator of Bengio, Léonard & Courville 2013, arXiv:1308.3432. A value that is
clipped to the range of its integers has no gradient, as in the fake quantization of PyTorch.

The forward pass stays as it is. Beside each quantized node, its formula is written in floats, and
the cotangent of the node goes to the formula. An integer q stands for a number of steps there: its
cotangent is dL/dq, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.quantized import PRODUCTS, between, described, is_quantized, live_values
from onnxgrad.errors import NoGradientRule
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.traversal import reads
from onnxgrad.operators import REORDERS, SELECTS, VIEWS, operator_of
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.rule_nodes import attributes_of
from onnxgrad.operators.shapes import rank

FLOAT = ir.DataType.FLOAT
# operators that move or combine integers: which operands hold the data, None for all
_MOVES: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys((*VIEWS, *REORDERS, *SELECTS, "MaxPool", "Relu", "Resize", "Upsample"), (0,)),
    **dict.fromkeys("Concat Max Min Add Sub Mul Clip Sum".split()),
    "Pad": (0, 2),
    "Where": (1, 2),
}
_ROUNDING = frozenset("QuantizeLinear DynamicQuantizeLinear QLinearMatMul QLinearConv".split())

_Formula: TypeAlias = "Callable[[StraightThrough, ir.Node], Sequence[ir.Value]]"


class StraightThrough:
    """The formulas of the quantized nodes on the way from `wrt` to `outputs`, written into a graph.

    Attributes:
        origins: `straight_through` of a sweep: a result, and its formula.
        stopped: `stop_gradient` of a sweep: scales that are computed from data.
        rounding: the nodes that round, through which a gradient goes.
    """

    def __init__(
        self,
        op: Emit,
        wrt: Iterable[ir.Value],
        outputs: Iterable[ir.Value],
        stop_gradient: Collection[ir.Value] = (),
    ) -> None:
        self.origins: dict[ir.Value, ir.Value] = {}
        self.stopped: list[ir.Value] = []
        self.rounding: list[ir.Node] = []
        nodes = list(op.graph)
        if not any(is_quantized(node) for node in nodes):
            return
        wrt = list(wrt)
        live = live_values(nodes, outputs, stop_gradient)
        following = dict(zip(nodes, [*nodes[1:], None], strict=True))
        self._op = op
        self._steps: dict[ir.Value, ir.Value] = {}  # an integer -> itself as a float
        self._reached = set(wrt)
        for node in between(nodes, wrt, live):
            if self._reached.isdisjoint(reads(node)):
                continue
            self._write(node, following[node])

    def _write(self, node: ir.Node, following: ir.Node | None) -> None:
        """Write the formula of `node`, if it reads or returns integers that stand for floats."""
        formula = self._formula(node)
        if formula is None:
            if not operator_of(node).no_gradient:
                self._reached.update(y for y in node.outputs if _is_float(y))
            return
        with self._op.at(node if _is_float(node.outputs[0]) else following):
            for y, result in zip(node.outputs, formula(self, node), strict=False):
                if not _is_float(y):
                    self._steps[y] = self._float(y)
                    self._reached.add(y)
                self.origins[self._steps.get(y, y)] = result
                self._reached.add(self._steps.get(y, y))
        if node.op_type in _ROUNDING:
            self.rounding.append(node)

    def _formula(self, node: ir.Node) -> _Formula | None:
        """Return what writes the formula of `node`; None if it needs none: its rule may do."""
        on_floats = self._steps.keys().isdisjoint(reads(node))
        if on_floats and node.op_type == "DequantizeLinear":
            return None  # of weights: its rule gives the gradient of the scale
        if not node.domain and node.op_type in _FORMULAS:
            return _FORMULAS[node.op_type]
        if on_floats or operator_of(node).no_gradient:
            return None
        if node.domain or node.op_type not in _MOVES:
            raise _error(
                node, "its operands are quantized, and it has no straight-through gradient"
            )
        return StraightThrough.moved

    def _float(self, x: ir.Value) -> ir.Value:
        """Return a new copy of the integers `x` in float32."""
        y = self._op.emit("Cast", [x], {"to": FLOAT}, fresh=True)
        y.type, y.shape = ir.TensorType(FLOAT), x.shape
        return y

    def shaped(self, v: ir.Value, axis: int | None, like: ir.Value, block: int = 0) -> ir.Value:
        """Return a scale or zero point in float32 that broadcasts along `axis` of `like`.

        Those of blocks of so many elements are repeated.
        """
        v = self._op.Cast(v, to=FLOAT)
        n = rank(like)
        if block:
            ones = self._op.Expand(self._op.const(np.int8(1)), self._op.shape_of(like))
            y = self._op.DequantizeLinear(ones, v, axis=axis, block_size=block)
            y.type, y.shape = ir.TensorType(FLOAT), like.shape
            return y
        if rank(v) != 1 or axis is None or n is None:
            return v
        behind = n - 1 - axis % n
        return self._op.Unsqueeze(v, list(range(1, behind + 1))) if behind else v

    def steps(
        self,
        x: ir.Value,
        zero: ir.Value | None,
        axis: int | None,
        scale: ir.Value | None = None,
        block: int = 0,
    ) -> ir.Value:
        """Return scale (x - zero) in float32, x integers; a scale of None is one."""
        op = self._op
        if x not in self._steps and max(rank(scale) or 0, rank(zero) or 0) < 2:
            one = op.const(1.0) if scale is None else op.Cast(scale, to=FLOAT)
            if zero is not None and scale is None and rank(zero):
                one = op.Expand(one, op.shape_of(zero))
            y = op.DequantizeLinear(
                *([x, one] if zero is None else [x, one, zero]), axis=1 if axis is None else axis
            )
            y.type, y.shape = ir.TensorType(FLOAT), x.shape
            return y
        y = self._steps.get(x) or self._float(x)
        if zero is not None:
            y = y - self.shaped(zero, axis, x, block)
        return y if scale is None else y * self.shaped(scale, axis, x, block)

    def rounded(
        self,
        v: ir.Value,
        scale: ir.Value,
        zero: ir.Value | None,
        y: ir.Value,
        axis: int = 1,
        block: int = 0,
    ) -> ir.Value:
        """Return v / scale where it is within the range of the integers `y`, else zero."""
        op = self._op
        dtype = y.dtype or ir.DataType.UINT8
        rounds = not dtype.is_floating_point()
        limits = (ml_dtypes.iinfo if rounds else ml_dtypes.finfo)(dtype.numpy())
        v = op.Cast(v, to=FLOAT) / self.shaped(scale, axis, v, block)
        integer = op.Round(v) if rounds else v
        if zero is not None:
            integer = integer + self.shaped(zero, axis, v, block)
        low, high = op.Less(integer, float(limits.min)), op.Greater(integer, float(limits.max))
        outside = op.Or(low, high)
        result = op.Where(outside, 0.0, v)
        result.type, result.shape = ir.TensorType(FLOAT), v.shape
        return result

    # -- formulas: of a node, its results, integers as numbers of steps ---------------------------

    def quantize(self, node: Any) -> list[ir.Value]:
        """Return x / s, where it is within the range."""
        x, scale, zero = (*node.inputs, None)[:3]
        axis, block = (int_attribute(node, name) for name in ("axis", "block_size"))
        return [self.rounded(x, scale, zero, node.outputs[0], axis, block)]

    def dequantize(self, node: Any) -> list[ir.Value]:
        """Return s (q - z)."""
        x, scale, zero = (*node.inputs, None)[:3]
        axis, block = (int_attribute(node, name) for name in ("axis", "block_size"))
        y = self.steps(x, zero, axis, scale, block)
        return [self._op.Cast(y, to=node.outputs[0].dtype)]

    def dynamic(self, node: Any) -> list[ir.Value]:
        """Return the steps of the data: the scale, which depends on their range, is a constant."""
        x, (_, scale, zero) = node.inputs[0], node.outputs
        self.stopped += [scale, zero]
        return [x / scale]

    def product(self, node: Any) -> list[ir.Value]:
        """Return a b, or conv(a, b) + c, in steps of the result, where it is within the range.

        That of operators named Integer is returned as it is.
        """
        inputs, bias, rounds = node.inputs, None, node.op_type.startswith("QLinear")
        if rounds:
            a, a_scale, a_zero, b, b_scale, b_zero, scale, zero, bias = (*inputs, None)[:9]
        else:
            a, b, a_zero, b_zero = (*inputs, None, None)[:4]
            a_scale = b_scale = None
        kind, axes = ("Conv", (None, 0)) if "Conv" in node.op_type else ("MatMul", (-2, -1))
        operands = [
            self.steps(a, a_zero, axes[0], a_scale),
            self.steps(b, b_zero, axes[1], b_scale),
        ]
        if bias is not None:
            operands.append(self._op.Cast(bias, to=FLOAT) * (a_scale * b_scale))
        y = self._op.emit(kind, operands, attributes_of(node))
        y.type, y.shape = ir.TensorType(FLOAT), node.outputs[0].shape
        return [self.rounded(y, scale, zero, node.outputs[0]) if rounds else y]

    def moved(self, node: Any) -> list[ir.Value]:
        """Return the results of the same operator for floats."""
        data = _MOVES[node.op_type]
        inputs = [
            x
            if x is None or (data is not None and i not in data)
            else self._steps.get(x) or (x if _is_float(x) else self._op.Cast(x, to=FLOAT))
            for i, x in enumerate(node.inputs)
        ]
        if node.op_type == "Cast" and not _is_float(node.outputs[0]):
            return [self._op.copy_of(inputs[0])]
        results = self._op.emit_many(
            node.op_type, inputs, attributes_of(node), len(node.outputs), fresh=True
        )
        for result, y in zip(results, node.outputs, strict=True):
            result.type, result.shape = ir.TensorType(FLOAT), y.shape
        return results[:1] if node.op_type == "MaxPool" else results


_FORMULAS: dict[str, _Formula] = {
    "QuantizeLinear": StraightThrough.quantize,
    "DequantizeLinear": StraightThrough.dequantize,
    "DynamicQuantizeLinear": StraightThrough.dynamic,
    **dict.fromkeys(PRODUCTS, StraightThrough.product),
}


def _is_float(value: ir.Value) -> bool:
    return value.dtype is None or (value.dtype.is_floating_point() and value.dtype.bitwidth >= 16)


def _error(node: ir.Node, what: str) -> NoGradientRule:
    advice = "train only weights that are used after this node"
    return NoGradientRule(f"{described(node)}: {what}: {advice}")
