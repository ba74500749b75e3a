"""What `onnxgrad train` says of a training that has ended."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from onnxgrad.cli.console import ignoring_closed_output, say
from onnxgrad.cli.job import Job
from onnxgrad.cli.train_options import TrainOptions
from onnxgrad.errors import printable
from onnxgrad.training.callbacks.early_stopping import EarlyStopping
from onnxgrad.training.parameters.defaults import names_and_reasons, trainable
from onnxgrad.training.parameters.table import Tensor
from onnxgrad.training.precision import rounding_text
from onnxgrad.training.trainer import Trainer

_VALIDATION = "validation_"
_LISTED = 3  # tensors that do not train, named without --verbose


def epochs(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the entries of the history that end an epoch; that of a first one that broke off."""
    entries = [entry for entry in trainer.history if "loss" in entry]
    so_far = trainer.progress.loss
    return entries if entries or not math.isfinite(so_far) else [{"epoch": 1, "loss": so_far}]


def _untrained(rows: Sequence[Tensor], options: TrainOptions) -> str:
    """Return which tensors do not train: a few, or with `--verbose` all, with the reasons."""
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
    """The results of a training.

    `seconds` is how long it took, and `rows` how many it went through, counted once an epoch.
    `stopped` says that a signal ended it, so that nothing more is computed.
    """

    job: Job
    options: TrainOptions
    seconds: float
    rows: int
    files: Sequence[Path]
    stopped: bool = False
    samples: Sequence[tuple[str, str]] = ()  # prompts, and how the model goes on

    @property
    def losses(self) -> list[float]:
        """The losses of the epochs."""
        return [entry["loss"] for entry in epochs(self.job.trainer)]

    @cached_property
    def validation(self) -> dict[str, Any]:
        """The loss and the metrics of the written model for validation data; empty without.

        They are empty, too, if a signal ended the training after steps that were not evaluated.
        """
        trainer, held_out = self.job.trainer, self.job.validation
        if held_out is None:
            return {}
        last = trainer.history[-1] if trainer.history else {}
        restored = any(
            isinstance(c, EarlyStopping) and c.entry(trainer.state).get("restored") is not None
            for c in trainer.callbacks.callbacks
        )
        if restored or last.get("step") != trainer.state.step or "validation_loss" not in last:
            if self.stopped:
                return {}
            data = held_out.data
            return trainer.evaluate(data.X, data.y, sample_weight=data.sample_weight)
        found = {n: v for n, v in last.items() if n.startswith(_VALIDATION)}
        return {name.removeprefix(_VALIDATION): value for name, value in found.items()}

    @property
    def speed(self) -> float:
        """Rows a second."""
        return self.rows / max(self.seconds, 1e-9)

    def as_json(self, reason: str) -> dict[str, Any]:
        """Return the results as the documented keys of `--json`."""
        trainer = self.job.trainer
        return {
            "files": [str(file) for file in self.files],
            "stopped": reason or ("early" if trainer.state.stop_reason == "callback" else "done"),
            "epochs": trainer.state.epoch,
            "steps": trainer.state.step,
            "rows": self.job.training.rows,
            "validation_rows": self.job.validation_rows,
            "seconds": self.seconds,
            "rows_per_second": self.speed,
            "loss": self.losses[-1] if self.losses else None,
            "validation": self.validation,
            "trained": list(trainer.trained),
            "rounding": trainer.rounding,
            "columns": self.job.task.names.columns,
            "target": self.job.task.names.target,
            "remarks": [*self.job.task.notes, *self.job.task.remarks],
            "samples": [{"prompt": prompt, "text": text} for prompt, text in self.samples],
            "history": trainer.history,
        }

    def show(self, console: Console) -> None:
        """Print a table of losses and metrics, the speed, and what was written."""
        with ignoring_closed_output():
            console.print(self._table())
            console.print(f"{self.speed:,.0f} rows/s, {self.seconds:.1f} s", highlight=False)
        for prompt, text in self.samples:
            say(f"{prompt} \u2192 {text}", console)
        for file in self.files:
            say(f"wrote {file}", console)
        if text := rounding_text(self.job.trainer.rounding):
            say(text, console)
        options = self.options
        rows = [] if options.train or options.lora else trainable(self.job.proto)
        if untrained := [t for t in rows if not t.trains]:
            say(f"not trained by default: {_untrained(untrained, options)}", console)
        for remark in self.job.task.remarks:
            say(remark, console)

    def _table(self) -> Table:
        table = Table("", "first", "last", "best")
        entries = epochs(self.job.trainer)
        validation = [e["validation_loss"] for e in entries if "validation_loss" in e]
        for name, losses in (("training loss", self.losses), ("validation loss", validation)):
            if losses:
                epoch = min(range(len(losses)), key=losses.__getitem__)
                best = f"{losses[epoch]:.5g} (epoch {epoch + 1})"
                table.add_row(name, f"{losses[0]:.5g}", f"{losses[-1]:.5g}", best)
        for name, value in self.validation.items():
            if name != "loss":
                shown = f"{value:.5g}" if isinstance(value, Real) else str(value)
                shown = f"{value:.2%}" if "accuracy" in name else shown
                title = printable(f"validation {name.replace('_', ' ')}")
                table.add_row(Text(title), "", Text(shown), "")
        return table
