"""Forms in which exporters and people write If, Loop and Scan."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgrad import DerivativeOptions, NoGradientRule, check_gradient, onnx_derivative
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.graph import get_train_initializer
from onnxgrad.model.convert import to_proto
from tests.support.control_arrays import normal_array
from tests.support.errors import naming
from tests.support.models import operator_names, parse_model
from tests.support.running import run_named

S, W, X = normal_array(3), normal_array(3, seed=1), normal_array(4, 3, seed=2)
TWO, FOUR, NONE = np.array(2), np.array(4), np.array(0)


def model_of_loops(text: str) -> onnx.ModelProto:
    return parse_model(text, opset=20, domains={"my": 1}, output_shapes=False)


LOOP = """g (float[3] s, float[3] w, int64 n) => (float y) {
    y = Loop<body = b (int64 i, bool c, a) => (d, a1) { d = Identity(c)  BODY }>(n, , s) }"""
ROWS = """g (float[3] s, float[T,3] x, int64 n) => (float y, float z) {
    one = Constant<value = int64 {1}>()  minus = Constant<value = int64 {-1}>()
    y, z = Loop<body = b (int64 i, bool c, a) => (d, a1, z1) { d = Identity(c)  BODY }>(n, , s) }"""

FORMS = {
    "loop-condition-handed-on": (
        """g (float[3] s, float[3] r, float[3] w, int64 n) => (float y, float v) {
        y, v = Loop<body = b (int64 i, bool c, a, p) => (c, q, a) {
            t = Mul(a, p)  q = Add(t, w) }>(n, , s, r) }""",
        {"s": S, "r": W, "w": W, "n": FOUR},
    ),
    "loop-without-gradient-of-a-state": (
        """g (float[T,3] x, float[3] w, int64 n) => (float y) {
        k = Constant<value = int64 {0}>()  axis = Constant<value = int64[1] {0}>()
        last, z = Loop<body = b (int64 i, bool c, int64 j) => (d, j1, z1) {
            d = Identity(c)  j1 = Add(j, i)  z1 = Gather<axis = 0>(x, i) }>(n, , k)
        y = Mul(z, w) }""",
        {"x": X, "w": W, "n": FOUR},
    ),
    "loop-grows-from-nothing": (
        """g (float[3] s, float[3] w, int64 n) => (float y, float all) {
        shape = Constant<value = int64[2] {0, 3}>()  empty = ConstantOfShape(shape)
        zero = Constant<value = int64[1] {0}>()
        y, all = Loop<body = b (int64 i, bool c, a, h) => (d, a1, h1) { d = Identity(c)
            t = Mul(a, w)  a1 = Sin(t)  u = Unsqueeze(a1, zero)  h1 = Concat<axis = 0>(h, u)
        }>(n, , s, empty) }""",
        {"s": S, "w": W, "n": FOUR},
    ),
    "loop-microsoft": (
        LOOP.replace("BODY", "a2 = Mul(a, w)  a1 = com.microsoft.QuickGelu(a2)"),
        {"s": S, "w": W, "n": TWO},
    ),
    "loop-linear-regressor": (
        LOOP.replace(
            "BODY",
            """zero = Constant<value = int64[1] {0}>()  a2 = Unsqueeze(a, zero)
            a3 = ai.onnx.ml.LinearRegressor<coefficients = [1.0, 2.0, 3.0], intercepts = [0.5],
                targets = 1>(a2)  a4 = Squeeze(a3, zero)  a5 = Mul(a4, w)  a1 = Tanh(a5)""",
        ),
        {"s": S, "w": W, "n": TWO},
    ),
    "scan-of-declared-rank": (
        """g (float[N] s, float[T,N] x, float[N] w) => (float y, float z) {
        y, z = Scan<num_scan_inputs = 1, body = b (a, u) => (float[N] a1, float[N] z1) {
            t = Mul(a, u)  one = Constant<value = int64[1] {0}>()  wide = Unsqueeze(t, one)
            thin = Squeeze(wide)  a1 = Mul(thin, w)  z1 = Sin(a1) }>(s, x) }""",
        {"s": S, "x": X, "w": W},
    ),
    "function-hands-on": (
        """g (float[3] s, float[3] w, int64 n) => (float y) {
        y = Loop<body = b (int64 i, bool c, a) => (bool c, q) { q = my.outer(a, w, n) }>(n, , s) }
        <domain: "my", opset_import: ["": 20, "my": 1]> outer (s, w, n) => (y) {
        y, v = Loop<body = b (int64 i, bool c, float[3] a, r) => (bool c, q, float[3] a) {
            q1 = my.inner(a, w)  q = Add(q1, r) }>(n, , s, w) }
        <domain: "my", opset_import: ["": 20]> inner (s, w) => (y) {
        t = Mul(s, w)  y = Sin(t) }""",
        {"s": S, "w": W, "n": TWO},
    ),
    "rows": (
        ROWS.replace("BODY", "u = Gather(x, i)  t = Mul(a, u)  a1 = Sin(t)  z1 = Mul(u, a)"),
        {"s": S, "x": X, "n": FOUR},
    ),
    "rows-from-the-end": (
        ROWS.replace(
            "BODY",
            """j = Sub(minus, i)  u = Gather<axis = 0>(x, j)  v = Gather<axis = 0>(x, one)
            t = Mul(a, u)  t1 = Add(t, v)  a1 = Sin(t1)  z1 = Mul(u, v)""",
        ),
        {"s": S, "x": X, "n": FOUR},
    ),
    "rows-never": (
        ROWS.replace("BODY", "u = Gather(x, i)  a1 = Mul(a, u)  z1 = Sin(u)").replace(
            "(float y, float z)", "(float y)"
        ),
        {"s": S, "x": X, "n": NONE},
    ),
    "rows-and-all": (
        ROWS.replace(
            "BODY",
            """u = Gather(x, i)  all = ReduceMean<keepdims = 0>(x)  t = Mul(a, u)  a1 = Mul(t, all)
            z1 = Identity(u)""",
        ),
        {"s": S, "x": X, "n": FOUR},
    ),
    "rows-nested": (
        ROWS.replace(
            "BODY",
            """a1 = Loop<body = b2 (int64 j, bool e, v) => (f, v1) { f = Identity(e)
                p = Gather(x, i)  q = Gather(x, j)  r = Mul(v, p)  v1 = Mul(r, q) }>(i, , a)
            z1 = Exp(a1)""",
        ),
        {"s": S, "x": X, "n": FOUR},
    ),
    "time-h-c": (  # as tf2onnx writes a while_loop over TensorArrays
        """g (float[B,T,2] x, float[5,12] k, float[12] bias) => (float y, float last) {
        steps = Transpose<perm = [1, 0, 2]>(x)  zero = Constant<value = int64 {0}>()
        axis = Constant<value = int64[1] {0}>()  shape = Shape(steps)  n = Gather(shape, zero)
        one = Constant<value = int64 {1}>()  rows = Shape<start = 1, end = 2>(steps)
        three = Constant<value = int64[1] {3}>()  size = Concat<axis = 0>(rows, three)
        h0 = ConstantOfShape(size)  most = Constant<value = int64 {9223372036854775807}>()
        any = Less(zero, n)
        t, last, c, all = Loop<body = b (int64 i, bool go, int64 time, h, cell)
            => (go1, time1, h1, cell1, out) {
            u = Gather<axis = 0>(steps, time)  uh = Concat<axis = 1>(u, h)  g1 = MatMul(uh, k)
            g2 = Add(g1, bias)  gi, gj, gf, go2 = Split<axis = 1, num_outputs = 4>(g2)
            si = Sigmoid(gi)  tj = Tanh(gj)  sf = Sigmoid(gf)  so = Sigmoid(go2)  ij = Mul(si, tj)
            fc = Mul(sf, cell)  cell1 = Add(ij, fc)  tc = Tanh(cell1)  h1 = Mul(so, tc)
            out = Identity(h1)  time1 = Add(time, one)  go1 = Less(time1, n) }>(
            most, any, zero, h0, h0)
        y = Transpose<perm = [1, 0, 2]>(all) }""",
        {
            "x": normal_array(2, 4, 2),
            "k": normal_array(5, 12, seed=1),
            "bias": normal_array(12, seed=2),
        },
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_gradient(name):
    text, feed = FORMS[name]
    report = check_gradient(model_of_loops(text), feed=feed, order=2)
    assert report.ok, str(report)
    assert report.computed.startswith("float64")


def test_coefficients_in_bodies_are_weights():
    model = model_of_loops(FORMS["loop-linear-regressor"][0])
    names = ["a3.coefficients", "a3.intercepts"]
    assert list(get_train_initializer(model)) == names
    made = onnx_derivative(model, weights=names, inputs=[])
    assert [y.name for y in made.graph.output] == [f"{n}_grad" for n in names]


def test_backward_bodies_write_no_whole_sequence():
    """The gradient of x in y = x[i] is that of one row: an iteration returns that and no more."""
    text, _feed = FORMS["rows"]
    made = onnx_derivative(model_of_loops(text))
    body = next(n for n in made.graph.node if "x_grad" not in n.output and n.output[0] == "s_grad")
    held = body.attribute[0].g
    assert not {"ScatterElements", "ScatterND", "Pad"} & {n.op_type for n in held.node}


@pytest.mark.parametrize("mask", ["", ", m"])
@pytest.mark.parametrize("form", ["loop", "then", "else", "scan", "scan input"])
def test_dropout_draws_what_the_forward_pass_drew(form, mask):
    """Seen by the gradient at x where y is x times a mask, whether the mask is asked for or not."""
    draw = """half = Constant<value = float {0.5}>()  yes = Constant<value = bool {1}>()"""
    branches = f"t () => (p) {{ p{mask} = Dropout(x, half, yes) }}", "e () => (q) { q = Neg(x) }"
    texts = {
        "loop": f"""g (float[N] x, bool c, int64 n) => (float y) {{ {draw}
            y = Loop<body = b (int64 i, bool d, a) => (e, a1) {{ e = Identity(d)
                a1{mask} = Dropout(a, half, yes) }}>(n, , x) }}""",
        "then": f"""g (float[N] x, bool c) => (float y) {{ {draw}
            y = If(c) <then_branch = {branches[0]}, else_branch = {branches[1]}> }}""",
        "else": f"""g (float[N] x, bool c) => (float y) {{ {draw}  d = Not(c)
            y = If(d) <then_branch = {branches[1]}, else_branch = {branches[0]}> }}""",
        "scan": f"""g (float[N] x, float[T,N] ones) => (float y) {{ {draw}
            y = Scan<num_scan_inputs = 1, body = b (a, u) => (a1) {{
                a0{mask} = Dropout(a, half, yes)  a1 = Mul(a0, u) }}>(x, ones) }}""",
        "scan input": f"""g (float[N] x, float[T,N] ones) => (float y) {{ {draw}
            row = Constant<value = int64[1] {{0}}>()  rows = Unsqueeze(x, row)
            z = Scan<num_scan_inputs = 1, body = b (u) => (p) {{
                p{mask} = Dropout(u, half, yes) }}>(rows)  y = Squeeze(z, row) }}""",
    }
    x, ones = np.linspace(1, 2, 64, dtype=np.float32), np.ones((2, 64), np.float32)
    made = onnx_derivative(model_of_loops(texts[form]), options=DerivativeOptions.KeepOutputs)
    feed = {"x": x, "c": np.array(True), "n": TWO, "ones": ones, "y_grad": ones[0]}
    found = run_named(made, feed)
    assert 0 < np.count_nonzero(found["y"]) < 60
    np.testing.assert_allclose(found["x_grad"], found["y"] / x, rtol=1e-6)


def test_a_sequence_that_a_loop_extends():
    """What is read from it in an iteration is computed again, up to there."""
    text = """g (float[3] s, int64 n) => (float y) { zero = Constant<value = int64 {0}>()
        start = SequenceConstruct(s)
        y, all = Loop<body = b (int64 i, bool c, float[3] a, seq(float[3]) q) => (d, a1, q1) {
            d = Identity(c)  first = SequenceAt(q, i)  t = Mul(first, a)  a1 = Sin(t)
            q1 = SequenceInsert(q, a1) }>(n, , s, start) }"""
    report = check_gradient(model_of_loops(text), feed={"s": S, "n": TWO})
    assert report.ok, str(report)


def test_what_is_read_behind_an_insertion_is_kept():
    """The forward body does not run again in every iteration of the backward one."""
    text = """g (float[3] s, int64 n) => (float y) { start = SequenceConstruct(s)
        y, all = Loop<body = b (int64 i, bool c, float[3] a, seq(float[3]) q) => (d, a1, q1) {
            d = Identity(c)  q1 = SequenceInsert(q, a)  first = SequenceAt(q1, i)
            t = Mul(first, a)  a1 = Sin(t) }>(n, , s, start) }"""
    made = onnx_derivative(model_of_loops(text))
    bodies = [a.g for node in made.graph.node for a in node.attribute if a.name == "body"]
    assert bodies
    assert not any(node.op_type == "Loop" for body in bodies for node in body.node)
    assert check_gradient(model_of_loops(text), feed={"s": S, "n": FOUR}).ok


def test_random_numbers_beside_a_state_that_grows_are_refused():
    text = """g (float[N] s, int64 n) => (float y) { half = Constant<value = float {0.5}>()
        yes = Constant<value = bool {1}>()
        y = Loop<body = b (int64 i, bool c, float[N] a) => (d, a1) { d = Identity(c)
            r = Dropout(a, half, yes)  t = Mul(r, a)  a1 = Concat<axis = 0>(a, t) }>(n, , s) }"""
    with pytest.raises(NoGradientRule, match=naming("Loop", "random", "stack")):
        onnx_derivative(model_of_loops(text))


DEAD = """g (float[3] s, float[3] w, int64 n, bool c) => (float y) { h = Exp(s)
    y = Loop<body = b (int64 i, bool d, a) => (e, a1) { e = Identity(d)  a2 = Mul(a, w)
        r = If(c) <then_branch = t () => (p) { p = Mul(h, a) },
            else_branch = o () => (q) { q = Neg(h) }>
        a1 = Sin(a2) }>(n, , s) }"""


def test_what_nobody_needs_in_bodies_is_removed():
    """A branch that is not computed reads h no more: or h, which only it reads, would stay."""
    made = onnx_derivative(model_of_loops(DEAD), options=DerivativeOptions.KeepOutputs)
    assert "Exp" not in operator_names(made)
    bodies = [n.attribute[0].g for n in made.graph.node if n.op_type == "Loop"]
    assert len(bodies) == 2
    assert not any(n.op_type == "If" for body in bodies for n in body.node)


@pytest.mark.parametrize("places", [[0, 2], [[0], [2]]])
@pytest.mark.parametrize("kept", ["initializer", "Constant"])
@pytest.mark.parametrize("where", ["body", "model"])
def test_sparse_constants(where, kept, places):
    texts = {
        "body": LOOP.replace("float[3] w, ", "").replace("BODY", "t = Mul(a, k)  a1 = Sin(t)"),
        "model": "g (float[3] s) => (float y) { t = Mul(s, k)  y = Sin(t) }",
    }
    model = model_of_loops(texts[where])
    graph = model.graph.node[0].attribute[0].g if where == "body" else model.graph
    sparse = onnx.SparseTensorProto(dims=[3])
    sparse.values.CopyFrom(onnx.numpy_helper.from_array(np.float32([2, 3])))
    sparse.indices.CopyFrom(onnx.numpy_helper.from_array(np.int64(places)))
    if kept == "initializer":
        sparse.values.name = "k"
        graph.sparse_initializer.append(sparse)
    else:
        graph.node.insert(0, onnx.NodeProto(op_type="Constant", output=["k"]))
        kind = onnx.AttributeProto.SPARSE_TENSOR
        graph.node[0].attribute.add(name="sparse_value", type=kind, sparse_tensor=sparse)
    feed = {"s": S, "n": TWO}
    report = check_gradient(model, feed={x.name: feed[x.name] for x in model.graph.input})
    assert report.ok, str(report)


@pytest.mark.parametrize(
    "outputs", ["float[3] y, float[3] z", "float[3] z, float[3] y, float[3] y"]
)
@pytest.mark.parametrize(
    "node",
    [
        "y = If(no) <then_branch = t () => (float[3] p) { p = Neg(X) }, "
        "else_branch = e () => (float[3] h) <float[3] k = {3, 2, 1}> { h = Mul(X, k) }>",
        "y = Swish(X)",
    ],
    ids=["static If", "lowered"],
)
def test_what_replaces_an_output_stands_before_its_readers(node, outputs):
    text = f"""g (float[3] X) => ({outputs}) <bool no = {{0}}> {{
        {node} s = Sin(y)  z = Scan<num_scan_inputs = 1, body = b (float h) => (float k)
        {{ k = Mul(h, h) }}>(s) }}"""
    model = parse_model(text, opset=24, ir_version=13)
    onnx.checker.check_model(to_proto(prepare(model)), full_check=True)
    assert check_gradient(model).ok
