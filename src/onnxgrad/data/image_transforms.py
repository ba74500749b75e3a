"""Transforms of images, and the metadata of trained models that says how images are read."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrad.data import image_nodes
from onnxgrad.data.image_files import load_pillow
from onnxgrad.errors import argument, unknown

# (image of Pillow, generator or None) -> image; a `Normalize` takes and returns an array instead
Transform = Callable[[Any, np.random.Generator | None], Any]

IMAGES = "onnxgrad.images"  # key of metadata: a list with the dict that `image_metadata` returns


def check_normalize_is_last(transforms: Sequence[Transform]) -> None:
    """Raise `ValueError` if another transform follows `normalize`."""
    if any(isinstance(transform, Normalize) for transform in transforms[:-1]):
        raise ValueError("normalize must be the last transform: other transforms take images")


def transform_name(transform: Any) -> str:
    """Return the name of a function, or the `repr` of another transform, without an address."""
    return getattr(transform, "__qualname__", None) or repr(transform)


def resize_to_cover(image: Any, size: tuple[int, int]) -> Any:
    """Return an image resized so that it just covers (height, width)."""
    width, height = image.size
    scale = max(size[0] / height, size[1] / width)
    wide, high = max(size[1], round(width * scale)), max(size[0], round(height * scale))
    return image.resize((wide, high), load_pillow().Resampling.BILINEAR)


def _crop_image(image: Any, size: tuple[int, int], top: int, left: int) -> Any:
    """Return the crop of `size`, (height, width), of an image at the pixel (top, left)."""
    return image.crop((left, top, left + size[1], top + size[0]))


def _enlarged_image_and_spare_pixels(image: Any, size: tuple[int, int]) -> tuple[Any, int, int]:
    """Return an image enlarged to cover `size`, and the counts of rows and columns beyond
    `size`.
    """
    if image.size[0] < size[1] or image.size[1] < size[0]:
        image = resize_to_cover(image, size)
    return image, image.size[1] - size[0], image.size[0] - size[1]


@dataclass(frozen=True)
class Resize:
    """A transform that resizes images; `resize` returns it."""

    size: int | tuple[int, int]

    def __call__(self, image: Any, rng: np.random.Generator | None) -> Any:
        """Return the resized image."""
        if isinstance(self.size, int):
            short = min(image.size)
            wide, high = (max(1, round(n * self.size / short)) for n in image.size)
        else:
            high, wide = self.size
        return image.resize((wide, high), load_pillow().Resampling.BILINEAR)

    def write(self, op: Any, x: Any) -> Any:
        """Write nodes that resize images."""
        return image_nodes.write_resize(op, x, self.size)


@dataclass(frozen=True)
class CenterCrop:
    """A transform that crops the middle of images; `center_crop` returns it."""

    size: tuple[int, int]

    def __call__(self, image: Any, rng: np.random.Generator | None) -> Any:
        """Return the crop of (height, width) in the middle of the image."""
        image, rows, columns = _enlarged_image_and_spare_pixels(image, self.size)
        return _crop_image(image, self.size, rows // 2, columns // 2)

    def write(self, op: Any, x: Any) -> Any:
        """Write nodes that crop images to `size` in the middle."""
        x = image_nodes.write_resize_to_cover(op, x, self.size, only_small=True)
        return image_nodes.write_center_crop(op, x, self.size)


@dataclass(frozen=True)
class RandomCrop(CenterCrop):
    """A transform that crops images at random positions; `random_crop` returns it."""

    def __call__(self, image: Any, rng: np.random.Generator | None) -> Any:
        """Return a crop at a random position drawn from `rng`; without `rng`, the crop in the
        middle.
        """
        if rng is None:
            return super().__call__(image, None)
        image, rows, columns = _enlarged_image_and_spare_pixels(image, self.size)
        top, left = int(rng.integers(rows + 1)), int(rng.integers(columns + 1))
        return _crop_image(image, self.size, top, left)


class OnlyInTraining:
    """Base of transforms that change images in training only; evaluations keep images unchanged."""

    def write(self, op: Any, x: Any) -> Any:
        """Return the images unchanged."""
        return x


@dataclass(frozen=True)
class RandomFlip(OnlyInTraining):
    """A transform that mirrors images at random; `random_flip` returns it."""

    probability: float = 0.5

    def __call__(self, image: Any, rng: np.random.Generator | None) -> Any:
        """Return the image mirrored with the given probability, drawn from `rng`; unchanged without
        `rng`.
        """
        if rng is None or rng.random() >= self.probability:
            return image
        return image.transpose(load_pillow().Transpose.FLIP_LEFT_RIGHT)


@dataclass(frozen=True)
class RandomColors(OnlyInTraining):
    """A transform that changes the colors of images at random; `random_colors` returns it."""

    hue: float = 0.015
    saturation: float = 0.7
    value: float = 0.4

    def __call__(self, image: Any, rng: np.random.Generator | None) -> Any:
        """Return the image with random changes of its colors, drawn from `rng`; unchanged without
        `rng`.
        """
        if rng is None:
            return image
        drawn = rng.uniform(-1, 1, 3) * (self.hue, self.saturation, self.value)
        bytes_in = np.arange(256)
        hues = (bytes_in + 256 * drawn[0]) % 256
        others = (np.minimum(bytes_in * (1 + change), 255) for change in drawn[1:])
        table = np.concatenate([hues, *others]).astype(np.uint8).tolist()
        changed = image.convert("RGB").convert("HSV").point(table).convert("RGB")
        changed = changed.convert(image.mode)
        if image.mode == "RGBA":
            changed.putalpha(image.getchannel("A"))
        return changed


@dataclass(frozen=True)
class Normalize:
    """A transform that normalizes the channels of images; `normalize` returns it."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, array: np.ndarray, rng: np.random.Generator | None = None) -> np.ndarray:
        """Return the array (height, width, channels) with the channels normalized."""
        return (array - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)

    def write(self, op: Any, x: Any) -> Any:
        """Write nodes that normalize images, float32 (N, height, width, channels)."""
        centered = op.Sub(x, np.array(self.mean, np.float32))
        return op.Div(centered, np.array(self.std, np.float32))


@dataclass(frozen=True)
class ForeignTransform(OnlyInTraining):
    """Base of transforms of other libraries, which change images in training only."""

    transform: Any

    def __call__(self, image: Any, rng: np.random.Generator | None) -> Any:
        """Return the transformed image, with random numbers seeded from `rng`; unchanged without
        `rng`.

        Raises:
            ValueError: the result is no image of 8 bits with the channels of `image`.
        """
        return image if rng is None else self.transform_image(image, int(rng.integers(1 << 32)))

    def transform_image(self, image: Any, seed: int) -> Any:
        """Return the image transformed with random numbers that `seed` determines."""
        raise NotImplementedError

    def result_error(self, result: str) -> ValueError:
        """Return the error for a transform that returns something else than an image with as many
        channels as before.
        """
        return ValueError(
            f"{type(self.transform).__name__} returns {result}, and a transform of image_folder "
            "must return an image of 8 bits with as many channels as before: leave out what makes "
            "tensors or normalizes, and end with og.data.normalize(...)"
        )


class OfAlbumentations(ForeignTransform):
    """A transform of albumentations, which takes and returns an array (height, width, channels)."""

    def transform_image(self, image: Any, seed: int) -> Any:
        """Return the image transformed with random numbers that `seed` determines."""
        from PIL import Image

        self.transform.set_random_seed(seed)
        array = np.asarray(self.transform(image=np.asarray(image))["image"])
        gray = image.mode == "L"
        channels = (1,) if array.ndim == 3 and gray else () if gray else (len(image.getbands()),)
        if array.dtype != np.uint8 or array.shape[2:] != channels or array.ndim < 2:
            raise self.result_error(f"an array of {array.dtype} {array.shape}")
        return Image.fromarray(array.reshape(array.shape[:2]) if gray else array, image.mode)


class OfTorchvision(ForeignTransform):
    """A transform of torchvision, which takes and returns an image of Pillow."""

    def transform_image(self, image: Any, seed: int) -> Any:
        """Return the image transformed with random numbers that `seed` determines.

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
            raise self.result_error(f"a {type(result).__name__}")
        return result


def adapt_transform(transform: Any) -> Any:
    """Return a transform that takes `(image, rng)`, for a transform of albumentations or
    torchvision.

    Other transforms are returned unchanged. The libraries are recognized by the module names of the
    classes: neither is imported.
    """
    packages = {kind.__module__.partition(".")[0] for kind in type(transform).__mro__}
    if "albumentations" in packages:
        return OfAlbumentations(transform)
    return OfTorchvision(transform) if "torchvision" in packages else transform


def height_and_width(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) for a size that may be one number for both."""
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def image_metadata(
    size: tuple[int, int], scale: float, transforms: Sequence[Transform]
) -> dict[str, Any]:
    """Return a dict, for the metadata of a trained model, that says how evaluations turn images
    into numbers.

    The entry "function" names a transform that is no transform of this module. Random transforms
    and transforms of other libraries are left out: they change images in training only.
    """
    note: dict[str, Any] = {"scale": scale, "size": list(size)}
    for transform in transforms:
        if isinstance(transform, Normalize):
            note |= {"mean": list(transform.mean), "std": list(transform.std)}
        elif isinstance(transform, (Resize, CenterCrop)):
            name = "resize" if isinstance(transform, Resize) else "center_crop"
            note["steps"] = [*note.get("steps", ()), {name: transform.size}]
        elif not isinstance(transform, OnlyInTraining):
            note["function"] = transform_name(transform)
    return note


def transforms_from_metadata(note: Mapping[str, Any]) -> list[Transform]:
    """Return the transforms that a dict of `image_metadata` holds, without the normalization."""
    kinds = {"resize": resize, "center_crop": center_crop}
    return [kinds[name](size) for step in note.get("steps", ()) for name, size in step.items()]


def normalization_from_metadata(note: Mapping[str, Any]) -> Normalize | None:
    """Return the normalization that a dict of `image_metadata` holds; None if it holds no
    normalization.
    """
    return Normalize(tuple(note["mean"]), tuple(note["std"])) if "mean" in note else None


def resize(size: int | tuple[int, int]) -> Transform:
    """Return a transform that resizes images to (height, width), or their shorter side to `size`
    pixels.

    Examples:
        >>> import onnxgrad as og
        >>> og.data.resize(256)
        Resize(size=256)
    """
    return Resize(size if isinstance(size, int) else height_and_width(size))


def center_crop(size: int | tuple[int, int]) -> Transform:
    """Return a transform that crops (height, width) in the middle of the image.

    Examples:
        >>> import onnxgrad as og
        >>> og.data.center_crop(224)
        CenterCrop(size=(224, 224))
    """
    return CenterCrop(height_and_width(size))


def random_crop(size: int | tuple[int, int]) -> Transform:
    """Return a transform that crops (height, width) at a random position.

    Examples:
        >>> import onnxgrad as og
        >>> og.data.random_crop((224, 160))
        RandomCrop(size=(224, 160))
    """
    return RandomCrop(height_and_width(size))


def random_flip(probability: float = 0.5) -> Transform:
    """Return a transform that mirrors an image, left to right, with this probability.

    Examples:
        >>> import onnxgrad as og
        >>> transforms = [og.data.resize(256), og.data.random_crop(224), og.data.random_flip()]
        >>> transforms[-1]
        RandomFlip(probability=0.5)
    """
    return RandomFlip(probability)


def random_colors(hue: float = 0.015, saturation: float = 0.7, value: float = 0.4) -> Transform:
    """Return a transform that randomly changes hue, saturation and brightness, as in the training
    of YOLO.

    Args:
        hue: the largest shift of the hue, as a share of the color circle.
        saturation: the largest change of the saturation, as a share of it.
        value: the largest change of the brightness, as a share of it.

    Examples:
        >>> import onnxgrad as og
        >>> og.data.random_colors(value=0.2)
        RandomColors(hue=0.015, saturation=0.7, value=0.2)
    """
    for name, share in (("hue", hue), ("saturation", saturation), ("value", value)):
        if not 0 <= share <= 1:
            raise ValueError(f"{argument(name, share)} must be from 0 to 1")
    return RandomColors(hue, saturation, value)


# transforms by the names that the option `augment` of tasks takes
AUGMENTATIONS: dict[str, Callable[[], Transform]] = {
    "flip": random_flip,
    "colors": random_colors,
    "hsv": random_colors,
}


def as_transforms(augment: Any) -> tuple[Any, ...]:
    """Return a tuple of transforms, given transforms or names of `AUGMENTATIONS`.

    Args:
        augment: a name, several with commas between them, "none", or a sequence of names and
            transforms.

    Raises:
        ValueError: an unknown name.
    """
    transforms = []
    for given in augment.split(",") if isinstance(augment, str) else augment or ():
        name = given.strip() if isinstance(given, str) else None
        if name is None:
            transforms.append(given)
        elif name in AUGMENTATIONS:
            transforms.append(AUGMENTATIONS[name]())
        elif name not in ("", "none"):
            raise unknown("augmentation", name, [*AUGMENTATIONS, "none"])
    return tuple(transforms)


def normalize(mean: Sequence[float], std: Sequence[float]) -> Transform:
    """Return a transform that computes (value - mean) / std for each channel, for values from 0 to
    1.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> image = np.full((1, 1, 3), 0.5, np.float32)  # height, width, channels
        >>> og.data.normalize([0.5, 0.4, 0.0], [0.1, 0.1, 0.5])(image, None).round(3).tolist()
        [[[0.0, 1.0, 1.0]]]
    """
    if len(mean) != len(std):
        counts = f"mean has {len(mean)} numbers, and std {len(std)}"
        raise ValueError(f"{counts}: pass one number for each channel")
    if any(s <= 0 for s in std):
        raise ValueError(f"std={list(std)} must be above 0")
    return Normalize(tuple(mean), tuple(std))
