"""Models in the format of onnxruntime, `.ort`, which builds for small devices read."""

from __future__ import annotations

import os
from pathlib import Path

import onnxruntime as ort

from onnxgrad.errors import printable
from onnxgrad.model.write import data_files
from onnxgrad.runtime.device import CPU

LARGEST = 1 << 31  # bytes: of the offsets in such a file


def write_ort(model: Path, path: Path) -> None:
    """Write the model of a file in the format of onnxruntime.

    Only optimizations are done whose results are standard operators, and that fit all processors.

    Raises:
        ValueError: the model is too large for the format.
    """
    size = sum(file.stat().st_size for file in {model, *data_files(model)})
    if size >= LARGEST:
        file = printable(model.name)
        raise ValueError(f"{file} has {size} bytes, too many for .ort: pass ort_format=False")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = os.fspath(path)
    options.add_session_config_entry("session.save_model_format", "ORT")
    options.log_severity_level = 4
    ort.InferenceSession(os.fspath(model), options, providers=CPU.providers)
