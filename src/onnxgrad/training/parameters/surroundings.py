"""The nodes that combine constants with data, and the values before and after them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.traversal import subgraphs
from onnxgrad.operators import (
    ELEMENTWISE,
    OPERATORS,
    REORDERS,
    made_by,
    names_with_trait,
    operator_of,
)
from onnxgrad.training.parameters import evidence
from onnxgrad.training.parameters.flow import (
    MOVES,
    MOVES_OR_JOINS,
    Flow,
    letter,
    maker_of,
    reachable,
    readers,
    value_operands,
)

_FEW_BITS = frozenset(
    """INT2 UINT2 INT4 UINT4 INT8 UINT8 INT16 UINT16 FLOAT4E2M1 FLOAT8E4M3FN FLOAT8E4M3FNUZ
    FLOAT8E5M2 FLOAT8E5M2FNUZ""".split()
)
_BOUNDS = names_with_trait("bounds")
_BITS = names_with_trait("bits")
_KEEPS_INTEGERS = MOVES_OR_JOINS | _BITS | _BOUNDS | {"Mod", "Where"}
_SHIFTS = frozenset({"Add", "Sub"})


def _names_with_role(role: str) -> frozenset[str]:
    """Return the standard operators all of whose operands have this role."""
    return frozenset(
        name for (domain, name), o in OPERATORS.items() if not domain and o.roles == role
    )


_FACTORS = _names_with_role("e")
ARITHMETIC = _FACTORS | _names_with_role("a")
WAVES = frozenset({"Sin", "Cos"})

# a Tanh bounds scores smoothly; values in front of a Neg are distances
_TO_SCORES = (MOVES_OR_JOINS | ARITHMETIC | _BOUNDS | names_with_trait("sums") | {"Tanh"}) - {"Neg"}
_MOMENTS = names_with_trait("moments")
_IN_PLACE = (ELEMENTWISE & REORDERS) | {"Expand", "Unsqueeze"}  # casts and broadcasts
# an epsilon shifts or bounds moments, of which roots or reciprocals are taken
_TO_DEVIATIONS = names_with_trait("powers") | _SHIFTS | _BOUNDS | _IN_PLACE
# by deviations of the data: a BatchNormalization divides by stored ones
_NORMALIZES = names_with_trait("normalizes") - {"BatchNormalization"}
_AROUND_ROUND = _SHIFTS | _BOUNDS | {"Cast"}


class StoredIntegers:
    """Which values of a graph are stored integers, or are computed from them.

    Attributes:
        sizes: `{value: elements that a scale of it may have}`, of values computed from stored
            integers and from constants, and of rows that are gathered from them and have no scale
            yet. As many as integers; of -1, 0 and 1, which may be a mask of a weight, fewer.
        results: results of products of data with integers that have no scale yet.
    """

    def __init__(self, nodes: Iterable[ir.Node], data: Collection[ir.Value]) -> None:
        self.sizes: dict[ir.Value, int] = {}
        self.results: set[ir.Value] = set()
        unscaled: set[ir.Value] = set()
        for node in nodes:
            op, inputs = node.op_type, [x for x in node.inputs if x is not None]
            for x in inputs:
                if x not in self.sizes and (size := _most_scales(x, op)):
                    self.sizes[x] = size
                    unscaled.add(x)
            known = [x for x in inputs if x in self.sizes]
            others = [x for x in inputs if x not in self.sizes]
            if op in MOVES and inputs[:1] and inputs[0] in self.results:
                self.results.update(node.outputs)
            elif known and any(
                letter(node, i) == "f" and x in known for i, x in enumerate(node.inputs)
            ):
                self.results.update(node.outputs if unscaled.issuperset(known) else ())
            elif known and op in _KEEPS_INTEGERS | _FACTORS | _SHIFTS:
                scaled = op in _FACTORS or not unscaled.issuperset(known)
                mixed = op not in MOVES and any(x in data for x in others)
                gathered = any(y in data for y in node.outputs)
                other = op in MOVES and known[0] is not inputs[0]  # only says how to move
                if other or mixed or (gathered and scaled):
                    continue
                self.sizes |= dict.fromkeys(node.outputs, max(self.sizes[x] for x in known))
                unscaled.update(() if scaled else node.outputs)

    def most_scales_at(self, node: ir.Node, index: int) -> int:
        """Return how many elements operand `index` may have as a scale or shift; 0: it is none."""
        others = [x for i, x in enumerate(node.inputs) if i != index and x is not None]
        if node.op_type in _FACTORS and any(x in self.results for x in others):
            return max(self.sizes.values())
        if node.op_type in _FACTORS | _SHIFTS:
            return max((self.sizes.get(x, 0) for x in others), default=0)
        return 0

    def most_scales_of(self, value: ir.Value) -> int:
        """Return how many elements a scale of `value` may have, behind nodes that move it."""
        found = 0
        for node, index in value.uses():
            moved = node.outputs if node.op_type in MOVES and index == 0 else ()
            found = max([found, self.most_scales_at(node, index), *map(self.most_scales_of, moved)])
        return found


def _most_scales(x: ir.Value, op_type: str) -> int:
    """Return how many elements a scale of `x` may have; 0 if `x` is no constant of integers.

    Masks of zeros and ones are none, and neither are the sizes that a node computes with.
    """
    if x.const_value is None or x.producer() is not None or x.dtype is None or x.is_graph_input():
        return 0
    size, kind = x.const_value.size, x.dtype.name
    wide = kind in ("INT32", "INT64", "UINT32", "UINT64") and op_type in _BITS
    bias = kind == "INT32" and op_type == "Cast" and size in x.const_value.shape.numpy()
    if not (wide or bias or kind in _FEW_BITS) or size < 2:
        return 0
    array = x.const_value.numpy().astype(np.float32)
    if evidence.is_binary(array) or (bias and evidence.is_ramp(array)):
        return 0
    has_signs_only = bool((np.abs(array) <= 1).all())
    return size - has_signs_only


@dataclass(frozen=True)
class Use:
    """A node that combines a constant, or a value computed from constants, with data."""

    node: ir.Node
    index: int  # of the operand
    value: ir.Value  # the operand: the constant, or a value computed from it
    via: frozenset[str]  # types of the nodes that compute `value` from the constant
    at_positions: bool  # whether one of them has an operand computed from shapes
    integers: int  # elements that a scale of integers may have; 0: it scales and shifts none


class Surroundings(Flow):
    """The values of a graph, with the nodes before and after them."""

    def __init__(self, graph: ir.Graph) -> None:
        super().__init__(graph)
        self.stored = StoredIntegers(self.nodes, self.data)

    def uses(self, constant: ir.Value) -> Iterator[Use]:
        """Yield the uses of `constant`, itself or in a value computed from constants, with data."""
        seen = {constant}
        waiting: list[tuple[ir.Value, frozenset[str], bool, int]]
        waiting = [(constant, frozenset(), False, 0)]
        for value, via, moved, scaled in waiting:  # the loop appends to it
            onward: list[tuple[ir.Value, frozenset[str], bool, int]] = []
            for target in self.bindings.get(value, ()):
                if target not in self.data:
                    onward.append((target, via, moved, scaled))
                elif (reader := _passing_node(value, target)) is not None:
                    yield Use(*reader, value, via, moved, scaled)
            for node, index in value.uses():
                integers = max(scaled, self.stored.most_scales_at(node, index))
                if self._defines_role(node, index):
                    yield Use(node, index, value, via, moved, integers)
                elif value in value_operands(node) and not any(subgraphs(node)):
                    others = [x for i, x in enumerate(node.inputs) if i != index and x is not None]
                    at = moved or any(x in self.positions for x in others)
                    onward += [(y, via | {node.op_type}, at, integers) for y in node.outputs]
            for entry in onward:
                if entry[0] not in seen:
                    seen.add(entry[0])
                    waiting.append(entry)

    def _defines_role(self, node: ir.Node, index: int) -> bool:
        """Return whether this node defines the role of its operand."""
        if node.domain == "ai.onnx.ml":
            return True
        if any(subgraphs(node)) or node.inputs[index] not in value_operands(node):
            return False  # see `bindings`; others read only the shape
        kind = letter(node, index)
        own = kind == "f" and letter(node, 0) != "f"  # a MatMul has factors only
        depends = kind in {"f", "t", "x", "a", "e", ""}  # on the other operands of the node
        return own or not depends or self._reads_other_data(node, index)

    def _reads_other_data(self, node: ir.Node, index: int) -> bool:
        others = [x for i, x in enumerate(node.inputs) if i != index]
        return any(x in self.data and x in others for x in value_operands(node))

    def product_without_bias(self, value: ir.Value) -> ir.Node | None:
        """Return the product without bias that `value` is a moved copy of, or a sum with data."""
        made = (v.producer() for v in reachable([value], self._sum_terms))
        products = (node for node in made if node is not None and self.is_product(node))
        return next((node for node in products if not _has_own_bias(node)), None)

    def _sum_terms(self, value: ir.Value) -> Sequence[ir.Value | None]:
        """Return the operands of a sum of data, or the one that a node moves or scales."""
        node = value.producer()
        if node is None or self.is_product(node):
            return ()
        if node.op_type in ("Add", "Sum") and all(x in self.data for x in node.inputs):
            return node.inputs
        scaled = node.op_type in _FACTORS and (
            self.is_quantized(node) or not self.stored.results.isdisjoint(node.inputs)
        )
        return node.inputs[:1] if scaled or node.op_type in MOVES else ()

    def has_bias(self, product: ir.Node) -> bool:
        """Return whether a number for each feature is added in or behind the node `product`."""
        if _has_own_bias(product):
            return True
        for user, index in readers(product.outputs):
            if user.op_type == "Add" and (other := user.inputs[1 - index]) not in self.data:
                sizes = (None if other is None or other.shape is None else other.shape) or ()
                if has_one_feature(product) or any(n != 1 for n in sizes):
                    return True
        return False

    def leads_to_model(self, node: ir.Node) -> bool:
        """Return whether a product with a weight or another part of a model follows `node`."""
        users = (user for v in reachable(node.outputs, self.onward) for user, _ in v.uses())
        return any(self.is_product(user) or _is_of_model(user) for user in users)

    def is_quantized(self, node: ir.Node) -> bool:
        """Return whether `node` scales a product of integers, or computes the factor for that."""
        return any(
            maker_type(x) in ("MatMulInteger", "ConvInteger", "DynamicQuantizeLinear")
            for x in node.inputs
            if x is not None
        )

    def is_rounded(self, node: ir.Node) -> bool:
        """Return whether `node` scales data in front of a Round, or behind one."""

        def before(value: ir.Value) -> Sequence[ir.Value | None]:
            producer = value.producer()
            return producer.inputs[:1] if producer and self._near_round(producer) else ()

        def after(value: ir.Value) -> Iterator[ir.Value]:
            return (y for user, _ in value.uses() if self._near_round(user) for y in user.outputs)

        operands = reachable([x for x in node.inputs if x is not None], before)
        return any(made_by(x, "Round") for x in operands) or any(
            user.op_type == "Round" for y in reachable(node.outputs, after) for user, _ in y.uses()
        )

    def _near_round(self, node: ir.Node) -> bool:
        """Return whether `node` may add a zero point to rounded numbers, or bound them."""
        constant = sum(x in self.data for x in node.inputs) < 2
        return constant and node.op_type in _AROUND_ROUND

    def is_normalized(self, value: ir.Value, scaled: bool) -> bool:
        """Return whether `value` is data divided by a deviation, if `scaled` times a constant."""
        node = maker_of(value)
        if node is None:
            return False
        if node.op_type in _NORMALIZES:
            return True
        data = [x for x in node.inputs if x is not None and x in self.data]
        if scaled and node.op_type in ("Mul", "Div") and len(data) == 1:
            return self.is_normalized(data[0], False)
        if node.op_type == "Div" and node.inputs[1] in data:
            return _is_from_means(node.inputs[1]) or _is_from_means(value)
        if node.op_type == "Mul" and len(data) == 2:
            return any(map(_is_from_means, data))
        return node.op_type in ("Reciprocal", "Pow", "Sqrt") and _is_from_means(value)

    def scaled_again(self, node: ir.Node) -> bool:
        """Return whether the next node multiplies by a constant, as exporters write GroupNorm."""
        [value] = node.outputs
        while len(users := list(value.uses())) == 1 and users[0][0].op_type in MOVES:
            value = users[0][0].outputs[0]
        return any(n.op_type == "Mul" and n.inputs[1 - i] not in self.data for n, i in value.uses())

    def makes_waves(self, node: ir.Node) -> bool:
        """Return whether a Sin and a Cos read the results."""
        users = readers(node.outputs, MOVES_OR_JOINS | {"Mul"})
        return WAVES.issubset(user.op_type for user, _ in users)

    def reaches_softmax(self, value: ir.Value) -> bool:
        """Return whether `value` is a score of attention: a Softmax and a product follow it."""
        return any(
            letter(user, index) == "m"
            or (user.op_type == "Softmax" and self._weighs_data(user.outputs[0]))
            for user, index in readers([value], _TO_SCORES)
        )

    def _weighs_data(self, weights: ir.Value) -> bool:
        """Return whether a product with other data reads the result of a Softmax."""
        return any(
            letter(user, index) == "f" and self._reads_other_data(user, index)
            for user, index in readers([weights], MOVES | {"Where", "Mul"})
        )


def maker_type(value: ir.Value) -> str:
    """Return the type of the node that computes `value`, ignoring nodes that only move it."""
    node = maker_of(value)
    return "" if node is None else node.op_type


def _is_of_model(node: ir.Node) -> bool:
    """Return whether `node` is a part of a model, and no transformer in front of one.

    It is a model of `ai.onnx.ml`, a search for the nearest rows, a comparison with a threshold, or
    the logarithm of a sum of likelihoods.
    """
    operator = operator_of(node)
    learns = bool(operator.fitted) or any(is_weight for _, is_weight in operator.coefficients)
    return learns or node.op_type in ("Less", "LessOrEqual") or node.op_type == "ReduceLogSumExp"


def _has_own_bias(product: ir.Node) -> bool:
    return any(letter(product, i) == "b" and x for i, x in enumerate(product.inputs))


def has_one_feature(product: ir.Node) -> bool:
    """Return whether a product has one output feature, so that its bias is one number."""
    sizes = [x.shape for x in product.inputs[:2] if x is not None and x.shape is not None]
    return any(1 in shape or len(shape) == 1 for shape in sizes)


def _passing_node(value: ir.Value, target: ir.Value) -> tuple[ir.Node, int] | None:
    """Return the node that passes `value` into a subgraph as `target`, or out of one."""
    into = ((node, index) for node, index in value.uses() if any(subgraphs(node)))
    producer = target.producer()
    return next(into, None if producer is None else (producer, 0))


def _is_from_means(value: ir.Value) -> bool:
    """Return whether `value` is a deviation, or is computed from means or sums like one."""
    waiting, seen = [value], {value}
    for v in waiting:  # the loop appends to it
        node = v.producer()
        if node is None or len(seen) > 24:
            continue
        if node.op_type in _MOMENTS:
            return True
        if node.op_type in _TO_DEVIATIONS:
            sources = [x for x in node.inputs if x is not None and x not in seen]
            waiting += sources
            seen.update(sources)
    return False
