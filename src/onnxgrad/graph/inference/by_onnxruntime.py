"""Types and shapes of the results of operators that onnxruntime adds to those of ONNX.

onnx infers nothing of them. Their types follow from their schemas, which onnxruntime lists, and
their shapes from one table here, by its documentation (ContribOperators.md). What the table lacks,
and lengths that are not those of an operand, as of a cache that grows, stay unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
from onnx import NodeProto, defs

from onnxgrad.graph.attributes import schemas_of_onnxruntime
from onnxgrad.graph.output_shapes import output_shape
from onnxgrad.graph.shapes import Dim, Dims, broadcast, dims

_Shapes = Sequence[Dims | None]  # of the first outputs
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


def result_shapes(node: ir.Node) -> _Shapes:
    """Return the shapes of the first outputs of a node; none if they are not known."""
    function = _SHAPES.get(node.op_type)
    try:
        return () if function is None else function(node)
    except (IndexError, ValueError, TypeError):  # operands that do not fit: the session says why
        return ()


# -- the table -----------------------------------------------------------------------------------


def _of(node: ir.Node, index: int) -> Dims | None:
    """Return the shape of an operand, None if it is unknown or left out."""
    return dims(node.inputs[index]) if index < len(node.inputs) else None


def _is_given(node: ir.Node, index: int) -> bool:
    return index < len(node.inputs) and node.inputs[index] is not None


def _times(length: Dim, by: Dim) -> Dim:
    return length * by if isinstance(length, int) and isinstance(by, int) else None


def _part(length: Dim, parts: int) -> Dim:
    return length // parts if isinstance(length, int) else None


def _like_first(node: ir.Node) -> _Shapes:
    """All outputs have the shape of the first operand."""
    return [_of(node, 0)] * len(node.outputs)


def _norm(node: ir.Node) -> _Shapes:
    """One statistic for each row; a fourth output is the sum of the operands."""
    x = _of(node, 0)
    if x is None:
        return ()
    axis = node.attributes.get_int("axis", -1) % len(x)
    row = (*x[:axis], *[1] * (len(x) - axis))
    return [x, row, row, x] if node.op_type.startswith("Skip") else [x, row]


def _embedded(node: ir.Node) -> _Shapes:
    """Rows of tables for ids, the number of tokens in each row, and the rows before they are
    normalized.
    """
    ids, words = _of(node, 0), _of(node, 2)
    if ids is None or words is None:
        return ()
    return [(*ids, words[-1]), ids[:1], (*ids, words[-1])]


def _product(node: ir.Node) -> _Shapes:
    """A product with matrices that may be transposed, FusedMatMul."""
    a, b = (_flipped(node, i) for i in (0, 1))
    if a is None or b is None:
        return ()
    if len(a) == 1 or len(b) == 1:
        rows, columns = a[:-1], b[-1:] if len(b) > 1 else ()
        return [(*(b[:-2] if len(a) == 1 else ()), *rows, *columns)]
    operands = [ir.Value(name=None, shape=ir.Shape(s)) for s in (a, b)]
    return [output_shape("MatMul", operands, {})]


def _flipped(node: ir.Node, index: int) -> Dims | None:
    shape, side = _of(node, index), "AB"[index]
    if shape is None or len(shape) < 2:
        return shape
    if node.attributes.get_int(f"transBatch{side}", 0):
        shape = (*shape[1:-1], shape[0], shape[-1])
    return (*shape[:-2], shape[-1], shape[-2]) if _flag(node, f"trans{side}") else shape


def _flag(node: ir.Node, name: str) -> bool:
    return bool(node.attributes.get_int(name, 0))


def _linear(weight: int) -> Callable[[ir.Node], _Shapes]:
    """Return the function of a product x W, whose matrix W is the operand `weight`."""

    def shapes(node: ir.Node) -> _Shapes:
        x, w = _of(node, 0), _of(node, weight)
        return () if x is None or w is None else [(*x[:-1], w[-1])]

    return shapes


def _gemm(second: int) -> Callable[[ir.Node], _Shapes]:
    """Return the function of a Gemm whose second matrix is the operand `second`."""

    def shapes(node: ir.Node) -> _Shapes:
        a, b = _of(node, 0), _of(node, second)
        if a is None or b is None:
            return ()
        return [(a[1 if _flag(node, "transA") else 0], b[0 if _flag(node, "transB") else 1])]

    return shapes


def _few_bits(node: ir.Node) -> _Shapes:
    """A product x WT with a weight (N, K) of few bits."""
    x = _of(node, 0)
    return () if x is None else [(*x[:-1], node.attributes.get_int("N"))]


def _gathered(node: ir.Node) -> _Shapes:
    """Rows of a table of few bits."""
    table, rows = _of(node, 0), _of(node, 1)
    if not table or rows is None:
        return ()
    data, [*lengths] = node.inputs[0], table
    is_packed = data is not None and data.dtype == ir.DataType.UINT8
    packed = 8 // node.attributes.get_int("bits", 4) if is_packed else 1
    lengths[-1] = _times(lengths[-1], packed)
    axis = node.attributes.get_int("gather_axis", 0) % len(lengths)
    return [(*lengths[:axis], *rows, *lengths[axis + 1 :])]


def _broadcast(second: int) -> Callable[[ir.Node], _Shapes]:
    """The first operand and the `second` are broadcast."""
    return lambda node: [broadcast(_of(node, 0), _of(node, second))]


def _distances(node: ir.Node) -> _Shapes:
    a, b = _of(node, 0), _of(node, 1)
    return () if a is None or b is None else [(a[0], b[0])]


def _halved(node: ir.Node) -> _Shapes:
    x = _of(node, 0)
    return () if x is None else [(*x[:-1], _part(x[-1], 2))]


# -- attention: (batch, rows, heads size), caches (batch, heads, rows, size) ----------------------


def _attention(node: ir.Node) -> _Shapes:
    """One matrix makes queries, keys and values; the cache has both on a first axis."""
    x, w = _of(node, 0), _of(node, 1)
    if x is None or w is None:
        return ()
    heads, sizes = (
        node.attributes.get_int("num_heads"),
        node.attributes.get_ints("qkv_hidden_sizes", ()),
    )
    width = sizes[2] if sizes else _part(w[1], 3)
    past = _of(node, 4)
    rows = past[3] if past and _flag(node, "past_present_share_buffer") else None
    rows = rows if _is_given(node, 4) else x[1]
    return [(*x[:2], width), (2, x[0], heads, rows, _part(width, heads))]


def _heads(node: ir.Node) -> _Shapes:
    """Queries, keys and values may be packed into one or two operands."""
    heads, q, v = node.attributes.get_int("num_heads"), _of(node, 0), _of(node, 2)
    if q is None:
        return ()
    decoder = node.op_type.startswith("Decoder")
    past, buffer = (5, 7) if decoder else (6, 8)
    k = _of(node, 1)
    packed = q if len(q) == 5 else k if k is not None and len(k) == 5 else None
    source = q if len(q) == 5 else k  # of keys: (batch, rows, ...), or (batch, heads, rows, size)
    if packed is not None:
        width = _times(packed[-1], heads)
    elif v is not None:
        width = _times(v[-1], heads) if len(v) == 4 else v[-1]
    else:
        width = None
    new = None if source is None else source[2 if len(source) == 4 else 1]
    before = _of(node, past)
    total = new if not _is_given(node, past) else None
    if _is_given(node, buffer):
        total = None if before is None else before[2]
    size = before[3] if before and isinstance(before[3], int) else _part(width, heads)
    cache_shape = (q[0], heads, total, size)
    scores = (q[0], heads, q[1], None if _is_given(node, buffer) else total)
    return [(*q[:2], width), cache_shape, cache_shape, scores]


def _grouped(node: ir.Node) -> _Shapes:
    """Heads of queries share those of keys and values; all may be packed into the first operand."""
    q, v, past = _of(node, 0), _of(node, 2), _of(node, 3)
    heads, shared = (node.attributes.get_int(n) for n in ("num_heads", "kv_num_heads"))
    if q is None:
        return ()
    packed = not _is_given(node, 2)
    size = _part(q[2], heads + 2 * shared) if packed else _part(v[2], shared) if v else None
    if past and isinstance(past[3], int):
        size = past[3]
    width = _times(size, heads)
    rows = None if _is_given(node, 3) else q[1]
    held = (q[0], shared, rows, size)
    return [(*q[:2], width), held, held, (q[0], heads, q[1], rows)]


_LIKE_FIRST = (
    "BiasAdd BiasDropout BiasGelu BiasSoftmax DequantizeLinear FastGelu GatedRMSNorm Gelu "
    "GroupNorm Inverse LongformerAttention MoE PackedAttention QLinearLeakyRelu QLinearSigmoid "
    "QLinearSoftmax QMoE QuantizeLinear QuickGelu RotaryEmbedding SkipGroupNorm Trilu"
)
_SHAPES: dict[str, Callable[[ir.Node], _Shapes]] = {
    **dict.fromkeys(_LIKE_FIRST.split(), _like_first),
    **dict.fromkeys(
        "SimplifiedLayerNormalization SkipLayerNormalization "
        "SkipSimplifiedLayerNormalization".split(),
        _norm,
    ),
    "EmbedLayerNormalization": _embedded,
    "FusedMatMul": _product,
    "TransposeMatMul": _product,
    "GemmFastGelu": _linear(1),
    "DynamicQuantizeMatMul": _linear(1),
    "MatMulIntegerToFloat": _linear(1),
    "FusedGemm": _gemm(1),
    "QGemm": _gemm(3),
    "MatMulNBits": _few_bits,
    "MatMulBnb4": _few_bits,
    "GatherBlockQuantized": _gathered,
    "QLinearAdd": _broadcast(3),  # behind scale and zero point
    "QLinearMul": _broadcast(3),
    "ComplexMul": _broadcast(1),
    "ComplexMulConj": _broadcast(1),
    "GemmaRotaryEmbedding": lambda node: [_of(node, 1), _of(node, 3)],  # queries and keys
    "CDist": _distances,
    "BiasSplitGelu": _halved,
    "Attention": _attention,
    "MultiHeadAttention": _heads,
    "DecoderMaskedMultiHeadAttention": _heads,
    "GroupQueryAttention": _grouped,
}

_STANDARD = {  # those whose result has the shape of a standard operator's, with so many operands
    "FusedConv": ("Conv", 3),
    "GatherND": ("GatherND", 2),
    "GridSample": ("GridSample", 2),
    "Pad": ("Pad", 3),
    "QLinearAveragePool": ("AveragePool", 1),
    "QLinearGlobalAveragePool": ("GlobalAveragePool", 1),
}


def standard_like(node: ir.Node) -> NodeProto | None:
    """Return a node of ONNX whose result has the shape of that of `node`; None if there is none."""
    op_type, count = _STANDARD.get(node.op_type, ("", 0))
    if not op_type or _flag(node, "channels_last"):
        return None
    proto, known = ir.to_proto(node), defs.get_schema(op_type).attributes
    attributes = [a for a in proto.attribute if a.name in known]
    proto.domain, proto.op_type = "", op_type
    del proto.input[count:], proto.attribute[:]
    proto.attribute.extend(attributes)
    return proto
