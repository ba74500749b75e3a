"""Callbacks of a training, and what they read: its state and its progress."""

from onnxgrad.report.recorder import (
    Recorder as Recorder,
)
from onnxgrad.training.callbacks.base import (
    Callback as Callback,
    TrainingControl as TrainingControl,
)
from onnxgrad.training.callbacks.checkpoint import (
    Checkpoint as Checkpoint,
)
from onnxgrad.training.callbacks.diagnostics import (
    NanWatch as NanWatch,
    Norms as Norms,
    Timing as Timing,
)
from onnxgrad.training.callbacks.early_stopping import (
    EarlyStopping as EarlyStopping,
)
from onnxgrad.training.callbacks.history import (
    History as History,
)
from onnxgrad.training.callbacks.progress import (
    Progress as Progress,
)
from onnxgrad.training.callbacks.trackers import (
    MLflow as MLflow,
    OptunaPruning as OptunaPruning,
    TensorBoard as TensorBoard,
    WeightsAndBiases as WeightsAndBiases,
)
from onnxgrad.training.state import (
    FitProgress as FitProgress,
    TrainState as TrainState,
)
