"""Metrics of predictions, and the base class of user-defined metrics."""

from onnxgrad.errors import (
    EvaluationError as EvaluationError,
)
from onnxgrad.metrics.alarm_curves import (
    AlarmCurve as AlarmCurve,
    FalseAlarms as FalseAlarms,
    false_alarms as false_alarms,
)
from onnxgrad.metrics.average_precision import (
    BoxConfusion as BoxConfusion,
    MeanAveragePrecision as MeanAveragePrecision,
)
from onnxgrad.metrics.base import (
    Metric as Metric,
    PredictionInfo as PredictionInfo,
)
from onnxgrad.metrics.texts import (
    EntityF1 as EntityF1,
    TextErrorRate as TextErrorRate,
)
