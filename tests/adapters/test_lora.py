"""LoRA: adapters beside frozen weights, compared with PyTorch written by hand."""

from __future__ import annotations

import io

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.adapters.lora import add_lora
from onnxgrad.adapters.merge import merge_lora
from onnxgrad.errors import ModelError
from onnxgrad.model.notes import ADAPTERS, HEAD, adapter_dropout, fine_tuned, write_note
from onnxgrad.model.traversal import nodes_of
from tests.support.adapter_cases import arrays, feed, networks, parse, shaken, with_tensors
from tests.support.running import run

NETWORKS = networks()
RNG = np.random.default_rng(0)


def adapter_of(model):
    return [arrays(model)[name] for name in fine_tuned(model)]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_fresh_adapter_changes_nothing(name):
    model = NETWORKS[name]
    adapted = add_lora(model, "w", rank=2, dropout=0.1)
    onnx.checker.check_model(adapted, full_check="com.microsoft" not in str(model))
    np.testing.assert_array_equal(run(adapted, feed(model))[0], run(model, feed(model))[0])


@pytest.mark.parametrize("name", NETWORKS)
def test_merging_gives_the_file_with_other_weights(name):
    model = NETWORKS[name]
    fresh = add_lora(model, "w", rank=2, alpha=3, dropout=0.1)
    if not model.functions and model.ir_version > 3:
        assert merge_lora(fresh) == model  # byte for byte
    adapted = shaken(fresh)
    before, y = run(model, feed(model))[0], run(adapted, feed(model))[0]
    merged = merge_lora(adapted)
    onnx.checker.check_model(merged)
    far = np.abs(y.astype(float) - before).max()
    rtol = 2e-3 if y.dtype == np.float16 else 1e-5
    if name.startswith("behind"):  # the weight is stored in half precision
        rtol = 2e-3
    np.testing.assert_allclose(run(merged, feed(model))[0], y, rtol=rtol, atol=rtol)
    assert far > 0.1
    assert not merged.metadata_props
    if not model.functions:
        assert [n.op_type for n in nodes_of(merged)] == [n.op_type for n in nodes_of(model)]
        assert arrays(merged).keys() == arrays(model).keys()


def test_the_product_is_that_of_the_paper():
    model = NETWORKS["matmul"]
    adapted = shaken(add_lora(model, "w", rank=2, alpha=3))
    a, b = adapter_of(adapted)
    x, w = feed(model)["x"], arrays(model)["w"]
    np.testing.assert_allclose(run(adapted, x=x)[0], x @ (w + 3 / 2 * a @ b), rtol=1e-4, atol=1e-5)
    stabilized = add_lora(model, "w", rank=4, alpha=3, use_rslora=True)
    stabilized = shaken(stabilized)
    a, b = adapter_of(stabilized)
    np.testing.assert_allclose(
        run(stabilized, x=x)[0], x @ (w + 3 / 2 * a @ b), rtol=1e-4, atol=1e-5
    )


def test_initial_values_are_those_of_peft():
    linear = with_tensors(
        parse("f (float[2,400] x) => (float[2,9] y) { y = MatMul(x, w) }"), w=(400, 9)
    )
    a, b = adapter_of(add_lora(linear, "w", rank=50))
    assert a.std() == pytest.approx(1 / np.sqrt(3 * 400), rel=0.02)
    assert np.abs(a).max() <= 1 / 20
    assert not b.any()
    table = with_tensors(
        parse("f (int64[2] x) => (float[2,400] y) { y = Gather(w, x) }"), w=(9, 400)
    )
    m = add_lora(table, "w", rank=50)
    a, b = adapter_of(m)
    assert not a.any()
    assert b.std() == pytest.approx(1, rel=0.02)
    again, other = add_lora(table, "w", rank=50), add_lora(table, "w", rank=50, seed=1)
    assert again == m
    assert (adapter_of(other)[1] != b).any()


def test_a_tied_weight_has_one_adapter():
    model = NETWORKS["tied"]
    adapted = shaken(add_lora(model, "w", rank=2, alpha=2))
    a, b = adapter_of(adapted)
    w, x = arrays(model)["w"] + a @ b, feed(model)["x"]
    np.testing.assert_allclose(run(adapted, x=x)[0], np.tanh(w[x]) @ w.T, rtol=1e-4, atol=1e-5)


REFUSED = {
    "bias": ("{ h = MatMul(x, w) y = Add(h, b) }", "b", "needs a matrix"),
    "output": ("{ y = MatMul(x, w) z = Identity(w) }", "w", "output of a graph"),
    "other use": ("{ h = MatMul(x, w) s = ReduceMax(w) y = Add(h, s) }", "w", "ReduceMax"),
    "fused": (
        '{ y = com.microsoft.FusedGemm<activation = "Relu">(x, w, b) }', "w", "activation too",
    ),
    "constants": ("{ v = MatMul(w, w) y = MatMul(x, v) }", "w", "another constant"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "name", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_have_an_adapter_says_why(body, name, reason):
    outputs = "float[2,3] y, float[3,3] z" if " z =" in body else "float[2,3] y"
    model = with_tensors(parse(f"f (float[2,3] x) => ({outputs}) {body}"), w=(3, 3), b=(3,))
    with pytest.raises(ValueError, match=reason):
        add_lora(model, name)


def test_arguments_are_checked():
    model = NETWORKS["conv 3 in groups"]
    with pytest.raises(ValueError, match="Did you mean 'weight'"):
        add_lora(
            with_tensors(
                parse("f (float[1,3] x) => (float[1,3] y) { y = MatMul(x, weight) }"), weight=(3, 3)
            ),
            "wieght",
        )
    with pytest.raises(ValueError, match="2 groups, and rank=3"):
        add_lora(model, "w", rank=3)
    with pytest.raises(ValueError, match="at least 1"):
        add_lora(model, "w", rank=0)
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        add_lora(model, "w", dropout=1)
    with pytest.raises(ValueError, match="has an adapter already"):
        add_lora(add_lora(model, "w", rank=2), "*", rank=2)
    with pytest.raises(ValueError, match="no adapters to merge"):
        merge_lora(model)
    headed = with_tensors(
        parse("f (float[1,3] x) => (float[1,3] y) { h = MatMul(x, v) y = MatMul(h, w) }"),
        v=(3, 3),
        w=(3, 3),
    )
    write_note(headed, HEAD, ["w"])
    assert fine_tuned(add_lora(headed, "*")) == ["v.lora_A.weight", "v.lora_B.weight", "w"]
    with pytest.raises(ValueError, match="new head"):
        add_lora(headed, "w")


@pytest.mark.parametrize("rename", [og.onnx_rename_names, og.onnx_rename_weights])
@pytest.mark.parametrize("name", ["tied", "in a branch", "constant node"])
def test_notes_follow_new_names(rename, name):
    model = NETWORKS[name]
    adapted = shaken(add_lora(model, "w", rank=2, dropout=0.25))
    renamed = rename(adapted)
    assert fine_tuned(renamed) != fine_tuned(adapted)
    assert set(fine_tuned(renamed)) <= arrays(renamed).keys()
    produced = {y for node in nodes_of(renamed) for y in node.output}
    assert set(adapter_dropout(renamed)) <= produced
    merged = merge_lora(renamed)
    [y], [expected] = run(merged, feed(model)), run(adapted, feed(model))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_a_note_about_a_missing_tensor_is_an_error():
    adapted = add_lora(NETWORKS["matmul"], "w")
    adapted.graph.initializer[-1].name = "other"
    adapted.graph.node[-2].input[1] = "other"
    with pytest.raises(ModelError, match=r"w\.lora_B\.weight"):
        fine_tuned(adapted)
    modified = add_lora(NETWORKS["matmul"], "w")
    modified.graph.node[0].output[0] = "y.moved"
    modified.graph.node[-1].input[0] = "y.moved"
    with pytest.raises(ModelError, match=r"y\.base"):
        merge_lora(modified)


# -- training ------------------------------------------------------------------------------------

MLP = """f (float[N,4] x) => (float[N,3] y) {
    h1 = Gemm(x, w1, b1) t1 = Tanh(h1) h2 = MatMul(t1, w2) t2 = Tanh(h2) y = Gemm(t2, w3, b3) }"""


def mlp() -> onnx.ModelProto:
    return with_tensors(parse(MLP), w1=(4, 6), b1=(6,), w2=(6, 5), w3=(5, 3), b3=(3,))


def data():
    rng = np.random.default_rng(3)
    return rng.normal(size=(16, 4)).astype(np.float32), rng.normal(size=(16, 3)).astype(np.float32)


def test_frozen_parts_are_not_in_the_backward_pass():
    adapted = shaken(add_lora(mlp(), "w2", rank=2))
    X, y = data()
    trainer = og.Trainer(adapted, "squared_error", train=fine_tuned(adapted))
    gradients, _ = trainer.step_models(X, y)
    inputs = {x.name for x in gradients.graph.input}
    frozen = {"w1", "b1", "w2", "w3", "b3"}
    assert not inputs & frozen
    held = {t.name for t in gradients.graph.initializer}
    assert held >= frozen
    outputs = [o.name for o in gradients.graph.output if o.name.endswith("_grad")]
    assert outputs == [f"{name}_grad" for name in fine_tuned(adapted)]
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
    full, _ = og.Trainer(mlp(), "squared_error", train=["w*", "b*"]).step_models(X, y)
    products = [
        sum(node.op_type in ("MatMul", "Gemm") for node in m.graph.node) for m in (full, gradients)
    ]
    assert products == [3 + 5, 3 + 2 + 4]


def test_dropout_acts_in_training_only_and_resumes(tmp_path):
    X, y = data()
    adapted = shaken(add_lora(mlp(), ["w1", "w2"], rank=2, dropout=0.5))
    plain = shaken(add_lora(mlp(), ["w1", "w2"], rank=2))
    options = {"train": fine_tuned(adapted), "optimizer": "sgd", "learning_rate": 1e-3}

    def fit(model, epochs, folder=None, **more):
        callbacks = [og.Checkpoint(tmp_path / folder)] if folder else []
        trainer = og.Trainer(model, "squared_error", callbacks=callbacks, **options, **more)
        resume = tmp_path / folder if folder else None
        return trainer.fit(X, y, epochs=epochs, batch_size=4, resume=resume)

    active, inactive = fit(adapted, 1), fit(plain, 1)
    assert active.history[0]["loss"] != pytest.approx(inactive.history[0]["loss"], rel=1e-3)
    off = fit(adapted, 1, dropout=dict.fromkeys(adapter_dropout(adapted), 0.0))
    assert off.history[0]["loss"] == inactive.history[0]["loss"]
    expected = run(active.model, x=X)[0]
    np.testing.assert_array_equal(active.predict(X), expected)
    np.testing.assert_allclose(run(merge_lora(active.model), x=X)[0], expected, atol=1e-5)
    whole = fit(adapted, 4)
    fit(adapted, 2, "state")
    resumed = fit(adapted, 4, "state")
    for name, value in whole.state.weights.items():
        np.testing.assert_array_equal(resumed.state.weights[name], value)


def test_half_of_the_elements_are_dropped():
    identity = with_tensors(
        parse("f (float[N,4] x) => (float[N,4] y) { y = MatMul(x, w) }"),
        w=np.zeros((4, 4), np.float32),
    )
    model = add_lora(identity, "w", rank=4, alpha=4, dropout=0.5)
    eye = np.eye(4, dtype=np.float32)
    model = og.replace_initializers_into_onnx(model, dict.fromkeys(fine_tuned(model), eye))
    X = np.ones((2000, 4), np.float32)
    trainer = og.Trainer(
        model, "squared_error", train=fine_tuned(model), optimizer="sgd", learning_rate=0.0
    )
    trainer.fit(X, np.zeros_like(X), batch_size=2000)
    assert trainer.history[0]["loss"] == pytest.approx(2.0, rel=0.05)  # (2^2 + 0) / 2
    assert trainer.evaluate(X, np.zeros_like(X))["loss"] == 1.0


@pytest.mark.parametrize(
    "name", ["conv 2", "half precision", "in a branch", "in a function", "old"]
)
def test_dropout_acts_in_every_form(name):
    model, losses = NETWORKS[name], []
    x = feed(model)["x"]
    y = np.zeros(run(model, x=x)[0].shape, np.float32)
    for dropout in (0.5, 0.0):
        adapted = shaken(add_lora(model, "w", rank=2, dropout=dropout))
        trainer = og.Trainer(
            adapted, "squared_error", train=fine_tuned(adapted), optimizer="sgd", learning_rate=0.0
        )
        trainer.fit(x, y, batch_size=len(y))
        losses += [trainer.history[0]["loss"], trainer.evaluate(x, y)["loss"]]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    assert losses[1:] == pytest.approx([losses[3]] * 3, rel=1e-5)


def quantized_networks():
    rng = np.random.default_rng(0)
    scale, zero = np.float32([0.1, 0.2, 0.3]), np.zeros(3, np.int8)
    integers = rng.integers(-9, 9, (4, 3)).astype(np.int8)
    qdq = with_tensors(
        parse("""f (float[2,4] x) => (float[2,3] y) {
            v = DequantizeLinear<axis = 1>(w, s, z) y = MatMul(x, v) }"""),
        w=integers, s=scale, z=zero,
    )  # fmt: skip
    packed = rng.integers(0, 256, (3, 1, 8)).astype(np.uint8)
    blocks = with_tensors(
        parse("""f (float[2,16] x) => (float[2,3] y) {
            y = com.microsoft.MatMulNBits<K = 16, N = 3, bits = 4, block_size = 16>(x, w, s) }"""),
        w=packed, s=scale,
    )  # fmt: skip
    return {"qdq": qdq, "blocks": blocks}


@pytest.mark.parametrize("name", ["qdq", "blocks"])
def test_quantized_weights_have_adapters_that_stay(name):
    model = quantized_networks()[name]
    adapted = add_lora(model, "w", rank=2)
    x = feed(model)["x"]
    np.testing.assert_array_equal(run(adapted, x=x)[0], run(model, x=x)[0])
    a, b = adapter_of(adapted := shaken(adapted))
    expected = run(model, x=x)[0] + 8 * (x @ a @ b)
    np.testing.assert_allclose(run(adapted, x=x)[0], expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="quantized"):
        merge_lora(adapted)


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
    model = with_tensors(parse(text), **{n: t for n, t in tensors.items() if n in text})
    x = RNG.integers(0, 4, 3) if rows else RNG.normal(size=(3, 4)).astype("f")
    fed = {model.graph.input[0].name: x}
    adapted = add_lora(model, "Q", rank=2)
    onnx.checker.check_model(adapted, full_check=True)
    np.testing.assert_array_equal(run(adapted, fed)[0], run(model, fed)[0])
    a, b = adapter_of(adapted := shaken(adapted))
    change = 8 * (a[x] if rows else x @ a) @ b
    np.testing.assert_allclose(run(adapted, fed)[0], run(model, fed)[0] + change, 1e-4, 1e-4)
    trained = og.Trainer(adapted, "mse").trained
    assert trained == fine_tuned(adapted)


def test_layers_without_adapters_are_named():
    model = with_tensors(
        parse("""f (float[N,1,3] x) => (float[N,1,2] y) {
            h, l, c = LSTM<hidden_size = 2>(x, w_x, w_h) s = Squeeze(h, axis) y = MatMul(s, w_out)
        }"""),
        w_x=RNG.normal(size=(1, 8, 3)).astype("f"),
        w_h=RNG.normal(size=(1, 8, 2)).astype("f"),
        w_out=RNG.normal(size=(2, 2)).astype("f"),
        axis=np.array([1]),
    )
    with pytest.warns(UserWarning, match=r"'w_\*' matches get no adapter: 'w_x': LSTM .*'w_h'"):
        adapted = add_lora(model, "w_*", rank=1)
    assert fine_tuned(adapted) == ["w_out.lora_A.weight", "w_out.lora_B.weight"]
    joined = with_tensors(  # as exporters order the gates
        parse("""f (float[N,1,3] x) => (float[N,1,2] y) {
            w = Concat<axis=1>(w_1, w_2) h, l, c = LSTM<hidden_size = 2>(x, w, r)
            s = Squeeze(h, axis) y = MatMul(s, w_out) }"""),
        w_1=RNG.normal(size=(1, 4, 3)).astype("f"),
        w_2=RNG.normal(size=(1, 4, 3)).astype("f"),
        r=RNG.normal(size=(1, 8, 2)).astype("f"),
        w_out=RNG.normal(size=(2, 2)).astype("f"),
        axis=np.array([1]),
    )
    with pytest.warns(UserWarning, match=r"no adapter: 'w_1': Concat .*'w_2'"):
        add_lora(joined, "w_*", rank=1)
    integer = with_tensors(
        parse("""f (float[N,2,4,4] x) => (float[N,2] y) {
            q, s, z = DynamicQuantizeLinear(x) h = ConvInteger(q, w_conv, z) f = Cast<to=1>(h)
            r = Mul(f, s) p = ReduceMean<keepdims=0>(r, axes) y = MatMul(p, w_out) }"""),
        w_conv=RNG.integers(0, 9, (2, 2, 3, 3)).astype(np.uint8),
        w_out=RNG.normal(size=(2, 2)).astype("f"),
        axes=np.array([2, 3]),
    )
    with pytest.warns(UserWarning, match=r"no adapter: 'w_conv': ConvInteger"):
        add_lora(integer, "w_*", rank=1)


# -- PyTorch -------------------------------------------------------------------------------------


def torch_networks(torch):
    """Return a network, and the same one with LoRA written by hand."""
    nn = torch.nn

    class LoRA(nn.Module):
        def __init__(self, base, rank, scaling):
            super().__init__()
            self.base, self.scaling = base.requires_grad_(False), scaling
            if isinstance(base, nn.Conv1d):
                self.A = nn.Parameter(torch.zeros(rank, base.in_channels, *base.kernel_size))
                self.B = nn.Parameter(torch.zeros(base.out_channels, rank, 1))
            else:
                embeds = isinstance(base, nn.Embedding)
                size = base.num_embeddings if embeds else base.in_features
                out = base.embedding_dim if embeds else base.out_features
                self.A = nn.Parameter(torch.zeros(size, rank))
                self.B = nn.Parameter(torch.zeros(rank, out))

        def forward(self, x):
            base = self.base
            if isinstance(base, nn.Conv1d):
                narrow = nn.functional.conv1d(x, self.A, stride=base.stride, padding=base.padding)
                return base(x) + self.scaling * nn.functional.conv1d(narrow, self.B)
            narrow = self.A[x] if isinstance(base, nn.Embedding) else x @ self.A
            return base(x) + self.scaling * (narrow @ self.B)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.conv = nn.Conv1d(6, 6, 3, padding=1)
            self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
            self.last = nn.Linear(6, 3)

        def forward(self, x):
            h = self.conv(self.embed(x).transpose(1, 2)).transpose(1, 2)
            for layer in self.layers:
                h = torch.tanh(layer(h))
            return self.last(h.mean(1))

    torch.manual_seed(0)
    return Net().eval(), LoRA


MODULES = ["embed", "conv", "layers.0", "layers.1", "last"]


@pytest.fixture(scope="module", params=["torchscript", "dynamo"])
def exported(request):
    torch = pytest.importorskip("torch")
    net, _ = torch_networks(torch)
    x = torch.zeros(2, 5, dtype=torch.int64)
    if request.param == "dynamo":
        pytest.importorskip("onnxscript")
        program = torch.onnx.export(
            net, (x,), dynamo=True, dynamic_shapes=({0: "N"},), verbose=False
        )
        return program.model_proto
    buffer = io.BytesIO()
    torch.onnx.export(
        net, (x,), buffer, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "N"}}
    )
    return onnx.load_from_string(buffer.getvalue())


def test_training_equals_pytorch(exported):
    torch = pytest.importorskip("torch")
    net, LoRA = torch_networks(torch)
    adapted = shaken(add_lora(exported, "*", rank=2, alpha=3))
    assert fine_tuned(adapted)[-2:] == ["layers.1.lora_A.weight", "layers.1.lora_B.weight"]
    values, parameters = arrays(adapted), {}
    for path in MODULES:
        adapter = LoRA(net.get_submodule(path), 2, 3 / 2)
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
        adapted, "cross_entropy", train=fine_tuned(adapted), optimizer="adam", learning_rate=0.01
    )
    gradients, _ = trainer.step_models(X, y)
    feeds = {x.name: values.get(x.name) for x in gradients.graph.input}
    feeds |= {exported.graph.input[0].name: X, "label": y}
    names = [o.name for o in gradients.graph.output]
    computed = dict(zip(names, run(gradients, feeds), strict=True))
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
    merged = merge_lora(trainer.model)
    assert [n.op_type for n in merged.graph.node] == [n.op_type for n in exported.graph.node]
    [y] = run(merged, {exported.graph.input[0].name: X})
    np.testing.assert_allclose(y, trainer.predict(X), atol=1e-5)


def test_modules_of_a_sequential_are_named_as_in_pytorch(tmp_path):
    torch = pytest.importorskip("torch")
    linear, relu = torch.nn.Linear(3, 3), torch.nn.ReLU()
    nested = torch.nn.Sequential(torch.nn.Sequential(linear, relu), torch.nn.Linear(3, 3, False))
    net = torch.nn.ModuleDict({"net": nested})
    net.forward = lambda x: net["net"](x)
    buffer = io.BytesIO()
    torch.onnx.export(net, (torch.ones(2, 4, 3),), buffer, dynamo=False)
    adapted = add_lora(onnx.load_from_string(buffer.getvalue()), "*", rank=1)
    assert fine_tuned(adapted)[::2] == ["net.0.0.lora_A.weight", "net.1.lora_A.weight"]


def test_the_note_is_json_that_other_parts_read():
    adapted = add_lora(NETWORKS["gemm"], "w", rank=2, alpha=4)
    assert [entry.key for entry in adapted.metadata_props] == [ADAPTERS]


@pytest.mark.parametrize("at", [None, "w"])
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "base"])
def test_a_layer_with_an_adapter_is_no_head_to_be_replaced(kind, at):
    model = NETWORKS["gemm"]
    adapted = {
        "lora": lambda: add_lora(model, "w"),
        "dora": lambda: add_lora(model, "w", use_dora=True),
        "ia3": lambda: og.add_ia3(model, "w"),
        "base": lambda: og.adapter_inputs(add_lora(model, "w")),
    }[kind]()
    with pytest.raises(ValueError, match=r"layer with an adapter.*merge them"):
        og.replace_head(adapted, units=5, at=at)
    if kind != "base":
        [y] = og.replace_head(merge_lora(adapted), units=5).graph.output
        assert y.type.tensor_type.shape.dim[1].dim_value == 5
