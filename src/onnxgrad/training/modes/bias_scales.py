"""Scales of weights that leave room for the biases beside them.

onnxruntime stores a bias as integers of 32 bits with the scale of the data times that of the weight
when it fuses a product, and clips it. A channel whose weights are next to nothing beside its bias
would lose the bias.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir
from onnx import GraphProto, NodeProto, TensorProto

from onnxgrad.model import external
from onnxgrad.model.constants import FLOATS

_PRODUCTS = frozenset("Conv ConvTranspose Gemm".split())
_LARGEST = 1.0001 / np.iinfo(np.int32).max  # onnxruntime.quantization leaves this room


def leave_room_for_biases(graph: GraphProto, weights: Iterable[NodeProto]) -> None:
    """Enlarge scales in place; `weights` are the QuantizeLinear nodes behind weights."""
    held = {t.name: t for t in graph.initializer if t.data_type in FLOATS}
    makers = {y: node for node in graph.node for y in node.output}
    rounded = {node.output[0] for node in weights}
    for node in graph.node:
        if node.op_type not in _PRODUCTS or len(node.input) < 3 or node.input[2] not in held:
            continue
        data, weight = (makers.get(name) for name in node.input[:2])
        if data is None or weight is None:
            continue
        if {data.op_type, weight.op_type} != {"DequantizeLinear"}:
            continue
        if weight.input[0] not in rounded or any(n.input[1] not in held for n in (data, weight)):
            continue
        bias, of_data, of_weight = (
            held[n] for n in (node.input[2], data.input[1], weight.input[1])
        )
        if not any(map(external.is_empty, (bias, of_data, of_weight))):
            _enlarge(of_weight, bias, of_data)


def _enlarge(scale: TensorProto, bias: TensorProto, of_data: TensorProto) -> None:
    """Enlarge the scale of a weight where a bias exceeds integers of 32 bits."""
    now = external.array(scale).astype(np.float64)
    steps = np.abs(external.array(bias).astype(np.float64)) * _LARGEST
    least = steps / external.array(of_data).astype(np.float64)
    if now.shape != least.shape:
        if now.size != 1:
            return  # blocks, for which there is no kernel of integers
        least = least.max(initial=0.0)
    if (now < least).any():
        dtype = ir.DataType(scale.data_type).numpy()
        enlarged = np.maximum(now, least).astype(dtype).reshape(tuple(scale.dims))
        scale.CopyFrom(ir.to_proto(ir.tensor(enlarged, name=scale.name)))
