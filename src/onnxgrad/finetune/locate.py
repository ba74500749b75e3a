"""Find the layers to replace: the last layer before an output, or layers that a user names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import argument, join_first, named, node_text, unknown
from onnxgrad.finetune.layers import Layer, data_values, is_product, layer_of
from onnxgrad.graph.traversal import all_nodes, captured, subgraphs
from onnxgrad.model.constants import normalize_domain
from onnxgrad.model.notes import ADAPTERS, INPUTS, read_metadata
from onnxgrad.training.parameters.choice import matching_weights
from onnxgrad.training.parameters.flow import value_operands

_LISTED = 8  # most layers in a message
_STEPS = 8  # nodes behind a layer that are compared to group layers


class LayerSearch:
    """A search for the layers to replace, in a graph whose shapes are inferred.

    Args:
        graph: the main graph of the model.
        proto: the model.
    """

    def __init__(self, graph: ir.Graph, proto: ModelProto) -> None:
        self.graph, self.proto = graph, proto
        self.data = data_values(graph)
        notes = [*read_metadata(proto, ADAPTERS), *read_metadata(proto, INPUTS)]
        self.adapted = {name for note in notes for name in (note["weight"], *note["tensors"])}

    def last_layer(self, outputs: Iterable[ir.Value]) -> Layer:
        """Return the last layer before the values `outputs`; raise `ValueError` if there are
        several such layers or none.

        Raises:
            ValueError: no layer precedes the outputs, several do, or the layer cannot be replaced.
        """
        chosen = list(outputs)
        layers, reasons = self._search_last_layers(chosen)
        self._refuse_adapted_layers(layers)
        if len(layers) == 1 and not reasons:
            return layers[0]
        names = ", ".join(repr(y.name) for y in chosen)
        if not layers and len(reasons) == 1:
            [(node, reason)] = reasons.items()
            raise ValueError(
                f"the last layer before {names}, {node_text(node)}, cannot be "
                f"replaced: {reason}. Name another layer by {argument('at')}"
            )
        if not layers and not reasons:
            raise ValueError(
                f"no linear or convolutional layer precedes {names}: put a new head behind a value "
                f"of the model by {named('add_head')}"
            )
        hint = f"name one by {argument('at')}"
        if groups := _suggest_layer_groups(layers, list(self.graph.initializers)):
            hint += f", or layers that are replaced together: {' or '.join(groups)}"
        if len(chosen) > 1:
            hint += f", or the output by {argument('output')}, one of {[y.name for y in chosen]}"
        raise ValueError(
            f"several layers are the last before {names}: "
            f"{nodes_text([*(layer.node for layer in layers), *reasons])}; "
            f"{hint}; where they are added up, as in a residual block, put a new head behind the "
            f"output by {named('add_head')}"
        )

    def _search_last_layers(
        self, outputs: Iterable[ir.Value]
    ) -> tuple[list[Layer], dict[ir.Node, str]]:
        """Return the last layers before `outputs`, and `{node: reason}` of last nodes that cannot
        be replaced.
        """
        layers: dict[ir.Node, Layer] = {}
        reasons: dict[ir.Node, str] = {}
        stack, seen = list(outputs), set[ir.Value]()
        while stack:
            value = stack.pop()
            node = value.producer()
            if node is None or value in seen or value not in self.data:
                continue
            seen.add(value)
            layer = layer_of(node, self.data)
            if isinstance(layer, Layer):
                layers[node] = layer
            elif layer is not None:
                reasons[node] = layer
            elif node.op_type.startswith("TreeEnsemble"):
                reasons[node] = (
                    f"trees have no layer: put a head in their place by {named('add_head')}"
                )
            elif any(is_product(n) for g in subgraphs(node) for n in all_nodes(g)):
                reasons[node] = "it is in a subgraph, which may be computed several times or never"
            else:
                stack += [*value_operands(node), *captured(node)]
        order = {node: i for i, node in enumerate(self.graph)}
        return sorted(layers.values(), key=lambda layer: order[layer.node]), reasons

    def _refuse_adapted_layers(self, layers: Iterable[Layer]) -> None:
        """Raise `ValueError` for a layer that has an adapter or belongs to an adapter."""
        for layer in layers:
            if not self.adapted.isdisjoint(_constants_of_layer(layer)):
                raise ValueError(
                    f"{node_text(layer.node)} is part of a layer with an adapter: replace the head "
                    "of the model before adapters are added; or merge the adapters "
                    f"({named('merge_lora')}) first"
                )

    def named_layers(self, names: Sequence[str]) -> list[Layer]:
        """Return the layers whose node, result or weights have one of the names `names`, in the
        order of `names`.

        Raises:
            ValueError: there is no such layer, it cannot be replaced, or several have different
                numbers of units.
        """
        if not names:
            raise ValueError(f"{argument('at', names)}: pass the name of at least one layer")
        nodes = dict.fromkeys(node for at in names for node in self._nodes_of_named_layers(at))
        layers = []
        for node in nodes:
            layer = layer_of(node, self.data)
            if not isinstance(layer, Layer):
                reason = layer or "it is no linear or convolutional layer with constant weights"
                raise ValueError(
                    f"{_format_at_argument(names)} names {node_text(node)}, which cannot be "
                    f"replaced: {reason}"
                )
            layers.append(layer)
        if len({(layer.units, layer.kind) for layer in layers}) > 1:
            listed = [f"{node_text(y.node)} ({y.units} units)" for y in layers]
            raise ValueError(
                f"{_format_at_argument(names)} names layers that differ in their units: "
                f"{join_first(listed, _LISTED)}; name one layer, or the layers of the classes"
            )
        self._refuse_adapted_layers(layers)
        return layers

    def _nodes_of_named_layers(self, at: str) -> list[ir.Node]:
        """Return the nodes of the layers whose node, result or weights have the name `at`."""
        nodes = [n for n in self.graph if n.name == at] or [
            n for n in self.graph if at in [y.name for y in n.outputs]
        ]
        layers = [y for n in self.graph if isinstance(y := layer_of(n, self.data), Layer)]
        products = {y.add: y.node for y in reversed(layers)}  # layers whose bias an Add node adds
        return [products.get(node, node) for node in nodes or self._layers_reading_constants(at)]

    def _layers_reading_constants(self, at: str) -> list[ir.Node]:
        """Return the nodes of the layers whose weights are constants that `at` names, perhaps
        transposed or cast.
        """
        layers = {n: y for n in self.graph if isinstance(y := layer_of(n, self.data), Layer)}
        constants = self._constants_by_pattern(at) or self._constants_by_pattern(f"{at}.weight")
        if not constants:
            if found := [n for n in layers if fnmatchcase(str(n.name), at)]:
                return found
            known = [str(n.name or n.outputs[0].name) for n in layers]
            raise unknown(f"layer ({argument('at')})", at, known)
        readers = [n for n, y in layers.items() if not constants.isdisjoint(_constants_of_layer(y))]
        if not readers:
            listed = join_first(sorted(map(repr, constants)), _LISTED)
            raise ValueError(
                f"{argument('at', at)} names {listed}, and no layer of the main graph that can be "
                "replaced reads these weights: name a linear or convolutional layer"
            )
        return readers

    def _constants_by_pattern(self, at: str) -> set[str]:
        """Return the names of the float constants that the name or pattern `at` matches."""
        try:
            return set(matching_weights(self.proto, [at], f"layer ({argument('at')})"))
        except ValueError:
            return set()


def _format_at_argument(names: Sequence[str]) -> str:
    """Return the argument `at` of the user as a text for messages."""
    return argument("at", names[0] if len(names) == 1 else list(names))


def _constants_of_layer(layer: Layer) -> set[str]:
    """Return the names of the constants from which the weights of a layer are computed."""
    node = layer.node
    if normalize_domain(node.domain) == "ai.onnx.ml":
        return {f"{node.name or node.outputs[0].name}.{attribute}" for attribute in node.attributes}
    return {str(v.name) for w in layer.weights for v in source_values(w)}


def source_values(value: ir.Value) -> Collection[ir.Value]:
    """Return `value` and all values from which it is computed."""
    values = [value]
    for v in values:  # the loop appends to `values`
        node = v.producer()
        values += [] if node is None else [x for x in node.inputs if x is not None]
    return values


# -- layers in messages ---------------------------------------------------------------------------


def nodes_text(nodes: Iterable[ir.Node]) -> str:
    """Return the first few names of nodes, joined for a message."""
    return join_first([node_text(node) for node in nodes], _LISTED)


def _suggest_layer_groups(layers: Iterable[Layer], constants: Sequence[str]) -> list[str]:
    """Return texts for an error message that suggest values of the argument `at`, each a group of
    layers that belong together.

    Args:
        layers: several layers, such as the heads of a detector.
        constants: the names of all constants of the model, among which a pattern chooses.
    """
    groups: dict[tuple, list[Layer]] = {}
    for layer in layers:
        groups.setdefault((layer.units, *_operators_behind(layer)), []).append(layer)
    return [
        f"{argument('at', _pattern_of_weights(group, constants))} "
        f"({len(group)} layers of {group[0].units} units)"
        for group in groups.values()
        if len(group) > 1
    ]


def _operators_behind(layer: Layer) -> list[tuple[str, int]]:
    """Return (op type, operand index) of each operator behind `layer`, up to a Concat."""
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
    """Return a pattern that matches the weights of `layers` and no other constant; if there is
    none, the list of their names.

    Instead of weights that are computed, it names the node or its result.
    """
    names: dict[str, None] = {}
    for layer in layers:
        node, w = layer.node, layer.weights[:1]
        stored = w and w[0].producer() is None
        names[str(w[0].name if stored else node.name or node.outputs[0].name)] = None
    start = _common_prefix(names)
    end = _common_prefix([name[len(start) :][::-1] for name in names])[::-1]
    pattern = f"{start}*{end}" if len(names) > 1 else start
    found = {name for name in constants if fnmatchcase(name, pattern)}
    return pattern if found == {*names} else [*names]


def _common_prefix(texts: Iterable[str]) -> str:
    """Return the longest common prefix of texts."""
    columns = zip(*texts, strict=False)
    return "".join(c for c, *_ in takewhile(lambda column: len({*column}) == 1, columns))
