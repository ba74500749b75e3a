"""Predictions of a trained model: confusions, residuals, and the rows with the largest loss."""

from __future__ import annotations

import base64
import io
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.data.image_files import is_image, is_path, open_image
from onnxgrad.losses.info import LossInfo
from onnxgrad.metrics.average_precision import BoxConfusion, MeanAveragePrecision
from onnxgrad.metrics.base import PredictionInfo
from onnxgrad.metrics.metric_batch import MetricBatch
from onnxgrad.training.batches import ArraySource, BatchSource
from onnxgrad.training.fit import Fit
from onnxgrad.training.output_metrics import prediction_info
from onnxgrad.training.trainer import Trainer

BINS = 40  # intervals of a histogram
WORST = 20  # rows of largest loss that are shown
POINTS = 1000  # most points of a scatter of predictions
COLUMNS = 8  # most numbers of a row for which residuals are kept
EDGE = 64  # pixels of the longer side of a picture of a row
_LOSSLESS = 32 * 32  # pixels up to which PNG is as small as JPEG
_MOST_ELEMENTS = 6  # elements of a label or a prediction that are shown
_NAME = "report"  # the metric that error messages name

Arrays = Mapping[str, np.ndarray]


@dataclass
class _ExaminedOutput:
    """An output of the model, the loss that reads the output, and the index of the output's row
    axis.
    """

    info: LossInfo
    axis: int  # axis of rows in the output

    def to_metric_batch(
        self, prediction: np.ndarray, label: np.ndarray
    ) -> tuple[PredictionInfo, MetricBatch]:
        """Return the `PredictionInfo` and the `MetricBatch` of predictions and labels."""
        about = prediction_info(self.info, prediction, self.axis)
        return about, MetricBatch(_NAME, about, prediction, label)


@dataclass
class _ConfusionCounts(_ExaminedOutput):
    """Confusions: counts of (class of the label, predicted class)."""

    counts: Counter = field(default_factory=Counter)
    classes: int = 2

    def add_rows(self, prediction: np.ndarray, label: np.ndarray) -> None:
        about, batch = self.to_metric_batch(prediction, label)
        rows = batch.class_rows()
        self.classes = rows.scores.shape[1] if rows.scores.ndim == 2 else 2
        pairs = rows.true_classes * self.classes + rows.predicted_classes(about)
        for pair, count in zip(*np.unique(pairs, return_counts=True), strict=True):
            self.counts[divmod(int(pair), self.classes)] += int(count)

    def result(self) -> dict[str, Any]:
        pairs = [[*pair, count] for pair, count in sorted(self.counts.items())]
        return {"kind": "classes", "classes": self.classes, "confusion": pairs}


@dataclass
class _RegressionResiduals(_ExaminedOutput):
    """Predictions, labels and residuals of a regression."""

    predictions: list[np.ndarray] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)
    wide: int = 0

    def add_rows(self, prediction: np.ndarray, label: np.ndarray) -> None:
        shown, wanted, counts = self.to_metric_batch(prediction, label)[1].float_rows()
        if counts is not None:  # elements that the loss ignores have no label
            wanted = np.where(counts, wanted, np.nan)
        if shown.shape[1] > COLUMNS:
            self.wide = shown.shape[1]
            return
        self.predictions.append(shown)
        self.labels.append(wanted)

    def result(self) -> dict[str, Any]:
        if self.wide or not self.predictions:
            reason = f"a row has {self.wide} numbers, and residuals of up to {COLUMNS} are kept"
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


class _BoxConfusions:
    """Confusions of detection: counts of (true class, found class); the last class is "no box"."""

    def __init__(self, info: LossInfo, precision: MeanAveragePrecision) -> None:
        self.info, self.confusion = info, BoxConfusion(precision.read)
        self.confusion.begin(PredictionInfo())

    def add_rows(self, prediction: np.ndarray, label: np.ndarray) -> None:
        self.confusion.update(prediction, label)

    def result(self) -> dict[str, Any]:
        matrix = self.confusion.compute()
        pairs = [[int(i), int(j), int(matrix[i, j])] for i, j in np.argwhere(matrix)]
        return {"kind": "classes", "classes": len(matrix), "confusion": pairs, "boxes": True}


_PredictionErrors = _ConfusionCounts | _RegressionResiduals | _BoxConfusions


def examine_predictions(
    trainer: Trainer, seconds: float, numbers: np.ndarray | None = None, first: int = 0
) -> dict[str, Any]:
    """Return confusions or residuals, and the rows with the largest loss, as values for JSON.

    The rows are validation data or, without any, training data.

    Args:
        trainer: a `Trainer` whose training has ended.
        seconds: how long to compute losses of single rows, at most.
        numbers: numbers of the rows; None: their positions.
        first: number of the first row.
    """
    call = trainer._call
    assert call is not None
    if call.sharing is not None:
        raise ValueError(
            "the predictions are not in this record: several processes trained the model, and each "
            "has only a part of the rows; train in one process to record them"
        )
    source, name = _data_to_report(call)
    evaluator = call.evaluator
    values = call.job.values_to_evaluate(trainer.state)
    one = evaluator.member_objective
    of_boxes = [m for m in trainer.metrics if isinstance(m, MeanAveragePrecision)]
    outputs: dict[str, _PredictionErrors] = {}
    for label, info in one.labels.items():
        if of_boxes and not _has_classes(info):
            outputs[label] = _BoxConfusions(info, of_boxes[0])
            continue
        axis = evaluator.row_axis(str(info.prediction), label)
        kind = _ConfusionCounts if _has_classes(info) else _RegressionResiduals
        outputs[label] = kind(info, axis)
    single = not one.states and evaluator.fields.fixed_rows in (None, 1)
    worst: list[Any] = []
    count = losses = 0
    reader = getattr(source, "reader", None)
    order = source.numbers if isinstance(source, ArraySource) else source.unshuffled_order
    numbers = order if numbers is None else numbers
    deadline = time.monotonic() + seconds
    for arrays, predictions in evaluator.predict_batches(values, source):
        for label, output in outputs.items():
            output.add_rows(*_aligned_predictions(output.info, predictions, arrays[label]))
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
                "row": first + _index_of_row(-i, numbers),
                "loss": loss,
                "values": shown,
                **describe_row(reader, _index_of_row(-i, order)),
            }
            for loss, i, shown in worst
        ],
    }


def _data_to_report(call: Fit) -> tuple[BatchSource, str]:
    """Return (rows to examine, "validation" or "training"): validation data, or else training data
    in memory.
    """
    if call.validated is not None:
        return call.validated, "validation"
    if isinstance(call.source, ArraySource):
        return call.source, "training"
    raise ValueError("no validation data, nor arrays to train on: pass either of these to fit")


def _index_of_row(row: int, numbers: np.ndarray | None) -> int:
    return row if numbers is None else int(numbers[row])


def describe_row(reader: Any, row: int) -> dict[str, str]:
    """Return {"file": path, "picture": data URI} of a row that a file in the reader's folder holds.

    The result is empty for a reader without `files`, and lacks `picture` for other files than
    readable images.
    """
    files = getattr(reader, "files", None)
    if not isinstance(files, list) or not is_path(files[row]):
        return {}
    file, folder = Path(files[row]), Path(getattr(reader, "path", "."))
    name = file.relative_to(folder) if file.is_relative_to(folder) else file
    shown = {"file": name.as_posix()}
    if is_image(file):
        with suppress(OSError, ValueError, ImportError):  # the name of the file is enough
            shown["picture"] = image_data_uri(file)
    return shown


def image_data_uri(file: str | os.PathLike) -> str:
    """Return a small copy of the image in `file` as a data URI."""
    image = open_image(file)
    image.thumbnail((EDGE, EDGE))
    kind = "png" if image.width * image.height <= _LOSSLESS else "jpeg"
    out = io.BytesIO()
    image.save(out, kind, **({"quality": 80} if kind == "jpeg" else {}))
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"


def _has_classes(info: LossInfo) -> bool:
    return info.classes is not None or info.threshold is not None


def _aligned_predictions(
    info: LossInfo, predictions: Arrays, label: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (predictions, labels); for a next-token loss, without the last prediction and first
    label.
    """
    assert info.prediction is not None
    shown = predictions[info.prediction]
    return (shown[:, :-1], label[:, 1:]) if info.shift else (shown, label)


def _row_values(
    output: _PredictionErrors, predictions: Arrays, label: np.ndarray, row: int
) -> dict[str, Any]:
    """Return {"label": ..., "prediction": ...} of one row: class indices, or the first elements."""
    prediction, wanted = _aligned_predictions(output.info, predictions, label)
    if len(prediction) != len(label):
        return {"label": None, "prediction": None}
    prediction, wanted = prediction[row : row + 1], wanted[row : row + 1]
    if isinstance(output, _BoxConfusions) or not _has_classes(output.info):
        return {"label": _first_elements(wanted), "prediction": _first_elements(prediction)}
    about, batch = output.to_metric_batch(prediction, wanted)
    rows = batch.class_rows()
    shown = {
        "label": _first_elements(rows.true_classes),
        "prediction": _first_elements(rows.predicted_classes(about)),
    }
    scores = rows.scores.max(axis=1) if rows.scores.ndim == 2 else rows.scores
    return {**shown, "score": _first_elements(scores), "classes": True}


def _first_elements(array: np.ndarray) -> list[Any]:
    """Return the first elements of an array as a list, with an ellipsis for more."""
    flat = np.asarray(array).ravel()
    if flat.dtype.kind == "V" or flat.dtype.name == "bfloat16":
        flat = flat.astype(np.float32)
    return [*flat[:_MOST_ELEMENTS].tolist(), *(["…"] if flat.size > _MOST_ELEMENTS else [])]


def histogram(array: np.ndarray) -> dict[str, Any]:
    """Return a histogram from the smallest to the largest element, as values for JSON.

    `low` and `high` are these elements, `counts` the number of elements in each of `BINS` equal
    intervals between them.
    """
    flat = np.asarray(array).astype(np.float64, copy=False).ravel()
    if not flat.size:
        return {"low": 0.0, "high": 0.0, "counts": []}
    low, high = float(flat.min()), float(flat.max())
    bins = BINS if high > low else 1
    return {"low": low, "high": high, "counts": np.histogram(flat, bins)[0].tolist()}


def class_name(index: Any, classes: Sequence[Any] | None) -> str:
    """Return the name of the class with an index; the index as text if classes have no names."""
    if classes and isinstance(index, int) and 0 <= index < len(classes):
        return str(classes[index])
    return str(index)
