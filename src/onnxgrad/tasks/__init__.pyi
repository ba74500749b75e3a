from . import ctc as ctc, segmentation as segmentation, tokens as tokens
from .base import Task as Task
