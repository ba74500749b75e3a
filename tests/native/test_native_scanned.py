"""Nodes that move out of the bodies of Scans in the native form: the numbers stay the same."""

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad import onnx_derivative
from onnxgrad.model.convert import to_proto
from onnxgrad.native import Target, to_native
from onnxgrad.runtime.device import CPU
from tests.support.models import parse_model
from tests.support.running import run

MODEL = """
    f (float[N,3] s, float[T,N,3] a, float[T,N,3] b, float[T,N,6] c, float[3] w)
        => (float[N,3] last, float[T,N,{width}] all) {{
        last, all = Scan<num_scan_inputs = 3{more}, body = g (
            float[N,3] h, float[N,3] x, float[N,3] y, float[N,6] z)
            => (float[N,3] new, float[N,{width}] out) {{ {nodes} }}>(s, a, b, c) }}"""
BODIES = {
    "slopes": (
        "q = Mul(x, x)  r = Sub(w, q)  p = Mul(h, r)  new = Add(p, y)  out = Mul(h, y)",
        {"Mul": 2, "Add": 1},
    ),
    "factors": (
        "p = Mul(h, x)  q = Mul(y, p)  new = Tanh(q)  out = Neg(q)",
        {"Mul": 1, "Tanh": 1, "Neg": 1},
    ),
    "products": (
        "p = Mul(h, x)  q = Mul(y, h)  o = Concat<axis = 1>(p, q)  out = Mul(o, z)"
        "  new = Mul(p, p)",
        None,  # the product is read twice
    ),
    "joined": (
        "t = Tanh(h)  p = Mul(h, x)  q = Mul(t, y)  o = Concat<axis = 1>(p, q)  r = Mul(o, z)"
        "  out = Neg(r)  new = Exp(h)",
        {"Mul": 1, "Concat": 1, "Tanh": 1, "Exp": 1, "Neg": 1},
    ),
    "split": (
        "l, r = Split<axis = 1, num_outputs = 2>(z)  p = Mul(l, r)  q = Add(p, w)  new = Add(q, h)"
        "  out = Neg(new)",
        {"Add": 1, "Neg": 1},
    ),
    "from behind": (
        "l, r = Split<axis = -1, num_outputs = 2>(z)  o = Concat<axis = -1>(r, l)"
        "  k, m = Split<axis = -1, num_outputs = 2>(o)  new = Sub(k, h)  out = Mul(m, new)",
        {"Sub": 1, "Mul": 1},
    ),
    "an unread Concat": (
        "t = Tanh(x)  new = Mul(h, w)  out = Concat<axis = 1>(new, t)",
        {"Mul": 1, "Concat": 1},
    ),
    "complement": (
        "p = Mul(h, x)  n = Neg(p)  q = Add(n, h)  new = Mul(q, y)  out = Neg(p)",
        {"Mul": 2, "Neg": 1},
    ),
    "an output": ("out = Mul(x, y)  new = Add(h, out)", {"Mul": 1, "Add": 1}),
    "other ranks": (
        "v = ReduceSum<keepdims = 0>(x)  u = Mul(v, x)  new = Add(h, u)  out = Neg(u)",
        None,
    ),
}
WIDTHS = {"products": 6, "joined": 6, "an unread Concat": 6}
DIRECTIONS = {
    "forward": "",
    "backward": ", scan_input_directions = [1, 1, 1], scan_output_directions = [1]",
    "both": ", scan_input_directions = [1, 0, 1]",
    "second axis": ", scan_input_axes = [1, 1, 1]",
}


def scan_of(model):
    """Return the Scan of a model."""
    return next(n for n in model.graph.node if n.op_type == "Scan")


def operators_of_body(model):
    """Return how many nodes of each operator the body of the Scan has."""
    body = next(a.g for a in scan_of(model).attribute if a.name == "body")
    kinds = Counter(n.op_type for n in body.node)
    return {kind: n for kind, n in kinds.items() if kind not in ("Constant", "Identity")}


def with_scan_in_native_form(text, rows=4):
    """Return the model of a text, and the model in the native form for batches of `rows`."""
    before = parse_model(text)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(before))
    to_native(model.graph, Target(CPU, 1, rows))
    return before, to_proto(model)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", BODIES)
def test_the_numbers_stay_the_same(name, direction):
    nodes, expected = BODIES[name]
    text = MODEL.format(nodes=nodes, more=DIRECTIONS[direction], width=WIDTHS.get(name, 3))
    shapes = {"s": (4, 3), "a": (5, 4, 3), "b": (5, 4, 3), "c": (5, 4, 6), "w": (3,)}
    if direction == "second axis":
        text = text.replace("[T,N,3] a", "[N,T,3] a").replace("[T,N,3] b", "[N,T,3] b")
        text = text.replace("[T,N,6] c", "[N,T,6] c")
        shapes |= {name: (4, 5, *shapes[name][2:]) for name in "abc"}
    before, after = with_scan_in_native_form(text)
    rng = np.random.default_rng(0)
    feed = {name: rng.normal(size=shape).astype("f") for name, shape in shapes.items()}
    for ours, original in zip(run(after, feed), run(before, feed), strict=True):
        np.testing.assert_allclose(ours, original, 1e-5, 1e-6)
    if direction in ("both", "second axis"):
        assert operators_of_body(after) == operators_of_body(before)
    elif expected is not None:
        assert operators_of_body(after) == expected


BETWEEN = """
    f (float[N,3] s, float[T,N,3] x) => (float[N,3] last, float[T,N,3] all) {{
        w = ReduceMax<keepdims = 0>(s)
        h, a, b, c = Scan<num_scan_inputs = 1{there}, body = g (float[N,3] h, float[N,3] v)
            => (float[N,3] new, float[N,3] p, float[N,6] q, float[N,3] r) {{
            new = Add(h, v)  p = Tanh(new)  q = Concat<axis = 1>(v, p)  r = Identity(h) }}>(s, x)
        u = Mul(a, a)  d = Sub(u, c)  l, k = Split<axis = -1, num_outputs = 2>(b)
        e = Mul(l, d)  m = Concat<axis = 2>(k, e)  o = Add(m, w)
        last, all = Scan<num_scan_inputs = 2{back}, body = g (
            float[N,3] h, float[N,6] y, float[N,3] z) => (float[N,3] new, float[N,3] out) {{
            y1, y2 = Split<axis = 1, num_outputs = 2>(y)  t = Mul(h, y2)  new = Add(t, z)
            out = Mul(y1, new) }}>(h, o, {read}) }}"""
BACK = ", scan_input_directions = [1, 1], scan_output_directions = [1]"
REVERSED = ", scan_input_directions = [1], scan_output_directions = [1, 1, 1]"


@pytest.mark.parametrize(("there", "back"), [("", BACK), (REVERSED, "")])
@pytest.mark.parametrize("read", ["d", "l", "x"])
@pytest.mark.parametrize("rows", [4, 2000])
def test_slopes_of_large_states_are_computed_in_the_first_scan(there, back, read, rows):
    text = BETWEEN.format(there=there, back=back, read=read)
    before, after = with_scan_in_native_form(text, rows)
    rng = np.random.default_rng(0)
    feed = {n: rng.normal(size=(*t, 4, 3)).astype("f") for n, t in {"s": (), "x": (5,)}.items()}
    for ours, original in zip(run(after, feed), run(before, feed), strict=True):
        np.testing.assert_allclose(ours, original, 1e-5, 1e-6)
    outside = Counter(n.op_type for n in after.graph.node)
    assert outside["Mul"] == (2 if rows == 4 else 0)
    assert outside["Scan"] == 2
    assert outside["ReduceMax"] == 1


def test_nodes_whose_results_the_graph_returns_stay_outside():
    text = BETWEEN.format(there="", back=BACK, read="d").replace("[T,N,3] all)", "[T,N,3] d)")
    _, after = with_scan_in_native_form(text, 2000)
    assert Counter(n.op_type for n in after.graph.node)["Mul"] == 2


def test_many_nodes_that_read_each_other_twice_stay_outside():
    """Looking through all ways between two Scans would take longer than the age of the world."""
    squares = "  ".join(f"u{i + 1} = Mul(u{i}, u{i})" for i in range(80))
    text = BETWEEN.format(there="", back=BACK, read="u80")
    text = text.replace("u = Mul(a, a)", f"u0 = Mul(a, a)  {squares}").replace(
        "Sub(u, c)", "Sub(u80, c)"
    )
    _, after = with_scan_in_native_form(text, 2000)
    assert Counter(n.op_type for n in after.graph.node)["Mul"] > 70


SEQUENCE = """
    <ir_version: 9, opset_import: ["": 20]> f (float[6,N,5] x{inputs}) => (float[6,D,N,4] y) {{
        y = {kind}<hidden_size = 4{attributes}>(x, w, r, b{operands}) }}"""
VARIANTS = {
    "LSTM": ("", 1, ""),
    "LSTM in both directions": (', direction = "bidirectional"', 2, ""),
    "LSTM with peepholes": (', direction = "reverse", clip = 0.5', 1, "hcp"),
    "LSTM of coupled gates": (", input_forget = 1", 1, "nhc"),
    "GRU": (", linear_before_reset = 1", 1, "h"),
    "GRU in both directions": (', direction = "bidirectional"', 2, "nh"),
    "RNN": (', direction = "reverse", activations = ["Softsign"]', 1, "n"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_recurrent_layers_have_the_same_gradients(name):
    (attributes, d, used), kind = VARIANTS[name], name.split()[0]
    gates, rows = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], 3
    types = {"n": "int32[N]", "h": f"float[{d},N,4]", "c": f"float[{d},N,4]", "p": f"float[{d},12]"}
    text = SEQUENCE.format(
        kind=kind,
        attributes=attributes,
        inputs="".join(f", {types[o]} {o}" for o in used),
        operands="".join(f", {o if o in used else ''}" for o in "nhcp"[: 4 if "L" in kind else 2]),
    )
    rng = np.random.default_rng(0)
    shapes = {"w": (d, 4 * gates, 5), "r": (d, 4 * gates, 4), "b": (d, 8 * gates)}
    weights = {n: rng.normal(size=shape).astype("f") for n, shape in shapes.items()}
    model = parse_model(text.replace("D", str(d)), **weights)
    gradient = onnx_derivative(model, weights=[*weights])
    native = ir.from_proto(onnx.shape_inference.infer_shapes(gradient))
    to_native(native.graph, Target(CPU, 1, 1000))
    shapes |= {"x": (6, rows, 5), "h": (d, rows, 4), "c": (d, rows, 4), "p": (d, 12), "n": (rows,)}
    shapes["y_grad"] = (6, d, rows, 4)
    feed = {x.name: rng.normal(size=shapes[x.name]).astype("f") for x in gradient.graph.input}
    if "n" in feed:
        feed["n"] = np.int32([6, 3, 4])
    for ours, plain in zip(run(to_proto(native), feed), run(gradient, feed), strict=True):
        np.testing.assert_allclose(ours, plain, 1e-4, 1e-5)


def test_large_values_stay_inside():
    text = MODEL.format(nodes=BODIES["slopes"][0], more="", width=3)
    before, after = with_scan_in_native_form(text, 100_000)
    assert operators_of_body(after) == operators_of_body(before)


@pytest.mark.parametrize("read", ["abc", "a", "c", "b", "ac", ""])
@pytest.mark.parametrize("direction", [0, 1])
def test_results_that_nothing_reads_are_not_stacked(read, direction):
    directions = [0, direction, 1 - direction]
    before, after = with_scan_in_native_form(f"""
        f (float[3] s, float[4,3] x)
            => (float[3] last{"".join(f", float[4,3] {v}_" for v in read)}) {{
            last, a, b, c = Scan<num_scan_inputs = 1, scan_output_directions = {directions},
                body = g (float[3] h, float[3] v)
                    => (float[3] new, float[3] p, float[3] q, float[3] r) {{
                new = Add(h, v)  p = Neg(v)  q = Exp(v)  r = Mul(v, v) }}>(s, x)
            {" ".join(f"{v}_ = Identity({v})" for v in read)} }}""")
    rng = np.random.default_rng(0)
    feed = {"s": rng.normal(size=3).astype("f"), "x": rng.normal(size=(4, 3)).astype("f")}
    for ours, original in zip(run(after, feed), run(before, feed), strict=True):
        np.testing.assert_allclose(ours, original, 1e-6)
    assert len(scan_of(after).output) == 1 + len(read)


def test_many_results_that_nothing_reads():
    """More than a rewrite of one node may take."""
    names = [f"u{i}" for i in range(120)]
    outputs, types = (
        ", ".join(["", *words]) for words in (names, [f"float[3] b{n}" for n in names])
    )
    nodes = " ".join(f"b{n} = Neg(v)" for n in names)
    _, after = with_scan_in_native_form(f"""
        f (float[3] s, float[4,3] x) => (float[3] last, float[4,3] u7) {{
            last{outputs} = Scan<num_scan_inputs = 1, body = g (float[3] h, float[3] v)
                => (float[3] new{types}) {{ new = Add(h, v) {nodes} }}>(s, x) }}""")
    assert len(scan_of(after).output) == 9  # those in front of what the graph returns
    x = np.ones((4, 3), np.float32)
    last, returned = run(after, {"s": x[0], "x": x})
    assert (last == 5).all()
    assert (returned == -1).all()
