"""Conversion of the floats of a model to another dtype: all of them, or only floats of 16 bits."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.traversal import all_nodes
from onnxgrad.operators import operator_of

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, *HALVES)
_LARGE = 1 << 16  # elements of a constant that stays in 16 bits, to be in memory once
_DTYPES = ("to", "dtype", "output_dtype")  # attributes whose value is a dtype


def widen(model: ir.Model, names: Collection[str]) -> None:
    """Let `model` compute in float32 instead of 16 bits, in place.

    Its inputs keep their possible values: inputs of float16 are cast. An input of bfloat16, which
    numpy lacks, becomes float32, and is rounded. Large constants are cast, too, unless `names` has
    them; other constants are converted. Outputs are float32.
    """
    op = Emit(model.graph)
    narrow = [x for x in model.graph.inputs if x.dtype in HALVES]
    for value in model.graph.initializers.values():
        known = value.const_value
        if value.dtype in HALVES and known is not None and value.name not in names:
            narrow += [value] * (known.size >= _LARGE)
    set_precision(model, ir.DataType.FLOAT, of=HALVES, unchanged=narrow)
    with op.at(next(iter(model.graph), None)):
        for value in narrow:
            _read_in_float32(op, value)


def _read_in_float32(op: Emit, value: ir.Value) -> None:
    """Let all nodes that read an input or a constant of 16 bits read it cast to float32."""
    wide = ir.Value(type=ir.TensorType(ir.DataType.FLOAT), shape=value.shape)
    ir.convenience.replace_all_uses_with(value, wide, replace_graph_outputs=True)
    rounded = value
    if value.dtype == ir.DataType.BFLOAT16 and value.is_graph_input():
        value.type = wide.type
        rounded = op.Cast(value, to=ir.DataType.BFLOAT16)
    result = op.set_type_like(op.Cast(rounded, to=ir.DataType.FLOAT), wide)
    ir.convenience.replace_all_uses_with(wide, result, replace_graph_outputs=True)


def widen_input(op: Emit, w: ir.Value) -> ir.Value:
    """Replace an input of 16 bits by a float32 input, which nodes read rounded; return it."""
    if w.dtype not in HALVES:
        return w
    wide = ir.Value(name=w.name, type=ir.TensorType(ir.DataType.FLOAT), shape=w.shape)
    w.name = op.name(f"{w.name}.rounded")
    with op.at(next(iter(op.graph), None)):
        narrow = op.set_type_like(op.Cast(wide, to=w.dtype), w)
        ir.convenience.replace_all_uses_with(w, narrow, replace_graph_outputs=True)
    op.graph.inputs[list(op.graph.inputs).index(w)] = wide
    return wide


def widen_result(op: Emit, y: ir.Value) -> ir.Value:
    """Return a result of 16 bits cast to float32; the cast takes over its name."""
    if y.dtype not in HALVES:
        return y
    wide = op.Cast(y, to=ir.DataType.FLOAT)
    wide.name, y.name = y.name, op.name(f"{y.name}.rounded")
    return wide


def narrow_result(op: Emit, y: ir.Value, like: ir.Value | None) -> ir.Value:
    """Return a float32 result cast to float16 or bfloat16, if `like`, the input that it will be fed
    to, has that dtype.
    """
    if like is None or like.dtype not in HALVES or y.dtype != ir.DataType.FLOAT:
        return y
    return op.Cast(y, to=like.dtype)


def set_precision(
    model: ir.Model,
    dtype: ir.DataType,
    of: Collection[ir.DataType] = FLOATS,
    unchanged: Collection[ir.Value] = (),
) -> None:
    """Convert, in place, every float type of `model` to `dtype`, also the target types of Casts.

    Finite numbers beyond the range of `dtype` are clipped to it: masks contain such numbers. Types
    that are not in `of` stay, and so do the inputs and constants in `unchanged`.
    """
    kept: set[ir.Value | None] = {*unchanged}
    computed: list[tuple[ir.Node, int]] = []  # operands that must stay float32
    has_stash_type = dtype == ir.DataType.DOUBLE and model.opset_imports.get("", 0) >= 21
    graphs = (model.graph, *(function.graph for function in model.functions.values()))
    for node in (n for graph in graphs for n in all_nodes(graph)):
        index = operator_of(node).float32_operand
        operand = None if index is None or index >= len(node.inputs) else node.inputs[index]
        if operand is not None and index is not None:
            if operand.producer() is None:
                kept.add(operand)
            elif operand.dtype in (None, ir.DataType.FLOAT) and ir.DataType.FLOAT in of:
                computed.append((node, index))
        if (node.domain, node.op_type) == ("", "ConstantOfShape"):
            zero = ir.AttrTensor("value", ir.tensor(np.zeros(1, np.float32)))
            node.attributes.setdefault("value", zero)
        if has_stash_type and (node.domain, node.op_type) == ("", "GroupNormalization"):
            node.attributes["stash_type"] = ir.AttrInt64("stash_type", dtype)  # float32 by default
        for value in node.outputs:
            _convert_value_dtype(value, dtype, of)
        for attribute in list(node.attributes.values()):
            if attribute.name in ("value_float", "value_floats") and not attribute.is_ref():
                del node.attributes[attribute.name]  # this attribute is always float32
                tensor = converted_tensor(np.asarray(attribute.value), dtype)
                node.attributes["value"] = ir.AttrTensor("value", tensor)
            elif attribute.name in _DTYPES and attribute.value in of:
                node.attributes[attribute.name] = ir.AttrInt64(attribute.name, dtype)
            elif attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in of:
                tensor = converted_tensor(attribute.value.numpy(), dtype, attribute.value.name)
                node.attributes[attribute.name] = ir.AttrTensor(attribute.name, tensor)
            elif attribute.type == ir.AttributeType.TYPE_PROTO:  # of an Optional
                content_type = attribute.value.type
                if content_type.dtype in of:
                    content_type.dtype = dtype
    for graph in (g for outer in graphs for g in (outer, *outer.subgraphs())):
        for value in (*graph.inputs, *graph.initializers.values()):
            if value not in kept:
                _convert_value_dtype(value, dtype, of)
    for node, index in computed:
        holder = node.graph
        assert isinstance(holder, ir.Graph)
        with Emit(holder).at(node) as op:
            node.replace_input_with(index, op.Cast(node.inputs[index], to=ir.DataType.FLOAT))


def _convert_value_dtype(value: ir.Value, dtype: ir.DataType, of: Collection[ir.DataType]) -> None:
    """Convert the type and the elements of a value, in place, if its dtype is in `of`."""
    if value.dtype not in of:
        return
    if isinstance(value.type, ir.TensorType):
        value.type = ir.TensorType(dtype)  # other values may share the old TensorType
    else:
        value.dtype = dtype
    if (tensor := value.const_value) is not None:
        value.const_value = converted_tensor(tensor.numpy(), dtype, tensor.name)


def converted_tensor(array: np.ndarray, dtype: ir.DataType, name: str | None = None) -> ir.Tensor:
    """Return a tensor with the elements of `array`, finite ones clipped to the range of `dtype`."""
    limit, array = float(dtype.max), array.astype(np.float64)
    clipped = np.where(np.isinf(array), array, np.clip(array, -limit, limit))
    return ir.Tensor(clipped.astype(dtype.numpy()), dtype, name=name)
