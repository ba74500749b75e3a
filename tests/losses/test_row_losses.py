"""Losses of the rows, extracted from a total; and labels that a graph refuses when it runs."""

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrad as og
from onnxgrad.graph.emit import Emit
from onnxgrad.losses.info import LossInfo, require_labels
from onnxgrad.model.convert import to_proto
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import run

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 3))
TOTALS = {  # the nodes from x to the total s, and the losses of the rows
    "sum": ("s = ReduceSum(x)", X.sum(1)),
    "mean": ("s = ReduceMean<keepdims = 0>(x)", X.mean(1)),
    "squares": ("s = ReduceSumSquare(x)", (X**2).sum(1)),
    "absolute": ("a = ReduceL1(x)  s = Squeeze(a)", abs(X).sum(1)),
    "factor": ("a = ReduceSum(x)  b = Mul(three, a)  s = Neg(b)", -3 * X.sum(1)),
    "quotient": ("a = ReduceSum(x)  s = Div(a, three)", X.sum(1) / 3),
    "penalty": ("a = ReduceSum(x)  s = Add(a, three)", X.sum(1)),
    "difference": ("a = ReduceSum(x)  s = Sub(three, a)", -X.sum(1)),
    "three axes": ("u = Unsqueeze(x, one)  s = ReduceSum(u)", X.sum(1)),
}


@pytest.mark.parametrize("name", TOTALS)
def test_rows_of_a_total(name):
    nodes, expected = TOTALS[name]
    text = f"g (double[N,3] x) => (double s) {{ {nodes} }}"
    used = {"three": np.float64(3), "one": np.array([1])}
    weights = {n: value for n, value in used.items() if n in nodes}
    made = og.losses.unreduced_onnx_loss(parse_model(text, output_shapes=False, **weights), "rows")
    assert [y.name for y in made.graph.output] == ["rows"]
    np.testing.assert_allclose(run(made, x=X)[0].ravel(), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("reduction", "weight"), [("mean", None), ("sum", None), ("sum", "weight")]
)
def test_rows_of_a_written_loss(reduction, weight):
    model = parse_model("g (double[N,3] x) => (double[N,3] y) { y = Identity(x) }")
    total = og.add_loss_output(model, "absolute_error", reduction=reduction, weight_name=weight)
    feed = {"x": X, "label": 0 * X + 1, "weight": np.arange(5.0)}
    rows = run(og.losses.unreduced_onnx_loss(total), feed)[0]
    expected = abs(X - 1).sum(1) * (1 if weight is None else feed["weight"])
    np.testing.assert_allclose(rows[:, 0], expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("nodes", "parts"),
    [
        ("s = ReduceMax(x)", ["ReduceMax"]),
        ("s = ReduceSum(x, one)", ["ReduceSum", "('N', 1)"]),
        ("a = ReduceSum(x)  b = ReduceMax(x)  s = Mul(a, b)", ["Mul"]),
    ],
)
def test_totals_that_are_no_sums(nodes, parts):
    weights = {"one": np.array([1])} if "one" in nodes else {}
    model = parse_model(f"g (double[N,3] x) => (double[?,?] s) {{ {nodes} }}", **weights)
    with pytest.raises(ValueError, match=naming("'s'", "select_model_inputs_outputs", *parts)):
        og.losses.unreduced_onnx_loss(model)


@pytest.mark.parametrize(
    ("info", "kind", "right", "wrong", "text"),
    [
        (LossInfo(classes=3), np.int64, [0, 2], [-1, 3], "0 to 2"),
        (LossInfo(classes=3, ignore_index=-100), np.int64, [0, -100], [3, -1], "or -100"),
        (LossInfo(classes="C"), np.int64, [0, 99], [-1], "0 and above"),
        (LossInfo(loss="hinge"), np.float32, [-1, 1, 0], [2, -2], "-1 and 1"),
    ],
)
def test_wrong_labels_stop_a_graph(info, kind, right, wrong, text):
    label = ir.Value(name="label", shape=ir.Shape(["N"]))
    label.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(kind)))
    graph = ir.Graph([label], [], nodes=[], opset_imports={"": 18}, name="g")
    op = Emit(graph)
    graph.outputs.append(op.copy_of(label))
    require_labels(op, label, info)
    model = to_proto(ir.Model(graph, ir_version=9))
    np.testing.assert_array_equal(run(model, label=np.array(right, kind))[0], right)
    for value in wrong:
        with pytest.raises(Exception, match=naming("'label'", text)):
            run(model, label=np.array([right[0], value], kind))
