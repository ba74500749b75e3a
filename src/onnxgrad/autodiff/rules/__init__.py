"""The rules: one file per operator family, read by importing this package."""

from onnxgrad.autodiff.rules import (
    activation,
    arithmetic,
    constant,
    convolution,
    indexing,
    layout,
    linear,
    losses,
    normalization,
    pooling,
    quantization,
    reduction,
    shape,
    spectral,
)
from onnxgrad.autodiff.rules.registry import (
    CONSTANT,
    RULES,
    Refused,
    elementwise,
    rule,
    taken_gradients,
)

__all__ = ["CONSTANT", "RULES", "Refused", "elementwise", "rule", "taken_gradients"]
