"""Which weights train: those that a user names by patterns, or else the default ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from onnx import ModelProto

from onnxgrad.errors import unknown
from onnxgrad.model.weights import FLOATS, constant_refs
from onnxgrad.training.parameters.defaults import default_weights


def choose_weights(
    proto: ModelProto, train: str | Iterable[str] | None, freeze: str | Iterable[str]
) -> list[str]:
    """Return the names of the weights to train, in the order of the graph.

    Args:
        proto: the model.
        train: names and patterns of `fnmatch`; None: the weights that train by default.
        freeze: names and patterns of those that do not train.

    Raises:
        ValueError: a pattern that matches no float constant, or nothing is left to train.
    """
    if train is None:
        chosen = set(default_weights(proto, announce=True))
    else:
        chosen = set(matching_weights(proto, train, "weight (train=)"))
    frozen = matching_weights(proto, freeze, "weight (freeze=)")
    names = [name for name in float_constants(proto) if name in chosen and name not in frozen]
    if not names:
        raise ValueError(f"nothing is left to train: train={train!r}, freeze={freeze!r}")
    return names


def float_constants(proto: ModelProto) -> list[str]:
    """Return the names of the float constants, in the order of the graph."""
    return [ref.name for ref in constant_refs(proto) if ref.read().data_type in FLOATS]


def matching_weights(proto: ModelProto, patterns: str | Iterable[str], kind: str) -> list[str]:
    """Return the float constants that one of the patterns names, in the order of the graph.

    Raises:
        ValueError: a pattern matches none; close names are listed.
    """
    floats = float_constants(proto)
    chosen = matching(floats, patterns, kind)
    return [name for name in floats if name in chosen]


def matching(names: Sequence[str], patterns: str | Iterable[str], kind: str) -> set[str]:
    """Return the names that equal one of the patterns or match it.

    Raises:
        ValueError: a pattern matches none; close names are listed.
    """
    chosen: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matched = {pattern} & set(names) or {n for n in names if fnmatchcase(n, pattern)}
        if not matched:
            raise unknown(kind, pattern, names)
        chosen |= matched
    return chosen
