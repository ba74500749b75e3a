"""Losses, metrics and predictions of all members."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from onnxgrad.errors import escaping
from onnxgrad.graph.shapes import dims
from onnxgrad.training.batches import BatchSource
from onnxgrad.training.evaluation import Arrays, Evaluator
from onnxgrad.training.judges import ByOutput, judges
from onnxgrad.training.minimized import Minimized
from onnxgrad.training.stack.objective import stacked_objective


class StackedEvaluator(Evaluator):
    """Evaluates all members in one graph; their weights are inputs, (members, ...).

    `members` is set by who creates it; other arguments are those of `Evaluator`.
    """

    members = 1

    def objective(self) -> Minimized:
        """Return the objective of all members."""
        return stacked_objective(super().objective(), {}, self.members)

    @cached_property
    def described(self) -> Minimized:
        """The objective of one member, of which only the description is used."""
        return super().objective()

    @escaping()
    def evaluate_members(
        self, values: Arrays, source: BatchSource, metrics: ByOutput
    ) -> dict[str, np.ndarray]:
        """Return `loss`, and the metrics by name, each as an array of (members, ...)."""
        one = self.described
        parts, batches = len(one.written.sums), []
        sums, counts = np.zeros((parts, self.members)), np.zeros(parts)
        for arrays, results in self._results(self._losses, values, source):
            sums += np.stack([np.asarray(y, np.float64) for y in results[:parts]])
            counts += np.array([float(np.sum(y)) for y in results[parts : 2 * parts]])
            if any(metrics.values()):
                batches.append((arrays, results[2 * parts :]))
        with np.errstate(invalid="ignore", divide="ignore"):
            losses = np.array(one.written.factors) @ (sums / counts[:, None])
        scores = [self._scores(k, batches, metrics) for k in range(self.members) if batches]
        names = list(scores[0]) if scores else []
        return {"loss": losses} | {name: np.array([s[name] for s in scores]) for name in names}

    def _scores(self, k: int, batches: list[tuple[Any, Any]], metrics: ByOutput) -> dict[str, Any]:
        """Return the metrics of member `k`."""
        one = self.described
        judging = judges(one.labels, metrics)
        for arrays, results in batches:
            predictions = {n: y[k] for n, y in zip(one.predictions, results, strict=False)}
            weight = None if one.row_weight is None else arrays.get(one.row_weight)
            if weight is not None and (weight == 1).all():
                weight = None  # as of batches that have none, for metrics that take none
            for judge in judging:
                judge.update(predictions, arrays, weight)
        return {name: value for judge in judging for name, value in judge.results().items()}

    @escaping()
    def predict(self, values: Arrays, source: BatchSource) -> dict[str, np.ndarray]:
        """Return the predictions of all members, (members, ...), by output."""
        parts = [results for _, results in self._results(self._predictions, values, source)]
        rows = self.fields.row_axes.symbol
        predictions = {}
        for i, (name, value) in enumerate(self.described.predictions.items()):
            shape = dims(value) or ()
            axis = shape.index(rows) if rows in shape else 0
            listed = [part[i] if shape else part[i][:, None] for part in parts]
            predictions[name] = np.concatenate(listed, axis + 1)
        return predictions
