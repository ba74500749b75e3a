"""Losses, metrics and predictions of all members."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from onnxgrad.errors import escaping
from onnxgrad.graph.shapes import dims
from onnxgrad.training.batches import BatchSource
from onnxgrad.training.evaluation import Arrays, Evaluator
from onnxgrad.training.judges import ByOutput, Judge, judges
from onnxgrad.training.minimized import Minimized
from onnxgrad.training.stack.objective import stacked_objective


class StackedEvaluator(Evaluator):
    """Evaluates all members in one graph; their weights are inputs, (members, ...).

    Args:
        members: their number.
        args, options: those of `Evaluator`.
    """

    def __init__(self, members: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.members = members

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
        parts = len(one.written.sums)
        judging = [judges(one.labels, metrics, self.row_axes) for _ in range(self.members)]
        sums, counts = np.zeros((parts, self.members)), np.zeros(parts)
        for arrays, results in self._results(self._losses, values, source, parts):
            sums += np.stack([np.asarray(y, np.float64) for y in results[:parts]])
            counts += np.array([float(np.sum(y)) for y in results[parts : 2 * parts]])
            finite = np.isfinite(sums.sum(axis=0)).tolist()
            self._judge(judging, arrays, results[2 * parts :], finite)
        with np.errstate(invalid="ignore", divide="ignore"):
            losses = np.array(one.written.factors) @ (sums / counts[:, None])
        scores = [{n: v for judge in own for n, v in judge.results().items()} for own in judging]
        return {"loss": losses} | {n: np.array([s[n] for s in scores]) for n in scores[0]}

    def _judge(
        self, judging: list[list[Judge]], arrays: Arrays, predictions: list, finite: list[bool]
    ) -> None:
        """Let the metrics of every member take a batch."""
        one = self.described
        weight = None if one.row_weight is None else arrays.get(one.row_weight)
        if weight is not None and (weight == 1).all():
            weight = None  # as of batches that have none, for metrics that take none
        for k, own in enumerate(judging):
            of_member = {n: y[k] for n, y in zip(one.predictions, predictions, strict=False)}
            for judge in own:
                judge.update(of_member, arrays, weight, finite[k])

    @escaping()
    def predict(self, values: Arrays, source: BatchSource) -> dict[str, np.ndarray]:
        """Return the predictions of all members, (members, ...), by output."""
        parts = [results for _, results in self._results(self._predictions, values, source)]
        predictions = {}
        for i, (name, value) in enumerate(self.described.predictions.items()):
            listed = [part[i] if dims(value) else part[i][:, None] for part in parts]
            predictions[name] = np.concatenate(listed, self.row_axis(name) + 1)
        return predictions
