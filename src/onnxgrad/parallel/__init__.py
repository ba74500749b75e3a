"""Several processes that train one model: how they exchange numbers, and graphs that ask for it."""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
