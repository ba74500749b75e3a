"""LinearAttention, unrolled over its rows.

https://onnx.ai/onnx/operators/onnx__LinearAttention.html; Yang, Kautz & Hatamizadeh 2024,
arXiv:2412.06464.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxgrad.autodiff.registry import lowering
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import dims

_MOST_ROWS = 64  # a dozen nodes each; longer inputs use the function body, a Scan in float32


@lowering("LinearAttention")
def linear_attention(op: Emit, node: Any) -> list[ir.Value] | None:
    """S <- e^g S,  u = v or b (v - ST k),  S <- S + k uT,  y = s ST q, for one row after the other.

    As the specification demands, computed in float32 for half precision.
    """
    q, k, v, past, decay, beta = (*node.inputs, *[None] * 6)[:6]
    rows = (dims(q) or (None, None))[1]
    if not isinstance(rows, int) or rows > _MOST_ROWS:
        return None
    heads, shared = (node.attributes.get_int(f"{which}_num_heads") for which in ("q", "kv"))
    precise = q.dtype if q.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    scaled = op.Cast(q, to=precise) * _scale(op, node, q, heads)
    shapes = (
        (scaled, [0, shared, heads // shared, -1]),
        (k, [0, shared, -1, 1]),
        (v, [0, shared, 1, -1]),
        (decay, [0, shared, -1, 1]),  # one number per head, or one per element of k
        (beta, [0, -1, 1, 1]),
    )
    parts = [_rows(op, x, rows, precise, shape) for x, shape in shapes]
    state, ys = None if past is None else op.Cast(past, to=precise), []
    for q_t, k_t, v_t, g_t, b_t in zip(*parts, strict=True):
        if g_t is not None and state is not None:
            state = state * op.Exp(g_t)
        if b_t is not None:
            recalled = 0.0 if state is None else op.ReduceSum(state * k_t, [-2], keepdims=1)
            v_t = b_t * (v_t - recalled)
        state = k_t * v_t if state is None else state + k_t * v_t
        ys.append(op.Reshape(op.MatMul(q_t, state), [0, 1, -1]))
    y = op.Cast(op.Concat(*ys, axis=1), to=q.dtype)
    return [y, op.Cast(state, to=q.dtype if past is None else past.dtype)][: len(node.outputs)]


def _rows(
    op: Emit, x: ir.Value | None, rows: int, dtype: ir.DataType, shape: list[int]
) -> list[ir.Value | None]:
    """Return each row of `x` (batch, rows, size), reshaped to `shape`."""
    if x is None:
        return [None] * rows
    return [op.Reshape(row, shape) for row in op.split(op.Cast(x, to=dtype), rows, 1)]


def _scale(op: Emit, node: ir.Node, q: ir.Value, heads: int) -> float | ir.Value:
    scale = node.attributes.get_float("scale", 0.0)
    if scale:
        return scale
    size = op.dim(q, 2)
    if isinstance(size, int):
        return (size // heads) ** -0.5
    return op.Pow(op.Cast(size / heads, to=q.dtype), -0.5)
