"""What all tests share: which of them run, and one thread where models are small."""

from __future__ import annotations

import copy
import hashlib
import os
import signal
import subprocess
import threading
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

import onnxgrad.training.trainer  # noqa: F401  # registers what is known of operators
from onnxgrad.graph.operators import OPERATORS

# Workers of pytest-xdist share the cores: threads of PyTorch and numpy would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Under nohup, or in the background of a script, signals are ignored, by children too. What has a
# handler is the default again in a child, and so tests can interrupt theirs; Ctrl-C in this process
# is the KeyboardInterrupt that it is for users.
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    if signal.getsignal(getattr(signal, name)) is signal.SIG_IGN:
        handler = signal.default_int_handler if name == "SIGINT" else lambda *_: None
        signal.signal(getattr(signal, name), handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        type=int,
        default=1,
        metavar="N",
        help="run one of N tests; which ones depends on the commit",
    )


_STATES: dict[int, dict] = {}  # of the generators of modules, by `id`, as their import left them


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let each test draw the same numbers, whatever tests ran before it."""
    for value in vars(getattr(item, "module", item)).values():
        if isinstance(value, np.random.Generator):
            bits = value.bit_generator
            bits.state = _STATES.setdefault(id(value), copy.deepcopy(bits.state))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out all tests but the share of this commit."""
    if addresses := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        # workers of pytest-xdist must collect the same tests
        raise pytest.UsageError(f"names of tests differ between processes: {addresses[:3]}")
    share = config.getoption("--share")
    if share < 2:
        return
    turn = commit_number() % share
    left_out = [item for item in items if part(item, share) != turn]
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]
    config.hook.pytest_deselected(items=left_out)


def part(item: pytest.Item, share: int) -> int:
    """Return which of `share` parts a test belongs to."""
    return int.from_bytes(hashlib.sha256(item.nodeid.encode()).digest()[:8]) % share


def commit_number() -> int:
    """Return the number of commits up to this one: successive ones take successive parts.

    Of a history that is not all there, the number is the hash of the commit.
    """
    try:
        shallow = git("rev-parse", "--is-shallow-repository") == "true"
        return (
            int(git("rev-parse", "HEAD"), 16)
            if shallow
            else int(git("rev-list", "--count", "HEAD"))
        )
    except (OSError, subprocess.CalledProcessError):  # no repository
        return 0


def git(*arguments: str) -> str:
    folder = Path(__file__).parent
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, check=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def rules_as_before():
    """Take back what a test registers: other tests see what the package has."""
    before = dict(OPERATORS)
    yield
    OPERATORS.clear()
    OPERATORS.update(before)


@pytest.fixture
def new_threads():
    """Return a function that returns the living threads that this test has started."""
    before = set(threading.enumerate())  # those that another test left may end meanwhile
    return lambda: set(threading.enumerate()) - before


@pytest.fixture(scope="session")
def genai_llama(tmp_path_factory):
    """The folder of a small Llama of onnxruntime-genai's builder: the first process builds it."""
    for name in ("onnxruntime_genai", "transformers", "filelock"):
        pytest.importorskip(name)
    from filelock import FileLock
    from language_models import build

    base = tmp_path_factory.getbasetemp()
    home = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "small-llama"
    home.mkdir(exist_ok=True)
    with FileLock(home / "lock"):
        if not (home / "built").exists():
            build(home)
            (home / "built").touch()
    return home / "fp32"


_CREATE_SESSION = ort.InferenceSession.__init__


def _create_session_on_one_thread(self, model, sess_options=None, *arguments, **options):
    """Create a session of one thread, where the caller names no number of threads.

    The models of tests are small: to start threads, and to let them wait for work beside the other
    workers, takes longer than to run the nodes.
    """
    sess_options = sess_options or ort.SessionOptions()
    if not sess_options.intra_op_num_threads:
        sess_options.intra_op_num_threads = 1
    _CREATE_SESSION(self, model, sess_options, *arguments, **options)


ort.InferenceSession.__init__ = _create_session_on_one_thread


@pytest.fixture
def default_threads(monkeypatch):
    """Let sessions start as many threads as they do for users."""
    monkeypatch.setattr(ort.InferenceSession, "__init__", _CREATE_SESSION)
