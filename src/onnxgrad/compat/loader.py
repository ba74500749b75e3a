"""`OrtDataLoader`: batches for a user's training loop, as arrays, OrtValues or bound inputs."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxgrad.data.arrays import to_numbers
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.values import copy_to_ortvalue


class OrtDataLoader:
    """Draws batches of rows from arrays, each row once per pass; the last batch may be shorter.

    Args:
        X: features, (N, ...), kept in their dtype.
        y: targets, (N, ...), kept in their dtype and with their columns; (N,) becomes (N, 1).
        sample_weight: sample weights, (N,) or (N, 1), or None; yielded as (N,).
        batch_size: rows of a batch; 0 or less for all rows.
        device: the device of OrtValues: "cpu", "cuda" or "cuda:1", a GPU by its number.
        random_iter: whether rows are drawn in a new random order for every pass.
        random_state: seed of the random orders, or a `numpy.random.Generator`; None draws a seed.

    Raises:
        ValueError: arrays of different lengths, empty arrays, or arrays that are not numeric.
        ProviderError: the installed onnxruntime has no execution provider for `device`.

    Examples:
        >>> import numpy as np
        >>> from onnxgrad.compat import OrtDataLoader
        >>> X = np.arange(10, dtype=np.float32).reshape(5, 2)
        >>> loader = OrtDataLoader(X, X.sum(axis=1), batch_size=2, random_iter=False)
        >>> [(x.shape, y.shape) for x, y in loader.iter_numpy()]
        [((2, 2), (2, 1)), ((2, 2), (2, 1)), ((1, 2), (1, 1))]
    """

    def __init__(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        batch_size: int = 20,
        device: str = "cpu",
        random_iter: bool = True,
        random_state: int | np.random.Generator | None = None,
    ) -> None:
        arrays = {"X": _contiguous_array("X", X), "y": _contiguous_array("y", y)}
        if arrays["y"].ndim == 1:
            arrays["y"] = arrays["y"].reshape(-1, 1)
        if sample_weight is not None:
            weight = _contiguous_array("sample_weight", sample_weight)
            if weight.size != len(weight):
                raise ValueError(f"'sample_weight' must have the shape (N,), not {weight.shape}")
            arrays["sample_weight"] = weight.reshape(-1)
        counts = {name: len(array) for name, array in arrays.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"the arrays have {counts} rows: pass the same number of rows")
        self.batch_size = operator.index(batch_size)
        self._device = Device.of(device).check()
        self.device, self.random_iter = device, random_iter
        self._arrays = tuple(arrays.values())
        self._rng = np.random.default_rng(random_state)

    def __len__(self) -> int:
        """Return the count of rows."""
        return len(self._arrays[0])

    def __repr__(self) -> str:
        return (
            f"OrtDataLoader(..., ..., batch_size={self.batch_size}, device={self.device!r}, "
            f"random_iter={self.random_iter})"
        )

    @property
    def data(self) -> tuple[np.ndarray, ...]:
        """The arrays (X, y) or (X, y, sample weights) from which batches are drawn."""
        return self._arrays

    @property
    def desc(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """The shape and dtype of each array of `data`."""
        return [(array.shape, array.dtype) for array in self._arrays]

    def iter_numpy(self) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield batches (X, y) or (X, y, weight) of arrays, which are views unless `random_iter` is
        set.
        """
        order = self._rng.permutation(len(self)) if self.random_iter else None
        count = self.batch_size if self.batch_size > 0 else len(self)
        for start in range(0, len(self), count):
            rows = slice(start, start + count)
            yield tuple(a[rows] if order is None else a[order[rows]] for a in self._arrays)

    def iter_ortvalue(self) -> Iterator[tuple[ort.OrtValue, ...]]:
        """Yield batches as `onnxruntime.OrtValue`s on the device."""
        for batch in self.iter_numpy():
            yield tuple(copy_to_ortvalue(array, self._device) for array in batch)

    def iter_bind(self, bind: ort.IOBinding, names: Sequence[str]) -> Iterator[int]:
        """Bind the arrays of each batch as inputs of the IOBinding `bind`, and yield the batch's
        row count.

        Args:
            bind: the binding that `session.io_binding()` returns.
            names: names of the inputs for X, y and the sample weights. Another name may follow, of
                an input that the caller binds, such as a learning rate.

        Raises:
            ValueError: another number of names.
        """
        count = len(self._arrays)
        if isinstance(names, str) or len(names) not in (count, count + 1):
            raise ValueError(
                f"iter_bind needs a list of {count} or {count + 1} names of inputs, not {names!r}"
            )
        return self._bind_batches(bind, names)

    def _bind_batches(self, bind: ort.IOBinding, names: Sequence[str]) -> Iterator[int]:
        """Bind the arrays of each batch to the inputs `names`, and yield the batch's row count."""
        for batch in self.iter_ortvalue():
            for name, value in zip(names, batch, strict=False):
                bind.bind_ortvalue_input(name, value)
            yield batch[0].shape()[0]


def _contiguous_array(name: str, data: Any) -> np.ndarray:
    """Return `data` as a contiguous array of numbers; raise `ValueError` if it has no rows."""
    array = to_numbers(name, data)
    if array.ndim == 0 or array.size == 0:
        raise ValueError(f"{name!r} has the shape {array.shape}: pass at least one row")
    return np.ascontiguousarray(array)
