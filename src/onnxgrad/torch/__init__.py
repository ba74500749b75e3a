"""ONNX models as modules of PyTorch."""

from onnxgrad.torch.module import OnnxModule

__all__ = ["OnnxModule"]
