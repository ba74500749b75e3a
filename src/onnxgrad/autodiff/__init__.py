"""Differentiating ONNX graphs."""

from onnxgrad.autodiff import control

__all__ = ["control"]
