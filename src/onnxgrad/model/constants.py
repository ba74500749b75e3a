"""References to the constant tensors of a model, each of which reads and writes its tensor.

A constant is an initializer, or an attribute of a node or a function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    numpy_helper,
)

from onnxgrad.model import external
from onnxgrad.model.traversal import subgraphs

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)

# operator -> {attribute: whether it is a weight when none is named}
ML_COEFFICIENTS = {
    "LinearRegressor": {"coefficients": True, "intercepts": True},
    "LinearClassifier": {"coefficients": True, "intercepts": True},
    "Scaler": {"offset": False, "scale": False},
    "Imputer": {"imputed_value_floats": False},
    "SVMRegressor": {"coefficients": True, "rho": True, "support_vectors": False},
    "SVMClassifier": {
        "coefficients": True,
        "rho": True,
        "support_vectors": False,
        "prob_a": True,
        "prob_b": True,
    },
}

# the fields of a TensorProto that hold its elements or refer to them
_STORAGE = (
    "float_data", "double_data", "int32_data", "int64_data", "uint64_data", "string_data",
    "raw_data", "external_data", "data_location",
)  # fmt: skip

_CONSTANT_ATTRIBUTES = ("value", "value_float", "value_floats", "value_int", "value_ints")

GraphLike = GraphProto | FunctionProto  # what has nodes


@dataclass
class ConstantRef:
    """A reference to one constant tensor."""

    name: str
    read: Callable[[], TensorProto]
    write: Callable[[np.ndarray], None]
    default: bool  # whether it is a weight of `onnx_derivative` when none is named
    graph: GraphLike  # the graph or function that has its node or initializer
    node: NodeProto | None = None  # the node with its attribute; None for an initializer
    operand: int = 0  # for ai.onnx.ml: index of the input that replaces it when it is lifted
    function: FunctionProto | None = None  # the local function that it is in, at any depth
    attribute: AttributeProto | None = None  # of a function, its default, or of a call of one
    stored: Callable[[], np.ndarray] | None = None  # mask of the elements a sparse tensor stores
    graph_name: str = ""  # its name in its graph, where `name` is unique in the whole model

    @property
    def sparse(self) -> bool:
        """Whether the tensor is sparse."""
        return self.stored is not None

    def array(self) -> np.ndarray:
        """Return the current value of the tensor; do not write to it."""
        return external.array(self.read())

    def take_away(self) -> str:
        """Remove an initializer from its graph; return its name there."""
        assert isinstance(self.graph, GraphProto)
        name = self.graph_name
        field = self.graph.sparse_initializer if self.sparse else self.graph.initializer
        for i, tensor in enumerate(field):
            if (tensor.values.name if self.sparse else tensor.name) == name:
                del field[i]
                break
        return name

    def as_operand(self, name: str) -> None:
        """Make the value `name` an input of the ai.onnx.ml node, in addition to the attribute."""
        assert self.node is not None
        self.node.input.extend([""] * (self.operand + 1 - len(self.node.input)))
        self.node.input[self.operand] = name


def scan(model: ModelProto) -> Iterator[ConstantRef]:
    """Yield references to the constants of the main graph, then of the local functions."""
    called = {(f.domain, f.name) for f in model.functions}
    yield from _of_graph(model.graph, called)
    for function in model.functions:
        for ref in _of_function(function, called):
            ref.function = function
            yield ref


def standard(domain: str) -> str:
    """Return `domain`, or "" for its alias "ai.onnx": the standard operators."""
    return "" if domain == "ai.onnx" else domain


def dense(sparse: SparseTensorProto, name: str) -> TensorProto:
    """Return the tensor as dense; its indices are flat, or have one number for each axis."""
    values, indices = (numpy_helper.to_array(t) for t in (sparse.values, sparse.indices))
    array = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 1:
        array.ravel()[indices] = values
    else:
        array[tuple(indices.T)] = values
    return numpy_helper.from_array(array, name)


def _of_function(
    function: FunctionProto, called: Collection[tuple[str, str]]
) -> Iterator[ConstantRef]:
    for attribute in function.attribute_proto:
        if attribute.type == AttributeProto.TENSOR:
            name = f"{function.name}.{attribute.name}"
            yield _of_tensor(attribute.t, name, function, None, _several(attribute.t), attribute)
    yield from _of_nodes(function.node, function, called)


def _of_graph(graph: GraphProto, called: Collection[tuple[str, str]]) -> Iterator[ConstantRef]:
    for tensor in graph.initializer:
        yield _of_tensor(tensor, tensor.name, graph, None, tensor.data_type in FLOATS)
    for sparse in graph.sparse_initializer:
        default = sparse.values.data_type in FLOATS
        yield _of_sparse(sparse, sparse.values.name, graph, None, default)
    yield from _of_nodes(graph.node, graph, called)


def _of_nodes(
    nodes: Iterable[NodeProto], graph: GraphLike, called: Collection[tuple[str, str]]
) -> Iterator[ConstantRef]:
    for node in nodes:
        if node.op_type == "Constant" and not standard(node.domain):
            yield from _of_constant(node, graph)
        elif node.domain == "ai.onnx.ml":
            yield from _of_ml(node, graph)
        elif (node.domain, node.op_type) in called:
            yield from _of_call(node, graph)
        for inner in subgraphs(node):
            yield from _of_graph(inner, called)


def _several(tensor: TensorProto) -> bool:
    """Return whether `tensor` holds more than one float."""
    return tensor.data_type in FLOATS and prod(tensor.dims) > 1


def _of_tensor(
    tensor: TensorProto,
    name: str,
    graph: GraphLike,
    node: NodeProto | None,
    default: bool,
    attribute: AttributeProto | None = None,
) -> ConstantRef:
    def write(array: np.ndarray) -> None:
        data = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape))
        data.ClearField("dims")
        for field in _STORAGE:
            tensor.ClearField(field)
        tensor.MergeFrom(data)

    ref = ConstantRef(name, lambda: tensor, write, default, graph, node, graph_name=name)
    ref.attribute = attribute
    return ref


def _of_sparse(
    sparse: SparseTensorProto, name: str, graph: GraphLike, node: NodeProto | None, default: bool
) -> ConstantRef:
    def stored() -> np.ndarray:
        mask = SparseTensorProto()
        mask.CopyFrom(sparse)
        mask.values.CopyFrom(numpy_helper.from_array(np.ones(sparse.values.dims, bool)))
        return numpy_helper.to_array(dense(mask, ""))

    def write(array: np.ndarray) -> None:
        """Store the elements that were stored, and those that are not zero."""
        flat = np.flatnonzero(stored() | (array != 0))
        is_flat = len(sparse.indices.dims) == 1
        indices = flat if is_flat else np.stack(np.unravel_index(flat, array.shape), 1)
        values = numpy_helper.from_array(array.ravel()[flat], sparse.values.name)
        sparse.values.CopyFrom(values)
        indices = indices.astype(np.int64)
        sparse.indices.CopyFrom(numpy_helper.from_array(indices, sparse.indices.name))

    def read() -> TensorProto:
        return dense(sparse, name)

    return ConstantRef(name, read, write, default, graph, node, graph_name=name, stored=stored)


def _of_constant(node: NodeProto, graph: GraphLike) -> Iterator[ConstantRef]:
    attribute = next((a for a in node.attribute if not a.ref_attr_name), None)
    if attribute is None:
        return
    name = node.output[0]
    if attribute.name == "value":
        yield _of_tensor(attribute.t, name, graph, node, _several(attribute.t))
    elif attribute.name == "sparse_value":
        values = attribute.sparse_tensor.values
        default = values.data_type in FLOATS and prod(attribute.sparse_tensor.dims) > 1
        yield _of_sparse(attribute.sparse_tensor, name, graph, node, default)
    elif attribute.name in _CONSTANT_ATTRIBUTES:
        shape = None if attribute.name.endswith("s") else ()
        default = attribute.name == "value_floats" and len(attribute.floats) > 1
        yield _of_numbers(attribute, name, graph, node, default, shape)


def _of_ml(node: NodeProto, graph: GraphLike) -> Iterator[ConstantRef]:
    for operand, (name, default) in enumerate(ML_COEFFICIENTS.get(node.op_type, {}).items(), 1):
        attribute = next((a for a in node.attribute if a.name == name and a.floats), None)
        if attribute is not None:
            full = f"{node.name or node.output[0]}.{name}"
            ref = _of_numbers(attribute, full, graph, node, default, None)
            ref.operand = operand
            yield ref


def _of_call(node: NodeProto, graph: GraphLike) -> Iterator[ConstantRef]:
    """Yield the tensors that a call passes to a local function as attributes."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.TENSOR and not attribute.ref_attr_name:
            full = f"{node.name or node.output[0]}.{attribute.name}"
            yield _of_tensor(attribute.t, full, graph, node, _several(attribute.t), attribute)


def _of_numbers(
    attribute: AttributeProto,
    name: str,
    graph: GraphLike,
    node: NodeProto,
    default: bool,
    shape: tuple[int, ...] | None,
) -> ConstantRef:
    field = {"FLOAT": "f", "FLOATS": "floats", "INT": "i", "INTS": "ints"}[
        AttributeProto.AttributeType.Name(attribute.type)
    ]
    dtype = np.float32 if field.startswith("f") else np.int64

    def read() -> TensorProto:
        array = np.asarray(getattr(attribute, field), dtype=dtype)
        return numpy_helper.from_array(array if shape is None else array.reshape(shape), name)

    def write(array: np.ndarray) -> None:
        if shape is None:
            getattr(attribute, field)[:] = array.ravel().tolist()
        else:
            setattr(attribute, field, array.item())

    return ConstantRef(name, read, write, default, graph, node, graph_name=node.output[0])
