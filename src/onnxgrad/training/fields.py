"""The inputs of a model for features, labels and sample weights, which check arrays of data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxgrad.data.arrow_blocks import ColumnArrays
from onnxgrad.data.class_numbers import labels_to_class_indices
from onnxgrad.data.columns import ColumnSelection, column_names, target_names
from onnxgrad.data.field import Field
from onnxgrad.errors import argument, named, unknown
from onnxgrad.losses.info import LossInfo
from onnxgrad.operators import marks
from onnxgrad.operators.shapes import Dims, dims, is_stated
from onnxgrad.training.model_loss import BATCH
from onnxgrad.training.objective import Objective
from onnxgrad.training.row_axes import AxisByInput, RowAxes, count_rows

LABEL_FIELDS = frozenset({"label", "weight"})  # fields of batches that a model without loss lacks

Places = dict[Any, np.ndarray]  # the arrays of a batch of an iterable, by position or by name


@dataclass(frozen=True)
class BatchForm:
    """The form of a batch of an iterable that was accepted: only the values of further batches of
    this form need a check.

    - `kinds`: the place, dtype and shape of each array in the batch.
    - `inputs`: the names of the inputs that take the arrays as they are.
    - `added`: sample weights of one, by input, if the batch has none.
    - `rows`: the count of rows.
    """

    kinds: list[tuple]
    inputs: list[str]
    added: dict[str, np.ndarray]
    rows: int

    def arrays_of(self, item: Any) -> dict[str, np.ndarray] | None:
        """Return the arrays by input of a batch of this form; None for another form."""
        places = _plain_arrays(item)
        if places is None or _kinds_of_arrays(places) != self.kinds:
            return None
        return dict(zip(self.inputs, places.values(), strict=True)) | self.added

    def batch_of(self, arrays: Mapping[str, np.ndarray]) -> Any:
        """Return the batch of this form with these arrays by input, a tuple or a dict."""
        parts = [arrays[name] for name in self.inputs]
        places = [place for place, *_ in self.kinds]
        return tuple(parts) if 0 in places else dict(zip(places, parts, strict=True))


def _plain_arrays(item: Any) -> Places | None:
    """Return the arrays of a batch by their places; None if it holds anything but numpy arrays."""
    if isinstance(item, np.ndarray):
        item = [item]
    kind = type(item)
    if kind is not dict and kind is not tuple and kind is not list:
        return None
    places = item if kind is dict else dict(enumerate(item))
    return places if all(type(part) is np.ndarray for part in places.values()) else None


def _kinds_of_arrays(places: Places) -> list[tuple]:
    """Return the place, dtype and shape of each array."""
    return [(place, part.dtype, part.shape) for place, part in places.items()]


class DataSpec:
    """The inputs for features, labels and sample weights of a model with its loss.

    They check the arrays that a user passes.

    Args:
        objective: the model and its loss.
        batch_axes: `{input: axis of its rows}`, None for an array that every batch gets whole;
            the default is read from the symbols of the declared shapes.

    Attributes:
        names: the names of the columns in an earlier training, or else in the first table.
        left_out: names of labels and weights that data for predictions may have; they are not read.
        accumulates: whether a step adds up the gradients of several fixed batches.
        numbered: whether the reader numbers labels, so that they are no names of classes.
        divides: whether larger batches are divided into fixed batches.
        parts_of: (rows of a batch) -> the count of parts of a batch that are normalized separately.

    Raises:
        ValueError: `batch_axes` names another input, or an axis that the input does not have.
    """

    def __init__(
        self, objective: Objective, batch_axes: Mapping[str, int | None] | None = None
    ) -> None:
        inputs, weight = objective.data, objective.row_weight
        self.names = objective.names.copy()
        self.left_out: frozenset[str] = frozenset()
        self.accumulates = self.numbered = self.divides = False
        names = [str(x.name) for x in inputs]
        self.weight = weight if weight in names else None
        rest = [name for name in names if name != self.weight]
        labels = dict(objective.labels)
        unsaid = bool(objective.written.sums) and not objective.written.needs_no_label
        if unsaid and not labels and len(rest) > 1:  # a loss in the model does not name its label
            labels[rest[-1]] = LossInfo()
        self.labels = list(labels)  # none if the loss needs no label
        shapes = {str(x.name): dims(x) for x in inputs}
        self.classified = {n for n, info in labels.items() if _is_class_label(info, shapes.get(n))}
        self.label_of = {info.prediction: name for name, info in labels.items() if info.prediction}
        self.label: str | None = self.labels[0] if labels else None
        self.features = [name for name in rest if name not in labels]
        self.fields = {}
        for x, name in zip(inputs, names, strict=True):
            assert x.dtype is not None
            limits: dict[str, Any] = {"is_weight": name == self.weight, "is_label": name in labels}
            limits["negative_weights"] = objective.allows_negative_weights
            if (of := labels.get(name)) is not None:
                limits |= {"classes": of.classes, "ignored": of.ignore_index, "allowed": of.bounds}
                limits["ignores_nan"] = of.ignore_nan
            if name == self.weight and shapes[name] is None:
                shapes[name] = (None,)  # add_loss_output accepts (rows,) and (rows, 1)
            tables = objective.tables.get(name, ())
            self.fields[name] = Field(name, x.dtype.numpy(), shapes[name], tables=tables, **limits)
        self.one_value: str | None = objective.model.graph.meta.get(marks.ONE_VALUE_NODE)
        self.parts_of: Callable[[int], int] = lambda rows: 1
        axes = dict(batch_axes or {})
        called = objective.model.graph.meta.get(marks.ROW_SYMBOLS, ())
        self.row_axes = RowAxes(shapes, self.features, self.label, axes, called)
        weight, label = self.weight, self.label
        if (
            weight
            and label
            and self._sample_weight_rank > 1
            and (axis := self.row_axes.declared_axis(label))
        ):
            self.row_axes = replace(self.row_axes, batch_axes={weight: axis, **axes})
        firsts = {s[0] for name in labels if (s := shapes.get(name)) and isinstance(s[0], int)}
        # labels of different lengths, as of fields on levels and at the surface, are no rows
        self.fixed_rows = self.row_axes.fixed_rows if len(firsts) < 2 else None

    @property
    def _sample_weight_rank(self) -> int:
        """The count of axes of the input of sample weights; 0 without such an input."""
        return 0 if self.weight is None else len(self.fields[self.weight].shape or ())

    def _reshape_sample_weights(self, weight: np.ndarray, data: Mapping[str, Any]) -> np.ndarray:
        """Return sample weights, one for each row or label, with as many axes as their input has.

        `data` are the arrays by input, from which the shape of the labels is read.

        Raises:
            ValueError: weights that are neither one for each row nor one for each label.
        """
        axes = self._sample_weight_rank
        if axes < 2 or self.weight is None:
            if weight.ndim > 2 or (weight.ndim == 2 and weight.shape[1] != 1):
                raise ValueError(
                    f"{self.weight!r} must have shape (rows,), not {weight.shape}: pass one weight "
                    "for each row, as this loss has one term for each row, several outputs, or "
                    "comes from another model"
                )
            return weight
        if weight.ndim < axes and weight.size == len(weight):
            shape = [1] * axes
            shape[self.row_axes.batch_axes.get(self.weight) or 0] = len(weight)
            return weight.reshape(shape)
        label = np.shape(data.get(self.label or "", ()))
        of_label = len(label) == weight.ndim
        if weight.ndim != axes or (
            of_label and any(n not in (1, m) for n, m in zip(weight.shape, label, strict=True))
        ):
            raise ValueError(
                f"sample weights have the shape {weight.shape}: pass one weight for each row, or "
                f"weights in the shape of the labels, {label}"
            )
        return weight

    def copy(self) -> DataSpec:
        """Return a shallow copy; this method is faster than `copy.copy`."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def without_labels(self) -> DataSpec:
        """Return the `DataSpec` of the features only, for predictions.

        Data may have both, which are not read: in a batch (X, y), or as columns of a table.
        """
        new = self.copy()
        new.left_out = frozenset(name for name in (*self.labels, self.weight) if name is not None)
        new.labels, new.label, new.weight = [], None, None
        new.fields = {name: self.fields[name] for name in self.features}
        return new

    def checked_arrays(
        self, X: Any, y: Any = None, sample_weight: Any = None
    ) -> dict[str, np.ndarray]:
        """Return the data as checked arrays by input, in the axes that the model declares.

        Raises:
            ValueError: an unknown or missing input, arrays of different lengths, or an array that
                its input does not take.
        """
        return self._check_arrays(self.data_by_input(X, y, sample_weight))[0]

    def data_by_input(self, X: Any, y: Any = None, sample_weight: Any = None) -> dict[str, Any]:
        """Return the unchecked data of each input: features, labels and sample weights by name.

        Raises:
            ValueError: an unknown input, label or column, or labels or weights without an input.
        """
        data = self._split_by_input(X, y is None, sample_weight is None)
        if y is not None:
            data |= self._labels_by_input(y)
        if sample_weight is not None:
            if self.weight is None:
                built = named("add_loss_output(..., weight_name='weight')")
                raise ValueError(
                    f"the loss takes no sample weights: leave out {named('sample_weight')}, build "
                    f"the loss with {built}, or pass a loss model whose output= is the tensor of "
                    "one loss for each row, before the reduction"
                )
            data[self.weight] = sample_weight
        return self._order_columns(data)

    def _values_by_input(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return `data` by input; labels may come under the name of their prediction's output."""
        outputs = {output: name for output, name in self.label_of.items() if name not in data}
        return {
            name if name in self.fields else outputs.get(name, name): value
            for name, value in data.items()
        }

    def _labels_by_input(self, y: Any) -> dict[str, Any]:
        """Return the data of each label input.

        `y` are the labels of the only label input, or a dict or a table with the labels by name.
        """
        if not self.labels:
            raise ValueError(f"the model has no label input: pass {argument('y', None)}")
        names = column_names(y)
        if len(self.labels) > 1 and names and {*names} <= {*self.labels, *self.label_of}:
            y = {name: ColumnSelection(y, [name]) for name in names}
        if isinstance(y, Mapping):
            labels = self._values_by_input(y)
            if wrong := next((name for name in labels if name not in self.labels), None):
                raise unknown("label", wrong, [*self.labels, *self.label_of])
            return labels
        if len(self.labels) == 1:
            return {self.labels[0]: y}
        raise ValueError(f"the model has several labels: pass y as a dict of {self.labels}")

    def _check_arrays(
        self, data: Mapping[str, Any], whole: bool = False
    ) -> tuple[dict[str, np.ndarray], int]:
        """Return the checked arrays by input, and their count of rows.

        Args:
            data: the data, by input.
            whole: whether `data` are a batch that goes into the model as it is, so that only axes
                that are declared with the symbol of the rows are rows.
        """
        if wrong := next((name for name in data if name not in self.fields), None):
            raise unknown("input", wrong, [*self.fields])
        if missing := [n for n in self.fields if n not in data and n != self.weight]:
            raise ValueError(f"no data for the inputs {missing}: pass them beside {list(data)}")
        numbers = {name: self._numeric_array_of_input(name, value) for name, value in data.items()}
        if self.weight in numbers:
            numbers[self.weight] = self._reshape_sample_weights(numbers[self.weight], numbers)
        if whole:
            axes = {n: self.row_axes.declared_axis(n) for n in self.fields}
        else:
            axes = self.row_axes.find_row_axes({n: a.shape for n, a in numbers.items()})
        arrays = {n: self.fields[n].check(a, axes[n], whole) for n, a in numbers.items()}
        rows = self._count_rows_of_batch(arrays, axes) if whole else count_rows(arrays, axes)
        if self.weight is not None and self.weight not in arrays:
            axes.setdefault(self.weight, self.row_axes.batch_axes.get(self.weight, 0))
            ones, axis = self._reshape_sample_weights(np.ones(rows), {}), axes[self.weight]
            arrays[self.weight] = self.fields[self.weight].check(ones, axis, whole)
        if not whole:
            self.check_row_count(rows)
        arrays = {name: arrays[name] for name in self.fields}
        self._check_shared_dims(arrays)
        for name, field in self.fields.items():
            field.check_indices(arrays, axes[name], field.cells(data.get(name)))
        return arrays, rows

    def _check_shared_dims(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise `ValueError` if axes that the model declares with one symbol differ in length."""
        lengths: dict[str, tuple[int, str]] = {}
        for name, array in arrays.items():
            for axis, d in enumerate(self.fields[name].shape or ()):
                if not isinstance(d, str) or not is_stated(d):
                    continue
                length, first = lengths.setdefault(d, (array.shape[axis], f"{name!r}, axis {axis}"))
                if length != array.shape[axis]:
                    reason = f"the model declares both as {d!r}"
                    if d == BATCH:
                        reason = (
                            "both are the rows of a batch (if they are not, give these axes "
                            "different symbols in the model)"
                        )
                    raise ValueError(
                        f"{name!r} has length {array.shape[axis]} along axis {axis}, and {first} "
                        f"has length {length}: {reason}, so they must be the same"
                    )

    def _order_columns(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return `data` with the columns of each table in the order that they had in training.

        Without an earlier training, `names` gets the names of the columns.

        Raises:
            DataError: a table has other columns.
        """
        names, settled, targets = self.names, dict(data), []
        for name, value in data.items():
            if name in self.labels:
                columns = target_names(value) or []
                targets += columns
                order = names.order_targets(columns) if columns and len(self.labels) == 1 else []
            elif name == self.weight:
                columns, order = [], []
                names.weight = target_names(value) or names.weight
            else:
                columns = column_names(value) or []
                order = names.order_columns(name, columns) if columns else []
            if order != columns and order:
                settled[name] = ColumnSelection(value, order)
        if len(self.labels) > 1 and targets:
            names.target = targets
        return settled

    def _split_by_input(self, X: Any, label: bool = False, weight: bool = False) -> dict[str, Any]:
        """Return the columns of a table, or the arrays of a dict, for each input.

        Args:
            X: the features.
            label: whether `X` may have the labels, too.
            weight: whether `X` may have the sample weights, too.
        """
        names, columns_of = column_names(X), dict[str, list[str]]()
        if isinstance(X, Mapping):
            X = self._values_by_input(X)
            names = list(X)
        if names is not None:
            labels, target = self.labels if label else [], self.names.target
            columns_of = {name: [name] for name in labels if name in names}
            if not columns_of and len(labels) == 1 and target and {*target} <= {*names}:
                columns_of = {labels[0]: target}  # the columns that were labels in training
            if columns_of and weight and self.weight in names:
                columns_of[self.weight] = [self.weight]
            own = {*self.features}.union(*columns_of.values(), *self.names.columns.values())
            gone = self.left_out.union(self.names.target, self.names.weight) - own
            if isinstance(X, Mapping):
                kept = {name: X[name] for name in names if name not in gone}
                for name, columns in columns_of.items():
                    if columns != [name]:
                        kept[name] = ColumnArrays({column: kept.pop(column) for column in columns})
                return kept
            if not gone.isdisjoint(names):
                names = [name for name in names if name not in gone]
                X = ColumnSelection(X, names)
        if len(self.features) == 1 and not columns_of:
            return {self.features[0]: X}
        if names is None:
            raise ValueError(
                f"the model has several inputs: pass a dict of {self.features}, or a table with "
                "columns of these names"
            )
        of_labels = set[str]().union(*columns_of.values())
        rest = [name for name in names if name not in of_labels]
        arrays = [n for n in self.features if n in rest and getattr(X[n], "ndim", 1) > 1]
        by_input = {**columns_of, **self.names.columns_by_input(rest, self.features, arrays)}
        used = set[str]().union(*by_input.values())
        if unused := [name for name in names if name not in used]:
            raise ValueError(
                f"no input of the model takes the columns {unused}: leave out these columns"
            )
        return {
            n: X[n] if columns == [n] else ColumnSelection(X, columns)
            for n, columns in by_input.items()
        }

    def batch_form(
        self, item: Any, arrays: Mapping[str, np.ndarray], rows: int
    ) -> BatchForm | None:
        """Return the form of a batch that `checked_batch` has accepted; None unless it has plain
        arrays only, which inputs take as they are.
        """
        places = _plain_arrays(item)
        if places is None or any(field.tables for field in self.fields.values()):
            return None
        inputs = [
            next((n for n, a in arrays.items() if a is part), None) for part in places.values()
        ]
        given = [name for name in inputs if name is not None]
        added = {name: a for name, a in arrays.items() if name not in given}
        if len(given) < len(places) or not {*added} <= {self.weight}:
            return None
        return BatchForm(_kinds_of_arrays(places), given, added, rows)

    def accepts_values(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Return whether inputs accept the values of batches of a `BatchForm`, stacked by input."""
        return all(self.fields[name].accepts_values(array) for name, array in arrays.items())

    def checked_batch(self, item: Any) -> tuple[dict[str, np.ndarray], int]:
        """Return the checked arrays of one batch of an iterable by input, and its count of rows.

        Arrays with rows have them on the first axis. A batch is (X, y), (X, y, weight), or a dict,
        which goes into the model as it is: dtypes and declared shapes are checked, and whether
        dimensions of one symbol agree. The number of rows of a dict is the length of the row axis
        of the label, or of the first axis of the label, or 1.

        Raises:
            ValueError: as `checked_arrays`.
        """
        if whole := isinstance(item, Mapping):
            data = self._order_columns(
                self._split_by_input(item, not self.left_out, not self.left_out)
            )
        else:
            parts = item if isinstance(item, (tuple, list)) else [item]
            if len(parts) > 3:
                raise ValueError(
                    f"a batch is (X, y), (X, y, sample_weight) or a dict, not {len(parts)} arrays"
                )
            data = self.data_by_input(*parts[: 1 if self.left_out else 3])
        arrays, rows = self._check_arrays(data, whole)
        if not whole or self.one_value is not None:
            self.check_batch_size(rows)
        return self.row_axes.rows_first(arrays), rows

    def _numeric_array_of_input(self, name: str, data: Any) -> np.ndarray:
        """Return the data of the input `name` as an array of numbers.

        Names of classes become indices of classes.
        """
        own = self.fields[name]
        if name in self.classified and not self.numbered:
            ignored = own.ignored, bool(own.ignores_nan)
            data = labels_to_class_indices(data, self.names.classes, name, *ignored)
        return own.numbers(data)

    def _count_rows_of_batch(self, arrays: Mapping[str, np.ndarray], axes: AxisByInput) -> int:
        """Return the count of rows of a batch that is not cut, from the label's axis of rows.

        Without a label, it is the length of the row axis of the inputs, or 1 if these differ.
        """
        for name in self.labels:
            if not arrays[name].size:
                raise ValueError(f"{name!r} has no labels in a batch: leave out empty batches")
        if self.label is None:
            counts = {arrays[n].shape[a] for n, a in axes.items() if a is not None and n in arrays}
            return counts.pop() if len(counts) == 1 else 1
        shape, axis = arrays[self.label].shape, axes[self.label] or 0
        return shape[axis] if shape else 1

    def check_row_count(self, rows: int) -> None:
        """Raise `ValueError` unless `rows` is a multiple of the rows of the model's fixed batch."""
        if self.fixed_rows and rows % self.fixed_rows:
            raise ValueError(
                f"the model has a fixed batch of {self.fixed_rows} rows: pass a multiple of it, "
                f"not {rows} rows, or export it with a symbolic batch"
            )

    def check_batch_size(self, rows: int) -> None:
        """Raise `ValueError` if the model cannot train on a batch of `rows` rows.

        The rows must fit the fixed batch of the model, and statistics of a batch, or of each part
        of a divided batch, need more than one row.
        """
        self.check_row_count(rows)
        if self.one_value is not None and rows < 2 * (parts := self.parts_of(rows)):
            cut = f", which is computed in {parts} parts" * (parts > 1)
            raise ValueError(
                f"{self.one_value} in training needs two rows or more, and a batch has {rows}{cut}:"
                f" choose {argument('batch_size')} (and accumulate) so that none has a single row, "
                f"leave out a row, or use {argument('batch_norm', 'frozen')}"
            )
        if self.fixed_rows not in (None, rows) and not (self.accumulates or self.divides):
            raise ValueError(
                f"the model has a fixed batch of {self.fixed_rows} rows: train with "
                f"{argument('batch_size', self.fixed_rows)}, not {rows}, or export it with a "
                "symbolic batch"
            )


def _is_class_label(info: LossInfo, shape: Dims | None) -> bool:
    """Return whether a label is one class of a row, so that users may pass the name of the class.

    A score that is compared with a threshold tells two classes apart. Where a row has several such
    scores, as of tags, the columns of the labels have the names, and labels are numbers.
    """
    if info.classes is not None or info.threshold is None:
        return info.classes is not None
    scores = (*(shape or ()), 1, 1)[1]
    return scores is None or scores == 1
