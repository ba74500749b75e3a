"""Stored integers that arguments name as weights to train."""

from __future__ import annotations

from fnmatch import fnmatchcase

from onnx import ModelProto

from onnxgrad.training.modes.stored_integers import Stored, as_floats, stored
from onnxgrad.training.parameters.patterns import Patterns, as_list


def with_named_integers(
    proto: ModelProto, train: Patterns | None, freeze: Patterns
) -> tuple[ModelProto, Patterns | None, Patterns]:
    """Return a model in which the stored integers that `train` names are floats that are rounded.

    `train` and `freeze` name them as the floats that they become, or as they are stored; in the
    returned ones, they are named as floats. Without `train`, stored integers stay.
    """
    if train is None:
        return proto, train, freeze
    train, freeze = as_list(train), as_list(freeze)
    found = stored(proto)
    chosen = {
        entry.tensor.name: entry.weight
        for entry in found
        if _named(entry, train) and not _named(entry, freeze)
    }
    if not chosen:
        return proto, train, freeze
    model = as_floats(proto, chosen, {})
    return model, [chosen.get(name, name) for name in train], freeze


def _named(entry: Stored, patterns: list[str]) -> bool:
    names = entry.tensor.name, entry.weight
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
