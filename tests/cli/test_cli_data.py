"""The command line on data: what is wrong is one line that says what to do; TOML, eval, predict."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime import InferenceSession
from typer.testing import CliRunner

from onnxgrad.cli import app
from tests.support.paths import DOCS

LINEAR = """<ir_version: 8, opset_import: ["": 18]>
g (float[N,2] x) => (float[N,1] y) {h = MatMul(x, W) y = Add(h, b)}"""
X = np.random.default_rng(0).normal(size=(60, 2)).round(3).astype(np.float32)
Y = X @ np.float32([[2], [-1]]) + 3
TRAIN = ("train", "model.onnx", "bad.csv", "--target", "y", "--loss", "squared_error")


def run(*arguments, **more):
    return CliRunner().invoke(app, list(map(str, arguments)), **more)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = onnx.parser.parse_model(LINEAR)
    for name, array in (("W", [[1.0], [1.0]]), ("b", [0.5])):
        model.graph.initializer.append(numpy_helper.from_array(np.float32(array), name))
    onnx.save(model, "model.onnx")
    rows = "".join(f"{a},{b},{y}\n" for (a, b), [y] in zip(X, Y, strict=True))
    Path("rows.csv").write_text(f"a,b,y\n{rows}")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a,b,y\n1,2,3\n,2,3\n4,,5\n,1,1\n",
            r"3 cells .*, rows 2, 4; column",
        ),
        ("a,c,y\n1,red,3\n2,blue,3\n3,red,1\n", "'c' is text, first in row 1: 'red'.*--ignore c"),
    ],
)
def test_bad_columns_are_one_line(here, text, message):
    Path("bad.csv").write_text(text)
    made = run(*TRAIN)
    [line] = made.stderr.splitlines()
    assert made.exit_code == 2
    assert re.search(message, line), line


def test_rows_with_missing_values_are_left_out_on_request(here):
    Path("bad.csv").write_text("a,b,y\n" + "1,2,3\n,2,3\n" * 10)
    made = run(*TRAIN, "--drop-missing", "--json", "--validation", 0, "--no-curves")
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["rows"] == 10
    assert "left out 10 of 20 rows with missing values: 2, 4, 6, 8, 10" in made.stderr


def test_the_file_of_options_in_the_documents(here):
    page = DOCS / "cli.md"
    [text] = re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
    Path("run.toml").write_text(text)
    made = run("train", "--config", "run.toml", "--epochs", 2, "--json")
    assert made.exit_code == 0, made.output
    result = json.loads(made.stdout)
    assert result["epochs"] == 2
    assert set(result["validation"]) == {"loss", "mae", "r2"}
    Path("run.toml").write_text(text.replace("epochs", "epoch"))
    [line] = run("train", "--config", "run.toml").stderr.splitlines()
    assert re.search(r"run.toml, line 18, in \[training\].*'epoch'. Did you mean 'epochs'", line)


def test_eval_and_predict_compute_what_the_file_does(here):
    made = run("eval", "model.onnx", "rows.csv", *TRAIN[3:], "--metrics", "mae", "--json")
    assert made.exit_code == 0, made.output
    result, [expected] = json.loads(made.stdout), InferenceSession("model.onnx").run(None, {"x": X})
    assert result["loss"] == pytest.approx(float(((expected - Y) ** 2).mean()), rel=1e-5)
    assert result["metrics"]["mae"] == pytest.approx(float(abs(expected - Y).mean()), rel=1e-5)
    made = run("predict", "model.onnx", "rows.csv", "--ignore", "y", "-o", "out.npz")
    assert made.exit_code == 0, made.output
    np.testing.assert_allclose(np.load("out.npz")["y"], expected, rtol=1e-5)


def test_a_dry_run_writes_nothing(here):
    before = sorted(p.name for p in here.iterdir())
    made = run("train", "model.onnx", "rows.csv", *TRAIN[3:], "--dry-run", "--json")
    assert made.exit_code == 0, made.output
    measured = json.loads(made.stdout)
    assert measured["trained"] == {"W": [2, 1], "b": [1]}
    assert measured["seconds"] > 0
    assert sorted(p.name for p in here.iterdir()) == before
