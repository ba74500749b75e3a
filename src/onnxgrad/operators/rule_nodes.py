"""Helpers of rules of several families."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.distinct import distinct_along, distinct_rows
from onnxgrad.operators.shapes import dims, rank, static

Operand = ir.Value | None  # None: it is left out


def total(*terms: Operand) -> ir.Value:
    """Return the sum of the terms, without the omitted ones."""
    first, *others = (v for v in terms if v is not None)
    return sum(others, start=first)


def attributes_of(node):
    """Return the attributes of a node as the keyword arguments of another."""
    return {a.name: a.value for a in node.attributes.values()}


def optional_inputs(inputs: Sequence, count: int) -> list:
    """Return the first `count` inputs of a node, None for each that is left out."""
    return [*inputs, *[None] * count][:count]


def output(op, node, i: int, dtype: ir.DataType) -> ir.Value:
    """Return output `i` of the node, which is added if the model omits it."""
    if len(node.outputs) <= i:
        node.resize_outputs(i + 1)
    y = node.outputs[i]
    if not y.name:
        y.name, y.dtype = op.name(f"{node.op_type.lower()}_{i}"), dtype
    return y


def positions_of(op, x):
    """Return the positions 0, ..., n-1 of the elements of flattened `x`, in the shape of `x`."""
    return op.Reshape(op.arange(op.Size(x)), op.shape_of(x), allowzero=1)


def wide(dtype: ir.DataType) -> ir.DataType:
    """Return the dtype in which sums and products of `dtype` are computed.

    For half precision that is float32: sums need it, and onnxruntime has few kernels for less.
    """
    return dtype if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT


def widened(op, x, *values):
    """Return x and `values` in the wide dtype of x; None stays None."""
    dtype = wide(x.dtype)
    return [None if v is None else op.Cast(v, to=dtype) for v in (x, *values)]


def narrowed(op, gradients, inputs):
    """Return the gradients in the dtypes of their inputs."""
    pairs = zip(gradients, inputs, strict=False)
    return [g if g is None or x.dtype is None else op.Cast(g, to=x.dtype) for g, x in pairs]


def product_of_others(op, u, multiplied, added):
    """Return the product of the other elements of the group of each element of u.

    `multiplied` and `added` return the product and the sum over the group of each element. Right
    where some are zero: the product is zero if two of the others are; a single zero among them
    stays a factor, so that second derivatives are right too.
    """
    zero = op.Equal(u, 0.0)
    counted, zeros = op.Cast(zero, to=u.dtype), op.Where(zero, u, 0.0)
    nonzero = op.Where(zero, 1.0, u)
    rest = multiplied(nonzero) / nonzero
    left = added(counted) - counted  # zeros among the others
    rest_with_zero = rest * (added(zeros) - zeros)  # zero, but not its derivative
    some = op.Where(op.Equal(left, 1.0), rest_with_zero, 0.0)
    return op.Where(op.Equal(left, 0.0), rest, some)


def gated(op, x, g):
    """Return `x`, available when `g` is: a Reshape in which 0 keeps the length.

    What is computed from constants only, onnxruntime computes when it loads the model, and keeps.
    """
    n, size = rank(x), op.Size(g)
    keep = op.Mul(op.Shape(x), op.Mul([0], size)) if n is None else op.Mul([0] * n, size)
    return op.set_type_like(op.Reshape(x, keep), x)


def last_of_elements(op, g, x, i, axis):
    """Return `g`, 0 where a ScatterElements into `x` writes to the same place later.

    ONNX does not define the result of a scatter without reduction where an index occurs twice.
    onnxruntime writes in order, but for a ScatterND of very many rows on several threads.
    """
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
