"""Groups whose processes are threads of this one, for what a training exchanges with others."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from onnxgrad.training import sharing
from tests.support.running import PATIENCE


class ThreadGroup:
    """A `Group` of `onnxgrad.parallel` by threads; `board` has what each has sent last."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: list[bytes]) -> None:
        self.rank, self.size, self._barrier, self._board = rank, len(board), barrier, board

    def gather(self, item: Any) -> list[Any]:
        self._board[self.rank] = pickle.dumps(item)
        self._barrier.wait(PATIENCE)
        items = [pickle.loads(data) for data in self._board]
        self._barrier.wait(PATIENCE)
        return items

    def sum(self, array: np.ndarray) -> Callable[[], None]:
        array[...] = np.sum(self.gather(array), axis=0)
        return lambda: None

    def broadcast(self, array: np.ndarray, root: int) -> None:
        array[...] = self.gather(array)[root]

    @contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._barrier.abort()
            raise


def run_in_threads(
    monkeypatch: pytest.MonkeyPatch, function: Callable[[int], Any], size: int = 2
) -> list[Any]:
    """Return what `function(rank)` returns in each thread of a new group, in which trainers are."""
    own, barrier, board = threading.local(), threading.Barrier(size), [b""] * size

    def find_process_group(parallel: Any) -> ThreadGroup | None:
        return None if parallel is False else getattr(own, "group", None)

    def called(rank: int) -> Any:
        own.group = ThreadGroup(rank, barrier, board)
        try:
            result = function(rank)
            assert own.group.gather("end") == ["end"] * size  # none is still in an exchange
            return result
        except BaseException:
            barrier.abort()
            raise

    monkeypatch.setattr(sharing, "find_process_group", find_process_group)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(called, rank) for rank in range(size)]
    errors = [future.exception() for future in futures]
    errors.sort(key=lambda e: isinstance(e, threading.BrokenBarrierError))  # of the other threads
    if any(errors):
        raise next(filter(None, errors))
    return [future.result() for future in futures]
