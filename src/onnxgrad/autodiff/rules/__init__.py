"""The rules: one file per operator family. Importing this package registers them."""

from onnxgrad.autodiff.rules import (
    activation,
    arithmetic,
    columns,
    constant,
    convolution,
    cumulative,
    einsum,
    few_bits,
    indexing,
    layout,
    linear,
    losses,
    normalization,
    pooling,
    quantization,
    reduction,
    regions,
    resize,
    sampling,
    sequences,
    shape,
    spectral,
)
from onnxgrad.autodiff.rules.registry import (
    NON_DIFFERENTIABLE,
    RULES,
    SUBGRAPH_RULES,
    Unsupported,
    elementwise,
    rule,
    taken_gradients,
)

__all__ = [
    "NON_DIFFERENTIABLE",
    "RULES",
    "SUBGRAPH_RULES",
    "Unsupported",
    "elementwise",
    "rule",
    "taken_gradients",
]
