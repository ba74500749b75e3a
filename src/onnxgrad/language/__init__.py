"""Language models: their folders, tokenizers and texts, encoder-decoders, and generation."""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
