"""Weights that a graph stores as integers and turns into floats by itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import onnx_ir as ir

from onnxgrad.training.parameters import evidence
from onnxgrad.training.parameters.operands import MOVES, letter

_FEW_BITS = frozenset(
    """INT2 UINT2 INT4 UINT4 INT8 UINT8 INT16 UINT16 FLOAT4E2M1 FLOAT8E4M3FN FLOAT8E4M3FNUZ
    FLOAT8E5M2 FLOAT8E5M2FNUZ""".split()
)
_UNPACKS = frozenset("BitShift BitwiseAnd BitwiseOr BitwiseXor".split())
_KEEPS = MOVES | _UNPACKS | frozenset("Concat Mod Clip Where".split())
_SCALES = frozenset("Mul Div".split())
_SHIFTS = frozenset("Add Sub".split())


class StoredIntegers:
    """Which values of a graph are stored integers, or are computed from them.

    Attributes:
        sizes: `{value: number of integers}`, of values computed from stored integers and from
            constants, and of rows that are gathered from them and have no scale yet.
        results: results of products of data with integers that have no scale yet.
    """

    def __init__(self, nodes: Iterable[ir.Node], data: Collection[ir.Value]) -> None:
        self.sizes: dict[ir.Value, int] = {}
        self.results: set[ir.Value] = set()
        unscaled: set[ir.Value] = set()
        for node in nodes:
            op, inputs = node.op_type, [x for x in node.inputs if x is not None]
            for x in inputs:
                if x not in self.sizes and _stores_integers(x, op):
                    self.sizes[x] = x.const_value.size if x.const_value is not None else 0
                    unscaled.add(x)
            known = [x for x in inputs if x in self.sizes]
            others = [x for x in inputs if x not in self.sizes]
            if op in MOVES and inputs[:1] and inputs[0] in self.results:
                self.results.update(node.outputs)
            elif known and any(
                letter(node, i) == "f" and x in known for i, x in enumerate(node.inputs)
            ):
                self.results.update(node.outputs if unscaled.issuperset(known) else ())
            elif known and (op in _KEEPS or op in _SCALES | _SHIFTS):
                scaled = op in _SCALES or not unscaled.issuperset(known)
                mixed = op not in MOVES and any(x in data for x in others)
                gathered = any(y in data for y in node.outputs)
                other = op in MOVES and known[0] is not inputs[0]  # only says how to move
                if other or mixed or (gathered and scaled):
                    continue
                self.sizes |= dict.fromkeys(node.outputs, max(self.sizes[x] for x in known))
                unscaled.update(() if scaled else node.outputs)

    def beside(self, node: ir.Node, index: int) -> int:
        """Return how many integers operand `index` scales or shifts; 0 if none."""
        others = [x for i, x in enumerate(node.inputs) if i != index and x is not None]
        if node.op_type in _SCALES and any(x in self.results for x in others):
            return max(self.sizes.values())
        if node.op_type in _SCALES | _SHIFTS:
            return max((self.sizes.get(x, 0) for x in others), default=0)
        return 0

    def scaled_by(self, value: ir.Value) -> int:
        """Return how many integers `value` scales or shifts, through nodes that move it."""
        found = 0
        for node, index in value.uses():
            moved = node.outputs if node.op_type in MOVES and index == 0 else ()
            found = max([found, self.beside(node, index), *map(self.scaled_by, moved)])
        return found


def _stores_integers(x: ir.Value, op_type: str) -> bool:
    """Return whether `x` is a constant of integers that are no mask of zeros and ones."""
    if x.const_value is None or x.producer() is not None or x.dtype is None or x.is_graph_input():
        return False
    wide = x.dtype.name in ("INT32", "INT64", "UINT32", "UINT64") and op_type in _UNPACKS
    if not (wide or x.dtype.name in _FEW_BITS) or x.const_value.size < 2:
        return False
    return not evidence.is_binary(x.const_value.numpy().astype(np.float32))
