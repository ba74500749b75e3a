"""The data of a task: columns as the arrays of a model's inputs, or what reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.cli.cells import is_text, refuse
from onnxgrad.cli.classes import Labels, numbered
from onnxgrad.cli.data_files import as_value, assign, labels, stack
from onnxgrad.cli.data_options import LabelOptions
from onnxgrad.cli.sources import ArrowSource, ImageSource, Source, TableSource
from onnxgrad.data.arrays import DataError
from onnxgrad.data.columns import Names
from onnxgrad.errors import printable, unknown
from onnxgrad.graph.shapes import dims
from onnxgrad.losses.info import LossInfo
from onnxgrad.training.data import Dataset
from onnxgrad.training.fields import Fields
from onnxgrad.training.objective import Objective

Table = Mapping[str, np.ndarray]


@dataclass
class Task:
    """Data that fit a model and its loss.

    - `data`: what `fit` and `evaluate` take.
    - `rows`: their number, None if it is unknown.
    - `names`: of the columns, which the trained model stores.
    - `notes`: messages before training; `remarks`: after it, about columns.
    """

    data: Dataset
    rows: int | None
    names: Names
    notes: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    in_memory: bool = True

    def take(self, rows: np.ndarray) -> Dataset:
        """Return some of the rows."""

        def of(part: Any) -> Any:
            if isinstance(part, dict):
                return {name: array[rows] for name, array in part.items()}
            return None if part is None else part[rows]

        return Dataset(of(self.data.X), of(self.data.y), of(self.data.sample_weight))


@dataclass(frozen=True)
class Targets:
    """The columns of the labels: by the output that a loss compares with them, None for all."""

    columns: dict[str | None, list[str]]

    @classmethod
    def of(
        cls, options: LabelOptions, names: Any, trained: Names, outputs: Sequence[str] = ()
    ) -> Targets:
        """Return the columns of `--target`, or else those of an earlier training.

        Args:
            options: of the command.
            names: of all columns.
            trained: the names of an earlier training.
            outputs: those that have losses, if they are several.

        Raises:
            ValueError: an unknown column, one that is named twice, or one without its output.
        """
        columns: dict[str | None, list[str]] = {}
        for text in options.target:
            output, equals, column = text.partition("=") if outputs else ("", "", text)
            if outputs and (not equals or output not in outputs):
                raise ValueError(
                    "the losses are of several outputs: write --target OUTPUT=COLUMN for each of "
                    f"{', '.join(map(printable, outputs))}, not {text!r}"
                )
            columns.setdefault(output if outputs else None, []).append(column)
        if not columns and trained.target and set(trained.target) <= set(names):
            columns[None] = list(trained.target)
        listed = [name for each in columns.values() for name in each]
        for name in listed:
            if name not in names:
                raise unknown("column", name, names)
        if len(set(listed)) < len(listed):
            raise DataError(f"a target is named twice: {', '.join(map(repr, listed))}")
        return cls(columns)

    @property
    def names(self) -> list[str]:
        """All columns."""
        return [name for each in self.columns.values() for name in each]

    def arrays(
        self, table: Table, classes: Labels | None, numeric_loss: Callable[[], str | None]
    ) -> dict[str, np.ndarray]:
        """Return the columns of a table, with class numbers for labels of classes.

        Args:
            table: the columns.
            classes: the labels of the classes.
            numeric_loss: returns the name of the loss if it compares with numbers; None otherwise.
        """
        return {name: numbered(name, table[name], classes, numeric_loss) for name in self.names}

    def shaped(self, arrays: Table) -> Any:
        """Return labels in the shape that decides whether they are one-hot."""
        parts = {
            output: stack({n: arrays[n] for n in each}, "the target")
            for output, each in self.columns.items()
        }
        return parts.get(None) if set(parts) <= {None} else parts


def map_table(
    source: TableSource,
    objective: Objective,
    targets: Targets,
    numbers: Table,
    weight: str | None,
) -> Task:
    """Return the arrays of a table for the inputs and the labels of an objective.

    Args:
        source: the table.
        objective: describes the inputs.
        targets: the columns of the labels, and `numbers`, their values.
        weight: the column of sample weights.

    Raises:
        ValueError: columns that the model does not take; messages name rows.
    """
    inputs = {str(x.name): x for x in objective.data}
    labelled, columns_of = _labels_of(objective, inputs, targets)
    for name in labelled:
        inputs.pop(name)
    if weight is not None and weight not in source.table:
        raise unknown("column (--sample-weight)", weight, source.table)
    table = {n: a for n, a in source.table.items() if n != weight} | dict(numbers)
    columns = assign(table, targets.names, list(inputs.values()), objective.names)
    X: dict[str, np.ndarray] = {
        n: as_value(columns[n], x, f"input {n!r}") for n, x in inputs.items()
    }
    y = {
        name: labels(table, columns_of[name], x, objective.labels.get(name, LossInfo()))
        for name, x in labelled.items()
    }
    counts = {name: len(array) for name, array in (X | y).items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"the arrays differ in their number of rows: {counts}")
    weights = None if weight is None else stack({weight: source.table[weight]}, "the weights")
    _check_together(objective, X | y)
    names = Names(
        {n: list(g) for n, g in columns.items() if any(a.ndim == 1 for a in g.values())}, []
    )
    if names.columns:
        names.target = targets.names
    if not objective.labels:
        X, y = X | y, {}
    label: Any = next(iter(y.values())) if len(y) == 1 else y or None
    task = Task(Dataset(X, label, weights), next(iter(counts.values())), names)
    _tell(task, source.table, columns, objective.names, [*targets.names, weight])
    if source.note:
        task.notes.insert(0, source.note)
    return task


def _labels_of(
    objective: Objective, inputs: Mapping[str, ir.Value], targets: Targets
) -> tuple[dict[str, ir.Value], dict[str, list[str]]]:
    """Return the label inputs, and the columns of each.

    Raises:
        ValueError: a label without a column, or columns without a label.
    """
    infos = objective.labels
    names = [name for name in infos if name in inputs]
    if not names and targets.names:
        own = next((t for t in targets.names if t in inputs), "label")
        if own not in inputs:
            raise ValueError(
                f"the model computes its own loss, but has no input {own!r}: "
                "--target must be the input that takes the labels, one of "
                f"{', '.join(map(printable, inputs))}"
            )
        names = [own]
    if names and not targets.names:
        raise ValueError("the loss compares with labels: name their column with --target")
    if len(names) < 2:
        return {n: inputs[n] for n in names}, dict.fromkeys(names, targets.names)
    outputs = {infos[name].prediction: name for name in names}
    for output in targets.columns:
        if output not in outputs:
            raise ValueError(
                "the losses are of several outputs: write --target OUTPUT=COLUMN for each of "
                f"{', '.join(printable(o) for o in outputs)}"
            )
    if missing := next((o for o in outputs if o not in targets.columns), None):
        raise ValueError(f"no --target {missing}=COLUMN for the loss of {missing!r}")
    columns = {name: targets.columns[output] for output, name in outputs.items()}
    return {name: inputs[name] for name in names}, columns


def _check_together(objective: Objective, arrays: dict[str, np.ndarray]) -> None:
    """Raise if arrays do not fit each other, or contain indices out of range of a table."""
    Fields(objective).check_axes(arrays)
    for name, tables in objective.tables.items():
        what = "the target" if name in objective.labels else f"input {name!r}"
        for each in tables if name in arrays else ():
            refuse(each.outside(arrays[name], arrays), arrays[name], f"{what} holds {each}")


def _tell(
    task: Task,
    table: Table,
    columns: Mapping[str, Table],
    trained: Names,
    others: Sequence[str | None],
) -> None:
    """Add messages: the order of columns where it is new or differs, and columns not used."""
    for name, group in columns.items():
        order = [column for column in table if column in group]
        if name not in trained.columns and len(group) > 1:
            task.remarks.append(f"columns of input {name}, in this order: {listed(list(group))}")
        elif name in trained.columns and order != list(group):
            task.notes.append(
                f"columns of input {name} are taken by name, in the order of its training: "
                f"{listed(list(group))} (the data has {listed(order)})"
            )
    used = {*others, *(name for group in columns.values() for name in group)}
    if ignored := [name for name in table if name not in used]:
        task.remarks.append(f"ignored columns: {listed(ignored)}")


def listed(names: Sequence[str]) -> str:
    """Return up to 12 names as text."""
    more = f", and {len(names) - 12} more" if len(names) > 12 else ""
    return ", ".join(names[:12]) + more


def map_stream(
    source: Source, objective: Objective, options: LabelOptions, classes: Labels | None
) -> Task:
    """Return what reads the data while training, for the inputs and the label of an objective.

    Raises:
        ValueError: columns that the model does not take, or more than one label.
    """
    inputs = {str(x.name): x for x in objective.data}
    labelled = [name for name in objective.labels if name in inputs]
    if len(labelled) != 1:
        raise DataError(f"{source.name!r} is read while training, for models with one label input")
    label = inputs.pop(labelled[0])
    if isinstance(source, ImageSource):
        shape = dims(next(iter(inputs.values())))
        reader = source.reader(shape)
        names = listed(reader.classes)
        folders = np.array(reader.classes)
        if classes is not None and sorted(map(str, classes)) == sorted(reader.classes):
            order = list(map(str, classes))
            reader.labels = numbered("the folders", folders[reader.labels], order)
            reader.classes = order
        elif classes is not None:
            raise DataError(
                f"the folders are {names}, and the classes {listed(list(map(str, classes)))}: "
                "rename the folders"
            )
        return Task(
            Dataset(reader),
            reader.rows,
            Names(),
            [f"{reader.rows} images, in folders {names}"],
            in_memory=False,
        )
    assert isinstance(source, ArrowSource)
    return _map_arrow(source, objective, options, list(inputs.values()), label)


def _map_arrow(
    source: ArrowSource,
    objective: Objective,
    options: LabelOptions,
    inputs: list[ir.Value],
    label: ir.Value,
) -> Task:
    empty = source.examples
    targets = Targets.of(options, empty, objective.names)
    if not targets.names:
        raise ValueError("the loss compares with labels: name their column with --target")
    weight = options.sample_weight
    columns = assign(
        {n: a for n, a in empty.items() if n != weight}, targets.names, inputs, objective.names
    )
    for group in [*columns.values(), {n: empty[n] for n in targets.names}]:
        if text := next((n for n, a in group.items() if any(map(is_text, a.ravel()))), None):
            raise DataError(
                f"{source.name!r}: column {text!r} is text; write numbers, class indices for a "
                f"target, or leave it out with --ignore {text}"
            )
    reader = source.reader({n: list(g) for n, g in columns.items()}, targets.names, weight)
    names = Names({n: list(g) for n, g in columns.items() if len(g) > 1}, targets.names)
    task = Task(Dataset(reader), reader.rows, names, in_memory=False)
    _tell(task, empty, columns, objective.names, [*targets.names, weight])
    return task


def split(rows: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows to train on and the `share` of them to validate on, drawn by `seed`."""
    count = round(rows * share)
    if share and count in (0, rows):
        raise ValueError(f"--validation {share:g} of {rows} rows leaves a part empty: use 0")
    order = np.random.default_rng(seed).permutation(rows)
    return np.sort(order[count:]), np.sort(order[:count])
