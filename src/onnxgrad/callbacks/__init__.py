"""Callbacks of a training, the training state and the progress that they read.

They are defined in `onnxgrad.training` and `onnxgrad.report`.
"""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
