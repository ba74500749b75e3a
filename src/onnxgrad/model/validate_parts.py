"""Checks of the parts of a model: nodes, constants and declared types.

A node has the operands, attributes and subgraphs that its operator requires; the data of a constant
match its shape and type.

The checker of onnx compares nodes with their operators. It is not asked about the rest: it accepts
tensors with more data than their shape says, unknown element types of inputs, calls of functions
with too many operands, and subgraphs of a wrong number of inputs; and it refuses sparse tensors
that onnxruntime runs, with indices of int32 or unsorted ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from math import prod

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
    checker,
    numpy_helper,
)

from onnxgrad.errors import ModelError, printable
from onnxgrad.limits import check_limit
from onnxgrad.model.constants import standard
from onnxgrad.model.external import nbytes
from onnxgrad.model.opsets import operator_schema
from onnxgrad.operators import WITH_SUBGRAPHS

_TENSORS_AND_GRAPHS = frozenset(  # types of attributes whose parts have own checks
    AttributeProto.AttributeType.Value(f"{part}{plural}")
    for part in ("TENSOR", "SPARSE_TENSOR", "GRAPH")
    for plural in ("", "S")
)
CallKey = tuple[str, str, str]  # domain, name and overload of a local function

_NO_SCHEMA = "onnxgrad.unknown"  # domain in which onnx checks nodes that it has no schema for
_SHOWN = 100  # characters of a name, or lengths of a shape, in a message
_LONGEST = 400  # characters of a message of onnx
_MOST = (1 << 63) - 1  # the greatest size in bytes
_DTYPES = {d.value for d in ir.DataType if d != ir.DataType.UNDEFINED}
_COMPLEX = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)


def shown(name: str | bytes) -> str:
    """Return a name for messages: quoted, control characters escaped, shortened."""
    return repr(name if len(name) <= _SHOWN else f"{name[:_SHOWN]!s}...")


# -- nodes -----------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _required_attributes(domain: str, op_type: str, opset: int) -> frozenset[str] | None:
    """Return the attributes that an operator requires; None if onnx has no schema for it."""
    schema = operator_schema(op_type, opset, domain)
    if schema is None:
        return None
    return frozenset(name for name, a in schema.attributes.items() if a.required)


@lru_cache(maxsize=256)
def checker_context(domain: str, opset: int) -> checker.C.CheckerContext:
    """Return the context in which onnx checks the nodes of a domain."""
    context = checker.C.CheckerContext()
    context.ir_version, context.opset_imports = onnx.IR_VERSION, {domain: opset}
    return context


def called_key(node: NodeProto) -> CallKey:
    """Return the key of the local function that `node` calls, if it calls one."""
    return standard(node.domain), node.op_type, node.overload


def title(node: NodeProto) -> str:
    """Return the operator, the name and the first output of `node`, for messages."""
    domain = standard(node.domain)
    name = f"{domain!s}::{node.op_type!s}" if domain else str(node.op_type)
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
    # protobuf returns bytes for text that is not UTF-8
    texts = (node.op_type, node.domain, *(a.name for a in node.attribute))
    if any(type(text) is not str for text in texts):
        raise ModelError(
            f"{title(node)} has text that is not UTF-8: it is damaged, export it again"
        )
    if not node.output:
        raise ModelError(f"{title(node)} has no output: remove the node")
    domain, required = standard(node.domain), None
    if function is None:
        required = _required_attributes(domain, node.op_type, opset)
        if required is None and opset < 1 and not domain:
            raise ModelError(f"{title(node)} is of a domain without an opset: import one")
        if required is None and not (node.op_type.isprintable() and domain.isprintable()):
            raise ModelError(f"{title(node)} is no operator: correct its name")
    else:
        _check_call(node, function)
    _check_by_onnx(node, *((_NO_SCHEMA, 1) if required is None else (domain, opset)))
    for attribute in node.attribute:
        _check_attribute(attribute, node, required or (), needed)
    if function is None and not domain:
        if node.op_type == "Constant" and not node.attribute:
            raise ModelError(f"{title(node)} has no value: it is damaged, export it again")
        if node.op_type in WITH_SUBGRAPHS:
            _check_bodies(node, opset)


def _check_call(node: NodeProto, function: FunctionProto) -> None:
    """Raise if the call of a function has more inputs or outputs than the function."""
    for kind in ("input", "output"):
        n, most = len(getattr(node, kind)), len(getattr(function, kind))
        if n > most:
            raise ModelError(
                f"{title(node)} has {n} {kind}s, and the function that it calls at most {most}: "
                "correct it"
            )


def _check_by_onnx(node: NodeProto, domain: str, opset: int) -> None:
    """Raise unless the checker of onnx accepts the node, without its tensors and graphs."""
    bare = NodeProto(op_type=node.op_type, domain=domain, input=node.input, output=node.output)
    for a in node.attribute:
        if a.type in _TENSORS_AND_GRAPHS:  # a reference has a name and a type only
            bare.attribute.add(name=a.name, type=a.type, ref_attr_name=a.name)
        else:
            bare.attribute.append(a)
    try:
        checker.check_node(bare, checker_context(domain, opset))
    except checker.ValidationError as e:
        found = printable(str(e)[:_LONGEST]).rstrip(".")
        raise ModelError(
            f"{title(node)} has operands or attributes that onnx refuses: {found}; correct it"
        ) from None


def _check_attribute(
    attribute: AttributeProto, node: NodeProto, required: Collection[str], needed: set[str] | None
) -> None:
    """Raise unless an attribute of `node` refers to one of a function, or its tensors are valid."""
    if attribute.ref_attr_name:
        if needed is None:
            own, other = shown(attribute.name), shown(attribute.ref_attr_name)
            raise ModelError(
                f"the attribute {own} of {title(node)} refers to the attribute {other} of a "
                "function, but is outside of one: write its value"
            )
        if attribute.name in required:
            needed.add(attribute.ref_attr_name)
        return
    for tensor in (attribute.t,) if attribute.type == AttributeProto.TENSOR else attribute.tensors:
        check_tensor(tensor, lambda: f"the tensor of {title(node)}")
    if attribute.type == AttributeProto.SPARSE_TENSOR:
        check_sparse(attribute.sparse_tensor, f"the sparse tensor of {title(node)}")


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
        if attribute.type == AttributeProto.GRAPH:
            actual = len(attribute.g.input), len(attribute.g.output)
            if actual != counts:
                has, required = (f"{n} inputs and {m} outputs" for n, m in (actual, counts))
                raise ModelError(
                    f"the {attribute.name!r} of {title(node)} has {has}, and the node requires "
                    f"{required}: make their numbers match"
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
    count = prod(dims)
    if kind not in _DTYPES or min(dims, default=0) < 0 or count * 16 > _MOST:
        raise ModelError(
            f"{subject()} has the data type {kind} and the shape {_shown_shape(dims)}, which no "
            "tensor has: correct them, or export the model again"
        )
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
    field = kind.WhichOneof("value")
    if field in ("sequence_type", "optional_type"):
        return innermost(getattr(kind, field).elem_type)
    if field == "map_type":
        return innermost(kind.map_type.value_type)
    return kind.sparse_tensor_type if field == "sparse_tensor_type" else kind.tensor_type
