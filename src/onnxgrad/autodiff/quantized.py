"""Quantized models are refused, unless a gradient is to pass straight through their rounding.

Otherwise only their ranges and biases would get a gradient, and what rounds would have none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from onnxgrad.errors import NoGradientRule, printable
from onnxgrad.graph.traversal import reads
from onnxgrad.operators import operator_of


def refuse_quantized(
    nodes: Sequence[ir.Node],
    wrt: Iterable[ir.Value],
    outputs: Iterable[ir.Value],
    stop_gradient: Collection[ir.Value] = (),
    straight_through: Mapping[ir.Value, ir.Value] | None = None,
) -> None:
    """Raise if `outputs` depend on `wrt` through quantized arithmetic or rounding.

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
            raise _quantized_error(node, " or")
    smooth = live_values(nodes, outputs, stop_gradient, straight_through, through_rounding=False)
    for node in nodes_between(nodes, [x for x in wrt if x not in smooth], live):
        if is_quantized(node):
            result = "the result of the DequantizeLinear after it"
            raise _quantized_error(
                node, f" pass {result} to `straight_through` of onnx_derivative, or"
            )


def live_values(
    nodes: Sequence[ir.Node],
    outputs: Iterable[ir.Value],
    stop_gradient: Collection[ir.Value] = (),
    straight_through: Mapping[ir.Value, ir.Value] | None = None,
    through_rounding: bool = True,
) -> set[ir.Value]:
    """Return the values that `outputs` depend on, optionally through quantized operators too."""
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
    """Yield the nodes on paths from `origins` to `live` values of any dtype."""
    reached = set(origins)
    for node in nodes:
        live_outputs = [y for y in node.outputs if y in live]
        if live_outputs and not reached.isdisjoint(reads(node)):
            reached.update(live_outputs)
            yield node


def is_quantized(node: ir.Node) -> bool:
    """Return whether `node` computes with integers that stand for floats, or rounds to them."""
    return "quantized" in operator_of(node).traits


def described(node: ir.Node) -> str:
    """Return the operator of a node and the names of the node and its first output."""
    where = printable(f"{node.domain}::{node.op_type}" if node.domain else node.op_type)
    return f"{where} (node {node.name!r}, output {node.outputs[0].name!r})"


def _quantized_error(node: ir.Node, remedy: str) -> NoGradientRule:
    return NoGradientRule(
        f"{described(node)}: the model is quantized, "
        "and rounding to integers has no gradient: train the float model and quantize it "
        f"afterwards; name them in `Trainer(train=...)`, which passes gradients straight through;"
        f"{remedy} ask only for weights that are used after this node"
    )


def straight_through_warning(rounding: Sequence[str]) -> str:
    """Return what to say of a gradient through the nodes of these operators."""
    operators = ", ".join(sorted(set(rounding)))
    layers = "1 quantized layer" if len(rounding) == 1 else f"{len(rounding)} quantized layers"
    return f"gradients pass straight through the rounding of {layers} ({operators}): an estimate"
