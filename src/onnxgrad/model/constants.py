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
from onnxgrad.model.traversal import GraphLike, walk
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
    """A reference to one constant tensor."""

    name: str
    source: TensorProto | SparseTensorProto | AttributeProto  # an attribute of numbers
    default: bool  # whether it is a weight of `onnx_derivative` when none is named
    graph: GraphLike  # the graph or function that has its node or initializer
    node: NodeProto | None = None  # the node with its attribute; None for an initializer
    operand: int = 0  # for ai.onnx.ml: index of the input that replaces it when it is lifted
    attribute: AttributeProto | None = None  # of a function, its default, or of a call of one
    graph_name: str = ""  # its name in its graph, where `name` is unique in the whole model
    function: FunctionProto | None = None  # the local function that it is in, at any depth

    def __post_init__(self) -> None:
        self.graph_name = self.graph_name or self.name

    @property
    def sparse(self) -> bool:
        """Whether the tensor is sparse."""
        return isinstance(self.source, SparseTensorProto)

    def read(self) -> TensorProto:
        """Return the stored tensor, or a dense copy of a sparse tensor or of plain numbers."""
        if isinstance(self.source, TensorProto):
            return self.source
        if isinstance(self.source, SparseTensorProto):
            return dense(self.source, self.name)
        field = _NUMBER_FIELDS[self.source.type]
        dtype = np.float32 if field.startswith("f") else np.int64
        return numpy_helper.from_array(np.asarray(getattr(self.source, field), dtype), self.name)

    def array(self) -> np.ndarray:
        """Return the current value of the tensor; do not write to it."""
        return external.array(self.read())

    def stored(self) -> np.ndarray:
        """Return a mask of the elements that a sparse tensor stores."""
        assert isinstance(self.source, SparseTensorProto)
        mask = deepcopy(self.source)
        mask.values.CopyFrom(numpy_helper.from_array(np.ones(mask.values.dims, bool)))
        return numpy_helper.to_array(dense(mask, ""))

    def write(self, array: np.ndarray) -> None:
        """Store another value, of the same shape and dtype.

        A sparse tensor stores the elements that it stored before, and the other nonzero elements.
        """
        if isinstance(self.source, TensorProto):
            data = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape))
            data.ClearField("dims")
            for field in (*external.ELEMENTS, "external_data", "data_location"):
                self.source.ClearField(field)
            self.source.MergeFrom(data)
        elif isinstance(self.source, SparseTensorProto):
            flat = np.flatnonzero(self.stored() | (array != 0))
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

    def take_away(self) -> str:
        """Remove an initializer from its graph; return its name there."""
        assert isinstance(self.graph, GraphProto)
        held: Any = self.graph.sparse_initializer if self.sparse else self.graph.initializer
        names = [(entry.values if self.sparse else entry).name for entry in held]
        del held[names.index(self.graph_name)]
        return self.graph_name

    def as_operand(self, name: str) -> None:
        """Make the value `name` an input of the ai.onnx.ml node, in addition to the attribute."""
        assert self.node is not None
        self.node.input.extend([""] * (self.operand + 1 - len(self.node.input)))
        self.node.input[self.operand] = name


def scan(model: ModelProto) -> Iterator[ConstantRef]:
    """Yield references to the constants of the main graph, then of the local functions."""
    called = {(f.domain, f.name) for f in model.functions}
    for holder in (model.graph, *model.functions):
        for graph, node in walk(holder):
            found = (
                _graph_constants(graph) if node is None else _node_constants(graph, node, called)
            )
            for ref in found:
                ref.function = None if isinstance(holder, GraphProto) else holder
                yield ref


def _graph_constants(graph: GraphLike) -> Iterator[ConstantRef]:
    """Yield the initializers of a graph, or the default attributes of a function."""
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
    """Yield the attributes that are constants: of a Constant, an ai.onnx.ml node, or a call."""
    stated = [a for a in node.attribute if not a.ref_attr_name]
    where = node.name or node.output[0]
    if node.op_type == "Constant" and not standard(node.domain):
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
    """Return whether a constant holds more than one float."""
    if isinstance(source, AttributeProto):
        return len(source.floats) > 1
    values = source.values if isinstance(source, SparseTensorProto) else source
    return values.data_type in FLOATS and prod(source.dims) > 1


def standard(domain: str) -> str:
    """Return `domain`, or "" for its alias "ai.onnx": the standard operators."""
    return "" if domain == "ai.onnx" else domain


def opset_versions(imports: Iterable[OperatorSetIdProto]) -> dict[str, int]:
    """Return the version of each domain; the newest if a domain is imported twice."""
    versions: dict[str, int] = {}
    for entry in imports:
        domain = standard(entry.domain)
        versions[domain] = max(entry.version, versions.get(domain, 0))
    return versions


def dense(sparse: SparseTensorProto, name: str) -> TensorProto:
    """Return the tensor as dense; its indices are flat, or have one number for each axis."""
    values, indices = (numpy_helper.to_array(t) for t in (sparse.values, sparse.indices))
    array = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 1:
        array.ravel()[indices] = values
    else:
        array[tuple(indices.T)] = values
    return numpy_helper.from_array(array, name)
