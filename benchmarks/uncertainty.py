"""How sure models of handwritten digits are: one network, Monte Carlo dropout, and an ensemble.

The digits are scikit-learn's. Each way trains the same perceptron on 480 rows; 320 rows, of the
same people, are held out for the temperature, and the remaining 997 rows, which other people wrote
in part, are the test rows: as they are, and with noise. The table has means over the seeds, which
decide the weights, the order of the rows and the masks of dropout. The second table is of intervals
of 90 % for scikit-learn's diabetes data.

    python benchmarks/uncertainty.py [--seeds 5] [--epochs 60]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import sklearn
from onnx import numpy_helper
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from sklearn.datasets import load_diabetes, load_digits

import onnxgrad as og

BINS, SAMPLES, MEMBERS, RATE, NOISE = 15, 50, 8, 0.3, 0.25
Ways = dict[str, Callable[[np.ndarray], np.ndarray]]  # the log-probabilities of rows


def perceptron(sizes: tuple[int, ...], seed: int) -> onnx.ModelProto:
    """Return a network of two hidden layers of Relu, with weights drawn by He's rule."""
    inputs, first, second, outputs = sizes
    rng = np.random.default_rng(seed)
    model = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["": 20]>
        mlp (float[N,{inputs}] x) => (float[N,{outputs}] y) {{
            a = Gemm(x, w1, b1)  h1 = Relu(a)  b = Gemm(h1, w2, b2)  h2 = Relu(b)
            y = Gemm(h2, w3, b3) }}""")
    shapes = {"w1": (inputs, first), "w2": (first, second), "w3": (second, outputs)}
    for name, shape in shapes.items():
        weight = rng.normal(0, np.sqrt(2 / shape[0]), shape).astype(np.float32)
        bias = np.zeros(shape[1], np.float32)
        for array, own in ((weight, name), (bias, name.replace("w", "b"))):
            model.graph.initializer.append(numpy_helper.from_array(array, own))
    return model


def expected_calibration_error(p: np.ndarray, y: np.ndarray) -> float:
    """Return the mean distance of confidence and accuracy over bins of confidence.

    Guo et al. 2017, "On Calibration of Modern Neural Networks", equation 3.
    """
    sure, right = p.max(1), p.argmax(1) == y
    bins = np.minimum((sure * BINS).astype(int), BINS - 1)
    gaps = [abs((right - sure)[bins == b].sum()) for b in range(BINS)]
    return float(sum(gaps) / len(y))


def digit_ways(seed: int, epochs: int, data: tuple[np.ndarray, ...]) -> Ways:
    """Return the ways to predict, trained."""
    X, y, X_held, y_held = data
    model, fitted = perceptron((64, 64, 64, 10), seed), {"epochs": epochs, "batch_size": 32}
    options = {"learning_rate": 0.003, "seed": seed}
    plain = og.Trainer(model, "cross_entropy", **options).fit(X, y, **fitted)
    dropping = og.insert_dropout(model, after="Relu", rate=RATE)
    dropping = og.Trainer(dropping, "cross_entropy", **options).fit(X, y, **fitted)
    stack = og.TrainerStack(model, "cross_entropy", members=MEMBERS, init="glorot", **options).fit(
        X, y, **fitted
    )

    def mean_log(scores: np.ndarray) -> np.ndarray:
        return np.log(softmax(scores.astype(float), axis=-1).mean(0) + 1e-12)

    def with_temperature(way: Callable[[np.ndarray], np.ndarray]) -> Callable:
        log_p = way(X_held)
        loss = lambda t: -log_softmax(log_p / t, axis=1)[range(len(y_held)), y_held].mean()  # noqa: E731
        best = minimize_scalar(loss, bounds=(0.2, 10), method="bounded").x
        return lambda rows: log_softmax(way(rows) / best, axis=1)

    ways: Ways = {
        "one network": lambda rows: log_softmax(plain.predict(rows).astype(float), axis=1),
        "trained with dropout": lambda rows: log_softmax(
            dropping.predict(rows).astype(float), axis=1
        ),
        "Monte Carlo dropout": lambda rows: mean_log(
            og.predict_samples(dropping.model, rows, SAMPLES, seed=seed).samples
        ),
        "ensemble": lambda rows: mean_log(stack.predict(rows)),
    }
    return ways | {f"{name}, temperature": with_temperature(way) for name, way in ways.items()}


def measure_digits(seeds: int, epochs: int) -> None:
    """Print the table of the digits."""
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype(np.float32)
    data, test, labels = (X[:480], y[:480], X[480:800], y[480:800]), X[800:], y[800:]
    noise = np.random.default_rng(0).normal(0, NOISE, test.shape).astype(np.float32)
    found: dict[str, list[list[float]]] = {}
    for seed in range(seeds):
        for name, way in digit_ways(seed, epochs, data).items():
            row = []
            for rows in (test, test + noise):
                log_p = way(rows)
                nll = -log_p[range(len(labels)), labels].mean()
                accuracy = (log_p.argmax(1) == labels).mean()
                row += [accuracy, nll, expected_calibration_error(np.exp(log_p), labels)]
            found.setdefault(name, []).append(row)
    print("| | accuracy | NLL | ECE | with noise: accuracy | NLL | ECE |")
    print("|---|---|---|---|---|---|---|")
    for name, rows in found.items():
        print(f"| {name} |", " | ".join(f"{v:.3f}" for v in np.mean(rows, 0)), "|")


def measure_intervals(seeds: int, epochs: int) -> None:
    """Print the table of intervals of 90 % for the diabetes data."""
    X, y = load_diabetes(return_X_y=True)
    found: dict[str, list[list[float]]] = {}
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(X))
        rows, target = (X[order] / X.std()).astype(np.float32), y[order]
        target = ((target - y.mean()) / y.std()).astype(np.float32)[:, None]
        train, held, test = slice(0, 200), slice(200, 300), slice(300, None)
        options = {"learning_rate": 0.003, "seed": seed}
        fitted = {"epochs": epochs, "batch_size": 32}
        quantile = og.Trainer(
            perceptron((10, 32, 32, 2), seed), "quantile", loss_options={"q": [0.05, 0.95]},
            **options,
        ).fit(rows[train], target[train], **fitted)  # fmt: skip
        low, high = quantile.predict(rows).T
        outside = np.maximum(low - target[:, 0], target[:, 0] - high)[held]
        share = np.ceil(0.9 * (len(outside) + 1)) / len(outside)
        more = np.quantile(outside, share, method="higher")
        stack = og.TrainerStack(
            perceptron((10, 32, 32, 2), seed), "gaussian_nll", members=MEMBERS, init="glorot",
            **options,
        ).fit(rows[train], target[train, 0], **fitted)  # fmt: skip
        mean, log_variance = np.moveaxis(stack.predict(rows), 2, 0).astype(float)
        std = np.sqrt((np.exp(log_variance) + mean**2).mean(0) - mean.mean(0) ** 2)
        drop = og.insert_dropout(perceptron((10, 32, 32, 1), seed), after="Relu", rate=0.1)
        drop = og.Trainer(drop, "squared_error", **options).fit(
            rows[train], target[train], **fitted
        )
        drawn = og.predict_samples(drop.model, rows, SAMPLES, seed=seed)
        ends = {
            "quantiles": (low, high),
            "quantiles, conformal": (low - more, high + more),
            "ensemble of gaussian_nll": (mean.mean(0) - 1.645 * std, mean.mean(0) + 1.645 * std),
            "Monte Carlo dropout alone": (
                drawn.mean[:, 0] - 1.645 * drawn.std[:, 0],
                drawn.mean[:, 0] + 1.645 * drawn.std[:, 0],
            ),
        }
        for name, (start, end) in ends.items():
            inside = (start <= target[:, 0]) & (target[:, 0] <= end)
            found.setdefault(name, []).append([inside[test].mean(), (end - start)[test].mean()])
    print("| | inside | width |\n|---|---|---|")
    for name, rows in found.items():
        print(f"| {name} |", " | ".join(f"{v:.3f}" for v in np.mean(rows, 0)), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--interval-epochs", type=int, default=20)
    given = parser.parse_args()
    packages = (og, onnxruntime, sklearn, np)
    print(", ".join(f"{p.__name__} {p.__version__}" for p in packages))
    measure_digits(given.seeds, given.epochs)
    measure_intervals(given.seeds, given.interval_epochs)


if __name__ == "__main__":
    main()
