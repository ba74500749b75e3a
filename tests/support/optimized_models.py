"""What onnxruntime's optimizer writes of a model, by level."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx
import onnxruntime as ort

LEVELS = {
    "plain": None,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def optimized_model(model: onnx.ModelProto, level: str) -> onnx.ModelProto:
    """Return the file that onnxruntime writes of a model; "plain" is the model itself."""
    if LEVELS[level] is None:
        return model
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = LEVELS[level]
        options.optimized_model_filepath = str(Path(folder) / "model.onnx")
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath)
