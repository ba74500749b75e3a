"""Where weights are kept: found, lifted, replaced."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.graph import get_train_initializer
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.model.weights import feeds_settings_only, replace_constants
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import run

MODEL = """g (float[N,2] x, bool c) => (float[N,2] y) {
    k = Constant<value = float[2] {2.0, 3.0}>()
    half = Constant<value_float=0.5>()  pair = Constant<value_floats=[1.0, 2.0]>()
    axis = Constant<value_ints=[1]>()  single = Constant<value = float[1] {1.0}>()
    b = If (c) <
        then_branch = t () => (float[2] r) {
            w = Constant<value = float[2] {4.0, 5.0}>()  r = Mul(w, k) },
        else_branch = e () => (float[2] w) { w = Constant<value_floats=[6.0, 7.0]>() }>
    s = ai.onnx.ml.Scaler<offset=[0.0], scale=[1.0]>(x)
    l = ai.onnx.ml.LinearRegressor<coefficients=[1.0, 2.0], intercepts=[3.0]>(s)
    h = Mul(x, v)  i = Add(h, b)  j = Add(i, l)  m = Mul(j, half)  n = Mul(m, pair)
    y = Mul(n, single) }"""


def model_of_weights() -> onnx.ModelProto:
    """Return a model with weights in every place where they may be."""
    made = parse_model(MODEL, v=[8.0, 9.0], count=np.arange(2), p=np.float64(1))
    made.graph.node[6].name = "scaler"
    return made


def run_branch(made: onnx.ModelProto, c: bool) -> np.ndarray:
    """Return the result of a branch."""
    return run(made, x=np.float32([[1, 2], [3, 4]]), c=c)[0]


def test_what_is_trained_by_default():
    found = get_train_initializer(model_of_weights())
    assert list(found) == ["v", "p", "k", "pair", "w", "w_1", "l.coefficients", "l.intercepts"]
    for name, (array, tensor) in found.items():
        assert tensor.name == name
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), array)
    np.testing.assert_array_equal(found["w_1"][0], [6, 7])
    np.testing.assert_array_equal(found["l.coefficients"][0], [1, 2])


@pytest.mark.parametrize("c", [True, False])
def test_lifting_changes_no_result(c):
    lifted = to_proto(prepare(model_of_weights()))
    np.testing.assert_array_equal(run_branch(lifted, c), run_branch(model_of_weights(), c))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_replacing_writes_where_the_value_was_and_nothing_else(dtype):
    made = model_of_weights()
    made.graph.initializer.append(numpy_helper.from_array(np.ones((2, 2), dtype), "d"))
    before = made.SerializeToString()
    new = {
        "v": [1, 2], "k": [3, 4], "half": 5.0, "pair": [6, 7], "w": [8, 9], "w_1": [10, 11],
        "l.coefficients": [12, 13], "l.intercepts": [14], "scaler.scale": [15], "d": 2 * np.eye(2),
    }  # fmt: skip
    written = replace_constants(made, {n: np.asarray(a) for n, a in new.items()})
    assert made.SerializeToString() == before
    nodes = {node.output[0]: node for node in written.graph.node}
    branches = [a.g for a in nodes["b"].attribute]
    assert list(branches[0].node[0].attribute[0].t.dims) == [2]
    np.testing.assert_array_equal(numpy_helper.to_array(branches[0].node[0].attribute[0].t), [8, 9])
    assert list(branches[1].node[0].attribute[0].floats) == [10, 11]
    assert nodes["half"].attribute[0].f == 5
    kept = {a.name: list(a.floats) for name in "ls" for a in nodes[name].attribute}
    assert kept == {"coefficients": [12, 13], "intercepts": [14], "offset": [0], "scale": [15]}
    tensors = {t.name: numpy_helper.to_array(t) for t in written.graph.initializer}
    np.testing.assert_array_equal(tensors["d"], 2 * np.eye(2))
    assert tensors["d"].dtype == dtype
    back = {n: a for n, (a, _) in get_train_initializer(made).items() if n in new}
    back |= {"half": np.float32(0.5), "scaler.scale": np.float32([1])}
    assert (
        replace_constants(written, back).SerializeToString()
        == replace_constants(made, back).SerializeToString()
    )


def test_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    made = model_of_weights()
    array = np.ones(3, ml_dtypes.bfloat16)
    made.graph.initializer.append(numpy_helper.from_array(array, "d"))
    assert get_train_initializer(made)["d"][0].dtype == ml_dtypes.bfloat16
    written = replace_constants(made, {"d": np.float32([1, 2, 3])})
    assert numpy_helper.to_array(written.graph.initializer[-1]).tolist() == [1, 2, 3]


def test_values_stored_as_lists_of_floats():
    made = model_of_weights()
    tensor = made.graph.initializer.add(name="d", data_type=onnx.TensorProto.FLOAT, dims=[2])
    tensor.float_data[:] = [1, 2]
    [written] = [
        t for t in replace_constants(made, {"d": np.ones(2)}).graph.initializer if t.name == "d"
    ]
    assert numpy_helper.to_array(written).tolist() == [1, 1]
    assert not written.float_data


def test_wrong_values():
    with pytest.raises(ValueError, match=naming("'v'", "(2,)", "(3,)", "pass an")):
        replace_constants(model_of_weights(), {"v": np.ones(3)})
    with pytest.raises(ValueError, match=naming("'V'", "'v'")):
        replace_constants(model_of_weights(), {"V": np.ones(2)})


@pytest.mark.parametrize(
    ("nodes", "setting"),
    [
        ("y = Resize(x, , s)", True),
        ("t = Concat<axis=0>(one, s)  y = Resize(x, , t)", True),
        ("t = Gather(s, i)  u = Identity(t)  y = Resize(x, , u)", True),
        ("a = Resize(x, , s)  y = Resize(a, , s)", True),
        ("a = Resize(x, , s)  y = Mul(a, s)", False),
        ("t = Identity(s)  a = Resize(x, , t)  y = Mul(a, t)", False),
        ("t = Identity(s)  y = Mul(x, t)", False), ("y = Mul(x, s)", False),
        ("t = Identity(s)  y = Neg(x)", False), ("y = Neg(x)", False),
        ("y = Resize(s, , s)", False), ("t = Neg(s)  y = Resize(x, , t)", False),
        ("y = com.microsoft.RotaryEmbedding(x, i, s, s)", True),
        ("y = RotaryEmbedding(x, i, s, s)", False),
    ],
)  # fmt: skip
def test_an_input_that_only_tells_how_to_compute_is_a_setting(nodes, setting):
    text = f"g (float[2,3] x, float[2] s, int64[2] i) => (float y) {{ {nodes} }}"
    made = to_ir(parse_model(text, output_shapes=False, one=np.float32([1])))
    assert feeds_settings_only(made.graph.inputs[1]) == setting
    assert not feeds_settings_only(made.graph.inputs[0])


def test_a_constant_called_like_a_value_computed_in_another_branch():
    made = parse_model("""g (float[N,2] x, bool c) => (float[N,2] y) { y = If (c) <
            then_branch = t () => (float[N,2] r) {
                w = Constant<value = float[2] {4.0, 5.0}>()  r = Mul(x, w) },
            else_branch = e () => (float[N,2] s) { w = Neg(x)  s = Exp(w) }> }""")
    assert list(get_train_initializer(made)) == ["w_1"]
    lifted = to_proto(prepare(made))
    for c in (True, False):
        np.testing.assert_array_equal(run_branch(lifted, c), run_branch(made, c))
    branch = replace_constants(made, {"w_1": np.ones(2)}).graph.node[0].attribute[0].g
    assert numpy_helper.to_array(branch.node[0].attribute[0].t).tolist() == [1, 1]


def test_a_tensor_that_two_nodes_share_is_one_weight():
    made = parse_model("""g (float[N,2] x) => (float[N,2] y) {
            k = Constant<value = float[2] {2.0, 3.0}>()
            a = Mul(x, k)  b = Mul(a, v)  d = Add(b, v)  y = Mul(d, k) }""")
    made.graph.initializer.append(numpy_helper.from_array(np.float32([4, 5]), "v"))
    assert list(get_train_initializer(made)) == ["v", "k"]
    new = {"v": np.float32([1, 2]), "k": np.float32([3, 4])}
    written = replace_constants(made, new)
    assert {n: a.tolist() for n, (a, _) in get_train_initializer(written).items()} == {
        n: a.tolist() for n, a in new.items()
    }
    x = np.float32([[1, 2]])
    np.testing.assert_array_equal(
        run(written, x=x)[0], (x * new["k"] * new["v"] + new["v"]) * new["k"]
    )


@pytest.mark.parametrize("names", [("lin", "lin"), ("lin", "")])
def test_names_of_coefficients(names):
    """Two nodes of one name, and a tensor called like a coefficient, get a number."""
    made = parse_model("""g (float[N,1] x) => (float[N,1] y) {
            a = ai.onnx.ml.LinearRegressor<coefficients=[2.0]>(x)
            b = Mul(a, v)  lin = ai.onnx.ml.LinearRegressor<coefficients=[3.0]>(b)
            y = Mul(lin, p) }""")
    made.graph.node[0].name, made.graph.node[2].name = names
    for name, value in (("v", 5), ("p", 7)):
        made.graph.initializer.append(numpy_helper.from_array(np.float32([value]), name))
    found = get_train_initializer(made)
    assert list(found) == ["v", "p", "lin.coefficients", "lin.coefficients_1"]
    assert [a.tolist() for a, _ in found.values()] == [[5], [7], [2], [3]]
    made.graph.node[1].output[0] = made.graph.node[2].input[0] = "lin.coefficients"
    assert list(get_train_initializer(made))[2:] == ["lin.coefficients_1", "lin.coefficients_2"]
    assert run(to_proto(prepare(made)), x=np.float32([[1]]))[0] == 2 * 5 * 3 * 7


def test_old_models_that_list_their_weights_as_inputs():
    made = onnx.parser.parse_model("""<ir_version: 3, opset_import: ["": 9]>
        g (float[N,2] x, float[2] v) => (float[N,2] y) { y = Mul(x, v) }""")
    made.graph.initializer.append(numpy_helper.from_array(np.float32([4, 5]), "v"))
    assert list(get_train_initializer(made)) == ["v"]
    assert [x.name for x in to_proto(prepare(made)).graph.input] == ["x"]


def test_external_data_is_read_and_written_into_the_model(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(
        model_of_weights(), path, save_as_external_data=True, size_threshold=0, location="m.data"
    )
    assert onnx.load(path, load_external_data=False).graph.initializer[0].external_data
    expected = get_train_initializer(model_of_weights())
    found = get_train_initializer(path)
    assert list(found) == list(expected)
    for name, (array, _) in expected.items():
        np.testing.assert_array_equal(found[name][0], array)
    written = replace_constants(onnx.load(path), {"v": np.zeros(2)})
    assert not any(t.external_data for t in written.graph.initializer)
    assert numpy_helper.to_array(written.graph.initializer[0]).tolist() == [0, 0]
