"""ONNX models as functions of JAX: `model_function.py`, and `graph_call.py` with JAX's rules."""

from onnxgrad.jax.model_function import ModelFunction, function

__all__ = ["ModelFunction", "function"]
