"""A loss that the model computes: its output, and the loss as a sum and a count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import argument, named, printable, unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.losses.info import loss_info
from onnxgrad.losses.objectives import WrittenLoss
from onnxgrad.model import weights as constants
from onnxgrad.model.convert import is_non_tensor
from onnxgrad.operators import shapes
from onnxgrad.operators.attributes import int_attribute

BATCH = "onnxgrad_rows"  # a symbolic dimension that no model uses


def loss_output(proto: ModelProto) -> str:
    """Return the name of the output that is the loss.

    Raises:
        ValueError: there is none, or several may be.
    """
    names = [y.name for y in proto.graph.output]
    if "loss" in names:
        return "loss"
    single = [
        y.name
        for y in proto.graph.output
        if all(d.dim_value == 1 for d in y.type.tensor_type.shape.dim)
        and y.type.tensor_type.HasField("shape")
        and y.type.tensor_type.elem_type in constants.FLOATS
    ]
    if len(single) != 1:
        raise ValueError(
            f"{argument('loss', None)} needs an output that is the loss, called 'loss' or of a "
            f"single number; the outputs are {names}: pass {argument('loss', 'cross_entropy')} or "
            f"another one of {named('onnxgrad.losses.LOSSES')}"
        )
    return single[0]


def prediction_outputs(proto: ModelProto, loss: str) -> list[str]:
    """Return the names of the outputs of a model that are predictions: all outputs but the loss.

    If the metadata of the model name one output as its prediction, only this name is returned.
    """
    noted = loss_info(proto).prediction
    names = [y.name for y in proto.graph.output if y.name != loss and not is_non_tensor(y)]
    return [noted] if noted is not None and noted in names else names


@dataclass(frozen=True)
class ComputedLoss:
    """The loss that a model computes itself, as one of its outputs.

    - `output`: the name of the output.
    - `row_weight`: the name of the input of sample weights.
    - `reduction`: "mean" or "sum" over rows, if the metadata of the model do not say it.
    """

    output: str
    row_weight: str = "weight"
    reduction: str = "mean"

    def outputs(self, proto: ModelProto) -> list[str]:
        """Return a list with the name of the output that is the loss.

        Raises:
            ValueError: the model has no such output.
        """
        names = [y.name for y in proto.graph.output]
        if self.output not in names:
            raise unknown("output", self.output, names)
        return [self.output]


def write_model_loss(
    op: Emit,
    proto: ModelProto,
    computed: ComputedLoss,
    loss: ir.Value,
    data: Sequence[ir.Value],
) -> WrittenLoss:
    """Return the loss that a model computes itself as a sum over rows and their count.

    A loss that is a sum over rows by the metadata of `add_loss_output` is divided by their count.

    Args:
        op: writes into the graph.
        proto: the model.
        computed: the name and the reduction of the loss.
        loss: the value of the loss in the graph.
        data: the inputs of a batch.

    Raises:
        ValueError: the loss is no single number.
    """
    info, inputs = loss_info(proto), {str(x.name): x for x in data}
    noted = loss.shape is None and info.reduction is not None and loss.name != info.prediction
    if not noted and shapes.static(shapes.dims(loss)) not in ((), (1,), (1, 1)):
        raise ValueError(
            f"the output {loss.name!r}, which is the loss, must hold one number, and has the shape "
            f"{printable(loss.shape)}: reduce it to the mean of the batch in the model, or pass "
            f"{argument('loss', 'cross_entropy')} or another loss"
        )
    kind = ir.DataType.DOUBLE if loss.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    total = op.Cast(_as_scalar(op, loss), to=kind)
    labels = [name for name in (info.label, "label") if name in inputs]
    count = op.Cast(write_row_count(op, data, inputs[labels[0]] if labels else data[-1]), to=kind)
    own = total if info.reduction is None and computed.reduction == "mean" else None
    if (info.reduction or computed.reduction) == "mean":
        total = total * count
    if total is not loss:  # the total gets the name of the output
        total.name, loss.name = loss.name, op.name(f"{loss.name}.of_model")
    infos = dict.fromkeys(labels[:1], info)
    weight = inputs.get(computed.row_weight)
    return WrittenLoss([total], [count], [1.0], [], infos, weight, [None], batch_loss=own)


def _as_scalar(op: Emit, loss: ir.Value) -> ir.Value:
    """Return `loss`, a tensor of one element, as a scalar.

    A reduction over all axes that computes the loss is written without keeping the axes.
    """
    node = loss.producer()
    if node is not None and node.op_type.startswith("Reduce") and not node.domain:
        x, *axes = node.inputs
        if int_attribute(node, "noop_with_empty_axes") and not axes:
            return op.Reshape(loss, [])
        if not axes or axes[0] is None or axes[0].shape == (shapes.rank(x),):
            total = op.emit(node.op_type, list(node.inputs), {**node.attributes, "keepdims": 0})
            return op.set_type_like(total, ir.Value(type=loss.type, shape=ir.Shape([])))
    return op.Reshape(loss, [])


def write_row_count(op: Emit, data: Sequence[ir.Value], label: ir.Value) -> ir.Value:
    """Write the count of rows of a batch, and return it as a scalar int64.

    It is the length of an axis with the symbol `BATCH`, or else of the first axis of the label.
    """
    for x in (label, *data):
        if BATCH in (axes := list(shapes.dims(x) or ())):
            axis = axes.index(BATCH)
            return op.Reshape(op.Shape(x, start=axis, end=axis + 1), [])
    if shapes.rank(label) == 0:
        return op.const(1)
    return op.Reshape(op.Shape(label, start=0, end=1), [])
