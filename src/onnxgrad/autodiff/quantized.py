"""Quantized models are refused: of what is rounded, only ranges and biases would get a gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from onnxgrad.errors import NoGradientRule, printable
from onnxgrad.graph.traversal import reads

_PRODUCTS = {"ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"}
_MICROSOFT = ("QLinear", "QGemm", "QAttention", "DynamicQuantize", "MatMulInteger")  # prefixes


def refuse_quantized(
    nodes: Sequence[ir.Node],
    wanted: Iterable[ir.Value],
    outputs: Iterable[ir.Value],
    stops: Collection[ir.Value] = (),
    shortcuts: Mapping[ir.Value, ir.Value] | None = None,
) -> None:
    """Raise where `outputs` depend on `wanted` through arithmetic on integers, or on one of them
    through a QuantizeLinear only. `stops` and `shortcuts` are those of the sweep.

    Raises:
        NoGradientRule: naming the operator, and what can be done.
    """
    if not any(_is_quantized(node) for node in nodes):
        return
    wanted, outputs = list(wanted), list(outputs)
    live = _live(nodes, outputs, stops, shortcuts or {}, True)
    for node in _between(nodes, wanted, live):
        if _is_quantized(node) and node.op_type != "QuantizeLinear":
            raise _error(node, " or")
    smooth = _live(nodes, outputs, stops, shortcuts or {}, False)
    for node in _between(nodes, [x for x in wanted if x not in smooth], live):
        if _is_quantized(node):
            through = "the result of the DequantizeLinear behind it in straight_through"
            raise _error(node, f" name {through} of onnx_derivative, or")


def _live(
    nodes: Sequence[ir.Node],
    outputs: Iterable[ir.Value],
    stops: Collection[ir.Value],
    shortcuts: Mapping[ir.Value, ir.Value],
    rounded: bool,
) -> set[ir.Value]:
    """Return what `outputs` depend on, what is `rounded` on the way included or not."""
    live = set(outputs)
    for node in reversed(nodes):
        here = live.intersection(node.outputs)
        live.update(shortcuts[y] for y in here if y in shortcuts)
        through = any(y not in stops and y not in shortcuts for y in here)
        if through and (rounded or not _is_quantized(node)):
            live.update(reads(node))
    return live.difference(stops, shortcuts)


def _between(
    nodes: Sequence[ir.Node], origins: Iterable[ir.Value], live: Collection[ir.Value]
) -> Iterable[ir.Node]:
    """Yield the nodes on the way from `origins` to `live` values, of any dtype."""
    reached = set(origins)
    for node in nodes:
        after = [y for y in node.outputs if y in live]
        if after and not reached.isdisjoint(reads(node)):
            reached.update(after)
            yield node


def _is_quantized(node: ir.Node) -> bool:
    if node.domain == "com.microsoft":
        return node.op_type.startswith((*_MICROSOFT, "QuantizeLinear"))
    return not node.domain and (node.op_type in _PRODUCTS or node.op_type == "QuantizeLinear")


def _error(node: ir.Node, remedy: str) -> NoGradientRule:
    where = printable(f"{node.domain}::{node.op_type}" if node.domain else node.op_type)
    return NoGradientRule(
        f"{where} (node {node.name!r}, output {node.outputs[0].name!r}): the model is quantized, "
        "and what is rounded to integers has no gradient: train the float model and quantize it "
        f"then,{remedy} ask only for weights that are behind this node"
    )
