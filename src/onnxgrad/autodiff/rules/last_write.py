"""Which of the writes to one place holds: the last one.

ONNX does not define what a scatter without reduction returns where an index occurs twice.
onnxruntime writes in order, but for a ScatterND of very many rows on several threads.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.rules.common import positions_of
from onnxgrad.graph.distinct import distinct_along, distinct_rows
from onnxgrad.graph.shapes import dims, rank


def last_of_elements(op, g, x, i, axis):
    """Return `g`, 0 where a ScatterElements into `x` writes to the same place later."""
    n, index, shape = rank(i), op.known_value(i), dims(x)
    if n is not None and distinct_along(i, axis % n - n):
        return g
    if index is not None:
        columns = list(np.indices(index.shape))
        columns[axis] = index
        wins = _last(columns, shape)
        if wins is not None:
            return g if wins.all() else op.Where(wins, g, 0.0)
    return op.Where(last_writes(op, i, op.shape_of(x), axis), g, 0.0)


def last_of_rows(op, g, x, i):
    """Return `g`, 0 in rows to whose place a ScatterND into `x` writes later."""
    if distinct_rows(i):
        return g
    index, shape, k = op.known_value(i), dims(x), op.dim(i, -1)
    if index is not None and shape is not None:
        wins = _last(list(np.moveaxis(index, -1, 0)), shape)
        if wins is not None:
            trailing = (1,) * (len(shape) - index.shape[-1])
            return g if wins.all() else op.Where(wins.reshape(wins.shape + trailing), g, 0.0)
    lead = op.Slice(op.shape_of(x), [0], op.vector(k))
    size = op.ReduceProd(lead, keepdims=1)
    numbers = op.arange(size)
    places = op.GatherND(op.Reshape(numbers, lead, allowzero=1), i)
    wins = last_writes(op, op.Reshape(places, [-1]), size)
    after = op.Shape(op.Slice(op.shape_of(x), op.vector(k), [2**31 - 1]))
    ones = op.ConstantOfShape(after, value=ir.tensor(np.ones(1, np.int64)))
    ones.dtype = ir.DataType.INT64
    rows = op.Concat(op.Slice(op.shape_of(i), [0], [-1]), ones, axis=0)
    return op.Where(op.Reshape(wins, rows, allowzero=1), g, 0.0)


def last_writes(op, i, shape, axis=0):
    """Return whether no later element of `i` has the same place along an axis of `shape`."""
    numbers = positions_of(op, i)
    unset = op.Expand(np.int64(-1), shape)
    last = op.ScatterElements(unset, i, numbers, axis=axis, reduction="max")
    return op.Equal(op.GatherElements(last, i, axis=axis), numbers)


def _last(columns, lengths):
    """Return where no later element is equal in all columns, or None if it takes unknown lengths.

    The columns are constant indices of one shape along the axes of `lengths`.
    """
    for c, (column, n) in enumerate(zip(columns, lengths or [None] * len(columns), strict=False)):
        below = column < 0
        if isinstance(n, int):
            columns[c] = np.where(below, column + n, column)
        elif below.any() and not below.all():
            return None
    rows = np.stack([c.ravel()[::-1] for c in columns], axis=1)
    wins = np.zeros(len(rows), bool)
    wins[np.unique(rows, axis=0, return_index=True)[1]] = True
    return wins[::-1].reshape(columns[0].shape)
