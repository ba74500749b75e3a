"""Checks of arguments, and limits on the size of models and data files.

Every check of an argument takes the name of the argument first, which its message shows as users
write it. The limits prevent a small file from using all time or memory; `set_limits` changes them.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import partial
from math import inf
from operator import index
from typing import Any

from onnxgrad.errors import ModelError, named, unknown


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
    """Return `value` as a float; raise `ValueError` unless it is >= `least`, or > `least` if
    `strict`.

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


def check_fraction(name: str, value: Any) -> float:
    """Return `value` as a float; raise `ValueError` unless it is a number from 0 to 1."""
    if check_number(name, value) > 1:
        raise ValueError(f"{named(name)} must be from 0 to 1, not {value!r}")
    return float(value)


def check_choice(name: str, value: Any, choices: Collection[str]) -> Any:
    """Return `value`; raise `ValueError` if it is not in `choices`."""
    if value not in choices:
        raise unknown(named(name), value, choices)
    return value


def check_mapping(name: str, value: Any, form: str) -> dict[Any, Any]:
    """Return a copy of `value`, {} for None; raise `ValueError` if it is no mapping like `form`."""
    try:
        return dict(value or {})
    except (TypeError, ValueError):
        raise ValueError(f"{named(name)} must be a mapping {form}, not {value!r}") from None


LIMITS = {  # default of each limit; see `set_limits`
    "nodes": 75_000,
    "rank": 64,
    "dense_elements": 1 << 26,
    "constant_elements": 1 << 26,
    "table_bytes": 1 << 28,
}
_chosen: dict[str, int | None] = {}


def set_limits(**limits: int | None) -> None:
    """Change limits on the size of models and data files, for the whole process.

    A model beyond a limit raises `ModelError`, a data file beyond `table_bytes` a `ValueError`.

    Args:
        **limits: new values, positive integers, by name. None restores the value of the environment
            variable `ONNXGRAD_MAX_<NAME>`, or the default where it is not set. The names are

            - `nodes` (default 75,000): nodes of a model and of its subgraphs, after its functions
              were inlined;
            - `rank` (64): axes of a tensor;
            - `dense_elements` (2^26): elements of a sparse constant, zeros included;
            - `constant_elements` (2^26): elements of a result that nodes compute from smaller
              constants alone;
            - `table_bytes` (2^28): bytes of a data file that is more than ten times smaller on
              disk.

    Raises:
        ValueError: an unknown name, or a value that is not a positive integer; no limit is changed.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N] x) => (float[N] y) { h = Exp(x)  y = Neg(h) }''')
        >>> og.graph.set_limits(nodes=1)
        >>> try:
        ...     og.onnx_derivative(model)
        ... except og.ModelError:
        ...     print("too many nodes")
        too many nodes
        >>> og.graph.set_limits(nodes=None)  # restore the default
    """
    chosen = {}
    for name, value in limits.items():
        if name not in LIMITS:
            raise unknown("limit", name, LIMITS)
        chosen[name] = None if value is None else check_count(name, value)
    _chosen.update(chosen)


def current_limit(name: str) -> int:
    """Return the current value of the limit `name`: from `set_limits`, the environment, or the
    default.
    """
    if (chosen := _chosen.get(name)) is not None:
        return chosen
    variable = environment_variable(name)
    text = os.environ.get(variable, "")
    return check_count(variable, int(text) if text.isdecimal() else text) if text else LIMITS[name]


def environment_variable(name: str) -> str:
    """Return the name of the environment variable that sets the limit `name`."""
    return f"ONNXGRAD_MAX_{name.upper()}"


def check_limit(name: str, count: int, what: str, error: type[Exception] = ModelError) -> None:
    """Raise `error` if `count` is above the limit `name`.

    Args:
        name: a key of `LIMITS`.
        count: the size to check.
        what: the beginning of the message: the node, tensor or file, and its problem.
        error: class of the error, whose message says how to raise the limit.
    """
    maximum = current_limit(name)
    if count > maximum:
        number = str(count) if count < 10**18 else f"more than 10^{len(str(count)) - 1}"
        raise error(
            f"{what}: {number}, where the limit is {maximum}; raise it with "
            f"onnxgrad.graph.set_limits({name}=...) or the environment variable "
            f"{environment_variable(name)}"
        )
