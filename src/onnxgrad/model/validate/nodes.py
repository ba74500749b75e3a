"""Checks of single nodes: the operands, attributes and subgraphs that their operators require."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from onnx import AttributeProto, FunctionProto, NodeProto, defs

from onnxgrad.errors import ModelError
from onnxgrad.model.constants import standard
from onnxgrad.model.validate.tensors import check_sparse, check_tensor, shown

_KINDS = AttributeProto.AttributeType
_FIELD = {  # the field of AttributeProto that holds the value, if it is one message
    AttributeProto.TENSOR: "t",
    AttributeProto.GRAPH: "g",
    AttributeProto.SPARSE_TENSOR: "sparse_tensor",
    AttributeProto.TYPE_PROTO: "tp",
}
_TYPES = frozenset(_KINDS.values()) - {AttributeProto.UNDEFINED}
_PLAIN = frozenset(map(_KINDS.Value, "FLOAT INT STRING FLOATS INTS STRINGS".split()))
STANDARD = ("", "ai.onnx")
Key = tuple[str, str, str]  # domain, name and overload of a function


class _Signature(NamedTuple):
    """What the schema of an operator says, or the call of a function has to agree with."""

    inputs: tuple[int, int]  # the least and the greatest number
    outputs: tuple[int, int]
    single_inputs: tuple[int, ...]  # indices of those that cannot be left out
    single_outputs: tuple[int, ...]
    types: Mapping[str, int]  # of attributes
    required: frozenset[str]


@lru_cache(maxsize=4096)
def _signature(domain: str, op_type: str, opset: int) -> _Signature | None:
    """Return the signature of an operator, None if onnx has no schema for it."""
    domain = standard(domain)
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
    return standard(node.domain), node.op_type, node.overload


def title(node: NodeProto) -> str:
    """Return the operator, the name and the first output of `node`, for messages."""
    domain = "" if node.domain in STANDARD else f"{node.domain!s}::"
    name = f"{domain}{node.op_type!s}"
    output = next((y for y in node.output if y), "")
    plain = name.replace("::", "").replace(".", "").isidentifier()
    operator = name if plain and len(name) < 100 else shown(name)
    return f"{operator} (node {shown(node.name)}, output {shown(output)})"


def check_node(
    node: NodeProto, opset: int, function: FunctionProto | None, needed: set[str] | None
) -> None:
    """Raise unless `node` has the operands and attributes that its operator requires.

    Args:
        node: any node.
        opset: version of the opset of the node's domain, 0 if it is not imported.
        function: the local function that the node calls, if it does.
        needed: the attributes that the node requires of the local function that it is in are added
            to it; None: it is in none, to whose attributes it could refer.
    """
    _check_header(node)
    if function is not None:
        most = (0, len(function.input)), (0, len(function.output))
        signature = _Signature(*most, (), (), {}, frozenset())
        _check_attributes(node, signature, needed)
        _check_operands(node, signature, "the function that it calls")
        return
    schema = _signature(node.domain, node.op_type, opset)
    _check_attributes(node, schema, needed)
    if schema is not None:
        _check_operands(node, schema, "its operator")
        _check_required(node, schema, opset)
    elif opset < 1 and node.domain in STANDARD:
        raise ModelError(f"{title(node)} is of a domain without an opset: import one")
    elif not (node.op_type.isprintable() and node.domain.isprintable()):
        raise ModelError(f"{title(node)} is no operator: correct its name")


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
    node: NodeProto, signature: _Signature | None, needed: set[str] | None
) -> None:
    """Raise unless each attribute of `node` is valid and there once."""
    names: set[str] = set()
    types = signature.types if signature is not None else {}
    for attribute in node.attribute:
        name, kind = attribute.name, attribute.type
        names.add(name)
        if type(name) is not str:
            raise ModelError(f"{title(node)} has an attribute that is not UTF-8: export it again")
        if kind not in _PLAIN:
            _check_value(attribute, node)
        if attribute.ref_attr_name:
            if needed is None:
                raise ModelError(
                    f"the attribute {shown(name)} of {title(node)} refers to the attribute "
                    f"{shown(attribute.ref_attr_name)} of a function, but is outside of one: write "
                    "its value"
                )
            if signature is not None and name in signature.required:
                needed.add(attribute.ref_attr_name)
        if kind != types.get(name, kind):
            raise ModelError(
                f"{title(node)} has the attribute {name!r} as {_KINDS.Name(kind)}, not "
                f"{_KINDS.Name(types[name])}: change its type"
            )
    if len(names) < len(node.attribute) or "" in names:
        raise ModelError(f"{title(node)} has an attribute twice, or without a name: remove it")


def _check_required(node: NodeProto, signature: _Signature, opset: int) -> None:
    """Raise unless `node` has the attributes and subgraphs that its operator requires."""
    names = {a.name for a in node.attribute}
    if not signature.required <= names:
        missing = min(signature.required - names)
        raise ModelError(f"{title(node)} lacks the attribute {missing!r}: add it")
    if node.domain in STANDARD:
        if node.op_type == "Constant" and not names:
            raise ModelError(f"{title(node)} has no value: it is damaged, export it again")
        if node.op_type in ("If", "Loop", "Scan", "SequenceMap"):
            _check_bodies(node, opset)


def _check_value(attribute: AttributeProto, node: NodeProto) -> None:
    """Raise unless an attribute of tensors, graphs or types has a value, and its tensors agree."""
    kind, known = attribute.type, attribute.type in _TYPES
    if known and attribute.ref_attr_name:
        return
    if not known or (kind in _FIELD and not attribute.HasField(_FIELD[kind])):
        problem = "is empty: it is damaged" if known else "has a type that ONNX lacks"
        what = f"the attribute {shown(attribute.name)} of {title(node)}"
        raise ModelError(f"{what} {problem}: export it again")
    for tensor in (attribute.t,) if kind == AttributeProto.TENSOR else attribute.tensors:
        check_tensor(tensor, lambda: f"the tensor of {title(node)}")
    if kind == AttributeProto.SPARSE_TENSOR:
        check_sparse(attribute.sparse_tensor, f"the sparse tensor of {title(node)}")


def _check_operands(node: NodeProto, signature: _Signature, owner: str) -> None:
    """Raise unless `node` has as many inputs and outputs as `owner`, its operator, allows."""
    for kind, names, (least, most), single in (
        ("input", node.input, signature.inputs, signature.single_inputs),
        ("output", node.output, signature.outputs, signature.single_outputs),
    ):
        n = len(names)
        if not least <= n <= most:
            allowed = f"at least {least}" if n < least else f"at most {most}"
            raise ModelError(
                f"{title(node)} has {n} {kind}s, and {owner} {allowed}: correct the node"
            )
        if "" in names:
            for i in single:
                if i < n and not names[i]:
                    raise ModelError(f"{title(node)} leaves out {kind} {i}: name it")


def _check_bodies(node: NodeProto, opset: int) -> None:
    """Raise unless the subgraphs of `node` have as many inputs and outputs as it requires."""
    inputs, outputs = len(node.input), len(node.output)
    counts = (0 if node.op_type == "If" else inputs), outputs + (node.op_type == "Loop")
    if node.op_type == "Scan":
        counts = inputs - (opset < 9), outputs
        scanned = next((a.i for a in node.attribute if a.name == "num_scan_inputs"), 0)
        states = counts[0] - scanned
        if scanned < 1 or states < 0 or states > outputs:
            raise ModelError(
                f"{title(node)} has num_scan_inputs={scanned}, which its {inputs} inputs and "
                f"{outputs} outputs do not allow: write the number of scanned inputs"
            )
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH and attribute.HasField("g"):
            actual = len(attribute.g.input), len(attribute.g.output)
            for kind, count, required in zip(("inputs", "outputs"), actual, counts, strict=True):
                if count != required:
                    raise ModelError(
                        f"the {attribute.name!r} of {title(node)} has {count} {kind}, and the "
                        f"node requires {required}: make their numbers match"
                    )
