"""Groups of processes of which one fails, or that do not begin alike: all end, and say why."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import onnxgrad as og
from tests.support.commands import LINEAR, features, save
from tests.support.paths import ROOT
from tests.support.running import PATIENCE, in_sweep

pytest.importorskip("torch")
from tests.parallel.test_parallel import mpirun, torchrun  # which needs torch

SCRIPT = ROOT / "tests" / "support" / "parallel_failing.py"


def ended(engine: str, case: str, folder: Path) -> tuple[int, str]:
    """Return the exit code of a group of two processes, and what they printed."""
    command = {"torch": torchrun, "mpi": mpirun}[engine](2, SCRIPT, engine, case, folder)
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    return done.returncode, done.stdout + done.stderr


REASONS = {
    "callback": "OSError: the disk of process 1 is gone",
    "end": "OSError: the disk of process 1 is gone",
    "interrupt": "KeyboardInterrupt",
    "exit": "SystemExit: 5",
    "data": "missing.parquet",
}


@pytest.mark.parametrize("engine", ["mpi", "torch"])
@pytest.mark.parametrize("case", [in_sweep(c) if c != "callback" else c for c in REASONS])
def test_all_end_with_the_reason_of_the_first(tmp_path, engine, case):
    code, text = ended(engine, case, tmp_path)
    assert code
    assert "process 1 has failed" in text
    assert REASONS[case] in text
    assert "Traceback" in text
    if case != "data":  # the state of the step before is written
        steps = [og.TrainState.load(path).step for path in tmp_path.glob("step-*")]
        assert max(steps) == (24 if case == "end" else 5)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("model", "cannot read 'missing.onnx'"),
        ("before", REASONS["callback"]),
        in_sweep("never", "process 1 has failed: its program has ended"),
        ("fewer", "process 1 has failed: its program has ended"),
    ],
)
def test_a_process_that_never_enters_a_call_ends_the_job_of_mpi(tmp_path, case, reason):
    code, text = ended("mpi", case, tmp_path)
    assert code == 1
    assert reason in text


def test_after_a_failure_that_is_caught_the_group_trains_no_more(tmp_path):
    code, text = ended("mpi", "again", tmp_path)
    assert code == 0
    assert "1 CAUGHT OSError: the disk" in text
    assert "0 CAUGHT ProcessLostError: process 0 of 2: process 1 has failed" in text
    assert text.count("a call before left exchanges unfinished") == 2


def test_the_command_line_ends_the_job_of_mpi(tmp_path):
    save(tmp_path / "model.onnx", LINEAR, W=[[1.0], [1.0]], b=[0.5])
    np.savez(tmp_path / "data.npz", x=features(), y=features()[:, :1])
    start = mpirun(1, "-m", "onnxgrad", "train", tmp_path / "model.onnx")
    options = ["--target", "y", "--loss", "l2", "--no-curves", "--output", tmp_path / "new.onnx"]
    first, second = ([tmp_path / name, *options] for name in ("data.npz", "missing.npz"))
    command = [*start, *first, ":", *start[3:], *second]
    done = subprocess.run(map(str, command), capture_output=True, text=True, timeout=PATIENCE)
    # 2 of the process without data, or 1 of the other, if mpirun sees it end before
    assert done.returncode in (1, 2), done.stderr
    assert "missing.npz" in done.stderr
    assert "unexpected" not in done.stderr
    assert not (tmp_path / "new.onnx").exists()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("length", "the iterable of process 1 ended after 4 batches"),
        ("batch", "batch 1 is not the same in all processes"),
    ],
)
def test_iterables_that_differ_later_are_told(tmp_path, case, reason):
    code, text = ended("torch", case, tmp_path)
    assert code
    assert text.count(reason) >= 1


def test_all_that_must_be_equal_is_compared(tmp_path):
    code, text = ended("torch", "compared", tmp_path)
    assert code == 0, text[-3000:]
    count = int(re.findall(r"0 COMPARED (\d+)", text)[0])
    assert count > 10
    found = re.findall(r"^(\d) ([\w. ]+): (.*)$", text, re.MULTILINE)
    refused = [(name, line) for _, name, line in found if "do not begin alike" in line]
    assert len(refused) == 2 * count, text
    for name, line in refused:
        assert name in line, (name, line)
    assert text.count("TRAINED 24") == 2  # what only the first process has may differ
