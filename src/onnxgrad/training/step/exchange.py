"""A step of several processes: results of the rows of each become results of all rows.

Counts of terms, gradients and sums of losses are added up over the processes, inside of the graph:
later nodes, such as clipping by the norm of all gradients, read the sums of the whole batch. Most
steps need one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.operators.shapes import dims, static
from onnxgrad.parallel.collectives import all_reduce, broadcast
from onnxgrad.parallel.part import Part
from onnxgrad.training.objective import Objective, inverse
from onnxgrad.training.step.gradients import Gradients
from onnxgrad.training.step.inputs import ROWS, SHARE
from onnxgrad.training.step.update import Update
from onnxgrad.training.step.weight_groups import Group, stated_shape


@dataclass(frozen=True)
class Across:
    """How the processes of a step share it.

    - `part`: the rows of this process.
    - `same_buffers`: whether each computes the buffers of the whole batch; else their mean counts.
    - `shards`: whether each updates some of the weights only.
    """

    part: Part
    same_buffers: bool = False
    shards: bool = False


@dataclass(frozen=True)
class Expected:
    """How many terms the loss of a batch has, unless some are ignored or weighted.

    All processes know this number before they exchange anything: each divides its gradients by it,
    and their sum is multiplied by its ratio to the count of all processes. So this count is in the
    same message. `terms` is the number, computed from the feed `ROWS`; `own` is the count of this
    process.
    """

    terms: ir.Value
    own: ir.Value

    @classmethod
    def of(cls, op: Emit, objective: Objective) -> Expected | None:
        """Return it for an objective; None where the count must be known before the gradients."""
        counts, labels = objective.written.counts, objective.written.labels
        n, wide = counts[0], (ir.DataType.FLOAT, ir.DataType.DOUBLE)
        if len(counts) > 1 or objective.scales or n.dtype not in wide:
            return None
        if any(w.dtype != n.dtype or static(dims(w)) is None for w in objective.weights):
            return None
        lengths = (dims(labels[0]) or ())[1:] if labels else ()
        each = prod(length for length in lengths if isinstance(length, int)) or 1
        rows = ROWS.input(op, wide=n.dtype == ir.DataType.DOUBLE)
        with op:
            terms = rows if each == 1 else op.Mul(rows, op.const(float(each), n.dtype))
        return cls(op.set_type_like(terms, n), n)


def counted_across(
    op: Emit, objective: Objective, scale: ir.Value | None
) -> tuple[Objective, dict[ir.Value, ir.Value], Expected | None]:
    """Return the objective with the counts of all processes, and its cotangents times `scale`."""
    expected = Expected.of(op, objective)
    written = objective.written
    counts = [all_reduce(op, n) for n in written.counts]
    objective = replace(objective, written=replace(written, counts=counts))
    if expected is None:
        return objective, objective.cotangents(op, scale), None
    return objective, objective.scaled(op, [inverse(op, expected.terms)]), expected


def sum_over_processes(
    op: Emit, parts: Gradients, across: Across, expected: Expected | None
) -> Gradients:
    """Return the gradients, losses and buffers of all processes.

    The counts that it reports are the counts of all processes already. Buffers are the mean by the
    share of rows, unless all processes compute the same.
    """
    half, buffers = len(parts.reported) // 2, dict(parts.buffers)
    ratio = () if expected is None else (expected.terms, expected.own)
    sums = [all_reduce(op, total) for total in parts.reported[:half]]
    summed = {w: all_reduce(op, g, ratio) for w, g in parts.gradients.items()}
    if buffers and not across.same_buffers:
        share = SHARE.input(op)
        with op:
            for before, after in buffers.items():
                own = op.set_type_like(after * op.Cast(share, to=after.dtype), after)
                buffers[before] = all_reduce(op, own)
    reported = [*sums, *parts.reported[half:]]
    return replace(parts, gradients=summed, buffers=buffers, reported=reported)


def sharded(op: Emit, update: Update, rank: int, owners: Sequence[int]) -> Update:
    """Return the update of the groups that the process `rank` owns; others send it the new weights.

    The groups of weights that it does not update have no slots.
    """
    if update.models is not None:
        own = [
            (group, model) if owner == rank else (replace(group, slots={}), None)
            for group, model, owner in zip(update.groups, update.models, owners, strict=True)
        ]
        return replace(update, groups=[g for g, _ in own], models=[m for _, m in own])
    groups: list[Group] = []
    new: list[ir.Value] = []
    results = iter(update.new)
    for group, owner, g in zip(update.groups, owners, update.gradients, strict=True):
        state, *slots = (next(results) for _ in group.inputs)
        if owner != rank:
            # the gradient, of the same shape, so that all exchange the same values in one order
            group, state, slots = replace(group, slots={}), g, []
        groups.append(group)
        new += [broadcast(op, state, owner), *slots]
    return replace(update, groups=groups, new=new)


def owners_of(groups: Sequence[Group], size: int) -> list[int]:
    """Return the process that updates each group, so that all have about as many elements."""
    elements = [sum(prod(stated_shape(v)) for v in group.inputs) for group in groups]
    loads, owners = [0] * size, [0] * len(groups)
    for i in sorted(range(len(groups)), key=lambda i: -elements[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += elements[i]
    return owners
