"""Token classification: files, labels of tokens, loss, F1 and predictions, against witnesses."""

import json
import re

import numpy as np
import onnx
import pytest

import onnxgrad as og
from tests.support.entity_spans import entity_spans
from tests.support.errors import naming
from tests.support.models import initializer_arrays, parse_model
from tests.support.running import run

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("seqeval")
Tokens = og.tasks.tokens.Tokens

R = np.random.default_rng(0)
NAMES = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
LETTERS = "abcdefgh"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{c}" for c in LETTERS), ".", ","]
TABLE = R.standard_normal((len(PIECES), 6)).astype(np.float32)
MASKED = """g (int64[N,T] input_ids, int64[N,T] attention_mask, int64[N,T] token_type_ids) =>
    (float[N,T,6] hidden, float[N,6] pooled)
    { e = Gather(table, input_ids)  m = Cast<to=1>(attention_mask)  u = Unsqueeze(m, two)
      k = Cast<to=1>(token_type_ids)  v = Unsqueeze(k, two)  w = Mul(e, u)
      s = ReduceSum<keepdims=1>(w, one)  n = ReduceSum<keepdims=1>(u, one)  mean = Div(s, n)
      c = Add(e, mean)  hidden = Add(c, v)  pooled = ReduceMean<keepdims=0>(hidden, one) }"""


def token_encoder():
    return parse_model(MASKED, table=TABLE, one=np.array([1]), two=np.array([2]))


def wordpiece():
    """Return a tokenizer whose tokens are letters, as BERT's are parts of words."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({p: i for i, p in enumerate(PIECES)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made


def ids_of(text):
    """Return ids and the word of each token, written without the library."""
    ids, words = [2], [-1]
    for number, word in enumerate(text.split()):
        for k, letter in enumerate(word):
            ids.append(PIECES.index(letter if k == 0 or letter in ".," else f"##{letter}"))
            words.append(number)
    return [*ids, 3], [*words, -1]


def random_sentence(rng, most=9):
    words = [
        "".join(rng.choice([*"abcdefgh"], rng.integers(1, 5))) for _ in range(rng.integers(1, most))
    ]
    tags = []
    for _ in words:
        kind = str(rng.choice(["O", "B-LOC", "B-PER", "I"]))
        before = tags[-1] if tags else "O"
        tags.append(("O" if before == "O" else f"I-{before[2:]}") if kind == "I" else kind)
    return {"tokens": words, "tags": tags}


ROWS = [random_sentence(R) for _ in range(40)]


def reader_batches(reader, size=8):
    return list(reader.batches(size, None, 0))


# -- labels of tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [False, True])
def test_labels_of_tokens(every):
    task = Tokens(token_encoder(), ROWS, wordpiece(), at="hidden", classes=NAMES, label_all=every)
    seen = 0
    for (X, y, _), start in zip(reader_batches(task.data), range(0, 40, 8), strict=True):
        for i, row in enumerate(ROWS[start : start + 8]):
            ids, words = ids_of(" ".join(row["tokens"]))
            n = len(ids)
            assert X["input_ids"][i].tolist() == ids + [0] * (X["input_ids"].shape[1] - n)
            assert X["attention_mask"][i].sum() == n
            assert not X["token_type_ids"].any()
            expected = []
            for before, word in zip([-1, *words], words, strict=False):
                tag = row["tags"][word]
                inside = tag.replace("B-", "I-") if every else None
                name = None if word < 0 else tag if word != before else inside
                expected.append(-100 if name is None else NAMES.index(name))
            assert y[i].tolist() == expected + [-100] * (y.shape[1] - n)
            seen += n
    assert seen > 400


def test_files_are_read_alike(tmp_path):
    conll = "-DOCSTART- -X- O\n\n"
    for row in ROWS:
        lines = [f"{w} NN {t}" for w, t in zip(row["tokens"], row["tags"], strict=True)]
        conll += "\n".join(lines) + "\n\n"
    (tmp_path / "a.conll").write_text(conll)
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    numbered = [
        {"tokens": r["tokens"], "ner_tags": [NAMES.index(t) for t in r["tags"]]} for r in ROWS
    ]
    spans = []
    for row in ROWS:
        text, entities, at = " ".join(row["tokens"]), [], 0
        for word, tag in zip(row["tokens"], row["tags"], strict=True):
            if tag[0] == "B":
                entities.append({"start": at, "end": at + len(word), "label": tag[2:]})
            elif tag[0] == "I":
                entities[-1]["end"] = at + len(word)
            at += len(word) + 1
        spans.append({"text": text, "entities": entities})
    first = Tokens(token_encoder(), ROWS, wordpiece(), at="hidden")
    assert first.classes == NAMES
    for data in (tmp_path / "a.conll", str(tmp_path / "b.jsonl"), numbered, spans):
        other = Tokens(token_encoder(), data, wordpiece(), at="hidden", classes=NAMES)
        for (X, y, _), (Z, t, _) in zip(
            reader_batches(first.data), reader_batches(other.data), strict=True
        ):
            np.testing.assert_array_equal(X["input_ids"], Z["input_ids"])
            np.testing.assert_array_equal(y, t)


def test_long_texts_become_rows_that_overlap():
    """Every word is labeled once, no row begins within an entity, and neighbors are seen."""
    rng, rows = np.random.default_rng(5), []
    for _ in range(20):
        row = random_sentence(rng, 80)
        rows.append(row)
    words = sum(len(row["tokens"]) for row in rows)
    with pytest.warns(UserWarning, match=r"20 texts.* 24 tokens"):
        task = Tokens(token_encoder(), rows, wordpiece(), at="hidden", max_length=24, stride=5)
    found, cut = [], 0
    for X, y, _ in reader_batches(task.data):
        assert X["input_ids"].shape[1] <= 24
        found += [task.classes[k] for row in y for k in row if k >= 0]
        cut += sum(next((k for k in row if k >= 0), 0) in (2, 4) for row in y)
    assert found == [tag for row in rows for tag in row["tags"]]
    assert len(found) == words
    long = 0  # entities that fill a row
    for row in rows:
        for a, b, _ in entity_spans(row["tags"]):
            long += sum(map(len, row["tokens"][a : b + 1])) > 24 - 2 - 2 * 5
    assert cut <= long < 8
    expected = Tokens(token_encoder(), rows, wordpiece(), at="hidden").data.rows
    assert task.data.rows > expected == 20


def test_words_that_do_not_fit_are_counted():
    text = [
        {"tokens": ["a" * 30, "b"], "tags": ["O", "B-PER"]},
        {"tokens": ["\u0301"], "tags": ["O"]},
    ]
    made = wordpiece()
    made.normalizer = tokenizers.normalizers.StripAccents()
    with pytest.warns(UserWarning, match="2 texts") as told:
        task = Tokens(token_encoder(), text, made, at="hidden", max_length=12)
    assert re.search(naming("1 words", "a row", "no token"), str(told[0].message))
    labels = [k for _, y, _ in reader_batches(task.data, 1) for k in y.ravel() if k >= 0]
    assert labels == [0, 1]
    spans = [{"text": "abc de", "entities": [{"start": 1, "end": 6, "label": "X"}]}]
    with pytest.warns(UserWarning, match="1 entities"):
        Tokens(token_encoder(), spans, wordpiece(), at="hidden")


def test_what_cannot_be_read(tmp_path):
    (tmp_path / "a.txt").write_text("one O\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"text": "a"\n')
    entity = {"start": 0, "end": 1, "label": "X"}
    for data, options, message in (
        (tmp_path / "a.txt", {}, r"line 2: 'two'"),
        (tmp_path / "b.jsonl", {}, r"line 1 .*JSON"),
        ([{"tokens": ["a"], "tags": [3]}], {}, r"row 0 .* 3.*classes="),
        ([{"tokens": ["a"], "tags": []}], {}, "row 0 .*'text'.*'tokens'"),
        ([{"text": "a"}], {"classes": NAMES}, "row 0 .*labels"),
        ([{"text": "a", "entities": [entity, entity]}], {}, "row 0: .* overlaps"),
        ([{"text": " a", "entities": [entity]}], {}, "no word"),
        (ROWS, {"classes": ["O", "B-LOC"]}, "I-LOC.* classes"),
        (ROWS, {"at": None}, r"\['wide', 'hidden'\]"),
        (ROWS, {"tokenizer": None}, "tokenizer.json or vocab.txt"),
        (ROWS, {"scheme": "IOB9"}, "IOB1"),
    ):
        model = token_encoder()
        if options.get("at", 0) is None:
            model = parse_model(
                "g (int64[N,T] input_ids) => (float[N,T,6] wide, float[N,T,6] hidden)"
                "{ wide = Gather(table, input_ids)  hidden = Neg(wide) }",
                table=TABLE,
            )
        with pytest.raises(ValueError, match=message):
            Tokens(model, data, **{"tokenizer": wordpiece(), "at": "hidden", **options})
    odd = parse_model(
        "g (int64[N,T] input_ids, int64[N,T] position_ids) => (float[N,T,6] hidden)"
        "{ i = Add(input_ids, position_ids)  hidden = Gather(table, i) }",
        table=TABLE,
    )
    with pytest.raises(ValueError, match="position_ids"):
        Tokens(odd, ROWS, wordpiece())


def test_the_choice_among_several_outputs_of_features_is_noted():
    text = """g (int64[N,T] input_ids) => (float[N,T,6] wide, float[N,T,6] last_hidden_state
        {more}) {{ wide = Gather(table, input_ids)  last_hidden_state = Neg(wide) {nodes} }}"""
    pooled = {"more": ", float[N,6] pooled", "nodes": "pooled = ReduceMean<keepdims=0>(wide, one)"}
    for parts, taken, others in (
        ({"more": "", "nodes": ""}, "last_hidden_state", "['wide']"),
        (pooled, "last_hidden_state", "['wide']"),  # `pooled` has no axis of tokens
    ):
        model = parse_model(text.format(**parts), table=TABLE, one=np.array([1]))
        task = Tokens(model, ROWS, wordpiece())
        [note] = task.notes
        assert re.search(naming(taken, others, "at="), note)
        expected = Tokens(model, ROWS, wordpiece(), at=taken)
        assert list(expected.notes) == []
        X, _, _ = next(task.data.batches(4, None, 0))
        assert np.array_equal(run(task.model, X)[0], run(expected.model, X)[0])
        alone = og.graph.select_model_inputs_outputs(model, [taken])
        assert list(Tokens(alone, ROWS, wordpiece()).notes) == []


def test_tokenizers_beside_the_model(tmp_path):
    onnx.save(token_encoder(), tmp_path / "m.onnx")
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES))
    by_vocab = Tokens(tmp_path / "m.onnx", ROWS, at="hidden")
    wordpiece().save(str(tmp_path / "tokenizer.json"))
    by_json = Tokens(str(tmp_path / "m.onnx"), ROWS, at="hidden")
    for (X, _, _), (Z, _, _) in zip(
        reader_batches(by_vocab.data), reader_batches(by_json.data), strict=True
    ):
        np.testing.assert_array_equal(X["input_ids"], Z["input_ids"])


# -- loss and gradient -----------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, [1.0, 3.0, 0.5, 2.0, 4.0]])
def test_loss_and_gradient_are_those_of_torch(weights):
    torch = pytest.importorskip("torch")
    task = Tokens(token_encoder(), ROWS, wordpiece(), at="hidden")
    options = {} if weights is None else {"class_weight": np.float32(weights)}
    trainer = task.trainer(optimizer="sgd", learning_rate=1.0, train=["head.*"], **options)
    W, b = (initializer_arrays(task.model)[f"head.{part}"] for part in ("weight", "bias"))
    trainer.fit(task.data, batch_size=40, epochs=1)
    [(X, y, _)] = reader_batches(task.data, 40)
    ids, mask = torch.tensor(X["input_ids"]), torch.tensor(X["attention_mask"]).float()[..., None]
    e = torch.tensor(TABLE)[ids]
    hidden = e + (e * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    W, b = (torch.tensor(np.array(v), requires_grad=True) for v in (W, b))
    weight = None if weights is None else torch.tensor(weights)
    loss = torch.nn.CrossEntropyLoss(weight, ignore_index=-100)
    value = loss((hidden @ W + b).flatten(0, 1), torch.tensor(y).flatten())
    value.backward()
    assert trainer.history[0]["loss"] == pytest.approx(value.item(), rel=1e-5)
    for name, v in {"head.weight": W, "head.bias": b}.items():
        expected = (v - v.grad).detach().numpy()
        np.testing.assert_allclose(trainer.state.weights[name], expected, rtol=1e-5, atol=1e-5)


# -- metric ----------------------------------------------------------------------------------------


def test_the_metric_of_a_task_skips_what_is_padded():
    task = Tokens(token_encoder(), ROWS, wordpiece(), at="hidden")
    trainer = task.trainer()
    once = trainer.evaluate(task.data)
    results = task.predict(trainer, [row["tokens"] for row in ROWS])
    hits = total = right = count = 0
    for row, found in zip(ROWS, results, strict=True):
        ends = np.cumsum([len(word) + 1 for word in row["tokens"]]) - 1
        last = {int(end): i for i, end in enumerate(ends)}
        starts = ends - [len(word) for word in row["tokens"]]
        first = {int(start): i for i, start in enumerate(starts)}
        own = {(first[e["start"]], last[e["end"]], e["label"]) for e in found}
        expected = entity_spans(row["tags"])
        hits, total = hits + len(own & expected), total + len(own) + len(expected)
    assert once["entity_f1"] == pytest.approx(2 * hits / total)
    for X, y, _ in reader_batches(task.data):
        [scores] = run(task.model, {n: np.asarray(a, np.int64) for n, a in X.items()})
        right += ((scores.argmax(2) == y) & (y >= 0)).sum()
        count += (y >= 0).sum()
    assert once["accuracy"] == pytest.approx(right / count)


# -- training, predictions and files ---------------------------------------------------------------


def entities_of_file(model, row):
    """Return the entities by the file alone, of one text at a time."""
    text = " ".join(row["tokens"])
    ids, words = ids_of(text)
    X = {"input_ids": [ids], "attention_mask": [[1] * len(ids)], "token_type_ids": [[0] * len(ids)]}
    scores = run(model, X)[0][0].astype(np.float64)
    heads = [i for i, w in enumerate(words) if w >= 0 and words[i - 1] != w]
    tags = [NAMES[scores[i].argmax()] for i in heads]
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    spans = [match.span() for match in re.finditer(r"\S+", text)]
    best = [float(shares[i].max()) for i in heads]
    return [
        (spans[a][0], spans[b][1], kind, np.mean(best[a : b + 1]))
        for a, b, kind in sorted(entity_spans(tags))
    ]


def test_training_prediction_and_files(tmp_path):
    """Words with an a are places, the F1 rises, and the file predicts the same by itself."""
    rows = [
        {"tokens": r["tokens"], "tags": ["B-LOC" if w[0] in "abc" else "O" for w in r["tokens"]]}
        for r in ROWS
    ]
    task = Tokens(token_encoder(), rows, wordpiece(), at="hidden", classes=NAMES)
    trainer = task.trainer(learning_rate=0.05, seed=0)
    trainer.fit(task.data, epochs=30, batch_size=8, validation=task.read(rows[:10]))
    first, *_, last = (entry["validation_entity_f1"] for entry in trainer.history)
    assert last > 0.95 > first
    trainer.save(tmp_path / "m.onnx")
    again = Tokens(tmp_path / "m.onnx", tokenizer=wordpiece())
    assert again.classes == NAMES
    assert again.data is None
    texts = [" ".join(row["tokens"]) for row in rows]
    results = task.predict(trainer, texts)
    assert results == again.predict(tmp_path / "m.onnx", texts)
    assert sum(map(len, results)) > 40
    for row, found in zip(rows, results, strict=True):
        expected = entities_of_file(trainer.model, row)
        assert [(e["start"], e["end"], e["label"]) for e in found] == [e[:3] for e in expected]
        np.testing.assert_allclose([e["score"] for e in found], [e[3] for e in expected], rtol=1e-5)
    before = og.graph.select_model_inputs_outputs(token_encoder(), ["hidden"])
    nodes = [node.SerializeToString() for node in trainer.model.graph.node]
    assert nodes[:-2] == [node.SerializeToString() for node in before.graph.node]
    files = task.write(texts, results, tmp_path / "out")
    assert [path.name for path in files] == ["entities.jsonl", "entities.conll", "entities.html"]
    for path in files[:2]:
        scored = trainer.evaluate(again.read(path))
        assert scored["entity_f1"] == 1.0
    assert "<mark>" in files[2].read_text()


def test_long_texts_are_predicted_as_short_ones():
    """Rows overlap: with a model that sees one token, they predict what one row does."""
    model = parse_model(
        "g (int64[N,T] input_ids) => (float[N,T,6] y) { y = Gather(t, input_ids) }", t=TABLE
    )
    task = Tokens(model, ROWS, wordpiece(), classes=NAMES)
    short = Tokens(task.model, None, wordpiece(), max_length=20, stride=4)
    rng = np.random.default_rng(2)
    texts = [random_sentence(rng, 60)["tokens"] for _ in range(20)] + [[]]
    texts = [text or "" for text in texts]
    whole = task.predict(task.model, texts)
    assert whole[-1] == []
    assert sum(map(len, whole)) > 100
    for found, expected in zip(short.predict(task.model, texts), whole, strict=True):
        assert [{**e, "score": 0} for e in found] == [{**e, "score": 0} for e in expected]


def test_models_without_a_mask_see_no_padding():
    text = """g (int64[N,T] input_ids) => (float[N,T,6] y)
        { e = Gather(t, input_ids)  m = ReduceMean<keepdims=1>(e, one)  y = Add(e, m) }"""
    task = Tokens(parse_model(text, t=TABLE, one=np.array([1])), ROWS, wordpiece(), classes=NAMES)
    for X, _, _ in reader_batches(task.data):
        assert (X["input_ids"] > 0).all()
    texts = [row["tokens"] for row in ROWS]
    together = task.predict(task.model, texts)
    assert sum(map(len, together)) > 40
    alone = [task.predict(task.model, [text])[0] for text in texts]
    for found, expected in zip(together, alone, strict=True):
        assert [{**e, "score": 0} for e in found] == [{**e, "score": 0} for e in expected]


def test_models_that_end_with_a_softmax():
    """The loss and the scores are those of the same model without it."""
    plain = Tokens(token_encoder(), ROWS, wordpiece(), at="hidden")
    model = onnx.ModelProto()
    model.CopyFrom(plain.model)
    model.graph.node[-1].output[0] = "scores"
    model.graph.node.append(onnx.helper.make_node("Softmax", ["scores"], ["logits"]))
    other = Tokens(model, ROWS, wordpiece())
    assert other.model == model
    texts = [row["tokens"] for row in ROWS]
    pairs = [task.predict(task.model, texts) for task in (plain, other)]
    for found, expected in zip(*pairs, strict=True):
        assert [{**e, "score": 0} for e in found] == [{**e, "score": 0} for e in expected]
        np.testing.assert_allclose(
            [e["score"] for e in found], [e["score"] for e in expected], rtol=1e-5
        )
    losses = [task.trainer().evaluate(task.data)["loss"] for task in (plain, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_models_with_a_head(tmp_path):
    text = """g (int64[N,T] input_ids) => (float[N,T,3] logits)
        { e = Gather(table, input_ids)  m = MatMul(e, w)  logits = Add(m, b) }"""
    w = R.standard_normal((6, 3)).astype(np.float32)
    model = parse_model(text, table=TABLE, w=w, b=np.zeros(3, np.float32))
    onnx.save(model, tmp_path / "m.onnx")
    names = {"0": "O", "1": "B-PER", "2": "I-PER"}
    (tmp_path / "config.json").write_text(json.dumps({"id2label": names}))
    rows = [{"tokens": ["a"], "tags": ["B-PER"]}]
    kept = Tokens(tmp_path / "m.onnx", rows, wordpiece())
    assert kept.model.graph == onnx.load(tmp_path / "m.onnx").graph
    assert Tokens(kept.model, None, wordpiece()).classes == [*names.values()]
    other = Tokens(tmp_path / "m.onnx", ROWS, wordpiece())
    assert other.classes == NAMES
    assert other.model.graph.output[0].type.tensor_type.shape.dim[2].dim_value == 5
    parts = [{"tokens": ["a", "b"], "pos_tags": ["NOUN", "VERB"]}]
    tags = Tokens(model, parts, wordpiece())
    assert tags.classes == ["NOUN", "VERB"]
    assert tags.metrics == ["accuracy"]
    assert [e["end"] for e in tags.predict(tags.model, [["ab", "c"]])[0]] == [2, 4]
