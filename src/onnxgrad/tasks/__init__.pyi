from . import segmentation as segmentation
from .base import Task as Task
