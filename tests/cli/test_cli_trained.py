"""Models that were trained in Python: the shell knows what their training knew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxgrad as og
from tests.support.commands import (
    LAYERS,
    as_json,
    assert_names,
    csv_rows,
    metadata_of_file,
    refusal,
    save_model,
    succeed,
)

PIXELS = """g (float[N,3,H,W] x) => (float[N,2] y) {
    h = Conv(x, C) m = GlobalAveragePool(h) y = Flatten(m) }"""


def test_tables_and_losses(here):
    """Columns are found by name, classes are names, and options of the loss are kept."""
    pandas = pytest.importorskip("pandas")
    table = pandas.read_csv("names.csv")
    options = {"label_smoothing": 0.25}
    trainer = og.Trainer(
        "layers.onnx", "cross_entropy", loss_options=options, classes="cat dog eel".split()
    )
    trainer.fit(table[["a", "b"]], table["kind"], epochs=1).save("trained.onnx")
    table[["kind", "b", "a"]].to_csv("names.csv", index=False)
    expected = trainer.evaluate(table[["a", "b"]], table["kind"])["loss"]
    assert as_json("eval", "trained.onnx", "names.csv")["loss"] == pytest.approx(expected)
    succeed("predict", "trained.onnx", "names.csv", "--output", "out.csv")
    found = [row["label"] for row in csv_rows(Path("out.csv").read_text())]
    best = trainer.predict(table[["a", "b"]]).argmax(axis=1)
    assert found == np.array(["cat", "dog", "eel"])[best].tolist()


def test_estimators(here):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("sklearn")
    from onnxgrad.sklearn import OnnxClassifier

    table = pandas.read_csv("names.csv")
    ours = OnnxClassifier(max_iter=2, tol=None, random_state=0).fit(
        table[["a", "b"]], table["kind"]
    )
    onnx.save(ours.to_onnx(), "trained.onnx")
    table[["kind", "b", "a"]].to_csv("names.csv", index=False)
    accuracy = as_json("eval", "trained.onnx", "names.csv")["metrics"]["accuracy"]
    assert accuracy == pytest.approx(ours.score(table[["a", "b"]], table["kind"]))
    again = OnnxClassifier("trained.onnx", max_iter=1, learning_rate=1e-30, tol=None)
    again.fit(table[["b", "a"]], table["kind"])
    np.testing.assert_array_equal(again.predict(table[["b", "a"]]), ours.predict(table[["a", "b"]]))


@pytest.fixture
def pictures(here):
    """Return a folder of pictures of two classes, and a model of them, `pixels.onnx`."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for name in "ab":
        (here / "pictures" / name).mkdir(parents=True)
        for i in range(2):
            pixels = rng.integers(0, 255, (12, 9, 3), dtype=np.uint8)
            image.fromarray(pixels).save(here / "pictures" / name / f"{i}.png")
    save_model("pixels.onnx", PIXELS, C=rng.normal(size=(2, 3, 3, 3)))
    return here / "pictures"


def train_on(data, y=None):
    """Train `pixels.onnx` for one step, write `trained.onnx`, and return the trainer."""
    trainer = og.Trainer("pixels.onnx", "cross_entropy", learning_rate=1e-3)
    trainer.fit(data, y, epochs=1).save("trained.onnx")
    return trainer


def test_images(pictures):
    """Size, crop, white and normalization are those of the training."""
    last = og.data.normalize([100.0, 120.0, 90.0], [50.0, 60.0, 70.0])
    steps = [og.data.resize(10), og.data.random_crop(6), og.data.random_flip(), last]
    reader = og.data.image_folder(pictures, (6, 5), steps, scale=255)
    trainer = train_on(reader)
    succeed("predict", "trained.onnx", pictures, "--output", "out.csv")
    rows = csv_rows(Path("out.csv").read_text())
    found = [[float(row["y_0"]), float(row["y_1"])] for row in rows]
    np.testing.assert_allclose(found, trainer.predict(reader), rtol=1e-5)
    best = np.array(["a", "b"])[trainer.predict(reader).argmax(axis=1)]
    assert [row["label"] for row in rows] == best.tolist()
    succeed(
        "predict", "trained.onnx", pictures, "--normalize", "none", "--overwrite", "-o", "out.csv"
    )


@pytest.mark.parametrize("kind", ["function", "arrays"])
def test_images_whose_values_nothing_tells(pictures, kind):
    """They are asked for: 0 to 1 would be a guess."""
    if kind == "arrays":
        train_on(np.ones((4, 3, 6, 5), np.float32), np.array([0, 1, 0, 1]))
    else:
        train_on(og.data.image_folder(pictures, (6, 5), [lambda image, rng: image]))
    size = ("--image-size", "6x5", "--output", "out.csv")
    assert_names(refusal("predict", "trained.onnx", pictures, *size), "--scale", "--normalize")
    assert_names(refusal("eval", "trained.onnx", pictures, *size[:2]), "--scale", "--normalize")
    succeed("predict", "trained.onnx", pictures, *size, "--normalize", "imagenet")
    assert "onnxgrad.images" in metadata_of_file("trained.onnx")


def test_arrays_keep_their_target(here):
    save_model("layers.onnx", LAYERS, V=np.eye(2), W=np.ones((2, 3)), b=np.zeros(3))
    np.savez("rows.npz", features=np.eye(2, dtype=np.float32).repeat(5, 0), kind=np.arange(10) % 3)
    options = ("--loss", "cross_entropy", "--target", "kind", "--epochs", 1, "-o", "trained.onnx")
    succeed("train", "layers.onnx", "rows.npz", *options, "--no-curves")
    assert as_json("eval", "trained.onnx", "rows.npz")["rows"] == 10
    succeed("predict", "trained.onnx", "rows.npz", "--output", "out.csv")
