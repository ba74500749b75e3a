"""A reader of images with masks in folders or COCO files, decoded while training reads them."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.data.image_files import (
    MODES,
    image_size,
    is_image,
    load_pillow,
    open_image,
    read_coco,
)
from onnxgrad.data.image_transforms import (
    CenterCrop,
    RandomColors,
    RandomFlip,
    Resize,
    height_and_width,
    transform_name,
)
from onnxgrad.data.readers import FileReader, describe_files, keep_arguments
from onnxgrad.errors import not_installed

_IGNORED = -100
_WHITE = 255  # in masks, pixels without a label; in black and white masks, class 1

# (image of Pillow, mask of Pillow, generator) -> (image, mask)
MaskTransform = Callable[[Any, Any, np.random.Generator], tuple[Any, Any]]


@keep_arguments(data="path images")
def masked_images(
    path: str | os.PathLike,
    size: int | tuple[int, int],
    transforms: Sequence[Any] = (),
    front: Callable[[np.ndarray], np.ndarray] | None = None,
    *,
    mask_size: int | tuple[int, int] | None = None,
    classes: int | Sequence[str] | None = None,
    ignore: int | None = 255,
    images: str | os.PathLike | None = None,
    channels: int = 3,
) -> MaskedImages:
    """Return images with a class for each pixel as data for `fit`, decoded while training runs.

    A batch has images, float32 (N, channels, height, width) from 0 to 1, and labels, int64 (N,
    height, width), -100 where ignored. Images are resized (bilinear), masks too (nearest neighbor).

    Args:
        path: a folder with `images` and `masks` of the same names, or a JSON file of COCO. A mask
            is a PNG with a palette or in gray, whose values are class numbers; `classes.txt` in the
            folder may name the classes, one a line. The categories of COCO are classes from 1 on,
            by their ids, and 0 is "background"; later annotations are above earlier ones.
        size: height and width of the images for the model, a number for both.
        transforms: of images and masks in training, in this order: `random_flip()`,
            `random_crop(size)`, `center_crop(size)`, `random_colors()`, or functions `(image, mask,
            numpy.random.Generator) -> (image, mask)` of Pillow, by the seed of the epoch and the
            number of the image; masks have the mode "P".
        front: function from an image, float32 (height, width, channels) of 0 to 1, to what the
            model takes; None: (channels, height, width).
        mask_size: height and width of the labels; None: the size of the images.
        classes: names or number of the classes; None: as the files say, or else as many as the
            largest number in masks needs.
        ignore: the value in masks of pixels without a label; None: all pixels have a label, and in
            masks of 0 and 255, 255 is class 1.
        images: folder of the images of a JSON file; None: the folder of the file, or its `images/`.
        channels: 1 (gray), 3 (RGB) or 4 (RGBA).

    Returns:
        A reader, which `fit(reader)` takes as X; see `MaskedImages` for its attributes.

    Raises:
        ImportError: Pillow is not installed, or pycocotools for masks in RLE.
        ValueError: a file that is missing or does not fit, or other classes; the message names it.

    Examples:
        >>> import pathlib, tempfile, onnxgrad as og, PIL.Image as Image
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> for part, color in (("images", "white"), ("masks", 1)):
        ...     (root / part).mkdir()
        ...     Image.new("L", (8, 8), color).save(root / part / "1.png")
        >>> reader = og.data.masked_images(root, size=4, mask_size=2)
        >>> X, labels = next(reader.batches(1, None, 0))
        >>> X.shape, labels.tolist(), reader.classes
        ((1, 3, 4, 4), [[[1, 1], [1, 1]]], ['0', '1'])
    """
    load_pillow()
    found = _open_image_mask_pairs(Path(path), classes, ignore, images)
    sides, mask_sides = height_and_width(size), height_and_width(mask_size or size)
    return MaskedImages(*found, sides, mask_sides, tuple(transforms), front, ignore, channels)


def _open_image_mask_pairs(
    path: Path, classes: int | Sequence[str] | None, ignore: int | None, images: Any
) -> tuple[list[_ImageMaskPair], list[str], bool]:
    """Return (pairs of image and mask, classes as texts, whether a file or the user gave these
    texts as class names).
    """
    if path.suffix.lower() == ".json":
        beside = [path.parent, path.parent / "images"]
        pairs, named = _image_mask_pairs_in_coco(path, [Path(images)] if images else beside)
    else:
        pairs, named = _image_mask_pairs_in_folder(path)
    given = None if classes is None or isinstance(classes, int) else [*classes]
    number = len(given) if given else classes if isinstance(classes, int) else None
    if named and (given not in (None, named) or number not in (None, len(named))):
        raise ValueError(
            f"classes={given or classes!r}, and {str(path)!r} has the classes {named}: leave out "
            "classes, or correct them"
        )
    number = _count_mask_classes(pairs, ignore, number or len(named) or None)
    names = given or named
    return pairs, names or [str(i) for i in range(number)], bool(names)


class _ImageMaskPair(NamedTuple):
    """An image file with its mask: a file, or a list of (class, polygons or RLE) to be drawn."""

    image: Path
    mask: Any
    size: tuple[int, int] | None = None  # (width, height) as annotated


@dataclass(eq=False)
class MaskedImages(FileReader):
    """Images with a class for each pixel: the reader that `masked_images` returns.

    Attributes:
        classes: names of the classes, or their numbers as texts.
        named: whether the files or the caller named the classes.
        size, mask_size, transforms, front, ignore, channels: see `masked_images`.
        relabel: function of images and labels of a batch that returns other labels, or None.
    """

    per_row = ("_pairs",)
    _pairs: list[_ImageMaskPair]
    classes: list[str]
    named: bool
    size: tuple[int, int]
    mask_size: tuple[int, int]
    transforms: tuple[Any, ...]
    front: Callable[[np.ndarray], np.ndarray] | None
    ignore: int | None
    channels: int
    relabel: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None

    def __post_init__(self) -> None:
        self.rows = len(self._pairs)

    def take(self, indices: np.ndarray, seed: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the images and labels of a batch."""
        X, y = super().take(indices, seed)
        return X, y if self.relabel is None else self.relabel(X, y)

    def read_row(self, row: int, rng: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the image of a row, and the class index of each pixel of the image."""
        image = open_image(self._pairs[row].image, MODES[self.channels])
        mask = _read_mask(self._pairs[row], image.size, self.ignore)
        for change in self.transforms if rng is not None else ():
            if isinstance(change, (RandomFlip, CenterCrop)):  # the same random numbers for both
                again = copy.deepcopy(rng)
                image, mask = change(image, rng), change(mask, again)
            elif isinstance(change, RandomColors):
                image = change(image, rng)
            else:
                image, mask = change(image, mask, rng)
            if mask.mode != "P" or mask.size != image.size:
                needs = f"the size of the image, {image.size}, and the mode 'P'"
                found = f"a mask of size {mask.size} and mode {mask.mode!r}"
                raise ValueError(f"{change!r} returned {found}: it must have {needs}")
        numbers = np.asarray(mask.resize(self.mask_size[::-1], 0)).astype(np.int64)  # nearest
        if self.ignore is not None:
            numbers[numbers == self.ignore] = _IGNORED
        array = np.asarray(Resize(self.size)(image, None), np.float32) / np.float32(255)
        array = array.reshape(*self.size, self.channels)
        return np.moveaxis(array, -1, 0) if self.front is None else self.front(array), numbers

    def describe(self) -> dict[str, Any]:
        """Return the classes, the sizes, and a digest of names, sizes and times of files."""
        files = [pair.image for pair in self._pairs]
        masks = [pair.mask for pair in self._pairs]
        files += [mask for mask in masks if not isinstance(mask, list)]
        drawn = repr([mask for mask in masks if isinstance(mask, list)]).encode()
        return {
            "kind": "masked images",
            "rows": self.rows,
            "classes": self.classes,
            "size": [*self.size, *self.mask_size],
            "ignore": self.ignore,
            "transforms": [transform_name(change) for change in self.transforms],
            "digest": describe_files(files) + hashlib.blake2b(drawn, digest_size=16).hexdigest(),
        }


def _read_mask(pair: _ImageMaskPair, size: tuple[int, int], ignore: int | None) -> Any:
    """Return the mask of a (width, height) image as a mode "P" image of class indices.

    Pillow resizes this mode by nearest neighbor only.

    Raises:
        ValueError: the mask cannot be read, or holds no class numbers.
    """
    if isinstance(pair.mask, list):
        mask = _draw_class_mask(pair.mask, size)
    else:
        name = f"the mask {str(pair.mask)!r}"
        try:
            with load_pillow().open(pair.mask) as opened:
                mode, numbers = opened.mode, np.asarray(opened).astype(np.uint8)
        except (OSError, SyntaxError) as e:
            raise ValueError(f"cannot read {name}: {e}") from e
        if mode not in ("1", "L", "P") or numbers.shape[::-1] != size:
            needs = f"gray or with a palette ('L', 'P', '1') and as large as its image, {size}"
            found = f"the mode {mode!r} and the size {opened.size}"
            raise ValueError(f"{name} has {found}: it must be {needs}")
        if ignore is None and (white := numbers == _WHITE).any():
            if (numbers[~white] > 0).any():
                raise ValueError(
                    f"{name} has the value 255 beside class numbers: pass ignore=255 if such "
                    "pixels have no class"
                )
            numbers = white.astype(np.uint8)
        mask = load_pillow().fromarray(numbers)
    mask.putpalette(bytes(range(256)) * 3)
    return mask


def _draw_class_mask(shapes: Sequence[tuple[int, Any]], size: tuple[int, int]) -> Any:
    """Return the mask on which the polygons or RLE of each class are drawn, in this order."""
    from PIL import ImageDraw

    mask = load_pillow().new("L", size)
    for number, parts in shapes:
        if isinstance(parts, dict):
            mask.paste(number, mask=load_pillow().fromarray(_decode_rle(parts) * np.uint8(255)))
        else:
            for part in parts:
                ImageDraw.Draw(mask).polygon(part, fill=number)
    return mask


def _decode_rle(rle: dict[str, Any]) -> np.ndarray:
    """Return the pixels (height, width) of a run-length encoding of COCO."""
    try:
        from pycocotools import mask as coco  # type: ignore[import-untyped]
    except ImportError as e:
        raise not_installed("reading RLE masks of COCO", "pycocotools", "detection") from e
    packed = coco.frPyObjects(rle, *rle["size"]) if isinstance(rle["counts"], list) else rle
    return np.asarray(coco.decode(packed))


def _image_mask_pairs_in_folder(path: Path) -> tuple[list[_ImageMaskPair], list[str]]:
    """Return (pairs of image and mask files in images/ and masks/, class names in classes.txt)."""
    found = {}
    for part in ("images", "masks"):
        if not (path / part).is_dir():
            raise ValueError(
                f"{str(path)!r} has no folder {part!r}: it must hold the folders 'images' and "
                "'masks'"
            )
        files = sorted(filter(is_image, (path / part).iterdir()))
        found[part] = {file.stem: file for file in files}
        if len(found[part]) < len(files):
            raise ValueError(
                f"{str(path / part)!r} has files that differ in their suffix only: keep one of each"
            )
    images, masks = found["images"], found["masks"]
    if alone := sorted(images.keys() ^ masks.keys()):
        raise ValueError(
            f"{str(path)!r}: {alone[:5]} have no image or no mask of the same name: add it, or "
            "remove the other"
        )
    listed = path / "classes.txt"
    names = listed.read_text("utf-8").splitlines() if listed.is_file() else []
    return [_ImageMaskPair(images[s], masks[s]) for s in images], [
        n.strip() for n in names if n.strip()
    ]


def _image_mask_pairs_in_coco(
    path: Path, folders: Sequence[Path]
) -> tuple[list[_ImageMaskPair], list[str]]:
    """Return (pairs of image and mask, class names) of a COCO file; class 0 is "background"."""
    coco = read_coco(path, folders)
    numbers = {category: number for number, category in enumerate(coco.categories, 1)}
    pairs = {i: _ImageMaskPair(file, [], coco.sizes[i]) for i, file in coco.files.items()}
    for where, annotation in coco.annotations:
        pair, parts = pairs[annotation["image_id"]], annotation.get("segmentation") or []
        if isinstance(parts, dict):
            fits = _decode_rle(parts).shape[::-1] == pair.size
        else:
            fits = bool(parts) and all(len(p) >= 6 and len(p) % 2 == 0 for p in parts)
        if not fits:
            raise ValueError(
                f"{where}: 'segmentation' must be a list of polygons [x, y, x, y, x, y, ...], or "
                "an RLE of the size of the image"
            )
        pair.mask.append((numbers[annotation["category_id"]], parts))
    return [*pairs.values()], ["background", *coco.categories.values()]


def _count_mask_classes(
    pairs: Sequence[_ImageMaskPair], ignore: int | None, classes: int | None
) -> int:
    """Return the number of classes: `classes` if it is given, else the largest value in the masks
    plus one.

    Raises:
        ValueError: an image that is missing or of another size than its mask, or a number in a mask
            that is no class.
    """
    seen: dict[int, Path] = {}
    for pair in pairs:
        size = image_size(pair.image)
        if pair.size not in (None, size):
            sizes = f"has the size {size}, and its annotations say {pair.size}: correct one of both"
            raise ValueError(f"the image {str(pair.image)!r} {sizes}")
        if not isinstance(pair.mask, list):
            counts = _read_mask(pair, size, ignore).histogram()
            seen = {n: pair.mask for n, count in enumerate(counts) if count} | seen
    if ignore == _WHITE and seen and {*seen} <= {0, _WHITE}:
        remedy = "pass ignore=None for black and white masks, where 255 is class 1"
        raise ValueError(f"the masks have the values {sorted(seen)}, and ignore=255: {remedy}")
    largest = max(seen.keys() - {ignore}, default=0)
    if classes is not None and largest >= classes:
        found = f"the mask {str(seen[largest])!r} has the value {largest}"
        remedy = "pass more classes, or the value as ignore"
        raise ValueError(f"{found}, and classes are 0 to {classes - 1}: {remedy}")
    return classes or largest + 1
