"""The command line, as a user meets it: what training writes and tells, and a real process."""

import json
import os
import pty
import re
import signal
import subprocess
import sys

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from onnxgrad import add_loss_output
from onnxgrad.tasks.rows_task import without_loss_like_outputs
from tests.support.commands import (
    LAYERS,
    LINEAR,
    as_json,
    assert_names,
    features,
    refusal,
    run_command,
    save_model,
    succeed,
    weights_of_file,
    write_csv_columns,
)
from tests.support.models import parse_model
from tests.support.running import PATIENCE

REGRESSION = ("--target", "y", "--loss", "squared_error", "--optimizer", "momentum")
LINE = ("train", "linear.onnx", "rows.csv", *REGRESSION)
BRIEF = ("--epochs", 1, "--no-curves", "--overwrite")


def test_train_writes_the_users_model(here):
    """From a column of lists, and from an array that has one more axis."""
    text = LINEAR.replace("[N,2] x", "[N,2,1] x").replace("h =", "f = Flatten(x) h =")
    save_model("column.onnx", text.replace("MatMul(x", "MatMul(f"), W=np.zeros((2, 1)), b=[0.0])
    a, b = features(200).T
    y = 2 * a - b + 3
    flat = pa.FixedSizeListArray.from_arrays(np.stack([a, b], 1).ravel(), 2)
    pq.write_table(pa.table({"y": y, "ab": flat}), "lists.parquet")
    np.savez("one.npz", anything=np.stack([a, b], 1)[..., None], y=y[:, None])
    made = succeed("train", "column.onnx", "lists.parquet", *REGRESSION, "--epochs", 30)
    trained = weights_of_file("trained.onnx")
    np.testing.assert_allclose(trained["W"], [[2], [-1]], atol=1e-3)
    np.testing.assert_allclose(trained["b"], [3], atol=1e-3)
    before, after = onnx.load("column.onnx"), onnx.load("trained.onnx")
    del before.graph.initializer[:], after.graph.initializer[:]
    entries = {entry.key: json.loads(entry.value) for entry in after.metadata_props}
    loss = [{"loss": "squared_error"}]
    assert entries == {"onnxgrad.target": ["y"], "onnxgrad.training_loss": loss}
    del after.metadata_props[:]
    assert before == after
    assert (here / "trained.png").read_bytes().startswith(b"\x89PNG")
    assert_names(made.stdout, "training loss", "validation loss", "first", "last", "best", "rows/s")
    assert "wrote trained.onnx\nwrote trained.png" in made.stdout
    assert "accuracy" not in made.stdout
    assert not [f for f in os.listdir() if f.startswith(".")]
    more = ("--epochs", 30, "--no-curves", "-o", "other.onnx")
    succeed("train", "column.onnx", "one.npz", *REGRESSION, *more)
    for name, array in weights_of_file("other.onnx").items():
        np.testing.assert_array_equal(array, trained[name])


def test_train_says_what_stays(here):
    """Of many constants a few are named, and --verbose lists all."""
    names = [f"mean_{i}" for i in range(20)]
    chain = " ".join(f"S{i + 1} = Sub(S{i}, {name})" for i, name in enumerate(names))
    save_model(
        "scaled.onnx",
        f"""g (float[N, 2] X) => (float[N, 1] Y) {{
            S0 = Identity(X) {chain} Z = MatMul(S20, W)  Y = Add(Z, b) }}""",
        **{"W": np.ones((2, 1)), "b": [0.0]},
        **{name: [1.0, i + 2.0] for i, name in enumerate(names)},
    )
    line = ("train", "scaled.onnx", "rows.csv", *REGRESSION, *BRIEF)
    said = succeed(*line).stdout
    assert_names(
        said, "20 constants", "'mean_0' (", "--verbose", "`onnxgrad trainable scaled.onnx`"
    )
    assert "mean_9" not in said
    assert_names(succeed(*line, "--verbose").stdout, *names)
    np.testing.assert_array_equal(weights_of_file("trained.onnx")["mean_0"], [1, 2])
    said = succeed(*line, "--weights", "mean_0", "--weights", "W", "-o", "b.onnx").stdout
    assert "not trained" not in said
    assert (weights_of_file("b.onnx")["mean_0"] != [1, 2]).any()


def test_accuracy_of_two_classes_by_a_threshold(here):
    score = LAYERS.replace("[N,3]", "[N,1]").replace("h = MatMul(x, V) r = Relu(h)", "r = Neg(x)")
    save_model("score.onnx", score, W=[[-1.0], [1.0]], b=[0.0])
    a, b = features(200).T
    write_csv_columns("larger.csv", a=a, b=b, kind=np.where(a > b, 1, 0))
    loss = ("--loss", "binary_cross_entropy", "--loss-option", "from_logits=true")
    made = succeed("train", "score.onnx", "larger.csv", "--target", "kind", *loss, *BRIEF)
    assert "100.00%" in made.stdout


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adam", "adamw"])
def test_every_optimizer_lowers_the_loss(here, optimizer):
    more = ("--optimizer", optimizer, "--epochs", 3, "--validation", 0, "--no-curves")
    made = as_json(*LINE, *more)
    losses = [entry["loss"] for entry in made["history"]]
    assert losses[-1] < losses[0]
    assert not made["validation"]


TWO_INPUTS = """g (float[N,1] u, int64[N,1] n) => (float[N,1] y, float[N,1] other) {
    f = Cast <to = 1> (n) a = Mul(f, W) c = Mul(u, b) y = Add(a, c) other = Neg(y)}"""


def test_several_inputs_by_name_and_one_of_two_outputs(here):
    save_model("two.onnx", TWO_INPUTS, W=[[0.0]], b=[[0.0]])
    u, n = features(200)[:, 0], np.arange(200) % 5
    np.savez("two.npz", u=u, n=n, y=u + n, spare=u)
    two = ("train", "two.onnx", "two.npz", *REGRESSION, "--no-curves")
    made = succeed(*two, "--output-index", "other", "--weights", "b", "--epochs", 40)
    assert weights_of_file("trained.onnx")["W"] == 0
    assert weights_of_file("trained.onnx")["b"] < 0
    assert "ignored columns: spare" in made.stdout
    assert_names(refusal(*two, "-o", "no.onnx"), "2 float outputs", "--loss OUTPUT=LOSS")


def test_a_model_that_computes_its_own_loss(here):
    onnx.save(add_loss_output("linear.onnx", loss_name="mine"), "own.onnx")
    own = ("train", "own.onnx", "rows.csv", "--target", "y", "--validation", 0, "--no-curves")
    assert_names(refusal(*own), "'loss'", "mine, y", "--loss", "--loss-output")
    made = as_json(*own, "--loss-output", "mine", "--optimizer", "momentum", "--epochs", 3)
    expected = as_json(*LINE, "--epochs", 3, "--validation", 0, "--no-curves", "-o", "other.onnx")
    assert made["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    for name, array in weights_of_file("other.onnx").items():
        np.testing.assert_allclose(weights_of_file("trained.onnx")[name], array, rtol=1e-5)


def test_other_numbers_are_left_out_beside_the_loss_of_a_model():
    model = parse_model("""
        g (float[N,2] x) => (float mine, float[1] total, float[N,2] y) {
            y = Neg(x) axes = Constant <value_ints = [0, 1]> ()
            mine = ReduceMean <keepdims = 0> (y, axes) s = ReduceSum <keepdims = 0> (y, axes)
            one = Constant <value_ints = [1]> () total = Reshape(s, one) }""")
    assert [
        output.name for output in without_loss_like_outputs(model, None, "mine").graph.output
    ] == ["mine", "y"]
    assert without_loss_like_outputs(model, "squared_error.onnx", "mine") is model


EMBEDDED = """g (float[N] u, int64[N,T] ids, float[N,T] mask) => (float[N,1] y) {
    e = Gather(table, ids) c = Unsqueeze(u, last) s = Mul(e, c) m = Mul(s, mask)
    y = ReduceSum(m, last)}"""


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"ids": 5}, ["'ids'", "'table'", "length 5", "not 5 (row 8)"]),
        ({"ids": -6}, ["'ids'", "not -6 (row 8)"]),
        ({"ids": 1.5}, ["'ids'", "int64", "1.5 (row 8)"]),
        ({"ids": np.nan}, ["column 'ids', row 8"]),
        ({"mask": np.ones((20, 3))}, ["'mask' has length 3 along axis 1", "'ids', axis 1"]),
    ],
)
def test_ids_beyond_a_table_and_axes_that_differ(here, values, parts):
    save_model("ids.onnx", EMBEDDED, table=np.zeros(5), last=np.array([1]))
    ids = np.float64(np.arange(40).reshape(20, 2) % 5)  # exact floats are taken
    data = {"u": np.ones(20), "ids": ids, "mask": np.ones((20, 2)), "y": np.ones(20)}
    np.savez("right.npz", **data)
    if "ids" in values:
        ids[7, 1] = values["ids"]
    np.savez("wrong.npz", **(data | {**values, "ids": ids}))
    line = (*REGRESSION, "--batch-size", 4, *BRIEF)
    succeed("train", "ids.onnx", "right.npz", *line, "--dry-run")
    assert_names(refusal("train", "ids.onnx", "wrong.npz", *line), *parts)


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        (("train", "none.onnx", *LINE[2:]), ["'none.onnx'", "No such file"]),
        (("train", "rows.csv", *LINE[2:]), ["'rows.csv'", "ONNX"]),
        (("train", "cut.onnx", *LINE[2:]), ["'cut.onnx'", "truncated"]),
        (("train", "linear.onnx", "none.csv", *REGRESSION), ["'none.csv'", "No such file"]),
        (("train", "linear.onnx", "none", *REGRESSION), ["'none'", "No such file"]),
        ((*LINE, "--target", "yy"), ["column 'yy'", "'y'"]),
        ((*LINE, "--target", "y"), ["target", "once"]),
        ((*LINE, "--weights", "w"), ["weight", "'w'", "'W', 'b'"]),
        ((*LINE, "--loss", "squarederror"), ["'squared_error'"]),
        ((*LINE, "--loss-option", "delta=1"), ["'squared_error'", "'delta'"]),
        ((*LINE, "--loss-option", "delta"), ["'delta'", "NAME=VALUE"]),
        ((*LINE, "--batch-size", 33), ["--batch-size 33", "32 rows"]),
        ((*LINE, "--validation", 0.001), ["--validation 0.001", "40 rows"]),
        ((*LINE, "--output", "kinds.csv"), ["kinds.csv exists", "--overwrite"]),
        ((*LINE, "--output", "rows.csv", "--overwrite"), ["rows.csv", "input"]),
        ((*LINE, "--output", "a.png"), ["a.png", "curves"]),
        ((*LINE, "--output", "no/a.onnx"), ["no/a.onnx", "No such file"]),
        ((*LINE, "--output", "rows.csv/a.onnx"), ["rows.csv/a.onnx", "Not a directory"]),
        ((*LINE, "--output", "."), ["folder"]),
        (("show", "rows.csv"), ["'rows.csv'", "ONNX"]),
        (("grad", "linear.onnx", "-o", "rows.csv"), ["rows.csv exists"]),
        (("grad", "linear.onnx", "-o", "g.onnx", "--fill-grad"), ["--keep-outputs"]),
        (("grad", "linear.onnx", "-o", "g.onnx", "--weights", "V"), ["weight 'V'"]),
    ],
)
def test_an_error_is_one_line(here, command, parts):
    (here / "cut.onnx").write_bytes((here / "linear.onnx").read_bytes()[:-20])
    before = set(os.listdir())
    assert_names(refusal(*command), *parts)
    assert set(os.listdir()) == before


@pytest.mark.parametrize(
    "command",
    [
        *(
            "show none.onnx",
            "check none.onnx --seed 3",
            "trainable none.onnx",
            "grad none.onnx -o g.onnx",
        ),
        *("train none.onnx rows.csv", "eval none.onnx rows.csv", "predict none.onnx rows.csv"),
        *("losses none", "merge none.onnx -o m.onnx --json", "report none", "generate none text"),
    ],
)
def test_debug_shows_the_traceback(here, command):
    made = run_command(*command.split(), "--debug")
    assert isinstance(made.exception, ValueError | OSError)


def test_overwrite(here):
    line = (*LINE, "--no-curves", "--epochs")
    succeed(*line, 1)
    old = (here / "trained.onnx").read_bytes()
    assert "trained.onnx exists" in refusal(*line, 2, "--output", "trained.onnx")
    assert (here / "trained.onnx").read_bytes() == old
    succeed(*line, 2, "--overwrite")
    assert (here / "trained.onnx").read_bytes() != old


def test_a_default_name_that_exists_gets_a_number(here):
    """Neither the model nor the curves replace a file."""
    line = (*LINE, "--epochs", 1)
    assert "exist" not in succeed(*line).stderr
    first = {name: (here / name).read_bytes() for name in ("trained.onnx", "trained.png")}
    made = succeed(*line)
    assert "exist: the result goes to trained-2.onnx" in made.stderr
    assert "wrote trained-2.onnx\nwrote trained-2.png" in made.stdout
    (here / "trained-3.png").touch()
    assert as_json(*line)["files"] == ["trained-4.onnx", "trained-4.png"]
    assert as_json(*line, "--no-curves")["files"] == ["trained-3.onnx"]
    assert {name: (here / name).read_bytes() for name in first} == first
    further = (LINE[0], "trained.onnx", *LINE[2:], "--epochs", 1, "--no-curves")
    assert as_json(*further)["files"] == ["trained-5.onnx"]


def test_a_resumed_training_writes_beside_the_result_of_the_first(here):
    line = (*LINE, "--no-curves", "--checkpoint", "state", "--resume", "--epochs")
    assert as_json(*line, 1)["files"] == ["trained.onnx"]
    resumed = as_json(*line, 2)
    assert resumed["files"] == ["trained-2.onnx"]
    assert resumed["epoch"] == 2


def test_a_failed_write_keeps_the_old_file(here, monkeypatch):
    (here / "g.onnx").write_text("precious")
    before = set(os.listdir())

    def fill_the_disk(model, file, arrays):
        file.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onnxgrad.model.external.write_filled", fill_the_disk)
    assert "No space left" in refusal("grad", "linear.onnx", "-o", "g.onnx", "--overwrite")
    assert (here / "g.onnx").read_text() == "precious"
    assert set(os.listdir()) == before


def test_ctrl_c_writes_what_was_trained(here):
    # a terminal, so that the progress bar is drawn: it tells when training has begun
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "onnxgrad", *LINE, "--epochs", "10000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=end, text=True)
    os.close(end)
    seen = b""
    while not re.search(rb"loss (0\.0|\S+e-)", seen):  # some epochs
        seen += os.read(terminal, 4096)
    process.send_signal(signal.SIGINT)
    while b"interrupted" not in seen:
        seen += os.read(terminal, 4096)
    assert process.communicate(timeout=PATIENCE)[0].count("wrote ") == 2
    assert process.returncode == 130
    assert b"Traceback" not in seen
    np.testing.assert_allclose(weights_of_file("trained.onnx")["W"], [[2], [-1]], atol=0.5)
