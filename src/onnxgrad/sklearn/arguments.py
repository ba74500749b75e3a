"""Checks of the arguments of estimators, and comparisons of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def check_arguments(estimator: Any) -> None:
    """Raise `ValueError` for an argument that is wrong for any data."""
    size = estimator.batch_size
    if size != "auto" and not _is_positive(size):
        raise ValueError(f"batch_size must be 'auto' or a whole number above 0, not {size!r}")
    if not _is_positive(estimator.max_iter):
        raise ValueError(f"max_iter must be a whole number above 0, not {estimator.max_iter!r}")
    if estimator.tol is not None and not (
        isinstance(estimator.tol, (int, float)) and estimator.tol >= 0
    ):
        raise ValueError(f"tol must be a number of 0 or more, or None, not {estimator.tol!r}")
    patience = estimator.n_iter_no_change
    if not _is_positive(patience) and patience != np.inf:
        raise ValueError(f"n_iter_no_change must be a number above 0, not {patience!r}")


def _is_positive(value: Any) -> bool:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return whole and bool(value > 0)


def by_name(X: Any) -> bool:
    """Return whether data are arrays by input; sparse ones may be dicts, too."""
    return isinstance(X, Mapping) and not hasattr(X, "toarray")
