"""Losses of object detection, written as nodes of the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

import onnxgrad as og
from onnxgrad.tasks.detection_heads import LAYOUTS, MOVERS, Head, compile_nodes


def detection_loss(
    head: Head,
    box: str = "ciou",
    classes: str = "bce",
    gains: dict[str, float] | None = None,
    topk: int = 10,
    alpha: float = 0.5,
    beta: float = 6.0,
) -> og.losses.LossSpec:
    """Return the loss of a detector: the sum of losses of boxes, classes and more, times gains.

    Labels are boxes, float32 (N, M, 5): class, x1, y1, x2, y2 in pixels; class -1 fills rows up.

    Anchors, also of "yolox", learn boxes by task-aligned assignment (Feng et al. 2021,
    arXiv:2108.07755): within a box, the `topk` with the largest p^alpha CIoU^beta, p the score of
    the class. An anchor of several boxes takes the one that it overlaps most. The target of a class
    is that number, scaled to the largest IoU of the box. The sum of the targets in a batch (or a
    micro-batch), at least 1, divides the losses, as in ultralytics: box gain 7.5, classes 0.5,
    distances 1.5. Of "yolox" (Ge et al. 2021, arXiv:2107.08430): box 5, classes 1 (of anchors with
    a box, the target is the IoU), objectness 1, divided by the number of these anchors.

    A "yolov8" file has distances, if a Softmax computes its boxes, and these train, too.

    Queries of "detr" (Carion et al. 2020, arXiv:2005.12872) and "rtdetr" learn the boxes that the
    sixth number of a label names: the query, -1 for none. Gains: box 2, classes 1, L1 of center and
    size 5, divided by the number of boxes; "detr" has a cross-entropy, no object weighs 0.1.

    Args:
        head: the layout of the output.
        box: "ciou" or "giou": the loss is one minus it.
        classes: "bce", "varifocal", or "focal" with og.losses.LOSSES["focal"], whose target is 0
            or 1.
        gains: others than those above, by name: "box", "classes", "distances", "objectness", "l1".
        topk, alpha, beta: of the assignment.

    Raises:
        ValueError: an unknown option.

    Examples:
        >>> from onnxgrad.tasks.detection import Head, detection_loss
        >>> loss = detection_loss(Head("yolov8", 80, (640, 640)), classes="varifocal")
        >>> loss.label_kind.shape(("N", 84, 8400))
        ('N', None, 5)
    """
    if box not in ("ciou", "giou") or classes not in ("bce", "varifocal", "focal"):
        raise ValueError(
            f"box={box!r} must be 'ciou' or 'giou', and classes={classes!r} must be 'bce', "
            "'varifocal' or 'focal'"
        )
    usual = head.layout.gains
    if other := set(gains or ()) - set(usual):
        raise ValueError(
            f"gains has the key {other.pop()!r}, and the losses of head={head.kind!r} are "
            f"{list(usual)}: use one of these"
        )
    rule = _DetectionLoss(head, box, classes, {**usual, **(gains or {})}, topk, alpha, beta)
    columns = 5 if head.has_anchors else 6
    kind = og.losses.LabelKind(
        ir.DataType.FLOAT,
        lambda f: (f[0] if f else None, None, columns),
        lambda f: f is not None and len(f) == 3,
        f"the output of {head}",
    )

    return og.losses.LossSpec(rule.write, f"detection_{head.kind}", "mean", lambda options: kind)


def _center_and_size(op: Any, boxes: ir.Value, head: Head) -> ir.Value:
    """Write nodes that turn box corners in pixels into relative centers and sizes."""
    height, width = head.size
    near, far = op.split(boxes / np.array([width, height] * 2, np.float32), 2, 2)
    return op.Concat((near + far) / 2.0, far - near, axis=2)


_binary_cross_entropy = partial(og.losses.LOSSES["binary_cross_entropy"].formula, from_logits=True)


@dataclass(frozen=True)
class _DetectionLoss:
    """The formula of a detection loss, with the output layout and the loss options as fields."""

    head: Head
    box: str
    classes: str
    gains: dict[str, float]
    topk: int
    alpha: float
    beta: float

    def write(self, op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        """Write nodes that compute one loss for each picture; the mean is the batch's loss."""
        head = self.head
        parts = head.read(op, prediction)
        if head.probabilities:
            logits = _sigmoid_logits(op, prediction)
            if logits is prediction:
                raise ValueError(
                    f"no Sigmoid computes the classes in {prediction.name!r}: export the model "
                    "with their logits as output, and pass Head(..., probabilities=False)"
                )
            own = head.read(op, logits)
            parts |= {name: own[name] for name in ("classes", "objectness") if name in own}
        number, truth, *query = op.split(label, [1, 4] if head.has_anchors else [1, 4, 1], 2)
        one_hot = op.Cast(
            op.Equal(number, np.arange(head.classes, dtype=np.float32)), to=ir.DataType.FLOAT
        )
        if query:
            return self._query_losses(op, parts, one_hot, truth, query[0])
        hidden = [parts[name] for name in ("classes", "objectness") if name in parts]
        # log p by Softplus, as the Sigmoid of very negative logits rounds
        log_p = [-op.Softplus(-x) for x in hidden]
        scores = op.detached(log_p[0] + log_p[1] if hidden[1:] else log_p[0])
        boxes, anchors = op.detached(parts["boxes"]), head.anchors
        most = op.const([min(self.topk, len(anchors))])
        named, share, iou = _assign_anchors(
            op, (boxes, scores, anchors[:, :2]), (truth, one_hot), (most, self.alpha, self.beta)
        )
        found = op.Clip(op.ReduceSum(named, [2], keepdims=1), 0.0, 1.0)  # (N, A, 1)
        objectness = parts.get("objectness")
        weight, target = (share, share) if objectness is None else (found, iou)
        aim, mine = op.MatMul(named, one_hot) * target, op.MatMul(named, truth)
        learned = op.ReduceSum(self._class_losses(op, parts["classes"], aim), [2], keepdims=0)
        losses = {
            "box": (1.0 - og.losses.box_iou(op, parts["boxes"], mine, self.box), weight),
            "classes": (learned, None if objectness is None else found),
        }
        if objectness is not None:
            entropy = _binary_cross_entropy(op, objectness, found)
            losses["objectness"] = op.Squeeze(entropy, [2]), None
        sides_of = parts.get("distances")
        if head.kind == "yolov8":
            sides_of = _distance_logits(op, prediction, len(anchors))
        if sides_of is not None:
            near, far = op.split(mine, 2, 2)
            center, stride = op.const(anchors[:, :2]), anchors[:, 2:]
            sides = op.Concat(center - near, far - center, axis=2) / stride
            each = og.losses.distribution_focal(op, sides_of, sides)
            losses["distances"] = op.ReduceMean(each, [2], keepdims=0), weight
        return self._sum_losses(op, losses, op.Max(op.ReduceSum(weight, keepdims=0), 1.0), label)

    def _sum_losses(self, op: Any, losses: dict, count: ir.Value, label: ir.Value) -> ir.Value:
        """Write the loss of each picture: weighted sum of `losses`, times batch size / `count`."""
        rows = op.Cast(op.Shape(label, start=0, end=1), to=ir.DataType.FLOAT)
        total = None
        for name, (values, weight) in losses.items():
            values = values if weight is None else values * op.Squeeze(weight, [2])
            term = self.gains[name] * op.ReduceSum(values, [1], keepdims=0)
            total = term if total is None else total + term
        return total * (rows / count)

    def _class_losses(self, op: Any, logits: ir.Value, target: ir.Value) -> ir.Value:
        if self.classes == "varifocal":
            return og.losses.varifocal(op, logits, target)
        if self.classes == "focal":
            hit = op.Cast(op.Greater(target, 0.0), to=ir.DataType.FLOAT)
            return og.losses.LOSSES["focal"].formula(op, logits, hit)
        return _binary_cross_entropy(op, logits, target)

    def _query_losses(self, op, parts, one_hot, truth, query):
        """Write the loss of each picture, for labels that say which query learns each box."""
        raw = parts["raw"]
        places = op.Unsqueeze(op.Cast(op.arange(op.dim(raw, 1)), to=ir.DataType.FLOAT), [0, 2])
        turned = op.Transpose(query, perm=[0, 2, 1])  # (N, 1, M)
        named = op.Cast(op.Equal(places, turned), to=ir.DataType.FLOAT)  # (N, Q, M)
        found = op.ReduceSum(named, [2], keepdims=1)
        mine, hit = op.MatMul(named, truth), op.MatMul(named, one_hot)
        aim = _center_and_size(op, mine, self.head)
        iou = og.losses.box_iou(op, parts["boxes"], mine, self.box)
        losses = {
            "box": (1.0 - iou, found),
            "l1": (op.ReduceSum(op.Abs(raw - aim), [2], keepdims=0), found),
        }
        count = op.Max(op.ReduceSum(one_hot, keepdims=0), 1.0)
        if self.head.kind == "detr":
            weight = 0.1 + 0.9 * found
            every = op.Concat(hit, 1.0 - found, axis=2)
            entropy = -op.ReduceSum(
                every * op.LogSoftmax(parts["classes"], axis=2), [2], keepdims=0
            )
            losses["classes"] = entropy * (count / op.ReduceSum(weight, keepdims=0)), weight
        else:
            quality = op.Unsqueeze(
                op.Max(op.detached(og.losses.box_iou(op, parts["boxes"], mine)), 0.0), [2]
            )
            hit = hit * quality if self.classes == "varifocal" else hit
            each = self._class_losses(op, parts["classes"], hit)
            losses["classes"] = op.ReduceSum(each, [2], keepdims=0), None
        return self._sum_losses(op, losses, count, truth)


def _assign_anchors(op: Any, predicted: Sequence, true: Sequence, how: Sequence) -> tuple:
    """Write which labeled box each anchor learns, as 0 or 1, and the anchor's weight and IoU."""
    (boxes, scores, centers), (truth, one_hot), (most, alpha, beta) = predicted, true, how
    corners = op.Unsqueeze(truth, [2])  # (N, M, 1, 4)
    near, far = op.split(corners, 2, 3)
    inner = op.Concat(op.Sub(centers, near), op.Sub(far, centers), axis=3)
    inside = op.Greater(op.ReduceMin(inner, [3], keepdims=0), 1e-9)
    inside = op.And(inside, op.Greater(op.ReduceSum(one_hot, [2], keepdims=1), 0.5))
    iou = op.Max(og.losses.box_iou(op, corners, op.Unsqueeze(boxes, [1]), "ciou"), 0.0)
    iou = op.Where(inside, iou, 0.0)
    log_p = op.MatMul(one_hot, op.Transpose(scores, perm=[0, 2, 1]))  # (N, M, A)
    metric = op.Where(inside, op.Exp(alpha * log_p) * op.Pow(iou, beta), 0.0)
    _, index = op.emit_many("TopK", [metric, most], {"axis": 2}, 2)
    ones = op.Expand(op.const(1.0), op.Shape(index))
    chosen = op.ScatterElements(op.zeros_like(metric), index, ones, axis=2)
    chosen = op.Where(op.Greater(metric, 0.0), chosen, 0.0)
    best = op.ArgMax(iou, axis=1, keepdims=1)
    several = op.Greater(op.ReduceSum(chosen, [1], keepdims=1), 1.5)
    places = op.Unsqueeze(op.arange(op.dim(truth, 1)), [0, 2])
    largest = op.Cast(op.Equal(best, places), to=ir.DataType.FLOAT)
    chosen = op.Where(several, largest, chosen)
    metric, iou = metric * chosen, iou * chosen
    scale = op.ReduceMax(iou, [2], keepdims=1) / (op.ReduceMax(metric, [2], keepdims=1) + 1e-9)
    sides = (
        chosen,
        op.ReduceMax(metric * scale, [1], keepdims=1),
        op.ReduceMax(iou, [1], keepdims=1),
    )
    return tuple(op.Transpose(x, perm=[0, 2, 1]) for x in sides)


def _sigmoid_logits(op: Any, x: ir.Value) -> ir.Value:
    """Return the logits whose Sigmoid `x` is; return `x` itself if no Sigmoid computes it."""
    node = x.producer()
    if node is None or node.domain:
        return x
    if node.op_type == "Sigmoid":
        return node.inputs[0] or x
    if node.op_type not in MOVERS:
        return x
    # of other operators, only the first operand holds the elements
    every = node.op_type == "Concat"
    new = [
        _sigmoid_logits(op, v) if v and (every or not i) else v for i, v in enumerate(node.inputs)
    ]
    if all(a is b for a, b in zip(new, node.inputs, strict=True)):
        return x
    return op.copy_node(node, new)[x.index()]


def _distance_logits(op: Any, prediction: ir.Value, anchors: int) -> ir.Value | None:
    """Return the logits of the Softmax over box distances from which `prediction` is computed."""
    queue, seen = [prediction], set[ir.Node]()
    for value in queue:
        node = value.producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        logits: Any = node.inputs[0] if node.op_type == "Softmax" else None
        shape = None if logits is None else logits.shape
        if shape is not None and len(shape) == 4:
            axis = node.attributes["axis"].value % 4 if "axis" in node.attributes else 3
            fours = [i for i in (1, 2, 3) if i != axis and shape[i] == 4]
            if len(fours) == 1:
                rest = 6 - axis - fours[0]
                turned = op.Transpose(logits, perm=[0, rest, fours[0], axis])
                return op.Reshape(turned, [0, anchors, 4, shape[axis]])
        queue += [v for v in node.inputs if v is not None]
    return None


def query_matcher(head: Head) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a function that appends the matched query's index, or -1, to labels (N, M, 5).

    The queries of a picture have the least sum of 5 L1 - 2 GIoU - p (equation 1 and section A.2 of
    Carion et al. 2020), which the Hungarian method finds.
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as e:
        raise ImportError(
            "matching queries to boxes needs scipy: pip install 'onnxgrad[detection]'"
        ) from e
    gains = LAYOUTS["detr"].gains

    def write_costs(op: Any, prediction: ir.Value, label: ir.Value) -> Sequence:
        parts = head.read(op, prediction)
        number, truth = op.split(label, [1, 4], 2)
        aim = op.Unsqueeze(_center_and_size(op, truth, head), [2])
        l1 = op.ReduceSum(op.Abs(op.Unsqueeze(parts["raw"], [1]) - aim), [3], keepdims=0)
        pairs = op.Unsqueeze(parts["boxes"], [1]), op.Unsqueeze(truth, [2])
        one_hot = op.Equal(number, np.arange(head.classes, dtype=np.float32))
        p = op.Transpose(head.scores(op, parts, head.probabilities), perm=[0, 2, 1])
        p = op.MatMul(op.Cast(one_hot, to=ir.DataType.FLOAT), p)
        return [gains["l1"] * l1 - gains["box"] * og.losses.box_iou(op, *pairs, "giou") - p]

    pair_costs = compile_nodes(write_costs)

    def match_queries(prediction: np.ndarray, label: np.ndarray) -> np.ndarray:
        [costs] = pair_costs(prediction, label)
        query = np.full((*label.shape[:2], 1), -1, np.float32)
        for row, cost in enumerate(costs):
            real = np.flatnonzero(label[row, :, 0] >= 0)
            if len(real) > cost.shape[1]:
                raise ValueError(
                    f"a picture has {len(real)} boxes, more than the {cost.shape[1]} queries of "
                    "the model: leave such pictures out"
                )
            boxes, queries = linear_sum_assignment(cost[real])
            query[row, real[boxes], 0] = queries
        return np.concatenate([label, query], axis=2)

    return match_queries
