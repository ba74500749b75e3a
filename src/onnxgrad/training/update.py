"""The update: from gradients, weights and slots to new weights and slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.graph import shapes
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import tidy
from onnxgrad.model.convert import to_proto
from onnxgrad.model.opsets import WORKING_OPSET
from onnxgrad.optimizers import Inputs, Optimizer
from onnxgrad.training.blocks import block_shape, update_in_blocks
from onnxgrad.training.group import Arrays, Group, Shape, numpy_dtype

PACKED = 1 << 14  # elements: copying so small a weight costs less than the nodes of its own update


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


def write_update(
    op: Emit,
    gradients: dict[ir.Value, ir.Value],
    optimizer: Optimizer,
    packed: int | None = None,
    blocks: bool = True,
) -> Update:
    """Write the nodes that update weights by their gradients, `{weight: gradient}`.

    Args:
        op: writes into the graph of the gradients.
        gradients: small weights become parts of one flat input, and large ones have two axes, which
            the graph turns into what it reads; these replace the weights.
        optimizer: of the step; `for_weight` chooses that of each weight.
        packed: elements up to which a weight is small; None is `PACKED`.
        blocks: whether large weights are updated in blocks that stay in the cache of the CPU.

    Raises:
        ValueError: a pattern of the optimizer that matches no weight, or a weight that none
            matches.
    """
    optimizer.check_names([str(w.name) for w in gradients])
    pieces: dict[ir.Value, ir.Value] = {}
    groups = [
        _pack(op, members, gradients, own, blocks, pieces)
        for own, members in _partition(gradients, optimizer, PACKED if packed is None else packed)
    ]
    cotangents = optimizer.across(op, [pieces.get(g, g) for _, g in groups])
    widest = max((g.state for g, _ in groups), key=lambda v: numpy_dtype(v).itemsize)
    rate, number = (
        graph_input(op, name, widest, ir.Shape(())) for name in ("minus_learning_rate", "step")
    )
    updated = []
    with op:
        for (group, _), g in zip(groups, cotangents, strict=True):
            scalars = (op.Cast(v, to=group.state.dtype) for v in (rate, number))
            inputs = Inputs(group.state, *scalars)
            if group.in_blocks:
                updated += update_in_blocks(op, g, group.optimizer, group.slots, inputs)
            else:
                u, new = group.optimizer.update(op, g, group.slots, inputs)
                updated += [_sum(op, group.state, u), *(new[slot] for slot in group.slots)]
    return Update([group for group, _ in groups], updated, rate, number)


def build_update(
    weights: Mapping[str, tuple[Shape, np.dtype | type]],
    optimizer: Optimizer,
    opset: int = WORKING_OPSET,
) -> ModelProto:
    """Return the update as a model of its own, with the numbers of the update inside of a step.

    Inputs, in order: the weights by name; slots, named `<weight>.<slot>`; gradients, named
    `<weight>_grad`; the scalars `minus_learning_rate` and `step`, 1 in the first step, of the
    widest dtype. Outputs: new weights and new slots, named as the inputs with `.new` behind.

    Args:
        weights: `{name: (shape, dtype)}`.
        optimizer: as in training.
        opset: 18 to 26.

    Raises:
        ValueError: as `write_update`.

    Examples:
        >>> import numpy as np
        >>> from onnxgrad.optimizers import momentum
        >>> from onnxgrad.training.update import build_update
        >>> model = build_update({"w": ((3, 2), np.float32)}, momentum())
        >>> [x.name for x in model.graph.input]
        ['w', 'w.velocity', 'w_grad', 'minus_learning_rate', 'step']
        >>> [y.name for y in model.graph.output]
        ['w.new', 'w.velocity.new']
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="update")
    op = Emit(graph, weights)
    gradients = {}
    for name, (shape, dtype) in weights.items():
        weight = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype))),
            shape=ir.Shape(shape),
        )
        gradients[weight] = graph_input(op, f"{name}_grad", weight)
    graph.inputs.extend(gradients.values())
    update = write_update(op, dict(gradients), optimizer, packed=0)
    new = dict(zip(update.states, update.new, strict=True))
    for group in update.groups:
        if group.in_blocks:
            _undo_blocks(op, group, new)
    states = [group.state for group in update.groups]
    slots = [slot for group in update.groups for slot in group.slots.values()]
    graph.inputs[:] = [*states, *slots, *graph.inputs, update.minus_learning_rate, update.step]
    protected = set(graph.inputs)
    graph.outputs.extend(
        op.name_output(new[old], f"{old.name}.new", old, protected) for old in (*states, *slots)
    )
    model = ir.Model(graph, ir_version=8, producer_name="onnxgrad")
    tidy(model)
    return to_proto(model)


def evaluated(
    optimizer: Optimizer,
    weights: Mapping[str, np.ndarray],
    slots: Mapping[str, Mapping[str, np.ndarray]],
    steps: int,
) -> Arrays:
    """Return the weights to evaluate and export: averages, if the optimizer keeps them.

    A weight without slots was not trained yet.
    """
    return {
        name: optimizer.for_weight(name, w.shape).evaluated(w, slots[name], steps)
        if name in slots
        else w
        for name, w in weights.items()
    }


def _undo_blocks(op: Emit, group: Group, new: dict[ir.Value, ir.Value]) -> None:
    """Give the inputs of a group, and their new values, the shape of its weight."""
    ((name, shape),) = group.shapes.items()

    def whole(blocks: ir.Value, name: str) -> ir.Value:
        value = ir.Value(name=name, type=blocks.type, shape=ir.Shape(shape))
        with op.at(next(iter(op.graph), None)):
            ir.convenience.replace_all_uses_with(blocks, op.reshape_like(value, blocks))
        new[value] = op.reshape_like(new.pop(blocks), value)
        return value

    group.state = whole(group.state, name)
    for slot, value in group.slots.items():
        if shapes.dims(value):
            group.slots[slot] = whole(value, str(value.name))


def graph_input(op: Emit, name: str, like: ir.Value, shape: ir.Shape | None = None) -> ir.Value:
    """Return a new value of the type of `like`, which is not yet an input of the graph."""
    return ir.Value(
        name=op.name(name), type=like.type, shape=like.shape if shape is None else shape
    )


def _partition(
    weights: Iterable[ir.Value], optimizer: Optimizer, limit: int
) -> list[tuple[Optimizer, list[ir.Value]]]:
    """Return the weights in groups of one optimizer: small ones by dtype, others alone."""
    groups: list[tuple[Optimizer, list[ir.Value]]] = []
    packed: list[tuple[Optimizer, list[ir.Value]]] = []
    for w in weights:
        own = optimizer.for_weight(str(w.name), _static(w))
        small = own.elementwise and 0 < prod(_static(w)) <= limit
        same = (g for g in packed if small and g[1][0].dtype == w.dtype and g[0] == own)
        if (group := next(same, None)) is not None:
            group[1].append(w)
            continue
        groups.append((own, [w]))
        if small:
            packed.append(groups[-1])
    return groups


def _static(w: ir.Value) -> Shape:
    return shapes.static(shapes.dims(w)) or ()


def _pack(
    op: Emit,
    members: list[ir.Value],
    gradients: Mapping[ir.Value, ir.Value],
    optimizer: Optimizer,
    blocks: bool,
    pieces: dict[ir.Value, ir.Value],
) -> tuple[Group, ir.Value]:
    """Return the group of `members` and the gradient of its state.

    Several weights become one input, which the graph splits, so that their update is written once.
    A weight that is updated in blocks becomes an input whose first axis counts the blocks. `pieces`
    gets what the graph reads instead of each weight.
    """
    sizes = [prod(_static(w)) for w in members]
    w = members[0]

    def gradient(w: ir.Value) -> ir.Value:
        return pieces.get(gradients[w], gradients[w])

    alone = len(members) == 1 and optimizer.elementwise and blocks
    shape = block_shape(w) if alone else None
    if len(members) == 1 and shape is None:
        state, g = w, gradient(w)
    elif shape is not None:
        state = graph_input(op, f"{w.name}.blocks", w, ir.Shape(shape))
        with op.at(next(iter(op.graph), None)):
            _replace(w, op.reshape_like(state, w), pieces)
        g = op.set_type_like(op.Reshape(gradient(w), list(shape)), state)
    else:
        state = ir.Value(name=op.name("packed"), type=members[0].type, shape=ir.Shape([sum(sizes)]))
        with op.at(next(iter(op.graph), None)):
            parts = op.emit_many("Split", [state, sizes], {"axis": 0}, outputs=len(members))
            for w, part, size in zip(members, parts, sizes, strict=True):
                part.shape = ir.Shape([size])
                piece = part if _only_broadcast(w) else op.reshape_like(part, w)
                _replace(w, piece, pieces)
        flat = [op.Reshape(gradient(w), [size]) for w, size in zip(members, sizes, strict=True)]
        g = op.set_type_like(op.Concat(*flat, axis=0), state)
    inner = {slot: ir.Shape(optimizer.slot_shape(slot, _static(state))) for slot in optimizer.slots}
    prefix = state.name if len(members) > 1 else w.name
    slots = {slot: graph_input(op, f"{prefix}.{slot}", state, s) for slot, s in inner.items()}
    names = {str(w.name): _static(w) for w in members}
    return Group(names, state, slots, optimizer, shape is not None), g


def _replace(w: ir.Value, piece: ir.Value, pieces: dict[ir.Value, ir.Value]) -> None:
    """Replace a weight by what the graph makes of the state, also where it is a gradient."""
    ir.convenience.replace_all_uses_with(w, piece)
    pieces[w] = piece


def _sum(op: Emit, state: ir.Value, u: ir.Value) -> ir.Value:
    """Return state + u, as one node if u is a sum itself."""
    node = u.producer()
    if node is not None and node.op_type == "Add":
        return op.Sum(state, *node.inputs)
    return op.Add(state, u)


def _only_broadcast(w: ir.Value) -> bool:
    """Return whether `w` only broadcasts, so that its axes of length one can be dropped."""
    shape = shapes.dims(w) or ()
    return all(d == 1 for d in shape[:-1]) and all(
        node.op_type in ("Add", "Sub", "Mul", "Div")
        and (shapes.rank(node.inputs[1 - i]) or 0) >= len(shape)
        and node.inputs[1 - i] is not w
        for node, i in w.uses()
    )
