"""What a loss is applied to: the axis of the classes and the kind of a prediction, by its graph."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrad import Trainer, add_loss_output
from onnxgrad.autodiff.derivative import make_weights_inputs
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.compat import OrtGradientOptimizer
from onnxgrad.compat.learning_losses import FunctionLearningLoss
from onnxgrad.graph import Emit
from onnxgrad.losses import LOSSES, are_probabilities
from onnxgrad.losses.applied_to import decide_options
from onnxgrad.losses.class_axis import class_axis
from onnxgrad.losses.info import loss_info
from onnxgrad.losses.logits import softmax_logits
from onnxgrad.losses.value_range import value_range
from onnxgrad.model.weights import constant_refs, replace_constants
from tests.support.errors import naming
from tests.support.models import initializer_arrays, parse_model
from tests.support.running import in_sweep, run

RNG = np.random.default_rng(0)
WEIGHTS = {
    "w": (3, 7), "b": (7,), "row": (7, 3), "square": (7, 7), "k": (5, 3, 1), "k2": (6, 3, 1, 1),
    "up": (3, 4, 2), "lw": (1, 16, 3), "lr": (1, 16, 4), "table": (9, 7), "one": (1,),
    "scale": (5,), "low": (), "w1": (3, 1),
}  # fmt: skip


def constant_model(body: str, inputs: str = "float[N,T,3] x", outputs: str = "float[A,B,C] y"):
    """Return a model with the constants of `WEIGHTS` that `body` reads."""
    read = re.findall(r"\w+", body)
    arrays = {n: RNG.standard_normal(s).astype("f") for n, s in WEIGHTS.items() if n in read}
    text = f"g ({inputs}) => ({outputs}) {{ {body} }}"
    return parse_model(text, ir_version=8, output_shapes=False, **arrays)


LAST = "float[N,T,3] x"
IMAGE = "float[N,3,H,V] x"
AXES = {
    "MatMul": ("y = MatMul(x, w)", LAST, 2),
    "bias": ("a = MatMul(x, w) y = Add(b, a)", LAST, 2),
    "scale of the data": (
        """t = Transpose <perm = [0, 2, 1]>(x) p = MatMul(x, t) m = ReduceMax <keepdims = 0>(p)
        a = MatMul(x, w) y = Mul(a, m)""", LAST, 2,
    ),
    "Softmax": ("a = MatMul(x, w) y = Softmax <axis = 1>(a)", LAST, 1),
    "LogSoftmax": ("a = MatMul(x, w) y = LogSoftmax(a)", LAST, 2),
    "Transpose": ("a = MatMul(x, w) y = Transpose <perm = [2, 0, 1]>(a)", LAST, 0),
    "Transpose of Conv": (
        "a = Conv(x, k) y = Transpose <perm = [0, 2, 1]>(a)", "float[N,3,T] x", 2,
    ),
    "Conv": ("a = Conv(x, k2) b1 = Relu(a) y = Identity(b1)", IMAGE, 1),
    "ConvTranspose": ("y = ConvTranspose(x, up)", "float[N,3,T] x", 1),
    "Resize": (
        """s = Constant <value_floats = [1.0, 1.0, 2.0, 2.0]>() a = Conv(x, k2)
        y = Resize(a, , s)""", IMAGE, 1,
    ),
    "pooled": ("a = Conv(x, k2) y = MaxPool <kernel_shape = [2, 2]>(a)", IMAGE, 1),
    "normalized": (
        "a = Conv(x, k) y = InstanceNormalization(a, scale, scale)", "float[N,3,T] x", 1,
    ),
    "Unsqueeze": (
        "o = Constant <value_ints = [0, 2]>() a = MatMul(x, w) y = Unsqueeze(a, o)", LAST, 4,
    ),
    "Squeeze": (
        "o = Constant <value_ints = [1]>() a = MatMul(x, w) y = Squeeze(a, o)",
        "float[N,1,T,3] x", 2,
    ),
    "mean": (
        "a = Conv(x, k2) o = Constant <value_ints = [3]>() y = ReduceMean <keepdims = 0>(a, o)",
        IMAGE, 1,
    ),
    "flat and back": (
        """o = Constant <value_ints = [-1, 3]>() f = Reshape(x, o) a = Gemm(f, w)
        p = Constant <value_ints = [2, 6, 7]>() y = Reshape(a, p)""", "float[2,6,3] x", 2,
    ),
    "flat image": (
        """a = Conv(x, k2) o = Constant <value_ints = [0, 0, -1]>() y = Reshape(a, o)""",
        "float[N,3,4,4] x", 1,
    ),
    "recurrent": (
        """o = Constant <value_ints = [1]>() h = LSTM <hidden_size = 4>(x, lw, lr)
        y = Squeeze(h, o)""", LAST, 2,
    ),
    "recurrent, batch first": (
        """h = LSTM <hidden_size = 4>(x, lw, lr) t = Transpose <perm = [2, 0, 1, 3]>(h)
        o = Constant <value_ints = [0, 0, -1]>() y = Reshape(t, o)""", LAST, 2,
    ),
    "Einsum": ('y = Einsum <equation = "ntd,dv->vnt">(x, w)', LAST, 0),
    "embedding": ("y = Gather(table, x)", "int64[N,T] x", 2),
    "last position": (
        "o = Constant <value_int = -1>() a = MatMul(x, w) y = Gather <axis = 1>(a, o)",
        "float[N,T,U,3] x", 2,
    ),
    "some classes": (
        "o = Constant <value_ints = [0, 2]>() a = MatMul(x, w) y = Gather <axis = 2>(a, o)",
        LAST, 2,
    ),
    "concatenated": ("a = MatMul(x, w) c = Neg(a) y = Concat <axis = 1>(a, c)", LAST, 2),
    "two branches": ("a = MatMul(x, w) c = MatMul(x, w) d = Tanh(c) y = Mul(a, d)", LAST, 2),
    "gated": ("a = MatMul(x, w) c = MatMul(x, w1) d = Sigmoid(c) y = Mul(a, d)", LAST, 2),
    "masked": (
        """a = MatMul(x, w) z = Constant <value_float = -1e9>()
        c = Equal(x, z) y0 = Where(m, z, a) y = Cast <to = 1>(y0)""",
        "float[N,T,3] x, bool[N,T,1] m", 2,
    ),
    "residual": ("a = MatMul(x, w) c = MatMul(a, square) y = Add(a, c)", LAST, 2),
    "mask from a shape": (
        """a = MatMul(x, w) s = Shape(x) g = Gather(s, i) z = Constant <value_int = 0>()
        o = Constant <value_int = 1>() r = Range(z, g, o) f = Cast <to = 1>(r)
        u = Constant <value_ints = [0, 2]>() e = Unsqueeze(f, u) y = Add(a, e)
        i = Constant <value_int = 1>()""", LAST, 2,
    ),
    "running sum": (
        "o = Constant <value_int = 2>() a = MatMul(x, w) y = CumSum(a, o)", LAST, 2,
    ),
    "product over the steps": (
        "o = Constant <value_ints = [1]>() a = MatMul(x, w) y = ReduceProd <keepdims = 0>(a, o)",
        "float[N,T,U,3] x", 2,
    ),
    "largest steps": (
        "o = Constant <value_ints = [2]>() a = MatMul(x, w) y, i = TopK <axis = 1>(a, o)", LAST, 2,
    ),
    "of integers": (
        """q, s, z = DynamicQuantizeLinear(x) p, r, o = DynamicQuantizeLinear(w)
        a = MatMulInteger(q, p, z, o) f = Cast <to = 1>(a) y = Mul(f, s)""", LAST, 2,
    ),
    "two axes": ("y = MatMul(x, w)", "float[N,3] x", 1),
}  # fmt: skip
REFUSED = {
    "attention": ("t = Transpose <perm = [0, 2, 1]>(x) y = MatMul(x, t)", LAST, "no matrix"),
    "weights in front": ("y = MatMul(row, x)", "float[N,3,T] x", "(node '"),
    "split classes": (
        "o = Constant <value_ints = [2, 3, 2, 3]>() a = Conv(x, k2) y = Reshape(a, o)",
        "float[1,3,2,3] x", "reshapes (1, 6, 2, 3) to (2, 3, 2, 3)",
    ),
    "detection": (
        """a = Conv(x, k2) t = Transpose <perm = [0, 2, 3, 1]>(a)
        o = Constant <value_ints = [0, -1, 2]>() y = Reshape(t, o)""", "float[N,3,8,8] x",
        "reshapes ('N', 8, 8, 6)",
    ),
    "branches that disagree": (
        "a = MatMul(x, w) c = Conv(x, k) y = Add(a, c)", "float[N,3,3] x", "disagree",
    ),
    "sum over classes": (
        "a = MatMul(x, w) o = Constant <value_ints = [2]>() c = ReduceSum(a, o) y = Add(c, x)",
        LAST, "removes it",
    ),
    "sorted": (
        "a = MatMul(x, w) o = Constant <value_ints = [2]>() y, i = TopK(a, o)", LAST, "TopK",
    ),
    "no operator": ("y = Mul(x, x)", LAST, "linear operator"),
}  # fmt: skip


def prediction_of(body, inputs, trained=True):
    proto = constant_model(body, inputs)
    model = prepare(proto)
    if trained:
        make_weights_inputs(proto, model.graph, None)
    return model.graph.outputs[0]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("case", AXES)
def test_the_axis_of_the_classes(case, trained):
    body, inputs, axis = AXES[case]
    assert class_axis(prediction_of(body, inputs, trained)) == axis


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_decide_the_axis(case):
    body, inputs, reason = REFUSED[case]
    y = prediction_of(body, inputs)
    with pytest.raises(ValueError, match=naming(reason, "'y'", "axis=1")):
        class_axis(y)
    if case != "no operator":
        with pytest.raises(ValueError, match=naming(reason, "'y'")):
            class_axis(y, otherwise=1)


def test_a_prediction_that_no_linear_operator_precedes():
    y = prediction_of("y = Mul(x, x)", LAST)
    assert class_axis(y, otherwise=1) == 1


def test_a_bound_that_is_computed_limits_nothing():
    body = """m = ReduceMax <keepdims = 0>(x) s = Softplus(x) y = Clip(s, zero, m)
        zero = Constant <value_float = 0.0>()"""
    y = prediction_of(body, "float[N,3] x", trained=False)
    assert value_range(y) == (-np.inf, np.inf)


def test_a_constant_node_in_a_file_as_it_is():
    text = """f (float[N,3] x) => (float[N,3] y)
        <int64[1] last = {1}> { t = ReduceSum(x, last) g = Add(t, c) y = Div(x, g)
            c = Constant <value_floats = [1.0, 2.0, 3.0]>() }"""
    model = parse_model(text, opset=20)
    assert value_range(ir.from_proto(model).graph.outputs[0]) == (-np.inf, np.inf)


LOOP = """i = Constant <value_int = 2>() s0 = {}(x)
    y, z = Loop(i, , s0) <body = b (int64 n, bool c, float[N,3] s) =>
        (bool d, float[N,3] t, float[N,3] u) {{ d = Identity(c) t = Sigmoid(s) u = Tanh(s) }}>"""
SCAN = """s0 = {}(x) y, z = Scan <num_scan_inputs = 1, body = b (float[N,3] s, float[3] e) =>
    (float[N,3] t, float[3] u) {{ t = Sigmoid(s) u = Tanh(e) }}>(s0, x)"""
BRANCHES = """s = {}(x) z = Tanh(x)
    y = If(chosen) <then_branch = a () => (float[N,3] r) {{ r = Sigmoid(x) }},
        else_branch = b () => (float[N,3] q) {{ q = Identity(s) }}>"""


@pytest.mark.parametrize("text", [LOOP, SCAN, BRANCHES])
def test_the_range_of_what_bodies_compute(text):
    """A state may be its initial value, if no step is taken."""
    head = "g (float[N,3] x, bool chosen) => (float[N,3] y, float[A,B,C] z)"
    for function, high in (("Sigmoid", 1), ("Softplus", np.inf)):
        body = text.format(function)
        model = parse_model(f"{head} {{ {body} }}", opset=20, output_shapes=False)
        y, z = prepare(model).graph.outputs
        assert (value_range(y), value_range(z)) == ((0, high), (-1, 1))


def test_a_deep_network():
    """Hundreds of residual branches exceed no limit of Python."""
    lines = ["a0 = MatMul(x, w)"]
    lines += [f"c{i} = MatMul(a{i}, square) a{i + 1} = Add(a{i}, c{i})" for i in range(700)]
    y = prediction_of(" ".join(lines) + " y = Identity(a700)", LAST, trained=False)
    assert class_axis(y) == 2
    assert value_range(y) == (-np.inf, np.inf)


NUMBERS = """half = Constant <value_float = 0.5>() one = Constant <value_float = 1.0>()
    six = Constant <value_float = 6.0>() three = Constant <value_float = 3.0>()
    zero = Constant <value_float = 0.0>() last = Constant <value_ints = [1]>() """
KINDS = {
    "scores": (
        "y = MatMul(x, w)", "a = MatMul(x, w) y = Relu(a)", "a = MatMul(x, w) y = Tanh(a)",
        "s = Sigmoid(x) y = Mul(x, s)", "s = Softmax(x) y = MatMul(s, w)", "y = LogSoftmax(x)",
        "s = Softmax(x) y = Log(s)", "y = Clip(x, zero, six)", "s = Sigmoid(x) y = Mul(s, six)",
        "s = Sigmoid(x) y = Div(s, half)", "s = Sigmoid(x) y = Mul(s, b)",
    ),
    "probabilities": (
        "y = Softmax(x)", "s = Softmax(x) y = Transpose(s)",
        "s = Softmax(x) y = Clip(s, zero, one)",
        "s = Softmax(x) d = Softmax(x) a = Add(s, d) y = Mul(a, half)",
        "s = Softmax(x) d = Softmax(x) y = Mean(s, d)", "y = Clip(x, zero, one)",
        "s = Softmax(x) l = Log(s) y = Exp(l)",
        "s = Sigmoid(x) d = Sub(one, s) y = Concat <axis = 1>(d, s)",
        "s = Sigmoid(x) t = ReduceSum(s, last) y = Div(s, t)",
        "s = Sigmoid(x) t = ReduceL1(s, last) e = Equal(t, zero) g = Where(e, one, t) "
        "y = Div(s, g)",
        "a = Relu(x) t = ReduceSum(a, last) g = Add(t, half) y = Div(a, g)",
        "a = Add(x, three) c = Clip(a, zero, six) y = Div(c, six)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "body"), [(kind, body) for kind, bodies in KINDS.items() for body in bodies]
)
def test_scores_and_probabilities(kind, body):
    y = prediction_of(NUMBERS + body, "float[N,3] x", trained=False)
    spec = LOSSES["cross_entropy"].with_options({"from_logits": None, "axis": 1})
    assert decide_options(spec, y).options["from_logits"] == (kind == "scores")


def test_a_sum_of_rows_beside_columns_makes_no_probabilities():
    """The sums of rows divide the columns."""
    body = """s = Sigmoid(x) t = ReduceSum <keepdims = 0>(s, last) u = Unsqueeze(t, first)
        y = Div(s, u) first = Constant <value_ints = [0]>() """
    y = prediction_of(NUMBERS + body, "float[3,3] x", trained=False)
    assert value_range(y) == (-np.inf, np.inf)


WRITTEN = {  # a softmax over the last axis, of the scores s = x w
    "cast": "p = Softmax(s) y = Cast <to = 11>(p)",
    "squeezed": "u = Unsqueeze(s, last) p = Softmax <axis = 1>(u) y = Squeeze(p, last2)",
    "reshaped": "p = Softmax(s) y = Reshape(p, rows)",
    "expanded": "p = Softmax(s) shape = Shape(s) y = Expand(p, shape)",
    "permuted": "p = Softmax(s) y = Gather <axis = 1>(p, order)",
    "exp, sum, div": "e = Exp(s) t = ReduceSum(e, last1) y = Div(e, t)",
    "stable": """m = ReduceMax(s, last1) c = Sub(s, m) e = Exp(c)
        t0 = ReduceSum <keepdims = 0>(e, last1) t = Reshape(t0, column) y = Div(e, t)""",
    "reciprocal": "e = Exp(s) t = ReduceSum(e, last1) r = Reciprocal(t) y = Mul(r, e)",
    "logsumexp": "l = ReduceLogSumExp(s, last1) d = Sub(s, l) y = Exp(d)",
    "logarithm": "p = Softmax(s) y = Log(p)",
    "sigmoids": "g = Sigmoid(s) t = ReduceSum(g, last1) y = Div(g, t)",
}  # fmt: skip
SIGMOIDS = {
    "cast": "p = Sigmoid(s) y = Cast <to = 11>(p)",
    "reciprocal": "n = Neg(s) e = Exp(n) d = Add(unit, e) y = Reciprocal(d)",
    "quotient": "n = Mul(s, minus) e = Exp(n) d = Add(e, unit) y = Div(unit, d)",
    "two powers": "e = Exp(s) d = Add(e, unit) y = Div(e, d)",
    "stable": """n = Neg(s) e = Exp(n) d = Add(unit, e) a = Div(unit, d) f = Exp(s) g = Add(unit, f)
        b0 = Div(f, g) c = GreaterOrEqual(s, nil) y = Where(c, a, b0)""",
    "complement": "n = Neg(s) p = Sigmoid(n) y = Sub(unit, p)",
    "expanded": "p = Sigmoid(s) shape = Shape(s) y = Expand(p, shape)",
}  # fmt: skip
CONSTANTS = """unit = Constant <value_float = 1.0>() minus = Constant <value_float = -1.0>()
    nil = Constant <value_float = 0.0>() last1 = Constant <value_ints = [1]>()
    last = Constant <value_ints = [2]>() last2 = Constant <value_ints = [2]>()
    rows = Constant <value_ints = [-1, 7]>() column = Constant <value_ints = [-1, 1]>()
    order = Constant <value_ints = [1, 0, 2, 3, 4, 5, 6]>() s = MatMul(x, w) """


@pytest.mark.parametrize(
    ("loss", "form"),
    [("cross_entropy", f) for f in WRITTEN] + [("binary_cross_entropy", f) for f in SIGMOIDS],
)
def test_large_scores_have_their_gradient(loss, form):
    """Where probabilities saturate, an SGD step is still that of the scores, in float64."""
    torch = pytest.importorskip("torch")
    multi = loss == "cross_entropy"
    body = CONSTANTS + (WRITTEN if multi else SIGMOIDS)[form]
    dtype = "double" if form == "cast" else "float"
    proto = constant_model(body, "float[N,3] x", f"{dtype}[N,7] y")
    w = 60 * RNG.standard_normal((3, 7)).astype(np.float32)
    x = RNG.standard_normal((16, 3)).astype(np.float32)
    y = RNG.integers(0, 7, 16) if multi else RNG.integers(0, 2, (16, 7)).astype(np.float32)
    trainer = Trainer(replace_constants(proto, {"w": w}), loss, optimizer="sgd", learning_rate=0.1)
    found = trainer.evaluate(x, y)["loss"]
    trainer.fit(x, y, epochs=1, batch_size=16)
    w64 = torch.tensor(w, dtype=torch.float64, requires_grad=True)
    s = torch.tensor(x, dtype=torch.float64) @ w64
    if form == "permuted":
        s = s[:, [1, 0, 2, 3, 4, 5, 6]]
    if form == "sigmoids":
        s = torch.nn.functional.logsigmoid(s)
    if multi:
        expected = torch.nn.functional.cross_entropy(s, torch.tensor(y))
    else:
        labels = torch.tensor(y, dtype=torch.float64)
        expected = torch.nn.functional.binary_cross_entropy_with_logits(s, labels)
    assert found == pytest.approx(expected.item(), rel=1e-4)
    expected.backward()
    (new,) = (r.array() for r in constant_refs(trainer.model) if r.name == "w")
    np.testing.assert_allclose(new, (w64 - 0.1 * w64.grad).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("joined", ["d, p", "p, d"])
def test_two_columns_of_a_sigmoid_are_the_softmax_of_its_score(joined):
    body = f"""v = MatMul(x, w1) p = Sigmoid(v) d = Sub(unit, p) y = Concat <axis = 1>({joined})
        unit = Constant <value_float = 1.0>()"""
    w = np.float32([[60.0], [0.0], [0.0]])
    proto = replace_constants(constant_model(body, "float[N,3] x", "float[N,2] y"), {"w1": w})
    x = np.eye(3, dtype=np.float32) - 0.25
    found = Trainer(proto, "cross_entropy").evaluate(x, np.ones(3, np.int64))["loss"]
    sign = -1 if joined == "d, p" else 1
    assert found == pytest.approx(np.logaddexp(0, sign * (x @ w)).mean(), rel=1e-5)


def test_shares_that_are_no_probabilities():
    """A sum over another axis, some of the classes, and sigmoids that are not normalized."""
    for body in (
        "e = Exp(s) t = ReduceSum(e, zeroth) y = Div(e, t) zeroth = Constant <value_ints = [0]>()",
        "p = Softmax(s) y = Slice(p, last1, last2, last1)",
        "p = Softmax(s) f = Constant <value_ints = [0]>() y = Slice(p, f, last2, last1)",
        "p = Softmax(s) i = ArgMax <axis = 0>(p) y = GatherElements <axis = 0>(p, i)",
        "p = Softmax <axis = 0>(s) y = Identity(p)",
    ):
        y = prediction_of(CONSTANTS + body, "float[N,3] x")
        op = Emit(y.producer().graph)
        assert softmax_logits(op, y, 1) is None
    y = prediction_of(CONSTANTS + SIGMOIDS["quotient"], "float[N,3] x")
    spec = LOSSES["cross_entropy"].with_options({"from_logits": None, "axis": 1})
    with pytest.raises(ValueError, match=naming("Sigmoid", "sum")):
        decide_options(spec, y)


CLIPPED = {  # what holds the clipped scores s, and the operator that clips them
    "a line": ("c = Clip(s, minus, unit) a = Add(unit, c) y = Mul(a, half)", "Clip"),
    "negated": ("c = Clip(s, minus, nil) y = Neg(c)", "Clip"),
    "hard sigmoid": ("h = HardSigmoid(s) y = Sub(unit, h)", "HardSigmoid"),
    "shares": ("c = Clip(s, nil, unit) t = ReduceSum(c, last1) y = Div(c, t)", "Clip"),
    "shares or one": (
        """c = Clip(s, nil, unit) t = ReduceSum(c, last1) e = Equal(t, nil) f = Cast <to = 1>(e)
        p = Add(c, f) u = Add(t, f) y = Div(p, u)""", "Clip",
    ),
    "bounded": ("a = Tanh(s) d0 = Add(a, unit) d = Mul(d0, half) y = Clip(d, nil, unit)", None),
    "not clipped": ("a = Tanh(s) d = Add(a, unit) y = Mul(d, half)", None),
}  # fmt: skip


@pytest.mark.parametrize("form", CLIPPED)
def test_clipped_scores_are_named(form, caplog):
    body, clip = CLIPPED[form]
    body += " half = Constant <value_float = 0.5>()"
    loss = "cross_entropy" if "shares" in form else "binary_cross_entropy"
    labels = np.zeros(2, np.int64) if "shares" in form else np.zeros((2, 7), np.float32)
    proto = constant_model(CONSTANTS + body, "float[N,3] x", "float[N,7] y")
    proto = replace_constants(proto, {"w": np.ones((3, 7), np.float32)})
    Trainer(proto, loss).evaluate(np.ones((2, 3), np.float32), labels)
    warned = {r.message for r in caplog.records if r.levelname == "WARNING"}
    assert len(warned) == (clip is not None)
    assert all(f"by {clip}" in text and "scores 's'" in text for text in warned)


def test_a_mask_of_integers_is_no_vote(caplog):
    """Added to scores, it masks them: comparisons and labels alone make votes."""
    body = """f = Cast <to = 1>(m) d = Sub(unit, f) n = Mul(d, masked) y = Add(s, n)
        masked = Constant <value_float = -1e4>()"""
    proto = constant_model(CONSTANTS + body, "float[N,3] x, int64[N,7] m", "float[N,7] y")
    proto = replace_constants(proto, {"w": np.zeros((3, 7), np.float32)})
    mask = np.int64([[1, 1, 0, 0, 0, 0, 0]] * 4)
    X = {"x": np.ones((4, 3), np.float32), "m": mask}
    found = Trainer(proto, "cross_entropy").evaluate(X, np.zeros(4, np.int64))["loss"]
    assert found == pytest.approx(np.log(2), rel=1e-5)
    assert "votes" not in caplog.text


def test_plain_options_stay():
    y = prediction_of("y = MatMul(x, w)", LAST)
    spec = LOSSES["cross_entropy"].with_options({"axis": -3, "from_logits": False})
    assert decide_options(spec, y).options == {"axis": 0, "from_logits": False}
    spec = LOSSES["huber"].with_options({"delta": 2.0})
    assert decide_options(spec, y) == spec


# -- add_loss_output and the trainers --------------------------------------------------------------


@pytest.mark.parametrize("ignored", [True, in_sweep(False)])
@pytest.mark.parametrize("options", [{}, {"axis": -1}, {"shift": True}, {"label_smoothing": 0.1}])
def test_a_loss_of_tokens_trains(ignored, options):
    """As PyTorch: the sum over the tokens of a batch, divided by its rows."""
    torch = pytest.importorskip("torch")
    proto = constant_model("y = MatMul(x, w)", LAST)
    x, y = RNG.standard_normal((8, 5, 3)).astype(np.float32), RNG.integers(0, 7, (8, 5))
    if ignored:
        y[RNG.random((8, 5)) < 0.3] = -100
    model = add_loss_output(proto, "cross_entropy", **options)
    info = loss_info(model)
    assert (info.axis, info.classes) == (2, 7)
    fitted = OrtGradientOptimizer(model, ["w"], batch_size=8, max_iter=3, learning_rate=0.1)
    fitted.learning_rate.learning_rate = "constant"
    losses = fitted.fit(x, y).train_losses_
    w = initializer_arrays(proto)["w"]
    w, x, y = torch.tensor(w, requires_grad=True), torch.tensor(x), torch.tensor(y)
    smoothing = options.get("label_smoothing", 0.0)
    for loss in losses:
        f = x @ w
        f, labels = (f[:, :-1], y[:, 1:]) if "shift" in options else (f, y)
        summed = {"reduction": "sum", "label_smoothing": smoothing}
        expected = torch.nn.functional.cross_entropy(f.movedim(2, 1), labels, **summed) / 8
        (gradient,) = torch.autograd.grad(expected, w)
        np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
        w = (w - 0.1 * gradient).detach().requires_grad_()
    np.testing.assert_allclose(fitted.trained_coef_["w"], w.detach().numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("classes", ["7", "V"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "ignore_index": 1}])
@pytest.mark.parametrize("weights", [None, {2: 3.0}, np.arange(1, 8) / 4])
def test_add_loss_output_of_unknown_classes(classes, options, weights):
    torch = pytest.importorskip("torch")
    shape = f"double[N,T,{classes}]"
    proto = parse_model(f"g ({shape} x) => ({shape} y) {{ y = Identity(x) }}")
    x, y = RNG.standard_normal((4, 5, 7)), RNG.integers(0, 7, (4, 5))
    vector = np.ones(7)
    if weights is not None:
        vector = weights if isinstance(weights, np.ndarray) else np.where(np.arange(7) == 2, 3.0, 1)
    model = add_loss_output(proto, "cross_entropy", axis=-1, class_weight=weights, **options)
    scores, labels = torch.tensor(x).movedim(2, 1), torch.tensor(y)
    options = {"weight": torch.tensor(vector), "reduction": "sum", **options}
    expected = torch.nn.functional.cross_entropy(scores, labels, **options)
    loss, _ = run(model, x=x, label=y)
    np.testing.assert_allclose(loss, [[expected.item()]], rtol=1e-10)


@pytest.mark.parametrize(("node", "scores"), [("Softmax", False), ("Identity", True)])
def test_add_loss_output_decides_from_logits_if_asked(node, scores):
    body = f"a = MatMul(x, w) y = {node}(a)"
    proto = constant_model(body, "float[N,3] x")
    chosen, plain = (add_loss_output(proto, "cross_entropy", from_logits=f) for f in (None, scores))
    assert chosen.SerializeToString() == plain.SerializeToString()


def test_a_learning_loss_outside_of_the_model():
    y = prediction_of("y = MatMul(x, w)", LAST)
    assert FunctionLearningLoss("cross_entropy").info(y).axis == 2
    assert FunctionLearningLoss("cross_entropy", {"axis": 1}).info(y).axis is None


def test_an_axis_that_is_not_decided_is_asked_for():
    proto = constant_model("t = Transpose <perm = [0, 2, 1]>(x) y = MatMul(x, t)", LAST)
    with pytest.raises(ValueError, match=naming("axis", "'y'", "axis=")):
        add_loss_output(proto, "cross_entropy")
    assert loss_info(add_loss_output(proto, "cross_entropy", axis=2)).axis == 2


def test_probabilities_that_are_moved_into_pixels():
    y = prediction_of(
        "s = Sigmoid(x) y = DepthToSpace <blocksize = 2>(s)", "float[N,4,H,W] x", False
    )
    spec = LOSSES["binary_cross_entropy"].with_options({"from_logits": None})
    assert value_range(y) == (0, 1)
    assert not decide_options(spec, y).options["from_logits"]


CAPTURED = """p = Sigmoid(x)  y = If (c) <then_branch = t () => (float[N,3] a) { a = Identity(p) },
    else_branch = e () => (float[N,3] b) { b = If (c) <
        then_branch = f () => (float[N,3] d) { d = Identity(p) },
        else_branch = g () => (float[N,3] h) { h = Mul(p, SECOND) }> }>"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (CAPTURED.replace("SECOND", "p"), True),
        (CAPTURED.replace("SECOND", "x"), False),
        ("e = Exp(x)  i = Add(e, one)  y = Div(e, i)", True),
        ("y = HardSigmoid(x)", True),
        ("p = Sigmoid(x)  y = Add(p, one)", False),
    ],
)
def test_probabilities_of_a_model(body, expected):
    made = parse_model(f"f (float[N,3] x, bool c) => (float[N,3] y) {{ {body} }}", one=1.0)
    assert are_probabilities(made, "y") == expected
    with pytest.raises(ValueError, match=naming("output 'x'", "'y'")):
        are_probabilities(made, "x")
