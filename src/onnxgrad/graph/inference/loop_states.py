"""What onnx has to be told for the shapes in graphs that nodes hold, and what it does not find."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import onnx_ir as ir

from onnxgrad.graph.sequences import is_empty
from onnxgrad.graph.shapes import Dims, dims, is_stated, rank
from onnxgrad.graph.traversal import subgraphs

_SMALL = 64  # elements of a constant that tells a shape
_CHANGES = "onnxgrad.changes"  # noted at a state whose number of axes changes
_RANKS = "onnxgrad.ranks"  # noted at the body of a Scan: those that its outputs declare


def note_ranks(nodes: Iterable[ir.Node]) -> None:
    """Note what the bodies of Scans declare of their outputs: onnxruntime has to be told ranks."""
    for node in nodes:
        if (node.domain, node.op_type) == ("", "Scan"):
            body = node.attributes["body"].as_graph()
            body.meta[_RANKS] = [rank(y) for y in body.outputs]


def trust_ranks(nodes: Iterable[ir.Node]) -> bool:
    """Fill in the ranks that were noted and are not known otherwise; tell whether there was one."""
    found = False
    for node in nodes:
        for body in subgraphs(node):
            for y, n in zip(body.outputs, body.meta.get(_RANKS, ()), strict=False):
                if y.shape is None and n is not None:
                    y.shape, found = ir.Shape([None] * n), True
    return found


def forget_declared(nodes: Iterable[ir.Node]) -> None:
    """Forget the shapes that graphs inside of nodes declare: exporters write wrong ones."""
    for node in nodes:
        for graph in subgraphs(node):
            for value in (*graph.inputs, *graph.outputs):
                value.shape = None
        if (node.domain, node.op_type) == ("", "Loop"):
            inputs = node.attributes["body"].as_graph().inputs
            for x, dtype in zip(inputs, (ir.DataType.INT64, ir.DataType.BOOL), strict=False):
                x.shape, x.dtype = ir.Shape(()), dtype
        for _, state, _, _ in states(node):
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


@contextmanager
def starts_as_states(graph: ir.Graph) -> Iterator[None]:
    """Let Loops start with stand-ins of their states, where these are sequences.

    onnx takes the elements of the result for those of the sequence that a Loop starts with.
    """
    before: list[tuple[ir.Node, int, ir.Value]] = []
    inputs = len(graph.inputs)
    for node in ir.traversal.RecursiveGraphIterator(graph):
        for i, (start, state, _, _) in enumerate(states(node), 2):
            if start is not None and not isinstance(start.type, ir.TensorType | None):
                name = f"onnxgrad.start_{len(before)}"
                graph.inputs.append(ir.Value(name=name, type=start.type, shape=state.shape))
                node.replace_input_with(i, graph.inputs[-1])
                before.append((node, i, start))
    yield
    for node, i, start in before:
        node.replace_input_with(i, start)
    del graph.inputs[inputs:]


def assume_states(nodes: Iterable[ir.Node]) -> bool:
    """Correct what is assumed of the states of Loops; tell whether to infer once more.

    Of a sequence that is its elements' shape; one that starts empty has those of its first ones.
    A state has the shape that it starts with if, whenever an iteration starts with that shape, it
    ends with it. Lengths for which this is not so are forgotten.
    """
    of_all = [of for node in nodes for of in states(node)]
    new = [
        (state, shape)
        for start, state, end, _ in of_all
        if state.shape is None and not changes(state) and (shape := _first(start, end)) is not None
    ]
    for state, shape in new:
        state.shape = ir.Shape(shape)
    changed = False
    for _, state, end, _ in () if new else of_all:
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
    for _, state, _, result in of_all:
        result.shape = state.shape
    return changed or bool(new)


def _first(start: ir.Value | None, end: ir.Value) -> Dims | None:
    """Return the shape that a state starts with, or that its first elements have."""
    return _known(end if start is not None and is_empty(start) else start)


def changes(state: ir.Value) -> bool:
    """Tell whether the number of axes of a state of a Loop was found to change."""
    return bool(state.meta.get(_CHANGES))


def states(node: ir.Node) -> Iterator[tuple]:
    """Yield of each state of a Loop: what it starts as, what an iteration starts and ends with, and
    the result.
    """
    if (node.domain, node.op_type) == ("", "Loop"):
        body, starts = node.attributes["body"].as_graph(), node.inputs[2:]
        n = len(starts)
        ends, results = body.outputs[1:][:n], node.outputs[:n]
        yield from zip(starts, body.inputs[2:], ends, results, strict=True)


def _known(value: ir.Value | None) -> Dims | None:
    shape = dims(value)
    return None if shape is None else tuple(d if is_stated(d) else None for d in shape)
