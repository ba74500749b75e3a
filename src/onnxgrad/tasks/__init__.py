"""Tasks: the reader, the loss, the metrics and the predictions of a job, beside a `Trainer`.

Each module holds one task, a subclass of `Task`. Most of its code uses public names, so that it is
also an example of how to write a task.

Examples:
    >>> import onnxgrad as og
    >>> callable(og.tasks.Task.trainer)
    True
"""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
