"""Ctrl-C and SIGTERM while training: they take effect between two steps.

So the state is never half updated.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """Holds signals back inside of `with interrupts.held():`, and raises them after it.

    Elsewhere they are raised at once: Ctrl-C as `KeyboardInterrupt`, SIGTERM as `SystemExit`. After
    one was raised, others wait for the end of the next such block, so that they do not interrupt
    what saves the state. Only the main thread gets signals; handlers that somebody else has set
    stay.
    """

    def __init__(self) -> None:
        self._held, self._depth = False, 0
        self._waiting: int | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle signals inside of the block."""
        previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            own: dict[int, Any] = {
                signal.SIGINT: signal.default_int_handler,
                signal.SIGTERM: signal.SIG_DFL,
            }
            for number, default in own.items():
                if signal.getsignal(number) is default:
                    previous[number] = signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold signals back inside of the block, which may be in another; raise one at its end."""
        self._held, self._depth = True, self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            self._held = self._depth > 0
        if self._waiting is not None and not self._held:
            number, self._waiting = self._waiting, None
            self._raise(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            self._waiting = self._waiting or number
        else:
            self._raise(number)

    def _raise(self, number: int) -> None:
        self._held = True
        if number == signal.SIGTERM:
            raise SystemExit(128 + number)
        raise KeyboardInterrupt
