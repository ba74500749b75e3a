"""A reader of images with boxes in files of COCO or YOLO, decoded while training reads them."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.data.image_files import is_image, is_path, load_pillow, open_image, read_coco
from onnxgrad.data.image_transforms import (
    RandomColors,
    RandomFlip,
    height_and_width,
    transform_name,
)
from onnxgrad.data.readers import FileReader, describe_files, keep_arguments
from onnxgrad.errors import argument, not_installed, unknown
from onnxgrad.operators.shapes import Dims

COCO_FILE = "instances.json"
_GRAY = 114  # value of the border of images, as published detectors were trained with
_SLACK = 2e-3  # share of the side of an image by which rounded boxes may stand out

# (image of Pillow, boxes in pixels (n, 4), generator) -> (image, boxes)
BoxTransform = Callable[[Any, np.ndarray, np.random.Generator], tuple[Any, np.ndarray]]
ImageTransform = RandomFlip | RandomColors


@keep_arguments(data="path")
def annotated_images(
    path: str | os.PathLike,
    size: int | tuple[int, int] | None = None,
    transforms: Sequence[ImageTransform | BoxTransform] = (),
    pixels: Callable[[np.ndarray], np.ndarray] | None = None,
    part: str | None = "train",
) -> AnnotatedImages:
    """Return images with boxes as data for `fit`, decoded while training runs.

    A batch has images, float32 (N, 3, height, width), and labels, float32 (N, M, 5): class number,
    x1, y1, x2, y2 in pixels of the resized image. M is the largest number of boxes in an image, and
    class -1 fills images with fewer boxes. Images are resized to fit into `size`, and are gray
    around that, see `letterbox`.

    Args:
        path: a COCO file, or a folder with `instances.json`: its images are beside it, or in
            `images/`; boxes of crowds are left out. Or a `data.yaml` of YOLO, or a folder with one:
            it names `train`, perhaps `val`, and `names`; the boxes of `images/a.png` are the lines
            of `labels/a.txt`, class and center x, y, width and height as shares of the image.
        size: height and width of the images for the model, a number for both; None: as the model's
            input declares.
        transforms: `random_flip()`, `random_colors()`, or functions `(image of Pillow, boxes,
            numpy.random.Generator) -> (image, boxes)`; boxes are float32 (n, 4), x1, y1, x2, y2 in
            pixels of the image, as many in the result as in the argument. They are applied in
            training only, and draw by the seed of the epoch and the number of the image.
        pixels: see `letterbox`.
        part: "train", or "val" of a data.yaml; None: "val" if the file names it, or else "train".

    Returns:
        A reader, which `fit(reader)` takes as X; see `AnnotatedImages` for its attributes.

    Raises:
        ImportError: Pillow is not installed, or PyYAML for a data.yaml.
        ValueError: files that are missing or incomplete; the message names the row.

    Examples:
        >>> import json, pathlib, tempfile, onnxgrad as og
        >>> from PIL import Image
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> Image.new("RGB", (8, 4), "white").save(root / "a.png")
        >>> boxes = [{"id": 1, "image_id": 7, "category_id": 3, "bbox": [2, 0, 4, 2]}]
        >>> images = [{"id": 7, "file_name": "a.png", "width": 8, "height": 4}]
        >>> content = {"images": images, "annotations": boxes,
        ...            "categories": [{"id": 3, "name": "cat"}]}
        >>> _ = (root / "instances.json").write_text(json.dumps(content))
        >>> reader = og.data.annotated_images(root, size=16)
        >>> X, labels = next(reader.batches(1, None, 0))
        >>> X.shape, labels.tolist(), reader.classes
        ((1, 3, 16, 16), [[[0.0, 4.0, 4.0, 12.0, 8.0]]], ['cat'])
    """
    load_pillow()
    if part not in ("train", "val", None):
        raise unknown("part", part, ["train", "val"])
    annotations = _read_annotations(Path(path), part)
    pair = None if size is None else height_and_width(size)
    return AnnotatedImages(size=pair, transforms=tuple(transforms), pixels=pixels, **annotations)


def letterbox(
    image: Any, size: tuple[int, int], pixels: Callable[[np.ndarray], np.ndarray] | None = None
) -> tuple[np.ndarray, float, np.ndarray]:
    """Return an image for detectors: resized to fit into `size`, and gray around that.

    Args:
        image: a path, an array or an image of Pillow, see `open_image`.
        size: height and width.
        pixels: function from RGB, float32 (height, width, 3) of 0 to 1, to the values that the
            model takes, such as BGR of 0 to 255; None: the values stay from 0 to 1.

    Returns:
        The array, float32 (3, height, width); the scale of the image in it; and its corner there,
        float32 (4,), x, y, x, y: boxes (..., 4) of the image are at boxes * scale + corner.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> array, scale, corner = og.data.letterbox(np.zeros((4, 8, 3), np.uint8), (16, 16))
        >>> array.shape, scale, corner.tolist()
        ((3, 16, 16), 2.0, [0.0, 4.0, 0.0, 4.0])
    """
    image = open_image(image)
    scale = min(size[0] / image.height, size[1] / image.width)
    wide, high = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    left, top = (size[1] - wide) // 2, (size[0] - high) // 2
    framed = load_pillow().new("RGB", size[::-1], (_GRAY,) * 3)
    framed.paste(image.resize((wide, high), load_pillow().Resampling.BILINEAR), (left, top))
    array = np.asarray(framed, np.float32) / np.float32(255)
    array = np.moveaxis(array if pixels is None else pixels(array), -1, 0)
    corner = np.array([left, top, left, top], np.float32)
    return np.ascontiguousarray(array, dtype=np.float32), scale, corner


@dataclass(eq=False)
class AnnotatedImages(FileReader):
    """Images with boxes: the reader of `annotated_images`.

    Attributes:
        classes: names of the classes, in the order of their numbers.
        ids: ids of the classes in the files.
        files: the images.
        boxes: of each image, float32 (n, 5): class number, x1, y1, x2, y2 as shares of its sides.
        image_ids: the ids of the images in a COCO file, by path; empty for YOLO.
        parts: "train", and "val" if a data.yaml names it.
        size, transforms, pixels: see `annotated_images`.
    """

    per_row = ("files", "boxes")

    files: list[Path]
    boxes: list[np.ndarray]
    classes: list[str]
    ids: list[int]
    size: tuple[int, int] | None
    transforms: tuple[ImageTransform | BoxTransform, ...]
    pixels: Callable[[np.ndarray], np.ndarray] | None
    parts: tuple[str, ...] = ("train",)
    image_ids: Mapping[Path, Any] = field(default_factory=dict)
    _sizes: Mapping[Path, tuple[int, int]] = field(default_factory=dict)  # as annotated

    def __post_init__(self) -> None:
        self.rows = len(self.files)
        self._most = max([1, *map(len, self.boxes)])

    def for_inputs(self, shapes: Mapping[str, Dims | None]) -> AnnotatedImages:
        """Return the reader with the image size that the model's only input declares."""
        if self.size is not None:
            return self
        shape = next(iter(shapes.values()), None) if len(shapes) == 1 else None
        if shape is None or len(shape) != 4 or not all(isinstance(n, int) for n in shape[2:]):
            raise ValueError(
                f"the inputs {dict(shapes)} declare no sizes of images: pass {argument('size')}"
            )
        new = copy.copy(self)
        new.size = int(str(shape[2])), int(str(shape[3]))
        return new

    def read_row(self, row: int, rng: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the image of a row, and its label: the classes and corners of the boxes."""
        file, boxes = self.files[row], self.boxes[row]
        image = open_image(file)
        if self._sizes.get(file, image.size) != image.size:
            raise ValueError(
                f"{str(file)!r} has {image.size[0]} x {image.size[1]} pixels, and its "
                f"annotation says {self._sizes[file]}: correct the annotation, or the image"
            )
        if self.size is None:
            raise ValueError(f"the size of images is unknown: pass {argument('size')}")
        corners = boxes[:, 1:] * np.array(image.size * 2, np.float32)
        for change in self.transforms:
            if rng is None:
                break  # evaluations have no random changes
            image, corners = _transform_image_and_boxes(change, image, corners, rng)
            if len(corners) != len(boxes):
                raise ValueError(
                    f"{change!r} returns {len(corners)} boxes for the {len(boxes)} boxes of "
                    f"{str(file)!r}: return one for each"
                )
        array, scale, corner = letterbox(image, self.size, self.pixels)
        label = np.full((self._most, 5), -1, np.float32)
        label[: len(boxes), 0] = boxes[:, 0]
        label[: len(boxes), 1:] = corners * np.float32(scale) + corner
        return array, label

    def describe(self) -> dict[str, Any]:
        """Return the classes, size and transforms, and a digest of images and boxes."""
        boxes = hashlib.blake2b(b"".join(b.tobytes() for b in self.boxes), digest_size=16)
        return {
            "kind": "annotated images",
            "rows": self.rows,
            "classes": self.classes,
            "size": self.size and list(self.size),
            "transforms": [transform_name(change) for change in self.transforms],
            "digest": describe_files(self.files) + boxes.hexdigest(),
        }


def _transform_image_and_boxes(
    change: Any, image: Any, boxes: np.ndarray, rng: np.random.Generator
) -> tuple[Any, np.ndarray]:
    """Return an image and its boxes, both changed by the transform `change`."""
    if isinstance(change, RandomColors):
        return change(image, rng), boxes
    if not isinstance(change, RandomFlip):
        return change(image, boxes, rng)
    if (turned := change(image, rng)) is not image:
        boxes = np.stack([image.width - boxes[:, 2], boxes[:, 1], image.width - boxes[:, 0],
                          boxes[:, 3]], 1)  # fmt: skip
    return turned, boxes


def _read_annotations(path: Path, part: str | None) -> dict[str, Any]:
    """Return the attributes of an `AnnotatedImages` for a COCO file, a data.yaml, or a folder."""
    if path.is_dir():
        found = [path / name for name in ("data.yaml", COCO_FILE) if (path / name).is_file()]
        if not found:
            raise ValueError(
                f"{str(path)!r} has no instances.json (COCO) and no data.yaml (YOLO): pass a "
                "folder that holds one of these files, or the path of such a file"
            )
        path = found[0]
    if not path.is_file():
        raise ValueError(
            f"there is no file {str(path)!r}: pass a COCO file (.json), the data.yaml of YOLO, or "
            "a folder that holds one of these"
        )
    if path.suffix != ".json":
        return _read_yolo(path, part)
    if part == "val":
        raise ValueError(
            f"{str(path)!r} is a COCO file, which has no part 'val': leave out part, and pass the "
            "COCO file of the validation images"
        )
    return _read_coco(path)


def _read_coco(path: Path) -> dict[str, Any]:
    """Return the attributes of an `AnnotatedImages` for a COCO file, without crowd boxes."""
    coco = read_coco(path, [path.parent, path.parent / "images"])
    numbers = {category: number for number, category in enumerate(coco.categories)}
    rows: dict[Any, list] = {i: [] for i in coco.files}
    for where, annotation in coco.annotations:
        if annotation.get("iscrowd"):
            continue
        box = np.array(annotation.get("bbox", ()), float)
        if box.shape != (4,):
            raise ValueError(f"{where}: 'bbox' must be x, y, width and height, not {box.tolist()}")
        i = annotation["image_id"]
        corners = np.r_[box[:2], box[:2] + box[2:]] / np.tile(coco.sizes[i], 2)
        rows[i].append([numbers[annotation["category_id"]], *_clip_corners(corners, where)])
    return {
        "files": list(coco.files.values()),
        "boxes": [np.array(boxes, np.float32).reshape(-1, 5) for boxes in rows.values()],
        "classes": list(coco.categories.values()),
        "ids": list(coco.categories),
        "image_ids": {file: i for i, file in coco.files.items()},
        "_sizes": {file: coco.sizes[i] for i, file in coco.files.items()},
    }


def is_annotation_path(source: Any) -> bool:
    """Return whether a path is a COCO file or a data.yaml, or a folder that holds one of these
    files.

    A folder with images in it is a folder of images, whatever other files it has.
    """
    if not is_path(source):
        return False
    path = Path(source)
    if not path.is_dir():
        return path.suffix.lower() in (".json", ".yaml", ".yml")
    named = any((path / name).is_file() for name in ("data.yaml", COCO_FILE))
    return named and not any(map(is_image, path.iterdir()))


def _clip_corners(corners: np.ndarray, where: str) -> np.ndarray:
    """Return corners, given as shares of width and height, clipped to 0 and 1; raise `ValueError`
    beyond rounding errors.
    """
    if not ((corners >= -_SLACK) & (corners <= 1 + _SLACK)).all():  # NaN fails, too
        raise ValueError(
            f"{where}: the box reaches beyond the image, with its corners at the shares "
            f"{corners.round(4).tolist()} of width and height: correct or remove the box"
        )
    corners = corners.clip(0, 1)
    if not (corners[2:] > corners[:2]).all():
        raise ValueError(
            f"{where}: the box is empty, with its corners at the shares "
            f"{corners.round(4).tolist()} of width and height: correct or remove the box"
        )
    return corners


def _read_yolo(path: Path, part: str | None) -> dict[str, Any]:
    """Return the attributes of an `AnnotatedImages` for one part (train, val) of a data.yaml."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as e:
        raise not_installed(f"reading {str(path)!r}", "pyyaml", "detection") from e
    read = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(read, Mapping) or "names" not in read or "train" not in read:
        raise ValueError(
            f"{str(path)!r} must have the keys 'train', a folder of images, and 'names', the "
            "classes"
        )
    named = read["names"]
    named = dict(enumerate(named)) if isinstance(named, list) else dict(named)
    if sorted(named) != list(range(len(named))):
        raise ValueError(f"{str(path)!r}: the keys of 'names' must be 0, 1, ..., not {list(named)}")
    parts = tuple(name for name in ("train", "val") if read.get(name))
    chosen = part or parts[-1]
    if chosen not in parts:
        raise ValueError(
            f"{str(path)!r} has no key {chosen!r}: add it, with a folder of images, or pass "
            "another part"
        )
    folder = path.parent / (read.get("path") or "") / read[chosen]
    files = sorted(filter(is_image, folder.iterdir())) if folder.is_dir() else []
    if not files:
        raise ValueError(
            f"{str(path)!r}: {chosen!r} must be a folder of images, and {str(folder)!r} is no "
            "folder, or holds no images"
        )
    boxes = [_read_yolo_boxes(_label_file_of_image(file), len(named)) for file in files]
    ids = sorted(named)
    classes = [str(named[i]) for i in ids]
    return {"files": files, "boxes": boxes, "classes": classes, "ids": ids, "parts": parts}


def _label_file_of_image(file: Path) -> Path:
    """Return the path of the YOLO label file of an image: labels/ replaces the last images/."""
    parts = list(file.parts)
    at = [i for i, part in enumerate(parts[:-1]) if part == "images"]
    if at:
        parts[at[-1]] = "labels"
    return Path(*parts).with_suffix(".txt")


def _read_yolo_boxes(path: Path, classes: int) -> np.ndarray:
    """Return the boxes of a YOLO file: class, center x and y, width and height in each line."""
    if not path.is_file():
        raise ValueError(
            f"{str(path)!r} is missing: write the boxes of the image into it; an image without "
            "boxes needs an empty file"
        )
    rows = []
    for row, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        where = f"{str(path)!r}, line {row}"
        if not line.strip():
            continue
        try:
            number, x, y, w, h = map(float, line.split())
        except ValueError as e:
            raise ValueError(
                f"{where}: a line must hold class, x, y, width and height, not {line!r}"
            ) from e
        if number not in range(classes):
            raise ValueError(f"{where}: class {number:g} must be below {classes}, as in 'names'")
        corners = np.array([x - w / 2, y - h / 2, x + w / 2, y + h / 2])
        rows.append([number, *_clip_corners(corners, where)])
    return np.array(rows, np.float32).reshape(-1, 5)
