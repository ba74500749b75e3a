"""The value of a weight does not decide its gradient: that of ones or zeros is that of an input."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad import NoGradientRule, onnx_derivative
from onnxgrad.graph import get_train_initializer
from tests.support.cases import Row, row_feed, row_model
from tests.support.microsoft_rows import CASES, KernelCase, kernel_model
from tests.support.running import run_named
from tests.support.table import ROWS

VALUES = {"ones": 1.0, "zeros": 0.0, "twos": 2.0, "minus ones": -1.0}
# these operators require sizes and scales that are constants
SETTINGS = {"Resize", "Upsample", "Range", "Pad", "ConstantOfShape"}
KERNELS = [c for c in CASES if c.formula is None and not c.half]
SEVERAL = [
    *(r for r in ROWS if r.runs and len(r.shapes) > 1 and not any(s in r.body for s in SETTINGS)),
    *(c for c in KERNELS if sum(a.dtype == np.float32 for a in c.feed.values()) > 1),
]


def model_and_feed(case: Row | KernelCase) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    if isinstance(case, KernelCase):
        return kernel_model(case), case.feed
    return row_model(case), row_feed(case)


def with_weights(
    proto: onnx.ModelProto, feed: dict[str, np.ndarray], value: float
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return the model whose floats, except the first, are weights of one value; and these."""
    model, weights = onnx.ModelProto.FromString(proto.SerializeToString()), {}
    kind = onnx.TensorProto.FLOAT
    floats = [x for x in model.graph.input if x.type.tensor_type.elem_type == kind]
    for x in floats[1:]:
        weights[x.name] = np.full(feed[x.name].shape, value, np.float32)
        model.graph.input.remove(x)
        model.graph.initializer.append(numpy_helper.from_array(weights[x.name], x.name))
    assert weights
    return model, weights


def derivative_or_none(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    try:
        return onnx_derivative(proto)
    except (NoGradientRule, ValueError):
        return None


def cases_with_values() -> list:
    """Return each case with each of the values; a few by default."""
    assert len(SEVERAL) > 500
    named = ("RotaryEmbedding", "minus ones")  # of an operator that has a function body
    return [
        pytest.param(
            case,
            value,
            id=f"{case.id}-{name}",
            marks=[pytest.mark.sweep] * (n % 41 > 0 and (case.id, name) != named),
        )
        for n, (case, (name, value)) in enumerate((c, v) for c in SEVERAL for v in VALUES.items())
    ]


@pytest.mark.parametrize(("case", "value"), cases_with_values())
def test_the_gradient_of_a_weight_is_that_of_an_input(case, value):
    proto, feed = model_and_feed(case)
    with_constants, weights = with_weights(proto, feed, value)
    expected, found = map(derivative_or_none, (proto, with_constants))
    assert (expected is None) == (found is None)
    if expected is None or found is None:
        return
    # tables of positions are no weights
    constants = weights.keys() - get_train_initializer(with_constants).keys()
    names = {y.name for y in expected.graph.output} - {f"{name}_grad" for name in constants}
    assert {y.name for y in found.graph.output} == names
    fed = {n: a.astype(np.float32) if a.dtype == np.float64 else a for n, a in feed.items()}
    fed |= {n: array for n, (array, _) in get_train_initializer(proto).items()} | weights
    rng = np.random.default_rng(0)
    for name, y in run_named(proto, fed).items():
        if isinstance(y, np.ndarray):
            fed[f"{name}_grad"] = rng.standard_normal(y.shape).astype(np.float32)
    want, have = run_named(expected, fed), run_named(found, fed)
    for name in names:
        np.testing.assert_allclose(have[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)
