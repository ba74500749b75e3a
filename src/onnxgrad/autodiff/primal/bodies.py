"""Nodes that are replaced by the nodes of their branch (If) or of their function body in ONNX.

Exporters write `atleast_1d` and the like as an If on the rank of a tensor. The branch for other
ranks cannot run, and its nodes do not fit the shapes: neither rules nor onnxruntime accept it
in a gradient.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import zip_longest
from typing import Any

import onnx
import onnx_ir as ir
from onnx import defs

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.graph.tidy import detach_graphs
from onnxgrad.graph.traversal import all_nodes, subgraphs
from onnxgrad.operators.shapes import constant

BRANCHES = "static branches"
_FIRST = 18  # opset: older bodies use operators as newer opsets do not have them


def inline_function_body(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """y = f(x), written by the nodes of ONNX's newest function body of f; None if ONNX has no
    body.
    """
    opset = op.root.graph.opset_imports.get(node.domain, 0)
    if not opset or not defs.has(node.op_type, opset, node.domain):
        return None
    schema: Any = defs.get_schema(node.op_type, opset, node.domain)
    body = _newest_function_body(schema, node, opset)
    if body is None:
        return None
    stated = {name: a.default_value for name, a in schema.attributes.items()}
    attributes = {name: ir.serde.deserialize_attribute(a) for name, a in stated.items() if a.name}
    attributes |= node.attributes
    for inner in all_nodes(body):
        for reference in [a for a in inner.attributes.values() if a.is_ref()]:
            value = attributes.get(str(reference.ref_attr_name))
            del inner.attributes[reference.name]
            if value is not None:
                inner.attributes.add(ir.Attr(reference.name, value.type, value.value))
        for y in (y for y in inner.outputs if y.name):
            y.name = op.name(str(y.name))
    for v, x in zip_longest(body.inputs, node.inputs):
        for reader, index in v.uses():
            reader.replace_input_with(index, x)
    nodes, results = list(body), list(body.outputs)
    body.outputs.clear()
    body.remove(nodes)
    op.insert(node, nodes)
    return results


def constant_as_initializer(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """Return an initializer that holds the numbers of a Constant node of a function body."""
    [y] = node.outputs
    if y.is_graph_output() or len(node.attributes) != 1:
        return None
    tensor = ir.convenience.get_const_tensor(y)
    if tensor is None or tensor.dtype == ir.DataType.STRING:
        return None
    return [op.const(tensor.numpy())]


@cache
def operators_with_body() -> list[tuple[str, str]]:
    """Return (domain, name) of all operators that ONNX defines by a function body."""
    return [(s.domain, s.name) for s in defs.get_all_schemas() if has_function_body(s)]


def has_function_body(schema: Any) -> bool:
    """Return whether ONNX defines the operator by a function body of opset 18 or newer."""
    # bodies that depend on the inputs of a node
    dependent = schema.context_dependent_function_opset_versions
    return any(v >= _FIRST for v in (*schema.function_opset_versions, *dependent))


def _newest_function_body(schema: Any, node: ir.Node, opset: int) -> ir.Function | None:
    """Return the newest function body that ONNX has for the operator of `node`, or None."""
    all_versions = schema.function_opset_versions, schema.context_dependent_function_opset_versions
    fixed, dependent = ([v for v in each if _FIRST <= v <= opset] for each in all_versions)
    body = onnx.FunctionProto()
    if fixed:
        body.ParseFromString(schema.get_function_with_opset_version(max(fixed)))
    elif dependent:
        types = [_type_proto(x).SerializeToString() for x in node.inputs]
        proto = ir.to_proto(node).SerializeToString()
        text = schema.get_context_dependent_function_with_opset_version(
            max(dependent), proto, types
        )
        body.ParseFromString(text)
    try:
        return ir.serde.deserialize_function(body) if body.node else None
    except ir.serde.SerdeError:  # onnx's body of Attention lacks outputs
        return None


def _type_proto(x: ir.Value | None) -> onnx.TypeProto:
    if x is None or x.type is None:
        return onnx.TypeProto()
    return ir.serde.serialize_value(x).type


@rewrites("If", group=BRANCHES)
def inline_static_branch(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """If(true, f, h) = f,  If(false, f, h) = h: the nodes of the branch replace the If."""
    condition = constant(node.inputs[0])
    if condition is None:
        return None
    branch = node.attributes["then_branch" if condition.item() else "else_branch"].as_graph()
    results = inline_branch(op, node, branch)
    detach_graphs(b for b in subgraphs(node) if b is not branch)
    return results


def inline_branch(op: Emit, node: ir.Node, branch: ir.Graph) -> list[ir.Value]:
    """Move the nodes of a branch of an If in front of it; return the results of the branch.

    Names that occur several times, which separate branches may have, are changed.
    """
    nodes, results = list(branch), list(branch.outputs)
    counts = Counter(y.name for n in all_nodes(op.root.graph) for y in n.outputs)
    branch.outputs.clear()
    for value in list(branch.initializers.values()):
        del branch.initializers[str(value.name)]
        value.name = op.name(str(value.name))
        op.root.graph.register_initializer(value)
    for y in (y for n in nodes for y in n.outputs if y.name and counts[y.name] > 1):
        y.name = op.name(str(y.name))
    branch.remove(nodes)
    op.insert(node, nodes)
    return results
