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
        one_vs_rest: whether each column is the probability, or score, of one class against the
            others, as a Sigmoid computes it.
        flipped: whether the two columns are in the other order than `classes`, or the one column
            is that of the first class.
        decided: whether an activation computes the target, so that a loss sees what it holds.
        shares: whether the columns were between 0 and 1 and had the sum 1, where the model was run.
    """

    target: str
    label: str | None = None
    classes: np.ndarray | None = None
    shape: tuple[int, ...] | None = None
    one_vs_rest: bool = False
    flipped: bool = False
    decided: bool = False
    shares: bool = False

    @property
    def width(self) -> int:
        """The number of columns; 1 for a prediction (N,)."""
        return self.shape[0] if self.shape else 1

    def as_target(self, array: np.ndarray) -> np.ndarray:
        """Return an array, a row each, in the shape of the target."""
        return array.reshape(len(array), *(self.shape or ()))

    def probe(self, computed: Mapping[str, np.ndarray]) -> None:
        """Learn the shape of the target, and whether it agrees with the labels, from some rows.

        Args:
            computed: the tensors `target` and `label`.

        Raises:
            ValueError: the labels are not those of the largest columns.
        """
        values = computed[self.target]
        self.shape = values.shape[1:]
        if values.ndim == 2 and values.shape[1] > 1:
            self.shares = bool(
                (values >= 0).all() and np.allclose(values.sum(axis=1), 1, atol=1e-3)
            )
        if self.label is None or self.classes is None or values.ndim > 2:
            return
        labels, columns = self.index(computed[self.label].ravel()), values.reshape(len(values), -1)
        if columns.shape[1] == 1:
            means = [columns[labels == k].mean() if (labels == k).any() else 0.0 for k in (0, 1)]
            self.flipped = bool(means[0] > means[1]) and len(np.unique(labels)) == 2
            return
        agreeing = float((labels == columns.argmax(axis=1)).mean())
        if agreeing < 0.5 and columns.shape[1] > 2:
            raise ValueError(
                f"the largest column of {self.target!r} is the label {self.label!r} in "
                f"{agreeing:.0%} of the rows only: name the tensor of the scores of the classes, "
                "as loss={tensor: 'cross_entropy'}, or give the model a new head, by "
                "onnxgrad.replace_head"
            )
        self.flipped = agreeing < 0.5

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
    _refuse_pairs(_computing(producers, target))
    target, one_vs_rest = _before_normalization(producers, _single_column(proto, producers, target))
    activation = _activation(_computing(producers, target))
    head = Head(target, one_vs_rest=one_vs_rest or activation == "LOGISTIC")
    head.decided = one_vs_rest or activation in ("LOGISTIC", "SOFTMAX")
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
    by_argmax = _computing(producers, head.label)
    if head.classes is None and head.shape and by_argmax and by_argmax.op_type == "ArgMax":
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


def _computing(producers: Mapping[str, NodeProto], name: str | None) -> NodeProto | None:
    """Return the node that computes the elements of a tensor, which others only move or cast."""
    node = producers.get(name or "")
    while node is not None and node.op_type in _MOVES:
        node = producers.get(node.input[0])
    return node


def _activation(node: NodeProto | None) -> str:
    """Return "LOGISTIC" or "SOFTMAX" if the node computes one; otherwise another text."""
    if node is None:
        return ""
    post = {a.name: a.s for a in node.attribute}.get("post_transform", b"").decode()
    names = {"Sigmoid": "LOGISTIC", "Softmax": "SOFTMAX", "LogSoftmax": "SOFTMAX"}
    return names.get(node.op_type, post)


def _before_normalization(producers: Mapping[str, NodeProto], name: str) -> tuple[str, bool]:
    """Return the scores s of 1 / (1 + exp(-s)), divided by their sum, and whether it is that.

    skl2onnx writes it for linear models with several classes. Its gradient is NaN where exp(-s)
    overflows.
    """
    at: str = name
    for op_type in ("Div", "Add", "Reciprocal", "Add", "Exp", "Mul"):
        node = producers.get(at)
        if node is None or node.op_type != op_type:
            return name, False
        at = node.input[0]
    return at, True


def _refuse_pairs(node: NodeProto | None) -> None:
    """Raise for the scores of a support vector machine, one for each pair of three classes."""
    if node is None or node.op_type != "SVMClassifier":
        return
    labels = _class_labels(node)
    if labels is not None and len(labels) > 2 and "prob_a" not in {a.name for a in node.attribute}:
        raise ValueError(
            f"{node.output[1]!r} has a score for each pair of the {len(labels)} classes: export "
            "the SVC with decision_function_shape='ovr', or with probability=True"
        )


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
