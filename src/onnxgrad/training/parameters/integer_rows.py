"""Weights that a model stores as integers, in the table of what trains."""

from __future__ import annotations

import math
from dataclasses import replace

import onnx_ir as ir
from onnx import ModelProto, TensorProto

from onnxgrad.model.traversal import nodes_of
from onnxgrad.model.weights import constant_refs
from onnxgrad.training.parameters.aliases import integer_aliases
from onnxgrad.training.parameters.table import Tensor

_TYPES = frozenset(
    TensorProto.DataType.Value(name)
    for name in "INT4 UINT4 INT8 UINT8 FLOAT8E4M3FN FLOAT8E5M2".split()
)
WHY = "a quantized weight: it stays; adapters train beside it"


def integer_rows(proto: ModelProto) -> list[Tensor]:
    """Return the quantized weights of `proto`: the first integers with two axes of their readers"""
    refs = list(constant_refs(proto))
    found = {r.graph_name for r in refs if r.read().data_type in _TYPES and len(r.read().dims) > 1}
    weights = {
        next(name for name in node.input if name in found)
        for node in nodes_of(proto)
        if found.intersection(node.input)
    }
    rows = []
    for ref in refs:
        if ref.graph_name in weights:
            tensor = ref.read()
            dtype, size = ir.DataType(tensor.data_type).name.lower(), math.prod(tensor.dims)
            rows.append(Tensor(ref.name, tuple(tensor.dims), dtype, size, False, WHY))
    aliases = integer_aliases(proto, rows)
    return [replace(row, alias=aliases.get(row.name, "")) for row in rows]
