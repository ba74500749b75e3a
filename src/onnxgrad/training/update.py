"""The update: from gradients, weights and slots to new weights and slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from onnxgrad.graph import shapes
from onnxgrad.graph.emit import Emit
from onnxgrad.optimizers import Inputs, Optimizer

PACKED = 1 << 14  # elements: copying so small a weight costs less than the nodes of its own update


@dataclass
class Group:
    """Weights that are updated together: a large one, or all small ones in one flat vector."""

    shapes: dict[str, tuple[int, ...]]
    state: ir.Value
    slots: dict[str, ir.Value]

    def pack(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the arrays of the group's weights as the one array of the group."""
        parts = [np.asarray(arrays[name], numpy_dtype(self.state)) for name in self.shapes]
        return np.concatenate([p.ravel() for p in parts]) if len(parts) > 1 else parts[0].copy()

    def unpack(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return the group's one array as one array per weight."""
        ends = np.cumsum([prod(s) for s in self.shapes.values()])
        parts = np.split(array.ravel(), ends[:-1])
        return {
            name: part.reshape(shape).copy()
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    @property
    def inputs(self) -> list[ir.Value]:
        """The weights' state, then its slots."""
        return [self.state, *self.slots.values()]


@dataclass
class Update:
    """Nodes that update weights: what they read and write.

    `new` are the new values of the inputs of all groups, in their order. The step number is an
    input of the graph only if the optimizer reads it.
    """

    groups: list[Group]
    new: list[ir.Value]
    minus_learning_rate: ir.Value
    step: ir.Value

    @property
    def states(self) -> list[ir.Value]:
        """The weights and slots before the step, as many as there are new ones."""
        return [v for group in self.groups for v in group.inputs]


def write_update(op: Emit, gradients: dict[ir.Value, ir.Value], optimizer: Optimizer) -> Update:
    """Write the nodes that update weights by their gradients, `{weight: gradient}`.

    Small weights become parts of one flat input.
    """
    partition = _partition(gradients, PACKED if optimizer.elementwise else 0)
    groups = [_pack(op, members, gradients, optimizer) for members in partition]
    widest = max((g.state for g, _ in groups), key=lambda v: numpy_dtype(v).itemsize)
    rate, number = (
        graph_input(op, name, widest, ir.Shape(())) for name in ("minus_learning_rate", "step")
    )
    updated = []
    with op:
        for group, g in groups:
            scalars = (op.Cast(v, to=group.state.dtype) for v in (rate, number))
            u, new = optimizer.update(op, g, group.slots, Inputs(group.state, *scalars))
            updated += [_sum(op, group.state, u), *(new[slot] for slot in group.slots)]
    return Update([group for group, _ in groups], updated, rate, number)


def numpy_dtype(value: ir.Value) -> np.dtype:
    """Return the numpy dtype of a value whose type is known."""
    assert value.dtype is not None
    return value.dtype.numpy()


def graph_input(op: Emit, name: str, like: ir.Value, shape: ir.Shape | None = None) -> ir.Value:
    """Return a new value of the type of `like`, which is not yet an input of the graph."""
    return ir.Value(
        name=op.name(name), type=like.type, shape=like.shape if shape is None else shape
    )


def _partition(weights: Iterable[ir.Value], limit: int) -> list[list[ir.Value]]:
    """Return the weights in groups: those of up to `limit` elements by dtype, others alone."""
    groups: dict[object, list[ir.Value]] = {}
    for w in weights:
        groups.setdefault(w.dtype if 0 < _size(w) <= limit else w.name, []).append(w)
    return list(groups.values())


def _size(w: ir.Value) -> int:
    return prod(shapes.static(shapes.dims(w)) or ())


def _pack(
    op: Emit, members: list[ir.Value], gradients: dict[ir.Value, ir.Value], optimizer: Optimizer
) -> tuple[Group, ir.Value]:
    """Return the group of `members` and the gradient of its state.

    Several weights become one input, which the graph splits, so that their update is written once.
    """
    if len(members) == 1:
        state, g = members[0], gradients[members[0]]
    else:
        sizes = [_size(w) for w in members]
        state = ir.Value(name=op.name("packed"), type=members[0].type, shape=ir.Shape([sum(sizes)]))
        with op.at(next(iter(op.graph))):
            parts = op.emit_many("Split", [state, sizes], {"axis": 0}, outputs=len(members))
            for w, part, size in zip(members, parts, sizes, strict=True):
                part.shape = ir.Shape([size])
                piece = part if _only_broadcast(w) else op.reshape_like(part, w)
                ir.convenience.replace_all_uses_with(w, piece)
                gradients.update({x: piece for x, dx in gradients.items() if dx is w})
        flat = [op.Reshape(gradients[w], [size]) for w, size in zip(members, sizes, strict=True)]
        g = op.set_type_like(op.Concat(*flat, axis=0), state)
    slots = {slot: graph_input(op, f"{state.name}.{slot}", state) for slot in optimizer.slots}
    return Group(
        {str(w.name): shapes.static(shapes.dims(w)) or () for w in members}, state, slots
    ), g


def _sum(op: Emit, state: ir.Value, u: ir.Value) -> ir.Value:
    """Return state + u, as one node if u is a sum itself."""
    node = u.producer()
    assert node is not None
    return op.Sum(state, *node.inputs) if node.op_type == "Add" else op.Add(state, u)


def _only_broadcast(w: ir.Value) -> bool:
    """Return whether `w` only broadcasts, so that its axes of length one can be dropped."""
    shape = shapes.dims(w) or ()
    return all(d == 1 for d in shape[:-1]) and all(
        node.op_type in ("Add", "Sub", "Mul", "Div")
        and (shapes.rank(node.inputs[1 - i]) or 0) >= len(shape)
        and node.inputs[1 - i] is not w
        for node, i in w.uses()
    )
