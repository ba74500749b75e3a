"""The weights that patterns choose for adapters."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from onnx import ModelProto

from onnxgrad.adapters.dora import unfit
from onnxgrad.adapters.uses import Target
from onnxgrad.errors import argument, printable
from onnxgrad.model.notes import HEAD, read_adapters, read_note
from onnxgrad.model.scopes import name_of_floats
from onnxgrad.reporting import frames_inside, logger
from onnxgrad.training.parameters.choice import integer_rows, matching_weights
from onnxgrad.training.parameters.table import more

_LISTED = 4  # reasons that a message gives


def chosen_targets(
    proto: ModelProto,
    targets: dict[str, Target],
    patterns: str | Iterable[str],
    options: Mapping[str, Any],
) -> dict[str, Target]:
    """Return the constants that the patterns match and that can have an adapter, in graph order.

    Raises:
        ValueError: a pattern matches nothing, or nothing that can have an adapter.
    """
    reasons = _reasons(proto, targets, options)
    quantized = [name for name, target in targets.items() if target.quantized]
    aliases = {row.name: row.alias for row in integer_rows(proto)} if quantized else {}
    own = {name for note in read_adapters(proto) for name in note["tensors"]}
    chosen: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matched = {n for n in quantized if _matches(pattern, n, aliases.get(n, ""))}
        try:
            matched |= set(matching_weights(proto, [pattern], "weight for an adapter")) - own
        except ValueError:
            if not matched:
                raise
        possible = {name for name in matched if name not in reasons}
        if not possible:
            told = [
                f"{printable(n)!r}: {reasons[n]}" for n in targets if n in matched & set(reasons)
            ]
            raise ValueError(
                f"nothing that {pattern!r} matches can have an adapter: "
                f"{'; '.join(told[:_LISTED]) or 'it matches adapters, or no factors of products'}"
                f"{more(told, _LISTED)}"
            )
        chosen |= possible
        for name in sorted(matched & set(reasons)):
            logger.info("no adapter for %s: %s", printable(name), reasons[name])
        missed = [n for n in targets if n in matched and n in reasons and targets[n].missed]
        if missed:
            listed = "; ".join(f"{printable(n)!r}: {reasons[n]}" for n in missed[:_LISTED])
            warnings.warn(
                f"layers that {pattern!r} matches get no adapter: {listed}{more(missed, _LISTED)}",
                stacklevel=frames_inside() + 1,
            )
    if not chosen:
        raise ValueError("no patterns: name the weights that get an adapter")
    return {name: target for name, target in targets.items() if name in chosen}


def _matches(pattern: str, *names: str) -> bool:
    """Return whether a pattern means a quantized weight, by its name or by that of its floats."""
    names = (*names, *map(name_of_floats, names))
    return any(n == pattern or fnmatchcase(n, pattern) for n in names if n)


def _reasons(
    proto: ModelProto, targets: dict[str, Target], options: Mapping[str, Any]
) -> dict[str, str]:
    """Return why constants cannot have an adapter, by name."""
    reasons = {name: target.reason for name, target in targets.items() if target.reason}
    for name, target in targets.items():
        group = target.uses[0].group if target.uses else 1
        if name in reasons:
            continue
        if options["rank"] % group:
            reasons[name] = (
                f"it has {group} groups, and {argument('rank', options['rank'])} is no multiple"
            )
        elif options["use_dora"] and (reason := unfit(target)):
            reasons[name] = reason
    for name in read_note(proto, HEAD):
        reasons[name] = "it belongs to the new head, which trains as a whole"
    for note in read_adapters(proto):
        reasons[note["weight"]] = "it has an adapter already"
        reasons |= dict.fromkeys(note["tensors"], "it belongs to an adapter")
    return reasons
