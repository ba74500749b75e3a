"""Groups of processes: `torch.distributed` or MPI, which the user's launcher has started."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from onnxgrad.checks import check_choice
from onnxgrad.parallel.engines import MpiGroup, TorchGroup, Wait, import_mpi, mpi_in_use
from onnxgrad.runtime.session import process_count

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # environment variables of Open MPI and MPICH


@dataclass(frozen=True)
class DataParallel:
    """Options of data-parallel training: each process computes the gradient of a share of the rows.

    Without it, a `Trainer` inside of an initialized group of `torch.distributed`, or of MPI, uses
    the defaults. The batch size is the number of rows in all processes together. The trained
    weights equal the weights that one process trains, up to rounding; unless masks of dropout are
    drawn, or statistics of batches are not synchronized.

    Args:
        engine: "torch": the default group of `torch.distributed`, with gloo, mpi or nccl; "mpi":
            `mpi4py.MPI.COMM_WORLD`; "auto": whichever of these is initialized.
        sync_batch_norm: `batch_norm="train"` normalizes by the statistics of the rows of all
            processes, as one process would; otherwise each process normalizes by the statistics of
            its rows, and the running statistics are averaged.
        shard_optimizer: each process keeps the slots of some of the weights only, updates these
            weights, and sends them to the other processes (ZeRO, stage 1).
        shards: whether each process passes different rows, of which its batches consist, such as
            the rows of a DataLoader with a DistributedSampler. Otherwise all processes pass the
            same data, and each takes its part of every batch.

    Raises:
        ValueError: an unknown engine.

    Examples:
        >>> import onnxgrad as og
        >>> og.parallel.DataParallel(shard_optimizer=True).engine
        'auto'
    """

    engine: str = "auto"
    sync_batch_norm: bool = False
    shard_optimizer: bool = False
    shards: bool = False

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, ("auto", "torch", "mpi"))


class Group(Protocol):
    """Processes that exchange arrays; all processes call the same methods in the same order.

    Each method raises `ProcessLostError` if a process does not answer, or has left the call.
    """

    rank: int
    size: int

    def sum(self, array: np.ndarray) -> Wait:
        """Start replacing a contiguous array by its sum over the processes.

        Returns:
            A function that waits until the sum is in the array.
        """

    def broadcast(self, array: np.ndarray, root: int) -> None:
        """Replace a contiguous array by the array of the process `root`."""

    def gather(self, item: Any) -> list[Any]:
        """Return a list with the `item`, any picklable object, of each process, by rank."""

    def together(self) -> AbstractContextManager[None]:
        """Return a context manager whose block raises in all processes if it fails in one
        process.
        """


class SingleProcess:
    """A `Group` of a single process, which exchanges nothing."""

    rank, size = 0, 1

    def sum(self, array: np.ndarray) -> Wait:
        """Return a function that does nothing: the sum over one process is `array` itself."""
        return lambda: None

    def broadcast(self, array: np.ndarray, root: int) -> None:
        """Leave `array` unchanged, as there is no other process."""

    def gather(self, item: Any) -> list[Any]:
        """Return `[item]`, the list of the items of all processes."""
        return [item]

    def together(self) -> AbstractContextManager[None]:
        """Return a context manager that does nothing."""
        return nullcontext()


@dataclass(frozen=True)
class Part:
    """The share of the rows of each batch that one process computes.

    Attributes:
        rank: number of the part.
        size: number of parts, whose numbers of rows differ by one at most.
    """

    rank: int
    size: int

    def rows(self, count: int) -> slice:
        """Return the slice of rows of this part of a batch of `count` rows; it may be empty."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def count(self, count: int) -> int:
        """Return the count of rows in `computed_rows` of a batch of `count` rows."""
        return len(range(count)[self.computed_rows(count)])

    def computed_rows(self, count: int) -> slice:
        """Return the slice `rows`; if `rows` is empty, the slice of one row of another process."""
        rows = self.rows(count)
        first = min(rows.start, count - 1)
        return slice(first, max(rows.stop, first + 1))


def find_process_group(parallel: DataParallel | bool | None) -> Group | None:
    """Return the `Group` of this process; None if the process trains alone.

    Args:
        parallel: False: no group. None: the initialized group, if it has several processes. A
            `DataParallel`, or True for its defaults: the group of its engine, also if it has only
            one process.

    Raises:
        ValueError: no group of the engine is initialized.
    """
    if parallel is False:
        return None
    if parallel is True:
        parallel = DataParallel()
    engine = parallel.engine if isinstance(parallel, DataParallel) else "auto"
    distributed = sys.modules.get("torch.distributed")
    started = distributed is not None and distributed.is_available()
    group: Group | None = None
    if engine != "mpi" and started and distributed is not None and distributed.is_initialized():
        group = TorchGroup()
    elif engine == "mpi" or (engine == "auto" and _runs_under_mpi(parallel)):
        group = MpiGroup()
    if isinstance(parallel, DataParallel):
        if group is None:
            raise ValueError(
                "parallel: this process is in no group: call "
                "torch.distributed.init_process_group('gloo') first, in a program that torchrun "
                "starts; or start the program by mpirun, with mpi4py installed"
            )
        return group if group.size > 1 else SingleProcess()
    if group is None and (size := process_count("WORLD_SIZE", *_MPI_SIZES)) > 1:
        warnings.warn(
            f"the launcher has started {size} processes, and each trains a separate model: call "
            "torch.distributed.init_process_group() or import mpi4py.MPI before fit, so that they "
            "train one model together; or pass parallel=False",
            stacklevel=4,
        )
    return group if group is not None and group.size > 1 else None


def _runs_under_mpi(parallel: DataParallel | bool | None) -> bool:
    """Return whether MPI has started several processes, and mpi4py is imported or requested."""
    if "mpi4py.MPI" in sys.modules:
        return mpi_in_use() is not None
    return isinstance(parallel, DataParallel) and process_count(*_MPI_SIZES) > 1


def join_launched_group() -> bool:
    """Join the process group of torchrun or mpirun, if such a launcher started this process.

    Returns:
        Whether this process is the first process, or the only one.
    """
    if process_count(*_MPI_SIZES) > 1:
        import_mpi()
    elif process_count("WORLD_SIZE") > 1 and "MASTER_ADDR" in os.environ:
        import torch.distributed as distributed

        if not distributed.is_initialized():
            distributed.init_process_group("gloo")
            # threads of the group must not outlive the interpreter
            atexit.register(distributed.destroy_process_group)
    group = find_process_group(None)
    return group is None or group.rank == 0
