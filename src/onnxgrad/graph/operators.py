"""What the standard operators do, as far as the package asks: one table, and sets read from it.

Operators of other domains have no traits.
"""

from __future__ import annotations

# elementwise     an element of the result depends on those at its position only; operands broadcast
# unary           the result has the shape of the first operand, which the others do not change
# cheap           one pass over memory, without a transcendental function
# transcendental  computes exp, log, powers or the like for every element
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
    "BatchNormalization InstanceNormalization LayerNormalization": "unary",
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
    "ArgMax ArgMin NonZero": "int64",
    "Bernoulli Multinomial": "random",
    "RandomNormal RandomNormalLike RandomUniform RandomUniformLike": "random",
}


def _having(trait: str) -> frozenset[str]:
    """Return the operators that have a trait."""
    rows = (operators for operators, traits in _TRAITS.items() if trait in traits.split())
    return frozenset(" ".join(rows).split())


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

# metadata key of the gradient of a convolution's weight: its input, the cotangent of its output,
# its windows and groups
WEIGHT_GRADIENT = "onnxgrad.weight_gradient"

# metadata key of the result of a MaxPool: the gradient of its input
POOL_GRADIENT = "onnxgrad.pool_gradient"

# metadata key of the result of a BatchNormalization in training mode: its cotangent, and the
# gradients of its input, scale and bias
NORM_GRADIENT = "onnxgrad.norm_gradient"
