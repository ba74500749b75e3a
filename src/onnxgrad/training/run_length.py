"""Learning rates that depend on the number of steps of a training: what fits no such number."""

from __future__ import annotations

import warnings
from typing import Any

from onnxgrad.errors import argument, named
from onnxgrad.reporting import frames_inside
from onnxgrad.schedules.base import Schedule
from onnxgrad.schedules.compose import Warmup
from onnxgrad.schedules.curves import InverseSqrt
from onnxgrad.training.state import TrainState


def check_length(rate: Any, state: TrainState, batches: int, epochs: int) -> None:
    """Refuse another length of a resumed training; warn of a warm-up that does not end in it.

    Args:
        rate: what the trainer takes as a learning rate.
        state: that with which training begins, of a checkpoint if it resumes.
        batches: those of an epoch.
        epochs: those of the whole training.

    Raises:
        ValueError: the rates would jump, as they depend on a length that is not that of before.
    """
    if not isinstance(rate, Schedule):
        return
    steps, before = batches * epochs, state.epochs
    schedule = rate.over(steps)
    if before is not None and rate.over(batches * before) != schedule:
        raise ValueError(
            f"the checkpoint is of a training of {before} epochs ({batches * before} steps), and "
            f"{argument('epochs', epochs)} makes {steps} steps: the learning rates depend on the "
            f"length of the training, and would jump. Pass {argument('epochs', before)}; to train "
            f"for longer, {named('start anew without resume')}, with the trained model"
        )
    warmup = schedule.warmup if isinstance(schedule, (Warmup, InverseSqrt)) else 0
    if steps <= warmup:
        warnings.warn(
            f"the warm-up of {warmup} steps does not end in this training, which has {steps} "
            f"steps ({epochs} epochs of {batches} batches): the learning rate rises to "
            f"{schedule(steps - 1):.3g} only. Pass a shorter one, such as a tenth of all steps: "
            f"{argument('warmup', 0.1)}",
            stacklevel=frames_inside() + 1,
        )
