"""Attributions to the output of a layer: Grad-CAM and conductance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.checks import check_count
from onnxgrad.explain.gradient_methods import interpolate_values, quadrature_rule
from onnxgrad.explain.score_function import ScoreFunction, baseline_values
from onnxgrad.explain.targets import Target
from onnxgrad.explain.user_inputs import Inputs
from onnxgrad.model.read import ModelLike, read


def grad_cam(
    model: ModelLike,
    inputs: Inputs,
    layer: str,
    target: Target | None = None,
    *,
    output: str | None = None,
    relu: bool = False,
) -> np.ndarray:
    """Return Grad-CAM: the sum of a layer's channels, each weighted by its mean gradient.

    Selvaraju et al. 2017, arXiv:1610.02391. `show_image` enlarges it to an image.

    Args:
        model, inputs, target, output: see `saliency`; `model` is no `ScoreFunction`.
        layer: name of a float value of shape (rows, channels, ...), as the output of the last
            convolution, or of its activation.
        relu: replace negative results by zero, as the article does.

    Returns:
        An array of shape (rows, 1, ...), of the dtype of the layer.

    Raises:
        ValueError, NoGradientRule: as `saliency`; or `layer` has no channels.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2,2] x) => (float[N] y) <int64[2] axes = {1, 2}>
        ...     { h = Relu(x)  y = ReduceSum<keepdims=0>(h, axes) }''')
        >>> x = np.float32([[[1, -1], [2, 3]]])
        >>> og.explain.grad_cam(model, x, "h").tolist()
        [[[3.0, 3.0]]]
    """
    point = ScoreFunction(model, layer, output).at(inputs, target)
    h = point.values[layer].astype(np.float64)
    if h.ndim < 2:
        raise ValueError(
            f"{layer!r} of shape {list(h.shape)} has no axis of channels: name as `layer` a tensor "
            "(rows, channels, ...)"
        )
    gradient = point.gradients(point.values)[layer].astype(np.float64)
    weights = gradient.mean(axis=tuple(range(2, h.ndim)), keepdims=True)
    maps = (weights * h).sum(axis=1, keepdims=True)
    return np.asarray(np.maximum(maps, 0) if relu else maps, point.values[layer].dtype)


def layer_conductance(
    model: ModelLike,
    inputs: Inputs,
    layer: str,
    target: Target | None = None,
    baselines: Any = None,
    *,
    wrt: str | Sequence[str] | None = None,
    output: str | None = None,
    steps: int = 50,
    method: str = "gausslegendre",
) -> np.ndarray:
    """Return the conductance of each unit of a layer: the change of the score via the unit.

    On the way from the baselines to the inputs, it sums the gradient with respect to the unit times
    the change of the unit (Dhamdhere, Sundararajan & Yan 2018, arXiv:1805.12233). The sum over a
    layer through which all paths go is f(x) - f(baseline): see `completeness_gap`.

    Args:
        model, inputs, target, output: see `saliency`; `model` is no `ScoreFunction`.
        layer: name of a float value.
        baselines: values at which the way begins; see `integrated_gradients`.
        wrt: names of the values that change along the way; see `ScoreFunction`.
        steps: number of parts of the way.
        method: the quadrature whose `steps + 1` points are the ends of the parts; see
            `integrated_gradients`.

    Returns:
        An array of the shape and dtype of the layer.

    Raises:
        ValueError: as `integrated_gradients`; or `layer` does not depend on `wrt`.
        NoGradientRule: an operator on the path has no rule.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N] y) <int64[1] axes = {1}>
        ...     { h = Mul(x, x)  y = ReduceSum<keepdims=0>(h, axes) }''')
        >>> x = np.float32([[1, 2]])
        >>> og.explain.layer_conductance(model, x, "h", steps=500).round(2).tolist()
        [[1.0, 4.0]]
    """
    check_count("steps", steps)
    _, fractions = quadrature_rule(method, steps + 1)
    proto = read(model)
    point = ScoreFunction(proto, wrt, layer).at(inputs)
    starts = baseline_values(point, baselines)
    to_score = ScoreFunction(proto, layer, output).at(point.feed, target)
    behind = to_score.function.piece([to_score.function.output], [layer, *point.values])
    total: Any = None
    before = gradient = None  # the layer and its gradient where a part of the way begins
    for part in point.copy_slices(len(fractions)):
        path = interpolate_values(starts, point.values, fractions[part])
        values = point.outputs(path)
        feed, with_rows = point.tiled_feed(path) | {layer: values}, {*point.with_rows, *path, layer}
        cotangent = to_score.cotangent(len(values) // point.rows)
        gradients = behind.gradients(feed, with_rows, [layer], cotangent)[layer]
        shape = (-1, point.rows, *values.shape[1:])
        for h, g in zip(values.reshape(shape), gradients.reshape(shape), strict=True):
            if before is not None:
                flow = gradient * (h.astype(np.float64) - before)
                total = flow if total is None else total + flow
            before, gradient = h.astype(np.float64), g
    return np.asarray(total, values.dtype)
