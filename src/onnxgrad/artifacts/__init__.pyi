"""Artifacts: files with which any onnxruntime trains a model, also where there is no Python."""

from onnxgrad.artifacts.generate import (
    generate_artifacts as generate_artifacts,
)
from onnxgrad.artifacts.merge import (
    merge_artifacts as merge_artifacts,
)
