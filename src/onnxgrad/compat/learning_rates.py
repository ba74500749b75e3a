"""Learning rates that change from epoch to epoch, and the models of their weight updates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any, Self

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.checks import check_choice
from onnxgrad.compat.small_models import SmallFunctions, build_small_model, select_object
from onnxgrad.errors import EvaluationError, unknown
from onnxgrad.model.draft import Draft, Shape
from onnxgrad.model.feeds import session_dtype
from onnxgrad.runtime.values import FLOATS, shape_of, to_numpy
from onnxgrad.schedules.base import LearningRate

Update = Callable[..., dict[str, ir.Value]]  # writes the outputs into a draft


class BaseLearningRate(SmallFunctions, LearningRate):
    """Base class of learning rates; `value` is the learning rate of the current epoch.

    A new learning rate overrides `init_learning_rate` and `update_learning_rate`, which set it.

    Examples:
        >>> import onnxgrad as og
        >>> class Halved(og.compat.BaseLearningRate):
        ...     def init_learning_rate(self):
        ...         self.value = 1.0
        ...     def update_learning_rate(self, t, loss=None):
        ...         self.value /= 2
        >>> list(Halved().loop(3))
        [1.0, 0.5, 0.25]
    """

    value: float | None = None
    # rates with equal arguments may be in different epochs
    __eq__, __hash__ = object.__eq__, object.__hash__

    @property
    def needs_grad(self) -> bool:
        """Whether the update has momentum, and thus keeps a velocity from step to step."""
        return False

    def init_learning_rate(self) -> BaseLearningRate:
        """Set `value` to the learning rate of the first epoch; return `self`."""
        raise NotImplementedError

    def update_learning_rate(self, t: int, loss: float | None = None) -> BaseLearningRate:
        """Set `value` to the learning rate after `t` epochs; return `self`.

        Args:
            t: number of epochs so far, at least 1.
            loss: mean loss of a row in the last epoch; None if unknown.
        """
        raise NotImplementedError

    def loop(self, n: int = 1000) -> Iterator[float]:
        """Yield the learning rates of `n` epochs."""
        self.init_learning_rate()
        for t in range(1, n + 1):
            assert self.value is not None
            yield self.value
            self.update_learning_rate(t)

    def at_start(self) -> Self:
        """Return a copy of this learning rate at its first epoch."""
        rate = copy.deepcopy(self)
        rate.init_learning_rate()
        return rate

    def rates_of_training(
        self, state: Any, steps: int | None, member: int | None = None
    ) -> RatesByEpoch:
        """Return the `RatesByEpoch` of a training, after the epochs that `state` has finished."""
        losses = state.losses if member is None else [loss[member] for loss in state.losses]
        return RatesByEpoch(self.at_start(), losses)

    @cached_property
    def axpy_onnx_(self) -> ModelProto:
        """The model of the update w - lr g; float32 unless `build_onnx_function` set
        another dtype.
        """
        return build_small_model(axpy)

    def build_onnx_function(
        self,
        opset: int | None = None,
        device: str | None = None,
        n_tensors: int = 1,
        dtype: Any = np.float32,
    ) -> BaseLearningRate:
        """Write the model that updates one weight of any shape; return `self`.

        It is the model `axpy` of `function_onnx_graph`, in the attribute `axpy_onnx_`; with
        momentum `axpyw2`, or `axpyw` without `nesterov`, in the attribute `axpyw_onnx_`.
        `update_weights` runs it on `device`. `n_tensors` has no effect, as all weights share the
        model.

        Raises:
            ValueError: an invalid opset or dtype.
            ProviderError: the installed onnxruntime has no provider for `device`.
        """
        attribute, update = self._update_model_name_and_writer
        self._store_models(device, **{attribute: build_small_model(update, opset, dtype)})
        return self

    @property
    def _update_model_name_and_writer(self) -> tuple[str, Update]:
        """The name of the attribute that holds the update model, and the function that writes the
        model.
        """
        return "axpy_onnx_", axpy

    def update_weights(
        self, weight: Any, gradient: Any, batch_size: int = 1, velocity: Any = None
    ) -> Any:
        """Return the weight after a step of the learning rate `value`, computed by `axpy_onnx_`.

        Args:
            weight: array or OrtValue of the dtype of `build_onnx_function`, by default float32.
            gradient: gradient of the summed loss of a batch, of the weight's shape and dtype.
            batch_size: number of rows of the batch, by which the gradient is divided.
            velocity: must be None; see `LearningRateSGDNesterov` for momentum.

        Raises:
            EvaluationError: `init_learning_rate` was not called.
            ValueError: a gradient of another shape or dtype, or a velocity.
        """
        if velocity is not None:
            raise ValueError(f"{type(self).__name__} has no momentum: leave out the velocity")
        alpha = {"alpha": -self._current_learning_rate() / batch_size}
        return self._run_update("axpy_onnx_", alpha, X1=gradient, X2=weight)[0]

    def _current_learning_rate(self) -> float:
        """Return the current epoch's learning rate; raise `EvaluationError` before epoch one."""
        if self.value is None:
            raise EvaluationError(f"{type(self).__name__}: call init_learning_rate first")
        return self.value

    def _run_update(self, name: str, numbers: dict[str, float], **tensors: Any) -> list[Any]:
        """Run the update model in the attribute `name`; return OrtValues if the weight `X2` is an
        OrtValue.

        The inputs `numbers` have the shape (1,), and all `tensors` must have the shape and dtype of
        the weight.
        """
        weight = tensors["X2"]
        dtype = FLOATS[self._model_session(name).get_inputs()[0].type].numpy()
        for key, value in tensors.items():
            if shape_of(value) != shape_of(weight):
                raise ValueError(
                    f"{_OPERANDS[key]} has the shape {shape_of(value)}, "
                    f"and the weight {shape_of(weight)}: pass an array of the weight's shape"
                )
            if isinstance(value, ort.OrtValue):
                kind = session_dtype(value.data_type())
                actual = kind and kind.numpy()
            else:
                actual = to_numpy(value).dtype
            if actual != dtype:
                raise ValueError(
                    f"{_OPERANDS[key]} has the dtype {actual}, and the update was built for "
                    f"{dtype}: call build_onnx_function(dtype=np.{actual})"
                )
        feed = tensors | {key: np.full(1, number, dtype) for key, number in numbers.items()}
        return self._run_model(name, feed, isinstance(weight, ort.OrtValue))

    @staticmethod
    def select(class_name: Any, **options: Any) -> BaseLearningRate:
        """Return the learning rate that `class_name` is or names: a name, class, number (`eta0`) or
        instance.

        Raises:
            ValueError: an unknown name or option, or options together with an instance.
        """
        number = (int, float, np.integer, np.floating)
        if isinstance(class_name, number) and not isinstance(class_name, bool):
            return BaseLearningRate.select("SGD", eta0=float(class_name), **options)
        rate = select_object(BaseLearningRate, "learning rate", class_name, _CLASSES, options)
        if rate is None:
            raise unknown("learning rate", class_name, _CLASSES)
        return rate


class RatesByEpoch:
    """The learning rate of each epoch of one training.

    Args:
        rate: a learning rate at its first epoch.
        losses: mean loss of a row in each finished epoch.
    """

    def __init__(self, rate: BaseLearningRate, losses: list[float]) -> None:
        self.rate, self.epochs = rate, 0
        for loss in losses:
            self._begin_epoch(loss)

    @property
    def steady(self) -> bool:
        """Whether all epochs have the same learning rate."""
        constant = getattr(self.rate, "learning_rate", None) == "constant"
        return constant and type(self.rate) in (LearningRateSGD, LearningRateSGDNesterov)

    def rates_from(self, step: int, count: int) -> np.ndarray:
        """Return the learning rate of the current epoch, repeated for `count` steps."""
        assert self.rate.value is not None
        return np.full(count, self.rate.value)

    def observe(self, entry: dict[str, Any]) -> None:
        """Go to the next epoch if `entry`, a record of the training history, holds an
        epoch's loss.
        """
        if "loss" in entry:
            self._begin_epoch(entry["loss"])

    def _begin_epoch(self, loss: float) -> None:
        """Go to the next epoch; `loss` is the training loss of the epoch that ended."""
        self.epochs += 1
        self.rate.update_learning_rate(self.epochs, loss)


@dataclass(eq=False, repr=False)
class LearningRateSGD(BaseLearningRate):
    """Stochastic gradient descent: weight w <- w - lr g, with the gradient g of a batch's mean
    loss.

    Args:
        eta0: the rate of the first epoch.
        alpha: slope of `optimal`.
        power_t: exponent of `invscaling`.
        learning_rate: the rate after t epochs. `constant`: eta0. `invscaling`:
            eta0 / (t + 1)^power_t. `optimal`: 1 / (alpha (t0 + t)), with 1 / (alpha t0) = eta0
            (Bottou 2012, "Stochastic Gradient Descent Tricks"). `adaptive`: divided by 5, down to
            1e-6, whenever two epochs in a row lower the training loss by less than 1e-4, as in
            scikit-learn.

    Raises:
        ValueError: an unknown value of `learning_rate`.

    Examples:
        >>> import onnxgrad as og
        >>> rate = og.compat.LearningRateSGD(eta0=1.0, power_t=0.5)
        >>> [round(r, 4) for r in rate.loop(4)]
        [1.0, 0.7071, 0.5774, 0.5]
    """

    eta0: float = 0.01
    alpha: float = 0.0001
    power_t: float = 0.25
    learning_rate: str = "invscaling"

    def __post_init__(self) -> None:
        check_choice("learning_rate", self.learning_rate, _SCHEDULES)

    def init_learning_rate(self) -> LearningRateSGD:
        """Set `value` to the learning rate of the first epoch; return `self`.

        Raises:
            ValueError: `eta0` is not positive, or an unknown value of `learning_rate`.
        """
        check_choice("learning_rate", self.learning_rate, _SCHEDULES)  # see set_params
        if not (isfinite(self.eta0) and self.eta0 > 0):
            raise ValueError(f"eta0 must be a positive number, not {self.eta0!r}")
        if self.learning_rate == "optimal" and not self.alpha > 0:
            raise ValueError(f"alpha must be positive for 'optimal', not {self.alpha!r}")
        self.value = self.eta0
        self._best, self._stalled = float("inf"), 0
        return self

    def update_learning_rate(self, t: int, loss: float | None = None) -> LearningRateSGD:
        """Set `value` to the learning rate after `t` epochs; only the rule "adaptive"
        reads `loss`.
        """
        if self.value is None:
            self.init_learning_rate()
        if self.learning_rate == "invscaling":
            self.value = self.eta0 / (t + 1) ** self.power_t
        elif self.learning_rate == "optimal":
            self.value = 1 / (1 / self.eta0 + self.alpha * t)
        elif self.learning_rate == "adaptive" and loss is not None:
            self._stalled = self._stalled + 1 if loss > self._best - 1e-4 else 0
            self._best = min(self._best, loss)
            if self._stalled == 2:
                assert self.value is not None
                self.value, self._stalled = max(self.value / 5, 1e-6), 0
        return self


@dataclass(eq=False, repr=False)
class LearningRateSGDNesterov(LearningRateSGD):
    """SGD with momentum: velocity v <- m v - lr g; weight w <- w + (m v - lr g if nesterov else v).

    Nesterov's form follows Sutskever et al. 2013, "On the importance of initialization and momentum
    in deep learning". The other arguments are the arguments of `LearningRateSGD`.

    Args:
        momentum: m, the decay of the velocity v in one step.
        nesterov: whether to use Nesterov's form.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> rate = og.compat.LearningRateSGDNesterov(eta0=0.5, momentum=0.5).init_learning_rate()
        >>> zero, gradient = np.float32([0]), np.float32([2])
        >>> weight, velocity = rate.update_weights(zero, gradient, velocity=zero)
        >>> print(weight, velocity)
        [-1.5] [-1.]
    """

    momentum: float = 0.9
    nesterov: bool = True

    @property
    def needs_grad(self) -> bool:
        """True: the update keeps a velocity from step to step."""
        return True

    @cached_property
    def axpyw_onnx_(self) -> ModelProto:
        """The model of the momentum update; float32 unless `build_onnx_function` set
        another dtype.
        """
        return build_small_model(self._update_model_name_and_writer[1])

    @property
    def _update_model_name_and_writer(self) -> tuple[str, Update]:
        return "axpyw_onnx_", axpyw2 if self.nesterov else axpyw

    def update_weights(
        self, weight: Any, gradient: Any, batch_size: int = 1, velocity: Any = None
    ) -> Any:
        """Return the weight and the velocity after a step, computed by `axpyw_onnx_`.

        The velocity has the weight's shape and dtype, and is zero before the first step. The other
        arguments and errors are as for `BaseLearningRate`.

        Raises:
            ValueError: `velocity` is None.
        """
        if velocity is None:
            raise ValueError(
                f"{type(self).__name__} needs a velocity: pass zeros in the first step"
            )
        numbers = {"alpha": -self._current_learning_rate() / batch_size, "beta": self.momentum}
        return tuple(self._run_update("axpyw_onnx_", numbers, X1=gradient, X2=weight, G=velocity))


def axpy(draft: Draft, shape: Shape | None = None) -> dict[str, ir.Value]:
    """Y = alpha X1 + X2, for X1 and X2 of any shape (or of `shape`), alpha of shape (1,).

    A step of gradient descent, with the gradient X1, the weight X2 and alpha = -learning rate.
    """
    op, x1, x2 = draft.op, draft.input("X1", shape), draft.input("X2", shape)
    alpha = draft.input("alpha", (1,))
    return {"Y": op.set_type_like(op.Squeeze(alpha) * x1 + x2, x2)}


def axpyw(draft: Draft, shape: Shape | None = None) -> dict[str, ir.Value]:
    """Z = beta G + alpha X1, Y = X2 + Z, of any shape (or of `shape`), alpha and beta (1,).

    A step with momentum: X1 is the gradient, X2 the weight, G the velocity, Z the new velocity,
    alpha = -learning rate, beta = momentum.
    """
    return _write_momentum_update(draft, shape, ahead=False)


def axpyw2(draft: Draft, shape: Shape | None = None) -> dict[str, ir.Value]:
    """Z = beta G + alpha X1, Y = X2 + beta Z + alpha X1: as `axpyw`, with Nesterov's momentum."""
    return _write_momentum_update(draft, shape, ahead=True)


def _write_momentum_update(draft: Draft, shape: Shape | None, ahead: bool) -> dict[str, ir.Value]:
    """Write the nodes of an update with momentum; `ahead` selects Nesterov's momentum."""
    op, x1, x2, g = draft.op, *(draft.input(x, shape) for x in ("X1", "X2", "G"))
    alpha, beta = draft.input("alpha", (1,)), draft.input("beta", (1,))
    rate, decay = op.Squeeze(alpha), op.Squeeze(beta)  # else scalar weights would become (1,)
    step = rate * x1
    z = op.set_type_like(decay * g + step, g)
    update = decay * z + step if ahead else z
    return {"Y": op.set_type_like(update + x2, x2), "Z": z}


_SCHEDULES = ("constant", "invscaling", "optimal", "adaptive")
_OPERANDS = {"X1": "the gradient", "X2": "the weight", "G": "the velocity"}


_CLASSES = {
    "SGD": LearningRateSGD,
    "LearningRateSGD": LearningRateSGD,
    "Nesterov": LearningRateSGDNesterov,
    "SGDNesterov": LearningRateSGDNesterov,
    "LearningRateSGDNesterov": LearningRateSGDNesterov,
}
