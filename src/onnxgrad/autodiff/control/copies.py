"""A copy of a graph that a node holds, to which its gradient is appended."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnxgrad.autodiff.reverse import sweep
from onnxgrad.errors import NoGradientRule
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.operators import RANDOM
from onnxgrad.graph.tidy import drop_unused
from onnxgrad.graph.traversal import reads

Pairs = list[tuple[ir.Value, ir.Value]]


class Copy:
    """A copy of a graph of `node`, under names of its own.

    Its inputs are no inputs any more: the backward pass says what they are.
    """

    def __init__(self, op: Emit, node: ir.Node, attribute: str) -> None:
        self.node, self.original = node, node.attributes[attribute].as_graph()
        self.graph = self.original.clone(allow_outer_scope_values=True)
        self.op = Emit(self.graph, outer=op)
        self.inputs, self.outputs = list(self.graph.inputs), list(self.graph.outputs)
        self._originals = dict(zip(self.graph, self.original, strict=True))
        self.graph.inputs.clear()
        results = (y for n in self.graph.all_nodes() for y in n.outputs if y.name)
        for value in (*self.inputs, *results):
            value.name = op.name(str(value.name))

    @property
    def where(self) -> str:
        """The node, for messages."""
        return f"{self.node.op_type} {self.node.name!r} (output {self.node.outputs[0].name!r})"

    def sweep(
        self, seeds: Iterable[tuple[ir.Value, ir.Value]], wrt: Iterable[ir.Value]
    ) -> dict[ir.Value, ir.Value]:
        """Append the gradient, and return it for those of `wrt` that it reaches."""
        arriving: dict[ir.Value, list[ir.Value]] = {}
        for y, g in seeds:
            arriving.setdefault(y, []).append(g)
        with self.op:
            totals = {y: self.op.total(gs) for y, gs in arriving.items()}
        try:
            return sweep(self.op, totals, wrt)
        except NoGradientRule as e:
            raise NoGradientRule(f"in a graph of {self.where}: {e}") from e

    def give(self, outputs: Iterable[ir.Value]) -> None:
        """Make these the outputs, and remove what they do not need."""
        self.op.give(outputs)
        drop_unused(self.graph)

    def draws(self) -> Pairs:
        """Take out what is drawn at random: return what stands for it, and the original."""
        made = []
        for node in [n for n in self.graph.all_nodes() if n.op_type in RANDOM and not n.domain]:
            if node.graph is not self.graph:
                raise NoGradientRule(
                    f"{node.op_type} {node.name!r} is in a graph inside of a graph of "
                    f"{self.where}: its random numbers would be drawn anew in the backward pass; "
                    "draw them outside"
                )
            made += self.take_out(node.outputs)
        return made

    def read_from(self, states: Iterable[ir.Value]) -> Pairs:
        """Take out the tensors that are read from those of `states` that are sequences."""
        handed, found = {a for a in states if not is_tensor(a)}, []
        for node in self.graph:
            if not handed.isdisjoint(reads(node)):
                handed.update(y for y in node.outputs if not is_tensor(y))
                if (original := self._originals.get(node)) is not None:
                    own = node.outputs[: len(original.outputs)]
                    found += [y for y in own if is_tensor(y)]
        return self.take_out(found)

    def counterpart(self, original: ir.Value) -> ir.Value:
        """Return the copy of a value of the original graph."""
        found = dict(zip(self.original.inputs, self.inputs, strict=True))
        for copied, node in self._originals.items():
            found.update(zip(node.outputs, copied.outputs, strict=False))
        return found[original]

    def take_out(self, results: Iterable[ir.Value]) -> Pairs:
        """Compute these no more: return what stands for those that are used, and the originals."""
        made = []
        for y in results:
            if y.uses() or y.is_graph_output():
                stand_in = self.op.set_type_like(ir.Value(name=self.op.name(str(y.name))), y)
                ir.convenience.replace_all_uses_with(y, stand_in, replace_graph_outputs=True)
                made.append((stand_in, self._origin(y)))
        drop_unused(self.graph)
        return made

    def _origin(self, y: ir.Value) -> ir.Value:
        """Return what `y` is a copy of, after asking for it where only the gradient did."""
        node, place = y.producer(), y.index()
        assert node is not None
        assert place is not None
        original = self._originals[node]
        if place >= len(original.outputs):
            original.resize_outputs(place + 1)
        found = original.outputs[place]
        if not found.name:
            self.op.set_type_like(found, y).name = self.op.name(str(y.name))
        return found


def hand_out(op: Emit, node: ir.Node, attribute: str, value: ir.Value) -> ir.Value:
    """Make `value` one more output of a graph that `node` holds; return that of the node."""
    graph = node.attributes[attribute].as_graph()
    made = Emit(graph, outer=op).copy_of(value)
    graph.outputs.append(op.set_type_like(made, value))
    node.resize_outputs(len(node.outputs) + 1)
    y = node.outputs[-1]
    y.name, y.type = op.name(str(value.name)), value.type
    return y


def new(op: Emit, like: ir.Value) -> ir.Value:
    """Return a value for the gradient of `like`, which nothing computes yet."""
    return op.set_type_like(ir.Value(name=op.name(f"{like.name}_grad")), like)


def is_tensor(value: ir.Value) -> bool:
    """Tell whether `value` is a tensor: no sequence, and no Optional."""
    return isinstance(value.type, ir.TensorType)
