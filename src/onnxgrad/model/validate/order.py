"""The order of the nodes of a graph: values read before they are computed, and cycles."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from onnx import NodeProto

from onnxgrad.errors import ModelError
from onnxgrad.model.traversal import subgraphs
from onnxgrad.model.validate.nodes import title
from onnxgrad.model.validate.tensors import shown


@dataclass
class Order:
    """The values that the nodes of a graph define, and those that they read before or capture."""

    nodes: Sequence[NodeProto]
    defined: dict[str, None]
    free: dict[str, NodeProto]  # name of a value not defined here -> a node that reads it
    late: list[tuple[str, NodeProto]] = field(default_factory=list)  # read before it is defined

    def read(self, node: NodeProto) -> None:
        """Record the inputs of the next node."""
        defined = self.defined
        for name in node.input:
            if name not in defined and name:
                self.late.append((name, node))

    def capture(self, names: Mapping[str, NodeProto]) -> None:
        """Record the values that a subgraph of the next node captures."""
        self.late.extend((name, node) for name, node in names.items() if name not in self.defined)

    def write(self, node: NodeProto) -> None:
        """Record the outputs of the next node."""
        defined = self.defined
        for name in node.output:
            if name in defined:
                raise ModelError(
                    f"{title(node)} computes {shown(name)}, which is the name of an input, a "
                    "constant or of another output: rename one"
                )
            if type(name) is not str:  # bytes, where it is not UTF-8
                raise ModelError(f"{title(node)} has a name that is not UTF-8: export it again")
            if name:
                defined[name] = None

    def close(self) -> None:
        """Split the values read early into those that are defined later, and the free ones."""
        for name, reader in self.late:
            if name not in self.defined:
                self.free.setdefault(name, reader)
        self.late = [(name, reader) for name, reader in self.late if name in self.defined]

    def refuse_unsorted(self, what: str) -> None:
        """Raise if a node reads the output of a later one."""
        for name, reader in self.late:
            sorted_order(self.nodes)  # raises for a cycle
            raise ModelError(
                f"{title(reader)} in {what} reads {shown(name)}, which a later node computes: "
                "sort the nodes"
            )


def sorted_order(nodes: Sequence[NodeProto]) -> list[int]:
    """Return the indices of `nodes`, each after those of the nodes whose outputs it reads.

    Raises:
        ModelError: there is a cycle; the message names its values.
    """
    producers = {y: i for i, node in enumerate(nodes) for y in node.output if y}
    waits = [{producers[x] for x in _reads([node], ()) if x in producers} for node in nodes]
    readers: dict[int, list[int]] = defaultdict(list)
    for i, before in enumerate(waits):
        for j in before:
            readers[j].append(i)
    ready = [i for i, before in enumerate(waits) if not before]
    order: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for j in readers[i]:
            waits[j].discard(i)
            if not waits[j]:
                heapq.heappush(ready, j)
    if len(order) < len(nodes):
        raise ModelError(_cycle(nodes, waits))
    return order


def _cycle(nodes: Sequence[NodeProto], waits: list[set[int]]) -> str:
    """Return the message for nodes that depend on each other, from what each waits for."""
    index = next(i for i, before in enumerate(waits) if before)
    path: dict[int, None] = {}
    while index not in path:
        path[index] = None
        index = min(waits[index])
    cycle = list(path)[list(path).index(index) :]
    chain = [shown(next(filter(None, nodes[i].output))) for i in (index, *reversed(cycle))]
    if len(chain) > 12:
        chain = [*chain[:6], f"({len(chain) - 11} more)", *chain[-5:]]
    return f"its nodes depend on each other: {' -> '.join(chain)}; break the cycle"


def _reads(nodes: Iterable[NodeProto], own: Iterable[str]) -> set[str]:
    """Return the values that `nodes` and their subgraphs read, except `own`."""
    names: set[str] = set()
    for node in nodes:
        names.update(node.input)
        for graph in subgraphs(node):
            tensors = (*graph.initializer, *(s.values for s in graph.sparse_initializer))
            inner = {x.name for x in (*graph.input, *tensors)}
            inner.update(y for n in graph.node for y in n.output)
            names |= _reads(graph.node, inner) | {y.name for y in graph.output} - inner
    return names.difference(own)
