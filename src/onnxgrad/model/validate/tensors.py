"""Checks of constants, whose data must match their shape and type, and of declared types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

import numpy as np
import onnx
import onnx_ir as ir
from onnx import SparseTensorProto, TensorProto, TypeProto, ValueInfoProto, numpy_helper

from onnxgrad.errors import ModelError
from onnxgrad.limits import check_limit
from onnxgrad.model.external import nbytes

_SHOWN = 100  # characters of a name, or lengths of a shape, in a message
_MOST = (1 << 63) - 1  # the greatest size in bytes
_DTYPES = {d.value for d in ir.DataType if d != ir.DataType.UNDEFINED}
_COMPLEX = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)


def shown(name: str | bytes) -> str:
    """Return a name for messages: quoted, control characters escaped, shortened."""
    return repr(name if len(name) <= _SHOWN else f"{name[:_SHOWN]!s}...")


def _shape(dims: Sequence[int]) -> str:
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
        raise ModelError(f"{subject()} has a shape of {_size(count)} elements: correct it")
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
            f"{subject()} holds {relation} data than its shape {_shape(dims)} says "
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
        raise ModelError(f"{what} has the shape {_shape(dims)}: lengths are not negative")
    check_limit("dense_elements", count, f"{what} has too many elements for a dense tensor")
    n = values.dims[0] if len(values.dims) == 1 else -1
    if indices.data_type not in _INDEX_TYPES or list(indices.dims) not in ([n], [n, len(dims)]):
        raise ModelError(
            f"{what} has values of shape {_shape(values.dims)} and indices of shape "
            f"{_shape(indices.dims)}: these are (n,), and integers of shape (n,) or (n, rank)"
        )
    positions = numpy_helper.to_array(indices)
    ends = np.array([count] if positions.ndim == 1 else dims)
    if ((positions < 0) | (positions >= ends)).any():
        raise ModelError(f"{what} has an index outside of its shape {_shape(dims)}")


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
    """Return a type of tensors, or that of the tensors in a sequence, an Optional or a map."""
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


def _size(count: int) -> str:
    return str(count) if count < 10**18 else f"more than 10^{len(str(count)) - 1}"
