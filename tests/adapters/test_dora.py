"""DoRA: adapters with trained lengths of columns, compared with PyTorch by hand and with PEFT."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.model.notes import fine_tuned_tensors, read_adapters
from tests.support.adapter_cases import (
    adapter_network,
    constant_arrays,
    random_feed,
    random_model,
    rename_constants,
    shaken,
)
from tests.support.errors import naming
from tests.support.models import operator_names
from tests.support.running import run

FORMS = ["matmul", "vector", "gemm", "gemm of transposed data", "half precision", "in a branch"]


def adapted_and_shaken(model: onnx.ModelProto, name: str, **options) -> onnx.ModelProto:
    adapted = og.add_lora(model, name, use_dora=True, **options)
    values, shaky = constant_arrays(adapted), shaken(adapted)
    lengths = {n: np.abs(a) + 0.5 for n, a in values.items() if n.endswith("magnitude_vector")}
    return og.graph.replace_initializers_into_onnx(shaky, lengths)


@pytest.mark.parametrize("name", FORMS)
def test_merging_gives_the_file_with_other_weights(name):
    model = adapter_network(name)
    fed, rtol = random_feed(model), 3e-3 if name == "half precision" else 1e-5
    fresh = og.add_lora(model, "w", rank=2, use_dora=True)
    np.testing.assert_allclose(run(fresh, fed)[0], run(model, fed)[0], rtol=rtol, atol=rtol)
    plain = adapted_and_shaken(model, "w", rank=2, alpha=3)
    adapted = adapted_and_shaken(model, "w", rank=2, alpha=3, dropout=0.1)
    [y], [before] = run(adapted, fed), run(model, fed)
    np.testing.assert_allclose(run(plain, fed)[0], y, rtol=rtol, atol=rtol)
    assert np.abs(y.astype(float) - before).max() > 0.1
    merged = og.merge_lora(adapted)
    np.testing.assert_allclose(run(merged, fed)[0], y, rtol=rtol, atol=rtol)
    assert operator_names(merged) == operator_names(model)
    assert not merged.metadata_props


def test_columns_have_the_trained_lengths():
    adapted = adapted_and_shaken(adapter_network("matmul"), "w", rank=2)
    *_, lengths = (constant_arrays(adapted)[name] for name in fine_tuned_tensors(adapted))
    merged = constant_arrays(og.merge_lora(adapted))["w"]
    np.testing.assert_allclose(np.linalg.norm(merged, axis=0), lengths, rtol=1e-5)


@pytest.mark.parametrize("name", ["conv 1", "embedding", "left", "tied"])
def test_other_forms_are_refused(name):
    with pytest.raises(ValueError, match=naming("'w'", "use_dora", "MatMul")):
        og.add_lora(adapter_network(name), "w", rank=2, use_dora=True)


def tanh_model() -> onnx.ModelProto:
    """Return two layers whose weights are named as those of `torch.nn.Sequential`."""
    model = random_model(
        """f (float[N,4] x) => (float[N,3] y) {
            a = MatMul(x, w) b = Add(a, b1) c = Tanh(b) y = Gemm<transB = 1>(c, v, b2) }""",
        w=(4, 5), b1=(5,), v=(3, 5), b2=(3,),
    )  # fmt: skip
    return rename_constants(model, {"w": "0.weight", "v": "2.weight"})


def torch_layers(torch, model):
    values = {name: torch.tensor(a) for name, a in constant_arrays(model).items()}
    net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    names = {"0.weight": "0.weight", "0.bias": "b1", "2.weight": "2.weight", "2.bias": "b2"}
    state = {name: values[own] for name, own in names.items()}
    net.load_state_dict(state | {"0.weight": state["0.weight"].T})
    return net.eval()


def test_training_equals_pytorch():
    torch = pytest.importorskip("torch")
    model = tanh_model()
    adapted = adapted_and_shaken(model, "*.weight", rank=2, alpha=3)
    names = fine_tuned_tensors(adapted)
    parameters = {n: torch.tensor(constant_arrays(adapted)[n], requires_grad=True) for n in names}
    values = {n: torch.tensor(a) for n, a in constant_arrays(model).items()}

    def layer(x, weight, name, bias):
        a, b = (parameters[f"{name}.lora_{part}.weight"] for part in "AB")
        total = weight + 3 / 2 * a @ b
        scale = parameters[f"{name}.lora_magnitude_vector"] / total.norm(dim=0).detach()
        return x @ (total * scale) + bias

    def forward(x):
        h = torch.tanh(layer(x, values["0.weight"], "0", values["b1"]))
        return layer(h, values["2.weight"].T, "2", values["b2"])

    rng = np.random.default_rng(0)
    X, y = (rng.normal(size=(8, n)).astype(np.float32) for n in (4, 3))
    np.testing.assert_allclose(
        run(adapted, x=X)[0], forward(torch.tensor(X)).detach(), rtol=1e-4, atol=1e-5
    )
    optimizer = torch.optim.Adam(parameters.values(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(forward(torch.tensor(X)), torch.tensor(y)).backward()
        optimizer.step()
    trainer = og.Trainer(
        adapted, "squared_error", train=names, optimizer="adam", learning_rate=0.01
    )
    trainer.fit(X, y, epochs=20, batch_size=8, shuffle=False)
    for name, parameter in parameters.items():
        np.testing.assert_allclose(
            trainer.state.weights[name], parameter.detach(), rtol=1e-3, atol=1e-4
        )


def test_files_are_those_of_peft(tmp_path):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    model = tanh_model()
    net = torch_layers(torch, model)
    config = peft.LoraConfig(
        r=2, lora_alpha=3, target_modules=["0", "2"], use_dora=True, init_lora_weights=False
    )
    wrapped = peft.get_peft_model(copy.deepcopy(net), config).eval()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.rand_like(parameter))
    wrapped.save_pretrained(tmp_path / "peft")
    adapted = og.load_adapter(model, tmp_path / "peft")
    x = torch.randn(8, 4)
    expected = wrapped(x).detach()
    np.testing.assert_allclose(run(adapted, x=x)[0], expected, rtol=1e-4, atol=1e-5)
    og.save_adapter(adapted, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(net), tmp_path / "ours").eval()
    np.testing.assert_allclose(again(x).detach(), expected, rtol=1e-4, atol=1e-5)
    assert [note["use_dora"] for note in read_adapters(adapted)] == [True, True]
