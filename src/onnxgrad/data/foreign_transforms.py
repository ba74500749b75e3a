"""Transforms of albumentations and torchvision as transforms of `image_folder`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np


def adapt_transform(transform: Any) -> Any:
    """Return a transform of albumentations or torchvision adapted to `image_folder`.

    Other transforms are returned unchanged. The libraries are recognized by the module names of the
    classes: neither is imported.
    """
    packages = {kind.__module__.partition(".")[0] for kind in type(transform).__mro__}
    if "albumentations" in packages:
        return OfAlbumentations(transform)
    return OfTorchvision(transform) if "torchvision" in packages else transform


@dataclass(frozen=True)
class ForeignTransform:
    """A transform of another library, which changes images in training only."""

    transform: Any

    def __call__(self, image: Any, rng: np.random.Generator | None) -> Any:
        """Return the image that the transform makes by the numbers of `rng`; unchanged without it.

        Raises:
            ValueError: the result is no image of 8 bits with the channels of `image`.
        """
        return image if rng is None else self.transform_image(image, int(rng.integers(1 << 32)))

    def transform_image(self, image: Any, seed: int) -> Any:
        """Return the image that the transform makes, with the random numbers of a seed."""
        raise NotImplementedError

    def write(self, op: Any, x: Any) -> Any:
        """Return the images unchanged, as in evaluations."""
        return x

    def wrong_result(self, result: str) -> ValueError:
        """Return the error for a result that is no image with the channels of the input."""
        return ValueError(
            f"{type(self.transform).__name__} returns {result}, and a transform of image_folder "
            "must return an image of 8 bits with as many channels as before: leave out what makes "
            "tensors or normalizes, and end with og.data.normalize(...)"
        )


class OfAlbumentations(ForeignTransform):
    """A transform of albumentations, which takes and returns an array (height, width, channels)."""

    def transform_image(self, image: Any, seed: int) -> Any:
        """Return the image that the transform makes, with the random numbers of a seed."""
        from PIL import Image

        self.transform.set_random_seed(seed)
        array = np.asarray(self.transform(image=np.asarray(image))["image"])
        gray = image.mode == "L"
        channels = (1,) if array.ndim == 3 and gray else () if gray else (len(image.getbands()),)
        if array.dtype != np.uint8 or array.shape[2:] != channels or array.ndim < 2:
            raise self.wrong_result(f"an array of {array.dtype} {array.shape}")
        return Image.fromarray(array.reshape(array.shape[:2]) if gray else array, image.mode)


class OfTorchvision(ForeignTransform):
    """A transform of torchvision, which takes and returns an image of Pillow."""

    def transform_image(self, image: Any, seed: int) -> Any:
        """Return the image that the transform makes, with the random numbers of a seed.

        The states of the generators of torch, on the CPU, and of Python stay unchanged.
        """
        import torch

        before = random.getstate()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            try:
                result = self.transform(image)
            finally:
                random.setstate(before)
        if getattr(result, "mode", None) != image.mode:
            raise self.wrong_result(f"a {type(result).__name__}")
        return result
