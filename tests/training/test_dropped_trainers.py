"""Trainers that nobody refers to any more: arrays and sessions are freed without the collector."""

import gc
import weakref

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto

import onnxgrad as og
from tests.support.models import parse_model

UNITS = 400  # matrices are large, so that they are read when needed


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def large_objects() -> list[tuple[str, str]]:
    """Return the kind and name of all sessions and matrices of files in memory."""
    found = []
    for item in gc.get_objects():
        if type(item) is ort.InferenceSession:
            found.append(("session", ""))
        elif type(item) is TensorProto and list(item.dims) == [UNITS, UNITS]:
            found.append(("tensor", item.name))
    return found


def references_of_training(kind: str) -> list[weakref.ref]:
    """Train a model, and return references to arrays of the trainer and of its data."""
    rng = np.random.default_rng(0)
    model = parse_model(
        f"""f (float[N,{UNITS}] x) => (float[N,3] y) {{
            h = MatMul(x, first) r = Relu(h) s = MatMul(r, second) t = Tanh(s)
            y = MatMul(t, last) }}""",
        first=rng.normal(size=(UNITS, UNITS)).astype(np.float32) / 20,
        second=rng.normal(size=(UNITS, UNITS)).astype(np.float32) / 20,
        last=rng.normal(size=(UNITS, 3)).astype(np.float32),
    )
    X, y = rng.normal(size=(64, UNITS)).astype(np.float32), np.arange(64) % 3
    chosen = ["last"] if kind == "frozen" else None
    trainer = og.Trainer(model, "cross_entropy", train=chosen, metrics=["accuracy"])
    if kind != "not trained":
        trainer.fit(X, y, validation=(X, y), epochs=2)
        trainer.partial_fit(X, y)
    trainer.predict(X)
    if kind == "gradients":
        trainer.value_and_grad(X, y)
    return [weakref.ref(array) for array in (X, y, *trainer.state.weights.values())]


@pytest.mark.parametrize("kind", ["not trained", "trained", "frozen", "gradients"])
def test_arrays_and_sessions_are_freed_without_the_collector(kind, no_collector):
    before = large_objects()
    references = references_of_training(kind)
    assert [reference() for reference in references] == [None] * len(references)
    assert large_objects() == before
