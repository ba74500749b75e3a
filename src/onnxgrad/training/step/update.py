"""The update: from gradients, weights and slots to new weights and slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.forms import finish
from onnxgrad.graph.emit import Emit
from onnxgrad.model import weights as model_weights
from onnxgrad.model.convert import to_proto_and_free
from onnxgrad.model.opsets import WORKING_OPSET
from onnxgrad.operators.shapes import dims, static
from onnxgrad.optimizers.base import Optimizer, UpdateInputs
from onnxgrad.parallel.collectives import broadcast
from onnxgrad.training.step.inputs import FEEDS, STEP, feed_inputs, remove_unread_feeds
from onnxgrad.training.step.weight_groups import (
    BLOCK_BYTES,
    Shape,
    WeightGroup,
    graph_input,
    numpy_dtype,
    stated_shape,
    update_in_blocks,
    write_groups,
)

IN_PLACE = tuple(np.dtype(kind) for kind in ("float16", "float32", "float64"))

Arrays = dict[str, np.ndarray]


@dataclass
class Update:
    """The update of groups of weights: as nodes of the graph, or as one model for each group.

    Attributes:
        groups: the groups of weights.
        new: the new values of the inputs of all groups, in their order. With `models`, the
            gradients of the groups instead.
        gradients: the gradient that the update of each group reads.
        models: a model for each group that updates its weights, None for a group that another
            process updates. None: nodes of the graph update all groups.
    """

    groups: list[WeightGroup]
    new: list[ir.Value]
    gradients: list[ir.Value]
    models: Sequence[ModelProto | None] | None = None

    @property
    def states(self) -> list[ir.Value]:
        """The inputs of all groups: the weights and slots before the step."""
        return [v for group in self.groups for v in group.inputs]


def write_update(
    op: Emit,
    gradients: dict[ir.Value, ir.Value],
    optimizer: Optimizer,
    packed: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    in_place: bool = False,
) -> Update:
    """Write the nodes that update weights by their gradients, `{weight: gradient}`.

    With `in_place`, a model updates each group. `write_groups` describes the other arguments, and
    the errors.
    """
    groups, of_states = write_groups(
        op, gradients, optimizer, packed, 0 if in_place else block_bytes
    )
    return update_groups(op, groups, of_states, optimizer, in_place)


def update_groups(
    op: Emit,
    groups: list[WeightGroup],
    gradients: list[ir.Value],
    optimizer: Optimizer,
    in_place: bool = False,
) -> Update:
    """Write the update of each group by its gradient; `in_place`: as a model for each group."""
    wide = any(group.state.dtype == ir.DataType.DOUBLE for group in groups)
    if optimizer.joint:  # gradients are zero before the first step of their group
        gradients = list(gradients)
        for i, (group, g) in enumerate(zip(groups, gradients, strict=True)):
            if first := group.optimizer.first_step:
                begun = op.Greater(STEP.input_in(op), np.int64(first))
                zero = op.const(0.0, g.dtype)
                gradients[i] = op.set_type_like(op.Where(begun, g, zero), g)
    cotangents = optimizer.across(op, gradients)
    if in_place:
        models = [group_update_model(group, wide, op.opset) for group in groups]
        return Update(groups, cotangents, cotangents, models)
    updated = []
    with op:
        for group, g in zip(groups, cotangents, strict=True):
            inputs = _optimizer_inputs(op, group.state, wide)
            if group.in_blocks:
                updated += update_in_blocks(op, g, group.optimizer, group.slots, inputs)
            else:
                u, new = group.optimizer.update(op, g, group.slots, inputs)
                updated += [op.Add(group.state, u), *(new[slot] for slot in group.slots)]
    _remove_unread_casts(op.graph)
    return Update(groups, updated, cotangents)


def may_be_in_place(weights: Iterable[ir.Value], optimizer: Optimizer) -> bool:
    """Return whether weights and slots are large enough to be updated in place.

    The dtypes must be dtypes of numpy, whose arrays are read and written in parts.
    """
    nbytes = 0
    for w in weights:
        shape, dtype = static(dims(w)), numpy_dtype(w)
        if shape is None or dtype not in IN_PLACE:
            return False
        own = optimizer.for_weight(str(w.name), shape)
        sizes = [prod(s) for s in (shape, *(own.slot_shape(slot, shape) for slot in own.slots))]
        nbytes += sum(sizes) * dtype.itemsize
    return nbytes > model_weights.LARGE


def group_update_model(group: WeightGroup, wide: bool, opset: int) -> ModelProto:
    """Return the model of the optimizer update of a group of weights, for updates in place.

    If `may_update_by_parts`, the model updates any part of the elements of a weight.

    Inputs: `weight`, the slots, `gradient`, and the feeds that the optimizer reads; the learning
    rate is float64 if `wide`.
    Outputs: the new weight and slots.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="update")
    op, like, optimizer = Emit(graph), group.state, group.optimizer
    part = ir.Shape(["elements"]) if may_update_by_parts(group) else like.shape
    weight, gradient = (graph_input(op, name, like, part) for name in ("weight", "gradient"))
    slots = {
        slot: graph_input(op, slot, like, part if dims(value) == dims(like) else value.shape)
        for slot, value in group.slots.items()
    }
    graph.inputs.extend([weight, *slots.values(), gradient])
    with op:
        inputs = _optimizer_inputs(op, weight, wide)
        u, new = optimizer.update(op, gradient, slots, inputs)
        results = {weight: op.Add(weight, u), **{slots[slot]: new[slot] for slot in slots}}
    _remove_unread_casts(graph)
    remove_unread_feeds(graph)
    return _finish_update_model(op, results)


def _finish_update_model(op: Emit, results: Mapping[ir.Value, ir.Value]) -> ModelProto:
    """Return the graph of `op` as a model whose outputs are new values of its inputs."""
    protected = set(op.graph.inputs)
    op.graph.outputs.extend(
        op.name_output(after, f"{before.name}.new", before, protected)
        for before, after in results.items()
    )
    model = ir.Model(op.graph, ir_version=8, producer_name="onnxgrad")
    finish(model)
    return to_proto_and_free(model)


def _optimizer_inputs(op: Emit, weight: ir.Value, wide: bool) -> UpdateInputs:
    """Return the `UpdateInputs` of a weight: feeds, cast to the dtype of the weight."""
    names = [f.name for f in fields(UpdateInputs) if f.name in FEEDS]
    feeds = {name: FEEDS[name].input_in(op, wide) for name in names}
    return UpdateInputs(weight, **{name: op.Cast(v, to=weight.dtype) for name, v in feeds.items()})


def _remove_unread_casts(graph: ir.Graph) -> None:
    """Remove the casts of feeds whose results no node reads."""
    for value in feed_inputs(graph).values():
        for cast in list(value.consumers()):
            unread = cast.op_type == "Cast" and not any(y.uses() for y in cast.outputs)
            if unread and cast.graph is not None:
                cast.graph.remove(cast, safe=True)


def shard_update(op: Emit, update: Update, rank: int, owners: Sequence[int]) -> Update:
    """Return the update of the groups that the process `rank` owns.

    The other processes send it the new weights of their groups, which have no slots here.
    """
    if update.models is not None:
        own = [
            (group, model) if owner == rank else (replace(group, slots={}), None)
            for group, model, owner in zip(update.groups, update.models, owners, strict=True)
        ]
        return replace(update, groups=[g for g, _ in own], models=[m for _, m in own])
    groups: list[WeightGroup] = []
    new: list[ir.Value] = []
    results = iter(update.new)
    for group, owner, g in zip(update.groups, owners, update.gradients, strict=True):
        state, *slots = (next(results) for _ in group.inputs)
        if owner != rank:
            # the gradient has the shape of the weight, and all processes exchange in one order
            group, state, slots = replace(group, slots={}), g, []
        groups.append(group)
        new += [broadcast(op, state, owner), *slots]
    return replace(update, groups=groups, new=new)


def assign_owners(groups: Sequence[WeightGroup], size: int) -> list[int]:
    """Return the rank of the process that shall update each group, with equal work for all."""
    elements = [sum(prod(stated_shape(v)) for v in group.inputs) for group in groups]
    loads, owners = [0] * size, [0] * len(groups)
    for i in sorted(range(len(groups)), key=lambda i: -elements[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += elements[i]
    return owners


def may_update_by_parts(group: WeightGroup) -> bool:
    """Return whether a group can be updated in parts: no new element reads other elements."""
    return group.optimizer.elementwise and bool(dims(group.state))


def build_update(
    weights: Mapping[str, tuple[Shape, np.dtype | type]],
    optimizer: Optimizer,
    opset: int = WORKING_OPSET,
) -> ModelProto:
    """Return the update as a model that computes the same numbers as the update inside of a step.

    Inputs, in order: the weights by name; slots, named `<weight>.<slot>`; gradients, named
    `<weight>_grad`; the scalars `minus_learning_rate`, float32 or float64 as the widest weight, and
    `step`, int64, 1 in the first step. Outputs: new weights and new slots, named as the inputs
    with `.new` behind.

    Args:
        weights: `{name: (shape, dtype)}`.
        optimizer: as in training.
        opset: 18 or newer.

    Raises:
        ValueError: as `write_update`.

    Examples:
        >>> import numpy as np
        >>> from onnxgrad.optimizers import momentum
        >>> from onnxgrad.training.step.update import build_update
        >>> model = build_update({"w": ((3, 2), np.float32)}, momentum())
        >>> [x.name for x in model.graph.input]
        ['w', 'w.velocity', 'w_grad', 'minus_learning_rate', 'step']
        >>> [y.name for y in model.graph.output]
        ['w.new', 'w.velocity.new']
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="update")
    op = Emit(graph, weights)
    gradients = {}
    for name, (shape, dtype) in weights.items():
        weight = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype))),
            shape=ir.Shape(shape),
        )
        gradients[weight] = graph_input(op, f"{name}_grad", weight)
    graph.inputs.extend(gradients.values())
    update = write_update(op, dict(gradients), optimizer, packed=0)
    new = dict(zip(update.states, update.new, strict=True))
    for group in update.groups:
        if group.in_blocks:
            _reshape_block_inputs(op, group, new)
    states = [group.state for group in update.groups]
    slots = [slot for group in update.groups for slot in group.slots.values()]
    graph.inputs[:] = [*states, *slots, *graph.inputs]
    return _finish_update_model(op, {old: new[old] for old in (*states, *slots)})


def weights_to_evaluate(
    optimizer: Optimizer,
    weights: Mapping[str, np.ndarray],
    slots: Mapping[str, Mapping[str, np.ndarray]],
    steps: int,
) -> Arrays:
    """Return the weights to evaluate and export: averages, if the optimizer keeps them.

    A weight without slots was not trained yet, and is returned unchanged.
    """
    # `asarray`, as arithmetic on arrays of shape () gives numbers
    return {
        name: np.asarray(
            optimizer.for_weight(name, w.shape).evaluated(w, slots[name], steps), w.dtype
        )
        if name in slots
        else w
        for name, w in weights.items()
    }


def _reshape_block_inputs(op: Emit, group: WeightGroup, new: dict[ir.Value, ir.Value]) -> None:
    """Give the inputs of a group that have an axis of blocks the shape of the weight instead."""
    ((name, shape),) = group.shapes.items()

    def whole_input(blocks: ir.Value, name: str) -> ir.Value:
        value = ir.Value(name=name, type=blocks.type, shape=ir.Shape(shape))
        with op.at(next(iter(op.graph), None)):
            ir.convenience.replace_all_uses_with(blocks, op.reshape_like(value, blocks))
        new[value] = op.reshape_like(new.pop(blocks), value)
        return value

    group.state = whole_input(group.state, name)
    for slot, value in group.slots.items():
        if dims(value):
            group.slots[slot] = whole_input(value, str(value.name))
