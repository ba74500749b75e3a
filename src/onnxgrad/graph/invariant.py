"""What a body computes anew in every iteration although it stays the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.traversal import reads, subgraphs
from onnxgrad.operators import RANDOM
from onnxgrad.operators.shapes import dims, static

_SMALL = 1 << 16  # elements


def is_small(node: ir.Node) -> bool:
    """Return whether the results of `node` are few numbers, such as those of a shape."""
    shapes = [(dims(y), static(dims(y))) for y in node.outputs]
    return all(
        prod(lengths) <= _SMALL if lengths is not None else shape is not None and len(shape) < 2
        for shape, lengths in shapes
    )


def move_out(
    body: ir.Graph,
    op: Emit,
    worth: Callable[[ir.Node], bool] = lambda _: True,
    varying: Iterable[ir.Value] = (),
) -> None:
    """Move the nodes that compute the same in every iteration from a body to the graph of `op`.

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


def shapes_from_outside(body: ir.Graph, op: Emit, outer: Mapping[ir.Value, ir.Value]) -> None:
    """Let Shape and Size of inputs of a Scan's body read what the Scan reads.

    `op` writes the graph around the body. `outer` has the operand of the Scan for each input that
    has the same shape in all iterations; of a scanned one, it has one axis more in front.
    """
    for x, whole in outer.items():
        shape, lead = dims(x), len(dims(whole) or ()) - len(dims(x) or ())
        for node, _ in list(x.uses()):
            if node.op_type not in ("Shape", "Size") or node.domain or shape is None:
                continue
            get, rank = node.attributes.get_int, len(shape)
            first, end = slice(get("start", 0), get("end", rank)).indices(rank)[:2]
            y = op.Shape(whole, start=first + lead, end=max(first, end) + lead)
            if node.op_type == "Size":
                y = op.ReduceProd(y, keepdims=0)
            y = op.set_type_like(y, node.outputs[0])
            ir.convenience.replace_all_uses_with(node.outputs[0], y)
