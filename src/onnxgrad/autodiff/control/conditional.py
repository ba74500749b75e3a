"""The gradient of If."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.control.copies import Copy, Pairs, hand_out
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import rank
from onnxgrad.graph.tidy import release
from onnxgrad.graph.traversal import captured

_BRANCHES = ("then_branch", "else_branch")


def conditional(op: Emit, node: ir.Node, gs: Sequence, active: Collection[ir.Value]) -> Pairs:
    """y = If(c, f, h):  dx = If(c, f'ᵀ g, h'ᵀ g), for all x that the branches take from around."""
    around = [v for v in captured(node) if v in active]
    copies = [Copy(op, node, name) for name in _BRANCHES]
    found = []
    for copy in copies:
        pairs = [(y, g) for y, g in zip(copy.outputs, gs, strict=True) if g is not None]
        found.append(copy.sweep([(y, _as(copy.op, g, y)) for y, g in pairs], around))
    reached = [v for v in around if any(v in gradients for gradients in found)]
    if not reached:
        release(copy.graph for copy in copies)
        return []
    for copy, gradients, name in zip(copies, found, _BRANCHES, strict=True):
        with copy.op as inner:
            copy.give(gradients[v] if v in gradients else inner.zeros_like(v) for v in reached)
        for drawn, original in copy.draws():
            ir.convenience.replace_all_uses_with(drawn, _kept(op, node, name, original))
    held = {name: copy.graph for name, copy in zip(_BRANCHES, copies, strict=True)}
    made = op.emit_many("If", node.inputs, held, outputs=len(reached), fresh=True)
    return [(v, op.set_type_like(dv, v)) for v, dv in zip(reached, made, strict=True)]


def _as(op: Emit, g: ir.Value, y: ir.Value) -> ir.Value:
    """Return `g` with what is known of the shape of `y` in this branch."""
    return g if y.shape is None else op.set_type_like(op.copy_of(g), y)


def _kept(op: Emit, node: ir.Node, name: str, drawn: ir.Value) -> ir.Value:
    """Let `node` return what one branch has drawn, and nothing instead of it from the other."""
    assert drawn.dtype is not None
    [other] = [node.attributes[n].as_graph() for n in _BRANCHES if n != name]
    nothing = op.const(np.zeros((0,) * (rank(drawn) or 1), drawn.dtype.numpy()))
    other.outputs.append(Emit(other, outer=op).copy_of(nothing))
    return op.set_type_like(hand_out(op, node, name, drawn), drawn)
