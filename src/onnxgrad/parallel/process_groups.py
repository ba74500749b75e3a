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
from onnxgrad.parallel.engines import (
    MpiGroup,
    TorchGroup,
    Wait,
    mpi,
    world,
)
from onnxgrad.runtime.session import process_count

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # of Open MPI and MPICH


@dataclass(frozen=True)
class DataParallel:
    """How the processes of a group train one model: each computes the gradient of its rows.

    Without it, a `Trainer` inside of an initialized group of `torch.distributed`, or of MPI, uses
    the defaults. The batch size is that of all processes together, and the weights are those of one
    process up to rounding, except where masks of dropout are drawn, and with statistics of batches
    that are not synchronised.

    Args:
        engine: "torch": the default group of `torch.distributed`, with gloo, mpi or nccl; "mpi":
            `mpi4py.MPI.COMM_WORLD`; "auto": the one that is there.
        sync_batch_norm: `batch_norm="train"` normalizes by the statistics of the rows of all
            processes, as one process would; otherwise by those of its own rows, and the running
            statistics are averaged.
        shard_optimizer: each process keeps the slots of some of the weights only, updates these,
            and sends them to the others (ZeRO, stage 1).
        shards: whether the data that a process passes are its own rows, of which its batches
            consist, such as those of a DataLoader with a DistributedSampler. Otherwise all pass the
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
    """Processes that exchange arrays; all must call the same methods in the same order.

    Each method raises `ProcessLostError` if a process does not answer, or has left the call.
    """

    rank: int
    size: int

    def sum(self, array: np.ndarray) -> Wait:
        """Begin to replace a contiguous array by its sum over the processes; return what waits."""

    def broadcast(self, array: np.ndarray, root: int) -> None:
        """Replace a contiguous array by that of the process `root`."""

    def gather(self, item: Any) -> list[Any]:
        """Return the item of every process, by rank; any object that can be pickled."""

    def together(self) -> AbstractContextManager[None]:
        """Let the block, which all processes enter, end in all of them, or fail in all."""


class Alone:
    """One process, which is the whole group."""

    rank, size = 0, 1

    def sum(self, array: np.ndarray) -> Wait:
        """Leave the array as it is."""
        return lambda: None

    def broadcast(self, array: np.ndarray, root: int) -> None:
        """Leave the array as it is."""

    def gather(self, item: Any) -> list[Any]:
        """Return the item."""
        return [item]

    def together(self) -> AbstractContextManager[None]:
        """Let the block fail by itself."""
        return nullcontext()


def group_of(parallel: DataParallel | bool | None) -> Group | None:
    """Return the group that this process is in; None: it trains alone.

    Args:
        parallel: False: alone. None: in the group that is there, if it has several processes. A
            `DataParallel`, True for the defaults: in that of its engine, also if there is only one
            process.

    Raises:
        ValueError: the group is not there.
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
    elif engine == "mpi" or (engine == "auto" and _in_mpi(parallel)):
        group = MpiGroup()
    if isinstance(parallel, DataParallel):
        if group is None:
            raise ValueError(
                "parallel: this process is in no group: call "
                "torch.distributed.init_process_group('gloo') first, in a program that torchrun "
                "starts; or start it by mpirun, with mpi4py installed"
            )
        return group if group.size > 1 else Alone()
    if group is None and (size := process_count("WORLD_SIZE", *_MPI_SIZES)) > 1:
        warnings.warn(
            f"the launcher has started {size} processes, and each trains a model of its own: call "
            "torch.distributed.init_process_group() or import mpi4py.MPI before fit, so that they "
            "train one together; parallel=False if this is meant",
            stacklevel=4,
        )
    return group if group is not None and group.size > 1 else None


def _in_mpi(parallel: DataParallel | bool | None) -> bool:
    """Return whether MPI has started several processes, which know it or are told to."""
    if "mpi4py.MPI" in sys.modules:
        return world() is not None
    return isinstance(parallel, DataParallel) and process_count(*_MPI_SIZES) > 1


def join() -> bool:
    """Enter the group of the launcher that has started this process, if one has.

    Return whether this process is the first one, or the only one.
    """
    if process_count(*_MPI_SIZES) > 1:
        mpi()
    elif process_count("WORLD_SIZE") > 1 and "MASTER_ADDR" in os.environ:
        import torch.distributed as distributed

        if not distributed.is_initialized():
            distributed.init_process_group("gloo")
            atexit.register(distributed.destroy_process_group)  # its threads must not outlive it
    group = group_of(None)
    return group is None or group.rank == 0
