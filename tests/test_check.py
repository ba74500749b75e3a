"""`check_gradient` finds what is wrong, and `random_feed` what can be fed."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from onnxgrad import check_gradient, random_feed
from onnxgrad.graph.operators import OPERATORS, Operator


def parse(text: str, **weights) -> onnx.ModelProto:
    made = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18, "ai.onnx.ml": 3]> {text}'
    )
    for name, array in weights.items():
        made.graph.initializer.append(numpy_helper.from_array(np.float32(array), name))
    return made


def tanh() -> onnx.ModelProto:
    return parse("g (float[N,2] x) => (float[N,2] y) { h = Mul(x, w)  y = Tanh(h) }", w=[2, 3])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda op, node, g: (g,),
        lambda op, node, g: (1.00001 * g * (1.0 - node.outputs[0] * node.outputs[0]),),
        lambda op, node, g: (None,),
    ],
)
def test_a_wrong_rule_is_found(monkeypatch, wrong):
    assert check_gradient(tanh()).ok
    monkeypatch.setitem(OPERATORS, ("", "Tanh"), Operator(rule=wrong))
    report = check_gradient(tanh())
    assert not report.ok
    assert report.max_error > 1e-6
    assert "<-- wrong" in str(report)
    assert str(report).splitlines()[-1].startswith("WRONG, float64 on")


def test_a_gradient_of_another_size_is_found(monkeypatch):
    model = parse(
        "g (float[N] x) => (float[M] y) { s, t = Split<num_outputs = 2>(x)  y = Tanh(t) }"
    )
    assert check_gradient(model).ok
    too_long = lambda op, node, *gs: (op.Concat(gs[1], gs[1], gs[1], axis=0),)  # noqa: E731
    monkeypatch.setitem(OPERATORS, ("", "Split"), Operator(rule=too_long))
    monkeypatch.setattr("onnxgrad.autodiff.reverse.taken_gradients", lambda rule: 2)
    report = check_gradient(model)
    assert [row.ok for row in report.rows] == [True, False]
    assert "<-- wrong" in str(report)


def test_a_wrong_second_order_is_found(monkeypatch):
    """Of the right value, but taken for constant by the second gradient."""

    def rule(op, node, g):
        (y,) = node.outputs
        slope = 1.0 - y * y
        return (g * op.Cast(op.Cast(op.Round(slope * 2.0**20), to=7), to=1) * 2.0**-20,)

    monkeypatch.setitem(OPERATORS, ("", "Tanh"), Operator(rule=rule))
    model = parse("g (float[N,2] x) => (float[N,2] y) { y = Tanh(x) }")
    assert check_gradient(model, rtol=1e-4).ok
    assert not check_gradient(model, rtol=1e-4, order=2).ok


def test_the_report():
    report = check_gradient(tanh())
    assert [row.name for row in report.rows] == ["(outputs)", "x", "w"]
    assert all(row.ok for row in report.rows)
    assert report.max_error < 1e-8
    lines = str(report).splitlines()
    assert lines[0].split() == ["expected", "found", "error"]
    assert lines[-1] == "ok, float64 on onnxruntime"
    assert not check_gradient(tanh(), rtol=0.0).ok


def test_what_is_checked():
    assert [row.name for row in check_gradient(tanh(), weights=[]).rows[1:]] == ["x"]
    assert [row.name for row in check_gradient(tanh(), inputs=[]).rows[1:]] == ["w"]
    report = check_gradient(tanh(), ["x"], ["w"], order=2)
    rows = [(row.order, row.name) for row in report.rows[1:]]
    assert rows == [(1, "x"), (1, "w"), (2, "x"), (2, "w"), (2, "y_grad")]
    assert "second order" in str(report)


def test_an_input_without_gradient_must_have_derivative_zero():
    text = "g (float[2] x, float[2] z) => (float[2] y) { f = Floor(z)  y = Add(x, f) }"
    report = check_gradient(parse(text))
    assert report.ok
    assert report.rows[2].name == "z"
    assert report.rows[2].found == 0


def test_a_direction_in_which_the_function_is_undefined():
    report = check_gradient(
        parse("g (float[2] x) => (float[2] y) { y = Pow(x, b) }", b=[2, 2]), feed={"x": [-1, 2]}
    )
    assert report.ok
    assert "(undefined)" in str(report)
    assert report.max_error < 1e-6


def test_where_weights_may_be():
    text = """g (float[N,2] x) => (float[N,1] y) {
        k = Constant<value = float[2] {2.0, 3.0}>()  h = Mul(x, k)  t = Tanh(h)
        y = ai.onnx.ml.LinearRegressor<coefficients=[1.0, 2.0], intercepts=[3.0]>(t) }"""
    report = check_gradient(parse(text))
    assert report.ok, str(report)
    assert [r.name for r in report.rows[2:]] == ["k", "y.coefficients", "y.intercepts"]


def test_outputs_that_are_no_float_tensors_are_left_out():
    text = """g (float[N,2] x) => (int64[N] label, float[N,2] s, seq(float[N,2]) z) {
        label, s = ai.onnx.ml.LinearClassifier<classlabels_ints=[0, 1], post_transform="SOFTMAX",
            coefficients=[1.0, 2.0, 3.0, 5.0], intercepts=[0.1, 0.2]>(x)
        z = SequenceConstruct(s) }"""
    report = check_gradient(parse(text), order=2)
    assert report.ok, str(report)
    assert [r.name for r in report.rows][-1] == "s_grad"


def test_half_precision_is_checked_in_float64():
    text = "g (float16[N,2] x) => (float16[N,2] y) { y = Exp(x) }"
    report = check_gradient(parse(text))
    assert report.ok, str(report)
    assert "float64" in str(report)


def test_a_point_to_check_at():
    model = parse("g (float[N] x, int64[N] i) => (float[N] y) { l = Log(x)  y = Gather(l, i) }")
    feed = {"x": [1.0, 2.0, 3.0], "i": [2, 0, 1]}
    assert check_gradient(model, feed=feed).ok
    assert not check_gradient(model, feed={**feed, "x": [1.0, -2.0, 3.0]}).ok


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": ["X"]}, "Unknown input 'X'. Did you mean 'x'"),
        ({"weights": ["W"]}, "Unknown weight 'W'. Did you mean 'w'"),
        ({"feed": {"z": 1}}, "Unknown input 'z'"),
        ({"inputs": ["x", "x"]}, "input 'x' is named twice"),
        ({"order": 3}, "order must be 1 or 2, not 3"),
        ({"inputs": [], "weights": []}, "no float input or weight"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        check_gradient(tanh(), **options)


def test_other_lengths_where_inputs_share_a_symbol_are_refused():
    """The gradient models refuse them, too; onnxruntime broadcasts."""
    model = parse("g (float[N] a, float[N] b) => (float[N] y) { y = Mul(a, b) }")
    with pytest.raises(RuntimeError, match="axis 0 of 'b' is as long as axis 0 of 'a'"):
        check_gradient(model, feed={"a": [1.0, 2.0], "b": [3.0]})


def test_a_model_without_float_output():
    with pytest.raises(ValueError, match="no float output"):
        check_gradient(parse("g (float[2] x) => (int64[1] y) { y = ArgMax(x) }"))


def test_outputs_that_are_exactly_zero():
    text = "g (float[4] x) => (float[4] y) { s = Mean(x, x, x)  n = Neg(s)  y = Add(n, x) }"
    assert check_gradient(parse(text)).ok


def test_random_outputs_are_refused():
    model = parse("g (float[2] x) => (float[2] y) { r = RandomNormalLike(x)  y = Mul(x, r) }")
    with pytest.raises(ValueError, match="two runs differ"):
        check_gradient(model)


# -- random_feed ---------------------------------------------------------------------------------

INPUTS = """g (float[N,3] a, float[M,N,k] b, float c, double[4] d, float16[N] e, bfloat16[1] f,
    int64[N] i, int32[2] j, uint8[N] u, bool[N] p, string[N] s) => (float[N,3] y) { y = Neg(a) }"""
SHAPES = {
    "a": (5, 3), "b": (5, 5, 2), "c": (), "d": (4,), "e": (5,), "f": (1,),
    "i": (5,), "j": (2,), "u": (5,), "p": (5,), "s": (5,),
}  # fmt: skip


@pytest.mark.parametrize("described", ["onnx", "session"])
def test_random_feed(described):
    model = parse(INPUTS)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    inputs = model.graph.input if described == "onnx" else session.get_inputs()
    feed = random_feed(inputs, batch=5, empty_dimension=2, random_state=0)
    assert {name: x.shape for name, x in feed.items()} == SHAPES
    kinds = [str(x.dtype) for x in feed.values()]
    floats = ["float32", "float32", "float32", "float64", "float16", "bfloat16"]
    assert kinds == [*floats, "int64", "int32", "uint8", "bool", "object"]
    for name in "ijup":
        assert set(np.unique(feed[name]).tolist()) <= {0, 1}
    feed.pop("f")  # numpy has no bfloat16 for onnxruntime
    again = random_feed(inputs, batch=5, empty_dimension=2, random_state=0)
    assert all(np.array_equal(again[name], x) for name, x in feed.items())


def test_random_feed_can_be_run():
    model = tanh()
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    [y] = session.run(None, random_feed(session.get_inputs()))
    assert y.shape == (10, 2)


def test_an_input_that_is_no_tensor():
    text = (
        "g (seq(float[N]) x) => (float[N] y) { z = Constant<value_int=0>()  y = SequenceAt(x, z) }"
    )
    model = parse(text)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for inputs in (model.graph.input, session.get_inputs()):
        with pytest.raises(ValueError, match="input 'x' is no tensor"):
            random_feed(inputs)


# -- mistakes before the sweep -------------------------------------------------------------------


def test_a_wrong_lowering_is_found(monkeypatch):
    model = parse("g (float[N,2] x) => (float[N,2] y) { t = Swish(x)  y = Mul(t, w) }", w=[2, 3])
    model.opset_import[0].version = 24
    model.ir_version = 11
    assert check_gradient(model).ok
    wrong = lambda op, node: [op.Mul(node.inputs[0], op.Tanh(node.inputs[0]))]  # noqa: E731
    monkeypatch.setitem(OPERATORS, ("", "Swish"), Operator(lowering=wrong))
    assert [row.ok for row in check_gradient(model).rows] == [False, False, False]


@pytest.mark.parametrize(
    "text",
    [
        """{ n, t = Split<num_outputs=2, axis=1>(x) y = Loop(turns, , n)<body = b (int64 i, bool c,
            float[N,1] a) => (bool d, float[N,1] e) <float[1] w = {2}, bool d = {1}>
            { e = Mul(a, w) }> }""",
        """{ n = Mul(x, x) y = If(yes)<then_branch = b () => (float[1] w) <float[1] w = {2}>
            { z = Identity(w) }, else_branch = d () => (float[N,2] e) { e = Tanh(x) }> }""",
    ],
)
def test_a_weight_that_is_lost_is_found(monkeypatch, text):
    """What reads a weight of a subgraph reads a copy, which is no weight: its gradient is zero."""
    from onnxgrad.autodiff.primal import local_functions
    from onnxgrad.model import weights
    from onnxgrad.model.scopes import rename_values

    text = f"g (float[N,2] x) => (float[N,k] y) <int64 turns = {{2}}, bool yes = {{1}}> {text}"
    model = parse(text)
    assert check_gradient(model, weights=["w"]).ok

    def losing(model, everything):
        weights.lift(model, everything)
        kept = [copy.deepcopy(t) for t in model.graph.initializer if t.name == "w"]
        if kept:
            rename_values(model.graph, {(id(model.graph), "w"): "copy"})
            model.graph.initializer.extend(kept)

    monkeypatch.setattr(local_functions, "lift", losing)
    report = check_gradient(model, weights=["w"])
    assert report.rows[0].ok
    assert not report.ok
    assert report.rows[-1].found == 0
