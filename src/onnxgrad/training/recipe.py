"""The recipe of a training: what its step computes, by the arguments of a trainer and its data."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.derivative import make_weights_inputs
from onnxgrad.autodiff.primal.free_rows import add_row_axes, fixed_row_count, free_rows
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.data.indices import indexed_tables
from onnxgrad.errors import argument, named, unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.precision import narrow_result, widen_input, widen_result
from onnxgrad.graph.tidy import take_apart
from onnxgrad.losses.classification import is_causal
from onnxgrad.losses.objectives import LABEL, TrainingLoss as LossOfOutputs, training_loss
from onnxgrad.losses.other_models import LossModel
from onnxgrad.model.notes import stopped_values, trained_dropout
from onnxgrad.model.read import is_model_path
from onnxgrad.model.surgery import select_model_inputs_outputs
from onnxgrad.model.weights import read_weights_lazily
from onnxgrad.native import Target
from onnxgrad.operators import shapes
from onnxgrad.optimizers.base import Chain, Optimizer
from onnxgrad.optimizers.scaling import clip_by_global_norm
from onnxgrad.parallel.process_groups import Part
from onnxgrad.training.class_weights import all_class_weights, balanced_outputs
from onnxgrad.training.data import Dataset, array_or_column_names, array_shape
from onnxgrad.training.filled import computable_inputs, compute_inputs, is_key_value_cache
from onnxgrad.training.frozen_cache import FrozenCut
from onnxgrad.training.job import Job
from onnxgrad.training.mixing import mix_rows
from onnxgrad.training.model_loss import (
    BATCH,
    ComputedLoss,
    loss_output,
    prediction_outputs,
    write_model_loss,
)
from onnxgrad.training.modes.dropouts import walk_with_outer_nodes
from onnxgrad.training.modes.inference_form import inference_form
from onnxgrad.training.modes.training_form import fold_normalizations, training_form
from onnxgrad.training.objective import Objective, TrainingLoss
from onnxgrad.training.sharing import Sharing
from onnxgrad.training.state import TrainState
from onnxgrad.training.step.build import Step, build_step
from onnxgrad.training.step.gradients import StepShare, build_gradients
from onnxgrad.training.step.inputs import DRAW, FIRST, remove_unread_feeds
from onnxgrad.training.step.members import Members
from onnxgrad.training.step.update import build_update
from onnxgrad.training.step.weight_groups import BLOCK_BYTES


@dataclass
class Recipe:
    """All that decides what the step of a training computes: a job, and facts of its data.

    Attributes:
        job: the arguments of a trainer.
        state: the state, whose weights have the shapes of the weights that train.
        labels: the shapes of labels that are known before batches are read; None: the data have no
            labels, and the loss is computed without labels.
        weight_axes: the count of axes that sample weights may have; 0: no sample weights.
        balanced: the weights that balance the classes of `fit` by output; None: the classes are not
            balanced, or the weights are not known yet.
        filled: the inputs that nodes compute, as the data lack them: see `computable_inputs`.
        sharing: how processes share the training; None: this process trains alone.
        cut: the results of frozen layers that are inputs of the step; None: the step computes them.
        samples: whether the graph draws predictions: Dropout nodes in inference mode are active.
    """

    job: Job
    state: TrainState = field(default_factory=TrainState)
    labels: Mapping[str, tuple[int, ...]] | None = field(default_factory=dict)
    weight_axes: int = 0
    balanced: dict[str, dict[int, float]] | None = None
    filled: frozenset[str] = frozenset()
    sharing: Sharing | None = None
    cut: FrozenCut | None = None
    samples: bool = False

    @classmethod
    def for_data(
        cls,
        job: Job,
        state: TrainState,
        data: Dataset,
        held_out: Any = None,
        sharing: Sharing | None = None,
    ) -> Self:
        """Return the recipe of the step that trains on `data`, or evaluates them.

        Args:
            job: the arguments of a trainer.
            state: the state, which has the weights of balanced classes.
            data: the data to train on or to evaluate.
            held_out: validation data, which are read if they are a `Dataset`.
            sharing: how processes share the training; None: this process trains alone.
        """
        both = (data, held_out) if isinstance(held_out, Dataset) else (data,)
        axes = max(d.weight_axes for d in both)
        axes = 2 if axes and job.inputs_with_moved_rows else axes
        balances = balanced_outputs(job.class_weight, job.loss) is not None
        weights = state.balanced if balances else None
        labels: dict[str, tuple[int, ...]] | None = label_shapes(data, job.proto)
        # for a causal loss only: `given_inputs` may read a batch, which may draw random numbers
        known = (d.given_inputs for d in both)
        if is_causal(job.loss) and not any(names is None or LABEL in names for names in known):
            labels = None
        return cls(job, state, labels, axes, weights, _inputs_to_compute(job, both), sharing)

    def for_model(self, proto: ModelProto, weights: Sequence[str], **changes: Any) -> Self:
        """Return this recipe with `proto` in place of the model, such as its inference form.

        The recipe has no state, and no processes share it.

        Args:
            proto: the model, which has the same outputs.
            weights: the names of the weights that are inputs of the graph.
            **changes: other fields of the job.
        """
        # the object `self.loss` was built with these arguments
        unset = dict.fromkeys(("class_weight", "loss_options", "loss_weights"))
        changes |= {"proto": proto, "trained": weights, "loss": self.loss, **unset}
        job = self.job.without_built(**changes)
        return replace(self, job=job, state=TrainState(), sharing=None)

    @property
    def statistics_part(self) -> Part | None:
        """The rank and count of processes whose rows BatchNormalization normalizes together.

        None: it normalizes the rows of each process separately.
        """
        return None if self.sharing is None else self.sharing.statistics_part

    @property
    def step_key(self) -> Any:
        """The cache key of the compiled step, equal for recipes that have the same step."""
        shapes = None
        if self.labels is not None:  # a step depends on whether there is one row, not on the count
            shapes = {name: [shape[:1] == (1,), *shape[1:]] for name, shape in self.labels.items()}
        facts = shapes, self.weight_axes, self.balanced, self.filled
        shared = None if self.sharing is None else self.sharing.step_key
        return self.job.step_key, facts, self.job.callbacks.gradient_norms, shared

    @cached_property
    def loss(self) -> TrainingLoss | ComputedLoss:
        """The object that writes the loss, or names the output of the model that is the loss.

        Raises:
            ValueError: arguments that do not fit each other.
        """
        job, loss = self.job, self.job.loss
        is_object = isinstance(loss, ComputedLoss) or hasattr(loss, "write")
        is_model = is_model_path(loss) or isinstance(loss, (ModelProto, bytes, os.PathLike))
        for name in ("class_weight", "loss_options", "loss_weights"):
            if (loss is None or is_object or is_model) and getattr(job, name) is not None:
                kind = "computed by a model" if loss is None else f"a {type(loss).__name__}"
                raise ValueError(
                    f"{named(name)} has no effect on a loss that is {kind}: leave out {named(name)}"
                )
        if loss is None:
            return ComputedLoss(loss_output(job.proto))
        if is_object:
            return loss
        if is_model:
            return LossModel(loss)
        return training_loss(
            loss,
            options=job.loss_options,
            loss_weights=job.loss_weights,
            class_weight=all_class_weights(job.class_weight, loss, self.balanced),
            label_shapes=self.labels,
            weight_shape=(0,) * self.weight_axes or None,
            labeled=self.labels is not None,
            in_chunks=job.members is None,
        )

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizer of each model; with `clip_norm`, a chain that clips gradients first."""
        norm, own = self.job.clip_norm, list(self.job.optimizers)
        return own if norm is None else [Chain((clip_by_global_norm(norm), o)) for o in own]

    @property
    def members(self) -> Members | None:
        """The `Members` of a stack, the copies of its model; None for one model."""
        stacked = self.job.members is not None
        return Members(self.optimizers, self.state.weights) if stacked else None

    def objective(self, training: bool = True) -> Objective:
        """Return the graph of the model and its loss, for a step or for an evaluation.

        Without `training`, it is for an evaluation: without dropout, with the stored statistics.
        """
        job, recipe = self.job, self
        if not training:
            recipe = self.for_model(inference_form(job.proto), job.trained, dropout={})
        objective = build_objective(recipe, training)
        if job.digest is not None:  # weights that do not influence the loss stay constants
            index = () if job.members is None else 0  # the first member of a stack
            read_weights_lazily(objective.weights, lambda name: self.state.weights[name][index])
        return objective

    def step(
        self,
        objective: Objective,
        norms: bool | None = None,
        in_place: bool = True,
        block_bytes: int = BLOCK_BYTES,
        across: StepShare | None = None,
        members: Members | None = None,
        fixed_rows: int | None = None,
        rows: int = 1,
        adds_losses: bool = False,
    ) -> Step:
        """Return the training step, which is written into the graph of the objective.

        Args:
            objective: the loss to minimize.
            norms: whether the step returns the norms of gradients; None: if a callback asks for it.
            in_place: whether the step may be a first half, whose updates change large states in
                place: see `Step.updates`.
            block_bytes: the most bytes of a block of a large weight; see `write_groups`.
            across: how processes share the step; None: the step has the rows of this process only.
            members: the members of a stack; None for one model.
            fixed_rows: the count of rows that the model takes at once; None: any count.
            rows: the count of rows of a batch.
            adds_losses: whether the loss of a batch is the sum of the losses of its micro-batches.

        Raises:
            ValueError: the loss depends on none of the weights; arguments that do not fit.
            NoGradientRule: an operator on the way has no rule.
        """
        job, on_cpu = self.job, self.job.device.kind == "cpu"
        parts = job.accumulate if fixed_rows is None else max(1, rows // fixed_rows)
        accumulates = parts > 1 or fixed_rows is not None
        if accumulates and job.carry:
            raise ValueError(
                "carry passes a state from batch to batch, and accumulate cuts a batch into "
                f"micro-batches: pass {argument('accumulate', 1)}, and batches of as many rows as "
                "the model takes"
            )
        step = build_step(
            self.objective() if accumulates else objective,
            self.optimizers[0],
            recompute=job.recompute,
            norms=job.callbacks.gradient_norms if norms is None else norms,
            # a device need not split the joined weights, and the CPU updates them
            packed=0 if job.device.copies_tensors and members is None else None,
            block_bytes=block_bytes if on_cpu else 0,
            in_place=in_place and on_cpu and members is None,
            members=members,
            across=across,
            accumulate=parts,
            counted=self.objective() if accumulates else None,
            adds_losses=adds_losses,
        )
        step.fixed_rows = fixed_rows
        return step

    def unpacked_step(self, objective: Objective) -> Step:
        """Return a training step with a separate input for each weight and slot.

        Other steps join small weights to one input.
        """
        return build_step(objective, self.optimizers[0], block_bytes=0, packed=0)

    def gradient_model(self, target: Target | None = None) -> ModelProto:
        """Return the model that computes the gradients of a batch: see `build_gradients`."""
        return build_gradients(self.objective().require_labels(), target)

    def step_models(self) -> tuple[ModelProto, ModelProto]:
        """Return a training step as two models: one computes gradients, one updates weights."""
        gradients = self.gradient_model()
        outputs = {y.name for y in gradients.graph.output}
        weights = {
            name: (w.shape, w.dtype)
            for name, w in self.state.weights.items()
            if f"{name}_grad" in outputs
        }
        return gradients, build_update(weights, self.optimizers[0])


# -- facts of the data ----------------------------------------------------------------------------


def _inputs_to_compute(job: Job, data: Sequence[Dataset]) -> frozenset[str]:
    """Return the names of the inputs that the data lack, and that nodes compute from the tokens.

    If it is unknown which inputs the data have before they are read, no input is computed.
    """
    every = computable_inputs(job.proto, is_causal(job.loss))
    known = [dataset.given_inputs for dataset in data] if every else []
    if not every or None in known:
        return frozenset()
    given = frozenset(job.carry).union(*(names for names in known if names is not None))
    none_is_given = not any(map(is_key_value_cache, every & given))
    return frozenset(name for name in every - given if none_is_given or is_key_value_cache(name))


def label_shapes(data: Dataset, proto: ModelProto) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the labels in `data`, by the name of their input or output.

    Labels in batches have the shapes of the first batch. Labels among features have the name
    "label", or the name of an output of the model.
    """
    X, y, _ = data.first_batch
    outputs = [output.name for output in proto.graph.output]
    names = {LABEL, *outputs, *(f"{LABEL}_{name}" for name in outputs)}
    if y is None:
        names -= {x.name for x in proto.graph.input}
        y = {name: X[name] for name in array_or_column_names(X) if name in names}
    elif (columns := array_or_column_names(y)) and (isinstance(y, Mapping) or {*columns} <= names):
        y = {name: y[name] for name in columns}
    labels = y if isinstance(y, Mapping) else {LABEL: y}
    shapes = {str(name): array_shape(array) for name, array in labels.items()}
    return {name: shape for name, shape in shapes.items() if shape is not None}


# -- the objective --------------------------------------------------------------------------------


def build_objective(
    recipe: Recipe, training: bool = True, additional: Collection[str] = ()
) -> Objective:
    """Return the graph of the model and the loss of a recipe.

    Args:
        recipe: the job, and facts of the data.
        training: whether the objective is for a step, with dropout and statistics of the batch.
        additional: names of further tensors that the graph computes.

    Raises:
        ValueError: unknown names, or a prediction that the loss does not accept.
    """
    job, loss, proto, computed = recipe.job, recipe.loss, recipe.job.proto, list[str]()
    predicted = loss.outputs(proto)
    if isinstance(loss, ComputedLoss):
        computed, predicted = predicted, prediction_outputs(proto, loss.output)
    model, results, freed = _prepare_model(recipe, computed, predicted, additional)
    graph, data, op = model.graph, list(model.graph.inputs), Emit(model.graph)
    buffers, mixed = dict[ir.Value, ir.Value](), None
    if training:
        draw, first = DRAW.input_in(op), FIRST.input_in(op)
        buffers = training_form(
            op,
            batch_norm=job.batch_norm,
            dropout=_dropout_in_graph(job, graph),
            draw=draw,
            seed=job.seed,
            across=recipe.statistics_part,
            samples=recipe.samples,
        )
        results = dict(zip(results, graph.outputs, strict=True))
    inputs = {str(x.name): x for x in data}
    states = {
        name: narrow_result(op, results[y], inputs.get(name)) for name, y in job.carry.items()
    }
    if training:
        buffers |= _carry_states_between_batches(op, inputs, states, job.carry, first)
        remove_unread_feeds(graph)
        mixed = mix_rows(op, job, loss, data, BATCH)
    others = {name: results[name] for name in additional}
    results = {name: results[name] for name in [*computed, *predicted]}
    trained = make_weights_inputs(proto, graph, job.trained)
    if job.precision != "file":
        trained = [widen_input(op, w) for w in trained]
        results = {n: y if computed else widen_result(op, y) for n, y in results.items()}
    fixed = stopped_values(proto)
    nodes = (node for node, _ in walk_with_outer_nodes(graph))
    stopped = {y for node in nodes for y in node.outputs if y.name in fixed}
    if training:
        fold_normalizations(op, trained, {*stopped, *results.values(), *states.values()})
    with op:
        if isinstance(loss, ComputedLoss):
            written = write_model_loss(op, proto, loss, results[loss.output], data)
        else:
            if isinstance(loss, LossOfOutputs):  # such a loss may write its own gradient
                loss = loss.for_gradients(trained if training else (), mixed)
            written = loss.write(op, results, recipe.weight_axes > 0)
    added = [v for v in (*written.labels, written.weight) if v is not None and v not in data]
    graph.inputs.extend(added)
    data += added
    objective = Objective(
        *(job.without_built(), model, data, trained, written),
        predictions={name: results[name] for name in predicted} | others,
        tables=indexed_tables(graph, data),
        buffers=buffers,
        states=states,
        stop_gradient=stopped,
        freed=freed,
    )
    return objective if recipe.cut is None else recipe.cut.apply(objective)


def _prepare_model(
    recipe: Recipe, computed: Sequence[str], predicted: Sequence[str], additional: Collection[str]
) -> tuple[ir.Model, dict[str, ir.Value], int]:
    """Return the model prepared for autodiff, its outputs by name, and a count of rows.

    A model with a fixed batch is made to take any number of rows where it is proven to treat rows
    independently. The count is the rows of this fixed batch, and 0 for other models.

    Args:
        recipe: the job, and facts of the data.
        computed: the output that is the loss, in a list; empty if a loss is written.
        predicted: the outputs that the loss reads or that are predictions.
        additional: names of further tensors that the graph computes.
    """
    job, proto = recipe.job, recipe.job.proto
    read = list(dict.fromkeys([*computed, *predicted, *job.carry.values(), *additional]))
    if not {y.name for y in proto.graph.output}.issuperset(read):
        proto = select_model_inputs_outputs(proto, read)
    model = prepare(
        proto,
        batch=BATCH,
        outputs=read,
        keep=[*job.dropout, *stopped_values(proto)],
        keep_dropout=recipe.samples or bool(job.dropout),
        exempt=job.inputs_with_moved_rows,
        wide=job.trained if job.precision == "float32" else None,
        fill=partial(compute_inputs, names=recipe.filled) if recipe.filled else None,
    )
    add_row_axes(
        model.graph,
        [] if computed else [read.index(y) for y in predicted],
        job.inputs_with_moved_rows,
    )
    rows = fixed_row_count(model, BATCH, job.batch_axes) or 0
    freed = free_rows(model, BATCH, job.batch_axes, rows) if rows else None
    if freed is not None:
        take_apart(model.graph)
        model = freed
    return model, dict(zip(read, model.graph.outputs, strict=True)), 0 if freed is None else rows


def _dropout_in_graph(job: Job, graph: ir.Graph) -> dict[str, float]:
    """Return the argument `dropout` of a job, without the Dropout nodes of the metadata that the
    graph lacks, as the loss does not depend on them.
    """
    noted = trained_dropout(job.proto)
    present = {y.name for node, _ in walk_with_outer_nodes(graph) for y in node.outputs}
    return {n: p for n, p in job.dropout.items() if n not in noted or n in present}


def _carry_states_between_batches(
    op: Emit,
    inputs: Mapping[str, ir.Value],
    states: Mapping[str, ir.Value],
    outputs: Mapping[str, str],
    first: ir.Value,
) -> dict[ir.Value, ir.Value]:
    """Replace inputs by buffers that hold the values of outputs in the batch before.

    Where `first` is true, the inputs keep the values in the data. The result has the new value of
    each buffer, by buffer.

    Args:
        op: writes into the graph.
        inputs: the inputs of the graph, by name.
        states: the value of the output, by the name of the input.
        outputs: the name of the output, by the name of the input.
        first: whether a batch begins an epoch or a sequence.

    Raises:
        ValueError: an unknown input, or an output of another dtype or shape.
    """
    buffers = {}
    for name, y in states.items():
        if name not in inputs:
            raise unknown("input", name, inputs)
        x = inputs[name]
        lengths = list(zip(shapes.dims(x) or (), shapes.dims(y) or (), strict=False))
        differ = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in lengths)
        if x.dtype != y.dtype or differ or shapes.rank(x) != shapes.rank(y):
            raise ValueError(
                f"carry: the output {outputs[name]!r}, {y.dtype} {y.shape}, cannot become the "
                f"input {name!r}, {x.dtype} {x.shape}: name an output of the same dtype and shape"
            )
        before = ir.Value(name=op.name(f"{name}.carried"), type=x.type, shape=x.shape)
        users = list(x.uses())
        with op.at(next(iter(op.graph))):
            value = op.set_type_like(op.Where(first, x, before), x)
        for node, index in users:
            node.replace_input_with(index, value)
        buffers[before] = y
    return buffers
