"""User data: readers, tables, transforms, and checks against the declared inputs of a model."""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
