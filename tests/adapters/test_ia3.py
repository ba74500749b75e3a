"""(IA)3: factors of outputs and inputs of layers, their files, and their merging."""

from __future__ import annotations

import copy
from collections import OrderedDict

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnxgrad as og
from onnxgrad.model.notes import read_adapters
from tests.support.adapter_cases import (
    NETWORKS,
    adapter_network,
    constant_arrays,
    embedding_network,
    exported_embedding_network,
    random_feed,
    random_model,
    rename_constants,
    shaken,
    with_tensors,
)
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import run

WITHOUT = ("batched", "left", "gemm of transposed data", "gemm on the left", "embedding", "tied")
TOLERANCE = {"half precision": 2e-3, "behind transpose, cast and identity": 2e-3}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in WITHOUT])
def test_factors_change_nothing_at_first_and_are_merged(name, before, tmp_path):
    model = adapter_network(name)
    data = random_feed(model)
    [first] = run(model, data)
    adapted = og.add_ia3(model, (), "w") if before else og.add_ia3(model, "w")
    np.testing.assert_array_equal(run(adapted, data)[0], first)
    plain = og.merge_lora(adapted)
    assert not plain.metadata_props
    assert len(plain.graph.node) <= len(model.graph.node)
    trained = shaken(adapted)
    expected = run(trained, data)[0]
    assert np.abs(expected - first).max() > 0.01
    merged = run(og.merge_lora(trained), data)[0]
    atol = TOLERANCE.get(name, 2e-6)
    np.testing.assert_allclose(merged, expected, rtol=1e-5, atol=atol)
    og.save_adapter(trained, tmp_path)
    assert og.load_adapter(model, tmp_path) == trained
    og.save_adapter(trained, tmp_path / "a.onnx_adapter")
    assert og.load_adapter(adapted, tmp_path / "a.onnx_adapter") == trained


def test_a_layer_is_what_the_paper_says():
    text = "f (float[N,4] x) => (float[N,3] y) { h = MatMul(x, w) y = Add(h, b) }"
    model = random_model(text, w=(4, 3), b=(3,))
    w, b = constant_arrays(model)["w"], constant_arrays(model)["b"]
    x = np.random.default_rng(2).normal(size=(5, 4)).astype(np.float32)
    outside, inside = shaken(og.add_ia3(model, "w")), shaken(og.add_ia3(model, (), "w"))
    factors = constant_arrays(outside)["w.ia3_l"], constant_arrays(inside)["w.ia3_l"]
    np.testing.assert_allclose(run(outside, x=x)[0], factors[0] * (x @ w + b), rtol=1e-5)
    np.testing.assert_allclose(run(inside, x=x)[0], (factors[1] * x) @ w + b, rtol=1e-4, atol=1e-6)
    assert [t.name for t in og.trainable(outside).trained] == ["w.ia3_l"]
    labels = np.zeros(5, np.int64)
    trainer = og.Trainer(outside, "cross_entropy", learning_rate=0.1).fit(x, labels)
    assert {*trainer.state.weights} == {"w.ia3_l"}
    assert np.abs(trainer.state.weights["w.ia3_l"] - factors[0]).min() > 0.01
    shared = copy.deepcopy(model)
    shared.graph.node.append(onnx.helper.make_node("Mul", ["b", "b"], ["unused"]))
    with pytest.raises(ValueError, match="bias 'b'"):
        og.merge_lora(shaken(og.add_ia3(shared, "w")))


def test_a_base_takes_factors_and_low_ranks(tmp_path):
    text = "f (float[N,4] x) => (float[N,2] y) { h = MatMul(x, w) t = Tanh(h) y = MatMul(t, v) }"
    model = random_model(text, w=(4, 4), v=(4, 2))
    adapted = og.add_lora(og.add_ia3(model, "w"), "v", rank=2)
    base, trained = og.adapter_inputs(adapted), shaken(adapted)
    x = {"x": np.random.default_rng(2).normal(size=(5, 4)).astype(np.float32)}
    served = ort.InferenceSession(base.SerializeToString())
    np.testing.assert_array_equal(served.run(None, x)[0], run(model, x)[0])
    og.save_adapter(trained, tmp_path / "a.onnx_adapter")
    adapter, options = ort.LoraAdapter(), ort.RunOptions()
    adapter.Load(str(tmp_path / "a.onnx_adapter"))
    options.add_active_adapter(adapter)
    np.testing.assert_allclose(served.run(None, x, options)[0], run(trained, x)[0], rtol=1e-5)
    with pytest.raises(ValueError, match="one folder"):
        og.save_adapter(trained, tmp_path / "folder")
    np.testing.assert_allclose(run(og.merge_lora(trained), x)[0], run(trained, x)[0], rtol=1e-4)


@pytest.mark.parametrize("name", WITHOUT)
def test_what_has_no_factors_is_refused(name):
    with pytest.raises(ValueError, match=r"factors of \(IA\)3"):
        og.add_ia3(adapter_network(name), "w")


def test_a_layer_is_named_once():
    with pytest.raises(ValueError, match=naming("w", "output", "input")):
        og.add_ia3(adapter_network("matmul"), "w", "w")


def test_peft_and_we_read_what_the_other_writes(tmp_path):
    torch = pytest.importorskip("torch")

    layers = {"up": torch.nn.Linear(4, 6), "act": torch.nn.Tanh(), "down": torch.nn.Linear(6, 3)}
    net = torch.nn.Sequential(OrderedDict(layers)).eval()
    model = parse_model("""f (float[N,4] x) => (float[N,3] y) {
        h = Gemm<transB = 1>(x, up_weight, up_bias) t = Tanh(h)
        y = Gemm<transB = 1>(t, down_weight, down_bias) }""")
    state = {name: value.numpy() for name, value in net.state_dict().items()}
    with_tensors(rename_constants(model, {n.replace(".", "_"): n for n in state}), **state)
    _check_files(net, model, torch.randn(8, 4), tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_files_of_exported_models(exporter, tmp_path):
    torch, exported = pytest.importorskip("torch"), exported_embedding_network(exporter)
    _check_files(embedding_network(), exported, torch.randint(0, 11, (4, 5)), tmp_path)


def _check_files(net, model, x, folder):
    """Assert that PEFT's file means for `model` what it means for `net`, and ours the same."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    linear = [n for n, m in net.named_modules() if isinstance(m, torch.nn.Linear)]
    config = peft.IA3Config(target_modules=linear, feedforward_modules=linear[-1:])
    wrapped = peft.get_peft_model(copy.deepcopy(net), config).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "ia3" in name:
                parameter.normal_()
    wrapped.save_pretrained(folder / "peft")
    adapted = og.load_adapter(model, folder / "peft")
    assert len(read_adapters(adapted)) == len(linear)
    fed, expected = {model.graph.input[0].name: x.numpy()}, wrapped(x).detach().numpy()
    np.testing.assert_allclose(run(adapted, fed)[0], expected, rtol=1e-4, atol=1e-5)
    og.save_adapter(adapted, folder / "ours")
    loaded = peft.PeftModel.from_pretrained(net, folder / "ours").eval()
    np.testing.assert_allclose(loaded(x).detach().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_a_number_behind_a_layer_is_no_bias_of_its_features():
    text = "f (float[N,4] x) => (float[N,3] y) { h = MatMul(x, w) y = Add(h, c) }"
    model = random_model(text, w=(4, 3), c=np.array(2.0, np.float32))
    with pytest.raises(ValueError, match="bias 'c'"):
        og.merge_lora(og.add_ia3(model, "w"))
