"""Artifacts: files with which any onnxruntime trains a model, also where there is no Python."""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
