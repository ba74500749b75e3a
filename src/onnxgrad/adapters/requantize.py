"""Add adapters to quantized weights: new integers and scales in the old layout."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto

from onnxgrad.adapters.integer_layout import integer_layout_of, quantize_groups
from onnxgrad.adapters.uses import ValueKey, attribute_values, readers_by_value
from onnxgrad.errors import join_first, printable
from onnxgrad.model.constants import ConstantRef, normalize_domain
from onnxgrad.model.scopes import unused_name
from onnxgrad.model.traversal import value_names, walk_graphs
from onnxgrad.operators import operator_of
from onnxgrad.reporting import frames_inside, logger

_LISTED = 5  # most weights in the warning

Operand = tuple[NodeProto, int]  # a node and the index of one of its operands


class ConstantOperands:
    """An index of a model by operand, a pair (node, operand index): which constant the operand
    reads, and which operands read a constant.

    Args:
        proto: the model, without local functions. Its nodes must stay.
        refs: its constants.
    """

    def __init__(self, proto: ModelProto, refs: Iterable[ConstantRef]) -> None:
        self._constants = {(id(ref.graph), ref.graph_name): ref for ref in refs}
        nodes = [(graph, node) for graph, node in walk_graphs(proto.graph) if node is not None]
        self.nodes = [node for _, node in nodes]
        self._producers = {(id(graph), y): node for graph, node in nodes for y in node.output}
        self._results = {id(node): (id(graph), y) for graph, node in nodes for y in node.output[:1]}
        self._readers: dict[ValueKey, list[tuple[NodeProto | None, int]]] = {}
        self._keys: dict[tuple[int, int], ValueKey] = {}
        for key, found in readers_by_value(proto.graph).items():
            self._readers[key] = [(node, index) for _, node, index in found]
            self._keys |= {(id(node), index): key for _, node, index in found}
        # keeps the graphs alive, and so their ids unique
        self._graphs = [graph for graph, _ in nodes]
        self._taken = set(value_names(proto.graph))

    def reading_operands(self, ref: ConstantRef) -> list[Operand]:
        """Return the operands (node, operand index) that read the constant `ref`."""
        found = self._readers.get((id(ref.graph), ref.graph_name), ())
        return [(node, index) for node, index in found if node is not None]

    def only_reading_operand(self, node: NodeProto) -> Operand | None:
        """Return the only operand (node, operand index) that reads the first result of `node`; None
        if several operands read it.
        """
        found = self._readers.get(self._results[id(node)], ())
        reader, index = found[0] if len(found) == 1 else (None, 0)
        return None if reader is None else (reader, index)

    def producer(self, operand: Operand) -> NodeProto | None:
        """Return the node that computes the value of an operand (node, operand index); None for a
        constant.
        """
        return self._producers.get(self._key_of_operand_value(operand))

    def common_constant(self, operands: Sequence[Operand]) -> ConstantRef | None:
        """Return the constant that all `operands` (node, operand index) read; None if they read
        different values.
        """
        keys = {self._key_of_operand_value(operand) for operand in operands}
        return self._constants.get(keys.pop()) if len(keys) == 1 else None

    def replace_constant(self, operands: Sequence[Operand], array: np.ndarray) -> None:
        """Replace the value of the constant that `operands` (node, operand index) read by `array`,
        in place.

        If other operands read it too, these operands get a constant for themselves.
        """
        key, mine = (
            self._key_of_operand_value(operands[0]),
            {(id(node), index) for node, index in operands},
        )
        ref, found = self._constants[key], self._readers[key]
        others = [(node, index) for node, index in found if (id(node), index) not in mine]
        if others:
            assert isinstance(ref.graph, GraphProto)
            tensor = ref.graph.initializer.add()
            tensor.CopyFrom(ref.read())
            tensor.name = unused_name(ref.graph_name, self._taken)
            ref = ConstantRef(tensor.name, tensor, False, ref.graph)
            new = id(ref.graph), tensor.name
            self._constants[new], self._readers[new], self._readers[key] = ref, [*operands], others
            for node, index in operands:
                node.input[index] = tensor.name
                self._keys[id(node), index] = new
        ref.write(array.astype(ref.array().dtype))

    def _key_of_operand_value(self, operand: Operand) -> ValueKey:
        return self._keys.get((id(operand[0]), operand[1]), (0, ""))


@dataclass
class RoundingErrors:
    """The rounding errors of a quantized weight after merging: differences from the exact sum of
    weight and adapter.
    """

    name: str
    largest: float
    mean: float
    size: float  # mean of the absolute values of the sum


def requantize(
    operands: ConstantOperands,
    note: Mapping[str, Any],
    ref: ConstantRef,
    update: Callable[[np.ndarray], np.ndarray],
) -> RoundingErrors:
    """Add an adapter to its quantized weight, in place; return the rounding errors.

    The weight keeps its integers' dtype, blocks and layout, and gets new scales, and zero points
    where these are stored and differ from each other or from the middle.

    Args:
        operands: the constant operands of the model.
        note: the note about the adapter.
        ref: the weight.
        update: function that maps the weight to the sum of weight and adapter, both with the axes
            that the node reads.

    Raises:
        ValueError: the weight is stored in a form that is not covered.
    """
    scale_places, zero_places = _scale_and_zero_point_operands(operands, ref)
    nodes = [node for node, _ in operands.reading_operands(ref)]
    scales, zeros = operands.common_constant(scale_places), operands.common_constant(zero_places)
    assert scales is not None
    layout = integer_layout_of(nodes[0], ref, scales)
    groups = layout.split_groups(layout.unpack(ref.array()))
    scale = layout.scales_to_column(scales.array())
    zero = np.full_like(scale, layout.symmetric_zero_point if layout.packed else 0)
    if zeros is not None:
        stored = layout.unpack(zeros.array())
        if layout.packed:  # zero points fill bytes row by row
            stored = stored[:, : layout.shape[1] // layout.block]
        zero = layout.scales_to_column(stored)
    if len({len(groups), len(scale), len(zero)}) > 1:
        raise _unsupported_storage_error(
            ref, nodes[0], "whose scales or zero points do not fit its integers"
        )
    before = layout.join_groups((groups - zero) * scale, layout.shape)
    if layout.packed:
        updated = update(before[:, : attribute_values(nodes[0])["K"]].T).T
    elif len(note["perm"]) != before.ndim:
        raise _unsupported_storage_error(ref, nodes[0], "whose integers are reshaped")
    else:
        updated = update(before.transpose(note["perm"])).transpose(np.argsort(note["perm"]))
    exact = layout.split_groups(updated)
    new, new_scale, new_zero = quantize_groups(exact, groups, scale, zero, layout)
    new_scale = new_scale.astype(scales.array().dtype).astype(np.float64)
    changed = bool(np.any(new_zero != zero))
    if zeros is None and changed:
        raise _unsupported_storage_error(
            ref, nodes[0], "whose integers have no sign and no zero point"
        )
    difference = layout.join_groups(np.abs((new - new_zero) * new_scale - exact), updated.shape)
    ref.write(layout.pack(layout.join_groups(new, layout.shape), ref.array()))
    operands.replace_constant(scale_places, layout.column_to_scales(new_scale, scales.array()))
    if zeros is not None and changed:
        new_zero = layout.column_to_scales(new_zero, stored)
        operands.replace_constant(zero_places, layout.pack(new_zero, zeros.array()))
    for node in nodes:
        _rescale_biases(operands, node, new_scale / scale)
    size = np.abs(updated).mean()
    return RoundingErrors(ref.name, float(difference.max()), float(difference.mean()), float(size))


def _scale_and_zero_point_operands(
    operands: ConstantOperands, ref: ConstantRef
) -> tuple[list[Operand], list[Operand]]:
    """Return the operands (node, operand index) that read the scales, and those that read the zero
    points, of a quantized weight.

    All operands with scales are one constant, and so are all with zero points, if there are any.

    Raises:
        ValueError: the weight is stored in a form that is not covered.
    """
    readers = operands.reading_operands(ref)
    node = readers[0][0]
    found = [_scale_operands_of_reader(operands, reader) for reader in readers]
    scales, zeros = ([places[i] for places in found if places] for i in (0, 1))
    zeros = [(reader, i) for reader, i in zeros if any(reader.input[i : i + 1])]
    given = [places for places in (scales, zeros) if places]
    constants = [ref for ref in map(operands.common_constant, given) if ref is not None]
    if None in found or len(constants) < len(given) or len(zeros) not in (0, len(found)):
        raise _unsupported_storage_error(ref, node, "and has no constant scales")
    rows = any(reader.op_type == "Gather" for reader, _ in readers)
    if rows and constants[0].array().size > 1:
        raise _unsupported_storage_error(
            ref, node, "which looks up rows of a table with several scales"
        )
    if node.op_type == "MatMulNBits" and (
        any(node.input[4:5]) or (constants[1:] and constants[1].array().dtype != np.uint8)
    ):
        raise _unsupported_storage_error(
            ref, node, "which has the input g_idx, or zero points that are floats"
        )
    return scales, zeros


def _scale_operands_of_reader(
    operands: ConstantOperands, reader: Operand
) -> tuple[Operand, Operand] | None:
    """Return the operands (node, operand index) with scale and zero point of the integers that
    `reader` reads; None if not found.
    """
    node, index = reader
    kind = normalize_domain(node.domain), node.op_type
    for integers, scale, zero in operator_of(node).scaled_operands:
        if index == integers:
            return (node, scale), (node, zero)
    after = operands.only_reading_operand(node)
    if kind == ("", "Gather") and index == 0 and after and after[0].op_type == "DequantizeLinear":
        return _scale_operands_of_reader(operands, after)
    if kind == ("", "MatMulInteger") and index == 1:
        scale_place = _scale_behind_integer_product(operands, node)
        return scale_place and (scale_place, (node, 3))
    return None


def _scale_behind_integer_product(operands: ConstantOperands, node: NodeProto) -> Operand | None:
    """Return the operand (node, operand index) with the weight's scale, by which a Mul multiplies
    the result of the MatMulInteger `node`.
    """
    cast = operands.only_reading_operand(node)
    product = operands.only_reading_operand(cast[0]) if cast and cast[0].op_type == "Cast" else None
    if product is None or product[0].op_type != "Mul":
        return None
    both = operands.producer((product[0], 1 - product[1]))
    if both is None or both.op_type != "Mul":
        return None
    constants = [i for i in (0, 1) if operands.common_constant([(both, i)]) is not None]
    return (both, constants[0]) if len(constants) == 1 else None


def _unsupported_storage_error(ref: ConstantRef, node: NodeProto, why: str) -> ValueError:
    """Return the error for a quantized weight whose storage, described by `why`, cannot take an
    adapter.
    """
    return ValueError(
        f"{printable(ref.name)!r} is read by {node.op_type} {printable(node.name)!r}, {why}: its "
        "adapter cannot be merged by quantizing anew. Keep it in the model, or merge it into the "
        "float model"
    )


def warn_of_rounding(errors: list[RoundingErrors]) -> None:
    """Warn about the largest rounding errors of merged weights, and log all rounding errors."""
    texts = [
        f"{printable(x.name)!r} {x.largest:.2g} ({x.mean:.2g} on average, {x.mean / x.size:.1%} of "
        "its size)"
        for x in sorted(errors, key=lambda x: -x.mean / (x.size or 1))
    ]
    for text in texts:
        logger.info("quantized anew, differs by at most: %s", text)
    warnings.warn(
        "weights were quantized anew with their adapters, and differ from the sums by at most: "
        f"{join_first(texts, _LISTED, '; ')}. Evaluate the merged model",
        stacklevel=frames_inside() + 1,
    )


def _rescale_biases(operands: ConstantOperands, node: NodeProto, ratio: np.ndarray) -> None:
    """Multiply the scales of integer biases that are added to products with a quantized weight by
    `ratio`, in place, and adapt their integers.

    onnxruntime adds product and bias as integers: the scale of a bias is the scale of the data
    times the scale of the weight.
    """
    for reader in operands.nodes:
        producer = operands.producer((reader, 2))
        if reader.op_type not in ("Gemm", "Conv") or all(
            operands.producer((reader, i)) is not node for i in (0, 1)
        ):
            continue
        if producer is None or producer.op_type != "DequantizeLinear":
            continue
        q, scale = (operands.common_constant([(producer, i)]) for i in (0, 1))
        if q is None or scale is None or q.array().dtype != np.int32:
            continue
        old, factor = scale.array(), ratio.reshape(-1) if ratio.size > 1 else ratio.reshape(())
        new = (old * factor).astype(old.dtype)
        operands.replace_constant(
            [(producer, 0)], np.rint(q.array() * (old.astype(np.float64) / new))
        )
        operands.replace_constant([(producer, 1)], new)
