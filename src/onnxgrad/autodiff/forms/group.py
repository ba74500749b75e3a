"""The group of rewrites that run after the sweep, and what several of them ask."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

GRADIENT = "gradient"


def is_result_of(v: ir.Value | None, op_type: str) -> bool:
    """Return whether a node of a standard operator computes `v`."""
    node = None if v is None else v.producer()
    return node is not None and (node.domain, node.op_type) == ("", op_type)


def is_own(op: Any, v: ir.Value, op_type: str) -> bool:
    """Return whether a node of a standard operator computes `v`, and the package wrote it."""
    return is_result_of(v, op_type) and op.is_own(v.producer())


def read_once(v: ir.Value) -> bool:
    """Return whether exactly one node reads `v`, and it is no output of its graph."""
    return len(list(v.uses())) == 1 and not v.is_graph_output()


def is_zero(op: Any, v: ir.Value) -> bool:
    """Return whether `v` are zeros, expanded to a shape."""
    node = v.producer()
    return is_result_of(v, "Expand") and node is not None and op.is_all(node.inputs[0], 0)
