"""Callbacks that measure a training: time, norms of weights, and the node that made it diverge."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from onnxgrad.checks import check_count
from onnxgrad.errors import first_line
from onnxgrad.reporting import logger
from onnxgrad.runtime.not_finite import first_not_finite
from onnxgrad.training.callbacks.base import Callback, TrainingControl
from onnxgrad.training.state import split_by_member

_PARTS = ("seconds_waiting", "seconds_computing")


class Timing(Callback):
    """Records how long training waited for data, and how long it computed.

    The record of every epoch in the history gets `seconds_waiting` and `seconds_computing`. The
    entry in `state.callbacks` has their sums, and `seconds`, the time in `fit`, of which the rest
    went to evaluations, checkpoints and callbacks. At the end, the logger "onnxgrad" reports the
    shares in a line of level INFO.

    Examples:
        >>> from onnxgrad.training.callbacks.diagnostics import Timing
        >>> Timing().key
        'Timing'
    """

    def on_train_begin(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Start the clock; a resumed training adds to the times before."""
        entry = self.entry(state)
        for name in ("seconds", *_PARTS):
            entry.setdefault(name, 0.0)
        self._start, self._before = time.perf_counter(), entry["seconds"]
        self._epoch = dict.fromkeys(_PARTS, 0.0)  # times of this epoch that are in the sums

    def on_epoch_begin(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Set the times of the epoch to zero."""
        self._epoch = dict.fromkeys(_PARTS, 0.0)

    def on_step_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Add the seconds of waiting and computing since the last call to this callback's entry."""
        entry = self.entry(state)
        for name in _PARTS:
            now = float(getattr(trainer.progress, name))
            entry[name] += now - self._epoch[name]
            self._epoch[name] = now
        entry["seconds"] = self._before + time.perf_counter() - self._start

    def on_epoch_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Add the times of the epoch to its record in the history."""
        self.on_step_end(trainer, state, control)
        if state.history:
            state.history[-1] |= {name: round(self._epoch[name], 6) for name in _PARTS}

    def on_train_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Log which shares of the training went to waiting, computing and other work."""
        entry = self.entry(state)
        total = entry["seconds"] = self._before + time.perf_counter() - self._start
        waiting, computing = (entry[name] / max(total, 1e-9) for name in _PARTS)
        logger.info(
            "Timing: %.3g s, of them %.0f %% computing, %.0f %% waiting for data, %.0f %% other",
            *(total, 100 * computing, 100 * waiting, 100 * max(0.0, 1 - computing - waiting)),
        )


class Norms(Callback):
    """Records the 2-norm of the weights and of their gradients, of each and of all together.

    The entry in `state.callbacks` has `records`, a list of dicts with `step`, `gradient_norm` and
    `weight_norm`, the norms of all weights together, and `gradient_norms` and `weight_norms`, dicts
    by the names of the weights; each norm of a stack is a list, an entry a member. Gradients are
    taken in the last step, before clipping. The norm of all weights together is the square root of
    the sum of the squares of their norms.

    The records of the history at the end of an epoch, and of an evaluation, get `gradient_norm` and
    `weight_norm`. Trackers such as `TensorBoard`, which stand behind it in the list, log all norms.

    Args:
        every_steps: number of steps from one record to the next. Reading the weights copies them
            from the device. None records at the end of an epoch only.
        keep: the number of records to keep, the last ones.

    Raises:
        ValueError: `keep` is not positive.

    Examples:
        >>> from onnxgrad.training.callbacks.diagnostics import Norms
        >>> Norms(every_steps=50).every_steps
        50
    """

    gradient_norms = True

    def __init__(self, every_steps: int | None = None, keep: int = 100) -> None:
        self.every_steps, self.keep = every_steps, check_count("keep", keep)

    def on_step_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Record the norms at every multiple of `every_steps`."""
        if self.every_steps is not None and state.step % self.every_steps == 0:
            self._record_norms(trainer, state)

    def on_evaluate(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Add the norms of all weights to the record of the evaluation or epoch."""
        record = self._record_norms(trainer, state)
        if state.history and state.history[-1].get("step") == state.step:
            for name in ("gradient_norm", "weight_norm"):
                if name in record:
                    norm = record[name]
                    state.history[-1][name] = np.array(norm) if isinstance(norm, list) else norm

    on_epoch_end = on_evaluate

    def _record_norms(self, trainer: Any, state: Any) -> dict[str, Any]:
        """Return the record of the norms after this step; it is computed once for each step."""
        records = self.entry(state).setdefault("records", [])
        if records and records[-1]["step"] == state.step:
            return records[-1]
        axes = int(state.members is not None)
        weights = {name: _two_norm_per_member(array, axes) for name, array in state.weights.items()}
        gradients = {name: np.asarray(n) for name, n in (trainer.gradient_norms or {}).items()}
        record: dict[str, Any] = {"step": state.step}
        scalars: dict[str, Any] = {}
        for kind, norms in (("gradient_norm", gradients), ("weight_norm", weights)):
            if norms:
                own = {kind: np.hypot.reduce([*norms.values()], axis=0)}
                own |= {f"{kind}/{name}": norm for name, norm in norms.items()}
                record[kind] = own[kind].tolist()
                record[f"{kind}s"] = {name: norm.tolist() for name, norm in norms.items()}
                scalars |= {name: norm if axes else float(norm) for name, norm in own.items()}
        records.append(record)
        del records[: -self.keep]
        self.publish(state, split_by_member(scalars, state))
        return record


def _two_norm_per_member(array: np.ndarray, axes: int) -> np.ndarray:
    """Return the 2-norm of an array in float64: one number, or one for each model of a stack.

    `axes` is 1 if the first axis is the axis of members, else 0.
    """
    array = np.asarray(array).astype(np.float64, copy=False)
    flat = array.reshape(*array.shape[:axes], -1)
    return np.sqrt(np.einsum("...i,...i->...", flat, flat))


class NanWatch(Callback):
    """Names the node that made the loss or a weight NaN or infinite, in the `ConvergenceError`.

    The error names the node without this callback, too, except for weights of more than 256 MB, as
    that needs memory for another step. The callback costs nothing while all numbers are finite.
    Then it runs the failing step again on the CPU: see `first_not_finite`. A model with random
    numbers, such as Dropout, draws new ones.

    Examples:
        >>> from onnxgrad.training.callbacks.diagnostics import NanWatch
        >>> NanWatch().key
        'NanWatch'
    """

    def on_not_finite(self, trainer: Any, state: Any, control: TrainingControl) -> str | None:
        """Return a sentence that names the node, or the input, that is NaN or infinite first.

        `trainer.failed_step()` returns the model of one step, and its inputs that failed; None if
        no step failed, as where the loss of validation data is not finite.
        """
        loop = getattr(getattr(trainer, "_call", None), "loop", None)
        if loop is not None and not loop.runner.in_place:
            return None  # `ConvergenceError` names the node without this callback
        try:
            failed = trainer.failed_step()
            if failed is None:
                return None
            reason = first_not_finite(*failed)
        except Exception as e:
            return f"Looking for the node at fault failed: {first_line(e)}"
        if reason is None:
            return "Run again on the CPU, this step computes only finite values"
        return f"In this step, {reason}"
