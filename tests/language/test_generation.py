"""Generation: an ordinary session says what onnxruntime-genai and transformers say."""

import json
import shutil
import sys

import numpy as np
import onnx
import pytest
from language_models import SENTENCES

import onnxgrad as og
from onnxgrad.language.generation import TokenChoice
from tests.support.errors import naming
from tests.support.models import parse_model

pytest.importorskip("tokenizers")


@pytest.fixture
def forget_genai(monkeypatch):
    """Return a function after which onnxruntime-genai is as if it were not installed."""
    return lambda: monkeypatch.setitem(sys.modules, "onnxruntime_genai", None)


def test_both_ways_say_what_transformers_says(genai_folder, forget_genai):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, prompts = og.load_folder(genai_folder), [*SENTENCES, "x"]
    by_genai = og.language.generate(folder, prompts, 12)
    forget_genai()
    assert og.language.generate(folder, prompts, 12) == by_genai
    assert og.language.generate(str(genai_folder), prompts[0], 12) == by_genai[0]
    theirs = AutoModelForCausalLM.from_pretrained(genai_folder.parent / "hf")
    tokenizer = AutoTokenizer.from_pretrained(genai_folder.parent / "hf")
    for prompt, text in zip(prompts, by_genai, strict=True):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        new = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )[0, ids.shape[1] :]
        assert tokenizer.decode(new, skip_special_tokens=True) == text


def test_a_folder_for_another_device(genai_folder, tmp_path):
    folder = shutil.copytree(genai_folder, tmp_path / "gpu")
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["decoder"]["session_options"]["provider_options"] = [{"cuda": {}}]
    (folder / "genai_config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=naming("onnxruntime-genai", str(folder), "CPU")):
        found = og.language.generate(folder, SENTENCES[0], 8)
    assert found == og.language.generate(genai_folder, SENTENCES[0], 8)


def test_draws_follow_a_seed_and_the_probabilities(genai_folder, forget_genai):
    forget_genai()
    folder = og.load_folder(genai_folder)
    drawn = [og.language.generate(folder, "a", 8, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert og.language.generate(
        folder, "a", 8, temperature=1.0, top_p=1e-6
    ) == og.language.generate(folder, "a", 8)
    several = og.language.generate(folder, ["b", "a", "x"], 8, temperature=1.0, seed=1)
    assert several[1] == drawn[0]  # a prompt has the same text alone and in a list
    rng, scores = np.random.default_rng(0), np.log([0.5, 0.3, 0.15, 0.05])
    counts = np.zeros(4)
    for _ in range(4000):
        counts[TokenChoice(1.0, 0.7).choose_token(scores, rng)] += 1
    np.testing.assert_allclose(counts / 4000, [0.625, 0.375, 0, 0], atol=0.03)
    assert {TokenChoice(1.0, 0.5).choose_token(np.zeros(4), rng) for _ in range(100)} == {0, 1}


def test_what_generation_refuses(genai_folder):
    folder = og.load_folder(genai_folder)
    for options, message in (
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, r"temperature=-1\.0"),
        ({"top_p": 0.0}, r"top_p=0\.0"),
    ):
        with pytest.raises(ValueError, match=message):
            og.language.generate(folder, "x", **options)
    with pytest.raises(ValueError, match="pass tokenizer="):
        og.language.generate(folder.model, "x")
    with pytest.raises(ValueError, match=naming("chat template", "a text")):
        og.language.generate(folder, [{"role": "user", "content": "x"}])
    text = """f (int64[N,T] input_ids, float[N,T,2] image) => (float[N,T,2] logits)
        { v = Gather(w, input_ids)  logits = Add(v, image) }"""
    other = parse_model(text, w=np.eye(2, dtype=np.float32))
    with pytest.raises(og.ModelError, match=r"\['image'\]"):
        og.language.generate(other, "x", tokenizer=folder)


def test_adapters_on_one_base_say_what_their_models_say(genai_folder, tmp_path, forget_genai):
    folder, prompts = og.load_folder(genai_folder), SENTENCES[:2]
    rng, expected = np.random.default_rng(0), {}
    for name in ("one", "two"):
        model = og.add_lora(folder, "*qkv_proj*", rank=4)
        for tensor in model.graph.initializer:
            if "lora_B" in tensor.name:
                array = rng.normal(size=tuple(tensor.dims)).astype(np.float32)
                tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
        alone = og.save_folder(model, tmp_path / name, like=folder)
        expected[name] = og.language.generate(alone, prompts, 12)
        base = og.save_folder(
            model, tmp_path / "base", like=folder, adapter=name, overwrite=name == "two"
        )
    plain = og.language.generate(folder, prompts, 12)
    for genai in (True, False):
        if not genai:
            forget_genai()
        assert og.language.generate(base, prompts, 12) == plain
        for name, text in expected.items():
            assert og.language.generate(base, prompts, 12, adapter=name) == text != plain
    with pytest.raises(ValueError, match="Unknown adapter 'three'"):
        og.language.generate(base, "x", adapter="three")
    other = og.save_folder(og.add_lora(folder, "*o_proj*"), tmp_path / "o", folder, adapter="one")
    (base.path / "adapters" / "two.onnx_adapter").replace(other.path / "adapters/one.onnx_adapter")
    with pytest.raises(ValueError, match=naming("one.onnx_adapter", "another base")):
        og.language.generate(other, "x", adapter="one")
    with pytest.raises(ValueError, match=naming("../x", "file name")):
        og.save_folder(model, tmp_path / "other", like=folder, adapter="../x")
    with pytest.raises(ValueError, match="no adapters"):
        og.save_folder(folder, tmp_path / "other", like=folder, adapter="x")
    assert not (tmp_path / "other").exists()
