"""The command line, as a user meets it."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from onnx import numpy_helper
from onnxruntime import InferenceSession
from typer.testing import CliRunner

from onnxgrad import add_loss_output
from onnxgrad.cli import app
from tests.support.running import PATIENCE

LINEAR = """<ir_version: 8, opset_import: ["": 18]>
g (float[N,2,1] x) => (float[N,1] y) {f = Flatten(x) h = MatMul(f, W) y = Add(h, b)}"""
LOGITS = """<ir_version: 8, opset_import: ["": 18]>
g (float[N,2] x) => (float[N,3] z) {h = MatMul(x, W) z = Add(h, b)}"""
TWO_INPUTS = """<ir_version: 8, opset_import: ["": 18]>
g (float[N,1] u, int64[N,1] n) => (float[N,1] y, float[N,1] other) {
    f = Cast <to = 1> (n) a = Mul(f, W) c = Mul(u, b) y = Add(a, c) other = Neg(y)}"""


def save(path, text, **weights):
    model = onnx.parser.parse_model(text)
    for name, array in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(np.float32(array), name))
    onnx.save(model, path)
    return model


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with models, and data for them: y = 2 a - b + 3, the class of the larger of both."""
    monkeypatch.chdir(tmp_path)
    save("linear.onnx", LINEAR, W=np.zeros((2, 1)), b=[0.0])
    save("logits.onnx", LOGITS, W=np.eye(2, 3), b=np.zeros(3))
    save("two.onnx", TWO_INPUTS, W=[[0.0]], b=[[0.0]])
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 200)).round(3)
    y = 2 * a - b + 3
    with open("data.csv", "w") as file:
        file.write("a,y,b,kind\n")
        file.writelines(f"{i},{j},{k},{int(i > k)}\n" for i, j, k in zip(a, y, b, strict=True))
    flat = pa.FixedSizeListArray.from_arrays(np.stack([a, b], 1).ravel(), 2)
    pq.write_table(pa.table({"y": y, "ab": flat}), "lists.parquet")
    np.savez("one.npz", anything=np.stack([a, b], 1)[..., None], y=y[:, None])
    np.savez("two.npz", u=a, n=np.arange(200) % 5, y=a + np.arange(200) % 5, spare=a)
    return tmp_path


REGRESSION = ("--target", "y", "--loss", "squared_error", "--optimizer", "momentum")
LINE = ("train", "linear.onnx", "lists.parquet", *REGRESSION)


def weights(path):
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


@pytest.mark.parametrize("data", ["lists.parquet", "one.npz"])
def test_train_writes_the_users_model(here, data):
    made = run("train", "linear.onnx", data, *REGRESSION, "--epochs", 30)
    assert made.exit_code == 0, made.output
    np.testing.assert_allclose(weights("trained.onnx")["W"], [[2], [-1]], atol=1e-3)
    np.testing.assert_allclose(weights("trained.onnx")["b"], [3], atol=1e-3)
    before, after = onnx.load("linear.onnx"), onnx.load("trained.onnx")
    del before.graph.initializer[:], after.graph.initializer[:]
    [entry] = after.metadata_props
    assert (entry.key, json.loads(entry.value)) == (
        "onnxgrad.training_loss",
        [{"loss": ["squared_error"]}],
    )
    del after.metadata_props[:]
    assert before == after
    assert (here / "trained.png").read_bytes().startswith(b"\x89PNG")
    for word in ("training loss", "validation loss", "first", "last", "best", "rows/s", "s\n"):
        assert word in made.stdout
    assert "wrote trained.onnx\nwrote trained.png" in made.stdout
    assert "accuracy" not in made.stdout
    assert not [f for f in os.listdir() if f.startswith(".")]


def test_train_counts_what_stays(here):
    """Of many constants a few are named, and --verbose lists all."""
    names = [f"mean_{i}" for i in range(20)]
    chain = " ".join(f"S{i + 1} = Sub(S{i}, {name})" for i, name in enumerate(names))
    save(
        "scaled.onnx",
        f"""<ir_version: 8, opset_import: ["": 18]> g (float[N, 2] X) => (float[N, 1] Y) {{
            S0 = Identity(X) {chain} Z = MatMul(S20, W)  Y = Add(Z, b) }}""",
        W=np.zeros((2, 1)),
        b=[0.0],
        **{name: [1.0, i + 2.0] for i, name in enumerate(names)},
    )
    line = ("train", "scaled.onnx", "lists.parquet", *REGRESSION, "--overwrite")
    said = run(*line).stdout
    assert "not trained by default: 20 constants, as 'mean_0' (" in said
    assert "--verbose or `onnxgrad trainable scaled.onnx` lists all" in said
    assert "mean_9" not in said
    assert all(name in run(*line, "--verbose").stdout for name in names)


def test_train_says_what_stays(here):
    save(
        "scaled.onnx",
        """<ir_version: 8, opset_import: ["": 18]> g (float[N, 2] X) => (float[N, 1] Y) {
            S = Sub(X, mean)  Z = MatMul(S, W)  Y = Add(Z, b) }""",
        W=np.zeros((2, 1)),
        b=[0.0],
        mean=[1.0, 2.0],
    )
    said = run("train", "scaled.onnx", "lists.parquet", *REGRESSION)
    assert "not trained by default: 'mean' (added to an input before any weight" in said.stdout
    np.testing.assert_array_equal(weights("trained.onnx")["mean"], [1, 2])
    named = run(
        "train",
        "scaled.onnx",
        "lists.parquet",
        *REGRESSION,
        "--weights",
        "mean",
        "--weights",
        "W",
        "--output",
        "b.onnx",
    )
    assert "not trained" not in named.stdout
    assert (weights("b.onnx")["mean"] != [1, 2]).any()


def classes(name, *more):
    table = pa.csv.read_csv("data.csv").select(["a", "b", "kind"])
    pq.write_table(table, "kind.parquet")
    return run("train", name, "kind.parquet", "--target", "kind", "--learning-rate", 0.05, *more)


def test_train_reports_the_accuracy_on_held_rows(here):
    made = classes("logits.onnx", "--loss", "cross_entropy", "--epochs", 20)
    assert made.exit_code == 0, made.output
    [shown] = [line for line in made.stdout.splitlines() if "accuracy" in line]
    assert float(shown.split("%")[-2].split()[-1]) > 90


def test_accuracy_of_two_classes_by_a_threshold(here):
    save("score.onnx", LOGITS.replace("[N,3]", "[N,1]"), W=[[1.0], [-1.0]], b=[0.0])
    options = ("--loss", "binary_cross_entropy", "--loss-option", "from_logits=true")
    made = classes("score.onnx", *options, "--epochs", 1)
    assert made.exit_code == 0, made.output
    assert "100.00%" in made.stdout


def test_the_accuracy_is_that_of_the_written_model(here):
    made = classes("logits.onnx", "--loss", "cross_entropy", "--validation", 0.5, "--seed", 3)
    table = pq.read_table("kind.parquet")
    x = np.stack([table["a"], table["b"]], 1).astype(np.float32)
    [z] = InferenceSession("trained.onnx").run(None, {"x": x})
    held = np.random.default_rng(3).permutation(200)[:100]
    accuracy = (z.argmax(1) == table["kind"].to_numpy())[held].mean()
    assert f"{accuracy:.2%}" in made.stdout


def test_the_same_seed_gives_the_same_bytes(here):
    for name in "ab":
        assert run(*LINE, "--output", f"{name}.onnx", "--seed", 7).exit_code == 0
    assert (here / "a.onnx").read_bytes() == (here / "b.onnx").read_bytes()


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov", "adam", "adamw"])
def test_every_optimizer_lowers_the_loss(here, optimizer):
    made = run(*LINE, "--optimizer", optimizer, "--epochs", 3, "--validation", 0)
    first, last = made.stdout.split("training loss")[1].replace("│", " ").split()[:2]
    assert float(last) < float(first)
    assert "validation" not in made.stdout


def test_several_inputs_by_name_and_one_of_two_outputs(here):
    two = ("train", "two.onnx", "two.npz", *REGRESSION)
    made = run(*two, "--output-index", "other", "--weights", "b", "--epochs", 40)
    assert made.exit_code == 0, made.output
    assert weights("trained.onnx")["W"] == 0
    assert weights("trained.onnx")["b"] < 0
    assert "ignored columns: spare" in made.stdout
    made = run(*two, "--overwrite")
    assert made.exit_code == 2
    assert "2 float outputs: say which one" in made.stderr


def test_a_model_that_computes_its_own_loss(here):
    onnx.save(add_loss_output("linear.onnx", loss_name="mine"), "own.onnx")
    own = ("train", "own.onnx", "lists.parquet", "--target", "y")
    assert "no output 'loss' (it has mine, y): name a loss with --loss" in run(*own).stderr
    made = run(*own, "--loss-output", "mine", "--optimizer", "momentum", "--epochs", 30)
    assert made.exit_code == 0, made.output
    np.testing.assert_allclose(weights("trained.onnx")["W"], [[2], [-1]], atol=1e-3)


EMBEDDED = """<ir_version: 8, opset_import: ["": 18]>
g (float[N] u, int64[N,T] ids, float[N,T] mask) => (float[N,1] y) {
    e = Gather(table, ids) c = Unsqueeze(u, last) s = Mul(e, c) m = Mul(s, mask)
    y = ReduceSum(m, last)}"""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, None),
        ({"ids": 5}, r"input 'ids' must hold indices into 'table', of length 5, .*not 5 \(row 8\)"),
        ({"ids": -6}, r"not -6 \(row 8\)"),
        ({"ids": 1.5}, r"'ids' must hold int64, not 1.5 \(row 8\)"),
        ({"ids": np.nan}, "1 cell that is empty, NaN or infinite: column 'ids', row 8; fill"),
        (
            {"mask": np.ones((20, 3))},
            "'mask' has length 3 along axis 1, and 'ids', axis 1 has",
        ),
    ],
)
def test_ids_beyond_a_table_and_axes_that_differ(here, values, message):
    model = save("ids.onnx", EMBEDDED, table=np.zeros(5))
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "last"))
    onnx.save(model, "ids.onnx")
    ids = np.float64(np.arange(40).reshape(20, 2) % 5)  # exact floats are taken
    data = {"u": np.ones(20), "ids": ids, "mask": np.ones((20, 2)), "y": np.ones(20)}
    if "ids" in values:
        ids[7, 1] = values["ids"]
    else:
        data |= values
    np.savez("ids.npz", **data)
    made = run("train", "ids.onnx", "ids.npz", *REGRESSION, "--batch-size", 4, "--epochs", 1)
    if message is None:
        assert made.exit_code == 0, made.output
    else:
        [line] = made.stderr.splitlines()
        assert re.search(message, line), line


def bad(text):
    return lambda: Path("bad.csv").write_text(text)


def cells(text):
    return ("train", "linear.onnx", "bad.csv", *REGRESSION), bad(f"a,b,y\n{text}")


def csv(text):
    return ("train", "linear.onnx", "bad.csv", *REGRESSION), bad(text)


def encoded(encoding):
    return csv("")[0], lambda: Path("bad.csv").write_text("a,b,y\n1,2,3\n", encoding)


def labels(*values):
    rows = "".join(f"1,2,{v}\n" for v in values)
    arguments = ("--target", "y", "--loss", "cross_entropy", "--validation", 0, "--batch-size", 1)
    return ("train", "logits.onnx", "bad.csv", *arguments), bad(f"a,b,y\n{rows}")


def broken(model):
    return ("train", model, *LINE[2:])


def nothing():
    pass


def truncate():
    Path("cut.onnx").write_bytes(Path("linear.onnx").read_bytes()[:-20])


@pytest.mark.parametrize(
    ("arguments", "prepare", "message"),
    [
        (broken("none.onnx"), nothing, "cannot read 'none.onnx': No such file"),
        (broken("data.csv"), nothing, "'data.csv' .* is no ONNX model"),
        (broken("cut.onnx"), truncate, "'cut.onnx' .* truncated"),
        (("train", "linear.onnx", "none.csv", *REGRESSION), nothing, "'none.csv': No such file"),
        ((*LINE, "--target", "yy"), nothing, "column 'yy'. Did you mean 'y'"),
        ((*LINE, "--weights", "w"), nothing, "weight 'w'. .*Valid: 'W', 'b'"),
        ((*LINE, "--loss", "squarederror"), nothing, "Did you mean 'squared_error'"),
        ((*LINE, "--loss-option", "delta=1"), nothing, "option of loss 'squared_error' 'delta'"),
        ((*LINE, "--loss-option", "delta"), nothing, "'delta' is not NAME=VALUE"),
        ((*LINE, "--batch-size", 161), nothing, "--batch-size 161 is more than the 160 rows"),
        ((*LINE, "--validation", 0.001), nothing, "--validation 0.001 of 200 rows"),
        (
            ("train", "linear.onnx", "data.csv", *REGRESSION),
            nothing,
            "'x' takes 2 values a row .*the data has 3",
        ),
        (*cells("1,2,3\n1,oh,3\n"), "column 'b' is text, first in row 2: 'oh'"),
        (*cells("1,2,3\n,inf,3\n"), "column 'a', row 2; column 'b', row 2"),
        (*cells("1,2,3\n1,2,nan\n"), "column 'y', row 2"),
        (*cells(""), "'bad.csv' holds no rows"),
        (*cells("1,2,3\n1,2\n"), "'bad.csv' .* row 2: Expected 3 columns, got 2: '1,2'"),
        (*cells("1,2,3\n1,2,3,4\n"), "row 2: Expected 3 columns, got 4"),
        (*cells("1,2,3\n" * 100_000 + "\n7\n"), "row 10000.: Expected 3 columns, got 1: '7'"),
        (*cells('"1,234",2,3\n'), "'a' is text, first in row 1: '1,234'; .* separators of thou"),
        (*cells("yes,2,3\nno,1,2\n"), "'a' is text, first in row 1: 'yes'; write 1 and 0"),
        (*cells("1,?,3\n"), "'b' is text, first in row 1: '.'; fill in the missing numbers"),
        (*cells("2020-01-31,2,3\n"), "'a' holds datetime64.*2020-01-31.*days for instance"),
        (*cells("12:30:00,2,3\n"), "column 'a' is time, first in row 1"),
        (*csv("a;b;y\n1,5;2;3\n"), "'a' is text, first in row 1: '1,5'; .* decimal point"),
        (*csv("a,a,y\n1,2,3\n"), "two columns are called 'a'"),
        (*csv(",a,y\n0,2,3\n"), "column 1 is called '', .* leave it out .index=False"),
        (*csv("a,y,Unnamed: 0\n0,2,3\n"), "column 2 is called 'Unnamed: 0'"),
        ((*cells("1,2,3\n")[0], "--target", "y"), cells("1,2,3\n")[1], "a target is named twice"),
        (*encoded("utf-16"), "its header is not text in UTF-8"),
        (*labels(0, 3), "'y' holds labels outside 0..2: 3 .row 2."),
        (*labels(0, -1), "outside 0..2: -1 .row 2."),
        (*labels(1.5, 2), "must hold int64, not 1.5 .row 1."),
        (*labels("cat", "dog"), "column 'y' is text, first in row 1: 'cat'"),
        ((*LINE, "--output", "data.csv"), nothing, "data.csv exists: .*--overwrite"),
        ((*LINE, "--output", "a.png"), nothing, "a.png is the name of the loss curves"),
        ((*LINE, "--output", "no/a.onnx"), nothing, "cannot write no/a.onnx: No such file"),
        ((*LINE, "--output", "data.csv/a.onnx"), nothing, "cannot write .*Not a directory"),
        ((*LINE, "--output", "."), nothing, "is a folder"),
        (("show", "data.csv"), nothing, "'data.csv' .* is no ONNX model"),
        (("grad", "linear.onnx", "-o", "data.csv"), nothing, "data.csv exists"),
        (("grad", "linear.onnx", "-o", "g.onnx", "--fill-grad"), nothing, "--keep-outputs"),
        (("grad", "linear.onnx", "-o", "g.onnx", "--weights", "V"), nothing, "weight 'V'"),
    ],
)
def test_an_error_is_one_line(here, arguments, prepare, message):
    prepare()
    before = set(os.listdir())
    made = run(*arguments)
    assert made.exit_code == 2
    assert set(os.listdir()) == before
    [line] = made.stderr.splitlines()
    assert line.startswith("Error: ")
    assert not made.stdout
    assert re.search(message, line), line


def test_debug_shows_the_traceback(here):
    made = run("show", "none.onnx", "--debug")
    assert isinstance(made.exception, ValueError)


def test_overwrite(here):
    assert run(*LINE, "--epochs", 1).exit_code == 0
    old = (here / "trained.onnx").read_bytes()
    assert "exists" in run(*LINE, "--epochs", 2).stderr
    assert (here / "trained.onnx").read_bytes() == old
    assert run(*LINE, "--epochs", 2, "--overwrite").exit_code == 0
    assert (here / "trained.onnx").read_bytes() != old


def test_a_failed_write_keeps_the_old_file(here, monkeypatch):
    (here / "g.onnx").write_text("precious")
    before = set(os.listdir())

    def full(model, file, arrays):
        file.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onnxgrad.model.external.write_filled", full)
    made = run("grad", "linear.onnx", "-o", "g.onnx", "--overwrite")
    assert made.exit_code == 2
    assert "No space left on device" in made.stderr
    assert (here / "g.onnx").read_text() == "precious"
    assert set(os.listdir()) == before


def test_divergence_keeps_the_state_before(here):
    made = run(*LINE, "--learning-rate", 1e6, "--epochs", 50)
    assert made.exit_code == 1
    assert "NaN or infinite" in made.stderr
    assert "trained.onnx holds the weights of epoch" in made.stderr
    assert all(np.isfinite(w).all() for w in weights("trained.onnx").values())


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
    np.testing.assert_allclose(weights("trained.onnx")["W"], [[2], [-1]], atol=0.5)
