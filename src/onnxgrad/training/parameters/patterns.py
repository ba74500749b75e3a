"""Names and patterns that a user writes, matched with tensors and with stored integers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from onnx import ModelProto

from onnxgrad.errors import argument, printable, unknown
from onnxgrad.training.modes.stored_integers import Stored, as_floats, stored
from onnxgrad.training.parameters.table import Tensor, Tensors

Patterns = str | Iterable[str]


def as_list(patterns: Patterns) -> list[str]:
    """Return patterns as a list; a string is one pattern."""
    return [patterns] if isinstance(patterns, str) else list(patterns)


def matching(
    rows: Sequence[Tensor], pattern: str, kind: str, weights_first: bool = True
) -> list[Tensor]:
    """Return the tensors that `pattern` names, in their order.

    A name counts before an alias, and both before patterns of `fnmatch`, which match either. A
    pattern with `weights_first` chooses among the weights, and only if it matches none of them,
    among the other constants: "layer4.*" means no constants of its formulas.

    Raises:
        ValueError: none matches; close names and aliases are listed. `kind` is the noun of the
            message for the pattern.
    """
    for exact in ([t for t in rows if t.name == pattern], [t for t in rows if t.alias == pattern]):
        if exact:
            return exact
    matched = [t for t in rows if any(fnmatchcase(name, pattern) for name in t.names)]
    if not matched:
        ordered = sorted(rows, key=lambda t: not t.is_weight)
        names = [name for t in ordered for name in reversed(t.names)]
        raise unknown(kind, pattern, names, _close_names(pattern, names))
    weights = [t for t in matched if t.is_weight] if weights_first else []
    return weights or matched


def choose(rows: Tensors, train: Patterns | None, freeze: Patterns) -> Tensors:
    """Return the tensors with the decisions that follow from the arguments, and the reasons.

    Raises:
        ValueError: a pattern that matches no tensor.
    """
    patterns = [] if train is None else as_list(train)
    named = _patterns_by_name(rows, patterns, "train")
    frozen = _patterns_by_name(rows, as_list(freeze), "freeze", weights_first=False)
    chosen = Tensors()
    for t in rows:
        if t.name in frozen:
            why = f"frozen by {argument('freeze', frozen[t.name])}; {t.why}"
            t = replace(t, trains=False, why=printable(why), doubtful=False)
        elif t.name in named:
            why = f"named by {argument('train', named[t.name])}; {t.why}"
            t = replace(t, trains=True, why=printable(why), doubtful=False)
        elif train is not None:
            why = f"not named by {argument('train')}; {t.why}" if t.is_weight else t.why
            left = t.doubtful and any(fnmatchcase(n, p) for n in t.names for p in patterns)
            t = replace(t, trains=False, why=why, doubtful=left)
        chosen.append(t)
    return chosen


def _patterns_by_name(
    rows: Tensors, patterns: Sequence[str], option: str, weights_first: bool = True
) -> dict[str, str]:
    """Return the first pattern that names a tensor, by the name of the tensor."""
    kind = f"weight ({argument(option)})"
    return {
        t.name: pattern
        for pattern in reversed(patterns)
        for t in matching(rows, pattern, kind, weights_first)
    }


def _close_names(pattern: str, names: Sequence[str]) -> list[str]:
    """Return up to three names that have a part like the text of `pattern`."""
    text = re.sub(r"[*?]+", "*", pattern).strip("*./").lower()
    parts: dict[str, str] = {}
    count = len(re.split(r"[./]", text))
    for name in names:
        split = re.split(r"[./]", name.lower())
        for i in range(len(split) - count + 1):
            parts.setdefault(".".join(split[i : i + count]), name)
    close = difflib.get_close_matches(text.replace("/", "."), parts, n=3, cutoff=0.6)
    return [parts[part] for part in close]


def with_named_integers(
    proto: ModelProto, train: Patterns | None, freeze: Patterns
) -> tuple[ModelProto, Patterns | None, Patterns]:
    """Return a model in which the stored integers that `train` names are floats that are rounded.

    `train` and `freeze` have names of the floats that they become, or names of the file; the
    returned arguments name them as floats. Without `train`, stored integers stay.
    """
    if train is None:
        return proto, train, freeze
    train, freeze = as_list(train), as_list(freeze)
    found = stored(proto)
    chosen = {
        entry.tensor.name: entry.weight
        for entry in found
        if _is_named(entry, train) and not _is_named(entry, freeze)
    }
    if not chosen:
        return proto, train, freeze
    model = as_floats(proto, chosen, {})
    return model, [chosen.get(name, name) for name in train], freeze


def _is_named(entry: Stored, patterns: list[str]) -> bool:
    names = entry.tensor.name, entry.weight
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
