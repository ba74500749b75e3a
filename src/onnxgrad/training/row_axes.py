"""The axes of the rows in the arrays for the inputs of a model.

A model may have the rows of an input on any axis. Between the check of data and the session, arrays
have their rows on the first axis, or no rows at all: `rows_first` moves the axis there,
`as_declared` moves it back, and `take_rows` cuts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from onnxgrad.data.arrays import shape_text
from onnxgrad.errors import unknown
from onnxgrad.operators.shapes import Dims, is_stated
from onnxgrad.runtime.values import take_rows
from onnxgrad.training.model_loss import BATCH

AxisByInput = dict[str, int | None]  # the axis of the rows by input; None for an array without rows
Arrays = Mapping[str, np.ndarray]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class RowAxes:
    """Finds the axis of the rows of each input, by `batch_axes` or the symbols of declared shapes.

    - `shapes`: the declared shapes of the inputs, by name.
    - `features`, `label`: the names of the inputs of features, and of the input of labels.
    - `batch_axes`: the axes of the rows that the user passes; None for an input without rows,
      which every batch gets whole.
    - `called`: the symbols in the file of the dimensions that are `BATCH` in `shapes`.

    The rows are a symbolic dimension: the first dimension of the label if a feature has it too, or
    else the first dimension of the first feature. If label and features share a dimension whose
    name has "batch" in it, that is the dimension of rows.
    """

    shapes: Mapping[str, Dims | None]
    features: Sequence[str]
    label: str | None
    batch_axes: Mapping[str, int | None]
    called: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, axis in self.batch_axes.items():
            if name not in self.shapes:
                raise unknown("input in batch_axes", name, self.shapes)
            if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
                raise ValueError(f"batch_axes[{name!r}] must be an integer or None, not {axis!r}")
            shape = self.shapes[name]
            if axis is not None and shape is not None and not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"batch_axes[{name!r}] is {axis}, and the input has {len(shape)} axes: pass an "
                    f"axis below {len(shape)}"
                )

    @cached_property
    def symbol(self) -> str | None:
        """The symbol of the dimension of rows; None if no input declares a symbol."""
        for name, axis in self.batch_axes.items():
            shape = self.shapes[name]
            if axis is not None and shape and isinstance(d := shape[axis], str) and is_stated(d):
                return d
        features = [s for name in self.features if (s := self.shapes[name])]
        label = (self.shapes[self.label] if self.label else None) or ()
        first = next((s[0] for s in features if isinstance(s[0], str)), None)
        own = label[0] if label else None
        if isinstance(own, str) and any(own in s for s in features):
            shared = [d for d in label if isinstance(d, str) and any(d in s for s in features)]
            by_name = {d for d in shared if self._is_named_batch(d)}
            return by_name.pop() if len(by_name) == 1 else own
        if isinstance(own, int) and first not in label:  # a static batch
            return None
        return first

    @cached_property
    def fixed_rows(self) -> int | None:
        """The count of rows of a batch, if the model declares it as a number; otherwise None."""
        if self.symbol is not None:
            return None
        firsts = (s[0] for name, s in self.shapes.items() if s and name not in self.batch_axes)
        return next((d for d in firsts if isinstance(d, int) and d > 0), None)

    def declared_axis(self, name: str) -> int | None:
        """Return the axis of the rows of the input `name`; None if no axis is declared."""
        if name in self.batch_axes:
            return self.batch_axes[name]
        shape, symbol = self.shapes[name], self.symbol
        if self._has_ambiguous_rows or shape is None or symbol is None or shape.count(symbol) != 1:
            return None
        return shape.index(symbol)

    # -- rows on the first axis ---------------------------------------------------------------

    @cached_property
    def moved_axes(self) -> dict[str, int]:
        """The axis of the rows, by input, of the inputs whose rows are not on the first axis."""
        moved = {}
        for name, shape in self.shapes.items():
            axis = self.declared_axis(name)
            if axis and (axis := axis if shape is None else axis % len(shape)):
                moved[name] = axis
        return moved

    def rows_first(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return views of arrays, whose axes are as the model declares, with rows on the first
        axis.
        """
        if not (moved := self.moved_axes):
            return arrays
        return {n: np.moveaxis(a, moved[n], 0) if n in moved else a for n, a in arrays.items()}

    def as_declared(self, arrays: Arrays, rows: int = 0) -> Arrays:
        """Return views of arrays, whose rows are on the axis `rows`, with axes as the model
        declares.

        AxisByInput in front of the rows, such as the axis of batches, keep their places.
        """
        if not self.moved_axes:
            return arrays
        moved = {n: axis if axis < 0 else axis + rows for n, axis in self.moved_axes.items()}
        return {n: np.moveaxis(a, rows, moved[n]) if n in moved else a for n, a in arrays.items()}

    def names_without_rows(self, arrays: Arrays, cut: bool = False) -> set[str]:
        """Return the names of the arrays that have no rows, which every batch gets whole.

        All other arrays have their rows on the first axis. `cut`: whether the caller cuts the rows
        into batches.

        Raises:
            ValueError: the declared shapes allow several axes; or the rows are to be cut, and an
                array that is taken to have no rows has an axis that may be the rows.
        """
        lengths = {name: array.shape for name, array in self.as_declared(arrays).items()}
        axes = self.find_row_axes(lengths)
        if cut:
            self._check_arrays_without_rows(lengths, axes)
        return {name for name, axis in axes.items() if axis is None}

    def take_rows(self, arrays: Arrays, rows: slice | np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows `rows` of arrays whose rows are on the first axis.

        Arrays without rows are returned whole.

        Raises:
            ValueError: the declared shapes allow several axes.
        """
        return take_rows(arrays, rows, self.names_without_rows(arrays))

    # -- the axis of the rows -----------------------------------------------------------------

    def find_row_axes(self, lengths: Mapping[str, Shape]) -> AxisByInput:
        """Return the axis of the rows of each array, by input.

        An input that declares no axis of rows has its rows on its first axis if that is as long as
        there are rows; otherwise, it is the same for every batch.

        Args:
            lengths: the shapes of the arrays, by input.

        Raises:
            ValueError: the declared shapes allow several axes.
        """
        key, cached = tuple(lengths.items()), self._last_row_axes
        if (axes := cached.get(key)) is None:
            axes = self._compute_row_axes(lengths)
            cached.clear()
            cached[key] = axes
        return axes.copy()

    @cached_property  # `lru_cache` of a method would be part of a cycle of references
    def _last_row_axes(self) -> dict[Any, AxisByInput]:
        """The last result of `_compute_row_axes`, by the pairs (input, shape)."""
        return {}

    def _compute_row_axes(self, lengths: Mapping[str, Shape]) -> AxisByInput:
        """Return the axis of the rows of each array by input, as `find_row_axes` explains."""
        self._check_unambiguous_row_axis(lengths)
        axes: AxisByInput = {}
        for name, shape in lengths.items():
            if name in self.batch_axes or self.declared_axis(name) is not None:
                axes[name] = self.declared_axis(name)
            elif self.shapes[name] == () and not shape:
                axes[name] = None
        rows = self._count_rows(lengths, axes)
        for name, shape in lengths.items():
            if name not in axes:
                required = name not in self.features or self.symbol is None
                as_long = shape[:1] == (rows,) and (self.shapes[name] or (None,))[0] != rows
                axes[name] = 0 if required or as_long else None
        if not any(axes.get(name) is not None for name in self.features):
            axes |= {n: 0 for n in self.features if lengths.get(n) and n not in self.batch_axes}
        return {name: axes[name] for name in lengths}

    def _check_arrays_without_rows(self, lengths: Mapping[str, Shape], axes: AxisByInput) -> None:
        """Raise `ValueError` if an array that has no rows by `axes` has an axis as long as the
        rows.

        The array might have its rows on that axis.
        """
        rows = self._count_rows(lengths, axes)
        known = {
            d for name, axis in axes.items() if axis is not None for d in self._declared_dims(name)
        }
        for name in (n for n, axis in axes.items() if axis is None and n not in self.batch_axes):
            declared = self.shapes[name] or (None,) * len(lengths[name])
            for axis, (d, length) in enumerate(zip(declared, lengths[name], strict=False)):
                if length == rows and (d is None or (isinstance(d, str) and d not in known)):
                    raise ValueError(
                        f"axis {axis} of {name!r} {shape_text(lengths[name])} is as long as there "
                        f"are rows: pass batch_axes={{{name!r}: {axis}}} if this is the axis of "
                        f"rows, or batch_axes={{{name!r}: None}} if every batch gets all of it"
                    )

    def _count_rows(self, lengths: Mapping[str, Shape], axes: AxisByInput) -> int:
        """Return the count of rows of arrays with the shapes `lengths`.

        It is the length of a declared row axis, or else of the first axis of the label or the first
        feature.
        """
        for name, axis in axes.items():
            if axis is not None and len(lengths[name]) > axis:
                return lengths[name][axis]
        names = [n for n in (self.label, *self.features) if n is not None and lengths.get(n)]
        return lengths[names[0]][0] if names else 0

    @cached_property
    def _has_ambiguous_rows(self) -> bool:
        """Whether features and label begin with different symbols; either may be the rows."""
        symbol = self.symbol
        if symbol is None or any(a is not None for a in self.batch_axes.values()):
            return False
        features = [s for name in self.features if (s := self.shapes[name])]
        first = next((s[0] for s in features if isinstance(s[0], str)), symbol)
        if self._is_named_batch(symbol) and not self._is_named_batch(first):
            return False
        return first != symbol and not any(s[0] == symbol for s in features)

    def _check_unambiguous_row_axis(self, lengths: Mapping[str, Shape]) -> None:
        """Raise `ValueError` if the declared shapes leave open which axis is the axis of rows."""
        if self._has_ambiguous_rows:
            inputs = [*self.features, *([self.label] if self.label else [])]
            names = [n for n in inputs if self.symbol in self._declared_dims(n)]
            shown = ", ".join(f"{n!r} {self._shape_text(n)}" for n in names)
            raise ValueError(
                f"which axis is the axis of rows? The model declares {shown}: name it with "
                f"batch_axes={{{names[0]!r}: axis}}, or pass batches as dicts"
            )
        for name in lengths if self.symbol is not None else ():
            if name not in self.batch_axes and self._declared_dims(name).count(self.symbol) > 1:
                raise ValueError(
                    f"{name!r} declares the rows on several axes {self._shape_text(name)}: name "
                    f"the axis of rows with batch_axes={{{name!r}: axis}}, or pass None as axis if "
                    f"every batch gets all of {name!r}"
                )

    def _declared_dims(self, name: str) -> Dims:
        """Return the declared dimensions of the input `name`; () if its rank is unknown."""
        return self.shapes.get(name) or ()

    def _shape_text(self, name: str) -> str:
        """Return the declared shape of an input as text, with the symbols of the file."""
        rows = self.called[0] if len(self.called) == 1 else "rows"
        return shape_text([rows if d == BATCH else d for d in self._declared_dims(name)])

    def _is_named_batch(self, symbol: Any) -> bool:
        """Return whether the name of the dimension `symbol` in the file has "batch" in it."""
        names = self.called if symbol == BATCH else [symbol]
        return any(isinstance(name, str) and "batch" in name.lower() for name in names)


def count_rows(arrays: Arrays, axes: AxisByInput) -> int:
    """Return the count of rows that all arrays have on their axes of rows, `axes`.

    Raises:
        ValueError: the counts of arrays differ, or no array has rows.
    """
    counts = {n: arrays[n].shape[axis] for n, axis in axes.items() if axis is not None}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"the inputs have different numbers of rows, {counts}: pass arrays with equally many "
            "rows; if they have none, as the model takes one example, pass batches as dicts"
        )
    if not counts:
        raise ValueError(
            "no input has rows: pass batches as dicts, or name the axis of rows with "
            "batch_axes={input: axis}"
        )
    return next(iter(counts.values()))
