"""Texts whose words have labels: the files of token classification, and their classes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_WORD = re.compile(r"\w+(?:[-'.]\w+)*|[^\w\s]")
_TAGS = ("tags", "ner_tags", "pos_tags", "labels")


class Text(NamedTuple):
    """A text, the characters (start, end) of its words, their labels if it has some; its place.

    `misfits` counts the entities that begin or end within a word.
    """

    text: str
    words: list[tuple[int, int]]
    labels: list[str] | None
    name: str
    misfits: int = 0


def read_texts(source: Any, classes: Sequence[str]) -> Iterator[Text]:
    """Yield the texts of a CoNLL file, of JSON lines or of a list of records.

    Raises:
        ValueError: one that cannot be read; the message names its line or number.
    """
    if not isinstance(source, (str, os.PathLike)):
        for number, record in enumerate(source):
            yield _of_record(record, f"record {number}", classes)
        return
    path, words, labels = Path(source), list[str](), list[str]()
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate([*lines, ""], 1):
        name, fields = f"{str(path)!r}, line {number}", line.split()
        if path.suffix in (".json", ".jsonl"):
            if fields:
                yield _of_record(_json(line, name), name, classes)
        elif len(fields) == 1:
            raise ValueError(f"{name}: {line!r} has no label after the word")
        elif fields and fields[0] != "-DOCSTART-":
            words, labels = [*words, fields[0]], [*labels, fields[-1]]
        elif words:
            yield _joined(words, labels, f"the sentence before {name}")
            words, labels = [], []


def _json(line: str, name: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as e:
        raise ValueError(f"{name} is no JSON: {e}") from None


def _of_record(record: Any, name: str, classes: Sequence[str]) -> Text:
    if not isinstance(record, Mapping):
        record = {"text" if isinstance(record, str) else "tokens": record}
    words, text = record.get("tokens"), record.get("text")
    if words is None and isinstance(text, str):
        spans = [match.span() for match in _WORD.finditer(text)]
        if (entities := record.get("entities")) is None:
            return Text(text, spans, None, name)
        return Text(text, spans, *_labels_of(entities, spans, name))
    tags = next((record[key] for key in _TAGS if key in record), None)
    if not words or (tags is not None and len(tags) != len(words)):
        raise ValueError(f"{name} has no 'text', nor 'tokens' with as many 'tags': {record}")
    numbers = [tag for tag in tags or () if not isinstance(tag, str)]
    if numbers and not 0 <= min(numbers) <= max(numbers) < len(classes):
        raise ValueError(f"{name} has labels up to {max(numbers)}: name all with classes=")
    named = tags and [tag if isinstance(tag, str) else classes[tag] for tag in tags]
    return _joined(words, named, name)


def _joined(words: Sequence[str], labels: Sequence[str] | None, name: str) -> Text:
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    spans = [(int(end) - len(word), int(end)) for word, end in zip(words, ends, strict=True)]
    return Text(" ".join(words), spans, None if labels is None else [*labels], name)


def _labels_of(
    entities: Sequence[Mapping[str, Any]], words: Sequence[tuple[int, int]], name: str
) -> tuple[list[str], str, int]:
    """Return what follows the words in a `Text`, from the characters of entities."""
    labels, misfits = ["O"] * len(words), 0
    for entity in entities:
        start, end, label = entity["start"], entity["end"], entity["label"]
        inside = [i for i, (a, b) in enumerate(words) if a < end and start < b]
        if not inside or any(labels[i] != "O" for i in inside):
            why = "overlaps another one" if inside else "holds no word of the text"
            raise ValueError(f"{name}: the entity {dict(entity)} {why}")
        for i in inside:
            labels[i] = f"{'B' if i == inside[0] else 'I'}-{label}"
        misfits += words[inside[0]][0] < start or end < words[inside[-1]][1]
    return labels, name, misfits


def classes_of(texts: Sequence[Text], stored: Sequence[str]) -> list[str]:
    """Return the labels of texts, both B and I of each kind; the `stored` ones if they suffice."""
    found = {label for text in texts for label in text.labels or ()}
    if found <= {*stored}:
        return [*stored]
    kinds = {name[2:] for name in found if name.startswith(("B-", "I-"))}
    both = {f"{prefix}-{kind}" for kind in kinds for prefix in "BI"}
    return sorted(found | both, key=lambda n: (n != "O", n[2:] if n in both else n, n))
