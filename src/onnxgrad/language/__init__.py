"""Language models in the forms that users hold: folders, tokenizers, texts; and generation."""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
