"""What `verbose` and `enable_logging` print, in processes with and without a set-up of logging."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad import (
    OrtGradientForwardBackward,
    OrtGradientForwardBackwardOptimizer,
    OrtGradientOptimizer,
    add_loss_output,
    onnx_derivative,
)
from onnxgrad.reporting import reporting
from tests.support.running import PATIENCE, in_sweep
from tests.support.small_models import linear

logger = logging.getLogger("onnxgrad")
FILTERS = list(logger.filters)
X = np.random.default_rng(0).standard_normal((12, 2)).astype(np.float32)
Y = (X[:, :1] - X[:, 1:]).astype(np.float32)


def outside(**options) -> OrtGradientForwardBackwardOptimizer:
    return OrtGradientForwardBackwardOptimizer(linear(), max_iter=3, random_state=0, **options)


def inside(**options) -> OrtGradientOptimizer:
    made = add_loss_output(linear())
    return OrtGradientOptimizer(made, max_iter=3, random_state=0, **options)


def epochs(text: str) -> list[str]:
    return re.findall(r"epoch \d+/\d+ loss", text)


# -- in processes of their own: pytest's capturing is a set-up of logging --------------------------

SETUP = """
import logging, sys
import numpy as np, onnx
from onnx import numpy_helper
from onnxgrad import *
X = np.random.default_rng(0).standard_normal((12, 2)).astype(np.float32)
Y = X[:, :1] - X[:, 1:]
text = "g (float[N,2] x) => (float[N,1] y) { h = MatMul(x, w)  y = Add(h, b) }"
model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 18]>' + text)
for name, value in (("w", [[0.1], [0.2]]), ("b", [0.3])):
    model.graph.initializer.append(numpy_helper.from_array(np.float32(value), name))
def outside(**options):
    return OrtGradientForwardBackwardOptimizer(model, max_iter=3, random_state=0, **options)
def inside(**options):
    return OrtGradientOptimizer(add_loss_output(model), max_iter=3, random_state=0, **options)
"""


def script(tmp_path, text: str) -> str:
    """Return what a script prints to stderr."""
    path = tmp_path / "script.py"
    path.write_text(SETUP + text)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert not done.stdout
    return done.stderr


@pytest.mark.parametrize(
    "setup",
    [
        "",
        "logging.basicConfig()",
        in_sweep("logging.basicConfig(level=logging.INFO)"),
        in_sweep("logging.basicConfig(level=logging.ERROR)"),
        "logging.getLogger('onnxgrad').addHandler(logging.StreamHandler())",
        "logging.getLogger('onnxgrad').disabled = True",
        in_sweep("logging.getLogger('onnxgrad').setLevel(logging.ERROR)"),
    ],
)
def test_every_epoch_is_printed_once(tmp_path, setup):
    text = script(
        tmp_path,
        f"{setup}\nlogger = logging.getLogger('onnxgrad')\n"
        "before = logger.level, logger.disabled, list(logger.handlers), list(logger.filters)\n"
        "outside(verbose=1).fit(X, Y)\ninside(verbose=1).fit(X, Y)\ninside(verbose=0).fit(X, Y)\n"
        "after = logger.level, logger.disabled, list(logger.handlers), list(logger.filters)\n"
        "assert before == after, (before, after)",
    )
    assert len(epochs(text)) == sum("epoch" in line for line in text.splitlines()) == 6


def test_a_line_is_printed_when_its_epoch_ends(tmp_path):
    text = script(
        tmp_path,
        "class Note:\n"
        "  def __call__(self, p): print('callback', p.epoch, file=sys.stderr)\n"
        "inside(verbose=1).fit(X, Y, callback=Note())",
    )
    found = re.findall(r"callback|epoch", text)
    assert found.count("epoch") == 3
    assert found[0] == "callback"
    assert found[-1] == "epoch"
    assert found[-2] == "callback"


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_in_a_second_process(tmp_path, method):
    if method == "fork" and sys.platform in ("darwin", "win32"):
        pytest.skip("processes are not forked")
    text = script(
        tmp_path,
        "import multiprocessing\n"
        "def work(): outside(verbose=1).fit(X, Y)\n"
        "if __name__ == '__main__':\n"
        f"    process = multiprocessing.get_context({method!r}).Process(target=work)\n"
        "    process.start(); process.join(); assert process.exitcode == 0",
    )
    assert len(epochs(text)) == 3


def test_other_functions_print_too(tmp_path):
    text = script(
        tmp_path,
        "onnx_derivative(model, verbose=1)\nonnx_rename_names(model, verbose=2)\n"
        "f = OrtGradientForwardBackward(model, enable_logging=True).new_instance()\n"
        "f.forward([X, np.float32([[1], [2]]), np.float32([3])])\n"
        "outside(enable_logging=True).fit(X, Y)\n"
        "onnx_derivative(model)\nonnx_rename_names(model)",
    )
    assert text.count("prepared:") == 1
    assert "w is renamed to i0" in text
    assert "names changed" in text
    assert text.count("forward of OrtGradientForwardBackwardFunction: y") == 1
    assert len(epochs(text)) == 3
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
    with pytest.raises(ValueError, match="Unknown weight"):
        onnx_derivative(linear(), ["W"], verbose=2)
    assert (logger.level, logger.filters, logger.handlers) == (before, FILTERS, [])


def test_a_level_that_a_callback_sets_stays(caplog):
    before = logger.level
    try:
        inside(verbose=1).fit(X, Y, callback=lambda progress: logger.setLevel(logging.ERROR))
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(before)


def test_the_cache_of_the_logger_is_cleared(caplog):
    assert not logger.isEnabledFor(logging.INFO)  # which the logger remembers
    outside(verbose=1).fit(X, Y)
    assert len(epochs(caplog.text)) == 3
    assert not logger.isEnabledFor(logging.INFO)


def test_threads_report_what_they_ask_for(caplog):
    both = threading.Barrier(2)

    def fit(name: str, verbose: int) -> None:
        def wait(progress) -> None:
            both.wait(PATIENCE)
            if progress.epoch == 1:
                onnx_derivative(linear(), verbose=verbose)

        threading.current_thread().name = name
        inside(verbose=verbose, batch_size=12).fit(X, Y, callback=wait)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(fit, "loud", 1), pool.submit(fit, "silent", 0)]:
            done.result(60)
    assert {r.threadName for r in caplog.records} == {"loud"}
    assert len(epochs(caplog.text)) == 3
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


def test_verbose_with_a_handler_of_the_program():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        outside(verbose=1).fit(X, Y)
    finally:
        logger.removeHandler(handler)
    assert len(epochs(stream.getvalue())) == 3


def test_passes_report_when_asked(caplog):
    for asked in (False, True):
        made = OrtGradientForwardBackward(linear(), enable_logging=asked).new_instance()
        made.forward([X, np.float32([[1], [2]]), np.float32([3])])
        assert len(caplog.messages) == asked


def test_libraries_do_not_warn_of_constants(caplog):
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 20]>
        f (float[N,2] x) => (float[N,2] y) <float[2,2] w = {1, 2, 3, 4}> {
            c = Constant<value = float[2] {1.0, 2.0}>() h = Mul(x, c) y = MatMul(h, w) }""")
    og.Trainer(og.replace_head(model, 3), "cross_entropy")
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
