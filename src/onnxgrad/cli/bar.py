"""The progress bar of `onnxgrad train`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from onnxgrad.cli.console import ignoring_closed_output
from onnxgrad.cli.signals import StopRequests

if TYPE_CHECKING:
    from onnxgrad.training.progress import FitProgress as State


class Bar:
    """A callback for `fit`: shows the progress, and raises `Stopped` after a signal."""

    def __init__(self, console: Console, stop: StopRequests) -> None:
        self.console, self.stop = console, stop
        self.rows = 0

    def __enter__(self) -> Bar:
        self.progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[report]}"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.bar = self.progress.add_task("", total=None, epoch="", report="")
        return self

    def __exit__(self, *error: object) -> None:
        if self.rows:  # otherwise it was never shown
            with ignoring_closed_output():
                self.progress.stop()

    def __call__(self, state: State) -> None:
        """Show the state after a slice of batches."""
        self.stop.hold()  # from here on, a signal must not lose what was trained
        assert state.total_rows is not None  # None only for an iterable of batches
        self.rows = state.epoch * state.total_rows + state.rows
        with ignoring_closed_output():
            self._show(state, state.epochs * state.total_rows)
        self.stop.check()

    def _show(self, state: State, total: int) -> None:
        parts = [f"loss {state.loss:.4g}"]
        if state.validation_loss is not None:
            parts.append(f"validation {state.validation_loss:.4g}")
        self.progress.start()
        self.progress.update(
            self.bar,
            total=total,
            completed=self.rows,
            epoch=f"{state.epoch + 1}/{state.epochs}",
            report=", ".join([*parts, f"{state.rows_per_second:,.0f} rows/s"]),
        )
