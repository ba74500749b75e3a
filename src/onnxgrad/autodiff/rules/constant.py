"""Operators whose gradient is zero or does not exist, each with a word why."""

from __future__ import annotations

from onnxgrad.autodiff.rules.registry import constant
from onnxgrad.graph.operators import BOOLEAN, RANDOM

constant(
    dict.fromkeys(
        "Ceil Floor Round Sign Hardmax".split(), "piecewise constant: zero almost everywhere"
    )
    | dict.fromkeys(sorted(BOOLEAN), "the output is boolean")
    | dict.fromkeys("ArgMax ArgMin NonZero NonMaxSuppression".split(), "the output is an index")
    | dict.fromkeys(
        "QuantizeLinear QLinearConv QLinearMatMul ConvInteger MatMulInteger".split(),
        "the output is an integer; QuantizeLinear can be passed straight through, by name",
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
        "a constant: its operands are lengths and settings",
    )
    | dict.fromkeys(sorted(RANDOM - {"Dropout"}), "random: depends on the shape or on a draw only")
    | dict.fromkeys(
        "StringConcat StringNormalizer StringSplit RegexFullMatch "
        "TfIdfVectorizer ImageDecoder".split(),
        "works on texts or images",
    )
)
constant(
    dict.fromkeys(
        "Binarizer TreeEnsemble TreeEnsembleClassifier TreeEnsembleRegressor".split(),
        "piecewise constant: zero almost everywhere",
    )
    | dict.fromkeys(
        "CategoryMapper LabelEncoder OneHotEncoder".split(),
        "a table of equal keys: zero almost everywhere",
    ),
    domain="ai.onnx.ml",
)
