"""Branches of an If that always run, or never.

Exporters write `atleast_1d` and the like as an If on the rank of a tensor. The branch for other
ranks cannot run, and its nodes do not fit the shapes: neither rules nor onnxruntime accept it
in a gradient.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.inference.sizes import fold_sizes
from onnxgrad.graph.shapes import constant
from onnxgrad.graph.tidy import release, replace_node
from onnxgrad.graph.traversal import all_nodes, subgraphs


def take_static_branches(model: ir.Model, keep: Collection[str]) -> bool:
    """Replace each If whose condition is static by one of its branches; return whether any was.

    `keep` are names of node outputs that keep their names.
    """
    if not any(node.op_type == "If" for node in all_nodes(model.graph)):
        return False
    fold_sizes(model.graph)
    counts = Counter(y.name for node in all_nodes(model.graph) for y in node.outputs)
    return _take_in(Emit(model.graph), counts, keep)


def _take_in(op: Emit, counts: Counter, keep: Collection[str]) -> bool:
    """Replace the static Ifs of the graph of `op`, and of its subgraphs."""
    waiting, taken = deque(op.graph), False
    while waiting:
        node = waiting.popleft()
        static = constant(node.inputs[0]) if node.op_type == "If" and not node.domain else None
        if static is not None:
            name = "then_branch" if static.item() else "else_branch"
            waiting.extendleft(reversed(_take(op, node, name, counts, keep)))
            taken = True
            continue
        for body in subgraphs(node):
            taken |= _take_in(Emit(body, outer=op), counts, keep)
    return taken


def _take(
    op: Emit, conditional: ir.Node, name: str, counts: Counter, keep: Collection[str]
) -> list[ir.Node]:
    """Move the nodes of a branch to the place of its If, and return them.

    Names that occur several times, which separate branches may have, are changed.
    """
    branch = conditional.attributes[name].as_graph()
    nodes, results = list(branch), list(branch.outputs)
    branch.outputs.clear()
    for constant_value in list(branch.initializers.values()):
        del branch.initializers[str(constant_value.name)]
        constant_value.name = op.name(str(constant_value.name))
        op.root.graph.register_initializer(constant_value)
    for node in nodes:
        branch.remove(node)
        op.graph.insert_before(conditional, node)
        for y in node.outputs:
            if y.name and counts[y.name] > 1:
                y.name = op.name(y.name)
    unused = [b for b in subgraphs(conditional) if b is not branch]
    replace_node(op, conditional, results, keep)
    release(unused)
    return nodes
