"""Seeds of many directions in one matrix, as CasADi packs them.

CasADi reads a tensor as a matrix: one of rank 0 or 1 as a column, one of rank 2 as it is, one of
higher rank as the column of its elements in row-major order. K seeds of an r x c matrix are one
matrix of r x (K * c): the columns of the first, of the second, and so on.
"""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from onnxgrad.autodiff.sheet import Sheet
from onnxgrad.graph.shapes import Dim, dims, rank, static


def seed_input(sheet: Sheet, like: ir.Value, name: str, count: str) -> ir.Value:
    """Return a new input `name` for the packed seeds of `like`; `count` names their number."""
    sheet.free(name)
    new = ir.Value(name=name, type=like.type, shape=ir.Shape(packed_dims(like, name, count)))
    sheet.graph.inputs.append(new)
    return new


def packed_dims(like: ir.Value, name: str, count: str) -> tuple[Dim, Dim]:
    """Return the dimensions of the packed seeds of `like`.

    ONNX has no products of symbols: the number of columns is `count` where c is 1, else a symbol of
    its own, which CasADi sets to the width of the seeds that it passes.

    Raises:
        ValueError: the rank of `like` is unknown.
    """
    shape = dims(like)
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


def count_of(sheet: Sheet, seeds: ir.Value, like: ir.Value) -> ir.Value:
    """Return the number of directions in the packed `seeds` of `like`, an int64 of shape [1]."""
    op = sheet.op
    columns = op.dim(like, 1) if rank(like) == 2 else 1
    width = op.const(op.vector(op.dim(seeds, 1)))
    return width if columns == 1 else op.Div(width, op.const(op.vector(columns)))


def unpack(sheet: Sheet, seeds: ir.Value, like: ir.Value) -> ir.Value:
    """Return the packed `seeds` of `like` as (K, *like.shape)."""
    op, n = sheet.op, rank(like)
    if n == 2:
        split = op.Reshape(seeds, op.vector(op.dim(like, 0), -1, op.dim(like, 1)))
        split.shape = ir.Shape([None, None, None])
        stacked = op.Transpose(split, perm=[1, 0, 2])
    else:
        shape = op.vector(-1, *(op.dim(like, i) for i in range(n or 0)))
        stacked = op.Reshape(op.Transpose(seeds, perm=[1, 0]), shape)
    stacked.dtype, stacked.shape = like.dtype, ir.Shape([None, *(dims(like) or ())])
    return stacked


def pack(sheet: Sheet, stacked: ir.Value, like: ir.Value) -> ir.Value:
    """Return (K, *like.shape) as packed seeds of `like`."""
    op, n = sheet.op, rank(like)
    if n == 2:
        flat = op.Transpose(stacked, perm=[1, 0, 2])
        return op.Reshape(flat, op.vector(op.dim(like, 0), -1))
    return op.Transpose(op.Reshape(stacked, op.vector(-1, op.numel(like, 0))), perm=[1, 0])
