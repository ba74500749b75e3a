"""Losses and penalties. Importing this package registers the losses."""

from onnxgrad.losses import formulas

# isort: split
from onnxgrad.losses import ctc, embeddings, segmentation

__all__ = ["ctc", "embeddings", "formulas", "segmentation"]
