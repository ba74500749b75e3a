"""A module a task, and the base class of tasks."""

from onnxgrad.tasks import (
    ctc as ctc,
    detection as detection,
    embeddings as embeddings,
    segmentation as segmentation,
    sound as sound,
    tokens as tokens,
)
from onnxgrad.tasks.base import (
    Task as Task,
)
