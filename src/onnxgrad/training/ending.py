"""How a training ended: why, and of which epoch the weights are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onnxgrad.training.callbacks.early_stopping import EarlyStopping
from onnxgrad.training.state import TrainState

_ENDS = {  # by `state.stop_reason`
    "max_iter": "all epochs were trained",
    "callback": "a callback ended it",
    "not finite": "the loss or a weight became NaN or infinite",
    "interrupted": "it was interrupted",
    "error": "an error ended it",
}


@dataclass(frozen=True)
class Kept:
    """Where in a training the weights of its state are from.

    - `step`: the number of steps behind them.
    - `epoch`: the number of the epoch of the last of these, from 1; 0 without any.
    - `whole`: whether they are those of its end.
    - `record`: the entry of the history that has their losses and metrics; {} without.
    """

    step: int
    epoch: int
    whole: bool
    record: dict[str, Any]

    @classmethod
    def of(cls, state: TrainState) -> Kept:
        """Return it for the state of one model: the last step, or the one that was restored."""
        restored = [entry.get("restored") for entry in state.callbacks.values()]
        step = next((s for s in restored[::-1] if s is not None), state.step)
        found = [entry for entry in state.history if entry["step"] == step]
        record = found[-1] if found else {}
        whole = "loss" in record
        epoch = record.get("epoch", state.epoch) + (not whole) if step else 0
        return cls(step, epoch, whole, record)

    def __str__(self) -> str:
        if self.whole:
            return f"the weights of epoch {self.epoch}"
        if not self.step:
            return "the weights as they were: no step was finished"
        return f"the weights of epoch {self.epoch} in part, after {self.step} steps"


def reason(trainer: Any) -> str:
    """Return why the last training of a trainer ended, as a clause; "" before its end."""
    state = trainer.state
    stopped = [c for c in trainer.callbacks.callbacks if isinstance(c, EarlyStopping)]
    if state.stop_reason == "callback":
        return next(filter(None, (c.reason(state) for c in stopped)), _ENDS["callback"])
    return _ENDS.get(state.stop_reason, "")
