"""How the processes of a group share one call of `fit`, which trains one model."""

from __future__ import annotations

import itertools
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from onnxgrad.errors import argument
from onnxgrad.parallel.process_groups import DataParallel, Group, Part, find_process_group
from onnxgrad.reporting import frames_inside
from onnxgrad.training.batches import ArraySource, BatchSource, Budget, Slices
from onnxgrad.training.callbacks.base import Callbacks
from onnxgrad.training.equality import class_and_arguments, describe
from onnxgrad.training.job import Job
from onnxgrad.training.objective import Objective
from onnxgrad.training.run.row_parts import is_sum_over_rows, mixes_rows
from onnxgrad.training.state import TrainState
from onnxgrad.training.step.gradients import StepShare
from onnxgrad.training.step.inputs import BatchSlice

_SHOWN = 80  # characters of a value in a message


class Sharing:
    """The group of processes that train one model, and the options by which they share the work."""

    def __init__(self, group: Group, options: DataParallel) -> None:
        self.group, self.options = group, options
        self.part = Part(group.rank, group.size)

    @property
    def step_key(self) -> Any:
        """The part of a step's cache key that depends on the processes that share the step."""
        return self.part.rank, self.part.size, vars(self.options)

    @property
    def statistics_part(self) -> Part | None:
        """The rank and count of processes whose rows BatchNormalization normalizes together.

        None: it normalizes the rows of each process separately.
        """
        return self.part if self.options.sync_batch_norm else None

    @property
    def across(self) -> StepShare:
        """How processes share a step: the part of this process, and the options of the step."""
        shards = self.options.shard_optimizer and self.part.size > 1
        return StepShare(self.part, self.options.sync_batch_norm, shards)

    def compared_options(self, batch_norm: str) -> dict[str, Any]:
        """Return the options on which the trained weights depend by more than rounding, by name."""
        options, own = self.options, {}
        if batch_norm == "train" and not options.sync_batch_norm and self.part.size > 1:
            own = {"sync_batch_norm": False, "processes": self.part.size}
        return own | ({"shards": True, "processes": self.part.size} if options.shards else {})

    def own_callbacks(self, callbacks: Callbacks) -> Callbacks:
        """Return the callbacks that this process calls: only the first calls those that write."""
        return callbacks if self.part.rank == 0 else callbacks.without_writers()

    def load_in_first(self, load: Callable[[], TrainState]) -> TrainState:
        """Return the state that `load` returns in the first process, in all processes.

        Other processes may not have the files of the state.

        Raises:
            OSError, ValueError: the error of `load` in the first process, in all processes.
        """
        result: Any
        try:
            result = load() if self.part.rank == 0 else None
        except (OSError, ValueError) as e:
            result = e
        result = self.group.gather(result)[0]
        if isinstance(result, Exception):
            raise result
        return result

    def own_source(self, source: BatchSource) -> BatchSource:
        """Return a source that yields what this process computes: batches, or parts of them."""
        if self.options.shards:
            return OwnDataSource(source, self.group)
        if not isinstance(source, ArraySource):
            return SharedDataSource(source, self.group)
        source.part = self.part
        return source

    def check_equal_arguments(self, call: Any, epochs: int, shuffle: bool, resumes: bool) -> None:
        """Raise `ValueError` in all processes if the arguments of a `Fit` differ between them.

        The message names the arguments. Callbacks that write are called in the first process only:
        other processes may lack them.
        """
        job, held_out = call.job, call.held_out
        callbacks, share = job.callbacks, held_out is None or isinstance(held_out, float)
        own = job.compared_fields | {
            "method": "partial_fit" if call.further else "fit",
            "epochs": epochs,
            "shuffle": shuffle,
            "resume": resumes,
            "batch_size": call.batch_size,
            "validation": held_out if share else "data",
            "sample weights": call.recipe.weight_axes,
            "parallel": vars(self.options),
            "callbacks": [class_and_arguments(c) for c in callbacks.all if not c.writes],
            "gradient norms": callbacks.gradient_norms,
            "metrics": {
                str(output): [class_and_arguments(metric) for metric in metrics]
                for output, metrics in job.metrics.items()
            },
        }
        self._require_equal_values(describe(own))

    def refuse_unshared_arguments(self, job: Job, balanced: bool) -> None:
        """Raise `ValueError` for an argument that needs all rows in one process.

        `balanced`: whether weights of classes are computed from the labels.
        """
        if job.carry:
            raise ValueError(
                "carry keeps a state of every row, and processes share the rows: pass "
                "parallel=False, or train in one process"
            )
        if self.options.sync_batch_norm and (job.accumulate > 1 or job.recompute != "none"):
            raise ValueError(
                "sync_batch_norm exchanges statistics within a forward pass, which accumulate and "
                "recompute repeat: leave out accumulate and recompute, or sync_batch_norm"
            )
        if self.options.shards and balanced:
            raise ValueError(
                f"{argument('class_weight', 'balanced')} is computed from all labels, and with "
                "shards=True each process has some of the labels: pass the weights of the classes"
            )

    def check_equal_beginnings(
        self,
        job: Job,
        state: TrainState,
        identity: Mapping[str, Any],
        source: BatchSource,
        held_out: BatchSource | None,
    ) -> None:
        """Raise `ValueError` in all processes if weights, data or arguments differ between them.

        The message names what differs.

        Args:
            job: the arguments of this process.
            state: the state with which training begins.
            identity: the description with which a checkpoint must agree.
            source: the data to train on.
            held_out: the validation data.

        Raises:
            ValueError: different weights, data or arguments in the processes; or an argument that
                needs all rows in one process.
        """
        self.refuse_unshared_arguments(job, state.balanced is not None)
        own = {"step": state.step, "epoch": state.epoch, **identity}
        for name, data in (("data", source), ("validation", held_out)):
            if data is not None:
                own |= {name: data.description, f"{name} batch_size": data.batch_size}
            if isinstance(data, ArraySource):  # its description has a digest of some rows only
                own |= {f"{name} {n}": _array_digest(a) for n, a in data.arrays.items()}
        if self.options.shards:
            differ = ("data", "validation", "batch_size")
            own = {k: v for k, v in own.items() if not k.startswith(differ)}
        values = state.values
        arrays = {f"weight {name}": a for name, a in values.weights.items()}
        arrays |= {f"buffer {name}": a for name, a in values.buffers.items()}
        if not self.options.shard_optimizer:  # else a process has the slots of its part only
            slots = values.slots.items()
            arrays |= {f"slot {n}.{s}": a for n, each in slots for s, a in each.items()}
        self._require_equal_values(own | {name: _array_digest(a) for name, a in arrays.items()})

    def _require_equal_values(self, own: Mapping[str, Any]) -> None:
        """Raise `ValueError` in all processes if a value in the nested dict `own` differs.

        The message names up to three values.
        """
        every = self.group.gather(_leaf_texts(own))
        keys = dict.fromkeys(k for each in every for k in each)
        if different := [k for k in keys if any(e.get(k) != every[0].get(k) for e in every)]:
            shown = ", ".join(
                f"{k} ({' / '.join(str(e.get(k))[:_SHOWN] for e in every)})" for k in different[:3]
            )
            raise ValueError(
                f"the {self.part.size} processes do not begin alike: {len(different)} of "
                f"{len(keys)} values differ, {shown}. Give each process the same model, data and "
                "arguments; pass parallel=DataParallel(shards=True) if processes have different "
                "data"
            )

    def warn_of_mixed_rows(self, objective: Objective, source: BatchSource) -> None:
        """Warn if the loss may depend on how many processes share a batch.

        This is so if the loss is not proven to be a sum over rows. The shapes of batches from files
        and iterables are unknown here: for such data, only statistics of batches and dropout are
        found.
        """
        if self.part.rank or self.options.sync_batch_norm:
            return
        if isinstance(source, ArraySource):
            proven = is_sum_over_rows(objective, source.axes_of_rows, source.batch_shapes())
        else:
            proven = not mixes_rows(objective)
        if not proven:
            warnings.warn(
                "the gradient of a batch is not proven to be the sum of the gradients of its rows: "
                "each process computes the gradient of a part of the rows, so that the result "
                "depends on the number of processes, as with DistributedDataParallel. The reasons "
                "can be statistics of a batch (see sync_batch_norm), dropout, or a loss that "
                "compares rows",
                stacklevel=frames_inside() + 1,
            )


@contextmanager
def shared_call(parallel: DataParallel | bool | None) -> Iterator[Sharing | None]:
    """Let the block, a call of `fit`, succeed in all processes of a group or fail in all.

    The block gets the `Sharing` by the argument `parallel` of a trainer; None for one process.
    """
    if (group := find_process_group(parallel)) is None:
        yield None
        return
    options = parallel if isinstance(parallel, DataParallel) else DataParallel()
    with group.together():
        yield Sharing(group, options)


class GroupSource(BatchSource):
    """A source of slices of one batch each, which the processes of a group share."""

    def __init__(self, source: BatchSource, group: Group) -> None:
        self._source, self._group = source, group
        self._part = Part(group.rank, group.size)
        self.batch_size, self.shuffles = source.batch_size, source.shuffles

    @property
    def description(self) -> dict[str, Any]:
        """The description of the data, by which a resumed training recognizes the same data."""
        return self._source.description

    def _gather_numbers(self, *numbers: int) -> np.ndarray:
        """Return the numbers that all processes pass, as an array (processes, numbers)."""
        every = np.zeros((self._group.size, len(numbers)), np.int64)
        every[self._group.rank] = numbers
        self._group.sum(every)()
        return every


class OwnDataSource(GroupSource):
    """A source for processes that have different data: their batches together are one batch.

    A process whose data have ended repeats a row, which does not count, until the data of all
    processes have ended.
    """

    rows = batches = None

    def epoch(self, rng: np.random.Generator | None, skip: int, budget: Budget) -> Slices:
        """Yield slices of one batch: the rows of this process, of a batch of all processes."""
        last: BatchSlice | None = None
        with closing(self._source.epoch(rng, skip, lambda batch: 1)) as slices:
            while True:
                piece = next(slices, None)
                rows = self._gather_numbers(0 if piece is None else piece.rows)
                if not rows.any():
                    return
                if piece is not None:
                    last = piece
                elif last is not None:
                    first = last.rows_of_first_batch(slice(0, 1))
                    last = replace(last, arrays=first, own=1, counted=0)
                else:
                    raise ValueError(
                        f"the data of process {self._part.rank} end after {skip} batches, and the "
                        "data of other processes do not: give each process as many batches"
                    )
                yield replace(last, rows=int(rows.sum()), part=self._part)


class SharedDataSource(GroupSource):
    """A source for processes that have equal data: each computes a part of every batch."""

    def __getattr__(self, name: str) -> Any:  # rows and batches, known after the first epoch
        return getattr(self._source, name)

    def epoch(self, rng: np.random.Generator | None, skip: int, budget: Budget) -> Slices:
        """Yield slices of one batch: the rows that this process computes of the common batch."""
        with closing(self._source.epoch(rng, skip, lambda batch: 1)) as slices:
            for number in itertools.count(skip):
                piece = next(slices, None)
                self._require_same_batch(number, piece)
                if piece is None:
                    return
                own = piece.rows_of_first_batch(self._part.computed_rows(piece.rows))
                yield BatchSlice(own, 1, piece.rows, piece.row_axes, self._part)

    def _require_same_batch(self, number: int, piece: BatchSlice | None) -> None:
        """Raise `ValueError` in all processes if the batch of index `number` is not the same in
        all.

        `piece` is the batch in this process; None: its data have ended.
        """
        digest = 0
        if piece is not None:
            digest = zlib.crc32(repr([_array_digest(a) for a in piece.arrays.values()]).encode())
        has, digests = self._gather_numbers(piece is not None, digest).T
        if has.any() != has.all():
            ended = ", ".join(map(str, np.flatnonzero(has == 0)))
            raise ValueError(
                f"the iterable of process {ended} ended after {number} batches, and the iterables "
                "of other processes go on: give each process the same batches; pass "
                "parallel=DataParallel(shards=True) if processes have different data"
            )
        if (digests != digests[0]).any():
            raise ValueError(
                f"batch {number} is not the same in all processes, and each process would leave "
                "out rows of it: pass parallel=DataParallel(shards=True) if processes have "
                "different data, or else data in the same order"
            )


def _leaf_texts(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the leaves of nested mappings as text, by path "key.key.key"."""
    leaves: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            leaves |= _leaf_texts(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = str(value)
    return leaves


def _array_digest(array: np.ndarray) -> str:
    """Return the dtype, the shape and a checksum of an array."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return f"{array.dtype} {array.shape} {zlib.crc32(data.data):08x}"
