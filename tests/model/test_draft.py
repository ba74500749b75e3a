"""Small models that are written node by node."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgrad.model.draft import Draft
from onnxgrad.model.opsets import newest_opset
from tests.support.errors import naming
from tests.support.models import operator_names
from tests.support.running import run, run_named


def mean_draft(**options) -> tuple[Draft, dict]:
    """Return a draft of the mean of the rows of x, times an optional factor, and its output."""
    draft = Draft("mean", **options)
    x, factor = draft.input("x", ("N", 3)), draft.input("factor", (1,), default=2.0)
    return draft, {"y": draft.op.Mul(draft.op.ReduceMean(x, [1], keepdims=0), factor)}


@pytest.mark.parametrize(
    ("opset", "dtype", "axes"),
    [(None, np.float32, 2), (14, np.float64, 1), (17, np.float32, 1), (26, np.float16, 2)],
)
def test_a_model_of_an_opset_and_dtype(opset, dtype, axes):
    """Before opset 18, the axes of a mean are an attribute."""
    draft, outputs = mean_draft(opset=opset, dtype=dtype)
    made = draft.model(outputs)
    assert [o.version for o in made.opset_import] == [opset or 18]
    mean = made.graph.node[operator_names(made).index("ReduceMean")]
    assert len(mean.input) == axes
    x = np.array([[1, 2, 6], [0, 1, 2]], dtype)
    for feed, expected in (({}, [6, 2]), ({"factor": np.ones(1, dtype)}, [3, 1])):
        y = run(made, x=x, **feed)[0]
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, expected)


def test_an_output_may_be_an_input_of_another_name():
    draft = Draft("both")
    x = draft.input("x", (2,))
    made = draft.model({"y": x, "z": draft.op.Neg(x)})
    assert {n: y.tolist() for n, y in run_named(made, x=np.float32([1, 2])).items()} == {
        "y": [1, 2],
        "z": [-1, -2],
    }
    onnx.checker.check_model(made)


def test_names_that_are_taken_are_refused():
    draft, outputs = mean_draft()
    with pytest.raises(ValueError, match=naming("'x'", "new")):
        draft.input("x")
    with pytest.raises(ValueError, match=naming("'x'", "output")):
        draft.model({"x": outputs["y"]})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"opset": 13}, ["opset=13", "14", f"{newest_opset()}"]),
        ({"opset": newest_opset() + 1}, ["14", f"{newest_opset() + 1}", f"{newest_opset()}"]),
        ({"dtype": np.int64}, ["dtype=int64", "float dtype"]),
    ],
)  # fmt: skip
def test_wrong_options(options, named):
    with pytest.raises(ValueError, match=naming(*named)):
        Draft("g", **options)


def test_an_operator_that_the_opset_lacks():
    draft = Draft("wide", opset=14)
    x = draft.input("x", (2, 3))
    with pytest.raises(ValueError, match=naming("wide", "opset 14", "18")):
        draft.model({"y": draft.op.emit("Gelu", [x], {})})
