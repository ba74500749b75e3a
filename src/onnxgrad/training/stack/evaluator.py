"""Losses, metrics and predictions of all members."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from onnxgrad.errors import escaping
from onnxgrad.graph.shapes import dims
from onnxgrad.training.batches import BatchSource
from onnxgrad.training.evaluate import Arrays, Evaluator
from onnxgrad.training.judges import ByOutput, Judge
from onnxgrad.training.objective import Objective
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

    def objective(self) -> Objective:
        """Return the objective of all members."""
        return stacked_objective(super().objective(), {}, self.members)

    @cached_property
    def described(self) -> Objective:
        """The objective of one member, of which only the description is used."""
        return super().objective()

    @escaping()
    def evaluate_members(
        self, values: Arrays, source: BatchSource, metrics: ByOutput
    ) -> dict[str, np.ndarray]:
        """Return `loss`, and the metrics by name, each as an array of (members, ...)."""
        one = self.described
        parts = len(one.written.sums)
        judging, self.failed = self._judges(metrics), None
        sums, counts = np.zeros((parts, self.members)), np.zeros(parts)
        for arrays, results in self._results(self._losses, values, source, parts):
            sums += np.stack([np.asarray(y, np.float64) for y in results[:parts]])
            counts += np.array([float(np.sum(y)) for y in results[parts : 2 * parts]])
            finite = np.isfinite(sums.sum(axis=0))
            self._judge(judging, arrays, results[2 * parts :], finite)
        with np.errstate(invalid="ignore", divide="ignore"):
            losses = np.array(one.written.factors) @ (sums / counts[:, None])
        scores: dict[str, list] = {}
        for judge in judging:
            for name, value in judge.results().items():
                scores.setdefault(name, []).append(value)
        return {"loss": losses} | {name: np.array(listed) for name, listed in scores.items()}

    def _judges(self, metrics: ByOutput) -> list[Judge]:
        """Return the judges of all members, those of one after those of another."""
        one = super()._judges
        return [judge for _ in range(self.members) for judge in one(metrics)]

    def _judge(self, judging: list[Judge], arrays: Arrays, outputs: list, finite: Any) -> None:
        """Let the metrics of every member take a batch; `finite`: of each, or of all."""
        count = len(judging) // self.members
        for k, fine in enumerate(np.broadcast_to(finite, self.members).tolist()):
            own = judging[k * count : (k + 1) * count]
            super()._judge(own, arrays, [y[k] for y in outputs], fine)

    @escaping()
    def predict(self, values: Arrays, source: BatchSource) -> dict[str, np.ndarray]:
        """Return the predictions of all members, (members, ...), by output."""
        parts = [results for _, results in self._results(self._predictions, values, source)]
        predictions = {}
        for i, (name, value) in enumerate(self.described.predictions.items()):
            listed = [part[i] if dims(value) else part[i][:, None] for part in parts]
            predictions[name] = np.concatenate(listed, self.row_axis(name) + 1)
        return predictions
