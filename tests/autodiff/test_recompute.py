"""Training with `recompute`: the same weights, of a step that keeps less."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.autodiff.cuts import Lifetime, segment_cuts
from onnxgrad.graph.infer import infer
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.operators.shapes import dims, static
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.session import WORK_PER_THREAD, count_multiply_adds, session
from onnxgrad.training.data import Dataset
from onnxgrad.training.recipe import Recipe
from onnxgrad.training.run import sessions
from tests.support.errors import naming
from tests.support.models import operator_names, parse_model
from tests.support.optimized_models import optimized_model
from tests.support.running import in_sweep

ROWS = 24
MODES = ("none", "cheap", "all")


def model_with_weights(text: str, shapes: dict[str, tuple[int, ...]], **more) -> onnx.ModelProto:
    """Return a model whose weights are drawn; variances, of names `v*`, are positive."""
    rng = np.random.default_rng(0)
    weights = {
        name: rng.normal(0, 0.4, shape) if name[0] != "v" else rng.uniform(0.5, 1, shape)
        for name, shape in shapes.items()
    }
    drawn = {name: array.astype(np.float32) for name, array in weights.items()}
    return parse_model(text, opset=20, **drawn, **more)


def deep_network(layers: int = 6, width: int = 8) -> onnx.ModelProto:
    weights, lines, h = {}, [], "x"
    for i in range(layers):
        weights |= {f"w{i}": (width, width), f"b{i}": (width,)}
        act = ("Relu", "Tanh", "Sigmoid")[i % 3]
        lines.append(f"a{i} = MatMul({h}, w{i}) c{i} = Add(a{i}, b{i}) h{i} = {act}(c{i})")
        h = f"h{i}"
    body = f"{' '.join(lines)} y = MatMul({h}, last)"
    text = f"f (float[N, {width}] x) => (float[N, 3] y) {{ {body} }}"
    return model_with_weights(text, weights | {"last": (width, 3)})


def residual_network(blocks: int = 3) -> onnx.ModelProto:
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
    return model_with_weights(text, weights | {"last": (4, 3)})


def attention_network(layers: int = 3, d: int = 8, tokens: int = 5) -> onnx.ModelProto:
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
    return model_with_weights(text, weights | {"last": (d, 3)}, axis=np.int64([1]))


NETWORKS = {  # by name: the model, of how many blocks, and of how many to compare bytes; options
    "mlp": (deep_network, 6, 16, {}),
    "cnn": (residual_network, 3, 8, {"batch_norm": "train", "dropout": {"r*": 0.3}}),
    "encoder": (attention_network, 3, 5, {"dropout": {"O*": 0.2}}),
}
Fitted = tuple[og.Trainer, np.ndarray, np.ndarray]


def trainer_and_data(name: str, recompute: str, deeper: bool = False, **more) -> Fitted:
    network, blocks, many_blocks, options = NETWORKS[name]
    proto = network(many_blocks if deeper else blocks)
    shape = [d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim[1:]]
    rng = np.random.default_rng(1)
    X = rng.normal(size=(ROWS, *shape)).astype(np.float32)
    y = rng.integers(0, 3, ROWS)
    arguments = {"optimizer": "sgd", "learning_rate": 0.1} | options | more
    return og.Trainer(proto, "cross_entropy", recompute=recompute, **arguments), X, y


@pytest.mark.parametrize(
    ("name", "accumulate"),
    [("mlp", 1), in_sweep("mlp", 2), in_sweep("cnn", 1), ("cnn", 2), ("encoder", 1),
     in_sweep("encoder", 2)],
)  # fmt: skip
def test_recomputation_changes_no_result(name, accumulate):
    states = {}
    for recompute in MODES:
        fitted, X, y = trainer_and_data(name, recompute, accumulate=accumulate)
        fitted.fit(X, y, epochs=3, batch_size=ROWS)
        states[recompute] = fitted.state.values
    start = trainer_and_data(name, "none")[0].state.values.weights
    for recompute in ("cheap", "all"):
        now, expected = states[recompute], states["none"]
        assert now.buffers.keys() == expected.buffers.keys()
        for key, w in (expected.weights | expected.buffers).items():
            found = (now.weights | now.buffers)[key]
            np.testing.assert_allclose(found, w, rtol=1e-4, atol=1e-5, err_msg=key)
    assert any(np.abs(w - start[n]).max() > 1e-3 for n, w in states["none"].weights.items())


def written_step(fitted: og.Trainer, X: np.ndarray, y: np.ndarray | None) -> onnx.ModelProto:
    """Return the model of a step."""
    recipe = Recipe.for_data(fitted._job, fitted.state, Dataset(X, y))
    return to_proto(recipe.step(recipe.objective(), norms=False).model)


def peak_bytes(proto: onnx.ModelProto, rows: int) -> int:
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
    steps = [written_step(*trainer_and_data(name, how, deeper=True)) for how in MODES]
    none, cheap, everything = (peak_bytes(step, 1000) for step in steps)
    assert everything < 0.7 * none
    assert cheap == none if name == "mlp" else cheap < 0.8 * none  # all of it is read by products


@pytest.mark.parametrize("rows", ["symbolic", in_sweep("fixed")])
def test_onnxruntime_neither_merges_nor_moves_the_copies(rows):
    proto, plain = (written_step(*trainer_and_data("encoder", how)) for how in ("all", "none"))
    if rows == "fixed":
        for x in proto.graph.input:
            for d in x.type.tensor_type.shape.dim:
                if d.dim_param:
                    d.dim_value = ROWS
    optimized = optimized_model(proto, "all")
    computed, kept, once = (operator_names(p).count("Softmax") for p in (proto, optimized, plain))
    assert computed == kept > once
    assert "Size" in operator_names(optimized)


def test_random_operators_are_not_drawn_again():
    proto = deep_network()
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
    step = written_step(fitted, X, np.zeros(4, int))
    assert operator_names(step).count("RandomNormalLike") == 2


def test_a_graph_with_a_loop_keeps_what_the_loop_returns():
    weights = {f"{c}{i}": s for i in (0, 1) for c, s in (("w", (1, 12, 4)), ("r", (1, 12, 4)))}
    lines, h = [], "x"
    for i in (0, 1):
        lines.append(f"a{i}, l{i} = GRU<hidden_size=4>({h}, w{i}, r{i}) h{i} = Squeeze(a{i}, one)")
        h = f"h{i}"
    text = f"""f (float[T, N, 4] x) => (float[N, 3] y) {{ {" ".join(lines)}
        s = ReduceMean<keepdims=0>({h}, zero) t = Tanh(s) y = MatMul(t, last) }}"""
    axes = {"one": np.int64([1]), "zero": np.int64([0])}
    proto = model_with_weights(text, weights | {"last": (4, 3)}, **axes)
    X, y = np.random.default_rng(2).normal(size=(7, 6, 4)).astype(np.float32), np.arange(6) % 3
    trained = []
    for recompute in MODES:
        fitted = og.Trainer(proto, "cross_entropy", recompute=recompute, batch_axes={"x": 1})
        trained.append(fitted.fit(X, y, epochs=2).state.values.weights)
    for other in trained[1:]:
        for name, w in trained[0].items():
            np.testing.assert_allclose(other[name], w, rtol=1e-4, atol=1e-6)


def four_bit_language_model(layers: int = 6, width: int = 32, words: int = 48) -> onnx.ModelProto:
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
    text = f"""g (int64[N, T] input_ids) => (float[N, T, {words}] logits) {{
        h = Gather(table, input_ids) {" ".join(lines)} {few_bits(h, "logits", words)} }}"""
    return parse_model(text, opset=21, **arrays)


def test_products_with_weights_of_4_bits_are_computed_again():
    """Only ends of segments are kept, up to the loss, whose gradient the forward pass leaves."""
    ids = np.random.default_rng(1).integers(0, 48, (ROWS, 9))
    weights, products = [], []
    for recompute in MODES:
        options = {"optimizer": "sgd", "learning_rate": 0.1, "train": ["a*", "b*"]}
        fitted = og.Trainer(four_bit_language_model(), "causal_lm", recompute=recompute, **options)
        step = written_step(fitted, ids, None)
        products.append(operator_names(step).count("MatMulNBits"))
        weights.append(fitted.fit(ids, epochs=2, batch_size=8, shuffle=False).state.weights)
    assert products[0] == products[1] == 12  # that of the logits is in the body of a Scan
    assert products[2] >= 18
    start = og.Trainer(four_bit_language_model(), "causal_lm", train=["a*", "b*"]).state.weights
    for name, w in weights[0].items():
        assert np.abs(w - start[name]).max() > 1e-4
        for other in weights[1:]:
            np.testing.assert_allclose(other[name], w, rtol=1e-4, atol=1e-6)


def test_work_counts_products_with_weights_of_4_bits():
    """Below `WORK_PER_THREAD`, a step runs on one thread, in an order that saves no memory."""
    model = to_ir(four_bit_language_model())
    infer(model)
    assert count_multiply_adds(model.graph) == 6 * (2 * 32 * 32 + 2 * 2 * 32) + 32 * 48


def test_unknown_recompute():
    with pytest.raises(ValueError, match=naming("recompute", "'cheep'", "cheap")):
        og.Trainer(deep_network(), "cross_entropy", recompute="cheep")


def test_cuts_of_a_chain_are_about_the_square_root():
    n = 100
    chain = [Lifetime(i, min(i + 1, n - 1), 8, True) for i in range(n)]
    positions = segment_cuts(chain, n)
    ends = [-1, *positions, n - 1]
    largest = max(b - a for a, b in pairwise(ends))
    assert 7 <= len(positions) <= 13
    assert len(positions) + largest <= 21  # the least of k + 100 / (k + 1), rounded up


def test_a_value_that_all_segments_read_is_kept_once():
    n = 60
    chain = [Lifetime(i, min(i + 1, n - 1), 8, True) for i in range(1, n)]
    mask = Lifetime(0, n - 1, 4000, True)
    assert len(segment_cuts([mask, *chain], n)) >= 4


def test_the_order_of_the_nodes_knows_the_sizes_of_what_is_recomputed(monkeypatch):
    """onnxruntime infers no shape behind the Reshape in front of it."""
    copies = []

    def see(graph):
        (scan,) = (node for node in graph if node.op_type == "Scan")
        results = [y for node in scan.attributes["body"].value for y in node.outputs]
        copies[:] = [static(dims(y)) for y in results if y.producer().op_type == "Softmax"]

    monkeypatch.setattr(sessions, "WORK_PER_THREAD", 0)
    monkeypatch.setattr(sessions, "reorder_for_memory", see)
    fitted, X, y = trainer_and_data("encoder", "all", deeper=True)
    fitted.fit(X, y, batch_size=ROWS)
    assert len(copies) > 5  # of 5 layers
    assert set(copies) == {(ROWS, 5, 5)}


def test_values_are_freed_after_their_last_use():
    """With memory for several values of one shape, what is recomputed would keep that of all."""
    assert not session(deep_network(), CPU, WORK_PER_THREAD).get_session_options().enable_mem_reuse
