"""Metrics of the outputs that a loss compares with labels."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrad.errors import argument, first_line, named, unknown
from onnxgrad.losses.info import LossInfo
from onnxgrad.metrics.base import Metric, PredictionInfo
from onnxgrad.metrics.select import select

Arrays = Mapping[str, np.ndarray]
ByOutput = dict[str | None, list[Metric]]  # None: the only output that has labels


def select_metrics(metrics: Any) -> ByOutput:
    """Return the metrics that a user means: a list, or `{output: list}`.

    Raises:
        ValueError: an unknown metric, or an object that is there twice.
    """
    if isinstance(metrics, str):
        raise ValueError(f"metrics is a list: write {argument('metrics', [metrics])}")
    by_output = metrics if isinstance(metrics, Mapping) else {None: metrics}
    selected = {output: [select(m) for m in listed] for output, listed in by_output.items()}
    every = [m for listed in selected.values() for m in listed]
    if len({id(m) for m in every}) < len(every):
        raise ValueError("a metric is there twice: create one for each output")
    return selected


@dataclass
class OutputMetrics:
    """The metrics of one output; `prefix` begins their names.

    `axis` is the axis of the rows in an output of the model; labels and weights have rows first, as
    metrics need them.
    """

    metrics: Sequence[Metric]  # of this evaluation only
    label: str
    info: LossInfo
    prefix: str
    axis: int
    begun: bool = False
    undefined: bool = False  # as predictions are not finite

    def begin(self, prediction: np.ndarray) -> None:
        """Tell the metrics once about predictions, with the rows first.

        Raises:
            ValueError: they do not fit.
        """
        if not self.begun:
            info = prediction_info(self.info, prediction, self.axis)
            for metric in self.metrics:
                metric.begin(info)
        self.begun = True

    def update(
        self, predictions: Arrays, arrays: Arrays, weight: np.ndarray | None, finite: bool
    ) -> None:
        """Take a batch: the predictions by output, and the data by input, with the rows first.

        If the loss is not `finite`, metrics that refuse the predictions are NaN.
        """
        assert self.info.prediction is not None
        shown, labels = predictions[self.info.prediction], arrays[self.label]
        shown = np.moveaxis(shown, self.axis, 0) if self.axis else shown
        self.begin(shown)
        if weight is not None and weight.ndim > 1:  # one for each row, or for each label
            of_rows = weight.size == len(weight)
            weight = weight.ravel() if of_rows else np.broadcast_to(weight, labels.shape)
        if self.info.shift:  # (N, T, V) and (N, T), as in the loss
            shown, labels = shown[:, :-1], labels[:, 1:]
            weight = weight if weight is None or weight.ndim == 1 else weight[:, 1:]
        for metric in self.metrics:
            try:
                metric.update(shown, labels, weight)
            except ValueError:
                if finite:
                    raise
                self.undefined = True

    def results(self) -> dict[str, Any]:
        """Return the metrics by name; NaN where they are undefined for these rows."""
        results: dict[str, Any] = {}
        for metric in self.metrics:
            name = f"{self.prefix}{metric.name}"
            try:
                results[name] = float("nan") if self.undefined else metric.compute()
            except ValueError as e:
                warnings.warn(f"{first_line(e)}: it is NaN", stacklevel=2)
                results[name] = float("nan")
        return results


def metrics_of_outputs(
    labels: Mapping[str, LossInfo],
    metrics: ByOutput,
    row_axis: Callable[[str, str], int],
) -> list[OutputMetrics]:
    """Return the metrics of the outputs that have some, for one evaluation.

    They have copies of the metrics, since evaluations may run at the same time.

    Args:
        labels: the facts of the loss, by label input.
        metrics: by output; with the name of an output, metrics are called as "box_mae".
        row_axis: returns the axis of the rows of an output with these labels.

    Raises:
        ValueError: metrics without labels, of an unknown output, or of one of several outputs that
            is not named; a metric that cannot be copied.
    """
    by_output = {info.prediction: (label, info) for label, info in labels.items()}
    chosen = {output: listed for output, listed in metrics.items() if listed}
    if chosen and not labels:
        raise ValueError("metrics need labels, and this loss has no labels: leave out metrics")
    result = []
    for output, listed in chosen.items():
        if output is None and len(by_output) > 1:
            raise ValueError(
                f"the loss compares several outputs: pass {named('metrics={output: [...]}')} for "
                f"{list(by_output)}"
            )
        if output is not None and output not in by_output:
            raise unknown("output in metrics", output, filter(None, by_output))
        label, info = next(iter(by_output.values())) if output is None else by_output[output]
        prefix, axis = "" if output is None else f"{output}_", row_axis(str(info.prediction), label)
        result.append(OutputMetrics([*map(_copy_metric, listed)], label, info, prefix, axis))
    return result


def _copy_metric(metric: Metric) -> Metric:
    """Return a copy of a metric for one evaluation; raise `ValueError` if there can be none."""
    try:
        return copy.deepcopy(metric)
    except Exception as e:
        raise ValueError(
            f"the metric {metric.name!r} cannot be copied, and each evaluation has its own: give "
            f"{type(metric).__name__} a method __deepcopy__ ({first_line(e)})"
        ) from e


def prediction_info(info: LossInfo, prediction: np.ndarray, rows: int = 0) -> PredictionInfo:
    """Return the facts of a prediction that metrics need.

    The prediction has the rows first, and the output of the model has them on its axis `rows`.
    """
    axis = 1 if info.axis is None else info.axis
    if rows and axis % prediction.ndim < rows % prediction.ndim:
        axis = axis % prediction.ndim + 1
    return PredictionInfo(
        classes=None if info.classes is None else prediction.shape[axis],
        axis=axis,
        threshold=info.threshold,
        from_logits=bool(info.from_logits),
        ignore_index=info.ignore_index,
        ignore_nan=bool(info.ignore_nan),
    )
