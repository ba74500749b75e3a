"""Models that onnxruntime refuses, or would refuse for a mistake of its own."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from onnxgrad import ModelError
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.session import load_session
from tests.support.errors import naming
from tests.support.models import parse_model


@pytest.fixture
def tries(monkeypatch) -> list:
    """The options of each session that is started."""
    made, start = [], ort.InferenceSession

    def noted(model, options=None, **more):
        made.append(more)
        return start(model, options, **more)

    monkeypatch.setattr(ort, "InferenceSession", noted)
    return made


def quiet_session(model) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return load_session(model, options, providers=CPU.providers)


def test_int8_in_front_of_a_reshape():
    """For this, onnxruntime 1.32 writes a zero point of another dtype than the result has."""
    text = """g (float[2,3] x) => (float[3,2] y) { q = QuantizeLinear(x, s, z)
        d = DequantizeLinear(q, s, z)  r = Reshape(d, shape)  y = Neg(r) }"""
    operands = {"s": np.float32(0.5), "z": np.int8(3), "shape": np.array([3, 2])}
    x = np.float32([[0, 0.6, -9], [100, -100, 1.5]])
    [y] = quiet_session(parse_model(text, opset=21, **operands)).run(None, {"x": x})
    steps = np.clip(np.rint(x / 0.5) + 3, -128, 127)
    np.testing.assert_array_equal(y, -0.5 * (steps - 3).reshape(3, 2))


@pytest.mark.parametrize(
    ("node", "error", "named"),
    [
        ("Add(x, shape)", Exception, ["Add", "type"]),
        ("com.microsoft.What(x)", ModelError, ["com.microsoft.What", "'y'", "select"]),
    ],
)
def test_what_is_refused_is_tried_once(node, error, named, tries):
    text = f"g (float[2,3] x) => (float[4,2] y) {{ y = {node} }}"
    with pytest.raises(error, match=naming(*named)):
        quiet_session(parse_model(text, shape=np.array([4, 2])))
    assert len(tries) == 1
