"""The form of a model that trains, and the form that predicts: BatchNormalization and Dropout."""

from onnxgrad.training.modes.inference_form import (
    exported,
    has_training_nodes,
    inference_form,
    warn_of_stale_statistics,
)
from onnxgrad.training.modes.training_form import fold_normalizations, training_form
from onnxgrad.training.parameters.equal_constants import separate_statistics

__all__ = [
    "exported",
    "fold_normalizations",
    "has_training_nodes",
    "inference_form",
    "separate_statistics",
    "training_form",
    "warn_of_stale_statistics",
]
