"""`paired_texts`: reads texts that belong together, as token rows for an embedding model."""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.data.padding import pad_sequences
from onnxgrad.data.readers import IndexedReader, describe_arrays, keep_arguments
from onnxgrad.language.records import Record, column_records
from onnxgrad.language.token_rows import INPUTS
from onnxgrad.language.tokenizer import as_tokenizer
from onnxgrad.operators.shapes import Dims


@keep_arguments(data="source tokenizer")
def paired_texts(source: Any, tokenizer: Any, max_length: int = 128) -> PairedTexts:
    """Return texts that belong together as a reader of token rows for embedding losses.

    One model encodes all texts of a row, which are consecutive rows of a batch. A batch has
    `input_ids`, `attention_mask` and `token_type_ids`, if the model has these inputs. `batch_size`
    counts rows of `source`. Anchor and positive have one label, int64, which they share with rows
    of the same anchor; each negative has a different label. With scores, both texts of a row have
    the score as label, float32. Texts alone have no labels.

    Args:
        source: a CSV, TSV, JSON-lines or Parquet file, a list of dicts, a table or a dataset of
            Hugging Face, with the columns `anchor` and `positive`, and maybe `negative`,
            `negative_2` and so on, or `score`; or a list of texts.
        tokenizer: the path of a folder, a `tokenizer.json` or `vocab.txt`, or an object of
            tokenizers or transformers.
        max_length: most tokens of a text; longer texts are cut.

    Returns:
        A reader, which `fit(reader)` takes as X; see `PairedTexts` for its attributes.

    Raises:
        ValueError: a file that cannot be read, or a row of another form; the message names the row.
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
            f"there is no text: {os.fspath(source) if is_path else source!r} has no rows; add one"
        )
    tokenizer = as_tokenizer(tokenizer)
    if all(isinstance(row, str) for _, row in rows):
        texts, kind, labels, each = [row for _, row in rows], "texts", None, 1
    else:
        names, scores = _text_columns_and_scores(rows)
        texts, each = [row[name] for _, row in rows for name in names], len(names)
        kind = "scores" if scores else "pairs"
        anchors = [row["anchor"] for _, row in rows]
        labels = np.array(scores, np.float32).repeat(2) if scores else _pair_labels(anchors, each)
    tokens = tokenizer.truncating_backend(max_length).encode_batch(texts)
    return PairedTexts(tokens, labels, each, kind, tokenizer.fill_id)


class PairedTexts(IndexedReader):
    """The reader that `paired_texts` returns: rows of several texts each, as tokens.

    Attributes:
        kind: "pairs", "scores", or "texts" for single texts.
        each: number of texts of a row.
        labels: labels of the texts, (rows * each,), or None.
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
        """Return the reader for a model's inputs, padded to the model's token count if it is fixed.

        Raises:
            ValueError: the model has other inputs.
        """
        if "input_ids" not in shapes or (others := {*shapes} - {*INPUTS}):
            found = sorted(shapes) if "input_ids" not in shapes else sorted(others)
            raise ValueError(f"the model has the inputs {found}: texts need some of {list(INPUTS)}")
        if "attention_mask" not in shapes:
            warnings.warn(
                "the model has no input attention_mask: padding changes the embeddings of shorter "
                "texts, unless the model itself masks it",
                stacklevel=2,
            )
        new, shape = copy.copy(self), shapes["input_ids"] or ()
        new._names = [name for name in INPUTS if name in shapes]
        new._width = next((n for n in shape[1:2] if isinstance(n, int)), None)
        return new

    def _text_indices_of_rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return the indices of all texts that belong to the rows `numbers`."""
        return (np.asarray(numbers)[:, None] * self.each + np.arange(self.each)).ravel()

    def take(self, indices: np.ndarray, seed: int | None) -> Any:
        """Return a batch, (inputs by name, labels), of the texts of the rows `indices`."""
        every = self._text_indices_of_rows(indices)
        tokens = [self._tokens[i] for i in every]
        ids, mask, _ = pad_sequences([np.int64(e.ids) for e in tokens], self._fill, self._width)
        types, _, _ = pad_sequences([np.int64(e.type_ids) for e in tokens], 0, self._width)
        columns = dict(zip(INPUTS, (ids, np.int64(mask), types), strict=True))
        X = {name: columns[name] for name in self._names}
        return (X,) if self.labels is None else (X, self.labels[every])

    def subset(self, numbers: np.ndarray) -> PairedTexts:
        """Return the reader of the rows whose indices are `numbers`."""
        part, every = copy.copy(self), self._text_indices_of_rows(numbers)
        part.rows, part._tokens = len(numbers), [self._tokens[i] for i in every]
        part.labels = None if self.labels is None else self.labels[every]
        return part

    def describe(self) -> dict[str, Any]:
        """Return the row count, and a digest of the tokens and labels."""
        arrays = {"tokens": np.concatenate([np.int64(e.ids) for e in self._tokens])}
        if self.labels is not None:
            arrays["labels"] = self.labels
        return describe_arrays("paired texts", arrays) | {"rows": self.rows}


def _pair_labels(anchors: list[str], each: int) -> np.ndarray:
    """Return int64 labels: equal for texts of equal anchors, and unique for each negative."""
    numbers: dict[str, int] = {}
    labels = np.arange(len(anchors) * each).reshape(-1, each) + len(anchors)
    labels[:, :2] = [[numbers.setdefault(anchor, len(numbers))] for anchor in anchors]
    return labels.ravel()


def _text_columns_and_scores(rows: list[Record]) -> tuple[list[str], list[float]]:
    """Return the names of the text columns, and the scores; raise if a row lacks a column."""
    for place, row in rows:
        if not isinstance(row, Mapping):
            raise ValueError(f"{place} is {row!r:.40}: expected columns, as {{'anchor': ...}}")
    place, first = rows[0]
    names, scored = _text_columns(first), "score" in first
    if names[:2] != ["anchor", "positive"] or (scored and len(names) > 2):
        raise ValueError(
            f"{place} has the columns {list(first)}: expected anchor, positive, and maybe "
            "negative, or score"
        )
    for place, row in rows:
        if sorted(_text_columns(row)) != sorted(names) or ("score" in row) != scored:
            raise ValueError(
                f"{place} has the columns {list(row)}, but all rows need {list(first)}"
            )
        for name in names:
            if not isinstance(row[name], str) or not row[name].strip():
                raise ValueError(f"{place}: {name!r} must be a text, not {row[name]!r:.40}")
    return names, [_finite_score(place, row["score"]) for place, row in rows] if scored else []


def _text_columns(row: Mapping[str, Any]) -> list[str]:
    """Return the names of a row's text columns: anchor, positive, and names like negative_2."""
    return [n for n in row if n in ("anchor", "positive") or str(n).startswith("negative")]


def _finite_score(place: str, score: Any) -> float:
    """Return a similarity score as a finite float; raise `ValueError` naming its row."""
    try:
        number = float(score)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{place}: the column 'score' must hold a finite number, not {score!r}")
    return number
