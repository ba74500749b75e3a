"""Rewrites of a `ModelProto` into equivalent forms that onnx_ir and this package can read."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto

from onnxgrad.model.constants import normalize_domain, opset_versions, to_dense_tensor
from onnxgrad.model.scopes import unused_name
from onnxgrad.model.traversal import (
    GraphLike,
    all_graphs,
    declared_names,
    model_graphs,
    model_nodes,
    subgraphs,
    value_names,
    walk_graphs,
)


def prepare_for_onnx_ir(proto: ModelProto) -> ModelProto:
    """Return `proto`, or an equivalent copy if onnx_ir would misread it.

    onnx_ir misreads sparse tensors, and the name "ai.onnx" of the standard domain.
    """
    sparse = any(
        _has_sparse_tensors(*entry) for entry in walk_graphs(proto.graph, *proto.functions)
    )
    if not sparse and all(o.domain != "ai.onnx" for o in proto.opset_import):
        return proto
    copy = deepcopy(proto)
    use_standard_domain(copy)
    densify(copy)
    return copy


def densify_subgraphs(proto: ModelProto) -> ModelProto:
    """Return `proto`, or a copy with dense tensors if a subgraph or local function has sparse
    tensors.

    onnxruntime (1.31) reads freed memory when it loads such sparse tensors, and sometimes crashes.
    """
    inner = (g for node in proto.graph.node for g in subgraphs(node))
    if not any(_has_sparse_tensors(*entry) for entry in walk_graphs(*inner, *proto.functions)):
        return proto
    copy = deepcopy(proto)
    densify(copy)
    return copy


def _has_sparse_tensors(graph: GraphLike, node: NodeProto | None) -> bool:
    """Return whether `node` has sparse attributes; without a node, whether `graph` has sparse
    initializers.
    """
    if node is None:
        return isinstance(graph, GraphProto) and bool(graph.sparse_initializer)
    return any(a.type == AttributeProto.SPARSE_TENSOR for a in node.attribute)


def use_standard_domain(model: ModelProto) -> None:
    """Replace the domain "ai.onnx" by its alias "", in place."""
    for holder in (model, *model.functions):
        versions = opset_versions(holder.opset_import)  # skl2onnx imports both names of the domain
        del holder.opset_import[:]
        for domain, version in versions.items():
            holder.opset_import.add(domain=domain, version=version)
    for node in model_nodes(model):
        node.domain = normalize_domain(node.domain)


def copy_input_types_to_outputs(model: ModelProto) -> None:
    """Give the graph outputs that are graph inputs as well the declared types of these inputs, in
    place.

    onnx_ir uses the type that is declared last.
    """
    inputs = {x.name: x for x in model.graph.input}
    for y in model.graph.output:
        if y.name in inputs:
            y.CopyFrom(inputs[y.name])


def compute_outputs_inside(model: ModelProto, reserved: Iterable[str] = ()) -> None:
    """Make every output of a subgraph or local function the result of one of its own nodes, in
    place.

    An Identity node is added for other outputs, and where one result is two outputs. Its result
    gets a name that is not `reserved`. Exporters and optimizers write subgraphs that return inputs,
    initializers, captured values, or one result twice; onnxruntime and this package treat such
    outputs in different ways.
    """
    for holder in (model.graph, *model.functions):
        taken = {*value_names(holder), *reserved}
        for graph in list(all_graphs(holder)):
            if graph is model.graph:
                continue
            own = {y for node in graph.node for y in node.output}
            for i, name in enumerate(declared_names(graph.output)):
                if name not in own:
                    copy = unused_name(name, taken)
                    graph.node.add(op_type="Identity", input=[name], output=[copy])
                    if isinstance(graph, GraphProto):
                        graph.output[i].name = copy
                    else:
                        graph.output[i] = copy
                own.discard(name)


def densify(model: ModelProto) -> None:
    """Turn all sparse constants of `model` into dense constants, in place."""
    for graph in model_graphs(model):
        for sparse in graph.sparse_initializer:
            graph.initializer.append(to_dense_tensor(sparse, sparse.values.name))
        graph.ClearField("sparse_initializer")
    for node in model_nodes(model):
        for attribute in node.attribute:
            if attribute.type == AttributeProto.SPARSE_TENSOR:
                attribute.name, attribute.type = "value", AttributeProto.TENSOR
                attribute.t.CopyFrom(to_dense_tensor(attribute.sparse_tensor, node.output[0]))
                attribute.ClearField("sparse_tensor")
