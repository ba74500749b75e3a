"""Files that are made to take all time or memory: a result or an error, within a few GB."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import hostile
import numpy as np
import pytest

import onnxgrad
from onnxgrad import ModelError, onnx_derivative
from onnxgrad.checks import LIMITS, current_limit, environment_variable
from onnxgrad.graph import set_limits
from tests.support.errors import naming
from tests.support.running import PATIENCE

LONG = {"Sum of 20,000", "Concat of 20,000", "chain of 20,000"}  # "Max of 2,000" is as they are
FORKS = """
import json, os, resource, sys
import hostile
for name in json.loads(sys.argv[1]):
    if not os.fork():
        resource.setrlimit(resource.RLIMIT_AS, (hostile.MEMORY, hostile.MEMORY))
        try:
            print(json.dumps([name, hostile.run(name)]), flush=True)
        finally:
            os._exit(0)
    os.wait()
"""


def assert_hostile_files_end(names: list[str]) -> None:
    """Assert that each has a result or an error, in a process of little memory for each.

    One process imports what all need, and forks the others.
    """
    folders = os.pathsep.join([str(Path(hostile.__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", FORKS, json.dumps(names)],
        env=os.environ | {"PYTHONPATH": folders},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, _ in results] == names, done.stderr
    for name, line in results:
        said = line.split(" | ", 2)[2].strip()
        assert "\n" not in said, name
        assert re.search("nodes|Error: |NoGradientRule: ", said), (name, said)


def test_hostile_files_end():
    assert_hostile_files_end([name for name in hostile.CASES if name not in LONG])


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(LONG))
def test_a_long_hostile_file_ends(name):
    assert_hostile_files_end([name])


def test_limits_can_be_set(monkeypatch):
    monkeypatch.setenv(environment_variable("nodes"), "3")
    with pytest.raises(ModelError, match=naming("4", "3", environment_variable("nodes"))):
        onnx_derivative(hostile.model(hostile.chain(4)))
    set_limits(nodes=4)
    try:
        onnx_derivative(hostile.model(hostile.chain(4)))
    finally:
        set_limits(nodes=None)
    assert current_limit("nodes") == 3
    monkeypatch.setenv(environment_variable("nodes"), "many")
    with pytest.raises(
        ValueError, match=naming(environment_variable("nodes"), "1 or more", "many")
    ):
        current_limit("nodes")
    with pytest.raises(ValueError, match="Unknown limit 'node'"):
        set_limits(node=3)
    with pytest.raises(ValueError, match=naming("nodes", "1 or more", "0")):
        set_limits(nodes=0)


def test_a_table_that_expands(tmp_path, monkeypatch):
    from onnxgrad.data.tables import DataError, read_table

    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=np.zeros((1000, 100), np.float32))
    assert read_table(path)["x"].shape == (1000, 100)
    monkeypatch.setenv(environment_variable("table_bytes"), "100000")
    with pytest.raises(DataError, match="400128"):
        read_table(path)
    np.savez(path, x=np.zeros((1000, 100), np.float32))  # as large as it looks
    assert read_table(path)["x"].shape == (1000, 100)


def test_limits_are_documented():
    text = (Path(onnxgrad.__file__).parents[2] / "docs" / "limits.md").read_text()
    for name, default in LIMITS.items():
        assert f"`{name}`" in text
        assert f"{default:,}" in text
