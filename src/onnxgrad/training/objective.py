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
from onnxgrad.graph.tidy import take_apart_after
from onnxgrad.graph.traversal import nodes_behind, reads
from onnxgrad.losses.info import LossInfo, require_labels
from onnxgrad.losses.objectives import WrittenLoss
from onnxgrad.model import weights as constants
from onnxgrad.model.external import forget_lazy_data
from onnxgrad.training.job import Job

_TINY = {ir.DataType.FLOAT: 1e-37, ir.DataType.DOUBLE: 1e-300}


class TrainingLoss(Protocol):
    """An object that writes a loss, such as the results of `training_loss` and `LossModel`."""

    def outputs(self, proto: ModelProto) -> list[str]:
        """Return the names of the tensors of the model that the loss reads."""

    def write(
        self, op: Emit, predictions: Mapping[str, ir.Value], weighted: bool = False
    ) -> WrittenLoss:
        """Write the nodes of the loss of `predictions`, by output; return the `WrittenLoss`."""


@dataclass
class Objective:
    """A graph of a model and its loss: the sum of factors_k sums_k / counts_k over outputs k.

    `written` has the factors, sums and counts; k runs over the outputs that the loss compares.

    Attributes:
        job: the model and the arguments that the graph was written for.
        model: the prepared model; `data` and `weights` are inputs of its graph.
        data: the inputs of a batch: features, labels, sample weights.
        weights: the weights w.r.t. which the gradient is computed.
        written: the loss.
        predictions: the values that the loss reads, by the name of the output, and further values
            that a caller asked for.
        tables: the tables of embeddings of which a data input has row indices, by the input.
        buffers: inputs with states that do not train, and their new values after a batch.
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
        """The names of columns and classes that an earlier training wrote into the file."""
        return read_names(self.job.proto)

    @cached_property  # read for each weight, and computed by walks over the file
    def sparse_masks(self) -> dict[str, np.ndarray]:
        """The masks of the stored elements of sparse weights, by name; other elements stay zero."""
        return constants.sparse_masks(self.job.proto, self.job.trained)

    @property
    def scales_loss(self) -> bool:
        """Whether a step scales the loss, so that gradients of 16 bits do not vanish."""
        return self.job.precision == "mixed"

    @property
    def row_weight(self) -> str | None:
        """The name of the input of sample weights; None without such an input."""
        return None if self.written.weight is None else self.written.weight.name

    @cached_property
    def allows_negative_weights(self) -> bool:
        """Whether sample weights may be negative: no count, by which a sum is divided, is computed
        from them, and no model computes the mean, whose divisor is not known.
        """
        weight, written = self.written.weight, self.written
        if weight is None or weight in written.counts or written.batch_loss is not None:
            return False
        return not any(weight in reads(node) for node in nodes_behind(written.counts))

    @property
    def labels(self) -> dict[str, LossInfo]:
        """The `LossInfo` of each label, such as its count of classes, by label input."""
        return self.written.infos

    @property
    def initial_buffers(self) -> dict[str, np.ndarray]:
        """The initial values of buffers, by name, without buffers that data initialize."""
        known = ((str(b.name), b.const_value) for b in self.buffers)
        return {name: tensor.numpy() for name, tensor in known if tensor is not None}

    @property
    def carried_inputs(self) -> dict[str, str]:
        """The inputs whose data initialize the buffers that `carry` adds, by name of the buffer."""
        begun_by_data = (str(b.name) for b in self.buffers if b.const_value is None)
        return dict(zip(begun_by_data, self.job.carry, strict=True))

    def kept_as_description(self) -> Self:
        """Return this objective, whose graph no session computes, without large elements.

        The graph is taken apart when nothing refers to the objective any more.
        """
        forget_lazy_data([*self.model.graph.initializers.values(), *self.weights])
        take_apart_after(self, self.model.graph)
        return self

    def require_labels(self) -> Self:
        """Add nodes that fail for labels that a trainer would refuse; return this objective."""
        inputs = {str(x.name): x for x in self.data}
        for name, info in self.labels.items():
            require_labels(Emit(self.model.graph), inputs[name], info)
        return self

    def cotangents(self, op: Emit, scale: ir.Value | None = None) -> dict[ir.Value, ir.Value]:
        """Return the cotangents with which the reverse sweep begins, for the loss times `scale`."""
        return self.seed_cotangents(op, [inverse_count(op, n, scale) for n in self.written.counts])

    def seed_cotangents(
        self, op: Emit, inverse_counts: Sequence[ir.Value]
    ) -> dict[ir.Value, ir.Value]:
        """Return the cotangents with which the reverse sweep begins, from inverses of the counts.

        `inverse_counts` are 1 / counts_k, or scale / counts_k.
        """
        pairs = zip(inverse_counts, self.written.factors, strict=True)
        with op:
            scales = [n if factor == 1 else factor * n for n, factor in pairs]
        return self.written.initial_cotangents(op, scales)

    @property
    def named_values(self) -> set[ir.Value]:
        """The values of the graph that attributes of this objective refer to."""
        named = *self.predictions.values(), *self.states.values()
        return {*named, *self.buffers.values(), *self.reported, *self.stop_gradient}

    @property
    def reported(self) -> list[ir.Value]:
        """The values of the loss that a step returns for every batch: the sums, then the counts."""
        return [*self.written.sums, *self.written.counts]

    def write_mean_loss(self, op: Emit, reported: Sequence[ir.Value]) -> ir.Value:
        """Write the loss of a batch, a scalar, from its sums and counts as in `reported`.

        The loss is 0 if the counts are 0, that is, if no label counts.
        """
        half, terms = len(reported) // 2, []
        parts = zip(reported[:half], reported[half:], self.written.factors, strict=True)
        with op:
            for total, count, factor in parts:
                mean = total * inverse_count(op, count)
                mean = mean if factor == 1 else factor * mean
                terms.append(op.Cast(op.Reshape(mean, []), to=reported[0].dtype))
            return op.total(terms)


def inverse_count(op: Emit, count: ir.Value, scale: ir.Value | None = None) -> ir.Value:
    """Return scale / count, or 1 / count without `scale`; a finite number if the count is 0."""
    assert count.dtype is not None
    result = op.Reciprocal(op.Max(count, op.const(_TINY[count.dtype], count.dtype)))
    if scale is not None:
        result = op.Mul(result, op.Cast(scale, to=count.dtype))
    return op.set_type_like(result, count)
