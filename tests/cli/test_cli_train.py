"""`onnxgrad train`: heads, adapters, checkpoints, several outputs, weights of rows and classes."""

import json
import os
import re
import signal

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic

from onnxgrad import Trainer
from onnxgrad.cli.train import Watch
from onnxgrad.model.notes import ADAPTERS, HEAD, read_metadata
from onnxgrad.optimizers import adamw as adamw_of_python
from tests.support.commands import (
    as_json,
    assert_names,
    features,
    metadata_of_file,
    refusal,
    run_command,
    save_model,
    succeed,
    weights_of_file,
)
from tests.support.running import run_named

KINDS = ("layers.onnx", "kinds.csv", "--target", "kind", "--loss", "cross_entropy")
NAMES = ("layers.onnx", "names.csv", "--target", "kind", "--loss", "cross_entropy")
FAST = ("--epochs", 2, "--validation", 0, "--no-curves", "--overwrite")


# -- new layers -------------------------------------------------------------------------------


def test_a_head_of_another_number_of_units(here):
    result = as_json("train", *KINDS, *FAST, "--head", 5, "--train", "head.*")
    assert set(result["trained"]) == {"head.weight", "head.bias"}
    after = weights_of_file("trained.onnx")
    np.testing.assert_array_equal(after["V"], weights_of_file("layers.onnx")["V"])
    assert sorted(a.shape for a in after.values()) == [(2, 4), (4, 5), (5,)]
    [z] = run_named("trained.onnx", x=features()).values()
    assert z.shape == (40, 5)
    assert read_metadata(onnx.load("trained.onnx"), HEAD) == ["head.weight", "head.bias"]


def test_a_head_of_named_classes(here):
    succeed("train", *NAMES, *FAST, "--head", "eel,dog,cat", "--epochs", 60, "--lr", 0.05)
    assert json.loads(metadata_of_file("trained.onnx")["onnxgrad.classes"]) == ["eel", "dog", "cat"]
    [z] = run_named("trained.onnx", x=features()).values()
    labels = [line.rsplit(",", 1)[1] for line in (here / "names.csv").read_text().split()[1:]]
    predicted = np.array(["eel", "dog", "cat"])[z.argmax(1)]
    accuracy = (predicted == np.array(labels)).mean()
    assert accuracy > 0.8  # 1/3 if the classes were numbered in another order
    result = as_json("eval", "trained.onnx", "names.csv", *NAMES[2:])
    assert result["metrics"]["accuracy"] == pytest.approx(accuracy)


def test_the_seed_draws_new_layers(here):
    drawn = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        options = ("--head", 4, "--lora", "V", "--lr", 0, "--seed", seed, "-o", f"{name}.onnx")
        succeed("train", *KINDS, *FAST, *options)
        drawn[name] = weights_of_file(f"{name}.onnx")
    assert (here / "a.onnx").read_bytes() == (here / "b.onnx").read_bytes()
    assert (drawn["a"]["head.weight"] != drawn["c"]["head.weight"]).any()
    moved = [n for n in drawn["a"] if (drawn["a"][n] != drawn["c"][n]).any()]
    assert any("lora" in n.lower() for n in moved)


ENCODER = (
    "g (int64[N,T] ids, int64[N,T] mask) => (float[N,T,4] e) { v = Gather(table, ids) e = Relu(v) }"
)


def test_a_head_on_features(here):
    save_model("encoder.onnx", ENCODER, table=np.random.default_rng(0).normal(size=(5, 4)))
    ids = np.arange(60).reshape(20, 3) % 5
    mask = np.tile([1, 1, 0], (20, 1))
    np.savez("ids.npz", ids=ids, mask=mask, kind=ids[:, 0] % 2)
    line = ("train", "encoder.onnx", "ids.npz", "--target", "kind", "--loss", "cross_entropy")
    missing = refusal(*line, "--head", 2, "-o", "no.onnx")
    assert "--head-at NAME --head-pool" in missing
    assert "add_head" not in missing
    pooled = ("--head-pool", "mean", "--head-mask", "mask")
    succeed(*line, *FAST, "--head", 2, *pooled, "--freeze", "table")
    after = weights_of_file("trained.onnx")
    np.testing.assert_array_equal(after["table"], weights_of_file("encoder.onnx")["table"])
    expected = np.maximum(after["table"][ids[:, :2]], 0).mean(1) @ after["head.weight"]
    [z] = run_named("trained.onnx", ids=ids, mask=mask).values()
    np.testing.assert_allclose(z, expected + after["head.bias"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--head", "5x"), "--head '5x' ... number ... names"),
        (("--head", "a,,b"), "--head 'a,,b'"),
        (("--head", 0), "--head '0'"),
        (("--head", "a,a"), "class ... repeated"),
        (("--head-at", "W"), "--head-at ... --head"),
        (("--head", 2, "--head-at", "w"), "layer (--head-at) 'w'"),
        (("--head", 2, "--head-pool", "max"), "--head-pool ... 'max' ... mean"),
        (("--head", 2, "--head-pool", "first", "--head-mask", "x"), "needs --head-pool mean"),
        (("--head", 2, "--head-pool", "none", "--head-at", "a", "--head-at", "b"), "one value"),
        (("--head", 2, "--head-pool", "mean"), "--head-pool mean ... 3 axes ... 'z'"),
        (("--lora", "X"), "'X'"),
    ],
)
def test_new_layers_that_are_refused(here, options, message):
    line = refusal("train", *KINDS, *options)
    assert_names(line, message)
    assert "at=" not in line.replace("--head-at=", "")


def test_the_layer_of_head_at_is_replaced(here):
    succeed("train", *KINDS, *FAST, "--head", 6, "--head-at", "W")
    shapes = sorted(a.shape for a in weights_of_file("trained.onnx").values())
    assert shapes == [(2, 4), (4, 6), (6,)]


def test_layers_of_head_at_are_replaced(here):
    succeed("train", *KINDS, *FAST, "--head", 6, "--head-at", "W", "--head-at", "W*")
    several = ("--head-at", "W", "--head-at", "V", "-o", "no.onnx")
    message = refusal("train", *KINDS, "--head", 6, *several)
    assert_names(message, "--head-at W --head-at V ... units")


def test_adapters_train_and_merge(here):
    options = ("--lora", "V", "--lora-rank", 2, "--lora-alpha", 4)
    result = as_json("train", *KINDS, *FAST, *options, "-o", "adapted.onnx", "--lr", 0.05)
    assert len(result["trained"]) == 2
    before, after = weights_of_file("layers.onnx"), weights_of_file("adapted.onnx")
    for name in before:
        np.testing.assert_array_equal(after[name], before[name])
    assert read_metadata(onnx.load("adapted.onnx"), ADAPTERS)
    merged = succeed("merge", "adapted.onnx", "-o", "plain.onnx")
    assert "wrote plain.onnx" in merged.stdout
    assert [n.op_type for n in onnx.load("plain.onnx").graph.node] == [
        n.op_type for n in onnx.load("layers.onnx").graph.node
    ]
    x = features()
    [one], [other] = (list(run_named(f, x=x).values()) for f in ("adapted.onnx", "plain.onnx"))
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    [untrained] = run_named("layers.onnx", x=x).values()
    assert abs(one - untrained).max() > 1e-3
    down, up = (after[n] for n in result["trained"])
    expected = before["V"] + 4 / 2 * down.reshape(2, 2) @ up.reshape(2, 4)
    np.testing.assert_allclose(weights_of_file("plain.onnx")["V"], expected, rtol=1e-5, atol=1e-6)
    assert "`onnxgrad train --lora PATTERN`" in refusal("merge", "plain.onnx", "-o", "no.onnx")


def test_adapters_of_a_quantized_model_are_merged_in_its_form(here):
    quantize_dynamic("layers.onnx", "integers.onnx", weight_type=QuantType.QUInt8)
    options = ("--lora", "V", "--lora-rank", 2, "--lr", 0.05, "-o", "adapted.onnx")
    succeed("train", "integers.onnx", *KINDS[1:], *FAST, *options)
    assert "(--requantize)" in refusal("merge", "adapted.onnx", "-o", "no.onnx")
    assert "--requantize is for adapters" in refusal("merge", ".", "-o", "no.onnx", "--requantize")
    merged = succeed("merge", "adapted.onnx", "-o", "plain.onnx", "--requantize")
    assert re.search(r"'V\S*' \S+ \(\S+ on average, \S+% of its size\)", merged.stderr)
    x = features()
    [untrained], [one], [other] = (
        list(run_named(f, x=x).values()) for f in ("integers.onnx", "adapted.onnx", "plain.onnx")
    )
    assert abs(other - one).mean() < 0.1 * abs(one - untrained).mean()
    before, after = weights_of_file("integers.onnx"), weights_of_file("plain.onnx")
    assert {n: a.dtype for n, a in before.items()} == {n: a.dtype for n, a in after.items()}


# -- weights that train -----------------------------------------------------------------------


def test_train_and_freeze(here):
    result = as_json("train", *KINDS, *FAST, "--train", "?", "--freeze", "V")
    assert result["trained"] == ["W", "b"]
    for options, message in (
        (("--train", "w"), "weight (--train) 'w'"),
        (("--freeze", "U*"), "weight (--freeze) 'U*'"),
        (("--freeze", "*"), "no --train, --freeze '*'"),
    ):
        assert message in refusal("train", *KINDS, *options, "-o", "no.onnx")


# -- checkpoints and signals ------------------------------------------------------------------


class Interrupting:
    """Sends SIGINT to this process at the end of a step."""

    def __init__(self, monkeypatch, step):
        original = Watch.on_step_end

        def on_step_end(watch, trainer, state, control):
            if self.step and state.step >= self.step:
                self.step = 0
                os.kill(os.getpid(), signal.SIGINT)
            original(watch, trainer, state, control)

        self.step = step
        monkeypatch.setattr(Watch, "on_step_end", on_step_end)
        monkeypatch.setattr(Watch, "every_steps", 1)


def test_a_resumed_training_is_the_same_bit_for_bit(here, monkeypatch):
    training = ("--epochs", 6, "--batch-size", 4, "--schedule", "cosine", "--no-curves")
    line = ("train", *KINDS, *training, "--optimizer", "adamw", "--lr", 0.01)
    succeed(*line, "-o", "whole.onnx", "--history", "whole.json")
    parts = (*line, "-o", "parts.onnx", "--checkpoint", "state", "--history", "parts.json")
    Interrupting(monkeypatch, 20)
    stopped = run_command(*parts)
    assert stopped.exit_code == 130
    assert_names(stopped.stderr, "SIGINT ... parts.onnx ... epoch 3 ... 20 steps")
    assert (here / "parts.onnx").read_bytes() != (here / "whole.onnx").read_bytes()
    assert "--resume" in refusal(*parts, "--overwrite")
    succeed(*parts, "--overwrite", "--resume")
    assert (here / "parts.onnx").read_bytes() == (here / "whole.onnx").read_bytes()
    whole, parted = (json.loads((here / f"{n}.json").read_text()) for n in ("whole", "parts"))
    assert [e["loss"] for e in whole] == [e["loss"] for e in parted]
    other = refusal(*parts, "--overwrite", "--resume", "--lr", 0.02)
    assert "learning" in other
    assert "another folder" in other
    assert_names(refusal(*line, "--resume"), "--resume ... --checkpoint")


def test_resume_begins_where_there_is_no_checkpoint(here):
    options = ("--checkpoint", "state", "--resume")
    succeed("train", *KINDS, *FAST, *options)
    assert os.listdir("state")


# -- several outputs --------------------------------------------------------------------------

TWO = "g (float[N,2] x) => (float[N,3] z, float[N,1] y) { z = MatMul(x, W) y = MatMul(x, U) }"


def test_losses_of_several_outputs(here):
    save_model("two.onnx", TWO, W=np.eye(2, 3), U=[[1.0], [0.0]])
    a, b = features().T
    kind = np.where(a > b, 1, 0)
    np.savez("two.npz", x=features(), kind=kind, y=2 * a - b)
    losses = ("--loss", "z=cross_entropy", "--loss", "y=squared_error", "--loss-weight", "y=0.5")
    targets = ("--target", "z=kind", "--target", "y=y", "--metrics", "z=accuracy,y=mae")
    line = ("two.onnx", "two.npz", *losses, *targets)
    result = as_json("eval", *line)
    z, y = run_named("two.onnx", x=features()).values()
    z = z.astype(np.float64)
    entropy = (np.log(np.exp(z).sum(1)) - z[np.arange(40), kind]).mean()
    square = ((y[:, 0] - (2 * a - b)) ** 2).mean()
    assert result["loss"] == pytest.approx(entropy + 0.5 * square, rel=1e-5)
    mae = np.abs(y[:, 0] - (2 * a - b)).mean()
    assert result["metrics"] == pytest.approx(
        {"z_accuracy": (z.argmax(1) == kind).mean(), "y_mae": mae}, rel=1e-5
    )
    trained = as_json("train", *line[:-2], *FAST, "--lr", 0.01)
    assert trained["trained"] == ["W", "U"]
    for dropped, message in (
        (line[:-4], "--target OUTPUT=COLUMN ... 'y' has none"),
        ((*line[:2], "--loss", "squared_error", "--target", "y"), "--loss OUTPUT=LOSS"),
        ((*line[:6], "--target", "kind"), "write --target OUTPUT=COLUMN"),
        ((*line, "--loss", "l2"), "--loss ... names an output"),
    ):
        assert_names(refusal("train", *dropped, "-o", "no.onnx"), message)


# -- weights of rows and of classes -----------------------------------------------------------


def trained_in_python(**more):
    """Return the weights after one step with all rows."""
    rows = np.loadtxt("kinds.csv", delimiter=",", skiprows=1, dtype=np.float32)
    trainer = Trainer("layers.onnx", "cross_entropy", optimizer="sgd", learning_rate=0.1, **more)
    weight = np.linspace(0, 1, 40, dtype=np.float32) if "class_weight" not in more else None
    trainer.fit(rows[:, :2], rows[:, 2].astype(int), sample_weight=weight, batch_size=40)
    return trainer.state.weights


STEP = ("--optimizer", "sgd", "--lr", 0.1, "--batch-size", 40, "--epochs", 1)


def assert_trained(expected):
    for name, array in expected.items():
        np.testing.assert_allclose(
            weights_of_file("trained.onnx")[name], array, rtol=1e-5, atol=1e-7
        )


def test_weights_of_rows(here):
    lines = (here / "kinds.csv").read_text().split()
    column = ["w", *np.linspace(0, 1, 40, dtype=np.float32).tolist()]
    text = "\n".join(f"{line},{w}" for line, w in zip(lines, column, strict=True))
    (here / "kinds.csv").write_text(text)
    succeed("train", *KINDS, *FAST, *STEP, "--sample-weight", "w")
    lines = (here / "kinds.csv").read_text().split()
    (here / "kinds.csv").write_text("\n".join(line.rsplit(",", 1)[0] for line in lines))
    assert_trained(trained_in_python())
    assert "column (--sample-weight) 'v'" in refusal("train", *KINDS, *FAST, "--sample-weight", "v")


@pytest.mark.parametrize("named", [False, True])
def test_weights_of_classes(here, named):
    options = [("cat" if named else "0", 3), ("eel" if named else "2", 0.5)]
    shown = [word for name, w in options for word in ("--class-weight", f"{name}={w}")]
    data = (*NAMES, "--classes", "cat,dog,eel") if named else KINDS
    succeed("train", *data, *FAST, *STEP, *shown)
    assert_trained(trained_in_python(class_weight={0: 3, 2: 0.5}))
    message = refusal("train", *data, "--class-weight", "cow=2", "-o", "no.onnx")
    assert "class (--class-weight) 'cow'" in message


def test_balanced_classes(here):
    succeed("train", *KINDS, *FAST, *STEP, "--class-weight", "balanced")
    assert_trained(trained_in_python(class_weight="balanced"))


def test_options_of_steps_are_those_of_python(here):
    optimizer = ("--optimizer", "adamw", "--optimizer-option", "b1=0.8", "--weight-decay", 0.3)
    steps = ("--accumulate", 2, "--clip-norm", 0.05, "--batch-size", 8, "--epochs", 2)
    kept = ("--checkpoint", "state", "--checkpoint-every", 2, "--checkpoint-keep", 3)
    succeed("train", *KINDS, *FAST, *optimizer, "--lr", 0.05, *steps, *kept, "--no-shuffle")
    rows = np.loadtxt("kinds.csv", delimiter=",", skiprows=1, dtype=np.float32)
    adamw = adamw_of_python(b1=0.8, weight_decay=0.3)
    options = {"optimizer": adamw, "learning_rate": 0.05, "clip_norm": 0.05, "accumulate": 2}
    trainer = Trainer("layers.onnx", "cross_entropy", **options)
    data = (rows[:, :2], rows[:, 2].astype(int))
    trainer.fit(*data, batch_size=8, epochs=2, shuffle=False)
    assert_trained(trainer.state.weights)
    assert len(os.listdir("state")) == 3


# -- folders ----------------------------------------------------------------------------------


def test_a_folder_of_parquet_files_and_a_stream(here):
    a, b = features().T
    table = pa.table({"a": a, "b": b, "kind": np.where(a > b, 1, 0)})
    os.mkdir("parts")
    for i in range(4):
        pq.write_table(table.slice(10 * i, 10), f"parts/{i}.parquet")
    pq.write_table(table, "all.parquet")
    with pa.ipc.new_file("all.arrow", table.schema) as file:
        file.write_table(table)
    results = {}
    loss = as_json("eval", "layers.onnx", "all.parquet", *KINDS[2:])["loss"]
    for data in ("parts", "all.arrow", "all.parquet"):
        line = ("layers.onnx", data, *KINDS[2:])
        succeed("train", *line, *FAST, "--no-shuffle", "--batch-size", 10)
        results[data] = weights_of_file("trained.onnx")
        assert metadata_of_file("trained.onnx")["onnxgrad.columns"] == '{"x": ["a", "b"]}'
        assert as_json("eval", *line)["loss"] == pytest.approx(loss)
    for data in ("parts", "all.arrow"):
        for name, array in results["all.parquet"].items():
            np.testing.assert_allclose(results[data][name], array, rtol=1e-6, atol=1e-7)
    line = ("train", "layers.onnx", "parts", *KINDS[2:], "-o", "no.onnx")
    assert "validation data" in refusal(*line, "--validation", 0.2)
    assert "--drop-missing" in refusal(*line, "--drop-missing")


def test_a_folder_of_images(here):
    Image = pytest.importorskip("PIL.Image")
    image = (
        "g (float[N,3,8,8] x) => (float[N,2] z) { p = GlobalAveragePool(x) f = Flatten(p) "
        "z = MatMul(f, W) }"
    )
    save_model("image.onnx", image, W=np.zeros((3, 2)))
    for name, color in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        os.makedirs(f"photos/{name}")
        for i in range(6):
            Image.new("RGB", (8, 8), color).save(f"photos/{name}/{i}.png")
    line = ("image.onnx", "photos", "--loss", "cross_entropy")
    result = as_json(
        "train", *line, "--head", "red,blue", "--lr", 0.1, "--epochs", 5, "--no-curves"
    )
    assert (result["rows"], result["validation_rows"]) == (10, 2)
    assert as_json("eval", "trained.onnx", *line[1:])["metrics"]["accuracy"] == 1
    succeed("predict", "trained.onnx", "photos", "-o", "out.csv")
    lines = (here / "out.csv").read_text().splitlines()
    assert len(lines) == 13
    for file, label, share, *scores in (line.replace('"', "").split(",") for line in lines[1:]):
        z = np.array(scores, float)
        assert label == file.split("/")[-2] == ["red", "blue"][z.argmax()]  # in the order of --head
        np.testing.assert_allclose(float(share), 1 / np.exp(z - z.max()).sum(), rtol=1e-5)


def test_the_size_of_images(here):
    """Images that are wider than high, as lines of text, for a model of any size."""
    Image = pytest.importorskip("PIL.Image")
    text = (
        "g (float[N,3,H,W] x) => (float[N,2] z) { m = MaxPool<kernel_shape=[4, 12]>(x) "
        "f = Flatten(m) z = MatMul(f, W) }"
    )
    save_model("lines.onnx", text, W=np.eye(3, 2))  # the pool leaves one position of 4 x 12 only
    for name, color in (("red", (255, 0, 0)), ("green", (0, 255, 0))):
        os.makedirs(f"lines/{name}")
        Image.new("RGB", (30, 8), color).save(f"lines/{name}/0.png")
    line = ("predict", "lines.onnx", "lines", "--overwrite", "-o", "out.csv")
    for size in (["4x12"], ["4,12"], [4, 12]):
        succeed(*line, "--image-size", *size)
        assert len((here / "out.csv").read_text().splitlines()) == 3
    assert "pass --image-size" in refusal(*line)
    for size in ("x", "4x", "0", "4x0", "-4", "4x12x3", "4.5"):
        assert "pixels" in refusal(*line, f"--image-size={size}")
    (here / "run.toml").write_text('image-size = "4x12"\n')
    trained = ("train", "lines.onnx", "lines", "--loss", "cross_entropy", "--validation", 0)
    succeed(*trained, *FAST, "--config", "run.toml", "-o", "sized.onnx")
    succeed("predict", "sized.onnx", "lines")  # it remembers the size
