"""The roles of constants in a graph: which constants are weights, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.graph.traversal import subgraphs
from onnxgrad.model import external, weights as constants
from onnxgrad.model.constants import normalize_domain
from onnxgrad.model.convert import to_ir
from onnxgrad.model.feeds import make_defaults_constants, variable_defaults
from onnxgrad.model.local_functions import inline_functions
from onnxgrad.operators import operator_of
from onnxgrad.training.parameters import evidence
from onnxgrad.training.parameters.flow import (
    ARITHMETIC,
    MOVES,
    MOVES_OR_JOINS,
    WAVES,
    Surroundings,
    has_one_feature,
    is_value_operand,
    operand_role,
    operands_of_role,
    producer_type,
    source_of,
)
from onnxgrad.training.parameters.table import Tensor, Tensors

QUANTIZED = "scale or zero point of the quantized"
# reasons, by the letters of roles that need no evidence
_REASONS = {"r": "running statistic of", "p": "slope of", "k": "rotary table of", "q": QUANTIZED}
_LARGE = 1000  # elements: most tensors of that size are weights


class Verdict(NamedTuple):
    """Whether a constant trains by default, and why or why not."""

    trains: bool
    why: str
    doubtful: bool = False  # whether it may be wrong, as for large tensors that do not train
    certain: bool = False  # whether it counts even if the exporter calls the constant a parameter


# of each rule: whether it applies, then the fields of its `Verdict`
Rules = Iterator[tuple[Any, ...]]


class Roles(Surroundings):
    """Decides which constants of a graph are weights.

    Args:
        graph: the graph, without local functions.
        producer: the name of the exporter, as in the model.
        buffers: constants that are no parameters, as the exporter states.
    """

    def __init__(
        self, graph: ir.Graph, producer: str = "", buffers: Collection[ir.Value] = ()
    ) -> None:
        super().__init__(graph, buffers)
        self.from_torch = producer == "pytorch"  # PyTorch gives initializers meaningful names
        self.from_sklearn = producer == "skl2onnx"
        # one transform may be behind another
        while transforms := set(self._fixed_transform_constants()) - self.fixed:
            self.add_fixed_factors(transforms)

    def _fixed_transform_constants(self) -> Iterator[ir.Value]:
        """Yield the constants that transform an input before any weight, as Fourier matrices do."""
        for node in filter(self.is_product, self.nodes):
            if self.weighted.isdisjoint(x for x in node.inputs if x):
                for x in operands_of_role(node, "f"):
                    tensor = None if x in self.data else source_of(x).const_value
                    if tensor is not None and evidence.is_transform(tensor.numpy()):
                        yield x

    def mark_last_layers(self, rows: Tensors, constants: Mapping[str, ir.Value]) -> Tensors:
        """Return the tensors of a table with `is_last` set for the weights of last layers.

        No product with weights is computed from a node that reads a weight of a last layer.
        """
        self.add_fixed_factors(constants[t.name] for t in rows.frozen if t.name in constants)
        hidden = self.values_before(
            n for n in self.nodes if self.is_product(n) or operator_of(n).coefficients
        )
        unread = np.empty(0)  # in place of the elements, as no verdict is needed
        return Tensors(
            replace(t, is_last=any(hidden.isdisjoint(use.node.outputs) for use in uses))
            for t in rows
            for uses in [self._operands_of(t.name, unread, constants[t.name]) if t.trains else ()]
        )

    def judge(self, name: str, constant: ir.Value, array: np.ndarray) -> Verdict:
        """Return whether a constant trains and why, from the nodes that read the constant.

        The first node that reads it as a weight decides; without such a node, the first node does.
        """
        if array.dtype.itemsize < 4:
            array = array.astype(np.float32)  # numpy does not support bfloat16 everywhere
        if (
            self.from_torch
            and evidence.written_as_constant(name)
            and evidence.is_constant_array(array)
        ):
            return Verdict(False, "one number, which the exporter wrote as a Constant")
        if evidence.of_final_logits(name):
            return Verdict(False, "a buffer of transformers, which its models do not train")
        if evidence.are_alibi_slopes(array):
            return Verdict(False, "slopes of ALiBi", not evidence.is_generated(name))
        uses = list(self._operands_of(name, array, constant))
        verdicts = [use.verdict() for use in uses]
        learned = next((v for v in verdicts if v.trains), None)
        if learned is None:
            unused = Verdict(False, "no node combines this constant with data")
            return next((v for v in verdicts if v.doubtful), [*verdicts, unused][0])
        if not np.isfinite(array).all():
            return Verdict(False, f"it has infinite numbers or NaN ({learned.why})")
        statistic = next((use.where for use in uses if use.kind == "r"), None)
        if statistic is None:
            return learned
        if evidence.sounds_statistic(name):
            return Verdict(False, f"running statistic of {statistic}")
        why = f"{learned.why}, stored once with a running statistic, which moves with it"
        return Verdict(True, why, True)

    def _operands_of(self, name: str, array: np.ndarray, constant: ir.Value) -> Iterator[_Operand]:
        """Yield the reads of `constant`, or of a value computed from it, by nodes that also read
        data.
        """
        seen = {constant}
        waiting: list[tuple[ir.Value, frozenset[str], bool, int]]
        waiting = [(constant, frozenset(), False, 0)]
        for value, via, moved, scaled in waiting:  # the loop appends to it
            onward = []
            for target in self.bindings.get(value, ()):
                if target not in self.data:
                    onward.append((target, via, moved, scaled))
                elif (reader := _subgraph_node_between(value, target)) is not None:
                    yield _Operand(self, name, array, *reader, value, via, moved, scaled)
            for node, index in value.uses():
                integers = max(scaled, self.stored.scale_size_at(node, index))
                if self._node_tells_role(node, index):
                    yield _Operand(self, name, array, node, index, value, via, moved, integers)
                elif is_value_operand(node, index) and not any(subgraphs(node)):
                    others = [x for i, x in enumerate(node.inputs) if i != index and x is not None]
                    at = moved or any(x in self.positions for x in others)
                    onward += [(y, via | {node.op_type}, at, integers) for y in node.outputs]
            for entry in onward:
                if entry[0] not in seen:
                    seen.add(entry[0])
                    waiting.append(entry)

    def _node_tells_role(self, node: ir.Node, index: int) -> bool:
        """Return whether `node` tells the role of its operand `index`, as a product with data
        does.
        """
        if node.domain == "ai.onnx.ml":
            return True
        if any(subgraphs(node)) or not is_value_operand(node, index):
            return False  # `bindings` cover subgraphs; other nodes read the shape only
        kind = operand_role(node, index)
        own = kind == "f" and operand_role(node, 0) != "f"  # both operands of a MatMul are factors
        depends = kind in {"f", "t", "x", "a", "e", ""}  # on the other operands of the node
        return own or not depends or self.reads_other_data(node, index)


def _subgraph_node_between(value: ir.Value, target: ir.Value) -> tuple[ir.Node, int] | None:
    """Return (node, operand index) of a node that passes `value` to or from a subgraph."""
    into = ((node, index) for node, index in value.uses() if any(subgraphs(node)))
    producer = target.producer()
    return next(into, None if producer is None else (producer, 0))


@dataclass
class _Operand:
    """An operand of a node that combines a constant with data, with the rules for its role.

    Attributes:
        around: the roles of the graph.
        name: the name of the constant.
        array: the elements of the constant.
        node: the node.
        index: the index of the operand of the node.
        value: the operand: the constant, or a value computed from it.
        via: the types of the nodes that compute `value` from the constant.
        at_positions: whether one of these nodes has an operand that is computed from shapes.
        integers: the most elements that a scale of integers may have here; 0: no integers are
            scaled or shifted.
    """

    around: Roles
    name: str
    array: np.ndarray
    node: ir.Node
    index: int
    value: ir.Value
    via: frozenset[str]
    at_positions: bool
    integers: int

    def __post_init__(self) -> None:
        node = self.node
        self.is_numbered = evidence.is_generated(self.name)
        self.may_be_learned = not (self.is_numbered or evidence.sounds_fixed(self.name))
        self.kind = operand_role(node, self.index)
        self.where = f"{node.op_type} {node.name!r}" if node.name else node.op_type
        self.adds = self.kind == "a"
        self.early = self.around.weighted.isdisjoint(x for x in node.inputs if x)
        self.moved = self.via <= MOVES  # the operand has the elements of the constant
        self.leads_to_weights = node.outputs[0] in self.around.hidden

    def verdict(self) -> Verdict:
        """Return whether the constant trains and why, by the first rule that applies.

        Transformers of scikit-learn in front of a model do not train. Layers of models of
        scikit-learn have a bias, or are operators of `ai.onnx.ml`; projections (PCA), stored rows
        of kernels, tables of quantiles and imputed values are parts of transformers.
        """
        node, around = self.node, self.around
        verdict = next(Verdict(*fields) for applies, *fields in self._role_rules() if applies)
        if not around.from_sklearn:
            return verdict
        if evidence.of_naive_bayes(self.name):
            return Verdict(True, f"parameter of a naive Bayes classifier ({self.where})")
        if not verdict.trains or operator_of(node).coefficients:
            return verdict
        other = node.inputs[1 - self.index] if node.op_type == "Add" else None
        added_to = None if other is None else around.product_without_bias(other)
        layer = node if self.kind == "f" else added_to
        if (layer is not None and around.has_bias(layer)) or not around.precedes_model(node):
            return verdict
        return Verdict(False, f"of a transformer in front of a model ({verdict.why})")

    # -- rules: the first rule that applies gives the verdict -------------------------------------

    def _role_rules(self) -> Rules:
        """Yield (applies, trains, why) rules for any operand, by its role and its node."""
        node, index, kind = self.node, self.index, self.kind
        where, size = self.where, self.array.size
        why = f"scale or zero point of stored integers ({where})"
        yield self.integers >= max(size, 1), False, why, False, True
        others = [x for i, x in enumerate(node.inputs) if i != index and x is not None]
        multiplies = kind == "f" or node.op_type == "Mul"
        shares = multiplies and any(producer_type(x) == "Softmax" for x in others)
        why = f"numbers of classes, of which {where} computes the expected one"
        yield shares and evidence.has_equal_steps(self.array), False, why, False, True
        if node.domain == "ai.onnx.ml":
            yield from self._ai_onnx_ml_rules()
        # |x - s|^2 = |x|^2 - 2 x sT + |s|^2
        part = node.op_type == "Gemm" and node.attributes.get_float("alpha", 1.0) == -2.0
        distance = node.op_type == "CDist" or (kind == "f" and part)
        yield distance, False, f"stored rows, of which {where} computes distances"
        if node.op_type == "Concat" and not normalize_domain(node.domain):
            yield from self._concat_rules()
        if kind in self._RULES:
            yield from self._RULES[kind](self)
        yield kind in _REASONS, kind == "p", f"{_REASONS.get(kind)} {where}"
        if any(target in self.around.data for target in self.around.bindings.get(self.value, ())):
            yield from self._initial_state_rules()
        foreign = normalize_domain(node.domain) not in ("", "com.microsoft") and size > 1
        yield foreign, True, f"operand {index} of {where}, an operator of another domain"
        doubtful = size > (_LARGE if self.is_numbered else 1)
        yield True, False, f"operand {index} of {where}, which takes no weights", doubtful

    def _ai_onnx_ml_rules(self) -> Rules:
        """Yield (applies, trains, why) rules for an operand of an operator of `ai.onnx.ml`."""
        index, where, names = self.index, self.where, operator_of(self.node).coefficients
        if 1 <= index <= len(names):
            name, trains = names[index - 1]
            yield True, trains, f"{name} of {where}"
        if self.node.op_type == "ArrayFeatureExtractor" and index == 0:
            yield self.around.from_sklearn, False, f"stored data, from which {where} selects"
            yield from self._lookup_table_rules()
        yield True, False, f"operand {index} of {where}"

    def _factor_rules(self) -> Rules:
        """Yield (applies, trains, why) rules for a factor of a matrix product or convolution."""
        array, via, where, early = self.array, self.via, self.where, self.early
        yield evidence.is_binary(array) and "Mul" in via, False, f"mask of a factor of {where}"
        yield evidence.is_same_filter(array), False, f"the same filter for all channels of {where}"
        yield via & WAVES, False, f"a table of sines and cosines is computed from it ({where})"
        why = f"frequencies: sines and cosines of the result of {where}"
        yield self.around.makes_waves(self.node), False, why, self.may_be_learned
        fixed = early and evidence.is_transform(array)
        yield fixed, False, f"a fixed transform of an input: {where}"
        yield from self._rules_beside_positions(not self.moved and array.size == 1)
        formula = array.size == 1 and via & ARITHMETIC
        yield formula, False, f"a single number in the formula of a factor of {where}"
        yield True, True, f"factor of {where}"

    def _bias_rules(self) -> Rules:
        """Yield (applies, trains, why) rules for a bias, an operand of a product or convolution."""
        is_scalar = self.array.size == 1 and "Expand" in self.via
        yield is_scalar, False, f"one number for all features of {self.where}"
        fixed = any(x in self.around.fixed for x in self.node.inputs)
        yield fixed, False, f"bias of a fixed transform: {self.where}"
        yield True, True, f"bias of {self.where}"

    def _rules_beside_positions(self, applies: object) -> Rules:
        """Yield (applies, trains, why) rules for a constant that is combined with positions."""
        why = f"it only combines with computed positions before {self.where}"
        doubtful = self.may_be_learned and self.array.size > 1
        yield self.at_positions and applies, False, why, doubtful

    def _normalization_rules(self) -> Rules:
        """Yield (applies, trains, why) rules for the scale or bias of a normalization."""
        node, array, where, scales = self.node, self.array, self.where, self.kind == "s"
        unit = evidence.is_constant_array(array, float(scales))
        follows = node.op_type == "InstanceNormalization" and self.around.is_scaled_behind(node)
        fixed = unit and (follows or (self.is_numbered and not evidence.reads_parameters(node)))
        yield fixed, False, f"the {array.ravel()[0]:g} of {where} without weights"
        yield True, True, f"{'scale' if scales else 'bias'} of {where}"

    def _lookup_table_rules(self) -> Rules:
        """Yield (applies, trains, why) rules for a table of which a node gathers rows."""
        array, around, where, y = self.array, self.around, self.where, self.node.outputs[0]
        waves = evidence.is_wave_table(array)
        yield waves, False, f"table of sines and cosines at positions ({where})"
        of_integers = around.stored.scale_size_of(y) >= max(array.size, 1)
        yield of_integers, False, f"scales of stored integers ({where})", False, True
        indices = self.node.inputs[1]
        nearest = indices is not None and producer_type(indices) == "TopK"
        nearest = nearest and indices not in around.weighted
        yield nearest, False, f"stored data of which {where} gathers the nearest"
        mask = around.reaches_softmax(y) and evidence.is_additive_mask(array)
        yield mask, False, f"mask of which {where} gathers rows"
        yield True, True, f"table of {where}"

    def _concat_rules(self) -> Rules:
        """Yield (applies, trains, why) rules for a constant that is concatenated with data."""
        array, where, last = self.array, self.where, not self.leads_to_weights
        one = array.size == 1 or (evidence.is_constant_array(array) and self.is_numbered)
        yield one, False, f"a fixed value concatenated with data ({where})"
        table = evidence.is_wave_table(array) or evidence.is_additive_mask(array)
        yield table, False, f"a fixed table concatenated with data ({where})"
        yield from self._rules_beside_positions(not self.via <= MOVES_OR_JOINS | {"Add"})
        yield last, False, f"concatenated with results of the last weights ({where})"
        yield True, True, f"learned rows (a class token, queries) concatenated with data ({where})"

    def _bound_or_size_rules(self) -> Rules:
        """Yield (applies, trains, why) rules for a bound, a size or another setting of a node."""
        learned, several = self.may_be_learned, self.array.size != 1
        doubtful = learned and (self.around.from_torch or several)
        power = self.node.op_type == "Pow" and self.index == 1
        yield power, False, f"exponent of {self.where}", doubtful
        doubtful = learned and several and self.kind == "v"
        yield True, False, f"bound, size or other setting of {self.where}", doubtful

    def _initial_state_rules(self) -> Rules:
        """Yield (applies, trains, why) rules for an initial state of a loop or recurrent layer."""
        same = evidence.is_constant_array(self.array, None if self.is_numbered else 0.0)
        yield self.array.size == 1 or same, False, f"fixed initial state of {self.where}"
        yield True, True, f"learned initial state of {self.where}"

    def _attention_score_rules(self) -> Rules:
        """Yield (applies, trains, why) rules for a constant that is added to attention scores."""
        array, where = self.array, self.where
        yield evidence.is_additive_mask(array), False, f"mask: added before a Softmax ({where})"
        one_number = evidence.is_constant_array(array)
        yield one_number, False, f"one number added before a Softmax ({where})"
        yield evidence.has_linear_rows(array), False, f"distances: added before a Softmax ({where})"
        yield True, True, f"bias of the scores of attention ({where})"

    def _where_rules(self) -> Rules:
        """Yield (applies, trains, why) rules for values that a Where chooses."""
        array, fixed = self.array, evidence.is_constant_array(self.array) and self.is_numbered
        scores = self.moved and self.around.reaches_softmax(self.node.outputs[0])
        if array.size > 1 and self.at_positions and scores:
            yield from self._attention_score_rules()  # a bias by distance, -inf at padding
        fixed = array.size == 1 or fixed or evidence.is_additive_mask(array) or self.at_positions
        yield fixed, False, f"a fixed value or mask of {self.where}"
        yield True, True, f"learned values that {self.where} chooses (a mask token)"

    # -- sums and products, element by element ------------------------------------------------

    def _arithmetic_rules(self) -> Rules:
        """Yield (applies, trains, why) rules for an operand of a sum, difference, product or
        quotient.
        """
        node, via, array, where, around = self.node, self.via, self.array, self.where, self.around
        adds, word = self.adds, "bias" if self.adds else "scale"
        other = next(x for i, x in enumerate(node.inputs) if i != self.index and x in around.data)
        product = around.product_without_bias(other) if adds and self.moved else None
        if product is not None:
            yield self._is_bias(product), True, f"bias behind {product.op_type} ({where})"
        yield around.is_quantized(node), False, f"{QUANTIZED} {where}"
        rounded = not adds and around.is_rounded(node)
        yield rounded, False, f"scale of numbers that are rounded ({where})"
        if around.is_normalized(other, adds):
            unit = self.is_numbered and evidence.is_constant_array(array, 0.0 if adds else 1.0)
            fixed = unit and not evidence.reads_parameters(node)
            yield fixed, False, f"a fixed number of a normalization ({where})"
            affine = array.size > 1 or evidence.sounds_affine(self.name)
            yield affine, True, f"{word} of a normalization ({where})"
        if array.size == 1:
            yield from self._scalar_rules()
        waves = via & WAVES or (around.makes_waves(node) and not adds)
        yield waves, False, f"frequencies of sines and cosines ({where})"
        yield evidence.is_binary(array), False, f"mask of zeros and ones ({where})"
        if adds and (evidence.is_additive_mask(array) or around.reaches_softmax(node.outputs[0])):
            masked = "Gather" in via and via & ARITHMETIC <= {"Add"}  # added to a mask
            yield from self._rules_beside_positions(via & ARITHMETIC and not masked)
            yield from self._attention_score_rules()
        yield from self._rules_beside_positions(not via <= MOVES_OR_JOINS and "MatMul" not in via)
        wave = evidence.is_wave_table(array) or (not adds and evidence.may_be_cosine_table(array))
        yield wave, False, f"table of sines and cosines ({where})"
        table = not adds and self.at_positions
        yield table, False, f"table at computed positions that multiplies ({where})"
        yield from self._neighboring_weight_rules()

    def _is_bias(self, product: ir.Node) -> bool:
        """Return whether the constant, added to `product`, has one number for each feature."""
        shape, affine = self.array.shape, evidence.sounds_affine(self.name)
        along_one_axis = bool(shape) and sum(n > 1 for n in shape) < 2
        return along_one_axis and (self.array.size > 1 or has_one_feature(product) or affine)

    def _neighboring_weight_rules(self) -> Rules:
        """Yield (applies, trains, why) rules for a constant before, between or behind weights."""
        node, early, where, said = (
            self.node,
            self.early,
            self.where,
            evidence.reads_parameters(self.node),
        )
        wide = sum(n > 1 for n in self.array.shape) > 1
        verb = "added to" if self.adds else "a factor of"
        if self.leads_to_weights:
            yield not early, True, f"{verb} a result of weights ({where})"
            table = node.op_type == "Add" and wide
            yield table, True, f"table of positions, added to an input ({where})"
        elif not early:
            affine = said or (said is None and evidence.sounds_affine(self.name))
            yield affine, True, f"{verb} a result of the last weights ({where})"
        rows = early and node.op_type == "Sub" and wide
        yield rows, False, f"stored rows that an input is compared with ({where})"
        if early and (self.leads_to_weights or self.is_numbered):
            scores = not self.is_numbered and self.around.reaches_softmax(node.outputs[0])
            yield True, False, f"{verb} an input before any weight ({where})", scores
        yield early, True, f"{verb} an input that no other weight is applied to ({where})"
        doubtful = self.array.size > _LARGE or (said is None and self.may_be_learned)
        why = f"{verb} a result of the last weights: anchors, units ({where})"
        yield True, False, why, doubtful

    def _scalar_rules(self) -> Rules:
        """Yield (applies, trains, why) rules for a scalar, such as a temperature."""
        array, where, early = self.array, self.where, self.early
        sounds = evidence.sounds_learned(self.name)
        formula = f"a single number in a formula ({where})"
        yield self.is_numbered and not sounds, False, formula
        of_vote = self.around.from_sklearn and not self.adds  # the weight of a vote
        yield of_vote, False, f"a single factor, which no scikit-learn model learns ({where})"
        alone = early and not self.leads_to_weights and (array.ndim or sounds)
        why = f"a single number that is applied to an input, without other weights ({where})"
        yield alone, True, why, True
        yield early, False, f"a single number before any weight ({where})"
        said = evidence.reads_parameters(self.node)
        if said is None:
            root = float(np.abs(array.astype(np.float64)).max()) ** -2 if array.all() else 0.0
            fixed = any(abs(n - round(n)) < 1e-4 * n and n > 1.5 for n in (root, root and 1 / root))
            scores = not self.adds and fixed and self.around.reaches_softmax(self.node.outputs[0])
            yield scores, False, f"scale of attention before a Softmax ({where})"
        told = said is not None or evidence.sounds_fixed(self.name)
        is_formula = said is False or (said is None and not sounds)
        yield is_formula, False, formula, self.around.from_torch and not told
        yield True, True, f"a learned scalar: a single number between weights ({where})", True

    _RULES = (
        dict.fromkeys("ae", _arithmetic_rules)
        | dict.fromkeys("so", _normalization_rules)
        | dict.fromkeys("civ", _bound_or_size_rules)
        | {
            "f": _factor_rules,
            "b": _bias_rules,
            "t": _lookup_table_rules,
            "h": _initial_state_rules,
        }
        | {"m": _attention_score_rules, "w": _where_rules}
    )


def judge_constants(proto: ModelProto) -> tuple[ir.Graph, Tensors]:
    """Return the graph of `proto`, functions inlined, and its float constants with their roles.

    The constants are in the order of the graph.
    """
    inner = to_ir(inline_functions(external.copy_without_data(proto), lifted=True))
    external.restore_data_lazily(inner, proto)
    make_defaults_constants(inner)
    values = inner.graph.initializers
    stated = evidence.parameters_by_metadata(proto.graph)
    buffers = [values[n] for n, parameter in stated.items() if not parameter and n in values]
    roles = Roles(inner.graph, proto.producer_name, buffers)
    noted, data = constants.recorded_constants(proto), variable_defaults(proto)
    rows = Tensors()
    for ref in constants.constant_refs(proto):
        if ref.read().data_type in constants.FLOATS:
            array, value = ref.array(), values.get(ref.name)
            if ref.name in noted:
                verdict = Verdict(False, "part of a loss or of a gradient")
            elif not array.size:
                verdict = Verdict(False, "it has no elements: a place for an adapter")
            elif ref.name in data:
                verdict = Verdict(False, "an input, in whose place another length can be fed")
            elif value is None:
                verdict = Verdict(False, "no node reads this constant")
            else:
                by_role = roles.judge(ref.name, value, array)
                verdict = _overrule_by_exporter(by_role, array, stated.get(ref.name))
            dtype, (trains, why, doubtful, _) = str(array.dtype), verdict
            rows.append(Tensor(ref.name, array.shape, dtype, array.size, trains, why, doubtful))
    return inner.graph, roles.mark_last_layers(rows, values)


def _overrule_by_exporter(verdict: Verdict, array: np.ndarray, parameter: bool | None) -> Verdict:
    """Return `verdict`, or the opposite where the exporter states that the constant is a parameter
    or not.

    `parameter`: whether the exporter states that the constant is a parameter; None: no statement.
    """
    if parameter is False:
        why = f"a buffer, as its exporter states ({verdict.why})" if verdict.trains else verdict.why
        return Verdict(False, why)
    if parameter and not verdict.trains and not verdict.certain and np.isfinite(array).all():
        why = f"a parameter, as its exporter states ({verdict.why})"
        return Verdict(True, why, array.size == 1)
    return verdict
