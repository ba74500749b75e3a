"""Reading ahead in a thread, so that training does not wait for data."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
_JOIN_SECONDS = 10.0  # to wait for an item that the thread still reads when the consumer ends
_POLL_SECONDS = 0.5  # Ctrl-C does not interrupt a wait without timeout on Windows


def read_ahead(items: Generator[T, None, None], depth: int) -> Generator[T, None, None]:
    """Yield `items`, which a thread reads up to `depth` items ahead.

    An exception of `items` is raised here, with its traceback. The thread ends with the items, or
    when this generator is closed, and closes `items` then. Closing waits at most 10 seconds for the
    item that the thread is reading; the thread ends after that item.

    Args:
        items: the generator, used by the thread only.
        depth: most items that are read and not yet yielded; 0: each item is read on demand.
    """
    results: queue.SimpleQueue[tuple[str, T | BaseException | None]] = queue.SimpleQueue()
    free, ended = threading.Semaphore(depth), threading.Event()

    def read_items() -> None:
        last: tuple[str, BaseException | None] = ("end", None)
        try:
            while free.acquire() and not ended.is_set():
                try:
                    item = next(items)
                except StopIteration:
                    break
                results.put(("item", item))
                del item  # otherwise the item stays in memory while the next item is read
        except BaseException as e:  # raised in the other thread
            last = ("error", e)
        finally:
            items.close()
            results.put(last)

    thread = threading.Thread(target=read_items, name="onnxgrad-data", daemon=True)
    thread.start()
    asked = False
    try:
        while True:
            if not depth and not asked:
                free.release()
            asked = True
            try:
                kind, value = results.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if kind == "error":
                assert isinstance(value, BaseException)
                raise value
            if kind == "end":
                return
            if depth:
                free.release()
            yield value  # type: ignore[misc]
            del value
            asked = False
    finally:
        ended.set()
        free.release()
        thread.join(_JOIN_SECONDS)
