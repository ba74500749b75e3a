"""The table of rules, checked row by row, and against what others say."""

from __future__ import annotations

import re
import warnings

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.backend.test.case.node import collect_testcases

import convolution_cases
from cases import ROWS, Row
from onnxgrad import DerivativeOptions, NoGradientRule, check_gradient, onnx_derivative
from onnxgrad.autodiff.rules import CONSTANT, RULES

KINDS = {np.dtype(np.int64): "int64", np.dtype(bool): "bool"}


def model(row: Row, known: str = "lengths") -> onnx.ModelProto:
    """Return the model of a row; of its float inputs only the "rank" is known, or "nothing"."""
    inputs = [f"float[{', '.join(map(str, s))}] {n}" for n, s in row.shapes.items()]
    inputs += [
        f"{KINDS[a.dtype]}[{', '.join(map(str, a.shape))}] {n}" for n, a in row.given.items()
    ]
    outputs = ", ".join(f"float {name}" for name in row.outputs)
    made = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": {row.opset}]> '
        f"g ({', '.join(inputs)}) => ({outputs}) {{ {row.body} }}"
    )
    for y in made.graph.output:
        y.type.tensor_type.ClearField("shape")
    for x in made.graph.input:
        if x.name in row.given or known == "lengths":
            continue
        for i, d in enumerate(x.type.tensor_type.shape.dim):
            d.dim_param = f"{x.name}{i}"
        if known == "nothing":
            x.type.tensor_type.ClearField("shape")
    return made


def feed(row: Row) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(len(row.id))
    return {n: row.domain(rng.standard_normal(s)) for n, s in row.shapes.items()} | row.given


def refused(needs: str, known: str) -> bool:
    return (known, needs) in {("rank", "lengths"), ("nothing", "lengths"), ("nothing", "rank")}


@pytest.mark.parametrize("known", ["lengths", "rank", "nothing"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_gradient(row, known):
    made = model(row, known)
    for order in (1, 2):
        if refused(row.needs, known):
            with pytest.raises(NoGradientRule, match="known"):
                check_gradient(made, feed=feed(row), order=order)
        else:
            report = check_gradient(made, feed=feed(row), order=order)
            assert report.ok, f"order {order}\n{report}"


def operators(text: str) -> set[str]:
    return set(re.findall(r"(\w+)(?:<[^>]*>)?\(", text))


def test_every_rule_has_a_row():
    rows = [row.body for row in ROWS] + [case.node for case in convolution_cases.CASES]
    tested = set().union(*map(operators, rows))
    assert {name for _, name in RULES} <= tested


def slopes(body: str, *arrays, opset: int = 20) -> list[np.ndarray]:
    """Return the gradient by each input x0, x1, ... of a body that writes y, for ones arriving."""
    arrays = [np.array(a, np.float32) for a in arrays]
    given = ", ".join(f"float[{', '.join(map(str, a.shape))}] x{i}" for i, a in enumerate(arrays))
    text = f'<ir_version: 9, opset_import: ["": {opset}]> g ({given}) => (float y) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    feed = {f"x{i}": a for i, a in enumerate(arrays)}
    options = DerivativeOptions.KeepOutputs | DerivativeOptions.FillGrad
    made = onnx_derivative(model, options=options)
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feed)[:-1]


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
    ("Sqrt(x0)", lambda t, x: x.sqrt(), [[0, 4]]),
    ("Pow(x0, x1)", lambda t, a, b: a.pow(b), [[0, 0, 0, 2], [1, 2, 0, 0]]),
    ("Clip(x0, x1, x2)", lambda t, x, a, b: x.clamp(a, b), [[-1, 0, 1, 2], 0.0, 1.0]),
]


@pytest.mark.parametrize(("node", "function", "points"), KINKS, ids=[k[0] for k in KINKS])
def test_kinks_are_those_of_torch(node, function, points):
    torch = pytest.importorskip("torch")
    given = [torch.tensor(p, dtype=torch.float32, requires_grad=True) for p in points]
    function(torch, *given).sum().backward()
    for found, expected in zip(slopes(f"y = {node}", *points), given, strict=True):
        np.testing.assert_allclose(found, expected.grad.numpy(), rtol=1e-6)


BOOLEAN = "b = {}  z = Cast<to=1>(b)"  # or an integer
ONE_OF_TWO = "p = Cast<to=9>(x)  b = {}(p, p)  z = Cast<to=1>(b)"
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
}


@pytest.mark.parametrize("name", FLAT)
def test_what_has_no_gradient_adds_none(name):
    row = Row(name, f"{FLAT[name]}  s = ReduceSum<keepdims=0>(z)  y = Mul(x, s)", {"x": (2, 3)})
    report = check_gradient(model(row), feed=feed(row))
    assert report.ok, str(report)


def test_every_operator_without_gradient_has_a_case():
    assert {name for domain, name in CONSTANT if not domain} == set(FLAT)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("y = Det(x)", r"^Det \(node '.*', output 'y'\): no rule; add one with @rule\('Det'\)"),
        ("h = Exp(x)  d = Det(h)  y = Mul(d, d)", r"Path: x -> h -> \[Det\]"),
        ('y = ScatterElements<reduction="mul">(x, i, x)', "reduction='mul' is not covered"),
        ("y, a, b = BatchNormalization<training_mode=1>(x, v, v, v, v)", "training_mode=1"),
        ("y, m = LayerNormalization(x, v)  z = Mul(m, m)", "arrives at its output 'm'"),
    ],
)
def test_refusals_name_node_and_path(body, what):
    output = "float z" if "z =" in body else "float y"
    text = f"""<ir_version: 9, opset_import: ["": 20]> g (float[2, 2] x, int64[2, 2] i, int64[1] o,
        float[2] v) => ({output}) {{ {body} }}"""
    made = onnx.parser.parse_model(text)
    made.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises(NoGradientRule, match=what):
        onnx_derivative(made, inputs=["x"])


def test_dropout_uses_the_mask_of_the_forward():
    text = """<ir_version: 9, opset_import: ["": 20]>
        g (float[100] x, float r, bool t) => (float[100] y) { y = Dropout<seed=3>(x, r, t) }"""
    options = DerivativeOptions.KeepOutputs | DerivativeOptions.FillGrad
    made = onnx_derivative(onnx.parser.parse_model(text), inputs=["x"], options=options)
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.ones(100, np.float32)
    for training in (True, False):
        feed = {"x": x, "r": np.array(0.4, np.float32), "t": np.array(training)}
        dx, y = session.run(None, feed)
        np.testing.assert_allclose(dx, y, rtol=1e-6)
        assert (y == 0).any() == training


# -- the cases that the onnx package ships ------------------------------------------------------


def shipped() -> list:
    """Return the node cases with float32 in and out whose operator has a rule."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases(None)
    return [case for case in cases if applies(case)]


def applies(case) -> bool:
    graph, float32 = case.model.graph, onnx.TensorProto.FLOAT
    types = [v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)]
    sets = case.data_sets
    return (
        len(graph.node) == 1
        and (graph.node[0].domain, graph.node[0].op_type) in RULES
        and all(v.type.HasField("tensor_type") for v in (*graph.input, *graph.output))
        and types[0] == types[len(graph.input)] == float32
        and not re.search("training|dropout_random|_nan|_inf|empty_set", case.name)
        and sum(a.size for a in sets[0][0]) < 20_000
    )


SHIPPED = shipped()


def test_enough_cases_are_shipped():
    assert len(SHIPPED) > 250


@pytest.mark.parametrize("case", SHIPPED, ids=lambda case: case.name)
def test_shipped_case(case):
    names, rng = [x.name for x in case.model.graph.input], np.random.default_rng(0)
    arrays = dict(zip(names, case.data_sets[0][0], strict=True))
    side = -1 if case.model.graph.node[0].op_type in ("Acos", "Asin", "Atanh") else 1
    for name, a in arrays.items():  # away from kinks and ties, and towards the domain's inside
        if a.dtype == np.float32:
            arrays[name] = a + side * 0.01 * (1 + rng.random(a.shape))
    statistics = case.name.startswith("test_layer_normalization")  # are outputs there
    if statistics or re.search("scatter.*(mul|max|min)", case.name):
        with pytest.raises(NoGradientRule, match=r"reduction=|arrives at its output"):
            check_gradient(case.model, feed=arrays)
    else:
        report = check_gradient(case.model, feed=arrays)
        assert report.ok, str(report)
