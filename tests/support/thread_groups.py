"""Groups whose processes are threads of this one, for what a training exchanges with others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest

from onnxgrad.training import sharing
from tests.support.running import PATIENCE


class ThreadGroup:
    """A group as `onnxgrad.parallel.Group`, of threads that share what each has sent."""

    def __init__(self, rank: int, size: int, sent: Any, barrier: threading.Barrier) -> None:
        self.rank, self.size, self._sent, self._barrier = rank, size, sent, barrier
        self._count = 0

    def _exchange(self, item: Any) -> Callable[[], list[Any]]:
        """Send an item; return what waits for the items of all, by rank."""
        number, self._count = self._count, self._count + 1
        self._sent[self.rank][number] = item

        def received() -> list[Any]:
            self._barrier.wait(PATIENCE)
            items = [self._sent[rank][number] for rank in range(self.size)]
            self._barrier.wait(PATIENCE)
            del self._sent[self.rank][number]
            return items

        return received

    def sum(self, array: np.ndarray) -> Callable[[], None]:
        received = self._exchange(array.copy())

        def wait() -> None:
            array[...] = sum(received())

        return wait

    def broadcast(self, array: np.ndarray, root: int) -> None:
        array[...] = self._exchange(array.copy())()[root]

    def gather(self, item: Any) -> list[Any]:
        return self._exchange(item)()

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()


def run_in_threads(
    monkeypatch: pytest.MonkeyPatch, function: Callable[[int], Any], size: int = 2
) -> list[Any]:
    """Return what `function(rank)` returns in each thread of a new group, in which trainers are."""
    local, sent = threading.local(), [{} for _ in range(size)]
    barrier = threading.Barrier(size)
    monkeypatch.setattr(sharing, "group_of", lambda parallel: local.group)

    def run(rank: int) -> Any:
        local.group = group = ThreadGroup(rank, size, sent, barrier)
        try:
            result = function(rank)
            group.gather(None)  # fails at once if another waits in an exchange
            return result
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))
