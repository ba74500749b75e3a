"""Adapters in files: the folder of PEFT, written and read."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

import onnxgrad as og
from onnxgrad.model.notes import HEAD, fine_tuned_tensors, read_adapters, write_metadata
from tests.support.adapter_cases import (
    NETWORKS,
    TORCH_MODULES,
    adapter_network,
    constant_arrays,
    embedding_network,
    exported_embedding_network,
    random_feed,
    random_model,
    rename_constants,
    shaken,
)
from tests.support.errors import naming
from tests.support.running import in_sweep, run


@pytest.mark.parametrize("name", NETWORKS)
def test_an_adapter_is_loaded_into_the_model_it_is_of(name, tmp_path):
    model = adapter_network(name)
    adapted = shaken(og.add_lora(model, "w", rank=2, alpha=3, dropout=0.25))
    og.save_adapter(adapted, tmp_path)
    assert og.load_adapter(model, tmp_path) == adapted
    other = shaken(og.add_lora(model, "w", rank=2, alpha=3, dropout=0.25), seed=9)
    assert og.load_adapter(other, tmp_path) == adapted
    og.save_adapter(adapted, tmp_path / "alone.safetensors")
    assert og.load_adapter(model, tmp_path / "alone.safetensors") == adapted
    file = load_file(tmp_path / "adapter_model.safetensors")
    assert sorted(load_file(tmp_path / "alone.safetensors")) == sorted(file)
    parts = ["lora_A.weight", "lora_B.weight"]
    if name in ("embedding", "tied"):
        parts = ["lora_embedding_A", "lora_embedding_B"]
    assert sorted(file) == [f"base_model.model.w.{part}" for part in parts]


def test_the_shapes_and_settings_are_those_of_peft(tmp_path):
    model = random_model(
        """f (int64[2,5] x) => (float[2,5,7] y) {
            e = Gather(table, x) h = MatMul(e, up) y = MatMul(h, down) }""",
        table=(4, 3), up=(3, 6), down=(6, 7),
    )  # fmt: skip
    rename_constants(model, {"up": "up.weight", "down": "down.weight"})
    adapted = og.add_lora(model, ["up*", "table"], rank=2, alpha=3, dropout=0.1)
    adapted = og.add_lora(adapted, "down*", rank=4, alpha=3, dropout=0.1)
    og.save_adapter(adapted, tmp_path / "new")
    file = load_file(tmp_path / "new" / "adapter_model.safetensors")
    assert {key.removeprefix("base_model.model."): a.shape for key, a in file.items()} == {
        "table.lora_embedding_A": (2, 4),
        "table.lora_embedding_B": (3, 2),
        "up.lora_A.weight": (2, 3),
        "up.lora_B.weight": (6, 2),
        "down.lora_A.weight": (4, 6),
        "down.lora_B.weight": (7, 4),
    }
    config = json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 3)
    assert config["target_modules"] == ["table", "up", "down"]
    assert config["rank_pattern"] == {"^down": 4}
    assert config["lora_dropout"] == 0.1
    loaded = og.load_adapter(model, tmp_path / "new")
    assert [note["rank"] for note in read_adapters(loaded)] == [2, 2, 4]
    expected = run(shaken(adapted), random_feed(model, 3))
    np.testing.assert_array_equal(run(shaken(loaded), random_feed(model, 3)), expected)


def headed_model() -> onnx.ModelProto:
    """Return a model whose second layer is a new head."""
    model = random_model(
        "f (float[2,3] x) => (float[2,5] y) { h = MatMul(x, w) p = MatMul(h, v) y = Add(p, b) }",
        w=(3, 4), v=(4, 5), b=(5,),
    )  # fmt: skip
    write_metadata(model, HEAD, ["v", "b"])
    return model


def test_a_new_head_is_saved_too(tmp_path):
    adapted = shaken(og.add_lora(headed_model(), "*", rank=2))
    assert fine_tuned_tensors(adapted)[2:] == ["v", "b"]
    og.save_adapter(adapted, tmp_path)
    file = load_file(tmp_path / "adapter_model.safetensors")
    np.testing.assert_array_equal(
        file["base_model.model.v.weight"], constant_arrays(adapted)["v"].T
    )
    assert og.load_adapter(headed_model(), tmp_path) == adapted
    merged = og.merge_lora(og.load_adapter(headed_model(), tmp_path))
    assert not merged.metadata_props
    x = random_feed(merged)["x"]
    np.testing.assert_allclose(run(merged, x=x)[0], run(adapted, x=x)[0], rtol=1e-4, atol=1e-5)
    path = tmp_path / "adapter_model.safetensors"
    fitting = {
        "base_model.model.w.lora_A.weight": (2, 4),
        "base_model.model.w.lora_B.weight": (3, 2),
    }
    save_file(file | {key: np.zeros(shape, np.float32) for key, shape in fitting.items()}, path)
    with pytest.raises(ValueError, match=naming("has no", "replace_head")):
        og.load_adapter(adapter_network("vector"), tmp_path)  # which has no weight "v"


def test_what_does_not_fit_is_refused(tmp_path):
    model = adapter_network("matmul")
    og.save_adapter(og.add_lora(model, "w", rank=2), tmp_path)
    key = "base_model.model.w.lora_A.weight"
    other = random_model("f (float[1,4] x) => (float[1,3] y) { y = MatMul(x, v) }", v=(4, 3))
    for wrong, named in (
        (adapter_network("twice"), [key, "[2, 4]", "[2, 3]"]),
        (og.add_lora(model, "w", rank=3, alpha=24), [key, "[2, 4]", "[3, 4]"]),
        (og.add_lora(model, "w", rank=2, alpha=4), ["by 2 in", "by 8"]),
        (other, ["module", "'w'"]),
    ):
        with pytest.raises(ValueError, match=naming(*named)):
            og.load_adapter(wrong, tmp_path)
    with pytest.raises(FileNotFoundError, match=naming("none", "no adapter", "name a")):
        og.load_adapter(model, tmp_path / "none")
    with pytest.raises(ValueError, match=naming("no adapters", "add_lora")):
        og.save_adapter(model, tmp_path)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    for entry, match in (
        ({"peft_type": "LOHA"}, "'LOHA'"),
        ({"peft_type": "IA3"}, naming("'IA3'", "merge_and_unload", "add_lora")),
        ({"use_dora": True}, naming("use_dora", "'w'", "save")),
        ({"init_lora_weights": "pissa"}, "pissa"),
    ):
        path.write_text(json.dumps(config | entry))
        with pytest.raises(ValueError, match=match):
            og.load_adapter(model, tmp_path)
    path.write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match=naming("adapter_model.safetensors", "damaged", "Save")):
        og.load_adapter(model, tmp_path)


EXPORTERS = pytest.mark.parametrize("exporter", ["torchscript", in_sweep("dynamo")])


@EXPORTERS
def test_peft_loads_what_is_saved(exporter, tmp_path):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    exported = exported_embedding_network(exporter)
    adapted = shaken(og.add_lora(exported, "*", rank=2, alpha=3))
    og.save_adapter(adapted, tmp_path)
    loaded = peft.PeftModel.from_pretrained(embedding_network(), tmp_path).eval()
    x = torch.randint(0, 11, (4, 5))
    [y] = run(adapted, {exported.graph.input[0].name: x.numpy()})
    np.testing.assert_allclose(y, loaded(x).detach(), rtol=1e-4, atol=1e-5)


@EXPORTERS
@pytest.mark.parametrize("rslora", [False, True])
def test_what_peft_saves_is_loaded(exporter, tmp_path, rslora):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    exported = exported_embedding_network(exporter)
    config = peft.LoraConfig(
        r=2, lora_alpha=5, lora_dropout=0.1, use_rslora=rslora, target_modules=TORCH_MODULES[:-1],
        modules_to_save=["last"], rank_pattern={"layers.1": 4}, alpha_pattern={"conv": 3},
    )  # fmt: skip
    wrapped = peft.get_peft_model(embedding_network(), config).eval()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    wrapped.save_pretrained(tmp_path)
    adapted = og.load_adapter(exported, tmp_path)
    assert {note["dropout"] for note in read_adapters(adapted)} == {0.1}
    assert set(fine_tuned_tensors(adapted)) > {"last.weight", "last.bias"}
    x = torch.randint(0, 11, (4, 5))
    expected, fed = wrapped(x).detach(), {exported.graph.input[0].name: x.numpy()}
    np.testing.assert_allclose(run(adapted, fed)[0], expected, rtol=1e-4, atol=1e-5)
    merged = og.merge_lora(adapted)
    np.testing.assert_allclose(run(merged, fed)[0], expected, rtol=1e-4, atol=2e-5)
    assert onnx.checker.check_model(merged) is None


def test_modules_may_be_parts_of_another_model(tmp_path):
    """An exporter put the network into a wrapper, such as sentence-transformers'."""
    text = "f (float[N,3] x) => (float[N,2] y) { h = MatMul(x, a) y = MatMul(h, b) }"
    plain, wrapped = (
        rename_constants(
            random_model(text, a=(3, 3), b=(3, 2)), {n: f"{prefix}{n}.weight" for n in "ab"}
        )
        for prefix in ("", "model.0.")
    )
    og.save_adapter(og.add_lora(plain, "b.*", rank=2), tmp_path)
    loaded = og.load_adapter(wrapped, tmp_path)
    assert [note["weight"] for note in read_adapters(loaded)] == ["model.0.b.weight"]
    og.save_adapter(og.add_lora(wrapped, "model.0.a.*", rank=2), tmp_path)
    loaded = og.load_adapter(plain, tmp_path)
    assert [note["weight"] for note in read_adapters(loaded)] == ["a.weight"]


def test_adapters_of_q_k_and_v_become_one_of_their_packed_weight(tmp_path):
    """As genai's builder packs them: the file of PEFT has one adapter for each part."""
    text = """f (float[1,5,8] x, float[1,2,P,4] pk, float[1,1,P,4] pv, int32[1] n, int32 t)
        => (float[1,5,8] y, float[1,1,T,4] k, float[1,1,T,4] v) {
        qkv = MatMul(x, w) y, k, v = com.microsoft.GroupQueryAttention<num_heads = 2,
            kv_num_heads = 1>(qkv, , , pk, pv, n, t) }"""
    name, path = "model.layers.0.attn.qkv_proj.MatMul.weight", "model.layers.0.self_attn"
    model = rename_constants(random_model(text, w=(8, 16)), {"w": name})
    rng, columns = np.random.default_rng(4), {"q_proj": slice(8), "v_proj": slice(12, 16)}
    change, file = np.zeros((8, 16)), {}
    for part, rows in columns.items():
        a, b = rng.normal(size=(2, 8)), rng.normal(size=(rows.stop - (rows.start or 0), 2))
        change[:, rows] = 3 / 2 * (b @ a).T
        key = f"base_model.model.{path}.{part}"
        file |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    save_file(
        {key: a.astype(np.float32) for key, a in file.items()},
        tmp_path / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": [*columns]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    adapted = og.load_adapter(model, tmp_path)
    merged = constant_arrays(og.merge_lora(adapted))[name]
    np.testing.assert_allclose(merged - constant_arrays(model)[name], change, atol=1e-6)
    og.save_adapter(adapted, tmp_path / "again")
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert again.keys() == file.keys()
    for part, rows in columns.items():
        a, b = (again[f"base_model.model.{path}.{part}.lora_{n}.weight"] for n in "AB")
        np.testing.assert_allclose(3 / 2 * (b @ a).T, change[:, rows], rtol=1e-4, atol=1e-5)
