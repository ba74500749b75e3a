"""Different ways to say the same in a model, reduced to one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto

from onnxgrad.model.constants import Holder, dense, standard, subgraphs


def normalized(proto: ModelProto) -> ModelProto:
    """Return `proto`, or where onnx_ir would misread it, a copy that says the same otherwise."""
    nodes = _every_node(proto)
    sparse = any(g.sparse_initializer for g in _graphs(proto, nodes))
    if (
        not sparse
        and not any(map(_holds_sparse, nodes))
        and all(o.domain != "ai.onnx" for o in proto.opset_import)
    ):
        return proto
    copy = ModelProto()
    copy.CopyFrom(proto)
    use_standard_domain(copy)
    densify(copy)
    return copy


def dense_inside(proto: ModelProto) -> ModelProto:
    """Return `proto`, or where a subgraph or a function holds a sparse tensor, a dense copy.

    onnxruntime (1.31) reads freed memory when it loads those, and crashes now and then.
    """
    inner = [n for function in proto.functions for n in all_nodes(function.node)]
    inner += [
        n for node in proto.graph.node for held in subgraphs(node) for n in all_nodes(held.node)
    ]
    graphs = (held for node in (*proto.graph.node, *inner) for held in subgraphs(node))
    if not any(map(_holds_sparse, inner)) and not any(g.sparse_initializer for g in graphs):
        return proto
    copy = ModelProto()
    copy.CopyFrom(proto)
    densify(copy)
    return copy


def _holds_sparse(node: NodeProto) -> bool:
    return any(a.type == AttributeProto.SPARSE_TENSOR for a in node.attribute)


def use_standard_domain(model: ModelProto) -> None:
    """Write the domain of the standard operators as "", not as its alias "ai.onnx"."""
    for holder in (model, *model.functions):
        versions: dict[str, int] = {}
        for entry in holder.opset_import:  # skl2onnx states both names
            domain = standard(entry.domain)
            versions[domain] = max(entry.version, versions.get(domain, 0))
        del holder.opset_import[:]
        for domain, version in versions.items():
            holder.opset_import.add(domain=domain, version=version)
    for node in _every_node(model):
        node.domain = standard(node.domain)


def _every_node(model: ModelProto) -> list[NodeProto]:
    """Return the nodes of `model`, those of subgraphs and local functions too."""
    return [n for held in (model.graph, *model.functions) for n in all_nodes(held.node)]


def _graphs(model: ModelProto, nodes: Iterable[NodeProto]) -> Iterator[GraphProto]:
    yield model.graph
    for node in nodes:
        yield from subgraphs(node)


def declare_once(model: ModelProto) -> None:
    """Declare outputs that are inputs too as these: onnx_ir takes what is stated last."""
    inputs = {x.name: x for x in model.graph.input}
    for y in model.graph.output:
        if y.name in inputs:
            y.CopyFrom(inputs[y.name])


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield `nodes`, each followed by the nodes of its subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from all_nodes(graph.node)


def own_results(model: ModelProto, reserved: Iterable[str] = ()) -> None:
    """Let every subgraph and function return results of its own nodes, each once.

    New results get names that are not `reserved`.

    Exporters and optimizers let them return inputs, initializers, captured values, or one result
    twice. onnxruntime and the tools here treat such outputs in different ways.
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


def _not_own(outputs: list[str], holder: Holder, taken: set[str]) -> Iterator[tuple[int, str]]:
    """Copy by an Identity what `holder` returns and no node of it computes, or returns twice."""
    own = {y for node in holder.node for y in node.output}
    for i, name in enumerate(outputs):
        if name not in own:
            copy = unused(name, taken)
            holder.node.add(op_type="Identity", input=[name], output=[copy])
            yield i, copy
        own.discard(name)


def unused(name: str, taken: set[str]) -> str:
    """Return `name` with a number behind it that makes it new, and add it to `taken`."""
    new = next(n for i in count(1) if (n := f"{name}_{i}") not in taken)
    taken.add(new)
    return new


def densify(model: ModelProto) -> None:
    """Turn the sparse constants of `model` into dense ones, in place, wherever they are."""
    nodes = _every_node(model)
    for graph in _graphs(model, nodes):
        for sparse in graph.sparse_initializer:
            graph.initializer.append(dense(sparse, sparse.values.name))
        graph.ClearField("sparse_initializer")
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.SPARSE_TENSOR:
                attribute.name, attribute.type = "value", AttributeProto.TENSOR
                attribute.t.CopyFrom(dense(attribute.sparse_tensor, node.output[0]))
                attribute.ClearField("sparse_tensor")


def own_names(graph: GraphProto) -> Iterator[str]:
    """Yield the names of the values of `graph`, without those of its subgraphs."""
    yield from (x.name for x in (*graph.input, *graph.initializer))
    yield from (s.values.name for s in graph.sparse_initializer)
    for node in graph.node:
        yield from node.output


def names(graph: GraphProto) -> Iterator[str]:
    """Yield the names of all values that `graph` has, in subgraphs too."""
    yield from own_names(graph)
    for node in graph.node:
        for inner in subgraphs(node):
            yield from names(inner)


def rename_uses(graph: Holder, old: str, new: str) -> None:
    """Let `graph` read and return `new` in place of `old`, in subgraphs that have no `old` too."""
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
    """Rename what a subgraph computes under a name that the graphs around it have too.

    onnxruntime's optimizer writes such names. New ones are not `reserved`.
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
    for named in (*graph.input, *graph.initializer, *(s.values for s in graph.sparse_initializer)):
        if named.name in outer:
            old, named.name = named.name, unused(named.name, taken)
            rename_uses(graph, old, named.name)
    for i, node in enumerate(graph.node):
        for j, old in enumerate(node.output):
            if old in outer:
                new = node.output[j] = unused(old, taken)
                for later in graph.node[i + 1 :]:  # those before it read the outer one
                    _rename_reads(later, old, new)
                for y in (y for y in graph.output if y.name == old):
                    y.name = new
    inner = outer | set(own_names(graph))
    for node in graph.node:
        for held in subgraphs(node):
            _unshadow(held, inner, taken)
