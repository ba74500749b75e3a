"""Entities in texts: whole runs of words that a model labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxgrad.errors import not_installed
from onnxgrad.metrics.base import Metric, PredictionInfo


class EntityF1(Metric):
    """F1 = 2 P R / (P + R) of whole entities, as the library seqeval counts them.

    An entity is right if its first word, its last one and its kind are. A row is a sentence.

    Args:
        classes: names of the classes in the order of their numbers, as `B-PER`, `I-PER` and `O`.
        scheme: None: as the script of CoNLL, where an entity may begin with `I-`. "IOB2", "IOBES"
            or another scheme of seqeval: in its strict mode.

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
                raise ValueError(f"scheme={scheme!r}: seqeval has IOB1, IOB2, IOE1, IOE2, IOBES")
            self.options = {"mode": "strict", "scheme": known}

    def begin(self, prediction: PredictionInfo) -> None:
        """Forget all batches."""
        super().begin(prediction)
        self._true: list[list[str]] = []
        self._found: list[list[str]] = []

    def update(
        self, prediction: np.ndarray, label: np.ndarray, weight: np.ndarray | None = None
    ) -> None:
        """Add a batch: scores, with classes along `axis` of the info, and labels (N, T)."""
        if weight is not None:
            raise ValueError(f"metric {self.name!r} takes no sample weights")
        for true, found in zip(label, prediction.argmax(self.info.axis), strict=True):
            kept = true != self.info.ignore_index
            self._true.append([self.classes[int(k)] for k in true[kept]])
            self._found.append([self.classes[k] for k in found[kept]])

    def compute(self) -> float:
        """Return the F1 of all batches; 0 where there is no entity."""
        from seqeval.metrics import f1_score

        if not any(self._true):
            raise ValueError(f"metric {self.name!r} has nothing to compute: no word has a label")
        return float(f1_score(self._true, self._found, zero_division=0, **self.options))
