"""DATA that are images: folders of classes, of several data sets or of images only."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from onnx import ModelProto

from onnxgrad.cli.console import warn
from onnxgrad.cli.data_options import InputOptions
from onnxgrad.cli.value_range import range_warning
from onnxgrad.data.arrays import DataError
from onnxgrad.data.class_folders import parts_of
from onnxgrad.data.image_files import SUFFIXES, is_image
from onnxgrad.data.image_transforms import (
    IMAGES,
    Normalize,
    Transform,
    noted_normalization,
    noted_transforms,
)
from onnxgrad.data.images import ImageFolder, image_folder
from onnxgrad.model.notes import read_note

STREAMED = (".arrow", ".feather", ".ipc")
PARQUET = (".parquet", ".pq")
_SEEN = 10_000  # files of a folder that say what it holds
_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of values from 0 to 1
Options = TypeVar("Options", bound=InputOptions)


@dataclass(frozen=True)
class ImageSource:
    """Images in folders, one for each class, and how they become numbers.

    - `scale`: the value of white; `normalize`: None for values as they are; `steps`: how images get
      their size.
    """

    name: str
    size: tuple[int, int] | None
    proto: ModelProto
    scale: float = 1.0
    normalize: Normalize | None = None
    steps: tuple[Transform, ...] = ()

    @classmethod
    def of(cls, path: str, options: InputOptions, proto: ModelProto) -> ImageSource:
        """Return what reads `path`; what options do not say is as in the training of the model.

        Raises:
            DataError: the model was trained on images whose values nothing tells.
        """
        kept: dict[str, Any] = (read_note(proto, IMAGES) or [{}])[0]
        if options.scale is None and options.normalize is None:
            _require_known(path, kept)
        scale = kept.get("scale", 1.0) if options.scale is None else checked_scale(options.scale)
        if options.normalize is not None:
            normalize = read_normalization(options.normalize, scale)
        else:
            normalize = None if options.scale is not None else noted_normalization(kept)
        asked, own = image_size(options.image_size), tuple(kept.get("size", ()))
        steps = noted_transforms(kept) if asked in (None, own) else []
        return cls(path, asked or own or None, proto, float(scale), normalize, tuple(steps))

    def reader(
        self,
        name: str,
        shape: Any,
        dtype: np.dtype,
        classes: Sequence[Any] | None = None,
        labels: bool = True,
    ) -> ImageFolder:
        """Return what reads the images for an input, as it is declared.

        It warns if the file says that its model was trained on values of another range.
        """
        lengths = [d for d in (shape or ())[1:] if isinstance(d, int) and d > 4]
        if self.size is None and len(lengths) != 2:
            raise DataError(
                f"{self.name!r} holds images, and the input of the model declares no height and "
                f"width, but {shape}: pass --image-size"
            )
        reader = image_folder(
            self.name,
            self.size or (lengths[0], lengths[1]),
            [*self.steps, *([] if self.normalize is None else [self.normalize])],
            classes=classes,
            labels=labels,
            scale=self.scale,
        )
        reader = reader.for_inputs({name: shape}).for_dtypes({name: dtype})
        if reason := "" if reader.raw else range_warning(self.proto, name, dtype, reader):
            warn(
                f"{reason}: here they are {self.values}. If it was trained on others, say so with "
                "--scale and --normalize"
            )
        return reader

    @property
    def values(self) -> str:
        """How values are scaled, as text."""
        text = f"from 0 to {self.scale:g}"
        if self.normalize is None:
            return text
        own = self.normalize.mean, self.normalize.std
        mean, std = (", ".join(f"{x:g}" for x in each) for each in own)
        return f"{text}, minus {mean}, divided by {std}"

    def described(self, reader: ImageFolder) -> str:
        """Return how many images there are, and how values are scaled, as text."""
        values = "as they are, from 0 to 255" if reader.raw else self.values
        return f"{reader.rows} image{'s' * (reader.rows != 1)}, values {values}"


def _require_known(path: str, kept: Mapping[str, Any]) -> None:
    """Raise `DataError` if a training read images in a way that its model cannot note."""
    if "arrays" in kept or "function" in kept:
        how = f"through the function {kept['function']!r}" if "function" in kept else "as arrays"
        raise DataError(
            f"{path!r} holds images, which the training of the model got {how}: say how values are "
            "scaled with --scale and --normalize, or --normalize none for values from 0 to 1"
        )


def image_size(text: str | None) -> tuple[int, int] | None:
    """Return height and width from the value of `--image-size`.

    Raises:
        ValueError: it is neither a number of pixels nor two of them.
    """
    if text is None:
        return None
    if not re.fullmatch(r"0*[1-9]\d*([x,]0*[1-9]\d*)?", text.strip()):
        raise ValueError(
            f"--image-size {text!r} is neither a number of pixels, as 224, nor a height and a "
            "width, as 48x320"
        )
    numbers = [int(number) for number in re.split("[x,]", text)]
    return numbers[0], numbers[-1]


def checked_scale(scale: float) -> float:
    """Return the value of `--scale`; raise ValueError if it is no value of white."""
    if not 0 < scale < np.inf:
        raise ValueError(f"--scale {scale} must be above 0: the value of white, 1 or 255")
    return scale


def read_normalization(text: str, scale: float) -> Normalize | None:
    """Return what `--normalize` says, for values from 0 to `scale`."""
    if text == "none":
        return None
    if text == "imagenet":
        mean, std = (tuple(x * scale for x in each) for each in _IMAGENET)
        return Normalize(mean, std)
    try:
        mean, std = (tuple(map(float, part.split(","))) for part in text.split("/"))
        if len(mean) != len(std) or min(std) <= 0 or not np.isfinite([*mean, *std]).all():
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--normalize {text!r} is neither imagenet, nor none, nor as many means as deviations "
            "above 0, as 0.5/0.25 or 0.5,0.4,0.3/0.2,0.2,0.2"
        ) from None
    return Normalize(mean, std)


def normalization_of(options: InputOptions) -> Normalize | None:
    """Return what `--scale` and `--normalize` do to values from 0 to 1; None without them."""
    if options.scale is None and options.normalize is None:
        return None
    white = checked_scale(1.0 if options.scale is None else options.scale)
    own = read_normalization(options.normalize or "none", white) or Normalize((0.0,), (1.0,))
    mean, std = (tuple(x / white for x in each) for each in (own.mean, own.std))
    return Normalize(mean, std)


def with_parts(options: Options, part: str) -> tuple[Options, list[str]]:
    """Return options whose DATA are a part of a folder of train/, validation/ and test/.

    Args:
        options: of a command.
        part: "train", with which `--validation` is that part if there is one; or "test".

    Returns:
        The options, and messages about what they are.
    """
    path = Path(options.data)
    parts = parts_of(path) if path.is_dir() else {}
    if not parts:
        return options, []
    if part not in parts:
        raise DataError(
            f"{options.data!r} has no folder {part}/: name one of "
            f"{', '.join(repr(str(each)) for each in parts.values())}"
        )
    changed: dict[str, Any] = {"data": str(parts[part])}
    notes = [f"DATA is {changed['data']}"]
    if part == "train" and "validation" in parts and getattr(options, "validation", "") is None:
        changed["validation"] = str(parts["validation"])
        notes.append(f"validation is on {changed['validation']}")
    if part == "train" and "test" in parts:
        notes.append(f"{parts['test']} is left for `onnxgrad eval`")
    return replace(options, **changed), notes


def holds_images(path: Path) -> bool:
    """Return whether a path is an image, or a folder of images rather than tables."""
    if not path.is_dir():
        return is_image(path)
    files = (name for _, _, names in os.walk(path) for name in sorted(names))
    for name in islice(files, _SEEN):
        suffix = Path(name).suffix.lower()
        if suffix in SUFFIXES:
            return True
        if suffix in (*STREAMED, *PARQUET):
            return False
    raise DataError(
        f"{str(path)!r} is a folder without Parquet files, and without images in a folder for "
        "each class"
    )
