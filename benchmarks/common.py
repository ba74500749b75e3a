"""What the benchmarks share: one network from one start, its data, and timing by turns."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import numpy_helper

if TYPE_CHECKING:
    from torch import nn

SIZES, ROWS, RATE, MOMENTUM = (100, 50, 10, 1), 750, 0.001, 0.9


def data() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import make_regression

    X, y = make_regression(1000, SIZES[0], random_state=0)
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


def network() -> nn.Module:
    """Return `model` written in PyTorch."""
    import torch

    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(SIZES)):
        layer = torch.nn.Linear(a, b)
        layer.weight.data = torch.tensor(start()[2 * i].T.copy())
        layer.bias.data = torch.tensor(start()[2 * i + 1])
        layers += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def turns(
    jobs: dict[str, Callable[[], object]], rounds: int, block: float = 0.05
) -> dict[str, list[float]]:
    """Return the seconds of a call, a number for each block of calls, whose jobs take turns."""
    calls = {}
    for name, job in jobs.items():
        job()
        begin = time.perf_counter()
        job()
        calls[name] = max(1, int(block / (time.perf_counter() - begin)))
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds + 1):  # the first warms up
        for name, job in jobs.items():
            begin = time.perf_counter()
            for _ in range(calls[name]):
                job()
            seconds[name].append((time.perf_counter() - begin) / calls[name])
    return {name: times[1:] for name, times in seconds.items()}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the ratio of medians, and in brackets the quartiles of the ratios turn by turn."""
    low, high = np.percentile([a / b for a, b in zip(ours, theirs, strict=True)], (25, 75))
    return f"{median(ours) / median(theirs):.2f} ({low:.2f}-{high:.2f})"


def commit() -> str:
    """Return the commit that is measured, with a + where the working tree differs from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True)
    return done.stdout.strip() or "an unknown commit"
