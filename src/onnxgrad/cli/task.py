"""The data of a task: columns as the arrays of a model's inputs, or what reads them."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.cli.columns import Columns, Targets, assign, ignored, in_other_order, listed
from onnxgrad.cli.data_options import LabelOptions
from onnxgrad.cli.sources import ArrowSource, ImageSource
from onnxgrad.data.arrays import DataError
from onnxgrad.data.cells import Cells
from onnxgrad.data.columns import Names
from onnxgrad.data.fields import Field
from onnxgrad.data.images import ImageFolder
from onnxgrad.data.tables import FileTable
from onnxgrad.errors import unknown
from onnxgrad.graph.shapes import dims
from onnxgrad.model.class_labels import Labels
from onnxgrad.training.data import Dataset
from onnxgrad.training.fields import Fields
from onnxgrad.training.objective import Objective


@dataclass
class Task:
    """Data that fit a model and its loss.

    - `data`: what `fit` and `evaluate` take.
    - `rows`: their number, None if it is unknown.
    - `names`: of the columns, which the trained model stores.
    - `numbers`: of the rows in the data that they are held out of; None if they are no part.
    - `notes`: messages before training; `remarks`: after it, about columns.
    """

    data: Dataset
    rows: int | None
    names: Names
    notes: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    in_memory: bool = True
    numbers: np.ndarray | None = None

    def take(self, rows: np.ndarray) -> Task:
        """Return some of the rows, of arrays or of a folder of images."""

        def of(part: Any) -> Any:
            if isinstance(part, dict):
                return {name: array[rows] for name, array in part.items()}
            if isinstance(part, ImageFolder):
                part = copy.copy(part)
                part.files, part.labels = [part.files[i] for i in rows], part.labels[rows]
                part.rows = len(rows)
                return part
            return None if part is None else part[rows]

        data = Dataset(of(self.data.X), of(self.data.y), of(self.data.sample_weight))
        return Task(data, len(rows), self.names, numbers=rows)

    def tell(
        self, names: Collection[str], columns: Columns, trained: Names, *others: str | None
    ) -> None:
        """Add messages: the order of columns where it is new or differs, and columns not used."""
        self.notes += in_other_order(names, columns, trained)
        for name, group in columns.items():
            if name not in trained.columns and len(group) > 1:
                self.remarks.append(f"columns of input {name}, in this order: {listed(group)}")
        self.remarks += ignored(names, columns, others)


def map_table(table: FileTable, objective: Objective, targets: Targets, weight: str | None) -> Task:
    """Return the arrays of a table for the inputs and the labels of an objective.

    Args:
        table: with class numbers for labels of classes.
        objective: describes the inputs.
        targets: the columns of the labels.
        weight: the column of sample weights.

    Raises:
        ValueError: columns that the model does not take; messages name rows.
    """
    labels = targets.by_label(objective)
    inputs = [str(x.name) for x in objective.data if x.name not in labels]
    if weight is not None and weight not in table:
        raise unknown("column (--sample-weight)", weight, table.columns)
    ranks = {n: a.ndim for n, a in table.values.items() if n != weight}
    columns = assign(ranks, targets.names, inputs, objective.names)
    cells = {name: table.cells(columns[name], f"input {name!r}") for name in inputs}
    for name, group in labels.items():
        cells[name] = table.cells(group, f"target {', '.join(map(repr, group))}")
    arrays = _arrays(Fields(objective), cells)
    weights = None
    if weight is not None:
        weights = table.cells([weight], "the weights").stacked()
    names = stored_names(columns, ranks, targets)
    y = {name: arrays.pop(name) for name in labels if objective.labels}
    label: Any = next(iter(y.values())) if len(y) == 1 else y or None
    rows = len(next(iter(arrays.values())))
    task = Task(Dataset(arrays, label, weights), rows, names)
    task.notes += [table.note] * bool(table.note)
    task.tell(table.columns, columns, objective.names, *targets.names, weight)
    return task


def _arrays(fields: Fields, cells: dict[str, Cells]) -> dict[str, np.ndarray]:
    """Return the checked arrays of the inputs.

    Raises:
        ValueError: cells that an input does not take, or arrays that do not fit each other.
    """
    arrays = {name: fields.fields[name].of_cells(each) for name, each in cells.items()}
    check_counts(arrays)
    fields.check_axes(arrays)
    for name, each in cells.items():
        fields.fields[name].check_indices(arrays, cells=each)
    return arrays


def check_counts(arrays: dict[str, np.ndarray]) -> None:
    """Raise `DataError` if arrays differ in their number of rows."""
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"the arrays differ in their number of rows: {counts}")


def stored_names(columns: Columns, ranks: dict[str, int], targets: Targets) -> Names:
    """Return the names that a trained model stores: of inputs that take columns of numbers."""
    named = {n: list(g) for n, g in columns.items() if any(ranks[name] == 1 for name in g)}
    return Names(named, targets.names if named else [])


def map_images(source: ImageSource, objective: Objective, classes: Labels | None) -> Task:
    """Return what reads images while training.

    Raises:
        ValueError: a model with several labels, or other classes than the folders.
    """
    reader = source.reader(dims(_features(source.name, objective)[0]))
    names, own = listed(reader.classes), reader.classes
    if classes is not None:
        order = list(map(str, classes))
        if sorted(order) != sorted(own):
            raise DataError(
                f"the folders are {names}, and the classes {listed(order)}: rename the folders"
            )
        reader.labels = np.array([order.index(name) for name in own])[reader.labels]
        reader.classes = order
    notes = [f"{reader.rows} images, in folders {names}"]
    return Task(Dataset(reader), reader.rows, Names(), notes, in_memory=False)


def map_arrow(source: ArrowSource, objective: Objective, options: LabelOptions) -> Task:
    """Return what reads columns while training.

    Raises:
        ValueError: columns that the model does not take, or more than one label.
    """
    inputs = [str(x.name) for x in _features(source.name, objective)]
    ranks, weight = source.ranks, options.sample_weight
    targets = Targets.of(options, ranks, objective.names)
    targets.by_label(objective)
    rest = {name: rank for name, rank in ranks.items() if name != weight}
    columns = assign(rest, targets.names, inputs, objective.names)
    source.check_numbers([*(n for group in columns.values() for n in group), *targets.names])
    reader = source.reader(columns, targets.names, weight)
    names = stored_names(columns, ranks, targets)
    task = Task(Dataset(reader), reader.rows, names, in_memory=False)
    task.tell(ranks, columns, objective.names, *targets.names, weight)
    return task


def _features(name: str, objective: Objective) -> list[ir.Value]:
    """Return the inputs other than the only label."""
    features = [x for x in objective.data if x.name not in objective.labels]
    if len(features) != len(objective.data) - 1:
        raise DataError(f"{name!r} is read while training, for models with one label input")
    return features


def split(rows: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows to train on and the `share` of them to validate on, drawn by `seed`."""
    count = round(rows * share)
    if share and count in (0, rows):
        raise ValueError(f"--validation {share:g} of {rows} rows leaves a part empty: use 0")
    order = np.random.default_rng(seed).permutation(rows)
    return np.sort(order[count:]), np.sort(order[:count])


def field_of(value: ir.Value) -> Field:
    """Return what an input of a model takes."""
    return Field(str(value.name), (value.dtype or ir.DataType.FLOAT).numpy(), dims(value))
