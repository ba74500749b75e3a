"""Optimizers: chains of transforms that turn a gradient into a weight step, written as ONNX nodes.

The input of the first transform is the gradient; the output of the last one is added to the weight.
A transform may keep slots from step to step. Optimizers are frozen dataclasses: compared, printed
and pickled by their parameters.
"""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
