"""Logging for TensorBoard."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from onnxgrad.training.callbacks.tracker import Tracker, optional


class TensorBoard(Tracker):
    """Writes the numbers of training into event files for TensorBoard.

    It logs the numbers of the history by step, `step_loss`, the mean loss of a row since it was
    logged last, and what other callbacks publish, such as `Norms`. The arguments of the trainer are
    a table on the page "Text". Points of an earlier run in the folder are hidden from the step on
    where this one begins.

    Args:
        folder: where to write: a folder for each run, `tensorboard --logdir` shows those in one.
        every_steps: number of steps from one `step_loss` to the next; None logs it after calls of
            the runtime, at most once a second.

    Raises:
        ImportError: neither tensorboardX nor tensorboard with PyTorch is installed.

    Examples:
        >>> from onnxgrad.training.callbacks.tensorboard import TensorBoard
        >>> try:
        ...     callbacks = [TensorBoard("runs/a")]
        ... except ImportError:  # pip install 'onnxgrad[tensorboard]'
        ...     callbacks = []
    """

    _open = ("_writer",)

    def __init__(self, folder: str | os.PathLike, every_steps: int | None = None) -> None:
        super().__init__(every_steps)
        self.folder = Path(folder)
        _writer()

    def begin(self, state: Any, parameters: dict[str, Any]) -> None:
        """Open a new file in the folder."""
        first = state.step + 1
        # tensorboardX names files by the second: another run must not replace this one's
        suffix = f".{first:010d}.{os.urandom(4).hex()}"
        self._writer = _writer()(str(self.folder), purge_step=first, filename_suffix=suffix)
        rows = "".join(f"| {_cell(name)} | {_cell(v)} |\n" for name, v in parameters.items())
        self._writer.add_text("parameters", f"| argument | value |\n|---|---|\n{rows}", first)

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Log each number as a curve of its own."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def end(self, state: Any) -> None:
        """Close the file."""
        self._writer.close()


def _cell(value: Any) -> str:
    return str(value).replace("|", r"\|").replace("\n", " ")


def _writer() -> Any:
    """Return the class `SummaryWriter`; tensorboardX first, as it does not import PyTorch."""
    module = optional("TensorBoard", "tensorboard", "tensorboardX", "torch.utils.tensorboard")
    return module.SummaryWriter
