"""Encoder-decoders in two files, against transformers: training, files and greedy decoding."""

from __future__ import annotations

import re
import warnings

import numpy as np
import onnx
import pytest

import onnxgrad as og
from tests.support.errors import naming
from tests.support.exports import export_module
from tests.support.models import initializer_arrays, operator_names, parse_model
from tests.support.running import in_sweep, run_named

RNG = np.random.default_rng(0)
PAIRS, VOCABULARY, START, END, PAD = 50, 40, 0, 1, 0
SOURCE = RNG.integers(3, VOCABULARY, (PAIRS, 6))
SOURCE[:20, 4:] = PAD
LABELS = RNG.integers(3, VOCABULARY, (PAIRS, 5))
LABELS[:, 4] = END
LABELS[:10, 3], LABELS[:10, 4] = END, -100
DATA = {
    "input_ids": SOURCE,
    "attention_mask": (SOURCE != PAD).astype(np.int64),
    "decoder_input_ids": og.language.shift_right(LABELS, START, PAD),
}
TOKENS = {"start": START, "end": END, "pad": PAD, "max_new_tokens": 8}


class T5Files:
    """A random T5 of transformers, and its two files."""

    def __init__(self, tied: bool, folder) -> None:
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        config = transformers.T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
            dropout_rate=0.0, decoder_start_token_id=START, pad_token_id=PAD, eos_token_id=END,
            tie_word_embeddings=tied, feed_forward_proj="relu" if tied else "gated-gelu",
        )  # fmt: skip
        self.net = net = transformers.T5ForConditionalGeneration(config).eval()
        net.config._attn_implementation = "eager"
        if not tied:
            net.lm_head.weight = torch.nn.Parameter(0.1 * torch.randn(VOCABULARY, 16))

        class Encoder(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder = net.encoder

            def forward(self, input_ids, attention_mask):
                return self.encoder(input_ids, attention_mask).last_hidden_state

        class Decoder(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.net = net

            def forward(self, encoder_attention_mask, input_ids, encoder_hidden_states):
                return self.net(
                    encoder_outputs=(encoder_hidden_states,), decoder_input_ids=input_ids,
                    attention_mask=encoder_attention_mask, use_cache=False,
                ).logits  # fmt: skip

        ids, mask = torch.tensor(SOURCE[:2]), torch.ones(2, 6, dtype=torch.int64)
        states = torch.zeros(2, 6, 16)
        self.encoder, self.decoder = str(folder / "encoder.onnx"), str(folder / "decoder.onnx")
        rows, source = {0: "batch_size"}, {0: "batch_size", 1: "encoder_sequence_length"}
        target = rows | {1: "decoder_sequence_length"}
        of_encoder = {"input_ids": source, "attention_mask": source, "last_hidden_state": source}
        of_decoder = {
            "encoder_attention_mask": source, "input_ids": target, "encoder_hidden_states": source,
            "logits": target,
        }  # fmt: skip
        for module, examples, path, axes in (
            (Encoder(), (ids, mask), self.encoder, of_encoder),
            (Decoder(), (mask, ids[:, :4], states), self.decoder, of_decoder),
        ):
            names = {"input_names": [*axes][:-1], "output_names": [*axes][-1:]}
            model = export_module(module, examples, dynamic_axes=axes, opset_version=18, **names)
            onnx.save(model, path)

    def loss(self):
        """Return the loss of transformers of all pairs."""
        import torch

        ids, mask, _ = (torch.tensor(x) for x in DATA.values())
        return self.net(input_ids=ids, attention_mask=mask, labels=torch.tensor(LABELS)).loss

    def generate(self) -> np.ndarray:
        import torch

        ids, mask, _ = (torch.tensor(x) for x in DATA.values())
        found = self.net.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=8, num_beams=1, do_sample=False
        )
        return found.numpy()[:, 1:]

    def parameter(self, row):
        """Return the parameter that a row of `trainable` is, and whether the file transposes it."""
        name = (row.alias or row.name).removeprefix("net.")
        named = dict(self.net.named_parameters(remove_duplicate=False))
        return named[name], bool(row.alias)


@pytest.fixture(scope="module", params=["tied", in_sweep("untied")])
def t5(request, tmp_path_factory):
    return T5Files(request.param == "tied", tmp_path_factory.mktemp("t5"))


def label_trainer(model, **options):
    return og.Trainer(model, {"logits": "cross_entropy"}, **options)


@pytest.fixture(scope="module")
def t5_step(t5):
    """Return the joined model, the loss, and the trainer after one step of all pairs."""
    joined = og.language.join_encoder_decoder(t5.encoder, t5.decoder)
    step = label_trainer(joined, optimizer="sgd", learning_rate=1.0)
    loss = step.evaluate(DATA, LABELS, batch_size=20)["loss"]
    return joined, loss, step.fit(DATA, LABELS, epochs=1, batch_size=PAIRS)


def test_loss_and_gradients_of_t5(t5, t5_step):
    """Every parameter of transformers trains, and its gradient is the same."""
    joined, loss, step = t5_step
    assert [x.name for x in joined.graph.input] == list(DATA)
    rows = og.trainable(joined).trained
    assert sum(row.size for row in rows) == sum(p.numel() for p in t5.net.parameters())
    expected = t5.loss()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-6)
    t5.net.zero_grad()
    expected.backward()
    before, compared = og.graph.get_train_initializer(joined), set()
    for row in rows:
        p, transposed = t5.parameter(row)
        gradient = before[row.name][0] - step.state.weights[row.name]
        expected = p.grad.numpy().T if transposed else p.grad.numpy()
        np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=2e-6, err_msg=row.name)
        compared.add(id(p))
    assert compared == {id(p) for p in t5.net.parameters()}


def test_decoding_by_the_files_is_that_of_transformers(t5, t5_step):
    """Before a training, and after it with the weights that it found."""
    import torch

    joined, _, step = t5_step
    found = og.language.greedy_decode(t5.encoder, t5.decoder, SOURCE, **TOKENS)
    np.testing.assert_array_equal(found, t5.generate())
    files = og.language.split_encoder_decoder(step.model, t5.encoder, t5.decoder)
    for file, path in zip(files, (t5.encoder, t5.decoder), strict=True):
        before = onnx.load(path)
        assert file.graph.input == before.graph.input
        assert file.graph.output == before.graph.output
        onnx.checker.check_model(file, full_check=True)
    learned = og.language.greedy_decode(*files, SOURCE, **TOKENS)
    assert not np.array_equal(learned, found)
    kept = {name: value.clone() for name, value in t5.net.state_dict().items()}
    with torch.no_grad():
        for row in og.trainable(joined).trained:
            p, transposed = t5.parameter(row)
            value = torch.tensor(step.state.weights[row.name])
            p.copy_(value.T if transposed else value)
    np.testing.assert_array_equal(learned, t5.generate())
    t5.net.load_state_dict(kept)


@pytest.mark.sweep
@pytest.mark.parametrize("merge", [True, False])
def test_t5_with_adapters(t5, merge):
    """Merged into float files, or apart beside the integers of onnxruntime's quantizer."""
    quantization = pytest.importorskip("onnxruntime.quantization")
    encoder, decoder = t5.encoder, t5.decoder
    if merge:
        joined = og.add_lora(og.language.join_encoder_decoder(encoder, decoder), "*", rank=16)
    else:
        for path in (encoder, decoder):
            quantization.quantize_dynamic(path, f"{path}.int8")
        encoder, decoder = (og.add_lora(f"{p}.int8", "*", rank=16) for p in (encoder, decoder))
        joined = og.language.join_encoder_decoder(encoder, decoder)
    learner = label_trainer(joined, optimizer="adam", learning_rate=0.01)
    assert all(".lora_" in name for name in learner.trained)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # straight through
        learner.fit(DATA, LABELS, epochs=200, batch_size=25)
    if merge:
        with pytest.raises(ValueError, match=r"lora_A.*merge_lora"):
            og.language.split_encoder_decoder(learner.model, encoder, decoder)
    trained = og.merge_lora(learner.model) if merge else learner.model
    files = og.language.split_encoder_decoder(trained, encoder, decoder)
    learned = og.language.greedy_decode(*files, SOURCE, **TOKENS)[:, :5]
    right = (learned == np.where(LABELS < 0, PAD, LABELS)).all(axis=1)
    assert right.mean() > 0.9


# -- files by hand: a decoder, the same with a cache, and both in one ------------------------------

ENCODER = """encoder (int64[N,S] input_ids, int64[N,S] attention_mask)
    => (float[N,S,4] last_hidden_state) {
    e = Gather(table, input_ids) m = Cast<to=1>(attention_mask) u = Unsqueeze(m, last)
    f = Mul(e, u) last_hidden_state = MatMul(f, inner) }"""
STEP = """e# = Gather(table, input_ids) s# = ReduceMean(k#, axis) h# = Add(e#, s#)
    n# = LayerNormalization(h#, scale) logits = MatMul(n#, words)"""
KEYS = "k# = MatMul(encoder_hidden_states, keys)"
INPUTS = "int64[N,S] encoder_attention_mask, int64[N,T] input_ids"
STATES, PAST_KEY = "float[N,S,4] encoder_hidden_states", "past_key_values_0_encoder_key"
RESULTS = "(float[N,T,7] logits, float[N,S,4] present_0_encoder_key)"
DECODER = f"""decoder ({INPUTS}, {STATES}) => {RESULTS} {{
    {KEYS} {STEP} present_0_encoder_key = Identity(k#) }}"""
PAST = f"""decoder ({INPUTS}, float[N,S,4] {PAST_KEY}) => (float[N,T,7] logits) {{
    k# = Identity({PAST_KEY}) {STEP} }}"""
MERGED = f"""decoder ({INPUTS}, {STATES}, float[N,S,4] {PAST_KEY}, bool[1] use_cache_branch)
    => {RESULTS} {{
    logits, present_0_encoder_key = If(use_cache_branch) <
    then_branch = past () => (float[N,T,7] logits, float[N,S,4] k1) {{
        k1 = Identity({PAST_KEY}) {STEP.replace("#", "1")} }},
    else_branch = first () => (float[N,T,7] logits, float[N,S,4] k2) {{
        {KEYS.replace("#", "2")} {STEP.replace("#", "2")} }}> }}"""


def random_floats(*shape):
    return RNG.normal(size=shape).astype(np.float32)


TABLE = random_floats(7, 4)
WEIGHTS = {
    **{
        "table": TABLE,
        "words": TABLE.T.copy(),
        "inner": random_floats(4, 4),
        "keys": random_floats(4, 4),
    },
    **{"scale": 1 + random_floats(4), "last": np.array([2]), "axis": np.array([1])},
}


def hand_written_file(text: str, suffix: str = "", **arrays) -> onnx.ModelProto:
    """Return a model with those of the weights that it reads; their names get a suffix."""
    text, held = text.replace("#", ""), {}
    for name, array in {**WEIGHTS, **arrays}.items():
        text, count = re.subn(rf"\b{name}\b", name + suffix, text)
        held |= {name + suffix: array} if count else {}
    data = parse_model(text, opset=20, **held).SerializeToString()  # in text, no name has a dot
    for name in ("present_0_encoder_key", PAST_KEY):
        data = data.replace(name.encode(), name.replace("_0_encoder_", ".0.encoder.").encode())
    return onnx.load_from_string(data)


def fit_small_files(encoder, decoder):
    data = {
        "input_ids": RNG.integers(0, 7, (8, 3)),
        "attention_mask": np.ones((8, 3), np.int64),
        "decoder_input_ids": RNG.integers(0, 7, (8, 4)),
    }
    joined = og.language.join_encoder_decoder(encoder, decoder)
    learner = label_trainer(joined, optimizer="sgd", learning_rate=0.5)
    return data, learner.fit(data, RNG.integers(0, 7, (8, 4)), epochs=3)


def test_all_files_get_the_weights():
    """Weights have other names there, or one of both branches; and the cache is the same."""
    encoder, decoder = hand_written_file(ENCODER), hand_written_file(DECODER)
    others = hand_written_file(PAST, "_3"), hand_written_file(MERGED, "_merged_0")
    data, learner = fit_small_files(encoder, decoder)
    assert learner.trained == ["table", "inner", "keys", "scale"]  # and words, a copy
    files = og.language.split_encoder_decoder(learner.model, encoder, decoder, *others)
    for file, before in zip(files, (encoder, decoder, *others), strict=True):
        assert [*initializer_arrays(file)] == [*initializer_arrays(before)]
        assert operator_names(file) == operator_names(before)
    expected = learner.predict(data)
    feed = {"input_ids": data["input_ids"], "attention_mask": data["attention_mask"]}
    [states] = run_named(files[0], feed).values()
    feed = {
        "encoder_attention_mask": data["attention_mask"],
        "input_ids": data["decoder_input_ids"],
        "encoder_hidden_states": states,
        "past_key_values.0.encoder.key": np.zeros_like(states),
        "use_cache_branch": np.array([False]),
    }
    for file in (files[1], files[3]):
        results = run_named(file, feed)
        np.testing.assert_allclose(results["logits"], expected, rtol=1e-4, atol=1e-5)
    feed["past_key_values.0.encoder.key"] = results["present.0.encoder.key"]
    feed["use_cache_branch"] = np.array([True])
    for file in files[2:]:
        np.testing.assert_allclose(run_named(file, feed)["logits"], expected, rtol=1e-4, atol=1e-5)


def test_a_merged_decoder_is_joined_by_itself():
    encoder, decoder, merged = (
        hand_written_file(ENCODER),
        hand_written_file(DECODER),
        hand_written_file(MERGED),
    )
    data, learner = fit_small_files(encoder, merged)
    plain = label_trainer(og.language.join_encoder_decoder(encoder, decoder))
    np.testing.assert_array_equal(
        label_trainer(og.language.join_encoder_decoder(encoder, merged)).predict(data),
        plain.predict(data),
    )
    files = og.language.split_encoder_decoder(learner.model, encoder, merged, decoder)
    ids = data["input_ids"]
    found = [og.language.greedy_decode(files[0], file, ids, start=0, pad=-1) for file in files[1:]]
    np.testing.assert_array_equal(*found)
    assert found[0].shape == (8, 64)
    before = og.language.greedy_decode(encoder, merged, ids, start=0, pad=-1)
    assert not np.array_equal(found[0], before)


def test_files_that_would_not_follow_are_refused():
    encoder, decoder = hand_written_file(ENCODER), hand_written_file(DECODER)
    _, learner = fit_small_files(encoder, decoder)
    model = learner.model
    foreign = hand_written_file(PAST, scale=1 + random_floats(4))
    with pytest.raises(ValueError, match=naming("file 3", "has 'scale'")):
        og.language.split_encoder_decoder(model, encoder, decoder, foreign)
    without = hand_written_file(PAST.replace("LayerNormalization(h#, scale)", "Identity(h#)"))
    with pytest.raises(ValueError, match=naming("file 3", "lacks", "'scale'")):
        og.language.split_encoder_decoder(model, encoder, decoder, without)
    with pytest.raises(ValueError, match=naming("joined", "'decoder.table'")):
        og.language.split_encoder_decoder(
            model, encoder, hand_written_file(DECODER, table=random_floats(9, 4))
        )
    with pytest.raises(ValueError, match=naming("joined", "merge_lora")):
        og.language.split_encoder_decoder(og.add_lora(model, "keys"), encoder, decoder)
    with pytest.raises(ValueError, match=r"a cache: pass decoder_model\.onnx"):
        og.language.join_encoder_decoder(encoder, hand_written_file(PAST))


def test_equal_weights_are_told_by_name_or_refused():
    """Two tensors that began as one number, and were trained apart."""
    fresh = np.ones(4, np.float32)
    text = DECODER.replace("n# = L", "g# = LayerNormalization(h#, first) n# = L")
    text = text.replace("LayerNormalization(h#, scale)", "LayerNormalization(g#, scale)")
    past = text.replace(KEYS, f"k# = Identity({PAST_KEY})").replace(
        "present_0_encoder_key = Identity(k#)", ""
    )
    past = past.replace(STATES, f"float[N,S,4] {PAST_KEY}").replace(
        RESULTS, "(float[N,T,7] logits)"
    )
    encoder = hand_written_file(ENCODER)
    decoder, same, other = (
        hand_written_file(t, suffix, scale=fresh, first=fresh)
        for t, suffix in ((text, ""), (past, ""), (past, "_other"))
    )
    _, learner = fit_small_files(encoder, decoder)
    *_, file = og.language.split_encoder_decoder(learner.model, encoder, decoder, same)
    weights = og.graph.get_train_initializer(file)
    for name in ("scale", "first"):
        np.testing.assert_array_equal(weights[name][0], learner.state.weights[name])
    with pytest.raises(ValueError, match=naming("file 3", "'first', 'scale'")):
        og.language.split_encoder_decoder(learner.model, encoder, decoder, other)


# -- files that were joined in any way: weights are found by name ----------------------------------

TWO_FILES = (
    """e (float[N,2] x) => (float[N,2] h) { m = MatMul(x, w) h = Add(m, b) }""",
    """d (float[N,2] s) => (float[N,2] z) { m = MatMul(s, w) z = Mul(m, c) }""",
)


def two_files(*texts, **arrays):
    values = {"w": random_floats(2, 2), "b": random_floats(2), "c": random_floats(2)} | arrays
    read = [{n: a for n, a in values.items() if re.search(rf"\b{n}\b", t)} for t in texts]
    second = read[1] | {"w": values["w"] + 1} if "w" in read[1] else read[1]
    return [parse_model(t, **own) for t, own in zip(texts, (read[0], second), strict=True)]


def changed_weights(model):
    """Return the model with other weights, and these."""
    new = {n: random_floats(*a.shape) for n, a in initializer_arrays(model).items()}
    return og.graph.replace_initializers_into_onnx(model, new), new


def test_files_that_were_joined_otherwise_get_their_weights_by_name():
    encoder, decoder = two_files(*TWO_FILES)
    joined = og.attach(encoder, decoder, {"h": "s"}, prefix="top.")
    trained, new = changed_weights(joined)
    assert sorted(new) == ["b", "c", "top.w", "w"]
    for mapping in ({"top.w": (1, "w")}, {"top.w": [(1, "w")], "w": (0, "w"), "b": "b", "c": "c"}):
        files = og.language.split_encoder_decoder(trained, encoder, decoder, mapping=mapping)
        first, second = map(initializer_arrays, files)
        np.testing.assert_equal(first, {"w": new["w"], "b": new["b"]})
        np.testing.assert_equal(second, {"w": new["top.w"], "c": new["c"]})
        x = random_floats(3, 2)
        [h] = run_named(files[0], {"x": x}).values()
        expected = run_named(trained, {"x": x})["z"]
        np.testing.assert_allclose(run_named(files[1], {"s": h})["z"], expected, rtol=1e-5)
    usual, values = changed_weights(og.attach(encoder, decoder, {"h": "s"}, prefix="decoder."))
    files = og.language.split_encoder_decoder(usual, encoder, decoder, mapping={})
    assert np.array_equal(initializer_arrays(files[1])["w"], values["decoder.w"])


def test_a_weight_of_several_files_by_name():
    """One table, which the second file stores transposed, and a third one by another name."""
    texts = (
        "e (int64[N] i) => (float[N,2] h) { h = Gather(table, i) }",
        "d (float[N,2] s) => (float[N,3] z) { z = MatMul(s, words) }",
        "p (float[N,2] s) => (float[N,3] z) { z = MatMul(s, table) }",
    )
    table = random_floats(3, 2)
    files = [
        parse_model(t, **{n: a})
        for t, (n, a) in zip(
            texts, [("table", table), ("words", table.T), ("table", table.T)], strict=True
        )
    ]
    joined = og.graph.tie_copies(og.attach(files[0], files[1], {"h": "s"}))
    trained, new = changed_weights(joined)
    [name] = new
    places = [(0, "table"), (1, "words"), (2, "table")]
    written = og.language.split_encoder_decoder(trained, *files, mapping={name: places})
    found = [next(iter(initializer_arrays(file).values())) for file in written]
    for array, expected in zip(found, (new[name], new[name].T, new[name].T), strict=True):
        np.testing.assert_array_equal(array, expected if new[name].shape == (3, 2) else expected.T)


def test_weights_that_a_mapping_does_not_match_are_named():
    encoder, decoder = two_files(*TWO_FILES)
    trained, _ = changed_weights(og.attach(encoder, decoder, {"h": "s"}, prefix="top."))
    for mapping, words in (
        ({}, ["trained model", "'top.w'", "mapping="]),
        ({"nothing": "w"}, ["trained weight", "mapping=", "'nothing'"]),
        ({"top.w": (1, "v")}, ["constant", "mapping=", "'v'", "Valid", "'c'"]),
        ({"top.w": (5, "w")}, ["constant", "mapping=", "'w'"]),
        ({"top.w": [(1, "w"), (1, "c")]}, ["'c'", "(2,)", "(2, 2)"]),
    ):
        with pytest.raises(ValueError, match=naming(*words)):
            og.language.split_encoder_decoder(trained, encoder, decoder, mapping=mapping)
    more = parse_model(
        "d (float[N,2] s) => (float[N,2] z) { m = MatMul(s, w) n = Add(m, extra) z = Mul(n, c) }",
        **initializer_arrays(decoder),
        extra=random_floats(2),
    )
    with pytest.raises(ValueError, match=naming("the decoder", "'extra'", "mapping=")):
        og.language.split_encoder_decoder(trained, encoder, more, mapping={"top.w": (1, "w")})


def test_labels_that_cannot_be_shifted():
    with pytest.raises(ValueError, match=naming("integers", "(N, T)")):
        og.language.shift_right([1, 2], start=0)
    with pytest.raises(ValueError, match=naming("integers", "(N, T)")):
        og.language.shift_right([[0.5]], start=0)


def test_an_array_is_the_only_input_of_the_encoder():
    """As features of sound, which are no tokens."""
    encoder = parse_model(
        "e (float[N,S,2] features) => (float[N,S,2] last_hidden_state) {"
        " last_hidden_state = Tanh(features) }"
    )
    decoder = parse_model(
        """d (int64[N,T] input_ids, float[N,S,2] encoder_hidden_states) => (float[N,T,2] logits) {
            t = Gather(w, input_ids) s = ReduceMax<keepdims=1>(encoder_hidden_states, one)
            logits = Add(t, s) }""",
        opset=20,
        w=np.float32([[0, 1], [1, 0]]),
        one=np.array([1]),
    )
    features = np.float32([[[0, 0]], [[9, -9]]])
    found = og.language.greedy_decode(
        encoder, decoder, features.tolist(), start=0, max_new_tokens=3
    )
    np.testing.assert_array_equal(found, [[1, 0, 1], [0, 0, 0]])


def test_inputs_that_the_encoder_does_not_have():
    encoder, decoder = hand_written_file(ENCODER), hand_written_file(DECODER)
    ids = np.ones((1, 2), np.int64)
    with pytest.raises(ValueError, match=r"\['attention_mask'\]"):
        og.language.greedy_decode(encoder, decoder, {"input_ids": ids}, start=0)
    inputs = {"input_ids": ids, "attention_mask": ids, "pixels": ids}
    with pytest.raises(ValueError, match=naming("['pixels']")):
        og.language.greedy_decode(encoder, decoder, inputs, start=0)
    two = parse_model("e (float[N,S,2] a, float[N,S,2] b) => (float[N,S,2] y) { y = Add(a, b) }")
    with pytest.raises(ValueError, match=naming("['a', 'b']")):
        og.language.greedy_decode(two, decoder, np.ones((1, 1, 2)), start=0)
