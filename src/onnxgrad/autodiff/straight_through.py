"""Gradients through quantized layers: the gradients of their formulas without the rounding.

The straight-through estimator of Bengio, Léonard & Courville 2013, arXiv:1308.3432. A value that is
clipped to the range of its integers has no gradient, as in the fake quantization of PyTorch.

The forward pass does not change. Beside each quantized node, its formula is written in floats, and
the cotangent of the node goes to the formula. An integer q stands for a number of steps there: its
cotangent is dL/dq, in float32.

Other quantized models are refused: only their ranges and biases would get a gradient, and what
rounds would have none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnxgrad.errors import NoGradientRule, printable
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.traversal import reads
from onnxgrad.operators import operator_of
from onnxgrad.operators.rule_nodes import attributes_of
from onnxgrad.operators.shapes import rank

FLOAT = ir.DataType.FLOAT
_MOVES = {"view", "reorders", "selects"}  # traits of operators that move elements

_Formula: TypeAlias = Callable[[ir.Node], "Sequence[ir.Value] | None"]


class StraightThrough:
    """Float formulas of the quantized nodes between `wrt` and `outputs`, which carry their
    gradients.

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
        self.op = op
        self._steps: dict[ir.Value, ir.Value] = {}  # {integers: their copy as floats}
        self._reached = set(wrt)
        for node in nodes_between(nodes, wrt, live):
            if self._reached.isdisjoint(reads(node)):
                continue
            self._write_float_formula(node, following[node])

    def _write_float_formula(self, node: ir.Node, following: ir.Node | None) -> None:
        """Write the float formula of `node`, if it reads or returns integers that stand for
        floats.
        """
        formula = self._float_formula_writer(node)
        with self.op.at(node if _is_float_tensor(node.outputs[0]) else following):
            results = None if formula is None else formula(node)
            if results is None:
                if not operator_of(node).no_gradient:
                    self._reached.update(y for y in node.outputs if _is_float_tensor(y))
                return
            for y, result in zip(node.outputs, results, strict=False):
                if not _is_float_tensor(y):
                    self._steps[y] = self._copy_as_float(y)
                    self._reached.add(y)
                self.origins[self._steps.get(y, y)] = result
                self._reached.add(self._steps.get(y, y))
        if "rounds" in operator_of(node).traits:
            self.rounding.append(node)

    def _float_formula_writer(self, node: ir.Node) -> _Formula | None:
        """Return the function that writes the float formula of `node`; None if its gradient rule is
        enough.
        """
        operator = operator_of(node)
        if callable(operator.straight_through):
            return partial(operator.straight_through, self)
        if operator.no_gradient or not self.reads_steps(node):
            return None
        if _operands_moved_by_node(node) is None:
            raise NoGradientRule(
                f"{node_description(node)}: its operands are quantized, and it has no "
                "straight-through gradient: train only weights that are used after this node"
            )
        return self._apply_node_to_floats

    # -- what formulas are written with -----------------------------------------------------------

    def reads_steps(self, node: ir.Node) -> bool:
        """Return whether `node` reads integers that stand for floats."""
        return not self._steps.keys().isdisjoint(reads(node))

    def _copy_as_float(self, x: ir.Value) -> ir.Value:
        """Return a new float32 copy of the integers `x`."""
        y = self.op.emit("Cast", [x], {"to": FLOAT}, fresh=True)
        y.type, y.shape = ir.TensorType(FLOAT), x.shape
        return y

    def _scale_broadcast_along(
        self, v: ir.Value, axis: int | None, like: ir.Value, block: int = 0
    ) -> ir.Value:
        """Return a scale or zero point in float32 that broadcasts along `axis` of `like`.

        With `block`, each number is repeated for so many elements.
        """
        v = self.op.Cast(v, to=FLOAT)
        n = rank(like)
        if block:
            ones = self.op.Expand(self.op.const(np.int8(1)), self.op.shape_of(like))
            y = self.op.DequantizeLinear(ones, v, axis=axis, block_size=block)
            y.type, y.shape = ir.TensorType(FLOAT), like.shape
            return y
        if rank(v) != 1 or axis is None or n is None:
            return v
        behind = n - 1 - axis % n
        return self.op.Unsqueeze(v, list(range(1, behind + 1))) if behind else v

    def scaled_steps(
        self,
        x: ir.Value,
        zero: ir.Value | None,
        axis: int | None,
        scale: ir.Value | None = None,
        block: int = 0,
    ) -> ir.Value:
        """Return scale (x - zero) in float32, x integers; a scale of None is one."""
        op = self.op
        if x not in self._steps and max(rank(scale) or 0, rank(zero) or 0) < 2:
            one = op.const(1.0) if scale is None else op.Cast(scale, to=FLOAT)
            if zero is not None and scale is None and rank(zero):
                one = op.Expand(one, op.shape_of(zero))
            y = op.DequantizeLinear(
                *([x, one] if zero is None else [x, one, zero]), axis=1 if axis is None else axis
            )
            y.type, y.shape = ir.TensorType(FLOAT), x.shape
            return y
        y = self._steps.get(x) or self._copy_as_float(x)
        if zero is not None:
            y = y - self._scale_broadcast_along(zero, axis, x, block)
        return y if scale is None else y * self._scale_broadcast_along(scale, axis, x, block)

    def steps_within_range(
        self,
        v: ir.Value,
        scale: ir.Value,
        zero: ir.Value | None,
        y: ir.Value,
        axis: int = 1,
        block: int = 0,
    ) -> ir.Value:
        """Return v / scale where it is within the range of the integers `y`, else zero."""
        op = self.op
        dtype = y.dtype or ir.DataType.UINT8
        rounds = not dtype.is_floating_point()
        limits = (ml_dtypes.iinfo if rounds else ml_dtypes.finfo)(dtype.numpy())
        v = op.Cast(v, to=FLOAT) / self._scale_broadcast_along(scale, axis, v, block)
        integer = op.Round(v) if rounds else v
        if zero is not None:
            integer = integer + self._scale_broadcast_along(zero, axis, v, block)
        low, high = op.Less(integer, float(limits.min)), op.Greater(integer, float(limits.max))
        outside = op.Or(low, high)
        result = op.Where(outside, 0.0, v)
        result.type, result.shape = ir.TensorType(FLOAT), v.shape
        return result

    def _apply_node_to_floats(self, node: Any) -> list[ir.Value]:
        """Return the results of the operator of `node` on float copies of its integer operands."""
        data = _operands_moved_by_node(node)
        inputs = [
            x
            if x is None or (data and i not in data)
            else self._steps.get(x) or (x if _is_float_tensor(x) else self.op.Cast(x, to=FLOAT))
            for i, x in enumerate(node.inputs)
        ]
        if node.op_type == "Cast" and not _is_float_tensor(node.outputs[0]):
            return [self.op.copy_of(inputs[0])]
        results = self.op.emit_many(
            node.op_type, inputs, attributes_of(node), len(node.outputs), fresh=True
        )
        for result, y in zip(results, node.outputs, strict=True):
            result.type, result.shape = ir.TensorType(FLOAT), y.shape
        return results[:1] if node.op_type == "MaxPool" else results


def _operands_moved_by_node(node: ir.Node) -> tuple[int, ...] | None:
    """Return the indices of the operands whose integers `node` moves or combines (() for all); else
    None.

    An operator that moves or selects the elements of its first operand need not state it.
    """
    operator = operator_of(node)
    stated = operator.straight_through
    if isinstance(stated, tuple):
        return stated
    return None if _MOVES.isdisjoint(operator.traits) else (0,)


def _is_float_tensor(value: ir.Value) -> bool:
    return value.dtype is None or (value.dtype.is_floating_point() and value.dtype.bitwidth >= 16)


def refuse_quantized(
    nodes: Sequence[ir.Node],
    wrt: Iterable[ir.Value],
    outputs: Iterable[ir.Value],
    stop_gradient: Collection[ir.Value] = (),
    straight_through: Mapping[ir.Value, ir.Value] | None = None,
) -> None:
    """Raise NoGradientRule if `outputs` depend on `wrt` through quantized arithmetic or rounding.

    Quantized arithmetic is refused on every path from `wrt` to `outputs`. QuantizeLinear is refused
    for a value of `wrt` if all its paths to `outputs` lead through it. `sweep` documents
    `stop_gradient` and `straight_through`.
    """
    if not any(is_quantized(node) for node in nodes):
        return
    wrt, outputs = list(wrt), list(outputs)
    live = live_values(nodes, outputs, stop_gradient, straight_through, through_rounding=True)
    for node in nodes_between(nodes, wrt, live):
        if is_quantized(node) and node.op_type != "QuantizeLinear":
            raise _quantized_node_error(node, " or")
    smooth = live_values(nodes, outputs, stop_gradient, straight_through, through_rounding=False)
    for node in nodes_between(nodes, [x for x in wrt if x not in smooth], live):
        if is_quantized(node):
            result = "the result of the DequantizeLinear after it"
            raise _quantized_node_error(
                node, f" pass {result} to `straight_through` of onnx_derivative, or"
            )


def live_values(
    nodes: Sequence[ir.Node],
    outputs: Iterable[ir.Value],
    stop_gradient: Collection[ir.Value] = (),
    straight_through: Mapping[ir.Value, ir.Value] | None = None,
    through_rounding: bool = True,
) -> set[ir.Value]:
    """Return the values that `outputs` depend on, through quantized nodes only if
    `through_rounding`.
    """
    live, straight_through = set(outputs), straight_through or {}
    for node in reversed(nodes):
        live_outputs = live.intersection(node.outputs)
        live.update(straight_through[y] for y in live_outputs if y in straight_through)
        passes = any(y not in stop_gradient and y not in straight_through for y in live_outputs)
        if passes and (through_rounding or not is_quantized(node)):
            live.update(reads(node))
    return live.difference(stop_gradient, straight_through)


def nodes_between(
    nodes: Sequence[ir.Node], origins: Iterable[ir.Value], live: Collection[ir.Value]
) -> Iterable[ir.Node]:
    """Yield the nodes on paths from `origins` to `live` values, in topological order."""
    reached = set(origins)
    for node in nodes:
        live_outputs = [y for y in node.outputs if y in live]
        if live_outputs and not reached.isdisjoint(reads(node)):
            reached.update(live_outputs)
            yield node


def is_quantized(node: ir.Node) -> bool:
    """Return whether `node` computes with integers that stand for floats, or rounds to them."""
    return "quantized" in operator_of(node).traits


def node_description(node: ir.Node) -> str:
    """Return the operator of a node and the names of the node and its first output."""
    where = printable(f"{node.domain}::{node.op_type}" if node.domain else node.op_type)
    return f"{where} (node {node.name!r}, output {node.outputs[0].name!r})"


def _quantized_node_error(node: ir.Node, remedy: str) -> NoGradientRule:
    return NoGradientRule(
        f"{node_description(node)}: the model is quantized, "
        "and rounding to integers has no gradient: train the float model and quantize it "
        f"afterwards; name them in `Trainer(train=...)`, which passes gradients straight through;"
        f"{remedy} ask only for weights that are used after this node"
    )


def straight_through_warning(rounding: Sequence[str]) -> str:
    """Return the warning that gradients pass straight through nodes of these operators."""
    operators = ", ".join(sorted(set(rounding)))
    layers = "1 quantized layer" if len(rounding) == 1 else f"{len(rounding)} quantized layers"
    return f"gradients pass straight through the rounding of {layers} ({operators}): an estimate"
