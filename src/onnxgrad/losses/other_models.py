"""Losses that a second ONNX model computes, and distillation from a teacher to a student."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.checks import check_fraction, check_positive
from onnxgrad.errors import argument, named, unknown
from onnxgrad.losses.in_graph import choose_output
from onnxgrad.losses.info import LossInfo
from onnxgrad.losses.objectives import Values, WrittenLoss, new_sample_weight, training_loss
from onnxgrad.losses.second_model import cut_to_float_output, shapes_may_be_equal, write_model
from onnxgrad.losses.spec import widen_to_float32
from onnxgrad.losses.sums import element_count, with_known_rank
from onnxgrad.model.feeds import names_without_default
from onnxgrad.model.read import ModelLike
from onnxgrad.operators.shapes import dims, static

TEACHER = "teacher_logits"  # name of the label input


class LossModel:
    """A second ONNX model as the loss: training minimizes the output of that model.

    Each of its inputs is the tensor of the trained model of the same name: an output, any other
    result, or an input. An input without such a tensor is a label. The weights of the loss model
    are constants, and its dropouts and normalizations compute as its file says.

    Args:
        model: model, serialized model or path; never modified.
        output: the name of its output, or of any other float tensor, that is the loss: one number,
            or losses of rows or elements, (N, ...), whose mean is the loss. None: its only float
            output. One number counts for as many rows as its batch has, or its micro-batch with
            `accumulate`: the loss of an epoch is the mean over these rows. One number takes no
            sample weights.
        inputs: `{input of the loss model: tensor of the trained model}`, where names differ.
        reduction: how one number was computed from the rows: "mean" or "sum".
        formula: function `(op, output) -> loss` that writes the loss from the output, such as
            `lambda op, score: -score` for a score that training maximizes.

    Raises:
        ValueError: an unknown name, or an output that is no float tensor.
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> from onnxgrad.losses import LossModel
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
        formula: Callable[[Any, ir.Value], ir.Value] | None = None,
    ) -> None:
        if reduction not in ("mean", "sum"):
            raise unknown("reduction", reduction, ["mean", "sum"])
        self._model = cut_to_float_output(model, output, "output")
        names = names_without_default(self._model)
        for key in inputs or {}:
            if key not in names:
                raise unknown("input of the loss model", key, names)
        self._inputs = {name: (inputs or {}).get(name, name) for name in names}
        self._explicit = set(inputs or {})
        self.reduction, self._formula = reduction, formula

    def outputs(self, proto: ModelProto) -> list[str]:
        """Return the names of the trained model's values that the loss model reads.

        Raises:
            ValueError: it reads none, or `inputs` names no tensor of the trained model.
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

    def write(self, op: Any, predictions: Values, weighted: bool = False) -> WrittenLoss:
        """Write the nodes of the loss model into the graph.

        Raises:
            ValueError: tensors that do not fit the inputs of the loss model, or a loss of unknown
                rank.
            ModelError: the loss model cannot be written in the opset of the graph.
        """
        tensors = {str(x.name): x for x in op.graph.inputs} | dict(predictions)
        values = {key: tensors[name] for key, name in self._inputs.items() if name in tensors}
        [loss], labels = write_model(op, self._model, values, "the loss model")
        if self._formula is not None:
            with op:
                loss = with_known_rank(op, self._formula(op, loss))
        rows = next(tensors[name] for name in self._inputs.values() if name in predictions)
        shape = dims(loss)
        if shape is None:
            raise ValueError(
                f"the rank of the loss {loss.name!r} is unknown: declare the shapes of the inputs "
                "of the loss model"
            )
        size = static(shape)
        written = WrittenLoss(weight=new_row_weight(op, rows, loss) if weighted else None)
        for label in labels:
            written.add_label(label, None, LossInfo())
        with op:
            if written.weight is not None or size is None or prod(size) != 1:
                written.add_losses(op, loss)
            else:
                loss = widen_to_float32(op, op.Reshape(loss, []))
                count = element_count(op, rows, [0], loss, labels)
                mean = self.reduction == "mean"
                written.add_sums(loss * count if mean else loss, count)
                written.batch_loss = loss if mean else None
        return written


def new_row_weight(op: Any, rows: ir.Value, losses: ir.Value) -> ir.Value | None:
    """Return a new input of sample weights (N,), or None if `losses` does not have one loss for
    each of the N rows.
    """
    first = (dims(rows) or (None,))[0]
    own = first is not None and (dims(losses) or ())[:1] == (first,)
    return new_sample_weight(op, [rows]) if own else None


@dataclass(eq=False, repr=False)
class Distillation:
    """Weighted sum of the teacher's divergence from the student and a loss with labels: see
    `distillation`.
    """

    teacher: ModelProto | None
    hard: Any
    temperature: float
    alpha: float
    output: str | None
    axis: int | None
    inputs: Mapping[str, str]

    def outputs(self, proto: ModelProto) -> list[str]:
        """Return the names of the student's logits and of the outputs that the hard loss reads.

        Raises:
            ValueError: unknown names, several outputs, or an input of the teacher that the student
                does not have.
        """
        if self.teacher is not None:
            own = [x.name for x in proto.graph.input]
            for name in names_without_default(self.teacher):
                if self.inputs.get(name, name) not in own:
                    raise ValueError(
                        f"the teacher has the input {name!r}, and the student the inputs {own}: "
                        "pass inputs={input of the teacher: input of the student}"
                    )
        if self.hard is None:
            return [choose_output(proto, self.output, f"say which one with {argument('output')}")]
        names = self.hard.outputs(proto)
        if (len(names) > 1 and self.output is None) or self.output not in (None, *names):
            raise ValueError(
                f"the hard loss reads the outputs {names}: name the output of the logits by output="
            )
        return names

    def write(self, op: Any, predictions: Values, weighted: bool = False) -> WrittenLoss:
        """Write the nodes of the loss and of the teacher model into the graph.

        Raises:
            ValueError: logits of the teacher and the student of different shapes, or an unknown
                axis of the classes.
            ModelError: the teacher cannot be written in the opset of the graph.
        """
        written = WrittenLoss() if self.hard is None else self.hard.write(op, predictions, weighted)
        written.factors = [(1.0 - self.alpha) * factor for factor in written.factors]
        [student] = [predictions[self.output]] if self.output else predictions.values()
        if weighted and written.weight is None:
            written.weight = new_sample_weight(op, [student])
        teacher = self._teacher_logits(op, written, student)
        axis = _student_class_axis(self.axis, student)
        with op:
            log_p, log_q = (
                op.LogSoftmax(x / self.temperature, axis=axis) for x in (student, teacher)
            )
            losses = op.ReduceSum(op.Exp(log_q) * (log_q - log_p), [axis], keepdims=0)
            written.add_losses(op, losses, self.alpha * self.temperature**2)
        return written

    def _teacher_logits(self, op: Any, written: WrittenLoss, student: ir.Value) -> ir.Value:
        """Return the teacher's logits: the teacher model's output, or else a new label input."""
        if self.teacher is None:
            label = ir.Value(name=op.name(TEACHER), type=student.type, shape=student.shape)
            written.add_label(label, student.name, LossInfo())
            return label
        own = {str(x.name): x for x in op.graph.inputs}
        values = {
            name: own[self.inputs.get(name, name)] for name in names_without_default(self.teacher)
        }
        [logits], _ = write_model(op, self.teacher, values, "the teacher")
        logits = op.Cast(logits, to=student.dtype)
        if not shapes_may_be_equal(dims(logits), dims(student)):
            raise ValueError(
                f"the logits of the teacher have the shape {dims(logits)}, and the logits of the "
                f"student {dims(student)}: correct output= or teacher_output="
            )
        return logits


def distillation(
    teacher: ModelLike | None,
    loss: Any = None,
    temperature: float = 2.0,
    alpha: float = 0.5,
    output: str | None = None,
    teacher_output: str | None = None,
    axis: int | None = None,
    inputs: Mapping[str, str] | None = None,
) -> Distillation:
    """Return alpha T^2 KL(softmax(teacher / T), softmax(student / T)) + (1 - alpha) hard loss.

    Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", arXiv:1503.02531. The mean
    of the divergence is over all rows, or all positions of logits (N, C, d1, ...), also where the
    hard loss ignores the label.

    Args:
        teacher: model, serialized model or path, whose nodes are copied into the trained graph. It
            is fed with the inputs of the student, and not trained. None: its logits are a label,
            `teacher_logits`, of the shape of the logits of the student.
        loss: the hard loss, a name or a loss of the trainer; None is "cross_entropy". It is left
            out if alpha is 1.
        temperature: T, above 0.
        alpha: share of the divergence, 0 to 1.
        output: the logits of the student, an output or another float tensor; None: the only one.
        teacher_output: the logits of the teacher, likewise.
        axis: axis of the classes; None: the last of two axes.
        inputs: `{input of the teacher: input of the student}`, where names differ.

    Raises:
        ValueError: a temperature or alpha out of range, or an unknown name.
        ModelError: `teacher` cannot be read.

    Examples:
        >>> from onnxgrad.losses import distillation
        >>> loss = distillation(None, temperature=4.0, alpha=0.9)
        >>> loss.teacher is None, loss.temperature
        (True, 4.0)
    """
    check_positive("temperature", temperature)
    check_fraction("alpha", alpha)
    proto = None
    if teacher is not None:
        proto = cut_to_float_output(teacher, teacher_output, "teacher_output")
    elif teacher_output is not None or inputs:
        raise ValueError(
            "teacher_output= and inputs= need a teacher that is a model: leave out both"
        )
    hard = None
    if alpha != 1:
        hard = "cross_entropy" if loss is None else loss
        if not hasattr(hard, "write"):
            hard = training_loss(hard if output is None else {output: hard})
    return Distillation(proto, hard, temperature, alpha, output, axis, inputs or {})


def _student_class_axis(axis: int | None, student: ir.Value) -> int:
    """Return the index, from 0, of the class axis of the student's logits."""
    shape = dims(student)
    if shape is None or len(shape) < 2 or (axis is None and len(shape) > 2):
        raise ValueError(
            f"the logits {student.name!r} have the shape {shape}: pass axis=, the "
            "axis of the classes"
        )
    if axis is None:
        return 1
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"axis={axis} is no axis of the logits {student.name!r}, which have the shape {shape}: "
            f"give an axis from {-len(shape)} to {len(shape) - 1}"
        )
    return axis % len(shape)
