"""A model cut into forward and backward: together they compute its gradient."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgrad import DerivativeOptions, onnx_derivative, partition, random_feed
from onnxgrad.autodiff.partition import RECOMPUTE, Partition
from tests.support.cases import row_feed, row_model
from tests.support.errors import naming
from tests.support.models import initializer_arrays, parse_model
from tests.support.running import run_named
from tests.support.table import ROWS

SAMPLE = [row for row in ROWS[::40] if row.runs]
FEW = [row for i, row in enumerate(SAMPLE) if i % 4 == 0 or row.id == "SplitToSequence in one"]


def three_layers(batch: str = "N") -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    text = f"""g (float[{batch}, 4] x) => (float[{batch}, 2] y) {{ a = MatMul(x, w0)  b = Add(a, b0)
        c = Relu(b)  d = MatMul(c, w1)  e = Tanh(d)  y = MatMul(e, w2) }}"""
    shapes = {"w0": (4, 5), "b0": (5,), "w1": (5, 3), "w2": (3, 2)}
    return parse_model(
        text, **{name: rng.standard_normal(s).astype("f4") for name, s in shapes.items()}
    )


def gradients_of_parts(parts: Partition, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the gradients: the backward model is fed with inputs and what the forward returns."""
    return run_named(parts.backward, arrays | run_named(parts.forward, arrays))


def with_cotangents(proto: onnx.ModelProto, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return `arrays`, and for every output a gradient that arrives there."""
    rng, outputs = np.random.default_rng(1), run_named(proto, arrays)
    drawn = {f"{n}_grad": np.asarray(rng.standard_normal(y.shape)) for n, y in outputs.items()}
    return arrays | {name: g.astype(np.float32) for name, g in drawn.items()}


@pytest.mark.parametrize(
    ("row", "recompute"),
    [
        pytest.param(
            row, how, id=f"{row.id}-{how}",
            marks=[pytest.mark.sweep] * (how != "cheap" or row not in FEW),
        )
        for row in SAMPLE
        for how in RECOMPUTE
    ],
)  # fmt: skip
def test_forward_and_backward_together_are_the_gradient(row, recompute):
    proto = row_model(row, "lengths" if row.needs else "symbols")
    drawn = {n: a.astype(np.float32) if a.dtype == float else a for n, a in row_feed(row).items()}
    arrays = with_cotangents(proto, drawn)
    expected = run_named(onnx_derivative(proto, weights=[]), arrays)
    found = gradients_of_parts(partition(proto, weights=[], recompute=recompute), arrays)
    assert list(found) == list(expected)
    for name, g in expected.items():
        np.testing.assert_allclose(found[name], g, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_weights_are_inputs_of_both(recompute):
    proto = three_layers()
    arrays = with_cotangents(
        proto, random_feed(proto.graph.input, 6, random_state=0)
    ) | initializer_arrays(proto)
    parts = partition(proto, ["w2", "b0", "w0"], recompute=recompute)
    assert [x.name for x in parts.forward.graph.input] == ["x", "w2", "b0", "w0"]
    assert next(y.name for y in parts.forward.graph.output) == "y"
    expected = run_named(onnx_derivative(proto, ["w2", "b0", "w0"]), arrays)
    found = gradients_of_parts(parts, arrays)
    assert list(found) == ["x_grad", "w2_grad", "b0_grad", "w0_grad"]
    for name, g in expected.items():
        np.testing.assert_allclose(found[name], g, rtol=1e-5)
    for part in (parts.forward, parts.backward):
        onnx.checker.check_model(part, full_check=True)
        assert [o.domain for o in part.opset_import] == [""]


def test_what_is_saved_and_its_bytes():
    saved = {recompute: partition(three_layers(), recompute=recompute) for recompute in RECOMPUTE}
    assert [(s.shape, s.dtype) for s in saved["none"].saved] == [
        (("N", 5), "float32"),
        (("N", 3), "float32"),
    ]
    assert saved["none"].bytes_per_row == 4 * (5 + 3)
    assert saved["cheap"].bytes_per_row == saved["none"].bytes_per_row
    assert saved["all"].saved == ()
    assert saved["all"].bytes_per_row == 0
    assert partition(three_layers("8")).bytes_per_row == 4 * (5 + 3)


def count_products(proto: onnx.ModelProto) -> int:
    return sum(node.op_type in ("MatMul", "Gemm") for node in proto.graph.node)


def test_what_is_computed_again():
    parts = {recompute: partition(three_layers(), recompute=recompute) for recompute in RECOMPUTE}
    assert [count_products(parts[recompute].forward) for recompute in RECOMPUTE] == [3, 3, 3]
    assert [count_products(parts[recompute].backward) for recompute in RECOMPUTE] == [6, 6, 8]


def test_cheap_nodes_are_repeated_where_that_saves_bytes():
    """Of a, its square and 2 a + 1, all read by the backward pass, one is enough."""
    text = """g (float[N, 4] x) => (float[N, 4] y) {
        a = MatMul(x, w)  b = Mul(a, a)  c = Add(a, a)  d = Mul(b, c)  y = Mul(d, b) }"""
    proto = parse_model(text, w=np.eye(4, dtype=np.float32))
    assert partition(proto, recompute="none").bytes_per_row == 4 * 4 * 4
    assert [s.name for s in partition(proto, recompute="cheap").saved] == ["a"]


def test_an_output_is_not_repeated_with_what_its_node_computes_beside_it():
    proto = parse_model("""g (float[N, 1, 6] x) => (float[N, 1, 3] y) {
        y = MaxPool<kernel_shape=[2], dilations=[3]> (x) }""")
    x = np.float32([[[3, 1, 2, 4, 0, 5]]])
    for recompute in RECOMPUTE:
        parts = partition(proto, recompute=recompute)
        onnx.checker.check_model(parts.backward, full_check=True)
        found = gradients_of_parts(parts, {"x": x, "y_grad": np.float32([[[7, 8, 9]]])})
        np.testing.assert_array_equal(found["x_grad"], [[[0, 8, 0, 7, 0, 9]]])


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("Attention-causal", "cheap"), ("Gather nothing", "all")],
)
def test_what_is_saved_has_a_rank(name, recompute):
    """Models whose inputs have none are none, for the checker."""
    parts = partition(
        row_model(next(r for r in ROWS if r.id == name), "symbols"), [], recompute=recompute
    )
    saved = [tensor.name for tensor in parts.saved]
    assert [x.name for x in parts.backward.graph.input if x.name in saved] == saved
    for x in (*parts.backward.graph.input, *parts.forward.graph.output[1:]):
        assert x.type.tensor_type.HasField("shape"), x.name
    onnx.checker.check_model(parts.backward, full_check=True)


def test_a_rank_that_depends_on_lengths_is_not_stated():
    proto = parse_model("""g (float[N, 3] x) => (float[N, 3] y) {
        s = Sin(x)  a = Squeeze(s)  b = Exp(a)  d = Mul(b, b)  y = Mul(d, s) }""")
    for rows in (1, 4):
        arrays = with_cotangents(proto, {"x": np.ones((rows, 3), np.float32)})
        for recompute in RECOMPUTE:
            found = gradients_of_parts(partition(proto, recompute=recompute), arrays)
            expected = run_named(onnx_derivative(proto), arrays)["x_grad"]
            np.testing.assert_allclose(found["x_grad"], expected, rtol=1e-5)


def test_random_results_are_saved_whatever_is_asked():
    text = """g (float[N, 50] x) => (float[N, 50] y) {
        a = Mul(x, w)  b = Dropout(a, half, true)  y = Mul(b, b) }"""
    proto = parse_model(text, w=np.full(50, 3, np.float32), half=0.5, true=True)
    x = np.random.default_rng(0).standard_normal((20, 50)).astype(np.float32)
    for recompute in RECOMPUTE:
        parts = partition(proto, ["w"], recompute=recompute)
        arrays = {"x": x, "w": np.full(50, 3, np.float32), "y_grad": np.ones_like(x)}
        made = run_named(parts.forward, arrays)
        kept = made["y"] != 0
        assert 300 < kept.sum() < 700
        found = run_named(parts.backward, arrays | made)
        np.testing.assert_allclose(found["x_grad"], np.where(kept, 72 * x, 0), rtol=1e-5)


def test_a_joint_graph_is_cut():
    proto = three_layers()
    joint = onnx_derivative(proto, options=DerivativeOptions.KeepYieldOp)
    parts, other = partition(joint), partition(proto)
    assert (parts.forward, parts.backward) == (other.forward, other.backward)
    with pytest.raises(ValueError, match=naming("leave out `weights`", "joint graph")):
        partition(joint, ["w0"])


def test_outputs_that_have_no_gradient_and_those_that_the_backward_reads():
    text = """g (float[N, 4] x) => (float[N, 4] y, int64[N] best, float[N, 4] z) {
        a = MatMul(x, w)  y = Tanh(a)  best = ArgMax<axis=1, keepdims=0>(y)  z = Sigmoid(y) }"""
    proto = parse_model(text, w=np.eye(4, dtype=np.float32) / 2)
    parts = partition(proto)
    assert [y.name for y in parts.forward.graph.output] == ["y", "best", "z"]
    arrays = with_cotangents(
        proto, random_feed(proto.graph.input, 6, random_state=0)
    ) | initializer_arrays(proto)
    expected = run_named(onnx_derivative(proto), arrays)
    for name, g in gradients_of_parts(parts, arrays).items():
        np.testing.assert_allclose(g, expected[name], rtol=1e-5)


def test_a_branch_that_reads_from_outside_stays_whole():
    text = """g (float[N, 4] x, bool c) => (float[N, 4] y) { a = MatMul(x, w)  h = Tanh(a)
        m = If(c) <then_branch = t () => (float[N, 4] p) { p = Abs(h) },
                   else_branch = e () => (float[N, 4] q) { q = Neg(h) }>
        s = Round(m)  y = Mul(h, s) }"""
    proto = parse_model(text, w=np.eye(4, dtype=np.float32) * 2)
    arrays = random_feed(proto.graph.input, 6, random_state=0) | {"c": np.array(True)}
    arrays = with_cotangents(proto, arrays) | initializer_arrays(proto)
    expected = run_named(onnx_derivative(proto, stop_gradient=["s"]), arrays)
    joint = onnx_derivative(proto, options=DerivativeOptions.KeepYieldOp, stop_gradient=["s"])
    for recompute in RECOMPUTE:
        found = gradients_of_parts(partition(joint, recompute=recompute), arrays)
        for name, g in expected.items():
            np.testing.assert_allclose(found[name], g, rtol=1e-5)


def test_bad_arguments():
    with pytest.raises(ValueError, match=naming("recompute 'non'", "'none'")):
        partition(three_layers(), recompute="non")
    with pytest.raises(ValueError, match="weight 'w9'"):
        partition(three_layers(), ["w9"])
