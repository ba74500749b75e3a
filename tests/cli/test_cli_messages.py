"""What a command says of what is wrong: one line, in words of the command line."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from onnxgrad.cli import console
from onnxgrad.cli.command_options import TrainOptions
from onnxgrad.cli.config import read_config
from onnxgrad.cli.console import Shell
from onnxgrad.cli.options import OptionField
from onnxgrad.errors import argument, named, speaking
from onnxgrad.tasks.rows_task import RowsTask
from tests.support.commands import (
    as_json,
    assert_names,
    refusal,
    run_command,
    save_model,
    succeed,
)
from tests.support.paths import DOCS

NO = ("-o", "no.onnx")
REGRESSION = ("--target", "y", "--loss", "squared_error", *NO)
CLASSES = ("--target", "kind", "--loss", "cross_entropy", *NO)


def bad_csv(text, encoding="utf-8"):
    Path("bad.csv").write_text(text, encoding)
    return "bad.csv"


# -- cells: the file, the column, the row, and what to do ---------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "a,b,y\n1,2,3\n,2,3\n4,,5\n",
            ["2 cells", "column 'a', row 2; column 'b', row 3", "--drop-missing"],
        ),
        ("a,b,y\n1,2,3\n,2,3\n4,,5\n,1,1\n", ["3 cells", "column 'a', rows 2, 4; column 'b'"]),
        ("a,b,y\n1,2,3\n1,2,\n", ["1 cell", "column 'y', row 2", "--drop-missing"]),
        ("a,b,y\n1,2,\n1,2,high\n", ["1 cell", "column 'y', row 1"]),
        ("a,b,y\n1,2,3\n1,2,\n1,2,high\n1,2,low\n", ["1 cell", "column 'y', row 2"]),
        ("a,b,y\n1,2,3\n,inf,3\n", ["column 'a', row 2; column 'b', row 2"]),
        ("a,b,y\n1,2,3\n1,2,nan\n", ["column 'y', row 2"]),
        (
            "a,c,y\n1,,3\n2,blue,3\n3,red,1\n4,red,1\n",
            ["column 'c'", "row 2: 'blue'", "2 values", "--ignore c"],
        ),
        ("a,c,y\n1,red,3\n2,blue,3\n3,red,1\n", ["'c'", "row 1: 'red'", "--ignore c"]),
        (
            "a,b,y\n1,2,low\n1,2,high\n",
            ["column 'y'", "row 1: 'low'", "squared_error", "numbers", "--target"],
        ),
        ("a,b,y\n1,2,3\n1,2,5\n1,2,high\n", ["column 'y'", "row 3: 'high'"]),
        ("a,b,y\n1,2,3\n1,oh,3\n", ["column 'b'", "row 2: 'oh'"]),
        ("a,b,y\n1,2,3\n1,2\n", ["row 2", "3 columns", "2: '1,2'"]),
        ("a,b,y\n1,2,3\n1,2,3,4\n", ["row 2", "3 columns", "got 4"]),
        ("a,b,y\n" + "1,2,3\n" * 100_000 + "\n7\n", ["row 100001", "3 columns", "1: '7'"]),
        ('a,b,y\n"1,234",2,3\n', ["'a'", "row 1: '1,234'", "thousands"]),
        ("a,b,y\nyes,2,3\nno,1,2\n", ["'a'", "row 1: 'yes'", "1 and 0"]),
        ("a,b,y\n1,?,3\n", ["'b'", "row 1: '?'", "missing"]),
        ("a,b,y\n2020-01-31,2,3\n", ["'a'", "datetime64", "2020-01-31", "days"]),
        ("a,b,y\n12:30:00,2,3\n", ["column 'a'", "time", "row 1"]),
        ("a;b;y\n1,5;2;3\n", ["'a'", "row 1: '1,5'", "decimal point"]),
        ("a,a,y\n1,2,3\n", ["two columns", "'a'"]),
        (",a,y\n0,2,3\n", ["column 1", "''", "index=False"]),
        ("a,y,Unnamed: 0\n0,2,3\n", ["column 2", "'Unnamed: 0'"]),
        ("a,b,y\n", ["no rows"]),
        (
            "a,b,c,y\n1,2,3,4\n",
            ["'x' takes 2 values", "has 3", "shape (1, 3)", "--ignore", "a, b, c"],
        ),
        ("a,y\n1,4\n", ["'x' takes 2 values", "has 1", "shape (1,)"]),
    ],
)
def test_cells_and_columns(here, text, parts):
    """Training and evaluation name the file, the column, the row, and what to do."""
    line = refusal("train", "linear.onnx", bad_csv(text), *REGRESSION)
    assert_names(line, "'bad.csv'", *parts)
    assert refusal("eval", "linear.onnx", "bad.csv", *REGRESSION[:4]) == line


def test_the_text_of_a_header_is_utf_8(here):
    line = refusal("train", "linear.onnx", bad_csv("a,b,y\n1,2,3\n", "utf-16"), *REGRESSION)
    assert_names(line, "'bad.csv'", "header", "UTF-8")


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ("0 1 3 4", ["0..2", "3 (rows 3, 4)", "`onnxgrad train --head N`"]),
        ("1 2 3", ["--classes 1,2,3", "`onnxgrad train --head"]),
        ("0 -1", ["0..2", "-1 (row 2)"]),
        ("0 1.5", ["int64", "1.5 (row 2)"]),
        ("cat dog cat", ["row 1: 'cat'", "order"]),
        ("cat dog", ["--classes cat,dog", "--head cat,dog"]),
    ],
)
def test_labels_of_classes(here, values, parts):
    rows = "".join(f"1,2,{v}\n" for v in values.split())
    data = bad_csv(f"a,b,kind\n{rows}")
    line = refusal("train", "layers.onnx", data, *CLASSES, "--validation", 0)
    assert_names(line, *parts)
    assert line.startswith("'bad.csv': ")


@pytest.mark.parametrize("data", ["kinds.csv", "names.csv"])
@pytest.mark.parametrize("command", ["train", "eval"])
def test_classes_that_are_not_as_many_as_the_model_has(here, data, command):
    more = NO if command == "train" else ()
    line = (command, "layers.onnx", data, *CLASSES[:4], *more)
    names = "cat,dog,eel,fox"
    message = refusal(*line, "--classes", names)
    assert_names(message, "--classes", "4 classes", "'z' has 3", "train --head N")


def test_labels_that_are_missing_are_left_out_on_request(here):
    text = bad_csv("a,b,kind\n" + "1,2,cat\n1,3,\n3,1,dog\n" * 3)
    line = ("train", "layers.onnx", text, *CLASSES[:-2], "--head", "cat,dog", "--no-curves")
    assert_names(refusal(*line), "3 cells", "column 'kind', rows 2, 5, 8")
    result = succeed(*line, "--drop-missing", "--validation", 0, "--json")
    assert json.loads(result.stdout)["rows"] == 6
    assert_names(result.stderr, "3 of 9 rows", "2, 5, 8")


def test_labels_that_are_missing_do_not_count_on_request(here):
    """Rows without a label have a loss of zero: that of the others is the mean of theirs."""
    line = ("eval", "linear.onnx", bad_csv("a,b,y\n1,2,3\n5,7,\n2,1,5\n"), *REGRESSION[:4])
    assert "column 'y', row 2" in refusal(*line)
    loss = as_json(*line, "--loss-option", "ignore_nan=true")["loss"]
    assert loss == pytest.approx(((3.5 - 3) ** 2 + (3.5 - 5) ** 2) / 2)
    message = refusal(
        *line[:2], bad_csv("a,b,y\n1,,3\n"), *line[3:], "--loss-option", "ignore_nan=true"
    )
    assert "column 'b', row 1" in message


def test_rows_are_counted_as_in_the_file(here):
    """Also where rows are left out."""
    data = bad_csv("a,b,kind\n1,2,0\n,2,0\n1,2,1\n,2,1\n1,2,7\n")
    line = ("layers.onnx", data, *CLASSES[:4], "--drop-missing")
    assert "outside 0..2: 7 (row 5)" in refusal("train", *line, *NO)
    assert "outside 0..2: 7 (row 5)" in refusal("eval", *line)
    data = bad_csv("a,b,y\n,2,0\n1,2,1\n,2,1\n1,oh,7\n")
    line = ("linear.onnx", data, "--drop-missing", "--ignore", "y")
    assert_names(refusal("predict", *line), "'bad.csv'", "column 'b'", "row 4: 'oh'")


def test_columns_of_other_names(here):
    succeed("train", "linear.onnx", "rows.csv", *REGRESSION[:4], "--epochs", 1, "--no-curves")
    for header, part in (
        ("a,c,y\n1,2,3\n", "order does not matter"),
        ("a,b,c,y\n1,2,3,4\n", "--ignore c"),
    ):
        assert part in refusal("train", "trained.onnx", bad_csv(header), *REGRESSION)


def test_the_validation_file_is_named(here):
    bad_csv("a,b,y\n1,oh,3\n")
    line = ("train", "linear.onnx", "rows.csv", *REGRESSION, "--validation", "bad.csv")
    assert_names(refusal(*line), "'bad.csv'", "column 'b'", "row 1: 'oh'")


# -- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--target", "y"), ["'loss'", "y", "--loss"]),
        (("--loss", "l2"), ["labels", "--target"]),
        ((*REGRESSION[:4], "--train", "w"), ["weight", "'w'"]),
        ((*REGRESSION[:4], "--freeze", "*"), ["no --train, --freeze '*'"]),
        ((*REGRESSION[:3], "cross_entropy"), ["binary_cross_entropy"]),
        ((*REGRESSION[:4], "--optimizer", "adams"), ["'adam'"]),
        ((*REGRESSION[:4], "--schedule", "cosin"), ["'cosine'"]),
        ((*REGRESSION[:4], "--metrics", "mea"), ["metric 'mea'"]),
        ((*REGRESSION[:4], "--batch-norm", "on"), ["--batch-norm"]),
        ((*REGRESSION[:4], "--batch-norm", "train"), ["--batch-norm train", "BatchNorm"]),
        ((*REGRESSION[:4], "--dropout", "x"), ["--dropout 'x'", "NAME=NUMBER"]),
        ((*REGRESSION[:4], "--class-weight", "balanced"), ["--class-weight balanced", "class"]),
        ((*REGRESSION[:4], "--sample-weight", "w"), ["column (--sample-weight) 'w'"]),
        ((*REGRESSION[:4], "--schedule", "plateau", "--validation", 0), ["--validation"]),
        ((*REGRESSION[:4], "--early-stopping", 3, "--validation", 0), ["--validation"]),
        ((*REGRESSION[:4], "--device", "cud"), ["'cud'"]),
        (
            (*REGRESSION[:4], "--early-stopping", 3, "--monitor", "validation_mae"),
            ["(--monitor) 'validation_mae'"],
        ),
        ((*REGRESSION[:4], "--history", "h.txt"), [".csv"]),
        (
            (*REGRESSION[:4], "--checkpoint", "kept", "--checkpoint-seconds", 0),
            ["--checkpoint-seconds", "above 0", "0.0"],
        ),
        ((*REGRESSION[:4], "--clip-norm", 0), ["--clip-norm", "above 0", "0.0"]),
        ((*REGRESSION[:4], "--recompute", "some"), ["recompute", "some"]),
        ((*REGRESSION[:4], "--lora", "W", "--lora-dropout", 1), ["--lora-dropout 1.0"]),
        ((*REGRESSION[:4], "--loss-weight", "y=2"), ["--loss OUTPUT=LOSS"]),
        ((*REGRESSION[:4], "--schedule", "step_decay"), ["--schedule-option every=VALUE"]),
        ((*REGRESSION[:4], "--checkpoint", "rows.csv"), ["rows.csv", "file", "folder"]),
        ((*REGRESSION[:3], "layers.onnx"), ["inputs", "names", "outputs"]),
    ],
)
def test_options_that_are_refused(here, options, parts):
    before = sorted(here.iterdir())
    line = refusal("train", "linear.onnx", "rows.csv", *options, *NO)
    assert_names(line, *parts)
    arguments = "train|freeze|loss|validation|class_weight|batch_norm|learning_rate|at|metrics"
    assert not re.search(rf"(?<![\w-])({arguments})=", line), line
    assert not re.search(r"pass \(X|onnxgrad\.|\bog\.|callbacks", line), line
    assert sorted(here.iterdir()) == before


def test_a_model_with_its_own_loss(here):
    text = (
        "g (float[N,2] x, float[N,1] label) => (float loss) { y = MatMul(x, W) "
        "d = Sub(y, label) s = Mul(d, d) loss = ReduceMean <keepdims = 0> (s) }"
    )
    save_model("own.onnx", text, W=[[1.0], [1.0]])
    line = ("train", "own.onnx", "rows.csv", "--target", "y", "--no-curves", "--epochs", 1)
    result = as_json(*line, "-o", "out.onnx")
    assert result["trained"] == ["W"]
    assert "--class-weight" in refusal(*line, *NO, "--class-weight", "0=2")


TRAIN = frozenset(vars(TrainOptions()))


@pytest.mark.parametrize(
    ("name", "value", "python", "shell"),
    [
        ("loss_options.axis", (), "axis=", "--loss-option axis="),
        ("loss_options.axis", (-1,), "axis=-1", "--loss-option axis=-1"),
        ("loss_options.from_logits", (True,), "from_logits=True", "--loss-option from_logits=true"),
        ("loss_options", ({"a": 0.5},), "loss_options={'a': 0.5}", "--loss-option a=0.5"),
        ("loss_options.alpha", (2,), "alpha=2", "--loss-option alpha=2"),
        ("train", (None,), "train=None", "no --train"),
        ("freeze", (["a", "b*"],), "freeze=['a', 'b*']", "--freeze a --freeze 'b*'"),
        ("batch_norm", ("train",), "batch_norm='train'", "--batch-norm train"),
        ("validation", (), "validation=", "--validation"),
        ("at", ("a b",), "at='a b'", "--head-at 'a b'"),
        ("shuffle", (False,), "shuffle=False", "--no-shuffle"),
        ("shuffle", (True,), "shuffle=True", "--shuffle"),
        ("y", (None,), "y=None", "no --target"),
        ("units", (["a", "b"],), "units=['a', 'b']", "--head a,b"),
        ("temperature", (2,), "temperature=2", "temperature=2"),
    ],
)
def test_arguments_are_options_in_the_shell(name, value, python, shell):
    assert argument(name, *value) == python
    with speaking(Shell(TRAIN)):
        assert argument(name, *value) == shell
    with speaking(Shell(())):
        assert argument(name, *value) == python


def test_python_says_what_messages_write():
    for python, shell in console.SHELL_WORDS.items():
        assert named(python) == python
        with speaking(Shell(())):
            assert named(python) == shell
    assert named("class_weight") == "class_weight"
    with speaking(Shell(TRAIN)):
        assert named("class_weight") == "--class-weight"


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (MemoryError("std::bad_alloc"), "memory"),
        (RuntimeError("[ONNXRuntimeError] : 6 : while running Conv: std::bad_alloc"), "memory"),
        (RecursionError("maximum recursion depth exceeded"), "nested"),
    ],
)
def test_what_only_the_type_of_an_error_says(here, monkeypatch, error, part):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(RowsTask, "evaluate", fail)
    made = run_command("eval", "linear.onnx", "rows.csv", *REGRESSION[:4])
    assert made.exit_code == 1
    assert_names(made.stderr, part)
    assert "bad_alloc" not in made.stderr


# -- a file of options --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("epoch = 3", ["run.toml, line 1:", "'epoch'", "'epochs'"]),
        ("[training]\nepoch = 3", ["line 2, in [training]:", "'epoch'", "'epochs'"]),
        ("[trainin]\nepochs = 3", ["line 1:", "'trainin'"]),
        ("[loss]\nepochs = 3", ["line 2, in [loss]:", "[training]"]),
        ("epochs = 0", ["line 1:", "epochs", "1 or more", "not 0"]),
        ("epochs = '3'", ["line 1:", "epochs", "whole number", "'3'"]),
        ("epochs = true", ["line 1:", "epochs", "whole number"]),
        ("lora_dropout = 1.5", ["line 1:", "lora_dropout", "from 0 to 1", "1.5"]),
        ("loss = true", ["line 1:", "loss", "list", "texts"]),
        ("epochs = = 3", ["TOML"]),
        ("debug = true", ["line 1:", "'debug'"]),
        pytest.param("loss = " + "[" * 100_000, ["run.toml", "nested"], id="brackets"),
    ],
)
def test_a_file_of_options(here, text, parts):
    Path("run.toml").write_text(text + "\n")
    line = refusal("train", "linear.onnx", "rows.csv", *REGRESSION, "--config", "run.toml")
    assert_names(line, *parts)


def test_numbers_of_a_file_of_options_may_be_at_their_bounds(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("epochs = 1\nlora_alpha = 0\nlora_dropout = 1\nseed = 0\n")
    fields = OptionField.fields_of(TrainOptions)
    assert read_config(str(file), fields) == {
        "epochs": 1, "lora_alpha": 0.0, "lora_dropout": 1.0, "seed": 0
    }  # fmt: skip


def test_the_file_of_options_in_the_documents(here):
    page = (DOCS / "cli" / "train.md").read_text()
    [text] = re.findall(r"<<'END'\n(.*?)^END$", page, re.DOTALL | re.MULTILINE)
    names = {"houses.onnx": "linear.onnx", "houses.csv": "rows.csv", "price": "y"}
    for name, own in names.items():
        text = text.replace(name, own)
    Path("run.toml").write_text(text)
    result = as_json("train", "--config", "run.toml", "--epochs", 2)
    assert result["epochs"] == 2
    assert set(result["validation"]) == {"loss", "mae", "r2"}
    Path("run.toml").write_text(text.replace("epochs", "epoch"))
    line = refusal("train", "--config", "run.toml")
    assert_names(line, "run.toml, line 19, in [training]", "'epoch'", "'epochs'")


def test_options_of_a_file_are_those_of_the_command_line(here):
    Path("run.toml").write_text(
        'model = "linear.onnx"\ndata = "rows.csv"\n[columns]\ntarget = "y"\nvalidation = 0\n'
        '[loss]\nloss = "huber"\n[loss.loss_option]\ndelta = 2.0\n[weights]\nfreeze = ["b"]\n'
        "[optimizer]\nlearning-rate = 0.1\nwarmup = 3\n[result]\ncurves = false\n"
    )
    succeed("train", "--config", "run.toml", "--epochs", 2, "-o", "a.onnx")
    line = ("linear.onnx", "rows.csv", "--target", "y", "--validation", 0, "--loss", "huber")
    more = ("--loss-option", "delta=2.0", "--freeze", "b", "--lr", 0.1, "--warmup", 3)
    succeed("train", *line, *more, "--no-curves", "--epochs", 2, "-o", "b.onnx")
    assert Path("a.onnx").read_bytes() == Path("b.onnx").read_bytes()
    assert "MODEL is missing" in refusal("train", "--target", "y")


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (("train", "--lora-rank", "8"), "--lora"),
        (("train", "--checkpoint-every", "5"), "--checkpoint"),
        (("train", "--monitor", "loss"), "--early-stopping or --checkpoint"),
        (("train", "--head-at", "fc"), "--head"),
        (("train", "--license", "mit"), "--card"),
    ],
)
def test_options_without_effect_are_refusal(command, missing, tmp_path):
    """Also where the value is the default, and before a file is read."""
    name, flag, value = command
    message = refusal(name, "missing.onnx", "missing.csv", flag, value)
    assert_names(message, f"{flag} has no effect", missing)
    shown = repr(value) if value.isalpha() else value
    (tmp_path / "run.toml").write_text(f"{flag[2:]} = {shown}\n")
    line = (name, "missing.onnx", "missing.csv", "--config", tmp_path / "run.toml")
    assert "has no effect" in refusal(*line)


# -- outputs that take no text -------------------------------------------------------------------


def test_characters_that_the_output_cannot_encode_are_explained(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    with pytest.raises(UnicodeEncodeError, match="PYTHONIOENCODING"):
        console.print_message("\u2211 w")


@pytest.mark.newest  # rich 13.7 leaves the text in the buffer, and Python fails to write it at exit
def test_a_closed_pipe_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "onnxgrad", "losses"], stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
