"""The loss of each row, found in a graph that reduces these losses to one number."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import node_text
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.graph.tidy import tidy
from onnxgrad.graph.traversal import dependents
from onnxgrad.losses.info import METADATA, loss_info
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.model.local_functions import inline_functions, raise_opset
from onnxgrad.model.read import ModelLike, read
from onnxgrad.operators import SAME_ELEMENTS, operator_of, shapes


class _NotALossSum(ValueError):
    """Raised for an output of a model that is not recognized as a sum or mean of one loss for each
    row.
    """


def unreduced_onnx_loss(onx: ModelLike, output_name: str = "score") -> ModelProto:
    """Return the model whose only output is the loss of every row, before the reduction.

    `onx` is a model of `add_loss_output`, or any other model with an output that is the sum or the
    mean of losses of the rows. Terms that do not depend on the rows (penalties) are dropped,
    constant factors are kept, and a division by a value that depends on the rows (their number, the
    sum of their weights) counts as the division of a mean. The inputs stay, sample weights
    included.

    Args:
        onx: model, serialized model or path; never modified.
        output_name: name of the output; an existing result of that name is renamed.

    Returns:
        The model. Its output has the shape (N, 1), or (N,) if the losses have it. Several columns
        are summed for a sum, and averaged for a `ReduceMean` over all axes: the sum (or the mean)
        of the output over the rows is the loss without penalties.

    Raises:
        ValueError: no output is such a sum or mean; the message names the node that is none.
        ModelError: `onx` cannot be read.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og, onnxruntime as ort
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2] w = {2.0, 3.0}> { y = Mul(x, w) }''')
        >>> rows = og.losses.unreduced_onnx_loss(og.add_loss_output(model, penalty={"w": 0.1}))
        >>> x = np.float32([[1, 1], [2, 0]])
        >>> session = ort.InferenceSession(rows.SerializeToString())
        >>> session.run(None, {"x": x, "label": x})[0].tolist()
        [[5.0], [4.0]]
    """
    proto = read(onx)
    model = to_ir(raise_opset(inline_functions(proto)))
    infer(model)
    graph, op = model.graph, Emit(model.graph)
    label = loss_info(proto).label
    data = [x for x in graph.inputs if x.name not in graph.initializers]
    depends = dependents(graph, [x for x in data if x.name == label] or data)
    refusals: list[str] = []
    for output in graph.outputs:
        try:
            with op:
                score = op.Cast(_write_row_losses(op, output, depends, data), to=output.dtype)
                score = op.name_output(score, output_name, score, set(graph.inputs))
        except _NotALossSum as e:
            refusals.append(f"{output.name!r}: {e}")
            continue
        graph.outputs[:] = [score]
        model.metadata_props.pop(METADATA, None)
        tidy(model)
        return to_proto(model)
    raise ValueError(
        f"no output is the sum or the mean of losses of the rows ({'; '.join(refusals)}); "
        "cut the model where the losses are: "
        "onnxgrad.graph.select_model_inputs_outputs(onx, [name])"
    )


def _write_row_losses(
    op: Any, total: ir.Value | None, depends: Collection[ir.Value], data: list[ir.Value]
) -> ir.Value:
    """Write the losses of the rows, given a value `total` that is their sum or mean times a
    constant.
    """
    node = None if total is None else total.producer()
    if total is None or node is None or node.domain or total is not node.outputs[0]:
        name = None if total is None else total.name
        raise _NotALossSum(f"{name!r} is not the first output of a standard operator")
    op_type, operands = node.op_type, node.inputs
    if op_type in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
        return _row_losses_of_operator(op, node)
    if operator_of(node).terms is not None:
        return _row_losses_of_reduction(op, node, data)
    varying = [x for x in operands if x in depends]
    if op_type in SAME_ELEMENTS or (op_type == "Div" and varying == [*operands]):
        return _write_row_losses(op, operands[0], depends, data)
    if op_type == "Neg" or (op_type == "Sub" and varying == [operands[1]]):
        return op.Neg(_write_row_losses(op, varying[0], depends, data))
    if op_type in ("Add", "Sum", "Sub") and len(varying) == 1:
        return _write_row_losses(op, varying[0], depends, data)
    if len(varying) == 1 and (op_type == "Mul" or (op_type == "Div" and varying[0] is operands[0])):
        factor = next(x for x in operands if x is not varying[0])
        if set(shapes.dims(factor) or ()) <= {1}:
            number = op.Reshape(factor, [])
            return op.emit(op_type, [_write_row_losses(op, varying[0], depends, data), number], {})
    raise _NotALossSum(f"the output is computed by {node_text(node)}, not by a sum or a mean")


def _row_losses_of_operator(op: Any, node: Any) -> ir.Value:
    """Write the loss of each row from a node such as SoftmaxCrossEntropyLoss, by a copy of the node
    without reduction.
    """
    attributes = {a.name: a.value for a in node.attributes.values()}
    reduction = attributes.get("reduction", "mean")
    if reduction == "none":
        raise _NotALossSum(f"{node_text(node)} does not reduce: its reduction is 'none'")
    losses = op.emit(node.op_type, node.inputs, attributes | {"reduction": "none"})
    losses.shape = node.inputs[1].shape  # the shape of the labels
    return _sum_or_mean_per_row(op, losses, reduction == "mean")


def _row_losses_of_reduction(op: Any, node: ir.Node, data: list[ir.Value]) -> ir.Value:
    """Write the loss of each row, (N, 1), from the operand of a ReduceSum or ReduceMean node."""
    x, reduced, write_terms = node.inputs[0], shapes.dims(node.outputs[0]), operator_of(node).terms
    assert x is not None
    assert write_terms is not None
    shape = shapes.dims(x)
    if set(reduced or ()) - {1} or (reduced is None and len(node.inputs) > 1):
        shown = reduced or "unknown"
        raise _NotALossSum(f"{node_text(node)} does not reduce to one number: its shape is {shown}")
    first = shape[0] if shape else None
    if shape == () or (isinstance(first, int) and not _may_be_row_count(first, data)):
        raise _NotALossSum(
            f"{node_text(node)} reduces the shape {shape}, which has no axis of rows"
        )
    return _sum_or_mean_per_row(op, write_terms(op, x), node.op_type == "ReduceMean")


def _may_be_row_count(length: int, data: list[ir.Value]) -> bool:
    """Return whether an axis length is a multiple of the row count of an input."""
    lengths = [shape[0] for x in data if (shape := shapes.dims(x))]
    return any(isinstance(d, int) and d and length % d == 0 for d in lengths)


def _sum_or_mean_per_row(op: Any, losses: ir.Value, mean: bool) -> ir.Value:
    """Write the sum or mean of each row of losses, (N, 1); losses (N,) are returned unchanged."""
    shape = shapes.dims(losses)
    if shape is not None and (len(shape) == 1 or shape[1:] == (1,)):
        return losses
    if shape is None or len(shape) != 2:
        losses = op.Flatten(losses, axis=1)
    return op.emit("ReduceMean" if mean else "ReduceSum", [losses, [1]], {"keepdims": 1})
