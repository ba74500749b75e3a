"""Nodes of a graph that exchange values with other processes: AllReduce and Broadcast.

onnxruntime never runs them: `cut_at_exchanges` removes them from the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.graph.rewrite import rewrites
from onnxgrad.operators.records import Unsupported, rule

DOMAIN = "onnxgrad.parallel"  # no file contains nodes of this domain
MESSAGES = "parallel.messages"  # the group of rewrites by which processes send fewer values


def all_reduce(op: Any, x: ir.Value, ratio: Sequence[ir.Value] = ()) -> ir.Value:
    """Return the sum of `x` over all processes; `x` has the same shape in each process.

    With `ratio`, scalars (r, n) of the dtype of x, the sum is multiplied by r / (sum of n); r is
    the same in all processes. Such a sum has no gradient.
    """
    return op.set_type_like(op.emit("AllReduce", [x, *ratio], {}, domain=DOMAIN), x)


def broadcast(op: Any, x: ir.Value, root: int) -> ir.Value:
    """Return the value of `x` in the process `root`; other processes give its shape and dtype."""
    return op.set_type_like(op.emit("Broadcast", [x], {"root": root}, domain=DOMAIN), x)


def exchanges(node: ir.Node) -> bool:
    """Return whether a node is an AllReduce or Broadcast, which exchanges values."""
    return node.domain == DOMAIN


@rule("AllReduce", domain=DOMAIN)
def _gradient_of_all_reduce(op: Any, node: ir.Node, g: ir.Value) -> Any:
    """Gradient of y = sum_r x_r, for a loss L = sum_r L_r(y):  dx_r = sum_s dL_s/dy."""
    if len(node.inputs) > 1:
        return Unsupported("a sum of gradients over processes has no gradient")
    return (all_reduce(op, g),)


@rewrites("Concat", group=MESSAGES)
def _merge_all_reduces(op: Any, node: ir.Node) -> Any:
    """Rewrite a Concat of AllReduces as one AllReduce of a Concat: one message, not many.

    Concat_i Reshape(sum_r x_ri) = sum_r Concat_i Reshape(x_ri).
    """
    sums: list[ir.Node] = []
    parts = []
    for v in node.inputs:
        before = v.producer() if v is not None else None
        reshapes = before is not None and before.op_type == "Reshape"
        total = _all_reduce_read_once(before.inputs[0] if before is not None and reshapes else v)
        if v is None or before is None or total is None or len(v.uses()) > 1:
            return None
        sums.append(total)
        x = total.inputs[0]
        parts.append(op.set_type_like(op.Reshape(x, before.inputs[1]), v) if reshapes else x)
    ratio = [v for v in sums[0].inputs[1:] if v is not None]
    if len(sums) < 2 or any(list(s.inputs[1:]) != ratio for s in sums):
        return None
    (y,) = op.copy_node(node, parts)
    return [all_reduce(op, op.set_type_like(y, node.outputs[0]), ratio)]


def _all_reduce_read_once(value: ir.Value | None) -> ir.Node | None:
    """Return the AllReduce node of a value that one node reads; None for other values."""
    node = None if value is None else value.producer()
    if node is None or (node.domain, node.op_type) != (DOMAIN, "AllReduce"):
        return None
    (y,) = node.outputs
    return node if len(y.uses()) == 1 and not y.is_graph_output() else None
