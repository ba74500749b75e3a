"""The step: one model from a batch, weights and slots to the loss, new weights and new slots.

Its first half computes the gradients, its second half updates the weights. Between them are
functions from `Gradients` to `Gradients`, in this order:

1. accumulation repeats the first half, and sums the gradients of micro-batches;
2. the loss scale, by which the loss was multiplied, divides them;
3. the exchange sums them over processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.forms import finish
from onnxgrad.errors import argument
from onnxgrad.graph.emit import Emit
from onnxgrad.optimizers.base import Optimizer
from onnxgrad.runtime.session import work
from onnxgrad.training.objective import Objective
from onnxgrad.training.step.exchange import (
    Across,
    Expected,
    counted_across,
    owners_of,
    sharded,
    sum_over_processes,
)
from onnxgrad.training.step.gradients import Gradients, copy_repeated, write_gradients
from onnxgrad.training.step.inputs import RATE, StepInputs, feed_inputs, remove_unread_feeds
from onnxgrad.training.step.loss_scale import SCALE, LossScale
from onnxgrad.training.step.members import Members
from onnxgrad.training.step.update import may_be_in_place, write_update
from onnxgrad.training.step.weight_groups import Group, numpy_dtype

Transform = Callable[[Emit, Gradients], Gradients]


@dataclass
class Step:
    """The graph of a step: from its `inputs` to new states, new buffers and the loss.

    With `updates`, the graph is the first half of a step, whose states are the weights, and returns
    the gradient of each group instead of new states. The updates are the second half, a model for
    each group.
    """

    model: ir.Model
    groups: list[Group]
    inputs: StepInputs
    unreached: list[str]  # weights without a gradient, which a step does not change
    factors: tuple[float, ...]  # of the sums and counts that it reports
    accumulate: int = 1  # micro-batches of a step
    norms: list[str] = field(default_factory=list)  # weights whose gradient's norm is returned
    rounding: list[str] = field(default_factory=list)  # operators that gradients pass through
    recomputes: bool = False  # whether the order of its nodes saves memory
    # of the groups, if they are not part of the graph; None for one that another process updates
    updates: Sequence[ModelProto | None] | None = None
    owners: list[int] = field(default_factory=list)  # the processes that update the groups
    members: Members | None = None  # of a stack, whose axis all states have
    work: float = 0.0  # multiply-adds of the forward pass, per row
    fixed_rows: int | None = None  # rows of a micro-batch, if the model states them
    warned: bool = False  # of weights in 16 bits

    @property
    def scaled(self) -> bool:
        """Whether buffers hold a loss scale."""
        return any(b.name == SCALE for b in self.inputs.buffers)

    @property
    def weights(self) -> list[str]:
        """The names of the weights that are trained."""
        return [name for group in self.groups for name in group.shapes]

    @property
    def states(self) -> list[ir.Value]:
        """The weights and slots of all groups."""
        return [v for group in self.groups for v in group.inputs]

    def check_rates(self, rates: np.ndarray) -> None:
        """Raise `ValueError` for a learning rate that is zero in the dtype of a weight."""
        for dtype in {numpy_dtype(group.state) for group in self.groups}:
            if (lost := rates[(rates.astype(dtype) == 0) & (rates != 0)]).size:
                raise ValueError(f"a learning rate of {lost[0]:g} is zero in {dtype}: raise it")

    def warn(self, stacklevel: int) -> None:
        """Warn of weights without a gradient, and once of weights that train in 16 bits."""
        if self.unreached:
            text = f"the loss does not depend on {self.unreached}: they stay as they are"
            warnings.warn(text, stacklevel=stacklevel + 1)
        half = [group for group in self.groups if numpy_dtype(group.state).itemsize == 2]
        if half and not self.warned:
            self.warned = True
            names = [name for group in half for name in group.shapes]
            more = f" and {len(names) - 3} more" * (len(names) > 3)
            warnings.warn(
                f"{', '.join(map(repr, names[:3]))}{more} train in {numpy_dtype(half[0].state)}: "
                "rates, steps and squares of gradients are rounded, small ones to zero, and NaN is "
                f"likely. A Trainer with {argument('precision', 'auto')} keeps both in float32",
                stacklevel=stacklevel + 1,
            )


@dataclass(frozen=True)
class StepOptions:
    """What a step does beside its numbers.

    - `norms`: it also returns the 2-norm of the gradient of every weight.
    - `blocks`: large weights are updated in parts that stay in the cache of a CPU.
    - `recompute`: the argument of `Trainer`.
    - `in_place`: the update of large states is no part of the graph: see `Step.updates`.
    - `across`: how processes share the step, whose graph has nodes that exchange values.
    - `packed`: elements up to which weights are small, and parts of one input; None is the default.
    - `members`: the members of a stack; None: it trains one model.
    """

    norms: bool = False
    blocks: bool = True
    recompute: str = "none"
    in_place: bool = False
    across: Across | None = None
    packed: int | None = None
    members: Members | None = None


def build_step(
    objective: Objective, optimizer: Optimizer, options: StepOptions | None = None
) -> Step:
    """Return the training step, written into the graph of the objective.

    Raises:
        ValueError: the loss depends on none of the weights.
        NoGradientRule: an operator on the way has no rule.
    """
    options = options or StepOptions()
    multiply_adds, op = work(objective.model.graph), Emit(objective.model.graph)
    scale, expected = LossScale.new(op) if objective.scales else None, None
    factor = None if scale is None else scale.scale
    if options.across is None:
        seeds = objective.cotangents(op, factor)
    else:
        objective, seeds, expected = counted_across(op, objective, factor)
    parts = write_gradients(op, objective, seeds, options.recompute)
    return write_step(op, parts, optimizer, options, multiply_adds, scale, expected)


def write_step(
    op: Emit,
    parts: Gradients,
    optimizer: Optimizer,
    options: StepOptions,
    multiply_adds: float,
    scale: LossScale | None = None,
    expected: Expected | None = None,
    accumulate: int = 1,
    sum_micro_batches: Transform | None = None,
) -> Step:
    """Write the update behind the gradients, and set the inputs and outputs of the graph.

    Args:
        op: writes into the graph of the step.
        parts: the gradients of one batch, or of one micro-batch.
        optimizer: of the update.
        options: of the step.
        multiply_adds: of the forward pass, per row.
        scale: of the loss.
        expected: the number of terms that the loss is divided by; None: it is their count.
        accumulate: the micro-batches of a step.
        sum_micro_batches: makes the graph of `parts` the body of a loop.
    """
    across, members = options.across, options.members
    transforms: list[Transform | None] = [
        sum_micro_batches,
        None if scale is None else scale.unscale,
        None if across is None else partial(sum_over_processes, across=across, expected=expected),
    ]
    for transform in filter(None, transforms):
        parts = transform(op, parts)
    graph = parts.model.graph
    named = {str(w.name): g for w, g in parts.gradients.items()} if options.norms else {}
    returned = [_write_norms(op, list(named.values()))] if named else []
    if members is not None:
        update = members.write_update(op, parts.gradients, options.packed)
    else:
        in_place = options.in_place and scale is None
        in_place &= may_be_in_place(parts.gradients, optimizer)
        own = options.packed, options.blocks, in_place
        update = write_update(op, parts.gradients, optimizer, *own)
    buffers = parts.buffers
    if scale is not None:
        buffers = scale.guard(op, parts.gradients, update, buffers)
    owners: list[int] = []
    if across is not None and across.shards:
        owners = owners_of(update.groups, across.part.size)
        update = sharded(op, update, across.part.rank, owners)
    remove_unread_feeds(graph, but=RATE)
    inputs = StepInputs(update.read, list(buffers), parts.data, feed_inputs(graph))
    graph.inputs[:] = inputs.all
    reported = copy_repeated(op, [*parts.reported, *returned])
    protected = {*graph.inputs, *reported}
    new = [*update.new, *buffers.values()]
    graph.outputs[:] = [
        op.name_output(after, f"{before.name}.new", before, protected)
        for before, after in zip(inputs.carried, new, strict=True)
    ] + reported
    if members is not None:
        inputs = members.push(op, inputs)
    finish(parts.model)
    return Step(
        parts.model,
        update.groups,
        inputs,
        parts.unreached,
        parts.factors,
        accumulate=accumulate,
        norms=list(named),
        rounding=parts.rounding,
        recomputes=options.recompute != "none",
        updates=update.models,
        owners=owners,
        members=members,
        work=multiply_adds,
    )


def _write_norms(op: Emit, gradients: list[ir.Value]) -> ir.Value:
    """Return the 2-norms of tensors as one vector, float32 of shape [tensors]."""
    with op:
        norms = [
            op.Reshape(op.Cast(op.ReduceL2(g, keepdims=0), to=ir.DataType.FLOAT), [1])
            for g in gradients
        ]
        vector = op.Concat(*norms, axis=0)
    vector.name, vector.shape = op.name("gradient_norms"), ir.Shape([len(norms)])
    return vector
