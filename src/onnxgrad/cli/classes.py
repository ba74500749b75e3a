"""The labels of the classes in a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from onnxgrad.data.tables import Labels
from onnxgrad.finetune.heads import CLASSES
from onnxgrad.model.notes import read_note
from onnxgrad.model.traversal import nodes_of

_ATTRIBUTES = ("classlabels_strings", "classlabels_int64s", "classlabels_ints")
_MOVES = frozenset("Cast Reshape Squeeze Unsqueeze Flatten Identity".split())


def class_labels(proto: ModelProto) -> Labels | None:
    """Return the labels of the classes in the order of the scores; None if the model has none.

    They are in its metadata, or in the nodes that turn scores into labels: a ZipMap, a classifier
    of `ai.onnx.ml`, a LabelEncoder, or a Gather or ArrayFeatureExtractor behind an ArgMax.
    """
    if noted := read_note(proto, CLASSES):
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
