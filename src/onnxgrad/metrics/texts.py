"""Error rates of texts that are read from images or speech."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onnxgrad.errors import not_installed
from onnxgrad.metrics.base import Metric, PredictionInfo


class TextErrorRate(Metric):
    """Error rate of texts: (insertions + deletions + substitutions) / characters of the labels.

    Both are sums over all texts, as in jiwer and torchmetrics. It may exceed 1.

    Args:
        read: from a batch of predictions and labels to the texts of both.
        unit: "characters", its `name` is "cer"; or "words" between spaces, "wer".

    Raises:
        ImportError: rapidfuzz is not installed.
        ValueError: another unit.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> words = og.metrics.TextErrorRate(lambda p, y: (["one too"], ["one two"]), "words")
        >>> words.begin(og.metrics.PredictionInfo())
        >>> words.update(np.zeros(1), np.zeros(1))
        >>> words.name, words.compute()
        ('wer', 0.5)
    """

    higher_is_better = False

    def __init__(
        self,
        read: Callable[[np.ndarray, np.ndarray], tuple[list[str], list[str]]],
        unit: str = "characters",
    ) -> None:
        if unit not in ("characters", "words"):
            raise ValueError(f"unit={unit!r} must be 'characters' or 'words'")
        try:
            import rapidfuzz  # noqa: F401
        except ImportError as e:
            raise not_installed("the error rate of texts", "rapidfuzz", "ocr") from e
        self.read, self.unit, self.name = read, unit, "cer" if unit == "characters" else "wer"

    def begin(self, prediction: PredictionInfo) -> None:
        """Forget all batches."""
        super().begin(prediction)
        self.edits, self.length = 0.0, 0.0

    def update(
        self, prediction: np.ndarray, label: np.ndarray, weight: np.ndarray | None = None
    ) -> None:
        """Add a batch; weights are those of its rows."""
        from rapidfuzz.distance import Levenshtein

        factors = np.ones(len(label)) if weight is None else np.asarray(weight)
        if factors.shape != (len(label),):
            raise ValueError(f"metric {self.name!r} takes a weight for each row")
        for text, truth, factor in zip(*self.read(prediction, label), factors, strict=True):
            parts = (text, truth) if self.unit == "characters" else (text.split(), truth.split())
            self.edits += factor * Levenshtein.distance(*parts)
            self.length += factor * len(parts[1])

    def compute(self) -> float:
        """Return the rate of all batches; raise ValueError if labels are empty."""
        self.check_begun()
        if not self.length:
            raise ValueError(f"metric {self.name!r} has nothing to compute: all labels are empty")
        return float(self.edits / self.length)
