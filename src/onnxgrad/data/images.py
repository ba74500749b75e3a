"""A reader of folders of images, which are decoded while training reads them."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.data.class_folders import find_images, read_classes
from onnxgrad.data.class_numbers import ClassNames
from onnxgrad.data.image_files import MODES, load_pillow, open_image
from onnxgrad.data.image_transforms import (
    IMAGES,
    CenterCrop,
    Normalize,
    Transform,
    adapt_transform,
    check_normalize_is_last,
    height_and_width,
    image_metadata,
    resize_to_cover,
    transform_name,
)
from onnxgrad.data.readers import FileReader, describe_files, keep_arguments
from onnxgrad.errors import argument, unknown
from onnxgrad.operators.shapes import Dims


@keep_arguments(data="path")
def image_folder(
    path: str | os.PathLike,
    size: int | tuple[int, int],
    transforms: Sequence[Transform] = (),
    layout: str | None = None,
    channels: int | None = None,
    *,
    classes: Sequence[str] | Sequence[int] | None = None,
    labels: bool = True,
    scale: float = 1.0,
) -> ImageFolder:
    """Return images in sub-folders as data for `fit`, decoded while training runs.

    The label of an image is the number of its class, which its sub-folder of `path` names. Names
    that are all whole numbers are these numbers: "10" is class 10. Other names are numbered in
    their order, or in the order of `classes`.

    Values are float32 from 0 to 1, or to `scale`; an input of uint8 gets the values of the files.
    Transforms that are random draw by the seed of the epoch and the number of the image; in
    evaluations they are not random. `preprocess` writes the same transforms into a model.

    Args:
        path: the folder; images may be in folders below the sub-folders. Or one image.
        size: height and width of the images for the model, a number for both. Images that have
            another size after the transforms are resized to cover it, and cropped at the center.
        transforms: applied to each image in this order: `resize`, `center_crop`, `random_crop`,
            `random_flip`, `random_colors`, and at the end `normalize`, of `onnxgrad`; or functions
            `(image of Pillow, numpy.random.Generator or None) -> image`. Transforms of
            albumentations and `torchvision.transforms` that return images of 8 bits are applied in
            training only, and draw by the same seeds.
        layout: "NCHW" or "NHWC"; None: by the declared shape of the model's input.
        channels: 1 (gray), 3 (RGB) or 4 (RGBA); None: by the declared shape.
        classes: the names of all classes in the order of the model's output, of which some may
            have no folder; None: the names of the folders.
        labels: False reads all images below `path`, without labels, for `predict`.
        scale: the value of white, 1 or 255; `normalize` is applied to the scaled values.

    Returns:
        A reader, which `fit(reader)` takes as X; `.classes` are the names of the classes, `.files`
        the images and `.labels` their class numbers.

    Raises:
        ImportError: Pillow is not installed.
        ValueError: a wrong argument, or a folder that is none of `classes`, or no image at all.

    Examples:
        >>> import pathlib, tempfile, onnxgrad as og, PIL.Image
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> (root / "10").mkdir()
        >>> PIL.Image.new("RGB", (8, 8)).save(root / "10" / "a.png")
        >>> og.data.image_folder(root, 8).labels.tolist()
        [10]
    """
    load_pillow()
    _check_image_options(layout, channels, scale)
    check_normalize_is_last(transforms)
    adapted = tuple(map(adapt_transform, transforms))
    read = height_and_width(size), adapted, layout, channels, float(scale)
    folder = Path(path)
    found = read_classes(folder, classes) if labels else (find_images(folder), None, [])
    return ImageFolder(folder, *read, *found)


def _check_image_options(layout: str | None, channels: int | None, scale: float) -> None:
    """Raise `ValueError` if an argument of `image_folder` is wrong."""
    if layout not in (None, "NCHW", "NHWC"):
        raise unknown("layout", layout, ["NCHW", "NHWC"])
    if channels not in (None, *MODES):
        raise ValueError(f"channels={channels} must be one of {', '.join(map(str, MODES))}")
    if not scale > 0:
        raise ValueError(f"{argument('scale', scale)}, the value of white pixels, must be above 0")


@dataclass(eq=False)
class ImageFolder(FileReader):
    """Images in files, each with the index of its class: the reader that `image_folder` returns."""

    per_row = ("files", "labels")

    path: Path
    size: tuple[int, int]
    transforms: tuple[Transform, ...]
    layout: str | None
    channels: int | None
    scale: float
    files: list[Path]
    labels: np.ndarray | None
    classes: list[str]
    raw: bool = False  # whether the model takes uint8

    def __post_init__(self) -> None:
        self.rows = len(self.files)

    def for_inputs(self, shapes: Mapping[str, Dims | None]) -> ImageFolder:
        """Return the reader with the layout and channels that the model's only input declares."""
        if len(shapes) != 1:
            raise ValueError(
                f"image_folder is for a model with one input, and the model has {list(shapes)}: "
                "pass an array for each input instead"
            )
        ((name, shape),) = shapes.items()
        lengths = [d for d in (shape or ())[1:] if isinstance(d, int) and d > max(MODES)]
        if len(lengths) == 2 and tuple(lengths) != self.size:
            raise ValueError(
                f"the input {name!r} takes images of {lengths[0]} x {lengths[1]} pixels, not "
                f"{self.size[0]} x {self.size[1]}: change {argument('size')}"
            )
        new = copy.copy(self)
        new.layout, new.channels = layout_and_channels(name, shape, self.layout, self.channels)
        return new

    def for_dtypes(self, dtypes: Mapping[str, np.dtype]) -> ImageFolder:
        """Return the reader adapted to the model's only input: if it is uint8, pixel values are not
        scaled.
        """
        new = copy.copy(self)
        new.raw = {*dtypes.values()} == {np.dtype(np.uint8)}
        if new.raw and (self.normalization or self.scale != 1):
            extra = argument("normalize" if self.normalization else "scale")
            name = next(iter(dtypes))
            raise ValueError(f"input {name!r} takes unscaled values, uint8: leave out {extra}")
        return new

    @property
    def normalization(self) -> Normalize | None:
        """The last transform if it is a normalization, else None."""
        last = self.transforms[-1] if self.transforms else None
        return last if isinstance(last, Normalize) else None

    @property
    def class_names(self) -> list[str]:
        """The names of the classes; empty if folders are named by class indices."""
        return [] if ClassNames(self.classes).are_places else self.classes

    @property
    def remembered(self) -> dict[str, list[Any]]:
        """The metadata entries {key: value} that say how images become a model's numbers."""
        return {IMAGES: [image_metadata(self.size, self.scale, self.transforms)]}

    def take(self, indices: np.ndarray, seed: int | None) -> Any:
        """Return the images of a batch, and the labels if the reader has labels."""
        images, *labels = super().take(indices, seed)
        return (images, *labels) if labels else images

    def read_row(self, row: int, rng: np.random.Generator | None) -> tuple[Any, ...]:
        """Return the image of a row as an array, and the label if the reader has labels."""
        channels = self.channels or 3
        normalize = self.normalization
        image = open_image(self.files[row], MODES[channels])
        for transform in self.transforms[:-1] if normalize else self.transforms:
            image = transform(image, rng)
        if image.size != self.size[::-1]:
            image = CenterCrop(self.size)(resize_to_cover(image, self.size), None)
        array = np.asarray(image).reshape(*self.size, channels)
        if not self.raw:
            array = array.astype(np.float32) / np.float32(255 / self.scale)
        if normalize:
            array = normalize(array, rng)
        image = array if self.layout == "NHWC" else np.moveaxis(array, -1, 0)
        return (image,) if self.labels is None else (image, self.labels[row])

    def describe(self) -> dict[str, Any]:
        """Return the classes, the transforms, and a digest of names, sizes and times of files."""
        return {
            "kind": "images",
            "rows": self.rows,
            "classes": self.classes,
            "size": list(self.size),
            **({} if self.scale == 1 else {"scale": self.scale}),
            "transforms": [transform_name(transform) for transform in self.transforms],
            "digest": describe_files(self.files, self.path),
        }


def layout_and_channels(
    name: str,
    shape: Dims | None,
    layout: str | None,
    channels: int | None,
    caller: str = "image_folder",
) -> tuple[str, int]:
    """Return (layout "NCHW" or "NHWC", number of channels) of an image input, from its declared
    shape.
    """
    axes = {"NCHW": 1, "NHWC": 3}
    if shape is not None and len(shape) == 4:
        counts = [channels] if channels else [*MODES]
        fitting = [form for form, axis in axes.items() if shape[axis] in counts]
        if layout is None and len(fitting) == 1:
            layout = fitting[0]
        if layout is not None and channels is None and shape[axes[layout]] in MODES:
            channels = int(str(shape[axes[layout]]))
    if layout is None:
        raise ValueError(
            f"the shape {shape} of {name!r} does not say where the channels are: pass "
            f"{caller}(..., layout='NCHW'), or 'NHWC'"
        )
    return layout, channels or 3
