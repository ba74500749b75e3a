"""Accumulation: a step whose gradient is that of several micro-batches, summed by a `Scan`."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxgrad.autodiff.forms import finish
from onnxgrad.errors import argument
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import tidy
from onnxgrad.graph.traversal import all_names
from onnxgrad.optimizers import Optimizer
from onnxgrad.parallel import all_reduce
from onnxgrad.runtime.session import work
from onnxgrad.training.objective import Objective, inverse
from onnxgrad.training.step.build import Gradients, Step, StepOptions, write_gradients, write_step
from onnxgrad.training.step.epoch import stacked_input, stacked_shape
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
    `adds_losses`, the loss of the batch is the sum of those of its micro-batches, of equal numbers
    of rows, and not their mean.

    Raises:
        ValueError: the loss depends on none of the weights.
        NoGradientRule: an operator on the way has no rule.
    """
    one = objective()
    body, multiply_adds = one.model.graph, work(one.model.graph)
    inner, graph = (
        Emit(body),
        ir.Graph([], [], nodes=[], opset_imports=dict(body.opset_imports), name="step"),
    )
    inverses = [
        ir.Value(name=inner.name("inverse_count"), type=n.type, shape=ir.Shape([]))
        for n in one.written.counts
    ]
    seeds = one.scaled(inner, inverses)
    parts, unreached = write_gradients(inner, one, seeds, options.recompute)
    op = Emit(graph, all_names(body))
    stacks = {x: stacked_input(x, "micro_batches") for x in _scanned(parts)}
    totals = _counted(op, objective(), stacks)
    if options.across is not None:
        totals = [all_reduce(op, total) for total in totals]
    scale = LossScale.new(op) if one.scales else None
    factor = None if scale is None else scale.scale
    number = _micro_batches(op, stacks, totals[0]) if adds_losses else None
    with op:
        for placeholder, total in zip(inverses, totals, strict=True):
            scaled = inverse(op, total, factor)
            scaled = scaled if number is None else scaled * number
            ir.convenience.replace_all_uses_with(placeholder, scaled)
        summed = _summed(op, parts, stacks)
        summed.scale = scale
        losses = [_total(op, s) for s in summed.reported[: len(inverses)]]
        losses = losses if number is None else [loss * number for loss in losses]
    summed.reported = [*losses, *totals]
    step = write_step(op, summed, optimizer, options, micro_batches)
    step.model = ir.Model(graph, ir_version=one.model.ir_version)
    finish(step.model)
    step.work, step.unreached = multiply_adds * micro_batches, unreached
    step.recomputes, step.factors = options.recompute != "none", tuple(one.written.factors)
    return step


def _scanned(parts: Gradients) -> list[ir.Value]:
    """Return what differs from micro-batch to micro-batch."""
    used = parts.draw is not None and parts.draw.uses()
    draw = [parts.draw] if parts.draw is not None and used else []
    return [*parts.data.values(), *draw, *(parts.mixing.inputs if parts.mixing else [])]


def _micro_batches(op: Emit, stacks: dict[ir.Value, ir.Value], like: ir.Value) -> ir.Value:
    """Return the number of micro-batches, a scalar of the dtype of `like`."""
    length = op.Shape(next(iter(stacks.values())), start=0, end=1)
    return op.Cast(op.Reshape(length, []), to=like.dtype)


def _counted(op: Emit, again: Objective, stacks: dict[ir.Value, ir.Value]) -> list[ir.Value]:
    """Write the counts of all micro-batches together, by a Scan over labels and weights only."""
    body, by_name = again.model.graph, {str(x.name): stack for x, stack in stacks.items()}
    body.outputs[:] = again.written.counts
    tidy(again.model)
    data = [x for x in again.data if x.uses() or x in again.written.counts] or again.data[-1:]
    if unknown := [x.name for x in body.inputs if x.uses() and x not in data]:
        raise ValueError(
            f"the number of terms of the loss depends on {unknown}: use {argument('accumulate', 1)}"
        )
    body.inputs[:] = data
    attributes = {"body": body, "num_scan_inputs": len(data)}
    stacked = [by_name[str(x.name)] for x in data]
    counts = op.emit_many("Scan", stacked, attributes, outputs=len(again.written.counts))
    return [
        _total(op, _typed(all_counts, one))
        for all_counts, one in zip(counts, again.written.counts, strict=True)
    ]


def _typed(stacked: ir.Value, one: ir.Value) -> ir.Value:
    stacked.type, stacked.shape = one.type, stacked_shape(one, "micro_batches")
    return stacked


def _total(op: Emit, stacked: ir.Value) -> ir.Value:
    return op.ReduceSum(stacked, [0], keepdims=0)


def _summed(op: Emit, parts: Gradients, stacks: dict[ir.Value, ir.Value]) -> Gradients:
    """Make the graph of `parts` the body of a Scan that sums the gradients; return its results."""
    body, graph, inner = parts.graph, op.graph, Emit(parts.graph, outer=op)
    weights, buffers = list(parts.of), list(parts.buffers)
    sums, results = [], []
    for w in weights:
        body.inputs.remove(w)
        graph.inputs.append(w)
        before = ir.Value(name=inner.name(f"{w.name}_sum"), type=w.type, shape=w.shape)
        sums.append(before)
        results.append(inner.Add(before, parts.of[w]))
    before_buffers = [_outside(inner, b) for b in buffers]
    after = [*results, *parts.buffers.values(), *parts.reported]
    body.inputs[:] = [*sums, *buffers, *stacks]
    body.outputs[:] = []
    inner.give(after)
    carried = [op.zeros_like(w) for w in weights] + before_buffers
    attributes = {"body": body, "num_scan_inputs": len(stacks)}
    outputs = op.emit_many("Scan", [*carried, *stacks.values()], attributes, outputs=len(after))
    for outer, result in zip(outputs, after, strict=True):
        outer.type, outer.shape = result.type, result.shape
    reported = [_typed(y, r) for y, r in zip(outputs[len(carried) :], parts.reported, strict=True)]
    new_buffers = outputs[len(weights) : len(carried)]
    data = {name: stacks[x] for name, x in parts.data.items()}
    return Gradients(
        graph,
        dict(zip(weights, outputs, strict=False)),
        data,
        dict(zip(before_buffers, new_buffers, strict=True)),
        None if parts.draw is None else stacks.get(parts.draw),
        None,
        reported,
        parts.rounding,
        mixing=None if parts.mixing is None else parts.mixing.stacked(stacks),
    )


def _outside(inner: Emit, buffer: ir.Value) -> ir.Value:
    """Return a value with the name of `buffer`, which gets another one, as it is in the body."""
    outside = ir.Value(
        name=buffer.name, type=buffer.type, shape=buffer.shape, const_value=buffer.const_value
    )
    buffer.name = inner.name(f"{buffer.name}_before")
    return outside
