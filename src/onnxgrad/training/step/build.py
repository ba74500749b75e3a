"""The step: one model from a batch, weights and slots to the loss, new weights and new slots.

`build_step` writes it from top to bottom: a sweep computes the gradients of a batch, or of
micro-batches, which are summed; the gradients are divided by the loss scale, and summed over
processes; the update computes new weights and slots.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.forms import finish
from onnxgrad.errors import argument, join_first
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import (
    drop_unused,
    has_small_results,
    move_out_of_body,
    read_shapes_outside,
)
from onnxgrad.graph.traversal import all_names
from onnxgrad.model.convert import to_proto, to_proto_and_free
from onnxgrad.native import Target, loop_to_native, to_native
from onnxgrad.operators import made_by, operator_of
from onnxgrad.operators.shapes import dims, rank, static
from onnxgrad.optimizers.base import Optimizer
from onnxgrad.reporting import frames_inside
from onnxgrad.runtime.session import count_multiply_adds
from onnxgrad.training.objective import Objective
from onnxgrad.training.step.gradients import (
    SCALE,
    LossScale,
    Ratio,
    StepShare,
    accumulate_gradients,
    copy_repeated,
    count_over_processes,
    sum_over_processes,
    write_gradients,
)
from onnxgrad.training.step.inputs import (
    RATE,
    Arrays,
    RuntimeCall,
    feed_inputs,
    feed_of,
    remove_unread_feeds,
    stacked_input,
    stacked_shape,
)
from onnxgrad.training.step.members import Members
from onnxgrad.training.step.update import assign_owners, may_be_in_place, shard_update, write_update
from onnxgrad.training.step.weight_groups import BLOCK_BYTES, WeightGroup, numpy_dtype


@dataclass
class Step:
    """A training step: its graph, and the weights, data and feeds that are inputs of the graph.

    The inputs of the graph are weights and slots, buffers, data and feeds, in this order. The
    outputs are the new weights and slots, the new buffers, and the sums and counts of the loss.

    With `updates`, the graph is the first half of a step: it reads the weights, not the slots, and
    returns the gradient of each group instead of new weights and slots. The second half is a model
    for each group, which updates the weights and slots of the group.

    Attributes:
        model: the model of the graph.
        groups: the groups of weights that are updated together.
        buffers: the inputs with states that do not train, such as running statistics.
        data: the inputs of a batch, by their names in the objective.
        unreached: the names of weights without a gradient, which the step does not change.
        factors: the factors of the parts of the loss.
        accumulate: the count of micro-batches of a batch.
        norms: the names of the weights for which the step returns the norm of the gradient.
        rounding: the operators that round, where gradients pass unchanged.
        recomputes: whether the order of the nodes saves memory.
        updates: a model for each group that updates its weights, None for a group that another
            process updates. None: nodes of the graph update all groups.
        owners: the rank of the process that updates each group; empty: each process updates all.
        members: the members of a stack, whose axis all weights, slots and buffers have.
        work: multiply-adds of the forward pass, per row.
        block_bytes: the most bytes of a block of a large weight; 0: no weight is in blocks.
        feeds: the inputs that are fed, by the names of their feeds.
        fixed_rows: rows of a micro-batch, if the model takes a fixed count; otherwise None.
        warned: whether a warning has named the weights that train in 16 bits.
    """

    model: ir.Model
    groups: list[WeightGroup]
    buffers: list[ir.Value]
    data: dict[str, ir.Value]
    unreached: list[str]
    factors: tuple[float, ...]
    accumulate: int
    norms: list[str]
    rounding: list[str]
    recomputes: bool
    updates: Sequence[ModelProto | None] | None
    owners: list[int]
    members: Members | None
    work: float
    block_bytes: int
    feeds: dict[str, ir.Value] = field(default_factory=dict)
    fixed_rows: int | None = None
    warned: bool = False

    @property
    def has_loss_scale(self) -> bool:
        """Whether the step scales the loss; buffers hold the scale."""
        return any(b.name == SCALE for b in self.buffers)

    @property
    def weights(self) -> list[str]:
        """The names of the weights that are trained."""
        return [name for group in self.groups for name in group.shapes]

    @property
    def states(self) -> list[ir.Value]:
        """The inputs that hold the weights and slots of all groups."""
        return [v for group in self.groups for v in group.inputs]

    @property
    def carried(self) -> list[ir.Value]:
        """The inputs whose new values are the first outputs: weights, slots and buffers."""
        read = self.states if self.updates is None else [group.state for group in self.groups]
        return [*read, *self.buffers]

    def input_arrays(self, call: RuntimeCall) -> Arrays:
        """Return the arrays of data, and of feeds such as the learning rate, by input name.

        Raises:
            ValueError: the batches cannot be split into micro-batches; see `Slice.model_arrays`.
        """
        arrays = call.piece.model_arrays(call.micro_batches)
        fed = {str(x.name): arrays[name] for name, x in self.data.items()}
        for value in self.feeds.values():
            if (feed := feed_of(value)) is not None:
                fed[str(value.name)] = feed.arrays_of_call(call, value.dtype)
        return fed

    def warn_of_weights(self) -> None:
        """Warn of weights without a gradient, and once of weights that train in 16 bits."""
        if self.unreached:
            text = f"the loss does not depend on {self.unreached}: they are not trained"
            warnings.warn(text, stacklevel=frames_inside() + 1)
        half = [group for group in self.groups if numpy_dtype(group.state).itemsize == 2]
        if half and not self.warned:
            self.warned = True
            names = [repr(name) for group in half for name in group.shapes]
            warnings.warn(
                f"{join_first(names, 3)} train in {numpy_dtype(half[0].state)}: "
                "rates, steps and squares of gradients are rounded, small numbers to zero, and NaN "
                f"is likely. A Trainer with {argument('precision', 'auto')} has weights and slots "
                "in float32",
                stacklevel=frames_inside() + 1,
            )


def build_step(
    objective: Objective,
    optimizer: Optimizer,
    *,
    recompute: str = "none",
    norms: bool = False,
    packed: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    in_place: bool = False,
    members: Members | None = None,
    across: StepShare | None = None,
    accumulate: int = 1,
    counted: Objective | None = None,
    adds_losses: bool = False,
) -> Step:
    """Return the training step, whose nodes are added to the graph of the loss.

    Args:
        objective: the loss to minimize.
        optimizer: the optimizer that updates the weights.
        recompute: as for `Trainer`.
        norms: whether the step also returns the 2-norm of the gradient of every weight.
        packed: elements up to which weights are small, and parts of one input; None: `PACKED`.
        block_bytes: the most bytes of a block of a large weight; see `write_groups`.
        in_place: whether models update large weights in place, and not nodes of the graph: see
            `Step.updates`.
        members: the members of a stack; None: the step trains one model.
        across: how processes share the step, whose graph then has nodes that exchange values; None:
            one process runs the step.
        accumulate: the count of micro-batches whose gradients are added up before the update. The
            data have a further first axis, of this length.
        counted: another objective of the same loss, for the counts in all micro-batches by which
            the loss is divided; None: the step takes a batch whole.
        adds_losses: whether the loss of a batch is the sum of the losses of its micro-batches, of
            equal numbers of rows, and not their mean.

    Raises:
        ValueError: the loss depends on none of the weights.
        NoGradientRule: an operator on the way has no rule.
    """
    multiply_adds = count_multiply_adds(objective.model.graph) * accumulate
    ratio: Ratio = ()
    scale = LossScale.new() if objective.scales_loss else None
    factor = None if scale is None else scale.scale
    if counted is not None:
        op, parts = accumulate_gradients(
            objective, counted, factor, recompute, across is not None, adds_losses
        )
    else:
        op, whole = Emit(objective.model.graph), objective
        if across is None:
            seeds = whole.cotangents(op, factor)
        else:
            whole, seeds, ratio = count_over_processes(op, whole, factor)
        parts = write_gradients(op, whole, seeds, recompute)
    if scale is not None:
        parts = scale.unscale(op, parts)
    if across is not None:
        parts = sum_over_processes(op, parts, across, ratio)
    reported = list(parts.reported)
    if norms:
        reported.append(_write_gradient_norms(op, list(parts.gradients.values())))
    if members is not None:
        update = members.write_update(op, parts.gradients, packed)
    else:
        in_place = in_place and scale is None and may_be_in_place(parts.gradients, optimizer)
        update = write_update(op, parts.gradients, optimizer, packed, block_bytes, in_place)
    buffers = parts.buffers
    if scale is not None:
        buffers = scale.skip_unless_finite(op, parts.gradients, update, buffers)
    owners: list[int] = []
    if across is not None and across.shards:
        owners = assign_owners(update.groups, across.part.size)
        update = shard_update(op, update, across.part.rank, owners)
    step = Step(
        parts.model,
        update.groups,
        list(buffers),
        parts.data,
        parts.unreached,
        tuple(objective.written.factors),
        accumulate,
        [str(w.name) for w in parts.gradients] if norms else [],
        parts.rounding,
        recompute != "none",
        update.models,
        owners,
        members,
        multiply_adds,
        0 if update.models else block_bytes,
    )
    _set_inputs_and_outputs(op, step, [*update.new, *buffers.values()], reported)
    return step


def _set_inputs_and_outputs(
    op: Emit, step: Step, new: list[ir.Value], reported: list[ir.Value]
) -> None:
    """Set the inputs of the graph of a step, and its outputs: `new` and `reported` values."""
    graph, carried = op.graph, step.carried
    remove_unread_feeds(graph, but=RATE)
    graph.inputs[:] = [*carried, *step.data.values(), *feed_inputs(graph).values()]
    reported = copy_repeated(op, reported)
    protected = {*graph.inputs, *reported}
    graph.outputs[:] = [
        op.name_output(after, f"{before.name}.new", before, protected)
        for before, after in zip(carried, new, strict=True)
    ] + reported
    if step.members is not None:
        step.members.push_member_axis(op, carried)
    step.feeds = feed_inputs(graph)
    finish(step.model)


def _write_gradient_norms(op: Emit, gradients: list[ir.Value]) -> ir.Value:
    """Return the 2-norms of gradients as one vector, float32 of shape [gradients]."""
    with op:
        norms = [
            op.Reshape(op.Cast(op.ReduceL2(g, keepdims=0), to=ir.DataType.FLOAT), [1])
            for g in gradients
        ]
        vector = op.Concat(*norms, axis=0)
    vector.name, vector.shape = op.name("gradient_norms"), ir.Shape([len(norms)])
    return vector


# -- an epoch: a Scan over batches whose body is the step, so that onnxruntime runs the loop -------

_LARGE = 1 << 16  # bytes
_COPIED = 1 << 27  # bytes of frozen floats that a copy of the body may take


def build_epoch(step: Step, target: Target | None = None) -> ModelProto:
    """Return the model that runs the step over a stack of batches in one call.

    With a `target`, the step is in the native form of sessions there; otherwise, all operators are
    operators of ONNX.

    The inputs are the inputs of the step, in their order; data and feeds have a further first axis
    of batches. The outputs are weights, slots and buffers after the last batch, then the losses and
    other reports of every batch.
    """
    body = step.model.graph
    if target is not None:
        to_native(body, target, step.recomputes)
    count = len(step.carried)
    graph = ir.Graph([], [], nodes=[], opset_imports=dict(body.opset_imports), name="epoch")
    inputs = [
        stacked_input(v, "batches" if i >= count else None) for i, v in enumerate(body.inputs)
    ]
    graph.inputs.extend(inputs)
    _move_frozen_weights_out(body, graph)
    op = Emit(graph, all_names(body))
    read_shapes_outside(body, op, dict(zip(body.inputs, inputs, strict=True)))
    move_out_of_body(body, op, has_small_results)
    results = list(body.outputs)
    fixed = [i >= count and _is_outer_value(y, body) for i, y in enumerate(results)]
    Emit(body, outer=op).give(y for y, same in zip(results, fixed, strict=True) if not same)
    attributes = {"body": body, "num_scan_inputs": len(inputs) - count}
    outputs = iter(op.emit_many("Scan", inputs, attributes, outputs=len(body.outputs)))
    for i, inner in enumerate(results):
        outer = _repeat_along_scan_axis(op, inner, inputs[-1]) if fixed[i] else next(outputs)
        outer.name = f"{inner.name}/last"
        outer.shape = stacked_shape(inner, "batches") if i >= count else inner.shape
        graph.outputs.append(outer)
    drop_unused(body)
    if target is not None:
        loop_to_native(graph, target)
    model = ir.Model(graph, ir_version=step.model.ir_version, producer_name="onnxgrad")
    return to_proto_and_free(model)


def gradient_half(step: Step, target: Target) -> ModelProto:
    """Return the model that computes only the gradients of a step, for sessions on `target`."""
    graph = step.model.graph
    to_native(graph, target, step.recomputes)
    for i in range(len(step.groups)):
        y = graph.outputs[i]
        node = made_by(y, "Reshape")
        x = None if node is None else node.inputs[0]
        known = x is not None and x.producer() is not None and static(dims(x)) is not None
        if x is not None and node is not None and known and not x.is_graph_output():
            graph.outputs[i] = x  # the Reshape would copy it
            if not y.uses():
                graph.remove(node, safe=True)
    return to_proto(ir.Model(graph, ir_version=step.model.ir_version, producer_name="onnxgrad"))


def _is_outer_value(value: ir.Value, body: ir.Graph) -> bool:
    """Return whether `value` is a constant or is computed outside of `body`, the body of a Scan."""
    node = value.producer()
    return value not in body.inputs and (node is None or node.graph is not body)


def _repeat_along_scan_axis(op: Emit, value: ir.Value, scanned: ir.Value) -> ir.Value:
    """Return a stack of copies of `value`, one for each element of the first axis of `scanned`."""
    if value.is_initializer() and value.const_value is not None:
        value = op.const(value.const_value.numpy())
    length = op.vector(op.dim(scanned, 0), *[1] * (rank(value) or 0))
    return op.emit("Expand", [value, length], {}, fresh=True)


def _move_frozen_weights_out(body: ir.Graph, graph: ir.Graph) -> None:
    """Move frozen weights from a body of a Scan to the `graph` around it, in place: large quantized
    weights, and large float factors of matrix products, also of 16 bits that are cast, if they take
    much memory in total.

    onnxruntime keeps a copy of the body with its constants. It packs constants for nodes in a
    subgraph of the graph that holds them, and no deeper. Other floats stay in the body, as
    onnxruntime fuses and blocks floats only where nodes and constants are in one graph.
    """
    floats, moved = [], []
    for value in body.initializers.values():
        tensor, readers = value.const_value, list(value.consumers())
        if tensor is None or tensor.nbytes <= _LARGE or any(n.graph is not body for n in readers):
            continue
        if tensor.dtype.is_integer():
            moved.append(value)
        elif all("product" in operator_of(n).traits or n.op_type == "Cast" for n in readers):
            floats.append(value)
    if sum(value.const_value.nbytes for value in floats if value.const_value) >= _COPIED:
        moved += floats
    for value in moved:
        del body.initializers[str(value.name)]
        graph.register_initializer(value)
