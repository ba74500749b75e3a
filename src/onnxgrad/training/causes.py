"""Why a loss or a weight is not finite: the rows, and the node of the file or of the step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.errors import argument, first_line
from onnxgrad.graph.precision import HALVES
from onnxgrad.model.surgery import select_model_inputs_outputs
from onnxgrad.reporting import frames_inside
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.not_finite import first_not_finite
from onnxgrad.runtime.session import session
from onnxgrad.training.callbacks.nan_watch import NanWatch
from onnxgrad.training.failure import FailedStep
from onnxgrad.training.magnitudes import large_numbers
from onnxgrad.training.progress import shown
from onnxgrad.training.step.inputs import Batch

Arrays = Mapping[str, np.ndarray]
_RATE = "Lower the learning rate, or scale the data"
_NO_TERM = "no label counts: all are ignored, or have the weight zero"
_ELSEWHERE = "Another process has the rows at fault, and names them"
_NO_MATTER = "This is no matter of the learning rate: with the weights of the file"


def warn_of_no_label(loss: Any, epoch: int) -> None:
    """Warn if the loss of an epoch, all of whose steps were finite, is NaN."""
    if np.isnan(loss).all():
        message = f"the loss of epoch {epoch} is nan: {_NO_TERM}"
        warnings.warn(message, stacklevel=frames_inside() + 1)


def cause_in_file(file: ModelProto, outputs: Sequence[str], batch: Batch) -> str | None:
    """Return which node of a file computes NaN or infinity for a batch, None if none does."""
    if {y.name for y in file.graph.output} != set(outputs):
        file = select_model_inputs_outputs(file, outputs, infer_shapes=False)
    feed = {x.name: batch.arrays[x.name] for x in file.graph.input if x.name in batch.arrays}
    return first_not_finite(file, feed, batch.rows, batch.of)


def cause_in_training(
    file: ModelProto | None,
    outputs: Sequence[str],
    batches: Iterable[Batch],
    otherwise: Callable[[], str | None] | None,
    remedy: str = _RATE,
) -> str:
    """Return sentences that say why a loss or a weight is not finite, and what helps.

    Args:
        file: the model with its own weights, None if only their trained values are in memory.
        outputs: the tensors of the model that the loss reads.
        batches: those that may be at fault.
        otherwise: returns the sentences where the file computes finite numbers; None: a step of
            large weights, of which memory may not hold another copy.
        remedy: what helps against numbers that grow too large.
    """
    try:
        texts = () if file is None else (cause_in_file(file, outputs, b) for b in batches)
        if text := next(filter(None, texts), None):
            return f"{_NO_MATTER}, {text}. Leave these rows out, or change that node"
        if otherwise is None:
            return remedy
        return otherwise() or remedy
    except Exception as e:
        return f"{remedy} (looking for the node at fault failed: {first_line(e)})"


def cause_in_fit(
    loop: Any,
    file: ModelProto | None,
    outputs: Sequence[str],
    failed_step: Callable[[], FailedStep | None],
    evaluator: Any,
    values: Arrays,
    columns: Mapping[str, Sequence[str]] = {},
    weight: str | None = None,
) -> str:
    """Return why a `Loop` ended: in a step, or else in a validation by an `Evaluator`.

    Args:
        loop: the loop.
        file: as for `cause_in_training`.
        outputs: as for `cause_in_training`.
        failed_step: returns the step that failed, as `find_failed_step`.
        evaluator: that of the validation data.
        values: the weights that it evaluates.
        columns: the names of the columns of tables, by input.
        weight: the input of sample weights.
    """
    bad = [] if evaluator.failed is None else [evaluator.failed]
    if loop.failed is not None:
        piece, _, position = loop.failed
        bad = list(piece.each(position))
    seen = [getattr(loop.source, "arrays", {}), *(batch.arrays for batch in bad)]
    texts = (large_numbers(arrays, columns, weight) for arrays in seen)
    data, rate = next(filter(None, texts), None), loop.state.learning_rate
    remedy = "Lower the learning rate" + ("" if rate is None else f", {shown(rate, 'g')}")
    if data is not None:
        remedy = f"{_upper(data)}: scale the data, or l{remedy[1:]}"
    if loop.failed is not None:
        if loop.runner.in_place and not any(isinstance(c, NanWatch) for c in loop.callbacks.all):
            remedy += "; NanWatch() names the node, which needs memory for the step once more"
        again = None if loop.runner.in_place else lambda: cause_in_step(failed_step(), remedy, data)
        return cause_in_training(file, outputs, bad, again, remedy)
    if evaluator.failed is None and loop.runner.of_several:
        return f"{_ELSEWHERE}. {remedy}"
    return cause_in_training(
        file, outputs, bad, lambda: _at_end(evaluator.cause(values), remedy), remedy
    )


def cause_in_step(
    step: FailedStep | None, remedy: str = _RATE, data: str | None = None
) -> str | None:
    """Return which node of a step computes NaN or infinity, and what helps; None if none does.

    `remedy` helps against numbers that grow too large, and `data` names large ones, if any are.
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
    if step.at_start is not None:
        running = session(step.model, CPU, 0.0)
        results = running.run(None, {x.name: step.at_start[x.name] for x in running.get_inputs()})
        if not all(np.isfinite(y.astype(np.float64)).all() for y in results):
            states = (a.dtype for name, a in step.inputs.items() if name not in arrays)
            half = any(dtype.itemsize == 2 and dtype.kind in "fV" for dtype in states)
            half |= any(
                n.op_type == "Cast" and n.attribute[0].i in HALVES for n in losses.graph.node
            )
            given = argument("precision", "float32")
            more = f". It computes in 16 bits: {given} does not" if half else ""
            more += f". {_upper(data)}" if data is not None else ""
            return f"{_NO_MATTER} and a rate of zero, it is the same. {_upper(where)}, {text}{more}"
    return _at_end(f"{where}, {text}", remedy)


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
        values: the weights.
        batch: the first one whose loss is not finite; None if no label counts.
    """
    if batch is None:
        return _NO_TERM
    try:
        if text := cause_in_file(file, outputs, batch):
            return text
        text = first_not_finite(losses(), {**values, **batch.arrays}, batch.rows, batch.of)
        return f"in the loss, {text}" if text else "the sum over the rows overflows"
    except Exception as e:
        return f"looking for the node at fault failed: {first_line(e)}"


def _at_end(clause: str, remedy: str) -> str:
    return _upper(clause) if clause == _NO_TERM else f"{_upper(clause)}. {remedy}"


def _upper(clause: str) -> str:
    return clause[0].upper() + clause[1:]
