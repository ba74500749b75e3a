"""Ctrl-C, SIGTERM and SIGHUP, which stop a command without losing results."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP


class Stopped(KeyboardInterrupt):
    """Raised when a signal has asked the command to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.code = 128 + number  # as shells report it


class StopRequests:
    """A context manager in which signals that ask to stop raise `Stopped`.

    Only the first signal does, as another must not interrupt the clean-up. After `hold`, signals
    are only recorded, and `check` raises where nothing is lost. Signals that were ignored before
    stay ignored, as SIGHUP under nohup.
    """

    def __init__(self) -> None:
        self.request: Stopped | None = None
        self._held = False

    def __enter__(self) -> Self:
        self.request, self._held = None, False
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
            for number in (getattr(signal, name) for name in _NAMES if hasattr(signal, name)):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self.request = self.request or Stopped(number)
        if not self._held:
            self._held = True
            raise Stopped(number)

    def hold(self) -> None:
        """From now on, record signals for `check` instead of raising `Stopped`."""
        self._held = True

    def check(self) -> None:
        """Raise `Stopped` if a signal was received."""
        if self.request is not None:
            raise self.request

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Let signals raise `Stopped` within the block, such as during a prompt."""
        self._held = False
        try:
            yield
        finally:
            self._held = True
