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
from onnxgrad.native import Target
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
