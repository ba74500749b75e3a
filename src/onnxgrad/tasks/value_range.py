"""A warning if images have another range of values than a model was trained on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import ModelProto, NodeProto

from onnxgrad.data.images import ImageFolder
from onnxgrad.model.surgery import select_model_inputs_outputs
from onnxgrad.model.weights import constant_refs
from onnxgrad.operators import operator_of
from onnxgrad.runtime.predictor import Predictor

_PASSES = {"reorders", "selects", "arithmetic", "convolution"}  # traits
_IMAGES = 32  # of which statistics are computed
_FACTOR = 12.0  # between variances: normalization as for ImageNet changes them by 19
_BYTES = 64.0  # a constant that divides or is subtracted, of values up to 255


def range_warning(proto: ModelProto, name: str, dtype: np.dtype, reader: ImageFolder) -> str:
    """Return why images seem to have another range than the training images of a model.

    Its file may say so: by a division or subtraction in front, the range of a QuantizeLinear, or
    the statistics of a BatchNormalization behind the first convolutions. Empty if it does not, or
    if they agree.

    Args:
        proto: the model.
        name: its input of images, of floats of this `dtype`.
        reader: the images, for this input.
    """
    rows = np.linspace(0, reader.rows - 1, min(_IMAGES, reader.rows)).astype(int)
    batch = reader.take(np.unique(rows), None)
    images = (batch if isinstance(batch, np.ndarray) else batch[0]).astype(dtype)
    constants = {ref.graph_name: ref for ref in constant_refs(proto)}
    for node in _nodes_up_to_statistics(proto, name):
        known = [constants[n].array() for n in node.input if n in constants]
        reason = ""
        if node.op_type in ("Div", "Mul", "Sub") and len(known) == 1:
            reason = _reason_by_arithmetic(node, known[0], images)
        elif node.op_type == "QuantizeLinear" and len(known) == 2 and known[0].size == 1:
            reason = _reason_by_quantization(known[0], known[1], images)
        elif node.op_type == "BatchNormalization" and len(known) == 4:
            variances = _channel_variances(proto, name, node.input[0], images)
            reason = _reason_by_statistics(known[3], variances)
        if reason:
            return reason
    return ""


def _reason_by_arithmetic(node: NodeProto, operand: np.ndarray, images: np.ndarray) -> str:
    """Return the warning if the model divides by, or subtracts, a number as large as bytes."""
    size = float(np.abs(operand).max())
    size = 1 / size if node.op_type == "Mul" and size else size
    if size < _BYTES or images.max() > 1:
        return ""
    verb = "subtracts" if node.op_type == "Sub" else "divides by"
    return f"the model first {verb} {size:g}, as for values from 0 to 255"


def _reason_by_quantization(scale: np.ndarray, zero: np.ndarray, images: np.ndarray) -> str:
    """Return the warning if the largest value is far from the range of the quantization."""
    step, middle, bounds = float(scale.ravel()[0]), int(zero.ravel()[0]), np.iinfo(zero.dtype)
    low, high = (bounds.min - middle) * step, (bounds.max - middle) * step
    largest = float(np.abs(images).max())
    if max(-low, high) / _FACTOR < largest < max(-low, high) * _FACTOR:
        return ""
    return f"the model quantizes values from {low:.4g} to {high:.4g}"


def _reason_by_statistics(stored: np.ndarray, measured: np.ndarray) -> str:
    """Return the warning if the variances of channels are far from the stored ones."""
    ratio = max(float(np.median(measured / stored.astype(np.float64))), 1e-12)
    if 1 / _FACTOR < ratio < _FACTOR:
        return ""
    factor = f"{max(ratio, 1 / ratio):.3g} times {'larger' if ratio > 1 else 'smaller'}"
    return f"behind the first layer, variances are {factor} than those of the model's training"


def _nodes_up_to_statistics(proto: ModelProto, name: str) -> Iterator[NodeProto]:
    """Yield the nodes that read an input, up to the first BatchNormalization.

    The input may be moved, resized or scaled, and go through convolutions, in between.
    """
    names = {name}
    for node in proto.graph.node:
        if names.isdisjoint(node.input):
            continue
        yield node
        if node.op_type in ("Pad", "Resize") or operator_of(node).traits & _PASSES:
            names.update(node.output)
        if node.op_type == "BatchNormalization":
            return


def _channel_variances(proto: ModelProto, name: str, at: str, images: np.ndarray) -> np.ndarray:
    """Return the variance of each channel of a value, (C,) float64."""
    predictor = Predictor(select_model_inputs_outputs(proto, [at], inputs=[name]))
    value = predictor.predict({name: images})[at].astype(np.float64)
    return np.moveaxis(value, 1, 0).reshape(value.shape[1], -1).var(axis=1)
