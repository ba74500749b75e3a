from . import tokens as tokens
from . import segmentation as segmentation
from .base import Task as Task
