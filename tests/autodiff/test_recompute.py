"""Training with `recompute`: the same weights, of a step that keeps less."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import onnxgrad as og
from onnxgrad.autodiff.segments import Lifetime, cuts
from onnxgrad.graph.inference.infer import infer
from onnxgrad.graph.shapes import dims, static
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.session import WORK_PER_THREAD, session, work
from onnxgrad.training.data import Dataset
from onnxgrad.training.recipe import Facts, Recipe
from onnxgrad.training.run import sessions

ROWS = 24
MODES = ("none", "cheap", "all")


def parse(text: str, weights: dict[str, tuple[int, ...]], opset: int = 20) -> onnx.ModelProto:
    """Return a model whose weights are drawn; variances are positive."""
    rng, proto = (
        np.random.default_rng(0),
        onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}]> {text}'),
    )
    for name, shape in weights.items():
        array = rng.normal(0, 0.4, shape) if name[0] != "v" else rng.uniform(0.5, 1, shape)
        proto.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    return proto


def mlp(layers: int = 6, width: int = 8) -> onnx.ModelProto:
    weights, lines, h = {}, [], "x"
    for i in range(layers):
        weights |= {f"w{i}": (width, width), f"b{i}": (width,)}
        act = ("Relu", "Tanh", "Sigmoid")[i % 3]
        lines.append(f"a{i} = MatMul({h}, w{i}) c{i} = Add(a{i}, b{i}) h{i} = {act}(c{i})")
        h = f"h{i}"
    body = f"{' '.join(lines)} y = MatMul({h}, last)"
    text = f"f (float[N, {width}] x) => (float[N, 3] y) {{ {body} }}"
    return parse(text, weights | {"last": (width, 3)})


def cnn(blocks: int = 3) -> onnx.ModelProto:
    weights, lines, h = {}, [], "x"
    for i in range(blocks):
        weights |= {f"w{i}": (4, 4, 3, 3), f"s{i}": (4,), f"b{i}": (4,), f"m{i}": (4,)}
        weights |= {f"v{i}": (4,)}
        lines.append(f"""a{i} = Conv<pads=[1,1,1,1]>({h}, w{i})
            n{i} = BatchNormalization(a{i}, s{i}, b{i}, m{i}, v{i}) r{i} = Relu(n{i})
            h{i} = Add(r{i}, {h})""")
        h = f"h{i}"
    text = f"""f (float[N, 4, 6, 6] x) => (float[N, 3] y) {{ {" ".join(lines)}
        p = GlobalAveragePool({h}) q = Flatten(p) y = MatMul(q, last) }}"""
    return parse(text, weights | {"last": (4, 3)})


def encoder(layers: int = 3, d: int = 8, tokens: int = 5) -> onnx.ModelProto:
    weights, lines, h = {}, [], "x"
    for i in range(layers):
        weights |= {f"{w}{i}": (d, d) for w in "qkwo"} | {f"u{i}": (d, 16), f"d{i}": (16, d)}
        weights |= {f"{s}{i}": (d,) for s in ("s", "t", "g", "e")}
        lines.append(f"""
            n{i} = LayerNormalization({h}, s{i}, t{i})
            Q{i} = MatMul(n{i}, q{i}) K{i} = MatMul(n{i}, k{i}) V{i} = MatMul(n{i}, w{i})
            T{i} = Transpose<perm=[0,2,1]>(K{i}) S{i} = MatMul(Q{i}, T{i}) P{i} = Softmax(S{i})
            A{i} = MatMul(P{i}, V{i}) O{i} = MatMul(A{i}, o{i}) R{i} = Add({h}, O{i})
            N{i} = LayerNormalization(R{i}, g{i}, e{i}) U{i} = MatMul(N{i}, u{i})
            G{i} = Gelu(U{i}) D{i} = MatMul(G{i}, d{i}) h{i} = Add(R{i}, D{i})""")
        h = f"h{i}"
    text = f"""f (float[N, {tokens}, {d}] x) => (float[N, 3] y) {{ {" ".join(lines)}
        m = ReduceMean<keepdims=0>({h}, axis) y = MatMul(m, last) }}"""
    proto = parse(text, weights | {"last": (d, 3)})
    proto.graph.initializer.append(numpy_helper.from_array(np.int64([1]), "axis"))
    return proto


NETWORKS = {
    "mlp": (mlp(), (8,), {}),
    "cnn": (cnn(), (4, 6, 6), {"batch_norm": "train", "dropout": {"r*": 0.3}}),
    "encoder": (encoder(), (5, 8), {"dropout": {"O*": 0.2}}),
}


DEEPER = {"mlp": mlp(16), "cnn": cnn(8), "encoder": encoder(5)}


def trainer(
    name: str, recompute: str, deeper: bool = False, **more
) -> tuple[og.Trainer, np.ndarray, np.ndarray]:
    proto, shape, options = NETWORKS[name]
    proto = DEEPER[name] if deeper else proto
    rng = np.random.default_rng(1)
    X = rng.normal(size=(ROWS, *shape)).astype(np.float32)
    y = rng.integers(0, 3, ROWS)
    arguments = {"optimizer": "sgd", "learning_rate": 0.1} | options | more
    return og.Trainer(proto, "cross_entropy", recompute=recompute, **arguments), X, y


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_recomputation_changes_no_result(name, accumulate):
    states = {}
    for recompute in MODES:
        fitted, X, y = trainer(name, recompute, accumulate=accumulate)
        fitted.fit(X, y, epochs=5, batch_size=ROWS)
        states[recompute] = fitted.state.values
    start = trainer(name, "none")[0].state.values.weights
    for recompute in ("cheap", "all"):
        now, expected = states[recompute], states["none"]
        assert now.buffers.keys() == expected.buffers.keys()
        for key, w in (expected.weights | expected.buffers).items():
            found = (now.weights | now.buffers)[key]
            np.testing.assert_allclose(found, w, rtol=1e-4, atol=1e-5, err_msg=key)
    assert any(np.abs(w - start[n]).max() > 1e-3 for n, w in states["none"].weights.items())


def step_of(fitted: og.Trainer, X: np.ndarray, y: np.ndarray) -> onnx.ModelProto:
    recipe = Recipe(fitted, Facts.of(fitted, Dataset(X, y)))
    return to_proto(recipe.step(recipe.objective(), norms=False).model)


def step(name: str, recompute: str, **more) -> onnx.ModelProto:
    fitted, X, y = trainer(name, recompute, **more)
    return step_of(fitted, X, y)


def peak(proto: onnx.ModelProto, rows: int) -> int:
    """Return the most bytes of results that are alive at once, if nodes run in their order.

    Results of Reshape and the like share the bytes of their operand.
    """
    inferred = {v.name: v.type.tensor_type for v in (*proto.graph.value_info, *proto.graph.output)}
    origin: dict[str, str] = {}
    nodes = list(proto.graph.node)
    for node in nodes:
        views = node.op_type in ("Reshape", "Identity", "Squeeze", "Unsqueeze", "Flatten")
        for y in node.output:
            origin[y] = origin.get(node.input[0], "") if views else y
    last = {}
    for i, node in enumerate(nodes):
        last |= {origin[x]: i for x in node.input if x in origin}

    def nbytes(name: str) -> int:
        kind = inferred.get(name)
        if kind is None:
            return 0
        lengths = [d.dim_value if d.HasField("dim_value") else rows for d in kind.shape.dim]
        return int(np.prod(lengths)) * onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize

    alive: dict[str, int] = {}
    most = 0
    for i, node in enumerate(nodes):
        alive |= {y: nbytes(y) for y in node.output if y and origin[y] == y}
        most = max(most, sum(alive.values()))
        alive = {name: size for name, size in alive.items() if last.get(name, i) > i}
    return most


@pytest.mark.parametrize("name", NETWORKS)
def test_fewer_bytes_are_alive(name):
    modes = [peak(step(name, recompute, deeper=True), 1000) for recompute in MODES]
    none, cheap, everything = modes
    assert everything < 0.7 * none
    assert cheap == none if name == "mlp" else cheap < 0.8 * none  # all of it is read by products


@pytest.mark.parametrize("rows", ["symbolic", "fixed"])
def test_onnxruntime_neither_merges_nor_moves_the_copies(rows, tmp_path):
    proto = step("encoder", "all")
    if rows == "fixed":
        for x in proto.graph.input:
            for d in x.type.tensor_type.shape.dim:
                if d.dim_param:
                    d.dim_value = ROWS
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(proto.SerializeToString(), options)
    optimized = onnx.load(tmp_path / "optimized.onnx")
    computed, kept, plain = (
        [n.op_type for n in p.graph.node].count("Softmax")
        for p in (proto, optimized, step("encoder", "none"))
    )
    assert computed == kept > plain
    assert sum(n.op_type == "Size" for n in optimized.graph.node)


def test_random_operators_are_not_drawn_again():
    proto = mlp()
    for i in (0, 3):
        node = next(n for n in proto.graph.node if n.output[0] == f"c{i}")
        node.input[1] = f"noisy{i}"
        noise = onnx.helper.make_node("RandomNormalLike", [f"b{i}"], [f"noise{i}"], seed=1.0)
        added = onnx.helper.make_node("Add", [f"noise{i}", f"b{i}"], [f"noisy{i}"])
        at = list(proto.graph.node).index(node)
        proto.graph.node.insert(at, added)
        proto.graph.node.insert(at, noise)
    X = np.ones((4, 8), np.float32)
    fitted = og.Trainer(proto, "cross_entropy", recompute="all")
    graph = step_of(fitted, X, np.zeros(4, int)).graph
    assert sum(n.op_type == "RandomNormalLike" for n in graph.node) == 2


def test_a_graph_with_a_loop_keeps_what_the_loop_returns():
    weights = {f"{c}{i}": s for i in (0, 1) for c, s in (("w", (1, 12, 4)), ("r", (1, 12, 4)))}
    lines, h = [], "x"
    for i in (0, 1):
        lines.append(f"a{i}, l{i} = GRU<hidden_size=4>({h}, w{i}, r{i}) h{i} = Squeeze(a{i}, one)")
        h = f"h{i}"
    text = f"""f (float[T, N, 4] x) => (float[N, 3] y) {{ {" ".join(lines)}
        s = ReduceMean<keepdims=0>({h}, zero) t = Tanh(s) y = MatMul(t, last) }}"""
    proto = parse(text, weights | {"last": (4, 3)})
    for name, value in (("one", 1), ("zero", 0)):
        proto.graph.initializer.append(numpy_helper.from_array(np.int64([value]), name))
    X, y = np.random.default_rng(2).normal(size=(7, 6, 4)).astype(np.float32), np.arange(6) % 3
    trained = []
    for recompute in MODES:
        fitted = og.Trainer(proto, "cross_entropy", recompute=recompute, batch_axes={"x": 1})
        trained.append(fitted.fit(X, y, epochs=2).state.values.weights)
    for other in trained[1:]:
        for name, w in trained[0].items():
            np.testing.assert_allclose(other[name], w, rtol=1e-4, atol=1e-6)


def language_model(layers: int = 6, width: int = 32, words: int = 48) -> onnx.ModelProto:
    """Return a model with adapters `a*` and `b*` beside products with frozen weights of 4 bits."""
    rng, lines, arrays, h = np.random.default_rng(0), [], {}, "h"

    def few_bits(x: str, y: str, n: int) -> str:
        arrays[f"{y}_w"] = rng.integers(0, 256, (n, width // 16, 8), dtype=np.uint8)
        arrays[f"{y}_s"] = rng.uniform(0.01, 0.05, n * width // 16).astype(np.float32)
        given = f"K = {width}, N = {n}, bits = 4, block_size = 16"
        return f"{y} = com.microsoft.MatMulNBits<{given}>({x}, {y}_w, {y}_s)"

    for i in range(layers):
        arrays[f"a{i}"] = rng.normal(0, 0.3, (width, 2)).astype(np.float32)
        arrays[f"b{i}"] = rng.normal(0, 0.3, (2, width)).astype(np.float32)
        lines.append(f"""{few_bits(h, f"p{i}", width)} l{i} = MatMul({h}, a{i})
            m{i} = MatMul(l{i}, b{i}) q{i} = Add(p{i}, m{i}) t{i} = Sigmoid(q{i})
            u{i} = Mul(q{i}, t{i}) {few_bits(f"u{i}", f"r{i}", width)} h{i} = Add({h}, r{i})""")
        h = f"h{i}"
    arrays["table"] = rng.normal(size=(words, width)).astype(np.float32)
    proto = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 21, "com.microsoft": 1]>
        g (int64[N, T] input_ids) => (float[N, T, {words}] logits) {{
            h = Gather(table, input_ids) {" ".join(lines)} {few_bits(h, "logits", words)} }}""")
    proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    return proto


def test_products_with_weights_of_4_bits_are_computed_again():
    """Only ends of segments are kept, up to the loss, whose gradient the forward pass leaves."""
    ids = np.random.default_rng(1).integers(0, 48, (ROWS, 9))
    weights, products = [], []
    for recompute in MODES:
        options = {"optimizer": "sgd", "learning_rate": 0.1, "train": ["a*", "b*"]}
        fitted = og.Trainer(language_model(), "causal_lm", recompute=recompute, **options)
        nodes = step_of(fitted, ids, None).graph.node
        products.append([node.op_type for node in nodes].count("MatMulNBits"))
        weights.append(fitted.fit(ids, epochs=3, batch_size=8, shuffle=False).state.weights)
    assert products[0] == products[1] == 12  # that of the logits is in the body of a Scan
    assert products[2] >= 18
    start = og.Trainer(language_model(), "causal_lm", train=["a*", "b*"]).state.weights
    for name, w in weights[0].items():
        assert np.abs(w - start[name]).max() > 1e-4
        for other in weights[1:]:
            np.testing.assert_allclose(other[name], w, rtol=1e-4, atol=1e-6)


def test_work_counts_products_with_weights_of_4_bits():
    """Below `WORK_PER_THREAD`, a step runs on one thread, in an order that saves no memory."""
    model = to_ir(language_model())
    infer(model)
    assert work(model.graph) == 6 * (2 * 32 * 32 + 2 * 2 * 32) + 32 * 48


def test_unknown_recompute():
    with pytest.raises(ValueError, match="cheap"):
        og.Trainer(mlp(), "cross_entropy", recompute="cheep")


def test_cuts_of_a_chain_are_about_the_square_root():
    n = 100
    chain = [Lifetime(i, min(i + 1, n - 1), 8, True) for i in range(n)]
    positions = cuts(chain, n)
    ends = [-1, *positions, n - 1]
    largest = max(b - a for a, b in pairwise(ends))
    assert 7 <= len(positions) <= 13
    assert len(positions) + largest <= 21  # the least of k + 100 / (k + 1), rounded up


def test_a_value_that_all_segments_read_is_kept_once():
    n = 60
    chain = [Lifetime(i, min(i + 1, n - 1), 8, True) for i in range(1, n)]
    mask = Lifetime(0, n - 1, 4000, True)
    assert len(cuts([mask, *chain], n)) >= 4


def test_the_order_of_the_nodes_knows_the_sizes_of_what_is_recomputed(monkeypatch):
    """onnxruntime infers no shape behind the Reshape in front of it."""
    graphs = []
    monkeypatch.setattr(sessions, "WORK_PER_THREAD", 0)
    monkeypatch.setattr(sessions, "order_all", graphs.append)
    fitted, X, y = trainer("encoder", "all", deeper=True)
    fitted.fit(X, y, batch_size=ROWS)
    (scan,) = (node for node in graphs[-1] if node.op_type == "Scan")
    results = [y for node in scan.attributes["body"].value for y in node.outputs]
    copies = [y for y in results if y.producer().op_type == "Softmax"]
    assert len(copies) > 5  # of 5 layers
    for value in copies:
        assert static(dims(value)) == (ROWS, 5, 5)


def test_values_are_freed_after_their_last_use():
    """With memory for several values of one shape, what is recomputed would keep that of all."""
    proto = mlp()
    assert not session(proto, CPU, WORK_PER_THREAD).get_session_options().enable_mem_reuse
