"""The roles of operands, and which values of a graph are computed from which others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import onnx_ir as ir
from onnx import NodeProto

from onnxgrad.graph.traversal import all_nodes, subgraphs
from onnxgrad.model.constants import normalize_domain
from onnxgrad.operators import (
    ELEMENTWISE,
    OPERATORS,
    RANDOM,
    REORDERS,
    made_by,
    names_with_trait,
    operator_of,
)
from onnxgrad.operators.shapes import dims
from onnxgrad.training.parameters import evidence

MOVES = names_with_trait("moves")
MOVES_OR_JOINS = MOVES | REORDERS  # Concat is the only operator of these that joins values

_FEW_BITS = frozenset(
    """INT2 UINT2 INT4 UINT4 INT8 UINT8 INT16 UINT16 FLOAT4E2M1 FLOAT8E4M3FN FLOAT8E4M3FNUZ
    FLOAT8E5M2 FLOAT8E5M2FNUZ""".split()
)
_BOUNDS = names_with_trait("bounds")
_BITS = names_with_trait("bits")
_KEEPS_INTEGERS = MOVES_OR_JOINS | _BITS | _BOUNDS | {"Mod", "Where"}
_SHIFTS = frozenset({"Add", "Sub"})


_BY_ROLES = {name: o.roles for (domain, name), o in OPERATORS.items() if not domain}
_FACTORS = {name for name, roles in _BY_ROLES.items() if roles == "e"}
ARITHMETIC = {name for name, roles in _BY_ROLES.items() if roles in ("a", "e")}
WAVES = frozenset({"Sin", "Cos"})

# a Tanh bounds scores smoothly; values in front of a Neg are distances
_TO_SCORES = (MOVES_OR_JOINS | ARITHMETIC | _BOUNDS | names_with_trait("sums") | {"Tanh"}) - {"Neg"}
_MOMENTS = names_with_trait("moments")
_IN_PLACE = (ELEMENTWISE & REORDERS) | {"Expand", "Unsqueeze"}  # casts and broadcasts
# an epsilon shifts or bounds moments, of which roots or reciprocals are taken
_TO_DEVIATIONS = names_with_trait("powers") | _SHIFTS | _BOUNDS | _IN_PLACE
# operators that divide by deviations of the data; BatchNormalization divides by stored deviations
_NORMALIZES = names_with_trait("normalizes") - {"BatchNormalization"}
_AROUND_ROUND = _SHIFTS | _BOUNDS | {"Cast"}


def operand_role(node: ir.Node | NodeProto, index: int) -> str:
    """Return the letter for the role of operand `index` of `node`, as "f" for a factor.

    `Operator.roles` lists the letters; "" if the role is unknown.
    """
    letters = operator_of(node).roles
    return letters[min(index, len(letters) - 1)] if letters else ""


def operands_of_role(node: ir.Node, letters: str) -> list[ir.Value]:
    """Return the operands of `node` whose roles are among the `letters` of `operand_role`."""
    operands = enumerate(node.inputs)
    return [x for i, x in operands if x is not None and operand_role(node, i) in {*letters}]


def is_value_operand(node: ir.Node, index: int, smooth: bool = False) -> bool:
    """Return whether the results of `node` are computed from the elements of operand `index`.

    With `smooth`, indices are left out: the results are no smooth function of them.
    """
    left_out = ("l", "i") if smooth else ("l",)
    return operand_role(node, index) not in left_out and "shape" not in operator_of(node).traits


def value_operands(node: ir.Node, smooth: bool = False) -> list[ir.Value]:
    """Return the operands of `node` from whose elements the results are computed."""
    operands = enumerate(node.inputs)
    return [x for i, x in operands if x is not None and is_value_operand(node, i, smooth)]


def reachable(
    starts: Iterable[ir.Value], onward: Callable[[ir.Value], Iterable[ir.Value | None]]
) -> Iterator[ir.Value]:
    """Yield the values `starts`, and all values found by repeated calls of `onward`, each once."""
    seen = dict.fromkeys(starts)
    waiting = list(seen)
    for value in waiting:  # the loop appends to it
        yield value
        new = {x: None for x in onward(value) if x is not None and x not in seen}
        seen |= new
        waiting += new


def reads_of_values(
    starts: Iterable[ir.Value], through: Collection[str] = MOVES
) -> Iterator[tuple[ir.Node, int]]:
    """Yield (node, operand index) for each read of `starts`, and of copies by nodes like Reshape.

    Nodes of the types `through` make the copies; the reads by these nodes are yielded, too.
    """

    def moved_results(value: ir.Value) -> Iterator[ir.Value]:
        return (y for node, _ in value.uses() if node.op_type in through for y in node.outputs)

    for value in reachable(starts, moved_results):
        yield from value.uses()


def source_of(value: ir.Value, through: Collection[str] = MOVES) -> ir.Value:
    """Return the value of which `value` is a copy, made by nodes of the types `through`.

    If no such node makes `value`, return `value` itself.
    """
    node = value.producer()
    while node is not None and node.op_type in through and node.inputs and node.inputs[0]:
        value = node.inputs[0]
        node = value.producer()
    return value


def producer_before_moves(value: ir.Value) -> ir.Node | None:
    """Return the node that computes `value`, looking behind nodes that only move elements."""
    return source_of(value).producer()


class StoredIntegers:
    """The values of a graph that are integers of quantized weights, or computed from the integers.

    Attributes:
        sizes: `{value: the most elements that its scale may have}`, for values computed from stored
            integers and constants, and for rows gathered from them that are not scaled yet. A scale
            may have as many elements as there are integers, and fewer for integers -1, 0 and 1,
            which may be a mask of a weight.
        results: results of products of data with integers that are not scaled yet.
    """

    def __init__(self, nodes: Iterable[ir.Node], data: Collection[ir.Value]) -> None:
        self.sizes: dict[ir.Value, int] = {}
        self.results: set[ir.Value] = set()
        unscaled: set[ir.Value] = set()
        for node in nodes:
            op, inputs = node.op_type, [x for x in node.inputs if x is not None]
            for x in inputs:
                if x not in self.sizes and (size := _scale_size_limit(x, op)):
                    self.sizes[x] = size
                    unscaled.add(x)
            known = [x for x in inputs if x in self.sizes]
            others = [x for x in inputs if x not in self.sizes]
            if op in MOVES and inputs[:1] and inputs[0] in self.results:
                self.results.update(node.outputs)
            elif any(x in known for x in operands_of_role(node, "f")):
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

    def scale_size_at(self, node: ir.Node, index: int) -> int:
        """Return how many elements operand `index` may have at most, as a scale or shift of
        integers.

        0: the operand is neither a scale nor a shift.
        """
        others = [x for i, x in enumerate(node.inputs) if i != index and x is not None]
        if node.op_type in _FACTORS and any(x in self.results for x in others):
            return max(self.sizes.values())
        if node.op_type in _FACTORS | _SHIFTS:
            return max((self.sizes.get(x, 0) for x in others), default=0)
        return 0

    def scale_size_of(self, value: ir.Value) -> int:
        """Return the most elements that a quantization scale of the tensor `value` may have."""
        found = 0
        for node, index in value.uses():
            moved = node.outputs if node.op_type in MOVES and index == 0 else ()
            found = max([found, self.scale_size_at(node, index), *map(self.scale_size_of, moved)])
        return found


def _scale_size_limit(x: ir.Value, op_type: str) -> int:
    """Return the most elements that a quantization scale of `x` may have.

    The result is 0 if `x` holds no stored integers; masks of zeros and ones, and sizes, are none.
    """
    if x.const_value is None or x.producer() is not None or x.dtype is None or x.is_graph_input():
        return 0
    size, kind = x.const_value.size, x.dtype.name
    wide = kind in ("INT32", "INT64", "UINT32", "UINT64") and op_type in _BITS
    bias = kind == "INT32" and op_type == "Cast" and size in x.const_value.shape.numpy()
    if not (wide or bias or kind in _FEW_BITS) or size < 2:
        return 0
    array = x.const_value.numpy().astype(np.float32)
    if evidence.is_binary(array) or (bias and evidence.has_equal_steps(array)):
        return 0
    has_signs_only = bool((np.abs(array) <= 1).all())
    return size - has_signs_only


class Surroundings:
    """Says from what the values of `graph` and its subgraphs are computed: data, weights,
    positions.

    Attributes:
        nodes: all nodes, nodes of subgraphs included.
        bindings: `{value: values}`, from the operands of a node to the inputs of its subgraphs,
            and from the outputs of its subgraphs to the results of the node.
        data: values computed from the elements of an input, or from random numbers.
        positions: values computed from shapes and ranges, and from no data.
        weighted: data computed with a weight: from a product with a constant, or a lookup.
        hidden: values from which a product with a weight is computed.
        fixed: factors that are no weights: `buffers`, transforms of the inputs, and values
            computed from `fixed` values only.
        stored: the stored integers.
    """

    def __init__(self, graph: ir.Graph, buffers: Collection[ir.Value] = ()) -> None:
        self.nodes = all_nodes(graph)
        self.bindings: dict[ir.Value, list[ir.Value]] = {}
        self._bound_to: dict[ir.Value, list[ir.Value]] = {}
        for source, target in chain.from_iterable(map(_subgraph_bindings, self.nodes)):
            self.bindings.setdefault(source, []).append(target)
            self._bound_to.setdefault(target, []).append(source)
        inputs = set(graph.inputs) - set(graph.initializers.values())
        self.data = self._dependents_of(lambda node: node.op_type in RANDOM - {"Dropout"}, inputs)
        self.positions = (
            self._dependents_of(lambda node: node.op_type in ("Shape", "Size", "Range")) - self.data
        )
        self.fixed: set[ir.Value] = set()
        self.stored = StoredIntegers(self.nodes, self.data)
        self.add_fixed_factors(buffers)

    def add_fixed_factors(self, factors: Iterable[ir.Value]) -> None:
        """Add untrained constant factors to `fixed`, and recompute `weighted` and `hidden`."""
        self.fixed |= set(factors)
        for node in self.nodes:
            if node.inputs and self.fixed.issuperset(x for x in node.inputs if x is not None):
                self.fixed.update(node.outputs)
        self.weighted = self._dependents_of(self._applies_weight)
        self.hidden = self.values_before(filter(self.is_product, self.nodes))

    def values_before(self, nodes: Iterable[ir.Node]) -> set[ir.Value]:
        """Return the values of which the operands of `nodes` may be smooth functions."""
        operands = (x for node in nodes for x in value_operands(node, smooth=True))
        return set(reachable(operands, self._smooth_operands))

    def _dependents_of(
        self, starts: Callable[[ir.Node], bool], values: Iterable[ir.Value] = ()
    ) -> set[ir.Value]:
        """Return `values`, and all values computed from `values` or by the nodes where `starts` is
        true.
        """
        nodes = (node for node in self.nodes if starts(node) and not any(subgraphs(node)))
        return set(
            reachable([*values, *(y for node in nodes for y in node.outputs)], self.results_from)
        )

    def results_from(self, value: ir.Value) -> Iterator[ir.Value]:
        """Yield the results of all nodes that compute with the elements of `value`."""
        yield from self.bindings.get(value, ())
        for node, index in value.uses():
            if is_value_operand(node, index) and not any(subgraphs(node)):  # see `bindings`
                yield from node.outputs

    def _smooth_operands(self, value: ir.Value) -> Iterator[ir.Value]:
        """Yield the operands of which `value` may be a smooth function, from the node that computes
        it.
        """
        yield from self._bound_to.get(value, ())
        node = value.producer()
        yield from () if node is None else value_operands(node, smooth=True)

    def _applies_weight(self, node: ir.Node) -> bool:
        """Return whether `node` applies a weight to data."""
        if normalize_domain(node.domain) not in ("", "com.microsoft"):
            return any(x in self.data for x in node.inputs)
        looks_up = any(x in self.data for x in node.inputs[1:])  # by indices that are data
        tables = operands_of_role(node, "t") if looks_up else ()
        return self.is_product(node) or any(x not in self.data for x in tables)

    def is_product(self, node: ir.Node) -> bool:
        """Return whether `node` is a matrix product or convolution of data with constants."""
        factors = operands_of_role(node, "fq")
        weights = any(x not in self.data and x not in self.fixed for x in factors)
        return weights and any(x in self.data for x in node.inputs)

    def reads_other_data(self, node: ir.Node, index: int) -> bool:
        """Return whether `node` has an operand of data other than its operand `index`."""
        others = [x for i, x in enumerate(node.inputs) if i != index]
        return any(x in self.data and x in others for x in value_operands(node))

    def product_without_bias(self, value: ir.Value) -> ir.Node | None:
        """Return the product without bias that gives `value` or a term of it; None if none does."""
        made = (v.producer() for v in reachable([value], self._sum_terms))
        products = (node for node in made if node is not None and self.is_product(node))
        return next((node for node in products if not operands_of_role(node, "b")), None)

    def _sum_terms(self, value: ir.Value) -> Sequence[ir.Value | None]:
        """Return the terms of the sum `value`, or the operand that a node moves or scales to
        `value`.
        """
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
        """Return whether a bias, a number for each feature, is added in or behind `product`."""
        users = (
            user.inputs[1 - i]
            for user, i in reads_of_values(product.outputs)
            if user.op_type == "Add"
        )
        added = [x for x in users if x not in self.data]
        scalar_bias = has_one_feature(product)
        behind = any(scalar_bias or any(n != 1 for n in dims(x) or ()) for x in added)
        return behind or bool(operands_of_role(product, "b"))

    def precedes_model(self, node: ir.Node) -> bool:
        """Return whether a product with a weight, or a model of scikit-learn, is computed from
        `node`.
        """
        users = (user for v in reachable(node.outputs, self.results_from) for user, _ in v.uses())
        return any(self.is_product(user) or _is_sklearn_model(user) for user in users)

    def is_quantized(self, node: ir.Node) -> bool:
        """Return whether `node` scales a product of integers, or computes the scale."""
        return any(
            producer_type(x) in ("MatMulInteger", "ConvInteger", "DynamicQuantizeLinear")
            for x in node.inputs
            if x is not None
        )

    def is_rounded(self, node: ir.Node) -> bool:
        """Return whether `node` scales data in front of a Round, or behind a Round."""

        def sources_before(value: ir.Value) -> Sequence[ir.Value | None]:
            producer = value.producer()
            return producer.inputs[:1] if producer and self._shifts_or_clips(producer) else ()

        def results_after(value: ir.Value) -> Iterator[ir.Value]:
            return (y for n, _ in value.uses() if self._shifts_or_clips(n) for y in n.outputs)

        operands = reachable([x for x in node.inputs if x is not None], sources_before)
        return any(made_by(x, "Round") for x in operands) or any(
            n.op_type == "Round"
            for y in reachable(node.outputs, results_after)
            for n, _ in y.uses()
        )

    def _shifts_or_clips(self, node: ir.Node) -> bool:
        """Return whether `node` may add a zero point to rounded numbers, or clip the numbers."""
        constant = sum(x in self.data for x in node.inputs) < 2
        return constant and node.op_type in _AROUND_ROUND

    def is_normalized(self, value: ir.Value, scaled: bool) -> bool:
        """Return whether `value` is data over a deviation; `scaled` allows a constant factor."""
        node = producer_before_moves(value)
        if node is None or node.op_type in _NORMALIZES:
            return node is not None
        data = [x for x in node.inputs if x is not None and x in self.data]
        if scaled and node.op_type in ("Mul", "Div") and len(data) == 1:
            return self.is_normalized(data[0], False)
        if node.op_type == "Div" and node.inputs[1] in data:
            return _is_computed_from_means(node.inputs[1]) or _is_computed_from_means(value)
        if node.op_type == "Mul" and len(data) == 2:
            return any(map(_is_computed_from_means, data))
        return node.op_type in ("Reciprocal", "Pow", "Sqrt") and _is_computed_from_means(value)

    def is_scaled_behind(self, node: ir.Node) -> bool:
        """Return whether the next node behind `node` multiplies the result by a constant.

        Exporters write GroupNorm so, behind an InstanceNormalization.
        """
        [value] = node.outputs
        while len(users := list(value.uses())) == 1 and users[0][0].op_type in MOVES:
            value = users[0][0].outputs[0]
        return any(n.op_type == "Mul" and n.inputs[1 - i] not in self.data for n, i in value.uses())

    def makes_waves(self, node: ir.Node) -> bool:
        """Return whether a Sin and a Cos read the results of `node`."""
        users = reads_of_values(node.outputs, MOVES_OR_JOINS | {"Mul"})
        return WAVES.issubset(user.op_type for user, _ in users)

    def reaches_softmax(self, value: ir.Value) -> bool:
        """Return whether `value` becomes a score of attention, which a Softmax reads before a
        product.
        """
        return any(
            operand_role(user, index) == "m"
            or (user.op_type == "Softmax" and self._softmax_multiplies_data(user.outputs[0]))
            for user, index in reads_of_values([value], _TO_SCORES)
        )

    def _softmax_multiplies_data(self, weights: ir.Value) -> bool:
        """Return whether `weights`, the result of a Softmax, are multiplied with other data."""
        return any(
            operand_role(user, index) == "f" and self.reads_other_data(user, index)
            for user, index in reads_of_values([weights], MOVES | {"Where", "Mul"})
        )


def _subgraph_bindings(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yield (source, target) for values passed into or out of subgraphs or to a next iteration."""
    graphs, inputs, results = list(subgraphs(node)), node.inputs, node.outputs
    if not graphs or normalize_domain(node.domain):
        return
    body = graphs[0]
    runs: list[tuple[Sequence[ir.Value | None], Sequence[ir.Value]]]
    if node.op_type == "If":
        runs = [(branch.outputs, results) for branch in graphs]
    elif node.op_type == "Loop":
        states = body.inputs[2:]
        again = body.outputs[1 : len(inputs) - 1]
        runs = [(inputs[2:], states), (again, states), (body.outputs[1:], results)]
    else:  # Scan, SequenceMap
        scanned = node.attributes.get_int("num_scan_inputs", len(inputs))
        again = body.outputs[: len(inputs) - scanned]
        runs = [(inputs, body.inputs), (again, body.inputs), (body.outputs, results)]
    for sources, targets in runs:
        yield from ((a, b) for a, b in zip(sources, targets, strict=False) if a is not None)


def producer_type(value: ir.Value) -> str:
    """Return the type of the node that computes `value`, looking behind moves; "" if none does."""
    node = producer_before_moves(value)
    return "" if node is None else node.op_type


def _is_sklearn_model(node: ir.Node) -> bool:
    """Return whether `node` is of a classifier or regressor of scikit-learn, not of a transformer.

    Models compute with operators of `ai.onnx.ml`, searches for the nearest rows, comparisons with a
    threshold, and logarithms of sums of likelihoods.
    """
    operator = operator_of(node)
    learns = bool(operator.fitted) or any(is_weight for _, is_weight in operator.coefficients)
    return learns or node.op_type in ("Less", "LessOrEqual") or node.op_type == "ReduceLogSumExp"


def has_one_feature(product: ir.Node) -> bool:
    """Return whether a product has one output feature, so that its bias is one number."""
    return any(1 in shape or len(shape) == 1 for x in product.inputs[:2] if (shape := dims(x)))


def _is_computed_from_means(value: ir.Value) -> bool:
    """Return whether `value` is computed from means or sums, as a standard deviation is."""
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
