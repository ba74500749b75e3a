"""How tests run models, on the CPU by onnxruntime, and which of their cases are of the sweep."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

Model = onnx.ModelProto | bytes | str | os.PathLike
CHROMIUM = Path("/usr/lib/chromium")  # has a driver of WebGPU that computes on the CPU
PATIENCE = 600  # seconds, for what ends at once where it is right, however busy the machine is


def session_of(model: Model) -> ort.InferenceSession:
    """Return a session of a model, serialized model or path."""
    options = ort.SessionOptions()
    options.log_severity_level = 3  # no warnings, as of initializers that nothing reads
    data = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def run(model: Model, feed: Mapping[str, Any] | None = None, **inputs: Any) -> list[Any]:
    """Return the outputs of a model; `feed` may hold more than it takes, `inputs` may not."""
    return _run(session_of(model), feed or {}, inputs)


def run_named(model: Model, feed: Mapping[str, Any] | None = None, **inputs: Any) -> dict[str, Any]:
    """Return the outputs of a model by name, as `run`."""
    session = session_of(model)
    names = [y.name for y in session.get_outputs()]
    return dict(zip(names, _run(session, feed or {}, inputs), strict=True))


def _run(session: ort.InferenceSession, feed: Mapping[str, Any], inputs: dict) -> list[Any]:
    optional = session.get_overridable_initializers()
    kinds = {x.name: x.type for x in (*session.get_inputs(), *optional)}
    fed = {name: value for name, value in feed.items() if name in kinds} | inputs
    tensors = {name for name, kind in kinds.items() if kind.startswith("tensor")}
    return session.run(None, {n: np.asarray(v) if n in tensors else v for n, v in fed.items()})


def webgpu_on_cpu() -> dict[str, str]:
    """Return variables of the environment by which WebGPU computes on the CPU, or skip the test."""
    pytest.importorskip("onnxruntime_ep_webgpu")
    driver = CHROMIUM / "vk_swiftshader_icd.json"
    if not driver.exists():
        pytest.skip("there is no driver of WebGPU that computes on the CPU")
    return {
        "VK_ICD_FILENAMES": str(driver),
        "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1",
        "LD_LIBRARY_PATH": str(CHROMIUM),
    }


def in_sweep(*values: Any) -> Any:
    """Return the values of a parametrized test, of the sweep (`pytest -m sweep`)."""
    return pytest.param(*values, marks=pytest.mark.sweep)
