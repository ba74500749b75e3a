"""Attention of onnxruntime with one key for each head, as matrix products and softmax.

Vaswani et al. 2017, arXiv:1706.03762. A mask adds `mask_filter_value` to the scores; with
`unidirectional`, keys after the query are left out. With `past_sequence_length`, the past and the
present share one buffer of keys and values, in which the first rows are valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.attention import HeadsOf, Length, heads_apart, heads_together, within_window
from onnxgrad.operators.microsoft import (
    contrib_lowering,
    declare_contrib,
    divide_length,
    has_output,
    multiply_static,
)
from onnxgrad.operators.microsoft_grouped import attend_visible, is_empty_past
from onnxgrad.operators.outputs import like_first
from onnxgrad.operators.rule_nodes import Operand, optional_inputs, sum_terms
from onnxgrad.operators.shapes import Dims, dims, equal, known_shape, rank

INT64 = ir.DataType.INT64
_ROWS = 2  # axis of (batch, heads, rows, size)


# operators that have no lowering
declare_contrib("PackedAttention", traits="attention", shape=like_first, roles="xfbccm")
declare_contrib("PackedMultiHeadAttention", traits="attention", roles="xxxbccm")
declare_contrib("LongformerAttention", traits="attention", shape=like_first, roles="xfbxfbc")
declare_contrib("DecoderMaskedSelfAttention", traits="attention", roles="xfbchm")
declare_contrib("DecoderAttention", traits="attention", roles="xxffbc")
declare_contrib("RelativePositionBias", roles="tc")
declare_contrib("GatedRelativePositionBias", roles="xbmfbf")


def _shapes_of_attention(inputs: Sequence, attributes: Mapping[str, Any]) -> list[Dims]:
    """Return the shapes of the result and of the cache, which has keys and values on axis 0."""
    x, weights, _, _, past = optional_inputs(inputs, 5)
    (batch, rows, _), (_, columns) = known_shape(x), known_shape(weights)
    heads, sizes = attributes["num_heads"], attributes.get("qkv_hidden_sizes", ())
    width = sizes[2] if sizes else divide_length(columns, 3)
    keys = rows if past is None else None
    if past is not None and attributes.get("past_present_share_buffer"):
        keys = (dims(past) or (None,) * 4)[3]
    return [(batch, rows, width), (2, batch, heads, keys, divide_length(width, heads))]


def _remedy_of_rotary(node: ir.Node) -> str | None:
    if not node.attributes.get_int("do_rotary", 0):
        return None
    return (
        "onnxruntime has no kernel for do_rotary on the CPU; use the model as it was before "
        "optimization, or with MultiHeadAttention and RotaryEmbedding"
    )


@contrib_lowering(
    "Attention",
    "attention",
    shape=_shapes_of_attention,
    roles="xfbchmc",
    remedy=_remedy_of_rotary,
)
def attention(op: Any, node: Any) -> list[ir.Value] | None:
    """Y = softmax(s Q KT + bias) V, [Q, K, V] = x W + b."""
    x, weights, b, mask, past, bias, used = optional_inputs(node.inputs, 7)
    get = node.attributes
    if _remedy_of_rotary(node) or (mask is not None and rank(mask) is None):
        return None
    sizes = list(get.get_ints("qkv_hidden_sizes", ())) or 3
    parts = op.split(sum_terms(op.MatMul(x, weights), b), sizes, 2)
    q, k, v = (heads_apart(op, part, get.get_int("num_heads")) for part in parts)
    past = None if is_empty_past(past) and used is None else past
    pasts = [None, None] if past is None else [op.Squeeze(p, [0]) for p in op.split(past, 2, 0)]
    (k, held), (v, held_v) = (
        _with_past(op, p, x, used) for p, x in zip(pasts, (k, v), strict=True)
    )
    y, _ = _attend_masked(op, node, (q, k, v), mask, bias)
    present = y
    if has_output(node, 1):
        present = op.Concat(op.Unsqueeze(held, [0]), op.Unsqueeze(held_v, [0]), axis=0)
    return [y, present][: len(node.outputs)]


def _shapes_of_heads(
    past: int, buffer: int
) -> Callable[[Sequence, Mapping[str, Any]], list[Dims | None]]:
    """Return the function of shapes of attention whose cache and buffer length are operands.

    Queries, keys and values may be packed into one or two operands.
    """

    def shapes(inputs: Sequence, attributes: Mapping[str, Any]) -> list[Dims | None]:
        heads, operands = attributes["num_heads"], optional_inputs(inputs, 9)
        q, k, v = known_shape(operands[0]), dims(operands[1]), dims(operands[2])
        packed = next((s for s in (q, k) if s is not None and len(s) == 5), None)
        source = q if len(q) == 5 else k  # (batch, rows, ...), or (batch, heads, rows, size)
        sized = packed or v or (None,)
        width = sized[-1] if len(sized) == 3 else multiply_static(sized[-1], heads)
        before, is_shared = dims(operands[past]), operands[buffer] is not None
        held = before if is_shared else source if operands[past] is None else None
        keys = None if held is None else held[2 if len(held) == 4 else 1]
        size = before[3] if before and isinstance(before[3], int) else divide_length(width, heads)
        cache = (q[0], heads, keys, size)
        return [(*q[:2], width), cache, cache, (q[0], heads, q[1], None if is_shared else keys)]

    return shapes


def _remedy_of_beams(node: ir.Node) -> str | None:
    if optional_inputs(node.inputs, 10)[9] is None:
        return None
    return "cache_indirection is of a beam search; use the model with a single beam"


@contrib_lowering(
    "MultiHeadAttention",
    "attention",
    shape=_shapes_of_heads(past=6, buffer=8),
    roles="xxxbmmhhc",
    remedy=_remedy_of_beams,
)
@contrib_lowering(
    "DecoderMaskedMultiHeadAttention",
    "attention",
    shape=_shapes_of_heads(past=5, buffer=7),
    roles="xxxcmhhcccb",
    remedy=_remedy_of_beams,
)
def multi_head_attention(op: Any, node: Any) -> list[ir.Value] | None:
    """Y = softmax(s Q KT + bias) V.

    A decoder has a single row of queries, with a shared buffer, or with K and V ready.
    """
    inputs = optional_inputs(node.inputs, 11)
    if node.op_type == "MultiHeadAttention":
        q, k, v, b, mask, bias, past_key, past_value, used, *_ = inputs
    else:
        q, k, v, mask, bias, past_key, past_value, used, _, _, b = inputs
    if _remedy_of_beams(node) or any(x is not None and rank(x) is None for x in (q, k, mask)):
        return None
    q, k, v = _separate_heads(op, (q, k, v), b, node.attributes.get_int("num_heads"))
    (k, key), (v, value) = (_with_past(op, p, x, used) for p, x in ((past_key, k), (past_value, v)))
    y, scores = _attend_masked(op, node, (q, k, v), mask, bias)
    return [y, key, value, scores][: len(node.outputs)]


def _with_past(op: Any, past: Operand, x: ir.Value, used: Operand) -> tuple[ir.Value, ir.Value]:
    """Return the keys or values of the past followed by the new ones, and the next past.

    With `used`, the past is a buffer with as many valid rows. The new rows are written behind them.
    """
    if past is None or (is_empty_past(past) and used is None):
        return x, x
    if used is None:
        joined = op.Concat(past, x, axis=_ROWS)
        return joined, joined
    used = op.Reshape(op.Cast(used, to=INT64), [1])
    end = used + op.const(op.dim(x, _ROWS), INT64)
    joined = op.Concat(op.Slice(past, [0], used, [_ROWS]), x, axis=_ROWS)
    rest = op.Slice(past, end, op.const([np.iinfo(np.int64).max]), [_ROWS])
    return joined, op.set_type_like(op.Concat(joined, rest, axis=_ROWS), past)


def _separate_heads(op: Any, qkv: Sequence[Any], bias: Operand, heads: int) -> list[ir.Value]:
    """Return Q, K and V as (batch, heads, rows, size), from any of their packed forms."""
    q, k, v = parts = list(qkv)
    if k is None or rank(k) == 5:  # (batch, rows, heads, 2 or 3 of them, size)
        packed, n = (q, 3) if k is None else (k, 2)
        if bias is not None and k is None:
            packed = packed + op.Transpose(op.Reshape(bias, [3, heads, -1]), perm=[1, 0, 2])
        parts = [op.Squeeze(part, [3]) for part in op.split(packed, n, 3)]
        separate = [op.Transpose(part, perm=[0, 2, 1, 3]) for part in parts]
        return separate if k is None else [heads_apart(op, q, heads), *separate]
    ready = rank(k) == 4  # K and V of cross attention, projected before: only Q gets a bias
    if bias is not None and ready:
        parts[0] = q + op.Slice(bias, [0], op.vector(op.dim(q, 2)), [0])
    elif bias is not None:
        sizes = op.vector(op.dim(q, 2), op.dim(q, 2), op.dim(v, 2))
        biases = op.split(bias, sizes, 0)
        parts = [op.set_type_like(x + c, x) for x, c in zip(parts, biases, strict=True)]
    apart = parts[:1] if ready else parts
    return [*(heads_apart(op, x, heads) for x in apart), *parts[len(apart) :]]


def _attend_masked(
    op: Any, node: Any, qkv: HeadsOf, mask: Operand, bias: Operand
) -> tuple[ir.Value, ir.Value]:
    """Return Y (batch, rows, heads size), and the scores including bias and mask."""
    q, k, _ = qkv
    get, rows, keys = node.attributes, op.dim(q, _ROWS), op.dim(k, _ROWS)
    visible = None
    if get.get_int("unidirectional", 0) and rows != 1:
        [visible] = within_window(op, rows, keys, [op.const(keys - rows, INT64)], -1, 0)
        if not isinstance(rows, int):  # a single query attends to all
            visible = op.Or(visible, op.Equal(rows, np.int64(1)))
    if mask is not None:
        kept = _kept_keys(op, mask, q, keys)
        zero = op.const(0.0, q.dtype)
        added = max(get.get_float("mask_filter_value", -10000.0), _masked_score(q))
        hidden = op.Where(kept, zero, added)
        bias = hidden if bias is None else bias + hidden
    y, scores, _ = attend_visible(op, node, qkv, bias, visible)
    if visible is not None and has_output(node, 3):
        scores = op.set_type_like(op.Where(visible, scores, _masked_score(q)), scores)
    return heads_together(op, y), scores


def _masked_score(x: ir.Value) -> float:
    """Return the lowest number of the dtype of `x`, onnxruntime's score of a masked key."""
    return -float((x.dtype or ir.DataType.FLOAT).max)


def _kept_keys(op: Any, mask: ir.Value, q: ir.Value, keys: Length) -> ir.Value:
    """Return which keys a mask keeps: booleans that broadcast to (batch, heads, rows, keys)."""
    n = rank(mask)
    if n == 1:
        return _keys_within_lengths(op, mask, q, keys)
    if n == 4:  # for the largest number of rows and keys
        begin = keys - op.dim(q, _ROWS)
        mask = op.Slice(mask, op.vector(begin, 0), op.vector(keys, keys), [2, 3])
    else:
        mask = op.Unsqueeze(mask, [1] if n == 3 else [1, 2])
    return op.Greater(mask, op.const(0, mask.dtype))


def _keys_within_lengths(op: Any, mask: ir.Value, q: ir.Value, keys: Length) -> ir.Value:
    """Return which keys j have start <= j < end, by sequence of the batch.

    `mask` holds the ends (batch), then the starts (batch). There are no starts if its length is not
    2 batch: then it holds the ends only, or other lengths after them (3 batch + 2).
    """
    j, count, batch = op.arange(keys), op.dim(mask, 0), op.dim(q, 0)
    twice, alike = batch * 2, equal(dims(mask), (dims(q) or (None,))[:1])
    mask = op.Cast(mask, to=INT64)
    ends = mask if alike else op.Slice(mask, [0], op.vector(batch), [0])
    kept = op.Less(j, op.Reshape(ends, [-1, 1, 1, 1]))
    if alike or (isinstance(count, int) and isinstance(twice, int) and count != twice):
        return kept
    padded = op.Concat(mask, op.Expand(np.int64(0), op.vector(batch)), axis=0)
    starts = op.Slice(padded, op.vector(batch), op.vector(twice), [0])
    begun = op.GreaterOrEqual(j, op.Reshape(starts, [-1, 1, 1, 1]))
    none = op.Not(op.Equal(op.const(count, INT64), op.const(twice, INT64)))
    return op.And(kept, op.Or(begun, none))
