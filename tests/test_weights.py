"""Where weights are kept: found, lifted, replaced; and models cut to a part."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from onnxgrad import get_train_initializer, select_model_inputs_outputs
from onnxgrad.graph.prepare import prepare, to_proto
from onnxgrad.graph.weights import replace

MODEL = """<ir_version: 8, opset_import: ["": 18, "ai.onnx.ml": 3]>
g (float[N,2] x, bool c) => (float[N,2] y) {
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


def model() -> onnx.ModelProto:
    made = onnx.parser.parse_model(MODEL)
    made.graph.node[6].name = "scaler"
    for name, array in (("v", np.float32([8, 9])), ("count", np.arange(2)), ("p", np.float64(1))):
        made.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return made


def run(made: onnx.ModelProto, c: bool) -> np.ndarray:
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.float32([[1, 2], [3, 4]])
    return session.run(None, {"x": x, "c": np.array(c)})[0]


def test_what_is_trained_by_default():
    found = get_train_initializer(model())
    assert list(found) == ["v", "p", "k", "pair", "w", "w_1", "l.coefficients", "l.intercepts"]
    for name, (array, tensor) in found.items():
        assert tensor.name == name
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), array)
    np.testing.assert_array_equal(found["w_1"][0], [6, 7])
    np.testing.assert_array_equal(found["l.coefficients"][0], [1, 2])


@pytest.mark.parametrize("c", [True, False])
def test_lifting_changes_no_result(c):
    np.testing.assert_array_equal(run(to_proto(prepare(model())), c), run(model(), c))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_replacing_writes_where_the_value_was_and_nothing_else(dtype):
    made = model()
    made.graph.initializer.append(numpy_helper.from_array(np.ones((2, 2), dtype), "d"))
    before = made.SerializeToString()
    new = {
        "v": [1, 2], "k": [3, 4], "half": 5.0, "pair": [6, 7], "w": [8, 9], "w_1": [10, 11],
        "l.coefficients": [12, 13], "l.intercepts": [14], "scaler.scale": [15], "d": 2 * np.eye(2),
    }  # fmt: skip
    written = replace(made, {n: np.asarray(a) for n, a in new.items()})
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
    assert replace(written, back).SerializeToString() == replace(made, back).SerializeToString()


def test_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    made = model()
    array = np.ones(3, ml_dtypes.bfloat16)
    made.graph.initializer.append(numpy_helper.from_array(array, "d"))
    assert get_train_initializer(made)["d"][0].dtype == ml_dtypes.bfloat16
    written = replace(made, {"d": np.float32([1, 2, 3])})
    assert numpy_helper.to_array(written.graph.initializer[-1]).tolist() == [1, 2, 3]


def test_values_stored_as_lists_of_floats():
    made = model()
    tensor = made.graph.initializer.add(name="d", data_type=onnx.TensorProto.FLOAT, dims=[2])
    tensor.float_data[:] = [1, 2]
    [written] = [t for t in replace(made, {"d": np.ones(2)}).graph.initializer if t.name == "d"]
    assert numpy_helper.to_array(written).tolist() == [1, 1]


def test_wrong_values():
    with pytest.raises(ValueError, match=r"'v' has shape \(2,\), the new value \(3,\)"):
        replace(model(), {"v": np.ones(3)})
    with pytest.raises(ValueError, match="no constant called 'V'"):
        replace(model(), {"V": np.ones(2)})


# -- parts of a model ----------------------------------------------------------------------------

CHAIN = """<ir_version: 8, opset_import: ["": 18]> g (float[N,2] x, float[N,2] z) => (float[N,2] y)
    { a = Exp(x)  b = Mul(a, z)  c = Neg(b)  y = Add(c, a) }"""


def names(made: onnx.ModelProto) -> tuple[list[str], list[str], list[str]]:
    graph = made.graph
    kinds = graph.input, graph.output
    return *([v.name for v in vs] for vs in kinds), [n.op_type for n in graph.node]


def test_selecting_outputs_and_inputs():
    made = onnx.parser.parse_model(CHAIN)
    before = made.SerializeToString()
    assert names(select_model_inputs_outputs(made, ["b"])) == (["x", "z"], ["b"], ["Exp", "Mul"])
    cut = select_model_inputs_outputs(made, ["y"], ["a", "z"])
    assert names(cut) == (["a", "z"], ["y"], ["Mul", "Neg", "Add"])
    onnx.checker.check_model(cut, full_check=True)
    cut = select_model_inputs_outputs(made, ["c", "a"], ["x", "b"])
    assert names(cut) == (["x", "b"], ["c", "a"], ["Exp", "Neg"])
    assert made.SerializeToString() == before
    x, z = np.float32([[[1, 2]], [[3, 4]]])
    session = ort.InferenceSession(cut.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x, "b": z})[0], -z)


def test_wrong_selections():
    made = onnx.parser.parse_model(CHAIN)
    with pytest.raises(ValueError, match=r"Unknown tensor 'Y'\. Did you mean 'y'"):
        select_model_inputs_outputs(made, ["Y"])
    with pytest.raises(ValueError, match=r"also depend on \['z'\]: add to `inputs`"):
        select_model_inputs_outputs(made, ["y"], ["a"])
