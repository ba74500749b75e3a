"""The native form of a step, which no file contains: a session of training runs it.

A step consists of standard operators, so that any runtime runs an exported one. The wheel of
onnxruntime has more for its CPU provider: layouts for convolutions, fused products. `to_native`
writes these into a step that is about to become a session.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.graph.rewrite import GROUPS, rewrite
from onnxgrad.native import (
    blocked,
    blocked_pointwise,
    epochs,
    max_pools,
    scans,
    side_by_side,
    single_nodes,
)
from onnxgrad.native.target import EPOCH, PHASES, Target


def to_native(graph: ir.Graph, target: Target) -> None:
    """Rewrite `graph` in place into the form that is fastest on `target`; other devices keep it."""
    if target.device.kind == "cpu":
        for phase in PHASES:
            rewrite(graph, GROUPS[phase], target)


def loop_to_native(graph: ir.Graph, target: Target) -> None:
    """Rewrite the loop over batches, whose body is the step, as `to_native` rewrites the step."""
    if target.device.kind == "cpu":
        rewrite(graph, GROUPS[EPOCH], target)
