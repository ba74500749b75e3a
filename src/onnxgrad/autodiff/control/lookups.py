"""Rows that the iterations of a Loop take of a tensor around it, such as x[t] of a sequence.

What arrives at them is stacked, and added to the gradient of the tensor once: in every iteration,
it would take time and memory in proportion to the whole tensor.
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
    """y = x[i], of which the gradient by x is worked out after the Loop."""

    y: ir.Value
    x: ir.Value
    i: ir.Value
    hidden: ir.Value  # stands for x while the body is differentiated

    def gradient(self, op: Emit, g: ir.Value, i: ir.Value) -> ir.Value:
        """Return the gradient of x, from what arrived at y in all iterations, and where it was."""
        return op.set_type_like(scatter_rows(op, self.x, i, g), self.x)


def put_off(back: Iterations) -> list[Lookup]:
    """Hide from the sweep what the body takes rows of."""
    found = []
    for node in back.copy.graph:
        if (node.domain, node.op_type, node.attributes.get_int("axis", 0)) != ("", "Gather", 0):
            continue
        x, i = node.inputs
        if x is not None and i is not None and x in back.around and rank(x) and rank(i) == 0:
            hidden = new(back.op, x)
            node.replace_input_with(0, hidden)
            found.append(Lookup(node.outputs[0], x, i, hidden))
    return found


def show(lookups: Iterable[Lookup]) -> None:
    """Undo the hiding."""
    for lookup in lookups:
        ir.convenience.replace_all_uses_with(lookup.hidden, lookup.x)
