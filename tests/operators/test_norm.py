"""Normalizations, losses that are operators, and quantization: against PyTorch, and at edges."""

from __future__ import annotations

from itertools import product

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxgrad import DerivativeOptions, NoGradientRule, check_gradient, onnx_derivative
from tests.support.cases import KINDS, typed
from tests.support.errors import naming
from tests.support.models import operator_names, parse_model
from tests.support.packs import Part, failures, gradients_on
from tests.support.running import in_sweep

torch = pytest.importorskip("torch")
F = torch.nn.functional
RNG = np.random.default_rng(0)


def norm_model(body, given, opset=23, outputs="y"):
    """Return a model of `body` whose inputs have the names, types and shapes of `given`."""
    kinds = {np.dtype(t): t.__name__ for t in (np.float16, np.uint8)}
    kinds |= {**KINDS, np.dtype(np.float32): "float"}
    inputs = ", ".join(f"{typed(kinds[a.dtype], a.shape)} {n}" for n, a in given.items())
    kind = "float16" if any(a.dtype == np.float16 for a in given.values()) else "float"
    ys = ", ".join(f"{kind} {y}" for y in outputs.split())
    made = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}]> g ({inputs}) => ({ys}) {{ {body} }}'
    )
    for y in made.graph.output:
        y.type.tensor_type.ClearField("shape")
    return made


def gradients_for(made, given, seeds, inputs=None):
    """Return the gradient by the inputs, all floats on the way, `seeds` arriving at the outputs."""
    session = ort.InferenceSession(
        onnx_derivative(made, weights=[], inputs=inputs).SerializeToString(),
        providers=["CPUExecutionProvider"],
    )
    fed = {**given, **{f"{name}_grad": g for name, g in seeds.items()}}
    taken = {x.name for x in session.get_inputs()}
    found = session.run(None, {n: a for n, a in fed.items() if n in taken})
    names = (y.name.removesuffix("_grad") for y in session.get_outputs())
    return dict(zip(names, found, strict=True))


def floats_of(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def col(v):
    return v[:, None]


def batch_norm(t, x, s, b, m, v):
    axes = [0, *range(2, x.ndim)]
    y = F.batch_norm(x, None, None, s, b, training=True, eps=1e-5)
    new = [0.7 * old + 0.3 * now for old, now in ((m, x.mean(axes)), (v, x.var(axes, False)))]
    return y, *new


def layer_norm(t, x, s, b):
    r = (x.var((-2, -1), False, keepdim=True) + 1e-5).rsqrt()
    return F.layer_norm(x, s.shape, s, b), x.mean((-2, -1), keepdim=True), r


def standardized(t, x):
    return ((x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), False, keepdim=True),)


S, B, V = floats_of(6), floats_of(6), np.abs(floats_of(6))
SAME = {  # node -> the same in PyTorch, of the same operands
    "y, m, v = BatchNormalization<training_mode=1, momentum=0.7>(x, s, b, i, j)": (
        batch_norm, {"x": floats_of(4, 6, 5), "s": S, "b": B, "i": floats_of(6), "j": V}),
    "y = BatchNormalization(x, s, b, i, j)": (
        lambda t, x, s, b, i, j: ((x - col(i)) / (col(j) + 1e-5).sqrt() * col(s) + col(b),),
        {"x": floats_of(4, 6, 5), "s": S, "b": B, "i": floats_of(6), "j": V}),
    "y, m, v = LayerNormalization<axis=1>(x, s, b)": (
        layer_norm, {"x": floats_of(4, 6, 5), "s": floats_of(6, 5), "b": floats_of(6, 5)}),
    "y = RMSNormalization<epsilon=0.001>(x, s)": (
        lambda t, x, s: (F.rms_norm(x, s.shape, s, 1e-3),), {"x": floats_of(4, 6), "s": S}),
    "y = InstanceNormalization(x, s, b)": (
        lambda t, x, s, b: (F.instance_norm(x, weight=s, bias=b),),
        {"x": floats_of(2, 6, 3, 4), "s": S, "b": B}),
    "y = GroupNormalization<num_groups=3>(x, s, b)": (
        lambda t, x, s, b: (F.group_norm(x, 3, s, b),),
        {"x": floats_of(2, 6, 3, 4), "s": S, "b": B}),
    "y = LRN<size=3, alpha=0.7, beta=0.6, bias=1.5>(x)": (
        lambda t, x: (F.local_response_norm(x, 3, 0.7, 0.6, 1.5),), {"x": floats_of(2, 6, 3, 4)}),
    "y = MeanVarianceNormalization(x)": (standardized, {"x": floats_of(2, 3, 4, 5)}),
    "y = LpNormalization<axis=1, p=1>(x)": (
        lambda t, x: (F.normalize(x, 1.0, 1),), {"x": floats_of(4, 6)}),
    "y = LpNormalization<axis=0>(x)": (
        lambda t, x: (F.normalize(x, 2.0, 0),), {"x": floats_of(4, 6)}),
}  # fmt: skip


@pytest.mark.parametrize("body", SAME, ids=lambda body: body.split("(")[0])
def test_gradient_is_that_of_torch(body):
    """Order two as well: in float32 statistics come from the kernel, in float64 from the rule."""
    function, given = SAME[body]
    names = body.split(" = ")[0].replace(",", "")
    made = norm_model(body, given, outputs=names)
    leaves = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in given.values()]
    ys = function(torch, *leaves)
    ups = [torch.tensor(floats_of(*y.shape), dtype=torch.float64, requires_grad=True) for y in ys]
    first = torch.autograd.grad(ys, leaves, ups, create_graph=True)
    seeds = [u.detach().numpy().astype(np.float32) for u in ups]
    seeds = dict(zip(names.split(), seeds, strict=True))
    found, expected = gradients_for(made, given, seeds), dict(zip(given, first, strict=True))
    assert set(found) == set(expected)
    for name in found:
        np.testing.assert_allclose(found[name], expected[name].detach(), rtol=1e-4, atol=1e-5)

    made, again = onnx_derivative(made, weights=[]), [floats_of(*g.shape) for g in first]
    moving = [(g, torch.tensor(u)) for g, u in zip(first, again, strict=True) if g.requires_grad]
    ys, vs = zip(*moving, strict=True)
    second = torch.autograd.grad(ys, [*leaves, *ups], vs, allow_unused=True)
    fed = {**given, **{f"{n}_grad": u for n, u in seeds.items()}}
    expected = dict(zip([*given, *(f"{n}_grad" for n in seeds)], second, strict=True))
    up = {f"{n}_grad": u for n, u in zip(given, again, strict=True)}
    for name, found in gradients_for(made, fed, up).items():
        np.testing.assert_allclose(found, expected[name], rtol=1e-3, atol=1e-4)


LABELS = {(4,): [2, 0, 1, 2], (4, 2): [[1, 0], [0, 1], [2, 2], [1, 0]]}


@pytest.mark.parametrize("ignored", [-100, 1, "all"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("kind", [in_sweep(np.int32), np.int64])
@pytest.mark.parametrize("shape", [in_sweep((4,)), (4, 2)])
def test_loss_is_that_of_torch(shape, kind, reduction, ignored):
    """Also where every label is ignored: the mean is NaN, its gradient zero."""
    labels = np.array(LABELS[shape], kind)
    if ignored == "all":
        labels, ignored = np.full_like(labels, -1), -1
    x = floats_of(4, 3, *shape[1:])
    for node, function in (
        ("NegativeLogLikelihoodLoss", F.nll_loss),
        ("SoftmaxCrossEntropyLoss", F.cross_entropy),
    ):
        attributes = f'reduction="{reduction}", ignore_index={ignored}'
        for w in (None, np.array([0.3, 2, 1], np.float32)):
            given = {"x": x, "t": labels} | ({} if w is None else {"w": w})
            made = norm_model(f"y = {node}<{attributes}>({', '.join(given)})", given, 18)
            leaf = torch.tensor(x, requires_grad=True)
            weight = None if w is None else torch.tensor(w)
            target = torch.tensor(labels.astype(np.int64))
            y = function(leaf, target, weight, reduction=reduction, ignore_index=ignored)
            up = floats_of(*y.shape)
            y.backward(torch.tensor(up))
            found = gradients_for(made, given, {"y": up})
            np.testing.assert_allclose(found["x"], leaf.grad, rtol=1e-5, atol=1e-6)
            assert np.isfinite(found.get("w", 0)).all()


SIZES_OF_LRN = [1, 2, 3, 4, 7]
SHAPES_OF_LRN = [(3, 4), (2, 5, 3), (2, 3, 2, 2), (1, 4, 1, 2, 2)]


def test_lrn_of_what_onnxruntime_cannot_run():
    """It knows four axes and odd sizes only; the forward is that of the reference."""
    parts = []
    for size, shape in product(SIZES_OF_LRN, SHAPES_OF_LRN):
        given = {"x": floats_of(*shape)}
        made = norm_model(f"y = LRN<size={size}, alpha=0.7, bias=1.5>(x)", given)
        parts.append(Part(f"{size} {shape}", made, given, ("x",)))
    assert failures(parts, gradients_on("reference")) == []


@pytest.mark.sweep
@pytest.mark.parametrize("shape", SHAPES_OF_LRN)
@pytest.mark.parametrize("size", SIZES_OF_LRN)
def test_second_gradient_of_lrn(size, shape):
    made = norm_model(f"y = LRN<size={size}, alpha=0.7, bias=1.5>(x)", {"x": floats_of(*shape)})
    report = check_gradient(onnx_derivative(made))  # which runs on onnxruntime
    assert report.ok, str(report)


def test_where_the_norm_is_zero():
    for p in (1, 2):
        x = np.array([[0, 0], [3, 4]], np.float32)
        made = norm_model(f"y = LpNormalization<p={p}>(x)", {"x": x})
        dx = gradients_for(made, {"x": x}, {"y": x + 1})["x"]
        np.testing.assert_array_equal(dx[0], 0)
        assert np.abs(dx[1]).max() > 0.01
    x = np.array([[2, 2], [3, 4]], np.float32)
    made = norm_model("y = MeanVarianceNormalization<axes=[1]>(x)", {"x": x})
    assert np.isfinite(gradients_for(made, {"x": x}, {"y": x})["x"]).all()


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        ([-1, 2, 2], [-1, 0.5, 0.5]),
        ([1, 3, 4], [0, 0, 1]),
        ([-1, -1, -3], [0, 0, -1]),
        ([0, 0, 2], [-0.25, -0.25, 1]),  # half of a tie goes to the 0 that is always included
        ([0, 0, 0], [0, 0, 0]),
    ],
)
def test_scale_of_dynamic_quantization(x, expected):
    x = np.array(x, np.float32)
    made = norm_model("q, y, z = DynamicQuantizeLinear(x)", {"x": x})
    dx = gradients_for(made, {"x": x}, {"y": np.array(255, np.float32)})["x"]
    np.testing.assert_allclose(dx, expected, rtol=1e-6)


def test_quantized_and_back_has_the_gradient_of_its_last_scale():
    x, s = floats_of(3, 4), np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    body = "q = QuantizeLinear<axis=-1>(x, s)  y = DequantizeLinear<axis=-1>(q, s)"
    with pytest.raises(NoGradientRule, match=naming("QuantizeLinear", "'q'", "straight_through")):
        check_gradient(norm_model(body, {"x": x, "s": s}), feed={"x": x}, inputs=["x"])
    up = floats_of(3, 4)
    found = gradients_for(norm_model(body, {"x": x, "s": s}), {"x": x, "s": s}, {"y": up}, ["s"])
    steps = np.clip(np.rint(x / s), 0, 255)
    np.testing.assert_allclose(found["s"], (up * steps).sum(0), rtol=1e-5)


def test_dequantized_in_another_dtype():
    x, s = np.arange(12, dtype=np.uint8).reshape(3, 4), np.array([1, 2, 0.5, 4], np.float16)
    made = norm_model("y = DequantizeLinear<axis=1, output_dtype=1>(x, s)", {"x": x, "s": s})
    made.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    up = floats_of(3, 4)
    ds = gradients_for(made, {"x": x, "s": s}, {"y": up})["s"]
    assert ds.dtype == np.float16
    np.testing.assert_allclose(ds, (up * x).sum(0), rtol=1e-3)


def test_a_float8_has_no_gradient():
    text = """<ir_version: 10, opset_import: ["": 21]>
        g (float[3] x, float s) => (float[3] y) {{ q = {}  y = DequantizeLinear(q, s) }}"""
    made = onnx.parser.parse_model(text.format("Cast<to=17>(x)"))
    with pytest.raises(NoGradientRule, match=naming("'q'", "FLOAT8E4M3FN", "use float16 or wider")):
        onnx_derivative(made)
    assert len(onnx_derivative(made, inputs=["s"]).graph.output) == 1
    made = onnx.parser.parse_model(
        text.replace("float[3] x", "float8e4m3fn[3] x").format("Identity(x)")
    )
    assert [y.name for y in onnx_derivative(made).graph.output] == ["s_grad"]
    with pytest.raises(ValueError, match="'x' holds FLOAT8E4M3FN"):
        onnx_derivative(made, inputs=["x"])


@pytest.mark.parametrize("ratio", [0.0, 0.4])
def test_ratio_of_dropout(ratio):
    """The mask held fixed, y = x mask / (1 - p) has the slope y / (1 - p) in p."""
    given = {"x": floats_of(50), "r": np.array(ratio, np.float32), "t": np.array(True)}
    made = norm_model("y = Dropout<seed=1>(x, r, t)", given)
    options = DerivativeOptions.KeepOutputs | DerivativeOptions.FillGrad
    made = onnx_derivative(made, weights=[], options=options)
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    for training in (True, False):
        dx, dr, y = session.run(None, {**given, "t": np.array(training)})
        np.testing.assert_allclose(dx, y / given["x"], rtol=1e-5)
        np.testing.assert_allclose(dr, y.sum() / (1 - ratio) if training else 0, rtol=1e-4)


def test_half_precision_in_the_statistics():
    """Sums of squares beyond 65504 do not overflow."""
    x = (100 * floats_of(4, 64)).astype(np.float16)
    s = np.ones(64, np.float16)
    for node in ("LayerNormalization", "RMSNormalization"):
        made = norm_model(f"y = {node}(x, s)", {"x": x, "s": s})
        up = np.ones((4, 64), np.float16)
        up[:, ::2] = 0
        found = gradients_for(made, {"x": x, "s": s}, {"y": up})
        wide = {"x": x.astype(np.float32), "s": s.astype(np.float32)}
        single = gradients_for(
            norm_model(f"y = {node}(x, s)", wide), wide, {"y": up.astype(np.float32)}
        )
        for name in ("x", "s"):
            assert found[name].dtype == np.float16
            np.testing.assert_allclose(found[name], single[name], rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("stash_type", [1, 16])
def test_layers_whose_statistics_are_stated_to_be_less_precise(stash_type):
    """In float32 the rule takes the statistics of the node, if they are of float32."""
    given = {"x": floats_of(4, 6), "s": S, "b": B}
    node = f"y = LayerNormalization<epsilon=0.1, stash_type={stash_type}>(x, s, b)"
    made, up = norm_model(node, given, 17), floats_of(4, 6)
    operators = operator_names(onnx_derivative(made, weights=[]))
    assert ("LayerNormalization" in operators) == (stash_type == 1)
    leaves = [torch.tensor(a, requires_grad=True) for a in given.values()]
    F.layer_norm(leaves[0], (6,), *leaves[1:], eps=0.1).backward(torch.tensor(up))
    found = gradients_for(made, given, {"y": up})
    for name, leaf in zip(given, leaves, strict=True):
        np.testing.assert_allclose(found[name], leaf.grad, rtol=1e-4, atol=1e-5)


def packed(values: np.ndarray, bits: int) -> np.ndarray:
    """Return numbers of few bits along the last axis in bytes, the first in the lowest bits."""
    count = 8 // bits
    rest = -values.shape[-1] % count
    values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, rest)])
    shifts = bits * np.arange(count)
    return (values.reshape(*values.shape[:-1], -1, count) << shifts).sum(-1).astype(np.uint8)


@pytest.mark.parametrize("opset", [20, 21])
@pytest.mark.parametrize("zeros", ["", "bytes", "floats"])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_products_with_a_weight_of_few_bits(bits, ordered, zeros, opset):
    """The gradient is a product with the weight by its formula; 40 columns end within a block."""
    n, k, block, blocks, rng = 5, 40, 16, 3, np.random.default_rng(0)
    steps = rng.integers(0, 2**bits, (n, blocks * block))
    scales = rng.uniform(0.5, 1, (n, blocks)).astype(np.float32)
    zero = rng.integers(0, 2**bits, (n, blocks)) if zeros else np.full((n, blocks), 2 ** (bits - 1))
    of_column = rng.integers(0, blocks, k) if ordered else np.arange(k) // block
    weights = {"w": packed(steps.reshape(n, blocks, block), bits), "s": scales}
    weights |= {"bytes": {"z": packed(zero, bits)}, "floats": {"z": np.float32(zero)}}.get(
        zeros, {}
    )
    weights |= {"o": of_column.astype(np.int32)} if ordered else {}
    operands = ", ".join(v if v in "xws" or v in weights else "" for v in "xwszo").rstrip(", ")
    node = f"com.microsoft.MatMulNBits<K={k}, N={n}, bits={bits}, block_size={block}>({operands})"
    text = f"g (float[2,3,{k}] x) => (float[2,3,{n}] y) {{ y = {node} }}"
    made = parse_model(text, opset=opset, **weights)
    w = scales[:, of_column] * (steps[:, :k] - zero[:, of_column])
    g = floats_of(2, 3, n)
    found = gradients_for(made, {"x": floats_of(2, 3, k)}, {"y": g})
    np.testing.assert_allclose(found["x"], g @ w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("bits", "dtype"), [(3, np.uint8), (4, np.int8)])
def test_weights_of_other_bits_are_refused(bits, dtype):
    weights = {"w": np.zeros((5, 1, 8), dtype), "s": np.ones((5, 1), np.float32)}
    node = f"com.microsoft.MatMulNBits<K=16, N=5, bits={bits}, block_size=16>(x, w, s)"
    made = parse_model(f"g (float[2,16] x) => (float[2,5] y) {{ y = {node} }}", **weights)
    with pytest.raises(NoGradientRule, match=naming("MatMulNBits", "bits")):
        onnx_derivative(made, weights=[])
