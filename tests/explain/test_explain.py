"""Explanations: the documented examples run, and what cannot be explained is refused."""

from __future__ import annotations

import doctest
import logging

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad import explain
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.pages import code_of

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 4)).astype(np.float32)
W = RNG.standard_normal((4, 3)).astype(np.float32)
TREE = """ai.onnx.ml.TreeEnsembleRegressor<n_targets=1, nodes_featureids=[0, 0, 0],
    nodes_falsenodeids=[2, 0, 0], nodes_truenodeids=[1, 0, 0], nodes_treeids=[0, 0, 0],
    nodes_nodeids=[0, 1, 2], nodes_values=[0.5, 0.0, 0.0],
    nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], target_ids=[0, 0], target_nodeids=[1, 2],
    target_treeids=[0, 0], target_weights=[1.0, 3.0]>"""


LINEAR_TEXT = "f (float[N,4] x) => (float[N,3] y) { y = MatMul(x, w) }"
LINEAR = parse_model(LINEAR_TEXT, opset=20, w=W)
PAIR = parse_model("f (float[N,4] x, float[N,4] z) => (float[N,4] y) { y = Mul(x, z) }")
PAIR_FEED = {"x": X, "z": X}


@pytest.mark.parametrize("name", explain.__all__)
def test_example(name):
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("Agg")
    tests = doctest.DocTestFinder(recurse=False).find(getattr(explain, name), name, globs={})
    assert tests
    assert tests[0].examples
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    runner.run(tests[0])
    assert not runner.failures


# -- rows ------------------------------------------------------------------------------------------


def test_rows_in_chunks_are_those_of_one_call():
    whole = explain.saliency(explain.ScoreFunction(LINEAR, batch_size=64), X, 1)
    parts = explain.saliency(explain.ScoreFunction(LINEAR, batch_size=2), X, 1)
    np.testing.assert_array_equal(whole, parts)
    np.testing.assert_allclose(whole, np.abs(np.tile(W[:, 1], (5, 1))), rtol=1e-6)


def test_rows_that_are_mixed_run_one_at_a_time(caplog):
    """The mean over the rows has the gradient 1 / rows in a batch, and 1 for a row by itself."""
    model = parse_model(
        "f (float[N,4] x) => (float[N,4] y) <int64[1] rows = {0}>"
        "{ m = ReduceMean(x, rows)  s = Mul(x, x)  y = Add(s, m) }"
    )
    with caplog.at_level(logging.WARNING, "onnxgrad"):
        ours = explain.saliency(model, X, 2)
    assert "ReduceMean" in caplog.text
    expected = np.zeros((5, 4))
    expected[:, 2] = np.abs(2 * X[:, 2] + 1)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_a_fixed_number_of_rows():
    one, five = (parse_model(LINEAR_TEXT.replace("N", n), w=W) for n in "15")
    expected = explain.integrated_gradients(LINEAR, X, 1)
    np.testing.assert_allclose(explain.integrated_gradients(one, X, 1), expected, rtol=1e-5)
    np.testing.assert_allclose(explain.integrated_gradients(five, X, 1), expected, rtol=1e-5)
    with pytest.raises(ValueError, match=naming("takes 5", "have 3", "pass 5")):
        explain.saliency(five, X[:3], 1)
    mixed = parse_model(
        "f (float[5,4] x) => (float[5,4] y) <int64[1] r = {0}>"
        "{ m = ReduceMean(x, r) y = Sub(x, m) }"
    )
    with pytest.raises(ValueError, match=naming("mixes", "ReduceMean")):
        explain.saliency(mixed, X, 1)


def test_inputs_that_all_rows_share():
    model = parse_model(
        "f (float[N,4] x, float[4,3] u, float k) => (float[N,3] y)"
        "{ p = MatMul(x, u)  y = Mul(p, k) }"
    )
    feed = {"x": X, "u": W, "k": np.float32(2)}
    ours = explain.integrated_gradients(model, feed, 0, wrt="x")
    np.testing.assert_allclose(ours, 2 * X * W[:, 0], rtol=1e-5)
    with pytest.raises(ValueError, match=naming("'u'", "shape", "the same")):
        explain.saliency(model, feed, 0, wrt=["x", "u"])


def test_float16():
    model = parse_model(
        "f (float16[N,4] x) => (float16[N,3] y) { y = MatMul(x, w) }", w=W.astype(np.float16)
    )
    ours = explain.integrated_gradients(model, X, [0, 1, 2, 0, 1])
    assert ours.dtype == np.float16
    np.testing.assert_allclose(ours, X * W.T[[0, 1, 2, 0, 1]], rtol=0.01, atol=1e-3)


def test_a_score_function_is_used_for_many_calls():
    scores = explain.ScoreFunction(LINEAR)
    ours = [explain.saliency(scores, X, i, absolute=False)[0] for i in range(3)]
    np.testing.assert_allclose(np.transpose(ours), W, rtol=1e-6)
    with pytest.raises(ValueError, match="ScoreFunction"):
        explain.saliency(scores, X, 0, wrt="x")


# -- targets and baselines -------------------------------------------------------------------------


def test_targets_of_outputs_of_several_axes():
    model = parse_model(
        "f (float[N,4] x) => (float[N,2,2] y) <int64[3] s = {0,2,2}> { y = Reshape(x, s) }"
    )
    for target in ((1, 0), [(1, 0)] * 5):
        ours = explain.saliency(model, X, target)
        np.testing.assert_array_equal(ours, np.tile([0, 0, 1, 0], (5, 1)))
    with pytest.raises(ValueError, match=naming("1 indices", "[2, 2]", "tuple of 2")):
        explain.saliency(model, X, 1)


@pytest.mark.parametrize(
    ("target", "error", "named"),
    [
        (3, ValueError, ["[3]", "row 0", "range"]),
        ([0, 1, -1, 0, 0], ValueError, ["[-1]", "row 2", "range"]),
        ([0, 1], ValueError, ["2 rows", "5"]),
        (None, ValueError, ["`target`"]),
        (0.5, TypeError, ["an integer"]),
        (np.float32([0, 1, 0, 1, 0]), TypeError, ["float32"]),
        (True, TypeError, ["truth value"]),
        ((0, 1), ValueError, ["2 indices"]),
        (((0, 1), (1, 0)), TypeError, ["list of tuples"]),
    ],
)
def test_targets_that_do_not_fit(target, error, named):
    with pytest.raises(error, match=naming(*named)):
        explain.saliency(LINEAR, X, target)


def test_baselines_that_do_not_fit():
    with pytest.raises(ValueError, match=naming("baseline", "'x'", "[4]")):
        explain.integrated_gradients(LINEAR, X, 0, np.zeros(4))
    with pytest.raises(ValueError, match="baseline 'z'"):
        explain.integrated_gradients(LINEAR, X, 0, {"z": 0})


# -- what has no gradient --------------------------------------------------------------------------


def test_trees_are_refused_and_can_be_occluded():
    model = parse_model("f (float[N,4] x) => (float[N,1] y) { y = " + TREE + "(x) }")
    x = np.float32([[0, 1, 1, 1], [1, 1, 1, 1]])
    with pytest.raises(ValueError, match=naming("TreeEnsembleRegressor", "'y'", "constant")):
        explain.saliency(model, x)
    ours = explain.occlusion(model, x, 1)
    np.testing.assert_array_equal(ours, [[0, 0, 0, 0], [2, 0, 0, 0]])


def test_targets_by_the_names_of_classes():
    text = "f (float[N,4] x) => (float[N,3] y) { y = MatMul(x, w) }"
    model = og.replace_head(parse_model(text, w=W), ["cat", "dog"])
    of_index = [explain.saliency(model, X, i) for i in range(2)]
    np.testing.assert_array_equal(explain.saliency(model, X, "dog"), of_index[1])
    each = explain.saliency(model, X, ["cat", "dog", "cat", "cat", "dog"])
    np.testing.assert_array_equal(each[[0, 1]], [of_index[0][0], of_index[1][1]])
    with pytest.raises(ValueError, match=naming("class 'bird'", "'cat'", "'dog'")):
        explain.saliency(model, X, "bird")
    with pytest.raises(ValueError, match=naming("target", "'dog'", "index")):
        explain.saliency(parse_model(text, w=W), X, "dog")


def test_probabilities_in_maps_are_scores():
    model = parse_model(
        """f (float[N,4] x) => (seq(map(int64, float)) m) { s = MatMul(x, w)
        p = Softmax(s)  m = ai.onnx.ml.ZipMap<classlabels_int64s = [4, 5, 6]>(p) }""",
        w=W,
    )
    np.testing.assert_array_equal(
        explain.saliency(model, X, 1), explain.saliency(model, X, 1, output="m")
    )


def test_layers_that_are_constants_or_unknown():
    model = parse_model(
        """f (float[N,4] x) => (float[N,3] y)
        { s = MatMul(x, w)  y = Relu(s) }""",
        w=W,
    )
    with pytest.raises(ValueError, match=naming("'w'", "rows")):
        explain.grad_cam(model, X, "w", 0)
    with pytest.raises(ValueError, match=naming("tensor 'z'", "'s'")):
        explain.grad_cam(model, X, "z", 0)


def test_an_argmax_is_refused():
    model = parse_model(
        "f (float[N,4] x) => (float[N] y) { s = MatMul(x, w)"
        "a = ArgMax<axis=1, keepdims=0>(s)  y = Cast<to=1>(a) }",
        w=W,
    )
    with pytest.raises(ValueError, match=naming("ArgMax", "'a'", "index")):
        explain.integrated_gradients(model, X)
    np.testing.assert_allclose(
        explain.saliency(model, X, 1, output="s"), np.abs(np.tile(W[:, 1], (5, 1))), rtol=1e-6
    )


def test_a_value_without_influence_is_refused():
    model = parse_model(
        "f (float[N,4] x, float[N,4] z) => (float[N,4] y, float[N,4] v)"
        "{ y = Exp(x)  v = Add(x, z) }"
    )
    assert explain.ScoreFunction(model, output="y").wrt == ["x"]
    with pytest.raises(ValueError, match=naming("'y'", "depend", "'z'")):
        explain.saliency(model, {"x": X, "z": X}, 0, wrt=["x", "z"], output="y")
    with pytest.raises(ValueError, match=naming("['y', 'v']")):
        explain.saliency(model, {"x": X, "z": X}, 0)


def test_training_mode_is_refused():
    model = parse_model(
        "f (float[N,4] x) => (float[N,4] y) <float r = {0.5}, bool t = {1}>{ y = Dropout(x, r, t) }"
    )
    for call in (
        lambda: explain.saliency(model, X, 0),
        lambda: explain.influence(model, X, X, X, X),
    ):
        with pytest.raises(ValueError, match="training mode: y"):
            call()


def test_random_numbers_are_refused():
    model = parse_model(
        "f (float[N,4] x) => (float[N,4] y) { n = RandomNormalLike(x)  y = Add(x, n) }"
    )
    with pytest.raises(ValueError, match=naming("RandomNormalLike", "'n'", "random")):
        explain.saliency(model, X, 0)


def test_token_ids_need_an_inner_value():
    table = RNG.standard_normal((7, 3)).astype(np.float32)
    model = parse_model(
        "f (int64[N,T] ids) => (float[N,3] y) <int64[1] axes = {1}>"
        "{ e = Gather(table, ids)  t = Tanh(e)  y = ReduceSum<keepdims=0>(t, axes) }",
        table=table,
    )
    ids = np.array([[1, 2, 3], [4, 5, 6]])
    for wrt in (None, "ids"):
        with pytest.raises(ValueError, match="such as 'e'"):
            explain.saliency(model, ids, 0, wrt=wrt)
    with pytest.raises(ValueError, match=naming("baseline", "'e'")):
        explain.integrated_gradients(model, ids, 0, wrt="e")
    ours = explain.integrated_gradients(model, ids, 0, {"e": 0}, wrt="e")
    np.testing.assert_allclose(ours[..., 0], np.tanh(table[ids])[..., 0], rtol=1e-5)
    assert not ours[..., 1:].any()
    hidden = explain.occlusion(model, ids, 1, 0, {"ids": 0}, wrt="ids")
    np.testing.assert_allclose(hidden, (np.tanh(table[ids]) - np.tanh(table[0]))[..., 0], atol=1e-6)
    with pytest.raises(ValueError, match="'t' depends on 'e'"):
        explain.ScoreFunction(model, ["e", "t"])


@pytest.mark.parametrize(
    ("inputs", "error", "named"),
    [
        ({"z": X}, ValueError, ["input 'z'"]),
        ({}, ValueError, ["['x']", "missing"]),
        (X[:0], ValueError, ["no rows"]),
        (X.astype(complex), TypeError, ["float32", "complex"]),
    ],
)
def test_inputs_that_do_not_fit(inputs, error, named):
    with pytest.raises(error, match=naming(*named)):
        explain.saliency(LINEAR, inputs, 0)


# -- methods ---------------------------------------------------------------------------------------


def test_completeness():
    """Softplus of a linear layer: conductance and integrated gradients sum to the difference."""
    model = parse_model(
        "f (float[N,4] x) => (float[N,3] y) { h = MatMul(x, w) s = Softplus(h) y = Mul(s, s) }", w=W
    )
    scores = explain.ScoreFunction(model)
    found = explain.integrated_gradients(scores, X, 1, 0.5)
    assert np.abs(explain.completeness_gap(scores, found, X, 1, 0.5)).max() < 1e-5
    half = explain.completeness_gap(scores, found / 2, X, 1, 0.5)
    softplus = np.log1p(np.exp(np.stack([X, np.full_like(X, 0.5)]) @ W[:, 1])) ** 2
    np.testing.assert_allclose(half, -(softplus[0] - softplus[1]) / 2, atol=1e-5)
    found = explain.layer_conductance(model, X, "s", 1, 0.5, steps=200)
    assert np.abs(explain.completeness_gap(model, found, X, 1, 0.5)).max() < 1e-2
    assert not found[:, [0, 2]].any()


def test_layer_conductance_with_a_path_around_the_layer():
    """y = h x with h = x^2: along the way t x, the gradient t x times the change 2 t x^2 dt."""
    model = parse_model("f (float[N,1] x) => (float[N,1] y) { h = Mul(x, x)  y = Mul(h, x) }")
    x = np.float32([[1], [2]])
    found = explain.layer_conductance(model, x, "h", steps=600)
    np.testing.assert_allclose(found, 2 / 3 * x**3, rtol=2e-3)


@pytest.mark.parametrize("norm", ["L1", "L2"])
def test_the_nearest_counterfactual_of_a_linear_model(norm):
    rows = X[(X @ W).argmax(axis=1) != 0]
    found = explain.counterfactual(LINEAR, rows, 0, norm=norm)
    assert found.reached.all()
    assert ((found.values @ W).argmax(axis=1) == 0).all()
    order = 1 if norm == "L1" else 2
    for x, distance, y in zip(rows, found.distances, found.values, strict=True):
        np.testing.assert_allclose(distance, np.linalg.norm(y - x, order), rtol=1e-5)
        assert distance <= 1.05 * _nearest(x, order) + 1e-3


def _nearest(x: np.ndarray, order: int) -> float:
    """Return the distance to {v: v @ (w_0 - w_j) >= 0 for j = 1, 2}, by scipy."""
    optimize = pytest.importorskip("scipy.optimize")
    differences = (W[:, :1] - W[:, 1:]).T.astype(np.float64)
    if order == 2:
        constraint = {"type": "ineq", "fun": lambda v: differences @ v}
        start = x + np.linalg.lstsq(differences, 1 - differences @ x, rcond=None)[0]
        return np.sqrt(
            optimize.minimize(lambda v: ((v - x) ** 2).sum(), start, constraints=constraint).fun
        )
    both = np.concatenate([differences, -differences], axis=1)  # the change is p - n, p, n >= 0
    return optimize.linprog(np.ones(8), A_ub=-both, b_ub=differences @ x).fun


def test_a_counterfactual_that_is_not_reached():
    x = np.float32([[1, -2, 0, 0]])
    model = parse_model("f (float[N,4] x) => (float[N,4] y) { y = Identity(x) }")
    with pytest.warns(UserWarning, match=naming("not reached", "[0]")):
        found = explain.counterfactual(model, x, 1, bounds=(-2, 1), mask=[0, 0, 1, 1], steps=20)
    assert not found.reached.any()
    assert np.isnan(found.distances).all()
    np.testing.assert_array_equal(found.values, x)
    masked = explain.counterfactual(model, x, 2, mask=[0, 1, 1, 1])
    assert masked.reached.all()
    assert masked.values[0, 0] == 1
    assert masked.values[0, 2] > 1


def test_pgd_stays_in_bounds_and_in_the_ball():
    for norm, order in (("Linf", np.inf), ("L2", 2)):
        ours = explain.pgd(
            LINEAR, X, 0.3, 0.2, 4, 1, norm=norm, bounds=(-1, 1.5), random_state=0,
            loss="cross_entropy",
        )  # fmt: skip
        assert ours.min() >= -1
        assert ours.max() <= 1.5
        inside = np.clip(X, -1, 1.5)
        assert (np.linalg.norm(ours - inside, order, axis=1) <= 0.3 + 1e-5).all()


def test_influence_of_a_linear_regression():
    """The gradient of (x w - t)^2 is 2 (x w - t) x."""
    t = RNG.standard_normal((5, 3)).astype(np.float32)
    ours = explain.influence(LINEAR, X, t, X[:2], t[:2], checkpoints=[LINEAR, {"w": W / 2}])
    expected = 0
    for w in (W, W / 2):
        gradients = 2 * np.einsum("ni,nj->nij", X, X @ w - t).reshape(5, -1)
        expected = expected + gradients[:2] @ gradients.T
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


def test_influence_of_rows_that_mix_is_that_of_each_alone(caplog):
    made = parse_model(
        """f (float[N,4] x) => (float[N,3] y) <float half = {0.5}>
        { a = MatMul(x, w)  m = ReduceMax<keepdims=1>(a, first)
          h = Mul(m, half)  y = Sub(a, h) }""",
        w=W,
        first=np.array([0]),
    )
    t = RNG.standard_normal((5, 3)).astype(np.float32)
    ours = explain.influence(made, X, t, X[:2], t[:2], weights=["w"])
    gradients = np.einsum("ni,nj->nij", X, X @ W / 2 - t).reshape(5, -1)
    np.testing.assert_allclose(ours, gradients[:2] @ gradients.T, rtol=1e-4, atol=1e-5)
    assert "ReduceMax" in caplog.text
    fixed = parse_model(LINEAR_TEXT.replace("N", "5"), w=W)
    with pytest.raises(ValueError, match=naming("takes 5 rows", "pass 5")):
        explain.influence(fixed, X, t, X[:2], t[:2])


def test_inputs_that_a_gradient_does_not_read():
    """The gradient of a sum reads neither input; a guard gives it their lengths."""
    made = parse_model("f (float[N,4] x, float[N,4] z) => (float[N,4] y) { y = Sub(x, z) }")
    found = explain.saliency(made, {"x": X, "z": X}, 1, absolute=False)
    for name, slope in (("x", 1), ("z", -1)):
        np.testing.assert_array_equal(found[name], slope * np.eye(4)[[1] * 5])


def test_inputs_that_the_output_does_not_need_may_be_there():
    made = parse_model(
        "f (float[N,4] x, float[N,4] z) => (float[N,3] y, float[N,4] u)"
        "{ y = MatMul(x, w)  u = Neg(z) }",
        w=W,
    )
    feed = {"x": X, "z": X}
    np.testing.assert_array_equal(explain.saliency(made, feed, 1, output="y"), abs(W[:, 1]) + 0 * X)
    influences = explain.influence(made, feed, X[:, :3], feed, X[:, :3], output="y")
    np.testing.assert_allclose(
        influences, explain.influence(LINEAR, X, X[:, :3], X, X[:, :3]), rtol=1e-5
    )
    with pytest.raises(ValueError, match="input 'v'"):
        explain.saliency(made, feed | {"v": X}, 1, output="y")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"checkpoints": [{}]}, ["checkpoint 'w'"]),
        ({"checkpoints": [{"w": W[:2]}]}, ["[2, 3]", "[4, 3]"]),
        ({"learning_rates": [1, 2]}, ["2 learning_rates", "1 checkpoints"]),
        ({"weights": ["v"]}, ["weight 'v'"]),
    ],
)
def test_influence_refuses(options, named):
    with pytest.raises(ValueError, match=naming(*named)):
        explain.influence(LINEAR, X, X[:, :3], X, X[:, :3], **options)
    with pytest.raises(ValueError, match=naming("labels", "[3, 3]", "5 rows", "each row")):
        explain.influence(LINEAR, X, X[:3, :3], X, X[:, :3])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: explain.occlusion(LINEAR, X, 5, 0), "larger than"),
        (lambda: explain.occlusion(LINEAR, X, 2, 0, strides=3), "strides"),
        (lambda: explain.occlusion(LINEAR, X, (1, 1), 0), "each"),
        (lambda: explain.fgsm(LINEAR, X, -1, 0), "epsilon"),
        (lambda: explain.fgsm(LINEAR, X, 1, 0, bounds=(1, 0)), "least value"),
        (lambda: explain.fgsm(LINEAR, X, 1, 0, mask=np.ones(3)), "broadcast"),
        (lambda: explain.fgsm(LINEAR, X, 1, 0, loss="log"), "loss 'log'"),
        (lambda: explain.pgd(LINEAR, X, 1, 1, 1, 0, norm="L3"), "norm 'L3'"),
        (lambda: explain.integrated_gradients(LINEAR, X, 0, method="best"), "method 'best'"),
        (lambda: explain.integrated_gradients(LINEAR, X, 0, steps=0), "steps"),
        (lambda: explain.smooth_grad(LINEAR, X, 0, samples=0), "samples"),
        (lambda: explain.saliency(LINEAR, X, 0, wrt="v"), "tensor 'v'"),
        (lambda: explain.saliency(LINEAR, X, 0, wrt="y"), "the output"),
        (lambda: explain.counterfactual(LINEAR, X, 0, bounds=(-0.1, 0.1)), "bounds"),
        (lambda: explain.counterfactual(LINEAR, X, 0, steps=0), "steps"),
        (lambda: explain.counterfactual(LINEAR, X, 0, norm="L3"), "norm 'L3'"),
        (lambda: explain.counterfactual(PAIR, PAIR_FEED, 0), "`wrt`"),
        (lambda: explain.saliency(PAIR, X, 0), "a dict"),
        (lambda: explain.saliency(PAIR, PAIR_FEED | {"z": X[:3]}, 0), "'z' has 3"),
        (lambda: explain.saliency(LINEAR, [{"x": X}], 0), "list of batches"),
        (lambda: explain.integrated_gradients(PAIR, PAIR_FEED, 0, X), "a dict"),
        (lambda: explain.integrated_gradients(LINEAR, X, 0, X + 1j), "complex"),
        (lambda: explain.show_text(["a"], [1.0, 2.0]), "1 names"),
        (lambda: explain.show_image(np.zeros((2, 8, 8, 8))), "of one row"),
        (lambda: explain.show_image(np.full((8, 8), np.nan)), "NaN or infinity"),
    ],
)
def test_arguments_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_words_stand_side_by_side_and_long_ones_on_lines_of_their_own():
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("Agg")
    axes = explain.show_text(["ab", "c", "d", "long" * 99], [1.0, -1.0, 0.0, 0.5])
    assert [text.get_position() for text in axes.texts] == [(0, 0), (3, 0), (5, 0), (0, -1)]
    plt.close("all")


def test_the_submodule_is_a_name_of_the_package():
    assert og.explain is explain


def test_the_code_of_the_page(tmp_path, monkeypatch, capsys):
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(tmp_path)
    blocks = code_of("explain.md")
    assert blocks
    for block in blocks:
        exec(compile(block, "explain.md", "exec"), {})
        plt.close("all")
        assert capsys.readouterr().out.strip()


TIME_MAJOR = """f (float[T,N,2] x) => (float[T,N,3] y)
    <float[2,3] w = {1.0, -2.0, 3.0, 0.5, 5.0, -6.0}, int64 first = {0}> {
      s = CumSum(x, first)  a = Tanh(s)  y = MatMul(a, w) }"""


def test_rows_on_another_axis():
    """Step 3 of each sequence depends on the steps before it, and on no other sequence."""
    model = parse_model(TIME_MAJOR)
    x = np.random.default_rng(0).standard_normal((5, 4, 2)).astype(np.float32)
    axes = {"x": 1, "y": 1}
    found = explain.saliency(model, x, (3, 1), absolute=False, batch_axes=axes)
    slope = 1 - np.tanh(x.cumsum(0)[3]) ** 2  # (N, 2)
    expected = np.zeros_like(x)
    expected[:4] = slope * np.float32([-2.0, 5.0])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    scores = explain.ScoreFunction(model, batch_axes=axes)
    start = np.full_like(x, 0.1)
    parts = explain.integrated_gradients(scores, x, (3, 1), baselines=start, steps=100)
    assert parts.shape == x.shape
    gap = explain.completeness_gap(scores, parts, x, (3, 1), baselines=start)
    np.testing.assert_allclose(gap, np.zeros(4), atol=1e-3)
    moved = explain.fgsm(scores, x, 0.1, (3, 1), mask=np.ones_like(x))
    assert moved.shape == x.shape
    with pytest.raises(ValueError, match=naming("['N']", "batch_axes")):
        explain.saliency(model, x, (3, 1))
    with pytest.raises(ValueError, match=r"batch_axes\['x'\] is 3"):
        explain.saliency(model, x, (3, 1), batch_axes={"x": 3})
    with pytest.raises(ValueError, match=naming("batch_axes", "'z'")):
        explain.saliency(model, x, (3, 1), batch_axes={"z": 1})
