"""Operators that the specification defines by others: their function bodies in their place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx
import onnx_ir as ir
from onnx import defs
from onnx_ir.passes.common import InlinePass, LiftConstantsToInitializersPass

_FIRST = 18  # bodies of older versions use forms that newer versions lack
_DOMAIN = "onnxgrad.bodies"


def expand(model: ir.Model, nodes: Iterable[ir.Node]) -> bool:
    """Replace those of `nodes` that have a body by it, in place; tell whether there was one."""
    found = False
    for i, node in enumerate(nodes):
        body = _body(node, model.opset_imports)
        if body is not None:
            function = ir.serde.deserialize_function(body)
            function.domain, function.name = _DOMAIN, f"{node.op_type}_{i}"
            function.opset_imports.clear()  # its operators mean the same at the model's version
            model.functions[function.identifier()] = function
            _state_defaults(node, model.opset_imports)
            node.domain, node.op_type = function.domain, function.name
            found = True
    if found:
        InlinePass(lambda function: function.domain == _DOMAIN)(model)
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        model.opset_imports.pop(_DOMAIN, None)
    return found


def has_body(schema: Any) -> bool:
    """Tell whether the specification defines an operator by others, in forms that are known."""
    versions = (
        *schema.function_opset_versions,
        *schema.context_dependent_function_opset_versions,
    )
    return max(versions, default=0) >= _FIRST


def _body(node: ir.Node, opsets: dict[str, int]) -> onnx.FunctionProto | None:
    """Return the newest body that the specification has for `node`, or None."""
    opset = opsets.get(node.domain, 0)
    if not opset or not defs.has(node.op_type, opset, node.domain):
        return None
    schema: Any = defs.get_schema(node.op_type, opset, node.domain)
    fixed = [v for v in schema.function_opset_versions if _FIRST <= v <= opset]
    dependent = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
    made = onnx.FunctionProto()
    if fixed:
        made.ParseFromString(schema.get_function_with_opset_version(max(fixed)))
    elif dependent and max(dependent) >= _FIRST:
        types = [_type(x).SerializeToString() for x in node.inputs]
        proto = ir.to_proto(node).SerializeToString()
        text = schema.get_context_dependent_function_with_opset_version(
            max(dependent), proto, types
        )
        made.ParseFromString(text)
    return made if made.node else None


def _state_defaults(node: ir.Node, opsets: dict[str, int]) -> None:
    """Write the attributes that `node` leaves out, for the references to them in its body."""
    schema = defs.get_schema(node.op_type, opsets[node.domain], node.domain)
    for name, attribute in schema.attributes.items():
        if name not in node.attributes and attribute.default_value.name:
            node.attributes[name] = ir.serde.deserialize_attribute(attribute.default_value)


def _type(x: ir.Value | None) -> onnx.TypeProto:
    if x is None or x.type is None:
        return onnx.TypeProto()
    return ir.serde.serialize_value(x).type
