"""Attention as matrix products and softmax, whose rules differentiate every variant of it.

https://onnx.ai/onnx/operators/onnx__Attention.html, Vaswani et al. 2017, arXiv:1706.03762. A query
whose keys are all masked gives zeros, and has gradient zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators import marks
from onnxgrad.operators.attributes import float_attribute, int_attribute
from onnxgrad.operators.records import declare_operators, lowering
from onnxgrad.operators.rule_nodes import Operand, optional_inputs
from onnxgrad.operators.shapes import dims, rank


def _attention_macs(node: ir.Node, lengths_of: Callable) -> int:
    """Return the multiply-adds of an Attention: of queries with keys, and of weights with
    values.
    """
    q, k, v = (lengths_of(x) for x in node.inputs[:3])
    past = node.inputs[4] if len(node.inputs) > 4 else None
    keys = k[-2] + (lengths_of(past)[-2] if past is not None else 0)
    if len(q) == 4:
        return q[0] * q[1] * q[-2] * keys * (q[-1] + v[-1])
    heads, shared = (node.attributes.get_int(f"{name}_num_heads", 1) for name in ("q", "kv"))
    return q[0] * q[-2] * keys * (q[-1] + v[-1] // shared * heads)


declare_operators("Attention", "attention", roles="fffmhhc", work=_attention_macs)
declare_operators("CausalConvWithState", "float32_in_reference", roles="xfbh")
declare_operators("RotaryEmbedding", roles="xkkc")

QkvHeads = Sequence[ir.Value]  # Q, K and V, each (batch, heads, rows, size)
Length = int | ir.Value  # of an axis: an int if it is static, else a tensor [1]
_HEADS, _ROWS = 1, 2  # axes of (batch, heads, rows, size)


@lowering("Attention")
def attention(op: Any, node: Any) -> list[ir.Value]:
    """Y = softmax(s Q KT + bias) V, s the scale, the bias -inf for keys that are masked."""
    q, k, v, mask, past_key, past_value, lengths = optional_inputs(node.inputs, 7)
    get = node.attributes
    packed = rank(q) == 3 if rank(q) is not None else "q_num_heads" in get
    q, k, v = (
        split_heads(op, x, get.get_int(f"{which}_num_heads")) if packed else x
        for x, which in ((q, "q"), (k, "kv"), (v, "kv"))
    )
    if past_key is not None:
        k, v = op.Concat(past_key, k, axis=_ROWS), op.Concat(past_value, v, axis=_ROWS)
    visible = _key_mask(op, node, (q, k), past_key, lengths)
    bias = _score_bias(op, q, k, mask, visible)

    unmasked = mask is None and lengths is None and int_attribute(node, "left_window_size") < 0
    precision = get.get_int("softmax_precision", q.dtype)
    scale = get.get_float("scale") if "scale" in get else score_scale(op, q)

    def softmax(scores: ir.Value) -> ir.Value:
        return _masked_softmax(op, scores, None if unmasked else bias, precision)

    y, stages = attend(op, (q, k, v), scale, bias, softmax, float_attribute(node, "softcap"))
    exposed = stages[int_attribute(node, "qk_matmul_output_mode")]
    if len(node.outputs) > 3:  # with past keys, onnx infers a length of 0
        node.outputs[3].shape = exposed.shape
    return [merge_heads(op, y) if packed else y, k, v, exposed][: len(node.outputs)]


def attend(
    op: Any, qkv: QkvHeads, scale: Any, bias: Operand, softmax: Callable, softcap: float
) -> tuple[ir.Value, Sequence[ir.Value]]:
    """Return softmax(c tanh(s Q KT / c) + bias) V, c the softcap, and its four intermediate scores.

    The stages are the scores s Q KT, capped, with the bias, and their softmax.
    """
    q, k, v = qkv
    transposed = op.Transpose(k, perm=[0, 1, 3, 2])
    scores = multiply_grouped_heads(op, q * scale, k, lambda a: op.MatMul(a, transposed))
    capped = op.Tanh(scores / softcap) * softcap if softcap > 0 else scores
    biased = capped if bias is None else op.set_type_like(capped + bias, capped)
    weights = softmax(biased)
    y = multiply_grouped_heads(op, weights, v, lambda a: op.MatMul(a, v))
    return y, (scores, capped, biased, weights)


def split_heads(op: Any, x: ir.Value, heads: int) -> ir.Value:
    """Return x (batch, rows, heads size) as (batch, heads, rows, size)."""
    return op.Transpose(op.Reshape(x, [0, 0, heads, -1]), perm=[0, 2, 1, 3])


def merge_heads(op: Any, y: ir.Value) -> ir.Value:
    """Return y (batch, heads, rows, size) as (batch, rows, heads size)."""
    return op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, -1])


def multiply_grouped_heads(op: Any, a: ir.Value, b: ir.Value, product: Callable) -> ir.Value:
    """Return the product of the heads `a` with the heads `b`, computed by `product`; each head of
    `b` serves several heads of `a`.

    The rows of those heads are stacked, so that `b` is not repeated.
    """
    heads, shared = ((dims(v) or (None, None))[_HEADS] for v in (a, b))
    if heads is not None and heads == shared:
        return product(a)
    y = product(op.Reshape(a, op.vector(0, op.dim(b, _HEADS), -1, 0)))
    whole = op.Reshape(y, op.vector(0, op.dim(a, _HEADS), -1, 0))
    if dims(a) is not None:
        whole.shape = ir.Shape([*(dims(a) or ())[:3], (dims(y) or (None,))[-1]])
    return whole


def score_scale(op: Any, q: ir.Value) -> Any:
    """Return the factor of the scores of attention, 1 / sqrt(head size)."""
    size = op.dim(q, -1)
    if isinstance(size, int):
        return size**-0.5
    return op.Cast(op.Pow(op.Cast(size, to=ir.DataType.DOUBLE), -0.5), to=q.dtype)


def _score_bias(op: Any, q: ir.Value, k: ir.Value, mask: Operand, visible: Operand) -> Operand:
    """Return the bias of the scores, -inf where a key is masked, or None for no bias."""
    zero, minus_inf = op.const(0.0, q.dtype), op.const(-np.inf, q.dtype)
    if mask is not None:
        if mask.dtype == ir.DataType.BOOL:
            mask = op.Where(mask, zero, minus_inf)
        have, want = (dims(mask) or (None,))[-1], (dims(k) or (None,) * 4)[_ROWS]
        if have is None or have != want:  # a shorter mask hides the keys beyond it
            missing = op.dim(k, _ROWS) - op.dim(mask, -1)
            mask = op.Pad(mask, op.vector(0, missing), minus_inf, [-1])
    if visible is None:
        return mask
    return op.Where(visible, zero if mask is None else mask, minus_inf)


def _key_mask(op: Any, node: ir.Node, qk: QkvHeads, past: Operand, lengths: Operand) -> Operand:
    """Return which keys each query may attend to: booleans (rows, keys), None for all.

    A key is visible within a window and, with `lengths`, within its sequence.
    """
    left, right = (int_attribute(node, f"{side}_window_size") for side in ("left", "right"))
    right = 0 if int_attribute(node, "is_causal") else right
    rows, keys = (op.dim(x, _ROWS) for x in qk)
    offsets = [] if past is None else [op.const(op.dim(past, _ROWS), ir.DataType.INT64)]
    valid = []
    if lengths is not None:
        lengths = op.Reshape(lengths, [-1, 1, 1, 1])
        valid.append(op.Less(op.arange(keys), lengths))
        offsets.append(lengths - op.const(rows, ir.DataType.INT64))
    near = window_conditions(op, rows, keys, offsets, left, right)
    return reduce(op.And, [*valid, *near]) if valid or near else None


def window_conditions(
    op: Any, rows: Length, keys: Length, offsets: Sequence[ir.Value], left: int, right: int
) -> list[ir.Value]:
    """Return the conditions under which query i attends to key j: p - left <= j <= p + right, p the
    position of the query, i plus the offsets.

    A negative `left` or `right` is no bound. Without offsets, `meta` of the conditions has it.
    """
    j, position, bounds = op.arange(keys), op.Unsqueeze(op.arange(rows), [1]), []
    for offset in offsets:
        position = position + offset
    if right >= 0:
        bounds.append(op.LessOrEqual(j, position + right if right else position))
        if not offsets:
            bounds[-1].meta[marks.LAST_KEY] = right
    if left >= 0:
        bounds.append(op.GreaterOrEqual(j, position - left))
        if not offsets:
            bounds[-1].meta[marks.FIRST_KEY] = left
    return bounds


def _masked_softmax(op: Any, scores: ir.Value, bias: Operand, precision: int) -> ir.Value:
    """Return softmax(scores) over the keys, zero for a query whose keys are all masked."""
    if bias is None:
        return op.Cast(op.Softmax(op.Cast(scores, to=precision), axis=-1), to=scores.dtype)
    masked = op.Equal(op.ReduceMax(bias, [-1], keepdims=1), -np.inf)
    safe = op.Cast(op.set_type_like(op.Where(masked, 0.0, scores), scores), to=precision)
    weights = op.Cast(op.Softmax(safe, axis=-1), to=scores.dtype)
    return op.set_type_like(op.Where(masked, 0.0, weights), scores)
