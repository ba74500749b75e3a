"""Tasks: what a job needs beside a `Trainer`: reader, loss, metrics, predictions.

A module a task, each with a class of one scheme: see `Task`. They use the public names, and
the records of operators, so that each is also an example of how to write one's own.

Examples:
    >>> import onnxgrad as og
    >>> callable(og.tasks.Task.trainer)
    True
"""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
