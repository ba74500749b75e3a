"""New heads, backbones and joined models, against numpy and onnxruntime."""

import re

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxgrad as og
from onnxgrad.finetune.heads import CLASSES
from onnxgrad.finetune.new_weights import fresh_weights
from onnxgrad.model.notes import ADAPTERS, HEAD, read_metadata, write_metadata
from tests.support.errors import naming
from tests.support.models import initializer_arrays, parse_model
from tests.support.running import run, run_named

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4)).astype(np.float32)
IMAGES = RNG.normal(size=(2, 4, 3, 3)).astype(np.float32)
W = RNG.normal(size=(4, 3)).astype(np.float32)
K = RNG.normal(size=(3, 4, 1, 1)).astype(np.float32)
B = RNG.normal(size=3).astype(np.float32)
TEXT = RNG.normal(size=(2, 5, 4)).astype(np.float32)


def head_tensors(model, name="head"):
    """Return weight and bias of a head; None where it has none."""
    tensors = initializer_arrays(model)
    return [tensors.get(f"{name}.{part}") for part in ("weight", "bias")]


def output_dims(model, index=0):
    dims = model.graph.output[index].type.tensor_type.shape.dim
    return [d.dim_value or d.dim_param for d in dims]


def checked_head(model):
    onnx.checker.check_model(model, full_check=True)
    return model


def softmax_of_axis(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def relu(x):
    return np.maximum(x, 0)


def affine(x, w, b=None):
    y = x @ w
    return y if b is None else y + b.ravel()


def pointwise(x, w, b=None):
    y = np.einsum("nchw,kc->nkhw", x, w[:, :, 0, 0])
    return y if b is None else y + b.reshape(1, -1, 1, 1)


MATRIX = "f (float[N,4] x) => (float[N,3] y)"
SEQUENCE = "f (float[N,T,4] x) => (float[N,T,3] y)"
IMAGE = "f (float[N,4,H,W] x) => (float[N,3] y)"
MAPS = "f (float[N,4,H,W] x) => (float[N,3,H,W] y)"
COLUMNS = "f (float[N,4,T] x) => (float[N,3,T] y)"
CASES = {
    "gemm": (f"{MATRIX} {{ y = Gemm(x, w, b) }}", affine),
    "gemm transposed": (f"{MATRIX} {{ y = Gemm<transB=1>(x, t, b) }}", affine),
    "gemm with factors": (f"{MATRIX} {{ y = Gemm<alpha=2.0, beta=0.5>(x, w, b) }}", affine),
    "gemm without bias": (
        f"{MATRIX} {{ h = Gemm(x, w) y = Relu(h) }}", lambda *a: relu(affine(*a))),
    "matmul": (f"{MATRIX} {{ y = MatMul(x, w) }}", affine),
    "matmul and add": (f"{MATRIX} {{ h = MatMul(x, w) y = Add(h, b) }}", affine),
    "cast before add": (
        f"{MATRIX} {{ h = MatMul(x, w) c = Cast<to=1>(h) i = Identity(c) y = Add(row, i) }}",
        affine,
    ),
    "dropout before sum": (
        f"{MATRIX} {{ h = MatMul(x, w) d = Dropout(h) y = Sum(d, b) }}", affine),
    "add the other way": (f"{MATRIX} {{ h = MatMul(x, w) y = Add(row, h) }}", affine),
    "tokens": (f"{SEQUENCE} {{ h = MatMul(x, w) y = Add(h, b) }}", affine),
    "tokens, softmax": (
        f"{SEQUENCE} {{ h = MatMul(x, w) l = Add(h, b) y = Softmax(l) }}",
        lambda *a: softmax_of_axis(affine(*a)),
    ),
    "transposed weights": (
        f"{MATRIX} {{ v = Transpose(t) h = MatMul(x, v) y = Add(h, b) }}", affine),
    "weights cast": (
        f"{MATRIX} {{ v = Cast<to=1>(half) h = MatMul(x, v) y = Identity(h) }}", affine),
    "weights dequantized": (
        f"{MATRIX} {{ v = DequantizeLinear(bytes, step) y = MatMul(x, v) }}", affine),
    "result quantized": (
        f"{MATRIX} {{ h = MatMul(x, w) q = QuantizeLinear(h, step)"
        " y = DequantizeLinear(q, step) }",
        affine,
    ),
    "fused matmul": (
        f"{MATRIX} {{ h = com.microsoft.FusedMatMul<transB=1, alpha=2.0>(x, t) y = Add(h, b) }}",
        affine,
    ),
    "fused gemm": (
        f'{MATRIX} {{ y = com.microsoft.FusedGemm<activation="Relu">(x, w, b) }}',
        lambda *a: relu(affine(*a)),
    ),
    "fused conv": (
        f'{MAPS} {{ y = com.microsoft.FusedConv<activation="LeakyRelu", activation_params=[0.5]>'
        "(x, k, b) }",
        lambda *a: np.where((y := pointwise(*a)) < 0, y / 2, y),
    ),
    "fused conv with bounds": (
        f'{MAPS} {{ y = com.microsoft.FusedConv<activation="Clip", activation_params=[-0.5, 2.0]>'
        "(x, k, b) }",
        lambda *a: np.clip(pointwise(*a), -0.5, 2),
    ),
    "squeezenet": (
        f"{IMAGE} {{ h = Conv(x, k, b) r = Relu(h) p = GlobalAveragePool(r) l = Flatten(p)"
        " y = Softmax(l) }",
        lambda *a: softmax_of_axis(relu(pointwise(*a)).mean((2, 3))),
    ),
    "reshaped": (
        f"{IMAGE} {{ h = Conv(x, k, b) p = GlobalAveragePool(h) y = Reshape(p, columns) }}",
        lambda *a: pointwise(*a).mean((2, 3)),
    ),
    "reshaped by a computed shape": (
        f"{IMAGE} <int64[1] n = {{3}}> {{ h = Conv(x, k) p = GlobalAveragePool(h)"
        " s = Shape<start=0, end=1>(x) d = Concat<axis=0>(s, n) y = Reshape(p, d) }",
        lambda *a: pointwise(*a).mean((2, 3)),
    ),
    "squeezed": (
        f"{IMAGE} <int64[2] n = {{2, 3}}> {{ h = Conv(x, k, b) p = GlobalAveragePool(h)"
        " l = Squeeze(p, n) y = Softmax<axis=1>(l) }",
        lambda *a: softmax_of_axis(pointwise(*a).mean((2, 3))),
    ),
    "expanded": (
        f"{MAPS} <int64[3] n = {{3, 3, 3}}> {{ h = Conv(x, k, b) p = GlobalAveragePool(h)"
        " y = Expand(p, n) }",
        lambda *a: pointwise(*a).mean((2, 3), keepdims=True).repeat(3, 2).repeat(3, 3),
    ),
    "squeezed in front": (
        f"{MATRIX} <int64[1] n = {{0}}> {{ u = Unsqueeze(x, n) h = MatMul(u, w) l = Squeeze(h, n)"
        " y = Softmax<axis=1>(l) }",
        lambda *a: softmax_of_axis(affine(*a)),
    ),
    "segmentation": (
        f"{MAPS} <float[4] f = {{1, 1, 2, 2}}> {{ h = Conv(x, k, b)"
        ' y = Resize<mode="nearest">(h, , f) }',
        lambda *a: pointwise(*a).repeat(2, 2).repeat(2, 3),
    ),
    "segmentation of a size": (
        f"{MAPS} <int64[4] s = {{2, 3, 6, 6}}> {{ h = Conv(x, k, b)"
        ' r = Resize<mode="nearest">(h, , , s) y = Softmax<axis=1>(r) }',
        lambda *a: softmax_of_axis(pointwise(*a).repeat(2, 2).repeat(2, 3), 1),
    ),
    "convolution transposed": (
        f"{MAPS} {{ y = ConvTranspose(x, back, b) }}",
        lambda x, w, b: pointwise(x, np.swapaxes(w, 0, 1), b),
    ),
    "channels last": (
        "f (float[N,4,H,W] x) => (float[N,H,W,3] y) { h = Conv(x, k, b)"
        " l = Transpose<perm=[0,2,3,1]>(h) y = Softmax(l) }",
        lambda *a: softmax_of_axis(pointwise(*a).transpose(0, 2, 3, 1)),
    ),
    "mean of the units taken away": (
        f"{MATRIX} <int64[1] one = {{1}}> {{ h = MatMul(x, w) m = ReduceMean(h, one)"
        " y = Sub(h, m) }",
        lambda *a: (y := affine(*a)) - y.mean(1, keepdims=True),
    ),
    "one scale for all units": (
        f"{MATRIX} <float[3] s = {{2, 2, 2}}> {{ h = MatMul(x, w) y = Mul(h, s) }}",
        lambda *a: 2 * affine(*a),
    ),
    "settings of Constant nodes": (
        f"{IMAGE} {{ h = Conv(x, k, b) n = Constant<value_ints=[2, 3]>()"
        " m = ReduceMean<keepdims=0>(h, n) s = Constant<value_ints=[-1, 3]>() y = Reshape(m, s) }",
        lambda *a: pointwise(*a).mean((2, 3)),
    ),
    "behind operators without shapes": (
        f"{IMAGE} <int64[2] n = {{2, 3}}> {{ g = com.microsoft.QuickGelu<alpha=0.0>(x)"
        " f = Add(g, g) h = Conv(f, k, b) m = ReduceMean<keepdims=0>(h, n) y = Softmax(m) }",
        lambda x, *a: softmax_of_axis(pointwise(x, *a).mean((2, 3))),
    ),
    "logits of 16 bits, cast": (
        f"{MATRIX} {{ c = Cast<to=10>(x) v = Cast<to=10>(w) h = MatMul(c, v) y = Cast<to=1>(h) }}",
        affine,
    ),
    "bias behind a mean of maps": (
        f"{IMAGE} {{ h = Conv(x, k) p = GlobalAveragePool(h) a = Add(planes, p) y = Flatten(a) }}",
        lambda *a: pointwise(*a).mean((2, 3)),
    ),
    "bias behind a Reshape": (
        f"{IMAGE} <int64[2] n = {{2, 3}}> {{ h = Conv(x, k) p = ReduceMean(h, n)"
        " l = Reshape(p, columns) a = Add(l, row) y = Softmax(a) }",
        lambda *a: softmax_of_axis(pointwise(*a).mean((2, 3))),
    ),
    "bias behind a Transpose": (
        "f (float[N,4,H,W] x) => (float[N,H,W,3] y) { h = Conv(x, k)"
        " l = Transpose<perm=[0,2,3,1]>(h) y = Add(l, b) }",
        lambda *a: pointwise(*a).transpose(0, 2, 3, 1),
    ),
    "bias of maps": (f"{MAPS} {{ h = Conv(x, k) y = Add(h, planes) }}", pointwise),
    "weights in front": (
        f"{COLUMNS} {{ h = MatMul(t, x) y = Add(h, column) }}",
        lambda x, w, b: np.einsum("nft,fu->nut", x, w) + b.reshape(1, -1, 1),
    ),
    "running sums of the units": (
        f"{MATRIX} <int64 one = {{1}}> {{ h = MatMul(x, w) y = CumSum(h, one) }}",
        lambda *a: affine(*a).cumsum(1),
    ),
    "units as rows of a product": (
        "f (float[N,4] x) => (float[N,3,1] y) <int64[1] one = {1}, int64[1] two = {2}> {"
        " h = MatMul(x, w) u = Unsqueeze(h, two) m = ReduceMean(x, one) v = Unsqueeze(m, two)"
        " y = MatMul(u, v) }",
        lambda x, w: (affine(x, w) * x.mean(1, keepdims=True))[..., None],
    ),
    "matmul of a transposed weight": (
        f"{MATRIX} {{ y = com.microsoft.TransposeMatMul<transB=1>(x, t) }}", affine),
    "convolution transposed with dynamic pads": (
        f"{MAPS} <int64[4] z = {{0, 0, 0, 0}}> {{"
        " y = com.microsoft.ConvTransposeWithDynamicPads(x, back, z, b) }",
        lambda x, w, b: pointwise(x, np.swapaxes(w, 0, 1), b),
    ),
    "weights in few bits": (
        f"{MATRIX} {{ y = com.microsoft.MatMulNBits<K=4, N=3, bits=4, block_size=16>"
        "(x, packed, scales, , , b) }", affine),
    "in a local function": (
        f"{MATRIX} {{ h = Relu(x) y = local.dense(h, w, b) }}"
        ' <opset_import: ["" : 18], domain: "local"> dense (x, w, b) => (y)'
        " { h = MatMul(x, w) y = Add(h, b) }",
        lambda x, *a: affine(relu(x), *a),
    ),
}  # fmt: skip


TENSORS = {
    "w": W, "t": W.T, "k": K, "b": B, "row": B[None], "column": B.reshape(1, 3, 1),
    "planes": B.reshape(1, 3, 1, 1), "half": W, "bytes": np.int8(W * 10),
    "step": np.float32(0.1), "columns": np.int64([-1, 3]), "back": np.swapaxes(K, 0, 1),
    "packed": np.zeros((3, 1, 8), np.uint8), "scales": np.ones(3, np.float32),
}  # fmt: skip
INPUTS = {MATRIX: X, SEQUENCE: TEXT, IMAGE: IMAGES, MAPS: IMAGES}
INPUTS[COLUMNS] = TEXT.swapaxes(1, 2)


def head_case(text):
    read = set(re.findall(r"\w+", text[text.index("{") :]))
    model = parse_model(text, **{n: a for n, a in TENSORS.items() if n in read})
    for tensor in model.graph.initializer:
        if tensor.name == "half":
            tensor.CopyFrom(numpy_helper.from_array(W.astype(np.float16), "half"))
    return model


def with_random_bias(model):
    """Set the new bias, which is zero, to random numbers."""
    for tensor in model.graph.initializer:
        if tensor.name == "head.bias":
            assert not numpy_helper.to_array(tensor).any()
            values = np.random.default_rng(1).normal(size=tuple(tensor.dims)).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return model


@pytest.mark.parametrize("units", [5, 1])
@pytest.mark.parametrize("name", CASES)
def test_new_units(name, units):
    text, formula = CASES[name]
    model = head_case(text)
    before = model.SerializeToString()
    changed = with_random_bias(
        checked_head(og.replace_head(model, units, activation="same" if units > 1 else None))
    )
    assert model.SerializeToString() == before
    assert units in output_dims(changed)
    w, b = head_tensors(changed)
    read = {*re.findall(r"\w+", text.partition("{")[2])}
    assert (b is not None) == (not read.isdisjoint(("b", "row", "column", "planes")))
    head = text[: text.index(")") + 1]
    x = next((x for h, x in INPUTS.items() if h.startswith(head)), IMAGES)
    [y] = run(changed, x=x)
    if w.ndim == 2 and w.shape[0] == units:
        w = w.T
    expected = formula(x, w) if b is None else formula(x, w, b)
    assert y.shape == expected.shape
    if units > 1:
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


ACTIVATIONS = {
    "same": lambda s: softmax_of_axis(s),
    None: lambda s: s,
    "sigmoid": lambda s: 1 / (1 + np.exp(-s)),
    "log_softmax": lambda s: np.log(softmax_of_axis(s)),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "text",
    [
        "{ h = MatMul(x, w) y = Softmax(h) }",
        "<int64[1] a = {1}> { h = MatMul(x, w) m = ReduceMax(h, a) d = Sub(h, m) e = Exp(d)"
        " s = ReduceSum(e, a) y = Div(e, s) }",
    ],
)
def test_activations(text, activation):
    model = og.replace_head(head_case(f"{MATRIX} {text}"), 5, activation=activation)
    [y] = run(checked_head(model), x=X)
    np.testing.assert_allclose(y, ACTIVATIONS[activation](X @ head_tensors(model)[0]), rtol=1e-5)


def test_numbers_of_classes_only(caplog):
    """A model that returns an ArgMax still does, and trains by the scores, which are named."""
    model = head_case(f"{MATRIX.replace('float[N,3]', 'int64[N]')} {{ h = MatMul(x, w)"
                      " s = Add(h, b) y = ArgMax<axis=1, keepdims=0>(s) }")  # fmt: skip
    with caplog.at_level("INFO", "onnxgrad"):
        changed = checked_head(og.replace_head(model, 5))
    [said] = [r.getMessage() for r in caplog.records if "numbers of classes" in r.getMessage()]
    assert "select_model_inputs_outputs(model, outputs=['s'])" in said
    labels = np.arange(6) % 5
    trainer = og.Trainer(changed, "cross_entropy", train="head.*", learning_rate=0.1)
    trainer.fit(X, labels, epochs=300)
    [predicted] = run(trainer.model, x=X)
    assert (predicted == labels).mean() > 0.6
    scores = og.graph.select_model_inputs_outputs(trainer.model, outputs=["s"])
    assert np.array_equal(run(scores, x=X)[0].argmax(1), predicted)


@pytest.mark.parametrize("activation", ["same", None])
def test_scores_probabilities_and_classes(activation):
    """All outputs behind the layer get the new units, also where two become the same."""
    text = """f (float[N,4] x) => (float[N,3] s, float[N,3] y, int64[N] a) {
        s = MatMul(x, w) y = Softmax(s) a = ArgMax<axis=1, keepdims=0>(y) }"""
    model = checked_head(og.replace_head(head_case(text), 5, activation=activation))
    results = run_named(model, x=X)
    scores = X @ head_tensors(model)[0]
    np.testing.assert_allclose(results["s"], scores, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(results["y"], ACTIVATIONS[activation](scores), rtol=1e-5, atol=1e-6)
    assert np.array_equal(results["a"], scores.argmax(1))
    assert [output_dims(model, i) for i in range(3)] == [["N", 5], ["N", 5], ["N"]]


def test_activation_behind_scores():
    model = og.replace_head(head_case(f"{MATRIX} {{ y = MatMul(x, w) }}"), 5, activation="softmax")
    [y] = run(checked_head(model), x=X)
    np.testing.assert_allclose(y, softmax_of_axis(X @ head_tensors(model)[0]), rtol=1e-5)


@pytest.mark.parametrize("opset", [9, 12])
def test_softmax_of_channels_before_opset_13(opset):
    model = onnx.parser.parse_model(f"""<ir_version: 4, opset_import: ["": {opset}]>
        f (float[N,4,H,W] x) => (float[N,3,H,W] y) <float[3,4,1,1] k = {{{", ".join("0" * 12)}}}> {{
        y = Conv(x, k) }}""")
    changed = checked_head(og.replace_head(model, 5, activation="softmax"))
    assert changed.opset_import[0].version == opset
    [y] = run(changed, x=IMAGES)
    np.testing.assert_allclose(
        y, softmax_of_axis(pointwise(IMAGES, head_tensors(changed)[0]), 1), rtol=1e-5
    )


def test_layout_of_a_machine():
    model = parse_model(
        "f (float[N,16,H,W] x) => (float[N,16,H,W] y) { y = com.microsoft.nchwc.Conv(x, v) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((16, 16, 1, 1), "f"), "v"))
    model.opset_import.add(domain="com.microsoft.nchwc", version=1)
    with pytest.raises(ValueError, match=naming("Conv", "onnxruntime optimized")):
        og.replace_head(model, 5)


def test_one_unit_and_several():
    """A Softmax over one unit would be 1, and a Sigmoid is no distribution over several."""
    several = head_case(f"{MATRIX} {{ h = MatMul(x, w) y = Softmax(h) }}")
    one = og.replace_head(several, 1)
    [y] = run(checked_head(one), x=X)
    scores = X @ head_tensors(one)[0]
    np.testing.assert_allclose(y, 1 / (1 + np.exp(-scores)), rtol=1e-5)
    again = og.replace_head(one, 4)
    assert read_metadata(again, HEAD) == ["head.weight"]
    np.testing.assert_allclose(run(again, x=X)[0].sum(1), 1, rtol=1e-5)


def test_squeezed_unit():
    """The axis of the only unit, which the model removes, stays when there are several."""
    model = parse_model(
        "f (float[N,4] x) => (float[N] y) <int64[1] a = {1}> {"
        " h = MatMul(x, w) s = Sigmoid(h) y = Squeeze(s, a) }",
        w=W[:, :1],
    )
    assert run(checked_head(og.replace_head(model, 1)), x=X)[0].shape == (6,)
    several = checked_head(og.replace_head(model, 5))
    np.testing.assert_allclose(
        run(several, x=X)[0], softmax_of_axis(X @ head_tensors(several)[0]), rtol=1e-5
    )
    assert output_dims(several) == ["N", 5]


def test_a_squeeze_without_axes():
    """It stays where it removes other axes than that of several units, and goes with one unit."""
    maps = parse_model(
        "f (float[N,4,1,1] x) => (float[N,3] y) { h = Conv(x, k) y = Squeeze(h) }", k=K
    )
    several = checked_head(og.replace_head(maps, 5))
    ones = IMAGES[:, :, :1, :1]
    expected = pointwise(ones, head_tensors(several)[0])[:, :, 0, 0]
    np.testing.assert_allclose(run(several, x=ones)[0], expected, rtol=1e-5, atol=1e-6)
    text = "f (float[N,{}4] x) => (float[N] y) {{ h = MatMul(x, w) y = Squeeze(h) }}"
    one = parse_model(text.format(""), w=W[:, :1])
    assert output_dims(checked_head(og.replace_head(one, 5))) == ["N", 5]
    both = parse_model(text.format("1,"), w=W[:, :1])
    unknown = parse_model(text.format("T,"), w=W[:, :1])
    for model, units in ((maps, 1), (both, 5), (unknown, 5)):
        with pytest.raises(ValueError, match=naming("Squeeze", "its axes")):
            og.replace_head(model, units)


@pytest.mark.parametrize(
    "node",
    [
        f"LinearRegressor<targets=3, coefficients={[0.5] * 12}>",
        f"LinearRegressor<targets=3, coefficients={[0.5] * 12}, intercepts={[1.0] * 3}>",
        f"SVMRegressor<coefficients={[0.5] * 4}, rho=[1.0], n_supports=0>",
        f"SVMRegressor<support_vectors={[0.5] * 8}, coefficients=[1.0, 2.0], n_supports=2>",
    ],
)
def test_a_regressor_tells_the_number_of_features(node):
    """Where the shape of what it reads does not."""
    model = parse_model(f"f (float[N,M] x) => (float[N,K] y) {{ y = ai.onnx.ml.{node}(x) }}")
    changed = og.replace_head(model, 5)
    w, b = head_tensors(changed)
    assert (w.shape, b.shape) == ((5, 4), (5,))
    np.testing.assert_allclose(run(changed, x=X)[0], affine(X, w.T, b), rtol=1e-5, atol=1e-6)


def test_initial_weights():
    """Glorot's bounds, and the variance of He et al., which are reached by large layers."""
    w = fresh_weights((300, 500), "linear", 0)
    limit = np.sqrt(6 / 800)
    assert limit * 0.99 < np.abs(w).max() < limit
    k = fresh_weights((200, 30, 3, 3), "convolution", 0)
    np.testing.assert_allclose(k.var(), 2 / (30 * 9), rtol=0.02)
    models = [og.replace_head(head_case(CASES["gemm"][0]), 5, seed=s) for s in (1, 1, 2)]
    a, b, c = (head_tensors(m)[0] for m in models)
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)
    transposed = head_tensors(og.replace_head(head_case(CASES["gemm transposed"][0]), 5, seed=1))[0]
    assert np.array_equal(transposed.T, a)


TWO = """f (float[N,4] x) => (float[N,3] y, float[N,3] z) {
    a = MatMul(x, w) y = Relu(a) c = MatMul(x, v) z = Add(c, b) }"""


def test_named_layer_and_output():
    model = parse_model(TWO, w=W, v=W, b=B)
    model.graph.node[2].name = "second"
    with pytest.raises(ValueError, match=r"several layers.*'a'.*'c'.*output="):
        og.replace_head(model, 5)
    for options in ({"at": n} for n in ("second", "c", "z", "v", "b")):
        changed = checked_head(og.replace_head(model, 5, **options))
        assert (output_dims(changed, 0), output_dims(changed, 1)) == (["N", 3], ["N", 5])
    assert output_dims(og.replace_head(model, 5, output="y")) == ["N", 5]
    with pytest.raises(ValueError, match=naming("secnd", "'second'")):
        og.replace_head(model, 5, at="secnd")
    with pytest.raises(ValueError, match=r"at='\?'"):
        og.graph.features(model, at="?")
    with pytest.raises(ValueError, match=r"Relu.*no linear"):
        og.replace_head(model, 5, at="y")
    with pytest.raises(ValueError, match="Unknown output 'q'"):
        og.replace_head(model, 5, output="q")


def test_some_of_the_best_units():
    text = """f (float[N,4] x) => (int64[1,N] y) <int64[1] two = {2}, int64[1] zero = {0},
        int64[1] one = {1}> { h = MatMul(x, w) v, i = TopK(h, two) s = Slice(i, one, two, one)
        y = Transpose(s) }"""
    changed = checked_head(og.replace_head(head_case(text), 5))
    [y] = run(changed, x=X)
    assert np.array_equal(y[0], np.argsort(-(X @ head_tensors(changed)[0]))[:, 1])


REFUSED = {
    "scale of each unit": (
        f"{MATRIX} {{ h = MatMul(x, w) y = Mul(h, b) }}", r"Mul.*'b' has the shape \[3\]"),
    "normalized units": (
        f"{MATRIX} {{ h = MatMul(x, w) y = LayerNormalization(h, b) }}", "LayerNormalization"),
    "not the last": (f"{MATRIX} {{ h = MatMul(x, w) y = MatMul(h, v) }}", "MatMul.*as features"),
    "two added up": (
        f"{MATRIX} {{ h = MatMul(x, w) a = MatMul(x, w) y = Add(h, a) }}",
        "several layers.*add_head"),
    "normalized units with one scale": (
        f"{MATRIX} <float[1] s = {{1}}> {{ h = MatMul(x, w) y = GroupNormalization<num_groups=1>"
        "(h, s, s) }", "GroupNormalization"),
    "a bias of each unit": (
        f"{MATRIX} {{ h = MatMul(x, w) y = com.microsoft.FastGelu(h, b) }}",
        "FastGelu.*'b' may have a number for each"),
    "products with rows of each unit": (
        "f (float[N,4] x, float[3,1,N] r) => (float[3,1,1] y) <int64[1] two = {2}> {"
        " h = MatMul(x, w) t1 = Transpose(h) u = Unsqueeze(t1, two) y = MatMul(r, u) }",
        "MatMul.*'r' may have a number for each"),
    "summed with a factor of each unit": (
        "f (float[N,4] x, float[3] c) => (float[N] y) { h = MatMul(x, w)"
        ' y = Einsum<equation="nu,u->n">(h, c) }', "Einsum"),
    "some of them": (
        "f (float[N,4] x) => (float[N,1] y) <int64[1] i = {2}> {"
        " h = MatMul(x, w) y = Gather<axis=1>(h, i) }", "Gather.*selects"),
    "mixed with positions": (
        "f (float[N,4,3,3] x) => (float[N,27] y) { h = Conv(x, k) y = Flatten(h) }",
        "Flatten.*mixes"),
    "in integers": (
        "f (uint8[N,4] x) => (int32[N,3] y) { y = MatMulInteger(x, bytes) }", "in integers"),
    "rows first": (
        f"{MAPS} {{ y = com.microsoft.NhwcConv(x, k, b) }}", "NhwcConv.*no gradient"),
    "in a subgraph": (
        "f (bool c, float[N,4] x) => (float[N,3] y) { y = If(c) <then_branch ="
        " a () => (float[N,3] r) { r = MatMul(x, w) }, else_branch = b () => (float[N,3] s)"
        " { s = MatMul(x, w) }> }", "If.*in a subgraph"),
    "weights first": ("f (float[4,N] x) => (float[3,N] y) { y = Gemm(t, x) }", "second operand"),
    "edges between rows": (
        "f (float[4,4] x) => (float[3,3] y) { h = MatMul(x, w) a = MatMul(t, h) y = Add(a, b) }",
        "second operand"),
    "a bias behind a function": (
        f"{IMAGE} {{ h = Conv(x, k) r = Relu(h) p = GlobalAveragePool(r) y = Add(p, planes) }}",
        r"Add.*'planes' has the shape \[1, 3, 1, 1\]"),
    "groups": (
        "f (float[N,4,H,W] x) => (float[N,4,H,W] y) { y = Conv<group=4>(x, g) }", "groups"),
    "none": ("f (float[N,4] x) => (float[N,4] y) { y = Relu(x) }", "no linear"),
    "a row without a batch": (
        "f (float[2] x) => (int64[1] l, float[1,2] y) { l, y = ai.onnx.ml.LinearClassifier<"
        "classlabels_ints=[0, 1], coefficients=[1.0, 2.0, 3.0, 4.0]>(x) }", "matrix"),
    "a color for each unit": (
        "f (float[N,4] x) => (float[N,4] y) { h = MatMul(x, w) a = ArgMax<axis=1, keepdims=0>(h)"
        " y = Gather(t, a) }", "Gather.*old units"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_are_refused(name):
    text, message = REFUSED[name]
    extra = {"v": W[:3], "g": np.zeros((4, 1, 1, 1))}
    model = head_case(text)
    read = set(re.findall(r"\w+", text))
    for n in extra.keys() & read:
        model.graph.initializer.append(numpy_helper.from_array(extra[n].astype(np.float32), n))
    options = {"at": "h"} if name == "not the last" else {}
    with pytest.raises(ValueError, match=message):
        og.replace_head(model, 5, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"units": 0}, "units=0: pass a number of units of at least 1"),
        ({"units": True}, "units=True: pass a number of units of at least 1"),
        ({"units": "cat"}, "units='cat': pass a number, or a list of classes"),
        ({"units": []}, "units=.*: pass one class"),
        ({"units": ["a", 1]}, "units=.*all strings or all ints"),
        ({"units": ["a", "a"]}, "units=.*class is repeated"),
        ({"units": 5, "activation": "sofmax"}, "Did you mean 'softmax'"),
        ({"units": 5, "name": ""}, "name must not be empty"),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        og.replace_head(head_case(CASES["gemm"][0]), **arguments)


def test_weights_that_are_inputs_too():
    """Before IR version 4, every initializer is an input; the new ones are not."""
    model = head_case(CASES["matmul and add"][0])
    model.ir_version = 3
    for name, shape_of in {"w": (4, 3), "b": (3,)}.items():
        kind = model.graph.input.add(name=name).type.tensor_type
        kind.elem_type = onnx.TensorProto.FLOAT
        for d in shape_of:
            kind.shape.dim.add(dim_value=d)
    changed = checked_head(og.replace_head(model, 5))
    assert [x.name for x in changed.graph.input] == ["x"]
    np.testing.assert_allclose(run(changed, x=X)[0], X @ head_tensors(changed)[0], rtol=1e-5)


NEW = ["ant", "bee"]
REWRITTEN = {  # {key and form: (before, after with names, after with a number)}
    "names, by number": ("{0: 'cat', 1: 'dog', 2: 'owl'}", "{0: 'ant', 1: 'bee'}", None),
    "names, in JSON": ('["cat", "dog", "owl"]', '["ant", "bee"]', None),
    "names, by text": (
        '{"0": "cat", "1": "dog", "2": "owl"}',
        '{"0": "ant", "1": "bee"}',
        None,
    ),
    "names": ("of animals", "of animals", "of animals"),
    "character": ("cat\ndog\nowl\n", "ant\nbee\n", None),
    "character, without the blank": ("a\nb", None, None),
    "nc": ("3", "3", "3"),
    "labels": ('["cat", "dog", "owl"]', *['["cat", "dog", "owl"]'] * 2),
}


@pytest.mark.parametrize("form", REWRITTEN)
def test_metadata_of_the_old_classes(form, caplog):
    key, (before, *expected) = form.split(",")[0], REWRITTEN[form]
    for units, after in zip((NEW, 2), expected, strict=True):
        model = head_case(CASES["matmul and add"][0])
        model.metadata_props.add(key=key, value=before)
        with caplog.at_level("WARNING", "onnxgrad"):
            changed = og.replace_head(model, units)
        found = {
            e.key: e.value for e in changed.metadata_props if not e.key.startswith("onnxgrad.")
        }
        assert found == ({} if after is None else {key: after})
        told = "removed" if after is None else "rewritten"
        assert (f"{told}: ['{key}']" in caplog.text) == (after != before)
        caplog.clear()


def test_metadata_of_another_output_stay():
    model = parse_model(
        "f (float[N,4] x) => (float[N,3] y, float[N,5] z) { y = MatMul(x, w) z = MatMul(x, v) }",
        w=W,
        v=RNG.normal(size=(4, 5)).astype(np.float32),
    )
    model.metadata_props.add(key="names", value="['a', 'b', 'c', 'd', 'e']")
    changed = og.replace_head(model, 2, "w")
    found = {e.key: e.value for e in changed.metadata_props}
    assert found["names"] == "['a', 'b', 'c', 'd', 'e']"


@pytest.mark.parametrize(("version", "opset"), [(4, 11), (6, 11), (7, 13), (8, 17), (10, 21)])
def test_the_ir_version_stays(version, opset):
    text = "f (float[N,4] x) => (float[N,3] y) { y = MatMul(x, w) }"
    model = parse_model(text, w=W)
    model.ir_version, model.opset_import[0].version = version, opset
    changed = og.replace_head(model, 5)
    onnx.checker.check_model(changed, full_check=True)
    assert (changed.ir_version, changed.opset_import[0].version) == (version, opset)


def test_tied_weights(caplog):
    text = """f (int64[N] i) => (float[N,3] y, float[N,3] e) {
        e = Gather(t, i) a = Transpose(t) h = MatMul(e, t) y = MatMul(h, a) }"""
    square = RNG.normal(size=(3, 3)).astype(np.float32)
    changed = og.replace_head(parse_model(text, t=square), 5, output="y")
    assert "tied" in caplog.text
    assert {t.name for t in changed.graph.initializer} == {"t", "head.weight"}
    assert np.array_equal(run_named(changed, i=np.int64([0, 1]))["e"], square[:2])


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_dtypes(dtype):
    kind = {np.float16: "float16", np.float64: "double"}[dtype]
    text = f"f ({kind}[N,4] x) => ({kind}[N,3] y) {{ h = Gemm(x, w, b) y = Softmax(h) }}"
    model = parse_model(text, w=W.astype(dtype), b=B.astype(dtype))
    changed = checked_head(og.replace_head(model, 5))
    assert [w.dtype for w in head_tensors(changed)] == [dtype] * 2
    x = X.astype(dtype)
    [y] = run(changed, x=x)
    np.testing.assert_allclose(y, softmax_of_axis(x @ head_tensors(changed)[0]), rtol=1e-2)


def test_a_loss_inside():
    """Labels of the old number of classes become those of the new one."""
    text = f"{MATRIX} {{ h = Gemm(x, w, b) y = Softmax(h) }}"
    model = og.replace_head(og.add_loss_output(head_case(text), "squared_error"), 5, output="loss")
    label = next(x for x in model.graph.input if x.name == "label")
    assert label.type.tensor_type.shape.dim[1].dim_value == 5
    labels = np.eye(5, dtype=np.float32)[[0, 1, 2, 3, 4, 0]]
    p = softmax_of_axis(X @ head_tensors(model)[0])
    loss = run_named(model, {"X": X, "x": X, "label": labels})["loss"]
    np.testing.assert_allclose(loss.item(), ((p - labels) ** 2).sum(), rtol=1e-4)


def test_notes():
    """A head is noted, also when it is trained: adapters that come later train beside it."""
    model = og.replace_head(head_case(CASES["matmul and add"][0]), ["a", "b", "c", "d", "e"])
    assert read_metadata(model, HEAD) == ["head.weight", "head.bias"]
    assert read_metadata(model, CLASSES) == ["a", "b", "c", "d", "e"]
    assert [t.name for t in og.trainable(model) if t.trains] == ["head.weight", "head.bias"]
    trainer = og.Trainer(model, "cross_entropy").fit(X, np.arange(6) % 5)
    assert read_metadata(trainer.model, HEAD) == ["head.weight", "head.bias"]
    assert read_metadata(trainer.model, CLASSES) == ["a", "b", "c", "d", "e"]
    seed = og.compat.OrtGradientForwardBackwardOptimizer(
        model, ["head.weight"], max_iter=1, batch_size=2
    ).fit(X, np.zeros((6, 5), np.float32))
    assert read_metadata(seed.get_trained_onnx(), HEAD) == ["head.weight", "head.bias"]
    write_metadata(model, ADAPTERS, [{"tensors": ["head.weight"]}])
    trainer = og.Trainer(model, "cross_entropy").fit(X, np.arange(6) % 5)
    assert read_metadata(trainer.model, HEAD) == ["head.weight", "head.bias"]


def test_training_is_stable():
    """Scores that a Softmax in float32 rounds to 0 have a gradient."""
    model = og.replace_head(head_case(f"{MATRIX} {{ h = Gemm(x, w, b) y = Softmax(h) }}"), 5)
    x, y = np.float32([[200, 0, 0, 0], [0, -200, 0, 0]]), np.int64([0, 3])
    w = head_tensors(model)[0]
    scores = (x.astype(np.float64) @ w).round(12)
    expected = np.mean(
        np.log(np.exp(scores - scores.max(1, keepdims=True)).sum(1))
        + (scores.max(1) - scores[[0, 1], y])
    )
    trainer = og.Trainer(model, "cross_entropy", optimizer="sgd", learning_rate=1e-3).fit(x, y)
    np.testing.assert_allclose(trainer.history[0]["loss"], expected, rtol=1e-5)
    gradient = x.T @ (softmax_of_axis(scores) - np.eye(5)[y]) / 2
    after = og.graph.get_train_initializer(trainer.model)["head.weight"][0]
    np.testing.assert_allclose(after, w - 1e-3 * gradient, rtol=1e-4, atol=1e-6)


def test_a_second_head_has_the_names_of_the_first():
    first = og.replace_head(head_case(CASES["matmul and add"][0]), 4)
    second = checked_head(og.replace_head(first, 5))
    assert read_metadata(second, HEAD) == ["head.weight", "head.bias"]
    assert {t.name for t in second.graph.initializer} >= {"head.weight", "head.bias"}
    np.testing.assert_allclose(run(second, x=X)[0], X @ head_tensors(second)[0], rtol=1e-5)


def test_a_trained_head_trains_beside_adapters():
    text = "f (float[N,4] x) => (float[N,3] y) { h = MatMul(x, w) t = Tanh(h) y = MatMul(t, v) }"
    model = parse_model(text, w=RNG.normal(size=(4, 4)).astype(np.float32), v=W)
    head = og.replace_head(model, 2)
    trained = og.Trainer(head, "cross_entropy", train="head.*").fit(X, np.arange(6) % 2).model
    tensors = ["head.weight", "w.lora_A.weight", "w.lora_B.weight"]
    replaced = og.replace_head(og.add_lora(model, "w"), 2)
    for adapted in (og.add_lora(head, "w"), og.add_lora(trained, "w"), replaced):
        assert sorted(t.name for t in og.trainable(adapted).trained) == tensors


KEPT = """gemm; gemm transposed; gemm with factors; gemm without bias; matmul; matmul and add;
    add the other way; fused matmul; fused gemm; fused conv; segmentation; convolution transposed;
    in a local function; tokens; bias behind a mean of maps; weights in front"""


@pytest.mark.parametrize("name", [name.strip() for name in KEPT.split(";")])
def test_kept_units(name):
    """Units that are kept have their weights bit for bit, wherever they are now."""
    text = CASES[name][0]
    model, x = head_case(text), next(x for head, x in INPUTS.items() if text.startswith(head))
    new = og.replace_head(model, 5, keep=[2, None, 0, 1, None])
    tensors = initializer_arrays(model)
    for names, after in zip(
        (["w", "t", "k", "back"], ["b", "row", "column", "planes"]),
        head_tensors(checked_head(new)),
        strict=True,
    ):
        if after is not None:
            old, axis = next(tensors[n] for n in names if n in tensors), after.shape.index(5)
            kept = np.take(after, [0, 2, 3], axis)
            np.testing.assert_array_equal(kept, np.take(old, [2, 0, 1], axis))
    axis = 2 if name == "tokens" else 1
    before, after = (
        np.take(run(m, x=x)[0], units, axis) for m, units in ((model, [2, 0, 1]), (new, [0, 2, 3]))
    )
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


def test_new_units_begin_around_the_mean_of_those_that_are_kept():
    model = head_case(CASES["gemm with factors"][0])
    new, drawn = (og.replace_head(model, 5, keep=keep) for keep in ([2, None, 0, None, None], None))
    (w, b), (fresh_ones, _) = head_tensors(new), head_tensors(drawn)
    mean = W[:, [2, 0]].mean(axis=1, keepdims=True)
    expected = fresh_ones[:, [1, 3, 4]] / 2 + mean  # by alpha, which stays
    np.testing.assert_allclose(w[:, [1, 3, 4]], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(b[[1, 3, 4]], B[[2, 0]].mean(), rtol=1e-5)


def test_units_that_cannot_be_kept():
    model = head_case(CASES["gemm"][0])
    for keep, named in (
        ([0, 1], ["keep=", "2 entries", "4 units"]),
        ([0, 1, 3, None], ["keep=", "unit 3", "Gemm", "0 to 2"]),
    ):
        with pytest.raises(ValueError, match=naming(*named)):
            og.replace_head(model, 4, keep=keep)
    for name in "transposed weights", "weights cast", "weights dequantized":
        with pytest.raises(ValueError, match=naming("keep=", "quantized", "as floats")):
            og.replace_head(head_case(CASES[name][0]), 4, keep=[0, 1, 2, None])
