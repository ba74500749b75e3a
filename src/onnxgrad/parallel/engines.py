"""Groups of processes by `torch.distributed` or MPI; if one process fails, all processes end."""

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

PATIENCE = 60.0  # seconds that a process which failed waits for the other processes to fail, too
_POLL = 0.2  # seconds between two looks at the failures of other processes
_TAG = 31_999  # tag of the MPI messages by which processes announce a failure
_LONGEST_REASON = 200  # most characters of an announced reason
# counts the calls of `together`; all processes have the same count
_call_numbers = itertools.count(1)
# exchanges of MPI that did not finish, whose arrays must stay in memory
_unfinished_requests: list[Any] = []
# {number of the call: {rank: reason}} of the failures received by MPI, also of later calls
_announced: dict[int, dict[int, str]] = {}
# the engine whose processes left a call in different exchanges: no later call can succeed
_broken_engine: ref[Any] | None = None

Wait = Callable[[], None]


class _ProcessGroup:
    """A group of processes that announce failures to each other, so that all leave a failed call.

    Announcements do not use exchanges, as other processes may wait in any exchange.
    """

    rank: int
    size: int
    _engine: ref[Any]  # weak reference to the library's group, so that its threads can end

    def __init__(self) -> None:
        self._call = 0
        # {rank: why the process has left the call}, the first failure first
        self._failures: dict[int, str] = {}

    def sum(self, array: np.ndarray) -> Wait:
        """Start to sum `array` over processes, in place; return a function that waits for it."""
        raise NotImplementedError

    def gather(self, item: Any) -> list[Any]:
        """Return a list with the `item` of each process, in the order of ranks."""
        data = np.frombuffer(pickle.dumps(item), np.uint8)
        sizes = np.zeros(self.size, np.int64)
        sizes[self.rank] = data.size
        self.sum(sizes)()
        # a sum: each process writes its bytes, and zeros elsewhere
        every = np.zeros(sizes.sum(), np.uint8)
        parts = np.split(every, sizes.cumsum()[:-1])
        parts[self.rank][:] = data
        self.sum(every)()
        return [pickle.loads(part.tobytes()) for part in parts]

    def _announce_failure(self, reason: str) -> None:
        """Announce to all processes the `reason` why this process leaves the `together` block."""

    def _read_announced_failures(self) -> None:
        """Add the failures that other processes have announced to `_failures`."""

    def _exit_if_others_may_wait(self) -> None:
        """End this program if other processes may wait for it forever."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Return a context manager whose block raises in all processes if it fails in one
        process.
        """
        global _broken_engine
        if _broken_engine is not None and _broken_engine() is self._engine():
            raise self._process_lost_error(
                "an earlier call has failed, and left exchanges with other processes unfinished"
            )
        self._call, self._failures = next(_call_numbers), {}
        try:
            yield
            self.gather(None)
        except BaseException as e:
            with suppress(Exception):  # errors of the engine, as other processes may be gone
                self._announce_failure(f"{type(e).__name__}: {first_line(e)[:_LONGEST_REASON]}")
            if not all(self._lost_process_flags(e)):
                self._wait_for_processes()
            if any(self._lost_process_flags(e)):
                _broken_engine = self._engine
            raise

    def _lost_process_flags(self, error: BaseException) -> list[bool]:
        """Return a list of bools: whether each known failure, and `error`, is a
        `ProcessLostError`.
        """
        reasons = [*self._failures.values(), type(error).__name__]
        return [reason.startswith(ProcessLostError.__name__) for reason in reasons]

    def _wait_for_processes(self) -> None:
        """Wait until all processes have left `together`: they may still write a checkpoint."""
        until = time.monotonic() + PATIENCE
        with suppress(Exception):
            while time.monotonic() < until:
                self._read_announced_failures()
                if len({*self._failures, self.rank}) == self.size:
                    return
                time.sleep(_POLL)
        self._exit_if_others_may_wait()

    def _raise_announced_failure(self) -> None:
        """Raise `ProcessLostError` if another process has announced a failure."""
        self._read_announced_failures()
        if (error := self._first_failure_error()) is not None:
            raise error

    def _first_failure_error(self) -> ProcessLostError | None:
        """Return the error that names the first other process that has failed, or None."""
        for rank, reason in self._failures.items():
            if rank != self.rank:
                return self._process_lost_error(f"process {rank} has failed: {reason}")
        return None

    def _process_lost_error(self, what: str) -> ProcessLostError:
        """Return an error that says `what` has happened, and how to resume the training."""
        return ProcessLostError(
            f"process {self.rank} of {self.size}: {what}. The state before this step is kept: "
            f"start again with {argument('resume')} the folder of the checkpoints, with any number "
            "of processes"
        )

    @contextmanager
    def _raise_as_process_lost(self) -> Iterator[None]:
        """Turn an error of torch.distributed or MPI in the block into a `ProcessLostError`."""
        try:
            yield
        except ProcessLostError:
            raise
        except RuntimeError as e:  # by torch.distributed; the base class of MPI.Exception, too
            time.sleep(_POLL)  # the announcement may come after the end of the connection
            with suppress(RuntimeError):
                self._read_announced_failures()
            raise self._first_failure_error() or self._process_lost_error(
                f"another process does not answer any more ({first_line(e)[:_LONGEST_REASON]})"
            ) from e


class TorchGroup(_ProcessGroup):
    """The processes in the default group of `torch.distributed`."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as distributed

        super().__init__()
        self._torch, self._distributed = torch, distributed
        self._engine = ref(distributed.distributed_c10d._get_default_group())
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        backend = distributed.get_backend()
        self._on_gpu, self._waits_with_timeout = backend == "nccl", backend == "gloo"

    def sum(self, array: np.ndarray) -> Wait:
        """Start to sum `array` over processes, in place; return a function that waits for it."""
        return self._start_exchange(self._distributed.all_reduce, array)

    def broadcast(self, array: np.ndarray, root: int) -> None:
        """Replace `array` by the array of the process `root`."""
        self._start_exchange(self._distributed.broadcast, array, root)()

    def _start_exchange(self, begin: Callable[..., Any], array: np.ndarray, *more: Any) -> Wait:
        """Start an exchange of an array by `begin`; return a function that waits for its end."""
        tensor = self._torch.from_numpy(array)
        tensor = tensor.cuda() if self._on_gpu else tensor
        with self._raise_as_process_lost():
            work = begin(tensor, *more, async_op=True)

        def wait() -> None:
            self._wait_for_exchange(work)
            if self._on_gpu:
                np.copyto(array, tensor.cpu().numpy())

        return wait

    def _wait_for_exchange(self, work: Any) -> None:
        """Wait for the end of an exchange; raise `ProcessLostError` if a process fails first."""
        with self._raise_as_process_lost():
            while self._waits_with_timeout:
                try:
                    work.wait(timedelta(seconds=_POLL))
                    return
                except RuntimeError:
                    if work.is_completed():
                        break
                self._raise_announced_failure()
            work.wait()  # raises the error that has ended the exchange

    def _announce_failure(self, reason: str) -> None:
        store, key = self._key_value_store(), f"onnxgrad/{self._call}"
        store.set(f"{key}/{store.add(key, 1)}", f"{self.rank} {reason}")

    def _read_announced_failures(self) -> None:
        store = self._key_value_store()
        while store.check([key := f"onnxgrad/{self._call}/{len(self._failures) + 1}"]):
            rank, _, reason = store.get(key).decode().partition(" ")
            self._failures[int(rank)] = reason

    def _key_value_store(self) -> Any:
        return self._distributed.distributed_c10d._get_default_store()


def import_mpi() -> Any:
    """Import and return `mpi4py.MPI`; the import joins the process group of `mpirun`."""
    try:
        from mpi4py import MPI
    except ImportError as e:
        raise not_installed("a process that mpirun has started", "mpi4py", "mpi") from e
    return MPI


class MpiGroup(_ProcessGroup):
    """The processes that `mpirun` has started."""

    def __init__(self) -> None:
        MPI = import_mpi()
        super().__init__()
        abort_all_on_error()
        self._engine, self._mpi, self._world = ref(MPI), MPI, MPI.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()

    def sum(self, array: np.ndarray) -> Wait:
        """Start to sum `array` over processes, in place; return a function that waits for it."""
        with self._raise_as_process_lost():
            request = self._world.Iallreduce(self._mpi.IN_PLACE, array)
        return lambda: self._wait_for_exchange(request)

    def broadcast(self, array: np.ndarray, root: int) -> None:
        """Replace `array` by the array of the process `root`."""
        with self._raise_as_process_lost():
            request = self._world.Ibcast(array, root)
        self._wait_for_exchange(request)

    def _wait_for_exchange(self, request: Any) -> None:
        """Wait for the end of an exchange; raise `ProcessLostError` if a process fails first."""
        with self._raise_as_process_lost():
            _unfinished_requests.append(request)
            checked = time.monotonic()
            while not request.Test():
                time.sleep(0)
                if time.monotonic() - checked > _POLL:
                    self._raise_announced_failure()
                    checked = time.monotonic()
            _unfinished_requests.remove(request)

    def _announce_failure(self, reason: str) -> None:
        others = [rank for rank in range(self.size) if rank != self.rank]
        message = self._call, reason
        _unfinished_requests.extend(self._world.isend(message, rank, _TAG) for rank in others)

    def _read_announced_failures(self) -> None:
        status = self._mpi.Status()
        while self._world.iprobe(self._mpi.ANY_SOURCE, _TAG, status):
            call, reason = self._world.recv(source=status.Get_source(), tag=_TAG)
            _announced.setdefault(call, {})[status.Get_source()] = reason
        self._failures |= _announced.get(self._call, {})

    def _exit_if_others_may_wait(self) -> None:
        error = sys.exc_info()[1]
        traceback.print_exception(error)
        abort_processes(_exit_code(error))


def abort_processes(code: int) -> None:
    """End all processes that `mpirun` has started, with an exit code, if there are several."""
    if (module := mpi_in_use()) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        module.COMM_WORLD.Abort(code)


@cache
def abort_all_on_error() -> None:
    """Install hooks by which all processes of MPI end when one process ends, for any reason.

    Without this, a process that ends waits for the other processes, and they wait for it.
    """
    show_error = sys.excepthook

    def abort_after_error(kind: Any, error: BaseException, trace: Any) -> None:
        show_error(kind, error, trace)
        if isinstance(error, ProcessLostError):
            time.sleep(1)  # the process that failed first shows its traceback, and ends the others
        abort_processes(_exit_code(error))

    def announce_end() -> None:
        """Announce this program's end, so that no process waits for it in the next `together`."""
        if mpi_in_use() is not None:
            group = MpiGroup()
            group._call = next(_call_numbers)
            group._announce_failure("its program has ended")

    sys.excepthook = abort_after_error
    atexit.register(announce_end)


def _exit_code(error: BaseException | None) -> int:
    """Return the exit code of a process that ends by `error`."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) and error.code else 1
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def mpi_in_use() -> Any:
    """Return the module `mpi4py.MPI` if it is initialized and has several processes, else None."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    return module if module.COMM_WORLD.Get_size() > 1 else None
