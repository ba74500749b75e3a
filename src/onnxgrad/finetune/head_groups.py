"""Layers that belong together, as the heads of a detector, and how messages show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile

import onnx_ir as ir

from onnxgrad.errors import argument, node_text
from onnxgrad.finetune.layers import Layer

_LISTED = 8  # layers that a message names
_STEPS = 8  # nodes behind a layer that tell layers apart


def shortened(texts: Sequence[str]) -> str:
    """Return texts for messages, the first ones and how many there are more."""
    more = f", and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    return ", ".join(texts[:_LISTED]) + more


def nodes_text(nodes: Iterable[ir.Node]) -> str:
    """Return nodes for messages."""
    return shortened([node_text(node) for node in nodes])


def suggestions(layers: Iterable[Layer], constants: Iterable[str]) -> list[str]:
    """Return the arguments that name layers of equal units and the same place before the outputs.

    Args:
        layers: several layers.
        constants: the names of all constants of the model, among which a pattern chooses.
    """
    groups: dict[tuple, list[Layer]] = {}
    for layer in layers:
        groups.setdefault((layer.units, *_operators_behind(layer)), []).append(layer)
    named = list(constants)
    return [
        f"{argument('at', _pattern_of_weights(group, named))} "
        f"({len(group)} layers of {group[0].units} units)"
        for group in groups.values()
        if len(group) > 1
    ]


def _operators_behind(layer: Layer) -> list[tuple[str, int]]:
    """Return the operators behind `layer`, up to the first Concat, and which operand it is."""
    way: list[tuple[str, int]] = []
    value = layer.y
    while len(uses := list(value.uses())) == 1 and len(way) < _STEPS:
        [(node, index)] = uses
        way.append((node.op_type, index))
        if node.op_type == "Concat":
            break
        value = node.outputs[0]
    return way


def _pattern_of_weights(layers: Sequence[Layer], constants: Sequence[str]) -> str | list[str]:
    """Return the pattern that names the weights of `layers` and no others, or else their names."""
    names = list(dict.fromkeys(_weight_name(layer) for layer in layers))
    start = _common_prefix(names)
    end = _common_prefix([name[len(start) :][::-1] for name in names])[::-1]
    pattern = f"{start}*{end}" if len(names) > 1 else names[0]
    found = {name for name in constants if fnmatchcase(name, pattern)}
    return pattern if found == {*names} else names


def _common_prefix(texts: Iterable[str]) -> str:
    """Return the characters at the start that all texts have in common."""
    columns = zip(*texts, strict=False)
    return "".join(c for c, *_ in takewhile(lambda column: len({*column}) == 1, columns))


def _weight_name(layer: Layer) -> str:
    """Return the name of the weight of a layer, or else of its node or result."""
    node = layer.node
    if layer.weights and layer.weights[0].producer() is None:
        return str(layer.weights[0].name)
    return str(node.name or node.outputs[0].name)
