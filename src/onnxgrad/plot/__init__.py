"""Pictures, tables, texts and reports of models and trainings."""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
