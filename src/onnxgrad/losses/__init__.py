"""Losses and penalties. Importing this package registers the losses."""

from onnxgrad.losses import formulas

# isort: split
from onnxgrad.losses import causal, ctc, embeddings, segmentation

__all__ = ["causal", "ctc", "embeddings", "formulas", "segmentation"]
