"""From what the values of a graph are computed: data, shapes, constants, weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator

import onnx_ir as ir

from onnxgrad.graph.traversal import all_nodes, subgraphs
from onnxgrad.operators import RANDOM
from onnxgrad.training.parameters.operands import (
    domain,
    leading_operands,
    letter,
    reachable,
    value_operands,
)

_Bindings = dict[ir.Value, list[ir.Value]]


class Flow:
    """From what every value of `graph` and of its subgraphs is computed.

    Attributes:
        nodes: all nodes, those of subgraphs included.
        bindings: `{value: values}`, from the operands of a node to the inputs of its subgraphs,
            and from the outputs of these to the results of the node.
        data: values computed from the elements of an input, or from random numbers.
        positions: values computed from shapes and ranges, and from no data.
        weighted: data computed with a weight: from a product with a constant, or a lookup.
        hidden: values from which a product with a weight is computed.
        fixed: factors that are no weights: buffers, transforms of the inputs, and what is computed
            from nothing else.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.nodes = all_nodes(graph)
        self.bindings: _Bindings = defaultdict(list)
        self._bound_to: _Bindings = defaultdict(list)
        for source, target in (pair for node in self.nodes for pair in _bindings(node)):
            self.bindings[source].append(target)
            self._bound_to[target].append(source)
        inputs = set(graph.inputs) - set(graph.initializers.values())
        self.data = self._computed(lambda node: node.op_type in RANDOM - {"Dropout"}, inputs)
        self.positions = (
            self._computed(lambda node: node.op_type in ("Shape", "Size", "Range")) - self.data
        )
        self.fixed: set[ir.Value] = set()
        self.fix(())

    def fix(self, factors: Collection[ir.Value]) -> None:
        """Take `factors` for fixed, and find what is computed with weights, and before them."""
        self.fixed |= set(factors)
        for node in self.nodes:
            if node.inputs and self.fixed.issuperset(x for x in node.inputs if x is not None):
                self.fixed.update(node.outputs)
        self.weighted = self._computed(self._weighs)
        products = filter(self.product, self.nodes)
        operands = (x for node in products for x in leading_operands(node))
        self.hidden = set(reachable(operands, self._before))

    def _computed(
        self, starts: Callable[[ir.Node], bool], values: Iterable[ir.Value] = ()
    ) -> set[ir.Value]:
        """Return `values`, and all computed from them or by nodes for which `starts` is true."""
        nodes = (node for node in self.nodes if starts(node) and not any(subgraphs(node)))
        return set(reachable([*values, *(y for node in nodes for y in node.outputs)], self.onward))

    def onward(self, value: ir.Value) -> Iterator[ir.Value]:
        """Yield what is computed from the elements of `value`, by one node."""
        yield from self.bindings.get(value, ())
        for node, _ in value.uses():
            if value in value_operands(node) and not any(subgraphs(node)):  # see `bindings`
                yield from node.outputs

    def _before(self, value: ir.Value) -> Iterator[ir.Value]:
        """Yield what a smooth function of `value` would be a function of, by one node."""
        yield from self._bound_to.get(value, ())
        node = value.producer()
        yield from () if node is None else leading_operands(node)

    def _weighs(self, node: ir.Node) -> bool:
        """Return whether `node` applies a weight to data."""
        if domain(node) not in ("", "com.microsoft"):
            return any(x in self.data for x in node.inputs)
        looks_up = any(x in self.data for x in node.inputs[1:])  # by these indices
        return self.product(node) or any(
            looks_up and letter(node, i) == "t" and x is not None and x not in self.data
            for i, x in enumerate(node.inputs)
        )

    def product(self, node: ir.Node) -> bool:
        """Return whether `node` is a matrix product or convolution of data with constants."""
        factors = [
            x not in self.data and x not in self.fixed
            for i, x in enumerate(node.inputs)
            if x is not None and letter(node, i) in ("f", "q")
        ]
        return any(factors) and any(x in self.data for x in node.inputs)


def _bindings(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yield operands of `node` with inputs of its subgraphs, and their outputs with its results."""
    graphs = list(subgraphs(node))
    if not graphs or domain(node):
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
