"""Seeds of many directions in one matrix, as CasADi packs them.

CasADi reads a tensor as a matrix: one of rank 0 or 1 as a column, one of rank 2 as it is, one of
higher rank as the column of its elements in row-major order. K seeds of an r x c matrix are one
matrix of r x (K * c): the columns of the first, of the second, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import onnx_ir as ir

from onnxgrad.autodiff.sheet import Sheet
from onnxgrad.graph.emit import Emit
from onnxgrad.operators.shapes import Dim, dims, rank, static

_COUNTS = {"adj": "nadj", "fwd": "nfwd", "fwd_adj": "nfwd_x_nadj"}  # prefix -> symbol of K


class Seeds:
    """New inputs `<prefix>_<x>` of packed seeds, one for each of `values`.

    `counts` has the number of directions of each, an int64 of shape [1].
    """

    def __init__(self, sheet: Sheet, values: Sequence[ir.Value], prefix: str) -> None:
        self._op, inputs = sheet.op, []
        for x in values:
            sheet.free(name := f"{prefix}_{x.name}")
            seeds = ir.Value(name=name, type=x.type, shape=ir.Shape(packed_dims(x, prefix)))
            inputs.append((x, seeds))
            sheet.graph.inputs.append(seeds)
        self.counts = [_count(sheet.op, seeds, x) for x, seeds in inputs]
        self._stacked = [(x, _unpack(sheet.op, seeds, x)) for x, seeds in inputs]

    def at(self, index: ir.Value) -> dict[ir.Value, ir.Value]:
        """Return each value with its seed of the direction `index`; none beyond the last."""
        op = self._op
        return {x: op.set_type_like(op.Gather(v, index, axis=0), x) for x, v in self._stacked}


def packed_dims(like: ir.Value, prefix: str) -> tuple[Dim, Dim]:
    """Return the dimensions of the packed seeds `<prefix>_<like>`.

    ONNX has no products of symbols: the number of columns is K where c is 1, else a symbol of its
    own, which CasADi sets to the width of the seeds that it passes.
    """
    shape, count, name = dims(like), _COUNTS[prefix], f"{prefix}_{like.name}"
    if shape is None:
        raise ValueError(
            f"the rank of {like.name!r} is unknown, so that its seeds have no layout: declare its "
            "shape in the model"
        )
    if len(shape) == 2:
        rows, columns = shape
        return rows, count if columns == 1 else f"{count}_x_{columns or name}"
    lengths = static(shape)
    unknown = shape[0] if len(shape) == 1 else f"{name}_rows"
    return unknown if lengths is None else prod(lengths), count


def _count(op: Emit, seeds: ir.Value, like: ir.Value) -> ir.Value:
    columns = op.dim(like, 1) if rank(like) == 2 else 1
    width = op.const(op.vector(op.dim(seeds, 1)))
    return width if columns == 1 else op.Div(width, op.const(op.vector(columns)))


def _unpack(op: Emit, seeds: ir.Value, like: ir.Value) -> ir.Value:
    """Return the packed `seeds` of `like` as (K, *like.shape)."""
    if rank(like) == 2:
        split = op.Reshape(seeds, op.vector(op.dim(like, 0), -1, op.dim(like, 1)))
        split.shape = ir.Shape([None, None, None])
        stacked = op.Transpose(split, perm=[1, 0, 2])
    else:
        shape = op.vector(-1, *(op.dim(like, i) for i in range(rank(like) or 0)))
        stacked = op.Reshape(op.Transpose(seeds, perm=[1, 0]), shape)
    stacked.dtype, stacked.shape = like.dtype, ir.Shape([None, *(dims(like) or ())])
    return stacked


def pack(op: Emit, stacked: ir.Value, like: ir.Value) -> ir.Value:
    """Return (K, *like.shape) as packed seeds of `like`."""
    if rank(like) == 2:
        flat = op.Transpose(stacked, perm=[1, 0, 2])
        return op.Reshape(flat, op.vector(op.dim(like, 0), -1))
    return op.Transpose(op.Reshape(stacked, op.vector(-1, op.numel(like, 0))), perm=[1, 0])
