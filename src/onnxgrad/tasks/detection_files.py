"""Pictures with boxes: annotations as COCO and YOLO write them, and what a detector is fed."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import onnxgrad as og

_SUFFIXES = frozenset(".bmp .gif .jpeg .jpg .png .ppm .tif .tiff .webp".split())
_GRAY = 114  # around pictures, as detectors are used to
_SLACK = 2e-3  # of the side of a picture: annotations are rounded


class Annotated(NamedTuple):
    """Pictures and their boxes: (n, 5) each, class and x1, y1, x2, y2 as shares of its sides."""

    files: list[Path]
    boxes: list[np.ndarray]
    classes: list[str]
    ids: list[int]  # of the classes, in the files
    sizes: dict[Path, tuple[int, int]]  # width and height as annotated


def pillow() -> Any:
    """Return the module `PIL.Image`."""
    try:
        from PIL import Image
    except ImportError as e:
        raise ImportError("pictures need Pillow: pip install pillow") from e
    return Image


def open_picture(picture: Any) -> Any:
    """Return a picture of Pillow in RGB: from a file, an array (H, W, 3) of 8 bits, or itself."""
    image = pillow()
    if isinstance(picture, np.ndarray):
        return image.fromarray(picture).convert("RGB")
    if isinstance(picture, image.Image):
        return picture.convert("RGB")
    from PIL import ImageOps

    try:
        with image.open(picture) as opened:
            return ImageOps.exif_transpose(opened).convert("RGB")
    except (OSError, ValueError, SyntaxError) as e:  # of Pillow, for damaged files
        raise ValueError(f"cannot read the image {str(picture)!r}: {e}") from e


def files_in(folder: Path) -> list[Path]:
    """Return the pictures in a folder, by name."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in _SUFFIXES)


def read_annotations(path: Path, part: str = "train") -> Annotated | None:
    """Return what `path` holds: a COCO file, a folder with one, a data.yaml or a folder with one.

    `part` is "train" or "val"; None where it has no such part.

    Raises:
        ValueError: files that are missing, or do not say what they must; the message names the row.
    """
    if path.is_dir():
        found = [path / name for name in ("data.yaml", "instances.json") if (path / name).is_file()]
        if not found:
            raise ValueError(f"{str(path)!r} has no instances.json (COCO) and no data.yaml (YOLO)")
        path = found[0]
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is no file")
    if path.suffix == ".json":
        return _read_coco(path) if part == "train" else None
    return _read_yolo(path, part)


def _read_coco(path: Path) -> Annotated:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        categories = sorted(read["categories"], key=lambda category: category["id"])
        pictures = {image["id"]: image for image in read["images"]}
        notes = read["annotations"]
        files = {i: _found(path, image["file_name"]) for i, image in pictures.items()}
        sizes = {files[i]: (image["width"], image["height"]) for i, image in pictures.items()}
    except (json.JSONDecodeError, KeyError, TypeError) as e:
        raise ValueError(f"{str(path)!r} is no file of COCO: {type(e).__name__}: {e}") from e
    numbers = {category["id"]: i for i, category in enumerate(categories)}
    rows: dict[Any, list] = {i: [] for i in pictures}
    for row, note in enumerate(notes):
        where = f"{str(path)!r}, annotation {row} (id {note.get('id')})"
        if note.get("image_id") not in pictures:
            raise ValueError(f"{where}: no image has the id {note.get('image_id')!r}")
        if note.get("category_id") not in numbers:
            raise ValueError(f"{where}: no category has the id {note.get('category_id')!r}")
        if note.get("iscrowd"):
            continue
        box = np.array(note.get("bbox", ()), float)
        if box.shape != (4,):
            raise ValueError(f"{where}: 'bbox' must be x, y, width and height, not {box.tolist()}")
        corners = np.r_[box[:2], box[:2] + box[2:]] / np.tile(sizes[files[note["image_id"]]], 2)
        rows[note["image_id"]].append([numbers[note["category_id"]], *_inside(corners, where)])
    boxes = [np.array(rows[i], np.float32).reshape(-1, 5) for i in pictures]
    names = [str(category["name"]) for category in categories]
    return Annotated([files[i] for i in pictures], boxes, names, list(numbers), sizes)


def _found(path: Path, name: str) -> Path:
    places = [path.parent / name, path.parent / "images" / name]
    if (file := next((p for p in places if p.is_file()), None)) is None:
        raise ValueError(f"{str(path)!r}: the image {name!r} is not in {str(path.parent)!r}")
    return file


def _inside(corners: np.ndarray, where: str) -> np.ndarray:
    """Return x1, y1, x2, y2 as shares, cut to the picture by what is a rounding error."""
    if not ((corners >= -_SLACK) & (corners <= 1 + _SLACK)).all():  # also NaN
        raise ValueError(f"{where}: the box is outside of the picture: {corners.round(4).tolist()}")
    corners = corners.clip(0, 1)
    if not (corners[2:] > corners[:2]).all():
        raise ValueError(f"{where}: the box is empty: {corners.round(4).tolist()}")
    return corners


def _read_yolo(path: Path, part: str) -> Annotated | None:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as e:
        raise ImportError(f"{str(path)!r} needs PyYAML: pip install pyyaml") from e
    read = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(read, Mapping) or "names" not in read or "train" not in read:
        raise ValueError(f"{str(path)!r} must name 'train' and 'names'")
    named = read["names"]
    named = dict(enumerate(named)) if isinstance(named, list) else dict(named)
    if sorted(named) != list(range(len(named))):
        raise ValueError(f"{str(path)!r}: the numbers of 'names' must be 0, 1, ...: {list(named)}")
    if not read.get(part):
        return None
    folder = path.parent / (read.get("path") or "") / read[part]
    if not folder.is_dir() or not (files := files_in(folder)):
        raise ValueError(f"{str(path)!r}: {part}: {str(folder)!r} is no folder of images")
    boxes = [_read_label_file(_label_file(file), len(named)) for file in files]
    return Annotated(files, boxes, [str(named[i]) for i in sorted(named)], sorted(named), {})


def _label_file(file: Path) -> Path:
    """Return where the boxes of an image are: labels/ in place of the last images/."""
    parts = list(file.parts)
    at = [i for i, part in enumerate(parts[:-1]) if part == "images"]
    if at:
        parts[at[-1]] = "labels"
    return Path(*parts).with_suffix(".txt")


def _read_label_file(path: Path, classes: int) -> np.ndarray:
    """Return the boxes of a file with class, center x and y, width and height in each line."""
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is missing: an image without boxes has an empty file")
    rows = []
    for row, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        where = f"{str(path)!r}, line {row}"
        if not line.strip():
            continue
        try:
            number, x, y, w, h = map(float, line.split())
        except ValueError as e:
            raise ValueError(f"{where}: must be class, x, y, width, height: {line!r}") from e
        if number not in range(classes):
            raise ValueError(f"{where}: class {number:g} is not among the {classes} of 'names'")
        corners = np.array([x - w / 2, y - h / 2, x + w / 2, y + h / 2])
        rows.append([number, *_inside(corners, where)])
    return np.array(rows, np.float32).reshape(-1, 5)


# -- what a detector is fed -----------------------------------------------------------------------


def letterbox(image: Any, size: tuple[int, int]) -> tuple[Any, float, np.ndarray]:
    """Return an image amid gray of (height, width), its scale, and its place, x, y, x, y."""
    scale = min(size[0] / image.height, size[1] / image.width)
    wide, high = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    left, top = (size[1] - wide) // 2, (size[0] - high) // 2
    framed = pillow().new("RGB", size[::-1], (_GRAY,) * 3)
    framed.paste(image.resize((wide, high), pillow().Resampling.BILINEAR), (left, top))
    return framed, scale, np.array([left, top, left, top], np.float32)


def to_array(image: Any, pixels: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return an image as float32 (3, H, W), by what `pixels` makes of values from 0 to 1."""
    array = pixels(np.asarray(image, np.float32) / np.float32(255))
    return np.ascontiguousarray(np.moveaxis(array, -1, 0), dtype=np.float32)


@dataclass(frozen=True)
class _Flip:
    """See `horizontal_flip`."""

    probability: float

    def __call__(self, image: Any, boxes: np.ndarray, rng: np.random.Generator) -> tuple:
        """Return both mirrored, if `rng` draws it."""
        if rng.random() >= self.probability:
            return image, boxes
        turned = boxes.copy()
        turned[:, [0, 2]] = image.width - boxes[:, [2, 0]]
        return image.transpose(pillow().Transpose.FLIP_LEFT_RIGHT), turned


def horizontal_flip(probability: float = 0.5) -> Callable[..., tuple[Any, np.ndarray]]:
    """Return an augmentation: left and right are swapped with this probability.

    An augmentation is a function `(image of Pillow, boxes, numpy.random.Generator) -> (image,
    boxes)`; boxes are float32 (n, 4), x1, y1, x2, y2 in pixels, one for each that it was given.

    Args:
        probability: from 0 to 1.

    Returns:
        The function.

    Examples:
        >>> import numpy as np
        >>> from PIL import Image
        >>> from onnxgrad.tasks.detection import horizontal_flip
        >>> flip, rng = horizontal_flip(1.0), np.random.default_rng(0)
        >>> flip(Image.new("RGB", (10, 8)), np.float32([[0, 1, 4, 5]]), rng)[1].tolist()
        [[6.0, 1.0, 10.0, 5.0]]
    """
    return _Flip(probability)


class Pictures(og.IndexedReader):
    """Annotated pictures as (float32 (N, 3, H, W), labels (N, M, 5)), M the most in a picture."""

    def __init__(
        self,
        of: Annotated,
        size: tuple[int, int],
        pixels: Callable[[np.ndarray], np.ndarray],
        augment: Sequence[Callable[..., tuple]] = (),
        match: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
    ) -> None:
        self.of, self.size, self.pixels, self.augment = of, size, pixels, tuple(augment)
        self.match = match
        self.rows: int = len(of.files)
        self.most = max([1, *map(len, of.boxes)])

    def take(self, indices: np.ndarray, seed: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the pictures and labels of a batch."""
        pairs = [self._row(int(row), seed) for row in indices]
        X, y = (np.stack(part) for part in zip(*pairs, strict=True))
        return X, y if self.match is None else self.match(X, y)

    def _row(self, row: int, seed: int | None) -> tuple[np.ndarray, np.ndarray]:
        file, boxes = self.of.files[row], self.of.boxes[row]
        image = open_picture(file)
        if self.of.sizes.get(file, image.size) != image.size:
            raise ValueError(
                f"{str(file)!r} has {image.size[0]} x {image.size[1]} pixels, and is annotated as "
                f"{self.of.sizes[file]}"
            )
        corners = boxes[:, 1:] * np.array(image.size * 2, np.float32)
        if seed is not None:
            rng = np.random.default_rng([seed, row])
            for change in self.augment:
                image, corners = change(image, corners, rng)
                if len(corners) != len(boxes):
                    raise ValueError(
                        f"{change!r} returns {len(corners)} boxes for the {len(boxes)} of "
                        f"{str(file)!r}: return one for each"
                    )
        framed, scale, corner = letterbox(image, self.size)
        label = np.full((self.most, 5), -1, np.float32)
        label[: len(boxes), 0] = boxes[:, 0]
        label[: len(boxes), 1:] = corners * np.float32(scale) + corner
        return to_array(framed, self.pixels), label

    def subset(self, numbers: np.ndarray) -> Pictures:
        """Return some of the pictures."""
        new = copy.copy(self)
        files, boxes = ([part[i] for i in numbers] for part in (self.of.files, self.of.boxes))
        new.of, new.rows = self.of._replace(files=files, boxes=boxes), len(numbers)
        return new

    def describe(self) -> dict[str, Any]:
        """Return the classes, what is done to pictures, and a digest of them and their boxes."""
        digest = hashlib.blake2b(digest_size=16)
        for file, boxes in zip(self.of.files, self.of.boxes, strict=True):
            stat = file.stat()
            digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}".encode())
            digest.update(boxes.tobytes())
        return {
            "kind": "detection",
            "rows": self.rows,
            "classes": self.of.classes,
            "size": list(self.size),
            "augment": [getattr(f, "__qualname__", None) or repr(f) for f in self.augment],
            "digest": digest.hexdigest(),
        }
