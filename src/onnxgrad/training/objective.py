"""The objective: a prepared graph with the loss that training minimizes, a sum and a count."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, Self

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.data.columns import Names, read_names
from onnxgrad.data.indices import IndexedTable
from onnxgrad.graph.emit import Emit
from onnxgrad.losses.info import LossInfo, require_labels
from onnxgrad.losses.objectives import WrittenLoss
from onnxgrad.model import weights as constants
from onnxgrad.training.job import Job

_TINY = {ir.DataType.FLOAT: 1e-37, ir.DataType.DOUBLE: 1e-300}


class TrainingLoss(Protocol):
    """Writes a loss: what `training_loss` returns, `LossModel`, `distillation`, `OutputLoss`."""

    def outputs(self, proto: ModelProto) -> list[str]:
        """Return the names of the tensors of the model that it reads."""

    def write(
        self, op: Emit, predictions: Mapping[str, ir.Value], weighted: bool = False
    ) -> WrittenLoss:
        """Write the loss of these tensors."""


@dataclass
class Objective:
    """A graph with the loss that `written` describes: sum_k factors_k sums_k / counts_k.

    Attributes:
        job: the model and the arguments that the graph was written for.
        model: the prepared model; `data` and `weights` are inputs of its graph.
        data: the inputs of a batch: features, labels, sample weights.
        weights: those with respect to which the gradient is computed.
        written: the loss.
        predictions: the values that the loss reads, by the name of the output, and values that are
            asked for beside them.
        tables: those into which data inputs contain indices.
        buffers: inputs and their new values after a batch.
        states: the values that inputs get in the next batch, by the input.
        stop_gradient: values through which no gradient flows.
        freed: the number of rows that the file takes, if the graph takes any number; otherwise 0.
    """

    job: Job
    model: ir.Model
    data: list[ir.Value]
    weights: list[ir.Value]
    written: WrittenLoss
    predictions: dict[str, ir.Value]
    tables: Mapping[str, tuple[IndexedTable, ...]]
    buffers: dict[ir.Value, ir.Value] = field(default_factory=dict)
    states: dict[str, ir.Value] = field(default_factory=dict)
    stop_gradient: Collection[ir.Value] = frozenset()
    freed: int = 0

    @cached_property
    def names(self) -> Names:
        """The names of the columns in an earlier training."""
        return read_names(self.job.proto)

    @property
    def stored(self) -> dict[str, np.ndarray]:
        """The masks of the stored elements of sparse weights: only these are trained."""
        return constants.stored(self.job.proto, self.job.trained)

    @property
    def scales(self) -> bool:
        """Whether a step scales the loss, so that gradients of 16 bits do not vanish."""
        return self.job.precision == "mixed"

    @property
    def row_weight(self) -> str | None:
        """The name of the input of sample weights, if there is one."""
        return None if self.written.weight is None else self.written.weight.name

    @property
    def labels(self) -> dict[str, LossInfo]:
        """What is known of each label input."""
        return self.written.infos

    @property
    def initial(self) -> dict[str, np.ndarray]:
        """The initial values of the buffers that have one, by name."""
        known = ((str(b.name), b.const_value) for b in self.buffers)
        return {name: tensor.numpy() for name, tensor in known if tensor is not None}

    @property
    def carried(self) -> dict[str, str]:
        """The input whose data are the first value of a buffer, by the name of the buffer."""
        begun_by_data = (str(b.name) for b in self.buffers if b.const_value is None)
        return dict(zip(begun_by_data, self.job.carry, strict=True))

    def require_labels(self) -> Self:
        """Let the graph itself refuse the labels that a trainer refuses; return this objective."""
        inputs = {str(x.name): x for x in self.data}
        for name, info in self.labels.items():
            require_labels(Emit(self.model.graph), inputs[name], info)
        return self

    def cotangents(self, op: Emit, scale: ir.Value | None = None) -> dict[ir.Value, ir.Value]:
        """Return the cotangents that the sweep starts with, for the loss times `scale`."""
        return self.scaled(op, [inverse(op, n, scale) for n in self.written.counts])

    def scaled(self, op: Emit, inverse_counts: Sequence[ir.Value]) -> dict[ir.Value, ir.Value]:
        """Return the cotangents of the sweep, for the inverse of each count."""
        pairs = zip(inverse_counts, self.written.factors, strict=True)
        with op:
            scales = [n if factor == 1 else factor * n for n, factor in pairs]
        return self.written.seeds(op, scales)

    @property
    def referred(self) -> set[ir.Value]:
        """The values of the graph that this object refers to."""
        named = *self.predictions.values(), *self.states.values()
        return {*named, *self.buffers.values(), *self.reported, *self.stop_gradient}

    @property
    def reported(self) -> list[ir.Value]:
        """What a step returns for every batch: the sums, then the counts."""
        return [*self.written.sums, *self.written.counts]

    def mean(self, op: Emit, reported: Sequence[ir.Value]) -> ir.Value:
        """Write the loss of a batch, a scalar, from the values of `reported`; 0 without a term."""
        half, terms = len(reported) // 2, []
        parts = zip(reported[:half], reported[half:], self.written.factors, strict=True)
        with op:
            for total, count, factor in parts:
                mean = total * inverse(op, count)
                mean = mean if factor == 1 else factor * mean
                terms.append(op.Cast(op.Reshape(mean, []), to=reported[0].dtype))
            return op.total(terms)


def inverse(op: Emit, count: ir.Value, scale: ir.Value | None = None) -> ir.Value:
    """Return scale / count; for a batch without any term, a number whose product with 0 is 0."""
    assert count.dtype is not None
    result = op.Reciprocal(op.Max(count, op.const(_TINY[count.dtype], count.dtype)))
    if scale is not None:
        result = op.Mul(result, op.Cast(scale, to=count.dtype))
    return op.set_type_like(result, count)
