"""The objective of a `Trainer`: a loss that is the mean of its terms, with modes and buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.derivative import as_inputs
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.data.columns import read_names
from onnxgrad.data.indices import tables
from onnxgrad.errors import unknown
from onnxgrad.graph import shapes
from onnxgrad.graph.emit import Emit
from onnxgrad.losses.info import LossInfo, loss_info
from onnxgrad.losses.label_checks import require_labels
from onnxgrad.losses.objectives import Written
from onnxgrad.model import weights as constants
from onnxgrad.model.convert import non_tensor
from onnxgrad.model.notes import detached
from onnxgrad.model.surgery import select_model_inputs_outputs
from onnxgrad.parallel import Part
from onnxgrad.training.modes import fold_normalizations, training_form
from onnxgrad.training.modes.nodes import walk
from onnxgrad.training.objective import BATCH, Objective

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
    """What a `Trainer` minimizes, and how its model computes while it trains.

    - `loss`: writes the loss; None: the output `loss_output` is the loss.
    - `exempt`: inputs whose first axis is not that of the rows.
    - `carry`: `{input: output}`, the input gets the value of the output of the batch before.
    - `straight_through`: whether gradients pass through the rounding of quantized layers.
    - `across`: the part of this process, if BatchNormalization uses the rows of all processes.
    - `beside`: names of tensors that the graph computes beside the loss.
    """

    loss: TrainingLoss | None
    loss_output: str = ""
    batch_norm: str = "frozen"
    dropout: Mapping[str, float] = field(default_factory=dict)
    carry: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    exempt: frozenset[str] = frozenset()
    straight_through: bool = False
    across: Part | None = None
    beside: tuple[str, ...] = ()


@dataclass
class Minimized(Objective):
    """The loss that `written` describes: the sum over k of factors_k sums_k / counts_k.

    `predictions` are the values that the loss reads, by the name of the output; `states` those that
    inputs get in the next batch, by the input; `beside` those of the plan, by name.
    """

    written: Written = field(kw_only=True)
    predictions: dict[str, ir.Value] = field(kw_only=True)
    states: dict[str, ir.Value] = field(kw_only=True)
    carried: dict[str, str] = field(kw_only=True)  # the data input of a buffer, by its name
    beside: dict[str, ir.Value] = field(kw_only=True)

    per_row: ClassVar[bool] = False

    @property
    def labels(self) -> dict[str, LossInfo]:
        """What is known of each label input."""
        return self.written.infos

    def require_labels(self) -> Self:
        """Let the graph itself refuse the labels that a trainer refuses; return this objective."""
        inputs = {str(x.name): x for x in self.data}
        for name, info in self.labels.items():
            require_labels(Emit(self.model.graph), inputs[name], info)
        return self

    def cotangents(self, op: Emit) -> dict[ir.Value, ir.Value]:
        """Return the cotangents that the sweep starts with."""
        return self.scaled(op, [inverse(op, n) for n in self.written.counts])

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
    def reported(self) -> list[ir.Value]:
        """What a step returns for every batch: the sums, then the counts."""
        return [*self.written.sums, *self.written.counts]

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


def inverse(op: Emit, count: ir.Value) -> ir.Value:
    """Return 1 / count; for a batch without any term, a number whose product with 0 is 0."""
    assert count.dtype is not None
    return op.set_type_like(
        op.Reciprocal(op.Max(count, op.const(_TINY[count.dtype], count.dtype))), count
    )


def minimized(
    proto: ModelProto, weights: Sequence[str], plan: Plan, weighted: bool, training: bool = True
) -> Minimized:
    """Return the objective of `plan` for the named weights of a model.

    Args:
        proto: the model.
        weights: names of the weights.
        plan: what is minimized.
        weighted: whether the data may contain sample weights.
        training: whether the graph is that of a step, with dropout and statistics of the batch.

    Raises:
        ValueError: unknown names, or a prediction that the loss does not accept.
    """
    predicted = plan.loss.outputs(proto) if plan.loss else _beside(proto, plan.loss_output)
    model, results = _prepared(proto, plan, predicted)
    graph, data = model.graph, list(model.graph.inputs)
    op, form = Emit(graph), _Form()
    if training:
        form = _Form.of(op, plan, data, results)
    states = {name: results[output] for name, output in plan.carry.items()}
    beside = {name: results[name] for name in plan.beside}
    results = {name: results[name] for name in (predicted if plan.loss else results)}
    trained = as_inputs(proto, graph, weights)
    fixed = detached(proto)
    stopped = {y for node, _ in walk(graph) for y in node.outputs if y.name in fixed}
    if training:
        read = {*results.values(), *states.values(), *beside.values()}
        fold_normalizations(op, trained, stopped | read)
    with op:
        if plan.loss is None:
            written = _loss_output(op, proto, results[plan.loss_output], data)
        else:
            written = plan.loss.write(op, results, weighted)
    added = [v for v in (*written.labels, written.weight) if v is not None and v not in data]
    graph.inputs.extend(added)
    data += added
    return Minimized(
        model,
        data,
        trained,
        written.sums[0],
        {},
        next(iter(written.infos.values()), LossInfo()),
        None if written.weight is None else written.weight.name,
        tables=tables(graph, data),
        names=read_names(proto),
        stored=constants.stored(proto, weights),
        written=written,
        predictions={name: results[name] for name in predicted},
        states=states,
        buffers=form.buffers,
        draw=form.draw,
        first=form.first,
        stop_gradient=stopped,
        carried=form.carried,
        beside=beside,
        straight_through=plan.straight_through,
    )


def _prepared(
    proto: ModelProto, plan: Plan, predicted: Sequence[str]
) -> tuple[ir.Model, dict[str, ir.Value]]:
    """Return the prepared model with the outputs that are read, and these by name."""
    own = [] if plan.loss else [plan.loss_output]
    read = list(dict.fromkeys([*own, *predicted, *plan.carry.values(), *plan.beside]))
    if not {y.name for y in proto.graph.output}.issuperset(read):
        proto = select_model_inputs_outputs(proto, read)
    model = prepare(
        proto,
        batch=BATCH,
        outputs=read,
        keep=[*plan.dropout, *detached(proto)],
        keep_dropout=bool(plan.dropout),
        exempt=plan.exempt,
    )
    return model, dict(zip(read, model.graph.outputs, strict=True))


@dataclass
class _Form:
    """What the form of a graph that trains has beside the inputs of the model."""

    draw: ir.Value | None = None
    first: ir.Value | None = None
    buffers: dict[ir.Value, ir.Value] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, op: Emit, plan: Plan, data: Sequence[ir.Value], results: dict[str, ir.Value]
    ) -> _Form:
        """Bring a graph into that form; `results` are updated where outputs are replaced."""
        draw, first = _scalar(op, "draw", ir.DataType.INT64), _scalar(op, "first", ir.DataType.BOOL)
        buffers = training_form(
            op,
            batch_norm=plan.batch_norm,
            dropout=plan.dropout,
            draw=draw,
            seed=plan.seed,
            across=plan.across,
        )
        results.update(zip(list(results), op.graph.outputs, strict=True))
        carried = _carry(op, data, results, plan.carry, first)
        buffers |= {before: y for before, (_, y) in carried.items()}
        names = {str(before.name): name for before, (name, _) in carried.items()}
        return cls(draw, first, buffers, names)


def _scalar(op: Emit, name: str, dtype: ir.DataType) -> ir.Value:
    return ir.Value(name=op.name(name), type=ir.TensorType(dtype), shape=ir.Shape([]))


def _carry(
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
        x, y = inputs[name], results[output]
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
            f"loss=None needs an output that is the loss, called 'loss' or of a single number; the "
            f"outputs are {names}: pass loss='cross_entropy' or another one of onnxgrad.LOSSES"
        )
    return single[0]


def _beside(proto: ModelProto, loss: str) -> list[str]:
    """Return the names of the outputs that are predictions beside the output `loss`."""
    noted = loss_info(proto).prediction
    names = [y.name for y in proto.graph.output if y.name != loss and not non_tensor(y)]
    return [noted] if noted is not None and noted in names else names


def _loss_output(op: Emit, proto: ModelProto, loss: ir.Value, data: Sequence[ir.Value]) -> Written:
    """Return a loss that the model computes, as the mean of a batch.

    One that `add_loss_output` noted to be a sum is divided by the number of rows.
    """
    info, inputs = loss_info(proto), {str(x.name): x for x in data}
    if shapes.static(shapes.dims(loss)) not in ((), (1,), (1, 1)):
        raise ValueError(f"the loss {loss.name!r} must hold one number, not {loss.shape}")
    kind = ir.DataType.DOUBLE if loss.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    total = op.Cast(op.Reshape(loss, []), to=kind)
    label = inputs.get(info.label or "label", data[-1])
    ranked = shapes.rank(label) != 0
    rows = op.Reshape(op.Shape(label, start=0, end=1), []) if ranked else op.const(1)
    count = op.Cast(rows, to=kind)
    if info.reduction != "sum":
        total = total * count
    infos = {str(label.name): info} if info.label or label.name == "label" else {}
    return Written([total], [count], [1.0], [], infos, inputs.get("weight"), [None])
