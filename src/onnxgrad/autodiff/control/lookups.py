"""Gathers that the body of a Loop makes of a captured tensor, such as x[t] of a sequence.

The cotangents of all iterations are stacked, and scattered into the gradient of the tensor once:
adding them in every iteration would take time and memory in proportion to the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.autodiff.control.copies import new
from onnxgrad.autodiff.control.iterations import Iterations
from onnxgrad.autodiff.rules.shape import scatter_rows
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import rank


@dataclass
class Lookup:
    """y = x[i]; the gradient with respect to x is computed after the backward Loop."""

    y: ir.Value
    x: ir.Value
    i: ir.Value
    hidden: ir.Value  # replaces x while the body is differentiated

    def gradient(self, op: Emit, g: ir.Value, i: ir.Value) -> ir.Value:
        """Return the gradient of x, from the stacked cotangents of y and the stacked indices."""
        return op.set_type_like(scatter_rows(op, self.x, i, g), self.x)


def put_off(back: Iterations) -> list[Lookup]:
    """Replace the captured tensors that the body gathers from by placeholders, for the sweep."""
    lookups = []
    for node in back.copy.graph:
        if (node.domain, node.op_type, node.attributes.get_int("axis", 0)) != ("", "Gather", 0):
            continue
        x, i = node.inputs
        if x is not None and i is not None and x in back.captured and rank(x) and rank(i) == 0:
            hidden = new(back.op, x)
            node.replace_input_with(0, hidden)
            lookups.append(Lookup(node.outputs[0], x, i, hidden))
    return lookups


def show(lookups: Iterable[Lookup]) -> None:
    """Replace the placeholders by the captured tensors again, after the sweep."""
    for lookup in lookups:
        ir.convenience.replace_all_uses_with(lookup.hidden, lookup.x)
