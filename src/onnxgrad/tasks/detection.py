"""Object detection: boxes around objects, and their classes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

import onnxgrad as og
from onnxgrad.data.boxes import is_annotation_path
from onnxgrad.data.image_files import coco_image_ids
from onnxgrad.data.image_transforms import as_transforms
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.tasks.base import (
    Task,
    as_proto,
    model_metadata,
    row_count,
    slow_start_arguments,
    stored_classes,
    with_classes,
    with_metadata,
)
from onnxgrad.tasks.detection_heads import (
    JOINED,
    Decoder,
    Head,
    box_and_class_outputs,
    class_layers,
    detector_head,
    detector_output_shapes,
    scale_outputs,
)
from onnxgrad.tasks.detection_losses import detection_loss, query_matcher
from onnxgrad.tasks.image_values import pixel_transform

_IDS = "onnxgrad.category_ids"  # key of metadata: the category ids of the classes in a COCO file

__all__ = [
    "Detection",
    "Detections",
    "Head",
    "detection_loss",
]


class Detections(NamedTuple):
    """The boxes that were found in a picture, the best first.

    Attributes:
        boxes: x1, y1, x2, y2 in pixels of the picture, float32 (n, 4).
        scores: probabilities, float32 (n,).
        classes: their names.

    Examples:
        >>> import numpy as np
        >>> from onnxgrad.tasks.detection import Detections
        >>> Detections(np.zeros((1, 4)), np.ones(1), ["cat"]).classes
        ['cat']
    """

    boxes: np.ndarray
    scores: np.ndarray
    classes: list[str]


class Detection(Task):
    """Object detection: training and prediction of boxes, with data of COCO or YOLO.

    `data` are read by `og.data.annotated_images`, from files of COCO or YOLO, in `image_size`.
    Where they have another number of classes than the model, it gets new layers for the classes, by
    `replace_head`. `task.trainer(train=task.class_layers)` trains those layers alone.

    By default, batches have 8 pictures, the learning rate of AdamW rises to 0.001 in the first
    quarter of an epoch (100 steps at most), and gradients are clipped to a norm of 10.

    The metrics are `map` and `map50`; `evaluate` has two more, `map50_per_class`, by name, and
    `confusion_matrix`, of true boxes (rows) and found ones of a score of 0.25 or more (columns)
    that overlap by half. Its last row and column count boxes that are only found or only true.

    Models with several outputs ("picodet", "detr", "rtdetr") get a further output, "detections",
    which joins them for the loss; `finished` takes it away again. Rows for queries ("detr",
    "rtdetr") are matched to boxes when they
    are read, by a prediction of the trainer that `trainer` returned last. That is a forward pass
    more for each row, whose weights are some batches old, with small data an epoch.

    Args:
        model: model, serialized model or path.
        data: the pictures to train on; None: to predict, and `classes` are read from the metadata.
        head: the layout of its output: a kind of `Head`, or a `Head`. None: by its shape.
        image_size: height and width, a number for both, where the model leaves them open. None: as
            its metadata `imgsz` say.
        augment: transforms for training, as YOLO has them: "flip" and "colors" by name, "none", or
            a list of names and of `transforms` of `og.data.annotated_images`.
        pixels: the values that the model takes: "bgr", "bgr255", "rgb255", "imagenet", "MEAN/STD",
            "none" for RGB of 0 to 1, or a function from that, (H, W, 3). None: by head, "bgr255"
            for "yolox", "imagenet" for "detr", and "none" for others.
        loss: arguments of `detection_loss`, as `{"classes": "varifocal"}`.

    Attributes:
        head: the layout of the output of the model.
        class_layers: names of the weights of the layers that compute the classes.

    Raises:
        ValueError: incomplete files, naming file and row; a model whose outputs are not known; an
            unknown option.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,3,32,32] x) => (float[N,21,7] y)
        ...     <int64[3] s = {0, 21, 7}, float[21] w> {
        ...     m = Flatten(x)  z = ReduceMean(m)  e = Add(z, w)  y = Reshape(e, s) }''')
        >>> from onnxgrad.tasks.detection import Detection
        >>> Detection(model, head="yolox").head.size
        (32, 32)
    """

    remembered = ("head", "image_size", "pixels", "loss")
    _also_try = ", or other values of the pictures: see pixels"

    def __init__(
        self,
        model: Any,
        data: str | os.PathLike | None = None,
        *,
        head: str | Head | Mapping[str, Any] | None = None,
        image_size: int | tuple[int, int] | None = None,
        augment: str | Sequence[Any] = "flip,colors",
        pixels: str | Callable[[np.ndarray], np.ndarray] | None = None,
        loss: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = as_proto(model)
        head = Head(**head) if isinstance(head, Mapping) else head
        train: Any = None
        if data is not None:
            train = og.data.annotated_images(data, transforms=as_transforms(augment))
        named = stored_classes(self.model)
        self.classes = named if train is None else train.classes
        stored = json.loads(model_metadata(self.model).get(_IDS, "[]")) or list(range(len(named)))
        self.ids = stored if train is None else train.ids
        self.head = detector_head(self.model, head, len(named), len(self.classes), image_size)
        if train is not None and len(self.classes) != self.head.classes:
            self._replace_class_layers()
        self.classes = self.classes or [str(i) for i in range(self.head.classes)]
        self.class_layers = class_layers(self.model, self.head)
        joins = self.head.layout.joins_outputs
        if joins:
            self.model = _add_box_and_class_output(self.model)
        self.pixels = pixel_transform(pixels or self.head.layout.pixels)
        self.decoder = Decoder(self.head)
        outputs = [y.name for y in self.model.graph.output]
        only = JOINED if joins else outputs[0] if outputs[1:] else None
        spec = detection_loss(self.head, **(loss or {}))
        self.loss = {only: spec} if only else spec
        self.batch_size = 8
        self.arguments = slow_start_arguments(
            None if train is None else train.rows, self.batch_size
        )
        self._trainer: Any = None
        self._only = only
        self._image_ids: dict[Path, Any] = {}
        if train is not None:
            self.model = with_classes(self.model, self.classes)
            own = None if self.ids == [*range(len(self.ids))] else json.dumps(self.ids)
            self.model = with_metadata(self.model, {_IDS: own})
            self.metrics = self._default_metrics
            self.data = self._prepare_reader(train)
            if "val" in train.parts:
                self.validation = self._prepare_reader(
                    og.data.annotated_images(str(data), part="val")
                )

    def stated(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the given options, with the layout of the trained model's outputs."""
        own = {"head": asdict(self.head)} if "head" in options else {}
        return options | own

    @cached_property
    def _default_metrics(self) -> Any:
        """The default metrics, mean average precision; they need pycocotools."""
        lists = self.decoder.box_lists
        return self._metrics_by_output(
            [og.metrics.MeanAveragePrecision(lists, iou) for iou in (None, 0.5)]
        )

    def _metrics_by_output(self, metrics: list[og.metrics.Metric]) -> Any:
        return {self._only: metrics} if self._only else metrics

    def trainer(self, **arguments: Any) -> og.Trainer:
        """Return a trainer of the model; `arguments` of a `Trainer` override the task's."""
        if "metrics" not in arguments:
            self.metrics = self.metrics or self._default_metrics
        self._trainer = super().trainer(**arguments)
        return self._trainer

    def evaluate(
        self, data: Any, *, batch_size: int | None = None, device: str = "cpu"
    ) -> dict[str, Any]:
        """Return the loss and the metrics of the model for the annotated pictures of files.

        Args:
            data: a COCO file, a data.yaml or a folder with one.
            batch_size: pictures of one call of the runtime.
            device: "cpu", "cuda" or "cuda:1".

        Returns:
            Among others "map50_per_class", a dict by the names of the classes, NaN without a box;
            and "confusion_matrix", (classes + 1, classes + 1).
        """
        if self.metrics and self.metrics is not self._default_metrics:  # the user has set metrics
            return super().evaluate(data, batch_size=batch_size, device=device)
        rows, lists, count = self.read(data), self.decoder.box_lists, len(self.classes)
        self.rows = row_count(rows)
        metrics = [og.metrics.MeanAveragePrecision(lists, iou) for iou in (None, 0.5)]
        metrics.append(og.metrics.MeanAveragePrecision(lists, 0.5, per_class=count))
        metrics = self._metrics_by_output([*metrics, og.metrics.BoxConfusion(lists, count)])
        found = self.trainer(device=device, metrics=metrics).evaluate(rows, batch_size=batch_size)
        for name, value in found.items():
            if name.endswith("_per_class"):
                found[name] = dict(zip(self.classes, value.tolist(), strict=True))
        return found

    def _learning_failure_text(self, epochs: Sequence[Mapping[str, Any]]) -> str:
        name = f"validation_{self._only}_map50" if self._only else "validation_map50"
        precision = epochs[-1].get(name, 1.0)
        hardly = f"{name} is {precision:.2g}: hardly a box is found" if precision < 0.01 else ""
        return super()._learning_failure_text(epochs) or hardly

    def finished(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Return a trained model without the output that only the loss reads."""
        if JOINED not in [y.name for y in model.graph.output]:
            return model
        return og.graph.select_model_inputs_outputs(model, list(detector_output_shapes(model)))

    def read(self, path: str | os.PathLike) -> og.data.Reader:
        """Return a reader of further annotated pictures, such as validation data, for the model.

        Args:
            path: as `data`; of a data.yaml the pictures of `val`, if it names them.

        Returns:
            A reader; nothing is augmented.

        Raises:
            ValueError: incomplete files, or other classes.
        """
        read = og.data.annotated_images(path, part=None)
        if list(read.classes) != list(self.classes):
            raise ValueError(
                f"{os.fspath(path)!r} has the classes {read.classes}, and the model "
                f"{list(self.classes)}: pass data with the classes of the model"
            )
        return self._prepare_reader(read)

    def predict(
        self, model: Any, inputs: Any, score: float = 0.25, overlap: float = 0.65
    ) -> list[Detections]:
        """Return the boxes and classes that are found in each picture.

        Args:
            model: a trained model, a path, or a `Trainer`.
            inputs: a folder, a picture or a list of them: paths, uint8 arrays (H, W, 3) in RGB, or
                images of Pillow; or annotated pictures, as of `read`.
            score: the least probability.
            overlap: boxes of a class that overlap a better one by a larger IoU are left out.

        Returns:
            A `Detections` for each picture; a folder's pictures are in the order of their names.

        Raises:
            ValueError: a picture that cannot be read.
        """
        proto, results = as_proto(model), []
        if self.head.layout.joins_outputs:
            proto = _add_box_and_class_output(proto)
        predictor, outputs = Predictor(proto), [self._only] if self._only else []
        for _, picture in self._list_pictures(inputs):
            image = og.data.open_image(picture)
            x, scale, corner = og.data.letterbox(image, self.head.size, self.pixels)
            [found] = self.decoder(predictor.run(x[None], outputs)[0], score, overlap)
            boxes = (found[:, 2:] - corner) / np.float32(scale)
            boxes = boxes.clip(0, np.array(image.size * 2, np.float32))
            names = [self.classes[int(i)] for i in found[:, 0]]
            results.append(Detections(boxes, found[:, 1], names))
        return results

    def describe_results(self, results: Sequence[Detections]) -> str:
        """Return the count of pictures and the count of boxes found, as text."""
        return f"{len(results)} pictures, {sum(len(each.boxes) for each in results)} boxes"

    def write(
        self, inputs: Any, results: Iterable[Detections], folder: str | os.PathLike
    ) -> list[Path]:
        """Write each picture with its boxes, and all boxes as `detections.json`.

        That file is a list as COCO takes results: "image_id", the id in a COCO file beside the
        picture or its folder `images`, or in data that the task read; or else the name of the file
        without suffix, a number where it is one. "category_id", the id of the class in the data;
        "bbox", x, y, width and height; "score". Pictures that are no files are called 0, 1, ...

        Args:
            inputs: as of `predict`.
            results: what `predict` returned for them.
            folder: is created; files in it of the same names are replaced.

        Returns:
            The files.

        Raises:
            ValueError: another number of results than pictures.
        """
        from PIL import ImageDraw

        pictures, results, folder = self._list_pictures(inputs), list(results), Path(folder)
        image_ids = self._image_ids | coco_image_ids([picture for _, picture in pictures])
        if len(pictures) != len(results):
            raise ValueError(
                f"there are {len(results)} results for {len(pictures)} pictures: pass what predict "
                "returns for these pictures"
            )
        folder.mkdir(parents=True, exist_ok=True)
        written, rows = [], []
        for (stem, picture), found in zip(pictures, results, strict=True):
            image = og.data.open_image(picture)
            draw = ImageDraw.Draw(image)
            image_id = int(stem) if stem.isdecimal() else stem
            if isinstance(picture, (str, os.PathLike)):
                image_id = image_ids.get(Path(picture), image_id)
            for box, score, name in zip(*found, strict=True):
                at = self.classes.index(name)
                color = f"hsl({at * 137 % 360}, 90%, 45%)"
                draw.rectangle(box.tolist(), outline=color, width=max(1, image.width // 200))
                place, text = (box[0] + 3, box[1] + 1), f"{name} {score:.2f}"
                draw.rectangle(draw.textbbox(place, text), fill=color)
                draw.text(place, text, fill="white")
                x, y, x2, y2 = box.tolist()
                entry = {"image_id": image_id, "category_id": self.ids[at] if self.ids else at}
                rows.append(entry | {"bbox": [x, y, x2 - x, y2 - y], "score": float(score)})
            written.append(folder / f"{stem}.png")
            image.save(written[-1])
        written.append(folder / "detections.json")
        written[-1].write_text(json.dumps(rows), encoding="utf-8")
        return written

    def _list_pictures(self, inputs: Any) -> list[tuple[str, Any]]:
        """Return (name, source) of each picture in a folder, a file or annotated data."""
        if is_annotation_path(inputs):
            read = og.data.annotated_images(inputs, part=None)
            self._image_ids |= read.image_ids
            inputs = read.files
        return og.data.list_images(inputs)

    def _prepare_reader(self, reader: Any) -> og.data.Reader:
        """Return the reader, set to resize and scale images and to write labels for the model."""
        reader.size, reader.pixels = self.head.size, self.pixels
        reader.late_labels = None if self.head.has_anchors else self._append_query_column
        self._image_ids |= reader.image_ids
        return reader

    def _append_query_column(self, X: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return labels `y` with one more column: the query matched to each box by a prediction."""
        if self._trainer is None:
            raise ValueError(
                "the predictions of a trainer match boxes with queries: call task.trainer(...) "
                "before rows are read"
            )
        return self._query_matcher(self._trainer.predict(X), y)

    @cached_property
    def _query_matcher(self) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        """The function that matches queries with boxes, created once with its sessions."""
        return query_matcher(self.head)

    def _replace_class_layers(self) -> None:
        """Replace the layers of the model that compute classes by new layers for the data's
        classes.
        """
        layers = class_layers(self.model, self.head)
        if not layers:
            raise ValueError(
                f"the model has {self.head.classes} classes and the data {len(self.classes)}, and "
                "no layer computes the classes alone: pass data with the classes of the model"
            )
        units = [*self.classes, *["no object"] * (self.head.kind == "detr")]
        self.model = og.replace_head(self.model, units, at=layers)
        self.head = replace(self.head, classes=len(self.classes))
        if self.head.kind != "detr":  # as most anchors have no object: p = 0.01 (arXiv:1708.02002)
            sizes = {tensor.name: tensor.dims for tensor in self.model.graph.initializer}
            layers = class_layers(self.model, self.head)
            biases = [name for name in layers if len(sizes[name]) == 1]
            few = {name: np.full(sizes[name], -np.log(99.0), np.float32) for name in biases}
            self.model = og.graph.replace_initializers_into_onnx(self.model, few)


def _add_box_and_class_output(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with one more output, which joins boxes and class scores."""
    read = ir.from_proto(model)
    by_name = {str(y.name): y for y in read.graph.outputs}
    if JOINED in by_name:
        return model
    scales: Sequence[Any] = scale_outputs(read.graph)
    if not scales:
        scales = [[by_name[name] for name in box_and_class_outputs(detector_output_shapes(model))]]
    with og.graph.Emit(read.graph) as op:
        each = [op.emit("Concat", [*parts], {"axis": 2}, fresh=True) for parts in scales]
        joined = op.emit("Concat", each, {"axis": 1}, fresh=True) if each[1:] else each[0]
    joined.name = JOINED
    read.graph.outputs.append(joined)
    return ir.to_proto(read)
