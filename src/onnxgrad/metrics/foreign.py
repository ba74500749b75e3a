"""Metrics made from a user's function, or from a metric of torchmetrics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import numpy as np

from onnxgrad.metrics.base import Metric, PredictionInfo, no_rows_error, refuse_weights

_LOWER_IS_BETTER = ("loss", "error", "deviance")


class FunctionMetric(Metric):
    """A function `(prediction, label) -> number or array` as a metric, called once on the rows of
    all batches.

    It keeps all predictions and labels in memory, and passes them unchanged: logits as logits,
    ignored labels included. If the data have sample weights, the function must have a parameter
    `sample_weight`.

    Args:
        function: the function.
        name: the key in the history; by default, the function's name.
        higher_is_better: by default False for names that end with "loss", "error" or "deviance",
            True for names that end with "score", None (unknown) for others.

    Raises:
        ValueError: a function of scikit-learn, whose arguments are in the other order.

    Examples:
        >>> import numpy as np
        >>> from onnxgrad.metrics.base import PredictionInfo
        >>> from onnxgrad.metrics.foreign import FunctionMetric
        >>> def max_error(prediction, label):
        ...     return abs(prediction - label).max()
        >>> metric = FunctionMetric(max_error)
        >>> metric.begin(PredictionInfo())
        >>> metric.update(np.array([1.0, 2.0]), np.array([2.0, 2.0]))
        >>> metric.update(np.array([5.0]), np.array([2.0]))
        >>> metric.name, metric.higher_is_better, metric.compute()
        ('max_error', False, 3.0)
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        higher_is_better: bool | None = None,
    ) -> None:
        own = getattr(function, "__name__", type(function).__name__)
        if getattr(function, "__module__", None) and function.__module__.startswith("sklearn."):
            raise ValueError(
                f"{own} takes (label, prediction), and a metric takes (prediction, label): pass "
                f"lambda prediction, label: {own}(label, prediction)"
            )
        self.function = function
        self.name = own if name is None else name
        if higher_is_better is None:
            lower, higher = self.name.endswith(_LOWER_IS_BETTER), self.name.endswith("score")
            higher_is_better = False if lower else True if higher else None
        self.higher_is_better = higher_is_better

    def __repr__(self) -> str:
        return f"FunctionMetric({self.function!r}, {self.name!r}, {self.higher_is_better})"

    def __deepcopy__(self, memo: Any) -> FunctionMetric:
        return copy.copy(self)  # the function may be an object that cannot be copied

    def begin(self, prediction: PredictionInfo) -> None:
        """Forget all batches of earlier evaluations."""
        super().begin(prediction)
        self._weighted = False

    def update(
        self, prediction: np.ndarray, label: np.ndarray, weight: np.ndarray | None = None
    ) -> None:
        """Add a batch; raise `ValueError` for sample weights if the function takes none."""
        self.check_begun()
        parameters = signature(self.function).parameters
        takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
        if weight is not None and not takes_any and "sample_weight" not in parameters:
            raise ValueError(
                f"metric {self.name!r} has no parameter sample_weight: add one, or leave out the "
                "sample weights"
            )
        self._weighted |= weight is not None
        arrays = prediction, label, np.ones(len(label)) if weight is None else weight
        self._batches.append(tuple(np.array(array) for array in arrays))

    def compute(self) -> float | np.ndarray:
        """Return the result of the function for all data."""
        arrays = self._join_batches()
        options = {"sample_weight": arrays[2]} if self._weighted else {}
        return _float_or_array(self.function(arrays[0], arrays[1], **options))


class TorchMetric(Metric):
    """A metric of torchmetrics, which gets the arrays as tensors on its device.

    Scores have the axis of the classes as axis 1, and class indices have no such axis, as
    torchmetrics takes them. It takes no sample weights.

    Args:
        metric: a `torchmetrics.Metric`.

    Raises:
        ValueError: a collection of metrics.
    """

    def __init__(self, metric: Any) -> None:
        if type(metric).__name__ == "MetricCollection":
            raise ValueError("a MetricCollection is no metric: pass its metrics one by one")
        self.metric = metric
        self.name = type(metric).__name__
        self.higher_is_better = getattr(metric, "higher_is_better", None)

    def __repr__(self) -> str:
        return f"TorchMetric({self.metric!r})"

    def begin(self, prediction: PredictionInfo) -> None:
        """Forget all batches of earlier evaluations."""
        super().begin(prediction)
        self.metric.reset()
        self._rows = 0

    def update(
        self, prediction: np.ndarray, label: np.ndarray, weight: np.ndarray | None = None
    ) -> None:
        """Add a batch of predictions and labels."""
        import torch

        info, ignored = self.info, getattr(self.metric, "ignore_index", None)
        refuse_weights(self.name, weight)
        if info.ignore_index not in (None, ignored) and (label == info.ignore_index).any():
            raise ValueError(
                f"labels hold ignore_index {info.ignore_index}: create {self.name!r} with "
                f"ignore_index={info.ignore_index}"
            )
        if info.classes is not None:
            prediction = np.moveaxis(prediction, info.axis, 1)
        if not len(prediction):  # torchmetrics fails for an empty batch
            return
        self._rows += len(prediction)
        arrays = (prediction, self._reshape_label(prediction, label))
        device = self.metric.device
        self.metric.update(*(torch.tensor(np.ascontiguousarray(a), device=device) for a in arrays))

    def _reshape_label(self, prediction: np.ndarray, label: np.ndarray) -> np.ndarray:
        """Return labels reshaped as torchmetrics expects, with class indices as integers."""
        shape = prediction.shape
        if self.info.classes is not None and label.shape != shape:
            shape = shape[:1] + shape[2:]
        if label.size != np.prod(shape):
            raise ValueError(
                f"metric {self.name!r}: labels of a prediction of shape {prediction.shape} "
                f"must have the shape {shape}, not {label.shape}"
            )
        regression = self.info.classes is None and self.info.threshold is None
        if not regression and (label == np.floor(label)).all():
            label = label.astype(np.int64)
        return label.reshape(shape)

    def compute(self) -> float | np.ndarray:
        """Return the value that the metric of torchmetrics computes."""
        self.check_begun()
        if not self._rows:
            raise no_rows_error(self.name)
        value = self.metric.compute()
        if not hasattr(value, "detach"):
            raise ValueError(
                f"metric {self.name!r} computes a {type(value).__name__}, not a number: choose a "
                "metric of "
                "one number"
            )
        return _float_or_array(value.detach().cpu().numpy())


def _float_or_array(value: Any) -> float | np.ndarray:
    """Return the float in an array of one number, and other arrays unchanged."""
    array = np.asarray(value)
    return float(array.reshape(())) if array.size == 1 else array
