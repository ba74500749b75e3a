"""Targets: which element of a row of the output is the score to explain."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from onnxgrad.errors import printable, unknown
from onnxgrad.runtime.values import to_numpy

Target: TypeAlias = int | tuple[int, ...] | Sequence[int] | Sequence[tuple[int, ...]] | Any


def target_indices(target: Target | None, rows: int, shape: Sequence[int]) -> np.ndarray:
    """Return the index of the explained score in each row of the output, an array (rows, axes of a
    row).

    Args:
        target: None if a row of the output has one element. An integer, or a tuple of integers for
            a row of several axes, is the same for all rows; a list or an array has one a row.
        rows: number of rows.
        shape: shape of a row of the output.

    Raises:
        ValueError: no target for a row of several elements, a target of another number of axes or
            rows, or an index out of range; the message names the row.
        TypeError: a target that is no integer.
    """
    shape = tuple(shape)
    if target is None:
        if any(d != 1 for d in shape):
            raise ValueError(
                f"a row of the output has the shape {list(shape)}: name one element as `target`, "
                "as the index of a class"
            )
        return np.zeros((rows, len(shape)), np.int64)
    indices = _integer_indices(target)
    if isinstance(target, tuple) or indices.ndim == 0:  # the same for all rows
        indices = np.broadcast_to(indices.reshape(1, -1), (rows, max(indices.size, 1)))
    elif len(indices) == 1 and rows != 1 and not isinstance(target, list):
        indices = np.broadcast_to(indices.reshape(1, -1), (rows, indices.size))
    indices = indices.reshape(len(indices), -1)
    if len(indices) != rows:
        raise ValueError(
            f"`target` has {len(indices)} rows, and the inputs have {rows}: give one target for "
            "each row, or a single target"
        )
    if indices.shape[1] == 1 and set(shape[1:]) == {1}:  # (N, C, 1, 1) is an output of classes
        indices = np.pad(indices, ((0, 0), (0, len(shape) - 1)))
    if indices.shape[1] != len(shape):
        raise ValueError(
            f"`target` has {indices.shape[1]} indices, and a row of the output has the shape "
            f"{list(shape)}: give a tuple of {len(shape)} indices"
        )
    outside = (indices < 0) | (indices >= np.array(shape, np.int64))
    if outside.any():
        row = int(np.flatnonzero(outside.any(axis=1))[0])
        raise ValueError(
            f"`target` {indices[row].tolist()} of row {row} is out of range: a row of the output "
            f"has the shape {list(shape)}"
        )
    return indices


def class_indices(target: Any, classes: Sequence[str]) -> Any:
    """Return `target` with class names replaced by class indices.

    Raises:
        ValueError: a name that is not among `classes`, or no classes are known.
    """
    texts = np.asarray(target) if isinstance(target, (str, list, np.ndarray)) else None
    if (
        texts is None
        or texts.dtype.kind not in "OU"
        or not all(isinstance(name, str) for name in texts.ravel())
    ):
        return target
    if not classes:
        raise ValueError(
            f"`target` {printable(repr(target)[:80])} names a class, and the model stores no names "
            "of classes: give the index of the class"
        )
    for name in texts.ravel():
        if name not in classes:
            raise unknown("class", str(name), classes)
    indices = [classes.index(name) for name in texts.ravel()]
    return indices if texts.ndim else indices[0]


def score_cotangent(y_shape: Sequence[int], dtype: Any, indices: np.ndarray) -> np.ndarray:
    """Return the gradient of the sum of scores w.r.t. the output: 1 at each score, else 0."""
    cotangent = np.zeros(y_shape, dtype)
    cotangent[(np.arange(len(indices)), *indices.T)] = 1
    return cotangent


def _integer_indices(target: Any) -> np.ndarray:
    """Return a target as an int64 array; raise `TypeError` if an element is no integer."""
    if isinstance(target, bool):
        raise TypeError("`target` is an index, not a truth value: give an integer")
    try:
        indices = np.asarray(operator.index(target) if np.ndim(target) == 0 else to_numpy(target))
    except (TypeError, ValueError):
        raise TypeError(
            "`target` is an integer, a tuple of integers, or a list of these with one for each "
            f"row, not {printable(repr(target)[:80])}"
        ) from None
    if isinstance(target, tuple) and indices.ndim != 1:
        raise TypeError("`target` is a tuple of tuples: give a list of tuples, one a row")
    if indices.dtype.kind not in "iu":
        raise TypeError(f"`target` holds {indices.dtype}: give integers, the indices of scores")
    return indices.astype(np.int64)
