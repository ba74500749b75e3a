"""Texts that belong together, as tokens for one encoder."""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.data.padding import pad_sequences
from onnxgrad.data.readers import IndexedReader, describe_arrays, with_arguments
from onnxgrad.language.records import Record, column_records
from onnxgrad.language.token_rows import INPUTS
from onnxgrad.language.tokenizer import as_tokenizer
from onnxgrad.operators.shapes import Dims


@with_arguments(data="source tokenizer")
def paired_texts(source: Any, tokenizer: Any, max_length: int = 128) -> PairedTexts:
    """Return texts that belong together as data for losses of embeddings.

    All texts of a row go through one model: they are consecutive rows of a batch, which has
    `input_ids`, `attention_mask` and `token_type_ids`, those that the model has. `batch_size`
    counts rows of `source`. Anchor and positive have one label, int64, which they share with rows
    of the same anchor; each negative has a label of its own. With scores, these are the labels of
    both, float32. Texts alone have no labels.

    Args:
        source: a CSV, TSV, JSON-lines or Parquet file, a list of dicts, a table or a dataset of
            Hugging Face, with the columns `anchor` and `positive`, and after these `negative`,
            `negative_2`..., or `score`; or a list of texts.
        tokenizer: the path of a folder, a `tokenizer.json` or `vocab.txt`, or an object of
            tokenizers or transformers.
        max_length: tokens of a text; longer ones are cut.

    Returns:
        A reader, which `fit(reader)` takes as X; see `PairedTexts` for its attributes.

    Raises:
        ValueError: a file that cannot be read, or a row of another form; the message names it.
        ImportError: the library tokenizers is not installed.

    Examples:
        >>> import onnxgrad as og
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> words = Tokenizer(models.WordLevel({"?": 0, "red": 1, "rot": 2}, unk_token="?"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> reader = og.language.paired_texts([{"anchor": "red", "positive": "rot"}], words)
        >>> X, labels = next(reader.batches(1, None, 0))
        >>> X["input_ids"].tolist(), labels.tolist()
        ([[1], [2]], [0, 0])
    """
    is_path = isinstance(source, (str, os.PathLike))
    rows = [*column_records(source)]
    if not rows:
        raise ValueError(
            f"there is no text: {os.fspath(source) if is_path else source!r} has no rows"
        )
    backend = as_tokenizer(tokenizer)
    if all(isinstance(row, str) for _, row in rows):
        texts, kind, labels, each = [row for _, row in rows], "texts", None, 1
    else:
        names, scores = _columns(rows)
        texts, each = [row[name] for _, row in rows for name in names], len(names)
        kind = "scores" if scores else "pairs"
        anchors = [row["anchor"] for _, row in rows]
        labels = np.array(scores, np.float32).repeat(2) if scores else _labels(anchors, each)
    own = type(backend.backend).from_str(backend.backend.to_str())
    own.enable_truncation(max_length)
    return PairedTexts(own.encode_batch(texts), labels, each, kind, backend.fill_id)


class PairedTexts(IndexedReader):
    """Rows of texts as tokens; what `paired_texts` returns.

    Attributes:
        kind: "pairs", "scores", or "texts" of one each.
        each: number of texts of a row.
        labels: of the texts, (rows * each,), or None.
    """

    pads = True

    def __init__(
        self, tokens: Sequence[Any], labels: np.ndarray | None, each: int, kind: str, fill: int
    ) -> None:
        self._tokens, self.labels, self.each, self.kind = tokens, labels, each, kind
        self.rows, self._fill = len(tokens) // each, fill
        self._width: int | None = None
        self._names: Sequence[str] = INPUTS

    def for_inputs(self, shapes: Mapping[str, Dims | None]) -> PairedTexts:
        """Return the reader for the inputs of a model, and the number of tokens that it states.

        Raises:
            ValueError: it has other inputs.
        """
        if "input_ids" not in shapes or (others := {*shapes} - {*INPUTS}):
            found = sorted(shapes) if "input_ids" not in shapes else sorted(others)
            raise ValueError(f"texts are for models with inputs {list(INPUTS)}: not {found}")
        if "attention_mask" not in shapes:
            warnings.warn(
                "the model has no input attention_mask: what fills shorter texts changes their "
                "embeddings, unless the model itself leaves it out",
                stacklevel=2,
            )
        new, shape = copy.copy(self), shapes["input_ids"] or ()
        new._names = [name for name in INPUTS if name in shapes]
        new._width = next((n for n in shape[1:2] if isinstance(n, int)), None)
        return new

    def _every(self, numbers: np.ndarray) -> np.ndarray:
        return (np.asarray(numbers)[:, None] * self.each + np.arange(self.each)).ravel()

    def take(self, indices: np.ndarray, seed: int | None) -> Any:
        """Return the texts and labels of rows."""
        every = self._every(indices)
        tokens = [self._tokens[i] for i in every]
        ids, mask, _ = pad_sequences([np.int64(e.ids) for e in tokens], self._fill, self._width)
        types, _, _ = pad_sequences([np.int64(e.type_ids) for e in tokens], 0, self._width)
        columns = dict(zip(INPUTS, (ids, np.int64(mask), types), strict=True))
        X = {name: columns[name] for name in self._names}
        return (X,) if self.labels is None else (X, self.labels[every])

    def subset(self, numbers: np.ndarray) -> PairedTexts:
        """Return the reader of some rows."""
        part, every = copy.copy(self), self._every(numbers)
        part.rows, part._tokens = len(numbers), [self._tokens[i] for i in every]
        part.labels = None if self.labels is None else self.labels[every]
        return part

    def describe(self) -> dict[str, Any]:
        """Return the number of rows, and a digest of tokens and labels."""
        arrays = {"tokens": np.concatenate([np.int64(e.ids) for e in self._tokens])}
        if self.labels is not None:
            arrays["labels"] = self.labels
        return describe_arrays("paired texts", arrays) | {"rows": self.rows}


def _labels(anchors: list[str], each: int) -> np.ndarray:
    """Return the labels of texts: one for those of an anchor, and one for each negative."""
    numbers: dict[str, int] = {}
    labels = np.arange(len(anchors) * each).reshape(-1, each) + len(anchors)
    labels[:, :2] = [[numbers.setdefault(anchor, len(numbers))] for anchor in anchors]
    return labels.ravel()


def _columns(rows: list[Record]) -> tuple[list[str], list[float]]:
    """Return the columns of texts, and the scores, if there are any; all rows have the same."""
    for place, row in rows:
        if not isinstance(row, Mapping):
            raise ValueError(f"{place}: it is no object, as {{'anchor': ...}}")
    place, first = rows[0]
    names, scored = _texts_of(first), "score" in first
    if names[:2] != ["anchor", "positive"] or (scored and len(names) > 2):
        raise ValueError(
            f"{place} has the columns {list(first)}: it needs anchor, positive, and after these "
            "negative, or score"
        )
    for place, row in rows:
        if sorted(_texts_of(row)) != sorted(names) or ("score" in row) != scored:
            raise ValueError(f"{place}: it has {list(row)}, and the first row {list(first)}")
        for name in names:
            if not isinstance(row[name], str) or not row[name].strip():
                raise ValueError(f"{place}: {name!r} is no text")
    return names, [_number(place, row["score"]) for place, row in rows] if scored else []


def _texts_of(row: Mapping[str, Any]) -> list[str]:
    """Return the columns of a row that hold texts."""
    return [n for n in row if n in ("anchor", "positive") or str(n).startswith("negative")]


def _number(place: str, score: Any) -> float:
    """Return a score as a finite number."""
    try:
        number = float(score)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{place}: the score {score!r} is no number")
    return number
