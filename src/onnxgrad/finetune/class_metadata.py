"""Metadata of other programs that describe the classes of a layer, when the layer is replaced."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from onnx import ModelProto

from onnxgrad.errors import printable
from onnxgrad.reporting import logger

_LISTS = frozenset(
    """names labels classes class_names classnames label_names label_list class_list class_labels
    classlabels categories id2label label2id idx_to_class class_to_idx character characters charset
    alphabet chars""".split()
)
_ALPHABETS = frozenset("character characters charset alphabet chars".split())
_INPUTS_TOO = frozenset("vocab vocabulary tokens dictionary".split())  # or texts that go in
_COUNTS = frozenset(
    """nc num_classes n_classes class_num classes_num number_of_classes class_count num_labels
    n_labels vocab_size""".split()
)
_GONE = object()


@dataclass(frozen=True)
class NewClasses:
    """What replaces the classes of a layer.

    Args:
        old: units of the replaced layer; None: the model had none, its outputs are gone.
        new: units of the new one.
        classes: the new classes, if they have names.
        alone: whether the model has no other outputs, which metadata may describe.
        tables: numbers of rows of the remaining tables: lists of that length describe inputs.
    """

    old: int | None
    new: int
    classes: Sequence[Any] | None
    alone: bool
    tables: frozenset[int]

    def update(self, proto: ModelProto) -> None:
        """Rewrite or remove the metadata about the old classes, in place; say which."""
        rewritten, removed, kept = [], [], []
        for entry in proto.metadata_props:
            if entry.key.startswith("onnxgrad."):
                kept.append(entry)
                continue
            word = re.split(r"[./:]", re.sub("[- ]", "_", entry.key.lower().strip()))[-1]
            value, written = _value_and_writer(entry.value, word)
            changed = self._new_value(word, value)
            if changed is _GONE:
                removed.append(printable(entry.key))
                continue
            if changed is not value:
                entry.value = written(changed)
                rewritten.append(printable(entry.key))
            kept.append(entry)
        if removed:
            del proto.metadata_props[:]
            proto.metadata_props.extend(kept)
        for names, done in ((rewritten, "rewritten"), (removed, "removed")):
            if names:
                logger.warning("metadata that described the old classes are %s: %s", done, names)

    def _new_value(self, word: str, value: Any) -> Any:
        """Return the new value of an entry: `value` itself if it stays, `_GONE` if it goes."""
        if word in _COUNTS:
            same = str(value).strip() == str(self.old)
            if same and (word != "vocab_size" or self.old not in self.tables):
                return self.new if isinstance(value, int) else str(self.new)
            return _GONE if self.alone and word != "vocab_size" else value
        if not isinstance(value, (list, tuple, dict)):
            return value
        if word in _LISTS:
            return self._of_list(value, exact=False)
        if word in _INPUTS_TOO or (len(value) > 2 and _are_names(value)):
            return value if len(value) in self.tables else self._of_list(value, exact=True)
        return self._of_dict(value) if isinstance(value, dict) else value

    def _of_list(self, value: Any, exact: bool) -> Any:
        """Return the new value of a list or dict of classes."""
        if len(value) != self.old:
            near = self.old is None or 0 <= self.old - len(value) <= 2  # without blank, and space
            return _GONE if not exact and (self.alone or near) else value
        if self.classes is None:
            return _GONE
        if isinstance(value, _Characters) and any(len(str(c)) != 1 for c in self.classes):
            return _GONE
        if not isinstance(value, dict):
            return type(value)(self.classes)
        by_class = all(isinstance(v, int) for v in value.values())
        texts = not by_class and any(isinstance(k, str) for k in value)
        pairs = list(enumerate(map(str, self.classes)))
        if by_class:
            return {c: i for i, c in pairs}
        return {str(i) if texts else i: c for i, c in pairs}

    def _of_dict(self, value: dict[Any, Any]) -> Any:
        """Return the new value of a configuration that has classes among others."""
        words = _LISTS | _COUNTS - {"vocab_size"}
        changed = {
            key: self._new_value(str(key).lower(), v)
            if str(key).lower() in words
            else (self._of_dict(v) if isinstance(v, dict) else v)
            for key, v in value.items()
        }
        if all(changed[key] is value[key] for key in value):
            return value
        return {key: v for key, v in changed.items() if v is not _GONE}


class _Characters(list[str]):
    """The characters of a text."""


def _value_and_writer(text: str, word: str) -> tuple[Any, Callable[[Any], str]]:
    """Return the value that the entry `word` holds, and what writes another in the same form."""
    for read, write in ((json.loads, json.dumps), (ast.literal_eval, repr)):
        try:
            value = read(text)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if isinstance(value, (list, tuple, dict)):
            return value, write
        return text, str
    for separator in ("\n", ", ", ",", "; ", ";", "|") if word in _LISTS | _INPUTS_TOO else ():
        if separator in text.strip(separator):
            return _split_names(text, separator)
    return (_Characters(text), "".join) if word in _ALPHABETS else (text, str)


def _split_names(text: str, separator: str) -> tuple[list[str], Callable[[Any], str]]:
    end = separator if text.endswith(separator) else ""
    names = text.removesuffix(end).split(separator)
    return names, lambda new: separator.join(map(str, new)) + end


def _are_names(value: Any) -> bool:
    """Return whether a list holds texts that are no numbers, or a dict numbers them."""
    if isinstance(value, dict):
        numbers, names = list(value), list(value.values())
        if all(isinstance(v, int) for v in names):
            numbers, names = names, numbers
        if sorted(map(str, numbers)) != sorted(map(str, range(len(value)))):
            return False
        value = names
    return all(isinstance(v, str) and not v.strip().lstrip("-").isdigit() for v in value)
