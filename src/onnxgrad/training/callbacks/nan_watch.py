"""The callback that names the node which made training diverge."""

from __future__ import annotations

from typing import Any

from onnxgrad.errors import first_line
from onnxgrad.runtime.not_finite import first_not_finite
from onnxgrad.training.callbacks.base import Callback, Control


class NanWatch(Callback):
    """Names the node that made the loss or a weight NaN or infinite, in the error that says so.

    The error does so without it, but for weights of more than 256 MB, as it needs memory for
    another step. It costs nothing while training is well. Then it runs the failing step again on
    the CPU: see `first_not_finite`. A model with random numbers, such as Dropout, draws others.

    Examples:
        >>> from onnxgrad.training.callbacks.nan_watch import NanWatch
        >>> NanWatch().key
        'NanWatch'
    """

    def on_not_finite(self, trainer: Any, state: Any, control: Control) -> str | None:
        """Return a sentence that names the node, or the input, at fault.

        `trainer.failed_step()` returns the model of one step, and its inputs that failed; None if
        no step failed, as where the loss of validation data is not finite.
        """
        loop = getattr(getattr(trainer, "setup", None), "loop", None)
        if loop is not None and not loop.runner.in_place:
            return None  # the error names the node itself
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
