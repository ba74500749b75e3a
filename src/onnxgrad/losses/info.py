"""Facts of a loss for trainers (label bounds, reduction), stored in a model as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.graph.emit import Emit
from onnxgrad.losses.formulas import LOSSES
from onnxgrad.losses.spec import LabelBounds, LossSpec
from onnxgrad.operators import shapes

METADATA = "onnxgrad.loss"  # key of the metadata entry


@dataclass(frozen=True)
class LossInfo:
    """Facts about a loss that trainers need, such as the labels that it takes; unknown facts are
    None.

    Attributes:
        label: name of the label input.
        prediction: name of the output that the loss compares with the labels.
        reduction: "sum" or "mean"; a mean is already divided by the number of rows, and must not be
            divided again.
        classes: number of classes, or the symbol of that dimension, where labels are class indices.
        ignore_index: the label whose loss is zero.
        loss: name of the loss in `onnxgrad.losses.LOSSES`, if it has bounds of the labels.
        threshold: the prediction between two classes.
        axis: axis of the classes in the prediction; `add_loss_output` notes it if it is not 1.
        from_logits: whether the prediction holds scores, not probabilities; trainers set it.
        shift: whether a position is compared with the label of the next one; trainers set it.
        ignore_nan: whether labels that are NaN are left out; None if the loss has no such option.

    Examples:
        >>> import onnx_ir as ir
        >>> import onnxgrad as og
        >>> f = ir.Value(name="f", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", 5]))
        >>> og.compat.NegLogLearningLoss(probability_function="softmax").info(f).classes
        5
    """

    label: str | None = None
    prediction: str | None = None
    reduction: str | None = None
    classes: int | str | None = None
    ignore_index: int | None = None
    loss: str | None = None
    threshold: float | None = None
    axis: int | None = None
    from_logits: bool | None = None
    shift: bool | None = None
    ignore_nan: bool | None = None

    @classmethod
    def of(
        cls,
        spec: LossSpec,
        prediction: ir.Value,
        label_name: str | None = None,
        prediction_name: str | None = None,
    ) -> LossInfo:
        """Return the `LossInfo` of a loss that is applied to this prediction."""
        classes = spec.label_kind.classes(shapes.dims(prediction))
        options = spec.all_options
        axis = options.get("axis")
        has_ignored = spec.has_ignore_index and classes is not None
        return cls(
            label=label_name,
            prediction=prediction_name,
            reduction=spec.reduction,
            classes=classes,
            ignore_index=options["ignore_index"] if has_ignored else None,
            loss=spec.name if spec.bounds else None,
            threshold=spec.threshold(options) if spec.threshold else None,
            axis=None if axis == 1 else axis,
            ignore_nan=spec.ignore_nan if spec.may_ignore_nan else None,
        )

    @property
    def bounds(self) -> LabelBounds | None:
        """The values that labels may have; None if labels may have all values of their dtype."""
        return LOSSES[self.loss].bounds if self.loss in LOSSES else None

    def to_metadata(self) -> str:
        """Return the `LossInfo` as JSON text for the metadata of a model."""
        always = ["label", "prediction", "reduction"]
        always += [] if self.classes is None else ["classes", "ignore_index"]
        entries = vars(self) | {"ignore_nan": self.ignore_nan or None}
        return json.dumps({k: v for k, v in entries.items() if k in always or v is not None})

    @classmethod
    def from_metadata(cls, text: str) -> LossInfo:
        """Return the `LossInfo` read from JSON text in the metadata of a model; unknown keys are
        left out.
        """
        entries = json.loads(text)
        return cls(**{f.name: entries.get(f.name) for f in fields(cls)})


def loss_info(proto: ModelProto) -> LossInfo:
    """Return the `LossInfo` in the metadata of a model of `add_loss_output`; for other models, all
    attributes are None.
    """
    for entry in proto.metadata_props:
        if entry.key == METADATA:
            return LossInfo.from_metadata(entry.value)
    return LossInfo()


def require_labels(op: Emit, label: ir.Value, info: LossInfo) -> None:
    """Write nodes that make a run fail if a label is outside of the values that the loss takes.

    The node that fails is a Reshape to a shape with another number of elements, whose name tells
    the valid labels: providers other than the CPU may not check the indices of a Gather, but all
    check shapes.
    """
    users = list(label.uses())
    if not users or (info.classes is None and info.bounds is None):
        return
    with op.at(next(iter(op.graph))):
        if info.classes is not None:
            right = op.GreaterOrEqual(label, 0)
            text = "0 and above"
            if isinstance(info.classes, int):
                right = op.And(right, op.Less(label, info.classes))
                text = f"0 to {info.classes - 1}"
            if info.ignore_index is not None:
                right = op.Or(right, op.Equal(label, info.ignore_index))
                text = f"{text}, or {info.ignore_index}"
        else:
            assert info.bounds is not None
            right, text = info.bounds.write(op, label), info.bounds.text
            if info.ignore_nan:
                right, text = op.Or(right, op.IsNaN(label)), f"{text}, or NaN"
        number = op.ReduceMax(op.Cast(op.Not(right), to=ir.DataType.INT64), keepdims=0)
        shape = op.Add(op.Shape(label), number)
        checked = op.emit("Reshape", [label, shape], {"allowzero": 1}, fresh=True)
        node = op.set_type_like(checked, label).producer()
        assert node is not None
        node.name = f"labels in {label.name!r} are {text}"
    for consumer, i in users:
        consumer.replace_input_with(i, checked)
