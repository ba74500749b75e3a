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
from onnxgrad.model.traversal import keep_only, model_nodes
from onnxgrad.reporting import warn_once

# a list of dicts that describe adapters; "tensors": names of initializers
ADAPTERS = "onnxgrad.adapters"
INPUTS = "onnxgrad.adapter_inputs"  # like ADAPTERS, if the adapters are inputs of the model
HEAD = "onnxgrad.head"  # a list of names: the tensors of a new head
CONSTANTS = "onnxgrad.constants"  # a list of names: initializers that are no weights
SPARSE = "onnxgrad.sparse"  # a list of names: initializers that were sparse
# a list of dicts, "output" and "ratio": Dropout nodes with which a model trains
DROPOUT = "onnxgrad.dropout"
# a list of dicts that describe scales which train; only while a model trains
RANGES = "onnxgrad.ranges"
LISTS = ADAPTERS, INPUTS, HEAD, CONSTANTS, SPARSE, DROPOUT
CLASSES = "onnxgrad.classes"  # a list of class labels, if no node of the model outputs labels
PRIMAL = "onnxgrad.primal"  # in a node's metadata: an output of the node that it differentiates
LOSS = "onnxgrad.loss"  # a dict by `add_loss_output`: names of label, prediction, and more

_WORDS = ("form", "module", "path")  # keys of an adapter's dict whose texts are no names of values


def read_metadata(proto: ModelProto, key: str) -> list[Any]:
    """Return the list that is stored as JSON under `key` in the metadata of a model; [] if the
    metadata lack the key.

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


def write_metadata(proto: ModelProto, key: str, note: list[Any]) -> None:
    """Store the list `note` as JSON under `key` in the metadata of a model, in place.

    The list replaces an earlier list; an empty list removes the entry.
    """
    keep_only(proto.metadata_props, lambda entry: entry.key != key)
    if note:
        proto.metadata_props.add(key=key, value=json.dumps(note))


def record_trained(proto: ModelProto, names: Iterable[str]) -> None:
    """Add tensor names to the metadata entry of tensors that train beside the adapters (`HEAD`), in
    place.
    """
    head = read_metadata(proto, HEAD)
    if more := [name for name in names if name not in head]:
        write_metadata(proto, HEAD, [*head, *more])


def read_adapters(proto: ModelProto) -> list[dict[str, Any]]:
    """Return the adapters that the metadata of `proto` describe: a dict for each adapter, with the
    names of its tensors and its settings.

    Raises:
        ModelError: an adapter names a tensor that the model lacks, or the metadata are broken.
    """
    adapters = read_metadata(proto, ADAPTERS)
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
                    "(merge_lora) before other tools modify the file, or remove this metadata entry"
                )
    return adapters


def trained_dropout(proto: ModelProto) -> dict[str, float]:
    """Return `{output of a Dropout node: probability}` with which a `Trainer` trains by default.

    The nodes are the nodes of adapters, and of `insert_dropout`. The log warns of nodes of
    `insert_dropout` that another tool has removed.
    """
    uses = _adapter_use_pairs(proto)
    ratios = {use["dropout"]: float(a["dropout"]) for a, use in uses if use.get("dropout")}
    if inserted := {note["output"]: float(note["ratio"]) for note in read_metadata(proto, DROPOUT)}:
        kept = {y for node in model_nodes(proto) if node.op_type == "Dropout" for y in node.output}
        if lost := [name for name in inserted if name not in kept]:
            warn_once(
                f"the Dropout nodes of the outputs {lost} are gone: another tool removed or renamed"
                " them, or they belong to another part of the model. Insert them again by "
                "insert_dropout, if the model is to train with them"
            )
        ratios |= {name: ratio for name, ratio in inserted.items() if name in kept}
    return ratios


def stopped_values(proto: ModelProto) -> set[str]:
    """Return the names of values in adapters and quantizers through which a `Trainer` lets no
    gradient flow.
    """
    scales = {name for note in read_metadata(proto, RANGES) for name in note["stopped"]}
    return scales | {use["norm"] for _, use in _adapter_use_pairs(proto) if use.get("norm")}


def _adapter_use_pairs(proto: ModelProto) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return a pair (adapter, use) for each layer that an adapter of `proto` changes, both dicts
    from the metadata.
    """
    return [(a, use) for a in read_adapters(proto) for use in a.get("uses", ())]


def rename_in_metadata(proto: ModelProto, new_names: Mapping[str, str]) -> None:
    """Replace the names of tensors in the metadata entries that this package writes, in place."""

    def rename_in_note(note: Any) -> Any:
        if isinstance(note, dict):
            return {key: v if key in _WORDS else rename_in_note(v) for key, v in note.items()}
        if isinstance(note, list):
            return [rename_in_note(entry) for entry in note]
        return new_names.get(note, note) if isinstance(note, str) else note

    for entry in proto.metadata_props:
        if entry.key in LISTS:
            entry.value = json.dumps(rename_in_note(read_metadata(proto, entry.key)))
        elif entry.key == LOSS:
            loss = json.loads(entry.value)
            values = {k: rename_in_note(v) for k, v in loss.items() if k in ("label", "prediction")}
            entry.value = json.dumps(loss | values)


def fine_tuned_tensors(proto: ModelProto) -> list[str]:
    """Return the names of the tensors of the adapters and of a new head; [] if the model has no
    adapters.
    """
    adapters = read_adapters(proto)
    if not adapters:
        return []
    tensors = [name for adapter in adapters for name in adapter["tensors"]]
    return list(dict.fromkeys([*tensors, *read_metadata(proto, HEAD)]))
