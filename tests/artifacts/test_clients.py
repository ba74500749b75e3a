"""The clients that train on devices: their own tests, and what they give back to Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from safetensors import safe_open

import onnxgrad as og
from tests.support.paths import ROOT
from tests.support.running import PATIENCE

CLIENT = ROOT / "clients" / "javascript"
OFFLINE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH")


def printed_by(*command: str, **variables: str) -> str:
    """Run a command in the folder of the client; return what it prints."""
    done = subprocess.run(
        command,
        cwd=CLIENT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    printed = done.stdout + done.stderr
    if done.returncode and command[:2] == ("npm", "ci") and any(e in printed for e in OFFLINE):
        pytest.skip("npm cannot reach its registry")
    assert done.returncode == 0, printed[-6000:]
    return printed


def install_packages() -> None:
    """Install what package-lock.json names, if it is not there."""
    wanted, installed = CLIENT / "package-lock.json", CLIENT / "node_modules" / "installed.json"
    if not installed.exists() or installed.read_text() != wanted.read_text():
        printed_by("npm", "ci", "--no-audit", "--no-fund")
        shutil.copy(wanted, installed)


@pytest.mark.skipif(not (shutil.which("node") and shutil.which("npm")), reason="needs Node and npm")
@pytest.mark.timeout(600)
@pytest.mark.sweep
@pytest.mark.parametrize("browser", [False, True])
def test_javascript(browser: bool, tmp_path: Path) -> None:
    """The client's own tests pass, and Python reads the states and models that the client wrote.

    Only one process at a time can install packages into the folder. Without Chromium, the tests of
    the browser skip themselves.
    """
    pytest.importorskip("pyarrow")
    filelock = pytest.importorskip("filelock")
    if int(printed_by("node", "--version").lstrip("v").split(".")[0]) < 20:
        pytest.skip("needs Node 20")
    data, out, page = (str(tmp_path / name) for name in ("data", "out", "page"))
    variables = {"ONNXGRAD_TEST_DATA": data, "ONNXGRAD_TEST_OUT": out, "ONNXGRAD_ARTIFACTS": page}
    printed_by(sys.executable, "test/make_data.py", data)
    printed_by(sys.executable, "example/make_artifacts.py", page)
    (ROOT / ".pytest_cache").mkdir(exist_ok=True)
    with filelock.FileLock(ROOT / ".pytest_cache" / "javascript.lock", timeout=PATIENCE):
        install_packages()
        if browser:
            printed_by("npm", "test", **variables)
        else:
            printed_by("npm", "run", "page", **variables)
            tests = ("test/node.test.mjs", "test/files.test.mjs")
            printed_by("node", "--test", "--test-concurrency=1", *tests, **variables)
    for name in ("mlp", "cnn", "normalized"):
        assert_same_state(Path(data, name), Path(out), name)


def assert_same_state(folder: Path, out: Path, name: str) -> None:
    """Compare what the client wrote with what Python makes of its state."""
    with safe_open(out / f"{name}.safetensors", "numpy") as state:
        assert state.metadata()["step"] == "200"
        weight = next(iter(state.keys()))
        moved = state.get_tensor(weight)
    with safe_open(folder / "checkpoint.safetensors", "numpy") as first:
        assert not np.array_equal(first.get_tensor(weight), moved)
    exported = onnx.load(out / f"{name}.onnx")
    onnx.checker.check_model(exported, full_check=True)
    with safe_open(folder / "expected.safetensors", "numpy") as expected:
        images = expected.get_tensor("images")[0]
    predicted = json.loads((out / f"{name}.json").read_text())
    for model in (exported, og.artifacts.merge_artifacts(folder, out / f"{name}.safetensors")):
        session = ort.InferenceSession(model.SerializeToString())
        (logits,) = session.run(None, {"image": images})
        np.testing.assert_allclose(logits.ravel(), predicted, rtol=1e-5, atol=1e-5)
