"""The constants that nodes of a model read, found from the operand and from the constant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto

from onnxgrad.adapters.uses import Key, readers
from onnxgrad.model.constants import ConstantRef
from onnxgrad.model.scopes import unused
from onnxgrad.model.traversal import names, walk

Place = tuple[NodeProto, int]  # a node and the index of an operand


class ConstantOperands:
    """Finds constants by operands of nodes, and writes them, in subgraphs too.

    Args:
        proto: the model, without local functions. Its nodes must stay.
        refs: its constants.
    """

    def __init__(self, proto: ModelProto, refs: Iterable[ConstantRef]) -> None:
        self._constants = {(id(ref.graph), ref.graph_name): ref for ref in refs}
        nodes = [(graph, node) for graph, node in walk(proto.graph) if node is not None]
        self.nodes = [node for _, node in nodes]
        self._makers = {(id(graph), y): node for graph, node in nodes for y in node.output}
        self._results = {id(node): (id(graph), y) for graph, node in nodes for y in node.output[:1]}
        self._readers: dict[Key, list[tuple[NodeProto | None, int]]] = {}
        self._keys: dict[tuple[int, int], Key] = {}
        for key, found in readers(proto.graph).items():
            self._readers[key] = [(node, index) for _, node, index in found]
            self._keys |= {(id(node), index): key for _, node, index in found}
        self._graphs = [graph for graph, _ in nodes]  # keeps their ids
        self._taken = set(names(proto.graph))

    def readers(self, ref: ConstantRef) -> list[Place]:
        """Return the operands that are a constant."""
        found = self._readers.get((id(ref.graph), ref.graph_name), ())
        return [(node, index) for node, index in found if node is not None]

    def only_reader(self, node: NodeProto) -> Place | None:
        """Return the operand that is the first result of `node`; None if there are several."""
        found = self._readers.get(self._results[id(node)], ())
        reader, index = found[0] if len(found) == 1 else (None, 0)
        return None if reader is None else (reader, index)

    def maker(self, place: Place) -> NodeProto | None:
        """Return the node that computes an operand."""
        return self._makers.get(self._key(place))

    def common(self, places: Sequence[Place]) -> ConstantRef | None:
        """Return the constant that all of these operands are, if it is one."""
        keys = {self._key(place) for place in places}
        return self._constants.get(keys.pop()) if len(keys) == 1 else None

    def write(self, places: Sequence[Place], array: np.ndarray) -> None:
        """Write another value of the constant that these operands are.

        If others are the same constant, these get their own.
        """
        key, mine = self._key(places[0]), {(id(node), index) for node, index in places}
        ref, found = self._constants[key], self._readers[key]
        others = [(node, index) for node, index in found if (id(node), index) not in mine]
        if others:
            assert isinstance(ref.graph, GraphProto)
            tensor = ref.graph.initializer.add()
            tensor.CopyFrom(ref.read())
            tensor.name = unused(ref.graph_name, self._taken)
            ref = ConstantRef(tensor.name, tensor, False, ref.graph)
            new = id(ref.graph), tensor.name
            self._constants[new], self._readers[new], self._readers[key] = ref, [*places], others
            for node, index in places:
                node.input[index] = tensor.name
                self._keys[id(node), index] = new
        ref.write(array.astype(ref.array().dtype))

    def _key(self, place: Place) -> Key:
        return self._keys.get((id(place[0]), place[1]), (0, ""))
