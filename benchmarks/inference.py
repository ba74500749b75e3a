"""Predictions by the faces of the library, beside a session of onnxruntime.

Milliseconds of a call for 1, 32 and 1,024 rows of three small networks: medians of calls that take
turns. The session is one of the trained model, with as many threads as ours.

    python benchmarks/inference.py [--network lenet] [--threads 1] [--rounds 9]
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from common import turns
from pandas import DataFrame
from rich.console import Console
from rich.table import Table
from zoo import Encoder, Network, lenet, mlp

import onnxgrad as og
from onnxgrad.sklearn import OnnxClassifier
from onnxgrad.torch import OnnxModule

ROWS = (1, 32, 1024)
NETWORKS = {
    "mlp 64-128-10": Network(lambda: mlp(64, 128, 10), 32, (64,)),
    "lenet-5": Network(lenet, 32, (1, 28, 28)),
    "encoder 1x32": Network(lambda: Encoder(1, 32, 100, 16), 32, (16,), tokens=100),
}


def session(proto: Any, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    return ort.InferenceSession(proto.SerializeToString(), options)


def jobs(net: Network, rows: int, threads: int) -> dict[str, Callable[[], Any]]:
    """Return calls that predict the same rows; the first is that of a session."""
    proto = net.exported(net.module().eval())
    X, y = net.data(rows)
    some = net.data(64, seed=1)
    trainer = og.Trainer(proto, "cross_entropy", metrics=["accuracy"]).fit(*some)
    stack = og.TrainerStack(proto, "cross_entropy", learning_rate=[1e-3, 1e-4]).fit(*some)
    classifier = OnnxClassifier(proto, max_iter=1, tol=None)
    classes = np.arange(64) % 10
    classifier.fit(some[0], classes)
    module = OnnxModule(trainer.model)
    tensor = torch.from_numpy(X)
    seed = og.compat.OrtGradientForwardBackwardOptimizer(
        trainer.model, learning_loss="square_error", max_iter=1, batch_size=32
    ).fit(some[0], np.eye(10, dtype=np.float32)[classes])
    plain, name = session(trainer.model, threads), proto.graph.input[0].name
    members = [session(stack.model(k), threads) for k in range(2)]

    lists, table = X.tolist(), DataFrame(X.reshape(rows, -1)).add_prefix("x")

    def module_forward() -> torch.Tensor:
        with torch.no_grad():
            return module(tensor)

    made: dict[str, Callable[[], Any]] = {
        "InferenceSession": lambda: plain.run(None, {name: X}),
        "Trainer.predict": lambda: trainer.predict(X),
        "of lists": lambda: trainer.predict(lists),
        "of a DataFrame": lambda: trainer.predict(table),
        "Trainer.evaluate": lambda: trainer.evaluate(X, y),
        "OnnxClassifier.predict_proba": lambda: classifier.predict_proba(X),
        "OnnxModule": module_forward,
        "OrtGradientForwardBackwardOptimizer": lambda: seed.predict(X),
        "two sessions": lambda: [one.run(None, {name: X}) for one in members],
        "TrainerStack of 2": lambda: stack.predict(X),
    }
    (expected,), found = made["InferenceSession"](), trainer.predict(X)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(module_forward().numpy(), expected, rtol=1e-4, atol=1e-5)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="", help="those whose names begin with it")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9, help="blocks of each; the median counts")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    torch.set_num_threads(options.threads)
    for name, net in NETWORKS.items():
        if not name.startswith(options.network):
            continue
        table = Table("", *(f"{rows:,}" for rows in ROWS), title=f"{name}, milliseconds by rows")
        columns = [turns(jobs(net, rows, options.threads), options.rounds, 0.02) for rows in ROWS]
        for job in columns[0]:
            table.add_row(job, *(f"{median(c[job]) * 1e3:.3f}" for c in columns))
        Console().print(table)


if __name__ == "__main__":
    main()
