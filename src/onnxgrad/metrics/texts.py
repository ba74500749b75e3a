"""Metrics of texts: error rates of characters and words, and the F1 of named entities."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from onnxgrad.errors import not_installed
from onnxgrad.metrics.base import Metric, PredictionInfo, refuse_weights


class TextErrorRate(Metric):
    """Error rate of texts: (insertions + deletions + substitutions) / characters of the labels.

    Both sums are over all texts, as in jiwer and torchmetrics. The rate may exceed 1.

    Args:
        read: function from a batch of predictions and labels to the texts of both.
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
        """Forget all batches of earlier evaluations."""
        super().begin(prediction)
        self.edits, self.length = 0.0, 0.0

    def update(
        self, prediction: np.ndarray, label: np.ndarray, weight: np.ndarray | None = None
    ) -> None:
        """Add a batch of predictions and labels, with one weight for each row."""
        from rapidfuzz.distance import Levenshtein

        factors = np.ones(len(label)) if weight is None else np.asarray(weight)
        if factors.shape != (len(label),):
            raise ValueError(f"metric {self.name!r} needs one weight for each row")
        for text, truth, factor in zip(*self.read(prediction, label), factors, strict=True):
            parts = (text, truth) if self.unit == "characters" else (text.split(), truth.split())
            self.edits += factor * Levenshtein.distance(*parts)
            self.length += factor * len(parts[1])

    def compute(self) -> float:
        """Return the error rate of all batches; raise ValueError if all labels are empty."""
        self.check_begun()
        if not self.length:
            raise ValueError(
                f"metric {self.name!r} has nothing to compute, as all labels are empty: evaluate "
                "rows with text"
            )
        return float(self.edits / self.length)


class EntityF1(Metric):
    """F1 = 2 P R / (P + R) of whole entities, as the library seqeval counts them.

    An entity is right if its first word, its last word and its kind are right. A row is a sentence.

    Args:
        classes: names of the classes in the order of their numbers, as `B-PER`, `I-PER` and `O`.
        scheme: "IOB2", "IOBES" or another scheme of seqeval, in its strict mode. None: as the
            script of CoNLL, where an entity may begin with `I-`.

    Raises:
        ImportError: seqeval is not installed.
        ValueError: an unknown scheme.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> f1 = og.metrics.EntityF1(["O", "B-PER", "I-PER"])
        >>> f1.begin(og.metrics.PredictionInfo(classes=3, axis=2, ignore_index=-100))
        >>> f1.update(np.eye(3)[[[1, 2, 0, 1]]], np.array([[1, 2, 0, -100]]))
        >>> f1.compute()
        1.0
    """

    name = "entity_f1"

    def __init__(self, classes: Sequence[str], scheme: str | None = None) -> None:
        try:
            from seqeval import scheme as schemes
        except ImportError as e:
            raise not_installed("the F1 of entities", "seqeval", "entities") from e
        self.classes, self.options = list(classes), {}
        if scheme is not None:
            if not isinstance(known := getattr(schemes, scheme, None), type):
                raise ValueError(
                    f"scheme={scheme!r}: choose a scheme of seqeval: IOB1, IOB2, IOE1, IOE2, IOBES"
                )
            self.options = {"mode": "strict", "scheme": known}

    def begin(self, prediction: PredictionInfo) -> None:
        """Forget all batches of earlier evaluations."""
        super().begin(prediction)
        self._true: list[list[str]] = []
        self._found: list[list[str]] = []

    def update(
        self, prediction: np.ndarray, label: np.ndarray, weight: np.ndarray | None = None
    ) -> None:
        """Add a batch: scores of the classes of each token, and labels (N, T)."""
        refuse_weights(self.name, weight)
        for true, found in zip(label, prediction.argmax(self.info.axis), strict=True):
            kept = true != self.info.ignore_index
            self._true.append([self.classes[int(k)] for k in true[kept]])
            self._found.append([self.classes[k] for k in found[kept]])

    def compute(self) -> float:
        """Return the F1 of all batches; 0 where there is no entity."""
        from seqeval.metrics import f1_score

        if not any(self._true):
            raise ValueError(
                f"metric {self.name!r} has nothing to compute, as no word has a label: evaluate "
                "rows with labels"
            )
        return float(f1_score(self._true, self._found, zero_division=0, **self.options))
