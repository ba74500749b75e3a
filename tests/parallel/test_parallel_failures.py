"""Groups of processes of which one fails, or that do not begin alike: all end, and say why."""

from __future__ import annotations

import numpy as np
import pytest

import onnxgrad as og
from tests.support import parallel_failing as failing
from tests.support.commands import LINEAR, features, save_model
from tests.support.process_pool import mpirun, results_of_group, run_group, run_program
from tests.support.running import in_sweep

pytest.importorskip("torch")

REASONS = {
    "callback": "OSError: the disk of process 1 is gone",
    "end": "OSError: the disk of process 1 is gone",
    "interrupt": "KeyboardInterrupt",
    "exit": "SystemExit: 5",
    "data": "missing.parquet",
}


@pytest.mark.parametrize(
    ("start", "case"),
    [
        *(in_sweep(start, "callback") for start in ("mpirun", "torchrun")),
        *(("fork", case) for case in REASONS),
        *(in_sweep(start, c) for c in list(REASONS)[1:] for start in ("mpirun", "torchrun")),
    ],
)
def test_all_end_with_the_reason_of_the_first(tmp_path, start, case):
    outcome = run_group(failing.fail_in_one_process, case, tmp_path, start=start)
    assert all(outcome.codes)
    assert "process 1 has failed" in outcome.output
    assert REASONS[case] in outcome.output
    assert "Traceback" in outcome.output
    if case != "data":  # the state of the step before is written
        steps = [og.callbacks.TrainState.load(path).step for path in tmp_path.glob("step-*")]
        assert max(steps) == (24 if case == "end" else 5)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("model", "'missing.onnx'"),
        ("before", REASONS["callback"]),
        in_sweep("never", "process 1 has failed"),
        in_sweep("fewer", "process 1 has failed"),
    ],
)
def test_a_process_that_never_enters_a_call_ends_the_job_of_mpi(tmp_path, case, reason):
    outcome = run_group(failing.fail_in_one_process, case, tmp_path, start="mpirun")
    assert outcome.codes == [1]
    assert reason in outcome.output


@pytest.mark.parametrize("start", ["fork", in_sweep("mpirun")])
def test_after_a_failure_that_is_caught_the_group_trains_no_more(tmp_path, start):
    (lost, _), (own, _) = results = results_of_group(
        failing.train_after_failure, tmp_path, start=start
    )
    assert lost.startswith("ProcessLostError: process 0 of 2: process 1 has failed")
    assert own == REASONS["callback"]
    for _, second in results:
        assert second.startswith("ProcessLostError")
        assert "unfinished" in second


def test_the_command_line_ends_the_job_of_mpi(tmp_path):
    save_model(tmp_path / "model.onnx", LINEAR, W=[[1.0], [1.0]], b=[0.5])
    np.savez(tmp_path / "data.npz", x=features(), y=features()[:, :1])
    start = mpirun(1, "-m", "onnxgrad", "train", tmp_path / "model.onnx")
    options = ["--target", "y", "--loss", "l2", "--no-curves", "--output", tmp_path / "new.onnx"]
    first, second = ([tmp_path / name, *options] for name in ("data.npz", "missing.npz"))
    done = run_program([*start, *first, ":", *start[2:], *second])
    # 2 of the process without data, or 1 of the other, if mpirun sees it end before
    assert done.returncode in (1, 2), done.stderr
    assert "missing.npz" in done.stderr
    assert "unexpected" not in done.stderr
    assert not (tmp_path / "new.onnx").exists()


@pytest.mark.parametrize(
    ("case", "reason"),
    [("length", "process 1 ended after 4 batches"), ("batch", "batch 1")],
)
def test_iterables_that_differ_later_are_told(tmp_path, case, reason):
    outcome = run_group(failing.fail_in_one_process, case, tmp_path)
    assert all(outcome.codes)
    assert any(reason in error for error in outcome.errors)


def test_all_that_must_be_equal_is_compared(tmp_path):
    results = results_of_group(failing.compare_beginnings, tmp_path)
    expected = [*failing.differences(tmp_path), "slot w.m"]
    for errors, step in results:
        assert list(errors) == expected
        assert step == 24  # what only the first process has may differ
        for name, error in errors.items():
            assert name in error, (name, error)
            assert "alike" in error, (name, error)
