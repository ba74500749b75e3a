"""`RecordEncoder`: encodes records, such as texts or chats, into token ids and labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.data.arrays import DataError
from onnxgrad.errors import argument
from onnxgrad.language.chat import Span
from onnxgrad.language.records import Record
from onnxgrad.language.tokenizer import Tokenizer

IGNORED = -100  # the label of a token that is not learned
_TEXTS_PER_CALL = 512  # texts that the tokenizer encodes in parallel

Row = tuple[np.ndarray, np.ndarray]  # ids and labels, (T,) int32


class _TextToEncode(NamedTuple):
    """A text to encode by a tokenizer, with the spans of characters whose tokens get labels.

    Attributes:
        where: the place of its record, for messages.
        text: the text.
        learned: the characters that are learned; None: all.
        special: whether the tokenizer adds special tokens around the text.
        ends: whether a token that ends a text is appended.
    """

    where: str
    text: str
    learned: list[Span] | None = None
    special: bool = True
    ends: bool = True


@dataclass
class RecordEncoder:
    """Encodes records, such as texts or chats, into rows of token ids and labels.

    Args:
        tokenizer: the tokenizer.
        max_length: most tokens of a row; None: any number.
        completion_only: whether prompts are not learned; None: they are not learned if records have
            prompts.
        column: name of the column of texts.
        vocab_size: number of tokens of the model.

    Attributes:
        cut: number of rows that were cut.
        empty: number of rows that were left out, as none of their tokens is learned.
        split: number of rows in which one token has the end of the prompt and the beginning of the
            completion.
    """

    tokenizer: Tokenizer
    max_length: int | None = None
    completion_only: bool | None = None
    column: str | None = None
    vocab_size: int | None = None
    cut: int = field(default=0, init=False)
    empty: int = field(default=0, init=False)
    split: int = field(default=0, init=False)

    def rows(self, records: Iterable[Record]) -> Iterator[Row]:
        """Yield (token ids, labels) for each record with a label that is not ignored.

        Raises:
            DataError: a record of another form, or a prompt that fills a row.
        """
        iterator = iter(records)
        while chunk := list(islice(iterator, _TEXTS_PER_CALL)):
            made: list[Any] = [self._text_or_tokens_of_record(*record) for record in chunk]
            for special in (False, True):
                texts = [
                    (i, item) for i, item in enumerate(made) if isinstance(item, _TextToEncode)
                ]
                texts = [(i, item) for i, item in texts if item.special is special]
                encoded = self.tokenizer.encode([item.text for _, item in texts], special)
                for (i, item), (ids, characters) in zip(texts, encoded, strict=True):
                    made[i] = self._label_tokens(item, ids, characters)
            for (where, _), (ids, labels) in zip(chunk, made, strict=True):
                self._check_ids_in_vocabulary(where, ids)
                if row := self._truncate_row(where, ids, labels):
                    yield row

    # -- forms of records ---------------------------------------------------------------------

    def _text_or_tokens_of_record(self, where: str, record: Any) -> _TextToEncode | Row:
        """Return the text of a record, to be encoded, or the token row if the record has ids."""
        if self.column is not None:
            if not isinstance(record, Mapping) or self.column not in record:
                has = list(record) if isinstance(record, Mapping) else type(record).__name__
                raise DataError(
                    f"{where} has {has}, and no column {self.column!r}: pass the name of the "
                    "column of texts"
                )
            record = record[self.column]
        if isinstance(record, str):
            record = {"text": record}
        if not isinstance(record, Mapping):
            raise DataError(f"{where} is {type(record).__name__}: expected a text or an object")
        if record.get("input_ids") is not None:
            return self._row_of_token_record(where, record)
        if record.get("messages") is not None:
            return self._render_chat_record(where, record, [*record["messages"]], 0)
        if "prompt" in record and "completion" in record:
            prompt, completion = record["prompt"], record["completion"]
            if not isinstance(prompt, str) and not isinstance(completion, str):
                return self._render_chat_record(where, record, [*prompt, *completion], len(prompt))
            _check_field_is_text(where, "prompt", prompt)
            _check_field_is_text(where, "completion", completion)
            whole = prompt + completion
            only = self.completion_only is not False
            return _TextToEncode(where, whole, [(len(prompt), len(whole))] if only else None)
        if "text" in record:
            _check_field_is_text(where, "text", record["text"])
            if self.completion_only:
                raise DataError(
                    f"{where} has a text without a prompt, and {argument('completion_only', True)} "
                    "learns completions of prompts: write "
                    '{"prompt": ..., "completion": ...} or {"messages": [...]}'
                )
            return _TextToEncode(where, record["text"])
        raise DataError(
            f"{where} has {list(record)}: write 'text', 'prompt' and 'completion', 'messages', "
            "or 'input_ids'"
        )

    def _row_of_token_record(self, where: str, record: Mapping[str, Any]) -> Row:
        """Return (token ids, labels) of a record with the fields `input_ids` and maybe `labels`."""
        ids = np.asarray(record["input_ids"])
        given = record.get("labels")
        labels = ids if given is None else np.asarray(given)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or labels.dtype.kind not in "iu":
            raise DataError(f"{where}: input_ids and labels must be lists of whole numbers")
        if ids.shape != labels.shape:
            raise DataError(
                f"{where} has {len(ids)} input_ids and {len(labels)} labels: the label of a token "
                f"is its id, or {IGNORED} if it is not learned"
            )
        return ids.astype(np.int32), labels.astype(np.int32)

    def _render_chat_record(
        self, where: str, record: Mapping[str, Any], messages: list[Any], first: int
    ) -> _TextToEncode:
        """Return a chat as text to encode; assistant turns from message `first` on get labels."""
        template = self.tokenizer.chat_template
        if template is None:
            raise DataError(
                f"{where} has messages, and the tokenizer has no chat template: add one to its "
                "folder, or write 'prompt' and 'completion'"
            )
        if bad := next(
            (m for m in messages if not isinstance(m, Mapping) or "role" not in m), None
        ):
            raise DataError(f"{where}: a message must have 'role' and 'content', not {bad!r:.80}")
        more = {n: record[n] for n in ("tools", "documents") if record.get(n) is not None}
        try:
            if self.completion_only is False:
                return _TextToEncode(where, template.render(messages, **more), None, False, False)
            text, spans = template.assistant_spans(messages, first, **more)
        except ValueError as e:
            raise DataError(f"{where}: {e}") from None
        if not spans:
            raise DataError(f"{where} has no message of the assistant to learn: add one")
        return _TextToEncode(where, text, spans, special=False, ends=False)

    # -- tokens -------------------------------------------------------------------------------

    def _label_tokens(self, piece: _TextToEncode, ids: np.ndarray, characters: np.ndarray) -> Row:
        """Return (token ids, labels) of a text; `characters` (T, 2) are the spans of the tokens."""
        labels, eos = ids.copy(), self.tokenizer.eos_id
        if not piece.text.strip():
            return ids, np.full_like(ids, IGNORED)
        if piece.learned is not None:
            start, stop = characters.T
            learned = np.zeros(len(ids), bool)
            for first, end in piece.learned:
                # tokenizers that trim spaces give a token of spaces an empty range at its end
                inside = (start < end) | ((start == stop) & (stop <= end))
                learned |= inside & (stop > first)
            labels[~learned] = IGNORED
            if len(piece.learned) == 1:
                edge = piece.learned[0][0]
                self.split += bool(((start < edge) & (edge < stop)).any())
        if piece.ends and eos is not None and (not len(ids) or ids[-1] != eos):
            ids, labels = np.append(ids, np.int32(eos)), np.append(labels, np.int32(eos))
        elif piece.ends and eos is not None:
            labels[-1] = eos
        return ids, labels

    def _truncate_row(self, where: str, ids: np.ndarray, labels: np.ndarray) -> Row | None:
        """Return (token ids, labels) cut to `max_length`; None if all labels are ignored."""
        if not (labels[1:] != IGNORED).any():  # the first token is not predicted
            self.empty += 1
            return None
        if self.max_length is None or len(ids) <= self.max_length:
            return ids, labels
        self.cut += 1
        ids, labels = ids[: self.max_length], labels[: self.max_length]
        if not (labels[1:] != IGNORED).any():
            raise DataError(
                f"{where}: the text before the first token to learn fills the row: shorten it, or "
                f"pass more than {argument('max_length', self.max_length)}"
            )
        return ids, labels

    def _check_ids_in_vocabulary(self, where: str, ids: np.ndarray) -> None:
        """Raise `DataError` for a token id outside of the model's vocabulary."""
        if self.vocab_size is not None and len(ids) and ids.max() >= self.vocab_size:
            raise DataError(
                f"{where}: the tokenizer returns the id {ids.max()}, and the model has "
                f"{self.vocab_size} tokens: pass the tokenizer of this model; the one passed has "
                f"{self.tokenizer.size} tokens"
            )

    def notes(self) -> list[str]:
        """Return warnings about rows that were cut, left out, or split within a token."""
        sentences = []
        if self.cut:
            most = argument("max_length", self.max_length)
            sentences.append(f"{self.cut} texts are longer than {most}, and cut")
        if self.empty:
            sentences.append(f"{self.empty} texts are left out: they have no token to learn")
        if self.split:
            sentences.append(
                f"in {self.split} rows, one token has the end of the prompt and the beginning of "
                "the completion, and is learned; a prompt alone has other tokens: begin "
                "completions with the space that separates them"
            )
        return sentences


def _check_field_is_text(where: str, name: str, value: Any) -> None:
    """Raise `DataError` if `value`, the field `name` of a record, is no text."""
    if not isinstance(value, str):
        raise DataError(f"{where}: {name!r} must be a text, not {value!r:.40}")


def pack_rows(rows: Iterable[Row], length: int) -> Iterator[Row]:
    """Yield rows of `length` tokens, from all rows joined; the last row may be shorter."""
    held: list[Row] = []
    count = 0
    for row in rows:
        held.append(row)
        count += len(row[0])
        while count >= length:
            ids, labels = _concatenate_rows(held)
            yield ids[:length], labels[:length]
            held, count = [(ids[length:], labels[length:])], count - length
    if count > 1:
        yield _concatenate_rows(held)


def _concatenate_rows(rows: Sequence[Row]) -> Row:
    """Return the tokens and labels of several rows as one row."""
    return np.concatenate([r[0] for r in rows]), np.concatenate([r[1] for r in rows])
