"""Attributes of nodes with the defaults of their schemas, and the kernels of onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import onnx_ir as ir
from onnx import AttributeProto, defs


def int_attribute(node: ir.Node, name: str) -> int:
    """Return an integer attribute of a node, or its default in the schema of the operator."""
    return _attribute_or_default(node, name).as_int()


def float_attribute(node: ir.Node, name: str) -> float:
    """Return a float attribute of a node, or its default in the schema of the operator."""
    return _attribute_or_default(node, name).as_float()


def ints_attribute(node: ir.Node, name: str) -> Sequence[int]:
    """Return an attribute of integers of a node, or its default in the schema of the operator."""
    return _attribute_or_default(node, name).as_ints()


def string_attribute(node: ir.Node, name: str) -> str:
    """Return a string attribute of a node, or its default in the schema of the operator."""
    return _attribute_or_default(node, name).as_string()


def _attribute_or_default(node: ir.Node, name: str) -> ir.Attr:
    if name in node.attributes:
        return node.attributes[name]
    return default_attribute(node.domain, node.op_type, name)


@cache
def default_attribute(domain: str, op_type: str, name: str) -> ir.Attr:
    """Return the default of an attribute, by the schema of its operator.

    An operator without a schema has the defaults of the standard operator of its name: passes that
    recognize a Softmax by its name meet operators of users, too.

    Raises:
        KeyError: the operator has no schema, or its schema states no default.
    """
    if defs.has(op_type, domain):
        schema: Any = defs.get_schema(op_type, domain=domain)
    else:
        schema = schemas_of_onnxruntime().get((domain, op_type))
    if schema is None and defs.has(op_type):
        schema = defs.get_schema(op_type)
    attribute = None if schema is None else schema.attributes.get(name)
    proto = AttributeProto.FromString(b"" if attribute is None else attribute._default_value)
    if not proto.type:
        raise KeyError(
            f"{op_type} lacks the attribute '{name}', for which its schema has no default: write it"
        )
    return ir.serde.deserialize_attribute(proto)


@cache
def schemas_of_onnxruntime() -> dict[tuple[str, str], Any]:
    """Return the newest schemas of onnxruntime by domain and operator."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    every = sorted(state.get_all_operator_schema(), key=lambda schema: schema.since_version)
    return {(schema.domain, schema.name): schema for schema in every}


@cache
def cpu_kernels() -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Return the first and last opset of each kernel of the CPU, by domain and operator."""
    from onnxruntime import get_available_providers
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    cpu = get_available_providers()[-1]  # providers are sorted from the fastest
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for kernel in state.get_all_opkernel_def():
        if kernel.provider == cpu:
            key = kernel.domain, kernel.op_name
            found.setdefault(key, []).append(kernel.version_range)
    return found


def has_kernel(domain: str, op_type: str) -> bool:
    """Return whether onnxruntime has a CPU kernel of the operator, in any opset."""
    return (domain, op_type) in cpu_kernels()
