"""What `verbose` and `enable_logging` print, in processes with and without a set-up of logging."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad import add_loss_output, onnx_derivative
from onnxgrad.compat import (
    OrtGradientForwardBackward,
    OrtGradientForwardBackwardOptimizer,
    OrtGradientOptimizer,
)
from onnxgrad.reporting import reporting
from tests.support.models import parse_model
from tests.support.paths import ROOT
from tests.support.running import PATIENCE, in_sweep
from tests.support.trainings import linear_model

logger = logging.getLogger("onnxgrad")
FILTERS = list(logger.filters)
X = np.random.default_rng(0).standard_normal((12, 2)).astype(np.float32)
Y = (X[:, :1] - X[:, 1:]).astype(np.float32)


def small_linear_model():
    return linear_model([[0.1], [0.2]], [0.3])


def loss_outside(**options) -> OrtGradientForwardBackwardOptimizer:
    return OrtGradientForwardBackwardOptimizer(
        small_linear_model(), max_iter=3, random_state=0, **options
    )


def loss_inside(**options) -> OrtGradientOptimizer:
    made = add_loss_output(small_linear_model())
    return OrtGradientOptimizer(made, max_iter=3, random_state=0, **options)


def printed_epochs(text: str) -> list[str]:
    return re.findall(r"epoch \d+/\d+ loss", text)


# -- in processes of their own: pytest's capturing is a set-up of logging --------------------------

HEAD = """
import logging, multiprocessing, os, sys, traceback
import numpy as np
from onnxgrad import *
from onnxgrad.compat import *
from tests.support.trainings import linear_model
X = np.random.default_rng(0).standard_normal((12, 2)).astype(np.float32)
Y = X[:, :1] - X[:, 1:]
model = linear_model([[0.1], [0.2]], [0.3])
def outside(**options):
    return OrtGradientForwardBackwardOptimizer(model, max_iter=3, random_state=0, **options)
def inside(**options):
    return OrtGradientOptimizer(add_loss_output(model), max_iter=3, random_state=0, **options)
def work():
    outside(verbose=1).fit(X, Y)
"""
RUN = """
for name, text in PARTS.items():
    child = os.fork()
    if not child:
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), 2)
        try:
            exec(text)
        except BaseException:
            traceback.print_exc()
            print("failed", name)
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""
SETUPS = {
    "none": "",
    "configured": "logging.basicConfig()",
    "verbose": "logging.basicConfig(level=logging.INFO)",
    "quiet": "logging.basicConfig(level=logging.ERROR)",
    "handler": "logging.getLogger('onnxgrad').addHandler(logging.StreamHandler())",
    "disabled": "logging.getLogger('onnxgrad').disabled = True",
    "level": "logging.getLogger('onnxgrad').setLevel(logging.ERROR)",
}
TRAINED = """
logger = logging.getLogger('onnxgrad')
before = logger.level, logger.disabled, list(logger.handlers), list(logger.filters)
outside(verbose=1).fit(X, Y)
inside(verbose=1).fit(X, Y)
inside(verbose=0).fit(X, Y)
after = logger.level, logger.disabled, list(logger.handlers), list(logger.filters)
assert before == after, (before, after)
"""
OTHERS = {
    "callback": """
class Note:
    def __call__(self, progress): print('callback', progress.epoch, file=sys.stderr)
inside(verbose=1).fit(X, Y, callback=Note())
""",
    "forked": """
process = multiprocessing.get_context("fork").Process(target=work)
process.start(); process.join(); assert process.exitcode == 0
""",
    "functions": """
onnx_derivative(model, verbose=1)
onnx_rename_names(model, verbose=2)
f = OrtGradientForwardBackward(model, enable_logging=True).new_instance()
f.forward([X, np.float32([[1], [2]]), np.float32([3])])
outside(enable_logging=True).fit(X, Y)
onnx_derivative(model)
onnx_rename_names(model)
""",
}
SPAWNED = """
if __name__ == '__main__':
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start(); process.join(); assert process.exitcode == 0
"""


def run_script(folder, text: str) -> str:
    """Return what a script prints to stderr; it must succeed, and print nothing to stdout."""
    (folder / "script.py").write_text(text)
    ignored = "ignore:This process:DeprecationWarning"  # since Python 3.12, of forks beside threads
    done = subprocess.run(
        [sys.executable, "-W", ignored, "script.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each part prints, in a process of its own, which is forked before any training."""
    if not hasattr(os, "fork"):
        pytest.skip("processes are not forked")
    folder = tmp_path_factory.mktemp("parts")
    parts = {name: f"{setup}\n{TRAINED}" for name, setup in SETUPS.items()} | OTHERS
    assert not run_script(folder, f"{HEAD}\nPARTS = {parts!r}\n{RUN}")
    return {name: (folder / name).read_text() for name in parts}


@pytest.mark.parametrize("setup", SETUPS)
def test_every_epoch_is_printed_once(printed, setup):
    text = printed[setup]
    assert len(printed_epochs(text)) == sum("epoch" in line for line in text.splitlines()) == 6


def test_a_line_is_printed_when_its_epoch_ends(printed):
    found = re.findall(r"callback|epoch", printed["callback"])
    assert found.count("epoch") == 3
    assert (found[0], *found[-2:]) == ("callback", "callback", "epoch")


@pytest.mark.parametrize("method", ["fork", in_sweep("spawn")])
def test_in_a_second_process(printed, tmp_path, method):
    text = printed["forked"] if method == "fork" else run_script(tmp_path, HEAD + SPAWNED)
    assert len(printed_epochs(text)) == 3


def test_other_functions_print_too(printed):
    text = printed["functions"]
    assert text.count("prepared:") == 1
    assert re.search("w .*i0", text)  # a name that is changed
    assert text.count("OrtGradientForwardBackwardFunction: y") == 1
    assert len(printed_epochs(text)) == 3
    assert "step 1 loss" in text


# -- in this process -------------------------------------------------------------------------------


def test_levels_of_nested_calls(caplog):
    before = logger.level
    with reporting(logging.INFO):
        with reporting(logging.DEBUG):
            logger.debug("seen")
        logger.debug("not seen")
        with reporting(None):
            logger.info("not seen either")
        logger.info("seen too")
    logger.info("not seen at the end")
    assert caplog.messages == ["seen", "seen too"]
    assert logger.level == before
    assert logger.filters == FILTERS


def test_what_the_program_asks_for_it_gets(caplog):
    with caplog.at_level(logging.DEBUG, "onnxgrad"), reporting(logging.INFO), reporting(None):
        logger.debug("seen")
    assert caplog.messages == ["seen"]


def test_an_error_undoes_all():
    before = logger.level
    with pytest.raises(ValueError, match="'W'"):
        onnx_derivative(small_linear_model(), ["W"], verbose=2)
    assert (logger.level, logger.filters, logger.handlers) == (before, FILTERS, [])


def test_a_level_that_a_callback_sets_stays(caplog):
    before = logger.level
    try:
        loss_inside(verbose=1).fit(X, Y, callback=lambda progress: logger.setLevel(logging.ERROR))
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(before)


def test_the_cache_of_the_logger_is_cleared(caplog):
    assert not logger.isEnabledFor(logging.INFO)  # which the logger remembers
    loss_outside(verbose=1).fit(X, Y)
    assert len(printed_epochs(caplog.text)) == 3
    assert not logger.isEnabledFor(logging.INFO)


def test_threads_report_what_they_ask_for(caplog):
    both = threading.Barrier(2)

    def fit(name: str, verbose: int) -> None:
        def wait(progress) -> None:
            both.wait(PATIENCE)
            if progress.epoch == 1:
                onnx_derivative(small_linear_model(), verbose=verbose)

        threading.current_thread().name = name
        loss_inside(verbose=verbose, batch_size=12).fit(X, Y, callback=wait)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(fit, "loud", 1), pool.submit(fit, "silent", 0)]:
            done.result(60)
    assert {r.threadName for r in caplog.records} == {"loud"}
    assert len(printed_epochs(caplog.text)) == 3
    assert logger.filters == FILTERS


def test_threads_in_numbers(caplog):
    before = logger.level

    def work(i: int) -> None:
        with reporting(logging.DEBUG if i % 2 else logging.INFO):
            logger.info("message %d", i)
            logger.debug("detail %d", i)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(200)))
    assert sum("message" in m for m in caplog.messages) == 200
    assert sum("detail" in m for m in caplog.messages) == 100
    assert (logger.level, logger.filters, logger.handlers) == (before, FILTERS, [])


def test_passes_report_when_asked(caplog):
    for asked in (False, True):
        made = OrtGradientForwardBackward(small_linear_model(), enable_logging=asked).new_instance()
        made.forward([X, np.float32([[1], [2]]), np.float32([3])])
        assert len(caplog.messages) == asked


def test_libraries_do_not_warn_of_constants(caplog):
    model = parse_model(
        """f (float[N,2] x) => (float[N,2] y) {
            c = Constant<value = float[2] {1.0, 2.0}>() h = Mul(x, c) y = MatMul(h, w) }""",
        w=[[1.0, 2.0], [3.0, 4.0]],
    )
    og.Trainer(og.replace_head(model, 3), "cross_entropy")
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
