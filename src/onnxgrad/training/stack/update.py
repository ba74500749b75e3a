"""The update of all members: rows of stacked weights, each with the optimizer of its member."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import dims, static
from onnxgrad.optimizers import Inputs, Optimizer
from onnxgrad.training.stack.decay import merged
from onnxgrad.training.stack.joint import across, row
from onnxgrad.training.stack.weight_groups import Rows, Shape, StackGroup
from onnxgrad.training.step.inputs import RATE, STEP
from onnxgrad.training.step.weight_groups import PACKED, graph_input


@dataclass
class StackedUpdate:
    """Nodes that update the weights of all members: `new` are the values after `groups`' inputs."""

    groups: list[StackGroup]
    new: list[ir.Value]
    rate: ir.Value  # the negative learning rates, (members,)
    step: ir.Value


def write_stacked_update(
    op: Emit, gradients: dict[ir.Value, ir.Value], optimizers: Sequence[Optimizer]
) -> StackedUpdate:
    """Write the nodes that update stacked weights by their gradients, `{weight: gradient}`.

    Args:
        op: writes into the graph of the gradients.
        gradients: of weights with a leading axis of members. Small ones become parts of one input.
        optimizers: one for each member.

    Raises:
        ValueError: as `write_groups`.
    """
    for optimizer in optimizers:
        optimizer.check_names([str(w.name) for w in gradients])
    pieces: dict[ir.Value, ir.Value] = {}
    groups, stacked = [], []
    for own, weights in _partition(gradients, optimizers):
        group, g = _pack(op, own, weights, gradients, pieces)
        groups.append(group)
        stacked.append(g)
    stacked = across(op, [pieces.get(g, g) for g in stacked], optimizers)
    wide = any(group.state.dtype == ir.DataType.DOUBLE for group in groups)
    rate, number = RATE.input(op, [len(optimizers)], wide), STEP.input(op)
    new: list[ir.Value] = []
    for group, g in zip(groups, stacked, strict=True):
        with op:
            new += _updated(op, group, g, rate, number)
    return StackedUpdate(groups, new, rate, number)


def _member_shape(w: ir.Value) -> Shape:
    return (static(dims(w)) or ())[1:]


def _partition(
    weights: Mapping[ir.Value, ir.Value], optimizers: Sequence[Optimizer]
) -> list[tuple[list[Optimizer], list[ir.Value]]]:
    """Return the weights in groups of equal optimizers: small ones by dtype, others alone."""
    groups: list[tuple[list[Optimizer], list[ir.Value]]] = []
    packed: list[tuple[list[Optimizer], list[ir.Value]]] = []
    for w in weights:
        shape = _member_shape(w)
        own = [optimizer.for_weight(str(w.name), shape) for optimizer in optimizers]
        small = all(o.elementwise for o in own) and 0 < prod(shape) <= PACKED
        same = (g for g in packed if small and g[1][0].dtype == w.dtype and g[0] == own)
        if (group := next(same, None)) is not None:
            group[1].append(w)
            continue
        groups.append((own, [w]))
        if small:
            packed.append(groups[-1])
    return groups


def _pack(
    op: Emit,
    own: list[Optimizer],
    weights: list[ir.Value],
    gradients: Mapping[ir.Value, ir.Value],
    pieces: dict[ir.Value, ir.Value],
) -> tuple[StackGroup, ir.Value]:
    """Return the group of `weights` and the gradient of its state."""
    count, first = len(own), weights[0]
    shapes = {str(w.name): _member_shape(w) for w in weights}
    if len(weights) == 1:
        state, g = first, pieces.get(gradients[first], gradients[first])
    else:
        sizes = [prod(s) for s in shapes.values()]
        state = ir.Value(
            name=op.name("packed"), type=first.type, shape=ir.Shape([count, sum(sizes)])
        )
        with op.at(next(iter(op.graph), None)):
            parts = op.emit_many("Split", [state, sizes], {"axis": 1}, outputs=len(weights))
            for w, part, size in zip(weights, parts, sizes, strict=True):
                part.type, part.shape = w.type, ir.Shape([count, size])
                pieces[w] = piece = op.reshape_like(part, w)
                ir.convenience.replace_all_uses_with(w, piece)
        flat = [
            op.Reshape(pieces.get(gradients[w], gradients[w]), [count, size])
            for w, size in zip(weights, sizes, strict=True)
        ]
        g = op.set_type_like(op.Concat(*flat, axis=1), state)
    prefix = str(state.name)
    rows = []
    for optimizer, members in _by_optimizer(own):
        slots = {}
        for slot in optimizer.slots:
            shape = _slot_shape(optimizer, slot, state, members)
            slots[slot] = graph_input(op, f"{prefix}.{slot}", state, shape)
        rows.append(Rows(optimizer, members, slots))
    return StackGroup(shapes, own, state, rows), g


def _slot_shape(optimizer: Optimizer, slot: str, state: ir.Value, members: list[int]) -> ir.Shape:
    """Return the shape of a slot of some members; a single number broadcasts with the state."""
    shape = _member_shape(state)
    own = optimizer.slot_shape(slot, shape)
    if own == () and optimizer.elementwise:
        own = (1,) * len(shape)
    return ir.Shape([len(members), *own])


def _by_optimizer(own: list[Optimizer]) -> list[tuple[Optimizer, list[int]]]:
    """Return the members by optimizer; those that differ in weight decay only are together."""
    one = merged(own)
    if one is not None:
        return [(one, list(range(len(own))))]
    rows: list[tuple[Optimizer, list[int]]] = []
    for k, optimizer in enumerate(own):
        same = next((members for one, members in rows if one == optimizer), None)
        if same is None:
            rows.append((optimizer, [k]))
        else:
            same.append(k)
    return rows


def _updated(
    op: Emit, group: StackGroup, g: ir.Value, rate: ir.Value, number: ir.Value
) -> list[ir.Value]:
    """Write the new state of a group, and its new slots."""
    count, state = len(group.own), group.state
    rates = op.Cast(rate, to=state.dtype)
    step = op.Cast(number, to=state.dtype)
    states, slots, order = [], [], list[int]()
    for rows in group.rows:
        whole = len(rows.members) == count
        w, u, rate_of = (v if whole else _taken(op, v, rows.members) for v in (state, g, rates))
        write = _rows_together if rows.optimizer.elementwise else _rows_apart
        new, own = write(op, rows, w, u, rate_of, step)
        states.append(new)
        slots += own
        order += rows.members
    if len(states) > 1:
        joined = op.Concat(*states, axis=0)
        back = np.argsort(order)
        states = [op.Gather(joined, op.const(back.tolist()), axis=0)]
    return [op.set_type_like(states[0], state), *slots]


def _taken(op: Emit, x: ir.Value, members: list[int]) -> ir.Value:
    y = op.Gather(x, op.const(members), axis=0)
    y.type, y.shape = x.type, ir.Shape([len(members), *(dims(x) or ())[1:]])
    return y


def _rows_together(
    op: Emit, rows: Rows, state: ir.Value, g: ir.Value, rates: ir.Value, step: ir.Value
) -> tuple[ir.Value, list[ir.Value]]:
    """Write an elementwise update of all rows at once; the rates broadcast with them."""
    column = [len(rows.members)] + [1] * len(_member_shape(state))
    rate = op.Reshape(rates, column)
    rate.type, rate.shape = state.type, ir.Shape(column)
    u, new = rows.optimizer.update(op, g, rows.slots, Inputs(state, rate, step))
    slots = [op.set_type_like(new[slot], old) for slot, old in rows.slots.items()]
    return op.set_type_like(op.Add(state, u), state), slots


def _rows_apart(
    op: Emit, rows: Rows, state: ir.Value, g: ir.Value, rates: ir.Value, step: ir.Value
) -> tuple[ir.Value, list[ir.Value]]:
    """Write an update of each row: one with norms or axes, which must not mix the members."""
    states: list[ir.Value] = []
    slots: list[list[ir.Value]] = [[] for _ in rows.slots]
    for k in range(len(rows.members)):
        w, u, rate = (row(op, v, k) for v in (state, g, rates))
        own = {slot: row(op, v, k) for slot, v in rows.slots.items()}
        u, new = rows.optimizer.update(op, u, own, Inputs(w, rate, step))
        states.append(op.Unsqueeze(op.set_type_like(op.Add(w, u), w), [0]))
        for listed, (slot, old) in zip(slots, own.items(), strict=True):
            listed.append(op.Unsqueeze(op.set_type_like(new[slot], old), [0]))
    joined = [op.Concat(*listed, axis=0) for listed in slots]
    olds = rows.slots.values()
    return op.Concat(*states, axis=0), [
        op.set_type_like(v, old) for v, old in zip(joined, olds, strict=True)
    ]
