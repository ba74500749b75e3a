"""Arguments with a value for each member of a stack, and the weights with which members begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from onnxgrad.checks import check_choice, check_count
from onnxgrad.errors import printable, unknown

Arrays = dict[str, np.ndarray]


def _redraw_weight(rng: np.random.Generator, w: np.ndarray) -> np.ndarray:
    """Return a weight drawn from the normal distribution of its elements; a vector unchanged."""
    if w.ndim < 2:
        return w
    values = np.asarray(w, np.float64)
    return rng.normal(values.mean(), values.std(), w.shape).astype(w.dtype)


def glorot(rng: np.random.Generator, w: np.ndarray) -> np.ndarray:
    """Return a weight drawn by the rule of Glorot & Bengio (2010); a vector unchanged.

    Elements are uniform from -l to l, l = sqrt(6 / (fan in + fan out)).
    """
    if w.ndim < 2:
        return w
    limit = np.sqrt(6 / ((w.shape[0] + w.shape[1]) * prod(w.shape[2:])))
    return rng.uniform(-limit, limit, w.shape).astype(w.dtype)


_INITS: Mapping[str, Callable[[np.random.Generator, np.ndarray], np.ndarray]] = {
    "model": lambda rng, w: w,
    "redrawn": _redraw_weight,
    "glorot": glorot,
}


def initial_weights(own: Arrays, members: int, init: str, seed: int) -> list[Arrays]:
    """Return the weights with which each member begins.

    Args:
        own: the weights of the model.
        members: the number of members.
        init: "model": the weights of the model. "redrawn": a weight with two or more axes is drawn
            from the normal distribution with the mean and standard deviation of its elements.
            "glorot": it is drawn by Glorot's rule. Weights with one axis, such as biases, stay.
        seed: of the draws: member k draws by the seed (`seed`, k), whatever the number of members.
    """
    check_choice("init", init, tuple(_INITS))
    generators = [np.random.default_rng([seed, 2, k]) for k in range(members)]
    return [{name: _INITS[init](rng, w) for name, w in own.items()} for rng in generators]


def given_weights(own: Arrays, weights: Sequence[Mapping[str, Any]]) -> list[Arrays]:
    """Return the weights of each member; weights that are not given are the model's.

    Raises:
        ValueError: a weight that does not train, or of another shape.
    """
    members = []
    for k, given in enumerate(weights):
        new = dict(own)
        for name, value in given.items():
            if name not in own:
                raise unknown(f"weight of member {k}", name, own)
            array = np.asarray(value)
            if array.shape != own[name].shape:
                raise ValueError(
                    f"weights[{k}][{printable(name)!r}] has the shape {array.shape}, "
                    f"not {own[name].shape}"
                )
            new[name] = array.astype(own[name].dtype)
        members.append(new)
    return members


def per_member(name: str, value: Any, members: int) -> list[Any]:
    """Return an argument for each member: the elements of a list, or one value for all.

    Raises:
        ValueError: a list of another length.
    """
    if not is_list(value):
        return [value] * members
    if len(value) != members:
        raise ValueError(f"{name} has {len(value)} elements for {members} members")
    return list(value)


def is_list(value: Any) -> bool:
    """Return whether an argument has a value for each member."""
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim == 1)


def count_members(members: int | None, **lists: Any) -> int:
    """Return the number of members: `members`, or the length of the first list.

    Raises:
        ValueError: neither; a number below 1.
    """
    if members is not None:
        return check_count("members", members)
    for value in lists.values():
        if is_list(value):
            return check_count("members", len(value))
    raise ValueError(f"pass members=, their number, or a list for one of {', '.join(lists)}")
