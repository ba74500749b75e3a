"""Penalties on weights: a |w| + b w^2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import NodeProto, TensorProto

from onnxgrad.errors import unknown
from onnxgrad.graph.emit import Emit


def penalty_loss_onnx(
    name: str,
    dtype: Any,
    l1: float | None = None,
    l2: float | None = None,
    existing_names: Iterable[str] | None = None,
) -> tuple[list[TensorProto], list[NodeProto]]:
    """Return the initializers and nodes that compute `l1 |w| + l2 w^2`, summed, for a weight w.

    The last node's output holds the penalty, of shape (1, 1) and of the weight's dtype.
    They are valid from opset 13 on.

    Args:
        name: name of the weight, a tensor of any shape.
        dtype: its numpy dtype.
        l1: coefficient of the absolute values, None or 0 for none.
        l2: coefficient of the squares, None or 0 for none.
        existing_names: names that the graph has already.

    Raises:
        ValueError: both coefficients are null.
    """
    kind = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
    weight = ir.Value(name=name, type=kind)
    graph = ir.Graph([weight], [], nodes=[], opset_imports={"": 18})
    op = Emit(graph, existing_names or ())
    with op:
        penalty(op, weight, l1, l2)
    tensors = (v.const_value for v in graph.initializers.values())
    initializers = [ir.to_proto(t) for t in tensors if t is not None]
    return initializers, [ir.to_proto(node) for node in graph]


def penalty(op: Emit, w: ir.Value, l1: float | None, l2: float | None) -> ir.Value:
    """Write `l1 |w| + l2 w^2`, summed, of shape (1, 1)."""
    if not l1 and not l2:
        raise ValueError(f"the penalty of {w.name!r} is null: give l1 or l2 a value")
    flat = op.Reshape(w, [1, -1])
    terms = []
    if l1:
        terms.append(l1 * op.ReduceSum(op.Abs(flat), keepdims=1))
    if l2:
        terms.append(l2 * op.ReduceSum(flat * flat, keepdims=1))
    return op.total(terms)


def add_penalties(
    op: Emit, loss: ir.Value, penalties: Mapping[str, Any], values: Mapping[str, ir.Value]
) -> ir.Value:
    """Write `loss` plus the penalties of the named `values`, `{name: b}` or `{name: {l1, l2}}`."""
    floats = {n: v for n, v in values.items() if v.dtype and v.dtype.is_floating_point()}
    for name, given in penalties.items():
        if name not in floats:
            raise unknown("weight in penalty", name, floats)
        options = dict(given) if isinstance(given, Mapping) else {"l2": given}
        for key in options:
            if key not in ("l1", "l2"):
                raise unknown(f"penalty of {name!r}", key, ["l1", "l2"])
        added = penalty(op, floats[name], options.get("l1"), options.get("l2"))
        loss = loss + op.Cast(added, to=loss.dtype)
    return loss
