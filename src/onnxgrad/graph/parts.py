"""Sums of tensors that are zero outside of a part, as the gradients of slices are."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.shapes import constant, dims
from onnxgrad.graph.writer import Writer


@dataclass(frozen=True)
class _Part:
    """`value`, with `before` zeros in front of it along `axis` and `after` behind it."""

    value: ir.Value
    axis: int
    before: int
    length: int
    after: int

    def adjoins(self, other: _Part) -> bool:
        """Return whether `other` begins where this part ends."""
        return self.axis == other.axis and self.before + self.length == other.before


def joined(op: Writer, terms: list[ir.Value]) -> list[ir.Value]:
    """Return terms of the same sum, where those that a Pad writes are one Concat if they adjoin."""
    parts = {x: part for x in terms if (part := _part(x)) is not None}
    order = sorted(parts.values(), key=lambda part: (part.axis, part.before))
    repeated = len(parts) < sum(x in parts for x in terms)
    if len(order) < 2 or repeated or not all(a.adjoins(b) for a, b in pairwise(order)):
        return terms
    first, last, like = order[0], order[-1], next(iter(parts))
    whole = op.Concat(*(part.value for part in order), axis=first.axis)
    if first.before or last.after:
        n = len(dims(whole) or ())
        before, after = [0] * n, [0] * n
        before[first.axis], after[first.axis] = first.before, last.after
        whole = op.Pad(whole, [*before, *after])
    return [op.set_type_like(whole, like), *(x for x in terms if x not in parts)]


def _part(x: ir.Value) -> _Part | None:
    """Return the part of `x` outside of which a Pad wrote zeros, along one axis; else None."""
    node = x.producer()
    if node is None or node.domain or node.op_type != "Pad" or len(node.inputs) != 2:
        return None
    value, pads = node.inputs[0], constant(node.inputs[1])
    shape, mode = dims(value), node.attributes.get_string("mode", "constant")
    if value is None or shape is None or pads is None or mode != "constant" or np.any(pads < 0):
        return None
    before, after = pads.reshape(2, -1)
    axes = np.flatnonzero(before + after)
    length = shape[axes[0]] if len(axes) == 1 else None
    if not isinstance(length, int):
        return None
    axis = int(axes[0])
    return _Part(value, axis, int(before[axis]), length, int(after[axis]))
