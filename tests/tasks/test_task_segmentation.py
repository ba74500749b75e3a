"""Segmentation: losses against PyTorch, IoU against torchmetrics, and files in and out."""

from __future__ import annotations

import logging

import numpy as np
import onnx
import pytest

import onnxgrad as og
from tests.support.errors import naming
from tests.support.models import operator_names, parse_model
from tests.support.running import in_sweep, run

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("PIL.ImageDraw")
from tests.support.mask_folders import COLORS, first_batch, pixel_model, write_masks  # noqa: E402

Segmentation = og.tasks.segmentation.Segmentation
ROWS, CLASSES, SIZE = 4, 5, (6, 7)

# -- losses and metrics ----------------------------------------------------------------------------


def scores_model(scores: np.ndarray, activation: str) -> onnx.ModelProto:
    """Return a model whose weights are the scores themselves."""
    shape = ",".join(["N", *map(str, scores.shape[1:])])
    text = f"""f (double[{shape}] x) => (double[{shape}] y) {{
        s = Add(x, w)  y = {activation}(s) }}"""
    return parse_model(text, opset=20, w=scores)


def loss_and_gradient(loss, scores, labels, activation="Identity"):
    """Return what a trainer has: its loss, and how far one step of rate 1 moves the scores."""
    trainer = og.Trainer(scores_model(scores, activation), loss, optimizer="sgd", learning_rate=1.0)
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


@pytest.mark.parametrize("case", [1, in_sweep(0)])  # with ignored pixels, and without
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
    task = Segmentation(pixel_model(channels), loss=loss)
    forms = ("Identity", "Sigmoid" if channels == 1 else "Softmax <axis = 1>")
    for form in forms:
        found, gradient = loss_and_gradient(task.loss, scores, labels, form)
        np.testing.assert_allclose(found, expected.item(), rtol=1e-5)
        np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("channels", [1, 3, in_sweep(6)])
def test_iou_is_that_of_torchmetrics(channels):
    """Of random masks with pixels that are ignored, and classes that do not occur."""
    torch = pytest.importorskip("torch")
    kinds = pytest.importorskip("torchmetrics.classification")
    task, count, absent = Segmentation(pixel_model(channels)), max(2, channels), 0
    zeros = np.zeros((1, channels, *SIZE))
    trainer = og.Trainer(scores_model(zeros, "Identity"), task.loss, metrics=task.metrics)
    for case in range(10):
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
    assert channels == 1 or absent > 0


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        ("jaccard", {}, "jaccard"),
        ("dice+dice", {}, r"dice\+dice"),
        ("dice", {"focal": {}}, "options"),
        ("dice", {"dice": {"axis": 2}}, "loss_options"),
        ("dice", {"dice": {"gamma": 2}}, "gamma"),
        ({"dice": float("nan")}, {}, "finite"),
    ],
)
def test_losses_that_are_refused(loss, options, message):
    with pytest.raises(ValueError, match=message):
        Segmentation(pixel_model(3), loss=loss, loss_options=options)


def test_a_loss_of_the_user_stays():
    spec = og.losses.LOSSES["softmax_focal"].with_options({"gamma": 1.0})
    assert Segmentation(pixel_model(3), loss=spec).loss is spec
    with pytest.raises(ValueError, match=naming("loss_options=", "by name")):
        Segmentation(pixel_model(3), loss=spec, loss_options={"focal": {"gamma": 2}})


def test_options_and_weights_of_classes():
    """Of the parts of a sum, and of a single loss by the trainer."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=(ROWS, 3, *SIZE)), rng.integers(0, 3, (ROWS, *SIZE))
    weights = [0.5, 1.0, 3.0]
    options = {"cross_entropy": {"class_weight": weights}, "dice": {"smooth": 0.1}}
    task = Segmentation(
        pixel_model(3),
        loss="cross_entropy",
        loss_options={"cross_entropy": options["cross_entropy"]},
    )
    found, _ = loss_and_gradient(task.loss, scores, labels)
    arrays = torch.tensor(scores), torch.tensor(labels), torch.tensor(weights).double()
    expected = torch.nn.functional.cross_entropy(*arrays).item()
    np.testing.assert_allclose(found, expected)
    single = og.Trainer(
        scores_model(scores, "Identity"), Segmentation(pixel_model(3)).loss, class_weight=weights
    )
    np.testing.assert_allclose(single.evaluate(0 * scores, labels)["loss"], expected)
    both = Segmentation(pixel_model(3), loss="cross_entropy+dice", loss_options=options)
    summed, _ = loss_and_gradient(both.loss, scores, labels)
    p, t = arrays[0].softmax(1), torch.nn.functional.one_hot(arrays[1], 3).movedim(-1, 1)
    axes = (-2, -1)
    dice = 1 - (2 * (p * t).sum(axes) + 0.1) / (p.sum(axes) + t.sum(axes) + 0.1)
    shares = arrays[2][arrays[1]].sum(axes)  # of the rows, by the weights of their pixels
    expected += (dice.mean(1) * shares).sum().item() / shares.sum().item()
    np.testing.assert_allclose(summed, expected)


# -- training --------------------------------------------------------------------------------------


def test_training_finds_the_classes(tmp_path, caplog):
    """Names, a new last layer, a validation folder, and files of the result."""
    for part in ("train", "val"):
        write_masks(tmp_path / part)
        (tmp_path / part / "classes.txt").write_text("nothing\nred\ngreen\n")
    base = pixel_model(1)
    with caplog.at_level(logging.WARNING, "onnxgrad"):
        task = Segmentation(base, tmp_path, image_size=(6, 7), loss="cross_entropy+dice")
    assert "last layer" in caplog.text
    assert [*task.classes] == ["nothing", "red", "green"]
    trainer = task.trainer(learning_rate=0.3)
    trainer.fit(task.data, epochs=40, validation=task.validation, batch_size=6)
    final = trainer.history[-1]
    assert final["validation_iou"] > 0.75
    assert final["validation_iou_per_class"].shape == (3,)
    trained = trainer.model
    assert operator_names(trained) == operator_names(task.model)
    path = tmp_path / "m.onnx"
    trainer.save(path)
    pictures = tmp_path / "val" / "images"
    again = Segmentation(path)
    assert [*again.classes] == ["nothing", "red", "green"]
    masks = task.predict(trainer, pictures)
    others = [(path, pictures), (trained, sorted(pictures.iterdir()))]
    for other in (again.predict(*given) for given in others):
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
    with pytest.raises(ValueError, match=naming("same name", "rename")):
        task.write([pictures / "1.png"] * 2, masks[:2], out)


def test_scores_of_a_quarter(tmp_path):
    """Masks are brought to the size of the output, and predictions to that of the picture."""
    text = """f (float[N,3,H,W] x) => (float[N,3,h,w] y, float[N,3,H,W] same)
        <float[3,1,1,1] k = {1.0, 1.0, 1.0}> {
            p = AveragePool <kernel_shape = [4, 4], strides = [4, 4]> (x)
            y = Conv <group = 3> (p, k)  same = Identity(x) }"""
    model = parse_model(text, opset=20)
    root = write_masks(tmp_path, size=(48, 64))
    with pytest.raises(ValueError, match=naming("output=", "scores", "'y'")):
        Segmentation(model, root, image_size=(24, 32))
    with pytest.raises(ValueError, match=naming("(height, width)", "image_size")):
        Segmentation(model, root, output="y")
    task = Segmentation(model, root, image_size=(24, 32), output="y")
    X, y = first_batch(task.data)
    assert X.shape == (6, 3, 24, 32)
    assert y.shape == (6, 6, 8)
    with Image.open(root / "masks" / "3.png") as mask:
        assert np.array_equal(y[3], np.asarray(mask)[4::8, 4::8])
    trainer = task.trainer().fit(task.data, epochs=1)
    assert {"y_iou", "y_iou_per_class", "loss"} <= trainer.evaluate(task.data).keys()
    assert [m.shape for m in task.predict(model, root / "images")] == [(48, 64)] * 6


@pytest.mark.parametrize("loss", ["cross_entropy", "cross_entropy+dice"])
def test_channels_last(tmp_path, loss):
    root = write_masks(tmp_path)
    results = []
    for last in (False, True):
        task = Segmentation(pixel_model(3, last=last), root, loss=loss)
        trainer = task.trainer(learning_rate=0.1)
        trainer.fit(task.data, epochs=3)
        masks = task.predict(trainer, root / "images")
        results.append((trainer.evaluate(task.data), masks))
    (first, masks), (second, others) = results
    np.testing.assert_allclose(first["loss"], second["loss"], rtol=1e-5)
    assert np.array_equal(masks, others)


def test_other_refusals(tmp_path):
    root = write_masks(tmp_path / "d")
    with pytest.raises(ValueError, match=naming("3 classes, not 4", "data=")):
        Segmentation(pixel_model(3), classes=["a", "b", "c", "d"])
    task = Segmentation(pixel_model(3), root, classes=["a", "b", "c"])
    other = write_masks(tmp_path / "o")
    (other / "classes.txt").write_text("a\nc\nb")
    with pytest.raises(ValueError, match=naming("classes", "'c'", "'b'")):
        task.read(other)
    with pytest.raises(ValueError, match="no image"):
        task.predict(task.model, [])
    with pytest.raises(ValueError, match="8 bits"):
        task.predict(task.model, [np.zeros((6, 7), np.int32)])
    three = parse_model("f (float[N,3,6,7] x) => (float[N,k] y) { y = Flatten(x) }")
    with pytest.raises(ValueError, match=naming("'y'", "4 axes", "output=")):
        Segmentation(three)
    with pytest.raises(ValueError, match=naming("input 'x'", "layout='NCHW'")):
        Segmentation(pixel_model(3, size="6,3"))
    assert Segmentation(pixel_model(3, size="6,3"), layout="NCHW").predict(
        pixel_model(3, size="6,3"), np.zeros((1, 9, 9, 3), np.uint8)
    )[0].shape == (9, 9)


def test_arrays_and_normalization():
    """A picture that is an array, of another size; values as the model was trained on."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (2, 6, 7, 3), dtype=np.uint8)
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    task = Segmentation(pixel_model(1), normalize=og.data.normalize(mean, std))
    masks = task.predict(task.model, pictures)
    x = (pictures / 255 - mean) / std
    scores = run(task.model, x=np.moveaxis(x, -1, 1).astype(np.float32))[0]
    assert np.array_equal(masks, scores[:, 0] > 0.5)
    assert 0 < np.mean(masks) < 1
    bigger = pixel_model(1, size="12,14")
    with pytest.raises(ValueError, match=naming("5", "run")):
        Segmentation(multiples_of_four(), image_size=(5, 5))
    assert Segmentation(bigger).predict(bigger, pictures)[0].shape == (6, 7)


def multiples_of_four() -> onnx.ModelProto:
    """Return a model of pictures whose sides are multiples of four."""
    text = """f (float[N,3,H,W] x) => (float[N,3,H,W] y)
        <float[4] up = {1.0, 1.0, 4.0, 4.0}> {
            p = AveragePool <kernel_shape = [4, 4], strides = [4, 4]> (x)
            r = Resize(p, , up)  y = Add(x, r) }"""
    return parse_model(text, opset=20)


def test_normalization_by_name_is_remembered(tmp_path):
    root = write_masks(tmp_path / "data")
    task = Segmentation(pixel_model(3), root, normalize="imagenet", augment="flip,colors")
    imagenet = og.data.normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    same = Segmentation(pixel_model(3), root, normalize=imagenet)
    np.testing.assert_array_equal(first_batch(task.data)[0], first_batch(same.data)[0])
    trainer = task.trainer(seed=0).fit(task.data, epochs=2)
    assert trainer.state.step == 2
    assert trainer._job.clip_norm == 10
    trainer.save(tmp_path / "m.onnx")
    masks, others = (
        t.predict(tmp_path / "m.onnx", root / "images")
        for t in (task, Segmentation(tmp_path / "m.onnx"))
    )
    for mask, other in zip(masks, others, strict=True):
        np.testing.assert_array_equal(mask, other)


def test_checkpoints_hold_metrics_of_each_class(tmp_path):
    """What resumes is what was not interrupted; a class that does not occur stays NaN."""
    root = write_masks(tmp_path / "d", count=8)

    def fit(name, epochs):
        task = Segmentation(
            pixel_model(4),
            root,
            classes=4,
            loss="cross_entropy+dice",
            augment=[og.data.random_flip()],
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
