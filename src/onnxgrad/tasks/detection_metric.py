"""Mean average precision."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

import onnxgrad as og
from onnxgrad.tasks.detection_heads import Decoder, Head


class MeanAveragePrecision(og.Metric):
    """Mean over classes, and thresholds of the IoU, of the average precision, by pycocotools.

    Args:
        head: what predictions mean, such as `Detection.head`.
        iou: the threshold; None: 0.5, 0.55, ..., 0.95, as COCO does.
        score, overlap: of non-maximum suppression: the least score, the largest IoU of a class.

    Raises:
        ImportError: pycocotools is not installed.

    Examples:
        >>> from onnxgrad.tasks.detection import Head, MeanAveragePrecision
        >>> MeanAveragePrecision(Head("yolov8", 80, (640, 640)), iou=0.5).name
        'map50'
    """

    def __init__(
        self, head: Head | Decoder, iou: float | None = None, score: float = 0.001,
        overlap: float = 0.65,
    ) -> None:  # fmt: skip
        _coco()
        self.decoder = head if isinstance(head, Decoder) else Decoder(head)
        self.iou, self.score, self.overlap = iou, score, overlap
        self.name = "map" if iou is None else f"map{round(100 * iou)}"

    def begin(self, prediction: og.PredictionInfo) -> None:
        """Forget all batches."""
        super().begin(prediction)
        self._true: list[np.ndarray] = []
        self._found: list[np.ndarray] = []

    def update(
        self, prediction: np.ndarray, label: np.ndarray, weight: np.ndarray | None = None
    ) -> None:
        """Add a batch; raise ValueError for sample weights."""
        self.check_begun()
        if weight is not None:
            raise ValueError(f"metric {self.name!r} takes no sample weights: leave them out")
        self._found += self.decoder(prediction, self.score, self.overlap)
        self._true += [boxes[boxes[:, 0] >= 0, :5] for boxes in label]

    def compute(self) -> float:
        """Return the value over all batches since `begin`."""
        self.check_begun()
        images = [{"id": i + 1} for i in range(len(self._true))]
        notes: list[dict[str, Any]] = [
            {"image_id": i + 1, "category_id": int(c), "bbox": extent(box), "iscrowd": 0}
            for i, boxes in enumerate(self._true)
            for c, *box in boxes.tolist()
        ]
        if not notes:
            raise ValueError(f"metric {self.name!r} has nothing to compute: there are no boxes")
        for number, note in enumerate(notes, 1):
            note |= {"id": number, "area": float(np.prod(note["bbox"][2:]))}
        found = [
            {"image_id": i + 1, "category_id": int(c), "bbox": extent(box), "score": score}
            for i, boxes in enumerate(self._found)
            for c, score, *box in boxes.tolist()
        ]
        classes = [{"id": i} for i in range(self.decoder.head.classes)]
        true = {"images": images, "annotations": notes, "categories": classes, "info": {}}
        return _average_precision(true, found, self.iou) if found else 0.0


def _coco() -> Any:
    try:
        from pycocotools import coco, cocoeval  # type: ignore[import-untyped]
    except ImportError as e:
        raise ImportError("mean average precision needs pip install pycocotools") from e
    return coco.COCO, cocoeval.COCOeval


def extent(box: Sequence[float]) -> list[float]:
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
