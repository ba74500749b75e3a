"""Cross-entropies: the losses of classes along an axis, and of two classes an element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import named
from onnxgrad.graph import shapes
from onnxgrad.losses.spec import Terms

_END = np.iinfo(np.int64).max


def cross_entropy(
    op, prediction, label, from_logits=True, soft_labels=False, label_smoothing=0.0,
    ignore_index=-100, eps=1e-7, axis=None, class_weight=None, shift=False,
):  # fmt: skip
    """-w_c t_c log p_c for every class c, t the one-hot or soft label, smoothed.

    Logits must be finite: mask a class with a large negative number, not with -inf.
    Smoothing: t <- (1 - s) t + s / C (Szegedy et al. 2016, arXiv:1512.00567).

    Options:
        from_logits: whether the prediction is a score; otherwise it is a probability, clipped to at
            least `eps`. None: decided by the graph, see `losses.applied_to`.
        soft_labels: whether labels are probabilities or one-hot, of the shape of the prediction.
        label_smoothing: s.
        ignore_index: the class index whose loss is zero.
        axis: that of the classes. None: decided by the graph.
        class_weight: w, as an array (C,) or {class: weight}, 1 for other classes.
        shift: the prediction at a position of axis 1 is compared with the label at the next one, as
            language models are trained. For predictions (N, T, V).
    """
    axis = _axis(prediction, axis)
    prediction, label = _shifted(op, prediction, label, axis) if shift else (prediction, label)
    classes = _dims(prediction)[axis]
    static = isinstance(classes, int)
    log_p = _log_p(op, prediction, axis, from_logits, eps)
    share = 0.0
    if label_smoothing:
        share = label_smoothing / (classes if static else _length(op, prediction, axis))
    if soft_labels:
        minus_t = (label_smoothing - 1.0) * label - share if label_smoothing else -label
    else:
        index = op.Unsqueeze(label, [axis])
        hit = op.Equal(index, _along(op, prediction, axis, _classes(op, prediction, axis)))
        yes, no = (label_smoothing - 1.0) - share, -share
        minus_t = op.Where(hit, *(op.const(v, prediction.dtype) for v in (yes, no)))
        if label_smoothing or 0 <= ignore_index < (classes if static else _END):  # else t is 0
            minus_t = op.Where(op.Equal(index, ignore_index), 0.0, minus_t)
        if not static:
            op.set_type_like(minus_t, prediction)
    if class_weight is not None:
        weight = _class_weights(op, class_weight, prediction, axis)
        minus_t = minus_t * _along(op, prediction, axis, weight)
    return minus_t * log_p


def cross_entropy_terms(
    op, prediction, label, from_logits=True, soft_labels=False, label_smoothing=0.0,
    ignore_index=-100, eps=1e-7, axis=None, class_weight=None, shift=False,
):  # fmt: skip
    """-log p_y for every label y, with the weight w_y, or 0 where y is ignored.

    The mean equals that of `torch.nn.functional.cross_entropy`: with smoothing, a term is
    (1 - s) w_y l_y + s / C sum_c w_c l_c, and the sum of terms is divided by that of w_y. With soft
    labels it is divided by their number.

    A label out of range fails when the model runs, but one of -C to -1 counts from the last class:
    trainers check labels before.
    """
    axis = _axis(prediction, axis)
    prediction, label = _shifted(op, prediction, label, axis) if shift else (prediction, label)
    log_p = _log_p(op, prediction, axis, from_logits, eps)
    weighted = log_p
    if class_weight is not None:
        vector = _class_weights(op, class_weight, prediction, axis)
        weighted = _along(op, prediction, axis, vector) * log_p
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
    loss = -chosen
    weight = op.const(1.0, prediction.dtype)
    if class_weight is not None:
        weight = _label_weights(op, class_weight, prediction, axis, index)
    if label_smoothing:
        rest = op.ReduceMean(weighted, [axis], keepdims=0)
        if class_weight is not None:
            _require_positive(class_weight)
            rest = rest / weight
        loss = (1.0 - label_smoothing) * loss - label_smoothing * rest
    # a masked class may have an infinite loss
    loss, weight = (op.Where(ignored, op.const(0.0, loss.dtype), v) for v in (loss, weight))
    return Terms(loss, weight)


def binary_cross_entropy(
    op, prediction, label, from_logits=False, eps=1e-7, pos_weight=None, label_smoothing=0.0,
    class_weight=None,
):  # fmt: skip
    """-a y log p - (1 - y) log(1 - p), p and 1 - p at least eps, or of a score f, p = 1/(1+e^-f).

    Smoothing: y <- (1 - s) y + s / 2.

    Options:
        from_logits: whether the prediction is a score; None: decided by the graph, see
            `losses.applied_to`.
        eps: bound of the probabilities.
        pos_weight: a, a number or an array that is broadcast to the prediction, as in PyTorch.
        label_smoothing: s.
        class_weight: weights of the labels 0 and 1, (2,) or {class: weight}. In the mean of a
            training loss, unlike `pos_weight`, they are divided by their sum.
    """
    weight = _binary_weights(op, label, class_weight)
    loss = _binary(op, prediction, label, from_logits, eps, pos_weight, label_smoothing)
    return loss if weight is None else weight * loss


def binary_cross_entropy_terms(
    op, prediction, label, from_logits=False, eps=1e-7, pos_weight=None, label_smoothing=0.0,
    class_weight=None,
):  # fmt: skip
    """The same for every element, weighted by the class weight of its label."""
    weight = _binary_weights(op, label, class_weight)
    return Terms(
        _binary(op, prediction, label, from_logits, eps, pos_weight, label_smoothing), weight
    )


def _binary(op, prediction, label, from_logits, eps, pos_weight, smoothing):
    if smoothing:
        label = (1.0 - smoothing) * label + 0.5 * smoothing
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


def _binary_weights(op, label, class_weight):
    """Write the class weight of every label, which may lie between 0 and 1; None for none."""
    if class_weight is None:
        return None
    zero, one = _weight_array(class_weight, 2).tolist()
    return zero + (one - zero) * label


def softplus(op, x):
    """log(1 + e^x), smooth at 0, without overflow.

    onnxruntime has a kernel of Softplus for float32 only. For other dtypes it expands the function
    body of the opset, which overflows or fails. For float64: max(x, 0) - log sigmoid |x|.
    """
    if x.dtype != ir.DataType.DOUBLE:
        return op.Cast(op.Softplus(op.Cast(x, to=ir.DataType.FLOAT)), to=x.dtype)
    positive = op.Greater(x, 0.0)
    return op.Where(positive, x, 0.0) - op.Log(op.Sigmoid(op.Where(positive, x, -x)))


# -- classes along an axis -------------------------------------------------------------------------


def _dims(x: ir.Value) -> shapes.Dims:
    shape = shapes.dims(x)
    assert shape is not None
    return shape


def _axis(prediction: ir.Value, axis: int | None) -> int:
    """Return the axis of the classes, counted from the first; for None it is 1, as in PyTorch."""
    n = shapes.rank(prediction)
    if n is None or n < 2:
        raise ValueError(f"cross_entropy needs a prediction of known rank, 2 or more, not {n}")
    return 1 if axis is None else axis % n


def _shifted(op, prediction, label, axis):
    """Write the predictions without the last position, and the labels without the first."""
    shape = _dims(prediction)
    if len(shape) != 3 or axis != 2:
        raise ValueError(
            f"shift=True needs predictions (N, T, classes), not of shape {shape} with classes "
            f"along axis {axis}"
        )
    n, t, classes = shape
    length = t - 1 if isinstance(t, int) else f"{t or prediction.name} - 1"
    before, after = op.Slice(prediction, [0], [-1], [1]), op.Slice(label, [1], [_END], [1])
    before.shape = ir.Shape([n, length, classes])
    after.shape = ir.Shape([n, length, *_dims(label)[2:]])
    return before, after


def _log_p(op, prediction, axis, from_logits, eps):
    if from_logits:
        return op.LogSoftmax(prediction, axis=axis)
    return op.Log(op.Clip(prediction, eps, 1.0))


def _length(op, prediction, axis):
    """Write the number of classes, a scalar of the dtype of the prediction."""
    length = op.Squeeze(op.Shape(prediction, start=axis, end=axis + 1), [0])
    return op.Cast(length, to=prediction.dtype)


def _classes(op, prediction, axis):
    """Write the class indices 0, 1, ..., (C,)."""
    classes = _dims(prediction)[axis]
    if isinstance(classes, int):
        return op.const(np.arange(classes))
    length = op.Squeeze(op.Shape(prediction, start=axis, end=axis + 1), [0])
    return op.Range(np.int64(0), length, np.int64(1))


def _along(op, prediction, axis, vector):
    """Write a vector of one entry a class, so that it is broadcast along the other axes."""
    return op.Reshape(vector, [-1] + [1] * (len(_dims(prediction)) - 1 - axis))


def _class_weights(op, class_weight, prediction, axis):
    """Write the weights of the classes, (C,), in the dtype of the prediction."""
    classes = _dims(prediction)[axis]
    if isinstance(class_weight, Mapping) and not isinstance(classes, int):
        return _chosen(op, class_weight, _classes(op, prediction, axis), prediction.dtype)
    array = _weight_array(class_weight, classes if isinstance(classes, int) else None)
    return op.const(array.astype(prediction.dtype.numpy()))


def _label_weights(op, class_weight, prediction, axis, index):
    """Write the weight of every label; it does not depend on the prediction."""
    classes = _dims(prediction)[axis]
    if isinstance(class_weight, Mapping) and not isinstance(classes, int):
        return _chosen(op, class_weight, index, prediction.dtype)
    weights = op.Gather(_class_weights(op, class_weight, prediction, axis), index, axis=0)
    weights.shape = index.shape
    return weights


def _chosen(op, class_weight: Mapping, index, dtype):
    """Write the weights of class indices as a chain of comparisons: their number is unknown."""
    weight = op.const(1.0, dtype)
    array = _weight_array(class_weight, None)
    for c in class_weight:
        weight = op.Where(op.Equal(index, int(c)), op.const(float(array[int(c)]), dtype), weight)
    return weight


def _weight_array(class_weight: Any, classes: int | None) -> np.ndarray:
    """Return the class weights as an array of `classes` entries, of any number for None.

    Raises:
        ValueError: another number of them, an entry for no class, or a weight that is negative or
            not finite.
    """
    if isinstance(class_weight, Mapping):
        indices = [c for c in class_weight if not isinstance(c, str) and int(c) == c >= 0]
        outside = [c for c in class_weight if c not in indices or (classes and c >= classes)]
        if outside:
            allowed = "0 and above" if classes is None else f"0 to {classes - 1}"
            raise ValueError(
                f"{named('class_weight')} has {outside}: classes are numbered {allowed}"
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
    return array


def _require_positive(class_weight: Any) -> None:
    if not _weight_array(class_weight, None).all():
        raise ValueError(
            f"{named('class_weight')} holds zeros, which label_smoothing cannot be combined with: "
            "name the class as ignore_index, or give it a small weight"
        )
