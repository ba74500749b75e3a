"""Trains models in one process of a group; `test_parallel.py` starts it by torchrun or mpirun.

Usage: parallel_worker.py torch|mpi|none FOLDER JOB [JOB ...]
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import nn

import onnxgrad as og
from onnxgrad.model import without_elements
from onnxgrad.model.convert import in_precision
from onnxgrad.training.run import process_runner

LARGE, LARGE_MESSAGE = without_elements.LARGE, process_runner.LARGE
ROWS, CLASSES = 83, 3  # the last batch of 10 has fewer rows than 4 processes


def _network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    torch.manual_seed(0)
    if name == "mlp":
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


# network, arguments of the Trainer, arguments of DataParallel, and of fit
JOBS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "sgd": ("mlp", {"optimizer": og.sgd()}, {}, {}),
    "adam": ("mlp", {"optimizer": "adam", "clip_norm": 0.5}, {}, {}),
    "accumulate": ("mlp", {"optimizer": og.momentum(), "accumulate": 3}, {}, {}),
    "double": ("mlp", {"optimizer": "adam", "clip_norm": 0.5}, {}, {"dtype": np.float64}),
    "double_accumulate": ("mlp", {"accumulate": 2}, {}, {"dtype": np.float64}),
    # Adam would make steps of the rounding of gradients that are zero, of biases before the norm
    "norm": (
        "norm",
        {"batch_norm": "train", "optimizer": og.momentum()},
        {"sync_batch_norm": True},
        {},
    ),
    "double_norm": (
        "norm",
        {"batch_norm": "train", "optimizer": og.momentum()},
        {"sync_batch_norm": True},
        {"dtype": np.float64},
    ),
    "images": (
        "images",
        {"batch_norm": "train", "optimizer": og.momentum()},
        {"sync_batch_norm": True},
        {},
    ),
    "double_shards": (
        "wide",
        {"optimizer": "adam", "clip_norm": 1.0},
        {"shard_optimizer": True},
        {"dtype": np.float64},
    ),
    "double_wide": ("wide", {"optimizer": "adamw"}, {}, {"dtype": np.float64}),
    "double_divided": ("wide", {"clip_norm": 0.5}, {}, {"dtype": np.float64, "divided": True}),
    "double_divided_shards": (
        "wide",
        {"optimizer": "adam"},
        {"shard_optimizer": True},
        {"dtype": np.float64, "weighted": True, "divided": True},
    ),
    "double_large": ("wide", {}, {}, {"dtype": np.float64, "large": True}),
    "double_large_shards": (
        "wide",
        {"clip_norm": 1.0},
        {"shard_optimizer": True},
        {"dtype": np.float64, "large": True},
    ),
    "share": ("mlp", {"optimizer": "adam"}, {}, {"share": 0.3}),
    "double_average": (
        "norm",
        {"batch_norm": "train", "optimizer": og.ema(og.momentum(), 0.9)},
        {"sync_batch_norm": True},
        {"share": 0.3, "dtype": np.float64},
    ),
    "weighted": ("mlp", {}, {}, {"weighted": True}),
    "masked": (
        "mlp",
        {"loss": "mse", "loss_options": {"ignore_nan": True}, "metrics": ["mse"], "accumulate": 2},
        {},
        {"masked": True},
    ),
    # without accumulation, where the count of terms is in the message of the gradients
    "double_masked": (
        "mlp",
        {"loss": "mse", "loss_options": {"ignore_nan": True}, "metrics": ["mse"], "clip_norm": 0.5},
        {},
        {"masked": True, "dtype": np.float64},
    ),
    "own_rows": ("mlp", {}, {"shards": True}, {"batches": True}),
    "batches": ("mlp", {}, {}, {"batches": True}),
    "half": ("mlp", {"optimizer": "adam", "clip_norm": 0.5}, {}, {"half": True}),
    "half_mixed": (
        "mlp",
        {"optimizer": "adam", "precision": "mixed"},
        {"shard_optimizer": True},
        {"half": True},
    ),
    "local": ("mlp", {"optimizer": og.sgd()}, {"local_steps": 4}, {}),
}


def exported(name: str, dtype: Any = np.float32) -> tuple[bytes, tuple[int, ...]]:
    """Return a network as a file, and the shape of a row."""
    module, shape = _network(name)
    module = module.to(torch.float64 if dtype == np.float64 else torch.float32)
    file = io.BytesIO()
    example = torch.zeros(2, *shape, dtype=next(module.parameters()).dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (example,),
            file,
            dynamo=False,
            input_names=["x"],
            dynamic_axes={"x": {0: "N"}},
            do_constant_folding=False,
            training=torch.onnx.TrainingMode.PRESERVE,
        )
    return file.getvalue(), shape


def data(shape: tuple[int, ...], dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and labels."""
    rng = np.random.default_rng(1)
    return rng.standard_normal((ROWS, *shape)).astype(dtype), rng.integers(0, CLASSES, ROWS)


def trained(job: str, parallel: bool, callbacks: Any = (), **more: Any) -> og.Trainer:
    """Return the trainer of a job after its training; with `parallel`, of all processes."""
    network, arguments, options, form = JOBS[job]
    without_elements.LARGE = (
        1000 if form.get("large") else LARGE
    )  # from where states change in place
    process_runner.LARGE = 1000 if form.get("divided") else LARGE_MESSAGE
    dtype = form.get("dtype", np.float32)
    model, shape = exported(network, dtype)
    X, y = data(shape, dtype)
    if form.get("half"):
        model = in_precision(onnx.load_from_string(model), ir.DataType.FLOAT16)
    how = og.DataParallel(**options) if parallel else False
    own = {"loss": "cross_entropy", "metrics": ["accuracy"], "parallel": how} | arguments
    trainer = og.Trainer(model, learning_rate=0.01, callbacks=callbacks, **own)
    validation = form.get("share", (X[:31], y[:31]))
    if form.get("batches"):
        batches = [(X[i : i + 10], y[i : i + 10]) for i in range(0, ROWS, 10)]
        if parallel and options.get("shards"):
            rank, size = rank_and_size()
            # of each batch, rows of one process; some have none left of the last one
            cut = [(b[rank::size], labels[rank::size]) for b, labels in batches]
            batches = [(b, labels) for b, labels in cut if len(b)]
            validation = X[rank:31:size], y[rank:31:size]
        return trainer.fit(batches, validation=validation, epochs=3, shuffle=False)
    weight = np.linspace(0.5, 2, ROWS).astype(dtype) if form.get("weighted") else None
    if form.get("masked"):  # numbers, some of them missing, with a weight for each
        rng = np.random.default_rng(2)
        y, weight = np.eye(CLASSES, dtype=dtype)[y], rng.random((ROWS, CLASSES)).astype(dtype)
        y[rng.random(y.shape) < 0.4] = np.nan
        y[20:24] = np.nan
        validation = X[:31], y[:31], weight[:31]
    epochs = more.pop("epochs", 12)
    return trainer.fit(
        X, y, sample_weight=weight, validation=validation, epochs=epochs, batch_size=10, **more
    )


def results(trainer: og.Trainer) -> dict[str, np.ndarray]:
    """Return weights, slots, buffers and history as arrays."""
    state, history = trainer.state, trainer.history
    arrays = dict(state.weights)
    arrays |= {f"buffer {name}": array for name, array in state.buffers.items()}
    for name, slots in state.slots.items():
        arrays |= {f"slot {name} {slot}": array for slot, array in slots.items()}
    for key in history[0].keys() - {"step", "epoch", "learning_rate"}:
        arrays[f"history {key}"] = np.array([entry[key] for entry in history])
    return arrays


def rank_and_size() -> tuple[int, int]:
    """Return the number of this process, and of all."""
    if "mpi4py.MPI" in sys.modules:
        world = sys.modules["mpi4py.MPI"].COMM_WORLD
        return world.Get_rank(), world.Get_size()
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def tell(text: str) -> None:
    """Print a line at once: other processes print, too."""
    os.write(1, f"{text}\n".encode())


def main() -> None:
    """Run the jobs; the first process writes their results."""
    engine, folder, *jobs = sys.argv[1:]
    if engine == "mpi":
        import mpi4py.MPI  # noqa: F401
    else:
        torch.distributed.init_process_group("gloo")
    for job in jobs:
        arrays = results(trained(job, parallel=True))
        if rank_and_size()[0] == 0:
            np.savez(Path(folder) / f"{job}.npz", **arrays)
    if engine == "torch":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
