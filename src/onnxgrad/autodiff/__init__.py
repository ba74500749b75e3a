"""Differentiating ONNX graphs."""

from onnxgrad.autodiff import control, on_demand

__all__ = ["control", "on_demand"]
