"""`onnx_derivative`: its options, its names, its errors."""

from __future__ import annotations

import logging

import numpy as np
import onnx
import pytest

from onnxgrad import (
    DerivativeOptions,
    add_loss_output,
    check_gradient,
    jacobian,
    onnx_derivative,
    vjp,
)
from onnxgrad.graph import select_model_inputs_outputs
from tests.support.errors import naming
from tests.support.models import initializer_arrays, operator_names, parse_model
from tests.support.running import run_named
from tests.support.signatures import input_names, output_names

ZERO, YIELD, KEEP, FILL, LOSS = DerivativeOptions.Zero, *list(DerivativeOptions)
RUN_TIME_SHAPES = {"Shape", "Size", "Expand", "ConstantOfShape", "Range", "NonZero", "Tile"}


def relu_network() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    sizes = {"w": (4, 3), "b": (3,), "v": (3, 2), "c": (2,)}
    return parse_model(
        """mlp (float[N,4] X) => (float[N,2] Y)
        { h = MatMul(X, w)  i = Add(h, b)  j = Relu(i)  k = MatMul(j, v)  Y = Add(k, c) }""",
        **{name: rng.standard_normal(s).astype(np.float32) for name, s in sizes.items()},
    )


def test_golden_case():
    f = parse_model(
        """g (float[N,2] x) => (float[N,1] y) {
            one = Constant<value_ints=[1]>()  zero = Constant<value_ints=[0]>()
            two = Constant<value_ints=[2]>()  column = Constant<value_ints=[-1, 1]>()
            square = Mul(x, x)  p = Mul(square, init)  q = Mul(x, init_1)  s = Add(q, p)
            r = Slice(s, one, two, one)  l = Slice(s, zero, one, one)
            rs = Squeeze(r, one)  ls = Squeeze(l, one)  both = Add(ls, rs)
            f = Add(both, init_b10)  y = Reshape(f, column) }""",
        opset=14,
        init=[[0.5, -0.33333]],
        init_1=[[-2.0, 3.0]],
        init_b10=[-1.0],
    )
    loss = select_model_inputs_outputs(add_loss_output(f), outputs=["loss"])
    made = onnx_derivative(loss, options=FILL | KEEP)
    found = run_named(made, {
        "x": np.float32([[0, 0], [1, 0], [0, 1], [1, 1], [2, 2]]),
        "label": np.float32([[-1], [-2.5], [1.6666701], [0.16667008], [1.6666799]]),
        "init": np.float32([[2, 3]]),
        "init_1": np.float32([[0.5, 0.33333]]),
        "init_b10": np.float32([1]),
    })  # fmt: skip
    expected = {
        "loss": [[532.5546]],
        "init_grad": [[193.33316, 186.66649]],
        "init_1_grad": [[109.333244, 102.666565]],
        "init_b10_grad": [76.6666],
        "label_grad": [[-4], [-12], [-5.33332], [-13.333321], [-41.99996]],
        "x_grad": [[2, 1.33332], [54, 3.99996], [2.66666, 33.777676], [59.999943, 84.44432],
                   [356.99966, 517.9994]],
    }  # fmt: skip
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], np.float32(value), rtol=1e-6, err_msg=name)


# -- options -------------------------------------------------------------------------------------


def test_names_and_order():
    made = onnx_derivative(relu_network())
    assert input_names(made) == ["X", "w", "b", "v", "c", "Y_grad"]
    assert output_names(made) == ["X_grad", "w_grad", "b_grad", "v_grad", "c_grad"]
    made = onnx_derivative(relu_network(), weights=["v", "w"], inputs=[])
    assert input_names(made) == ["X", "v", "w", "Y_grad"]
    assert output_names(made) == ["v_grad", "w_grad"]
    made = onnx_derivative(relu_network(), weights=[])
    assert input_names(made) == ["X", "Y_grad"]
    assert output_names(made) == ["X_grad"]
    assert set(initializer_arrays(made)) >= {"w", "v"}


def test_forward_nodes_that_the_gradient_does_not_need_are_gone():
    made = onnx_derivative(relu_network(), ["c"], [])
    assert operator_names(made) == ["ReduceSum"]
    assert not made.graph.initializer or set(initializer_arrays(made)).isdisjoint({"w", "v", "b"})


def test_keep_outputs():
    text = """g (float[2] x) => (float[2] y, int64[1] where, float[2] z)
        { y = Exp(x)  where = ArgMax(x)  z = Mul(y, x) }"""
    made = onnx_derivative(parse_model(text), options=KEEP)
    assert input_names(made) == ["x", "y_grad", "z_grad"]
    assert output_names(made) == ["x_grad", "y", "where", "z"]
    x, g, h = np.float32([[1, 2], [3, 4], [5, 6]])
    found = run_named(made, {"x": x, "y_grad": g, "z_grad": h})
    np.testing.assert_allclose(found["x_grad"], np.exp(x) * (g + h * (1 + x)), rtol=1e-6)
    np.testing.assert_allclose(found["y"], np.exp(x), rtol=1e-6)
    assert found["where"] == [1]


def test_keep_outputs_names_those_that_are_no_tensors(caplog):
    text = """g (float[2] x) => (float[2] y, seq(float[2]) s)
        { y = Exp(x)  s = SequenceConstruct(y, x) }"""
    made = onnx_derivative(parse_model(text), options=KEEP)
    assert output_names(made) == ["x_grad", "y"]
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith(": s")
    caplog.clear()
    onnx_derivative(parse_model(text))
    assert not caplog.messages


@pytest.mark.parametrize("kind", ["float", "double", "float16"])
def test_fill_grad_is_of_the_outputs_shape_and_type(kind):
    made = onnx_derivative(
        parse_model(f"g ({kind}[N] x) => ({kind}[N] y) {{ y = Mul(x, x) }}"), options=FILL | KEEP
    )
    assert input_names(made) == ["x"]
    dtype = {"float": np.float32, "double": np.float64, "float16": np.float16}[kind]
    found = run_named(made, {"x": dtype([1, 2, 3])})
    np.testing.assert_array_equal(found["x_grad"], dtype([2, 4, 6]))


def test_yield_op():
    made = onnx_derivative(relu_network(), options=YIELD)
    assert input_names(made) == ["X", "w", "b", "v", "c"]
    assert output_names(made) == ["X_grad", "w_grad", "b_grad", "v_grad", "c_grad"]
    [node] = [n for n in made.graph.node if n.op_type == "YieldOp"]
    assert (node.domain, *node.input, *node.output) == ("com.microsoft", "Y", "Y_grad")
    assert [(a.name, list(a.ints)) for a in node.attribute] == [("full_shape_outputs", [0])]
    assert {o.domain for o in made.opset_import} == {"", "com.microsoft"}
    onnx.checker.check_model(made, full_check=True)


def test_yield_op_of_several_outputs():
    text = """g (float[N,2] x) => (float[N,2] y, int64[N] k, float[N,2] z)
        { y = Mul(x, w)  k = ArgMax<axis=1, keepdims=0>(y)  z = Exp(y) }"""
    made = onnx_derivative(parse_model(text, w=[1.0, 2.0]), options=YIELD)
    [node] = [n for n in made.graph.node if n.op_type == "YieldOp"]
    assert (list(node.input), list(node.output)) == (["y", "k", "z"], ["y_grad", "z_grad"])
    attributes = {a.name: list(a.ints) for a in node.attribute}
    assert attributes == {"full_shape_outputs": [0, 1, 2], "non_differentiable_outputs": [1]}
    # cut at the YieldOp, it is the same gradient as with fed ones
    made.graph.node.remove(node)
    kinds = {y.name: y for y in parse_model(text).graph.output}
    for name in ("y", "z"):
        made.graph.input.add().CopyFrom(kinds[name])
        made.graph.input[-1].name = f"{name}_grad"
    x, g, h = np.float32([[[1, 2]], [[3, 4]], [[5, 6]]])
    feed = {"x": x, "w": np.float32([1, 2]), "y_grad": g, "z_grad": h}
    expected = run_named(onnx_derivative(parse_model(text, w=[1.0, 2.0])), feed)
    for name, array in run_named(made, feed).items():
        np.testing.assert_array_equal(array, expected[name])


def test_loss(tmp_path):
    path = tmp_path / "gradient.onnx"
    model = add_loss_output(relu_network())
    made = onnx_derivative(model, ["v"], None, LOSS, loss="loss", label="label", path_name=path)
    assert input_names(made) == ["X", "label", "v"]
    assert output_names(made) == ["loss", "X_grad", "v_grad"]
    assert onnx.load(path) == made
    w = initializer_arrays(relu_network())
    x, y = np.ones((3, 4), np.float32), np.zeros((3, 2), np.float32)
    found = run_named(made, {"X": x, "label": y, "v": w["v"]})
    h = np.maximum(x @ w["w"] + w["b"], 0)
    np.testing.assert_allclose(found["v_grad"], 2 * h.T @ (h @ w["v"] + w["c"]), rtol=1e-5)
    kept = onnx_derivative(model, ["v"], None, LOSS | KEEP, loss="loss", label=["label"])
    assert output_names(kept) == ["loss", "X_grad", "v_grad", "Y"]


def test_the_model_keeps_what_is_its_own_and_is_not_modified():
    model = relu_network()
    model.producer_name, model.domain, model.doc_string = "somebody", "here", "text"
    model.metadata_props.add(key="a", value="b")
    before = model.SerializeToString()
    made = onnx_derivative(model)
    assert model.SerializeToString() == before
    for name in ("producer_name", "domain", "doc_string", "metadata_props"):
        assert getattr(made, name) == getattr(model, name)


@pytest.mark.parametrize(("opset", "made"), [(9, 18), (13, 18), (18, 18), (21, 21), (23, 23)])
def test_opset(opset, made):
    model = parse_model("g (float[N,2] x) => (float[N,2] y) { y = Tanh(x) }", opset=opset)
    assert onnx_derivative(model).opset_import[0].version == made


def test_clashing_names_give_way_unless_they_are_the_users():
    text = """g (float[2] x, float[2] x_grad) => (float[2] y, float[2] y_grad)
        { y = Mul(x, x_grad)  y_grad = Exp(y) }"""
    made = onnx_derivative(parse_model(text), options=KEEP)
    assert input_names(made)[:2] == ["x", "x_grad"]
    assert output_names(made)[-2:] == ["y", "y_grad"]
    onnx.checker.check_model(made, full_check=True)
    a, b, g, h = np.float32([[1, 2], [3, 4], [5, 6], [7, 8]])
    found = run_named(made, dict(zip(input_names(made), (a, b, g, h), strict=True)))
    np.testing.assert_allclose(next(iter(found.values())), (g + h * np.exp(a * b)) * b, rtol=1e-6)


def test_names_of_gradients_that_others_have():
    model = parse_model(
        """g (float[2] x) => (float[2] y) { x_grad = Exp(x)  h = Mul(x_grad, y_grad)
        y = Mul(h, const) }""",
        y_grad=[1.0, 2.0], const=[3.0, 4.0],
    )  # fmt: skip
    made = onnx_derivative(model)
    assert input_names(made)[:3] == ["x", "y_grad", "const"]
    assert output_names(made) == ["x_grad", "y_grad_grad", "const_grad"]
    assert check_gradient(model).ok


def test_an_input_that_is_an_output_and_an_output_used_twice():
    made = onnx_derivative(
        parse_model("g (float[2] x) => (float[2] y, float[2] z) { y = Exp(x)  z = Exp(y) }")
    )
    x = np.float32([0.1, 0.2])
    one = np.ones(2, np.float32)
    found = run_named(made, {"x": x, "y_grad": one, "z_grad": one})["x_grad"]
    np.testing.assert_allclose(found, np.exp(x) * (1 + np.exp(np.exp(x))), rtol=1e-6)


def test_weights_in_constant_nodes():
    text = """g (float[N,2] x) => (float[N,2] y) {
        w = Constant<value = float[2] {2.0, 3.0}>()  two = Constant<value_float=2.0>()
        h = Mul(x, w)  y = Mul(h, two) }"""
    made = onnx_derivative(parse_model(text))
    assert input_names(made) == ["x", "w", "y_grad"]
    assert input_names(onnx_derivative(parse_model(text), ["two"], [])) == ["x", "two", "y_grad"]


def test_weights_in_branches():
    text = """g (float[N,2] x, bool c) => (float[N,2] y) {
        y = If (c) <
            then_branch = a () => (float[N,2] t) {
                w = Constant<value = float[2] {2.0, 3.0}>()  t = Mul(x, w) },
            else_branch = b () => (float[N,2] e) { e = Neg(x) }> }"""
    model = parse_model(text)
    assert input_names(onnx_derivative(model)) == ["x", "c", "w", "y_grad"]
    for branch in (True, False):
        feed = {"x": np.float32([[1, 2], [3, 4]]), "c": np.array(branch)}
        assert check_gradient(model, feed=feed, order=2).ok


def test_weights_that_the_outputs_do_not_depend_on_stay():
    text = """g (float[N,2] x) => (float[N,2] y)
        { f = Floor(u)  h = Mul(x, w)  y = Add(h, f) }"""
    model = parse_model(text, u=[1.5, 2.5], w=[2.0, 3.0], unused=[4.0, 5.0])
    made = onnx_derivative(model, options=FILL | KEEP)
    assert input_names(made) == ["x", "w"]
    assert output_names(made) == ["x_grad", "w_grad", "y"]
    found = run_named(made, {"x": np.float32([[1, 1]]), "w": np.float32([2, 3])})
    np.testing.assert_array_equal(found["y"], [[3, 5]])


@pytest.mark.parametrize("opset", [13, 18])
def test_local_functions(opset):
    mean = "ReduceMean<axes=[1]>(c)" if opset < 18 else "ReduceMean(c, axis)"
    text = f"""g (float[N,2] x) => (float[N,1] y) {{ h = Mul(x, w)  y = local.f<slope = 0.3>(h) }}
        <domain: "local", opset_import: ["": {opset}]> f <slope> (a) => (m) {{
            axis = Constant<value_ints=[1]>()  k = Constant<value = float[2] {{2.0, 3.0}}>()
            b = LeakyRelu<alpha: float = @slope>(a)  c = Mul(b, k)  m = {mean} }}"""
    model = parse_model(text, opset=opset, w=[1.0, -2.0])
    report = check_gradient(model)
    assert report.ok, str(report)
    assert [row.name for row in report.rows[1:]] == ["x", "w", "k"]
    made = onnx_derivative(model)
    assert not made.functions
    onnx.checker.check_model(made, full_check=True)


def test_a_shared_weight_gets_the_sum():
    model = parse_model("g (float[2,2] x) => (float[2,2] y) { h = MatMul(x, w)  y = MatMul(h, w) }",
                  w=[[1.0, 2.0], [3.0, 4.0]])  # fmt: skip
    assert check_gradient(model).ok


@pytest.mark.parametrize(("verbose", "nodes"), [(0, 0), (1, 0), (2, 5)])
def test_verbose(caplog, verbose, nodes):
    level = logging.getLogger("onnxgrad").level
    with caplog.at_level(logging.NOTSET, "onnxgrad"):
        logging.getLogger("onnxgrad").setLevel(logging.NOTSET)
        onnx_derivative(relu_network(), verbose=verbose)
    assert sum("gradient of" in m for m in caplog.messages) == nodes
    assert any("nodes" in m for m in caplog.messages) == (verbose > 0)
    assert logging.getLogger("onnxgrad").level == level


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"weights": ["W"]}, ["weight 'W'", "'w'"]),
        ({"inputs": ["x"]}, ["input 'x'", "'X'"]),
        ({"options": FILL}, ["FillGrad", "KeepOutputs"]),
        ({"options": YIELD | KEEP}, ["KeepYieldOp"]),
        ({"options": YIELD | LOSS, "loss": "Y", "label": "X"}, ["KeepYieldOp"]),
        ({"options": LOSS}, ["loss", "label"]),
        ({"options": LOSS, "loss": "Y"}, ["loss", "label"]),
        ({"options": LOSS, "loss": "y", "label": "X"}, ["output 'y'", "'Y'"]),
        ({"options": LOSS, "loss": "Y", "label": "x"}, ["input 'x'"]),
        ({"loss": "Y"}, ["options=DerivativeOptions.Loss"]),
        ({"weights": [], "inputs": []}, ["differentiable path", "[]"]),
        ({"weights": ["w", "b", "w"]}, ["weight 'w'", "twice"]),
        ({"inputs": ["X", "X"]}, ["input 'X'", "twice"]),
    ],
)
def test_wrong_arguments(options, named):
    with pytest.raises(ValueError, match=naming(*named)):
        onnx_derivative(relu_network(), **options)


@pytest.mark.parametrize("options", [0, None, "Zero"])
def test_options_of_another_type(options):
    with pytest.raises(TypeError, match=naming("options", "DerivativeOptions")):
        onnx_derivative(relu_network(), options=options)


def test_integers_have_no_gradient():
    text = "g (float[3,2] x, int64[N] i) => (float[N,2] y) { j = Add(i, k)  y = Gather(x, j) }"
    model = parse_model(text, k=np.array([1]))
    with pytest.raises(ValueError, match=naming("weight 'k'", "INT64")):
        onnx_derivative(model, ["k"])
    with pytest.raises(ValueError, match=naming("input 'i'", "INT64")):
        onnx_derivative(model, inputs=["i"])
    assert output_names(onnx_derivative(model)) == ["x_grad"]


def test_what_no_path_leads_to_is_left_out_or_refused():
    text = "g (float[2] x, float[2] z) => (float[2] y) { f = Floor(z)  y = Add(x, f) }"
    model = parse_model(text)
    assert output_names(onnx_derivative(model)) == ["x_grad"]
    with pytest.raises(ValueError, match=naming("path", "'z'", "'y'")):
        onnx_derivative(model, inputs=["x", "z"])


def test_what_ends_all_paths_is_said():
    model = parse_model("g (float[2] x) => (float[2] y) { f = Floor(x)  y = Neg(f) }")
    for differentiate in (onnx_derivative, vjp, jacobian):
        with pytest.raises(ValueError, match=naming("'x'", "Floor", "'f'", "constant")):
            differentiate(model)


@pytest.mark.parametrize("differentiate", [onnx_derivative, vjp, jacobian, check_gradient])
def test_data_are_no_names(differentiate):
    with pytest.raises(TypeError, match=naming("names", "ndarray")):
        differentiate(relu_network(), np.ones((2, 3)))


def test_no_run_time_shapes_in_the_gradient_of_an_mlp():
    for options in (ZERO, FILL | KEEP):
        made = onnx_derivative(relu_network(), options=options)
        operators = set(operator_names(made))
        allowed = {"Shape", "Expand"} if options & FILL else set()  # ones of Y's run-time shape
        assert not operators & RUN_TIME_SHAPES - allowed


PRIMALS = """f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {1.0, 2.0}>
    { h = MatMul(x, w) t = Tanh(h) y = Mul(t, t) }"""


def test_the_primal_of_a_node_is_noted_where_asked():
    model = parse_model(PRIMALS)
    noted = onnx_derivative(model, note_primal=True)
    notes = {
        y: {e.key: e.value for e in n.metadata_props} for n in noted.graph.node for y in n.output
    }
    by_primal = {y: note["onnxgrad.primal"] for y, note in notes.items() if note}
    assert by_primal["x_grad"] == by_primal["w_grad"] == "h"
    assert set(by_primal.values()) == {"h", "t", "y"}
    assert by_primal.keys().isdisjoint({"h", "t", "y"})
    assert set(notes) - set(by_primal) <= {"h", "t", "y"}
    for node in noted.graph.node:
        del node.metadata_props[:]
    assert noted == onnx_derivative(model)
