"""Occlusion, an attribution without gradients: how a score falls if a window hides inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from onnxgrad.explain.score_function import Attributions, Point, ScoreFunction, baseline_values
from onnxgrad.explain.targets import Target
from onnxgrad.explain.user_inputs import Inputs
from onnxgrad.model.read import ModelLike

Lengths = int | Sequence[int]
_Window = tuple[slice, ...]


def occlusion(
    model: ModelLike | ScoreFunction,
    inputs: Inputs,
    window: Lengths | Mapping[str, Lengths],
    target: Target | None = None,
    baselines: Any = None,
    *,
    strides: Lengths | Mapping[str, Lengths] | None = None,
    wrt: str | Sequence[str] | None = None,
    output: str | None = None,
    batch_axes: Mapping[str, int] | None = None,
) -> Attributions:
    """Return how much the score falls where a sliding window is set to the baseline.

    Each element gets the mean over the windows that hide it (Zeiler & Fergus 2013,
    arXiv:1311.2901). No gradient is computed, so that any model will do, trees included, and `wrt`
    may be integers, such as token ids.

    Args:
        model, inputs, target, wrt, output, batch_axes: see `saliency`.
        window: lengths of the window along the axes of a row, as (3, 8, 8) for images of three
            channels; an integer for rows of one axis. `{name: lengths}` for several values.
        baselines: values inside of the window; see `integrated_gradients`.
        strides: distance of windows along each axis, at most the length of a window. None: 1.

    Returns:
        As `saliency`; float64 for integers.

    Raises:
        ValueError: as `saliency`; or windows or strides that do not fit.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,3] x) => (float[N] y) <int64[1] axes = {1}>
        ...     { y = ReduceSum<keepdims=0>(x, axes) }''')
        >>> og.explain.occlusion(model, np.float32([[1, 2, 4]]), window=1).tolist()
        [[1.0, 2.0, 4.0]]
    """
    point = ScoreFunction.of(model, wrt, output, batch_axes).at(inputs, target)
    hidden, whole = baseline_values(point, baselines), point.scores(point.values)
    results = {}
    for name, x in point.values.items():
        windows = _window_slices(name, x.shape[1:], window, strides)
        results[name] = _mean_score_drops(point, name, hidden[name], whole, windows)
    return point.to_attributions(results)


def _mean_score_drops(
    point: Point, name: str, hidden: np.ndarray, whole: np.ndarray, windows: list[_Window]
) -> np.ndarray:
    """Return for each element the mean of `whole` minus the score, over the windows that hide the
    element.
    """
    x = point.values[name]
    total, counts = np.zeros(x.shape), np.zeros(x.shape[1:])
    for chunk in point.copy_slices(len(windows)):
        part = windows[chunk]
        copies = np.stack([x] * len(part))
        for copy, where in zip(copies, part, strict=True):
            copy[where] = hidden[where]
        tiled = {n: np.concatenate([v] * len(part)) for n, v in point.values.items()}
        tiled[name] = copies.reshape(-1, *x.shape[1:])
        falls = whole - point.scores(tiled).reshape(len(part), -1)
        for fall, where in zip(falls, part, strict=True):
            total[where] += fall.reshape(-1, *[1] * (x.ndim - 1))
            counts[where[1:]] += 1
    return np.asarray(total / counts)  # each element is in a window: see `_window_slices`


def _window_slices(name: str, shape: Sequence[int], window: Any, strides: Any) -> list[_Window]:
    """Return an array index, (all rows, a slice per axis), for each position of the window."""
    lengths = _lengths_per_axis("window", window, name, shape)
    steps = _lengths_per_axis("strides", 1 if strides is None else strides, name, shape)
    slices = []
    for length, step, d in zip(lengths, steps, shape, strict=True):
        if length > d:
            raise ValueError(
                f"`window` {list(lengths)} of {name!r} is larger than a row, {list(shape)}: make "
                "it smaller"
            )
        if step > length and d > length:
            raise ValueError(
                f"`strides` {list(steps)} of {name!r} leave out elements between the windows "
                f"{list(lengths)}: make them no longer"
            )
        slices.append([slice(i, i + length) for i in range(0, d - length + step, step)])
    return [(slice(None), *corner) for corner in product(*slices)]


def _lengths_per_axis(what: str, lengths: Any, name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the argument `what`, "window" or "strides", as a length per axis of value `name`."""
    if isinstance(lengths, Mapping):
        if name not in lengths:
            raise ValueError(f"`{what}` has no entry for {name!r}: add one")
        lengths = lengths[name]
    if isinstance(lengths, int):
        lengths = (lengths,) * (len(shape) if what == "strides" else 1)
    lengths = tuple(lengths)
    if len(lengths) != len(shape) or any(n < 1 for n in lengths):
        raise ValueError(
            f"`{what}` {list(lengths)} of {name!r}: give a positive length for each of the axes "
            f"{list(shape)} of a row"
        )
    return lengths
