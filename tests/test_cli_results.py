"""What `onnxgrad train` says of a training: of which epoch the weights are, and why it ended."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

import onnxgrad as og
from commands import as_json, write_all

LINE = ("train", "linear.onnx", "rows.csv", "--target", "y", "--loss", "squared_error")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_all(tmp_path)
    return tmp_path


# -- curves -----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0, 0.2])
def test_the_picture_is_that_of_plot_history(here, share):
    as_json(*LINE, "--epochs", 3, "--validation", share, "--history", "history.json")
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = og.plot_history(json.loads((here / "history.json").read_text()), figure.add_subplot())
    assert len(axes.get_lines()) == (2 if share else 1)
    figure.savefig("own.png", dpi=120)
    np.testing.assert_array_equal(imread("trained.png"), imread("own.png"))
