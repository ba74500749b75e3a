"""The step: one model from a batch, weights and slots to the loss, new weights and new slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.derivative import as_constants
from onnxgrad.autodiff.quantized import refuse_quantized
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.graph import shapes
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import tidy
from onnxgrad.optimizers import Inputs, Optimizer
from onnxgrad.runtime.session import work
from onnxgrad.training.objective import Objective

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
class Step:
    """The step's graph: states, data, minus_learning_rate, step in; new states, loss out.

    The step number is an input only if the optimizer reads it. `inverse_rows`, by which the
    gradient is multiplied, is a captured value, as it is the same for all steps of a call. It is
    None if the optimizer begins with the learning rate, which is divided instead.
    """

    model: ir.Model
    groups: list[Group]
    data: list[ir.Value]
    minus_learning_rate: ir.Value
    step: ir.Value
    inverse_rows: ir.Value | None
    unreached: list[str]  # weights that the loss does not depend on: they stay constants
    work: float  # multiply-adds of the forward pass, per row

    @property
    def weights(self) -> list[str]:
        """The names of the weights that are trained."""
        return [name for group in self.groups for name in group.shapes]

    @property
    def rate_dtype(self) -> np.dtype:
        """The dtype of the learning rate, and of the step number."""
        return numpy_dtype(self.minus_learning_rate)

    @property
    def counts(self) -> bool:
        """Return whether the step number is an input."""
        return self.step in self.model.graph.inputs

    def like_loss(self, number: float) -> np.ndarray:
        """Return `number` in the shape and dtype of `inverse_rows`."""
        assert self.inverse_rows is not None
        shape = shapes.static(shapes.dims(self.inverse_rows)) or ()
        return np.full(shape, number, numpy_dtype(self.inverse_rows))


def numpy_dtype(value: ir.Value) -> np.dtype:
    """Return the numpy dtype of a value whose type is known."""
    assert value.dtype is not None
    return value.dtype.numpy()


def build_step(objective: Objective, optimizer: Optimizer) -> Step:
    """Return the training step, written into the graph of the objective.

    Raises:
        ValueError: the loss depends on none of the weights.
        NoGradientRule: an operator on the way has no rule.
    """
    graph, loss, trained = objective.model.graph, objective.loss, objective.weights
    multiply_adds, op = work(graph), Emit(graph)
    inverse_rows = None if optimizer.rate_first else _input(op, "inverse_rows", loss)
    gradients = sweep(op, _seeds(op, objective, inverse_rows), trained)
    if not gradients:
        refuse_quantized(list(graph), objective.data, objective.seeds)
        names = [str(w.name) for w in trained]
        raise ValueError(f"no differentiable path from any of {names} to the loss {loss.name!r}")
    for w in gradients:
        if (stored := objective.stored.get(str(w.name))) is not None:  # sparse: others stay zero
            with op:
                gradients[w] = op.set_type_like(gradients[w] * stored.astype(numpy_dtype(w)), w)
    unreached = [w for w in trained if w not in gradients]
    as_constants(graph, unreached)

    partition = _partition(gradients, PACKED if optimizer.elementwise else 0)
    groups = [_pack(op, members, gradients, optimizer) for members in partition]
    widest = max((g.state for g, _ in groups), key=lambda v: numpy_dtype(v).itemsize)
    rate, number = (
        _input(op, name, widest, ir.Shape(())) for name in ("minus_learning_rate", "step")
    )
    updated = []
    with op:
        for group, g in groups:
            scalars = (op.Cast(v, to=group.state.dtype) for v in (rate, number))
            u, new = optimizer.update(op, g, group.slots, Inputs(group.state, *scalars))
            updated += [_sum(op, group.state, u), *(new[slot] for slot in group.slots)]
    states = [v for group, _ in groups for v in group.inputs]
    graph.inputs[:] = [*states, *objective.data, rate, *([number] if number.uses() else [])]
    protected = {*graph.inputs, loss}
    graph.outputs[:] = [
        op.name_output(new, f"{old.name}.new", old, protected)
        for old, new in zip(states, updated, strict=True)
    ] + [loss]
    tidy(objective.model)
    return Step(
        model=objective.model,
        groups=[group for group, _ in groups],
        data=objective.data,
        minus_learning_rate=rate,
        step=number,
        inverse_rows=inverse_rows,
        unreached=[str(w.name) for w in unreached],
        work=multiply_adds,
    )


def _seeds(
    op: Emit, objective: Objective, inverse_rows: ir.Value | None
) -> dict[ir.Value, ir.Value]:
    """Return the cotangents that the sweep starts with, times `inverse_rows` if there is one."""
    cotangents = {}
    with op:
        for value, g in objective.seeds.items():
            if g is None:
                cotangents[value] = inverse_rows or op.ones_like(value)
            elif inverse_rows is None:
                cotangents[value] = g
            else:
                broadcasts = (shapes.rank(g) or 0) >= (shapes.rank(inverse_rows) or 0)
                factor = inverse_rows if broadcasts else op.Reshape(inverse_rows, [])
                cotangents[value] = g * factor
    return cotangents


def _input(op: Emit, name: str, like: ir.Value, shape: ir.Shape | None = None) -> ir.Value:
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
    slots = {slot: _input(op, f"{state.name}.{slot}", state) for slot in optimizer.slots}
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
