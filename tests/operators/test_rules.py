"""The table of rules against what others say, and, in the sweep, its rows singly in every way.

All rows are checked once by `test_row_packs.py`.
"""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest

from onnxgrad import DerivativeOptions, NoGradientRule, check_gradient, onnx_derivative
from onnxgrad.operators import OPERATORS
from tests.support.cases import FLOAT, Row, row_feed, row_model, run_in_dtype, typed
from tests.support.convolution_cases import CONVOLUTIONS
from tests.support.errors import naming
from tests.support.models import operator_names, parse_model
from tests.support.row_packs import operators_of
from tests.support.running import run, session_of
from tests.support.table import ROWS

FLOAT16, BFLOAT16 = onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16


def is_refused(needs: str, known: str) -> bool:
    return needs != "" and (known == "nothing" or (needs == "lengths" and known != "lengths"))


def rows_in_all_ways() -> list:
    """Return every row with every way to know its shapes."""
    known = ["lengths", "symbols", "rank", "nothing"]
    pairs = [(row, way) for row in ROWS for way in known + ["others"] * (len(row.shapes) > 1)]
    return [pytest.param(*pair, id=f"{pair[0].id}-{pair[1]}") for pair in pairs]


@pytest.mark.sweep
@pytest.mark.parametrize(("row", "known"), rows_in_all_ways())
def test_gradient(row, known):
    made = row_model(row, known)
    if is_refused(row.needs, known):
        with pytest.raises(NoGradientRule, match=r"rank of .* is (not known|unknown)"):
            onnx_derivative(made)
        return
    report = check_gradient(made, feed=row_feed(row), order=2)
    assert report.ok, str(report)


def in_dtype(model: onnx.ModelProto, dtype: int) -> onnx.ModelProto:
    """Return the model with its float32 inputs and outputs in another dtype, if operators know it.

    Otherwise the test is skipped.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for v in (*made.graph.input, *made.graph.output):
        if v.type.tensor_type.elem_type == FLOAT:
            v.type.tensor_type.elem_type = dtype
    try:
        onnx.shape_inference.infer_shapes(made, check_type=True, strict_mode=True)
    except onnx.shape_inference.InferenceError:
        pytest.skip("its operators are not for this dtype")
    return made


OF_ONE_DTYPE = [r for r in ROWS if r.runs and not re.search("Cast|value_float|= float", r.body)]


@pytest.mark.sweep
@pytest.mark.parametrize("row", OF_ONE_DTYPE, ids=lambda row: row.id)
def test_float16_is_as_float32(row):
    made, arrays = row_model(row), row_feed(row)
    in_half = in_dtype(made, FLOAT16)
    for name, y in zip(row.outputs, run_in_dtype(made, arrays), strict=True):
        arrays[f"{name}_grad"] = np.asarray(np.random.default_rng(1).standard_normal(y.shape))
    found = run_in_dtype(onnx_derivative(in_half, weights=[]), arrays)
    expected = run_in_dtype(onnx_derivative(made, weights=[]), arrays)
    for half, single in zip(found, expected, strict=True):
        assert half.dtype == np.float16
        np.testing.assert_allclose(half, single, rtol=0.05, atol=0.05)


@pytest.mark.sweep
@pytest.mark.parametrize("row", OF_ONE_DTYPE, ids=lambda row: row.id)
def test_bfloat16_stays(row):
    made = onnx_derivative(in_dtype(row_model(row), BFLOAT16), weights=[])
    onnx.shape_inference.infer_shapes(made, check_type=True)
    assert {y.type.tensor_type.elem_type for y in made.graph.output} == {BFLOAT16}


def test_every_rule_has_a_row():
    rows = [row.body for row in ROWS] + [case.node for case in CONVOLUTIONS]
    tested = set().union(*map(operators_of, rows))
    assert {
        name for (domain, name), operator in OPERATORS.items() if operator.rule and not domain
    } <= tested


ONES = DerivativeOptions.KeepOutputs | DerivativeOptions.FillGrad


def slopes_at(node: str, *points) -> list[np.ndarray]:
    """Return the gradient by each input x0, x1, ... of a node, for ones arriving."""
    arrays = [np.array(a, np.float32) for a in points]
    given = ", ".join(f"{typed('float', a.shape)} x{i}" for i, a in enumerate(arrays))
    node, *constants = node.split("  ")
    weights = [re.sub(r"\{(.*)\}", r"Constant<value_float=\1>()", c) for c in constants]
    body = "  ".join([*weights, f"y = {node}"])
    made = parse_model(f"g ({given}) => (float y) {{ {body} }}", opset=20, output_shapes=False)
    feed = {f"x{i}": a for i, a in enumerate(arrays)}
    return run(onnx_derivative(made, options=ONES), feed)[:-1]


# what PyTorch gives at the points where a derivative does not exist
KINKS = [
    ("Relu(x0)", lambda t, x: t.relu(x), [[-1, 0, 1]]),
    ("Abs(x0)", lambda t, x: x.abs(), [[-1, 0, 1]]),
    ("LeakyRelu<alpha=0.1>(x0)", lambda t, x: t.nn.functional.leaky_relu(x, 0.1), [[-1, 0, 1]]),
    ("PRelu(x0, x1)", lambda t, x, s: t.nn.functional.prelu(x, s), [[[-1, 0, 1]], [0.3]]),
    ("Elu(x0)", lambda t, x: t.nn.functional.elu(x), [[-1, 0, 1]]),
    ("Selu(x0)", lambda t, x: t.nn.functional.selu(x), [[-1, 0, 1]]),
    ("Celu<alpha=2.0>(x0)", lambda t, x: t.nn.functional.celu(x, 2.0), [[-1, 0, 1]]),
    (
        "HardSigmoid<alpha=0.16666667>(x0)",
        lambda t, x: t.nn.functional.hardsigmoid(x),
        [[-3, 0, 3]],
    ),
    ("HardSwish(x0)", lambda t, x: t.nn.functional.hardswish(x), [[-4, -3, 0, 3, 4]]),
    ("Shrink<lambd=0.5>(x0)", lambda t, x: t.nn.functional.hardshrink(x), [[-0.5, 0, 0.5, 1]]),
    (
        "Shrink<lambd=0.5, bias=0.5>(x0)",
        lambda t, x: t.nn.functional.softshrink(x),
        [[-0.5, 0.5, 1]],
    ),
    ("ThresholdedRelu(x0)", lambda t, x: t.nn.functional.threshold(x, 1.0, 0.0), [[0, 1, 2]]),
    ("Max(x0, x1)", lambda t, a, b: t.maximum(a, b), [[1, 2, 3], [1, 3, 2]]),
    ("Min(x0, x1)", lambda t, a, b: t.minimum(a, b), [[1, 2, 3], [1, 3, 2]]),
    ("ReduceMax<keepdims=0>(x0)", lambda t, x: x.amax(), [[1, 2, 2, 2]]),
    ("ReduceMin<keepdims=0>(x0)", lambda t, x: x.amin(), [[1, 1, 2, 2]]),
    ("GlobalMaxPool(x0)", lambda t, x: x.amax(-1, keepdim=True), [[[[1, 2, 2, 2]]]]),
    ("ReduceL2<keepdims=0>(x0)", lambda t, x: x.norm(), [[0, 0]]),
    ("ReduceL1<keepdims=0>(x0)", lambda t, x: x.abs().sum(), [[0, -2]]),
    ("ReduceProd<keepdims=0>(x0)", lambda t, x: x.prod(), [[2, 0, 3]]),
    ("ReduceProd<keepdims=0>(x0)", lambda t, x: x.prod(), [[0, 0, 3]]),
    ("ReduceLogSumExp<keepdims=0>(x0)", lambda t, x: x.logsumexp(0), [[1, 1, -np.inf]]),
    ("ReduceLogSumExp<keepdims=0>(x0)", lambda t, x: x.logsumexp(0), [[-np.inf, -np.inf]]),
    ("Softsign(x0)", lambda t, x: t.nn.functional.softsign(x), [[-1, 0, 1]]),
    ("Reciprocal(x0)", lambda t, x: 1 / x, [[0, -0.0, 1]]),
    ("Log(x0)", lambda t, x: x.log(), [[0, 1]]),
    ("Acos(x0)", lambda t, x: x.acos(), [[-1, 0, 1]]),
    ("Acosh(x0)", lambda t, x: x.acosh(), [[1, 2]]),
    ("Tanh(x0)", lambda t, x: x.tanh(), [[-200, 0, 200]]),
    ("Softplus(x0)", lambda t, x: t.nn.functional.softplus(x), [[-200, 0, 200]]),
    ("Mish(x0)", lambda t, x: t.nn.functional.mish(x), [[-200, 0, 200]]),
    ("Gelu(x0)", lambda t, x: t.nn.functional.gelu(x), [[-200, 0, 200]]),
    ("LogSoftmax(x0)", lambda t, x: x.log_softmax(0), [[-200, 0, 200]]),
    ("Div(x0, x1)", lambda t, a, b: a / b, [[0, 1], [0, 0]]),
    ("Sqrt(x0)", lambda t, x: x.sqrt(), [[0, 4]]),
    ("Pow(x0, x1)", lambda t, a, b: a.pow(b), [[0, 0, 0, 2], [1, 2, 0, 0]]),
    ("Clip(x0, x1, x2)", lambda t, x, a, b: x.clamp(a, b), [[-1, 0, 1, 2], 0.0, 1.0]),
    ("Clip(x0, x1, x2)", lambda t, x, a, b: x.clamp(a, b), [[-1, 0, 1, 2], 1.0, 0.0]),
    # of constants, from which other nodes follow
    ("Pow(x0, c)  c = {0.0}", lambda t, x: x.pow(0.0), [[0, 2]]),
    ("Pow(x0, c)  c = {3.0}", lambda t, x: x.pow(3.0), [[0, -2]]),
    ("Clip(x0, c, d)  c = {0.0}  d = {1.0}", lambda t, x: x.clamp(0, 1), [[-1, 0, 1, 2]]),
    ("Clip(x0, c, d)  c = {2.0}  d = {1.0}", lambda t, x: x.clamp(2, 1), [[0, 1, 1.5, 2, 3]]),
]


@pytest.mark.parametrize(("node", "function", "points"), KINKS, ids=[k[0] for k in KINKS])
def test_kinks_are_those_of_torch(node, function, points):
    torch = pytest.importorskip("torch")
    given = [torch.tensor(p, dtype=torch.float32, requires_grad=True) for p in points]
    function(torch, *given).sum().backward()
    for found, expected in zip(slopes_at(node, *points), given, strict=True):
        np.testing.assert_allclose(found, expected.grad.numpy(), rtol=1e-6)


BOOLEAN = "b = {}  z = Cast<to=1>(b)"  # or an integer
ONE_OF_TWO = "p = Cast<to=9>(x)  b = {}(p, p)  z = Cast<to=1>(b)"
QUANTIZED = """m = ReduceMax<keepdims=0>(x)  s = Exp(m)  o = Constant<value = int8 {{3}}>()
    r = Constant<value_ints=[2, 3]>()  e = QuantizeLinear(x, s, o)  q = Reshape(e, r)
    t = Transpose(q)  b = {}  z = Cast<to=1>(b)"""
TIMES_ZERO = "{}  o = Constant<value_float=0.0>()  f = Cast<to=1>(r)  z = Mul(f, o)"
FLAT = {
    **{name: f"z = {name}(x)" for name in "Ceil Floor Round Sign Hardmax EyeLike".split()},
    **{name: BOOLEAN.format(f"{name}(x)") for name in "IsNaN IsInf Shape Size".split()},
    **{name: BOOLEAN.format(f"{name}<axis=1>(x)") for name in ("ArgMax", "ArgMin")},
    **{
        name: BOOLEAN.format(f"{name}(x, x)")
        for name in "Equal Greater GreaterOrEqual Less LessOrEqual".split()
    },
    **{name: ONE_OF_TWO.format(name) for name in "And Or Xor".split()},
    "Not": "p = Cast<to=9>(x)  b = Not(p)  z = Cast<to=1>(b)",
    "NonZero": BOOLEAN.format("NonZero(x)"),
    "ConstantOfShape": "k = Shape(x)  z = ConstantOfShape<value = float[1] {2}>(k)",
    "RandomNormalLike": TIMES_ZERO.format("r = RandomNormalLike(x)"),
    "RandomUniformLike": TIMES_ZERO.format("r = RandomUniformLike(x)"),
    "Bernoulli": TIMES_ZERO.format("q = Sigmoid(x)  r = Bernoulli(q)"),
    "Multinomial": TIMES_ZERO.format("r = Multinomial(x)"),
    "QuantizeLinear": """s = ReduceMax<keepdims=0>(x)  t = Exp(s)
        b = QuantizeLinear(x, t)  z = Cast<to=1>(b)""",
    "NonMaxSuppression": """i = Constant<value_ints=[1, 1, 6]>()  s = Reshape(x, i)
        j = Constant<value_ints=[1, 6, 1]>()  c = Reshape(x, j)  d = Concat<axis=2>(c, c, c, c)
        b = NonMaxSuppression(d, s)  z = Cast<to=1>(b)""",
    "MelWeightMatrix": """n = Constant<value_int=8>()  r = Constant<value_int=64>()
        s = ReduceMax<keepdims=0>(x)  l = Sigmoid(s)  h = Constant<value_float=20.0>()
        z = MelWeightMatrix(n, n, r, l, h)""",
    "SequenceLength": BOOLEAN.format("SequenceLength(s)").replace(
        "b =", "s = SplitToSequence(x)  b ="
    ),
    "OptionalHasElement": BOOLEAN.format("OptionalHasElement(x)"),
    "BitCast": TIMES_ZERO.format("r = BitCast<to=6>(x)"),
}
PRODUCTS_OF_QUANTIZED = {
    "QLinearMatMul": QUANTIZED.format("QLinearMatMul(q, s, o, t, s, o, s, o)"),
    "QLinearConv": QUANTIZED.format("QLinearConv(q, s, o, t, s, o, s, o)").replace(
        "[2, 3]", "[1, 2, 3]"
    ),
}
WITHOUT_FLOATS = set(
    """Constant BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor BlackmanWindow ConvInteger
    HammingWindow HannWindow ImageDecoder MatMulInteger RandomNormal RandomUniform RegexFullMatch
    SequenceEmpty StringConcat StringNormalizer StringSplit TfIdfVectorizer""".split()
)


@pytest.mark.parametrize("name", FLAT)
def test_what_has_no_gradient_adds_none(name):
    body = f"{FLAT[name]}  total = ReduceSum<keepdims=0>(z)  y = Mul(x, total)"
    row = Row(name, body, {"x": (2, 3)}, opset=26 if name == "BitCast" else 20)
    report = check_gradient(row_model(row), feed=row_feed(row))
    assert report.ok, str(report)


@pytest.mark.parametrize("name", PRODUCTS_OF_QUANTIZED)
def test_products_of_quantized_are_refused(name):
    body = f"{PRODUCTS_OF_QUANTIZED[name]}  total = ReduceSum<keepdims=0>(z)  y = Mul(x, total)"
    row = Row(name, body, {"x": (2, 3)})
    with pytest.raises(NoGradientRule, match=naming(name, "quantized")):
        check_gradient(row_model(row), feed=row_feed(row))


def test_every_operator_without_gradient_has_a_case():
    cases = {*FLAT, *PRODUCTS_OF_QUANTIZED, *WITHOUT_FLOATS}
    assert {
        name for (domain, name), one in OPERATORS.items() if one.no_gradient and not domain
    } == cases
    for name in WITHOUT_FLOATS:
        kinds = {t for x in onnx.defs.get_schema(name, 26).inputs for t in x.types}
        assert kinds.isdisjoint({"tensor(float)", "tensor(double)"}), name


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("y = acme.Foo(x)", ["acme::Foo", "'y'", "@rule"]),
        ("h = Exp(x)  d = acme.Foo(h)  y = Mul(d, d)", ["x -> h -> [Foo]"]),
    ],
)
def test_refusals_name_node_and_path(body, named):
    text = f"g (float[2, 2] x) => (float y) {{ {body} }}"
    made = parse_model(text, opset=20, domains={"acme": 1}, output_shapes=False)
    with pytest.raises(NoGradientRule, match=naming(*named)):
        onnx_derivative(made, inputs=["x"])


@pytest.mark.parametrize(
    ("body", "operators"),
    [
        ("y = Clip(x)", "Identity"),
        ("c = Constant<value_float=2.0>()  y = Pow(x, c)", "Mul Mul"),
        ("c = Constant<value_float=3.0>()  y = Pow(x, c)", "Sub Pow Mul Mul"),
        *(
            (f"y = Reduce{name}<noop_with_empty_axes=1>(x)", "Identity")
            for name in ("Sum", "Mean", "Max", "Min", "Prod")
        ),
    ],
)
def test_gradients_of_what_changes_little_are_short(body, operators):
    made = onnx_derivative(parse_model(f"g (float[2, 3] x) => (float[2, 3] y) {{ {body} }}"))
    assert operator_names(made) == operators.split()


def test_dropout_uses_the_mask_of_the_forward():
    text = "g (float[100] x, float r, bool t) => (float[100] y) { y = Dropout<seed=3>(x, r, t) }"
    made = onnx_derivative(parse_model(text, opset=20), inputs=["x"], options=ONES)
    session = session_of(made)
    x = np.ones(100, np.float32)
    for training in (True, False):
        feed = {"x": x, "r": np.array(0.4, np.float32), "t": np.array(training)}
        dx, y = session.run(None, feed)
        np.testing.assert_allclose(dx, y, rtol=1e-6)
        assert (y == 0).any() == training


@pytest.mark.parametrize("node", ["Gather(x, i)", "Gather<axis=1>(x, i)", "GatherND(x, j)"])
def test_what_is_read_often_gets_all_of_its_gradient(node, default_threads):
    """onnxruntime's ScatterND adds from several threads, without a lock: some sums are lost."""
    text = f"""g (float[10, 10] x, int64[100000] i) => (float[n, m] y) {{
        o = Constant<value_ints=[-1]>()  j = Unsqueeze(i, o)  y = {node} }}"""
    i = np.random.default_rng(0).integers(-10, 10, 100_000)
    made = onnx_derivative(parse_model(text, opset=20), options=ONES)
    [dx] = run_in_dtype(made, {"x": np.zeros((10, 10)), "i": i})[:1]
    counts = np.tile(np.bincount(i % 10), (10, 1))
    np.testing.assert_array_equal(dx, counts if "axis" in node else counts.T)
    assert "ScatterND" not in {n.op_type for n in made.graph.node}
