"""Accumulation: a step that sums the gradients of several micro-batches, by a `Scan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import onnx_ir as ir

from onnxgrad.errors import argument
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import tidy
from onnxgrad.graph.traversal import all_names
from onnxgrad.optimizers.base import Optimizer
from onnxgrad.parallel.collectives import all_reduce
from onnxgrad.runtime.session import work
from onnxgrad.training.objective import Objective, inverse
from onnxgrad.training.step.build import Step, StepOptions, write_step
from onnxgrad.training.step.epoch import stacked_input, stacked_shape
from onnxgrad.training.step.gradients import Gradients, write_gradients
from onnxgrad.training.step.inputs import feed_inputs, feed_of
from onnxgrad.training.step.loss_scale import LossScale


def build_accumulating_step(
    objective: Callable[[], Objective],
    optimizer: Optimizer,
    micro_batches: int,
    options: StepOptions,
    adds_losses: bool = False,
) -> Step:
    """Return the step that adds up the gradients of `micro_batches` before it updates the weights.

    Its data have another first axis, of that length. The counts of all micro-batches are computed
    first, so that the sum is the gradient of the one large batch, whatever the counts are. With
    `adds_losses`, the loss of the batch is the sum of the losses of its micro-batches, of equal
    numbers of rows, and not their mean.

    Raises:
        ValueError: the loss depends on none of the weights.
        NoGradientRule: an operator on the way has no rule.
    """
    one = objective()
    body, multiply_adds = one.model.graph, work(one.model.graph)
    inner = Emit(body)
    graph = ir.Graph([], [], nodes=[], opset_imports=dict(body.opset_imports), name="step")
    inverses = [
        ir.Value(name=inner.name("inverse_count"), type=n.type, shape=ir.Shape([]))
        for n in one.written.counts
    ]
    seeds = one.scaled(inner, inverses)
    parts = write_gradients(inner, one, seeds, options.recompute)
    op = Emit(graph, all_names(body))
    stacks = _stack_inputs(parts, graph)
    totals = _write_counts(op, objective(), stacks)
    if options.across is not None:
        totals = [all_reduce(op, total) for total in totals]
    scale = LossScale.new(op) if one.scales else None
    factor = None if scale is None else scale.scale
    number = None
    if adds_losses:
        length = op.Shape(next(iter(stacks.values())), start=0, end=1)
        number = op.Cast(op.Reshape(length, []), to=totals[0].dtype)
    with op:
        for placeholder, total in zip(inverses, totals, strict=True):
            scaled = inverse(op, total, factor)
            scaled = scaled if number is None else scaled * number
            ir.convenience.replace_all_uses_with(placeholder, scaled)
    sums = partial(_sum_micro_batches, stacks=stacks, totals=totals, number=number)
    multiply_adds *= micro_batches
    return write_step(
        op, parts, optimizer, options, multiply_adds, scale, None, micro_batches, sums
    )


def _stack_inputs(parts: Gradients, graph: ir.Graph) -> dict[ir.Value, ir.Value]:
    """Return the inputs of `graph` that hold all micro-batches, by the inputs of one.

    Feeds that are the same for all micro-batches become inputs of `graph`.
    """
    stacks = {x: stacked_input(x, "micro_batches") for x in parts.data.values()}
    for value in feed_inputs(parts.model.graph).values():
        feed = feed_of(value)
        if feed is None or not value.uses():
            continue
        if feed.of_rows:
            stacks[value] = feed.mark(stacked_input(value, "micro_batches"))
            graph.inputs.append(stacks[value])
        else:
            parts.model.graph.inputs.remove(value)
            graph.inputs.append(value)
    return stacks


def _write_counts(
    op: Emit, objective: Objective, stacks: dict[ir.Value, ir.Value]
) -> list[ir.Value]:
    """Write the counts of all micro-batches together, by a Scan over labels and weights only.

    The Scan takes over the graph of `objective`.
    """
    body, counts = objective.model.graph, objective.written.counts
    stack_by_name = {str(x.name): stack for x, stack in stacks.items()}
    body.outputs[:] = counts
    tidy(objective.model)
    data = [x for x in objective.data if x.uses() or x in counts] or objective.data[-1:]
    if unknown := [x.name for x in body.inputs if x.uses() and x not in data]:
        raise ValueError(
            f"the number of terms of the loss depends on {unknown}: use {argument('accumulate', 1)}"
        )
    body.inputs[:] = data
    attributes = {"body": body, "num_scan_inputs": len(data)}
    stacked = [stack_by_name[str(x.name)] for x in data]
    stacked_counts = op.emit_many("Scan", stacked, attributes, outputs=len(counts))
    pairs = zip(stacked_counts, counts, strict=True)
    return [_sum_stack(op, _set_stacked_type(stack, one)) for stack, one in pairs]


def _set_stacked_type(stack: ir.Value, one: ir.Value) -> ir.Value:
    """Set the type and shape of a `stack` of values like `one`; return it."""
    stack.type, stack.shape = one.type, stacked_shape(one, "micro_batches")
    return stack


def _sum_stack(op: Emit, stack: ir.Value) -> ir.Value:
    """Return the sum over micro-batches."""
    return op.ReduceSum(stack, [0], keepdims=0)


def _sum_micro_batches(
    op: Emit,
    parts: Gradients,
    stacks: dict[ir.Value, ir.Value],
    totals: list[ir.Value],
    number: ir.Value | None,
) -> Gradients:
    """Make the graph of `parts` the body of a Scan that sums the gradients; return its results.

    `totals` are the counts that it reports. With a `number` of micro-batches, the losses are their
    sum, and not their mean.
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
    before_buffers = [_take_over_name(inner, b) for b in parts.buffers]
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
        losses = [_sum_stack(op, sums) for sums in reported[: len(totals)]]
        losses = losses if number is None else [loss * number for loss in losses]
    return replace(
        parts,
        model=ir.Model(graph, ir_version=parts.model.ir_version),
        gradients=dict(zip(weights, outputs, strict=False)),
        data={name: stacks[x] for name, x in parts.data.items()},
        buffers=dict(zip(before_buffers, outputs[len(weights) : len(carried)], strict=True)),
        reported=[*losses, *totals],
    )


def _take_over_name(inner: Emit, buffer: ir.Value) -> ir.Value:
    """Return a value with the name of `buffer`, which gets another name in the body."""
    outside = ir.Value(
        name=buffer.name, type=buffer.type, shape=buffer.shape, const_value=buffer.const_value
    )
    buffer.name = inner.name(f"{buffer.name}_before")
    return outside
