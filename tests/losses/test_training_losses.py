"""What trainers minimize: values and gradients in float64 against functional."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad import Trainer
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.compat import BaseLearningLoss, NegLogLearningLoss, SquareLearningLoss
from onnxgrad.graph.emit import Emit
from onnxgrad.losses.objectives import training_loss
from onnxgrad.losses.spec import Terms
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import in_sweep
from tests.support.written_losses import WrittenLoss, torch_leaf

torch = pytest.importorskip("torch")
functional = torch.nn.functional

RNG = np.random.default_rng(0)
ROWS = RNG.random(4) + 0.1
CLASS_WEIGHT = np.array([0.5, 2.0, 1.0, 3.0, 0.25])
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def body_model(body: str, x: str, y: str, kind: str = "double") -> onnx.ModelProto:
    """Return a model from x of shape `x` to outputs, as `y (N,3)`, by the nodes `body`."""
    outputs = ", ".join(
        f"{kind}[{shape}] {name}" for name, shape in re.findall(r"(\w+) \((.*?)\)", y)
    )
    return parse_model(f"g ({kind}[{x}] x) => ({outputs}) {{ {body} }}", ir_version=8)


def identity_of(shape: str = "N,T,V", kind: str = "double") -> onnx.ModelProto:
    """Return a model whose logits are its input, by a node that does not decide their axis."""
    return body_model("y = Identity(x)", shape, f"y ({shape})", kind)


def written_loss(proto, loss, x, labels, weight=None, **options) -> WrittenLoss:
    """Return the loss by name, with its gradient with respect to x, computed."""
    labels = labels if isinstance(labels, dict) else {"label": labels}
    feed = {"x": x, **labels, "weight": weight}
    return WrittenLoss(proto, training_loss(loss, **options), feed, weighted=weight is not None)


# -- cross-entropy against torch -----------------------------------------------------------------

SHAPES = {  # dimensions, the axis of the classes, lengths
    "rows": ("N,5", 1, (4, 5)),
    "rows, unknown classes": ("N,V", 1, (4, 5)),
    "tokens": ("N,T,5", -1, (4, 3, 5)),
    "tokens, unknown classes": ("N,T,V", 2, (4, 3, 5)),
    "tokens, no name": ("?,?,?", -1, (4, 3, 5)),
    "sequences": ("N,5,T", 1, (4, 5, 3)),
    "images": ("N,V,H,W", 1, (4, 5, 2, 3)),
    "images, last": ("N,H,W,5", 3, (4, 2, 3, 5)),
    "images, middle": ("N,H,V,W", 2, (4, 2, 5, 3)),
    "fixed": ("4,3,5", 2, (4, 3, 5)),
}
OPTIONS = {
    "plain": {},
    "ignoring": {"ignore_index": 2},
    "smoothed": {"label_smoothing": 0.2},
    "weighted": {"class_weight": CLASS_WEIGHT},
    "weighted, ignoring": {"class_weight": CLASS_WEIGHT, "ignore_index": 0},
    "all": {"class_weight": CLASS_WEIGHT, "ignore_index": 2, "label_smoothing": 0.1},
}


def torch_cross_entropy(x, y, axis, reduction="mean", class_weight=None, **options):
    weight = None if class_weight is None else torch.tensor(class_weight)
    y = torch.tensor(y)
    if y.ndim == x.ndim:
        y = y.movedim(axis, 1)
    x = x.movedim(axis, 1)
    return functional.cross_entropy(x, y, weight=weight, reduction=reduction, **options)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (shape, name) if name == "plain" or shape == "images" else in_sweep(shape, name)
        for shape in SHAPES
        for name in OPTIONS
    ],
)
def test_cross_entropy(shape, options):
    (text, axis, lengths), options = SHAPES[shape], OPTIONS[options]
    x = 3 * RNG.standard_normal(lengths)
    y = RNG.integers(0, 5, np.delete(lengths, axis))
    y.ravel()[1] = options.get("ignore_index", -100)
    result = written_loss(
        identity_of(text), "cross_entropy", x, y, options={"axis": axis, **options}
    )
    of_torch = torch_leaf(x)
    result.check(torch_cross_entropy(of_torch, y, axis, **options), of_torch)
    result.check_counts_alone()
    info = result.written.infos["label"]
    assert (info.prediction, info.axis, info.from_logits) == ("y", axis % len(lengths), True)
    assert info.ignore_index == options.get("ignore_index", -100)


@pytest.mark.parametrize("options", ["plain", "smoothed", "weighted"])
@pytest.mark.parametrize("shape", ["rows", "tokens, unknown classes", "images"])
def test_soft_labels_are_recognized_by_their_shape(shape, options):
    (text, axis, lengths), options = SHAPES[shape], OPTIONS[options]
    x, y = 3 * RNG.standard_normal(lengths), RNG.random(lengths)
    y /= y.sum(axis, keepdims=True)
    result = written_loss(
        identity_of(text),
        "ce",
        x,
        y,
        options={"axis": axis, **options},
        label_shapes={"y": y.shape},
    )
    of_torch = torch_leaf(x)
    result.check(torch_cross_entropy(of_torch, y, axis, **options), of_torch)
    assert result.written.infos["label"].classes is None


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_class_indices_are_recognized_by_their_shape(shape):
    objective = training_loss("ce", label_shapes={"label": shape})
    prepared = prepare(identity_of("N,5"))
    written = objective.write(Emit(prepared.graph), {"y": prepared.graph.outputs[0]})
    assert written.labels[0].dtype == ir.DataType.INT64
    assert written.labels[0].shape == ir.Shape(["N"])
    assert written.infos["label"].classes == 5


@pytest.mark.parametrize("classes", ["5", "V"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_by_class(classes, smoothing):
    x, y = RNG.standard_normal((4, 5)), np.array([0, 3, 3, 1])
    by_class = {3: 2.5, 0: 0.5}
    result = written_loss(
        identity_of(f"N,{classes}"), "ce", x, y, class_weight=by_class,
        options={"label_smoothing": smoothing},
    )  # fmt: skip
    of_torch, weight = torch_leaf(x), np.array([0.5, 1, 1, 2.5, 1])
    expected = torch_cross_entropy(of_torch, y, 1, class_weight=weight, label_smoothing=smoothing)
    result.check(expected, of_torch)


@pytest.mark.parametrize(
    ("text", "weighted"),
    [("N,T,5", True), ("N,T,V", False), ("4,3,5", True), ("?,?,?", False), in_sweep("N,T,V", True)],
)
def test_next_tokens(text, weighted):
    x, y = RNG.standard_normal((4, 3, 5)), RNG.integers(0, 5, (4, 3))
    y[1, 2] = y[3, 1] = y[0, 0] = -100
    result = written_loss(
        identity_of(text),
        "ce",
        x,
        y,
        ROWS if weighted else None,
        options={"axis": -1, "shift": True},
    )
    of_torch = torch_leaf(x)
    each = torch_cross_entropy(of_torch[:, :-1], y[:, 1:], 2, reduction="none")
    rows = torch.tensor(ROWS if weighted else np.ones(4))[:, None]
    used = rows * torch.tensor(y[:, 1:] != -100)
    result.check((rows * each).sum() / used.sum(), of_torch)
    np.testing.assert_allclose(result.counts, used.sum())
    result.check_counts_alone()


@pytest.mark.parametrize("options", OPTIONS)
def test_sample_weights(options):
    """They multiply the class weights of the tokens of their row."""
    options = OPTIONS[options]
    x, y = RNG.standard_normal((4, 3, 5)), RNG.integers(0, 5, (4, 3))
    y[1] = options.get("ignore_index", -100)
    result = written_loss(identity_of(), "ce", x, y, ROWS, options={"axis": 2, **options})
    of_torch = torch_leaf(x)
    each = torch_cross_entropy(of_torch, y, 2, reduction="none", **options)
    ones = np.where(y == options.get("ignore_index", -100), 0, 1)
    weight = options.get("class_weight", np.ones(5))[np.clip(y, 0, 4)] * ones
    rows = ROWS[:, None]
    result.check((torch.tensor(rows) * each).sum() / (weight * rows).sum(), of_torch)


def test_a_masked_class_costs_nothing_where_labels_are_ignored():
    x, y = RNG.standard_normal((4, 5)), np.array([1, -100, 4, 2])
    x[:, 0] = -np.inf
    result = written_loss(identity_of("N,5"), "ce", x, y)
    of_torch = torch_leaf(x)
    result.check(torch_cross_entropy(of_torch, y, 1), of_torch)


def test_a_batch_without_labels_counts_zero():
    result = written_loss(identity_of("N,5"), "ce", RNG.standard_normal((2, 5)), [-100, -100])
    assert result.counts == [0]


# -- scores and probabilities ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [500.0, in_sweep(1.0)])
@pytest.mark.parametrize("node", ["Softmax", "LogSoftmax", "Identity"])
@pytest.mark.parametrize(("text", "axis"), [("N,5", 1), ("N,T,5", 2), ("N,5,T", 1)])
def test_the_graph_says_whether_predictions_are_probabilities(text, axis, node, size):
    """And the loss is computed from the logits: it is exact also where probabilities are 0."""
    lengths = tuple({"N": 4, "T": 3}.get(d) or int(d) for d in text.split(","))
    x, y = size * RNG.standard_normal(lengths), RNG.integers(0, 5, np.delete(lengths, axis))
    attribute = "" if node == "Identity" else f"<axis = {axis}>"
    body = f"y = {node} {attribute}(x)"
    loss_options = {"axis": axis} if node == "Identity" else {}
    result = written_loss(body_model(body, text, f"y ({text})"), "ce", x, y, options=loss_options)
    of_torch = torch_leaf(x)
    result.check(torch_cross_entropy(of_torch, y, axis), of_torch)
    info = result.written.infos["label"]
    assert (info.axis, info.from_logits) == (axis, node != "Softmax")


@pytest.mark.parametrize(
    "body",
    [
        "p = Softmax(x)  y = Clip(p, low, high)",
        "p = Softmax(x)  y = Transpose <perm = [1, 0]>(q)  q = Transpose <perm = [1, 0]>(p)",
        "p = Softmax(x)  q = Softmax(x)  s = Add(p, q)  y = Mul(s, half)",
        "e = Sigmoid(x)  s = ReduceSum <keepdims = 1>(e, one)  y = Div(e, s)",
    ],
)
def test_probabilities_that_are_not_computed_last(body):
    proto = body_model(
        "low = Constant <value_float = 1e-9>()  high = Constant <value_float = 1.0>() "
        "half = Constant <value_float = 0.5>()  one = Constant <value_ints = [1]>() "
        + " ".join(sorted(body.split("  "), key=lambda n: n.startswith("y"))),
        "N,5", "y (N,5)", "float",
    )  # fmt: skip
    x, y = RNG.standard_normal((4, 5)).astype(np.float32), np.array([0, 3, 3, 1])
    result = written_loss(proto, "ce", x, y)
    assert result.written.infos["label"].from_logits is False
    e = 1 / (1 + np.exp(-x)) if "Sigmoid" in body else np.exp(x)
    p = e / e.sum(1, keepdims=True)
    np.testing.assert_allclose(result.total, -np.log(p[range(4), y]).mean(), rtol=1e-5)


@pytest.mark.parametrize(("body", "threshold"), [("y = Sigmoid(x)", 0.5), ("y = Identity(x)", 0.0)])
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_binary_predictions(body, threshold, size):
    x, y = size * RNG.standard_normal((4, 3)), (RNG.random((4, 3)) > 0.5) * 1.0
    result = written_loss(body_model(body, "N,3", "y (N,3)"), "bce", x, y)
    of_torch = torch_leaf(x)
    function = functional.binary_cross_entropy_with_logits
    result.check(function(of_torch, torch.tensor(y)), of_torch)
    info = result.written.infos["label"]
    assert (info.threshold, info.from_logits) == (threshold, threshold == 0)
    assert info.bounds.text == "between 0 and 1"


def test_what_the_user_says_wins(caplog):
    x, y = RNG.standard_normal((4, 3)), np.array([0, 2, 1, 1])
    proto = body_model("y = Softmax(x)", "N,3", "y (N,3)")
    result = written_loss(proto, "ce", x, y, options={"from_logits": True})
    of_torch = torch_leaf(x)
    result.check(torch_cross_entropy(of_torch.softmax(1), y, 1), of_torch)
    assert re.search(naming("'y'", "from_logits=True"), caplog.text)


def test_what_is_decided_is_reported(caplog):
    with caplog.at_level("INFO", "onnxgrad"):
        written_loss(
            body_model("y = Softmax(x)", "N,T,3", "y (N,T,3)"), "ce", np.ones((1, 2, 3)), [[0, 1]]
        )
    for parts in (["axis 2"], ["probabilities", "'cross_entropy'"], ["logits"]):
        assert re.search(naming("'y'", *parts), caplog.text)


# -- the other losses ------------------------------------------------------------------------------


DEFAULT = [("N,?", "elements"), ("4,3", "column")]  # for all losses
ELEMENTWISE = {  # as torch computes them, without reduction
    "mse": functional.mse_loss,
    "mae": functional.l1_loss,
    "huber": functional.huber_loss,
    "poisson": functional.poisson_nll_loss,
    "bce": functional.binary_cross_entropy_with_logits,
    "log_cosh": lambda f, y, reduction: (f - y).cosh().log(),
}


@pytest.mark.parametrize(
    ("name", "text", "weighted"),
    [
        (name, text, weighted)
        if (name == "mse" and text == "N,3") or (text, weighted) in DEFAULT
        else in_sweep(name, text, weighted)
        for name in ("mse", "mae", "huber", "poisson")
        for text in ("N,3", "N,?", "4,3")
        for weighted in ("", "rows", "column", "elements")
    ],
)
def test_means_over_elements(name, text, weighted):
    x, y = RNG.standard_normal((4, 3)), RNG.random((4, 3))
    weight = {"": None, "rows": ROWS, "column": ROWS, "elements": RNG.random((4, 3))}[weighted]
    shape = {"": None, "rows": (4,), "column": (4, 1), "elements": (4, 3)}[weighted]
    result = written_loss(identity_of(text), name, x, y, weight, weight_shape=shape)
    of_torch = torch_leaf(x)
    each = ELEMENTWISE[name](of_torch, torch.tensor(y), reduction="none")
    w = np.ones((4, 3)) if weight is None else weight.reshape(4, -1) * np.ones((4, 3))
    result.check((torch.tensor(w) * each).sum() / w.sum(), of_torch)


@pytest.mark.parametrize("options", OPTIONS)
def test_negative_sample_weights(options):
    """Without a weighted mean, the divisor is the one without sample weights."""
    options = OPTIONS[options]
    x, y = RNG.standard_normal((4, 3, 5)), RNG.integers(0, 5, (4, 3))
    y[1] = options.get("ignore_index", -100)
    signed, own = ROWS - 1.0, {"axis": 2, "weighted_mean": False, **options}
    result = written_loss(identity_of(), "ce", x, y, signed, options=own)
    of_torch = torch_leaf(x)
    each = torch_cross_entropy(of_torch, y, 2, reduction="none", **options)
    ones = np.where(y == options.get("ignore_index", -100), 0, 1)
    divisor = (options.get("class_weight", np.ones(5))[np.clip(y, 0, 4)] * ones).sum()
    result.check((torch.tensor(signed[:, None]) * each).sum() / divisor, of_torch)
    np.testing.assert_allclose(result.counts, divisor)
    result.check_counts_alone()


def test_a_plain_mean_of_one_output():
    """The loss of the other output is a weighted mean."""
    x, y = RNG.standard_normal((4, 3)), RNG.standard_normal((4, 3))
    model = body_model("y = Identity(x)  z = Neg(x)", "N,3", "y (N,3) z (N,3)")
    labels, plain = {"label_y": y, "label_z": y}, {"y": {"weighted_mean": False}}
    result = written_loss(model, {"y": "mse", "z": "mse"}, x, labels, ROWS, options=plain)
    of_torch, rows = torch_leaf(x), torch.tensor(ROWS)[:, None]
    first, second = ((rows * (sign * of_torch - torch.tensor(y)) ** 2).sum() for sign in (1, -1))
    result.check(first / y.size + second / (3 * ROWS.sum()), of_torch)


@pytest.mark.parametrize("logits", [True, False])
@pytest.mark.parametrize("pos_weight", [None, 2.5, [0.5, 1.0, 4.0]])
def test_binary_cross_entropy(pos_weight, logits):
    x, y = RNG.standard_normal((4, 3)), (RNG.random((4, 3)) > 0.5) * 1.0
    options = {"pos_weight": pos_weight, "label_smoothing": 0.2, "from_logits": logits}
    prediction = x if logits else 1 / (1 + np.exp(-x))
    result = written_loss(identity_of("N,3"), "bce", prediction, y, options=options)
    of_torch = torch_leaf(prediction)
    scores = of_torch if logits else torch.logit(of_torch)
    factor = None if pos_weight is None else torch.tensor(pos_weight, dtype=scores.dtype)
    expected = functional.binary_cross_entropy_with_logits(
        scores, torch.tensor(0.8 * y + 0.1), pos_weight=factor
    )
    result.check(expected, of_torch)


def test_class_weights_of_two_classes():
    """They are those of cross_entropy for the scores 0 and x."""
    x, y = RNG.standard_normal((4, 1)), np.array([[0.0], [1.0], [1.0], [0.0]])
    result = written_loss(identity_of("N,1"), "bce", x, y, ROWS, class_weight={0: 0.3, 1: 2.0})
    two = written_loss(
        identity_of("N,2"), "ce", np.hstack([0 * x, x]), y[:, 0], ROWS, class_weight=[0.3, 2.0]
    )
    np.testing.assert_allclose(result.total, two.total, **EXACT)
    np.testing.assert_allclose(result.gradient, two.gradient[:, 1:], **EXACT)


def test_the_probabilities_of_two_columns():
    """The loss "log" has one term a row, though it writes two numbers."""
    p, y = np.array([[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]]), np.array([[1], [0], [1]])
    result = written_loss(identity_of("N,2"), "log", p, y)
    np.testing.assert_allclose(result.total, -np.log([0.8, 0.5, 0.1]).mean())
    assert result.counts == [3]


@pytest.mark.parametrize("weighted", [False, True])
def test_a_prediction_of_unknown_shape(weighted):
    """A vector of labels for a column of predictions is no (N, N)."""
    proto = identity_of("N,1")
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.ClearField("shape")
    x, y = RNG.standard_normal((4, 1)), RNG.random((4, 1))
    expected = ((x - y) ** 2)[:, 0]
    for label in (y, y[:, 0]):
        result = written_loss(proto, "mse", x, label, ROWS if weighted else None)
        mean = np.average(expected, weights=ROWS if weighted else None)
        np.testing.assert_allclose(result.total, mean, **EXACT)


def pseudo_huber_terms(op, prediction, label):
    d = prediction - label
    return op.Sqrt(1.0 + d * d) - 1.0


def cosine_terms(op, prediction, label):
    """One term a token."""
    return 1.0 - op.ReduceSum(prediction * label, [-1], keepdims=0)


def terms_by_row(op, prediction, label):
    return op.ReduceSum(op.Abs(prediction - label), [1, 2], keepdims=1)


def own_terms(op, prediction, label):
    d = prediction - label
    return Terms(op.ReduceMean(d * d, [2], keepdims=1), op.ReduceMax(label, [2], keepdims=1))


def terms_of_shared_weights(op, prediction, label):
    d = prediction - label
    return Terms(d * d, op.ReduceMax(label, [2], keepdims=1))


FUNCTIONS = [pseudo_huber_terms, cosine_terms, terms_by_row, own_terms, terms_of_shared_weights]


@pytest.mark.parametrize(
    ("text", "weighted"),
    [("N,T,3", False), ("?,?,?", True), in_sweep("4,2,3", True), in_sweep("N,T,3", True)],
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions(function, weighted, text):
    x, y = RNG.standard_normal((4, 2, 3)), RNG.random((4, 2, 3))
    result = written_loss(identity_of(text), function, x, y, ROWS if weighted else None)
    terms = {
        pseudo_huber_terms: np.sqrt(1 + (x - y) ** 2) - 1,
        cosine_terms: 1 - (x * y).sum(2, keepdims=True),
        terms_by_row: abs(x - y).sum((1, 2), keepdims=True),
        own_terms: ((x - y) ** 2).mean(2, keepdims=True),
        terms_of_shared_weights: (x - y) ** 2,
    }[function]
    w = np.ones(4)[:, None, None] if not weighted else ROWS[:, None, None]
    w = w * np.ones(terms.shape)
    if function in (own_terms, terms_of_shared_weights):
        w *= y.max(2, keepdims=True)
    np.testing.assert_allclose(result.total, (w * terms).sum() / w.sum(), **EXACT)
    np.testing.assert_allclose(result.counts, w.sum(), **EXACT)
    result.check_counts_alone()


def test_learning_losses_keep_their_own_gradient():
    """That of NegLogLearningLoss is p - y also where its loss is clipped."""
    x = np.array([[30.0], [-0.5], [-40.0], [2.0]])
    y = np.array([[0], [1], [1], [0]])
    p = 1 / (1 + np.exp(-x))
    loss = -np.log(np.clip(np.where(y == 1, p, 1 - p), 1e-5, 1 - 1e-5))
    for weight in (None, ROWS):
        result = written_loss(identity_of("N,1"), NegLogLearningLoss, x, y, weight)
        w = np.ones((4, 1)) if weight is None else ROWS[:, None]
        np.testing.assert_allclose(result.total, (w * loss).sum() / w.sum())
        np.testing.assert_allclose(result.gradient, w * (p - y) / w.sum())
        assert result.written.infos["label"].classes == 2


@pytest.mark.parametrize("kind", [SquareLearningLoss(), "half", NegLogLearningLoss(0, "softmax")])
def test_learning_losses(kind):
    class Half(BaseLearningLoss):
        def loss(self, op, prediction, label):
            d = prediction - label
            return 0.5 * op.ReduceSum(d * d, [1], keepdims=0)

    x, y = RNG.standard_normal((4, 3)), RNG.random((4, 3))
    if isinstance(kind, NegLogLearningLoss):
        y = np.array([0, 2, 1, 1])
        terms = -np.log(np.exp(x) / np.exp(x).sum(1, keepdims=True))[range(4), y]
    else:
        terms = (x - y) ** 2 / 2 if kind != "half" else ((x - y) ** 2).sum(1) / 2
    result = written_loss(identity_of("N,3"), Half if kind == "half" else kind, x, y)
    np.testing.assert_allclose(result.total, terms.mean(), **EXACT)


@pytest.mark.parametrize("name", ["mse", "ce"])
def test_half_precision_does_not_overflow(name):
    """Neither the sum of squares of 300, nor the count of 80 000 elements."""
    n = 40_000
    x = np.full((n, 2), 300.0)
    y = np.zeros((n, 2)) if name == "mse" else np.zeros(n)
    result = written_loss(identity_of("N,2", "float16"), name, x, y)
    assert result.gradient.dtype == np.float16
    assert result.total.dtype == np.float32
    np.testing.assert_allclose(result.total, 9e4 if name == "mse" else np.log(2), rtol=1e-3)
    assert result.counts == [2 * n if name == "mse" else n]
    assert np.isfinite(result.gradient).all()


# -- several outputs -------------------------------------------------------------------------------

TWO = """y = Identity(x)  two = Constant <value_float = 2.0>()  c = CastLike(two, x)
    z = Mul(x, c)"""


@pytest.mark.parametrize("weighted", [False, True])
def test_several_outputs(weighted):
    proto = body_model(TWO, "N,3", "y (N,3) z (N,3)")
    x, values, classes = RNG.standard_normal((4, 3)), RNG.random((4, 3)), np.array([0, 2, 1, 1])
    result = written_loss(
        proto, {"z": "ce", "y": "mse"}, x, {"label_y": values, "label_z": classes},
        ROWS if weighted else None, loss_weights={"z": 0.3},
        class_weight={"z": [1.0, 2.0, 3.0]}, options={"z": {"label_smoothing": 0.1}},
    )  # fmt: skip
    of_torch, w = torch_leaf(x), ROWS if weighted else np.ones(4)
    rows = torch.tensor(w)
    squares = (rows[:, None] * (of_torch - torch.tensor(values)) ** 2).sum() / (3 * w.sum())
    class_weight = np.array([1.0, 2.0, 3.0])
    each = torch_cross_entropy(
        2 * of_torch, classes, 1, "none", class_weight=class_weight, label_smoothing=0.1
    )
    entropy = (rows * each).sum() / (w * class_weight[classes]).sum()
    result.check(0.3 * entropy + squares, of_torch)
    assert result.written.factors == [0.3, 1.0]
    assert {name: i.prediction for name, i in result.written.infos.items()} == {
        "label_z": "z", "label_y": "y",
    }  # fmt: skip


def test_outputs():
    proto = body_model(TWO, "N,3", "y (N,3) z (N,3)")
    with pytest.raises(ValueError, match=naming("2 float outputs", "loss={output: loss}")):
        training_loss("mse").outputs(proto)
    with pytest.raises(ValueError, match=naming("output", "'q'")):
        training_loss({"q": "mse"}).outputs(proto)
    assert training_loss({"z": "mse"}).outputs(proto) == ["z"]
    classifier = parse_model("""
        g (float[N,2] x) => (int64[N] label, seq(map(int64, float)) zipped) {
            label, p = ai.onnx.ml.LinearClassifier <coefficients = [1.0, -1.0, 0.5, 0.5],
                intercepts = [0.0, 0.0], classlabels_ints = [0, 1], post_transform = "SOFTMAX">(x)
            zipped = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1]>(p) }""")
    assert training_loss("ce").outputs(classifier) == ["p"]


@pytest.mark.parametrize(
    ("loss", "options", "parts"),
    [
        ("cross_entrop", {}, ["loss", "'cross_entrop'", "'cross_entropy'"]),
        (3, {}, ["loss", "3"]),
        ("mse", {"class_weight": [1, 2]}, ["class_weight", "'squared_error'"]),
        ("mse", {"loss_weights": {"y": 2}}, ["loss_weights", "{output: loss}"]),
        ({}, {}, ["loss", "empty"]),
        ({"y": "mse"}, {"loss_weights": {"z": 2}}, ["output", "loss_weights", "'z'"]),
        ({"y": "mse"}, {"loss_weights": {"y": np.inf}}, ["finite", "inf"]),
        ({"y": "ce"}, {"class_weight": [1, 2]}, ["class_weight", "{output: ...}"]),
        ({"y": "ce"}, {"options": {"z": {}}}, ["output", "options", "'z'"]),
    ],
)
def test_wrong_arguments(loss, options, parts):
    with pytest.raises(ValueError, match=naming(*parts)):
        training_loss(loss, **options)


@pytest.mark.parametrize(
    ("shape", "loss", "options", "parts"),
    [
        ("N,T,V", "ce", {}, ["axis", "'y'", "('N', 'T', 'V')"]),
        ("N,T,V", "ce", {"options": {"axis": 3}}, ["axis=3", "'y'", "('N', 'T', 'V')"]),
        ("N,T,3,V", "ce", {"options": {"axis": 3, "shift": True}}, ["shift", "(N,"]),
        ("N", "ce", {}, ["(N, C, ...)", "('N',)"]),
        ("N,5", "ce", {"class_weight": [1, 2]}, ["class_weight", "(2,)"]),
        ("N,5", "ce", {"class_weight": {5: 2}}, ["[5]", "0 to 4"]),
        ("N,5", "ce", {"class_weight": {"a": 2}}, ["['a']", "0 to 4"]),
        ("N,5", "ce", {"class_weight": [1, 1, 1, 1, -1]}, ["class_weight", "finite", "0 or more"]),
        (
            "N,2",
            "ce",
            {"class_weight": [0, 1], "options": {"label_smoothing": 0.1}},
            ["class_weight", "zeros", "label_smoothing"],
        ),
        ("Sigmoid", "ce", {}, ["'y'", "Sigmoid"]),
        ("LogSoftmax", "bce", {}, ["'y'", "log-probabilities"]),
        ("N,5", "mse", {"label_shapes": {"z": (4, 5)}}, ["label", "'z'"]),
        ("N,5", lambda op, f, y: op.ReduceSum(f - y, keepdims=0), {}, ["one number"]),
        ("N,5", lambda op, f, y: op.ReduceSum(f - y, [0], keepdims=0), {}, ["(5,)"]),
        ("N,5", lambda op, f, y: op.ReduceSum(f - y, keepdims=1), {}, ["(1, 1)"]),
    ],
)
def test_what_is_refused(shape, loss, options, parts):
    by_node = shape in ("Sigmoid", "LogSoftmax")
    proto = body_model(f"y = {shape}(x)", "N,5", "y (N,5)") if by_node else identity_of(shape)
    prepared = prepare(proto)
    objective = training_loss(loss, **options)
    with pytest.raises(ValueError, match=naming(*parts)):
        objective.write(Emit(prepared.graph), {"y": prepared.graph.outputs[0]})


# -- labels that are NaN --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["N,T,3", in_sweep("N,3"), in_sweep("4,3")])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_labels_that_are_nan_are_left_out(name, shape):
    lengths = (4, 2, 3) if "T" in shape else (4, 3)
    x, y = RNG.standard_normal(lengths), RNG.integers(0, 2, lengths).astype(float)
    y[1] = y[0, ..., 2] = np.nan
    for rows in (None, ROWS):
        result = written_loss(identity_of(shape), name, x, y, rows, options={"ignore_nan": True})
        of_torch, kept = torch_leaf(x), torch.tensor(~np.isnan(y))
        w = np.broadcast_to(
            (np.ones(4) if rows is None else rows).reshape(4, *[1] * (x.ndim - 1)), lengths
        )
        w = torch.tensor(w.copy())[kept]
        losses = ELEMENTWISE[name](of_torch[kept], torch.tensor(y)[kept], reduction="none")
        result.check((w * losses).sum() / w.sum(), of_torch)
    assert result.written.infos["label"].ignore_nan


@pytest.mark.parametrize("name", ["ce", "kl_divergence", "softmax_focal"])
def test_losses_whose_labels_cannot_be_left_out(name):
    remedy = "ignore_index" if name != "kl_divergence" else "leave out"
    with pytest.raises(ValueError, match=naming("ignore_nan=True", remedy)):
        written_loss(identity_of("N,3"), name, ROWS, ROWS, options={"ignore_nan": True})


@pytest.mark.parametrize(
    ("body", "output"),
    [
        ("y = ArgMax<axis=-1, keepdims=0>(s)", "int64[N,5] y"),
        (in_sweep("values, y = TopK(s, one)", "int64[N,5,1] y")),
        ("i = ArgMax<axis=2>(s)  y = Flatten(i)", "int64[N,5] y"),
        ("i = ArgMax<axis=2>(s)  q = Squeeze(i, last)  y = Gather(names, q)", "string[N,5] y"),
    ],
)
def test_scores_behind_labels(body, output):
    """Where a model returns labels only, the scores whose largest one they are have the loss."""
    made = parse_model(
        f"f (float[N,5,3] x) => ({output}) {{ m = MatMul(x, w)  s = Add(m, b)  {body} }}",
        w=np.ones((3, 2), np.float32), b=[1.0, 2.0], one=np.int64([1]), last=np.int64([2]),
        names=np.array(["other", "person"]),
    )  # fmt: skip
    trainer = Trainer(made, "cross_entropy", loss_options={"axis": -1})
    found = trainer.evaluate(np.zeros((4, 5, 3), np.float32), np.ones((4, 5), int))
    assert found["loss"] == pytest.approx(np.log(1 + np.exp(-1)))
    assert list(trainer.predict(np.zeros((4, 5, 3), np.float32)).shape) == [4, 5, 2]
