"""The native form of a training step: operators that only onnxruntime's CPU provider has.

A step consists of standard operators, so that any runtime runs an exported step. The wheel of
onnxruntime has faster operators for its CPU provider: layouts of convolutions, and fused products.
`to_native` writes these into a step before a session of training is built from it.
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
    """Rewrite a graph in place into its native form for a CPU; do nothing for a GPU."""
    if target.device.kind == "cpu":
        for phase in PHASES:
            rewrite(graph, GROUPS[phase], target)


def loop_to_native(graph: ir.Graph, target: Target) -> None:
    """Rewrite the Scan over batches, whose body is the training step, into its native form."""
    if target.device.kind == "cpu":
        rewrite(graph, GROUPS[EPOCH], target)
