"""Folders of images in the shell: classes, scales, parts, and predictions of single files."""

import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.support.commands import (
    as_json,
    assert_names,
    csv_rows,
    refusal,
    run_command,
    save_model,
    succeed,
)
from tests.support.running import in_sweep

Image = pytest.importorskip("PIL.Image")
LINE = ("--loss", "cross_entropy", "--validation", 0, "--epochs", 1, "--no-curves", "--overwrite")
MEAN = "p = GlobalAveragePool(x) f = Flatten(p) z = MatMul(f, W)"


@pytest.fixture(autouse=True)
def models_of_images(here):
    """Models of 2, 3 and 12 classes, as `2.onnx` and so on."""
    for k in (2, 3, 12):
        W = np.random.default_rng(k).normal(size=(3, k))
        save_model(f"{k}.onnx", f"g (float[N,3,8,8] x) => (float[N,{k}] z) {{ {MEAN} }}", W=W)


def write_photos(folder, names, count=3):
    """Write images of random colors into a folder of each name; return all by path."""
    rng, made = np.random.default_rng(len(names)), {}
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            pixels = np.broadcast_to(rng.integers(0, 256, 3), (8, 8, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
            made[str(folder / name / f"{i}.png")] = pixels
    return made


def model_scores(model, pixels):
    """Return what onnxruntime computes for arrays (8, 8, 3)."""
    x = np.float32([np.moveaxis(p, -1, 0) for p in pixels])
    return ort.InferenceSession(model).run(None, {"x": x})[0]


def mean_cross_entropy(z, labels):
    shares = np.logaddexp.reduce(z.astype(np.float64), axis=1)
    return (shares - z[np.arange(len(z)), labels]).mean()


def test_names_that_are_whole_numbers_are_those_classes(here):
    """A model that is right on every image has accuracy 1, though 10 sorts before 2."""
    made = write_photos(here / "n", [str(k) for k in range(12)], 1)
    best = model_scores("12.onnx", [p / 255 for p in made.values()]).argmax(1)
    for part in range(12):  # into the folder of the class that the model says
        (here / "right" / str(part)).mkdir(parents=True)
    for i, (path, k) in enumerate(zip(made, best, strict=True)):
        (here / path).rename(here / "right" / str(k) / f"{i}.png")
    result = run_command("eval", "12.onnx", "right", "--loss", "cross_entropy", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["metrics"]["accuracy"] == 1
    assert "images: 0 (" in result.stderr
    assert "no image in" in result.stderr


def test_the_mapping_is_stored_and_a_class_may_be_missing(here):
    made = write_photos(here / "train", ["dog", "cat"])
    line = ("train", "2.onnx", "train", *LINE, "-o", "out.onnx")
    assert "0: cat (3), 1: dog (3)" in succeed(*line).stderr
    entries = {e.key: json.loads(e.value) for e in onnx.load("out.onnx").metadata_props}
    assert entries["onnxgrad.classes"] == ["cat", "dog"]
    pixels = write_photos(here / "test", ["dog"])
    z = model_scores("out.onnx", [p / 255 for p in pixels.values()])
    found = as_json("eval", "out.onnx", "test")
    assert found["metrics"]["accuracy"] == pytest.approx((z.argmax(1) == 1).mean())
    assert found["loss"] == pytest.approx(mean_cross_entropy(z, [1, 1, 1]), rel=1e-5)
    assert len(made) == 6


@pytest.mark.parametrize(
    ("model", "names", "more", "message"),
    [
        ("3", "cat dog", (), "2 classes (cat, dog) ... has 3 ... --head cat,dog"),
        ("2", "cat dog emu", (), None),
        ("2", "cat dog emu", ("--head", 2), "--head cat,dog,emu"),
        ("12", "cat dog", ("--head", "cat,dog,emu,fox"), None),
        ("3", "1 2 3", (), "--classes 1,2,3 "),
        ("3", "1 2 3", ("--classes", "1, 2 ,3"), None),
        ("2", "3 5 8", ("--head", "3,5,8"), None),
        ("2", "3 5 8", ("--head", 3), "--classes 3,5,8"),
        ("2", "0 1 2", (), "3 classes ... has 2 ... --head 3"),
        ("3", "cat dog", ("--classes", "dog,ant,emu"), "'cat' ... 'p' ... classes dog"),
        ("2", "cat dog", ("--classes", "cat,dog,emu"), "3 classes (cat, dog, emu) ... output"),
    ],
)  # fmt: skip
def test_folders_and_outputs_that_differ(here, model, names, more, message):
    write_photos(here / "p", names.split())
    line = ("train", f"{model}.onnx", "p", *LINE, *more)
    if message is None:
        succeed(*line)
        return
    assert_names(refusal(*line), message)
    assert not (here / "trained.onnx").exists()


IMAGENET_MEAN, IMAGENET_SPREAD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
SCALINGS = {  # options, what they do with pixels, and what is told
    "shares": ((), lambda p: p / 255, "from 0 to 1\n"),
    "pixels": (("--scale", 255), lambda p: p, "from 0 to 255\n"),
    "imagenet": (
        ("--normalize", "imagenet"),
        lambda p: (p / 255 - IMAGENET_MEAN) / IMAGENET_SPREAD,
        "minus 0.485, 0.456",
    ),
    "imagenet of pixels": (
        ("--normalize", "imagenet", "--scale", 255),
        lambda p: (p / 255 - IMAGENET_MEAN) / IMAGENET_SPREAD,
        "minus 123.675",
    ),
    "numbers": (
        ("--normalize", "100/50", "--scale", 255),
        lambda p: (p - 100.0) / 50,
        "minus 100,",
    ),
}


@pytest.mark.parametrize(
    "scaling", ["shares", "imagenet of pixels", *map(in_sweep, ("pixels", "imagenet", "numbers"))]
)
def test_how_values_are_scaled_is_told_and_kept(here, scaling):
    options, change, text = SCALINGS[scaling]
    made = write_photos(here / "p", ["a", "b"])
    assert text in succeed("train", "2.onnx", "p", *LINE, *options).stderr
    z = model_scores("trained.onnx", [change(p) for p in made.values()])
    labels = np.repeat([0, 1], 3)
    wanted = mean_cross_entropy(z, labels)
    told = run_command("eval", "trained.onnx", "p", "--json")
    assert json.loads(told.stdout)["loss"] == pytest.approx(wanted, rel=1e-4)
    assert text in told.stderr
    found = csv_rows(succeed("predict", "trained.onnx", "p").stdout)
    np.testing.assert_allclose([[float(r["z_0"]), float(r["z_1"])] for r in found], z, rtol=1e-3)
    plain = as_json("eval", "trained.onnx", "p", "--scale", 1)["loss"]  # what options say wins
    z = model_scores("trained.onnx", [p / 255 for p in made.values()])
    wanted = mean_cross_entropy(z, labels)
    assert plain == pytest.approx(wanted, rel=1e-4)


def test_normalizations_that_are_none(here):
    write_photos(here / "p", ["a", "b"])
    for text in ("imagenett", "1", "1,2/1", "1/0", "nan/1", "1/2/3", "a/b"):
        assert "--normalize" in refusal("train", "2.onnx", "p", *LINE, "--normalize", text)
    assert "--scale 0.0" in refusal("train", "2.onnx", "p", *LINE, "--scale", 0)


def test_a_folder_of_data_sets(here):
    for part in ("train", "val", "test"):
        write_photos(here / "d" / part, ["a", "b"], {"train": 4, "val": 2, "test": 1}[part])
    line = ("train", "2.onnx", "d", "--loss", "cross_entropy", "--epochs", 1, "--no-curves")
    made = run_command(*line, "--json")
    result = json.loads(made.stdout)
    assert (result["rows"], result["validation_rows"]) == (8, 4)
    assert_names(
        made.stderr, "train images: d/train ... validation images: d/val ... test images: d/test"
    )
    assert as_json("eval", "trained.onnx", "d")["rows"] == 2
    assert as_json("eval", "trained.onnx", "d/val")["rows"] == 4
    (here / "d" / "test").rename(here / "elsewhere")
    assert_names(refusal("eval", "trained.onnx", "d"), "test/ ... 'd/train', 'd/val'")


def test_predictions_of_files(here):
    write_photos(here / "p", ["cat", "dog"])
    succeed("train", "2.onnx", "p", *LINE)
    made = write_photos(here / "flat", ["."], 4)
    z = model_scores("trained.onnx", [p / 255 for p in made.values()])
    share = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    found = csv_rows(succeed("predict", "trained.onnx", "flat").stdout)
    assert [*found[0]] == ["file", "label", "probability", "z_0", "z_1"]
    assert [r["file"] for r in found] == [f"flat/{i}.png" for i in range(4)]
    assert [r["label"] for r in found] == [["cat", "dog"][k] for k in z.argmax(1)]
    np.testing.assert_allclose([float(r["probability"]) for r in found], share.max(1), rtol=1e-4)
    [one] = csv_rows(succeed("predict", "trained.onnx", "flat/2.png").stdout)
    assert one == found[2]


@pytest.mark.parametrize(
    ("end", "probability"),
    [
        ("s = Softmax(z)", lambda z: np.exp(z) / np.exp(z).sum(1, keepdims=True)),
        ("i = Constant<value_ints=[0]>() t = Gather<axis=1>(z, i) s = Sigmoid(t)", None),
        ("i = Constant<value_ints=[0]>() s = Gather<axis=1>(z, i)", None),
    ],
)
def test_probabilities_are_those_of_the_graph(here, end, probability):
    """A softmax or a sigmoid inside is not applied again."""
    width = 2 if probability else 1
    text = f"g (float[N,3,8,8] x) => (float[N,{width}] s) {{ {MEAN} {end} }}"
    W = np.random.default_rng(0).normal(size=(3, 2))
    save_model("own.onnx", text, W=W)
    model = onnx.load("own.onnx")
    model.metadata_props.add(key="onnxgrad.classes", value='["cat", "dog"]')
    onnx.save(model, "own.onnx")
    pixels = write_photos(here / "flat", ["."], 5)
    z = np.float64([p.mean((0, 1)) / 255 for p in pixels.values()]) @ W.astype(np.float32)
    if probability:
        shares = probability(z)
    else:
        second = 1 / (1 + np.exp(-z[:, :1]))
        second = second[:, 0]
        shares = np.stack([1 - second, second], 1)
    found = csv_rows(succeed("predict", "own.onnx", "flat").stdout)
    assert [r["label"] for r in found] == [["cat", "dog"][k] for k in shares.argmax(1)]
    np.testing.assert_allclose([float(r["probability"]) for r in found], shares.max(1), rtol=1e-4)


@pytest.mark.parametrize("loss", ["binary_cross_entropy", "mse", "hinge"])
def test_scores_that_do_not_exclude_each_other_have_no_label(here, loss):
    """Softmax of independent labels is no probability."""
    model = onnx.load("2.onnx")
    model.metadata_props.add(key="onnxgrad.classes", value='["cat", "dog"]')
    onnx.save(model, "own.onnx")
    write_photos(here / "flat", ["."], 3)
    assert "label" in csv_rows(succeed("predict", "own.onnx", "flat").stdout)[0]
    note = json.dumps([{"loss": {"mse": "l2"}.get(loss, loss)}])
    model.metadata_props.add(key="onnxgrad.training_loss", value=note)
    onnx.save(model, "own.onnx")
    found = csv_rows(succeed("predict", "own.onnx", "flat").stdout)
    assert [*found[0]] == ["file", "z_0", "z_1"]


QUANTIZED = (
    "o = Constant<value = uint8 {0}>() q = QuantizeLinear(x, c, o) y = DequantizeLinear(q, c, o)"
)
NORMALIZED = "v = Conv(x, k) y = BatchNormalization(v, a, b, b, s)"
UNITS = {"k": np.ones((3, 3, 1, 1)), "a": np.ones(3), "b": np.zeros(3)}
PIXELS, SHARES, IMAGENET = ["--scale", 255], ["--scale", 1], ["--normalize", "imagenet"]
FRONTS = {  # how a file says on which values its model was trained, and options that give these
    "Div": ("y = Div(x, c)", {"c": [255.0]}, PIXELS),
    "Mul": ("y = Mul(c, x)", {"c": [1 / 255]}, PIXELS),
    "Sub": ("y = Sub(x, c)", {"c": [[[123.7]], [[116.8]], [[103.9]]]}, PIXELS),
    "Sub of channels in another order": (
        "o = Constant<value_ints=[2, 1, 0]>() r = Gather<axis=1>(x, o) y = Sub(r, c)",
        {"c": [[[103.9]], [[116.8]], [[123.7]]]},
        PIXELS,
    ),
    "Div behind an Add": ("a = Add(x, o) y = Div(a, c)", {"o": [1.0], "c": [255.0]}, PIXELS),
    "integers": (QUANTIZED, {"c": 1.0}, PIXELS),
    "signed integers": (QUANTIZED.replace("uint8", "int8"), {"c": 1 / 128}, SHARES),
    "BatchNormalization": (NORMALIZED, {**UNITS, "s": np.full(3, 3 * 70.0**2)}, PIXELS),
    "normalized": (NORMALIZED, {**UNITS, "s": np.full(3, 3 * 1.2**2)}, IMAGENET),
}


@pytest.mark.parametrize("front", FRONTS)
def test_values_of_another_range_are_told(here, front):
    nodes, constants, right = FRONTS[front]
    text = f"g (float[1,3,8,8] x) => (float[1,2] z) {{ {nodes} {MEAN.replace('(x)', '(y)')} }}"
    save_model("own.onnx", text, W=np.eye(3, 2), **constants)
    write_photos(here / "flat", ["."], 32)
    line = ("predict", "own.onnx", "flat")
    assert "Warning: " not in succeed(*line, *right).stderr
    told = succeed(*line, *(PIXELS if right == SHARES else SHARES)).stderr
    low, high = (0, 255) if right == SHARES else (0, 1)
    assert_names(told, f"Warning:  ... from {low} to {high}. ... --scale")


def test_a_model_of_bytes(here):
    text = "g (uint8[N,8,8,3] x) => (float[N,2] z) { c = Cast<to=1>(x) "
    text += "a = Constant<value_ints=[1, 2]>() p = ReduceMean<keepdims=0>(c, a) z = MatMul(p, W) }"
    save_model("bytes.onnx", text, W=np.eye(3, 2))
    made = write_photos(here / "flat", ["."], 3)
    done = succeed("predict", "bytes.onnx", "flat")
    assert "3 images, values as they are" in done.stderr
    found = [[float(r["z_0"]), float(r["z_1"])] for r in csv_rows(done.stdout)]
    np.testing.assert_allclose(found, [p.mean((0, 1))[:2] for p in made.values()], rtol=1e-5)
    assert "--scale" in refusal("predict", "bytes.onnx", "flat", "--scale", 255)
