from . import tokens as tokens
from .base import Task as Task
