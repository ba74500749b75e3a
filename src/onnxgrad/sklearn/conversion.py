"""Convert a trained model of scikit-learn to ONNX by skl2onnx, as the start of a training."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
from onnx import ModelProto
from sklearn.base import clone, is_classifier
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted, has_fit_parameter

from onnxgrad.data.columns import is_table
from onnxgrad.errors import ModelError, not_installed
from onnxgrad.model.feeds import inputs_without_default
from onnxgrad.model.read import read


def is_estimator(model: Any) -> bool:
    """Return whether a model is an estimator of scikit-learn, not an ONNX model."""
    return hasattr(model, "get_params")


def takes_tables(model: Any) -> bool:
    """Return whether a model needs tables as X, as it has several inputs or chooses
    columns by name.
    """
    if isinstance(model, Pipeline):
        return any(is_estimator(step) and takes_tables(step) for _, step in model.steps)
    if model is None or is_estimator(model):
        return isinstance(model, ColumnTransformer)
    return len(inputs_without_default(read(model))) > 1


def holds_text(X: Any) -> bool:
    """Return whether an array or a table holds text."""
    array = np.asarray(X)
    return array.dtype.kind in "US" or (
        array.dtype == object and any(isinstance(v, str) for v in array[:1].ravel().tolist())
    )


def convert_estimator(model: Any, X: Any, y: Any, sample_weight: Any) -> ModelProto:
    """Return the ONNX model of an estimator of scikit-learn, in float32.

    An estimator that is not fitted yet is cloned, and the clone is fitted to the data.

    Args:
        model: the estimator, or a `FrozenEstimator` of one; it is not changed.
        X: the data of `fit`.
        y: the labels of `fit`.
        sample_weight: the sample weights of `fit`, or None; passed on if the estimator takes them.

    Raises:
        ImportError: skl2onnx is missing.
        ModelError: skl2onnx cannot convert the estimator.
    """
    try:
        from skl2onnx import to_onnx
    except ImportError as e:
        what = f"model={type(model).__name__}, which is no ONNX model,"
        raise not_installed(what, "skl2onnx", "sklearn") from e
    if isinstance(model, FrozenEstimator):
        model = model.estimator
    try:
        check_is_fitted(model)
    except NotFittedError:
        weighted = sample_weight is not None and has_fit_parameter(model, "sample_weight")
        model = clone(model).fit(X, y, **{"sample_weight": sample_weight} if weighted else {})
    try:
        return _convert_without_zipmap(to_onnx, model, _first_row(X))
    except Exception as e:
        raise ModelError(f"skl2onnx cannot convert {type(model).__name__}: {e}") from e


def _convert_without_zipmap(to_onnx: Any, model: Any, row: Any) -> ModelProto:
    """Return the ONNX model of a scikit-learn estimator, with probabilities as an array, not as
    dicts.
    """
    if is_classifier(model):
        with suppress(NameError):  # LinearSVC has no option `zipmap`
            return to_onnx(model, row, options={"zipmap": False})
    return to_onnx(model, row)


def _first_row(X: Any) -> Any:
    """Return the first row of X, with floats as float32, for skl2onnx to read the dtypes."""
    if not is_table(X):
        if holds_text(X):
            return np.asarray(X[:1], str)
        return np.asarray(X[:1], np.float32)
    row = X.to_pandas() if hasattr(X, "to_pandas") else X
    row = row.iloc[:1]
    wide = [name for name, dtype in row.dtypes.items() if dtype == np.float64]
    return row.astype(dict.fromkeys(wide, np.float32))
