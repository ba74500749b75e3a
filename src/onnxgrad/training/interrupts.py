"""Ctrl-C and SIGTERM take effect between two steps, so that the state is never half updated."""

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
    one was raised, further signals wait for the end of the next such block, so that they do not
    interrupt saving the state. Only the main thread gets signals; handlers that the program has set
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
                    previous[number] = signal.signal(number, self._handle_signal)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold signals back inside of the block, which may be nested; raise one at the end."""
        self._held, self._depth = True, self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            self._held = self._depth > 0
        if self._waiting is not None and not self._held:
            number, self._waiting = self._waiting, None
            self._raise_signal(number)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Keep the first signal inside of `held`, and raise it elsewhere."""
        if self._held:
            self._waiting = self._waiting or number
        else:
            self._raise_signal(number)

    def _raise_signal(self, number: int) -> None:
        """Raise `SystemExit` or `KeyboardInterrupt`, and hold further signals back."""
        self._held = True
        if number == signal.SIGTERM:
            raise SystemExit(128 + number)
        raise KeyboardInterrupt
