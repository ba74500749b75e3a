"""Data that users pass: arrays, tables, and checks against what a model declares."""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
