"""Update metadata of other programs that names the classes of a layer which is replaced.

They are `names`, as ultralytics writes it, and `character`, as PaddleOCR does.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Sequence
from typing import Any

from onnx import ModelProto

from onnxgrad.errors import printable
from onnxgrad.reporting import logger

Names = list[Any] | dict[Any, Any]
Reading = tuple[Names | None, Callable[[Names], str]]


def update_class_metadata(
    proto: ModelProto, old: int | None, classes: Sequence[Any] | None, alone: bool
) -> None:
    """Rewrite or remove the metadata about the classes of a replaced layer, in place, and log it.

    Args:
        proto: the model.
        old: units of the replaced layer; None: all outputs of the model were replaced.
        classes: the new classes, if they have names.
        alone: whether the model has no other outputs, which metadata may describe.
    """
    rewritten, removed = [], []
    for entry in [e for e in proto.metadata_props if e.key in _READERS]:
        names, write = _READERS[entry.key](entry.value)
        # a blank and a space may be left out of the names of the old classes
        if names is None or not (alone or old is None or 0 <= old - len(names) <= 2):
            continue
        if len(names) == old and classes is not None:
            entry.value = write(_class_names_in_form_of(names, classes))
            rewritten.append(printable(entry.key))
        else:
            removed.append(printable(entry.key))
            proto.metadata_props.remove(entry)
    for keys, done in ((rewritten, "rewritten"), (removed, "removed")):
        if keys:
            logger.warning("metadata that described the old classes are %s: %s", done, keys)


def _parse_class_names(text: str) -> Reading:
    """Return class names, a list or dict, parsed from a text, and the function that writes them."""
    for read, write in ((json.loads, json.dumps), (ast.literal_eval, repr)):
        try:
            found = read(text)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        return found if isinstance(found, (list, dict)) else None, write
    return None, str


def _parse_characters(text: str) -> Reading:
    """Return the characters, one in each line of a text, and the function that serializes them."""
    end = "\n" if text.endswith("\n") else ""
    return text.removesuffix("\n").split("\n"), lambda new: "\n".join(map(str, new)) + end


def _class_names_in_form_of(old: Names, classes: Sequence[Any]) -> Names:
    """Return class names in the form of `old`: a list, or a dict with text or integer keys."""
    if isinstance(old, list):
        return [*classes]
    number = str if any(isinstance(key, str) for key in old) else int
    return {number(i): str(name) for i, name in enumerate(classes)}


_READERS: dict[str, Callable[[str], Reading]] = {
    "names": _parse_class_names,
    "character": _parse_characters,
}
