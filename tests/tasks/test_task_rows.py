"""Tables, images and texts as tasks: by their own defaults, from Python as from the shell."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxgrad as og
from onnxgrad.model.convert import convert_precision
from tests.support.commands import (
    LAYERS,
    LINEAR,
    as_json,
    csv_rows,
    features,
    save_model,
    succeed,
    weights_of_file,
    write_csv_columns,
)
from tests.support.errors import naming

Image = pytest.importorskip("PIL.Image")
KINDS = ["ant", "bee", "cat"]


@pytest.fixture(autouse=True)
def tables_and_models(tmp_path, monkeypatch):
    """A linear model, one of three classes, and tables of numbers and of names for them."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    save_model("linear.onnx", LINEAR, W=rng.normal(size=(2, 1)), b=[0.0])
    weights = {"V": rng.normal(size=(2, 4)), "W": rng.normal(size=(4, 3)), "b": np.zeros(3)}
    save_model("layers.onnx", LAYERS, **weights)
    a, b = features().T
    names = [KINDS[k] for k in np.digitize(a + b, [-0.5, 0.5])]
    write_csv_columns("prices.csv", a=a, b=b, price=2 * a - b)
    write_csv_columns("names.csv", a=a, b=b, kind=names)


def run_file(path, **feed):
    """Return the first output of a plain session."""
    return ort.InferenceSession(path).run(None, feed)[0]


# -- tables ----------------------------------------------------------------------------------------


def test_a_table_trains_as_in_the_shell_and_as_its_arrays():
    task = og.tasks.Table("linear.onnx", "prices.csv", target="price", loss="squared_error")
    trainer = task.trainer(learning_rate=0.05)
    trainer.fit(task.data, validation=task.validation, epochs=5)
    trainer.save("python.onnx")
    line = ("linear.onnx", "prices.csv", "--target", "price", "--loss", "squared_error")
    told = as_json("train", *line, "--lr", 0.05, "--epochs", 5, "-o", "shell.onnx")
    for name, array in weights_of_file("shell.onnx").items():
        np.testing.assert_array_equal(array, weights_of_file("python.onnx")[name])
    (X, y), (held, _) = task.data, task.validation
    assert (told["rows"], told["validation_rows"]) == (len(y), len(held["x"])) == (32, 8)
    every = np.concatenate([X["x"], held["x"]])
    assert sorted(map(tuple, every.tolist())) == sorted(map(tuple, features().tolist()))
    plain = og.Trainer("linear.onnx", "squared_error", learning_rate=0.05)
    plain.fit(X["x"], y, epochs=5)
    np.testing.assert_array_equal(plain.state.weights["W"], trainer.state.weights["W"])


@pytest.mark.parametrize("dtype", ["float16", "double"])
def test_a_table_trains_a_model_of_another_type(dtype):
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 20]>
        f ({dtype}[N,2] x) => ({dtype}[N,1] y) <{dtype}[2,1] w = {{0, 0}}>
        {{ y = MatMul(x, w) }}""")
    task = og.tasks.Table(model, "prices.csv", target="price", loss="squared_error")
    trainer = task.trainer(learning_rate=0.1)
    trainer.fit(task.data, validation=task.validation, epochs=200)
    np.testing.assert_allclose(trainer.state.weights["w"], [[2], [-1]], atol=0.01)
    trainer.save("trained.onnx")
    rows = og.tasks.Table("trained.onnx").predict("trained.onnx", "prices.csv")
    x = np.loadtxt("prices.csv", delimiter=",", skiprows=1, usecols=(0, 1))
    x = x.astype({"float16": np.float16, "double": np.float64}[dtype])
    np.testing.assert_array_equal([row["y"] for row in rows], run_file("trained.onnx", x=x))


@pytest.mark.parametrize("trained_by", ["python", "shell"])
def test_a_trained_table_needs_the_data_only(trained_by):
    if trained_by == "python":
        task = og.tasks.Table("layers.onnx", "names.csv", target="kind", classes=KINDS)
        trainer = task.trainer(learning_rate=0.05)
        trainer.fit(task.data, validation=task.validation, epochs=30)
        trainer.save("trained.onnx")
    else:
        line = ("train", "layers.onnx", "names.csv", "--target", "kind", "--classes")
        succeed(*line, ",".join(KINDS), "--lr", 0.05, "--epochs", 30, "--no-curves")
    names = [row["kind"] for row in csv_rows(Path("names.csv").read_text())]
    z = run_file("trained.onnx", x=features())
    correct = np.mean([KINDS[k] == name for k, name in zip(z.argmax(1), names, strict=True)])
    again = og.tasks.Table("trained.onnx")
    in_python = again.evaluate("names.csv")
    in_shell = as_json("eval", "trained.onnx", "names.csv")
    assert correct > 0.8
    assert in_python["accuracy"] == pytest.approx(correct)
    assert in_shell["metrics"] == {"accuracy": pytest.approx(correct)}
    assert in_shell["loss"] == pytest.approx(in_python["loss"], rel=1e-6)
    rows = again.predict("trained.onnx", "names.csv")
    assert [row["label"] for row in rows] == [KINDS[k] for k in z.argmax(1)]
    np.testing.assert_array_equal(np.stack([row["z"] for row in rows]), z)
    shares = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    np.testing.assert_allclose([r["probability"] for r in rows], shares.max(1), rtol=1e-6)
    printed = csv_rows(succeed("predict", "trained.onnx", "names.csv").stdout)
    assert [row["label"] for row in printed] == [row["label"] for row in rows]
    (file,) = again.write("names.csv", rows, "written")
    assert [row["label"] for row in csv_rows(file.read_text())] == [r["label"] for r in rows]


def test_more_names_than_scores_get_a_new_last_layer():
    write_csv_columns("four.csv", a=[1, 2, 3, 4] * 5, b=[0] * 20, kind=["a", "b", "c", "d"] * 5)
    task = og.tasks.Table("layers.onnx", "four.csv", target="kind")
    assert task.loss == "cross_entropy"
    assert task.classes == ["a", "b", "c", "d"]
    assert any("new last layer" in note for note in task.notes)
    assert task.trainer().predict({"x": features()}).shape == (40, 4)
    with pytest.raises(ValueError, match=naming("loss=", "loss_output=")):  # numbers leave a choice
        og.tasks.Table("linear.onnx", "prices.csv", target="price")
    with pytest.raises(
        ValueError, match=naming("classes=['ant', 'bee', 'cat']")
    ):  # the order of as many names does, too
        og.tasks.Table("layers.onnx", "names.csv", target="kind", loss="cross_entropy")


def test_a_table_in_memory_is_read_as_its_file():
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv("prices.csv")
    by = {"target": "price", "loss": "squared_error"}
    ours, file = (og.tasks.Table("linear.onnx", data, **by) for data in (frame, "prices.csv"))
    for own, other in zip(ours.data, file.data, strict=True):
        own, other = (next(iter(x.values())) if isinstance(x, dict) else x for x in (own, other))
        np.testing.assert_array_equal(own, other)


def test_a_dict_of_columns_is_a_table():
    a, b = features().T
    columns = {"a": a, "b": b, "price": 2 * a - b}
    by = {"target": "price", "loss": "squared_error"}
    task = og.tasks.Table("linear.onnx", columns, **by)
    assert task.data[0]["x"].shape == (32, 2)
    with pytest.raises(TypeError, match=naming("ndarray", "Trainer")):
        og.tasks.Table("linear.onnx", features(), **by)


def test_rows_that_are_held_out():
    by = {"target": "price", "loss": "squared_error"}
    assert og.tasks.Table("linear.onnx", "prices.csv", **by, validation=0).validation is None
    other = og.tasks.Table("linear.onnx", "prices.csv", **by, validation="prices.csv")
    assert len(other.data[1]) == len(other.validation[1]) == 40
    drawn = og.tasks.Table("linear.onnx", "prices.csv", **by, validation=0.5, seed=3)
    assert len(drawn.held_out) == len(drawn.validation[1]) == 20
    with pytest.raises(ValueError, match=naming("validation=1.5")):
        og.tasks.Table("linear.onnx", "prices.csv", **by, validation=1.5)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"target": "prise"}, "'price'"),
        ({"target": "price", "columns": ["c"]}, "columns="),
        ({"target": "price", "sample_weight": "c"}, "sample_weight="),
        ({"target": "price", "ignore": ["c"]}, "ignore="),
        ({}, "target="),
        ({"target": "price", "classes": KINDS}, "classes="),
    ],
)
def test_columns_that_are_not_there(more, named):
    with pytest.raises(ValueError, match=naming(named)):
        og.tasks.Table("linear.onnx", "prices.csv", loss="squared_error", **more)


def test_a_column_of_arrays_is_found_again():
    np.savez("rows.npz", x=features(), price=features()[:, 0])
    line = ("rows.npz", "--target", "price", "--loss", "squared_error", "--no-curves")
    succeed("train", "linear.onnx", *line)
    y = run_file("trained.onnx", x=features())
    expected = ((y[:, 0] - features()[:, 0]) ** 2).mean()
    assert as_json("eval", "trained.onnx", "rows.npz")["loss"] == pytest.approx(expected, rel=1e-5)
    assert len(csv_rows(succeed("predict", "trained.onnx", "rows.npz").stdout)) == 40


def test_a_loss_of_the_model_leaves_its_outputs_as_they_are():
    text = """g (float[N,2] x, float[N,1] price) => (float[N,1] y, float loss, float other) {
        y = MatMul(x, W)  d = Sub(y, price)  s = Mul(d, d)  loss = ReduceMean<keepdims=0>(s)
        other = ReduceMax<keepdims=0>(s) }"""
    save_model("own.onnx", text, W=np.ones((2, 1)))
    task = og.tasks.Table("own.onnx", "prices.csv", target="price")
    trainer = task.trainer(learning_rate=0.1)
    trainer.fit(task.data, validation=task.validation, epochs=2)
    made = task.finished(trainer.model)
    assert [output.name for output in made.graph.output] == ["y", "loss", "other"]
    onnx.save(made, "made.onnx")
    np.testing.assert_array_equal(weights_of_file("made.onnx")["W"], trainer.state.weights["W"])


# -- images ----------------------------------------------------------------------------------------


def write_colors(folder, names, count=10):
    """Write images in a folder for each name, each name in a color of its own."""
    rng = np.random.default_rng(0)
    for k, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 60, (8, 8, 3))
            pixels[..., k % 3] += 150
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{i}.png")


def save_image_model(classes):
    text = f"""g (float[N,3,8,8] x) => (float[N,{classes}] z) {{
        p = GlobalAveragePool(x) f = Flatten(p) z = MatMul(f, W) }}"""
    save_model("colors.onnx", text, W=np.random.default_rng(0).normal(size=(3, classes)))


@pytest.mark.parametrize("trained_by", ["python", "shell"])
def test_trained_images_need_the_folder_only(tmp_path, trained_by):
    save_image_model(3)
    write_colors(tmp_path / "photos", ["blue", "green", "red"])
    if trained_by == "python":
        task = og.tasks.Images("colors.onnx", "photos", normalize="imagenet")
        trainer = task.trainer(learning_rate=0.1)
        trainer.fit(task.data, validation=task.validation, epochs=15).save("trained.onnx")
    else:
        line = ("train", "colors.onnx", "photos", "--normalize", "imagenet", "--lr", 0.1)
        succeed(*line, "--epochs", 15, "--no-curves")
    told = as_json("eval", "trained.onnx", "photos")
    again = og.tasks.Images("trained.onnx")
    found = again.evaluate("photos")
    assert told["loss"] == pytest.approx(found["loss"], rel=1e-6)
    assert told["metrics"]["accuracy"] == found["accuracy"] == 1
    rows = again.predict("trained.onnx", "photos")
    assert [row["label"] for row in rows] == [row["file"].split("/")[1] for row in rows]
    pixels = np.asarray(Image.open(rows[0]["file"]), np.float32) / 255
    x = (pixels - np.float32([0.485, 0.456, 0.406])) / np.float32([0.229, 0.224, 0.225])
    z = run_file("trained.onnx", x=np.moveaxis(x, -1, 0)[None])
    np.testing.assert_allclose(rows[0]["z"], z[0], rtol=1e-5, atol=1e-6)
    printed = csv_rows(succeed("predict", "trained.onnx", "photos").stdout)
    assert [row["label"] for row in printed] == [row["label"] for row in rows]


def test_images_train_a_model_of_16_bits(tmp_path):
    save_image_model(3)
    onnx.save(convert_precision(onnx.load("colors.onnx"), ir.DataType.FLOAT16), "half.onnx")
    write_colors(tmp_path / "photos", ["blue", "green", "red"])
    task = og.tasks.Images("half.onnx", "photos", normalize="imagenet")
    trainer = task.trainer(learning_rate=0.1)
    trainer.fit(task.data, validation=task.validation, epochs=15).save("trained.onnx")
    rows = og.tasks.Images("trained.onnx").predict("trained.onnx", "photos")
    assert [row["label"] for row in rows] == [row["file"].split("/")[1] for row in rows]
    pixels = np.asarray(Image.open(rows[0]["file"]), np.float32) / 255
    x = (pixels - np.float32([0.485, 0.456, 0.406])) / np.float32([0.229, 0.224, 0.225])
    z = run_file("trained.onnx", x=np.moveaxis(x, -1, 0)[None].astype(np.float16))
    np.testing.assert_allclose(rows[0]["z"], z[0], rtol=2e-3)


NORMALIZED = """g (float[N,3,8,8] x) => (float[N,2] z) {
    h = BatchNormalization(x, one, zero, zero, one)
    p = GlobalAveragePool(h) f = Flatten(p) z = MatMul(f, W) }"""
DEEP = f"""g (float[N,3,8,8] x) => (float[N,2] z) {{ p = GlobalAveragePool(x) h0 = Flatten(p)
    {" ".join(f"h{i + 1} = MatMul(h{i}, V)" for i in range(9))} z = MatMul(h9, W) }}"""


@pytest.mark.parametrize("text", [NORMALIZED, DEEP])
def test_old_weights_train_slowly(tmp_path, text):
    """So that they still fit frozen statistics; new or chosen weights train as usual."""
    rate = 1e-4
    W, one, zero = np.random.default_rng(0).normal(size=(3, 2)), np.ones(3), np.zeros(3)
    given = {"one": one, "zero": zero} if text is NORMALIZED else {"V": np.eye(3)}
    save_model("norm.onnx", text, W=W, **given)
    write_colors(tmp_path / "photos", ["a", "b"], 10)
    task = og.tasks.Images("norm.onnx", "photos", augment="flip,colors")
    assert len(task.data.transforms) == 2

    told = task.advise([{"loss": 2, "learning_rate": rate, "validation_accuracy": 0.5}])
    assert "validation_accuracy is 0.5, as by chance" in told

    def rate_of(**arguments):
        return task.trainer(**arguments)._job.learning_rates[0](0)

    assert rate_of() == rate
    assert task.trainer().fit(task.data).state.step == 2  # of 16 rows, in batches of 8
    assert rate_of(learning_rate=0.5) == 0.5
    usual = {"train": "W"}, {"optimizer": "adam"}, {"batch_norm": "train"}
    assert [rate_of(**each) for each in usual[: 2 + (text is NORMALIZED)]][:2] == [1e-3, 1e-3]
    lines = ("train", "norm.onnx", "photos", "--epochs", 1, "--no-curves", "--overwrite")
    for options, expected in (
        ([], rate),
        (["--lr", 0.01], 0.01),
        (["--train", "W"], 1e-3),
        (["--optimizer", "sgd"], 0.01),
        (["--schedule", "linear"], rate),
        (["--schedule", "linear", "--train", "W"], 1e-3),
        (["--task-option", "augment=flip"], rate),
    ):
        told = as_json(*lines, *options)
        assert told["history"][0]["learning_rate"] == pytest.approx(expected, rel=0.7), options


def test_a_share_of_each_class_is_held_out(tmp_path):
    save_image_model(3)
    for name, count in (("blue", 30), ("green", 10), ("red", 5)):
        write_colors(tmp_path / "photos", [name], count)
    task = og.tasks.Images("colors.onnx", "photos")
    assert np.bincount(task.validation.labels).tolist() == [6, 2, 1]
    assert np.bincount(task.data.labels).tolist() == [24, 8, 4]
    assert not {*task.data.files} & {*task.validation.files}


def test_parts_of_a_folder(tmp_path):
    save_image_model(2)
    for part in ("train", "val", "test"):
        write_colors(tmp_path / "set" / part, ["a", "b"], {"train": 6, "val": 2, "test": 1}[part])
    task = og.tasks.Images("colors.onnx", "set")
    assert (task.data.rows, task.validation.rows, task.read("set").rows) == (12, 4, 2)


def test_classes_that_a_model_does_not_have(tmp_path):
    save_image_model(2)
    write_colors(tmp_path / "photos", ["blue", "green", "red"])
    task = og.tasks.Images("colors.onnx", "photos")
    assert task.classes == ["blue", "green", "red"]
    trainer = task.trainer(learning_rate=0.1).fit(task.data, epochs=15)
    assert task.evaluate("photos")["accuracy"] < 1  # the task has the model before its training
    onnx.save(trainer.model, "trained.onnx")
    assert og.tasks.Images("trained.onnx").evaluate("photos")["accuracy"] == 1
    write_colors(tmp_path / "others", ["four", "two"])
    with pytest.raises(
        ValueError, match=naming("'others'", "'four'")
    ):  # an evaluation is of the model as it is
        og.tasks.Images("trained.onnx").evaluate("others")
    other = og.tasks.Images("trained.onnx", "others")
    assert other.classes == ["four", "two"]
    assert any("new last layer" in note for note in other.notes)


# -- texts -----------------------------------------------------------------------------------------


@pytest.fixture
def language_model(tmp_path):
    """The folder of a small language model, and texts beside it."""
    pytest.importorskip("tokenizers")
    from tests.support.text_models import bpe_tokenizer, text_beginnings, token_model

    own = bpe_tokenizer()
    (tmp_path / "lm").mkdir()
    onnx.save(token_model(), "lm/model.onnx")
    own.backend.save("lm/tokenizer.json")
    about = {"vocab_size": own.size, "eos_token_id": 1, "max_position_embeddings": 64}
    (tmp_path / "lm" / "config.json").write_text(json.dumps(about))
    special = {"eos_token": "</s>", "pad_token": "<pad>", "bos_token": "<s>"}
    (tmp_path / "lm" / "tokenizer_config.json").write_text(json.dumps(special))
    rows = [json.dumps({"text": text}) for text in text_beginnings(30)]
    (tmp_path / "texts.jsonl").write_text("\n".join(rows))


def test_texts_train_a_model_of_16_bits(language_model):
    whole = onnx.load("lm/model.onnx")
    onnx.save(convert_precision(whole, ir.DataType.FLOAT16), "lm/model.onnx")
    before = og.tasks.Texts("lm").evaluate("texts.jsonl")["loss"]
    task = og.tasks.Texts("lm", "texts.jsonl")
    trainer = task.trainer()
    trainer.fit(task.data, validation=task.validation, epochs=2)
    og.save_folder(trainer.model, "out", og.load_folder("lm"))
    after = onnx.load("out/model.onnx")
    assert {t.data_type for t in after.graph.initializer} & {onnx.TensorProto.FLOAT16}
    assert og.tasks.Texts("out").evaluate("texts.jsonl")["loss"] < before


@pytest.mark.parametrize("trained_by", ["python", "shell"])
def test_texts_train_as_in_the_shell(language_model, trained_by):
    task = og.tasks.Texts("lm", "texts.jsonl")
    assert task.loss == "causal_lm"
    if trained_by == "python":
        trainer = task.trainer()
        trainer.fit(task.data, validation=task.validation, epochs=2)
        og.save_folder(trainer.model, "out", og.load_folder("lm"))
    else:
        succeed("train", "lm", "texts.jsonl", "--epochs", 2, "--output", "out", "--no-curves")
    again = og.tasks.Texts("out")
    found = again.evaluate("texts.jsonl")
    told = as_json("eval", "out", "texts.jsonl")
    assert told["loss"] == pytest.approx(found["loss"], rel=1e-6)
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]), rel=1e-5)
    [text] = again.predict("out", "the", max_new_tokens=5)
    told = as_json("generate", "out", "the", "--max-new-tokens", 5)
    assert told["text"] == text
    (file,) = again.write("the", [text], "written")
    assert json.loads(file.read_text()) == {"prompt": "the", "completion": text}
