"""`onnxgrad.pytensor.OnnxOp` of models of many forms, beside their mathematics in float64."""

import numpy as np
import onnx
import pytest

from tests.support.bridge_cases import CASES
from tests.support.errors import naming
from tests.support.models import parse_model

pytensor = pytest.importorskip("pytensor")

import pytensor.tensor as pt  # noqa: E402

from onnxgrad.pytensor import OnnxOp  # noqa: E402
from tests.support.pytensor_cases import operation_of_case, weighted_sum  # noqa: E402

STEP = 1e-6  # of central differences
TOLERANCE = {"float64": {"rtol": 1e-6, "atol": 1e-7}, "float32": {"rtol": 1e-3, "atol": 1e-4}}


def central_differences(case, values):
    """Return the gradients of the loss of the mathematics, w.r.t. weights and float inputs."""
    count = len(case.inputs)
    arrays = [np.float64(x) if x.dtype.kind == "f" else x for x in values]
    given, weights = arrays[:count], dict(zip(case.weights, arrays[count:], strict=True))
    gradients = []
    for array in [*weights.values(), *(given[i] for i in case.float_inputs())]:
        gradient = np.empty(array.shape)
        for at in np.ndindex(*array.shape):
            kept, losses = array[at], []
            for array[at] in (kept - STEP, kept + STEP):
                losses.append(weighted_sum(case.mathematics(np, weights, *given)))
            array[at] = kept
            gradient[at] = (losses[1] - losses[0]) / (2 * STEP)
        gradients.append(gradient)
    return gradients


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    case = CASES[name]
    outputs, variables, values = operation_of_case(case)
    slopes = pytensor.grad(weighted_sum(outputs), variables)
    compiled = pytensor.function([*values], [*outputs, *[y.shape for y in outputs], *slopes])
    results = compiled(*values.values())
    count = len(outputs)
    expected = case.mathematics(np, case.weights, *case.inputs)
    for found, shape, y in zip(results[:count], results[count : 2 * count], expected, strict=True):
        assert found.dtype.kind == y.dtype.kind
        assert found.shape == tuple(shape) == y.shape
        np.testing.assert_allclose(found, y, **TOLERANCE[case.dtype])
    expected = central_differences(case, [*values.values()])
    for found, gradient in zip(results[2 * count :], expected, strict=True):
        np.testing.assert_allclose(found, gradient, **TOLERANCE[case.dtype])


def test_weights_in_a_folder(tmp_path):
    case = CASES["local functions"]
    path = tmp_path / "model.onnx"
    onnx.save(case.model(), path, save_as_external_data=True, all_tensors_to_one_file=False,
              size_threshold=0)  # fmt: skip
    assert len(list(tmp_path.iterdir())) == 1 + len(case.weights)
    [y], _, values = operation_of_case(case, path)
    [expected] = case.mathematics(np, case.weights, *case.inputs)
    np.testing.assert_allclose(y.eval(values), expected, rtol=1e-6)


def test_integers_have_no_gradient():
    """PyTensor reports that there is no path, also through outputs that are integers."""
    case = CASES["several types"]
    outputs, _, values = operation_of_case(case)
    inputs = list(values)[: len(case.inputs)]
    for cost, wrt in [
        (outputs[0].sum(), inputs[0]),
        (outputs[1].sum().astype("float64"), inputs[2]),
    ]:
        with pytest.raises(pytensor.gradient.DisconnectedInputError):
            pytensor.grad(cost, wrt)


@pytest.mark.parametrize("which", ["value", "gradient"])
def test_lengths_that_must_be_the_same(which):
    """onnxruntime would repeat the one element of x for all of z."""
    op = OnnxOp(parse_model("f (float[N] x, float[N] z) => (float[N] y) { y = Mul(x, z) }"))
    x, z = pt.fvector("x"), pt.fvector("z")
    y = op(x, z)
    result = y if which == "value" else pytensor.grad(y.sum(), x)
    values = {x: np.float32([2]), z: np.float32([1, 2, 3])}
    with pytest.raises(ValueError, match=naming("'N'", "1 as axis 0 of 'x'", "3 as axis 0 of 'z'")):
        result.eval(values)


def test_a_fixed_batch_takes_no_other_rows():
    case = CASES["a fixed batch"]
    [y], _, values = operation_of_case(case)
    x = next(iter(values))
    with pytest.raises(ValueError, match=naming("'x'", "(4, 3)", "(3, 3)")):
        y.eval(values | {x: case.inputs[0][:3]})
