"""The same small network, trained by scikit-learn, PyTorch eager, onnxsim and onnxgrad on one core.

MLP 100-50-10-1, `make_regression(1000, 100)`, 750 rows, batch 15, 100 epochs, Nesterov 0.9, from
the same weights at the same learning rate (onnxsim: plain momentum, all that it has). The time is
that of the whole job, what each has to build included. The loss is the mean squared error of the
training rows in the end.

    python benchmarks/seed_mlp.py [--repeat 5]
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from statistics import median

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import numpy as np
import onnx
import onnxsim
import torch
from onnx import numpy_helper
from rich.console import Console
from rich.table import Table
from sklearn.datasets import make_regression
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPRegressor
from torch.utils.data import DataLoader, TensorDataset

from onnxgrad import LearningRateSGDNesterov, OrtGradientOptimizer, add_loss_output

SIZES, ROWS, BATCH, EPOCHS, RATE, MOMENTUM = (100, 50, 10, 1), 750, 15, 100, 0.001, 0.9
BARS = {"scikit-learn": 5, "PyTorch eager": 10, "onnxsim": 4.5}


def data() -> tuple[np.ndarray, np.ndarray]:
    X, y = make_regression(1000, 100, random_state=0)
    y = (y - y.mean()) / y.std()
    return X[:ROWS].astype(np.float32), y[:ROWS].astype(np.float32)


def start() -> list[np.ndarray]:
    """Return weight, bias, weight, ... as scikit-learn draws them (Glorot)."""
    rng, made = np.random.default_rng(0), []
    for a, b in pairwise(SIZES):
        bound = np.sqrt(6 / (a + b))
        made += [rng.uniform(-bound, bound, s).astype(np.float32) for s in ((a, b), (b,))]
    return made


def model(batch: str, opset: int, tail: str = "") -> onnx.ModelProto:
    label, loss = (f", float[{batch}, 1] label", "float loss") if tail else ("", "")
    output = loss or f"float[{batch}, 1] y"
    made = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": {opset}]>
        mlp (float[{batch}, 100] X{label}) => ({output}) {{
            a = MatMul(X, w0)  b = Add(a, w1)  c = Relu(b)
            d = MatMul(c, w2)  e = Add(d, w3)  f = Relu(e)
            g = MatMul(f, w4)  y = Add(g, w5)  {tail}
        }}""")
    for i, w in enumerate(start()):
        made.graph.initializer.append(numpy_helper.from_array(w, f"w{i}"))
    return made


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
    layers: list[torch.nn.Module] = []
    for i, (a, b) in enumerate(pairwise(SIZES)):
        layer = torch.nn.Linear(a, b)
        layer.weight.data = torch.tensor(start()[2 * i].T.copy())
        layer.bias.data = torch.tensor(start()[2 * i + 1])
        layers += [layer, torch.nn.ReLU()]
    net, criterion = torch.nn.Sequential(*layers[:-1]), torch.nn.MSELoss()
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


def ours(X: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    trainer = OrtGradientOptimizer(
        add_loss_output(model("N", 18)),
        [f"w{i}" for i in range(6)],
        max_iter=EPOCHS,
        batch_size=BATCH,
        learning_rate=LearningRateSGDNesterov(
            RATE, learning_rate="constant", momentum=MOMENTUM, nesterov=True
        ),
        random_state=0,
    )
    return list(trainer.fit(X, y).trained_coef_.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5, help="runs of each; the median counts")
    repeat = parser.parse_args().repeat
    X, y = data()
    jobs = {
        "scikit-learn": scikit_learn,
        "PyTorch eager": partial(pytorch, by_loader),
        "PyTorch eager, no DataLoader": partial(pytorch, by_index),
        "onnxsim": simplifier,
        "onnxgrad": ours,
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    losses = {}
    for _ in range(repeat + 1):  # the first warms up
        for name, job in jobs.items():
            begin = time.perf_counter()
            weights = job(X, y)
            seconds[name].append(time.perf_counter() - begin)
            losses[name] = mean_squared_error(X, y, weights)
    mine = median(seconds["onnxgrad"][1:])
    table = Table("", "seconds", "onnxgrad is faster by", "asked", "loss")
    for name, times in seconds.items():
        ratio = f"{median(times[1:]) / mine:.1f} x" if name != "onnxgrad" else ""
        bar = f"{BARS[name]} x" if name in BARS else ""
        table.add_row(name, f"{median(times[1:]):.3f}", ratio, bar, f"{losses[name]:.3g}")
    Console().print(table)
    print(f"loss before training: {mean_squared_error(X, y, start()):.3g}")


if __name__ == "__main__":
    main()
