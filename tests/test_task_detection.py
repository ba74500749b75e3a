"""Detection: losses against formulas in PyTorch, mAP against torchmetrics, files, predictions."""

import json

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxgrad as og
from onnxgrad.tasks.detection import Detection, MeanAveragePrecision
from onnxgrad.tasks.detection_files import horizontal_flip
from onnxgrad.tasks.detection_heads import Head
from onnxgrad.tasks.detection_losses import (
    box_iou,
    detection_loss,
    distribution_focal,
    matcher,
    varifocal,
)

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
    feed = {x.name: a for x, a in zip(inputs, arrays, strict=True)} | {"loss_grad": np.ones((), np.float32)}
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
            (centers[:, 0] > x1) & (centers[:, 1] > y1) & (centers[:, 0] < x2) & (centers[:, 1] < y2)
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
    """Boxes in pixels and class logits of raw outputs (N, 4 BINS + C, A), as ultralytics decodes."""
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
            one[:] = rng.integers(CLASSES), x, y, *(rng.uniform(12, 40, 2) + (x, y))
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
