"""Transforms of images, and how a trained file remembers what became of their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrad.data import image_nodes
from onnxgrad.data.foreign_transforms import ForeignTransform
from onnxgrad.data.image_files import pillow
from onnxgrad.errors import argument, unknown

# (image of Pillow, generator or None) -> image; a `Normalize` takes and returns an array instead
Transform = Callable[[Any, np.random.Generator | None], Any]

IMAGES = "onnxgrad.images"  # metadata: a list of one dict, which `image_note` returns


def check_order(transforms: Sequence[Transform]) -> None:
    """Raise if another transform follows `normalize`."""
    if any(isinstance(transform, Normalize) for transform in transforms[:-1]):
        raise ValueError("normalize must be the last transform: the others take images")


def named_transform(transform: Any) -> str:
    """Return what identifies a transform, without its address in memory."""
    named = getattr(transform, "__qualname__", None)
    return named or repr(transform)


def cover(image: Any, size: tuple[int, int]) -> Any:
    """Return `image` resized so that it just covers (height, width)."""
    width, height = image.size
    scale = max(size[0] / height, size[1] / width)
    wide, high = max(size[1], round(width * scale)), max(size[0], round(height * scale))
    return image.resize((wide, high), pillow().Resampling.BILINEAR)


def _cut_out(image: Any, size: tuple[int, int], top: int, left: int) -> Any:
    return image.crop((left, top, left + size[1], top + size[0]))


def _room_to_crop(image: Any, size: tuple[int, int]) -> tuple[Any, int, int]:
    """Return the image, enlarged if it is too small for the crop, and the rows and columns left."""
    if image.size[0] < size[1] or image.size[1] < size[0]:
        image = cover(image, size)
    return image, image.size[1] - size[0], image.size[0] - size[1]


@dataclass(frozen=True)
class Resize:
    """See `resize`."""

    size: int | tuple[int, int]

    def __call__(self, image: Any, rng: np.random.Generator | None) -> Any:
        """Return the resized image."""
        if isinstance(self.size, int):
            short = min(image.size)
            wide, high = (max(1, round(n * self.size / short)) for n in image.size)
        else:
            high, wide = self.size
        return image.resize((wide, high), pillow().Resampling.BILINEAR)

    def write(self, op: Any, x: Any) -> Any:
        """Write the resized images."""
        return image_nodes.write_resize(op, x, self.size)


@dataclass(frozen=True)
class CenterCrop:
    """See `center_crop`."""

    size: tuple[int, int]

    def __call__(self, image: Any, rng: np.random.Generator | None) -> Any:
        """Return the part in the middle."""
        image, rows, columns = _room_to_crop(image, self.size)
        return _cut_out(image, self.size, rows // 2, columns // 2)

    def write(self, op: Any, x: Any) -> Any:
        """Write the part in the middle."""
        x = image_nodes.write_cover(op, x, self.size, only_small=True)
        return image_nodes.write_center(op, x, self.size)


@dataclass(frozen=True)
class RandomCrop(CenterCrop):
    """See `random_crop`; models get the part in the middle, as evaluations do."""

    def __call__(self, image: Any, rng: np.random.Generator | None) -> Any:
        """Return a part that `rng` draws, without it the one in the middle."""
        if rng is None:
            return super().__call__(image, None)
        image, rows, columns = _room_to_crop(image, self.size)
        top, left = int(rng.integers(rows + 1)), int(rng.integers(columns + 1))
        return _cut_out(image, self.size, top, left)


@dataclass(frozen=True)
class RandomFlip:
    """See `random_flip`."""

    probability: float = 0.5

    def __call__(self, image: Any, rng: np.random.Generator | None) -> Any:
        """Return the image, mirrored if `rng` draws it."""
        if rng is None or rng.random() >= self.probability:
            return image
        return image.transpose(pillow().Transpose.FLIP_LEFT_RIGHT)

    def write(self, op: Any, x: Any) -> Any:
        """Return the images unchanged, as in evaluations."""
        return x


@dataclass(frozen=True)
class RandomColors:
    """See `random_colors`."""

    hue: float = 0.015
    saturation: float = 0.7
    value: float = 0.4

    def __call__(self, image: Any, rng: np.random.Generator | None) -> Any:
        """Return the image in colors that `rng` draws, without it unchanged."""
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

    def write(self, op: Any, x: Any) -> Any:
        """Return the images unchanged, as in evaluations."""
        return x


@dataclass(frozen=True)
class Normalize:
    """See `normalize`."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, array: np.ndarray, rng: np.random.Generator | None = None) -> np.ndarray:
        """Return the array (height, width, channels) with the channels normalized."""
        return (array - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)

    def write(self, op: Any, x: Any) -> Any:
        """Write the images, float32 (N, height, width, channels), normalized."""
        centered = op.Sub(x, np.array(self.mean, np.float32))
        return op.Div(centered, np.array(self.std, np.float32))


_ONLY_IN_TRAINING = (RandomFlip, RandomColors, ForeignTransform)


def height_and_width(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) of a size, which may be a number for both."""
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def image_note(
    size: tuple[int, int], scale: float, transforms: Sequence[Transform]
) -> dict[str, Any]:
    """Return how images become numbers in evaluations, for JSON; "function" names the unknown.

    Random transforms and transforms of other libraries do not change images in evaluations.
    """
    note: dict[str, Any] = {"scale": scale, "size": list(size)}
    for transform in transforms:
        if isinstance(transform, Normalize):
            note |= {"mean": list(transform.mean), "std": list(transform.std)}
        elif isinstance(transform, (Resize, CenterCrop)):
            name = "resize" if isinstance(transform, Resize) else "center_crop"
            note["steps"] = [*note.get("steps", ()), {name: transform.size}]
        elif not isinstance(transform, _ONLY_IN_TRAINING):
            note["function"] = named_transform(transform)
    return note


def noted_transforms(note: Mapping[str, Any]) -> list[Transform]:
    """Return the transforms of a note, without its normalization."""
    kinds = {"resize": resize, "center_crop": center_crop}
    return [kinds[name](size) for step in note.get("steps", ()) for name, size in step.items()]


def noted_normalization(note: Mapping[str, Any]) -> Normalize | None:
    """Return the normalization of a note; None without one."""
    return Normalize(tuple(note["mean"]), tuple(note["std"])) if "mean" in note else None


def resize(size: int | tuple[int, int]) -> Transform:
    """Return a transform: the shorter side becomes `size` pixels, or the image (height, width).

    Examples:
        >>> import onnxgrad as og
        >>> og.data.resize(256)
        Resize(size=256)
    """
    return Resize(size if isinstance(size, int) else height_and_width(size))


def center_crop(size: int | tuple[int, int]) -> Transform:
    """Return a transform: the part of (height, width) in the middle of the image.

    Examples:
        >>> import onnxgrad as og
        >>> og.data.center_crop(224)
        CenterCrop(size=(224, 224))
    """
    return CenterCrop(height_and_width(size))


def random_crop(size: int | tuple[int, int]) -> Transform:
    """Return a transform: a part of (height, width) at random.

    Examples:
        >>> import onnxgrad as og
        >>> og.data.random_crop((224, 160))
        RandomCrop(size=(224, 160))
    """
    return RandomCrop(height_and_width(size))


def random_flip(probability: float = 0.5) -> Transform:
    """Return a transform: left and right are swapped with this probability.

    Examples:
        >>> import onnxgrad as og
        >>> transforms = [og.data.resize(256), og.data.random_crop(224), og.data.random_flip()]
        >>> transforms[-1]
        RandomFlip(probability=0.5)
    """
    return RandomFlip(probability)


def random_colors(hue: float = 0.015, saturation: float = 0.7, value: float = 0.4) -> Transform:
    """Return a transform: random changes of hue, saturation and brightness, as YOLO trains with.

    Args:
        hue: the largest shift of the hue, as a share of the color circle.
        saturation, value: the largest changes of saturation and brightness, as shares of these.

    Examples:
        >>> import onnxgrad as og
        >>> og.data.random_colors(value=0.2)
        RandomColors(hue=0.015, saturation=0.7, value=0.2)
    """
    for name, share in (("hue", hue), ("saturation", saturation), ("value", value)):
        if not 0 <= share <= 1:
            raise ValueError(f"{argument(name, share)} must be from 0 to 1")
    return RandomColors(hue, saturation, value)


# by the names that tasks take
AUGMENTATIONS: dict[str, Callable[[], Transform]] = {
    "flip": random_flip,
    "colors": random_colors,
    "hsv": random_colors,
}


def as_transforms(augment: Any) -> tuple[Any, ...]:
    """Return transforms for training, which may be named: "flip", and "colors" or "hsv".

    Args:
        augment: a name, several with commas between them, "none", or a sequence of names and
            transforms.

    Raises:
        ValueError: an unknown name.
    """
    listed = augment.split(",") if isinstance(augment, str) else augment or ()
    found = []
    for each in listed:
        name = each.strip() if isinstance(each, str) else None
        if name is None:
            found.append(each)
        elif name not in ("", "none"):
            if name not in AUGMENTATIONS:
                raise unknown("augmentation", name, [*AUGMENTATIONS, "none"])
            found.append(AUGMENTATIONS[name]())
    return tuple(found)


def normalize(mean: Sequence[float], std: Sequence[float]) -> Transform:
    """Return a transform: (value - mean) / std, of values from 0 to 1, by channel.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> image = np.full((1, 1, 3), 0.5, np.float32)  # height, width, channels
        >>> og.data.normalize([0.5, 0.4, 0.0], [0.1, 0.1, 0.5])(image, None).round(3).tolist()
        [[[0.0, 1.0, 1.0]]]
    """
    if len(mean) != len(std):
        raise ValueError(f"mean has {len(mean)} numbers, and std {len(std)}: one for each channel")
    if any(s <= 0 for s in std):
        raise ValueError(f"std={list(std)} must be above 0")
    return Normalize(tuple(mean), tuple(std))
