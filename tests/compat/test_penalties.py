"""Penalties: a |w| + b w^2, of any weight of the main graph."""

from __future__ import annotations

import pickle
import re

import numpy as np
import onnx
import pytest

from onnxgrad.compat import (
    BaseLearningPenalty,
    DerivativeOptions,
    ElasticLearningPenalty,
    EvaluationError,
    NoLearningPenalty,
    add_loss_output,
    onnx_derivative,
    penalty_loss_onnx,
)
from onnxgrad.compat.learning_penalties import PerWeightLearningPenalty
from tests.support.errors import naming
from tests.support.models import initializer_arrays, parse_model
from tests.support.running import run
from tests.support.values import as_ortvalue, each_dtype_and_opset

CONSTANT = "w = Constant<value = float[2] {2.0, -3.0}>()"


def model_of_penalized(body: str, inputs: str = "float[N,2] x", **weights) -> onnx.ModelProto:
    return parse_model(f"g ({inputs}) => (float[N,k] y) {{ {body} }}", **weights)


def run_on_zeros(model: onnx.ModelProto, **feed) -> list[np.ndarray]:
    zeros = {x.name: np.zeros((4, 2), np.float32) for x in model.graph.input}
    return run(model, **zeros | feed)


DTYPES = [np.float16, np.float32, np.float64]
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
        model = model_of_penalized(f"{CONSTANT}  y = Mul(x, w)")
    else:
        model = model_of_penalized("y = Mul(x, w)", w=np.float32([2, -3]))
    made = add_loss_output(model, penalty={"w": penalty}, reduction=reduction)
    np.testing.assert_allclose(run_on_zeros(made)[0], [[value]])
    options = DerivativeOptions.Loss
    derivative = onnx_derivative(made, ["w"], [], options, loss="loss", label="label")
    found = run_on_zeros(derivative, w=np.float32([2, -3]))
    np.testing.assert_allclose(found[0], [[value]])
    np.testing.assert_allclose(found[1], gradient)


def test_of_several_weights_of_any_shape():
    scalar, matrix = np.float32(2), np.float32([[1, -2], [3, -4]])
    model = model_of_penalized("h = MatMul(x, m)  y = Mul(h, s)", s=scalar, m=matrix)
    made = add_loss_output(model, penalty={"s": 5, "m": {"l1": 7}})
    np.testing.assert_allclose(run_on_zeros(made)[0], [[5 * 4 + 7 * 10]])


def test_of_a_weight_of_another_type():
    model = model_of_penalized("v = Cast<to=1>(w)  y = Mul(x, v)", w=np.array([2.0, -3.0]))
    np.testing.assert_allclose(run_on_zeros(add_loss_output(model, penalty={"w": 1}))[0], [[13]])


def test_where_there_is_none():
    model = model_of_penalized("v = Cast<to=1>(w)  y = Mul(x, v)", w=np.array([2, 3]))
    with pytest.raises(ValueError, match=naming("'w'", "'x'")):
        add_loss_output(model, penalty={"w": 1})
    model = model_of_penalized("y = ai.onnx.ml.LinearRegressor<coefficients=[0.1, 0.2]>(x)")
    with pytest.raises(ValueError, match=naming("'y.coefficients'", "attribute")):
        add_loss_output(model, penalty={"y.coefficients": 1.0})
    branches = f"""y = If (c) <then_branch = a () => (float[N,2] t) {{ {CONSTANT}  t = Mul(x, w) }},
                                else_branch = b () => (float[N,2] e) {{ e = Neg(x) }}>"""
    with pytest.raises(ValueError, match=naming("'w'", "subgraph")):
        add_loss_output(model_of_penalized(branches, "float[N,2] x, bool c"), penalty={"w": 1.0})


@each_dtype_and_opset((13, 18, 21))
@pytest.mark.parametrize("options", [{"l1": 0.5}, {"l2": 0.25}, {"l1": 2, "l2": 3}])
def test_penalty_nodes(dtype, options, opset):
    taken = ["reshape", "const", "mul"]
    initializers, nodes = penalty_loss_onnx("w", dtype, existing_names=taken, **options)
    made = {name for node in nodes for name in node.output} | {t.name for t in initializers}
    assert made.isdisjoint(taken)
    fields = {np.float32: "float_data", np.float64: "double_data"}
    numbers = [n for t in initializers for n in getattr(t, fields.get(dtype, "raw_data"))]
    assert dtype == np.float16 or numbers == list(options.values())
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    values = [onnx.helper.make_tensor_value_info(n, kind, None) for n in ("w", nodes[-1].output[0])]
    graph = onnx.helper.make_graph(nodes, "g", values[:1], values[1:], initializers)
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8
    )
    w = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(dtype)
    [found] = run_on_zeros(model, w=w)
    assert found.shape == (1, 1)
    assert found.dtype == dtype
    expected = options.get("l1", 0) * abs(w).sum() + options.get("l2", 0) * (w * w).sum()
    np.testing.assert_allclose(found, [[expected]], rtol=4e-3 if dtype == np.float16 else 1e-5)


@pytest.mark.parametrize("options", [{"l1": 0.5}, {"l2": 0.25}, {"l1": 1, "l2": 1}])
def test_penalty_nodes_of_several_weights_in_one_graph(options):
    """One set goes from call to call; every node is needed, and every name is given once."""
    weights = {"coef": WEIGHTS[0], "penalty_coef": WEIGHTS[1]}
    taken = {"const", *weights}
    nodes, tensors, ends = [], [], []
    for name in weights:
        before = set(taken)
        some, more = penalty_loss_onnx(name, np.float64, existing_names=taken, **options)
        given = [t.name for t in some] + [y for node in more for y in node.output]
        assert len(set(given)) == len(given)
        assert taken == before | set(given)
        assert before.isdisjoint(given)
        read = {x for node in more for x in node.input}
        ends.append(more[-1].output[0])
        assert read == {name, *given} - {ends[-1]}  # no node, no initializer that nothing needs
        nodes += more
        tensors += some
    assert re.fullmatch(r"penalty_coef_\d+", ends[0])
    assert ends[1] == "penalty_penalty_coef"
    alone = penalty_loss_onnx("coef", np.float64, **options)[1]
    assert alone[-1].output == ["penalty_coef"]
    kind = onnx.TensorProto.DOUBLE
    values = [onnx.helper.make_tensor_value_info(n, kind, None) for n in (*weights, *ends)]
    graph = onnx.helper.make_graph(nodes, "g", values[:2], values[2:], tensors)
    opset = [onnx.helper.make_opsetid("", 18)]
    found = run_on_zeros(
        onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), **weights
    )
    for value, w in zip(found, weights.values(), strict=True):
        expected = options.get("l1", 0) * abs(w).sum() + options.get("l2", 0) * (w * w).sum()
        np.testing.assert_allclose(value, [[expected]])


@pytest.mark.parametrize("options", [{}, {"l1": 0}, {"l1": None, "l2": 0.0}])
def test_a_null_penalty(options):
    with pytest.raises(ValueError, match="penalty of 'w'"):
        penalty_loss_onnx("w", np.float32, **options)


RNG = np.random.default_rng(0)
WEIGHTS = [RNG.standard_normal(shape) for shape in ((2, 3, 2), (4,), ())]


@each_dtype_and_opset((14, 18, 26))
@pytest.mark.parametrize(
    ("choice", "pairs"),  # (l1, l2) of each weight
    [
        (ElasticLearningPenalty(), [(0.5, 0.5)] * 3),
        (ElasticLearningPenalty(l1=2, l2=0), [(2, 0)] * 3),
        (ElasticLearningPenalty(l1=0.0, l2=3), [(0, 3)] * 3),
        (0.25, [(0, 0.25)] * 3),
        ({"W1": 2, "W2": {"l1": 0.1}}, [None, (0, 2), (0.1, 0)]),
        ({"W0": ElasticLearningPenalty(1, 2), "W1": NoLearningPenalty()}, [(1, 2), None, None]),
        (None, [None] * 3),
        (ElasticLearningPenalty(0, 0), [None] * 3),
        ({}, [None] * 3),
    ],
)
def test_learning_penalties(choice, pairs, dtype, opset):
    kind = BaseLearningPenalty.select(choice)
    kind.build_onnx_function(opset, "cpu", 3, dtype)
    weights = [w.astype(dtype) for w in WEIGHTS]
    loss, gradients = kind.penalty_loss(*weights), kind.penalty_gradient(*weights)
    expected = 0.0
    rtol = 4e-3 if dtype == np.float16 else 1e-5
    for w, pair, found in zip(weights, pairs, gradients, strict=True):
        if pair is None:
            assert found is None
            continue
        a, b = pair
        w = w.astype(np.float64)
        expected += a * abs(w).sum() + b * (w * w).sum()
        assert (found.shape, found.dtype) == (w.shape, dtype)
        np.testing.assert_allclose(found, a * np.sign(w) + 2 * b * w, rtol=rtol, atol=rtol)
    assert (loss.shape, loss.dtype) == ((), dtype)
    np.testing.assert_allclose(loss, expected, rtol=rtol)
    bound = [as_ortvalue(w) for w in weights]
    np.testing.assert_array_equal(kind.penalty_loss(*bound).numpy(), loss)
    for value, array in zip(kind.penalty_gradient(*bound), gradients, strict=True):
        assert (value is None) == (array is None)
        if value is not None:
            np.testing.assert_array_equal(value.numpy(), array)
    nothing = not any(pairs)
    assert hasattr(kind, "penalty_onnx_") != nothing
    assert hasattr(kind, "penalty_grad_onnx_") != nothing


@pytest.mark.parametrize("zero", ["l1", "l2"])
def test_graphs_have_a_constant_for_a_coefficient_of_zero(zero):
    made = ElasticLearningPenalty(**{"l1": 0.5, "l2": 0.5} | {zero: 0}).build_onnx_function(
        n_tensors=2
    )
    for model in (made.penalty_onnx_, made.penalty_grad_onnx_):
        numbers = initializer_arrays(model).values()
        assert sum(a.size == 1 and not a.any() for a in numbers) == 1
    w = np.float32([2, -4])
    assert made.penalty_loss(w, w) == {"l1": 20, "l2": 6}[zero]
    expected = {"l1": w, "l2": np.sign(w) / 2}[zero]
    np.testing.assert_allclose(made.penalty_gradient(w, w), [expected] * 2)
    parts = ElasticLearningPenalty(None, 0.5).build_onnx_function()
    assert not any((a == 0).any() for a in initializer_arrays(parts.penalty_onnx_).values())


def test_penalties_by_name():
    given = ElasticLearningPenalty(1, 2)
    assert BaseLearningPenalty.select(given) is given
    for name in ("elastic", "l1l2", "ElasticLearningPenalty", ElasticLearningPenalty):
        assert BaseLearningPenalty.select(name, l1=1, l2=2) == given
    for name in (None, "", "NoLearningPenalty"):
        assert BaseLearningPenalty.select(name) == NoLearningPenalty()
    assert BaseLearningPenalty.select() == NoLearningPenalty()
    kind = BaseLearningPenalty.select({"coef": 3})
    kind.build_onnx_function(names=["intercept", "coef"], dtype=np.float64)
    assert [x.name for x in kind.penalty_grad_onnx_.graph.input] == ["intercept", "coef"]
    assert [y.name for y in kind.penalty_grad_onnx_.graph.output] == ["coef_grad"]
    np.testing.assert_allclose(kind.penalty_loss(np.ones(2), np.full(2, 2.0)), 24)


@pytest.mark.parametrize(
    ("choice", "options", "parts"),
    [
        ("elastik", {}, "'elastik'|'elastic'"),
        (True, {}, "penalty True"),
        ("elastic", {"l3": 1}, "'elastic' 'l3'|'l1', 'l2'"),
        (None, {"l1": 1}, "penalty None 'l1'"),
        (NoLearningPenalty(), {"l1": 1}, "name|class|['l1']"),
        ({"W0": {"l3": 1}}, {}, "penalty of 'W0' 'l3'"),
        ({"W0": 0}, {}, "penalty of 'W0'|zero"),
        ({"W0": {"l1": None}}, {}, "penalty of 'W0'|zero"),
        ({"W7": 1}, {}, "'W7'"),
        (-1.0, {}, "l2|-1.0"),
        (ElasticLearningPenalty(l1=np.nan), {}, "l1|nan"),
        ({"W0": ElasticLearningPenalty(l1=-1)}, {}, "l1|-1"),
    ],
)
def test_penalties_that_cannot_be(choice, options, parts):
    with pytest.raises(ValueError, match=naming(*parts.split("|"))):
        BaseLearningPenalty.select(choice, **options).build_onnx_function(n_tensors=2)


def test_penalties_that_are_not_built_or_get_other_weights():
    kind = ElasticLearningPenalty()
    for method in (kind.penalty_loss, kind.penalty_gradient, NoLearningPenalty().penalty_loss):
        with pytest.raises(EvaluationError, match="build_onnx_function"):
            method(np.ones(2))
    with pytest.raises(ValueError, match="n_tensors=0"):
        kind.build_onnx_function(n_tensors=0)
    kind.build_onnx_function(n_tensors=2)
    with pytest.raises(ValueError, match=naming("1 weights", "2", "['W0', 'W1']")):
        kind.penalty_loss(np.ones(2))


def test_penalties_as_estimators():
    kind = ElasticLearningPenalty(l1=0.1)
    assert kind.get_params() == {"l1": 0.1, "l2": 0.5}
    again = pickle.loads(pickle.dumps(kind.build_onnx_function()))
    np.testing.assert_allclose(again.penalty_loss(np.ones(3)), 1.8, rtol=1e-6)
    kind.set_params(l1=0, l2=0).build_onnx_function()
    assert kind.penalty_loss(np.ones(3)) == 0
    base = pytest.importorskip("sklearn.base")
    for made in (kind, NoLearningPenalty(), PerWeightLearningPenalty({"W0": 3})):
        assert base.clone(made) == made


def test_a_penalty_of_ones_own():
    class Toward(BaseLearningPenalty):
        """(w - target)^2."""

        def __init__(self, target=1.0):
            self.target = target

        def penalty(self, op, name, w):
            return op.Reshape(op.ReduceSumSquare(w - self.target, keepdims=0), [1, 1])

    kind = BaseLearningPenalty.select(Toward(3.0)).build_onnx_function(n_tensors=2)
    w = [np.float32([1, 2]), np.float32([[5]])]
    assert kind.penalty_loss(*w) == 4 + 1 + 4
    np.testing.assert_array_equal(kind.penalty_gradient(*w)[0], [-4, -2])
    np.testing.assert_array_equal(kind.penalty_gradient(*w)[1], [[4]])
