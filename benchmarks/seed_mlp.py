"""The same small network, trained by onnxgrad and by others on one core.

MLP 100-50-10-1, `make_regression(1000, 100)`, 750 rows, batch 15, 100 epochs, Nesterov 0.9, from
the same weights at the same learning rate (onnxsim: plain momentum, all that it has). The time is
that of the whole job, what each has to build included. The loss is the mean squared error of the
training rows in the end. Runs of all take turns; ratios are those of the medians, and in brackets
the quartiles of the ratios turn by turn. onnxcustom runs in an environment of its own, which is
built in FOLDER (Linux, Python 3.11) where it is missing.

    python benchmarks/seed_mlp.py [--repeat 5] [--old FOLDER]
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import numpy as np
import old_package
import onnxsim
import torch
from common import MOMENTUM, RATE, ROWS, SIZES, data, model, network, ratio, start
from rich.console import Console
from rich.table import Table
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPRegressor
from torch.utils.data import DataLoader, TensorDataset

from onnxgrad import Trainer, add_loss_output
from onnxgrad.compat import (
    LearningRateSGDNesterov,
    OrtGradientForwardBackwardOptimizer,
    OrtGradientOptimizer,
)
from onnxgrad.optimizers import nesterov

BATCH, EPOCHS = 15, 100
BARS = {  # how many times as fast each trainer is asked to be
    "onnxgrad": {"scikit-learn": 6, "PyTorch eager": 10, "onnxsim": 4.5},
    "onnxgrad, forward and backward": {"scikit-learn": 6, "onnxcustom": 4},
    "onnxgrad, Trainer": {"scikit-learn": 6},
}
Job = Callable[[np.ndarray, np.ndarray], list[np.ndarray]]


def mean_squared_error(X: np.ndarray, y: np.ndarray, weights: list[np.ndarray]) -> float:
    h = X
    for w, b in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        h = np.maximum(h @ w + b, 0)
    return float(np.mean((h @ weights[-2] + weights[-1] - y[:, None]) ** 2))


def scikit_learn(X: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    regressor = MLPRegressor(
        hidden_layer_sizes=SIZES[1:-1], solver="sgd", alpha=0.0, batch_size=BATCH,
        learning_rate_init=2 * RATE,  # its loss is half the square
        max_iter=EPOCHS, momentum=MOMENTUM, nesterovs_momentum=True, tol=0.0,
        n_iter_no_change=EPOCHS + 1, random_state=0,
    )  # fmt: skip

    def init(fan_in: int, fan_out: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        i = SIZES.index(fan_in)
        return start()[2 * i].astype(dtype), start()[2 * i + 1].astype(dtype)

    regressor._init_coef = init
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # that it took all its epochs
        regressor.fit(X, y)
    return [a for pair in zip(regressor.coefs_, regressor.intercepts_, strict=True) for a in pair]


def by_loader(X: torch.Tensor, y: torch.Tensor) -> Callable[[], Iterable]:
    loader = DataLoader(TensorDataset(X, y), batch_size=BATCH, shuffle=True)
    return lambda: loader


def by_index(X: torch.Tensor, y: torch.Tensor) -> Callable[[], Iterable]:
    return lambda: ((X[rows], y[rows]) for rows in torch.randperm(ROWS).split(BATCH))


def pytorch(batches: Callable, X: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, criterion = network(), torch.nn.MSELoss()
    optimizer = torch.optim.SGD(net.parameters(), RATE, momentum=MOMENTUM, nesterov=True)
    epoch = batches(torch.from_numpy(X), torch.from_numpy(y[:, None]))
    for _ in range(EPOCHS):
        total = 0.0  # all others report it too
        for inputs, labels in epoch():
            optimizer.zero_grad()
            loss = criterion(net(inputs), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return [p.detach().numpy().T for p in net.parameters()]


def simplifier(X: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    squared = "d0 = Sub(y, label)  d1 = Mul(d0, d0)  loss = ReduceMean<keepdims=0>(d1)"
    names = [f"w{i}" for i in range(6)]
    loop = onnxsim.compile_training_loop(
        model(str(BATCH), 17, squared), "loss", names, optimizer="sgd_momentum"
    )
    rng, labels = np.random.default_rng(0), y[:, None]
    for _ in range(EPOCHS):
        order = rng.permutation(ROWS)
        for i in range(0, ROWS, BATCH):
            rows = order[i : i + BATCH]
            loop({"X": X[rows], "label": labels[rows]}, lr=RATE)
    trained = loop.parameters()
    return [trained[name] for name in names]


def settings(rate: float) -> dict[str, Any]:
    schedule = {"learning_rate": "constant", "momentum": MOMENTUM, "nesterov": True}
    return {
        "weights_to_train": [f"w{i}" for i in range(6)],
        "max_iter": EPOCHS,
        "batch_size": BATCH,
        "learning_rate": LearningRateSGDNesterov(rate, **schedule),
        "random_state": 0,
    }


def in_the_graph(X: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    trainer = OrtGradientOptimizer(add_loss_output(model("N", 18)), **settings(RATE))
    return list(trainer.fit(X, y).trained_coef_.values())


def forward_backward(X: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    rate = 2 * RATE  # its loss is half the square
    trainer = OrtGradientForwardBackwardOptimizer(model("N", 18), **settings(rate))
    return [w.numpy() for w in trainer.fit(X, y).trained_coef_.values()]


def trained(X: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    trainer = Trainer(
        model("N", 18), "mse", optimizer=nesterov(MOMENTUM), learning_rate=RATE,
        train=[f"w{i}" for i in range(6)],
    )  # fmt: skip
    trainer.fit(X, y, epochs=EPOCHS, batch_size=BATCH)
    return [trainer.state.weights[f"w{i}"] for i in range(6)]


def timed(job: Job, X: np.ndarray, y: np.ndarray) -> tuple[float, list[np.ndarray]]:
    begin = time.perf_counter()
    weights = job(X, y)
    return time.perf_counter() - begin, weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5, help="runs of each; the median counts")
    parser.add_argument("--old", type=Path, metavar="FOLDER", help="environment of onnxcustom")
    options = parser.parse_args()
    X, y = data()
    jobs = {
        "scikit-learn": partial(timed, scikit_learn),
        "PyTorch eager": partial(timed, partial(pytorch, by_loader)),
        "PyTorch eager, no DataLoader": partial(timed, partial(pytorch, by_index)),
        "onnxsim": partial(timed, simplifier),
        "onnxgrad": partial(timed, in_the_graph),
        "onnxgrad, forward and backward": partial(timed, forward_backward),
        "onnxgrad, Trainer": partial(timed, trained),
    }
    if options.old:
        given = {"batch_size": BATCH, "max_iter": EPOCHS, "rate": 2 * RATE, "momentum": MOMENTUM}
        python, onx = old_package.environment(options.old), model("N", 15).SerializeToString()
        jobs["onnxcustom"] = partial(old_package.run, python, onx, given)
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    losses = {}
    for i in range(options.repeat + 1):
        for name, job in jobs.items():
            taken, weights = job(X, y)
            losses[name] = mean_squared_error(X, y, weights)
            if i:  # the first warms up
                seconds[name].append(taken)
    for mine, bars in BARS.items():
        table = Table("", "seconds", "loss", "ratio (quartiles)", "asked")
        for name in (*(name for name in seconds if name not in BARS), mine):
            row = name, f"{median(seconds[name]):.3f}", f"{losses[name]:.2g}"
            bar = f"{bars[name]} x" if name in bars else ""
            table.add_row(*row, ratio(seconds[name], seconds[mine]) if name != mine else "", bar)
        Console().print(table)
    print(f"loss before training: {mean_squared_error(X, y, start()):.3g}")
    if not options.old:
        print("onnxcustom: left out, as no folder was given for its environment (--old)")


if __name__ == "__main__":
    main()
