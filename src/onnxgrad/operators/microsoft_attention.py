"""Attention and rotary embeddings of onnxruntime, as matrix products and softmax.

Vaswani et al. 2017, arXiv:1706.03762; Ainslie et al. 2023, arXiv:2305.13245 (heads of queries that
share keys and values); Su et al. 2021, arXiv:2104.09864 (rotation). A mask adds `mask_filter_value`
to the scores; with `unidirectional`, keys after the query are left out. With
`past_sequence_length`, the past and the present share one buffer of keys and values, in which the
first rows are valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.attention import (
    Length,
    QkvHeads,
    attend,
    merge_heads,
    score_scale,
    split_heads,
    window_conditions,
)
from onnxgrad.operators.attributes import float_attribute, int_attribute
from onnxgrad.operators.microsoft import (
    DOMAIN,
    contrib_lowering,
    declare_contrib,
    divide_length,
    has_output,
    static_product,
)
from onnxgrad.operators.microsoft_norms import rms_normalized
from onnxgrad.operators.outputs import shape_of_first
from onnxgrad.operators.records import lowering
from onnxgrad.operators.rule_nodes import Operand, optional_inputs, sum_terms
from onnxgrad.operators.shapes import Dims, dims, equal, known_shape, rank

INT64 = ir.DataType.INT64
_ROWS = 2  # axis of (batch, heads, rows, size)


# operators that have no lowering
declare_contrib("PackedAttention", traits="attention", shape=shape_of_first, roles="xfbccm")
declare_contrib("PackedMultiHeadAttention", traits="attention", roles="xxxbccm")
declare_contrib("LongformerAttention", traits="attention", shape=shape_of_first, roles="xfbxfbc")
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


def _rotary_remedy_text(node: ir.Node) -> str | None:
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
    remedy=_rotary_remedy_text,
)
def attention(op: Any, node: Any) -> list[ir.Value] | None:
    """Y = softmax(s Q KT + bias) V, [Q, K, V] = x W + b."""
    x, weights, b, mask, past, bias, used = optional_inputs(node.inputs, 7)
    get = node.attributes
    if _rotary_remedy_text(node) or (mask is not None and rank(mask) is None):
        return None
    sizes = list(get.get_ints("qkv_hidden_sizes", ())) or 3
    parts = op.split(sum_terms(op.MatMul(x, weights), b), sizes, 2)
    q, k, v = (split_heads(op, part, get.get_int("num_heads")) for part in parts)
    past = None if is_empty_past(past) and used is None else past
    pasts = [None, None] if past is None else [op.Squeeze(p, [0]) for p in op.split(past, 2, 0)]
    (k, held), (v, held_v) = (
        _extend_past(op, p, x, used) for p, x in zip(pasts, (k, v), strict=True)
    )
    y, _ = _masked_attention(op, node, (q, k, v), mask, bias)
    present = y
    if has_output(node, 1):
        present = op.Concat(op.Unsqueeze(held, [0]), op.Unsqueeze(held_v, [0]), axis=0)
    return [y, present][: len(node.outputs)]


def _multi_head_shapes_function(
    past: int, buffer: int
) -> Callable[[Sequence, Mapping[str, Any]], list[Dims | None]]:
    """Return the `shape` function of multi-head attention, given the operand indices of the past
    keys and of the past length, with which past and present share a buffer.

    Queries, keys and values may be packed into one or two operands.
    """

    def output_shapes(inputs: Sequence, attributes: Mapping[str, Any]) -> list[Dims | None]:
        heads, operands = attributes["num_heads"], optional_inputs(inputs, 9)
        q, k, v = known_shape(operands[0]), dims(operands[1]), dims(operands[2])
        packed = next((s for s in (q, k) if s is not None and len(s) == 5), None)
        source = q if len(q) == 5 else k  # (batch, rows, ...), or (batch, heads, rows, size)
        sized = packed or v or (None,)
        width = sized[-1] if len(sized) == 3 else static_product(sized[-1], heads)
        before, is_shared = dims(operands[past]), operands[buffer] is not None
        held = before if is_shared else source if operands[past] is None else None
        keys = None if held is None else held[2 if len(held) == 4 else 1]
        size = before[3] if before and isinstance(before[3], int) else divide_length(width, heads)
        cache = (q[0], heads, keys, size)
        return [(*q[:2], width), cache, cache, (q[0], heads, q[1], None if is_shared else keys)]

    return output_shapes


def _beam_search_remedy(node: ir.Node) -> str | None:
    if optional_inputs(node.inputs, 10)[9] is None:
        return None
    return "cache_indirection is of a beam search; use the model with a single beam"


@contrib_lowering(
    "MultiHeadAttention",
    "attention",
    shape=_multi_head_shapes_function(past=6, buffer=8),
    roles="xxxbmmhhc",
    remedy=_beam_search_remedy,
)
@contrib_lowering(
    "DecoderMaskedMultiHeadAttention",
    "attention",
    shape=_multi_head_shapes_function(past=5, buffer=7),
    roles="xxxcmhhcccb",
    remedy=_beam_search_remedy,
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
    if _beam_search_remedy(node) or any(x is not None and rank(x) is None for x in (q, k, mask)):
        return None
    q, k, v = _split_qkv_heads(op, (q, k, v), b, node.attributes.get_int("num_heads"))
    pairs = (past_key, k), (past_value, v)
    (k, key), (v, value) = (_extend_past(op, past, x, used) for past, x in pairs)
    y, scores = _masked_attention(op, node, (q, k, v), mask, bias)
    return [y, key, value, scores][: len(node.outputs)]


def _extend_past(op: Any, past: Operand, x: ir.Value, used: Operand) -> tuple[ir.Value, ir.Value]:
    """Return the past keys (or values) followed by the new ones, and the cache for the next call.

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


def _split_qkv_heads(op: Any, qkv: Sequence[Any], bias: Operand, heads: int) -> list[ir.Value]:
    """Return Q, K and V as (batch, heads, rows, size), from any of their packed forms."""
    q, k, v = parts = list(qkv)
    if k is None or rank(k) == 5:  # (batch, rows, heads, 2 or 3 of them, size)
        packed, n = (q, 3) if k is None else (k, 2)
        if bias is not None and k is None:
            packed = packed + op.Transpose(op.Reshape(bias, [3, heads, -1]), perm=[1, 0, 2])
        parts = [op.Squeeze(part, [3]) for part in op.split(packed, n, 3)]
        separate = [op.Transpose(part, perm=[0, 2, 1, 3]) for part in parts]
        return separate if k is None else [split_heads(op, q, heads), *separate]
    ready = rank(k) == 4  # K and V of cross attention, projected before: only Q gets a bias
    if bias is not None and ready:
        parts[0] = q + op.Slice(bias, [0], op.vector(op.dim(q, 2)), [0])
    elif bias is not None:
        sizes = op.vector(op.dim(q, 2), op.dim(q, 2), op.dim(v, 2))
        biases = op.split(bias, sizes, 0)
        parts = [op.set_type_like(x + c, x) for x, c in zip(parts, biases, strict=True)]
    apart = parts[:1] if ready else parts
    return [*(split_heads(op, x, heads) for x in apart), *parts[len(apart) :]]


def _masked_attention(
    op: Any, node: Any, qkv: QkvHeads, mask: Operand, bias: Operand
) -> tuple[ir.Value, ir.Value]:
    """Return Y (batch, rows, heads size), and the scores including bias and mask."""
    q, k, _ = qkv
    get, rows, keys = node.attributes, op.dim(q, _ROWS), op.dim(k, _ROWS)
    visible = None
    if get.get_int("unidirectional", 0) and rows != 1:
        [visible] = window_conditions(op, rows, keys, [op.const(keys - rows, INT64)], -1, 0)
        if not isinstance(rows, int):  # a single query attends to all keys
            visible = op.Or(visible, op.Equal(rows, np.int64(1)))
    if mask is not None:
        kept = _unmasked_keys(op, mask, q, keys)
        zero = op.const(0.0, q.dtype)
        added = max(get.get_float("mask_filter_value", -10000.0), _score_of_masked_key(q))
        hidden = op.Where(kept, zero, added)
        bias = hidden if bias is None else bias + hidden
    y, scores, _ = attend_visible(op, node, qkv, bias, visible)
    if visible is not None and has_output(node, 3):
        scores = op.set_type_like(op.Where(visible, scores, _score_of_masked_key(q)), scores)
    return merge_heads(op, y), scores


def _score_of_masked_key(x: ir.Value) -> float:
    """Return the lowest number of the dtype of `x`, onnxruntime's score of a masked key."""
    return -float((x.dtype or ir.DataType.FLOAT).max)


def _unmasked_keys(op: Any, mask: ir.Value, q: ir.Value, keys: Length) -> ir.Value:
    """Return which keys a mask keeps: booleans that broadcast to (batch, heads, rows, keys)."""
    n = rank(mask)
    if n == 1:
        return _keys_within_lengths(op, mask, q, keys)
    if n == 4:  # the mask has the largest number of rows and keys: cut it
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


# -- rotary embeddings ---------------------------------------------------------------------------


# the shapes of rotated queries and keys
@contrib_lowering("GemmaRotaryEmbedding", shape=lambda x, _: [dims(x[1]), dims(x[3])], roles="x")
def gemma_rotary_embedding(op: Any, node: Any) -> list[ir.Value]:
    """y = x cos(e) + z sin(e) for queries and keys x; z has the halves of x in the other order."""
    angles, *operands = node.inputs
    cos, sin = (
        op.Unsqueeze(op.Cast(v, to=operands[0].dtype), [1])
        for v in (op.Cos(angles), op.Sin(angles))
    )
    pairs = operands[:2], operands[2:]
    return [op.set_type_like(x * cos + turned * sin, x) for x, turned in pairs]


declare_contrib(
    "RotaryEmbedding MRotaryEmbedding",
    traits="real_settings",
    shape=shape_of_first,
    roles="xck",
    settings=(2, 3),
)


@lowering("RotaryEmbedding", domain=DOMAIN)
def rotary_embedding(op: Any, node: Any) -> list[ir.Value] | None:
    """y = R(p) x: the pairs of elements of each head, rotated by the angles of their position p.

    The kernels do not read `scale` either, and `is_packed_batching` changes no number.
    """
    x, position, cos, sin = node.inputs
    if rank(x) is None or rank(position) is None:
        return None
    if rank(position) == 1:  # the position of the first row
        position = op.Unsqueeze(position + op.arange(op.dim(x, 1 if rank(x) == 3 else _ROWS)), [0])
    return [_rotate_heads(op, node, (op.Gather(c, position) for c in (cos, sin)))]


@lowering("MRotaryEmbedding", domain=DOMAIN)
def multimodal_rotary_embedding(op: Any, node: Any) -> list[ir.Value] | None:
    """y = R(p) x: the pairs of elements of each head, rotated; p is the time, height or width of a
    position, for each angle.

    `mrope_section` counts the angles of times, heights and widths. These follow each other, or take
    turns in layout 1, where times have the angles that heights and widths leave. Wang et al. 2024,
    Qwen2-VL, arXiv:2409.12191.
    """
    x, positions, cos, sin = node.inputs
    if rank(x) is None:
        return None
    counts = node.attributes.get_ints("mrope_section")
    streams = np.repeat(np.arange(3), counts)
    if int_attribute(node, "mrope_layout") == 1:
        streams[:] = 0
        for i in (1, 2):
            streams[i : 3 * counts[i] : 3] = i
    by_angle = op.Gather(op.Transpose(positions, perm=[1, 2, 0]), streams, axis=2)
    flat = op.Reshape(by_angle, [-1, len(streams)])
    tables = (op.GatherElements(c, flat, axis=0) for c in (cos, sin))
    return [_rotate_heads(op, node, (op.Reshape(v, op.shape_of(by_angle)) for v in tables))]


def _rotate_heads(op: Any, node: Any, tables: Iterable[ir.Value]) -> ir.Value:
    """Return the first input with each head rotated, by cos and sin (batch, rows, angles)."""
    x, get = node.inputs[0], node.attributes
    cos, sin = (op.Unsqueeze(v, [2 if rank(x) == 3 else 1]) for v in tables)
    if rank(x) == 4:
        return rotate_pairs(op, x, cos, sin, get.get_int("interleaved", 0))
    heads = get.get_int("num_heads", 0)
    apart = [0, 0, heads, -1] if heads else op.vector(0, 0, -1, op.dim(cos, 3) * 2)
    y = rotate_pairs(op, op.Reshape(x, apart), cos, sin, get.get_int("interleaved", 0))
    return op.reshape_like(y, x)


def rotate_pairs(op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, interleaved: int) -> ir.Value:
    """Return `x` with pairs of elements of its last axis rotated, by angles with this cos and sin.

    A pair is an element and the one half an axis further, or two neighbors if `interleaved`. The
    elements beyond twice the number of angles do not change.
    """
    angles, size = op.dim(cos, 3), op.dim(x, 3)
    turned, rest = x, None
    if not (isinstance(size, int) and isinstance(angles, int) and size == 2 * angles):
        sizes = op.vector(angles * 2, size - angles * 2)
        turned, rest = op.split(x, sizes, -1)
    if interleaved:
        turned = op.Reshape(turned, [0, 0, 0, -1, 2])
        cos, sin = op.Unsqueeze(cos, [-1]), op.Unsqueeze(sin, [-1])
    a, b = op.split(turned, 2, -1)
    y = op.Concat(a * cos - b * sin, b * cos + a * sin, axis=-1)
    if interleaved:
        y = op.Reshape(y, [0, 0, 0, -1])
    return op.set_type_like(y if rest is None else op.Concat(y, rest, axis=-1), x)


# -- heads of queries that share keys and values --------------------------------------------------


def is_empty_past(past: ir.Value | None) -> bool:
    """Return whether a cache (batch, heads, rows, size) has no rows, whatever is fed."""
    return (dims(past) or ())[-2:-1] == (0,)


def _shapes_of_grouped_query(inputs: Sequence, attributes: Mapping[str, Any]) -> list[Dims]:
    """Return the shapes of the result, of both caches (batch, heads, rows, size), and of scores.

    Heads of queries share the heads of keys and values; all may be packed into the first operand.
    """
    q, _, v, past = optional_inputs(inputs, 4)
    batch, rows, _ = known_shape(q)
    heads, shared = attributes["num_heads"], attributes["kv_num_heads"]
    packed, parts = (q, heads + 2 * shared) if v is None else (v, shared)
    size = (dims(past) or (None,))[-1]
    if not isinstance(size, int):
        size = divide_length((dims(packed) or (None,))[-1], parts)
    keys = rows if past is None else None
    cache = (batch, shared, keys, size)
    return [(batch, rows, static_product(size, heads)), cache, cache, (batch, heads, rows, keys)]


def _grouped_query_remedy(node: ir.Node) -> str | None:
    """Return the advice about a GroupQueryAttention whose cache is a ring or quantized,
    else None.
    """
    if node.attributes.get_int("sliding_window_cache", 0):
        read = (y for y in node.outputs[1:3] if y.uses() or y.is_graph_output())
        if not is_empty_past(node.inputs[3]) or any(read):
            return "its cache is a ring of rows; use the model without cache"
    scales = optional_inputs(node.inputs, 14)[12:]
    if node.attributes.get_int("kv_cache_bit_width", 0) or any(v is not None for v in scales):
        return "its cache is quantized; use the model without cache"
    return None


declare_contrib("PagedAttention", traits="attention", roles="xxxhhccck")
declare_contrib("SparseAttention", traits="attention", roles="xxxhhccccck")


@contrib_lowering(
    "GroupQueryAttention",
    "attention real_settings",
    settings=(7, 8),
    shape=_shapes_of_grouped_query,
    roles="xxxhhcckkcmf",
    remedy=_grouped_query_remedy,
)
def group_query_attention(op: Any, node: Any) -> list[ir.Value] | None:
    """Y = softmax(s Q KT + bias) V, where several heads of Q share one of K and V.

    A query attends to the valid keys of the past, the new keys before it, and its own. So do rows
    of padding, for which onnxruntime's result is undefined.
    """
    get = node.attributes
    q, k, v, past_key, past_value, lengths, total, cos, sin, position, *others = optional_inputs(
        node.inputs, 16
    )
    bias, sink, _, _, *norm_scales = others
    if is_empty_past(past_key):
        past_key = past_value = None
    if _grouped_query_remedy(node) is not None:
        return None
    q, k, v = _unpack_qkv_heads(op, node, q, k, v)
    if norm_scales[0] is not None:
        epsilon = float_attribute(node, "qk_norm_epsilon")
        norms = zip((q, k), norm_scales, strict=True)
        q, k = (rms_normalized(op, x, scale, epsilon)[0] for x, scale in norms)
    rows = op.dim(q, _ROWS)
    before = None if past_key is None else _past_row_count(op, rows, lengths, total)
    if get.get_int("do_rotary", 0):
        position = _rotary_positions(op, rows, before, position)
        cos, sin = (op.Unsqueeze(op.Gather(c, position), [1]) for c in (cos, sin))
        interleaved = get.get_int("rotary_interleaved", 0)
        q, k = (rotate_pairs(op, x, cos, sin, interleaved) for x in (q, k))
    if before is not None:
        source = _present_row_sources(op, rows, before, total, past_key)
        k, v = (_append_cache_rows(op, p, x, *source) for p, x in ((past_key, k), (past_value, v)))
    visible = _key_mask(op, node, (q, k), before, lengths)

    if sink is not None:
        sink = op.Reshape(sink, [1, -1, 1, 1])
    elif int_attribute(node, "smooth_softmax") == 1:
        sink = op.Reshape(op.const(0.0, q.dtype), [1, 1, 1, 1])
    y, scores, weights = attend_visible(op, node, (q, k, v), bias, visible, sink)
    exposed = weights
    if has_output(node, 3) and int_attribute(node, "qk_output") == 1:
        exposed = op.Where(visible, scores, 0.0)
    return [merge_heads(op, y), k, v, exposed][: len(node.outputs)]


def attend_visible(
    op: Any, node: Any, qkv: QkvHeads, bias: Any, visible: Operand, sink: Any = None
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return softmax(scores) V, the scores and their softmax.

    `visible` is true where a query attends to a key. `sink` is the score of one more key, whose
    value is zero.
    """

    def softmax(scores: ir.Value) -> ir.Value:
        masked = scores
        if visible is not None:
            masked = op.set_type_like(op.Where(visible, scores, -np.inf), scores)
        if sink is None:
            return op.Softmax(masked, axis=-1)
        sizes = [op.dim(qkv[0], axis) for axis in range(3)]
        more = op.Concat(masked, op.Expand(sink, op.vector(*sizes, 1)), axis=-1)
        return op.set_type_like(op.Slice(op.Softmax(more, axis=-1), [0], [-1], [-1]), scores)

    scale = node.attributes.get_float("scale", 0.0) or score_scale(op, qkv[0])
    softcap = node.attributes.get_float("softcap", 0.0)
    y, (*_, scores, weights) = attend(op, qkv, scale, bias, softmax, softcap)
    return y, scores, weights


def _unpack_qkv_heads(op: Any, node: Any, q: ir.Value, k: Operand, v: Operand) -> list[ir.Value]:
    """Return Q, K and V as (batch, heads, rows, size); they may be packed into `q`."""
    heads, shared = (node.attributes.get_int(name) for name in ("num_heads", "kv_num_heads"))
    if k is not None and v is not None:
        return [split_heads(op, x, n) for x, n in ((q, heads), (k, shared), (v, shared))]
    x = split_heads(op, q, heads + 2 * shared)
    return op.split(x, [heads, shared, shared], 1)


def _past_row_count(op: Any, rows: Length, lengths: ir.Value, total: ir.Value) -> ir.Value:
    """Return the number of valid past rows (batch, 1), 0 if the new rows are all of the `total`
    rows.
    """
    rows = op.const(rows, INT64) if isinstance(rows, int) else rows
    before = op.Cast(lengths, to=INT64) + 1 - rows
    first = op.Equal(op.Reshape(op.Cast(total, to=INT64), [1]), rows)
    return op.Reshape(op.Where(first, np.int64(0), before), [-1, 1])


def _rotary_positions(op: Any, rows: Length, before: Operand, position: Operand) -> ir.Value:
    """Return the positions (batch, rows) for the rotary embedding of Q and K."""
    steps = op.Unsqueeze(op.arange(rows), [0])
    if position is None:
        return steps if before is None else before + steps
    # onnxruntime reads only the first number of `position`
    first = op.Slice(op.Reshape(position, [1, -1]), [0], [1], [1]) + steps
    if before is None:
        return first
    return op.Where(op.Equal(op.ReduceMax(before, keepdims=1), np.int64(0)), first, position)


def _present_row_sources(
    op: Any, rows: Length, before: ir.Value, total: ir.Value, past: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Return, for each row of the new key or value cache, its index in the past and new rows
    (batch, 1, keys, 1), and whether it is valid: buffers may be longer than their valid rows.
    """
    past_length = op.const(op.dim(past, _ROWS), INT64)
    keys = op.Max(op.Reshape(op.Cast(total, to=INT64), [1]), op.Reshape(past_length, [1]))
    t = op.Unsqueeze(op.arange(keys), [0])
    valid = op.Less(t, before + op.const(rows, INT64))
    source = op.Where(op.Less(t, before), t, t - before + past_length)
    source = op.Where(valid, source, np.int64(0))
    return tuple(op.Reshape(x, [0, 1, -1, 1]) for x in (source, valid))


def _append_cache_rows(
    op: Any, past: ir.Value, x: ir.Value, source: ir.Value, valid: ir.Value
) -> ir.Value:
    """Return the new cache: the valid rows of `past`, then the rows of `x`, then zeros."""
    joined = op.Concat(past, x, axis=_ROWS)
    heads = op.dim(x, 1)
    indices = op.Expand(source, op.vector(1, heads, 1, 1))
    return op.Where(valid, op.GatherND(joined, indices, batch_dims=2), 0.0)


def _key_mask(op: Any, node: Any, qk: QkvHeads, before: Operand, lengths: ir.Value) -> ir.Value:
    """Return which keys each query attends to: booleans; without `causal`, all valid keys, else the
    keys of the window that ends at the query.
    """
    rows, keys = (op.dim(x, _ROWS) for x in qk)
    if not int_attribute(node, "causal"):
        last = op.Reshape(op.Cast(lengths, to=INT64), [-1, 1, 1, 1])
        return op.LessOrEqual(op.arange(keys), last)
    offsets = [] if before is None else [op.Reshape(before, [-1, 1, 1, 1])]
    window = int_attribute(node, "local_window_size")
    return reduce(op.And, window_conditions(op, rows, keys, offsets, window - 1, 0))
