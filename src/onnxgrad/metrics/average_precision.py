"""Metrics of object detectors: mean average precision, and the confusion matrix of boxes."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxgrad.errors import not_installed
from onnxgrad.metrics.base import Metric, PredictionInfo, refuse_weights

Boxes = Sequence[np.ndarray]


class _BoxMetric(Metric):
    """Base of metrics of boxes, computed from the boxes of all batches together."""

    def __init__(self, read: Callable[[Any, Any], tuple[Boxes, Boxes]]) -> None:
        self.read = read

    def begin(self, prediction: PredictionInfo) -> None:
        """Forget all batches of earlier evaluations."""
        super().begin(prediction)
        self._true: list[np.ndarray] = []
        self._found: list[np.ndarray] = []

    def update(self, prediction: Any, label: Any, weight: np.ndarray | None = None) -> None:
        """Add a batch of predictions and labels; raise `ValueError` for sample weights."""
        self.check_begun()
        refuse_weights(self.name, weight)
        found, true = self.read(prediction, label)
        self._found += found
        self._true += true


class MeanAveragePrecision(_BoxMetric):
    """Mean average precision (mAP) over classes and IoU thresholds, computed by pycocotools.

    Args:
        read: function from a batch of predictions and labels to the boxes of both, an array for
            each image: found boxes (n, 6), class, score, x1, y1, x2, y2; true boxes (n, 5), without
            the score.
        iou: the threshold, as in the `name` "map50"; None: 0.5, 0.55, ..., 0.95, as COCO does, and
            the `name` is "map".
        per_class: the number of classes: the value is an array with the average precision of each
            class, NaN for a class without boxes, and `name` ends with "_per_class". None: the mean.

    Raises:
        ImportError: pycocotools is not installed.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> metric = og.metrics.MeanAveragePrecision(lambda p, y: (p, y), iou=0.5)
        >>> metric.begin(og.metrics.PredictionInfo())
        >>> metric.update([np.array([[0, 0.9, 0, 0, 8, 8]])], [np.array([[0, 0, 0, 8, 7]])])
        >>> metric.name, round(metric.compute(), 6)
        ('map50', 1.0)
    """

    def __init__(
        self,
        read: Callable[[Any, Any], tuple[Boxes, Boxes]],
        iou: float | None = None,
        per_class: int | None = None,
    ) -> None:
        _import_pycocotools()
        super().__init__(read)
        self.iou, self.per_class = iou, per_class
        self.name = "map" if iou is None else f"map{round(100 * iou)}"
        if per_class is not None:
            self.name += "_per_class"

    def compute(self) -> float | np.ndarray:
        """Return the mean average precision over all batches since `begin`."""
        self.check_begun()
        images = [{"id": i + 1} for i in range(len(self._true))]
        notes: list[dict[str, Any]] = [
            {"image_id": i + 1, "category_id": int(c), "bbox": _as_coco_box(box), "iscrowd": 0}
            for i, boxes in enumerate(self._true)
            for c, *box in boxes.tolist()
        ]
        if not notes:
            raise ValueError(
                f"metric {self.name!r} has nothing to compute: the labels have no boxes; evaluate "
                "rows with boxes"
            )
        for number, note in enumerate(notes, 1):
            note |= {"id": number, "area": float(np.prod(note["bbox"][2:]))}
        found = [
            {"image_id": i + 1, "category_id": int(c), "bbox": _as_coco_box(box), "score": score}
            for i, boxes in enumerate(self._found)
            for c, score, *box in boxes.tolist()
        ]
        classes = [{"id": i} for i in sorted({note["category_id"] for note in notes + found})]
        true = {"images": images, "annotations": notes, "categories": classes, "info": {}}
        by_class = dict.fromkeys({int(note["category_id"]) for note in notes}, np.zeros(1))
        if found:
            by_class = _precision_by_class(true, found, self.iou)
        if self.per_class is None:
            return float(np.concatenate([*by_class.values()]).mean())
        means = (by_class.get(i, np.array(np.nan)).mean() for i in range(self.per_class))
        return np.array([*means])


class BoxConfusion(_BoxMetric):
    """Confusion matrix (classes + 1, classes + 1): the number of boxes of class i that are detected
    as class j.

    The last row counts found boxes without a true box, the last column true boxes that are not
    found. A true box belongs to the found box that overlaps it most, one to one.

    Args:
        read: as in `MeanAveragePrecision`.
        classes: the number of classes; None: up to the largest class of a box.
        score: the least score of a found box.
        iou: the least overlap of a true and a found box.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> metric = og.metrics.BoxConfusion(lambda p, y: (p, y), classes=1)
        >>> metric.begin(og.metrics.PredictionInfo())
        >>> metric.update([np.array([[0, 0.9, 0, 0, 8, 8]])], [np.array([[0, 0, 0, 8, 7]])])
        >>> metric.compute().tolist()
        [[1, 0], [0, 0]]
    """

    name = "confusion_matrix"
    higher_is_better = None

    def __init__(
        self,
        read: Callable[[Any, Any], tuple[Boxes, Boxes]],
        classes: int | None = None,
        score: float = 0.25,
        iou: float = 0.5,
    ) -> None:
        super().__init__(read)
        self.classes, self.score, self.iou = classes, score, iou

    def compute(self) -> np.ndarray:
        """Return the confusion matrix over all batches since `begin`."""
        self.check_begun()
        count = self.classes
        if count is None:
            count = int(max((n for b in self._true + self._found for n in b[:, 0]), default=-1)) + 1
        matrix = np.zeros((count + 1, count + 1), np.int64)
        for true, boxes in zip(self._true, self._found, strict=True):
            found = boxes[boxes[:, 1] >= self.score]
            overlaps = _box_overlaps(true[:, 1:], found[:, 2:])
            rows, columns = np.nonzero(overlaps >= self.iou)
            free_rows, free_columns = {*range(len(true))}, {*range(len(found))}
            for at in np.argsort(-overlaps[rows, columns], kind="stable"):
                row, column = int(rows[at]), int(columns[at])
                if row in free_rows and column in free_columns:
                    matrix[int(true[row, 0]), int(found[column, 0])] += 1
                    free_rows.remove(row)
                    free_columns.remove(column)
            for row in free_rows:
                matrix[int(true[row, 0]), count] += 1
            for column in free_columns:
                matrix[count, int(found[column, 0])] += 1
        return matrix


def _box_overlaps(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the IoU (n, m) of each pair of boxes from `first` (n, 4) and `second` (m, 4)."""
    near = np.maximum(first[:, None, :2], second[None, :, :2])
    far = np.minimum(first[:, None, 2:], second[None, :, 2:])
    both = np.prod(np.maximum(far - near, 0), axis=2)
    areas = [np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) for boxes in (first, second)]
    return np.asarray(both / np.maximum(areas[0][:, None] + areas[1][None] - both, 1e-9))


def _import_pycocotools() -> Any:
    """Return the classes COCO and COCOeval of pycocotools."""
    try:
        from pycocotools import coco, cocoeval  # type: ignore[import-untyped]
    except ImportError as e:
        raise not_installed("mean average precision", "pycocotools", "detection") from e
    return coco.COCO, cocoeval.COCOeval


def _as_coco_box(box: Sequence[float]) -> list[float]:
    """Return a box (x1, y1, x2, y2) as (x, y, width, height)."""
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]]


def _precision_by_class(true: dict, found: list[dict], iou: float | None) -> dict[int, np.ndarray]:
    """Return {class: precision at all levels of recall}, without classes that have no boxes."""
    COCO, COCOeval = _import_pycocotools()
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = true
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(found), "bbox")
        evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
        evaluation.params.maxDets = [100]
        if iou is not None:
            evaluation.params.iouThrs = np.array([iou])
        evaluation.evaluate()
        evaluation.accumulate()
    by_class = np.moveaxis(evaluation.eval["precision"], 2, 0)
    numbers = evaluation.params.catIds
    return {n: own[own > -1] for n, own in zip(numbers, by_class, strict=True) if own.max() > -1}
