"""Trainers among scikit-learn's tools, and gradients against those of its networks."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import onnx
import pytest

import onnxgrad as og

pytest.importorskip("sklearn")

from sklearn import config_context, exceptions
from sklearn.base import clone, is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression, SGDClassifier
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import get_tags

from tests.support.errors import naming
from tests.support.running import in_sweep, run

RNG = np.random.default_rng(0)
X = RNG.standard_normal((40, 3))
Y = X @ [1.0, -2.0, 0.5] + 3
CLASS = (X[:, 0] + X[:, 1] > 0).astype(np.int64)
SEVERAL = np.digitize(X[:, 0], [-0.5, 0.5])
WEIGHT = RNG.random(40) + 0.5


def convert_to_onnx(estimator, rows, **options) -> onnx.ModelProto:
    return pytest.importorskip("skl2onnx").to_onnx(estimator, rows, **options)


def one_epoch_network(kind, y, **options):
    """Return a network of scikit-learn after one epoch, without penalty."""
    made = kind(
        hidden_layer_sizes=(5,), activation="tanh", alpha=0.0, solver="sgd", batch_size=10,
        shuffle=False, max_iter=1, learning_rate_init=0.01, momentum=0.0, random_state=0, tol=0,
        **options,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return made.fit(X, y)


def score_model(net) -> onnx.ModelProto:
    """Return the raw scores of a network, in float64: what its last Add computes."""
    options = None if isinstance(net, MLPRegressor) else {"zipmap": False}
    model = convert_to_onnx(net, X[:1], options=options)
    last = [node.output[0] for node in model.graph.node if node.op_type == "Add"][-1]
    made = og.graph.select_model_inputs_outputs(model, [last])
    assert made.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.DOUBLE
    return made


def by_backprop(net, y, weight):
    """Return the gradients that scikit-learn computes, in the order of the converted model."""
    target = net._label_binarizer.transform(y) if hasattr(net, "_label_binarizer") else y[:, None]
    layers = len(net.coefs_)
    activations, deltas = [X] + [None] * layers, [None] * layers
    coefs, intercepts = [None] * layers, [None] * layers
    net._backprop(X, target, weight, activations, deltas, coefs, intercepts)
    return [g for pair in zip(coefs, intercepts, strict=True) for g in pair]


NETWORKS = {
    "regressor": (MLPRegressor, Y, og.compat.SquareLearningLoss()),
    "two classes": (MLPClassifier, CLASS, og.compat.NegLogLearningLoss()),
    "three classes": (
        MLPClassifier,
        SEVERAL,
        og.compat.NegLogLearningLoss(probability_function="softmax"),
    ),
}


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("kind", NETWORKS)
def test_the_gradient_is_that_of_backprop(kind, weight):
    """By `onnx_derivative`, fed with the gradient of the loss; and by one step of training."""
    made, y, loss = NETWORKS[kind]
    net = one_epoch_network(made, y)
    model = score_model(net)
    expected = by_backprop(net, y, weight)
    rows = 40 if weight is None else weight.sum()  # what scikit-learn divides by
    weights = {name: array for name, (array, _) in og.graph.get_train_initializer(model).items()}

    label = y[:, None] if kind != "three classes" else y
    [prediction] = run(model, X=X)
    loss.build_onnx_function(
        weight_name="weight", dtype=np.float64, shape=("N", prediction.shape[1])
    )
    _, start = loss.loss_gradient(label, prediction, weight)
    gradient = og.onnx_derivative(model, list(weights), inputs=[])
    feed = {"X": X, f"{model.graph.output[0].name}_grad": start, **weights}
    for found, wanted in zip(run(gradient, feed), expected, strict=True):
        np.testing.assert_allclose(found.reshape(wanted.shape) / rows, wanted, atol=1e-9)

    rate = og.compat.LearningRateSGD(0.5, learning_rate="constant")
    trainer = og.compat.OrtGradientForwardBackwardOptimizer(
        model, list(weights), max_iter=1, batch_size=40, learning_rate=rate, learning_loss=loss
    ).fit(X, y, weight)
    for (name, w), wanted in zip(trainer.get_state().items(), expected, strict=True):
        found = (weights[name] - w.numpy()) / 0.5 * 40 / rows
        np.testing.assert_allclose(found.reshape(wanted.shape), wanted, atol=1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", NETWORKS)
def test_training_goes_the_way_of_scikit_learn(kind, momentum):
    """The same batches, in the same order: the same weights and losses after each epoch."""
    made, y, loss = NETWORKS[kind]
    net = one_epoch_network(made, y, warm_start=True)
    model = score_model(net)
    net.set_params(max_iter=3, momentum=momentum, nesterovs_momentum=True)
    options = {"learning_rate": "constant"}
    rate = (
        og.compat.LearningRateSGDNesterov(0.01, momentum=momentum, **options)
        if momentum
        else og.compat.LearningRateSGD(0.01, **options)
    )
    trainer = og.compat.OrtGradientForwardBackwardOptimizer(
        model, max_iter=3, learning_rate=rate, learning_loss=loss
    ).fit([(X[i : i + 10], y[i : i + 10]) for i in range(0, 40, 10)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        net.fit(X, y)
    trained = [w.numpy() for w in trainer.trained_coef_.values()]
    for w, b, coef, intercept in zip(
        trained[::2], trained[1::2], net.coefs_, net.intercepts_, strict=True
    ):
        np.testing.assert_allclose(w, coef, rtol=1e-9)
        np.testing.assert_allclose(b.ravel(), intercept, rtol=1e-9)
    np.testing.assert_allclose(trainer.train_losses_, net.loss_curve_[-3:], rtol=1e-9)


def regression_model() -> onnx.ModelProto:
    net = LinearRegression().fit(X, 0 * Y)
    return convert_to_onnx(net, np.float32(X[:1]), black_op={"LinearRegressor"})


def regression_trainer(**options) -> og.compat.OrtGradientForwardBackwardOptimizer:
    defaults = {"max_iter": 20, "learning_rate": 0.1, "random_state": 0}
    return og.compat.OrtGradientForwardBackwardOptimizer(regression_model(), **defaults | options)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("learning_rate", [og.compat.LearningRateSGD(1e-6), 0.1]),
        ("learning_rate__eta0", [1e-6, 0.1]),
        ("learning_penalty", [og.compat.ElasticLearningPenalty(0.0, 9.0), None]),
        in_sweep("learning_penalty", [{"coef": 99}, None]),
        in_sweep("learning_loss", ["elastic", "square_error", og.compat.SquareLearningLoss()]),
        in_sweep("batch_size", [5, 2]),
    ],
)
def test_a_search_over_parameters(name, values):
    search = GridSearchCV(regression_trainer(), {name: values}, cv=2, error_score="raise").fit(X, Y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    if name.startswith("learning_rate") or name == "learning_penalty":
        assert search.best_index_ == 1
    best = clone(search.best_estimator_).fit(X, Y)
    assert best.train_losses_ == search.best_estimator_.train_losses_
    np.testing.assert_allclose(search.predict(X), best.predict(X))
    assert search.score(X, Y) == best.score(X, Y)


def test_cross_validation_in_a_pipeline():
    """Features are scaled in float64, the model takes float32; labels have one axis."""
    pipeline = make_pipeline(StandardScaler(), regression_trainer(learning_loss="square_error"))
    found = cross_val_score(pipeline, 100 * X, Y, cv=3, error_score="raise")
    assert found.shape == (3,)
    assert (found > -0.5).all()
    assert (found <= 0).all()
    fitted = pipeline.fit(100 * X, Y)
    np.testing.assert_allclose(fitted.predict(100 * X).ravel(), Y, atol=0.5)
    weighted = pipeline.fit(100 * X, Y, ortgradientforwardbackwardoptimizer__sample_weight=WEIGHT)
    assert weighted.score(100 * X, Y) > -0.1


def test_clone():
    made = regression_trainer(learning_penalty={"coef": {"l2": 0.1}}, learning_loss="log").fit(
        X, CLASS
    )
    copy = clone(made)
    assert not hasattr(copy, "trained_coef_")
    assert copy.fit(X, CLASS).train_losses_ == made.train_losses_
    params = made.get_params()
    assert params["learning_rate__eta0"] == 0.1
    assert params["learning_loss__eps"] == 1e-5


def test_how_a_trainer_shows_itself():
    """All of its arguments in their order; models, which may be large, by their size."""
    text = repr(regression_trainer(learning_loss="log", weights_to_train=["coef"]))
    assert text.startswith("OrtGradientForwardBackwardOptimizer(model_onnx=<ModelProto 'ONNX(")
    assert "nodes>, weights_to_train=['coef'], loss_output_name='loss', max_iter=20" in text
    assert "LearningRateSGD(eta0=0.1, alpha=0.0001, power_t=0.25, learning_rate='inv" in text
    assert "NegLogLearningLoss(eps=1e-05, probability_function='sigmoid')" in text
    data = regression_model().SerializeToString()
    assert f"(model_onnx=<{len(data)} bytes>," in repr(og.compat.OrtGradientOptimizer(data))


def test_learning_rates_of_both_trainers_are_objects():
    made = og.compat.OrtGradientOptimizer(regression_model())
    assert made.set_params(learning_rate__eta0=0.5).learning_rate.eta0 == 0.5
    assert made.set_params(learning_rate="Nesterov").learning_rate.momentum == 0.9
    assert clone(made).learning_rate.momentum == 0.9


def test_tags_and_html():
    made = regression_trainer()
    assert not is_classifier(made)
    assert get_tags(made).estimator_type is None
    assert "OrtGradientForwardBackwardOptimizer" in made._repr_mimebundle_()["text/html"]
    with config_context(display="text"):
        assert made._repr_mimebundle_() == {"text/plain": repr(made)}
    assert make_pipeline(StandardScaler(), made)._repr_html_()


def test_sample_weights_are_routed():
    """To `fit` and to `score`, as the pipeline without routing passes them; also after cloning."""
    with pytest.raises(RuntimeError, match="enable_metadata_routing"):
        regression_trainer().set_fit_request(sample_weight=True)
    with config_context(enable_metadata_routing=True):
        made = regression_trainer()
        with pytest.raises(TypeError, match="'weight'"):
            made.set_fit_request(weight=True)
        assert made.set_fit_request(sample_weight=True) is made
        made = clone(made.set_score_request(sample_weight=True))
        scaler = StandardScaler().set_fit_request(sample_weight=False)
        pipeline = make_pipeline(scaler, made).fit(X, Y, sample_weight=WEIGHT)
        score = pipeline.score(X, Y, sample_weight=WEIGHT)
        search = GridSearchCV(made, {"batch_size": [5]}, cv=2).fit(X, Y, sample_weight=WEIGHT)
        unweighted = GridSearchCV(regression_trainer(), {"batch_size": [5]}, cv=2).fit(X, Y)
    scaled = StandardScaler().fit_transform(X)
    alone = regression_trainer().fit(scaled, Y, WEIGHT)
    assert pipeline[-1].train_losses_ == alone.train_losses_
    assert score == alone.score(scaled, Y, WEIGHT)
    assert search.best_score_ != unweighted.best_score_


def test_the_error_before_fit_is_also_that_of_scikit_learn():
    with pytest.raises(og.NotFittedError) as raised:
        regression_trainer().get_trained_onnx()
    assert isinstance(raised.value, exceptions.NotFittedError)
    again = pickle.loads(pickle.dumps(raised.value))
    assert type(again) is type(raised.value)
    assert str(again) == str(raised.value)
    assert "call fit" in str(again)
    assert issubclass(og.NotFittedError, (ValueError, AttributeError))


def test_parameters_of_a_new_nested_object():
    """Those of the object that the same call sets, in any order."""
    made = regression_trainer().set_params(learning_rate__eta0=0.25, learning_rate="Nesterov")
    assert made.learning_rate.eta0 == 0.25
    assert made.learning_rate.momentum == 0.9
    with pytest.raises(
        ValueError, match=r"invalid parameter 'rate'; valid parameters: \['model_onnx', "
    ):
        made.set_params(rate=1)
    with pytest.raises(ValueError, match="invalid parameter 'eta'"):
        made.set_params(learning_rate__eta=1)


def test_tables():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X, columns=list("abc")).assign(c=X[:, 2] > 0)  # an array of objects
    expected = regression_trainer().fit(np.c_[X[:, :2], X[:, 2] > 0], Y)
    for given in (table, table.astype({"a": "Float64", "c": "boolean"}), table.astype(object)):
        made = regression_trainer().fit(given, pandas.Series(Y))
        assert made.train_losses_ == expected.train_losses_
        np.testing.assert_array_equal(made.predict(given), expected.predict(table.to_numpy()))
        assert list(made.feature_names_in_) == ["a", "b", "c"]
    swapped = table[["b", "a", "c"]]
    for use in (made.predict, lambda x: made.score(x, Y), lambda x: made.losses(x, Y)):
        np.testing.assert_array_equal(use(swapped), use(table))
    with pytest.raises(ValueError, match="no column 'c'"):
        made.predict(table[["a", "b"]])
    both = (regression_trainer().fit(table, Y, X_val=x, y_val=Y) for x in (table, swapped))
    assert len({str(one.validation_losses_) for one in both}) == 1
    assert made.fit(swapped, Y).predict(swapped).shape == (40,)
    made.fit(X, Y).predict(swapped)  # an array has no names
    missing = table.astype({"a": "Float64"})
    missing.loc[5, "a"] = pandas.NA
    with pytest.raises(ValueError, match=naming("'X'", "<NA>", "row 5")):
        regression_trainer().fit(missing, Y)


def test_sparse_data():
    sparse = pytest.importorskip("scipy.sparse")
    with pytest.raises(ValueError, match=r"'X' is sparse.* pass its .toarray\(\)"):
        regression_trainer().fit(sparse.csr_array(X), Y)


def test_the_dictionaries_of_a_classifier_are_no_prediction():
    model = convert_to_onnx(one_epoch_network(MLPClassifier, CLASS), X[:1])
    with pytest.raises(ValueError, match=r"0 float outputs: keep one .* one of 'probabilities'"):
        og.compat.OrtGradientForwardBackwardOptimizer(model, learning_loss="log").fit(X, CLASS)


def test_a_classifier_of_one_layer():
    net = SGDClassifier(loss="log_loss", max_iter=1, tol=None, random_state=0).fit(X, CLASS)
    options = {"zipmap": False, "raw_scores": True}
    model = convert_to_onnx(net, np.float32(X[:1]), options=options, black_op={"LinearClassifier"})
    model = og.graph.select_model_inputs_outputs(model, ["score"])
    made = og.compat.OrtGradientForwardBackwardOptimizer(
        model, learning_loss="log", learning_rate=0.1, random_state=0, weight_init="normal"
    ).fit(X, CLASS, WEIGHT)
    assert made.train_losses_[-1] < made.train_losses_[0] / 3
    assert ((made.predict(X) > 0) == CLASS).mean() >= 0.9


def test_probabilities_by_the_gradient_of_the_log_loss():
    """A network's probabilities, two classes in one column, judged by the cross entropy."""
    net = one_epoch_network(MLPClassifier, CLASS)
    model = convert_to_onnx(net, X[:1], options={"zipmap": False})
    sigmoid = [node.output[0] for node in model.graph.node if node.op_type == "Sigmoid"][-1]
    rate = og.compat.LearningRateSGD(0.5, learning_rate="constant")
    made = og.compat.OrtGradientForwardBackwardOptimizer(
        og.graph.select_model_inputs_outputs(model, [sigmoid]), max_iter=1, batch_size=40,
        learning_rate=rate, learning_loss="binary_cross_entropy",
    )  # fmt: skip
    before = [array for array, _ in og.graph.get_train_initializer(made.model_onnx).values()]
    after = made.fit(X, CLASS).trained_coef_.values()
    expected = by_backprop(net, CLASS, None)
    for old, new, wanted in zip(before, after, expected, strict=True):
        found = ((old - new.numpy()) / 0.5).reshape(wanted.shape)
        np.testing.assert_allclose(found, wanted, atol=1e-6)
