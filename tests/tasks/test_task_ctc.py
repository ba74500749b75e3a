"""Text recognition: the loss and decoding against PyTorch and all alignments; its files."""

from __future__ import annotations

import itertools
import os

import numpy as np
import onnxruntime as ort
import pytest

import onnxgrad as og
from onnxgrad.tasks.ctc import TextRecognition
from tests.support.combinations import parametrize_chosen
from tests.support.errors import naming
from tests.support.models import initializer_arrays
from tests.support.running import run
from tests.support.small_models import float32_model

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("rapidfuzz")

HEIGHT, FEATURES = 8, 16
ABC = list("abcdé ")
LAYOUTS = {  # from (N, T, C): nodes, declared output
    "rows first": ("y = Identity(p)", "N,T,C"),
    "time first": ("y = Transpose<perm=[1,0,2]>(p)", "T,N,C"),
    "classes before time": ("y = Transpose<perm=[0,2,1]>(p)", "N,C,T"),
}
ENDS = {"scores": "Identity", "shares": "Softmax<axis=2>", "logarithms": "LogSoftmax<axis=2>"}


def recognizer(layout="rows first", end="scores", classes=7, channels=1, width="W"):
    """Return a model with a step for every two columns of pixels, and its weights."""
    rng = np.random.default_rng(0)
    nodes, shape = LAYOUTS[layout]
    weights = {
        "k": rng.normal(size=(FEATURES, channels, HEIGHT, 2)) / 4,
        "w": rng.normal(size=(FEATURES, classes)),
        "b": rng.normal(size=classes),
    }
    text = f"""f (float[N,{channels},{HEIGHT},{width}] x) => (float[{shape}] y)
        <int64[1] two = {{2}}> {{
        c = Conv<strides=[1, 2]>(x, k)  r = Tanh(c)  s = Squeeze(r, two)
        t = Transpose<perm=[0,2,1]>(s)  m = MatMul(t, w)  h = Add(m, b)  p = {ENDS[end]}(h)
        {nodes} }}"""
    return float32_model(
        text.replace("C]", f"{classes}]").replace(",C,", f",{classes},"), **weights
    )


def random_lines(seed, widths=(20, 13, 40, 9), letters="abcdé ", channels=1):
    """Return random images, and texts that fit into half their width."""
    rng = np.random.default_rng(seed)
    size = (HEIGHT, 3) if channels == 3 else (HEIGHT,)
    rows = []
    for width in widths:
        image = rng.integers(0, 256, (size[0], width, *size[1:]), dtype=np.uint8)
        rows.append((image, "".join(rng.choice([*letters], rng.integers(1, width // 4 + 1)))))
    return rows


def pixel_values(image):
    return np.float32(image) / 255 / 0.5 - 1


@pytest.mark.parametrize("states", [True, False])
def test_time_first_from_a_reader(states):
    """Batches of several widths, of a model whose first axis is time; -1 is any length."""
    rows, classes = random_lines(2, widths=(20, 13, 40, 9, 26)), ["", *ABC]
    model = recognizer("time first")
    model.graph.input[0].type.tensor_type.shape.dim[3].dim_value = -1
    if not states:
        model.graph.output[0].type.tensor_type.ClearField("shape")
    task = TextRecognition(model, rows, dictionary=ABC)
    trainer = task.trainer(learning_rate=0.01)
    measured = [trainer.evaluate(task.data, batch_size=size) for size in (2, 3, 5)]
    loss, _ = torch_loss(model, rows, classes, 0)
    for each in measured:
        assert each["loss"] == pytest.approx(loss, rel=1e-5)
        assert each["cer"] == pytest.approx(measured[0]["cer"])
    trainer.fit(task.data, validation=task.data, epochs=4, batch_size=2)
    assert trainer.history[-1]["loss"] < loss


# -- the loss --------------------------------------------------------------------------------------


def torch_loss(model, rows, classes, blank):
    """Return the mean loss of rows, each without padding, and its gradient w.r.t. w and b."""
    torch = pytest.importorskip("torch")
    named = initializer_arrays(model)
    names = ["head.weight", "head.bias"] if "head.weight" in named else ["w", "b"]
    k, w, b = (torch.tensor(named[n], dtype=torch.float64) for n in ("k", *names))
    for leaf in (w, b):
        leaf.requires_grad_()
    losses = []
    for image, text in rows:
        x = torch.tensor(pixel_values(image), dtype=torch.float64)[None, None]
        features = torch.tanh(torch.nn.functional.conv2d(x, k, stride=(1, 2)))[0, :, 0].T
        log_p = torch.log_softmax(features @ w + b, 1)
        target = torch.tensor([classes.index(c) for c in text])
        lengths = torch.tensor(len(log_p)), torch.tensor(len(target))
        losses.append(
            torch.nn.functional.ctc_loss(log_p, target, *lengths, blank, reduction="none")
        )
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), {name: leaf.grad.numpy() for name, leaf in zip(names, (w, b), strict=True)}


FIRST, MINUS, NEW = (0, "abcdé "), (-1, "abcdé "), (0, "abxyé")  # the blank, and letters


@parametrize_chosen(
    "layout end blank_and_letters",
    [
        ("rows first", "scores", NEW),
        ("time first", "shares", FIRST),
        ("classes before time", "logarithms", MINUS),
        ("time first", "scores", NEW),
    ],
    *(LAYOUTS, ENDS, (FIRST, MINUS, NEW)),
)
def test_loss_and_gradient(layout, end, blank_and_letters):
    """Those of PyTorch for each row without padding; x and y are new characters."""
    blank, letters = blank_and_letters
    rows = random_lines(1, letters=letters)
    model = recognizer(layout, end)
    task = TextRecognition(model, rows, dictionary=ABC, blank=blank, extend=True)
    assert len(task.classes) == len({*ABC, *letters}) + 1
    trainer = task.trainer(optimizer="sgd", learning_rate=1.0)
    before = initializer_arrays(trainer.model)
    loss, gradient = torch_loss(task.model, rows, list(task.classes), blank % len(task.classes))
    assert trainer.evaluate(task.data)["loss"] == pytest.approx(loss, rel=1e-5)
    trainer.fit(task.data, batch_size=len(rows))
    assert trainer.history[0]["loss"] == pytest.approx(loss, rel=1e-5)
    after = initializer_arrays(trainer.model)
    for name, expected in gradient.items():
        got = before[name] - after[name]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * abs(expected).max())


def test_a_model_of_one_width():
    rows = random_lines(2, widths=(20, 40, 60))
    task = TextRecognition(recognizer(width="48"), rows, dictionary=ABC)
    X, y, _ = next(task.data.batches(3, None, 0))
    assert X.shape == (3, 1, HEIGHT, 48)
    assert y[:, 0].tolist() == [24] * 3
    np.testing.assert_allclose(X[0, 0, :, :20], pixel_values(rows[0][0]), rtol=1e-5, atol=1e-6)
    assert not X[0, :, :, 20:].any()
    assert len(task.predict(task.model, [image for image, _ in rows])) == 3


def test_time_first_with_a_batch_of_one():
    """As CRNN is exported; the file states nothing else of its output."""
    rows, classes = random_lines(2), ["", *ABC]
    model = recognizer("time first")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    model.graph.output[0].type.tensor_type.ClearField("shape")
    task = TextRecognition(model, rows, dictionary=ABC)
    trainer = task.trainer()
    loss, _ = torch_loss(model, rows, classes, 0)
    measured = trainer.evaluate(task.data)
    assert measured["loss"] == pytest.approx(loss, rel=1e-5)
    found = task.predict(trainer, [image for image, _ in rows])
    metric = og.metrics.TextErrorRate(lambda p, y: ([*p], [*y]))
    metric.begin(og.metrics.PredictionInfo())
    metric.update(*(np.array(t) for t in ([t for t, _ in found], [t for _, t in rows])))
    assert measured["cer"] == pytest.approx(metric.compute())
    trainer.fit(task.data, epochs=2)
    assert trainer.history[1]["loss"] < trainer.history[0]["loss"]


def test_normalization_by_name_is_remembered():
    rows = random_lines(3)
    by_name, by_numbers = (
        TextRecognition(recognizer(), rows, dictionary=ABC, **given)
        for given in ({"normalize": "0.4/0.25"}, {"mean": 0.4, "std": 0.25})
    )
    again = TextRecognition(by_name.model)
    expected = next(by_numbers.data.batches(4, None, 0))[0]
    for task in (by_name, again):
        np.testing.assert_array_equal(next(task.read(rows).batches(4, None, 0))[0], expected)
    with pytest.raises(ValueError, match=naming("normalize", "imagenet")):
        TextRecognition(recognizer(), rows, dictionary=ABC, normalize="imagnet")


def test_colors_are_in_the_order_of_opencv():
    image = np.zeros((HEIGHT, HEIGHT, 3), np.uint8)
    image[..., 0] = 255  # red
    for colors, expected in (None, [-1, -1, 1]), ("RGB", [1, -1, -1]):
        model = recognizer(channels=3)
        task = TextRecognition(model, [(image, "a")], dictionary=ABC, colors=colors)
        X, *_ = next(task.data.batches(1, None, 0))
        np.testing.assert_allclose(X[0, :, 0, 0], expected, rtol=1e-6)


# -- dictionaries ----------------------------------------------------------------------------------


def test_new_characters_leave_the_others_alone(tmp_path):
    """Before training, the scores of old classes are those of before; the space stays last."""
    model = recognizer()
    model.metadata_props.add(key="character", value="a\nb\nc\nd\né")
    images = [image for image, _ in random_lines(3)]
    old = TextRecognition(model)
    assert old.model is model
    assert old.classes == ["", *ABC]
    task = TextRecognition(model, extend="xÅ")
    assert task.classes == ["", *"abcdé", "x", "Å", " "]
    at = [0, 1, 2, 3, 4, 5, 8]
    for image in images:
        x = pixel_values(image)[None, None]
        before, after = run(model, x=x)[0], run(task.model, x=x)[0]
        np.testing.assert_array_equal(after[..., at], before)
    kept = initializer_arrays(task.model)["head.weight"]
    np.testing.assert_array_equal(kept[:, at], initializer_arrays(model)["w"])
    file = tmp_path / "more.onnx"
    og.save(task.model, file)
    again = TextRecognition(file)
    assert again.classes == task.classes
    assert {e.key: e.value for e in again.model.metadata_props}[
        "character"
    ] == "a\nb\nc\nd\né\nx\nÅ"
    assert again.predict(file, images) == task.predict(task.model, images)


@pytest.mark.parametrize(
    ("characters", "blank", "classes"),
    [
        (["a", "b"], None, ["", "a", "b", " "]),
        (["a", "b", "c"], None, ["", "a", "b", "c"]),
        (["a", "b", "c"], -1, ["a", "b", "c", ""]),
        (["a", "blank", "b", "c"], None, ["a", "", "b", "c"]),
        (["", "b", "c", " "], None, ["", "b", "c", " "]),
        (["#", "b", "c", "d"], 0, ["", "b", "c", "d"]),
    ],
)
def test_dictionaries(characters, blank, classes, tmp_path):
    file = tmp_path / "dictionary.txt"
    file.write_text("\n".join(characters) + "\n", encoding="utf-8")
    for dictionary in characters, file:
        task = TextRecognition(recognizer(classes=4), dictionary=dictionary, blank=blank)
        assert task.classes == classes
        assert TextRecognition(task.model).classes == classes  # by its metadata
        more = TextRecognition(task.model, extend="z")
        assert TextRecognition(more.model).classes == more.classes
        assert {*more.classes} == {*classes, "z"}


# -- files -----------------------------------------------------------------------------------------


@pytest.fixture
def folder_of_lines(tmp_path):
    """Return a folder with images and their texts in all forms, and a model for them."""
    rows = random_lines(4)
    listed, table = [], ["file,text"]
    for number, (image, text) in enumerate(rows):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text(text + "\n", encoding="utf-8")
        listed.append(f"{tmp_path.name}/{number}.png\t{text}\n")
        table.append(f'{tmp_path.name}/{number}.png,"{text}"')
    (tmp_path.parent / "labels.tsv").write_text("".join(listed), encoding="utf-8")
    (tmp_path.parent / "labels.csv").write_text("\n".join(table), encoding="utf-8")
    return tmp_path


def test_all_files_say_the_same(folder_of_lines):
    rows = random_lines(4)
    task = TextRecognition(recognizer(), rows, dictionary=ABC)
    expected = next(task.data.batches(4, None, 0))
    for path in (
        folder_of_lines,
        folder_of_lines.parent / "labels.tsv",
        folder_of_lines.parent / "labels.csv",
    ):
        X, y, _ = next(task.read(path).batches(4, None, 0))
        np.testing.assert_array_equal(X, expected[0])
        np.testing.assert_array_equal(y, expected[1])
    assert (expected[1][:, 1:] == -100).any()
    for row, (image, text) in zip(expected[1], rows, strict=True):
        assert "".join(task.classes[i] for i in row[1:] if i >= 0) == text
        assert row[0] == image.shape[1] // 2


def test_images_are_resized_to_the_height(tmp_path):
    Image.new("RGBA", (30, 16), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.new("L", (100, 40), 255).save(tmp_path / "wide.jpg")
    Image.new("L", (4, 40), 255).save(tmp_path / "high.png")
    for name in "clear", "wide", "high":
        (tmp_path / f"{name}.txt").write_text("a")
    task = TextRecognition(recognizer(), tmp_path, dictionary=ABC)
    X, y, _ = next(task.data.batches(3, None, 0))
    assert y[:, 0].tolist() == [15 // 2, HEIGHT // 2, 20 // 2]  # clear, high, wide
    assert X.shape == (3, 1, HEIGHT, 20)
    assert (X[0, 0, :, :15] == 1).all(), "what is transparent is white"
    assert (X[1, 0, :, 0] == 1).all()
    assert not X[1, 0, :, 1:].any()


def test_what_does_not_fit(folder_of_lines):
    image = np.zeros((HEIGHT, 8), np.uint8)
    task = TextRecognition(recognizer(), dictionary=ABC)
    (folder_of_lines / "0.txt").write_text("Zürich")
    for data, words in (
        (folder_of_lines, r"0\.png'.*\['Z', 'h', 'i', 'r', 'ü'\].*extend=True"),
        ([(image, "aabb")], r"4 time.*'aabb'.* 6"),
        ([(image, "a\nb")], "several lines"),
        ([], "no rows"),
        ([(np.zeros((4, 4), np.int32), "a")], "8 bits"),
        (folder_of_lines.parent / "nothing.csv", "nothing.csv"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            task.read(data)
    for name, content, words in (
        ("bad.csv", "image,text\na,b\n", r"not \['image', 'text'\]"),
        ("bad.txt", "0.png\ta\n1.png a\n", "line 2 of .*bad.txt"),
        ("gone.txt", "gone.png\ta\n", "gone.png.*gone.txt"),
        ("broken.txt", "gone.txt\ta\n", "image .*gone.txt"),
    ):
        (folder_of_lines / name).write_text(content)
        with pytest.raises(ValueError, match=words):
            task.read(folder_of_lines / name)
    with pytest.raises(ValueError, match=naming("bad.txt", "image")):
        task.read(folder_of_lines)
    (folder_of_lines / "1.txt").unlink()
    with pytest.raises(ValueError, match=naming("1.png", "1.txt")):
        task.read(folder_of_lines)


def test_models_and_options_that_do_not_fit():
    two_inputs = float32_model("f (float[N,2] x, float[N,2] z) => (float[N,2] y) { y = Add(x, z) }")
    for model, options, words in (
        (two_inputs, {"dictionary": ABC}, r"\(N, channels, height, width\)"),
        (recognizer(), {}, "metadata 'character'"),
        (recognizer(), {"dictionary": ["a"]}, "the 1 characters of the dictionary"),
        (recognizer(), {"dictionary": [*ABC, "ß"]}, "7 characters.*blank"),
        (recognizer(), {"dictionary": ABC, "blank": 7}, "blank=7.* 7 classes"),
        (recognizer(), {"dictionary": ABC, "height": 32}, "height= is for another shape"),
        (recognizer(), {"dictionary": ABC, "colors": "RGB"}, "colors= is for another shape"),
        (recognizer(), {"dictionary": ABC, "colors": "gray"}, "'BGR', 'RGB' or 'L'"),
        (recognizer(), {"dictionary": ABC, "extend": True}, "extend=True"),
    ):
        with pytest.raises(ValueError, match=words):
            TextRecognition(model, **options)


# -- decoding and metrics --------------------------------------------------------------------------


def test_a_wide_beam_finds_the_most_likely_labels():
    rng, count = np.random.default_rng(0), 0
    for steps, classes in itertools.product(range(1, 7), (2, 3, 4)):
        for _ in range(2):
            log_p, blank = rng.normal(size=(steps, classes)) * 2, int(rng.integers(classes))
            log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
            likely: dict[tuple[int, ...], float] = {}
            for path in itertools.product(range(classes), repeat=steps):
                labels = tuple(c for c, _ in itertools.groupby(path) if c != blank)
                p = np.exp(log_p[np.arange(steps), path].sum())
                likely[labels] = likely.get(labels, 0.0) + p
            best = max(likely, key=lambda labels: likely[labels])
            labels, p = og.language.ctc_decode(log_p, blank, beam=10_000)
            assert tuple(labels) == best
            assert p == pytest.approx(likely[best], rel=1e-9)
            count += 1
    assert count == 36
    with pytest.raises(ValueError, match=naming("beam", "0")):
        og.language.ctc_decode(log_p, beam=0)


def test_the_best_path():
    rng = np.random.default_rng(0)
    for _ in range(20):
        log_p = np.log(rng.dirichlet(np.ones(4), size=12))
        best = log_p.argmax(1)
        expected = [int(c) for c, _ in itertools.groupby(best) if c != 2]
        first = [i for i in range(12) if best[i] != 2 and (i == 0 or best[i] != best[i - 1])]
        labels, sure = og.language.ctc_decode(log_p, 2)
        assert labels == expected
        assert sure == pytest.approx(np.exp(log_p.max(1))[first].mean())


# -- predictions -----------------------------------------------------------------------------------


@parametrize_chosen(
    "layout end",
    [("rows first", "shares"), ("time first", "logarithms"), ("classes before time", "scores")],
    *(LAYOUTS, ENDS),
)
def test_predictions_are_those_of_the_file(layout, end, folder_of_lines):
    """Each image by itself, decoded here; the metrics are of the same texts."""
    task = TextRecognition(recognizer(layout, end), folder_of_lines, dictionary=ABC)
    trainer = task.trainer(learning_rate=0.01).fit(task.data, epochs=2, batch_size=2)
    file = folder_of_lines / "trained.onnx"
    trainer.save(file)
    session, rows, texts = ort.InferenceSession(str(file)), random_lines(4), []
    axes = {"rows first": (0, 1, 2), "time first": (1, 0, 2), "classes before time": (0, 2, 1)}
    for image, _ in rows:
        y = session.run(None, {"x": pixel_values(image)[None, None]})[0].transpose(axes[layout])[0]
        best = [c for c, _ in itertools.groupby(y.argmax(1)) if c]
        texts.append("".join(["", *ABC][c] for c in best))
    results = task.predict(trainer, folder_of_lines)
    assert [text for text, _ in results] == texts
    assert all(0 < sure <= 1 for _, sure in results)
    assert task.predict(file, [image for image, _ in rows]) == results
    measured = trainer.evaluate(task.data)
    pairs = list(zip(texts, (text for _, text in rows), strict=True))
    for metric in task.metrics:
        metric.read = lambda found, truths: ([*found], [*truths])
        metric.begin(og.metrics.PredictionInfo())
        metric.update(*map(np.array, zip(*pairs, strict=True)))
        assert measured[metric.name] == pytest.approx(metric.compute())
    [written] = task.write(folder_of_lines, results, folder_of_lines / "out")
    lines = [line.split("\t") for line in written.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [(name, text) for name, text, _ in lines] == [
        (str(folder_of_lines / f"{i}.png"), text) for i, text in enumerate(texts)
    ]


def test_training_reads_what_it_was_shown():
    """Bars of four heights are four letters, one of them new."""
    rng, letters = np.random.default_rng(0), "abcx"

    def rows(count):
        for _ in range(count):
            text = "".join(rng.choice([*letters], 3))
            image = np.full((HEIGHT, 4 * len(text)), 255, np.uint8)
            for i, c in enumerate(text):
                image[2 * letters.index(c) : 2 * letters.index(c) + 2, 4 * i : 4 * i + 2] = 0
            yield image, text

    task = TextRecognition(recognizer(), list(rows(60)), dictionary=ABC, extend=True)
    others = task.read(list(rows(30)))
    trainer = task.trainer(learning_rate=0.02)
    before = trainer.evaluate(others)["cer"]
    trainer.fit(task.data, epochs=15, batch_size=10, validation=others)
    assert trainer.history[-1]["validation_cer"] < 0.05 < 0.5 < before


# -- published -------------------------------------------------------------------------------------


@pytest.mark.real
def test_published_recognizer(tmp_path):
    """PaddleOCR's reads what is drawn, also with a new character, before any training."""
    if os.environ.get("ONNXGRAD_MODELS") != "download":
        pytest.skip("ONNXGRAD_MODELS=download takes it from its wheel")
    from PIL import ImageDraw, ImageFont
    from published import UnavailableError, fetched

    try:
        path = fetched("paddleocr-rec")
    except UnavailableError as e:
        pytest.skip(str(e))
    texts = ["Reading 0042", "1234.56", "14:05 Berlin"]
    for number, text in enumerate(texts):
        image = Image.new("RGB", (14 * len(text) + 20, 40), "white")
        ImageDraw.Draw(image).text((8, 4), text, "black", ImageFont.load_default(26))
        image.save(tmp_path / f"{number}.png")
    for task in TextRecognition(path), TextRecognition(path, extend="£ß"):
        assert [text for text, _ in task.predict(task.model, tmp_path)] == texts
