"""Rewrites of a `ModelProto` into equivalent forms that the other modules and onnx_ir can read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto

from onnxgrad.model.constants import GraphLike, dense, standard
from onnxgrad.model.traversal import all_nodes, graphs_of, names, nodes_of, own_names, subgraphs


def normalized(proto: ModelProto) -> ModelProto:
    """Return `proto`, or an equivalent copy if onnx_ir would misread it.

    That is where it has sparse tensors, or calls the standard domain "ai.onnx".
    """
    nodes = nodes_of(proto)
    sparse = any(g.sparse_initializer for g in graphs_of(proto, nodes))
    if (
        not sparse
        and not any(map(_has_sparse, nodes))
        and all(o.domain != "ai.onnx" for o in proto.opset_import)
    ):
        return proto
    copy = ModelProto()
    copy.CopyFrom(proto)
    use_standard_domain(copy)
    densify(copy)
    return copy


def dense_inside(proto: ModelProto) -> ModelProto:
    """Return `proto`, or a copy with dense tensors if a subgraph or function has sparse ones.

    onnxruntime (1.31) reads freed memory when it loads these, and sometimes crashes.
    """
    inner = [n for function in proto.functions for n in all_nodes(function.node)]
    inner += [n for node in proto.graph.node for g in subgraphs(node) for n in all_nodes(g.node)]
    graphs = (g for node in (*proto.graph.node, *inner) for g in subgraphs(node))
    if not any(map(_has_sparse, inner)) and not any(g.sparse_initializer for g in graphs):
        return proto
    copy = ModelProto()
    copy.CopyFrom(proto)
    densify(copy)
    return copy


def _has_sparse(node: NodeProto) -> bool:
    return any(a.type == AttributeProto.SPARSE_TENSOR for a in node.attribute)


def use_standard_domain(model: ModelProto) -> None:
    """Replace the domain "ai.onnx" by its alias "", in place."""
    for holder in (model, *model.functions):
        versions: dict[str, int] = {}
        for entry in holder.opset_import:  # skl2onnx imports both
            domain = standard(entry.domain)
            versions[domain] = max(entry.version, versions.get(domain, 0))
        del holder.opset_import[:]
        for domain, version in versions.items():
            holder.opset_import.add(domain=domain, version=version)
    for node in nodes_of(model):
        node.domain = standard(node.domain)


def declare_once(model: ModelProto) -> None:
    """Give outputs that are inputs too the types of the inputs, in place.

    onnx_ir uses the type that is declared last.
    """
    inputs = {x.name: x for x in model.graph.input}
    for y in model.graph.output:
        if y.name in inputs:
            y.CopyFrom(inputs[y.name])


def own_results(model: ModelProto, reserved: Iterable[str] = ()) -> None:
    """Make every output of a subgraph or function a result of its own nodes, each used once.

    An Identity node is added for other outputs. Its result gets a name that is not `reserved`.
    Exporters and optimizers write subgraphs that return inputs, initializers, captured values, or
    one result twice; onnxruntime and this package treat such outputs in different ways.
    """
    taken = {*names(model.graph), *reserved}
    _own_results_of(model.graph.node, taken)
    for function in model.functions:
        inside = {*function.input, *(y for n in all_nodes(function.node) for y in n.output)}
        _own_results_of(function.node, inside)
        for i, copy in _not_own(list(function.output), function, inside):
            function.output[i] = copy


def _own_results_of(nodes: Iterable[NodeProto], taken: set[str]) -> None:
    for graph in [graph for node in all_nodes(nodes) for graph in subgraphs(node)]:
        for i, copy in _not_own([y.name for y in graph.output], graph, taken):
            graph.output[i].name = copy


def _not_own(outputs: list[str], graph: GraphLike, taken: set[str]) -> Iterator[tuple[int, str]]:
    """Add an Identity for outputs of `graph` that are not its results, or repeated; yield both.

    The pairs are the index of the output and the name of the copy.
    """
    own = {y for node in graph.node for y in node.output}
    for i, name in enumerate(outputs):
        if name not in own:
            copy = unused(name, taken)
            graph.node.add(op_type="Identity", input=[name], output=[copy])
            yield i, copy
        own.discard(name)


def unused(name: str, taken: set[str]) -> str:
    """Return `name` with the first numeric suffix that is not in `taken`, and add it there."""
    new = next(n for i in count(1) if (n := f"{name}_{i}") not in taken)
    taken.add(new)
    return new


def densify(model: ModelProto) -> None:
    """Turn all sparse constants of `model` into dense ones, in place."""
    nodes = nodes_of(model)
    for graph in graphs_of(model, nodes):
        for sparse in graph.sparse_initializer:
            graph.initializer.append(dense(sparse, sparse.values.name))
        graph.ClearField("sparse_initializer")
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.SPARSE_TENSOR:
                attribute.name, attribute.type = "value", AttributeProto.TENSOR
                attribute.t.CopyFrom(dense(attribute.sparse_tensor, node.output[0]))
                attribute.ClearField("sparse_tensor")


def rename_uses(graph: GraphLike, old: str, new: str) -> None:
    """Replace uses of the value `old` of `graph` by `new`, also where subgraphs capture it."""
    if old == new:
        return
    if isinstance(graph, GraphProto):
        for y in (y for y in graph.output if y.name == old):
            y.name = new
    for node in graph.node:
        _rename_reads(node, old, new)


def _rename_reads(node: NodeProto, old: str, new: str) -> None:
    if old in node.input:
        node.input[:] = [new if name == old else name for name in node.input]
    for inner in subgraphs(node):
        if old not in own_names(inner):
            rename_uses(inner, old, new)


def unshadow(model: ModelProto, reserved: Iterable[str] = ()) -> None:
    """Rename the values of subgraphs that have the name of a value of an enclosing graph.

    onnxruntime's optimizer writes such names. The new names are not `reserved`.
    """
    for holder in (model.graph, *model.functions):
        graphs = [g for node in all_nodes(holder.node) for g in subgraphs(node)]
        outer = {y for node in holder.node for y in node.output}
        if isinstance(holder, GraphProto):
            outer.update(own_names(holder))
        else:
            outer.update(holder.input)
        taken = {*outer, *(name for graph in graphs for name in own_names(graph)), *reserved}
        for node in holder.node:
            for graph in subgraphs(node):
                _unshadow(graph, outer, taken)


def _unshadow(graph: GraphProto, outer: set[str], taken: set[str]) -> None:
    for value in (*graph.input, *graph.initializer, *(s.values for s in graph.sparse_initializer)):
        if value.name in outer:
            old, value.name = value.name, unused(value.name, taken)
            rename_uses(graph, old, value.name)
    for i, node in enumerate(graph.node):
        for j, old in enumerate(node.output):
            if old in outer:
                new = node.output[j] = unused(old, taken)
                for later in graph.node[i + 1 :]:  # the nodes before it read the outer value
                    _rename_reads(later, old, new)
                for y in (y for y in graph.output if y.name == old):
                    y.name = new
    inner = outer | set(own_names(graph))
    for node in graph.node:
        for subgraph in subgraphs(node):
            _unshadow(subgraph, inner, taken)
