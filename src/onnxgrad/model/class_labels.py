"""Read the labels of classes from the nodes of a model that turn scores into labels."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto

from onnxgrad.model.traversal import nodes_of
from onnxgrad.model.weights import constant_refs
from onnxgrad.operators import SAME_ELEMENTS, operator_of

Labels = list[str] | list[int]

_ATTRIBUTES = ("classlabels_strings", "classlabels_int64s", "classlabels_ints")


class LabelNodes:
    """The nodes of a model, the node that computes each tensor, and the labels in nodes."""

    def __init__(self, proto: ModelProto) -> None:
        self.nodes = nodes_of(proto)
        self.producers = {y: node for node in self.nodes for y in node.output}
        self._constants = {ref.graph_name: ref for ref in constant_refs(proto)}

    def computing(self, name: str | None) -> NodeProto | None:
        """Return the node that computes the elements of a tensor, before moves and casts."""
        node = self.producers.get(name or "")
        while node is not None and node.op_type in SAME_ELEMENTS:
            node = self.producers.get(node.input[0])
        return node

    def constant(self, name: str) -> np.ndarray | None:
        """Return the value of the constant `name`; None if no constant has this name."""
        ref = self._constants.get(name)
        return None if ref is None else ref.array()

    def selected(self, node: NodeProto | None) -> Labels | None:
        """Return the labels that a node selects from; None if it selects no label.

        It is a LabelEncoder of class numbers, or a Gather or ArrayFeatureExtractor of a constant.
        """
        if node is None:
            return None
        if node.op_type == "LabelEncoder":
            values = _attribute_lists(node)
            keys = values.get("keys_int64s", [])
            labels: Any = values.get("values_strings") or values.get("values_int64s", [])
            pairs = sorted(zip(keys, labels, strict=False))
            return [label for _, label in pairs] if len(keys) == len(labels) else None
        if operator_of(node).lookup_operand is None:
            return None
        table = self.constant(node.input[0])
        if table is None or table.dtype.kind in "OSU":
            return None if table is None else list(map(str, table.ravel()))
        whole = table.dtype.kind in "iu" or bool((table == np.trunc(table)).all())
        return table.ravel().astype(int).tolist() if whole else None


def stored_labels(proto: ModelProto) -> Labels | None:
    """Return the labels of the classes in the order of the scores; None if no node has labels.

    A ZipMap has labels, a classifier of `ai.onnx.ml`, or a node behind an ArgMax.
    """
    known = LabelNodes(proto)
    for node in sorted(known.nodes, key=lambda node: node.op_type != "ZipMap"):
        if labels := labels_in_attributes(node):
            return labels
    for node in known.nodes:
        index = operator_of(node).lookup_operand
        winner = None if index is None else known.computing(node.input[index])
        if winner is not None and winner.op_type in ("ArgMax", "TopK"):
            return known.selected(node)
    return None


def labels_in_attributes(node: NodeProto | None) -> Labels | None:
    """Return the labels in the attributes of a classifier of `ai.onnx.ml`, or of a ZipMap."""
    values = {} if node is None else _attribute_lists(node)
    return next((values[name] for name in _ATTRIBUTES if values.get(name)), None)


def _attribute_lists(node: NodeProto) -> dict[str, Labels]:
    """Return the attributes of a node that are lists of integers or texts, by name."""
    return {
        a.name: [*a.ints] or [text.decode(errors="replace") for text in a.strings]
        for a in node.attribute
    }
