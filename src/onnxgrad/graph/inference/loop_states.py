"""Shape inference for subgraph bodies: what onnx needs for it, and the states of Loops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.sequences import is_empty
from onnxgrad.graph.shapes import Dims, dims, is_stated, rank
from onnxgrad.graph.traversal import all_nodes, subgraphs

_SMALL = 64  # elements: only constants up to this size are copied
_CHANGES = "onnxgrad.changes"  # `meta` key of a state whose rank changes between iterations
_RANKS = "onnxgrad.ranks"  # `meta` key of the body of a Scan: the declared ranks of its outputs


def note_ranks(nodes: Iterable[ir.Node]) -> None:
    """Record the declared ranks of the outputs of Scan bodies, which onnxruntime needs."""
    for node in nodes:
        if (node.domain, node.op_type) == ("", "Scan"):
            body = node.attributes["body"].as_graph()
            body.meta[_RANKS] = [rank(y) for y in body.outputs]


def trust_ranks(nodes: Iterable[ir.Node]) -> bool:
    """Set recorded ranks of outputs whose rank was not inferred; return whether there was any."""
    changed = False
    for node in nodes:
        for body in subgraphs(node):
            for y, n in zip(body.outputs, body.meta.get(_RANKS, ()), strict=False):
                if y.shape is None and n is not None:
                    y.shape, changed = ir.Shape([None] * n), True
    return changed


def give_scalars(graph: ir.Graph) -> None:
    """Let the bodies of Loops take their number and condition as scalars, in place.

    onnxruntime passes tensors of the declared shape, (1,) in files of PyTorch: their nodes get the
    scalar reshaped.
    """
    for node in list(all_nodes(graph)):
        if (node.domain, node.op_type) != ("", "Loop"):
            continue
        body = node.attributes["body"].as_graph()
        for i, x in enumerate(body.inputs[:2]):
            if dims(x) == (1,):
                op = Emit(body, outer=Emit(graph))
                scalar = ir.Value(name=op.name(str(x.name)), type=x.type, shape=ir.Shape(()))
                body.inputs[i] = scalar
                with op.at(next(iter(body), None)):
                    reshaped = op.Reshape(scalar, [1])
                ir.convenience.replace_all_uses_with(x, reshaped, replace_graph_outputs=True)


def forget_declared(nodes: Iterable[ir.Node]) -> None:
    """Remove the declared shapes of inputs and outputs of subgraphs: exporters write wrong ones."""
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
    """Copy small integer constants into the subgraphs that capture them, during the block.

    onnx reads constants, such as the shape operand of a Reshape, of the same graph only.
    """
    added = []
    for body in graph.subgraphs():
        read = {x for node in body for x in node.inputs if x is not None and x.is_initializer()}
        read.difference_update(body.initializers.values())
        for x in read:
            tensor = x.const_value
            if tensor is None or tensor.size > _SMALL or not tensor.dtype.is_integer():
                continue
            copy = ir.Value(name=x.name, type=x.type, shape=x.shape, const_value=tensor)
            body.register_initializer(copy)
            added.append((body, x.name))
    yield
    for body, name in added:
        body.initializers.pop(str(name))


@contextmanager
def starts_as_states(graph: ir.Graph) -> Iterator[None]:
    """Replace the initial values of Loop states that are sequences by inputs, during the block.

    The inputs have the shape of the state: onnx infers from the initial value that the elements of
    the result have the shape of its elements.
    """
    before: list[tuple[ir.Node, int, ir.Value]] = []
    inputs = len(graph.inputs)
    for node in all_nodes(graph):
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
    """Assume shapes of the states of Loops, or correct them; return whether to infer once more.

    A state is assumed to have the shape of its initial value, which holds if an iteration that
    starts with this shape ends with it; dimensions for which it does not are set to unknown. The
    shape of a sequence is that of its elements, and of one that is empty initially, that of the
    elements which the first iteration adds.
    """
    loop_states = [values for node in nodes for values in states(node)]
    new = [
        (state, shape)
        for start, state, end, _ in loop_states
        if state.shape is None and not changes(state) and (shape := _first(start, end)) is not None
    ]
    for state, shape in new:
        state.shape = ir.Shape(shape)
    changed = False
    for _, state, end, _ in () if new else loop_states:
        assumed, actual = _stated_dims(state), _stated_dims(end)
        if assumed is None or actual is None or len(actual) != len(assumed):
            proven = None
            state.meta[_CHANGES] = True
        else:
            proven = tuple(a if a == b else None for a, b in zip(assumed, actual, strict=True))
        changed |= proven != assumed
        state.shape = None if proven is None else ir.Shape(proven)
    if changed:
        for node in nodes:
            for y in node.outputs:
                y.shape = None
    for _, state, _, result in loop_states:
        result.shape = state.shape
    return changed or bool(new)


def _first(start: ir.Value | None, end: ir.Value) -> Dims | None:
    """Return the shape of the initial value of a state, or of the first elements added to it."""
    return _stated_dims(end if start is not None and is_empty(start) else start)


def changes(state: ir.Value) -> bool:
    """Return whether the rank of a state of a Loop changes between iterations, or is unknown."""
    return bool(state.meta.get(_CHANGES))


def states(node: ir.Node) -> Iterator[tuple]:
    """Yield four values for each state of a Loop, nothing for other nodes.

    They are its initial value, an input and an output of the body, and an output of the Loop.
    """
    if (node.domain, node.op_type) == ("", "Loop"):
        body, starts = node.attributes["body"].as_graph(), node.inputs[2:]
        n = len(starts)
        ends, results = body.outputs[1:][:n], node.outputs[:n]
        yield from zip(starts, body.inputs[2:], ends, results, strict=True)


def _stated_dims(value: ir.Value | None) -> Dims | None:
    shape = dims(value)
    return None if shape is None else tuple(d if is_stated(d) else None for d in shape)
