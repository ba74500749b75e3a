"""Accuracy, size and time of models: floats, quantized, and trained after quantization.

    python benchmarks/quantized.py [digits] [lines] [sentences]

- digits: `data/digits_cnn.onnx`, trained from the weights of its file.
- lines: the classifier of text lines of PaddleOCR, a published file (`rapidocr-onnxruntime`), with
  a new head for the ten digits, which are drawn into images.
- sentences: MiniLM, a published file, with a head that says from which library a docstring is. Its
  wheel has no vocabulary: words are numbered by a hash.

Each row is a file in a plain session of onnxruntime on one thread. `nodes` counts those
on integers in its optimized graph.
"""

from __future__ import annotations

import ast
import re
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from published import fetched
from pyarrow import parquet

import onnxgrad as og

DATA = Path(__file__).parent.parent / "data"
PRODUCTS = ("QLinear", "QGemm", "MatMulInteger", "ConvInteger", "DynamicQuantizeMatMul", "MatMulN")
LIBRARIES = ("numpy", "scipy", "pandas", "sklearn")
Arrays = dict[str, np.ndarray]


@dataclass
class Task:
    """A model of floats, data, and how it trains."""

    model: Callable[[], Any]
    data: Callable[[], tuple[Arrays, np.ndarray]]
    epochs: int
    rate: float
    kinds: tuple[str, ...] = ("int8", "int4", "int4 alone")
    ranges: bool = True  # whether they train, too

    def split(self) -> tuple[Arrays, np.ndarray, Arrays, np.ndarray]:
        """Return rows to train with, and the rest."""
        X, y = self.data()
        order = np.random.default_rng(0).permutation(len(y))
        first, rest = np.split(order, [3 * len(y) // 4])
        return (
            {n: a[first] for n, a in X.items()},
            y[first],
            {n: a[rest] for n, a in X.items()},
            y[rest],
        )


def digits() -> tuple[np.ndarray, np.ndarray]:
    table = parquet.read_table(DATA / "digits.parquet")
    pixels = np.stack([table[f"pixel_{i}"] for i in range(64)], 1).reshape(-1, 1, 8, 8)
    return pixels.astype(np.float32), table["label"].to_numpy()


def lines() -> tuple[Arrays, np.ndarray]:
    """Return digits, four times as large, at random places of images of 32 x 48 pixels."""
    pixels, y = (array[:600] for array in digits())
    rng, images = np.random.default_rng(0), np.full((len(y), 3, 32, 48), 1, np.float32)
    for image, digit in zip(images, pixels / np.abs(pixels).max(), strict=True):
        left = rng.integers(0, 17)
        image[:, :, left : left + 32] -= np.kron(2 * digit[0], np.ones((4, 4)))
    images += 0.2 * rng.standard_normal(images.shape).astype(np.float32)
    return {"x": images}, y


def sentences() -> tuple[Arrays, np.ndarray]:
    """Return the beginnings of docstrings as numbers of words, and the library of each."""
    texts, y = [], []
    for label, name in enumerate(LIBRARIES):
        spec = find_spec(name)
        assert spec is not None, f"pip install {name}"
        own = dict.fromkeys(_docstrings(Path(str(spec.origin)).parent, name))
        texts += [*own][:150]
        y += [label] * len([*own][:150])
    ids, mask = np.zeros((len(texts), 32), np.int64), np.zeros((len(texts), 32), np.int64)
    for row, text in enumerate(texts):
        words = re.findall(r"\w+|[^\w\s]", text.lower())[:30]
        numbers = [101, *(1000 + zlib.crc32(w.encode()) % 29000 for w in words), 102]
        ids[row, : len(numbers)], mask[row, : len(numbers)] = numbers, 1
    return {"input_ids": ids, "attention_mask": mask}, np.array(y)


def _docstrings(folder: Path, name: str) -> Any:
    for file in sorted(folder.rglob("*.py")):
        if "test" in str(file.relative_to(folder)):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
                text = " ".join(str(ast.get_docstring(node)).split("\n\n")[0].split())
                if len(text) > 40:
                    yield re.sub(name, "", text, flags=re.IGNORECASE)


def minilm() -> onnx.ModelProto:
    encoder = og.graph.select_model_inputs_outputs(onnx.load(fetched("minilm")), outputs=["461"])
    return og.add_head(encoder, len(LIBRARIES), at="461")


TASKS = {
    "digits": Task(
        lambda: DATA / "digits_cnn.onnx", lambda: ({"image": digits()[0]}, digits()[1]), 8, 5e-3
    ),
    "lines": Task(
        lambda: og.replace_head(fetched("paddle-lines"), 10, activation=None), lines, 20, 3e-3
    ),
    "sentences": Task(minilm, sentences, 3, 2e-4, ("int8", "int4 alone"), ranges=False),
}
KINDS = {
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
    "int4 alone": {"weights": "int4", "activations": None},
}


def has_vnni() -> bool:
    """Return whether the kernels of 8 bits do not overflow on this processor."""
    file = Path("/proc/cpuinfo")
    return not file.exists() or "vnni" in file.read_text() or "asimd" in file.read_text()


def measured(path: Path, X: Arrays, y: np.ndarray) -> str:
    """Return accuracy, size, time of a row and products of integers, as cells of a table."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    options.optimized_model_filepath = str(path.with_suffix(".optimized"))
    session = ort.InferenceSession(str(path), options)
    names = [x.name for x in session.get_inputs()]
    hits, seconds = 0, []
    for i in range(0, len(y), 32):
        feed = {n: X[n][i : i + 32] for n in names}
        start = time.perf_counter()
        scores = session.run(None, feed)[0]
        seconds.append((time.perf_counter() - start) / len(scores))
        hits += int((scores.argmax(1) == y[i : i + 32]).sum())
    nodes = onnx.load(options.optimized_model_filepath, load_external_data=False).graph.node
    products = sum(n.op_type.startswith(PRODUCTS) for n in nodes)
    size, milliseconds = path.stat().st_size / 1e6, 1e3 * float(np.median(seconds))
    return f"{100 * hits / len(y):.1f} | {size:.3f} | {milliseconds:.3f} | {products}"


def run(name: str, folder: Path) -> None:
    task = TASKS[name]
    X, y, X_test, y_test = task.split()
    path = folder / "model.onnx"

    def row(label: str) -> None:
        print(f"| {name} | {label} | {measured(path, X_test, y_test)} |", flush=True)

    trainer = og.Trainer(task.model(), "cross_entropy", learning_rate=task.rate)
    trainer.fit(X, y, epochs=task.epochs).save(path)
    row("float")
    given = trainer.model
    for label in task.kinds:
        kind = KINDS[label]
        reduced = label == "int8" and not has_vnni()
        data = None if "activations" in kind else X
        quantized = og.quantize(given, data, reduce_range=reduced, **kind)
        og.Trainer(quantized, "cross_entropy").save(path)
        row(f"{label}, quantized")
        for ranges in (False, True)[: 1 + (task.ranges and data is not None)]:
            again = og.Trainer(
                quantized, "cross_entropy", learning_rate=task.rate / 5, train_ranges=ranges
            )
            again.fit(X, y, epochs=2).save(path)
            row(f"{label}, trained" + ", with ranges" * ranges)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print("| model | file | accuracy, % | MB | ms a row | nodes |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as home:
        for task in sys.argv[1:] or TASKS:
            run(task, Path(home))
