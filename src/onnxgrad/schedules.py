"""Learning rates: what the rate of an epoch is. The rate is an input of the training step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from inspect import signature
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto

from onnxgrad.errors import EvaluationError, unknown
from onnxgrad.estimator import BaseEstimator

if TYPE_CHECKING:
    from onnxgrad.runtime.update import Update

_RULES = ("constant", "invscaling", "optimal", "adaptive")


class BaseLearningRate(BaseEstimator):
    """What every learning rate offers: `init_learning_rate`, `update_learning_rate`, `value`."""

    value: float | None = None

    @property
    def needs_grad(self) -> bool:
        """Tell whether the update keeps something of the last gradients."""
        return False

    def init_learning_rate(self) -> BaseLearningRate:
        """Set `value` to the rate of the first epoch; returns `self`."""
        raise NotImplementedError

    def update_learning_rate(self, t: int, loss: float | None = None) -> BaseLearningRate:
        """Set `value` to the rate after `t` epochs, the last of which had that mean loss."""
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
        """The update without momentum, in float32 unless `build_onnx_function` made it."""
        return vars(BaseLearningRate.build_onnx_function(self))["axpy_onnx_"]

    def build_onnx_function(
        self,
        opset: int | None = None,
        device: str | None = None,
        n_tensors: int = 1,
        dtype: Any = np.float32,
    ) -> BaseLearningRate:
        """Set `axpy_onnx_`, the update of one weight of any shape as a model; returns `self`.

        It is `axpy` of `function_onnx_graph`, which `update_weights` runs on `device`. `n_tensors`
        changes nothing: the same model serves for every weight.

        Raises:
            ValueError: an opset or dtype that cannot be.
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
            weight: an array or OrtValue, float32 unless `build_onnx_function` was told otherwise.
            gradient: of the summed loss of a batch, of the weight's shape and dtype.
            batch_size: rows of the batch, by which the gradient is divided.
            velocity: None; with momentum, see `LearningRateSGDNesterov`.

        Raises:
            EvaluationError: `init_learning_rate` was not called.
            ValueError: another shape or dtype, or a velocity.
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
        """Return what runs the model of that name, the same one from step to step."""
        from onnxgrad.runtime.update import Update  # it brings onnxruntime

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
                raise ValueError(f"{class_name} has its options: {list(options)} go with a name")
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
        chosen = named.get(class_name) if isinstance(class_name, str) else class_name
        if not (isinstance(chosen, type) and issubclass(chosen, BaseLearningRate)):
            raise unknown("learning rate", class_name, named)
        valid = list(signature(chosen).parameters)
        for name in options:
            if name not in valid:
                raise unknown(f"option of learning rate {class_name!r}", name, valid)
        return chosen(**options)


class LearningRateSGD(BaseLearningRate):
    """Stochastic gradient descent: w <- w - lr g, g the mean gradient of a row.

    Args:
        eta0: the rate of the first epoch.
        alpha: slope of `optimal`.
        power_t: exponent of `invscaling`.
        learning_rate: how the rate goes on after t epochs. `constant`: eta0. `invscaling`:
            eta0 / (t + 1)^power_t. `optimal`: 1 / (alpha (t0 + t)), t0 such that it starts at
            eta0 (Bottou 2012, "Stochastic Gradient Descent Tricks"). `adaptive`: divided by 5,
            down to 1e-6, whenever two epochs in a row lower the training loss by less than 1e-4
            (scikit-learn's rule).

    Raises:
        ValueError: an unknown rule.
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
        self.learning_rate = _known_rule(learning_rate)

    def init_learning_rate(self) -> LearningRateSGD:
        """Set `value` to the rate of the first epoch; returns `self`.

        Raises:
            ValueError: a rate that is not positive, or an unknown rule.
        """
        _known_rule(self.learning_rate)
        if not (isfinite(self.eta0) and self.eta0 > 0):
            raise ValueError(f"eta0 must be a positive number, not {self.eta0!r}")
        if self.learning_rate == "optimal" and not self.alpha > 0:
            raise ValueError(f"alpha must be positive for 'optimal', not {self.alpha!r}")
        self.value = self.eta0
        self._best, self._stalled = float("inf"), 0
        return self

    def update_learning_rate(self, t: int, loss: float | None = None) -> LearningRateSGD:
        """Set `value` to the rate after `t` epochs, the last of which had that mean loss."""
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

    The other arguments are those of `LearningRateSGD`. Nesterov's form follows Sutskever et al.
    2013, "On the importance of initialization and momentum in deep learning".
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
        """Tell whether the update keeps something of the last gradients: it does."""
        return True

    @cached_property
    def axpyw_onnx_(self) -> ModelProto:
        """The update of one weight as a model, in float32 unless `build_onnx_function` made it."""
        return vars(self.build_onnx_function())["axpyw_onnx_"]

    def build_onnx_function(
        self,
        opset: int | None = None,
        device: str | None = None,
        n_tensors: int = 1,
        dtype: Any = np.float32,
    ) -> LearningRateSGDNesterov:
        """Set `axpyw_onnx_`: `axpyw2` of `function_onnx_graph`, or `axpyw` without `nesterov`.

        All else is as in `BaseLearningRate`.
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

        The velocity is of the weight's shape and dtype, zeros before the first step. All else is as
        in `BaseLearningRate`.

        Raises:
            ValueError: no velocity.
        """
        if velocity is None:
            raise ValueError(f"{type(self).__name__} needs the velocity, zeros in the first step")
        numbers = {"alpha": -self._current() / batch_size, "beta": self.momentum}
        update = self._update("axpyw_onnx_")
        return tuple(update.run(numbers, X1=gradient, X2=weight, G=velocity))


def _known_rule(rule: str) -> str:
    if rule not in _RULES:
        raise unknown("learning_rate", rule, _RULES)
    return rule
