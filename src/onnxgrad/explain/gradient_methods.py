"""Attributions by gradients of scores: saliency, integrated gradients and SmoothGrad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.checks import check_choice, check_count, check_number
from onnxgrad.explain.score_function import Attributions, ScoreFunction, baseline_values
from onnxgrad.explain.targets import Target
from onnxgrad.explain.user_inputs import Arrays, Inputs
from onnxgrad.model.read import ModelLike

_SHIFTS = {"riemann_left": 0.0, "riemann_middle": 0.5, "riemann_right": 1.0}


def saliency(
    model: ModelLike | ScoreFunction,
    inputs: Inputs,
    target: Target | None = None,
    *,
    wrt: str | Sequence[str] | None = None,
    output: str | None = None,
    batch_axes: Mapping[str, int] | None = None,
    absolute: bool = True,
) -> Attributions:
    """Return the saliency of each row (Simonyan et al. 2013): its score's gradient w.r.t. inputs.

    Args:
        model: model, serialized model or path, never modified; or a `ScoreFunction`.
        inputs: the array of the only input, or `{name: array}`.
        target: which element of a row of the output is its score: None if a row has one element; an
            index or a tuple of indices for all rows, or a list or an array of them, one a row. A
            class whose name the model stores may be passed by this name.
        wrt: name or names of values that are explained; see `ScoreFunction`.
        output: name of the output; see `ScoreFunction`.
        batch_axes: axes of the rows, if not the first; see `ScoreFunction`.
        absolute: return absolute values.

    Returns:
        An array of the shape and dtype of the value; `{name: array}` if `wrt` are several.

    Raises:
        ValueError: see `ScoreFunction`; a target out of range; or no differentiable path from a
            value to the output, as in trees: the message names the node.
        NoGradientRule: an operator on a path has no rule.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) { z = Mul(x, x)  y = Neg(z) }''')
        >>> og.explain.saliency(model, np.float32([[1, 2]]), target=1).tolist()
        [[0.0, 4.0]]
    """
    point = ScoreFunction.of(model, wrt, output, batch_axes).at(inputs, target)
    gradients = point.gradients(point.values)
    if absolute:
        gradients = {name: np.abs(g) for name, g in gradients.items()}
    return point.to_attributions(gradients)


def integrated_gradients(
    model: ModelLike | ScoreFunction,
    inputs: Inputs,
    target: Target | None = None,
    baselines: Any = None,
    *,
    wrt: str | Sequence[str] | None = None,
    output: str | None = None,
    batch_axes: Mapping[str, int] | None = None,
    steps: int = 50,
    method: str = "gausslegendre",
) -> Attributions:
    """Return integrated gradients: (x - b) times the mean gradient between baseline b and x.

    Their sum is f(x) - f(b) for enough steps (Sundararajan, Taly & Yan 2017, arXiv:1703.01365);
    `completeness_gap` returns the difference.

    Args:
        model, inputs, target, wrt, output, batch_axes: see `saliency`.
        baselines: b, a number or an array of the shape of the value, or of one row of it; or
            `{name: number or array}`, of values of `wrt`, or of the inputs from which inner values
            are computed, such as the token ids of an embedding. None: zeros; an inner value needs a
            baseline.
        steps: number of gradients.
        method: the quadrature: "gausslegendre", "riemann_left", "riemann_middle" or
            "riemann_right".

    Returns:
        As `saliency`.

    Raises:
        ValueError, NoGradientRule: as `saliency`; a baseline of another shape, an unknown
            `method`, or too few steps.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) { y = Mul(x, x) }''')
        >>> x = np.float32([[1, 2]])
        >>> og.explain.integrated_gradients(model, x, target=1).round(4).tolist()
        [[0.0, 4.0]]
        >>> og.explain.integrated_gradients(model, x, 1, baselines=1.0).round(4).tolist()
        [[0.0, 3.0]]
    """
    weights, fractions = quadrature_rule(method, steps)
    point = ScoreFunction.of(model, wrt, output, batch_axes).at(inputs, target)
    starts = baseline_values(point, baselines)
    mean = {name: np.zeros(x.shape) for name, x in point.values.items()}
    for part in point.copy_slices(steps):
        path = interpolate_values(starts, point.values, fractions[part])
        for name, g in point.gradients(path).items():
            copies = g.reshape(-1, *point.values[name].shape).astype(np.float64)
            mean[name] += np.tensordot(weights[part], copies, 1)
    return point.to_attributions(
        {n: mean[n] * (x.astype(np.float64) - starts[n]) for n, x in point.values.items()}
    )


def smooth_grad(
    model: ModelLike | ScoreFunction,
    inputs: Inputs,
    target: Target | None = None,
    *,
    wrt: str | Sequence[str] | None = None,
    output: str | None = None,
    batch_axes: Mapping[str, int] | None = None,
    samples: int = 20,
    noise: float = 0.1,
    absolute: bool = True,
    random_state: int | np.random.Generator | None = None,
) -> Attributions:
    """Return the mean `saliency` of noisy copies of each row (Smilkov et al. 2017).

    Args:
        model, inputs, target, wrt, output, batch_axes: see `saliency`.
        samples: number of noisy copies of each row.
        noise: standard deviation of the normal noise, in units of the value.
        absolute: take absolute values, before the mean.
        random_state: seed or generator of the noise: `standard_normal((rows, *shape))` for each
            copy, then for each value. None draws a new seed.

    Returns:
        As `saliency`.

    Raises:
        ValueError, NoGradientRule: as `saliency`; no samples, or a negative `noise`.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) { y = Relu(x) }''')
        >>> x = np.float32([[0, 2]])
        >>> og.explain.smooth_grad(model, x, 1, random_state=0).round(4).tolist()
        [[0.0, 1.0]]
    """
    check_count("samples", samples)
    check_number("noise", noise)
    rng = np.random.default_rng(random_state)
    point = ScoreFunction.of(model, wrt, output, batch_axes).at(inputs, target)
    total = {name: np.zeros(x.shape) for name, x in point.values.items()}
    for _ in range(samples):
        drawn = {n: x + noise * rng.standard_normal(x.shape) for n, x in point.values.items()}
        noisy = {n: x.astype(point.values[n].dtype) for n, x in drawn.items()}
        for name, g in point.gradients(noisy).items():
            total[name] += np.abs(g) if absolute else g
    return point.to_attributions({n: t / samples for n, t in total.items()})


def completeness_gap(
    model: ModelLike | ScoreFunction,
    attributions: Attributions,
    inputs: Inputs,
    target: Target | None = None,
    baselines: Any = None,
    *,
    wrt: str | Sequence[str] | None = None,
    output: str | None = None,
    batch_axes: Mapping[str, int] | None = None,
) -> np.ndarray:
    """Return, for each row, the sum of its attributions minus the score, plus the baseline's score.

    It is zero for exact `integrated_gradients` and `layer_conductance`. More steps make it smaller.

    Args:
        model: model, serialized model or path, never modified; or a `ScoreFunction`.
        attributions: the result of `integrated_gradients` or `layer_conductance`.
        inputs, target, baselines, output, batch_axes: as in the call that returned it.
        wrt: as in this call; for `layer_conductance`, its `wrt`, not its `layer`.

    Returns:
        float64 of shape (rows,), in units of the score.

    Raises:
        ValueError: as `integrated_gradients`; attributions of another number of rows.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,1] x) => (float[N,1] y) { y = Exp(x) }''')
        >>> x = np.float32([[2]])
        >>> for steps in (2, 4):
        ...     found = og.explain.integrated_gradients(model, x, steps=steps)
        ...     print(og.explain.completeness_gap(model, found, x).round(2).tolist())
        [-0.02]
        [-0.0]
    """
    point = ScoreFunction.of(model, wrt, output, batch_axes).at(inputs, target)
    starts = baseline_values(point, baselines)
    if not isinstance(attributions, Mapping):
        attributions = {point.function.wrt[0]: attributions}
    arrays = [point.function.rows_first(name, np.asarray(a)) for name, a in attributions.items()]
    if any(len(a) != point.rows for a in arrays):
        raise ValueError(
            f"the attributions have {[len(a) for a in arrays]} rows, and the inputs have "
            f"{point.rows} rows: pass the inputs that the attributions explain"
        )
    total = sum(np.sum(a, axis=tuple(range(1, a.ndim)), dtype=np.float64) for a in arrays)
    return np.asarray(total - (point.scores(point.values) - point.scores(starts)))


def interpolate_values(starts: Arrays, ends: Arrays, fractions: np.ndarray) -> Arrays:
    """Return values interpolated linearly from `starts` (fraction 0) to `ends` (fraction 1).

    The first axis has all rows of the first fraction, then all rows of the second one, and so on.
    """
    path = {}
    for name, x in ends.items():
        start = starts[name].astype(np.float64)
        points = [(start + f * (x - start)).astype(x.dtype) for f in fractions]
        path[name] = np.concatenate(points)
    return path


def quadrature_rule(method: str, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (weights, points) of a quadrature rule on [0, 1] with `steps` points."""
    check_choice("method", method, ("gausslegendre", *_SHIFTS))
    check_count("steps", steps)
    if method == "gausslegendre":
        points, weights = np.polynomial.legendre.leggauss(steps)
        return weights / 2, (points + 1) / 2
    return np.full(steps, 1 / steps), (np.arange(steps) + _SHIFTS[method]) / steps
