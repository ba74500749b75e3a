"""L-BFGS of SciPy and of PyTorch beside Adam, on `examples/derivatives/force_matching.py`.

    OPENBLAS_NUM_THREADS=1 python benchmarks/force_matching.py

It prints the loss of all rows after 50, 200 and 800 gradients of all rows, and the seconds until
then. docs/physics.md has the table.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from time import perf_counter
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from scipy.optimize import minimize

import onnxgrad as og

EXAMPLE = Path(__file__).parents[1] / "examples" / "derivatives" / "force_matching.py"
SHOWN = (50, 200, 800)
Records = list[tuple[float, float]]  # seconds since the start, and the loss, of each gradient


def train_by_scipy(example: dict[str, Any], records: Records) -> None:
    """Train by L-BFGS of SciPy with the gradients of a trainer."""
    trainer = og.Trainer(example["forces"], {"positions_grad": "squared_error"})
    start = trainer.state.weights
    trainer.value_and_grad(example["X"], example["y"])  # builds the session
    ends = np.cumsum([w.size for w in start.values()])[:-1]
    began = perf_counter()

    def loss_of(vector: np.ndarray) -> tuple[float, np.ndarray]:
        parts = zip(start.items(), np.split(vector, ends), strict=True)
        trainer.state.weights = {name: part.reshape(w.shape) for (name, w), part in parts}
        loss, gradients = trainer.value_and_grad(example["X"], example["y"])
        records.append((perf_counter() - began, loss))
        return loss, np.concatenate([gradients[name].ravel() for name in start])

    vector = np.concatenate([w.ravel() for w in start.values()])
    limits = {"maxfun": SHOWN[-1], "maxiter": SHOWN[-1], "ftol": 0.0}
    minimize(loss_of, vector, jac=True, method="L-BFGS-B", options=limits)


def train_by_torch(example: dict[str, Any], records: Records) -> None:
    """Train by L-BFGS of PyTorch."""
    weights = {n: torch.tensor(example["constants"][n], requires_grad=True) for n in example["w"]}
    example["network_energy"].__globals__["w"] = weights
    target, began = torch.tensor(example["y"]), perf_counter()
    made = torch.optim.LBFGS(
        weights.values(), max_iter=SHOWN[-1], max_eval=SHOWN[-1], history_size=10,
        line_search_fn="strong_wolfe", tolerance_grad=0, tolerance_change=0,
    )  # fmt: skip

    def closure() -> torch.Tensor:
        made.zero_grad()
        slopes = example["slopes"](example["X"], example["network_energy"])
        loss = torch.nn.functional.mse_loss(slopes, target)
        loss.backward()
        records.append((perf_counter() - began, loss.item()))
        return loss

    made.step(closure)


def train_by_adam(example: dict[str, Any], rows: int, rate: float) -> list[tuple[float, float]]:
    """Return the seconds and the loss of trainings by Adam, with as many passes as `SHOWN` says."""
    found = []
    for passes in SHOWN:
        trainer = og.Trainer(
            example["forces"], {"positions_grad": "squared_error"}, optimizer="adam",
            learning_rate=og.schedules.cosine(rate, steps=passes * len(example["X"]) // rows),
        )  # fmt: skip
        trainer.partial_fit(example["X"][:rows], example["y"][:rows], batch_size=rows)  # builds
        began = perf_counter()
        trainer.fit(example["X"], example["y"], epochs=passes, batch_size=rows)
        seconds = perf_counter() - began
        found.append((seconds, trainer.evaluate(example["X"], example["y"])["loss"]))
    return found


def main() -> None:
    """Print the table."""
    mpl.use("agg")
    torch.set_num_threads(1)
    example = runpy.run_path(str(EXAMPLE))
    for name, train in {"SciPy": train_by_scipy, "PyTorch": train_by_torch}.items():
        records: Records = []
        train(example, records)
        best = [min(loss for _, loss in records[:n]) for n in SHOWN]
        times = [records[min(n, len(records)) - 1][0] for n in SHOWN]
        print(
            f"L-BFGS of {name}",
            *(f"{t:.2f} s {v:.2e}" for t, v in zip(times, best, strict=True)),
            sep=" | ",
        )
    for rows in (200, 20):
        for rate in (0.003, 0.01, 0.03):
            found = train_by_adam(example, rows, rate)
            print(
                f"Adam, {rows} rows, {rate}", *(f"{t:.2f} s {v:.2e}" for t, v in found), sep=" | "
            )


if __name__ == "__main__":
    main()
