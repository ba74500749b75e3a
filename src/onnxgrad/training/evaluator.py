"""`Evaluator`: losses, metrics and predictions of a model for any weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any, Self

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.data.columns import Names
from onnxgrad.errors import argument, escaping, named
from onnxgrad.graph.precision import HALVES
from onnxgrad.graph.tidy import tidy
from onnxgrad.model import weights as constants
from onnxgrad.model.convert import to_proto_and_free
from onnxgrad.native import Target, to_native
from onnxgrad.operators import marks
from onnxgrad.operators.shapes import dims, static
from onnxgrad.parallel.process_groups import Group
from onnxgrad.runtime.predictor import MANY_ROWS, ROWS, Predictor, join_rows
from onnxgrad.runtime.session import count_multiply_adds, session, work_of_calls
from onnxgrad.training.batches import BatchSource
from onnxgrad.training.class_weights import balanced_outputs
from onnxgrad.training.data import Dataset
from onnxgrad.training.diagnose import cause_in_evaluation, label_misfit
from onnxgrad.training.fields import DataSpec
from onnxgrad.training.modes.inference_form import inference_form
from onnxgrad.training.objective import Objective
from onnxgrad.training.output_metrics import (
    MetricsByOutput,
    OutputMetrics,
    metrics_of_outputs,
    refuse_negative_weights,
)
from onnxgrad.training.recipe import Recipe, build_objective
from onnxgrad.training.state import LossTotals
from onnxgrad.training.step.inputs import Batch, BatchSlice, feed_inputs
from onnxgrad.training.step.members import objective_of_stack

Arrays = Mapping[str, np.ndarray]
# a model computes little for a row if it has at most so many multiply-adds, and the inputs and
# predictions so many numbers: one call then takes as long as hundreds of rows
_LITTLE_WORK, _FEW_NUMBERS = 1e5, 1 << 12
# rows of a call of a model whose file declares one row: such models are often large
_FREED_ROWS = 8
_THREADED_ROWS = 32  # the rows for whose work a session with several threads is built
# the data of a batch; the sums of its losses, and then their counts; the predictions by output
Results = tuple[dict[str, np.ndarray], list[np.ndarray], dict[str, np.ndarray]]
MetricsByModel = list[list[OutputMetrics]]  # for each model, one for each output


class Evaluator:
    """Evaluates a model in its inference form; weights and running statistics are inputs.

    The members of a stack are evaluated in one graph: weights, statistics, losses, metrics and
    predictions have an axis of members first.

    Args:
        recipe: the loss, and a job with the model in its inference form and the names of the
            weights and statistics that are passed to every call.

    Attributes:
        shown: the title of a progress bar; None for none.
        failed: the first batch of the last evaluation whose loss is not finite; None if all are.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.job, self.members = recipe, recipe.job, recipe.job.members
        self.shown: str | None = None
        self.failed: Batch | None = None
        self._predictors = dict[tuple[str, float], Predictor]()  # shared by copies

    def copy_with_names(self, names: Names) -> Self:
        """Return a copy of this evaluator for one call, whose tables have the columns `names`."""
        # copies share the cached values
        self._is_cheap_per_row, self._half_precision_dtypes  # noqa: B018
        new = object.__new__(type(self))  # faster than `copy.copy`
        new.__dict__.update(self.__dict__)
        new.fields, new.failed = self.fields.copy(), None
        new.fields.names = names
        return new

    def objective(self) -> Objective:
        """Return the graph of the model and its loss; for a stack, one graph of all its members."""
        one = build_objective(self.recipe, training=self.recipe.samples)
        return one if self.members is None else objective_of_stack(one, self.members)

    @cached_property
    def member_objective(self) -> Objective:
        """The objective of one model (of one member of a stack).

        It tells which inputs, labels and outputs there are.
        """
        one = build_objective(self.recipe, training=self.recipe.samples)
        return one.kept_as_description()

    @cached_property
    def fields(self) -> DataSpec:
        """The `DataSpec`, which checks arrays of data against the inputs of the model."""
        fields = DataSpec(self.member_objective, self.job.batch_axes)
        fields.divides = True
        return fields

    @property
    def default_rows(self) -> int:
        """The default number of rows of a call of the runtime."""
        if freed := self.member_objective.freed:
            return freed if self.job.carry else max(_FREED_ROWS, freed)
        return self.fields.fixed_rows or (MANY_ROWS if self._is_cheap_per_row else ROWS)

    @cached_property
    def _is_cheap_per_row(self) -> bool:
        """Whether the model computes so little for a row that calls of many rows are faster."""
        if self._multiply_adds_per_row > _LITTLE_WORK or self.job.carry:
            return False
        one, symbol, numbers = self.member_objective, self.fields.row_axes.symbol, 0
        for value in (*one.data, *one.predictions.values()):
            shape = dims(value)
            known = None if shape is None else tuple(1 if d == symbol else d for d in shape)
            if (lengths := static(known)) is None:
                return False
            numbers += math.prod(lengths)
        return numbers <= _FEW_NUMBERS

    @cached_property
    def _multiply_adds_per_row(self) -> float:
        """The count of multiply-adds for one row; in a stack, of all members together."""
        return count_multiply_adds(self.member_objective.model.graph) * (self.members or 1)

    def _predictor_for(self, name: str, rows: int) -> Predictor:
        """Return the `Predictor` that computes `name` for batches of `rows` rows.

        `name` is "predictions", "losses" or "all" for both.

        Weights and running statistics are inputs, so that it serves every step of a training.
        Predictions that nothing reads may be many more numbers than the losses need.
        """
        multiply_adds = work_of_calls(self._multiply_adds_per_row, rows, _THREADED_ROWS)
        key = name, multiply_adds
        if key not in self._predictors:
            one = self.objective()
            graph, losses = one.model.graph, [] if name == "predictions" else one.reported
            predictions = [] if name == "losses" else one.predictions.values()
            if predictions:  # losses then read whole predictions, computed once, not in chunks
                losses = [v.meta.get(marks.PLAIN_SUM, v) for v in losses]
            graph.outputs[:] = [*losses, *predictions, *one.states.values()]
            tidy(one.model)
            if not losses:  # no node reads the labels
                graph.inputs[:] = [x for x in graph.inputs if x.uses() or x in graph.outputs]
            to_native(graph, Target.for_step(self.job.device, multiply_adds, self.default_rows))
            proto = to_proto_and_free(one.model)
            running = session(proto, self.job.device, multiply_adds)
            self._predictors[key] = Predictor(running, fixed_rows=0)
        return self._predictors[key]

    @escaping()
    def evaluate(
        self,
        values: Arrays,
        source: BatchSource,
        metrics: MetricsByOutput | None = None,
        group: Group | None = None,
    ) -> dict[str, Any]:
        """Return `loss`, and the metrics by name, for the data of a source.

        Each process of a `group` computes the predictions of a part of the rows, and sends them to
        the other processes.
        """
        totals, by_model, self.failed = self._zero_totals(), self._new_metrics(metrics or {}), None
        batches = self._batch_results("all" if any(by_model) else "losses", values, source, True)
        for batch in batches if group is None else self._gathered_results(batches, group):
            self._add_batch(totals, by_model, batch)
        scores = [{n: v for each in own for n, v in each.results().items()} for own in by_model]
        if self.members is not None:
            scores = [{name: np.array([own[name] for own in scores]) for name in scores[0]}]
        return {"loss": totals.mean, **scores[0]}

    def _zero_totals(self) -> LossTotals:
        """Return the sums and counts of losses before the first batch, which are zero."""
        return LossTotals.from_saved(tuple(self.member_objective.written.factors), {}, self.members)

    @escaping()
    def check_metrics(self, values: Arrays, source: BatchSource, metrics: MetricsByOutput) -> None:
        """Raise `ValueError` for metrics that do not fit the first batch of a source.

        A source that is not in memory is not read: metrics then see an empty array in the declared
        shape of their prediction.
        """
        if not any(metrics.values()):
            return
        one, by_model = self.member_objective, self._new_metrics(metrics)
        if one.allows_negative_weights and source.in_memory:
            for piece in source.label_batches():
                refuse_negative_weights(self.job.all_metrics, piece.get(str(one.row_weight)))
        if source.in_memory:
            with closing(self._batch_results("all", values, source)) as results:
                self._add_batch(self._zero_totals(), by_model, next(results))
            return
        for output_metrics in by_model[0]:
            info = output_metrics.info
            axis = 1 if info.axis is None else info.axis
            shape = dims(one.predictions[str(info.prediction)])
            if shape and (info.classes is None or isinstance(shape[axis], int)):
                empty = np.empty([d if isinstance(d, int) else 0 for d in shape])
                output_metrics.begin(np.moveaxis(empty, output_metrics.axis, 0))

    def _new_metrics(self, metrics: MetricsByOutput) -> MetricsByModel:
        """Return new `OutputMetrics`: for each model of a stack, a list by output."""
        arguments = self.member_objective.labels, metrics, self.row_axis
        return [metrics_of_outputs(*arguments) for _ in range(self.members or 1)]

    def _add_batch(self, totals: LossTotals, by_model: MetricsByModel, batch: Results) -> None:
        """Add the losses of a batch to `totals`, and update the metrics of each model."""
        arrays, losses, predictions = batch
        totals.add_reported(losses)
        finite = np.isfinite(totals.sums).all(axis=0)  # whether the losses so far are finite
        weight = arrays.get(self.member_objective.row_weight or "")
        if weight is not None and (weight == 1).all():
            weight = None  # weights of one are left out, for metrics that take no weights
        for k, (own, fine) in enumerate(zip(by_model, np.ravel(finite).tolist(), strict=True)):
            read = {n: y if self.members is None else y[k] for n, y in predictions.items()}
            for output_metrics in own:
                output_metrics.update(read, arrays, weight, fine)

    def _gathered_results(self, batches: Iterator[Results], group: Group) -> Iterator[Results]:
        """Yield the results of the batches of all processes of a group, gathered in each process.

        Of the data of a batch, only labels and sample weights are sent, as metrics read these.
        """
        one = self.member_objective
        for arrays, *results in batches:
            named = {n: a for n, a in arrays.items() if n in one.labels or n == one.row_weight}
            yield from (b for b in group.gather((named, *results) if arrays else None) if b)

    def explain_not_finite(self, values: Arrays) -> str:
        """Return a clause that says why the loss of the last evaluation is not finite.

        `values` are the weights and running statistics of one model, by name.
        """
        proto = self.job.proto
        outputs = self.recipe.loss.outputs(proto)
        file = constants.replace_constants(proto, {name: values[name] for name in self.job.trained})

        def build_losses_model() -> ModelProto:
            new = build_objective(self.recipe, training=False)
            new.model.graph.outputs[:] = new.reported
            tidy(new.model)
            return to_proto_and_free(new.model)

        return cause_in_evaluation(file, outputs, build_losses_model, values, self.failed)

    @escaping()
    def predict_batches(
        self, values: Arrays, source: BatchSource
    ) -> Iterator[tuple[Arrays, dict[str, np.ndarray]]]:
        """Yield the data by input and the predictions by output of every batch.

        All arrays have their rows on the first axis.
        """
        one = self.member_objective
        labels = {str(info.prediction): label for label, info in one.labels.items()}
        axes = {name: self.row_axis(name, labels.get(name)) for name in one.predictions}
        for arrays, _, found in self._batch_results("all", values, source):
            yield arrays, {n: np.moveaxis(y, axes[n], 0) for n, y in found.items()}

    @escaping()
    def row_loss(self, values: Arrays, arrays: Arrays, row: int) -> float:
        """Return the loss of the row `row` of a batch; NaN if all its labels are ignored."""
        predictor, axes = self._predictor_for("all", 1), self.fields.row_axes
        fed = axes.as_declared(axes.take_rows(arrays, slice(row, row + 1)))
        totals = self._zero_totals()
        losses = predictor.compute({**values, **fed})[: 2 * len(totals.factors)]
        totals.add_reported(losses, 1)
        return totals.mean

    @escaping()
    def predict(self, values: Arrays, source: BatchSource) -> dict[str, np.ndarray]:
        """Return the predictions for the data of a source, by output.

        The arrays of a stack have the axis of members first.
        """
        parts = [found for *_, found in self._batch_results("predictions", values, source)]
        return self._join_batches(parts, source, int(self.members is not None))

    @escaping()
    def sample_predictions(self, source: BatchSource, count: int) -> dict[str, np.ndarray]:
        """Return `count` predictions for the data of a source, (count, rows, ...), by output.

        The recipe is for samples: each prediction of each batch has masks of dropout of its own.
        """
        names, parts = list(self.member_objective.predictions), []
        [draw] = feed_inputs(self.member_objective.model.graph).values()
        predictor = self._predictor_for("predictions", self.default_rows)
        for number, piece in enumerate(self._batches_with_progress_bar(source)):
            data = piece.row_axes.as_declared(piece.first_batch())
            draws = (np.array(number * count + k, np.int64) for k in range(count))
            found = [predictor.compute({**data, str(draw.name): k}) for k in draws]
            parts.append({n: np.stack(ys) for n, *ys in zip(names, *found, strict=True)})
        return self._join_batches(parts, source, 1)

    def _join_batches(
        self, parts: Sequence[Mapping[str, np.ndarray]], source: BatchSource, axis: int
    ) -> dict[str, np.ndarray]:
        """Return the predictions of all batches of a source, by output, in the order of its rows.

        `axis` is the count of axes in front of the axes of an output, such as the axis of members.
        """
        predictions = {}
        for name in self.member_objective.predictions:
            every = [y if y.ndim > axis else y[..., None] for y in (part[name] for part in parts)]
            rows = self.row_axis(name) + axis
            whole = join_rows(name, every, rows)
            if source.unshuffled_order is not None:
                whole = whole.take(np.argsort(source.unshuffled_order), rows)
            dtype = self._half_precision_dtypes.get(name, whole.dtype)
            predictions[name] = whole.astype(dtype, copy=False)
        return predictions

    @cached_property
    def _half_precision_dtypes(self) -> dict[str, np.dtype]:
        """The dtypes of the outputs that the file declares as float16 or bfloat16, by name."""
        stated = {y.name: y.type.tensor_type.elem_type for y in self.job.proto.graph.output}
        return {n: ir.DataType(dtype).numpy() for n, dtype in stated.items() if dtype in HALVES}

    def row_axis(self, output: str, label: str | None = None) -> int:
        """Return the row axis of an output; if it declares none, the row axis of its label."""
        axes = self.fields.row_axes
        shape = dims(self.member_objective.predictions[output]) or ()
        if axes.symbol in shape:
            return shape.index(axes.symbol)
        return 0 if label is None else axes.moved_axes.get(label, 0)

    def _batch_results(
        self, name: str, values: Arrays, source: BatchSource, notes: bool = False
    ) -> Generator[Results, None, None]:
        """Yield the data of every batch, the sums and counts of its losses, and its predictions.

        Data have their rows on the first axis. States are carried from batch to batch. The data are
        empty if the rows of the batch do not count.

        Args:
            name: "predictions", "losses" or "all": the outputs to compute.
            values: the weights and statistics.
            source: the batches.
            notes: whether to set `failed`.
        """
        carried, predictor = dict[str, np.ndarray](), None
        parts = 0 if name == "predictions" else 2 * len(self.member_objective.written.sums)
        states = list(self.member_objective.states)
        axis = [] if self.members is None else [self.members]
        for number, piece in enumerate(self._batches_with_progress_bar(source)):
            arrays = piece.first_batch()
            data = piece.row_axes.as_declared(arrays)
            if piece.begins is not None:
                carried = {}
            first = () if carried else states
            begun = {n: np.broadcast_to(data[n], (*axis, *data[n].shape)) for n in first}
            if predictor is None:
                predictor = self._predictor_for(name, piece.own)
            fed = {**values, **data, **begun, **carried}
            try:
                results = predictor.compute(fed)
            except Exception as e:
                if self.has_computed_labels and (misfit := self.label_misfit(fed)):
                    raise ValueError(misfit) from e
                raise
            losses, end = results[:parts], len(results) - len(states)
            if notes and self.failed is None and not all(np.isfinite(y).all() for y in losses):
                (self.failed,) = piece.each_batch(number)
            carried = dict(zip(states, results[end:], strict=True))
            found = dict(zip(self.member_objective.predictions, results[parts:end], strict=False))
            yield arrays if piece.counted else {}, losses, found

    @property
    def has_computed_labels(self) -> bool:
        """Whether the shape of a label, or its count of classes, is known only by running the
        model.

        Then no check of the data before the run finds a label that does not fit.
        """
        one = self.member_objective
        labels = [(one.labels[x.name], dims(x)) for x in one.data if x.name in one.labels]
        return any(isinstance(of.classes, str) or s is None or None in s[1:] for of, s in labels)

    def label_misfit(self, fed: Arrays) -> str | None:
        """Return a message that names a label whose shape or class does not fit its prediction.

        None if all labels fit.

        Args:
            fed: the weights and the data of a batch whose loss could not be computed.
        """
        one, axis = self.member_objective, int(self.members is not None)
        try:
            outputs = self._predictor_for("predictions", 1).compute(fed)
        except Exception:  # the model itself fails for these data
            return None
        shapes = {n: y.shape[axis:] for n, y in zip(one.predictions, outputs, strict=False)}
        return label_misfit(one.data, one.labels, self.fields, shapes, fed)

    def _batches_with_progress_bar(self, source: BatchSource) -> Iterator[BatchSlice]:
        """Yield slices of one batch each, and show a progress bar if `shown` is the bar's title."""
        slices = source.epoch(None, 0, lambda batch: 1)
        if self.shown is None:
            yield from slices
            return
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(self.shown, total=source.rows)
            for piece in slices:
                yield piece
                bar.advance(task, piece.rows)


def check_class_and_sample_weights(
    recipe: Recipe, data: Dataset, objective: Objective, fields: DataSpec
) -> None:
    """Raise `ValueError` if `class_weight` or `sample_weight` cannot be applied.

    Balanced class weights are not known before `fit`, and one sample weight for each row needs
    outputs whose rows are on the first axis.
    """
    needed = balanced_outputs(recipe.job.class_weight, recipe.job.loss) is not None
    if needed and recipe.balanced is None:
        raise ValueError(
            f"{argument('class_weight', 'balanced')} is computed from the labels of fit: call fit "
            "first, or pass the weights of the classes"
        )
    if data.sample_weight is None or recipe.weight_axes != 1:
        return
    shapes, symbol = fields.row_axes.shapes, fields.row_axes.symbol
    labels = {info.prediction: shapes[label] for label, info in objective.labels.items()}
    for name, prediction in objective.predictions.items():
        shape = dims(prediction) or ()
        label = labels.get(name) or shape
        if symbol in shape[1:] and label[0] != symbol:
            raise ValueError(
                f"{named('sample_weight')}: the rows of the output {name!r}, {shape}, are not on "
                "its first axis: pass weights in the shape of the labels, or name the axis of rows "
                "with batch_axes={input: axis}"
            )


def cached_evaluator(recipe: Recipe, names: Names, buffers: Collection[str] = ()) -> Evaluator:
    """Return an evaluator of the model in its inference form, which the job of the recipe caches.

    It evaluates any weights. The result is a copy that knows `names`.

    Args:
        recipe: the recipe of a trainer's step.
        names: the names of the columns of tables.
        buffers: names of running statistics that train, and are not in the state yet.
    """
    job, state = recipe.job, recipe.state
    changing = frozenset({*state.weights, *state.buffers, *buffers})

    def build_evaluator() -> Evaluator:
        proto = inference_form(job.proto)
        read = sorted({ref.name for ref in constants.constant_refs(proto)} & changing)
        return Evaluator(recipe.for_model(proto, read))

    key = "labeled" if recipe.labels else "unlabeled"
    kept = job.built.get(f"evaluator, {key}", lambda: (recipe.step_key, changing), build_evaluator)
    return kept.copy_with_names(names)


def evaluate(
    recipe: Recipe, names: Names, data: Dataset, batch_size: int | None, shown: str | None
) -> dict[str, Any]:
    """Return the loss and the metrics of a trainer's model on data, by name.

    Args:
        recipe: the recipe for these data, with the arguments of a trainer and the weights.
        names: the names of the columns of tables.
        data: the data.
        batch_size: rows of one call of the runtime; None: 256, 1,024 of a model that computes
            little for each row, 8 if the file declares one row. Where states are carried, or a
            static batch cannot be freed, a call has the rows that the file declares.
        shown: the title of a progress bar; None for none.
    """
    job, evaluator = recipe.job, cached_evaluator(recipe, names.copy())
    evaluator.shown, values = shown, job.values_to_evaluate(recipe.state)
    check_class_and_sample_weights(recipe, data, evaluator.member_objective, evaluator.fields)
    source = data.source(evaluator.fields, batch_size or evaluator.default_rows)
    results = evaluator.evaluate(values, source, job.metrics)
    if bad := np.flatnonzero(~np.isfinite(results["loss"])).tolist():
        text = f"the loss is {results['loss']}"
        if job.members is not None:
            values = {name: array[bad[0]] for name, array in values.items()}
            text = f"the loss of the members {bad} is not finite"
        warnings.warn(f"{text}: {evaluator.explain_not_finite(values)}", stacklevel=3)
    return results


def predict(
    recipe: Recipe, names: Names, data: Dataset, batch_size: int | None, shown: str | None
) -> dict[str, np.ndarray]:
    """Return the predictions of a trainer's model for data, by output.

    The arguments are those of `evaluate`.
    """
    evaluator = cached_evaluator(recipe, names.copy())
    evaluator.shown, fields = shown, evaluator.fields.without_labels()
    source = data.source(fields, batch_size or evaluator.default_rows)
    return evaluator.predict(recipe.job.values_to_evaluate(recipe.state), source)
