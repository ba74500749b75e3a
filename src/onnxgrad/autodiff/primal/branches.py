"""Branches of an If that always run, or never.

Exporters write `atleast_1d` and the like as an If on the rank of a tensor. The branch for other
ranks cannot run, and its nodes do not fit the shapes: neither rules nor onnxruntime accept it
in a gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.inference.sizes import fold_sizes
from onnxgrad.graph.inference.walk import Walk
from onnxgrad.graph.rewrite import GROUPS, rewrite, rewrites
from onnxgrad.graph.tidy import release
from onnxgrad.graph.traversal import all_nodes, subgraphs
from onnxgrad.operators.shapes import constant


def take_static_branches(model: ir.Model, walk: Walk, keep: Collection[str]) -> bool:
    """Replace each If whose condition is static by one of its branches; return whether any was.

    `walk` has inferred the graph, and `keep` are names of node outputs that keep their names.
    """
    if not any(node.op_type == "If" for node in all_nodes(model.graph)):
        return False
    fold_sizes(model.graph, walk)
    return rewrite(model.graph, GROUPS["static branches"], keep=keep)


@rewrites("If", group="static branches")
def static_branch(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """If(true, f, h) = f,  If(false, f, h) = h: the nodes of the branch take the place of the If.

    Names that occur several times, which separate branches may have, are changed.
    """
    condition = constant(node.inputs[0])
    if condition is None:
        return None
    branch = node.attributes["then_branch" if condition.item() else "else_branch"].as_graph()
    nodes, results = list(branch), list(branch.outputs)
    counts = Counter(y.name for n in all_nodes(op.root.graph) for y in n.outputs)
    branch.outputs.clear()
    for value in list(branch.initializers.values()):
        del branch.initializers[str(value.name)]
        value.name = op.name(str(value.name))
        op.root.graph.register_initializer(value)
    for y in (y for n in nodes for y in n.outputs if y.name and counts[y.name] > 1):
        y.name = op.name(str(y.name))
    branch.remove(nodes)
    op.graph.insert_before(node, nodes)
    release(b for b in subgraphs(node) if b is not branch)
    return results
