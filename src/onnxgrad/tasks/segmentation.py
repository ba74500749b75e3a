"""Semantic segmentation: a class for every pixel of a picture."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import onnxgrad as og
from onnxgrad.data.image_transforms import as_transforms
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.tasks.base import (
    Task,
    as_proto,
    model_metadata,
    slow_start_arguments,
    stored_classes,
    with_classes,
    with_fields,
)
from onnxgrad.tasks.image_values import as_image_size, pixel_transform

__all__ = ["Segmentation"]

# {name: (loss of one score for each pixel, loss of a score for each class)}
_LOSSES = {
    "cross_entropy": ("binary_cross_entropy", "cross_entropy"),
    "dice": ("dice", "softmax_dice"),
    "focal": ("focal", "softmax_focal"),
}
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_BILINEAR = 2  # the code of the bilinear filter in Pillow
_HELD = ("val", "valid", "validation")
_logger = logging.getLogger(og.__name__)


@with_fields
class Segmentation(Task):
    """Semantic segmentation: a class for every pixel, by scores (N, classes, H, W).

    `data` are read by `og.data.masked_images`: a folder with `images` and `masks` or a JSON file of
    COCO. A folder may also have two such folders, `train` and `val`.

    Pictures are resized to the input of the model (bilinear), masks to its output (nearest
    neighbor), also where that is smaller: loss and metrics are of its pixels. For
    predictions, scores are resized to the picture (bilinear) before the best class is chosen.
    Labels are int64 (N, H, W), -100 where ignored. A model with one score a pixel, (N, 1, H, W),
    tells two classes apart: its labels have that shape, and are 0.0, 1.0, or NaN where ignored.

    The metrics are `iou`, the mean over the classes that occur, and `iou_per_class`.

    By default, batches have 8 pictures, the learning rate of AdamW rises to 0.001 in the first
    quarter of an epoch (100 steps at most), and gradients are clipped to a norm of 10.

    Args:
        model: model or path, with one input of pictures, channels first or last.
        data: the folder or JSON file; None: `model` is one that was trained.
        classes: names of the classes, or their number; None: as the data name them, or up to the
            largest number in masks. If the model has scores of another number, it gets a new last
            layer by `replace_head`, and the logger warns.
        image_size: (height, width) of pictures for the model, or a number for both; None: as its
            input declares.
        images, ignore: as of `og.data.masked_images`.
        normalize: of values from 0 to 1: "imagenet", "MEAN/STD", "bgr", "bgr255", "rgb255", "none",
            or a transform as `og.data.normalize(mean, std)`.
        augment: transforms for training: "flip" and "colors" by name, as "flip,colors", or a list
            of names and of `transforms` of `og.data.masked_images`.
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

    remembered = ("image_size", "normalize", "ignore", "loss", "loss_options", "output", "layout")
    batch_size = 8
    _also_try = ", or other values of the pictures: see normalize"

    model: Any
    data: Any = None
    _: KW_ONLY
    classes: InitVar[int | Sequence[str] | None] = None
    image_size: int | str | tuple[int, int] | None = None
    images: str | os.PathLike | None = None
    normalize: str | Callable[..., np.ndarray] | None = None
    augment: str | Sequence[Any] = ()
    ignore: int | None = 255
    loss: Any = "cross_entropy"
    loss_options: Mapping[str, Mapping[str, Any]] | None = None
    output: str | None = None
    layout: str | None = None
    seed: int = 0

    def __post_init__(self, classes: int | Sequence[str] | None) -> None:
        proto, data = as_proto(self.model), self.data
        self._format = form = SegmentationFormat(proto, self)
        held = next((p for n in _HELD if data and (p := Path(data) / n).is_dir()), None)
        names, number = ([], classes) if isinstance(classes, int) else ([*(classes or ())], None)
        if data is not None:
            path = Path(data) / "train" if held else data
            rows = self._read_masks(path, names or number, as_transforms(self.augment))
            names, number = rows.classes if rows.named else names, len(rows.classes)
        stored = stored_classes(proto)
        if not names and classes is None and (number or 0) <= len(stored):
            names = stored
        if (number or 0) > 255:
            raise ValueError(
                f"the data or classes= have {number} classes, and masks of 8 bits a pixel hold at "
                "most 255: merge classes"
            )
        had = max(2, form.scores)  # one score tells two classes apart
        number = len(names) or number or had
        if number != had:
            if data is None:
                raise ValueError(
                    f"the model has scores of {had} classes, not {number}: pass data=, on which a "
                    "new last layer can train"
                )
            message = "the model has scores of %d classes: a new last layer has scores of %d"
            _logger.warning(message, had, number)
            at = self.output if form.several else None
            proto = og.replace_head(proto, names or number, output=at, seed=self.seed)
            self._format = form = SegmentationFormat(proto, self)
        self.classes = names or [str(n) for n in range(number)]
        self.model = proto if data is None else with_classes(proto, self.classes)
        self.loss = _combine_losses(self.loss, self.loss_options or {}, form)
        self.metrics = ["iou", "iou_per_class"]
        if form.several:
            self.loss, self.metrics = {form.output: self.loss}, {form.output: self.metrics}
        self.arguments = slow_start_arguments(None if data is None else rows.rows, self.batch_size)
        if data is not None:
            self.data, rows.classes = self._adapt_mask_labels(rows), self.classes
            self.validation = self.read(held) if held else None

    def _read_masks(self, path: Any, classes: Any, augment: Any = (), images: Any = None) -> Any:
        """Return a reader of pictures and masks, resized to the model's input and output."""
        form, images = self._format, images or self.images
        return og.data.masked_images(
            path, form.size, augment, form.as_model_input, mask_size=form.grid,
            classes=classes or None, ignore=self.ignore, images=images, channels=form.channels,
        )  # fmt: skip

    def _adapt_mask_labels(self, rows: Any) -> og.data.Reader:
        """Return the reader `rows`, set to float labels if the model has one score for each
        pixel.
        """
        axis = self._format.axes[1]
        if self._format.scores == 1:
            rows.relabel = lambda X, y: np.float32(np.expand_dims(np.where(y < 0, np.nan, y), axis))
        return rows

    def read(
        self, path: str | os.PathLike, images: str | os.PathLike | None = None
    ) -> og.data.Reader:
        """Return a reader of further pictures with masks of the same classes, not augmented.

        Args:
            path: as `data`.
            images: folder of the pictures of a JSON file; None: as for `data`.

        Raises:
            ValueError: files that cannot be read or do not fit, or other classes.
        """
        return self._adapt_mask_labels(self._read_masks(path, [*self.classes], images=images))

    def predict(self, model: Any, inputs: Any) -> list[np.ndarray]:
        """Return the mask of each picture: class indices, uint8, (height, width).

        Args:
            model: a trained model, a path, or a `Trainer`.
            inputs: a folder, files, or arrays (height, width, channels) of uint8.
        """
        form, found = self._format, []
        predictor = Predictor(as_proto(model), [form.output])
        (name,) = predictor.inputs
        for _, source in og.data.list_images(inputs):
            picture = og.data.open_image(source, _MODES[form.channels])
            scores = predictor.run_rows({name: form.picture_array(picture)[None]})[form.output]
            found.append(form.class_mask(scores[0], picture.size))
        return found

    def write(self, inputs: Any, results: Iterable[Any], folder: str | os.PathLike) -> list[Path]:
        """Write `masks/<name>.png`, with a palette, and `overlays/<name>.png` on the picture.

        Args:
            inputs: as of `predict`; arrays are named by their number.
            results: what `predict` returned for them.
            folder: is created; files in it of the same names are replaced.

        Raises:
            ValueError: two pictures of the same name, or not one result for each.
        """
        from PIL import Image

        named, written = og.data.list_images(inputs), []
        if len({name for name, _ in named}) < len(named):
            raise ValueError(
                f"two pictures have the same name, and so would their masks: rename one of "
                f"{[name for name, _ in named]}"
            )
        for part in ("masks", "overlays"):
            (Path(folder) / part).mkdir(parents=True, exist_ok=True)
        for (name, source), result in zip(named, results, strict=True):
            mask = Image.fromarray(result)
            mask.putpalette(voc_palette())
            shown = Image.fromarray(np.uint8(result > 0) * np.uint8(128))
            over = Image.composite(mask.convert("RGB"), og.data.open_image(source), shown)
            for part, image in (("masks", mask), ("overlays", over)):
                written.append(Path(folder) / part / f"{name}.png")
                image.save(written[-1])
        return written


def _combine_losses(
    loss: Any, options: Mapping[str, Mapping[str, Any]], form: SegmentationFormat
) -> Any:
    """Return the sum of losses given by name, times factors; a loss object is returned
    unchanged.
    """
    if not isinstance(loss, (str, Mapping)):
        if options:
            raise ValueError(
                "loss_options= is for losses given by name: leave it out, and pass the options to "
                "the function that makes the loss of loss="
            )
        return loss
    names = [n.strip() for n in loss.split("+")] if isinstance(loss, str) else [*loss]
    if not {*names, *options} <= {*_LOSSES} or len({*names}) < len(names):
        raise ValueError(
            f"loss={loss!r} and loss_options of {[*options]} must name losses among {[*_LOSSES]}, "
            "each once"
        )
    factors = dict.fromkeys(names, 1.0) if isinstance(loss, str) else loss
    own = {n: both[form.scores > 1] for n, both in _LOSSES.items()}
    by_name = {own[n]: given for n, given in options.items()}
    spec = og.losses.combined_loss({own[n]: factors[n] for n in names}, by_name)
    known = {"ignore_nan": True} if form.scores == 1 else {"axis": form.axes[1]}
    return spec.with_options({**spec.options, **known})


def voc_palette() -> bytes:
    """Return the colors of 256 classes, three bytes each, as in Pascal VOC."""
    n, channel = np.arange(256)[:, None], np.arange(3)
    bits = [((n >> (3 * j + channel)) & 1) << (7 - j) for j in range(8)]
    return np.sum(bits, axis=0).astype(np.uint8).tobytes()


class SegmentationFormat:
    """The format of a segmentation model: pictures of `size`, and scores on `grid`, (H, W).

    It runs the model on a black picture.

    Args:
        model: the model.
        options: has the arguments of `Segmentation` as attributes.

    Attributes:
        output: the name of the scores; `several`: whether there are other outputs.
        dtype, channels, axes: of pictures; the axes of their channels, and of the scores.
        scores: their number; `threshold`: between two classes, of one score.

    Raises:
        ValueError: the model does not segment pictures.
    """

    def __init__(self, model: onnx.ModelProto, options: Any) -> None:
        predictor, output = Predictor(model), options.output
        x, *others = predictor.inputs.values()
        floats = [name for name, dtype in predictor.dtypes.items() if dtype.kind == "f"]
        if others or x.name not in floats or len(x.shape) != 4:
            found = [(i.name, i.type, i.shape) for i in (x, *others)]
            raise ValueError(
                f"segmentation takes a model with one input, pictures of floats with 4 axes, and "
                f"the model has {found}: see og.graph.select_model_inputs_outputs"
            )
        axis, self.size = _channel_axis_and_size(
            x, as_image_size(options.image_size), options.layout
        )
        self.channels = x.shape[axis] if x.shape[axis] in _MODES else 3
        shape = [x.shape[0] if isinstance(x.shape[0], int) else 1, *self.size]
        shape.insert(axis, self.channels)
        outputs = [y for y in predictor.outputs if y in floats]
        if output not in outputs and (output or len(outputs) != 1):
            raise ValueError(
                f"output={output!r}: pass the name of the output of scores, one of {outputs}"
            )
        self.output = output or outputs[0]
        try:
            scores = predictor.run(np.zeros(shape), [self.output])[0].shape
        except Exception as e:
            raise ValueError(
                f"the model fails on pictures of {self.size}, (height, width): pass another "
                f"image_size=: {e}"
            ) from e
        if len(scores) != 4:
            raise ValueError(
                f"the output {self.output!r} has the shape {scores}, and scores have 4 axes, "
                "one of them for classes: name another output with output="
            )
        one = next((a for a in (1, 3) if scores[a] == 1), None)
        loss = "cross_entropy" if one is None else "binary_cross_entropy"
        noted = og.add_loss_output(model, loss, output_index=self.output, from_logits=None)
        facts = json.loads(model_metadata(noted)["onnxgrad.loss"])
        of_classes = (facts.get("axis") or 1) % 4 if one is None else one
        self.grid = tuple(n for a, n in enumerate(scores) if a not in (0, of_classes))
        self.axes, self.scores = (axis, of_classes), scores[of_classes]
        self.threshold: float | None = facts.get("threshold")
        self.normalize: Callable[..., np.ndarray] | None = pixel_transform(options.normalize)
        self.dtype, self.several = predictor.dtypes[x.name], len(predictor.outputs) > 1

    def as_model_input(self, array: np.ndarray) -> np.ndarray:
        """Return an image (height, width, channels) of 0 to 1 as the model's input, without batch
        axis.
        """
        array = array if self.normalize is None else self.normalize(array, None)
        return np.moveaxis(array, -1, self.axes[0] - 1).astype(self.dtype)

    def picture_array(self, picture: Any) -> np.ndarray:
        """Return a Pillow picture, resized, as the model's input, without batch axis."""
        resized = np.asarray(og.data.resize(self.size)(picture, None), np.float32) / np.float32(255)
        return self.as_model_input(resized.reshape(*self.size, self.channels))

    def class_mask(self, scores: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Return the class index of each pixel, from scores resized to (width, height)."""
        from PIL import Image

        planes = np.moveaxis(scores.astype(np.float32), self.axes[1] - 1, 0)
        resized = (np.asarray(Image.fromarray(p).resize(size, _BILINEAR)) for p in planes)
        best = next(resized)
        if self.scores == 1:
            return (best > self.threshold).astype(np.uint8)
        classes = np.zeros(best.shape, np.uint8)
        for number, plane in enumerate(resized, 1):
            classes[plane > best] = number
            best = np.maximum(best, plane)
        return classes


def _channel_axis_and_size(x: Any, size: Any, layout: str | None) -> tuple[int, tuple[int, int]]:
    """Return the channel axis of an image input, and its (height, width)."""
    name, known = f"input {x.name!r} of shape {x.shape}", {"NCHW": [1], "NHWC": [3]}
    axes = known.get(str(layout), []) if layout else [a for a in (1, 3) if x.shape[a] in _MODES]
    if len(axes) != 1:
        raise ValueError(f"{name}: pass layout='NCHW' or 'NHWC', not {layout!r}")
    fixed = [n for axis, n in enumerate(x.shape) if axis not in (0, *axes)]
    size = tuple(size or fixed)
    other = any(isinstance(n, int) and n != m for n, m in zip(fixed, size, strict=False))
    if other or len(size) != 2 or not all(isinstance(n, int) for n in size):
        raise ValueError(f"{name}: pass (height, width) as image_size, not {size}")
    return axes[0], size
