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
        sizes: `{value: elements that a scale of it may have}`, of values computed from stored
            integers and from constants, and of rows that are gathered from them and have no scale
            yet. As many as integers; of -1, 0 and 1, which may be a mask of a weight, fewer.
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
                    self.sizes[x] = _most_scales(x)
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
        """Return how many elements operand `index` may have as a scale or shift; 0: it is none."""
        others = [x for i, x in enumerate(node.inputs) if i != index and x is not None]
        if node.op_type in _SCALES and any(x in self.results for x in others):
            return max(self.sizes.values())
        if node.op_type in _SCALES | _SHIFTS:
            return max((self.sizes.get(x, 0) for x in others), default=0)
        return 0

    def scaled_by(self, value: ir.Value) -> int:
        """Return the same for `value`, through nodes that move it."""
        found = 0
        for node, index in value.uses():
            moved = node.outputs if node.op_type in MOVES and index == 0 else ()
            found = max([found, self.beside(node, index), *map(self.scaled_by, moved)])
        return found


def _stores_integers(x: ir.Value, op_type: str) -> bool:
    """Return whether `x` is a constant of integers that are no mask of zeros and ones."""
    if x.const_value is None or x.producer() is not None or x.dtype is None or x.is_graph_input():
        return False
    size, kind = x.const_value.size, x.dtype.name
    wide = kind in ("INT32", "INT64", "UINT32", "UINT64") and op_type in _UNPACKS
    bias = kind == "INT32" and op_type == "Cast" and size in x.const_value.shape.numpy()
    if not (wide or bias or kind in _FEW_BITS) or size < 2:
        return False
    array = x.const_value.numpy().astype(np.float32)
    return not evidence.is_binary(array) and not (bias and evidence.is_ramp(array))


def _most_scales(x: ir.Value) -> int:
    assert x.const_value is not None
    signs = bool((np.abs(x.const_value.numpy().astype(np.float32)) <= 1).all())
    return x.const_value.size - signs
