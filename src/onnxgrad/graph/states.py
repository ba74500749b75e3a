"""What onnx has to be told for the shapes in graphs that nodes hold, and what it does not find."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import onnx_ir as ir

from onnxgrad.graph.reads import subgraphs
from onnxgrad.graph.shapes import Dims, dims, is_stated

_SMALL = 64  # elements of a constant that tells a shape
_CHANGES = "onnxgrad.changes"  # noted at a state whose number of axes changes


def forget_declared(nodes: Iterable[ir.Node]) -> None:
    """Forget the shapes that graphs inside of nodes declare: exporters write wrong ones."""
    for node in nodes:
        for graph in subgraphs(node):
            for value in (*graph.inputs, *graph.outputs):
                value.shape = None
        if (node.domain, node.op_type) == ("", "Loop"):
            for counter in node.attributes["body"].as_graph().inputs[:2]:
                counter.shape = ir.Shape(())
        for _, state, _, _ in _states(node):
            state.meta.pop(_CHANGES, None)


@contextmanager
def constants_in_bodies(graph: ir.Graph) -> Iterator[None]:
    """Give the graphs inside of nodes the small integer constants that they read from around.

    onnx looks into constants, such as the target of a Reshape, of the same graph only.
    """
    added = []
    for body in graph.subgraphs():
        read = {x for node in body for x in node.inputs if x is not None and x.is_initializer()}
        read.difference_update(body.initializers.values())
        for x in read:
            tensor = x.const_value
            if tensor is None or tensor.size > _SMALL or not tensor.dtype.is_integer():
                continue
            twin = ir.Value(name=x.name, type=x.type, shape=x.shape, const_value=tensor)
            body.register_initializer(twin)
            added.append((body, x.name))
    yield
    for body, name in added:
        body.initializers.pop(str(name))


def assume_states(nodes: Iterable[ir.Node]) -> bool:
    """Correct what is assumed of the states of Loops; tell whether to infer once more.

    A state has the shape that it starts with if, whenever an iteration starts with that shape, it
    ends with it. Lengths for which this is not so are forgotten.
    """
    states = [of for node in nodes for of in _states(node)]
    new = [(start, state) for start, state, _, _ in states if _is_open(start, state)]
    for start, state in new:
        state.shape = ir.Shape(_known(start) or ())
    changed = False
    for _, state, end, _ in () if new else states:
        assumed, found = _known(state), _known(end)
        if assumed is None or found is None or len(found) != len(assumed):
            kept = None
            state.meta[_CHANGES] = True
        else:
            kept = tuple(a if a == b else None for a, b in zip(assumed, found, strict=True))
        changed |= kept != assumed
        state.shape = None if kept is None else ir.Shape(kept)
    if changed:
        for node in nodes:
            for y in node.outputs:
                y.shape = None
    for _, state, _, result in states:
        result.shape = state.shape
    return changed or bool(new)


def _is_open(start: ir.Value | None, state: ir.Value) -> bool:
    return state.shape is None and _known(start) is not None and not state.meta.get(_CHANGES)


def _states(node: ir.Node) -> Iterator[tuple]:
    """Yield of each state what it starts as, its start and end in an iteration, and the result."""
    if (node.domain, node.op_type) == ("", "Loop"):
        body, starts = node.attributes["body"].as_graph(), node.inputs[2:]
        n = len(starts)
        ends, results = body.outputs[1:][:n], node.outputs[:n]
        yield from zip(starts, body.inputs[2:], ends, results, strict=True)


def _known(value: ir.Value | None) -> Dims | None:
    shape = dims(value)
    return None if shape is None else tuple(d if is_stated(d) else None for d in shape)
