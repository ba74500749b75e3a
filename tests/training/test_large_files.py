"""The work of a trainer grows with the nodes of a file, and not with their square."""

import sys

import numpy as np
import pytest

import onnxgrad as og
from tests.support.models import parse_model


def layers_model(n):
    nodes = [f"h{i} = MatMul(t{i}, w{i}) t{i + 1} = Tanh(h{i})" for i in range(n)]
    weights = {f"w{i}": np.eye(2, dtype=np.float32) for i in range(n)}
    return parse_model(f"f (float[N,2] t0) => (float[N,2] t{n}) {{ {' '.join(nodes)} }}", **weights)


def terms_model(n):
    terms = [f"e{i} = Neg(z)" for i in range(n)]
    total = ", ".join(f"e{i}" for i in range(n))
    text = (
        f"f (float[N,2] x) => (float[N,2] y) {{ z = Mul(x, w) {' '.join(terms)} y = Sum({total}) }}"
    )
    return parse_model(text, w=np.ones(2, np.float32))


def count_calls(model):
    """Return how many functions of Python a training of one step calls."""
    counted = 0

    def count(frame, event, argument):
        nonlocal counted
        counted += event == "call"

    X = np.ones((2, 2), np.float32)
    sys.setprofile(count)
    try:
        og.Trainer(model, "squared_error").fit(X, X, epochs=1, batch_size=2)
    finally:
        sys.setprofile(None)
    return counted


@pytest.mark.parametrize("write_model", [layers_model, terms_model])
def test_calls_grow_with_the_nodes(write_model):
    _, few, more, many = (count_calls(write_model(n)) for n in (5, 5, 60, 115))  # the first imports
    assert many - more < 1.2 * (more - few)
