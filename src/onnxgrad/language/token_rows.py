"""`TokenRows`: a reader of rows of tokens, padded batch by batch for the inputs of an encoder."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.data.padding import by_length, pad_sequences
from onnxgrad.data.readers import Reader, describe_arrays
from onnxgrad.language.encoding import IGNORED
from onnxgrad.operators.shapes import Dims

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
DEFAULT_LENGTH = 512  # most tokens of a row, if neither the user nor the tokenizer says a number


class TokenRows(Reader):
    """A reader of rows of tokens and their labels, in batches of rows of similar length.

    A batch is padded to its longest row, or to the length that the model declares. Without an input
    `attention_mask`, the rows of a batch have one length, so that no row is padded.

    Args:
        ids: the ids of the tokens of each row, (T,).
        types: the number of the text to which each token belongs, (T,) for each row.
        labels: an integer for each row, or (T,) for each row; None: no labels.
        fill: the id of padding.
    """

    rows: int
    pads = True
    _has_warned = False  # whether the user was warned that the model does not mask padding

    def __init__(
        self,
        ids: Sequence[np.ndarray],
        types: Sequence[np.ndarray],
        labels: Sequence[Any] | None,
        fill: int,
    ) -> None:
        self._ids, self._types, self._labels, self._fill = ids, types, labels, fill
        self.rows = len(ids)
        self._padded = self._padding_reader(INPUTS, None) if ids else None

    def _padding_reader(self, inputs: Collection[str], width: int | None) -> Reader:
        """Return a reader of batches of `inputs`, padded to `width` tokens or the longest row."""
        X = {"input_ids": self._ids, "token_type_ids": self._types}
        values, labels = {"input_ids": self._fill, "token_type_ids": 0}, self._labels
        mask = "attention_mask" if width is None and "attention_mask" in inputs else None
        if width is not None:
            lengths = [len(ids) for ids in self._ids]
            X = {name: [*pad_sequences(X[name], values[name], width)[0]] for name in X}
            counted = np.arange(width) < np.array(lengths)[:, None]
            X["attention_mask"] = [*counted.astype(np.int64)]
            if labels is not None and np.ndim(labels[0]):
                labels = [*pad_sequences(labels, IGNORED, width)[0]]
        X = {name: column for name, column in X.items() if name in inputs}
        value = {"input_ids": self._fill} if mask else None
        return by_length(X, labels, mask=mask, value=value, y_value=IGNORED)

    def for_inputs(self, shapes: Mapping[str, Dims | None]) -> TokenRows:
        """Return the reader for a model's inputs, padded to the model's row length if it is fixed.

        Raises:
            ValueError: the model has other inputs.
        """
        if extra := sorted({*shapes}.difference(INPUTS)):
            raise ValueError(f"the model has the inputs {extra}: texts need some of {[*INPUTS]}")
        stated = shapes.get("input_ids") or ()
        width = next((n for n in stated[1:2] if isinstance(n, int)), None)
        new = copy.copy(self)
        if width is not None and "attention_mask" not in shapes and not self._has_warned:
            new._has_warned = True
            warnings.warn(
                f"the model takes {width} tokens, and has no input attention_mask: padding changes "
                "the scores of shorter texts, unless the model itself masks it",
                stacklevel=2,
            )
        if self.rows:
            new._padded = self._padding_reader(shapes, width).for_inputs(shapes)
        return new

    @property
    def lengths(self) -> np.ndarray:
        """The token count of each row, int64."""
        return np.array([len(ids) for ids in self._ids], np.int64)

    @property
    def order(self) -> np.ndarray | None:
        """The row indices in the order of unshuffled batches; None if they are 0, 1, 2, ..."""
        return None if self._padded is None else self._padded.order

    def count_batches(self, size: int) -> int | None:
        """Return the count of batches of `size` rows in a pass."""
        return 0 if self._padded is None else self._padded.count_batches(size)

    def batches(self, size: int, seed: int | None, skip: int) -> Iterator[Any]:
        """Yield the batches of one pass, in which rows of similar length are together."""
        yield from () if self._padded is None else self._padded.batches(size, seed, skip)

    def subset(self, numbers: np.ndarray) -> TokenRows:
        """Return the reader of the rows whose indices are `numbers`."""
        new = copy.copy(self)
        new._ids = [self._ids[i] for i in numbers]
        new._types = [self._types[i] for i in numbers]
        new._labels = None if self._labels is None else [self._labels[i] for i in numbers]
        new.rows = len(numbers)
        new._padded = None if self._padded is None else self._padded.subset(numbers)
        return new

    def describe(self) -> dict[str, Any]:
        """Return the row count, and digests of the tokens, labels and lengths of the rows."""
        entries = {} if self._padded is None else self._padded.describe()
        parts = list(self._ids)
        if self._labels is not None:
            pairs = zip(self._ids, self._labels, strict=True)
            parts = [part for ids, label in pairs for part in (ids, np.atleast_1d(label))]
        tokens = describe_arrays("", {"": np.concatenate([*parts, np.zeros(1, np.int64)])})
        return entries | {"kind": "rows of tokens", "tokens": tokens["digest"]}
