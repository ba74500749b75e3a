"""What rules of several families write, and proofs that indices are distinct.

The proofs hold for indices as exporters write them for slices, masks and ranges.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.axes import named_axes, output_axes
from onnxgrad.operators.shapes import constant, dims, rank, static
from onnxgrad.operators.windows import explicit_windows

Operand = ir.Value | None  # None: it is left out


def sum_terms(*terms: Operand) -> ir.Value:
    """Return the sum of the operands, without the operands that are None."""
    first, *others = (v for v in terms if v is not None)
    return sum(others, start=first)


def attributes_of(node):
    """Return the attributes of a node as a dict of Python values, by name."""
    return {a.name: a.value for a in node.attributes.values()}


def optional_inputs(inputs: Sequence, count: int) -> list:
    """Return the first `count` inputs of a node, None for each that is left out."""
    return [*inputs, *[None] * count][:count]


def node_output(op, node, i: int, dtype: ir.DataType) -> ir.Value:
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


def wide_dtype(dtype: ir.DataType) -> ir.DataType:
    """Return the dtype in which sums and products of `dtype` are computed.

    For half precision that is float32: sums need it, and onnxruntime has few kernels for less.
    """
    return dtype if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT


def cast_to_wide(op, x, *values):
    """Return x and `values` in the wide dtype of x; None stays None."""
    dtype = wide_dtype(x.dtype)
    return [None if v is None else op.Cast(v, to=dtype) for v in (x, *values)]


def cast_to_inputs(op, gradients, inputs):
    """Return the gradients in the dtypes of their inputs."""
    pairs = zip(gradients, inputs, strict=False)
    return [g if g is None or x.dtype is None else op.Cast(g, to=x.dtype) for g, x in pairs]


def product_of_others(op, u, multiplied, added):
    """Return, for each element of u, the product of all other elements of its group.

    `multiplied` and `added` return the product and the sum over the group of each element. Right
    where some are zero: the product is zero if two of the others are; a single zero among them
    stays a factor, so that second derivatives are right too.
    """
    zero = op.Equal(u, 0.0)
    counted, zeros = op.Cast(zero, to=u.dtype), op.Where(zero, u, 0.0)
    nonzero = op.Where(zero, 1.0, u)
    rest = multiplied(nonzero) / nonzero
    left = added(counted) - counted  # how many of the other elements are zero
    rest_with_zero = rest * (added(zeros) - zeros)  # its value is zero, its derivative is not
    some = op.Where(op.Equal(left, 1.0), rest_with_zero, 0.0)
    return op.Where(op.Equal(left, 0.0), rest, some)


def delay_until(op, x, g):
    """Return `x` as a Reshape to its own shape, written so that it runs after `g` is computed.

    What is computed from constants only, onnxruntime computes when it loads the model, and keeps.
    """
    n, size = rank(x), op.Size(g)
    keep = op.Mul(op.Shape(x), op.Mul([0], size)) if n is None else op.Mul([0] * n, size)
    return op.set_type_like(op.Reshape(x, keep), x)


def zero_overwritten_elements(op, g, x, i, axis):
    """Return the gradient `g` of the updates of a ScatterElements into `x`, 0 for each update that
    a later update overwrites.

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
    return op.Where(is_last_write(op, i, op.shape_of(x), axis), g, 0.0)


def zero_overwritten_rows(op, g, x, i):
    """Return the gradient `g` of the updates of a ScatterND into `x`, 0 for each row that a later
    row overwrites.
    """
    index, k = op.known_value(i), op.dim(i, -1)
    if distinct_rows(i):
        return g
    if index is not None and index.size and _are_distinct(index.reshape(-1, index.shape[-1]), x):
        return g
    lead = op.Slice(op.shape_of(x), [0], op.vector(k))
    size = op.ReduceProd(lead, keepdims=1)
    numbers = op.arange(size)
    places = op.GatherND(op.Reshape(numbers, lead, allowzero=1), i)
    wins = is_last_write(op, op.Reshape(places, [-1]), size)
    after = op.Shape(op.Slice(op.shape_of(x), op.vector(k), [2**31 - 1]))
    ones = op.ConstantOfShape(after, value=ir.tensor(np.ones(1, np.int64)))
    ones.dtype = ir.DataType.INT64
    rows = op.Concat(op.Slice(op.shape_of(i), [0], [-1]), ones, axis=0)
    return op.Where(op.Reshape(wins, rows, allowzero=1), g, 0.0)


def is_last_write(op, i, shape, axis=0):
    """Return, for each index in `i` along an axis of `shape`, whether no later element of `i` is
    equal: a boolean tensor.
    """
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


_MOVES = frozenset(("Expand", "Range", "Reshape", "Slice", "Unsqueeze"))
_WIDE = (ir.DataType.INT32, ir.DataType.INT64)


def distinct_along(i: ir.Value, axis: int) -> bool:
    """Return whether `i` is proven to hold no index twice along `axis`, counted from the end."""
    shape = dims(i)
    if shape is None:
        return False
    if shape[axis] == 1 or _axis_of_distinct_numbers(i) == axis:
        return True
    node = _standard_producer(i)
    if node is not None and node.op_type == "TopK":
        return named_axes(node) == [axis + len(shape)]
    return node is not None and _is_int_cast(node) and distinct_along(_first_operand(node), axis)


def distinct_rows(i: ir.Value) -> bool:
    """Return whether the vectors along the last axis of `i` are proven to be distinct indices."""
    shape, node = dims(i), _standard_producer(i)
    if node is not None and node.op_type == "Transpose":  # of the result of a NonZero
        before = _standard_producer(_first_operand(node))
        perm = tuple(node.attributes.get_ints("perm", (1, 0)))
        return before is not None and before.op_type == "NonZero" and perm == (1, 0)
    if shape is None:
        return False
    columns, n = [i], len(shape)
    if node is not None and node.op_type == "Concat" and named_axes(node) == [n - 1]:
        columns = [x for x in node.inputs if x is not None]
    proven = {_axis_of_distinct_numbers(column) for column in columns}
    return all(d == 1 or axis - n in proven for axis, d in enumerate(shape[:-1]))


def distinct_positions(i: ir.Value) -> bool:
    """Return whether no position in the flattened tensor occurs twice in `i`.

    That is so if a MaxPool whose windows do not overlap has computed them.
    """
    node = _standard_producer(i)
    windows = explicit_windows(node) if node is not None and node.op_type == "MaxPool" else None
    return windows is not None and windows.are_disjoint


def _axis_of_distinct_numbers(v: ir.Value) -> int | None:
    """Return the axis along which `v` is proven to hold distinct nonnegative numbers, if it is
    constant along all other axes.

    It is counted from the end; None if that is not proven.
    """
    shape, known, node = dims(v), constant(v), _standard_producer(v)
    if shape is None or known is not None:
        return None if known is None else _axis_of_distinct_elements(known)
    if node is None or (node.op_type not in _MOVES and not _is_int_cast(node)):
        return None
    x = _first_operand(node)
    if node.op_type == "Range":
        start, step = constant(x), constant(node.inputs[2])
        ascends = start is not None and start >= 0 and step is not None and step >= 1
        return -1 if ascends else None
    before, axis = dims(x), _axis_of_distinct_numbers(x)
    if before is None or axis is None or node.op_type == "Slice":
        return axis
    [place] = output_axes(node, 0, axis + len(before))
    same = isinstance(place, int) and before[axis] == shape[place] is not None
    return place - len(shape) if same and isinstance(place, int) else None


def _axis_of_distinct_elements(array: np.ndarray) -> int | None:
    """Return the axis along which an array holds distinct nonnegative numbers, if it is constant
    along all other axes.
    """
    if array.dtype.kind == "f":
        return None  # a Cast to integers may make distinct floats equal
    for axis in range(-array.ndim, 0):
        line = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
        alike = line.size and np.all(line == line[0]) and np.all(line >= 0)
        if alike and len(np.unique(line[0])) == line.shape[1]:
            return axis
    return None


def _is_int_cast(node: ir.Node) -> bool:
    """Return whether `node` is a Cast to int32 or int64, which keeps distinct indices distinct."""
    return node.op_type == "Cast" and node.outputs[0].dtype in _WIDE


def _standard_producer(v: ir.Value) -> ir.Node | None:
    """Return the standard node that computes `v`, looking through Identity nodes; None if there is
    no such node.
    """
    node = v.producer()
    while node is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return None if node is None or node.domain else node


def _first_operand(node: ir.Node) -> ir.Value:
    x = node.inputs[0]
    assert x is not None
    return x
