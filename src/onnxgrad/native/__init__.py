"""The native form of a step, which no file contains: a session of training runs it.

A step consists of standard operators, so that any runtime runs what is exported. The wheel of
onnxruntime has more for its CPU provider: layouts for convolutions, fused products. `to_native`
writes these into a step that is about to become a session.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrad.graph.rewrite import GROUPS, rewrite
from onnxgrad.native import (
    blocked,
    blocked_norms,
    blocked_pointwise,
    cubic,
    epochs,
    masks,
    max_pools,
    products,
    scaled_sums,
    scans,
    scatter,
    side_by_side,
    wide,
)
from onnxgrad.native.phases import EPOCH, PHASES
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.session import threads


@dataclass(frozen=True)
class Target:
    """What a session runs on: a device, with a number of threads; and the rows of a batch."""

    device: Device
    threads: int
    rows: int = 1

    @staticmethod
    def of(device: Any, work: float, rows: int) -> Target:
        """Return the target for a step of `work` multiply-adds."""
        return Target(Device.of(device), threads(work), rows)


def to_native(graph: ir.Graph, target: Target) -> None:
    """Rewrite `graph` in place into the form that is fastest on `target`; other devices keep it."""
    if target.device.kind == "cpu":
        for phase in PHASES:
            rewrite(graph, GROUPS[phase], target)


def loop_to_native(graph: ir.Graph, target: Target) -> None:
    """Rewrite the loop over batches, whose body is the step, as `to_native` rewrites the step."""
    if target.device.kind == "cpu":
        rewrite(graph, GROUPS[EPOCH], target)
