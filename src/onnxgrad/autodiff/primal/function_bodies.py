"""Operators that ONNX defines by a function body: inline it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx
import onnx_ir as ir
from onnx import defs
from onnx_ir.passes.common import InlinePass, LiftConstantsToInitializersPass

_FIRST = 18  # older bodies use forms of operators that newer opsets lack
_DOMAIN = "onnxgrad.bodies"


def expand(model: ir.Model, nodes: Iterable[ir.Node]) -> bool:
    """Inline the bodies of those of `nodes` that have one, in place; return whether any has."""
    expanded = False
    for i, node in enumerate(nodes):
        body = _body(node, model.opset_imports)
        if body is not None:
            function = ir.serde.deserialize_function(body)
            function.domain, function.name = _DOMAIN, f"{node.op_type}_{i}"
            function.opset_imports.clear()  # its operators mean the same at the model's version
            model.functions[function.identifier()] = function
            _state_defaults(node, model.opset_imports)
            node.domain, node.op_type = function.domain, function.name
            expanded = True
    if expanded:
        InlinePass(lambda function: function.domain == _DOMAIN)(model)
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        model.opset_imports.pop(_DOMAIN, None)
    return expanded


def has_body(schema: Any) -> bool:
    """Return whether ONNX defines the operator by a function body of opset 18 or newer."""
    versions = (
        *schema.function_opset_versions,
        *schema.context_dependent_function_opset_versions,
    )
    return max(versions, default=0) >= _FIRST


def _body(node: ir.Node, opsets: dict[str, int]) -> onnx.FunctionProto | None:
    """Return the newest function body that ONNX has for `node`, or None."""
    opset = opsets.get(node.domain, 0)
    if not opset or not defs.has(node.op_type, opset, node.domain):
        return None
    schema: Any = defs.get_schema(node.op_type, opset, node.domain)
    fixed = [v for v in schema.function_opset_versions if _FIRST <= v <= opset]
    dependent = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
    body = onnx.FunctionProto()
    if fixed:
        body.ParseFromString(schema.get_function_with_opset_version(max(fixed)))
    elif dependent and max(dependent) >= _FIRST:
        types = [_type(x).SerializeToString() for x in node.inputs]
        proto = ir.to_proto(node).SerializeToString()
        text = schema.get_context_dependent_function_with_opset_version(
            max(dependent), proto, types
        )
        body.ParseFromString(text)
    return body if body.node else None


def _state_defaults(node: ir.Node, opsets: dict[str, int]) -> None:
    """Add the default attributes that `node` omits, as its body refers to them."""
    schema = defs.get_schema(node.op_type, opsets[node.domain], node.domain)
    for name, attribute in schema.attributes.items():
        if name not in node.attributes and attribute.default_value.name:
            node.attributes[name] = ir.serde.deserialize_attribute(attribute.default_value)


def _type(x: ir.Value | None) -> onnx.TypeProto:
    if x is None or x.type is None:
        return onnx.TypeProto()
    return ir.serde.serialize_value(x).type
