"""Proofs that indices are distinct, as exporters write them for slices, masks and ranges."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.axes import named_axes, places
from onnxgrad.operators.shapes import constant, dims
from onnxgrad.operators.windows import stated_windows

_MOVES = frozenset(("Expand", "Range", "Reshape", "Slice", "Unsqueeze"))
_WIDE = (ir.DataType.INT32, ir.DataType.INT64)


def distinct_along(i: ir.Value, axis: int) -> bool:
    """Return whether `i` is proven to hold no index twice along `axis`, counted from the end."""
    shape = dims(i)
    if shape is None:
        return False
    if shape[axis] == 1 or _axis_of(i) == axis:
        return True
    node = _standard_producer(i)
    if node is not None and node.op_type == "TopK":
        return named_axes(node) == [axis + len(shape)]
    return node is not None and _keeps_distinct(node) and distinct_along(_first_operand(node), axis)


def distinct_rows(i: ir.Value) -> bool:
    """Return whether the vectors along the last axis of `i` are proven to be distinct indices."""
    shape, node = dims(i), _standard_producer(i)
    if node is not None and node.op_type == "Transpose":  # of a NonZero, whose two axes it swaps
        before = _standard_producer(_first_operand(node))
        perm = tuple(node.attributes.get_ints("perm", (1, 0)))
        return before is not None and before.op_type == "NonZero" and perm == (1, 0)
    if shape is None:
        return False
    columns, n = [i], len(shape)
    if node is not None and node.op_type == "Concat" and named_axes(node) == [n - 1]:
        columns = [x for x in node.inputs if x is not None]
    proven = {_axis_of(column) for column in columns}
    return all(d == 1 or axis - n in proven for axis, d in enumerate(shape[:-1]))


def distinct_positions(i: ir.Value) -> bool:
    """Return whether no position in the flattened tensor occurs twice in `i`.

    That is so if a MaxPool whose windows do not overlap has computed them.
    """
    node = _standard_producer(i)
    windows = stated_windows(node) if node is not None and node.op_type == "MaxPool" else None
    return windows is not None and windows.are_disjoint


def _axis_of(v: ir.Value) -> int | None:
    """Return the only axis along which `v` varies, if it holds distinct numbers from 0 on there.

    It is counted from the end; None if that is not proven.
    """
    shape, known, node = dims(v), constant(v), _standard_producer(v)
    if shape is None or known is not None:
        return None if known is None else _axis_of_array(known)
    if node is None or (node.op_type not in _MOVES and not _keeps_distinct(node)):
        return None
    x = _first_operand(node)
    if node.op_type == "Range":
        start, step = constant(x), constant(node.inputs[2])
        ascends = start is not None and start >= 0 and step is not None and step >= 1
        return -1 if ascends else None
    before, axis = dims(x), _axis_of(x)
    if before is None or axis is None or node.op_type == "Slice":
        return axis
    [place] = places(node, 0, axis + len(before))
    same = isinstance(place, int) and before[axis] == shape[place] is not None
    return place - len(shape) if same and isinstance(place, int) else None


def _axis_of_array(array: np.ndarray) -> int | None:
    if array.dtype.kind == "f":
        return None  # a Cast makes one index of several
    for axis in range(-array.ndim, 0):
        line = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
        alike = line.size and np.all(line == line[0]) and np.all(line >= 0)
        if alike and len(np.unique(line[0])) == line.shape[1]:
            return axis
    return None


def _keeps_distinct(node: ir.Node) -> bool:
    """Return whether `node` is a Cast that keeps numbers distinct which differ by one or more."""
    return node.op_type == "Cast" and node.outputs[0].dtype in _WIDE


def _standard_producer(v: ir.Value) -> ir.Node | None:
    """Return the standard node that computes `v`, or what `v` is a copy of."""
    node = v.producer()
    while node is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return None if node is None or node.domain else node


def _first_operand(node: ir.Node) -> ir.Value:
    x = node.inputs[0]
    assert x is not None
    return x
