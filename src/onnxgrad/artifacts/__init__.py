"""Artifacts: the files with which any onnxruntime trains a model, also on a device without Python."""

from onnxgrad.artifacts.generate import generate_artifacts
from onnxgrad.artifacts.merge import merge_artifacts

__all__ = ["generate_artifacts", "merge_artifacts"]
