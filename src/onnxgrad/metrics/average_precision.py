"""Mean average precision of detectors."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxgrad.errors import not_installed
from onnxgrad.metrics.base import Metric, PredictionInfo

Boxes = Sequence[np.ndarray]


class MeanAveragePrecision(Metric):
    """Mean over classes, and thresholds of the IoU, of the average precision, by pycocotools.

    Args:
        read: from a batch of predictions and labels to the boxes of both, an array for each image:
            found ones (n, 6), class, score, x1, y1, x2, y2; true ones (n, 5), without the score.
        iou: the threshold, and `name` is such as "map50"; None: 0.5, 0.55, ..., 0.95, as COCO does,
            and it is "map".

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
        self, read: Callable[[Any, Any], tuple[Boxes, Boxes]], iou: float | None = None
    ) -> None:
        _coco()
        self.read, self.iou = read, iou
        self.name = "map" if iou is None else f"map{round(100 * iou)}"

    def begin(self, prediction: PredictionInfo) -> None:
        """Forget all batches."""
        super().begin(prediction)
        self._true: list[np.ndarray] = []
        self._found: list[np.ndarray] = []

    def update(self, prediction: Any, label: Any, weight: np.ndarray | None = None) -> None:
        """Add a batch; raise ValueError for sample weights."""
        self.check_begun()
        if weight is not None:
            raise ValueError(f"metric {self.name!r} takes no sample weights: leave them out")
        found, true = self.read(prediction, label)
        self._found += found
        self._true += true

    def compute(self) -> float:
        """Return the value over all batches since `begin`."""
        self.check_begun()
        images = [{"id": i + 1} for i in range(len(self._true))]
        notes: list[dict[str, Any]] = [
            {"image_id": i + 1, "category_id": int(c), "bbox": _extent(box), "iscrowd": 0}
            for i, boxes in enumerate(self._true)
            for c, *box in boxes.tolist()
        ]
        if not notes:
            raise ValueError(f"metric {self.name!r} has nothing to compute: there are no boxes")
        for number, note in enumerate(notes, 1):
            note |= {"id": number, "area": float(np.prod(note["bbox"][2:]))}
        found = [
            {"image_id": i + 1, "category_id": int(c), "bbox": _extent(box), "score": score}
            for i, boxes in enumerate(self._found)
            for c, score, *box in boxes.tolist()
        ]
        classes = [{"id": i} for i in sorted({note["category_id"] for note in notes + found})]
        true = {"images": images, "annotations": notes, "categories": classes, "info": {}}
        return _average_precision(true, found, self.iou) if found else 0.0


def _coco() -> Any:
    try:
        from pycocotools import coco, cocoeval  # type: ignore[import-untyped]
    except ImportError as e:
        raise not_installed("mean average precision", "pycocotools", "detection") from e
    return coco.COCO, cocoeval.COCOeval


def _extent(box: Sequence[float]) -> list[float]:
    """Return x, y, width and height of x1, y1, x2, y2."""
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]]


def _average_precision(true: dict, found: list[dict], iou: float | None) -> float:
    COCO, COCOeval = _coco()
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
    precision = evaluation.eval["precision"]
    return float(precision[precision > -1].mean())
