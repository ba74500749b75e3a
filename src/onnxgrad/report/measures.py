"""Measures of weights that a recorder takes: norms and histograms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

BINS = 40
MOST = 256  # records: then every second one is removed

Arrays = Mapping[str, np.ndarray]


def norm(array: np.ndarray) -> float:
    """Return the 2-norm of all elements, added up in float64."""
    flat = np.asarray(array).astype(np.float64, copy=False).ravel()
    return math.sqrt(float(flat @ flat))


def description(array: np.ndarray) -> dict[str, Any]:
    """Return shape, dtype and size of a weight, as values for JSON."""
    return {"shape": list(array.shape), "dtype": array.dtype.name, "size": int(array.size)}


def change(new: np.ndarray, old: np.ndarray) -> float:
    """Return the 2-norm of the difference of two arrays, in float64."""
    return norm(np.asarray(new).astype(np.float64) - np.asarray(old).astype(np.float64))


def histogram(array: np.ndarray) -> dict[str, Any]:
    """Return a histogram between the smallest and the largest element, as numbers for JSON.

    `low` and `high` are these, `counts` the elements of `BINS` equal intervals in between.
    """
    flat = np.asarray(array).astype(np.float64, copy=False).ravel()
    if not flat.size:
        return {"low": 0.0, "high": 0.0, "counts": []}
    low, high = float(flat.min()), float(flat.max())
    bins = BINS if high > low else 1
    return {"low": low, "high": high, "counts": np.histogram(flat, bins)[0].tolist()}


def histograms(weights: Arrays) -> dict[str, dict[str, Any]]:
    """Return the histogram of each weight."""
    return {name: histogram(array) for name, array in weights.items()}


def thin(records: list[Any], stride: int) -> int:
    """Remove every second record, except the last, if they are too many; return the new stride."""
    if len(records) <= MOST:
        return stride
    del records[-2::-2]
    return stride * 2
