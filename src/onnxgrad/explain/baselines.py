"""Baselines of attributions: the values that stand for the absence of a feature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxgrad.errors import unknown
from onnxgrad.explain.score_function import Point
from onnxgrad.explain.user_inputs import Arrays
from onnxgrad.runtime.values import to_numpy


def baseline_values(point: Point, baselines: Any, what: str = "baseline") -> Arrays:
    """Return {name of an explained value: its baseline, in the value's shape and dtype}.

    Args:
        point: the rows that are explained.
        baselines: a number or an array for the only value of `wrt`; or a dict by the names of
            values of `wrt`, or of inputs from which inner values are computed. None: zeros, if
            `wrt` are inputs.
        what: the name of a baseline in messages.

    Raises:
        ValueError: no baseline for an inner value, an unknown name, or another shape.
    """
    function = point.function
    if isinstance(baselines, Mapping):
        given = dict(baselines)
        inputs = {n: x for n, x in given.items() if n in point.feed and n not in point.values}
        if other := [n for n in given if n not in inputs and n not in point.values]:
            raise unknown(what, other[0], [*point.values, *point.feed])
        computed: dict[str, Any] = {} if function.inner else dict.fromkeys(point.values, 0)
        if inputs:
            feed = {
                n: _baseline_like(point, n, inputs.get(n), x, what) for n, x in point.feed.items()
            }
            computed |= function.values(feed, point.with_rows)
        given = computed | {n: b for n, b in given.items() if n in point.values}
    elif baselines is None:
        given = {n: 0 for n in point.values if n not in function.inner}
    elif len(point.values) == 1 or np.ndim(baselines) == 0:
        given = dict.fromkeys(point.values, baselines)
    else:
        raise ValueError(
            f"`wrt` names {len(point.values)} values: pass {what}s as a dict of arrays by name"
        )
    if missing := [n for n in point.values if n not in given]:
        raise ValueError(
            f"no {what} for the inner value {missing[0]!r}: pass one for it, as "
            f"{{{missing[0]!r}: 0}}, or inputs to compute it from, as "
            f"{{{next(iter(point.feed))!r}: array}}"
        )
    return {n: _baseline_like(point, n, given[n], x, what) for n, x in point.values.items()}


def _baseline_like(point: Point, name: str, baseline: Any, x: np.ndarray, what: str) -> np.ndarray:
    """Return `baseline` in the shape and dtype of `x`, or `x` if `baseline` is None."""
    if baseline is None:
        return x
    array = point.function.rows_first(name, to_numpy(baseline))
    if array.ndim and array.shape not in (x.shape, (1, *x.shape[1:])):
        raise ValueError(
            f"the {what} of {name!r} has the shape {list(array.shape)}: give a number, or an array "
            f"of the shape {list(x.shape)}, or of one row of it"
        )
    if not np.can_cast(array.dtype, x.dtype, "same_kind"):
        raise ValueError(f"the {what} of {name!r} holds {array.dtype}: pass {x.dtype}")
    return np.broadcast_to(array, x.shape).astype(x.dtype)
