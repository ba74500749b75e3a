"""The roles that constants play in a graph: which of them are weights, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.model.constants import ML_COEFFICIENTS
from onnxgrad.training.parameters import evidence
from onnxgrad.training.parameters.operands import MOVES, domain, letter, unmoved
from onnxgrad.training.parameters.surroundings import (
    ARITHMETIC,
    FACTORS,
    WAVES,
    Surroundings,
    Use,
    has_one_feature,
    origin,
)

QUANTIZED = "scale or zero point of the quantized"
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
        while transforms := set(self._transforms()) - self.around.fixed:  # one may follow another
            self.around.fix(transforms)

    def _transforms(self) -> Iterator[ir.Value]:
        """Yield the factors of products before any weight that are fixed transforms."""
        around = self.around
        for node in around.nodes:
            if not around.product(node) or any(x in around.weighted for x in node.inputs if x):
                continue
            for i, x in enumerate(node.inputs):
                if x is not None and x not in around.data and letter(node, i) == "f":
                    tensor = unmoved(x).const_value
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
        uses = list(self.around.uses(constant))
        verdicts = [self._of_pipeline(name, use, self._judge(name, use, array)) for use in uses]
        learned = next((v for v in verdicts if v.trains), None)
        if learned is None:
            unused = Verdict(False, "no node combines it with data")
            return next((v for v in verdicts if v.doubtful), [*verdicts, unused][0])
        if not np.isfinite(array).all():
            return Verdict(False, f"it holds infinite or undefined numbers ({learned.why})")
        statistic = [use.node for use in uses if letter(use.node, use.index) == "r"]
        if statistic and evidence.sounds_statistic(name):
            return Verdict(False, f"running statistic of {_named(statistic[0])}")
        if statistic:
            why = f"{learned.why}, stored once with a running statistic, which moves with it"
            return Verdict(True, why, True)
        return learned

    def _of_pipeline(self, name: str, use: Use, verdict: Verdict) -> Verdict:
        """Return the verdict, but that of a transformer of scikit-learn in front of a model.

        The layers of its models have a bias, or are operators of `ai.onnx.ml`; projections (PCA),
        stored rows of kernels, tables of quantiles and imputed values are parts of transformers.
        """
        node, around = use.node, self.around
        if self.from_sklearn and evidence.of_naive_bayes(name):
            return Verdict(True, f"parameter of a naive Bayes classifier ({_named(node)})")
        if not (verdict.trains and self.from_sklearn) or _is_model(node):
            return verdict
        other = node.inputs[1 - use.index] if node.op_type == "Add" else None
        added_to = None if other is None else around.unbiased(other)
        layer = node if letter(node, use.index) == "f" else added_to
        if (layer is not None and around.has_bias(layer)) or not around.leads_to_model(node):
            return verdict
        return Verdict(False, f"of a transformer in front of a model ({verdict.why})")

    def _judge(self, name: str, use: Use, array: np.ndarray) -> Verdict:
        node, kind, where = use.node, letter(use.node, use.index), _named(use.node)
        if use.integers >= max(array.size, 1):
            return Verdict(False, f"scale or zero point of stored integers ({where})", certain=True)
        if self._is_ramp(use, array):
            why = f"numbers of classes, of which {where} computes the expected one"
            return Verdict(False, why, certain=True)
        if node.op_type == "ArrayFeatureExtractor" and use.index == 0 and not self.from_sklearn:
            return self._table(use, array, where)
        if domain(node) == "ai.onnx.ml":
            return _of_ml(node, use.index, where)
        if node.op_type == "CDist" or (kind == "f" and _of_distances(node)):
            return Verdict(False, f"stored rows, of which {where} computes distances")
        if kind == "a" or (domain(node) == "" and node.op_type in ARITHMETIC):
            return self._arithmetic(name, use, array, where)
        if domain(node) == "" and node.op_type == "Concat":
            return self._joined(name, use, array, where)
        match kind:
            case "f":
                return self._factor(name, use, array, where)
            case "b" if array.size == 1 and "Expand" in use.via:
                return Verdict(False, f"one number for all features of {where}")
            case "b" if any(x in self.around.fixed for x in node.inputs):
                return Verdict(False, f"bias of a fixed transform: {where}")
            case "b":
                return Verdict(True, f"bias of {where}")
            case "s" | "o":
                return self._normalization(name, use, array, where, kind)
            case "r":
                return Verdict(False, f"running statistic of {where}")
            case "t":
                return self._table(use, array, where)
            case "p":
                return Verdict(True, f"slope of {where}")
            case "h":
                return _state(name, array, where)
            case "m":
                return _added_to_scores(array, where)
            case "w":
                return _chosen(name, use, array, where)
            case "k":
                return Verdict(False, f"rotary table of {where}")
            case "q":
                return Verdict(False, f"{QUANTIZED} {where}")
            case "c":
                return self._setting(name, use, array, where)
        if any(target in self.around.data for target in self.around.bindings.get(use.value, ())):
            return _state(name, array, where)
        operand = f"operand {use.index} of {where}"
        if domain(node) not in ("", "com.microsoft") and array.size > 1:
            return Verdict(True, f"{operand}, an operator of another domain")
        return Verdict(False, f"{operand}, which takes no weights", array.size > _LARGE)

    def _is_ramp(self, use: Use, array: np.ndarray) -> bool:
        """Return whether probabilities are multiplied by 0, 1, 2, ... or other equal steps."""
        others = [x for i, x in enumerate(use.node.inputs) if i != use.index and x is not None]
        return (
            (letter(use.node, use.index) == "f" or use.node.op_type == "Mul")
            and any(origin(x) == "Softmax" for x in others)
            and evidence.is_ramp(array)
        )

    def _factor(self, name: str, use: Use, array: np.ndarray, where: str) -> Verdict:
        data = [x for x in use.node.inputs if x in self.around.data]
        early = not any(x in self.around.weighted for x in data)
        if evidence.is_binary(array) and "Mul" in use.via:
            return Verdict(False, f"mask of a factor of {where}")
        if evidence.is_same_filter(array):
            return Verdict(False, f"the same filter for all channels of {where}")
        if use.via & WAVES:
            return Verdict(False, f"a table of sines and cosines is computed from it ({where})")
        if self.around.makes_waves(use.node):
            doubtful = not (evidence.counted(name) or evidence.sounds_fixed(name))
            why = f"frequencies: sines and cosines of the result of {where}"
            return Verdict(False, why, doubtful)
        if early and evidence.is_transform(array):
            return Verdict(False, f"a fixed transform of an input: {where}")
        if use.at_positions and not use.via <= MOVES and array.size == 1:
            return Verdict(False, f"it only combines with computed positions before {where}")
        if array.size == 1 and use.via & ARITHMETIC:
            return Verdict(False, f"a single number in the formula of a factor of {where}")
        return Verdict(True, f"factor of {where}")

    def _normalization(
        self, name: str, use: Use, array: np.ndarray, where: str, kind: str
    ) -> Verdict:
        unit = evidence.is_all(array, 1.0 if kind == "s" else 0.0)
        follows = use.node.op_type == "InstanceNormalization" and self.around.scaled_again(use.node)
        if unit and (follows or (evidence.counted(name) and not evidence.noted_kind(use.node))):
            return Verdict(False, f"the {array.ravel()[0]:g} of {where} without weights")
        return Verdict(True, f"{'scale' if kind == 's' else 'bias'} of {where}")

    def _table(self, use: Use, array: np.ndarray, where: str) -> Verdict:
        if evidence.is_wave(array):
            return Verdict(False, f"table of sines and cosines at positions ({where})")
        indices, around = use.node.inputs[1], self.around
        if around.stored.scaled_by(use.node.outputs[0]) >= max(array.size, 1):
            return Verdict(False, f"scales of stored integers ({where})", certain=True)
        nearest = indices is not None and origin(indices) == "TopK"
        if nearest and indices not in around.weighted:
            return Verdict(False, f"stored data of which {where} gathers the nearest")
        if around.reaches_softmax(use.node.outputs[0]) and evidence.is_mask(array):
            return Verdict(False, f"mask of which {where} gathers rows")
        return Verdict(True, f"table of {where}")

    def _joined(self, name: str, use: Use, array: np.ndarray, where: str) -> Verdict:
        if array.size == 1 or (evidence.is_all(array) and evidence.counted(name)):
            return Verdict(False, f"a fixed value concatenated with data ({where})")
        if evidence.is_wave(array) or evidence.is_mask(array):
            return Verdict(False, f"a fixed table concatenated with data ({where})")
        if use.at_positions and not use.via <= MOVES | {"Concat", "Add"}:
            return Verdict(False, f"it only combines with computed positions before {where}")
        if use.node.outputs[0] not in self.around.hidden:
            return Verdict(False, f"concatenated with results of the last weights ({where})")
        return Verdict(
            True, f"learned rows (a class token, queries) concatenated with data ({where})"
        )

    def _setting(self, name: str, use: Use, array: np.ndarray, where: str) -> Verdict:
        if use.node.op_type != "Pow" or use.index != 1:
            return Verdict(False, f"bound, size or other setting of {where}")
        doubtful = array.size == 1 and self.from_torch and not evidence.counted(name)
        return Verdict(False, f"exponent of {where}", doubtful)

    # -- sums and products, element by element ------------------------------------------------

    def _arithmetic(self, name: str, use: Use, array: np.ndarray, where: str) -> Verdict:
        node, adds = use.node, use.node.op_type not in FACTORS
        other = next(
            x for i, x in enumerate(node.inputs) if i != use.index and x in self.around.data
        )
        product = self.around.unbiased(other) if adds and use.via <= MOVES else None
        if product is not None and self._is_bias(name, array, product):
            return Verdict(True, f"bias behind {product.op_type} ({where})")
        if self.around.is_quantized(node):
            return Verdict(False, f"{QUANTIZED} {where}")
        if not adds and self.around.is_rounded(node):
            return Verdict(False, f"scale of numbers that are rounded ({where})")
        if self.around.is_normalized(other, adds):
            unit = evidence.is_all(array, 0.0 if adds else 1.0)
            if unit and evidence.counted(name) and not evidence.noted_kind(node):
                return Verdict(False, f"a fixed number of a normalization ({where})")
            if array.size > 1 or evidence.sounds_affine(name):
                return Verdict(True, f"{'bias' if adds else 'scale'} of a normalization ({where})")
        if array.size == 1:
            return self._single(name, use, array, where)
        if use.via & WAVES or (self.around.makes_waves(node) and not adds):
            return Verdict(False, f"frequencies of sines and cosines ({where})")
        if evidence.is_binary(array):
            return Verdict(False, f"mask of zeros and ones ({where})")
        if adds and (evidence.is_mask(array) or self.around.reaches_softmax(node.outputs[0])):
            return self._scores(use, array, where)
        if use.at_positions and not use.via <= MOVES | {"Concat"} and "MatMul" not in use.via:
            return Verdict(False, f"it only combines with computed positions before {where}")
        if evidence.is_wave(array) or (not adds and evidence.is_cosine(array)):
            return Verdict(False, f"table of sines and cosines ({where})")
        if not adds and use.at_positions:
            return Verdict(False, f"table at computed positions that multiplies ({where})")
        return self._by_neighbours(name, use, array, where)

    @staticmethod
    def _is_bias(name: str, array: np.ndarray, product: ir.Node) -> bool:
        """Return whether what is added to a product has one number for each of its features."""
        if not array.ndim or sum(n > 1 for n in array.shape) > 1:
            return False
        return array.size > 1 or has_one_feature(product) or evidence.sounds_affine(name)

    def _by_neighbours(self, name: str, use: Use, array: np.ndarray, where: str) -> Verdict:
        """Return the verdict that follows from weights before and after the node."""
        node, around, said = use.node, self.around, evidence.noted_kind(use.node)
        wide = sum(n > 1 for n in array.shape)
        adds = node.op_type not in FACTORS
        verb = "added to" if adds else "a factor of"
        early = not any(x in around.weighted for x in node.inputs if x is not None)
        if node.outputs[0] in around.hidden:
            if not early:
                return Verdict(True, f"{verb} a result of weights ({where})")
            if node.op_type == "Add" and wide > 1:
                return Verdict(True, f"table of positions, added to an input ({where})")
        elif not early and (said or (said is None and evidence.sounds_affine(name))):
            return Verdict(True, f"{verb} a result of the last weights ({where})")
        if early and node.op_type == "Sub" and wide > 1:
            return Verdict(False, f"stored rows that an input is compared with ({where})")
        if early and (node.outputs[0] in around.hidden or evidence.counted(name)):
            return Verdict(False, f"{verb} an input before any weight ({where})")
        if early:
            return Verdict(True, f"{verb} an input that no other weight is applied to ({where})")
        why = f"{verb} a result of the last weights: anchors, units ({where})"
        told = said is not None or evidence.counted(name) or evidence.sounds_fixed(name)
        return Verdict(False, why, array.size > _LARGE or not told)

    def _scores(self, use: Use, array: np.ndarray, where: str) -> Verdict:
        if use.at_positions and use.via & ARITHMETIC:
            return Verdict(False, f"it only combines with computed positions before {where}")
        return _added_to_scores(array, where)

    def _single(self, name: str, use: Use, array: np.ndarray, where: str) -> Verdict:
        """Return the verdict for a scalar, which may be learned, such as a temperature."""
        node = use.node
        sounds = evidence.sounds_learned(name)
        if evidence.counted(name) and not sounds:
            return Verdict(False, f"a single number in a formula ({where})")
        if self.from_sklearn and node.op_type in FACTORS:  # as the weight of a vote
            return Verdict(False, f"a single factor, which no scikit-learn model learns ({where})")
        if not any(x in self.around.weighted for x in node.inputs if x is not None):
            alone = node.outputs[0] not in self.around.hidden and (array.ndim or sounds)
            why = (
                "that is applied to an input, without other weights"
                if alone
                else "before any weight"
            )
            return Verdict(bool(alone), f"a single number {why} ({where})", bool(alone))
        said = evidence.noted_kind(node)
        if said is None:
            root = float(np.abs(array.astype(np.float64)).max()) ** -2 if array.all() else 0.0
            fixed = any(abs(n - round(n)) < 1e-4 * n and n > 1.5 for n in (root, root and 1 / root))
            if fixed and node.op_type in FACTORS and self.around.reaches_softmax(node.outputs[0]):
                return Verdict(False, f"scale of attention before a Softmax ({where})")
        if said is False or (said is None and not sounds):
            doubtful = said is None and self.from_torch and not evidence.sounds_fixed(name)
            return Verdict(False, f"a single number in a formula ({where})", doubtful)
        return Verdict(True, f"a learned scalar: a single number between weights ({where})", True)


def _named(node: ir.Node) -> str:
    return f"{node.op_type} {node.name!r}" if node.name else node.op_type


def _is_model(node: ir.Node) -> bool:
    return domain(node) == "ai.onnx.ml" and node.op_type in ML_COEFFICIENTS


def _of_distances(node: ir.Node) -> bool:
    """Return whether the product is a part of |x - s|^2 = |x|^2 - 2 x sT + |s|^2."""
    return node.op_type == "Gemm" and node.attributes.get_float("alpha", 1.0) == -2.0


def _of_ml(node: ir.Node, index: int, where: str) -> Verdict:
    names = list(ML_COEFFICIENTS.get(node.op_type, {}).items())
    if not 1 <= index <= len(names):
        stored = node.op_type == "ArrayFeatureExtractor" and index == 0
        return Verdict(
            False,
            f"stored data, from which {where} selects" if stored else f"operand {index} of {where}",
        )
    name, trains = names[index - 1]
    return Verdict(trains, f"{name} of {where}")


def _state(name: str, array: np.ndarray, where: str) -> Verdict:
    if (
        array.size == 1
        or evidence.is_all(array, 0.0)
        or (evidence.is_all(array) and evidence.counted(name))
    ):
        return Verdict(False, f"fixed initial state of {where}")
    return Verdict(True, f"learned initial state of {where}")


def _added_to_scores(array: np.ndarray, where: str) -> Verdict:
    if evidence.is_mask(array):
        return Verdict(False, f"mask: added before a Softmax ({where})")
    if evidence.is_all(array):
        return Verdict(False, f"one number added before a Softmax ({where})")
    if evidence.is_linear(array):
        return Verdict(False, f"distances: added before a Softmax ({where})")
    return Verdict(True, f"bias of the scores of attention ({where})")


def _chosen(name: str, use: Use, array: np.ndarray, where: str) -> Verdict:
    fixed = evidence.is_all(array) and evidence.counted(name)
    if array.size == 1 or fixed or evidence.is_mask(array) or use.at_positions:
        return Verdict(False, f"a fixed value or mask of {where}")
    return Verdict(True, f"learned values that {where} chooses (a mask token)")
