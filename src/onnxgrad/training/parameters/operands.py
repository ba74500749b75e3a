"""The roles of operands, as factors and biases, and the ways of values through a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import onnx_ir as ir

from onnxgrad.graph.operators import OF_SHAPES, PACKS, REORDERS, SELECTS

# The role of each operand is a letter; the last one of an operator applies to all that follow.
#
# x  data                         t  table whose rows are looked up
# a  added to the data            p  slope
# f  factor                       h  initial state
# b  bias                         m  added to the scores of attention
# s  scale of a normalization     w  chosen by a condition
# o  bias of a normalization      c  setting: a bound, an exponent, a size
# r  running statistic            k  rotary table
# q  scale of quantization
_STANDARD = {
    "ffb": "Gemm",
    "xfb": "Conv ConvTranspose",
    "xfxbx": "DeformConv",
    "xffbch": "RNN GRU",
    "xffbchhf": "LSTM",
    "xsor": "BatchNormalization",
    "xso": "InstanceNormalization GroupNormalization LayerNormalization",
    "xs": "RMSNormalization SimplifiedLayerNormalization",
    "xp": "PRelu",
    "tc": "Gather GatherElements GatherND",
    "fffmhhc": "Attention",
    "fffhx": "LinearAttention",
    "f": "MatMul Einsum SwiGLU",
    "xfbh": "CausalConvWithState",
    "xkkc": "RotaryEmbedding",
    "cw": "Where",
    "xc": "Clip Dropout Resize Upsample Pad RoiAlign GridSample STFT DFT",
    "c": (
        "Min Max Pow Mod Range OneHot Equal Greater GreaterOrEqual Less LessOrEqual AffineGrid "
        "NonMaxSuppression MelWeightMatrix NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss"
    ),
    "xq": "QuantizeLinear DequantizeLinear",
    "x": "DynamicQuantizeLinear",
    "q": "QLinearConv QLinearMatMul ConvInteger MatMulInteger",
}

# what onnxruntime's optimizer writes, and its contributed operators
_MICROSOFT = {
    "f": "FusedMatMul TransposeMatMul FusedMatMulActivation ComplexMul ComplexMulConj",
    "ffb": "FusedGemm GemmFastGelu GemmFloat8",
    "xfb": "NhwcConv",
    "xfba": "FusedConv NhwcFusedConv",
    "xfcb": "ConvTransposeWithDynamicPads",
    "xc": "GridSample",
    "xb": "BiasGelu FastGelu BiasSplitGelu",
    "xba": "BiasAdd",
    "xm": "BiasSoftmax",
    "xbac": "BiasDropout",
    "aasob": "SkipLayerNormalization",
    "aasb": "SkipSimplifiedLayerNormalization",
    "xso": "LayerNormalization GroupNorm",
    "xs": "SimplifiedLayerNormalization",
    "xsx": "GatedRMSNorm",
    "xsoab": "SkipGroupNorm",
    "xxtttsocx": "EmbedLayerNormalization",
    "xfbchmc": "Attention",
    "xfbccm": "PackedAttention",
    "xxxbccm": "PackedMultiHeadAttention",
    "xfbxfbc": "LongformerAttention",
    "xxxbmmhhc": "MultiHeadAttention",
    "xfbchm": "DecoderMaskedSelfAttention",
    "xxxcmhhcccbc": "DecoderMaskedMultiHeadAttention",
    "xxffbc": "DecoderAttention",
    "xxxhhcckkcmf": "GroupQueryAttention",
    "xxxhhccck": "PagedAttention",
    "xxxhhccccck": "SparseAttention",
    "xck": "RotaryEmbedding",
    "tc": "RelativePositionBias",
    "xbmfbf": "GatedRelativePositionBias",
    "xxfbfbfb": "MoE",
    "x": "Gelu QuickGelu GemmaRotaryEmbedding",
    "xq": "DequantizeLinear QuantizeLinear",
    "xqqqqb": "MatMulNBits",
    "xqqqb": "DynamicQuantizeMatMul",
    "xqqqqqb": "MatMulIntegerToFloat",
    "q": (
        "QAttention MatMulBnb4 QMoE QOrderedMatMul DynamicQuantizeLSTM QGemm QLinearAdd QLinearMul "
        "QLinearConv QLinearSigmoid QLinearLeakyRelu QLinearAveragePool QLinearGlobalAveragePool "
        "QLinearConcat QLinearSoftmax QEmbedLayerNormalization"
    ),
}

_LETTERS = {
    (domain, op_type): letters
    for domain, table in (("", _STANDARD), ("com.microsoft", _MICROSOFT))
    for letters, op_types in table.items()
    for op_type in op_types.split()
}

# these take one value and hand it on, in another order or shape or dtype
MOVES = (REORDERS | SELECTS | PACKS | {"CastLike", "Dropout"}) - {
    "Concat", "GatherElements", "GatherND"
}  # fmt: skip

# the elements of the result are those of the first operand, and the others only say how
_OF_FIRST = MOVES - {"Gather", "SequenceConstruct"} | {"Pad", "Resize", "TopK", "Trilu"}

# of these, the first operands lead on to what is computed; the others choose or locate
_LEADS = {"RoiAlign": 1, "Gather": 1, "GatherElements": 1, "GatherND": 1, "NonMaxSuppression": 0}


def letter(node: ir.Node, index: int) -> str:
    """Return the role of operand `index` of `node`, a letter as above, or "" if unknown."""
    letters = _LETTERS.get((domain(node), node.op_type), "")
    return letters[min(index, len(letters) - 1)] if letters else ""


def domain(node: ir.Node) -> str:
    """Return the domain of `node`, "" for the standard one."""
    return "" if node.domain == "ai.onnx" else node.domain


def value_operands(node: ir.Node) -> list[ir.Value]:
    """Return the operands whose elements the results are computed from."""
    standard = domain(node) == ""
    if standard and node.op_type in OF_SHAPES:
        return []
    first = standard and node.op_type in _OF_FIRST
    return [x for x in (node.inputs[:1] if first else node.inputs) if x is not None]


def leading_operands(node: ir.Node) -> list[ir.Value]:
    """Return the operands through which a smooth function of them would pass."""
    count = _LEADS.get(node.op_type, len(node.inputs)) if domain(node) == "" else len(node.inputs)
    return [x for x in value_operands(node) if x in node.inputs[:count]]


def reachable(
    starts: Iterable[ir.Value], onward: Callable[[ir.Value], Iterable[ir.Value | None]]
) -> Iterator[ir.Value]:
    """Yield `starts`, and all values to which `onward` leads from them, each once."""
    seen = dict.fromkeys(starts)
    waiting = list(seen)
    for value in waiting:  # the loop appends to it
        yield value
        new = {x: None for x in onward(value) if x is not None and x not in seen}
        seen |= new
        waiting += new


def readers(
    starts: Iterable[ir.Value], through: Collection[str] = MOVES
) -> Iterator[tuple[ir.Node, int]]:
    """Yield what reads `starts`, or results that nodes of the types `through` make of them.

    Each is a node and the index of the operand; those in between are yielded, too.
    """

    def results(value: ir.Value) -> Iterator[ir.Value]:
        return (y for node, _ in value.uses() if node.op_type in through for y in node.outputs)

    for value in reachable(starts, results):
        yield from value.uses()


def source_of(value: ir.Value) -> ir.Value:
    """Return the value of which `value` is a moved copy, or `value` itself."""
    node = value.producer()
    while node is not None and node.op_type in MOVES and node.inputs and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def maker_of(value: ir.Value) -> ir.Node | None:
    """Return the node that computes `value`, ignoring nodes that only move its elements."""
    return source_of(value).producer()
