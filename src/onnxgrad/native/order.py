"""Order the nodes of a training step for a low peak of memory.

By default, onnxruntime runs a graph depth first from its outputs: then the operands of the
gradients of the last weights stay alive until all other gradients are done. The order of this file
has the gradients in the order in which the backward pass reaches them, each depth first, and a node
whose result is smaller than its share of its operands runs at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import prod

import onnx_ir as ir

from onnxgrad.graph.traversal import reads, subgraphs
from onnxgrad.operators import VIEWS
from onnxgrad.operators.shapes import dims, static

JOINED = 4  # a node with so many operands, of different depths, joins results


def reorder_for_memory(graph: ir.Graph) -> None:
    """Reorder nodes for less memory, in `graph` and in the bodies of all nested Scans."""
    for node in graph:
        if node.op_type == "Scan":
            for body in subgraphs(node):
                reorder_for_memory(body)
    reorder_graph(graph)


def reorder_graph(graph: ir.Graph) -> None:
    """Reorder the nodes of `graph`: of the current order and two others, the one of the lowest peak
    memory.
    """
    nodes, memory = list(graph), MemoryUse(graph)
    first = order_depth_first(graph)
    best = min(
        (nodes, first, order_freeing_early(memory, first)),
        key=lambda some: peak_nbytes(memory, some),
    )
    graph.remove(nodes)
    graph.extend(best)


def order_depth_first(graph: ir.Graph) -> list[ir.Node]:
    """Return the graph's nodes in depth-first order from its outputs, the shallowest output first.

    Operands of a node that joins many values, as the gradients of all small weights, count as
    results, too.
    """
    level: dict[ir.Node, int] = {}
    operands: dict[ir.Node, list[ir.Node]] = {}
    targets = [y.producer() for y in graph.outputs]
    for node in graph:
        # a set would order nodes of one level by their addresses in memory
        before = dict.fromkeys(
            p for x in reads(node) if (p := x.producer()) is not None and p in level
        )
        operands[node] = sorted(before, key=level.__getitem__)
        levels = [level[p] for p in operands[node]] or [0]
        level[node] = 1 + levels[-1]
        if len(before) >= JOINED and levels[-1] - levels[0] > len(before):
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


def order_freeing_early(memory: MemoryUse, nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """Return `nodes` reordered: a node that frees memory runs as soon as its operands are known."""
    live = LiveMemory(memory)
    position = {node: i for i, node in enumerate(nodes)}
    waiting = {node: len(memory.before[node]) for node in nodes}
    ranks: dict[ir.Node, tuple[float, int]] = {}  # of the nodes that can run now
    heap: list[tuple[float, int]] = []  # `ranks`, and outdated ranks
    result: list[ir.Node] = []

    def push_rank(node: ir.Node) -> None:
        ranks[node] = -max(0, live.freed_nbytes(node) + 1), position[node]
        heappush(heap, ranks[node])

    for node in memory.read:
        if not waiting[node]:
            live.mark_ready(node)
            ranks[node] = 0.0, position[node]
    for node in ranks:
        push_rank(node)
    while heap:
        entry = heappop(heap)
        node = nodes[entry[1]]
        if ranks.get(node) != entry:
            continue
        del ranks[node]
        result.append(node)
        live.mark_run(node)
        changed = list(memory.read[node])
        for follower in memory.behind[node]:
            waiting[follower] -= 1
            if not waiting[follower]:
                changed += live.mark_ready(follower)
                push_rank(follower)
        for reader in dict.fromkeys(n for x in changed for n in memory.readers[x] if n in ranks):
            push_rank(reader)
    return result


def peak_nbytes(memory: MemoryUse, nodes: Sequence[ir.Node]) -> int:
    """Return the peak memory in bytes of running `nodes` in their order."""
    live = LiveMemory(memory)
    return max(map(live.mark_run, nodes), default=0)


class MemoryUse:
    """The bytes of a graph's values, and which nodes read and write each value.

    Outputs of the graph have memory from the beginning, and inputs never lose their memory.

    Attributes:
        bytes: number of bytes of each value that gets memory while the graph runs.
        read: values with bytes that a node reads; the base of a view stands for the view.
        readers: nodes that read a value.
        before: nodes whose results a node reads.
        behind: nodes that read the results of a node.
        written: bytes of the results of a node.
        unread: bytes of the results of a node that no node reads.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.bytes: dict[ir.Value, int] = {}
        self.read: dict[ir.Node, list[ir.Value]] = {}
        self.readers: dict[ir.Value, list[ir.Node]] = {}
        self.before: dict[ir.Node, set[ir.Node]] = {}
        self.behind: dict[ir.Node, list[ir.Node]] = {node: [] for node in graph}
        base: dict[ir.Value, ir.Value] = {}
        outputs = set(graph.outputs)
        for node in graph:
            values = reads(node)
            producers = {x.producer() for x in values}
            self.before[node] = {p for p in producers if p is not None and p in self.behind}
            for producer in self.before[node]:
                self.behind[producer].append(node)
            bases = dict.fromkeys(base.get(x, x) for x in values)
            self.read[node] = [x for x in bases if self.bytes.get(x)]
            for x in self.read[node]:
                self.readers.setdefault(x, []).append(node)
            if node.op_type in VIEWS and not node.domain and node.inputs[0] is not None:
                base[node.outputs[0]] = base.get(node.inputs[0], node.inputs[0])
            else:
                self.bytes.update((y, value_nbytes(y)) for y in node.outputs if y not in outputs)
        self.written = {n: sum(self.bytes.get(y, 0) for y in n.outputs) for n in graph}
        self.unread = {
            n: sum(self.bytes.get(y, 0) for y in n.outputs if y not in self.readers) for n in graph
        }


class LiveMemory:
    """The values in memory while nodes run one after another, and their total bytes."""

    def __init__(self, memory: MemoryUse) -> None:
        self.memory = memory
        self.left = {x: len(nodes) for x, nodes in memory.readers.items()}
        self.blocked = dict(self.left)
        self.alive = 0

    def mark_ready(self, node: ir.Node) -> list[ir.Value]:
        """Record that `node` can run; return its operands all of whose readers can run now."""
        read = self.memory.read[node]
        for x in read:
            self.blocked[x] -= 1
        return [x for x in read if not self.blocked[x]]

    def freed_nbytes(self, node: ir.Node) -> float:
        """Return the bytes that running `node` would free, minus the bytes of its results.

        If other nodes read an operand, too, and can run now, only a share of it counts as freed.
        """
        memory = self.memory
        last = [x for x in memory.read[node] if not self.blocked[x]]
        return sum(memory.bytes[x] / self.left[x] for x in last) - memory.written[node]

    def mark_run(self, node: ir.Node) -> int:
        """Record that `node` has run; return the bytes in memory while it ran."""
        memory = self.memory
        self.alive += memory.written[node]
        meanwhile = self.alive
        for x in memory.read[node]:
            self.left[x] -= 1
            if not self.left[x]:
                self.alive -= memory.bytes[x]
        self.alive -= memory.unread[node]
        return meanwhile


def value_nbytes(value: ir.Value) -> int:
    """Return the bytes of a value; if its shape is unknown, the bytes of the largest operand."""
    known = _static_nbytes(value)
    if known is not None:
        return known
    node = value.producer()
    if node is None or node.op_type in ("Shape", "Size") or dims(value) == (None,):
        return 0
    most = max((_static_nbytes(x) or 0 for x in node.inputs if x is not None), default=0)
    return most // len(node.outputs) if node.op_type == "Split" else most


def _static_nbytes(value: ir.Value) -> int | None:
    """Return the bytes of a value of static shape and known dtype, else None."""
    shape, dtype = static(dims(value)), value.dtype
    return None if shape is None or dtype is None else int(prod(shape) * dtype.itemsize)
