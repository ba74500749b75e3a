"""Shapes of outputs in a run."""

import numpy as np
import pytest
from onnx import numpy_helper

from onnxgrad import DerivativeOptions, onnx_derivative
from tests.support.models import parse_model
from tests.support.running import run_named

OPTIONS = DerivativeOptions.FillGrad | DerivativeOptions.KeepOutputs
ELEMENTS = 17_000  # more than 64 KiB, which a rewrite of a model does not copy


def sums_of_chosen(count):
    """Return the model of a sum over the chosen columns: those where a large weight is not zero."""
    model = parse_model(
        f"""f (float[N,{ELEMENTS}] x) => (float[N,3] y, float[N,1] z) <int64[1] one = {{1}}> {{
        n = NonZero(w)  t = Transpose(n)  i = Squeeze(t, one)  y = Gather<axis = 1>(x, i)
        z = ReduceMean<keepdims = 1>(y, one) }}"""
    )
    chosen = np.arange(ELEMENTS) < count
    model.graph.initializer.append(numpy_helper.from_array(chosen.astype("f"), "w"))
    return model


def test_models_that_differ_in_a_large_weight_have_their_own_shapes():
    x = np.ones((2, ELEMENTS), np.float32)
    for count in (3, 5):
        model = sums_of_chosen(count)
        gradient = onnx_derivative(model, [], ["x"], OPTIONS)
        found = run_named(gradient, {"x": x})["x_grad"]
        assert found[:, : count + 1] == pytest.approx(np.array([[1 + 1 / count] * count + [0]] * 2))
