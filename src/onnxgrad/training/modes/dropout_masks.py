"""Dropout masks: random numbers that are a function of a counter, written as integer operators.

onnxruntime's Dropout keeps the state of its generator, which neither a resumed run nor a second
session continues. Here an element of a mask depends on the seed, the number of the draw, the index
of the dropout and its own position only, through SplitMix64 (Steele, Lea & Flood 2014, "Fast
splittable pseudorandom number generators", figure 17).
"""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.operators.shapes import dims, static

_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # shift, factor
_LAST_SHIFT = 31
_LEVELS = 1 << 16  # each 64-bit number serves four elements
_OFFSETS = ((16, "LEFT"), (0, "RIGHT"), (16, "RIGHT"), (32, "RIGHT"))


class Masks:
    """Streams of masks for the dropouts of one model.

    Args:
        op: writes into the main graph.
        seed: any integer.
        draw: number of the draw, one float or integer.
        head: the node before which the keys of the streams are computed; None: at the end.
    """

    def __init__(self, op: Emit, seed: int, draw: ir.Value, count: int, head: ir.Node | None):
        start = int(_mix(np.array([seed % (1 << 64)], np.uint64))[0])
        steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA)
        streams = _mix(np.uint64(start) + steps)
        with op.at(head):
            number = op.Cast(op.Reshape(draw, [1]), to=ir.DataType.INT64)
            counters = number * _as_int64(_GAMMA) + streams.view(np.int64)
            self._keys = op.Cast(_write_mix(op, counters), to=ir.DataType.INT64)

    def keep(self, op: Emit, index: int, x: ir.Value, ratio: float) -> tuple[ir.Value, float]:
        """Return the mask of the dropout `index`, bool of the shape of `x`, and the scale.

        An element is False with the probability `ratio`, rounded to a multiple of 2**-16; the scale
        is the inverse of the exact probability of True.
        """
        dropped = min(max(round(ratio * _LEVELS), 1), _LEVELS - 1)
        lengths = static(dims(x))
        size = op.Size(x) if lengths is None else prod(lengths)
        count: ir.Value | np.int64
        count = np.int64(-(-size // 4)) if isinstance(size, int) else (size + 3) / 4
        counters = op.Range(np.int64(0), count, np.int64(1)) * _as_int64(_GAMMA)
        words = _write_mix(op, counters + op.Gather(self._keys, [index]))
        shifted = [_shift(op, words, by, direction) for by, direction in _OFFSETS]
        parts = [op.Cast(word, to=ir.DataType.INT32) for word in shifted]
        threshold = np.int32((dropped << 16) - (1 << 31))  # the upper half of a word decides
        keep = op.GreaterOrEqual(op.Concat(*parts, axis=0), threshold)
        shape = dims(x)
        if shape is None or prod(d for d in shape if isinstance(d, int)) % 4:
            end = [size] if isinstance(size, int) else op.Reshape(size, [1])
            keep = op.Slice(keep, [0], end)
        keep = op.Reshape(keep, op.shape_of(x), allowzero=1)
        keep.shape, keep.dtype = x.shape, ir.DataType.BOOL
        return keep, _LEVELS / (_LEVELS - dropped)


def _as_int64(number: int) -> np.int64:
    """Return the int64 with the bits of a 64-bit number; sums and products are taken mod 2**64."""
    return np.uint64(number).astype(np.int64)


def _shift(op: Emit, words: ir.Value, by: int, direction: str) -> ir.Value:
    return op.BitShift(words, np.uint64(by), direction=direction) if by else words


def _write_mix(op: Emit, z: ir.Value) -> ir.Value:
    """Return SplitMix64's output, uint64, for counters in int64.

    onnxruntime shifts unsigned integers only, and its versions from 1.16 to 1.21, for which there
    are artifacts, multiply signed ones only.
    """
    for shift, factor in _ROUNDS:
        z = op.Cast(_write_fold(op, z, shift), to=ir.DataType.INT64) * _as_int64(factor)
    return _write_fold(op, z, _LAST_SHIFT)


def _write_fold(op: Emit, z: ir.Value, shift: int) -> ir.Value:
    bits = op.Cast(z, to=ir.DataType.UINT64)
    return op.BitwiseXor(bits, _shift(op, bits, shift, "RIGHT"))


def _mix(z: np.ndarray) -> np.ndarray:
    """Return SplitMix64's output for counters in uint64."""
    for shift, factor in _ROUNDS:
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return z ^ (z >> np.uint64(_LAST_SHIFT))
