"""Losses, metrics and predictions of a model for any weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any, Self

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.data.columns import Names
from onnxgrad.errors import argument, escaping, named
from onnxgrad.graph.shapes import dims
from onnxgrad.graph.tidy import tidy
from onnxgrad.model import weights as constants
from onnxgrad.model.convert import to_proto
from onnxgrad.parallel import Group
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.session import session, work
from onnxgrad.training.batches import Batch, BatchSource, Slice, rows_of
from onnxgrad.training.causes import cause_in_evaluation
from onnxgrad.training.data import Dataset
from onnxgrad.training.fields import Fields
from onnxgrad.training.judges import ByOutput, Judge, judges
from onnxgrad.training.modes import inference_form
from onnxgrad.training.objective import Objective, Plan, build_objective
from onnxgrad.training.progress import Totals
from onnxgrad.training.recipe import Facts, Recipe
from onnxgrad.training.settings import Settings

Arrays = Mapping[str, np.ndarray]
SIZE = 256  # rows of one call of the runtime
Results = tuple[dict[str, np.ndarray], list[np.ndarray]]  # data, and outputs


class Evaluator:
    """Evaluates a model in its inference form; weights and running statistics are inputs.

    Args:
        proto: the model, in its inference form.
        names: names of its weights and statistics that are passed to every call.
        plan: the loss.
        weighted: whether there may be sample weights.
        device: where to run.
        batch_axes: as those of a `Trainer`.
    """

    def __init__(
        self,
        proto: ModelProto,
        names: Sequence[str],
        plan: Plan,
        weighted: bool,
        device: Any,
        batch_axes: Mapping[str, int | None],
    ) -> None:
        self.proto, self.names, self.plan = proto, list(names), plan
        self.weighted, self.device, self.batch_axes = weighted, Device.of(device), batch_axes
        self.shown: str | None = None  # the title of a progress bar
        self.failed: Batch | None = None  # the first one whose loss is not finite
        self._sessions: dict[str, ort.InferenceSession] = {}  # shared by copies

    def with_names(self, names: Names) -> Self:
        """Return a copy for one call, of which columns of tables have these names."""
        new = copy.copy(self)
        new.fields, new.failed = copy.copy(self.fields), None
        new.fields.names = names
        return new

    def objective(self) -> Objective:
        """Return the objective, without dropout and with the stored statistics."""
        return build_objective(self.proto, self.names, self.plan, self.weighted, training=False)

    @cached_property
    def described(self) -> Objective:
        """An objective of which only the description is used."""
        return self.objective()

    @cached_property
    def fields(self) -> Fields:
        """The inputs of data."""
        return Fields(self.described, self.batch_axes)

    @property
    def _losses(self) -> ort.InferenceSession:
        if "losses" not in self._sessions:
            one = self.objective()
            multiply_adds = work(one.model.graph)
            values = [*one.reported, *one.predictions.values(), *one.states.values()]
            built = session(one.compute(*values), self.device, multiply_adds * 32)
            self._sessions["losses"] = built
        return self._sessions["losses"]

    @property
    def _predictions(self) -> ort.InferenceSession:
        if "predictions" not in self._sessions:
            one = self.objective()
            multiply_adds, graph = work(one.model.graph), one.model.graph
            graph.outputs[:] = [*one.predictions.values(), *one.states.values()]
            tidy(one.model)
            graph.inputs[:] = [x for x in graph.inputs if x.uses() or x in graph.outputs]
            built = session(to_proto(one.model), self.device, multiply_adds * 32)
            self._sessions["predictions"] = built
        return self._sessions["predictions"]

    @escaping()
    def evaluate(
        self,
        values: Arrays,
        source: BatchSource,
        metrics: ByOutput | None = None,
        group: Group | None = None,
    ) -> dict[str, Any]:
        """Return `loss`, and the metrics by name, for the data of a source.

        The processes of a `group` compute the predictions of a part of the rows each, and send them
        to all others.
        """
        one = self.described
        parts = len(one.written.sums)
        totals = Totals.of(tuple(one.written.factors), {})
        judging = self._judges(metrics or {})
        self.failed = None
        batches = self._results(self._losses, values, source, parts)
        for arrays, results in batches if group is None else self._of_all(batches, group):
            numbers = [np.asarray(y, np.float64).reshape(1, 1) for y in results[: 2 * parts]]
            totals.add(np.hstack(numbers[:parts]), np.hstack(numbers[parts:]), 0)
            finite = bool(np.isfinite(totals.sums).all())
            self._judge(judging, arrays, results[2 * parts :], finite)
        everything = {"loss": totals.mean}
        for judge in judging:
            everything |= judge.results()
        return everything

    @escaping()
    def check_metrics(self, values: Arrays, source: BatchSource, metrics: ByOutput) -> None:
        """Raise `ValueError` for metrics that do not fit the first batch of a source.

        A source that is not in memory is not read: of it, they see what the predictions are.
        """
        if not any(metrics.values()):
            return
        one, judging = self.described, self._judges(metrics)
        if source.in_memory:
            with closing(self._results(self._losses, values, source)) as results:
                arrays, outputs = next(results)
            parts = len(one.written.sums)
            finite = all(np.isfinite(y).all() for y in outputs[:parts])
            self._judge(judging, arrays, outputs[2 * parts :], finite)
            return
        for judge in judging:
            info, axis = judge.info, 1 if judge.info.axis is None else judge.info.axis
            shape = dims(one.predictions[str(info.prediction)])
            if shape and (info.classes is None or isinstance(shape[axis], int)):
                judge.begin(np.empty([d if isinstance(d, int) else 0 for d in shape]))

    def _judges(self, metrics: ByOutput) -> list[Judge]:
        return judges(self.described.labels, metrics, self.row_axes)

    def _judge(
        self, judging: list[Judge], arrays: Arrays, outputs: list[np.ndarray], finite: bool
    ) -> None:
        """Let metrics take a batch."""
        one = self.described
        predictions = dict(zip(one.predictions, outputs, strict=False))
        weight = None if one.row_weight is None else arrays.get(one.row_weight)
        if weight is not None and (weight == 1).all():
            weight = None  # as of batches that have none, for metrics that take none
        for judge in judging:
            judge.update(predictions, arrays, weight, finite)

    def _of_all(self, batches: Iterator[Results], group: Group) -> Iterator[Results]:
        """Yield the batches of all processes: the labels and weights, and the outputs."""
        one = self.described
        for arrays, results in batches:
            named = {n: a for n, a in arrays.items() if n in one.labels or n == one.row_weight}
            yield from (b for b in group.gather((named, results) if arrays else None) if b)

    def cause(self, values: Arrays) -> str:
        """Return a clause that says why the loss is not finite, of one model in a stack."""
        one, loss = self.described, self.plan.loss
        outputs = [self.plan.loss_output] if loss is None else list(one.predictions)
        file = constants.replace(self.proto, {name: values[name] for name in self.names})

        def losses() -> ModelProto:
            new = Evaluator.objective(self)  # of one, in a stack
            return new.compute(*new.reported)

        return cause_in_evaluation(file, outputs, losses, values, self.failed)

    @escaping()
    def examine(
        self, values: Arrays, source: BatchSource
    ) -> Iterator[tuple[Arrays, dict[str, np.ndarray]]]:
        """Yield the data of every batch, and the predictions for it by output."""
        one = self.described
        first = 2 * len(one.written.sums)
        for arrays, results in self._results(self._losses, values, source):
            yield arrays, dict(zip(one.predictions, results[first:], strict=False))

    @escaping()
    def row_loss(self, values: Arrays, arrays: Arrays, row: int) -> float:
        """Return the loss of one row of a batch alone; NaN if no term of it counts."""
        names, axes = [x.name for x in self._losses.get_inputs()], self.fields.axes(arrays)
        fed = {n: rows_of(a, axes[n], slice(row, row + 1)) for n, a in arrays.items()}
        fed = {**values, **{n: np.ascontiguousarray(a) for n, a in fed.items()}}
        parts = len(self.described.written.sums)
        results = self._losses.run(None, {name: fed[name] for name in names})[: 2 * parts]
        numbers = [np.asarray(y, np.float64).reshape(1, 1) for y in results]
        totals = Totals.of(tuple(self.described.written.factors), {})
        totals.add(np.hstack(numbers[:parts]), np.hstack(numbers[parts:]), 1)
        return totals.mean

    @escaping()
    def predict(self, values: Arrays, source: BatchSource) -> dict[str, np.ndarray]:
        """Return the predictions for the data of a source, by output."""
        parts = [results for _, results in self._results(self._predictions, values, source)]
        predictions = {}
        for i, name in enumerate(self.described.predictions):
            every = [np.atleast_1d(part[i]) for part in parts]
            predictions[name] = np.concatenate(every, self.row_axis(name))
        return predictions

    def row_axis(self, output: str, label: str | None = None) -> int:
        """Return the axis of the rows of an output; that of its label if none is declared."""
        axes = self.fields.row_axes
        shape = dims(self.described.predictions[output]) or ()
        if axes.symbol in shape:
            return shape.index(axes.symbol)
        return 0 if label is None else axes.stated(label) or 0

    def row_axes(self, output: str, label: str) -> tuple[int, int]:
        """Return the axes of the rows of an output and of its label."""
        return self.row_axis(output, label), self.fields.row_axes.stated(label) or 0

    def _results(
        self, running: ort.InferenceSession, values: Arrays, source: BatchSource, parts: int = 0
    ) -> Generator[Results, None, None]:
        """Yield every batch and the outputs for it; states go from batch to batch.

        A batch whose rows do not count is empty. The first `parts` outputs are losses: the first
        batch in which they are not finite is noted.
        """
        names = [x.name for x in running.get_inputs()]
        carried: dict[str, np.ndarray] = {}
        states = list(self.described.states)
        for number, piece in enumerate(self._watched(source)):
            arrays = {name: np.asarray(array[0]) for name, array in piece.arrays.items()}
            fed = {**values, **arrays, **carried}
            results = running.run(None, {name: fed[name] for name in names})
            if self.failed is None and not all(np.isfinite(y).all() for y in results[:parts]):
                (self.failed,) = piece.each(number)
            carried = dict(zip(states, results[len(results) - len(states) :], strict=True))
            yield arrays if piece.counted else {}, results

    def _watched(self, source: BatchSource) -> Iterator[Slice]:
        """Yield the batches one by one, with a progress bar on a terminal if one is asked for."""
        slices = source.epoch(None, 0, lambda batch: 1)
        if self.shown is None:
            yield from slices
            return
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        if not console.is_terminal:
            yield from slices
            return
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(self.shown, total=source.rows)
            for piece in slices:
                yield piece
                bar.advance(task, piece.rows)


def check_weights(recipe: Recipe, data: Dataset, objective: Objective, fields: Fields) -> None:
    """Raise `ValueError` for weights that are unknown, or of rows that are not first."""
    if isinstance(recipe.trainer.class_weight, str) and recipe.facts.balanced is None:
        raise ValueError(
            f"{argument('class_weight', 'balanced')} is computed from the labels of fit: call it "
            "first, or pass the weights of the classes"
        )
    symbol = fields.row_axes.symbol
    for name, prediction in objective.predictions.items():
        shape = dims(prediction) or ()
        if (
            data.sample_weight is not None
            and recipe.facts.weight_axes == 1
            and symbol in shape[1:]
            and shape[0] != symbol
        ):
            raise ValueError(
                f"{named('sample_weight')}: the rows of the output {name!r}, {shape}, are not on "
                "its first axis: pass a weight for each label, in its shape, or batch_axes"
            )


def evaluator_of(
    recipe: Recipe,
    names: Names,
    buffers: Collection[str] = (),
    kind: Callable[..., Evaluator] = Evaluator,
) -> Evaluator:
    """Return what evaluates the model of a recipe, for any weights.

    A trainer keeps it while the recipe stays the same, and a copy has the names of the columns.

    Args:
        recipe: that of a trainer.
        names: those of the columns of tables.
        buffers: names of statistics that train, and are not in the state yet.
        kind: builds it, from the arguments of `Evaluator`.
    """
    trainer = recipe.trainer
    changing = frozenset({*trainer.state.weights, *trainer.state.buffers, *buffers})

    def build() -> Evaluator:
        proto = inference_form(trainer.proto)
        read = sorted({ref.name for ref in constants.constant_refs(proto)} & changing)
        weighted = recipe.weighted
        return kind(proto, read, recipe.plan, weighted, trainer.device, trainer.batch_axes)

    key = "labelled" if recipe.facts.labels else "unlabelled"
    kept = trainer.built.get(f"evaluator, {key}", lambda: (recipe.key, changing), build)
    return kept.with_names(names)


def evaluate(
    trainer: Settings, data: Dataset, batch_size: int | None, shown: str | None = None
) -> dict[str, Any]:
    """Return the loss and the metrics of data.

    Args:
        trainer: the trainer, or others with its arguments and a state.
        data: the data.
        batch_size: rows of one call of the runtime; None: those of a static batch, or 256.
        shown: the title of a progress bar; None for none.
    """
    recipe = Recipe(trainer, Facts.of(trainer, data))
    evaluator, values = evaluator_of(recipe, trainer.names.copy()), trainer.evaluated()
    evaluator.shown = shown
    check_weights(recipe, data, evaluator.described, evaluator.fields)
    source = data.source(evaluator.fields, batch_size or evaluator.fields.fixed_rows or SIZE)
    results = evaluator.evaluate(values, source, trainer.metrics_by_output)
    if not np.isfinite(results["loss"]):
        cause = evaluator.cause(values)
        warnings.warn(f"the loss is {results['loss']}: {cause}", stacklevel=3)
    return results


def predict(
    trainer: Settings, data: Dataset, batch_size: int | None, shown: str | None = None
) -> dict[str, np.ndarray]:
    """Return the predictions for data, by output; arguments are those of `evaluate`."""
    recipe = Recipe(trainer, Facts.of(trainer, data))
    evaluator = evaluator_of(recipe, trainer.names.copy())
    evaluator.shown, fields = shown, evaluator.fields.without_labels()
    source = data.source(fields, batch_size or fields.fixed_rows or SIZE)
    return evaluator.predict(trainer.evaluated(), source)
