"""Attention by blocks of queries with `recompute="all"`: the same weights, and no scores of all."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import onnxgrad as og
from onnxgrad.autodiff import attention_blocks
from onnxgrad.graph.traversal import all_nodes
from onnxgrad.model.convert import in_precision
from onnxgrad.training.data import Dataset
from onnxgrad.training.recipe import Facts, Recipe
from onnxgrad.training.run import row_parts

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


def network(name: str, tokens: int, symbol: bool = False, more: str = "") -> onnx.ModelProto:
    """Return a model with this attention between products with weights."""
    kind = "float" if _is_single(name) else "double"
    lengths = f"{kind}[N, {'T' if symbol else tokens}, {WIDTH}]"
    proto = onnx.parser.parse_model(f"""<ir_version: 10,
        opset_import: ["": 23, "com.microsoft": 1]>
        f ({lengths} x) => ({lengths} y) {{ q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)
            {CASES.get(name, name)} o = MatMul(a, wo) y = Add(x, o) }}""")
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
    read = {x for node in proto.graph.node for x in node.input}
    kept = [(n, a) for n, a in constants.items() if n in read]
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in kept)
    return proto


def batches(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return tuple(rng.normal(size=(ROWS, tokens, WIDTH)) for _ in "xy")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(attention_blocks, "LEAST", 6)
    monkeypatch.setattr(attention_blocks, "ROWS", 4)
    monkeypatch.setattr(attention_blocks, "KEYS", 16)


def trainer(proto, recompute: str, **more) -> og.Trainer:
    options = {"optimizer": "sgd", "learning_rate": 0.1} | more
    return og.Trainer(proto, "mse", recompute=recompute, **options)


def step(fitted: og.Trainer, data):
    recipe = Recipe(fitted, Facts.of(fitted, Dataset(*data)))
    return recipe.step(recipe.objective(), norms=False).model.graph


def softmaxes(fitted: og.Trainer, data) -> tuple[int, int]:
    """Return how many Softmax nodes the step has outside and inside of bodies."""
    graph = step(fitted, data)
    kinds = [n.graph is graph for n in all_nodes(graph) if n.op_type == "Softmax"]
    return kinds.count(True), kinds.count(False)


def trained(proto, recompute: str, data, **more):
    return trainer(proto, recompute, **more).fit(*data, epochs=2, batch_size=2)


def same(a, b, tolerance: float = 1e-10):
    assert a.keys() == b.keys()
    for name, w in a.items():
        np.testing.assert_allclose(b[name], w, rtol=tolerance, atol=tolerance, err_msg=name)


STORED = ("causal", "guarded", "capped, bias", "Attention, mask")  # masks of so many tokens
LENGTHS = [
    (name, *length)
    for name in CASES
    for length in [(13, False), (12, False) if name in STORED else (13, True)]
]


@pytest.mark.parametrize(("name", "tokens", "symbol"), LENGTHS)
def test_blocks_train_as_all_queries_do(name, tokens, symbol):
    proto, data = network(name, tokens, symbol), batches(tokens)
    fitted = {how: trained(proto, how, data) for how in ("none", "all")}
    plain, blocks = (one.state.weights for one in fitted.values())
    same(plain, blocks, 1e-4 if _is_single(name) else 1e-10)
    assert all(np.isfinite(w).all() for w in blocks.values())
    start = {i.name: numpy_helper.to_array(i) for i in proto.graph.initializer}
    assert any(np.abs(w - start[n]).max() > 1e-3 for n, w in blocks.items())
    assert softmaxes(
        trainer(
            proto,
            "none",
        ),
        data,
    ) == (1, 0)
    assert softmaxes(trainer(proto, "all"), data) == (0, 2)


@pytest.mark.parametrize("tokens", [1, 3, 4, 9, 33])
def test_lengths_that_the_model_does_not_state(tokens):
    proto, data = network("heads", 13, symbol=True), batches(tokens)
    same(*(trained(proto, how, data).state.weights for how in ("none", "all")))


def test_pytorch_in_float64_agrees():
    torch = pytest.importorskip("torch")
    tokens = 13
    proto, (X, Y) = network("causal", tokens), batches(tokens)
    ours = trainer(proto, "all").fit(X, Y, epochs=1, batch_size=ROWS, shuffle=False).state.weights
    names = ("wq", "wk", "wv", "wo")
    arrays = {i.name: numpy_helper.to_array(i) for i in proto.graph.initializer}
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
    proto, data = network(attention, 12), batches(12)
    options = {"dropout": {"d": 0.5}} if "Dropout" in attention else {}
    assert softmaxes(trainer(proto, "all", **options), data)[1] == 0
    same(*(trained(proto, how, data, **options).state.weights for how in ("none", "all")))


def test_short_sequences_stay_as_they_are():
    assert softmaxes(trainer(network("heads", 5), "all"), batches(5)) == (1, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2},
        {"clip_norm": 0.01},
        {"optimizer": "adamw", "learning_rate": 0.01},
        {"freeze": ["wq", "wk"]},
    ],
    ids=str,
)
def test_options(options):
    proto, data = network("Attention", 13, symbol=True), batches(13)
    plain, blocks = (trained(proto, how, data, **options) for how in ("none", "all"))
    same(plain.state.weights, blocks.state.weights)


def test_adapters():
    proto, data = og.add_lora(network("causal", 12), ["wq", "wv"], rank=2), batches(12)
    assert softmaxes(trainer(proto, "all"), data) == (0, 2)
    same(*(trained(proto, how, data).state.weights for how in ("none", "all")))


def test_members_of_a_stack():
    proto, data = network("Attention", 13, symbol=True), batches(13)
    stacks = [
        og.TrainerStack(proto, "mse", optimizer="sgd", learning_rate=[0.1, 0.2], recompute=how).fit(
            *data, epochs=2, batch_size=2
        )
        for how in ("none", "all")
    ]
    for plain, blocks in zip(*(stack.state.values for stack in stacks), strict=True):
        same(plain.weights, blocks.weights)


@pytest.mark.parametrize(("tokens", "symbol"), [(40, False), (41, False), (41, True), (5, True)])
@pytest.mark.parametrize("window", [1, 4, 100])
def test_blocks_of_a_window_read_the_keys_near_them(window, tokens, symbol):
    attention = CASES["GroupQueryAttention"].replace("size=3", f"size={window}")
    proto, data = network(attention, max(tokens, 6), symbol), batches(tokens)
    plain, blocks = (trained(proto, how, data, learning_rate=0.01) for how in ("none", "all"))
    same(plain.state.weights, blocks.state.weights, 1e-4)
    graph = step(trainer(proto, "all"), data)
    widths = {n.outputs[0].shape[-1] for n in all_nodes(graph) if n.op_type == "Softmax"}
    assert widths.isdisjoint({tokens, "T"})


@pytest.mark.parametrize("name", ["heads", "causal", "shared heads"])
def test_of_a_batch_that_is_computed_in_parts(name, monkeypatch):
    proto, data = network(name, 13), batches(13)
    plain = trained(proto, "none", data).state.weights
    monkeypatch.setattr(row_parts, "_BYTES", 1)
    monkeypatch.setattr(row_parts, "_PER_WEIGHT", 1)
    same(plain, trained(proto, "all", data).state.weights)


@pytest.mark.parametrize("kind", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_in_16_bits(kind):
    proto, data = network("heads", 13), batches(13)
    narrow = in_precision(proto, kind)
    plain, blocks = (trained(narrow, how, data).state.weights for how in ("none", "all"))
    same(plain, blocks, 0.02)
    same(trained(proto, "none", data).state.weights, blocks, 0.05)
    assert softmaxes(trainer(narrow, "all"), data) == (0, 2)
