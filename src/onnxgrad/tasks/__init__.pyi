from .base import Task as Task
