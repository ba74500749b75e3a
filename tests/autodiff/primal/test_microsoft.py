"""Operators of `com.microsoft`: what they are lowered to computes what onnxruntime computes."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest

from onnxgrad import NoGradientRule, add_loss_output, check_gradient, onnx_derivative
from onnxgrad.autodiff.primal import prepare as preparing
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.compat import OrtGradientOptimizer
from onnxgrad.graph import get_train_initializer
from onnxgrad.model.convert import to_proto
from onnxgrad.operators import OPERATORS
from tests.support.errors import naming
from tests.support.microsoft_rows import CASES, KernelCase, kernel_model
from tests.support.models import initializer_arrays, operator_names, parse_model
from tests.support.optimized_models import optimized_model
from tests.support.running import in_sweep, run

OF_CASES = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def operator_of(case: KernelCase) -> str:
    return re.search(r"= (\w+)", case.node).group(1)


FIRST = {operator_of(case): case for case in reversed(CASES)}  # case of each operator
FEW = [*FIRST.values(), *(case for case in CASES if case.id == "FusedConv auto_pad")]


def domains_of(model: onnx.ModelProto) -> set[str]:
    return {o.domain for o in model.opset_import} | {node.domain for node in model.graph.node}


@pytest.mark.parametrize("known", ["lengths", in_sweep("symbols"), in_sweep("nothing")])
@OF_CASES
def test_lowered_is_the_kernel(case, known):
    if known == "nothing" and "vector" in case.id:
        return  # where no rank is known, what is transposed is taken for a matrix
    lowered = to_proto(prepare(kernel_model(case, known)))
    if known == "nothing" and domains_of(lowered) != {""} and case.id != "Inverse":
        with pytest.raises(NoGradientRule, match="no rule"):
            onnx_derivative(kernel_model(case, known), weights=[])
        return
    if case.id != "Inverse":  # it has a rule, and stays
        assert domains_of(lowered) == {""}
    if case.formula is None:
        expected = run(kernel_model(case), case.feed)
    else:
        made = case.formula(*case.feed.values())
        expected = made if isinstance(made, tuple) else (made,)
    for found, value in zip(run(lowered, case.feed), expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=2e-5, atol=2e-6)
        assert found.shape == value.shape
        assert found.dtype == value.dtype or case.formula


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.id)
def test_gradient_is_that_of_the_kernel(case):
    """Against differences of the kernel, or of the lowered model where there is none."""
    made = kernel_model(case)
    if case.formula is not None:
        made = to_proto(prepare(made))
    rounded = case.node.startswith("y = FastGelu")  # in float64, to constants of float32
    report = check_gradient(made, feed=case.feed, rtol=1e-5 if rounded else None)
    assert report.ok, str(report)


@pytest.mark.sweep
@pytest.mark.parametrize("known", ["lengths", "symbols"])
@OF_CASES
def test_gradient(case, known):
    made = kernel_model(case, known)
    report = check_gradient(to_proto(prepare(made)), feed=case.feed)
    assert report.ok, str(report)
    if known == "lengths":  # some kernels do not load the others
        test_gradient_is_that_of_the_kernel(case)


@pytest.mark.parametrize("case", [c for c in CASES if c.half], ids=lambda case: case.id)
def test_float16(case):
    feed = {n: x.astype(np.float16) if x.dtype.kind == "f" else x for n, x in case.feed.items()}
    made = kernel_model(case, feed=feed)
    for y in made.graph.output:
        if y.name in case.single:
            y.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    lowered = to_proto(prepare(made))
    for found, value in zip(run(lowered, feed), run(made, feed), strict=True):
        assert found.dtype == value.dtype
        np.testing.assert_allclose(found, value, rtol=1e-2, atol=1e-2)
    onnx_derivative(made, weights=[])


def test_rows_of_padding():
    """What onnxruntime makes of them is open: the others are its, and none hurts a gradient."""
    case = next(c for c in CASES if c.id == "GroupQueryAttention window")
    feed = case.feed | {"l": np.array([1, 3], np.int32)}
    lowered = to_proto(prepare(kernel_model(case)))
    found, expected = run(lowered, feed), run(kernel_model(case), feed)
    found[0], expected[0] = (
        np.delete(y[0].reshape(8, -1), [2, 3], axis=0) for y in (found, expected)
    )
    for y, value in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, value, rtol=1e-5, atol=1e-6)
    assert check_gradient(lowered, feed=feed).ok


def test_a_smooth_softmax_of_minus_one_is_none():
    """The default of the schema is -1, and exporters may state it."""
    case = next(c for c in CASES if c.id == "GroupQueryAttention smooth")
    made = kernel_model(case)
    [attribute] = (a for n in made.graph.node for a in n.attribute if a.name == "smooth_softmax")
    attribute.i = -1
    lowered = to_proto(prepare(made))
    for found, value in zip(run(lowered, case.feed), run(made, case.feed), strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6)


def test_every_lowering_has_a_case():
    of_floats = {
        name
        for (domain, name), operator in OPERATORS.items()
        if domain == "com.microsoft"
        and (lowering := operator.lowering) is not None
        and not lowering.__module__.endswith("operators.quantization")
    }
    assert of_floats <= FIRST.keys()  # those of integers: rules/test_quantization.py


# -- models that onnxruntime optimizes -----------------------------------------------------------

LAYER = """
    q{i}a = MatMul(h{i}, wq{i}) q{i}b = Add(q{i}a, bq{i}) q{i}c = Reshape(q{i}b, apart)
    k{i}a = MatMul(h{i}, wk{i}) k{i}b = Add(k{i}a, bk{i}) k{i}c = Reshape(k{i}b, apart)
    v{i}a = MatMul(h{i}, wv{i}) v{i}b = Add(v{i}a, bv{i}) v{i}c = Reshape(v{i}b, apart)
    q{i} = Transpose<perm=[0, 2, 1, 3]>(q{i}c) k{i} = Transpose<perm=[0, 2, 3, 1]>(k{i}c)
    v{i} = Transpose<perm=[0, 2, 1, 3]>(v{i}c) s{i}a = MatMul(q{i}, k{i}) s{i}b = Div(s{i}a, two)
    s{i}c = Add(s{i}b, mask4) s{i} = Softmax<axis=3>(s{i}c) c{i}a = MatMul(s{i}, v{i})
    c{i}b = Transpose<perm=[0, 2, 1, 3]>(c{i}a) c{i} = Reshape(c{i}b, together)
    o{i}a = MatMul(c{i}, wo{i}) o{i}b = Add(o{i}a, bo{i}) o{i}c = Add(o{i}b, h{i})
    o{i} = LayerNormalization<axis=-1>(o{i}c, so{i}, to{i})
    f{i}a = MatMul(o{i}, wi{i}) f{i}b = Add(f{i}a, bi{i}) f{i}c = Div(f{i}b, root)
    f{i}d = Erf(f{i}c) f{i}e = Add(f{i}d, one) f{i}f = Mul(f{i}b, f{i}e) f{i}g = Mul(f{i}f, half)
    m{i}a = MatMul(f{i}g, wf{i}) m{i}b = Add(m{i}a, bf{i}) m{i}c = Add(m{i}b, o{i})
    h{n} = LayerNormalization<axis=-1>(m{i}c, sf{i}, tf{i})"""
BERT = """g (int64[B,5] ids, int64[B,5] mask) => (float[B,3] y) {{
    words = Gather(word, ids) e = Add(words, place)
    h0 = LayerNormalization<axis=-1>(e, se, te)
    mask2 = Unsqueeze<axes=[1]>(mask) mask3 = Unsqueeze<axes=[2]>(mask2) maskf = Cast<to=1>(mask3)
    maski = Sub(one, maskf) mask4 = Mul(maski, low) {layers}
    first = Gather<axis=1>(h{n}, zero) y = Gemm(first, wc, bc) }}"""
TEXT = {
    "ids": np.array([[1, 2, 3, 4, 0], [7, 8, 9, 6, 0], [5, 5, 1, 2, 3]]),
    "mask": np.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
}


def encoder_of_opset_12(layers: int = 2) -> onnx.ModelProto:
    """Return an encoder as PyTorch exports one, at an opset that onnx has no LayerNormalization."""
    rng = np.random.default_rng(0)
    shapes = {"word": (10, 8), "place": (5, 8), "se": (8,), "te": (8,), "wc": (8, 3), "bc": (3,)}
    for i in range(layers):
        shapes |= {f"w{x}{i}": (8, 8) for x in "qkvo"} | {f"b{x}{i}": (8,) for x in "qkvof"}
        shapes |= {f"wi{i}": (8, 12), f"bi{i}": (12,), f"wf{i}": (12, 8)}
        shapes |= {f"{x}{i}": (8,) for x in ("so", "to", "sf", "tf")}
    arrays = {n: (rng.standard_normal(shape) / 2).astype(np.float32) for n, shape in shapes.items()}
    arrays |= {"two": 2.0, "root": 2**0.5, "one": 1.0, "half": 0.5, "low": -10000.0}
    arrays |= {"apart": np.array([0, 0, 2, 4]), "together": np.array([0, 0, 8])}
    arrays["zero"] = np.array(0)
    text = BERT.format(layers="".join(LAYER.format(i=i, n=i + 1) for i in range(layers)), n=layers)
    return parse_model(text, opset=12, ir_version=7, **arrays)


def gradients_by_weight(model: onnx.ModelProto, feed: dict, y_grad: np.ndarray) -> dict:
    made = onnx_derivative(model, inputs=[])
    assert domains_of(made) == {""}
    found = run(made, {**initializer_arrays(model), **feed, "y_grad": y_grad})
    names = (y.name.removesuffix("_grad") for y in made.graph.output)
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("level", [in_sweep("basic"), "extended", in_sweep("all")])
def test_gradient_of_an_optimized_transformer(level):
    plain = encoder_of_opset_12()
    fused = optimized_model(plain, level)
    if level != "basic":
        made = {node.op_type for node in fused.graph.node if node.domain == "com.microsoft"}
        assert made >= {"Attention", "BiasGelu", "SkipLayerNormalization"}
    y_grad = np.random.default_rng(1).standard_normal((3, 3)).astype(np.float32)
    expected, found = (gradients_by_weight(m, TEXT, y_grad) for m in (plain, fused))
    for i in range(2):
        expected[f"w{i}"] = np.concatenate([expected[f"w{x}{i}"] for x in "qkv"], axis=1)
    numbers = {"two", "root", "one", "half", "low"}  # which the fused operators hold
    shared = expected.keys() & found.keys() - numbers
    assert len(shared) >= 24
    pairs = [(found[name], expected[name]) for name in shared]
    if level != "basic":
        packed = [g for g in found.values() if g.shape == (8, 24)]
        pairs += zip(packed, (expected["w0"], expected["w1"]), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_trained_model_is_the_optimized_one():
    fused = optimized_model(encoder_of_opset_12(1), "extended")
    training = OrtGradientOptimizer(
        add_loss_output(fused), max_iter=10, batch_size=3, learning_rate=0.02, random_state=0
    )
    y = np.random.default_rng(1).standard_normal((3, 3)).astype(np.float32)
    training.fit(TEXT, y)
    trained = training.get_trained_onnx(fused)
    assert operator_names(trained) == operator_names(fused)
    assert list(trained.opset_import) == list(fused.opset_import)
    errors = [np.square(run(m, TEXT)[0] - y).sum() for m in (fused, trained)]
    assert errors[1] < 0.9 * errors[0]


def test_tables_of_a_rotation_are_no_weights():
    text = """g (float[B,3,8] x, int64[B,3] p) => (float[B,3,8] y) {
        h = MatMul(x, w) y = com.microsoft.RotaryEmbedding<num_heads=2>(h, p, c, s) }"""
    shapes = {"w": (8, 8), "c": (6, 2), "s": (6, 2)}
    made = parse_model(text, **{n: np.ones(shape, np.float32) for n, shape in shapes.items()})
    assert [y.name for y in onnx_derivative(made, inputs=[]).graph.output] == ["w_grad"]
    assert list(get_train_initializer(made)) == ["w"]


# -- what is refused, and what is not slow -------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ("com.microsoft.MatMulNBits<K=4, N=4, bits=4, block_size=16>(x, w)", "quantiz"),
        ("com.microsoft.QLinearAdd(x, w)", "quantiz"),
        ("com.microsoft.DynamicQuantizeMatMul(x, w)", "quantiz"),
        ("com.microsoft.Rfft<signal_ndim=1>(x)", "CPU"),
        ("com.microsoft.BranchwiseRMSNorm(x, w)", "ORT_ENABLE_BASIC"),
        ("com.microsoft.nchwc.Conv(x, w)", "ORT_ENABLE_EXTENDED"),
        pytest.param(  # onnxruntime 1.31 ends the process
            "com.microsoft.Attention<num_heads=2, do_rotary=1>(x, w)", "do_rotary",
            marks=pytest.mark.newest),
        ("com.microsoft.MultiHeadAttention<num_heads=2>(x, x, x, , , , , , i, x)", "beam search"),
        ("com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=2, sliding_window_cache=1>"
         "(x, w, w, w, w, i, i)", "without cache"),
        ('com.microsoft.FusedGemm<activation="?">(x, w)', "before optimization"),
        (
            'com.microsoft.FusedGemm<activation="LeakyRelu", activation_beta=0.1>(x, w)',
            "before optimization",
        ),
    ],
)  # fmt: skip
def test_refused(node, why):
    domain, name = re.match(r"(.*?)\.(\w+)[<(]", node).groups()
    text = f"""g (float[2,3,4] x, float[2,3,4] w, int32[2] i) => (float[2,3,4] y) {{
        a = Exp(x) b = {node.replace("(x", "(a")} y = Tanh(b) }}"""
    made = parse_model(text, domains={"com.microsoft.nchwc": 1})
    with pytest.raises(NoGradientRule, match=naming(f"{domain}::{name} ", why)):
        onnx_derivative(made, weights=[])
    made.graph.node[2].input[0] = "a"  # beside the path, it does not matter
    onnx_derivative(made, weights=[])


def test_a_chain_is_inferred_in_one_round(monkeypatch):
    calls = []
    infer = preparing.infer

    def counted(*given, **named):
        calls.append(1)
        return infer(*given, **named)

    monkeypatch.setattr(preparing, "infer", counted)
    steps = "".join(
        f"a{i} = com.microsoft.FastGelu(h{i}) h{i + 1} = MatMul(a{i}, w)" for i in range(30)
    )
    text = f"g (float[N,3] h0, float[3,3] w) => (float[N,3] h30) {{ {steps} }}"
    lowered = prepare(parse_model(text))
    assert len(calls) <= 3
    assert all(y.shape is not None and y.dtype for node in lowered.graph for y in node.outputs)
