"""Which of the forms of data a list or a tuple is: batches, rows, or features and labels."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from onnxgrad.data.columns import is_table
from onnxgrad.runtime.values import shape_of


def is_batch(item: Any) -> bool:
    """Return whether an item of a list is a batch: a dict, a table, a tuple or list of arrays."""
    if isinstance(item, tuple):
        return not all(isinstance(part, (int, float)) for part in item)
    own = isinstance(item, list) and _has_arrays(item)
    return own or isinstance(item, Mapping) or is_table(item)


def are_parts(items: tuple[Any, ...]) -> bool:
    """Return whether a tuple is (X,), (X, y) or (X, y, sample_weight), not one of batches.

    It is one of batches if its items are dicts with a name in common, or tuples and lists of
    arrays that are not the rows of one array.

    Raises:
        ValueError: it may be both: lists of arrays of one shape, which may be the rows of X and y.
    """
    if len(items) not in (2, 3):
        return len(items) == 1 and hasattr(items[0], "shape")
    if all(isinstance(item, Mapping) for item in items):
        return not {*items[0]} & {*items[1]}
    lists = [item for item in items if not isinstance(item, Mapping)]
    if not all(isinstance(item, (tuple, list)) and _has_arrays(item) for item in lists):
        return True
    weights = len(items) < 3 or all(prod(shape_of(part)) == 1 for part in items[2])
    if weights and len({len(item) for item in lists}) == 1 and all(map(_may_be_rows, lists)):
        if len(lists[0]) > 3:
            return True
        raise ValueError(
            f"a tuple of {len(items)} lists of arrays of one shape may be batches, or the rows of "
            "X and of y: pass a list of batches, as [(X, y), (X, y)], or X and y as one array each"
        )
    return False


def _has_arrays(parts: Any) -> bool:
    return any(hasattr(part, "shape") or isinstance(part, Mapping) for part in parts)


def _may_be_rows(parts: Any) -> bool:
    arrays = all(hasattr(part, "shape") for part in parts)
    return arrays and len({tuple(shape_of(part)) for part in parts}) == 1
