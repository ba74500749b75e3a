"""What all tests share: which of them run, and one thread where models are small."""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import compress
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

# Bytecode is kept, also where the environment says otherwise: workers, and the processes that tests
# start, would compile the package each time, for longer than most of them run.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import onnxgrad.training.trainer  # noqa: E402, F401  # registers what is known of operators
from onnxgrad.operators import OPERATORS  # noqa: E402

# Workers of pytest-xdist share the cores: threads of PyTorch and numpy would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Under nohup, or in the background of a script, signals are ignored, by children too. What has a
# handler is the default again in a child, and so tests can interrupt theirs; Ctrl-C in this process
# is the KeyboardInterrupt that it is for users.
for number in {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:
    if signal.getsignal(number) is signal.SIG_IGN:
        handler = signal.default_int_handler if number == signal.SIGINT else lambda *_: None
        signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        type=int,
        default=1,
        metavar="N",
        help="run one of N tests; which ones depends on the commit",
    )


def leaves_out_the_sweep(config: pytest.Config) -> bool:
    """Return whether `-m` asks for no test of the sweep, as it does by default."""
    expression = config.option.markexpr
    return "not sweep" in expression and " or " not in expression


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file all of whose tests are of the sweep, where that does not run.

    On Windows, import no file that needs a terminal, a pipe or a fork as Unix has them.
    """
    if collection_path.suffix != ".py":
        return None
    text = collection_path.read_text("utf-8")
    if os.name == "nt" and any(name in text for name in ("import pty\n", "os.fork", "os.mkfifo")):
        return True
    in_sweep = "\npytestmark = pytest.mark.sweep\n" in text
    return True if in_sweep and leaves_out_the_sweep(config) else None


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list | None:
    """Make no items of the sweep, where it does not run: they are twice as many as the others."""
    marks = getattr(obj, "pytestmark", None)
    if not isinstance(marks, list) or not leaves_out_the_sweep(collector.config):
        return None
    for i, mark in enumerate(marks):
        if mark.name == "sweep":
            return []
        if mark.name == "parametrize":
            marks[i] = without_sweep(mark)
            if not marks[i].args[1]:
                return []
    return None


def without_sweep(mark: pytest.Mark) -> pytest.Mark:
    """Return a mark `parametrize` without its values of the sweep."""
    names, values, *rest = mark.args
    values = list(values)
    kept = [not any(m.name == "sweep" for m in getattr(value, "marks", ())) for value in values]
    options = dict(mark.kwargs)
    if isinstance(options.get("ids"), Sequence):
        options["ids"] = list(compress(options["ids"], kept))
    return pytest.mark.parametrize(names, list(compress(values, kept)), *rest, **options).mark


_STATES: dict[int, dict] = {}  # of the generators of modules, by `id`, as their import left them


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let each test draw the same numbers in a folder that exists, whatever tests ran before."""
    try:
        os.getcwd()
    except FileNotFoundError:  # code of a page has changed into a folder that is gone with it
        os.chdir(item.config.invocation_params.dir)
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


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Turn Python's garbage collector off, after it has freed all garbage."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
