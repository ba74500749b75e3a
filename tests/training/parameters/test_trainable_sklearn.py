"""What trains by default in models of scikit-learn; the table in the documentation."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest

from tests.support.paths import DOCS

pytest.importorskip("sklearn")
pytest.importorskip("skl2onnx")

from skl2onnx import to_onnx
from sklearn.decomposition import PCA
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge, SGDClassifier
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, RobustScaler, StandardScaler
from sklearn.svm import SVC, SVR, LinearSVC

from onnxgrad import trainable

PAGE = DOCS / "trainable.md"
LAYERS = {"hidden_layer_sizes": (5,), "max_iter": 5, "random_state": 0}
LINEAR = {"coefficients", "intercepts"}
OF_LAYERS = {"coefficient", "intercepts", "coefficient1", "intercepts1"}

ESTIMATORS = {  # and the parts of names, behind the last dot, of what trains
    "StandardScaler": (StandardScaler(), set()),
    "MinMaxScaler": (MinMaxScaler(), set()),
    "RobustScaler": (RobustScaler(), set()),
    "PCA": (PCA(2), {"transform_matrix"}),
    "LinearRegression": (LinearRegression(), LINEAR),
    "Ridge": (Ridge(), LINEAR),
    "LogisticRegression": (LogisticRegression(), LINEAR),
    "SGDClassifier": (SGDClassifier(loss="log_loss"), {"coef", "intercept"}),
    "StandardScaler, LogisticRegression": (
        make_pipeline(StandardScaler(), LogisticRegression()), LINEAR,
    ),
    "MLPRegressor": (MLPRegressor(**LAYERS), OF_LAYERS),
    "MLPClassifier": (MLPClassifier(**LAYERS), OF_LAYERS),
    "LinearSVC": (LinearSVC(), LINEAR),
    "SVR": (SVR(), {"coefficients", "rho"}),
    "SVC": (SVC(), {"coefficients", "rho"}),
    "KNeighborsRegressor": (KNeighborsRegressor(3), set()),
    "KNeighborsClassifier": (KNeighborsClassifier(3), set()),
    "GaussianProcessRegressor": (
        GaussianProcessRegressor(RBF()), {"gpr_MatMulcst", "gpr_Addcst"},
    ),
}  # fmt: skip


def rows_of_estimator(name):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 4)).astype(np.float32)
    y = x @ [1.0, -2.0, 0.5, 1.0] + 3
    estimator = ESTIMATORS[name][0]
    if name.endswith(("Classifier", "SVC", "LogisticRegression")):
        y = (y > 3).astype(int)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trainable(to_onnx(estimator.fit(x, y), x[:1]))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_sklearn(name):
    rows = rows_of_estimator(name)
    assert {t.name.rpartition(".")[2] for t in rows if t.trains} == ESTIMATORS[name][1], rows
    text = PAGE.read_text()
    for line in table_lines(name, rows):
        assert line in text, f"{PAGE.name} lacks: {line}"


def table_lines(name, rows):
    """Return the lines of the table about one estimator; names of nodes are counted up."""
    for t in rows:
        why = re.sub(r" '[^']*'", "", t.why)
        yield f"| {name} | `{t.name}` | {'yes' if t.trains else 'no'} | {why} |"
