"""Estimators with the manners of scikit-learn, whose network is an ONNX model."""

try:
    import sklearn
except ImportError as e:
    raise ImportError(
        "OnnxClassifier and OnnxRegressor need scikit-learn: pip install onnxgrad[sklearn]"
    ) from e

from onnxgrad.sklearn.classifier import OnnxClassifier
from onnxgrad.sklearn.regressor import OnnxRegressor

__all__ = ["OnnxClassifier", "OnnxRegressor"]
