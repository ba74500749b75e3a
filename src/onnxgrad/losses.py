"""Losses: written into the graph of a model, behind the output that they judge.

A loss is a function `(op, prediction, label, **options)` that writes the loss of every element or
every row; what comes after it (row weights, sum or mean, penalties) is the same for all.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import printable, unknown
from onnxgrad.graph import shapes
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.inference import infer
from onnxgrad.graph.local_functions import raise_opset
from onnxgrad.graph.prepare import to_proto
from onnxgrad.graph.read import ModelLike, non_tensor, read, tensor_behind, to_ir
from onnxgrad.graph.tidy import free, tidy
from onnxgrad.graph.weights import note_constants, sites

# What a trainer has to know of the loss, kept in the model as JSON: `reduction` ("mean" is already
# divided by the rows of the batch, and must not be divided again), the names `label` and
# `prediction`, for class labels their number `classes` and the label `ignore_index`, `loss` if its
# labels are bounded (`LABELS`), `threshold` of the prediction between two classes.
METADATA = "onnxgrad.loss"

Loss = Callable[..., ir.Value]


@dataclass(frozen=True)
class Kind:
    """A loss, what its rows are reduced by, and what its labels are."""

    function: Loss
    reduction: str = "sum"
    classes: bool = False  # labels are class numbers


LOSSES: dict[str, Kind] = {}


def _loss(*names: str, reduction: str = "sum", classes: bool = False) -> Callable[[Loss], Loss]:
    def register(function: Loss) -> Loss:
        LOSSES.update(dict.fromkeys(names, Kind(function, reduction, classes)))
        return function

    return register


@_loss("squared_error", "l2")
def squared_error(op, prediction, label):
    """(f - y)^2."""
    d = prediction - label
    return d * d


@_loss("absolute_error", "l1")
def absolute_error(op, prediction, label):
    """|f - y|."""
    return op.Abs(prediction - label)


@_loss("elastic")
def elastic(op, prediction, label, l1_weight=0.5, l2_weight=0.5):
    """a |f - y| + b (f - y)^2."""
    size = op.Abs(prediction - label)
    return size * (l1_weight + l2_weight * size)


@_loss("log", reduction="mean", classes=True)
def log(op, prediction, label, eps=1e-6):
    """-log p[y] for (N, 2) probabilities clipped to [eps, 1 - eps], labels (N, 1)."""
    if (shapes.dims(prediction) or (None,))[-1] is None:
        prediction = op.Reshape(prediction, [0, 2])  # fails where one column would be broadcast
    hit = op.Equal(label, op.value(np.arange(2)))
    return _number(op, prediction, hit, -1.0, 0.0) * op.Log(op.Clip(prediction, eps, 1.0 - eps))


@_loss("binary_cross_entropy")
def binary_cross_entropy(op, prediction, label, from_logits=False, eps=1e-7):
    """-y log p - (1 - y) log(1 - p), p and 1 - p at least eps, or log(1 + e^f) - y f."""
    if from_logits:
        return softplus(op, prediction) + (-label) * prediction
    p, q = op.Clip(prediction, eps), op.Clip(1.0 - prediction, eps)  # 1 - eps may round to 1
    return (-label) * op.Log(p) + (label - 1.0) * op.Log(q)


@_loss("cross_entropy", classes=True)
def cross_entropy(
    op, prediction, label, from_logits=True, soft_labels=False, label_smoothing=0.0,
    ignore_index=-100, eps=1e-7,
):  # fmt: skip
    """-t_c log p_c for the classes c of axis 1, t the label's class or distribution, smoothed.

    Logits must be finite: mask a class with a large negative number, not with -inf.
    Smoothing moves a share of t to all classes alike (Szegedy et al. 2016, arXiv:1512.00567).
    """
    classes = shapes.dims(prediction)[1]
    if not isinstance(classes, int):
        raise ValueError("cross_entropy needs a prediction with a known number of classes")
    if from_logits:
        logs = op.LogSoftmax(prediction, axis=1)
    else:
        logs = op.Log(op.Clip(prediction, eps, 1.0))
    share = label_smoothing / classes
    if soft_labels:
        minus = (label_smoothing - 1.0) * label - share if label_smoothing else -label
    else:
        number = op.Unsqueeze(label, [1])
        numbers = np.arange(classes).reshape([-1] + [1] * (shapes.rank(prediction) - 2))
        hit = op.Equal(number, op.value(numbers))
        minus = _number(op, prediction, hit, label_smoothing - 1.0 - share, -share)
        if label_smoothing or 0 <= ignore_index < classes:  # else it hits no class anyway
            minus = op.Where(op.Equal(number, ignore_index), 0.0, minus)
    return minus * logs


@_loss("huber")
def huber(op, prediction, label, delta=1.0):
    """d^2 / 2 where |d| < delta, else delta (|d| - delta / 2), d = f - y.  Huber 1964."""
    size = op.Abs(prediction - label)
    inner = op.Clip(size, None, delta)
    return inner * (size - 0.5 * inner)


@_loss("poisson")
def poisson(op, prediction, label, log_input=True, eps=1e-8):
    """e^f - y f, or f - y log(f + eps) when f is the rate itself: Poisson, up to a constant."""
    if log_input:
        return op.Exp(prediction) + (-label) * prediction
    if prediction.dtype == ir.DataType.FLOAT16:
        eps = max(eps, 1e-4)  # 1 / eps must be finite
    return prediction + (-label) * op.Log(prediction + eps)


@_loss("hinge")
def hinge(op, prediction, label):
    """max(0, 1 - y f) for labels -1 and 1, or 0 and 1."""
    return op.Relu(1.0 + _number(op, label, op.Greater(label, 0.0), -1.0, 1.0) * prediction)


LABELS = {  # loss -> what its labels must be, beyond what fits their type
    "binary_cross_entropy": ("between 0 and 1", lambda y: (y >= 0) & (y <= 1)),
    "hinge": ("-1 and 1, or 0 and 1", lambda y: np.isin(y, (-1, 0, 1))),
    "poisson": ("of 0 or more", lambda y: y >= 0),
}


def softplus(op, x):
    """log(1 + e^x), smooth at 0, that does not overflow.

    onnxruntime has a kernel of Softplus for float32 alone. In other types it expands the function
    that the opset has, which overflows, or fails. For float64, max(x, 0) - log sigmoid |x|.
    """
    if x.dtype != ir.DataType.DOUBLE:
        return op.Cast(op.Softplus(op.Cast(x, to=ir.DataType.FLOAT)), to=x.dtype)
    above = op.Greater(x, 0.0)
    return op.Where(above, x, 0.0) - op.Log(op.Sigmoid(op.Where(above, x, -x)))


def row_sums(op: Any, loss: ir.Value) -> ir.Value:
    """Return the sums over all axes but the first, (N, 1)."""
    shape = shapes.dims(loss)
    if shape is None:
        return op.ReduceSum(op.Reshape(loss, [0, -1]), [1], keepdims=1)
    if not shape:
        raise ValueError("a loss must have one number per element or row, not one for all")
    if len(shape) > 1 and shape[1:] != (1,):
        loss = op.ReduceSum(loss, list(range(1, len(shape))), keepdims=1)
    return loss if len(shape) == 2 else op.Reshape(loss, [-1, 1])


def _number(op, like, condition, yes, no):
    """Return `yes` or `no` of the dtype of `like`, by `condition`."""
    return op.Where(condition, op.value(yes, like.dtype), op.value(no, like.dtype))


def add_loss_output(
    onx: ModelLike,
    score_name: str | Loss = "squared_error",
    loss_name: str = "loss",
    label_name: str = "label",
    weight_name: str | None = None,
    penalty: Mapping[str, Any] | None = None,
    output_index: int | str | None = None,
    reduction: str | None = None,
    **kwargs: Any,
) -> ModelProto:
    """Return `onx` with a loss behind one of its outputs, ready to be trained.

    The result has the outputs `[loss, prediction]`, the loss of shape (1, 1), and the inputs of
    `onx`, then the label, then the row weights if asked for. Its opset is that of `onx`, or 18 if
    that is lower.

    Args:
        onx: model, serialized model or path; never modified.
        score_name: a key of `onnxgrad.losses.LOSSES`, or a function
            `(op, prediction, label) -> loss per element or row` that writes nodes with `op`.
        loss_name: name of the loss output; another name of the model makes it give way.
        label_name: name of the label input: of the shape and dtype of the prediction, but int64
            for `log` (N, 1) and for `cross_entropy` (N,), or (N, d1, ...) for (N, C, d1, ...).
            A class number out of range has loss zero: the graph does not look, trainers do.
        weight_name: name of an input of row weights, (N,) or (N, 1); None for none.
        penalty: `{weight: {"l1": a, "l2": b}}` or `{weight: b}`, adds a |w| + b w^2.
        output_index: the output to judge, by place or by name (any float tensor of the graph);
            None when there is one float output.
        reduction: "sum" over the rows, or "mean": divided by their number, ignored or weighted
            ones included. Default: "sum", but "mean" for `log`.
        **kwargs: options of the loss: see the functions in `onnxgrad.losses`.

    Raises:
        ValueError: an unknown loss, option, output or weight, or an output that is no tensor.
        ModelError: `onx` cannot be read.
    """
    kind = kind_of(score_name, reduction, kwargs)
    proto = read(onx)
    chosen = choose_output(proto, output_index)
    for site in sites(proto):
        attribute = site.attribute or (site.node and site.node.domain == "ai.onnx.ml")
        if site.name in (penalty or {}) and (attribute or site.graph is not proto.graph):
            where = "is an attribute" if attribute else "sits in a branch or a local function"
            raise ValueError(f"{site.name!r} {where}: a penalty needs a tensor of the main graph")
    model = to_ir(raise_opset(proto))
    infer(model)
    graph = model.graph
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    prediction = values[chosen]
    graph.outputs[:] = [prediction, *(values[name] for name in penalty or () if name in values)]
    tidy(model)
    free(graph, {loss_name, label_name, weight_name})
    op = Emit(graph)
    label = label_input(op, prediction, kind, label_name, kwargs)
    graph.inputs.append(label)
    with op:
        truth = label
        if label.shape is None:  # or (N,) would meet (N, 1), and become (N, N)
            truth = op.Reshape(label, op.Shape(prediction))
        losses = kind.function(op, prediction, truth, **kwargs)
        if weight_name is not None:
            losses = _weighted(op, model, losses, prediction, weight_name)
        if shapes.rank(losses) == 2:
            loss = op.ReduceSum(losses, keepdims=1)
        else:
            loss = op.Reshape(op.ReduceSum(losses, keepdims=0), [1, 1])
        if kind.reduction == "mean" and shapes.rank(label) != 0:
            rows = op.Shape(label, start=0, end=1)
            if label.shape is None:  # it may have no axis: then it is one row
                rows = op.ReduceProd(rows, keepdims=1)
            loss = loss / op.Cast(rows, to=loss.dtype)
        if penalty:
            from onnxgrad.penalties import add_penalties  # it brings scikit-learn's base

            loss = add_penalties(op, loss, penalty, values)
    loss.name, loss.shape = op.name(loss_name), ir.Shape([1, 1])
    graph.outputs[:] = [loss, prediction]
    about = {"label": label.name, "prediction": chosen, **facts_of(kind, prediction, kwargs)}
    model.metadata_props[METADATA] = json.dumps(about)
    tidy(model)
    note_constants(model, proto)
    return to_proto(model)


def _weighted(
    op: Any, model: ir.Model, losses: ir.Value, prediction: ir.Value, name: str
) -> ir.Value:
    """Return the losses of the rows, times an input of row weights."""
    # without a shape: (N,) and (N, 1) are the same
    weight = ir.Value(name=op.name(name), type=prediction.type)
    op.graph.inputs.append(weight)
    if shapes.rank(losses) is None:
        infer(model)
    shape = shapes.dims(losses)
    if not shape:
        raise ValueError(
            f"row weights need a loss per row, of known rank; that of {prediction.name!r} has the "
            f"shape {printable(losses.shape)}"
        )
    ones = [1] * (len(shape) - 1)
    weight = op.Reshape(weight, [-1, *ones])
    weight.shape = ir.Shape([shape[0], *ones])
    if list(shape[1:]) != ones:
        losses = op.ReduceSum(losses, list(range(1, len(shape))), keepdims=1)
    return losses * weight


def facts_of(kind: Kind, prediction: ir.Value, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a trainer has to know of a loss, beside its names."""
    made: dict[str, Any] = {"reduction": kind.reduction}
    if kind.classes and not options.get("soft_labels"):
        columns = (shapes.dims(prediction) or (None, None))[1]
        made["classes"] = 2 if kind.function is log else columns
        ignored = options.get("ignore_index", -100)
        made["ignore_index"] = ignored if kind.function is cross_entropy else None
    for name in LABELS:
        if LOSSES[name].function is kind.function:
            made["loss"] = name
    if kind.function is hinge or kind.function is binary_cross_entropy:
        raw = kind.function is hinge or options.get("from_logits")
        made["threshold"] = 0.0 if raw else 0.5
    return made


def loss_facts(proto: ModelProto) -> dict[str, Any]:
    """Return what `add_loss_output` noted about the loss of a model; {} for a loss of others."""
    for entry in proto.metadata_props:
        if entry.key == METADATA:
            return json.loads(entry.value)
    return {}


def kind_of(score: str | Loss, reduction: str | None, options: Mapping[str, Any]) -> Kind:
    """Return the loss for a name or a function, after a check of its options."""
    if callable(score):
        kind = Kind(score)
    elif score in LOSSES:
        kind = LOSSES[score]
    else:
        raise unknown("loss", score, LOSSES)
    valid = list(inspect.signature(kind.function).parameters)[3:]
    for name in options:
        if name not in valid:
            shown = getattr(score, "__name__", score)
            raise unknown(f"option of loss {shown!r}", name, valid)
    if reduction not in (None, "sum", "mean"):
        raise unknown("reduction", reduction, ["sum", "mean"])
    return Kind(kind.function, reduction or kind.reduction, kind.classes)


def choose_output(
    proto: ModelProto,
    index: int | str | None,
    remedy: str = "say which one with output_index=",
) -> str:
    """Return the name of the float tensor that `index` stands for; errors name the remedy."""
    outputs = list(proto.graph.output)
    floats = list(dict.fromkeys(o.name for o in outputs if not non_tensor(o) and _is_float(o)))
    if index is None:
        if len(floats) == 1:
            return floats[0]
        behind = [tensor_behind(proto, o.name) for o in outputs if non_tensor(o)]
        choice = ", ".join(repr(c) for c in [*floats, *behind] if c)
        raise ValueError(
            f"the model has {len(floats)} float outputs: {remedy}, "
            f"one of {choice or 'the float tensors inside'}"
        )
    if isinstance(index, str):
        name = index
    elif -len(outputs) <= index < len(outputs):
        name = outputs[index].name
    else:
        raise ValueError(f"output_index={index!r}: the model has {len(outputs)} outputs")
    for output in outputs:
        if output.name == name and non_tensor(output):
            raise ValueError(
                f"output {name!r} is no tensor; use the tensor that it is made from: "
                f"output_index={tensor_behind(proto, name)!r}"
            )
        if output.name == name and name not in floats:
            raise ValueError(f"output {name!r} is no float tensor; choose one of {floats}")
    if name not in {made for node in proto.graph.node for made in node.output}:
        raise unknown("output", name, [o.name for o in outputs])
    return name


def _is_float(value: Any) -> bool:
    return ir.DataType(value.type.tensor_type.elem_type).is_floating_point()


def label_input(
    op: Emit, prediction: ir.Value, kind: Kind, name: str, options: Mapping[str, Any]
) -> ir.Value:
    """Return the label that a loss takes, given the prediction, as an input to be added."""
    shape, dtype = shapes.dims(prediction), prediction.dtype
    if dtype is None or not dtype.is_floating_point():
        raise ValueError(f"output {prediction.name!r} holds {dtype}: a loss needs floats")
    if kind.function is log:
        rows, *columns = (None, None) if shape is None else shape or (None,)
        if columns not in ([2], [None]):
            raise ValueError(f"loss 'log' needs (N, 2) probabilities, not {shape}")
        shape, dtype = (rows, 1), ir.DataType.INT64
    elif kind.classes and not options.get("soft_labels"):
        if shape is None or len(shape) < 2:
            raise ValueError(f"loss 'cross_entropy' needs a prediction (N, C, ...), not {shape}")
        shape, dtype = (shape[0], *shape[2:]), ir.DataType.INT64
    return ir.Value(
        name=op.name(name),
        type=ir.TensorType(dtype),
        shape=None if shape is None else ir.Shape(shape),
    )
