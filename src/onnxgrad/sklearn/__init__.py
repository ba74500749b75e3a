"""Estimators with the interface of scikit-learn, whose network is an ONNX model."""

from onnxgrad.errors import not_installed

try:
    import sklearn
except ImportError as e:
    raise not_installed("an estimator", "scikit-learn", "sklearn") from e

from onnxgrad.sklearn.estimators import OnnxClassifier, OnnxRegressor

__all__ = ["OnnxClassifier", "OnnxRegressor"]
