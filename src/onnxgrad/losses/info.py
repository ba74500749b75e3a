"""What trainers need to know of a loss, and its JSON in the metadata of a model."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.losses.formulas import LOSSES
from onnxgrad.losses.spec import LabelBounds, LossSpec
from onnxgrad.operators import shapes

METADATA = "onnxgrad.loss"  # key of the metadata entry


@dataclass(frozen=True)
class LossInfo:
    """What trainers need to know of a loss; None where it does not apply or is unknown.

    Attributes:
        label: name of the label input.
        prediction: name of the output that the loss compares with the labels.
        reduction: "sum" or "mean"; a mean is already divided by the rows of the batch, and must not
            be divided again.
        classes: number of classes, or the symbol of that dimension, where labels are class indices.
        ignore_index: the label whose loss is zero.
        loss: name of the loss in `onnxgrad.losses.LOSSES`, if that bounds the labels.
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
        """Return the facts of a loss for this prediction."""
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
        """The values that labels may have; None for all that their dtype has."""
        return LOSSES[self.loss].bounds if self.loss in LOSSES else None

    def to_metadata(self) -> str:
        """Return the JSON that a model keeps."""
        always = ["label", "prediction", "reduction"]
        always += [] if self.classes is None else ["classes", "ignore_index"]
        entries = vars(self) | {"ignore_nan": self.ignore_nan or None}
        return json.dumps({k: v for k, v in entries.items() if k in always or v is not None})

    @classmethod
    def from_metadata(cls, text: str) -> LossInfo:
        """Return the facts of the JSON that a model keeps, without keys that are unknown here."""
        entries = json.loads(text)
        return cls(**{f.name: entries.get(f.name) for f in fields(cls)})


def loss_info(proto: ModelProto) -> LossInfo:
    """Return what `add_loss_output` noted in a model; all None if it did not write the loss."""
    for entry in proto.metadata_props:
        if entry.key == METADATA:
            return LossInfo.from_metadata(entry.value)
    return LossInfo()
