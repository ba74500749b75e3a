"""Attention by blocks of queries with `recompute="all"`: the same weights, and no scores of all."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrad as og
from onnxgrad.autodiff import attention_blocks
from onnxgrad.graph.traversal import all_nodes
from onnxgrad.model.convert import convert_precision
from onnxgrad.training.data import Dataset
from onnxgrad.training.recipe import Recipe
from onnxgrad.training.run import row_parts
from tests.support.models import initializer_arrays, parse_model
from tests.support.running import in_sweep

HEADS, SIZE, WIDTH, ROWS = 2, 4, 8, 4
RNG = np.random.default_rng(0)

APART = """qr = Reshape(q, apart) kr = Reshape(k, apart) vr = Reshape(v, apart)
    qh = Transpose<perm=[0,2,1,3]>(qr) kt = Transpose<perm=[0,2,3,1]>(kr)
    vh = Transpose<perm=[0,2,1,3]>(vr)"""
TOGETHER = "at = Transpose<perm=[0,2,1,3]>(ah) a = Reshape(at, whole)"
SCORES = f"{APART} z = MatMul(qh, kt) s = Mul(z, scale)"
KEPT = "p = Softmax(m) ah = MatMul(p, vh)"
CASES = {
    "heads": f"{SCORES} p = Softmax(s) ah = MatMul(p, vh) {TOGETHER}",
    "causal": f"{SCORES} m = Add(s, causal) {KEPT} {TOGETHER}",
    "computed mask": f"""{SCORES} t = Shape<start=1, end=2>(q) n = Squeeze(t, zero)
        j = Range(first, n, one) i = Unsqueeze(j, one_axis) c = LessOrEqual(j, i)
        m = Where(c, s, minus_inf) {KEPT} {TOGETHER}""",
    "guarded": f"""{SCORES} m = Add(s, hidden) w = Softmax(m) u = IsNaN(w)
        p = Where(u, nothing, w) ah = MatMul(p, vh) {TOGETHER}""",
    "scaled before": f"""{APART} qs = Mul(qh, scale) s = MatMul(qs, kt) p = Softmax(s)
        ah = MatMul(p, vh) {TOGETHER}""",
    "capped, bias": f"""{SCORES} c = Tanh(s) m = Add(c, bias) {KEPT} {TOGETHER}""",
    "one head": """kt = Transpose<perm=[0,2,1]>(k) z = MatMul(q, kt) p = Softmax<axis=2>(z)
        a = MatMul(p, v)""",
    "Attention": "a = Attention<q_num_heads=2, kv_num_heads=2, is_causal=1>(q, k, v)",
    "Attention, mask": "a = Attention<q_num_heads=2, kv_num_heads=2>(q, k, v, shown)",
    "Attention, softcap": """a = Attention<q_num_heads=2, kv_num_heads=2, softcap=2.0,
        is_causal=1>(q, k, v)""",
    "shared heads": """kp = MatMul(k, half) vp = MatMul(v, half)
        a = Attention<q_num_heads=2, kv_num_heads=1, is_causal=1>(q, kp, vp)""",
    "MultiHeadAttention": """a = com.microsoft.MultiHeadAttention<num_heads=2,
        unidirectional=1>(q, k, v)""",
    "GroupQueryAttention": """kp = MatMul(k, half) vp = MatMul(v, half)
        a, e, f = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=1,
            local_window_size=3>(q, kp, vp, , , last, total)""",
    "smooth": """a, e, f = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=2,
            smooth_softmax=1>(q, k, v, , , last, total)""",
}


def _is_single(name: str) -> bool:
    return "GroupQueryAttention" in CASES.get(name, name)


def attention_model(name: str, tokens: int, symbol: bool = False) -> onnx.ModelProto:
    """Return a model with this attention between products with weights."""
    kind = "float" if _is_single(name) else "double"
    lengths = f"{kind}[N, {'T' if symbol else tokens}, {WIDTH}]"
    text = f"""f ({lengths} x) => ({lengths} y) {{
            q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv) {CASES.get(name, name)}
            o = MatMul(a, wo) y = Add(x, o) }}"""
    rng, i = np.random.default_rng(0), np.arange(tokens)
    lowest = np.where(i > i[:, None], -np.inf, 0.0)
    nobody = lowest.copy()
    nobody[[1, -1]] = -np.inf  # two queries see no key
    constants = {
        **{f"w{n}": rng.normal(0, 0.6, (WIDTH, WIDTH)) for n in "qkvo"},
        "half": rng.normal(0, 0.6, (WIDTH, SIZE)),
        "bias": rng.normal(0, 1, (HEADS, tokens, tokens)),
        "apart": np.int64([0, 0, HEADS, SIZE]), "whole": np.int64([0, 0, WIDTH]),
        "scale": np.float64(SIZE**-0.5), "causal": lowest, "hidden": nobody,
        "shown": np.isfinite(nobody), "minus_inf": np.float64(-np.inf), "nothing": np.float64(0),
        "zero": np.int64([0]), "first": np.int64(0), "one": np.int64(1), "one_axis": np.int64([1]),
        "last": np.full(2, tokens - 1, np.int32), "total": np.int32([tokens]),
    }  # fmt: skip
    if _is_single(name):
        floats = [n for n, a in constants.items() if np.asarray(a).dtype == np.float64]
        constants |= {n: constants[n].astype(np.float32) for n in floats}
    read = {n: np.asarray(a) for n, a in constants.items() if re.search(rf"\b{n}\b", text)}
    return parse_model(text, opset=23, **read)


def random_sequences(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return tuple(rng.normal(size=(ROWS, tokens, WIDTH)) for _ in "xy")


@pytest.fixture(autouse=True)
def blocks_of_few_queries(monkeypatch):
    monkeypatch.setattr(attention_blocks, "LEAST", 6)
    monkeypatch.setattr(attention_blocks, "ROWS", 4)
    monkeypatch.setattr(attention_blocks, "KEYS", 16)


def sgd_trainer(proto, recompute: str, **more) -> og.Trainer:
    options = {"optimizer": "sgd", "learning_rate": 0.1} | more
    return og.Trainer(proto, "mse", recompute=recompute, **options)


def step_graph(fitted: og.Trainer, data) -> ir.Graph:
    recipe = Recipe.for_data(fitted._job, fitted.state, Dataset(*data))
    return recipe.step(recipe.objective(), norms=False).model.graph


def count_softmaxes(fitted: og.Trainer, data) -> tuple[int, int]:
    """Return how many Softmax nodes the step has outside and inside of bodies."""
    graph = step_graph(fitted, data)
    kinds = [n.graph is graph for n in all_nodes(graph) if n.op_type == "Softmax"]
    return kinds.count(True), kinds.count(False)


def trained_weights(proto, recompute: str, data, **more) -> dict[str, np.ndarray]:
    """Return the weights after two steps, if there are four rows."""
    return sgd_trainer(proto, recompute, **more).fit(*data, batch_size=2).state.weights


def assert_blocks_train_alike(proto, data, tolerance: float = 1e-10, **options) -> dict:
    """Compare the weights trained with and without blocks, and return the former."""
    plain, blocks = (trained_weights(proto, how, data, **options) for how in ("none", "all"))
    assert plain.keys() == blocks.keys()
    for name, w in plain.items():
        np.testing.assert_allclose(blocks[name], w, rtol=tolerance, atol=tolerance, err_msg=name)
    return blocks


STORED = ("causal", "guarded", "capped, bias", "Attention, mask")  # masks of so many tokens
LENGTHS = (
    [("MultiHeadAttention", 13, True)]
    + [(name, 13, False) for name in CASES]
    + [
        in_sweep(name, 12, False) if name in STORED else in_sweep(name, 13, True)
        for name in CASES
        if name != "MultiHeadAttention"
    ]
)


@pytest.mark.parametrize(("name", "tokens", "symbol"), LENGTHS)
def test_blocks_train_as_all_queries_do(name, tokens, symbol):
    proto, data = attention_model(name, tokens, symbol), random_sequences(tokens)
    blocks = assert_blocks_train_alike(proto, data, 1e-4 if _is_single(name) else 1e-10)
    assert all(np.isfinite(w).all() for w in blocks.values())
    start = initializer_arrays(proto)
    assert any(np.abs(w - start[n]).max() > 1e-3 for n, w in blocks.items())
    assert count_softmaxes(sgd_trainer(proto, "all"), data) == (0, 2)
    if name == "heads":
        assert count_softmaxes(sgd_trainer(proto, "none"), data) == (1, 0)


@pytest.mark.parametrize("tokens", [1, in_sweep(3), in_sweep(4), 9, in_sweep(33)])
def test_lengths_that_the_model_does_not_state(tokens):
    proto = attention_model("heads", 13, symbol=True)
    assert_blocks_train_alike(proto, random_sequences(tokens))


def test_pytorch_in_float64_agrees():
    torch = pytest.importorskip("torch")
    tokens = 13
    proto, (X, Y) = attention_model("causal", tokens), random_sequences(tokens)
    fitted = sgd_trainer(proto, "all").fit(X, Y, batch_size=ROWS, shuffle=False)
    ours = fitted.state.weights
    names = ("wq", "wk", "wv", "wo")
    arrays = initializer_arrays(proto)
    w = {n: torch.tensor(arrays[n], dtype=torch.float64, requires_grad=True) for n in names}
    x, y = (torch.tensor(a, dtype=torch.float64) for a in (X, Y))
    q, k, v = ((x @ w[n]).reshape(ROWS, tokens, HEADS, SIZE).transpose(1, 2) for n in names[:3])
    a = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    z = x + a.transpose(1, 2).reshape(ROWS, tokens, WIDTH) @ w["wo"]
    torch.nn.functional.mse_loss(z, y).backward()
    for name in names:
        expected = (w[name] - 0.1 * w[name].grad).detach().numpy()
        np.testing.assert_allclose(ours[name], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "attention",
    [
        f"{SCORES} p = Softmax(s) d = Dropout(p) ah = MatMul(d, vh) {TOGETHER}",
        f"{SCORES} p = Softmax(s) d = Mul(p, p) ah = MatMul(d, vh) {TOGETHER}",
        f"{SCORES} p = Softmax<axis=2>(s) ah = MatMul(p, vh) {TOGETHER}",
        f"""{SCORES} p = Softmax(s) ar = MatMul(p, vh) m = ReduceMax<keepdims=0>(p, one_axis)
            l = ReduceMax<keepdims=1>(m) ah = Mul(ar, l) {TOGETHER}""",
    ],
    ids=["dropout", "product of weights", "over queries", "weights that are read"],
)
def test_others_stay_as_they_are(attention):
    proto, data = attention_model(attention, 12), random_sequences(12)
    options = {"dropout": {"d": 0.5}} if "Dropout" in attention else {}
    assert count_softmaxes(sgd_trainer(proto, "all", **options), data)[1] == 0
    assert_blocks_train_alike(proto, data, **options)


def test_short_sequences_stay_as_they_are():
    fitted = sgd_trainer(attention_model("heads", 5), "all")
    assert count_softmaxes(fitted, random_sequences(5)) == (1, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2},
        in_sweep({"clip_norm": 0.01}),
        in_sweep({"optimizer": "adamw", "learning_rate": 0.01}),
        {"freeze": ["wq", "wk"]},
    ],
    ids=str,
)
def test_options(options):
    proto = attention_model("Attention", 13, symbol=True)
    assert_blocks_train_alike(proto, random_sequences(13), **options)


def test_adapters():
    proto = og.add_lora(attention_model("causal", 12), ["wq", "wv"], rank=2)
    data = random_sequences(12)
    assert count_softmaxes(sgd_trainer(proto, "all"), data) == (0, 2)
    assert_blocks_train_alike(proto, data)


def test_members_of_a_stack():
    proto, data = attention_model("Attention", 13, symbol=True), random_sequences(13)
    options = {"optimizer": "sgd", "learning_rate": [0.1, 0.2]}
    plain, blocks = (
        og.TrainerStack(proto, "mse", recompute=how, **options).fit(*data, batch_size=2)
        for how in ("none", "all")
    )
    for one, other in zip(plain.state.values, blocks.state.values, strict=True):
        for name, w in one.weights.items():
            np.testing.assert_allclose(other.weights[name], w, rtol=1e-10, atol=1e-10)


WINDOWS = [
    (w, n, s) for w in (1, 4, 100) for n, s in ((40, False), (41, False), (41, True), (5, True))
]
QUICK_WINDOWS = [(1, 40, False), (4, 41, True), (100, 41, False), (4, 5, True)]


@pytest.mark.parametrize(
    ("window", "tokens", "symbol"), [w if w in QUICK_WINDOWS else in_sweep(*w) for w in WINDOWS]
)
def test_blocks_of_a_window_read_the_keys_near_them(window, tokens, symbol):
    attention = CASES["GroupQueryAttention"].replace("size=3", f"size={window}")
    proto = attention_model(attention, max(tokens, 6), symbol)
    data = random_sequences(tokens)
    assert_blocks_train_alike(proto, data, 1e-4, learning_rate=0.01)
    graph = step_graph(sgd_trainer(proto, "all"), data)
    widths = {n.outputs[0].shape[-1] for n in all_nodes(graph) if n.op_type == "Softmax"}
    assert widths.isdisjoint({tokens, "T"})


@pytest.mark.parametrize("name", ["heads", in_sweep("causal"), "shared heads"])
def test_of_a_batch_that_is_computed_in_parts(name, monkeypatch):
    proto, data = attention_model(name, 13), random_sequences(13)
    plain = trained_weights(proto, "none", data)
    monkeypatch.setattr(row_parts, "FORWARD_BYTES", 1)
    monkeypatch.setattr(row_parts, "WORK_PER_WEIGHT", 1)
    for name, w in trained_weights(proto, "all", data).items():
        np.testing.assert_allclose(w, plain[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [ir.DataType.FLOAT16, in_sweep(ir.DataType.BFLOAT16)])
def test_in_16_bits(kind):
    proto, data = attention_model("heads", 13), random_sequences(13)
    narrow = convert_precision(proto, kind)
    blocks = assert_blocks_train_alike(narrow, data, 0.02)
    for name, w in trained_weights(proto, "none", data).items():
        np.testing.assert_allclose(blocks[name], w, rtol=0.05, atol=0.05)
    assert count_softmaxes(sgd_trainer(narrow, "all"), data) == (0, 2)
