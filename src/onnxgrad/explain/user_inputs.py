"""Checks of the inputs that users pass to explanations, and of their row counts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from onnxgrad.data.readers import is_batch
from onnxgrad.errors import unknown
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
