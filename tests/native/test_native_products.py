"""Products in the native form of a step: the weights are those of the standard operators."""

from itertools import pairwise

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrad as og
from onnxgrad import native
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.graph.tidy import tidy
from onnxgrad.model.convert import to_proto
from onnxgrad.native import Target, products
from onnxgrad.runtime.device import CPU
from tests.support.models import parse_model
from tests.support.running import in_sweep, session_of


def linear_layers(*sizes):
    """Return a model of one Gemm after the other."""
    rng = np.random.default_rng(0)
    names = ["x", *(f"h{i}" for i in range(len(sizes) - 1))]
    lines = " ".join(f"{b} = Gemm<transB=1>({a}, {b}w, {b}b)" for a, b in pairwise(names))
    weights = {}
    for name, (a, b) in zip(names[1:], pairwise(sizes), strict=True):
        w = rng.normal(0, a**-0.5, (b, a)).astype(np.float32)
        weights |= {f"{name}w": w, f"{name}b": w[:, 0]}
    text = f"g (float[N, {sizes[0]}] x) => (float[N, {sizes[-1]}] {names[-1]}) {{ {lines} }}"
    return parse_model(text, opset=20, **weights)


def weights_of_linear_layers(sizes):
    """Return the weights after a step on 5 rows and one on 3."""
    trainer = og.Trainer(linear_layers(*sizes), "squared_error", optimizer=og.optimizers.momentum())
    rng = np.random.default_rng(0)
    for rows in (5, 3):
        X, y = (rng.normal(size=(rows, n)).astype(np.float32) for n in (sizes[0], sizes[-1]))
        trainer.partial_fit(X, y, batch_size=rows, shuffle=False)
    return trainer.state.weights


@pytest.mark.parametrize("sizes", [(600, 520, 3), in_sweep((520, 600, 512)), (3, 4)])
def test_transposed_operands_change_no_weight(monkeypatch, sizes):
    native_weights = weights_of_linear_layers(sizes)
    monkeypatch.setattr(native, "PHASES", ())
    others = weights_of_linear_layers(sizes)
    assert len(others) == 2 * (len(sizes) - 1)
    for name, array in others.items():
        np.testing.assert_allclose(native_weights[name], array, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("a", "b", "node", "is_transposed"),
    [
        ("float[N, 600]", "float[N, 512]", "Gemm<transA=1>(a, b)", True),
        ("float[7, 512]", "float[7, 512]", "Gemm<transA=1, alpha=1.0>(a, b)", True),
        ("float[N, 600]", "float[N, 511]", "Gemm<transA=1>(a, b)", False),
        ("float[N, 600]", "float[N, 512]", "Gemm<transA=1, alpha=2.0>(a, b)", False),
        ("float[600, N]", "float[N, 512]", "Gemm(a, b)", False),
        ("double[N, 600]", "double[N, 512]", "Gemm<transA=1>(a, b)", False),
        ("float[16384, 600]", "float[16384, 512]", "Gemm<transA=1>(a, b)", False),  # large copies
    ],
)
def test_wide_products_of_float32_read_a_transposed_copy(a, b, node, is_transposed):
    kind = a.partition("[")[0]
    model = ir.serde.from_onnx_text(
        f'<ir_version: 9, opset_import: ["": 20]> g ({a} a, {b} b) => ({kind}[p, q] y) '
        f"{{ y = {node} }}"
    )
    native.to_native(model.graph, Target(CPU, 1, rows=32))
    assert ("Transpose" in [n.op_type for n in model.graph]) == is_transposed


@pytest.mark.parametrize(
    ("nodes", "left"),
    [
        ("t = Transpose(w) y = MatMul(x, t)", ["FusedMatMul"]),
        ("t = Transpose<perm=[1, 0]>(w) r = Reshape(t, flat) y = MatMul(x, r)", ["FusedMatMul"]),
        ("t = Transpose(w) r = Reshape(t, flat) s = Transpose(r) y = MatMul(z, s)", ["MatMul"]),
        ("r = Reshape(w, flat) y = MatMul(x, r)", ["Reshape", "MatMul"]),
        ("t = Transpose<perm=[0, 1]>(w) y = MatMul(z, t)", ["MatMul"]),
        ("n = Neg(w) t = Transpose(n) y = MatMul(x, t)", ["Neg", "Transpose", "MatMul"]),
    ],
)
def test_products_of_ordered_steps_read_weights_that_are_not_transposed(nodes, left):
    model = parse_model(
        f"g (float[N, 4] x, float[N, 5] z) => (float[N, m] y) {{ {nodes} }}",
        w=np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32),
        flat=np.array([4, 5]),
    )
    rng = np.random.default_rng(1)
    feed = {n: rng.normal(size=(3, k)).astype(np.float32) for n, k in (("x", 4), ("z", 5))}
    [expected] = session_of(model).run(None, feed)
    changed = prepare(model)
    native.to_native(changed.graph, Target(CPU, 1, rows=3), in_order=True)
    tidy(changed)
    assert [node.op_type for node in changed.graph] == left
    [found] = session_of(to_proto(changed)).run(None, feed)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


FEW_ROWS = [
    # nodes, rows, and the operators of the native form
    ("y = Gemm<transB=1>(x, w)", "N", ["FusedMatMul", "Transpose"]),
    ("y = Gemm<transB=1>(x, w, c)", "N", ["FusedMatMul", "Transpose", "Add"]),
    ("y = Gemm<transB=1>(x, w, d)", 16, ["FusedMatMul", "Transpose", "Add"]),
    ("t = Transpose(w) y = MatMul(x, t)", "2*N", ["FusedMatMul", "Transpose"]),
    ("t = Transpose(w) y = Gemm(x, t, c)", "N", ["FusedMatMul", "Transpose", "Add"]),
    ("t = Transpose<perm=[0, 1]>(v) y = MatMul(x, t)", "N", ["Transpose", "MatMul"]),
    ("y = Gemm(x, v)", "N", ["Gemm"]),
    ("y = Gemm<transB=1, alpha=0.5>(x, w)", "N", ["Gemm"]),
    ("y = Gemm<transB=1>(x, w)", 65, ["Gemm"]),
    ("y = Gemm<transB=1>(x, w)", "8*N", ["Gemm"]),
    ("y = Gemm<transB=1>(x, frozen)", "N", ["Gemm"]),
]


@pytest.mark.parametrize(("nodes", "rows", "left"), FEW_ROWS)
def test_few_rows_are_the_second_factor_of_a_large_matrix(nodes, rows, left):
    rng = np.random.default_rng(0)
    model = parse_model(
        f"""g (float[N, 520] x, float[512, 520] w, float[520, 512] v, float[512] c,
               float[16, 512] d) => (float[m, k] y) {{ {nodes} }}""",
        frozen=rng.normal(size=(512, 520)).astype(np.float32),
    )
    shapes = {"x": (rows if isinstance(rows, int) else 16, 520)}
    shapes |= {"w": (512, 520), "v": (520, 512), "c": (512,), "d": (16, 512)}
    feed = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    [expected] = session_of(model).run(None, feed)
    changed = prepare(model)
    changed.graph.inputs[0].shape = ir.Shape([rows, 520])
    native.to_native(changed.graph, Target(CPU, 1, rows=16))
    tidy(changed)
    assert [node.op_type for node in changed.graph] == left
    [found] = session_of(to_proto(changed)).run(None, feed)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("nodes", "left"),
    [
        ("m = Mul(b, k) y = Gemm<transA=1>(a, m)", ["Gemm"]),
        ("m = Mul(k, a) y = Gemm<transA=1, alpha=3.0, beta=0.5>(m, b, c)", ["Gemm"]),
        ("m = Mul(d, k) r = Reshape(m, shape) y = Gemm<transA=1>(a, r)", ["Reshape", "Gemm"]),
        ("m = Mul(a, k) n = Mul(b, k) y = Gemm<transA=1>(m, n)", ["Gemm"]),
        ("m = Mul(b, c) y = Gemm<transA=1>(a, m)", ["Mul", "Gemm"]),
        ("m = Mul(c, ks) y = Gemm<transA=1>(a, m)", ["Mul", "Gemm"]),
    ],
)
def test_numbers_are_factors_of_the_product(nodes, left, monkeypatch):
    monkeypatch.setattr(products, "LEAST_SCALED_ELEMENTS", 1)
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(2, n)).astype(np.float32) for n in (3, 4))
    constants = {"k": np.float32(0.5), "shape": np.array([-1, 4]), "ks": np.float32([[2]] * 2)}
    model = parse_model(
        f"g (float[N, 3] a, float[N, 4] b, float[N, 2, 2] d) => (float[m, k] y) {{ {nodes} }}",
        c=rng.normal(size=4).astype(np.float32),
        **{n: np.array(v) for n, v in constants.items() if f"{n})" in nodes or f"({n}," in nodes},
    )
    feed = {"a": a, "b": b, "d": b.reshape(2, 2, 2)}
    [expected] = session_of(model).run(None, feed)
    changed = prepare(model)
    native.to_native(changed.graph, Target(CPU, 1, rows=2))
    tidy(changed)
    assert [node.op_type for node in changed.graph] == left
    [found] = session_of(to_proto(changed)).run(None, feed)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("x", "axes", "is_product"),
    [
        ("float[N, 5, 4]", [0, 1], True),
        ("float[N, 5, M, 4]", [-2, 0, 1], True),
        ("float[7, 5, 4]", [0, 1], True),
        ("float[N, 5, 4]", [0], False),
        ("float[N, 5, 4]", [1, 2], False),
        ("float[N, 5, M]", [0, 1], False),
        ("float[N, 4]", [0], False),
        ("double[N, 5, 4]", [0, 1], False),
    ],
)
def test_sums_over_rows_are_products_on_several_threads(x, axes, is_product, threads):
    for kept in (0, 1):
        model = parse_model(
            f"g ({x} x) => ({x.partition('[')[0]} y) {{ y = ReduceSum<keepdims={kept}>(x, axes) }}",
            output_shapes=False,
            axes=np.array(axes),
        )
        shape = [{"N": 7, "M": 4}.get(d, d) for d in x.partition("[")[2][:-1].split(", ")]
        dtype = np.float64 if x.startswith("double") else np.float32
        feed = {"x": np.random.default_rng(0).normal(size=list(map(int, shape))).astype(dtype)}
        [expected] = session_of(model).run(None, feed)
        changed = prepare(model)
        native.to_native(changed.graph, Target(CPU, threads, rows=7))
        tidy(changed)
        kinds = [node.op_type for node in changed.graph]
        assert ("MatMul" in kinds) == (is_product and threads > 1)
        [found] = session_of(to_proto(changed)).run(None, feed)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_of_few_rows_train_as_in_pytorch(kind, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(products, "LEAST_VECTOR_FACTOR", 1)
    rewritten = []

    class OnlySixteen:
        def __contains__(self, rows):
            rewritten.extend([rows] * (rows == 16))
            return rows == 16

    monkeypatch.setattr(products, "VECTOR_ROWS", OnlySixteen())
    torch.manual_seed(0)
    layer = getattr(torch.nn, kind)(3, 5, batch_first=True)
    text = f"""g (float[N, 4, 3] x) => (float[N, 4, 5] y) {{
        t = Transpose<perm=[1, 0, 2]>(x)
        h = {kind}<hidden_size=5{", linear_before_reset=1" if kind == "GRU" else ""}>(t, w, r, b)
        s = Squeeze(h, one) y = Transpose<perm=[1, 0, 2]>(s) }}"""
    order = {"LSTM": [0, 3, 1, 2], "GRU": [1, 0, 2], "RNN": [0]}[kind]

    def by_gates(tensor):
        blocks = tensor.detach().numpy().reshape(len(order), 5, -1)
        return blocks[order].reshape(1, 5 * len(order), -1)

    biases = [by_gates(layer.bias_ih_l0), by_gates(layer.bias_hh_l0)]
    model = parse_model(
        text,
        w=by_gates(layer.weight_ih_l0),
        r=by_gates(layer.weight_hh_l0),
        b=np.concatenate(biases, 1)[..., 0],
        one=np.array([1]),
    )
    rng = np.random.default_rng(0)
    X, Y = (rng.normal(size=(16, 4, n)).astype(np.float32) for n in (3, 5))
    trainer = og.Trainer(model, "squared_error", optimizer="sgd", learning_rate=0.5)
    trainer.fit(X, Y, epochs=3, batch_size=16, shuffle=False)
    assert rewritten  # products of a time step, of 16 rows; all rows and steps are 64
    descent = torch.optim.SGD(layer.parameters(), 0.5)
    for _ in range(3):
        descent.zero_grad()
        torch.nn.functional.mse_loss(layer(torch.tensor(X))[0], torch.tensor(Y)).backward()
        descent.step()
    np.testing.assert_allclose(trainer.state.weights["r"], by_gates(layer.weight_hh_l0), atol=1e-6)
    np.testing.assert_allclose(trainer.state.weights["w"], by_gates(layer.weight_ih_l0), atol=1e-6)
