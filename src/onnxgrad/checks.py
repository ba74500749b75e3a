"""Checks of arguments: whole numbers, numbers, fractions and choices; each returns the value.

Every check takes the name of the argument first, which its message shows as users call it.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from math import inf
from operator import index
from typing import Any

from onnxgrad.errors import named, unknown


def _is_truth_value(value: Any) -> bool:
    """Return whether `value` is a bool of Python or numpy, which must not count as 0 or 1."""
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    return isinstance(value, bool) or kind == "b"


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Return `value` as an int; raise `ValueError` unless it is a whole number >= `least`."""
    try:
        if _is_truth_value(value):
            raise TypeError
        count = index(value)
    except TypeError:
        count = least - 1
    if count < least:
        raise ValueError(f"{named(name)} must be a whole number, {least} or more, not {value!r}")
    return count


def check_number(
    name: str, value: Any, least: float = 0.0, strict: bool = False, infinite: bool = False
) -> float:
    """Return `value` as a float; raise `ValueError` unless it is >= `least` (`strict`: >).

    NaN, texts and truth values are no numbers, and infinity is one if `infinite`.
    """
    bound = f"above {least:g}" if strict else f"of {least:g} or more"
    try:
        if _is_truth_value(value) or isinstance(value, str):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{named(name)} must be a number {bound}, not {value!r}") from None
    if not (number > least or (number == least and not strict)) or (number == inf and not infinite):
        kind = "number" if infinite else "finite number"
        raise ValueError(f"{named(name)} must be a {kind} {bound}, not {value!r}")
    return number


check_positive = partial(check_number, strict=True)


def check_share(name: str, value: Any) -> float:
    """Return `value` as a float; raise `ValueError` unless it is a number from 0 to 1."""
    if check_number(name, value) > 1:
        raise ValueError(f"{named(name)} must be from 0 to 1, not {value!r}")
    return float(value)


def check_choice(name: str, value: Any, choices: Collection[str]) -> Any:
    """Return `value`; raise `ValueError` if it is not in `choices`."""
    if value not in choices:
        raise unknown(named(name), value, choices)
    return value
