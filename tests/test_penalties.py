"""Penalties: a |w| + b w^2, of any weight of the main graph."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from onnxgrad import DerivativeOptions, add_loss_output, onnx_derivative, penalty_loss_onnx

CONSTANT = "w = Constant<value = float[2] {2.0, -3.0}>()"


def parse(body: str, inputs: str = "float[N,2] x", **weights) -> onnx.ModelProto:
    made = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["ai.onnx.ml": 3, "": 18]>
        g ({inputs}) => (float[N,k] y) {{ {body} }}""")
    for name, array in weights.items():
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    return made


def run(model: onnx.ModelProto, **feed) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    zeros = {x.name: np.zeros((4, 2), np.float32) for x in session.get_inputs()}
    return session.run(None, zeros | feed)


PENALTIES = [
    (3, 39, [12, -18]),
    ({"l2": 3}, 39, [12, -18]),
    ({"l1": 2}, 10, [2, -2]),
    ({"l1": 0.5, "l2": 1.0}, 15.5, [4.5, -6.5]),
    ({"l1": np.float64(2), "l2": None}, 10, [2, -2]),
]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("kind", ["initializer", "constant"])
@pytest.mark.parametrize(("penalty", "value", "gradient"), PENALTIES)
def test_value_and_gradient(penalty, value, gradient, kind, reduction):
    """The penalty is added once, whatever the reduction of the loss, which is zero here."""
    if kind == "constant":
        model = parse(f"{CONSTANT}  y = Mul(x, w)")
    else:
        model = parse("y = Mul(x, w)", w=np.float32([2, -3]))
    made = add_loss_output(model, penalty={"w": penalty}, reduction=reduction)
    np.testing.assert_allclose(run(made)[0], [[value]])
    options = DerivativeOptions.Loss
    derivative = onnx_derivative(made, ["w"], [], options, loss="loss", label="label")
    found = run(derivative, w=np.float32([2, -3]))
    np.testing.assert_allclose(found[0], [[value]])
    np.testing.assert_allclose(found[1], gradient)


def test_of_several_weights_of_any_shape():
    scalar, matrix = np.float32(2), np.float32([[1, -2], [3, -4]])
    model = parse("h = MatMul(x, m)  y = Mul(h, s)", s=scalar, m=matrix)
    made = add_loss_output(model, penalty={"s": 5, "m": {"l1": 7}})
    np.testing.assert_allclose(run(made)[0], [[5 * 4 + 7 * 10]])


def test_of_a_weight_of_another_type():
    model = parse("v = Cast<to=1>(w)  y = Mul(x, v)", w=np.array([2.0, -3.0]))
    np.testing.assert_allclose(run(add_loss_output(model, penalty={"w": 1}))[0], [[13]])


def test_where_there_is_none():
    model = parse("v = Cast<to=1>(w)  y = Mul(x, v)", w=np.array([2, 3]))
    with pytest.raises(ValueError, match=re.escape("Unknown weight in penalty 'w'. Valid: 'x'")):
        add_loss_output(model, penalty={"w": 1})
    model = parse("y = ai.onnx.ml.LinearRegressor<coefficients=[0.1, 0.2]>(x)")
    with pytest.raises(ValueError, match=r"'y\.coefficients' is an attribute"):
        add_loss_output(model, penalty={"y.coefficients": 1.0})
    branches = f"""y = If (c) <then_branch = a () => (float[N,2] t) {{ {CONSTANT}  t = Mul(x, w) }},
                                else_branch = b () => (float[N,2] e) {{ e = Neg(x) }}>"""
    with pytest.raises(ValueError, match="'w' sits in a branch"):
        add_loss_output(parse(branches, "float[N,2] x, bool c"), penalty={"w": 1.0})


@pytest.mark.parametrize("opset", [13, 18, 21])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("options", [{"l1": 0.5}, {"l2": 0.25}, {"l1": 2, "l2": 3}])
def test_penalty_nodes(dtype, options, opset):
    taken = ["reshape", "const", "mul"]
    initializers, nodes = penalty_loss_onnx("w", dtype, existing_names=taken, **options)
    made = {name for node in nodes for name in node.output} | {t.name for t in initializers}
    assert made.isdisjoint(taken)
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    values = [onnx.helper.make_tensor_value_info(n, kind, None) for n in ("w", nodes[-1].output[0])]
    graph = onnx.helper.make_graph(nodes, "g", values[:1], values[1:], initializers)
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8
    )
    w = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(dtype)
    [found] = run(model, w=w)
    assert found.shape == (1, 1)
    assert found.dtype == dtype
    expected = options.get("l1", 0) * abs(w).sum() + options.get("l2", 0) * (w * w).sum()
    np.testing.assert_allclose(found, [[expected]], rtol=4e-3 if dtype == np.float16 else 1e-5)


@pytest.mark.parametrize("options", [{}, {"l1": 0}, {"l1": None, "l2": 0.0}])
def test_a_null_penalty(options):
    with pytest.raises(ValueError, match="the penalty of 'w' is null"):
        penalty_loss_onnx("w", np.float32, **options)
