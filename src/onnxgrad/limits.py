"""Limits on the size of models and data files, each of which can be changed.

They keep a small file from taking all time or memory. See `LIMITS` for what each one counts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from onnxgrad.errors import ModelError, unknown


@dataclass(frozen=True)
class Limit:
    """A largest number, and what it counts."""

    default: int
    counts: str


LIMITS = {
    "nodes": Limit(
        75_000, "nodes of a model, those of subgraphs included, once its functions are inlined"
    ),
    "rank": Limit(64, "axes of a tensor"),
    "dense_elements": Limit(1 << 26, "elements of a sparse constant, zeros included"),
    "constant_elements": Limit(
        1 << 26, "elements of a result that nodes compute from smaller constants alone"
    ),
    "table_bytes": Limit(
        1 << 28, "bytes of a data file that is more than ten times smaller on disk"
    ),
}
_chosen: dict[str, int] = {}


def set_limits(**limits: int | None) -> None:
    """Change limits for the whole process: `set_limits(nodes=200_000)`.

    Args:
        **limits: new values by name, see `LIMITS`. None restores what the environment variable
            `ONNXGRAD_MAX_<NAME>` says, or the default.

    Raises:
        ValueError: an unknown name, or a value that is no positive integer.
    """
    for name, value in limits.items():
        if name not in LIMITS:
            raise unknown("limit", name, LIMITS)
        if value is not None:
            _positive(value, name)
    for name, value in limits.items():
        if value is None:
            _chosen.pop(name, None)
        else:
            _chosen[name] = value


def limit(name: str) -> int:
    """Return the value in force of the limit `name`."""
    if name in _chosen:
        return _chosen[name]
    variable = variable_of(name)
    text = os.environ.get(variable)
    return LIMITS[name].default if not text else _positive(text, variable)


def variable_of(name: str) -> str:
    """Return the environment variable that sets the limit `name`."""
    return f"ONNXGRAD_MAX_{name.upper()}"


def check_limit(name: str, count: int, what: str, error: type[Exception] = ModelError) -> None:
    """Raise `error` if `count` is above the limit `name`; `what` is the beginning of the message.

    Raises:
        ModelError: or `error`, with the ways to raise the limit.
    """
    most = limit(name)
    if count > most:
        number = str(count) if count < 10**18 else f"more than 10^{len(str(count)) - 1}"
        raise error(
            f"{what}: {number}, where the limit is {most}; raise it with "
            f"onnxgrad.set_limits({name}=...) or the environment variable {variable_of(name)}"
        )


def _positive(value: int | str, name: str) -> int:
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = 0
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"limit {name} must be a positive integer, not {value!r}")
    return number
