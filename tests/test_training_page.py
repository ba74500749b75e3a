"""`docs/training.py`, the guide to training: it runs, on its own and without optional packages."""

from __future__ import annotations

import csv
import subprocess
import sys

import onnx

from script_page import DOCS, assert_page

SCRIPT = DOCS / "training.py"


def test_it_runs_without_optional_packages(tmp_path):
    code = (
        "import runpy, sys; sys.modules.update(torch=None, sklearn=None)\n"
        "import matplotlib; matplotlib.use('Agg')\n"
        f"runpy.run_path({str(SCRIPT)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:onnxgrad", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    onnx.checker.check_model(tmp_path / "digits.onnx", full_check=True)
    with (tmp_path / "history.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    assert float(last["validation_accuracy"]) > 0.7
    assert {"gradient_norm", "seconds_waiting"} <= last.keys()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["a", "b"]


def test_its_page():
    assert_page(SCRIPT, "from pathlib import Path")
