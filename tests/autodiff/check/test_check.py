"""`check_gradient` finds what is wrong, and `random_feed` what can be fed."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from onnxgrad import check_gradient, random_feed
from onnxgrad.autodiff.check.runtimes import OriginalModel, load_on_reference
from onnxgrad.autodiff.primal import prepare
from onnxgrad.model.convert import convert_precision
from onnxgrad.operators import OPERATORS, Operator
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import in_sweep, run, session_of


def scaled_tanh() -> onnx.ModelProto:
    text = "g (float[N,2] x) => (float[N,2] y) { h = Mul(x, w)  y = Tanh(h) }"
    return parse_model(text, w=[2.0, 3.0])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda op, node, g: (g,),
        lambda op, node, g: (1.00001 * g * (1.0 - node.outputs[0] * node.outputs[0]),),
        lambda op, node, g: (None,),
    ],
)
def test_a_wrong_rule_is_found(monkeypatch, wrong):
    assert check_gradient(scaled_tanh()).ok
    monkeypatch.setitem(OPERATORS, ("", "Tanh"), Operator(rule=wrong))
    report = check_gradient(scaled_tanh())
    assert not report.ok
    assert report.max_error > 1e-6
    assert "<-- wrong" in str(report)
    assert str(report).splitlines()[-1].startswith("WRONG, float64 on")


@pytest.mark.newest  # whose runtime loads opset 28
def test_a_gradient_that_the_runtime_does_not_load_is_not_ok(monkeypatch):
    """It is of an opset whose Celu does not take float64, although the model's does."""
    model = parse_model("g (double[N,2] x) => (double[N,2] y) { y = Celu(x) }", opset=28)
    assert check_gradient(model).ok
    monkeypatch.setattr(prepare, "newest_opset", lambda: 26)
    monkeypatch.setattr(prepare, "opset_has_node", lambda node, opset: True)
    with pytest.raises(RuntimeError, match=naming("gradient", "Celu")):
        check_gradient(model)


def test_arrays_of_the_inputs_to_check():
    model = parse_model("g (float[2] x, float[2] z) => (float[2] y) { r = Sqrt(x)  y = Mul(r, z) }")
    at = {"x": np.float32([4, 9])}
    for arguments in ({"inputs": at}, {"inputs": ["x"], "feed": at}):
        report = check_gradient(model, **arguments)
        assert report.ok
        assert [row.name for row in report.rows] == ["(outputs)", "x"]
        assert not report.rows[1].undefined


def many_weights(scales=(1.0,) * 24, operator="Tanh", place=5) -> onnx.ModelProto:
    """y = sum(scale_i tanh(w_i x)): a weight for each scale, and the input."""
    text = "".join(
        f"m{i} = Mul(x, w{i}) t{i} = {operator if i == place else 'Tanh'}(m{i})"
        f" c{i} = Constant<value = float {{{scale}}}>() p{i} = Mul(t{i}, c{i}) "
        for i, scale in enumerate(scales)
    )
    terms = ", ".join(f"p{i}" for i in range(len(scales)))
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.uniform(0.2, 0.9, 2).astype(np.float32) for i in range(len(scales))}
    return parse_model(
        f"g (float[N,2] x) => (float[N,2] y) {{ {text} y = Sum({terms}) }}", **weights
    )


def count_runs(monkeypatch):
    """Count the calls of the model that `check_gradient` makes."""
    runs = []
    call = OriginalModel.__call__
    monkeypatch.setattr(OriginalModel, "__call__", lambda *a: runs.append(1) or call(*a))
    return runs


def test_many_weights_move_together(monkeypatch):
    """A few runs for all of them, and the report says what was moved together."""
    runs = count_runs(monkeypatch)
    report = check_gradient(many_weights())
    together = len(runs)
    runs.clear()
    alone = check_gradient(many_weights(), separately=True)
    assert report.ok
    assert alone.ok
    assert together < len(runs) / 4
    names = {name for row in report.rows[1:] for name in row.names}
    assert names == {"x", *(f"w{i}" for i in range(24))} == {row.name for row in alone.rows[1:]}
    assert max(len(row.names) for row in report.rows[1:]) == 8
    assert any(row.name.endswith(" and 7 more") for row in report.rows)
    assert "separately=True" in str(report)
    assert "joint" not in str(alone)
    assert all(len(row.names) == 1 for row in check_gradient(scaled_tanh()).rows[1:])


@pytest.mark.parametrize(("scale", "place"), [(1.0, 20), (1e-4, 5), (1e-7, 5)])
def test_a_wrong_one_of_many_is_found(monkeypatch, scale, place):
    """Also if its gradient is much smaller than those of the others; it is named."""
    model = many_weights([scale if i == place else 1.0 for i in range(24)], "Atan", place)
    assert check_gradient(model).ok
    wrong = lambda op, node, g: (1.01 * g / (1.0 + node.inputs[0] * node.inputs[0]),)  # noqa: E731
    monkeypatch.setitem(OPERATORS, ("", "Atan"), Operator(rule=wrong))
    report = check_gradient(model)
    assert {row.name for row in report.rows if not row.ok} - {"x"} == {f"w{place}"}


def test_a_budget_says_what_it_left_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now.__setitem__(0, now[0] + 1.0) or now[0])
    report = check_gradient(many_weights(), separately=True, budget_seconds=6)
    checked = {row.name for row in report.rows[1:]}
    assert 1 <= len(checked) < 25
    assert checked | {*report.unchecked} == {"x", *(f"w{i}" for i in range(24))}
    assert checked.isdisjoint(report.unchecked)
    assert report.ok
    assert "NOT CHECKED" in str(report)
    assert report.unchecked[0] in str(report)
    assert not check_gradient(many_weights()).unchecked
    least = check_gradient(scaled_tanh(), budget_seconds=1e-9, order=2)
    assert len(least.rows) > 1
    assert least.unchecked
    with pytest.raises(ValueError, match=naming("budget_seconds", "0")):
        check_gradient(scaled_tanh(), budget_seconds=0)


def test_a_gradient_of_another_size_is_found(monkeypatch):
    model = parse_model(
        "g (float[N] x) => (float[M] y) { s, t = Split<num_outputs = 2>(x)  y = Tanh(t) }"
    )
    assert check_gradient(model).ok
    too_long = lambda op, node, *gs: (op.Concat(gs[1], gs[1], gs[1], axis=0),)  # noqa: E731
    monkeypatch.setitem(OPERATORS, ("", "Split"), Operator(rule=too_long))
    monkeypatch.setattr("onnxgrad.autodiff.reverse.cotangent_limit", lambda rule: 2)
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
    model = parse_model("g (float[N,2] x) => (float[N,2] y) { y = Tanh(x) }")
    assert check_gradient(model, rtol=1e-4).ok
    assert not check_gradient(model, rtol=1e-4, order=2).ok


def test_the_report():
    report = check_gradient(scaled_tanh())
    assert [row.name for row in report.rows] == ["(outputs)", "x", "w"]
    assert all(row.ok for row in report.rows)
    assert report.max_error < 1e-8
    lines = str(report).splitlines()
    assert lines[0].split() == ["expected", "found", "error"]
    assert lines[-1] == "ok, float64 on onnxruntime"
    page = report._repr_html_()
    assert all(part in page for part in ("(outputs)", "x", "w", lines[-1]))
    assert not check_gradient(scaled_tanh(), rtol=0.0).ok


def test_what_is_checked():
    assert [row.name for row in check_gradient(scaled_tanh(), weights=[]).rows[1:]] == ["x"]
    assert [row.name for row in check_gradient(scaled_tanh(), inputs=[]).rows[1:]] == ["w"]
    report = check_gradient(scaled_tanh(), ["x"], ["w"], order=2)
    rows = [(row.order, row.name) for row in report.rows[1:]]
    assert rows == [(1, "x"), (1, "w"), (2, "x"), (2, "w"), (2, "y_grad")]
    assert "second order" in str(report)


def test_an_input_without_gradient_must_have_derivative_zero():
    text = "g (float[2] x, float[2] z) => (float[2] y) { f = Floor(z)  y = Add(x, f) }"
    report = check_gradient(parse_model(text))
    assert report.ok
    assert report.rows[2].name == "z"
    assert report.rows[2].found == 0


def test_a_direction_in_which_the_function_is_undefined():
    report = check_gradient(
        parse_model("g (float[2] x) => (float[2] y) { y = Pow(x, b) }", b=[2.0, 2.0]),
        feed={"x": [-1, 2]},
    )
    assert report.ok
    assert "(undefined)" in str(report)
    assert report.max_error < 1e-6


def test_where_weights_may_be():
    text = """g (float[N,2] x) => (float[N,1] y) {
        k = Constant<value = float[2] {2.0, 3.0}>()  h = Mul(x, k)  t = Tanh(h)
        y = ai.onnx.ml.LinearRegressor<coefficients=[1.0, 2.0], intercepts=[3.0]>(t) }"""
    report = check_gradient(parse_model(text))
    assert report.ok, str(report)
    assert [r.name for r in report.rows[2:]] == ["k", "y.coefficients", "y.intercepts"]


def test_outputs_that_are_no_float_tensors_are_left_out():
    text = """g (float[N,2] x) => (int64[N] label, float[N,2] s, seq(float[N,2]) z) {
        label, s = ai.onnx.ml.LinearClassifier<classlabels_ints=[0, 1], post_transform="SOFTMAX",
            coefficients=[1.0, 2.0, 3.0, 5.0], intercepts=[0.1, 0.2]>(x)
        z = SequenceConstruct(s) }"""
    report = check_gradient(parse_model(text), order=2)
    assert report.ok, str(report)
    assert [r.name for r in report.rows][-1] == "s_grad"


def test_half_precision_is_checked_in_float64():
    text = "g (float16[N,2] x) => (float16[N,2] y) { y = Exp(x) }"
    report = check_gradient(parse_model(text))
    assert report.ok, str(report)
    assert "float64" in str(report)


def test_a_point_to_check_at():
    model = parse_model(
        "g (float[N] x, int64[N] i) => (float[N] y) { l = Log(x)  y = Gather(l, i) }"
    )
    feed = {"x": [1.0, 2.0, 3.0], "i": [2, 0, 1]}
    assert check_gradient(model, feed=feed).ok
    assert not check_gradient(model, feed={**feed, "x": [1.0, -2.0, 3.0]}).ok


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"inputs": ["X"]}, ["input 'X'", "'x'"]),
        ({"weights": ["W"]}, ["weight 'W'", "'w'"]),
        ({"feed": {"z": 1}}, ["input 'z'"]),
        ({"inputs": ["x", "x"]}, ["input 'x'", "twice"]),
        ({"order": 3}, ["order", "3"]),
        ({"inputs": [], "weights": []}, ["`inputs`", "`weights`"]),
    ],
)
def test_wrong_arguments(options, named):
    with pytest.raises(ValueError, match=naming(*named)):
        check_gradient(scaled_tanh(), **options)


def test_other_lengths_where_inputs_share_a_symbol_are_refused():
    """The gradient models refuse them, too; onnxruntime broadcasts."""
    model = parse_model("g (float[N] a, float[N] b) => (float[N] y) { y = Mul(a, b) }")
    with pytest.raises(RuntimeError, match=naming("axis 0", "'b'", "'a'")):
        check_gradient(model, feed={"a": [1.0, 2.0], "b": [3.0]})


def test_a_model_without_float_output():
    with pytest.raises(ValueError, match=naming("`inputs`", "`weights`")):
        check_gradient(parse_model("g (float[2] x) => (int64[1] y) { y = ArgMax(x) }"))


def test_outputs_that_are_exactly_zero():
    text = "g (float[4] x) => (float[4] y) { s = Mean(x, x, x)  n = Neg(s)  y = Add(n, x) }"
    assert check_gradient(parse_model(text)).ok


def test_random_outputs_are_refused():
    model = parse_model("g (float[2] x) => (float[2] y) { r = RandomNormalLike(x)  y = Mul(x, r) }")
    with pytest.raises(ValueError, match=naming("different outputs", "remove")):
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
    model = parse_model(INPUTS)
    inputs = model.graph.input if described == "onnx" else session_of(model).get_inputs()
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
    session = session_of(scaled_tanh())
    [y] = session.run(None, random_feed(session.get_inputs()))
    assert y.shape == (10, 2)


def test_an_input_that_is_no_tensor():
    text = (
        "g (seq(float[N]) x) => (float[N] y) { z = Constant<value_int=0>()  y = SequenceAt(x, z) }"
    )
    model = parse_model(text)
    for inputs in (model.graph.input, session_of(model).get_inputs()):
        with pytest.raises(ValueError, match=naming("input 'x'", "tensor")):
            random_feed(inputs)


# -- mistakes before the sweep -------------------------------------------------------------------


def test_a_wrong_lowering_is_found(monkeypatch):
    text = "g (float[N,2] x) => (float[N,2] y) { t = Swish(x)  y = Mul(t, w) }"
    model = parse_model(text, opset=24, w=[2.0, 3.0])
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
    from onnxgrad.model import local_functions, weights
    from onnxgrad.model.scopes import rename_values

    text = f"g (float[N,2] x) => (float[N,k] y) <int64 turns = {{2}}, bool yes = {{1}}> {text}"
    model = parse_model(text)
    assert check_gradient(model, weights=["w"]).ok

    def losing(model, everything):
        weights.lift_constants(model, everything)
        kept = [copy.deepcopy(t) for t in model.graph.initializer if t.name == "w"]
        if kept:
            rename_values(model.graph, {(id(model.graph), "w"): "copy"})
            model.graph.initializer.extend(kept)

    monkeypatch.setattr(local_functions, "lift_constants", losing)
    report = check_gradient(model, weights=["w"])
    assert report.rows[0].ok
    assert not report.ok
    assert report.rows[-1].found == 0


@pytest.mark.parametrize(
    "options", ["", ", pads=[1, 0, 1, 1], ceil_mode=1", ", pads=[1, 0, 1, 2]", ", dilations=[1, 3]"]
)
def test_max_pools_in_float64_are_those_of_the_reference(options):
    """The kernel of onnxruntime stands in, beside a Conv that it lacks; values and gradients."""
    model = parse_model(
        "g (float[N,2,9,8] x) => (float[N,3,P,Q] y, int64[N,3,P,Q] i) { h = Conv(x, k)"
        f" y, i = MaxPool<kernel_shape=[3, 2], strides=[2, 1]{options}>(h) }}",
        k=np.random.default_rng(0).normal(size=(3, 2, 1, 1)).astype(np.float32),
    )
    x = np.random.default_rng(1).normal(size=(2, 2, 9, 8))
    double = convert_precision(model, ir.DataType.DOUBLE)
    [y] = load_on_reference(double)({"x": x})
    [expected, _] = ReferenceEvaluator(double).run(None, {"x": x})
    assert y.dtype == np.float64
    np.testing.assert_array_equal(y, expected)
    if "2]" not in options:  # which onnxruntime refuses
        report = check_gradient(model)
        assert report.ok
        assert report.computed == "float64 on onnx.reference"


@pytest.mark.parametrize(
    ("node", "shape"),
    [
        ("y = Erf(x)", (2, 3)),
        ("y = Gelu(x)", (2, 3)),
        ('y = Gelu<approximate="tanh">(x)', (2, 3)),
        ("y = Mean(row, x, x)", (2, 3)),
        ("y = LRN<size=5, alpha=0.3, beta=0.6, bias=1.5>(x)", (2, 7, 3, 2)),
        ("y = LRN<size=3>(x)", (2, 5, 3, 2)),
        ("y = MeanVarianceNormalization(x)", (2, 3, 4, 2)),
        ("y = MeanVarianceNormalization<axes=[1]>(x)", (2, 3, 4, 2)),
        ("q, s, z = DynamicQuantizeLinear(x)  y = DequantizeLinear(q, s, z)", (4, 6)),
        ("y = GlobalMaxPool(x)", (2, 3, 5)),
        ("y = GlobalMaxPool(x)", (2, 3, 2, 2, 2)),
    ],
)
def test_operators_in_float64_are_those_of_onnxruntime(node, shape):
    text = f"g (float{list(shape)} x) => (float y) <float[1,3] row = {{1, 2, 3}}> {{ {node} }}"
    model = parse_model(text, opset=20, output_shapes=False)
    x = np.random.default_rng(0).normal(size=shape)
    [expected] = run(model, x=x.astype(np.float32))
    [found] = load_on_reference(convert_precision(model, ir.DataType.DOUBLE))({"x": x})
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", [c if c < 6 else in_sweep(c) for c in range(24)])
def test_convolutions_in_float64_are_those_of_torch(case):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(case)
    n, group = 1 + case % 3, int(rng.integers(1, 4))
    transposed, c, m = (
        case % 2 == 1,
        group * int(rng.integers(1, 3)),
        group * int(rng.integers(1, 3)),
    )
    kernel, strides, dilations = (rng.integers(1, 4, n).tolist() for _ in range(3))
    pads = rng.integers(0, 2, n).tolist()
    shape = (c, m // group) if transposed else (m, c // group)
    x = rng.normal(size=(2, c, *rng.integers(8, 11, n)))
    w, b = rng.normal(size=(*shape, *kernel)), rng.normal(size=m)
    attributes = {"strides": strides, "dilations": dilations, "pads": pads * 2, "group": group}
    more = {}
    if transposed:
        more["output_padding"] = [max(s, d) - 1 for s, d in zip(strides, dilations, strict=True)]
    kind = "conv_transpose" if transposed else "conv"
    expected = getattr(torch.nn.functional, f"{kind}{n}d")(
        *map(torch.tensor, (x, w, b)), stride=strides, padding=pads, dilation=dilations,
        groups=group, **more,
    )  # fmt: skip
    node = onnx.helper.make_node(
        "ConvTranspose" if transposed else "Conv", ["x", "w", "b"], ["y"], **attributes, **more
    )
    graph = onnx.helper.make_graph(
        [node], "g",
        [onnx.helper.make_tensor_value_info(k, 11, None) for k in "xwb"],
        [onnx.helper.make_tensor_value_info("y", 11, None)],
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)])
    [y] = load_on_reference(model)({"x": x, "w": w, "b": b})
    np.testing.assert_allclose(y, expected.numpy(), rtol=1e-12, atol=1e-12)
