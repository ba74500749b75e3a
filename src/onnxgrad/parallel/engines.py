"""Exchanges between processes by `torch.distributed` or MPI, which end together if one fails."""

from __future__ import annotations

import atexit
import itertools
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any
from weakref import ref

import numpy as np

from onnxgrad.errors import ProcessLostError, argument, first_line, not_installed

PATIENCE = 60.0  # seconds that a process which failed waits for the others to fail, too
_POLL, _TAG, _SHOWN = 0.2, 31_999, 200
_calls = itertools.count(1)  # of `together`, as many in all processes
_unfinished: list[Any] = []  # exchanges that were given up; their arrays must stay in memory
_told: dict[int, dict[int, str]] = {}  # by MPI: why processes left each call, or will not enter
# the engine whose processes did not leave a call in the same exchange
_broken: ref[Any] | None = None

Wait = Callable[[], None]


class _Processes:
    """Several processes, which tell each other when one has left a call by an error.

    What they tell goes beside the exchanges, as nobody knows in which one the others wait.
    """

    rank: int
    size: int
    _engine: ref[Any]  # by which a group is known: its threads must not outlive it

    def __init__(self) -> None:
        self._call = 0
        self._left: dict[int, str] = {}  # why processes have left the call, the first one first

    def sum(self, array: np.ndarray) -> Wait:
        raise NotImplementedError

    def gather(self, item: Any) -> list[Any]:
        """Return the items of all processes."""
        data = np.frombuffer(pickle.dumps(item), np.uint8)
        sizes = np.zeros(self.size, np.int64)
        sizes[self.rank] = data.size
        self.sum(sizes)()
        every = np.zeros(sizes.sum(), np.uint8)  # each adds its bytes to the zeros of the others
        parts = np.split(every, sizes.cumsum()[:-1])
        parts[self.rank][:] = data
        self.sum(every)()
        return [pickle.loads(part.tobytes()) for part in parts]

    def _tell(self, reason: str) -> None:
        """Tell all processes why this one leaves the call."""

    def _listen(self) -> None:
        """Add to `_left` what others have told."""

    def _end_program(self) -> None:
        """End the program if others may wait for this process for ever."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let the block, which all processes enter, end in all of them, or fail in all."""
        global _broken
        if _broken is not None and _broken() is self._engine():
            raise self._lost("a call before left exchanges unfinished, so that none can follow")
        self._call, self._left = next(_calls), {}
        try:
            yield
            self.gather(None)
        except BaseException as e:
            with suppress(Exception):  # of the engine, whose other processes may be gone
                self._tell(f"{type(e).__name__}: {first_line(e)[:_SHOWN]}")
            lost = all(reason.startswith(ProcessLostError.__name__) for reason in self._reasons(e))
            if not lost:
                self._wait_for_others()
            if any(reason.startswith(ProcessLostError.__name__) for reason in self._reasons(e)):
                _broken = self._engine
            raise

    def _reasons(self, error: BaseException) -> list[str]:
        """Return why processes have left the call, of which this one may know its own only."""
        return [*self._left.values(), type(error).__name__]

    def _wait_for_others(self) -> None:
        """Wait until the others have left the call, too: they may write a checkpoint."""
        until = time.monotonic() + PATIENCE
        with suppress(Exception):
            while time.monotonic() < until:
                self._listen()
                if len({*self._left, self.rank}) == self.size:
                    return
                time.sleep(_POLL)
        self._end_program()

    def _check(self) -> None:
        """Raise `ProcessLostError` if another process has left the call."""
        self._listen()
        if (error := self._failure) is not None:
            raise error

    @property
    def _failure(self) -> ProcessLostError | None:
        """The error that names the first other process that has left the call; None: none has."""
        for rank, reason in self._left.items():
            if rank != self.rank:
                return self._lost(f"process {rank} has failed: {reason}")
        return None

    def _lost(self, what: str) -> ProcessLostError:
        return ProcessLostError(
            f"process {self.rank} of {self.size}: {what}. The state before this step is kept: "
            f"start again with {argument('resume')} the folder of the checkpoints, with any number "
            "of processes"
        )

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise `ProcessLostError` for an error of the engine, or of another process."""
        try:
            yield
        except ProcessLostError:
            raise
        except RuntimeError as e:  # of torch.distributed, and the base of MPI.Exception
            time.sleep(_POLL)  # the reason may come after the end of the connection
            with suppress(RuntimeError):
                self._listen()
            raise self._failure or self._lost(
                f"another process does not answer any more ({first_line(e)[:_SHOWN]})"
            ) from e


class TorchGroup(_Processes):
    """The default group of `torch.distributed`."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as distributed

        super().__init__()
        self._torch, self._distributed = torch, distributed
        self._engine = ref(distributed.distributed_c10d._get_default_group())
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        backend = distributed.get_backend()
        self._on_gpu, self._waits = backend == "nccl", backend == "gloo"

    def sum(self, array: np.ndarray) -> Wait:
        """Begin to replace an array by its sum."""
        return self._exchange(self._distributed.all_reduce, array)

    def broadcast(self, array: np.ndarray, root: int) -> None:
        """Replace an array by that of another process."""
        self._exchange(self._distributed.broadcast, array, root)()

    def _exchange(self, begin: Callable[..., Any], array: np.ndarray, *more: Any) -> Wait:
        tensor = self._torch.from_numpy(array)
        tensor = tensor.cuda() if self._on_gpu else tensor
        with self._translate_errors():
            work = begin(tensor, *more, async_op=True)

        def wait() -> None:
            self._finish(work)
            if self._on_gpu:
                np.copyto(array, tensor.cpu().numpy())

        return wait

    def _finish(self, work: Any) -> None:
        """Wait for an exchange, and look from time to time whether another process has failed."""
        with self._translate_errors():
            while self._waits:
                try:
                    work.wait(timedelta(seconds=_POLL))
                    return
                except RuntimeError:
                    if work.is_completed():
                        break
                self._check()
            work.wait()  # raises what has ended it

    def _tell(self, reason: str) -> None:
        store, key = self._store(), f"onnxgrad/{self._call}"
        store.set(f"{key}/{store.add(key, 1)}", f"{self.rank} {reason}")

    def _listen(self) -> None:
        store = self._store()
        while store.check([key := f"onnxgrad/{self._call}/{len(self._left) + 1}"]):
            rank, _, reason = store.get(key).decode().partition(" ")
            self._left[int(rank)] = reason

    def _store(self) -> Any:
        return self._distributed.distributed_c10d._get_default_store()


def mpi() -> Any:
    """Import `mpi4py.MPI`, which enters the group of the processes that `mpirun` has started."""
    try:
        from mpi4py import MPI
    except ImportError as e:
        raise not_installed("a process that mpirun has started", "mpi4py", "mpi") from e
    return MPI


class MpiGroup(_Processes):
    """The processes that `mpirun` has started."""

    def __init__(self) -> None:
        MPI = mpi()
        super().__init__()
        end_together()
        self._engine, self._mpi, self._all = ref(MPI), MPI, MPI.COMM_WORLD
        self.rank, self.size = self._all.Get_rank(), self._all.Get_size()

    def sum(self, array: np.ndarray) -> Wait:
        """Begin to replace an array by its sum."""
        with self._translate_errors():
            request = self._all.Iallreduce(self._mpi.IN_PLACE, array)
        return lambda: self._finish(request)

    def broadcast(self, array: np.ndarray, root: int) -> None:
        """Replace an array by that of another process."""
        with self._translate_errors():
            request = self._all.Ibcast(array, root)
        self._finish(request)

    def _finish(self, request: Any) -> None:
        """Wait for an exchange, and look from time to time whether another process has failed."""
        with self._translate_errors():
            _unfinished.append(request)
            checked = time.monotonic()
            while not request.Test():
                time.sleep(0)
                if time.monotonic() - checked > _POLL:
                    self._check()
                    checked = time.monotonic()
            _unfinished.remove(request)

    def _tell(self, reason: str) -> None:
        others = [rank for rank in range(self.size) if rank != self.rank]
        told = (self._call, reason)
        _unfinished.extend(self._all.isend(told, rank, _TAG) for rank in others)

    def _listen(self) -> None:
        status = self._mpi.Status()
        while self._all.iprobe(self._mpi.ANY_SOURCE, _TAG, status):
            call, reason = self._all.recv(source=status.Get_source(), tag=_TAG)
            _told.setdefault(call, {})[status.Get_source()] = reason
        self._left |= _told.get(self._call, {})

    def _end_program(self) -> None:
        error = sys.exc_info()[1]
        traceback.print_exception(error)
        abort(_code_of(error))


def abort(code: int) -> None:
    """End all processes that `mpirun` has started, if there are several."""
    if (module := world()) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        module.COMM_WORLD.Abort(code)


@cache
def end_together() -> None:
    """Let a process that ends, by an error or otherwise, end those that MPI has started with it.

    Without it, the process waits for the others while it ends, and they wait for it.
    """
    before = sys.excepthook

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        before(kind, error, trace)
        if isinstance(error, ProcessLostError):
            time.sleep(1)  # the process whose error it was ends the others, after its traceback
        abort(_code_of(error))

    sys.excepthook = hook
    atexit.register(_tell_of_end)


def _tell_of_end() -> None:
    """Let the call that this process will never enter fail in the others."""
    if world() is not None:
        group = MpiGroup()
        group._call = next(_calls)
        group._tell("its program has ended")


def _code_of(error: BaseException | None) -> int:
    """Return the exit code of a process that an error ends."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) and error.code else 1
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def world() -> Any:
    """Return the module of MPI, if it is in use and has started several processes."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    return module if module.COMM_WORLD.Get_size() > 1 else None
