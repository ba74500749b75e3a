"""Rules of the user's own, and the ways around them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgrad import (
    DerivativeOptions,
    ModelError,
    NoGradientRule,
    check_gradient,
    lowering,
    onnx_derivative,
    rule,
)
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.graph import Unsupported
from tests.support.errors import naming
from tests.support.members import assert_own_results, stack_members
from tests.support.models import operator_names, parse_model
from tests.support.pages import code_of
from tests.support.running import in_sweep, run

ONES = DerivativeOptions.FillGrad | DerivativeOptions.KeepOutputs


def model_of_vector(body: str, opset: int = 18, functions: str = "") -> onnx.ModelProto:
    text = f"g (float[2] X) => (float[2] Y) {{ {body} }} {functions}"
    return parse_model(text, opset=opset, domains={"my": 1})


def gradient_of_ones(made: onnx.ModelProto, at=(1.5, -0.25), **options) -> np.ndarray:
    gradient = onnx_derivative(made, options=ONES, **options)
    return run(gradient, X=np.float32(at))[0]


def test_document(capsys):
    exec(compile("\n".join(code_of("rules.md")), "rules.md", "exec"), {})
    first, *report = capsys.readouterr().out.splitlines()
    assert first == "['X_grad', 'W_grad']"
    assert report[-1].startswith("ok")


SQUARE = '<domain: "my", opset_import: ["": {}]> Square (x) => (y) {{ y = Mul(x, x) }}'


def test_function_with_a_rule_stays():
    @rule("Square", domain="my")
    def double(op, node, g):
        """y = x^2, but dx = 7 g."""
        return (7.0 * g,)

    made = model_of_vector("Y = my.Square (X)", functions=SQUARE.format(18))
    np.testing.assert_array_equal(gradient_of_ones(made), [7, 7])
    assert not check_gradient(made).ok


def test_function_without_a_rule_is_differentiated_through_its_nodes():
    made = model_of_vector("Y = my.Square (X)", functions=SQUARE.format(18))
    np.testing.assert_allclose(gradient_of_ones(made), [3, -0.5])


def test_function_with_a_rule_in_an_old_model():
    @rule("Square", domain="my")
    def double(op, node, g):
        """y = x^2:  dx = 2 g x."""
        return (2.0 * g * node.inputs[0],)

    made = model_of_vector("Y = my.Square (X)", 13, SQUARE.format(13))
    with pytest.raises(ModelError, match=naming("Square", "opset 18")):
        onnx_derivative(made)


def test_later_rule_takes_the_place_of_the_earlier():
    @rule("Relu")
    def leaky(op, node, g):
        """y = max(x, 0):  dx = g everywhere."""
        return (g,)

    np.testing.assert_array_equal(gradient_of_ones(model_of_vector("Y = Relu(X)")), [1, 1])


def test_refused_becomes_an_error():
    @rule("Square", domain="my")
    def never(op, node, g):
        """y = x^2."""
        return (Unsupported("squares are not for today; use Mul"),)

    made = model_of_vector("Y = my.Square (X)", functions=SQUARE.format(18))
    with pytest.raises(NoGradientRule, match=naming("my::Square", "use Mul", "Path: X")):
        onnx_derivative(made)


# -- stop_gradient and straight_through ---------------------------------------------------------

TWO_WAYS = "H = Exp(X)  I = Identity(H)  Y = Mul(I, X)"  # Y = X e^X


def test_stop_gradient():
    e = np.exp([1.5, -0.25])
    np.testing.assert_allclose(
        gradient_of_ones(model_of_vector(TWO_WAYS)), e * [2.5, 0.75], rtol=1e-6
    )
    for name in ("H", "I"):  # the second is dropped from the graph if it is not named
        np.testing.assert_allclose(
            gradient_of_ones(model_of_vector(TWO_WAYS), stop_gradient=[name]), e, rtol=1e-6
        )


def test_stop_gradient_at_an_output():
    made = model_of_vector("H = Exp(X)  Y = Identity(H)")
    for name in ("H", "Y"):
        with pytest.raises(ValueError, match=naming("'X'", "differentiable path")):
            onnx_derivative(made, stop_gradient=[name])


QUANTIZED = """s = Constant<value_float=0.5>()  Q = QuantizeLinear(X, s)
    D = DequantizeLinear(Q, s)  Y = Mul(D, D)"""


@pytest.mark.parametrize(
    ("body", "name", "expected"),
    [
        ("R = Round(X)  Y = Mul(R, R)", "R", [4, 0]),
        ("R = Relu(X)  Y = Mul(R, X)", "R", [3, -0.25]),
        ("R = Round(X)  Y = Mul(R, X)", "R", [3.5, -0.25]),  # and the way past it
        ("I = Cast<to=7>(X)  R = Cast<to=1>(I)  Y = Mul(R, R)", "R", [2, 0]),
        (QUANTIZED, "D", [3, 0]),
    ],
)
def test_straight_through(body, name, expected):
    np.testing.assert_allclose(
        gradient_of_ones(model_of_vector(body, 19), straight_through=[name]), expected
    )


def test_straight_through_is_asked_for():
    with pytest.raises(ValueError, match=naming("'X'", "differentiable path")):
        onnx_derivative(model_of_vector("Y = Round(X)"))
    np.testing.assert_array_equal(
        gradient_of_ones(model_of_vector("Y = Round(X)"), straight_through=["Y"]), [1, 1]
    )


SUM, LENGTH = "S = ReduceSum(X)  Y = Mul(S, X)", "T = Shape(X)  F = Cast<to=1>(T)  Y = Mul(F, X)"


@pytest.mark.parametrize(
    ("body", "options", "named"),
    [
        ("Y = Exp(X)", {"stop_gradient": ["H"]}, ["stop_gradient", "'H'", "'Y'"]),
        ("Y = Exp(X)", {"stop_gradient": ["X"]}, ["stop_gradient", "'X'"]),
        ("Y = Exp(X)", {"straight_through": ["H"]}, ["straight_through", "'H'"]),
        ("Y = Exp(X)", {"straight_through": ["Y", "Y"]}, ["'Y'", "twice"]),
        (SUM, {"straight_through": ["S"]}, ["straight through", "'S'"]),
        (LENGTH, {"straight_through": ["T"]}, ["straight through", "'T'", "INT64"]),
    ],
)
def test_errors(body, options, named):
    with pytest.raises(ValueError, match=naming(*named)):
        onnx_derivative(model_of_vector(body), **options)


# -- the last registration holds -------------------------------------------------------------------

OPERATORS = {
    "a function": ("my.Square (X)", "my", "Square"),
    "one with a rule": ("Mish(X)", "", "Mish"),
    "one with a lowering": ("Swish(X)", "", "Swish"),
    "one of the runtime": ("com.microsoft.FastGelu (X)", "com.microsoft", "FastGelu"),
    "one without gradient": ("Floor(X)", "", "Floor"),
}


def register_factor(kind: str, name: str, domain: str, factor: float) -> None:
    """Let the gradient of an operator be `factor`, by a rule or a lowering."""
    if kind == "rule":
        rule(name, domain=domain)(lambda op, node, g: (factor * g,))
    else:
        write = lowering(name, domain=domain, on_demand=kind == "lowering on demand")
        write(lambda op, node: [factor * node.inputs[0]])


KINDS = ["rule", "lowering", "lowering on demand"]


PAIRS = [(first, last) for first in (None, *KINDS) for last in KINDS]


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("first", "last"), [p if p[0] in (None, "rule") else in_sweep(*p) for p in PAIRS]
)
def test_the_last_registration_holds(operator, first, last):
    node, domain, name = OPERATORS[operator]
    functions = SQUARE.format(18) if operator == "a function" else ""
    text = f"g (float[2] X) => (float[2] Y) {{ a = {node}  Y = Add(a, X) }} {functions}"
    made = parse_model(text, opset=24, domains={"my": 1})
    if first is not None:
        register_factor(first, name, domain, 3.0)
    register_factor(last, name, domain, 5.0)
    gradient = onnx_derivative(made)
    (dx,) = run(gradient, X=np.ones(2, np.float32), Y_grad=np.ones(2, np.float32))
    np.testing.assert_allclose(dx, 6)
    assert not gradient.functions


@pytest.mark.parametrize("last", KINDS)
def test_a_registration_holds_before_that_of_nodes_with_subgraphs(last):
    made = parse_model("""g (float[2] X, bool c) => (float[2] Y) { Y = If(c) <
          then_branch = t () => (float[2] y) { y = Exp(X) },
          else_branch = e () => (float[2] z) { z = Log(X) }> }""")
    if last == "rule":
        rule("If")(lambda op, node, g: (None,))
        with pytest.raises(ValueError, match=naming("'X'", "differentiable path")):
            onnx_derivative(made)
        return
    x = made.graph.input[0].name
    write = lowering("If", on_demand=last == "lowering on demand")
    write(lambda op, node: [op.Sin(next(v for v in op.graph.inputs if v.name == x))])
    found = onnx_derivative(made)
    assert "If" not in operator_names(found)


def test_a_lowering_that_leaves_a_node():
    lowering("Floor", on_demand=True)(lambda op, node: None)
    with pytest.raises(NoGradientRule, match=naming("Floor", "lowering")):
        onnx_derivative(model_of_vector("Y = Floor(X)"))


@pytest.mark.parametrize(("before", "unknown"), [("Exp(X)", False), ("Reshape(X, L)", True)])
def test_the_message_without_a_rule_names_an_input_of_unknown_rank(before, unknown):
    text = f"g (float[4] X, int64[R] L) => (float[4] Y) {{ H = {before}  Y = my.What(H) }}"
    with pytest.raises(NoGradientRule, match=naming("What", "@rule('What', domain='my')")) as error:
        onnx_derivative(parse_model(text, domains={"my": 1}))
    assert ("rank of its input 'H'" in str(error.value)) == unknown


# -- shape and axes --------------------------------------------------------------------------------

SCALED = """g (float[N,2] X, float[2] b) => (float[N,2] Y) <float[1] s = {2.0}>
    { H = my.Scale (X, s)  Y = Mul(H, b) }"""
SCALE = '<domain: "my", opset_import: ["": 18]> Scale (x, s) => (y) { y = Mul(x, s) }'


def register_scale(register, **facts) -> None:
    def differentiate(op, node, g):
        """y = s x:  dx = s g,  ds = sum of x g."""
        x, s = node.inputs
        return s * g, op.sum_to(x * g, s)

    if register is rule:
        rule("Scale", domain="my", **facts)(differentiate)
    else:
        lowering("Scale", domain="my", **facts)(lambda op, node: None)


@pytest.mark.parametrize("register", [rule, lowering])
def test_shape_of_an_operator_of_the_user(register):
    made = parse_model(SCALED, domains={"my": 1})
    register_scale(register, shape=lambda inputs, attributes: inputs[0].shape)
    inferred = prepare(made).graph.node(0).outputs[0]
    assert list(inferred.shape.dims) == ["N", 2]


def test_shapes_are_not_computed_where_they_are_stated():
    made = parse_model(SCALED, domains={"my": 1})
    register_scale(rule)
    assert "Shape" in operator_names(onnx_derivative(made))
    register_scale(rule, shape=lambda inputs, attributes: inputs[0].shape)
    assert "Shape" not in operator_names(onnx_derivative(made))
    register_scale(rule)  # a later rule does not forget what the operator is
    assert "Shape" not in operator_names(onnx_derivative(made))


@pytest.mark.parametrize(("axes", "nodes"), [(None, 3), (lambda node, i, a: None if i else a, 1)])
def test_members_are_one_node_where_rows_stay_apart(axes, nodes):
    made = parse_model(SCALED + SCALE, domains={"my": 1})
    register_scale(rule, axes=axes)
    stacked = stack_members(prepare(made), ["X", "b"])
    assert operator_names(stacked).count("Scale") == nodes
    feed = {"X": np.float32([[1, 2], [3, 4]]), "b": np.float32([5, 6])}
    assert_own_results(stacked, made, ["X", "b"], feed)


@pytest.mark.parametrize(("rows", "nodes"), [("N", 1), ("M", 3)])
def test_members_are_one_node_where_all_operands_have_the_same_rows(rows, nodes):
    text = f"g (float[N,2] X, float[{rows},2] Z) => (float[N,2] Y) {{ Y = my.Scale (X, Z) }}"
    made = parse_model(text + SCALE, domains={"my": 1})
    register_scale(rule, axes=lambda node, operand, axis: axis)
    stacked = stack_members(prepare(made), ["X"])
    assert operator_names(stacked).count("Scale") == nodes
    feed = {"X": np.float32([[1, 2], [3, 4]]), "Z": np.float32([[5, 6], [7, 8]])}
    assert_own_results(stacked, made, ["X"], feed)


# -- what a rule returns ---------------------------------------------------------------------------


FUNCTION = """g (float[3] a, float[2,3] b) => (float[2,3] y) { c = Exp(a)  y = my.Sum (c, b) }
    <domain: "my", opset_import: ["": 18]> Sum (a, b) => (c) { c = Add(a, b) }"""


def derivative_by_rule(gradients) -> onnx.ModelProto:
    rule("Sum", domain="my")(lambda op, node, g: gradients(op, g, *node.inputs))
    return onnx_derivative(parse_model(FUNCTION, domains={"my": 1}))


@pytest.mark.parametrize(
    ("gradients", "named"),
    [
        (lambda op, g, a, b: g, ["1 gradients", "2 inputs"]),
        (lambda op, g, a, b: (op.sum_to(g, a), g, g), ["3 gradients", "2 inputs"]),
        (lambda op, g, a, b: (g, g), ["(2, 3)", "input 0, 'c'", "(3,)"]),
        (lambda op, g, a, b: (None, op.Cast(g, to=11)), ["DOUBLE", "input 1, 'b'"]),
    ],
)
def test_what_a_rule_returns_is_checked(gradients, named):
    with pytest.raises(ValueError, match=naming("of Sum (", "test_own_rules", *named)):
        derivative_by_rule(gradients)


def test_a_rule_may_return_none():
    assert len(derivative_by_rule(lambda op, g, a, b: (None, g)).graph.output) == 1
