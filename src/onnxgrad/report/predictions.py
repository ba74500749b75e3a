"""What a trained model predicts: confusions, residuals, and the rows with the largest loss."""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxgrad.losses.info import LossInfo
from onnxgrad.metrics.metric_batch import Batch
from onnxgrad.report.measures import histogram
from onnxgrad.report.row_files import describe_row
from onnxgrad.training.batches import ArraySource, BatchSource, ReaderSource
from onnxgrad.training.output_metrics import prediction_info

WORST = 20  # rows
POINTS = 1000  # of a scatter of predictions
COLUMNS = 8  # numbers of a row whose residuals are kept
_MOST_ELEMENTS = 6  # elements of a label or a prediction
_NAME = "report"  # of the metric in messages of what does not fit

Arrays = Mapping[str, np.ndarray]


@dataclass
class _Classes:
    """Counts of pairs of a class and the predicted one."""

    info: LossInfo
    axis: int  # of the rows in the output of the model
    counts: Counter = field(default_factory=Counter)
    classes: int = 2

    def add(self, prediction: np.ndarray, label: np.ndarray) -> None:
        about = prediction_info(self.info, prediction, self.axis)
        rows = Batch(_NAME, about, prediction, label).class_rows()
        self.classes = rows.scores.shape[1] if rows.scores.ndim == 2 else 2
        pairs = rows.true * self.classes + rows.predicted(about)
        for pair, count in zip(*np.unique(pairs, return_counts=True), strict=True):
            self.counts[divmod(int(pair), self.classes)] += int(count)

    def result(self) -> dict[str, Any]:
        pairs = [[*pair, count] for pair, count in sorted(self.counts.items())]
        return {"kind": "classes", "classes": self.classes, "confusion": pairs}


@dataclass
class _Numbers:
    """Predictions and labels of a regression."""

    info: LossInfo
    axis: int  # of the rows in the output of the model
    predictions: list[np.ndarray] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)
    wide: int = 0

    def add(self, prediction: np.ndarray, label: np.ndarray) -> None:
        info = prediction_info(self.info, prediction, self.axis)
        shown, wanted, counts = Batch(_NAME, info, prediction, label).number_rows()
        if counts is not None:  # the others are no labels
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


@dataclass
class Examination:
    """The predictions of a trained model for validation data, or for those that it trained on."""

    trainer: Any
    seconds: float  # for losses of single rows
    numbers: np.ndarray | None = None  # of the rows, where they are not their positions
    first: int = 0  # the number of the first row

    def run(self) -> dict[str, Any]:
        """Return what is found, as values for JSON."""
        call = self.trainer._call
        if call.sharing is not None:
            raise ValueError("several processes trained the model, and each has some of the rows")
        source, name = self._source(call)
        evaluator = call.evaluator
        values = call.job.values_to_evaluate(self.trainer.state)
        one = evaluator.described
        parts = {
            label: (_Numbers if info.classes is None and info.threshold is None else _Classes)(
                info, evaluator.row_axis(str(info.prediction), label)
            )
            for label, info in one.labels.items()
        }
        single = not one.states and evaluator.fields.fixed_rows in (None, 1)
        worst: list[Any] = []
        count = losses = 0
        deadline = time.monotonic() + self.seconds
        for arrays, predictions in evaluator.examine(values, source):
            for label, part in parts.items():
                part.add(*_pair(part.info, predictions, arrays[label]))
            whole = evaluator.fields.row_axes.without_rows(arrays)
            rows = next(len(array) for name, array in arrays.items() if name not in whole)
            for i in range(rows if single and losses == count else 0):
                if time.monotonic() > deadline:
                    break
                losses += 1
                loss = evaluator.row_loss(values, arrays, i)
                if math.isfinite(loss):
                    shown = [_row_values(p, predictions, arrays[n], i) for n, p in parts.items()]
                    _keep(worst, (loss, -(count + i), shown))
            count += rows
        worst.sort(key=lambda entry: entry[:2], reverse=True)
        return {
            "data": name,
            "rows": count,
            "losses_of": losses,
            "first": self.first,
            "outputs": [{"name": p.info.prediction, **p.result()} for p in parts.values()],
            "worst": [
                {
                    "row": self._number(-i, source),
                    "loss": loss,
                    "values": shown,
                    **self._file(-i, source),
                }
                for loss, i, shown in worst
            ],
        }

    def _source(self, call: Any) -> tuple[BatchSource, str]:
        if call.validated is not None:
            return call.validated, "validation"
        source = None if call.loop is None else call.loop.source
        if isinstance(source, ArraySource):
            return source, "training"
        raise ValueError("there are no validation data, and those of training are not in memory")

    def _number(self, row: int, source: BatchSource) -> int:
        numbers = getattr(source, "numbers", None) if self.numbers is None else self.numbers
        return self.first + (row if numbers is None else int(numbers[row]))

    def _file(self, row: int, source: BatchSource) -> dict[str, str]:
        """Return the name and the picture of the file of a row, where rows are files."""
        if not isinstance(source, ReaderSource):
            return {}
        return describe_row(
            source.reader, row if source.numbers is None else int(source.numbers[row])
        )


def _keep(worst: list[Any], entry: tuple[float, int, Any]) -> None:
    """Add an entry to the heap of those with the largest loss."""
    if len(worst) < WORST:
        heapq.heappush(worst, entry)
    elif entry[:2] > worst[0][:2]:
        heapq.heapreplace(worst, entry)


def _pair(info: LossInfo, predictions: Arrays, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return predictions and labels, as metrics get them."""
    assert info.prediction is not None
    shown = predictions[info.prediction]
    return (shown[:, :-1], label[:, 1:]) if info.shift else (shown, label)


def _row_values(
    part: _Classes | _Numbers, predictions: Arrays, label: np.ndarray, row: int
) -> dict[str, Any]:
    """Return the label and the prediction of a row: class numbers, or some of the elements."""
    info = part.info
    prediction, wanted = _pair(info, predictions, label)
    if len(prediction) != len(label):
        return {"label": None, "prediction": None}
    prediction, wanted = prediction[row : row + 1], wanted[row : row + 1]
    if info.classes is None and info.threshold is None:
        return {"label": _first(wanted), "prediction": _first(prediction)}
    about = prediction_info(info, prediction, part.axis)
    rows = Batch(_NAME, about, prediction, wanted).class_rows()
    shown = {"label": _first(rows.true), "prediction": _first(rows.predicted(about))}
    scores = rows.scores.max(axis=1) if rows.scores.ndim == 2 else rows.scores
    return {**shown, "score": _first(scores), "classes": True}


def _first(array: np.ndarray) -> list[Any]:
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
