"""The order of the nodes of a step, and the sessions of batches of different lengths."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxgrad as og
from onnxgrad.graph.infer import infer
from onnxgrad.native.order import (
    LiveMemory,
    MemoryUse,
    order_depth_first,
    order_freeing_early,
    peak_nbytes,
    reorder_graph,
    value_nbytes,
)
from onnxgrad.runtime.session import ordered_session
from onnxgrad.training.run import sessions
from tests.support.models import parse_model
from tests.support.running import in_sweep


def masked_layers_graph() -> ir.Graph:
    """Masks of two layers that the file computes first, and weights whose gradients come last."""
    return ir.from_proto(
        parse_model("""g (float[64,64] x, float[64,64] w) => (float[1] a, float[1] b) <
            float[64,64] h, float[64,64] k, float[64,64] p, float[64,64] q,
            float[64,64] mh, float[64,64] nh, float[64,64] mk, float[64,64] s,
            float[64,64] t, float[1] a, float[1] b > {
            h = MatMul(x, w)  mh = Neg(h)  nh = Abs(h)
            k = MatMul(h, w)  mk = Neg(k)
            p = Mul(k, mk)  s = MatMul(p, w)  t = Mul(s, mh)  q = Mul(t, nh)
            axes = Constant <value_ints = [0, 1]> ()  shape = Constant <value_ints = [1]> ()
            u = ReduceSum <keepdims = 0> (p, axes)  b = Reshape(u, shape)
            v = ReduceSum <keepdims = 0> (q, axes)  a = Reshape(v, shape) }""")
    ).graph


@pytest.mark.parametrize(
    "form", [order_depth_first, lambda g: order_freeing_early(MemoryUse(g), order_depth_first(g))]
)
def test_an_order_has_every_node_behind_what_it_reads(form):
    g = masked_layers_graph()
    nodes = form(g)
    assert len(nodes) == len(g) == len(set(nodes))
    done = set(g.inputs)
    for node in nodes:
        assert {x for x in node.inputs if x is not None} <= done
        done.update(node.outputs)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ("y = Expand(x, five)", 5 * 2 * 3 * 4), ("y = Cast<to=11>(x)", 6 * 8),
        ("y = ReduceSum<keepdims=0>(x)", 4), ("y = Neg(n)", 4), ("y = Shape(x)", 2 * 8),
        ("y = Expand(x, s)", 6 * 4), ("y = Reshape(w, s)", 14 * 4), ("y = Gather(w, v)", 14 * 4),
        ("y, z = Split<axis=0, num_outputs=2>(w)", 7 * 4), ("y, z = Split(w, v)", 7 * 4),
        ("u = Reshape(x, s)  y = Shape(u)", 0), ("u = Reshape(x, s)  y = Neg(u)", 0),
    ],
)  # fmt: skip
def test_bytes_of_a_value(node, expected):
    """Where its shape is unknown, as many as its largest operand has, and none for lengths."""
    text = f"""g (float[2,3] x, int64[R] s, float[14] w, float[1] n, int64[K] v) => (float q)
        <int64[3] five = {{5, 1, 1}}> {{ {node}  q = Neg(x) }}"""
    model = ir.from_proto(parse_model(text))
    infer(model)
    assert value_nbytes(list(model.graph)[-2].outputs[0]) == expected


def test_values_that_are_read_late_are_computed_late():
    g = masked_layers_graph()
    before = peak_nbytes(MemoryUse(g), list(g))
    assert before >= 5 * 64 * 64 * 4  # mh, nh, k, mk, p
    reorder_graph(g)
    assert peak_nbytes(MemoryUse(g), list(g)) < before


def test_the_next_node_is_the_one_that_frees_most():
    """Against all gains computed again at every step, for graphs of random nodes."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        values = [ir.Value(name=f"x{i}", shape=ir.Shape([4]), type=FLOAT) for i in range(3)]
        inputs, nodes = list(values), []
        for i in range(60):
            read = [values[j] for j in rng.integers(max(0, len(values) - 15), len(values), 2)]
            op_type = rng.choice(["Add", "Mul", "Reshape"])
            nodes.append(ir.Node("", op_type, read, num_outputs=1, name=f"n{i}"))
            y = nodes[-1].outputs[0]
            y.name, y.shape, y.type = f"y{i}", ir.Shape([int(rng.integers(0, 50))]), FLOAT
            values.append(y)
        g = ir.Graph(inputs, values[-2:], nodes=nodes, opset_imports={"": 18})
        memory = MemoryUse(g)
        assert order_freeing_early(memory, nodes) == by_all_gains(memory, nodes)


FLOAT = ir.TensorType(ir.DataType.FLOAT)


def by_all_gains(memory: MemoryUse, nodes: list[ir.Node]) -> list[ir.Node]:
    lives, position, result = LiveMemory(memory), {n: i for i, n in enumerate(nodes)}, []
    ready = [n for n in nodes if not memory.before[n]]
    for node in ready:
        lives.mark_ready(node)
    while ready:
        node = min(ready, key=lambda n: (-max(0, lives.freed_nbytes(n) + 1), position[n]))
        ready.remove(node)
        result.append(node)
        lives.mark_run(node)
        done = set(result)
        for other in memory.behind[node]:
            if memory.before[other] <= done:
                lives.mark_ready(other)
                ready.append(other)
    return result


def tanh_network_model() -> onnx.ModelProto:
    """Return a network of three matrices."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (40, 50), "w2": (50, 50), "w3": (50, 3)}
    weights = {n: np.float32(rng.normal(size=shape)) / 7 for n, shape in shapes.items()}
    return parse_model(
        """g (float[N,40] x) => (float[N,3] y) {
            h = MatMul(x, w1)  r = Relu(h)  s = MatMul(r, w2)  t = Tanh(s)  y = MatMul(t, w3) }""",
        **weights,
    )


def trained_weights_of_layers(rows: int, call: str, **options) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(rows, 40)).astype(np.float32), rng.integers(0, 3, rows)
    options |= {"optimizer": og.optimizers.adam(), "learning_rate": 1e-3}
    trainer = og.Trainer(tanh_network_model(), "cross_entropy", **options)
    for _ in range(2):
        if call == "fit":
            trainer.fit(X, y, epochs=2, batch_size=400, shuffle=False)
        else:
            trainer.partial_fit(X, y, batch_size=400, shuffle=False)
    return trainer.state.weights


@pytest.mark.parametrize(  # 900: a shorter last batch; 250: one shorter batch
    ("call", "rows", "recompute"),
    [
        ("fit", 900, "all"),
        ("fit", 250, "none"),
        ("partial_fit", 900, "none"),
        *(in_sweep("fit", rows, "none") for rows in (800, 900)),
        *(in_sweep("fit", rows, "all") for rows in (800, 250)),
        *(in_sweep("partial_fit", rows, "none") for rows in (800, 250)),
        *(in_sweep("partial_fit", rows, "all") for rows in (800, 900, 250)),
    ],
)
def test_sessions_for_fixed_lengths_train_alike(rows, call, recompute, monkeypatch):
    own = trained_weights_of_layers(rows, call, recompute=recompute)
    # one session for all lengths
    monkeypatch.setattr(sessions.Sessions, "expect_shapes", lambda self, arrays: None)
    plain = trained_weights_of_layers(rows, call, recompute=recompute)
    for name in ("w1", "w2", "w3"):
        np.testing.assert_allclose(own[name], plain[name], rtol=2e-5, atol=1e-6)


def test_sessions_for_fixed_lengths_run_in_the_order_that_saves_memory(monkeypatch):
    ordered = []

    def recorded(*arguments):
        ordered.append(ordered_session(*arguments))
        return ordered[-1]

    monkeypatch.setattr(sessions, "ordered_session", recorded)
    trained_weights_of_layers(800, "fit")
    assert ordered


def test_only_announced_lengths_get_a_session(monkeypatch):
    created, loaded = [], ort.InferenceSession
    monkeypatch.setattr(
        ort, "InferenceSession", lambda *a, **k: created.append(a) or loaded(*a, **k)
    )
    trainer = og.Trainer(tanh_network_model(), "cross_entropy", learning_rate=1e-3)
    rng = np.random.default_rng(1)
    trainer.partial_fit(np.float32(rng.normal(size=(5, 40))), np.zeros(5, int))
    first = len(created)
    for rows in (6, 7, 8):
        trainer.partial_fit(np.float32(rng.normal(size=(rows, 40))), np.zeros(rows, int))
    assert len(created) == first
