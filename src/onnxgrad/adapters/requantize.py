"""Merge an adapter into a quantized weight, which is quantized anew in its old layout."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto

from onnxgrad.adapters.constant_operands import ConstantOperands, Place
from onnxgrad.adapters.integer_layout import layout_of, quantized
from onnxgrad.adapters.uses import attributes
from onnxgrad.errors import printable
from onnxgrad.model.constants import ConstantRef, standard
from onnxgrad.operators import operator_of
from onnxgrad.reporting import frames_inside, logger

_LISTED = 5  # weights that the warning names


@dataclass
class Loss:
    """The rounding error of a merged weight: differences from the sum of weight and adapter."""

    name: str
    largest: float
    mean: float
    size: float  # mean of the absolute values of the weight


def requantize(
    operands: ConstantOperands,
    note: Mapping[str, Any],
    ref: ConstantRef,
    update: Callable[[np.ndarray], np.ndarray],
) -> Loss:
    """Change the quantized weight of an adapter, in place, and return what this costs.

    The weight keeps its integers' dtype, blocks and layout, and gets new scales, and zero points
    where these are stored and differ from each other or from the middle.

    Args:
        operands: the constant operands of the model.
        note: the note of the adapter in the file.
        ref: the weight.
        update: function from the weight to its sum with the adapter, both with the axes that the
            node reads.

    Raises:
        ValueError: the weight is stored in a form that is not covered.
    """
    scale_places, zero_places = _scale_operands(operands, ref)
    nodes = [node for node, _ in operands.readers(ref)]
    scales, zeros = operands.common(scale_places), operands.common(zero_places)
    assert scales is not None
    layout = layout_of(nodes[0], ref, scales)
    groups = layout.split(layout.unpack(ref.array()))
    scale = layout.per_group(scales.array())
    zero = np.full_like(scale, layout.middle if layout.packed else 0)
    if zeros is not None:
        stored = layout.unpack_zeros(zeros.array())
        zero = layout.per_group(stored)
    if len({len(groups), len(scale), len(zero)}) > 1:
        raise _not_covered(ref, nodes[0], "whose scales or zero points have another shape")
    before = layout.join((groups - zero) * scale, layout.shape)
    if layout.packed:
        updated = update(before[:, : attributes(nodes[0])["K"]].T).T
    elif len(note["perm"]) != before.ndim:
        raise _not_covered(ref, nodes[0], "whose integers are reshaped")
    else:
        updated = update(before.transpose(note["perm"])).transpose(np.argsort(note["perm"]))
    exact = layout.split(updated)
    new, new_scale, new_zero = quantized(exact, groups, scale, zero, layout)
    new_scale = new_scale.astype(scales.array().dtype).astype(np.float64)
    changed = bool(np.any(new_zero != zero))
    if zeros is None and changed:
        raise _not_covered(ref, nodes[0], "whose integers have no sign and no zero point")
    difference = layout.join(np.abs((new - new_zero) * new_scale - exact), updated.shape)
    ref.write(layout.pack(layout.join(new, layout.shape), ref.array()))
    operands.write(scale_places, layout.as_stored(new_scale, scales.array()))
    if zeros is not None and changed:
        new_zero = layout.as_stored(new_zero, stored)
        operands.write(zero_places, layout.pack(new_zero, zeros.array()))
    for node in nodes:
        _rescale_biases(operands, node, new_scale / scale)
    size = np.abs(updated).mean()
    return Loss(ref.name, float(difference.max()), float(difference.mean()), float(size))


def _scale_operands(
    operands: ConstantOperands, ref: ConstantRef
) -> tuple[list[Place], list[Place]]:
    """Return the operands that are the scales, and the zero points, of a quantized weight.

    Each are one constant; there may be no zero points.
    """
    readers = operands.readers(ref)
    node = readers[0][0]
    found = [_operands_beside(operands, reader) for reader in readers]
    scales, zeros = ([places[i] for places in found if places] for i in (0, 1))
    zeros = [(reader, i) for reader, i in zeros if any(reader.input[i : i + 1])]
    given = [places for places in (scales, zeros) if places]
    constants = [ref for ref in map(operands.common, given) if ref is not None]
    if None in found or len(constants) < len(given) or len(zeros) not in (0, len(found)):
        raise _not_covered(ref, node, "which has no constant scales of its own")
    rows = any(reader.op_type == "Gather" for reader, _ in readers)
    if rows and constants[0].array().size > 1:
        raise _not_covered(ref, node, "whose scales have another axis than its table")
    if node.op_type == "MatMulNBits" and (
        any(node.input[4:5]) or (constants[1:] and constants[1].array().dtype != np.uint8)
    ):
        raise _not_covered(ref, node, "with an order of its groups, or zero points of floats")
    return scales, zeros


def _operands_beside(operands: ConstantOperands, reader: Place) -> tuple[Place, Place] | None:
    """Return the operands with scale and zero point of the integers that are operand `reader`."""
    node, index = reader
    kind = standard(node.domain), node.op_type
    for integers, scale, zero in operator_of(node).scaled_operands:
        if index == integers:
            return (node, scale), (node, zero)
    after = operands.only_reader(node)
    if kind == ("", "Gather") and index == 0 and after and after[0].op_type == "DequantizeLinear":
        return _operands_beside(operands, after)
    if kind == ("", "MatMulInteger") and index == 1:
        scale_place = _scale_of_product(operands, node)
        return scale_place and (scale_place, (node, 3))
    return None


def _scale_of_product(operands: ConstantOperands, node: NodeProto) -> Place | None:
    """Return the scale of the weight of a MatMulInteger: float(product) * (data scale * scale)."""
    cast = operands.only_reader(node)
    product = operands.only_reader(cast[0]) if cast and cast[0].op_type == "Cast" else None
    if product is None or product[0].op_type != "Mul":
        return None
    both = operands.maker((product[0], 1 - product[1]))
    if both is None or both.op_type != "Mul":
        return None
    constants = [i for i in (0, 1) if operands.common([(both, i)]) is not None]
    return (both, constants[0]) if len(constants) == 1 else None


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


def _rescale_biases(operands: ConstantOperands, node: NodeProto, ratio: np.ndarray) -> None:
    """Rescale the integers of the bias beside a quantized weight.

    onnxruntime adds both as integers: the scale of a bias is the scale of the data times the scale
    of the weight.
    """
    for reader in operands.nodes:
        maker = operands.maker((reader, 2))
        if reader.op_type not in ("Gemm", "Conv") or all(
            operands.maker((reader, i)) is not node for i in (0, 1)
        ):
            continue
        if maker is None or maker.op_type != "DequantizeLinear":
            continue
        q, scale = (operands.common([(maker, i)]) for i in (0, 1))
        if q is None or scale is None or q.array().dtype != np.int32:
            continue
        old, factor = scale.array(), ratio.reshape(-1) if ratio.size > 1 else ratio.reshape(())
        new = (old * factor).astype(old.dtype)
        operands.write([(maker, 0)], np.rint(q.array() * (old.astype(np.float64) / new)))
        operands.write([(maker, 1)], new)
