"""Gradients through If, Loop and Scan."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest

from onnxgrad import NoGradientRule, add_loss_output, check_gradient, jvp, onnx_derivative, vjp
from onnxgrad.autodiff.partition import partition
from onnxgrad.compat import OrtGradientOptimizer
from onnxgrad.graph import get_train_initializer
from tests.support.control_arrays import normal_array
from tests.support.errors import naming
from tests.support.models import operator_names, parse_model
from tests.support.running import in_sweep, run, run_named


def model_with_bodies(text: str) -> onnx.ModelProto:
    return parse_model(text, opset=20, output_shapes=False)


X, W, S = normal_array(4, 3), normal_array(3, seed=1), normal_array(3, seed=2)
YES, NO = np.array(True), np.array(False)
NON_DIFFERENTIABLE = "k = Constant<value = float[3] {0.5, -1.0, 2.0}>()"

IF = """g (float[N,3] x, float[3] w, bool c) => (float y) { h = Exp(x) y = If(c) <
    then_branch = t () => (p) { a = Mul(h, w) p = Tanh(a) },
    else_branch = e () => (q) { """
SCAN = """g (float[3] s, float[T,3] x, float[3] w) => (float y, float z) {
    y, z = Scan<num_scan_inputs = 1, ATTRIBUTES body = b (a, u) => (a1, z1) {
        a2 = Mul(a, u)  a1 = Tanh(a2)  z1 = Mul(a1, w) }>(s, x) }"""
LOOP = """g (float[3] s, int64 n, float[3] w) => (float y, float z) {
    y, z = Loop<body = b (int64 i, bool c, a) => (d, a1, z1) {
        d = Identity(c)  a2 = Mul(a, w)  a1 = Tanh(a2)  z1 = Exp(a1) }>(n, , s) }"""
WHILE = """g (float[3] s, float[3] w) => (float y, float z) {
    y, z = Loop<body = b (int64 i, bool c, a) => (d, a1, z1) {
        a2 = Mul(w, w)  a1 = Add(a, a2)  m = ReduceSum<keepdims = 0>(a1)
        limit = Constant<value = float {4.0}>()  d = Less(m, limit)  z1 = Exp(a1) }>(, , s) }"""
GROWING = """g (float[N] s, float[1] w, int64 n) => (float y) {
    y = Loop<body = b (int64 i, bool c, float[N] a) => (d, a1) {
        d = Identity(c)  a2 = Mul(a, w)  a3 = Sin(a2)  a1 = Concat<axis = 0>(a, a3) }>(n, , s) }"""
NESTED = """g (float[N] s, float[N] w, int64 n, int64 m) => (float y) {
    y = Loop<body = b (int64 i, bool c, float[N] a) => (d, a1) {
        d = Identity(c)  two = Constant<value = int64 {2}>()  r = Mod(i, two)  odd = Cast<to = 9>(r)
        h = If(odd) <then_branch = t () => (p) { p = Mul(a, w) },
            else_branch = e () => (q) { half = Constant<value = float[1] {0.5}>()
                q0 = Sin(a)  q = Mul(q0, half) }>
        a1 = Loop<body = b2 (int64 j, bool c2, float[N] v) => (d2, v1) {
            d2 = Identity(c2)  v2 = Mul(v, w)  v3 = Add(v2, h)  v1 = Tanh(v3) }>(m, , h)
    }>(n, , s) }"""
SCAN_IN_IF = """g (float[3] s, float[T,3] x, float[3] w, bool c) => (float y) { y = If(c) <
    then_branch = t () => (p) { p, z = Scan<num_scan_inputs = 1, body = b (a, u) => (a1, z1) {
        a2 = Mul(a, u)  a1 = Add(a2, w)  z1 = Identity(a) }>(s, x) },
    else_branch = e () => (q) { q = Mul(s, w) }> }"""
SCAN_IN_SCAN = """g (float[3] s, float[T,2,3] x, float[3] w) => (float y, float z) {
    y, z = Scan<num_scan_inputs = 1, body = b (a, u) => (a1, z1) {
        a1, z1 = Scan<num_scan_inputs = 1, body = b2 (v, r) => (v1, z2) {
            v2 = Mul(v, w)  v3 = Add(v2, r)  v1 = Tanh(v3)  z2 = Mul(v1, r) }>(a, u) }>(s, x) }"""
TWO_STATES = """g (float[3] s, float[T,3] x, float[3,3] w) => (float y, float v) {
    i = Constant<value = int64 {0}>()
    y, n, v = Scan<num_scan_inputs = 1, body = b (a, m, u) => (a1, m1, u1) {
        one = Constant<value = int64 {1}>()  m1 = Add(m, one)  f = Cast<to = 1>(m)
        u2 = Unsqueeze(u, zero)  u3 = MatMul(u2, w)  u1 = Squeeze(u3, zero)
        a2 = Mul(a, u1)  a3 = Add(a2, f)  a1 = Sin(a3) }>(s, i, x) }""".replace(
    "i = Constant", "zero = Constant<value = int64[1] {0}>()  i = Constant"
)
ROWS = """g (float[T,3] x, float[3] w) => (float y) {
    shape = Shape<end = 1>(x)  axis = Constant<value = int64[1] {0}>()
    n = Squeeze(shape, axis)  start = Mul(w, w)
    y = Loop<body = b (int64 i, bool c, a) => (d, a1) { d = Identity(c)
        u = Gather<axis = 0>(x, i)  a2 = Mul(a, u)  a1 = Add(a2, w) }>(n, , start) }"""
UNREAD = """g (float[3] s, float[T,3] x, float[3] w) => (float y) {
    y, z = Scan<num_scan_inputs = 1, body = b (a, u) => (a1, z1) {
        a1 = Add(a, w)  z1 = Floor(u) }>(s, x) }"""
CELL = """g (float[N,2] s, float[T,N,3] x, float[2,5] r, float[3,5] m, float[5,2] o)
    => (float y, float z) {
    y, z = Scan<num_scan_inputs = 1, body = b (a, u) => (a1, z1) {
        p = MatMul(a, r)  f = Gemm<alpha = 0.5, beta = 2.0>(u, m, p)  q = Tanh(f)
        a1 = MatMul(q, o)  z1 = Gemm<transB = 1>(a1, r_t) }>(s, x) }""".replace(
    "y, z = Scan", "r_t = Transpose<perm = [1, 0]>(r)  y, z = Scan"
)

CASES = {
    "if": (IF + "q = Mul(h, h) }> }", {"x": X, "w": W, "c": YES}),
    "if-else": (IF + "q = Mul(h, h) }> }", {"x": X, "w": W, "c": NO}),
    "if-weight": (IF + NON_DIFFERENTIABLE + " q = Mul(h, k) }> }", {"x": X, "w": W, "c": NO}),
    "if-constant": (IF + "q = Floor(h) }> }", {"x": X, "w": W, "c": NO}),
    "if-hands-on": (IF + "q = Identity(x) }> }", {"x": X, "w": W, "c": NO}),
    "loop": (LOOP, {"s": S, "n": np.array(3), "w": W}),
    "loop-once": (LOOP, {"s": S, "n": np.array(1), "w": W}),
    "loop-never": (LOOP, {"s": S, "n": np.array(0), "w": W}),
    "while": (WHILE, {"s": S, "w": W}),
    "loop-growing": (GROWING, {"s": S, "w": W[:1], "n": np.array(3)}),
    "loop-rows": (ROWS, {"x": X, "w": W}),
    "loop-no-rows": (ROWS, {"x": X[:0], "w": W}),
    "nested": (NESTED, {"s": S, "w": W, "n": np.array(3), "m": np.array(2)}),
    "nested-never": (NESTED, {"s": S, "w": W, "n": np.array(3), "m": np.array(0)}),
    "scan-in-if": (SCAN_IN_IF, {"s": S, "x": X, "w": W, "c": YES}),
    "scan-in-scan": (SCAN_IN_SCAN, {"s": S, "x": normal_array(4, 2, 3), "w": W}),
    "scan-two-states": (TWO_STATES, {"s": S, "x": X, "w": normal_array(3, 3)}),
    "scan-unread": (UNREAD, {"s": S, "x": X, "w": W}),
    "scan-products": (
        CELL,
        {"s": normal_array(2, 2), "x": normal_array(4, 2, 3), "r": normal_array(2, 5)}
        | {"m": normal_array(3, 5), "o": normal_array(5, 2)},
    ),
    **{
        f"scan-{name}": (SCAN.replace("ATTRIBUTES", attributes), {"s": S, "x": x, "w": W})
        for name, attributes, x in (
            ("plain", "", X),
            ("input-reversed", "scan_input_directions = [1],", X),
            ("output-reversed", "scan_output_directions = [1],", X),
            ("axes", "scan_input_axes = [1], scan_output_axes = [-1],", X.T.copy()),
            (
                "axes-reversed",
                "scan_input_axes = [-1], scan_output_axes = [1], "
                "scan_input_directions = [1], scan_output_directions = [1],",
                X.T.copy(),
            ),
        )
    },
}


def model_and_feed_of_case(name: str, known: str = "symbols") -> tuple[onnx.ModelProto, dict]:
    """Return a case with inputs of known lengths, of symbols, or of known rank only."""
    text, feed = CASES[name]
    if "axes" in name:
        text = text.replace("float[T,3] x", "float[3,T] x")
    if known == "lengths":
        for x, a in feed.items():
            shape = ",".join(map(str, a.shape))
            text = re.sub(rf"float\[[^]]*\] {x}\b", f"float[{shape}] {x}", text, count=1)
    model = model_with_bodies(text)
    for x in model.graph.input if known == "rank" else ():
        for i, d in enumerate(x.type.tensor_type.shape.dim):
            d.dim_param = f"{x.name}{i}"
    return model, dict(feed)


@pytest.mark.parametrize(
    ("known", "order"),
    [("lengths", 1), ("symbols", 1)] + [in_sweep(k, 2) for k in ("lengths", "symbols", "rank")],
)
@pytest.mark.parametrize("name", CASES)
def test_gradient(name, known, order):
    model, feed = model_and_feed_of_case(name, known)
    report = check_gradient(model, feed=feed, order=order)
    assert report.ok, str(report)
    assert report.computed.startswith("float64")


@pytest.mark.parametrize("name", CASES)
def test_forward_mode(name):
    """<u, J v> = <JT u, v>."""
    model, feed = model_and_feed_of_case(name)
    floats = [n for n, a in feed.items() if a.dtype == np.float32]
    vs = {n: normal_array(*feed[n].shape, seed=5 + i) for i, n in enumerate(floats)}
    pushed = run_named(jvp(model), feed | {f"{n}_tangent": v for n, v in vs.items()})
    ys = [n for n in pushed if not n.endswith("_tangent")]
    us = {n: normal_array(*pushed[n].shape, seed=50 + i) for i, n in enumerate(ys)}
    pulled = run_named(vjp(model), feed | {f"{n}_grad": u for n, u in us.items()})
    left = [float(np.sum(us[n] * pushed[f"{n}_tangent"])) for n in ys]
    right = [float(np.sum(v * pulled[f"{n}_grad"])) for n, v in vs.items() if f"{n}_grad" in pulled]
    size = 1e-6 + sum(map(abs, (*left, *right)))
    assert abs(sum(left) - sum(right)) < 1e-5 * size


def test_random_numbers_two_graphs_deep_are_refused():
    text = """g (float[N] x, bool c, int64 n) => (float y) {
        y = Loop<body = b (int64 i, bool d, h) => (e, p) { e = Identity(d)
            p = If(c) <then_branch = a () => (q) { half = Constant<value = float {0.5}>()
                t = Constant<value = bool {1}>()  q, m = Dropout(h, half, t) },
                else_branch = b () => (r) { r = Neg(h) }> }>(n, , x) }"""
    with pytest.raises(NoGradientRule, match=naming("Dropout", "outside")):
        onnx_derivative(model_with_bodies(text))


def test_the_tape_holds_states_and_not_what_is_between():
    """A body goes through ten thousand numbers: each of 200 iterations keeps its one state."""
    text = """g (float[1] s, float[T,1] x, float[10000] w) => (float y) {
        y, z = Scan<num_scan_inputs = 1, body = b (a, u) => (a1, z1) {
            wide = Mul(a, w)  wider = Tanh(wide)  axes = Constant<value = int64[1] {0}>()
            m = ReduceMean<keepdims = 1>(wider, axes)  a1 = Add(m, u)  z1 = Identity(u)
        }>(s, x) }"""
    cut = partition(model_with_bodies(text), recompute="none")
    assert sum(np.prod(tensor.shape[1:]) for tensor in cut.saved) <= 2
    feed = {"s": normal_array(1), "x": normal_array(200, 1), "w": normal_array(10000)}
    assert check_gradient(model_with_bodies(text), feed=feed).ok


@pytest.mark.parametrize("recompute", [in_sweep("none"), "cheap", in_sweep("all")])
@pytest.mark.parametrize("name", ["if", "loop", "nested", "scan-in-if", "scan-products"])
def test_partition(name, recompute):
    model, feed = model_and_feed_of_case(name)
    found = run_named(model, feed)
    feed |= {f"{y}_grad": normal_array(*a.shape, seed=i) for i, (y, a) in enumerate(found.items())}
    cut = partition(model, recompute=recompute)
    between = run_named(cut.forward, feed)
    expected = run_named(onnx_derivative(model), feed)
    made = run_named(cut.backward, feed | between)
    assert made.keys() == expected.keys()
    for name, g in expected.items():
        np.testing.assert_allclose(made[name], g, rtol=1e-5, atol=1e-6)


def test_weights_in_bodies_are_trained_and_come_back():
    text = """g (float[N,3] x) => (float[N,3] y) {
        n = Constant<value = int64 {2}>()  yes = Constant<value = bool {1}>()
        y = Loop<body = b (int64 i, bool c, a) => (d, a1) {
            d = Identity(c)  w = Constant<value = float[3] {0.5, 0.8, 1.2}>()
            a1 = If(yes) <then_branch = t () => (p) { p = Mul(a, w) },
                else_branch = e () => (q) { v = Constant<value = float[3] {9.0, 9.0, 9.0}>()
                    q = Mul(a, v) }> }>(n, , x) }"""
    model = model_with_bodies(text)
    model.graph.output[0].type.tensor_type.shape.dim.add(dim_param="N")
    model.graph.output[0].type.tensor_type.shape.dim.add(dim_value=3)
    assert list(get_train_initializer(model)) == ["w", "v"]
    x = normal_array(40, 3)
    options = {"max_iter": 60, "learning_rate": 0.05, "batch_size": 10, "random_state": 0}
    trained = OrtGradientOptimizer(add_loss_output(model), ["w"], **options)
    trained.fit(x, x * np.float32([4, 1, 0.25]))
    made = trained.get_trained_onnx(model)
    assert operator_names(made) == operator_names(model)
    values = {name: a for name, (a, _) in get_train_initializer(made).items()}
    np.testing.assert_allclose(values["w"], [2, 1, 0.5], atol=0.01)
    np.testing.assert_array_equal(values["v"], [9, 9, 9])


def test_message_names_the_node_in_the_body():
    text = """g (float[3] x, int64 n) => (float y) {
        y = Loop<body = b (int64 i, bool c, a) => (d, e) {
            d = Identity(c)  e = my.Thing(a) }>(n, , x) }"""
    with pytest.raises(NoGradientRule, match=naming("Loop", "output 'y'", "my::Thing")):
        onnx_derivative(model_with_bodies(text))


@pytest.mark.parametrize("declared", ["", "[1]"])
def test_the_number_of_an_iteration_has_its_declared_shape(declared):
    """onnxruntime passes a tensor of the shape that the body declares."""
    starts = "a = Gather(at, i)" if declared else "one = Unsqueeze(i, ax)  a = Gather(at, one)"
    model = parse_model(f"""f (float[6] x) => (float[2] y)
        <int64[1] n = {{3}}, bool t = {{1}}, float[2] z = {{0.0, 0.0}},
         int64[4] at = {{0, 2, 4, 6}}, int64[1] ax = {{0}}, int64[1] step = {{2}}> {{
          y = Loop(n, t, z)<body = b (int64{declared} i, bool c, float[2] s)
            => (bool d, float[2] u) {{
              d = Identity(c)  {starts}  e = Add(a, step)  p = Slice(x, a, e, ax)
              q = Mul(p, p)  u = Add(s, q) }}> }}""")
    x, g = np.arange(1, 7, dtype=np.float32), np.array([1, 10], np.float32)
    [dx] = run(onnx_derivative(model, weights=[]), x=x, y_grad=g)
    np.testing.assert_allclose(dx, 2 * x * np.tile(g, 3))
    [_, y] = run(add_loss_output(model), x=x, label=g)
    np.testing.assert_allclose(y, run(model, x=x)[0])
