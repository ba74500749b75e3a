"""What `onnxgrad train` prints after a training."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from onnxgrad.cli.command_options import TrainOptions
from onnxgrad.cli.console import ignore_closed_output, make_console, print_message
from onnxgrad.cli.job import Job
from onnxgrad.errors import printable
from onnxgrad.training.callbacks.early_stopping import better_direction
from onnxgrad.training.diagnose import KeptWeights, end_reason
from onnxgrad.training.parameters.choice import names_and_reasons, trainable
from onnxgrad.training.parameters.table import Tensor
from onnxgrad.training.precision import rounding_text
from onnxgrad.training.trainer import Trainer

_VALIDATION = "validation_"
_LISTED = 3  # most constants that are listed without --verbose


def epoch_entries(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the losses and metrics of each epoch, or the loss of an unfinished first epoch."""
    entries = [entry for entry in trainer.history if "loss" in entry]
    so_far = trainer.progress.loss
    return entries if entries or not math.isfinite(so_far) else [{"epoch": 1, "loss": so_far}]


def _untrained_text(rows: Sequence[Tensor], options: TrainOptions) -> str:
    """Return a text that lists constants that do not train: a few, or all if `verbose`."""
    if options.verbose or len(rows) <= _LISTED:
        return names_and_reasons(rows, len(rows))
    first = sorted(rows, key=lambda row: not row.doubtful)[:_LISTED]
    model = shlex.quote(options.model)
    return (
        f"{len(rows)} constants, as {names_and_reasons(first)}; --verbose or `onnxgrad trainable "
        f"{model}` lists all"
    )


@dataclass
class Report:
    """The results of a training, as a table and as JSON.

    `seconds` is how long it took, and `rows` how many it went through, counted once an epoch.
    `stopped` says that a signal ended it, so that nothing more is computed.
    """

    job: Job
    options: TrainOptions
    seconds: float
    rows: int
    files: Sequence[Path]
    stopped: bool = False
    samples: Sequence[tuple[str, str]] = ()  # (prompt, continuation)

    @cached_property
    def kept_weights(self) -> KeptWeights:
        """The epoch and step after which the weights were written."""
        return KeptWeights.from_state(self.job.trainer.state)

    @cached_property
    def written_entry(self) -> dict[str, Any]:
        """The losses and metrics of the written weights, by their names in the history."""
        kept, so_far = self.kept_weights, self.job.trainer.progress.loss
        entry = dict(kept.record)
        if not kept.whole and kept.step and math.isfinite(so_far):
            entry["loss"] = so_far
        own = {f"{_VALIDATION}{name}": value for name, value in self.validation.items()}
        return {**entry, "epoch": kept.epoch, **own}

    @cached_property
    def validation(self) -> dict[str, Any]:
        """The loss and the metrics of the written model on validation data; {} if there is none.

        They are empty, too, if a signal ended the training after steps that were not evaluated.
        """
        held_out, record = self.job.task.validation, self.kept_weights.record
        if held_out is None:
            return {}
        if "validation_loss" in record:
            found = {n: v for n, v in record.items() if n.startswith(_VALIDATION)}
            return {name.removeprefix(_VALIDATION): value for name, value in found.items()}
        if self.stopped:
            return {}
        return self.job.trainer.evaluate(held_out)

    @property
    def advice(self) -> str:
        """A sentence that says what to try if the training learned nothing; else ""."""
        return self.job.task.advise(self.job.trainer.history)

    @property
    def rows_per_second(self) -> float:
        """The count of rows that the training processed in a second."""
        return self.rows / max(self.seconds, 1e-9)

    def as_json(self, broken: str) -> dict[str, Any]:
        """Return the results by the documented keys of `--json`; `broken` says why training
        ended.
        """
        trainer = self.job.trainer
        return {
            "files": [str(file) for file in self.files],
            "stopped": broken or ("early" if trainer.state.stop_reason == "callback" else "done"),
            "reason": broken or end_reason(trainer),
            "epochs": trainer.state.epoch,
            "steps": trainer.state.step,
            "rows": self.job.rows,
            "validation_rows": self.job.validation_rows,
            "seconds": self.seconds,
            "rows_per_second": self.rows_per_second,
            "epoch": self.kept_weights.epoch,
            "step": self.kept_weights.step,
            "loss": self.written_entry.get("loss"),
            "validation": self.validation,
            "trained": list(trainer.trained),
            "rounding": trainer.rounding,
            "columns": self.job.trainer._names.columns,
            "target": self.job.trainer._names.target,
            "remarks": [*self.job.messages, *filter(None, [self.advice])],
            "samples": [{"prompt": prompt, "text": text} for prompt, text in self.samples],
            "history": trainer.history,
        }

    def show(self, stderr: bool) -> None:
        """Print a table of losses and metrics, the speed, and the files written."""
        console = make_console(stderr)
        with ignore_closed_output():
            if shown := self._shown_epochs():
                console.print(_epoch_table(shown))
            console.print(
                f"{self.rows_per_second:,.0f} rows/s, {self.seconds:.1f} s", highlight=False
            )
        if self.job.trainer.state.stop_reason in ("max_iter", "callback"):
            print_message(
                f"{end_reason(self.job.trainer)}; the model has {self.kept_weights}", stderr
            )
        texts = [self.advice, *(f"{prompt} \u2192 {text}" for prompt, text in self.samples)]
        texts += [f"wrote {file}" for file in self.files]
        for text in filter(None, [*texts, rounding_text(self.job.trainer.rounding)]):
            print_message(text, stderr)
        options = self.options
        rows = [] if options.train or options.lora else trainable(self.job.task.model)
        if untrained := [t for t in rows if not t.trains]:
            print_message(f"not trained by default: {_untrained_text(untrained, options)}", stderr)
        for remark in self.job.task.remarks:
            print_message(remark, stderr)

    def _shown_epochs(self) -> dict[str, dict[str, Any]]:
        """Return {title: losses and metrics} of the first, the best and the last epoch, and of the
        epoch whose weights were written.
        """
        trainer, found = self.job.trainer, {}
        if entries := [entry for entry in trainer.history if "loss" in entry]:
            monitor = self.options.monitor or f"{_VALIDATION}loss"
            judged = [e for e in entries if monitor in e]
            monitor = monitor if judged else "loss"
            best = min if better_direction(monitor, trainer.metrics) == "min" else max
            found["first"] = entries[0]
            found["best"] = best(judged or entries, key=lambda entry: entry[monitor])
            found["last"] = entries[-1]
        if self.kept_weights.step:
            found["kept"] = self.written_entry
        return found


def _epoch_table(entries: Mapping[str, dict[str, Any]]) -> Table:
    """Return a table of losses and metrics, with a column for each epoch and its titles."""
    titles: dict[int, list[str]] = {}
    columns: dict[int, dict[str, Any]] = {}
    for title, entry in entries.items():
        titles.setdefault(entry["epoch"], []).append(title)
        columns[entry["epoch"]] = entry
    numbers = sorted(columns)
    table = Table("", *(f"epoch {n}\n{', '.join(titles[n])}" for n in numbers))
    for name in dict.fromkeys(name for n in numbers for name in columns[n]):
        if name == "loss" or name.startswith(_VALIDATION):
            title = "training loss" if name == "loss" else name.replace("_", " ")
            cells = [_number_text(name, columns[n].get(name)) for n in numbers]
            table.add_row(Text(printable(title)), *map(Text, cells))
    return table


def _number_text(name: str, value: Any) -> str:
    """Return a value of the history as text: an accuracy in percent, a number with 5 digits."""
    if not isinstance(value, Real):
        return "" if value is None else str(value)
    return f"{value:.2%}" if "accuracy" in name else f"{value:.5g}"
