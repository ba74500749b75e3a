"""Losses and penalties. Importing this package registers the losses."""

from onnxgrad.lazy_names import offer_names
from onnxgrad.losses import formulas

# isort: split
from onnxgrad.losses import causal, ctc, embeddings, image_losses

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
