"""The order of the nodes of a graph: values read before they are computed, and cycles."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from onnx import NodeProto

from onnxgrad.errors import ModelError
from onnxgrad.model.traversal import reads
from onnxgrad.model.validate.nodes import title
from onnxgrad.model.validate.tensors import shown


@dataclass
class Order:
    """The values that the nodes of a graph define, and those that they read before or capture."""

    nodes: Sequence[NodeProto]
    defined: dict[str, None]
    # name of a value not defined here -> a node that reads it
    free: dict[str, NodeProto] = field(default_factory=dict)
    late: list[tuple[str, NodeProto]] = field(default_factory=list)  # read before it is defined

    def read(self, node: NodeProto, names: Iterable[str]) -> None:
        """Record values that the next node reads, or that its subgraphs capture."""
        defined = self.defined
        self.late += [(name, node) for name in names if name not in defined and name]

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

    A cycle is an error that names its values.
    """
    producers = {y: i for i, node in enumerate(nodes) for y in node.output if y}
    waits = {i: {producers[x] for x in reads(n) if x in producers} for i, n in enumerate(nodes)}
    sorter, order = TopologicalSorter(waits), list[int]()
    try:
        sorter.prepare()
    except CycleError as e:
        chain = [shown(next(filter(None, nodes[i].output))) for i in cycle_of(e)]
        if len(chain) > 12:
            chain = [*chain[:6], f"({len(chain) - 11} more)", *chain[-5:]]
        raise ModelError(
            f"its nodes depend on each other: {' -> '.join(chain)}; break the cycle"
        ) from None
    ready: list[int] = []  # a heap: nodes keep their order where they can
    while sorter.is_active():
        for i in sorter.get_ready():
            heapq.heappush(ready, i)
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
    return order


def cycle_of(error: CycleError) -> list[int]:
    """Return a cycle of numbers from the smallest on, with that at the end too."""
    cycle: list[int] = error.args[1][1:]
    start = cycle.index(min(cycle))
    return [*cycle[start:], *cycle[: start + 1]]
