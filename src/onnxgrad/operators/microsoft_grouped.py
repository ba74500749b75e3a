"""GroupQueryAttention and RotaryEmbedding of onnxruntime.

Ainslie et al. 2023, arXiv:2305.13245; Su et al. 2021, arXiv:2104.09864.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.attention import (
    HeadsOf,
    Length,
    attend,
    heads_apart,
    heads_together,
    score_scale,
    within_window,
)
from onnxgrad.operators.attributes import float_attribute, int_attribute
from onnxgrad.operators.microsoft import (
    DOMAIN,
    contrib_lowering,
    declare_contrib,
    divide_length,
    has_output,
    multiply_static,
)
from onnxgrad.operators.microsoft_norms import rms_normalized
from onnxgrad.operators.outputs import like_first
from onnxgrad.operators.registry import lowering
from onnxgrad.operators.rule_nodes import Operand, optional_inputs
from onnxgrad.operators.shapes import Dims, dims, known_shape, rank

INT64 = ir.DataType.INT64
_ROWS = 2  # axis of (batch, heads, rows, size)


# -- rotation ------------------------------------------------------------------------------------


# the shapes of rotated queries and keys
@contrib_lowering("GemmaRotaryEmbedding", shape=lambda x, _: [dims(x[1]), dims(x[3])], roles="x")
def gemma_rotary_embedding(op: Any, node: Any) -> list[ir.Value]:
    """y = x cos(e) + z sin(e), of queries and of keys; z are their halves in the other order."""
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
    shape=like_first,
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
    """y = R(p) x as by RotaryEmbedding, where p is a time, a height or a width for each angle.

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
        return rotated(op, x, cos, sin, get.get_int("interleaved", 0))
    heads = get.get_int("num_heads", 0)
    apart = [0, 0, heads, -1] if heads else op.vector(0, 0, -1, op.dim(cos, 3) * 2)
    y = rotated(op, op.Reshape(x, apart), cos, sin, get.get_int("interleaved", 0))
    return op.reshape_like(y, x)


def rotated(op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, interleaved: int) -> ir.Value:
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


# -- attention -----------------------------------------------------------------------------------


def is_empty_past(past: ir.Value | None) -> bool:
    """Return whether a cache (batch, heads, rows, size) has no rows, whatever is fed."""
    return (dims(past) or ())[-2:-1] == (0,)


def _shapes_of_grouped_heads(inputs: Sequence, attributes: Mapping[str, Any]) -> list[Dims]:
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
    return [(batch, rows, multiply_static(size, heads)), cache, cache, (batch, heads, rows, keys)]


def _remedy_of_grouped(node: ir.Node) -> str | None:
    """Return the remedy for a GroupQueryAttention whose cache is not a tensor of all rows."""
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
    shape=_shapes_of_grouped_heads,
    roles="xxxhhcckkcmf",
    remedy=_remedy_of_grouped,
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
    if _remedy_of_grouped(node) is not None:
        return None
    q, k, v = _packed_heads(op, node, q, k, v)
    if norm_scales[0] is not None:
        epsilon = float_attribute(node, "qk_norm_epsilon")
        norms = zip((q, k), norm_scales, strict=True)
        q, k = (rms_normalized(op, x, scale, epsilon)[0] for x, scale in norms)
    rows = op.dim(q, _ROWS)
    before = None if past_key is None else _past_rows(op, rows, lengths, total)
    if get.get_int("do_rotary", 0):
        position = _rotary_positions(op, rows, before, position)
        cos, sin = (op.Unsqueeze(op.Gather(c, position), [1]) for c in (cos, sin))
        interleaved = get.get_int("rotary_interleaved", 0)
        q, k = (rotated(op, x, cos, sin, interleaved) for x in (q, k))
    if before is not None:
        source = _present_sources(op, rows, before, total, past_key)
        k, v = (_append_rows(op, p, x, *source) for p, x in ((past_key, k), (past_value, v)))
    visible = _attended_keys(op, node, (q, k), before, lengths)

    if sink is not None:
        sink = op.Reshape(sink, [1, -1, 1, 1])
    elif int_attribute(node, "smooth_softmax") == 1:
        sink = op.Reshape(op.const(0.0, q.dtype), [1, 1, 1, 1])
    y, scores, weights = attend_visible(op, node, (q, k, v), bias, visible, sink)
    exposed = weights
    if has_output(node, 3) and int_attribute(node, "qk_output") == 1:
        exposed = op.Where(visible, scores, 0.0)
    return [heads_together(op, y), k, v, exposed][: len(node.outputs)]


def attend_visible(
    op: Any, node: Any, qkv: HeadsOf, bias: Any, visible: Operand, sink: Any = None
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


def _packed_heads(op: Any, node: Any, q: ir.Value, k: Operand, v: Operand) -> list[ir.Value]:
    """Return Q, K and V as (batch, heads, rows, size); they may be packed into `q`."""
    heads, shared = (node.attributes.get_int(name) for name in ("num_heads", "kv_num_heads"))
    if k is not None and v is not None:
        return [heads_apart(op, x, n) for x, n in ((q, heads), (k, shared), (v, shared))]
    x = heads_apart(op, q, heads + 2 * shared)
    return op.split(x, [heads, shared, shared], 1)


def _past_rows(op: Any, rows: Length, lengths: ir.Value, total: ir.Value) -> ir.Value:
    """Return the number of valid rows of the past (batch, 1): 0 if all of `total` are new."""
    rows = op.const(rows, INT64) if isinstance(rows, int) else rows
    before = op.Cast(lengths, to=INT64) + 1 - rows
    first = op.Equal(op.Reshape(op.Cast(total, to=INT64), [1]), rows)
    return op.Reshape(op.Where(first, np.int64(0), before), [-1, 1])


def _rotary_positions(op: Any, rows: Length, before: Operand, position: Operand) -> ir.Value:
    """Return the positions (batch, rows) for the rotary embedding of Q and K."""
    steps = op.Unsqueeze(op.arange(rows), [0])
    if position is None:
        return steps if before is None else before + steps
    # of `position`, only the first number is read
    first = op.Slice(op.Reshape(position, [1, -1]), [0], [1], [1]) + steps
    if before is None:
        return first
    return op.Where(op.Equal(op.ReduceMax(before, keepdims=1), np.int64(0)), first, position)


def _present_sources(
    op: Any, rows: Length, before: ir.Value, total: ir.Value, past: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Return the index (batch, 1, keys, 1) of each row of present in past and new rows, and whether
    it is valid: buffers may be longer than their valid rows.
    """
    past_length = op.const(op.dim(past, _ROWS), INT64)
    keys = op.Max(op.Reshape(op.Cast(total, to=INT64), [1]), op.Reshape(past_length, [1]))
    t = op.Unsqueeze(op.arange(keys), [0])
    valid = op.Less(t, before + op.const(rows, INT64))
    source = op.Where(op.Less(t, before), t, t - before + past_length)
    source = op.Where(valid, source, np.int64(0))
    return tuple(op.Reshape(x, [0, 1, -1, 1]) for x in (source, valid))


def _append_rows(
    op: Any, past: ir.Value, x: ir.Value, source: ir.Value, valid: ir.Value
) -> ir.Value:
    """Return the valid rows of `past`, then the rows of `x`, then zeros."""
    joined = op.Concat(past, x, axis=_ROWS)
    heads = op.dim(x, 1)
    indices = op.Expand(source, op.vector(1, heads, 1, 1))
    return op.Where(valid, op.GatherND(joined, indices, batch_dims=2), 0.0)


def _attended_keys(op: Any, node: Any, qk: HeadsOf, before: Operand, lengths: ir.Value) -> ir.Value:
    """Return which keys a query attends to: the last ones up to its own, or all if not causal."""
    rows, keys = (op.dim(x, _ROWS) for x in qk)
    if not int_attribute(node, "causal"):
        last = op.Reshape(op.Cast(lengths, to=INT64), [-1, 1, 1, 1])
        return op.LessOrEqual(op.arange(keys), last)
    offsets = [] if before is None else [op.Reshape(before, [-1, 1, 1, 1])]
    window = int_attribute(node, "local_window_size")
    return reduce(op.And, within_window(op, rows, keys, offsets, window - 1, 0))
