"""The first half of a step: the graph that computes the gradients of one batch.

Behind the sweep, functions from `Gradients` to `Gradients` sum them over micro-batches, divide them
by the loss scale, and sum them over processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Self

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.attention_blocks import compute_attention_by_blocks
from onnxgrad.autodiff.derivative import make_inputs_constants
from onnxgrad.autodiff.forms import finish
from onnxgrad.autodiff.recompute import Recomputation
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.autodiff.straight_through import StraightThrough, refuse_quantized
from onnxgrad.errors import argument
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import tidy
from onnxgrad.graph.traversal import all_names
from onnxgrad.model.convert import to_proto
from onnxgrad.model.external import forget_lazy_data
from onnxgrad.model.local_functions import inline_ruled_calls
from onnxgrad.native import Target, to_native
from onnxgrad.operators.shapes import dims, static
from onnxgrad.parallel.collectives import all_reduce
from onnxgrad.parallel.process_groups import Part
from onnxgrad.training.objective import Objective, inverse_count
from onnxgrad.training.step.inputs import (
    ROWS,
    SHARE,
    STEP,
    feed_inputs,
    feed_of,
    stacked_input,
    stacked_shape,
)
from onnxgrad.training.step.members import Members
from onnxgrad.training.step.update import Update
from onnxgrad.training.step.weight_groups import numpy_dtype

# inputs that hold all micro-batches, by the input of one micro-batch
Stacks = dict[ir.Value, ir.Value]
# the numerator and the denominator of the factor of sums over processes; () without a factor
Ratio = tuple[()] | tuple[ir.Value, ir.Value]
SCALE, SKIPPED = "onnxgrad.loss_scale", "onnxgrad.skipped_steps"  # names that no model uses
_STEPS = "onnxgrad.steps_of_loss_scale"
INITIAL: dict[str, np.ndarray] = {
    SCALE: np.array(2.0**15, np.float32),
    _STEPS: np.array(0, np.int64),
    SKIPPED: np.array(0, np.int64),
}
LEAST_SCALE, _GROWS_AFTER = 2.0**-10, 2000  # the least scale; steps until the scale is doubled


@dataclass
class Gradients:
    """The first half of a step: the graph that computes the gradients of one batch.

    - `model`: the model of the graph; the weights, the `data` and feeds are inputs of the graph.
    - `gradients`: the gradient of each weight.
    - `data`: the inputs of a batch, by name.
    - `buffers`: inputs with states that do not train, and their new values after the batch.
    - `reported`: the sums of the losses, then as many counts.
    - `unreached`: the names of weights without a gradient.
    - `rounding`: the operator of each node through whose rounding gradients pass unchanged.
    """

    model: ir.Model
    gradients: dict[ir.Value, ir.Value]
    data: dict[str, ir.Value]
    buffers: dict[ir.Value, ir.Value]
    reported: list[ir.Value]
    unreached: list[str]
    rounding: list[str]


def write_gradients(
    op: Emit,
    objective: Objective,
    seeds: Mapping[ir.Value, ir.Value],
    recompute: str = "none",
) -> Gradients:
    """Write the gradients of the loss of one batch into the graph of the loss, and return them.

    Args:
        op: writes into the graph of the objective.
        objective: the loss to minimize.
        seeds: the cotangents with which the sweep begins.
        recompute: as for `Trainer`.

    Raises:
        ValueError: the loss depends on none of the weights.
        NoGradientRule: an operator on the way has no rule.
    """
    graph, trained = objective.model.graph, objective.weights
    if recompute == "all":
        compute_attention_by_blocks(op, {*seeds, *objective.named_values})
    recomputation = Recomputation(op, seeds.values(), recompute)
    wrt = trained if objective.job.straight_through else []
    quantized = StraightThrough(op, wrt, seeds, objective.stop_gradient)
    stopped = {*objective.stop_gradient, *quantized.stopped}
    gradients = sweep(op, seeds, trained, stopped, quantized.origins)
    if not gradients:
        refuse_quantized(list(graph), objective.data, seeds)
        names, loss = [str(w.name) for w in trained], objective.written.sums[0]
        raise ValueError(
            f"no differentiable path leads from any of the weights {names} to the loss "
            f"{loss.name!r}: name weights that influence the loss with {argument('train')}"
        )
    for w in gradients:
        # elements that a sparse weight does not store stay zero
        if (mask := objective.sparse_masks.get(str(w.name))) is not None:
            with op:
                gradients[w] = op.set_type_like(gradients[w] * mask.astype(numpy_dtype(w)), w)
    recomputation.write([*gradients.values(), *objective.buffers.values(), *objective.reported])
    inline_ruled_calls(op, objective.model)
    unreached = [w for w in trained if w not in gradients]
    make_inputs_constants(graph, unreached)
    return Gradients(
        objective.model,
        gradients,
        {str(x.name): x for x in objective.data},
        objective.buffers,
        objective.reported,
        [str(w.name) for w in unreached],
        [node.op_type for node in quantized.rounding],
    )


def build_gradients(
    objective: Objective,
    target: Target | None = None,
    recompute: str = "none",
    members: Members | None = None,
    inverse_counts: bool = False,
) -> ModelProto:
    """Return the model that computes the gradients of a batch; `build_update` returns the update.

    Inputs: the weights, the buffers, the data, then the feeds: `draw` if there is dropout, and if
    rows are mixed `partners` and `mix_numbers` (see `mixing.mix_rows`).
    Outputs: the gradient of each weight, `<weight>_grad`, `<buffer>.new` for the buffers, and what
    the objective reports: for a `Trainer` `loss_sum` and `loss_count`, whose ratio is the loss.

    Args:
        objective: the loss to minimize, whose graph is taken over.
        target: the device of a session, in whose native form the model is; None: a file.
        recompute: as for `Trainer`.
        members: the members of a stack, whose axis all weights, buffers and gradients get.
        inverse_counts: whether the model has one more input for each output that is compared, the
            factor of its sum in the loss, in place of 1 / its count of terms in the batch.

    Raises:
        ValueError: the loss depends on none of the weights.
        NoGradientRule: an operator on the way has no rule.
    """
    op, graph = Emit(objective.model.graph), objective.model.graph
    inverses = inverse_inputs(op, objective) if inverse_counts else []
    seeds = objective.seed_cotangents(op, inverses) if inverses else objective.cotangents(op)
    parts = write_gradients(op, objective, seeds, recompute)
    feeds = feed_inputs(graph).values()
    carried = [*parts.gradients, *parts.buffers]
    graph.inputs[:] = [*carried, *parts.data.values(), *feeds, *inverses]
    reported = copy_repeated(op, parts.reported)
    for i, value in enumerate(reported):  # sums, then as many counts
        value.name = op.name("loss_sum" if 2 * i < len(reported) else "loss_count")
    protected = {*graph.inputs, *reported}
    graph.outputs[:] = [
        *(op.name_output(g, f"{w.name}_grad", w, protected) for w, g in parts.gradients.items()),
        *(op.name_output(y, f"{b.name}.new", b, protected) for b, y in parts.buffers.items()),
        *reported,
    ]
    if members is not None:
        members.push_member_axis(op, carried)
    finish(objective.model)
    if target is not None:
        to_native(graph, target)
    proto = to_proto(objective.model)
    forget_lazy_data(graph, objective.weights)
    return proto


def inverse_inputs(op: Emit, objective: Objective) -> list[ir.Value]:
    """Return a new scalar for each output, in place of 1 / its count of terms in one batch."""
    counts = objective.written.counts
    return [ir.Value(name=op.name("inverse"), type=n.type, shape=ir.Shape([])) for n in counts]


def copy_repeated(op: Emit, values: list[ir.Value]) -> list[ir.Value]:
    """Return values that a Scan can return: copies of inputs and of repeated values, else `values`.

    A Scan cannot return an input, or one value twice.
    """
    separate: list[ir.Value] = []
    for v in values:
        separate.append(op.copy_of(v) if v.producer() is None or v in separate else v)
    return separate


# -- micro-batches, by a Scan ----------------------------------------------------------------------


def accumulate_gradients(
    objective: Objective,
    counted: Objective,
    scale: ir.Value | None = None,
    recompute: str = "none",
    shared: bool = False,
    adds_losses: bool = False,
) -> tuple[Emit, Gradients]:
    """Return an emitter, and the gradients of a batch, summed over its micro-batches.

    The data have a further first axis, of micro-batches. The counts of all micro-batches, by which
    the loss is divided, are computed first, so that the sum is the gradient of the large batch.

    Args:
        objective: the loss of a micro-batch, whose graph becomes the body of a Scan.
        counted: another objective of the same loss, whose graph computes the counts.
        scale: the scale of the loss.
        recompute: as for `Trainer`.
        shared: whether the counts are summed over processes.
        adds_losses: whether the loss of a batch is the sum of the losses of its micro-batches, of
            equal numbers of rows, and not their mean.

    Raises:
        ValueError: the loss depends on none of the weights.
        NoGradientRule: an operator on the way has no rule.
    """
    body = objective.model.graph
    inner = Emit(body)
    graph = ir.Graph([], [], nodes=[], opset_imports=dict(body.opset_imports), name="step")
    inverses = inverse_inputs(inner, objective)
    parts = write_gradients(inner, objective, objective.seed_cotangents(inner, inverses), recompute)
    op = Emit(graph, all_names(body))
    stacks = _inputs_of_all_micro_batches(parts, graph)
    totals = _sum_loss_denominators(op, counted, stacks)
    totals = [all_reduce(op, total) for total in totals] if shared else totals
    number = None
    if adds_losses:
        length = op.Shape(next(iter(stacks.values())), start=0, end=1)
        number = op.Cast(op.Reshape(length, []), to=totals[0].dtype)
    with op:
        for placeholder, total in zip(inverses, totals, strict=True):
            scaled = inverse_count(op, total, scale)
            scaled = scaled if number is None else scaled * number
            ir.convenience.replace_all_uses_with(placeholder, scaled)
    return op, _sum_gradients_over_micro_batches(op, parts, stacks, totals, number)


def _inputs_of_all_micro_batches(parts: Gradients, graph: ir.Graph) -> Stacks:
    """Return `{input of one micro-batch: new input of `graph` for all micro-batches}`.

    Feeds with one value for all micro-batches become inputs of `graph` without a further axis.
    """
    stacks = {x: stacked_input(x, "micro_batches") for x in parts.data.values()}
    for value in feed_inputs(parts.model.graph).values():
        feed = feed_of(value)
        if feed is None or not value.uses():
            continue
        if feed.of_rows:
            stacks[value] = feed.mark_input(stacked_input(value, "micro_batches"))
            graph.inputs.append(stacks[value])
        else:
            parts.model.graph.inputs.remove(value)
            graph.inputs.append(value)
    return stacks


def _sum_loss_denominators(op: Emit, objective: Objective, stacks: Stacks) -> list[ir.Value]:
    """Return the counts by which the loss is divided, summed over all micro-batches.

    A Scan over labels and weights of rows adds them up; its body is the graph of `objective`.
    """
    body, counts = objective.model.graph, objective.written.counts
    stack_by_name = {str(x.name): stack for x, stack in stacks.items()}
    body.outputs[:] = counts
    tidy(objective.model)
    data = [x for x in objective.data if x.uses() or x in counts] or objective.data[-1:]
    if unknown := [x.name for x in body.inputs if x.uses() and x not in data]:
        raise ValueError(
            f"the count of terms of the loss depends on the inputs {unknown}, and micro-batches "
            f"need it before the loss is computed: pass {argument('accumulate', 1)}"
        )
    body.inputs[:] = data
    attributes = {"body": body, "num_scan_inputs": len(data)}
    stacked = [stack_by_name[str(x.name)] for x in data]
    stacked_counts = op.emit_many("Scan", stacked, attributes, outputs=len(counts))
    pairs = zip(stacked_counts, counts, strict=True)
    return [_sum_over_first_axis(op, _set_stacked_type(stack, one)) for stack, one in pairs]


def _set_stacked_type(stack: ir.Value, element: ir.Value) -> ir.Value:
    """Set the type and shape of a `stack` of values like `element`; return the stack."""
    stack.type, stack.shape = element.type, stacked_shape(element, "micro_batches")
    return stack


def _sum_over_first_axis(op: Emit, stack: ir.Value) -> ir.Value:
    """Return the sum of a stack of values over its first axis, the axis of micro-batches."""
    return op.ReduceSum(stack, [0], keepdims=0)


def _sum_gradients_over_micro_batches(
    op: Emit,
    parts: Gradients,
    stacks: Stacks,
    totals: list[ir.Value],
    number: ir.Value | None,
) -> Gradients:
    """Return the gradients summed over micro-batches, by a Scan over the graph of one micro-batch.

    Args:
        op: writes into the graph around the Scan.
        parts: the gradients of one micro-batch.
        stacks: the inputs that hold all micro-batches.
        totals: the counts of terms of all micro-batches, which are reported.
        number: the count of micro-batches, if the loss of a batch is the sum of the losses of its
            micro-batches; None: it is their mean.
    """
    body, graph = parts.model.graph, op.graph
    inner, weights = Emit(body, outer=op), list(parts.gradients)
    sums, results = [], []
    for w in weights:
        body.inputs.remove(w)
        graph.inputs.append(w)
        before = ir.Value(name=inner.name(f"{w.name}_sum"), type=w.type, shape=w.shape)
        sums.append(before)
        results.append(inner.Add(before, parts.gradients[w]))
    before_buffers = [_input_for_buffer(inner, b) for b in parts.buffers]
    after = [*results, *parts.buffers.values(), *parts.reported]
    body.inputs[:] = [*sums, *parts.buffers, *stacks]
    body.outputs[:] = []
    inner.give(after)
    carried = [op.zeros_like(w) for w in weights] + before_buffers
    attributes = {"body": body, "num_scan_inputs": len(stacks)}
    outputs = op.emit_many("Scan", [*carried, *stacks.values()], attributes, outputs=len(after))
    for outer, result in zip(outputs, after, strict=True):
        outer.type, outer.shape = result.type, result.shape
    stacked = zip(outputs[len(carried) :], parts.reported, strict=True)
    reported = [_set_stacked_type(stack, one) for stack, one in stacked]
    with op:
        losses = [_sum_over_first_axis(op, sums) for sums in reported[: len(totals)]]
        losses = losses if number is None else [loss * number for loss in losses]
    return replace(
        parts,
        model=ir.Model(graph, ir_version=parts.model.ir_version),
        gradients=dict(zip(weights, outputs, strict=False)),
        data={name: stacks[x] for name, x in parts.data.items()},
        buffers=dict(zip(before_buffers, outputs[len(weights) : len(carried)], strict=True)),
        reported=[*losses, *totals],
    )


def _input_for_buffer(inner: Emit, buffer: ir.Value) -> ir.Value:
    """Return a new input outside of a Scan for a buffer; rename the input inside of the body."""
    outside = ir.Value(
        name=buffer.name, type=buffer.type, shape=buffer.shape, const_value=buffer.const_value
    )
    buffer.name = inner.name(f"{buffer.name}_before")
    return outside


# -- the loss scale --------------------------------------------------------------------------------
#
# Where a step computes gradients in 16 bits, small gradients would be zero: the cotangent of the
# loss is multiplied by a scale, and the gradients are divided by the scale. A step whose gradients
# are not finite is skipped, and halves the scale; many steps in a row that are not skipped double
# it (Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740; with the numbers of
# `torch.amp.GradScaler`, but for the first scale, which float16 holds).


@dataclass
class LossScale:
    """The factor of the loss in mixed precision, as buffers of a step.

    - `scale`: the scale.
    - `steps`: the count of steps since the scale changed.
    - `skipped`: the count of all steps that were skipped.
    """

    scale: ir.Value
    steps: ir.Value
    skipped: ir.Value

    @classmethod
    def new(cls) -> Self:
        """Return a loss scale with new buffers, whose initial values are in `INITIAL`."""
        kinds = {n: ir.TensorType(ir.DataType.from_numpy(v.dtype)) for n, v in INITIAL.items()}
        return cls(*(ir.Value(name=n, type=t, shape=ir.Shape([])) for n, t in kinds.items()))

    def unscale(self, op: Emit, parts: Gradients) -> Gradients:
        """Return the gradients of the scaled loss, `parts`, divided by the scale."""
        with op:
            inverse = op.Reciprocal(self.scale)
            gradients = {
                w: op.set_type_like(op.Mul(g, op.Cast(inverse, to=g.dtype)), g)
                for w, g in parts.gradients.items()
            }
        return replace(parts, gradients=gradients)

    def skip_unless_finite(
        self,
        op: Emit,
        gradients: Mapping[ir.Value, ir.Value],
        update: Update,
        buffers: Mapping[ir.Value, ir.Value],
    ) -> dict[ir.Value, ir.Value]:
        """Let a step whose gradients are not finite change nothing but the loss scale.

        Return the new values of `buffers` and of the buffers of the loss scale. The update does not
        count skipped steps. With the least scale, no step is skipped: then the model itself gives
        numbers that are not finite.
        """
        with op:
            squares = [op.ReduceSumSquare(g, keepdims=0) for g in gradients.values()]
            total = op.total([op.Cast(s, to=ir.DataType.FLOAT) for s in squares])
            bad = op.Or(op.IsNaN(total), op.IsInf(total))
            bad = op.And(bad, op.Greater(self.scale, op.const(np.float32(LEAST_SCALE))))

            def old_if_bad(old: ir.Value, new: ir.Value) -> ir.Value:
                return op.set_type_like(op.Where(bad, old, new), new)

            update.new = [old_if_bad(*pair) for pair in zip(update.states, update.new, strict=True)]
            result = {old: old_if_bad(old, new) for old, new in buffers.items()}
            one, steps = op.const(np.int64(1)), op.Add(self.steps, op.const(np.int64(1)))
            grows = op.Equal(steps, op.const(np.int64(_GROWS_AFTER)))
            half, twice = (op.Mul(self.scale, op.const(np.float32(k))) for k in (0.5, 2.0))
            scale = op.Where(bad, half, op.Where(grows, twice, self.scale))
            zero = op.const(np.int64(0))
            new = {
                self.scale: scale,
                self.steps: op.Where(op.Or(bad, grows), zero, steps),
                self.skipped: op.Where(bad, op.Add(self.skipped, one), self.skipped),
            }
            result |= {old: op.set_type_like(value, old) for old, value in new.items()}
        self._subtract_skipped_steps(op)
        return result

    def _subtract_skipped_steps(self, op: Emit) -> None:
        """Let all nodes that read the count of steps read the count without skipped steps."""
        number = STEP.input_in(op)
        readers = list(number.uses())
        if not readers:
            return
        with op.at(next(iter(op.graph))):
            counted = op.set_type_like(op.Sub(number, self.skipped), number)
        for node, index in readers:
            node.replace_input_with(index, counted)


# -- processes -------------------------------------------------------------------------------------
#
# Results of the rows of each process become results of all rows: counts of terms, gradients and
# sums of losses are added up inside of the graph, so that later nodes, such as clipping by the norm
# of all gradients, read the sums of the whole batch. Most steps need one message.


@dataclass(frozen=True)
class StepShare:
    """How processes share a step: the part of the rows, and the exchange of buffers and weights.

    - `part`: the part of the rows that this process computes.
    - `same_buffers`: whether each process computes the buffers of the whole batch; if not, their
      mean over processes is taken.
    - `shards`: whether each process updates some of the weights only.
    """

    part: Part
    same_buffers: bool = False
    shards: bool = False


def count_over_processes(
    op: Emit, objective: Objective, scale: ir.Value | None
) -> tuple[Objective, dict[ir.Value, ir.Value], Ratio]:
    """Return the objective with counts of all processes, its cotangents, and the ratio of counts.

    The loss is a sum divided by a count, and the cotangents are of the loss times `scale`. Unless
    labels are ignored or weighted, all processes know the count before they exchange anything: each
    process divides its gradients by this expected count, and the sum over processes is multiplied
    by the ratio of the expected count to the count of all processes. So the count of a process is
    in the same message as its gradients. If the ratio is (), the counts are exchanged before the
    sweep.
    """
    ratio, own = _expected_and_own_count(op, objective), objective.written.counts
    counts = [all_reduce(op, n) for n in own]
    objective = replace(objective, written=replace(objective.written, counts=counts))
    if not ratio:
        return objective, objective.cotangents(op, scale), ()
    return objective, objective.seed_cotangents(op, [inverse_count(op, ratio[0])]), ratio


def _expected_and_own_count(op: Emit, objective: Objective) -> Ratio:
    """Return the loss's expected count in all processes, and the count of this process.

    The expected count is computed from the feed `ROWS`. (): the counts cannot be expected, and are
    exchanged before the sweep.
    """
    counts, labels = objective.written.counts, objective.written.labels
    n, wide = counts[0], (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    if len(counts) > 1 or objective.scales_loss or n.dtype not in wide:
        return ()
    if any(w.dtype != n.dtype or static(dims(w)) is None for w in objective.weights):
        return ()
    lengths = (dims(labels[0]) or ())[1:] if labels else ()
    each = prod(length for length in lengths if isinstance(length, int)) or 1
    rows = ROWS.input_in(op, wide=n.dtype == ir.DataType.DOUBLE)
    with op:
        terms = rows if each == 1 else op.Mul(rows, op.const(float(each), n.dtype))
    return op.set_type_like(terms, n), n


def sum_over_processes(op: Emit, parts: Gradients, across: StepShare, ratio: Ratio) -> Gradients:
    """Return the gradients, losses and buffers `parts` of a step, summed over all processes.

    The counts in `parts` are summed already. Buffers become the mean of the processes, weighted by
    their rows, unless all processes compute the same buffers.
    """
    half, buffers = len(parts.reported) // 2, dict(parts.buffers)
    sums = [all_reduce(op, total) for total in parts.reported[:half]]
    summed = {w: all_reduce(op, g, ratio) for w, g in parts.gradients.items()}
    if buffers and not across.same_buffers:
        share = SHARE.input_in(op)
        with op:
            for before, after in buffers.items():
                own = op.set_type_like(after * op.Cast(share, to=after.dtype), after)
                buffers[before] = all_reduce(op, own)
    reported = [*sums, *parts.reported[half:]]
    return replace(parts, gradients=summed, buffers=buffers, reported=reported)
