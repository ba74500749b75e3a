"""The gradient of operators that are written by others only where a gradient arrives.

The fused kernels of RNN, GRU and LSTM keep nothing for the backward pass. Their nodes stay where
none is needed: a Scan in their place is slower.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnxgrad.autodiff.primal.lowerings import ON_DEMAND
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.autodiff.rules import SUBGRAPH_RULES
from onnxgrad.graph.emit import Emit


def lowered(
    op: Emit, node: ir.Node, gs: Sequence, active: Collection[ir.Value]
) -> list[tuple[ir.Value, ir.Value]]:
    """Write `node` by others, in its place, and return the gradient of these."""
    instead = Emit(op.graph, outer=op)
    with instead.at(node):
        made = ON_DEMAND[node.domain, node.op_type](instead, node)
    assert made is not None
    pairs = list(zip(node.outputs, made, strict=True))
    for y, new in pairs:
        ir.convenience.replace_all_uses_with(y, new)
    seeds = {new: g for (_, new), g in zip(pairs, gs, strict=True) if g is not None}
    wrt = [x for x in dict.fromkeys(node.inputs) if x is not None and x in active]
    return list(sweep(op, seeds, wrt, nodes=instead.written).items())


SUBGRAPH_RULES.update({name: lowered for _, name in ON_DEMAND})
