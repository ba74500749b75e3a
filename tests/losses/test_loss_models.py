"""Losses that other models compute, and distillation, against PyTorch in float64."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrad import Trainer
from onnxgrad.errors import ModelError
from onnxgrad.losses.other_models import LossModel, distillation
from onnxgrad.losses.output_losses import OutputLoss
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import in_sweep
from tests.support.written_losses import WrittenLoss, torch_leaf

torch = pytest.importorskip("torch")
functional = torch.nn.functional

RNG = np.random.default_rng(0)
W = RNG.standard_normal((3, 4))
V = RNG.standard_normal((4, 4))
X = RNG.standard_normal((5, 3))
TARGET = RNG.standard_normal((5, 4))
CLASSES = np.array([0, 3, 1, 1, 2])
ROWS = RNG.random(5) + 0.1


def student_model(n="N", opset=18):
    text = f"""s (double[{n},3] x) => (double[{n},4] y) {{ h = MatMul(x, w) t = Tanh(h)
        y = Identity(h) }}"""
    return parse_model(text, opset=opset, w=W)


def square_loss_model(n="N", opset=18, name="y"):
    """Return a loss model with losses of the rows, and their mean."""
    text = f"""l (double[{n},4] {name}, double[{n},4] target) => (double loss, double[{n}] rows)
        {{ h = MatMul({name}, w) d = Sub(h, target) e = Mul(d, d)
        rows = ReduceSum<keepdims=0>(e, one) loss = ReduceMean<keepdims=0>(rows) }}"""
    return parse_model(text, opset=opset, w=V, one=np.array([1]))


def loss_with_gradient(proto, loss, feed, weighted=False):
    """Return the loss, and its gradient with respect to the weights w, computed."""
    result = WrittenLoss(proto, loss, feed, weighted=weighted, wrt="w")
    assert all(g is None for g in result.written.gradients)
    return result


def squares_of_rows(w, inner=False):
    y = torch.tensor(X) @ w
    y = y.tanh() if inner else y
    return ((y @ torch.tensor(V) - torch.tensor(TARGET)) ** 2).sum(1)


@pytest.mark.parametrize(
    ("n", "other", "output"),
    [
        ("N", "N", "loss"),
        ("N", "batch", "rows"),
        ("5", "5", "e"),
        *(
            in_sweep(n, other, output)
            for n in ("N", "5")
            for other in ("N", "batch", "5")
            for output in ("loss", "rows", "e")
        ),
    ],
)
def test_loss_model(n, other, output):
    w = torch_leaf(W)
    loss = LossModel(square_loss_model(other), output)
    results = loss_with_gradient(student_model(n), loss, {"x": X, "target": TARGET})
    assert [x.name for x in results.written.labels] == ["target"] == list(results.written.infos)
    assert results.written.infos["target"].label == "target"
    results.check(squares_of_rows(w).mean() / (4 if output == "e" else 1), w, rtol=1e-9)


@pytest.mark.parametrize(
    "opsets", [(21, 17), (18, 26), *map(in_sweep, [(18, 18), (18, 21), (22, 20), (26, 18)])]
)
def test_opsets(opsets):
    w = torch_leaf(W)
    loss = LossModel(square_loss_model(opset=opsets[1]), "rows")
    results = loss_with_gradient(student_model(opset=opsets[0]), loss, {"x": X, "target": TARGET})
    results.check(squares_of_rows(w).mean(), w, rtol=1e-9)


def test_operator_newer_than_the_trained_model():
    text = "l (double[N,4] y) => (float[N,4] l) { f = Cast<to=1>(y) l = Gelu(f) }"
    loss = parse_model(text, opset=20)
    loss_with_gradient(student_model(opset=20), LossModel(loss), {"x": X})
    with pytest.raises(ModelError, match=naming("opset 20", "opset 18")):
        loss_with_gradient(student_model(opset=18), LossModel(loss), {"x": X})


@pytest.mark.parametrize("output", ["rows", "e"])
def test_sample_weights(output):
    w = torch_leaf(W)
    results = loss_with_gradient(
        student_model(),
        LossModel(square_loss_model(), output),
        {"x": X, "target": TARGET, "weight": ROWS},
        True,
    )
    rows = torch.tensor(ROWS)
    share = 4 if output == "e" else 1
    results.check((rows * squares_of_rows(w)).sum() / rows.sum() / share, w, rtol=1e-9)


def small_trainer(loss, **options):
    return Trainer(student_model(), loss, optimizer="sgd", learning_rate=0.01, **options)


def data_in_forms(labels):
    """Return five rows in batches of two, in every form."""
    cuts = [slice(0, 2), slice(2, 4), slice(4, 5)]
    pairs = [(X[c], *([{n: a[c] for n, a in labels.items()}] * bool(labels))) for c in cuts]
    dicts = [{"x": X[c]} | {n: a[c] for n, a in labels.items()} for c in cuts]
    given = {"list": pairs, "tuple": tuple(pairs), "dicts": dicts, "iterator": lambda: iter(pairs)}
    return {"arrays": (X, labels) if labels else (X,), **given}


EVERY_FORM = ("arrays", "list", "tuple", "dicts", "iterator")


@pytest.mark.parametrize(
    ("reduction", "accumulate", "forms"),
    [
        ("mean", 1, EVERY_FORM),
        ("sum", 2, ("arrays", "list")),
        *(in_sweep(r, a, EVERY_FORM) for r, a in (("mean", 2), ("sum", 1), ("sum", 2))),
    ],
)
def test_one_number_means_the_same_for_all_data(reduction, accumulate, forms):
    loss, w = LossModel(square_loss_model(), "loss", reduction=reduction), torch_leaf(W)
    optimizer, losses = torch.optim.SGD([w], 0.01), []
    for c in (slice(0, 2), slice(2, 4), slice(4, 5)):
        optimizer.zero_grad()
        rows = squares_of_rows(w)[c]
        number = rows.sum() if accumulate == 2 else rows.mean()  # of micro-batches of one row
        of_batch = rows.mean() if reduction == "mean" else number / len(rows)
        of_batch.backward()
        optimizer.step()
        losses.append(of_batch.item() * len(rows))
    given = data_in_forms({"target": TARGET})
    for name in forms:
        data = given[name]
        made = small_trainer(loss, accumulate=accumulate)
        made.fit(data, batch_size=2, shuffle=False, validation=data)
        np.testing.assert_allclose(made.state.weights["w"], w.detach(), rtol=1e-9, err_msg=name)
        assert made.history[0]["loss"] == pytest.approx(sum(losses) / 5)
        expected = made.evaluate(data, batch_size=2)["loss"]
        assert made.history[0]["validation_loss"] == pytest.approx(expected)
        if reduction == "mean":
            assert expected == pytest.approx(squares_of_rows(w).mean().item())


NO_ROWS = {
    "one number": lambda: LossModel(square_loss_model(), "loss"),
    "a number for each column": lambda: OutputLoss(
        lambda op, y: op.ReduceSum(y * y, [0], keepdims=0), ["y"]
    ),
    "all elements": lambda: OutputLoss(lambda op, y: op.Reshape(y * y, [-1]), ["y"]),
}


@pytest.mark.parametrize("name", NO_ROWS)
def test_a_loss_without_rows_takes_no_sample_weights(name):
    labels = {"target": TARGET} if name == "one number" else {}
    losses, weights = [], []
    for data in data_in_forms(labels).values():
        made = small_trainer(NO_ROWS[name]()).fit(data, batch_size=2, shuffle=False)
        losses.append(made.history[0]["loss"])
        weights.append(made.state.weights["w"])
    assert losses == pytest.approx([losses[0]] * 5)
    np.testing.assert_allclose(weights, [weights[0]] * 5)
    weighted = [{"x": X, **labels, "weight": ROWS}], [(X, labels or None, ROWS)]
    calls = [lambda: small_trainer(NO_ROWS[name]()).fit(X, labels or None, sample_weight=ROWS)]
    calls += [lambda d=d: small_trainer(NO_ROWS[name]()).fit(d) for d in weighted]
    for call in calls:
        with pytest.raises(ValueError, match=r"output=|'weight'"):
            call()


def test_sum_of_rows():
    w = torch_leaf(W)
    text = """l (double[N,4] y) => (double loss) { e = Mul(y, y)
        loss = ReduceSum<keepdims=0>(e) }"""
    results = loss_with_gradient(
        student_model(), LossModel(parse_model(text), reduction="sum"), {"x": X}
    )
    results.check(((torch.tensor(X) @ w) ** 2).sum() / 5, w, rtol=1e-9)


def test_names_that_differ_and_inner_tensors():
    w = torch_leaf(W)
    loss = LossModel(square_loss_model(name="input"), "rows", inputs={"input": "t"})
    assert loss.outputs(student_model()) == ["t"]
    results = loss_with_gradient(student_model(), loss, {"x": X, "target": TARGET})
    results.check(squares_of_rows(w, inner=True).mean(), w, rtol=1e-9)


def test_inputs_of_the_trained_model():
    w = torch_leaf(W)
    text = """l (double[N,4] y, double[N,3] x) => (double[N] rows) { h = Tanh(x)
        s = ReduceSum<keepdims=1>(h, one) d = Mul(y, s) rows = ReduceMean<keepdims=0>(d, one) }"""
    loss = LossModel(parse_model(text, one=np.array([1])))
    results = loss_with_gradient(student_model(), loss, {"x": X})
    assert not results.written.labels
    x = torch.tensor(X)
    results.check((x @ w * x.tanh().sum(1, keepdim=True)).mean(), w, rtol=1e-9)


def test_equal_names_and_symbols_mean_different_things():
    """The loss model has a weight w, a result h, and a symbol M for another length, as has ours."""
    w = torch_leaf(W)
    ours = parse_model(
        """s (double[N,3] x, double[M,4] z) => (double[N,4] y) { h = MatMul(x, w)
        m = ReduceMean<keepdims=1>(z, zero) y = Add(h, m) }""",
        **{"w": W, "zero": np.array([0])},
    )
    theirs = parse_model(
        """l (double[N,4] y, double[M,4] z2) => (double[N] rows) { h = MatMul(y, w)
        m = ReduceMean<keepdims=1>(z2, zero) d = Sub(h, m) e = Mul(d, d)
        rows = ReduceMean<keepdims=0>(e, one) }""",
        **{"w": V, "zero": np.array([0]), "one": np.array([1])},
    )
    z, z2 = RNG.standard_normal((7, 4)), RNG.standard_normal((2, 4))
    results = loss_with_gradient(ours, LossModel(theirs), {"x": X, "z": z, "z2": z2})
    [label] = results.written.labels
    assert label.shape[0].value not in ("N", "M")
    y = torch.tensor(X) @ w + torch.tensor(z).mean(0)
    results.check(((y @ torch.tensor(V) - torch.tensor(z2).mean(0)) ** 2).mean(), w, rtol=1e-9)


def test_subgraphs_and_functions_of_the_loss_model():
    w = torch_leaf(W)
    text = """<ir_version: 9, opset_import: ["": 18, "own": 1]>
        l (double[N,4] y, bool c) => (double[N,4] rows)
        { rows = If (c) <then_branch = t () => (double[N,4] a) { h = own.twice(y) a = Exp(h) },
                         else_branch = e () => (double[N,4] b) { h = Neg(y) b = Identity(h) }> }
        <domain: "own", opset_import: ["": 18]> twice (v) => (r) { r = Add(v, v) }"""
    loss = LossModel(parse_model(text))
    y = torch.tensor(X) @ w
    results = loss_with_gradient(student_model(), loss, {"x": X, "c": np.array(True)})
    results.check((2 * y).exp().mean(), w, rtol=1e-9)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: LossModel(square_loss_model(), "rows", inputs={"z": "y"}), ["input", "'z'"]),
        (lambda: LossModel(square_loss_model()), ["output="]),
        (lambda: LossModel(square_loss_model(), "nothing"), ["output", "'nothing'"]),
        (lambda: LossModel(square_loss_model(), "rows", reduction="none"), ["reduction"]),
    ],
)
def test_refuses_to_build(make, parts):
    with pytest.raises(ValueError, match=naming(*parts)):
        make()


@pytest.mark.parametrize(
    ("loss", "options", "parts"),
    [
        (lambda: square_loss_model(name="z"), {"output": "rows"}, ["(z, target)", "inputs={"]),
        (square_loss_model, {"output": "rows", "inputs": {"y": "z"}}, ["tensor", "'z'"]),
        (square_loss_model, {"output": "rows", "inputs": {"y": "x"}}, ["(y, target)", "inputs={"]),
        ("l (float[N,4] y) => (float[N,4] l) { l = Exp(y) }", {}, ["'y'", "DOUBLE", "FLOAT"]),
        (
            "l (double[N,5] y) => (double[N,5] l) { l = Exp(y) }",
            {},
            ["('N', 4)", "['N', 5]"],
        ),
    ],
)
def test_refuses_to_write(loss, options, parts):
    model = parse_model(loss) if isinstance(loss, str) else loss()
    with pytest.raises(ValueError, match=naming(*parts)):
        loss_with_gradient(student_model(), LossModel(model, **options), {"x": X})


# -- distillation


def teacher_model(name="x", opset=18):
    text = f"""t (double[batch,3] {name}) => (double[batch,4] logits)
        {{ h = MatMul({name}, w) g = Tanh(h) logits = MatMul(g, v) }}"""
    return parse_model(text, opset=opset, w=-2 * W, v=3 * V)


def teacher_logits():
    return np.tanh(X @ (-2 * W)) @ (3 * V)


def divergence(y, temperature, weights=None):
    q = (torch.tensor(teacher_logits()) / temperature).softmax(1)
    rows = functional.kl_div((y / temperature).log_softmax(1), q, reduction="none").sum(1)
    weights = torch.ones(5) if weights is None else weights
    return temperature**2 * (weights * rows).sum() / weights.sum()


@pytest.mark.parametrize(
    ("kind", "temperature", "alpha"),
    [("model", 4.0, 0.9), ("label", 2.0, 0.5), ("other name", 2.0, 0.5), in_sweep("label", 4, 0.9)],
)
def test_distillation(kind, temperature, alpha):
    w, feed = torch_leaf(W), {"x": X, "label": CLASSES}
    more = {"inputs": {"features": "x"}} if kind == "other name" else {}
    source = {"model": teacher_model(), "label": None, "other name": teacher_model("features")}[
        kind
    ]
    if source is None:
        feed["teacher_logits"] = teacher_logits()
    loss = distillation(source, temperature=temperature, alpha=alpha, **more)
    results = loss_with_gradient(student_model(), loss, feed)
    assert (
        [x.name for x in results.written.labels]
        == [n for n in feed if n != "x"]
        == [*results.written.infos]
    )
    y = torch.tensor(X) @ w
    hard = functional.cross_entropy(y, torch.tensor(CLASSES))
    results.check(alpha * divergence(y, temperature) + (1 - alpha) * hard, w, rtol=1e-9)


def test_distillation_with_sample_weights():
    w, rows = torch_leaf(W), torch.tensor(ROWS)
    feed = {"x": X, "label": CLASSES, "weight": ROWS}
    results = loss_with_gradient(student_model(), distillation(teacher_model()), feed, True)
    y = torch.tensor(X) @ w
    hard = functional.cross_entropy(y, torch.tensor(CLASSES), reduction="none")
    hard = (rows * hard).sum() / rows.sum()
    results.check(0.5 * divergence(y, 2.0, rows) + 0.5 * hard, w, rtol=1e-9)


@pytest.mark.parametrize("weighted", [True, False])
def test_distillation_alone(weighted):
    w = torch_leaf(W)
    loss = distillation(teacher_model(opset=21), alpha=1.0, output="y")
    results = loss_with_gradient(student_model(), loss, {"x": X, "weight": ROWS}, weighted)
    assert not results.written.labels
    rows = torch.tensor(ROWS) if weighted else None
    results.check(divergence(torch.tensor(X) @ w, 2.0, rows), w, rtol=1e-9)


def test_distillation_with_a_hard_loss_of_options():
    w = torch_leaf(W)
    bits = (TARGET > 0) * 1.0
    loss = distillation(teacher_model(), "focal")
    results = loss_with_gradient(student_model(), loss, {"x": X, "label": bits})
    y = torch.tensor(X) @ w
    p_t = torch.where(torch.tensor(bits) > 0, y.sigmoid(), 1 - y.sigmoid())
    hard = (torch.where(torch.tensor(bits) > 0, 0.25, 0.75) * (1 - p_t) ** 2 * -p_t.log()).mean()
    results.check(0.5 * divergence(y, 2.0) + 0.5 * hard, w, rtol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "above 0"),
        ({"alpha": 1.5}, "0 to 1"),
        ({"teacher_output": "z"}, "z"),
        ({"output": "z"}, "z"),
        ({"teacher": "features"}, "inputs={"),
        ({"teacher_output": "h", "axis": 5}, "axis=5"),
        ({"teacher": None, "teacher_output": "h"}, "teacher"),
        ({"teacher": "t (double[N,3] x) => (double[N,3] y) { y = Exp(x) }"}, "shape"),
    ],
)
def test_distillation_refuses(options, message):
    source = options.get("teacher", "x")
    if source is not None:
        source = parse_model(source) if "=>" in source else teacher_model(source)

    def refuse():
        loss = distillation(**options | {"teacher": source})
        loss_with_gradient(student_model(), loss, {"x": X})

    with pytest.raises(ValueError, match=message):
        refuse()


# -- losses of outputs alone


def model_with_embeddings(parts):
    """Return a model of embeddings (N, parts, 2), and each of them as an output."""
    names = [f"e{i}" for i in range(parts)]
    outputs = ", ".join(["double[N,parts,2] y", *(f"double[N,2] {n}" for n in names)])
    body = " ".join(f"{n} = Gather<axis=1>(y, i{i})" for i, n in enumerate(names))
    text = f"m (double[N,4] x) => ({outputs.replace('parts', str(parts))}) {{ h = MatMul(x, w) \
        y = Reshape(h, shape) {body} }}"
    indices = {f"i{i}": np.array(i) for i in range(parts)}
    weights = RNG.standard_normal((4, 2 * parts))
    return parse_model(text, w=weights, shape=np.array([-1, parts, 2]), **indices), weights


@pytest.mark.parametrize(
    ("several", "weighted"),
    [(True, True), (False, False), *map(in_sweep, [True, False], [False, True])],
)
@pytest.mark.parametrize("name", ["triplet_margin", "info_nce", "nt_xent"])
def test_embeddings_without_labels(name, several, weighted):
    parts = 3 if name == "triplet_margin" else 2
    proto, weights = model_with_embeddings(parts)
    w, x = torch_leaf(weights), RNG.standard_normal((5, 4))
    loss = OutputLoss(name, [f"e{i}" for i in range(parts)] if several else ["y"])
    results = loss_with_gradient(proto, loss, {"x": x, "weight": ROWS}, weighted)
    assert not results.written.labels
    e = (torch.tensor(x) @ w).reshape(5, parts, 2).unbind(1)
    rows = torch.tensor(ROWS) if weighted else torch.ones(5)
    if parts == 3:
        losses = functional.triplet_margin_loss(*e, reduction="none")
    elif name == "info_nce":
        a, b = (functional.normalize(v) for v in e)
        scores, own = a @ b.T / 0.1, torch.arange(5)
        losses = sum(
            functional.cross_entropy(s, own, reduction="none") / 2 for s in (scores, scores.T)
        )
    else:
        z = functional.normalize(torch.cat(e))
        scores = (z @ z.T / 0.1).masked_fill(torch.eye(10, dtype=torch.bool), -torch.inf)
        other = torch.arange(10).roll(5)
        losses = functional.cross_entropy(scores, other, reduction="none").reshape(2, 5).mean(0)
    results.check((rows * losses).sum() / rows.sum(), w, rtol=1e-9)


def test_a_function_of_outputs():
    w = torch_leaf(W)
    loss = OutputLoss(lambda op, y, t: op.Gather(op.Abs(y) * t, [0, 1, 2, 3], axis=1), ["y", "t"])
    results = loss_with_gradient(student_model(), loss, {"x": X})
    y = torch.tensor(X) @ w
    results.check((y.abs() * y.tanh()).mean(), w, rtol=1e-9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OutputLoss("triplet"), r"Unknown loss.*'triplet'"),
        (lambda: OutputLoss("info_nce", ["y"], margin=1), "margin"),
        (lambda: OutputLoss("info_nce", ["y", "h", "t"]), "takes 2 outputs"),
        (lambda: OutputLoss("info_nce"), r"needs \(N, 2, D\)"),
        (lambda: OutputLoss("info_nce", ["y", "z"]), "Unknown output 'z'"),
        (lambda: OutputLoss(lambda op, y: op.ReduceSum(y, keepdims=0)), "every row"),
    ],
)
def test_outputs_without_labels_refuse(make, message):
    with pytest.raises(ValueError, match=message):
        loss_with_gradient(student_model(), make(), {"x": X})
