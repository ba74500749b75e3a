"""Data-parallel training by several processes: their groups, and nodes that exchange values."""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
