"""Objects that are freed without Python's garbage collector: see the fixture `no_collector`."""

import gc

import onnx_ir as ir


def count_graph_objects() -> int:
    """Return the number of nodes, values and graphs in memory."""
    return sum(type(o) in (ir.Graph, ir.Node, ir.Value) for o in gc.get_objects())
