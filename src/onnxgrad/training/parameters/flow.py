"""The roles of operands, and from which data, shapes, constants and weights values are computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator

import onnx_ir as ir
from onnx import NodeProto

from onnxgrad.graph.traversal import all_nodes, subgraphs
from onnxgrad.model.constants import standard
from onnxgrad.operators import RANDOM, REORDERS, names_with_trait, operator_of

MOVES = names_with_trait("moves")
MOVES_OR_JOINS = MOVES | REORDERS  # a Concat is the only one to join values


def letter(node: ir.Node | NodeProto, index: int) -> str:
    """Return the role of operand `index` of `node`, a letter of its record, or "" if unknown."""
    letters = operator_of(node).roles
    return letters[min(index, len(letters) - 1)] if letters else ""


def value_operands(node: ir.Node) -> list[ir.Value]:
    """Return the operands whose elements the results are computed from."""
    return _operands_of_other_roles(node, {"l"})


def smooth_operands(node: ir.Node) -> list[ir.Value]:
    """Return the operands whose elements the results may be a smooth function of."""
    return _operands_of_other_roles(node, {"l", "i"})


def _operands_of_other_roles(node: ir.Node, roles: Collection[str]) -> list[ir.Value]:
    if "shape" in operator_of(node).traits:
        return []
    operands = enumerate(node.inputs)
    return [x for i, x in operands if x is not None and letter(node, i) not in roles]


def reachable(
    starts: Iterable[ir.Value], onward: Callable[[ir.Value], Iterable[ir.Value | None]]
) -> Iterator[ir.Value]:
    """Yield `starts`, and all values to which `onward` leads from them, each once."""
    seen = dict.fromkeys(starts)
    waiting = list(seen)
    for value in waiting:  # the loop appends to it
        yield value
        new = {x: None for x in onward(value) if x is not None and x not in seen}
        seen |= new
        waiting += new


def readers(
    starts: Iterable[ir.Value], through: Collection[str] = MOVES
) -> Iterator[tuple[ir.Node, int]]:
    """Yield (node, operand index) for each read of the values, also behind nodes in `through`.

    `through` has types of nodes, whose reads are yielded, too.
    """

    def results(value: ir.Value) -> Iterator[ir.Value]:
        return (y for node, _ in value.uses() if node.op_type in through for y in node.outputs)

    for value in reachable(starts, results):
        yield from value.uses()


def source_of(value: ir.Value) -> ir.Value:
    """Return the value of which `value` is a moved copy, or `value` itself."""
    node = value.producer()
    while node is not None and node.op_type in MOVES and node.inputs and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def maker_of(value: ir.Value) -> ir.Node | None:
    """Return the node that computes `value`, ignoring nodes that only move it."""
    return source_of(value).producer()


_Bindings = dict[ir.Value, list[ir.Value]]


class Flow:
    """The sources of each value of `graph` and its subgraphs: data, shapes or weights.

    Attributes:
        nodes: all nodes, nodes of subgraphs included.
        bindings: `{value: values}`, from the operands of a node to the inputs of its subgraphs,
            and from the outputs of these to the results of the node.
        data: values computed from the elements of an input, or from random numbers.
        positions: values computed from shapes and ranges, and from no data.
        weighted: data computed with a weight: from a product with a constant, or a lookup.
        hidden: values from which a product with a weight is computed.
        fixed: factors that are no weights: buffers, transforms of the inputs, and values
            computed from these only.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.nodes = all_nodes(graph)
        self.bindings: _Bindings = defaultdict(list)
        self._bound_to: _Bindings = defaultdict(list)
        for source, target in (pair for node in self.nodes for pair in _subgraph_bindings(node)):
            self.bindings[source].append(target)
            self._bound_to[target].append(source)
        inputs = set(graph.inputs) - set(graph.initializers.values())
        self.data = self._computed_from(lambda node: node.op_type in RANDOM - {"Dropout"}, inputs)
        self.positions = (
            self._computed_from(lambda node: node.op_type in ("Shape", "Size", "Range")) - self.data
        )
        self.fixed: set[ir.Value] = set()
        self.fix(())

    def fix(self, factors: Collection[ir.Value]) -> None:
        """Add fixed `factors`; find values computed with weights, and values before weights."""
        self.fixed |= set(factors)
        for node in self.nodes:
            if node.inputs and self.fixed.issuperset(x for x in node.inputs if x is not None):
                self.fixed.update(node.outputs)
        self.weighted = self._computed_from(self._applies_weight)
        products = filter(self.is_product, self.nodes)
        operands = (x for node in products for x in smooth_operands(node))
        self.hidden = set(reachable(operands, self._smooth_sources))

    def _computed_from(
        self, starts: Callable[[ir.Node], bool], values: Iterable[ir.Value] = ()
    ) -> set[ir.Value]:
        """Return `values`, and all computed from them or by nodes for which `starts` is true."""
        nodes = (node for node in self.nodes if starts(node) and not any(subgraphs(node)))
        return set(reachable([*values, *(y for node in nodes for y in node.outputs)], self.onward))

    def onward(self, value: ir.Value) -> Iterator[ir.Value]:
        """Yield the results that one node computes from the elements of `value`."""
        yield from self.bindings.get(value, ())
        for node, _ in value.uses():
            if value in value_operands(node) and not any(subgraphs(node)):  # see `bindings`
                yield from node.outputs

    def _smooth_sources(self, value: ir.Value) -> Iterator[ir.Value]:
        """Yield the operands of one node of which `value` may be a smooth function."""
        yield from self._bound_to.get(value, ())
        node = value.producer()
        yield from () if node is None else smooth_operands(node)

    def _applies_weight(self, node: ir.Node) -> bool:
        """Return whether `node` applies a weight to data."""
        if standard(node.domain) not in ("", "com.microsoft"):
            return any(x in self.data for x in node.inputs)
        looks_up = any(x in self.data for x in node.inputs[1:])  # by these indices
        return self.is_product(node) or any(
            looks_up and letter(node, i) == "t" and x is not None and x not in self.data
            for i, x in enumerate(node.inputs)
        )

    def is_product(self, node: ir.Node) -> bool:
        """Return whether `node` is a matrix product or convolution of data with constants."""
        factors = [
            x not in self.data and x not in self.fixed
            for i, x in enumerate(node.inputs)
            if x is not None and letter(node, i) in ("f", "q")
        ]
        return any(factors) and any(x in self.data for x in node.inputs)


def _subgraph_bindings(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yield operands of `node` with inputs of its subgraphs, and their outputs with its results."""
    graphs = list(subgraphs(node))
    if not graphs or standard(node.domain):
        return
    pairs: list[tuple[ir.Value | None, ir.Value]] = []
    body, inputs = graphs[0], node.inputs
    if node.op_type == "If":
        for branch in graphs:
            pairs += zip(branch.outputs, node.outputs, strict=False)
    elif node.op_type == "Loop":
        states = body.inputs[2:]
        pairs += zip(inputs[2:], states, strict=False)
        pairs += zip(body.outputs[1 : len(inputs) - 1], states, strict=False)
        pairs += zip(body.outputs[1:], node.outputs, strict=False)
    else:  # Scan, SequenceMap
        pairs += zip(inputs, body.inputs, strict=False)
        if node.op_type == "Scan":
            count = len(inputs) - node.attributes["num_scan_inputs"].as_int()
            pairs += zip(body.outputs[:count], body.inputs[:count], strict=False)
        pairs += zip(body.outputs, node.outputs, strict=False)
    yield from ((a, b) for a, b in pairs if a is not None)
