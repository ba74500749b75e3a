"""Semantic segmentation: a class for every pixel of a picture."""

from __future__ import annotations

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
    Form,
    MaskRows,
    Pair,
    check_pairs,
    coco_pairs,
    folder_pairs,
    palette,
    pictures,
    pillow,
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
            `cross_entropy`, `softmax_dice` and `softmax_focal` of several. Or any that a `Trainer`
            takes, for these labels.
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
        pillow()
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
        if (number or 0) > 255:
            raise ValueError(f"{number} classes: masks of 8 bits have 255 at most")
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
        loss = _loss(loss, loss_options or {}, form)
        metrics = ["iou", "iou_per_class"]
        self.loss = {form.output: loss} if form.several else loss
        self.metrics: Any = {form.output: metrics} if form.several else metrics
        self.arguments = {}
        if data is not None:
            self.data = MaskRows(form, pairs, self.classes, ignore, tuple(augment))
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
        return MaskRows(self._form, pairs, self.classes, self.ignore, ())

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
        named, written = pictures(inputs), []
        if len({name for name, _ in named}) < len(named):
            raise ValueError(f"pictures of the same name: {[name for name, _ in named]}")
        for part in ("masks", "overlays"):
            (Path(folder) / part).mkdir(parents=True, exist_ok=True)
        for (name, source), result in zip(named, results, strict=True):
            mask = pillow().fromarray(result)
            mask.putpalette(palette())
            picture = read_picture(source, "RGB")
            shown = pillow().fromarray(np.uint8(result > 0) * np.uint8(128))
            over = pillow().composite(mask.convert("RGB"), picture, shown)
            for part, image in (("masks", mask), ("overlays", over)):
                written.append(Path(folder) / part / f"{name}.png")
                image.save(written[-1])
        return written


def _loss(loss: Any, options: Mapping[str, Mapping[str, Any]], form: Form) -> Any:
    """Return a sum of losses for the scores of a model; other losses as they are."""
    if not isinstance(loss, (str, Mapping)):
        if options:
            raise ValueError("loss_options are of losses by name: give the loss its own options")
        return loss
    names = [n.strip() for n in loss.split("+")] if isinstance(loss, str) else [*loss]
    if not {*names, *options} <= {*_LOSSES} or len({*names}) < len(names):
        raise ValueError(f"loss={loss!r}, options of {[*options]}: add some of {[*_LOSSES]}")
    factors = dict.fromkeys(names, 1.0) if isinstance(loss, str) else loss
    own = {n: both[form.scores > 1] for n, both in _LOSSES.items()}
    by_name = {own[n]: given for n, given in options.items()}
    spec = og.combined_loss({own[n]: factors[n] for n in names}, by_name)
    known = {"ignore_nan": True} if form.scores == 1 else {"axis": form.axes[1]}
    return spec.with_options({**spec.options, **known})
