"""The native form of a training step: operators that only onnxruntime's CPU provider has.

A step consists of standard operators, so that any runtime runs an exported step. The wheel of
onnxruntime has faster operators for its CPU provider: layouts of convolutions, and fused products.
`to_native` writes these into a step before a session of training is built from it. For other
execution providers, which lack kernels, it writes standard operators: see `device_forms.py`.

The sizes from which a rewrite pays stand at the top of its file. All were measured on the CPU of
one machine; they change results by rounding only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrad.graph.rewrite import GROUPS, rewrite
from onnxgrad.native import (
    blocked,
    blocked_pointwise,
    epochs,
    max_pools,
    products,
    scans,
    single_nodes,
)
from onnxgrad.native.blocked_layout import BLOCKS
from onnxgrad.native.device_forms import DEVICES
from onnxgrad.native.epochs import EPOCH
from onnxgrad.native.products import ORDERED
from onnxgrad.native.scans import LOOPS
from onnxgrad.native.single_nodes import NODES, PLAIN
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.session import thread_count

PHASES = (NODES, BLOCKS, PLAIN, LOOPS)  # groups of rewrites, in the order in which they run


@dataclass(frozen=True)
class Target:
    """The device and the thread count of a session, and the row count of a batch: a rewrite's
    `op.target`.
    """

    device: Device
    threads: int
    rows: int = 1

    @staticmethod
    def for_step(device: Any, work: float, rows: int) -> Target:
        """Return the target for a step of `work` multiply-adds on batches of `rows` rows."""
        return Target(Device.of(device), thread_count(work), rows)


def to_native(graph: ir.Graph, target: Target, in_order: bool = False) -> None:
    """Rewrite a graph in place into its native form for a device; CUDA has none.

    `in_order`: whether the nodes run in their order, as in `session`.
    """
    if target.device.kind == "cpu":
        for phase in (*PHASES, *(ORDERED,) * in_order):
            rewrite(graph, GROUPS[phase], target)
    elif target.device.copies_tensors:
        rewrite(graph, GROUPS[DEVICES], target)


def loop_to_native(graph: ir.Graph, target: Target) -> None:
    """Rewrite the Scan over batches, whose body is the training step, into its native form."""
    if target.device.kind == "cpu":
        rewrite(graph, GROUPS[EPOCH], target)
