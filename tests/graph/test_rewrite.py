"""The driver of rewrites: order, outputs, names, subgraphs, and an end."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad.graph.rewrite import rewrite
from onnxgrad.graph.tidy import latest_replacement
from onnxgrad.model.convert import to_ir, to_proto
from tests.support.models import parse_model
from tests.support.running import run_named

X = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)


def scaled_model(nodes: str, outputs: str = "float[2,3] y") -> ir.Model:
    text = f"f (float[2,3] x) => ({outputs}) {{ {nodes} }}"
    return to_ir(parse_model(text, ir_version=8, w=[1.0, 2.0, 3.0]))


def assert_rewritten(one: ir.Model, table, expected: list[str], **options) -> dict[str, np.ndarray]:
    """Rewrite, check the file that results, and compare the values with those before."""
    before = run_named(to_proto(one), {"x": X})
    assert rewrite(one.graph, table, **options)
    proto = to_proto(one)
    onnx.checker.check_model(proto, full_check=True)  # topological order, too
    assert [node.op_type for node in one.graph] == expected
    for name, value in run_named(proto, {"x": X}).items():
        np.testing.assert_allclose(value, before[name], rtol=1e-6)
    return before


def twice(op, node):
    """2 x = x + x"""
    return [op.Add(node.inputs[0], node.inputs[0])]


def double_negation(op, node):
    """-(-x) = x"""
    (x,) = node.inputs
    before = x.producer()
    return [before.inputs[0]] if before is not None and before.op_type == "Neg" else None


NEG = {("", "Neg"): [double_negation]}


def test_what_becomes_possible_by_another_rewrite():
    nodes = "a = Neg(x)  b = Neg(a)  c = Neg(b)  d = Neg(c)  y = Tanh(d)"
    assert_rewritten(scaled_model(nodes), NEG, ["Tanh"])


def test_outputs_of_the_graph_keep_their_names():
    one = scaled_model("a = Neg(x)  y = Neg(a)  z = Tanh(y)", "float[2,3] y, float[2,3] z")
    assert list(assert_rewritten(one, NEG, ["Identity", "Tanh"])) == ["y", "z"]


def test_names_to_keep():
    one = scaled_model("a = Neg(x)  b = Neg(a)  y = Tanh(b)")
    assert_rewritten(one, NEG, ["Identity", "Tanh"], keep=["b"])
    assert next(iter(one.graph)).outputs[0].name == "b"


@pytest.mark.parametrize("keep", [(), ("a",)])
def test_a_copy_with_a_name_to_keep_stays(keep):
    table = {("", "Identity"): [lambda op, node: [node.inputs[0]]]}
    one = scaled_model("a = Identity(x)  b = Identity(a)  y = Identity(b)")
    assert_rewritten(one, table, ["Identity"] * (1 + len(keep)), keep=keep)


def test_other_readers_keep_what_they_read():
    assert_rewritten(scaled_model("a = Neg(x)  b = Neg(a)  y = Sub(b, a)"), NEG, ["Neg", "Sub"])


def test_a_node_shared_with_a_later_one_is_written_before_its_readers():
    table = {("", "Sinh"): [lambda op, node: [op.Mul(op.Exp(node.inputs[0]), node.inputs[0])]]}
    one = scaled_model("a = Abs(x)  b = Sinh(a)  c = Sinh(a)  y = Add(b, c)")
    before = [node.op_type for node in one.graph]
    assert rewrite(one.graph, table)
    onnx.checker.check_model(to_proto(one))
    assert before == ["Abs", "Sinh", "Sinh", "Add"]
    assert [node.op_type for node in one.graph] == ["Abs", "Exp", "Mul", "Add"]


@pytest.mark.parametrize("branch", ["then", "else"])
def test_subgraphs_and_what_they_capture(branch):
    body = {"then": "n = Neg(x)  m = Neg(n)  u = Tanh(m)", "else": "v = Sqrt(s)"}
    nodes = f"""s = Mul(x, x) c = Constant<value = bool {{{int(branch == "then")}}}>()
        y = If(c) <then_branch = g () => (float[2,3] u) {{ {body["then"]} }},
                   else_branch = h () => (float[2,3] v) {{ {body["else"]} }}>"""
    one = scaled_model(nodes)
    assert_rewritten(one, NEG, ["Mul", "Constant", "If"])
    then = list(one.graph)[-1].attributes["then_branch"].as_graph()
    assert [node.op_type for node in then] == ["Tanh"]


def test_a_change_in_place():
    def become_abs(op, node):
        node.op_type = "Abs"
        return node.outputs

    one = scaled_model("a = Relu(x)  y = Tanh(a)")
    assert rewrite(one.graph, {("", "Relu"): [become_abs]})
    assert [node.op_type for node in one.graph] == ["Abs", "Tanh"]


def test_shapes_and_types_of_what_is_replaced():
    one = scaled_model("a = Tanh(x)  y = Neg(a)")
    a = next(iter(one.graph)).outputs[0]
    a.shape, a.type = ir.Shape(["N", 3]), ir.TensorType(ir.DataType.FLOAT)
    assert rewrite(one.graph, {("", "Tanh"): [lambda op, node: [op.Sqrt(node.inputs[0])]]})
    assert tuple(next(iter(one.graph)).outputs[0].shape) == ("N", 3)


def test_nothing_applies():
    one = scaled_model("y = Tanh(x)")
    before = to_proto(one).SerializeToString()
    assert not rewrite(one.graph, NEG)
    assert to_proto(one).SerializeToString() == before


def test_what_was_written_in_vain_is_removed():
    def tries(op, node):
        op.Exp(op.Mul(node.inputs[0], 2.0))

    one = scaled_model("y = Tanh(x)")
    assert not rewrite(one.graph, {("", "Tanh"): [tries]})
    assert [node.op_type for node in one.graph] == ["Tanh"]


def test_rewrites_that_undo_each_other():
    table = {
        ("", "Neg"): [lambda op, node: [op.Abs(node.inputs[0])]],
        ("", "Abs"): [lambda op, node: [op.Neg(node.inputs[0])]],
    }
    with pytest.raises(RuntimeError, match=r"rewrites of (Abs|Neg) \(node"):
        rewrite(scaled_model("a = Neg(x)  y = Tanh(a)").graph, table)


def test_a_rewrite_for_each_round():
    """A node that waits for the one behind it is visited once a round."""

    def from_behind(op, node):
        """exp becomes tanh in front of a tanh, or of the output."""
        (x,), (y,) = node.inputs, node.outputs
        readers = [user.op_type for user, _ in y.uses()]
        return [op.Tanh(x)] if readers in ([], ["Tanh"]) else None

    names = ["x", *(f"h{i}" for i in range(150)), "y"]
    nodes = " ".join(f"{b} = Exp({a})" for a, b in pairwise(names))
    one = scaled_model(nodes)
    assert rewrite(one.graph, {("", "Exp"): [from_behind]})
    assert {node.op_type for node in one.graph} == {"Tanh"}


def test_the_target_reaches_subgraphs():
    seen = []

    def see(op, node):
        seen.append(op.target)

    nodes = """c = Constant<value = bool {1}>()
        y = If(c) <then_branch = g () => (float[2,3] u) { u = Tanh(x) },
                   else_branch = h () => (float[2,3] v) { v = Tanh(x) }>"""
    assert not rewrite(scaled_model(nodes).graph, {("", "Tanh"): [see]}, target="cpu")
    assert seen == ["cpu", "cpu"]


def test_a_written_output_takes_the_name_of_the_graph_output():
    table = {("", "Tanh"): [lambda op, node: [op.Sqrt(op.Abs(node.inputs[0]))]]}
    one = scaled_model("y = Tanh(x)  z = Neg(y)", "float[2,3] y, float[2,3] z")
    assert rewrite(one.graph, table)
    onnx.checker.check_model(to_proto(one), full_check=True)
    assert [y.name for y in one.graph.outputs] == ["y", "z"]
    assert [node.op_type for node in one.graph] == ["Abs", "Sqrt", "Neg"]


def test_an_output_that_stays():
    def top(op, node):
        return [op.ReduceMax(node.inputs[0], [-1], keepdims=1), None]

    nodes = "k = Constant<value_ints = [1]>()  v, i = TopK(x, k)  j = Cast<to = 1>(i)  y = {}"
    shape = "float[2,1] y"
    read = scaled_model(nodes.format("Add(v, j)"), shape)
    assert_rewritten(read, {("", "TopK"): [top]}, ["Constant", "ReduceMax", "TopK", "Cast", "Add"])
    assert_rewritten(
        scaled_model(nodes.format("Neg(v)"), shape), {("", "TopK"): [top]}, ["ReduceMax", "Neg"]
    )


def test_rewrites_of_every_operator():
    table = {("", "*"): [lambda op, node: [op.Neg(x)] if (x := marked(node)) else None]}

    def marked(node):
        return node.outputs[0].meta.get("opposite of")

    one = scaled_model("a = Abs(x)  b = Mul(x, x)  c = Sqrt(b)  y = Sub(c, a)")
    by_name = {node.outputs[0].name: node.outputs[0] for node in one.graph}
    by_name["c"].meta["opposite of"] = by_name["a"]
    assert rewrite(one.graph, table)
    assert [node.op_type for node in one.graph] == ["Abs", "Neg", "Sub"]


def test_what_a_value_has_become():
    one = scaled_model("a = Neg(x)  y = Tanh(a)")
    a = next(iter(one.graph)).outputs[0]
    assert latest_replacement(a) is a
    twice_ = {("", "Neg"): [twice], ("", "Add"): [lambda op, node: [op.Mul(node.inputs[0], 2.0)]]}
    assert rewrite(one.graph, twice_)
    assert latest_replacement(a) is next(iter(one.graph)).outputs[0]
    assert latest_replacement(a).producer().op_type == "Mul"
