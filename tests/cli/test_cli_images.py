"""Folders of images in the shell: classes, scales, parts, and predictions of single files."""

import csv
import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.support.commands import HEADER, as_json, invoke, refused, save, succeed

Image = pytest.importorskip("PIL.Image")
LINE = ("--loss", "cross_entropy", "--validation", 0, "--epochs", 1, "--no-curves", "--overwrite")
MEAN = "p = GlobalAveragePool(x) f = Flatten(p) z = MatMul(f, W)"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for k in (2, 3, 12):
        W = np.random.default_rng(k).normal(size=(3, k))
        save(f"{k}.onnx", f"{HEADER}g (float[N,3,8,8] x) => (float[N,{k}] z) {{ {MEAN} }}", W=W)
    return tmp_path


def photos(folder, names, count=3):
    """Write images of random colors into a folder of each name; return all by path."""
    rng, made = np.random.default_rng(len(names)), {}
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            pixels = np.broadcast_to(rng.integers(0, 256, 3), (8, 8, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
            made[str(folder / name / f"{i}.png")] = pixels
    return made


def scores(model, pixels):
    """Return what onnxruntime computes for arrays (8, 8, 3)."""
    x = np.float32([np.moveaxis(p, -1, 0) for p in pixels])
    return ort.InferenceSession(model).run(None, {"x": x})[0]


def cross_entropy(z, labels):
    shares = np.logaddexp.reduce(z.astype(np.float64), axis=1)
    return (shares - z[np.arange(len(z)), labels]).mean()


def rows(text):
    return list(csv.DictReader(text.splitlines()))


def test_names_that_are_whole_numbers_are_those_classes(here):
    """A model that is right on every image has accuracy 1, though 10 sorts before 2."""
    made = photos(here / "n", [str(k) for k in range(12)], 1)
    best = scores("12.onnx", [p / 255 for p in made.values()]).argmax(1)
    for part in range(12):  # into the folder of the class that the model says
        (here / "right" / str(part)).mkdir(parents=True)
    for i, (path, k) in enumerate(zip(made, best, strict=True)):
        (here / path).rename(here / "right" / str(k) / f"{i}.png")
    result = invoke("eval", "12.onnx", "right", "--loss", "cross_entropy", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["metrics"]["accuracy"] == 1
    assert "classes by number, and their images: 0 (" in result.stderr
    assert "there is no image in" in result.stderr


def test_the_mapping_is_stored_and_a_class_may_be_missing(here):
    made = photos(here / "train", ["dog", "cat"])
    line = ("train", "2.onnx", "train", *LINE, "-o", "out.onnx")
    assert "0: cat (3), 1: dog (3)" in succeed(*line).stderr
    entries = {e.key: json.loads(e.value) for e in onnx.load("out.onnx").metadata_props}
    assert entries["onnxgrad.classes"] == ["cat", "dog"]
    pixels = photos(here / "test", ["dog"])
    z = scores("out.onnx", [p / 255 for p in pixels.values()])
    found = as_json("eval", "out.onnx", "test")
    assert found["metrics"]["accuracy"] == pytest.approx((z.argmax(1) == 1).mean())
    assert found["loss"] == pytest.approx(cross_entropy(z, [1, 1, 1]), rel=1e-5)
    assert len(made) == 6


@pytest.mark.parametrize(
    ("model", "names", "more", "message"),
    [
        ("3", "cat dog", (), "2 classes (cat, dog), and the output of the model has 3: train a "
         "new last layer with --head cat,dog"),
        ("2", "cat dog emu", (), "3 classes (cat, dog, emu), and the output of the model has 2"),
        ("2", "cat dog emu", ("--head", 2), "with --head cat,dog,emu"),
        ("12", "cat dog", ("--head", "cat,dog,emu,fox"), None),
        ("3", "1 2 3", (), "pass --classes 1,2,3 (all of them)"),
        ("3", "1 2 3", ("--classes", "1, 2 ,3"), None),
        ("2", "3 5 8", ("--head", "3,5,8"), None),
        ("2", "3 5 8", ("--head", 3), "pass --classes 3,5,8"),
        ("2", "0 1 2", (), "3 classes, and the output of the model has 2: train a new last layer "
         "with --head 3"),
        ("3", "cat dog", ("--classes", "dog,ant,emu"), "'cat' of 'p' is none of the classes dog"),
        ("2", "cat dog", ("--classes", "cat,dog,emu"), "3 classes (cat, dog, emu), and the output"),
    ],
)  # fmt: skip
def test_folders_and_outputs_that_differ(here, model, names, more, message):
    photos(here / "p", names.split())
    line = ("train", f"{model}.onnx", "p", *LINE, *more)
    if message is None:
        succeed(*line)
        return
    assert message in refused(*line)
    assert not (here / "trained.onnx").exists()


@pytest.mark.parametrize(
    ("options", "change", "text"),
    [
        ((), lambda p: p / 255, "values from 0 to 1\n"),
        (("--scale", 255), lambda p: p, "values from 0 to 255\n"),
        (("--normalize", "imagenet"),
         lambda p: (p / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225], "minus 0.485, 0.456"),
        (("--normalize", "imagenet", "--scale", 255),
         lambda p: (p / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225], "minus 123.675"),
        (("--normalize", "100/50", "--scale", 255), lambda p: (p - 100.0) / 50, "minus 100,"),
    ],
)  # fmt: skip
def test_how_values_are_scaled_is_told_and_kept(here, options, change, text):
    made = photos(here / "p", ["a", "b"])
    assert text in succeed("train", "2.onnx", "p", *LINE, *options).stderr
    z = scores("trained.onnx", [change(p) for p in made.values()])
    labels = np.repeat([0, 1], 3)
    wanted = cross_entropy(z, labels)
    told = invoke("eval", "trained.onnx", "p", "--json")
    assert json.loads(told.stdout)["loss"] == pytest.approx(wanted, rel=1e-4)
    assert text in told.stderr
    found = rows(succeed("predict", "trained.onnx", "p").stdout)
    np.testing.assert_allclose([[float(r["z_0"]), float(r["z_1"])] for r in found], z, rtol=1e-3)
    plain = as_json("eval", "trained.onnx", "p", "--scale", 1)["loss"]  # what options say wins
    z = scores("trained.onnx", [p / 255 for p in made.values()])
    wanted = cross_entropy(z, labels)
    assert plain == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("text", ["imagenett", "1", "1,2/1", "1/0", "nan/1", "1/2/3", "a/b"])
def test_normalizations_that_are_none(here, text):
    photos(here / "p", ["a", "b"])
    assert "--normalize" in refused("train", "2.onnx", "p", *LINE, "--normalize", text)
    assert "--scale 0.0 must be above 0" in refused("train", "2.onnx", "p", *LINE, "--scale", 0)


def test_a_folder_of_data_sets(here):
    for part in ("train", "val", "test"):
        photos(here / "d" / part, ["a", "b"], {"train": 4, "val": 2, "test": 1}[part])
    line = ("train", "2.onnx", "d", "--loss", "cross_entropy", "--epochs", 1, "--no-curves")
    made = invoke(*line, "--json")
    result = json.loads(made.stdout)
    assert (result["rows"], result["validation_rows"]) == (8, 4)
    for text in ("DATA is d/train", "validation is on d/val", "d/test is left for `onnxgrad eval`"):
        assert text in made.stderr
    assert as_json("eval", "trained.onnx", "d")["rows"] == 2
    assert as_json("eval", "trained.onnx", "d/val")["rows"] == 4
    (here / "d" / "test").rename(here / "elsewhere")
    assert "has no folder test/: name one of 'd/train', 'd/val'" in refused(
        "eval", "trained.onnx", "d"
    )


def test_predictions_of_files(here):
    photos(here / "p", ["cat", "dog"])
    succeed("train", "2.onnx", "p", *LINE)
    made = photos(here / "flat", ["."], 4)
    z = scores("trained.onnx", [p / 255 for p in made.values()])
    share = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    found = rows(succeed("predict", "trained.onnx", "flat").stdout)
    assert [*found[0]] == ["file", "label", "probability", "z_0", "z_1"]
    assert [r["file"] for r in found] == [f"flat/{i}.png" for i in range(4)]
    assert [r["label"] for r in found] == [["cat", "dog"][k] for k in z.argmax(1)]
    np.testing.assert_allclose([float(r["probability"]) for r in found], share.max(1), rtol=1e-4)
    [one] = rows(succeed("predict", "trained.onnx", "flat/2.png").stdout)
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
    text = f"{HEADER}g (float[N,3,8,8] x) => (float[N,{width}] s) {{ {MEAN} {end} }}"
    W = np.random.default_rng(0).normal(size=(3, 2))
    save("own.onnx", text, W=W)
    model = onnx.load("own.onnx")
    model.metadata_props.add(key="onnxgrad.classes", value='["cat", "dog"]')
    onnx.save(model, "own.onnx")
    pixels = photos(here / "flat", ["."], 5)
    z = np.float64([p.mean((0, 1)) / 255 for p in pixels.values()]) @ W.astype(np.float32)
    if probability:
        shares = probability(z)
    else:
        second = 1 / (1 + np.exp(-z[:, :1]))
        second = second[:, 0]
        shares = np.stack([1 - second, second], 1)
    found = rows(succeed("predict", "own.onnx", "flat").stdout)
    assert [r["label"] for r in found] == [["cat", "dog"][k] for k in shares.argmax(1)]
    np.testing.assert_allclose([float(r["probability"]) for r in found], shares.max(1), rtol=1e-4)


@pytest.mark.parametrize("loss", ["binary_cross_entropy", "mse", "hinge"])
def test_scores_that_do_not_exclude_each_other_have_no_label(here, loss):
    """Softmax of independent labels is no probability."""
    model = onnx.load("2.onnx")
    model.metadata_props.add(key="onnxgrad.classes", value='["cat", "dog"]')
    onnx.save(model, "own.onnx")
    photos(here / "flat", ["."], 3)
    assert "label" in rows(succeed("predict", "own.onnx", "flat").stdout)[0]
    note = json.dumps([{"loss": [{"mse": "l2"}.get(loss, loss)]}])
    model.metadata_props.add(key="onnxgrad.training_loss", value=note)
    onnx.save(model, "own.onnx")
    found = rows(succeed("predict", "own.onnx", "flat").stdout)
    assert [*found[0]] == ["file", "z_0", "z_1"]


FRONTS = {  # how a file says on which values its model was trained, and which these are
    "Div": ("y = Div(x, c)", {"c": [255.0]}, 255),
    "Mul": ("y = Mul(c, x)", {"c": [1 / 255]}, 255),
    "Sub": ("y = Sub(x, c)", {"c": [[[123.7]], [[116.8]], [[103.9]]]}, 255),
    "Quantize": ("o = Constant<value = uint8 {0}>() q = QuantizeLinear(x, c, o) "
                 "y = DequantizeLinear(q, c, o)", {"c": np.float32(1.0)}, 255),
    "BatchNormalization": ("v = Conv(x, k) y = BatchNormalization(v, a, b, b, s)",
                           {"k": np.ones((3, 3, 1, 1)), "a": np.ones(3), "b": np.zeros(3),
                            "s": np.full(3, 3 * 70.0**2)}, 255),
    "normalized": ("v = Conv(x, k) y = BatchNormalization(v, a, b, b, s)",
                   {"k": np.ones((3, 3, 1, 1)), "a": np.ones(3), "b": np.zeros(3),
                    "s": np.full(3, 3 * 1.2**2)}, None),
}  # fmt: skip


@pytest.mark.parametrize("front", FRONTS)
def test_values_of_another_range_are_told(here, front):
    nodes, constants, scale = FRONTS[front]
    text = (
        f"{HEADER}g (float[1,3,8,8] x) => (float[1,2] z) {{ {nodes} {MEAN.replace('(x)', '(y)')} }}"
    )
    save("own.onnx", text, W=np.eye(3, 2), **constants)
    photos(here / "flat", ["."], 40)
    right = ["--scale", scale] if scale else ["--normalize", "imagenet"]
    assert "Warning: " not in succeed("predict", "own.onnx", "flat", *right).stderr
    told = succeed("predict", "own.onnx", "flat").stderr
    assert "Warning: " in told
    assert "here they are from 0 to 1. If it was trained on others, say so with --scale" in told


def test_a_model_of_bytes(here):
    text = f"{HEADER}g (uint8[N,8,8,3] x) => (float[N,2] z) {{ c = Cast<to=1>(x) "
    text += "a = Constant<value_ints=[1, 2]>() p = ReduceMean<keepdims=0>(c, a) z = MatMul(p, W) }"
    save("bytes.onnx", text, W=np.eye(3, 2))
    made = photos(here / "flat", ["."], 3)
    done = succeed("predict", "bytes.onnx", "flat")
    assert "3 images, values as they are, from 0 to 255" in done.stderr
    found = [[float(r["z_0"]), float(r["z_1"])] for r in rows(done.stdout)]
    np.testing.assert_allclose(found, [p.mean((0, 1))[:2] for p in made.values()], rtol=1e-5)
    assert "leave out --scale" in refused("predict", "bytes.onnx", "flat", "--scale", 255)
