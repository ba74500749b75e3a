"""ONNX models as operations of PyTensor, for PyMC: `model_op.py`."""

from onnxgrad.pytensor.model_op import OnnxOp

__all__ = ["OnnxOp"]
