"""A module a task, and the base class of tasks."""

from onnxgrad.tasks import (
    ctc as ctc,
    detection as detection,
    embeddings as embeddings,
    segmentation as segmentation,
    sound as sound,
    text_labels as text_labels,
    tokens as tokens,
)
from onnxgrad.tasks.base import (
    Task as Task,
)
from onnxgrad.tasks.images import (
    Images as Images,
)
from onnxgrad.tasks.tables import (
    Table as Table,
)
from onnxgrad.tasks.text_labels import (
    TextLabels as TextLabels,
)
from onnxgrad.tasks.texts import (
    Texts as Texts,
)
