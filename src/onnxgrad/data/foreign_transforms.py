"""Transforms of albumentations and torchvision as transforms of images here, in training only."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np


def adapted(transform: Any) -> Any:
    """Return a transform of another library as one of `image_folder`; others as they are.

    They are known by the names of their classes' modules: neither library is imported.
    """
    packages = {kind.__module__.partition(".")[0] for kind in type(transform).__mro__}
    if "albumentations" in packages:
        return OfAlbumentations(transform)
    return OfTorchvision(transform) if "torchvision" in packages else transform


@dataclass(frozen=True)
class OfAlbumentations:
    """A transform of albumentations, which takes and returns an array (height, width, channels)."""

    transform: Any

    def __call__(self, image: Any, rng: np.random.Generator | None) -> Any:
        """Return the image that `rng` draws, without it the image as it is.

        Raises:
            ValueError: the result is no image of 8 bits.
        """
        if rng is None:
            return image
        from PIL import Image

        self.transform.set_random_seed(int(rng.integers(1 << 32)))
        array = np.asarray(self.transform(image=np.asarray(image))["image"])
        gray = image.mode == "L"
        channels = (1,) if array.ndim == 3 and gray else () if gray else (len(image.getbands()),)
        if array.dtype != np.uint8 or array.shape[2:] != channels or array.ndim < 2:
            raise _no_image(self.transform, f"an array of {array.dtype} {array.shape}")
        return Image.fromarray(array.reshape(array.shape[:2]) if gray else array, image.mode)

    def write(self, op: Any, x: Any) -> Any:
        """Return the images as they are, as in evaluations."""
        return x


@dataclass(frozen=True)
class OfTorchvision:
    """A transform of torchvision, which takes and returns an image of Pillow."""

    transform: Any

    def __call__(self, image: Any, rng: np.random.Generator | None) -> Any:
        """Return the image that `rng` draws, without it the image as it is.

        The states of the generators of torch, on the CPU, and of Python stay as they were.

        Raises:
            ValueError: the result is no image of this mode.
        """
        if rng is None:
            return image
        import torch

        seed, before = int(rng.integers(1 << 32)), random.getstate()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            try:
                result = self.transform(image)
            finally:
                random.setstate(before)
        if getattr(result, "mode", None) != image.mode:
            raise _no_image(self.transform, f"a {type(result).__name__}")
        return result

    def write(self, op: Any, x: Any) -> Any:
        """Return the images as they are, as in evaluations."""
        return x


def _no_image(transform: Any, result: str) -> ValueError:
    return ValueError(
        f"{type(transform).__name__} returns {result}, and a transform an image of 8 bits with as "
        "many channels: leave out what makes tensors or normalizes, and end with "
        "og.data.normalize(...)"
    )
