"""The public names of `onnxcustom.training` and `experimental_experiment.gradient`."""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
