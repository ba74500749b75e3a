"""`Target`: device, threads and rows; the groups of native rewrites, and the sizes that pay.

All sizes were measured on the CPU of one machine; they change results by rounding only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onnxgrad.runtime.device import Device
from onnxgrad.runtime.session import thread_count

# -- groups of rewrites, in the order in which they run -------------------------------------------

NODES = "native.nodes"  # first, since they see which gradients come from convolutions
BLOCKS = "native.blocks"  # convolutions in blocks of channels, and the nodes between them
PLAIN = "native.plain"  # convolutions and pools that are not in blocks, and sums
LOOPS = "native.loops"  # nodes that leave the bodies of Scans
PHASES = (NODES, BLOCKS, PLAIN, LOOPS)

EPOCH = "native.epoch"  # nodes of the loop over the batches, whose body is the step

# -- thresholds -----------------------------------------------------------------------------------

# Pixels of an image below which all images of a batch are joined into a wide one: for 8 images
# (512, 2, 2) and 3 x 3, it takes 3 ms instead of 8, and transposed 5 instead of 25.
LEAST_PIXELS = 16
# Elements of a row of a pool from which comparing elements costs less than the output of indices.
LEAST_POOL_ELEMENTS = 1 << 9
# Rows and columns of aT b from which a transposed copy of a pays: the kernel transposes a anew for
# every 128 columns. Measured with 1 thread: 0.73-0.88 of the time of these products, 0.93-0.96 of a
# step of an MLP; no difference for encoders, whose products have fewer rows or columns.
LEAST_PRODUCT_LENGTH = 512
MOST_COPIED_BYTES = 1 << 25  # bytes of this copy
# Elements of an axis up to which a cubic Resize is faster as a product of matrices.
LONGEST_CUBIC_AXIS = 2048
# Elements of a value in one iteration of a Scan, up to which its stack stays in the cache. With
# 1 << 15 instead, a step of the GRU or LSTM of 128 units in benchmarks/zoo.py takes 1.09 to 1.1
# times as long on one thread. Without this rewrite, a GRU or LSTM of 16 units takes 1.24 and 1.4
# times as long.
MOST_SCANNED_ELEMENTS = 1 << 11
# Elements of the data of one step up to which the loop over batches adds a column of ones to them.
MOST_DATA_ELEMENTS = 1 << 15


@dataclass(frozen=True)
class Target:
    """The device and the thread count of a session, and the row count of a batch."""

    device: Device
    threads: int
    rows: int = 1

    @staticmethod
    def of(device: Any, work: float, rows: int) -> Target:
        """Return the target for a step of `work` multiply-adds on batches of `rows` rows."""
        return Target(Device.of(device), thread_count(work), rows)
