"""Operators of the domain com.microsoft, which onnxruntime adds to ONNX, and similar domains.

onnx infers nothing of them. Their types follow from their schemas, which onnxruntime lists, and
their shapes from functions here, by its documentation (ContribOperators.md). Shapes of operators
without a function, and lengths that no operand has, as of a cache that grows, stay unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import onnx_ir as ir
from onnx import NodeProto, defs

from onnxgrad.operators.attributes import schemas_of_onnxruntime
from onnxgrad.operators.convolutions import work_of_convolution
from onnxgrad.operators.products import shape_of_gemm, shape_of_matmul
from onnxgrad.operators.records import declare_operators, operator_of
from onnxgrad.operators.shapes import Dim, Dims, broadcast, dims

Attributes = Mapping[str, Any]
Shapes = list[Dims | None] | None  # of the first outputs

DTYPES: dict[str, ir.DataType] = {  # by their names in schemas
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(int32)": ir.DataType.INT32,
    "tensor(int64)": ir.DataType.INT64,
    "tensor(bool)": ir.DataType.BOOL,
    "tensor(string)": ir.DataType.STRING,
}


def result_types(node: ir.Node) -> list[ir.TypeProtocol | None]:
    """Return the types of the outputs of a node, None where its operands do not tell.

    An optional output whose type no operand has, as the statistics of a normalization, is float32.
    """
    schema = schemas_of_onnxruntime().get((node.domain, node.op_type))
    if schema is None:
        return []
    formal = [*schema.inputs, *schema.inputs[-1:] * len(node.inputs)]  # the last may be repeated
    pairs = zip(formal, node.inputs, strict=False)
    by_name = {f.typeStr: x.type for f, x in reversed([*pairs]) if x is not None and x.type}
    found = []
    for i, y in enumerate(schema.outputs):
        allowed = {"tensor(float)"} if i and "tensor(float)" in y.types else y.types
        dtype = DTYPES.get(next(iter(allowed))) if len(allowed) == 1 else None
        found.append(by_name.get(y.typeStr) or (None if dtype is None else ir.TensorType(dtype)))
    return found


def result_shapes(node: ir.Node) -> list[Dims | None]:
    """Return the shapes of the first outputs of a node; none if they are not known."""
    function = operator_of(node).shape
    if function is None:
        return []
    try:
        found = function(node.inputs, {a.name: a.value for a in node.attributes.values()})
    except (IndexError, ValueError, TypeError):  # operands that do not fit: the session says why
        return []
    return found if isinstance(found, list) else [found]


# -- shapes ---------------------------------------------------------------------------------------


def _operand_shape(inputs: Sequence, index: int) -> Dims | None:
    """Return the shape of an operand, None if it is unknown or left out."""
    return dims(inputs[index]) if index < len(inputs) else None


def _is_given(inputs: Sequence, index: int) -> bool:
    return index < len(inputs) and inputs[index] is not None


def _multiply(length: Dim, by: Dim) -> Dim:
    return length * by if isinstance(length, int) and isinstance(by, int) else None


def _divide(length: Dim, parts: int) -> Dim:
    return length // parts if isinstance(length, int) else None


def _outputs_like_first(inputs: Sequence, _attributes: Attributes) -> Shapes:
    return [dims(inputs[0])] * 2


def _shapes_of_norm(inputs: Sequence, attributes: Attributes) -> Shapes:
    """Return the shapes of a normalized value and of one statistic for each row."""
    x = dims(inputs[0])
    if x is None:
        return None
    axis = attributes.get("axis", -1) % len(x)
    return [x, (*x[:axis], *[1] * (len(x) - axis))]


def _shapes_of_skip_norm(inputs: Sequence, attributes: Attributes) -> Shapes:
    """Return the shapes of the normalized sum of operands, of two statistics, and of the sum."""
    shapes = _shapes_of_norm(inputs, attributes)
    return None if shapes is None else [*shapes, shapes[1], shapes[0]]


def _shapes_of_embedding(inputs: Sequence, _attributes: Attributes) -> Shapes:
    """Return the shapes of embedded tokens, of their numbers, and of tokens before the norm."""
    ids, words = _operand_shape(inputs, 0), _operand_shape(inputs, 2)
    if ids is None or words is None:
        return None
    return [(*ids, words[-1]), ids[:1], (*ids, words[-1])]


def _shape_of_fused_matmul(inputs: Sequence, attributes: Attributes) -> Dims | None:
    """Return the shape of a product with matrices that may be transposed."""
    a, b = (_transposed_operand(inputs, attributes, i) for i in (0, 1))
    if a is None or b is None:
        return None
    if len(a) == 1 or len(b) == 1:
        rows, columns = a[:-1], b[-1:] if len(b) > 1 else ()
        return (*(b[:-2] if len(a) == 1 else ()), *rows, *columns)
    return shape_of_matmul([ir.Value(name=None, shape=ir.Shape(s)) for s in (a, b)], {})


def _transposed_operand(inputs: Sequence, attributes: Attributes, index: int) -> Dims | None:
    shape, side = _operand_shape(inputs, index), "AB"[index]
    if shape is None or len(shape) < 2:
        return shape
    if attributes.get(f"transBatch{side}"):
        shape = (*shape[1:-1], shape[0], shape[-1])
    return (*shape[:-2], shape[-1], shape[-2]) if attributes.get(f"trans{side}") else shape


def _shape_by_matrix(inputs: Sequence, _attributes: Attributes) -> Dims | None:
    """Return the shape of x W, whose matrix W is the second operand."""
    x, w = _operand_shape(inputs, 0), _operand_shape(inputs, 1)
    return None if x is None or w is None else (*x[:-1], w[-1])


def _shape_of_quantized_gemm(inputs: Sequence, attributes: Attributes) -> Dims | None:
    """Return the shape of a Gemm whose second matrix stands behind scale and zero point."""
    return shape_of_gemm([inputs[0], inputs[3]], attributes)


def _shape_by_columns(inputs: Sequence, attributes: Attributes) -> Dims | None:
    """Return the shape of a product with a weight (N, K) of few bits."""
    x = dims(inputs[0])
    return None if x is None else (*x[:-1], attributes["N"])


def _shape_of_gathered_blocks(inputs: Sequence, attributes: Attributes) -> Dims | None:
    """Return the shape of rows of a table of few bits."""
    table, rows = _operand_shape(inputs, 0), _operand_shape(inputs, 1)
    if not table or rows is None:
        return None
    data, [*lengths] = inputs[0], table
    is_packed = data is not None and data.dtype == ir.DataType.UINT8
    packed = 8 // attributes.get("bits", 4) if is_packed else 1
    lengths[-1] = _multiply(lengths[-1], packed)
    axis = attributes.get("gather_axis", 0) % len(lengths)
    return (*lengths[:axis], *rows, *lengths[axis + 1 :])


def _broadcast_with(second: int) -> Callable[[Sequence, Attributes], Dims | None]:
    """Return the function of the shape to which the first operand and another one broadcast."""
    return lambda inputs, _: broadcast(dims(inputs[0]), _operand_shape(inputs, second))


def _shape_of_distances(inputs: Sequence, _attributes: Attributes) -> Dims | None:
    a, b = _operand_shape(inputs, 0), _operand_shape(inputs, 1)
    return None if a is None or b is None else (a[0], b[0])


def _shape_of_half(inputs: Sequence, _attributes: Attributes) -> Dims | None:
    x = dims(inputs[0])
    return None if x is None else (*x[:-1], _divide(x[-1], 2))


def _shapes_of_rotated(inputs: Sequence, _attributes: Attributes) -> Shapes:
    """Return the shapes of queries and keys."""
    return [_operand_shape(inputs, 1), _operand_shape(inputs, 3)]


# -- attention: (batch, rows, heads size), caches (batch, heads, rows, size) ----------------------


def _shapes_of_attention(inputs: Sequence, attributes: Attributes) -> Shapes:
    """One matrix makes queries, keys and values; the cache has both on a first axis."""
    x, w = _operand_shape(inputs, 0), _operand_shape(inputs, 1)
    if x is None or w is None:
        return None
    heads, sizes = attributes["num_heads"], attributes.get("qkv_hidden_sizes", ())
    width = sizes[2] if sizes else _divide(w[1], 3)
    past = _operand_shape(inputs, 4)
    rows = past[3] if past and attributes.get("past_present_share_buffer") else None
    rows = rows if _is_given(inputs, 4) else x[1]
    return [(*x[:2], width), (2, x[0], heads, rows, _divide(width, heads))]


def _shapes_of_heads(past: int, buffer: int) -> Callable[[Sequence, Attributes], Shapes]:
    """Return the function of attention by heads, where the cache and its buffer are operands.

    Queries, keys and values may be packed into one or two operands.
    """

    def shapes(inputs: Sequence, attributes: Attributes) -> Shapes:
        heads, q, v = attributes["num_heads"], dims(inputs[0]), _operand_shape(inputs, 2)
        if q is None:
            return None
        k = _operand_shape(inputs, 1)
        packed = q if len(q) == 5 else k if k is not None and len(k) == 5 else None
        source = q if len(q) == 5 else k  # (batch, rows, ...), or (batch, heads, rows, size)
        if packed is not None:
            width = _multiply(packed[-1], heads)
        elif v is not None:
            width = _multiply(v[-1], heads) if len(v) == 4 else v[-1]
        else:
            width = None
        new = None if source is None else source[2 if len(source) == 4 else 1]
        before = _operand_shape(inputs, past)
        total = new if not _is_given(inputs, past) else None
        if _is_given(inputs, buffer):
            total = None if before is None else before[2]
        size = before[3] if before and isinstance(before[3], int) else _divide(width, heads)
        cache_shape = (q[0], heads, total, size)
        scores = (q[0], heads, q[1], None if _is_given(inputs, buffer) else total)
        return [(*q[:2], width), cache_shape, cache_shape, scores]

    return shapes


def _shapes_of_grouped_heads(inputs: Sequence, attributes: Attributes) -> Shapes:
    """Heads of queries share those of keys and values; all may be packed into the first operand."""
    q, v, past = (_operand_shape(inputs, i) for i in (0, 2, 3))
    heads, shared = attributes["num_heads"], attributes["kv_num_heads"]
    if q is None:
        return None
    packed = not _is_given(inputs, 2)
    size = _divide(q[2], heads + 2 * shared) if packed else _divide(v[2], shared) if v else None
    if past and isinstance(past[3], int):
        size = past[3]
    width = _multiply(size, heads)
    rows = None if _is_given(inputs, 3) else q[1]
    held = (q[0], shared, rows, size)
    return [(*q[:2], width), held, held, (q[0], heads, q[1], rows)]


_DOMAIN = "com.microsoft"
for _names, _function in {
    "BiasAdd BiasDropout BiasGelu BiasSoftmax DequantizeLinear FastGelu GatedRMSNorm Gelu "
    "GroupNorm Inverse LongformerAttention MoE PackedAttention QLinearLeakyRelu QLinearSigmoid "
    "QLinearSoftmax QMoE QuantizeLinear QuickGelu RotaryEmbedding SkipGroupNorm "
    "Trilu": _outputs_like_first,
    "SimplifiedLayerNormalization": _shapes_of_norm,
    "SkipLayerNormalization SkipSimplifiedLayerNormalization": _shapes_of_skip_norm,
    "EmbedLayerNormalization": _shapes_of_embedding,
    "FusedMatMul TransposeMatMul": _shape_of_fused_matmul,
    "GemmFastGelu DynamicQuantizeMatMul MatMulIntegerToFloat": _shape_by_matrix,
    "FusedGemm": shape_of_gemm,
    "QGemm": _shape_of_quantized_gemm,
    "MatMulNBits MatMulBnb4": _shape_by_columns,
    "GatherBlockQuantized": _shape_of_gathered_blocks,
    "QLinearAdd QLinearMul": _broadcast_with(3),  # behind scale and zero point
    "ComplexMul ComplexMulConj": _broadcast_with(1),
    "GemmaRotaryEmbedding": _shapes_of_rotated,
    "CDist": _shape_of_distances,
    "BiasSplitGelu": _shape_of_half,
    "Attention": _shapes_of_attention,
    "MultiHeadAttention": _shapes_of_heads(6, 8),
    "DecoderMaskedMultiHeadAttention": _shapes_of_heads(5, 7),
    "GroupQueryAttention": _shapes_of_grouped_heads,
}.items():
    declare_operators(_names, domain=_DOMAIN, shape=_function)
declare_operators(
    "SimplifiedLayerNormalization", shape=_shapes_of_norm
)  # written without a domain, too

for _roles, _names in {
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
    "xxxcmhhcccb": "DecoderMaskedMultiHeadAttention",
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
}.items():
    declare_operators(_names, domain=_DOMAIN, roles=_roles)


def _work_of_packed_bits(node: ir.Node, lengths_of: Callable) -> int:
    sizes = map(node.attributes.get_int, "KN", (1, 1))
    return prod((*lengths_of(node.outputs[0])[:-1], *sizes))


declare_operators("FusedConv", domain=_DOMAIN, work=work_of_convolution(1, 2))
declare_operators("MatMulNBits", domain=_DOMAIN, work=_work_of_packed_bits)
declare_operators("GroupQueryAttention", "real_settings", domain=_DOMAIN, settings=(7, 8))
declare_operators("RotaryEmbedding", "real_settings", domain=_DOMAIN, settings=(2, 3))

# operators whose result has the shape of a standard operator's, with so many operands
for _name, _standard in {
    "FusedConv": ("Conv", 3),
    "GatherND": ("GatherND", 2),
    "GridSample": ("GridSample", 2),
    "Pad": ("Pad", 3),
    "QLinearAveragePool": ("AveragePool", 1),
    "QLinearGlobalAveragePool": ("GlobalAveragePool", 1),
}.items():
    declare_operators(_name, domain=_DOMAIN, shape_like=_standard)


def standard_like(node: ir.Node) -> NodeProto | None:
    """Return a node of ONNX whose result has the shape of that of `node`; None if there is none."""
    op_type, count = operator_of(node).shape_like
    if not op_type or bool(node.attributes.get_int("channels_last", 0)):
        return None
    proto, known = ir.to_proto(node), defs.get_schema(op_type).attributes
    attributes = [a for a in proto.attribute if a.name in known]
    proto.domain, proto.op_type = "", op_type
    del proto.input[count:], proto.attribute[:]
    proto.attribute.extend(attributes)
    return proto
