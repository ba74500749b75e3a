"""Files of scikit-learn, LightGBM and XGBoost: what trains, and that it does."""

from __future__ import annotations

import re
import warnings
from itertools import groupby

import numpy as np
import onnx
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("skl2onnx")

from skl2onnx import to_onnx
from sklearn.base import clone, is_regressor
from sklearn.calibration import CalibratedClassifierCV
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA, KernelPCA, TruncatedSVD
from sklearn.discriminant_analysis import (
    LinearDiscriminantAnalysis,
    QuadraticDiscriminantAnalysis,
)
from sklearn.ensemble import (
    AdaBoostClassifier,
    AdaBoostRegressor,
    BaggingClassifier,
    RandomForestClassifier,
    StackingClassifier,
    StackingRegressor,
    VotingClassifier,
)
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, DotProduct, Matern
from sklearn.impute import KNNImputer, SimpleImputer
from sklearn.linear_model import (
    BayesianRidge,
    LogisticRegression,
    Ridge,
    RidgeClassifier,
    SGDClassifier,
)
from sklearn.metrics import log_loss
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier
from sklearn.naive_bayes import (
    BernoulliNB,
    CategoricalNB,
    ComplementNB,
    GaussianNB,
    MultinomialNB,
)
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import (
    KBinsDiscretizer,
    MinMaxScaler,
    Normalizer,
    OrdinalEncoder,
    PolynomialFeatures,
    PowerTransformer,
    QuantileTransformer,
    StandardScaler,
)
from sklearn.random_projection import GaussianRandomProjection
from sklearn.svm import SVC, SVR, LinearSVC, NuSVC

from onnxgrad import Trainer, check_gradient, trainable
from onnxgrad.model.weights import constant_refs, replace_constants
from tests.support.errors import naming
from tests.support.running import in_sweep, run

RNG = np.random.default_rng(0)
X = np.abs(RNG.standard_normal((60, 4))).astype(np.float32)
SCORE = X @ np.array([1.0, -2.0, 0.5, 1.0], np.float32)
Y = SCORE + 0.3 * RNG.standard_normal(60).astype(np.float32)
CLASS = (Y > 0.1).astype(np.int64)
SHIFTED = {"y": Y + 0.5, "class": np.where(np.arange(60) % 5, CLASS, 1 - CLASS)}  # to train on
KERNEL = RBF() + DotProduct()


def fitted_model(estimator, y, x=X, **options) -> onnx.ModelProto:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return to_onnx(estimator.fit(x, y), x[:1], **options)


def short_names(names) -> list[str]:
    """Return the parts behind the dot, without numbers, each once."""
    parts = (re.sub(r"\d*$", "", name.rpartition(".")[2]) for name in names)
    return sorted(name for name, _ in groupby(sorted(parts)))


def without_weights(proto: onnx.ModelProto, names) -> bytes:
    """Return the graph with zeros for the weights of these names."""
    zeros = {r.name: np.zeros_like(r.array()) for r in constant_refs(proto) if r.name in names}
    return replace_constants(proto, zeros).graph.SerializeToString(deterministic=True)


def assert_trains(proto, y, expected, loss, rate=1e-2, x=X) -> None:
    """Train for 20 steps: the loss falls, the weights move, and nothing else changes."""
    trainer = Trainer(proto, loss, learning_rate=rate)
    assert short_names(trainer.trained) == sorted(expected)
    before = trainer.evaluate(x, y)["loss"]
    trainer.fit(x, y, epochs=5, batch_size=15)
    assert trainer.evaluate(x, y)["loss"] < before
    old, new = ({r.name: r.array() for r in constant_refs(m)} for m in (proto, trainer.model))
    assert not any(np.array_equal(old[n], new[n]) for n in trainer.trained)
    assert without_weights(proto, trainer.trained) == without_weights(
        trainer.model, trainer.trained
    )


LAYERS = {"hidden_layer_sizes": (5,), "max_iter": 3}
LINEAR = {"coefficients", "intercepts"}
MODELS = {  # and what trains
    "BayesianRidge": (BayesianRidge(), LINEAR),
    "LDA": (LinearDiscriminantAnalysis(), LINEAR),
    "QDA": (QuadraticDiscriminantAnalysis(), {"rotations"}),
    "GaussianNB": (GaussianNB(), {"theta", "sigma", "jointi", "sigma_sum_log"}),
    "MultinomialNB": (MultinomialNB(), {"feature_log_prob", "class_log_prior"}),
    "CategoricalNB": (CategoricalNB(), {"feature_log_proba", "class_log_prior"}),
    "LogisticRegression": (LogisticRegression(), LINEAR),
    "MLPClassifier": (MLPClassifier(**LAYERS), {"coefficient", "intercepts"}),
    "SVR": (SVR(), {"coefficients", "rho"}),
    "SVC": (SVC(probability=True), {"coefficients", "rho", "prob_a", "prob_b"}),
    "VotingClassifier": (
        VotingClassifier(
            [("a", LogisticRegression()), ("b", RandomForestClassifier(3))],
            voting="soft",
            flatten_transform=False,
        ),
        LINEAR,
    ),
    "StackingRegressor": (StackingRegressor([("a", Ridge()), ("b", SVR())]), LINEAR | {"rho"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    estimator, expected = MODELS[name]
    target, labels = ("y", Y) if is_regressor(estimator) else ("class", CLASS)
    loss = "mse" if target == "y" else "cross_entropy"
    assert_trains(fitted_model(estimator, labels), SHIFTED[target], expected, loss, 3e-3)


TRANSFORMERS = [
    StandardScaler(), MinMaxScaler(), Normalizer(), PCA(3, whiten=True), TruncatedSVD(3),
    KernelPCA(3, kernel="rbf"), KernelPCA(3), QuantileTransformer(n_quantiles=20),
    PowerTransformer(), PolynomialFeatures(2), SimpleImputer(), KNNImputer(),
    GaussianRandomProjection(3, random_state=0), make_union(PCA(2), StandardScaler()),
    KBinsDiscretizer(3, encode="ordinal", quantile_method="averaged_inverted_cdf"),
    OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1),
]  # fmt: skip
LAST = {
    "LogisticRegression": (LogisticRegression(), LINEAR),
    "SGDClassifier": (SGDClassifier(loss="log_loss"), {"coef", "intercept"}),
    "MLPRegressor": (MLPRegressor(**LAYERS), {"coefficient", "intercepts"}),
    "GaussianNB": (GaussianNB(), {"theta", "sigma", "jointi", "sigma_sum_log"}),
    "forest": (RandomForestClassifier(3), set()),
    "neighbors": (KNeighborsRegressor(), set()),
}


@pytest.mark.parametrize("last", [n if n == "MLPRegressor" else in_sweep(n) for n in LAST])
@pytest.mark.parametrize("transformer", TRANSFORMERS, ids=str)
def test_transformers_in_front_stay(transformer, last):
    model, expected = LAST[last]
    proto = fitted_model(make_pipeline(transformer, model), CLASS)
    assert short_names(t.name for t in trainable(proto) if t.trains) == sorted(expected)


def test_logistic_regression_trains_to_the_optimum_of_scikit_learn():
    """Its default export holds both classes, as opposite numbers, and they stay opposite."""
    y = SHIFTED["class"]
    trainer = Trainer(
        fitted_model(LogisticRegression(C=0.01), y), "cross_entropy", learning_rate=0.1
    )
    trainer.fit(X, y, epochs=400, batch_size=60)
    best = LogisticRegression(C=1e9).fit(X, y)
    found = trainer.evaluate(X, y)["loss"]
    assert found == pytest.approx(log_loss(y, best.predict_proba(X)), abs=1e-4)
    arrays = [r.array() for r in constant_refs(trainer.model)]
    assert len(arrays) == 2
    for array in arrays:
        first, second = np.split(array, 2)
        np.testing.assert_allclose(first, -second, rtol=1e-5)
    label, maps = run(trainer.model, X=X)
    p = np.array([row[1] for row in maps])
    assert found == pytest.approx(log_loss(y, p), abs=1e-5)
    np.testing.assert_array_equal(label, p > 0.5)


@pytest.mark.parametrize("optim", [None, in_sweep("cdist")])
@pytest.mark.parametrize(
    "kernel", [RBF(), KERNEL, in_sweep(None), in_sweep(Matern(nu=1.5))], ids=str
)
def test_gaussian_processes_train_their_dual_coefficients(kernel, optim):
    options = {"options": {GaussianProcessRegressor: {"optim": optim}}} if optim else {}
    proto = fitted_model(GaussianProcessRegressor(kernel, alpha=0.1), Y, X, **options)
    assert_trains(proto, SHIFTED["y"], {"gpr_MatMulcst", "gpr_Addcst"}, "mse", 1e-4)
    # that of a length scale is 1e-9 here, next to a term of 0.7
    report = check_gradient(proto, feed={"X": X[:3] + 0.1}, rtol=1e-5)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("estimator", "why"),
    [
        (RandomForestClassifier(3), "TreeEnsembleClassifier .* thresholds"),
        (AdaBoostRegressor(n_estimators=2), "TreeEnsembleRegressor .* thresholds"),
        (KNeighborsRegressor(), "TopK .* stored rows"),
        (KNeighborsClassifier(), "TopK .* stored rows"),
        (KMeans(3), "stored rows,.* Gemm"),
        (GaussianProcessClassifier(), r"Solve .* onnxruntime .*select"),
    ],
    ids=str,
)
def test_refused(estimator, why):
    with pytest.raises(ValueError, match=why):
        Trainer(fitted_model(estimator, CLASS), "mse").fit(X, CLASS)


THREE = np.digitize(Y, np.quantile(Y, [0.3, 0.7]))
CLASSIFIERS = [
    LogisticRegression(), SGDClassifier(loss="log_loss", random_state=0), SGDClassifier(),
    RidgeClassifier(), LinearSVC(), SVC(), NuSVC(nu=0.2), SVC(kernel="poly"),
    SVC(probability=True, random_state=0), GaussianNB(), MultinomialNB(), ComplementNB(),
    CategoricalNB(), LinearDiscriminantAnalysis(), QuadraticDiscriminantAnalysis(),
    MLPClassifier((5,), max_iter=3, random_state=0), BaggingClassifier(LogisticRegression(), 3),
    OneVsRestClassifier(LogisticRegression()), OneVsOneClassifier(LogisticRegression()),
    CalibratedClassifierCV(LinearSVC(), cv=2),
    AdaBoostClassifier(LogisticRegression(), n_estimators=3),
    StackingClassifier([("a", LogisticRegression()), ("b", GaussianNB())], cv=2),
]  # fmt: skip


MAIN = {"SGDClassifier3", "RidgeClassifier2", "SVC2", "SVC3", "GaussianNB3", "BaggingClassifier2"}
MAIN |= {"MLPClassifier2", "OneVsOneClassifier3", "CalibratedClassifierCV3"}
CASES = [
    (m, n) if f"{type(m).__name__}{n}" in MAIN else in_sweep((m, n))
    for m in CLASSIFIERS
    for n in (2, 3)
    if n == 2 or getattr(m, "probability", None) is not True
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_labels_follow_what_trains(case):
    """The labels of the file are those of its largest columns, and probabilities have the sum 1."""
    model, classes = case
    y = CLASS if classes == 2 else THREE
    shifted = np.where(np.arange(60) % 5, y, (y + 1) % classes)
    try:
        proto = fitted_model(clone(model), y, options={"zipmap": False})
    except NameError:  # without this option
        proto = fitted_model(clone(model), y)
    before = run(proto, X=X)[1].reshape(60, -1)
    svm, one = isinstance(model, SVC | NuSVC), before.shape[1] == 1
    loss = "binary_cross_entropy" if one else "cross_entropy"
    trainer = Trainer(proto, loss, learning_rate=1e-2)
    if svm and classes == 2 and model.probability is not True:
        with pytest.raises(ValueError, match=naming("SVMClassifier", "labels", "OnnxCla")):
            trainer.evaluate(X, shifted)
        return
    if isinstance(model, AdaBoostClassifier):  # it counts votes, whose weights do not train
        with pytest.raises(ValueError, match="path"):
            trainer.fit(X, shifted)
        return
    first = trainer.evaluate(X, shifted)["loss"]
    trainer.fit(X, shifted, epochs=10, batch_size=60)
    last = trainer.evaluate(X, shifted)["loss"]
    assert last < first
    label, scores = run(trainer.model, X=X)
    scores = scores.reshape(60, -1)
    largest = scores[:, 0] > 0 if one else scores.argmax(axis=1)
    assert (label.ravel() == largest).mean() > (0.9 if svm else 0.999)  # votes may differ
    if np.allclose(before.sum(axis=1), 1, atol=1e-4):
        np.testing.assert_allclose(scores.sum(axis=1), 1, atol=1e-4)
        p = scores[np.arange(60), shifted]
        if not isinstance(model, OneVsOneClassifier) and p.min() > 1e-6:
            # onnxruntime iterates toward the probabilities, within 0.005
            assert last == pytest.approx(-np.log(p).mean(), abs=1e-2 if svm else 1e-4)


def test_large_scores_of_several_classes_train():
    """The file writes 1 / (1 + exp(-s)), which overflows; the loss is computed from s."""
    big = SGDClassifier(loss="log_loss", random_state=0).fit(X, THREE)
    big.coef_ *= 1e3 / np.abs(big.coef_).max()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        proto = to_onnx(big, X[:1], options={"zipmap": False})
    trainer = Trainer(proto, "cross_entropy", learning_rate=1.0)
    before = trainer.evaluate(X, THREE)["loss"]
    s = big.decision_function(X.astype(np.float64))
    log_p = -np.logaddexp(0, -s)
    log_p -= np.logaddexp.reduce(log_p, axis=1, keepdims=True)
    assert before == pytest.approx(-log_p[np.arange(60), THREE].mean(), rel=1e-4)
    trainer.fit(X, THREE, epochs=5, batch_size=60)
    assert trainer.evaluate(X, THREE)["loss"] < before


@pytest.mark.parametrize(
    ("model", "y", "why"),
    [
        (SGDClassifier(loss="modified_huber"), CLASS, r"clipped by Clip .* loss=\{'score':"),
        (SVC(), THREE, r"adds votes, which have no gradient, .* computed from 'Csvcconc'"),
        (OneVsRestClassifier(LinearSVC()), THREE, "divided by its sum, .* taken for scores"),
    ],
)
def test_what_trains_otherwise_than_it_looks_is_said(model, y, why, caplog):
    proto = fitted_model(clone(model), y, options={"zipmap": False})
    Trainer(proto, "cross_entropy").evaluate(X, y)
    assert re.search(why, caplog.text)


def test_coupled_probabilities_are_refused_and_their_scores_train():
    svc = SVC(probability=True, random_state=0)
    proto = fitted_model(svc, THREE, options={"zipmap": False})
    with pytest.raises(NotImplementedError, match=naming("'SVMc'", "3 classes", "probability=Fal")):
        Trainer(proto, "cross_entropy").fit(X, THREE)
    svc.set_params(probability=False)
    proto = fitted_model(svc, THREE, options={"zipmap": False})
    trainer = Trainer(proto, "cross_entropy", learning_rate=1e-2)
    before = trainer.evaluate(X, THREE)["loss"]
    trainer.fit(X, THREE, epochs=5, batch_size=60)
    assert trainer.evaluate(X, THREE)["loss"] < before


def test_scores_of_pairs_are_refused():
    proto = fitted_model(SVC(decision_function_shape="ovo"), THREE, options={"zipmap": False})
    with pytest.raises(ValueError, match=naming("3 classes", "SVMClassifier", "'ovr'")):
        Trainer(proto, "cross_entropy").fit(X, THREE)
    two = Trainer(fitted_model(SVC(), CLASS), "cross_entropy", loss_options={"from_logits": True})
    before = two.evaluate(X, 1 - SHIFTED["class"])["loss"]
    two.fit(X, 1 - SHIFTED["class"], epochs=5, batch_size=60)
    assert two.evaluate(X, 1 - SHIFTED["class"])["loss"] < before


def test_one_score_is_no_softmax():
    proto = fitted_model(LinearSVC(), CLASS)
    with pytest.raises(ValueError, match=naming("score", "'binary_cross_entropy'")):
        Trainer(proto, "cross_entropy").fit(X, CLASS)
    assert_trains(proto, CLASS, LINEAR, "binary_cross_entropy")


def test_binary_features_of_a_naive_bayes():
    assert_trains(fitted_model(BernoulliNB(binarize=0.5), CLASS), SHIFTED["class"],
           {"feature_log_prob", "class_log_prior"}, "cross_entropy", 1e-4)  # fmt: skip


def test_a_layer_behind_the_trees_of_lightgbm():
    lightgbm, tools = pytest.importorskip("lightgbm"), pytest.importorskip("onnxmltools")
    from onnxmltools.convert.common.data_types import FloatTensorType

    model = lightgbm.LGBMRegressor(n_estimators=3, min_child_samples=5, verbose=-1).fit(X, Y)
    types = [("X", FloatTensorType([None, 4]))]
    trees = tools.convert_lightgbm(model, initial_types=types, target_opset=15)
    with pytest.raises(ValueError, match=r"TreeEnsembleRegressor .* thresholds"):
        Trainer(trees, "mse").fit(X, Y)
    assert_trains(with_linear_layer(trees), SHIFTED["y"], {"scale", "bias"}, "mse")


def test_the_trees_of_xgboost():
    xgboost, tools = pytest.importorskip("xgboost"), pytest.importorskip("onnxmltools")
    from onnxmltools.convert.common.data_types import FloatTensorType

    types = [("X", FloatTensorType([None, 4]))]
    for model in (xgboost.XGBRegressor(n_estimators=3), xgboost.XGBClassifier(n_estimators=3)):
        trees = tools.convert_xgboost(model.fit(X, CLASS), initial_types=types, target_opset=15)
        with pytest.raises(ValueError, match=r"TreeEnsemble.* thresholds"):
            Trainer(trees, "mse").fit(X, CLASS)


def with_linear_layer(trees: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with a linear layer behind its output."""
    made = onnx.ModelProto()
    made.CopyFrom(trees)
    [old] = trees.graph.output
    layer = onnx.parser.parse_graph(
        f"""g (float[N, 1] {old.name}) => (float[N, 1] z)
        <float[1, 1] scale = {{1.0}}, float[1] bias = {{0.0}}>
        {{ product = MatMul ({old.name}, scale) z = Add (product, bias) }}"""
    )
    made.graph.node.extend(layer.node)
    made.graph.initializer.extend(layer.initializer)
    made.graph.output[0].CopyFrom(layer.output[0])
    return made


def test_weights_of_votes_do_not_train():
    """Otherwise the averaged probabilities no longer sum to 1."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(60, 4)), np.arange(60) % 3
    voters = [("a", LogisticRegression(max_iter=500)), ("b", GaussianNB())]
    vote = VotingClassifier(voters, voting="soft", flatten_transform=False).fit(X, y)
    proto = to_onnx(vote, X[:1].astype(np.float32), options={"zipmap": False})
    rows = {t.name: t for t in trainable(proto)}
    assert not rows["w0"].trains
    assert rows["LinearClassifier.coefficients"].trains
