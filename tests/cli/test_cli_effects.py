"""Every option of the shell does what it says, or is refused before anything is written."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from pyarrow import csv as arrow_csv, parquet

from tests.support.commands import (
    LINEAR,
    as_json,
    assert_names,
    csv_rows,
    features,
    metadata_of_file,
    refusal,
    run_command,
    save_model,
    succeed,
    write_csv_columns,
)

FAST = ("--epochs", 1, "--no-curves", "--overwrite", "--validation", 0)
CLASSES = ("train", "layers.onnx", "kinds.csv", "--target", "kind")
NUMBERS = ("train", "linear.onnx", "rows.csv", "--target", "y")


# -- options without effect ---------------------------------------------------------------------

TABLE, IMAGES, TEXTS = "table", "images", "texts"
VALUES = {  # of options that have an effect on some kinds of data only, and these kinds
    "--columns": (("a,b",), (TABLE,)),
    "--ignore": (("a",), (TABLE,)),
    "--drop-missing": ((), (TABLE,)),
    "--target": (("y",), (TABLE,)),
    "--sample-weight": (("a",), (TABLE,)),
    "--classes": (("a,b",), (TABLE, IMAGES)),
    "--image-size": ((8,), (IMAGES,)),
    "--scale": ((255,), (IMAGES,)),
    "--normalize": (("imagenet",), (IMAGES,)),
    "--max-length": ((8,), (TEXTS,)),
    "--completion-only": ((), (TEXTS,)),
    "--packing": ((), (TEXTS,)),
    "--tokenizer": ((".",), (TEXTS,)),
}


@pytest.mark.parametrize("kind", [TABLE, IMAGES, TEXTS])
@pytest.mark.parametrize("flag", VALUES)
def test_options_of_other_kinds_of_data(here, flag, kind):
    values, kinds = VALUES[flag]
    if kind in kinds:
        return
    if kind == IMAGES:
        image = pytest.importorskip("PIL.Image")
        (here / "photos" / "a").mkdir(parents=True)
        image.new("RGB", (8, 8)).save("photos/a/0.png")
    Path("texts.txt").write_text("a\n")
    data = {TABLE: "rows.csv", IMAGES: "photos", TEXTS: "texts.txt"}[kind]
    before = sorted(here.rglob("*"))
    line = refusal("train", "layers.onnx", data, "--loss", "cross_entropy", flag, *values)
    assert_names(line, f"--task {kind} ... {data!r} ... {flag}")
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize(
    "flag", [flag for flag, (_, kinds) in VALUES.items() if TABLE not in kinds]
)
def test_options_of_other_data_than_tables_in_eval(here, flag):
    line = ("eval", "layers.onnx", "kinds.csv", "--target", "kind", "--loss", "cross_entropy")
    message = refusal(*line, flag, *VALUES[flag][0])
    assert_names(message, f"--task table ... 'kinds.csv' ... {flag}")


def test_options_of_eval(here):
    """The loss is that of a plain formula, whatever the size of batches, device and output are."""
    line = ("eval", "linear.onnx", "rows.csv", "--target", "y", "--loss", "l2")
    session = ort.InferenceSession("linear.onnx")
    rows = csv_rows(Path("rows.csv").read_text())
    a, b, y = (np.float32([float(row[name]) for row in rows]) for name in "aby")
    for options in ("--batch-size", 7), ("--device", "cpu"), ("--output-index", "y"):
        found = as_json(*line, *options)["loss"]
        [z] = session.run(None, {"x": np.stack([a, b], 1)})
        assert found == pytest.approx(np.square(z[:, 0] - y).mean(), rel=1e-5)
    found = as_json(*line, "--columns", "b,a")["loss"]
    [z] = session.run(None, {"x": np.stack([b, a], 1)})
    assert found == pytest.approx(np.square(z[:, 0] - y).mean(), rel=1e-5)
    assert_names(refusal(*line, "--loss-output", "y"), "--loss-output ... --loss")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*NUMBERS, "--loss", "l2", "--classes", "a,b"), "--classes ... loss"),
        ((*NUMBERS, "--loss", "l2", "--loss-output", "z"), "--loss-output ... --loss"),
        ((*NUMBERS, "--loss", "l2", "--metrics", "mae"), "--metrics ... validation"),
        ((*NUMBERS, "--loss", "l2", "--precision", "file"), "--precision ... 16 bits"),
        ((*NUMBERS, "--loss", "l2", "--precision", "mixed"), "--precision ... 16 bits"),
        (
            (*NUMBERS, "--loss", "l2", "--batch-norm", "train"),
            "--batch-norm ... BatchNormalization",
        ),
        ((*NUMBERS, "--loss", "l2", "--train-ranges"), "no QuantizeLinear"),
        ((*NUMBERS, "--loss", "l2", "--class-weight", "1=2"), "--class-weight ... l2"),
        (
            (*NUMBERS, "--loss", "l2", "--monitor", "loss"),
            "--monitor ... --early-stopping ... --checkpoint",
        ),
        (
            (*NUMBERS, "--loss", "l2", "--shard-optimizer"),
            "--shard-optimizer ... torchrun ... mpirun",
        ),
        ((*NUMBERS, "--loss", "l2", "--sync-batch-norm"), "--sync-batch-norm ... torchrun"),
        (
            (*NUMBERS, "--loss", "l2", "--checkpoint-seconds", 1),
            "--checkpoint-seconds ... --checkpoint",
        ),
        ((*CLASSES, "--loss", "ce", "--columns", "a,nine"), "column (--columns) 'nine'"),
        ((*CLASSES, "--loss", "ce", "--columns", "a,a"), "--columns ... twice"),
    ],
)
def test_options_without_effect(here, options, message):
    before = sorted(here.iterdir())
    assert_names(refusal(*options, *FAST), message)
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-o", "t.csv", "--history", "t.csv"), "--output t.csv ... --history"),
        (("-o", "./t.csv", "--history", "t.csv"), "--output t.csv ... --history"),
        (("-o", "r", "--record", "r"), "--output r ... --record"),
        (("--record", "c", "--checkpoint", "c"), "--record c ... --checkpoint"),
        (("-o", "a.md", "--card", "a.md"), "--output a.md ... --card"),
        (("-o", "a.png"), "--output a.png ... curves"),
        (("--metrics", "nine"), "Unknown metric 'nine'"),
        (("--history", "nowhere/h.csv"), "nowhere"),
        (("--card", "nowhere/deep/c.md"), "nowhere"),
        (("--history", "h.xml"), "history ... '.xml'"),
    ],
)
def test_paths_are_checked_before_training(here, options, message):
    before = sorted(here.iterdir())
    line = refusal(*CLASSES, "--loss", "cross_entropy", "--epochs", 1, *options)
    assert_names(line, message)
    assert sorted(here.iterdir()) == before


def test_checkpoints_are_written_when_seconds_have_passed(here):
    """The last state is, in any case; those of other epochs only if there is time between them."""
    line = (*NUMBERS, "--loss", "l2", *FAST, "--epochs", 3, "--batch-size", 10)
    steps = {}
    for folder, seconds in (("often", 1e-9), ("seldom", 1e6)):
        succeed(*line, "--checkpoint", folder, "--checkpoint-seconds", seconds)
        steps[folder] = [path.name for path in Path(folder).glob("step-*")]
    assert len(steps["often"]) == 2
    assert steps["seldom"] == ["step-0000000012"]


def test_curves_of_a_line_are_drawn_though_its_file_says_none(here):
    Path("job.toml").write_text("curves = false\n")
    line = (*NUMBERS, "--loss", "l2", "--epochs", 1, "--config", "job.toml", "--overwrite")
    succeed(*line)
    assert not Path("trained.png").exists()
    succeed(*line, "--curves")
    assert Path("trained.png").read_bytes().startswith(b"\x89PNG")


# -- columns ------------------------------------------------------------------------------------


def test_the_order_of_columns_can_be_said(here):
    """The weights that train are those of the columns that --columns names, in its order."""
    line = ("--loss", "squared_error", "--optimizer", "sgd", "--lr", 0.1, *FAST)
    succeed("train", "linear.onnx", "rows.csv", "--target", "y", "--columns", "b, a", *line)
    assert json.loads(metadata_of_file("trained.onnx")["onnxgrad.columns"]) == {"x": ["b", "a"]}
    X = features()[:, ::-1]
    wanted = ort.InferenceSession("trained.onnx").run(None, {"x": np.ascontiguousarray(X)})[0]
    for more in ((), ("--columns", "b,a")):
        found = csv_rows(succeed("predict", "trained.onnx", "rows.csv", *more).stdout)
        np.testing.assert_allclose([float(r["y"]) for r in found], wanted.ravel(), rtol=1e-5)
    other = ("predict", "trained.onnx", "rows.csv", "--columns", "a,b")
    assert "on b,a" in refusal(*other)


def test_the_columns_of_several_inputs(here):
    text = LINEAR.replace("float[N,2] x", "float[N,1] u, float[N,1] v").replace(
        "h = MatMul(x, W)", "x = Concat<axis=1>(u, v) h = MatMul(x, W)"
    )
    save_model("pair.onnx", text, W=[[1.0], [2.0]], b=[0.5])
    line = ("predict", "pair.onnx", "rows.csv", "--columns")
    found = csv_rows(succeed(*line, "u=b", "--columns", "v=a").stdout)
    X = features()
    wanted = X[:, 1] + 2 * X[:, 0] + 0.5
    np.testing.assert_allclose([float(r["y"]) for r in found], wanted, rtol=1e-5)
    assert_names(refusal(*line, "b,a"), "INPUT=A,B ... u, v")


def test_rows_that_are_left_out_can_be_found_again(here):
    a, b = features().T.astype(object)
    a[[1, 7]] = ""
    write_csv_columns("gaps.csv", a=a, b=b)
    found = csv_rows(succeed("predict", "linear.onnx", "gaps.csv", "--drop-missing").stdout)
    left = [i for i in range(len(a)) if i not in (1, 7)]
    assert [int(r["row"]) for r in found] == [i + 1 for i in left]
    session = ort.InferenceSession("linear.onnx")
    wanted = session.run(None, {"x": features()[left]})[0]
    np.testing.assert_allclose([float(r["y"]) for r in found], wanted.ravel(), rtol=1e-5)
    parts = ("--batch-size", 7, "-o", "out.csv")
    succeed("predict", "linear.onnx", "gaps.csv", "--drop-missing", *parts)
    assert csv_rows(Path("out.csv").read_text()) == found


# -- what a trained file remembers --------------------------------------------------------------


def test_eval_remembers_loss_target_and_classes(here):
    names = np.array(["cat", "dog", "eel"])
    line = ("--target", "kind", "--loss", "softmax_focal", "--classes")
    more = ("cat,dog,eel", "--loss-option", "gamma=3")
    succeed("train", "layers.onnx", "names.csv", *line, *more, *FAST)
    told = run_command("eval", "trained.onnx", "names.csv", "--json")
    assert told.exit_code == 0, told.output
    assert "loss softmax_focal, as" in told.stderr
    said = as_json("eval", "trained.onnx", "names.csv", *line, *more)
    found = json.loads(told.stdout)
    assert (found["loss"], found["metrics"]) == (said["loss"], said["metrics"])
    other = as_json("eval", "trained.onnx", "names.csv", "--loss", "ce")
    assert other["loss"] != found["loss"]
    again = ("train", "trained.onnx", "names.csv", "-o", "again.onnx")
    assert "loss softmax_focal, as" in succeed(*again, *FAST).stderr
    predicted = csv_rows(succeed("predict", "trained.onnx", "names.csv").stdout)
    z = ort.InferenceSession("trained.onnx").run(None, {"x": features()})[0]
    assert [r["label"] for r in predicted] == names[z.argmax(1)].tolist()


def test_a_loss_in_the_model_is_not_replaced(here):
    """A file with a loss of its own is evaluated by that, not by the one of a note."""
    text = (
        "g (float[N,2] x, float[N,1] label) => (float loss) { y = MatMul(x, W) "
        "d = Sub(y, label) s = Mul(d, d) loss = ReduceMean <keepdims = 0> (s) }"
    )
    model = save_model("own.onnx", text, W=[[1.0], [1.0]])
    model.metadata_props.add(key="onnxgrad.training_loss", value='[{"loss": "l1"}]')
    onnx.save(model, "own.onnx")
    X = features()
    y = arrow_csv.read_csv("rows.csv")["y"].to_numpy()
    found = as_json("eval", "own.onnx", "rows.csv", "--target", "y")
    assert found["loss"] == pytest.approx(((X.sum(1) - y) ** 2).mean(), rel=1e-4)


def test_files_of_one_folder_have_the_same_columns(here):
    table = arrow_csv.read_csv("rows.csv")
    Path("parts").mkdir()
    parquet.write_table(table, "parts/0.parquet")
    parquet.write_table(table.rename_columns(["a", "c", "y"]), "parts/1.parquet")
    line = ("train", "linear.onnx", "parts", "--target", "y", "--loss", "mse")
    assert_names(refusal(*line), "parts/1.parquet ... column 'b'")
