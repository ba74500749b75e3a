"""FGSM and PGD: adversarial inputs, close to given inputs, for which a model errs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.checks import check_choice, check_count, check_number
from onnxgrad.errors import unknown
from onnxgrad.explain.score_function import Attributions, Point, ScoreFunction
from onnxgrad.explain.targets import Target, score_cotangent
from onnxgrad.explain.user_inputs import Arrays, Inputs
from onnxgrad.model.read import ModelLike

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
    """Return inputs moved by `epsilon` times the sign of the gradient of the target's loss (FGSM).

    x + epsilon sign(dL/dx), the fast gradient sign method of Goodfellow, Shlens & Szegedy 2014
    (arXiv:1412.6572).

    Args:
        model, inputs, wrt, output, batch_axes: see `saliency`; `wrt` are the values that change.
        epsilon: length of the step of each element.
        target: the true class of each row, or the class to reach if `targeted`; see `saliency`.
        targeted: whether the loss shall fall instead.
        loss: "score", minus the score: the step is the same for minus its logarithm. Or
            "cross_entropy", for outputs that are logits, with the classes along axis 1.
        bounds: the least and the greatest value of an element.
        mask: array of ones and zeros, which broadcasts to the value, or `{name: array}`: where it
            is zero, the element does not change. None: ones.

    Returns:
        An array of the shape and dtype of the value; `{name: array}` if `wrt` are several.

    Raises:
        ValueError, NoGradientRule: as `saliency`; an unknown `loss`, a negative
            `epsilon`, `bounds` that are not in order, or a mask that does not broadcast.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {1.0, -3.0}>
        ...     { y = MatMul(x, w) }''')
        >>> og.explain.fgsm(model, np.float32([[1, 1]]), 0.5).tolist()
        [[0.5, 1.5]]
    """
    point = ScoreFunction.of(model, wrt, output, batch_axes).at(inputs, target)
    attack = _Attack(point, loss, "Linf", bounds, mask)
    check_number("epsilon", epsilon, infinite=True)
    moved = attack.sign_step(point.values, -epsilon if targeted else epsilon)
    return point.to_attributions(attack.clip_to_bounds(moved))


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
    """Return inputs moved by steps of FGSM, each projected to a ball (PGD, Madry et al. 2017).

    Args:
        model, inputs, target, wrt, output, batch_axes, targeted, loss, bounds, mask: see `fgsm`.
        radius: greatest distance of a row of a value from the input, in `norm`.
        step_size: length of a step of each element.
        steps: number of steps.
        norm: "Linf", each element, or "L2", each row.
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
    point = ScoreFunction.of(model, wrt, output, batch_axes).at(inputs, target)
    attack = _Attack(point, loss, norm, bounds, mask)
    check_number("radius", radius, infinite=True)
    check_number("step_size", step_size, infinite=True)
    check_count("steps", steps)
    values = point.values
    if random_state is not None:
        values = attack.random_values(radius, np.random.default_rng(random_state))
    for _ in range(steps):
        moved = attack.sign_step(values, -step_size if targeted else step_size)
        values = attack.project_to_ball(moved, radius)
    return point.to_attributions(values)


def broadcast_masks(point: Point, mask: Any) -> Arrays:
    """Return {name of an explained value: its mask, broadcast to the shape of the value}."""
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
                f"to {list(x.shape)}: pass a mask of this shape, or of the shape of a row"
            ) from None
    return masks


class _Attack:
    """An attack on given rows: steps along the sign of a gradient, projected to bounds and to a
    ball.
    """

    def __init__(self, point: Point, loss: str, norm: str, bounds: Bounds, mask: Any) -> None:
        low, high = bounds
        if not low < high:
            raise ValueError(f"bounds={bounds}: give the least value, then a greater value")
        check_choice("norm", norm, ("Linf", "L2"))
        check_choice("loss", loss, ("score", "cross_entropy"))
        self.point, self.loss, self.norm, self.bounds = point, loss, norm, bounds
        self.masks = broadcast_masks(point, mask)

    def sign_step(self, values: Arrays, length: float) -> Arrays:
        """Return `values` after one step, which changes each unmasked element by `length` times a
        sign.
        """
        if self.loss == "score":
            gradients = {n: -g for n, g in self.point.gradients(values).items()}
        else:
            seed = _cross_entropy_gradient(self.point.outputs(values), self.point.score_indices)
            gradients = self.point.pull_back(values, seed)
        moved = {n: x + length * np.sign(gradients[n]) * self.masks[n] for n, x in values.items()}
        return {n: x.astype(values[n].dtype) for n, x in moved.items()}

    def clip_to_bounds(self, values: Arrays) -> Arrays:
        """Return `values` clipped to the bounds of the attack."""
        like = self.point.values
        return {n: np.clip(x, *self.bounds).astype(like[n].dtype) for n, x in values.items()}

    def project_to_ball(self, values: Arrays, radius: float) -> Arrays:
        """Return `values` projected to the ball of `radius` around the rows, and to the bounds."""
        near = {}
        for name, x in self.point.values.items():
            change = values[name].astype(np.float64) - x
            if self.norm == "Linf":
                change = np.clip(change, -radius, radius)
            else:
                flat = change.reshape(len(change), -1)
                lengths = np.linalg.norm(flat, axis=1, keepdims=True)
                longer = lengths > radius
                factors = np.where(longer, radius / np.where(longer, lengths, 1.0), 1.0)
                change = (flat * factors).reshape(change.shape)
            near[name] = x + change
        return self.clip_to_bounds(near)

    def random_values(self, radius: float, rng: np.random.Generator) -> Arrays:
        """Return random values, uniform in the ball around each row, clipped to the bounds."""
        moved = {}
        for name, x in self.point.values.items():
            if self.norm == "Linf":
                change = rng.uniform(-radius, radius, x.shape)
            else:
                flat = rng.standard_normal((len(x), x[0].size))
                flat /= np.linalg.norm(flat, axis=1, keepdims=True)
                lengths = radius * rng.uniform(size=(len(x), 1)) ** (1 / flat.shape[1])
                change = (flat * lengths).reshape(x.shape)
            moved[name] = x + change * self.masks[name]
        return self.clip_to_bounds(moved)


def _cross_entropy_gradient(y: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return the gradient of the cross entropy, logsumexp(y) - y[target], w.r.t. the logits y."""
    if y.ndim < 2:
        raise ValueError(f"an output of shape {list(y.shape)} has no classes: use loss='score'")
    exponentials = np.exp(y - y.max(axis=1, keepdims=True).astype(np.float64))
    softmax = exponentials / exponentials.sum(axis=1, keepdims=True)
    # ones along the axis of classes, at the position of the target on the other axes
    selected = np.zeros(np.moveaxis(y, 1, -1).shape)
    selected[(np.arange(len(y)), *indices.T[1:])] = 1
    cotangent = score_cotangent(y.shape, np.float64, indices)
    gradient = softmax * np.moveaxis(selected, -1, 1) - cotangent
    return gradient.astype(y.dtype)
