"""`texts`: texts as rows of tokens for a language model, in batches of rows of similar length."""

from __future__ import annotations

import copy
import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np

from onnxgrad.data.arrays import DataError
from onnxgrad.data.padding import by_length, pad_sequences
from onnxgrad.data.readers import Reader, keep_arguments, type_name
from onnxgrad.data.torch_data import is_hugging_face_stream
from onnxgrad.errors import ModelError, argument
from onnxgrad.language.encoding import IGNORED, RecordEncoder, Row, pack_rows
from onnxgrad.language.folders import ModelFolder, is_folder, load_folder
from onnxgrad.language.records import is_stream, read_records
from onnxgrad.language.tokenizer import Tokenizer, as_tokenizer
from onnxgrad.operators.shapes import Dims

_SORTED_BATCHES = 50  # batches of a stream whose rows are sorted by length together
_SHUFFLED_ROWS = 1000  # rows of a stream in the buffer from which rows are drawn
_IDS, _MASK = "input_ids", "attention_mask"


@keep_arguments(data="source tokenizer")
def texts(
    source: Any,
    tokenizer: Any,
    max_length: int | None = None,
    *,
    completion_only: bool | None = None,
    packing: bool = False,
    column: str | None = None,
    by_line: bool = True,
) -> Reader:
    """Return texts as a reader of `input_ids`, `attention_mask` and labels for a language model.

    Labels are the ids of the same tokens, for a loss that shifts them, and -100 for tokens that are
    not learned. A batch has rows of similar length, padded at the end. A record is a text or
    `{"text": ...}`; `{"prompt": ..., "completion": ...}`; a chat `{"messages": [...]}`, written by
    the tokenizer's template; or tokens `{"input_ids": ..., "labels": ...}`. The token that ends a
    text is appended to texts and completions.

    Args:
        source: records in a list, or a file of JSON lines, Parquet or plain text, or a list of
            `Path`s; a table; a dataset of Hugging Face; or a function that returns an iterable, and
            is called for each epoch. Streams are encoded while they are read, other sources once.
        tokenizer: a `ModelFolder`, the path of such a folder or of a `tokenizer.json`, or an object
            of tokenizers or transformers.
        max_length: most tokens of a row; longer rows are cut, and counted in a warning. None: as
            many as the model of the folder takes.
        completion_only: whether only completions, and turns of the assistant, are learned; None:
            only these if a record has them.
        packing: write all texts one after another, cut into rows of `max_length`. A text then
            attends to the texts before it in its row, and may continue in the next row.
        column: name of the column of texts, if it is not "text".
        by_line: whether each line of a plain text is a record; False: the whole file is one.

    Returns:
        A reader, which `fit`, `evaluate` and `predict` take as X.

    Raises:
        DataError: no text, a record of another form, a line that is no JSON, a prompt that is
            longer than `max_length`, or the tokenizer of another model.
        ImportError: the library `tokenizers` is not installed.
        ValueError: a `max_length` below 2 or above the model's, or packing without one.

    Examples:
        >>> import onnxgrad as og
        >>> from tokenizers import Tokenizer, models
        >>> words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        >>> rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [-100, 9]}]
        >>> X, labels, _ = next(og.language.texts(rows, words).batches(2, None, 0))
        >>> X["input_ids"].tolist(), labels.tolist()
        ([[5, 6, 7], [8, 9, 0]], [[5, 6, 7], [-100, 9, -100]])
    """
    folder = tokenizer if isinstance(tokenizer, ModelFolder) else None
    if folder is None and isinstance(tokenizer, (str, os.PathLike)) and is_folder(tokenizer):
        with suppress(ModelError):  # the folder may hold a tokenizer without a model
            tokenizer = folder = load_folder(tokenizer)
    tokenizer, most = as_tokenizer(tokenizer), None if folder is None else folder.context_length
    given = argument("max_length", max_length)
    if max_length is None:
        max_length = most
    elif max_length < 2:
        raise ValueError(f"{given}: a row needs 2 tokens, one to predict another")
    elif most and max_length > most:
        raise ValueError(f"{given}, and the model takes at most {most} tokens")
    if packing and max_length is None:
        given = argument("packing", True)
        raise ValueError(f"{given} needs {argument('max_length')}, the number of tokens of a row")
    size = None if folder is None else folder.vocab_size
    most = None if packing else max_length
    encoder = RecordEncoder(tokenizer, most, completion_only, column, size)
    pad = tokenizer.eos_id or 0
    if tokenizer.pad_id is not None and tokenizer.pad_id >= 0:
        pad = tokenizer.pad_id
    names = {} if folder is None else dict(folder.input_names)
    block = max_length if packing else None
    if is_stream(source):
        return TextStream(source, encoder, pad, names, block)
    rows = list(_encode_rows(source, encoder, block, by_line))
    if not rows:
        is_path = isinstance(source, (str, os.PathLike))
        name = repr(str(source)) if is_path else f"the {type(source).__name__}"
        raise DataError(f"{name} has no text to learn: add a text of two tokens or more")
    for note in encoder.notes():
        warnings.warn(note, stacklevel=2)
    return Texts(rows, pad, names, encoder.notes(), tokenizer if folder is None else folder)


def _encode_rows(
    source: Any, encoder: RecordEncoder, block: int | None, by_line: bool
) -> Iterator[Row]:
    """Yield the token rows of a source's records, packed into blocks of `block` tokens if given."""
    rows = encoder.rows(read_records(source, by_line))
    return rows if block is None else pack_rows(rows, block)


class _TextReader(Reader):
    """A reader of token rows, whose batches use the model's input names in `names`."""

    def __init__(self, pad: int, names: Mapping[str, str]) -> None:
        self.pad, self.names, self.masked = pad, names, True

    def for_inputs(self, shapes: Mapping[str, Dims | None]) -> Reader:
        """Return the reader for a model's inputs; it yields a mask only if the model reads one."""
        new = copy.copy(self)
        new.masked = self.names.get(_MASK, _MASK) in shapes
        return new

    def _name_inputs(self, X: Mapping[str, np.ndarray], labels: np.ndarray) -> tuple[Any, ...]:
        """Return a batch `({input name: array}, labels, None)`, which has no row weights."""
        kept = {self.names.get(n, n): a for n, a in X.items() if self.masked or n != _MASK}
        return kept, labels, None


class Texts(_TextReader):
    """A reader of token rows, of texts that were encoded once and stay in memory.

    Attributes:
        rows: number of rows.
        tokens: number of tokens of all rows.
        learned: number of learned tokens.
        notes: sentences about the texts that were cut, left out or split.
        tokenizer: the tokenizer, or its folder.
    """

    rows: int

    def __init__(
        self,
        rows: list[Row],
        pad: int,
        names: Mapping[str, str],
        notes: list[str],
        tokenizer: Tokenizer | ModelFolder,
    ) -> None:
        super().__init__(pad, names)
        self.tokenizer = tokenizer
        self._rows, self.rows, self.notes = rows, len(rows), notes
        self.tokens = sum(len(ids) for ids, _ in rows)
        self.learned = sum(int((labels[1:] != IGNORED).sum()) for _, labels in rows)

    def batches(self, size: int, seed: int | None, skip: int) -> Iterator[Any]:
        """Yield the batches of one pass, in which rows of similar length are together."""
        ids, labels = [[row[k] for row in self._rows] for k in (0, 1)]
        padded = by_length({_IDS: ids}, labels, mask=_MASK, value=self.pad, y_value=IGNORED)
        for X, y, _ in padded.batches(size, seed, skip):
            yield self._name_inputs(X, y)

    def subset(self, numbers: np.ndarray) -> Texts:
        """Return the reader of the rows whose indices are `numbers`."""
        rows = [self._rows[i] for i in numbers]
        return Texts(rows, self.pad, self.names, [], self.tokenizer)

    def describe(self) -> dict[str, Any]:
        """Return the counts of rows and tokens, and a digest of the tokens and labels."""
        digest = hashlib.blake2b(digest_size=16)
        for ids, labels in self._rows:
            digest.update(ids.tobytes() + b"/" + labels.tobytes() + b";")
        entries = {"rows": self.rows, "tokens": self.tokens, "digest": digest.hexdigest()}
        return {"kind": "texts", **entries}


class TextStream(_TextReader):
    """A reader of token rows, of texts that each pass reads and encodes again.

    With a seed, the files of a stream of Hugging Face and the rows in a buffer of 1000 are
    shuffled, and the rows of 50 batches are sorted by length.
    """

    def __init__(
        self,
        source: Any,
        encoder: RecordEncoder,
        pad: int,
        names: Mapping[str, str],
        block: int | None,
    ) -> None:
        super().__init__(pad, names)
        self.source, self.encoder, self.block, self._has_warned = source, encoder, block, False

    def first(self) -> Any:
        """Return a batch of one row of zeros, without reading the source."""
        ids = np.zeros((1, 2), np.int32)
        return self._name_inputs({_IDS: ids, _MASK: ids}, ids)

    def batches(self, size: int, seed: int | None, skip: int) -> Iterator[Any]:
        """Yield the batches of one pass except the first `skip` batches, which are only read."""
        yield from islice(self._batches_of_pass(size, seed), skip, None)
        if not self._has_warned:  # warn once, at the end of the first pass
            for note in self.encoder.notes():
                warnings.warn(note, stacklevel=2)
        self._has_warned = True

    def _batches_of_pass(self, size: int, seed: int | None) -> Iterator[Any]:
        """Yield all batches of one pass over the source, in an order that `seed` decides."""
        source, rng = self.source, None if seed is None else np.random.default_rng(seed)
        if seed is not None and is_hugging_face_stream(source):
            source = source.shuffle(seed=seed % (1 << 32), buffer_size=_SHUFFLED_ROWS)
        rows = _encode_rows(source, self.encoder, self.block, True)
        while pool := list(islice(rows, size * (1 if rng is None else _SORTED_BATCHES))):
            if rng is not None:
                pool = [pool[i] for i in rng.permutation(len(pool))]
                pool.sort(key=lambda row: len(row[0]))
            cut = [pool[start : start + size] for start in range(0, len(pool), size)]
            for i in range(len(cut)) if rng is None else rng.permutation(len(cut)):
                ids, mask, _ = pad_sequences([row[0] for row in cut[i]], self.pad)
                labels, _, _ = pad_sequences([row[1] for row in cut[i]], IGNORED)
                yield self._name_inputs({_IDS: ids, _MASK: mask}, labels)

    def describe(self) -> dict[str, Any]:
        """Return a description of the data for checkpoints: the type of the source."""
        return {"kind": "texts", "source": type_name(self.source)}
