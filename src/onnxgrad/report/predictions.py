"""Predictions of a trained model: confusions, residuals, and the rows with the largest loss."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxgrad.losses.info import LossInfo
from onnxgrad.metrics.average_precision import BoxConfusion, MeanAveragePrecision
from onnxgrad.metrics.base import PredictionInfo
from onnxgrad.metrics.metric_batch import Batch
from onnxgrad.report.measures import histogram
from onnxgrad.report.row_files import describe_row
from onnxgrad.training.batches import ArraySource, BatchSource, ReaderSource
from onnxgrad.training.output_metrics import prediction_info

WORST = 20  # rows
POINTS = 1000  # of a scatter of predictions
COLUMNS = 8  # numbers of a row whose residuals are kept
_MOST_ELEMENTS = 6  # elements of a label or a prediction
_NAME = "report"  # the metric that error messages name

Arrays = Mapping[str, np.ndarray]


@dataclass
class _Output:
    """An output of the model, as its loss and metrics read it."""

    info: LossInfo
    axis: int  # of the rows in the output of the model

    def compare(self, prediction: np.ndarray, label: np.ndarray) -> tuple[PredictionInfo, Batch]:
        """Return predictions and labels as metrics get them."""
        about = prediction_info(self.info, prediction, self.axis)
        return about, Batch(_NAME, about, prediction, label)


@dataclass
class _Classes(_Output):
    """Counts of pairs of a class and the predicted class."""

    counts: Counter = field(default_factory=Counter)
    classes: int = 2

    def add_rows(self, prediction: np.ndarray, label: np.ndarray) -> None:
        about, batch = self.compare(prediction, label)
        rows = batch.class_rows()
        self.classes = rows.scores.shape[1] if rows.scores.ndim == 2 else 2
        pairs = rows.true * self.classes + rows.predicted(about)
        for pair, count in zip(*np.unique(pairs, return_counts=True), strict=True):
            self.counts[divmod(int(pair), self.classes)] += int(count)

    def result(self) -> dict[str, Any]:
        pairs = [[*pair, count] for pair, count in sorted(self.counts.items())]
        return {"kind": "classes", "classes": self.classes, "confusion": pairs}


@dataclass
class _Numbers(_Output):
    """Predictions and labels of a regression."""

    predictions: list[np.ndarray] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)
    wide: int = 0

    def add_rows(self, prediction: np.ndarray, label: np.ndarray) -> None:
        shown, wanted, counts = self.compare(prediction, label)[1].number_rows()
        if counts is not None:  # elements that do not count are no labels
            wanted = np.where(counts, wanted, np.nan)
        if shown.shape[1] > COLUMNS:
            self.wide = shown.shape[1]
            return
        self.predictions.append(shown)
        self.labels.append(wanted)

    def result(self) -> dict[str, Any]:
        if self.wide or not self.predictions:
            reason = f"a row has {self.wide} numbers, and residuals are kept of up to {COLUMNS}"
            return {"kind": "none", "reason": reason if self.wide else "there is no row"}
        shown, wanted = np.concatenate(self.predictions), np.concatenate(self.labels)
        columns = []
        for p, t in zip(shown.T, wanted.T, strict=True):
            p, t = p[~np.isnan(t)], t[~np.isnan(t)]
            if not len(t):
                continue
            chosen = np.linspace(0, len(p) - 1, min(len(p), POINTS)).astype(int)
            columns.append(
                {
                    "residuals": histogram(p - t),
                    "mean": float(np.mean(p - t)),
                    "rmse": float(np.sqrt(np.mean((p - t) ** 2))),
                    "points": np.column_stack([t, p])[chosen].tolist(),
                }
            )
        return {"kind": "numbers", "columns": columns, "rows": len(shown)}


class _Boxes:
    """Counts of pairs of classes of true and found boxes; the last class is no box."""

    def __init__(self, info: LossInfo, precision: MeanAveragePrecision) -> None:
        self.info, self.confusion = info, BoxConfusion(precision.read)
        self.confusion.begin(PredictionInfo())

    def add_rows(self, prediction: np.ndarray, label: np.ndarray) -> None:
        self.confusion.update(prediction, label)

    def result(self) -> dict[str, Any]:
        matrix = self.confusion.compute()
        pairs = [[int(i), int(j), int(matrix[i, j])] for i, j in np.argwhere(matrix)]
        return {"kind": "classes", "classes": len(matrix), "confusion": pairs, "boxes": True}


def examine_predictions(
    trainer: Any, seconds: float, numbers: np.ndarray | None = None, first: int = 0
) -> dict[str, Any]:
    """Return confusions or residuals, and the rows with the largest loss, as values for JSON.

    They are of the validation data or, without any, of the training data.

    Args:
        trainer: a `Trainer` whose training has ended.
        seconds: how long to compute losses of single rows, at most.
        numbers: numbers of the rows; None: their positions.
        first: number of the first row.
    """
    call = trainer._call
    if call.sharing is not None:
        raise ValueError("several processes trained the model, and each has some of the rows")
    source, name = _examined_data(call)
    evaluator = call.evaluator
    values = call.job.values_to_evaluate(trainer.state)
    one = evaluator.described
    of_boxes = [m for m in trainer.metrics if isinstance(m, MeanAveragePrecision)]
    outputs: dict[str, Any] = {}
    for label, info in one.labels.items():
        if of_boxes and not _has_classes(info):
            outputs[label] = _Boxes(info, of_boxes[0])
            continue
        kind = _Classes if _has_classes(info) else _Numbers
        outputs[label] = kind(info, evaluator.row_axis(str(info.prediction), label))
    single = not one.states and evaluator.fields.fixed_rows in (None, 1)
    worst: list[Any] = []
    count = losses = 0
    numbers = getattr(source, "numbers", None) if numbers is None else numbers
    deadline = time.monotonic() + seconds
    for arrays, predictions in evaluator.examine(values, source):
        for label, output in outputs.items():
            output.add_rows(*_aligned_pair(output.info, predictions, arrays[label]))
        whole = evaluator.fields.row_axes.names_without_rows(arrays)
        rows = next(len(array) for name, array in arrays.items() if name not in whole)
        for i in range(rows if single and losses == count else 0):
            if time.monotonic() > deadline:
                break
            losses += 1
            loss = evaluator.row_loss(values, arrays, i)
            if math.isfinite(loss):
                shown = [_row_values(o, predictions, arrays[n], i) for n, o in outputs.items()]
                worst.append((loss, -(count + i), shown))
        worst = sorted(worst, key=lambda entry: entry[:2], reverse=True)[:WORST]
        count += rows
    return {
        "data": name,
        "rows": count,
        "losses_of": losses,
        "first": first,
        "outputs": [{"name": o.info.prediction, **o.result()} for o in outputs.values()],
        "worst": [
            {
                "row": first + _row_number(-i, numbers),
                "loss": loss,
                "values": shown,
                **_row_file(-i, source),
            }
            for loss, i, shown in worst
        ],
    }


def _examined_data(call: Any) -> tuple[BatchSource, str]:
    """Return the validation data, or the training data if they are in memory, and their kind."""
    if call.validated is not None:
        return call.validated, "validation"
    if isinstance(call.source, ArraySource):
        return call.source, "training"
    raise ValueError("there are no validation data, and the training data are not in memory")


def _row_number(row: int, numbers: np.ndarray | None) -> int:
    return row if numbers is None else int(numbers[row])


def _row_file(row: int, source: BatchSource) -> dict[str, str]:
    """Return the name and the picture of the file of a row, where rows are files."""
    if not isinstance(source, ReaderSource):
        return {}
    return describe_row(source.reader, _row_number(row, source.numbers))


def _has_classes(info: LossInfo) -> bool:
    return info.classes is not None or info.threshold is not None


def _aligned_pair(
    info: LossInfo, predictions: Arrays, label: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return predictions and labels, shifted by a step where the loss predicts the next token."""
    assert info.prediction is not None
    shown = predictions[info.prediction]
    return (shown[:, :-1], label[:, 1:]) if info.shift else (shown, label)


def _row_values(output: Any, predictions: Arrays, label: np.ndarray, row: int) -> dict[str, Any]:
    """Return the label and the prediction of a row: class numbers, or some of the elements."""
    prediction, wanted = _aligned_pair(output.info, predictions, label)
    if len(prediction) != len(label):
        return {"label": None, "prediction": None}
    prediction, wanted = prediction[row : row + 1], wanted[row : row + 1]
    if not _has_classes(output.info):
        return {"label": _first_elements(wanted), "prediction": _first_elements(prediction)}
    about, batch = output.compare(prediction, wanted)
    rows = batch.class_rows()
    shown = {
        "label": _first_elements(rows.true),
        "prediction": _first_elements(rows.predicted(about)),
    }
    scores = rows.scores.max(axis=1) if rows.scores.ndim == 2 else rows.scores
    return {**shown, "score": _first_elements(scores), "classes": True}


def _first_elements(array: np.ndarray) -> list[Any]:
    """Return the first elements, and an ellipsis if there are more."""
    flat = np.asarray(array).ravel()
    if flat.dtype.kind == "V" or flat.dtype.name == "bfloat16":
        flat = flat.astype(np.float32)
    return [*flat[:_MOST_ELEMENTS].tolist(), *(["…"] if flat.size > _MOST_ELEMENTS else [])]


def class_name(index: Any, classes: Sequence[Any] | None) -> str:
    """Return the name of a class; its number without names."""
    if classes and isinstance(index, int) and 0 <= index < len(classes):
        return str(classes[index])
    return str(index)
