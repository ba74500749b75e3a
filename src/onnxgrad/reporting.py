"""What `verbose` and `enable_logging` ask for: the logger of the package, and when it reports."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock

from onnxgrad.errors import printable

logger = logging.getLogger("onnxgrad")


def _escape(record: logging.LogRecord) -> bool:
    """Make a message printable, as names are shown in it."""
    text = record.getMessage()
    if not text.isprintable():
        record.msg, record.args = printable(text), None
    return True


logger.addFilter(_escape)


def escape_loggers(package: str) -> None:
    """Make the messages of the loggers that another package has by now printable."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(f"{package}."):
            logging.getLogger(name).addFilter(_escape)


_SILENT = logging.CRITICAL + 1
# of the running call, so that calls in other threads do not report what this one asks for
_asked: ContextVar[int] = ContextVar("onnxgrad_level", default=_SILENT)
_quiet: ContextVar[bool] = ContextVar("onnxgrad_quiet", default=False)


def level_of(verbose: int) -> int | None:
    """Return the level that `verbose` asks for: DEBUG from 2 on, INFO for 1, None for 0."""
    return logging.DEBUG if verbose > 1 else logging.INFO if verbose else None


@contextmanager
def reporting(level: int | None) -> Iterator[None]:
    """Report messages of `level` and above while this is active; None asks for nothing.

    They go to the handlers of the program, or to stderr where it has none. What the program itself
    asks of the logger "onnxgrad" it gets in any case.
    """
    token = _asked.set(_SILENT if level is None else level)
    try:
        if level is None:
            yield
            return
        _active.add(level)
        try:
            yield
        finally:
            _active.remove(level)
    finally:
        _asked.reset(token)


class _Active(logging.Filter):
    """The levels of the calls that report now; as a filter, it passes what the caller asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()
        self._levels: list[int] = []
        self._own = self._set = logging.NOTSET  # the level of the program, and the one set here
        self._was_disabled = False
        self._handler: logging.Handler | None = None

    def add(self, level: int) -> None:
        """Enable the logger for `level`."""
        with self._lock:
            if not self._levels:
                self._begin()
            self._levels.append(level)
            self._apply()

    def remove(self, level: int) -> None:
        """Undo `add`."""
        with self._lock:
            self._levels.remove(level)
            self._apply()
            if not self._levels:
                self._end()

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether the running call, or the program, asks for `record`."""
        return record.levelno >= min(_asked.get(), self._level_of_program())

    def _begin(self) -> None:
        self._own = self._set = logger.level
        self._was_disabled, logger.disabled = logger.disabled, False
        logger.addFilter(self)
        if not logger.hasHandlers():
            self._handler = logging.StreamHandler()
            logger.addHandler(self._handler)

    def _end(self) -> None:
        if self._handler is not None:
            logger.removeHandler(self._handler)
            self._handler = None
        logger.removeFilter(self)
        logger.disabled = self._was_disabled

    def _apply(self) -> None:
        """Set the level that all active calls need; one that the program set meanwhile counts."""
        if logger.level != self._set:
            self._own = logger.level
        self._set = min([*self._levels, self._level_of_program()]) if self._levels else self._own
        logger.setLevel(self._set)

    def _level_of_program(self) -> int:
        parent = logger.parent
        return self._own or (parent.getEffectiveLevel() if parent else logging.WARNING)


_active = _Active()


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the loggers of `hush` silent in this thread."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


def hush(name: str) -> None:
    """Have the logger `name`, of another package, silent inside of `quiet`."""
    logging.getLogger(name).addFilter(lambda record: not _quiet.get())
