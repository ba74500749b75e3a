"""`classified_texts`: texts, or pairs of texts, each with a class, as rows of tokens."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.data.arrays import DataError
from onnxgrad.data.cells import is_empty
from onnxgrad.data.class_numbers import ClassNames, label_text
from onnxgrad.data.readers import keep_arguments
from onnxgrad.errors import unknown
from onnxgrad.language.records import TEXTS, Record, column_records, read_records
from onnxgrad.language.token_rows import DEFAULT_LENGTH, TokenRows
from onnxgrad.language.tokenizer import as_tokenizer

_TEXTS_PER_CALL = 512  # rows that the tokenizer encodes in parallel


@keep_arguments(data="source tokenizer")
def classified_texts(
    source: Any,
    tokenizer: Any,
    classes: Sequence[str] | None = None,
    max_length: int | None = None,
    *,
    text: str | Sequence[str] = "text",
    label: str = "label",
    known: Sequence[str] = (),
    labels: bool = True,
) -> ClassifiedTexts:
    """Return texts, each with a class, as a reader of token rows for text classification.

    A batch has labels, int64 (N,), and `input_ids`, `attention_mask` and `token_type_ids`, if the
    model has these inputs. Both texts of a pair are tokens of one row, as the tokenizer writes
    pairs. Rows of more than `max_length` tokens are cut, and counted in a warning; the longer text
    of a pair is cut first.

    Args:
        source: a CSV, TSV, JSON-lines or Parquet file, a list of dicts, a table or a dataset of
            Hugging Face. Without `labels` also a plain text with a row on each line, or a list of
            texts or of pairs.
        tokenizer: the path of a folder, a `tokenizer.json` or `vocab.txt`, or an object of
            tokenizers or transformers.
        classes: the names of all classes, in the order of their numbers; None: `known`, or the
            labels that occur, sorted. If labels are whole numbers, and the names of classes are
            not, labels are the numbers of classes.
        max_length: most tokens of a row; None: the length at which the tokenizer cuts, or 512.
        text: the column of the texts, or both columns of pairs.
        label: the column of the classes.
        known: the classes of the model; they are used if all labels are among their names.
        labels: False: rows need no class.

    Raises:
        DataError: a file that cannot be read, a missing column, an empty text, a missing label, or
            a label that is none of the classes; the message names the row.
        ImportError: the library tokenizers is not installed.

    Examples:
        >>> from onnxgrad.language.classified_texts import classified_texts
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> words = Tokenizer(models.WordLevel({"?": 0, "good": 1, "bad": 2}, unk_token="?"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> rows = [{"text": "so good", "label": "yes"}, {"text": "bad", "label": "no"}]
        >>> reader = classified_texts(rows, words)
        >>> X, y, _ = next(reader.batches(2, None, 0))
        >>> reader.classes, X["input_ids"].tolist(), y.tolist()
        (['no', 'yes'], [[0, 1], [2, 0]], [1, 0])
    """
    columns = (text,) if isinstance(text, str) else tuple(text)
    if len(columns) not in (1, 2):
        raise ValueError(f"text={text!r}: name one column of texts, or the two columns of pairs")
    rows = [*_text_rows(source, columns, label if labels else None)]
    if not rows and labels:
        raise DataError("there is no text: the data have no rows; add at least two")
    numbers, chosen = None, [*(classes or known)]
    if labels:
        numbers, chosen = _class_indices_and_names(rows, classes, known)
    tokenizer = as_tokenizer(tokenizer)
    most = max_length or tokenizer.max_length or DEFAULT_LENGTH
    cutting = tokenizer.truncating_backend(most)
    ids, types, cut = [], [], 0
    texts = [row.texts for row in rows]
    for start in range(0, len(texts), _TEXTS_PER_CALL):
        chunk = [
            each if len(each) > 1 else each[0] for each in texts[start : start + _TEXTS_PER_CALL]
        ]
        for encoding in cutting.encode_batch(chunk):
            ids.append(np.array(encoding.ids, np.int32))
            types.append(np.array(encoding.type_ids, np.int32))
            cut += bool(encoding.overflowing)
    if cut:
        warnings.warn(
            f"{cut} of {len(rows)} texts have more than {most} tokens and are cut", stacklevel=3
        )
    return ClassifiedTexts(texts, chosen, ids, types, numbers, tokenizer.fill_id)


class ClassifiedTexts(TokenRows):
    """The reader that `classified_texts` returns: rows of tokens, each with a class.

    Attributes:
        classes: the names of all classes, in the order of their numbers.
        labels: the class number of each row, int64 (N,); None without labels.
        texts: for each row a tuple with its text, or with both texts of the pair.
    """

    def __init__(
        self,
        texts: list[tuple[str, ...]],
        classes: list[str],
        ids: list[np.ndarray],
        types: list[np.ndarray],
        labels: np.ndarray | None,
        fill: int,
    ) -> None:
        self.texts, self.classes = texts, classes
        super().__init__(ids, types, None if labels is None else [*labels], fill)

    @property
    def labels(self) -> np.ndarray | None:
        """The class index of each row, int64 (N,); None if the texts have no labels."""
        return None if self._labels is None else np.array(self._labels, np.int64)

    def subset(self, numbers: np.ndarray) -> ClassifiedTexts:
        """Return the reader of the rows whose indices are `numbers`."""
        new = super().subset(numbers)
        assert isinstance(new, ClassifiedTexts)
        new.texts = [self.texts[i] for i in numbers]
        return new

    def describe(self) -> dict[str, Any]:
        """Return the row count, and digests of the tokens, labels and lengths of the rows."""
        return super().describe() | {"kind": "classified texts", "classes": self.classes}


class _TextRow(NamedTuple):
    """The text or pair of texts of a record, its label, and its file and line for messages."""

    place: str
    texts: tuple[str, ...]
    label: Any


def _text_rows(source: Any, columns: Sequence[str], label: str | None) -> Iterator[_TextRow]:
    """Yield a `_TextRow` for each record of a source; its label is None if `label` is None."""
    is_path = isinstance(source, (str, os.PathLike))
    plain = label is None and is_path and Path(source).suffix.lower() in TEXTS
    found: Iterator[Record] = read_records(source) if plain else column_records(source)
    for place, record in found:
        if not isinstance(record, Mapping) and label is None:
            values = (record,) if isinstance(record, str) else record
            if not isinstance(values, (list, tuple)) or len(values) != len(columns):
                raise DataError(f"{place} is {record!r:.40}: expected texts for {[*columns]}")
            record = dict(zip(columns, values, strict=True))
        if not isinstance(record, Mapping):
            raise DataError(f"{place} is {type(record).__name__}: pass a dict of columns")
        for name in (*columns, *([] if label is None else [label])):
            if name not in record:
                option = "label=" if name == label else "text="
                raise DataError(f"{place}: {unknown(f'column ({option})', name, record)}")
        for name in columns:
            if _is_empty_cell(record[name]):
                raise DataError(f"{place}: column {name!r} is empty: write a text there")
            if not isinstance(record[name], str):
                raise DataError(f"{place}: {name!r} must be a text, not {record[name]!r:.40}")
        if label is not None and _is_empty_cell(record[label]):
            raise DataError(f"{place}: no label in column {label!r}: write one, or remove the row")
        texts = tuple(record[name] for name in columns)
        yield _TextRow(place, texts, None if label is None else record[label])


def _is_empty_cell(cell: Any) -> bool:
    """Return whether a cell is empty, NaN, or a text of white space."""
    return is_empty(cell) or (isinstance(cell, str) and not cell.strip())


def _class_indices_and_names(
    rows: Sequence[_TextRow], classes: Sequence[str] | None, known: Sequence[str]
) -> tuple[np.ndarray, list[str]]:
    """Return the class index of each row, int64, and the names of the classes.

    Raises:
        DataError: a label that is no class, numbers with fractions, or a single class.
    """
    names = [label_text(row.label) for row in rows]
    different = {*names}
    chosen = list(map(str, classes or ()))
    if not chosen and known and (different <= {*known} or different == _indices_as_texts(known)):
        chosen = [*known]
    if not chosen:
        _check_class_names(rows, different)
        whole = all(name.removeprefix("-").isdecimal() for name in different)
        chosen = sorted(different, key=int if whole else None)
    by_name = ClassNames(chosen)
    if different <= _indices_as_texts(chosen) - {*chosen} and not by_name.are_other_numbers:
        return np.array(list(map(int, names)), np.int64), chosen
    numbers, wrong = by_name.encode_labels(np.array(names, str))
    if wrong.any():
        at = int(wrong.argmax())
        raise DataError(f"{rows[at].place}: {unknown('class', names[at], chosen)}")
    return numbers, chosen


def _indices_as_texts(classes: Sequence[str]) -> set[str]:
    """Return the class indices 0, 1, 2, ... as texts."""
    return set(map(str, range(len(classes))))


def _check_class_names(rows: Sequence[_TextRow], names: set[str]) -> None:
    """Raise `DataError` if all labels are equal, or if some labels are fractional numbers."""
    if len(names) == 1:
        raise DataError(
            f"all {len(rows)} rows have the label {next(iter(names))!r}, and a classifier needs "
            "two classes; if there are other classes, name all of them as `classes`"
        )
    try:
        fractions = [row for row in rows if float(row.label) % 1]
    except (TypeError, ValueError):  # the labels are class names
        return
    if fractions:
        raise DataError(
            f"{fractions[0].place} has the label {fractions[0].label!r}: a number with a fraction "
            "needs a loss of regression, not of classes; if each number is a class nevertheless, "
            "name all classes"
        )
