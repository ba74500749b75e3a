"""Operators that `onnx.reference` 1.23 computes wrongly, in float32, or slowly: in NumPy.

onnxruntime has no float64 kernel for any of them but MaxPool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import erf, pi, sqrt
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto
from onnx.reference.op_run import OpRun
from onnx.reference.ops import op_conv, op_conv_transpose, op_max_pool

from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.session import load_session


def erf_of_elements(x: np.ndarray) -> tuple[np.ndarray]:
    """Compute Erf in float64, where `onnx.reference` rounds to float32."""
    return (np.vectorize(erf, otypes=[x.dtype])(x),)


def gelu_of_elements(x: np.ndarray, approximate: str = "none") -> tuple[np.ndarray]:
    """Compute Gelu in float64; its body in onnx has float32 constants."""
    if approximate == "tanh":
        return (0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))),)
    return (0.5 * x * (1 + erf_of_elements(x / sqrt(2))[0]),)


def mean_of_operands(*xs: np.ndarray) -> tuple[np.ndarray]:
    """Compute Mean; `onnx.reference` adds in place, and fails if the first operand is broadcast."""
    return (sum(xs[1:], xs[0]) / len(xs),)


def normalize_over_channels(x, alpha=None, beta=None, bias=None, size=None) -> tuple[np.ndarray]:
    """Compute LRN; `onnx.reference` takes the length of the first axis for the channels."""
    borders = [(0, 0)] * x.ndim
    borders[1] = (size - 1) // 2, size // 2
    squares = np.pad(x * x, borders)
    total = sum(squares[:, i : i + x.shape[1]] for i in range(size))
    return (x / (bias + alpha / size * total) ** beta,)


def normalize_over_axes(x: np.ndarray, axes: Sequence[int] = (0, 2, 3)) -> tuple[np.ndarray]:
    """Compute MeanVarianceNormalization in float64; its body in onnx has float32 constants."""
    mean, deviation = (f(x, axis=tuple(axes), keepdims=True) for f in (np.mean, np.std))
    return ((x - mean) / (deviation + 1e-9),)


def quantize_by_range(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute DynamicQuantizeLinear in float64, where `onnx.reference` rounds to float32."""
    low, high = min(x.min(), 0), max(x.max(), 0)
    scale = ((high - low) or 1) / 255
    zero = np.rint(-low / scale)
    y = np.clip(np.rint(x / scale) + zero, 0, 255)
    return y.astype(np.uint8), np.asarray(scale, x.dtype), zero.astype(np.uint8)


def largest_of_channels(x: np.ndarray) -> tuple[np.ndarray]:
    """Compute GlobalMaxPool; `onnx.reference` treats every input as of rank 4."""
    return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


# -- pooling and convolutions, for which `onnx.reference` loops over positions or channels ---------


def pool_by_onnxruntime(self: Any, x: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
    """Compute MaxPool by onnxruntime; by `onnx.reference` if it refuses, as for long padding."""
    if not hasattr(self, "session"):
        self.session = None
        if x.dtype == np.float64 and not any(a.ref_attr_name for a in self.onnx_node.attribute):
            self.session = _session_of_node(self.onnx_node, self.run_params["opsets"][""])
    if self.session is None:
        return op_max_pool.MaxPool._run(self, x, **attributes)
    return tuple(self.session.run(None, {"x": x}))


def _session_of_node(node: NodeProto, opset: int) -> ort.InferenceSession | None:
    """Return a session of a node of one float64 input, `x`; None if onnxruntime refuses the
    node.
    """
    float64, int64 = (
        TypeProto(tensor_type=TypeProto.Tensor(elem_type=t))
        for t in (TensorProto.DOUBLE, TensorProto.INT64)
    )
    types = zip(node.output, (float64, int64), strict=False)
    graph = GraphProto(
        name=node.op_type,
        node=[node],
        input=[ValueInfoProto(name="x", type=float64)],
        output=[ValueInfoProto(name=y, type=t) for y, t in types],
    )
    graph.node[0].input[:] = ["x"]
    proto = ModelProto(ir_version=8, graph=graph)
    proto.opset_import.add(version=opset)
    try:
        return load_session(proto, providers=CPU.providers)
    except Exception:  # onnxruntime's errors have no common base
        return None


def convolve(
    self: Any, x: np.ndarray, w: np.ndarray, b: Any = None, **attributes: Any
) -> tuple[np.ndarray]:
    """Compute Conv by products of matrices; nodes with `auto_pad` by `onnx.reference`."""
    if attributes["auto_pad"] not in (None, "NOTSET") or x.ndim < 3:
        return op_conv.Conv._run(self, x, w, b, **attributes)
    n = x.ndim - 2
    pads = attributes["pads"] or [0] * 2 * n
    x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:n], pads[n:], strict=True)])
    y = _convolve_padded(x, w, attributes["strides"] or [1] * n, attributes)
    return (_add_bias(y, b),)


def convolve_transposed(
    self: Any, x: np.ndarray, w: np.ndarray, b: Any = None, **attributes: Any
) -> tuple[np.ndarray]:
    """Compute ConvTranspose: a convolution of x, with zeros between its elements, by w reversed.

    `onnx.reference` runs nodes with `auto_pad` or `output_shape`.
    """
    stated = attributes["auto_pad"] not in (None, "NOTSET") or attributes["output_shape"]
    if stated or x.ndim < 3:
        return op_conv_transpose.ConvTranspose._run(self, x, w, b, **attributes)
    n, group = x.ndim - 2, attributes["group"] or 1
    strides, dilations = (attributes[name] or [1] * n for name in ("strides", "dilations"))
    pads, more = attributes["pads"] or [0] * 2 * n, attributes["output_padding"] or [0] * n
    reach = [d * (k - 1) for d, k in zip(dilations, w.shape[2:], strict=True)]
    apart = [s * (length - 1) + 1 for s, length in zip(strides, x.shape[2:], strict=True)]
    spread = np.zeros((*x.shape[:2], *apart), x.dtype)
    places: list[Any] = [slice(None, None, s) for s in strides]
    spread[(..., *places)] = x
    ends = [r + e for r, e in zip(reach, more, strict=True)]
    spread = np.pad(spread, [(0, 0), (0, 0), *zip(reach, ends, strict=True)])
    factors = w.reshape(group, -1, *w.shape[1:]).swapaxes(1, 2)  # (groups, units, features, ...)
    factors = np.flip(factors, tuple(range(3, factors.ndim))).reshape(
        -1, len(w) // group, *w.shape[2:]
    )
    y = _convolve_padded(spread, factors, [1] * n, attributes)
    lengths = zip(pads[:n], y.shape[2:], pads[n:], strict=True)
    kept: list[Any] = [slice(begin, length - end) for begin, length, end in lengths]
    return (_add_bias(y[(..., *kept)], b),)


def _convolve_padded(
    x: np.ndarray, w: np.ndarray, strides: Sequence[int], attributes: dict[str, Any]
) -> np.ndarray:
    """Return the convolution of a padded x: each element of w times x moved by its position."""
    group, dilations = attributes["group"] or 1, attributes["dilations"] or [1] * len(strides)
    lengths = zip(x.shape[2:], dilations, w.shape[2:], strides, strict=True)
    sizes = [(length - d * (k - 1) - 1) // s + 1 for length, d, k, s in lengths]
    factors = w.reshape(group, -1, *w.shape[1:])
    y: Any = 0.0
    for offset in np.ndindex(*w.shape[2:]):
        axes = zip(offset, dilations, strides, sizes, strict=True)
        moved: list[Any] = [slice(o * d, o * d + s * (n - 1) + 1, s) for o, d, s, n in axes]
        part = x[(..., *moved)].reshape(len(x), group, w.shape[1], -1)
        y = y + factors[(..., *offset)] @ part
    return y.reshape(len(x), len(w), *sizes).astype(x.dtype)


def _add_bias(y: np.ndarray, b: np.ndarray | None) -> np.ndarray:
    return y if b is None else (y + b.reshape(-1, *[1] * (y.ndim - 2))).astype(y.dtype)


def _operator_class(name: str, run: Callable, base: type = OpRun) -> type:
    """Return a class that computes the operator `name` by `run`, for
    `ReferenceEvaluator(new_ops=)`.
    """
    return type(name, (base,), {"_run": run if base is not OpRun else staticmethod(run)})


OPERATORS_IN_FLOAT64 = [
    _operator_class("Erf", erf_of_elements),
    _operator_class("Gelu", gelu_of_elements),
    _operator_class("Mean", mean_of_operands),
    _operator_class("LRN", normalize_over_channels),
    _operator_class("MeanVarianceNormalization", normalize_over_axes),
    _operator_class("DynamicQuantizeLinear", quantize_by_range),
    _operator_class("GlobalMaxPool", largest_of_channels),
    _operator_class("MaxPool", pool_by_onnxruntime, op_max_pool.MaxPool),
    _operator_class("Conv", convolve, op_conv.Conv),
    _operator_class("ConvTranspose", convolve_transposed, op_conv_transpose.ConvTranspose),
]
