"""From what the values of a graph are computed: data, shapes, constants, weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx_ir as ir

from onnxgrad.graph.operators import OF_SHAPES, RANDOM
from onnxgrad.graph.traversal import all_nodes, subgraphs
from onnxgrad.training.parameters.operands import domain, leading_operands, letter, value_operands


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
        self.bindings: dict[ir.Value, list[ir.Value]] = {}
        for node in self.nodes:
            for source, target in _bindings(node):
                self.bindings.setdefault(source, []).append(target)
        self.data: set[ir.Value] = set(graph.inputs) - set(graph.initializers.values())
        self._grow(self.data, lambda node: node.op_type in RANDOM - {"Dropout"})
        self.positions: set[ir.Value] = set()
        self._grow(self.positions, lambda node: node.op_type in ("Shape", "Size", "Range"))
        self.positions -= self.data
        self.fixed: set[ir.Value] = set()
        self.fix(())

    def fix(self, factors: Collection[ir.Value]) -> None:
        """Take `factors` for fixed, and find what is computed with weights, and before them."""
        self.fixed |= set(factors)
        for node in self.nodes:
            if node.inputs and self.fixed.issuperset(x for x in node.inputs if x is not None):
                self.fixed.update(node.outputs)
        self.weighted: set[ir.Value] = set()
        self._grow(self.weighted, self._weighs)
        self.hidden = self._backward()

    def _grow(self, reached: set[ir.Value], starts) -> None:
        """Add all values computed from `reached`, or from nodes for which `starts` is true."""
        size = -1
        while size != len(reached):
            size = len(reached)
            for node in self.nodes:
                if starts(node) or not reached.isdisjoint(value_operands(node)):
                    if any(subgraphs(node)):
                        continue  # see `bindings`
                    if node.op_type not in OF_SHAPES or starts(node):
                        reached.update(node.outputs)
            for source, targets in self.bindings.items():
                if source in reached:
                    reached.update(targets)

    def _weighs(self, node: ir.Node) -> bool:
        """Return whether `node` applies a weight to data."""
        if domain(node) not in ("", "com.microsoft"):
            return any(x in self.data for x in node.inputs)
        return self.product(node) or any(
            letter(node, i) == "t" and self.looks_up(node)
            for i, x in enumerate(node.inputs)
            if x is not None and x not in self.data
        )

    def product(self, node: ir.Node) -> bool:
        """Return whether `node` is a matrix product or convolution of data with constants."""
        factors = [
            x not in self.data and x not in self.fixed
            for i, x in enumerate(node.inputs)
            if x is not None and letter(node, i) in ("f", "q")
        ]
        return any(factors) and any(x in self.data for x in node.inputs)

    def looks_up(self, node: ir.Node) -> bool:
        """Return whether `node` gathers by indices that are data."""
        return any(x in self.data for x in node.inputs[1:])

    def _backward(self) -> set[ir.Value]:
        back: dict[ir.Value, list[ir.Value]] = {}
        for source, targets in self.bindings.items():
            for target in targets:
                back.setdefault(target, []).append(source)
        hidden: set[ir.Value] = set()
        size = -1
        while size != len(hidden):
            size = len(hidden)
            for node in reversed(self.nodes):
                if self.product(node) or not hidden.isdisjoint(node.outputs):
                    hidden.update(leading_operands(node))
            for target, sources in back.items():
                if target in hidden:
                    hidden.update(sources)
        return hidden


def _bindings(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yield operands of `node` with inputs of its subgraphs, and their outputs with its results."""
    graphs = list(subgraphs(node))
    if not graphs or domain(node):
        return
    pairs: list[tuple[ir.Value | None, ir.Value]] = []
    if node.op_type == "If":
        for branch in graphs:
            pairs += zip(branch.outputs, node.outputs, strict=False)
    elif node.op_type == "Loop":
        states = len(node.inputs) - 2
        pairs += zip(node.inputs[2:], graphs[0].inputs[2:], strict=False)
        pairs += zip(graphs[0].outputs[1 : 1 + states], graphs[0].inputs[2:], strict=False)
        pairs += zip(graphs[0].outputs[1:], node.outputs, strict=False)
    else:  # Scan, SequenceMap
        pairs += zip(node.inputs, graphs[0].inputs, strict=False)
        if node.op_type == "Scan":
            states = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
            pairs += zip(graphs[0].outputs[:states], graphs[0].inputs[:states], strict=False)
        pairs += zip(graphs[0].outputs, node.outputs, strict=False)
    yield from ((a, b) for a, b in pairs if a is not None)
