"""The epochs of a stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxgrad.errors import ConvergenceError
from onnxgrad.optimizers import Optimizer
from onnxgrad.training.batches import Batch, BatchSource, Slice
from onnxgrad.training.causes import warn_of_no_label
from onnxgrad.training.interrupts import Interrupts
from onnxgrad.training.rates import Rates
from onnxgrad.training.stack.runner import StackRunner
from onnxgrad.training.stack.state import StackState, evaluated_members, stacked
from onnxgrad.training.state import Values

Arrays = dict[str, np.ndarray]


@dataclass
class StackLoop:
    """The epochs of one call of `fit`, whose arguments are checked already.

    - `rates`: the learning rates of each member.
    - `factors`: of the parts of the loss.
    - `evaluate`: returns the entries that an evaluation of stacked weights adds to the history;
      None without data.
    - `explain`: says why batches gave numbers that are not finite, and what helps.
    """

    state: StackState
    runner: StackRunner
    rates: list[Rates]
    source: BatchSource
    optimizers: list[Optimizer]
    factors: np.ndarray
    epochs: int
    shuffle: bool
    evaluate: Callable[[Arrays], dict[str, np.ndarray]] | None
    explain: Callable[[Iterator[Batch]], str]
    seed: int = 0
    interrupts: Interrupts = field(default_factory=Interrupts)

    def run(self) -> None:
        """Run the epochs; the state is that after the last finished step, also after an error.

        Raises:
            ConvergenceError: the losses or weights of all members are not finite.
        """
        state = self.state
        state.epoch, state.frozen, state.history = 0, self.runner.members.frozen, []
        self._others = [v.weights for v in state.values]  # the loss does not reach all of them
        with self.interrupts.installed():
            try:
                while state.epoch < self.epochs:
                    self._epoch()
            finally:
                state.values = self._values()

    def _values(self) -> list[Values]:
        """Return the values of all members."""
        values = []
        for k, others in enumerate(self._others):
            own = self.runner.values(k)
            values.append(Values(others | own.weights, own.slots, own.steps))
        return values

    def _epoch(self) -> None:
        state, position = self.state, 0
        sums, counts, rates = 0.0, 0.0, np.zeros(len(self.rates))
        order = np.random.default_rng([self.seed, state.epoch]) if self.shuffle else None
        slices = self.source.epoch(order, 0, lambda batch: self.runner.budget())
        try:
            for piece in slices:
                with self.interrupts.held():
                    rates, losses = self._train(piece, position)
                position += piece.batches
                sums, counts = sums + losses.sums.sum(axis=0), counts + losses.counts.sum(axis=0)
        finally:
            slices.close()
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = self.factors @ (sums / np.asarray(counts)[:, None])
        self._finish(mean, rates)

    def _train(self, piece: Slice, position: int) -> Any:
        """Run the steps of a slice; return the last rates, and the losses."""
        runner = self.runner
        done = runner.now.steps
        rates = np.stack([r.at(done, piece.batches) for r in self.rates], axis=1)
        losses = runner.train(piece, rates, position)
        if not runner.members.alive.any():
            raise ConvergenceError(
                f"the losses or weights of all members became NaN or infinite, the last one before "
                f"step {done + piece.batches}; their states before that are kept. "
                f"{self.explain(piece.each(position))}"
            )
        return rates[-1], losses

    def _finish(self, loss: np.ndarray, rates: np.ndarray) -> None:
        """Record a finished epoch, and evaluate."""
        state = self.state
        state.epoch += 1
        entry: dict[str, Any] = {
            "step": self.runner.now.steps,
            "epoch": state.epoch,
            "loss": loss,
            "learning_rate": rates,
        }
        state.history.append(entry)
        warn_of_no_label(loss, state.epoch)
        if self.evaluate is not None:
            weights = evaluated_members(self._values(), self.optimizers)
            entry.update(self.evaluate(stacked(weights)))
            bad = np.flatnonzero(~np.isfinite(entry["validation_loss"]))
            self.runner.freeze(bad.tolist())
        for k, rate in enumerate(self.rates):
            if k not in state.frozen:
                rate.observe({n: v if np.ndim(v) == 0 else v[k] for n, v in entry.items()})
