"""Readers of tasks in a `Trainer` without a task."""

import json

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad.language.tokenizer import Tokenizer
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.sound_files import folder_of_tones

PIL = pytest.importorskip("PIL.Image")
tokenizers = pytest.importorskip("tokenizers")


def word_tokenizer():
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "red": 1, "one": 2, "[PAD]": 3}, "[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_padding(length=9)
    made.enable_truncation(1)
    return made


def test_special_tokens_that_the_vocabulary_lacks_are_those_of_the_given_numbers():
    special = {"pad": "[PAD]", "eos": "gone"}
    made = Tokenizer(word_tokenizer(), special, ids={"pad": 7, "eos": 2, "bos": None})
    assert (made.pad_id, made.eos_id, made.bos_id, made.fill_id) == (3, 2, None, 3)
    assert (made.size, made.max_length) == (4, 1)


def test_boxes(tmp_path):
    """The size is that of the model; what the reader flips, it flips with the boxes."""
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[4:8, :16] = 255
    PIL.fromarray(pixels).save(tmp_path / "a.png")
    notes = [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 4, 16, 4]}]
    content = {"images": [{"id": 1, "file_name": "a.png", "width": 32, "height": 16}],
               "annotations": notes, "categories": [{"id": 1, "name": "bar"}]}  # fmt: skip
    (tmp_path / "instances.json").write_text(json.dumps(content))
    reader = og.data.annotated_images(tmp_path, transforms=[og.data.random_flip(1.0)])
    with pytest.raises(ValueError, match="pass size="):
        reader.take(np.array([0]), None)
    with pytest.raises(ValueError, match=r"instances\.json.*no part 'val'"):
        og.data.annotated_images(tmp_path, part="val")
    bound = reader.for_inputs({"x": ("N", 3, 16, 16)})
    for seed, expected in ((None, [0, 0, 6, 8, 8]), (1, [0, 8, 6, 16, 8])):
        [image], [[label]] = bound.take(np.array([0]), seed)
        np.testing.assert_allclose(label, expected)
        bright = image[0, 6:8] > 0.6
        assert bright[:, int(label[1]) : int(label[3])].all()
    assert reader.describe() != bound.describe()


def test_masks(tmp_path):
    for part in ("images", "masks"):
        (tmp_path / part).mkdir()
    mask = np.zeros((8, 8), np.uint8)
    mask[:, 4:] = 1
    mask[0, 0] = 255
    PIL.fromarray(mask).save(tmp_path / "masks" / "a.png")
    PIL.fromarray(np.where(mask == 1, 255, 0).astype(np.uint8)).save(tmp_path / "images" / "a.png")
    reader = og.data.masked_images(tmp_path, 8, [og.data.random_flip(1.0)], channels=1)
    assert reader.classes == ["0", "1"]
    for seed, turn in ((None, 1), (1, -1)):
        [image], [label] = reader.take(np.array([0]), seed)
        np.testing.assert_array_equal(label[:, ::turn], np.where(mask == 255, -100, np.int64(mask)))
        np.testing.assert_array_equal(image[0] == 1, label == 1)
    model = parse_model("f (float[N,1,8,8] x) => (float[N,2,8,8] y) { y = Conv(x, w) }",
                  w=np.zeros((2, 1, 1, 1), np.float32))  # fmt: skip
    trainer = og.Trainer(model, loss="cross_entropy", metrics=["iou"], learning_rate=0.5)
    assert trainer.fit(reader, epochs=20).evaluate(reader)["iou"] == pytest.approx(1.0)


def test_sounds(tmp_path):
    reader = og.data.sound_folder(folder_of_tones(tmp_path), rate=4000, seconds=0.25, shift=0.01)
    assert len(reader.classes) == 3
    units = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32) / 100
    model = parse_model("f (float[N,1000] x) => (float[N,3] y) { y = MatMul(x, w) }", w=units)
    trainer = og.Trainer(model, loss="cross_entropy", learning_rate=0.003)
    before = trainer.evaluate(reader)["loss"]
    assert trainer.fit(reader, epochs=10, batch_size=4).evaluate(reader)["loss"] < before


def test_labeled_texts():
    """The tokenizer that is passed stays as it is."""
    own = word_tokenizer()
    rows = [{"tokens": ["red", "one"], "tags": ["COL", "O"]}, {"tokens": ["one"], "tags": ["O"]}]
    reader = og.language.labeled_texts(rows, own, max_length=8)
    X, labels, _ = next(reader.batches(2, None, 0))
    assert (X["input_ids"].tolist(), labels.tolist()) == ([[1, 2], [2, 3]], [[1, 0], [0, -100]])
    assert own.truncation["max_length"] == 1
    assert own.padding["length"] == 9
    found = og.language.labeled_texts(["one", "red  red", ""], own, reader.classes, 8, labels=False)
    batches = [np.eye(4)[X["input_ids"]] for X, *_ in found.batches(1, None, 0)]
    assert [w.argmax(1).tolist() for w in found.of_words(batches)] == [[2], [1, 1], []]
    part = reader.subset(np.array([1]))
    assert (part.rows, next(part.batches(2, None, 0))[1].tolist()) == (1, [[0]])


def test_entities_label_the_words_that_they_touch():
    """Not its neighbors, which it reaches; one that ends in a word is warned of."""
    row = {"text": "red one red one", "entities": [{"start": 3, "end": 8, "label": "NUM"}]}
    words = word_tokenizer()
    reader = og.language.labeled_texts([row], words, max_length=8)
    assert reader.classes == ["O", "B-NUM", "I-NUM"]
    assert next(reader.batches(1, None, 0))[1].tolist() == [[0, 1, 0, 0]]
    row["entities"] += [{"start": 9, "end": 14, "label": "NUM"}]
    with pytest.warns(UserWarning, match="1 entities"):
        reader = og.language.labeled_texts([row], words, max_length=8)
    assert next(reader.batches(1, None, 0))[1].tolist() == [[0, 1, 1, 2]]
    for start, end, part in ((3, 4, "no word"), (0, 5, "overlaps")):
        rows = [row | {"entities": [*row["entities"], {"start": start, "end": end, "label": "X"}]}]
        with pytest.raises(ValueError, match=naming("row 0", part)):
            og.language.labeled_texts(rows, words)
    with pytest.raises(ValueError, match=naming("row 0", "labels")):
        og.language.labeled_texts(["red"], words, ["O"])


@pytest.mark.parametrize("source", ["pairs", "texts"])
def test_some_rows_of_paired_texts(source):
    texts = ["red", "one", "red one"]
    rows = [{"anchor": t, "positive": "one", "negative": "red red"} for t in texts]
    reader = og.language.paired_texts(rows if source == "pairs" else texts, word_tokenizer())
    part = reader.subset(np.array([2, 0]))
    assert (part.rows, reader.rows) == (2, 3)
    assert part.describe() != reader.describe()
    [found] = part.batches(2, None, 0)
    expected = reader.take(np.array([2, 0]), None)
    for a, b in zip(found, expected, strict=True):
        for name in a if isinstance(a, dict) else ():
            np.testing.assert_array_equal(a[name], b[name])
    if source == "texts":
        assert (len(found), part.labels, part.kind) == (1, None, "texts")
    else:
        assert found[1].tolist() == part.labels.tolist() == [2, 2, 11, 0, 0, 5]


def test_paired_texts():
    rows = [{"anchor": "red", "positive": "one one", "score": "0.5"}]
    reader = og.language.paired_texts(rows, word_tokenizer(), max_length=4).for_inputs(
        {"input_ids": ("N", 5), "attention_mask": ("N", 5)}
    )
    assert rows[0]["score"] == "0.5"
    X, labels = next(reader.batches(1, None, 0))
    assert X["input_ids"].tolist() == [[1, 3, 3, 3, 3], [2, 2, 3, 3, 3]]
    assert X["attention_mask"].sum(1).tolist() == [1, 2]
    assert (labels.tolist(), reader.kind) == ([0.5, 0.5], "scores")
    with pytest.raises(ValueError, match=r"no text: .* add one"):
        og.language.paired_texts([], word_tokenizer())
