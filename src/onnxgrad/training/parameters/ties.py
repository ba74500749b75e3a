"""Weights that a network shares, and of which its exporter stored two copies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.model.weights import constant_refs
from onnxgrad.training.parameters.operands import MOVES, letter, readers
from onnxgrad.training.parameters.table import Tensor


def copies(proto: ModelProto, graph: ir.Graph, rows: Sequence[Tensor]) -> dict[str, str]:
    """Return which weights are copies of the table of an embedding, `{name: name of the table}`.

    They are tables and factors with the same numbers, maybe transposed, as the last layer of a
    language model has those of its first one. Two layers may be equal for other reasons, such as
    how they began, but not an embedding and a layer.
    """
    groups: dict[tuple, list[Tensor]] = {}
    for row in rows:
        if row.trains and len(row.shape) == 2 and min(row.shape) > 1:
            groups.setdefault((row.dtype, *sorted(row.shape)), []).append(row)
    originals: dict[str, str] = {}
    for group in groups.values():
        values = {row.name: graph.initializers[row.name] for row in group}
        roles = {name: _letters(value) for name, value in values.items() if len(group) > 1}
        tables = [name for name, letters in roles.items() if "t" in letters]
        others = [name for name, letters in roles.items() if letters & {"t", "f"}]
        if not tables or len(others) < 2:
            continue
        arrays = {ref.name: ref.array() for ref in constant_refs(proto) if ref.name in roles}
        for table, other in product(tables, others):
            new = other != table and originals.keys().isdisjoint((other, table))
            if new and _equal(arrays[table], arrays[other]):
                originals[other] = table
    return originals


def _equal(table: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two matrices are equal, as they are or transposed."""
    if (table == table[0, 0]).all():
        return False  # one number: nothing says that they are the same weight
    return any(
        np.array_equal(table[0], matrix[0]) and np.array_equal(table, matrix)
        for matrix in (other, other.T)
    )


def _letters(value: ir.Value) -> set[str]:
    """Return the roles of the operands that `value` is, through nodes that only move it."""
    uses = readers([value], MOVES - {"Gather"})  # which looks up rows of a table
    return {letter(node, index) for node, index in uses}
