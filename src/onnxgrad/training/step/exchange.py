"""A step of several processes: what each of them computes of its rows becomes that of all rows.

Counts of terms, gradients and sums of losses are added up over the processes, inside of the graph:
what follows, such as clipping by the norm of all gradients, sees those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import dims, static
from onnxgrad.parallel import Part, all_reduce, broadcast
from onnxgrad.training.objective import Objective
from onnxgrad.training.step.update import Update
from onnxgrad.training.step.weight_groups import Group


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


def counted_across(op: Emit, objective: Objective) -> Objective:
    """Return the objective with the counts of all processes."""
    written = objective.written
    counts = [all_reduce(op, n) for n in written.counts]
    return replace(objective, written=replace(written, counts=counts))


def summed_across(
    op: Emit, gradients: dict[ir.Value, ir.Value], reported: Sequence[ir.Value]
) -> tuple[dict[ir.Value, ir.Value], list[ir.Value]]:
    """Return the gradients and the losses of all processes.

    `reported` are sums, and then as many counts, which are those of all processes already.
    """
    half = len(reported) // 2
    sums = [all_reduce(op, total) for total in reported[:half]]
    return {w: all_reduce(op, g) for w, g in gradients.items()}, [*sums, *reported[half:]]


def averaged_across(
    op: Emit, buffers: dict[ir.Value, ir.Value], share: ir.Value
) -> dict[ir.Value, ir.Value]:
    """Return the buffers with the mean of their new values, by the `share` of rows of each."""
    new = {}
    with op:
        for before, after in buffers.items():
            own = op.set_type_like(after * op.Cast(share, to=after.dtype), after)
            new[before] = all_reduce(op, own)
    return new


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
    elements = [sum(map(_size, group.inputs)) for group in groups]
    loads, owners = [0] * size, [0] * len(groups)
    for i in sorted(range(len(groups)), key=lambda i: -elements[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += elements[i]
    return owners


def _size(value: ir.Value) -> int:
    return prod(static(dims(value)) or ())
