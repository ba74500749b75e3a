"""The native form of a step, which no file contains: a session of training runs it.

A step consists of standard operators, so that any runtime runs what is exported. The wheel of
onnxruntime has more for its CPU provider: layouts for convolutions, fused products. `to_native`
writes these into a step that is about to become a session.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.native.blocked import blocked_convolutions
from onnxgrad.native.cubic import cubic_by_products
from onnxgrad.native.masks import masks_as_factors
from onnxgrad.native.max_pools import max_pools
from onnxgrad.native.products import transposed_operands
from onnxgrad.native.scanned import scanned_outside
from onnxgrad.native.scatter import scatter_rows
from onnxgrad.native.side_by_side import images_side_by_side
from onnxgrad.native.wide import narrow
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


# each rewrites the nodes of one graph in place, and leaves alone what it does not improve
PASSES: tuple[Callable[[Emit, Target], None], ...] = (
    cubic_by_products,
    masks_as_factors,
    blocked_convolutions,
    max_pools,
    images_side_by_side,
    scatter_rows,
    transposed_operands,
    scanned_outside,
    narrow,
)


def to_native(graph: ir.Graph, target: Target) -> None:
    """Rewrite `graph` in place into the form that is fastest on `target`; other devices keep it."""
    if target.device.kind != "cpu":
        return
    for rewrite in PASSES:
        rewrite(Emit(graph), target)  # nodes of another pass may be further down
