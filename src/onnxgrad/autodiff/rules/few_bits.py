"""Products with weights that are kept in few bits: unpacked for the backward pass only."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.autodiff.registry import Unsupported, rule
from onnxgrad.autodiff.rules.common import gated

_FROZEN = Unsupported(
    "it is part of a quantized weight, which stays as it is: train adapters beside it or other "
    "weights, and name them"
)


@rule("MatMulNBits", domain="com.microsoft")
def matmul_n_bits(op, node, g):
    """y = x WT + c, W = scale (q - zero):  dx = g W,  dc = g."""
    bias = node.inputs[5] if len(node.inputs) > 5 else None
    bits = node.attributes.get_int("bits", 4)
    if node.inputs[1].dtype != ir.DataType.UINT8 or bits not in (2, 4, 8):
        return Unsupported("its quantized weight is not stored as uint8, in 2, 4 or 8 bits")
    dbias = None if bias is None else op.sum_to(g, bias)
    return op.MatMul(g, _weight(op, node, g)), None, _FROZEN, _FROZEN, None, dbias


@rule("GatherBlockQuantized", domain="com.microsoft")
def gather_block_quantized(op, node, g):
    """Rows of a table of integers: only their scales would have a gradient."""
    return None, None, _FROZEN


def _weight(op, node, g):
    """Return W, of shape (N, K), computed when `g` is."""
    packed, scales, zeros, order = (*node.inputs, None, None, None)[1:5]
    get = node.attributes.get_int
    n, k, bits, block = get("N"), get("K"), get("bits", 4), get("block_size")
    blocks = -(-k // block)
    steps = op.Cast(op.Reshape(_unpacked(op, gated(op, packed, g), bits), [n, -1]), to=scales.dtype)
    scales = op.Reshape(scales, [n, blocks])
    if zeros is None:
        zeros = float(2 ** (bits - 1))
    elif zeros.dtype == scales.dtype:
        zeros = op.Reshape(zeros, [n, blocks])
    else:
        rows = op.Reshape(_unpacked(op, zeros, bits), [n, -1])
        zeros = op.Cast(op.Slice(rows, [0], [blocks], [1]), to=scales.dtype)
    if order is not None:  # the block of every column
        scales, zeros = (
            v if isinstance(v, float) else op.Gather(v, order, axis=1) for v in (scales, zeros)
        )
        return (op.Slice(steps, [0], [k], [1]) - zeros) * scales
    steps = op.Reshape(steps, [n, blocks, block])
    if not isinstance(zeros, float):
        zeros = op.Unsqueeze(zeros, [2])
    weight = op.Reshape((steps - zeros) * op.Unsqueeze(scales, [2]), [n, blocks * block])
    return weight if blocks * block == k else op.Slice(weight, [0], [k], [1])


def _unpacked(op, x, bits):
    """Return the numbers of `bits` bits in bytes, the lowest bits first, on a new last axis."""
    if bits == 8:
        return x
    mask = op.const(ir.DataType.UINT8.numpy().type(2**bits - 1))
    shifts = [op.const(ir.DataType.UINT8.numpy().type(i)) for i in range(0, 8, bits)]
    parts = [op.BitwiseAnd(op.BitShift(x, s, direction="RIGHT"), mask) for s in shifts]
    return op.Concat(*(op.Unsqueeze(part, [-1]) for part in parts), axis=-1)
