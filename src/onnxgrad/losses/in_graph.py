"""Losses written into the graph of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.primal.local_functions import raise_opset
from onnxgrad.errors import printable, unknown
from onnxgrad.graph import shapes
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.inference.infer import infer
from onnxgrad.graph.tidy import free, tidy
from onnxgrad.losses.formulas import (
    LABELS,
    LOSSES,
    Loss,
    LossSpec,
    binary_cross_entropy,
    cross_entropy,
    hinge,
    log,
    loss_spec,
)
from onnxgrad.losses.penalties import add_penalties
from onnxgrad.model.convert import non_tensor, tensor_behind, to_ir, to_proto
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.weights import constant_refs, note_constants

# What a trainer has to know of the loss, kept in the model as JSON: `reduction` ("mean" is already
# divided by the rows of the batch, and must not be divided again), the names `label` and
# `prediction`, for class labels their number `classes` and the label `ignore_index`, `loss` if its
# labels are bounded (`LABELS`), `threshold` of the prediction between two classes.
METADATA = "onnxgrad.loss"


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
    kind = loss_spec(score_name, reduction, kwargs)
    proto = read(onx)
    chosen = choose_output(proto, output_index)
    for site in constant_refs(proto):
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
            loss = add_penalties(op, loss, penalty, values)
    loss.name, loss.shape = op.name(loss_name), ir.Shape([1, 1])
    graph.outputs[:] = [loss, prediction]
    about = {"label": label.name, "prediction": chosen, **info_of(kind, prediction, kwargs)}
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


def info_of(kind: LossSpec, prediction: ir.Value, options: Mapping[str, Any]) -> dict[str, Any]:
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


def loss_info(proto: ModelProto) -> dict[str, Any]:
    """Return what `add_loss_output` noted about the loss of a model; {} for a loss of others."""
    for entry in proto.metadata_props:
        if entry.key == METADATA:
            return json.loads(entry.value)
    return {}


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
    op: Emit, prediction: ir.Value, kind: LossSpec, name: str, options: Mapping[str, Any]
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
