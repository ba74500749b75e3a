"""Build the ONNX models of artifacts: gradients, optimizer, both in one step, and evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.derivative import make_inputs_constants
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import tidy
from onnxgrad.model.convert import to_proto
from onnxgrad.model.local_functions import inline_ruled_calls
from onnxgrad.model.weights import read_weights_lazily
from onnxgrad.training.fields import DataSpec
from onnxgrad.training.modes.inference_form import inference_form
from onnxgrad.training.objective import Objective
from onnxgrad.training.recipe import Recipe, build_objective
from onnxgrad.training.step.build import Step
from onnxgrad.training.step.inputs import DRAW, RATE, STEP
from onnxgrad.training.step.weight_groups import numpy_dtype

LOSS, LARGEST = "loss", 1 << 31  # bytes: a protobuf message must be smaller

Arrays = dict[str, np.ndarray]


@dataclass
class Models:
    """The ONNX models of the artifacts, with their tensors, inputs and outputs.

    Attributes:
        by_key: {key in the manifest: model}, of the keys "training", "eval", and with an optimizer
            "optimizer" and "step".
        weights: the weights that train, by name.
        slots: initial values of slots by `<weight>.<slot>`; empty without an optimizer.
        slot_weights: the weight of each slot.
        buffers: running statistics by name.
        scalars: dtypes of the scalars that the step reads, by name.
        fields: the inputs of a batch, and which of them are labels and sample weights.
        predictions: outputs of the evaluation.
        unreached: weights that the loss does not depend on, which do not change.
        rounding: operators whose rounding the gradient passes straight through.
    """

    by_key: dict[str, ModelProto]
    weights: Arrays
    slots: Arrays
    slot_weights: dict[str, str]
    buffers: Arrays
    scalars: dict[str, np.dtype]
    fields: DataSpec
    predictions: list[str]
    unreached: list[str]
    rounding: list[str]


def build_models(recipe: Recipe, additional: Sequence[str], updates: bool) -> Models:
    """Return the ONNX models of the artifacts for a `Trainer`.

    Args:
        recipe: the recipe of the trainer.
        additional: names of tensors that the evaluation returns, too.
        updates: whether there is an optimizer, and so the models of its update and of the step.

    Raises:
        ValueError: the model has a name that the artifacts need for something else.
        NoGradientRule: an operator between the weights and the loss has no rule.
    """
    gradients, update = recipe.step_models()
    objective = recipe.objective().require_labels()
    fields = DataSpec(objective, recipe.job.batch_axes)
    buffers = {name: np.array(value) for name, value in objective.initial_buffers.items()}
    step = recipe.unpacked_step(objective)
    _check_weight_sizes(recipe.state.weights, step)
    names = _StepValues(step)
    weights = {name: recipe.state.weights[name] for name in step.weights}
    whole = _training_step_model(objective, step, names)
    evaluation, predictions = _evaluation_model(recipe, step, list(buffers), additional)
    models = {"training": gradients, "eval": evaluation}
    if updates:
        models |= {"optimizer": update, "step": whole}
    _check_input_and_output_names(models, names, [*fields.fields], predictions)
    return Models(
        models,
        weights,
        _initial_slots(step, weights) if updates else {},
        names.slot_weights if updates else {},
        buffers,
        {name: numpy_dtype(v) for name, v in names.scalars.items()} if updates else {},
        fields,
        predictions,
        step.unreached,
        step.rounding,
    )


def _check_weight_sizes(weights: Arrays, step: Step) -> None:
    """Raise `ValueError` if a weight has more bytes than a tensor in an ONNX file may have."""
    for name in step.weights:
        if weights[name].nbytes >= LARGEST:
            raise ValueError(
                f"the weight {name!r} has {weights[name].nbytes} bytes, and one tensor of a model "
                f"that is written holds fewer than {LARGEST}: freeze it, by frozen_params"
            )


class _StepValues:
    """The weights, slots, buffers and scalars of a training step, by their names in the files."""

    def __init__(self, step: Step) -> None:
        self.weights = {name: group.state for group in step.groups for name in group.shapes}
        self.slots: dict[str, ir.Value] = {}
        self.slot_weights: dict[str, str] = {}
        for group in step.groups:
            for slot, value in group.slots.items():
                (weight,) = group.shapes
                self.slots[f"{weight}.{slot}"] = value
                self.slot_weights[f"{weight}.{slot}"] = weight
        self.buffers = {str(b.name): b for b in step.buffers}
        self.scalars = step.feeds

    @property
    def states(self) -> dict[str, ir.Value]:
        """The values that a step updates: weights, slots and buffers."""
        return self.weights | self.slots | self.buffers


def _training_step_model(objective: Objective, step: Step, names: _StepValues) -> ModelProto:
    """Return the ONNX model of a step: outputs are mean loss, new weights, slots and buffers."""
    graph = step.model.graph
    op, count = Emit(graph), len(step.carried)
    loss = op.copy_of(objective.write_mean_loss(op, list(graph.outputs)[count:]))
    new = dict(zip(step.carried, graph.outputs, strict=False))
    states = names.states
    graph.inputs[:] = [*states.values(), *step.data.values(), *names.scalars.values()]
    graph.outputs[:] = [loss, *(new[value] for value in states.values())]
    wanted = {**states, **names.scalars, LOSS: loss}
    wanted |= {f"{name}.new": new[value] for name, value in states.items()}
    _rename_values(op, wanted)
    tidy(step.model)
    return _graph_to_model(graph)


def _rename_values(op: Emit, wanted: dict[str, ir.Value]) -> None:
    """Rename values to the keys of `wanted`; other values with these names get new names."""
    existing = ir.convenience.create_value_mapping(op.graph)
    for name, value in wanted.items():
        other = existing.get(name)
        if other is not None and other is not value and other not in op.graph.inputs:
            other.name = op.name(name)
    for name, value in wanted.items():
        value.name = name


def _evaluation_model(
    recipe: Recipe, step: Step, buffers: Sequence[str], additional: Sequence[str]
) -> tuple[ModelProto, list[str]]:
    """Return the evaluation model (mean loss and predictions), and the names of the predictions."""
    job = recipe.job
    inference = recipe.for_model(inference_form(job.proto), [*job.trained, *buffers])
    one = build_objective(inference, training=False, additional=additional)
    one.require_labels()
    read_weights_lazily(
        [w for w in one.weights if w.name in step.unreached],
        lambda name: recipe.state.weights[name],
    )
    graph, op = one.model.graph, Emit(one.model.graph)
    make_inputs_constants(graph, [w for w in one.weights if w.name in step.unreached])
    if LOSS in one.predictions:
        raise ValueError(
            f"the output {LOSS!r} of the model is no loss, and the artifacts need its name: rename "
            "that output"
        )
    outputs = {LOSS: op.copy_of(one.write_mean_loss(op, one.reported))}
    outputs |= {name: op.copy_of(v) for name, v in one.predictions.items()}
    read = [w for w in one.weights if w.name not in step.unreached]
    graph.inputs[:] = [*read, *one.data]
    graph.outputs[:] = list(outputs.values())
    inline_ruled_calls(op, one.model)
    _rename_values(op, outputs)
    tidy(one.model)
    return _graph_to_model(graph), list(one.predictions)


def _graph_to_model(graph: ir.Graph) -> ModelProto:
    return to_proto(ir.Model(graph, ir_version=8, producer_name="onnxgrad"))


def _initial_slots(step: Step, weights: Arrays) -> Arrays:
    """Return `{"<weight>.<slot>": initial value}` of the optimizer's slots."""
    slots: Arrays = {}
    for group in step.groups:
        (weight,) = group.shapes
        _, *arrays = group.initial(weights, {})
        slots |= {f"{weight}.{slot}": a for slot, a in zip(group.slots, arrays, strict=True)}
    return slots


def _check_input_and_output_names(
    models: dict[str, ModelProto], names: _StepValues, data: list[str], predictions: list[str]
) -> None:
    """Raise `ValueError` if a name of `models` is needed twice, or was changed to be unique."""
    states, draw = list(names.states), [name for name in names.scalars if name == DRAW.name]
    before, statistics = [*names.weights, *names.buffers], list(names.buffers)
    gradients = [f"{name}_grad" for name in names.weights]
    updated = [*names.weights, *names.slots]
    expected: dict[str, tuple[list[str], list[str]]] = {
        "training": ([*before, *data, *draw], [*gradients, *(f"{b}.new" for b in statistics)]),
        "eval": ([*before, *data], [LOSS, *predictions]),
        "optimizer": (
            [*updated, *gradients, RATE.name, STEP.name],
            [f"{name}.new" for name in updated],
        ),
        "step": ([*states, *data, *names.scalars], [LOSS, *(f"{name}.new" for name in states)]),
    }
    for key, model in models.items():
        inputs, outputs = expected[key]
        own = [x.name for x in model.graph.input], [y.name for y in model.graph.output]
        twice = {name for name, count in Counter([*inputs, *outputs]).items() if count > 1}
        missing = {*inputs}.difference(own[0]) | {*outputs}.difference(own[1])
        if clash := sorted(twice | missing):
            raise ValueError(
                f"the {key} model needs the name {clash[0]!r}, which an input, an output or a "
                "weight of the model has: rename that value"
            )
