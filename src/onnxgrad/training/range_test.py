"""The learning rate range test: short training at rates that grow, to choose one."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrad.checks import check_count, check_positive
from onnxgrad.errors import ConvergenceError
from onnxgrad.schedules.curves import exponential
from onnxgrad.training.callbacks.base import Callback, Callbacks, TrainingControl

_SKIPPED = 10  # at most so many rates at each end are left out, where slopes are noise


@dataclass(frozen=True)
class RangeTest:
    """The learning rates that `lr_range_test` tried, with the loss at each rate.

    Attributes:
        rates: the learning rates of the steps, float64 (steps,), in increasing order.
        losses: the loss of the batch before each step.
        smoothed: the exponentially weighted mean of the losses, weighted by the rows of batches.
        diverged: whether the test ended early, because the loss diverged.

    Examples:
        >>> import numpy as np
        >>> from onnxgrad.training.range_test import RangeTest
        >>> rates, losses = 10.0 ** np.arange(-4, 1), np.array([2.0, 1.9, 1.0, 0.8, 9.0])
        >>> float(RangeTest(rates, losses, losses, True).suggestion)
        0.01
    """

    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    diverged: bool

    @property
    def suggestion(self) -> float | None:
        """The rate at which the smoothed loss falls fastest over the logarithm of the rate.

        None if it falls nowhere, or if there are fewer than three rates. Of many rates, the first
        and last ones are not taken.
        """
        n = len(self.rates)
        if n < 3:
            return None
        slopes = np.gradient(self.smoothed, np.log(self.rates))
        edge = min(_SKIPPED, n // 8)
        inner = slopes[edge : n - edge]
        best = int(np.argmin(inner))
        return float(self.rates[edge + best]) if inner[best] < 0 else None

    def plot(self, ax: Any = None) -> Any:
        """Draw the losses over the rates with matplotlib, and return the axes.

        Args:
            ax: axes to draw on; None creates a figure.
        """
        if ax is None:
            import matplotlib.pyplot as plt

            ax = plt.subplots(layout="constrained")[1]
        ax.plot(self.rates, self.losses, alpha=0.4, label="loss of a batch")
        ax.plot(self.rates, self.smoothed, label="smoothed")
        if (rate := self.suggestion) is not None:
            ax.axvline(rate, color="gray", linestyle="--", label=f"suggestion {rate:.2g}")
        ax.set(xscale="log", xlabel="learning rate", ylabel="loss")
        low, high = self.smoothed.min(), self.smoothed[0]
        if high > low:  # a loss that diverges would flatten the rest
            ax.set_ylim(low - 0.2 * (high - low), high + (high - low))
        ax.legend()
        return ax


class _LossRecorder(Callback):
    """Records the loss of each step; ends training after the last step, or where it diverges."""

    every_steps = 1

    def __init__(self, steps: int, smoothing: float, diverges: float) -> None:
        check_count("steps", steps, 2)
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing must be at least 0 and below 1, not {smoothing!r}")
        if not diverges > 1:
            raise ValueError(f"diverges must be above 1, not {diverges!r}")
        self.steps, self.smoothing, self.diverges = steps, smoothing, diverges
        self.losses: list[float] = []
        self.smoothed: list[float] = []
        self.diverged = False
        self._mean = np.zeros(2)  # the weighted sums of losses, and of rows
        self._before: Any = None  # sums, counts and rows of the epoch before the step

    def on_epoch_begin(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Set the epoch's sums of losses to zero, from which `on_step_end` computes the losses."""
        self._before = (0.0, 0.0, 0)

    def on_step_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Record the loss of a step: the increase of the epoch's sums of losses."""
        now = [np.array(state.running[name]) for name in ("sums", "counts", "rows")]
        sums, counts, rows = (a - b for a, b in zip(now, self._before, strict=True))
        means = np.divide(sums, counts, out=np.zeros_like(sums), where=counts != 0)
        loss, self._before = float(means @ trainer._call.loop.runner.step.factors), now
        self._mean = self.smoothing * self._mean + np.array([rows * loss, rows])
        smooth = float(self._mean[0] / self._mean[1])
        self.losses.append(loss)
        self.smoothed.append(smooth)
        lowest = min(self.smoothed)
        self.diverged = not math.isfinite(loss) or smooth > self.diverges * lowest > 0
        control.stop = self.diverged or len(self.losses) >= self.steps


def lr_range_test(
    trainer: Any,
    X: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    start: float = 1e-7,
    end: float = 10.0,
    steps: int = 100,
    batch_size: int | None = None,
    smoothing: float = 0.9,
    diverges: float = 4.0,
) -> RangeTest:
    """Train `steps` steps while the learning rate grows from `start` to `end`; return the losses.

    Smith 2017, arXiv:1506.01186, section 3.3; the rate grows by the same factor in each step. A
    copy of the trainer trains, without its callbacks: the weights, slots, history and schedule of
    the trainer do not change. A rate is good where the losses fall fastest, and too large where
    they rise.

    Args:
        trainer: a `Trainer`.
        X: as in `fit`, read again from the beginning until there are enough steps.
        y: as in `fit`.
        sample_weight: as in `fit`.
        start: the rate of the first step, above 0.
        end: the rate of the last step, above `start`.
        steps: number of steps, 2 or more.
        batch_size: as in `fit`.
        smoothing: factor b of the weights of earlier losses in the mean, sum_t b^(T-t) n_t loss_t
            divided by the sum of the weights, n_t the rows of a batch; at least 0, below 1.
        diverges: it ends early where the smoothed loss is beyond this multiple of the lowest one,
            above 1. Not for losses that are negative.

    Returns:
        Rates and losses, `suggestion`, and `plot`.

    Raises:
        ValueError: invalid arguments; a `TrainerStack`; as `fit`.
        ConvergenceError: the loss of the first step is not finite.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {0.0, 0.0}> { y = MatMul(x, w) }
        ... ''')
        >>> X = np.random.default_rng(0).normal(size=(96, 2)).astype(np.float32)
        >>> trainer = og.Trainer(model, "squared_error", optimizer="sgd")
        >>> found = og.schedules.lr_range_test(trainer, X, X @ np.float32([[2], [3]]), start=1e-4)
        >>> 0.01 < found.suggestion < 1
        True
    """
    if check_positive("end", end) <= check_positive("start", start):
        raise ValueError(f"end must be above start={start!r}, not {end!r}")
    watch = _LossRecorder(steps, smoothing, diverges)
    rates = exponential(start, end / start, every=steps - 1)
    if trainer._job.members is not None:
        raise ValueError(
            "lr_range_test takes a Trainer, not a TrainerStack: the members of a stack compare "
            "learning rates themselves"
        )
    tested = copy.copy(trainer)
    callbacks = Callbacks([watch])
    tested._change_job(callbacks=callbacks, learning_rates=[rates], shows_progress=False)
    try:
        tested.fit(X, y, sample_weight=sample_weight, epochs=steps, batch_size=batch_size)
    except ConvergenceError:
        if not watch.losses:
            raise
        watch.diverged = True
    tried = np.array([rates(step) for step in range(len(watch.losses))])
    return RangeTest(tried, np.array(watch.losses), np.array(watch.smoothed), watch.diverged)
