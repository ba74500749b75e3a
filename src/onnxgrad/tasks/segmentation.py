"""Semantic segmentation: a class for every pixel of a picture."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import onnxgrad as og
from onnxgrad.tasks.base import Task
from onnxgrad.tasks.masks import (
    MODES,
    NEAREST,
    Form,
    Pair,
    check_pairs,
    coco_pairs,
    folder_pairs,
    palette,
    pictures,
    read_mask,
    read_picture,
    runner,
)

__all__ = ["Segmentation"]

# the loss of one score a pixel, and that of one for each class
_LOSSES = {
    "cross_entropy": ("binary_cross_entropy", "cross_entropy"),
    "dice": ("dice", "softmax_dice"),
    "focal": ("focal", "softmax_focal"),
}
_CLASSES = "onnxgrad.classes"  # where `replace_head` stores their names
_HELD = ("val", "valid", "validation")
_logger = logging.getLogger("onnxgrad")
# transforms that, by the same random numbers, do to a mask what they do to its picture
_BOTH = tuple(type(t) for t in (og.random_flip(), og.random_crop(1), og.center_crop(1)))


class Segmentation(Task):
    """A class for every pixel: semantic segmentation by scores (N, classes, H, W).

    Data are a folder with `images` and `masks` of the same names, or a JSON file of COCO. A mask is
    a PNG with a palette or in gray, whose values are class numbers. `classes.txt` in the folder may
    name the classes, one a line; it may have two such folders, `train` and `val`. The categories of
    COCO are classes from 1 on, by their ids, and 0 is "background"; Pillow draws polygons, and
    later annotations are above earlier ones.

    Pictures are resized to the input of the model (bilinear), masks to its output (nearest
    neighbor), also where that is smaller: loss and metrics are those of its pixels. For
    predictions, scores are resized to the picture (bilinear) before the best class is chosen.
    Labels are int64 (N, H, W), -100 where ignored. A model with one score a pixel, (N, 1, H, W),
    tells two classes apart: its labels have that shape, and are 0.0, 1.0, or NaN where ignored.

    The metrics are `iou`, the mean over the classes that occur, and `iou_per_class`.

    Args:
        model: model or path, with one input of pictures, channels first or last.
        data: the folder or JSON file; None: `model` is one that was trained.
        classes: names of the classes, or their number; None: those that the data name, or up to the
            largest number in masks. If the model has scores of another number, it gets a new last
            layer by `replace_head`, and the logger warns.
        image_size: (height, width) of pictures for the model; None: as its input declares.
        images: folder of the pictures of a JSON file; None: that of the file.
        normalize: of values from 0 to 1, as `og.normalize(mean, std)`.
        augment: of pictures and masks in training, in this order: `og.random_flip()`,
            `og.random_crop(size)`, or functions `(picture, mask, numpy.random.Generator) ->
            (picture, mask)` of Pillow; masks have the mode "P". What is random about a row follows
            from the seed of the epoch and its number.
        ignore: the value in masks of pixels without a label; None: there are none, and in masks of
            0 and 255, 255 is class 1.
        loss: "cross_entropy", "dice" or "focal", several with "+" in between, or `{name: factor}`:
            see `combined_loss`; these are `binary_cross_entropy`, `dice` and `focal` of one score,
            `cross_entropy`, `softmax_dice` and `softmax_focal` of several. Or a `LossSpec`.
        loss_options: options by the name of the loss, `{"focal": {"gamma": 1.5}}`.
        output: name of the scores, if the model has several outputs.
        layout: "NCHW" or "NHWC"; None: by the declared shape of the input.
        seed: of the weights of a new last layer.

    Raises:
        ImportError: Pillow is not installed, or pycocotools for RLE.
        ValueError: files that cannot be read or do not fit, or no model of segmentation.

    Examples:
        >>> import pathlib, tempfile, numpy as np, onnx, onnxgrad as og
        >>> from PIL import Image
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> for part, name in (("images", "RGB"), ("masks", "L")):
        ...     (root / part).mkdir()
        ...     Image.new(name, (8, 8), "white" if name == "RGB" else 1).save(root / part / "1.png")
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,3,8,8] x) => (float[N,1,8,8] y) <float[1,3,1,1] w = {-1.0, 0.0, 0.0}>
        ...     { s = Conv(x, w)  y = Sigmoid(s) }''')
        >>> task = og.tasks.segmentation.Segmentation(model, root, loss="cross_entropy+dice")
        >>> trainer = task.trainer(learning_rate=0.5).fit(task.data, epochs=5)
        >>> [mask.mean() for mask in task.predict(trainer, root / "images")]
        [np.float64(1.0)]
    """

    def __init__(
        self,
        model: Any,
        data: str | os.PathLike | None = None,
        *,
        classes: int | Sequence[str] | None = None,
        image_size: tuple[int, int] | None = None,
        images: str | os.PathLike | None = None,
        normalize: Callable[..., np.ndarray] | None = None,
        augment: Sequence[Callable[..., Any]] = (),
        ignore: int | None = 255,
        loss: Any = "cross_entropy",
        loss_options: Mapping[str, Mapping[str, Any]] | None = None,
        output: str | None = None,
        layout: str | None = None,
        seed: int = 0,
    ) -> None:
        proto = model if isinstance(model, onnx.ModelProto) else onnx.load(model)
        self.images, self.ignore = images, ignore
        of_pictures = image_size, layout, output, normalize
        form = Form.of(proto, *of_pictures)
        held = next((p for n in _HELD if data and (p := Path(data) / n).is_dir()), None)
        names, number = ([], classes) if isinstance(classes, int) else ([*(classes or ())], None)
        stored = json.loads({p.key: p.value for p in proto.metadata_props}.get(_CLASSES, "[]"))
        if data is not None:
            pairs, own = self._pairs(Path(data) / "train" if held else Path(data))
            if own and (names not in ([], own) or number not in (None, len(own))):
                raise ValueError(f"classes={classes!r}, but those of {str(data)!r} are {own}")
            names = names or own
            number = check_pairs(pairs, ignore, len(names) or number)
        if not names and classes is None and (number or 0) <= len(stored):
            names = stored
        had = max(2, form.scores)  # one score tells two classes apart
        number = len(names) or number or had
        if number != had and data is None:
            raise ValueError(f"the model has scores of {had} classes, not {number}: give it data")
        if number != had:
            _logger.warning("scores of %d classes: a new last layer has those of %d", had, number)
            at = output if form.several else None
            proto = og.replace_head(proto, names or number, output=at, seed=seed)
            form = Form.of(proto, *of_pictures)
        self.model, self._form = proto, form
        self.classes = names or [str(n) for n in range(number)]
        if not isinstance(loss, og.LossSpec):
            loss = _loss(loss, loss_options or {}, form)
        metrics = ["iou", "iou_per_class"]
        self.loss = {form.output: loss} if form.several else loss
        self.metrics: Any = {form.output: metrics} if form.several else metrics
        self.arguments = {}
        if data is not None:
            self.data = _Rows(form, pairs, self.classes, ignore, tuple(augment))
            self.validation = self.read(held) if held else None

    def _pairs(self, path: Path, images: Any = None) -> tuple[list[Pair], list[str]]:
        if path.suffix.lower() == ".json":
            return coco_pairs(path, Path(images or self.images or path.parent))
        return folder_pairs(path)

    def read(self, path: str | os.PathLike, images: str | os.PathLike | None = None) -> og.Reader:
        """Return other pictures with masks of the same classes; nothing augments them.

        Args:
            path: as `data`.
            images: folder of the pictures of a JSON file; None: as for `data`.

        Raises:
            ValueError: files that cannot be read or do not fit, or other classes.
        """
        pairs, own = self._pairs(Path(path), images)
        if own and own != [*self.classes]:
            raise ValueError(f"the classes of {str(path)!r} are {own}, not {[*self.classes]}")
        check_pairs(pairs, self.ignore, len(self.classes))
        return _Rows(self._form, pairs, self.classes, self.ignore, ())

    def predict(self, model: Any, inputs: Any) -> list[np.ndarray]:
        """Return the mask of each picture: class numbers, uint8, (height, width) of the picture.

        Args:
            model: a trained model, a path, or a `Trainer`.
            inputs: a folder, files, or arrays (height, width, channels) of uint8.
        """
        form, found = self._form, []
        run: Any = model.predict if isinstance(model, og.Trainer) else runner(model, form.output)
        for _, source in pictures(inputs):
            picture = read_picture(source, MODES[form.channels])
            scores = run(np.repeat(form.array(picture)[None], form.batch, 0))
            found.append(form.classes(scores[0], picture.size))
        return found

    def write(self, inputs: Any, results: Iterable[Any], folder: str | os.PathLike) -> list[Path]:
        """Write `masks/<name>.png`, with a palette, and `overlays/<name>.png` on the picture.

        Args:
            inputs: as those of `predict`; arrays are named by their number.
            results: what `predict` returned for them.
            folder: is created; files in it of the same names are replaced.

        Raises:
            ValueError: two pictures of the same name, or not one result for each.
        """
        from PIL import Image

        named, written = pictures(inputs), []
        if len({name for name, _ in named}) < len(named):
            raise ValueError(f"pictures of the same name: {[name for name, _ in named]}")
        for part in ("masks", "overlays"):
            (Path(folder) / part).mkdir(parents=True, exist_ok=True)
        for (name, source), result in zip(named, results, strict=True):
            mask = Image.fromarray(result)
            mask.putpalette(palette())
            picture = read_picture(source, "RGB")
            shown = Image.fromarray(np.uint8(result > 0) * np.uint8(128))
            over = Image.composite(mask.convert("RGB"), picture, shown)
            for part, image in (("masks", mask), ("overlays", over)):
                written.append(Path(folder) / part / f"{name}.png")
                image.save(written[-1])
        return written


def _loss(loss: Any, options: Mapping[str, Mapping[str, Any]], form: Form) -> og.LossSpec:
    """Return a sum of losses for the scores of a model."""
    names = [n.strip() for n in loss.split("+")] if isinstance(loss, str) else [*loss]
    if not {*names, *options} <= {*_LOSSES} or len({*names}) < len(names):
        raise ValueError(f"loss={loss!r}, options of {[*options]}: add some of {[*_LOSSES]}")
    factors = dict.fromkeys(names, 1.0) if isinstance(loss, str) else loss
    own = {n: both[form.scores > 1] for n, both in _LOSSES.items()}
    by_name = {own[n]: given for n, given in options.items()}
    spec = og.combined_loss({own[n]: factors[n] for n in names}, by_name)
    known = {"ignore_nan": True} if form.scores == 1 else {"axis": form.axes[1]}
    return spec.with_options({**spec.options, **known})


class _Rows(og.IndexedReader):
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

    def subset(self, numbers: np.ndarray) -> _Rows:
        """Return some of the pictures."""
        pairs = [self.pairs[i] for i in numbers]
        return _Rows(self.form, pairs, self.classes, self.ignore, self.augment)

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
