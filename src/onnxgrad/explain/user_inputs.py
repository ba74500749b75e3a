"""The inputs of explanations: checked arrays, their row counts, and rows on the first axis."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.data.readers import is_batch
from onnxgrad.errors import unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.operators.shapes import dims
from onnxgrad.runtime.values import to_numpy

Arrays: TypeAlias = dict[str, np.ndarray]
Inputs: TypeAlias = Any  # an array, or a mapping of names to arrays


def input_arrays(
    inputs: Inputs,
    graph: Sequence[ir.Value],
    needed: Iterable[str],
    unused: Collection[str] = (),
) -> Arrays:
    """Return {name: array} of the inputs, in the dtypes of the model.

    Args:
        inputs: the array of the only input, or a dict of arrays by name.
        graph: the inputs of the model.
        needed: names of the inputs to return.
        unused: names of more inputs of the whole model, which may be in the dict.
    """
    known, values = {str(x.name): x for x in graph}, inputs
    if not isinstance(inputs, Mapping):
        if len(known) != 1:
            raise ValueError(f"the model has the inputs {list(known)}: pass a dict of arrays")
        if isinstance(inputs, (tuple, list)) and inputs and is_batch(inputs[0]):
            raise ValueError(
                "`inputs` is a list of batches: pass the array of the input, or a dict of arrays"
            )
        values = {next(iter(known)): inputs}
    for name in values:
        if name not in known and name not in unused:
            raise unknown("input", name, known)
    needed = list(needed)
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"the inputs {missing} are missing: add them to the dict")
    return {name: _input_array(values[name], known[name]) for name in needed}


def count_rows(feed: Arrays, graph: Sequence[ir.Value]) -> tuple[int, set[str]]:
    """Return the row count, and the names of the inputs whose first axis is the rows.

    The rows are the first axis of the first input whose first axis is symbolic, or else of the
    first input.
    """
    shapes = {str(x.name): dims(x) for x in graph}
    firsts = {n: (shapes[n] or (None,))[0] for n, x in feed.items() if x.ndim}
    if not firsts:
        raise ValueError(
            "all inputs of the model are scalars: explanations need an input with rows on its "
            "first axis"
        )
    primary = next((n for n, d in firsts.items() if not isinstance(d, int)), next(iter(firsts)))
    rows, first = len(feed[primary]), firsts[primary]
    if not rows:
        raise ValueError(f"input {primary!r} has no rows: pass at least one row")
    for name, d in firsts.items():
        if d is not None and d == first and len(feed[name]) != rows:
            raise ValueError(
                f"input {primary!r} has {rows} rows, and {name!r} has {len(feed[name])}: pass the "
                "same number of rows"
            )
    same = [n for n in firsts if len(feed[n]) == rows]
    return rows, {n for n in same if not isinstance(firsts[n], int) or firsts[n] == first}


def _input_array(value: Any, x: ir.Value) -> np.ndarray:
    """Return `value` as an array of the dtype of the model input `x`, or raise `TypeError`."""
    array = to_numpy(value)
    assert x.dtype is not None
    dtype = np.dtype(x.dtype.numpy())
    if dtype.hasobject:  # strings
        return array.astype(object)
    if array.dtype.kind == "O" or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise TypeError(f"input {x.name!r} takes {dtype}, not {array.dtype}: convert the array")
    return np.asarray(array, dtype, order="C")


def move_rows_first(proto: ModelProto, axes: Mapping[str, int]) -> ModelProto:
    """Return a model whose inputs and outputs in `axes`, {name: axis of rows}, have rows on the
    first axis.
    """
    moved = {name: axis for name, axis in axes.items() if axis != 0}
    if not moved:
        return proto
    model = to_ir(proto)
    graph = model.graph
    op, head = Emit(graph), next(iter(graph), None)
    listed = {str(v.name): v for v in (*graph.outputs, *graph.inputs)}
    for name, axis in moved.items():
        if name not in listed:
            raise unknown("input or output in batch_axes", name, listed)
        value = listed[name]
        shape = dims(value)
        if shape is None or not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"batch_axes[{name!r}] is {axis}, and {name!r} has the shape {shape}: give the "
                "index of its axis of rows"
            )
        axis %= len(shape)
        others = [i for i in range(len(shape)) if i != axis]
        back = [*range(1, axis + 1), 0, *range(axis + 1, len(shape))]
        value.name = op.name(name)
        if value.is_graph_input():
            rows = ir.Value(
                name=name, type=value.type, shape=ir.Shape([shape[i] for i in (axis, *others)])
            )
            with op.at(head):
                whole = op.set_type_like(op.Transpose(rows, perm=back), value)
            graph.inputs[list(graph.inputs).index(value)] = rows
            ir.convenience.replace_all_uses_with(value, whole, replace_graph_outputs=True)
        else:
            rows = op.Transpose(value, perm=[axis, *others])
            rows.name = name
            graph.outputs[list(graph.outputs).index(value)] = rows
    return to_proto(model)
