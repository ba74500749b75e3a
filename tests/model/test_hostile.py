"""Files that are made to take all time or memory: a result or an error, within a few GB."""

from __future__ import annotations

import hostile
import numpy as np
import pytest

import onnxgrad
from onnxgrad import ModelError, onnx_derivative, set_limits
from onnxgrad.limits import LIMITS, limit, variable_of
from tests.support.running import in_sweep

LONG = {"Sum of 20,000", "Concat of 20,000", "chain of 20,000"}  # "Max of 2,000" is as they are


@pytest.mark.parametrize("name", [in_sweep(n) if n in LONG else n for n in hostile.CASES])
def test_a_hostile_file_ends(name):
    done = hostile.child(name)
    assert done.returncode == 0, done.stderr
    said = done.stdout.split(" | ", 2)[2].strip()
    assert "\n" not in said
    assert "nodes" in said or "Error: " in said or "NoGradientRule: " in said


def test_limits_can_be_set(monkeypatch):
    monkeypatch.setenv(variable_of("nodes"), "3")
    with pytest.raises(ModelError, match=r"4, where the limit is 3.*ONNXGRAD_MAX_NODES"):
        onnx_derivative(hostile.model(hostile.chain(4)))
    set_limits(nodes=4)
    try:
        onnx_derivative(hostile.model(hostile.chain(4)))
    finally:
        set_limits(nodes=None)
    assert limit("nodes") == 3
    monkeypatch.setenv(variable_of("nodes"), "many")
    with pytest.raises(ValueError, match="ONNXGRAD_MAX_NODES must be a positive integer"):
        limit("nodes")
    with pytest.raises(ValueError, match="Unknown limit 'node'"):
        set_limits(node=3)
    with pytest.raises(ValueError, match="positive integer, not 0"):
        set_limits(nodes=0)


def test_a_table_that_expands(tmp_path, monkeypatch):
    from onnxgrad.data.tables import DataError, read_table

    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=np.zeros((1000, 100), np.float32))
    assert read_table(path)["x"].shape == (1000, 100)
    monkeypatch.setenv(variable_of("table_bytes"), "100000")
    with pytest.raises(DataError, match="expands to too many bytes: 400128"):
        read_table(path)
    np.savez(path, x=np.zeros((1000, 100), np.float32))  # as large as it looks
    assert read_table(path)["x"].shape == (1000, 100)


def test_limits_are_documented():
    from pathlib import Path

    text = (Path(onnxgrad.__file__).parents[2] / "docs" / "limits.md").read_text()
    for name, default in LIMITS.items():
        assert f"`{name}`" in text
        assert f"{default:,}" in text
