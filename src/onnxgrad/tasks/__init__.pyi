from . import detection as detection
from .base import Task as Task
