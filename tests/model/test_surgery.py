"""Models cut to a part, constants replaced and added, opsets."""

from __future__ import annotations

import logging
import re

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from onnxgrad import add_loss_output
from onnxgrad.graph import (
    add_initializer,
    get_onnx_opset,
    get_train_initializer,
    onnx_rename_weights,
    replace_initializers_into_onnx,
    select_model_inputs_outputs,
)
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import run

CHAIN = """g (float[N,2] x, float[N,2] z) => (float[N,2] y)
    { a = Exp(x)  b = Mul(a, z)  c = Neg(b)  y = Add(c, a) }"""

BRANCHES = """g (float[N,2] x, bool c) => (float[N,2] y) { h = Exp(x)  y = If (c) <
        then_branch = t () => (float[N,2] r) { q = Neg(h)  r = Identity(q) },
        else_branch = e () => (float[N,2] s) { s = Neg(x) }> }"""


def names_and_operators(made: onnx.ModelProto) -> tuple[list[str], list[str], list[str]]:
    graph = made.graph
    kinds = graph.input, graph.output
    return *([v.name for v in vs] for vs in kinds), [n.op_type for n in graph.node]


def test_selecting_outputs_and_inputs():
    made = parse_model(CHAIN)
    before = made.SerializeToString()
    assert names_and_operators(select_model_inputs_outputs(made, ["b"])) == (
        ["x", "z"],
        ["b"],
        ["Exp", "Mul"],
    )
    cut = select_model_inputs_outputs(made, ["y"], ["a", "z"])
    assert names_and_operators(cut) == (["a", "z"], ["y"], ["Mul", "Neg", "Add"])
    onnx.checker.check_model(cut, full_check=True)
    cut = select_model_inputs_outputs(made, ["c", "a"], ["x", "b"])
    assert names_and_operators(cut) == (["x", "b"], ["c", "a"], ["Exp", "Neg"])
    assert made.SerializeToString() == before
    x, z = np.float32([[[1, 2]], [[3, 4]]])
    np.testing.assert_allclose(run(cut, x=x, b=z)[0], -z)


@pytest.mark.parametrize("infer_shapes", [True, False])
def test_shapes_that_the_model_does_not_state(infer_shapes):
    made = parse_model(CHAIN)
    cut = select_model_inputs_outputs(made, ["b", "y"], infer_shapes=infer_shapes)
    stated = [y.type.tensor_type.HasField("shape") for y in cut.graph.output]
    assert stated == [infer_shapes, True]
    assert [y.type.tensor_type.elem_type for y in cut.graph.output] == [1, 1]
    assert cut.graph.output[1].type == made.graph.output[0].type
    x, z = np.float32([[[1, 2]], [[3, 4]]])
    np.testing.assert_allclose(run_in_float32(cut, x=x, z=z)[0], np.exp(x) * z, rtol=1e-6)


@pytest.mark.parametrize(("verbose", "lines"), [(0, 0), (1, 1), (2, 5)])
def test_verbose(caplog, verbose, lines):
    caplog.set_level(logging.WARNING, "onnxgrad")
    caplog.handler.setLevel(logging.NOTSET)
    select_model_inputs_outputs(parse_model(CHAIN), ["b"], verbose=verbose)
    written = [record.getMessage() for record in caplog.records]
    assert len(written) == lines
    if written:
        assert written[-1] == "2 of 4 nodes are kept"
        fates = [line.split()[-1] for line in written[:-1]]
        assert fates == ["kept", "kept", "removed", "removed"][: lines - 1]


def test_wrong_selections():
    made = parse_model(CHAIN)
    with pytest.raises(ValueError, match=naming("'Y'", "'y'")):
        select_model_inputs_outputs(made, ["Y"])
    with pytest.raises(ValueError, match=naming("['z']", "`inputs`")):
        select_model_inputs_outputs(made, ["y"], ["a"])


def run_in_float32(made: onnx.ModelProto, **feed) -> list[np.ndarray]:
    """Return the outputs of a model for lists of numbers."""
    return run(made, **{n: np.asarray(a, np.float32) for n, a in feed.items()})


def test_what_is_kept():
    """All declared inputs stay, as do metadata, opset and the symbols of shapes."""
    made = parse_model(CHAIN, opset=9)
    made.producer_name, made.domain, made.graph.doc_string = "somebody", "here", "text"
    made.metadata_props.add(key="a", value="b")
    cut = select_model_inputs_outputs(made, ["a"])
    assert names_and_operators(cut) == (["x", "z"], ["a"], ["Exp"])
    for name in ("producer_name", "domain", "metadata_props", "opset_import"):
        assert getattr(cut, name) == getattr(made, name)
    assert cut.graph.doc_string == "text"
    shape = cut.graph.output[0].type.tensor_type.shape.dim
    assert [d.dim_param or d.dim_value for d in shape] == ["N", 2]
    assert names_and_operators(select_model_inputs_outputs(made)) == names_and_operators(made)


def test_initializers_keep_their_order():
    """Large ones too, which the inference of shapes takes out for a while."""
    made = parse_model("""g (float[N,2] x) => (float[N,4] y)
        { a = MatMul(x, big)  b = Add(a, small)  c = MatMul(b, large)  y = Add(c, last) }""")
    shapes = {"big": (2, 300), "small": (300,), "large": (300, 4), "last": (4,)}
    for name, shape in shapes.items():
        made.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    assert list(get_train_initializer(select_model_inputs_outputs(made))) == list(shapes)
    cut = onnx_rename_weights(select_model_inputs_outputs(made, ["c"]))
    assert [t.name for t in cut.graph.initializer] == ["I0_big", "I1_small", "I2_large"]
    assert list(get_train_initializer(add_loss_output(made))) == list(shapes)


def test_any_tensor_is_an_output_or_an_input():
    made = parse_model("""g (float[N,2] x) => (float[N,2] y) { a = Mul(x, w)  y = Add(a, v) }""")
    for name, value in (("w", [1, 2]), ("v", [3, 4])):
        made.graph.initializer.append(numpy_helper.from_array(np.float32(value), name))
    cut = select_model_inputs_outputs(made, ["y", "x", "v"])
    x = np.float32([[5, 6]])
    for found, expected in zip(run_in_float32(cut, x=x), ([[8, 16]], x, [3, 4]), strict=True):
        np.testing.assert_array_equal(found, expected)
    cut = select_model_inputs_outputs(made, ["y"], ["w", "x"])
    assert [t.name for t in cut.graph.initializer] == ["v"]
    np.testing.assert_array_equal(run_in_float32(cut, x=x, w=[0, 1])[0], [[3, 10]])
    cut = select_model_inputs_outputs(made, ["y"], ["y"])
    assert names_and_operators(cut) == (["y"], ["y"], [])


def test_one_of_two_results_of_a_node_becomes_an_input():
    made = parse_model("""g (float[1,1,4] x) => (float[1,1,2] y) {
            m, i = MaxPool<kernel_shape=[2], strides=[2]>(x)  f = Cast<to=1>(i)  y = Add(m, f) }""")
    cut = select_model_inputs_outputs(made, ["y"], ["x", "m"])
    onnx.checker.check_model(cut, full_check=True)
    np.testing.assert_array_equal(
        run_in_float32(cut, x=[[[2, 1, 0, 1]]], m=[[[10, 20]]]), [[[[10, 23]]]]
    )


def test_a_tensor_that_a_branch_reads_becomes_an_input():
    made = parse_model(BRANCHES)
    cut = select_model_inputs_outputs(made, None, ["h", "x", "c"])
    assert names_and_operators(cut) == (["h", "x", "c"], ["y"], ["If"])
    feed = {"h": np.float32([[1, 2]]), "x": np.float32([[3, 4]])}
    for c, expected in ((True, [[-1, -2]]), (False, [[-3, -4]])):
        np.testing.assert_array_equal(run(cut, feed, c=c)[0], expected)
    with pytest.raises(ValueError, match=naming("depend on", "['x']")):
        select_model_inputs_outputs(made, None, ["h", "c"])


@pytest.mark.parametrize(
    ("outputs", "inputs", "message"),
    [
        (["q"], None, "Unknown tensor 'q'"),
        (["y"], ["q"], "Unknown tensor 'q'"),
        (["y", "y"], None, "tensor 'y' is named twice: name each tensor once"),
        (["y"], ["x", "x", "c"], "tensor 'x' is named twice: name each tensor once"),
    ],
)
def test_tensors_in_branches_and_twice(outputs, inputs, message):
    with pytest.raises(ValueError, match=message):
        select_model_inputs_outputs(parse_model(BRANCHES), outputs, inputs)


def test_an_input_of_unknown_type():
    made = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "own": 1]>
        g (float[N,2] x) => (float[N,2] y) { h = own.Thing(x)  y = Exp(h) }""")
    assert names_and_operators(select_model_inputs_outputs(made, ["h"]))[2] == ["Thing"]
    with pytest.raises(ValueError, match=naming("'h'", "unknown", "value_info")):
        select_model_inputs_outputs(made, ["y"], ["h"])


@pytest.mark.parametrize("outputs", [None, ["s"], ["y", "s"]])
def test_outputs_that_are_no_tensors(outputs):
    made = parse_model("""g (float[2] x) => (float[2] y, seq(float[2]) s)
        { y = Exp(x)  s = SequenceConstruct(y, x) }""")
    assert names_and_operators(select_model_inputs_outputs(made, ["y"])) == (["x"], ["y"], ["Exp"])
    with pytest.raises(ValueError, match=naming("'s'", "no tensor", "name outputs")):
        select_model_inputs_outputs(made, outputs)


CONSTANTS = """g (float[N,2] x, bool c) => (float[N,2] y, int64[2] n, int64 one, string[2] s)
    <float[2] w = {2, 3}, int64[2] n = {4, 5}, string[2] s = {"a", "b"}, float16[2] h = {1, 2}> {
        [sc] b = ai.onnx.ml.Scaler<offset = [0.0], scale = [1.0]>(x)
        one = Constant<value_int = 1>()
        a = Mul(b, w)
        y = If (c) <
            then_branch = t () => (float[N,2] r) {
                k = Constant<value = float[2] {4.0, 5.0}>()  r = Mul(a, k) },
            else_branch = e () => (float[N,2] r) <float[2] k = {6, 7}> { r = Mul(a, k) }> }"""


def model_of_constants() -> onnx.ModelProto:
    return parse_model(CONSTANTS)


def test_replacing_constants_wherever_they_are():
    made = model_of_constants()
    before = made.SerializeToString()
    new = {
        "w": ort.OrtValue.ortvalue_from_numpy(np.float32([1, 2])), "n": np.int32([6, 7]),
        "one": 8.0, "s": ["longer", "b"], "k": np.float64([1, 10]), "k_1": [3, 30],
        "sc.scale": np.float32([2]), "h": np.float32([0.1, 3]),
    }  # fmt: skip
    written = replace_initializers_into_onnx(made, new)
    assert made.SerializeToString() == before
    onnx.checker.check_model(written, full_check=True)
    x = np.float32([[1, 1]])
    for c, expected in ((True, [[2, 40]]), (False, [[6, 120]])):
        y, n, one, s = run(written, x=x, c=c)
        np.testing.assert_array_equal(y, expected)
        assert (n.tolist(), one.tolist(), s.tolist()) == ([6, 7], 8, ["longer", "b"])
    half = numpy_helper.to_array(written.graph.initializer[3])
    assert half.tolist() == [np.float16(0.1), 3]
    assert replace_initializers_into_onnx(made, {}) == made


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"w": np.ones(2), "W": np.ones(2)}, "Unknown constant 'W'. Did you mean 'w'"),
        ({"x": np.ones(2)}, "Unknown constant 'x'"),
        ({"w": np.ones((1, 2))}, "'w' has the shape (2,), and its new value has the shape (1, 2)"),
        ({"w": ["1", "2"]}, "'w' holds float32, which the new value"),
        ({"w": [1j, 2]}, "'w' holds float32, which the new value (complex128) does not fit"),
        ({"n": [0.5, 1.0]}, "'n' holds int64, which the new value (float64) does not fit"),
        ({"n": [np.nan, 1]}, "'n' holds int64"),
        ({"n": np.uint64([2**63, 1])}, "'n' holds int64, which the new value (uint64)"),
        ({"s": [1, 2]}, "'s' holds strings, which the new value (int64) does not fit: pass"),
    ],
)
def test_wrong_constants(new, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        replace_initializers_into_onnx(model_of_constants(), new)


@pytest.mark.parametrize(
    "value",
    [np.float32(2), np.ones((0, 3)), np.int8([[1, 2]]), np.array([True]), np.array(["a", "bc"])],
)
def test_adding_an_initializer(value):
    made = model_of_constants()
    before = made.SerializeToString()
    added = add_initializer(made, "new", value)
    assert made.SerializeToString() == before
    onnx.checker.check_model(added)
    array = numpy_helper.to_array(added.graph.initializer[-1])
    np.testing.assert_array_equal(array, value)
    assert array.shape == np.shape(value)
    if np.asarray(value).dtype.kind != "U":
        assert array.dtype == np.asarray(value).dtype
    del added.graph.initializer[-1]
    assert added == made


def test_adding_to_an_old_model():
    made = onnx.parser.parse_model("""<ir_version: 3, opset_import: ["": 9]>
        g (float[N,2] x) => (float[N,2] y) { y = Neg(x) }""")
    value = ort.OrtValue.ortvalue_from_numpy(np.float32([1]))
    added = add_initializer(made, "v", value)
    onnx.checker.check_model(added)
    assert list(get_train_initializer(added)) == ["v"]
    made.graph.node[0].input[0] = "u"  # which nothing gives so far
    onnx.checker.check_model(add_initializer(made, "u", np.ones((1, 2), np.float32)))


@pytest.mark.parametrize("name", ["x", "y", "w", "a", "r", "k", "c"])
def test_names_that_are_taken(name):
    with pytest.raises(ValueError, match=f"a value called '{name}' already"):
        add_initializer(model_of_constants(), name, np.ones(2))


def test_initializers_that_cannot_be():
    with pytest.raises(ValueError, match=naming("name", "empty")):
        add_initializer(model_of_constants(), "", np.ones(2))
    with pytest.raises(ValueError, match=naming("'new'", "datetime64")):
        add_initializer(model_of_constants(), "new", np.array(["2020-01-01"], "datetime64[D]"))


def test_opsets():
    made = model_of_constants()
    assert get_onnx_opset(made) == get_onnx_opset(made, "ai.onnx") == 18
    assert get_onnx_opset(made.SerializeToString(), "ai.onnx.ml") == 3
    made.opset_import[0].domain = "ai.onnx"
    assert get_onnx_opset(made) == 18
    with pytest.raises(ValueError, match=r"Unknown domain 'com\.microsoft'.*'ai\.onnx\.ml'"):
        get_onnx_opset(made, "com.microsoft")
