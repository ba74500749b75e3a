"""Checks of the parts of a model: nodes, constants and declared types.

A node has the operands, attributes and subgraphs that its operator requires; the data of a constant
match its shape and type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from onnx import (
    AttributeProto,
    FunctionProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
    defs,
    numpy_helper,
)

from onnxgrad.errors import ModelError
from onnxgrad.limits import check_limit
from onnxgrad.model.constants import standard
from onnxgrad.model.external import nbytes
from onnxgrad.model.opsets import operator_schema
from onnxgrad.operators import WITH_SUBGRAPHS

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
CallKey = tuple[str, str, str]  # domain, name and overload of a local function

_SHOWN = 100  # characters of a name, or lengths of a shape, in a message
_MOST = (1 << 63) - 1  # the greatest size in bytes
_DTYPES = {d.value for d in ir.DataType if d != ir.DataType.UNDEFINED}
_COMPLEX = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)


def shown(name: str | bytes) -> str:
    """Return a name for messages: quoted, control characters escaped, shortened."""
    return repr(name if len(name) <= _SHOWN else f"{name[:_SHOWN]!s}...")


# -- nodes -----------------------------------------------------------------------------------------


class _Requirements(NamedTuple):
    """The operands and attributes that nodes of an operator, or of a local function, must have."""

    inputs: tuple[int, int]  # the least and the greatest number
    outputs: tuple[int, int]
    single_inputs: tuple[int, ...]  # indices of the inputs that cannot be left out
    single_outputs: tuple[int, ...]
    types: Mapping[str, int]  # of attributes
    required: frozenset[str]


@lru_cache(maxsize=4096)
def _operator_requirements(domain: str, op_type: str, opset: int) -> _Requirements | None:
    """Return what an operator requires of its nodes; None if onnx has no schema for it."""
    schema = operator_schema(op_type, opset, standard(domain))
    if schema is None:
        return None
    single = defs.OpSchema.FormalParameterOption.Single
    return _Requirements(
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        tuple(i for i, p in enumerate(schema.inputs) if p.option == single),
        tuple(i for i, p in enumerate(schema.outputs) if p.option == single),
        {name: int(a.type.value) for name, a in schema.attributes.items()},
        frozenset(name for name, a in schema.attributes.items() if a.required),
    )


def called_key(node: NodeProto) -> CallKey:
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
    if function is None:
        requirements = _operator_requirements(node.domain, node.op_type, opset)
    else:
        most = (0, len(function.input)), (0, len(function.output))
        requirements = _Requirements(*most, (), (), {}, frozenset())
    _check_attributes(node, requirements, needed)
    if requirements is not None:
        called = "its operator" if function is None else "the function that it calls"
        _check_operands(node, requirements, called)
        if function is None:
            _check_required(node, requirements, opset)
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
    node: NodeProto, requirements: _Requirements | None, needed: set[str] | None
) -> None:
    """Raise unless each attribute of `node` is valid and there once."""
    names: set[str] = set()
    types = requirements.types if requirements is not None else {}
    for attribute in node.attribute:
        name, kind = attribute.name, attribute.type
        names.add(name)
        if type(name) is not str:
            raise ModelError(f"{title(node)} has an attribute that is not UTF-8: export it again")
        if kind not in _PLAIN:
            _check_value(attribute, node)
        if attribute.ref_attr_name:
            if needed is None:
                own, other = shown(name), shown(attribute.ref_attr_name)
                raise ModelError(
                    f"the attribute {own} of {title(node)} refers to the attribute {other} of a "
                    "function, but is outside of one: write its value"
                )
            if requirements is not None and name in requirements.required:
                needed.add(attribute.ref_attr_name)
        if kind != types.get(name, kind):
            actual, right = _KINDS.Name(kind), _KINDS.Name(types[name])
            raise ModelError(
                f"{title(node)} has the attribute {name!r} as {actual}, not {right}: change it"
            )
    if len(names) < len(node.attribute) or "" in names:
        raise ModelError(f"{title(node)} has an attribute twice, or without a name: remove it")


def _check_required(node: NodeProto, requirements: _Requirements, opset: int) -> None:
    """Raise unless `node` has the attributes and subgraphs that its operator requires."""
    names = {a.name for a in node.attribute}
    if not requirements.required <= names:
        missing = min(requirements.required - names)
        raise ModelError(f"{title(node)} lacks the attribute {missing!r}: add it")
    if node.domain in STANDARD:
        if node.op_type == "Constant" and not names:
            raise ModelError(f"{title(node)} has no value: it is damaged, export it again")
        if node.op_type in WITH_SUBGRAPHS:
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


def _check_operands(node: NodeProto, requirements: _Requirements, owner: str) -> None:
    """Raise unless `node` has as many inputs and outputs as `owner`, its operator, allows."""
    for kind, names, (least, most), single in (
        ("input", node.input, requirements.inputs, requirements.single_inputs),
        ("output", node.output, requirements.outputs, requirements.single_outputs),
    ):
        n = len(names)
        if not least <= n <= most:
            allowed = f"at least {least}" if n < least else f"at most {most}"
            raise ModelError(f"{title(node)} has {n} {kind}s, and {owner} {allowed}: correct it")
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


# -- constants and types --------------------------------------------------------------------------


def _shown_shape(dims: Sequence[int]) -> str:
    """Return a shape for messages, shortened."""
    lengths = [str(d) for d in dims[:_SHOWN]] + ["..."] * (len(dims) > _SHOWN)
    return f"[{', '.join(lengths)}]"


def check_tensor(tensor: TensorProto, subject: Callable[[], str]) -> None:
    """Raise if the data type, the shape and the number of elements of `tensor` do not agree.

    The message starts with `subject()`, "initializer 'w'". Data in external files are not read.
    """
    kind, dims = tensor.data_type, tensor.dims
    if kind not in _DTYPES:
        raise ModelError(f"{subject()} has the unknown data type {kind}: use a type of ONNX")
    count = prod(dims)
    if min(dims, default=0) < 0:
        raise ModelError(f"{subject()} has the negative length {min(dims)}: correct its shape")
    if count * 16 > _MOST:
        raise ModelError(f"{subject()} has a shape of {_shown_count(count)} elements: correct it")
    if tensor.data_location == TensorProto.EXTERNAL:
        return
    field, expected = "raw_data", nbytes(tensor)
    if kind == TensorProto.STRING or not tensor.HasField("raw_data"):
        field = onnx.helper.tensor_dtype_to_field(kind)  # noqa: TID251
        if kind == TensorProto.STRING or ir.DataType(kind).bitwidth >= 8:
            expected = count * 2 if kind in _COMPLEX else count
    length = len(getattr(tensor, field))
    if length != expected:
        relation = "fewer" if length < expected else "more"
        raise ModelError(
            f"{subject()} holds {relation} data than its shape {_shown_shape(dims)} says "
            f"({length} entries of {field}, not {expected}): it is damaged, export it again"
        )


# of indices: the specification says int64, but onnxruntime writes the smallest type that fits
_INDEX_TYPES = (TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64)


def check_sparse(sparse: SparseTensorProto, what: str) -> None:
    """Raise if the values, the indices and the shape of a sparse tensor do not agree.

    Also if it is too large for a dense tensor. The message starts with `what`.
    """
    values, indices, dims = sparse.values, sparse.indices, list(sparse.dims)
    for part, tensor in (("values", values), ("indices", indices)):
        check_tensor(tensor, lambda part=part: f"{what}: the tensor of its {part}")  # type: ignore
        if tensor.data_location == TensorProto.EXTERNAL:
            raise ModelError(f"{what} keeps its {part} in an external file: store it as dense")
    count = prod(dims)
    if not dims or min(dims) < 0:
        raise ModelError(f"{what} has the shape {_shown_shape(dims)}: lengths are not negative")
    check_limit("dense_elements", count, f"{what} has too many elements for a dense tensor")
    n = values.dims[0] if len(values.dims) == 1 else -1
    if indices.data_type not in _INDEX_TYPES or list(indices.dims) not in ([n], [n, len(dims)]):
        raise ModelError(
            f"{what} has values of shape {_shown_shape(values.dims)} and indices of shape "
            f"{_shown_shape(indices.dims)}: these are (n,), and integers of shape (n,) or (n, rank)"
        )
    positions = numpy_helper.to_array(indices)
    ends = np.array([count] if positions.ndim == 1 else dims)
    if ((positions < 0) | (positions >= ends)).any():
        raise ModelError(f"{what} has an index outside of its shape {_shown_shape(dims)}")


def check_values(values: Iterable[ValueInfoProto], kind: str) -> bool:
    """Raise for a declared type that ONNX does not have; return whether a length is negative."""
    negative = False
    for value in values:
        if not value.HasField("type"):
            continue
        tensor = innermost(value.type)
        if tensor.elem_type not in _DTYPES and tensor.elem_type:
            raise ModelError(
                f"{kind} {shown(value.name)} has the unknown element type {tensor.elem_type}: "
                "use a type of ONNX"
            )
        if tensor.HasField("shape"):
            negative |= any(d.dim_value < 0 for d in tensor.shape.dim)
            check_limit(
                "rank", len(tensor.shape.dim), f"{kind} {shown(value.name)} has too many axes"
            )
    return negative


def forget_negative(values: Iterable[ValueInfoProto]) -> None:
    """Make the negative lengths that `values` declare unknown, in place."""
    for value in values:
        tensor = innermost(value.type)
        for d in tensor.shape.dim if tensor.HasField("shape") else ():
            if d.dim_value < 0:
                d.ClearField("dim_value")


def innermost(kind: TypeProto) -> TypeProto.Tensor | TypeProto.SparseTensor:
    """Return the tensor type inside a type of sequences, Optionals or maps, or itself."""
    while True:
        field = kind.WhichOneof("value")
        if field in ("sequence_type", "optional_type"):
            kind = getattr(kind, field).elem_type
        elif field == "map_type":
            kind = kind.map_type.value_type
        elif field == "sparse_tensor_type":
            return kind.sparse_tensor_type
        else:
            return kind.tensor_type


def _shown_count(count: int) -> str:
    """Return a number of elements for messages: by its magnitude if it has many digits."""
    return str(count) if count < 10**18 else f"more than 10^{len(str(count)) - 1}"
