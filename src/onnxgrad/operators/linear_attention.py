"""Linear attention in chunks of tokens: matrix products within a chunk, a Scan from chunk to chunk.

https://onnx.ai/onnx/operators/onnx__LinearAttention.html; the chunks of the delta rules follow Yang
et al. 2024, arXiv:2406.06484 and arXiv:2412.06464. A chunk begins with the state S. With b_t the
sum of the decays g up to token t of the chunk, C its last token, and U = V, or for the delta rules

    (I + L) U = beta (V - exp(b) K S),   L_ts = beta_t (k_t exp(b_t - b_s) k_s) for s < t,

its outputs and the state behind it are

    O = exp(b) Q S + A U,                A_ts = q_t exp(b_t - b_s) k_s for s <= t,
    S' = exp(b_C) S + R U,               R_s = exp(b_C - b_s) k_s.

U is affine in S, and so O = F S + O' and S' = M S + N: the matrices F, O', M, N are computed for
all chunks at once, and a step of the Scan is one product. b_t - b_s is summed from s to t, as a
difference of two sums loses the decays behind a large one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.attention import score_scale
from onnxgrad.operators.attributes import float_attribute, int_attribute, string_attribute
from onnxgrad.operators.records import declare_operators, lowering
from onnxgrad.operators.recurrent import write_scan
from onnxgrad.operators.rule_nodes import Operand, optional_inputs, wide_dtype
from onnxgrad.operators.shapes import known_shape, rank


def _linear_attention_macs(node: ir.Node, lengths_of: Callable) -> int:
    """Return the multiply-adds of a LinearAttention, token by token: of each query with a state, of
    each key with its value, and for the delta rules of each key with a state.
    """
    q, k, v = (lengths_of(x) for x in node.inputs[:3])
    heads, shared = (node.attributes.get_int(f"{which}_num_heads") for which in ("q", "kv"))
    products = heads + shared * (2 if "delta" in string_attribute(node, "update_rule") else 1)
    return q[0] * q[1] * products * max(1, k[-1] // shared) * max(1, v[-1] // shared)


declare_operators(
    "LinearAttention", "float32_in_reference", roles="fffhx", work=_linear_attention_macs
)

Length = int | ir.Value  # of an axis: an int if it is static, else a tensor [1]
# the most tokens of a chunk, measured on CPUs: the inverse of I + L takes the cube of the length,
# and decays per key dimension take memory for each pair of tokens and dimension
_MOST_TOKENS, _MOST_PER_DIMENSION = 32, 8
_TOKENS = 4  # axis of (chunks, batch, key heads, query heads of each or 1, tokens, size)


@lowering("LinearAttention")
def linear_attention(op: Any, node: ir.Node) -> list[ir.Value] | None:
    """St = exp(g) S + k uT,  Y = s StT q,  u = v, or beta (v - exp(g) ST k) of the delta rules."""
    q, k, v, past, decay, beta = optional_inputs(node.inputs, 6)
    limit = int_attribute(node, "chunk_size")
    update = string_attribute(node, "update_rule")
    gated, corrected = "gated" in update, "delta" in update
    if (gated and decay is None) or (corrected and beta is None):
        return None
    if None in [rank(x) for x in (q, k, v, decay, beta) if x is not None]:
        return None
    heads, shared = (node.attributes.get_int(f"{which}_num_heads") for which in ("q", "kv"))
    per_dimension = gated and known_shape(decay)[-1] != shared
    most = min(limit, _MOST_PER_DIMENSION if per_dimension else _MOST_TOKENS)
    chunks = _Chunks(op, op.dim(q, 1), max(1, most), wide_dtype(q.dtype))

    queries = chunks.split(q, shared, heads // shared)
    queries = queries * (float_attribute(node, "scale") or score_scale(op, queries))
    keys, values = chunks.split(k, shared), chunks.split(v, shared)
    decays = _Decays()
    if gated:
        decays = _sum_decays(op, chunks, chunks.split(decay, shared), per_dimension)
    scores = decays.pair_scores(op, queries, keys) * chunks.mask(op.GreaterOrEqual)
    read, write = _scaled(queries, decays.from_start), op.mT(_scaled(keys, decays.to_end))
    kept = None if decays.of_chunk is None else op.mT(decays.of_chunk)
    if corrected:
        rates = chunks.split(beta, known_shape(beta)[-1], size=1)
        inverse = chunks.unit_inverse(decays.pair_scores(op, keys, keys) * rates)
        values = op.MatMul(inverse, values * rates)
        removed = op.MatMul(inverse, _scaled(keys, decays.from_start) * rates)
        read = read - op.MatMul(scores, removed)
        kept = _scaled(_identity_of_keys(op, keys), decays.of_chunk) - op.MatMul(write, removed)
    y, added = op.MatMul(scores, values), op.MatMul(write, values)
    before, final = _states_of_chunks(op, chunks, past, kept, added, corrected)
    if before is not None:
        y = y + op.MatMul(read, before)
    state = op.Cast(final, to=q.dtype if past is None else past.dtype)
    y = chunks.merge(y)
    y.shape = node.outputs[0].shape
    return [op.Cast(y, to=q.dtype), state][: len(node.outputs)]


def _scaled(x: ir.Value, factor: Operand) -> ir.Value:
    """Return the product of `x` and a factor, `x` if the factor is None."""
    return x if factor is None else x * factor


def _identity_of_keys(op: Any, keys: ir.Value) -> ir.Value:
    """Return the identity matrix of the size of a key."""
    positions = op.arange(op.dim(keys, -1))
    positions.shape = ir.Shape(known_shape(keys)[-1:])
    return op.Cast(op.Equal(op.Unsqueeze(positions, [1]), positions), to=keys.dtype)


def _last_token(op: Any, x: ir.Value) -> ir.Value:
    """Return the part of `x` (chunks, batch, heads, group, tokens, ...) of the last token of each
    chunk.
    """
    y, shape = op.Slice(x, [-1], [2**31 - 1], [_TOKENS]), list(known_shape(x))
    shape[_TOKENS] = 1
    y.shape = ir.Shape(shape)
    return y


class _Chunks:
    """The chunks of the tokens of a LinearAttention, as long as each other.

    The last chunk is padded with tokens whose operands are zero, which leave the state as it is.

    Attributes:
        dtype: the dtype in which chunks are computed.
        tokens: the count of tokens.
        most: the most tokens that a chunk may have.
        count: the count of chunks, at least one.
        length: the count of tokens of a chunk.
    """

    def __init__(self, op: Any, tokens: Length, most: int, dtype: ir.DataType) -> None:
        self.op, self.tokens, self.most, self.dtype = op, tokens, most, dtype
        self.dims: list[int | str]  # of count and length
        if isinstance(tokens, int):
            self.count: Length = max(1, -(-tokens // most))
            self.length: Length = max(1, -(-tokens // self.count))
            self.dims = [self.count, self.length]
        else:
            self.count = op.Max((tokens + (most - 1)) / most, [1])
            self.length = op.Max((tokens + self.count - 1) / self.count, [1])
            self.dims = [op.name("chunks"), op.name("chunk_length")]
        self.positions = op.arange(self.length)
        self.positions.shape = ir.Shape(self.dims[1:])

    def split(self, x: ir.Value, heads: Any, group: int = 1, size: int = -1) -> ir.Value:
        """Return x (batch, tokens, heads group size) as (chunks, batch, heads, group, length,
        size).
        """
        op, (batch, _, whole) = self.op, known_shape(x)
        if isinstance(heads, int) and isinstance(whole, int):
            size = whole // (heads * group)
        x = op.Cast(x, to=self.dtype)
        padded = self.count * self.length
        missing = padded - self.tokens
        if not isinstance(missing, int) or missing:
            x = op.Pad(x, op.vector(0, missing), None, [1])
            x.shape = ir.Shape([batch, padded if isinstance(padded, int) else None, whole])
        heads = heads if isinstance(heads, int) else -1
        sizes = self.count, self.length, heads, group, size
        parts = op.Reshape(x, op.vector(0, *sizes))
        known = [None if n < 0 else n for n in (heads, group, size)]
        parts.shape = ir.Shape([batch, *self.dims, *known])
        return op.Transpose(parts, perm=[1, 0, 3, 4, 2, 5])

    def merge(self, y: ir.Value) -> ir.Value:
        """Return y (chunks, batch, heads, group, length, size) as (batch, tokens, heads group
        size).
        """
        op, padded = self.op, self.count * self.length
        parts = op.Transpose(y, perm=[1, 0, 4, 2, 3, 5])
        y = op.Reshape(parts, op.vector(op.dim(parts, 0), padded, -1))
        if not isinstance(padded, int) or padded != self.tokens:
            y = op.Slice(y, [0], op.vector(self.tokens), [1])
        return y

    def mask(self, compare: Callable) -> ir.Value:
        """Return `compare(t, s)` of the positions of each two tokens of a chunk, as 1 and 0."""
        rows = self.op.Unsqueeze(self.positions, [1])
        return self.op.Cast(compare(rows, self.positions), to=self.dtype)

    def unit_inverse(self, lower: ir.Value) -> ir.Value:
        """Return (I + L)^-1, L the elements of `lower` (..., length, length) below the diagonal.

        The inverse of the diagonal blocks of width w, X, gives that of twice the width, X - X B X,
        B the blocks of L between. All intermediate results are blocks of the inverse, whereas the
        powers of L, as in (I - L)(I + L^2)(I + L^4)..., are huge for keys that are alike.
        """
        op, width = self.op, 1
        inverse = self.mask(op.Equal)
        while width < (self.length if isinstance(self.length, int) else self.most):
            between = lower * self.mask(partial(_joins_blocks, op, width))
            if width > 1:
                between = op.MatMul(op.MatMul(inverse, between), inverse)
            inverse, width = inverse - between, 2 * width
        return inverse


def _joins_blocks(op: Any, width: int, t: ir.Value, s: ir.Value) -> ir.Value:
    """Return whether t is in the second half, and s in the first, of one block of twice the
    width.
    """
    in_one_block = op.Equal(t / (2 * width), s / (2 * width))
    return op.And(in_one_block, op.Greater(t / width, s / width))


@dataclass
class _Decays:
    """The factors by which a state decays from token to token of a chunk; None for no decay.

    Attributes:
        pairs: from token s to token t, for s <= t: (..., t, s), or (..., t, s, key dimension).
        from_start: from the start of the chunk to each token, (..., t, 1 or key dimension).
        to_end: from each token to the last one of the chunk, like `from_start`.
        of_chunk: from the start to the last token, (..., 1, 1 or key dimension).
    """

    pairs: Operand = None
    from_start: Operand = None
    to_end: Operand = None
    of_chunk: Operand = None
    per_dimension: bool = False

    def pair_scores(self, op: Any, q: ir.Value, k: ir.Value) -> ir.Value:
        """Return the products of all q_t with the decayed k_s: (..., t, s)."""
        if not self.per_dimension:
            return _scaled(op.MatMul(q, op.mT(k)), self.pairs)
        decayed = op.Unsqueeze(k, [_TOKENS]) * self.pairs
        return op.Squeeze(op.MatMul(decayed, op.Unsqueeze(q, [-1])), [-1])


def _sum_decays(op: Any, chunks: _Chunks, g: ir.Value, per_dimension: bool) -> _Decays:
    """Return the decays of the chunks whose tokens have the logarithms `g`."""
    later, each = op.Greater(op.Unsqueeze(chunks.positions, [1]), chunks.positions), g
    if per_dimension:
        later, each = op.Unsqueeze(later, [2]), op.Unsqueeze(g, [_TOKENS + 1])
    pairs = op.Exp(op.CumSum(op.Where(later, each, 0.0), np.int64(_TOKENS)))
    from_start, to_end = op.Exp(op.CumSum(g, np.int64(_TOKENS))), _last_token(op, pairs)
    to_end = op.Squeeze(to_end, [_TOKENS]) if per_dimension else op.mT(to_end)
    return _Decays(pairs, from_start, to_end, _last_token(op, from_start), per_dimension)


def _states_of_chunks(
    op: Any, chunks: _Chunks, past: Operand, kept: Operand, added: ir.Value, corrected: bool
) -> tuple[Operand, ir.Value]:
    """Return the states before all chunks, None if they are zero, and the state after the last.

    A chunk leads from S to M S + N, where M, `kept`, is a matrix if the update is `corrected`, else
    a factor, 1 if it is None; N is `added`.
    """

    def step(op: Any, states: list[ir.Value], elements: list[ir.Value]) -> list[ir.Value]:
        [state], [*factors, new] = states, elements
        for factor in factors:
            state = op.MatMul(factor, state) if corrected else factor * state
        return [state + new]

    elements = [added] if kept is None else [kept, added]
    if past is None and chunks.count == 1:
        return None, op.Squeeze(added, [0, 3])
    if past is None:
        shape = op.vector(*(op.dim(added, axis) for axis in range(1, 6)))
        start = op.Expand(op.const(0.0, chunks.dtype), shape)
    else:
        start = op.Unsqueeze(op.Cast(past, to=chunks.dtype), [2])
    start.shape = ir.Shape(known_shape(added)[1:])
    before = op.Unsqueeze(start, [0])
    if chunks.count == 1:
        [after] = step(op, [before], elements)
        return before, op.Squeeze(after, [0, 3])
    after, final = write_scan(op, "LinearAttention", [start], elements, step, False)
    before = op.Concat(before, op.Slice(after, [0], [-1], [0]), axis=0)
    before.shape = added.shape
    return before, op.Squeeze(final, [2])
