"""Graphs that are taken apart: their objects are freed without the garbage collector."""

import weakref

import onnx_ir as ir

from onnxgrad.graph import Emit
from onnxgrad.graph.tidy import drop_unused, take_apart, take_apart_after
from onnxgrad.model.convert import to_ir, to_proto, to_proto_and_free
from tests.support.collector import count_graph_objects
from tests.support.models import parse_model

MODEL = parse_model(
    """f (float[N,2] x, bool c) => (float[N,2] y) {
        u = Mul(x, w) unread = Exp(u)
        r = If (c) <
            then_branch = g1 () => (float[N,2] a) { spare = Neg(u) a = Tanh(u) },
            else_branch = g2 () => (float[N,2] b) { b = Add(u, w) }>
        y = Mul(r, r) }""",
    w=[2.0, 3.0],
)


def test_all_objects_are_freed_without_the_collector(no_collector):
    before = count_graph_objects()
    model = to_ir(MODEL)
    with Emit(model.graph) as op:
        drop_unused(model.graph)  # nodes of the graph and of a branch
        model.graph.outputs[:] = [op.Tanh(op.Exp(model.graph.outputs[0]))]
    assert count_graph_objects() > before
    take_apart(model.graph)
    take_apart(model.graph)  # changes nothing
    del model, op
    assert count_graph_objects() == before


def test_values_keep_what_describes_them(no_collector):
    model = to_ir(MODEL)
    graph = model.graph
    [y], (x, c) = graph.outputs, graph.inputs
    constant = graph.initializers["w"]
    reference = weakref.ref(graph)
    take_apart(graph)
    assert graph.inputs == [x, c]
    del model, graph
    assert reference() is None
    assert [(v.name, v.dtype, v.shape and list(v.shape)[1:]) for v in (x, y)] == [
        ("x", ir.DataType.FLOAT, [2]),
        ("y", ir.DataType.FLOAT, [2]),
    ]
    assert (y.producer(), list(x.uses()), x.graph) == (None, [], None)
    assert constant.const_value.numpy().tolist() == [2.0, 3.0]


def test_a_graph_that_was_cloned_stays_whole():
    """The notes of a clone list the nodes that were removed from its original."""
    model = to_ir(MODEL)
    drop_unused(model.graph)
    expected = to_proto(model)
    copy = model.clone()
    take_apart(copy.graph)
    assert to_proto(model) == expected
    other = model.clone()
    take_apart(model.graph)
    assert to_proto(other) == expected


def test_a_node_that_was_put_back_stays_whole():
    first, second = to_ir(MODEL), to_ir(MODEL)
    node = first.graph[-1]
    first.graph.outputs.clear()
    drop_unused(first.graph)
    second.graph.append(node)
    take_apart(first.graph)
    assert node.outputs[0].name == "y"
    assert node.graph is second.graph


def test_a_graph_lives_as_long_as_its_owner(no_collector):
    class Owner:
        graph: ir.Graph

    before, owner = count_graph_objects(), Owner()
    owner.graph = to_ir(MODEL).graph
    take_apart_after(owner, owner.graph)
    assert len(owner.graph) == 4
    del owner
    assert count_graph_objects() == before


def test_the_last_conversion_frees_functions_too(no_collector):
    model = parse_model(
        """<ir_version: 9, opset_import: ["": 20, "own": 1]>
        f (float[N] x) => (float[N] y) { y = own.double(x) }
        <domain: "own", opset_import: ["": 20]> double (a) => (b) { b = Add(a, a) }"""
    )
    before = count_graph_objects()
    proto = to_proto_and_free(to_ir(model))
    assert count_graph_objects() == before
    assert [f.name for f in proto.functions] == ["double"]
