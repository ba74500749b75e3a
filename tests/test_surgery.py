"""`select_model_inputs_outputs`: models cut to a part."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from onnxgrad import select_model_inputs_outputs

CHAIN = """<ir_version: 8, opset_import: ["": 18]> g (float[N,2] x, float[N,2] z) => (float[N,2] y)
    { a = Exp(x)  b = Mul(a, z)  c = Neg(b)  y = Add(c, a) }"""

BRANCHES = """<ir_version: 8, opset_import: ["": 18]>
    g (float[N,2] x, bool c) => (float[N,2] y) { h = Exp(x)  y = If (c) <
        then_branch = t () => (float[N,2] r) { q = Neg(h)  r = Identity(q) },
        else_branch = e () => (float[N,2] s) { s = Neg(x) }> }"""


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


def run(made: onnx.ModelProto, **feed) -> list[np.ndarray]:
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {n: np.asarray(a, np.float32) for n, a in feed.items()})


def test_what_is_kept():
    """All declared inputs stay, as do metadata, opset and the symbols of shapes."""
    made = onnx.parser.parse_model(CHAIN.replace("18", "9"))
    made.producer_name, made.domain, made.graph.doc_string = "somebody", "here", "text"
    made.metadata_props.add(key="a", value="b")
    cut = select_model_inputs_outputs(made, ["a"])
    assert names(cut) == (["x", "z"], ["a"], ["Exp"])
    for name in ("producer_name", "domain", "metadata_props", "opset_import"):
        assert getattr(cut, name) == getattr(made, name)
    assert cut.graph.doc_string == "text"
    shape = cut.graph.output[0].type.tensor_type.shape.dim
    assert [d.dim_param or d.dim_value for d in shape] == ["N", 2]
    assert names(select_model_inputs_outputs(made)) == names(made)


def test_any_tensor_is_an_output_or_an_input():
    made = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (float[N,2] x) => (float[N,2] y) { a = Mul(x, w)  y = Add(a, v) }""")
    for name, value in (("w", [1, 2]), ("v", [3, 4])):
        made.graph.initializer.append(numpy_helper.from_array(np.float32(value), name))
    cut = select_model_inputs_outputs(made, ["y", "x", "v"])
    x = np.float32([[5, 6]])
    for found, expected in zip(run(cut, x=x), ([[8, 16]], x, [3, 4]), strict=True):
        np.testing.assert_array_equal(found, expected)
    cut = select_model_inputs_outputs(made, ["y"], ["w", "x"])
    assert [t.name for t in cut.graph.initializer] == ["v"]
    np.testing.assert_array_equal(run(cut, x=x, w=[0, 1])[0], [[3, 10]])
    cut = select_model_inputs_outputs(made, ["y"], ["y"])
    assert names(cut) == (["y"], ["y"], [])


def test_a_tensor_that_a_branch_reads_becomes_an_input():
    made = onnx.parser.parse_model(BRANCHES)
    cut = select_model_inputs_outputs(made, None, ["h", "x", "c"])
    assert names(cut) == (["h", "x", "c"], ["y"], ["If"])
    session = ort.InferenceSession(cut.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = {"h": np.float32([[1, 2]]), "x": np.float32([[3, 4]])}
    for c, expected in ((True, [[-1, -2]]), (False, [[-3, -4]])):
        np.testing.assert_array_equal(session.run(None, feed | {"c": np.array(c)})[0], expected)
    with pytest.raises(ValueError, match=re.escape("also depend on ['x']")):
        select_model_inputs_outputs(made, None, ["h", "c"])


@pytest.mark.parametrize(
    ("outputs", "inputs", "message"),
    [
        (["q"], None, "Unknown tensor 'q'"),
        (["y"], ["q"], "Unknown tensor 'q'"),
        (["y", "y"], None, "tensor 'y' is named twice"),
        (["y"], ["x", "x", "c"], "tensor 'x' is named twice"),
    ],
)
def test_tensors_in_branches_and_twice(outputs, inputs, message):
    with pytest.raises(ValueError, match=message):
        select_model_inputs_outputs(onnx.parser.parse_model(BRANCHES), outputs, inputs)


def test_an_input_of_unknown_type():
    made = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>
        g (float[N,2] x) => (float[N,2] y) { h = com.microsoft.Gelu(x)  y = Exp(h) }""")
    assert names(select_model_inputs_outputs(made, ["h"]))[2] == ["Gelu"]
    with pytest.raises(ValueError, match="the type of 'h' is not known"):
        select_model_inputs_outputs(made, ["y"], ["h"])


@pytest.mark.parametrize("outputs", [None, ["s"], ["y", "s"]])
def test_outputs_that_are_no_tensors(outputs):
    made = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (float[2] x) => (float[2] y, seq(float[2]) s)
        { y = Exp(x)  s = SequenceConstruct(y, x) }""")
    assert names(select_model_inputs_outputs(made, ["y"])) == (["x"], ["y"], ["Exp"])
    with pytest.raises(ValueError, match="'s' is no tensor: name outputs that are"):
        select_model_inputs_outputs(made, outputs)
