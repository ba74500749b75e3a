"""The way of one `fit`: how many files and functions of the training room a reader meets."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import onnxgrad as og
from tests.support.models import parse_model

ROOM = str(Path(og.__file__).parent / "training")
# who raises a number says why in the same commit
MOST_FILES, MOST_FUNCTIONS = 46, 390


def visited_functions(call: Callable[[], object]) -> set[tuple[str, str]]:
    """Return the file and the name of each function of the room that runs in a call."""
    visited = set()

    def note(frame, event, _argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOM) and code.co_name[0] != "<":
            visited.add((code.co_filename, code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return visited


def test_the_way_of_a_fit_stays_short():
    rng = np.random.default_rng(0)
    text = "f (float[N,4] x) => (float[N,3] y) { h = MatMul(x, w)  y = Softmax(h) }"
    model = parse_model(text, opset=20, w=rng.normal(size=(4, 3)).astype(np.float32))
    x, labels = rng.normal(size=(40, 4)).astype(np.float32), np.arange(40) % 3

    def fit():
        og.Trainer(model, "cross_entropy").fit(x, labels, epochs=2)

    fit()  # which imports
    visited = visited_functions(fit)
    files = {file for file, _ in visited}
    assert 10 < len(files) <= MOST_FILES
    assert 50 < len(visited) <= MOST_FUNCTIONS
