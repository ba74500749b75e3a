"""The epoch: a `Scan` over batches whose body is the step, so that onnxruntime runs the loop."""

from __future__ import annotations

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import drop_unused, is_small, move_out, shapes_from_outside
from onnxgrad.graph.traversal import all_names
from onnxgrad.model.convert import to_proto
from onnxgrad.native import Target, loop_to_native, to_native
from onnxgrad.operators import made_by
from onnxgrad.operators.shapes import dims, rank, static
from onnxgrad.training.step.build import Step

_LARGE = 1 << 16  # bytes


def build_epoch(step: Step, target: Target | None = None) -> ModelProto:
    """Return the model that runs the step over a stack of batches in one call.

    With a `target`, the step is in the native form of sessions there; otherwise, all operators are
    standard ones.

    Its inputs are the inputs of the step, in their order; all but the states and buffers are
    stacked over the batches. Outputs: the states and buffers after the last batch, then the losses
    and other reports of every batch.
    """
    body = step.model.graph
    if target is not None:
        to_native(body, target)
    count = len(step.inputs.carried)
    graph = ir.Graph([], [], nodes=[], opset_imports=dict(body.opset_imports), name="epoch")
    inputs = [
        stacked_input(v, "batches" if i >= count else None) for i, v in enumerate(body.inputs)
    ]
    graph.inputs.extend(inputs)
    _move_integers(body, graph)
    op = Emit(graph, all_names(body))
    shapes_from_outside(body, op, dict(zip(body.inputs, inputs, strict=True)))
    move_out(body, op, is_small)
    results = list(body.outputs)
    fixed = [i >= count and _is_fixed(y, body) for i, y in enumerate(results)]
    Emit(body, outer=op).give(y for y, same in zip(results, fixed, strict=True) if not same)
    attributes = {"body": body, "num_scan_inputs": len(inputs) - count}
    outputs = iter(op.emit_many("Scan", inputs, attributes, outputs=len(body.outputs)))
    for i, inner in enumerate(results):
        outer = _repeat_value(op, inner, inputs[-1]) if fixed[i] else next(outputs)
        outer.name = f"{inner.name}/last"
        outer.shape = stacked_shape(inner, "batches") if i >= count else inner.shape
        graph.outputs.append(outer)
    drop_unused(body)
    if target is not None:
        loop_to_native(graph, target)
    return to_proto(ir.Model(graph, ir_version=step.model.ir_version, producer_name="onnxgrad"))


def build_half(step: Step, target: Target) -> ModelProto:
    """Return the first half of a step, in the native form of sessions on `target`."""
    graph = step.model.graph
    to_native(graph, target)
    for i in range(len(step.groups)):
        y = graph.outputs[i]
        node = made_by(y, "Reshape")
        x = None if node is None else node.inputs[0]
        known = x is not None and x.producer() is not None and static(dims(x)) is not None
        if x is not None and node is not None and known and not x.is_graph_output():
            graph.outputs[i] = x  # the Reshape would copy it
            if not y.uses():
                graph.remove(node, safe=True)
    return to_proto(ir.Model(graph, ir_version=step.model.ir_version, producer_name="onnxgrad"))


def _is_fixed(value: ir.Value, body: ir.Graph) -> bool:
    """Return whether `value` comes from outside of `body`, or is a constant."""
    node = value.producer()
    return value not in body.inputs and (node is None or node.graph is not body)


def _repeat_value(op: Emit, value: ir.Value, scanned: ir.Value) -> ir.Value:
    """Return a value from outside of the body, repeated for each iteration over `scanned`."""
    if value.is_initializer() and value.const_value is not None:
        value = op.const(value.const_value.numpy())
    length = op.vector(op.dim(scanned, 0), *[1] * (rank(value) or 0))
    return op.emit("Expand", [value, length], {}, fresh=True)


def _move_integers(body: ir.Graph, graph: ir.Graph) -> None:
    """Let `graph` hold large quantized weights of a body.

    onnxruntime also keeps the body that it is given. It packs constants for the nodes that read
    them one graph further in, and no deeper; floats stay, as it fuses and blocks floats of one
    graph.
    """
    for name, value in list(body.initializers.items()):
        tensor = value.const_value
        large = tensor is not None and tensor.nbytes > _LARGE and tensor.dtype.is_integer()
        if large and all(node.graph is body for node in value.consumers()):
            del body.initializers[name]
            graph.register_initializer(value)


def stacked_input(value: ir.Value, length: int | str | None) -> ir.Value:
    """Return an input for `value` outside of a Scan, with another first axis of `length`."""
    shape = value.shape if length is None else stacked_shape(value, length)
    return ir.Value(name=f"{value.name}/all", type=value.type, shape=shape)


def stacked_shape(value: ir.Value, length: int | str) -> ir.Shape | None:
    """Return the shape of `value` with another first axis."""
    return None if value.shape is None else ir.Shape([length, *value.shape])
