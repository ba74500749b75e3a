"""The outputs of detectors: their layouts, and the boxes that are read from them."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

import onnxgrad as og
from onnxgrad.operators import REORDERS, SELECTS, operator_of
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.tasks.base import input_shapes, model_metadata, output_shapes

_LEAST, _OVERLAP = 0.001, 0.65  # least score and largest IoU of the boxes that metrics get
_MOST = 100  # most boxes of a class in a picture, as COCO counts
JOINED = "detections"  # name of the output that joins several outputs for the loss
MOVERS = REORDERS | SELECTS


class DetectorLayout(NamedTuple):
    """The layout of the output of a detector family such as YOLOv8, with its default loss factors.

    Attributes:
        axis: the axis of boxes and classes.
        others: the numbers of a box and whatever is no class on it.
        gains: the factors of losses by name, as the sources of `detection_loss` have them.
        pixels: the values of pictures, as of `Detection`.
        has_anchors: whether predictions belong to places of the picture; otherwise they are a set.
        joins_outputs: whether the file has several outputs, which a further one joins for the loss.
    """

    axis: int
    others: int
    gains: dict[str, float]
    pixels: str | None = None
    has_anchors: bool = True
    joins_outputs: bool = False


_YOLO = {"box": 7.5, "classes": 0.5, "distances": 1.5}
_YOLOX = {"box": 5.0, "classes": 1.0, "objectness": 1.0}
_QUERIES = {"box": 2.0, "classes": 1.0, "l1": 5.0}
LAYOUTS = {
    "yolov8": DetectorLayout(1, 4, _YOLO),
    "yolov8_dfl": DetectorLayout(1, 4, _YOLO),
    "yolox": DetectorLayout(2, 5, _YOLOX, "bgr255"),
    "picodet": DetectorLayout(2, 0, _YOLO, "imagenet", joins_outputs=True),
    "detr": DetectorLayout(2, 1, _QUERIES, "imagenet", has_anchors=False, joins_outputs=True),
    "rtdetr": DetectorLayout(2, 0, _QUERIES, has_anchors=False, joins_outputs=True),
}


@dataclass(frozen=True)
class Head:
    """The layout of the output of a detector, with N pictures, A anchors or queries, C classes.

    Attributes:
        kind: "yolov8": (N, 4 + C, A), center, width and height in pixels, then classes;
            "yolov8_dfl": (N, 4 R + C, A), the R logits of each distance from the anchor, in
            strides, to the left, top, right and bottom; "yolox": (N, A, 5 + C), center and size,
            objectness, classes; "picodet": two outputs for each scale, (N, A, 4 R), distances as
            in "yolov8_dfl", and (N, A, C), classes; "detr": (N, A, 4 + C + 1), center and size as
            shares of the picture, logits of the classes and of no object (softmax); "rtdetr":
            (N, A, 4 + C), the same with a sigmoid for each class.
        classes: C.
        size: height and width of the pictures, in pixels.
        probabilities: whether a Sigmoid of the file computed objectness and classes.
        decoded: whether a "yolox" has its boxes in pixels, or relative to the anchors: center in
            strides, logarithm of the size.
        strides: pixels between anchors, one for each scale, in the order of the anchors.

    Examples:
        >>> from onnxgrad.tasks.detection import Head
        >>> head = Head("yolov8", classes=80, size=(640, 640))
        >>> head.anchors.shape, head.anchors[1].tolist()  # x and y of the center, and stride
        ((8400, 3), [12.0, 4.0, 8.0])
    """

    kind: str
    classes: int
    size: tuple[int, int]
    probabilities: bool = True
    decoded: bool = True
    strides: tuple[int, ...] = (8, 16, 32)

    def __post_init__(self) -> None:
        padded = self.kind == "picodet"  # the last cells of its grids reach beyond the picture
        strides = self.strides if self.layout.has_anchors and not padded else ()
        if any(n % s for n in self.size for s in strides):
            raise ValueError(f"image_size={self.size} must be multiples of strides={self.strides}")

    @property
    def layout(self) -> DetectorLayout:
        """The `DetectorLayout` of the family of detectors that `kind` names.

        Raises:
            ValueError: there is no such kind.
        """
        if self.kind not in LAYOUTS:
            raise ValueError(f"head={self.kind!r} must be one of {', '.join(map(repr, LAYOUTS))}")
        return LAYOUTS[self.kind]

    @property
    def has_anchors(self) -> bool:
        """Whether predictions belong to anchors, fixed places of a picture, and not to queries."""
        return self.layout.has_anchors

    @property
    def anchors(self) -> np.ndarray:
        """The anchors, float32 (anchors, 3): center x, center y, stride in pixels, scale by scale.

        YOLOX counts from the corner of a cell; its centers are in the middle for assignment, too.
        """
        grids = []
        for s in self.strides:
            y, x = np.mgrid[: -(-self.size[0] // s), : -(-self.size[1] // s)]
            grids.append(np.stack([(x + 0.5) * s, (y + 0.5) * s, np.full(x.shape, s)], -1))
        return np.concatenate([g.reshape(-1, 3) for g in grids]).astype(np.float32)

    def read(self, op: Any, x: ir.Value) -> dict[str, ir.Value]:
        """Write nodes that split an output into boxes, classes, objectness or distances by name.

        Returns:
            "boxes" (x1, y1, x2, y2 in pixels) and "classes"; with "yolox" also "objectness"; with
            "yolov8_dfl" and "picodet" also "distances", logits (N, A, 4, R), and without these
            "raw", the boxes as the model returns them.
        """
        height, width = self.size
        anchors = self.anchors if self.has_anchors else np.zeros((0, 3), np.float32)
        center, stride = anchors[:, :2], anchors[:, 2:]
        channels = (x.shape or [None] * 3)[2 if self.kind == "picodet" else 1]
        columns = channels if isinstance(channels, int) else 4 + self.classes
        if self.kind.startswith("yolov8"):
            x = op.Transpose(op.Reshape(x, [0, columns, len(anchors)]), perm=[0, 2, 1])
        if self.kind in ("yolov8_dfl", "picodet"):
            flat, classes = op.split(x, [columns - self.classes, self.classes], 2)
            logits = op.Reshape(flat, [0, len(anchors), 4, (columns - self.classes) // 4])
            far = op.Softmax(logits, axis=3) * np.arange(logits.shape[3], dtype=np.float32)
            far = op.ReduceSum(far, [3], keepdims=0) * stride
            near, far = op.split(far, 2, 2)
            boxes = op.Concat(op.Sub(center, near), op.Add(center, far), axis=2)
            return {"boxes": boxes, "classes": classes, "distances": logits}
        objectness = [1] * (self.kind == "yolox")
        if objectness:
            x = op.Reshape(x, [0, len(anchors), 5 + self.classes])
        lengths = [4, *objectness, self.classes + (self.kind == "detr")]
        raw, *objectness, classes = op.split(x, lengths, 2)
        middle, extent = op.split(raw, 2, 2)
        if objectness and not self.decoded:
            middle = middle * stride + (center - stride / 2)
            extent = op.Exp(extent) * stride
        boxes = op.Concat(middle - extent / 2.0, middle + extent / 2.0, axis=2)
        if not self.has_anchors:
            boxes = boxes * np.array([width, height, width, height], np.float32)
        parts = {"boxes": boxes, "raw": raw, "classes": classes}
        return parts | ({"objectness": objectness[0]} if objectness else {})

    def scores(self, op: Any, parts: dict[str, ir.Value], probabilities: bool) -> ir.Value:
        """Write nodes for class probabilities times objectness, (pictures, anchors, classes)."""
        if self.kind == "detr":
            return op.split(op.Softmax(parts["classes"], axis=2), [self.classes, 1], 2)[0]
        p = [parts[name] for name in ("classes", "objectness") if name in parts]
        p = p if probabilities else [op.Sigmoid(value) for value in p]
        return p[0] * p[1] if len(p) > 1 else p[0]


def detector_head(
    model: ModelProto, kind: str | Head | None, named: int, wanted: int, size: Any
) -> Head:
    """Return the `Head` that describes the output of a detector.

    Args:
        model: the detector.
        kind: the layout or its name; None: by the shapes of the outputs.
        named: the number of classes that the model names, 0 if it names none.
        wanted: the number of classes of the data.
        size: height and width of the pictures, one number for both, or None.

    Raises:
        ValueError: the size of the pictures is unknown, or no layout fits the outputs.
    """
    if isinstance(kind, Head):
        return kind
    inputs, outputs = input_shapes(model), detector_output_shapes(model)
    name, lengths = next(iter(inputs.items()), ("", ()))
    if len(inputs) != 1 or len(lengths) != 4 or lengths[1] != 3:
        raise ValueError(
            f"a detector has one input (N, 3, H, W), and the model has {[*inputs]} with the shape "
            f"{lengths}: see og.graph.select_model_inputs_outputs"
        )
    given = (size, size) if isinstance(size, int) else size
    # ultralytics stores the image size in the metadata
    noted = re.fullmatch(r"\[(\d+), (\d+)\]", model_metadata(model).get("imgsz", ""))
    usual = given or (map(int, noted.groups()) if noted else (None, None))
    height, width = (own or other for own, other in zip(lengths[2:], usual, strict=True))
    if not height or not width or (given and tuple(given) != (height, width)):
        high, wide = lengths[2:]
        raise ValueError(
            f"image_size={size}: the input {name!r} takes pictures of {high} x {wide} pixels: pass "
            "image_size=, (height, width), that fits"
        )
    graph = ir.from_proto(model).graph
    scales = scale_outputs(graph)
    kind = kind or ("picodet" if scales else _detector_family([*outputs.values()], named, wanted))
    layout = Head(kind, 1, (height, width), strides=()).layout
    if kind == "picodet":
        strides = _pixel_strides(scales, height, width)
        return Head(kind, scales[0][1].shape[2], (height, width), strides=strides)
    of_boxes = None if layout.has_anchors else box_and_class_outputs(outputs)[0]
    shape = next(shape for name, shape in outputs.items() if name != of_boxes)
    columns = (shape[layout.axis] or 0) - layout.others
    if kind == "yolov8_dfl":  # its R, and so the number of columns of distances, is unknown
        columns = named or wanted
    if columns < 1:
        raise ValueError(
            f"head={kind!r}: the shapes of the outputs, {outputs}, leave no room for classes: pass "
            "another head="
        )
    sigmoids = any(has_sigmoid(y) for y in graph.outputs if y.name != of_boxes)
    exponents = any(node.op_type == "Exp" for node in graph)
    return Head(kind, columns, (height, width), sigmoids, kind != "yolox" or exponents)


def scale_outputs(graph: ir.Graph) -> list[tuple[Any, Any]]:
    """Return (distances, classes), the outputs of each scale of a PicoDet; [] for other graphs."""
    by_anchors: dict[Any, list[ir.Value]] = {}
    for y in graph.outputs:
        if y.name != JOINED:
            lengths = [*(y.shape or ())]
            if len(lengths) != 3 or not all(isinstance(n, int) for n in lengths[1:]):
                return []
            by_anchors.setdefault(lengths[1], []).append(y)
    pairs = [sorted(values, key=has_sigmoid) for values in by_anchors.values()]
    if any([*map(has_sigmoid, pair)] != [False, True] for pair in pairs):
        return []
    widths = {tuple(ir.Shape(y.shape or ())[-1] for y in pair) for pair in pairs}
    is_picodet = len(pairs) > 1 and len(widths) == 1 and all(n % 4 == 0 for n, _ in widths)
    return [(distances, classes) for distances, classes in pairs] if is_picodet else []


def _pixel_strides(scales: Sequence[tuple[Any, Any]], height: int, width: int) -> tuple[int, ...]:
    """Return the stride in pixels of each scale, found by the scale's count of anchors."""
    strides = {-(-height // s) * -(-width // s): s for s in (128, 64, 32, 16, 8, 4)}
    anchors = [classes.shape[1] for _, classes in scales]
    if not scales or not {*anchors} <= {*strides}:
        raise ValueError(
            f"head='picodet': at {height} x {width} pixels, a scale has one of {sorted(strides)} "
            f"anchors, and the outputs have {anchors}: pass a model with the outputs (N, A, 4 R) "
            "and, behind a Sigmoid, (N, A, C) for each scale"
        )
    return tuple(strides[n] for n in anchors)


def _detector_family(shapes: list[tuple], named: int, wanted: int) -> str:
    """Return the key in `LAYOUTS` of the detector family whose outputs have these shapes."""
    if len(shapes) == 2 and all(len(s) == 3 for s in shapes) and any(s[2] == 4 for s in shapes):
        columns = sum(s[2] or 0 for s in shapes) - 4
        if (named or wanted) in (columns, columns - 1):
            return "rtdetr" if columns == (named or wanted) else "detr"
    if len(shapes) == 1 and len(shapes[0]) == 3:
        _, first, second = shapes[0]
        if first and (not second or first < second):
            return "yolov8_dfl" if named and first > 4 + named else "yolov8"
        if second:
            return "yolox"
    raise ValueError(
        f"the outputs have the shapes {shapes}: name their layout, as head='yolov8'; see Head"
    )


def box_and_class_outputs(outputs: dict[str, tuple]) -> list[str]:
    """Return the output names of a detector with queries: of boxes (N, Q, 4), then of classes.

    Raises:
        ValueError: there are other outputs, or four classes and no output with "box" in its name.
    """
    fours = [name for name, shape in outputs.items() if shape[2:] == (4,)]
    named = [name for name in fours if "box" in name.lower()]
    found = fours if len(fours) == 1 else named
    if len(outputs) != 2 or len(found) != 1:
        raise ValueError(
            f"a detector with queries has two outputs, boxes (N, Q, 4) and classes, and the "
            f"outputs are {outputs}: rename the output of boxes to 'boxes'"
        )
    return [*found, *(name for name in outputs if name not in found)]


def detector_output_shapes(model: ModelProto) -> dict[str, tuple]:
    """Return `{output: shape}` of a detector, without the output "detections" added for the
    loss.
    """
    return {name: shape for name, shape in output_shapes(model).items() if name != JOINED}


def has_sigmoid(x: ir.Value) -> bool:
    """Return whether elements of `x` come from a Sigmoid, through nodes that only move them."""
    node = x.producer()
    if node is None or (node.op_type != "Sigmoid" and node.op_type not in MOVERS):
        return False
    moved = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    return node.op_type == "Sigmoid" or any(has_sigmoid(v) for v in moved if v is not None)


def class_layers(model: ModelProto, head: Head) -> list[str]:
    """Return the names of the weights and biases of the layers that compute class scores."""
    found: list[list[str]] = []
    seen: set[ir.Node] = set()

    def visit_producer(value: ir.Value | None) -> None:
        node = None if value is None else value.producer()
        if node is None or node in seen:
            return
        seen.add(node)
        if node.op_type in MOVERS or node.op_type == "Sigmoid":
            for x in node.inputs if node.op_type == "Concat" else node.inputs[:1]:
                visit_producer(x)
        elif node.op_type == "Add" or operator_of(node).traits & {"product", "convolution"}:
            tensors = [x for x in node.inputs if x is not None and x.const_value is not None]
            sizes = [list(x.shape or ()) for x in tensors]
            at = 0 if "convolution" in operator_of(node).traits else -1
            columns = head.classes + (head.kind == "detr")
            if sizes and sizes[0][at:][:1] == [columns]:
                found.append([str(x.name) for x in tensors])
                if node.op_type == "Add":
                    for x in node.inputs:
                        visit_producer(x)

    for output in ir.from_proto(model).graph.outputs:
        visit_producer(output)
    # the layer of objectness, found first, has one channel, as the layer of the class
    if head.kind == "yolox" and head.classes == 1:
        found = found[1::2]
    return [name for names in found for name in names]


class Decoder:
    """Reads boxes from a detector's output, by non-maximum suppression in each class."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self._newest: tuple = (None, [])

    @cached_property
    def _box_suppression_function(self) -> Callable[..., list]:
        """The compiled non-maximum suppression, which returns boxes, scores and kept indices."""
        return compile_nodes(self._write_nms)

    def __deepcopy__(self, memo: Any) -> Decoder:
        return self  # as a session cannot be copied

    def __call__(self, prediction: np.ndarray, score: float, iou: float) -> list[np.ndarray]:
        """Return for each picture an array (n, 6): class, score, x1, y1, x2, y2, the best box
        first.

        Args:
            prediction: the output (N, ...).
            score: the least probability.
            iou: the largest overlap of two boxes of a class; of a set, all boxes are kept.
        """
        seen = score, iou, prediction.shape, zlib.crc32(np.ascontiguousarray(prediction).data)
        if self._newest[0] == seen:  # another metric has decoded this prediction
            return self._newest[1]
        overlap = iou if self.head.has_anchors else 1.0
        boxes, scores, chosen = self._box_suppression_function(prediction, [overlap], [score])
        rows, classes, at = chosen.T
        best = scores[rows, classes, at]
        found = np.column_stack([classes, best, boxes[rows, at]]).astype(np.float32)
        order = np.argsort(-best, kind="stable")
        found, rows = found[order], rows[order]
        results = [found[rows == row] for row in range(len(prediction))]
        self._newest = seen, results
        return results

    def box_lists(
        self, prediction: np.ndarray, label: np.ndarray
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the predicted boxes and the labeled boxes of each picture, for a metric."""
        true = [boxes[boxes[:, 0] >= 0, :5] for boxes in label]
        return self(prediction, _LEAST, _OVERLAP), true

    def _write_nms(self, op: Any, x: ir.Value, iou: ir.Value, score: ir.Value) -> Sequence:
        """Write nodes of non-maximum suppression: boxes, scores, kept (row, class, box index)."""
        parts = self.head.read(op, x)
        scores = self.head.scores(op, parts, self.head.probabilities)
        best = op.GreaterOrEqual(scores, op.ReduceMax(scores, [2], keepdims=1))
        scores = op.Transpose(op.Where(best, scores, 0.0), perm=[0, 2, 1])
        chosen = op.NonMaxSuppression(parts["boxes"], scores, [_MOST], iou, score)
        return parts["boxes"], scores, chosen


def compile_nodes(function: Callable[..., Sequence]) -> Callable[..., list]:
    """Return a function of float32 arrays, which runs the nodes written by `function`."""

    @cache
    def predictor(*shapes: tuple[int | None, ...]) -> Predictor:
        inputs = [
            ir.Value(name=f"x{i}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
            for i, shape in enumerate(shapes)
        ]
        graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 20}, name="detection")
        with og.graph.Emit(graph) as op:
            op.give(function(op, *inputs))
        return Predictor(ir.to_proto(ir.Model(graph, ir_version=9)))

    def run(*values: Any) -> list:
        arrays = [np.asarray(value, np.float32) for value in values]
        running = predictor(*((None, *array.shape[1:]) for array in arrays))
        return running.run({f"x{i}": array for i, array in enumerate(arrays)})

    return run
