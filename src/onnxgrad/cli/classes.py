"""The labels of the classes in a model, and targets that are labels as class numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from onnxgrad.cli.cells import (
    first_text,
    is_empty,
    is_text,
    refuse,
    refuse_missing,
    remedy,
    row_number,
    short,
)
from onnxgrad.data.arrays import DataError
from onnxgrad.model.traversal import nodes_of

CLASSES = "onnxgrad.classes"  # metadata: the labels of the classes, as a list in JSON
_ATTRIBUTES = ("classlabels_strings", "classlabels_int64s", "classlabels_ints")
_MOVES = frozenset("Cast Reshape Squeeze Unsqueeze Flatten Identity".split())

Labels = list[str] | list[int]


def class_labels(proto: ModelProto) -> Labels | None:
    """Return the labels of the classes in the order of the scores; None if the model has none.

    They are in its metadata, or in the nodes that turn scores into labels: a ZipMap, a classifier
    of `ai.onnx.ml`, a LabelEncoder, or a Gather or ArrayFeatureExtractor behind an ArgMax.
    """
    for entry in proto.metadata_props:
        if entry.key == CLASSES:
            noted = json.loads(entry.value)
            if isinstance(noted, list) and noted:
                return noted
    nodes = nodes_of(proto)
    for node in sorted(nodes, key=lambda node: node.op_type != "ZipMap"):
        for attribute in node.attribute:
            if attribute.name in _ATTRIBUTES and (attribute.strings or attribute.ints):
                return _texts(attribute.strings) or list(attribute.ints)
    return _behind_argmax(proto, nodes)


def _behind_argmax(proto: ModelProto, nodes: Sequence[NodeProto]) -> Labels | None:
    """Return the labels that an index of the largest score chooses from."""
    tensors = {t.name: t for t in proto.graph.initializer}
    producers = {y: node for node in nodes for y in node.output}
    for node in nodes:
        if node.op_type == "Constant":
            tensors.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
    for node in nodes:
        if node.op_type == "LabelEncoder" and _is_index(node.input[0], producers):
            values = {a.name: a for a in node.attribute}
            if "keys_int64s" in values and "values_strings" in values:
                texts = _texts(values["values_strings"].strings)
                return [
                    label
                    for _, label in sorted(zip(values["keys_int64s"].ints, texts, strict=True))
                ]
        chosen = node.op_type in ("ArrayFeatureExtractor", "Gather") and node.input[0] in tensors
        if chosen and _is_index(node.input[1], producers):
            return _of_tensor(tensors[node.input[0]])
    return None


def _is_index(name: str, producers: dict[str, NodeProto]) -> bool:
    """Return whether a value is the result of an ArgMax, moved or cast."""
    node = producers.get(name)
    while node is not None and node.op_type in _MOVES:
        node = producers.get(node.input[0])
    return node is not None and node.op_type in ("ArgMax", "TopK")


def _of_tensor(tensor: TensorProto) -> Labels | None:
    if tensor.data_type == TensorProto.STRING:
        return _texts(tensor.string_data)
    array = numpy_helper.to_array(tensor).ravel()
    return array.astype(int).tolist() if array.dtype.kind in "iu" else None


def _texts(values: Iterable[bytes]) -> list[str]:
    return [value.decode(errors="replace") for value in values]


def keep_classes(proto: ModelProto, classes: Sequence[Any]) -> None:
    """Write the labels of the classes into the metadata, in place."""
    kept = [entry for entry in proto.metadata_props if entry.key != CLASSES]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    proto.metadata_props.add(key=CLASSES, value=json.dumps(list(classes)))


def numbered(
    name: str,
    column: np.ndarray,
    classes: Labels | None,
    numeric_loss: Callable[[], str | None] = lambda: None,
) -> np.ndarray:
    """Return a target as class numbers if it holds labels, or else as it is.

    `numeric_loss` returns the name of a loss that compares with numbers; None for others.

    Raises:
        DataError: texts, and no `classes` or others than these.
    """
    flat = column.ravel().tolist()
    texts = column.dtype.kind in "OSU" and any(map(is_text, flat))
    if texts:
        refuse_missing({name: np.array(list(map(is_empty, flat))).reshape(column.shape)})
    if texts and classes is None:
        first = first_text(flat)
        where = f"column {name!r} is text, first in row {row_number(first)}: {short(flat[first])}"
        if loss := numeric_loss():
            raise DataError(
                f"{where}; the loss {loss} compares with numbers: {remedy(flat[first], flat)}, or "
                "name another column with --target"
            )
        names = sorted({str(value) for value in flat})
        shown = ",".join(names[:8]) + (",..." if len(names) > 8 else "")
        raise DataError(
            f"{where}; if it names classes, list them in the order of the model's output with "
            f"--classes {shown}, or train a new last layer with --head {shown}"
        )
    if classes is None or not (texts or _are_labels(classes, column)):
        return column
    index = {str(label): i for i, label in enumerate(classes)}
    numbers = np.array([index.get(_key(v), -1) for v in flat]).reshape(column.shape)
    listed = ", ".join(map(str, classes[:12])) + (", ..." if len(classes) > 12 else "")
    refuse(numbers < 0, column, f"column {name!r}: the classes are {listed}")
    return numbers


def _are_labels(classes: Labels, column: np.ndarray) -> bool:
    """Return whether numbers are labels of classes rather than their indices."""
    keys = list(map(str, classes))
    return keys != list(map(str, range(len(keys)))) and {
        _key(value) for value in np.unique(column).tolist()
    }.issubset(keys)


def _key(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
