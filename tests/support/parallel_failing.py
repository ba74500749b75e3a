"""What processes of `tests/parallel/test_parallel_failures.py` do, of which one fails or differs.

Each function runs in every process of a group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import onnxgrad as og
from tests.support.models import parse_model
from tests.support.process_pool import rank_and_size

X = np.random.default_rng(0).standard_normal((80, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)


def linear_file() -> bytes:
    """Return a model of one matrix."""
    text = "f (float[N,3] x) => (float[N,1] y) { y = MatMul(x, w) }"
    return parse_model(text, w=[[0.1], [0.2], [0.3]]).SerializeToString()


class FailingCallback(og.callbacks.Callback):
    """Calls a function in one event of the second process."""

    def __init__(self, event: str, act: Callable[[], Any]) -> None:
        self.act = act
        setattr(self, event, self._act_in_event)

    def _act_in_event(self, trainer: Any, state: Any, control: Any) -> None:
        if rank_and_size()[0] == 1 and state.step >= 5:
            self.act()


def lose_disk() -> None:
    """Fail as a disk does."""
    raise OSError("the disk of process 1 is gone")


def interrupt() -> None:
    """Fail as after Ctrl-C."""
    raise KeyboardInterrupt


ACTS = {  # event, and what happens in it
    "callback": ("on_step_end", lose_disk),
    "end": ("on_train_end", lose_disk),
    "interrupt": ("on_step_end", interrupt),
    "exit": ("on_step_end", lambda: sys.exit(5)),
}


def fit_linear(
    folder: Path, model: Any = None, callbacks: Any = (), data: Any = (X, Y), **options: Any
) -> og.Trainer:
    """Train for some steps."""
    callbacks = [*callbacks, og.Checkpoint(folder, every_steps=100)]
    trainer = og.Trainer(model or linear_file(), "mse", callbacks=callbacks)
    return trainer.fit(*data, **{"epochs": 3, "batch_size": 10, **options})


class BatchStream:
    """Batches whose number no description tells: fewer in the second process."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(X[:8], Y[:8])] * (6 - 2 * rank_and_size()[0]))


class SampledStream:
    """Batches that differ from the second one on."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(X[:8], Y[:8]), (X[rank_and_size()[0] :][:8], Y[rank_and_size()[0] :][:8])])


def fail_in_one_process(case: str, folder: Path) -> None:
    """Train, and fail in the second process, or end, or differ."""
    rank = rank_and_size()[0]
    if case in ACTS:
        fit_linear(folder, callbacks=[FailingCallback(*ACTS[case])])
    elif case == "data":
        fit_linear(folder, data=("missing.parquet" if rank else X, "y" if rank else Y))
    elif case == "model":
        fit_linear(folder, "missing.onnx" if rank else None)
    elif case == "before" and rank:  # without a trainer
        lose_disk()
    elif case in ("never", "before"):
        if not rank:
            fit_linear(folder)
    elif case == "fewer":
        for _ in range(2 - rank):
            fit_linear(folder)
    else:
        stream = {"length": BatchStream, "batch": SampledStream}[case]
        fit_linear(folder, data=(stream(),), batch_size=None)


def train_after_failure(folder: Path) -> list[str]:
    """Catch the error, and train again, which cannot go well; return both errors."""
    errors = []
    for _ in range(2):
        try:
            fit_linear(folder, callbacks=[FailingCallback(*ACTS["callback"])])
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def differences(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return, by what differs, arguments of `fit` and of the trainer for each process."""
    two = (0, 1)
    synchronized = [og.parallel.DataParallel(sync_batch_norm=bool(r)) for r in two]
    return {
        "epochs": [{"epochs": 2 + r} for r in two],
        "shuffle": [{"shuffle": not r} for r in two],
        "batch_size": [{"batch_size": 10 + r} for r in two],
        "resume": [{}, {"resume": folder}],
        "validation": [{}, {"validation": 0.2}],
        "validation.digest": [{"validation": (X[:20] + r, Y[:20])} for r in two],
        "sample weights": [{}, {"data": (X, Y), "sample_weight": np.ones(80)}],
        "data.digest": [{"data": (X, Y)}, {"data": (X, Y + 1)}],
        "seed": [{"arguments": {"seed": r}} for r in two],
        "learning_rate": [{"arguments": {"learning_rate": 0.1 + r}} for r in two],
        "parallel.sync_batch_norm": [{"arguments": {"parallel": p}} for p in synchronized],
        "loss": [{"arguments": {"loss_options": o}} for o in (None, {"delta": 2.0})],
        "callbacks": [{"callbacks": [og.EarlyStopping("loss", patience=5 + r)]} for r in two],
        "gradient norms": [{}, {"callbacks": [og.callbacks.Norms(every_steps=3)]}],
        "metrics": [{"arguments": {"metrics": [m]}} for m in ("mae", "r2")],
    }


def compare_beginnings(folder: Path) -> tuple[dict[str, str], int]:
    """Return the error of each difference, and the steps of a training without one."""
    rank, errors = rank_and_size()[0], {}
    for name, options in differences(folder).items():
        given = options[rank]
        arguments = given.pop("arguments", {})
        loss = "huber" if "loss_options" in arguments else "mse"
        callbacks, data = given.pop("callbacks", []), given.pop("data", (X, Y))
        trainer = og.Trainer(linear_file(), loss, callbacks=callbacks, **arguments)
        try:
            trainer.fit(*data, **{"batch_size": 10, **given})
            errors[name] = ""
        except ValueError as error:
            errors[name] = str(error)
    history = (
        [og.callbacks.History(folder / "h.csv")] if rank == 0 else []
    )  # what the first one has may differ
    trainer = fit_linear(folder, callbacks=history)
    if rank:
        trainer.state.slots = {"w": {name: x + 1 for name, x in trainer.state.slots["w"].items()}}
    try:
        trainer.partial_fit(X, Y, batch_size=10)
    except ValueError as error:
        errors["slot w.m"] = str(error)
    return errors, trainer.state.step
