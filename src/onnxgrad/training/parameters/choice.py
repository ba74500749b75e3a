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
    floats = [ref.name for ref in constant_refs(proto) if ref.read().data_type in FLOATS]
    if train is None:
        chosen = set(default_weights(proto, announce=True))
    else:
        chosen = matching(floats, train, "weight (train=)")
    frozen = matching(floats, freeze, "weight (freeze=)")
    names = [name for name in floats if name in chosen - frozen]
    if not names:
        raise ValueError(f"nothing is left to train: train={train!r}, freeze={freeze!r}")
    return names


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
