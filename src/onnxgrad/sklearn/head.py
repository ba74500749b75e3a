"""`Head`: the tensor of a model that the loss reads, its columns, and the label output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from onnxgrad.data.class_numbers import ClassNames
from onnxgrad.losses.objectives import training_loss
from onnxgrad.model.class_labels import LabelNodes, labels_in_attributes
from onnxgrad.model.convert import is_non_tensor
from onnxgrad.model.surgery import select_model_inputs_outputs

_LABELS = (TensorProto.STRING, TensorProto.INT64, TensorProto.INT32)


@dataclass
class Head:
    """The outputs that a training reads: the tensor of the loss, called target, and the output of
    labels.

    Attributes:
        target: the float tensor that the loss reads.
        label: the output of the predicted labels; None if the model has no such output, or if the
            output's labels are unknown.
        classes: the labels in the order of the columns, if the file has them.
        shape: shape of `target` without the axis of rows; None where it is not static.
        one_vs_rest: whether each column is the probability, or score, of one class against the
            other classes, as a Sigmoid computes it.
        flipped: whether the two columns are in the other order than `classes`, or the one column
            is the score of the first class.
        has_activation: whether an activation computes the target, which tells a loss whether it
            holds scores or probabilities.
        sums_to_one: whether the columns were between 0 and 1 and had the sum 1 when the model was
            run.
    """

    target: str
    label: str | None = None
    classes: np.ndarray | None = None
    shape: tuple[int, ...] | None = None
    one_vs_rest: bool = False
    flipped: bool = False
    has_activation: bool = False
    sums_to_one: bool = False

    @property
    def column_count(self) -> int:
        """The column count of `target`, the tensor that the loss reads; 1 for the shape (N,)."""
        return self.shape[0] if self.shape else 1

    @property
    def tensor_names(self) -> list[str]:
        """The names of the tensor that the loss reads, and of the output of labels if the model has
        it.
        """
        return [self.target, *filter(None, [self.label])]

    def reshape_as_target(self, array: np.ndarray) -> np.ndarray:
        """Return an array reshaped to the shape of `target`, the tensor that the loss reads."""
        return array.reshape(len(array), *(self.shape or ()))

    def infer_column_layout(self, computed: Mapping[str, np.ndarray]) -> None:
        """Set `shape`, `sums_to_one` and `flipped` from outputs that the model computed for rows.

        Args:
            computed: values of the tensors `target` and `label`, by name.

        Raises:
            ValueError: in most rows, the label is not the class of the largest column.
        """
        values = computed[self.target]
        self.shape = values.shape[1:]
        if values.ndim == 2 and values.shape[1] > 1:
            self.sums_to_one = bool(
                (values >= 0).all() and np.allclose(values.sum(axis=1), 1, atol=1e-3)
            )
        if self.label is None or self.classes is None or values.ndim > 2:
            return
        labels, columns = (
            self.class_indices(computed[self.label].ravel()),
            values.reshape(len(values), -1),
        )
        if columns.shape[1] == 1:
            means = [columns[labels == k].mean() if (labels == k).any() else 0.0 for k in (0, 1)]
            self.flipped = bool(means[0] > means[1]) and len(np.unique(labels)) == 2
            return
        agreeing = float((labels == columns.argmax(axis=1)).mean())
        if agreeing < 0.5 and columns.shape[1] > 2:
            raise ValueError(
                f"the largest column of {self.target!r} is the label in {self.label!r} for "
                f"{agreeing:.0%} of the rows only: name the tensor of the scores of the classes, "
                "as loss={tensor: 'cross_entropy'}, or give the model a new head, by "
                "onnxgrad.replace_head"
            )
        self.flipped = agreeing < 0.5

    def class_indices(self, labels: np.ndarray) -> np.ndarray:
        """Return the class index of each label that the model's label output predicts."""
        assert self.classes is not None
        return ClassNames(self.classes.tolist()).encode_labels(labels)[0]


def read_head(proto: ModelProto, output: str | None = None) -> Head:
    """Return the `Head` of a model: the tensor that the loss reads, and the label output.

    Of two columns that hold the same score or probability with both signs, as skl2onnx writes them,
    the target is the one column from which both are computed.

    Args:
        proto: the model.
        output: the float tensor that the loss reads; None: the only float output, or the tensor
            that a ZipMap returns as dictionaries.

    Raises:
        ValueError: an unknown `output`, or a model with several float outputs and no name.
    """
    loss: Any = "squared_error" if output is None else {output: "squared_error"}
    (target,) = training_loss(loss).outputs(proto)
    known = LabelNodes(proto)
    _refuse_one_vs_one(known.producer_before_moves(target))
    target, one_vs_rest = _scores_before_normalization(known, _positive_class_tensor(known, target))
    activation = _activation_name(known.producer_before_moves(target))
    head = Head(target, one_vs_rest=one_vs_rest or activation == "LOGISTIC")
    head.has_activation = one_vs_rest or activation in ("LOGISTIC", "SOFTMAX")
    head.shape = _static_row_shape(proto, target)
    outputs = (y for y in proto.graph.output if not is_non_tensor(y))
    label = next((y for y in outputs if y.type.tensor_type.elem_type in _LABELS), None)
    node = None if label is None else known.producer_before_moves(label.name)
    labels = labels_in_attributes(node) or known.selectable_labels(node)
    if labels is None:
        zipped = (n for n in proto.graph.node if n.op_type == "ZipMap" and target in n.input)
        labels = next((found for n in zipped if (found := labels_in_attributes(n))), None)
    if labels is None and head.shape and node is not None and node.op_type == "ArgMax":
        labels = list(range(max(head.column_count, 2)))
    if labels is not None:
        head.classes, head.label = np.asarray(labels), label and label.name
    return head


def _positive_class_tensor(known: LabelNodes, name: str) -> str:
    """Return tensor p of class 1 if `name` is Concat(1 - p, p) or Concat(-p, p), else `name`."""
    node = known.producers.get(name)
    if node is None or node.op_type != "Concat" or len(node.input) != 2:
        return name
    other, column = known.producers.get(node.input[0]), node.input[1]
    if other is None or column not in other.input:
        return name
    rest = [i for i in other.input if i != column]
    number = known.constant_value(rest[0]) if len(rest) == 1 else None
    value = None if number is None else number.ravel().tolist()
    mirrored = (
        (other.op_type == "Sub" and value == [1.0] and other.input[1] == column)
        or (other.op_type == "Mul" and value == [-1.0])
        or other.op_type == "Neg"
    )
    return column if mirrored else name


def _activation_name(node: NodeProto | None) -> str:
    """Return "LOGISTIC" for a sigmoid, "SOFTMAX" for a softmax, else the node's attribute
    `post_transform`.
    """
    if node is None:
        return ""
    if node.op_type in ("Softmax", "LogSoftmax"):
        return "SOFTMAX"
    stated = {a.name: a.s for a in node.attribute}.get("post_transform", b"").decode()
    return "LOGISTIC" if node.op_type == "Sigmoid" else stated


def _scores_before_normalization(known: LabelNodes, name: str) -> tuple[str, bool]:
    """Return (s, True) if the tensor `name` is sigmoid(s) divided by its sum, or (`name`, False).

    skl2onnx writes this normalization for linear models with several classes. Its gradient is NaN
    where exp(-s) overflows.
    """
    at: str = name
    for op_type in ("Div", "Add", "Reciprocal", "Add", "Exp", "Mul"):
        node = known.producers.get(at)
        if node is None or node.op_type != op_type:
            return name, False
        at = node.input[0]
    return at, True


def _refuse_one_vs_one(node: NodeProto | None) -> None:
    """Raise `ValueError` if `node` is an SVMClassifier with a score per pair of classes."""
    if node is None or node.op_type != "SVMClassifier":
        return
    labels = labels_in_attributes(node) or []
    if len(labels) > 2 and "prob_a" not in {a.name for a in node.attribute}:
        raise ValueError(
            f"{node.output[1]!r} has a score for each pair of the {len(labels)} classes: export "
            "the SVC with decision_function_shape='ovr'"
        )


def _static_row_shape(proto: ModelProto, target: str) -> tuple[int, ...] | None:
    """Return the static shape of a row of the tensor `target`; None if a length is unknown."""
    kind = select_model_inputs_outputs(proto, [target]).graph.output[0].type.tensor_type
    sizes = [d.dim_value for d in kind.shape.dim[1:]]
    return tuple(sizes) if kind.HasField("shape") and kind.shape.dim and all(sizes) else None
