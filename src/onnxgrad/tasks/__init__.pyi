from . import (
    ctc as ctc,
    detection as detection,
    embeddings as embeddings,
    segmentation as segmentation,
    sound as sound,
    tokens as tokens,
)
from .base import Task as Task
