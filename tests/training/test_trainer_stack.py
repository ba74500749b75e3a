"""`TrainerStack`: every member gets the result of a `Trainer` of its own."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import onnxgrad as og
from tests.support.errors import naming
from tests.support.exports import export_module
from tests.support.models import initializer_arrays
from tests.support.running import in_sweep
from tests.support.small_models import float32_model, two_column_model
from tests.support.stacks import assert_equal_members, fit_all, stack_and_trainers
from tests.support.trainings import assert_close_arrays, two_layer_model

RATES = [0.001, 0.01, 0.003]
ROWS, CLASSES = 70, 4
MOMENTUM = {"optimizer": "momentum"}


def relu_model(dtype=np.float32, units=5):
    return two_layer_model((6, units, CLASSES), "Relu", dtype, seed=0)


def features_and_classes(dtype=np.float32):
    rng = np.random.default_rng(1)
    return rng.normal(size=(ROWS, 6)).astype(dtype), rng.integers(0, CLASSES, ROWS)


def compare_members(model, X, y, atol, weight=None, **options):
    """Train a stack, and each member by a `Trainer`; assert that all results are equal."""
    options = {"loss": "cross_entropy", "learning_rate": RATES} | options
    stack, trainers = stack_and_trainers(model, **options)
    weighted = {} if weight is None else {"sample_weight": weight[:60]}
    validation = tuple(a[60:] for a in (X, y, weight) if a is not None)
    options = {"validation": validation, "epochs": 2, "batch_size": 16} | weighted
    fit_all(stack, trainers, X[:60], y[:60], **options)
    assert_equal_members(stack, trainers, X, y, atol, rtol=1e-5)


def test_large_weights_have_an_update_of_their_own():
    model = relu_model(np.float64, 5000)
    compare_members(model, *features_and_classes(np.float64), 1e-12, clip_norm=0.1)


def test_sample_weights():
    X, y = features_and_classes(np.float64)
    weight = np.random.default_rng(2).uniform(0, 2, ROWS)
    options = {"optimizer": "adamw", "metrics": ["accuracy"]}
    compare_members(relu_model(np.float64), X, y, 1e-12, weight, **options)


@pytest.mark.parametrize("loss", ["huber", in_sweep("squared_error"), in_sweep("absolute_error")])
def test_losses_of_other_kinds(loss):
    X, _ = features_and_classes(np.float64)
    y = X[:, :1] @ np.ones((1, CLASSES))
    compare_members(relu_model(np.float64), X, y, 1e-12, loss=loss)


class Networks:
    """Networks of PyTorch, by name, with their data."""

    @staticmethod
    def cnn(nn):
        parts = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES)
        return nn.Sequential(*parts, nn.Conv2d(4, 6, 3), nn.ReLU(), *head), (1, 8, 8)

    @staticmethod
    def gru(nn):
        class Recurrent(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.head = nn.GRU(5, 7, batch_first=True), nn.Linear(7, CLASSES)

            def forward(self, x):
                return self.head(self.layer(x)[0][:, -1])

        return Recurrent(), (4, 5)

    @staticmethod
    def transformer(nn):
        class Transformer(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, CLASSES)
                self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

            def forward(self, ids):
                return self.head(self.block(self.table(ids)).mean(1))

        return Transformer(), None


def network_and_rows(name, dtype):
    """Return a network, rows of it and classes."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    network, shape = getattr(Networks, name)(torch.nn)
    rng = np.random.default_rng(3)
    X = rng.integers(0, 20, (ROWS, 6)) if shape is None else rng.normal(size=(ROWS, *shape))
    X = X if shape is None else X.astype(dtype)
    model = export_module(
        network.to(getattr(torch, np.dtype(dtype).name)),
        (torch.tensor(X[:2]),),
        input_names=["x"],
        output_names=["y"],
        dynamic_axes={"x": {0: "N"}, "y": {0: "N"}},
    )
    return model, X, rng.integers(0, CLASSES, ROWS)


@pytest.mark.parametrize(
    ("name", "dtype", "atol"),  # onnxruntime has no Conv and GRU in float64
    [
        ("cnn", np.float32, 1e-6),
        ("gru", np.float32, 1e-6),
        in_sweep("transformer", np.float32, 1e-5),
        in_sweep("transformer", np.float64, 1e-12),
    ],
)
def test_networks(name, dtype, atol):
    # not Adam: the bias of keys has no gradient but rounding errors, which Adam normalizes
    compare_members(*network_and_rows(name, dtype), atol, **MOMENTUM, clip_norm=0.5)


def test_against_pytorch():
    torch = pytest.importorskip("torch")
    X, y = features_and_classes(np.float64)
    stack = og.TrainerStack(
        relu_model(np.float64),
        "cross_entropy",
        optimizer="adamw",
        learning_rate=RATES,
        init="redrawn",
    )
    init = [dict(values.weights) for values in stack.state.values]
    stack.fit(X, y, epochs=5, batch_size=ROWS, shuffle=False)
    for k, rate in enumerate(RATES):
        w0, b0, w1, b1 = (
            torch.tensor(init[k][n], requires_grad=True) for n in ("w0", "b0", "w1", "b1")
        )
        optimizer = torch.optim.AdamW([w0, b0, w1, b1], lr=rate)
        for _ in range(5):
            optimizer.zero_grad()
            scores = torch.relu(torch.tensor(X) @ w0 + b0) @ w1 + b1
            torch.nn.functional.cross_entropy(scores, torch.tensor(y)).backward()
            optimizer.step()
        for name, w in zip(("w0", "b0", "w1", "b1"), (w0, b0, w1, b1), strict=True):
            ours = stack.state.weights[name][k]
            np.testing.assert_allclose(ours, w.detach().numpy(), rtol=0, atol=1e-12)


# -- members that become NaN --------------------------------------------------------------------


def test_a_member_with_nan_keeps_its_last_finite_state():
    X, y = features_and_classes(np.float64)
    labels = np.eye(CLASSES)[y]
    rates, quiet = [0.01, 1e60, 0.02], {"epochs": 4, "batch_size": 16}
    stack = og.TrainerStack(
        relu_model(np.float64), "squared_error", optimizer="momentum", learning_rate=rates
    )
    with pytest.warns(og.ConvergenceWarning, match="member 1 after step 2"):
        stack.fit(X, labels, **quiet)
    assert stack.state.frozen == {1: 2}
    assert np.isnan(stack.history[0]["loss"]).tolist() == [False, True, False]
    for k in (0, 2):
        own = og.Trainer(
            relu_model(np.float64), "squared_error", optimizer="momentum", learning_rate=rates[k]
        )
        own.fit(X, labels, **quiet)
        assert_close_arrays(stack.state.values[k].weights, own.state.weights, atol=1e-12)
        assert stack.state.values[k].steps == own.state.step == 20
    order = np.random.default_rng([0, 0]).permutation(ROWS)[:32]  # the two steps that it made
    own = og.Trainer(
        relu_model(np.float64), "squared_error", optimizer="momentum", learning_rate=1e60
    )
    own.fit(X[order], labels[order], shuffle=False, batch_size=16)
    assert stack.state.values[1].steps == 2
    assert_close_arrays(stack.state.values[1].weights, own.state.weights, rtol=1e-9)
    for name, slots in own.state.slots.items():
        assert_close_arrays(stack.state.values[1].slots[name], slots, rtol=1e-9)


def test_a_training_does_not_warn_of_the_one_before():
    X, y = features_and_classes()
    labels = np.eye(CLASSES, dtype=np.float32)[y]
    stack = og.TrainerStack(
        relu_model(), "squared_error", optimizer="sgd", learning_rate=[0.01, 1e30]
    )
    begun = stack.state.weights
    with pytest.warns(og.ConvergenceWarning, match="member 1"):
        stack.fit(X, labels)
    stack.state.weights, stack.learning_rates[1] = begun, og.schedules.constant(0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stack.fit(X, labels)
    assert not stack.state.frozen


def test_members_that_are_all_nan_end_the_training():
    X, y = features_and_classes()
    labels = np.eye(CLASSES, dtype=np.float32)[y]
    stack = og.TrainerStack(
        relu_model(), "squared_error", optimizer="sgd", learning_rate=[1e30, 1e31]
    )
    with pytest.raises(og.ConvergenceError, match="all members"):
        stack.fit(X, labels, epochs=4)
    assert stack.state.frozen.keys() == {0, 1}
    assert all(np.isfinite(w).all() for w in stack.state.weights.values())


def test_the_best_member_has_a_finite_validation_loss():
    X, _ = features_and_classes()
    stack = og.TrainerStack(
        two_column_model(), "squared_error", optimizer="sgd", learning_rate=[1e30, 0.05]
    )
    target = X[:, :1] + 1
    with pytest.raises(og.NotFittedError, match=naming("validation=", "call fit")):
        stack.best()
    with pytest.warns(og.ConvergenceWarning, match="member 0"):
        stack.fit(X[:, :2], target, validation=0.2, epochs=3)
    assert stack.best() == 1


# -- how members begin, and what is refused -------------------------------------------------------


def test_where_members_begin():
    own = initializer_arrays(relu_model())
    stack = og.TrainerStack(relu_model(), "cross_entropy", members=200, init="redrawn")
    weights = stack.state.weights
    assert weights["w0"].shape == (200, 6, 5)
    np.testing.assert_allclose(weights["w0"].std(), own["w0"].std(), rtol=0.05)
    np.testing.assert_array_equal(weights["b0"], np.broadcast_to(own["b0"], (200, 5)))
    fewer = og.TrainerStack(relu_model(), "cross_entropy", members=2, init="redrawn")
    np.testing.assert_array_equal(fewer.state.weights["w0"], weights["w0"][:2])
    other = og.TrainerStack(relu_model(), "cross_entropy", members=2, init="redrawn", seed=1)
    assert not np.array_equal(other.state.weights["w0"], fewer.state.weights["w0"])
    given = og.TrainerStack(relu_model(), "cross_entropy", weights=[{}, {"b0": np.ones(5)}])
    np.testing.assert_array_equal(given.state.weights["b0"], [own["b0"], np.ones(5)])
    same = og.TrainerStack(relu_model(), "cross_entropy", learning_rate=RATES)
    np.testing.assert_array_equal(same.state.weights["w0"], np.stack([own["w0"]] * 3))


def test_a_second_fit_goes_on_with_the_weights():
    X, y = features_and_classes(np.float64)
    stack = og.TrainerStack(
        relu_model(np.float64), "cross_entropy", optimizer="sgd", learning_rate=RATES
    )
    stack.fit(X, y, epochs=2).fit(X, y, epochs=2)
    own = og.Trainer(
        relu_model(np.float64), "cross_entropy", optimizer="sgd", learning_rate=RATES[1]
    )
    own.fit(X, y, epochs=2).fit(X, y, epochs=2)
    np.testing.assert_allclose(stack.state.weights["w0"][1], own.state.weights["w0"], atol=1e-12)
    assert len(stack.history) == 2


@pytest.mark.parametrize(("options", "named"), [
    ({}, "members="),
    ({"members": 2}, "equal.*weights="),
    ({"members": 2, "learning_rate": [0.1, 0.1]}, "equal.*learning_rate"),
    ({"members": 2, "learning_rate": RATES}, "learning_rate .*3 .*2 "),
    ({"learning_rate": RATES, "optimizer": ["sgd", "adam"]}, "optimizer .*2 "),
    ({"members": 2, "init": "other"}, "init"),
    ({"weights": [{"w9": 1}]}, "w9"),
    ({"weights": [{}, {"b0": np.ones(4)}]}, r"weights\[1\].*'b0'.*\(4,\).*\(5,\)"),
    ({"weights": [{}, {"b0": np.ones(5)}], "init": "redrawn"}, "weights= and init=.*pass one"),
])  # fmt: skip
def test_arguments_that_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        og.TrainerStack(relu_model(), "cross_entropy", **options)


BODIES = {
    "loop": """
        n = Constant <value = int64 {3}> ()
        t = Constant <value = bool {1}> ()
        h = MatMul(x, w0)
        zero = Sub(h, h)
        last, all = Loop (n, t, zero) <body = b (int64 i, bool c, float[N,4] v) =>
            (bool d, float[N,4] u, float[N,4] o)
            { d = Identity(c)  a = Add(h, v)  u = Tanh(a)  o = Mul(u, h) }>
        s = ReduceSum <keepdims = 0> (all, first)
        z = Add(s, last)
        y = MatMul(z, w1)""",
    "scan": """
        r = Unsqueeze(x, second)
        h = MatMul(r, w0)
        p = Concat <axis = 1> (h, h)
        start = MatMul(x, w0)
        last, all = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1],
            body = b (float[N,4] v, float[N,4] e) => (float[N,4] u, float[N,4] o)
            { a = Add(v, e)  u = Tanh(a)  o = Mul(u, e) }> (start, p)
        s = ReduceSum <keepdims = 0> (all, second)
        z = Add(s, last)
        y = MatMul(z, w1)""",
    "if": """
        h = MatMul(x, w0)
        m = ReduceMax <keepdims = 0> (x)
        c = Greater(m, limit)
        z = If (c) <then_branch = t () => (float[N,4] a) { a = Tanh(h) },
            else_branch = e () => (float[N,4] b) { b = Mul(h, h) }>
        y = MatMul(z, w1)""",
}


@pytest.mark.parametrize("body", BODIES)
def test_bodies_that_depend_on_weights(body):
    rng = np.random.default_rng(0)
    model = float32_model(
        f"g (float[N,6] x) => (float[N,{CLASSES}] y) {{ {BODIES[body]} }}",
        w0=rng.normal(0, 0.3, (6, 4)),
        w1=rng.normal(0, 0.5, (4, CLASSES)),
        first=np.array([0]),
        second=np.array([1]),
        limit=np.array(1.0),
    )
    compare_members(model, *features_and_classes(), 1e-6, **MOMENTUM, accumulate=2)


def test_a_condition_that_depends_on_weights_is_refused():
    model = float32_model(
        """g (float[N,2] x) => (float[N,1] y) {
            h = MatMul(x, w)
            m = ReduceMax <keepdims = 0> (h)
            c = Greater(m, zero)
            y = If (c) <then_branch = t () => (float[N,1] a) { a = Tanh(h) },
                else_branch = e () => (float[N,1] b) { b = Mul(h, h) }>
        }""",
        w=np.ones((2, 1)),
        zero=np.array(0.0),
    )
    stack = og.TrainerStack(model, "squared_error", learning_rate=RATES)
    with pytest.raises(ValueError, match=naming("If", "subgraphs", "Trainer")):
        stack.fit(np.ones((4, 2), np.float32), np.ones((4, 1), np.float32))


def test_validation_without_a_label_that_counts_is_no_fault_of_the_members():
    X, y = features_and_classes()
    ignored = X[:10], np.full(10, -100)
    stack = og.TrainerStack(relu_model(), "cross_entropy", learning_rate=RATES)
    with pytest.raises(og.ConvergenceError, match=naming("label", "ignored")) as raised:
        stack.fit(X, y, validation=ignored)
    assert "Lower the learning rate" not in str(raised.value)
    assert not stack.state.frozen
    assert [values.steps for values in stack.state.values] == [3, 3, 3]  # which are kept
    stack.fit(X, y, validation=[(X[:10], y[:10]), ignored])
    assert np.isfinite(stack.history[0]["validation_loss"]).all()
