"""Inputs near to given ones at which a model errs: FGSM and PGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.errors import unknown
from onnxgrad.explain.inputs import Arrays, Inputs
from onnxgrad.explain.score_function import Attributions, Point, ScoreFunction
from onnxgrad.explain.targets import Target, seeds
from onnxgrad.model.read import ModelLike

_LOSSES = ("score", "cross_entropy")
_NORMS = ("Linf", "L2")
Bounds = tuple[float, float]


def fgsm(
    model: ModelLike | ScoreFunction,
    inputs: Inputs,
    epsilon: float,
    target: Target | None = None,
    *,
    wrt: str | Sequence[str] | None = None,
    output: str | None = None,
    batch_axes: Mapping[str, int] | None = None,
    targeted: bool = False,
    loss: str = "score",
    bounds: Bounds = (-np.inf, np.inf),
    mask: Any = None,
) -> Attributions:
    """Return inputs moved by `epsilon` in the direction in which the loss of the target grows.

    x + epsilon sign(dL/dx), the fast gradient sign method of Goodfellow, Shlens & Szegedy 2014
    (arXiv:1412.6572).

    Args:
        model: model, serialized model or path, never modified; or a `ScoreFunction`.
        inputs: the array of the only input, or `{name: array}`.
        epsilon: length of the step of each element.
        target: the true class of each row, or that to reach if `targeted`; see `saliency`.
        wrt: name or names of values that are changed; see `ScoreFunction`.
        output: name of the output; see `ScoreFunction`.
        batch_axes: axes of the rows, if not the first; see `ScoreFunction`.
        targeted: whether the loss shall fall instead.
        loss: "score", minus the score: the step is the same for minus its logarithm. Or
            "cross_entropy", for outputs that are logits, with the classes along axis 1.
        bounds: the least and the greatest value of an element.
        mask: array of ones and zeros, which broadcasts to the value, or `{name: array}`: where it
            is zero, nothing changes. None: ones.

    Returns:
        An array of the shape and dtype of the value; `{name: array}` if `wrt` are several.

    Raises:
        ValueError: as `saliency`; an unknown `loss`, a negative `epsilon`, `bounds` that are not in
            order, or a mask that does not broadcast.
        NoGradientRule: an operator on a path has no rule.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {1.0, -3.0}>
        ...     { y = MatMul(x, w) }''')
        >>> og.explain.fgsm(model, np.float32([[1, 1]]), 0.5).tolist()
        [[0.5, 1.5]]
    """
    point, masks = _start(ScoreFunction.of(model, wrt, output, batch_axes), inputs, bounds, mask)
    _check(loss, "Linf", epsilon=epsilon)
    indices = point.indices(target)
    step = -epsilon if targeted else epsilon
    moved = _stepped(point, point.values, indices, loss, step, masks)
    return point.function.result(_clipped(moved, point.values, bounds))


def pgd(
    model: ModelLike | ScoreFunction,
    inputs: Inputs,
    radius: float,
    step_size: float,
    steps: int,
    target: Target | None = None,
    *,
    wrt: str | Sequence[str] | None = None,
    output: str | None = None,
    batch_axes: Mapping[str, int] | None = None,
    targeted: bool = False,
    loss: str = "score",
    norm: str = "Linf",
    bounds: Bounds = (-np.inf, np.inf),
    mask: Any = None,
    random_state: int | np.random.Generator | None = None,
) -> Attributions:
    """Return inputs moved by steps of `fgsm`, each projected into a ball (Madry et al. 2017).

    Args:
        model: see `fgsm`.
        inputs: see `fgsm`.
        radius: greatest distance of a row of a value from the input, in `norm`.
        step_size: length of a step of each element.
        steps: how many.
        target: see `fgsm`.
        wrt, output, batch_axes, targeted, loss: see `fgsm`.
        norm: "Linf", each element, or "L2", each row.
        bounds: see `fgsm`.
        mask: see `fgsm`.
        random_state: seed or generator of a random start in the ball. None: start at the input.

    Returns:
        As `fgsm`.

    Raises:
        ValueError, NoGradientRule: as `fgsm`; an unknown `norm`, a negative number, or no steps.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) { y = Neg(x) }''')
        >>> og.explain.pgd(model, np.float32([[1, 1]]), 0.25, 0.2, 5, 1).tolist()
        [[1.0, 1.25]]
    """
    point, masks = _start(ScoreFunction.of(model, wrt, output, batch_axes), inputs, bounds, mask)
    _check(loss, norm, radius=radius, step_size=step_size, steps=steps)
    indices, values = point.indices(target), point.values
    if random_state is not None:
        rng = np.random.default_rng(random_state)
        values = _near(point, _random(values, masks, radius, norm, rng), bounds)
    step = -step_size if targeted else step_size
    for _ in range(steps):
        values = _stepped(point, values, indices, loss, step, masks)
        values = _near(point, _projected(values, point.values, radius, norm), bounds)
    return point.function.result(values)


def _near(point: Point, differences: Arrays, bounds: Bounds) -> Arrays:
    """Return the values of `point`, changed by `differences`, inside of the bounds."""
    moved = {n: x + differences[n] for n, x in point.values.items()}
    return _clipped(moved, point.values, bounds)


def _start(
    function: ScoreFunction, inputs: Inputs, bounds: Bounds, mask: Any
) -> tuple[Point, Arrays]:
    """Return the rows and the mask of each value."""
    low, high = bounds
    if not low < high:
        raise ValueError(f"bounds={bounds}: give the least value, then the greatest")
    point = function.at(inputs)
    return point, masks_of(point, mask)


def masks_of(point: Point, mask: Any) -> Arrays:
    """Return the mask of each value, of its shape.

    Raises:
        ValueError: it does not broadcast, or names other values.
    """
    if not isinstance(mask, Mapping):
        mask = dict.fromkeys(point.values, 1.0 if mask is None else mask)
    for name in mask:
        if name not in point.values:
            raise unknown("mask", name, point.values)
    masks = {}
    for name, x in point.values.items():
        array = point.function.rows_first(name, np.asarray(mask.get(name, 1.0), np.float64))
        try:
            masks[name] = np.broadcast_to(array, x.shape)
        except ValueError:
            raise ValueError(
                f"the mask of {name!r} has the shape {list(array.shape)}, which does not broadcast "
                f"to {list(x.shape)}"
            ) from None
    return masks


def _check(loss: str, norm: str, **numbers: float) -> None:
    if norm not in _NORMS:
        raise unknown("norm", norm, _NORMS)
    if loss not in _LOSSES:
        raise unknown("loss", loss, _LOSSES)
    for name, number in numbers.items():
        if not number >= (1 if name == "steps" else 0):
            raise ValueError(f"{name}={number}: give a positive number")


def _stepped(
    point: Point,
    values: Arrays,
    indices: np.ndarray,
    loss: str,
    step: float,
    masks: Arrays,
) -> Arrays:
    """Return `values` after one step, of which each element has the length `step`."""
    if loss == "score":
        gradients = {n: -g for n, g in point.gradients(values, indices).items()}
    else:
        gradients = point.pulled_back(values, _cross_entropy(point.outputs(values), indices))
    moved = {n: x + step * np.sign(gradients[n]) * masks[n] for n, x in values.items()}
    return {n: x.astype(values[n].dtype) for n, x in moved.items()}


def _cross_entropy(y: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return the gradient of logsumexp(y) - y[target] with respect to the logits y."""
    if y.ndim < 2:
        raise ValueError(f"an output of shape {list(y.shape)} has no classes: use loss='score'")
    exponentials = np.exp(y - y.max(axis=1, keepdims=True).astype(np.float64))
    softmax = exponentials / exponentials.sum(axis=1, keepdims=True)
    here = np.zeros(np.moveaxis(y, 1, -1).shape)  # one where the other axes are those of the target
    here[(np.arange(len(y)), *indices.T[1:])] = 1
    gradient = softmax * np.moveaxis(here, -1, 1) - seeds(y.shape, np.float64, indices)
    return gradient.astype(y.dtype)


def _clipped(values: Mapping[str, np.ndarray], like: Arrays, bounds: Bounds) -> Arrays:
    return {n: np.clip(x, *bounds).astype(like[n].dtype) for n, x in values.items()}


def _projected(values: Arrays, centers: Arrays, radius: float, norm: str) -> Arrays:
    """Return the differences from `centers`, shortened to `radius`."""
    results = {}
    for name, x in centers.items():
        difference = values[name].astype(np.float64) - x
        if norm == "Linf":
            results[name] = np.clip(difference, -radius, radius)
            continue
        flat = difference.reshape(len(difference), -1)
        lengths = np.linalg.norm(flat, axis=1, keepdims=True)
        longer = lengths > radius
        factors = np.where(longer, radius / np.where(longer, lengths, 1.0), 1.0)
        results[name] = (flat * factors).reshape(difference.shape)
    return results


def _random(
    values: Arrays, masks: Arrays, radius: float, norm: str, rng: np.random.Generator
) -> Arrays:
    """Return uniform random points of the ball, one for each row, zero where the mask is."""
    results = {}
    for name, x in values.items():
        if norm == "Linf":
            results[name] = rng.uniform(-radius, radius, x.shape) * masks[name]
            continue
        flat = rng.standard_normal((len(x), x[0].size))
        flat /= np.linalg.norm(flat, axis=1, keepdims=True)
        lengths = radius * rng.uniform(size=(len(x), 1)) ** (1 / flat.shape[1])
        results[name] = (flat * lengths).reshape(x.shape) * masks[name]
    return results
