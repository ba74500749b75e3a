"""Progress that nobody asked for: in a terminal and in a notebook, and nowhere else."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad.training.callbacks import progress
from tests.support.paths import ROOT
from tests.support.trainings import linear_model

SCRIPT = """
import numpy as np, onnxgrad as og
from tests.support.trainings import linear_model
X = np.ones((64, 2), np.float32)
trainer = og.Trainer(linear_model([[1], [1]]), "squared_error", callbacks=[{callbacks}])
trainer.fit(X, X[:, :1], epochs=3)
"""


def output_in_terminal(callbacks):
    """Return what a training writes to stderr, which is a pseudo-terminal."""
    pty = pytest.importorskip("pty", reason="Windows has no pseudo-terminals")
    ours, theirs = pty.openpty()
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TERM": "xterm"}
    command = [sys.executable, "-c", SCRIPT.format(callbacks=callbacks)]
    with os.fdopen(theirs, "wb") as stderr:
        done = subprocess.run(command, stderr=stderr, env=environment, timeout=120, check=False)
    written = b""
    try:
        while part := os.read(ours, 4096):
            written += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert done.returncode == 0, written
    return written.decode()


def test_a_terminal_shows_a_bar():
    assert "epoch 3/3" in output_in_terminal("")
    quiet = "og.Progress(console=__import__('rich.console').console.Console(quiet=True))"
    assert "epoch" not in output_in_terminal(quiet)


@pytest.fixture
def in_notebook(monkeypatch):
    """The module IPython, whose shell is a notebook."""
    shell = type("ZMQInteractiveShell", (), {})()
    module = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", module)


X = np.ones((64, 2), np.float32)


def trained_on_rows(callbacks=(), epochs=300):
    trainer = og.Trainer(linear_model([[1], [1]]), "squared_error", callbacks=callbacks)
    return trainer.fit(X, X[:, :1], epochs=epochs)


def test_a_notebook_shows_few_lines(in_notebook, capsys):
    trainer = trained_on_rows()
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("epoch 300/300: loss ")
    assert len(lines) < 300
    assert len(trainer.history) == 300


def test_it_shows_and_changes_nothing(in_notebook, capsys):
    watched = trained_on_rows()
    quiet = og.Trainer(linear_model([[1], [1]]), "squared_error")
    quiet._change_job(shows_progress=False)
    quiet.fit(X, X[:, :1], epochs=300)
    for name, array in quiet.state.weights.items():
        np.testing.assert_array_equal(watched.state.weights[name], array)
    assert watched.history == quiet.history
    assert watched.progress.epoch == quiet.progress.epoch == 299
    assert "Progress" not in watched.state.callbacks


def test_others_are_silent(in_notebook, capsys):
    trained_on_rows([og.Progress(seconds=60)], epochs=2)
    assert len(capsys.readouterr().err.splitlines()) == 2  # its own lines, once
    og.Trainer(linear_model([[1], [1]]), "squared_error").partial_fit(X, X[:, :1])
    og.schedules.lr_range_test(og.Trainer(linear_model([[1], [1]]), "squared_error"), X, X[:, :1])
    assert "epoch" not in capsys.readouterr().err


def test_a_pipe_shows_nothing(capsys):
    trained_on_rows(epochs=2)
    assert not capsys.readouterr().err
    assert not progress.is_watched()


def test_estimators_are_silent(in_notebook, capsys):
    pytest.importorskip("sklearn")
    og.OnnxRegressor(linear_model([[1], [1]]), max_iter=2, tol=None).fit(X, X[:, 0])
    assert "epoch" not in capsys.readouterr().err
