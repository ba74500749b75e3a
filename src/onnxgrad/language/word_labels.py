"""`labeled_texts`: texts whose words have labels, as named entities, as rows of tokens."""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.data.readers import keep_arguments
from onnxgrad.errors import argument
from onnxgrad.language.encoding import IGNORED
from onnxgrad.language.records import LINES, TABLES, read_records
from onnxgrad.language.token_rows import DEFAULT_LENGTH, TokenRows
from onnxgrad.language.tokenizer import as_tokenizer

_WORD = re.compile(r"\w+(?:[-'.]\w+)*|[^\w\s]")
_TAGS = ("tags", "ner_tags", "pos_tags", "labels")


@keep_arguments(data="source tokenizer")
def labeled_texts(
    source: Any,
    tokenizer: Any,
    classes: Sequence[str] | None = None,
    max_length: int | None = None,
    *,
    known: Sequence[str] = (),
    stride: int = 32,
    label_all: bool = False,
    labels: bool = True,
) -> LabeledTexts:
    """Return texts with labeled words as a reader of token rows for token classification.

    A batch has labels, int64 (N, T), and `input_ids`, `attention_mask` and `token_type_ids`, if the
    model has these inputs. The first token of a word has the label of the word; all other tokens
    have -100. A text of more than `max_length` tokens becomes several rows, which overlap: each
    word is labeled in one row, and no row begins within an entity. A warning counts such texts. A
    text with entities by characters is split into words and punctuation, with BIO labels.

    Args:
        source: a CoNLL file (on each line a word and, last, its label; an empty line ends a
            sentence); JSON lines or Parquet of `{"tokens": words, "tags": labels}` or `{"text":
            ..., "entities": [{"start": 0, "end": 5, "label": "PER"}]}`; a list of such dicts, a
            table, or a dataset of Hugging Face.
        tokenizer: the path of a folder, a `tokenizer.json` or `vocab.txt`, or an object of
            tokenizers or transformers.
        classes: the names of all classes, in the order of their numbers; None: `known`, or the
            labels that occur. Labels that are numbers need them.
        max_length: most tokens of a row; None: the length at which the tokenizer cuts, or 512.
        known: the classes of the model, in order; they are used if no other labels occur.
        stride: number of tokens that neighboring rows have in common; at most a quarter of a row.
        label_all: whether all tokens of a word are labeled, with `I-` after the first token.
        labels: False: texts, or lists of words, need no labels, for `LabeledTexts.of_words`.

    Returns:
        A reader, which `fit(reader)` takes as X; see `LabeledTexts` for its attributes.

    Raises:
        ValueError: a record that cannot be read, no class, or entities that overlap; the message
            names the record.
        ImportError: the library tokenizers is not installed.

    Examples:
        >>> import onnxgrad as og
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> words = Tokenizer(models.WordLevel({"?": 0, "Ann": 1, "sees": 2}, unk_token="?"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> rows = [{"tokens": ["Ann", "sees"], "tags": ["B-PER", "O"]}]
        >>> reader = og.language.labeled_texts(rows, words)
        >>> X, labels, _ = next(reader.batches(1, None, 0))
        >>> reader.classes, X["input_ids"].tolist(), labels.tolist()
        (['O', 'B-PER', 'I-PER'], [[1, 2]], [[1, 0]])
    """
    texts = [*_read_labeled_texts(source, classes or known)]
    chosen = [*(classes or _class_names_of_labels(texts, known))]
    if not chosen:
        raise ValueError(
            f"neither the data nor the model has names of classes: pass {argument('classes')}"
        )
    encoder = _WordEncoder(as_tokenizer(tokenizer), chosen, max_length, stride, label_all)
    rows = encoder.rows(texts, labels)
    if not labels:
        rows.sort(key=lambda row: len(row.ids))
    return LabeledTexts(texts, rows, chosen, encoder.tokenizer.fill_id)


class _TokenRow(NamedTuple):
    """A row of tokens of a text, with the label of each token.

    Attributes:
        text: number of the text.
        ids: ids of the tokens.
        types: the number of the text of a pair to which each token belongs.
        words: number of the word whose label a token has; -1 for other tokens.
        labels: labels of the tokens.
    """

    text: int
    ids: np.ndarray
    types: np.ndarray
    words: np.ndarray
    labels: np.ndarray


class LabeledTexts(TokenRows):
    """The reader that `labeled_texts` returns: token rows with a label per token.

    Attributes:
        classes: the names of all classes, in the order of their numbers.
        texts: the texts, each with its `text`, and as `words` the (start, end) of each word.
    """

    def __init__(
        self, texts: list[LabeledText], rows: list[_TokenRow], classes: list[str], fill: int
    ) -> None:
        self.texts, self.classes, self._rows = texts, classes, rows
        columns = [row.ids for row in rows], [row.types for row in rows]
        super().__init__(*columns, [row.labels for row in rows], fill)

    def subset(self, numbers: np.ndarray) -> LabeledTexts:
        """Return the reader of the rows whose indices are `numbers`."""
        new = super().subset(numbers)
        assert isinstance(new, LabeledTexts)
        new._rows = [self._rows[i] for i in numbers]
        return new

    def describe(self) -> dict[str, Any]:
        """Return the row count, and digests of the tokens, labels and lengths of the rows."""
        return super().describe() | {"kind": "labeled texts", "classes": self.classes}

    def of_words(self, batches: Iterable[np.ndarray]) -> list[np.ndarray]:
        """Return a model's values for the words of each text, one array (words, ...) per text.

        The values of a word are the values of its first token; zeros for a word without a token.

        Args:
            batches: values (N, T, ...) of the tokens of all batches, in the order without a seed.
        """
        listed = [row for batch in batches for row in batch]
        shape, dtype = (listed[0].shape[1:], listed[0].dtype) if listed else ((), np.float32)
        found = [np.zeros((len(text.words), *shape), dtype) for text in self.texts]
        order = range(self.rows) if self.order is None else self.order
        for i, values in zip(order, listed, strict=True):
            row = self._rows[i]
            heads = np.flatnonzero(row.words >= 0)
            found[row.text][row.words[heads]] = values[heads]
        return found


class _WordEncoder:
    """Encodes texts with labeled words into rows of tokens."""

    def __init__(
        self, tokenizer: Any, classes: list[str], length: int | None, stride: int, every: bool
    ) -> None:
        self.tokenizer, self.classes, self.label_all = tokenizer, classes, every
        self.max_length = length or tokenizer.max_length or DEFAULT_LENGTH
        self._whole = tokenizer.backend
        self._cutting = tokenizer.truncating_backend(self.max_length)
        self._room = self.max_length - self._whole.num_special_tokens_to_add(False)
        self._stride = min(stride, self._room // 4)

    def rows(self, texts: Sequence[LabeledText], learned: bool) -> list[_TokenRow]:
        """Return the token rows of all texts; if `learned`, warn of words without a labeled
        token.
        """
        rows, counts = [], Counter[str]()
        for number, text in enumerate(texts):
            labels, inside = self._word_classes(text, learned)
            spans = np.array(text.words, np.int64).reshape(-1, 2)
            owners = _encode_words(text.text, spans, self._whole)[2]
            each, seen = np.bincount(owners[owners >= 0], minlength=len(spans)), 0
            for first, stop, begin, end in self._word_ranges(
                each, text.labels or () if learned else ()
            ):
                ids, types, words = _encode_words(text.text, spans[begin:end], self._cutting)
                words = np.where(words >= 0, words + begin, -1)
                counted = (first <= words) & (words < stop)
                heads = counted & np.append(True, words[1:] != words[:-1])
                row = np.where(heads, labels[words], inside[words])
                row[~(counted if self.label_all else heads)] = IGNORED
                rows.append(_TokenRow(number, ids, types, np.where(heads, words, -1), row))
                seen += int(heads.sum())
            long = len(owners) > self.max_length
            counts[f"texts have more than {self.max_length} tokens and become several rows"] += long
            counts["words have more tokens than a row and are cut"] += int(sum(each > self._room))
            counts["words have no token of their own and are not learned"] += len(spans) - seen
            counts["entities begin or end in a word, which is labeled whole"] += text.misfits
        if learned and any(counts.values()):
            listed = "; ".join(f"{n} {what}" for what, n in counts.items() if n)
            warnings.warn(f"of {len(texts)} texts: {listed}", stacklevel=4)
        return rows

    def _word_classes(self, text: LabeledText, learned: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return for each word the class index of its first token, and of its further tokens."""
        names = text.labels if learned else ["O"] * len(text.words)
        numbers = {name: k for k, name in enumerate(self.classes)}
        if names is None:
            raise ValueError(f"{text.place} has no labels: add them, as 'tags' or 'entities'")
        if learned and (wrong := [name for name in names if name not in numbers]):
            raise ValueError(f"{text.place}: {wrong[0]!r} is not one of the classes {self.classes}")
        inside = [f"I-{name[2:]}" if name.startswith("B-") else name for name in names]
        first = [numbers.get(name, 0) for name in names]
        rest = [numbers.get(*pair) for pair in zip(inside, first, strict=True)]
        return np.array(first, np.int64), np.array(rest, np.int64)

    def _word_ranges(
        self, each: np.ndarray, labels: Sequence[str]
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield the word ranges of each row: [first, stop) get labels, [begin, end) are encoded.

        Args:
            each: number of tokens of each word.
            labels: labels of the words; no row begins within an entity. Empty: no labels.
        """
        before, first = np.append(0, np.cumsum(each)), 0
        while first < len(each):
            begin = int(np.searchsorted(before, before[first] - self._stride))
            end = int(np.searchsorted(before, before[begin] + self._room, "right")) - 1
            end = stop = max(end, first + 1)
            if end < len(each):
                stop = int(np.searchsorted(before, before[end] - self._stride, "right")) - 1
                stop = last = max(stop, first + 1)
                while labels and stop > first and labels[stop].startswith("I-"):
                    stop -= 1
                stop = stop if stop > first else last
            yield first, stop, begin, end
            first = stop


def _encode_words(text: str, spans: np.ndarray, tokenizer: Any) -> tuple[np.ndarray, ...]:
    """Return ids, type ids and word indices of the tokens of words; -1 for special tokens."""
    start, end = (spans[0, 0], spans[-1, 1]) if len(spans) else (0, 0)
    found = tokenizer.encode(text[start:end])
    begins, ends = np.array(found.offsets, np.int64).reshape(-1, 2).T + start
    # the word of a token is the first word that ends behind the begin of the token
    words = np.searchsorted(spans[:, 1], begins, side="right")
    begun = np.append(spans[:, 0], len(text))[words] < ends
    words[~begun | np.array(found.special_tokens_mask, bool)] = -1
    return np.array(found.ids, np.int64), np.array(found.type_ids, np.int64), words


class LabeledText(NamedTuple):
    """A text with the spans of its words, and the labels of the words if known.

    Attributes:
        text: the text.
        words: the characters (start, end) of each word.
        labels: the label of each word, or None.
        place: the place of the record, for messages.
        misfits: number of entities that begin or end within a word.
    """

    text: str
    words: list[tuple[int, int]]
    labels: list[str] | None
    place: str
    misfits: int = 0


def _read_labeled_texts(source: Any, classes: Sequence[str]) -> Iterator[LabeledText]:
    """Yield the `LabeledText`s of a CoNLL file or of records; `classes` names integer labels."""
    is_path = isinstance(source, (str, os.PathLike))
    if not is_path or Path(source).suffix.lower() in (*LINES, *TABLES):
        for name, record in read_records(source):
            yield _text_of_record(record, name, classes)
        return
    path, words, labels = Path(source), list[str](), list[str]()
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate([*lines, ""], 1):
        name, fields = f"{str(path)!r}, line {number}", line.split()
        if len(fields) == 1:
            raise ValueError(f"{name}: {line!r} has a word without a label: add the label")
        if fields and fields[0] != "-DOCSTART-":
            words, labels = [*words, fields[0]], [*labels, fields[-1]]
        elif words and not fields:
            yield _text_of_words(words, labels, f"the sentence before {name}")
            words, labels = [], []


def _text_of_record(record: Any, name: str, classes: Sequence[str]) -> LabeledText:
    """Return the `LabeledText` of a record; its labels are None if the record has no labels."""
    if not isinstance(record, Mapping):
        record = {"text" if isinstance(record, str) else "tokens": record}
    words, text = record.get("tokens"), record.get("text")
    if words is None and isinstance(text, str):
        spans = [match.span() for match in _WORD.finditer(text)]
        if (entities := record.get("entities")) is None:
            return LabeledText(text, spans, None, name)
        return LabeledText(text, spans, *_word_labels_of_entities(entities, spans, name))
    tags = next((record[key] for key in _TAGS if key in record), None)
    if not words or (tags is not None and len(tags) != len(words)):
        raise ValueError(f"{name} needs 'text', or 'tokens' and as many 'tags': {record}")
    numbers = [tag for tag in tags or () if not isinstance(tag, str)]
    if numbers and not 0 <= min(numbers) <= max(numbers) < len(classes):
        raise ValueError(
            f"{name} has labels up to {max(numbers)}: name all classes by {argument('classes')}"
        )
    named = tags and [tag if isinstance(tag, str) else classes[tag] for tag in tags]
    return _text_of_words(words, named, name)


def _text_of_words(words: Sequence[str], labels: Sequence[str] | None, name: str) -> LabeledText:
    """Return the `LabeledText` of words joined by spaces; errors say that it is at `name`."""
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    spans = [(int(end) - len(word), int(end)) for word, end in zip(words, ends, strict=True)]
    return LabeledText(" ".join(words), spans, None if labels is None else [*labels], name)


def _word_labels_of_entities(
    entities: Sequence[Mapping[str, Any]], words: Sequence[tuple[int, int]], name: str
) -> tuple[list[str], str, int]:
    """Return (label of each word, `name`, count of entities that begin or end inside a word)."""
    labels, misfits = ["O"] * len(words), 0
    for entity in entities:
        start, end, label = entity["start"], entity["end"], entity["label"]
        inside = [i for i, (a, b) in enumerate(words) if a < end and start < b]
        if not inside or any(labels[i] != "O" for i in inside):
            why = "overlaps another entity" if inside else "holds no word of the text"
            raise ValueError(f"{name}: the entity {dict(entity)} {why}: correct its start and end")
        for i in inside:
            labels[i] = f"{'B' if i == inside[0] else 'I'}-{label}"
        misfits += words[inside[0]][0] < start or end < words[inside[-1]][1]
    return labels, name, misfits


def _class_names_of_labels(texts: Sequence[LabeledText], stored: Sequence[str]) -> list[str]:
    """Return the class names: `stored` if they include all labels, else the labels of the texts."""
    found = {label for text in texts for label in text.labels or ()}
    if found <= {*stored}:
        return [*stored]
    kinds = {name[2:] for name in found if name.startswith(("B-", "I-"))}
    both = {f"{prefix}-{kind}" for kind in kinds for prefix in "BI"}
    return sorted(found | both, key=lambda n: (n != "O", n[2:] if n in both else n, n))
