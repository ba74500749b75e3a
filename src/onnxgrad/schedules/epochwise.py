"""Learning rates by epoch. The rate is an input of the training step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto

from onnxgrad.errors import EvaluationError, check_options, unknown
from onnxgrad.estimator import BaseEstimator

if TYPE_CHECKING:
    from onnxgrad.runtime.small_models import Update

_RULES = ("constant", "invscaling", "optimal", "adaptive")


class BaseLearningRate(BaseEstimator):
    """Base of the learning rates: overrides set `value`, the rate of the current epoch.

    A learning rate of your own overrides `init_learning_rate` and `update_learning_rate`.

    Examples:
        >>> import onnxgrad as og
        >>> class Halved(og.BaseLearningRate):
        ...     def init_learning_rate(self):
        ...         self.value = 1.0
        ...     def update_learning_rate(self, t, loss=None):
        ...         self.value /= 2
        >>> list(Halved().loop(3))
        [1.0, 0.5, 0.25]
    """

    value: float | None = None

    @property
    def needs_grad(self) -> bool:
        """Return whether the update keeps a velocity from step to step."""
        return False

    def init_learning_rate(self) -> BaseLearningRate:
        """Set `value` to the rate of the first epoch; return `self`."""
        raise NotImplementedError

    def update_learning_rate(self, t: int, loss: float | None = None) -> BaseLearningRate:
        """Set `value` to the rate after `t` epochs; return `self`.

        Args:
            t: number of epochs so far, at least 1.
            loss: mean loss of a row in the last epoch; None if unknown.
        """
        raise NotImplementedError

    def loop(self, n: int = 1000) -> Iterator[float]:
        """Yield the rates of `n` epochs."""
        self.init_learning_rate()
        for t in range(1, n + 1):
            assert self.value is not None
            yield self.value
            self.update_learning_rate(t)

    @cached_property
    def axpy_onnx_(self) -> ModelProto:
        """The update without momentum; float32 unless `build_onnx_function` set another dtype."""
        return vars(BaseLearningRate.build_onnx_function(self))["axpy_onnx_"]

    def build_onnx_function(
        self,
        opset: int | None = None,
        device: str | None = None,
        n_tensors: int = 1,
        dtype: Any = np.float32,
    ) -> BaseLearningRate:
        """Set `axpy_onnx_`, the update of one weight of any shape as a model; return `self`.

        The model is `axpy` of `function_onnx_graph`; `update_weights` runs it on `device`.
        `n_tensors` has no effect, as all weights share the model.

        Raises:
            ValueError: an invalid opset or dtype.
            ProviderError: the installed onnxruntime has none for `device`.
        """
        from onnxgrad.losses.functions import function_onnx_graph  # it brings onnxruntime
        from onnxgrad.runtime.device import CPU, Device

        (CPU if device is None else Device.of(device)).check()
        self.axpy_onnx_ = function_onnx_graph("axpy", opset, dtype)
        self._device = device
        return self

    def update_weights(
        self, weight: Any, gradient: Any, batch_size: int = 1, velocity: Any = None
    ) -> Any:
        """Return the weight after a step at the rate `value`, by `axpy_onnx_`.

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
        alpha = {"alpha": -self._current() / batch_size}
        return self._update("axpy_onnx_").run(alpha, X1=gradient, X2=weight)[0]

    def _current(self) -> float:
        if self.value is None:
            raise EvaluationError(f"{type(self).__name__}: call init_learning_rate first")
        return self.value

    def _update(self, name: str) -> Update:
        """Return the runner of the model of that name, kept from step to step."""
        from onnxgrad.runtime.small_models import Update  # it brings onnxruntime

        model, last = getattr(self, name), vars(self).get("_last_update")
        if last is None or last.model is not model:
            last = self._last_update = Update(model, vars(self).get("_device"))
        return last

    @staticmethod
    def select(class_name: Any, **options: Any) -> BaseLearningRate:
        """Return the learning rate for a name, a class, a number (`eta0`) or an instance.

        Raises:
            ValueError: an unknown name or option, or options beside an instance.
        """
        if isinstance(class_name, BaseLearningRate):
            if options:
                raise ValueError(
                    f"{class_name} is an instance: leave out {list(options)}, which are options "
                    "for a name or a class"
                )
            return class_name
        number = (int, float, np.integer, np.floating)
        if isinstance(class_name, number) and not isinstance(class_name, bool):
            return BaseLearningRate.select("SGD", eta0=float(class_name), **options)
        named = {
            "SGD": LearningRateSGD,
            "LearningRateSGD": LearningRateSGD,
            "Nesterov": LearningRateSGDNesterov,
            "SGDNesterov": LearningRateSGDNesterov,
            "LearningRateSGDNesterov": LearningRateSGDNesterov,
        }
        selected = named.get(class_name) if isinstance(class_name, str) else class_name
        if not (isinstance(selected, type) and issubclass(selected, BaseLearningRate)):
            raise unknown("learning rate", class_name, named)
        check_options(f"option of learning rate {class_name!r}", options, selected)
        return selected(**options)


class LearningRateSGD(BaseLearningRate):
    """Stochastic gradient descent: w <- w - lr g, g the gradient of the mean loss of a batch.

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
        >>> rate = og.LearningRateSGD(eta0=1.0, power_t=0.5)
        >>> [round(r, 4) for r in rate.loop(4)]
        [1.0, 0.7071, 0.5774, 0.5]
    """

    def __init__(
        self,
        eta0: float = 0.01,
        alpha: float = 0.0001,
        power_t: float = 0.25,
        learning_rate: str = "invscaling",
    ) -> None:
        self.eta0 = eta0
        self.alpha = alpha
        self.power_t = power_t
        self.learning_rate = _checked_rule(learning_rate)

    def init_learning_rate(self) -> LearningRateSGD:
        """Set `value` to the rate of the first epoch; return `self`.

        Raises:
            ValueError: `eta0` is not positive, or an unknown value of `learning_rate`.
        """
        _checked_rule(self.learning_rate)
        if not (isfinite(self.eta0) and self.eta0 > 0):
            raise ValueError(f"eta0 must be a positive number, not {self.eta0!r}")
        if self.learning_rate == "optimal" and not self.alpha > 0:
            raise ValueError(f"alpha must be positive for 'optimal', not {self.alpha!r}")
        self.value = self.eta0
        self._best, self._stalled = float("inf"), 0
        return self

    def update_learning_rate(self, t: int, loss: float | None = None) -> LearningRateSGD:
        """Set `value` to the rate after `t` epochs; return `self`. Only `adaptive` reads `loss`."""
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


class LearningRateSGDNesterov(LearningRateSGD):
    """Momentum: v <- m v - lr g;  w <- w + (m v - lr g if nesterov else v), g as in SGD.

    Nesterov's form is that of Sutskever et al. 2013, "On the importance of initialization and
    momentum in deep learning". The other arguments are those of `LearningRateSGD`.

    Args:
        momentum: m, the decay of the velocity v in one step.
        nesterov: whether to use Nesterov's form.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> rate = og.LearningRateSGDNesterov(eta0=0.5, momentum=0.5).init_learning_rate()
        >>> zero, gradient = np.float32([0]), np.float32([2])
        >>> weight, velocity = rate.update_weights(zero, gradient, velocity=zero)
        >>> print(weight, velocity)
        [-1.5] [-1.]
    """

    def __init__(
        self,
        eta0: float = 0.01,
        alpha: float = 0.0001,
        power_t: float = 0.25,
        learning_rate: str = "invscaling",
        momentum: float = 0.9,
        nesterov: bool = True,
    ) -> None:
        super().__init__(eta0, alpha, power_t, learning_rate)
        self.momentum = momentum
        self.nesterov = nesterov

    @property
    def needs_grad(self) -> bool:
        """Return True: the update keeps a velocity from step to step."""
        return True

    @cached_property
    def axpyw_onnx_(self) -> ModelProto:
        """The update of one weight; float32 unless `build_onnx_function` set another dtype."""
        return vars(self.build_onnx_function())["axpyw_onnx_"]

    def build_onnx_function(
        self,
        opset: int | None = None,
        device: str | None = None,
        n_tensors: int = 1,
        dtype: Any = np.float32,
    ) -> LearningRateSGDNesterov:
        """Set `axpyw_onnx_`, the update of one weight of any shape as a model; return `self`.

        The model is `axpyw2` of `function_onnx_graph`, or `axpyw` without `nesterov`. Arguments and
        errors are those of `BaseLearningRate`.
        """
        from onnxgrad.losses.functions import function_onnx_graph  # it brings onnxruntime
        from onnxgrad.runtime.device import CPU, Device

        (CPU if device is None else Device.of(device)).check()
        name = "axpyw2" if self.nesterov else "axpyw"
        self.axpyw_onnx_ = function_onnx_graph(name, opset, dtype)
        self._device = device
        return self

    def update_weights(
        self, weight: Any, gradient: Any, batch_size: int = 1, velocity: Any = None
    ) -> Any:
        """Return the weight and the velocity after a step, by `axpyw_onnx_`.

        The velocity has the weight's shape and dtype, and is zero before the first step. The other
        arguments and errors are those of `BaseLearningRate`.

        Raises:
            ValueError: `velocity` is None.
        """
        if velocity is None:
            raise ValueError(
                f"{type(self).__name__} needs a velocity: pass zeros in the first step"
            )
        numbers = {"alpha": -self._current() / batch_size, "beta": self.momentum}
        update = self._update("axpyw_onnx_")
        return tuple(update.run(numbers, X1=gradient, X2=weight, G=velocity))


def _checked_rule(rule: str) -> str:
    if rule not in _RULES:
        raise unknown("learning_rate", rule, _RULES)
    return rule
