"""The step: one model from a batch, weights and slots to the loss, new weights and new slots.

Its first half computes the gradients, its second half updates the weights; between them are the
transforms that see all gradients. `accumulate` repeats the first half for several micro-batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.attention_blocks import attention_by_blocks
from onnxgrad.autodiff.derivative import as_constants
from onnxgrad.autodiff.forms import finish
from onnxgrad.autodiff.primal.local_functions import replace_calls
from onnxgrad.autodiff.recompute import Recomputation
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.autodiff.straight_through import StraightThrough, refuse_quantized
from onnxgrad.errors import argument
from onnxgrad.graph.emit import Emit
from onnxgrad.model.convert import to_proto
from onnxgrad.optimizers import Optimizer
from onnxgrad.runtime.session import work
from onnxgrad.training.objective import Objective
from onnxgrad.training.step.exchange import (
    Across,
    Expected,
    averaged_across,
    counted_across,
    owners_of,
    sharded,
    summed_across,
)
from onnxgrad.training.step.inputs import RATE, SHARE, StepInputs, feed_inputs, remove_unread_feeds
from onnxgrad.training.step.loss_scale import SCALE, LossScale
from onnxgrad.training.step.members import Members
from onnxgrad.training.step.update import Update, may_be_in_place, write_update
from onnxgrad.training.step.weight_groups import Group, numpy_dtype


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


@dataclass
class Gradients:
    """The first half of a step: the graph that computes the gradients of one batch.

    - `model`: its graph has the weights of `gradients`, the `data` and feeds among its inputs.
    - `gradients`: by weight; with a `scale`, of the loss times this scale.
    - `data`: the inputs of a batch, by name.
    - `buffers`: states with their new values after the batch.
    - `reported`: the sums of the losses, then as many counts.
    - `factors`: the factor of each sum.
    - `unreached`: the names of weights without a gradient.
    - `rounding`: operators whose rounding gradients pass straight through, one for each node.
    - `expected`: the number of terms that the loss is divided by; None: it is their count.
    """

    model: ir.Model
    gradients: dict[ir.Value, ir.Value]
    data: dict[str, ir.Value]
    buffers: dict[ir.Value, ir.Value]
    reported: list[ir.Value]
    factors: tuple[float, ...]
    unreached: list[str]
    rounding: list[str]
    scale: LossScale | None = None
    expected: Expected | None = None


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
    parts.scale, parts.expected = scale, expected
    step = write_step(op, parts, optimizer, options)
    step.work = multiply_adds
    return step


def build_gradients(objective: Objective) -> ModelProto:
    """Return the first half of a step as a model; `build_update` returns the second half.

    Inputs: the weights, the buffers, the data, then the feeds: `draw` if there is dropout, and if
    rows are mixed `partners` and `mix_numbers` (see `mixing.mix_rows`).
    Outputs: the gradient of each weight, `<weight>_grad`, `<buffer>.new` for the buffers, and what
    the objective reports: for a `Trainer` `loss_sum` and `loss_count`, whose ratio is the loss.

    Raises:
        ValueError: the loss depends on none of the weights.
        NoGradientRule: an operator on the way has no rule.
    """
    op, graph = Emit(objective.model.graph), objective.model.graph
    parts = write_gradients(op, objective, objective.cotangents(op))
    feeds = feed_inputs(graph).values()
    graph.inputs[:] = [*parts.gradients, *parts.buffers, *parts.data.values(), *feeds]
    reported = _copy_repeated(op, parts.reported)
    for i, value in enumerate(reported):  # sums, then as many counts
        value.name = op.name("loss_sum" if 2 * i < len(reported) else "loss_count")
    protected = {*graph.inputs, *reported}
    graph.outputs[:] = [
        *(op.name_output(g, f"{w.name}_grad", w, protected) for w, g in parts.gradients.items()),
        *(op.name_output(y, f"{b.name}.new", b, protected) for b, y in parts.buffers.items()),
        *reported,
    ]
    finish(objective.model)
    return to_proto(objective.model)


def write_gradients(
    op: Emit,
    objective: Objective,
    seeds: Mapping[ir.Value, ir.Value],
    recompute: str = "none",
) -> Gradients:
    """Write the gradients of one batch.

    Raises:
        ValueError: the loss depends on none of the weights.
        NoGradientRule: an operator on the way has no rule.
    """
    graph, trained = objective.model.graph, objective.weights
    if recompute == "all":
        attention_by_blocks(op, {*seeds, *objective.referred})
    recomputation = Recomputation(op, seeds.values(), recompute)
    wrt = trained if objective.straight_through else []
    quantized = StraightThrough(op, wrt, seeds, objective.stop_gradient)
    stopped = {*objective.stop_gradient, *quantized.stopped}
    gradients = sweep(op, seeds, trained, stopped, quantized.origins)
    if not gradients:
        refuse_quantized(list(graph), objective.data, seeds)
        names, loss = [str(w.name) for w in trained], objective.written.sums[0]
        raise ValueError(f"no differentiable path from any of {names} to the loss {loss.name!r}")
    for w in gradients:
        if (stored := objective.stored.get(str(w.name))) is not None:  # sparse: others stay zero
            with op:
                gradients[w] = op.set_type_like(gradients[w] * stored.astype(numpy_dtype(w)), w)
    recomputation.write([*gradients.values(), *objective.buffers.values(), *objective.reported])
    replace_calls(op, objective.model)
    unreached = [w for w in trained if w not in gradients]
    as_constants(graph, unreached)
    return Gradients(
        objective.model,
        gradients,
        {str(x.name): x for x in objective.data},
        objective.buffers,
        objective.reported,
        tuple(objective.written.factors),
        [str(w.name) for w in unreached],
        [node.op_type for node in quantized.rounding],
    )


def write_step(
    op: Emit,
    parts: Gradients,
    optimizer: Optimizer,
    options: StepOptions,
    accumulate: int = 1,
) -> Step:
    """Write the update behind the gradients, and set the inputs and outputs of the graph."""
    graph, across, members = parts.model.graph, options.across, options.members
    if parts.scale is not None:
        parts.gradients = parts.scale.unscaled(op, parts.gradients)
    if across is not None:
        parts.gradients, parts.reported = summed_across(
            op, parts.gradients, parts.reported, parts.expected
        )
        if parts.buffers and not across.same_buffers:
            parts.buffers = averaged_across(op, parts.buffers, SHARE.input(op))
    named = {str(w.name): g for w, g in parts.gradients.items()} if options.norms else {}
    returned = [_write_norms(op, list(named.values()))] if named else []
    update = _write_update(op, parts, optimizer, options)
    owners: list[int] = []
    if across is not None and across.shards:
        owners = owners_of(update.groups, across.part.size)
        update = sharded(op, update, across.part.rank, owners)
    remove_unread_feeds(graph, but=RATE)
    inputs = StepInputs(update.read, list(parts.buffers), parts.data, feed_inputs(graph))
    graph.inputs[:] = inputs.all
    reported = _copy_repeated(op, [*parts.reported, *returned])
    protected = {*graph.inputs, *reported}
    new = [*update.new, *parts.buffers.values()]
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
    )


def _write_update(op: Emit, parts: Gradients, optimizer: Optimizer, options: StepOptions) -> Update:
    """Write the update of the weights by the gradients of all rows."""
    gradients, scale = parts.gradients, parts.scale
    if options.members is not None:
        update = options.members.write_update(op, gradients, options.packed)
    else:
        in_place = options.in_place and scale is None and may_be_in_place(gradients, optimizer)
        update = write_update(op, gradients, optimizer, options.packed, options.blocks, in_place)
    if scale is not None:
        parts.buffers = scale.guard(op, gradients, update, parts.buffers)
    return update


def _copy_repeated(op: Emit, values: list[ir.Value]) -> list[ir.Value]:
    """Return values that a Scan can return: with copies of inputs, and of repeated values."""
    separate: list[ir.Value] = []
    for v in values:
        separate.append(op.copy_of(v) if v.producer() is None or v in separate else v)
    return separate


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
