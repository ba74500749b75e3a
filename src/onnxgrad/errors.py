"""The errors that are this package's own; every message names what is wrong and the remedy.

Names come from files: what a terminal would act on is escaped wherever they are shown.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any


def printable(text: object) -> str:
    """Return `text` with escapes such as `\\x1b` for what cannot be seen: a name, on one line.

    These are line ends, other control characters, those that change the direction of text or have
    no width, and those that are no characters.
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def printable_lines(text: object) -> str:
    """Return `text` as `printable`, with its line feeds: a message."""
    return "\n".join(map(printable, str(text).split("\n")))


def escape(error: BaseException | None) -> None:
    """Make the messages of an error, and of those that it came from, printable."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        shown = [printable_lines(a) if isinstance(a, str) else a for a in error.args]
        if shown != [*error.args]:
            error.args = tuple(shown)
        error = error.__cause__ or error.__context__


@contextmanager
def escaping() -> Iterator[None]:
    """Make the messages of errors printable: those of onnx and onnxruntime show names as they are.

    As a decorator, it does so for a function.
    """
    try:
        yield
    except Exception as e:
        escape(e)
        raise


class PrintableError(Exception):
    """An error whose message is printable."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable_lines(a) if isinstance(a, str) else a for a in args))


class ModelError(PrintableError, ValueError):
    """The given model cannot be read: not an ONNX file, truncated, or its data is missing."""


class NoGradientRule(PrintableError, NotImplementedError):
    """A gradient arrives at an operator for which no rule is known."""


class ConvergenceError(PrintableError, RuntimeError):
    """The loss became NaN or infinite. The state before that is kept."""


class ConvergenceWarning(PrintableError, UserWarning):
    """The loss became NaN or infinite, and the caller asked not to be stopped by that."""


class EvaluationError(PrintableError, RuntimeError):
    """A loss or penalty cannot be evaluated: what computes it was not built yet."""


class ProviderError(PrintableError, ValueError):
    """The requested device has no execution provider in the installed onnxruntime."""


def first_line(error: Exception) -> str:
    """Return what `error` says, in one line, without the source file of an assertion in C++."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rpartition("` failed: ")[2]


def unknown(kind: str, name: object, valid: Iterable[str]) -> ValueError:
    """Return the error for a name that is not among `valid`, with the close ones first."""
    names = [str(v) for v in valid]
    lower = {n.lower(): n for n in names}
    found = difflib.get_close_matches(str(name).lower(), lower, n=3, cutoff=0.5)
    close = [lower[n] for n in found]
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    listed = ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")
    return ValueError(f"Unknown {kind} {name!r}.{hint} Valid: {listed or 'none'}.")


def check_options(
    what: str, options: Iterable[str], function: Callable[..., Any], skip: int = 0
) -> None:
    """Raise `ValueError` if an option is not a parameter of `function`.

    Args:
        what: what the message calls an option, such as "option of loss 'huber'".
        options: names of options.
        function: function or class that takes the options by name.
        skip: number of leading parameters that are not options.
    """
    valid = list(signature(function).parameters)[skip:]
    for name in options:
        if name not in valid:
            raise unknown(what, name, valid)
