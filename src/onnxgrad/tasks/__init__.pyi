from . import embeddings as embeddings
from .base import Task as Task
