"""Losses outside of the model: their graphs, and what runs them, against formulas and others."""

from __future__ import annotations

import pickle

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxgrad.compat import (
    AbsoluteLearningLoss,
    BaseLearningLoss,
    ElasticLearningLoss,
    EvaluationError,
    NegLogLearningLoss,
    ProviderError,
    SquareLearningLoss,
)
from onnxgrad.compat.learning_losses import FunctionLearningLoss
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import tidy
from onnxgrad.losses.info import LossInfo
from onnxgrad.model.convert import to_proto
from tests.support.errors import naming
from tests.support.running import in_sweep, session_of
from tests.support.values import as_ortvalue, each_dtype_and_opset

RNG = np.random.default_rng(0)
F, Y = RNG.standard_normal((2, 7, 3))
ROWS = RNG.random(7) + 0.1
BINARY = (Y > 0) * 1
CLASSES = np.array([0, 2, 1, 1, 0, 2, 2])
DTYPES = [np.float16, np.float32, np.float64]
RTOL = {np.float16: 4e-3, np.float32: 2e-6, np.float64: 1e-12}


def logistic(f):
    return 1 / (1 + np.exp(-f))


def stable_softmax(f):
    e = np.exp(f - f.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def clipped_neg_log(p, y, eps):
    return -np.log(np.clip(np.where(y == 1, p, 1 - p), eps, 1 - eps))


OTHER_FORMS = [in_sweep(1, True), in_sweep(3, False)]
# the loss, a label, the loss of every element, the gradient
CASES = {
    "square": (SquareLearningLoss(), Y, lambda f, y: (f - y) ** 2 / 2, lambda f, y: f - y),
    "absolute": (AbsoluteLearningLoss(), Y, lambda f, y: abs(f - y), lambda f, y: np.sign(f - y)),
    "elastic": (
        ElasticLearningLoss(0.1, 0.9), Y,
        lambda f, y: 0.1 * abs(f - y) + 0.9 * (f - y) ** 2,
        lambda f, y: 0.1 * np.sign(f - y) + 1.8 * (f - y),
    ),
    "sigmoid": (
        NegLogLearningLoss(), BINARY,
        lambda f, y: clipped_neg_log(logistic(f), y, 1e-5), lambda f, y: logistic(f) - y,
    ),
    "clipped sigmoid": (
        NegLogLearningLoss(0.3), BINARY,
        lambda f, y: clipped_neg_log(logistic(f), y, 0.3), lambda f, y: logistic(f) - y,
    ),
    "softmax": (
        NegLogLearningLoss(0.2, "softmax"), CLASSES,
        lambda f, y: clipped_neg_log(np.take_along_axis(stable_softmax(f), y[:, None], 1), 1, 0.2),
        lambda f, y: stable_softmax(f) - np.eye(3)[y],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("columns", "weighted"), [(1, False), (3, True), *OTHER_FORMS])
@each_dtype_and_opset((14, 18, 26))
@pytest.mark.parametrize("name", CASES)
def test_formulas(name, dtype, columns, weighted, opset):
    kind, y, loss, slope = CASES[name]
    if y is CLASSES and columns == 1:
        pytest.skip("a softmax has at least two scores")
    f = F[:, :columns].astype(dtype)
    y = y if y is CLASSES else y[:, :columns] if y is BINARY else y[:, :columns].astype(dtype)
    weight = ROWS.astype(dtype) if weighted else None
    kind.build_onnx_function(opset, "cpu", "weight" if weighted else None, dtype)
    for model in (kind.loss_grad_onnx_, kind.loss_score_onnx_):
        onnx.checker.check_model(model, full_check=True)
        assert model.opset_import[0].version == opset
    assert [y.name for y in kind.loss_grad_onnx_.graph.output] == ["Y", "Y_grad"]
    assert [x.name for x in kind.loss_grad_onnx_.graph.input][:2] == ["X1", "X2"]
    assert [y.name for y in kind.loss_score_onnx_.graph.output] == ["Y"]
    column = (weight if weighted else np.ones(7)).astype(np.float64)[:, None]
    exact = f.astype(np.float64), y if y.dtype.kind == "i" else y.astype(np.float64)
    rows = (loss(*exact).sum(axis=1, keepdims=True)) * column
    found, gradient = kind.loss_gradient(y, f, weight)
    scores = kind.loss_scores(y, f, weight)
    assert (found.shape, gradient.shape, scores.shape) == ((), f.shape, (7, 1))
    assert {found.dtype, gradient.dtype, scores.dtype} == {np.dtype(dtype)}
    rtol = RTOL[dtype]
    np.testing.assert_allclose(scores, rows, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(found, rows.sum(), rtol=rtol)
    np.testing.assert_allclose(gradient, slope(*exact) * column, rtol=rtol, atol=rtol)


def test_where_prediction_and_label_are_equal():
    for kind in (SquareLearningLoss(), AbsoluteLearningLoss(), ElasticLearningLoss()):
        loss, gradient = kind.build_onnx_function().loss_gradient(F, F)
        assert loss == 0
        assert not gradient.any()


@pytest.mark.parametrize(
    ("name", "options", "f", "y"),
    [
        ("squared_error", {}, F, Y),
        ("l1", {}, F, Y),
        ("elastic", {"l1_weight": 0.2, "l2_weight": 3.0}, F, Y),
        ("log", {"eps": 0.0}, F, BINARY),
        ("log", {"eps": 0.0, "probability_function": "softmax"}, F, CLASSES),
        ("huber", {"delta": 0.5}, F, Y),
        ("poisson", {}, F, abs(Y)),
        ("hinge", {}, F, BINARY),
        ("binary_cross_entropy", {"from_logits": True}, F, BINARY),
        ("binary_cross_entropy", {}, logistic(F), BINARY),
        ("cross_entropy", {"label_smoothing": 0.1}, F, CLASSES),
    ],
)
def test_gradients_are_those_of_the_loss(name, options, f, y):
    kind = BaseLearningLoss.select(name, **options)
    kind.build_onnx_function(None, None, "w", np.float64, shape=("N", 3))
    loss, gradient = kind.loss_gradient(y, f, ROWS)
    np.testing.assert_allclose(loss, kind.loss_scores(y, f, ROWS).sum(), rtol=1e-12)
    step, found = 1e-6, np.empty_like(f)
    for at in np.ndindex(f.shape):
        moved = np.zeros_like(f)
        moved[at] = step
        up, down = (kind.loss_gradient(y, f + s * moved, ROWS)[0] for s in (1, -1))
        found[at] = (up - down) / (2 * step)
    np.testing.assert_allclose(gradient, found, rtol=1e-6, atol=1e-8)


def test_against_the_losses_of_scikit_learn():
    sklearn = pytest.importorskip("sklearn._loss")
    f, y = F[:, 0].copy(), BINARY[:, 0] * 1.0
    for kind, witness, label in (
        (SquareLearningLoss(), sklearn.HalfSquaredError(), Y[:, 0].copy()),
        (NegLogLearningLoss(eps=0), sklearn.HalfBinomialLoss(), y),
    ):
        kind.build_onnx_function(weight_name="w", dtype=np.float64)
        losses, slopes = witness.loss_gradient(label, f, ROWS)
        loss, gradient = kind.loss_gradient(label, f, ROWS)
        np.testing.assert_allclose(loss, losses.sum())
        np.testing.assert_allclose(gradient, slopes)
        np.testing.assert_allclose(kind.loss_scores(label, f, ROWS)[:, 0], losses)
    metrics = pytest.importorskip("sklearn.metrics")
    kind = NegLogLearningLoss().build_onnx_function(dtype=np.float64)
    expected = metrics.log_loss(y, np.clip(logistic(f), 1e-5, 1 - 1e-5), normalize=False)
    np.testing.assert_allclose(kind.loss_gradient(y, f)[0], expected)


def test_against_torch():
    torch = pytest.importorskip("torch")
    f = torch.tensor(3 * F, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(f, torch.tensor(CLASSES), reduction="none")
    (loss * torch.tensor(ROWS)).sum().backward()
    kind = NegLogLearningLoss(0.0, "softmax").build_onnx_function(None, None, "w", np.float64)
    for y in (CLASSES, CLASSES[:, None]):
        np.testing.assert_allclose(
            kind.loss_scores(y, 3 * F, ROWS)[:, 0], loss.detach().numpy() * ROWS
        )
        np.testing.assert_allclose(kind.loss_gradient(y, 3 * F, ROWS)[1], f.grad.numpy())


@pytest.mark.parametrize("function", ["sigmoid", "softmax"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_far_out(dtype, function):
    """The loss is clipped, finite and exact; the gradient goes on to say which way."""
    size = 6e4
    f = np.array([[size], [-size], [0.0], [9.0], [-9.0]], dtype)
    y, p = np.array([0, 1, 1, 1, 1]), [1.0, 0.0, 0.5, logistic(9.0), logistic(-9.0)]
    if function == "softmax":
        f = np.hstack([np.zeros_like(f), f])
    for eps in (1e-5, 0.0):
        kind = NegLogLearningLoss(eps, function).build_onnx_function(dtype=dtype)
        scores = kind.loss_scores(y, f)[:, 0]
        gradient = kind.loss_gradient(y, f)[1][:, -1]
        exact = np.log1p(np.exp([0, 0, 0, -9.0, 9.0]))
        exact[:2] = -np.log(eps) if eps else dtype(size)
        rtol = 4e-2 if dtype == np.float16 else 1e-4
        np.testing.assert_allclose(scores, exact, rtol=rtol, atol=1e-7)
        np.testing.assert_allclose(gradient, p - y, rtol=2e-3, atol=RTOL[dtype])


def test_ortvalues():
    """They come out where they go in, mixed with arrays or not."""
    kind = SquareLearningLoss().build_onnx_function(weight_name="w")
    f, y, w = (a.astype(np.float32) for a in (F, Y, ROWS))
    expected = kind.loss_gradient(y, f, w)
    for label, weight in ((as_ortvalue(y), as_ortvalue(w)), (y, w), (Y, as_ortvalue(w[:, None]))):
        found = kind.loss_gradient(label, as_ortvalue(f), weight)
        for a, b in zip(found, expected, strict=True):
            assert isinstance(a, ort.OrtValue)
            np.testing.assert_array_equal(a.numpy(), b)
        scores = kind.loss_scores(label, as_ortvalue(f), weight)
        np.testing.assert_array_equal(scores.numpy(), kind.loss_scores(y, f, w))
    assert isinstance(kind.loss_gradient(as_ortvalue(y), f)[1], np.ndarray)
    vector = kind.loss_gradient(as_ortvalue(y[:, 0]), as_ortvalue(f[:, 0]))[1]
    np.testing.assert_array_equal(vector.numpy(), f[:, 0] - y[:, 0])
    binary = NegLogLearningLoss().build_onnx_function()
    p, t = f[:, :1], BINARY[:, :1].astype(np.int64)
    found = binary.loss_gradient(as_ortvalue(t), as_ortvalue(p))[1].numpy()
    np.testing.assert_array_equal(found, binary.loss_gradient(t, p)[1])
    with pytest.raises(ValueError, match="labels outside 0"):
        binary.loss_gradient(as_ortvalue(t + 1), as_ortvalue(p))


def test_vectors_and_columns_are_the_same():
    kind = SquareLearningLoss().build_onnx_function(weight_name="w", dtype=np.float64)
    y, f = Y[:, 0], F[:, 0]
    expected = (f - y) * ROWS
    for label in (y, y[:, None]):
        for weight in (ROWS, ROWS[:, None]):
            np.testing.assert_allclose(kind.loss_gradient(label, f, weight)[1], expected)
            column = kind.loss_gradient(label, f[:, None], weight)[1]
            np.testing.assert_allclose(column, expected[:, None])
            np.testing.assert_allclose(kind.loss_scores(label, f, weight).shape, (7, 1))


def test_row_weights_that_are_not_given_are_ones():
    kind = SquareLearningLoss().build_onnx_function(weight_name="w", dtype=np.float64)
    np.testing.assert_allclose(kind.loss_gradient(Y, F)[1], F - Y)
    np.testing.assert_allclose(kind.loss_scores(Y, F), ((F - Y) ** 2 / 2).sum(1, keepdims=True))


def test_labels_that_are_ignored():
    y = np.where(CLASSES == 1, -100, CLASSES)
    kind = BaseLearningLoss.select("cross_entropy").build_onnx_function(shape=("N", 3))
    scores = kind.loss_scores(y, F)[:, 0]
    np.testing.assert_array_equal(scores == 0, CLASSES == 1)


def test_images():
    kind = NegLogLearningLoss(0, "softmax")
    kind.build_onnx_function(weight_name="w", dtype=np.float64, shape=("N", 3, "h", "v"))
    f, y = RNG.standard_normal((5, 3, 2, 4)), RNG.integers(0, 3, (5, 2, 4))
    p = np.exp(f) / np.exp(f).sum(axis=1, keepdims=True)
    hit = np.moveaxis(np.eye(3)[y], -1, 1)
    w = ROWS[:5]
    loss, gradient = kind.loss_gradient(y, f, w)
    np.testing.assert_allclose(gradient, (p - hit) * w[:, None, None, None])
    scores = -(np.log(p) * hit).sum(axis=(1, 2, 3)) * w
    np.testing.assert_allclose(kind.loss_scores(y, f, w)[:, 0], scores)
    np.testing.assert_allclose(loss, scores.sum())


@pytest.mark.parametrize(
    ("kind", "expected", "predicted", "weight", "parts"),
    [
        (SquareLearningLoss(), Y, F, ROWS[:6], "'weight' has 6|'predicted' has 7"),
        (SquareLearningLoss(), Y, F, F, "'weight'|(rows,)|(7, 3)"),
        (SquareLearningLoss(), Y[:1], F[:1], ROWS, "'weight' has 7|'predicted' has 1"),
        (SquareLearningLoss(), Y[:6], F, None, "'expected' has 6|'predicted' has 7"),
        (SquareLearningLoss(), Y[:1], F, None, "'expected' has 1|'predicted' has 7"),
        (SquareLearningLoss(), Y[:, :2], F, None, "(rows, 3)|(7, 2)"),
        (SquareLearningLoss(), Y[:, 0], F, None, "(rows, 3)|(7,)"),
        (SquareLearningLoss(), Y.T, F.T[:, :1], None, "(rows, 1)|(3, 7)"),
        (SquareLearningLoss(), Y[0, 0], F, None, "is one number"),
        (SquareLearningLoss(), Y, F[0, 0], None, "'predicted'|()|at least one row"),
        (SquareLearningLoss(), Y[:0], F[:0], None, "'predicted'|at least one row"),
        (SquareLearningLoss(), Y, F[:, :, None], None, "(N, k)|(7, 3, 1)|rank"),
        (SquareLearningLoss(), Y + np.nan, F, None, "NaN|7 of 7"),
        (NegLogLearningLoss(), 2 * BINARY, F, None, "'expected'|0..1"),
        (NegLogLearningLoss(), 2 * BINARY - 1, F, None, "'expected'|0..1"),
        (NegLogLearningLoss(), BINARY + 0.5, F, None, "'expected'|int64"),
        (NegLogLearningLoss(1e-5, "softmax"), CLASSES + 1, F, None, "0..2|3 of 7"),
        (FunctionLearningLoss("hinge"), 2 * BINARY, F, None, "-1 and 1|0 and 1"),
        (FunctionLearningLoss("poisson"), -abs(Y), F, None, "labels|0 or more"),
    ],
)
def test_data_that_do_not_fit(kind, expected, predicted, weight, parts):
    kind.build_onnx_function(weight_name="weight")
    for method in (kind.loss_gradient, kind.loss_scores):
        with pytest.raises(ValueError, match=naming(*parts.split("|"))):
            method(expected, predicted, weight)


def test_what_cannot_be_built():
    kind = SquareLearningLoss()
    with pytest.raises(EvaluationError, match=naming("SquareLearningLoss", "loss_grad_onnx_")):
        kind.loss_gradient(Y, F)
    with pytest.raises(ValueError, match=naming("opset", "13", "14 to")):
        kind.build_onnx_function(13)
    with pytest.raises(ValueError, match="dtype=int64"):
        kind.build_onnx_function(dtype=np.int64)
    for taken in ("X1", "X2", "Y", "Y_grad"):
        with pytest.raises(ValueError, match=f"'{taken}'"):
            kind.build_onnx_function(weight_name=taken)
    with pytest.raises(ProviderError, match="device 'tpu'"):
        kind.build_onnx_function(device="tpu")
    with pytest.raises(ValueError, match=naming("sample weights", "weight_name=")):
        kind.build_onnx_function().loss_gradient(Y, F, ROWS)
    with pytest.raises(ValueError, match=naming("'cross_entropy'", "number", "shape=")):
        BaseLearningLoss.select("cross_entropy").build_onnx_function()
    with pytest.raises(ValueError, match=naming("eps", "0", "0.5")):
        NegLogLearningLoss(0.5).build_onnx_function()
    with pytest.raises(ValueError, match=naming("'softmx'", "'softmax'")):
        NegLogLearningLoss(probability_function="softmx").build_onnx_function()


def test_names():
    names = {
        SquareLearningLoss: "squared_error l2 square_error square SquareLearningLoss",
        AbsoluteLearningLoss: "absolute_error l1 absolute AbsoluteLearningLoss",
        ElasticLearningLoss: "elastic elastic_error ElasticLearningLoss",
        NegLogLearningLoss: "log neglog logloss neg_log NegLogLearningLoss",
        FunctionLearningLoss: "binary_cross_entropy cross_entropy huber poisson hinge",
    }
    for kind, listed in names.items():
        for name in listed.split():
            assert type(BaseLearningLoss.select(name)) is kind
    given = ElasticLearningLoss(1, 2)
    assert BaseLearningLoss.select(given) is given
    assert BaseLearningLoss.select("elastic", l1_weight=1, l2_weight=2) == given
    assert BaseLearningLoss.select(ElasticLearningLoss, l1_weight=1, l2_weight=2) == given
    assert BaseLearningLoss.select("huber", delta=3) == FunctionLearningLoss("huber", {"delta": 3})


@pytest.mark.parametrize(
    ("choice", "options", "parts"),
    [
        ("squared", {}, "loss 'squared'|'square'|'cross_entropy'"),
        (None, {}, "loss None"),
        (3, {}, "loss 3"),
        ("elastic", {"l1": 1}, "loss 'elastic' 'l1'|'l1_weight'"),
        ("square", {"eps": 1}, "loss 'square' 'eps'|none"),
        ("huber", {"eps": 1}, "loss 'huber' 'eps'|'delta'"),
        (SquareLearningLoss(), {"eps": 1}, "instance|['eps']"),
    ],
)
def test_unknown_names(choice, options, parts):
    with pytest.raises(ValueError, match=naming(*parts.split("|"))):
        BaseLearningLoss.select(choice, **options)


def test_as_estimators():
    kind = ElasticLearningLoss(l1_weight=0.1)
    assert kind.get_params() == {"l1_weight": 0.1, "l2_weight": 0.5}
    assert "ElasticLearningLoss(l1_weight=0.1" in repr(kind)
    assert kind == ElasticLearningLoss(0.1)
    assert kind != ElasticLearningLoss(0.2)
    assert SquareLearningLoss() == SquareLearningLoss()
    for other in (ElasticLearningLoss(), AbsoluteLearningLoss(), "square", None):
        assert SquareLearningLoss() != other
    assert hash(kind) == hash(ElasticLearningLoss(0.1))
    kind.set_params(l1_weight=0.3)
    assert kind.l1_weight == 0.3
    kind.build_onnx_function(dtype=np.float64)
    expected = kind.loss_gradient(Y, F)
    again = pickle.loads(pickle.dumps(kind))
    assert again == kind
    np.testing.assert_array_equal(again.loss_gradient(Y, F)[1], expected[1])
    base = pytest.importorskip("sklearn.base")
    for made in (kind, NegLogLearningLoss(), FunctionLearningLoss("huber", {"delta": 2.0})):
        cloned = base.clone(made)
        assert cloned == made
        assert not hasattr(cloned, "loss_grad_onnx_")


def test_building_again_forgets_the_last():
    kind = ElasticLearningLoss(1, 0).build_onnx_function()
    assert kind.loss_gradient(Y, F)[0].dtype == np.float32
    kind.set_params(l1_weight=2).build_onnx_function(dtype=np.float64)
    loss, _ = kind.loss_gradient(Y, F)
    assert loss.dtype == np.float64
    np.testing.assert_allclose(loss, 2 * abs(F - Y).sum())


def pseudo_huber_loss(op, prediction, label):
    d = prediction - label
    return op.Sqrt(1.0 + d * d) - 1.0


class PseudoHuber(BaseLearningLoss):
    def loss(self, op, prediction, label):
        return pseudo_huber_loss(op, prediction, label)


def test_a_loss_of_ones_own():
    root = np.sqrt(1 + (F - Y) ** 2)
    expected = root - 1, (F - Y) / root * ROWS[:, None]
    for kind in (BaseLearningLoss.select(pseudo_huber_loss), PseudoHuber()):
        kind.build_onnx_function(weight_name="w", dtype=np.float64)
        np.testing.assert_allclose(kind.loss_gradient(Y, F, ROWS)[1], expected[1])
        np.testing.assert_allclose(kind.loss_scores(Y, F), expected[0].sum(1, keepdims=True))
        assert pickle.loads(pickle.dumps(kind)) == kind
    free = BaseLearningLoss.select(lambda op, prediction, label: label * label)
    with pytest.raises(ValueError, match=naming("'X2'", "`prediction`")):
        free.build_onnx_function()
    whole = BaseLearningLoss.select(lambda op, f, y: op.ReduceSum(f - y, keepdims=0))
    with pytest.raises(ValueError, match=naming("every element", "row")):
        whole.build_onnx_function()


@pytest.mark.parametrize("name", ["square", "elastic", "log", "huber"])
@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 2, 3)])
def test_inside_of_a_graph_whose_ranks_are_not_known(name, shape):
    """As a trainer uses it: behind nodes of a model, with rows that shapes say nothing of."""
    kind = BaseLearningLoss.select(name)
    x, w = (ir.Value(name=n, type=ir.TensorType(ir.DataType.DOUBLE)) for n in ("x", "w"))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 18}, name="g")
    op = Emit(graph)
    with op:
        prediction = 2.0 * x
        label = kind.label(op, prediction, "label")
        graph.inputs.extend([label, w])
        rows, gradient = kind.rows_and_gradient(op, prediction, label, w)
    graph.outputs[:] = [rows, gradient]
    model = ir.Model(graph, ir_version=8)
    tidy(model)
    session = session_of(to_proto(model))
    f = np.resize(F, shape)
    y = np.resize(BINARY, shape).astype(np.int64 if name == "log" else np.float64)
    rows, gradient = session.run(None, {"x": f / 2, "label": y, "w": ROWS})
    kind.build_onnx_function(weight_name="w", dtype=np.float64, shape=shape)
    np.testing.assert_allclose(rows, kind.loss_scores(y, f, ROWS))
    assert rows.shape == (7, 1)
    if shape == (7,):  # a column of scores and a vector of labels are no (7, 7)
        column = session.run(None, {"x": f[:, None] / 2, "label": y, "w": ROWS[:, None]})
        np.testing.assert_array_equal(column[0], rows)
        np.testing.assert_array_equal(column[1][:, 0], gradient)
    np.testing.assert_allclose(gradient, kind.loss_gradient(y, f, ROWS)[1])
    assert gradient.shape == shape


def test_what_trainers_check():
    f = ir.Value(name="f", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", 3]))
    assert SquareLearningLoss().info(f) == LossInfo()
    assert NegLogLearningLoss().info(f) == LossInfo(classes=2, threshold=0.0)
    assert NegLogLearningLoss(1e-5, "softmax").info(f) == LossInfo(classes=3)
    assert FunctionLearningLoss("cross_entropy").info(f).ignore_index == -100
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", 2]))
    op = Emit(ir.Graph([x], [], nodes=[]))
    for kind, dtype, shape in (
        (SquareLearningLoss(), ir.DataType.FLOAT, ["N", 3]),
        (NegLogLearningLoss(), ir.DataType.INT64, ["N", 3]),
        (NegLogLearningLoss(1e-5, "softmax"), ir.DataType.INT64, ["N"]),
        (FunctionLearningLoss("cross_entropy"), ir.DataType.INT64, ["N"]),
    ):
        label = kind.label(op, f, "label")
        assert (label.dtype, label.shape) == (dtype, ir.Shape(shape))
    integer = ir.Value(name="n", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["N", 3]))
    with pytest.raises(ValueError, match=naming("'n'", "INT64", "floats")):
        NegLogLearningLoss().label(op, integer, "label")
