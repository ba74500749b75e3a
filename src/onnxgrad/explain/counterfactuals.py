"""Counterfactuals: small changes of a row after which a model predicts another class."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrad.checks import check_choice, check_count, check_positive
from onnxgrad.explain.adversarial import Bounds, broadcast_masks
from onnxgrad.explain.score_function import Point, ScoreFunction
from onnxgrad.explain.targets import Target, score_cotangent
from onnxgrad.explain.user_inputs import Inputs
from onnxgrad.model.read import ModelLike

_BETAS = 0.9, 0.999  # decay rates of Adam
_HALVINGS = 12  # bisection steps between a row and its counterfactual
_HINGE_FACTORS = 6  # factors of the hinge loss that are tried for each row


@dataclass(frozen=True)
class Counterfactual:
    """The result of `counterfactual`: changed rows, for which a model predicts another class.

    Attributes:
        values: the changed rows, of the shape and dtype of the value; the unchanged row where the
            class was not reached.
        reached: bool of shape (rows,): whether the class was reached.
        distances: float64 of shape (rows,): the L1 or L2 distance to the row; NaN where the class
            was not reached.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> found = og.explain.Counterfactual(np.ones((1, 2)), np.array([True]), np.array([0.5]))
        >>> found.reached.tolist()
        [True]
    """

    values: np.ndarray
    reached: np.ndarray
    distances: np.ndarray


def counterfactual(
    model: ModelLike | ScoreFunction,
    inputs: Inputs,
    target: Target,
    *,
    wrt: str | Sequence[str] | None = None,
    output: str | None = None,
    norm: str = "L2",
    margin: float = 0.0,
    bounds: Bounds = (-np.inf, np.inf),
    mask: Any = None,
    learning_rate: float = 0.05,
    steps: int = 300,
) -> Counterfactual:
    """Return rows with the smallest found change that gives the target class the greatest score.

    Minimizes distance + c max(0, other - target + margin), where `other` is the greatest score of
    another class, by Adam, with a proximal step for "L1", which changes few elements. c is searched
    for each row, and the shortest change is kept (Wachter, Mittelstadt & Russell 2017; Carlini &
    Wagner 2017, arXiv:1608.04644; for L1, Chen et al. 2018, arXiv:1709.04114): a local minimum. A
    class that is not reached is reported by a `UserWarning`, and in `reached`.

    Args:
        model, inputs, output: see `saliency`.
        target: class to reach, for all rows or one a row; the output is (rows, classes).
        wrt: name of the value that is changed; see `ScoreFunction`.
        norm: "L1" or "L2", the distance.
        margin: least difference of the score of the class and the scores of other classes.
        bounds: the least and the greatest value of an element.
        mask: see `fgsm`; zero for features that cannot change.
        learning_rate: length of a step, in units of the value.
        steps: number of steps for each c.

    Raises:
        ValueError, NoGradientRule: as `saliency`; several values, an output of another
            shape, an unknown `norm`, or a row that is outside of `bounds`.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) { y = Identity(x) }''')
        >>> found = og.explain.counterfactual(model, np.float32([[2, 1]]), target=1)
        >>> found.values.round(2).tolist(), found.reached.tolist()
        ([[1.5, 1.5]], [True])
    """
    check_positive("learning_rate", learning_rate)
    check_count("steps", steps)
    point = ScoreFunction.of(model, wrt, output, None).at(inputs, target)
    search = _CounterfactualSearch(point, norm, margin, bounds, mask)
    search.search_hinge_factors(learning_rate, steps)
    if rows := np.flatnonzero(~search.reached).tolist():
        warnings.warn(
            f"the class was not reached for the rows {rows[:10]}: try more steps, a greater "
            "learning_rate, or wider bounds",
            stacklevel=2,
        )
    distances = np.where(search.reached, search.distances, np.nan)
    return Counterfactual(search.reshape_as_input(search.best), search.reached, distances)


class _CounterfactualSearch:
    """The search by Adam for the shortest change of each row that reaches the target class."""

    def __init__(self, point: Point, norm: str, margin: float, bounds: Bounds, mask: Any) -> None:
        check_choice("norm", norm, ("L1", "L2"))
        if len(point.values) != 1:
            raise ValueError(
                f"`wrt` names {len(point.values)} values: name the one value to change"
            )
        (name,) = point.values
        if point.output.ndim != 2 or point.output.shape[1] < 2:
            raise ValueError(
                f"the output {point.function.output!r} has the shape {list(point.output.shape)}, "
                "not (rows, classes): name as `output` a tensor of scores of this shape"
            )
        x = point.values[name]
        if (x < bounds[0]).any() or (x > bounds[1]).any():
            raise ValueError(f"{name!r} has elements outside of bounds={bounds}: widen the bounds")
        self.point, self.name, self.norm, self.bounds = point, name, norm, bounds
        self.margin = margin
        self.x = x.reshape(len(x), -1).astype(np.float64)
        self.mask = broadcast_masks(point, mask)[name].reshape(self.x.shape)
        self.best = self.x.copy()
        self.reached = np.zeros(point.rows, bool)
        self.distances = np.full(point.rows, np.inf)
        self.keep_shorter_changes(self.best)

    def search_hinge_factors(self, learning_rate: float, steps: int) -> None:
        """Search for each row the least factor of the hinge loss with which the row reaches the
        target class.
        """
        low, factors = np.zeros(self.point.rows), np.ones(self.point.rows)
        for _ in range(_HINGE_FACTORS):
            reached = self.minimize_distance(factors, learning_rate, steps)
            low = np.where(reached, low, factors)
            factors = np.where(reached, (low + factors) / 2, 10 * factors)
        self.shorten_best_changes()

    def hinge_loss(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the hinge loss (best other score - target score + margin) per row, and its
        gradient w.r.t. the scores.
        """
        y = self.point.outputs({self.name: self.reshape_as_input(values)}).astype(np.float64)
        rows, classes = np.arange(len(y)), self.point.score_indices[:, 0]
        others = y.copy()
        others[rows, classes] = -np.inf
        other = others.argmax(axis=1)
        gradient = score_cotangent(y.shape, np.float64, other[:, None])
        gradient -= score_cotangent(y.shape, np.float64, self.point.score_indices)
        return y[rows, other] - y[rows, classes] + self.margin, gradient

    def keep_shorter_changes(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keep changed rows that reach the target class by a shorter change than the best so far.

        Returns:
            Which rows reach the class, and the gradient of the hinge w.r.t. the output, which is
            zero for these rows.
        """
        gap, gradient = self.hinge_loss(values)
        reached = gap < 0 if not self.margin else gap <= 0
        change = self.reshape_as_input(values).reshape(self.x.shape) - self.x
        distances = np.linalg.norm(change, 1 if self.norm == "L1" else 2, axis=1)
        better = reached & (distances < self.distances)
        self.best[better], self.distances[better] = values[better], distances[better]
        self.reached |= reached
        return reached, gradient * (~reached)[:, None]

    def minimize_distance(
        self, factors: np.ndarray, learning_rate: float, steps: int
    ) -> np.ndarray:
        """Minimize distance + factor * hinge loss by Adam; return a mask of rows that reached the
        class.
        """
        values, ever = self.x, np.zeros(self.point.rows, bool)
        first, second = np.zeros(self.x.shape), np.zeros(self.x.shape)
        for step in range(1, steps + 1):
            reached, seed = self.keep_shorter_changes(values)
            ever |= reached
            arrays = {self.name: self.reshape_as_input(values)}
            seed = seed.astype(self.point.output.dtype)
            slopes = self.point.pull_back(arrays, seed)[self.name].astype(np.float64)
            gradient = slopes.reshape(self.x.shape) * (factors[:, None] * self.mask)
            change = values - self.x
            if self.norm == "L2":
                gradient += 2 * change
            first = _BETAS[0] * first + (1 - _BETAS[0]) * gradient
            second = _BETAS[1] * second + (1 - _BETAS[1]) * gradient**2
            scale = np.sqrt(second / (1 - _BETAS[1] ** step)) + 1e-8
            rate = learning_rate * (1 - 0.9 * step / steps)
            change -= rate * first / (1 - _BETAS[0] ** step) / scale
            if self.norm == "L1":  # the proximal step of |change|, in the metric of Adam
                change = np.sign(change) * np.maximum(np.abs(change) - rate / scale, 0)
            values = np.clip(self.x + change * self.mask, *self.bounds)
        return ever

    def shorten_best_changes(self) -> None:
        """Shorten each best change by bisection, as long as the row reaches the target class."""
        low, high = np.zeros(self.point.rows), np.ones(self.point.rows)
        change = self.best - self.x
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            reached, _ = self.keep_shorter_changes(self.x + middle[:, None] * change)
            low, high = np.where(reached, low, middle), np.where(reached, middle, high)

    def reshape_as_input(self, values: np.ndarray) -> np.ndarray:
        """Return the array `values` (rows, elements) in the shape and dtype of the
        explained input.
        """
        x = self.point.values[self.name]
        return values.reshape(x.shape).astype(x.dtype)
