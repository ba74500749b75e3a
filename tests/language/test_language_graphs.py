"""Graphs of language models: types and shapes behind operators that onnxruntime adds to ONNX's, and
inputs that follow from the tokens.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.graph.infer import infer
from onnxgrad.model.convert import to_ir
from onnxgrad.operators.shapes import dims
from tests.support.errors import naming
from tests.support.microsoft_rows import CASES, kernel_model
from tests.support.models import parse_model
from tests.support.running import in_sweep, run

# a rank that depends on an operand, and statistics that onnx infers nothing of
UNKNOWN = {"ExpandDims", "ConvTransposeWithDynamicPads", "LayerNormalization 12"}
KNOWN = [case for case in CASES if case.id not in UNKNOWN]


@pytest.mark.parametrize("known", ["lengths", in_sweep("symbols")])
@pytest.mark.parametrize("case", KNOWN, ids=lambda case: case.id)
def test_inferred_is_what_runs(case, known):
    made = kernel_model(case, known)
    for y in made.graph.output:
        y.type.Clear()
    inferred = to_ir(made)
    infer(inferred)
    if case.formula is None:
        results = run(kernel_model(case), case.feed)
    else:
        results = case.formula(*case.feed.values())
        results = results if isinstance(results, tuple) else (results,)
    of_symbols = {f"{n}{i}": k for n, x in case.feed.items() for i, k in enumerate(x.shape)}
    for y, result in zip(inferred.graph.outputs, results, strict=True):
        assert case.formula or y.dtype.numpy() == result.dtype
        shape = dims(y)
        if shape is None:  # a kernel, or indices, of unknown lengths
            assert known == "symbols"
            assert case.id.startswith(("FusedConv", "GatherND"))
            continue
        assert len(shape) == result.ndim
        static = [of_symbols.get(d, d) for d in shape]
        unknown = [d for d in static if isinstance(d, str)]
        assert all(d in unknown or d == k for d, k in zip(static, result.shape, strict=True))
        if known == "lengths":  # but a cache grows by an amount that only its nodes know
            assert len(unknown) < 2 or case.id == "Pad", shape


# -- inputs that follow from the tokens ----------------------------------------------------------

RNG = np.random.default_rng(5)
ROWS, TOKENS, HEADS, SIZE, WORDS = 3, 5, 2, 8, 11
WIDTH = HEADS * SIZE
IDS = RNG.integers(0, WORDS, (ROWS, TOKENS))
MASK = np.ones_like(IDS)
MASK[1, 3:] = 0
NAMES = {"past_key": "past_key_values.0.key", "past_value": "past_key_values.0.value",
         "present_key": "present.0.key", "present_value": "present.0.value"}  # fmt: skip
EMPTY = np.zeros((ROWS, HEADS, 0, SIZE), np.float32)
CACHES = {NAMES["past_key"]: EMPTY, NAMES["past_value"]: EMPTY}
GROUPED = f"""mask_sum = ReduceSum<keepdims = 0>(attention_mask, axis) last = Sub(mask_sum, axis)
    lengths = Cast<to = 6>(last) mask_shape = Shape<start = 1, end = 2>(attention_mask)
    scalar = Squeeze(mask_shape) total = Cast<to = 6>(scalar)
    y, present_key, present_value = com.microsoft.GroupQueryAttention<num_heads = {HEADS},
        kv_num_heads = {HEADS}>(qkv, , , past_key, past_value, lengths, total)"""
JOINED = f"""q, k, v = Split<axis = 2, num_outputs = 3>(qkv)
    ka = Reshape(k, apart) kh = Transpose<perm = [0, 2, 1, 3]>(ka)
    va = Reshape(v, apart) vh = Transpose<perm = [0, 2, 1, 3]>(va)
    present_key = Concat<axis = 2>(past_key, kh) present_value = Concat<axis = 2>(past_value, vh)
    z, new_key, new_value = com.microsoft.MultiHeadAttention<num_heads = {HEADS},
        unidirectional = 1>(q, k, v, , , , past_key, past_value)
    kept = Cast<to = 1>(attention_mask) m = Unsqueeze(kept, two) y = Mul(z, m)"""


def cached_decoder_model(attention: str = GROUPED) -> onnx.ModelProto:
    """Return a model of one layer, with inputs and outputs as exporters write them."""
    shapes = {"table": (WORDS, WIDTH), "positions": (16, WIDTH), "weight": (WIDTH, 3 * WIDTH),
              "head": (WIDTH, WORDS)}  # fmt: skip
    rng = np.random.default_rng(1)
    weights = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    proto = parse_model(f"""
        g (int64[B, S] input_ids, int64[B, T] attention_mask, int64[B, S] position_ids,
           float[B, {HEADS}, P, C] past_key, float[B, {HEADS}, P, C] past_value)
        => (float[B, S, {WORDS}] logits, float[B, {HEADS}, T, C] present_key,
            float[B, {HEADS}, T, C] present_value)
        <int64[1] axis = {{1}}, int64[1] two = {{2}}, int64[4] apart = {{0, 0, {HEADS}, {SIZE}}}> {{
            rows = Gather(table, input_ids) places = Gather(positions, position_ids)
            x = Add(rows, places) qkv = MatMul(x, weight) {attention}
            logits = MatMul(y, head) }}""", opset=21, **weights)  # fmt: skip
    for node in proto.graph.node:
        node.input[:] = [NAMES.get(name, name) for name in node.input]
        node.output[:] = [NAMES.get(name, name) for name in node.output]
    for value in (*proto.graph.input, *proto.graph.output):
        value.name = NAMES.get(value.name, value.name)
    return proto


def train_two_epochs(proto, X, y=None, loss="causal_lm", **options):
    """Return the losses of two epochs, and the trainer."""
    trainer = og.Trainer(proto, loss, optimizer="sgd", learning_rate=0.05, train="*", **options)
    trainer.fit(X, y, epochs=2, shuffle=False)
    return [entry["loss"] for entry in trainer.history], trainer


@pytest.mark.parametrize("attention", [GROUPED, JOINED], ids=["grouped", "joined"])
def test_filled_inputs_are_those_given(attention):
    proto = cached_decoder_model(attention)
    file = proto.SerializeToString()
    tokens = {"input_ids": IDS, "attention_mask": MASK}
    with_positions = tokens | {"position_ids": np.maximum(MASK.cumsum(1) - 1, 0)}
    everything = with_positions | CACHES
    expected, reference = train_two_epochs(proto, everything, IDS)
    forms = [(tokens, IDS), (with_positions, IDS), ([(tokens, IDS)], None)]
    for X, y in forms if attention == GROUPED else forms[:1]:
        losses, trainer = train_two_epochs(proto, X, y)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(
        trainer.predict(tokens), reference.predict(everything), rtol=1e-4, atol=1e-5
    )
    assert trainer.evaluate(tokens, IDS)["loss"] == pytest.approx(
        reference.evaluate(everything, IDS)["loss"], rel=1e-5
    )
    assert proto.SerializeToString() == file
    assert trainer.model.graph.input == proto.graph.input


def test_a_cache_of_the_last_rows():
    """It is empty in training, and so as large as there are tokens."""
    window = GROUPED.replace("kv_num_heads", "local_window_size = 2, kv_num_heads")
    ring = window.replace("kv_num_heads", "sliding_window_cache = 1, kv_num_heads", 1)
    expected, reference = train_two_epochs(cached_decoder_model(window), IDS)
    losses, trainer = train_two_epochs(cached_decoder_model(ring), IDS)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    np.testing.assert_allclose(trainer.predict(IDS), reference.predict(IDS), rtol=1e-5, atol=1e-6)
    attributes = {a.name for node in trainer.model.graph.node for a in node.attribute}
    assert "sliding_window_cache" in attributes


def test_tokens_alone():
    """Without a mask, it is one for every token; any loss of the logits trains."""
    ones = {"attention_mask": np.ones_like(IDS), "position_ids": np.arange(TOKENS) + 0 * IDS}
    expected, _ = train_two_epochs(cached_decoder_model(), {"input_ids": IDS} | ones | CACHES, IDS)
    for X, y in ((IDS, IDS), ({"input_ids": IDS}, None)):
        losses, _ = train_two_epochs(cached_decoder_model(), X, y)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
    by_output, _ = train_two_epochs(cached_decoder_model(), IDS, None, {"logits": "causal_lm"})
    np.testing.assert_allclose(by_output, expected, rtol=1e-5)
    other, _ = train_two_epochs(
        cached_decoder_model(), IDS, IDS, "cross_entropy", loss_options={"shift": True}
    )
    np.testing.assert_allclose(other, expected, rtol=1e-5)


def test_what_is_not_filled():
    """Batches that are not known before they are read, padded rows, and models of other kinds."""
    proto = cached_decoder_model()

    def batches():
        yield {"input_ids": IDS, "label": IDS}

    assert train_two_epochs(proto, batches)[0]  # a function that can be called again
    with pytest.raises(ValueError, match=naming("no data", "'attention_mask'")):
        og.Trainer(proto, "causal_lm", train="*").fit(batches())
    ragged = og.data.by_length(
        {"input_ids": [row[:n] for row, n in zip(IDS, (5, 2, 4), strict=True)]}
    )
    with pytest.raises(ValueError, match=naming("no data", "'attention_mask'")):
        og.Trainer(proto, "causal_lm", train="*").fit(ragged)
    held = {"input_ids": IDS, "attention_mask": MASK} | CACHES  # which might hold rows
    with pytest.raises(ValueError, match=naming("no data", "'position_ids'")):
        og.Trainer(proto, "causal_lm", train="*").fit(held, IDS)
    cut = {"input_ids": IDS, "attention_mask": MASK[:, :4]}
    with pytest.raises(ValueError, match=r"length \d along axis 1.* has length \d"):
        og.Trainer(proto, "causal_lm", train="*").fit(cut, IDS)
    text = """g (int64[B, S] input_ids, float[B, S] attention_mask) => (float[B, S, 2] logits)
        <int64[1] two = {2}> { x = Gather(table, input_ids) m = Unsqueeze(attention_mask, two)
            logits = Mul(x, m) }"""
    encoder = parse_model(text, table=RNG.standard_normal((WORDS, 2)).astype(np.float32))
    with pytest.raises(ValueError, match=naming("no data", "'attention_mask'")):
        og.Trainer(encoder, "cross_entropy", train="*").fit({"input_ids": IDS}, IDS % 2)


def test_stack_without_caches():
    rates, options = [0.05, 0.01], {"optimizer": "sgd", "train": "*"}
    proto = cached_decoder_model()
    stack = og.TrainerStack(proto, "causal_lm", learning_rate=rates, **options).fit(IDS)
    one = og.Trainer(proto, "causal_lm", learning_rate=rates[1], **options).fit(IDS)
    for name, w in one.state.weights.items():
        np.testing.assert_allclose(stack.state.weights[name][1], w, rtol=1e-4, atol=1e-6)


# -- as the builder of onnxruntime-genai writes them ---------------------------------------------


def small_configuration(name: str):
    import transformers

    sizes = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4 if name == "Phi" else 2,
        "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    }  # fmt: skip
    more = {
        "Llama": {}, "Qwen2": {"tie_word_embeddings": True}, "Qwen3": {"head_dim": 16},
        "Phi": {"partial_rotary_factor": 0.5}, "Phi3": {"original_max_position_embeddings": 64},
        "Gemma2": {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16},
    }  # fmt: skip
    return getattr(transformers, f"{name}Config")(**sizes, **more[name])


@pytest.mark.sweep
@pytest.mark.parametrize("precision", ["fp32", "int4"])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Phi", "Phi3", "Gemma2"])
def test_built(name, precision, tmp_path):
    """Loss and gradients are those of transformers; adapters train in every position."""
    pytest.importorskip("onnxruntime_genai")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(
        small_configuration(name), attn_implementation="eager"
    ).float()
    network.save_pretrained(tmp_path / "hf")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "hf")
    places = ["-i", tmp_path / "hf", "-o", tmp_path / "out", "-c", tmp_path / "cache"]
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", precision]
    subprocess.run([*command, "-e", "cpu", *map(os.fspath, places)], check=True)
    file, ids = tmp_path / "out" / "model.onnx", RNG.integers(3, 96, (4, 9))
    mask = np.ones_like(ids)
    mask[1, 6:] = 0
    X, labels = {"input_ids": ids, "attention_mask": mask}, np.where(mask == 1, ids, -100)
    tensors = {n: torch.tensor(a) for n, a in X.items()}
    loss = network(**tensors, labels=torch.tensor(labels)).loss
    trainer = og.Trainer(file, "causal_lm", optimizer="sgd", learning_rate=1.0, train="*norm*")
    found = trainer.evaluate(X)["loss"]
    assert found == pytest.approx(loss.item(), rel=1e-4 if precision == "fp32" else 2e-2)
    if precision == "fp32":
        loss.backward()
        own = {n: p.grad.numpy() for n, p in network.named_parameters() if p.grad is not None}
        before = {n: a.copy() for n, a in trainer.state.weights.items()}
        trainer.fit(X)
        names = [n for n in before if "layers.2" not in n and n in own]
        assert names
        for n in names:
            gradient = before[n] - trainer.state.weights[n]
            np.testing.assert_allclose(gradient, own[n], rtol=1e-2, atol=1e-4)
    mlp = ["*fc1*", "*fc2*"] if name == "Phi" else ["*gate_proj*", "*up_proj*", "*down_proj*"]
    for pattern in ["*qkv*" if name != "Qwen3" else "*q*proj*", "*o_proj*", *mlp]:
        adapted = og.add_lora(file, pattern, rank=2)
        history = og.Trainer(adapted, "causal_lm", learning_rate=1e-2).fit(X, epochs=4).history
        assert history[-1]["loss"] < history[0]["loss"]
