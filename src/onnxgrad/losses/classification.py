"""Cross-entropy losses: of classes along an axis, of two classes, and of the next token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import named, printable
from onnxgrad.graph.emit import Emit
from onnxgrad.losses.spec import (
    LIKE_PREDICTION,
    LabelBounds,
    Terms,
    axis_positions,
    class_index_kind,
    known_dims,
    register,
    softplus,
    where_const,
    write_class_indices,
)
from onnxgrad.operators.shapes import dims, rank

CAUSAL = "causal_lm"
TOKENS, MASK = "input_ids", "attention_mask"
_END = np.iinfo(np.int64).max


def cross_entropy_terms(
    op, prediction, label, from_logits=True, soft_labels=False, label_smoothing=0.0,
    ignore_index=-100, eps=1e-7, axis=None, class_weight=None, shift=False,
):  # fmt: skip
    """Write for each label y the cross-entropy -log p_y and the class weight w_y, which is 0 for
    ignored labels.

    The weighted mean equals `torch.nn.functional.cross_entropy`: with smoothing, the loss of a
    label is (1 - s) l_y + s / C sum_c w_c l_c / w_y. The terms of soft labels have no weights.

    A label out of range fails when the model runs, but one of -C to -1 counts from the last class:
    trainers check labels before.
    """
    classes, label = _align_prediction_and_label(op, prediction, label, axis, shift)
    weighted = log_p = classes.write_log_probabilities(from_logits, eps)
    axis = classes.axis
    if class_weight is not None:
        weighted = classes.align_with_classes(classes.write_class_weights(class_weight)) * log_p
    if soft_labels:
        loss = (label_smoothing - 1.0) * op.ReduceSum(label * weighted, [axis], keepdims=0)
        if label_smoothing:
            loss = loss - label_smoothing * op.ReduceMean(weighted, [axis], keepdims=0)
        return Terms(loss)
    ignored = op.Equal(label, ignore_index)
    index = op.Where(ignored, 0, label)
    chosen = op.GatherElements(log_p, op.Unsqueeze(index, [axis]), axis=axis)
    chosen = op.Squeeze(chosen, [axis])
    chosen.shape = label.shape
    loss, weight = -chosen, op.const(1.0, log_p.dtype)
    if class_weight is not None:
        weight = classes.write_class_weights(class_weight, index)
    if label_smoothing:
        rest = op.ReduceMean(weighted, [axis], keepdims=0)
        if class_weight is not None:
            if not weight_array(class_weight, None).all():
                raise ValueError(
                    f"{named('class_weight')} holds zeros, which label_smoothing cannot be "
                    "combined with: name the class as ignore_index, or give it a small weight"
                )
            rest = rest / weight
        loss = (1.0 - label_smoothing) * loss - label_smoothing * rest
    # an ignored label may have an infinite loss, and 0 times infinity is NaN
    loss, weight = (op.Where(ignored, op.const(0.0, loss.dtype), v) for v in (loss, weight))
    return Terms(loss, weight)


@register(
    "cross_entropy",
    labels=lambda options: (
        LIKE_PREDICTION if options["soft_labels"] else class_index_kind(options["axis"])
    ),
    has_ignore_index=True,
    write_terms=cross_entropy_terms,
    activation="Softmax",
)
def cross_entropy(
    op, prediction, label, from_logits=True, soft_labels=False, label_smoothing=0.0,
    ignore_index=-100, eps=1e-7, axis=None, class_weight=None, shift=False,
):  # fmt: skip
    """-w_c t_c log p_c for every class c, t the one-hot or soft label, smoothed.

    Logits must be finite: mask a class with a large negative number, not with -inf.
    Smoothing: t <- (1 - s) t + s / C (Szegedy et al. 2016, arXiv:1512.00567).

    Options:
        from_logits: whether the prediction is a score; otherwise it is a probability, clipped to at
            least `eps`. None: the graph decides, see `losses.applied_to`.
        soft_labels: whether labels are probabilities or one-hot, of the shape of the prediction.
        label_smoothing: s.
        ignore_index: the class index whose loss is zero.
        axis: axis of the classes. None: the graph decides.
        class_weight: w, as an array (C,) or {class: weight}, 1 for other classes.
        shift: the prediction at a position of axis 1 is compared with the label at the next one, as
            language models are trained. For predictions (N, T, V).
    """
    classes, label = _align_prediction_and_label(op, prediction, label, axis, shift)
    log_p = classes.write_log_probabilities(from_logits, eps)
    share = label_smoothing / classes.write_class_count() if label_smoothing else 0.0
    if soft_labels:
        minus_t = (label_smoothing - 1.0) * label - share if label_smoothing else -label
    else:
        index = op.Unsqueeze(label, [classes.axis])
        hit = op.Equal(index, write_class_indices(op, classes.prediction, classes.axis))
        minus_t = where_const(op, hit, (label_smoothing - 1.0) - share, -share, log_p)
        # other ignored labels hit no class
        if label_smoothing or 0 <= ignore_index < (classes.static_class_count or _END):
            minus_t = op.Where(op.Equal(index, ignore_index), 0.0, minus_t)
        if classes.static_class_count is None:
            op.set_type_like(minus_t, classes.prediction)
    if class_weight is not None:
        minus_t = minus_t * classes.align_with_classes(classes.write_class_weights(class_weight))
    return minus_t * log_p


@register(
    "binary_cross_entropy",
    bounds=LabelBounds("between 0 and 1", least=0, most=1),
    threshold=lambda options: 0.0 if options["from_logits"] else 0.5,
    activation="Sigmoid",
)
def binary_cross_entropy(
    op, prediction, label, from_logits=False, eps=1e-7, pos_weight=None, label_smoothing=0.0,
    class_weight=None,
):  # fmt: skip
    """-a y log p - (1 - y) log(1 - p), p and 1 - p at least eps, or of a score f, p = 1/(1+e^-f).

    Smoothing: y <- (1 - s) y + s / 2.

    Options:
        from_logits: whether the prediction is a score; None: the graph decides, see
            `losses.applied_to`.
        eps: bound of the probabilities.
        pos_weight: a, a number or an array that is broadcast to the prediction, as in PyTorch.
        label_smoothing: s.
        class_weight: weights of the labels 0 and 1, (2,) or {class: weight}. In the mean of a
            training loss, the sum of losses is divided by the sum of these weights, but not by
            the sum of `pos_weight`.
    """
    weight = None
    if class_weight is not None:  # a label between 0 and 1 gets a weight between both
        zero, one = weight_array(class_weight, 2).tolist()
        weight = zero + (one - zero) * label
    if label_smoothing:
        label = (1.0 - label_smoothing) * label + 0.5 * label_smoothing
    loss = _binary_cross_entropies(op, prediction, label, from_logits, eps, pos_weight)
    return loss if weight is None else Terms(loss, weight)


def _binary_cross_entropies(op, prediction, label, from_logits, eps, pos_weight):
    """Write -a y log p - (1 - y) log(1 - p), with a = `pos_weight`, by default 1."""
    if pos_weight is not None:
        pos_weight = op.const(np.asarray(pos_weight, prediction.dtype.numpy()))
    if from_logits:
        if pos_weight is None:
            return softplus(op, prediction) + (-label) * prediction
        factor = 1.0 + (pos_weight - 1.0) * label
        return (1.0 - label) * prediction + factor * softplus(op, -prediction)
    p, q = op.Clip(prediction, eps), op.Clip(1.0 - prediction, eps)  # 1 - eps may round to 1
    positive = label if pos_weight is None else pos_weight * label
    return (-positive) * op.Log(p) + (label - 1.0) * op.Log(q)


# -- causal language models ------------------------------------------------------------------------


def is_causal(loss: Any) -> bool:
    """Return whether every loss, given by name or as `{output: name}`, is `causal_lm`."""
    names = [*loss.values()] if isinstance(loss, Mapping) else [loss]
    return bool(names) and all(isinstance(name, str) and name == CAUSAL for name in names)


def causal_terms(op: Any, prediction: ir.Value, label: ir.Value, ignore_index: int = -100) -> Terms:
    """Write the loss of `causal_lm` for each label except the first label of a row, and the weight
    of each loss.
    """
    return cross_entropy_terms(op, prediction, label, axis=2, shift=True, ignore_index=ignore_index)


@register(
    CAUSAL,
    labels=lambda options: class_index_kind(2, rank=3, needs="logits (rows, tokens, vocabulary)"),
    has_ignore_index=True,
    write_terms=causal_terms,
    mixes=False,
)
def causal_lm(op, prediction, label, ignore_index=-100):
    """-log p of the label at the next position, p = softmax(logits).

    Labels are token ids that are not shifted. If there are no labels, trainers take `input_ids`
    where `attention_mask` is 1.

    Options:
        ignore_index: the label whose loss is zero, for padding and prompts.
    """
    return cross_entropy(op, prediction, label, axis=2, shift=True, ignore_index=ignore_index)


def labels_from_input_ids(op: Emit, ignore_index: int) -> ir.Value:
    """Write labels that equal the model's input `input_ids`, with `ignore_index` where the input
    `attention_mask` is 0.

    Raises:
        ValueError: the graph has no input of tokens.
    """
    inputs = {str(x.name): x for x in op.graph.inputs}
    if TOKENS not in inputs:
        raise ValueError(
            f"the loss {CAUSAL!r} without labels takes the input {TOKENS!r} as labels, and the "
            f"model has no such input: pass y. Its inputs are {printable(list(inputs))}"
        )
    tokens, mask = inputs[TOKENS], inputs.get(MASK)
    label = op.Cast(tokens, to=ir.DataType.INT64)
    if mask is None or rank(mask) != 2:
        return label
    if dims(mask) != dims(tokens):  # the mask covers past tokens, too
        before = op.const(op.vector(op.dim(mask, 1))) - op.const(op.vector(op.dim(tokens, 1)))
        mask = op.Slice(mask, before, [_END], [1])
    kept = op.Not(op.Equal(mask, op.const(0, mask.dtype)))
    return op.set_type_like(op.Where(kept, label, np.int64(ignore_index)), label)


def refuse_last_position(op: Emit, logits: ir.Value) -> None:
    """Raise `ValueError` if the graph computes the logits of the last position only."""
    tokens = next((x for x in op.graph.inputs if x.name == TOKENS), None)
    if (dims(logits) or ())[1:2] == (1,) and (dims(tokens) or ())[1:2] != (1,):
        raise ValueError(
            f"the model computes {logits.name!r} of the last position only, and the loss "
            f"{CAUSAL!r} needs the logits of all positions: build the model without prune_lm_head, "
            "or export it without a Gather of the last position"
        )


# -- classes along an axis -------------------------------------------------------------------------


@dataclass
class _ClassPrediction:
    """A prediction with a known class axis; its methods write log-probabilities and class weights
    along this axis.
    """

    op: Any
    prediction: ir.Value
    axis: int

    @property
    def static_class_count(self) -> int | None:
        """The number of classes; None if the length of the class axis is not static."""
        length = known_dims(self.prediction)[self.axis]
        return length if isinstance(length, int) else None

    def write_class_count(self) -> Any:
        """Return the number of classes as an int, or if it is not static, write it as a scalar in
        the prediction's dtype.
        """
        length = self.op.dim(self.prediction, self.axis)
        if isinstance(length, int):
            return length
        return self.op.Cast(self.op.Squeeze(length, [0]), to=self.prediction.dtype)

    def align_with_classes(self, vector: ir.Value) -> ir.Value:
        """Reshape a vector (C,) so that it is broadcast along the class axis of the prediction."""
        behind = len(known_dims(self.prediction)) - 1 - self.axis
        return self.op.Reshape(vector, [-1] + [1] * behind)

    def write_log_probabilities(self, from_logits: bool, eps: float) -> ir.Value:
        """Write the log-probabilities of the classes, from logits or from probabilities."""
        if from_logits:
            return self.op.LogSoftmax(self.prediction, axis=self.axis)
        return self.op.Log(self.op.Clip(self.prediction, eps, 1.0))

    def write_class_weights(self, class_weight: Any, index: ir.Value | None = None) -> ir.Value:
        """Write the class weights (C,), or the class weight of each label if the labels are given
        as class indices.
        """
        op, array = self.op, weight_array(class_weight, self.static_class_count)
        dtype: Any = self.prediction.dtype
        # compare indices, as a table needs the class count
        if self.static_class_count is None and isinstance(class_weight, Mapping):
            weight = op.const(1.0, dtype)
            index = axis_positions(op, self.prediction, self.axis) if index is None else index
            for c in class_weight:
                chosen = op.const(float(array[int(c)]), dtype)
                weight = op.Where(op.Equal(index, int(c)), chosen, weight)
            return weight
        weights = op.const(array.astype(dtype.numpy()))
        if index is None:
            return weights
        chosen = op.Gather(weights, index, axis=0)
        chosen.shape = index.shape
        return chosen


def _align_prediction_and_label(op, prediction, label, axis, shift):
    """Return (prediction with its class axis, label) for a cross-entropy; `axis=None` means axis 1,
    as in PyTorch.

    With `shift`, the prediction is without its last position, and the label without the first.
    """
    n = rank(prediction)
    if n is None or n < 2:
        raise ValueError(
            f"cross_entropy needs a prediction (N, C, ...), and {prediction.name!r} has the "
            f"rank {n}: declare its shape, or choose another output"
        )
    axis, shape = 1 if axis is None else axis % n, known_dims(prediction)
    if not shift:
        return _ClassPrediction(op, prediction, axis), label
    if n != 3 or axis != 2:
        raise ValueError(
            f"shift=True needs predictions (N, T, classes), and {prediction.name!r} has the shape "
            f"{shape}, with classes along axis {axis}: leave out shift, or choose another output"
        )
    rows, t, count = shape
    length = t - 1 if isinstance(t, int) else f"{t or prediction.name} - 1"
    before, after = op.Slice(prediction, [0], [-1], [1]), op.Slice(label, [1], [_END], [1])
    before.shape = ir.Shape([rows, length, count])
    after.shape = ir.Shape([rows, length, *known_dims(label)[2:]])
    return _ClassPrediction(op, before, axis), after


def weight_array(class_weight: Any, classes: int | None) -> np.ndarray:
    """Return class weights as a float64 array with one weight for each class; `classes=None` allows
    any number of classes.

    Raises:
        ValueError: another number of weights, a key that is no class index, or a weight that is
            negative or not finite.
    """
    if isinstance(class_weight, Mapping):
        indices = [c for c in class_weight if not isinstance(c, str) and int(c) == c >= 0]
        outside = [c for c in class_weight if c not in indices or (classes and c >= classes)]
        if outside:
            allowed = "0 and above" if classes is None else f"0 to {classes - 1}"
            raise ValueError(
                f"{named('class_weight')} has the keys {outside}: classes are numbered {allowed}"
            )
        array = np.ones(classes or max(map(int, indices), default=0) + 1)
        for c in indices:
            array[int(c)] = class_weight[c]
    else:
        array = np.asarray(class_weight, np.float64)
    if array.ndim != 1 or classes not in (None, len(array)):
        expected = "a vector" if classes is None else f"({classes},), one for each class"
        raise ValueError(
            f"{named('class_weight')} has the shape {array.shape}: it must be {expected}"
        )
    if not (np.isfinite(array) & (array >= 0)).all():
        raise ValueError(
            f"{named('class_weight')} must hold finite numbers of 0 or more, not {class_weight}"
        )
    if classes is not None and not array.any():
        raise ValueError(
            f"{named('class_weight')} is 0 for all classes, so that no row counts: give "
            "one class a weight above 0"
        )
    return array
