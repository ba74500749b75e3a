"""Runtimes for float64: onnxruntime if it has the kernels, else `onnx.reference`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import erf, pi, sqrt
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops import op_max_pool

from onnxgrad.autodiff.check.convolutions import Conv, ConvTranspose
from onnxgrad.errors import PrintableError
from onnxgrad.model.convert import non_tensor
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.session import loaded

Feed = dict[str, np.ndarray]
Function = Callable[[Feed], list[np.ndarray]]  # the float outputs of a model

# operators that onnx.reference computes in float32
_ROUNDED = {"CausalConvWithState", "GridSample", "LinearAttention"}


@dataclass(frozen=True)
class Accuracy:
    """The relative accuracy of outputs in float32, and of their central differences."""

    outputs: float = 1e-3
    differences: float = 5e-2


def accuracy(proto: ModelProto) -> Accuracy:
    """Return the accuracy of the least accurate kernel that `proto` runs on.

    The kernel of SVMClassifier stops within 0.005 of the probabilities.
    """
    rough = any(node.op_type == "SVMClassifier" for node in proto.graph.node)
    return Accuracy(outputs=6e-3, differences=0.5) if rough else Accuracy()


class NoKernelError(PrintableError, RuntimeError):
    """A runtime cannot run a model in some precision."""


def on_onnxruntime(proto: ModelProto) -> Function:
    """Return the function that runs `proto` on onnxruntime."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = loaded(proto, options, providers=CPU.providers)
    except Exception as e:  # onnxruntime's errors have no common base
        raise NoKernelError(f"onnxruntime cannot load the model: {e}") from e
    inputs = (*session.get_inputs(), *session.get_overridable_initializers())
    names, outputs = {x.name for x in inputs}, _float_outputs(proto)

    def run(feed: Feed) -> list[np.ndarray]:
        try:
            return session.run(outputs, {n: x for n, x in feed.items() if n in names})
        except Exception as e:  # some kernels lack a dtype only here
            raise NoKernelError(f"onnxruntime cannot run the model: {e}") from e

    return run


class Erf(OpRun):
    """Erf in float64, where `onnx.reference` rounds to float32; a class has its operator's name."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (_erf_of_elements(x),)


class Gelu(OpRun):
    """Gelu in float64, where `onnx.reference` rounds to float32."""

    def _run(self, x: np.ndarray, approximate: str = "none") -> tuple[np.ndarray]:
        if approximate == "tanh":
            return (0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))),)
        return (0.5 * x * (1 + _erf_of_elements(x / sqrt(2))),)


class Mean(OpRun):
    """Mean; `onnx.reference` adds in place, and fails if the first operand is broadcast."""

    def _run(self, *xs: np.ndarray) -> tuple[np.ndarray]:
        return (sum(xs[1:], xs[0]) / len(xs),)


class LRN(OpRun):
    """LRN; `onnx.reference` takes the length of the first axis for the number of channels."""

    def _run(self, x, alpha=None, beta=None, bias=None, size=None) -> tuple[np.ndarray]:
        borders = [(0, 0)] * x.ndim
        borders[1] = (size - 1) // 2, size // 2
        squares = np.pad(x * x, borders)
        total = sum(squares[:, i : i + x.shape[1]] for i in range(size))
        return (x / (bias + alpha / size * total) ** beta,)


class MeanVarianceNormalization(OpRun):
    """MeanVarianceNormalization in float64; its function body in onnx has float32 constants."""

    def _run(self, x: np.ndarray, axes: tuple[int, ...] = (0, 2, 3)) -> tuple[np.ndarray]:
        mean, deviation = (f(x, axis=tuple(axes), keepdims=True) for f in (np.mean, np.std))
        return ((x - mean) / (deviation + 1e-9),)


class DynamicQuantizeLinear(OpRun):
    """DynamicQuantizeLinear in float64, where `onnx.reference` rounds to float32."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        low, high = min(x.min(), 0), max(x.max(), 0)
        scale = ((high - low) or 1) / 255
        zero = np.rint(-low / scale)
        y = np.clip(np.rint(x / scale) + zero, 0, 255)
        return y.astype(np.uint8), np.asarray(scale, x.dtype), zero.astype(np.uint8)


class GlobalMaxPool(OpRun):
    """GlobalMaxPool for any rank; `onnx.reference` treats every input as of rank 4."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class MaxPool(op_max_pool.MaxPool):
    """MaxPool in float64 by onnxruntime; `onnx.reference` loops over positions."""

    def _run(self, *inputs: Any, **attributes: Any) -> tuple[np.ndarray, ...]:
        [x] = inputs
        if x.dtype != np.float64 or any(a.ref_attr_name for a in self.onnx_node.attribute):
            return super()._run(x, **attributes)
        if not hasattr(self, "_session"):
            self._session = self._session_of_node()
        if self._session is None:
            return super()._run(x, **attributes)
        return tuple(self._session.run(None, {"x": x}))

    def _session_of_node(self) -> ort.InferenceSession | None:
        """Return a session of the node; None if onnxruntime refuses it, as for long padding."""
        options = ort.SessionOptions()
        options.log_severity_level = 4
        proto = _model_of_node(self.onnx_node, self.run_params["opsets"][""])
        try:
            return ort.InferenceSession(proto, options, providers=CPU.providers)
        except Exception:  # onnxruntime's errors have no common base
            return None


def _model_of_node(node: NodeProto, opset: int) -> bytes:
    """Return a model of one node that reads `x`, of float64."""
    proto = ModelProto(ir_version=8)
    proto.opset_import.add(version=opset)
    graph = proto.graph
    graph.name = node.op_type
    own = graph.node.add()
    own.CopyFrom(node)
    own.input[:] = ["x"]
    for i, y in enumerate(own.output):
        dtype = TensorProto.INT64 if i else TensorProto.DOUBLE
        graph.output.add(name=y).type.tensor_type.elem_type = dtype
    graph.input.add(name="x").type.tensor_type.elem_type = TensorProto.DOUBLE
    return proto.SerializeToString()


_REPLACEMENTS = [
    Erf, Gelu, Mean, LRN, GlobalMaxPool, MeanVarianceNormalization, DynamicQuantizeLinear,
    MaxPool, Conv, ConvTranspose,
]  # fmt: skip


def _erf_of_elements(x: np.ndarray) -> np.ndarray:
    return np.vectorize(erf, otypes=[x.dtype])(x)


def on_reference(proto: ModelProto) -> Function:
    """Return the function that runs `proto` on `onnx.reference`."""
    outputs = _float_outputs(proto)
    rounded = next((n.op_type for n in proto.graph.node if n.op_type in _ROUNDED), None)
    try:
        evaluator = ReferenceEvaluator(proto, new_ops=_REPLACEMENTS)
    except Exception as e:  # onnx.reference's errors have no common base
        raise NoKernelError(f"onnx.reference cannot load the model: {e}") from e

    def run(feed: Feed) -> list[np.ndarray]:
        if rounded and any(x.dtype == np.float64 for x in feed.values()):
            raise NoKernelError(f"onnx.reference computes parts of {rounded} in float32")
        try:
            return list(evaluator.run(outputs, feed))
        except Exception as e:  # operators written in Python raise anything
            raise NoKernelError(f"onnx.reference cannot run the model: {e}") from e

    return run


def on_either(proto: ModelProto, *first: Callable[[ModelProto], Function]) -> Function:
    """Return the function that runs `proto` on the `first` runtime, or else on another one.

    Called where none runs `proto`, it raises the error of the first.
    """
    runtimes = dict.fromkeys((*first, on_onnxruntime, on_reference))
    chosen: list[Function] = []

    def run(feed: Feed) -> list[np.ndarray]:
        if chosen:
            return chosen[0](feed)
        errors = []
        for load in runtimes:
            try:
                function = load(proto)
                results = function(feed)
            except NoKernelError as e:
                errors.append(e)
            else:
                chosen.append(function)
                return results
        raise errors[0]

    return run


def _float_outputs(proto: ModelProto) -> list[str]:
    tensors = [y for y in proto.graph.output if not non_tensor(y)]
    return [
        y.name for y in tensors if ir.DataType(y.type.tensor_type.elem_type).is_floating_point()
    ]
