"""Pictures and their masks in files, and what a model of segmentation takes and returns."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx

import onnxgrad as og

_DTYPES = {"tensor(float)": "f4", "tensor(double)": "f8", "tensor(float16)": "f2"}
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
SUFFIXES = frozenset(".bmp .gif .jpeg .jpg .png .ppm .tif .tiff .webp".split())
BILINEAR, NEAREST = 2, 0  # of Pillow
WHITE = 255  # in masks: class 1 of black and white ones; in others, mostly what is ignored
# transforms that, by the same random numbers, do to a mask what they do to its picture
_BOTH = tuple(type(t) for t in (og.random_flip(), og.random_crop(1), og.center_crop(1)))


class Pair(NamedTuple):
    """A picture, and its mask: a file, or [(class, polygons or RLE), ...] to draw in `size`."""

    picture: Path
    mask: Any
    size: tuple[int, int] | None = None  # (width, height), where the annotations say it


def pillow() -> Any:
    """Return the module `PIL.Image`."""
    try:
        from PIL import Image
    except ImportError as e:
        raise ImportError("pictures and masks need Pillow: pip install pillow") from e
    return Image


def read_picture(source: Any, mode: str) -> Any:
    """Return a picture of Pillow, of a file or an array, upright; raise ValueError for no picture.

    One of more than 8 bits a value is none: Pillow would cut them.
    """
    from PIL import ImageOps

    arrays = isinstance(source, np.ndarray)
    name = f"array {source.shape}" if arrays else repr(str(source))
    try:
        with (pillow().fromarray if arrays else pillow().open)(source) as picture:
            upright = ImageOps.exif_transpose(picture)
            if upright.mode[0] in "IF":
                raise ValueError("it has more than 8 bits a value: convert it")
            return upright.convert(mode)
    except (OSError, SyntaxError, TypeError, ValueError) as e:  # of Pillow, for damaged files
        raise ValueError(f"cannot read the picture {name}: {e}") from e


def read_mask(pair: Pair, size: tuple[int, int], ignore: int | None) -> Any:
    """Return the mask of a picture of (width, height); raise ValueError for no class numbers.

    It has the mode "P", and its indices are the class numbers: Pillow resizes this mode by nearest
    neighbor only.
    """
    if isinstance(pair.mask, list):
        mask = _drawn(pair.mask, size)
    else:
        name = f"the mask {str(pair.mask)!r}"
        try:
            with pillow().open(pair.mask) as opened:
                mode, own, numbers = opened.mode, opened.size, np.asarray(opened).astype(np.uint8)
        except (OSError, SyntaxError) as e:
            raise ValueError(f"cannot read {name}: {e}") from e
        if mode not in ("1", "L", "P") or own != size:
            needs = f"gray or with a palette ('L', 'P', '1') and as large as its picture, {size}"
            raise ValueError(f"{name} has the mode {mode!r} and the size {own}: it must be {needs}")
        if ignore is None and (white := numbers == WHITE).any():
            if (numbers[~white] > 0).any():
                raise ValueError(f"{name} has 255 and others than 0: pass ignore=255")
            numbers = white.astype(np.uint8)
        mask = pillow().fromarray(numbers)
    mask.putpalette(palette())
    return mask


def _drawn(shapes: Sequence[tuple[int, Any]], size: tuple[int, int]) -> Any:
    """Return the mask of shapes, later ones above earlier ones."""
    from PIL import ImageDraw

    mask = pillow().new("L", size)
    for number, parts in shapes:
        if isinstance(parts, dict):
            mask.paste(number, mask=pillow().fromarray(decode_rle(parts) * np.uint8(255)))
        else:
            for part in parts:
                ImageDraw.Draw(mask).polygon(part, fill=number)
    return mask


def decode_rle(rle: dict[str, Any]) -> np.ndarray:
    """Return the pixels (height, width) of a run-length encoding of COCO."""
    try:
        from pycocotools import mask as coco  # type: ignore[import-untyped]
    except ImportError as e:
        raise ImportError("RLE masks of COCO need pycocotools: pip install pycocotools") from e
    packed = coco.frPyObjects(rle, *rle["size"]) if isinstance(rle["counts"], list) else rle
    return np.asarray(coco.decode(packed))


def folder_pairs(path: Path) -> tuple[list[Pair], list[str]]:
    """Return the pairs of `images` and `masks`, and the names of classes in `classes.txt`."""
    found = {}
    for part in ("images", "masks"):
        if not (path / part).is_dir():
            raise ValueError(f"{str(path)!r} has no folder {part!r}: it takes 'images' and 'masks'")
        files = [f for f in sorted((path / part).iterdir()) if f.suffix.lower() in SUFFIXES]
        found[part] = {file.stem: file for file in files}
        if len(found[part]) < len(files):
            raise ValueError(f"{str(path / part)!r} has files that differ in their suffix only")
    images, masks = found["images"], found["masks"]
    if alone := sorted(images.keys() ^ masks.keys()):
        raise ValueError(f"{str(path)!r}: {alone[:5]} have no picture or no mask of the same name")
    listed = path / "classes.txt"
    names = listed.read_text("utf-8").splitlines() if listed.is_file() else []
    return [Pair(images[s], masks[s]) for s in images], [n.strip() for n in names if n.strip()]


def coco_pairs(path: Path, images: Path) -> tuple[list[Pair], list[str]]:
    """Return the pairs of a COCO file, and its classes: "background" and the categories."""
    content = json.loads(path.read_text("utf-8"))
    if missing := {"images", "annotations", "categories"} - content.keys():
        raise ValueError(f"{str(path)!r} is no file of COCO: it has no {sorted(missing)}")
    categories = sorted(content["categories"], key=lambda c: c["id"])
    numbers = {c["id"]: n for n, c in enumerate(categories, 1)}
    pairs = {
        i["id"]: Pair(images / i["file_name"], [], (i["width"], i["height"]))
        for i in content["images"]
    }
    for a in content["annotations"]:
        parts, where = a.get("segmentation"), f"{str(path)!r}: annotation {a.get('id')!r}"
        pair, number = pairs.get(a["image_id"]), numbers.get(a["category_id"])
        if pair is None or number is None:
            given = f"image {a['image_id']!r}, category {a['category_id']!r}"
            raise ValueError(f"{where} is of {given}, which the file does not list")
        if isinstance(parts, dict):
            fits = decode_rle(parts).shape[::-1] == pair.size
        else:
            fits = parts and all(len(p) >= 6 and len(p) % 2 == 0 for p in parts)
        if not fits:
            raise ValueError(f"{where} has no polygons [x, y, x, y, x, y] or RLE of its image")
        pair.mask.append((number, parts))
    return [*pairs.values()], ["background", *(str(c["name"]) for c in categories)]


def check_pairs(pairs: Sequence[Pair], ignore: int | None, classes: int | None) -> int:
    """Return the number of classes in masks, and `classes` where that is given.

    Raises:
        ValueError: pictures that are missing or of another size than their mask, or class numbers
            that are no classes.
    """
    seen: dict[int, Path] = {}
    for pair in pairs:
        try:
            with pillow().open(pair.picture) as opened:
                turned = opened.getexif().get(274, 1) >= 5  # the orientation
                size = opened.size[::-1] if turned else opened.size
        except OSError as e:
            raise ValueError(f"cannot read the picture {str(pair.picture)!r}: {e}") from e
        if pair.size not in (None, size):
            sizes = f"has the size {size}, and {pair.size} in its annotations"
            raise ValueError(f"the picture {str(pair.picture)!r} {sizes}")
        if not isinstance(pair.mask, list):
            counts = read_mask(pair, size, ignore).histogram()
            seen = {n: pair.mask for n, count in enumerate(counts) if count} | seen
    if ignore == WHITE and seen and {*seen} <= {0, WHITE}:
        remedy = "pass ignore=None for black and white masks, where 255 is class 1"
        raise ValueError(f"the masks have the values {sorted(seen)}, and ignore=255: {remedy}")
    largest = max(seen.keys() - {ignore}, default=0)
    if classes is not None and largest >= classes:
        found = f"the mask {str(seen[largest])!r} has the value {largest}"
        remedy = "pass more classes, or the value as ignore"
        raise ValueError(f"{found}, and classes are 0 to {classes - 1}: {remedy}")
    return classes or largest + 1


def pictures(inputs: Any) -> list[tuple[str, Any]]:
    """Return name and source of each picture: of a folder, of files or of arrays."""
    if isinstance(inputs, (str, os.PathLike)):
        path = Path(inputs)
        inputs = sorted(path.iterdir()) if path.is_dir() else [path]
        inputs = [f for f in inputs if f.suffix.lower() in SUFFIXES]
    if isinstance(inputs, np.ndarray) and inputs.ndim != 4:
        raise ValueError(f"an array of pictures has 4 axes (N, H, W, channels), not {inputs.shape}")
    found = [
        (f"{number:05}" if isinstance(source, np.ndarray) else Path(source).stem, source)
        for number, source in enumerate(inputs)
    ]
    if not found:
        raise ValueError("there is no picture")
    return found


def palette() -> bytes:
    """Return the colors of 256 classes, three bytes each, those of Pascal VOC."""
    n, channel = np.arange(256)[:, None], np.arange(3)
    bits = [((n >> (3 * j + channel)) & 1) << (7 - j) for j in range(8)]
    return np.sum(bits, axis=0).astype(np.uint8).tobytes()


@dataclass(frozen=True)
class Form:
    """What a model takes and returns: pictures of `size` and scores on `grid`, (H, W) each."""

    output: str
    several: bool  # outputs
    dtype: np.dtype
    batch: int
    size: tuple[int, int]
    channels: int
    axes: tuple[int, int]  # of the channels of the picture, and of the scores
    grid: tuple[int, int]
    scores: int
    threshold: float | None  # between two classes, of one score
    normalize: Callable[..., np.ndarray] | None

    @classmethod
    def of(cls, model: onnx.ModelProto, size: Any, layout: Any, output: Any, norm: Any) -> Form:
        """Run the model on a black picture; raise ValueError if it does not segment it."""
        session = session_of(model)
        x, *others = session.get_inputs()
        if others or x.type not in _DTYPES or len(x.shape) != 4:
            found = [(i.name, i.type, i.shape) for i in (x, *others)]
            raise ValueError(f"inputs {found}: needs one of pictures, floats with 4 axes")
        axis, size = _axis_and_size(x, size, layout)
        channels = x.shape[axis] if x.shape[axis] in MODES else 3
        shape = [x.shape[0] if isinstance(x.shape[0], int) else 1, *size]
        shape.insert(axis, channels)
        outputs = [y.name for y in session.get_outputs() if y.type in _DTYPES]
        if output not in outputs and (output or len(outputs) != 1):
            raise ValueError(f"output={output!r}: name that of the scores, one of {outputs}")
        name = output or outputs[0]
        try:
            scores = session.run([name], {x.name: np.zeros(shape, _DTYPES[x.type])})[0].shape
        except Exception as e:
            raise ValueError(f"pictures of {size} do not run, pass another image_size: {e}") from e
        if len(scores) != 4:
            raise ValueError(f"output {name!r} of shape {scores}: needs 4 axes, one of classes")
        one = next((a for a in (1, 3) if scores[a] == 1), None)
        loss = "cross_entropy" if one is None else "binary_cross_entropy"
        noted = og.add_loss_output(model, loss, output_index=name, from_logits=None)
        facts = json.loads({p.key: p.value for p in noted.metadata_props}["onnxgrad.loss"])
        of_classes = (facts.get("axis") or 1) % 4 if one is None else one
        grid = tuple(n for a, n in enumerate(scores) if a not in (0, of_classes))
        several, threshold = len(session.get_outputs()) > 1, facts.get("threshold")
        of_scores = (axis, of_classes), grid, scores[of_classes], threshold
        return cls(
            name, several, np.dtype(_DTYPES[x.type]), shape[0], size, channels, *of_scores, norm
        )

    def array(self, picture: Any) -> np.ndarray:
        """Return a picture as the model takes it, without the axis of rows."""
        resized = np.asarray(picture.resize(self.size[::-1], BILINEAR), np.float32)
        array = resized.reshape(*self.size, self.channels) / np.float32(255)
        array = array if self.normalize is None else self.normalize(array, None)
        return np.moveaxis(array, -1, self.axes[0] - 1).astype(self.dtype)

    def classes(self, scores: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Return the class of each pixel of (width, height), by scores that are resized to it."""
        planes = np.moveaxis(scores.astype(np.float32), self.axes[1] - 1, 0)
        resized = (np.asarray(pillow().fromarray(p).resize(size, BILINEAR)) for p in planes)
        best = next(resized)
        if self.scores == 1:
            return (best > self.threshold).astype(np.uint8)
        classes = np.zeros(best.shape, np.uint8)
        for number, plane in enumerate(resized, 1):
            classes[plane > best] = number
            best = np.maximum(best, plane)
        return classes


def _axis_and_size(x: Any, size: Any, layout: str | None) -> tuple[int, tuple[int, int]]:
    """Return the axis of the channels of an input, and (height, width)."""
    name, known = f"input {x.name!r} of shape {x.shape}", {"NCHW": [1], "NHWC": [3]}
    axes = known.get(str(layout), []) if layout else [a for a in (1, 3) if x.shape[a] in MODES]
    if len(axes) != 1:
        raise ValueError(f"{name}: pass layout='NCHW' or 'NHWC', not {layout!r}")
    fixed = [n for axis, n in enumerate(x.shape) if axis not in (0, *axes)]
    size = tuple(size or fixed)
    other = any(isinstance(n, int) and n != m for n, m in zip(fixed, size, strict=False))
    if other or len(size) != 2 or not all(isinstance(n, int) for n in size):
        raise ValueError(f"{name}: pass (height, width) as image_size, not {size}")
    return axes[0], size


def session_of(model: Any) -> Any:
    """Return a session of a model or path."""
    import onnxruntime as ort

    data = model.SerializeToString() if isinstance(model, onnx.ModelProto) else os.fspath(model)
    return ort.InferenceSession(data, providers=["CPUExecutionProvider"])


def runner(model: Any, output: str) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function of pictures that the model computes as `output`."""
    session = session_of(model)
    name = session.get_inputs()[0].name
    return lambda rows: session.run([output], {name: rows})[0]


class MaskRows(og.IndexedReader):
    """Pictures with masks, read while a training runs."""

    def __init__(
        self, form: Form, pairs: list[Pair], classes: Any, ignore: int | None, augment: tuple
    ) -> None:
        self.form, self.pairs, self.classes, self.ignore = form, pairs, classes, ignore
        self.augment, self.rows = augment, len(pairs)

    def take(self, indices: np.ndarray, seed: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the pictures and labels of a batch."""
        both = [self._row(int(i), seed) for i in indices]
        return np.stack([x for x, _ in both]), np.stack([y for _, y in both])

    def _row(self, row: int, seed: int | None) -> tuple[np.ndarray, np.ndarray]:
        picture = read_picture(self.pairs[row].picture, MODES[self.form.channels])
        mask = read_mask(self.pairs[row], picture.size, self.ignore)
        rng = None if seed is None else np.random.default_rng([seed, row])
        for change in self.augment if rng is not None else ():
            if isinstance(change, _BOTH):
                again = copy.deepcopy(rng)
                picture, mask = change(picture, rng), change(mask, again)
            else:
                picture, mask = change(picture, mask, rng)
            if mask.mode != "P" or mask.size != picture.size:
                of = f"size {mask.size} and mode {mask.mode!r} for a picture of {picture.size}"
                raise ValueError(f"augment: {change!r} returned a mask of {of}, and not 'P'")
        numbers = np.asarray(mask.resize(self.form.grid[::-1], NEAREST)).astype(np.int64)
        ignored = np.zeros(1, bool) if self.ignore is None else numbers == self.ignore
        if self.form.scores > 1:
            return self.form.array(picture), np.where(ignored, -100, numbers)
        label = np.where(ignored, np.nan, numbers).astype(np.float32)
        return self.form.array(picture), np.expand_dims(label, self.form.axes[1] - 1)

    def subset(self, numbers: np.ndarray) -> MaskRows:
        """Return some of the pictures."""
        pairs = [self.pairs[i] for i in numbers]
        return MaskRows(self.form, pairs, self.classes, self.ignore, self.augment)

    def describe(self) -> dict[str, Any]:
        """Return the classes, the sizes, and a digest of names, sizes and times of files."""
        digest = hashlib.blake2b(digest_size=16)
        for pair in self.pairs:
            for part in pair[:2]:
                stat = None if isinstance(part, list) else part.stat()
                fact = part if stat is None else (part.name, stat.st_size, stat.st_mtime_ns)
                digest.update(repr(fact).encode())
        augment = [getattr(change, "__qualname__", repr(change)) for change in self.augment]
        facts = {"rows": self.rows, "classes": [*self.classes], "augment": augment}
        facts |= {"size": self.form.size, "grid": self.form.grid, "ignore": self.ignore}
        return {"kind": "segmentation", **facts, "digest": digest.hexdigest()}
