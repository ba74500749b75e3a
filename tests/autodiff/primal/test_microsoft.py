"""Operators of `com.microsoft`: what they are lowered to computes what onnxruntime computes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from onnxgrad import (
    NoGradientRule,
    OrtGradientOptimizer,
    add_loss_output,
    check_gradient,
    get_train_initializer,
    onnx_derivative,
)
from onnxgrad.autodiff.primal import prepare as preparing
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.graph.operators import OPERATORS
from onnxgrad.model.convert import to_proto
from tests.support.microsoft_rows import CASES, Case
from tests.support.running import in_sweep, run

KINDS = {"f2": "float16", "f4": "float", "i4": "int32", "i8": "int64"}
OF_CASES = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def typed(name: str, array: np.ndarray, known: str) -> str:
    lengths = array.shape if known == "lengths" else [f"{name}{i}" for i in range(array.ndim)]
    return f"{KINDS[array.dtype.str[1:]]}[{', '.join(map(str, lengths))}] {name}"


def model(case: Case, known: str = "lengths", feed: dict | None = None) -> onnx.ModelProto:
    """Return the model of a case; what onnxruntime calls standard has no domain."""
    feed = feed or case.feed
    standard = re.search("= (Simplified)?LayerNormalization", case.node)
    node = case.node if standard else case.node.replace("= ", "= com.microsoft.", 1)
    inputs = ", ".join(typed(name, array, known) for name, array in feed.items())
    kind = "float16" if any(array.dtype == np.float16 for array in feed.values()) else "float"
    outputs = ", ".join(f"{case.kinds.get(y, kind)} {y}" for y in case.outputs if y)
    made = onnx.parser.parse_model(f"""<ir_version: 8,
        opset_import: ["": {case.opset}, "com.microsoft": 1]>
        g ({inputs}) => ({outputs}) {{ {node} }}""")
    scalars = {x.name for x in made.graph.input if feed[x.name].ndim == 0}
    for x in made.graph.input:
        if known == "nothing" and x.name not in scalars:
            x.type.tensor_type.ClearField("shape")
    for y in made.graph.output:
        y.type.tensor_type.ClearField("shape")
    return made


def domains(model: onnx.ModelProto) -> set[str]:
    return {o.domain for o in model.opset_import} | {node.domain for node in model.graph.node}


@pytest.mark.parametrize("known", ["lengths", in_sweep("symbols"), in_sweep("nothing")])
@OF_CASES
def test_lowered_is_the_kernel(case, known):
    if known == "nothing" and "vector" in case.id:
        return  # where no rank is known, what is transposed is taken for a matrix
    lowered = to_proto(prepare(model(case, known)))
    if known == "nothing" and domains(lowered) != {""}:
        with pytest.raises(NoGradientRule, match="no rule; use the model as it was before"):
            onnx_derivative(model(case, known), weights=[])
        return
    assert domains(lowered) == {""}
    if case.formula is None:
        expected = run(model(case), case.feed)
    else:
        made = case.formula(*case.feed.values())
        expected = made if isinstance(made, tuple) else (made,)
    for found, value in zip(run(lowered, case.feed), expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=2e-5, atol=2e-6)
        assert found.shape == value.shape
        assert found.dtype == value.dtype or case.formula


@pytest.mark.parametrize("known", ["lengths", in_sweep("symbols")])
@OF_CASES
def test_gradient(case, known):
    made = model(case, known)
    lowered = check_gradient(to_proto(prepare(made)), feed=case.feed)
    assert lowered.ok, str(lowered)
    if case.formula is None and known == "lengths":  # some kernels do not load the others
        rounded = case.node.startswith("y = FastGelu")  # in float64, to constants of float32
        report = check_gradient(made, feed=case.feed, rtol=1e-5 if rounded else None)
        assert report.ok, str(report)


@pytest.mark.parametrize("case", [c for c in CASES if c.half], ids=lambda case: case.id)
def test_float16(case):
    feed = {n: x.astype(np.float16) if x.dtype.kind == "f" else x for n, x in case.feed.items()}
    made = model(case, feed=feed)
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
    lowered = to_proto(prepare(model(case)))
    found, expected = run(lowered, feed), run(model(case), feed)
    found[0], expected[0] = (
        np.delete(y[0].reshape(8, -1), [2, 3], axis=0) for y in (found, expected)
    )
    for y, value in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, value, rtol=1e-5, atol=1e-6)
    assert check_gradient(lowered, feed=feed).ok


def test_every_lowering_has_a_case():
    tested = {re.search(r"= (\w+)", case.node).group(1) for case in CASES}
    of_floats = {
        name
        for (domain, name), operator in OPERATORS.items()
        if domain == "com.microsoft"
        and (lowering := operator.lowering) is not None
        and not lowering.__module__.endswith("microsoft_quantized")
    }
    assert of_floats <= tested  # those of integers: test_quantized_training.py


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
BERT = """<ir_version: 7, opset_import: ["": 12]>
    g (int64[B,5] ids, int64[B,5] mask) => (float[B,3] y) {{
    words = Gather(word, ids) e = Add(words, place)
    h0 = LayerNormalization<axis=-1>(e, se, te)
    mask2 = Unsqueeze<axes=[1]>(mask) mask3 = Unsqueeze<axes=[2]>(mask2) maskf = Cast<to=1>(mask3)
    maski = Sub(one, maskf) mask4 = Mul(maski, low) {layers}
    first = Gather<axis=1>(h{n}, zero) y = Gemm(first, wc, bc) }}"""
TEXT = {
    "ids": np.array([[1, 2, 3, 4, 0], [7, 8, 9, 6, 0], [5, 5, 1, 2, 3]]),
    "mask": np.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
}


def bert(layers: int = 2) -> onnx.ModelProto:
    """Return an encoder as PyTorch exports one, at an opset that onnx has no LayerNormalization."""
    rng = np.random.default_rng(0)
    shapes = {"word": (10, 8), "place": (5, 8), "se": (8,), "te": (8,), "wc": (8, 3), "bc": (3,)}
    for i in range(layers):
        shapes |= {f"w{x}{i}": (8, 8) for x in "qkvo"} | {f"b{x}{i}": (8,) for x in "qkvof"}
        shapes |= {f"wi{i}": (8, 12), f"bi{i}": (12,), f"wf{i}": (12, 8)}
        shapes |= {f"{x}{i}": (8,) for x in ("so", "to", "sf", "tf")}
    arrays = {n: (rng.standard_normal(shape) / 2).astype(np.float32) for n, shape in shapes.items()}
    numbers = {"two": 2, "root": 2**0.5, "one": 1, "half": 0.5, "low": -10000}
    arrays |= {name: np.array(v, np.float32) for name, v in numbers.items()}
    arrays |= {
        "apart": np.array([0, 0, 2, 4]),
        "together": np.array([0, 0, 8]),
        "zero": np.array(0),
    }
    made = onnx.parser.parse_model(
        BERT.format(layers="".join(LAYER.format(i=i, n=i + 1) for i in range(layers)), n=layers)
    )
    made.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    return made


def optimized(model: onnx.ModelProto, level: str, folder: Path) -> onnx.ModelProto:
    """Return what onnxruntime makes of a model at a level of optimization."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    providers = ["CPUExecutionProvider"]
    ort.InferenceSession(model.SerializeToString(), options, providers=providers)
    return onnx.load(folder / "optimized.onnx")


def gradients(model: onnx.ModelProto, feed: dict, y_grad: np.ndarray) -> dict[str, np.ndarray]:
    """Return the gradient by every weight, under its name."""
    made = onnx_derivative(model, inputs=[])
    assert domains(made) == {""}
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    found = run(made, {**weights, **feed, "y_grad": y_grad})
    names = (y.name.removesuffix("_grad") for y in made.graph.output)
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("level", ["BASIC", "EXTENDED", "ALL"])
def test_gradient_of_an_optimized_transformer(level, tmp_path):
    plain = bert()
    fused = optimized(plain, level, tmp_path)
    if level != "BASIC":
        made = {node.op_type for node in fused.graph.node if node.domain == "com.microsoft"}
        assert made >= {"Attention", "BiasGelu", "SkipLayerNormalization"}
    y_grad = np.random.default_rng(1).standard_normal((3, 3)).astype(np.float32)
    expected, found = (gradients(m, TEXT, y_grad) for m in (plain, fused))
    for i in range(2):
        expected[f"w{i}"] = np.concatenate([expected[f"w{x}{i}"] for x in "qkv"], axis=1)
    numbers = {"two", "root", "one", "half", "low"}  # which the fused operators hold
    shared = expected.keys() & found.keys() - numbers
    assert len(shared) >= 24
    pairs = [(found[name], expected[name]) for name in shared]
    if level != "BASIC":
        packed = [g for g in found.values() if g.shape == (8, 24)]
        pairs += zip(packed, (expected["w0"], expected["w1"]), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


CNN = """<ir_version: 8, opset_import: ["": 17]> g (float[B,3,6,6] x) => (float[B,4] y) {
    a = Conv<pads=[1, 1, 1, 1]>(x, w1, b1) b = Relu(a) c = MaxPool<kernel_shape=[2, 2]>(b)
    d = Conv<pads=[1, 1, 1, 1]>(c, w2, b2) e = Add(d, c) f = Sigmoid(e) h = GlobalAveragePool(f)
    i = Flatten(h) j = Gemm(i, w3, b3) k = Tanh(j) y = Gemm(k, w4, b4) }"""


def cnn() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    shapes = {"w1": (8, 3, 3, 3), "b1": (8,), "w2": (8, 8, 3, 3), "b2": (8,)}
    shapes |= {"w3": (8, 5), "b3": (5,), "w4": (5, 4), "b4": (4,)}
    made = onnx.parser.parse_model(CNN)
    for name, shape in shapes.items():
        array = (rng.standard_normal(shape) / 2).astype(np.float32)
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    return made


def test_gradient_of_an_optimized_cnn(tmp_path):
    plain, fused = cnn(), optimized(cnn(), "EXTENDED", tmp_path)
    assert {"FusedConv", "FusedGemm"} <= {node.op_type for node in fused.graph.node}
    feed = {"x": np.random.default_rng(2).standard_normal((2, 3, 6, 6)).astype(np.float32)}
    y_grad = np.ones((2, 4), np.float32)
    expected, found = (gradients(m, feed, y_grad) for m in (plain, fused))
    assert expected.keys() == found.keys()
    for name, g in expected.items():
        np.testing.assert_allclose(found[name], g, rtol=1e-4, atol=1e-5, err_msg=name)


def test_the_trained_model_is_the_optimized_one(tmp_path):
    fused = optimized(bert(1), "EXTENDED", tmp_path)
    training = OrtGradientOptimizer(
        add_loss_output(fused), max_iter=10, batch_size=3, learning_rate=0.02, random_state=0
    )
    y = np.random.default_rng(1).standard_normal((3, 3)).astype(np.float32)
    training.fit(TEXT, y)
    trained = training.get_trained_onnx(fused)
    assert [node.op_type for node in trained.graph.node] == [n.op_type for n in fused.graph.node]
    assert list(trained.opset_import) == list(fused.opset_import)
    errors = [np.square(run(m, TEXT)[0] - y).sum() for m in (fused, trained)]
    assert errors[1] < 0.9 * errors[0]


def test_tables_of_a_rotation_are_no_weights():
    text = """<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>
        g (float[B,3,8] x, int64[B,3] p) => (float[B,3,8] y) <float[8,8] w = {0}> {
        h = MatMul(x, w) y = com.microsoft.RotaryEmbedding<num_heads=2>(h, p, c, s) }"""
    made = onnx.parser.parse_model(text.replace(" <float[8,8] w = {0}>", ""))
    for name, shape in {"w": (8, 8), "c": (6, 2), "s": (6, 2)}.items():
        made.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    assert [y.name for y in onnx_derivative(made, inputs=[]).graph.output] == ["w_grad"]
    assert list(get_train_initializer(made)) == ["w"]


# -- what is refused, and what is not slow -------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ("com.microsoft.MatMulNBits<K=4, N=4, bits=4, block_size=16>(x, w)", "quantiz"),
        ("com.microsoft.QLinearAdd(x, w)", "quantiz"),
        ("com.microsoft.DynamicQuantizeMatMul(x, w)", "quantiz"),
        ("com.microsoft.Inverse(x)", "ORT_ENABLE_BASIC at most"),
        ("com.microsoft.nchwc.Conv(x, w)", "ORT_ENABLE_EXTENDED at most"),
        pytest.param(  # onnxruntime 1.31 ends the process
            "com.microsoft.Attention<num_heads=2, do_rotary=1>(x, w)", "no kernel for do_rotary",
            marks=pytest.mark.newest),
        ("com.microsoft.MultiHeadAttention<num_heads=2>(x, x, x, , , , , , i, x)", "beam search"),
        ("com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=2, sliding_window_cache=1>"
         "(x, w, w, w, w, i, i)", "ring of rows; use the model without cache"),
        ('com.microsoft.FusedGemm<activation="?">(x, w)', "before optimization"),
        (
            'com.microsoft.FusedGemm<activation="LeakyRelu", activation_beta=0.1>(x, w)',
            "before optimization",
        ),
    ],
)  # fmt: skip
def test_refused(node, why):
    domain, name = re.match(r"(.*?)\.(\w+)[<(]", node).groups()
    made = onnx.parser.parse_model(f"""<ir_version: 8,
        opset_import: ["": 18, "com.microsoft": 1, "com.microsoft.nchwc": 1]>
        g (float[2,3,4] x, float[2,3,4] w, int32[2] i) => (float[2,3,4] y) {{
        a = Exp(x) b = {node.replace("(x", "(a")} y = Tanh(b) }}""")
    with pytest.raises(NoGradientRule, match=f"^{domain}::{name} .*{why}"):
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
    made = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>
        g (float[N,3] h0, float[3,3] w) => (float[N,3] h30) {{ {steps} }}""")
    lowered = prepare(made)
    assert len(calls) <= 3
    assert all(y.shape is not None and y.dtype for node in lowered.graph for y in node.outputs)
