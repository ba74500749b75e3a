"""Gradients of embeddings on one thread: whole rows are added at once.

ScatterElements takes an index for each element, and 5 to 10 times as long as ScatterND, which takes
one for each row. On several threads ScatterND loses sums where an index occurs twice.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.graph.rewrite import rewrites
from onnxgrad.graph.shapes import dims, static
from onnxgrad.graph.traversal import made_by
from onnxgrad.native.phases import NODES


@rewrites("ScatterElements", group=NODES)
def scattered_rows(op, node):
    """ScatterND adds the rows that a ScatterElements adds along the first axis, in float32."""
    (x, indices, u), get = node.inputs, node.attributes
    expand = made_by(indices, "Expand")
    adds = get.get_string("reduction", "none") == "add" and get.get_int("axis", 0) == 0
    if op.target.threads != 1 or not adds or not expand or x.dtype != ir.DataType.FLOAT:
        return None
    rows = expand.inputs[0]
    index, row, update = dims(rows), dims(x), dims(u)
    if index is None or row is None or update is None:
        return None
    width = static(row[1:])
    one_each = index[0] == update[0] is not None and index[1:] == (1,) * (len(index) - 1)
    whole = len(index) == len(row) == len(update) and width is not None and width == update[1:]
    if not one_each or not whole:
        return None
    rows = op.Reshape(op.Cast(rows, to=ir.DataType.INT64), [-1, 1])
    return [op.ScatterND(x, rows, u, reduction="add")]
