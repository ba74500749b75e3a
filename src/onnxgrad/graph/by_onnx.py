"""The types and shapes that onnx infers for the results of one node."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from onnx import (
    IR_VERSION,
    GraphProto,
    ModelProto,
    OperatorSetIdProto,
    TensorProto,
    ValueInfoProto,
    defs,
)
from onnx.shape_inference import infer_shapes

from onnxgrad.operators import operator_of
from onnxgrad.operators.microsoft import DTYPES, node_of_equal_shape, result_shapes, result_types
from onnxgrad.operators.shapes import Dims, constant, dims, is_real, is_stated, static

_SMALL = 64  # elements: only constants up to this size are passed as possible shapes or axes


def infer_node(
    node: ir.Node,
    opsets: Mapping[str, int],
    elements: Mapping[ir.Value, np.ndarray] | None = None,
    functions: Mapping[ir.OperatorIdentifier, ir.Function] | None = None,
) -> None:
    """Set the unknown types and dimensions of the outputs of `node` to what onnx infers; do nothing
    if onnx fails.

    Rules compute shapes that stay unknown at run time. onnx gets a model of one node, as it infers
    that also for types which the schema of the operator does not allow.

    Args:
        node: a node without subgraphs.
        opsets: the version of each domain.
        elements: numbers and lengths in short vectors that are no constants.
        functions: the local functions of the model.
    """
    called = functions if functions and node.op_identifier() in functions else {}
    proto = None
    if not called and not defs.has(node.op_type, opsets.get(node.domain, 0), node.domain):
        _infer_by_onnxruntime(node)
        proto = node_of_equal_shape(node)
        if proto is None:
            return
    operands = dict.fromkeys(x for x in node.inputs if x is not None)
    try:
        graph = GraphProto(name="node", node=[proto or ir.to_proto(node)])
        graph.output.extend(ValueInfoProto(name=y.name) for y in node.outputs if y.name)
        for x in operands:
            if (data := _tensor_proto(x, elements or {})) is not None:
                graph.initializer.append(data)
            elif x.type is not None:
                graph.input.append(ir.serde.serialize_value(x))
        model = ModelProto(
            ir_version=IR_VERSION,
            graph=graph,
            opset_import=(OperatorSetIdProto(domain=d, version=v) for d, v in opsets.items()),
            functions=map(ir.to_proto, called.values()),
        )
        inferred = infer_shapes(model).graph.output
    except Exception:  # onnx raises errors of several types
        return
    types = {info.name: info.type for info in inferred if info.type.WhichOneof("value")}
    symbols = {d for x in operands for d in dims(x) or ()}
    for y in node.outputs:
        if (proto := types.get(str(y.name))) is not None:
            y.type = y.type or ir.serde.deserialize_type_proto_for_type(proto)
            shape = dims(ir.Value(shape=ir.serde.deserialize_type_proto_for_shape(proto)))
            if shape is not None and all(not isinstance(d, int) or d >= 0 for d in shape):
                # a node with a negative length never runs
                complete_shape(
                    y, tuple(d if isinstance(d, int) or d in symbols else None for d in shape)
                )


def _infer_by_onnxruntime(node: ir.Node) -> None:
    """Set types and shapes of the outputs of an operator that onnxruntime adds."""
    for y, known_type in zip(node.outputs, result_types(node), strict=False):
        if y.name:  # it is not left out
            y.type = y.type or known_type
    for y, shape in zip(node.outputs, result_shapes(node), strict=False):
        if y.name:
            complete_shape(y, shape)


def complete_shape(value: ir.Value, shape: Dims | None) -> None:
    """Set the unknown dimensions of `value`, and its symbols that inference made up (`unk__0`)."""
    known = dims(value)
    if known is None:
        value.shape = None if shape is None else ir.Shape(shape)
    elif shape is not None and len(known) == len(shape) and not all(map(is_stated, known)):
        pairs = zip(known, shape, strict=True)
        value.shape = ir.Shape([k if s is None or is_stated(k) else s for k, s in pairs])


def _tensor_proto(x: ir.Value, elements: Mapping[ir.Value, np.ndarray]) -> TensorProto | None:
    """Return an operand as a TensorProto, if it is a small constant, else None."""
    if x.is_graph_input():
        return None
    if x in elements and x.dtype is not None:
        numbers = elements[x]
        known = all(isinstance(n, int) for n in numbers.flat)
        tensor = ir.tensor(numbers.astype(x.dtype.numpy())) if known else None
    else:
        tensor = ir.convenience.get_const_tensor(x)
    if tensor is None or tensor.size > _SMALL:
        return None
    proto = ir.serde.serialize_tensor(tensor)
    proto.name = str(x.name)
    return proto


def complete_types(node: ir.Node) -> None:
    """Set the types that onnx does not infer, where the schema allows only one.

    onnx does not infer the types of several operators of `ai.onnx.ml`. The result of an operator
    of another domain that has a rule gets the dtype of the first float that it reads.
    """
    if node.domain and node.outputs[0].type is None and operator_of(node).rule:
        floats = (x.type for x in node.inputs if x is not None and is_real(x))
        node.outputs[0].type = next(floats, None)
    if all(y.type is not None for y in node.outputs) or not defs.has(node.op_type, node.domain):
        return
    outputs = defs.get_schema(node.op_type, domain=node.domain).outputs
    for y, formal in zip(node.outputs, outputs, strict=False):
        allowed = {DTYPES.get(name) for name in formal.types}
        dtype = allowed.pop() if len(allowed) == 1 else None
        if y.type is None and dtype is not None:
            y.type = ir.TensorType(dtype)


def write_misread_defaults(node: ir.Node) -> None:
    """Write out attributes whose defaults onnx misreads, in place.

    They are `onesided` of STFT, whose default onnx takes for 0, and `pads` of a ConvTranspose with
    both `auto_pad` and `output_padding`.
    """
    if node.op_type == "STFT":
        node.attributes.setdefault("onesided", ir.AttrInt64("onesided", 1))
    elif node.op_type == "ConvTranspose":
        _write_pads_of_auto_pad(node)


def _write_pads_of_auto_pad(node: ir.Node) -> None:
    get, weight = node.attributes.get_ints, dims(node.inputs[1])
    auto, added = node.attributes.get_string("auto_pad", ""), get("output_padding", ())
    kernel = get("kernel_shape", ()) or (static(weight[2:]) if weight else ())
    if not any(added) or not kernel or "output_shape" in node.attributes or "SAME" not in auto:
        return
    ones = (1,) * len(added)
    sizes = zip(added, kernel, get("strides", ones), get("dilations", ones), strict=True)
    totals = [max(a + (k - 1) * d + 1 - s, 0) for a, k, s, d in sizes]
    less, more = [t // 2 for t in totals], [t - t // 2 for t in totals]
    pads = [*less, *more] if auto == "SAME_UPPER" else [*more, *less]
    node.attributes["pads"] = ir.AttrInt64s("pads", pads)
    del node.attributes["auto_pad"]


def correct_shape(node: ir.Node, known: Dims | None) -> None:
    """Remove lengths that onnx infers wrongly from the shape of the first output of `node`.

    Of an index of an Einsum with several lengths, onnx uses the first, even if it is 1 or a symbol;
    the width of packed heads of an Attention is 0 if it is a symbol, and a DFT whose length is no
    constant keeps a symbolic length of its input. The indices of a MaxPool have the shape of its
    values. `known` is the shape of the output before.
    """
    y, shape = node.outputs[0], dims(node.outputs[0])
    if node.op_type == "Einsum":
        y.shape = None if known is None else ir.Shape(known)
    elif node.op_type == "MaxPool":
        for indices in node.outputs[1:]:
            indices.shape = y.shape
    elif node.op_type == "Attention" and shape is not None:
        y.shape = ir.Shape([None if d == 0 else d for d in shape])
    elif node.op_type == "DFT" and shape is not None:
        length, axis = (*node.inputs, None, None)[1:3]
        if length is None or constant(length) is not None:
            return
        # without the operand `axis`: the attribute up to opset 19, the default -2 since opset 20
        axes = [node.attributes.get_int("axis", 1), -2] if axis is None else constant(axis)
        named = range(len(shape)) if axes is None else [int(a) % len(shape) for a in np.ravel(axes)]
        y.shape = ir.Shape([None if i in named else d for i, d in enumerate(shape)])
