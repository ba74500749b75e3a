"""References to the constant tensors of a model, each of which reads and writes its tensor.

A constant is an initializer, or an attribute of a node or a function.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    SparseTensorProto,
    TensorProto,
    numpy_helper,
)

from onnxgrad.model import external
from onnxgrad.model.traversal import GraphLike, walk_graphs
from onnxgrad.operators import operator_of

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)

# the fields of an attribute that hold numbers
_NUMBER_FIELDS = {
    AttributeProto.FLOAT: "f",
    AttributeProto.FLOATS: "floats",
    AttributeProto.INT: "i",
    AttributeProto.INTS: "ints",
}


@dataclass
class ConstantRef:
    """A reference to one constant tensor of a model, with methods that read the tensor and replace
    it in the model.

    Attributes:
        name: the name of the constant, unique in the whole model.
        source: the tensor, or an attribute of numbers.
        default: whether it is a weight of `onnx_derivative` when no weight is named.
        graph: the graph or function that has the node or the initializer.
        node: the node that has the attribute; None for an initializer.
        operand: for `ai.onnx.ml`, the index of the input that replaces the attribute when the
            constant is lifted; otherwise 0.
        attribute: the attribute of a function with its default, or of a call of a function.
        graph_name: the name of the constant in its graph.
        function: the local function around the constant, at any depth; None: it is in none.
    """

    name: str
    source: TensorProto | SparseTensorProto | AttributeProto
    default: bool
    graph: GraphLike
    node: NodeProto | None = None
    operand: int = 0
    attribute: AttributeProto | None = None
    graph_name: str = ""
    function: FunctionProto | None = None

    def __post_init__(self) -> None:
        self.graph_name = self.graph_name or self.name

    @property
    def is_sparse(self) -> bool:
        """Whether the constant is stored as a sparse tensor."""
        return isinstance(self.source, SparseTensorProto)

    def read(self) -> TensorProto:
        """Return the constant as a `TensorProto`: the stored tensor, or a dense copy if the model
        stores a sparse tensor or an attribute of numbers.
        """
        if isinstance(self.source, TensorProto):
            return self.source
        if isinstance(self.source, SparseTensorProto):
            return to_dense_tensor(self.source, self.name)
        field = _NUMBER_FIELDS[self.source.type]
        dtype = np.float32 if field.startswith("f") else np.int64
        return numpy_helper.from_array(np.asarray(getattr(self.source, field), dtype), self.name)

    def array(self) -> np.ndarray:
        """Return the current value of the tensor; do not write to it."""
        return external.tensor_to_array(self.read())

    def stored_mask(self) -> np.ndarray:
        """Return a dense boolean array that is true for the elements that the sparse tensor
        stores.
        """
        assert isinstance(self.source, SparseTensorProto)
        mask = deepcopy(self.source)
        mask.values.CopyFrom(numpy_helper.from_array(np.ones(mask.values.dims, bool)))
        return numpy_helper.to_array(to_dense_tensor(mask, ""))

    def write(self, array: np.ndarray) -> None:
        """Replace the value of the constant in the model by `array`, which has the shape and dtype
        of the constant.

        A sparse tensor stores the elements that it stored before, and the other nonzero elements.
        """
        if isinstance(self.source, TensorProto):
            data = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape))
            data.ClearField("dims")
            for field in (*external.ELEMENTS, "external_data", "data_location"):
                self.source.ClearField(field)
            self.source.MergeFrom(data)
        elif isinstance(self.source, SparseTensorProto):
            flat = np.flatnonzero(self.stored_mask() | (array != 0))
            old = self.source.indices
            indices = (
                flat if len(old.dims) == 1 else np.stack(np.unravel_index(flat, array.shape), 1)
            )
            values = numpy_helper.from_array(array.ravel()[flat], self.source.values.name)
            self.source.values.CopyFrom(values)
            old.CopyFrom(numpy_helper.from_array(indices.astype(np.int64), old.name))
        elif (field := _NUMBER_FIELDS[self.source.type]).endswith("s"):
            getattr(self.source, field)[:] = array.ravel().tolist()
        else:
            setattr(self.source, field, array.item())

    def remove_initializer(self) -> str:
        """Remove the constant, an initializer, from the graph that holds it; return the name of the
        initializer in that graph.
        """
        assert isinstance(self.graph, GraphProto)
        held: Any = self.graph.sparse_initializer if self.is_sparse else self.graph.initializer
        names = [(entry.values if self.is_sparse else entry).name for entry in held]
        del held[names.index(self.graph_name)]
        return self.graph_name

    def add_node_input(self, name: str) -> None:
        """Let the `ai.onnx.ml` node read the value `name` as an additional input, for the attribute
        that holds the constant.
        """
        assert self.node is not None
        self.node.input.extend([""] * (self.operand + 1 - len(self.node.input)))
        self.node.input[self.operand] = name


def scan_constants(model: ModelProto) -> Iterator[ConstantRef]:
    """Yield references to the constants of the main graph, then of the local functions."""
    called = {(f.domain, f.name) for f in model.functions}
    for holder in (model.graph, *model.functions):
        for graph, node in walk_graphs(holder):
            found = (
                _graph_constants(graph) if node is None else _node_constants(graph, node, called)
            )
            for ref in found:
                ref.function = None if isinstance(holder, GraphProto) else holder
                yield ref


def _graph_constants(graph: GraphLike) -> Iterator[ConstantRef]:
    """Yield references to the initializers of a graph, or to the default values of the attributes
    of a local function.
    """
    if isinstance(graph, FunctionProto):
        for a in graph.attribute_proto:
            if a.type == AttributeProto.TENSOR:
                name = f"{graph.name}.{a.name}"
                yield ConstantRef(name, a.t, _has_several_floats(a.t), graph, attribute=a)
        return
    for tensor in graph.initializer:
        yield ConstantRef(tensor.name, tensor, tensor.data_type in FLOATS, graph)
    for sparse in graph.sparse_initializer:
        yield ConstantRef(sparse.values.name, sparse, sparse.values.data_type in FLOATS, graph)


def _node_constants(
    graph: GraphLike, node: NodeProto, called: Collection[tuple[str, str]]
) -> Iterator[ConstantRef]:
    """Yield references to the constants that a node stores in its attributes.

    The node is a Constant, an operator of `ai.onnx.ml`, or a call of a local function.
    """
    stated = [a for a in node.attribute if not a.ref_attr_name]
    where = node.name or node.output[0]
    if node.op_type == "Constant" and not normalize_domain(node.domain):
        for a in stated[:1]:
            source = a.t if a.type == AttributeProto.TENSOR else a
            source = a.sparse_tensor if a.type == AttributeProto.SPARSE_TENSOR else source
            if source is not a or a.type in _NUMBER_FIELDS:
                yield ConstantRef(node.output[0], source, _has_several_floats(source), graph, node)
    elif node.domain == "ai.onnx.ml":
        for operand, (name, default) in enumerate(operator_of(node).coefficients, 1):
            for a in (a for a in node.attribute if a.name == name and a.floats):
                full = f"{where}.{name}"
                yield ConstantRef(full, a, default, graph, node, operand, graph_name=node.output[0])
    elif (node.domain, node.op_type) in called:
        for a in stated:
            if a.type == AttributeProto.TENSOR:
                full = f"{where}.{a.name}"
                yield ConstantRef(full, a.t, _has_several_floats(a.t), graph, node, attribute=a)


def _has_several_floats(source: TensorProto | SparseTensorProto | AttributeProto) -> bool:
    """Return whether a constant has more than one float."""
    if isinstance(source, AttributeProto):
        return len(source.floats) > 1
    values = source.values if isinstance(source, SparseTensorProto) else source
    return values.data_type in FLOATS and prod(source.dims) > 1


def normalize_domain(domain: str) -> str:
    """Return the operator domain `domain`, or "" for "ai.onnx", its alias."""
    return "" if domain == "ai.onnx" else domain


def opset_versions(imports: Iterable[OperatorSetIdProto]) -> dict[str, int]:
    """Return `{domain: opset version}` of the opset imports of a model; of a domain that is
    imported twice, the newer version.
    """
    versions: dict[str, int] = {}
    for entry in imports:
        domain = normalize_domain(entry.domain)
        versions[domain] = max(entry.version, versions.get(domain, 0))
    return versions


def to_dense_tensor(sparse: SparseTensorProto, name: str) -> TensorProto:
    """Return a dense copy, called `name`, of a sparse tensor.

    The indices of a sparse tensor are flat, or have one number for each axis.
    """
    values, indices = (numpy_helper.to_array(t) for t in (sparse.values, sparse.indices))
    array = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 1:
        array.ravel()[indices] = values
    else:
        array[tuple(indices.T)] = values
    return numpy_helper.from_array(array, name)
