"""Nodes of a graph whose results depend on other processes; `cut` takes them out again."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxgrad.autodiff.registry import rule

DOMAIN = "onnxgrad.parallel"  # of nodes that no file contains


def all_reduce(op: Any, x: ir.Value) -> ir.Value:
    """Return the sum over all processes of their `x`, of one shape."""
    return op.set_type_like(op.emit("AllReduce", [x], {}, domain=DOMAIN), x)


def broadcast(op: Any, x: ir.Value, root: int) -> ir.Value:
    """Return the `x` of the process `root`; the others give the shape and dtype only."""
    return op.set_type_like(op.emit("Broadcast", [x], {"root": root}, domain=DOMAIN), x)


def exchanges(node: ir.Node) -> bool:
    """Return whether the result of a node depends on other processes."""
    return node.domain == DOMAIN


@rule("AllReduce", domain=DOMAIN)
def _all_reduce(op: Any, node: ir.Node, g: ir.Value) -> Any:
    """y = sum_r x_r, and L = sum_r L_r(y):  dx_r = sum_s dL_s/dy."""
    return (all_reduce(op, g),)
