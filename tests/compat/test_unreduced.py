"""`unreduced_onnx_loss`: the losses of the rows, against numpy."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgrad.compat import (
    add_loss_output,
    get_train_initializer,
    onnx_rename_names,
    unreduced_onnx_loss,
)
from onnxgrad.losses.info import LossInfo, loss_info
from tests.support.errors import naming
from tests.support.exports import export_module
from tests.support.line_models import DTYPES_OF_KINDS, kind_model
from tests.support.models import add_initializers, parse_model
from tests.support.running import in_sweep, run

RNG = np.random.default_rng(0)
X = RNG.standard_normal((7, 2))
W = RNG.standard_normal((2, 3))
ROWS = RNG.random(7)
F = X @ W
Y = RNG.standard_normal((7, 3))
P = 1 / (1 + np.exp(-F))
SOFT = np.exp(F) / np.exp(F).sum(1, keepdims=True)
CLASSES = np.array([0, 2, 1, 1, 0, 2, 2])


def three_score_model(tail="f = MatMul(x, w)", kind="double", columns=3) -> onnx.ModelProto:
    text = f"g ({kind}[N,2] x) => ({kind}[N,{columns}] f) {{ {tail} }}"
    return kind_model(text, kind, w=W[:, :columns])


# loss, options, label, the loss of every row
LOSSES = [
    ("squared_error", {}, Y, ((F - Y) ** 2).sum(1)),
    ("absolute_error", {}, Y, abs(F - Y).sum(1)),
    ("elastic", {"l1_weight": 2.0}, Y, (2 * abs(F - Y) + 0.5 * (F - Y) ** 2).sum(1)),
    ("huber", {}, Y, np.where(abs(F - Y) < 1, (F - Y) ** 2 / 2, abs(F - Y) - 0.5).sum(1)),
    ("poisson", {}, abs(Y), (np.exp(F) - abs(Y) * F).sum(1)),
    ("hinge", {}, np.sign(Y), np.maximum(0, 1 - np.sign(Y) * F).sum(1)),
    (
        "binary_cross_entropy", {"from_logits": True}, 1.0 * (Y > 0),
        -np.where(Y > 0, np.log(P), np.log(1 - P)).sum(1),
    ),
    ("cross_entropy", {}, CLASSES, -np.log(SOFT[np.arange(7), CLASSES])),
]  # fmt: skip


@pytest.mark.parametrize(
    ("weighted", "reduction"),
    [(False, "sum"), (True, "mean"), in_sweep(False, "mean"), in_sweep(True, "sum")],
)
@pytest.mark.parametrize(("name", "options", "label", "expected"), LOSSES)
def test_every_loss(name, options, label, expected, weighted, reduction):
    penalty = {"w": {"l1": 0.5, "l2": 0.25}}
    weight_name = "weight" if weighted else None
    loss = add_loss_output(
        three_score_model(),
        name,
        reduction=reduction,
        penalty=penalty,
        weight_name=weight_name,
        **options,
    )
    before = loss.SerializeToString()
    made = unreduced_onnx_loss(loss)
    assert loss.SerializeToString() == before
    assert [y.name for y in made.graph.output] == ["score"]
    assert [x.name for x in made.graph.input] == [x.name for x in loss.graph.input]
    if not weighted:  # the input of weights has no shape, as it may be (N,) or (N, 1)
        onnx.checker.check_model(made, full_check=True)
    feed = {"x": X, "label": label, "weight": ROWS}
    [score] = run(made, feed)
    np.testing.assert_allclose(score, (expected * (ROWS if weighted else 1))[:, None], rtol=1e-6)
    total = score.sum() if reduction == "sum" else score.mean()
    total += (0.5 * abs(W) + 0.25 * W**2).sum()
    np.testing.assert_allclose(run(loss, feed)[0], [[total]], rtol=1e-6)


def test_log():
    tail = "l = MatMul(x, w)  f = Softmax(l)"
    loss = add_loss_output(three_score_model(tail, columns=2), "log", weight_name="weight")
    f = np.exp(F[:, :2]) / np.exp(F[:, :2]).sum(1, keepdims=True)
    label = CLASSES[:, None] % 2
    [score] = run(unreduced_onnx_loss(loss, "l"), x=X, label=label, weight=ROWS[:, None])
    expected = -np.log(np.take_along_axis(f, label, 1)) * ROWS[:, None]
    np.testing.assert_allclose(score, expected, rtol=1e-6)


@pytest.mark.parametrize("kind", ["float16", "float"])
def test_dtypes_and_shapes(kind):
    """Losses of shape (N,) stay so."""
    tail = "i = Constant<value = int64[1] {1}>()  p = MatMul(x, w)  f = Squeeze(p, i)"
    model = three_score_model(tail, kind, 1)
    del model.graph.output[0].type.tensor_type.shape.dim[1]
    loss = add_loss_output(model, "l2", weight_name="weight", reduction="mean")
    dtype = DTYPES_OF_KINDS[kind]
    feed = {"x": X, "label": Y[:, 0], "weight": ROWS}
    [score] = run(unreduced_onnx_loss(loss), **{n: a.astype(dtype) for n, a in feed.items()})
    assert score.dtype == dtype
    np.testing.assert_allclose(score, ROWS * (F[:, 0] - Y[:, 0]) ** 2, rtol=2e-2, atol=1e-2)


def test_more_than_two_axes():
    model = parse_model("g (double[N,3,2] x) => (double[N,3,2] f) { f = Exp(x) }")
    x, y = RNG.standard_normal((2, 5, 3, 2))
    [score] = run(unreduced_onnx_loss(add_loss_output(model, "l1")), x=x, label=y)
    np.testing.assert_allclose(score, abs(np.exp(x) - y).sum((1, 2))[:, None])


def test_what_the_result_keeps():
    loss = add_loss_output(three_score_model(), "elastic", penalty={"w": 1}, reduction="mean")
    loss.producer_name = "somebody"
    for given in (loss, onnx_rename_names(loss)):
        made = unreduced_onnx_loss(given, "f")  # also the name of the prediction, which makes way
        assert [y.name for y in made.graph.output] == ["f"]
        assert made.producer_name == "somebody"
        assert loss_info(made) == LossInfo()
        assert list(get_train_initializer(made)) == list(get_train_initializer(given))
        np.testing.assert_allclose(
            run(made, x=X, label=Y)[0][:, 0], (0.5 * abs(F - Y) + 0.5 * (F - Y) ** 2).sum(1)
        )


D = F - Y
OTHERS = [
    ("q = Mul(d, d)  l = ReduceSum<keepdims = 0>(q)", (D**2).sum(1)),
    ("q = Mul(d, d)  l = ReduceMean<keepdims = 0>(q)", (D**2).mean(1)),
    ("q = Abs(d)  s = ReduceSum<keepdims = 0>(q, one)  l = ReduceMean(s)", abs(D).sum(1)),
    ("l = ReduceSumSquare(d)", (D**2).sum(1)),
    ("l = ReduceL1<keepdims = 0>(d)", abs(D).sum(1)),
    ("q = Mul(d, d)  s = ReduceMean(q)  h = Mul(half, s)  l = Sub(half, h)", (D**2).mean(1) / -2),
    ("s = ReduceSumSquare(d)  c = Size(d)  k = Cast<to = 11>(c)  l = Div(s, k)", (D**2).sum(1)),
    (
        "s = ReduceSumSquare(d)  r = ReduceSumSquare(w)  h = Div(s, half)  n = Neg(h)"
        "  l = Sum(half, n, r)",
        -2 * (D**2).sum(1),
    ),
    ("l = local.loss(d)", abs(D).sum(1)),
]


def model_of_others(text: str, inputs: str = "double[N,3] t") -> onnx.ModelProto:
    text = f"""g (double[N,2] x, {inputs}) => (double[N,3] f, double l)
        <int64[1] zero = {{0}}, int64[1] one = {{1}}, double half = {{0.5}}>
        {{ f = MatMul(x, w)  d = Sub(f, t)  {text} }}
        <domain: "local", opset_import: ["": 18]> loss (v) => (s) {{
        a = Abs(v)  s = ReduceSum(a) }}"""
    return parse_model(text, w=W)


@pytest.mark.parametrize(("text", "expected"), OTHERS)
def test_graphs_of_others(text, expected):
    [score] = run(unreduced_onnx_loss(model_of_others(text)), x=X, t=Y)
    np.testing.assert_allclose(score.ravel(), expected)
    assert score.shape in ((7,), (7, 1))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_loss_operator(reduction):
    text = f'l = SoftmaxCrossEntropyLoss<reduction = "{reduction}">(f, c)'
    loss = model_of_others(text, "double[N,3] t, int64[N] c")
    [score] = run(unreduced_onnx_loss(loss), x=X, t=Y, c=CLASSES)
    np.testing.assert_allclose(score, -np.log(SOFT[np.arange(7), CLASSES]))


def test_a_weight_that_became_an_input():
    """The penalty on it does not depend on the label."""
    loss = add_loss_output(three_score_model(), "l1", penalty={"w": 1})
    weight = onnx.helper.make_tensor_value_info("w", onnx.TensorProto.DOUBLE, [2, 3])
    loss.graph.initializer.remove(next(t for t in loss.graph.initializer if t.name == "w"))
    loss.graph.input.append(weight)
    [score] = run(unreduced_onnx_loss(loss), x=X, label=Y, w=W)
    np.testing.assert_allclose(score[:, 0], abs(D).sum(1))


def test_constants_of_a_raised_opset_are_no_weights():
    made = parse_model("""<ir_version: 4, opset_import: ["": 9]>
        g (float[N,2] x) => (float l) <float[2] w = {2, 3}> {
            a = Mul(x, w)  f = Clip<min = 0.0, max = 1.0>(a)  l = ReduceMean<keepdims = 0>(f) }""")
    found = unreduced_onnx_loss(made)
    assert list(get_train_initializer(found)) == ["w"]
    x = X.astype(np.float32)
    [score] = run(found, x=x)
    np.testing.assert_allclose(score[:, 0], np.clip(x * [2, 3], 0, 1).mean(1), rtol=1e-6)


def test_old_opsets_and_weights_among_the_inputs():
    made = parse_model("""<ir_version: 3, opset_import: ["": 9]>
        g (double[N,2] x, double[2,3] w) => (double[1,1] l) {
            f = MatMul(x, w)  q = Mul(f, f)  s = ReduceMean(q)
            p = Mul(w, w)  r = ReduceSum(p)  l = Add(s, r) }""")
    add_initializers(made, {"w": W})
    [score] = run(unreduced_onnx_loss(made), x=X, w=W)
    np.testing.assert_allclose(score[:, 0], (F**2).mean(1))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("q = Mul(d, d)  s = ReduceMean(q)  l = Sqrt(s)", "'l'|Sqrt"),
        ("a = ReduceMean(f)  b = ReduceSum(d)  l = Add(a, b)", "Add"),
        ("s = ReduceSum(d)  l = Div(half, s)", "Div"),
        ("s = ReduceSum<keepdims = 0>(d)  l = Mul(s, w)", "Mul"),
        ("l = ReduceSum(d, one)", "('N', 1)"),
        ("l = ReduceSum(d, zero)", "(1, 3)"),
        ("s = ReduceSum<keepdims = 0>(d, zero)  l = ReduceSum(s)", "(3,)"),
        ('l = SoftmaxCrossEntropyLoss<reduction = "none">(f, c)', "'l'|reduce"),
        ("l = Identity(half)", "'half'|first output"),
    ],
)
def test_what_is_no_sum_over_rows(text, parts):
    loss = model_of_others(text, "double[N,3] t, int64[N] c")
    named = [*parts.split("|"), "'f'", "MatMul", "select_model_inputs_outputs"]
    with pytest.raises(ValueError, match=naming(*named)):
        unreduced_onnx_loss(loss)


@pytest.mark.parametrize("name", ["HuberLoss", *map(in_sweep, ["BCEWithLogitsLoss", "MSELoss"])])
def test_torch_losses(name):
    torch = pytest.importorskip("torch")
    x, y = torch.tensor(X, dtype=torch.float32), torch.tensor(Y[:, :1] > 0, dtype=torch.float32)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.loss = torch.nn.Linear(2, 1), getattr(torch.nn, name)()

        def forward(self, x, y):
            return self.loss(self.layer(x), y)

    torch.manual_seed(0)
    model, rows = Model(), torch.export.Dim("N")
    exported = export_module(model, (x, y), dynamo=True, dynamic_shapes=({0: rows}, {0: rows}))
    [score] = run(unreduced_onnx_loss(exported), x=x.numpy(), y=y.numpy())
    model.loss.reduction = "none"
    np.testing.assert_allclose(score, model(x, y).detach(), rtol=1e-5)
