"""Lowerings: operators that are rewritten to others before differentiation, a file per family."""

from onnxgrad.autodiff.primal.lowerings import (
    attention,
    basic,
    microsoft,
    microsoft_attention,
    microsoft_grouped,
    microsoft_norms,
    microsoft_quantized,
    ml,
    recurrent,
    sequences,
    svm,
)
