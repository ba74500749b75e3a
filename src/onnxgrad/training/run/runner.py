"""`Runner`, which runs the steps of a training, and the choice of how a step runs."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

import numpy as np
import onnxruntime as ort

from onnxgrad.autodiff.row_proofs import assumed_lengths
from onnxgrad.errors import argument, named
from onnxgrad.graph.tidy import take_apart, take_apart_after
from onnxgrad.model.external import forget_lazy_data
from onnxgrad.native import Target
from onnxgrad.parallel.collectives import is_exchange
from onnxgrad.parallel.process_groups import Group, SingleProcess
from onnxgrad.reporting import frames_inside
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.huge_pages import HugePages
from onnxgrad.runtime.session import (
    WORK_PER_THREAD,
    count_multiply_adds as multiply_adds,
    thread_count,
)
from onnxgrad.runtime.values import array_of
from onnxgrad.training.batches import ArraySource, BatchSource
from onnxgrad.training.fields import DataSpec
from onnxgrad.training.objective import Objective
from onnxgrad.training.recipe import Recipe
from onnxgrad.training.run.row_parts import (
    Footprint,
    has_loss_in_blocks,
    is_sum_over_rows,
    measure_footprint,
    micro_batch_effect,
    mixes_rows,
)
from onnxgrad.training.run.sessions import OneSession
from onnxgrad.training.run.stages import Stages
from onnxgrad.training.run.states import InPlaceStates, ReplacedStates
from onnxgrad.training.state import Arrays, Slots, StateValues
from onnxgrad.training.step.build import Step
from onnxgrad.training.step.gradients import StepShare
from onnxgrad.training.step.inputs import WHOLE, BatchSlice, RuntimeCall
from onnxgrad.training.step.weight_groups import most_block_bytes, numpy_dtype

SECONDS_PER_CALL = 0.2  # callbacks and Ctrl-C wait for the end of a call
_FEW = 8  # rows of a batch so small that unknown shapes are not inferred

# the losses of batches: the loss of part k is sums[:, k] / counts[:, k]; of a stack, both have a
# last axis of members
Losses = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class DeviceStates:
    """Weights, slots and buffers on the device, and the count of steps that have changed them.

    - `states`: the weights, slots and buffers; None for a buffer that the first batch sets.
    - `frozen`: the members of a stack that keep their states, and the counts of their steps.
    - `slots`: the slots of all weights, once processes have collected them; otherwise None.
    """

    states: Sequence[ort.OrtValue | None]
    steps: int
    frozen: Mapping[int, int] = field(default_factory=dict)
    slots: Slots | None = None


class Runner:
    """Runs a training step on batches, and keeps weights and slots on the device between calls.

    One model is a stack without the axis of members, so that `member_shape` is ().

    Args:
        step: the step, whose graph is taken over. It runs in pieces if it has nodes that exchange
            values between processes.
        target: the device of the sessions, and the work and rows of a batch.
        work: multiply-adds of the rows that this process computes at once.
        carried: the data inputs with the first values of buffers, by the names of the buffers.
        group: the processes that share the step; None: this process computes the whole step.
        part_rows: the most rows to compute at once, if one process runs the step; None: all.
    """

    def __init__(
        self,
        step: Step,
        target: Target,
        work: float,
        carried: Mapping[str, str] | None = None,
        group: Group | None = None,
        part_rows: int | None = None,
    ) -> None:
        self.step, self.device, self.group = step, target.device.check(), group or SingleProcess()
        # before sessions, whose memory is copied; steps on one thread would gain nothing
        several = self.device == CPU and thread_count(work) > 1
        self._huge_pages = HugePages() if several else None
        self.compute: OneSession | Stages
        if any(map(is_exchange, step.model.graph)):
            self.compute = Stages(step, target, work, self.group, part_rows)
        else:
            self.compute = OneSession(step, target, work)
        self.in_place, self.carried = step.updates is not None, carried or {}
        self.states: ReplacedStates | InPlaceStates
        if self.in_place:
            self.states = InPlaceStates(step, work, self.group)
        else:
            self.states = ReplacedStates(step, self.device)
        self.member_shape = () if step.members is None else (len(step.members.optimizers),)
        self.members = prod(self.member_shape)
        self.now = DeviceStates([], 0)
        # members frozen for NaN, and the counts of their steps
        self.not_finite: dict[int, int] = {}
        self._fine: Any = np.ones(self.member_shape, bool)  # whether members have no NaN
        self.seconds_per_batch = SECONDS_PER_CALL
        self.last_batches = 1  # the count of batches of the last call
        self.norms: dict[str, Any] = {}  # the norms of gradients in the last step, by weight

    @property
    def has_other_processes(self) -> bool:
        """Whether other processes run parts of the batches."""
        return self.group.size > 1

    # -- steps --------------------------------------------------------------------------------

    def batches_of_next_call(self) -> int:
        """Return how many batches the next call may run: 1 if processes share the batches."""
        if self.in_place or self.has_other_processes:
            return 1
        return max(1, min(8 * self.last_batches, int(SECONDS_PER_CALL / self.seconds_per_batch)))

    def run(self, call: RuntimeCall) -> Losses | None:
        """Train on the batches of a call, and return their losses.

        None, with unchanged states, if the loss or a weight is not finite. A member of a stack that
        is not finite is frozen in its state before that step, and does not change the steps of
        other members: its losses are NaN, and None says that all members are frozen.

        Raises:
            StepRefused: a process has passed requests to `send_requests`; the states are unchanged.
        """
        if len(self.now.frozen) == self.members:
            return None
        losses = self._run_call(call)
        if losses is None and self.member_shape:  # find the member and the step
            losses = self._run_batches_singly(call)
        if losses is not None:
            for k in self.now.frozen:
                losses[0][..., k] = np.nan
        return losses

    def _run_call(self, call: RuntimeCall) -> Losses | None:
        """Run the batches of a call at once, and return their losses.

        None, with unchanged states, if a number is not finite, of a member that is not frozen.
        """
        start, call = time.perf_counter(), self.complete_call(call)
        piece, now, values = call.piece, self.now, self.state_values(call.piece)
        read = {(n := str(v.name)): values[n] for v in self.step.carried}
        fed = self.step.input_arrays(call)
        new, reported = self.compute.run(read, fed, piece, self.states.output_array)
        losses = self._read_losses(reported, piece.batches)
        self._fine = np.isfinite(losses[0]).all(axis=(0, 1))
        self._fine = self._fine & self.states.are_finite(new, call, now.states)
        for k in now.frozen:
            self._fine[k] = True  # a frozen member keeps its state
        bad = not self._fine.all()
        # processes must agree only where each updates some of the weights
        if any(self.any_requests([bad])) if self.step.owners else bad:
            return None
        if self._huge_pages is not None:  # an interrupt of the copies leaves the states unchanged
            self._huge_pages.after_run(time.perf_counter() - start)
        kept = self.states.next_states(new, call, now.states, now.frozen)
        # in one assignment, which cannot be interrupted
        self.now = replace(now, states=kept, steps=now.steps + piece.batches, slots=None)
        self.last_batches = piece.batches
        self.seconds_per_batch = (time.perf_counter() - start) / piece.batches
        return losses

    def _run_batches_singly(self, call: RuntimeCall) -> Losses | None:
        """Run the batches of a call one by one, and freeze members that are not finite.

        None if all members are frozen.
        """
        results = []
        for i in range(call.piece.batches):
            while (losses := self._run_call(call.batches_from(i, 1))) is None:
                self.freeze_members(np.flatnonzero(~self._fine).tolist(), not_finite=True)
                if len(self.now.frozen) == self.members:
                    return None
            results.append(losses)
        sums, counts = zip(*results, strict=True)
        return np.concatenate(sums), np.concatenate(counts)

    def complete_call(self, call: RuntimeCall) -> RuntimeCall:
        """Return `call` with the count of steps so far, and the count of micro-batches of a batch.

        Raises:
            ValueError: a learning rate that is zero in the dtype of a weight.
        """
        step, rates, rows, count = self.step, call.rates, call.piece.own, None
        for dtype in {numpy_dtype(group.state) for group in step.groups}:
            if (lost := rates[(rates.astype(dtype) == 0) & (rates != 0)]).size:
                raise ValueError(
                    f"the learning rate {lost[0]:g} is zero in {dtype}, the dtype of weights: pass "
                    f"a larger {named('learning_rate')}, or {argument('precision', 'auto')}"
                )
        if step.accumulate > 1:
            count = micro_batches(rows, step.accumulate, bool(step.buffers))
        if step.fixed_rows is not None:
            count, rest = divmod(rows, step.fixed_rows)
            if rest:
                raise ValueError(
                    f"the model takes {step.fixed_rows} rows at once, and a batch, or the part of "
                    f"it in this process, has {rows} rows: pass a {named('batch_size')} so that "
                    f"each has a multiple of {step.fixed_rows}"
                )
        return replace(call, done=self.now.steps, micro_batches=count)

    def state_values(self, piece: BatchSlice) -> dict[str, ort.OrtValue]:
        """Return weights, slots and buffers by input name, with zeros for buffers without a value.

        A buffer has no value before the first batch if its first value is in the data, as in
        `piece`, which has its shape.
        """
        names = [str(v.name) for v in (*self.step.states, *self.step.buffers)]
        values = {}
        for name, state in zip(names, self.now.states, strict=True):
            if state is None:
                first = piece.model_arrays()[self.carried[name]]
                zeros = np.zeros((*self.member_shape, *first.shape[1:]), first.dtype)
                state = self.device.ortvalue(zeros)
            values[name] = state
        return values

    def _read_losses(self, reported: list[np.ndarray], batches: int) -> Losses:
        """Return the losses from the reports of a step, and remember the norms of gradients."""
        if self.step.norms:
            *reported, norms = reported  # (batches, members, weights), or without members
            last = norms[-1].T if self.member_shape else norms[-1].tolist()
            self.norms = dict(zip(self.step.norms, last, strict=True))
        shape = batches, *self.member_shape
        each = batches, *(-1 for _ in self.member_shape)
        columns = [np.broadcast_to(y.astype(np.float64).reshape(each), shape) for y in reported]
        half = len(columns) // 2
        return np.stack(columns[:half], axis=1), np.stack(columns[half:], axis=1)

    # -- states -------------------------------------------------------------------------------

    def load(self, values: StateValues, owned: bool = False) -> None:
        """Copy weights, slots and buffers to the device; a missing slot gets its initial value.

        States may share the memory of `values`, unless steps update them in place. With `owned`,
        steps may do so, as no other object refers to the arrays.
        """
        if self.in_place:
            # frees the old states before new states are allocated
            self.now = DeviceStates([], values.steps)
        arrays: list[np.ndarray | None] = []
        for group in self.step.groups:
            arrays += group.initial(values.weights, values.slots, self.in_place and not owned)
        arrays += (values.buffers.get(str(b.name)) for b in self.step.buffers)
        states = [None if array is None else self.device.ortvalue(array) for array in arrays]
        self.now = DeviceStates(states, values.steps, dict(values.frozen))
        self.not_finite = {k: n for k, n in self.not_finite.items() if k in values.frozen}

    @property
    def unpacks_cheaply(self) -> bool:
        """Whether `unpacked` is cheap enough to read the states again instead of keeping a copy.

        It copies the arrays of a stack, and arrays of other devices.
        """
        return self.device.memory == CPU.memory and not self.member_shape

    def unpacked(self, now: DeviceStates, copies: bool = True) -> StateValues:
        """Return the values of weights, slots and buffers by name, for the states `now`.

        The value of a weight that is a group by itself shares the memory of the state, unless steps
        update states in place. Without `copies`, all values may share the memory of states.
        """
        weights: Arrays = {}
        slots: Slots = {}
        arrays: list[Any] = [None if state is None else array_of(state) for state in now.states]
        for group in self.step.groups:
            own, arrays = arrays[: len(group.inputs)], arrays[len(group.inputs) :]
            own_copies = copies and (self.in_place or len(group.shapes) > 1)
            own_weights, own_slots = group.split(own, own_copies)
            weights |= own_weights
            slots |= own_slots
        if now.slots is not None:
            slots |= {name: dict(own) for name, own in now.slots.items()}
        pairs = zip(self.step.buffers, arrays, strict=True)
        buffers = {str(b.name): np.array(a) for b, a in pairs if a is not None}
        return StateValues(weights, slots, now.steps, buffers, dict(now.frozen))

    def freeze_members(self, ids: Sequence[int], not_finite: bool = False) -> None:
        """Let the members `ids` of a stack keep their states from now on.

        `not_finite`: whether they are frozen because a number is not finite.

        Raises:
            ValueError: the runner trains one model.
        """
        if not self.member_shape:
            raise ValueError(
                f"control.freeze names the members {ids} of a stack, and a Trainer has one model: "
                "set control.stop to end its training"
            )
        new = dict.fromkeys((k for k in ids if k not in self.now.frozen), self.now.steps)
        self.now = replace(self.now, frozen={**self.now.frozen, **new})
        self.not_finite |= new if not_finite else {}

    # -- what processes have in common --------------------------------------------------------

    def any_requests(self, requests: Sequence[bool]) -> list[bool]:
        """Return for each request, such as to stop, whether some process of the group has it."""
        counts = np.array(requests, np.float32)
        self.group.sum(counts)()
        return [bool(count > 0) for count in counts]

    def send_requests(self, requests: Sequence[bool]) -> bool:
        """Let the next step exchange requests of processes; return whether the step can do so."""
        compute = self.compute if self.has_other_processes else None
        return isinstance(compute, Stages) and compute.send_requests(requests)

    @property
    def has_all_slots(self) -> bool:
        """Whether this process has the slots of all weights."""
        return not self.step.owners or self.now.slots is not None

    def collect_slots(self) -> None:
        """Collect in every process the slots of weights that other processes update."""
        if self.has_all_slots:
            return
        own: Slots = {n: s for n, s in self.unpacked(self.now).slots.items() if s}
        every = self.group.gather(own)
        # a new object, so that values which were read before are read again, with these slots
        self.now = replace(self.now, slots={n: s for own in every for n, s in own.items()})


class StepCache:
    """The objective and the training step of a recipe, with the runner for the last batches.

    A job keeps this object from call to call, while the `step_key` of the recipe is the same.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.objective = objective = self._new_objective(recipe)
        members = recipe.job.members or 1
        self.work = multiply_adds(objective.model.graph) * members  # per row
        data, weights = ([str(x.name) for x in o] for o in (objective.data, objective.weights))
        self._footprint: Footprint | None = Footprint(objective.model.graph, data, weights)
        self.step: Step | None = None
        # whether the loss of a batch is the sum of the losses of its micro-batches
        self.adds_losses = False
        self.running: Runner | None = None
        self._runner_key: Any = None  # the facts of batches on which the runner depends

    @staticmethod
    def _new_objective(recipe: Recipe) -> Objective:
        """Return the objective of a recipe, whose graph is in memory as long as the objective."""
        objective = recipe.objective()
        take_apart_after(objective, objective.model.graph)
        return objective

    def runner(self, recipe: Recipe, source: BatchSource, fields: DataSpec, fixed: bool) -> Runner:
        """Return the runner for the batches of `source`.

        `fixed`: whether later calls have batches of this size, too.
        """
        job, shared, rows = recipe.job, recipe.sharing, source.batch_size
        work = self.work * rows * job.accumulate / (1 if shared is None else shared.part.size)
        taken = fields.fixed_rows if fields.accumulates else None
        if source.cuts and rows == taken and job.accumulate == 1:
            taken = None  # the model takes all rows of a batch
        most = self._rows_at_once(recipe, source, taken)
        key = thread_count(work), work >= WORK_PER_THREAD, most
        lacks = self.step is not None and taken is not None and self.step.fixed_rows is None
        if self.running is None or lacks or (fixed and self._runner_key != key):
            if self.step is not None:  # it has taken the graph of the objective
                self.objective = self._new_objective(recipe)
            self.adds_losses = self._losses_add_up(recipe, source, taken)
            self.running = self._step_runner(recipe, source, taken, work, most)
            self._runner_key = key
        self.running.compute.expect_source(
            source if fixed and isinstance(source, ArraySource) else None
        )
        return self.running

    def _step_runner(
        self, recipe: Recipe, source: BatchSource, taken: int | None, work: float, most: int | None
    ) -> Runner:
        """Build the training step, and return the runner that runs it.

        Args:
            recipe: the job, and facts of its data.
            source: the batches.
            taken: the count of rows of a batch that the model takes at once; None: all.
            work: multiply-adds of the rows of this process.
            most: the most rows to compute at once, if gradients of parts are proven to add up;
                None: all.
        """
        objective, shared, rows = self.objective, recipe.sharing, source.batch_size
        across = group = None
        if shared is not None:
            shared.warn_of_mixed_rows(objective, source)
            rows //= shared.part.size
            across, group = shared.across, shared.group
        if isinstance(source, ArraySource) and most is not None:
            proven = is_sum_over_rows(objective, source.axes_of_rows, source.batch_shapes())
            most = most if proven else None
        if most is not None:
            work, rows, across = work * most / rows, most, StepShare(WHOLE)
        if recipe.job.device.copies_tensors and across is None and recipe.members is None:
            across = StepShare(WHOLE)  # the device computes gradients, and the CPU updates
        self.step = recipe.step(
            objective,
            across=across,
            members=recipe.members,
            fixed_rows=taken,
            rows=rows,
            block_bytes=most_block_bytes(thread_count(work)),
            adds_losses=self.adds_losses,
        )
        target = Target.for_step(recipe.job.device, work, rows)
        runner = Runner(self.step, target, work, objective.carried_inputs, group, most)
        take_apart(self.step.model.graph)
        forget_lazy_data(objective.weights)
        return runner

    def _losses_add_up(self, recipe: Recipe, source: BatchSource, taken: int | None) -> bool:
        """Return whether the loss of a batch is the sum of the losses of its micro-batches.

        Otherwise, it is their mean. Warn if neither is proven, for the argument `accumulate`.
        """
        parts, objective = recipe.job.accumulate, self.objective
        if parts == 1 and taken is None:
            return False
        effect, reason = effect_of_parts(recipe, objective, source)
        if self.objective.buffers:
            reason = "BatchNormalization normalizes by the statistics of a batch"
        if reason and taken is None:
            warnings.warn(
                f"{argument('accumulate', parts)} trains another model than whole batches may do: "
                f"{reason}. Each micro-batch is computed alone, and the gradients are averaged. To "
                f"save memory in another way, pass a smaller {named('batch_size')} or "
                f"{argument('recompute', 'all')}",
                stacklevel=frames_inside() + 1,
            )
        return effect == "sum"

    def _rows_at_once(self, recipe: Recipe, source: BatchSource, taken: int | None) -> int | None:
        """Return how many rows of a batch to compute at once at most, if gradients of parts add up.

        None: all rows, as where something else divides a batch, or needs all of its rows.
        """
        job = recipe.job
        whole = recipe.sharing is not None or job.members is not None or job.accumulate > 1
        whole |= job.device.kind != "cpu" or taken is not None
        whole |= has_loss_in_blocks(self.objective)
        if whole or not isinstance(source, ArraySource):
            return None
        shapes, rows = source.batch_shapes(), source.batch_size
        if self._footprint is not None and self._footprint.unknown and rows > _FEW:
            objective = self.objective if self.step is None else recipe.objective()
            self._footprint = measure_footprint(objective, source.axes_of_rows, shapes)
        most = None if self._footprint is None else self._footprint.part_rows(shapes, rows)
        return most if most is not None and most < source.rows else None


def effect_of_parts(
    recipe: Recipe, objective: Objective, source: BatchSource
) -> tuple[Literal["sum", "mean"], str]:
    """Return whether losses of parts of the rows of `source` add up to the loss of all rows.

    The result is as of `micro_batch_effect`; `objective` is the objective of the recipe.
    """
    if recipe.job.dropout or mixes_rows(objective):
        objective = recipe.objective(training=False)
    if isinstance(source, ArraySource):
        axes, lengths = source.axes_of_rows, source.batch_shapes()
    else:
        stated = DataSpec(objective, recipe.job.batch_axes).row_axes.declared_axis
        lengths = assumed_lengths(objective.data)
        axes = {name: stated(name) for name in lengths}
    return micro_batch_effect(objective, axes, lengths)


def micro_batches(rows: int, parts: int, statistics: bool = False) -> int:
    """Return the count of equal micro-batches of a batch of `rows` rows, at least `parts`.

    If a step computes `statistics` of each micro-batch, which a single row lacks, the batch is not
    cut into single rows, as a prime count of rows would be.
    """
    largest = -(-rows // parts)
    count = next(n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= largest)
    return 1 if statistics and count == rows != parts else count
