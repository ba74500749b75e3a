"""Operators whose gradient is zero or does not exist, each with the reason."""

from __future__ import annotations

from onnxgrad.autodiff.registry import constant
from onnxgrad.operators import BOOLEAN, RANDOM

constant("the output is boolean", *BOOLEAN)
constant("the output is an index", *"ArgMax ArgMin NonZero NonMaxSuppression".split())
constant("piecewise constant: zero almost everywhere", *"Ceil Floor Round Sign Hardmax".split())
constant(
    "the output is an integer; to pass a gradient, name the output in `straight_through`",
    *"QuantizeLinear QLinearConv QLinearMatMul ConvInteger MatMulInteger".split(),
)
constant(
    "works on bits: no useful derivative",
    *"BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor BitCast".split(),
)
constant(
    "depends on the shape of its input only",
    *"Shape Size EyeLike ConstantOfShape SequenceLength OptionalHasElement".split(),
)
constant(
    "a constant: its inputs are lengths and settings",
    *"BlackmanWindow HammingWindow HannWindow MelWeightMatrix Constant SequenceEmpty".split(),
)
constant("random: depends on the shape, or is a draw", *(RANDOM - {"Dropout"}))
constant(
    "works on strings or encoded images",
    *"StringConcat StringNormalizer StringSplit RegexFullMatch TfIdfVectorizer".split(),
    "ImageDecoder",
)
constant(
    "piecewise constant: zero almost everywhere",
    *"Binarizer TreeEnsemble TreeEnsembleClassifier TreeEnsembleRegressor".split(),
    domain="ai.onnx.ml",
)
constant(
    "a lookup by equality: zero almost everywhere",
    *"CategoryMapper LabelEncoder OneHotEncoder".split(),
    domain="ai.onnx.ml",
)
