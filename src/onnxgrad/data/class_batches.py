"""A reader of batches of P classes with K rows each, for losses of embeddings."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.data.readers import DiskArrays, IndexedReader, Reader, describe_arrays, keep_arguments
from onnxgrad.errors import argument
from onnxgrad.operators.shapes import Dims


@keep_arguments(data="data labels")
def p_by_k(data: Any, labels: Any = None, classes: int = 8, rows: int = 4) -> ClassBatches:
    """Return `data` in batches of P classes with K rows each, for losses of embeddings.

    Such losses compare rows of one class with each other and with rows of other classes, so that a
    batch needs both (Hermans et al. 2017, arXiv:1703.07737, section 2). Classes take turns, and so
    do the rows of each class: all classes are equally frequent. An epoch has as many batches as all
    rows fill; rows of large classes may be missing in it, and rows of small classes be repeated.
    `fit` needs no `batch_size`. In evaluations, all rows are in their order.

    Args:
        data: an `IndexedReader`, such as `image_folder` returns; or an array, or a dict of arrays.
        labels: class of each row, (N,) int64; None: `data.labels`, as `image_folder` has them.
        classes: P, at least 2.
        rows: K, at least 2: the number of different rows of a class in a batch.

    Returns:
        A reader, which `fit(reader)` takes as X.

    Raises:
        ValueError: different numbers of labels and rows, fewer than P classes, or a class with
            fewer than K rows.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> X, labels = np.arange(12.0), np.repeat([0, 1, 2], 4)
        >>> reader = og.data.p_by_k(X, labels, classes=2, rows=3)
        >>> [np.unique(y, return_counts=True)[1].tolist() for X, y in reader.batches(1, 7, 0)]
        [[3, 3], [3, 3]]
    """
    labels = getattr(data, "labels", None) if labels is None else labels
    if labels is None:
        raise ValueError(f"a {type(data).__name__} has no labels: pass {argument('labels')}")
    rows_of_data = data if isinstance(data, IndexedReader) else DiskArrays(data)
    reader = ClassBatches(rows_of_data, np.asarray(labels), classes, rows)
    reader.check_sizes()
    return reader


class ClassBatches(Reader):
    """Rows of `data` in batches of P classes with K rows: the reader of `p_by_k`."""

    rows: int
    count: int

    def __init__(self, data: IndexedReader, labels: np.ndarray, classes: int, rows: int) -> None:
        if labels.shape != (data.rows,) or labels.dtype.kind not in "iub":
            raise ValueError(
                f"labels must be one integer for each of the {data.rows} rows, not {labels.dtype} "
                f"of shape {labels.shape}"
            )
        self.data, self.labels, self.sizes = data, labels.astype(np.int64), (classes, rows)
        self.rows, self.count = data.rows, max(1, data.rows // max(1, classes * rows))
        self._members = {int(c): np.flatnonzero(labels == c) for c in np.unique(labels)}

    def check_sizes(self) -> None:
        """Raise `ValueError` if the data have fewer than P classes, or a class has fewer than K
        rows.
        """
        classes, rows = self.sizes
        if not 2 <= classes <= len(self._members):
            given, most = argument("classes", classes), len(self._members)
            raise ValueError(f"{given} must be from 2 to {most}, the number of classes of the data")
        names = getattr(self.data, "classes", None)
        for label, members in self._members.items():
            if not 2 <= rows <= len(members):
                name = label if names is None else names[label]
                raise ValueError(
                    f"{argument('rows', rows)} must be from 2 to {len(members)}, the rows of class "
                    f"{name!r}: ask for fewer, or leave out this class"
                )

    def batches(self, size: int, seed: int | None, skip: int) -> Iterator[Any]:
        """Yield the batches of one pass: P by K rows if there is a `seed`, else `size` rows in the
        order of the data.
        """
        if seed is None:
            for start in range(skip * size, self.rows, size):
                yield self._labeled_batch(np.arange(start, min(start + size, self.rows)), None)
            return
        self.check_sizes()  # a subset has fewer rows
        rng, classes, rows = np.random.default_rng(seed), *self.sizes
        every = [*self._members]
        queue: list[int] = []
        queues: dict[int, list[int]] = {c: [] for c in every}
        for number in range(self.count):
            chosen = _draw_indices_evenly(queue, every, classes, rng)
            drawn = [_draw_indices_evenly(queues[c], self._members[c], rows, rng) for c in chosen]
            if number >= skip:
                yield self._labeled_batch(np.concatenate(drawn), seed)

    def _labeled_batch(self, indices: np.ndarray, seed: int | None) -> tuple[Any, np.ndarray]:
        """Return the batch of features and labels of the rows with these indices."""
        batch = self.data.take(indices, seed)
        return (batch[0] if isinstance(batch, tuple) else batch), self.labels[indices]

    def for_inputs(self, shapes: Mapping[str, Dims | None]) -> ClassBatches:
        """Return the reader with its data adapted to inputs of these declared shapes."""
        return self._copy_with_data(self.data.for_inputs(shapes), self.labels)

    @property
    def class_names(self) -> Sequence[str]:
        """The names of the classes, ordered by class index; empty if classes have no names."""
        return self.data.class_names

    @property
    def remembered(self) -> Mapping[str, list[Any]]:
        """The metadata entries {key: value} that say how a trained model's data become numbers."""
        return self.data.remembered

    def for_dtypes(self, dtypes: Mapping[str, np.dtype]) -> ClassBatches:
        """Return the reader with its data adapted to inputs of these dtypes."""
        return self._copy_with_data(self.data.for_dtypes(dtypes), self.labels)

    def subset(self, numbers: np.ndarray) -> ClassBatches | None:
        """Return the reader of the rows with these indices, which may be too few for batches of P
        classes with K rows.
        """
        part = self.data.subset(numbers)
        if part is None and isinstance(self.data, DiskArrays):
            part = DiskArrays(self.data.take(numbers, None)[0])
        return None if part is None else self._copy_with_data(part, self.labels[numbers])

    def _copy_with_data(self, data: Any, labels: np.ndarray) -> ClassBatches:
        """Return a reader of other data and labels, with the same P and K."""
        return ClassBatches(copy.copy(data), labels, *self.sizes)

    def describe(self) -> dict[str, Any]:
        """Return P and K, the description of the data, and a digest of the labels."""
        labels = describe_arrays("labels", {"labels": self.labels})["digest"]
        entries = {"kind": "classes", "rows": self.rows, "sizes": [*self.sizes], "labels": labels}
        return entries | {"data": self.data.describe()}


def _draw_indices_evenly(
    queue: list[int], candidates: Sequence[int] | np.ndarray, count: int, rng: np.random.Generator
) -> list[int]:
    """Return `count` of the `candidates`, drawn at random so that each is drawn once before any is
    drawn again.

    `queue` holds the elements that wait to be drawn, from the front, where they are removed. If it
    is too short, all `candidates` that do not wait are first appended in random order, so that the
    drawn elements differ.
    """
    if len(queue) < count:
        waiting = set(queue)
        queue += [i for i in rng.permutation(candidates).tolist() if i not in waiting]
    taken = queue[:count]
    del queue[:count]
    return taken
