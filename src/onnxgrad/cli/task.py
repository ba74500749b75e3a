"""The data of a task: columns as the arrays of a model's inputs, or what reads them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.cli.data_options import LabelOptions
from onnxgrad.cli.label_columns import (
    Columns,
    Targets,
    chosen_columns,
    ignored_columns,
    in_other_order,
)
from onnxgrad.cli.sources import ArrowSource, ImageSource, TextSource
from onnxgrad.data.arrays import DataError, fit_shape
from onnxgrad.data.class_numbers import check_class_count, first_names
from onnxgrad.data.columns import Names, Part
from onnxgrad.data.readers import Reader
from onnxgrad.data.tables import FileTable
from onnxgrad.errors import unknown
from onnxgrad.model.class_labels import Labels
from onnxgrad.operators.shapes import dims
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
        """Return some of the rows, of arrays, images or texts."""

        def of(part: Any) -> Any:
            if isinstance(part, dict):
                return {name: array[rows] for name, array in part.items()}
            if isinstance(part, Reader):
                return part.subset(rows)
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
                self.remarks.append(f"columns of input {name}, in this order: {first_names(group)}")
        self.remarks += ignored_columns(names, columns, others)


def map_table(
    table: FileTable, objective: Objective, targets: Targets, options: LabelOptions
) -> Task:
    """Return the arrays of a table for the inputs and the labels of an objective.

    Its labels of classes are their numbers.
    """
    weight = options.sample_weight
    labels = targets.by_label(objective)
    inputs = [str(x.name) for x in objective.data if x.name not in labels]
    if weight is not None and weight not in table:
        raise unknown("column (--sample-weight)", weight, table.columns)
    others = _labels_and_weights(targets, weight, objective.names)
    rest = [name for name in table if name not in others]
    rest, trained = chosen_columns(options, rest, inputs, objective.names)
    lists = [name for name in rest if table[name].ndim > 1]
    columns = trained.by_input(rest, inputs, lists)
    parts = {name: Part(table, group) for name, group in (columns | labels).items()}
    arrays = Fields(objective).arrays(parts)
    weights = None
    if weight is not None:
        weights = table.cells([weight], f"--sample-weight {weight}").weights()
    y = {name: arrays.pop(name) for name in labels if objective.labels}
    label: Any = next(iter(y.values())) if len(y) == 1 else y or None
    rows = len(next(iter(arrays.values())))
    names = _stored_names(columns, lists, targets, weight)
    task = Task(Dataset(arrays, label, weights), rows, names)
    task.notes += [table.note] * bool(table.note)
    task.tell(table.columns, columns, objective.names, *targets.names, weight)
    return task


def check_counts(arrays: dict[str, np.ndarray]) -> None:
    """Raise `DataError` if arrays differ in their number of rows."""
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"the arrays differ in their number of rows: {counts}")


def _labels_and_weights(targets: Targets, weight: str | None, trained: Names) -> set[str | None]:
    """Return the columns that no input takes: labels and weights, also those of the training."""
    used = {name for group in trained.columns.values() for name in group}
    return {*targets.names, weight} | ({*trained.target, *trained.weight} - used)


def _stored_names(
    columns: Columns, lists: Collection[str], targets: Targets, weight: str | None
) -> Names:
    """Return the names that a trained model stores: of inputs that take columns of numbers."""
    named = {n: list(group) for n, group in columns.items() if not {*group} <= {*lists}}
    return Names(named, targets.names, [weight] if weight else [])


def map_images(source: ImageSource, objective: Objective, classes: Labels | None) -> Task:
    """Return what reads images while training, for a model with one label."""
    feature = _features(source.name, objective)[0]
    assert feature.dtype is not None
    name, dtype = str(feature.name), feature.dtype.numpy()
    reader = source.reader(name, dims(feature), dtype, classes)
    assert reader.labels is not None
    [info] = objective.labels.values()
    if isinstance(info.classes, int):
        check_class_count(reader.class_names, reader.labels, info.classes)
    counts = np.bincount(reader.labels, minlength=len(reader.classes))
    named = [f"{k}: {n} ({c})" for k, (n, c) in enumerate(zip(reader.classes, counts, strict=True))]
    if not reader.class_names:
        named = [f"{k} ({c})" for k, c in enumerate(counts)]
    notes = [
        source.described(reader),
        f"classes by number, and their images: {first_names(named)}",
    ]
    names = Names(classes=classes or reader.class_names)
    return Task(Dataset(reader), reader.rows, names, notes, in_memory=False)


def map_texts(source: TextSource) -> Task:
    """Return the texts, for a language model."""
    reader = source.reader
    counts = f"{reader.rows} texts of {reader.tokens} tokens, of which {reader.learned} are learned"
    notes = [counts, *reader.notes]
    return Task(Dataset(reader), reader.rows, Names(), notes, in_memory=False)


def map_arrow(
    source: ArrowSource, objective: Objective, options: LabelOptions, classes: Labels | None
) -> Task:
    """Return what reads columns while training, for a model with one label."""
    features = _features(source.name, objective)
    inputs = [str(x.name) for x in features]
    weight = options.sample_weight
    targets = Targets.of(options, source.types, objective.names)
    targets.by_label(objective)
    others = _labels_and_weights(targets, weight, objective.names)
    rest = [name for name in source.types if name not in others]
    rest, names = chosen_columns(options, rest, inputs, objective.names)
    columns = names.by_input(rest, inputs, source.lists)
    numbers = [n for group in columns.values() for n in group]
    source.check_numbers(numbers if classes else [*numbers, *targets.names])
    for x in features:
        group = columns[str(x.name)]
        if {*group}.isdisjoint(source.lists):
            fit_shape(np.empty((1, len(group))), dims(x), f"input {x.name!r}", True, group)
    reader = source.reader(columns, targets.names, weight)
    stored = _stored_names(columns, source.lists, targets, weight)
    stored.classes = classes or []
    task = Task(Dataset(reader), reader.rows, stored, in_memory=False)
    task.tell(source.types, columns, objective.names, *targets.names, weight)
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
