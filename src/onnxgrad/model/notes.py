"""Notes about fine-tuning in the metadata of a model: its adapters, and its new head.

They say what trains by default, and how adapters are merged. A finished model has none.
"""

from __future__ import annotations

import json
from typing import Any

from onnx import ModelProto

from onnxgrad.errors import ModelError

ADAPTERS = "onnxgrad.adapters"  # a list of dicts, an adapter each; "tensors": what it trains
HEAD = "onnxgrad.head"  # a list of names: the tensors of a new head


def read_note(proto: ModelProto, key: str) -> list[Any]:
    """Return the note of `key`; empty if there is none.

    Raises:
        ModelError: the note is not a list in JSON.
    """
    for entry in proto.metadata_props:
        if entry.key == key:
            try:
                note = json.loads(entry.value)
            except ValueError:
                note = None
            if not isinstance(note, list):
                raise ModelError(f"the metadata {key!r} of the model is broken: remove it")
            return note
    return []


def write_note(proto: ModelProto, key: str, note: list[Any]) -> None:
    """Replace the note of `key`, in place; an empty list removes it."""
    kept = [entry for entry in proto.metadata_props if entry.key != key]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    if note:
        proto.metadata_props.add(key=key, value=json.dumps(note))


def fine_tuned(proto: ModelProto) -> list[str]:
    """Return the tensors of adapters, and of a new head beside them; empty without adapters."""
    adapters = read_note(proto, ADAPTERS)
    if not adapters:
        return []
    tensors = [name for adapter in adapters for name in adapter["tensors"]]
    return list(dict.fromkeys([*tensors, *read_note(proto, HEAD)]))
