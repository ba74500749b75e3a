"""The logger "onnxgrad", and the levels that `verbose` and `enable_logging` enable in it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from html import escape
from threading import Lock
from types import FrameType

from onnxgrad.errors import printable

logger = logging.getLogger("onnxgrad")


def _escape_log_record(record: logging.LogRecord) -> bool:
    """Escape unprintable characters in a log record's message; return True, to log it."""
    text = record.getMessage()
    if not text.isprintable():
        record.msg, record.args = printable(text), None
    return True


logger.addFilter(_escape_log_record)


def escape_loggers(package: str) -> None:
    """Escape unprintable characters in messages of the existing loggers of `package`."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(f"{package}."):
            logging.getLogger(name).addFilter(_escape_log_record)


_SILENT = logging.CRITICAL + 1
# Level of the running call; calls in other threads do not report at it.
_call_level: ContextVar[int] = ContextVar("onnxgrad_level", default=_SILENT)


@lru_cache(maxsize=1000)
def warn_once(message: str) -> None:
    """Log the warning `message`, but only once per process."""
    logger.warning("%s", message)


def logging_level(verbose: int) -> int | None:
    """Return the logging level for the argument `verbose`: None for 0, INFO for 1, DEBUG for 2 or
    more.
    """
    return logging.DEBUG if verbose > 1 else logging.INFO if verbose else None


@contextmanager
def reporting(level: int | None) -> Iterator[None]:
    """In the block, log messages of `level` and above; with None, the logger's level is unchanged.

    They go to the handlers of the program, or to stderr if it has none. Messages that the program
    itself has enabled in the logger "onnxgrad" are reported in any case.
    """
    token = _call_level.set(_SILENT if level is None else level)
    try:
        if level is None:
            yield
            return
        _running_calls.add(level)
        try:
            yield
        finally:
            _running_calls.remove(level)
    finally:
        _call_level.reset(token)


class _RunningCallsFilter(logging.Filter):
    """A filter of the logger, which passes the records that running calls have enabled."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()
        self._levels: list[int] = []
        self._own = self._set = logging.NOTSET  # levels set by the program, and by this class
        self._was_disabled = False
        self._handler: logging.Handler | None = None

    def add(self, level: int) -> None:
        """Enable messages of `level` for a call that begins."""
        with self._lock:
            if not self._levels:
                self._attach_to_logger()
            self._levels.append(level)
            self._update_level()

    def remove(self, level: int) -> None:
        """Disable messages of `level` for a call that has ended."""
        with self._lock:
            self._levels.remove(level)
            self._update_level()
            if not self._levels:
                self._detach_from_logger()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether this thread's call, or the user's program, has enabled the
        record's level.
        """
        return record.levelno >= min(_call_level.get(), self._program_level())

    def _attach_to_logger(self) -> None:
        """Add this filter to the logger, and a stderr handler if the program has no handler."""
        self._own = self._set = logger.level
        self._was_disabled, logger.disabled = logger.disabled, False
        logger.addFilter(self)
        if not logger.hasHandlers():
            self._handler = logging.StreamHandler()
            logger.addHandler(self._handler)

    def _detach_from_logger(self) -> None:
        """Remove this filter, and the handler that `_attach_to_logger` added, from the logger."""
        if self._handler is not None:
            logger.removeHandler(self._handler)
            self._handler = None
        logger.removeFilter(self)
        logger.disabled = self._was_disabled

    def _update_level(self) -> None:
        """Set the logger's level to the lowest level of the running calls and of the user's
        program.

        The program may have changed its level since the last call.
        """
        if logger.level != self._set:
            self._own = logger.level
        self._set = min([*self._levels, self._program_level()]) if self._levels else self._own
        logger.setLevel(self._set)

    def _program_level(self) -> int:
        """Return the level that the user's program has set for the logger "onnxgrad"."""
        parent = logger.parent
        return self._own or (parent.getEffectiveLevel() if parent else logging.WARNING)


_running_calls = _RunningCallsFilter()


def frames_inside() -> int:
    """Return the count of stack frames, from the caller up, that belong to onnxgrad, for
    `stacklevel`.
    """
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("onnxgrad"):
        frame, count = frame.f_back, count + 1
    return count


def html_table(
    head: Sequence[str], rows: Iterable[Sequence[object]], notes: Iterable[str] = ()
) -> str:
    """Return an HTML table for notebooks with numbers aligned right, followed by the
    texts `notes`.
    """

    def table_cell(tag: str, value: object) -> str:
        text = escape(printable(value))
        number = text[:1].isdigit() or text[:2].strip("-")[:1].isdigit()
        return f'<{tag} style="text-align:{"right" if number else "left"}">{text}</{tag}>'

    lines = ["".join(table_cell("th", value) for value in head)]
    lines += ["".join(table_cell("td", value) for value in row) for row in rows]
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>{table}</table>" + "".join(f"<p>{escape(printable(n))}</p>" for n in notes)
