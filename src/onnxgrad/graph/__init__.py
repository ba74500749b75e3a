"""Graphs of `onnx_ir`: writing nodes, inferring shapes and types, removing unused nodes."""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
