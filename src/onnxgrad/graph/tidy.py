"""Nodes that are removed, as no output needs them, replaced, or moved out of the body of a loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from math import prod
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.traversal import all_nodes, reads, subgraphs
from onnxgrad.operators import RANDOM, marks
from onnxgrad.operators.shapes import dims, rank, static

_SMALL = 1 << 16  # elements


def tidy(model: ir.Model) -> None:
    """Remove, in place, the nodes, initializers and functions that no output needs.

    `drop_unused` goes first, and removes all unused nodes of a graph in one call: the pass of
    onnx_ir lists the outputs again for each one, and fails on values that a subgraph still reads.
    """
    drop_unused(model.graph)
    RemoveUnusedNodesPass()(model)
    if model.functions:
        RemoveUnusedFunctionsPass()(model)


def drop_unused(graph: ir.Graph, keep: Collection[str | None] = ()) -> None:
    """Remove, in place, the nodes that no output of `graph` needs, in its subgraphs too.

    Nodes that compute a value with a name of `keep` stay. The subgraphs of removed nodes are
    detached: a value that they capture still counts as used.
    """
    needed: set[ir.Value | None] = set(graph.outputs)
    unused = []
    for node in reversed(graph):
        kept = keep and any(y.name in keep for y in node.outputs)
        if not kept and needed.isdisjoint(node.outputs):
            unused.append(node)
            detach_graphs(subgraphs(node))
        else:
            needed.update(node.inputs)
            for subgraph in subgraphs(node):
                drop_unused(subgraph, keep)
                needed.update(subgraph.outputs, *(n.inputs for n in all_nodes(subgraph)))
    for node in unused:
        detach_inputs(node)
    graph.remove(unused, safe=True)
    _removed_nodes(graph).extend(unused)


def replace_value(
    op: Emit, old: ir.Value, new: ir.Value, keep: Collection[str | None] = ()
) -> ir.Value:
    """Let all nodes read `new` instead of `old`, and return it.

    It takes the name of a graph output, and of `old` if that is in `keep`; it is copied if it has
    a name to keep itself, or if no node that the package wrote into the graph computes it.
    """
    if has_name_to_keep(old, keep):
        node = new.producer()
        own = node is not None and node.graph is op.graph and op.is_own(node)
        if not own or has_name_to_keep(new, keep):
            new = op.copy_of(new)
        new.name, old.name = old.name, None
        new.shape, new.type = old.shape or new.shape, old.type or new.type
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    old.meta[marks.REPLACED] = new
    return new


def latest_replacement(x: ir.Value) -> ir.Value:
    """Return the value that replaces `x` now, or `x` itself."""
    while marks.REPLACED in x.meta:
        x = x.meta[marks.REPLACED]
    return x


def has_name_to_keep(y: ir.Value, keep: Collection[str | None] = ()) -> bool:
    """Return whether `y` is an output of a graph, or has a name in `keep`."""
    return y.is_graph_output() or y.name in keep


def remove_node(node: ir.Node) -> None:
    """Remove a node whose results nothing reads from its graph.

    A safe removal looks at all outputs of the graph for each node: too slow for thousands.
    """
    detach_inputs(node)
    graph = node.graph
    assert graph is not None
    graph.remove(node)
    _removed_nodes(graph).append(node)


def _removed_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return the list of the nodes that were removed from `graph`, to which callers append."""
    owner, removed = graph.meta.get(marks.REMOVED, (None, []))
    if owner is None or owner() is not graph:  # a clone of a graph has copies of its notes
        removed = []
        graph.meta[marks.REMOVED] = weakref.ref(graph), removed
    return removed


def detach_graphs(graphs: Iterable[ir.Graph]) -> None:
    """Detach the inputs of all nodes in `graphs`, which are subgraphs that will be discarded."""
    for node in (node for graph in graphs for node in all_nodes(graph)):
        detach_inputs(node)


def detach_inputs(node: ir.Node) -> None:
    """Remove all inputs of `node`, so that it no longer counts as a user of them.

    `resize_inputs` copies all of them for each: too slow for thousands.
    """
    for i, x in enumerate(node.inputs):
        if x is not None:
            x._remove_usage(node, i)
    node._inputs = ()


def take_apart(graph: ir.Graph) -> None:
    """Remove the references between the objects of a graph that nothing reads any more, in place:
    of its subgraphs and of nodes that were removed from it, too.

    Nodes, values and graphs refer to each other, so that they would stay in memory until the
    garbage is collected. Values keep their names, types and shapes, as inputs without a reader, and
    the graph keeps the list of its inputs.
    """
    with suppress(AttributeError):  # of another onnx_ir: its graphs wait for the collector
        _cut_references(graph)


def _cut_references(graph: ir.Graph) -> None:
    if graph._nodes is None:
        return
    nodes = [*graph, *(node for node in _removed_nodes(graph) if node.graph is None)]
    graph.meta.pop(marks.REMOVED, None)
    for node in nodes:
        if node.attributes.data:
            for subgraph in subgraphs(node):
                _cut_references(subgraph)
    loose = [*graph.inputs, *graph.outputs, *graph.initializers.values()]
    for node in nodes:
        loose += node.outputs
        node._inputs, node._outputs, node._attributes = (), (), None
        node._graph = node._metadata = None
    for value in loose:
        value._producer = value._graph = None
        value._uses = {}
    parts: Any = graph
    for box in (parts._nodes._root, *parts._nodes._value_ids_to_boxes.values()):
        box.prev = box.next = box.owning_list = None
    parts._inputs = list(graph.inputs)
    parts._outputs = parts._initializers = parts._nodes = None


def take_apart_after(owner: object, graph: ir.Graph) -> None:
    """Take a graph apart when nothing refers to `owner` any more, through which all read it."""
    weakref.finalize(owner, take_apart, graph).atexit = False


def rename_unused_results(graph: ir.Graph, names: Collection[str | None]) -> None:
    """Rename results that nothing reads, so that other values can have their `names`."""
    for node in graph:
        # the weights in attributes of an unnamed node are named after its first output
        names_weights = node.domain == "ai.onnx.ml" and not node.name
        for y in node.outputs:
            if y.name in names and not (names_weights or y.uses() or y.is_graph_output()):
                y.name = Emit(graph).name(str(y.name))


# -- bodies of loops -------------------------------------------------------------------------------


def has_small_results(node: ir.Node) -> bool:
    """Return whether the results of `node` have few elements, as a shape has."""
    lengths = [static(dims(y)) for y in node.outputs]
    return all(
        prod(known) <= _SMALL if known is not None else rank(y) in (0, 1)
        for y, known in zip(node.outputs, lengths, strict=True)
    )


def move_out_of_body(
    body: ir.Graph,
    op: Emit,
    worth: Callable[[ir.Node], bool] = lambda _: True,
    varying: Iterable[ir.Value] = (),
) -> None:
    """Move nodes whose results are the same in every iteration from the body of a loop to the graph
    of `op`.

    Constants that they read move with them. The outputs of the body must be set again, by `give`.
    `worth` tells which of these nodes to move, and `varying` are values that differ between
    iterations beside the inputs of the body.
    """
    inside = {*body.inputs, *varying}
    for node in list(body):
        varies = node.op_type in RANDOM or not inside.isdisjoint(reads(node))
        if varies or any(subgraphs(node)) or not worth(node):
            inside.update(node.outputs)
            continue
        body.remove(node)
        node.name = None  # names of nodes are unique in their graph only
        op.graph.append(node)
        for x in node.inputs:
            if x is not None and x.is_initializer() and x.graph is body:
                op.graph.register_initializer(body.initializers.pop(str(x.name)))


def read_shapes_outside(body: ir.Graph, op: Emit, outer: Mapping[ir.Value, ir.Value]) -> None:
    """Let Shape and Size nodes in a Scan's body read the operands of the Scan, outside of the body,
    instead of its inputs.

    `op` writes the graph around the body. `outer` has the operand of the Scan for each input that
    has the same shape in all iterations; of a scanned one, it has one axis more in front.
    """
    for x, whole in outer.items():
        shape, lead = dims(x), len(dims(whole) or ()) - len(dims(x) or ())
        for node, _ in list(x.uses()):
            if node.op_type not in ("Shape", "Size") or node.domain or shape is None:
                continue
            get, axes = node.attributes.get_int, len(shape)
            first, end = slice(get("start", 0), get("end", axes)).indices(axes)[:2]
            y = op.Shape(whole, start=first + lead, end=max(first, end) + lead)
            if node.op_type == "Size":
                y = op.ReduceProd(y, keepdims=0)
            y = op.set_type_like(y, node.outputs[0])
            ir.convenience.replace_all_uses_with(node.outputs[0], y)
