"""What all tasks have."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from onnx import ModelProto

import onnxgrad as og


class Task:
    """A job on a model: how its files are read, what is minimized, measured and predicted.

    A subclass is created with `(model, data=None, **options)`: `data` are the rows to train on, in
    the files that are usual for the task. They say what the classes are; where these are not those
    of the model, it gets a new last layer. Without data, `model` is one that was trained.

    Attributes:
        model: the model to train.
        data: the rows of `data`, as `Trainer.fit` takes them; None without.
        validation: the rows that `data` holds out, None if it names none.
        loss: what a `Trainer` minimizes.
        metrics: what it measures: a list, or one by output.
        arguments: further arguments of a `Trainer` that the task needs, such as `carry`.
        classes: names of the classes, in the order of their numbers; empty where there are none.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> class Pixels(og.tasks.Task):
        ...     loss, metrics, arguments = "squared_error", ["mae"], {}
        ...     def __init__(self, model):
        ...         self.model = model
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2] w = {2.0, 3.0}> { y = Mul(x, w) }''')
        >>> trainer = Pixels(model).trainer(train="w", seed=1)
        >>> [metric.name for metric in trainer.metrics]
        ['mae']
    """

    model: ModelProto
    data: og.Reader | None = None
    validation: og.Reader | None = None
    loss: Any
    metrics: Any = ()
    arguments: dict[str, Any]
    classes: Sequence[str] = ()

    def trainer(self, **arguments: Any) -> og.Trainer:
        """Return a trainer of the model; `arguments` are those of `Trainer`, and win."""
        own = {"loss": self.loss, "metrics": self.metrics, **self.arguments}
        return og.Trainer(self.model, **{**own, **arguments})

    def finished(self, model: ModelProto) -> ModelProto:
        """Return a trained model without what only its training needs, as it is deployed."""
        return model

    def read(self, path: str | os.PathLike) -> og.Reader:
        """Return other rows for the same model and classes, such as those to validate on.

        Raises:
            ValueError: files that cannot be read, or other classes.
        """
        raise NotImplementedError

    def predict(self, model: Any, inputs: Any) -> list[Any]:
        """Return the decoded result of each input.

        Args:
            model: a trained model, a path, or a `Trainer`.
            inputs: a folder, files or arrays, one for each result.
        """
        raise NotImplementedError

    def write(self, inputs: Any, results: Iterable[Any], folder: str | os.PathLike) -> list[Path]:
        """Write results into a folder as people look at them, and return the files.

        Args:
            inputs: as those of `predict`.
            results: what `predict` returned for them.
            folder: is created; files in it of the same names are replaced.
        """
        raise NotImplementedError
