"""Notes: entries that this package writes into the metadata of a model, as JSON.

Notes about adapters and a new head say which tensors train by default, and how adapters are merged;
`merge_lora` removes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from onnx import ModelProto

from onnxgrad.errors import ModelError
from onnxgrad.model.traversal import keep_only

ADAPTERS = "onnxgrad.adapters"  # a list of dicts, an adapter each; "tensors": names of weights
INPUTS = "onnxgrad.adapter_inputs"  # as ADAPTERS, of a base whose adapters are inputs
HEAD = "onnxgrad.head"  # a list of names: the tensors of a new head
CONSTANTS = "onnxgrad.constants"  # a list of names: initializers that are no weights
SPARSE = "onnxgrad.sparse"  # a list of names: initializers that were sparse
RANGES = "onnxgrad.ranges"  # a list of dicts, a scale that trains each; only while it trains
LISTS = ADAPTERS, INPUTS, HEAD, CONSTANTS, SPARSE
CLASSES = "onnxgrad.classes"  # a list of labels: the classes of a model without labels inside
PRIMAL = "onnxgrad.primal"  # of a node: name of the output of the node that it differentiates
LOSS = "onnxgrad.loss"  # of `add_loss_output`, a dict: names of label and prediction, and more

_WORDS = ("form", "module", "path")  # entries of an adapter that are no names of values


def read_note(proto: ModelProto, key: str) -> list[Any]:
    """Return the list that the metadata of a model have under `key`; [] without such an entry.

    Raises:
        ModelError: the entry is no list in JSON.
    """
    text = next((entry.value for entry in proto.metadata_props if entry.key == key), "[]")
    try:
        note = json.loads(text)
    except (ValueError, RecursionError):
        note = None
    if not isinstance(note, list):
        raise ModelError(f"the metadata entry {key!r} of the model is broken: remove the entry")
    return note


def write_note(proto: ModelProto, key: str, note: list[Any]) -> None:
    """Write the list `note` into the metadata of a model under `key`, in place.

    It replaces an earlier entry; an empty list removes it.
    """
    keep_only(proto.metadata_props, lambda entry: entry.key != key)
    if note:
        proto.metadata_props.add(key=key, value=json.dumps(note))


def note_trained(proto: ModelProto, names: Iterable[str]) -> None:
    """Record in the metadata that tensors train beside adapters, as a new head does, in place."""
    head = read_note(proto, HEAD)
    if more := [name for name in names if name not in head]:
        write_note(proto, HEAD, [*head, *more])


def read_adapters(proto: ModelProto) -> list[dict[str, Any]]:
    """Return the adapters of `proto` by its metadata, a dict for each.

    Raises:
        ModelError: an adapter names a tensor that the model lacks, or the metadata are broken.
    """
    adapters = read_note(proto, ADAPTERS)
    present = {tensor.name for tensor in proto.graph.initializer}
    for adapter in adapters:
        if not isinstance(adapter, dict) or not isinstance(adapter.get("tensors"), list):
            raise ModelError(
                f"the metadata entry {ADAPTERS!r} of the model is broken: remove the entry"
            )
        for name in adapter["tensors"]:
            if name not in present:
                raise ModelError(
                    f"the metadata {ADAPTERS!r} names the adapter {name!r}, which is no "
                    "initializer of the model: a tool renamed or removed it. Merge adapters "
                    "(merge_lora) before other tools modify the file, or remove the metadata"
                )
    return adapters


def adapter_dropout(proto: ModelProto) -> dict[str, float]:
    """Return the probability of each dropout of the adapters, by the output of its node."""
    uses = _adapter_uses(proto)
    return {use["dropout"]: float(a["dropout"]) for a, use in uses if use.get("dropout")}


def stopped_values(proto: ModelProto) -> set[str]:
    """Return the values of adapters and scales through which a `Trainer` lets no gradient flow."""
    scales = {name for note in read_note(proto, RANGES) for name in note["stopped"]}
    return scales | {use["norm"] for _, use in _adapter_uses(proto) if use.get("norm")}


def _adapter_uses(proto: ModelProto) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return pairs of adapter and use, for all uses of all adapters of `proto`."""
    return [(a, use) for a in read_adapters(proto) for use in a.get("uses", ())]


def rename_notes(proto: ModelProto, new_names: Mapping[str, str]) -> None:
    """Replace the names of values in the notes, in place."""

    def renamed(note: Any) -> Any:
        if isinstance(note, dict):
            return {key: v if key in _WORDS else renamed(v) for key, v in note.items()}
        if isinstance(note, list):
            return [renamed(entry) for entry in note]
        return new_names.get(note, note) if isinstance(note, str) else note

    for entry in proto.metadata_props:
        if entry.key in LISTS:
            entry.value = json.dumps(renamed(read_note(proto, entry.key)))
        elif entry.key == LOSS:
            loss = json.loads(entry.value)
            values = {k: renamed(v) for k, v in loss.items() if k in ("label", "prediction")}
            entry.value = json.dumps(loss | values)


def fine_tuned_tensors(proto: ModelProto) -> list[str]:
    """Return the names of the tensors of adapters, and of a new head; [] without adapters."""
    adapters = read_adapters(proto)
    if not adapters:
        return []
    tensors = [name for adapter in adapters for name in adapter["tensors"]]
    return list(dict.fromkeys([*tensors, *read_note(proto, HEAD)]))
