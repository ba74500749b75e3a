"""Training data as checked arrays by input name, and the batches drawn from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxgrad.data.columns import Part, column_names, is_table, target_names
from onnxgrad.errors import unknown
from onnxgrad.graph.shapes import dims, is_stated

if TYPE_CHECKING:
    from onnxgrad.training.objective import Objective  # it imports losses, which check data
from onnxgrad.data.fields import Field


class Fields:
    """The data inputs of a model with a loss: features, label, sample weights.

    `names` are those of the columns: of an earlier training, or else of the first table.
    """

    def __init__(self, objective: Objective) -> None:
        inputs, weight, info = objective.data, objective.row_weight, objective.loss_info
        self.names = objective.names.copy()
        names = [str(x.name) for x in inputs]
        self.weight = weight if weight in names else None
        rest = [name for name in names if name != self.weight]
        self.label: str | None = info.label or ("label" if "label" in rest else rest[-1])
        if len(rest) == 1 and info.label not in rest and rest[0] != "label":
            self.label = None  # the loss needs no label
        self.features = [name for name in rest if name != self.label]
        self.mean = info.reduction == "mean"
        self.fields = {}
        for x, name in zip(inputs, names, strict=True):
            assert x.dtype is not None
            limits: dict[str, Any] = {"tables": objective.tables.get(name, ())}
            if name == self.label:
                limits |= {"classes": info.classes, "ignored": info.ignore_index}
                limits["allowed"] = info.bounds
            shape = dims(x)
            if name == self.weight and shape is None:
                shape = (None,)  # add_loss_output accepts (rows,) and (rows, 1)
            self.fields[name] = Field(name, x.dtype.numpy(), shape, **limits)
        firsts = (field.shape[0] for field in self.fields.values() if field.shape)
        self.fixed_rows = next((d for d in firsts if isinstance(d, int)), None)

    def arrays(self, X: Any, y: Any = None, sample_weight: Any = None) -> dict[str, np.ndarray]:
        """Return checked arrays by input name.

        Raises:
            ValueError: an unknown or missing input, arrays of different lengths, or an array that
                its input does not take.
        """
        data = self._by_name(X, y is None, sample_weight is None)
        if y is not None:
            if self.label is None:
                raise ValueError("the model has no label input: pass y=None")
            data[self.label] = y
        if sample_weight is not None:
            if self.weight is None:
                raise ValueError(
                    "the loss takes no sample weights: build it with "
                    "add_loss_output(..., weight_name='weight')"
                )
            data[self.weight] = sample_weight
        return self._checked(data, list(self.fields))

    def inputs(self, X: Any) -> dict[str, np.ndarray]:
        """Return the checked arrays of the inputs other than label and sample weights."""
        return self._checked(self._by_name(X), self.features)

    def _checked(self, data: Mapping[str, Any], names: list[str]) -> dict[str, np.ndarray]:
        for name in data:
            if name not in names:
                raise unknown("input", name, names)
        self._check_columns(data)
        missing = [name for name in names if name not in data and name != self.weight]
        if missing:
            raise ValueError(f"no data for the inputs {missing}; given: {list(data)}")
        arrays = {name: self.fields[name].check(value) for name, value in data.items()}
        if self.weight in names and self.weight not in arrays:
            ones = np.ones(len(next(iter(arrays.values()))))
            arrays[self.weight] = self.fields[self.weight].check(ones)
        counts = {name: len(array) for name, array in arrays.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"the inputs have different numbers of rows: {counts}")
        rows = min(counts.values())
        if self.fixed_rows and rows % self.fixed_rows:
            raise ValueError(
                f"the model has a fixed batch of {self.fixed_rows} rows: pass a multiple of it, "
                f"not {rows} rows, or export it with a symbolic batch"
            )
        self.check_axes(arrays)
        for name in arrays:
            self.fields[name].check_indices(arrays)
        return {name: arrays[name] for name in names}

    def check_axes(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise if axes of one symbolic dimension differ in length."""
        lengths: dict[str, tuple[int, str]] = {}
        for name, array in arrays.items():
            for axis, d in enumerate(self.fields[name].shape or ()):
                if not isinstance(d, str) or not is_stated(d):
                    continue
                length, first = lengths.setdefault(d, (array.shape[axis], f"{name!r}, axis {axis}"))
                if length != array.shape[axis]:
                    raise ValueError(
                        f"{name!r} has length {array.shape[axis]} along axis {axis}, and {first} "
                        f"has length {length}: the model declares both as {d!r}, so they must be "
                        "the same"
                    )

    def _check_columns(self, data: Mapping[str, Any]) -> None:
        """Raise if tables have other columns than earlier ones; store the names of the first."""
        for name, value in data.items():
            if name == self.label:
                if names := target_names(value):
                    self.names.check_target(names)
            elif (names := column_names(value)) and name != self.weight:
                self.names.check(name, names)

    def _by_name(self, X: Any, label: bool = False, weight: bool = False) -> dict[str, Any]:
        if isinstance(X, Mapping):
            return dict(X)
        if len(self.features) == 1:
            return {self.features[0]: X}
        names = column_names(X)
        if names is None:
            raise ValueError(
                f"the model has several inputs: pass a dict of {self.features}, or a table with "
                "columns of these names"
            )
        more = [self.label] * label + [self.weight] * weight
        return self._split(X, names, [name for name in more if name in names])

    def _split(self, X: Any, names: list[str], more: list[Any]) -> dict[str, Any]:
        """Return the columns of a table by input: those it was trained on, or that of its name."""
        columns_of = {n: self.names.columns.get(n, [n]) for n in [*self.features, *more]}
        used = [name for columns in columns_of.values() for name in columns]
        for name in used:
            if name not in names:
                raise unknown("column (every input of the model needs one)", name, names)
        if unused := [name for name in names if name not in used]:
            raise ValueError(f"no input of the model takes the columns {unused}: leave them out")
        return {
            name: X[name] if columns == [name] else Part(X, columns)
            for name, columns in columns_of.items()
        }

    def batch(self, item: Any) -> dict[str, np.ndarray]:
        """Return the checked arrays of one batch of an iterable: (X, y), (X, y, weight), dict."""
        parts = item if isinstance(item, (tuple, list)) else [item]
        if len(parts) > 3:
            raise ValueError(
                f"a batch is (X, y), (X, y, sample_weight) or a dict, not {len(parts)} arrays"
            )
        return self.arrays(*parts)

    def check_batch(self, rows: int) -> None:
        """Raise if the model has a fixed batch of another number of rows."""
        if self.fixed_rows not in (None, rows):
            raise ValueError(
                f"the model has a fixed batch of {self.fixed_rows} rows: train with "
                f"batch_size={self.fixed_rows}, not {rows}, or export it with a symbolic batch"
            )


@dataclass
class Slice:
    """Batches of one length for one call of the runtime: each array is [batches, rows, ...]."""

    arrays: dict[str, np.ndarray]
    batches: int
    rows: int


class ArraySource:
    """Batches drawn from arrays: every row once an epoch, the last batch shorter."""

    def __init__(
        self, arrays: dict[str, np.ndarray], batch_size: int, rng: np.random.Generator
    ) -> None:
        self.arrays = arrays
        self.rows: int | None = len(next(iter(arrays.values())))
        self.batch_size = int(batch_size)
        self.rng = rng

    def epoch(self, budget: Any) -> Iterator[Slice]:
        """Yield the slices of one epoch; `budget()` says how many batches the next may have."""
        rows, size = self.rows, self.batch_size
        assert rows is not None
        order = self.rng.permutation(rows)
        start = 0
        while start < rows:
            length = min(size, rows - start)
            batches = max(1, min(budget(), (rows - start) // length))
            indices = order[start : start + batches * length]
            start += batches * length
            arrays = {
                name: array[indices].reshape(batches, length, *array.shape[1:])
                for name, array in self.arrays.items()
            }
            yield Slice(arrays, batches, length)


class IterableSource:
    """Batches of an iterable such as a torch DataLoader, iterated once per epoch."""

    def __init__(self, batches: Iterable[Any], fields: Fields) -> None:
        self.batches = batches
        self.fields = fields
        self.rows: int | None = None

    def epoch(self, budget: Any) -> Iterator[Slice]:
        """Yield every batch as a slice of its own."""
        seen = 0
        for item in self.batches:
            arrays = self.fields.batch(item)
            rows = len(next(iter(arrays.values())))
            self.fields.check_batch(rows)
            seen += rows
            yield Slice({name: a[None] for name, a in arrays.items()}, 1, rows)
        if not seen:
            raise ValueError(
                "the iterable gave no batch: a generator can be read only once; "
                "pass a list of batches or a DataLoader"
            )
        self.rows = seen


@dataclass(frozen=True)
class Dataset:
    """The data that `fit` is called with: arrays or tables, or an iterable of batches as `X`."""

    X: Any
    y: Any = None
    sample_weight: Any = None

    @cached_property
    def batched(self) -> bool:
        """Whether `X` yields batches, rather than being an array, a table or a dict of these."""
        X = self.X
        if self.y is not None or isinstance(X, Mapping) or is_table(X):
            return False
        if hasattr(X, "__array__") or hasattr(X, "dtype"):
            return False
        if not isinstance(X, (list, tuple)):
            return isinstance(X, Iterable)
        first = X[0] if X else None
        pair = isinstance(first, list) and first and hasattr(first[0], "shape")  # of a DataLoader
        return isinstance(first, (tuple, Mapping)) or bool(pair)

    @property
    def weighted(self) -> bool:
        """Whether the data have sample weights, or batches that may have some."""
        return self.sample_weight is not None or self.batched

    @property
    def columns(self) -> list[str] | None:
        """The names of the columns of `X`; None unless they are all text."""
        return column_names(self.X)

    def arrays(self, fields: Fields) -> dict[str, np.ndarray]:
        """Return the checked arrays by input name, those of all batches concatenated.

        Raises:
            ValueError: data that the inputs do not accept, or no batch.
        """
        if not self.batched:
            return fields.arrays(self.X, self.y, self.sample_weight)
        batches = [fields.batch(item) for item in self._batches()]
        if not batches:
            raise ValueError("the iterable gave no batch")
        return {name: np.concatenate([b[name] for b in batches]) for name in fields.fields}

    def source(
        self, fields: Fields, batch_size: int, rng: np.random.Generator
    ) -> ArraySource | IterableSource:
        """Return the source of batches.

        Raises:
            ValueError: data that the inputs do not accept, or fewer rows than a batch has.
        """
        if self.batched:
            return IterableSource(self._batches(), fields)
        arrays = self.arrays(fields)
        rows = len(next(iter(arrays.values())))
        if batch_size > rows:
            raise ValueError(f"batch_size={batch_size} is more than the {rows} rows of data")
        fields.check_batch(batch_size)
        return ArraySource(arrays, batch_size, rng)

    def _batches(self) -> Iterable[Any]:
        if self.sample_weight is not None:
            raise ValueError(
                "an iterable of batches brings its sample weights: (X, y, sample_weight)"
            )
        return self.X
