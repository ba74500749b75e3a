"""Losses: value and gradient against PyTorch or their formulas."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgrad import DerivativeOptions, add_loss_output, onnx_derivative
from onnxgrad.graph import get_train_initializer
from onnxgrad.losses.info import METADATA, LossInfo, loss_info
from tests.support.errors import naming
from tests.support.models import add_initializers, parse_model
from tests.support.running import in_sweep
from tests.support.written_losses import run_cast

KINDS = {"float": np.float32, "double": np.float64, "float16": np.float16}
RNG = np.random.default_rng(0)
F, Y = RNG.standard_normal((2, 7, 3))
ROWS = RNG.random(7)
PROBABILITIES = 1 / (1 + np.exp(-F))
SOFTMAX = np.exp(F) / np.exp(F).sum(1, keepdims=True)
CLASSES = np.array([0, 2, 1, 1, 0, 2, 2])
BINARY = (Y > 0) * 1.0


def identity_model(shape: tuple, kind: str = "float", opset: int = 18) -> onnx.ModelProto:
    """Return a model whose output f is its input."""
    dims = ", ".join(["N", *map(str, shape[1:])])
    text = f"g ({kind}[{dims}] x) => ({kind}[{dims}] f) {{ f = Identity(x) }}"
    return parse_model(text, opset=opset, ir_version=8)


def loss_gradient(model: onnx.ModelProto, labels=("label",)) -> onnx.ModelProto:
    """Return the model of the loss, which is the first output, and its gradient by x."""
    loss, options = model.graph.output[0].name, DerivativeOptions.Loss
    return onnx_derivative(model, [], ["x"], options, loss=loss, label=list(labels))


def evaluate(model: onnx.ModelProto, feed: dict) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss and its gradient by x."""
    loss, gradient = run_cast(loss_gradient(model), feed)
    assert loss.shape == (1, 1)
    return loss, gradient


def torch_formula(name, **options):
    """Return a function of torch.nn.functional, of every element or row."""

    def formula(f, y):
        torch = pytest.importorskip("torch")
        return getattr(torch.nn.functional, name)(f, y, reduction="none", **options)

    return formula


# name, options, prediction, label, the loss of every element or row with torch
MISSING = CLASSES - 101 * (CLASSES == 1)
LOGITS = torch_formula("binary_cross_entropy_with_logits")
CASES = {
    "squared_error": ({}, F, Y, lambda f, y: (f - y) ** 2),
    "l2": ({}, F, Y, lambda f, y: (f - y) ** 2),
    "absolute_error": ({}, F, Y, lambda f, y: (f - y).abs()),
    "l1": ({}, F, Y, lambda f, y: (f - y).abs()),
    "elastic": ({}, F, Y, lambda f, y: 0.5 * (f - y).abs() + 0.5 * (f - y) ** 2),
    "elastic weighted": (
        {"l1_weight": 0.1, "l2_weight": 2.0},
        F,
        Y,
        lambda f, y: 0.1 * (f - y).abs() + 2 * (f - y) ** 2,
    ),
    "huber": ({}, F, Y, torch_formula("huber_loss")),
    "huber delta": ({"delta": 0.3}, F, Y, torch_formula("huber_loss", delta=0.3)),
    "poisson": ({}, F, abs(Y), torch_formula("poisson_nll_loss")),
    "poisson rates": (
        {"log_input": False},
        PROBABILITIES,
        abs(Y),
        torch_formula("poisson_nll_loss", log_input=False),
    ),
    "hinge": ({}, F, 2 * BINARY - 1, lambda f, y: (1 - y * f).clamp(min=0)),
    "hinge 0 1": ({}, F, BINARY, lambda f, y: (1 - (2 * y - 1) * f).clamp(min=0)),
    "binary_cross_entropy": ({}, PROBABILITIES, BINARY, torch_formula("binary_cross_entropy")),
    "binary_cross_entropy logits": ({"from_logits": True}, 30 * F, BINARY, LOGITS),
    "binary_cross_entropy vector": ({"from_logits": True}, F[:, 0], BINARY[:, 0], LOGITS),
    "cross_entropy": ({}, 5 * F, CLASSES, torch_formula("cross_entropy")),
    "cross_entropy probabilities": (
        {"from_logits": False},
        SOFTMAX,
        CLASSES,
        lambda f, y: torch_formula("nll_loss")(f.log(), y),
    ),
    **{
        f"cross_entropy {name}": (options, F, y, torch_formula("cross_entropy", **options))
        for name, options, y in (
            ("smoothed", {"label_smoothing": 0.2}, CLASSES),
            ("ignoring", {"ignore_index": 2}, CLASSES),
            ("ignoring, smoothed", {"ignore_index": 2, "label_smoothing": 0.2}, CLASSES),
            ("without label", {}, MISSING),
            ("without label, smoothed", {"label_smoothing": 0.2}, MISSING),
        )
    },
    "cross_entropy soft": ({"soft_labels": True}, F, SOFTMAX, torch_formula("cross_entropy")),
    "cross_entropy soft, smoothed": (
        {"soft_labels": True, "label_smoothing": 0.1},
        F,
        SOFTMAX,
        torch_formula("cross_entropy", label_smoothing=0.1),
    ),
    "cross_entropy images": (
        {},
        RNG.standard_normal((7, 3, 2, 2)),
        RNG.integers(0, 3, (7, 2, 2)),
        torch_formula("cross_entropy"),
    ),
}
FORMS = {  # type, opset, reduction, whether there are weights, tolerance
    "double": ("double", 18, "mean", True, 1e-9),
    "float": ("float", 21, "sum", False, 2e-5),
    "float16": ("float16", 18, "sum", True, 1e-2),
}
MORE_FORMS = {
    f"{kind}, {reduction}, {weighted}": (kind, 18, reduction, weighted, rtol)
    for kind, rtol in (("double", 1e-9), ("float", 2e-5))
    for reduction in ("sum", "mean")
    for weighted in (False, True)
}


@pytest.mark.parametrize("form", [*FORMS, *map(in_sweep, MORE_FORMS)])
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_as_torch(case, form):
    """In float32, no node of the gradient of a sum asks for a shape when it runs."""
    torch = pytest.importorskip("torch")
    options, f, y, rows = CASES[case]
    kind, opset, reduction, weighted, rtol = (FORMS | MORE_FORMS)[form]
    model = add_loss_output(
        identity_model(f.shape, kind, opset),
        case.split(" ")[0],
        weight_name="weight" if weighted else None,
        reduction=reduction,
        **options,
    )
    assert model.opset_import[0].version == opset
    given = torch.tensor(f, requires_grad=True)
    losses = rows(given, torch.tensor(y))
    factors = torch.tensor(ROWS if weighted else np.ones(7)).reshape([-1] + [1] * (losses.ndim - 1))
    expected = (losses * factors).sum() / (7 if reduction == "mean" else 1)
    expected.backward()
    made = loss_gradient(model, ["label"] + ["weight"] * weighted)
    loss, gradient = run_cast(made, {"x": f, "label": y, "weight": ROWS})
    assert loss.shape == (1, 1)
    assert loss.dtype == gradient.dtype == KINDS[kind]
    np.testing.assert_allclose(loss, [[expected.item()]], rtol=rtol)
    np.testing.assert_allclose(gradient, given.grad.numpy(), rtol=rtol, atol=rtol)
    if (reduction, kind) == ("sum", "float") and case != "poisson rates":
        assert not {n.op_type for n in made.graph.node} & {"Shape", "Size", "Expand", "NonZero"}


@pytest.mark.parametrize("case", ["binary_cross_entropy", "poisson rates"])
def test_half_precision_at_the_ends(case):
    """Where eps itself, or 1 - eps, rounds away."""
    options, name = CASES[case][0], case.split(" ")[0]
    f, y = np.array([[0.0, 0.5, 1.0], [1.0, 0.25, 0.0]]), np.array([[0, 1, 1], [1, 0, 0]])
    model = add_loss_output(identity_model(f.shape, "float16"), name, **options)
    loss, gradient = evaluate(model, {"x": f, "label": y})
    exact = -np.log(0.5 * 0.75) if name == "binary_cross_entropy" else 2.75 - np.log(0.5)
    np.testing.assert_allclose(loss, [[exact]], rtol=2e-3)
    assert np.isfinite(gradient).all()


OLD_OPSETS = {"hinge": (9,), "cross_entropy smoothed": (9, 14)}  # more of them are of the sweep


@pytest.mark.parametrize(
    ("case", "opset"),
    [
        (case, opset) if opset in OLD_OPSETS.get(case, ()) else in_sweep(case, opset)
        for case in CASES
        for opset in (9, 13, 14, 21)
    ],
)
def test_every_opset(case, opset):
    options, f, y, _ = CASES[case]
    made = {}
    for version in (18, opset):
        model = identity_model(f.shape, opset=version)
        model.graph.node.add(op_type="Mul", input=["f", "w"], output=["g"])
        add_initializers(model, {"w": [1.0]})
        model.graph.output[0].name = "g"
        loss = add_loss_output(
            model,
            case.split(" ")[0],
            weight_name="w8",
            reduction="mean",
            penalty={"w": {"l1": 1, "l2": 2}},
            **options,
        )
        assert loss.opset_import[0].version == max(version, 18)
        made[version] = evaluate(loss, {"x": f, "label": y, "w8": ROWS})
    for old, new in zip(*made.values(), strict=True):
        np.testing.assert_allclose(old, new, rtol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_log(weighted):
    """Sum of w l, divided by N: the mean of the negative log likelihood for w = 1."""
    p = SOFTMAX[:, :2] / SOFTMAX[:, :2].sum(1, keepdims=True)
    p[0] = 0, 1  # clipped
    y = np.array([[0], [1], [1], [0], [1], [0], [1]])
    model = add_loss_output(
        identity_model(p.shape, "double"), "log", weight_name="weight", eps=1e-3
    )
    weight = ROWS if weighted else np.ones(7)
    loss, gradient = evaluate(model, {"x": p, "label": y, "weight": weight})
    chosen = np.clip(np.take_along_axis(p, y, 1), 1e-3, 1 - 1e-3)
    np.testing.assert_allclose(loss, (-np.log(chosen) * weight[:, None]).sum() / 7)
    assert gradient[0, 0] == 0
    np.testing.assert_allclose(gradient[1, 1], -weight[1] / p[1, 1] / 7)


@pytest.mark.parametrize("weighted", [False, True])
def test_log_of_a_prediction_of_unknown_shape(weighted):
    """Where it has other columns than two, it fails when it runs: one would be broadcast."""
    p, y = SOFTMAX[:, :2], np.array([[0], [1], [1], [0], [1], [0], [1]])
    model = identity_model(p.shape)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    made = add_loss_output(model, "log", weight_name="weight" if weighted else None)
    assert loss_info(made).classes == 2
    feed = {"x": p, "label": y, "weight": ROWS}
    known = add_loss_output(
        identity_model(p.shape), "log", weight_name="weight" if weighted else None
    )
    for found, expected in zip(evaluate(made, feed), evaluate(known, feed), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    for wrong in (p[:, :1], SOFTMAX):
        with pytest.raises(Exception, match="Reshape"):
            evaluate(made, feed | {"x": wrong})


@pytest.mark.parametrize("name", ["squared_error", "cross_entropy", "log"])
def test_row_weights_of_one_axis_or_two(name):
    f, y = {
        "squared_error": (F, Y),
        "cross_entropy": (F, CLASSES),
        "log": (SOFTMAX[:, :2], CLASSES[:, None] % 2),
    }[name]
    model = add_loss_output(identity_model(f.shape, "double"), name, weight_name="w8")
    flat, column = (evaluate(model, {"x": f, "label": y, "w8": w}) for w in (ROWS, ROWS[:, None]))
    np.testing.assert_array_equal(flat[0], column[0])
    np.testing.assert_array_equal(flat[1], column[1])


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_constants_of_a_loss_are_no_weights(reduction):
    factors = np.float32([0.5, 2, 3])

    def weighted(op, prediction, label, eps=0.3):
        d = prediction - label
        return d * (d * factors + eps)

    for name, options in ((weighted, {}), ("cross_entropy", {"label_smoothing": 0.1})):
        model = identity_model(F.shape)
        add_initializers(model, {"w": [2.0]})
        model.graph.node[0].op_type = "Mul"
        model.graph.node[0].input.append("w")
        made = add_loss_output(
            model, name, reduction=reduction, penalty={"w": {"l1": 0.1}}, **options
        )
        assert list(get_train_initializer(made)) == ["w"]
        gradient = onnx_derivative(made, options=DerivativeOptions.Loss, loss="loss", label="label")
        assert [y.name for y in gradient.graph.output] == ["loss", "x_grad", "w_grad"]
        assert not get_train_initializer(gradient)
        again = add_loss_output(made, output_index="f", label_name="other", loss_name="second")
        assert list(get_train_initializer(again)) == ["w"]


@pytest.mark.parametrize("opset", [13, 18])
def test_a_model_of_local_functions(opset):
    text = f"""g (float[N,2] x) => (float[N,2] y) {{ y = local.twice(x) }}
        <domain: "local", opset_import: ["": {opset}]> twice (a) => (b) {{ b = Add(a, a) }}"""
    model = parse_model(text, opset=opset, ir_version=8)
    loss, gradient = evaluate(add_loss_output(model), {"x": [[1, 2]], "label": [[0, 0]]})
    np.testing.assert_allclose(loss, [[20]])
    np.testing.assert_allclose(gradient, [[8, 16]])


@pytest.mark.parametrize("per", ["row", "element"])
def test_labels_that_are_nan_and_weights_of_elements(per):
    y, rng = np.array(Y), np.random.default_rng(0)
    y[0, 1] = y[1] = np.nan
    kept, rows = ~np.isnan(y), rng.random(len(y))
    made = add_loss_output(
        identity_model(F.shape, "double"),
        "huber",
        weight_name="w8",
        weight_per=per,
        ignore_nan=True,
    )
    weights = [rows] if per == "row" else [rows[:, None], rng.random(y.shape)]
    for w in weights:
        loss, gradient = evaluate(made, {"x": F, "label": y, "w8": w})
        d, w = np.where(kept, F - y, 0), w.reshape(len(y), -1)
        each = np.where(abs(d) < 1, d * d / 2, abs(d) - 0.5)
        np.testing.assert_allclose(loss, [[(w * each).sum()]], rtol=1e-12)
        np.testing.assert_allclose(gradient, w * np.clip(d, -1, 1), rtol=1e-12)
    with pytest.raises(ValueError, match=naming("weight_per", "'label'", "'element'")):
        add_loss_output(identity_model(F.shape), "huber", weight_name="w8", weight_per="label")


def test_weights_of_constant_nodes_are_penalized():
    text = """g (float[N,2] x) => (float[N,2] y) {
        w = Constant <value = float[2] {3.0, 4.0}>()  y = Mul(x, w) }"""
    made = add_loss_output(parse_model(text), penalty={"w": {"l1": 2.0}})
    loss = run_cast(made, {"x": [[0, 0]], "label": [[1, 2]]})[0]
    np.testing.assert_allclose(loss, [[5 + 2 * 7]])


def test_a_loss_of_ones_own():
    def quartic(op, prediction, label):
        d = prediction - label
        return d * d * d * d

    loss, gradient = evaluate(
        add_loss_output(identity_model(F.shape, "double"), quartic), {"x": F, "label": Y}
    )
    np.testing.assert_allclose(loss, ((F - Y) ** 4).sum())
    np.testing.assert_allclose(gradient, 4 * (F - Y) ** 3)


def test_row_weights_of_a_loss_of_ones_own():
    """The shape of its rows may have to be inferred; without one per row it is refused."""

    def rows(op, prediction, label, to=2.0):
        return op.Mod(op.ReduceSum(op.Abs(prediction - label), [1], keepdims=0), to, fmod=1)

    model = add_loss_output(identity_model(F.shape, "double"), rows, weight_name="w8", to=3.0)
    loss = run_cast(model, {"x": F, "label": Y, "w8": ROWS[:, None]})[0]
    np.testing.assert_allclose(loss, [[(np.abs(F - Y).sum(1) % 3 * ROWS).sum()]])
    with pytest.raises(ValueError, match=naming("sample weights", "each row", "declare")):
        add_loss_output(
            identity_model(F.shape),
            lambda op, f, y: op.ReduceMean(f - y, keepdims=0),
            weight_name="w8",
        )
    text = "g (float[N,4] x, int64[K] s) => (float[2] f) { f = Reshape(x, s) }"
    unknown = parse_model(text, output_shapes=False)
    with pytest.raises(ValueError, match=naming("sample weights", "each row", "declare")):
        add_loss_output(unknown, weight_name="w8")


def test_options_of_a_loss_of_ones_own():
    def mine(op, prediction, label, power=2.0):
        return op.Pow(prediction - label, power)

    with pytest.raises(ValueError, match=naming("option", "'mine'", "'powr'")):
        add_loss_output(identity_model(F.shape), mine, powr=3.0)


def test_facts_kept_for_trainers():
    info = loss_info(add_loss_output(identity_model((7, 3)), "cross_entropy", ignore_index=1))
    assert info == LossInfo("label", "f", "sum", classes=3, ignore_index=1)
    info = loss_info(add_loss_output(identity_model((7, 2)), "log", label_name="x"))
    assert info.label != "x"
    assert info == LossInfo(info.label, "f", "mean", classes=2)
    soft = add_loss_output(identity_model((7, 3)), "cross_entropy", soft_labels=True)
    assert loss_info(soft).classes is None


ABOUT = {  # after the reduction
    ("l2",): "",
    ("log",): ', "classes": 2, "ignore_index": null',
    ("cross_entropy",): ', "classes": 2, "ignore_index": -100',
    ("cross_entropy", "soft_labels"): "",
    ("binary_cross_entropy",): ', "loss": "binary_cross_entropy", "threshold": 0.5',
    ("binary_cross_entropy", "from_logits"): ', "loss": "binary_cross_entropy", "threshold": 0.0',
    ("hinge",): ', "loss": "hinge", "threshold": 0.0',
    ("poisson",): ', "loss": "poisson"',
}


@pytest.mark.parametrize("case", ABOUT, ids=" ".join)
def test_metadata_stay_as_earlier_versions_wrote_them(case):
    name, *options = case
    model = add_loss_output(identity_model((7, 2)), name, **dict.fromkeys(options, True))
    [text] = [entry.value for entry in model.metadata_props if entry.key == METADATA]
    reduction = "mean" if name == "log" else "sum"
    head = '{"label": "label", "prediction": "f", "reduction": '
    assert text == f'{head}"{reduction}"{ABOUT[case]}}}'
    assert LossInfo.from_metadata(text) == loss_info(model)
    assert loss_info(model).to_metadata() == text


def test_metadata_of_other_versions():
    """Keys that are missing or unknown change nothing."""
    info = LossInfo.from_metadata('{"reduction": "mean", "later": 3}')
    assert info == LossInfo(reduction="mean")
    assert LossInfo(loss="hinge").bounds.text == "-1 and 1, or 0 and 1"
    assert LossInfo(loss="of_a_later_version").bounds is None


# -- the model with the loss ---------------------------------------------------------------------


def layer_with_three_outputs() -> onnx.ModelProto:
    text = """g (float[N,2] x) => (float[N,1] y, float[N,1] z, int64[N] k)
        { y = MatMul(x, loss)  z = Neg(y)  k = ArgMax<keepdims=0>(y) }"""
    return parse_model(text, opset=15, ir_version=8, loss=[[1.0], [-2.0]])


def test_names_that_are_taken_give_ours_another():
    model = layer_with_three_outputs()
    before = model.SerializeToString()
    made = add_loss_output(model, output_index="z", label_name="x")
    assert model.SerializeToString() == before
    onnx.checker.check_model(made, full_check=True)
    assert [t.name for t in made.graph.initializer if t.name == "loss"] == ["loss"]
    names = [x.name for x in made.graph.input]
    assert names[0] == "x"
    assert len(set(names)) == 2
    assert made.graph.output[1].name == "z"
    assert made.graph.output[0].name not in ("loss", "z")
    assert made.opset_import[0].version == 18


CLASSIFIER = """label, p = ai.onnx.ml.LinearClassifier <coefficients = [1.0, -1.0],
    intercepts = [0.0, 0.0], classlabels_ints = [0, 1], post_transform = "SOFTMAX">(x)"""


def classifier_model(columns: int, body: str) -> onnx.ModelProto:
    text = f"g (float[N,{columns}] x) => (int64[N] label, float[N,2] p) {{ {body} }}"
    return parse_model(text, ir_version=8, domains={"ai.onnx.ml": 1})


@pytest.mark.parametrize("native", [True, False])
def test_outputs_that_are_gone_do_not_take_names(native):
    """A classifier has an output `label`, and so has the loss an input."""
    body = CLASSIFIER if native else "p = Softmax(x)  label = ArgMax <axis = 1, keepdims = 0>(p)"
    model = classifier_model(1 if native else 2, body)
    model.graph.node[0].name = "named"
    made = add_loss_output(model, "log", output_index="p")
    assert [x.name for x in made.graph.input] == ["x", "label"]
    assert [y.name for y in made.graph.output] == ["loss", "p"]
    assert list(get_train_initializer(made)) == list(get_train_initializer(model))
    onnx.checker.check_model(made, full_check=True)
    feed = {"x": F[:, : 1 if native else 2], "label": (Y[:, :1] > 0).astype(np.int64)}
    logits = np.hstack([feed["x"], -feed["x"]]) if native else feed["x"]
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    loss, _ = evaluate(made, feed)
    np.testing.assert_allclose(
        loss[0, 0], -np.log(np.take_along_axis(p, feed["label"], 1)).mean(), rtol=1e-5
    )


def test_the_weights_of_a_nameless_classifier_keep_their_names():
    model = classifier_model(1, CLASSIFIER)
    made = add_loss_output(model, "log", output_index="p")
    assert list(get_train_initializer(made)) == ["label.coefficients", "label.intercepts"]
    assert made.graph.input[1].name != "label"


@pytest.mark.parametrize("index", [1, -2, "z", np.int64(1)])
def test_the_output_to_judge(index):
    made = add_loss_output(layer_with_three_outputs(), output_index=index)
    assert [y.name for y in made.graph.output][1] == "z"
    assert [d.dim_param or d.dim_value for d in made.graph.input[1].type.tensor_type.shape.dim] == [
        "N",
        1,
    ]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"output_index": None}, ["output_index=", "'y', 'z'"]),
        ({"output_index": 3}, ["output_index=3", "3 outputs"]),
        ({"output_index": 2}, ["'k'", "float", "'y', 'z'"]),
        ({"output_index": "q"}, ["output", "'q'"]),
        ({"score_name": "squared"}, ["'squared_error'"]),
        ({"delta": 1}, ["'squared_error'", "'delta'"]),
        ({"score_name": "huber", "dleta": 1}, ["'huber' 'dleta'", "'delta'?"]),
        ({"reduction": "men"}, ["reduction", "'men'", "'mean'"]),
        ({"score_name": "log"}, ["(N, 2)", "probabilities"]),
        ({"penalty": {"W": 1}}, ["penalty", "'W'"]),
        ({"penalty": {"loss": {"l3": 1}}}, ["penalty", "'loss'", "'l3'"]),
        ({"penalty": {"loss": {"l1": 0}}}, ["penalty", "'loss'", "zero"]),
        ({"penalty": {"loss": {}}}, ["penalty", "'loss'", "zero"]),
    ],
)
def test_wrong_arguments(options, parts):
    with pytest.raises(ValueError, match=naming(*parts)):
        add_loss_output(layer_with_three_outputs(), **{"output_index": 0} | options)


@pytest.mark.parametrize("opset", [18, 22])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_far_out_in_every_precision(kind, opset):
    """onnxruntime has a kernel of Softplus for float32 alone; at 0 the slope is one half."""
    f, y = np.array([-1e4, -9.0, 0.0, 9.0, 1e4]), np.array([1, 1, 0, 0, 0])
    model = identity_model((5,), kind, opset)
    made = add_loss_output(model, "binary_cross_entropy", from_logits=True)
    loss, gradient = evaluate(made, {"x": f, "label": y})
    rtol = 1e-3 if kind == "float16" else 1e-6
    np.testing.assert_allclose(loss, 2e4 + np.log(2) + 2 * np.log1p(np.exp(9)), rtol=rtol)
    expected = (1 + np.tanh(f / 2)) / 2 - y
    np.testing.assert_allclose(gradient, expected, rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("huber", {"delta": -1}),
        ("huber", {"delta": float("nan")}),
        ("elastic", {"l1_weight": -0.5}),
        ("focal", {"gamma": -2.0}),
        ("cross_entropy", {"label_smoothing": 1.5}),
        ("log", {"eps": 0.0}),
    ],
)
def test_an_option_that_turns_the_loss_around_is_refused(loss, options):
    model = parse_model(
        "f (float[N,2] x) => (float[N,1] y) { y = MatMul(x, w) }", w=np.float32([[1], [1]])
    )
    [(name, value)] = options.items()
    with pytest.raises(ValueError, match=naming(f"{name}={value}", loss, "number")):
        add_loss_output(model, loss, **options)
