"""A quantized weight and its adapter become a weight that is quantized anew, as it was before."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto

from onnxgrad.adapters.uses import attributes
from onnxgrad.errors import printable
from onnxgrad.model.constants import ConstantRef, standard
from onnxgrad.model.traversal import all_nodes
from onnxgrad.reporting import frames_inside, logger

_LISTED = 5  # weights that the warning names
_PLACES = {  # operator -> indices of its scales and zero points
    ("", "DequantizeLinear"): (1, 2),
    ("", "QLinearMatMul"): (4, 5),
    ("com.microsoft", "MatMulNBits"): (2, 3),
    ("com.microsoft", "DequantizeLinear"): (1, 2),
}

Refs = Mapping[str, ConstantRef]


@dataclass
class Loss:
    """What rounding a weight anew costs: differences from the sum of weight and adapter."""

    name: str
    largest: float
    mean: float
    size: float  # mean of the absolute values of the weight


def requantize(proto: ModelProto, note: Mapping[str, Any], refs: Refs, change: np.ndarray) -> Loss:
    """Add a change to the quantized weight of an adapter, in place, and return what this costs.

    The weight keeps its integers' dtype, blocks and layout, and gets new scales, and zero points
    where these are stored and differ from each other or from the middle.

    Args:
        proto: the model.
        note: about the adapter.
        refs: the constants by their names in their graphs.
        change: what the adapter adds, with the axes as in the node that reads the weight.

    Raises:
        ValueError: the weight is stored in a form that is not covered.
    """
    ref = refs[note["weight"]]
    node = next(n for n in all_nodes(proto.graph.node) if ref.graph_name in n.input)
    scales, zeros = _scales(ref, node, refs)
    packed = node.op_type == "MatMulNBits"
    layout = _packed_layout(node) if packed else _layout(node, ref, scales)
    groups = layout.split(layout.unpack(ref.array()))
    scale = layout.per_group(scales.array())
    zero = np.full_like(scale, layout.middle if packed else 0)
    if zeros is not None:
        stored = layout.unpack_zeros(zeros.array())
        zero = layout.per_group(stored)
    added = change.T if packed else change.transpose(np.argsort(note["perm"]))
    if not packed and added.shape != layout.shape:
        raise _not_covered(ref, node, "whose integers are reshaped")
    exact = (groups - zero) * scale + layout.split(added)
    new, new_scale, new_zero = _quantized(exact, groups, scale, zero, layout)
    new_scale = new_scale.astype(scales.array().dtype).astype(np.float64)
    if zeros is None and np.any(new_zero != zero):
        raise _not_covered(ref, node, "whose integers have no sign and no zero point")
    difference = layout.join(np.abs((new - new_zero) * new_scale - exact), added.shape)
    ref.write(layout.pack(layout.join(new, layout.shape), ref.array()))
    scales.write(layout.as_stored(new_scale, scales.array()).astype(scales.array().dtype))
    if zeros is not None:
        zeros.write(layout.pack(layout.as_stored(new_zero, stored), zeros.array()))
    _rescale_bias(proto, node, refs, new_scale / scale)
    size = np.abs(layout.join(exact, added.shape)).mean()
    return Loss(ref.name, float(difference.max()), float(difference.mean()), float(size))


def _scales(
    ref: ConstantRef, node: NodeProto, refs: Refs
) -> tuple[ConstantRef, ConstantRef | None]:
    """Return the scales and the zero points of a quantized weight."""
    places = _PLACES.get((standard(node.domain), node.op_type), ())
    names = [node.input[i] if i < len(node.input) else "" for i in places]
    if not names or any(name and name not in refs for name in names):
        raise _not_covered(ref, node, "which has no constant scales of its own")
    zeros = refs[names[1]] if names[1] else None
    if node.op_type == "MatMulNBits" and (
        any(node.input[4:5]) or (zeros and zeros.array().dtype != np.uint8)
    ):
        raise _not_covered(ref, node, "with an order of its groups, or zero points of floats")
    return refs[names[0]], zeros


def _not_covered(ref: ConstantRef, node: NodeProto, why: str) -> ValueError:
    return ValueError(
        f"{printable(ref.name)!r} is read by {node.op_type} {printable(node.name)!r}, {why}: its "
        "adapter cannot be merged by quantizing anew. Keep it in the model, or merge it into the "
        "float model"
    )


def report(losses: list[Loss]) -> None:
    """Warn of what quantizing anew cost; all of it is logged."""
    texts = [
        f"{printable(x.name)!r} {x.largest:.2g} ({x.mean:.2g} on average, {x.mean / x.size:.1%} of "
        "its size)"
        for x in sorted(losses, key=lambda x: -x.mean / (x.size or 1))
    ]
    for text in texts:
        logger.info("quantized anew, differs by at most: %s", text)
    more = f"; and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    warnings.warn(
        "weights were quantized anew with their adapters, and differ from the sums by at most: "
        f"{'; '.join(texts[:_LISTED])}{more}. Evaluate the merged model",
        stacklevel=frames_inside() + 1,
    )


@dataclass
class _Layout:
    """How integers are stored: of `bits`, from `low` to `high`, with a scale for each group.

    A group is all (`axis` None), an index of an axis (`block` 0), or a block along it. `shape` is
    that of the integers, without padding of the last block; those of MatMulNBits are `packed`.
    """

    shape: tuple[int, ...]
    low: int
    high: int
    axis: int | None = None
    block: int = 0
    packed: bool = False

    @property
    def bits(self) -> int:
        return (self.high - self.low).bit_length()

    @property
    def middle(self) -> int:
        """The zero point of symmetric integers."""
        return 0 if self.low < 0 else 1 << (self.bits - 1)

    def split(self, array: np.ndarray) -> np.ndarray:
        """Return an array in the layout of the weight as (groups, elements)."""
        if self.axis is None:
            return array.reshape(1, -1)
        if not self.block:
            return np.moveaxis(array, self.axis, 0).reshape(array.shape[self.axis], -1)
        last = np.moveaxis(array, self.axis, -1)
        pad = [(0, 0)] * (last.ndim - 1) + [(0, -last.shape[-1] % self.block)]
        return np.pad(last, pad).reshape(-1, self.block)

    def join(self, groups: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return (groups, elements) as an array of the layout of the weight."""
        if self.axis is None:
            return groups.reshape(shape)
        moved = np.moveaxis(np.empty(shape, bool), self.axis, -1 if self.block else 0).shape
        if not self.block:
            return np.moveaxis(groups.reshape(moved), 0, self.axis)
        rows = groups.reshape(*moved[:-1], -1)[..., : moved[-1]]
        return np.moveaxis(rows, -1, self.axis)

    def per_group(self, values: np.ndarray) -> np.ndarray:
        """Return scales or zero points as (groups, 1)."""
        blocked = self.block and not self.packed
        values = np.moveaxis(values, self.axis or 0, -1) if blocked else values
        return values.astype(np.float64).reshape(-1, 1)

    def as_stored(self, values: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Return (groups, 1) in the layout of stored scales or zero points."""
        if not self.block or self.packed:
            return values.reshape(like.shape)
        moved = np.moveaxis(like, self.axis or 0, -1).shape
        return np.moveaxis(values.reshape(moved), -1, self.axis or 0)

    def unpack(self, array: np.ndarray) -> np.ndarray:
        """Return stored integers as floats."""
        if not self.packed:
            return array.astype(np.float64)
        shifts = np.arange(0, 8, self.bits, dtype=np.uint8)
        values = (array[..., None] >> shifts) & self.high
        return values.reshape(self.shape[0], -1).astype(np.float64)

    def unpack_zeros(self, array: np.ndarray) -> np.ndarray:
        """Return zero points as floats; those of MatMulNBits fill bytes row by row."""
        values = self.unpack(array)
        return values[:, : self.shape[1] // self.block] if self.packed else values

    def pack(self, values: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Return integers as they are stored, in the shape and dtype of `like`."""
        if not self.packed:
            return values.astype(like.dtype)
        count = 8 // self.bits
        rows = np.pad(values, [(0, 0), (0, -values.shape[1] % count)]).astype(np.uint8)
        parts = rows.reshape(*rows.shape[:-1], -1, count)
        shifts = np.arange(0, 8, self.bits, dtype=np.uint8)
        return np.bitwise_or.reduce(parts << shifts, -1).astype(np.uint8).reshape(like.shape)


def _layout(node: NodeProto, ref: ConstantRef, scales: ConstantRef) -> _Layout:
    """Return the layout of a weight that DequantizeLinear or QLinearMatMul reads."""
    q, scale, options = ref.array(), scales.array(), attributes(node)
    ends = {"int4": (-8, 7), "uint4": (0, 15)}.get(q.dtype.name)
    if ends is None and q.dtype.kind not in "iu":
        raise ValueError(
            f"{printable(ref.name)!r} holds {q.dtype.name}, which is not quantized anew"
        )
    low, high = ends or (int(np.iinfo(q.dtype).min), int(np.iinfo(q.dtype).max))
    if scale.size == 1:
        return _Layout(q.shape, low, high)
    axis = int(options.get("axis", 1)) if node.op_type == "DequantizeLinear" else -1
    blocked = scale.ndim == q.ndim > 1
    block = -(-q.shape[axis] // scale.shape[axis]) if blocked else 0
    return _Layout(
        q.shape, low, high, axis, int(options.get("block_size") or block) if blocked else 0
    )


def _packed_layout(node: NodeProto) -> _Layout:
    """Return the layout of the weight of a MatMulNBits: rows are columns of the matrix."""
    options = attributes(node)
    block, bits = int(options["block_size"]), int(options.get("bits", 4))
    shape = int(options["N"]), -(-int(options["K"]) // block) * block
    return _Layout(shape, 0, (1 << bits) - 1, 1, block, packed=True)


def _quantized(
    exact: np.ndarray,
    q: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray,
    layout: _Layout,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return integers, scales and zero points of a weight, as those before: symmetric or not."""
    low, high = layout.low, layout.high
    symmetric = bool(np.all(zero == layout.middle))
    if symmetric and layout.bits <= 4:  # the largest number is where the integers reach further
        most = np.take_along_axis(exact, np.abs(exact).argmax(1)[:, None], 1)
        new = -most / (1 << (layout.bits - 1))
    elif symmetric:
        reduced = layout.bits == 8 and np.abs(q - zero).max() <= 64  # 7 bits, which saturate less
        new = np.abs(exact).max(1)[:, None] / (64 if reduced else (high - low) // 2)
    else:
        new = (exact.max(1, initial=0) - exact.min(1, initial=0))[:, None] / (high - low)
    new = np.where(new == 0, scale, new)
    if not symmetric:
        zero = np.clip(np.rint(low - exact.min(1, initial=0)[:, None] / new), low, high)
    return np.clip(np.rint(exact / new) + zero, low, high), new, zero


def _rescale_bias(proto: ModelProto, node: NodeProto, refs: Refs, ratio: np.ndarray) -> None:
    """Rescale the integers of a bias beside a quantized weight, whose scale has that of the weight.

    onnxruntime adds both as integers, and takes the scale of the bias for that product.
    """
    nodes = list(all_nodes(proto.graph.node))
    makers = {y: n for n in nodes for y in n.output}
    for reader in nodes:
        maker = makers.get((*reader.input, "", "", "")[2])
        if reader.op_type not in ("Gemm", "Conv") or node.output[0] not in reader.input:
            continue
        if maker is None or maker.op_type != "DequantizeLinear":
            continue
        q, scale = (refs.get(name) for name in maker.input[:2])
        if q is None or scale is None or q.array().dtype != np.int32:
            continue
        old, factor = scale.array(), ratio.reshape(-1) if ratio.size > 1 else ratio.reshape(())
        new = (old * factor).astype(old.dtype)
        q.write(np.rint(q.array() * (old.astype(np.float64) / new)).astype(np.int32))
        scale.write(new)
