"""Write what the tests of the client compare with: artifacts, batches, and the losses of Python.

Usage: python make_data.py [FOLDER] [--measure]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from safetensors.numpy import load_file, save_file

import onnxgrad as og

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
STEPS, ROWS = 200, 32
# At 2e-3, one unit in the last place of the first weights changes the losses of the convolutions by
# 4e-3 after 200 steps of Adam: there, the sums of another processor cannot have the same losses.
RATES = {"mlp": 2e-3, "cnn": 2e-4, "normalized": 2e-3}
MLP = """
    <ir_version: 9, opset_import: ["": 18]>
    mlp (float[N,64] image) => (float[N,10] logits) {
        h = Gemm(image, w1, b1)
        r = Relu(h)
        logits = Gemm(r, w2, b2)
    }
"""
NORMALIZED = """
    <ir_version: 9, opset_import: ["": 18]>
    normalized (float[N,64] image) => (float[N,10] logits) {
        h = Gemm(image, w1, b1)
        n = BatchNormalization(h, scale, shift, mean, var)
        d = Dropout(n, ratio)
        r = Relu(d)
        w2 = Constant<value = float[32,10] w2_stored {VALUES}>()
        logits = MatMul(r, w2)
    }
"""


def mlp() -> onnx.ModelProto:
    """Return an untrained network, images [N, 64] -> logits [N, 10]."""
    weights = {"w1": _he(64, 64), "b1": np.zeros(64), "w2": _he(64, 10), "b2": np.zeros(10)}
    return _with(onnx.parser.parse_model(MLP), weights)


def normalized() -> onnx.ModelProto:
    """Return a network with running statistics, dropout, and a weight in a `Constant`."""
    values = ", ".join(f"{x:.6f}" for x in _he(32, 10).ravel())
    model = onnx.parser.parse_model(NORMALIZED.replace("VALUES", values))
    weights = {"w1": _he(64, 32), "b1": np.zeros(32), "scale": np.ones(32), "shift": np.zeros(32)}
    return _with(
        model, weights | {"mean": np.zeros(32), "var": np.ones(32), "ratio": np.float32(0.25)}
    )


def _he(rows: int, columns: int) -> np.ndarray:
    rng = np.random.default_rng(rows + columns)
    return rng.standard_normal((rows, columns)) * np.sqrt(2 / rows)


def _with(model: onnx.ModelProto, weights: dict[str, np.ndarray]) -> onnx.ModelProto:
    for name, array in weights.items():
        tensor = onnx.numpy_helper.from_array(np.asarray(array, np.float32), name)
        model.graph.initializer.append(tensor)
    return model


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images of digits, float32 [1797, 64] in 0..1, and their labels."""
    from pyarrow import parquet

    table = parquet.read_table(ROOT / "data" / "digits.parquet")
    pixels = [table[f"pixel_{i}"].to_numpy() for i in range(64)]
    return np.stack(pixels, axis=1).astype(np.float32), table["label"].to_numpy()


def cases() -> dict[str, tuple[onnx.ModelProto, dict]]:
    """Return the models, and the options that a `Trainer` and the artifacts have in common."""
    network = onnx.load(ROOT / "data" / "digits_cnn.onnx")
    in_training = {"batch_norm": "train", "dropout": {"d": 0.25}}
    return {"mlp": (mlp(), {}), "cnn": (network, {}), "normalized": (normalized(), in_training)}


def write_case(folder: Path, model: onnx.ModelProto, options: dict, batches: list) -> None:
    """Write artifacts, the batches, and the losses of a `Trainer` for these."""
    options = {"learning_rate": RATES[folder.name], **options}
    og.artifacts.generate_artifacts(model, None, None, "cross_entropy", "adam", folder, **options)
    expected = {
        "images": np.stack([images for images, _ in batches]),
        "labels": np.stack([labels for _, labels in batches]),
        "trainer": trained(model, options, batches),
        "step": np.array(stepped(folder, batches), np.float64),
    }
    save_file(expected, folder / "expected.safetensors")
    if "--measure" in sys.argv:
        print(f"{folder.name}: Trainer {milliseconds(model, options, batches):.3f} ms a step")


def trained(model: onnx.ModelProto, options: dict, batches: list) -> np.ndarray:
    """Return the losses of a `Trainer`, one a batch."""
    trainer = og.Trainer(model, loss="cross_entropy", optimizer="adam", **options)
    for images, labels in batches:
        trainer.partial_fit(images, labels, batch_size=ROWS, shuffle=False)
    return np.array([entry["loss"] for entry in trainer.history], np.float64)


def milliseconds(model: onnx.ModelProto, options: dict, batches: list) -> float:
    """Return the time of a step of a `Trainer`; on one thread if the process has one processor."""
    X, y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    trainer = og.Trainer(model, loss="cross_entropy", optimizer="adam", **options)
    seconds = []
    for _ in range(6):  # the first one builds the session
        begin = time.perf_counter()
        trainer.partial_fit(X, y, batch_size=ROWS, shuffle=False)
        seconds.append(time.perf_counter() - begin)
    return min(seconds) / len(batches) * 1e3


def stepped(folder: Path, batches: list) -> list[float]:
    """Return the losses of `step.onnx`, run by onnxruntime without this package."""
    session = ort.InferenceSession(folder / "step.onnx")
    outputs = [y.name for y in session.get_outputs()]
    scalars = {x.name: x.type for x in session.get_inputs()}
    state, losses = load_file(folder / "checkpoint.safetensors"), []
    for i, (images, labels) in enumerate(batches):
        feeds = {"minus_learning_rate": np.array(-RATES[folder.name], np.float32)}
        feeds |= {"step": np.array(i + 1), "draw": np.array(i, np.int64)}
        feeds = {name: value for name, value in feeds.items() if name in scalars}
        values = session.run(None, {**state, **feeds, "image": images, "label": labels})
        results = dict(zip(outputs, values, strict=True))
        losses.append(float(results["loss"]))
        state = {name: results[f"{name}.new"] for name in state}
    return losses


def main(folder: Path) -> None:
    """Write every case into a folder of its own."""
    X, y = digits()
    order = np.random.default_rng(0)
    chosen = [order.permutation(len(X))[:ROWS] for _ in range(STEPS)]
    for name, (model, options) in cases().items():
        shape = (-1, 1, 8, 8) if name == "cnn" else (-1, 64)
        batches = [(X[rows].reshape(shape), y[rows]) for rows in chosen]
        write_case(folder / name, model, options, batches)


if __name__ == "__main__":
    folders = [argument for argument in sys.argv[1:] if argument != "--measure"]
    main(Path(*folders) if folders else HERE / "data")
