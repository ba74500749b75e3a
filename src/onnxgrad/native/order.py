"""The order of the nodes of a step, so that few bytes are alive at a time.

onnxruntime runs a graph depth first from its outputs, by default: then what the gradients of the
last weights read stays alive until all others are done. Here, the gradients come in the
order in which the backward pass reaches them, each depth first, and a node whose result is smaller
than its share of what it reads runs at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import onnx_ir as ir

from onnxgrad.graph.operators import VIEWS
from onnxgrad.graph.shapes import dims, static
from onnxgrad.graph.traversal import reads, subgraphs

MANY = 4000  # nodes up to which those that can run next are all compared at every step
JOINED = 4  # results of different depths that a node reads, at least


def order_bodies(graph: ir.Graph) -> None:
    """Order the nodes of the bodies of the Scans of `graph`, at any depth."""
    for node in graph:
        if node.op_type == "Scan":
            for body in subgraphs(node):
                order_bodies(body)
                order(body)


def order_all(graph: ir.Graph) -> None:
    """Order the nodes of `graph` and of the bodies of its Scans."""
    order_bodies(graph)
    order(graph)


def order(graph: ir.Graph) -> None:
    """Put the nodes of `graph` in a better order; the shapes that matter are static."""
    nodes = list(graph)
    first = depth_first(graph)
    orders = [nodes, first]
    if len(nodes) <= MANY:
        orders.append(eager(graph, first))
    best = min(orders, key=lambda some: peak(graph, some))
    graph.remove(nodes)
    graph.extend(best)


def depth_first(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes depth first from the results, in the order in which these can be there.

    What is joined at the end, such as the gradients of all small weights, are results, too.
    """
    level: dict[ir.Node, int] = {}
    operands: dict[ir.Node, list[ir.Node]] = {}
    targets = [y.producer() for y in graph.outputs]
    for node in graph:
        before = {p for x in reads(node) if (p := x.producer()) is not None and p in level}
        operands[node] = sorted(before, key=level.__getitem__)
        level[node] = 1 + max((level[p] for p in before), default=0)
        if len(before) >= JOINED and _spread(operands[node], level) > len(before):
            targets += before
    ends = dict.fromkeys(node for node in targets if node in level)
    done: dict[ir.Node, None] = {}
    for target in sorted(ends, key=level.__getitem__):
        stack = [target]
        while stack:
            node = stack[-1]
            missing = [p for p in operands[node] if p not in done]
            stack += missing
            if not missing:
                done[stack.pop()] = None
    return [*done, *(node for node in graph if node not in done)]


def _spread(nodes: Sequence[ir.Node], level: Mapping[ir.Node, int]) -> int:
    """Return by how many levels nodes, sorted by them, differ at most."""
    return level[nodes[-1]] - level[nodes[0]]


def eager(graph: ir.Graph, nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """Return the nodes in the order of `nodes`, but those first that free memory at once."""
    lives = _Lives(graph)
    position, waiting, ready = {node: i for i, node in enumerate(nodes)}, {}, set()
    for node in graph:
        waiting[node] = len({x.producer() for x in lives.read[node]} & lives.read.keys())
        if not waiting[node]:
            ready.add(node)
            lives.ready(node)
    result: list[ir.Node] = []

    def rank(node: ir.Node) -> tuple[float, int]:
        return -max(0, lives.gain(node) + 1), position[node]

    while ready:
        node = min(ready, key=rank)
        ready.remove(node)
        result.append(node)
        lives.run(node)
        for follower in dict.fromkeys(n for y in node.outputs for n in lives.readers.get(y, ())):
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.add(follower)
                lives.ready(follower)
    return result


def peak(graph: ir.Graph, nodes: Sequence[ir.Node]) -> int:
    """Return the bytes that are alive at most when the nodes run in this order."""
    lives, most = _Lives(graph), 0
    for node in nodes:
        most = max(most, lives.run(node))
    return most


class _Lives:
    """What is alive while nodes run: `read` has the values that a node reads, views as their base.

    Results of the graph have memory from the beginning on, and inputs never lose theirs.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.base: dict[ir.Value, ir.Value] = {}
        self.read: dict[ir.Node, list[ir.Value]] = {}
        self.readers: dict[ir.Value, list[ir.Node]] = {}
        self.bytes: dict[ir.Value, int] = {}
        outputs = set(graph.outputs)
        for node in graph:
            read = self.read[node] = reads(node)
            for x in read:
                self.readers.setdefault(x, []).append(node)
            if node.op_type in VIEWS and not node.domain and node.inputs[0] is not None:
                self.base[node.outputs[0]] = self._base(node.inputs[0])
            else:
                self.bytes.update((y, nbytes(y)) for y in node.outputs if y not in outputs)
        self.left: dict[ir.Value, int] = {}
        for read in self.read.values():
            for x in self._bases(read):
                self.left[x] = self.left.get(x, 0) + 1
        self.blocked = dict(self.left)
        self.alive = 0

    def _base(self, value: ir.Value) -> ir.Value:
        return self.base.get(value, value)

    def _bases(self, values: Sequence[ir.Value]) -> set[ir.Value]:
        return {self._base(x) for x in values}

    def ready(self, node: ir.Node) -> None:
        """Note that what `node` reads is there."""
        for x in self._bases(self.read[node]):
            self.blocked[x] -= 1

    def gain(self, node: ir.Node) -> float:
        """Return the bytes that `node` frees, with its share of what others can read now, too, less
        those of its results.
        """
        freed = sum(
            self.bytes.get(x, 0) / self.left[x]
            for x in self._bases(self.read[node])
            if not self.blocked[x]
        )
        return freed - sum(self.bytes.get(y, 0) for y in node.outputs)

    def run(self, node: ir.Node) -> int:
        """Run the node; return the bytes alive meanwhile."""
        self.alive += sum(self.bytes.get(y, 0) for y in node.outputs)
        meanwhile = self.alive
        for x in self._bases(self.read[node]):
            self.left[x] -= 1
            if not self.left[x]:
                self.alive -= self.bytes.get(x, 0)
        self.alive -= sum(self.bytes.get(y, 0) for y in node.outputs if not self.left.get(y))
        return meanwhile


def nbytes(value: ir.Value) -> int:
    """Return the bytes of a value; as many as the largest operand has, if its shape is unknown."""
    shape = static(dims(value))
    if shape is not None and value.dtype is not None:
        return int(prod(shape) * value.dtype.itemsize)
    node = value.producer()
    if node is None or node.op_type in ("Shape", "Size") or dims(value) == (None,):
        return 0
    most = max((_static(x) for x in node.inputs if x is not None), default=0)
    return most // len(node.outputs) if node.op_type == "Split" else most


def _static(value: ir.Value) -> int:
    shape = static(dims(value))
    return int(prod(shape) * value.dtype.itemsize) if shape and value.dtype else 0
