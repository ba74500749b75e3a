"""The names that quantizers give to integers, and those of the floats that they stand for."""

from __future__ import annotations

import re

# what quantizers of onnxruntime append; quantize_dynamic transposes some weights of Gemm before
_SUFFIXES = re.compile(
    r"(_Transposed(_\d+)?)?(_DQ)?_(quantized(_\d+)?|QuantizeLinear_Output|[QU]\d+\w*)$"
)


def name_of_floats(name: str) -> str:
    """Return what quantized integers were called as floats, or `name` if no quantizer renamed them.

    >>> name_of_floats("query.weight_quantized"), name_of_floats("attn.q_proj.MatMul.weight_Q4")
    ('query.weight', 'attn.q_proj.MatMul.weight')
    >>> name_of_floats("fc.weight_Transposed_quantized")  # of a Gemm, by quantize_dynamic
    'fc.weight'
    """
    return _SUFFIXES.sub("", name)
