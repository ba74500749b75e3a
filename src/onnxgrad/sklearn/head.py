"""What a file says of its last layer: the tensor that a loss reads, its columns, and the labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto

from onnxgrad.losses.objectives import training_loss
from onnxgrad.model.convert import non_tensor
from onnxgrad.model.surgery import select_model_inputs_outputs

_MOVES = {"Cast", "Reshape", "Identity", "Squeeze", "Unsqueeze", "Flatten", "Transpose"}
_CLASS_LABELS = ("classlabels_ints", "classlabels_strings", "classlabels_int64s")
_LABELS = (TensorProto.STRING, TensorProto.INT64, TensorProto.INT32)


@dataclass
class Head:
    """The end of a model.

    Attributes:
        target: the float tensor that the loss reads.
        label: the output of the predicted labels; None without one, or if its labels are unknown.
        classes: the labels in the order of the columns, if the file has them.
        shape: of `target` without the rows; None where it is not static.
    """

    target: str
    label: str | None = None
    classes: np.ndarray | None = None
    shape: tuple[int, ...] | None = None

    @property
    def width(self) -> int:
        """The number of columns; 1 for a prediction (N,)."""
        return self.shape[0] if self.shape else 1

    def as_target(self, array: np.ndarray) -> np.ndarray:
        """Return an array, a row each, in the shape of the target."""
        return array.reshape(len(array), *(self.shape or ()))

    def index(self, labels: np.ndarray) -> np.ndarray:
        """Return the columns of labels that the file predicted."""
        assert self.classes is not None
        order = np.argsort(self.classes)
        return order[np.searchsorted(self.classes[order], labels.astype(self.classes.dtype))]


def read_head(proto: ModelProto, output: str | None = None) -> Head:
    """Return what a model says of its end.

    Of two columns that hold the same score or probability with both signs, as skl2onnx writes them,
    the target is the one column that they are computed from.

    Args:
        proto: the model.
        output: the float tensor that the loss reads; None: the only float output, or the tensor
            that a ZipMap returns as dictionaries.

    Raises:
        ValueError: an unknown `output`, or a model with several float outputs and no name.
    """
    loss: Any = "squared_error" if output is None else {output: "squared_error"}
    (target,) = training_loss(loss).outputs(proto)
    producers = {name: node for node in proto.graph.node for name in node.output}
    head = Head(_single_column(proto, producers, target))
    for y in proto.graph.output:
        if non_tensor(y) or y.type.tensor_type.elem_type not in _LABELS:
            continue
        head.label, head.classes = y.name, _classes(proto, producers, y.name)
        if head.classes is not None and y.type.tensor_type.elem_type != TensorProto.STRING:
            head.classes = head.classes.astype(np.int64)
        break
    if head.classes is None:
        zipped = [n for n in proto.graph.node if n.op_type == "ZipMap" and target in n.input]
        head.classes = next((c for c in map(_class_labels, zipped) if c is not None), None)
    head.shape = _shape(proto, head.target)
    if head.classes is None and _is_argmax(producers, head.label) and head.shape:
        head.classes = np.arange(max(head.width, 2))
    head.label = head.label if head.classes is not None else None
    return head


def _single_column(proto: ModelProto, producers: Mapping[str, NodeProto], name: str) -> str:
    """Return p for the columns 1 - p and p, s for -s and s; otherwise `name`."""
    node = producers.get(name)
    if node is None or node.op_type != "Concat" or len(node.input) != 2:
        return name
    other, column = producers.get(node.input[0]), node.input[1]
    if other is None or column not in other.input:
        return name
    rest = [i for i in other.input if i != column]
    number = _constant(proto, producers, rest[0]) if len(rest) == 1 else None
    value = number.ravel().tolist() if number is not None else None
    mirrored = (
        (other.op_type == "Sub" and value == [1.0] and other.input[1] == column)
        or (other.op_type == "Mul" and value == [-1.0])
        or other.op_type == "Neg"
    )
    return column if mirrored else name


def _classes(proto: ModelProto, producers: Mapping[str, NodeProto], name: str) -> np.ndarray | None:
    """Return the labels by class index, from the nodes that compute the output `name`."""
    while (node := producers.get(name)) is not None:
        if (labels := _class_labels(node)) is not None:
            return labels
        if node.op_type in ("ArrayFeatureExtractor", "Gather"):
            table = _constant(proto, producers, node.input[0])
            return None if table is None else _decoded(table.ravel())
        if node.op_type not in _MOVES:
            return None
        name = node.input[0]
    return None


def _class_labels(node: NodeProto) -> np.ndarray | None:
    """Return the labels in the attributes of a classifier, a ZipMap or a LabelEncoder."""
    values = {a.name: [*a.ints] or [*a.strings] for a in node.attribute}
    for name in _CLASS_LABELS:
        if len(values.get(name, ())):
            return _decoded(np.asarray(values[name]))
    if node.op_type == "LabelEncoder" and len(keys := values.get("keys_int64s", ())):
        labels = next((values[n] for n in ("values_strings", "values_int64s") if n in values), ())
        if len(labels) == len(keys):
            return _decoded(np.asarray(labels)[np.argsort(keys)])
    return None


def _is_argmax(producers: Mapping[str, NodeProto], name: str | None) -> bool:
    node = producers.get(name or "")
    while node is not None and node.op_type in _MOVES:
        node = producers.get(node.input[0])
    return node is not None and node.op_type == "ArgMax"


def _constant(
    proto: ModelProto, producers: Mapping[str, NodeProto], name: str
) -> np.ndarray | None:
    for tensor in proto.graph.initializer:
        if tensor.name == name:
            return onnx.numpy_helper.to_array(tensor)
    node = producers.get(name)
    if node is not None and node.op_type == "Constant":
        (a,) = node.attribute
        if a.HasField("t"):
            return onnx.numpy_helper.to_array(a.t)
        listed = [*a.floats] or [*a.ints] or [*a.strings]
        return np.asarray(listed or (a.f if a.type == a.FLOAT else a.i))
    return None


def _decoded(labels: np.ndarray) -> np.ndarray:
    """Return labels as numbers, or as text."""
    if labels.dtype.kind not in "SO":
        return labels
    return np.array([v.decode() if isinstance(v, bytes) else str(v) for v in labels.tolist()])


def _shape(proto: ModelProto, target: str) -> tuple[int, ...] | None:
    kind = select_model_inputs_outputs(proto, [target]).graph.output[0].type.tensor_type
    sizes = [d.dim_value for d in kind.shape.dim[1:]]
    return tuple(sizes) if kind.HasField("shape") and kind.shape.dim and all(sizes) else None
