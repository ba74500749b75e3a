"""Norms of weights and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxgrad.checks import check_count
from onnxgrad.training.callbacks.base import Callback, Control
from onnxgrad.training.progress import by_member


class Norms(Callback):
    """Records the 2-norm of the weights and of their gradients, of each and of all together.

    The entry in `state.callbacks` has `records`, a list of dicts with `step`, `gradient_norm` and
    `weight_norm`, the norms of all weights together, and `gradient_norms` and `weight_norms`, dicts
    by the names of the weights; each norm of a stack is a list of those of its members. Gradients
    are those of the last step, before clipping. That of all weights together is the square root of
    the sum of the squares of theirs.

    The records of the history at the end of an epoch, and of an evaluation, get `gradient_norm` and
    `weight_norm`. Trackers such as `TensorBoard`, which stand behind it in the list, log all norms.

    Args:
        every_steps: number of steps from one record to the next. Reading the weights copies them
            from the device. None records at the end of an epoch only.
        keep: the number of records to keep, the last ones.

    Raises:
        ValueError: `keep` is not positive.

    Examples:
        >>> from onnxgrad.training.callbacks.norms import Norms
        >>> Norms(every_steps=50).every_steps
        50
    """

    gradient_norms = True

    def __init__(self, every_steps: int | None = None, keep: int = 100) -> None:
        self.every_steps, self.keep = every_steps, check_count("keep", keep)

    def on_step_end(self, trainer: Any, state: Any, control: Control) -> None:
        """Record the norms at every multiple of `every_steps`."""
        if self.every_steps is not None and state.step % self.every_steps == 0:
            self._record(trainer, state)

    def on_evaluate(self, trainer: Any, state: Any, control: Control) -> None:
        """Add the norms to the record of the evaluation."""
        self._add(trainer, state)

    def on_epoch_end(self, trainer: Any, state: Any, control: Control) -> None:
        """Add the norms to the record of the epoch."""
        self._add(trainer, state)

    def _add(self, trainer: Any, state: Any) -> None:
        record = self._record(trainer, state)
        if state.history and state.history[-1].get("step") == state.step:
            for name in ("gradient_norm", "weight_norm"):
                if name in record:
                    norm = record[name]
                    state.history[-1][name] = np.array(norm) if isinstance(norm, list) else norm

    def _record(self, trainer: Any, state: Any) -> dict[str, Any]:
        """Return the record of this step; it is made once."""
        records = self.entry(state).setdefault("records", [])
        if records and records[-1]["step"] == state.step:
            return records[-1]
        axes = int(state.members is not None)
        weights = {name: _norm(array, axes) for name, array in state.weights.items()}
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
        self.publish(state, by_member(scalars, state))
        return record


def _norm(array: np.ndarray, axes: int) -> np.ndarray:
    """Return the 2-norm of the elements behind the first `axes`, added up in float64."""
    array = np.asarray(array).astype(np.float64, copy=False)
    flat = array.reshape(*array.shape[:axes], -1)
    return np.sqrt(np.einsum("...i,...i->...", flat, flat))
