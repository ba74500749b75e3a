"""The roles of operands: factors, biases, scales, tables, settings."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.graph.operators import OF_SHAPES, PACKS, REORDERS, SELECTS

# letters for the roles of operands; the last letter of an operator applies to all that follow
LETTERS = {
    "x": "data",
    "a": "added to the data",
    "f": "factor",
    "b": "bias",
    "s": "scale of a normalization",
    "o": "bias of a normalization",
    "r": "running statistic",
    "t": "table whose rows are looked up",
    "p": "slope",
    "h": "initial state",
    "m": "added to the scores of attention",
    "w": "chosen by a condition",
    "c": "setting: a bound, an exponent, a size",
    "k": "rotary table",
    "q": "scale of quantization",
}

_STANDARD = {
    "MatMul": "ff",
    "Gemm": "ffb",
    "Einsum": "f",
    "Conv": "xfb",
    "ConvTranspose": "xfb",
    "DeformConv": "xfxbx",
    "RNN": "xffbch",
    "GRU": "xffbch",
    "LSTM": "xffbchhf",
    "BatchNormalization": "xsorr",
    "InstanceNormalization": "xso",
    "GroupNormalization": "xso",
    "LayerNormalization": "xso",
    "RMSNormalization": "xs",
    "SimplifiedLayerNormalization": "xs",
    "PRelu": "xp",
    "Gather": "tc",
    "GatherElements": "tc",
    "GatherND": "tc",
    "Attention": "fffmhhc",
    "RotaryEmbedding": "xkkc",
    "Where": "cww",
    "Clip": "xcc",
    "Min": "c",
    "Max": "c",
    "Pow": "cc",
    "Mod": "cc",
    "Range": "c",
    "Resize": "xccc",
    "Upsample": "xc",
    "Pad": "xc",
    "OneHot": "c",
    "Dropout": "xcc",
    "Equal": "c",
    "Greater": "c",
    "GreaterOrEqual": "c",
    "Less": "c",
    "LessOrEqual": "c",
    "RoiAlign": "xc",
    "GridSample": "xc",
    "AffineGrid": "c",
    "NonMaxSuppression": "c",
    "STFT": "xc",
    "DFT": "xc",
    "MelWeightMatrix": "c",
    "QuantizeLinear": "xqq",
    "DequantizeLinear": "xqq",
    "DynamicQuantizeLinear": "x",
    "QLinearConv": "q",
    "QLinearMatMul": "q",
    "ConvInteger": "q",
    "MatMulInteger": "q",
}

# what onnxruntime's optimizer writes, and its contributed operators
_MICROSOFT = {
    "FusedMatMul": "ff",
    "TransposeMatMul": "ff",
    "FusedMatMulActivation": "ff",
    "FusedGemm": "ffb",
    "GemmFastGelu": "ffb",
    "GemmFloat8": "ffb",
    "FusedConv": "xfba",
    "NhwcFusedConv": "xfba",
    "NhwcConv": "xfb",
    "ConvTransposeWithDynamicPads": "xfcb",
    "GridSample": "xc",
    "BiasGelu": "xb",
    "FastGelu": "xb",
    "BiasAdd": "xba",
    "BiasSplitGelu": "xb",
    "BiasSoftmax": "xm",
    "BiasDropout": "xbacc",
    "SkipLayerNormalization": "aasob",
    "SkipSimplifiedLayerNormalization": "aasb",
    "LayerNormalization": "xso",
    "SimplifiedLayerNormalization": "xs",
    "EmbedLayerNormalization": "xxtttsocx",
    "GroupNorm": "xso",
    "SkipGroupNorm": "xsoab",
    "Attention": "xfbchmc",
    "PackedAttention": "xfbccm",
    "PackedMultiHeadAttention": "xxxbccm",
    "QAttention": "q",
    "LongformerAttention": "xfbxfbc",
    "MultiHeadAttention": "xxxbmmhhc",
    "DecoderMaskedSelfAttention": "xfbchm",
    "DecoderMaskedMultiHeadAttention": "xxxcmhhcccbc",
    "DecoderAttention": "xxffbccccc",
    "GroupQueryAttention": "xxxhhcckkcmf",
    "PagedAttention": "xxxhhccckk",
    "SparseAttention": "xxxhhccccckk",
    "RotaryEmbedding": "xckk",
    "GemmaRotaryEmbedding": "xxxxx",
    "RelativePositionBias": "tcc",
    "GatedRelativePositionBias": "xbmfbf",
    "MoE": "xxfbfbfb",
    "Gelu": "x",
    "QuickGelu": "x",
    "DequantizeLinear": "xqq",
    "QuantizeLinear": "xqq",
    "MatMulNBits": "xqqqqb",
    "MatMulBnb4": "q",
    "QMoE": "q",
    "QOrderedMatMul": "q",
    "DynamicQuantizeMatMul": "xqqqb",
    "DynamicQuantizeLSTM": "q",
    "MatMulIntegerToFloat": "xqqqqqb",
    "QGemm": "q",
    "QLinearAdd": "q",
    "QLinearMul": "q",
    "QLinearConv": "q",
    "QLinearSigmoid": "q",
    "QLinearLeakyRelu": "q",
    "QLinearAveragePool": "q",
    "QLinearGlobalAveragePool": "q",
    "QLinearConcat": "q",
    "QLinearSoftmax": "q",
    "QEmbedLayerNormalization": "q",
}

OPERANDS = {("", op): letters for op, letters in _STANDARD.items()} | {
    ("com.microsoft", op): letters for op, letters in _MICROSOFT.items()
}

# these take one value and hand it on, in another order or shape or dtype
MOVES = (REORDERS | SELECTS | PACKS | {"CastLike", "Dropout"}) - {
    "Concat", "GatherElements", "GatherND"
}  # fmt: skip

# operands from which the elements of the result come, 0 for all; the others only say how
_MOVED = dict.fromkeys(MOVES | {"Pad", "Resize", "TopK", "Trilu"}, 1) | {
    "Concat": 0,
    "SequenceConstruct": 0,
}

# of these, the first operands lead on to what is computed; the others choose or locate
_LEADS = {"RoiAlign": 1, "Gather": 1, "GatherElements": 1, "GatherND": 1, "NonMaxSuppression": 0}


def letter(node: ir.Node, index: int) -> str:
    """Return the role of operand `index` of `node`, a key of `LETTERS`, or "" if unknown."""
    letters = OPERANDS.get((domain(node), node.op_type), "")
    return letters[min(index, len(letters) - 1)] if letters else ""


def domain(node: ir.Node) -> str:
    """Return the domain of `node`, "" for the standard one."""
    return "" if node.domain == "ai.onnx" else node.domain


def value_operands(node: ir.Node) -> list[ir.Value]:
    """Return the operands whose elements the results are computed from."""
    if domain(node) == "" and node.op_type in OF_SHAPES:
        return []
    count = _MOVED.get(node.op_type, 0) if domain(node) == "" else 0
    inputs = node.inputs[:count] if count else node.inputs
    if node.op_type == "Gather" and domain(node) == "":
        inputs = node.inputs
    return [x for x in inputs if x is not None]


def leading_operands(node: ir.Node) -> list[ir.Value]:
    """Return the operands through which a smooth function of them would pass."""
    count = _LEADS.get(node.op_type, len(node.inputs)) if domain(node) == "" else len(node.inputs)
    return [x for x in value_operands(node) if x in node.inputs[:count]]
