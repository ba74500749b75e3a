"""Read the labels of classes from the nodes of a model that turn scores into labels."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto

from onnxgrad.model.traversal import model_nodes
from onnxgrad.model.weights import ConstantRef, constant_refs
from onnxgrad.operators import SAME_ELEMENTS, operator_of

Labels = list[str] | list[int]

_ATTRIBUTES = ("classlabels_strings", "classlabels_int64s", "classlabels_ints")


class LabelNodes:
    """An index of a model to look up the node that computes a tensor, the values of constants, and
    the class labels stored in nodes.
    """

    def __init__(self, proto: ModelProto) -> None:
        self.nodes = model_nodes(proto)
        self.producers = {y: node for node in self.nodes for y in node.output}
        self._proto = proto

    @cached_property  # most models have no labels, for which constants are looked up
    def _constants(self) -> dict[str, ConstantRef]:
        return {ref.graph_name: ref for ref in constant_refs(self._proto)}

    def producer_before_moves(self, name: str | None) -> NodeProto | None:
        """Return the node that computes the elements of the tensor `name`, skipping nodes that only
        reshape, move or cast them.
        """
        node = self.producers.get(name or "")
        while node is not None and node.op_type in SAME_ELEMENTS:
            node = self.producers.get(node.input[0])
        return node

    def constant_value(self, name: str) -> np.ndarray | None:
        """Return the array of the constant `name`; None if the model has no constant of this
        name.
        """
        ref = self._constants.get(name)
        return None if ref is None else ref.array()

    def selectable_labels(self, node: NodeProto | None) -> Labels | None:
        """Return all class labels among which `node` selects by an index; None if `node` selects no
        label.

        Such a `node` is a LabelEncoder of class numbers, or a Gather or ArrayFeatureExtractor whose
        table is a constant.
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
        table = self.constant_value(node.input[0])
        if table is None or table.dtype.kind in "OSU":
            return None if table is None else list(map(str, table.ravel()))
        whole = table.dtype.kind in "iu" or bool((table == np.trunc(table)).all())
        return table.ravel().astype(int).tolist() if whole else None


def stored_labels(proto: ModelProto) -> Labels | None:
    """Return the class labels that the nodes of a model store, in the order of the class scores;
    None if no node stores labels.

    Labels are stored by a ZipMap, a classifier of `ai.onnx.ml`, or a lookup behind an ArgMax.
    """
    known = LabelNodes(proto)
    for node in sorted(known.nodes, key=lambda node: node.op_type != "ZipMap"):
        if labels := labels_in_attributes(node):
            return labels
    for node in known.nodes:
        index = operator_of(node).lookup_operand
        winner = None if index is None else known.producer_before_moves(node.input[index])
        if winner is not None and winner.op_type in ("ArgMax", "TopK"):
            return known.selectable_labels(node)
    return None


def labels_in_attributes(node: NodeProto | None) -> Labels | None:
    """Return the class labels in the attributes of `node`, a classifier of `ai.onnx.ml` or a
    ZipMap; None if `node` has no labels.
    """
    values = {} if node is None else _attribute_lists(node)
    return next((values[name] for name in _ATTRIBUTES if values.get(name)), None)


def _attribute_lists(node: NodeProto) -> dict[str, Labels]:
    """Return `{name: list}` of the attributes of a node that hold integers or strings."""
    return {
        a.name: [*a.ints] or [text.decode(errors="replace") for text in a.strings]
        for a in node.attribute
    }
