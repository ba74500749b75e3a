"""`tasks.embeddings`: texts that belong together, pairs with scores, and classes."""

from __future__ import annotations

import csv
import json

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.tasks.embeddings import Embeddings
from tests.support.errors import naming
from tests.support.models import initializer_arrays, parse_model
from tests.support.running import in_sweep, run, run_named

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[PAD]", "[UNK]", *"red green blue cold dry wet rot gruen blau kalt trocken nass".split()]
SLANG = dict(zip(WORDS[2:8], WORDS[8:], strict=True))
RNG = np.random.default_rng(0)
SPACED = """
    f (int64[N,T] input_ids, int32[N,T] attention_mask, int64[N,T] token_type_ids)
        => (float[N,T,8] tokens, float[N,8] sentence) <int64[1] one = {1}, int64[1] two = {2}> {
    e = Gather(table, input_ids)  k = Gather(kinds, token_type_ids)  s = Add(e, k)
    tokens = Tanh(s)
    m = Cast <to = 1> (attention_mask)  c = Unsqueeze(m, two)
    t = Mul(tokens, c)  u = ReduceSum <keepdims = 0> (t, one)
    v = ReduceSum <keepdims = 1> (m, one)  sentence = Div(u, v) }
"""


def random_encoder(text, **shapes):
    """Return the model of a text with random weights of these shapes."""
    weights = {
        name: np.random.default_rng(len(name)).normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    model = parse_model(text, opset=20, **weights)
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.fixture
def folder_of_encoder(tmp_path):
    """A folder with an encoder of words and its tokenizer."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    onnx.save(random_encoder(SPACED, table=(14, 8), kinds=(2, 8)), tmp_path / "model.onnx")
    return tmp_path


def write_rows(path, header, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def translated_pairs():
    """Return pairs of English and German words, in random order."""
    pairs = [
        (f"{a} {b}", f"{SLANG[b]} {SLANG[a]}") for a in WORDS[2:8] for b in WORDS[2:8] if a != b
    ]
    return [pairs[i] for i in np.random.default_rng(1).permutation(len(pairs))]


def node_names(model):
    """Return the operator, the inputs and the outputs of each node."""
    return [(n.op_type, list(n.input), list(n.output)) for n in model.graph.node]


def unit_embeddings(model, output, feed):
    z = run_named(model, feed)[output]
    return z / np.linalg.norm(z, axis=1, keepdims=True)


# -- texts


def test_search(folder_of_encoder):
    """Words of another language are found after training, in sentences that were not trained on."""
    pairs = translated_pairs()
    train = write_rows(folder_of_encoder / "train.csv", ["anchor", "positive"], pairs[8:])
    test = write_rows(folder_of_encoder / "test.csv", ["anchor", "positive"], pairs[:8])
    task = Embeddings(folder_of_encoder / "model.onnx", train)
    assert (task.output, task.loss) == ("sentence", {"sentence": "multiple_negatives"})
    trainer = task.trainer(optimizer="adam", learning_rate=0.05, seed=0)
    held_out = task.read(test)
    before = trainer.evaluate(held_out)
    trainer.fit(task.data, epochs=15, batch_size=8, validation=held_out)
    after = trainer.evaluate(held_out)
    assert before["query_recall_at_1"] < 0.5 < 0.8 < after["query_recall_at_1"]
    assert node_names(trainer.model) == node_names(task.model)
    texts = [pair[0] for pair in pairs]
    z = task.predict(trainer, texts)
    trainer.save(folder_of_encoder / "new.onnx")
    np.testing.assert_array_equal(task.predict(folder_of_encoder / "new.onnx", texts), z)
    ids = np.array([[WORDS.index(word) for word in text.split()] for text in texts])
    ones = np.ones_like(ids, np.int32)
    feed = {"input_ids": ids, "attention_mask": ones, "token_type_ids": 0 * ids}
    np.testing.assert_allclose(
        unit_embeddings(trainer.model, "sentence", feed), z, rtol=1e-5, atol=1e-7
    )
    np.testing.assert_array_equal(
        Embeddings(folder_of_encoder / "new.onnx").predict(trainer.model, texts), z
    )


def test_one_step_is_that_of_torch(folder_of_encoder):
    """In-batch and hard negatives, of texts of different length, by gradient descent."""
    torch = pytest.importorskip("torch")
    rows = [
        ("red wet", "rot nass", "blau"),
        ("blue", "blau", "rot kalt nass"),
        ("dry", "nass", "x"),
    ]
    path = write_rows(folder_of_encoder / "train.csv", ["anchor", "positive", "negative"], rows)
    task = Embeddings(folder_of_encoder / "model.onnx", path, loss_options={"scale": 5.0})
    trainer = task.trainer(optimizer="sgd", learning_rate=0.5)
    trainer.fit(task.data, epochs=1, batch_size=3)
    tensors = initializer_arrays(task.model)
    table, kinds = (torch.tensor(tensors[n], requires_grad=True) for n in ("table", "kinds"))
    words = {w: i for i, w in enumerate(WORDS)}

    def encode(text):
        ids = [words.get(word, 1) for word in text.split()]
        return torch.nn.functional.normalize(torch.tanh(table[ids] + kinds[0]).mean(0), dim=0)

    a, b, c = (torch.stack([encode(text) for text in column]) for column in zip(*rows, strict=True))
    loss = torch.nn.functional.cross_entropy(5 * a @ torch.cat([b, c]).T, torch.arange(3))
    loss.backward()
    assert trainer.history[-1]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, tensor in (("table", table), ("kinds", kinds)):
        expected = (tensor - 0.5 * tensor.grad).detach().numpy()
        np.testing.assert_allclose(trainer.state.weights[name], expected, rtol=1e-5, atol=1e-6)


def test_rows_and_labels_of_texts(folder_of_encoder):
    """Texts of a row follow each other; rows of one anchor share a label, negatives share none."""
    rows = [
        {"anchor": "red", "positive": "rot", "negative": "blau nass", "source": 1},
        {"anchor": "dry wet", "positive": "nass", "negative": "kalt", "source": 2},
        {"anchor": "red", "positive": "nass", "negative": "kalt", "source": 3},
    ]
    path = folder_of_encoder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    data = Embeddings(folder_of_encoder / "model.onnx", path).data
    X, labels = next(data.batches(3, None, 0))
    word = {w: i for i, w in enumerate(WORDS)}
    texts = [row[n] for row in rows for n in ("anchor", "positive", "negative")]
    ids = [[word[w] for w in text.split()] for text in texts]
    np.testing.assert_array_equal(X["input_ids"], [[*i, *[0] * (2 - len(i))] for i in ids])
    np.testing.assert_array_equal(X["attention_mask"], X["input_ids"] > 0)
    assert X.keys() == {"input_ids", "attention_mask", "token_type_ids"}
    a, b, c = labels.reshape(3, 3).T
    assert a.tolist() == b.tolist() == [a[0], a[1], a[0]]
    assert len({*a, *c}) == 5
    (part, own), *_ = data.subset(np.array([1])).batches(5, 3, 0)
    np.testing.assert_array_equal(part["input_ids"], X["input_ids"][3:6])
    np.testing.assert_array_equal(own, labels[3:6])
    assert data.describe() != data.subset(np.array([0, 1])).describe()


def test_scores_of_pairs(folder_of_encoder):
    stats = pytest.importorskip("scipy.stats")
    pairs = [(a, b, 1.0 if SLANG[a] == b else 0.2) for a in WORDS[2:8] for b in WORDS[8:]]
    path = write_rows(folder_of_encoder / "pairs.csv", ["anchor", "positive", "score"], pairs)
    task = Embeddings(folder_of_encoder / "model.onnx", path)
    trainer = task.trainer(optimizer="adam", learning_rate=0.05)
    before = trainer.evaluate(task.data)
    after = trainer.fit(task.data, epochs=10, batch_size=6).evaluate(task.data, batch_size=5)
    assert before["cosine_spearman"] < 0.4 < 0.5 < after["cosine_spearman"]
    a, b = (task.predict(trainer, [pair[i] for pair in pairs]) for i in (0, 1))
    cosines = (a * b).sum(1)
    gold = np.array([pair[2] for pair in pairs])
    assert after["cosine_spearman"] == pytest.approx(stats.spearmanr(cosines, gold).statistic)
    assert after["loss"] == pytest.approx(((cosines - gold) ** 2).mean(), rel=1e-4)


@pytest.mark.parametrize("projection", [None, 3])
def test_token_embeddings_get_a_pool(folder_of_encoder, projection):
    """Padding does not count, and the nodes of the file stay."""
    model = random_encoder(
        SPACED.replace(", float[N,8] sentence", "").split("m = Cast")[0] + "}",
        table=(14, 8), kinds=(2, 8),
    )  # fmt: skip
    path = write_rows(
        folder_of_encoder / "rows.csv", ["anchor", "positive"], translated_pairs()[:4]
    )
    task = Embeddings(
        model, path, tokenizer=folder_of_encoder / "tokenizer.json", projection=projection, seed=3
    )
    assert node_names(task.model)[: len(model.graph.node)] == node_names(model)
    together = task.predict(task.model, ["red", "red blue wet cold"])
    alone = task.predict(task.model, ["red"])
    assert together.shape == (2, projection or 8)
    np.testing.assert_allclose(together[:1], alone, rtol=1e-5, atol=1e-6)
    trainer = task.trainer().fit(task.data, epochs=1)
    assert task.finished(trainer) is not None
    assert ("projection.weight" in trainer.state.weights) == bool(projection)


@pytest.mark.filterwarnings("ignore:.*attention_mask")
def test_vocabularies(tmp_path):
    """Of BERT, with and without capitals, which are seen by their words."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "red", "##dish", "blue"]
    text = "f (int64[N,4] input_ids) => (float[N,4,3] y) { y = Gather(e, input_ids) }"
    model = random_encoder(text, e=(9, 3))
    (tmp_path / "vocab.txt").write_text("\n".join([*words, "x"]))
    onnx.save(model, tmp_path / "model.onnx")
    path = write_rows(
        tmp_path / "a.csv", ["anchor", "positive"], [("Reddish", "blue red red blue")]
    )
    with pytest.warns(UserWarning, match="attention_mask"):
        Embeddings(tmp_path / "model.onnx", path)
    ids = next(Embeddings(tmp_path / "model.onnx", path).data.batches(1, None, 0))[0]["input_ids"]
    assert ids.tolist() == [[2, 4, 5, 3], [2, 6, 4, 3]]  # four tokens, as the model states
    (tmp_path / "vocab.txt").write_text("\n".join([*words, "Red"]))
    ids = next(Embeddings(tmp_path / "model.onnx", path).data.batches(1, None, 0))[0]["input_ids"]
    assert ids[0].tolist() == [2, 7, 5, 3]


def test_write(folder_of_encoder):
    task = Embeddings(folder_of_encoder / "model.onnx")
    texts = list(SLANG)
    z = task.predict(task.model, texts)
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, rtol=1e-6)
    stored, table = task.write(texts, z, folder_of_encoder / "index")
    np.testing.assert_array_equal(np.load(stored), z)
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 * 5
    for i, text in enumerate(texts):
        own = rows[5 * i : 5 * i + 5]
        cosines = z @ z[i]
        order = [j for j in np.argsort(-cosines) if j != i]
        assert [int(row["neighbor"]) for row in own] == order
        assert {(row["number"], row["id"]) for row in own} == {(str(i), text)}
        assert [row["neighbor_id"] for row in own] == [texts[j] for j in order]
        found = [float(row["cosine"]) for row in own]
        np.testing.assert_allclose(found, cosines[order], atol=1e-6)
    lines = folder_of_encoder / "texts.txt"
    lines.write_text("\n".join(texts))
    np.testing.assert_array_equal(task.predict(task.model, lines), z)
    assert task.write(lines, z, folder_of_encoder / "index")[1].read_text() == table.read_text()


# -- classes

LINEAR = """f (float[N,6] x) => (float[N,4] y) { h = MatMul(x, w)  y = MatMul(h, v) }
"""


def clouds(rows=12):
    """Return rows of four classes by two of six features; the others are noise."""
    rng, labels = np.random.default_rng(2), np.repeat(np.arange(4), rows)
    centers = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]])[labels]
    noise = 2 * rng.normal(size=(len(labels), 4))
    near = centers + 0.1 * rng.normal(size=centers.shape)
    return np.c_[near, noise].astype(np.float32), labels


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("contrastive", {}),
        ("arcface", {"scale": 16.0, "margin": 0.2}),
        in_sweep("triplet", {"mining": "semi-hard"}),
        in_sweep("multiple_negatives", {}),
        in_sweep("cosface", {"scale": 16.0}),
    ],
)
def test_metric_learning(loss, options):
    """New rows find those of their class, by an encoder without the centers of classes."""
    model = random_encoder(LINEAR, w=(6, 6), v=(6, 4))
    X, labels = clouds()
    task = Embeddings(model, (X, labels), loss=loss, loss_options=options, classes=4, rows=4)
    trainer = task.trainer(optimizer="adam", learning_rate=0.02, seed=1)
    new, own = clouds(30)
    hit_rate = og.Trainer(model, "contrastive", metrics=["hit_rate_at_1"])
    before = hit_rate.evaluate(new, own)["hit_rate_at_1"]
    trainer.fit(task.data, epochs=1, validation=0.2)  # classes have fewer than four rows in it
    trainer.fit(task.data, epochs=60)
    encoder = task.finished(trainer)
    assert node_names(encoder) == node_names(model)
    assert [y.name for y in encoder.graph.output] == ["y"]
    z = task.predict(trainer, new)
    np.testing.assert_allclose(unit_embeddings(encoder, "y", {"x": new}), z, rtol=1e-6)
    judge = og.Trainer(encoder, "contrastive", metrics=["hit_rate_at_1"])
    after = judge.evaluate(new, own)["hit_rate_at_1"]
    assert before < 0.6 < 0.8 < after
    if loss in ("arcface", "cosface"):
        assert [x.name for x in task.model.graph.output] == ["cosines"]
        assert "centers.weight" in trainer.state.weights
        assert trainer.evaluate(task.read((new, own)))["accuracy"] > 0.8


def test_one_step_of_arcface_is_that_of_torch():
    torch = pytest.importorskip("torch")
    model, (X, labels) = random_encoder(LINEAR, w=(6, 6), v=(6, 4)), clouds(3)
    task = Embeddings(model, (X, labels), loss="arcface", classes=4, rows=3)
    trainer = task.trainer(optimizer="sgd", learning_rate=0.01).fit(task.data, epochs=1)
    tensors = initializer_arrays(task.model)
    w, v, c = (
        torch.tensor(tensors[n], dtype=torch.float64, requires_grad=True)
        for n in ("w", "v", "centers.weight")
    )
    z = torch.nn.functional.normalize(torch.tensor(X, dtype=torch.float64) @ w @ v)
    cosine = z @ torch.nn.functional.normalize(c, dim=0)
    target = torch.tensor(labels)
    moved = (cosine.clamp(-1 + 1e-7, 1 - 1e-7).acos() + 0.5).cos()
    beyond = cosine <= -np.cos(0.5)
    moved = torch.where(beyond, cosine - 0.5 * np.sin(0.5), moved)
    hit = torch.nn.functional.one_hot(target, 4).bool()
    loss = torch.nn.functional.cross_entropy(64 * torch.where(hit, moved, cosine), target)
    loss.backward()
    assert trainer.history[-1]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, tensor in (("w", w), ("v", v), ("centers.weight", c)):
        expected = (tensor - 0.01 * tensor.grad).detach().numpy()
        np.testing.assert_allclose(trainer.state.weights[name], expected, rtol=1e-4, atol=1e-5)


def test_images(tmp_path):
    """Maps get a pool; classes are folders, and predictions are of them or of arrays."""
    image = pytest.importorskip("PIL.Image")
    for number, name in enumerate(["blue", "green", "red"]):
        (tmp_path / name).mkdir()
        for i in range(4):
            pixels = RNG.integers(0, 90, (8, 8, 3), np.uint8)
            pixels[..., 2 - number] += 60
            image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    text = "f (float[N,3,8,8] x) => (float[N,5,6,6] y) { y = Conv(x, w) }"
    model = random_encoder(text, w=(5, 3, 3, 3))
    options = {"images": {"size": 8}, "classes": 3, "rows": 2}
    task = Embeddings(model, tmp_path, loss="cosface", **options)
    assert task.classes == ["blue", "green", "red"]
    trainer = task.trainer(learning_rate=0.01).fit(task.data, epochs=2)
    z = task.predict(trainer, tmp_path)
    assert z.shape == (12, 5)
    pixels = next(
        og.data.image_folder(tmp_path, 8, layout="NCHW", channels=3).batches(12, None, 0)
    )[0]
    [maps] = run(model, x=pixels)
    means = maps.mean((2, 3))
    expected = means / np.linalg.norm(means, axis=1, keepdims=True)
    np.testing.assert_allclose(task.predict(task.model, tmp_path), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(task.predict(trainer, pixels), z, rtol=1e-5)
    table = task.write(tmp_path, z, tmp_path.with_name("out"))[1].read_text().splitlines()
    assert "0.png" in table[1]
    (tmp_path / "red").rename(tmp_path / "rouge")
    with pytest.raises(ValueError, match=naming("rouge", "the model")):
        task.read(tmp_path)


# -- what does not fit


def test_refuses(folder_of_encoder):
    model = folder_of_encoder / "model.onnx"
    pairs = write_rows(folder_of_encoder / "pairs.csv", ["anchor", "positive"], translated_pairs())
    scored = write_rows(
        folder_of_encoder / "scored.csv", ["anchor", "positive", "score"], [("red", "rot", "high")]
    )
    gap = write_rows(
        folder_of_encoder / "gap.csv", ["anchor", "positive"], [("red", "rot"), ("blue", "")]
    )
    both = write_rows(
        folder_of_encoder / "both.csv", ["anchor", "positive", "negative", "score"], [("a",) * 4]
    )
    other = write_rows(folder_of_encoder / "other.csv", ["question", "answer"], [("red", "rot")])
    empty = write_rows(folder_of_encoder / "empty.csv", ["anchor", "positive"], [])
    (folder_of_encoder / "x.txt").write_text("red")
    lines = [
        "[1]",
        '{"anchor"',
        '{"anchor": "a", "positive": "b"}\n{"anchor": "c", "positive": "d", "negative": "e"}',
    ]
    broken = [folder_of_encoder / f"{i}.jsonl" for i in range(3)]
    for path, line in zip(broken, lines, strict=True):
        path.write_text("\n" + line)
    linear, data = random_encoder(LINEAR, w=(6, 6), v=(6, 4)), clouds()
    refused = [  # model, data, options, what the message names
        (model, pairs, {"output": "z"}, ["output='z'"]),
        (model, pairs, {"loss": "arcface"}, ["classes"]),
        (linear, None, {"loss": "arcface"}, ["classes"]),
        (model, pairs, {"loss": "cosine_similarity"}, ["scores"]),
        (model, scored, {}, ["row 1", "'high'"]),
        (model, gap, {}, ["row 2", "'positive'"]),
        (model, both, {}, ["negative", "score"]),
        (model, other, {}, ["['question', 'answer']", "anchor"]),
        (model, empty, {}, ["no rows"]),
        (model, broken[0], {}, ["entry 0"]),
        (model, broken[1], {}, ["line 2", "JSON"]),
        (model, broken[2], {}, ["line 3", "negative"]),
        (model, folder_of_encoder / "x.txt", {}, [".csv, .tsv", ".jsonl"]),
        (linear, pairs, {}, ["texts", "inputs"]),
        (onnx.load(model), pairs, {}, ["tokenizer=", "tokenizer.json"]),
        (model, pairs, {"tokenizer": folder_of_encoder / "none.json"}, ["none.json"]),
        (linear, data, {"classes": 4, "rows": 13}, ["rows=13"]),
    ]
    for source, rows, options, parts in refused:
        with pytest.raises(ValueError, match=naming(*parts)):
            Embeddings(source, rows, **options)
    with pytest.raises(ValueError, match=r"no text: .* add one"):
        Embeddings(model).predict(model, [])
    with pytest.raises(ValueError, match=naming("texts", "inputs")):
        Embeddings(linear, data, classes=2).read(pairs)
    with pytest.raises(ValueError, match=naming("classes", "pairs")):
        Embeddings(model, pairs).read(clouds())
