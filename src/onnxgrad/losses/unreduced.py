"""The losses of the rows, out of a graph that reduces them to one number."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.primal.local_functions import inlined, raise_opset
from onnxgrad.errors import printable
from onnxgrad.graph import shapes
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.inference.infer import infer
from onnxgrad.graph.tidy import tidy
from onnxgrad.graph.traversal import reads
from onnxgrad.losses.info import METADATA, loss_info
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.model.read import ModelLike, read

# operator -> what it does to every element before it adds them up
_REDUCTIONS: dict[str, Callable[[Any, ir.Value], ir.Value]] = {
    "ReduceSum": lambda op, x: x,
    "ReduceMean": lambda op, x: x,
    "ReduceSumSquare": lambda op, x: op.Mul(x, x),
    "ReduceL1": lambda op, x: op.Abs(x),
}
_LOSS_OPERATORS = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
_SAME_NUMBER = ("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten")

Step = Callable[[ir.Value], ir.Value]


class _NoSum(ValueError):
    """An output is not the sum or the mean of losses of the rows."""


def unreduced_onnx_loss(onx: ModelLike, output_name: str = "score") -> ModelProto:
    """Return the model whose only output holds the loss of every row, before the reduction.

    `onx` is a model of `add_loss_output`, or another one of which an output is the sum or the mean
    of losses of the rows. What is added to that number without depending on the rows (penalties)
    is gone, factors that are constants stay, and a division by something that depends on the rows
    (their number, the sum of their weights) counts as a part of the mean. The inputs stay, row
    weights among them.

    Args:
        onx: model, serialized model or path; never modified.
        output_name: name of the output; another result of that name makes way.

    Returns:
        The model. Its output has the shape (N, 1), or (N,) where the losses have it. Several
        columns are added up before a sum, and averaged before a `ReduceMean` over all of them: the
        sum of the output over the rows, or its mean for a loss that is a mean, is the loss without
        penalties.

    Raises:
        ValueError: no output is such a sum or mean. The message says what stands in the way.
        ModelError: `onx` cannot be read.
    """
    proto = read(onx)
    model = to_ir(raise_opset(inlined(proto)))
    infer(model)
    graph, op = model.graph, Emit(model.graph)
    label = loss_info(proto).label
    data = [x for x in graph.inputs if x.name not in graph.initializers]
    depends = _dependents(graph, [x for x in data if x.name == label] or data)
    refusals: list[str] = []
    with op:
        for output in list(graph.outputs):
            try:
                score = _unreduced(op, output, depends, data)
            except _NoSum as e:
                refusals.append(f"{output.name!r}: {e}")
                continue
            score = op.name_output(score, output_name, score, set(graph.inputs))
            graph.outputs[:] = [score]
            break
        else:
            raise ValueError(
                f"no output is the sum or the mean of losses of the rows ({'; '.join(refusals)}); "
                "cut the model where the losses are: select_model_inputs_outputs(onx, [name])"
            )
    model.metadata_props.pop(METADATA, None)
    tidy(model)
    return to_proto(model)


def _dependents(graph: ir.Graph, data: list[ir.Value]) -> set[ir.Value]:
    """Return the values of `graph` that depend on `data`, and `data` itself."""
    found = set(data)
    for node in graph:
        if not found.isdisjoint(reads(node)):
            found.update(node.outputs)
    return found


def _unreduced(
    op: Any, loss: ir.Value, depends: Collection[ir.Value], data: list[ir.Value]
) -> ir.Value:
    """Write the losses of the rows of which `loss` is the sum or the mean."""
    linear: list[Step] = []  # what happens to the sum, last step first
    value = loss
    while True:
        node = value.producer()
        if node is None or node.domain or value is not node.outputs[0]:
            raise _NoSum(f"{value.name!r} is no result of a standard operator")
        if node.op_type in _LOSS_OPERATORS:
            rows, mean = _of_operator(op, node)
            break
        if node.op_type in _REDUCTIONS:
            rows, mean = _of_reduction(op, node, data), node.op_type == "ReduceMean"
            break
        value = _step_back(op, node, depends, linear)
    rows = _one_column(op, rows, mean)
    for step in reversed(linear):
        rows = step(rows)
    return op.Cast(rows, to=loss.dtype)


def _step_back(op: Any, node: ir.Node, depends: Collection[ir.Value], linear: list[Step]):
    """Return the operand of `node` that is the sum; note what `node` makes of each of its terms."""
    kind, operands = node.op_type, node.inputs
    moving = [x for x in operands if x in depends]
    if kind in _SAME_NUMBER:
        return operands[0]
    if kind == "Neg" or (kind == "Sub" and moving == [operands[1]]):
        linear.append(op.Neg)
        return moving[0]
    if kind in ("Add", "Sum", "Sub") and len(moving) == 1:
        return moving[0]
    if kind == "Div" and moving == [*operands]:
        return operands[0]
    if kind in ("Mul", "Div") and len(moving) == 1 and (kind == "Mul" or moving[0] is operands[0]):
        factor = next(x for x in operands if x is not moving[0])
        if set(shapes.dims(factor) or ()) <= {1}:
            number = op.Reshape(factor, [])
            linear.append(lambda x: op.emit(kind, [x, number], {}))
            return moving[0]
    raise _NoSum(f"it comes from {_where(node)}, and neither from a sum nor from a mean")


def _of_operator(op: Any, node: Any) -> tuple[ir.Value, bool]:
    attributes = {a.name: a.value for a in node.attributes.values()}
    reduction = attributes.get("reduction", "mean")
    if reduction == "none":
        raise _NoSum(f"{_where(node)} does not reduce")
    attributes["reduction"] = "none"
    losses = op.emit(node.op_type, node.inputs, attributes)
    losses.shape = node.inputs[1].shape  # that of the labels
    return losses, reduction == "mean"


def _of_reduction(op: Any, node: ir.Node, data: list[ir.Value]) -> ir.Value:
    x, left = node.inputs[0], shapes.dims(node.outputs[0])
    assert x is not None
    shape = shapes.dims(x)
    if set(left or ()) - {1} or (left is None and len(node.inputs) > 1):
        raise _NoSum(f"{_where(node)} is not known to leave one number, but {left or 'any shape'}")
    first = shape[0] if shape else None
    if shape == () or (isinstance(first, int) and not _may_be_rows(first, data)):
        raise _NoSum(f"{_where(node)} adds up {shape}, where no axis is that of the rows")
    return _REDUCTIONS[node.op_type](op, x)


def _may_be_rows(length: int, data: list[ir.Value]) -> bool:
    """Tell whether an axis of fixed length may be the rows, or the rows times another axis."""
    known = [shape[0] for x in data if (shape := shapes.dims(x))]
    return any(isinstance(d, int) and d and length % d == 0 for d in known)


def _one_column(op: Any, losses: ir.Value, mean: bool) -> ir.Value:
    shape = shapes.dims(losses)
    if shape is not None and (len(shape) == 1 or shape[1:] == (1,)):
        return losses
    if shape is None or len(shape) != 2:
        losses = op.Flatten(losses, axis=1)
    return op.emit("ReduceMean" if mean else "ReduceSum", [losses, [1]], {"keepdims": 1})


def _where(node: ir.Node) -> str:
    return f"{printable(node.op_type)} (node {node.name!r}, output {node.outputs[0].name!r})"
