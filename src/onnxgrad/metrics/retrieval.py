"""Metrics of embeddings: retrieval by cosine similarity, and the rank correlation of pairs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from onnxgrad.checks import check_count
from onnxgrad.errors import unknown
from onnxgrad.metrics.base import Metric

QUERIES_AT_ONCE = 1024  # queries compared with the corpus at once


class EmbeddingMetric(Metric):
    """Base of metrics that compare all embeddings (rows, D) of an evaluation with each other, with
    one label for each row.
    """

    def update(
        self, prediction: np.ndarray, label: np.ndarray, weight: np.ndarray | None = None
    ) -> None:
        """Keep a batch: embeddings (rows, D) and labels (rows,).

        Raises:
            ValueError: arrays of other shapes, NaN, or sample weights other than 1.
        """
        self.check_begun()
        z, y = np.asarray(prediction, np.float64), np.array(label)
        if z.ndim != 2 or y.shape != z.shape[:1]:
            raise ValueError(
                f"metric {self.name!r}: embeddings are (rows, D) with labels (rows,), not "
                f"{z.shape} with {y.shape}"
            )
        if not np.isfinite(z).all():
            raise ValueError(
                f"metric {self.name!r}: the embeddings hold NaN or infinity: train with a lower "
                "rate"
            )
        if weight is not None and (np.asarray(weight) != 1).any():
            raise ValueError(f"metric {self.name!r} takes no sample weights: do not pass any")
        lengths = np.linalg.norm(z, axis=1, keepdims=True)
        self._batches.append((z / np.maximum(lengths, 1e-12), y))


@dataclass
class Retrieval(EmbeddingMetric):
    """Recall or hit rate at k: how many rows of the query's class are among the k rows with the
    largest cosines to the query.

    A row is a hit if it has the class of the query. The value is the mean over queries, without
    rows that are alone in their class. In `update`, labels are the
    classes of rows. Among equal cosines, the first row comes first.

    Args:
        k: number of rows that the search finds.
        measure: "recall": the share of the other rows of its class that are found; "hit_rate": 1 if
            any is found, else 0, which metric learning also calls Recall@k.
        queries: "all": each row is a query, searched in all other rows; "first": queries are the
            first rows of the classes, searched in the rows that are no queries, as for pairs of a
            question and its answer.

    Examples:
        >>> import numpy as np
        >>> from onnxgrad.metrics.base import PredictionInfo
        >>> from onnxgrad.metrics.retrieval import Retrieval
        >>> metric = Retrieval(1)
        >>> metric.begin(PredictionInfo())
        >>> metric.update(np.array([[1, 0], [0, 1], [1, 0.1], [0.9, 0.2]]), np.array([0, 1, 0, 1]))
        >>> metric.name, metric.compute()
        ('recall_at_1', 0.75)
    """

    k: int = 1
    measure: str = "recall"
    queries: str = "all"
    name: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_count("k", self.k)
        for option, value, known in (
            ("measure", self.measure, ["recall", "hit_rate"]),
            ("queries", self.queries, ["all", "first"]),
        ):
            if value not in known:
                raise unknown(option, value, known)
        start = "query_" if self.queries == "first" else ""
        self.name = f"{start}{self.measure}_at_{self.k}"

    def compute(self) -> float:
        """Return the mean recall or hit rate; raise `ValueError` if no class has two rows."""
        z, y = self._join_batches()
        _, first, inverse, counts = np.unique(y, True, True, True)
        several = counts[inverse] > 1
        query = several.copy()
        if self.queries == "first":
            query &= first[inverse] == np.arange(len(y))
        if not query.any():
            raise ValueError(
                f"metric {self.name!r}: no class has two rows, a query and a row to find: evaluate "
                "more rows"
            )
        values = []
        numbers = np.flatnonzero(query)
        for rows in np.array_split(numbers, -(-len(numbers) // QUERIES_AT_ONCE)):
            scores = z[rows] @ z.T
            scores[np.arange(len(rows)), rows] = -np.inf
            if self.queries == "first":
                scores[:, query] = -np.inf
            found = np.argsort(-scores, axis=1, kind="stable")[:, : self.k]
            possible = np.isfinite(np.take_along_axis(scores, found, axis=1))
            hits = ((y[found] == y[rows, None]) & possible).sum(axis=1)
            relevant = counts[inverse[rows]] - 1
            values.append(hits > 0 if self.measure == "hit_rate" else hits / relevant)
        return float(np.concatenate(values).mean())


@dataclass
class CosineSpearman(EmbeddingMetric):
    """Spearman's rank correlation of cosines with labels; consecutive rows are the pairs.

    Rows 0 and 1 are a pair, and 2 and 3; both rows have the label of their pair. Equal values have
    the mean of their ranks.

    Examples:
        >>> import numpy as np
        >>> from onnxgrad.metrics.base import PredictionInfo
        >>> from onnxgrad.metrics.retrieval import CosineSpearman
        >>> metric = CosineSpearman()
        >>> metric.begin(PredictionInfo())
        >>> z = np.array([[1, 0], [1, 0], [1, 0], [1, 1], [1, 0], [0, 1]])
        >>> metric.update(z, np.array([0.9, 0.9, 0.5, 0.5, 0.1, 0.1]))
        >>> round(metric.compute(), 6)
        1.0
    """

    name = "cosine_spearman"

    def compute(self) -> float:
        """Return the rank correlation; raise `ValueError` if all cosines or labels are equal, or
        the rows are not pairs.
        """
        z, y = self._join_batches()
        if len(y) % 2 or (y[::2] != y[1::2]).any():
            raise ValueError(
                f"metric {self.name!r}: rows 0 and 1 are a pair, 2 and 3, and so on: both rows of "
                "a pair must have the same label"
            )
        ranks = [_average_ranks(v) for v in ((z[::2] * z[1::2]).sum(axis=1), y[::2])]
        if any(np.ptp(r) == 0 for r in ranks):
            raise ValueError(
                f"metric {self.name!r} is undefined, as all cosines or all labels are equal: "
                "evaluate other rows"
            )
        return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _average_ranks(values: np.ndarray) -> np.ndarray:
    """Return the ranks of values, from 1; equal values get the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]
