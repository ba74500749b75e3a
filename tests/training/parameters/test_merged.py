"""Parameters of a fresh network, which exporters store once, are told apart; tied ones are not."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import onnx
import pytest

import onnxgrad as og
from tests.support.adapter_cases import constant_arrays
from tests.support.errors import naming
from tests.support.exports import export_module
from tests.support.models import parse_model
from tests.support.optimized_models import optimized_model
from tests.support.running import in_sweep, run

RNG = np.random.default_rng(0)


def checked_opset_20_model(text: str) -> onnx.ModelProto:
    model = parse_model(text, opset=20)
    onnx.checker.check_model(model, full_check=True)
    return model


def names_of_separated(model: onnx.ModelProto) -> list[str]:
    """Return the names of the new tensors; the model computes the same, and is separated once."""
    new = og.graph.separate_merged(model)
    onnx.checker.check_model(new, full_check=True)
    assert og.graph.separate_merged(new) is new
    x = RNG.normal(size=(3, 2)).astype("f")
    np.testing.assert_array_equal(run(new, x=x)[0], run(model, x=x)[0])
    before = {t.name for t in model.graph.initializer}
    return [t.name for t in new.graph.initializer if t.name not in before]


ONES = "float[2] one = {1, 1}, float[2] zero = {0, 0}"
TWO = "float[2,2] v = {1, 2, 3, 4}, float[2,2] w = {1, 2, 3, 5}"
CASES = {
    # two normalizations, of which the file names nothing
    f"""<{ONES}, {TWO}> {{ a = LayerNormalization(x, one, zero) b = MatMul(a, v)
    c = LayerNormalization(b, one, zero) y = MatMul(c, w) }}""": ["c.weight", "c.bias"],
    # an Identity names the second
    f"""<{ONES}> {{ s = Identity(one) a = LayerNormalization(x, one)
    y = LayerNormalization(a, s) }}""": ["s"],
    # biases of products, in both forms
    f"""<{ONES}, {TWO}> {{ a = Gemm(x, v, zero) b = Relu(a) c = MatMul(b, w) y = Add(c, zero) }}
    """: ["y.bias"],
    # a layer that is applied twice has one bias, and one normalization in front of it
    f"""<{ONES}, {TWO}> {{ a = LayerNormalization(x, one, zero) b = Gemm(a, v, zero)
    c = LayerNormalization(b, one, zero) y = Gemm(c, v, zero) }}""": ["b.bias"],
    # so does one whose weight is transposed in the graph
    f"""<{ONES}, {TWO}> {{ t = Transpose(v) a = MatMul(x, t) b = Add(a, zero) s = Transpose(v)
    c = MatMul(b, s) y = Add(c, zero) }}""": [],
    # an exporter that stores equal tensors twice merges none: a normalization is applied twice
    f"""<{ONES}, {TWO}, float[2] other = {{1, 1}}> {{ a = LayerNormalization(x, one)
    b = MatMul(a, v) c = LayerNormalization(b, one) d = MatMul(c, w)
    y = LayerNormalization(d, other) }}""": [],
    # a scale that is not fresh is shared
    """<float[2] s = {1, 2}> { a = LayerNormalization(x, s) y = LayerNormalization(a, s) }""": [],
    # a bound is no bias
    f"""<{ONES}> {{ a = LayerNormalization(x, one, zero) y = Max(a, zero) }}""": ["zero.constant"],
    # formulas may share numbers
    """<float half = {0.5}> { a = Mul(x, half) b = Relu(a) y = Mul(b, half) }""": [],
    # in a branch, too
    f"""<{ONES}, {TWO}> {{ m = ReduceSum<keepdims=0>(x) t = Cast<to=9>(m)
    a = LayerNormalization(x, one) y = If (t) <
    then_branch = f () => (float[N,2] p) {{ b = MatMul(a, v) p = LayerNormalization(b, one) }},
    else_branch = g () => (float[N,2] q) {{ c = MatMul(a, w) q = LayerNormalization(c, one) }}> }}
    """: ["p.weight", "q.weight"],
}


@pytest.mark.parametrize("body", CASES)
def test_roles_tell_fresh_parameters_apart(body):
    model = checked_opset_20_model(f"m (float[N,2] x) => (float[N,2] y) {body}")
    assert names_of_separated(model) == CASES[body]


def test_operands_of_calls_are_told_apart():
    model = checked_opset_20_model(
        f"""m (float[N,2] x) => (float[N,2] y)
        <{ONES}, {TWO}> {{ a = local.norm(x, one) b = MatMul(a, v) y = local.norm(b, one) }}
        <domain: "local", opset_import: ["": 20]> norm (x, s) => (z) {{
        z = LayerNormalization(x, s) }}"""
    )
    assert names_of_separated(model) == ["y.weight"]
    trainer = og.Trainer(model, "mse", optimizer="sgd", learning_rate=0.1)
    X = RNG.normal(size=(4, 2)).astype("f")
    trained = constant_arrays(trainer.fit(X, X, batch_size=4).model)
    assert not np.array_equal(trained["one"], trained["y.weight"])


def test_what_does_not_train_stays_merged():
    model = checked_opset_20_model(
        f"m (float[N,2] x) => (float[N,2] y) <{ONES}, {TWO}> {{ a = LayerNormalization(x, one) "
        "b = MatMul(a, v) c = LayerNormalization(b, one) y = MatMul(c, w) }"
    )
    X = RNG.normal(size=(4, 2)).astype("f")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frozen = og.Trainer(model, "mse", train="w").fit(X, X)
        adapted = og.add_lora(model, "v", rank=1)
    assert [t.name for t in frozen.model.graph.initializer] == ["one", "zero", "v", "w"]
    assert og.merge_lora(adapted) == model
    with pytest.warns(UserWarning, match=naming("'c.weight'", "stored", "separate_merged")):
        og.Trainer(model, "mse")
    with pytest.warns(UserWarning, match=naming("'c.weight'", "as one", "separate_merged")):
        og.compat.OrtGradientForwardBackward(model)
    with pytest.warns(UserWarning, match=naming("'c.weight'", "separate_merged")):
        second = og.Trainer(model, "mse", train="c.weight").fit(X, X)
    stored = constant_arrays(second.model)
    assert (stored["one"] == 1).all()
    assert (stored["c.weight"] != 1).all()
    assert [t.name for t in og.trainable(model)] == ["one", "zero", "v", "w", "c.weight"]


# -- networks of PyTorch -----------------------------------------------------------------------


def fresh_network():
    torch = pytest.importorskip("torch")
    from torch import nn

    class Network(nn.Module):
        """A layer that is applied twice, equal copies of one, a tied embedding, fresh norms."""

        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
            self.out.weight = self.table.weight
            self.norm, self.norm_2, self.shared = (nn.LayerNorm(6) for _ in range(3))
            self.twice, self.first = nn.Linear(6, 6), nn.Linear(6, 6)
            nn.init.constant_(self.twice.bias, 0.1)  # the newer exporter drops biases of zeros
            nn.init.constant_(self.first.bias, 0.1)
            self.second = copy.deepcopy(self.first)
            self.shared.weight = self.norm.weight

        def forward(self, x):
            h = self.table(x).mean(1) * 3
            for _ in range(2):
                h = torch.tanh(self.twice(self.norm(h)))
            h = torch.relu(self.first(self.norm_2(h)))
            return self.out(self.second(self.shared(h)))

    torch.manual_seed(0)
    return Network()


def export_fresh(net, dynamo: bool) -> onnx.ModelProto:
    import torch

    examples = (torch.zeros((4, 3), dtype=torch.int64),)
    if dynamo:
        return export_module(
            net, examples, dynamo=True, dynamic_shapes=({0: torch.export.Dim("N")},)
        )
    return export_module(net, examples, input_names=["x"], dynamic_axes={"x": {0: "N"}})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("dynamo", [False, in_sweep(True)])
def test_a_fresh_network_trains_as_in_pytorch(dynamo, optimized):
    net = fresh_network()
    import torch

    if optimized and not dynamo:  # such a file does not tell equal copies from what is shared
        net.shared.weight = copy.deepcopy(net.norm.weight)
        torch.nn.init.normal_(net.second.weight)
    model = optimized_model(export_fresh(net, dynamo), "basic" if optimized else "plain")
    names = [t.alias or t.name for t in og.trainable(model).trained]
    x, y = torch.randint(0, 7, (20, 3)), torch.randint(0, 7, (20,))
    # the exporters store the tied embedding twice: compare without training it
    tied = [t.name for t in og.trainable(model) if min(t.shape, default=0) > 1 and 7 in t.shape]
    trainer = og.Trainer(model, "cross_entropy", optimizer="sgd", learning_rate=0.01, freeze=tied)
    trainer.fit(x.numpy(), y.numpy(), epochs=4, batch_size=5, shuffle=False)
    net.table.weight.requires_grad = False
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.01)
    for i in [*range(0, 20, 5)] * 4:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x[i : i + 5]), y[i : i + 5])
        loss.backward()
        optimizer.step()
    np.testing.assert_allclose(trainer.predict(x.numpy()), net(x).detach(), rtol=1e-4, atol=1e-5)
    assert len(trainer.trained) == len([p for p in net.parameters() if p.requires_grad])
    assert len(names) == len(trainer.trained) + len(tied)


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_and_saved_files_of_separated_models(tmp_path):
    model = export_fresh(fresh_network(), dynamo=False)
    x, y = RNG.integers(0, 7, (20, 3)), RNG.integers(0, 7, 20)

    def trainer(callbacks=()):
        options = {"train": ["*norm*", "*bias"], "freeze": "norm.bias", "callbacks": callbacks}
        return og.Trainer(model, "cross_entropy", **options)

    whole = trainer().fit(x, y, epochs=3, batch_size=5)
    trainer([og.Checkpoint(tmp_path / "run")]).fit(x, y, epochs=2, batch_size=5)
    again = trainer([og.Checkpoint(tmp_path / "run")])
    again.fit(x, y, epochs=3, batch_size=5, resume=tmp_path / "run")
    whole.save(tmp_path / "trained.onnx")
    stored = constant_arrays(onnx.load(tmp_path / "trained.onnx"))
    assert set(again.trained) <= stored.keys()
    for name in again.trained:
        np.testing.assert_array_equal(again.state.weights[name], stored[name])
    assert (stored["norm.bias"] == 0).all()
    assert (stored["norm_2.bias"] != 0).all()
    og.artifacts.generate_artifacts(
        model, None, None, "CrossEntropyLoss", "AdamW", tmp_path / "files"
    )
    merged = constant_arrays(og.artifacts.merge_artifacts(tmp_path / "files"))
    assert merged.keys() >= set(og.Trainer(model, "cross_entropy").trained)
    stack = og.TrainerStack(model, "cross_entropy", learning_rate=[1e-3, 1e-2])
    stack.fit(x, y, batch_size=5)
    assert "norm_2.weight" in {t.name for t in stack.model(1).graph.initializer}
