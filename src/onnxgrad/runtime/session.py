"""Sessions: onnxruntime with the device and the number of threads that the work asks for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx_ir as ir
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.errors import ProviderError, escaping
from onnxgrad.graph import shapes
from onnxgrad.model import external
from onnxgrad.model.normalize import dense_inside
from onnxgrad.runtime.device import Device, Provider

# Multiply-adds of a forward pass that are worth a thread of their own: measured on MLPs and CNNs
WORK_PER_THREAD = 1e6
_KNOWS_FOLDER = tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 21)
_FOLDER = "session.model_external_initializers_file_folder_path"


def threads(work: float) -> int:
    """Return how many threads pay for a step of `work` multiply-adds.

    A rule and not a measurement, so that the same run gives the same bits again.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, int(work / WORK_PER_THREAD)))


def session(model: ModelProto, device: Device, work: float) -> ort.InferenceSession:
    """Return a session for `model`, whose one run does `work` multiply-adds per step."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads(work)
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised; the log shows names as they are
    return loaded(model, options, providers=device.providers)


@escaping()
def loaded(model: ModelProto, options: ort.SessionOptions, **more: Any) -> ort.InferenceSession:
    """Return a session for a model of any size.

    External data stay mapped into memory: onnxruntime would pack weights anew, and compute
    transposed ones beforehand. `options` then hold the folder of the data, too.
    """
    model = dense_inside(model)
    with ExitStack() as stack:
        if external.held(model) > external.IN_MODEL:
            folder = stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True))
            data = Path(folder).resolve() / "data"
            model = external.written_out(model, data, data)
        if files := {file: file.resolve() for file in external.files_of(model)}:
            if _KNOWS_FOLDER:  # if not, it takes absolute paths
                home = os.path.commonpath([file.parent for file in files.values()])
                model = external.relocated(model, lambda file: files[file].relative_to(home))
                options.add_session_config_entry(_FOLDER, home)
            options.add_session_config_entry("session.disable_prepacking", "1")
            more["disabled_optimizers"] = ["ConstantFolding"]
        running = ort.InferenceSession(model.SerializeToString(), options, **more)
    _require_providers(running, more.get("providers", ()))
    return running


def _require_providers(running: ort.InferenceSession, asked: Sequence[Provider]) -> None:
    """Raise where onnxruntime falls back to the CPU: it does so without an error."""
    present = running.get_providers()
    if lost := [name for name, _ in asked if name not in present]:
        raise ProviderError(
            f"onnxruntime could not start {', '.join(lost)} and would run on {present}: check the "
            "number of the device, the driver and its libraries, or use device='cpu'"
        )


def work(graph: ir.Graph) -> float:
    """Return the multiply-adds of the matrix products and convolutions of one row."""
    return float(sum(_node_work(node) for node in graph))


def _node_work(node: ir.Node) -> int:
    if node.op_type not in ("MatMul", "Gemm", "Conv", "ConvTranspose"):
        return 0
    a, b, y = (shapes.dims(v) for v in (*node.inputs[:2], node.outputs[0]))
    if a is None or b is None or y is None:
        return 0
    if node.op_type == "Conv":
        return _known(y) * _known(b[1:])
    if node.op_type == "ConvTranspose":
        return _known(a) * _known(b[1:])
    inner = a[0 if node.attributes.get_int("transA", 0) else -1]
    return _known(y) * _known((inner,))


def _known(shape: shapes.Dims) -> int:
    return prod(d for d in shape if isinstance(d, int))
