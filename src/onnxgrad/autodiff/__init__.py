"""Differentiating ONNX graphs."""

from onnxgrad.autodiff import control, late

__all__ = ["control", "late"]
