"""What a command says of what is wrong: one line, in words of the command line."""

import ast
import re
from pathlib import Path

import pytest

import onnxgrad
from onnxgrad.cli import face
from onnxgrad.cli.face import Shell
from onnxgrad.cli.train_options import TrainOptions
from onnxgrad.errors import argument, named, speaking
from tests.support.commands import HEADER, as_json, refused, save, succeed, write_all

NO = ("-o", "no.onnx")
REGRESSION = ("--target", "y", "--loss", "squared_error", *NO)
CLASSES = ("--target", "kind", "--loss", "cross_entropy", *NO)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_all(tmp_path)
    return tmp_path


def csv(text):
    Path("bad.csv").write_text(text)
    return "bad.csv"


# -- cells: the file, the column, the row, and what to do ---------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a,b,y\n1,2,3\n,2,3\n4,,5\n",
            "'bad.csv': 2 cells that are empty, NaN or infinite: column 'a', row 2; column 'b', "
            "row 3; fill them in, or leave these rows out with --drop-missing",
        ),
        (
            "a,b,y\n1,2,3\n1,2,\n",
            "'bad.csv': 1 cell that is empty, NaN or infinite: column 'y', row 2; fill it in, or "
            "leave these rows out with --drop-missing",
        ),
        (
            "a,c,y\n1,,3\n2,blue,3\n3,red,1\n4,red,1\n",
            "'bad.csv': column 'c' is text, first in row 2: 'blue'; write a column of 0 and 1 for "
            "each of its 2 values, or leave it out with --ignore c",
        ),
        (
            "a,b,y\n1,2,low\n1,2,high\n",
            "'bad.csv': column 'y' is text, first in row 1: 'low'; the loss squared_error compares "
            "with numbers: turn it into numbers, or name another column with --target",
        ),
        (
            "a,b,y\n1,2,\n1,2,high\n",
            "'bad.csv': 1 cell that is empty, NaN or infinite: column 'y', row 1; fill it in, or "
            "leave these rows out with --drop-missing",
        ),
        (
            "a,b,y\n1,2,3\n1,2,\n1,2,high\n1,2,low\n",
            "'bad.csv': 1 cell that is empty, NaN or infinite: column 'y', row 2; fill it in, or "
            "leave these rows out with --drop-missing",
        ),
        (
            "a,b,y\n1,2,3\n1,2,5\n1,2,high\n",
            "'bad.csv': column 'y' is text, first in row 3: 'high'; the loss squared_error "
            "compares with numbers: turn it into numbers, or name another column with --target",
        ),
        (
            "a,b,c,y\n1,2,3,4\n",
            "'bad.csv': input 'x' takes 2 values a row (shape (rows, 2)); the data has 3 (shape "
            "(1, 3)); choose its columns: --ignore leaves out others, such as --ignore c",
        ),
        (
            "a,y\n1,4\n",
            "'bad.csv': input 'x' takes 2 values a row (shape (rows, 2)); the data has 1 (shape "
            "(1,))",
        ),
    ],
)
def test_cells_and_columns(here, text, message):
    line = refused("train", "linear.onnx", csv(text), *REGRESSION)
    assert line == message
    assert refused("eval", "linear.onnx", "bad.csv", *REGRESSION[:4]) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("0 1 3 4", "outside 0..2: 3 (rows 3, 4); `onnxgrad train --head N` gives"),
        (
            "1 2 3",
            "names of the classes, pass --classes 1,2,3 (all of them); otherwise `onnxgrad",
        ),
        ("0 -1", "outside 0..2: -1 (row 2)"),
        ("0 1.5", "must hold int64, not 1.5 (row 2)"),
        ("cat dog cat", "first in row 1: 'cat'; if it names classes, list them in the order of"),
        ("cat dog", "--classes cat,dog, or train a new last layer with --head cat,dog"),
    ],
)
def test_labels_of_classes(here, values, message):
    rows = "".join(f"1,2,{v}\n" for v in values.split())
    line = refused("train", "layers.onnx", csv(f"a,b,kind\n{rows}"), *CLASSES, "--validation", 0)
    assert message in line
    assert line.startswith("'bad.csv': ")


@pytest.mark.parametrize("data", ["kinds.csv", "names.csv"])
@pytest.mark.parametrize("command", ["train", "eval"])
def test_classes_that_are_not_as_many_as_the_model_has(here, data, command):
    more = NO if command == "train" else ()
    line = (command, "layers.onnx", data, *CLASSES[:4], *more)
    names = "cat,dog,eel,fox"
    message = refused(*line, "--classes", names)
    assert "--classes names 4 classes, and the output 'z' has 3" in message
    assert f"--head {names}" in message


def test_labels_that_are_missing_are_left_out_on_request(here):
    text = csv("a,b,kind\n" + "1,2,cat\n1,3,\n3,1,dog\n" * 3)
    line = ("train", "layers.onnx", text, *CLASSES[:-2], "--head", "cat,dog", "--no-curves")
    assert "3 cells that are empty, NaN or infinite: column 'kind', rows 2, 5, 8" in refused(*line)
    result = as_json(*line, "--drop-missing", "--validation", 0)
    assert result["rows"] == 6


def test_labels_that_are_missing_do_not_count_on_request(here):
    """Rows without a label have a loss of zero: that of the others is the mean of theirs."""
    line = ("eval", "linear.onnx", csv("a,b,y\n1,2,3\n5,7,\n2,1,5\n"), *REGRESSION[:4])
    assert "column 'y', row 2" in refused(*line)
    loss = as_json(*line, "--loss-option", "ignore_nan=true")["loss"]
    assert loss == pytest.approx(((3.5 - 3) ** 2 + (3.5 - 5) ** 2) / 2)
    message = refused(
        *line[:2], csv("a,b,y\n1,,3\n"), *line[3:], "--loss-option", "ignore_nan=true"
    )
    assert "column 'b', row 1" in message


def test_rows_are_counted_as_in_the_file(here):
    """Also where rows are left out."""
    data = csv("a,b,kind\n1,2,0\n,2,0\n1,2,1\n,2,1\n1,2,7\n")
    line = ("layers.onnx", data, *CLASSES[:4], "--drop-missing")
    assert "outside 0..2: 7 (row 5)" in refused("train", *line, *NO)
    assert "outside 0..2: 7 (row 5)" in refused("eval", *line)
    data = csv("a,b,y\n,2,0\n1,2,1\n,2,1\n1,oh,7\n")
    line = ("linear.onnx", data, "--drop-missing", "--ignore", "y")
    assert "'bad.csv': column 'b' is text, first in row 4: 'oh'" in refused("predict", *line)


def test_columns_of_other_names(here):
    succeed("train", "linear.onnx", "rows.csv", *REGRESSION[:4], "--epochs", 1, "--no-curves")
    for header, end in (
        ("a,c,y\n1,2,3\n", ": correct the names in the data; their order does not matter"),
        ("a,b,c,y\n1,2,3,4\n", ": leave it out with --ignore c"),
    ):
        assert refused("train", "trained.onnx", csv(header), *REGRESSION).endswith(end)


def test_the_validation_file_is_named(here):
    csv("a,b,y\n1,oh,3\n")
    line = ("train", "linear.onnx", "rows.csv", *REGRESSION, "--validation", "bad.csv")
    assert refused(*line).startswith("'bad.csv': column 'b' is text, first in row 1: 'oh'")


# -- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--target", "y"), "no output 'loss' .it has y.: name a loss with --loss"),
        (("--loss", "l2"), "the loss compares with labels: name their column with --target"),
        ((*REGRESSION[:4], "--train", "w"), "weight 'w'. "),
        ((*REGRESSION[:4], "--freeze", "*"), r"no --train, --freeze '\*'"),
        ((*REGRESSION[:3], "squarederror"), "Did you mean 'squared_error'"),
        ((*REGRESSION[:3], "cross_entropy"), "--loss-option|binary_cross_entropy"),
        ((*REGRESSION[:4], "--optimizer", "adams"), "Did you mean 'adam'"),
        ((*REGRESSION[:4], "--schedule", "cosin"), "Did you mean 'cosine'"),
        ((*REGRESSION[:4], "--metrics", "mea"), "metric 'mea'"),
        ((*REGRESSION[:4], "--batch-norm", "on"), "batch_norm|--batch-norm"),
        ((*REGRESSION[:4], "--batch-norm", "train"), "--batch-norm train needs a BatchNorm"),
        ((*REGRESSION[:4], "--dropout", "x"), "--dropout 'x' is not NAME=NUMBER"),
        ((*REGRESSION[:4], "--class-weight", "balanced"), "--class-weight balanced needs class"),
        ((*REGRESSION[:4], "--sample-weight", "w"), r"column \(--sample-weight\) 'w'"),
        ((*REGRESSION[:4], "--schedule", "plateau", "--validation", 0), "--validation"),
        ((*REGRESSION[:4], "--early-stopping", 3, "--validation", 0), "--validation|validation"),
        ((*REGRESSION[:4], "--device", "cud"), "--device|device"),
        (
            (*REGRESSION[:4], "--early-stopping", 3, "--monitor", "validation_mae"),
            r"\(--monitor\) 'validation_mae'",
        ),
        ((*REGRESSION[:4], "--history", "h.txt"), r"\.csv"),
        ((*REGRESSION[:4], "--recompute", "some"), "recompute"),
        (
            (*REGRESSION[:4], "--lora", "W", "--lora-dropout", 1),
            "--lora-dropout 1.0: give a probability",
        ),
        ((*REGRESSION[:4], "--loss-weight", "y=2"), "as --loss OUTPUT=LOSS"),
        ((*REGRESSION[:4], "--schedule", "step_decay"), "needs --schedule-option every=VALUE"),
        ((*REGRESSION[:4], "--checkpoint", "rows.csv"), "rows.csv is a file: name a folder"),
        ((*REGRESSION[:3], "layers.onnx"), "give its inputs the names of the outputs"),
    ],
)
def test_options_that_are_refused(here, options, message):
    before = sorted(here.iterdir())
    line = refused("train", "linear.onnx", "rows.csv", *options, *NO)
    assert re.search(message, line), line
    arguments = "train|freeze|loss|validation|class_weight|batch_norm|learning_rate|at|metrics"
    assert not re.search(rf"(?<![\w-])({arguments})=", line), line
    assert not re.search(r"pass \(X|onnxgrad\.|\bog\.|callbacks", line), line
    assert sorted(here.iterdir()) == before


def test_a_model_with_its_own_loss(here):
    text = HEADER + (
        "g (float[N,2] x, float[N,1] label) => (float loss) { y = MatMul(x, W) "
        "d = Sub(y, label) s = Mul(d, d) loss = ReduceMean <keepdims = 0> (s) }"
    )
    save("own.onnx", text, W=[[1.0], [1.0]])
    line = ("train", "own.onnx", "rows.csv", "--target", "y", "--no-curves", "--epochs", 1)
    result = as_json(*line, "-o", "out.onnx")
    assert result["trained"] == ["W"]
    message = refused(*line, *NO, "--class-weight", "0=2")
    assert "--class-weight" in message


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
    for python, shell in face.NAMES.items():
        assert named(python) == python
        with speaking(Shell(())):
            assert named(python) == shell
    assert named("class_weight") == "class_weight"
    with speaking(Shell(TRAIN)):
        assert named("class_weight") == "--class-weight"


def messages(tree):
    """Yield the texts of a file that are no docstrings, with their lines."""
    inner = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    documents = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [v.value if isinstance(v, ast.Constant) else "{}" for v in node.values]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and id(node) not in inner | documents:
            yield node.lineno, str(node.value)


# what no command calls, or calls with no argument of a user, or by the same names (--task-option)
ELSEWHERE = ("cli", "explain", "plot", "sklearn", "torch", "artifacts", "tasks")
ONLY_PYTHON = ("training/stack", "compat")
ALONE = ("data/padding", "data/masks", "language/labeled_texts", "optimizers/groups")


def test_messages_name_arguments_by_the_function():
    """Where a message writes the name of an argument itself, the shell names no option."""
    package = Path(onnxgrad.__file__).parent
    options = {n for n in TRAIN if n not in ("output", "inputs")} | {*face.OPTIONS}
    written = re.compile(rf"(?<![\w'\"./{{-])({'|'.join(options)})=")
    keys, count = set(), 0
    for path in package.rglob("*.py"):
        name, tree = path.relative_to(package).as_posix(), ast.parse(path.read_text())
        called = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
        called = [n for n in called if getattr(n.func, "id", "") in ("named", "argument")]
        keys |= {n.args[0].value for n in called if isinstance(n.args[0], ast.Constant)}
        if name.startswith((*ELSEWHERE, *ONLY_PYTHON, *ALONE)):
            continue
        for line, text in messages(tree):
            count += 1
            found = written.search(text) and text not in face.NAMES
            assert not found or "Trainer(" in text, f"{name}:{line} {text}"
    assert count > 1000
    assert {*face.NAMES, *face.OPTIONS} <= keys


# -- a file of options --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", "run.toml, line 1: Unknown option 'epoch'. Did you mean 'epochs'"),
        ("[training]\nepoch = 3", "line 2, in [training]: Unknown option 'epoch'. Did you mean"),
        ("[trainin]\nepochs = 3", "line 1: Unknown option 'trainin'"),
        ("[loss]\nepochs = 3", "line 2, in [loss]: epochs stands in [training]"),
        ("epochs = 0", "line 1: epochs must be 1 or more, not 0"),
        ("epochs = '3'", "line 1: epochs must be a whole number, not '3'"),
        ("epochs = true", "line 1: epochs must be a whole number"),
        ("loss = true", "line 1: loss must be a list of texts"),
        ("epochs = = 3", "is no TOML file"),
        ("debug = true", "line 1: Unknown option 'debug'"),
    ],
)
def test_a_file_of_options(here, text, message):
    Path("run.toml").write_text(text + "\n")
    line = refused("train", "linear.onnx", "rows.csv", *REGRESSION, "--config", "run.toml")
    assert message.lower() in line.lower(), line


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
    assert "MODEL is missing" in refused("train", "--target", "y")


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
def test_options_without_effect_are_refused(command, missing, tmp_path):
    """Also where the value is the default, and before a file is read."""
    name, flag, value = command
    message = refused(name, "missing.onnx", "missing.csv", flag, value)
    assert f"{flag} has no effect without {missing}: " in message
    (tmp_path / "run.toml").write_text(
        f"{flag[2:]} = '{value}'\n" if value.isalpha() else f"{flag[2:]} = {value}\n"
    )
    assert "has no effect" in refused(
        name, "missing.onnx", "missing.csv", "--config", str(tmp_path / "run.toml")
    )
