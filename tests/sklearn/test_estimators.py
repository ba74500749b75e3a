"""`OnnxClassifier` and `OnnxRegressor` against scikit-learn's estimators, and among its tools."""

from __future__ import annotations

import doctest
import pickle
import warnings
from itertools import product

import numpy as np
import onnx
import pytest

pytest.importorskip("sklearn", minversion="1.6")
import joblib
from sklearn import config_context
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_digits, load_iris
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge, SGDClassifier
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.svm import SVC, LinearSVC
from sklearn.utils.estimator_checks import parametrize_with_checks

import onnxgrad as og
from onnxgrad.sklearn import OnnxClassifier, OnnxRegressor
from onnxgrad.training.recipe import Recipe
from tests.support.errors import naming
from tests.support.models import initializer_arrays, parse_model
from tests.support.running import in_sweep, run

RNG = np.random.default_rng(0)
X = RNG.standard_normal((120, 4))
Z = X @ [1.0, -2.0, 0.5, 0.0] + 0.3 * RNG.standard_normal(120)
TWO = np.where(Z > 0, "yes", "no")
THREE = np.digitize(Z, [-1, 1]) + 5
quiet = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
pytestmark = quiet


def file_outputs(model: onnx.ModelProto, X):
    """Return the outputs of a file with one input."""
    [x] = model.graph.input
    double = x.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE
    return run(model, {x.name: np.asarray(X, np.float64 if double else np.float32)})


def exported_estimator(estimator, y, x=X, **options):
    """Return the file of an estimator, fitted to these labels."""
    to_onnx = pytest.importorskip("skl2onnx").to_onnx
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return to_onnx(estimator.fit(x, y), np.float32(x[:1]), **options)


FEW = {"max_iter": 20, "learning_rate": 0.02, "hidden_layer_sizes": (16,)}  # for quick checks


@parametrize_with_checks([OnnxClassifier(**FEW), OnnxRegressor(**FEW)])
def test_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.parametrize("estimator", [OnnxClassifier, OnnxRegressor])
def test_the_examples_of_the_documentation(estimator):
    (test,) = doctest.DocTestFinder(recurse=False).find(estimator, globs={})
    assert test.examples
    assert not doctest.DocTestRunner().run(test).failed


# -- a perceptron, as MLPClassifier and MLPRegressor ----------------------------------------------

PLAIN = {"random_state": 3, "shuffle": False, "batch_size": 32, "max_iter": 5, "tol": None}
THEIRS = PLAIN | {"alpha": 0.0, "tol": 0.0, "n_iter_no_change": 99}


SEVERAL = np.c_[Z > 0, X[:, 0] > 0].astype(int)


@pytest.mark.parametrize(
    ("y", "solver"),
    [
        (TWO, "sgd"),
        in_sweep(TWO, "adam"),
        in_sweep(THREE, "sgd"),
        (THREE, "adam"),
        (SEVERAL, "sgd"),
    ],
)
def test_the_steps_are_those_of_scikit_learn(y, solver):
    """With the same seed: the same initial weights, and so the same weights after every step."""
    theirs = MLPClassifier((6, 5), activation="tanh", solver=solver, momentum=0.0, **THEIRS)
    theirs.fit(X, y)
    labels = y.shape[1] if y.ndim > 1 else 1  # their loss is the sum over the labels of a row
    rate = 1e-3 * labels
    options = {"hidden_layer_sizes": (6, 5), "activation": "tanh", "optimizer": solver}
    ours = OnnxClassifier(**options, learning_rate=rate, **PLAIN).fit(X, y)
    weights = initializer_arrays(ours.to_onnx())
    for i, (w, b) in enumerate(zip(theirs.coefs_, theirs.intercepts_, strict=True)):
        np.testing.assert_allclose(weights[f"layers.{i}.weight"], w, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(weights[f"layers.{i}.bias"], b, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-6)
    np.testing.assert_array_equal(ours.predict(X), theirs.predict(X))
    np.testing.assert_array_equal(ours.classes_, theirs.classes_)
    np.testing.assert_allclose(ours.loss_curve_, np.divide(theirs.loss_curve_, rate / 1e-3), 1e-5)


def test_the_steps_of_a_regression():
    y = np.c_[Z, X[:, 1]]
    theirs = MLPRegressor(hidden_layer_sizes=6, solver="adam", **THEIRS).fit(X, y)
    ours = OnnxRegressor(hidden_layer_sizes=6, **PLAIN).fit(X, y)
    np.testing.assert_allclose(ours.predict(X), theirs.predict(X), atol=1e-6)
    np.testing.assert_allclose(ours.loss_curve_, 2 * np.array(theirs.loss_curve_), rtol=1e-5)
    np.testing.assert_allclose(file_outputs(ours.to_onnx(), X)[0], ours.predict(X), rtol=1e-9)


def test_accuracy_of_digits():
    X, y = load_digits(return_X_y=True)
    X_train, X_test, y_train, y_test = train_test_split(X / 16, y, random_state=0)
    options = {"max_iter": 8, "random_state": 0, "hidden_layer_sizes": (40,)}
    theirs = MLPClassifier(**options).fit(X_train, y_train).score(X_test, y_test)
    ours = OnnxClassifier(**options).fit(X_train, y_train)
    assert ours.score(X_test, y_test) > theirs - 0.01
    labels, p = file_outputs(ours.to_onnx(), X_test)
    np.testing.assert_array_equal(labels, ours.predict(X_test))
    np.testing.assert_allclose(p, ours.predict_proba(X_test), atol=1e-12)


# -- files and models of scikit-learn -------------------------------------------------------------


def test_the_optimum_is_kept():
    """A logistic regression without penalty is at the optimum of the loss that goes on training."""
    pytest.importorskip("skl2onnx")
    for y in (np.where(np.cos(9 * Z) + 0.3 * X[:, 3] < Z, "yes", "no"), THREE % 3):
        y = np.where(np.arange(120) % 7 == 0, np.roll(y, 1), y)  # so that there is a finite optimum
        fitted = LogisticRegression(C=np.inf, tol=1e-9, max_iter=999).fit(X, y)
        before = fitted.predict_proba(X)
        options = {"optimizer": "sgd", "learning_rate": 0.01, "batch_size": 120, "max_iter": 20}
        ours = OnnxClassifier(fitted, random_state=0, tol=None, **options).fit(X, y)
        np.testing.assert_allclose(ours.predict_proba(X), before, atol=1e-3)
        assert ours.loss_curve_[0] == pytest.approx(ours.loss_curve_[-1], abs=1e-6)
        np.testing.assert_allclose(fitted.predict_proba(X), before)  # not changed itself


FILES = {
    "logistic": LogisticRegression(),
    "mlp": MLPClassifier((5,), max_iter=20, random_state=0),
    "sgd": SGDClassifier(loss="log_loss", random_state=0),
    "hinge": SGDClassifier(random_state=0),
    "linear svc": LinearSVC(),
    "svc": SVC(),
    "bayes": GaussianNB(),
    "pipeline": make_pipeline(StandardScaler(), LogisticRegression()),
}


SOME = {("svc", 3), ("logistic", 2), ("mlp", 3), ("hinge", 2), ("bayes", 3), ("pipeline", 2)}


@pytest.mark.parametrize(
    ("name", "classes"),
    [c if c in SOME else in_sweep(*c) for c in product(FILES, (2, 3))],
)
def test_default_exports_go_on_training(name, classes):
    """With ZipMap and labels: they train, and the file predicts what the estimator predicts."""
    y = TWO if classes == 2 else THREE
    file = exported_estimator(FILES[name], y)
    size = len(file.SerializeToString())
    ours = OnnxClassifier(file, learning_rate=0.01, max_iter=15, random_state=0).fit(X, y)
    assert len(file.SerializeToString()) == size
    assert ours.loss_curve_[-1] < ours.loss_curve_[0] or (name, classes) == ("svc", 3)
    assert ours.score(X, y) > FILES[name].score(X, y) - 0.06
    assert ours.classes_.tolist() == sorted(set(y))
    outputs = file_outputs(ours.to_onnx(), X)
    np.testing.assert_array_equal(outputs[0].ravel(), ours.predict(X))
    np.testing.assert_allclose(ours.predict_proba(X).sum(axis=1), 1, atol=1e-4)
    best = ours.classes_[ours.predict_proba(X).argmax(axis=1)]
    assert (best == ours.predict(X)).mean() > 0.95
    if hasattr(FILES[name], "predict_proba"):  # the columns are those of the file, before and after
        (zipped, start) = outputs[1], OnnxClassifier(file, learning_rate=1e-30, optimizer="sgd")
        theirs = [[row[label] for label in ours.classes_] for row in zipped]
        np.testing.assert_allclose(ours.predict_proba(X), theirs, atol=1e-5)
        theirs = FILES[name].predict_proba(X)
        start.set_params(max_iter=1).fit(X, y)
        np.testing.assert_allclose(start.predict_proba(X), theirs, atol=1e-3)


def test_labels_that_the_file_does_not_have():
    file = exported_estimator(LogisticRegression(), THREE)
    ours = OnnxClassifier(file, max_iter=1).fit(X[THREE != 6], THREE[THREE != 6])  # not all of them
    assert ours.classes_.tolist() == [5, 6, 7]
    assert ours.predict_proba(X).shape == (120, 3)
    for y in (THREE + 1, TWO, THREE + 0.5 * (THREE == 6)):
        with pytest.raises(ValueError, match=r"replace_head|label type"):
            OnnxClassifier(file).fit(X, y)
    pairs = exported_estimator(SVC(decision_function_shape="ovo"), THREE)
    with pytest.raises(ValueError, match=naming("pair", "3 classes")):
        OnnxClassifier(pairs).fit(X, THREE)


def linear_scores(units: int) -> onnx.ModelProto:
    text = f"f (float[N,4] x) => (float[N,{units}] y) {{ y = MatMul(x, w) }}"
    return parse_model(text, opset=20, w=np.full((4, units), 0.1, np.float32))


@pytest.mark.parametrize(
    ("units", "labels", "parts"),
    [
        (3, [0, 3], ["3 outputs", "2 classes", "units=2"]),
        (3, [-1, 1], ["3 outputs", "2 classes", "units=2"]),
        (3, ["a", "b"], ["3 outputs", "2 classes", "units=2"]),
        (1, [0, 1, 2], ["1 outputs", "3 classes", "units=3"]),
        (3, [[0, 1], [1, 1]], ["3 outputs", "2 labels", "units=2"]),
    ],
)
def test_labels_that_a_network_does_not_have(units, labels, parts):
    y = np.resize(labels, (len(X), *np.shape(labels)[1:]))
    with pytest.raises(ValueError, match=naming(*parts, "replace_head")):
        OnnxClassifier(linear_scores(units), max_iter=1).fit(X, y)


def test_numbers_of_classes_that_do_not_occur():
    ours = OnnxClassifier(linear_scores(3), max_iter=1, tol=None).fit(X, np.resize([0, 2], len(X)))
    assert ours.classes_.tolist() == [0, 1, 2]


def test_a_network_without_labels():
    """Its outputs are scores, of the classes in sorted order; the number of outputs decides."""
    ours = OnnxClassifier(linear_scores(3), max_iter=60, learning_rate=0.1, tol=None).fit(X, THREE)
    assert ours.classes_.tolist() == [5, 6, 7]
    (scores,) = file_outputs(ours.to_onnx(), X)
    np.testing.assert_allclose(ours.decision_function(X), scores, atol=1e-6)
    p = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(ours.predict_proba(X), p, atol=1e-6)
    np.testing.assert_array_equal(ours.predict(X), ours.classes_[scores.argmax(axis=1)])
    one = OnnxClassifier(linear_scores(1), max_iter=60, learning_rate=0.1, tol=None).fit(X, TWO)
    assert one.score(X, TWO) > 0.9
    assert OnnxClassifier(linear_scores(3), max_iter=1).fit(X, THREE % 2).classes_.tolist() == [
        0,
        1,
        2,
    ]
    for units, y in ((2, THREE), (1, THREE), (5, TWO)):
        with pytest.raises(ValueError, match=r"replace_head\(model, units="):
            OnnxClassifier(linear_scores(units)).fit(X, y)
    with pytest.raises(ValueError, match=r"replace_head\(model, units=1\)"):
        OnnxRegressor(linear_scores(3)).fit(X, Z)


def test_a_sigmoid_for_each_class():
    """One class against the others: the probabilities are those of the file, with the sum 1."""
    model = linear_scores(3)
    model.graph.node[0].output[0] = "score"
    model.graph.node.add(op_type="Sigmoid", input=["score"], output=["y"])
    ours = OnnxClassifier(model, max_iter=60, learning_rate=0.1, early_stopping=True)
    ours.fit(X, THREE)
    (p,) = file_outputs(ours.to_onnx(), X)
    np.testing.assert_allclose(ours.predict_proba(X), p / p.sum(axis=1, keepdims=True), atol=1e-6)
    np.testing.assert_array_equal(ours.predict(X), ours.classes_[p.argmax(axis=1)])
    assert ours.score(X, THREE) > 0.5
    assert all(
        (12 * score) % 1 < 1e-5 or (12 * score) % 1 > 1 - 1e-5 for score in ours.validation_scores_
    )  # shares of 12 rows


def test_models_of_scikit_learn():
    pytest.importorskip("skl2onnx")
    fitted = LinearRegression().fit(X, Z)
    ours = OnnxRegressor(FrozenEstimator(fitted), max_iter=1, learning_rate=1e-30, optimizer="sgd")
    new = clone(ours)
    np.testing.assert_allclose(new.fit(X, -Z).predict(X), fitted.predict(X), atol=1e-5)
    unfitted = OnnxRegressor(LinearRegression(), max_iter=1, learning_rate=1e-30, optimizer="sgd")
    np.testing.assert_allclose(unfitted.fit(X, -Z).predict(X), -fitted.predict(X), atol=1e-5)
    assert not hasattr(unfitted.model, "coef_")


def table_with_text(n: int = 150):
    """Return a table with text and missing values, and labels."""
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(1)
    table = pandas.DataFrame(rng.normal(size=(n, 2)), columns=["age", "fare"])
    table["port"] = rng.choice(["Bergen", "Oslo", "Moss"], n)
    y = np.where(table.age - table.fare + (table.port == "Oslo") > 0.3, "yes", "no")
    table.loc[::7, "age"] = np.nan
    return table, np.where(rng.random(n) < 0.1, "no", y)


def columns_pipeline(last):
    numbers = make_pipeline(SimpleImputer(), StandardScaler())
    columns = [("n", numbers, ["age", "fare"]), ("t", OneHotEncoder(), ["port"])]
    return make_pipeline(ColumnTransformer(columns), last)


def test_text_and_missing_values():
    """The encoders in front stay; what is behind them goes on training, in the whole file."""
    pytest.importorskip("skl2onnx")
    table, y = table_with_text()
    pipe = columns_pipeline(LogisticRegression(C=1e-3)).fit(table, y)
    still = OnnxClassifier(pipe, optimizer="sgd", learning_rate=1e-30, max_iter=1).fit(table, y)
    np.testing.assert_allclose(still.predict_proba(table), pipe.predict_proba(table), atol=1e-5)
    options = {"learning_rate": 0.3, "batch_size": 150, "max_iter": 100, "tol": None}
    ours = OnnxClassifier(pipe, **options).fit(table, y)
    best = columns_pipeline(LogisticRegression(C=np.inf)).fit(table, y)
    np.testing.assert_allclose(ours.predict_proba(table), best.predict_proba(table), atol=0.02)
    file = ours.to_onnx()
    assert [x.name for x in file.graph.input] == ["age", "fare", "port"]
    kinds = {"age": np.float32, "fare": np.float32, "port": object}
    labels, p = run(file, {name: table[[name]].to_numpy(kind) for name, kind in kinds.items()})
    np.testing.assert_array_equal(labels, ours.predict(table))
    np.testing.assert_allclose(p, ours.predict_proba(table), atol=1e-6)
    again = pickle.loads(pickle.dumps(ours)).partial_fit(table[20:], y[20:])
    assert again.n_iter_ == 101
    from_file = OnnxClassifier(file, max_iter=1, early_stopping=True).fit(table, y)
    assert from_file.score(table, y) > 0.8


@pytest.mark.parametrize("columns", [["port"], ["age", "fare"]])
def test_arrays_of_text_or_with_missing_values(columns):
    pytest.importorskip("skl2onnx")
    table, y = table_with_text()
    first = OneHotEncoder() if columns == ["port"] else SimpleImputer()
    pipe = make_pipeline(first, Ridge()).fit(table[columns].to_numpy(), y == "yes")
    array = table[columns].to_numpy()
    ours = OnnxRegressor(pipe, learning_rate=0.05, max_iter=200, tol=None)
    ours.fit(array, (y == "yes") + 1.0)
    np.testing.assert_allclose(ours.predict(array), pipe.predict(array) + 1, atol=0.1)


def test_missing_values_that_nothing_fills_in():
    table, y = table_with_text()
    numbers = table[["age", "fare"]].to_numpy()
    file = exported_estimator(LogisticRegression(), y, np.nan_to_num(numbers))
    with pytest.raises(ValueError, match=naming("'X'", "NaN", "22 of 150 rows: 0, 7")):
        OnnxClassifier(file).fit(numbers, y)


# -- weights of rows and classes, calls one after the other ---------------------------------------


def test_weights_count_rows_and_classes():
    """A row of weight 3 counts as three rows."""
    options = {"random_state": 0, "max_iter": 10, "hidden_layer_sizes": (4,)}
    weight = RNG.integers(1, 4, 120)
    repeated = OnnxClassifier(**options).fit(np.repeat(X, weight, 0), np.repeat(THREE, weight))
    alone = OnnxClassifier(**options, batch_size=999).fit(X, THREE, sample_weight=weight)
    assert len(repeated.loss_curve_) == 10
    whole = OnnxClassifier(**options, batch_size=999)
    whole.fit(np.repeat(X, weight, 0), np.repeat(THREE, weight))
    np.testing.assert_allclose(alone.predict_proba(X), whole.predict_proba(X), atol=1e-6)
    weights = {5: 1.0, 6: 2.0, 7: 3.0}
    by_class = OnnxClassifier(**options, class_weight=weights).fit(X, THREE)
    by_row = OnnxClassifier(**options).fit(X, THREE, [weights[int(c)] for c in THREE])
    np.testing.assert_allclose(by_class.predict_proba(X), by_row.predict_proba(X), atol=1e-9)
    balanced = OnnxClassifier(**options, class_weight="balanced").fit(X, THREE)
    own = 120 / (3 * np.bincount(THREE)[THREE])
    by_row = OnnxClassifier(**options).fit(X, THREE, own)
    np.testing.assert_allclose(balanced.predict_proba(X), by_row.predict_proba(X), atol=1e-9)
    with pytest.raises(ValueError, match=naming("'balanced'", "partial_fit")):
        balanced.partial_fit(X, THREE)


def test_partial_fit_goes_on(monkeypatch):
    """Ten calls are ten epochs of one fit, and build the step once; also after pickling."""
    built, step = [], Recipe.step
    monkeypatch.setattr(Recipe, "step", lambda *a, **b: built.append(1) or step(*a, **b))
    options = {"random_state": 0, "batch_size": 120, "hidden_layer_sizes": (4,), "shuffle": False}
    once = OnnxClassifier(**options, max_iter=10, tol=None).fit(X, TWO)
    parts = OnnxClassifier(**options)
    for error in (NotFittedError, og.NotFittedError):
        with pytest.raises(error, match=naming("nothing", "call fit")):
            parts.predict(X)
    parts.partial_fit(X, TWO, classes=["no", "yes"])
    built.clear()
    for _ in range(4):
        parts.partial_fit(X, TWO)
    assert not built
    parts = pickle.loads(pickle.dumps(parts))
    for _ in range(5):
        parts.partial_fit(X, TWO)
    np.testing.assert_allclose(parts.predict_proba(X), once.predict_proba(X), atol=1e-9)
    np.testing.assert_allclose(parts.loss_curve_, once.loss_curve_, rtol=1e-9)
    assert parts.n_iter_ == 10
    before = parts.predict_proba(X)
    parts.set_params(learning_rate=1e-30).partial_fit(X, TWO)
    np.testing.assert_allclose(parts.predict_proba(X), before)
    for y, classes in ((THREE, None), (TWO, ["a", "b"])):
        with pytest.raises(ValueError, match=naming("classes", "['no', 'yes']", "pass")):
            parts.partial_fit(X, y, classes=classes)
    with pytest.raises(ValueError, match=naming("at least 2 classes", "one class, ['")):
        OnnxClassifier().partial_fit(X[:1], TWO[:1])


def test_warm_start_and_random_state():
    cold = OnnxRegressor(random_state=0, max_iter=3).fit(X, Z)
    assert cold.fit(X, Z).loss_curve_ == clone(cold).fit(X, Z).loss_curve_
    last = cold.loss_
    assert cold.set_params(warm_start=True).fit(X, Z).loss_curve_[0] < last
    state = [OnnxRegressor(random_state=np.random.RandomState(4), max_iter=2) for _ in range(2)]
    first, second = (one.fit(X, Z).predict(X) for one in state)
    np.testing.assert_array_equal(first, second)
    drawn = [OnnxRegressor(max_iter=2).fit(X, Z).loss_ for _ in range(2)]
    assert drawn[0] != drawn[1]


def test_early_stopping_keeps_the_best_weights():
    noise = RNG.permutation(TWO)
    ours = OnnxClassifier(
        early_stopping=True, validation_fraction=0.3, n_iter_no_change=4, learning_rate=0.05,
        max_iter=300, random_state=1,
    ).fit(X, noise)  # fmt: skip
    scores = ours.validation_scores_
    assert ours.n_iter_ == len(scores) < 300
    assert ours.best_validation_score_ == max(scores)
    assert ours.n_iter_ == scores.index(max(scores)) + 1 + 4
    rng = np.random.RandomState(1)  # draws the weights first, as scikit-learn does
    for shape in ((4, 100), 100, (100, 1), 1):
        rng.uniform(-1, 1, shape)
    rng.randint(2**31 - 1)  # the seed of the trainer
    rows = train_test_split(X, noise, test_size=0.3, stratify=noise, random_state=rng)
    assert ours.score(rows[1], rows[3]) == pytest.approx(max(scores))
    target = OnnxRegressor(early_stopping=True, random_state=0, max_iter=5).fit(X, Z)
    assert len(target.validation_scores_) == 5
    assert target.best_loss_ is None


@pytest.mark.parametrize("make", [OnnxClassifier, OnnxRegressor])
def test_rows_that_are_named_are_those_of_the_user(make):
    """Also where early stopping holds out others."""
    text = "f (float[N,4] x) => (float[N,1] y) { [here] u = Sqrt(x)  y = MatMul(u, w) }"
    file = parse_model(text, opset=20, w=np.float32([[1], [2], [3], [4]]))
    y = THREE > 6 if make is OnnxClassifier else Z
    named = r"1 of 120 rows: 77$", r"output 'u'\) gives NaN in row 5;"
    for row, value, message in ((77, np.nan, named[0]), (5, -1.0, named[1])):
        data = np.abs(X)
        data[row] = value
        for seed in range(2):  # among the rows to train on, or among those that are held out
            options = {"early_stopping": True, "validation_fraction": 0.5, "random_state": seed}
            with pytest.raises((ValueError, og.ConvergenceError), match=message):
                make(file, max_iter=2, **options).fit(data, y)


def test_dicts_have_rows_that_are_held_out():
    text = """f (double[N,2] a, double[N,2] b) => (double[N,1] y) {
        x = Concat<axis = 1>(a, b)  y = MatMul(x, w) }"""
    file = parse_model(text, opset=20, w=np.array([[1.0], [2.0], [3.0], [4.0]]))
    options = {"early_stopping": True, "max_iter": 3, "random_state": 0}
    two = OnnxRegressor(file, **options).fit({"a": X[:, :2], "b": X[:, 2:]}, Z)
    assert len(two.validation_scores_) == 3


@pytest.mark.parametrize("options", [
    {"loss_options": {"ignore_nan": True}},
    {"loss": "absolute_error", "loss_options": {"ignore_nan": True}, "early_stopping": True},
    {"loss": og.losses.LOSSES["squared_error"].with_options({"ignore_nan": True})},
], ids=["option", "held out", "spec"])  # fmt: skip
def test_labels_that_are_left_out(options):
    """Those of a training without these rows, where they are all in one batch."""
    y, kept = np.where(Z > 1, np.nan, Z), Z <= 1
    options = {"max_iter": 4, "random_state": 0, "batch_size": 120, **options}
    ours = OnnxRegressor(**options).fit(X, y)
    assert np.isfinite(ours.predict(X)).all()
    if "early_stopping" not in options:
        expected = OnnxRegressor(**options).fit(X[kept], Z[kept])
        np.testing.assert_allclose(ours.predict(X), expected.predict(X), rtol=1e-6)
    assert np.isfinite(OnnxRegressor(**options).set_params(early_stopping=False)
        .partial_fit(X, y).predict(X)).all()  # fmt: skip
    for refused, labels in ((ours, np.where(Z > 1, np.inf, Z)), (OnnxRegressor(), y)):
        with pytest.raises(ValueError, match=naming("y", "contains")):
            refused.fit(X, labels)


def test_training_that_has_not_converged_says_so():
    with pytest.warns(ConvergenceWarning, match=r"max_iter=2 .*tol=None"):
        OnnxRegressor(max_iter=2).fit(X, Z)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert OnnxRegressor(max_iter=2, tol=None).fit(X, Z).n_iter_ == 2
    ended = OnnxRegressor(optimizer="sgd", learning_rate=1e-20, n_iter_no_change=3).fit(X, Z)
    assert ended.n_iter_ == 4


# -- among the tools of scikit-learn --------------------------------------------------------------


def test_a_grid_search_over_a_pipeline():
    data, labels = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[labels]
    small = OnnxClassifier(hidden_layer_sizes=(20,), max_iter=15, random_state=0)
    pipe = make_pipeline(StandardScaler(), small)
    grid = {"onnxclassifier__learning_rate": [1e-6, 0.1]}
    with joblib.parallel_config("threading"):
        search = GridSearchCV(pipe, grid, cv=2, n_jobs=2, error_score="raise").fit(data, names)
    assert search.best_params_ == {"onnxclassifier__learning_rate": 0.1}
    assert search.best_score_ > 0.93
    assert search.predict(data[:1]).tolist() == ["setosa"]
    again = clone(search.best_estimator_).fit(data, names)
    np.testing.assert_array_equal(again.predict_proba(data), search.predict_proba(data))
    aucs = cross_val_score(again, data, names, cv=2, scoring="roc_auc_ovr")
    assert aucs.min() > 0.95
    assert "OnnxClassifier" in search.best_estimator_._repr_html_()


def test_a_model_goes_through_clone_and_files(tmp_path):
    ours = OnnxClassifier(linear_scores(3), max_iter=2, random_state=0).fit(X, THREE)
    joblib.dump(ours, tmp_path / "model.joblib")
    loaded = joblib.load(tmp_path / "model.joblib")
    np.testing.assert_array_equal(loaded.predict_proba(X), ours.predict_proba(X))
    assert loaded.to_onnx() == ours.to_onnx()
    onnx.save(linear_scores(3), tmp_path / "network.onnx")
    path = OnnxClassifier(tmp_path / "network.onnx", max_iter=2, random_state=0)
    np.testing.assert_array_equal(path.fit(X, THREE).predict_proba(X), ours.predict_proba(X))
    assert clone(ours).model == ours.model
    assert len(repr(ours)) < 2000


def test_sample_weights_are_routed():
    weight = RNG.random(120)
    scaler = StandardScaler()
    with config_context(enable_metadata_routing=True):
        scaler.set_fit_request(sample_weight=False)
        ours = OnnxClassifier(random_state=0, max_iter=3).set_fit_request(sample_weight=True)
        pipe = make_pipeline(scaler, ours).fit(X, TWO, sample_weight=weight)
    scaled = StandardScaler().fit_transform(X)
    alone = OnnxClassifier(random_state=0, max_iter=3).fit(scaled, TWO, weight)
    np.testing.assert_allclose(pipe.predict_proba(X), alone.predict_proba(scaled))


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_frames(library):
    frames = pytest.importorskip(library)
    if library == "polars":  # before, it does not recognize frames of newer versions of polars
        pytest.importorskip("sklearn", minversion="1.7")
    table = frames.DataFrame({name: X[:, i] for i, name in enumerate("abcd")})
    ours = OnnxClassifier(max_iter=2, random_state=0).fit(table, frames.Series(TWO))
    assert ours.feature_names_in_.tolist() == list("abcd")
    np.testing.assert_array_equal(ours.predict(table), ours.predict(table[list("abcd")]))
    plain = OnnxClassifier(max_iter=2, random_state=0).fit(X, TWO)
    np.testing.assert_array_equal(ours.predict_proba(table), plain.predict_proba(X))
    with pytest.raises(ValueError, match="feature names"):
        ours.predict(table[list("bacd")])


def test_a_model_with_several_inputs_takes_a_table():
    pandas = pytest.importorskip("pandas")
    text = """f (float[N,1] a, float[N,1] b) => (float[N,1] y) {
        s = MatMul(a, v)  t = MatMul(b, w)  y = Add(s, t) }"""
    model = parse_model(text, opset=20, v=np.zeros((1, 1), np.float32), w=[[0.0]])
    table = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1]})
    y = X[:, 0] - 2 * X[:, 1]
    ours = OnnxRegressor(model, learning_rate=0.1, max_iter=150, tol=None).fit(table, y)
    np.testing.assert_allclose(ours.predict(table), y, atol=1e-3)
    np.testing.assert_allclose(ours.predict(table[["b", "a"]][["a", "b"]]), y, atol=1e-3)
    named = {"a": X[:, 0], "b": X[:, 1]}
    np.testing.assert_allclose(ours.predict(named), ours.predict(table))


def test_columns_that_skl2onnx_renames():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X[:, :2], columns=["width (cm)", "2nd"])
    scaled = ColumnTransformer([("scaled", StandardScaler(), ["2nd", "width (cm)"])])
    theirs = make_pipeline(scaled, LogisticRegression()).fit(table, TWO)
    ours = OnnxClassifier(theirs, max_iter=1, learning_rate=1e-30, tol=None).fit(table, TWO)
    assert [x.name for x in ours.to_onnx().graph.input] == ["width__cm_", "_2nd"]
    expected = theirs.predict_proba(table)
    np.testing.assert_allclose(ours.predict_proba(table), expected, atol=1e-6)


def test_images_and_static_batches():
    text = "f (float[8,2,2,1] x) => (float[8,1] y) { h = Flatten(x)  y = MatMul(h, w) }"
    model = parse_model(text, opset=20, w=np.zeros((4, 1), np.float32))
    images = X.reshape(120, 2, 2, 1)
    ours = OnnxClassifier(model, learning_rate=0.1, max_iter=20).fit(images, TWO)
    assert ours.score(images, TWO) > 0.9
    np.testing.assert_allclose(ours.predict_proba(images[:5]), ours.predict_proba(images)[:5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"max_iter": 0}, "max_iter"),
        ({"tol": -1}, "tol"),
        ({"n_iter_no_change": 0}, "n_iter_no_change"),
        ({"activation": "rleu"}, "'relu'"),
        ({"loss": "cross_entropie"}, "cross_entropy"),
        ({"optimizer": "adan"}, "adam"),
        ({"hidden_layer_sizes": (3, 0)}, "hidden_layer_sizes"),
        ({"train": ["layer.*"]}, "layers.0"),
        ({"early_stopping": True, "validation_fraction": 0.001}, "test_size"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        OnnxClassifier(**arguments).fit(X, TWO)


def test_frozen_layers_and_other_losses():
    ours = OnnxClassifier(random_state=0, freeze=["layers.0.*"], max_iter=2).fit(X, TWO)
    still = {"max_iter": 1, "learning_rate": 1e-30, "optimizer": "sgd"}
    new = OnnxClassifier(random_state=0, **still).fit(X, TWO)
    weights = [initializer_arrays(one.to_onnx()) for one in (ours, new)]
    same = {n for n, w in weights[0].items() if np.array_equal(w, weights[1][n])}
    assert {"layers.0.weight", "layers.0.bias"} <= same
    assert not {"layers.1.weight", "layers.1.bias"} & same
    hinge = OnnxClassifier(linear_scores(1), loss="hinge", learning_rate=0.1, max_iter=50).fit(
        X, TWO
    )
    assert hinge.score(X, TWO) > 0.9
    assert not hasattr(hinge, "predict_proba")
    assert hasattr(hinge, "decision_function")
    has = [hasattr(OnnxClassifier(loss=loss), "predict_proba") for loss in (None, "ce", "hinge")]
    assert has == [True, True, False]
    named = OnnxClassifier(linear_scores(3), loss={"y": "cross_entropy"}, max_iter=3).fit(X, THREE)
    assert named.predict_proba(X).shape == (120, 3)
    huber = OnnxRegressor(loss=og.losses.LOSSES["huber"], max_iter=3, random_state=0).fit(X, Z)
    assert np.isfinite(huber.predict(X)).all()
