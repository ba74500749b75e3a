"""Operators whose gradient is zero or does not exist, each with the reason."""

from __future__ import annotations

from onnxgrad.autodiff.registry import constant
from onnxgrad.graph.operators import BOOLEAN, RANDOM

constant(
    dict.fromkeys(
        "Ceil Floor Round Sign Hardmax".split(), "piecewise constant: zero almost everywhere"
    )
    | dict.fromkeys(sorted(BOOLEAN), "the output is boolean")
    | dict.fromkeys("ArgMax ArgMin NonZero NonMaxSuppression".split(), "the output is an index")
    | dict.fromkeys(
        "QuantizeLinear QLinearConv QLinearMatMul ConvInteger MatMulInteger".split(),
        "the output is an integer; to pass a gradient, name the output in `straight_through`",
    )
    | dict.fromkeys(
        "BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor BitCast".split(),
        "works on bits: no useful derivative",
    )
    | dict.fromkeys(
        "Shape Size EyeLike ConstantOfShape SequenceLength OptionalHasElement".split(),
        "depends on the shape of its input only",
    )
    | dict.fromkeys(
        "BlackmanWindow HammingWindow HannWindow MelWeightMatrix Constant SequenceEmpty".split(),
        "a constant: its inputs are lengths and settings",
    )
    | dict.fromkeys(sorted(RANDOM - {"Dropout"}), "random: depends on the shape, or is a draw")
    | dict.fromkeys(
        "StringConcat StringNormalizer StringSplit RegexFullMatch "
        "TfIdfVectorizer ImageDecoder".split(),
        "works on strings or encoded images",
    )
)
constant(
    dict.fromkeys(
        "Binarizer TreeEnsemble TreeEnsembleClassifier TreeEnsembleRegressor".split(),
        "piecewise constant: zero almost everywhere",
    )
    | dict.fromkeys(
        "CategoryMapper LabelEncoder OneHotEncoder".split(),
        "a lookup by equality: zero almost everywhere",
    ),
    domain="ai.onnx.ml",
)
