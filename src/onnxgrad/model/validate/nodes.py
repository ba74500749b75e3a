"""Nodes of a model that enters: operands, attributes and subgraphs that their operators ask for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, defs

from onnxgrad.errors import ModelError
from onnxgrad.model.validate.tensors import check_sparse, check_tensor, shown

_KINDS = AttributeProto.AttributeType
_FIELD = {  # of those attributes that are empty without it
    AttributeProto.TENSOR: "t",
    AttributeProto.GRAPH: "g",
    AttributeProto.SPARSE_TENSOR: "sparse_tensor",
    AttributeProto.TYPE_PROTO: "tp",
}
_TYPES = frozenset(_KINDS.values())
_PLAIN = frozenset(
    _KINDS.Value(name) for name in ("FLOAT", "INT", "STRING", "FLOATS", "INTS", "STRINGS")
)
STANDARD = ("", "ai.onnx")
Key = tuple[str, str, str]  # domain, name and overload of a function


class _Signature(NamedTuple):
    """What a schema of onnx says of its operator."""

    inputs: tuple[int, int]  # the fewest and the most
    outputs: tuple[int, int]
    single_inputs: tuple[int, ...]  # those that cannot be left out
    single_outputs: tuple[int, ...]
    types: Mapping[str, int]
    required: frozenset[str]


@lru_cache(maxsize=4096)
def _signature(domain: str, op_type: str, opset: int) -> _Signature | None:
    """Return what onnx knows of an operator, None where it does not know it."""
    domain = "" if domain in STANDARD else domain
    if opset < 1 or not defs.has(op_type, opset, domain):
        return None
    schema: Any = defs.get_schema(op_type, opset, domain)
    if schema.deprecated:
        return None
    single = defs.OpSchema.FormalParameterOption.Single
    return _Signature(
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        tuple(i for i, p in enumerate(schema.inputs) if p.option == single),
        tuple(i for i, p in enumerate(schema.outputs) if p.option == single),
        {name: int(a.type.value) for name, a in schema.attributes.items()},
        frozenset(name for name, a in schema.attributes.items() if a.required),
    )


def key_of(node: NodeProto) -> Key:
    """Return what identifies the function that `node` calls, if it calls one."""
    return ("" if node.domain == "ai.onnx" else node.domain, node.op_type, node.overload)


def title(node: NodeProto) -> str:
    """Return how messages call `node`."""
    domain = "" if node.domain in STANDARD else f"{node.domain!s}::"
    name = f"{domain}{node.op_type!s}"
    output = next((y for y in node.output if y), "")
    plain = name.replace("::", "").replace(".", "").isidentifier()
    operator = name if plain and len(name) < 100 else shown(name)
    return f"{operator} (node {shown(node.name)}, output {shown(output)})"


def check_node(
    node: NodeProto,
    opset: int,
    function: FunctionProto | None,
    inside: bool,
    needed: set[str],
) -> list[GraphProto]:
    """Raise unless `node` has the operands and attributes that its operator asks for.

    Args:
        node: any node.
        opset: version of the operators in the domain of the node, 0 if it is not imported.
        function: the one that the node calls, if it does.
        inside: whether the node is in a function, and may refer to the attributes of that.
        needed: is added the attributes of that function that the node cannot do without.

    Returns:
        The subgraphs of the node.

    Raises:
        ModelError: with the node as its subject.
    """
    op_type, domain, inputs, outputs = node.op_type, node.domain, node.input, node.output
    if type(op_type) is not str or type(domain) is not str:  # protobuf hands out bytes then
        raise ModelError("an operator is not UTF-8: the model is damaged, write it again")
    if not op_type:
        raise ModelError(f"{title(node)} states no operator: it is damaged, write it again")
    if not outputs:
        raise ModelError(f"{title(node)} has no output: remove the node")
    signature = None if function is not None else _signature(domain, op_type, opset)
    attributes = node.attribute
    names: set[str] = set()
    graphs: list[GraphProto] = []
    types = signature.types if signature is not None else {}
    for attribute in attributes:
        name, kind = attribute.name, attribute.type
        names.add(name)
        if type(name) is not str:
            raise ModelError(f"{title(node)} has an attribute that is not UTF-8: write it again")
        if kind not in _PLAIN:
            _check_value(attribute, node, graphs)
        if attribute.ref_attr_name:
            _check_reference(attribute, node, inside)
            if signature is not None and name in signature.required:
                needed.add(attribute.ref_attr_name)
        if kind != types.get(name, kind):
            raise ModelError(
                f"{title(node)} has the attribute {name!r} as {_KINDS.Name(kind)}, not "
                f"{_KINDS.Name(types[name])}: write it as that"
            )
    if attributes and (len(names) < len(attributes) or "" in names):
        raise ModelError(f"{title(node)} has an attribute twice, or without a name: remove it")
    if function is not None:
        _check_call(node, function)
    if signature is None:
        if function is None and opset < 1 and domain in STANDARD:
            raise ModelError(f"{title(node)} is of a domain without an opset: import one")
        if not (op_type.isprintable() and domain.isprintable()):
            raise ModelError(f"{title(node)} is no operator: correct its name")
        return graphs
    least, most = signature.inputs
    fewest, mostly = signature.outputs
    n, m = len(inputs), len(outputs)
    if n < least or n > most or m < fewest or m > mostly or "" in inputs or "" in outputs:
        _check_operands(node, signature)
    if not signature.required <= names:
        missing = min(signature.required - names)
        raise ModelError(f"{title(node)} lacks the attribute {missing!r}: add it")
    if domain in STANDARD:
        if op_type == "Constant" and not names:
            raise ModelError(f"{title(node)} holds no value: it is damaged, write it again")
        if op_type in _BODIES:
            _check_bodies(node, opset)
    return graphs


def _check_reference(attribute: AttributeProto, node: NodeProto, inside: bool) -> None:
    if not inside:
        raise ModelError(
            f"the attribute {shown(attribute.name)} of {title(node)} refers to "
            f"{shown(attribute.ref_attr_name)} of a function, and is in none: write its value"
        )


def _check_value(attribute: AttributeProto, node: NodeProto, graphs: list[GraphProto]) -> None:
    """Check the value of an attribute that is more than numbers or text; add its graphs."""
    kind = attribute.type
    if kind not in _TYPES or kind == AttributeProto.UNDEFINED:
        what = f"the attribute {shown(attribute.name)} of {title(node)}"
        raise ModelError(f"{what} has no type that ONNX has: write it again")
    field = _FIELD.get(kind)
    if attribute.ref_attr_name:
        return
    if field is not None and not attribute.HasField(field):
        what = f"the attribute {shown(attribute.name)} of {title(node)}"
        raise ModelError(f"{what} is empty: it is damaged, write it again")
    if kind == AttributeProto.TENSOR:
        check_tensor(attribute.t, lambda: f"the tensor of {title(node)}")
    elif kind == AttributeProto.SPARSE_TENSOR:
        check_sparse(attribute.sparse_tensor, f"the sparse tensor of {title(node)}")
    elif kind == AttributeProto.TENSORS:
        for tensor in attribute.tensors:
            check_tensor(tensor, lambda: f"a tensor of {title(node)}")
    elif kind == AttributeProto.GRAPH:
        graphs.append(attribute.g)
    elif kind == AttributeProto.GRAPHS:
        graphs.extend(attribute.graphs)


def _check_operands(node: NodeProto, signature: _Signature) -> None:
    for kind, names, (least, most), single in (
        ("inputs", node.input, signature.inputs, signature.single_inputs),
        ("outputs", node.output, signature.outputs, signature.single_outputs),
    ):
        n = len(names)
        if not least <= n <= most:
            wanted = f"at least {least}" if n < least else f"at most {most}"
            raise ModelError(
                f"{title(node)} has {n} {kind}, where its operator has {wanted}: correct the node"
            )
        for i in single:
            if i < n and not names[i]:
                raise ModelError(f"{title(node)} leaves out number {i} of its {kind}: name it")


def _check_call(node: NodeProto, function: FunctionProto) -> None:
    for kind, names, most in (
        ("inputs", node.input, len(function.input)),
        ("outputs", node.output, len(function.output)),
    ):
        if len(names) > most:
            raise ModelError(
                f"{title(node)} has {len(names)} {kind}, and the function that it calls {most}: "
                "correct the node"
            )


# -- operators with subgraphs ----------------------------------------------------------------------

_BODIES = {
    "If": ("then_branch", "else_branch"),
    "Loop": ("body",),
    "Scan": ("body",),
    "SequenceMap": ("body",),
}


def _check_bodies(node: NodeProto, opset: int) -> None:
    """Raise unless the subgraphs of `node` take and return as many values as it hands on."""
    read, written = len(node.input), len(node.output)
    counts = {
        "If": (0, written),
        "Loop": (read, written + 1),
        "Scan": (read - (opset < 9), written),
        "SequenceMap": (read, written),
    }[node.op_type]
    if node.op_type == "Scan":
        scanned = next((a.i for a in node.attribute if a.name == "num_scan_inputs"), 0)
        states = counts[0] - scanned
        if scanned < 1 or states < 0 or states > written:
            raise ModelError(
                f"{title(node)} says num_scan_inputs={scanned}, which its {read} inputs and "
                f"{written} outputs do not allow: write the number of scanned inputs"
            )
    for attribute in node.attribute:
        if attribute.name in _BODIES[node.op_type] and attribute.HasField("g"):
            graph: GraphProto = attribute.g
            for kind, there, wanted in (
                ("inputs", len(graph.input), counts[0]),
                ("outputs", len(graph.output), counts[1]),
            ):
                if there != wanted:
                    raise ModelError(
                        f"the {attribute.name!r} of {title(node)} has {there} {kind}, where the "
                        f"node asks for {wanted}: give the node and its subgraph matching ones"
                    )
