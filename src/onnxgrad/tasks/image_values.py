"""Sizes, scales and normalizations of images, and a warning if a model expects other values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto

from onnxgrad.data.image_transforms import Normalize
from onnxgrad.data.images import ImageFolder
from onnxgrad.errors import argument
from onnxgrad.model.surgery import select_model_inputs_outputs
from onnxgrad.model.weights import constant_refs
from onnxgrad.operators import operator_of
from onnxgrad.runtime.predictor import Predictor

# mean and standard deviation of ImageNet, of pixels from 0 to 1
_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def as_image_size(size: Any) -> tuple[int, int] | None:
    """Return (height, width), given as one number, as two, or as a text such as "48x320".

    Raises:
        ValueError: it is neither a number of pixels nor two of them.
    """
    if size is None:
        return None
    text = str(size) if isinstance(size, (int, str)) else ",".join(map(str, size))
    if not re.fullmatch(r"0*[1-9]\d*([x,]0*[1-9]\d*)?", text.strip()):
        raise ValueError(
            f"{argument('image_size', text)} is neither a number of pixels, as 224, nor a height "
            "and a width, as 48x320"
        )
    numbers = [int(number) for number in re.split("[x,]", text)]
    return numbers[0], numbers[-1]


def checked_scale(scale: float) -> float:
    """Return the value of a white pixel as a float; raise `ValueError` unless it is above 0."""
    if not 0 < scale < np.inf:
        raise ValueError(
            f"{argument('scale', scale)} must be above 0: the value of white, 1 or 255"
        )
    return float(scale)


def as_normalization(normalize: Any, scale: float = 1.0) -> Normalize | None:
    """Return the normalization of pixels from 0 to `scale`; None if pixels stay unchanged.

    Args:
        normalize: "imagenet", "none", "MEAN/STD" with a number each or one for each channel, what
            `og.data.normalize` returns, or None.
        scale: the value of white.

    Raises:
        ValueError: a text that is none of these.
    """
    if normalize is None or normalize == "none":
        return None
    if isinstance(normalize, Normalize):
        return normalize
    if normalize == "imagenet":
        mean, std = (tuple(x * scale for x in each) for each in _IMAGENET)
        return Normalize(mean, std)
    try:
        mean, std = (tuple(map(float, part.split(","))) for part in normalize.split("/"))
        if len(mean) != len(std) or min(std) <= 0 or not np.isfinite([*mean, *std]).all():
            raise ValueError
    except (ValueError, AttributeError):
        raise ValueError(
            f"{argument('normalize', normalize)} is neither imagenet, nor none, nor as many means "
            "as deviations above 0, as 0.5/0.25 or 0.5,0.4,0.3/0.2,0.2,0.2"
        ) from None
    return Normalize(mean, std)


@dataclass(frozen=True)
class ScaledChannels:
    """A transform of RGB images of 0 to 1, which scales values and reorders channels."""

    scale: float
    order: tuple[int, ...]

    def __call__(self, array: np.ndarray, rng: Any = None) -> np.ndarray:
        """Return the image (height, width, channels) with scaled values and reordered channels."""
        return np.asarray(array[..., list(self.order)] * np.float32(self.scale))


PIXELS = {
    "bgr": ScaledChannels(1, (2, 1, 0)),
    "bgr255": ScaledChannels(255, (2, 1, 0)),
    "rgb255": ScaledChannels(255, (0, 1, 2)),
}


def pixel_transform(pixels: Any) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return the transform from RGB of 0 to 1 to a model's input values; None for no change.

    Args:
        pixels: the function; "bgr", "bgr255" or "rgb255"; or as of `as_normalization`.

    Raises:
        ValueError: a text that is none of these.
    """
    if callable(pixels):
        return pixels
    if isinstance(pixels, str) and pixels in PIXELS:
        return PIXELS[pixels]
    try:
        return as_normalization(pixels)
    except ValueError:
        names = ", ".join([*PIXELS, "imagenet", "none"])
        raise ValueError(
            f"{argument('pixels', pixels)} is neither a function, nor {names}, nor as many means "
            "as deviations above 0, as 0.5/0.25"
        ) from None


def normalization_from_one(normalize: Any, scale: float | None) -> Normalize | None:
    """Return `scale` and `normalize` as one normalization of pixels from 0 to 1."""
    if normalize is None and scale is None:
        return None
    white = checked_scale(1.0 if scale is None else scale)
    own = as_normalization(normalize, white) or Normalize((0.0,), (1.0,))
    mean, std = (tuple(x / white for x in each) for each in (own.mean, own.std))
    return Normalize(mean, std)


# traits of operators through which an image input is followed
_PASSES = {"reorders", "selects", "arithmetic", "convolution"}
_IMAGES = 32  # images from which statistics are measured
_FACTOR = 12.0  # ratio of variances that warns: ImageNet's normalization changes them by 19
_BYTES = 64.0  # least divisor or subtrahend that means pixels up to 255


def range_warning(proto: ModelProto, name: str, dtype: np.dtype, reader: ImageFolder) -> str:
    """Return a warning if a model seems to be trained on pixels of another range, else "".

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
    for node in _nodes_up_to_batch_norm(proto, name):
        known = [constants[n].array() for n in node.input if n in constants]
        reason = ""
        if node.op_type in ("Div", "Mul", "Sub") and len(known) == 1:
            reason = _pixel_arithmetic_warning(node, known[0], images)
        elif node.op_type == "QuantizeLinear" and len(known) == 2 and known[0].size == 1:
            reason = _pixel_quantization_warning(known[0], known[1], images)
        elif node.op_type == "BatchNormalization" and len(known) == 4:
            predictor = Predictor(select_model_inputs_outputs(proto, node.input[:1], inputs=[name]))
            value = predictor.predict({name: images})[node.input[0]].astype(np.float64)
            channels = np.moveaxis(value, 1, 0).reshape(value.shape[1], -1)
            reason = _channel_variance_warning(known[3], channels.var(axis=1))
        if reason:
            return reason
    return ""


def _pixel_arithmetic_warning(node: NodeProto, operand: np.ndarray, images: np.ndarray) -> str:
    """Return a warning if `node` scales pixels of 0 to 255, but `images` are of 0 to 1; else ""."""
    size = float(np.abs(operand).max())
    size = 1 / size if node.op_type == "Mul" and size else size
    if size < _BYTES or images.max() > 1:
        return ""
    verb = "subtracts" if node.op_type == "Sub" else "divides by"
    return f"the model first {verb} {size:g}, as for values from 0 to 255"


def _pixel_quantization_warning(scale: np.ndarray, zero: np.ndarray, images: np.ndarray) -> str:
    """Return a warning if the largest pixel is far from the range of a QuantizeLinear, else ""."""
    step, middle, bounds = float(scale.ravel()[0]), int(zero.ravel()[0]), np.iinfo(zero.dtype)
    low, high = (bounds.min - middle) * step, (bounds.max - middle) * step
    largest = float(np.abs(images).max())
    if max(-low, high) / _FACTOR < largest < max(-low, high) * _FACTOR:
        return ""
    return f"the model quantizes values from {low:.4g} to {high:.4g}"


def _channel_variance_warning(stored: np.ndarray, measured: np.ndarray) -> str:
    """Return a warning if channel variances are far from a BatchNormalization's, else ""."""
    ratio = max(float(np.median(measured / stored.astype(np.float64))), 1e-12)
    if 1 / _FACTOR < ratio < _FACTOR:
        return ""
    factor = f"{max(ratio, 1 / ratio):.3g} times {'larger' if ratio > 1 else 'smaller'}"
    return f"behind the first layer, variances are {factor} than those of the model's training"


def _nodes_up_to_batch_norm(proto: ModelProto, name: str) -> Iterator[NodeProto]:
    """Yield the nodes through which the input `name` passes, up to the first BatchNormalization.

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
