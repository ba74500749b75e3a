"""Metrics of predictions, updated batch by batch and computed at the end."""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
