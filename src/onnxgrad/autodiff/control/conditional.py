"""The gradient of If."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.control.copies import Copy, Pairs, add_output
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import release
from onnxgrad.graph.traversal import captured
from onnxgrad.operators.registry import subgraph_rule
from onnxgrad.operators.shapes import rank

_BRANCHES = ("then_branch", "else_branch")


@subgraph_rule("If")
def conditional(op: Emit, node: ir.Node, gs: Sequence, active: Collection[ir.Value]) -> Pairs:
    """y = If(c, f, h):  dx = If(c, f'ᵀ g, h'ᵀ g), for all x that the branches capture."""
    wrt = [v for v in captured(node) if v in active]
    copies = [Copy(op, node, name) for name in _BRANCHES]
    branch_gradients = []
    for copy in copies:
        pairs = [(y, g) for y, g in zip(copy.outputs, gs, strict=True) if g is not None]
        seeds = [  # of the shape of y, which this branch may state more precisely than the If
            (y, g if y.shape is None else copy.op.set_type_like(copy.op.copy_of(g), y))
            for y, g in pairs
        ]
        branch_gradients.append(copy.sweep(seeds, wrt))
    reached = [v for v in wrt if any(v in gradients for gradients in branch_gradients)]
    if not reached:
        release(copy.graph for copy in copies)
        return []
    for copy, gradients, name in zip(copies, branch_gradients, _BRANCHES, strict=True):
        with copy.op as inner:
            copy.set_outputs(
                gradients[v] if v in gradients else inner.zeros_like(v) for v in reached
            )
        for placeholder, original in copy.random_placeholders():
            saved = _save(op, node, name, original)
            ir.convenience.replace_all_uses_with(placeholder, saved)
    branches = {name: copy.graph for name, copy in zip(_BRANCHES, copies, strict=True)}
    outputs = op.emit_many("If", node.inputs, branches, outputs=len(reached), fresh=True)
    return [(v, op.set_type_like(dv, v)) for v, dv in zip(reached, outputs, strict=True)]


def _save(op: Emit, node: ir.Node, branch: str, random: ir.Value) -> ir.Value:
    """Make `node` return the random numbers of one branch; the other branch returns no elements."""
    assert random.dtype is not None
    [other] = [node.attributes[name].as_graph() for name in _BRANCHES if name != branch]
    empty = op.const(np.zeros((0,) * (rank(random) or 1), random.dtype.numpy()))
    other.outputs.append(Emit(other, outer=op).copy_of(empty))
    return op.set_type_like(add_output(op, node, branch, random), random)
