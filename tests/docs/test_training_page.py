"""The guides to training: they run, on their own and without optional packages."""

from __future__ import annotations

import csv
import subprocess
import sys

import onnx
import pytest

from tests.support.pages import TUTORIALS
from tests.support.paths import ROOT

SCRIPT, ENSEMBLES = TUTORIALS / "training.py", TUTORIALS / "ensembles.py"
DIGITS = ROOT / "data" / "digits.parquet"


@pytest.mark.sweep
def test_the_page_of_training_runs_without_optional_packages(tmp_path):
    run_alone(SCRIPT, tmp_path)
    onnx.checker.check_model(tmp_path / "digits.onnx", full_check=True)
    with (tmp_path / "history.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    assert float(last["validation_accuracy"]) > 0.7
    assert {"gradient_norm", "seconds_waiting"} <= last.keys()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["a", "b"]


@pytest.mark.sweep
def test_the_page_of_ensembles_runs_without_optional_packages(tmp_path):
    printed = run_alone(ENSEMBLES, tmp_path).splitlines()
    onnx.checker.check_model(tmp_path / "best.onnx", full_check=True)
    assert float(printed[8]) > 0.8
    assert printed[-1] == "{1: 1}"


def run_alone(script, folder):
    """Run a script in a folder, without PyTorch and scikit-learn; return what it prints.

    Of scikit-learn, there are the digits only.
    """
    code = f"""
import runpy, sys, types
import matplotlib, numpy
from pyarrow import parquet

matplotlib.use("Agg")
table = parquet.read_table({str(DIGITS)!r})
X = numpy.stack([table[f"pixel_{{i}}"] for i in range(64)], axis=1) * 16.0
datasets = types.ModuleType("sklearn.datasets")
datasets.load_digits = lambda return_X_y: (X, table["label"].to_numpy())
sys.modules |= {{"torch": None, "sklearn": None, "sklearn.datasets": datasets}}
runpy.run_path({str(script)!r})
"""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:onnxgrad", "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
