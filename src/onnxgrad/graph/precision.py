"""Conversion of all floats of a model to one dtype."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.traversal import all_nodes

_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_DTYPES = ("to", "dtype", "output_dtype")  # attributes whose value is a dtype
_FLOAT32_OPERANDS = {"Resize": 2, "Upsample": 1}  # index of an operand that stays float32


def set_precision(model: ir.Model, dtype: ir.DataType) -> None:
    """Convert, in place, every float type of `model` to `dtype`, also the target types of Casts.

    Finite numbers beyond the range of `dtype` are clipped to it: masks contain such numbers.
    """
    unchanged = set()
    has_stash_type = dtype == ir.DataType.DOUBLE and model.opset_imports.get("", 0) >= 21
    graphs = (model.graph, *(function.graph for function in model.functions.values()))
    for node in (n for graph in graphs for n in all_nodes(graph)):
        index = _FLOAT32_OPERANDS.get(node.op_type)
        if index is not None and index < len(node.inputs):
            unchanged.add(node.inputs[index])
        if (node.domain, node.op_type) == ("", "ConstantOfShape"):
            zero = ir.AttrTensor("value", ir.tensor(np.zeros(1, np.float32)))
            node.attributes.setdefault("value", zero)
        if has_stash_type and (node.domain, node.op_type) == ("", "GroupNormalization"):
            node.attributes["stash_type"] = ir.AttrInt64("stash_type", dtype)  # float32 by default
        for value in node.outputs:
            _set(value, dtype)
        for attribute in list(node.attributes.values()):
            if attribute.name in ("value_float", "value_floats") and not attribute.is_ref():
                array = np.asarray(attribute.value, np.float64)  # the attribute is always float32
                del node.attributes[attribute.name]
                node.attributes["value"] = ir.AttrTensor("value", _rounded(array, dtype, None))
            elif attribute.name in _DTYPES and attribute.value in _FLOATS:
                node.attributes[attribute.name] = ir.AttrInt64(attribute.name, dtype)
            elif attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in _FLOATS:
                tensor = _converted(attribute.value, dtype)
                node.attributes[attribute.name] = ir.AttrTensor(attribute.name, tensor)
            elif attribute.type == ir.AttributeType.TYPE_PROTO:  # of an Optional
                content_type = attribute.value.type
                if content_type.dtype in _FLOATS:
                    content_type.dtype = dtype
    for graph in (g for outer in graphs for g in (outer, *outer.subgraphs())):
        for value in (*graph.inputs, *graph.initializers.values()):
            if value not in unchanged:
                _set(value, dtype)


def _set(value: ir.Value, dtype: ir.DataType) -> None:
    if value.dtype in _FLOATS:
        value.dtype = dtype
        if value.const_value is not None:
            value.const_value = _converted(value.const_value, dtype)


def _converted(tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.Tensor:
    return _rounded(tensor.numpy().astype(np.float64), dtype, tensor.name)


def _rounded(array: np.ndarray, dtype: ir.DataType, name: str | None) -> ir.Tensor:
    limit = float(dtype.max)
    clipped = np.where(np.isinf(array), array, np.clip(array, -limit, limit))
    return ir.Tensor(clipped.astype(dtype.numpy()), dtype, name=name)
