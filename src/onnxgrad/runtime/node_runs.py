"""`NodeRuns`, which runs a model in pieces, so that operands and results of each node are known.

Other modules look there for what a single run of the model does not show: the node that first
computes NaN, and the nodes that another device computes otherwise than the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnxruntime as ort
from onnx import ModelProto, NodeProto

from onnxgrad.errors import printable
from onnxgrad.model.feeds import session_dtype
from onnxgrad.model.traversal import names_read_by, subgraphs
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.values import to_ortvalue

PIECE_NODES = 256  # most nodes that run in one session
_PIECE_BYTES = 1 << 28  # about how many bytes of outputs one session computes


class NodeRuns:
    """Runs the nodes of a model in pieces on the CPU, and keeps values while later nodes read them.

    Args:
        model: model whose subgraphs have dense constants; never modified.
        feed: its inputs, arrays or OrtValues.
        open_session: returns a session for the model of a piece.

    Attributes:
        nodes: the nodes of the graph, in order.
        reads: the names of the values that each node and its subgraphs read.
        initializers: the constants by name.
        with_subgraphs: the indices of the nodes that have subgraphs.
        values: the inputs, and the results of nodes that nodes of later pieces read.
    """

    def __init__(
        self,
        model: ModelProto,
        feed: Mapping[str, Any],
        open_session: Callable[[ModelProto], ort.InferenceSession],
    ) -> None:
        self.model, self.feed, self._open_session = model, feed, open_session
        self.nodes = list(model.graph.node)
        self.initializers = {t.name: t for t in model.graph.initializer}
        self.reads = [[x for x in dict.fromkeys(names_read_by(node)) if x] for node in self.nodes]
        # the index of the last node that reads a value, by name
        self._last = {x: i for i, read in enumerate(self.reads) for x in read}
        # nodes with subgraphs begin a piece: a Scan needs the shapes of its inputs
        self.with_subgraphs = {i for i, node in enumerate(self.nodes) if any(subgraphs(node))}
        self.values: dict[str, ort.OrtValue] = {}

    def run_pieces(self) -> Iterator[range]:
        """Run the model, and yield the indices of the nodes of each piece after it has run.

        Then `values` has all operands and results of these nodes.

        Raises:
            ValueError: an input of the model without an array.
        """
        inputs = {x.name for x in self.model.graph.input}
        if missing := sorted(inputs - self.feed.keys() - self.initializers.keys()):
            raise ValueError(f"feed lacks {missing}: pass all inputs of the model")
        for name in self.feed.keys() & inputs:
            self.values[name] = to_ortvalue(self.feed[name], CPU)
        start, count = 0, 8
        while start < len(self.nodes):
            stop = min(start + count, len(self.nodes))
            stop = next((i for i in range(start + 1, stop) if i in self.with_subgraphs), stop)
            size = self._run_nodes(range(start, stop))
            yield range(start, stop)
            for name in [n for n in self.values if self._last.get(n, -1) < stop]:
                del self.values[name]
            count = max(
                1, min(2 * count, PIECE_NODES, int((stop - start) * _PIECE_BYTES / max(size, 1)))
            )
            start = stop

    def _run_nodes(self, piece: range) -> int:
        """Run the nodes whose indices are in `piece`, and return the bytes of their outputs."""
        outputs = [y for i in piece for y in self.nodes[i].output if y]
        model, size = self.model_of_nodes(self.nodes[piece.start : piece.stop], outputs), 0
        feed = {x.name: self.values[x.name] for x in model.graph.input}
        results = self._open_session(model).run_with_ort_values(outputs, feed)
        for name, value in zip(outputs, results, strict=True):
            self.values[name] = value
            if value.is_tensor():
                size += value.tensor_size_in_bytes()
        return size

    def model_of_nodes(self, nodes: Sequence[NodeProto], outputs: Sequence[str]) -> ModelProto:
        """Return a model of `nodes` only, whose inputs are the values of earlier nodes."""
        model = ModelProto(ir_version=self.model.ir_version)
        model.opset_import.extend(self.model.opset_import)
        model.functions.extend(self.model.functions)
        model.graph.name = "piece"
        model.graph.node.extend(nodes)
        for name in outputs:
            model.graph.output.add(name=name)
        computed = {y for node in nodes for y in node.output}
        for name in dict.fromkeys(
            x for node in nodes for x in names_read_by(node) if x not in computed
        ):
            if name in self.values:
                _declare_input(model, name, self.values[name])
            elif name in self.initializers:
                model.graph.initializer.append(self.initializers[name])
        return model


def _declare_input(model: ModelProto, name: str, value: ort.OrtValue) -> None:
    """Add to a model an input with the type of `value`."""
    kind, declared = value.data_type(), model.graph.input.add(name=name).type
    if kind.startswith("seq("):
        kind, declared = kind[4:-1], declared.sequence_type.elem_type
    dtype = session_dtype(kind)
    if dtype is None:
        raise ValueError(f"value {name!r} is a {kind}: NaN can be searched in tensors only")
    declared.tensor_type.elem_type = int(dtype)
    if value.is_tensor():
        declared.tensor_type.shape.SetInParent()
        for length in value.shape():
            declared.tensor_type.shape.dim.add(dim_value=length)


def node_title(node: NodeProto, output: str | None = None) -> str:
    """Return the operator of a node with its name and one output, for messages."""
    name = f"node {printable(node.name)!r}, " if node.name else ""
    return f"{node.op_type} ({name}output {printable(output or node.output[0])!r})"
