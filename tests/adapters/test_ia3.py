"""(IA)3: factors of outputs and inputs of layers, their files, and their merging."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnxgrad as og
from onnxgrad.adapters.files import load_adapter, save_adapter
from onnxgrad.adapters.ia3 import add_ia3
from onnxgrad.adapters.inputs import adapter_inputs
from onnxgrad.adapters.lora import add_lora
from onnxgrad.adapters.merge import merge_lora
from onnxgrad.model.notes import read_adapters
from tests.adapters.test_lora import exported, torch_networks  # noqa: F401
from tests.support.adapter_cases import arrays, feed, networks, parse, shaken, with_tensors
from tests.support.running import run

WITHOUT = ("batched", "left", "gemm of transposed data", "gemm on the left", "embedding", "tied")
NETWORKS = {name: model for name, model in networks().items() if name not in WITHOUT}
TOLERANCE = {"half precision": 2e-3, "behind transpose, cast and identity": 2e-3}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_factors_change_nothing_at_first_and_are_merged(name, before, tmp_path):
    model, data = NETWORKS[name], feed(NETWORKS[name])
    adapted = add_ia3(model, (), "w") if before else add_ia3(model, "w")
    np.testing.assert_array_equal(run(adapted, data)[0], run(model, data)[0])
    plain = merge_lora(adapted)
    assert not plain.metadata_props
    assert len(plain.graph.node) <= len(model.graph.node)
    trained = shaken(adapted)
    expected = run(trained, data)[0]
    assert np.abs(expected - run(model, data)[0]).max() > 0.01
    merged = run(merge_lora(trained), data)[0]
    atol = TOLERANCE.get(name, 2e-6)
    np.testing.assert_allclose(merged, expected, rtol=1e-5, atol=atol)
    save_adapter(trained, tmp_path)
    assert load_adapter(model, tmp_path) == trained
    save_adapter(trained, tmp_path / "a.onnx_adapter")
    assert load_adapter(adapted, tmp_path / "a.onnx_adapter") == trained


def test_a_layer_is_what_the_paper_says():
    model = with_tensors(
        parse("f (float[N,4] x) => (float[N,3] y) { h = MatMul(x, w) y = Add(h, b) }"),
        w=(4, 3), b=(3,),
    )  # fmt: skip
    w, b = arrays(model)["w"], arrays(model)["b"]
    x = np.random.default_rng(2).normal(size=(5, 4)).astype(np.float32)
    outside, inside = shaken(add_ia3(model, "w")), shaken(add_ia3(model, (), "w"))
    factors = arrays(outside)["w.ia3_l"], arrays(inside)["w.ia3_l"]
    np.testing.assert_allclose(run(outside, x=x)[0], factors[0] * (x @ w + b), rtol=1e-5)
    np.testing.assert_allclose(run(inside, x=x)[0], (factors[1] * x) @ w + b, rtol=1e-4, atol=1e-6)
    assert [t.name for t in og.trainable(outside).trained] == ["w.ia3_l"]
    labels = np.zeros(5, np.int64)
    trainer = og.Trainer(outside, "cross_entropy", learning_rate=0.1).fit(x, labels)
    assert {*trainer.state.weights} == {"w.ia3_l"}
    assert np.abs(trainer.state.weights["w.ia3_l"] - factors[0]).min() > 0.01
    shared = copy.deepcopy(model)
    shared.graph.node.append(onnx.helper.make_node("Mul", ["b", "b"], ["unused"]))
    with pytest.raises(ValueError, match="bias 'b' is read by others"):
        merge_lora(shaken(add_ia3(shared, "w")))


def test_a_base_takes_factors_and_low_ranks(tmp_path):
    text = "f (float[N,4] x) => (float[N,2] y) { h = MatMul(x, w) t = Tanh(h) y = MatMul(t, v) }"
    model = with_tensors(parse(text), w=(4, 4), v=(4, 2))
    adapted = add_lora(add_ia3(model, "w"), "v", rank=2)
    base, trained = adapter_inputs(adapted), shaken(adapted)
    x = {"x": np.random.default_rng(2).normal(size=(5, 4)).astype(np.float32)}
    served = ort.InferenceSession(base.SerializeToString())
    np.testing.assert_array_equal(served.run(None, x)[0], run(model, x)[0])
    save_adapter(trained, tmp_path / "a.onnx_adapter")
    adapter, options = ort.LoraAdapter(), ort.RunOptions()
    adapter.Load(str(tmp_path / "a.onnx_adapter"))
    options.add_active_adapter(adapter)
    np.testing.assert_allclose(served.run(None, x, options)[0], run(trained, x)[0], rtol=1e-5)
    with pytest.raises(ValueError, match="cannot be in one folder"):
        save_adapter(trained, tmp_path / "folder")
    np.testing.assert_allclose(run(merge_lora(trained), x)[0], run(trained, x)[0], rtol=1e-4)


@pytest.mark.parametrize("name", WITHOUT)
def test_what_has_no_factors_is_refused(name):
    with pytest.raises(ValueError, match=r"factors of \(IA\)3"):
        add_ia3(networks()[name], "w")


def test_a_layer_is_named_once():
    with pytest.raises(ValueError, match="of its output and of its input"):
        add_ia3(NETWORKS["matmul"], "w", "w")


def test_peft_and_we_read_what_the_other_writes(tmp_path):
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)

        def forward(self, x):
            return self.down(torch.tanh(self.up(x)))

    net = Net().eval()
    model = parse("""f (float[N,4] x) => (float[N,3] y) {
        h = Gemm<transB = 1>(x, up_weight, up_bias) t = Tanh(h)
        y = Gemm<transB = 1>(t, down_weight, down_bias) }""")
    for node in model.graph.node:
        node.input[:] = [name.replace("_", ".") for name in node.input]
    with_tensors(model, **{name: value.numpy() for name, value in net.state_dict().items()})
    _check_files(net, model, torch.randn(8, 4), tmp_path)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_files_of_exported_models(exported, tmp_path):  # noqa: F811
    torch = pytest.importorskip("torch")
    _check_files(torch_networks(torch)[0], exported, torch.randint(0, 11, (4, 5)), tmp_path)


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
    adapted = load_adapter(model, folder / "peft")
    assert len(read_adapters(adapted)) == len(linear)
    fed, expected = {model.graph.input[0].name: x.numpy()}, wrapped(x).detach().numpy()
    np.testing.assert_allclose(run(adapted, fed)[0], expected, rtol=1e-4, atol=1e-5)
    save_adapter(adapted, folder / "ours")
    loaded = peft.PeftModel.from_pretrained(net, folder / "ours").eval()
    np.testing.assert_allclose(loaded(x).detach().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_a_number_behind_a_layer_is_no_bias_of_its_features():
    model = parse("f (float[N,4] x) => (float[N,3] y) { h = MatMul(x, w) y = Add(h, c) }")
    adapted = add_ia3(with_tensors(model, w=(4, 3), c=np.array(2.0, np.float32)), "w")
    with pytest.raises(ValueError, match="its bias 'c' is read by others, or is no constant"):
        merge_lora(adapted)
