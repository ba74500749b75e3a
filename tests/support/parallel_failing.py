"""Fails in one process of a group; `test_parallel_failures.py` starts it by torchrun or mpirun.

Usage: parallel_failing.py torch|mpi CASE FOLDER
"""

from __future__ import annotations

import os
import sys

import numpy as np
import onnx

import onnxgrad as og

MODEL = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 17]> f (float[N,3] x) => (float[N,1] y)
    <float[3,1] w = {0.1, 0.2, 0.3}> { y = MatMul(x, w) }""")
X = np.random.default_rng(0).standard_normal((80, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)
ENGINE, CASE, FOLDER = sys.argv[1:]


def begun() -> int:
    """Enter the group; return the number of this process."""
    if ENGINE == "mpi":
        from mpi4py import MPI

        return MPI.COMM_WORLD.Get_rank()
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    return torch.distributed.get_rank()


rank = begun()


def tell(text: str) -> None:
    """Print a line at once: other processes print, too."""
    os.write(1, f"{rank} {text}\n".encode())


class Failing(og.Callback):
    """Calls a function in one event of the second process."""

    def __init__(self, event: str, act) -> None:
        self.act = act
        setattr(self, event, self._event)

    def _event(self, trainer, state, control) -> None:
        if rank == 1 and state.step >= 5:
            self.act()


def fail() -> None:
    """Fail as a disk does."""
    raise OSError("the disk of process 1 is gone")


def interrupt() -> None:
    """Fail as after Ctrl-C."""
    raise KeyboardInterrupt


def fit(model=MODEL, callbacks=(), data=(X, Y), arguments=None, **options):
    """Train for some steps."""
    callbacks = [*callbacks, og.Checkpoint(FOLDER, every_steps=100)]
    trainer = og.Trainer(model, "mse", callbacks=callbacks, **(arguments or {}))
    return trainer.fit(*data, **{"epochs": 3, "batch_size": 10, **options})


class Stream:
    """Batches whose number no description tells: fewer in the second process."""

    def __iter__(self):
        return iter([(X[:8], Y[:8])] * (6 - 2 * rank))


class Sampled(Stream):
    """Batches that differ from the second one on."""

    def __iter__(self):
        return iter([(X[:8], Y[:8]), (X[rank:][:8], Y[rank:][:8])])


OTHER = {  # what differs, and arguments of `fit` and of the trainer, for each process
    "epochs": [{"epochs": 2 + r} for r in (0, 1)],
    "shuffle": [{"shuffle": not r} for r in (0, 1)],
    "batch_size": [{"batch_size": 10 + r} for r in (0, 1)],
    "resume": [{}, {"resume": FOLDER}],
    "validation": [{}, {"validation": 0.2}],
    "validation.digest": [{"validation": (X[:20] + r, Y[:20])} for r in (0, 1)],
    "sample weights": [{}, {"data": (X, Y), "sample_weight": np.ones(80)}],
    "data.digest": [{"data": (X, Y)}, {"data": (X, Y + 1)}],
    "seed": [{"arguments": {"seed": r}} for r in (0, 1)],
    "learning_rate": [{"arguments": {"learning_rate": 0.1 + r}} for r in (0, 1)],
    "parallel.sync_batch_norm": [
        {"arguments": {"parallel": og.DataParallel(sync_batch_norm=bool(r))}} for r in (0, 1)
    ],
    "loss": [{"arguments": {"loss_options": o}} for o in (None, {"delta": 2.0})],
    "callbacks": [{"callbacks": [og.EarlyStopping("loss", patience=5 + r)]} for r in (0, 1)],
    "gradient norms": [{}, {"callbacks": [og.Norms(every_steps=3)]}],
    "metrics": [{"arguments": {"metrics": [m]}} for m in ("mae", "r2")],
}


def compared() -> None:
    """Print the error of each difference."""
    for name, options in OTHER.items():
        given = {**options[rank]}
        arguments = given.pop("arguments", {})
        loss = "huber" if "loss_options" in arguments else "mse"
        callbacks, data = given.pop("callbacks", []), given.pop("data", (X, Y))
        trainer = og.Trainer(MODEL, loss, callbacks=callbacks, **arguments)
        try:
            trainer.fit(*data, **{"batch_size": 10, **given})
            tell(f"{name}: NOTHING")
        except ValueError as e:
            tell(f"{name}: {e}")
    tell(f"COMPARED {len(OTHER) + 1}")  # with the slots below
    trainer = fit(callbacks=[og.History(f"{FOLDER}/h.csv")] if rank == 0 else [])  # which writes
    if rank:
        trainer.state.slots = {"w": {name: x + 1 for name, x in trainer.state.slots["w"].items()}}
    try:
        trainer.partial_fit(X, Y, batch_size=10)
    except ValueError as e:
        tell(f"slot w.m: {e}")
    tell(f"TRAINED {trainer.state.step}")


def again() -> None:
    """Catch the error, and train again, which cannot go well."""
    for _ in range(2):
        try:
            fit(callbacks=[Failing("on_step_end", fail)])
        except Exception as e:
            tell(f"CAUGHT {type(e).__name__}: {e}")


CASES = {
    "callback": lambda: fit(callbacks=[Failing("on_step_end", fail)]),
    "end": lambda: fit(callbacks=[Failing("on_train_end", fail)]),
    "interrupt": lambda: fit(callbacks=[Failing("on_step_end", interrupt)]),
    "exit": lambda: fit(callbacks=[Failing("on_step_end", lambda: sys.exit(5))]),
    "model": lambda: fit("missing.onnx" if rank else MODEL),
    "before": lambda: fail() if rank else fit(),  # without a trainer
    "never": lambda: rank or fit(),
    "fewer": lambda: [fit() for _ in range(2 - rank)],
    "data": lambda: fit(data=("missing.parquet" if rank else X, "y" if rank else Y)),
    "length": lambda: fit(data=(Stream(),), batch_size=None),
    "batch": lambda: fit(data=(Sampled(),), batch_size=None),
    "compared": compared,
    "again": again,
}
CASES[CASE]()
if ENGINE == "torch":
    sys.modules["torch.distributed"].destroy_process_group()  # its threads must not outlive it
