"""Checkpoints: the state of training on the disk, from which `fit(..., resume=)` continues."""

from __future__ import annotations

import json
import math
import os
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from onnxgrad.checks import check_choice, check_count, check_positive
from onnxgrad.errors import argument, unknown
from onnxgrad.reporting import logger
from onnxgrad.training import saving
from onnxgrad.training.callbacks.base import Callback, TrainingControl
from onnxgrad.training.callbacks.early_stopping import better_direction
from onnxgrad.training.equality import digest_bytes

T = TypeVar("T")
_NAME = re.compile(r"step-(\d{10,})")


class Checkpoint(Callback):
    """Writes the state of training into `folder`, each checkpoint as `folder/step-<number>`.

    A checkpoint is written into a hidden folder, synced to the disk and renamed: every checkpoint
    is complete, also after a crash. It holds weights, slots, buffers, counts, history, and the
    state of schedules and callbacks, as `TrainState.save` writes them; `trainer.fit(...,
    resume=folder)` continues from the newest checkpoint bit for bit, also within an epoch. If a
    file has changed since it was written, by its digest, a warning names it, and training continues
    from the checkpoint before.

    Other folders in `folder` are left alone, also copies of checkpoints under other names.

    A checkpoint is written at the end of every epoch, or where `every_steps` or `every_seconds` say
    so instead, when another callback sets `control.save`, and at the end of training: also after
    Ctrl-C, SIGTERM or an error, but not where the loss or a weight became NaN.

    Args:
        folder: where to write, created if it is missing.
        every_steps: write after every so many steps.
        every_seconds: write when so many seconds have passed since the last checkpoint.
        keep: how many of the newest checkpoints to keep; the best checkpoint by `monitor` is kept
            as well.
        monitor: name of a value of the history, such as "validation_loss"; None: no checkpoint is
            the best. Of a stack, the value of its best member counts.
        mode: "min" if lower is better, "max" if higher is; "auto" decides by the name.

    Raises:
        ValueError: an invalid argument; when training begins, a checkpoint of a later step in
            `folder`, or another folder of such a name; in training, a `monitor` that the history
            does not have.
        OSError: in training, the folder cannot be written.

    Examples:
        >>> from onnxgrad.training.callbacks.checkpoint import Checkpoint
        >>> Checkpoint("runs/a", every_steps=100, keep=3).every_steps
        100
    """

    compared_arguments = ("monitor", "mode")
    writes = True

    def __init__(
        self,
        folder: str | os.PathLike,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        keep: int = 2,
        monitor: str | None = None,
        mode: str = "auto",
    ) -> None:
        if every_seconds is not None:
            check_positive("every_seconds", every_seconds, infinite=True)
        self.folder = Path(folder)
        self.every_steps, self.every_seconds = every_steps, every_seconds
        self.keep, self.monitor = check_count("keep", keep), monitor
        self.mode = check_choice("mode", mode, ("auto", "min", "max"))

    @property
    def checkpoints(self) -> Path:
        """The folder into which `write_checkpoint` writes."""
        return self.folder

    def on_train_begin(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Create the folder, remove leftovers of a crash, and rename damaged later checkpoints."""
        self.folder.mkdir(parents=True, exist_ok=True)
        saving.remove_leftovers(self.folder, _NAME)
        for path in _checkpoint_folders(self.folder)[::-1]:
            if _step_of_checkpoint(path) > state.step:
                self._check_later_checkpoint(path, state)
        self._better = self.mode
        if self.monitor and self.mode == "auto":
            self._better = better_direction(self.monitor, trainer.metrics)
        self._began, self._when = state.step, time.monotonic()

    def on_epoch_begin(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Raise `ValueError` if no record of the history has the value `monitor` after an epoch."""
        if self.monitor and state.history and "judged" not in self.entry(state):
            names = dict.fromkeys(name for record in state.history for name in record)
            raise unknown("monitor of Checkpoint", self.monitor, names)

    def on_step_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Ask for a checkpoint after `every_steps` steps or `every_seconds` seconds."""
        by_step = self.every_steps and state.step % self.every_steps == 0
        seconds = time.monotonic() - self._when
        if by_step or (self.every_seconds and seconds >= self.every_seconds):
            control.save = True

    def on_epoch_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Ask for a checkpoint, and remember the best epoch."""
        if not self.every_steps and not self.every_seconds:
            control.save = True
        self._remember_best_step(state, control)

    def on_evaluate(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Remember the best evaluation within an epoch."""
        self._remember_best_step(state, control)

    def on_train_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Write a checkpoint of the last state, unless the loss or a weight became NaN."""
        if state.step > self._began and state.stop_reason != "not finite":
            self.write_checkpoint(state)

    def write_checkpoint(self, state: Any) -> None:
        """Write a checkpoint of the state, and remove old checkpoints.

        Raises:
            FileExistsError: another folder has the name of the checkpoint.
        """
        path, (arrays, numbers) = _checkpoint_path(self.folder, state.step), state.contents()
        training = json.dumps(numbers["identity"], sort_keys=True).encode()
        mark = {"training": digest_bytes(training)}
        own = [
            p for p in checkpoints(self.folder) if saving.read_mark(p) == mark | {"name": p.name}
        ]
        if path.exists() and path not in own:
            raise FileExistsError(f"{path} is no checkpoint of this training: rename this folder")
        saving.write_state(path, arrays, numbers, mark | {"name": path.name})
        self._when = time.monotonic()
        logger.info("checkpoint %s", path)
        best = self.entry(state).get("best_step")
        others = [p for p in own if p not in (path, _checkpoint_path(self.folder, best))]
        for old in others[: max(0, len(others) - self.keep + 1)]:
            saving.remove_state(old)

    def _check_later_checkpoint(self, path: Path, state: Any) -> None:
        """Rename the checkpoint `path`, whose step is later than that of `state`, if it is damaged.

        Raises:
            ValueError: the folder is an undamaged checkpoint, or no checkpoint.
        """
        if not saving.is_state(path) or _is_state_copy(path):
            raise ValueError(
                f"{path} has the name of a checkpoint that this training will write, and is none: "
                "rename it, or write to another folder"
            )
        try:
            saving.read_state(path)
        except ValueError as e:
            aside = path.with_name(f"{path.name}.damaged-{os.urandom(4).hex()}")
            path.rename(aside)
            warnings.warn(f"{e}; it is now {aside}, which you may remove", stacklevel=2)
            return
        raise ValueError(
            f"training begins at step {state.step}, and {path} is a checkpoint of a later step: "
            f"pass {argument('resume', str(self.folder))} to continue from it, or write to another "
            "folder"
        )

    def _remember_best_step(self, state: Any, control: TrainingControl) -> None:
        """Remember the step if its monitored value is the best, and then ask for a checkpoint."""
        record, entry = state.history[-1], self.entry(state)
        value = record.get(self.monitor)
        if value is None or entry.get("judged") == state.step:
            return
        entry["judged"] = state.step
        sign, before = -1 if self._better == "max" else 1, entry.get("best")
        known = [sign * v for v in np.ravel(value).tolist() if not math.isnan(v)]
        if known and (before is None or min(known) < sign * before):
            entry |= {"best": sign * min(known), "best_step": state.step}
            control.save = True


def checkpoints(folder: Path) -> list[Path]:
    """Return the paths of the checkpoints that were written into `folder`, the oldest first."""
    return [p for p in _checkpoint_folders(folder) if saving.is_state(p) and not _is_state_copy(p)]


def newest_checkpoint(
    folder: str | os.PathLike, read: Callable[[Path], T]
) -> tuple[Path, T] | None:
    """Return the path of the newest undamaged checkpoint in a folder, and `read(path)`.

    The folder may also be a checkpoint itself. None: it holds no checkpoint.

    Raises:
        ValueError: all checkpoints are damaged; warnings name all but the oldest.
        OSError: no checkpoint can be read.
    """
    folder = Path(folder)
    saving.restore_replaced(folder, _NAME)
    for path in _checkpoint_folders(folder):
        if saving.is_state(path) and _is_state_copy(path):
            warnings.warn(f"{path} is ignored: it was written elsewhere", stacklevel=2)
    found = checkpoints(folder)
    if not found:
        return (folder, read(folder)) if saving.is_state(folder) else None
    for path, before in zip(found[::-1], [*found[-2::-1], None], strict=True):
        try:
            return path, read(path)
        except (OSError, ValueError) as e:
            if before is None:
                raise
            warnings.warn(f"{e}; the checkpoint before it is {before}", stacklevel=2)
    raise AssertionError


def _checkpoint_folders(folder: Path) -> list[Path]:
    """Return the folders in `folder` that are named as checkpoints, the oldest first."""
    named = (path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))
    return sorted((path for path in named if path.is_dir()), key=_step_of_checkpoint)


def _step_of_checkpoint(path: Path) -> int:
    """Return the step of a checkpoint, by the name of its folder."""
    return int(path.name.removeprefix("step-"))


def _is_state_copy(path: Path) -> bool:
    """Return whether the state in `path` was written under another name, or by another writer."""
    mark = saving.read_mark(path)
    return mark is not None and mark.get("name") != path.name


def _checkpoint_path(folder: Path, step: int | None) -> Path:
    """Return the path of the checkpoint of a step in `folder`; None stands for step 0."""
    return folder / f"step-{step or 0:010d}"
