"""Many small networks: a `TrainerStack`, a loop over trainers, and scikit-learn's GridSearchCV.

Each trains K multilayer perceptrons that differ in their learning rate, on the same rows, with as
many epochs and the same batch size, from a new object to trained weights: the time to build is
included. scikit-learn runs two processes. The three take turns, and what is printed are medians and
their ratios.

    python benchmarks/many_models.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import numpy as np
import onnx
from onnx import numpy_helper

import onnxgrad as og

SIZES = {  # sizes of the layers: batch, rows, epochs
    (64, 32, 10): (32, 1792, 20),
    (784, 128, 10): (128, 4096, 5),
}
MEMBERS = (1, 8, 32)


def network(sizes: tuple[int, ...]) -> onnx.ModelProto:
    inputs, nodes, weights, x = sizes[0], [], [], "x"
    rng = np.random.default_rng(0)
    for i, (a, b) in enumerate(pairwise(sizes)):
        bound = np.sqrt(6 / (a + b))
        weights += [(f"w{i}", rng.uniform(-bound, bound, (a, b))), (f"b{i}", np.zeros(b))]
        last = i == len(sizes) - 2
        nodes.append(f"p{i} = MatMul({x}, w{i})  {'y' if last else f's{i}'} = Add(p{i}, b{i})")
        nodes += [] if last else [f"r{i} = Relu(s{i})"]
        x = f"r{i}"
    model = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["": 20]>
        mlp (float[N, {inputs}] x) => (float[N, {sizes[-1]}] y) {{ {" ".join(nodes)} }}""")
    for name, array in weights:
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    return model


def data(rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    X = rng.normal(size=(rows, width)).astype(np.float32)
    return X, (X @ rng.normal(size=(width, 10))).argmax(axis=1)


def ways(sizes: tuple[int, ...], members: int) -> dict[str, Callable[[], object]]:
    from sklearn.model_selection import GridSearchCV
    from sklearn.neural_network import MLPClassifier

    batch, rows, epochs = SIZES[sizes]
    X, y = data(rows, sizes[0])
    model, rates = network(sizes), np.geomspace(1e-4, 1e-2, members).tolist()

    def stack() -> None:
        trainer = og.TrainerStack(model, "cross_entropy", optimizer="adam", learning_rate=rates)
        trainer.fit(X, y, epochs=epochs, batch_size=batch)

    def loop() -> None:
        for rate in rates:
            trainer = og.Trainer(model, "cross_entropy", optimizer="adam", learning_rate=rate)
            trainer.fit(X, y, epochs=epochs, batch_size=batch)

    def search() -> None:
        mlp = MLPClassifier(
            sizes[1:-1], batch_size=batch, max_iter=epochs, alpha=0.0, n_iter_no_change=10**6
        )
        rows = np.arange(len(X))
        found = GridSearchCV(
            mlp, {"learning_rate_init": rates}, cv=[(rows, rows[:10])], refit=False, n_jobs=2
        )
        found.fit(X, y)

    return {"stack": stack, "trainers": loop, "GridSearchCV": search}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    warnings.simplefilter("ignore")
    for sizes in SIZES:
        for members in MEMBERS:
            functions = ways(sizes, members)
            seconds: dict[str, list[float]] = {name: [] for name in functions}
            for turn in range(repeats + 1):
                for name, function in functions.items():
                    time.sleep(0.5)  # until the threads of the one before have gone to sleep
                    start = time.perf_counter()
                    function()
                    if turn:  # the first one imports, and starts processes
                        seconds[name].append(time.perf_counter() - start)
            medians = {name: median(each) for name, each in seconds.items()}
            ours = medians["stack"]
            shown = ", ".join(
                f"{name} {each:.3g} s ({each / ours:.2f})" for name, each in medians.items()
            )
            print("-".join(map(str, sizes)), f"K={members}:", shown, flush=True)


if __name__ == "__main__":
    main()
