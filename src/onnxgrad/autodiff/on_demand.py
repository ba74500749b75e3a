"""The gradient of operators that are lowered only if a gradient flows through them.

The fused kernels of RNN, GRU and LSTM keep nothing for the backward pass, so they are lowered to a
Scan, which is slower. Nodes that need no gradient keep their fused kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnxgrad.autodiff.primal.lowerings import ON_DEMAND
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.autodiff.rules import SUBGRAPH_RULES
from onnxgrad.errors import NoGradientRule
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.traversal import reads


def lowered(
    op: Emit, node: ir.Node, gs: Sequence, active: Collection[ir.Value]
) -> list[tuple[ir.Value, ir.Value]]:
    """Replace `node` by its lowering, and return the gradients of the node's inputs."""
    wrt = [x for x in reads(node) if x in active]
    lowering = Emit(op.graph, outer=op)
    with lowering.at(node):
        outputs = ON_DEMAND[node.domain, node.op_type](lowering, node)
    if outputs is None:
        where = f"{node.op_type} (node {node.name!r}, output {node.outputs[0].name!r})"
        raise NoGradientRule(f"{where}: its lowering left it as it is, and it has no rule")
    for old, new in zip(node.outputs, outputs, strict=True):
        ir.convenience.replace_all_uses_with(old, new)
    seeds = {y: g for y, g in zip(outputs, gs, strict=True) if g is not None}
    return list(sweep(op, seeds, wrt, nodes=lowering.written).items())


SUBGRAPH_RULES.update(dict.fromkeys(ON_DEMAND, lowered))
