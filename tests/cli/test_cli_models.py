"""`onnxgrad grad`, `check`, `trainable` and `show`: a model as it is."""

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxgrad.operators import OPERATORS, Operator
from onnxgrad.report import environment
from tests.support.commands import (
    as_json,
    assert_names,
    features,
    refusal,
    run_command,
    save_model,
    succeed,
)
from tests.support.moon import moon as moon
from tests.support.running import run_named

# -- trainable ----------------------------------------------------------------------------------

SCALED = (
    "g (float[N,2] x) => (float[N,3] z) { c = Sub(x, mean) h = MatMul(c, V) r = Relu(h) "
    "z = MatMul(r, W) }"
)


def test_trainable_lists_what_trains_and_why(here):
    save_model("scaled.onnx", SCALED, mean=[1.0, 2.0], V=np.eye(2, 4), W=np.eye(4, 3))
    result = as_json("trainable", "scaled.onnx")
    rows = {row["name"]: row for row in result["tensors"]}
    assert {n: r["trains"] for n, r in rows.items()} == {"mean": False, "V": True, "W": True}
    assert (result["trained"], result["parameters"]) == (2, 20)
    assert rows["V"]["shape"] == [2, 4]
    assert rows["mean"]["why"]
    text = succeed("trainable", "scaled.onnx").stdout
    assert all(name in text for name in rows)
    assert rows["mean"]["why"] in " ".join(text.split())


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        (("--train", "W"), {"W"}),
        (("--train", "last"), {"W"}),
        (("--train", "mean", "--train", "V"), {"mean", "V"}),
        (("--freeze", "V"), {"W"}),
        (("--train", "?", "--freeze", "W"), {"V"}),
        (("--freeze", "*"), set()),
    ],
)
def test_trainable_takes_the_options_of_train(here, options, trained):
    save_model("scaled.onnx", SCALED, mean=[1.0, 2.0], V=np.eye(2, 4), W=np.eye(4, 3))
    result = as_json("trainable", "scaled.onnx", *options)
    assert {r["name"] for r in result["tensors"] if r["trains"]} == trained
    if options[0] == "--train":  # and --train means the same where training begins
        line = ("train", "scaled.onnx", "kinds.csv", "--target", "kind", "--loss", "cross_entropy")
        assert set(as_json(*line, *options, "--dry-run")["trained"]) == trained


def test_trainable_names_what_does_not_match(here):
    assert "'w'" in refusal("trainable", "linear.onnx", "--train", "w")
    assert "'u*'" in refusal("trainable", "linear.onnx", "--freeze", "u*")


# -- check --------------------------------------------------------------------------------------


def test_check_of_a_right_gradient(here):
    result = as_json("check", "layers.onnx", "--weights", "W", "--inputs", "x", "--order", 2)
    assert result["ok"]
    assert {(r["name"], r["order"]) for r in result["rows"]} >= {("x", 1), ("W", 1), ("W", 2)}
    assert result["max_error"] < 0.02
    assert "W" in succeed("check", "layers.onnx").stdout
    assert result["unchecked"] == []


def test_check_within_a_budget(here):
    line = ("check", "layers.onnx", "--separately", "--budget", 1e-9)
    result = as_json(*line)
    assert result["ok"]
    left_out = {"x", "V", "W", "b"} - {r["name"] for r in result["rows"]}
    assert set(result["unchecked"]) == left_out != set()
    assert "NOT CHECKED" in succeed(*line).stdout
    assert "--budget 0" in refusal("check", "layers.onnx", "--budget", 0)


def test_check_of_a_device(here, moon, monkeypatch):
    line = ("check", "layers.onnx", "--device", "moon")
    moon.mistakes = {"Tanh": "Sin", "Relu": "Sin"}
    result = as_json(*line)
    assert result["ok"]
    (title,) = result["failing"]
    assert title.split()[0] in ("Tanh", "Relu")
    assert title in succeed(*line).stdout.replace("\n", " ")
    monkeypatch.setattr("onnxgrad.runtime.checked.compare_nodes", lambda *_: [])
    assert run_command(*line).exit_code == 1
    assert "--device" in refusal("check", "layers.onnx", "--loss", "l1")
    assert "'sun'" in refusal("check", "layers.onnx", "--device", "sun")


TANH = "g (float[N,2] x) => (float[N,1] y) { t = Tanh(x) y = MatMul(t, W) }"


def test_check_without_a_model_describes_the_machine():
    known = as_json("check")
    machine = known["machine"]
    assert machine["Python"] == platform.python_version()
    for name in ("onnxgrad", "onnxruntime", "onnx", "onnx-ir", "numpy"):
        assert machine[name] == version(name)
    assert int(machine["cores"]) >= 1
    assert known["providers"] == ort.get_available_providers()
    lacks = [] if find_spec("tokenizers") else ["tokenizers"]
    assert known["missing_packages"]["text"] == lacks
    text = succeed("check").stdout
    assert_names(text, version("onnxruntime"), "CPUExecutionProvider", "instruction sets", "extras")
    for option in (("--order", 2), ("--weights", "W"), ("--separately",)):
        assert f"{option[0]} has no effect without MODEL" in refusal("check", *option)


def test_packages_that_an_extra_lacks_are_named(monkeypatch):
    def fail_for_pillow(name):
        if name == "pillow":
            raise PackageNotFoundError
        return version(name)

    monkeypatch.setattr(environment, "version", fail_for_pillow)
    missing = as_json("check")["missing_packages"]
    assert missing["images"] == ["pillow"]
    assert "pillow" in missing["detection"]
    assert "pillow" not in missing["text"]
    shown = succeed("check").stdout.partition("extras not installed")
    assert "images" not in shown[0]
    assert "images" in shown[2]


@pytest.mark.parametrize(
    ("lines", "sets"),
    [
        ("model name\t: A\nflags\t\t: fpu avx2 avx512_vnni fma\n", ["fma", "avx2", "avx512_vnni"]),
        ("processor\t: 0\nFeatures\t: fp asimd asimddp\n", ["asimd", "asimddp"]),
        (None, []),
    ],
)
def test_instruction_sets_are_read_where_the_system_tells_them(monkeypatch, lines, sets):
    def read_text(path):
        if lines is None:
            raise FileNotFoundError
        return lines

    monkeypatch.setattr(Path, "read_text", read_text)
    assert environment.instruction_sets() == sets


def test_check_of_a_wrong_gradient_exits_with_1(here, monkeypatch):
    save_model("tanh.onnx", TANH, W=[[1.0], [2.0]])
    assert run_command("check", "tanh.onnx").exit_code == 0
    monkeypatch.setitem(OPERATORS, ("", "Tanh"), Operator(rule=lambda op, node, dy: dy))
    made = run_command("check", "tanh.onnx", "--json")
    assert made.exit_code == 1
    result = json.loads(made.stdout)
    right = {r["name"]: r["ok"] for r in result["rows"]}
    assert (result["ok"], right["x"], right["W"]) == (False, False, True)
    assert run_command("check", "tanh.onnx").exit_code == 1


def test_check_to_a_relative_error(here):
    found = run_command("check", "layers.onnx", "--rtol", 1e-30, "--json")
    assert found.exit_code == 1
    assert 1e-30 in {row["rtol"] for row in json.loads(found.stdout)["rows"]}


def test_check_of_names_that_are_unknown(here):
    assert "'w'" in refusal("check", "linear.onnx", "--weights", "w")
    assert "'u'" in refusal("check", "linear.onnx", "--inputs", "u")
    assert "--order" in run_command("check", "linear.onnx", "--order", 3).stderr


# -- grad, show ---------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
def test_grad(here, keep):
    options = ("--keep-outputs", "--fill-grad") if keep else ()
    line = ("grad", "linear.onnx", "-o", "g.onnx", "--weights", "W", "--inputs", "x", *options)
    said = succeed(*line).stdout
    names = [o.name for o in onnx.load("g.onnx").graph.output]
    assert names == ["x_grad", "W_grad", "y"][: 2 + keep]
    assert "x_grad, W_grad" in said
    assert "wrote g.onnx" in said
    if keep:
        results = run_named("g.onnx", x=features(), W=np.ones((2, 1), np.float32))
        np.testing.assert_allclose(results["W_grad"], features().sum(0)[:, None], rtol=1e-4)
        np.testing.assert_allclose(results["x_grad"], np.ones((40, 2)))
    assert "g.onnx exists" in refusal(*line)
    assert as_json(*line, "--overwrite")["files"] == ["g.onnx"]


def test_grad_of_chosen_outputs(here):
    body = """g (float[N,2] x) => (float[N,2] y, float[N,2] z) { y = Exp(x)  z = Neg(x) }"""
    save_model("two.onnx", body)
    made = as_json("grad", "two.onnx", "-o", "g.onnx", "--outputs", "z")
    assert made["inputs"] == ["x", "z_grad"]
    family = as_json("grad", "two.onnx", "--family", "f.onnx", "--outputs", "y")["models"]
    assert family["fwd_f.onnx"]["outputs"] == ["y", "fwd_y"]
    assert "'q'" in refusal("grad", "two.onnx", "-o", "h.onnx", "--outputs", "q")


def test_family(here):
    line = ("grad", "linear.onnx", "--family", "f.onnx", "--dtype", "float64", "--weights", "W")
    said = succeed(*line).stdout
    files = ["f.onnx", "fwd_f.onnx", "adj_f.onnx", "fwd_adj_f.onnx"]
    assert all(file in said for file in files)
    x, seeds = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[1.0], [10.0]])
    results = run_named("adj_f.onnx", x=x, W=np.ones((2, 1)), adj_y=seeds)
    np.testing.assert_allclose(results["adj_W"], x.T @ seeds)
    assert "f.onnx exists" in refusal(*line)
    summary = as_json(*line, "--overwrite")
    assert summary["files"] == files
    assert summary["models"]["fwd_f.onnx"]["outputs"] == ["y", "fwd_y"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--family", "f.onnx", "-o", "g.onnx"), "--family ... --output"),
        (("--family", "-"), "--family ... four"),
        (("--family", "f.pb"), "f.pb ... .onnx"),
        (("-o", "g.onnx", "--dtype", "float64"), "--dtype ... --family"),
        (("--family", "linear.onnx"), "linear.onnx ... input"),
    ],
)
def test_family_refuses(here, options, message):
    assert_names(refusal("grad", "linear.onnx", *options), message)
    assert not list(here.glob("*f.onnx"))


def test_an_output_is_needed(here):
    assert "--output" in refusal("grad", "linear.onnx")
    assert "--output" in refusal("merge", "linear.onnx")
    assert not os.path.exists("g.onnx")


def test_show(here):
    text = succeed("show", "linear.onnx").stdout
    assert "MatMul(x, W) -> h\n" in text
    assert "W_grad" not in text
    assert "output: name='W_grad'" in succeed("show", "linear.onnx", "--grad").stdout
    summary = as_json("show", "linear.onnx", "--grad")
    assert summary["operators"] == {"MatMul": 1, "Add": 1}
    assert summary["inputs"] == [{"name": "x", "type": "float", "shape": ["N", 2]}]
    assert [y["name"] for y in summary["gradient"]["outputs"]] == ["x_grad", "W_grad", "b_grad"]


def test_show_layers(here):
    lines = succeed("show", "linear.onnx", "--summary").stdout.splitlines()
    assert lines[2].split() == ["MatMul", "MatMul", "[1,", "1]", "2", "2", "2", "4"]
    assert lines[-1] == "for N=1"
    found = as_json("show", "linear.onnx", "--summary")
    assert [layer["multiply_adds"] for layer in found["layers"]] == [2, 1]
    assert found["lengths"] == {"N": 1}


def test_data_of_a_model_are_no_output(here):
    whole = {"save_as_external_data": True, "location": "apart.data", "size_threshold": 0}
    onnx.save(onnx.load("linear.onnx"), "apart.onnx", **whole)
    before = (here / "apart.data").read_bytes()
    assert "apart.data" in refusal("grad", "apart.onnx", "--output", "apart.data", "--overwrite")
    assert (here / "apart.data").read_bytes() == before
