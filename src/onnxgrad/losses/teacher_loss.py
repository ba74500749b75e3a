"""Distillation: a model learns the logits of another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.checks import check_positive, check_share
from onnxgrad.errors import argument
from onnxgrad.losses.in_graph import choose_output
from onnxgrad.losses.info import LossInfo
from onnxgrad.losses.objectives import Values, Written, sample_weight, training_loss
from onnxgrad.losses.second_model import may_be_equal, read_output, write_model
from onnxgrad.model.feeds import names_without_default
from onnxgrad.model.read import ModelLike
from onnxgrad.operators.shapes import dims

TEACHER = "teacher_logits"  # name of the label input


@dataclass(eq=False, repr=False)
class Distillation:
    """The loss that `distillation` returns."""

    teacher: ModelProto | None
    hard: Any
    temperature: float
    alpha: float
    output: str | None
    axis: int | None
    inputs: Mapping[str, str]

    def outputs(self, proto: ModelProto) -> list[str]:
        """Return the names of the logits of the student, and of what the hard loss reads.

        Raises:
            ValueError: unknown names, several outputs, or an input of the teacher that the student
                does not have.
        """
        if self.teacher is not None:
            own = [x.name for x in proto.graph.input]
            for name in names_without_default(self.teacher):
                if self.inputs.get(name, name) not in own:
                    raise ValueError(
                        f"the teacher has the input {name!r}, and the student has {own}: pass "
                        "inputs={input of the teacher: input of the student}"
                    )
        if self.hard is None:
            return [choose_output(proto, self.output, f"say which one with {argument('output')}")]
        names = self.hard.outputs(proto)
        if (len(names) > 1 and self.output is None) or self.output not in (None, *names):
            raise ValueError(f"the hard loss reads {names}: name one of them as output=")
        return names

    def write(self, op: Any, predictions: Values, weighted: bool = False) -> Written:
        """Write the loss, and the teacher, into the graph.

        Raises:
            ValueError: logits of the teacher that do not have the shape of the student's, or an
                axis of classes that is not clear.
            ModelError: the teacher cannot be written in the opset of the graph.
        """
        written = Written() if self.hard is None else self.hard.write(op, predictions, weighted)
        written.factors = [(1.0 - self.alpha) * factor for factor in written.factors]
        [student] = [predictions[self.output]] if self.output else predictions.values()
        if weighted and written.weight is None:
            written.weight = sample_weight(op, [student])
        teacher = self._teacher(op, written, student)
        axis = _class_axis(self.axis, student)
        with op:
            log_p, log_q = (
                op.LogSoftmax(x / self.temperature, axis=axis) for x in (student, teacher)
            )
            losses = op.ReduceSum(op.Exp(log_q) * (log_q - log_p), [axis], keepdims=0)
            written.add_losses(op, losses, self.alpha * self.temperature**2)
        return written

    def _teacher(self, op: Any, written: Written, student: ir.Value) -> ir.Value:
        """Return the logits of the teacher: written by its model, or a new label."""
        if self.teacher is None:
            label = ir.Value(name=op.name(TEACHER), type=student.type, shape=student.shape)
            written.add_label(label, student.name, LossInfo())
            return label
        own = {str(x.name): x for x in op.graph.inputs}
        values = {
            name: own[self.inputs.get(name, name)] for name in names_without_default(self.teacher)
        }
        logits, _ = write_model(op, self.teacher, values, "the teacher")
        logits = op.Cast(logits, to=student.dtype)
        if not may_be_equal(dims(logits), dims(student)):
            raise ValueError(
                f"the logits of the teacher have the shape {dims(logits)}, those of the student "
                f"{dims(student)}"
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
            `teacher_logits`, of the shape of the student's.
        loss: the hard loss, a name or a loss of the trainer; None is "cross_entropy". It is left
            out if alpha is 1.
        temperature: T, above 0.
        alpha: share of the divergence, 0 to 1.
        output: the logits of the student, an output or another float tensor; None: the only one.
        teacher_output: those of the teacher, likewise.
        axis: that of the classes; None: the last of two.
        inputs: `{input of the teacher: input of the student}`, where names differ.

    Raises:
        ValueError: a temperature or alpha out of range, or an unknown name.
        ModelError: `teacher` cannot be read.

    Examples:
        >>> from onnxgrad.losses.teacher_loss import distillation
        >>> loss = distillation(None, temperature=4.0, alpha=0.9)
        >>> loss.teacher is None, loss.temperature
        (True, 4.0)
    """
    check_positive("temperature", temperature)
    check_share("alpha", alpha)
    proto = None
    if teacher is not None:
        proto = read_output(teacher, teacher_output, "teacher_output")
    elif teacher_output is not None or inputs:
        raise ValueError("teacher_output and inputs are for a teacher that is a model")
    hard = None
    if alpha != 1:
        hard = "cross_entropy" if loss is None else loss
        if not hasattr(hard, "write"):
            hard = training_loss(hard if output is None else {output: hard})
    return Distillation(proto, hard, temperature, alpha, output, axis, inputs or {})


def _class_axis(axis: int | None, student: ir.Value) -> int:
    shape = dims(student)
    if shape is None or len(shape) < 2 or (axis is None and len(shape) > 2):
        raise ValueError(
            f"the logits {student.name!r} have the shape {shape}: name the axis of the classes, "
            "axis="
        )
    if axis is None:
        return 1
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis={axis}: the logits {student.name!r} have the shape {shape}")
    return axis % len(shape)
