"""What tests of the command line share: commands in this process, models and data."""

import csv
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from onnxgrad.cli import app
from tests.support.models import initializer_arrays, parse_model

LAYERS = (
    "g (float[N,2] x) => (float[N,3] z) { h = MatMul(x, V) r = Relu(h) s = MatMul(r, W) "
    "z = Add(s, b) }"
)
LINEAR = "g (float[N,2] x) => (float[N,1] y) { h = MatMul(x, W) y = Add(h, b) }"
ROWS = 40


def run_command(*arguments, **more):
    """Return the result of a command in this process: its exit code, stdout and stderr."""
    return CliRunner().invoke(app, [str(a) for a in arguments], **more)


def succeed(*arguments, **more):
    """Return the result of a command that must succeed."""
    result = run_command(*arguments, **more)
    assert result.exit_code == 0, result.output
    return result


def as_json(*arguments, **more):
    """Return what a command prints with `--json`."""
    return json.loads(succeed(*arguments, "--json", **more).stdout)


def refusal(*arguments, **more):
    """Return the only line of a command that must refuse, without `Error: `."""
    result = run_command(*arguments, **more)
    assert result.exit_code == 2, result.output
    assert not result.stdout
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: ")
    return line.removeprefix("Error: ")


def assert_names(text, *parts):
    """Assert that a text contains every part; " ... " separates parts, too."""
    pieces = [piece for part in parts for piece in part.split(" ... ")]
    assert [piece for piece in pieces if piece not in text] == [], text


def save_model(path, text, **weights):
    """Write a model with float32 weights; whole numbers keep their type."""
    arrays = {name: np.asarray(values) for name, values in weights.items()}
    arrays = {n: a if a.dtype.kind == "i" else a.astype(np.float32) for n, a in arrays.items()}
    model = parse_model(text, **arrays)
    onnx.save(model, path)
    return model


def weights_of_file(path):
    """Return the initializers of a model by name."""
    return initializer_arrays(onnx.load(path))


def metadata_of_file(path):
    """Return the metadata of a model by key."""
    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


def features(rows=ROWS):
    """Return (rows, 2) numbers that a CSV file holds exactly enough."""
    return np.random.default_rng(0).normal(size=(rows, 2)).round(3).astype(np.float32)


def write_csv_columns(path, **columns):
    """Write columns as CSV."""
    lines = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    Path(path).write_text("\n".join([",".join(columns), *lines, ""]))


def csv_rows(text):
    """Return the rows of a text in CSV by the names of their columns."""
    return list(csv.DictReader(text.splitlines()))


def write_all(folder):
    """Write models and data: `layers.onnx` of three classes, `linear.onnx`, and CSV files."""
    rng = np.random.default_rng(1)
    V, W = rng.normal(size=(2, 4)), rng.normal(size=(4, 3))
    save_model(folder / "layers.onnx", LAYERS, V=V, W=W, b=np.zeros(3))
    save_model(folder / "linear.onnx", LINEAR, W=[[1.0], [1.0]], b=[0.5])
    a, b = features().T
    kind = np.where(a > b, 1, 0) + (a + b > 1)
    write_csv_columns(folder / "kinds.csv", a=a, b=b, kind=kind)
    names = np.array(["cat", "dog", "eel"])[kind]
    write_csv_columns(folder / "names.csv", a=a, b=b, kind=names)
    write_csv_columns(folder / "rows.csv", a=a, b=b, y=(2 * a - b + 3).round(3))


@pytest.fixture
def working_folder(tmp_path, monkeypatch):
    """The current folder: an empty one, but for the models and data of `write_all`."""
    monkeypatch.chdir(tmp_path)
    write_all(tmp_path)
    return tmp_path
