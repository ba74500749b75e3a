"""LoRA: adapters beside frozen weights, compared with PyTorch written by hand."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.model.notes import ADAPTERS, HEAD, fine_tuned_tensors, trained_dropout, write_metadata
from onnxgrad.model.traversal import model_nodes
from tests.support.adapter_cases import (
    NETWORKS,
    TORCH_MODULES,
    adapter_network,
    adapter_tensors,
    constant_arrays,
    embedding_network,
    exported_embedding_network,
    lora_by_hand,
    random_feed,
    random_model,
    shaken,
)
from tests.support.errors import naming
from tests.support.exports import export_module
from tests.support.models import operator_names
from tests.support.running import in_sweep, run, run_named

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("name", NETWORKS)
def test_an_adapter_changes_nothing_at_first_and_is_merged_into_the_weights(name):
    model = adapter_network(name)
    data = random_feed(model)
    fresh = og.add_lora(model, "w", rank=2, alpha=3, dropout=0.1)
    onnx.checker.check_model(fresh, full_check="com.microsoft" not in str(model))
    [before] = run(model, data)
    np.testing.assert_array_equal(run(fresh, data)[0], before)
    if not model.functions and model.ir_version > 3:
        assert og.merge_lora(fresh) == model  # byte for byte
    adapted = shaken(fresh)
    [y] = run(adapted, data)
    merged = og.merge_lora(adapted)
    onnx.checker.check_model(merged)
    rtol = 2e-3 if y.dtype == np.float16 else 1e-5
    if name.startswith("behind"):  # the weight is stored in half precision
        rtol = 2e-3
    np.testing.assert_allclose(run(merged, data)[0], y, rtol=rtol, atol=rtol)
    assert np.abs(y.astype(float) - before).max() > 0.1
    assert not merged.metadata_props
    if not model.functions:
        assert [n.op_type for n in model_nodes(merged)] == [n.op_type for n in model_nodes(model)]
        assert constant_arrays(merged).keys() == constant_arrays(model).keys()


@pytest.mark.parametrize(("rank", "use_rslora"), [(2, False), (4, True)])  # sqrt(4) is 2, too
def test_the_product_is_that_of_the_paper(rank, use_rslora):
    model = adapter_network("matmul")
    adapted = shaken(og.add_lora(model, "w", rank=rank, alpha=3, use_rslora=use_rslora))
    a, b = adapter_tensors(adapted)
    x, w = random_feed(model)["x"], constant_arrays(model)["w"]
    np.testing.assert_allclose(run(adapted, x=x)[0], x @ (w + 3 / 2 * a @ b), rtol=1e-4, atol=1e-5)


def test_initial_values_are_those_of_peft():
    wide = random_model("f (float[2,400] x) => (float[2,9] y) { y = MatMul(x, w) }", w=(400, 9))
    a, b = adapter_tensors(og.add_lora(wide, "w", rank=50))
    assert a.std() == pytest.approx(1 / np.sqrt(3 * 400), rel=0.02)
    assert np.abs(a).max() <= 1 / 20
    assert not b.any()
    table = random_model("f (int64[2] x) => (float[2,400] y) { y = Gather(w, x) }", w=(9, 400))
    first = og.add_lora(table, "w", rank=50)
    a, b = adapter_tensors(first)
    assert not a.any()
    assert b.std() == pytest.approx(1, rel=0.02)
    again, other = og.add_lora(table, "w", rank=50), og.add_lora(table, "w", rank=50, seed=1)
    assert again == first
    assert (adapter_tensors(other)[1] != b).any()


def test_a_tied_weight_has_one_adapter():
    model = adapter_network("tied")
    adapted = shaken(og.add_lora(model, "w", rank=2, alpha=2))
    a, b = adapter_tensors(adapted)
    w, x = constant_arrays(model)["w"] + a @ b, random_feed(model)["x"]
    np.testing.assert_allclose(run(adapted, x=x)[0], np.tanh(w[x]) @ w.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "name", "reason"),
    [
        ("h = MatMul(x, w) y = Add(h, b)", "b", "matrix"),
        ("y = MatMul(x, w) z = Identity(w)", "w", "output of"),
        ("h = MatMul(x, w) s = ReduceMax(w) y = Add(h, s)", "w", "ReduceMax"),
        ('y = com.microsoft.FusedGemm<activation = "Relu">(x, w, b)', "w", "activation"),
        ("v = MatMul(w, w) y = MatMul(x, v)", "w", "another constant"),
    ],
)
def test_what_cannot_have_an_adapter_says_why(body, name, reason):
    outputs = "float[2,3] y, float[3,3] z" if " z =" in body else "float[2,3] y"
    model = random_model(f"f (float[2,3] x) => ({outputs}) {{ {body} }}", w=(3, 3), b=(3,))
    with pytest.raises(ValueError, match=naming(f"'{name}'", reason)):
        og.add_lora(model, name)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("ww", {}, ["'ww'", "Did you mean", "'w'"]),
        ("w", {"rank": 3}, ["2 groups", "rank=3"]),
        ("w", {"rank": 0}, ["rank", "whole", "0"]),
        ("w", {"dropout": 1}, ["dropout=1", "[0, 1)"]),
    ],
)
def test_arguments_are_checked(name, options, named):
    with pytest.raises(ValueError, match=naming(*named)):
        og.add_lora(adapter_network("conv 3 in groups"), name, **options)


def test_a_weight_has_one_adapter_and_a_new_head_none():
    model = adapter_network("conv 3 in groups")
    with pytest.raises(ValueError, match=naming("'w'", "adapter already")):
        og.add_lora(og.add_lora(model, "w", rank=2), "*", rank=2)
    with pytest.raises(ValueError, match=naming("no adapters", "add_lora")):
        og.merge_lora(model)
    text = "f (float[1,3] x) => (float[1,3] y) { h = MatMul(x, v) y = MatMul(h, w) }"
    headed = random_model(text, v=(3, 3), w=(3, 3))
    write_metadata(headed, HEAD, ["w"])
    assert fine_tuned_tensors(og.add_lora(headed, "*")) == [
        "v.lora_A.weight",
        "v.lora_B.weight",
        "w",
    ]
    with pytest.raises(ValueError, match=naming("'w'", "new head")):
        og.add_lora(headed, "w")


@pytest.mark.parametrize("rename", [og.graph.onnx_rename_names, og.graph.onnx_rename_weights])
@pytest.mark.parametrize("name", ["tied", "in a branch", "constant node"])
def test_notes_follow_new_names(rename, name):
    model = adapter_network(name)
    adapted = shaken(og.add_lora(model, "w", rank=2, dropout=0.25))
    renamed = rename(adapted)
    assert fine_tuned_tensors(renamed) != fine_tuned_tensors(adapted)
    assert set(fine_tuned_tensors(renamed)) <= constant_arrays(renamed).keys()
    produced = {y for node in model_nodes(renamed) for y in node.output}
    assert set(trained_dropout(renamed)) <= produced
    merged = og.merge_lora(renamed)
    [y], [expected] = run(merged, random_feed(model)), run(adapted, random_feed(model))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_a_note_about_a_missing_tensor_is_an_error():
    adapted = og.add_lora(adapter_network("matmul"), "w")
    adapted.graph.initializer[-1].name = "other"
    adapted.graph.node[-2].input[1] = "other"
    with pytest.raises(og.ModelError, match=r"w\.lora_B\.weight"):
        fine_tuned_tensors(adapted)
    modified = og.add_lora(adapter_network("matmul"), "w")
    modified.graph.node[0].output[0] = "y.moved"
    modified.graph.node[-1].input[0] = "y.moved"
    with pytest.raises(og.ModelError, match=r"y\.base"):
        og.merge_lora(modified)


# -- training ------------------------------------------------------------------------------------

MLP = """f (float[N,4] x) => (float[N,3] y) {
    h1 = Gemm(x, w1, b1) t1 = Tanh(h1) h2 = MatMul(t1, w2) t2 = Tanh(h2) y = Gemm(t2, w3, b3) }"""


def three_layer_model() -> onnx.ModelProto:
    return random_model(MLP, w1=(4, 6), b1=(6,), w2=(6, 5), w3=(5, 3), b3=(3,))


def regression_data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.normal(size=(16, 4)).astype(np.float32), rng.normal(size=(16, 3)).astype(np.float32)


def test_frozen_parts_are_not_in_the_backward_pass():
    adapted = shaken(og.add_lora(three_layer_model(), "w2", rank=2))
    X, y = regression_data()
    trainer = og.Trainer(adapted, "squared_error", train=fine_tuned_tensors(adapted))
    gradients, _ = trainer.step_models(X, y)
    inputs = {x.name for x in gradients.graph.input}
    frozen = {"w1", "b1", "w2", "w3", "b3"}
    assert not inputs & frozen
    held = {t.name for t in gradients.graph.initializer}
    assert held >= frozen
    outputs = [o.name for o in gradients.graph.output if o.name.endswith("_grad")]
    assert outputs == [f"{name}_grad" for name in fine_tuned_tensors(adapted)]
    producer = {y: node for node in gradients.graph.node for y in node.output}

    def before(names):
        seen, waiting = [], [producer[name] for name in names if name in producer]
        for node in waiting:
            if node not in seen:
                seen.append(node)
                waiting += [producer[name] for name in node.input if name in producer]
        return seen

    forward = before([o.name for o in gradients.graph.output if o.name not in outputs])
    backward = [node for node in before(outputs) if node not in forward]
    kept = {name for node in backward for name in node.input} & {
        y for node in forward for y in node.output
    }
    # kept for the backward pass: neither the data nor what the first layer computes, except the
    # data of the adapter itself
    early = [y for node in forward for y in node.output if "x" in node.input or "h1" in node.input]
    assert kept & set(early) <= {"t1"}
    assert "x" not in {name for node in backward for name in node.input}
    # two more products for the gradient of the data of the last layer and of the adapter
    full, _ = og.Trainer(three_layer_model(), "squared_error", train=["w*", "b*"]).step_models(X, y)
    products = [
        sum(node.op_type in ("MatMul", "Gemm") for node in m.graph.node) for m in (full, gradients)
    ]
    assert products == [3 + 5, 3 + 2 + 4]


def test_dropout_acts_in_training_only_and_resumes(tmp_path):
    X, y = regression_data()
    adapted = shaken(og.add_lora(three_layer_model(), ["w1", "w2"], rank=2, dropout=0.5))
    plain = shaken(og.add_lora(three_layer_model(), ["w1", "w2"], rank=2))
    options = {"train": fine_tuned_tensors(adapted), "optimizer": "sgd", "learning_rate": 1e-3}

    def fit(model, epochs, folder=None, **more):
        callbacks = [og.Checkpoint(tmp_path / folder)] if folder else []
        trainer = og.Trainer(model, "squared_error", callbacks=callbacks, **options, **more)
        resume = tmp_path / folder if folder else None
        return trainer.fit(X, y, epochs=epochs, batch_size=4, resume=resume)

    active, inactive = fit(adapted, 1, "state"), fit(plain, 1)
    assert active.history[0]["loss"] != pytest.approx(inactive.history[0]["loss"], rel=1e-3)
    off = fit(adapted, 1, dropout=dict.fromkeys(trained_dropout(adapted), 0.0))
    assert off.history[0]["loss"] == inactive.history[0]["loss"]
    expected = run(active.model, x=X)[0]
    np.testing.assert_array_equal(active.predict(X), expected)
    np.testing.assert_allclose(run(og.merge_lora(active.model), x=X)[0], expected, atol=1e-5)
    whole, resumed = fit(adapted, 2), fit(adapted, 2, "state")
    for name, value in whole.state.weights.items():
        np.testing.assert_array_equal(resumed.state.weights[name], value)


def test_half_of_the_elements_are_dropped():
    text = "f (float[N,4] x) => (float[N,4] y) { y = MatMul(x, w) }"
    zeros = random_model(text, w=np.zeros((4, 4), np.float32))
    model = og.add_lora(zeros, "w", rank=4, alpha=4, dropout=0.5)
    eye = np.eye(4, dtype=np.float32)
    model = og.graph.replace_initializers_into_onnx(
        model, dict.fromkeys(fine_tuned_tensors(model), eye)
    )
    X = np.ones((2000, 4), np.float32)
    trainer = og.Trainer(
        model, "squared_error", train=fine_tuned_tensors(model), optimizer="sgd", learning_rate=0.0
    )
    trainer.fit(X, np.zeros_like(X), batch_size=2000)
    assert trainer.history[0]["loss"] == pytest.approx(2.0, rel=0.05)  # (2^2 + 0) / 2
    assert trainer.evaluate(X, np.zeros_like(X))["loss"] == 1.0


@pytest.mark.parametrize(
    "name", ["conv 2", "half precision", "in a branch", "in a function", "old"]
)
def test_dropout_acts_in_every_form(name):
    """While a model is trained only: the loss of `evaluate` is that of the model's outputs."""
    model = adapter_network(name)
    x = random_feed(model)["x"]
    adapted = shaken(og.add_lora(model, "w", rank=2, dropout=0.5))
    [outputs] = run(adapted, x=x)
    y = np.zeros(outputs.shape, np.float32)
    trainer = og.Trainer(
        adapted,
        "squared_error",
        train=fine_tuned_tensors(adapted),
        optimizer="sgd",
        learning_rate=0.0,
    )
    evaluated = trainer.evaluate(x, y)["loss"]
    trainer.fit(x, y, batch_size=len(y))
    rel = 1e-3 if name == "half precision" else 1e-5
    assert evaluated == pytest.approx(np.square(outputs.astype(np.float64)).mean(), rel=rel)
    assert trainer.history[0]["loss"] != pytest.approx(evaluated, rel=1e-2)


@pytest.mark.parametrize("form", ["qdq", "blocks"])
def test_quantized_weights_have_adapters_that_stay(form):
    rng, scale = np.random.default_rng(0), np.float32([0.1, 0.2, 0.3])
    if form == "qdq":
        model = random_model(
            """f (float[2,4] x) => (float[2,3] y) {
                v = DequantizeLinear<axis = 1>(w, s, z) y = MatMul(x, v) }""",
            w=rng.integers(-9, 9, (4, 3)).astype(np.int8), s=scale, z=np.zeros(3, np.int8),
        )  # fmt: skip
    else:
        model = random_model(
            """f (float[2,16] x) => (float[2,3] y) {
                y = com.microsoft.MatMulNBits<K=16, N=3, bits=4, block_size=16>(x, w, s) }""",
            w=rng.integers(0, 256, (3, 1, 8)).astype(np.uint8), s=scale,
        )  # fmt: skip
    fresh = og.add_lora(model, "w", rank=2)
    x = random_feed(model)["x"]
    [before] = run(model, x=x)
    np.testing.assert_array_equal(run(fresh, x=x)[0], before)
    adapted = shaken(fresh)
    a, b = adapter_tensors(adapted)
    np.testing.assert_allclose(run(adapted, x=x)[0], before + 8 * (x @ a @ b), 1e-4, 1e-4)
    with pytest.raises(ValueError, match=naming("'w'", "quantized", "requantize=True")):
        og.merge_lora(adapted)


INTEGERS = {
    "scaled": "F = Cast<to=1>(Q) C = Sub(F, z) W = Mul(C, s) y = MatMul(x, W)",
    "in blocks": """F = Cast<to=1>(Q) R = Reshape(F, blocks) B = Mul(R, t) S = Reshape(B, square)
        W = Transpose(S) y = MatMul(x, W)""",
    "scaled behind the product": "F = Cast<to=1>(Q) p = MatMul(x, F) y = Mul(p, s)",
    "gathered": "G = Gather(Q, i) F = Cast<to=1>(G) S = Gather(t4, i) y = Mul(F, S)",
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_that_are_cast_and_scaled_have_adapters(name):
    rows = name == "gathered"
    text = (
        f"f ({'int64[N] i' if rows else 'float[N,4] x'}) => (float[N,4] y) {{ {INTEGERS[name]} }}"
    )
    tensors = {
        "Q": RNG.integers(-9, 9, (4, 4)).astype(np.int8),
        "z": RNG.normal(size=4).astype("f"),
        "s": RNG.normal(size=4).astype("f"),
        "t": RNG.normal(size=(8, 1)).astype("f"),
        "t4": RNG.normal(size=(4, 1)).astype("f"),
        "blocks": np.array([8, 2]),
        "square": np.array([4, 4]),
    }
    model = random_model(text, **{n: t for n, t in tensors.items() if n in text})
    x = RNG.integers(0, 4, 3) if rows else RNG.normal(size=(3, 4)).astype("f")
    fed = {model.graph.input[0].name: x}
    adapted = og.add_lora(model, "Q", rank=2)
    onnx.checker.check_model(adapted, full_check=True)
    np.testing.assert_array_equal(run(adapted, fed)[0], run(model, fed)[0])
    a, b = adapter_tensors(adapted := shaken(adapted))
    change = 8 * (a[x] if rows else x @ a) @ b
    np.testing.assert_allclose(run(adapted, fed)[0], run(model, fed)[0] + change, 1e-4, 1e-4)
    trained = og.Trainer(adapted, "mse").trained
    assert trained == fine_tuned_tensors(adapted)


LSTM = "h, l, c = LSTM<hidden_size = 2>"
WITHOUT_ADAPTERS = {
    "recurrent": (
        f"{LSTM}(x, w_x, w_h) s = Squeeze(h, axis) y = MatMul(s, w_out)", ["w_x", "LSTM", "w_h"],
    ),
    "gates": (  # as exporters order them
        f"""w = Concat<axis=1>(w_1, w_2) {LSTM}(x, w, w_r) s = Squeeze(h, axis)
            y = MatMul(s, w_out)""",
        ["w_1", "Concat", "w_2", "w_r"],
    ),
    "integers": (
        """q, s, z = DynamicQuantizeLinear(x) h = ConvInteger(q, w_conv, z) f = Cast<to=1>(h)
            r = Mul(f, s) p = ReduceMean<keepdims=0>(r, axes) y = MatMul(p, w_out)""",
        ["w_conv", "ConvInteger"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", WITHOUT_ADAPTERS)
def test_layers_without_adapters_are_named(form):
    body, named = WITHOUT_ADAPTERS[form]
    x, y = ("N,2,4,4", "N,2") if form == "integers" else ("N,1,3", "N,1,2")
    tensors = {
        "w_x": (1, 8, 3), "w_h": (1, 8, 2), "w_1": (1, 4, 3), "w_2": (1, 4, 3), "w_r": (1, 8, 2),
        "w_out": (2, 2), "axis": np.array([1]), "axes": np.array([2, 3]),
        "w_conv": RNG.integers(0, 9, (2, 2, 3, 3)).astype(np.uint8),
    }  # fmt: skip
    read = set(re.findall(r"\w+", body))
    model = random_model(
        f"f (float[{x}] x) => (float[{y}] y) {{ {body} }}",
        **{name: value for name, value in tensors.items() if name in read},
    )
    with pytest.warns(UserWarning, match=naming("'w_*'", *named)):
        adapted = og.add_lora(model, "w_*", rank=1)
    assert fine_tuned_tensors(adapted) == ["w_out.lora_A.weight", "w_out.lora_B.weight"]


# -- PyTorch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("exporter", ["torchscript", in_sweep("dynamo")])
def test_training_equals_pytorch(exporter):
    torch = pytest.importorskip("torch")
    net, exported = embedding_network(), exported_embedding_network(exporter)
    adapted = shaken(og.add_lora(exported, "*", rank=2, alpha=3))
    assert fine_tuned_tensors(adapted)[-2:] == ["layers.1.lora_A.weight", "layers.1.lora_B.weight"]
    values, parameters = constant_arrays(adapted), {}
    for path in TORCH_MODULES:
        adapter = lora_by_hand(net.get_submodule(path), 2, 3 / 2)
        for tensor, part in ((adapter.A, "A"), (adapter.B, "B")):
            kind = f"lora_embedding_{part}" if path == "embed" else f"lora_{part}.weight"
            tensor.data = torch.tensor(values[f"{path}.{kind}"])
            parameters[f"{path}.{kind}"] = tensor
        net.set_submodule(path, adapter)
    rng = np.random.default_rng(0)
    X, y = rng.integers(0, 11, (8, 5)), rng.integers(0, 3, 8)
    [output] = run(adapted, {exported.graph.input[0].name: X})
    np.testing.assert_allclose(output, net(torch.tensor(X)).detach(), rtol=1e-4, atol=1e-5)

    trainer = og.Trainer(
        adapted,
        "cross_entropy",
        train=fine_tuned_tensors(adapted),
        optimizer="adam",
        learning_rate=0.01,
    )
    gradients, _ = trainer.step_models(X, y)
    computed = run_named(gradients, values | {exported.graph.input[0].name: X, "label": y})
    optimizer = torch.optim.Adam(parameters.values(), lr=0.01)
    loss = torch.nn.CrossEntropyLoss()
    for step in range(20):
        optimizer.zero_grad()
        loss(net(torch.tensor(X)), torch.tensor(y)).backward()
        if not step:
            for name, tensor in parameters.items():
                np.testing.assert_allclose(
                    computed[f"{name}_grad"], tensor.grad, rtol=1e-4, atol=1e-6
                )
        optimizer.step()
    trainer.fit(X, y, epochs=20, batch_size=8, shuffle=False)
    for name, tensor in parameters.items():
        np.testing.assert_allclose(
            trainer.state.weights[name], tensor.detach(), rtol=1e-3, atol=1e-4
        )
    merged = og.merge_lora(trainer.model)
    assert operator_names(merged) == operator_names(exported)
    [y] = run(merged, {exported.graph.input[0].name: X})
    np.testing.assert_allclose(y, trainer.predict(X), atol=1e-5)


def test_modules_of_a_sequential_are_named_as_in_pytorch():
    torch = pytest.importorskip("torch")
    inner = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    net = torch.nn.ModuleDict({"net": torch.nn.Sequential(inner, torch.nn.Linear(3, 3, False))})
    net.forward = lambda x: net["net"](x)
    adapted = og.add_lora(export_module(net, (torch.ones(2, 4, 3),)), "*", rank=1)
    assert fine_tuned_tensors(adapted)[::2] == ["net.0.0.lora_A.weight", "net.1.lora_A.weight"]


def test_the_note_is_json_that_other_parts_read():
    adapted = og.add_lora(adapter_network("gemm"), "w", rank=2, alpha=4)
    assert [entry.key for entry in adapted.metadata_props] == [ADAPTERS]


@pytest.mark.parametrize("at", [None, "w"])
@pytest.mark.parametrize("kind", ["lora", "dora", "base"])
def test_a_layer_with_an_adapter_is_no_head_to_be_replaced(kind, at):
    model = adapter_network("gemm")
    adapted = {
        "lora": lambda: og.add_lora(model, "w"),
        "dora": lambda: og.add_lora(model, "w", use_dora=True),
        "base": lambda: og.graph.adapter_inputs(og.add_lora(model, "w")),
    }[kind]()
    with pytest.raises(ValueError, match=naming("adapter", "merge")):
        og.replace_head(adapted, units=5, at=at)
    if kind != "base":
        [y] = og.replace_head(og.merge_lora(adapted), units=5).graph.output
        assert y.type.tensor_type.shape.dim[1].dim_value == 5
