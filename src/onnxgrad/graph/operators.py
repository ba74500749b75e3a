"""One record for each operator: what it does, and what becomes of its nodes in a gradient.

The traits of standard operators stand in one table below. Rules and lowerings fill in the rest
where they are defined, `axes` does so for axes, `autodiff/members` for members of a stack, and
`autodiff/user_rules` for users.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import onnx_ir as ir


class Naming(NamedTuple):
    """How an operator names axes of its first operand; an Unsqueeze, of its output.

    Attributes:
        attribute: it holds them.
        operand: the index of the operand that holds them, if there is no such attribute.
        default: what is named if both are missing or empty, from the rank, the inputs and the
            attributes; None if that is not known.
    """

    attribute: str
    operand: int | None = None
    default: Callable[[int, Sequence, Mapping], Sequence[int] | None] = lambda *_: None


@dataclass(frozen=True)
class Operator:
    """What is known of an operator; nothing where a field has its default.

    Attributes:
        traits: see below; empty for operators of other domains.
        rule: writes the gradients of the inputs: (op, node, cotangents) -> one for each input.
        subgraph_rule: the same with captured values: (op, node, list of cotangents, values that
            depend on what is differentiated) -> pairs of a value and its gradient.
        no_gradient: why it has none; no path goes through its nodes.
        lowering: rewrites a node before the sweep: (op, node) -> values, or None to leave it.
        on_demand: the lowering is for the sweep, which applies it to nodes with a cotangent, as it
            slows down the forward pass.
        of_user: whether a user registered its rule or lowering.
        naming: how it names axes.
        axes: where axes of its operands stand in its outputs: see `graph/axes`.
        members: writes a node for all members of a stack: see `autodiff/members`.
    """

    traits: frozenset[str] = frozenset()
    rule: Callable[..., Any] | None = None
    subgraph_rule: Callable[..., list[tuple[ir.Value, ir.Value]]] | None = None
    no_gradient: str = ""
    lowering: Callable[..., Any] | None = None
    on_demand: bool = False
    of_user: bool = False
    naming: Naming | None = None
    axes: Callable[..., Any] | None = None
    members: Callable[..., list[ir.Value] | None] | None = None

    @property
    def is_covered(self) -> bool:
        """Whether the sweep, or a lowering before it, knows what to do."""
        return bool(self.rule or self.subgraph_rule or self.no_gradient or self.lowering)


OPERATORS: dict[tuple[str, str], Operator] = {}  # by domain and name
_UNKNOWN = Operator()


def operator_of(node: ir.Node) -> Operator:
    """Return the record of the operator of `node`."""
    return OPERATORS.get((node.domain, node.op_type), _UNKNOWN)


def add(domain: str, name: str, **fields: Any) -> None:
    """Set fields of the record of an operator."""
    OPERATORS[domain, name] = replace(OPERATORS.get((domain, name), _UNKNOWN), **fields)


# elementwise     an element of the result depends on those at its position only; operands broadcast
# unary           the result has the shape of the first operand, which the others do not change
# cheap           one pass over memory, without a transcendental function
# transcendental  computes exp, log, powers or the like for every element
# normalizes      two passes over memory: one for means, one that divides by deviations
# view            the elements of the first operand in their order, in another shape or none
# reorders        every element of the operand is one of the result
# selects         every element of the result is one of the first operand
# packs           the elements of tensors in sequences, or out of them
# shape           reads the shape of its operand only, or makes a tensor of a shape
# arithmetic      what sizes and positions are computed with
# random          two equal nodes give two results
# boolean, int64  the dtype of the result, whatever the operands are
_TRAITS = {
    "Add Div Max Min Mul Neg Sub": "elementwise cheap arithmetic",
    "Ceil Floor Round": "elementwise cheap arithmetic",
    "Abs Mean Mod Reciprocal Relu Sign Sqrt Sum Where": "elementwise cheap",
    "BitwiseAnd BitwiseNot BitwiseOr BitwiseXor": "elementwise cheap",
    "And Equal Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Not Or Xor": (
        "elementwise cheap boolean"
    ),
    "Clip HardSigmoid HardSwish LeakyRelu PRelu Shrink ThresholdedRelu": "elementwise unary cheap",
    "CastLike": "elementwise unary cheap",
    "Cast": "elementwise cheap reorders",
    "Identity": "elementwise view cheap reorders",
    "Acos Acosh Asin Asinh Atan Atanh Cos Cosh Mish Sin Sinh Swish Tan": (
        "elementwise transcendental"
    ),
    "Erf Exp Gelu Log Pow Sigmoid Softplus Tanh": "elementwise transcendental",
    "Celu Elu Selu Softsign": "elementwise unary transcendental",
    "LogSoftmax Softmax": "unary transcendental",
    "BatchNormalization GroupNormalization InstanceNormalization LayerNormalization": (
        "unary normalizes"
    ),
    "RMSNormalization": "normalizes",
    "CumProd CumSum": "unary",
    "Dropout": "unary random",
    "Flatten Reshape Squeeze Unsqueeze": "view cheap reorders",
    "Concat Expand Tile Transpose": "cheap reorders",
    "DepthToSpace SpaceToDepth": "cheap reorders",
    "ReverseSequence": "reorders",
    "Gather Slice Split": "cheap selects",
    "Compress GatherElements GatherND": "selects",
    "OneHot Pad Trilu": "cheap",
    "Range": "cheap arithmetic",
    "ConcatFromSequence SequenceAt SequenceConstruct SplitToSequence": "packs",
    "Shape Size": "view cheap shape int64",
    "ConstantOfShape EyeLike": "cheap shape",
    "SequenceLength": "shape int64",
    "SequenceEmpty": "shape",
    "ArgMax ArgMin NonMaxSuppression NonZero": "int64",
    "Bernoulli Multinomial": "random",
    "RandomNormal RandomNormalLike RandomUniform RandomUniformLike": "random",
}


for _names, _traits in _TRAITS.items():
    for _name in _names.split():
        add("", _name, traits=frozenset(_traits.split()))


def _having(trait: str) -> frozenset[str]:
    return frozenset(name for (_, name), operator in OPERATORS.items() if trait in operator.traits)


ELEMENTWISE = _having("elementwise")
UNARY = _having("unary")
CHEAP = _having("cheap")
TRANSCENDENTAL = _having("transcendental")
VIEWS = _having("view")
REORDERS = _having("reorders")
SELECTS = _having("selects")
PACKS = _having("packs")
OF_SHAPES = _having("shape")
ARITHMETIC = _having("arithmetic")
RANDOM = _having("random")
BOOLEAN = _having("boolean")
INT64 = _having("int64")

# metadata keys that lowerings write: of the scores -z and z of two classes, and of scores that are
# not those of the classes, with the reason
OPPOSITE, NOT_CLASSES = "onnxgrad.opposite", "onnxgrad.not_classes"

# metadata keys that lowerings write, of conditions (queries, keys) that are false for keys so far
# before, or so far behind, the position of the query
FIRST_KEY, LAST_KEY = "onnxgrad.first_key", "onnxgrad.last_key"

# metadata key of a node that computes what a node of another operator would: a function from it to
# what a user's rule of that operator reads
RULED_AS = "onnxgrad.ruled_as"

# metadata key that the sweep writes, of a gradient: node, index of the input, and cotangents
GRADIENT_OF = "onnxgrad.gradient_of"

# metadata keys that cheaper forms of gradients write: of the gradient of a convolution's weight,
# input, cotangent, windows and groups; of the result of a MaxPool, the gradient of its input, and
# the cotangent
WEIGHT_GRADIENT, POOL_GRADIENT = "onnxgrad.weight_gradient", "onnxgrad.pool_gradient"
