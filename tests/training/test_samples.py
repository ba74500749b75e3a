"""Samples of predictions with dropout: in distribution as PyTorch draws them."""

from __future__ import annotations

import numpy as np
import pytest

import onnxgrad as og
from tests.support.errors import naming
from tests.support.exports import export_module
from tests.support.models import parse_model
from tests.support.running import run

R = np.random.default_rng(0)
W1, W2 = (R.normal(0, 0.7, shape).astype(np.float32) for shape in ((3, 8), (8, 2)))
NETWORK = """f (float[N,3] x) => (float[N,2] y) <float ratio = {0.25}> {
    h = MatMul(x, w1)  r = Relu(h)  d = Dropout(r, ratio)  y = MatMul(d, w2) }"""
X = R.normal(size=(10, 3)).astype(np.float32)


def dropping_model(text=NETWORK, **options):
    return parse_model(text, w1=W1, w2=W2, **options)


def spread(ratio):
    """Return mean and standard deviation of the outputs, if dropout has this ratio."""
    hidden = np.maximum(X @ W1, 0)
    variances = (hidden[:, :, None] * W2) ** 2 * ratio / (1 - ratio)
    return hidden @ W2, np.sqrt(variances.sum(1))


def require_distribution(drawn, mean, std):
    """Raise an error unless samples have this mean and standard deviation, up to chance."""
    count = len(drawn.samples)
    assert (np.abs(drawn.mean - mean) < 5 * std / np.sqrt(count) + 1e-5).all()
    np.testing.assert_allclose(drawn.std, std, rtol=0.12, atol=1e-5)


def largest_difference(one, other):
    """Return the statistic of Kolmogorov and Smirnov; equal numbers may differ by rounding."""
    one, other = (np.sort(np.round(numbers, 4)) for numbers in (one, other))
    grid = np.concatenate([one, other])
    shares = (np.searchsorted(a, grid, "right") / len(a) for a in (one, other))
    return np.abs(np.subtract(*shares)).max()


def test_mean_and_deviation_of_samples():
    drawn = og.predict_samples(dropping_model(), X, 2000)
    assert drawn.samples.shape == (2000, 10, 2)
    np.testing.assert_allclose(drawn.mean, drawn.samples.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(drawn.std, drawn.samples.std(0), rtol=1e-4, atol=1e-5)
    require_distribution(drawn, *spread(0.25))


def test_samples_are_distributed_as_those_of_pytorch():
    torch = pytest.importorskip("torch")
    nn = torch.nn
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4, momentum=0.0), nn.ReLU(), nn.Dropout(0.3),
        nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3),
    )  # fmt: skip
    module[1].running_mean[:] = torch.randn(4)
    rows = torch.randn(6, 2, 5)
    options = {"dynamic_axes": {"x": {0: "N"}}, "input_names": ["x"]}
    model = export_module(module, (rows[:2],), train=True, **options)
    drawn = og.predict_samples(model, rows.numpy(), 3000)
    module.eval()
    for layer in module:
        if isinstance(layer, nn.Dropout):
            layer.train()
    with torch.no_grad():
        witness = np.stack([module(rows).numpy() for _ in range(3000)])
    own = og.predict_samples(og.Trainer(model, "squared_error").model, rows.numpy(), 3000, seed=1)
    for found in (drawn, own):  # the trained file is in inference mode, and keeps the ratios
        std = witness.std(0)
        error = 5 * std * np.sqrt(2 / 3000)
        assert (np.abs(found.mean - witness.mean(0)) < error).all()
        np.testing.assert_allclose(found.std, std, rtol=0.12)
        columns = (samples.reshape(3000, -1).T for samples in (found.samples, witness))
        for one, other in zip(*columns, strict=True):
            assert largest_difference(one, other) < 2.2 * np.sqrt(2 / 3000)


def test_samples_are_a_function_of_the_seed():
    model = dropping_model()
    first = og.predict_samples(model, X, 20).samples
    np.testing.assert_array_equal(first, og.predict_samples(model, X, 20).samples)
    assert not np.array_equal(first, og.predict_samples(model, X, 20, seed=1).samples)
    equal = np.repeat(X[:1], 8, 0)
    by_batch = og.predict_samples(model, equal, 50, batch_size=2).samples
    for other in range(1, 8):  # each row, each batch and each sample has masks of its own
        assert not np.array_equal(by_batch[:, 0], by_batch[:, other])
    assert len(np.unique(by_batch[:, 0], axis=0)) > 2


STATED = {  # how a file states the ratio, and the ratio
    "a node in inference mode": (NETWORK, 18, 0.25),
    "training mode": (
        NETWORK.replace("d = D", "t = Constant<value = bool {1}>()  d = D").replace(
            "ratio)", "ratio, t)"
        ),
        18,
        0.25,
    ),
    "a false mode": (
        NETWORK.replace("d = D", "t = Constant<value = bool {0}>()  d = D").replace(
            "ratio)", "ratio, t)"
        ),
        18,
        0.25,
    ),
    "a Constant": (
        NETWORK.replace("d = D", "q = Constant<value = float {0.4}>()  d = D").replace(
            "(r, ratio)", "(r, q)"
        ),
        18,
        0.4,
    ),
    "an attribute": (NETWORK.replace("Dropout(r, ratio)", "Dropout<ratio = 0.4>(r)"), 9, 0.4),
    "nothing": (NETWORK.replace("(r, ratio)", "(r)"), 18, 0.5),  # the default of ONNX
}


@pytest.mark.parametrize("case", STATED)
def test_ratios_that_files_state(case):
    text, opset, ratio = STATED[case]
    model = dropping_model(text, opset=opset)
    require_distribution(og.predict_samples(model, X, 2000), *spread(ratio))
    changed = og.predict_samples(model, X, 2000, dropout={"d": 0.6})
    require_distribution(changed, *spread(0.6))


def test_dropout_that_the_file_lacks():
    plain = dropping_model(NETWORK.replace("Dropout(r, ratio)", "Identity(r)"))
    with pytest.raises(ValueError, match=naming("Dropout", "insert_dropout", "dropout=")):
        og.predict_samples(plain, X, 5)
    with pytest.raises(ValueError, match=naming("Dropout", "insert_dropout")):
        og.predict_samples(dropping_model(), X, 5, dropout={"d": 0})
    with pytest.raises(ValueError, match=naming("'nothing'", "dropout=")):
        og.predict_samples(dropping_model(), X, 5, dropout={"nothing": 0.1})
    for drawn in (
        og.predict_samples(plain, X, 2000, dropout={"r": 0.3}),
        og.predict_samples(og.insert_dropout(plain, after="Relu", rate=0.3), X, 2000),
    ):
        require_distribution(drawn, *spread(0.3))


def test_dropout_of_adapters():
    model = og.add_lora(
        dropping_model(NETWORK.replace("Dropout(r, ratio)", "Identity(r)")), "w1", dropout=0.3
    )
    b = R.normal(size=(8, 8)).astype(np.float32)
    model = og.graph.replace_initializers_into_onnx(model, {"w1.lora_B.weight": b})
    share = og.predict_samples(
        model, X[:, :1] * np.float32([[1, 0, 0]]), 500, outputs=["h"]
    ).samples
    base = X[:, :1] * np.float32([[1, 0, 0]]) @ W1
    dropped = np.isclose(share, base, atol=1e-6).all(-1).mean()  # the only feature of the adapter
    assert abs(dropped - 0.3) < 0.05


OUTPUTS = NETWORK.replace("float[N,2] y)", "float[N,2] y, float[N] s, int64[N] k)").replace(
    "y = MatMul(d, w2)",
    "y = MatMul(d, w2)  s = ReduceSum<keepdims = 0>(y, one)  k = ArgMax<axis = 1, keepdims = 0>(y)",
)


def test_several_outputs():
    model = dropping_model(OUTPUTS, one=np.array([1]))
    drawn = og.predict_samples(model, X, 30)
    assert list(drawn.samples) == list(drawn.mean) == list(drawn.std) == ["y", "s"]
    assert drawn.samples["s"].shape == (30, 10)
    assert drawn.std["s"].shape == (10,)
    np.testing.assert_allclose(
        drawn.samples["s"], drawn.samples["y"].sum(-1), rtol=1e-5, atol=1e-5
    )  # of the same masks
    one = og.predict_samples(model, X, 30, outputs=["y"])
    np.testing.assert_array_equal(one.samples, drawn.samples["y"])
    inner = og.predict_samples(model, X, 30, outputs=["h", "d"])
    assert not inner.std["h"].any()
    assert inner.std["d"].any()
    with pytest.raises(ValueError, match=naming("'k'", "INT64", "outputs=")):
        og.predict_samples(model, X, 30, outputs=["k"])
    with pytest.raises(ValueError, match=naming("'nothing'")):
        og.predict_samples(model, X, 30, outputs=["nothing"])
    labels = parse_model("f (float[N,3] x) => (int64[N] k) { k = ArgMax<keepdims = 0>(x) }")
    with pytest.raises(ValueError, match=naming("output", "outputs=")):
        og.predict_samples(labels, X, 30)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("count", [1, 3, 10])
def test_fixed_batches_and_any_count_of_rows(rows, count):
    model = dropping_model(NETWORK.replace("N", str(rows)))
    drawn = og.predict_samples(model, X[:count], 1500)
    mean, std = (array[:count] for array in spread(0.25))
    require_distribution(drawn, mean, std)


def test_rows_of_a_fixed_batch_that_depend_on_each_other():
    text = NETWORK.replace("N", "4").replace("d = D", "m = ReduceMean(r)  q = Sub(r, m)  d = D")
    model = dropping_model(text.replace("(r, ratio)", "(q, ratio)"))
    assert og.predict_samples(model, X[:8], 5).samples.shape == (5, 8, 2)
    with pytest.raises(ValueError, match=naming("4 rows", "multiple")):
        og.predict_samples(model, X, 5)


def test_kinds_of_data():
    """A table's columns, a dict and batches with labels, which are not read."""
    pandas = pytest.importorskip("pandas")
    want = og.predict_samples(dropping_model(), X, 7).samples
    y = np.zeros(len(X), np.int64)
    for data in ({"x": X}, pandas.DataFrame(X), (X, y), X.astype(np.float64), X.tolist()):
        np.testing.assert_array_equal(og.predict_samples(dropping_model(), data, 7).samples, want)
    halves = [(X[:5], y[:5]), (X[5:], y[5:])]
    for batches in (halves, iter(halves)):
        drawn = og.predict_samples(dropping_model(), batches, 7).samples
        np.testing.assert_array_equal(
            drawn, og.predict_samples(dropping_model(), X, 7, batch_size=5)[2]
        )
    with pytest.raises(ValueError, match=naming("x")):
        og.predict_samples(dropping_model(), X[:, :2], 7)
    for n in (0, -1, 1.5):
        with pytest.raises((ValueError, TypeError), match="n"):
            og.predict_samples(dropping_model(), X, n)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "double"])
def test_other_dtypes(dtype):
    import ml_dtypes

    kind = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "double": np.float64}[dtype]
    weights = {"w1": W1.astype(kind), "w2": W2.astype(kind)}
    model = parse_model(NETWORK.replace("float[", f"{dtype}["), **weights)
    drawn = og.predict_samples(model, X.astype(kind), 2000)
    assert drawn.samples.dtype == kind
    assert drawn.mean.dtype == drawn.std.dtype == (np.float64 if dtype == "double" else np.float32)
    mean, std = spread(0.25)
    assert (np.abs(drawn.mean - mean) < 5 * std / np.sqrt(2000) + 0.02 * np.abs(mean) + 0.02).all()
    np.testing.assert_allclose(drawn.std, std, rtol=0.15, atol=0.02)


FUNCTION = """<ir_version: 8, opset_import: ["": 17, "f": 1]>
    g (float[N,3] x) => (float[N,2] y) <float ratio = {0.25}> {
        h = f.layer(x, w1, ratio)  y = MatMul(h, w2) }
    <domain: "f", opset_import: ["": 17]> layer (a, w, p) => (b) {
        c = MatMul(a, w)  r = Relu(c)  b = Dropout(r, p) }"""


def test_dropout_in_a_function_and_in_a_loop():
    require_distribution(og.predict_samples(dropping_model(FUNCTION), X, 2000), *spread(0.25))
    loop = parse_model("""f (float[N,3] x) => (float[N,3] y) <int64 n = {3}, bool t = {1}> {
        y = Loop (n, t, x) <body = b (int64 i, bool c, float[N,3] h) => (bool d, float[N,3] k) {
            d = Identity(c)  k = Dropout(h) }> }""")
    with pytest.raises(ValueError, match=naming("'k'", "Loop", "dropout=")):
        og.predict_samples(loop, X, 3)
    np.testing.assert_array_equal(run(loop, x=X)[0], X)
