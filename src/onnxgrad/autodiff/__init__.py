"""Gradients of graphs."""

from onnxgrad.autodiff import control
