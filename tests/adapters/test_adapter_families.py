"""Adapters by the modules of language models, whatever wrote the file: PEFT uses every tensor."""

from __future__ import annotations

import copy
import json
import warnings

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

import onnxgrad as og
from onnxgrad.model.notes import read_adapters
from tests.support.adapter_cases import random_model, rename_constants, shaken
from tests.support.errors import naming
from tests.support.exports import export_module
from tests.support.running import in_sweep, run, run_named

TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
LAYER = "model.layers.0"


def saved_tensors(model, folder) -> dict[str, np.ndarray]:
    """Return the tensors that `save_adapter` writes, by their keys without what all have."""
    og.save_adapter(model, folder)
    return {key.removeprefix(PREFIX): x for key, x in load_file(folder / TENSORS).items()}


def change(tensors: dict[str, np.ndarray], module: str, scaling: float = 1.0) -> np.ndarray:
    """Return the product of the factors of a module, [inputs, outputs]."""
    a, b = (tensors[f"{module}.lora_{n}.weight"] for n in "AB")
    return scaling * (b @ a).T


# -- by names: files as the builder and other exporters write them -----------------------------


@pytest.mark.parametrize("module", ["mlp.gate_up_proj", f"{LAYER}.self_attn.qkv_proj"])
def test_joined_modules_of_the_network_stay_one(module, tmp_path):
    text = "f (float[N,4] x) => (float[N,12] y) { y = MatMul(x, w) }"
    model = rename_constants(random_model(text, w=(4, 12)), {"w": f"{module}.weight"})
    adapted = shaken(og.add_lora(model, "*", rank=2))
    assert set(saved_tensors(adapted, tmp_path)) == {f"{module}.lora_{n}.weight" for n in "AB"}
    assert og.load_adapter(model, tmp_path) == adapted


def joined_model(reader: str = "split") -> onnx.ModelProto:
    """Return joined weights of q, k and v, with a bias, and what the builder writes behind it.

    A `reader` of com.microsoft is an attention that reads all three in one operand.
    """
    text = """f (float[N,4] x) => (float[N,8] q, float[N,2] k, float[N,2] v) { p = MatMul(x, w)
        s = Add(p, bias) q, k, v = Split<axis = -1>(s, sizes) }"""
    if reader == "unknown":
        text = """f (float[N,4] x) => (float[N,12] y) { p = MatMul(x, w) s = Add(p, bias)
            y = Add(s, sizes) }"""
    if reader == "clipped":  # as some networks do with q, k and v
        text = text.replace("s = Add(p, bias)", "a = Add(p, bias) s = Clip(a)")
    if reader.endswith("Attention"):
        text = f"""f (float[N,T,4] x, float[N,2,P,4] c, int32[N] n, int32 t) => (float[N,T,8] y)
            {{ p = MatMul(x, w) s = Add(p, bias)
            y = com.microsoft.{reader}<num_heads = 4, kv_num_heads = 1>(s, , , c, c, n, t) }}"""
    sizes = np.array([8, 2, 2]) if reader in ("split", "clipped") else np.ones(12, np.float32)
    model = random_model(text, w=(4, 12), bias=(12,), sizes=sizes)
    return rename_constants(model, {"w": f"{LAYER}.attn.qkv_proj.MatMul.weight"})


@pytest.mark.parametrize(
    ("reader", "use_dora"),
    [("split", False), ("split", True), ("clipped", False), ("SparseAttention", False)],
)
def test_a_reader_tells_the_columns_of_q_k_and_v(reader, use_dora, tmp_path):
    """As a Split for Qwen3, where norms stand between the product and attention."""
    model, columns = joined_model(reader), {"q": slice(8), "k": slice(8, 10), "v": slice(10, 12)}
    adapted = shaken(og.add_lora(model, "*qkv*", rank=2, use_dora=use_dora))
    tensors = saved_tensors(adapted, tmp_path)
    count = 3 if use_dora else 2
    assert len(tensors) == 3 * count
    note, arrays = read_adapters(adapted)[0], {t.name: t for t in adapted.graph.initializer}
    p, q, *lengths = (onnx.numpy_helper.to_array(arrays[name]) for name in note["tensors"])
    for part, rows in columns.items():
        module = f"{LAYER}.self_attn.{part}_proj"
        np.testing.assert_allclose(change(tensors, module), (p @ q)[:, rows], 1e-5, 1e-6)
        for each in lengths:
            np.testing.assert_array_equal(tensors[f"{module}.lora_magnitude_vector"], each[rows])
    assert og.load_adapter(model, tmp_path) == adapted
    assert og.load_adapter(shaken(adapted, seed=3), tmp_path) == adapted


def test_ranks_of_parts_are_those_of_the_file(tmp_path):
    """Blocks that the file lacks stay zero, and come out as no adapters."""
    model, own = joined_model(), og.add_lora(joined_model(), "*qkv*", rank=2)
    tensors = saved_tensors(shaken(own), tmp_path / "one")
    config = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    rng = np.random.default_rng(0)
    path = f"{LAYER}.self_attn."
    kept = {k: x for k, x in tensors.items() if "k_proj" not in k}
    kept[f"{path}v_proj.lora_A.weight"] = rng.normal(size=(2, 4)).astype(np.float32)
    (tmp_path / "two").mkdir()
    save_file({PREFIX + k: x for k, x in kept.items()}, tmp_path / "two" / TENSORS)
    (tmp_path / "two" / "adapter_config.json").write_text(json.dumps(config))
    adapted = og.load_adapter(model, tmp_path / "two")
    assert read_adapters(adapted)[0]["rank"] == 4
    again = saved_tensors(adapted, tmp_path / "again")
    assert again.keys() == kept.keys()
    for key, array in kept.items():
        np.testing.assert_array_equal(again[key], array)


def test_columns_that_nothing_tells_are_refused(tmp_path):
    adapted = og.add_lora(joined_model("unknown"), "*qkv*", rank=2)
    with pytest.raises(ValueError, match=naming("attn.qkv_proj.MatMul", "PEFT")):
        og.save_adapter(adapted, tmp_path)


def phi3_file(folder) -> str:
    """Write a file in a folder of genai as the builder does of Phi-3: gate and up are apart."""
    text = """f (float[N,4] x) => (float[N,6] y) { g = MatMul(x, gate) u = MatMul(x, up)
        y = Mul(g, u) }"""
    names = {n: f"{LAYER}.mlp.{n}_proj.MatMul.weight" for n in ("gate", "up")}
    folder.mkdir()
    onnx.save(
        rename_constants(random_model(text, gate=(4, 6), up=(4, 6)), names), folder / "model.onnx"
    )
    (folder / "genai_config.json").write_text('{"model": {"type": "phi3"}}')
    return str(folder / "model.onnx")


@pytest.mark.parametrize("use_dora", [False, True])
def test_parts_that_the_network_has_joined_are_saved_as_one(use_dora, tmp_path):
    file, path = phi3_file(tmp_path / "genai"), f"{LAYER}.mlp.gate_up_proj"
    adapted = shaken(og.add_lora(file, "*", rank=2, alpha=6, use_dora=use_dora))
    tensors = saved_tensors(adapted, tmp_path / "ours")
    assert {key.partition(".lora")[0] for key in tensors} == {path}
    assert tensors[f"{path}.lora_A.weight"].shape == (4, 4)
    for loaded in (file, shaken(adapted, seed=3)):
        again = og.load_adapter(loaded, tmp_path / "ours")
        x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
        np.testing.assert_allclose(run(again, x=x)[0], run(adapted, x=x)[0], 1e-5, 1e-6)
        found = saved_tensors(again, tmp_path / "again")
        np.testing.assert_allclose(change(found, path), change(tensors, path), 1e-5, 1e-6)


def test_one_of_the_parts_has_zeros_for_the_other(tmp_path):
    file, path = phi3_file(tmp_path / "genai"), f"{LAYER}.mlp.gate_up_proj"
    tensors = saved_tensors(shaken(og.add_lora(file, "*up*", rank=2)), tmp_path / "ours")
    assert not change(tensors, path)[:, :6].any()
    assert change(tensors, path)[:, 6:].any()
    loaded = og.load_adapter(file, tmp_path / "ours")
    assert [note["weight"] for note in read_adapters(loaded)] == [
        f"{LAYER}.mlp.up_proj.MatMul.weight"
    ]


def test_a_layer_that_trains_beside_adapters_has_its_path_in_pytorch(tmp_path):
    text = "f (float[N,4] x) => (float[N,6] y) { h = MatMul(x, o) y = MatMul(h, head) }"
    names = {"o": f"{LAYER}.attn.o_proj.MatMul.weight", "head": "lm_head.MatMul.weight"}
    model = rename_constants(random_model(text, o=(4, 4), head=(4, 6)), names)
    adapted = shaken(og.add_lora(model, "*o_proj*", rank=2))
    og.save_adapter(adapted, tmp_path, weights="lm_head*")
    assert f"{PREFIX}lm_head.weight" in load_file(tmp_path / TENSORS)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["lm_head"]
    assert og.load_adapter(model, tmp_path).graph == adapted.graph


def test_a_shared_weight_has_an_adapter_for_each_module(tmp_path):
    """Of an embedding and a last layer, told apart by the names of the nodes."""
    text = """f (int64[N] i) => (float[N,6] y) { h = Gather(lm, i) t = Transpose(lm)
        y = MatMul(h, t) }"""
    model = rename_constants(random_model(text, lm=(6, 4)), {"lm": "lm_head.weight"})
    for node, name in zip(
        model.graph.node, ("model/embed/Gather", "t", "lm_head/MatMul"), strict=True
    ):
        node.name = f"/{name}"
    adapted = shaken(og.add_lora(model, "*", rank=2))
    tensors = saved_tensors(adapted, tmp_path)
    a, b = (tensors[f"model.embed.lora_embedding_{n}"] for n in "AB")
    np.testing.assert_array_equal(tensors["lm_head.lora_A.weight"], b.T)
    np.testing.assert_array_equal(tensors["lm_head.lora_B.weight"], a.T)
    for loaded in (model, shaken(adapted, seed=3)):
        assert og.load_adapter(loaded, tmp_path) == adapted
    both = load_file(tmp_path / TENSORS)
    save_file({k: x + ("head" in k) for k, x in both.items()}, tmp_path / TENSORS)
    with pytest.raises(ValueError, match=naming("lm_head", "model.embed")):
        og.load_adapter(model, tmp_path)
    save_file({k: x for k, x in both.items() if "head" in k}, tmp_path / TENSORS)
    with pytest.warns(UserWarning, match=naming("lm_head", "model.embed")):
        assert og.load_adapter(model, tmp_path) == adapted


def test_what_one_adapter_of_the_parts_cannot_have_is_refused(tmp_path):
    file = phi3_file(tmp_path / "genai")
    adapted = og.add_lora(file, "*up*", use_dora=True)
    with pytest.raises(ValueError, match=naming(f"{LAYER}.mlp.gate_up_proj")):
        og.save_adapter(adapted, tmp_path / "ours")


# -- by networks ---------------------------------------------------------------------------------

VOCABULARY, TOKENS = 320, 7
IDS = np.random.default_rng(0).integers(3, VOCABULARY, (2, TOKENS))
PATTERNS = {"gpt2": ["*c_attn*", "*c_proj*", "*c_fc*"], "opt": ["*proj*", "*fc1*", "*fc2*"]}
FAMILIES = "llama qwen2 qwen3 phi3 gemma2 gpt2 opt".split()
BUILT = FAMILIES[:5]  # of which genai's builder writes files


def network(family: str):
    """Return a small random network of transformers."""
    for name in ("peft", "torch"):
        pytest.importorskip(name)
    import torch

    t = pytest.importorskip("transformers")
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    common = ids | {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "tie_word_embeddings": False,
    }  # fmt: skip
    small = {"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 128}
    config, kind = {
        "llama": (lambda: t.LlamaConfig(**common, head_dim=16), "LlamaForCausalLM"),
        "qwen2": (lambda: t.Qwen2Config(**common), "Qwen2ForCausalLM"),
        "qwen3": (lambda: t.Qwen3Config(**common, head_dim=16), "Qwen3ForCausalLM"),
        "phi3": (
            lambda: t.Phi3Config(**common, original_max_position_embeddings=128),
            "Phi3ForCausalLM",
        ),
        "gemma2": (lambda: t.Gemma2Config(**common, head_dim=16), "Gemma2ForCausalLM"),
        "gpt2": (
            lambda: t.GPT2Config(vocab_size=VOCABULARY, **small, **ids, tie_word_embeddings=False),
            "GPT2LMHeadModel",
        ),
        "opt": (
            lambda: t.OPTConfig(**common, ffn_dim=96, word_embed_proj_dim=64),
            "OPTForCausalLM",
        ),
    }[family]
    torch.manual_seed(0)
    net = getattr(t, kind)(config()).eval()
    net.config._attn_implementation = "eager"
    return net


def exported(net, dynamo: bool) -> onnx.ModelProto:
    """Return the file of a network, with the mask of attention as an input."""
    import torch

    class Exported(type(net)):
        def forward(self, input_ids, attention_mask):
            return (
                super()
                .forward(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
                .logits
            )

    net = copy.deepcopy(net)
    net.__class__ = Exported
    options = {"input_names": ["input_ids", "attention_mask"], "output_names": ["logits"]}
    examples = torch.from_numpy(IDS), torch.from_numpy(mask_of(net))
    return export_module(net, examples, dynamo=dynamo, **options)


def mask_of(net) -> np.ndarray:
    """Return the mask that the network takes: of pairs of tokens, which needs no further nodes."""
    if net.config.model_type == "opt":
        return np.ones(IDS.shape, np.int64)
    hidden = np.triu(np.full((TOKENS, TOKENS), -1e9, np.float32), 1)
    return np.broadcast_to(hidden, (len(IDS), 1, TOKENS, TOKENS)).copy()


def built(net, folder) -> str:
    """Return the file that genai's builder writes of a network."""
    import subprocess
    import sys

    from language_models import bpe
    from transformers import PreTrainedTokenizerFast

    net.save_pretrained(folder / "hf")
    PreTrainedTokenizerFast(
        tokenizer_object=bpe(), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder / "hf")
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", folder / "hf"]
    command += ["-o", folder / "genai", "-p", "fp32", "-e", "cpu", "-c", folder / "cache"]
    subprocess.run([*map(str, command)], check=True, capture_output=True)
    return str(folder / "genai" / "model.onnx")


def logits_of_model(model: onnx.ModelProto, net) -> np.ndarray:
    feed = {"input_ids": IDS, "attention_mask": mask_of(net)}
    if len(model.graph.input) > 2:
        feed["attention_mask"] = np.ones(IDS.shape, np.int64)
        for x in model.graph.input:
            if x.name.startswith("past"):  # room for what a window of attention needs
                feed[x.name] = np.zeros((len(IDS), 2, 4096, 16), np.float32)
    return run_named(model, feed)["logits"]


def logits_of_network(net) -> np.ndarray:
    import torch

    with torch.no_grad():
        return net(torch.from_numpy(IDS), use_cache=False).logits.numpy()


def peft_network(net, folder):
    """Return the network with the adapters of a folder, of which PEFT uses all, and misses none."""
    import peft

    config = peft.PeftConfig.from_pretrained(folder)
    wrapped = peft.get_peft_model(copy.deepcopy(net), config)
    tensors = peft.utils.load_peft_weights(str(folder), device="cpu")
    result = peft.set_peft_model_state_dict(wrapped, tensors)
    assert result.unexpected_keys == []
    assert not [key for key in result.missing_keys if "lora_" in key]
    assert len(tensors) == sum("lora_" in name for name, _ in wrapped.named_parameters())
    return wrapped.eval()


CASES = [(family, exporter) for family in FAMILIES for exporter in ("torchscript", "dynamo")]
CASES += [(family, "builder") for family in BUILT]


@pytest.mark.parametrize(
    ("family", "exporter"),
    [case if case == ("phi3", "torchscript") else in_sweep(*case) for case in CASES],
)
def test_peft_uses_every_tensor(family, exporter, tmp_path):
    net = network(family)
    import peft
    import torch

    if exporter == "builder":
        pytest.importorskip("onnxruntime_genai")
        model = built(net, tmp_path)
    else:
        model = exported(net, exporter == "dynamo")
    plain = logits_of_network(net)
    patterns = PATTERNS.get(family, ["*proj*"])
    adapted = shaken(og.add_lora(model, patterns, rank=3, alpha=2))
    og.save_adapter(adapted, tmp_path / "ours")
    found = logits_of_network(peft_network(net, tmp_path / "ours"))
    assert np.abs(found - plain).max() > 0.05
    np.testing.assert_allclose(logits_of_model(adapted, net), found, 1e-3, 1e-4)

    linear = {n for n, m in net.named_modules() if n.split(".")[-1] in LINEAR[family]}
    config = peft.LoraConfig(
        r=3, lora_alpha=2, target_modules=sorted(linear), rank_pattern={LINEAR[family][0]: 2}
    )
    theirs = peft.get_peft_model(copy.deepcopy(net), config).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a configuration that has no home
        theirs.save_pretrained(tmp_path / "theirs")
    loaded = og.load_adapter(model, tmp_path / "theirs")
    expected = logits_of_network(theirs)
    np.testing.assert_allclose(logits_of_model(loaded, net), expected, 1e-3, 1e-4)
    og.save_adapter(loaded, tmp_path / "again")
    again = peft_network(net, tmp_path / "again")
    np.testing.assert_allclose(logits_of_network(again), expected, 1e-3, 1e-4)
    shapes = [{n: x.shape for n, x in each.named_parameters()} for each in (theirs, again)]
    assert shapes[0] == shapes[1]


@pytest.mark.sweep
def test_biases_tell_the_paths_of_integers(tmp_path):
    """The names of nodes lack modules whose parts are called directly, as OPT's `model`."""
    from onnxruntime.quantization import quantize_dynamic

    net = network("opt")
    onnx.save(exported(net, False), tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx")
    adapted = og.add_lora(tmp_path / "int8.onnx", PATTERNS["opt"], rank=2)
    og.save_adapter(adapted, tmp_path / "ours")
    assert peft_network(net, tmp_path / "ours")


_LLAMA = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
LINEAR = dict.fromkeys(("llama", "qwen2", "qwen3", "gemma2"), _LLAMA) | {
    "phi3": "qkv_proj o_proj gate_up_proj down_proj".split(),
    "gpt2": "c_attn c_proj c_fc".split(),
    "opt": "q_proj k_proj v_proj out_proj fc1 fc2".split(),
}
