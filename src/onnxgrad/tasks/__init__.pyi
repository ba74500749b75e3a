from . import ctc as ctc
from .base import Task as Task
