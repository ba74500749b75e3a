"""What each process of a group does in `tests/parallel`: it trains, and returns what came out."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

import onnxgrad as og
from onnxgrad.model import weights as model_weights
from onnxgrad.model.convert import convert_precision
from onnxgrad.training.run import stages
from tests.support.exports import export_module
from tests.support.process_pool import rank_and_size
from tests.support.running import in_sweep

ROWS, CLASSES = 83, 3  # the last batch of 10 has fewer rows than 4 processes

ADAM = {"optimizer": "adam", "clip_norm": 0.5}
# Adam would make steps of the rounding of gradients that are zero, of biases before the norm
NORM = {"batch_norm": "train", "optimizer": og.optimizers.momentum()}
MISSING = {"loss": "mse", "loss_options": {"ignore_nan": True}, "metrics": ["mse"]}
SYNC, SHARDS = {"sync_batch_norm": True}, {"shard_optimizer": True}
DOUBLE = {"dtype": np.float64}
BEHIND = {"batch_axes": {"x": 1}}  # of the network "behind", whose rows are on the last axis

# network, arguments of the Trainer, arguments of DataParallel, and form of the data and the network
JOBS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "adam": ("mlp", ADAM, {}, {}),
    "double_accumulate": ("mlp", {"accumulate": 2}, {}, DOUBLE),
    "double_norm": ("norm", NORM, SYNC, DOUBLE),
    "double_shards": ("wide", {"optimizer": "adam", "clip_norm": 1.0}, SHARDS, DOUBLE),
    "double_divided_shards": (
        "wide",
        {"optimizer": "adam"},
        SHARDS,
        DOUBLE | {"weighted": True, "divided": True},
    ),
    "double_large_shards": ("wide", {"clip_norm": 1.0}, SHARDS, DOUBLE | {"large": True}),
    "double_average": (
        "norm",
        {"batch_norm": "train", "optimizer": og.optimizers.ema(og.optimizers.momentum(), 0.9)},
        SYNC,
        DOUBLE | {"share": 0.3},
    ),
    "masked": ("mlp", MISSING | {"accumulate": 2}, {}, {"masked": True}),
    # without accumulation, where the count of terms is in the message of the gradients
    "double_masked": ("mlp", MISSING | {"clip_norm": 0.5}, {}, DOUBLE | {"masked": True}),
    "double_cached": ("mlp", {"train": "2.*", "optimizer": "adam"}, {}, DOUBLE | {"cached": True}),
    "own_rows": ("mlp", {}, {"shards": True}, {"batches": True}),
    "own_rows_behind": ("behind", BEHIND, {"shards": True}, {"batches": True}),
    "half_mixed": ("mlp", {"optimizer": "adam", "precision": "mixed"}, SHARDS, {"half": True}),
}
MORE_JOBS = {
    "sgd": ("mlp", {"optimizer": og.optimizers.sgd()}, {}, {}),
    "accumulate": ("mlp", {"optimizer": og.optimizers.momentum(), "accumulate": 3}, {}, {}),
    "double": ("mlp", ADAM, {}, DOUBLE),
    "norm": ("norm", NORM, SYNC, {}),
    "images": ("images", NORM, SYNC, {}),
    "double_wide": ("wide", {"optimizer": "adamw"}, {}, DOUBLE),
    "double_divided": ("wide", {"clip_norm": 0.5}, {}, DOUBLE | {"divided": True}),
    "double_large": ("wide", {}, {}, DOUBLE | {"large": True}),
    "share": ("mlp", {"optimizer": "adam"}, {}, {"share": 0.3}),
    "weighted": ("mlp", {}, {}, {"weighted": True}),
    "batches": ("mlp", {}, {}, {"batches": True}),
    "behind": ("behind", BEHIND | {"accumulate": 2}, {}, {"share": 0.3}),
    "batches_behind": ("behind", BEHIND, {}, {"batches": True}),
    "half": ("mlp", ADAM, {}, {"half": True}),
}
JOB_NAMES = [*JOBS, *map(in_sweep, MORE_JOBS)]
JOBS |= MORE_JOBS


def torch_network(name: str) -> tuple[Any, tuple[int, ...]]:
    """Return a network of PyTorch, always the same, and the shape of a row."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name in ("mlp", "behind"):
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, CLASSES)), (6,)
    if name == "norm":
        norm = nn.BatchNorm1d(16)
        return nn.Sequential(nn.Linear(6, 16), norm, nn.Tanh(), nn.Linear(16, CLASSES)), (6,)
    if name == "images":
        first, second = nn.Conv2d(2, 8, 3, bias=False), nn.Conv2d(8, 8, 2, bias=False)
        layers = [first, nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), second, nn.BatchNorm2d(8)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, CLASSES)), (2, 8, 8)
    assert name == "wide"  # whose matrices are groups of their own
    return nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, CLASSES)), (200,)


def _of_columns(module: Any) -> Any:
    """Return a network that computes `module` for the columns of its input."""
    from torch import nn

    class OfColumns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = module

        def forward(self, x: Any) -> Any:
            return self.own(x.T)

    return OfColumns()


def network_file(name: str, dtype: Any = np.float32) -> bytes:
    """Return a network as a file, in training form."""
    import torch

    module, shape = torch_network(name)
    module = module.to(torch.float64 if dtype == np.float64 else torch.float32)
    example = torch.zeros(2, *shape, dtype=next(module.parameters()).dtype)
    rows = 0
    if name == "behind":
        module, example, rows = _of_columns(module), example.T, 1
    axes = {"x": {rows: "N"}}
    options = {"input_names": ["x"], "dynamic_axes": axes, "do_constant_folding": False}
    return export_module(module, (example,), train=True, **options).SerializeToString()


def job_file(job: str) -> bytes:
    """Return the network of a job as a file."""
    network, _, _, form = JOBS[job]
    return network_file(network, form.get("dtype", np.float32))


def rows_and_labels(network: str, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Return the data that a network trains on."""
    shape = {"images": (2, 8, 8), "wide": (200,)}.get(network, (6,))
    rng = np.random.default_rng(1)
    return rng.standard_normal((ROWS, *shape)).astype(dtype), rng.integers(0, CLASSES, ROWS)


@contextmanager
def _limits(form: dict[str, Any]) -> Iterator[None]:
    """Let states of any size change in place, and messages of any size be divided, for a job."""
    before = model_weights.LARGE, stages.LARGE
    if form.get("large"):
        model_weights.LARGE = 1000
    if form.get("divided"):
        stages.LARGE = 1000
    try:
        yield
    finally:
        model_weights.LARGE, stages.LARGE = before


def train_job(file: bytes, job: str, parallel: bool, epochs: int = 3, **more: Any) -> og.Trainer:
    """Return the trainer of a job after its training; with `parallel`, of all processes."""
    network, arguments, options, form = JOBS[job]
    dtype, callbacks = form.get("dtype", np.float32), more.pop("callbacks", ())
    X, y = rows_and_labels(network, dtype)
    model: Any = onnx.load_from_string(file)
    placed = np.transpose if network == "behind" else np.asarray
    if form.get("half"):
        model = convert_precision(model, ir.DataType.FLOAT16)
    how = og.parallel.DataParallel(**options) if parallel else False
    own = {"loss": "cross_entropy", "metrics": ["accuracy"], "parallel": how} | arguments
    trainer = og.Trainer(model, learning_rate=0.01, callbacks=callbacks, **own)
    more |= {"epochs": epochs, "cache": form.get("cached", False)}
    more |= {"validation": form.get("share", (placed(X[:31]), y[:31]))}
    with _limits(form):
        if form.get("batches"):
            batches = [(X[i : i + 10], y[i : i + 10]) for i in range(0, ROWS, 10)]
            if parallel and options.get("shards"):
                rank, size = rank_and_size()
                # of each batch, rows of one process; some have none left of the last one
                cut = [(b[rank::size], labels[rank::size]) for b, labels in batches]
                batches = [(b, labels) for b, labels in cut if len(b)]
                more["validation"] = placed(X[rank:31:size]), y[rank:31:size]
            batches = [(placed(b), labels) for b, labels in batches]
            return trainer.fit(batches, shuffle=False, **more)
        weight = np.linspace(0.5, 2, ROWS).astype(dtype) if form.get("weighted") else None
        if form.get("masked"):  # numbers, some of them missing, with a weight for each
            rng = np.random.default_rng(2)
            y, weight = np.eye(CLASSES, dtype=dtype)[y], rng.random((ROWS, CLASSES)).astype(dtype)
            y[rng.random(y.shape) < 0.4] = np.nan
            y[20:24] = np.nan
            more["validation"] = X[:31], y[:31], weight[:31]
        return trainer.fit(placed(X), y, sample_weight=weight, batch_size=10, **more)


def training_arrays(trainer: og.Trainer) -> dict[str, np.ndarray]:
    """Return weights, slots, buffers and history as arrays."""
    state, history = trainer.state, trainer.history
    arrays = dict(state.weights)
    arrays |= {f"buffer {name}": array for name, array in state.buffers.items()}
    for name, slots in state.slots.items():
        arrays |= {f"slot {name} {slot}": array for slot, array in slots.items()}
    for key in history[0].keys() - {"step", "epoch", "learning_rate"}:
        arrays[f"history {key}"] = np.array([entry[key] for entry in history])
    return arrays


def train_jobs(files: dict[str, bytes]) -> dict[str, dict[str, np.ndarray]]:
    """Return the arrays of jobs whose files are given, trained by all processes."""
    return {job: training_arrays(train_job(file, job, True)) for job, file in files.items()}


def mlp_trainer(file: bytes, **arguments: Any) -> og.Trainer:
    """Return a trainer of a network with the loss of classes."""
    return og.Trainer(file, "cross_entropy", **arguments)


# -- running statistics of the rows of each process ----------------------------------------------


def train_with_own_statistics(file: bytes, rows: int) -> tuple[dict, dict, list[str]]:
    """Return weights, running statistics and warnings of a network whose norms see own rows."""
    X, y = (a[:rows] for a in rows_and_labels("norm", np.float64))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = mlp_trainer(
            file, batch_norm="train", optimizer=og.optimizers.sgd(), learning_rate=0.1
        )
        trainer.fit(X, y, epochs=2, batch_size=10, shuffle=False)
    messages = [str(warning.message) for warning in caught]
    return trainer.state.weights, trainer.state.buffers, messages


# -- what processes refuse -----------------------------------------------------------------------


class OrderedRows:
    """Batches of the same rows in an order of this process, which no description tells."""

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        X, y = rows_and_labels("mlp")
        order = np.arange(8)[:: 1 - 2 * rank_and_size()[0]]
        return iter([(X[order], y[order])] * 3)


def fit_with_other_weights(file: bytes) -> None:
    """Begin with weights of this process."""
    trainer = mlp_trainer(file)
    trainer.state.weights = {"0.bias": np.full(16, rank_and_size()[0], np.float32)}
    trainer.fit(*rows_and_labels("mlp"))


def fit_other_data(file: bytes) -> None:
    """Train on rows of this process, without saying so."""
    X, y = rows_and_labels("mlp")
    mlp_trainer(file).fit(X + rank_and_size()[0], y)


def fit_ordered_rows(file: bytes) -> None:
    """Train on an iterable of batches whose rows are in another order."""
    mlp_trainer(file).fit(OrderedRows())


def fit_other_batches(file: bytes) -> None:
    """Train on a list of other batches."""
    X, y = rows_and_labels("mlp")
    mlp_trainer(file).fit([(X[rank_and_size()[0] * 8 :][:8], y[:8])] * 3)


def balance_own_labels(file: bytes) -> None:
    """Ask for class weights of labels of which each process sees some."""
    how = og.parallel.DataParallel(shards=True)
    mlp_trainer(file, class_weight="balanced", parallel=how).fit(*rows_and_labels("mlp"))


def diverge_with_shards(file: bytes) -> None:
    """Let states of one process become infinite."""
    how = og.parallel.DataParallel(shard_optimizer=True)
    trainer = mlp_trainer(file, optimizer="adam", learning_rate=1e38, parallel=how)
    trainer.fit(*rows_and_labels("wide"), batch_size=10)


# -- callbacks and checkpoints -------------------------------------------------------------------


class StopInOneProcess(og.callbacks.Callback):
    """Asks to stop in the second process only."""

    def on_step_end(self, trainer: Any, state: Any, control: Any) -> None:
        """Stop after five steps."""
        control.stop = rank_and_size()[0] == 1 and state.step >= 5


class AskWithinEpoch(og.callbacks.Callback):
    """Asks for evaluations in one process, for a checkpoint in the other."""

    def on_step_end(self, trainer: Any, state: Any, control: Any) -> None:
        """Ask after steps 3, 6 and 7."""
        control.evaluate = rank_and_size()[0] == 1 and state.step in (3, 7)
        control.save = rank_and_size()[0] == 0 and state.step == 6


class ReadSlots(og.callbacks.Callback):
    """Reads the slots, which must not make a checkpoint of what it has read."""

    def on_step_end(self, trainer: Any, state: Any, control: Any) -> None:
        """Read."""
        assert state.slots is not None


class KillProcess(og.callbacks.Callback):
    """Kills the second process."""

    def on_step_end(self, trainer: Any, state: Any, control: Any) -> None:
        """Kill after twelve steps."""
        if rank_and_size()[0] == 1 and state.step == 12:
            os.kill(os.getpid(), signal.SIGKILL)


def train_with_options_of_one_process(file: bytes) -> list[str]:
    """Return the names of gradient norms, of a training with dropout and recomputation."""
    options = {"dropout": {"*Tanh*": 0.2}, "callbacks": [og.callbacks.Norms(every_steps=1)]}
    trainer = mlp_trainer(file, recompute="all", **options)
    trainer.fit(*rows_and_labels("mlp"), batch_size=10)
    return sorted(trainer.gradient_norms)


def stop_by_one_process(file: bytes) -> int:
    """Return the number of steps."""
    trainer = mlp_trainer(file, callbacks=[StopInOneProcess()])
    return trainer.fit(*rows_and_labels("mlp"), batch_size=4, epochs=3).state.step


def ask_within_epoch(file: bytes, folder: Path) -> tuple[list[int], np.ndarray]:
    """Return the steps of the evaluations, and a weight."""
    X, y = rows_and_labels("mlp")
    trainer = mlp_trainer(file, callbacks=[AskWithinEpoch(), og.Checkpoint(folder)])
    trainer.fit(X, y, batch_size=10, validation=(X[:31], y[:31]))
    return [entry["step"] for entry in trainer.history], trainer.state.weights["0.weight"]


def write_by_callbacks(file: bytes, folder: Path) -> list[Path]:
    """Let each process have files of its own that it may write; return those that are there."""
    own = folder / str(rank_and_size()[0])
    callbacks = [
        og.callbacks.History(own / "history.csv"),
        og.Checkpoint(own / "run", every_steps=2),
    ]
    own.mkdir()
    mlp_trainer(file, callbacks=callbacks).fit(*rows_and_labels("mlp"), batch_size=20)
    return sorted(path.relative_to(own) for path in own.rglob("*") if path.is_file())


def save_checkpoint(file: bytes, job: str, folder: Path) -> None:
    """Train a job for two epochs, with a checkpoint in the middle."""
    callbacks = [ReadSlots(), og.Checkpoint(folder, every_steps=9)]
    train_job(file, job, True, epochs=2, callbacks=callbacks)


def kill_one_process(file: bytes, folder: Path) -> None:
    """Train until the second process is killed."""
    callbacks = [KillProcess(), og.Checkpoint(folder, every_steps=4)]
    train_job(file, "adam", True, epochs=100, callbacks=callbacks)


# -- a large vocabulary --------------------------------------------------------------------------


def train_large_vocabulary(large: bool = False) -> np.ndarray:
    """Return the table of a small language model after its training."""
    from tests.support import causal_lm_cases as lm

    if large:
        model_weights.LARGE = 0
    options = {"optimizer": "sgd", "learning_rate": 0.5, "train": "*"}
    trainer = og.Trainer(lm.causal_model("tied"), "causal_lm", **options)
    trainer.fit(lm.IDS, lm.LABELS, epochs=2, batch_size=4, shuffle=False)
    return trainer.state.weights["table"]


def divide_large_vocabulary(chunks: str, large: bool) -> np.ndarray:
    """Return the same, with logits that are computed in chunks."""
    import pytest

    from tests.support import causal_lm_cases as lm

    with pytest.MonkeyPatch.context() as patch:
        lm.divide_logits(patch, chunks)
        return train_large_vocabulary(large)


# -- a module of PyTorch -------------------------------------------------------------------------


def train_distributed_module(file: bytes, x: Any, y: Any) -> dict[str, np.ndarray]:
    """Return the weights of an OnnxModule after three steps of DistributedDataParallel.

    The second process begins with other weights, which are overwritten.
    """
    import torch

    from onnxgrad.torch import OnnxModule

    rank, size = rank_and_size()
    module = OnnxModule(file)
    if rank:
        for p in module.parameters():
            p.data.zero_()
    whole = torch.nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(whole.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(whole(x[rank::size]), y[rank::size]).backward()
        optimizer.step()
    return {name: value.numpy() for name, value in module.state_dict().items()}
