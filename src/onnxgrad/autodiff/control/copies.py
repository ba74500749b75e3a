"""A copy of a subgraph, to which its gradient is appended."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnxgrad.autodiff.reverse import sweep
from onnxgrad.errors import NoGradientRule
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import drop_unused
from onnxgrad.graph.traversal import all_nodes, reads
from onnxgrad.operators import RANDOM

Pairs = list[tuple[ir.Value, ir.Value]]


class SubgraphCopy:
    """A copy of a subgraph of `node`, in which all values have new names.

    The inputs of the subgraph are free values in the copy: the backward pass binds them.
    """

    def __init__(self, op: Emit, node: ir.Node, attribute: str) -> None:
        self.node, self.original = node, node.attributes[attribute].as_graph()
        self.graph = self.original.clone(allow_outer_scope_values=True)
        self.op = Emit(self.graph, outer=op)
        self.inputs, self.outputs = list(self.graph.inputs), list(self.graph.outputs)
        self._originals = dict(zip(self.graph, self.original, strict=True))  # copied node -> node
        self.graph.inputs.clear()
        results = (y for n in all_nodes(self.graph) for y in n.outputs if y.name)
        for value in (*self.inputs, *results):
            value.name = op.name(str(value.name))

    @property
    def description(self) -> str:
        """The text that names the node of the subgraph in error messages."""
        return f"{self.node.op_type} {self.node.name!r} (output {self.node.outputs[0].name!r})"

    def sweep(
        self, seeds: Iterable[tuple[ir.Value, ir.Value]], wrt: Iterable[ir.Value]
    ) -> dict[ir.Value, ir.Value]:
        """Append the gradients of `wrt` to the copy; return `{value: its gradient}`, as
        `reverse.sweep` does.

        `seeds` are pairs of a value and its cotangent; cotangents of the same value are added up.
        """
        cotangents: dict[ir.Value, list[ir.Value]] = {}
        for y, g in seeds:
            cotangents.setdefault(y, []).append(g)
        with self.op:
            totals = {y: self.op.total(gs) for y, gs in cotangents.items()}
        try:
            return sweep(self.op, totals, wrt)
        except NoGradientRule as e:
            raise NoGradientRule(f"in a graph of {self.description}: {e}") from e

    def set_outputs(self, outputs: Iterable[ir.Value]) -> None:
        """Set the outputs of the copy, and remove the nodes that they do not need."""
        self.op.give(outputs)
        drop_unused(self.graph)

    def random_placeholders(self) -> Pairs:
        """Replace the random numbers of the copy by placeholders; return pairs as
        `replace_by_placeholders` does.
        """
        pairs = []
        for node in [n for n in all_nodes(self.graph) if n.op_type in RANDOM and not n.domain]:
            if node.graph is not self.graph:
                raise NoGradientRule(
                    f"{node.op_type} {node.name!r} is in a graph inside of a graph of "
                    f"{self.description}: its random numbers would be drawn again in the backward "
                    "pass; draw them outside"
                )
            pairs += self.replace_by_placeholders(node.outputs)
        return pairs

    def element_placeholders(self, states: Iterable[ir.Value]) -> Pairs:
        """Replace the tensors that nodes read from sequences among `states` by placeholders; return
        pairs as `replace_by_placeholders` does.
        """
        sequences, elements = {a for a in states if not is_tensor(a)}, []
        for node in self.graph:
            if not sequences.isdisjoint(reads(node)):
                sequences.update(y for y in node.outputs if not is_tensor(y))
                if (original := self._originals.get(node)) is not None:
                    own = node.outputs[: len(original.outputs)]
                    elements += [y for y in own if is_tensor(y)]
        return self.replace_by_placeholders(elements)

    def copy_of_value(self, original: ir.Value) -> ir.Value:
        """Return the copy of a value of the original subgraph."""
        copies = dict(zip(self.original.inputs, self.inputs, strict=True))
        for copied, node in self._originals.items():
            copies.update(zip(node.outputs, copied.outputs, strict=False))
        return copies[original]

    def replace_by_placeholders(self, results: Iterable[ir.Value]) -> Pairs:
        """Replace each value of `results` that a node reads by a placeholder: a value that no node
        computes.

        Return pairs of a placeholder, which the backward pass binds, and the value of the
        original subgraph that it stands for.
        """
        pairs = []
        for y in results:
            if y.uses() or y.is_graph_output():
                placeholder = self.op.set_type_like(ir.Value(name=self.op.name(str(y.name))), y)
                ir.convenience.replace_all_uses_with(y, placeholder, replace_graph_outputs=True)
                pairs.append((placeholder, self._original_value(y)))
        drop_unused(self.graph)
        return pairs

    def _original_value(self, y: ir.Value) -> ir.Value:
        """Return the value of the original subgraph of which `y` is a copy.

        If only the gradient asked for that output of its node, it is added to the original node.
        """
        node, index = y.producer(), y.index()
        assert node is not None
        assert index is not None
        original = self._originals[node]
        if index >= len(original.outputs):
            original.resize_outputs(index + 1)
        value = original.outputs[index]
        if not value.name:
            self.op.set_type_like(value, y).name = self.op.name(str(y.name))
        return value


def add_output(op: Emit, node: ir.Node, attribute: str, value: ir.Value) -> ir.Value:
    """Add `value` to the outputs of a subgraph of `node`; return the new output of `node`."""
    graph, producer = node.attributes[attribute].as_graph(), value.producer()
    result = value
    if producer is None or producer.graph is not graph or value.is_graph_output():
        result = Emit(graph, outer=op).copy_of(value)
    graph.outputs.append(op.set_type_like(result, value))
    node.resize_outputs(len(node.outputs) + 1)
    y = node.outputs[-1]
    y.name, y.type = op.name(str(value.name)), value.type
    return y


def unbound_gradient(op: Emit, like: ir.Value) -> ir.Value:
    """Return a new value for the gradient of `like`, of its type; no node computes the value
    yet.
    """
    return op.set_type_like(ir.Value(name=op.name(f"{like.name}_grad")), like)


def is_tensor(value: ir.Value) -> bool:
    """Return whether `value` is a tensor, rather than a sequence or an Optional."""
    return isinstance(value.type, ir.TensorType)
