"""Data: what the user gives, as checked arrays by input name, and the batches made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import printable, unknown
from onnxgrad.graph.shapes import Dims, dims
from onnxgrad.losses import LABELS
from onnxgrad.small import to_numbers


@dataclass(frozen=True)
class Field:
    """What one data input of the model takes."""

    name: str
    dtype: np.dtype
    shape: Dims | None
    classes: int | None = None
    ignored: int | None = None
    allowed: tuple[str, Callable[[np.ndarray], np.ndarray]] | None = None  # see `losses.LABELS`

    def check(self, given: Any) -> np.ndarray:
        """Return `given` as the array that the input takes.

        Raises:
            ValueError: it holds text, NaN, infinity or numbers that the input's type cannot hold,
                labels out of the class range, or has another shape; the message names rows.
        """
        array = to_numbers(self.name, given)
        if array.ndim == 0:
            raise ValueError(f"{self.name!r} must have one entry per row, not a single number")
        if len(array) == 0:
            raise ValueError(f"{self.name!r} is empty: it has no row")
        array = self._fit_shape(array)
        with np.errstate(all="ignore"):
            made = array.astype(self.dtype, copy=False)
        if self.dtype.kind in "iub":
            _refuse(made != array, f"{self.name!r} must hold {self.dtype}; other values")
        else:
            _refuse(~np.isfinite(made), f"{self.name!r}, as {self.dtype}, holds NaN or infinity")
        if self.classes is not None:
            outside = (made < 0) | (made >= self.classes)
            if self.ignored is not None:
                outside &= made != self.ignored
            _refuse(outside, f"{self.name!r} holds labels outside 0..{self.classes - 1}")
        if self.allowed is not None:
            text, test = self.allowed
            _refuse(~test(made), f"{self.name!r} must hold labels {text}; others")
        return made

    def _fit_shape(self, array: np.ndarray) -> np.ndarray:
        if self.shape is None:
            return array
        missing = len(self.shape) - array.ndim
        if missing == 1 and self.shape[-1] in (1, None):
            array = array[..., None]
        elif missing == -1 and array.shape[-1] == 1:
            array = array[..., 0]
        fixed = zip(self.shape[1:], array.shape[1:], strict=False)
        if len(self.shape) != array.ndim or any(isinstance(a, int) and a != b for a, b in fixed):
            wanted = ", ".join(["rows", *map(printable, self.shape[1:])])
            raise ValueError(f"{self.name!r} must have shape ({wanted}), not {array.shape}")
        return array


def _refuse(bad: np.ndarray, what: str) -> None:
    """Raise if any element is `bad`, naming the rows."""
    rows = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))
    if rows.size:
        listed = ", ".join(map(str, rows[:10])) + (", ..." if rows.size > 10 else "")
        raise ValueError(f"{what} in {rows.size} of {len(bad)} rows: {listed}")


class Fields:
    """The data inputs of a model with a loss: features, label, row weights."""

    def __init__(
        self, inputs: list[ir.Value], weight: str | None, facts: Mapping[str, Any]
    ) -> None:
        names = [str(x.name) for x in inputs]
        self.weight = weight if weight in names else None
        rest = [name for name in names if name != self.weight]
        self.label = facts.get("label") or ("label" if "label" in rest else rest[-1])
        if len(rest) == 1 and facts.get("label") not in rest and rest[0] != "label":
            self.label = None  # the loss needs no label
        self.features = [name for name in rest if name != self.label]
        self.mean = facts.get("reduction") == "mean"
        self.fields = {}
        for x, name in zip(inputs, names, strict=True):
            assert x.dtype is not None
            limits: dict[str, Any] = {}
            if name == self.label:
                limits = {"classes": facts.get("classes"), "ignored": facts.get("ignore_index")}
                limits["allowed"] = LABELS.get(facts.get("loss", ""))
            shape = dims(x)
            if name == self.weight and shape is None:
                shape = (None,)  # add_loss_output takes (rows,) and (rows, 1) alike
            self.fields[name] = Field(name, x.dtype.numpy(), shape, **limits)
        firsts = (field.shape[0] for field in self.fields.values() if field.shape)
        self.fixed_rows = next((d for d in firsts if isinstance(d, int)), None)

    def arrays(self, X: Any, y: Any = None, sample_weight: Any = None) -> dict[str, np.ndarray]:
        """Return checked arrays by input name.

        Raises:
            ValueError: an unknown or missing input, arrays of different lengths, or an array that
                its input does not take.
        """
        given = self._by_name(X)
        if y is not None:
            if self.label is None:
                raise ValueError("the model has no label input: pass y=None")
            given[self.label] = y
        if sample_weight is not None:
            if self.weight is None:
                raise ValueError(
                    "the loss takes no row weights: build it with "
                    "add_loss_output(..., weight_name='weight')"
                )
            given[self.weight] = sample_weight
        return self._checked(given, list(self.fields))

    def inputs(self, X: Any) -> dict[str, np.ndarray]:
        """Return the checked arrays of the inputs beside label and row weights."""
        return self._checked(self._by_name(X), self.features)

    def _checked(self, given: Mapping[str, Any], names: list[str]) -> dict[str, np.ndarray]:
        for name in given:
            if name not in names:
                raise unknown("input", name, names)
        missing = [name for name in names if name not in given and name != self.weight]
        if missing:
            raise ValueError(f"no data for the inputs {missing}; given: {list(given)}")
        made = {name: self.fields[name].check(value) for name, value in given.items()}
        if self.weight in names and self.weight not in made:
            ones = np.ones(len(next(iter(made.values()))))
            made[self.weight] = self.fields[self.weight].check(ones)
        counts = {name: len(array) for name, array in made.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"the inputs have different numbers of rows: {counts}")
        rows = min(counts.values())
        if self.fixed_rows and rows % self.fixed_rows:
            raise ValueError(
                f"the model has a fixed batch of {self.fixed_rows} rows: give a multiple of it, "
                f"not {rows} rows, or export it with a symbolic batch"
            )
        return {name: made[name] for name in names}

    def _by_name(self, X: Any) -> dict[str, Any]:
        if isinstance(X, Mapping):
            return dict(X)
        if len(self.features) != 1:
            raise ValueError(f"the model has several inputs: pass a dict of {self.features}")
        return {self.features[0]: X}

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

    def gathered(self, X: Any, y: Any = None) -> dict[str, np.ndarray]:
        """Return the checked arrays, those of an iterable of batches put together."""
        if not is_iterable_of_batches(X, y):
            return self.arrays(X, y)
        batches = [self.batch(item) for item in X]
        if not batches:
            raise ValueError("the iterable gave no batch")
        return {name: np.concatenate([b[name] for b in batches]) for name in self.fields}


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
            picked = order[start : start + batches * length]
            start += batches * length
            taken = {
                name: array[picked].reshape(batches, length, *array.shape[1:])
                for name, array in self.arrays.items()
            }
            yield Slice(taken, batches, length)


class IterableSource:
    """Batches as an iterable gives them, a torch DataLoader for one; read anew every epoch."""

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
                "the iterable gave no batch: a generator can be read once only; "
                "pass a list of batches or a DataLoader"
            )
        self.rows = seen


def is_iterable_of_batches(X: Any, y: Any) -> bool:
    """Tell whether `X` yields batches, rather than being an array or a dict of arrays."""
    if y is not None or isinstance(X, Mapping) or hasattr(X, "__array__") or hasattr(X, "dtype"):
        return False
    if not isinstance(X, (list, tuple)):
        return isinstance(X, Iterable)
    first = X[0] if X else None
    pair = isinstance(first, list) and first and hasattr(first[0], "shape")  # of a DataLoader
    return isinstance(first, (tuple, Mapping)) or bool(pair)


def columns(X: Any) -> list[str] | None:
    """Return the names of the columns of a table, None for what has no such names."""
    names = getattr(X, "columns", ())
    return list(names) if len(names) and all(isinstance(n, str) for n in names) else None


def same_columns(given: Sequence[str] | None, fitted: Sequence[str] | None) -> None:
    """Raise if the columns of a table are others than those in `fit`, or in another order."""
    if given is None or fitted is None or list(given) == list(fitted):
        return
    pairs = zip_longest(given, fitted)
    place, (new, old) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    raise ValueError(f"column {place} is {new!r}, and was {old!r} in fit: give the same, in order")


def make_source(
    fields: Fields, X: Any, y: Any, sample_weight: Any, batch_size: int, rng: np.random.Generator
) -> ArraySource | IterableSource:
    """Return where the batches come from.

    Raises:
        ValueError: data that the inputs do not take, or not in batches of this size.
    """
    if is_iterable_of_batches(X, y):
        if sample_weight is not None:
            raise ValueError("an iterable of batches brings its row weights: (X, y, sample_weight)")
        return IterableSource(X, fields)
    arrays = fields.arrays(X, y, sample_weight)
    rows = len(next(iter(arrays.values())))
    if batch_size > rows:
        raise ValueError(f"batch_size={batch_size} is more than the {rows} rows given")
    fields.check_batch(batch_size)
    return ArraySource(arrays, batch_size, rng)
