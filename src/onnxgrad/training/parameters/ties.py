"""Weights that a network shares, and of which its exporter stored two copies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.graph.emit import Emit
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.model.notes import read_adapters
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.weights import constant_refs, lift
from onnxgrad.training.parameters.operands import MOVES, letter, readers
from onnxgrad.training.parameters.table import Tensor
from onnxgrad.training.parameters.verdicts import judge


def tie_copies(model: ModelLike) -> ModelProto:
    """Return `model` with one tensor for each weight that its exporter stored several times.

    These are copies of the table of an embedding, maybe transposed: that of a decoder beside that
    of its encoder, or the weight of the last layer of a language model. `trainable` lists them as
    copies. Each trains by itself, and they part; here they are one weight, with the sum of the
    gradients, as in the network that was exported. The opposite is `separate_merged`.

    Args:
        model: model, serialized model or path; never modified.

    Returns:
        A model that computes the same; `model` itself, as read, if it has no copies. Where a copy
        is transposed, a Transpose computes it, once when a session is made.

    Raises:
        ValueError: the model has adapters, which may be beside a copy: tie before `add_lora`.
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (int64[N] x) => (float[N,3] y)
        ...     <float[3,2] table = {1, 2, 3, 4, 5, 6}, float[2,3] last = {1, 3, 5, 2, 4, 6}>
        ...     { h = Gather(table, x) y = MatMul(h, last) }''')
        >>> tied = og.tie_copies(model)
        >>> [tensor.name for tensor in tied.graph.initializer]
        ['table']
        >>> [node.op_type for node in tied.graph.node]
        ['Transpose', 'Gather', 'MatMul']
    """
    proto = read(model)
    graph, rows = judge(proto)
    originals = copies(proto, graph, rows)
    if not originals:
        return proto
    if read_adapters(proto):
        raise ValueError("the model has adapters, which may be beside a copy: tie before add_lora")
    tied = ModelProto()
    tied.CopyFrom(proto)
    concerned = {*originals, *originals.values()}
    refs = [ref for ref in constant_refs(tied) if ref.name in concerned]
    arrays = {ref.name: ref.array() for ref in refs}
    lift(tied, refs)
    made = to_ir(tied)
    values = made.graph.initializers
    op = Emit(made.graph)
    with op.at(next(iter(made.graph))):
        for name, table in originals.items():
            same = np.array_equal(arrays[name], arrays[table])
            new = values[table] if same else op.Transpose(values[table], perm=[1, 0])
            ir.convenience.replace_all_uses_with(values[name], new, replace_graph_outputs=True)
            made.graph.inputs[:] = [x for x in made.graph.inputs if x is not values[name]]
            del values[name]
    return to_proto(made)


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
