"""Adapters of language models that onnxruntime-genai's builder wrote: served there, and of PEFT."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnxgrad as og
from onnxgrad.model.notes import read_adapters
from tests.support.adapter_cases import shaken

pytestmark = pytest.mark.sweep
LAYERS, HEADS, SIZE, VOCABULARY = 2, 2, 32, 600
IDS = np.random.default_rng(0).integers(3, 500, (2, 9))
LINEAR = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lm_head".split()


@pytest.fixture(scope="module")
def llama_network():
    """Return a random Llama with grouped queries."""
    for name in ("tokenizers", "peft", "onnxruntime_genai"):
        pytest.importorskip(name)
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=160, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=HEADS, max_position_embeddings=512,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, head_dim=SIZE,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def adapted_network(llama_network):
    """Return the network with adapters of PEFT in some layers."""
    return with_peft_adapters(
        llama_network, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"]
    )


def with_peft_adapters(net, **options):
    import peft
    import torch

    config = peft.LoraConfig(r=4, lora_alpha=10, **options)
    wrapped = peft.get_peft_model(copy.deepcopy(net), config).eval()
    for name, parameter in wrapped.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return wrapped


@pytest.fixture(scope="module")
def genai_folders(llama_network, adapted_network, tmp_path_factory):
    """Return a folder with what genai's builder writes: float32, int4, and with an adapter."""
    from language_models import bpe
    from transformers import PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("language_model")
    llama_network.save_pretrained(root / "hf")
    adapted_network.save_pretrained(root / "peft")
    PreTrainedTokenizerFast(
        tokenizer_object=bpe(VOCABULARY), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(root / "hf")
    adapter = ["--extra_options", f"adapter_path={root / 'peft'}"]
    for name, precision, more in (
        ("fp32", "fp32", []),
        ("int4", "int4", []),
        ("a", "fp32", adapter),
    ):
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-e", "cpu"]
        command += ["-i", root / "hf", "-o", root / name, "-p", precision, "-c", root / "cache"]
        subprocess.run([*map(str, command), *more], check=True, capture_output=True)
    return root


def model_logits(model, **options):
    data = {"input_ids": IDS, "attention_mask": np.ones(IDS.shape, np.int64)}
    for i in range(LAYERS):
        for kind in ("key", "value"):
            shape = (len(IDS), HEADS, 0, SIZE)
            data[f"past_key_values.{i}.{kind}"] = np.zeros(shape, np.float32)
    return ort.InferenceSession(model.SerializeToString()).run(["logits"], data, **options)[0]


def network_logits(net):
    import torch

    with torch.no_grad():
        return net(torch.from_numpy(IDS)).logits.numpy()


def generated_tokens(model, adapters=None, name=""):
    """Return what onnxruntime-genai generates greedily."""
    import onnxruntime_genai as genai

    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=40, do_sample=False)
    generator = genai.Generator(model, parameters)
    if adapters is not None:
        generator.set_active_adapter(adapters, name)
    generator.append_tokens(IDS[0, :4].astype(np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)]


def with_model(folder, name, model):
    """Return a copy of a folder with another model."""
    copied = folder.parent / f"{folder.name}_{name}"
    shutil.copytree(folder, copied)
    og.save(model, copied / "model.onnx")
    return copied


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_genai_serves_two_adapters_on_one_base(genai_folders, precision):
    genai, folder = pytest.importorskip("onnxruntime_genai"), genai_folders / precision
    model, patterns = onnx.load(folder / "model.onnx"), ["*qkv*", "*o_proj*"]
    base = og.graph.adapter_inputs(og.add_lora(model, patterns))
    served = genai.Model(str(with_model(folder, "base", base)))
    adapters, plain = genai.Adapters(served), generated_tokens(genai.Model(str(folder)))
    assert generated_tokens(served) == plain
    for name, rank in (("one", 4), ("two", 8)):
        trained = shaken(og.add_lora(model, patterns, rank=rank), seed=rank)
        path = str(genai_folders / f"{precision}_{name}.onnx_adapter")
        og.save_adapter(trained, path)
        adapters.load(path, name)
        alone = genai.Model(str(with_model(folder, name, trained)))
        tokens = generated_tokens(served, adapters, name)
        assert tokens == generated_tokens(alone) != plain
        adapter, options = ort.LoraAdapter(), ort.RunOptions()
        adapter.Load(path)
        options.add_active_adapter(adapter)
        np.testing.assert_allclose(
            model_logits(base, run_options=options), model_logits(trained), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["k_proj", "up_proj"], "alpha_pattern": {"k_proj": 3}},
        {"target_modules": LINEAR, "rank_pattern": {"v_proj": 2}, "use_rslora": True},
    ],
)
@pytest.mark.filterwarnings("ignore:adapter_config.json has one")
def test_adapters_of_peft_fit_packed_weights_both_ways(
    llama_network, genai_folders, tmp_path, options
):
    trained = with_peft_adapters(llama_network, **options)
    trained.save_pretrained(tmp_path / "peft")
    model, expected = onnx.load(genai_folders / "fp32" / "model.onnx"), network_logits(trained)
    adapted = og.load_adapter(model, tmp_path / "peft")
    assert np.abs(expected - network_logits(llama_network)).max() > 0.05
    np.testing.assert_allclose(model_logits(adapted), expected, rtol=1e-4, atol=5e-5)
    og.save_adapter(adapted, tmp_path / "ours")
    peft = pytest.importorskip("peft")
    back = peft.PeftModel.from_pretrained(copy.deepcopy(llama_network), tmp_path / "ours").eval()
    np.testing.assert_allclose(network_logits(back), expected, rtol=1e-4, atol=5e-5)
    quantized = og.load_adapter(onnx.load(genai_folders / "int4" / "model.onnx"), tmp_path / "peft")
    weights = [note["weight"].partition(".MatMul")[0] for note in read_adapters(quantized)]
    assert weights == [n["weight"].partition(".MatMul")[0] for n in read_adapters(adapted)]


def test_an_adapter_that_is_trained_here_is_one_of_peft(llama_network, genai_folders, tmp_path):
    adapted = shaken(
        og.add_lora(
            onnx.load(genai_folders / "fp32" / "model.onnx"), ["*qkv*", "*up_proj*"], rank=3
        )
    )
    og.save_adapter(adapted, tmp_path)
    peft = pytest.importorskip("peft")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(llama_network), tmp_path).eval()
    np.testing.assert_allclose(network_logits(loaded), model_logits(adapted), rtol=1e-3, atol=1e-3)


def test_the_builders_adapter_is_recognized(
    llama_network, adapted_network, genai_folders, tmp_path
):
    model = onnx.load(genai_folders / "a" / "model.onnx")
    og.save_adapter(model, tmp_path / "peft")
    peft = pytest.importorskip("peft")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(llama_network), tmp_path / "peft").eval()
    np.testing.assert_allclose(
        network_logits(loaded), network_logits(adapted_network), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        model_logits(og.graph.adapter_inputs(model)),
        network_logits(llama_network),
        rtol=1e-4,
        atol=1e-5,
    )
    merged = model_logits(og.merge_lora(model))
    np.testing.assert_allclose(merged, network_logits(adapted_network), rtol=1e-3, atol=1e-4)
