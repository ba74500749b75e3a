"""How images become the numbers that a model takes: their size, and the scale of their values."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrad.data.image_transforms import Normalize
from onnxgrad.errors import argument

_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of values from 0 to 1


def as_image_size(size: Any) -> tuple[int, int] | None:
    """Return height and width of a size: a number for both, two numbers, or a text of these.

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
    """Return the value of white; raise `ValueError` if it is none."""
    if not 0 < scale < np.inf:
        raise ValueError(
            f"{argument('scale', scale)} must be above 0: the value of white, 1 or 255"
        )
    return float(scale)


def as_normalization(normalize: Any, scale: float = 1.0) -> Normalize | None:
    """Return the normalization of values from 0 to `scale`; None for unchanged values.

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
    """Values of 0 to 1 times `scale`, with the channels of RGB in another order."""

    scale: float
    order: tuple[int, ...]

    def __call__(self, array: np.ndarray, rng: Any = None) -> np.ndarray:
        """Return an image (height, width, channels) in the values that the model takes."""
        return np.asarray(array[..., list(self.order)] * np.float32(self.scale))


PIXELS = {
    "bgr": ScaledChannels(1, (2, 1, 0)),
    "bgr255": ScaledChannels(255, (2, 1, 0)),
    "rgb255": ScaledChannels(255, (0, 1, 2)),
}


def as_pixels(pixels: Any) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return the function from RGB of 0 to 1 to the values that a model takes; None without one.

    Args:
        pixels: such a function; "bgr", "bgr255" or "rgb255"; or as of `as_normalization`.

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
    """Return what `scale` and `normalize` do to values from 0 to 1; None without them."""
    if normalize is None and scale is None:
        return None
    white = checked_scale(1.0 if scale is None else scale)
    own = as_normalization(normalize, white) or Normalize((0.0,), (1.0,))
    mean, std = (tuple(x / white for x in each) for each in (own.mean, own.std))
    return Normalize(mean, std)
