"""Operators whose gradient is zero or does not exist, each with a word why."""

from __future__ import annotations

from onnxgrad.autodiff.rules.registry import constant

constant(
    dict.fromkeys(
        "Ceil Floor Round Sign Hardmax".split(), "piecewise constant: zero almost everywhere"
    )
    | dict.fromkeys(
        "Equal Greater GreaterOrEqual Less LessOrEqual Not And Or Xor IsNaN IsInf".split(),
        "the output is boolean",
    )
    | dict.fromkeys("ArgMax ArgMin NonZero".split(), "the output is an index")
    | dict.fromkeys(
        "Shape Size EyeLike ConstantOfShape".split(), "depends on the shape of its input only"
    )
    | dict.fromkeys(
        "RandomNormalLike RandomUniformLike Bernoulli Multinomial".split(),
        "random: depends on the shape or on a draw only",
    )
)
constant({"Binarizer": "piecewise constant: zero almost everywhere"}, domain="ai.onnx.ml")
