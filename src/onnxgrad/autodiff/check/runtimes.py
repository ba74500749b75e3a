"""Running a model in float64: by onnxruntime where it has the kernels, or by `onnx.reference`."""

from __future__ import annotations

from collections.abc import Callable
from math import erf, pi, sqrt

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onnxgrad.errors import PrintableError
from onnxgrad.model.convert import non_tensor
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.session import loaded

Feed = dict[str, np.ndarray]
Function = Callable[[Feed], list[np.ndarray]]  # the float outputs of a model

_ROUNDED = {"CausalConvWithState", "GridSample", "LinearAttention"}  # in float32 by onnx.reference


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
    taken, outputs = {x.name for x in inputs}, _float_outputs(proto)

    def run(feed: Feed) -> list[np.ndarray]:
        try:
            return session.run(outputs, {n: x for n, x in feed.items() if n in taken})
        except Exception as e:  # some kernels find out here that they lack a type
            raise NoKernelError(f"onnxruntime cannot run the model: {e}") from e

    return run


class Erf(OpRun):
    """In float64: that of onnx rounds to float32. Operators are known by their class names."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (_erf(x),)


class Gelu(OpRun):
    """In float64, as `Erf`."""

    def _run(self, x: np.ndarray, approximate: str = "none") -> tuple[np.ndarray]:
        if approximate == "tanh":
            return (0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))),)
        return (0.5 * x * (1 + _erf(x / sqrt(2))),)


class Mean(OpRun):
    """That of onnx adds up in place, and fails where the first operand is broadcast."""

    def _run(self, *xs: np.ndarray) -> tuple[np.ndarray]:
        return (sum(xs[1:], xs[0]) / len(xs),)


class LRN(OpRun):
    """That of onnx takes the length of the first axis for the number of channels."""

    def _run(
        self,
        x: np.ndarray,
        alpha: float = 1e-4,
        beta: float = 0.75,
        bias: float = 1.0,
        size: int = 1,
    ) -> tuple[np.ndarray]:
        borders = [(0, 0)] * x.ndim
        borders[1] = (size - 1) // 2, size // 2
        squares = np.pad(x * x, borders)
        total = sum(squares[:, i : i + x.shape[1]] for i in range(size))
        return (x / (bias + alpha / size * total) ** beta,)


class MeanVarianceNormalization(OpRun):
    """In float64: the body that onnx gives mixes it with constants in float32."""

    def _run(self, x: np.ndarray, axes: tuple[int, ...] = (0, 2, 3)) -> tuple[np.ndarray]:
        mean, deviation = (f(x, axis=tuple(axes), keepdims=True) for f in (np.mean, np.std))
        return ((x - mean) / (deviation + 1e-9),)


class DynamicQuantizeLinear(OpRun):
    """In float64, as `Erf`."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        low, high = min(x.min(), 0), max(x.max(), 0)
        scale = ((high - low) or 1) / 255
        zero = np.rint(-low / scale)
        y = np.clip(np.rint(x / scale) + zero, 0, 255)
        return y.astype(np.uint8), np.asarray(scale, x.dtype), zero.astype(np.uint8)


class GlobalMaxPool(OpRun):
    """That of onnx takes every input for one of four axes."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


_BETTER = [Erf, Gelu, Mean, LRN, GlobalMaxPool, MeanVarianceNormalization, DynamicQuantizeLinear]


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(erf, otypes=[x.dtype])(x)


def on_reference(proto: ModelProto) -> Function:
    """Return the function that runs `proto` on `onnx.reference`."""
    outputs = _float_outputs(proto)
    rounded = next((n.op_type for n in proto.graph.node if n.op_type in _ROUNDED), None)
    try:
        evaluator = ReferenceEvaluator(proto, new_ops=_BETTER)
    except Exception as e:  # onnx.reference's errors have no common base
        raise NoKernelError(f"onnx.reference cannot load the model: {e}") from e

    def run(feed: Feed) -> list[np.ndarray]:
        if rounded and any(x.dtype == np.float64 for x in feed.values()):
            raise NoKernelError(f"onnx.reference computes parts of {rounded} in float32")
        try:
            return list(evaluator.run(outputs, feed))
        except Exception as e:  # whatever an operator written in Python raises
            raise NoKernelError(f"onnx.reference cannot run the model: {e}") from e

    return run


def on_either(
    proto: ModelProto,
    first: Callable[[ModelProto], Function] = on_onnxruntime,
    second: Callable[[ModelProto], Function] = on_reference,
) -> Function:
    """Return the function that runs `proto` on one runtime, or else on the other one.

    Raises:
        NoKernelError: when it is called, that of the first if neither runs `proto`.
    """
    chosen: list[Function] = []

    def run(feed: Feed) -> list[np.ndarray]:
        if chosen:
            return chosen[0](feed)
        try:
            function = first(proto)
            results = function(feed)
        except NoKernelError as e:
            try:
                function = second(proto)
                results = function(feed)
            except NoKernelError:
                raise e from None
        chosen.append(function)
        return results

    return run


def _float_outputs(proto: ModelProto) -> list[str]:
    tensors = [y for y in proto.graph.output if not non_tensor(y)]
    return [
        y.name for y in tensors if ir.DataType(y.type.tensor_type.elem_type).is_floating_point()
    ]
