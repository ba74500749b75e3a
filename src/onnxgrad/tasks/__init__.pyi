from . import (
    detection as detection,
    detection_files as detection_files,
    detection_heads as detection_heads,
    detection_losses as detection_losses,
)
from .base import Task as Task
