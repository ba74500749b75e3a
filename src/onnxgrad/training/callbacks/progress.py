"""The progress of training: a bar in a terminal, and lines in a notebook or a log."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from datetime import timedelta
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxgrad.errors import printable
from onnxgrad.training.callbacks.base import Callback, Callbacks, TrainingControl
from onnxgrad.training.state import number_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress, TaskID

_VALIDATION = "validation_"
# Rich exits when the terminal or the pipe behind stderr is closed, and raises `IndexError` when it
# stops a bar that it could not start: training goes on
_CLOSED = (OSError, SystemExit, IndexError)
_TIME, _BAR = 8, 4  # columns of a terminal: of the time left, and of the bar at least


class Progress(Callback):
    """Shows the progress of training on stderr: epoch, loss, learning rate, speed, validation.

    In a terminal this is a bar with the time left, which ends with the training, also after Ctrl-C
    or an error. In a notebook, and where stderr is a file or a pipe, it is a line for every epoch,
    and one every `seconds` within an epoch. `onnxgrad report` draws the curves of the losses.

    In a terminal and in a notebook, `Trainer.fit` adds a `Progress` by itself, whose lines for
    epochs are at least a second apart. A `Progress` among the callbacks takes its place, also one
    that writes to `rich.console.Console(quiet=True)`.

    Args:
        seconds: the least time between two lines within an epoch; no effect on the bar.
        console: a `rich.console.Console` to write to; None is stderr.
        epoch_seconds: the least time between the lines of two epochs; the last one has a line.

    Examples:
        >>> from onnxgrad.training.callbacks.progress import Progress
        >>> Progress(seconds=60).seconds
        60
    """

    writes = True
    _open = ("_console", "_bar")

    def __init__(
        self, seconds: float = 10.0, console: Console | None = None, epoch_seconds: float = 0.0
    ) -> None:
        self.seconds, self.console, self.epoch_seconds = seconds, console, epoch_seconds
        self._bar: RichProgress | None = None

    def on_train_begin(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Choose a progress bar or lines of text; the bar is shown from the first step on."""
        from rich.console import Console

        console = self._console = self.console or Console(stderr=True)
        self._bar, self._shown = None, time.monotonic()
        self._started: tuple[float, float] | None = None  # time, and share that was done then
        self._evaluation, self._evaluated = "", 0  # text of an evaluation to print, and its step
        if _can_draw_bar(console, chosen=self.console is not None):
            self._bar = _progress_bar(console)
            self._task: TaskID | None = None

    def on_epoch_begin(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Print the results of an evaluation that came after the end of the last epoch."""
        self._print_evaluation()

    def on_step_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Show the loss, the learning rate and the speed."""
        self._print_evaluation()
        now = time.monotonic()
        if self._started is None:
            self._started = now, _share_done(trainer.progress)
        if self._bar is not None:
            self._update_bar(trainer.progress, state)
        elif now - self._shown >= self.seconds:
            head = f"{_epoch_text(trainer.progress)}{self._time_left_text(trainer.progress)}"
            self._print_loss_and_rate(head, trainer, state)

    def on_evaluate(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Show the results for validation data."""
        self._evaluation, self._evaluated = _validation_text(state), state.step
        if self._bar is not None:
            self._update_bar(trainer.progress, state)

    def on_epoch_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Show the results of the epoch."""
        progress = trainer.progress
        if self._bar is not None:
            self._update_bar(progress, state)
        elif (
            time.monotonic() - self._shown >= self.epoch_seconds
            or progress.epoch + 1 >= progress.epochs
        ):
            self._print_loss_and_rate(_epoch_text(progress), trainer, state)
        self._evaluation = ""

    def on_train_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Remove the bar, and show the cursor again."""
        bar, self._bar = self._bar, None
        if bar is None:
            self._print_evaluation()
        elif bar.live.is_started:  # a bar that was not started was never shown
            with suppress(*_CLOSED):
                bar.stop()

    def _update_bar(self, progress: Any, state: Any) -> None:
        """Show loss, metrics, learning rate and speed in the bar, which the first call starts."""
        assert self._bar is not None
        total, done = _total_and_done_counts(progress)
        epoch = _epoch_text(progress)
        width = self._console.width - len(epoch) - _TIME - _BAR - 3  # three gaps
        texts = _result_texts(progress, state, _validation_text(state))
        fields: dict[str, Any] = {"epoch": epoch, "report": printable(_cut_to_width(*texts, width))}
        with suppress(*_CLOSED):
            if self._task is None:  # where training resumes, the time left must not count the start
                self._task = self._bar.add_task("", total=total, completed=int(done), **fields)
                self._bar.start()
            self._bar.update(self._task, total=total, completed=done, **fields)

    def _print_evaluation(self) -> None:
        """Print the results of the last evaluation, unless they were printed before."""
        if self._evaluation and self._bar is None:
            self._print_line(f"step {self._evaluated}: {self._evaluation}")
        self._evaluation = ""

    def _print_loss_and_rate(self, head: str, trainer: Any, state: Any) -> None:
        """Print a line of `head`, such as the epoch, and loss, metrics, learning rate and speed."""
        self._shown = time.monotonic()
        results, conditions = _result_texts(trainer.progress, state, self._evaluation)
        self._print_line(f"{head}: {', '.join(results + conditions)}")

    def _print_line(self, line: str) -> None:
        """Print a line on the console."""
        from rich.text import Text

        with suppress(*_CLOSED):
            self._console.print(Text(printable(line)), soft_wrap=True)

    def _time_left_text(self, progress: Any) -> str:
        """Return the share of training done and the time left as text; "" if they are unknown."""
        share = _share_done(progress)
        if not share or self._started is None:
            return ""
        start, before = self._started
        text = f", {100 * share:.0f} %"
        if share > before:
            left = (time.monotonic() - start) * (1 - share) / (share - before)
            text += f", {timedelta(seconds=round(left))} left"
        return text


def with_usual_progress(callbacks: Callbacks) -> Callbacks:
    """Return the callbacks; if a person watches, with a `Progress`, which is added if missing."""
    if callbacks.silent or any(isinstance(c, Progress) for c in callbacks.callbacks):
        return callbacks
    return callbacks.with_watcher(Progress(epoch_seconds=1.0)) if is_watched() else callbacks


def is_watched() -> bool:
    """Return whether a person sees stderr: in a terminal, or in a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    in_notebook = type(shell).__name__ == "ZMQInteractiveShell"
    return in_notebook or (sys.stderr is not None and sys.stderr.isatty())


def _progress_bar(console: Console) -> RichProgress:
    """Return a progress bar of rich: epoch, bar, time left, and a text on the results."""
    from rich import progress
    from rich.table import Column

    whole = Column(no_wrap=True)  # the bar is the first to be shortened
    report = Column(no_wrap=True, overflow="ellipsis")
    return progress.Progress(
        progress.TextColumn("{task.fields[epoch]}", markup=False, table_column=whole),
        progress.BarColumn(bar_width=None),
        progress.TimeRemainingColumn(table_column=Column(min_width=_TIME, no_wrap=True)),
        progress.TextColumn("{task.fields[report]}", markup=False, table_column=report),
        console=console,
        refresh_per_second=4,
    )


def _can_draw_bar(console: Console, chosen: bool) -> bool:
    """Return whether a console can draw a progress bar.

    `chosen`: whether the user passed the console. FORCE_COLOR in the environment makes rich take
    any console for a terminal.
    """
    is_terminal = console.is_terminal if chosen else console.file.isatty()
    return is_terminal and not (console.is_dumb_terminal or console.is_jupyter)


def _total_and_done_counts(progress: Any) -> tuple[float | None, float]:
    """Return two counts of steps or rows: of the whole training (None if unknown), and done."""
    if progress.steps:
        return progress.steps, progress.step
    if progress.total_rows:
        rows = progress.epoch * progress.total_rows + progress.rows
        return progress.epochs * progress.total_rows, rows
    return None, progress.rows


def _share_done(progress: Any) -> float:
    """Return the share of training that is done; 0 if unknown."""
    total, done = _total_and_done_counts(progress)
    return done / total if total else 0.0


def _epoch_text(progress: Any) -> str:
    """Return the number of the epoch and of all epochs, such as "epoch 2/10"."""
    return f"epoch {progress.epoch + 1}/{progress.epochs}"


def _result_texts(progress: Any, state: Any, validation: str) -> tuple[list[str], list[str]]:
    """Return texts for the losses and metrics, and texts for the learning rate and the speed."""
    rate = state.learning_rate
    conditions = [] if rate is None else [f"learning rate {number_text(rate, '.3g')}"]
    results = [f"loss {progress.loss:.4g}", *filter(None, validation.split(", "))]
    return results, [*conditions, f"{progress.rows_per_second:,.0f} rows/s"]


def _cut_to_width(results: list[str], conditions: list[str], width: int) -> str:
    """Return as many of the texts as fit into a line of `width` characters.

    Conditions, such as the learning rate, are left out first; the loss is never left out.
    """
    left = [*results, *conditions]
    while len(left) > 1 and len(", ".join(left)) > width:
        left.pop(len(results) if len(left) > len(results) else -1)
    return ", ".join(left)


def _validation_text(state: Any) -> str:
    """Return the results of the last evaluation, such as "validation loss 0.5, accuracy 0.8"."""
    found = ({n: v for n, v in r.items() if n.startswith(_VALIDATION)} for r in state.history[::-1])
    parts = [
        f"{name.removeprefix(_VALIDATION).replace('_', ' ')} {number_text(value)}"
        for name, value in next(filter(None, found), {}).items()
        if isinstance(value, (Real, np.ndarray))
    ]
    return f"validation {', '.join(parts)}" if parts else ""
