"""Cases of operators of `com.microsoft`: a node, its operands, and where its kernel is not."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import onnx

from tests.support.models import parse_model

RNG = np.random.default_rng(7)


@dataclass(frozen=True)
class KernelCase:
    """One node `y, ... = Operator<...>(a, b, ...)` and its operands by name."""

    id: str
    node: str
    feed: dict[str, np.ndarray]
    outputs: tuple[str, ...] = ("y",)
    formula: object = None  # in numpy, where onnxruntime has no kernel for the CPU
    half: bool = False  # there is a kernel in float16
    single: tuple[str, ...] = ()  # outputs that stay float32 then
    opset: int = 18
    kinds: dict[str, str] = field(default_factory=dict)  # of the outputs that are not float


CASES: list[KernelCase] = []


def add_kernel(name: str, node: str, shapes: dict, given: dict | None = None, **options) -> None:
    """Add a case: operands of these shapes hold normal numbers, those `given` are as they are."""
    feed = {n: RNG.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    outputs = tuple(y.strip() for y in node.partition("=")[0].split(","))
    CASES.append(KernelCase(name, node, feed | (given or {}), outputs, **options))


def i32(*values) -> np.ndarray:
    """Return whole numbers as most operators take them."""
    return np.array(values, np.int32)


def one(value: int) -> np.ndarray:
    """Return a scalar."""
    return np.array(value, np.int32)


def flags_with_first(*shape: int) -> np.ndarray:
    """Return zeros and ones, of which every row of the last axis has a one."""
    made = RNG.integers(0, 2, shape).astype(np.int32)
    made[..., 0] = 1
    return made


# -- products ------------------------------------------------------------------------------------

ON = {"a": (2, 3, 4, 5), "b": (2, 3, 5, 2)}
for attributes, shapes in {
    "alpha=0.5": ON,
    "transA=1": ON | {"a": (2, 3, 5, 4)},
    "transB=1, alpha=2.0": ON | {"b": (2, 3, 2, 5)},
    "transA=1, transB=1": ON | {"a": (2, 3, 5, 4), "b": (2, 3, 2, 5)},
    "transBatchA=1": ON | {"a": (4, 2, 3, 5)},
    "transBatchB=1": ON | {"b": (5, 2, 3, 2)},
    "transBatchA=1, transA=1": ON | {"a": (5, 2, 3, 4)},
    "transBatchA=1, transBatchB=1, transB=1": {"a": (4, 3, 5), "b": (2, 3, 5)},
}.items():
    add_kernel(f"FusedMatMul {attributes}", f"y = FusedMatMul<{attributes}>(a, b)", shapes)
add_kernel("FusedMatMul vectors", "y = FusedMatMul<transA=1>(a, b)", {"a": (5,), "b": (2, 5, 3)})
add_kernel("FusedMatMul vector", "y = FusedMatMul<transB=1>(a, b)", {"a": (2, 5), "b": (5,)})
add_kernel(
    "TransposeMatMul", "y = TransposeMatMul<transA=1, alpha=3.0>(a, b)", {"a": (4, 2), "b": (4, 3)}
)

GEMM = {"a": (3, 4), "b": (4, 2), "c": (2,)}
for kind in "Relu Tanh Sigmoid Softplus Softsign".split():
    add_kernel(f"FusedGemm {kind}", f'y = FusedGemm<activation="{kind}">(a, b, c)', GEMM)
for (
    kind
) in "LeakyRelu Elu Celu Selu HardSigmoid ThresholdedRelu ScaledTanh ParametricSoftplus".split():
    how = f'activation="{kind}", activation_alpha=0.3, activation_beta=0.6, activation_gamma=1.2'
    add_kernel(f"FusedGemm {kind}", f"y = FusedGemm<{how}>(a, b, c)", GEMM)
how = 'alpha=0.5, beta=2.0, transA=1, transB=1, activation="Tanh"'
add_kernel(
    "FusedGemm all", f"y = FusedGemm<{how}>(a, b, c)", {"a": (4, 3), "b": (2, 4), "c": (3, 1)}
)
add_kernel("FusedGemm no c", 'y = FusedGemm<activation="Tanh">(a, b)', {"a": (3, 4), "b": (4, 2)})

CONV = {"a": (2, 2, 5, 4), "w": (4, 2, 3, 2), "b": (4,)}
for kind, parameters in {
    "Relu": "",
    "Tanh": "",
    "Sigmoid": "",
    "HardSwish": "",
    "LeakyRelu": "0.3",
    "Clip": "-0.5, 0.7",
    "HardSigmoid": "0.3, 0.6",
}.items():
    how = f'activation="{kind}"' + (f", activation_params=[{parameters}]" if parameters else "")
    add_kernel(f"FusedConv {kind}", f"y = FusedConv<{how}>(a, w, b)", CONV)
add_kernel(
    "FusedConv all",
    """y = FusedConv<activation="Sigmoid", group=2, pads=[1, 0, 0, 1], strides=[2, 1],
        dilations=[1, 2], kernel_shape=[3, 2]>(a, w, b, z)""",
    {"a": (2, 4, 5, 4), "w": (4, 2, 3, 2), "b": (4,), "z": (2, 4, 2, 3)},
)
add_kernel(
    "FusedConv z", "y = FusedConv(a, w, , z)", {"a": (1, 2, 5), "w": (3, 2, 2), "z": (1, 3, 4)}
)
add_kernel(
    "FusedConv auto_pad",
    'y = FusedConv<auto_pad="SAME_UPPER", activation="Tanh">(a, w)',
    {"a": (1, 2, 5), "w": (3, 2, 2)},
)

# -- activations ---------------------------------------------------------------------------------


def gelu(x: np.ndarray) -> np.ndarray:
    """Return x P(x)."""
    from math import erf

    return 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2)))


def softmax_of_last_axis(x: np.ndarray) -> np.ndarray:
    """Return the softmax over the last axis."""
    made = np.exp(x - x.max(-1, keepdims=True))
    return made / made.sum(-1, keepdims=True)


def split_gelu(x: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the first half of x + b times the Gelu of the other."""
    left, right = np.split(x + b, 2, -1)
    return left * gelu(right)


XB = {"x": (2, 3, 4), "b": (4,)}
for opset in (18, 20):
    add_kernel(f"Gelu {opset}", "y = Gelu(x)", {"x": (2, 3)}, opset=opset)
    add_kernel(f"BiasGelu {opset}", "y = BiasGelu(x, b)", XB, opset=opset)
    add_kernel(f"FastGelu {opset}", "y = FastGelu(x, b)", XB, opset=opset)
add_kernel("FastGelu no bias", "y = FastGelu(x)", {"x": (2, 3)})
add_kernel("QuickGelu", "y = QuickGelu(x)", {"x": (2, 3)})
add_kernel("QuickGelu alpha", "y = QuickGelu<alpha=1.0>(x)", {"x": (2, 3)})
add_kernel("BiasSplitGelu", "y = BiasSplitGelu(x, b)", XB, formula=split_gelu)
add_kernel(
    "BiasAdd", "y = BiasAdd(x, b, z)", XB | {"z": (2, 3, 4)}, formula=lambda x, b, z: x + b + z
)
add_kernel("BiasSoftmax", "y = BiasSoftmax<axis=2, is_inner_broadcast=1>(x, b)", XB | {"b": (2, 1, 4)},
    formula=lambda x, b: softmax_of_last_axis(x + b))  # fmt: skip
add_kernel("BiasSoftmax axes", "y = BiasSoftmax<axis=1, is_inner_broadcast=0>(x, b)", XB | {"b": (3, 4)},
    formula=lambda x, b: softmax_of_last_axis((x + b).reshape(2, 12)).reshape(x.shape))  # fmt: skip
add_kernel("BiasDropout", "y, m = BiasDropout(x, b, z)", XB | {"z": (2, 3, 4)}, kinds={"m": "bool"},
    formula=lambda x, b, z: (x + b + z, np.ones(x.shape, bool)))  # fmt: skip
add_kernel("BiasDropout alone", "y = BiasDropout(x, b)", XB, formula=lambda x, b: x + b)
add_kernel("GatherND", "y = GatherND(x, i)", {"x": (3, 4)}, {"i": np.array([[0, 1], [2, 2]])})
add_kernel("Pad", "y = Pad(x, p, v)", {"x": (2, 3), "v": (1,)}, {"p": np.array([0, 1, 2, 0])})
add_kernel("Trilu", "y = Trilu<upper=0>(x, k)", {"x": (3, 4)}, {"k": np.array([1])})
add_kernel("ExpandDims", "y = ExpandDims(x, i)", {"x": (3, 4)}, {"i": one(1)})

add_kernel("GridSample", 'y = GridSample<mode="bilinear">(x, g)', {"x": (1, 2, 4, 4)},
    {"g": (RNG.random((1, 3, 3, 2)) - 0.5).astype(np.float32)})  # fmt: skip
how = "kernel_shape=[3, 3], strides=[2, 2], group=2, output_padding=[1, 0]"
add_kernel("ConvTransposeWithDynamicPads", f"y = ConvTransposeWithDynamicPads<{how}>(x, w, p, b)",
    {"x": (1, 2, 4, 4), "w": (2, 3, 3, 3), "b": (6,)}, {"p": np.array([1, 0, 2, 1])})  # fmt: skip


def fast_gelu(x: np.ndarray) -> np.ndarray:
    """Return the approximation of x P(x) by a tanh."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


add_kernel("GemmFastGelu", "y = GemmFastGelu(x, w, b)", {"x": (2, 3, 4), "w": (4, 5), "b": (5,)},
    formula=lambda x, w, b: fast_gelu(x @ w + b))  # fmt: skip


def group_norm(x, scale, shift, silu: bool = True, epsilon: float = 0.1) -> np.ndarray:
    """Return x (N, H, W, C), normalized in two groups of channels."""
    parts = x.reshape(len(x), -1, 2, x.shape[3] // 2)
    mean, deviation = parts.mean((1, 3), keepdims=True), parts.std((1, 3), keepdims=True)
    y = ((parts - mean) / np.sqrt(deviation**2 + epsilon)).reshape(x.shape) * scale + shift
    return y / (1 + np.exp(-y)) if silu else y


GROUPS = {"x": (2, 3, 2, 4), "s": (4,), "t": (4,)}
how = "groups=2, epsilon=0.1"
add_kernel("GroupNorm", f"y = GroupNorm<{how}, activation=1>(x, s, t)", GROUPS, formula=group_norm)
add_kernel("GroupNorm first", f"y = GroupNorm<{how}, activation=0, channels_last=0>(x, s, t)",
    GROUPS | {"x": (2, 4, 3, 2)}, formula=lambda x, s, t: np.moveaxis(
        group_norm(np.moveaxis(x, 1, 3), s, t, silu=False), 3, 1))  # fmt: skip
for shape in ((2, 3, 2, 4), (2, 4)):
    add_kernel(f"SkipGroupNorm {len(shape)}", f"y, u = SkipGroupNorm<{how}, activation=1>(x, s, t, z, b)",
        GROUPS | {"z": shape, "b": (4,)}, formula=lambda x, s, t, z, b: (
            group_norm(u := x + (z if z.ndim == 4 else z[:, None, None]) + b, s, t), u))  # fmt: skip

ROWS = {"x": (4, 3), "s": (5, 3)}
add_kernel("CDist", "y = CDist(x, s)", ROWS)
add_kernel("CDist root", 'y = CDist<metric="euclidean">(x, s)', ROWS)

# -- normalizations ------------------------------------------------------------------------------

LAYER = {"x": (2, 3, 4), "s": (4,)}
WIDE = {"x": (2, 3, 4), "s": (3, 4)}
SKIP = {"x": (2, 3, 4), "z": (2, 3, 4), "s": (4,), "t": (4,), "b": (4,)}
XZS, XSB, XZSB = ({n: SKIP[n] for n in names} for names in ("xzs", "xsb", "xzsb"))
HALF = {"half": True, "single": ("m", "r")}
SIMPLE = "SimplifiedLayerNormalization"
for name, node, shapes, options in (
    (SIMPLE, f"y, r = {SIMPLE}(x, s)", LAYER, {"half": True, "single": ("r",)}),
    (f"{SIMPLE} 23", f"y = {SIMPLE}<epsilon=0.1>(x, s)", LAYER, {"opset": 23}),
    (f"{SIMPLE} axis", f"y, r = {SIMPLE}<axis=1, epsilon=0.1>(x, s)", WIDE, {}),
    ("LayerNormalization 12", "y, m, r = LayerNormalization<axis=1, epsilon=0.1>(x, s, b)",
     WIDE | {"b": (3, 4)}, {"opset": 12}),
    (f"{SIMPLE} 12", f"y = {SIMPLE}(x, s)", LAYER, {"opset": 12}),
    ("SkipLayerNormalization", "y, m, r, u = SkipLayerNormalization<epsilon=0.1>(x, z, s, t, b)",
     SKIP, HALF),
    ("SkipLayerNormalization sum", "y, , , u = SkipLayerNormalization(x, z, s)", XZS, {}),
    ("SkipLayerNormalization 2", "y = SkipLayerNormalization(x, z, s, , b)",
     XSB | {"z": (3, 4)}, {}),
    ("SkipLayerNormalization 3", "y = SkipLayerNormalization(x, z, s, , b)",
     XSB | {"z": (1, 3, 4)}, {}),
    (f"Skip{SIMPLE}", f"y, m, r, u = Skip{SIMPLE}<epsilon=0.1>(x, z, s, b)", XZSB, HALF),
    (f"Skip{SIMPLE} 2", f"y = Skip{SIMPLE}(x, z, s)", {"x": (3, 4), "z": (3, 4), "s": (4,)},
     {"opset": 23}),
    (f"Skip{SIMPLE} 23", f"y, , r = Skip{SIMPLE}(x, z, s)", LAYER | {"z": (3, 4)}, {"opset": 23}),
    (f"Skip{SIMPLE} sum", f"y, , , u = Skip{SIMPLE}(x, z, s)", LAYER | {"z": (3, 4)}, {}),
):  # fmt: skip
    add_kernel(name, node, shapes, **options)

EMBED = {"w": (5, 4), "p": (6, 4), "k": (2, 4), "s": (4,), "t": (4,)}
PLAIN = {n: EMBED[n] for n in "wpst"}
IDS = {"i": i32([0, 1, 2], [3, 1, 1]), "g": i32([0, 1, 1], [0, 0, 1])}
MASK, AT = {"m": i32([1, 1, 0], [1, 0, 0])}, {"a": i32([2, 0, 5], [1, 1, 3])}
ONE_SEGMENT, SAME = {"i": IDS["i"]}, {"a": i32([2, 0, 5])}
for name, outputs, how, operands, shapes, given in (
    ("", "y, l, e", "<epsilon=0.1>", "i, g, w, p, k, s, t, m", EMBED, IDS | MASK),
    (" places", "y, l, e", "", "i, g, w, p, k, s, t, , a", EMBED, IDS | AT),
    (" same places", "y, l", "", "i, , w, p, , s, t, , a", PLAIN, ONE_SEGMENT | SAME),
    (" no segments", "y, l", "", "i, , w, p, , s, t", PLAIN, ONE_SEGMENT),
):
    node = f"{outputs} = EmbedLayerNormalization{how}({operands})"
    add_kernel(f"EmbedLayerNormalization{name}", node, shapes, given, kinds={"l": "int32"})

# -- attention -----------------------------------------------------------------------------------

ATT = {"x": (2, 3, 5), "w": (5, 24), "b": (24,)}
LOW = "mask_filter_value=-2.0"
for name, attributes, mask in (
    ("none", "", None),
    ("scale causal", "scale=0.3, unidirectional=1, ", None),
    ("ends", f"{LOW}, ", i32(2, 3)),
    ("ends and starts", f"{LOW}, unidirectional=1, ", i32(2, 3, 1, 2)),
    ("lengths", f"{LOW}, ", i32(2, 3, 0, 2, 5, 0, 2, 5)),
    ("keys", f"{LOW}, ", i32([1, 1, 0], [0, 1, 1])),
    ("keys causal", f"{LOW}, unidirectional=1, ", i32([1, 1, 0], [0, 1, 1])),
    ("pairs", f"{LOW}, ", flags_with_first(2, 3, 3)),
    ("pairs causal", f"{LOW}, unidirectional=1, ", flags_with_first(2, 3, 3)),
    ("default mask", "", i32([1, 1, 0], [0, 1, 1])),
):
    more = {} if mask is None else {"m": mask}
    add_kernel(
        f"Attention {name}",
        f"y = Attention<{attributes}num_heads=2>(x, w, b{', m' * bool(more)})",
        ATT,
        more,
    )
PAST, BIAS = (
    ATT | {"p": (2, 2, 2, 2, 4)},
    {f"{b} {h}": (b, h, 3, 3) for h in (1, 2) for b in (1, 2)},
)
for name, outputs, how, operands, shapes, given in (
    *((f"bias {n}", "y", "", ", b, , , r", ATT | {"r": r}, {}) for n, r in BIAS.items()),
    ("bias and mask", "y", "", ", b, m, , r", ATT | {"r": (1, 2, 3, 3)}, {"m": i32(2, 3)}),
    ("past", "y, q", "", ", b, , p", PAST, {}),
    (
        "past causal",
        "y, q",
        f", unidirectional=1, {LOW}",
        ", b, m, p",
        PAST,
        {"m": flags_with_first(2, 5)},
    ),
    ("past one row", "y, q", ", unidirectional=1", ", b, , p", PAST | {"x": (2, 1, 5)}, {}),
    ("present", "y, q", "", ", b", ATT, {}),
    ("sizes", "y", ", qkv_hidden_sizes=[8, 8, 4]", ", b", ATT | {"w": (5, 20), "b": (20,)}, {}),
):
    node = f"{outputs} = Attention<num_heads=2{how}>(x, w{operands})"
    add_kernel(f"Attention {name}", node, shapes, given)


def attended(q, k, v, bias=0.0, mask=0.0) -> np.ndarray:
    """Return the attention of Q, K and V (batch, heads, rows, size)."""
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3]) + bias + mask
    y = (softmax_of_last_axis(scores) @ v).transpose(0, 2, 1, 3)
    return y.reshape(*y.shape[:2], -1)


def split_heads(x: np.ndarray, heads: int = 2) -> np.ndarray:
    """Return (batch, heads, rows, size)."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


MEGATRON = np.tril(np.ones((6, 6), np.int32))[None, None].repeat(2, 0)
add_kernel("Attention of all places", "y = Attention<num_heads=2>(x, w, b, m)", ATT, {"m": MEGATRON},
    formula=lambda x, w, b, m: attended(*map(split_heads, np.split(x @ w + b, 3, -1)), mask=(m[:, :, :3, :3] - 1) * 1e4))  # fmt: skip
add_kernel("Attention no bias", "y = Attention<num_heads=2>(x, w)", {n: ATT[n] for n in "xw"},
    formula=lambda x, w: attended(*map(split_heads, np.split(x @ w, 3, -1))))  # fmt: skip

QKV = {"q": (2, 3, 8), "k": (2, 4, 8), "v": (2, 4, 6)}
SELF = {"q": (2, 3, 8), "k": (2, 3, 8), "v": (2, 3, 8)}
KEYS = {"k": (2, 2, 4, 4), "v": (2, 2, 4, 4)}
BEFORE = {"c": (2, 2, 2, 4), "d": (2, 2, 2, 4)}
for name, attributes, shapes, more, given in (
    ("plain", "", QKV, "", {}),
    ("scale", "scale=0.3, ", QKV, "", {}),
    ("bias", "", QKV | {"b": (22,)}, ", b", {}),
    ("causal", "unidirectional=1, ", SELF, "", {}),
    ("causal one row", "unidirectional=1, ", SELF | {"q": (2, 1, 8)}, "", {}),
    ("lengths", f"{LOW}, ", QKV, ", , m", {"m": i32(2, 3)}),
    ("many lengths", f"{LOW}, ", QKV, ", , m", {"m": i32(2, 3, 0, 3, 6, 0, 4, 8)}),
    ("keys", f"{LOW}, ", QKV, ", , m", {"m": flags_with_first(2, 4)}),
    ("pairs", f"{LOW}, unidirectional=1, ", SELF, ", , m", {"m": flags_with_first(2, 3, 3)}),
    ("relative", "", QKV | {"r": (1, 2, 3, 4)}, ", , , r", {}),
    (
        "relative and keys",
        f"{LOW}, ",
        QKV | {"r": (2, 1, 3, 4)},
        ", , m, r",
        {"m": flags_with_first(2, 4)},
    ),
    ("other keys", "", {"q": (2, 3, 8)} | KEYS, "", {}),
    ("other keys and bias", "", {"q": (2, 3, 8), "b": (24,)} | KEYS, ", b", {}),
):
    node = f"MultiHeadAttention<{attributes}num_heads=2>(q, k, v{more})"
    add_kernel(f"MultiHeadAttention {name}", f"y = {node}", shapes, given)
for name, attributes, given in (
    ("past", "", {}),
    ("past causal", "unidirectional=1, ", {}),
    ("past keys", f"{LOW}, ", {"m": flags_with_first(2, 5)}),
):
    node = f"MultiHeadAttention<{attributes}num_heads=2>(q, k, v, , {'m' * bool(given)}, , c, d)"
    add_kernel(f"MultiHeadAttention {name}", f"y, e, f, s = {node}", SELF | BEFORE, given)
add_kernel("MultiHeadAttention packed keys", "y = MultiHeadAttention<num_heads=2>(q, k)", {"q": (2, 3, 8), "k": (2, 4, 2, 2, 4)},
    formula=lambda q, k: attended(split_heads(q), *k.transpose(3, 0, 2, 1, 4)))  # fmt: skip
add_kernel("MultiHeadAttention packed", "y = MultiHeadAttention<num_heads=2>(q, , , b)", {"q": (2, 3, 2, 3, 4), "b": (24,)},
    formula=lambda q, b: attended(*(q + b.reshape(3, 2, 4).swapaxes(0, 1)).transpose(3, 0, 2, 1, 4)))  # fmt: skip

# -- one buffer for past and present, of which the first rows are valid ---

HELD = {"c": (2, 2, 6, 4), "d": (2, 2, 6, 4)}
for name, rows, more, given in (
    ("one row", 1, ", , , ", {}),
    ("rows", 2, ", , , ", {}),
    ("bias and keys", 2, ", b, m, ", {"m": flags_with_first(2, 5)}),
):
    shapes = dict.fromkeys("qkv", (2, rows, 8)) | HELD | ({"b": (24,)} if given else {})
    node = f"y, e, f = MultiHeadAttention<num_heads=2, {LOW}>(q, k, v{more}, c, d, n)"
    add_kernel(f"MultiHeadAttention buffer, {name}", node, shapes, given | {"n": i32(3)})
ONE_ROW = dict.fromkeys("qkv", (2, 1, 8))
HOW = f"num_heads=2, past_present_share_buffer=1, output_qk=1, {LOW}"
for name, more, shapes, given in (
    ("plain", ", , , c, d, n", {}, {}),
    (
        "mask",
        ", m, r, c, d, n, , , b",
        {"r": (1, 2, 1, 4), "b": (24,)},
        {"m": flags_with_first(2, 4)},
    ),
):
    node = f"y, e, f, z = DecoderMaskedMultiHeadAttention<{HOW}>(q, k, v{more})"
    add_kernel(f"DecoderMaskedMultiHeadAttention {name}", node, ONE_ROW | HELD | shapes,
        given | {"n": i32(3)})  # fmt: skip
node = f"y = DecoderMaskedMultiHeadAttention<num_heads=2, {LOW}>(q, k, v, m)"
add_kernel(
    "DecoderMaskedMultiHeadAttention keys",
    node,
    {"q": (2, 1, 8)} | KEYS,
    {"m": flags_with_first(2, 4)},
)


def with_buffer(x, w, b, p, n) -> tuple[np.ndarray, np.ndarray]:
    """Return the attention to three rows of a buffer and the new ones, and the buffer."""
    q, k, v = (split_heads(part) for part in np.split(x @ w + b, 3, -1))
    held = p.copy()
    held[0, :, :, 3:5], held[1, :, :, 3:5] = k, v
    return attended(q, held[0, :, :, :5], held[1, :, :, :5]), held


node = "y, g = Attention<num_heads=2, past_present_share_buffer=1>(x, w, b, , p, , n)"
add_kernel("Attention buffer", node, ATT | {"x": (2, 2, 5), "p": (2, 2, 2, 6, 4)}, {"n": i32(3)},
    formula=with_buffer)  # fmt: skip

# -- rotation and groups -------------------------------------------------------------------------

TURNS, AROUND = {"c": (6, 2), "s": (6, 2)}, {"p": np.array([[0, 1, 5], [2, 3, 1]])}
for interleaved in (0, 1):
    for name, how, x in (
        ("3", "", (2, 3, 8)),
        ("4", "", (2, 2, 3, 4)),
        ("part", "num_heads=2, rotary_embedding_dim=4, ", (2, 3, 16)),
        ("part of 4", "num_heads=2, rotary_embedding_dim=4, ", (2, 2, 3, 8)),
    ):
        for given in (AROUND, {"p": np.array([2])}):
            node = f"y = RotaryEmbedding<{how}interleaved={interleaved}, scale=2.0>(x, p, c, s)"
            add_kernel(
                f"RotaryEmbedding {interleaved} {name} {given['p'].ndim}",
                node,
                {"x": x} | TURNS,
                given,
                half=True,
            )

GROUP = {"q": (2, 4, 32), "k": (2, 4, 16), "v": (2, 4, 16)}
ALL = {"l": i32(3, 3), "t": one(4)}
HOW = "num_heads=4, kv_num_heads=2"
ROTARY = {"q": (2, 4, 64), "k": (2, 4, 32), "v": (2, 4, 32), "c": (8, 8), "s": (8, 8)}
for name, attributes, shapes, more, given in (
    ("plain", "", GROUP, "", {}),
    ("scale softcap", ", scale=0.5, softcap=1.5", GROUP, "", {}),
    ("window", ", local_window_size=2", GROUP, "", {}),
    ("smooth", ", smooth_softmax=1", GROUP, "", {}),
    ("sink", "", GROUP | {"h": (4,)}, ", , , , , h", {}),
    ("bias softcap", ", softcap=1.5", GROUP | {"r": (1, 4, 4, 4)}, ", , , , r", {}),
    ("bias of batch", "", GROUP | {"r": (2, 1, 4, 4)}, ", , , , r", {}),
    ("not causal", ", causal=0", GROUP, "", {}),
    ("rotary", ", do_rotary=1", ROTARY, ", c, s", {}),
    ("rotary interleaved", ", do_rotary=1, rotary_interleaved=1", ROTARY, ", c, s", {}),
    ("rotary places", ", do_rotary=1", ROTARY, ", c, s, p", {"p": np.array([[2, 9, 9, 9]] * 2)}),
):
    node = f"y, e, f = GroupQueryAttention<{HOW}{attributes}>(q, k, v, , , l, t{more})"
    add_kernel(f"GroupQueryAttention {name}", node, shapes, ALL | given, half=True)
PACKED = f"y = GroupQueryAttention<{HOW}>(q, , , , , l, t)"
add_kernel("GroupQueryAttention packed", PACKED, {"q": (2, 4, 64)}, ALL)
for kind in (1, 2):
    node = f"y, e, f, z = GroupQueryAttention<{HOW}, qk_output={kind}>(q, k, v, , , l, t)"
    add_kernel(f"GroupQueryAttention scores {kind}", node, GROUP, ALL)
for name, attributes, rows, held, given in (
    ("one more", "", 1, 3, {"l": i32(3, 3), "t": one(4)}),
    ("one more, of lengths", ", local_window_size=2", 1, 3, {"l": i32(2, 3), "t": one(4)}),
    ("long buffer", "", 1, 6, {"l": i32(3, 2), "t": one(4)}),
    ("long buffer, all new", "", 4, 6, ALL),
    ("empty past", "", 4, 0, ALL),
):
    shapes = {n: (*x[:1], rows, *x[2:]) if n in "qkv" else x for n, x in ROTARY.items()}
    shapes |= {"a": (2, 2, held, 16), "b": (2, 2, held, 16)}
    node = (
        f"y, e, f = GroupQueryAttention<{HOW}{attributes}, do_rotary=1>(q, k, v, a, b, l, t, c, s)"
    )
    add_kernel(f"GroupQueryAttention {name}", node, shapes, given)
ONE = {n: (1, *x[1:]) if n in "qkv" else x for n, x in ROTARY.items()}
node = f"y, e, f = GroupQueryAttention<{HOW}, do_rotary=1>(q, k, v, a, b, l, t, c, s, p)"
add_kernel("GroupQueryAttention several more", node, ONE | {"a": (1, 2, 3, 16), "b": (1, 2, 3, 16)},
    {"l": i32(6), "t": one(7), "p": np.array([[3, 5, 4, 6]])})  # fmt: skip


def normed(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return x over the root of its mean square, scaled."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 0.1) * scale


def with_norms(q, k, v, g, h, *_) -> tuple[np.ndarray, ...]:
    """Return the attention of a row to the keys before it, and what it remembers."""
    q, k, v = normed(split_heads(q, 4), g), normed(split_heads(k), h), split_heads(v)
    later = np.triu(np.full((4, 4), -np.inf), 1)
    return attended(q, k.repeat(2, 1), v.repeat(2, 1), mask=later), k, v


add_kernel(
    "GroupQueryAttention norms",
    f"y, e, f = GroupQueryAttention<{HOW}, qk_norm_epsilon=0.1>"
    "(q, k, v, , , l, t, , , , , , , , g, h)",
    GROUP | {"g": (8,), "h": (8,)},
    ALL,
    formula=with_norms,
)


# -- other products ------------------------------------------------------------------------------


def complex_numbers(x: np.ndarray) -> np.ndarray:
    """Return the numbers whose parts are along the last axis."""
    return x[..., 0] + 1j * x[..., 1]


def two_parts(z: np.ndarray) -> np.ndarray:
    """Return the parts of complex numbers along a new axis."""
    return np.stack([z.real, z.imag], -1)


COMPLEX = {"a": (2, 3, 2), "b": (3, 2)}
add_kernel(
    "ComplexMul", "y = ComplexMul(a, b)", COMPLEX,
    formula=lambda a, b: two_parts(complex_numbers(a) * complex_numbers(b)))  # fmt: skip
add_kernel(
    "ComplexMulConj", "y = ComplexMulConj(a, b)", COMPLEX,
    formula=lambda a, b: two_parts(complex_numbers(a) * complex_numbers(b).conj()))  # fmt: skip
EMBEDDED = {"e": (2, 3, 4), **dict.fromkeys("qrkt", (2, 2, 3, 4))}
add_kernel(
    "GemmaRotaryEmbedding", "y, z = GemmaRotaryEmbedding(e, q, r, k, t)", EMBEDDED,
    formula=lambda e, q, r, k, t: tuple(
        x * np.cos(e)[:, None] + turned * np.sin(e)[:, None] for x, turned in ((q, r), (k, t))
    ))  # fmt: skip
SQUARE = RNG.standard_normal((2, 3, 3)).astype(np.float32) + 3 * np.eye(3, dtype=np.float32)
add_kernel("Inverse", "y = Inverse(a)", {}, given={"a": SQUARE})
for activation in ("silu", "swish", "sigmoid"):
    add_kernel(
        f"GatedRMSNorm {activation}",
        f'y = GatedRMSNorm<activation="{activation}", epsilon=0.1>(x, s, g)',
        {"x": (2, 3, 4), "s": (4,), "g": (2, 3, 4)}, half=True)  # fmt: skip
add_kernel(
    "GatedRMSNorm heads", "y = GatedRMSNorm(x, s, g)",
    {"x": (2, 3, 8), "s": (4,), "g": (2, 3, 8)}, half=True)  # fmt: skip

THREE = {"p": RNG.integers(0, 7, (3, 2, 3))}  # times, heights and widths
for layout, interleaved, sections, how, x in (
    (0, 0, [3, 1, 2], "num_heads=2, ", (2, 3, 24)),
    (0, 1, [2, 0, 4], "", (2, 2, 3, 12)),
    (1, 0, [2, 2, 2], "", (2, 2, 3, 12)),
    (1, 1, [3, 2, 1], "num_heads=2, rotary_embedding_dim=12, ", (2, 3, 32)),
):
    add_kernel(
        f"MRotaryEmbedding {layout} {interleaved}",
        f"y = MRotaryEmbedding<{how}mrope_section={sections}, mrope_layout={layout}, "
        f"interleaved={interleaved}>(x, p, c, s)",
        {"x": x, "c": (7, 6), "s": (7, 6)},
        THREE,
        half=True,
    )

# -- models --------------------------------------------------------------------------------------

TYPES = {"f2": "float16", "f4": "float", "i4": "int32", "i8": "int64"}


def kernel_model(
    case: KernelCase, known: str = "lengths", feed: dict[str, np.ndarray] | None = None
) -> onnx.ModelProto:
    """Return the model of a case; what onnxruntime calls standard has no domain.

    Of the shapes of inputs, "lengths", "symbols" or "nothing" is known.
    """
    feed = feed or case.feed
    standard = re.search("= (Simplified)?LayerNormalization", case.node)
    node = case.node if standard else case.node.replace("= ", "= com.microsoft.", 1)
    inputs = []
    for name, array in feed.items():
        symbols = [f"{name}{i}" for i in range(array.ndim)]
        lengths = array.shape if known == "lengths" else symbols
        inputs.append(f"{TYPES[array.dtype.str[1:]]}[{', '.join(map(str, lengths))}] {name}")
    kind = "float16" if any(array.dtype == np.float16 for array in feed.values()) else "float"
    outputs = ", ".join(f"{case.kinds.get(y, kind)} {y}" for y in case.outputs if y)
    text = f"g ({', '.join(inputs)}) => ({outputs}) {{ {node} }}"
    domains = {"com.microsoft": 1}
    made = parse_model(text, opset=case.opset, domains=domains, output_shapes=False)
    for x in made.graph.input:
        if known == "nothing" and feed[x.name].ndim > 0:
            x.type.tensor_type.ClearField("shape")
    return made
