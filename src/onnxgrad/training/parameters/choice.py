"""Which weights train: those that a user names by patterns, or else the default ones."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import argument, named
from onnxgrad.model.notes import ADAPTERS, INPUTS, read_note
from onnxgrad.model.weights import FLOATS, constant_refs
from onnxgrad.training.parameters.defaults import announce_choice, default_rows, trained_names
from onnxgrad.training.parameters.equal_constants import separate_merged, trains_merged
from onnxgrad.training.parameters.named_integers import with_named_integers
from onnxgrad.training.parameters.patterns import Patterns, as_list, choose, matching


def choose_weights(proto: ModelProto, train: Patterns | None, freeze: Patterns = ()) -> list[str]:
    """Return the names of the weights to train, in the order of the graph.

    Args:
        proto: the model.
        train: names and patterns of `fnmatch`, see `trainable`; None: the weights that train by
            default.
        freeze: names and patterns of those that do not train.

    Raises:
        ValueError: a pattern that matches no float constant, or nothing is left to train.
    """
    train, freeze = None if train is None else as_list(train), as_list(freeze)
    if train is None and read_note(proto, INPUTS) and not read_note(proto, ADAPTERS):
        raise ValueError(
            f"the model is a base whose adapters are inputs: {named('add_lora')} puts new ones in "
            "their place, and load_adapter those of a file"
        )
    floats = float_constants(proto)
    if train is not None and set(floats).issuperset([*train, *freeze]):
        names = [name for name in floats if name in train and name not in freeze]
    else:
        rows = default_rows(proto)
        if train is None and not rows.trained:
            return trained_names(proto, rows)  # or an error
        rows = choose(rows, train, freeze)
        announce_choice(rows)
        names = [t.name for t in rows if t.trains]
    if not names:
        chosen = f"{argument('train', train)}, {argument('freeze', freeze)}"
        raise ValueError(f"nothing is left to train: {chosen}")
    return names


def separated_choice(
    proto: ModelProto, train: Patterns | None, freeze: Patterns, statistics: bool
) -> tuple[ModelProto, list[str]]:
    """Return the model to train, and the weights that `choose_weights` chooses in it.

    Parameters that an exporter merged are separated if one of them trains, or if there are running
    `statistics` to update. Stored integers that `train` names are brought into the form that
    trains.

    Raises:
        ValueError: as `choose_weights`, or `train` names a constant that holds no floats.
    """
    proto, train, freeze = with_named_integers(proto, train, freeze)
    separated = separate_merged(proto)
    _require_floats(separated, as_list(() if train is None else train))
    names = choose_weights(separated, train, freeze)
    return (separated if trains_merged(proto, separated, names) or statistics else proto), names


def float_constants(proto: ModelProto) -> list[str]:
    """Return the names of the float constants, in the order of the graph."""
    return [ref.name for ref in constant_refs(proto) if ref.read().data_type in FLOATS]


def matching_weights(proto: ModelProto, patterns: Patterns, kind: str) -> list[str]:
    """Return the float constants that one of the patterns names, in the order of the graph.

    Patterns match names and aliases, see `trainable`.

    Raises:
        ValueError: a pattern matches none; close names are listed. `kind` is what the message
            calls the patterns.
    """
    chosen = set(expand(proto, patterns, kind))
    return [name for name in float_constants(proto) if name in chosen]


def expand(
    proto: ModelProto, patterns: Patterns, kind: str, weights_first: bool = True
) -> list[str]:
    """Return the constants that the patterns name, in the order of the patterns, each once.

    With `weights_first`, a pattern chooses among the weights, if it matches any. Names may be those
    of constants that are no floats.

    Raises:
        ValueError: as `matching_weights`.
    """
    patterns = as_list(patterns)
    exact = {ref.name for ref in constant_refs(proto)}
    if exact.issuperset(patterns):
        return list(dict.fromkeys(patterns))
    rows = default_rows(proto)
    names: dict[str, None] = {}
    for pattern in patterns:
        if pattern in exact:
            names[pattern] = None
        else:
            names |= dict.fromkeys(t.name for t in matching(rows, pattern, kind, weights_first))
    return list(names)


def _require_floats(proto: ModelProto, names: Collection[str]) -> None:
    """Raise `ValueError` if one of `names` is that of a constant which holds no floats."""
    for ref in constant_refs(proto):
        if ref.name in names and (code := ref.read().data_type) not in FLOATS:
            dtype = ir.DataType(code).name.lower()
            raise ValueError(
                f"{ref.name!r} holds {dtype}: only floats train. A quantized weight stays as it "
                "is: train adapters beside it (add_lora), a new head (replace_head) or biases"
            )
