"""Losses that other models compute."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import named, unknown
from onnxgrad.losses.formula_nodes import wide
from onnxgrad.losses.info import LossInfo
from onnxgrad.losses.objectives import Values, Written, sample_weight
from onnxgrad.losses.second_model import read_output, write_model
from onnxgrad.losses.sums import number_of
from onnxgrad.model.feeds import names_without_default
from onnxgrad.model.read import ModelLike
from onnxgrad.operators.shapes import dims, static


class LossModel:
    """A second ONNX model as the loss: its output is to be minimal.

    Each of its inputs is the tensor of the trained model of the same name: an output, any other
    result, or an input. An input without such a tensor is a label. Its weights are constants, and
    dropouts and normalizations in it are those of the file.

    Args:
        model: model, serialized model or path; never modified.
        output: its output, or the name of any other float tensor, that is the loss: one number, or
            losses of rows or elements, (N, ...), whose mean is the loss. None: its only float
            output. One number counts for as many rows as its batch has, or its micro-batch with
            `accumulate`: the loss of an epoch is the mean by these. It takes no sample weights.
        inputs: `{input of the loss model: tensor of the trained model}`, where names differ.
        reduction: how one number was computed from the rows: "mean" or "sum".

    Raises:
        ValueError: an unknown name, or an output that is no float tensor.
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> from onnxgrad.losses.other_models import LossModel
        >>> squares = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] y, float[N,2] target) => (float[N] loss) <int64[1] axis = {1}> {
        ...         d = Sub(y, target)  loss = ReduceSumSquare<keepdims=0>(d, axis) }''')
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2] w = {2.0, 3.0}> { y = Mul(x, w) }''')
        >>> LossModel(squares).outputs(model)  # `target` is a label
        ['y']
    """

    def __init__(
        self,
        model: ModelLike,
        output: str | None = None,
        inputs: Mapping[str, str] | None = None,
        reduction: str = "mean",
    ) -> None:
        if reduction not in ("mean", "sum"):
            raise unknown("reduction", reduction, ["mean", "sum"])
        self._model = read_output(model, output, "output")
        names = names_without_default(self._model)
        for key in inputs or {}:
            if key not in names:
                raise unknown("input of the loss model", key, names)
        self._inputs = {name: (inputs or {}).get(name, name) for name in names}
        self._explicit = set(inputs or {})
        self.reduction = reduction

    def outputs(self, proto: ModelProto) -> list[str]:
        """Return the results of the trained model that the loss model reads.

        Raises:
            ValueError: there is none, or `inputs` names no tensor of the trained model.
        """
        results = [y for node in proto.graph.node for y in node.output if y]
        own = [x.name for x in proto.graph.input]
        for key in self._explicit:
            if self._inputs[key] not in (*results, *own):
                outputs = [y.name for y in proto.graph.output]
                raise unknown("tensor", self._inputs[key], [*outputs, *own])
        joined = [name for name in self._inputs.values() if name in set(results)]
        if not joined:
            raise ValueError(
                f"no input of the loss model ({', '.join(self._inputs)}) has the name of an output "
                f"({', '.join(y.name for y in proto.graph.output)}): "
                f"{named('pass inputs={input: output}')}"
            )
        return list(dict.fromkeys(joined))

    def write(self, op: Any, predictions: Values, weighted: bool = False) -> Written:
        """Write the loss model into the graph.

        Raises:
            ValueError: tensors that do not fit, or a loss of unknown rank.
            ModelError: the loss model cannot be written in the opset of the graph.
        """
        tensors = {str(x.name): x for x in op.graph.inputs} | dict(predictions)
        values = {key: tensors[name] for key, name in self._inputs.items() if name in tensors}
        loss, labels = write_model(op, self._model, values, "the loss model")
        rows = next(tensors[name] for name in self._inputs.values() if name in predictions)
        shape = dims(loss)
        if shape is None:
            raise ValueError(
                f"the rank of the loss {loss.name!r} is unknown: declare the shapes of the inputs "
                "of the loss model"
            )
        size = static(shape)
        written = Written(weight=row_weight(op, rows, loss) if weighted else None)
        for label in labels:
            written.add_label(label, None, LossInfo())
        with op:
            if written.weight is not None or size is None or prod(size) != 1:
                written.add_losses(op, loss)
            else:
                loss = wide(op, op.Reshape(loss, []))
                count = number_of(op, rows, [0], loss, labels)
                mean = self.reduction == "mean"
                written.add(loss * count if mean else loss, count)
                written.batch_loss = loss if mean else None
        return written


def row_weight(op: Any, rows: ir.Value, losses: ir.Value) -> ir.Value | None:
    """Return an input of sample weights, (N,); None if there is not one loss for each row."""
    first = (dims(rows) or (None,))[0]
    own = first is not None and (dims(losses) or ())[:1] == (first,)
    return sample_weight(op, [rows]) if own else None
