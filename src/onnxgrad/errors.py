"""The errors that are this package's own; every message names what is wrong and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ModelError(ValueError):
    """The given model cannot be read: not an ONNX file, truncated, or its data is missing."""


class NoGradientRule(NotImplementedError):
    """A gradient arrives at an operator for which no rule is known."""


class ConvergenceError(RuntimeError):
    """The loss became NaN or infinite. The state before that is kept."""


class ConvergenceWarning(UserWarning):
    """The loss became NaN or infinite, and the caller asked not to be stopped by that."""


class EvaluationError(RuntimeError):
    """A loss or penalty cannot be evaluated: what computes it was not built yet."""


class ProviderError(ValueError):
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
