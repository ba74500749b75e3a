"""Segmentation: losses against PyTorch, IoU against torchmetrics, and files in and out."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxgrad as og
from tests.support.running import run

Image = pytest.importorskip("PIL.Image")
ImageDraw = pytest.importorskip("PIL.ImageDraw")
Segmentation = og.tasks.segmentation.Segmentation
ROWS, CLASSES, SIZE = 4, 5, (6, 7)

# -- losses and metrics ----------------------------------------------------------------------------


def of_scores(scores: np.ndarray, activation: str) -> onnx.ModelProto:
    """Return a model whose weights are the scores themselves."""
    shape = ",".join(["N", *map(str, scores.shape[1:])])
    model = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["": 20]>
        f (double[{shape}] x) => (double[{shape}] y) {{ s = Add(x, w)  y = {activation}(s) }}""")
    model.graph.initializer.append(numpy_helper.from_array(scores, "w"))
    return model


def loss_and_gradient(loss, scores, labels, activation="Identity"):
    """Return what a trainer has: its loss, and how far one step of rate 1 moves the scores."""
    trainer = og.Trainer(of_scores(scores, activation), loss, optimizer="sgd", learning_rate=1.0)
    zeros = np.zeros_like(scores)
    value = trainer.evaluate(zeros, labels)["loss"]
    trainer.fit(zeros, labels, epochs=1, batch_size=len(scores), shuffle=False)
    return value, scores - trainer.state.weights["w"]


def torch_dice(p, t):
    """1 - Dice of each row and channel, smoothed by 1."""
    axes = (-2, -1)
    return 1 - (2 * (p * t).sum(axes) + 1) / (p.sum(axes) + t.sum(axes) + 1)


def torch_losses(name, scores, labels):
    """Return the loss of each row and pixel in PyTorch, and which pixels count."""
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    y = torch.tensor(labels)
    if scores.shape[1] > 1:
        kept = y != -100
        t = functional.one_hot(y.clamp(min=0), scores.shape[1]).movedim(-1, 1) * kept[:, None]
        log_p = scores.log_softmax(1)
        if name == "cross_entropy":
            return functional.cross_entropy(scores, y, ignore_index=-100, reduction="none"), kept
        if name == "focal":
            p = (log_p.exp() * t).sum(1)
            return -((1 - p) ** 2) * (log_p * t).sum(1), kept
        each = torch_dice(log_p.exp() * kept[:, None], t).mean(1)
        return each[:, None, None].expand(kept.shape), kept
    kept = ~y.isnan()
    t = y.nan_to_num()
    if name == "dice":
        each = torch_dice(scores.sigmoid() * kept, t)
        return each[..., None, None].expand(kept.shape), kept
    ce = functional.binary_cross_entropy_with_logits(scores, t, reduction="none")
    if name == "cross_entropy":
        return ce, kept
    p = scores.sigmoid()  # as sigmoid_focal_loss of torchvision
    p_t, alpha_t = p * t + (1 - p) * (1 - t), 0.25 * t + 0.75 * (1 - t)
    return alpha_t * ce * (1 - p_t) ** 2, kept


@pytest.mark.parametrize("case", range(2))
@pytest.mark.parametrize("channels", [1, CLASSES])
@pytest.mark.parametrize(
    "loss", ["cross_entropy", "dice", "focal", "cross_entropy+dice", {"dice": 0.5, "focal": 2.0}]
)
def test_losses_are_those_of_pytorch(loss, channels, case):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(case)
    scores = 2 * rng.normal(size=(ROWS, channels, *SIZE))
    ignored = rng.random((ROWS, *SIZE)) < 0.3 * (case > 0)
    labels = rng.integers(0, max(2, channels), (ROWS, *SIZE))
    labels = np.where(ignored, -100, labels)
    if channels == 1:
        labels = np.where(ignored, np.nan, labels)[:, None]
    x = torch.tensor(scores, requires_grad=True)
    factors = dict.fromkeys(loss.split("+"), 1.0) if isinstance(loss, str) else loss
    each = {name: torch_losses(name, x, labels) for name in factors}
    kept = next(iter(each.values()))[1]
    total = sum(f * each[name][0] for name, f in factors.items())
    if [*factors] == ["dice"]:  # a mean over rows, not over their pixels
        total, kept = total.flatten(1)[:, :1], kept.flatten(1).any(1, keepdim=True)
    expected = (total * kept).sum() / kept.sum()
    expected.backward()
    task = Segmentation(pixels(channels), loss=loss)
    forms = ("Identity", "Sigmoid" if channels == 1 else "Softmax <axis = 1>")
    for form in forms:
        found, gradient = loss_and_gradient(task.loss, scores, labels, form)
        np.testing.assert_allclose(found, expected.item(), rtol=1e-5)
        np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("channels", [1, 3, 6])
def test_iou_is_that_of_torchmetrics(channels):
    """Of random masks with pixels that are ignored, and classes that do not occur."""
    torch = pytest.importorskip("torch")
    kinds = pytest.importorskip("torchmetrics.classification")
    task, count, absent = Segmentation(pixels(channels)), max(2, channels), 0
    zeros = np.zeros((1, channels, *SIZE))
    trainer = og.Trainer(of_scores(zeros, "Identity"), task.loss, metrics=task.metrics)
    for case in range(18):
        rng = np.random.default_rng(case)
        present = rng.permutation(count)[: rng.integers(1, count + 1)]
        labels = rng.choice(present, (ROWS, *SIZE))
        labels[rng.random(labels.shape) < rng.choice([0, 0.4])] = -100
        labels[0, 0, 0] = present[0]
        scores = rng.normal(size=(ROWS, channels, *SIZE))
        scores[:, 1 : 1 + case % 2] -= 9
        ours = np.where(labels == -100, np.nan, labels)[:, None] if channels == 1 else labels
        found = trainer.evaluate(scores, ours, batch_size=3)
        predicted = scores.argmax(1) if channels > 1 else (scores[:, 0] > 0).astype(int)
        arrays = torch.tensor(predicted), torch.tensor(labels)
        macro = kinds.MulticlassJaccardIndex(count, average="macro", ignore_index=-100)(*arrays)
        np.testing.assert_allclose(found["iou"], macro, rtol=1e-6)
        each = kinds.MulticlassJaccardIndex(count, average="none", ignore_index=-100)(*arrays)
        seen = np.union1d(labels[labels != -100], predicted[labels != -100])
        missing = np.isnan(found["iou_per_class"])
        assert missing.sum() == count - len(seen)
        absent += missing.any()
        np.testing.assert_allclose(found["iou_per_class"][seen], each[seen], rtol=1e-6)
    assert channels == 1 or absent > 2


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        ("jaccard", {}, "add some of"),
        ("dice+dice", {}, "add some of"),
        ("dice", {"focal": {}}, "options of"),
        ("dice", {"dice": {"axis": 2}}, "loss_options of a Trainer"),
        ("dice", {"dice": {"gamma": 2}}, "gamma"),
        ({"dice": float("nan")}, {}, "finite"),
    ],
)
def test_losses_that_are_refused(loss, options, message):
    with pytest.raises(ValueError, match=message):
        Segmentation(pixels(3), loss=loss, loss_options=options)


def test_a_loss_of_the_user_stays():
    spec = og.LOSSES["softmax_focal"].with_options({"gamma": 1.0})
    assert Segmentation(pixels(3), loss=spec).loss is spec
    with pytest.raises(ValueError, match="of losses by name"):
        Segmentation(pixels(3), loss=spec, loss_options={"focal": {"gamma": 2}})


def test_sums_of_other_losses_are_refused():
    for factors in ({"cross_entropy": 1, "dice": 1}, {}):
        with pytest.raises(ValueError, match="add losses of"):
            og.combined_loss(factors)
    for name in ("mse", "ctc", "log"):
        with pytest.raises(ValueError, match="Unknown loss"):
            og.combined_loss({name: 1.0})


def test_options_and_weights_of_classes():
    """Of the parts of a sum, and of a single loss by the trainer."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=(ROWS, 3, *SIZE)), rng.integers(0, 3, (ROWS, *SIZE))
    weights = [0.5, 1.0, 3.0]
    options = {"cross_entropy": {"class_weight": weights}, "dice": {"smooth": 0.1}}
    task = Segmentation(
        pixels(3), loss="cross_entropy", loss_options={"cross_entropy": options["cross_entropy"]}
    )
    found, _ = loss_and_gradient(task.loss, scores, labels)
    arrays = torch.tensor(scores), torch.tensor(labels), torch.tensor(weights).double()
    expected = torch.nn.functional.cross_entropy(*arrays).item()
    np.testing.assert_allclose(found, expected)
    single = og.Trainer(
        of_scores(scores, "Identity"), Segmentation(pixels(3)).loss, class_weight=weights
    )
    np.testing.assert_allclose(single.evaluate(0 * scores, labels)["loss"], expected)
    both = Segmentation(pixels(3), loss="cross_entropy+dice", loss_options=options)
    summed, _ = loss_and_gradient(both.loss, scores, labels)
    p, t = arrays[0].softmax(1), torch.nn.functional.one_hot(arrays[1], 3).movedim(-1, 1)
    axes = (-2, -1)
    dice = 1 - (2 * (p * t).sum(axes) + 0.1) / (p.sum(axes) + t.sum(axes) + 0.1)
    shares = arrays[2][arrays[1]].sum(axes)  # of the rows, by the weights of their pixels
    expected += (dice.mean(1) * shares).sum().item() / shares.sum().item()
    np.testing.assert_allclose(summed, expected)


# -- files -----------------------------------------------------------------------------------------


def pixels(channels=3, size="6,7", dtype="float", last=False, activation="") -> onnx.ModelProto:
    """Return a model of one convolution that sees a pixel only."""
    rng = np.random.default_rng(channels)
    activation = activation or ("Sigmoid(s)" if channels == 1 else "Identity(s)")
    shape = [f"N,3,{size}", f"N,{channels},{size}"]
    body = "s = Conv(x, w, b)"
    if last:
        shape = [f"N,{size},3", f"N,{size},{channels}"]
        body = """t = Transpose <perm = [0, 3, 1, 2]> (x)  c = Conv(t, w, b)
            s = Transpose <perm = [0, 2, 3, 1]> (c)"""
    model = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["": 20]>
        f ({dtype}[{shape[0]}] x) => ({dtype}[{shape[1]}] y) {{ {body} y = {activation} }}""")
    numpy_dtype = np.dtype({"float": "f4", "double": "f8"}[dtype])
    for name, value in {"w": rng.normal(size=(channels, 3, 1, 1)), "b": np.zeros(channels)}.items():
        model.graph.initializer.append(numpy_helper.from_array(value.astype(numpy_dtype), name))
    return model


COLORS = np.array([[0, 0, 0], [255, 0, 0], [0, 255, 0]], np.uint8)


def drawn(rng, size=(12, 14), classes=3) -> tuple[np.ndarray, np.ndarray]:
    """Return a picture of rectangles in the colors of their classes, and its mask."""
    mask = np.zeros(size, np.uint8)
    for number in range(1, classes):
        top, left = rng.integers(0, size[0] - 5), rng.integers(0, size[1] - 5)
        mask[top : top + 5, left : left + 5] = number
    return COLORS[mask], mask


def folder(root: Path, count=6, mode="L", size=(12, 14), classes=3, edit=None) -> Path:
    """Write pictures and masks."""
    rng = np.random.default_rng(0)
    for part in ("images", "masks"):
        (root / part).mkdir(parents=True)
    for i in range(count):
        picture, mask = drawn(rng, size, classes)
        mask = mask if edit is None else edit(mask)
        image = Image.fromarray(mask)
        if mode == "P":
            image.putpalette(rng.integers(0, 256, 768).astype(np.uint8).tobytes())
        elif mode == "1":
            image = Image.fromarray(mask > 0)
        Image.fromarray(picture).save(root / "images" / f"{i}.png")
        image.save(root / "masks" / f"{i}.png")
    return root


def batch(reader, size=99, seed=None):
    return next(reader.batches(size, seed, 0))


@pytest.mark.parametrize("mode", ["L", "P"])
def test_a_folder(tmp_path, mode):
    def unknown(mask):
        mask[0] = 255
        return mask

    root = folder(tmp_path / "d", mode=mode, edit=unknown)
    task = Segmentation(pixels(3), root, image_size=None)
    X, y = batch(task.data)
    assert X.shape == (6, 3, 6, 7)
    assert (X.dtype, y.dtype) == (np.float32, np.int64)
    for i in range(6):
        with Image.open(root / "images" / f"{i}.png") as picture:
            resized = np.asarray(picture.resize((7, 6), Image.Resampling.BILINEAR))
        np.testing.assert_allclose(X[i], np.moveaxis(resized, -1, 0) / 255, atol=1e-6)
        with Image.open(root / "masks" / f"{i}.png") as mask:
            full = np.asarray(mask).astype(int)
        rows, columns = np.arange(6) * 2 + 1, np.arange(7) * 2 + 1
        nearest = full[np.ix_(rows, columns)]
        assert np.array_equal(y[i], np.where(nearest == 255, -100, nearest))
    assert [*task.classes] == ["0", "1", "2"]
    assert batch(task.data.subset(np.array([4])))[1].tolist() == y[4:5].tolist()


def test_one_score_gets_floats(tmp_path):
    def unknown(mask):
        mask[:6] = 255
        return mask

    root = folder(tmp_path, classes=2, edit=unknown)
    for last in (False, True):
        task = Segmentation(pixels(1, last=last), root)
        X, y = batch(task.data)
        y = y[..., 0] if last else y[:, 0]
        assert y.dtype == np.float32
        assert np.isnan(y[:, :3]).all()
        assert np.isin(y[:, 3:], (0, 1)).all()
        assert X.shape == ((6, 6, 7, 3) if last else (6, 3, 6, 7))


def test_black_and_white_masks(tmp_path):
    white = folder(tmp_path / "w", classes=2, edit=lambda mask: mask * np.uint8(255))
    bits = folder(tmp_path / "b", classes=2, mode="1")
    with pytest.raises(ValueError, match="ignore=None"):
        Segmentation(pixels(1), white)
    expected = batch(Segmentation(pixels(1), bits).data)[1]
    assert np.array_equal(batch(Segmentation(pixels(1), white, ignore=None).data)[1], expected)
    assert {*expected.ravel()} == {0, 1}
    grown = folder(tmp_path / "g", edit=lambda mask: np.where(mask == 2, 255, mask).astype("u1"))
    with pytest.raises(ValueError, match=r"0\.png' has 255 and others"):
        Segmentation(pixels(3), grown, ignore=None)


def test_training_finds_the_classes(tmp_path, caplog):
    """Names, a new last layer, a validation folder, and files of the result."""
    for part in ("train", "val"):
        folder(tmp_path / part)
        (tmp_path / part / "classes.txt").write_text("nothing\nred\ngreen\n")
    base = pixels(1)
    with caplog.at_level(logging.WARNING, "onnxgrad"):
        task = Segmentation(base, tmp_path, image_size=(6, 7), loss="cross_entropy+dice")
    assert "new last layer" in caplog.text
    assert [*task.classes] == ["nothing", "red", "green"]
    trainer = task.trainer(learning_rate=0.3)
    trainer.fit(task.data, epochs=60, validation=task.validation, batch_size=6)
    final = trainer.history[-1]
    assert final["validation_iou"] > 0.75
    assert final["validation_iou_per_class"].shape == (3,)
    trained = trainer.model
    assert [n.op_type for n in trained.graph.node] == [n.op_type for n in task.model.graph.node]
    path = tmp_path / "m.onnx"
    trainer.save(path)
    pictures = tmp_path / "val" / "images"
    again = Segmentation(path)
    assert [*again.classes] == ["nothing", "red", "green"]
    masks = task.predict(trainer, pictures)
    for other in (
        again.predict(path, pictures),
        again.predict(trained, sorted(pictures.iterdir())),
    ):
        assert all(np.array_equal(*both) for both in zip(masks, other, strict=True))
    for mask, file in zip(masks, sorted(pictures.iterdir()), strict=True):
        with Image.open(file) as picture:
            colors = np.asarray(picture)
            small = np.asarray(picture.resize((7, 6), Image.Resampling.BILINEAR), np.float32) / 255
        assert (mask.dtype, mask.shape) == (np.uint8, (12, 14))
        assert (COLORS[mask] == colors).all(-1).mean() > 0.8
        scores = run(trained, x=np.moveaxis(small, -1, 0)[None])[0][0]
        planes = [Image.fromarray(s).resize((14, 12), Image.Resampling.BILINEAR) for s in scores]
        assert np.array_equal(mask, np.argmax([np.asarray(p) for p in planes], axis=0))
    check_written(task, pictures, masks, tmp_path / "out")


def check_written(task, pictures, masks, out):
    """What is written can be read again as masks, and overlays keep what is class 0."""
    files = task.write(pictures, masks, out)
    assert len(files) == 12
    for i, mask in enumerate(masks):
        with Image.open(out / "masks" / f"{i}.png") as written:
            assert written.mode == "P"
            assert np.array_equal(np.asarray(written), mask)
            assert written.getpalette()[:9] == [0, 0, 0, 128, 0, 0, 0, 128, 0]  # of Pascal VOC
        with (
            Image.open(out / "overlays" / f"{i}.png") as over,
            Image.open(pictures / f"{i}.png") as picture,
        ):
            same = (np.asarray(over) == np.asarray(picture)).all(-1)
        assert same[mask == 0].all()
        assert not same[mask > 0].any()
    with pytest.raises(ValueError, match="same name"):
        task.write([pictures / "1.png"] * 2, masks[:2], out)


def test_scores_of_a_quarter(tmp_path):
    """Masks are brought to the size of the output, and predictions to that of the picture."""
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 20]>
        f (float[N,3,H,W] x) => (float[N,3,h,w] y, float[N,3,H,W] same)
        <float[3,1,1,1] k = {1.0, 1.0, 1.0}> {
            p = AveragePool <kernel_shape = [4, 4], strides = [4, 4]> (x)
            y = Conv <group = 3> (p, k)  same = Identity(x) }""")
    root = folder(tmp_path, size=(48, 64))
    with pytest.raises(ValueError, match="name that of the scores"):
        Segmentation(model, root, image_size=(24, 32))
    with pytest.raises(ValueError, match="image_size"):
        Segmentation(model, root, output="y")
    task = Segmentation(model, root, image_size=(24, 32), output="y")
    X, y = batch(task.data)
    assert X.shape == (6, 3, 24, 32)
    assert y.shape == (6, 6, 8)
    with Image.open(root / "masks" / "3.png") as mask:
        assert np.array_equal(y[3], np.asarray(mask)[4::8, 4::8])
    trainer = task.trainer().fit(task.data, epochs=1)
    assert {"y_iou", "y_iou_per_class", "loss"} <= trainer.evaluate(task.data).keys()
    assert [m.shape for m in task.predict(model, root / "images")] == [(48, 64)] * 6


@pytest.mark.parametrize("loss", ["cross_entropy", "cross_entropy+dice"])
def test_channels_last(tmp_path, loss):
    root = folder(tmp_path)
    results = []
    for last in (False, True):
        task = Segmentation(pixels(3, last=last), root, loss=loss)
        trainer = task.trainer(learning_rate=0.1)
        trainer.fit(task.data, epochs=3)
        masks = task.predict(trainer, root / "images")
        results.append((trainer.evaluate(task.data), masks))
    (first, masks), (second, others) = results
    np.testing.assert_allclose(first["loss"], second["loss"], rtol=1e-5)
    assert np.array_equal(masks, others)


def test_augmentation_moves_masks_as_pictures(tmp_path):
    """A pixel keeps its class, whatever a flip and a crop do; the seed decides, and the row."""
    root = folder(tmp_path, size=(24, 28))
    seen = []

    def shifted(picture, mask, rng):
        by = int(rng.integers(5))
        box = (by, 0, picture.width + by, picture.height)
        seen.append(by)
        return picture.crop(box), mask.crop(box)

    augment = [og.random_flip(), og.random_crop((12, 14)), shifted]
    task = Segmentation(pixels(3, size="12,14"), root, augment=augment)
    X, y = batch(task.data, seed=3)
    assert seen
    colors = np.moveaxis(X, 1, -1)
    assert np.array_equal(colors * 255, COLORS[y])
    for seed, same in ((3, True), (4, False)):
        again, _ = batch(task.data, seed=seed)
        assert np.array_equal(X, again) == same
    single = np.stack([task.data.take(np.array([i]), 3)[0][0] for i in range(6)])
    order = np.random.default_rng(3).permutation(6)
    assert np.array_equal(single[order], X)
    plain = Segmentation(pixels(3, size="12,14"), root)
    assert np.array_equal(batch(task.data)[0], batch(plain.data)[0])  # not in evaluations
    assert task.data.describe() != plain.data.describe()

    def lost(picture, mask, rng):
        return picture, mask.convert("L")

    with pytest.raises(ValueError, match="lost"):
        batch(Segmentation(pixels(3), root, augment=[lost]).data, seed=1)


def coco(tmp_path: Path, rle=False) -> Path:
    """Write two pictures with squares, a file of COCO, and an RLE of the last one."""
    annotations = [
        {"id": 1, "image_id": 5, "category_id": 7, "segmentation": [[2, 2, 9, 2, 9, 9, 2, 9]]},
        {"id": 2, "image_id": 5, "category_id": 3, "segmentation": [[4, 4, 6, 4, 6, 6, 4, 6]]},
    ]
    if rle:
        counts = [12 * 3, 24, 12 * 9]  # by columns: the fourth and the fifth of 14
        rle = {"size": [12, 14], "counts": counts}
        annotations.append({"id": 3, "image_id": 6, "category_id": 3, "segmentation": rle})
    images = [{"id": n, "file_name": f"{n}.png", "width": 14, "height": 12} for n in (5, 6)]
    for image in images:
        Image.new("RGB", (14, 12)).save(tmp_path / image["file_name"])
    categories = [{"id": 7, "name": "ship"}, {"id": 3, "name": "car"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    return path


def test_coco_polygons(tmp_path):
    task = Segmentation(pixels(3, size="12,14"), coco(tmp_path))
    assert [*task.classes] == ["background", "car", "ship"]
    _, y = batch(task.data)
    expected = np.zeros((2, 12, 14), int)
    expected[0, 2:10, 2:10] = 2
    expected[0, 4:7, 4:7] = 1
    assert np.array_equal(y, expected)


def test_coco_rle(tmp_path):
    packed = pytest.importorskip("pycocotools.mask")
    path = coco(tmp_path, rle=True)
    expected = np.zeros((12, 14), int)
    expected[:, 3:5] = 1
    assert np.array_equal(batch(Segmentation(pixels(3, size="12,14"), path).data)[1][1], expected)
    content = json.loads(path.read_text())
    pixels_of = packed.encode(np.asfortranarray(expected.astype(np.uint8)))
    rle = {"size": pixels_of["size"], "counts": pixels_of["counts"].decode()}
    content["annotations"][2]["segmentation"] = rle
    path.write_text(json.dumps(content))
    assert np.array_equal(batch(Segmentation(pixels(3, size="12,14"), path).data)[1][1], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["annotations"][0].update(category_id=9), "annotation 1 .*category 9"),
        (lambda c: c["annotations"][1].update(segmentation=[]), "annotation 2 has no polygons"),
        (lambda c: c["annotations"][1].update(segmentation=[[1, 2, 3]]), "annotation 2"),
        (lambda c: c["images"][0].update(width=99), r"5\.png.*\(14, 12\)"),
        (lambda c: c["images"][0].update(file_name="no.png"), r"no\.png"),
    ],
)
def test_coco_files_that_are_refused(tmp_path, change, message):
    path = coco(tmp_path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        Segmentation(pixels(3, size="12,14"), path)


def spoil_mask(root, image):
    image.save(root / "masks" / "2.png")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: spoil_mask(r, Image.new("RGB", (14, 12))), r"2\.png' has the mode 'RGB'"),
        (lambda r: spoil_mask(r, Image.new("L", (14, 13))), r"2\.png'.* size \(14, 13\)"),
        (lambda r: spoil_mask(r, Image.new("L", (14, 12), 9)), r"2\.png' has the value 9"),
        (lambda r: (r / "masks" / "2.png").unlink(), r"\['2'\] have no picture or no mask"),
        (lambda r: (r / "masks").rename(r / "labels"), "no folder 'masks'"),
        (lambda r: (r / "images" / "2.png").write_bytes(b"x"), r"image '.*2\.png'"),
        (lambda r: (r / "masks" / "2.png").write_bytes(b"x"), r"mask '.*2\.png'"),
        (lambda r: (r / "classes.txt").write_text("a\nb"), "classes=3, but those of"),
    ],
)
def test_folders_that_are_refused(tmp_path, spoil, message):
    root = folder(tmp_path)
    spoil(root)
    with pytest.raises(ValueError, match=message):
        Segmentation(pixels(3), root, classes=3)


def test_other_refusals(tmp_path):
    root = folder(tmp_path / "d")
    with pytest.raises(ValueError, match="not 4: give it data"):
        Segmentation(pixels(3), classes=["a", "b", "c", "d"])
    task = Segmentation(pixels(3), root, classes=["a", "b", "c"])
    other = folder(tmp_path / "o")
    (other / "classes.txt").write_text("a\nc\nb")
    with pytest.raises(ValueError, match="but those of"):
        task.read(other)
    with pytest.raises(ValueError, match="no image"):
        task.predict(task.model, [])
    with pytest.raises(ValueError, match="more than 8 bits"):
        task.predict(task.model, [np.zeros((6, 7), np.int32)])
    three = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 20]>
        f (float[N,3,6,7] x) => (float[N,k] y) { y = Flatten(x) }""")
    with pytest.raises(ValueError, match="needs 4 axes"):
        Segmentation(three)
    with pytest.raises(ValueError, match="layout"):
        Segmentation(pixels(3, size="6,3"))
    assert Segmentation(pixels(3, size="6,3"), layout="NCHW").predict(
        pixels(3, size="6,3"), np.zeros((1, 9, 9, 3), np.uint8)
    )[0].shape == (9, 9)


def test_arrays_and_normalization():
    """A picture that is an array, of another size; values as the model was trained on."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (2, 6, 7, 3), dtype=np.uint8)
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    task = Segmentation(pixels(1), normalize=og.normalize(mean, std))
    masks = task.predict(task.model, pictures)
    x = (pictures / 255 - mean) / std
    scores = run(task.model, x=np.moveaxis(x, -1, 1).astype(np.float32))[0]
    assert np.array_equal(masks, scores[:, 0] > 0.5)
    assert 0 < np.mean(masks) < 1
    bigger = pixels(1, size="12,14")
    with pytest.raises(ValueError, match="do not run"):
        Segmentation(bigger_only(), image_size=(5, 5))
    assert Segmentation(bigger).predict(bigger, pictures)[0].shape == (6, 7)


def bigger_only() -> onnx.ModelProto:
    """Return a model of pictures whose sides are multiples of four."""
    return onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 20]>
        f (float[N,3,H,W] x) => (float[N,3,H,W] y)
        <float[4] up = {1.0, 1.0, 4.0, 4.0}> {
            p = AveragePool <kernel_shape = [4, 4], strides = [4, 4]> (x)
            r = Resize(p, , up)  y = Add(x, r) }""")


def test_checkpoints_hold_metrics_of_each_class(tmp_path):
    """What resumes is what was not interrupted; a class that does not occur stays NaN."""
    root = folder(tmp_path / "d", count=8)

    def fit(name, epochs):
        task = Segmentation(
            pixels(4), root, classes=4, loss="cross_entropy+dice", augment=[og.random_flip()]
        )
        run_folder = tmp_path / name
        trainer = task.trainer(callbacks=[og.Checkpoint(run_folder)], seed=1, learning_rate=0.1)
        options = {"validation": 0.25, "batch_size": 2, "resume": run_folder}
        return trainer.fit(task.data, epochs=epochs, **options)

    whole = fit("whole", 3)
    fit("part", 1)
    part = fit("part", 3)
    assert [entry["epoch"] for entry in part.history] == [1, 2, 3]
    for one, two in zip(whole.history, part.history, strict=True):
        np.testing.assert_array_equal(
            one["validation_iou_per_class"], two["validation_iou_per_class"]
        )
    assert part.history[0]["validation_iou_per_class"].shape == (4,)
    for name, weight in whole.state.weights.items():
        np.testing.assert_array_equal(weight, part.state.weights[name])
