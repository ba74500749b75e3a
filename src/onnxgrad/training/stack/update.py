"""The update of all members: rows of stacked weights, each with the optimizer of its member."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import dims, static
from onnxgrad.optimizers import Chain, Inputs, Optimizer
from onnxgrad.optimizers.clipping import EPS, ClipByGlobalNorm
from onnxgrad.training.groups import PACKED, graph_input, numpy_dtype
from onnxgrad.training.stack.decay import merged

Shape = tuple[int, ...]
Slots = Mapping[str, Mapping[str, np.ndarray]]


@dataclass
class Rows:
    """The members of a group that have one optimizer; their slots are inputs, (rows, ...)."""

    optimizer: Optimizer
    members: list[int]
    slots: dict[str, ir.Value]


@dataclass
class StackGroup:
    """Weights of all members that are updated together.

    Attributes:
        shapes: of the weights of one member, by name.
        own: the optimizer of each member for these weights.
        state: the input of the weights: (members, ...), or (members, elements) for several.
        rows: the members by optimizer.
    """

    shapes: dict[str, Shape]
    own: list[Optimizer]
    state: ir.Value
    rows: list[Rows]

    @property
    def inputs(self) -> list[ir.Value]:
        """The state, then the slots."""
        return [self.state, *(slot for rows in self.rows for slot in rows.slots.values())]

    def initial(self, weights: Sequence[Mapping], slots: Sequence[Slots]) -> list[np.ndarray]:
        """Return the arrays of the inputs, from the weights and slots of each member by name."""
        arrays = [np.stack([self._packed(w, self.shapes) for w in weights])]
        for rows in self.rows:
            arrays += [self._slot(rows, slot, weights, slots) for slot in rows.slots]
        dtype = numpy_dtype(self.state)
        inputs = [static(dims(v)) or () for v in self.inputs]
        return [
            np.ascontiguousarray(a.reshape(shape), dtype)
            for a, shape in zip(arrays, inputs, strict=True)
        ]

    def _slot(
        self, rows: Rows, slot: str, weights: Sequence[Mapping], slots: Sequence[Slots]
    ) -> np.ndarray:
        """Return a slot of the members of `rows`."""
        arrays = []
        for k in rows.members:
            own, values = self.own[k], {}
            for name, shape in self.shapes.items():
                value = slots[k].get(name, {}).get(slot)
                if value is None:
                    value = own.slot_initial(slot, np.asarray(weights[k][name]))
                values[name] = np.broadcast_to(value, own.slot_shape(slot, shape))
            shared = all(own.slot_shape(slot, s) == () for s in self.shapes.values())
            first = next(iter(self.shapes))
            arrays.append(
                self._packed({first: values[first]}, [first])
                if shared
                else self._packed(values, values)
            )
        return np.stack(arrays)

    def _packed(self, arrays: Mapping[str, np.ndarray], names: Any) -> np.ndarray:
        return np.concatenate([np.ravel(arrays[name]) for name in names])

    def split(self, arrays: Sequence[np.ndarray], k: int) -> tuple[dict, dict]:
        """Return the weights and slots of member `k`, by name, from the arrays of the inputs."""
        rows, start = self._rows_of(k)
        row = rows.members.index(k)
        weights = self._unpacked(arrays[0][k], self.shapes)
        slots: dict[str, dict[str, np.ndarray]] = {name: {} for name in self.shapes}
        for i, slot in enumerate(rows.slots):
            own, array = self.own[k], arrays[start + i][row]
            wanted = {name: own.slot_shape(slot, s) for name, s in self.shapes.items()}
            if all(s == () for s in wanted.values()):
                values = {name: array.reshape(()).copy() for name in wanted}
            else:
                values = self._unpacked(array, wanted)
            for name, value in values.items():
                slots[name][slot] = value
        return weights, slots

    def _rows_of(self, k: int) -> tuple[Rows, int]:
        """Return the rows of member `k`, and the index of their first slot among the inputs."""
        start = 1
        for rows in self.rows:
            if k in rows.members:
                return rows, start
            start += len(rows.slots)
        raise IndexError(k)

    def _unpacked(self, array: np.ndarray, wanted: Mapping[str, Shape]) -> dict[str, np.ndarray]:
        parts = np.split(array.ravel(), np.cumsum([prod(s) for s in wanted.values()])[:-1])
        return {
            name: part.reshape(shape).copy()
            for (name, shape), part in zip(wanted.items(), parts, strict=True)
        }

    def restore(
        self, arrays: Sequence[np.ndarray], before: Sequence[np.ndarray], k: int
    ) -> None:
        """Set member `k` back in `arrays` to what it is in `before`."""
        rows, start = self._rows_of(k)
        arrays[0][k] = before[0][k]
        row = rows.members.index(k)
        for i in range(start, start + len(rows.slots)):
            arrays[i][row] = before[i][row]

    def finite(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return which members have only finite values, (members,)."""
        count = len(self.own)
        fine = np.isfinite(arrays[0].reshape(count, -1)).all(axis=1)
        start = 1
        for rows in self.rows:
            for array in arrays[start : start + len(rows.slots)]:
                fine[rows.members] &= np.isfinite(array.reshape(len(rows.members), -1)).all(axis=1)
            start += len(rows.slots)
        return fine


@dataclass
class StackedUpdate:
    """Nodes that update the weights of all members: `new` are the values after `groups`' inputs."""

    groups: list[StackGroup]
    new: list[ir.Value]
    minus_learning_rate: ir.Value  # (members,)
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
    stacked = _across(op, [pieces.get(g, g) for g in stacked], optimizers)
    widest = max((g.state for g in groups), key=lambda v: numpy_dtype(v).itemsize)
    rate = graph_input(op, "minus_learning_rate", widest, ir.Shape([len(optimizers)]))
    number = graph_input(op, "step", widest, ir.Shape(()))
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
    packed = []
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
        slots = {
            slot: graph_input(op, f"{prefix}.{slot}", state, _slot_shape(optimizer, slot, state, members))
            for slot in optimizer.slots
        }
        rows.append(Rows(optimizer, members, slots))
    return StackGroup(shapes, own, state, rows), g


def _slot_shape(
    optimizer: Optimizer, slot: str, state: ir.Value, members: list[int]
) -> ir.Shape:
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
        part = [v if whole else _taken(op, v, rows.members) for v in (state, g, rates)]
        write = _rows_together if rows.optimizer.elementwise else _rows_apart
        new, own = write(op, rows, *part, step)
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
    states, slots = [], [[] for _ in rows.slots]
    for k in range(len(rows.members)):
        w, u, rate = (_row(op, v, k) for v in (state, g, rates))
        own = {slot: _row(op, v, k) for slot, v in rows.slots.items()}
        u, new = rows.optimizer.update(op, u, own, Inputs(w, rate, step))
        states.append(op.Unsqueeze(op.set_type_like(op.Add(w, u), w), [0]))
        for listed, (slot, old) in zip(slots, own.items(), strict=True):
            listed.append(op.Unsqueeze(op.set_type_like(new[slot], old), [0]))
    joined = [op.Concat(*listed, axis=0) for listed in slots]
    olds = rows.slots.values()
    return op.Concat(*states, axis=0), [
        op.set_type_like(v, old) for v, old in zip(joined, olds, strict=True)
    ]


def _row(op: Emit, x: ir.Value, k: int) -> ir.Value:
    y = op.Gather(x, np.int64(k), axis=0)
    y.type, y.shape = x.type, ir.Shape((dims(x) or ())[1:])
    return y


def _across(
    op: Emit, gradients: list[ir.Value], optimizers: Sequence[Optimizer]
) -> list[ir.Value]:
    """Write what needs all gradients of a member at once."""
    if not any(optimizer.joint for optimizer in optimizers):
        return gradients
    limits = [_limit(optimizer) for optimizer in optimizers]
    if all(limit is not None for limit in limits):
        return _clipped(op, gradients, np.array(limits, np.float64))
    members = [
        optimizer.across(op, [_row(op, g, k) for g in gradients])
        for k, optimizer in enumerate(optimizers)
    ]
    return [
        op.set_type_like(op.Concat(*[op.Unsqueeze(v, [0]) for v in column], axis=0), g)
        for g, column in zip(gradients, zip(*members, strict=True), strict=True)
    ]


def _limit(optimizer: Optimizer) -> float | None:
    """Return the norm to which an optimizer clips all gradients, if that is all it does with them."""
    parts = [optimizer]
    while any(isinstance(part, Chain) for part in parts):
        parts = [p for part in parts for p in (part.parts if isinstance(part, Chain) else (part,))]
    joint = [part for part in parts if part.joint]
    if len(joint) == 1 and isinstance(joint[0], ClipByGlobalNorm):
        return joint[0].norm
    return None


def _clipped(op: Emit, gradients: list[ir.Value], limits: np.ndarray) -> list[ir.Value]:
    """Write `ClipByGlobalNorm.across` for all members."""
    widest = max((g.dtype for g in gradients if g.dtype), key=lambda dtype: dtype.bitwidth)
    count = len(limits)
    with op:
        squares = []
        for g in gradients:
            axes = list(range(1, len(dims(g) or ())))
            square = op.ReduceSumSquare(g, axes, keepdims=0) if axes else op.Mul(g, g)
            squares.append(op.Cast(square, to=widest))
        for square in squares:
            square.shape = ir.Shape([count])
        limit = op.const(limits.astype(widest.numpy()))
        factor = op.Min(limit / (op.Sqrt(op.total(squares)) + EPS), 1.0)
        clipped = []
        for g in gradients:
            column = op.Reshape(op.Cast(factor, to=g.dtype), [count] + [1] * (len(dims(g) or ()) - 1))
            clipped.append(op.set_type_like(op.Mul(g, column), g))
        return clipped
