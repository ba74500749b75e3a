"""Models of one row with an If on the row: batches, with the gradients of a loop over rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrad as og
from onnxgrad.autodiff.primal.free_rows import free_rows
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.graph.traversal import all_nodes
from onnxgrad.model.convert import convert_precision, to_proto
from tests.support.models import parse_model
from tests.support.running import run, session_of

torch = pytest.importorskip("torch")

rng = np.random.default_rng(0)
X = rng.normal(size=(24, 3)).astype(np.float32)
X[:, 1] = np.abs(X[:, 1])
X[:4, 1:] = [[-1, -1], [0, -1], [3e38, -1], [0, -0.0]]
LABELS = rng.integers(0, 2, 24)
WEIGHTS = {n: rng.normal(size=(k, 2)).astype(np.float32) for n, k in (("w", 3), ("u", 1), ("v", 1))}

# Of a row x: `first` and `third` are its columns, of shape [1, 1]. The logarithm of column 1, in z,
# is not finite in some rows, whose column 2 is not positive.
FRONT = """f (float[1,3] x) => (float[1,2] y) <float zero = {0}, float half = {0.5},
    int64[1] one = {1}, int64[1] i0 = {0}, int64[1] i2 = {2},
    int64 s0 = {0}, int64 s2 = {2}, int64[1] flat = {-1}> {
        first = Gather<axis = 1>(x, i0)  third = Gather<axis = 1>(x, i2)
        second = Gather<axis = 1>(x, one)  l2 = Log(second)
        z = Concat<axis = 1>(first, l2, third) """


@dataclass
class BranchCase:
    """A model with an If, and the function of one row that PyTorch runs in a loop."""

    text: str
    function: Callable

    @property
    def model(self) -> onnx.ModelProto:
        return parse_model(f"{FRONT} {self.text} }}", **WEIGHTS)


def branches(then: str, other: str, name: str = "y", condition: str = "c") -> str:
    """Return the text of an If with two branches, which return `a` and `b`."""
    return (
        f"{name} = If({condition}) <"
        f"then_branch = t_{name} () => (float[1,2] a_{name}) {{ {then} }},"
        f" else_branch = e_{name} () => (float[1,2] b_{name}) {{ {other} }}>"
    )


ON_THIRD = "c = Greater(third, zero) "
SIMPLE = branches("a_y = MatMul(z, w)", "d = MatMul(first, u)  b_y = Tanh(d)")
SINGULAR = """p = Abs(v)  q = MatMul(third, p)  l = Log(q)  s = Sqrt(q)  r = Reciprocal(q)
    e = Div(l, q)  o = Pow(q, half)  a_y = Sum(l, s, r, e, o)"""
INNER = branches("a_n = MatMul(z, w)", "g = MatMul(third, v)  b_n = Log(g)", "n", "k")


def logs(x):
    return torch.cat([x[:, :1], x[:, 1:2].log(), x[:, 2:]], 1)


def simple(takes):
    return lambda x, w, u, v: logs(x) @ w if takes(x) else torch.tanh(x[:, :1] @ u)


def with_singular_slopes(x, w, u, v):
    if x[0, 2] > 0:
        q = x[:, 2:] @ v.abs()
        return q.log() + q.sqrt() + 1 / q + q.log() / q + q**0.5
    return torch.tanh(x[:, :1] @ u)


def nested(x, w, u, v):
    if x[0, 2] > 0:
        return logs(x) @ w if x[0, 0] > 0 else (x[:, 2:] @ v).abs().log()
    return x[:, :1] @ u


CASES = {
    "one element": BranchCase(ON_THIRD + SIMPLE, simple(lambda x: x[0, 2] > 0)),
    "scalar": BranchCase(
        "m = ReduceMean<keepdims = 0>(third)  c = Greater(m, zero) " + SIMPLE,
        simple(lambda x: x[0, 2].mean() > 0),
    ),
    "item": BranchCase(
        "r = Gather<axis = 0>(x, s0)  s = Gather<axis = 0>(r, s2)  c = Greater(s, zero) " + SIMPLE,
        simple(lambda x: x[0, 2] > 0),
    ),
    "argmax": BranchCase(
        "m = Concat<axis = 1>(first, third)  f = Reshape(m, flat) "
        "j = ArgMax<axis = 0, keepdims = 0>(f)  c = Equal(j, s0) "
        + branches("a_y = MatMul(first, u)", "b_y = MatMul(third, v)"),
        lambda x, w, u, v: x[:, :1] @ u if x[0, [0, 2]].argmax() == 0 else x[:, 2:] @ v,
    ),
    "singular": BranchCase(
        ON_THIRD + branches(SINGULAR, "d = MatMul(first, u)  b_y = Tanh(d)"), with_singular_slopes
    ),
    "nested": BranchCase(
        "k = Greater(first, zero) "
        + ON_THIRD
        + branches(
            INNER.replace("b_n = Log(g)", "h = Abs(g)  b_n = Log(h)") + " a_y = Identity(n)",
            "b_y = MatMul(first, u)",
        ),
        nested,
    ),
    "outer values": BranchCase(
        "o = MatMul(first, u) " + ON_THIRD + branches("a_y = Identity(v)", "b_y = Identity(o)"),
        lambda x, w, u, v: v + 0 * x[0, 2] if x[0, 2] > 0 else x[:, :1] @ u,
    ),
}


def weights_of_row_loop(function, weight=None, epochs=2, size=8, lr=0.1):
    """Return the weights that SGD finds, with a loop over the rows of each batch."""
    own = {n: torch.tensor(w, requires_grad=True) for n, w in WEIGHTS.items()}
    optimizer = torch.optim.SGD(own.values(), lr)
    for _ in range(epochs):
        for start in range(0, len(X), size):
            optimizer.zero_grad()
            rows = range(start, start + size)
            y = torch.cat([function(torch.tensor(X[i : i + 1]), **own) for i in rows])
            labels = torch.tensor(LABELS[start : start + size])
            losses = torch.nn.functional.cross_entropy(y, labels, reduction="none")
            scale = torch.ones(size) if weight is None else torch.tensor(weight[rows])
            ((losses * scale).sum() / scale.sum()).backward()
            optimizer.step()
    return {n: w.detach().numpy() for n, w in own.items()}


def trained_in_batches(model, kind=og.Trainer, epochs=2, size=8, lr=0.1, fit=None, **arguments):
    trainer = kind(model, "cross_entropy", optimizer="sgd", learning_rate=lr, **arguments)
    return trainer.fit(X, LABELS, epochs=epochs, batch_size=size, shuffle=False, **(fit or {}))


@pytest.mark.parametrize("name", CASES)
def test_batches_train_as_a_loop_over_rows(name):
    case = CASES[name]
    freed = free_rows(prepare(case.model), "rows", {})
    assert freed is not None
    assert "If" not in {node.op_type for node in all_nodes(freed.graph)}
    trainer = trained_in_batches(case.model)
    expected = weights_of_row_loop(case.function)
    for n, w in trainer.state.weights.items():
        assert np.isfinite(expected[n]).all()
        np.testing.assert_allclose(w, expected[n], rtol=1e-4, atol=1e-6)
    session = session_of(trainer.model)
    rows = [session.run(None, {"x": x[None]})[0][0] for x in X]
    np.testing.assert_allclose(trainer.predict(X), rows, rtol=1e-4, atol=1e-6)


def test_if_no_row_of_a_batch_takes_a_branch_its_weights_stay():
    case, rows = CASES["singular"], X[:4]
    trainer = og.Trainer(case.model, "cross_entropy", optimizer="sgd", learning_rate=0.1)
    trainer.fit(rows, LABELS[:4], batch_size=4)
    np.testing.assert_array_equal(trainer.state.weights["v"], WEIGHTS["v"])
    assert abs(trainer.state.weights["u"] - WEIGHTS["u"]).max() > 1e-3


def test_sample_weights_validation_and_micro_batches():
    case, weight = CASES["item"], np.linspace(0, 1, 24, dtype=np.float32)
    given = {"sample_weight": weight, "validation": (X[:6], LABELS[:6])}
    trainer = trained_in_batches(case.model, fit=given)
    expected = weights_of_row_loop(case.function, weight)
    for n, w in trainer.state.weights.items():
        np.testing.assert_allclose(w, expected[n], rtol=1e-4, atol=1e-6)
    logits = torch.tensor(trainer.predict(X[:6]))
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(LABELS[:6]))
    assert trainer.history[-1]["validation_loss"] == pytest.approx(loss.item(), rel=1e-5)
    parts = trained_in_batches(case.model, accumulate=2)
    expected = weights_of_row_loop(case.function)
    for n, w in parts.state.weights.items():
        np.testing.assert_allclose(w, expected[n], rtol=1e-4, atol=1e-6)


def test_a_stack_whose_weights_decide():
    """The condition of one row would differ between the members."""

    def function(x, w, u, v):
        takes = (x[:, :1] @ u).sum() > 0 and x[0, 2] > 0
        return logs(x) @ w if takes else torch.tanh(x[:, :1] @ u)

    condition = "q = MatMul(first, u)  m = ReduceSum<keepdims = 0>(q)  s = Greater(m, zero) "
    text = condition + "k = Greater(third, zero)  c = And(s, k) " + SIMPLE
    stack = trained_in_batches(BranchCase(text, function).model, og.TrainerStack, lr=[0.05, 0.1])
    for k, rate in enumerate((0.05, 0.1)):
        expected = weights_of_row_loop(function, lr=rate)
        for n, w in stack.state.weights.items():
            np.testing.assert_allclose(w[k], expected[n], rtol=1e-4, atol=1e-6)


def test_16_bits():
    model = convert_precision(CASES["one element"].model, ir.DataType.FLOAT16)
    rows = np.clip(X, -6e4, 6e4).astype(np.float16)
    trainer = og.Trainer(model, "cross_entropy", optimizer="sgd", learning_rate=0.1)
    trainer.fit(rows, LABELS, epochs=2, batch_size=8, shuffle=False)
    expected = weights_of_row_loop(CASES["one element"].function)
    for n, w in trainer.state.weights.items():
        np.testing.assert_allclose(w, expected[n], rtol=2e-2, atol=2e-2)


CALLED = """<ir_version: 8, opset_import: ["": 18, "local": 1]>
f (float[1,3] x) => (float[1,2] y) <float zero = {0}, int64[1] i0 = {0}, int64[1] i2 = {2}> {
    first = Gather<axis = 1>(x, i0)  third = Gather<axis = 1>(x, i2)
    y = local.choose(first, third, u, v) }
<domain: "local", opset_import: ["": 18]> choose (a, b, p, q) => (y) {
    zero = Constant<value_float = 0.0>()  c = Greater(b, zero)
    y = If(c) <then_branch = t () => (s) { m = MatMul(b, q)  n = Sqrt(b)  s = Mul(m, n) },
               else_branch = e () => (s) { s = MatMul(a, p) }> }"""


def test_a_function_of_the_file():
    model = parse_model(CALLED, u=WEIGHTS["u"], v=WEIGHTS["v"])
    trainer = trained_in_batches(model)

    def function(x, w, u, v):
        return x[:, 2:] @ v * x[:, 2:].sqrt() if x[0, 2] > 0 else x[:, :1] @ u

    expected = weights_of_row_loop(function)
    for n, w in trainer.state.weights.items():
        np.testing.assert_allclose(w, expected[n], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bool", "int64", "int32", "double", "string"])
def test_branches_return_other_dtypes(dtype):
    to = {"bool": 9, "int64": 7, "int32": 6, "double": 11, "string": 8}[dtype]
    text = f"""f (float[1,3] x) => (float[1,3] y) <float zero = {{0}}> {{
        m = ReduceSum<keepdims = 0>(x)  c = Greater(m, zero)  o = Cast<to = {to}>(x)
        q = If(c) <then_branch = t () => ({dtype}[1,3] a) {{ a = Identity(o) }},
            else_branch = e () => ({dtype}[1,3] b) {{ n = Neg(x)  b = Cast<to = {to}>(n) }}>
        y = Cast<to = 1>(q) }}"""
    model = parse_model(text)
    x = rng.normal(scale=3, size=(6, 3)).astype(np.float32)
    freed = free_rows(prepare(model), "rows", {})
    assert (freed is not None) == (dtype != "string")
    if freed is not None:
        session = session_of(model)
        rows = [session.run(None, {"x": row[None]})[0][0] for row in x]
        np.testing.assert_array_equal(run(to_proto(freed), x=x)[0], rows)


def test_an_index_that_only_one_branch_may_use():
    text = """f (float[1,1] x) => (float[1,1,2] y) <float zero = {0}, int64 two = {2}> {
        n = Cast<to = 7>(x)  c = Greater(x, zero)
        y = If(c) <then_branch = t () => (float[1,1,2] a) { k = Sub(n, two)  a = Gather(w, k) },
            else_branch = e () => (float[1,1,2] b) { m = Neg(n)  b = Gather(w, m) }> }"""
    model = parse_model(text, w=np.arange(6, dtype=np.float32).reshape(3, 2))
    freed = free_rows(prepare(model), "rows", {})
    assert freed is not None
    x = np.array([[4], [2], [-2], [0], [-1]], np.float32)
    expected = np.array([[4, 5], [0, 1], [4, 5], [0, 1], [2, 3]], np.float32)
    np.testing.assert_array_equal(run(to_proto(freed), x=x)[0][:, 0], expected)


LOOP = """n = Loop(i2, , first) <body = b (int64 i, bool g, float[1,1] s) => (bool h, float[1,1] t)
    { h = Identity(g)  t = Tanh(s) }>  b_y = MatMul(n, u)"""
REFUSED = {
    "a Loop": branches("a_y = MatMul(z, w)", LOOP.replace("i2", "two")),
    "epsilon": branches(
        "m = MatMul(z, w)  a_y = LayerNormalization<epsilon = 0.0>(m, ones)",
        "b_y = MatMul(first, u)",
    ),
    "infinity": branches("m = MatMul(z, w)  a_y = Max(m, lowest)", "b_y = MatMul(first, u)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_selected_trains_row_by_row(name, caplog):
    ones, lowest = np.ones(2, np.float32), np.array(-np.inf, np.float32)
    text = f"{FRONT} {ON_THIRD} {REFUSED[name]} }}"
    weights = {**WEIGHTS, "ones": ones, "lowest": lowest, "two": np.array(2)}
    model = parse_model(text, **weights)
    with caplog.at_level("INFO", "onnxgrad"):
        assert free_rows(prepare(model), "rows", {}) is None
    assert "in a branch of an If" in caplog.text
    trainer = og.Trainer(model, "cross_entropy", train=["u"])
    assert trainer.fit(X, LABELS, batch_size=8).state.step == 3


def test_costly_branches_stay_with_the_rows_that_take_them(caplog):
    """A convolution of a row takes as long alone as among others; products with weights do not."""
    text = """f (float[1,4,64,64] x) => (float[1,4,64,64] y) <float zero = {0}> {
        m = ReduceMax<keepdims = 0>(x)  c = Greater(m, zero)
        y = If(c) <then_branch = t () => (float[1,4,64,64] a) { a = OPERATOR },
            else_branch = e () => (float[1,4,64,64] b) { b = Neg(x) }> }"""
    layers = {
        "Conv<pads = [5, 5, 5, 5]>(x, w)": np.ones((4, 4, 11, 11), np.float32),
        "MatMul(x, w)": np.ones((64, 64), np.float32),
    }
    for layer, weight in layers.items():
        caplog.clear()
        model = parse_model(text.replace("OPERATOR", layer), w=weight)
        with caplog.at_level("INFO", "onnxgrad"):
            freed = free_rows(prepare(model), "rows", {})
        assert (freed is None) == ("multiply-adds" in caplog.text) == layer.startswith("Conv")


def test_branches_of_different_shapes(caplog):
    text = """f (float[1,3] x) => (float[1,1] y) <float zero = {0}, int64[1] one = {1}> {
        m = ReduceMean<keepdims = 0>(x)  c = Greater(m, zero)
        z = If(c) <then_branch = t () => (float[1,3] a) { a = Neg(x) },
            else_branch = e () => (float[1,2] b) { b = Slice(x, one, three, one) }>
        y = ReduceSum(z, one) }"""
    model = parse_model(text, three=np.array([3]))
    with caplog.at_level("INFO", "onnxgrad"):
        assert free_rows(prepare(model), "rows", {}) is None
    assert "its branches return the shapes (1, 3) and (1, 2)" in caplog.text


def test_a_condition_that_all_rows_share():
    """The If stays, and its branches compute all rows."""
    text = """f (float[1,3] x, int64 rate) => (float[1,2] y) <int64 limit = {16000}> {
        c = Equal(rate, limit)  m = ReduceMax<keepdims = 0>(x)  d = Sub(x, m)
        y = If(c) <then_branch = t () => (float[1,2] a) { a = MatMul(d, w) },
            else_branch = e () => (float[1,2] b) { b = MatMul(d, u) }> }"""
    arrays = {n: rng.normal(size=(3, 2)).astype(np.float32) for n in "wu"}
    model = parse_model(text, **arrays)
    freed = free_rows(prepare(model), "rows", {})
    assert freed is not None
    assert [node.op_type for node in freed.graph].count("If") == 1
    x = rng.normal(size=(5, 3)).astype(np.float32)
    for rate in (16000, 8000):
        feed = {"x": x, "rate": np.array(rate)}
        each = [run(model, {**feed, "x": row[None]})[0][0] for row in x]
        np.testing.assert_allclose(run(to_proto(freed), feed)[0], each, rtol=1e-5)


STREAM = """f (float[1,3] x, float[1,2] state) => (float[1,2] y, float[1,2] next)
    <float zero = {0}> {
    m = ReduceMax<keepdims = 0>(x)  c = Greater(m, zero)  a = MatMul(x, w)
    next = If(c) <then_branch = t () => (float[1,2] p) { s = Add(a, state)  p = Tanh(s) },
        else_branch = e () => (float[1,2] q) { q = MatMul(state, r) }>
    y = Add(next, a) }"""


@pytest.mark.parametrize("streams", [1, 3])
def test_a_carried_state(streams):
    """Each row of a batch is a stream, whose state decides nothing of the other streams."""
    weights = {"w": WEIGHTS["w"], "r": rng.normal(size=(2, 2)).astype(np.float32)}
    model = parse_model(STREAM, **weights)
    rows = rng.normal(size=(12, 3)).astype(np.float32) - 0.5
    data = {"x": rows, "state": np.zeros((12, 2), np.float32)}
    labels = rng.normal(size=(12, 2)).astype(np.float32)
    trainer = og.Trainer(
        model, {"y": "mse"}, optimizer="sgd", learning_rate=0.1, carry={"state": "next"}
    )
    size = {} if streams == 1 else {"batch_size": streams}
    trainer.fit(data, labels, epochs=2, shuffle=False, **size)
    own = {n: torch.tensor(w, requires_grad=True) for n, w in weights.items()}
    optimizer = torch.optim.SGD(own.values(), 0.1)
    for _ in range(2):
        states = [torch.zeros(1, 2)] * streams
        for start in range(0, 12, streams):
            outputs = []
            for k in range(streams):
                x, state = torch.tensor(rows[start + k : start + k + 1]), states[k].detach()
                a = x @ own["w"]
                states[k] = torch.tanh(a + state) if x.max() > 0 else state @ own["r"]
                outputs.append(states[k] + a)
            optimizer.zero_grad()
            wanted = torch.tensor(labels[start : start + streams])
            torch.nn.functional.mse_loss(torch.cat(outputs), wanted).backward()
            optimizer.step()
    for n, w in trainer.state.weights.items():
        np.testing.assert_allclose(w, own[n].detach().numpy(), rtol=1e-4, atol=1e-6)
