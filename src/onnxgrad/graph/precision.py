"""Conversion of the floats of a model to another dtype: all of them, or those of 16 bits."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.traversal import all_nodes

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, *HALVES)
_LARGE = 1 << 16  # elements of a constant that is in memory once, and that no rule looks into
_DTYPES = ("to", "dtype", "output_dtype")  # attributes whose value is a dtype
_FLOAT32_OPERANDS = {"Resize": 2, "Upsample": 1}  # index of an operand that stays float32


def widen(model: ir.Model, names: Collection[str]) -> None:
    """Let `model` compute in float32 what it computes in 16 bits, in place.

    Its inputs keep the values that they can have: those of float16 are cast. One of bfloat16,
    which numpy lacks, becomes float32, and is rounded. Large constants are cast, too, but those of
    these names; all others are converted. Outputs are float32.
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
            _cast(op, value)


def _cast(op: Emit, value: ir.Value) -> None:
    """Let all that reads an input or a constant of 16 bits read it in float32."""
    wide = ir.Value(type=ir.TensorType(ir.DataType.FLOAT), shape=value.shape)
    ir.convenience.replace_all_uses_with(value, wide, replace_graph_outputs=True)
    rounded = value
    if value.dtype == ir.DataType.BFLOAT16 and value.is_graph_input():
        value.type = wide.type
        rounded = op.Cast(value, to=ir.DataType.BFLOAT16)
    result = op.set_type_like(op.Cast(rounded, to=ir.DataType.FLOAT), wide)
    ir.convenience.replace_all_uses_with(wide, result, replace_graph_outputs=True)


def in_float32_input(op: Emit, w: ir.Value) -> ir.Value:
    """Return an input of 16 bits as one of float32; what reads it reads it rounded."""
    if w.dtype not in HALVES:
        return w
    wide = ir.Value(name=w.name, type=ir.TensorType(ir.DataType.FLOAT), shape=w.shape)
    w.name = op.name(f"{w.name}.rounded")
    with op.at(next(iter(op.graph), None)):
        narrow = op.set_type_like(op.Cast(wide, to=w.dtype), w)
        ir.convenience.replace_all_uses_with(w, narrow, replace_graph_outputs=True)
    op.graph.inputs[list(op.graph.inputs).index(w)] = wide
    return wide


def in_float32(op: Emit, y: ir.Value) -> ir.Value:
    """Return a result of 16 bits in float32, with its name."""
    if y.dtype not in HALVES:
        return y
    wide = op.Cast(y, to=ir.DataType.FLOAT)
    wide.name, y.name = y.name, op.name(f"{y.name}.rounded")
    return wide


def in_dtype(op: Emit, y: ir.Value, like: ir.Value | None) -> ir.Value:
    """Return a result that was widened in the 16 bits of the input that it will be."""
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

    Finite numbers beyond the range of `dtype` are clipped to it: masks contain such numbers. Those
    that are not `of` the given dtypes stay, and so do inputs and constants that are `unchanged`.
    """
    kept: set[ir.Value | None] = {*unchanged}
    computed: list[tuple[ir.Node, int]] = []  # operands that must stay float32
    has_stash_type = dtype == ir.DataType.DOUBLE and model.opset_imports.get("", 0) >= 21
    graphs = (model.graph, *(function.graph for function in model.functions.values()))
    for node in (n for graph in graphs for n in all_nodes(graph)):
        index = _FLOAT32_OPERANDS.get(node.op_type)
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
            _set(value, dtype, of)
        for attribute in list(node.attributes.values()):
            if attribute.name in ("value_float", "value_floats") and not attribute.is_ref():
                array = np.asarray(attribute.value, np.float64)  # the attribute is always float32
                del node.attributes[attribute.name]
                node.attributes["value"] = ir.AttrTensor("value", _rounded(array, dtype, None))
            elif attribute.name in _DTYPES and attribute.value in of:
                node.attributes[attribute.name] = ir.AttrInt64(attribute.name, dtype)
            elif attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in of:
                tensor = _converted(attribute.value, dtype)
                node.attributes[attribute.name] = ir.AttrTensor(attribute.name, tensor)
            elif attribute.type == ir.AttributeType.TYPE_PROTO:  # of an Optional
                content_type = attribute.value.type
                if content_type.dtype in of:
                    content_type.dtype = dtype
    for graph in (g for outer in graphs for g in (outer, *outer.subgraphs())):
        for value in (*graph.inputs, *graph.initializers.values()):
            if value not in kept:
                _set(value, dtype, of)
    for node, index in computed:
        holder = node.graph
        assert isinstance(holder, ir.Graph)
        with Emit(holder).at(node) as op:
            node.replace_input_with(index, op.Cast(node.inputs[index], to=ir.DataType.FLOAT))


def _set(value: ir.Value, dtype: ir.DataType, of: Collection[ir.DataType]) -> None:
    if value.dtype in of:
        if isinstance(value.type, ir.TensorType):
            value.type = ir.TensorType(dtype)  # the old one may be that of other values, too
        else:
            value.dtype = dtype
        if value.const_value is not None:
            value.const_value = _converted(value.const_value, dtype)


def _converted(tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.Tensor:
    return _rounded(tensor.numpy().astype(np.float64), dtype, tensor.name)


def _rounded(array: np.ndarray, dtype: ir.DataType, name: str | None) -> ir.Tensor:
    limit = float(dtype.max)
    clipped = np.where(np.isinf(array), array, np.clip(array, -limit, limit))
    return ir.Tensor(clipped.astype(dtype.numpy()), dtype, name=name)
