"""A function of the progress as a callback, as `fit` of the two estimators takes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from onnxgrad.training.callbacks.base import Callback, Control
from onnxgrad.training.loop import Loop
from onnxgrad.training.progress import FitProgress
from onnxgrad.training.state import TrainState


class Called(Callback):
    """Calls a function of the progress after calls of the runtime and after evaluations.

    Raises:
        ValueError: it is no function.
    """

    def __init__(self, function: Callable[[FitProgress], bool | str | None]) -> None:
        if not callable(function):
            raise ValueError(
                f"callback must be a function of a Progress, not {function!r}: see FitProgress"
            )
        self.function = function
        self.loop: Loop | None = None

    def on_step_end(self, trainer: Any, state: TrainState, control: Control) -> None:
        """Call the function, and end training if it says so."""
        assert self.loop is not None
        control.stop |= _stops(self.function(self.loop.progress))

    on_evaluate = on_step_end


def _stops(answer: Any) -> bool:
    """Return whether `answer`, which a callback returned, ends training."""
    if answer is None or (isinstance(answer, (bool, np.bool_)) and answer):
        return False
    if isinstance(answer, (bool, np.bool_)) or (isinstance(answer, str) and answer == "stop"):
        return True
    raise ValueError(
        f"the callback returned {answer!r}: return None or True to continue, "
        "False or 'stop' to end training"
    )
