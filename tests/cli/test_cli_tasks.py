"""`--task`: jobs from the shell, from files to a trained file and to what people look at."""

import csv

import numpy as np
import onnxruntime as ort
import pytest

import onnxgrad as og
from tests.support.commands import (
    as_json,
    assert_names,
    refusal,
    save_model,
    succeed,
    weights_of_file,
)
from tests.support.models import initializer_arrays
from tests.support.sound_files import RATE, folder_of_tones, write_wave

PIL = pytest.importorskip("PIL.Image")
tokenizers = pytest.importorskip("tokenizers")

rng = np.random.default_rng(0)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"red green blue one two three".split()]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def detection_job(root):
    """Return a detector of 21 anchors, and pictures with one bright square each."""
    save_model(
        root / "model.onnx",
        """f (float[N,3,32,32] x) => (float[N,21,7] y) { m = Flatten(x)  a = MatMul(m, w)
        r = Add(a, b)  z = Reshape(r, s)  c, e, p = Split<axis=2>(z, parts)  g = Exp(e)
        q = Sigmoid(p)  d = Concat<axis=2>(c, g, q)  y = Add(d, shift) }""",
        w=rng.normal(size=(3072, 147)) * 1e-5, b=np.tile([0.0, 0, 2, 2, 0, 0, 0], 21),
        s=np.array([0, 21, 7]), parts=np.array([2, 2, 3]),
        shift=1.0 * np.r_[[[x * 8 + 4, y * 8 + 4] for y in range(4) for x in range(4)],
                    [[x * 16 + 8, y * 16 + 8] for y in range(2) for x in range(2)],
                    [[16, 16]]] @ np.eye(2, 7),
    )  # fmt: skip
    for part in ("images", "labels"):
        (root / "data" / part).mkdir(parents=True)
    for i in range(12):
        pixels = np.zeros((32, 32, 3), np.uint8)
        x, y = rng.integers(0, 20, 2)
        pixels[y : y + 8, x : x + 8, i % 2] = 255
        PIL.fromarray(pixels).save(root / "data" / "images" / f"{i}.png")
        line = f"{i % 2} {(x + 4) / 32} {(y + 4) / 32} 0.25 0.25\n"
        (root / "data" / "labels" / f"{i}.txt").write_text(line)
    (root / "data" / "data.yaml").write_text("train: images\nval: images\nnames: [dog, cat]\n")
    return root / "data" / "data.yaml", root / "data" / "images", "detections.json"


def segmentation_job(root):
    """Return a model of one score a pixel, and pictures whose bright half is the class."""
    save_model(
        root / "model.onnx",
        "f (float[N,3,8,8] x) => (float[N,1,8,8] y) { s = Conv(x, w)  y = Sigmoid(s) }",
        w=np.zeros((1, 3, 1, 1)),
    )
    for part in ("images", "masks"):
        (root / "data" / part).mkdir(parents=True)
    for i in range(8):
        mask = np.zeros((8, 8), np.uint8)
        mask[:, i % 4 :: 2] = 1
        PIL.fromarray(mask).save(root / "data" / "masks" / f"{i}.png")
        PIL.fromarray(np.repeat(mask[..., None] * 200, 3, 2)).save(
            root / "data" / "images" / f"{i}.png"
        )
    return root / "data", root / "data" / "images", None


def ctc_job(root):
    """Return a recognizer of letters, and lines with the dictionary beside them."""
    save_model(
        root / "model.onnx",
        """f (float[N,1,8,W] x) => (float[N,T,4] y) { c = Conv<strides=[1,2]>(x, k)  r = Tanh(c)
        s = Squeeze(r, two)  t = Transpose<perm=[0,2,1]>(s)  y = MatMul(t, w) }""",
        k=rng.normal(size=(5, 1, 8, 2)), w=rng.normal(size=(5, 4)), two=np.array([2]),
    )  # fmt: skip
    (root / "data").mkdir()
    lines = []
    for i in range(8):
        PIL.fromarray(rng.integers(0, 256, (8, 16 + 2 * i), np.uint8)).save(
            root / "data" / f"{i}.png"
        )
        lines.append(f"{i}.png\t{'abc'[i % 3]}{'cab'[i % 3]}\n")
    (root / "data" / "rec_gt.txt").write_text("".join(lines))
    (root / "letters.txt").write_text("a\nb\nc\n")
    return root / "data" / "rec_gt.txt", root / "data", "results.txt"


def sound_job(root):
    """Return a linear model of half a second, and clips of three classes."""
    save_model(
        root / "model.onnx",
        f"f (float[1,{RATE // 2}] x) => (float[1,3] y) {{ y = MatMul(x, w) }}",
        w=rng.normal(size=(RATE // 2, 3)) / 100,
    )
    folder = folder_of_tones(root / "data")
    write_wave(root / "long" / "a.wav", rng.normal(scale=0.1, size=2 * RATE))
    return folder, root / "long", "events.csv"


def save_word_model(root):
    """Save a tokenizer of words, and a model of their embeddings in the context of the text."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(root / "tokenizer.json"))
    save_model(
        root / "model.onnx",
        """f (int64[N,T] input_ids, int64[N,T] attention_mask) => (float[N,T,6] hidden)
        { e = Gather(table, input_ids)  m = Cast<to=1>(attention_mask)  u = Unsqueeze(m, two)
          hidden = Mul(e, u) }""",
        table=rng.normal(size=(len(WORDS), 6)), two=np.array([2]),
    )  # fmt: skip


def embeddings_job(root):
    save_word_model(root)
    with (root / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [("anchor", "positive"), *(zip(WORDS[4:], WORDS[-1:3:-1], strict=True))]
        )
    (root / "texts.txt").write_text("red\nblue\none\n")
    return root / "pairs.csv", root / "texts.txt", None


def tokens_job(root):
    save_word_model(root)
    text = "\n".join("red B-COL\none O\nblue B-COL\n\ntwo O\ngreen B-COL\n" for _ in range(5))
    (root / "data.conll").write_text(text)
    return root / "data.conll", root / "data.conll", "entities.jsonl"


def text_labels_job(root):
    save_word_model(root)
    with (root / "rows.csv").open("w", newline="") as file:
        rows = [(f"{a} {b}", kind) for a in WORDS[7:] for b, kind in (("red", "x"), ("blue", "y"))]
        csv.writer(file).writerows([("text", "label"), *rows])
    return root / "rows.csv", root / "rows.csv", "labels.csv"


MORE = {
    "ctc": ["--task-option", "dictionary=letters.txt"],
    "sound": ["--task-option", f"rate={RATE}"],
}
JOBS = {
    "detection": detection_job,
    "segmentation": segmentation_job,
    "ctc": ctc_job,
    "sound": sound_job,
    "embeddings": embeddings_job,
    "text-labels": text_labels_job,
    "tokens": tokens_job,
}


@pytest.mark.parametrize("name", JOBS)
def test_from_files_to_predictions(name, tmp_path):
    for package in {"detection": ["pycocotools"], "tokens": ["seqeval"]}.get(name, ()):
        pytest.importorskip(package)
    data, inputs, main = JOBS[name](tmp_path)
    options = ["--task", name, *MORE.get(name, [])]
    result = as_json(
        "train", "model.onnx", data, *options, "--epochs", 8, "--lr", 0.05, "--batch-size", 4,
        "--no-curves", *(["--train", "b"] if name == "detection" else []),
    )  # fmt: skip
    assert result["steps"] > 1
    assert result["trained"]
    history = [entry["loss"] for entry in result["history"] if "loss" in entry]
    assert history[-1] < history[0]
    options: list[str] = []  # the trained file has them
    scores = as_json("eval", "trained.onnx", data, *options)
    assert np.isfinite(scores["loss"])
    assert scores["metrics"]
    out = as_json("predict", "trained.onnx", inputs, *options, "--output", "found")
    files = [tmp_path / file for file in out["files"]]
    assert files
    assert all(file.is_file() and tmp_path / "found" in file.parents for file in files)
    assert main is None or main in {file.name for file in files}
    assert ort.InferenceSession("trained.onnx").get_outputs()[0].name
    assert "not empty" in refusal("predict", "trained.onnx", inputs, *options, "--output", "found")
    succeed("predict", "trained.onnx", inputs, *options, "--output", "found", "--overwrite")


def test_predictions_are_those_of_python(tmp_path):
    data, inputs, _ = segmentation_job(tmp_path)
    succeed(
        "train",
        "model.onnx",
        data,
        "--task",
        "segmentation",
        "--epochs",
        20,
        "--lr",
        0.3,
        "--no-curves",
    )
    succeed("predict", "trained.onnx", inputs, "--task", "segmentation", "--output", "found")
    task = og.tasks.segmentation.Segmentation("trained.onnx")
    [first, *_] = task.predict("trained.onnx", inputs)
    mask = np.asarray(PIL.open(data / "masks" / "0.png"))
    np.testing.assert_array_equal(first, mask)
    found = [np.asarray(PIL.open(file)) for file in sorted((tmp_path / "found").rglob("0*.png"))]
    assert any(image.shape == mask.shape and (image == mask).all() for image in found)


def test_values_of_pictures_are_told_and_kept(tmp_path):
    data, _, _ = segmentation_job(tmp_path)
    line = ("train", "model.onnx", data, "--task", "segmentation", "--lr", 0, "--validation", 0)
    task = og.tasks.segmentation.Segmentation
    for options, (mean, std) in (
        (["--normalize", "0.5/0.25"], (0.5, 0.25)),
        (["--scale", 255], (0, 1 / 255)),
        (["--scale", 255, "--normalize", "100/50"], (100 / 255, 50 / 255)),
    ):
        [entry] = as_json(*line, *options, "--epochs", 1, "--no-curves", "--overwrite")["history"]
        own = task("model.onnx", data, normalize=og.data.normalize([mean], [std]))
        assert entry["loss"] == pytest.approx(own.trainer().evaluate(own.data)["loss"], rel=1e-5)
        told = as_json("eval", "trained.onnx", data, "--task", "segmentation")
        assert told["loss"] == pytest.approx(entry["loss"], rel=1e-5)
    assert_names(refusal(*line, "--columns", "a", "--overwrite"), "--columns")
    sounds = refusal(
        "train", "model.onnx", data, "--task", "sound", "--normalize", "imagenet", "--overwrite"
    )
    assert_names(sounds, "--normalize")


@pytest.mark.parametrize("to", ["task", "trainer"])
def test_a_loss_that_no_file_can_hold_is_asked_for(to, tmp_path):
    data, inputs, _ = segmentation_job(tmp_path)
    name, task = "binary_cross_entropy", og.tasks.segmentation.Segmentation
    mine = {"loss": og.losses.LOSSES[name].with_options({"pos_weight": 3.0})}
    of_task, of_trainer = (mine, {}) if to == "task" else ({}, mine)
    trainer = task("model.onnx", data, **of_task).trainer(**of_trainer)
    reader = task("model.onnx", data).read(data)
    trainer.fit(reader)
    trainer.save("trained.onnx")
    evaluation = ("eval", "trained.onnx", data, "--task", "segmentation")
    assert_names(refusal(*evaluation), f"loss ... {name}")
    again = ("train", "trained.onnx", data, "--task", "segmentation", "--output", "again.onnx")
    assert_names(refusal(*again), f"loss ... {name}")
    succeed("predict", "trained.onnx", inputs, "--task", "segmentation")

    with pytest.raises(ValueError, match=name):
        task("trained.onnx").trainer()
    expected = trainer.evaluate(reader)["loss"]
    for given in (task("trained.onnx", **mine).trainer(), task("trained.onnx").trainer(**mine)):
        assert given.evaluate(reader)["loss"] == pytest.approx(expected, rel=1e-5)
    named = as_json(*evaluation, "--task-option", "loss=cross_entropy")["loss"]
    plain = task("trained.onnx", loss="cross_entropy").trainer().evaluate(reader)["loss"]
    assert named == pytest.approx(plain, rel=1e-5)
    assert named != pytest.approx(expected, rel=0.01)


def test_defaults_are_those_of_python(tmp_path):
    """Options that are not set leave the rate, the clipping and the batches to the task."""
    data, _, _ = segmentation_job(tmp_path)
    line = ("train", "model.onnx", data, "--task", "segmentation", "--epochs", 2, "--no-curves")
    told = as_json(*line, "--task-option", "augment=flip,colors", "--normalize", "imagenet")
    task = og.tasks.segmentation.Segmentation(
        "model.onnx", data, augment=["flip", "colors"], normalize="imagenet"
    )
    task.divide_rows()
    trainer = task.trainer(seed=0).fit(task.data, validation=task.validation, epochs=2)
    assert [entry["loss"] for entry in told["history"]] == [e["loss"] for e in trainer.history]
    for name, weight in trainer.state.weights.items():
        np.testing.assert_array_equal(weights_of_file("trained.onnx")[name], weight)
    steps = as_json(*line, "--batch-size", 2, "--overwrite")["steps"]
    assert (told["steps"], steps) == (2, 6)


def test_a_training_in_vain_says_what_to_try(tmp_path):
    data, _, _ = segmentation_job(tmp_path)
    line = ("train", "model.onnx", data, "--task", "segmentation", "--no-curves")
    said = succeed(*line, "--lr", 1000, "--epochs", 3)
    assert "the loss did not fall" in said.stdout + said.stderr
    assert "--learning-rate 100.0" in said.stdout + said.stderr
    remarks = as_json(*line, "--lr", 1000, "--epochs", 3, "--overwrite")["remarks"]
    assert any("did not fall" in remark for remark in remarks)


def test_detections_by_class(tmp_path):
    pytest.importorskip("pycocotools")
    data, _, _ = detection_job(tmp_path)
    line = ("train", "model.onnx", data, "--task", "detection", "--task-option", "pixels=none")
    as_json(*line, "--epochs", 1, "--no-curves", "--lr", 0.01, "--train", "b", "--record", "run")
    succeed("report", "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "true and found boxes" in page
    assert "no box" in page
    found = as_json("eval", "trained.onnx", data)["metrics"]
    assert [*found["map50_per_class"]] == ["dog", "cat"]
    assert np.shape(found["confusion_matrix"]) == (3, 3)
    assert "dog " in succeed("eval", "trained.onnx", data).stdout


def test_the_rows_held_out(tmp_path):
    data, _, _ = segmentation_job(tmp_path)
    options = ["--task", "segmentation", "--epochs", 1, "--no-curves", "--overwrite"]
    assert as_json("train", "model.onnx", data, *options)["validation_rows"] == 2
    given = as_json("train", "model.onnx", data, *options, "--validation", data)
    assert given["validation_rows"] == 8
    none = as_json("train", "model.onnx", data, *options, "--validation", 0)
    assert none["validation_rows"] is None


def test_what_is_refused(tmp_path):
    data, inputs, _ = segmentation_job(tmp_path)
    start = ["train", "model.onnx", data]
    assert "task (--task) 'segment'" in refusal(*start, "--task", "segment")
    text = refusal(*start, "--task", "segmentation", "--loss", "dice", "--target", "a")
    assert_names(text, "--task segmentation ... --loss, --target")
    text = refusal(*start, "--task", "segmentation", "--task-option", "clases=3")
    assert_names(text, "clases ... classes")
    text = refusal(*start, "--task", "segmentation", "--max-length", 3)
    assert "--max-length" in text
    size = (*start, "--task", "segmentation", "--image-size", 16)
    assert "(16, 16)" in refusal(*size)
    assert "(32, 32)" in refusal(*size, "--task-option", "image_size=[32, 32]")
    assert "--task" in refusal(*start, "--task-option", "classes=3")
    text = refusal("predict", "model.onnx", inputs, "--task", "segmentation", "--device", "cuda")
    assert "--device" in text
    text = refusal(*start, "--task", "segmentation", "--validation", 0, "--early-stopping", 2)
    assert "validation data" in text
    text = refusal(*start, "--task", "segmentation", "--class-weight", "dog=2")
    assert "class (--class-weight) 'dog'" in text
    (tmp_path / "file").write_text("x")
    text = refusal("predict", "model.onnx", inputs, "--task", "segmentation", "--output", "file")
    assert "file" in text
    assert not (tmp_path / "trained.onnx").exists()


def test_the_seed_is_that_of_new_weights_too(tmp_path):
    data, _, _ = segmentation_job(tmp_path)
    own = ("--task", "segmentation", "--task-option", "classes=3", "--seed", 3, "--lr", 1e-12)
    succeed("train", "model.onnx", data, *own, "--epochs", 1, "--no-curves")
    task = og.tasks.segmentation.Segmentation("model.onnx", data, classes=3, seed=3)
    found = weights_of_file("trained.onnx")
    for name, expected in initializer_arrays(task.model).items():
        np.testing.assert_allclose(found[name], expected, atol=1e-9, err_msg=name)


def test_a_dry_run(tmp_path):
    data, _, _ = segmentation_job(tmp_path)
    said = as_json("train", "model.onnx", data, "--task", "segmentation", "--dry-run")
    assert said["rows"] == 6
    assert not (tmp_path / "trained.onnx").exists()


def test_options_of_toml(tmp_path):
    data, _, _ = segmentation_job(tmp_path)
    (tmp_path / "job.toml").write_text('task = "segmentation"\ntask_option = ["loss=dice"]\n')
    line = ("train", "model.onnx", data, "--config", "job.toml", "--epochs", 1, "--no-curves")
    other = ("--task", "segmentation", "--task-option", "loss=dice", "--overwrite")
    told = as_json(*line)
    assert told["loss"] == as_json(*line[:3], *other, *line[5:])["loss"]


def test_options_of_predictions(tmp_path):
    data, inputs, _ = segmentation_job(tmp_path)
    succeed("train", "model.onnx", data, "--task", "segmentation", "--epochs", 1, "--no-curves")
    assert_names(refusal("predict", "trained.onnx", inputs, "--task-option", "scor=1"), "'scor'")
    pytest.importorskip("pycocotools")
    (tmp_path / "boxes").mkdir()
    data, inputs, _ = detection_job(tmp_path / "boxes")
    line = ("train", tmp_path / "boxes" / "model.onnx", data, "--task", "detection")
    succeed(*line, "--epochs", 1, "--lr", 1e-6, "--no-curves", "-o", "boxes.onnx")
    predict = ("predict", "boxes.onnx", inputs, "--overwrite", "--task-option")
    assert "12 pictures, 0 boxes" in succeed(*predict, "score=1").stderr
    assert "12 pictures, 0 boxes" not in succeed(*predict, "score=0").stderr


IN_PYTHON = {  # the class of each task, and the options of its first use
    "detection": (og.tasks.detection.Detection, {}),
    "segmentation": (og.tasks.segmentation.Segmentation, {}),
    "ctc": (og.tasks.ctc.TextRecognition, {"dictionary": "letters.txt"}),
    "sound": (og.tasks.sound.Sound, {"rate": RATE}),
    "embeddings": (og.tasks.embeddings.Embeddings, {}),
    "text-labels": (og.tasks.TextLabels, {}),
    "tokens": (og.tasks.tokens.Tokens, {}),
}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("trained_by", ["python", "shell"])
def test_the_other_face_needs_the_data_only(name, trained_by, tmp_path):
    for package in {"detection": ["pycocotools"], "tokens": ["seqeval"]}.get(name, ()):
        pytest.importorskip(package)
    data, inputs, _ = JOBS[name](tmp_path)
    kind, options = IN_PYTHON[name]
    if trained_by == "python":
        task = kind("model.onnx", str(data), **options)
        trainer = task.trainer(learning_rate=1e-4).fit(task.data, epochs=1)
        og.save(task.finished(trainer.model), "trained.onnx")
        task.write_beside(".")
    else:
        line = ("train", "model.onnx", data, "--task", name, *MORE.get(name, []), "--lr", 1e-4)
        succeed(*line, "--epochs", 1, "--no-curves")
    found = kind("trained.onnx").evaluate(str(data))
    told = as_json("eval", "trained.onnx", data)
    assert told["loss"] == pytest.approx(found.pop("loss"), rel=1e-5)
    assert {*told["metrics"]} == {*found}
    results = kind("trained.onnx").predict("trained.onnx", str(inputs))
    assert as_json("predict", "trained.onnx", inputs, "--output", "found")["rows"] == len(results)
