"""The roles that constants play in a graph: which of them are weights, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.primal.defaults import close_defaults
from onnxgrad.autodiff.primal.local_functions import inlined
from onnxgrad.model import external, weights as constants
from onnxgrad.model.constants import standard
from onnxgrad.model.convert import to_ir
from onnxgrad.model.feeds import unsized_defaults
from onnxgrad.operators import operator_of
from onnxgrad.training.parameters import evidence
from onnxgrad.training.parameters.flow import MOVES, MOVES_OR_JOINS, letter, source_of
from onnxgrad.training.parameters.surroundings import (
    ARITHMETIC,
    WAVES,
    Surroundings,
    Use,
    has_one_feature,
    maker_type,
)
from onnxgrad.training.parameters.table import Tensor, Tensors

QUANTIZED = "scale or zero point of the quantized"
# of roles that need no evidence
_REASONS = {
    "r": "running statistic of",
    "p": "slope of",
    "k": "rotary table of",
    "q": QUANTIZED,
}
_LARGE = 1000  # elements: most tensors of that size are weights


@dataclass(frozen=True)
class Verdict:
    """Whether a constant trains by default, and why or why not."""

    trains: bool
    why: str
    doubtful: bool = False  # may be wrong: for scalars that train, and large tensors that do not
    certain: bool = False  # by the elements or by integers: also if the exporter calls it parameter


class Roles:
    """The roles of the constants of one graph; `buffers` are stated to be no parameters."""

    def __init__(
        self, graph: ir.Graph, producer: str = "", buffers: Collection[ir.Value] = ()
    ) -> None:
        self.around = Surroundings(graph)
        self.from_torch = producer == "pytorch"  # then names of initializers are meaningful
        self.from_sklearn = producer == "skl2onnx"
        self.around.fix(buffers)
        # a transform may follow another one
        while transforms := set(self._fixed_transforms()) - self.around.fixed:
            self.around.fix(transforms)

    def _fixed_transforms(self) -> Iterator[ir.Value]:
        """Yield the factors of products before any weight that are fixed transforms."""
        around = self.around
        for node in around.nodes:
            if not around.is_product(node) or any(x in around.weighted for x in node.inputs if x):
                continue
            for i, x in enumerate(node.inputs):
                if x is not None and x not in around.data and letter(node, i) == "f":
                    tensor = source_of(x).const_value
                    if tensor is not None and evidence.is_transform(tensor.numpy()):
                        yield x

    def judge(self, name: str, constant: ir.Value, array: np.ndarray) -> Verdict:
        """Return the verdict of the first use as a weight, or else of the first use."""
        if array.size == 0:
            return Verdict(False, "it is empty")
        if array.dtype.itemsize < 4:
            array = array.astype(np.float32)  # numpy does not support bfloat16 everywhere
        if self.from_torch and evidence.written_as_constant(name) and evidence.is_all(array):
            return Verdict(False, "one number, which the exporter wrote as a Constant")
        if evidence.of_final_logits(name):
            return Verdict(False, "a buffer of transformers, which its models do not train")
        if evidence.are_slopes(array):
            return Verdict(False, "slopes of ALiBi", not evidence.is_generated(name))
        uses = [_UseAs(self, name, array, use) for use in self.around.uses(constant)]
        verdicts = [use.verdict() for use in uses]
        learned = next((v for v in verdicts if v.trains), None)
        if learned is None:
            unused = Verdict(False, "no node combines it with data")
            return next((v for v in verdicts if v.doubtful), [*verdicts, unused][0])
        if not np.isfinite(array).all():
            return Verdict(False, f"it holds infinite or undefined numbers ({learned.why})")
        statistic = [use.where for use in uses if use.kind == "r"]
        if statistic and evidence.sounds_statistic(name):
            return Verdict(False, f"running statistic of {statistic[0]}")
        if statistic:
            why = f"{learned.why}, stored once with a running statistic, which moves with it"
            return Verdict(True, why, True)
        return learned


class _UseAs:
    """A use of a constant, with the verdict on its role there."""

    def __init__(self, roles: Roles, name: str, array: np.ndarray, use: Use) -> None:
        self.roles, self.around, self.use, self.node = roles, roles.around, use, use.node
        self.name, self.array, self.counted = name, array, evidence.is_generated(name)
        self.may_be_learned = not (self.counted or evidence.sounds_fixed(name))
        self.kind = letter(use.node, use.index)
        self.where = f"{use.node.op_type} {use.node.name!r}" if use.node.name else use.node.op_type
        self.adds = self.kind == "a"
        weighted = roles.around.weighted
        self.early = not any(x in weighted for x in use.node.inputs)  # before any weight
        self.moved = use.via <= MOVES  # the operand has the elements of the constant
        self.leads_to_weights = use.node.outputs[0] in roles.around.hidden

    def verdict(self) -> Verdict:
        """Return the verdict on the role; a transformer of scikit-learn before a model stays.

        The layers of its models have a bias, or are operators of `ai.onnx.ml`; projections (PCA),
        stored rows of kernels, tables of quantiles and imputed values are parts of transformers.
        """
        verdict, node, around = self._role_verdict(), self.node, self.around
        if self.roles.from_sklearn and evidence.of_naive_bayes(self.name):
            return Verdict(True, f"parameter of a naive Bayes classifier ({self.where})")
        of_model = bool(operator_of(node).coefficients)
        if not (verdict.trains and self.roles.from_sklearn) or of_model:
            return verdict
        other = node.inputs[1 - self.use.index] if node.op_type == "Add" else None
        added_to = None if other is None else around.product_without_bias(other)
        layer = node if self.kind == "f" else added_to
        if (layer is not None and around.has_bias(layer)) or not around.leads_to_model(node):
            return verdict
        return Verdict(False, f"of a transformer in front of a model ({verdict.why})")

    def _train_verdict(self, why: str, doubtful: bool = False) -> Verdict:
        return Verdict(True, f"{why} ({self.where})", doubtful)

    def _stay_verdict(self, why: str, doubtful: bool = False, certain: bool = False) -> Verdict:
        return Verdict(False, f"{why} ({self.where})", doubtful, certain)

    def _role_verdict(self) -> Verdict:
        """Return the verdict on the role of the operand, by its kind and its node."""
        use, node, kind, where = self.use, self.node, self.kind, self.where
        if use.integers >= max(self.array.size, 1):
            return self._stay_verdict("scale or zero point of stored integers", certain=True)
        if self._is_ramp():
            why = f"numbers of classes, of which {where} computes the expected one"
            return Verdict(False, why, certain=True)
        if node.domain == "ai.onnx.ml":
            return self._ml_verdict()
        if node.op_type == "CDist" or (kind == "f" and _is_part_of_distance(node)):
            return Verdict(False, f"stored rows, of which {where} computes distances")
        if node.op_type == "Concat" and not standard(node.domain):
            return self._concat_verdict()
        by_kind = {
            "a": self._arithmetic_verdict,
            "e": self._arithmetic_verdict,
            "f": self._factor_verdict,
            "b": self._bias_verdict,
            "s": self._normalization_verdict,
            "o": self._normalization_verdict,
            "t": self._table_verdict,
            "h": self._state_verdict,
            "m": self._score_verdict,
            "w": self._where_verdict,
            "c": self._setting_verdict,
            "i": self._setting_verdict,
            "v": self._setting_verdict,
        }
        if kind in by_kind:
            return by_kind[kind]()
        if kind in _REASONS:
            return Verdict(kind == "p", f"{_REASONS[kind]} {where}")
        if any(target in self.around.data for target in self.around.bindings.get(use.value, ())):
            return self._state_verdict()
        operand = f"operand {use.index} of {where}"
        if standard(node.domain) not in ("", "com.microsoft") and self.array.size > 1:
            return Verdict(True, f"{operand}, an operator of another domain")
        doubtful = self.array.size > (1 if not self.counted else _LARGE)
        return Verdict(False, f"{operand}, which takes no weights", doubtful)

    def _ml_verdict(self) -> Verdict:
        names = operator_of(self.node).coefficients
        if 1 <= self.use.index <= len(names):
            name, trains = names[self.use.index - 1]
            return Verdict(trains, f"{name} of {self.where}")
        if self.node.op_type == "ArrayFeatureExtractor" and self.use.index == 0:
            stored = Verdict(False, f"stored data, from which {self.where} selects")
            return stored if self.roles.from_sklearn else self._table_verdict()
        return Verdict(False, f"operand {self.use.index} of {self.where}")

    def _is_ramp(self) -> bool:
        """Return whether probabilities are multiplied by 0, 1, 2, ... or other equal steps."""
        others = [x for i, x in enumerate(self.node.inputs) if i != self.use.index]
        return (
            (self.kind == "f" or self.node.op_type == "Mul")
            and any(x is not None and maker_type(x) == "Softmax" for x in others)
            and evidence.is_ramp(self.array)
        )

    def _factor_verdict(self) -> Verdict:
        array, use, where = self.array, self.use, self.where
        if evidence.is_binary(array) and "Mul" in use.via:
            return Verdict(False, f"mask of a factor of {where}")
        if evidence.is_same_filter(array):
            return Verdict(False, f"the same filter for all channels of {where}")
        if use.via & WAVES:
            return self._stay_verdict("a table of sines and cosines is computed from it")
        if self.around.makes_waves(self.node):
            why = f"frequencies: sines and cosines of the result of {where}"
            return Verdict(False, why, self.may_be_learned)
        if self.early and evidence.is_transform(array):
            return Verdict(False, f"a fixed transform of an input: {where}")
        if use.at_positions and not self.moved and array.size == 1:
            return self._position_verdict()
        if array.size == 1 and use.via & ARITHMETIC:
            return Verdict(False, f"a single number in the formula of a factor of {where}")
        return Verdict(True, f"factor of {where}")

    def _bias_verdict(self) -> Verdict:
        if self.array.size == 1 and "Expand" in self.use.via:
            return Verdict(False, f"one number for all features of {self.where}")
        if any(x in self.around.fixed for x in self.node.inputs):
            return Verdict(False, f"bias of a fixed transform: {self.where}")
        return Verdict(True, f"bias of {self.where}")

    def _position_verdict(self) -> Verdict:
        why = f"it only combines with computed positions before {self.where}"
        return Verdict(False, why, self.may_be_learned and self.array.size > 1)

    def _normalization_verdict(self) -> Verdict:
        node, array, scales = self.node, self.array, self.kind == "s"
        unit = evidence.is_all(array, float(scales))
        follows = node.op_type == "InstanceNormalization" and self.around.scaled_again(node)
        if unit and (follows or (self.counted and not evidence.noted_kind(node))):
            return Verdict(False, f"the {array.ravel()[0]:g} of {self.where} without weights")
        return Verdict(True, f"{'scale' if scales else 'bias'} of {self.where}")

    def _table_verdict(self) -> Verdict:
        node, array, around = self.node, self.array, self.around
        if evidence.is_wave(array):
            return self._stay_verdict("table of sines and cosines at positions")
        indices = node.inputs[1]
        if around.stored.most_scales_of(node.outputs[0]) >= max(array.size, 1):
            return self._stay_verdict("scales of stored integers", certain=True)
        nearest = indices is not None and maker_type(indices) == "TopK"
        if nearest and indices not in around.weighted:
            return Verdict(False, f"stored data of which {self.where} gathers the nearest")
        if around.reaches_softmax(node.outputs[0]) and evidence.is_mask(array):
            return Verdict(False, f"mask of which {self.where} gathers rows")
        return Verdict(True, f"table of {self.where}")

    def _concat_verdict(self) -> Verdict:
        array, use = self.array, self.use
        if array.size == 1 or (evidence.is_all(array) and self.counted):
            return self._stay_verdict("a fixed value concatenated with data")
        if evidence.is_wave(array) or evidence.is_mask(array):
            return self._stay_verdict("a fixed table concatenated with data")
        if use.at_positions and not use.via <= MOVES_OR_JOINS | {"Add"}:
            return self._position_verdict()
        if not self.leads_to_weights:
            return self._stay_verdict("concatenated with results of the last weights")
        return self._train_verdict("learned rows (a class token, queries) concatenated with data")

    def _setting_verdict(self) -> Verdict:
        several = self.array.size != 1
        if self.node.op_type == "Pow" and self.use.index == 1:
            doubtful = self.may_be_learned and (self.roles.from_torch or several)
            return Verdict(False, f"exponent of {self.where}", doubtful)
        doubtful = self.may_be_learned and several and self.kind == "v"
        return Verdict(False, f"bound, size or other setting of {self.where}", doubtful)

    def _state_verdict(self) -> Verdict:
        same = evidence.is_all(self.array, None if self.counted else 0.0)
        if self.array.size == 1 or same:
            return Verdict(False, f"fixed initial state of {self.where}")
        return Verdict(True, f"learned initial state of {self.where}")

    def _score_verdict(self) -> Verdict:
        if evidence.is_mask(self.array):
            return self._stay_verdict("mask: added before a Softmax")
        if evidence.is_all(self.array):
            return self._stay_verdict("one number added before a Softmax")
        if evidence.is_linear(self.array):
            return self._stay_verdict("distances: added before a Softmax")
        return self._train_verdict("bias of the scores of attention")

    def _where_verdict(self) -> Verdict:
        array, fixed = self.array, evidence.is_all(self.array) and self.counted
        masked = self.moved and self.around.reaches_softmax(self.node.outputs[0])
        if array.size > 1 and self.use.at_positions and masked:
            return self._score_verdict()  # a bias by distance, -inf at padding
        if array.size == 1 or fixed or evidence.is_mask(array) or self.use.at_positions:
            return Verdict(False, f"a fixed value or mask of {self.where}")
        return Verdict(True, f"learned values that {self.where} chooses (a mask token)")

    # -- sums and products, element by element ------------------------------------------------

    def _arithmetic_verdict(self) -> Verdict:
        """Return the verdict on an operand of a sum, a product, or their kin."""
        node, use, array, adds, around = self.node, self.use, self.array, self.adds, self.around
        other = next(x for i, x in enumerate(node.inputs) if i != use.index and x in around.data)
        product = around.product_without_bias(other) if adds and self.moved else None
        if product is not None and self._is_bias(product):
            return self._train_verdict(f"bias behind {product.op_type}")
        if around.is_quantized(node):
            return Verdict(False, f"{QUANTIZED} {self.where}")
        if not adds and around.is_rounded(node):
            return self._stay_verdict("scale of numbers that are rounded")
        if around.is_normalized(other, adds):
            unit = evidence.is_all(array, 0.0 if adds else 1.0)
            if unit and self.counted and not evidence.noted_kind(node):
                return self._stay_verdict("a fixed number of a normalization")
            if array.size > 1 or evidence.sounds_affine(self.name):
                return self._train_verdict(f"{'bias' if adds else 'scale'} of a normalization")
        if array.size == 1:
            return self._scalar_verdict()
        if use.via & WAVES or (around.makes_waves(node) and not adds):
            return self._stay_verdict("frequencies of sines and cosines")
        if evidence.is_binary(array):
            return self._stay_verdict("mask of zeros and ones")
        if adds and (evidence.is_mask(array) or around.reaches_softmax(node.outputs[0])):
            masked = "Gather" in use.via and use.via & ARITHMETIC <= {"Add"}  # added to a mask
            computed = use.at_positions and use.via & ARITHMETIC and not masked
            return self._position_verdict() if computed else self._score_verdict()
        if use.at_positions and not use.via <= MOVES_OR_JOINS and "MatMul" not in use.via:
            return self._position_verdict()
        if evidence.is_wave(array) or (not adds and evidence.is_cosine(array)):
            return self._stay_verdict("table of sines and cosines")
        if not adds and use.at_positions:
            return self._stay_verdict("table at computed positions that multiplies")
        return self._neighbor_verdict()

    def _is_bias(self, product: ir.Node) -> bool:
        """Return whether an array added to a product has one number for each feature."""
        shape = self.array.shape
        if not shape or sum(n > 1 for n in shape) > 1:
            return False
        several = self.array.size > 1
        return several or has_one_feature(product) or evidence.sounds_affine(self.name)

    def _neighbor_verdict(self) -> Verdict:
        """Return the verdict that follows from weights before and after the node."""
        node, early, said = self.node, self.early, evidence.noted_kind(self.node)
        wide = sum(n > 1 for n in self.array.shape) > 1
        verb = "added to" if self.adds else "a factor of"
        if self.leads_to_weights:
            if not early:
                return self._train_verdict(f"{verb} a result of weights")
            if node.op_type == "Add" and wide:
                return self._train_verdict("table of positions, added to an input")
        elif not early and (said or (said is None and evidence.sounds_affine(self.name))):
            return self._train_verdict(f"{verb} a result of the last weights")
        if early and node.op_type == "Sub" and wide:
            return self._stay_verdict("stored rows that an input is compared with")
        if early and (self.leads_to_weights or self.counted):
            scores = not self.counted and self.around.reaches_softmax(node.outputs[0])
            return self._stay_verdict(f"{verb} an input before any weight", scores)
        if early:
            return self._train_verdict(f"{verb} an input that no other weight is applied to")
        doubtful = self.array.size > _LARGE or (said is None and self.may_be_learned)
        return self._stay_verdict(f"{verb} a result of the last weights: anchors, units", doubtful)

    def _scalar_verdict(self) -> Verdict:
        """Return the verdict for a scalar, which may be learned, such as a temperature."""
        node, array, sounds = self.node, self.array, evidence.sounds_learned(self.name)
        if self.counted and not sounds:
            return self._stay_verdict("a single number in a formula")
        if self.roles.from_sklearn and not self.adds:  # as the weight of a vote
            return self._stay_verdict("a single factor, which no scikit-learn model learns")
        if self.early and not self.leads_to_weights and (array.ndim or sounds):
            return self._train_verdict(
                "a single number that is applied to an input, without other weights", True
            )
        if self.early:
            return self._stay_verdict("a single number before any weight")
        said = evidence.noted_kind(node)
        if said is None:
            root = float(np.abs(array.astype(np.float64)).max()) ** -2 if array.all() else 0.0
            fixed = any(abs(n - round(n)) < 1e-4 * n and n > 1.5 for n in (root, root and 1 / root))
            if fixed and not self.adds and self.around.reaches_softmax(node.outputs[0]):
                return self._stay_verdict("scale of attention before a Softmax")
        if said is False or (said is None and not sounds):
            told = said is not None or evidence.sounds_fixed(self.name)
            return self._stay_verdict(
                "a single number in a formula", self.roles.from_torch and not told
            )
        return self._train_verdict("a learned scalar: a single number between weights", True)


def _is_part_of_distance(node: ir.Node) -> bool:
    """Return whether the product is a part of |x - s|^2 = |x|^2 - 2 x sT + |s|^2."""
    return node.op_type == "Gemm" and node.attributes.get_float("alpha", 1.0) == -2.0


def judge(proto: ModelProto) -> tuple[ir.Graph, Tensors]:
    """Return the graph of `proto`, functions inlined, and its float constants in their order."""
    inner = to_ir(inlined(external.without_data(proto), lifted=True))
    external.with_data(inner, proto)
    close_defaults(inner)
    values = inner.graph.initializers
    stated = evidence.stated_kinds(proto.graph)
    buffers = [values[n] for n, parameter in stated.items() if not parameter and n in values]
    roles = Roles(inner.graph, proto.producer_name, buffers)
    noted, data = constants.noted(proto), unsized_defaults(proto)
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
                verdict = Verdict(False, "no node reads it")
            else:
                by_role = roles.judge(ref.name, value, array)
                verdict = _verdict_of_exporter(by_role, array, stated.get(ref.name))
            of_role = verdict.trains, verdict.why, verdict.doubtful
            rows.append(Tensor(ref.name, array.shape, str(array.dtype), array.size, *of_role))
    return inner.graph, rows


def _verdict_of_exporter(verdict: Verdict, array: np.ndarray, parameter: bool | None) -> Verdict:
    """Return the verdict of the role, or of the exporter if it states the kind of the tensor."""
    if parameter is False and verdict.trains:
        return Verdict(False, f"a buffer, as its exporter states ({verdict.why})")
    if parameter and not verdict.trains and not verdict.certain and np.isfinite(array).all():
        why = f"a parameter, as its exporter states ({verdict.why})"
        return Verdict(True, why, array.size == 1)
    if parameter is False:
        return Verdict(False, verdict.why)
    return verdict
