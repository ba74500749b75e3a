"""The objective: the loss that training minimizes, and the cotangents that the sweep starts with.

The loss is either an output of the model, or a `BaseLearningLoss` writes it into the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.derivative import as_inputs
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.data.columns import Names, read_names
from onnxgrad.data.indices import Table, tables
from onnxgrad.errors import printable
from onnxgrad.graph import shapes
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.inference.infer import infer
from onnxgrad.graph.tidy import tidy
from onnxgrad.losses.in_graph import choose_output
from onnxgrad.losses.info import LossInfo, loss_info
from onnxgrad.losses.objects import BaseLearningLoss
from onnxgrad.losses.penalties import BaseLearningPenalty
from onnxgrad.model import weights as constants
from onnxgrad.model.convert import to_proto

BATCH = "onnxgrad_rows"  # a symbolic dimension that no model uses


@dataclass
class Objective:
    """A prepared graph, its data inputs and weights, the loss, and the cotangents of the sweep.

    `seeds` maps values to their cotangents; None stands for one, at the loss or a term of it.
    `buffers` are inputs and their new values after a batch; `draw`, the number of the draw of
    random numbers, and `first`, whether the batch is the first of an epoch, are inputs if they are
    used. No gradient flows through the values `stop_gradient`. With `per_row`, the gradient is
    divided by the number of rows outside of the graph. `tables` are those into which data
    inputs contain indices, `names` the names of the columns in an earlier training, and `stored`
    masks of the stored elements of sparse weights: only these are trained.
    """

    model: ir.Model
    data: list[ir.Value]
    weights: list[ir.Value]
    loss: ir.Value  # one number
    seeds: Mapping[ir.Value, ir.Value | None]
    loss_info: LossInfo
    row_weight: str | None  # name of the input of sample weights, if there is one
    tables: Mapping[str, tuple[Table, ...]] = field(kw_only=True)
    names: Names = field(kw_only=True)
    stored: Mapping[str, np.ndarray] = field(kw_only=True)

    buffers: dict[ir.Value, ir.Value] = field(default_factory=dict, kw_only=True)
    draw: ir.Value | None = field(default=None, kw_only=True)
    first: ir.Value | None = field(default=None, kw_only=True)
    stop_gradient: Collection[ir.Value] = field(default=frozenset(), kw_only=True)

    per_row: ClassVar[bool] = True

    def cotangents(self, op: Emit) -> dict[ir.Value, ir.Value]:
        """Return the cotangents that the sweep starts with."""
        return {v: op.ones_like(v) if g is None else g for v, g in self.seeds.items()}

    @property
    def reported(self) -> list[ir.Value]:
        """What a step returns for every batch: the loss."""
        return [self.loss]

    def compute(self, *values: ir.Value) -> ModelProto:
        """Return the model from data and weights to `values`; this modifies the graph."""
        self.model.graph.outputs[:] = values
        tidy(self.model)
        return to_proto(self.model)


@dataclass
class LossOutside(Objective):
    """The objective of a model whose loss is outside of it."""

    prediction: ir.Value
    losses: ir.Value  # (rows,): the term of the loss that belongs to each row


def loss_inside(proto: ModelProto, weights: Sequence[str], loss: str, row_weight: str) -> Objective:
    """Return the objective of a model that computes its loss, as the output `loss`.

    Raises:
        ValueError: unknown names, a weight that is no float, or a loss of several elements.
    """
    model = prepare(proto, batch=BATCH, outputs=[loss], exempt=())
    found, data = model.graph.outputs[0], list(model.graph.inputs)
    size = shapes.static(shapes.dims(found))
    info = loss_info(proto)
    if size is None and info.reduction is not None and loss != info.prediction:
        op = Emit(model.graph)  # add_loss_output wrote it: one number, though of unknown shape
        found.name = op.name(f"{loss}.unshaped")
        with op:
            found = model.graph.outputs[0] = op.Reshape(found, [1, 1])
        found.name, found.shape, size = loss, ir.Shape([1, 1]), (1, 1)
    if size is None or prod(size) != 1:
        raise ValueError(
            f"the loss {loss!r} must hold one number; its shape is {printable(found.shape)}"
        )
    trained = as_inputs(proto, model.graph, weights)
    more = _about(proto, model.graph, data, weights)
    return Objective(model, data, trained, found, {found: None}, info, row_weight, **more)


def _about(
    proto: ModelProto, graph: ir.Graph, data: Sequence[ir.Value], weights: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of an `Objective` that describe data and weights."""
    return {
        "tables": tables(graph, data),
        "names": read_names(proto),
        "stored": constants.stored(proto, weights),
    }


def predicted(proto: ModelProto) -> str:
    """Return the name of the output that a loss outside of the model is applied to.

    Raises:
        ValueError: the model has none, or several.
    """
    remedy = "keep one with select_model_inputs_outputs(model, outputs=[name])"
    return choose_output(proto, None, remedy)


def loss_outside(
    proto: ModelProto,
    weights: Sequence[str],
    learning_loss: BaseLearningLoss,
    penalty: BaseLearningPenalty,
    loss_name: str,
    weight_name: str | None,
) -> LossOutside:
    """Return the objective of a model and a loss of its prediction.

    The sweep starts at the prediction, with the gradient that the loss writes, and at the penalty.

    Args:
        proto: the model, with one float output.
        weights: names of the weights, to which the penalty applies.
        learning_loss: writes the loss and its gradient.
        penalty: the penalty of the weights.
        loss_name: name of the loss in the graph.
        weight_name: name of the input of sample weights; None for none.

    Raises:
        ValueError: unknown names, a weight that is no float, several outputs, or a prediction that
            the loss does not accept.
    """
    model = prepare(proto, batch=BATCH, outputs=[predicted(proto)], exempt=())
    graph, data = model.graph, list(model.graph.inputs)
    prediction = graph.outputs[0]
    trained = as_inputs(proto, graph, weights)
    op = Emit(graph)
    label = learning_loss.label(op, prediction, "label")
    weight = None
    if weight_name is not None:
        weight = ir.Value(name=op.name(weight_name), type=prediction.type)  # (N,) or (N, 1)
    added = [label] if weight is None else [label, weight]
    graph.inputs.extend(added)
    with op:
        _require_rows(op, model, learning_loss, prediction, label)
        rows, gradient = learning_loss.rows_and_gradient(op, prediction, label, weight)
        seeds: dict[ir.Value, ir.Value | None] = {prediction: gradient}
        loss = op.ReduceSum(rows, keepdims=1)
        terms = [penalty.penalty(op, str(w.name), w) for w in trained if w.uses()]
        penalties = [op.Cast(term, to=loss.dtype) for term in terms if term is not None]
        if penalties:
            seeds[summed := op.total(penalties)] = None
            loss = loss + summed
        losses = op.Reshape(rows, [-1])
    loss.name, loss.shape = op.name(loss_name), ir.Shape([1, 1])
    info = replace(learning_loss.info(prediction), label=label.name, reduction="sum")
    row_weight = None if weight is None else weight.name
    inputs = [*data, *added]
    more = _about(proto, graph, inputs, weights)
    return LossOutside(
        model, inputs, trained, loss, seeds, info, row_weight, prediction, losses, **more
    )


def _require_rows(
    op: Emit, model: ir.Model, loss: BaseLearningLoss, prediction: ir.Value, label: ir.Value
) -> None:
    """Raise if the loss is reduced to one number, which sample weights cannot weigh by row."""
    losses = loss.loss(op, prediction, label)
    if losses.shape is None:
        infer(model)
    have, want = ((shapes.dims(v) or (None,))[0] for v in (losses, prediction))
    if isinstance(have, int) and have != want:
        raise ValueError(
            f"{loss} writes {have} losses for the {want} rows of {prediction.name!r}: it must "
            "write one for every element or row"
        )
