"""Artifacts: files with which any onnxruntime trains a model, also where there is no Python."""

from onnxgrad.artifacts.generate import generate_artifacts
from onnxgrad.artifacts.merge import merge_artifacts

__all__ = ["generate_artifacts", "merge_artifacts"]
