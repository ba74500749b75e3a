"""Checks of single nodes: the operands, attributes and subgraphs that their operators require."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, defs

from onnxgrad.errors import ModelError
from onnxgrad.model.validate.tensors import check_sparse, check_tensor, shown

_KINDS = AttributeProto.AttributeType
_FIELD = {  # the field of AttributeProto that holds the value
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
    """What the schema of an operator says."""

    inputs: tuple[int, int]  # the least and the greatest number
    outputs: tuple[int, int]
    single_inputs: tuple[int, ...]  # indices of those that cannot be left out
    single_outputs: tuple[int, ...]
    types: Mapping[str, int]  # of attributes
    required: frozenset[str]


@lru_cache(maxsize=4096)
def _signature(domain: str, op_type: str, opset: int) -> _Signature | None:
    """Return the signature of an operator, None if onnx has no schema for it."""
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
    """Return the key of the local function that `node` calls, if it calls one."""
    return ("" if node.domain == "ai.onnx" else node.domain, node.op_type, node.overload)


def title(node: NodeProto) -> str:
    """Return the operator, the name and the first output of `node`, for messages."""
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
    """Raise unless `node` has the operands and attributes that its operator requires.

    Args:
        node: any node.
        opset: version of the opset of the node's domain, 0 if it is not imported.
        function: the local function that the node calls, if it does.
        inside: whether the node is in a local function, to whose attributes it may refer.
        needed: the attributes of that function that the node requires are added to it.

    Returns:
        The subgraphs of the node.

    Raises:
        ModelError: with the node as its subject.
    """
    _check_header(node)
    signature = None if function is not None else _signature(node.domain, node.op_type, opset)
    graphs = _check_attributes(node, signature, inside, needed)
    if function is not None:
        _check_call(node, function)
    elif signature is not None:
        _check_operands(node, signature)
        _check_required(node, signature, opset)
    elif opset < 1 and node.domain in STANDARD:
        raise ModelError(f"{title(node)} is of a domain without an opset: import one")
    if signature is None and not (node.op_type.isprintable() and node.domain.isprintable()):
        raise ModelError(f"{title(node)} is no operator: correct its name")
    return graphs


def _check_header(node: NodeProto) -> None:
    """Raise unless `node` has an operator type in valid text, and an output."""
    # protobuf returns bytes for text that is not UTF-8
    if type(node.op_type) is not str or type(node.domain) is not str:
        raise ModelError("an operator is not UTF-8: the model is damaged, export it again")
    if not node.op_type:
        raise ModelError(f"{title(node)} has no operator type: it is damaged, export it again")
    if not node.output:
        raise ModelError(f"{title(node)} has no output: remove the node")


def _check_attributes(
    node: NodeProto, signature: _Signature | None, inside: bool, needed: set[str]
) -> list[GraphProto]:
    """Raise unless each attribute of `node` is valid and there once; return the subgraphs."""
    names: set[str] = set()
    graphs: list[GraphProto] = []
    types = signature.types if signature is not None else {}
    for attribute in node.attribute:
        name, kind = attribute.name, attribute.type
        names.add(name)
        if type(name) is not str:
            raise ModelError(f"{title(node)} has an attribute that is not UTF-8: export it again")
        if kind not in _PLAIN:
            _check_value(attribute, node, graphs)
        if attribute.ref_attr_name:
            _check_reference(attribute, node, inside)
            if signature is not None and name in signature.required:
                needed.add(attribute.ref_attr_name)
        if kind != types.get(name, kind):
            raise ModelError(
                f"{title(node)} has the attribute {name!r} as {_KINDS.Name(kind)}, not "
                f"{_KINDS.Name(types[name])}: change its type"
            )
    if len(names) < len(node.attribute) or "" in names:
        raise ModelError(f"{title(node)} has an attribute twice, or without a name: remove it")
    return graphs


def _check_required(node: NodeProto, signature: _Signature, opset: int) -> None:
    """Raise unless `node` has the attributes and subgraphs that its operator requires."""
    names = {a.name for a in node.attribute}
    if not signature.required <= names:
        missing = min(signature.required - names)
        raise ModelError(f"{title(node)} lacks the attribute {missing!r}: add it")
    if node.domain in STANDARD:
        if node.op_type == "Constant" and not names:
            raise ModelError(f"{title(node)} has no value: it is damaged, export it again")
        if node.op_type in _BODIES:
            _check_bodies(node, opset)


def _check_reference(attribute: AttributeProto, node: NodeProto, inside: bool) -> None:
    if not inside:
        raise ModelError(
            f"the attribute {shown(attribute.name)} of {title(node)} refers to the attribute "
            f"{shown(attribute.ref_attr_name)} of a function, but is outside of one: write its "
            "value"
        )


def _check_value(attribute: AttributeProto, node: NodeProto, graphs: list[GraphProto]) -> None:
    """Check an attribute of tensors, graphs or types; add its graphs to `graphs`."""
    kind = attribute.type
    if kind not in _TYPES or kind == AttributeProto.UNDEFINED:
        what = f"the attribute {shown(attribute.name)} of {title(node)}"
        raise ModelError(f"{what} has a type that ONNX lacks: export it again")
    field = _FIELD.get(kind)
    if attribute.ref_attr_name:
        return
    if field is not None and not attribute.HasField(field):
        what = f"the attribute {shown(attribute.name)} of {title(node)}"
        raise ModelError(f"{what} is empty: it is damaged, export it again")
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
    """Raise unless `node` has as many inputs and outputs as its operator allows."""
    for kind, names, (least, most), single in (
        ("input", node.input, signature.inputs, signature.single_inputs),
        ("output", node.output, signature.outputs, signature.single_outputs),
    ):
        n = len(names)
        if not least <= n <= most:
            allowed = f"at least {least}" if n < least else f"at most {most}"
            raise ModelError(
                f"{title(node)} has {n} {kind}s, and its operator {allowed}: correct the node"
            )
        if "" in names:
            for i in single:
                if i < n and not names[i]:
                    raise ModelError(f"{title(node)} leaves out {kind} {i}: name it")


def _check_call(node: NodeProto, function: FunctionProto) -> None:
    for kind, names, most in (
        ("inputs", node.input, len(function.input)),
        ("outputs", node.output, len(function.output)),
    ):
        if len(names) > most:
            raise ModelError(
                f"{title(node)} has {len(names)} {kind}, and the function that it calls has "
                f"{most}: correct the node"
            )


# -- operators with subgraphs ----------------------------------------------------------------------

_BODIES = {
    "If": ("then_branch", "else_branch"),
    "Loop": ("body",),
    "Scan": ("body",),
    "SequenceMap": ("body",),
}


def _check_bodies(node: NodeProto, opset: int) -> None:
    """Raise unless the subgraphs of `node` have as many inputs and outputs as it requires."""
    inputs, outputs = len(node.input), len(node.output)
    counts = {
        "If": (0, outputs),
        "Loop": (inputs, outputs + 1),
        "Scan": (inputs - (opset < 9), outputs),
        "SequenceMap": (inputs, outputs),
    }[node.op_type]
    if node.op_type == "Scan":
        scanned = next((a.i for a in node.attribute if a.name == "num_scan_inputs"), 0)
        states = counts[0] - scanned
        if scanned < 1 or states < 0 or states > outputs:
            raise ModelError(
                f"{title(node)} has num_scan_inputs={scanned}, which its {inputs} inputs and "
                f"{outputs} outputs do not allow: write the number of scanned inputs"
            )
    for attribute in node.attribute:
        if attribute.name in _BODIES[node.op_type] and attribute.HasField("g"):
            graph: GraphProto = attribute.g
            for kind, count, required in (
                ("inputs", len(graph.input), counts[0]),
                ("outputs", len(graph.output), counts[1]),
            ):
                if count != required:
                    raise ModelError(
                        f"the {attribute.name!r} of {title(node)} has {count} {kind}, and the "
                        f"node requires {required}: make their numbers match"
                    )
