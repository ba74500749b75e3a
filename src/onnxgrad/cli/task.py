"""What the command line trains: a model with a loss, and arrays from a data file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.cli.data_files import Table, as_value, assign, labels, refuse
from onnxgrad.data.arrays import DataError
from onnxgrad.data.columns import Names
from onnxgrad.errors import escaping, printable
from onnxgrad.losses.in_graph import add_loss_output
from onnxgrad.losses.info import loss_info
from onnxgrad.training.fields import Fields
from onnxgrad.training.objective import Objective, loss_inside

_CHUNK = 1000  # rows per call of the runtime


class Task:
    """A model with a loss, and the arrays that it is trained on.

    - `model`, `loss_output`: the model, and the name of its loss.
    - `count`: the number of rows; `names`: those of the columns.
    - `remarks`: messages about columns: their order in an input, and those that no input takes.
    - `classifies`: whether predictions are classes, so that `accuracy` is defined.
    """

    def __init__(
        self,
        proto: ModelProto,
        table: Table,
        targets: Sequence[str],
        loss: str | None,
        loss_output: str = "loss",
        output_index: str | None = None,
        options: Mapping[str, Any] = {},
    ):
        if loss is None:
            self.model, self.loss_output = proto, loss_output
            _check_loss(proto, loss_output)
        else:
            self.model = add_loss_output(proto, loss, output_index=output_index, **options)
            self.loss_output = self.model.graph.output[0].name
        self._info = loss_info(self.model)
        objective = loss_inside(self.model, [], self.loss_output, "weight")
        inputs = {str(x.name): x for x in objective.data}
        label = self._info.label or next((t for t in targets if t in inputs), "label")
        if label not in inputs:
            raise ValueError(
                f"the model computes its own loss, but has no input {label!r}: "
                "--target must be the input that takes the labels, one of "
                f"{', '.join(map(printable, inputs))}"
            )
        target = inputs.pop(label)
        columns = assign(table, targets, list(inputs.values()), objective.names)
        self._data = {n: as_value(columns[n], x, f"input {n!r}") for n, x in inputs.items()}
        self._data[label] = labels(table, targets, target, self._info)
        names = {n: list(g) for n, g in columns.items() if any(a.ndim == 1 for a in g.values())}
        self.names = Names(names, list(targets) if names else [])
        counts = {name: len(array) for name, array in self._data.items()}
        if len(set(counts.values())) > 1:
            raise DataError(f"the arrays differ in their number of rows: {counts}")
        self.count = counts[label]
        self._check_together(objective, label)
        used = {*targets, *(name for group in columns.values() for name in group)}
        self.remarks = [
            f"columns of input {name}, in this order: {_listed(list(group))}"
            for name, group in columns.items()
            if len(group) > 1 and name not in objective.names.columns
        ]
        if ignored := [name for name in table if name not in used]:
            self.remarks.append(f"ignored columns: {_listed(ignored)}")
        self._threshold = self._info.threshold
        self.classifies = self._info.classes is not None or self._threshold is not None

    def _check_together(self, objective: Objective, label: str) -> None:
        """Raise if arrays do not fit each other, or contain indices out of range of a table."""
        Fields(objective).check_axes(self._data)
        for name, each in objective.tables.items():
            what = "the target" if name == label else f"input {name!r}"
            for table in each if name in self._data else ():
                array = self._data[name]
                refuse(table.outside(array, self._data), array, f"{what} holds {table}")

    def rows(self, indices: np.ndarray) -> Table:
        """Return the rows with these indices, by input."""
        return {name: array[indices] for name, array in self._data.items()}

    @escaping()
    def accuracy(self, trained: ModelProto, data: Table) -> float:
        """Return the share of the labels in `data` that `trained`, a model with loss, predicts."""
        from onnxruntime import SessionOptions

        from onnxgrad.runtime.device import CPU
        from onnxgrad.runtime.session import loaded

        options = SessionOptions()
        options.log_severity_level = 4
        session = loaded(trained, options, providers=CPU.providers)
        right = counted = 0
        wanted = data[str(self._info.label)]
        for start in range(0, len(wanted), _CHUNK):
            part = slice(start, start + _CHUNK)
            feed = {name: array[part] for name, array in data.items()}
            [prediction] = session.run([self._info.prediction], feed)
            y = wanted[part]
            if self._threshold is None:
                hits = prediction.argmax(axis=1).reshape(y.shape) == y
                known = y != self._info.ignore_index
            else:
                hits = (prediction > self._threshold) == (y > 0.5)
                known = np.ones_like(hits)
            right += int(np.count_nonzero(hits & known))
            counted += int(np.count_nonzero(known))
        return right / counted if counted else math.nan


def _check_loss(proto: ModelProto, name: str) -> None:
    outputs = [o.name for o in proto.graph.output]
    if name not in outputs:
        raise ValueError(
            f"the model has no output {name!r} (it has {', '.join(map(printable, outputs))}): "
            "name a loss with --loss, or the output that is one with --loss-output"
        )


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - 12} more" if len(names) > 12 else ""
    return ", ".join(names[:12]) + more


def split(rows: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows to train on and the `share` of them to validate on, drawn by `seed`."""
    count = round(rows * share)
    if share and count in (0, rows):
        raise ValueError(f"--validation {share} of {rows} rows leaves a part empty: use 0")
    order = np.random.default_rng(seed).permutation(rows)
    return np.sort(order[count:]), np.sort(order[:count])
