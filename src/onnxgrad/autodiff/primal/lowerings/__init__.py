"""Operators that `prepare` rewrites, so that no rule has to know them: one file per family."""

from onnxgrad.autodiff.primal.lowerings import (
    attention,
    basic,
    linear_attention,
    microsoft,
    microsoft_attention,
    microsoft_grouped,
    microsoft_norms,
    ml,
    recurrent,
    sequences,
    svm,
)
from onnxgrad.autodiff.primal.lowerings.registry import LOWERINGS, ON_DEMAND, lowering

__all__ = ["LATE", "LOWERINGS", "lowering"]
