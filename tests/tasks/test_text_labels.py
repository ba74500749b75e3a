"""Text classification: files, tokens of pairs, heads, loss, metrics, predictions, and the shell."""

import csv
import json
import warnings

import numpy as np
import onnx
import pytest

import onnxgrad as og
from tests.support.commands import as_json, assert_names, refusal, succeed
from tests.support.errors import naming
from tests.support.models import initializer_arrays, parse_model
from tests.support.running import run

tokenizers = pytest.importorskip("tokenizers")
TextLabels = og.tasks.TextLabels

R = np.random.default_rng(0)
MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
GOOD, BAD = "good fine great lovely".split(), "bad poor weak awful".split()
FILLS = "the a film plot was and so it".split()
WORDS = [*MARKS, *GOOD, *BAD, *FILLS]
TABLE = R.standard_normal((len(WORDS), 6)).astype(np.float32)
ENCODER = """g (int64[N,T] input_ids, int64[N,T] attention_mask, int64[N,T] token_type_ids) =>
    (float[N,T,6] last_hidden_state, float[N,6] pooler_output)
    { e = Gather(table, input_ids)  m = Cast<to=1>(attention_mask)  u = Unsqueeze(m, two)
      k = Cast<to=1>(token_type_ids)  v = Unsqueeze(k, two)  w = Mul(e, u)
      s = ReduceSum<keepdims=1>(w, one)  n = ReduceSum<keepdims=1>(u, one)  mean = Div(s, n)
      c = Add(e, mean)  last_hidden_state = Add(c, v)
      f = Gather<axis=1>(last_hidden_state, zero)  pooler_output = Tanh(f) }"""


def text_encoder():
    arrays = {"table": TABLE, "one": np.array([1]), "two": np.array([2]), "zero": np.array(0)}
    return parse_model(ENCODER, **arrays)


def bert_words():
    """Return a tokenizer of words, which writes texts and pairs as BERT does."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made


def tokens_of(*texts):
    """Return ids and types of a text or a pair, written without the library."""
    ids, types = [2], [0]
    for number, text in enumerate(texts):
        own = [*(WORDS.index(w) if w in WORDS else 1 for w in text.split()), 3]
        ids, types = ids + own, types + [number] * len(own)
    return ids, types


def random_text(label):
    words = [*R.choice(FILLS, R.integers(1, 7)), R.choice(GOOD if label == "up" else BAD)]
    return " ".join(R.permutation(words))


LABELS = [str(label) for label in R.choice(["up", "down"], 48)]
ROWS = [{"text": random_text(label), "label": label} for label in LABELS]
PAIRS = [
    {"premise": random_text("up"), "hypothesis": random_text(label), "label": label}
    for label in LABELS
]
OF_PAIRS = {"text": ("premise", "hypothesis")}


def batches_of(reader, size=8):
    return list(reader.batches(size, None, 0))


def scores_of_file(model, *texts):
    """Return the probabilities of one text or pair alone, by the file."""
    ids, types = tokens_of(*texts)
    X = {"input_ids": [ids], "attention_mask": [[1] * len(ids)], "token_type_ids": [types]}
    scores = run(model, X)[0][0].astype(np.float64)
    return np.exp(scores) / np.exp(scores).sum()


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [ROWS, PAIRS])
def test_rows_are_padded_to_the_longest_of_a_batch(rows):
    options = OF_PAIRS if rows is PAIRS else {}
    task = TextLabels(text_encoder(), rows, bert_words(), **options)
    assert task.classes == ["down", "up"]
    for (X, y, _), start in zip(batches_of(task.data), range(0, 48, 8), strict=True):
        own = rows[start : start + 8]
        assert y.tolist() == [int(row["label"] == "up") for row in own]
        expected = [tokens_of(*(row[n] for n in row if n != "label")) for row in own]
        longest = max(len(ids) for ids, _ in expected)
        for i, (ids, types) in enumerate(expected):
            missing = [0] * (longest - len(ids))
            assert X["input_ids"][i].tolist() == ids + missing
            assert X["token_type_ids"][i].tolist() == types + missing
            assert X["attention_mask"][i].tolist() == [1] * len(ids) + missing


def test_pairs_are_cut_as_transformers_cuts_them(tmp_path):
    transformers = pytest.importorskip("transformers")
    bert_words().save(str(tmp_path / "tokenizer.json"))
    witness = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), pad_token="[PAD]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    with pytest.warns(UserWarning, match="9 tokens") as told:
        task = TextLabels(text_encoder(), PAIRS, tmp_path, max_length=9, **OF_PAIRS)
    assert str(told[0].message).split()[0] == str(
        sum(len(tokens_of(row["premise"], row["hypothesis"])[0]) > 9 for row in PAIRS)
    )
    for (X, _, _), row in zip(batches_of(task.data, 1), PAIRS, strict=True):
        own = witness(row["premise"], row["hypothesis"], truncation=True, max_length=9)
        assert X["input_ids"][0].tolist() == own["input_ids"]
        assert X["token_type_ids"][0].tolist() == own["token_type_ids"]


def test_files_are_read_alike(tmp_path):
    texts = [f'{row["text"]}, "so"\nit was;' for row in ROWS]
    rows = [{"text": t, "label": row["label"]} for t, row in zip(texts, ROWS, strict=True)]
    for name, delimiter in (("a.csv", ","), ("b.csv", ";"), ("c.tsv", "\t")):
        with (tmp_path / name).open("w", newline="", encoding="utf-8-sig") as file:
            table = csv.writer(file, delimiter=delimiter)
            table.writerows([("label", "text"), *((r["label"], r["text"]) for r in rows)])
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pandas, arrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    pandas.DataFrame(rows).to_parquet(tmp_path / "e.parquet")
    tables = pandas.DataFrame(rows), arrow.Table.from_pylist(rows)
    files = [tmp_path / f"{n}" for n in ("a.csv", "b.csv", "c.tsv", "d.jsonl", "e.parquet")]
    first = TextLabels(text_encoder(), rows, bert_words())
    for data in (*files, str(files[0]), *tables):
        other = TextLabels(text_encoder(), data, bert_words())
        assert other.data.texts == [(text,) for text in texts]
        assert other.data.labels.tolist() == first.data.labels.tolist()
        for (X, _, _), (Z, _, _) in zip(
            batches_of(first.data), batches_of(other.data), strict=True
        ):
            np.testing.assert_array_equal(X["input_ids"], Z["input_ids"])


def test_columns_of_other_names():
    rows = [{"review": row["text"], "mood": row["label"], "text": "x"} for row in ROWS]
    named = TextLabels(text_encoder(), rows, bert_words(), text="review", label="mood")
    plain = TextLabels(text_encoder(), ROWS, bert_words())
    assert named.data.texts == plain.data.texts
    assert named.data.describe()["tokens"] == plain.data.describe()["tokens"]


@pytest.mark.parametrize(
    ("labels", "options", "classes", "numbers"),
    [
        (["b", "a", "c"], {}, ["a", "b", "c"], [1, 0, 2]),
        (["b", "a", "c"], {"classes": ["c", "b", "a"]}, ["c", "b", "a"], [1, 2, 0]),
        ([10, 9, 9], {}, ["9", "10"], [1, 0, 0]),
        (["10", "9", "-1"], {}, ["-1", "9", "10"], [2, 1, 0]),
        ([1, 0, 1], {"classes": ["no", "yes"]}, ["no", "yes"], [1, 0, 1]),
        (["1", "0", "1"], {"classes": ["no", "yes"]}, ["no", "yes"], [1, 0, 1]),
        ([1.0, 2.0, 1.0], {"classes": ["1", "2"]}, ["1", "2"], [0, 1, 0]),
        ([True, False, True], {}, ["False", "True"], [1, 0, 1]),
    ],
)
def test_classes_and_their_numbers(labels, options, classes, numbers):
    rows = [{"text": "good", "label": label} for label in labels]
    task = TextLabels(text_encoder(), rows, bert_words(), **options)
    assert task.classes == classes
    assert task.data.labels.tolist() == numbers
    assert task.model.graph.output[0].type.tensor_type.shape.dim[1].dim_value == len(classes)


def test_what_cannot_be_read(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\ngood,up\n ,down\n")
    (tmp_path / "b.csv").write_text("text,label\ngood,up\nbad,so,down\n")
    (tmp_path / "c.csv").write_text("text,label\ngood,up\nbad,\n")
    (tmp_path / "d.xlsx").write_text("")
    (tmp_path / "e.csv").write_text("text,label\n")
    (tmp_path / "f.jsonl").write_text('{"text": "good", "label": "up"}\n{"text": "bad"}\n')
    (tmp_path / "g.csv").write_bytes(b"text,label\n\xff,up\n")
    encoder, own = text_encoder(), [{"text": "good", "label": "up"}]
    for data, options, words in (
        (tmp_path / "a.csv", {}, "row 2 of ... a.csv' ... 'text' is empty"),
        (tmp_path / "b.csv", {}, "row 2 of ... more cells than the header"),
        (tmp_path / "c.csv", {}, "row 2 of ... 'label'"),
        (tmp_path / "d.xlsx", {}, "d.xlsx ... .csv"),
        (tmp_path / "e.csv", {}, "no rows"),
        (tmp_path / "f.jsonl", {}, "line 2 of ... column (label=) 'label'"),
        (tmp_path / "g.csv", {}, "g.csv ... UTF-8"),
        (tmp_path / "gone.csv", {}, "gone.csv ... No such file"),
        (ROWS, {"text": "txt"}, "row 0 ... column (text=) 'txt' ... mean 'text'"),
        (ROWS, {"label": "lable"}, "column (label=) 'lable' ... mean 'label'"),
        (ROWS, {"text": ("text", "b", "c")}, "text= ... two columns of pairs"),
        (ROWS, {"classes": ["up", "dawn"]}, "'down' ... mean 'dawn'"),
        (ROWS, {"classes": "up,down"}, "classes='up,down' ... list"),
        (ROWS, {"pool": "max"}, "pool 'max' ... 'mean'"),
        (ROWS, {"validation": 1.5}, "validation=1.5"),
        (ROWS, {"validation": 1e-4}, "validation=0.0001 ... no row to train on"),
        (ROWS, {"tokenizer": None}, "tokenizer.json or vocab.txt"),
        (None, {}, "classes="),
        (own, {}, "all 1 rows ... 'up'"),
        ([{"text": 3, "label": "up"}], {}, "row 0 ... must be a text, not 3"),
        ([{"text": None, "label": "up"}], {}, "row 0 ... 'text' is empty"),
        (["good"], {}, "row 0 ... columns"),
        ([{**r, "label": i / 4} for i, r in enumerate(ROWS)], {}, "row 1 ... 0.25 ... fraction"),
    ):
        with pytest.raises(ValueError, match=naming(*words.split(" ... "))):
            TextLabels(encoder, data, **{"tokenizer": bert_words(), **options})
    task = TextLabels(encoder, ROWS, bert_words())
    with pytest.raises(ValueError, match=r"row 0: .*class 'upp'.*mean 'up'"):
        task.read([{"text": "good", "label": "upp"}])
    numbered = TextLabels(encoder, rows_of(1, 2), bert_words())
    with pytest.raises(ValueError, match=r"row 0: .*class '0'"):
        numbered.read(rows_of(0))
    with pytest.raises(ValueError, match=r"row 1: .*empty"):
        task.predict(task.model, ["good", ""])
    odd = parse_model(
        "g (int64[N,T] input_ids, int64[N,T] position_ids) => (float[N,T,6] hidden)"
        "{ i = Add(input_ids, position_ids)  hidden = Gather(table, i) }",
        table=TABLE,
    )
    with pytest.raises(ValueError, match="position_ids"):
        TextLabels(odd, ROWS, bert_words())


def test_rows_held_out_of_each_class():
    rows = [{"text": "good", "label": "rare" if i % 10 == 0 else "often"} for i in range(50)]
    task = TextLabels(text_encoder(), rows, bert_words(), validation=0.2, seed=3)
    assert np.bincount(task.validation.labels).tolist() == [9, 1]
    assert np.bincount(task.data.labels).tolist() == [36, 4]
    assert (task.data.rows, len(task.data.texts), task.validation.rows) == (40, 40, 10)


# -- heads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "op_types"),
    [
        ({}, ["ReduceSum", "Max", "Div", "MatMul", "Add"]),
        ({"pool": "first"}, ["Gather", "MatMul", "Add"]),
        ({"at": "pooler_output"}, ["Tanh", "MatMul", "Add"]),
        ({"at": "pooler_output", "pool": "none"}, ["Tanh", "MatMul", "Add"]),
    ],
)
def test_heads_of_encoders(options, op_types):
    """The scores are those of numpy on the features, of each text alone."""
    task = TextLabels(text_encoder(), ROWS, bert_words(), **options)
    arrays = initializer_arrays(task.model)
    assert [node.op_type for node in task.model.graph.node][-len(op_types) :] == op_types
    assert [y.name for y in task.model.graph.output] == ["logits"]
    for row in ROWS[:5]:
        ids, types = tokens_of(row["text"])
        X = {"input_ids": [ids], "attention_mask": [[1] * len(ids)], "token_type_ids": [types]}
        hidden, pooled = run(text_encoder(), X)
        if options.get("pool") == "first":
            pooled = hidden[:, 0]
        elif not options:
            pooled = hidden.mean(1)
        [scores] = run(task.model, X)
        np.testing.assert_allclose(
            scores, pooled @ arrays["head.weight"] + arrays["head.bias"], rtol=1e-5, atol=1e-6
        )


CLASSIFIER = """g (int64[N,T] input_ids, int64[N,T] attention_mask) =>
    (float[N,3] logits, float[N,T,6] hidden)
    { e = Gather(table, input_ids)  m = Cast<to=1>(attention_mask)  u = Unsqueeze(m, two)
      hidden = Mul(e, u)  s = ReduceSum<keepdims=0>(hidden, one)
      z = MatMul(s, w)  logits = Add(z, b) }"""


def classifier():
    return parse_model(
        CLASSIFIER, table=TABLE, w=R.standard_normal((6, 3)).astype(np.float32),
        b=np.zeros(3, np.float32), one=np.array([1]), two=np.array([2]),
    )  # fmt: skip


def rows_of(*labels):
    return [{"text": "so good", "label": label} for label in labels]


def test_models_with_scores(tmp_path):
    """The layer stays for the same classes, or as many where these have no names."""
    onnx.save(classifier(), tmp_path / "m.onnx")
    bert_words().save(str(tmp_path / "tokenizer.json"))
    weights = initializer_arrays(classifier())["table"]
    old = initializer_arrays(onnx.load(tmp_path / "m.onnx"))["w"]

    def last_layer(*labels, **options):
        task = TextLabels(tmp_path / "m.onnx", rows_of(*labels), **options)
        assert [y.name for y in task.model.graph.output] == ["logits"]
        own = initializer_arrays(task.model)
        np.testing.assert_array_equal(own["table"], weights)
        return task.classes, own.get("w", own.get("head.weight"))

    def configure(*names):
        named = {str(i): name for i, name in enumerate(names)}
        (tmp_path / "config.json").write_text(json.dumps({"id2label": named}))

    for names in ((), ("LABEL_0", "LABEL_1", "LABEL_2")):
        configure(*names)
        classes, w = last_layer("c", "a", "b")
        assert classes == ["a", "b", "c"]
        np.testing.assert_array_equal(w, old)
    configure("neg", "pos", "mid")
    for labels in (["neg", "pos"], ["pos", "mid"], [0, 2, 1]):
        classes, w = last_layer(*labels)
        assert classes == ["neg", "pos", "mid"]
        np.testing.assert_array_equal(w, old)
    for labels in ((0, 1), ("neg", "other"), ("a", "b", "c")):
        classes, w = last_layer(*labels)
        assert classes == sorted(map(str, labels))
        assert w.shape == (6, len(labels))
        assert w.shape != old.shape or (w != old).any()
    configure("pos", "mid")  # the file of another model
    features = TextLabels(tmp_path / "m.onnx", rows_of("a", "b"), at="hidden")
    assert "head.weight" in initializer_arrays(features.model)
    with pytest.raises(ValueError, match="pool='mean'"):
        TextLabels(tmp_path / "m.onnx", rows_of("a", "b"), pool="mean")


def test_outputs_that_are_no_features():
    text = "g (int64[N,T] input_ids) => (float[N,T,6] a, float[N,T,6] b)"
    both = parse_model(text + "{ a = Gather(table, input_ids)  b = Neg(a) }", table=TABLE)
    with pytest.raises(ValueError, match=r"\['a', 'b'\].*at="):
        TextLabels(both, ROWS, bert_words())
    assert TextLabels(both, ROWS, bert_words(), at="b").classes == ["down", "up"]
    tokens = "g (int64[N,T] input_ids) => (float[N,T,6] logits) { logits = Gather(t, input_ids) }"
    with pytest.raises(ValueError, match=r"'logits' .*\[None, None, 6\]"):
        TextLabels(parse_model(tokens, t=TABLE), ROWS, bert_words())


def test_a_sentence_encoder_has_a_row_for_each_text():
    model = og.graph.select_model_inputs_outputs(text_encoder(), ["pooler_output"])
    task = TextLabels(model, ROWS, bert_words())
    assert [node.op_type for node in task.model.graph.node][-3:] == ["Tanh", "MatMul", "Add"]


# -- training --------------------------------------------------------------------------------------


def test_loss_and_gradient_are_those_of_torch():
    torch = pytest.importorskip("torch")
    task = TextLabels(text_encoder(), PAIRS, bert_words(), **OF_PAIRS)
    trainer = task.trainer(optimizer="sgd", learning_rate=1.0, train=["head.*"])
    W, b = (initializer_arrays(task.model)[f"head.{part}"] for part in ("weight", "bias"))
    trainer.fit(task.data, batch_size=48, epochs=1)
    pooled = []
    for row in PAIRS:
        ids, types = tokens_of(row["premise"], row["hypothesis"])
        e = torch.tensor(TABLE)[torch.tensor(ids)]
        pooled.append((e + e.mean(0) + torch.tensor(types)[:, None]).mean(0))
    W, b = (torch.tensor(np.array(v), requires_grad=True) for v in (W, b))
    y = torch.tensor([int(label == "up") for label in LABELS])
    value = torch.nn.functional.cross_entropy(torch.stack(pooled) @ W + b, y)
    value.backward()
    assert trainer.history[0]["loss"] == pytest.approx(value.item(), rel=1e-5)
    for name, v in {"head.weight": W, "head.bias": b}.items():
        expected = (v - v.grad).detach().numpy()
        np.testing.assert_allclose(trainer.state.weights[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [ROWS, PAIRS])
def test_training_prediction_and_files(rows, tmp_path):
    """The words of a text decide its class; the file predicts the same by itself."""
    metrics = pytest.importorskip("sklearn.metrics")
    options = OF_PAIRS if rows is PAIRS else {}
    columns = [name for name in rows[0] if name != "label"]
    task = TextLabels(text_encoder(), rows, bert_words(), **options)
    trainer = task.trainer(learning_rate=0.05, seed=0)
    trainer.fit(task.data, epochs=12, batch_size=8, validation=task.read(rows))
    first, *_, last = (entry["validation_accuracy"] for entry in trainer.history)
    assert last == 1.0 > first
    half = task.trainer(learning_rate=0.05, seed=0).fit(task.data, epochs=1)
    texts = [tuple(row[name] for name in columns) for row in rows]
    given = texts if rows is PAIRS else [text for [text] in texts]
    found = [each["label"] for each in task.predict(half, given)]
    scored = half.evaluate(task.data)
    assert scored["accuracy"] == pytest.approx(metrics.accuracy_score(LABELS, found))
    assert scored["f1_macro"] == pytest.approx(metrics.f1_score(LABELS, found, average="macro"))
    trainer.save(tmp_path / "m.onnx")
    again = TextLabels(tmp_path / "m.onnx", tokenizer=bert_words())
    assert (again.classes, again.data) == (["down", "up"], None)
    results = task.predict(trainer, given)
    assert results == again.predict(tmp_path / "m.onnx", rows)
    assert [each["label"] for each in results] == LABELS
    for own, each in zip(texts, results, strict=True):
        shares = scores_of_file(trainer.model, *own)
        np.testing.assert_allclose([*each["probabilities"].values()], shares, rtol=1e-4, atol=1e-6)
        assert each["probability"] == max(each["probabilities"].values())
        alone = task.predict(trainer, [own if rows is PAIRS else own[0]])[0]
        np.testing.assert_allclose(alone["probability"], each["probability"], rtol=1e-5)
    [file] = task.write(given, results, tmp_path / "out")
    with file.open(newline="") as opened:
        table = [*csv.DictReader(opened)]
    assert [*table[0]] == [*columns, "label", "probability_down", "probability_up"]
    assert [tuple(row[name] for name in columns) for row in table] == texts
    assert [float(row["probability_up"]) for row in table] == pytest.approx(
        [each["probabilities"]["up"] for each in results], abs=1e-6
    )
    assert trainer.evaluate(again.read(file))["accuracy"] == 1.0


def test_the_learning_rate_without_one():
    task = TextLabels(text_encoder(), ROWS, bert_words())
    trainer = task.trainer().fit(task.data, epochs=10, batch_size=8)
    rates = [entry["learning_rate"] for entry in trainer.history]
    assert 4e-5 < max(rates) <= 5e-5
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[-1] < 2e-6
    own = task.trainer(learning_rate=0.1).fit(task.data, epochs=1)
    assert own.history[0]["learning_rate"] == 0.1


def test_models_that_end_with_a_softmax():
    """The loss and the probabilities are those of the same model without it."""
    plain = TextLabels(text_encoder(), ROWS, bert_words())
    model = onnx.ModelProto()
    model.CopyFrom(plain.model)
    model.graph.node[-1].output[0] = "scores"
    model.graph.node.append(onnx.helper.make_node("Softmax", ["scores"], ["logits"]))
    other = TextLabels(model, ROWS, bert_words())
    assert other.model == model
    texts = [row["text"] for row in ROWS]
    for own, each in zip(
        *(task.predict(task.model, texts) for task in (plain, other)), strict=True
    ):
        assert own["label"] == each["label"]
        assert own["probability"] == pytest.approx(each["probability"], rel=1e-5)
    losses = [task.trainer().evaluate(task.data)["loss"] for task in (plain, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# -- padding ---------------------------------------------------------------------------------------


def test_models_without_a_mask_see_no_padding():
    text = "g (int64[N,T] input_ids) => (float[N,T,6] y) { y = Gather(t, input_ids) }"
    task = TextLabels(parse_model(text, t=TABLE), ROWS, bert_words())
    for X, _, _ in batches_of(task.data):
        assert (X["input_ids"] > 0).all()
    texts = [row["text"] for row in ROWS]
    for own, each in zip(texts, task.predict(task.model, texts), strict=True):
        [alone] = task.predict(task.model, [own])
        assert each["probability"] == pytest.approx(alone["probability"], rel=1e-5)


@pytest.mark.parametrize(("rows", "masked"), [("N", True), ("2", True), ("N", False)])
def test_models_of_a_stated_length(rows, masked):
    """Rows have the length that the model states; also in batches of 2."""
    text = ENCODER.replace("N,T", f"{rows},7").replace("N,6", f"{rows},6")
    if not masked:
        text = "g (int64[N,7] input_ids) => (float[N,7,6] y) { y = Gather(table, input_ids) }"
    arrays = {"table": TABLE, "one": np.array([1]), "two": np.array([2]), "zero": np.array(0)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        task = TextLabels(parse_model(text, **arrays), ROWS, bert_words())
    said = [str(warning.message) for warning in caught]
    assert any("more than 7 tokens" in each for each in said)
    assert sum("no input attention_mask" in each for each in said) == (not masked)
    assert {X["input_ids"].shape[1] for X, *_ in batches_of(task.data)} == {7}
    trainer = task.trainer(learning_rate=0.05).fit(task.data, epochs=1, batch_size=8)
    whole = TextLabels(text_encoder(), ROWS, bert_words(), max_length=7)
    if masked:
        weights = initializer_arrays(trainer.model)
        for tensor in whole.model.graph.initializer:
            tensor.CopyFrom(onnx.numpy_helper.from_array(weights[tensor.name], tensor.name))
        texts = [row["text"] for row in ROWS[:9]]
        pairs = zip(task.predict(trainer, texts), whole.predict(whole.model, texts), strict=True)
        for own, each in pairs:
            assert own["probability"] == pytest.approx(each["probability"], rel=1e-4)


# -- what a trained model remembers ----------------------------------------------------------------


def test_a_trained_model_needs_the_data_only(tmp_path):
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    onnx.save(text_encoder(), encoder / "m.onnx")
    bert_words().save(str(encoder / "tokenizer.json"))
    renamed = [{"a": r["premise"], "b": r["hypothesis"], "y": r["label"]} for r in PAIRS]
    options = {"text": ["a", "b"], "label": "y", "max_length": 9, "classes": ["up", "down"]}
    with pytest.warns(UserWarning, match=naming("9 tokens", "are cut")):
        task = TextLabels(encoder / "m.onnx", renamed, **options)
    trainer = task.trainer(learning_rate=0.05).fit(task.data, epochs=2)
    trainer.save(tmp_path / "mine.onnx")
    again = TextLabels(tmp_path / "mine.onnx")
    assert again.classes == ["up", "down"]
    with pytest.warns(UserWarning, match="more than 9 tokens"):
        reader = again.read(renamed)
    assert again.trainer().evaluate(reader) == pytest.approx(trainer.evaluate(task.data))
    assert again.predict(tmp_path / "mine.onnx", renamed) == task.predict(trainer, renamed)
    once_more = TextLabels(tmp_path / "mine.onnx", renamed)
    own = once_more.trainer(learning_rate=0.05).evaluate(once_more.data)
    assert own == pytest.approx(trainer.evaluate(task.data))


def test_weights_of_classes_by_name():
    task = TextLabels(text_encoder(), ROWS, bert_words())
    plain, up = (
        task.trainer(class_weight=weight).evaluate(task.data)["loss"]
        for weight in (None, {"up": 1.0, "down": 0.0})
    )
    only = [row for row in ROWS if row["label"] == "up"]
    assert up == pytest.approx(task.trainer().evaluate(task.read(only))["loss"], rel=1e-5)
    assert up != pytest.approx(plain, rel=1e-3)


def test_cells_that_spreadsheets_would_run(tmp_path):
    task = TextLabels(text_encoder(), ROWS, bert_words())
    texts = ["=good", "-1", "good"]
    [file] = task.write(texts, task.predict(task.model, texts), tmp_path)
    with file.open(newline="") as opened:
        assert [row["text"] for row in csv.DictReader(opened)] == ["'=good", "-1", "good"]


# -- the shell -------------------------------------------------------------------------------------


def test_from_files_to_predictions_in_the_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "encoder").mkdir()
    (tmp_path / "out").mkdir()
    onnx.save(text_encoder(), "encoder/m.onnx")
    bert_words().save("encoder/tokenizer.json")
    with open("rows.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerows([("one", "two", "mood")])
        table.writerows((r["premise"], r["hypothesis"], r["label"]) for r in PAIRS)
    line = ("train", "encoder/m.onnx", "rows.csv", "--task", "text-labels", "--no-curves")
    chosen = ("--task-option", 'text=["one", "two"]', "--task-option", "label=mood")
    train = (*line, *chosen, "--output", "out/mine.onnx")
    result = as_json(*train, "--epochs", 25, "--lr", 0.05, "--batch-size", 4)
    assert result["validation_rows"] == 10
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    (tmp_path / "out").rename(tmp_path / "moved")
    (tmp_path / "encoder" / "tokenizer.json").unlink()
    scores = as_json("eval", "moved/mine.onnx", "rows.csv", "--task", "text-labels")
    assert scores["metrics"]["accuracy"] == 1.0
    predict = ("predict", "moved/mine.onnx", "rows.csv", "--task", "text-labels")
    assert as_json(*predict, "--output", "found")["files"] == ["found/labels.csv"]
    with open("found/labels.csv", newline="") as file:
        found = [*csv.DictReader(file)]
    assert [row["mood"] for row in found] == LABELS
    task = TextLabels("moved/mine.onnx")
    expected = task.predict("moved/mine.onnx", "rows.csv")
    assert [float(row["probability_up"]) for row in found] == pytest.approx(
        [each["probabilities"]["up"] for each in expected], abs=1e-6
    )


def test_options_of_the_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(text_encoder(), "m.onnx")
    bert_words().save("tokenizer.json")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    line = ("train", "m.onnx", "rows.jsonl", "--task", "text-labels", "--no-curves", "--overwrite")
    rates = [entry["learning_rate"] for entry in as_json(*line, "--epochs", 3)["history"]]
    assert 0 < max(rates) <= 5e-5
    told = as_json(*line, "--epochs", 1, "--lr", 1e-3)["history"]
    assert told[0]["learning_rate"] == 1e-3
    held = as_json(*line, "--epochs", 1, "--task-option", "validation=0.25")
    assert held["validation_rows"] == 12
    assert_names(refusal(*line, "--task-option", "text=txt"), "row", "'txt' ... 'text'")
    assert_names(refusal(*line, "--task-option", "lable=y"), "lable ... label")
    assert "text-labels" in refusal(*line[:4], "text-label")
    (tmp_path / "texts.txt").write_text("so good\n\nthe film was bad\n")
    succeed(*line, "--epochs", 1)
    (tmp_path / "wrong.csv").write_text("text,label\ngood,sideways\n")
    assert_names(
        refusal("eval", "trained.onnx", "wrong.csv", "--task", "text-labels"),
        "row 1 of ... 'sideways' ... down",
    )
    out = as_json("predict", "trained.onnx", "texts.txt", "--task", "text-labels")
    assert out["rows"] == 2
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    said = succeed(*line, "--epochs", 1, "--output", "other/m.onnx")
    assert_names(said.stderr, "other/tokenizer.json stays", "tokenizer.json along")
    assert (tmp_path / "other" / "tokenizer.json").read_text() == "{}"
