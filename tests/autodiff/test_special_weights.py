"""The value of a weight does not decide its gradient: that of ones or zeros is that of an input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad import NoGradientRule, get_train_initializer, onnx_derivative
from tests.autodiff.primal import test_microsoft
from tests.support import cases, microsoft_rows
from tests.support.running import run_named
from tests.support.table import ROWS

VALUES = {"ones": 1.0, "zeros": 0.0, "twos": 2.0, "minus ones": -1.0}
# these operators require sizes and scales that are constants
SETTINGS = {"Resize", "Upsample", "Range", "Pad", "ConstantOfShape"}


@dataclass(frozen=True)
class Case:
    """A model and its data, of which all floats but the first may be weights."""

    id: str
    model: Callable[[], onnx.ModelProto]
    feed: Callable[[], dict[str, np.ndarray]]


def every() -> list[Case]:
    rows = [r for r in ROWS if r.runs and not any(s in r.body for s in SETTINGS)]
    standard = [Case(r.id, lambda r=r: cases.model(r), lambda r=r: cases.feed(r)) for r in rows]
    kernels = [c for c in microsoft_rows.CASES if c.formula is None and not c.half]
    others = [Case(c.id, lambda c=c: test_microsoft.model(c), lambda c=c: c.feed) for c in kernels]
    several = [c for c in standard + others if len(floats(c.model())) > 1]
    assert len(several) > 500
    return several


def floats(proto: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    kind = onnx.TensorProto.FLOAT
    return [x for x in proto.graph.input if x.type.tensor_type.elem_type == kind]


def with_weights(case: Case, value: float) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return the model whose floats, except the first, are weights of one value; and these."""
    proto, feed, weights = case.model(), case.feed(), {}
    for x in floats(proto)[1:]:
        weights[x.name] = np.full(feed[x.name].shape, value, np.float32)
        proto.graph.input.remove(x)
        proto.graph.initializer.append(numpy_helper.from_array(weights[x.name], x.name))
    return proto, weights


def gradient(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    try:
        return onnx_derivative(proto)
    except (NoGradientRule, ValueError):
        return None


def drawn() -> list:
    """Return each case with one of the values, and with the others in the sweep."""
    return [
        pytest.param(case, value, id=f"{case.id}-{name}", marks=marks)
        for i, case in enumerate(every())
        for j, (name, value) in enumerate(VALUES.items())
        for marks in [() if j == i % 16 else pytest.mark.sweep]
    ]


@pytest.mark.parametrize(("case", "value"), drawn())
def test_the_gradient_of_a_weight_is_that_of_an_input(case, value):
    proto, weights = with_weights(case, value)
    expected, found = gradient(case.model()), gradient(proto)
    assert (expected is None) == (found is None)
    if expected is None or found is None:
        return
    constants = weights.keys() - get_train_initializer(proto).keys()  # tables of positions
    names = {y.name for y in expected.graph.output} - {f"{name}_grad" for name in constants}
    assert {y.name for y in found.graph.output} == names
    fed = {n: a.astype(np.float32) if a.dtype == np.float64 else a for n, a in case.feed().items()}
    fed |= {n: array for n, (array, _) in get_train_initializer(case.model()).items()} | weights
    rng = np.random.default_rng(0)
    for name, y in run_named(case.model(), fed).items():
        if isinstance(y, np.ndarray):
            fed[f"{name}_grad"] = rng.standard_normal(y.shape).astype(np.float32)
    want, have = run_named(expected, fed), run_named(found, fed)
    for name in names:
        np.testing.assert_allclose(have[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)
