"""Selection of a metric by its name, or from an object or function that users pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from onnxgrad.errors import unknown
from onnxgrad.metrics.base import Metric
from onnxgrad.metrics.classification import (
    AVERAGES,
    F1,
    Accuracy,
    BalancedAccuracy,
    ConfusionMatrix,
    IoU,
    Precision,
    Recall,
    TopK,
)
from onnxgrad.metrics.foreign import FunctionMetric, TorchMetric
from onnxgrad.metrics.probabilities import AUC, LogLoss, Perplexity
from onnxgrad.metrics.regression import MAE, MAPE, MSE, R2, RMSE
from onnxgrad.metrics.retrieval import CosineSpearman, Retrieval

_CLASSES: list[Callable[..., Metric]] = [
    *(Accuracy, BalancedAccuracy, Precision, Recall, F1, IoU, ConfusionMatrix),
    *(AUC, LogLoss, Perplexity, MAE, MSE, RMSE, MAPE, R2),
]
METRICS: dict[str, Callable[[], Metric]] = {
    **{kind().name: kind for kind in _CLASSES},
    "top_5_accuracy": partial(TopK, 5),  # and "top_K_accuracy" for any K
    **{
        kind(average=average).name: partial(kind, average=average)
        for kind in (Precision, Recall, F1, IoU)
        for average in AVERAGES
    },
}


def select_metric(metric: Any) -> Metric:
    """Return the `Metric` for the name of a metric, a metric object or a function.

    Args:
        metric: a `Metric`; a name such as "accuracy", "top_5_accuracy" or "f1_macro"; a metric of
            torchmetrics; or a function `(prediction, label) -> number`: see `FunctionMetric`.

    Raises:
        ValueError: an unknown name, or an object of another kind.

    Examples:
        >>> from onnxgrad.metrics.select import select_metric
        >>> select_metric("top_3_accuracy")
        TopK(k=3)
        >>> select_metric("f1_macro")
        F1(average='macro', zero_division=0.0)
    """
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, str):
        if top := re.fullmatch(r"top_([1-9][0-9]*)_accuracy", metric):
            return TopK(int(top[1]))
        if search := re.fullmatch(r"(query_)?(recall|hit_rate)_at_([1-9][0-9]*)", metric):
            return Retrieval(int(search[3]), search[2], "first" if search[1] else "all")
        if metric == CosineSpearman.name:
            return CosineSpearman()
        if metric not in METRICS:
            known = [*METRICS, "recall_at_5", "hit_rate_at_5", CosineSpearman.name]
            raise unknown("metric", metric, known)
        return METRICS[metric]()
    if isinstance(metric, type):
        raise ValueError(
            f"metric {metric.__name__} is a class: pass an object, {metric.__name__}()"
        )
    if any(base.__module__.startswith("torchmetrics.") for base in type(metric).__mro__):
        return TorchMetric(metric)
    if callable(metric):
        return FunctionMetric(metric)
    raise ValueError(
        "a metric is a name, a Metric, a function (prediction, label) -> number, or a metric of "
        f"torchmetrics, not {metric!r}"
    )
