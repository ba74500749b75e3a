"""The objective: a prepared graph with the loss that training minimizes, a sum and a count."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, Self

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.derivative import as_inputs
from onnxgrad.autodiff.primal.free_rows import add_row_axes, free_rows, stated_rows
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.data.columns import Names, read_names
from onnxgrad.data.indices import Table, tables
from onnxgrad.errors import unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.precision import in_dtype, in_float32, in_float32_input
from onnxgrad.graph.tidy import tidy
from onnxgrad.losses.info import LossInfo
from onnxgrad.losses.label_checks import require_labels
from onnxgrad.losses.mixed_rows import MixedRows
from onnxgrad.losses.objectives import TrainingLoss as OfOutputs, Written
from onnxgrad.model import weights as constants
from onnxgrad.model.convert import to_proto
from onnxgrad.model.notes import detached
from onnxgrad.model.surgery import select_model_inputs_outputs
from onnxgrad.operators import shapes
from onnxgrad.parallel.part import Part
from onnxgrad.training.filled import fill
from onnxgrad.training.job import Job
from onnxgrad.training.mixing import mix_rows_by_job
from onnxgrad.training.model_loss import (
    BATCH,
    ComputedLoss,
    outputs_beside,
    write_model_loss,
)
from onnxgrad.training.modes import fold_normalizations, training_form
from onnxgrad.training.modes.dropouts import walk
from onnxgrad.training.step.inputs import DRAW, FIRST, remove_unread_feeds

_TINY = {ir.DataType.FLOAT: 1e-37, ir.DataType.DOUBLE: 1e-300}


class TrainingLoss(Protocol):
    """Writes a loss: what `training_loss` returns, `LossModel`, `distillation`, `OutputLoss`."""

    def outputs(self, proto: ModelProto) -> list[str]:
        """Return the names of the tensors of the model that it reads."""

    def write(
        self, op: Emit, predictions: Mapping[str, ir.Value], weighted: bool = False
    ) -> Written:
        """Write the loss of these tensors."""


@dataclass(frozen=True)
class Plan:
    """What is minimized: the loss of a job for some data.

    - `job`: the model, its weights, and how it computes while it trains.
    - `loss`: writes the loss, or names the output of the model that is the loss.
    - `weighted`: whether the data may have sample weights.
    - `across`: the part of this process, if BatchNormalization uses the rows of all processes.
    - `beside`: names of tensors that the graph computes beside the loss.
    - `filled`: inputs that nodes compute, as the data lack them: see `filled.fillable`.
    """

    job: Job
    loss: TrainingLoss | ComputedLoss
    weighted: bool = False
    across: Part | None = None
    beside: tuple[str, ...] = ()
    filled: frozenset[str] = frozenset()

    def for_model(self, proto: ModelProto, weights: Sequence[str]) -> Self:
        """Return the plan for these weights of another form of the model."""
        return replace(self, job=replace(self.job, proto=proto, trained=weights))


@dataclass
class Objective:
    """A graph with the loss that `written` describes: sum_k factors_k sums_k / counts_k.

    Attributes:
        model: the prepared model; `data` and `weights` are inputs of its graph.
        data: the inputs of a batch: features, labels, sample weights.
        weights: those with respect to which the gradient is computed.
        written: the loss.
        predictions: the values that the loss reads, by the name of the output.
        tables: those into which data inputs contain indices.
        names: the names of the columns in an earlier training.
        stored: masks of the stored elements of sparse weights: only these are trained.
        buffers: inputs and their new values after a batch.
        states: the values that inputs get in the next batch, by the input.
        carried: the data input of a buffer, by its name.
        beside: the values that the plan asks for, by name.
        stop_gradient: values through which no gradient flows.
        straight_through: whether the gradient passes through the rounding of quantized layers;
            otherwise such models are refused.
        scales: whether a step scales the loss, so that gradients of 16 bits do not vanish.
        freed: the number of rows that the file takes, if the graph takes any number; otherwise 0.
    """

    model: ir.Model
    data: list[ir.Value]
    weights: list[ir.Value]
    written: Written
    predictions: dict[str, ir.Value]
    tables: Mapping[str, tuple[Table, ...]]
    names: Names
    stored: Mapping[str, np.ndarray]
    buffers: dict[ir.Value, ir.Value] = field(default_factory=dict)
    states: dict[str, ir.Value] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    beside: dict[str, ir.Value] = field(default_factory=dict)
    stop_gradient: Collection[ir.Value] = frozenset()
    straight_through: bool = False
    scales: bool = False
    freed: int = 0

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
        with op:
            factors = self.written.factors
            scales = [
                n if factor == 1 else factor * n
                for n, factor in zip(inverse_counts, factors, strict=True)
            ]
        return self.written.seeds(op, scales)

    @property
    def referred(self) -> set[ir.Value]:
        """The values of the graph that this object refers to."""
        named = (*self.predictions.values(), *self.states.values(), *self.beside.values())
        return {*named, *self.buffers.values(), *self.reported, *self.stop_gradient}

    @property
    def reported(self) -> list[ir.Value]:
        """What a step returns for every batch: the sums, then the counts."""
        return [*self.written.sums, *self.written.counts]

    def compute(self, *values: ir.Value) -> ModelProto:
        """Return the model from data and weights to `values`; this modifies the graph."""
        self.model.graph.outputs[:] = values
        tidy(self.model)
        return to_proto(self.model)

    def mean(self, op: Emit, reported: Sequence[ir.Value]) -> ir.Value:
        """Write the loss of a batch, a scalar, from the values of `reported`; 0 without a term."""
        half = len(reported) // 2
        terms = []
        with op:
            for total, count, factor in zip(
                reported[:half], reported[half:], self.written.factors, strict=True
            ):
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


def build_objective(plan: Plan, training: bool = True) -> Objective:
    """Return the objective of `plan`, for the weights of its job.

    Args:
        plan: the loss, and the job.
        training: whether it is for a step, with dropout and statistics of the batch.

    Raises:
        ValueError: unknown names, or a prediction that the loss does not accept.
    """
    loss, proto, computed = plan.loss, plan.job.proto, list[str]()
    predicted = loss.outputs(proto)
    if isinstance(loss, ComputedLoss):
        computed, predicted = predicted, outputs_beside(proto, loss.output)
    model, results, freed = _prepare_model(plan, computed, predicted)
    graph, data, op = model.graph, list(model.graph.inputs), Emit(model.graph)
    form = _Form.of(op, plan, data, results) if training else _Form()
    states = _carried_states(op, plan, data, results)
    beside = {name: results[name] for name in plan.beside}
    results = {name: results[name] for name in [*computed, *predicted]}
    trained = as_inputs(proto, graph, plan.job.trained)
    if plan.job.precision != "file":
        trained = [in_float32_input(op, w) for w in trained]
        results = {n: y if computed else in_float32(op, y) for n, y in results.items()}
    stopped = _without_gradient(proto, graph)
    if training:
        read = {*results.values(), *states.values(), *beside.values()}
        fold_normalizations(op, trained, stopped | read)
    with op:
        if isinstance(loss, ComputedLoss):
            written = write_model_loss(op, proto, loss, results[loss.output], data)
        else:
            if isinstance(loss, OfOutputs):  # it may write its gradient itself
                loss = loss.differentiated(trained if training else (), form.mixed)
            written = loss.write(op, results, plan.weighted)
    added = [v for v in (*written.labels, written.weight) if v is not None and v not in data]
    graph.inputs.extend(added)
    data += added
    predictions = {name: results[name] for name in predicted}
    return Objective(
        *(model, data, trained, written, predictions),
        tables=tables(graph, data),
        names=read_names(proto),
        stored=constants.stored(proto, plan.job.trained),
        states=states,
        buffers=form.buffers,
        stop_gradient=stopped,
        carried=form.carried,
        beside=beside,
        straight_through=plan.job.straight_through,
        scales=plan.job.precision == "mixed",
        freed=freed,
    )


def _carried_states(
    op: Emit, plan: Plan, data: Sequence[ir.Value], results: Mapping[str, ir.Value]
) -> dict[str, ir.Value]:
    """Return the values that inputs get in the next batch, in their dtypes."""
    own = {str(x.name): x for x in data}
    return {name: in_dtype(op, results[y], own.get(name)) for name, y in plan.job.carry.items()}


def _without_gradient(proto: ModelProto, graph: ir.Graph) -> set[ir.Value]:
    """Return the values through which no gradient flows."""
    fixed = detached(proto)
    return {y for node, _ in walk(graph) for y in node.outputs if y.name in fixed}


def _prepare_model(
    plan: Plan, computed: Sequence[str], predicted: Sequence[str]
) -> tuple[ir.Model, dict[str, ir.Value], int]:
    """Return the prepared model with the outputs that are read, these by name, and `freed`.

    Read are the output that is the loss, in `computed` if there is one, and predictions. A model of
    a fixed batch is freed where it is proven to treat rows by themselves.
    """
    job, proto = plan.job, plan.job.proto
    read = list(dict.fromkeys([*computed, *predicted, *job.carry.values(), *plan.beside]))
    if not {y.name for y in proto.graph.output}.issuperset(read):
        proto = select_model_inputs_outputs(proto, read)
    model = prepare(
        proto,
        batch=BATCH,
        outputs=read,
        keep=[*job.dropout, *detached(proto)],
        keep_dropout=bool(job.dropout),
        exempt=job.moved,
        wide=job.trained if job.precision == "float32" else None,
        fill=partial(fill, names=plan.filled) if plan.filled else None,
    )
    add_row_axes(model.graph, [] if computed else [read.index(y) for y in predicted], job.moved)
    rows = stated_rows(model, BATCH, job.batch_axes) or 0
    freed = free_rows(model, BATCH, job.batch_axes, rows) if rows else None
    model = model if freed is None else freed
    return model, dict(zip(read, model.graph.outputs, strict=True)), 0 if freed is None else rows


@dataclass
class _Form:
    """What the form of a graph that trains has beside the inputs of the model."""

    buffers: dict[ir.Value, ir.Value] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    mixed: MixedRows | None = None  # how rows are mixed; None: they are not

    @classmethod
    def of(
        cls, op: Emit, plan: Plan, data: Sequence[ir.Value], results: dict[str, ir.Value]
    ) -> _Form:
        """Bring a graph into that form; `results` are updated where outputs are replaced."""
        draw, first = DRAW.input(op), FIRST.input(op)
        buffers = training_form(
            op,
            batch_norm=plan.job.batch_norm,
            dropout=plan.job.dropout,
            draw=draw,
            seed=plan.job.seed,
            across=plan.across,
        )
        results.update(zip(list(results), op.graph.outputs, strict=True))
        carried = _carry_states(op, data, results, plan.job.carry, first)
        buffers |= {before: y for before, (_, y) in carried.items()}
        names = {str(before.name): name for before, (name, _) in carried.items()}
        remove_unread_feeds(op.graph)
        mixed = mix_rows_by_job(op, plan.job, plan.loss, data, BATCH)
        return cls(buffers, names, mixed)


def _carry_states(
    op: Emit,
    data: Sequence[ir.Value],
    results: Mapping[str, ir.Value],
    carry: Mapping[str, str],
    first: ir.Value,
) -> dict[ir.Value, tuple[str, ir.Value]]:
    """Let inputs have the values of outputs of the batch before, unless it is the `first` one.

    Return `{buffer: (input, its new value)}`.

    Raises:
        ValueError: an unknown input, or an output of another dtype or shape.
    """
    inputs = {str(x.name): x for x in data}
    buffers = {}
    for name, output in carry.items():
        if name not in inputs:
            raise unknown("input", name, inputs)
        x, y = inputs[name], in_dtype(op, results[output], inputs[name])
        lengths = list(zip(shapes.dims(x) or (), shapes.dims(y) or (), strict=False))
        differ = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in lengths)
        if x.dtype != y.dtype or differ or shapes.rank(x) != shapes.rank(y):
            raise ValueError(
                f"carry: the output {output!r}, {y.dtype} {y.shape}, cannot become the input "
                f"{name!r}, {x.dtype} {x.shape}"
            )
        before = ir.Value(name=op.name(f"{name}.carried"), type=x.type, shape=x.shape)
        users = list(x.uses())
        with op.at(next(iter(op.graph))):
            value = op.set_type_like(op.Where(first, x, before), x)
        for node, index in users:
            node.replace_input_with(index, value)
        buffers[before] = name, y
    return buffers
