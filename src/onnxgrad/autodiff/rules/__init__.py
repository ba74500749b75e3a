"""The rules: one file per operator family. Importing this package registers them."""

from onnxgrad.autodiff.rules import (
    activation,
    arithmetic,
    columns,
    constant,
    convolution,
    indexing,
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
