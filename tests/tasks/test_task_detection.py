"""Detection: losses against formulas in PyTorch, mAP against torchmetrics, files, predictions."""

import json
import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxgrad as og
from onnxgrad.losses.boxes import box_iou, distribution_focal, varifocal
from onnxgrad.tasks.detection import (
    Detection,
    Head,
    detection_loss,
)
from onnxgrad.tasks.detection_heads import Decoder
from onnxgrad.tasks.detection_losses import matcher

torch = pytest.importorskip("torch")
F = torch.nn.functional

SIZE, CLASSES, BINS = (64, 96), 3, 8


# -- running what is written --------------------------------------------------------------------


def run(write, *arrays, wrt=1):
    """Return the value of a scalar that `write(op, *values)` writes, and its first gradients."""
    inputs = [
        ir.Value(name=f"x{i}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(a.shape))
        for i, a in enumerate(arrays)
    ]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 20}, name="loss")
    with og.Emit(graph) as op:
        loss = op.ReduceMean(write(op, *inputs), keepdims=0)
        loss.name = "loss"
        graph.outputs.append(loss)
    proto = ir.to_proto(ir.Model(graph, ir_version=9))
    names = [f"x{i}" for i in range(wrt)]
    keep = og.DerivativeOptions.KeepOutputs
    gradient = og.onnx_derivative(proto, weights=[], inputs=names, options=keep)
    session = ort.InferenceSession(gradient.SerializeToString())
    feed = {x.name: a for x, a in zip(inputs, arrays, strict=True)} | {
        "loss_grad": np.ones((), np.float32)
    }
    values = session.run(["loss", *(f"{n}_grad" for n in names)], feed)
    return values[0], values[1:]


def torch_run(function, *arrays, wrt=1):
    tensors = [torch.tensor(a, dtype=torch.float64) for a in arrays]
    for t in tensors[:wrt]:
        t.requires_grad_()
    loss = function(*tensors).mean()
    loss.backward()
    return loss.detach().numpy(), [t.grad.numpy() for t in tensors[:wrt]]


def assert_same(mine, other, rtol=1e-5):
    assert np.isclose(mine[0], other[0], rtol=rtol, atol=0)
    for a, b in zip(mine[1], other[1], strict=True):
        assert np.abs(a - b).max() < rtol * np.abs(b).max()


def boxes(rng, *shape):
    corner = rng.uniform(0, 30, (*shape, 2))
    return np.concatenate([corner, corner + rng.uniform(3, 30, (*shape, 2))], -1).astype(np.float32)


# -- formulas of torchvision and ultralytics ------------------------------------------------------


def torch_iou(a, b, kind, eps=1e-7):
    """torchvision.ops.generalized_box_iou_loss and complete_box_iou_loss, without one minus."""
    (x1, y1, x2, y2), (x1g, y1g, x2g, y2g) = a.unbind(-1), b.unbind(-1)
    w = (torch.minimum(x2, x2g) - torch.maximum(x1, x1g)).clamp(0)
    h = (torch.minimum(y2, y2g) - torch.maximum(y1, y1g)).clamp(0)
    inter = w * h
    union = (x2 - x1) * (y2 - y1) + (x2g - x1g) * (y2g - y1g) - inter
    iou = inter / (union + eps)
    cw = torch.maximum(x2, x2g) - torch.minimum(x1, x1g)
    ch = torch.maximum(y2, y2g) - torch.minimum(y1, y1g)
    if kind == "giou":
        return iou - (cw * ch - union) / (cw * ch + eps)
    if kind == "iou":
        return iou
    far = ((x1 + x2 - x1g - x2g) / 2) ** 2 + ((y1 + y2 - y1g - y2g) / 2) ** 2
    angle = torch.atan((x2g - x1g) / (y2g - y1g)) - torch.atan((x2 - x1) / (y2 - y1))
    v = 4 / torch.pi**2 * angle**2
    with torch.no_grad():
        alpha = v / (1 - iou + v + eps)
    return iou - far / (cw**2 + ch**2 + eps) - alpha * v


@pytest.mark.parametrize("kind", ["iou", "giou", "ciou"])
def test_box_iou_is_that_of_torchvision(kind):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        pair = boxes(rng, 7), boxes(rng, 7)
        mine = run(lambda op, a, b: box_iou(op, a, b, kind), *pair, wrt=2)
        assert_same(mine, torch_run(lambda a, b: torch_iou(a, b, kind), *pair, wrt=2))


def test_varifocal_is_that_of_ultralytics():
    def witness(pred, score, alpha=0.75, gamma=2.0):
        weight = alpha * pred.sigmoid().pow(gamma) * (score <= 0) + score
        return F.binary_cross_entropy_with_logits(pred, score, reduction="none") * weight

    rng = np.random.default_rng(0)
    logits = rng.normal(scale=3, size=(40, 5)).astype(np.float32)
    target = np.maximum(rng.uniform(-1, 1, (40, 5)), 0).astype(np.float32)
    assert_same(run(varifocal, logits, target), torch_run(witness, logits, target))


def test_distribution_focal_is_that_of_ultralytics():
    def witness(logits, t):
        t = t.clamp(0, BINS - 1 - 0.01)
        low = t.long()
        flat, high = logits.view(-1, BINS), (low + 1).view(-1)
        left = F.cross_entropy(flat, low.view(-1), reduction="none").view(t.shape) * (low + 1 - t)
        return left + F.cross_entropy(flat, high, reduction="none").view(t.shape) * (t - low)

    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 4, BINS)).astype(np.float32)
    target = rng.uniform(-1, BINS + 1, (6, 4)).astype(np.float32)
    assert_same(run(distribution_focal, logits, target), torch_run(witness, logits, target))


# -- whole losses ---------------------------------------------------------------------------------


def grid(size=SIZE, strides=(8, 16, 32)):
    points = [
        (x * s + s / 2, y * s + s / 2, s)
        for s in strides
        for y in range(size[0] // s)
        for x in range(size[1] // s)
    ]
    return torch.tensor(points, dtype=torch.float64)


def assigned(scores, predicted, gt, centers, topk=10, alpha=0.5, beta=6.0):
    """TaskAlignedAssigner of one picture, box by box: which box each anchor learns, and shares."""
    n, a = len(gt), len(centers)
    if not n:
        return torch.zeros(0, a), *torch.zeros(2, a)
    inside, iou, metric = (torch.zeros(n, a, dtype=torch.float64) for _ in range(3))
    chosen = torch.zeros(n, a, dtype=torch.bool)
    for g, (c, *box) in enumerate(gt.tolist()):
        x1, y1, x2, y2 = box
        inside[g] = (
            (centers[:, 0] > x1)
            & (centers[:, 1] > y1)
            & (centers[:, 0] < x2)
            & (centers[:, 1] < y2)
        )
        true = torch.tensor(box, dtype=torch.float64).expand(a, 4)
        iou[g] = torch_iou(true, predicted, "ciou").clamp(0) * inside[g]
        metric[g] = scores[:, int(c)] ** alpha * iou[g] ** beta * inside[g]
        chosen[g, metric[g].topk(topk).indices] = True
        chosen[g] &= inside[g].bool() & (metric[g] > 0)
    for i in range(a):
        if chosen[:, i].sum() > 1:
            chosen[:, i] = False
            chosen[iou[:, i].argmax(), i] = True
    metric, iou = metric * chosen, iou * chosen
    share = metric * iou.amax(1, keepdim=True) / (metric.amax(1, keepdim=True) + 1e-9)
    return chosen, share.amax(0), iou.amax(0)


def decoded_dfl(raw):
    """Boxes in pixels and class logits of raw outputs (N, 4 BINS + C, A), as in ultralytics."""
    points = grid()
    flat, logits = raw.split([4 * BINS, CLASSES], 1)
    p = flat.view(len(raw), 4, BINS, -1).transpose(2, 1).softmax(1)
    far = (p * torch.arange(BINS).view(1, BINS, 1, 1)).sum(1).transpose(1, 2) * points[:, 2:]
    xy1, xy2 = points[:, :2] - far[..., :2], points[:, :2] + far[..., 2:]
    return torch.cat([xy1, xy2], -1), logits.transpose(1, 2)


def v8_loss(raw, labels, box="ciou", classes="bce"):
    """v8DetectionLoss of ultralytics, picture by picture, divided by the number of pictures."""
    points, (predicted, logits) = grid(), decoded_dfl(raw)
    parts, total = torch.zeros(3, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    for i in range(len(raw)):
        gt = labels[i][labels[i, :, 0] >= 0]
        target = torch.zeros_like(logits[i])
        with torch.no_grad():
            chosen, share, _ = assigned(logits[i].sigmoid(), predicted[i], gt, points[:, :2])
        for g, at in chosen.nonzero().tolist():
            target[at, int(gt[g, 0])] = share[at]
            true = gt[g, 1:]
            own = 1 - torch_iou(predicted[i, at], true, box)
            sides = torch.cat([points[at, :2] - true[:2], true[2:] - points[at, :2]])
            t = (sides / points[at, 2]).clamp(0, BINS - 1.01)
            low, d = t.long(), raw[i, : 4 * BINS, at].view(4, BINS).log_softmax(-1)
            near, over = d.gather(1, low[:, None])[:, 0], d.gather(1, low[:, None] + 1)[:, 0]
            dfl = -((low + 1 - t) * near + (t - low) * over).mean()
            parts = parts + torch.stack([7.5 * own, 1.5 * dfl, 0 * dfl]) * share[at]
        bce = F.binary_cross_entropy_with_logits(logits[i], target, reduction="none")
        if classes == "varifocal":
            bce = bce * torch.where(target > 0, target, 0.75 * logits[i].sigmoid() ** 2)
        if classes == "focal":  # torchvision.ops.sigmoid_focal_loss
            hit, p = (target > 0).double(), logits[i].sigmoid()
            ce = F.binary_cross_entropy_with_logits(logits[i], hit, reduction="none")
            p_t = p * hit + (1 - p) * (1 - hit)
            bce = (0.25 * hit + 0.75 * (1 - hit)) * ce * (1 - p_t) ** 2
        parts = parts + torch.stack([0 * bce.sum(), 0 * bce.sum(), 0.5 * bce.sum()])
        total = total + share.sum()
    return parts.sum() / total.clamp(1)


def truth(rng, n=2, most=4):
    labels = np.full((n, most, 5), -1, np.float32)
    for row in labels:
        for one in row[: rng.integers(0 if n > 1 else 1, most + 1)]:
            x, y = rng.uniform(0, SIZE[1] - 40), rng.uniform(0, SIZE[0] - 40)
            one[:] = rng.integers(CLASSES), x, y, x + rng.uniform(12, 40), y + rng.uniform(12, 40)
    return labels


def test_loss_of_raw_distributions_is_that_of_ultralytics():
    head = Head("yolov8_dfl", CLASSES, SIZE, probabilities=False)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        raw = rng.normal(size=(2, 4 * BINS + CLASSES, len(grid()))).astype(np.float32)
        labels = truth(rng)
        options = {
            "box": ["ciou", "giou"][seed % 2],
            "classes": ["bce", "varifocal", "focal"][seed % 3],
        }
        spec = detection_loss(head, **options)
        found = run(spec.formula, raw, labels)
        assert_same(found, torch_run(lambda x, y, o=options: v8_loss(x, y, **o), raw, labels))


def yolov8_file(op, raw):
    """Decode as the file of a YOLOv8 does: center and size in pixels, and a Sigmoid."""
    points = grid().numpy().astype(np.float32)
    flat, logits = op.split(raw, [4 * BINS, CLASSES], 1)
    far = op.Transpose(op.Reshape(flat, [0, 4, BINS, len(points)]), perm=[0, 2, 1, 3])
    far = op.Softmax(far, axis=1) * np.arange(BINS, dtype=np.float32).reshape(1, BINS, 1, 1)
    near, far = op.split(op.ReduceSum(far, [1], keepdims=0), 2, 1)
    near, far = (
        op.Sub(points[:, :2].T / points[:, 2], near),
        op.Add(points[:, :2].T / points[:, 2], far),
    )
    decoded = op.Concat((near + far) / 2.0, far - near, axis=1) * points[:, 2]
    return op.Concat(decoded, op.Sigmoid(logits), axis=1)


def test_loss_of_a_yolov8_file_is_that_of_its_raw_outputs():
    rng = np.random.default_rng(3)
    raw = rng.normal(size=(2, 4 * BINS + CLASSES, len(grid()))).astype(np.float32)
    raw[:, -CLASSES:] *= 20  # where probabilities are rounded to 1
    spec, labels = detection_loss(Head("yolov8", CLASSES, SIZE)), truth(rng)
    found = run(lambda op, x, y: spec.formula(op, yolov8_file(op, x), y), raw, labels)
    assert_same(found, torch_run(v8_loss, raw, labels), rtol=3e-5)  # boxes are rounded on the way


def yolox_loss(raw, labels, decoded):
    points, parts = grid(), torch.zeros((), dtype=torch.float64)
    xy, wh, obj, logits = raw.split([2, 2, 1, CLASSES], 2)
    if not decoded:
        xy, wh = (
            (xy + (points[:, :2] / points[:, 2:] - 0.5)) * points[:, 2:],
            wh.exp() * points[:, 2:],
        )
    predicted, count = torch.cat([xy - wh / 2, xy + wh / 2], -1), 0
    for i in range(len(raw)):
        gt = labels[i][labels[i, :, 0] >= 0]
        with torch.no_grad():
            p = logits[i].sigmoid() * obj[i].sigmoid()
            chosen, _, iou = assigned(p, predicted[i], gt, points[:, :2])
        hit = torch.zeros_like(obj[i, :, 0])
        for g, at in chosen.nonzero().tolist():
            hit[at] = 1.0
            aim = F.one_hot(gt[g, 0].long(), CLASSES) * iou[at]
            parts = parts + 5 * (1 - torch_iou(predicted[i, at], gt[g, 1:], "giou"))
            parts = parts + F.binary_cross_entropy_with_logits(logits[i, at], aim, reduction="sum")
        parts = parts + F.binary_cross_entropy_with_logits(obj[i, :, 0], hit, reduction="sum")
        count += int(hit.sum())
    return parts / max(count, 1)


@pytest.mark.parametrize("decoded", [False, True])
def test_loss_of_yolox(decoded):
    def file(op, x):
        box, scores = op.split(x, [4, 1 + CLASSES], 2)
        return op.Concat(box, op.Sigmoid(scores), axis=2)

    points = grid().numpy().astype(np.float32)
    spec = detection_loss(Head("yolox", CLASSES, SIZE, decoded=decoded), box="giou")
    for seed in range(5):
        rng = np.random.default_rng(seed)
        raw = rng.normal(size=(2, len(points), 5 + CLASSES)).astype(np.float32)
        if decoded:
            raw[..., :2] += points[:, :2]
            raw[..., 2:4] = np.exp(raw[..., 2:4]) * points[:, 2:]
        labels = truth(rng)
        found = run(lambda op, x, y: spec.formula(op, file(op, x), y), raw, labels)
        other = torch_run(lambda x, y: yolox_loss(x, y, decoded), raw, labels)
        assert_same(found, other)


QUERIES = 9


def set_loss(raw, labels, softmax):
    """SetCriterion and HungarianMatcher of DETR."""
    from scipy.optimize import linear_sum_assignment

    sides = torch.tensor([SIZE[1], SIZE[0], SIZE[1], SIZE[0]], dtype=torch.float64)
    count, parts, weights, entropy = (labels[..., 0] >= 0).sum(), 0, 0, 0
    for row, label in zip(raw, labels, strict=True):
        gt, box, logits = label[label[:, 0] >= 0], row[:, :4], row[:, 4:]
        p = logits.softmax(-1) if softmax else logits.sigmoid()
        corners = torch.cat([box[:, :2] - box[:, 2:] / 2, box[:, :2] + box[:, 2:] / 2], -1) * sides
        true = gt[:, 1:] / sides
        aim = torch.cat([(true[:, :2] + true[:, 2:]) / 2, true[:, 2:] - true[:, :2]], -1)
        numbers = gt[:, 0].long()
        cost = 5 * torch.cdist(aim, box, p=1) - p[:, numbers].T
        cost = cost - 2 * torch_iou(gt[:, None, 1:], corners[None], "giou")
        own, queries = linear_sum_assignment(cost.detach().numpy())
        parts = parts + 5 * (box[queries] - aim[own]).abs().sum()
        parts = parts + 2 * (1 - torch_iou(corners[queries], gt[own, 1:], "giou")).sum()
        if softmax:
            target = torch.full((QUERIES,), CLASSES)
            target[queries] = numbers[own]
            weight = torch.tensor([1.0] * CLASSES + [0.1]).double()
            entropy = entropy + F.cross_entropy(logits, target, weight, reduction="sum")
            weights = weights + weight[target].sum()
        else:
            target = torch.zeros_like(logits)
            target[queries, numbers[own]] = 1.0
            p_t = torch.where(target > 0, p, 1 - p)
            alpha = torch.where(target > 0, 0.25, 0.75)
            parts = parts - (alpha * (1 - p_t) ** 2 * p_t.log()).sum()
    return parts / count + (entropy / weights if softmax else 0)


@pytest.mark.parametrize("kind", ["detr", "rtdetr"])
def test_loss_of_a_set_is_that_of_detr(kind):
    pytest.importorskip("scipy")
    head = Head(kind, CLASSES, SIZE, probabilities=False)
    spec, match = detection_loss(head, box="giou", classes="focal"), matcher(head)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        raw = rng.normal(size=(2, QUERIES, 4 + CLASSES + (kind == "detr"))).astype(np.float32)
        raw[..., :4] = rng.uniform(0.2, 0.8, (2, QUERIES, 4))
        labels = truth(rng)
        labels[0, 0] = 1, 5, 5, 30, 20
        found = run(spec.formula, raw, match(raw, labels))
        assert_same(found, torch_run(lambda x, y: set_loss(x, y, kind == "detr"), raw, labels))


# -- mean average precision -----------------------------------------------------------------------


def average_precision(found, true, iou):
    """That of COCO for one class: matches by score, precision at 101 recalls."""
    count = sum(len(t) for t in true)
    if not count:
        return None
    rows = sorted(
        ((s, i, box) for i, boxes in enumerate(found) for s, *box in boxes),
        key=lambda row: -row[0],
    )
    taken, hits = [set() for _ in true], []
    for _, i, box in rows:
        best, at = min(iou, 1 - 1e-10), None
        for g, other in enumerate(true[i]):
            x = max(0, min(box[2], other[2]) - max(box[0], other[0]))
            y = max(0, min(box[3], other[3]) - max(box[1], other[1]))
            areas = sum((b[2] - b[0]) * (b[3] - b[1]) for b in (box, other))
            overlap = x * y / (areas - x * y)
            if g not in taken[i] and overlap >= best:
                best, at = overlap, g
        taken[i].add(at)
        hits.append(at is not None)
    tp = np.cumsum(hits)
    recall, precision = tp / count, tp / np.arange(1, len(hits) + 1)
    grid = np.linspace(0, 1, 101)
    return np.mean([max(precision[recall >= r], default=0.0) for r in grid])


def test_map_is_that_of_its_definition():
    pytest.importorskip("pycocotools")
    head = Head("rtdetr", CLASSES, (100, 100), probabilities=True)  # keeps all boxes
    for seed in range(50):
        rng = np.random.default_rng(seed)
        label = np.full((4, 5, 5), -1, np.float32)
        prediction = np.zeros((4, 12, 4 + CLASSES), np.float32)
        for row, boxes_of in zip(label, prediction, strict=True):
            count = rng.integers(1, 6)
            near = rng.uniform(10, 60, (count, 2))
            row[:count] = np.c_[
                rng.integers(0, CLASSES, count), near, near + rng.uniform(20, 35, 2)
            ]
            at = rng.integers(0, count, 12)
            corners = row[at, 1:] + rng.normal(scale=2.5, size=(12, 4))
            boxes_of[:, :2] = (corners[:, :2] + corners[:, 2:]) / 200
            boxes_of[:, 2:4] = (corners[:, 2:] - corners[:, :2]) / 100
            number = np.where(rng.random(12) < 0.8, row[at, 0], rng.integers(0, CLASSES, 12))
            boxes_of[np.arange(12), 4 + number.astype(int)] = rng.permutation(12) / 20 + 0.1
            boxes_of[np.arange(12), 4 + number.astype(int)] += rng.random(12) / 100
        for iou, ious in [((0.5, [0.5]), (None, np.arange(50, 100, 5) / 100))[seed % 2]]:
            decoder = Decoder(head)
            metric = og.MeanAveragePrecision(decoder.lists, iou)
            metric.begin(og.PredictionInfo())
            for half in (slice(0, 2), slice(2, 4)):
                metric.update(prediction[half], label[half])
            values = []
            for c in range(CLASSES):
                found = [d[d[:, 0] == c][:, 1:] for d in decoder(prediction, 0.001, 0.65)]
                true = [t[t[:, 0] == c][:, 1:] for t in label]
                values += [average_precision(found, true, t) for t in ious]
            expected = np.mean([v for v in values if v is not None])
            assert np.isclose(metric.compute(), expected, atol=1e-6), seed


# -- files ----------------------------------------------------------------------------------------


def picture(path, size=(60, 40), box=None):
    image = pytest.importorskip("PIL.Image").new("RGB", size, (120, 130, 140))
    if box is not None:
        image.paste((250, 20, 20), tuple(box))
    image.save(path)


def coco(folder, notes, **changed):
    (folder / "images").mkdir(parents=True)
    images = [{"id": 7, "file_name": "a.png", "width": 60, "height": 40}]
    images.append({"id": 3, "file_name": "b.png", "width": 60, "height": 40})
    for image in images:
        picture(folder / "images" / image["file_name"])
    categories = [{"id": 90, "name": "cat"}, {"id": 4, "name": "dog"}]
    whole = {"images": images, "annotations": notes, "categories": categories, **changed}
    (folder / "instances.json").write_text(json.dumps(whole))
    return folder


def yolo(folder, lines, names="[dog, cat]"):
    for part in ("images", "labels"):
        (folder / part / "train").mkdir(parents=True)
    picture(folder / "images" / "train" / "a.png")
    (folder / "labels" / "train" / "a.txt").write_text(lines)
    (folder / "data.yaml").write_text(f"train: images/train\nnames: {names}\n")
    return folder


def small_yolox(classes=2, weight=None):
    """A YOLOX of one layer, for pictures of 32 x 32 pixels: 16, 4 and 1 anchors."""
    rng = np.random.default_rng(0)
    columns = 5 + classes
    proto = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["": 20]>
        yolox (float[N,3,32,32] images) => (float[N,21,{columns}] output)
        <int64[3] flat = {{0, {columns}, -1}}> {{
            h = Conv <kernel_shape=[8,8], strides=[8,8]> (images, stem)  f = Relu(h)
            g = AveragePool <kernel_shape=[2,2], strides=[2,2]> (f)
            k = AveragePool <kernel_shape=[2,2], strides=[2,2]> (g)
            b0 = Conv(f, reg0)  o0 = Conv(f, obj0)  c0 = Conv(f, cls0, bias0)
            b1 = Conv(g, reg1)  o1 = Conv(g, obj1)  c1 = Conv(g, cls1, bias1)
            b2 = Conv(k, reg2)  o2 = Conv(k, obj2)  c2 = Conv(k, cls2, bias2)
            so0 = Sigmoid(o0)  so1 = Sigmoid(o1)  so2 = Sigmoid(o2)
            sc0 = Sigmoid(c0)  sc1 = Sigmoid(c1)  sc2 = Sigmoid(c2)
            p0 = Concat <axis=1> (b0, so0, sc0)  p1 = Concat <axis=1> (b1, so1, sc1)
            p2 = Concat <axis=1> (b2, so2, sc2)
            r0 = Reshape(p0, flat)  r1 = Reshape(p1, flat)  r2 = Reshape(p2, flat)
            all = Concat <axis=2> (r0, r1, r2)
            output = Transpose <perm=[0,2,1]> (all) }}""")
    shapes = {"stem": (16, 3, 8, 8)}
    for i in range(3):
        shapes |= {f"reg{i}": (4, 16, 1, 1), f"obj{i}": (1, 16, 1, 1), f"bias{i}": (classes,)}
        shapes[f"cls{i}"] = (classes, 16, 1, 1)
    for name, shape in shapes.items():
        scale = 0.1
        values = rng.normal(scale=scale, size=shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return proto


BOX = {"id": 1, "image_id": 7, "category_id": 90, "bbox": [6, 10, 24, 20]}


def test_reading_coco(tmp_path):
    crowd = {"id": 2, "image_id": 7, "category_id": 4, "bbox": [0, 0, 9, 9], "iscrowd": 1}
    task = Detection(small_yolox(), coco(tmp_path / "c", [BOX, crowd]), head="yolox")
    assert task.classes == ["dog", "cat"]
    assert task.data.rows == 2
    X, y = task.data.take(np.arange(2), None)
    # 60 x 40 -> 32 x 21, 5 rows of gray above
    scale = 32 / 60
    expected = [1, 6 * scale, 10 * scale + 5, 30 * scale, 30 * scale + 5]
    np.testing.assert_allclose(y[0], [expected], rtol=1e-6)
    assert (y[1] == -1).all()
    assert X.shape == (2, 3, 32, 32)
    assert X.dtype == np.float32
    assert np.allclose(X[0, :, 0, 0], 114)
    assert np.allclose(X[0, :, 16, 16], [140, 130, 120])


def test_reading_yolo(tmp_path):
    pytest.importorskip("yaml")
    task = Detection(small_yolox(), yolo(tmp_path / "y", "1 0.3 0.5 0.4 0.5\n"), head="yolox")
    same = Detection(small_yolox(), coco(tmp_path / "c", [BOX]), head="yolox")
    assert task.classes == ["dog", "cat"]
    assert task.validation is None
    np.testing.assert_allclose(
        task.data.take([0], None)[1], same.data.take([0], None)[1], rtol=1e-5
    )
    (tmp_path / "y" / "data.yaml").write_text(
        "train: images/train\nval: images/train\nnames: [dog]"
    )
    with pytest.raises(ValueError, match="class 1 is not among the 1"):
        task.read(tmp_path / "y")
    with pytest.raises(ValueError, match="classes"):
        Detection(small_yolox(), tmp_path / "c", head="yolox").read(
            yolo(tmp_path / "z", "", "[a, b]")
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"category_id": 5}, "annotation 0 .id 1.: no category has the id 5"),
        ({"image_id": 9}, "annotation 0 .id 1.: no image has the id 9"),
        ({"bbox": [40, 10, 24, 20]}, "annotation 0 .id 1.: the box is outside"),
        ({"bbox": [4, 10, 0, 20]}, "annotation 0 .id 1.: the box is empty"),
        ({"bbox": [4, 10]}, "annotation 0 .id 1.: 'bbox' must be"),
    ],
)
def test_broken_annotations_of_coco_name_the_row(tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        Detection(small_yolox(), coco(tmp_path / "c", [BOX | changed]), head="yolox")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("0 .5 .5 .2 .2\n7 .5 .5 .2 .2", r"a.txt', line 2: class 7"),
        ("0 .5 .5 .2", r"a.txt', line 1: must be class"),
        ("0 .95 .5 .2 .2", r"a.txt', line 1: the box is outside"),
    ],
)
def test_broken_labels_of_yolo_name_the_line(tmp_path, lines, message):
    pytest.importorskip("yaml")
    with pytest.raises(ValueError, match=message):
        Detection(small_yolox(), yolo(tmp_path / "y", lines), head="yolox")


def test_missing_files_are_named(tmp_path):
    folder = coco(tmp_path / "c", [BOX])
    picture(folder / "images" / "a.png", (60, 50))
    task = Detection(small_yolox(), folder, head="yolox")
    with pytest.raises(
        ValueError, match=r"a.png' has 60 x 50 pixels, and is annotated as \(60, 40"
    ):
        task.data.take([0], None)
    (folder / "images" / "b.png").unlink()
    with pytest.raises(ValueError, match=r"the image 'b.png' is not in"):
        Detection(small_yolox(), folder, head="yolox")
    with pytest.raises(ValueError, match=r"has no instances\.json"):
        Detection(small_yolox(), tmp_path, head="yolox")


def test_flips_follow_the_seed_and_the_row(tmp_path):
    folder = coco(tmp_path / "c", [BOX, BOX | {"id": 2, "image_id": 3}])
    task = Detection(small_yolox(), folder, head="yolox", augment=[og.random_flip()])
    plain = task.data.take([0], None)[1]
    drawn = [task.data.take([0], seed)[1] for seed in range(8)]
    left = {float(y[0, 0, 1]) for y in drawn}
    assert left == {float(plain[0, 0, 1]), float(np.float32(32) - plain[0, 0, 3])}
    again = task.data.take([1, 0], 5)[1][1:]
    np.testing.assert_array_equal(drawn[5], again)


# -- training and predictions ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    """Pictures of 32 x 32 with a red or a blue square."""
    image = pytest.importorskip("PIL.Image")
    folder, rng = tmp_path_factory.mktemp("squares"), np.random.default_rng(0)
    images, notes = [], []
    for i in range(48):
        made = image.new("RGB", (32, 32), (128, 128, 128))
        side, kind = int(rng.integers(8, 16)), int(rng.integers(2))
        x, y = rng.integers(0, 32 - side, 2).tolist()
        made.paste([(255, 0, 0), (0, 0, 255)][kind], (x, y, x + side, y + side))
        made.save(folder / f"{i}.png")
        images.append({"id": i, "file_name": f"{i}.png", "width": 32, "height": 32})
        box = {"bbox": [x, y, side, side], "image_id": i}
        notes.append({"id": i, "category_id": kind + 1, **box})
    categories = [{"id": 1, "name": "red"}, {"id": 2, "name": "blue"}]
    whole = {"images": images, "annotations": notes, "categories": categories}
    (folder / "instances.json").write_text(json.dumps(whole))
    return folder


@pytest.fixture(scope="module")
def trained(squares):
    pytest.importorskip("pycocotools")
    task = Detection(small_yolox(), squares, head="yolox", pixels=lambda rgb: 3 * rgb - 1.5)
    trainer = task.trainer(optimizer="adamw", learning_rate=0.01)
    before = trainer.evaluate(task.data)
    trainer.fit(task.data, epochs=30, batch_size=16)
    return task, trainer, before


def test_training_finds_the_boxes(trained):
    task, trainer, before = trained
    after = trainer.evaluate(task.data)
    assert after["loss"] < 0.5 * before["loss"]
    assert after["map50"] > before["map50"] + 0.2
    assert after["map50"] >= after["map"]


def decoded_by_hand(prediction, least, overlap):
    """YOLOX's demo_postprocess and multiclass_nms, in NumPy."""
    found = []
    points, row = grid((32, 32)).numpy(), prediction[0]
    xy = (row[:, :2] + points[:, :2] / points[:, 2:] - 0.5) * points[:, 2:]
    wh = np.exp(row[:, 2:4]) * points[:, 2:]
    scores = row[:, 4:5] * row[:, 5:]
    for c in range(scores.shape[1]):
        mine = [i for i in np.argsort(-scores[:, c]) if scores[i].argmax() == c]
        kept = []
        for i in mine:
            box = np.r_[xy[i] - wh[i] / 2, xy[i] + wh[i] / 2]
            others = [
                torch_iou(torch.tensor(box), torch.tensor(b), "iou") <= overlap for _, _, b in kept
            ]
            if scores[i, c] > least and all(others):
                kept.append((scores[i, c], c, box))
        found += kept
    return sorted(found, key=lambda one: -one[0])


def test_predictions_are_those_of_the_file(trained, squares, tmp_path):
    task, trainer, _ = trained
    trainer.save(tmp_path / "m.onnx")
    results = task.predict(tmp_path / "m.onnx", squares)
    assert len(results) == 48
    session = ort.InferenceSession(tmp_path / "m.onnx")
    for i in range(3):
        X, _ = task.data.take([i], None)
        expected = decoded_by_hand(session.run(None, {"images": X})[0], 0.25, 0.65)
        [result] = task.predict(trainer, task.data.files[i])
        assert [task.classes[c] for _, c, _ in expected] == result.classes
        np.testing.assert_allclose(result.scores, [s for s, *_ in expected], rtol=1e-5)
        boxes = np.array([b for *_, b in expected]).reshape(-1, 4).clip(0, 32)
        np.testing.assert_allclose(result.boxes, boxes, rtol=1e-4, atol=1e-3)
    before, after = (
        onnx.load(m) if not hasattr(m, "graph") else m for m in (tmp_path / "m.onnx", task.model)
    )
    assert [n.op_type for n in before.graph.node] == [n.op_type for n in after.graph.node]


def test_boxes_are_in_pixels_of_the_picture(trained):
    task, trainer, _ = trained
    image = np.full((64, 128, 3), 128, np.uint8)
    image[16:56, 40:80] = 255, 0, 0
    [found] = task.predict(trainer, image, score=0.05)
    assert (found.boxes <= [128, 64, 128, 64]).all()
    assert (found.boxes >= 0).all()
    iou = torch_iou(torch.tensor(found.boxes[0]), torch.tensor([40.0, 16, 80, 56]), "iou")
    assert found.classes[0] == "red"
    assert iou > 0.4


def test_writing(trained, squares, tmp_path):
    task, trainer, _ = trained
    results = task.predict(trainer, squares)
    files = task.write(squares, results, tmp_path / "out")
    assert files[0].name == "0.png"
    assert files[-1].name == "detections.json"
    rows = json.loads(files[-1].read_text())
    assert len(rows) == sum(len(r.scores) for r in results)
    assert {row["category_id"] for row in rows} <= {1, 2}
    assert {row["image_id"] for row in rows} <= set(range(48))
    with pytest.raises(ValueError, match="47 results for 48 pictures"):
        task.write(squares, results[1:], tmp_path)


def test_other_classes_get_new_layers_and_train_alone(squares):
    proto = small_yolox(classes=5)
    task = Detection(proto, squares, head="yolox", pixels=lambda rgb: 3 * rgb - 1.5)
    assert task.head.classes == 2
    assert len(task.class_layers) == 6
    trainer = task.trainer(train=task.class_layers)
    trainer.fit(task.data, epochs=1, batch_size=16)
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in trainer.model.graph.initializer}
    for tensor in proto.graph.initializer:
        if tensor.name.startswith(("stem", "reg", "obj")):
            np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), weights[tensor.name])


# -- sets -----------------------------------------------------------------------------------------


def small_detr(classes=2, queries=6):
    proto = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["": 20]>
        detr (float[N,3,32,32] images) => (float[N,{queries},{classes + 1}] logits,
                                           float[N,{queries},4] boxes) {{
            h = Conv <kernel_shape=[8,8], strides=[8,8]> (images, stem)  f = Flatten(h)
            i = Relu(f)  j = MatMul(i, hidden)  k = Tanh(j)
            a = MatMul(k, to_logits)  logits = Reshape(a, logits_shape)
            b = MatMul(k, to_boxes)  c = Reshape(b, boxes_shape)  boxes = Sigmoid(c) }}""")
    rng = np.random.default_rng(0)
    shapes = {"stem": (8, 3, 8, 8), "hidden": (128, 64)}
    shapes |= {"to_logits": (64, queries * (classes + 1)), "to_boxes": (64, queries * 4)}
    for name, shape in shapes.items():
        values = rng.normal(scale=0.1, size=shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    for name, last in (("logits_shape", classes + 1), ("boxes_shape", 4)):
        shape = np.int64([0, queries, last])
        proto.graph.initializer.append(onnx.numpy_helper.from_array(shape, name))
    return proto


@pytest.mark.parametrize(
    ("kind", "sigmoid"), [("detr", False), ("rtdetr", False), ("rtdetr", True)]
)
def test_a_set_through_a_trainer(kind, sigmoid, monkeypatch):
    pytest.importorskip("scipy")
    pytest.importorskip("pycocotools")
    monkeypatch.setitem(globals(), "SIZE", (32, 32))
    softmax, proto = kind == "detr", small_detr(CLASSES - (kind == "rtdetr"), QUERIES)
    if sigmoid:
        proto.graph.node.add(op_type="Sigmoid", input=["logits"], output=["p"])
        proto.graph.output[0].name = "p"
    loss = {"box": "giou", "classes": "bce" if softmax else "focal"}
    task = Detection(proto, head=kind, loss=loss)
    assert (task.head.classes, task.head.probabilities) == (CLASSES, sigmoid)
    rng = np.random.default_rng(0)
    X, labels = rng.normal(size=(2, 3, 32, 32)).astype(np.float32), np.float32(truth_in_32(rng))
    trainer = task.trainer()
    prediction = trainer.predict(X)
    matched = matcher(task.head)(prediction, labels)
    raw = torch.tensor(np.float64(prediction))
    if sigmoid:
        raw[..., 4:] = raw[..., 4:].logit()
    expected = set_loss(raw, torch.tensor(np.float64(labels)), softmax)
    assert np.isclose(trainer.evaluate(X, matched)["loss"], expected, rtol=1e-5)


def truth_in_32(rng):
    labels = np.full((2, 3, 5), -1.0)
    for row in labels:
        for one in row[: rng.integers(1, 4)]:
            x, y = rng.uniform(0, 15, 2)
            one[:] = rng.integers(CLASSES), x, y, x + rng.uniform(4, 16), y + rng.uniform(4, 16)
    return labels


def test_queries_are_matched_while_they_train(squares):
    pytest.importorskip("scipy")
    pytest.importorskip("pycocotools")
    task = Detection(small_detr(), squares)
    assert task.head.kind == "detr"
    assert task.head.classes == 2
    with pytest.raises(ValueError, match="matched by a trainer"):
        task.data.take([0], None)
    trainer = task.trainer(optimizer="adam", learning_rate=0.003)
    matched = [task.data.take(np.arange(48), None)[1][..., 5]]
    before = trainer.evaluate(task.data)
    trainer.fit(task.data, epochs=40, batch_size=16)
    after = trainer.evaluate(task.data)
    assert after["loss"] < 0.7 * before["loss"]
    assert after["detections_map50"] > before["detections_map50"]
    matched.append(task.data.take(np.arange(48), None)[1][..., 5])
    assert (matched[0] != matched[1]).any()  # by the weights of the moment
    file = task.finished(trainer.model)
    assert [y.name for y in file.graph.output] == ["logits", "boxes"]
    [one], [other] = (task.predict(m, squares / "0.png") for m in (file, trainer))
    np.testing.assert_array_equal(one.boxes, other.boxes)


def test_a_trained_model_knows_its_classes(trained, squares):
    pytest.importorskip("pycocotools")
    task, trainer, _ = trained
    again = Detection(trainer.model, head="yolox", pixels=task.pixels)
    assert again.classes == ["red", "blue"]
    assert again.metrics == ()
    reader = again.read(squares)
    assert again.trainer().evaluate(reader) == pytest.approx(trainer.evaluate(task.data))
    [one], [other] = (t.predict(trainer, squares / "0.png") for t in (task, again))
    np.testing.assert_array_equal(one.boxes, other.boxes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head": "ssd"}, "give one of 'yolov8'"),
        ({"head": "yolox", "image_size": 64}, "image_size=64: pictures in 'images' are 32 x 32"),
        ({"head": "yolox", "loss": {"box": "diou"}}, "box is 'ciou' or 'giou'"),
        ({"head": "yolox", "loss": {"gains": {"l1": 1}}}, "have no 'l1'"),
    ],
)
def test_arguments_that_mean_nothing(arguments, message):
    with pytest.raises(ValueError, match=message):
        Detection(small_yolox(), **arguments)


@pytest.mark.real
def test_a_published_yolox(squares, tmp_path):
    published = pytest.importorskip("published")
    given = os.environ.get("ONNXGRAD_MODELS", "")
    if not given:
        pytest.skip("ONNXGRAD_MODELS=download takes it from its wheel")
    listed = next(model for model in published.models() if model.name == "ddddocr")
    folder = published.CACHE if given == "download" else Path(given)
    before = onnx.load(published.fetch(listed, folder))
    task = Detection(before, squares)
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 255, (2, 3, 416, 416)).astype(np.float32)
    y = np.float32([[[0, 50, 60, 150, 140]], [[1, 10, 20, 70, 90]]])
    trainer = task.trainer(train=task.class_layers)
    found = trainer.evaluate(X, y, batch_size=2)["loss"]
    raw = torch.tensor(np.float64(trainer.predict(X, batch_size=2)))
    raw[..., 4:] = raw[..., 4:].logit()
    points, iou = grid((416, 416)), torch_iou
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "grid", lambda: points)
        patch.setitem(globals(), "CLASSES", 2)
        patch.setitem(globals(), "torch_iou", lambda a, b, kind: iou(a, b, "ciou"))
        expected = yolox_loss(raw, torch.tensor(np.float64(y)), decoded=False)
    assert np.isclose(found, expected, rtol=1e-4)  # scores are rounded by the Sigmoid of the file
    after = trainer.fit(task.data.subset(np.arange(2)), epochs=1, batch_size=2).model
    assert [n.op_type for n in after.graph.node] == [n.op_type for n in before.graph.node]
    weights = [
        {t.name: t.raw_data for t in m.graph.initializer if t.name not in task.class_layers}
        for m in (before, after)
    ]
    kept = weights[0].keys() & weights[1].keys()
    assert len(kept) >= len(before.graph.initializer) - 9  # class layers, and lengths with classes
    assert all(weights[0][name] == weights[1][name] for name in kept)


def test_a_yolov8_through_a_trainer():
    columns, anchors = 4 * BINS + CLASSES, len(grid())
    proto = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["": 20]>
        yolov8 (float[N,3,64,96] images) => (float[N,{columns},{anchors}] raw)
        <int64[3] shape = {{0, {columns}, {anchors}}}> {{
            p = AveragePool <kernel_shape=[8,8], strides=[8,8]> (images)  f = Flatten(p)
            m = MatMul(f, weight)  raw = Reshape(m, shape) }}""")
    rng = np.random.default_rng(0)
    weight = rng.normal(scale=0.1, size=(288, columns * anchors)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "weight"))
    X = rng.normal(size=(2, 3, *SIZE)).astype(np.float32) * 8
    raw = ort.InferenceSession(proto.SerializeToString()).run(None, {"images": X})[0]
    model = ir.from_proto(proto)
    with og.Emit(model.graph) as op:
        decoded = yolov8_file(op, model.graph.outputs[0])
    decoded.name, model.graph.outputs[:] = "output", [decoded]
    task, labels = Detection(ir.to_proto(model)), truth(rng)
    assert task.head == Head("yolov8", CLASSES, SIZE)
    trainer = task.trainer(learning_rate=1e-3)
    expected = v8_loss(torch.tensor(np.float64(raw)), torch.tensor(np.float64(labels)))
    assert np.isclose(trainer.evaluate(X, labels)["loss"], expected, rtol=1e-5)
    trainer.fit(X, labels, epochs=3, batch_size=2)
    assert trainer.history[-1]["loss"] < trainer.history[0]["loss"]
