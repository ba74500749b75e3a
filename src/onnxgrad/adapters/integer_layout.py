"""The layout of the integers of a quantized weight: packing, and groups that share a scale."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from onnxgrad.adapters.uses import attribute_values
from onnxgrad.errors import printable
from onnxgrad.model.constants import ConstantRef


@dataclass
class IntegerLayout:
    """The storage layout of a weight of integers: their range `low` to `high`, their packing in
    bytes, and the groups that share a scale.

    Attributes:
        shape: shape of the integers; of MatMulNBits, with the padding of the last block.
        low: least integer.
        high: greatest integer.
        axis: axis along which scales differ; None: all integers are one group.
        block: length of a group along `axis`; 0: each index of `axis` is a group.
        packed: whether bytes hold several integers each, as in MatMulNBits.
    """

    shape: tuple[int, ...]
    low: int
    high: int
    axis: int | None = None
    block: int = 0
    packed: bool = False

    @property
    def bits(self) -> int:
        """The count of bits of one integer."""
        return (self.high - self.low).bit_length()

    @property
    def symmetric_zero_point(self) -> int:
        """The zero point of integers that are quantized symmetrically."""
        return 0 if self.low < 0 else 1 << (self.bits - 1)

    def split_groups(self, array: np.ndarray) -> np.ndarray:
        """Reshape an array of the weight's shape to (groups, elements), so that each row shares a
        scale.
        """
        if self.axis is None:
            return array.reshape(1, -1)
        if not self.block:
            return np.moveaxis(array, self.axis, 0).reshape(array.shape[self.axis], -1)
        last = np.moveaxis(array, self.axis, -1)
        pad = [(0, 0)] * (last.ndim - 1) + [(0, -last.shape[-1] % self.block)]
        return np.pad(last, pad).reshape(-1, self.block)

    def join_groups(self, groups: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Reshape a matrix (groups, elements) to the shape of the weight; the inverse of
        `split_groups`.
        """
        if self.axis is None:
            return groups.reshape(shape)
        moved = np.moveaxis(np.empty(shape, bool), self.axis, -1 if self.block else 0).shape
        if not self.block:
            return np.moveaxis(groups.reshape(moved), 0, self.axis)
        rows = groups.reshape(*moved[:-1], -1)[..., : moved[-1]]
        return np.moveaxis(rows, -1, self.axis)

    def scales_to_column(self, values: np.ndarray) -> np.ndarray:
        """Reshape stored scales or zero points to a column (groups, 1)."""
        blocked = self.block and not self.packed
        values = np.moveaxis(values, self.axis or 0, -1) if blocked else values
        return values.astype(np.float64).reshape(-1, 1)

    def column_to_scales(self, values: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Reshape a column (groups, 1) of scales or zero points to the shape of the stored tensor
        `like`.
        """
        if not self.block or self.packed:
            return values.reshape(like.shape)
        moved = np.moveaxis(like, self.axis or 0, -1).shape
        return np.moveaxis(values.reshape(moved), -1, self.axis or 0)

    def unpack(self, array: np.ndarray) -> np.ndarray:
        """Return the integers of the stored array `array`, unpacked from bytes, as floats."""
        if not self.packed:
            return array.astype(np.float64)
        shifts = np.arange(0, 8, self.bits, dtype=np.uint8)
        values = (array[..., None] >> shifts) & self.high
        return values.reshape(self.shape[0], -1).astype(np.float64)

    def pack(self, values: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Return the integers `values`, packed in bytes, in the shape and dtype of the stored
        tensor `like`.
        """
        if not self.packed:
            return values.astype(like.dtype)
        count = 8 // self.bits
        rows = np.pad(values, [(0, 0), (0, -values.shape[1] % count)]).astype(np.uint8)
        parts = rows.reshape(*rows.shape[:-1], -1, count)
        shifts = np.arange(0, 8, self.bits, dtype=np.uint8)
        return np.bitwise_or.reduce(parts << shifts, -1).astype(np.uint8).reshape(like.shape)


def integer_layout_of(node: NodeProto, ref: ConstantRef, scales: ConstantRef) -> IntegerLayout:
    """Return the integer layout of the quantized weight `ref`, which `node` reads and whose scales
    are `scales`.

    Raises:
        ValueError: the integers have a dtype that is not covered.
    """
    options = attribute_values(node)
    if node.op_type == "MatMulNBits":  # a row of integers is a column of the matrix
        block, bits = int(options["block_size"]), int(options.get("bits", 4))
        shape = int(options["N"]), -(-int(options["K"]) // block) * block
        return IntegerLayout(shape, 0, (1 << bits) - 1, 1, block, packed=True)
    q, scale = ref.array(), scales.array()
    ends = {"int4": (-8, 7), "uint4": (0, 15)}.get(q.dtype.name)
    if ends is None and q.dtype.kind not in "iu":
        raise ValueError(
            f"the weight {printable(ref.name)!r} holds {q.dtype.name}, and only integers can be "
            "quantized anew: merge the adapter into the float model"
        )
    low, high = ends or (int(np.iinfo(q.dtype).min), int(np.iinfo(q.dtype).max))
    if scale.size == 1:
        return IntegerLayout(q.shape, low, high)
    dequantizes = node.op_type == "DequantizeLinear"
    axis = int(options.get("axis", 1)) if dequantizes else -1
    blocked = dequantizes and scale.ndim == q.ndim > 1
    block = -(-q.shape[axis] // scale.shape[axis]) if blocked else 0
    return IntegerLayout(
        q.shape, low, high, axis, int(options.get("block_size") or block) if blocked else 0
    )


def quantize_groups(
    exact: np.ndarray,
    q: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray,
    layout: IntegerLayout,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantize a weight; return its integers, scales and zero points, which are symmetric if the
    old zero points are symmetric.

    Args:
        exact: the new weight (groups, elements).
        q: the integers before (groups, elements).
        scale: the scales before (groups, 1), which groups of zeros keep.
        zero: the zero points before (groups, 1).
        layout: the layout of the integers.
    """
    low, high = layout.low, layout.high
    symmetric = bool(np.all(zero == layout.symmetric_zero_point))
    ends = (-64, 64) if low < 0 else (0, 127)
    if layout.bits == 8 and ends[0] <= q.min() and q.max() <= ends[1]:
        low, high = ends  # 7 bits, which saturate less often
    if symmetric and layout.bits <= 4:  # the largest element becomes the least integer
        most = np.take_along_axis(exact, np.abs(exact).argmax(1)[:, None], 1)
        new = -most / (1 << (layout.bits - 1))
    elif symmetric:
        new = np.abs(exact).max(1)[:, None] / ((high - low) // 2)
    else:
        new = (exact.max(1, initial=0) - exact.min(1, initial=0))[:, None] / (high - low)
    new = np.where(new == 0, scale, new)
    if not symmetric:
        zero = np.clip(np.rint(low - exact.min(1, initial=0)[:, None] / new), low, high)
    return np.clip(np.rint(exact / new) + zero, low, high), new, zero
