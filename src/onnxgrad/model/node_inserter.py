"""`NodeInserter`: new nodes and tensors in a `ModelProto`, of which all other nodes stay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from onnx import GraphProto, ModelProto, NodeProto

from onnxgrad.graph.emit import Emit
from onnxgrad.model.constants import normalize_domain
from onnxgrad.model.traversal import value_names


class NodeInserter:
    """Inserts nodes and tensors into a model, which is changed in place.

    Args:
        model: the model.

    Attributes:
        op: the emitter that writes the new nodes.
    """

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        taken = {*value_names(model.graph), *(t.name for t in model.graph.initializer)}
        opset = max(
            (o.version for o in model.opset_import if not normalize_domain(o.domain)), default=18
        )
        self.op = Emit(ir.Graph([], [], nodes=[], opset_imports={"": opset}), taken)

    def free_name(self, wanted: str) -> str:
        """Reserve and return a new name: `wanted`, with a numeric suffix if the model has this name
        already.
        """
        return self.op.name(wanted)

    def add_tensor(self, name: str, array: np.ndarray) -> ir.Value:
        """Add an initializer to the model, and return it as a value that new nodes can read."""
        proto = ir.to_proto(ir.tensor(array, name=name))
        self.model.graph.initializer.append(proto)
        # before IR version 4, initializers had to be inputs
        self.model.ir_version = max(self.model.ir_version, 4)
        return ir.val(name, ir.DataType.from_numpy(array.dtype), array.shape)

    def emit(self, op_type: str, *inputs: ir.Value, **options: object) -> ir.Value:
        """Write a new node, even if an equal node exists, and return its output."""
        return self.op.emit(op_type, inputs, dict(options), fresh=True)

    def write_scalar(self, value: float, dtype: ir.DataType) -> ir.Value:
        """Write a scalar as a Constant node and return its output; an initializer would count as a
        weight.
        """
        y = self.emit("Constant", value=ir.tensor(np.asarray(value, dtype.numpy())))
        y.type, y.shape = ir.TensorType(dtype), ir.Shape([])
        return y

    def replace_result(
        self,
        graph: GraphProto,
        node: NodeProto,
        old: ir.Value,
        write: Callable[[ir.Value], ir.Value],
        index: int = 0,
    ) -> None:
        """Insert nodes behind `node` that replace the output with the number `index`.

        Args:
            graph: the graph of `node`.
            node: the node, whose output gets the name of `old`.
            old: the output without the new nodes, under a new name.
            write: writes the nodes: it gets `old`, and returns the value that takes over the name
                of the output, so that all that read the output read this value.
        """
        output = node.output[index]
        before = len(self.op.written)
        with self.op:
            result = write(old)
        node.output[index] = str(old.name)
        result.name = output
        position = next(i for i, n in enumerate(graph.node, 1) if old.name in n.output)
        for new in reversed(self.op.written[before:]):
            proto = ir.to_proto(new)
            proto.ClearField("name")  # onnx_ir named it, and a node of the model may have this name
            graph.node.insert(position, proto)
