"""Explain why a training ended: the rows and the node of NaN or infinity, or a label that is wrong.

Two functions rebuild one step of a training: the step that gave NaN or infinity, and a step that
can be run alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import ConvergenceError, argument, first_line, named
from onnxgrad.graph.precision import HALVES
from onnxgrad.losses.info import LossInfo
from onnxgrad.model import weights as constants
from onnxgrad.model.convert import to_proto
from onnxgrad.model.surgery import select_model_inputs_outputs
from onnxgrad.native import Target, to_native
from onnxgrad.operators import marks
from onnxgrad.reporting import frames_inside
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.not_finite import first_not_finite
from onnxgrad.runtime.session import session
from onnxgrad.runtime.values import to_numpy
from onnxgrad.training.callbacks.diagnostics import NanWatch
from onnxgrad.training.callbacks.early_stopping import EarlyStopping
from onnxgrad.training.state import TrainState, number_text
from onnxgrad.training.step.build import Step
from onnxgrad.training.step.inputs import RATE, Batch, RuntimeCall
from onnxgrad.training.step.weight_groups import numpy_dtype

Arrays = Mapping[str, np.ndarray]
NO_TERM = "no label counts: all are ignored, or have the weight zero"
_NOT_THE_RATE = "This is no matter of the learning rate: with the weights of the file"
_LARGE = 100.0  # data with numbers above this were not standardized
_ENDS = {  # clauses that say why a training ended, by `state.stop_reason`
    "max_iter": "all epochs were trained",
    "callback": "a callback ended it",
    "not finite": "the loss or a weight became NaN or infinite",
    "interrupted": "it was interrupted",
    "error": "an error ended it",
}

# -- the end of a training -------------------------------------------------------------------------


@dataclass(frozen=True)
class KeptWeights:
    """The step and epoch of a training that led to the weights in its state.

    - `step`: the count of steps that led to the weights.
    - `epoch`: the number of the epoch of the last step, from 1; 0 without any step.
    - `whole`: whether the weights are from the end of that epoch.
    - `record`: the entry of the history that has their losses and metrics; {} if there is none.
    """

    step: int
    epoch: int
    whole: bool
    record: dict[str, Any]

    @classmethod
    def from_state(cls, state: TrainState) -> KeptWeights:
        """Return the step and epoch that led to the weights in the state of one model.

        This is the last step, or the step whose weights a callback restored.
        """
        restored = [entry.get("restored") for entry in state.callbacks.values()]
        step = next((s for s in restored[::-1] if s is not None), state.step)
        found = [entry for entry in state.history if entry["step"] == step]
        record = found[-1] if found else {}
        whole = "loss" in record
        epoch = record.get("epoch", state.epoch) + (not whole) if step else 0
        return cls(step, epoch, whole, record)

    def __str__(self) -> str:
        if self.whole:
            return f"the weights of epoch {self.epoch}"
        if not self.step:
            return "the weights with which training began: no step was finished"
        return f"the weights of epoch {self.epoch} in part, after {self.step} steps"


def end_reason(trainer: Any) -> str:
    """Return why the last training of a trainer ended, as a clause; "" before its end."""
    state = trainer.state
    stopped = [c for c in trainer._job.callbacks.callbacks if isinstance(c, EarlyStopping)]
    if state.stop_reason == "callback":
        return next(filter(None, (c.reason(state) for c in stopped)), _ENDS["callback"])
    return _ENDS.get(state.stop_reason, "")


def warn_of_no_label(loss: Any, epoch: int) -> None:
    """Warn if the loss of an epoch is NaN because no label counts; all steps were finite."""
    if np.isnan(loss).all():
        message = f"the loss of epoch {epoch} is nan: {NO_TERM}"
        warnings.warn(message, stacklevel=frames_inside() + 1)


def divergence_error(loop: Any, what: str, epoch: int, kept: str) -> ConvergenceError:
    """Return the error to raise in a `Loop` after a loss or a weight became NaN or infinite.

    Args:
        loop: the loop, which runs.
        what: a noun for what is not finite, such as "the validation loss".
        epoch: the number of the epoch, from 1.
        kept: a clause that says which state is kept, unless a callback restores the best weights.
    """
    state = loop.state
    recent = ", ".join(number_text(v, ".6g") for v in state.losses[-5:]) or "none"
    callbacks = loop.call.callbacks
    watched = callbacks.on_not_finite(loop.call.trainer, state, loop.control)
    restoring = (c.key for c in callbacks.all if getattr(c, "restore", False))
    if any(state.kept.get(key) for key in restoring):
        kept = "the best weights so far are kept"
    if state.members is not None:
        what += " of all members"
    return ConvergenceError(
        f"{what} became NaN or infinite in epoch {epoch} at learning rate "
        f"{number_text(state.learning_rate, 'g')} (losses of the epochs before: {recent}); {kept}. "
        f"{cause_in_fit(loop)}{'. ' if watched else ''}{watched}"
    )


# -- causes ----------------------------------------------------------------------------------------


def cause_in_fit(loop: Any) -> str:
    """Return sentences that say why a loss or a weight in a `Loop` is not finite, and a remedy."""
    call, evaluator, in_place = loop.call, loop.call.step_evaluator, loop.runner.in_place
    outputs = call.recipe.loss.outputs(call.job.proto)
    batches = [] if evaluator.failed is None else [evaluator.failed]
    if loop.failed is not None:
        batches = list(loop.failed.each_batch())
    seen = [getattr(call.source, "arrays", {}), *(batch.arrays for batch in batches)]
    weight = evaluator.fields.weight
    texts = (largest_number(arrays, call.names.columns, weight) for arrays in seen)
    data, rate = next(filter(None, texts), None), loop.state.learning_rate
    remedy = "ower the learning rate" + ("" if rate is None else f", {number_text(rate, 'g')}")
    remedy = f"L{remedy}" if data is None else f"{_as_sentence(data)}: scale the data, or l{remedy}"
    if loop.failed is None and evaluator.failed is None and loop.runner.has_other_processes:
        return f"Another process has the rows at fault, and names them. {remedy}"
    watched = any(isinstance(c, NanWatch) for c in call.callbacks.all)
    if loop.failed is not None and in_place and not watched:
        remedy += "; NanWatch() names the node, which needs memory for the step once more"
    try:
        for batch in batches:
            if call.file is not None and (text := cause_in_file(call.file, outputs, batch)):
                return f"{_NOT_THE_RATE}, {text}. Leave these rows out, or change that node"
        if loop.failed is None:
            values = call.job.values_to_evaluate(loop.state)
            if call.job.members is not None:  # no member has a finite loss: any member tells why
                values = {name: array[0] for name, array in values.items()}
            return _sentence_with_remedy(evaluator.explain_not_finite(values), remedy)
        # where weights are large, memory may not hold another copy
        return remedy if in_place else cause_in_step(find_failed_step(call), remedy, data) or remedy
    except Exception as e:
        return f"{remedy} (looking for the node at fault failed: {first_line(e)})"


def cause_in_file(file: ModelProto, outputs: Sequence[str], batch: Batch) -> str | None:
    """Return a clause that names the node of a file that computes NaN or infinity for a batch.

    None if no node does. `outputs` are the tensors of the model that the loss reads.
    """
    if {y.name for y in file.graph.output} != set(outputs):
        file = select_model_inputs_outputs(file, outputs, infer_shapes=False)
    feed = {x.name: batch.arrays[x.name] for x in file.graph.input if x.name in batch.arrays}
    return first_not_finite(file, feed, batch.rows, batch.of)


def cause_in_step(step: FailedStep | None, remedy: str, data: str | None) -> str | None:
    """Return sentences on the node of a step that computes NaN or infinity; None if no node does.

    Args:
        step: the step, None if it is not known.
        remedy: the remedy against numbers that grow too large.
        data: a clause that names a large number of the data, None without any.
    """
    if step is None:
        return None
    arrays, rows, of = step.batch
    losses = ModelProto()
    losses.CopyFrom(step.model)
    del losses.graph.output[:]
    losses.graph.output.extend(y for y in step.model.graph.output if y.name in step.losses)
    text, where = first_not_finite(losses, step.inputs, rows, of), "in the loss"
    if text is None:
        where = "in the gradient or the update, where the loss is finite"
        text = first_not_finite(step.model, step.inputs, rows, of)
    if text is None:
        return None
    if step.at_start is None:
        return _sentence_with_remedy(f"{where}, {text}", remedy)
    running = session(step.model, CPU, 0.0)
    results = running.run(None, {x.name: step.at_start[x.name] for x in running.get_inputs()})
    if all(np.isfinite(y.astype(np.float64)).all() for y in results):
        return _sentence_with_remedy(f"{where}, {text}", remedy)
    states = (a.dtype for name, a in step.inputs.items() if name not in arrays)
    half = any(dtype.itemsize == 2 and dtype.kind in "fV" for dtype in states)
    half |= any(n.op_type == "Cast" and n.attribute[0].i in HALVES for n in losses.graph.node)
    given = argument("precision", "float32")
    more = f". The step computes in 16 bits: {given} computes in 32 bits" if half else ""
    more += f". {_as_sentence(data)}" if data is not None else ""
    where = _as_sentence(where)
    return f"{_NOT_THE_RATE} and a rate of zero, it is the same. {where}, {text}{more}"


def cause_in_evaluation(
    file: ModelProto,
    outputs: Sequence[str],
    losses: Callable[[], ModelProto],
    values: Arrays,
    batch: Batch | None,
) -> str:
    """Return a clause that says why the loss of an evaluation is not finite.

    Args:
        file: the model with the weights that were evaluated.
        outputs: the tensors of the model that the loss reads.
        losses: returns the model of the losses, whose weights are inputs.
        values: the weights by name.
        batch: the first batch whose loss is not finite; None if no label counts.
    """
    if batch is None:
        return NO_TERM
    try:
        if text := cause_in_file(file, outputs, batch):
            return text
        text = first_not_finite(losses(), {**values, **batch.arrays}, batch.rows, batch.of)
        return f"in the loss, {text}" if text else "the sum over the rows overflows"
    except Exception as e:
        return f"looking for the node at fault failed: {first_line(e)}"


def largest_number(
    arrays: Arrays, columns: Mapping[str, Sequence[str]], weight: str | None
) -> str | None:
    """Return a clause that names the largest number of the data; None if no number is large.

    Args:
        arrays: the data, by input.
        columns: the names of columns, by input.
        weight: the input of sample weights, which are large compared with their median.
    """
    found: list[tuple[float, str]] = []
    for name, array in arrays.items():
        if array.dtype.kind != "f" or not array.size:
            continue
        names = columns.get(name, ())
        by_column = len(names) == array.shape[-1] if array.ndim else False
        flat = array.reshape(-1, len(names) if by_column else 1)
        ends = np.fmin.reduce(flat), np.fmax.reduce(flat)  # NaN is a label that does not count
        sizes = np.abs(np.stack(ends).astype(np.float64)).max(axis=0)
        largest = float(sizes.max())
        clause = f"the input {name!r} reaches {largest:.3g}"
        if name == weight:
            usual = float(np.median(np.abs(array[array != 0]))) if largest else 1.0
            what = f"the largest {named('sample_weight')}"
            clause = f"{what} is {largest:.3g}, and the median {usual:.3g}"
            largest /= usual
        elif by_column:
            clause = f"the column {names[int(sizes.argmax())]!r} reaches {largest:.3g}"
        if largest > _LARGE:
            found.append((largest, clause))
    return max(found)[1] if found else None


def label_misfit(
    inputs: Iterable[ir.Value],
    infos: Mapping[str, LossInfo],
    fields: Any,
    shapes: Mapping[str, tuple[int, ...]],
    arrays: Arrays,
) -> str | None:
    """Return a text that names a label that does not fit its prediction, and a remedy.

    None if all labels fit. It is for predictions whose shapes the model computes: a node of the
    loss fails for a wrong label, and onnxruntime names neither label nor prediction.

    Args:
        inputs: the data inputs of a graph with the loss.
        infos: the facts of the losses, by label.
        fields: the checks of the inputs of data.
        shapes: the shapes of the predictions of a batch, by output.
        arrays: the data of the batch, by input.
    """
    for x in inputs:
        info, label_shape = infos.get(str(x.name)), x.meta.get(marks.LABEL_SHAPE)
        shape = None if info is None else shapes.get(str(info.prediction))
        if info is None or label_shape is None or shape is None:
            continue
        field = fields.fields[x.name]
        classes = None if info.classes is None else shape[1 if info.axis is None else info.axis]
        declared = replace(field, shape=label_shape(shape), classes=classes)
        try:
            declared.check(arrays[field.name], fields.row_axes.declared_axis(field.name) or 0)
        except ValueError as e:
            return (
                f"{e}. The model computes {info.prediction!r} of shape {shape} for this batch: "
                f"pass labels that fit {info.prediction!r}, or train another output"
            )
    return None


def _sentence_with_remedy(clause: str, remedy: str) -> str:
    """Return a clause as a sentence, followed by `remedy`.

    The clause that no label counts has no remedy.
    """
    return _as_sentence(clause) if clause == NO_TERM else f"{_as_sentence(clause)}. {remedy}"


def _as_sentence(clause: str) -> str:
    """Return a clause with a capital letter at its beginning."""
    return clause[0].upper() + clause[1:]


# -- one step alone --------------------------------------------------------------------------------


@dataclass(frozen=True)
class FailedStep:
    """A step of training that gave NaN or infinity.

    - `model`: the model of the step, and `inputs` its inputs by name.
    - `batch`: the batch of the step.
    - `losses`: the names of the outputs that report the loss.
    - `at_start`: the inputs with the weights of the file, initial slots and a learning rate of
      zero; None if the weights of the file are not in memory.
    """

    model: ModelProto
    inputs: dict[str, np.ndarray]
    batch: Batch
    losses: Sequence[str]
    at_start: dict[str, np.ndarray] | None


def find_failed_step(call: Any) -> FailedStep | None:
    """Return the step in which the loop of a `Fit` failed; None if no step failed.

    Where processes share the step, each process returns the step with its own rows; None if the
    process does not have all slots, if statistics are over all rows, or if that step is finite.
    """
    recipe, loop = call.recipe, call.loop
    if loop.failed is None or _step_needs_other_processes(call):
        return None
    step = _step_in_one_graph(call)
    model = to_proto(step.model)
    running = session(model, recipe.job.device, step.work, step.recomputes)
    states, fed = _state_and_feed_arrays(step, loop.runner, loop.failed)
    for index, batch in enumerate(loop.failed.each_batch()):
        inputs = states | {name: np.asarray(stack[index]) for name, stack in fed.items()}
        results = running.run(None, inputs)
        if not all(np.isfinite(y).all() for y in results):
            losses = [y.name for y in model.graph.output[len(states) :]]
            at_start = None if call.file is None else inputs | _initial_states(step, call.file)
            return FailedStep(model, inputs, batch, losses, at_start)
        states = dict(zip(states, results, strict=False))
    return None


def runnable_step(call: Any) -> tuple[ModelProto, dict[str, np.ndarray], float, bool] | None:
    """Return the step of a `Fit` as a model that can be run alone, with the inputs of a full batch.

    The results are the model, its inputs, with the states and a full batch of the loop, and two
    arguments of `session`: the multiply-adds, and whether nodes run in order. The model is one
    graph in the native form of sessions, also where the training runs the step in parts. None
    before the first step, and where processes share the step.
    """
    recipe, loop = call.recipe, call.loop
    if loop is None or loop.sample is None or _step_needs_other_processes(call):
        return None
    rows, device, step = loop.sample.piece.rows, recipe.job.device, _step_in_one_graph(call)
    work = step.work * rows
    to_native(step.model.graph, Target.for_step(device, work, rows), step.recomputes)
    model = to_proto(step.model)
    states, fed = _state_and_feed_arrays(step, loop.runner, loop.sample)
    inputs = states | {name: np.asarray(stack[0]) for name, stack in fed.items()}
    return model, inputs, work, step.recomputes


def _step_in_one_graph(call: Any) -> Step:
    """Return the step of a `Fit` as one graph, whose states have the shapes that the runner has."""
    recipe, block_bytes = call.recipe, call.loop.runner.step.block_bytes
    return recipe.step(recipe.objective(), norms=False, in_place=False, block_bytes=block_bytes)


def _step_needs_other_processes(call: Any) -> bool:
    """Return whether the step of a `Fit` cannot be rebuilt in this process alone.

    This is so if the process lacks slots, or if statistics are over the rows of all processes.
    """
    return bool(call.loop.runner.step.owners) or call.recipe.statistics_part is not None


def _state_and_feed_arrays(
    step: Step, runner: Any, call: RuntimeCall
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the arrays of states, and of data and feeds, as two dicts by input of `step`.

    The first has the states of `runner` (weights, slots and buffers), the second the data and the
    other inputs of a call of the runtime.
    """
    states = map(to_numpy, runner.state_values(call.piece).values())
    names = [str(v.name) for v in step.carried]
    return dict(zip(names, states, strict=True)), step.input_arrays(runner.complete_call(call))


def _initial_states(step: Step, file: ModelProto) -> dict[str, np.ndarray]:
    """Return arrays by input of `step`: the weights of a file, initial slots, a rate of zero."""
    trained = {*step.weights}
    refs = (ref for ref in constants.constant_refs(file) if ref.name in trained)
    weights = {ref.name: ref.array() for ref in refs}
    states = [array for group in step.groups for array in group.initial(weights, {})]
    rate = step.feeds[RATE.name]
    fed = {str(rate.name): np.zeros((), numpy_dtype(rate))}
    return dict(zip((str(v.name) for v in step.states), states, strict=True)) | fed
