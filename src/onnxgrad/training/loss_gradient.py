"""`LossGradient`: the loss of all rows and its gradient, for optimizers outside of a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np

from onnxgrad.errors import escaping
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import tidy
from onnxgrad.model.convert import to_proto_and_free
from onnxgrad.native import Target
from onnxgrad.parallel.process_groups import Group
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.runtime.session import count_multiply_adds, session, thread_count
from onnxgrad.training.batches import ArraySource, BatchSource
from onnxgrad.training.diagnose import NO_TERM
from onnxgrad.training.recipe import Recipe
from onnxgrad.training.run.row_parts import has_loss_in_blocks, measure_footprint
from onnxgrad.training.run.runner import effect_of_parts
from onnxgrad.training.state import Arrays, LossTotals, StateValues
from onnxgrad.training.step.gradients import (
    INITIAL,
    LEAST_SCALE,
    SCALE,
    build_gradients,
    copy_repeated,
)
from onnxgrad.training.step.inputs import Batch, BatchSlice, RuntimeCall, feed_inputs, feed_of

ALL_ROWS = 1 << 62  # a batch size that no data exceed


class LossGradient:
    """The loss of all rows and its gradient w.r.t. the weights, summed over batches.

    With the sum S_kb and the count C_kb of the terms of output k in batch b, the loss is
    sum_k factor_k (sum_b S_kb) / (sum_b C_kb), however the rows are cut into batches. A job keeps
    this object from call to call, while the `step_key` of the recipe is the same.

    Args:
        recipe: what the step of a trainer computes.

    Attributes:
        objective: the model and its loss, as in a step of training.
    """

    def __init__(self, recipe: Recipe) -> None:
        # a session computes another objective of the recipe
        self.objective = recipe.objective().kept_as_description()
        self._members = recipe.job.members
        self._work = count_multiply_adds(self.objective.model.graph) * (self._members or 1)
        self._scale = float(INITIAL[SCALE]) if self.objective.scales_loss else 1.0
        self._cut: tuple[Any, int | None] | None = None  # the shapes of all rows, rows of a call
        self._adds: dict[type, bool] = {}  # results of `_losses_add_up`
        self._counting: Predictor | None = None
        self._running: tuple[int, Predictor] | None = None  # with its count of threads
        self._reached: list[str] = []  # weights with a gradient, in the order of its outputs
        self._inverses: list[str] = []  # its inputs for the factors of the sums of losses

    def cut_large_arrays(self, source: BatchSource) -> BatchSource:
        """Return `source` in batches that need little memory, if their gradients add up.

        Otherwise, the rows of arrays stay one batch.
        """
        if not isinstance(source, ArraySource) or has_loss_in_blocks(self.objective):
            return source
        shapes, rows = source.batch_shapes(), source.batch_size
        if self._cut is None or self._cut[0] != shapes:
            footprint = measure_footprint(self.objective, source.axes_of_rows, shapes)
            self._cut = shapes, None if footprint is None else footprint.part_rows(shapes, rows)
        if (most := self._cut[1]) is None:
            return source
        return ArraySource(source.arrays, source.whole, source.row_axes, most)

    @escaping()
    def loss_and_gradients(
        self,
        recipe: Recipe,
        values: StateValues,
        source: BatchSource,
        group: Group,
        find_misfit: Callable[[Batch], str | None],
    ) -> tuple[Any, Arrays]:
        """Return the loss, a float, and the gradient of each weight by name.

        In a stack, the loss is an array (members,), and gradients have the axis of members first.

        Args:
            recipe: the recipe, with the `step_key` of the recipe of this object.
            values: weights, buffers, and the count of steps, which decides the masks of dropout.
            source: the batches.
            group: the processes that share the batches.
            find_misfit: returns a text that names a label of a batch that does not fit, or None.

        Raises:
            ValueError: no label counts, or a label does not fit its prediction.
        """
        written, running = self.objective.written, self._gradient_session(recipe, source.batch_size)
        adds, terms = self._losses_add_up(recipe, source), None
        if len(written.factors) > 1:  # their gradients have different denominators, needed first
            terms = self._count_terms(recipe, values, source, group)
        totals = LossTotals.from_saved(tuple(written.factors), {}, self._members)
        gradients = {name: np.zeros(w.shape) for name, w in values.weights.items()}
        buffers = dict(values.buffers)
        for number, piece, fed in self._fed_batches(values, source):
            self._begin_carried_states(buffers, piece)
            rows = np.array([piece.own], np.float64)
            try:
                results = self._run_batch(
                    running, fed | buffers, 1 / (rows if terms is None else terms)
                )
            except Exception as e:
                if misfit := next(filter(None, map(find_misfit, piece.each_batch(number))), None):
                    raise ValueError(misfit) from e
                raise
            factor = (1.0 if adds or terms is not None else rows.item()) / self._scale
            for name in self._reached:
                gradients[name] += factor * results.pop(0).astype(np.float64)
            buffers |= {str(b.name): results.pop(0) for b in self.objective.buffers}
            totals.add_reported([results[0] / results[1], results[1]] if adds else results)
        for array in (totals.sums, totals.counts, *gradients.values()):
            group.sum(array)()
        if not totals.counts.all():
            raise ValueError(NO_TERM)
        if adds:
            totals.counts[:] = 1
        count = totals.counts.flat[0] if terms is None else 1.0
        dtypes = {name: w.dtype for name, w in values.weights.items()}
        return totals.mean, {n: (g / count).astype(dtypes[n]) for n, g in gradients.items()}

    def _losses_add_up(self, recipe: Recipe, source: BatchSource) -> bool:
        """Return whether the file computes a loss of each batch that is a sum over its rows."""
        if self.objective.written.batch_loss is None:
            return False
        key = type(source)  # the proof reads the shapes of arrays
        if key not in self._adds:
            self._adds[key] = effect_of_parts(recipe, self.objective, source)[0] == "sum"
        return self._adds[key]

    def _fed_batches(
        self, values: StateValues, source: BatchSource
    ) -> Iterator[tuple[int, BatchSlice, Arrays]]:
        """Yield the index of each batch, the batch, and all arrays but buffers by input name.

        Batches are left out whose rows do not count, as this process has no row of them.
        """
        feeds = feed_inputs(self.objective.model.graph).values()
        with closing(source.epoch(None, 0, lambda batch: 1)) as slices:
            for number, piece in enumerate(slices):
                if not piece.counted:
                    continue
                call = RuntimeCall(piece, np.zeros(1), number, values.steps + number)
                fed = values.weights | {n: a[0] for n, a in piece.model_arrays().items()}
                for value in feeds:
                    if (feed := feed_of(value)) is not None:
                        fed[str(value.name)] = np.asarray(feed.arrays_of_call(call, value.dtype)[0])
                yield number, piece, fed

    def _begin_carried_states(self, buffers: Arrays, piece: BatchSlice) -> None:
        """Add zeros to `buffers` for states whose first values are in the data, as in `piece`."""
        for buffer, name in self.objective.carried_inputs.items():
            if buffer not in buffers:
                first = piece.model_arrays()[name][0]
                shape = first.shape if self._members is None else (self._members, *first.shape)
                buffers[buffer] = np.zeros(shape, first.dtype)

    def _count_terms(
        self, recipe: Recipe, values: StateValues, source: BatchSource, group: Group
    ) -> np.ndarray:
        """Return the count of the terms of each output, summed over all batches."""
        if self._counting is None:
            one = recipe.objective()
            graph = one.model.graph
            graph.outputs[:] = copy_repeated(Emit(graph), one.written.counts)
            tidy(one.model)
            graph.inputs[:] = [x for x in graph.inputs if x.uses()]
            running = session(to_proto_and_free(one.model), recipe.job.device, 0.0)
            self._counting = Predictor(running, fixed_rows=0)
        total = np.zeros(len(self.objective.written.counts))
        for _, _, fed in self._fed_batches(values, source):
            total += [np.ravel(y)[0] for y in self._counting.compute(fed)]
        group.sum(total)()
        if not total.all():
            raise ValueError(NO_TERM)
        return total

    def _gradient_session(self, recipe: Recipe, rows: int) -> Predictor:
        """Return the session that computes gradients, with threads for batches of `rows` rows."""
        threads = thread_count(work := self._work * rows)
        if self._running is None or self._running[0] != threads:
            job, parts = recipe.job, len(self.objective.written.counts)
            target = Target.for_step(job.device, work, rows)
            proto = build_gradients(
                recipe.objective(), target, job.recompute, recipe.members, inverse_counts=True
            )
            inputs, outputs = (
                [v.name for v in vs] for vs in (proto.graph.input, proto.graph.output)
            )
            self._reached = inputs[: len(outputs) - 2 * parts - len(self.objective.buffers)]
            self._inverses = inputs[-parts:]
            running = session(proto, job.device, work, in_order=job.recompute != "none")
            self._running = threads, Predictor(running, fixed_rows=0)
        return self._running[1]

    def _run_batch(self, running: Predictor, fed: Arrays, inverses: np.ndarray) -> list[np.ndarray]:
        """Return the outputs of the session for one batch, whose gradients are times the scale.

        The scale of the loss in mixed precision is halved while a gradient is not finite.
        """
        while True:
            scaled = dict(zip(self._inverses, inverses * self._scale, strict=True))
            results = running.compute(
                fed | {n: np.array(x, running.dtypes[n]) for n, x in scaled.items()}
            )
            gradients, losses = results[: len(self._reached)], results[-2 * len(inverses) :]
            if not self.objective.scales_loss or self._scale <= LEAST_SCALE:
                return results
            if all(np.isfinite(g).all() for g in gradients) or not np.isfinite(losses).all():
                return results
            self._scale /= 2
