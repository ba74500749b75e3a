from . import sound as sound
from .base import Task as Task
