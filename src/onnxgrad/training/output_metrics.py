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
from onnxgrad.metrics.select import select_metric

Arrays = Mapping[str, np.ndarray]
MetricsByOutput = dict[str | None, list[Metric]]  # None: the only output that has labels


def select_metrics(metrics: Any) -> MetricsByOutput:
    """Return the argument `metrics`, a list or `{output: list}`, as `Metric` objects by output.

    Raises:
        ValueError: an unknown metric, or the same object twice.
    """
    if isinstance(metrics, str):
        raise ValueError(f"metrics is a list: write {argument('metrics', [metrics])}")
    by_output = metrics if isinstance(metrics, Mapping) else {None: metrics}
    selected = {output: [select_metric(m) for m in listed] for output, listed in by_output.items()}
    every = [m for listed in selected.values() for m in listed]
    if len({id(m) for m in every}) < len(every):
        raise ValueError("metrics has one metric object twice: create an object for each output")
    return selected


@dataclass
class OutputMetrics:
    """The metrics of one output in an evaluation; their names begin with `prefix`.

    `axis` is the axis of the rows in the output of the model. Labels and sample weights have their
    rows on the first axis, as metrics need them.
    """

    metrics: Sequence[Metric]  # copies for this evaluation
    label: str
    info: LossInfo
    prefix: str
    axis: int
    begun: bool = False
    undefined: bool = False  # whether a metric refused predictions that are not finite

    def begin(self, prediction: np.ndarray) -> None:
        """Tell the metrics once about the predictions, whose rows are on the first axis.

        Raises:
            ValueError: the predictions do not fit a metric.
        """
        if not self.begun:
            info = prediction_info(self.info, prediction, self.axis)
            for metric in self.metrics:
                metric.begin(info)
        self.begun = True

    def update(
        self, predictions: Arrays, arrays: Arrays, weight: np.ndarray | None, finite: bool
    ) -> None:
        """Update the metrics with a batch: `predictions` by output, and `arrays` of data by input.

        `weight` are the sample weights. If the loss is not `finite`, metrics that refuse the
        predictions become NaN; otherwise, they raise an error.
        """
        assert self.info.prediction is not None
        shown, labels = predictions[self.info.prediction], arrays[self.label]
        shown = np.moveaxis(shown, self.axis, 0) if self.axis else shown
        self.begin(shown)
        if weight is not None and weight.ndim > 1:  # a weight for each row, or for each label
            of_rows = weight.size == len(weight)
            weight = weight.ravel() if of_rows else np.broadcast_to(weight, labels.shape)
        if self.info.shift:  # (N, T, V) and (N, T), as in the loss
            shown, labels = shown[:, :-1], labels[:, 1:]
            weight = weight if weight is None or weight.ndim == 1 else weight[:, 1:]
        refuse_negative_weights(self.metrics, weight)
        for metric in self.metrics:
            try:
                metric.update(shown, labels, weight)
            except ValueError:
                if finite:
                    raise
                self.undefined = True

    def results(self) -> dict[str, Any]:
        """Return the values of the metrics by name; NaN where a metric is undefined."""
        results: dict[str, Any] = {}
        for metric in self.metrics:
            name = f"{self.prefix}{metric.name}"
            try:
                results[name] = float("nan") if self.undefined else metric.compute()
            except ValueError as e:
                warnings.warn(f"{first_line(e)}: it is NaN", stacklevel=2)
                results[name] = float("nan")
        return results


def refuse_negative_weights(metrics: Sequence[Metric], weight: np.ndarray | None) -> None:
    """Raise `ValueError` for negative sample weights, by which a loss may be weighted, but no
    metric.
    """
    if weight is not None and (weight < 0).any():
        given = named("sample_weight")
        raise ValueError(
            f"{given} has negative numbers, such as {weight.min():g}, and the metrics "
            f"{[m.name for m in metrics]} are means weighted by it: leave out {named('metrics')}, "
            f"or evaluate without {given}"
        )


def metrics_of_outputs(
    labels: Mapping[str, LossInfo],
    metrics: MetricsByOutput,
    row_axis: Callable[[str, str], int],
) -> list[OutputMetrics]:
    """Return an `OutputMetrics` for each output that has metrics, for one evaluation.

    It has copies of the metrics, since evaluations may run at the same time.

    Args:
        labels: the facts of the loss, by label input.
        metrics: metrics by output. The name of an output becomes a prefix, as in "box_mae".
        row_axis: (output, label input) -> the axis of the rows in the output.

    Raises:
        ValueError: metrics for a loss without labels or for an unknown output; a list of metrics
            where the loss reads several outputs; a metric that cannot be copied.
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
    """Return a deep copy of a metric; raise `ValueError` if it cannot be copied."""
    try:
        return copy.deepcopy(metric)
    except Exception as e:
        raise ValueError(
            f"the metric {metric.name!r} cannot be copied, and each evaluation has its own: give "
            f"{type(metric).__name__} a method __deepcopy__ ({first_line(e)})"
        ) from e


def prediction_info(info: LossInfo, prediction: np.ndarray, rows: int = 0) -> PredictionInfo:
    """Return the `PredictionInfo` of an output, which tells metrics its classes and threshold.

    Args:
        info: the facts of the loss.
        prediction: an array with the rows on the first axis.
        rows: the axis of the rows in the output of the model.
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
