from . import (
    ctc as ctc,
    embeddings as embeddings,
    segmentation as segmentation,
    sound as sound,
    tokens as tokens,
)
from .base import Task as Task
