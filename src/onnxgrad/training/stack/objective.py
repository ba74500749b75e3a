"""The objective of all members in one graph: every weight has a leading axis of members."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.member_axis import MemberAxis
from onnxgrad.autodiff.member_rules import push
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import dims
from onnxgrad.losses.objectives import Written
from onnxgrad.training.objective import Objective, inverse

Arrays = Mapping[str, np.ndarray]


@dataclass
class StackedObjective(Objective):
    """The losses of all members: `written.sums` are vectors, and predictions have their axis."""

    members: int = field(kw_only=True)

    def cotangents(self, op: Emit) -> dict[ir.Value, ir.Value]:
        """Return the cotangents that the sweep starts with: the members' losses are summed."""
        written, seeds = self.written, dict[ir.Value, list[ir.Value]]()
        with op:
            parts = zip(
                written.sums, written.counts, written.factors, written.gradients, strict=True
            )
            for total, count, factor, own in parts:
                scale = inverse(op, count)
                scale = scale if factor == 1 else factor * scale
                value, g = total, op.set_type_like(op.Expand(scale, [self.members]), total)
                if own is not None:
                    value, g = own[0], op.set_type_like(op.Mul(own[1], scale), own[0])
                seeds.setdefault(value, []).append(g)
            return {value: op.total(gs) for value, gs in seeds.items()}


def stacked_objective(objective: Objective, weights: Arrays, members: int) -> StackedObjective:
    """Return the objective of all members, written into the graph of that of one.

    Args:
        objective: of one member.
        weights: the weights of all members by name, (members, ...); those that are missing are
            inputs all the same.
        members: their number.

    Raises:
        ValueError: a node that cannot be written for all members.
    """
    graph, written = objective.model.graph, objective.written
    op = Emit(graph)
    stacked = {w: _stacked_input(graph, w, weights, members) for w in objective.weights}
    axis = MemberAxis(op, members, stacked)
    own = [v for pair in written.gradients if pair is not None for v in pair]
    kept = [*written.sums, *written.counts, *objective.predictions.values(), *own]
    graph.outputs[:] = list(dict.fromkeys(kept))
    push(axis, graph)
    vectors = [axis.expanded(v) for v in written.sums]
    gradients = [
        None if pair is None else (axis.of(pair[0]), axis.expanded(pair[1]))
        for pair in written.gradients
    ]
    predictions = {name: axis.expanded(v) for name, v in objective.predictions.items()}
    new = replace(written, sums=vectors, counts=_counts(axis, written), gradients=gradients)
    fields = vars(objective) | {
        "weights": list(stacked.values()),
        "stop_gradient": set(axis.all_of(objective.stop_gradient)),
        "written": new,
        "predictions": predictions,
    }
    return StackedObjective(**fields, members=members)


def _counts(axis: MemberAxis, written: Written) -> list[ir.Value]:
    if any(v in axis for v in written.counts):
        raise ValueError(
            "the number of terms of the loss depends on the weights, which cannot be stacked: "
            "train the members one after the other, each by a Trainer"
        )
    return axis.all_of(written.counts)


def _stacked_input(graph: ir.Graph, w: ir.Value, weights: Arrays, members: int) -> ir.Value:
    """Replace the input `w` by one for all members, which has their values."""
    array = weights.get(str(w.name))
    new = ir.Value(name=w.name, type=w.type, shape=ir.Shape([members, *(dims(w) or ())]))
    if array is not None:
        new.const_value = ir.tensor(array, name=w.name)
    graph.inputs[list(graph.inputs).index(w)] = new
    return new
