"""Gradients through quantized layers, element by element: those of PyTorch's fake quantization.

Files that onnxruntime quantizes: `tests/quantization/test_quantized_training.py`.
"""

from __future__ import annotations

import warnings
from itertools import product

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad import operators
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.model.convert import to_proto
from onnxgrad.operators import quantization
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.quantized_models import few_bit_operands
from tests.support.running import in_sweep, run_named

RNG = np.random.default_rng(0)
F = np.float32


def trained_gradients(model: onnx.ModelProto, train: list[str], **feed) -> dict[str, np.ndarray]:
    """Return the gradients of the output `loss` with respect to weights."""
    trainer = og.Trainer(model, train=train, optimizer="sgd")
    found = run_named(trainer.step_models(feed)[0], feed | trainer.state.weights)
    return {name: found[f"{name}_grad"] for name in train}


def assert_close_in_scale(found, expected, rtol=1e-4):
    """Assert that arrays are close, relative to the largest element."""
    scale = np.abs(np.asarray(expected)).max()
    assert scale > 0
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol * scale)


S = {"s": F(0.05), "z": np.uint8(120), "t": F(0.097), "o": np.uint8(100)}
# of 7 bits: processors without VNNI add products of 8 bits in pairs, in 16 bits
W = RNG.integers(-63, 64, (6, 5)).astype(np.int8)
K = RNG.integers(-63, 64, (4, 3, 3, 3)).astype(np.int8)
WS, KS = RNG.uniform(0.005, 0.02, 5).astype(F), RNG.uniform(0.005, 0.02, 4).astype(F)
BIAS = RNG.integers(-500, 500, 4).astype(np.int32)
WEIGHTS = {"w": W, "ws": WS, "wz": np.zeros(5, np.int8), "k": K, "ks": KS, "bias": BIAS} | {
    "kz": np.zeros(4, np.int8), "one": F(0.01), "zero": np.int8(0), "f": F([1.5]) * W[0, 0]
}  # fmt: skip
BATCH, PICTURE = (7, 6), (2, 3, 6, 6)
PAIRS = "x, s, z, x, s, z, t, o"

# q = an operator of quantized x, the shape of x, and the operator for real numbers in PyTorch
OPERATORS = {
    "QLinearMatMul(x, s, z, w, ws, wz, t, o)": (BATCH, lambda x, w, k, torch: x @ w),
    "QLinearConv(x, s, z, k, ks, kz, t, o, bias)": (
        PICTURE,
        lambda x, w, k, torch: torch.conv2d(x, k, torch.tensor(F(BIAS * (0.05 * KS)))),
    ),
    f"com.microsoft.QLinearAdd({PAIRS})": (BATCH, lambda x, w, k, torch: x + x),
    f"com.microsoft.QLinearMul({PAIRS})": (BATCH, lambda x, w, k, torch: x * x),
    "com.microsoft.QLinearSigmoid(x, s, z, t, o)": (BATCH, lambda x, w, k, torch: x.sigmoid()),
    "com.microsoft.QLinearLeakyRelu<alpha=0.3>(x, s, z, t, o)": (
        BATCH, lambda x, w, k, torch: torch.nn.functional.leaky_relu(x, 0.3),
    ),
    "com.microsoft.QLinearSoftmax<axis=-1, opset=13>(x, s, z, t, o)": (
        BATCH, lambda x, w, k, torch: x.softmax(-1),
    ),
    "com.microsoft.QLinearAveragePool<kernel_shape=[2, 2]>(x, s, z, t, o)": (
        PICTURE, lambda x, w, k, torch: torch.nn.functional.avg_pool2d(x, 2, 1),
    ),
    "com.microsoft.QLinearGlobalAveragePool(x, s, z, t, o)": (
        PICTURE, lambda x, w, k, torch: x.mean((2, 3), keepdim=True),
    ),
    "com.microsoft.QLinearConcat<axis=1>(t, o, x, s, z, x, s, z)": (
        BATCH, lambda x, w, k, torch: torch.cat([x, x], 1),
    ),
    "com.microsoft.QGemm<alpha=0.5>(x, s, z, w, ws, wz, , t, o)": (
        BATCH, lambda x, w, k, torch: 0.5 * (x @ w),
    ),
    "com.microsoft.QLinearWhere(choose, x, s, z, x, s, z, t, o)": (
        BATCH, lambda x, w, k, torch: x,
    ),
}  # fmt: skip


@pytest.mark.parametrize("operator", OPERATORS)
def test_operator_of_integers(operator):
    torch = pytest.importorskip("torch")
    shape, formula = OPERATORS[operator]
    x, gain = 3 * RNG.standard_normal(shape).astype(F), np.ones(shape[1:], F)
    text = f"""g (float[N, {", ".join(map(str, shape[1:]))}] data) => (float loss, uint8[] q) {{
        scaled = Mul(data, gain) x = QuantizeLinear(scaled, s, z) q = {operator}
        y = DequantizeLinear(q, t, o) yy = Mul(y, y) loss = ReduceSum<keepdims=0>(yy) }}"""
    tensors = S | WEIGHTS | {"gain": gain, "choose": np.ones(shape, bool)}
    model = parse_model(text, opset=21, output_shapes=False, **tensors)

    weight = torch.tensor(gain, requires_grad=True)
    rounded = torch.fake_quantize_per_tensor_affine(torch.tensor(x) * weight, 0.05, 120, 0, 255)
    w, k = torch.tensor(W * WS), torch.tensor(K * KS[:, None, None, None])
    y = torch.fake_quantize_per_tensor_affine(formula(rounded, w, k, torch), 0.097, 100, 0, 255)
    y.square().sum().backward()
    [found] = trained_gradients(model, ["gain"], data=x).values()
    assert_close_in_scale(
        found, weight.grad.numpy(), 2e-2
    )  # an element may be rounded to the other side
    median = np.median(np.abs(found - weight.grad.numpy()))
    assert median < 1e-3 * np.abs(weight.grad.numpy()).max()
    kernel, lowered = (run_named(m, data=x)["q"] for m in (model, to_proto(prepare(model))))
    assert np.abs(kernel.astype(int) - lowered.astype(int)).max() <= 1


def test_clipped_values_have_no_gradient():
    """As torch.fake_quantize: half a step beyond the limits still counts as inside."""
    torch = pytest.importorskip("torch")
    x = np.arange(-30, 30, 0.37, dtype=F)
    x = np.concatenate([x, F([-25.65, -25.6, 25.45, 25.4, 25.44])])
    for dtype, low, high, zero in ((np.int8, -128, 127, 3), (np.uint8, 0, 255, 128)):
        text = f"""g (float[{len(x)}] x) => (float loss) {{ a = Mul(x, gain)
            q = QuantizeLinear(a, s, z) d = DequantizeLinear(q, s, z) e = Mul(d, d)
            loss = ReduceSum<keepdims=0>(e) }}"""
        tensors = {"gain": np.ones_like(x), "s": F(0.2), "z": dtype(zero)}
        model = parse_model(text, opset=21, **tensors)
        weight = torch.ones(len(x), requires_grad=True)
        y = torch.fake_quantize_per_tensor_affine(torch.tensor(x) * weight, 0.2, zero, low, high)
        y.square().sum().backward()
        [found] = trained_gradients(model, ["gain"], x=x).values()
        assert 0 < np.sum(found == 0) < len(x) / 2
        assert_close_in_scale(found, weight.grad.numpy(), 1e-5)


def test_scales_are_learned_as_step_sizes():
    """Learned step size quantization (Esser et al. 2020): PyTorch has it for one axis, too."""
    torch = pytest.importorskip("torch")
    x = 3 * RNG.standard_normal((5, 4)).astype(F)
    s, z = F([0.01, 0.02, 0.03, 0.04]), np.array([0, 3, -5, 7], np.int8)
    text = """g (float[5, 4] x) => (float loss) { q = QuantizeLinear(x, s, z)
        d = DequantizeLinear(q, s, z) e = Mul(d, d) loss = ReduceSum<keepdims=0>(e) }"""
    model = parse_model(text, opset=21, s=s, z=z)
    scale = torch.tensor(s, requires_grad=True)
    y = torch._fake_quantize_learnable_per_channel_affine(
        torch.tensor(x), scale, torch.tensor(z, dtype=torch.float32), 1, -128, 127, 1.0
    )
    y.square().sum().backward()
    [found] = trained_gradients(model, ["s"], x=x).values()
    assert_close_in_scale(found, scale.grad.numpy())


MOVES = [
    "MaxPool<kernel_shape=[2], strides=[2]>({})",
    "Transpose<perm=[0, 2, 1]>({})",
    "Reshape({}, shape)",
    "Concat<axis=1>({0}, {0})",
    "Slice({}, ones, twos, ones)",
    "Gather<axis=1>({}, i)",
    "Squeeze({})",
    "Flatten({})",
    "Identity({})",
    "Where(some, {0}, {0})",
    "Max({1}, {0})",
    "Clip({0}, {1})",
    "Pad({0}, pads, {1})",
]


@pytest.mark.parametrize("node", MOVES)
@pytest.mark.parametrize("kind", ["int8", in_sweep("uint8")])
def test_operators_that_move_integers(node, kind):
    """Their gradient is that of the same operator behind the DequantizeLinear.

    {1} is zero: the integer z.
    """
    arrays = {"gain": np.ones((3, 4), F), "s": F(0.1), "z": np.array(5, kind)}
    arrays |= {"shape": np.int64([2, 12]), "ones": np.int64([1]), "twos": np.int64([3])}
    arrays |= {"i": np.int64([2, 0]), "pads": np.int64([0, 1, 0, 1, 0, 2]), "zero": F(0)}
    arrays |= {"some": np.arange(12).reshape(3, 4) % 3 > 0}
    x, results = RNG.standard_normal((2, 3, 4)).astype(F), []
    for chain in (
        f"m = {node.format('q', 'z')} y = DequantizeLinear(m, s, z)",
        f"d = DequantizeLinear(q, s, z) y = {node.format('d', 'zero')}",
    ):
        text = f"""g (float[2, 3, 4] x) => (float loss) {{ a = Mul(x, gain)
            q = QuantizeLinear(a, s, z) {chain} e = Sin(y) loss = ReduceSum<keepdims=0>(e) }}"""
        model = parse_model(text, opset=21, **arrays)
        results += trained_gradients(model, ["gain"], x=x).values()
    assert_close_in_scale(results[0], results[1], 1e-6)


@pytest.mark.parametrize(
    "product",
    [
        "y = com.microsoft.DynamicQuantizeMatMul(a, w, ws, wz, c)",
        "q, t, o = DynamicQuantizeLinear(a) "
        "y = com.microsoft.MatMulIntegerToFloat(q, w, t, ws, o, wz, c)",
        "q, t, o = DynamicQuantizeLinear(a) i = MatMulInteger(q, w, o, wz) "
        "f = Cast<to=1>(i) r = Mul(t, ws) m = Mul(f, r) y = Add(m, c)",
    ],
)
def test_dynamic_quantization(product):
    """The gradient is that of the product of floats: the scale of the data is a constant."""
    x, c = RNG.standard_normal((4, 6)).astype(F), F([1, 2, 3, 4, 5])
    wz = RNG.integers(-5, 5, 5).astype(np.int8)
    text = f"""g (float[4, 6] x) => (float loss, float[4, 5] y) {{ a = Mul(x, gain) {product}
        e = Mul(y, y) loss = ReduceSum<keepdims=0>(e) }}"""
    model = parse_model(text, opset=21, gain=np.ones(6, F), w=W, ws=WS, wz=wz, c=c)
    found = trained_gradients(model, ["gain", "c"], x=x)
    y = run_named(model, x=x)["y"].astype(np.float64)
    weight = (W - wz.astype(float)) * WS
    assert_close_in_scale(y, x @ weight + c, 2e-2)
    assert_close_in_scale(found["gain"], (2 * y @ weight.T * x).sum(0), 1e-4)
    assert_close_in_scale(found["c"], 2 * y.sum(0), 1e-4)


def test_every_lowering_has_a_case():
    text = " ".join(OPERATORS) + "DynamicQuantizeMatMul MatMulIntegerToFloat"
    lowered = {
        name
        for (_, name), operator in operators.OPERATORS.items()
        if operator.lowering is not None and operator.lowering.__module__ == quantization.__name__
    }
    assert {name for name in lowered if name not in text} == {"QuantizeLinear", "DequantizeLinear"}


@pytest.mark.parametrize(
    ("kind", "opset", "working"), [("uint8", 17, 18), ("int16", 17, 21), ("uint16", 22, 22)]
)
def test_quantization_of_com_microsoft(kind, opset, working):
    """Opset 21 is the first whose operators have the 16 bits that these have at any."""
    pair = "com.microsoft.QuantizeLinear(a, s, z) y = com.microsoft.DequantizeLinear(q, s, z)"
    results = []
    for text, version in ((pair, opset), (pair.replace("com.microsoft.", ""), max(opset, 21))):
        text = f"""g (float[2, 3] x) => (float loss) {{ a = Mul(x, gain) q = {text}
            e = Sin(y) loss = ReduceSum<keepdims=0>(e) }}"""
        operands = {"gain": np.ones(3, F), "s": F(0.1), "z": np.array(9, kind)}
        model = parse_model(text, opset=version, **operands)
        results += trained_gradients(
            model, ["gain"], x=np.arange(6, dtype=F).reshape(2, 3)
        ).values()
        if version == opset:
            assert prepare(model).graph.opset_imports[""] == working
    assert_close_in_scale(*results, 1e-6)


def test_operator_of_integers_without_a_formula():
    text = """g (float[3] x) => (float loss) { a = Mul(x, gain) q = QuantizeLinear(a, s, z)
        p = Mod(q, three) y = DequantizeLinear(p, s, z) loss = ReduceSum<keepdims=0>(y) }"""
    weights = {"gain": F([1, 1, 1]), "s": F(0.1), "z": np.int8(0), "three": np.int8(3)}
    model = parse_model(text, opset=21, **weights)
    with pytest.raises(og.NoGradientRule, match=naming("Mod", "straight-through")):
        trained_gradients(model, ["gain"], x=np.ones(3, F))


# -- weights in few bits -------------------------------------------------------------------------


FEW_BITS = [*product([2, 4], ["", "packed", "float"]), *product([8], ["", "packed"])]
# of others, kernels of onnxruntime 1.32 read wrong zero points where columns have an order
OTHER_FORMS = [(4, "", 21, True), (4, "float", 18, True), (4, "packed", 18, False)]


@pytest.mark.parametrize(
    ("bits", "zeros", "opset", "order"),  # what has a kernel
    [*((*form, 21, False) for form in FEW_BITS), *OTHER_FORMS],
)
@pytest.mark.parametrize("k", [40, in_sweep(48)])
def test_product_with_weights_in_few_bits(bits, zeros, opset, order, k):
    """Witness: the weight as the kernel shows it, which multiplies the unit vectors."""
    n, operands = 6, few_bit_operands(bits, k, 6, zeros, order)
    names = ", ".join(["a", "w", "scales", "zeros" * bool(zeros), "order" * order, "bias"])
    attributes = f"K={k}, N={n}, bits={bits}, block_size=16"
    text = f"""g (float[3, M, {k}] x) => (float loss, float[3, M, {n}] y) {{ a = Mul(x, gain)
        y = com.microsoft.MatMulNBits<{attributes}>({names})
        e = Mul(y, y) loss = ReduceSum<keepdims=0>(e) }}"""
    operands |= {"gain": np.ones(k, F), "bias": np.zeros(n, F)}
    model = parse_model(text, opset=opset, **operands)
    unit = np.zeros((3, k, k), F)
    unit[:] = np.eye(k)
    weight = run_named(model, x=unit)["y"][0].astype(np.float64)
    x = RNG.standard_normal((3, 2, k)).astype(F)
    y = run_named(model, x=x)["y"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is rounded: the gradient is exact
        found = trained_gradients(model, ["gain", "bias"], x=x)
        og.Trainer(model, train=["gain"]).fit({"x": x})
    assert_close_in_scale(found["gain"], ((2 * y @ weight.T) * x).sum((0, 1)), 1e-3)
    assert_close_in_scale(found["bias"], 2 * y.sum((0, 1)), 1e-3)


def test_frozen_parts_of_weights_in_few_bits():
    text = """g (float[3, 32] x) => (float[3, 6] y) {
        y = com.microsoft.MatMulNBits<K=32, N=6, bits=4, block_size=16>(x, w, scales) }"""
    model = parse_model(text, opset=21, **few_bit_operands(4, 32, 6))
    assert [y.name for y in og.onnx_derivative(model, weights=[]).graph.output] == ["x_grad"]
    with pytest.raises(og.NoGradientRule, match=naming("MatMulNBits", "quantized weight")):
        og.onnx_derivative(model, weights=["scales"])


def test_table_in_few_bits():
    """A gathered table stays; what is behind it trains, its shape being inferred."""
    table = RNG.integers(0, 256, (10, 16)).astype(np.uint8)
    text = """g (int64[N, 3] i) => (float loss) {
        h = com.microsoft.GatherBlockQuantized<gather_axis=0, quantize_axis=1, block_size=16,
            bits=4>(table, i, scales)
        y = MatMul(h, head) e = Mul(y, y) loss = ReduceSum<keepdims=0>(e) }"""
    weights = {"table": table, "scales": np.full((10, 2), 0.1, F), "head": np.ones((32, 2), F)}
    model = parse_model(text, opset=21, **weights)
    i = np.int64([[1, 2, 3], [4, 5, 6]])
    rows = np.stack([table & 15, table >> 4], -1).reshape(10, 32)[i].reshape(-1, 32)
    rows = 0.1 * (rows - 8.0)
    assert_close_in_scale(
        trained_gradients(model, ["head"], i=i)["head"], 2 * rows.T @ (rows @ np.ones((32, 2)))
    )
