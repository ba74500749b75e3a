"""Which of the writes to one place holds: the last one.

ONNX does not define what a scatter without reduction returns where an index occurs twice.
onnxruntime writes in order, but for a ScatterND of very many rows on several threads.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.rules.common import positions_of
from onnxgrad.graph.distinct import distinct_along, distinct_rows
from onnxgrad.graph.shapes import dims, rank, static


def last_of_elements(op, g, x, i, axis):
    """Return `g`, 0 where a ScatterElements into `x` writes to the same place later."""
    n, index = rank(i), op.known_value(i)
    if n is not None and distinct_along(i, axis % n - n):
        return g
    if index is not None and index.size:
        places = np.indices(index.shape)
        places[axis] = index
        if _are_distinct(places.reshape(index.ndim, -1).T, x):
            return g
    return op.Where(last_writes(op, i, op.shape_of(x), axis), g, 0.0)


def last_of_rows(op, g, x, i):
    """Return `g`, 0 in rows to whose place a ScatterND into `x` writes later."""
    index, k = op.known_value(i), op.dim(i, -1)
    if distinct_rows(i):
        return g
    if index is not None and index.size and _are_distinct(index.reshape(-1, index.shape[-1]), x):
        return g
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


def _are_distinct(places: np.ndarray, x: ir.Value) -> bool:
    """Return whether the rows of `places` are proven to be distinct indices into `x`."""
    shape = static(dims(x))
    if shape is not None:
        places = places % shape[: places.shape[1]]
    below = places < 0  # counted from the end
    return bool(np.all(below == below[0])) and len(np.unique(places, axis=0)) == len(places)
