"""What tests of the command line share: commands, models and data."""

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from typer.testing import CliRunner

from onnxgrad.cli import app

HEADER = '<ir_version: 8, opset_import: ["": 18]>\n'
LAYERS = HEADER + (
    "g (float[N,2] x) => (float[N,3] z) { h = MatMul(x, V) r = Relu(h) s = MatMul(r, W) "
    "z = Add(s, b) }"
)
LINEAR = HEADER + "g (float[N,2] x) => (float[N,1] y) { h = MatMul(x, W) y = Add(h, b) }"
ROWS = 40


def run_command(*arguments, **more):
    """Return the result of a command in this process: its exit code, stdout and stderr."""
    return CliRunner().invoke(app, [str(a) for a in arguments], **more)


invoke = run_command


def succeed(*arguments, **more):
    """Return the result of a command that must succeed."""
    result = run_command(*arguments, **more)
    assert result.exit_code == 0, result.output
    return result


def as_json(*arguments, **more):
    """Return what a command prints with `--json`."""
    return json.loads(succeed(*arguments, "--json", **more).stdout)


def refused(*arguments, **more):
    """Return the only line of a command that must refuse, without `Error: `."""
    result = run_command(*arguments, **more)
    assert result.exit_code == 2, result.output
    assert not result.stdout
    [line] = result.stderr.splitlines()
    return line.removeprefix("Error: ")


def save(path, text, **weights):
    """Write a model with float weights."""
    model = onnx.parser.parse_model(text)
    for name, values in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(np.float32(values), name))
    onnx.save(model, path)
    return model


def weights(path):
    """Return the initializers of a model by name."""
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def features(rows=ROWS):
    """Return (rows, 2) numbers that a CSV file holds exactly enough."""
    return np.random.default_rng(0).normal(size=(rows, 2)).round(3).astype(np.float32)


def write_csv(path, **columns):
    """Write columns as CSV."""
    lines = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    Path(path).write_text("\n".join([",".join(columns), *lines, ""]))


def write_all(folder):
    """Write models and data: `layers.onnx` of three classes, `linear.onnx`, and CSV files."""
    rng = np.random.default_rng(1)
    V, W = rng.normal(size=(2, 4)), rng.normal(size=(4, 3))
    save(folder / "layers.onnx", LAYERS, V=V, W=W, b=np.zeros(3))
    save(folder / "linear.onnx", LINEAR, W=[[1.0], [1.0]], b=[0.5])
    a, b = features().T
    kind = np.where(a > b, 1, 0) + (a + b > 1)
    write_csv(folder / "kinds.csv", a=a, b=b, kind=kind)
    write_csv(folder / "names.csv", a=a, b=b, kind=np.array(["cat", "dog", "eel"])[kind])
    write_csv(folder / "rows.csv", a=a, b=b, y=(2 * a - b + 3).round(3))
