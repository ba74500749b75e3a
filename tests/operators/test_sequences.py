"""Sequences and Optionals in Loops, branches and models as exporters write them."""

from __future__ import annotations

import io
import warnings

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad import DerivativeOptions, NoGradientRule, check_gradient, onnx_derivative, partition
from onnxgrad.autodiff.primal.prepare import prepare
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import in_sweep, run_named

FILLED = DerivativeOptions.KeepOutputs | DerivativeOptions.FillGrad
ORDERS = pytest.mark.parametrize("order", [1, in_sweep(2)])
SEQUENCE_OPERATORS = ("Sequence", "Loop", "If", "Optional")


def array_of(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def all_operators(model: onnx.ModelProto) -> list[str]:
    graph = ir.from_proto(model).graph
    return [node.op_type for node in graph.all_nodes()]


def loop(carried: str, body: str, start: str, after: str = "") -> str:
    """Return a model whose Loop hands on the sequence q, of which y is joined."""
    return f"""g (float[M,3] x, float[1,3] w, int64 n) => (float[A,B] y) {{
        zero = Constant<value_int=0>()  last = Constant<value_int=-1>()
        axes = Constant<value_ints=[0]>()  s = SplitToSequence(x)  {start}
        u = Loop<body = b (int64 i, bool c, {carried} q) => (bool d, {carried} r) {{
            d = Identity(c)  {body} }}>(n, , t)
        {after or "v = Identity(u)"}  y = ConcatFromSequence<axis=0>(v) }}"""


SEQ, ANY = "seq(float[N,3])", "seq(float[N,K])"
EMPTY = "t = SequenceEmpty()"
OF_PIECES = "t = Identity(s)"
GROWS = "r = SequenceInsert(q, h)"
LOOPS = {
    "grows, from elements around": loop(
        SEQ, f"a = SequenceAt(s, i)  e = Mul(a, w)  h = Exp(e)  {GROWS}", EMPTY
    ),
    "grows at the front": loop(
        SEQ, "a = SequenceAt(s, i)  h = Mul(a, w)  r = SequenceInsert(q, h, zero)", EMPTY
    ),
    "reads the last": loop(
        SEQ, f"a = SequenceAt(q, last)  e = Mul(a, w)  h = Sin(e)  {GROWS}", OF_PIECES
    ),
    "reads a place of its own": loop(
        SEQ, f"a = SequenceAt(q, i)  e = Mul(a, w)  h = Sin(e)  {GROWS}", OF_PIECES
    ),
    "elements grow": loop(
        ANY, f"a = SequenceAt(q, last)  e = Mul(a, a)  h = Concat<axis=0>(e, w)  {GROWS}", OF_PIECES
    ),
    "overwrites": loop(
        SEQ,
        """a = SequenceAt(q, i)  e = Mul(a, w)  h = Sin(e)  p = SequenceErase(q, i)
        r = SequenceInsert(p, h, i)""",
        OF_PIECES,
    ),
    "shrinks": loop(
        SEQ,
        """a = SequenceAt(q, zero)  e = Mul(a, w)  p = SequenceErase(q, zero)
        b = SequenceAt(p, zero)  h = Add(e, b)  o = SequenceErase(p, zero)
        r = SequenceInsert(o, h)""",
        OF_PIECES,
    ),
    "joins all so far": loop(
        SEQ,
        f"""a = ConcatFromSequence<axis=0>(q)  e = Mul(a, w)  m = ReduceMean(e, axes)
        h = Sin(m)  {GROWS}""",
        OF_PIECES,
    ),
    "starts anew": loop(SEQ, "e = Mul(w, w)  r = SequenceConstruct(e, w)", OF_PIECES),
    "hands on": loop(SEQ, "r = Identity(q)", OF_PIECES),
    "in a loop": loop(
        SEQ,
        f"""r = Loop<body = f (int64 j, bool k, {SEQ} o) => (bool l, {SEQ} p) {{
            l = Identity(k)  a = SequenceAt(s, i)  e = Mul(a, w)  h = Sin(e)
            p = SequenceInsert(o, h) }}>(n, , q)""",
        EMPTY,
    ),
    "in a branch": loop(
        SEQ,
        f"""m = Equal(i, zero)
        r = If<then_branch = f () => ({SEQ} o)
                {{ a = SequenceAt(q, last)  h = Mul(a, w)  o = SequenceInsert(q, h) }},
            else_branch = e () => ({SEQ} p) {{ p = SequenceErase(q) }}>(m)""",
        OF_PIECES,
    ),
}


@ORDERS
@pytest.mark.parametrize("name", LOOPS)
def test_sequences_of_a_loop(name, order):
    feed = {"x": array_of(4, 3), "w": array_of(1, 3), "n": np.array(2)}
    report = check_gradient(parse_model(LOOPS[name]), feed=feed, order=order)
    assert report.ok, str(report)


@ORDERS
def test_a_loop_of_no_iterations(order):
    body = "a = SequenceAt(s, i)  e = Mul(a, w)  r = SequenceInsert(q, e)"
    text = loop(SEQ, body, EMPTY, "h = Mul(w, w)  v = SequenceInsert(u, h)")
    feed = {"x": array_of(4, 3), "w": array_of(1, 3), "n": np.array(0)}
    report = check_gradient(parse_model(text), feed=feed, order=order)
    assert report.ok, str(report)


@pytest.mark.parametrize("length", ["M", 0])
@pytest.mark.parametrize("keep", [0, 1])
def test_pieces_of_nothing(keep, length):
    text = f"""g (float[{length},3] x, float[{"1," * keep}3] w) => (float[A] y) {{
        s = SplitToSequence<keepdims={keep}>(x)  t = SequenceInsert(s, w)
        v = ConcatFromSequence<axis=-1>(t)  o = Constant<value_ints=[-1]>()  y = Reshape(v, o) }}"""
    for rows in (0, 2) if length == "M" else (0,):
        feed = {
            "x": array_of(rows, 3),
            "w": array_of(1, 3)[0] if not keep else array_of(1, 3),
        }
        report = check_gradient(parse_model(text), feed=feed)
        assert report.ok, str(report)


def test_reading_one_by_one_costs_no_zeros():
    """What a loop reads of a sequence is added there, and what it read is not computed again."""
    text = LOOPS["reads a place of its own"]
    made = ir.from_proto(onnx_derivative(parse_model(text)))
    loops = [node for node in made.graph.all_nodes() if node.op_type == "Loop"]
    assert not [node for node in loops if node.graph is not made.graph]


def test_random_numbers_beside_sequences():
    body = """z = RandomNormalLike(w)  a = SequenceAt(q, last)  m = Mul(a, a)  k = Mul(w, z)
        h = Concat<axis=0>(m, k)  r = SequenceInsert(q, h)"""
    with pytest.raises(NoGradientRule, match=naming("Loop", "'u'", "random")):
        onnx_derivative(parse_model(loop(ANY, body, OF_PIECES)))


MAP = """g (float[M,3] x, float[1,3] w) => (float[A,B] y) {{ s = SplitToSequence(x)
    u = SequenceMap<body = f (float[1,3] a{more}) => (float[1,3] b) {{ {body} }}>(s{operands})
    y = ConcatFromSequence<axis=0>(u) }}"""
MAPS = {
    "from around": MAP.format(more="", body="b = Mul(a, w)", operands=""),
    "tensor": MAP.format(more=", float[1,3] k", body="e = Exp(a)  b = Mul(e, k)", operands=", w"),
    "two": MAP.format(more=", float[1,3] k", body="b = Mul(a, k)", operands=", s"),
    "hands on": MAP.format(more="", body="c = Mul(a, w)  b = Identity(a)", operands=""),
}


@ORDERS
@pytest.mark.parametrize("name", MAPS)
def test_sequence_map(name, order):
    feed = {"x": array_of(4, 3), "w": array_of(1, 3)}
    report = check_gradient(parse_model(MAPS[name]), feed=feed, order=order)
    assert report.ok, str(report)


def test_sequence_map_in_a_sequence_map():
    """onnxruntime cannot load this model, but its gradient."""
    body = """r = SequenceConstruct(a, w)
        t = SequenceMap<body = h (float[1,3] e) => (float[1,3] k) { k = Mul(e, w) }>(r)
        j = ConcatFromSequence<axis=0>(t)  o = Constant<value_ints=[0]>()  b = ReduceProd(j, o)"""
    model = parse_model(MAP.format(more="", body=body, operands=""))
    x, w = array_of(4, 3), array_of(1, 3)
    found = run_named(onnx_derivative(model, options=FILLED), **{"x": x, "w": w})
    np.testing.assert_allclose(found["y"], x * w**3, rtol=1e-5)
    np.testing.assert_allclose(found["x_grad"], np.broadcast_to(w**3, x.shape), rtol=1e-5)
    np.testing.assert_allclose(found["w_grad"], (3 * x * w**2).sum(0, keepdims=True), rtol=1e-5)


BRANCHES = {
    "sequences": """u = If<then_branch = t () => (seq(float[N,3]) a)
            { e = Exp(x)  a = SequenceInsert(s, e) },
        else_branch = f () => (seq(float[N,3]) b) { b = SequenceErase(s, zero) }>(c)
        y = ConcatFromSequence<axis=0>(u)""",
    "captured": """y = If<then_branch = t () => (float[N,3] a)
            { e = SequenceAt(s, place)  a = Mul(e, w) },
        else_branch = f () => (float[N,3] b) { b = Exp(w) }>(c)""",
    "one reads, one joins": """y = If<then_branch = t () => (float[N,3] a)
            { r = SequenceErase(s, place)  a = ConcatFromSequence<axis=0>(r) },
        else_branch = f () => (float[N,3] b) { b = SequenceAt(s, place) }>(c)""",
    "Optional": """o = Optional(s)  h = OptionalHasElement(o)
        y = If<then_branch = t () => (float[N,3] a)
            { e = OptionalGetElement(o)  a = ConcatFromSequence<axis=0>(e) },
        else_branch = f () => (float[N,3] b) { b = Neg(x) }>(h)""",
    "nothing in an Optional": """o = If<then_branch = t () => (optional(float[N,3]) a)
            { a = Optional(x) },
        else_branch = f () => (optional(float[N,3]) b) { b = Optional<type = float[N,3]>() }>(c)
        h = OptionalHasElement(o)  f = Cast<to=1>(h)  y = Mul(w, f)""",
}


@ORDERS
@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("name", BRANCHES)
def test_sequences_in_branches(name, chosen, order):
    text = f"""g (float[2,3] x, float[2,3] w, bool c, int64 place) => (float[A,B] y) {{
        zero = Constant<value_int=0>()  z = Mul(x, w)  s = SequenceConstruct(z, w)
        {BRANCHES[name]} }}"""
    feed = {
        "x": array_of(2, 3),
        "w": array_of(2, 3),
        "c": np.array(chosen),
        "place": np.array(-1),
    }
    report = check_gradient(parse_model(text), feed=feed, order=order)
    assert report.ok, str(report)


def test_what_may_be_nothing_has_no_zero():
    text = """g (float[3] x, bool c) => (float[3] y) {
        o = If<then_branch = t () => (optional(float[3]) a) { a = Optional(x) },
            else_branch = f () => (optional(float[3]) b) { b = Optional<type = float[3]>() }>(c)
        h = OptionalHasElement(o)
        y = If<then_branch = p () => (float[3] d) { d = OptionalGetElement(o) },
            else_branch = q () => (float[3] e) { e = Neg(x) }>(h) }"""
    with pytest.raises(NoGradientRule, match=naming("'o'", "Optional")):
        onnx_derivative(parse_model(text))


# -- models as exporters write them ---------------------------------------------------------------


def scripted() -> dict:
    torch = pytest.importorskip("torch")

    class Recurrent(torch.nn.Module):
        def forward(self, x):
            states = [x[0]]
            for i in range(1, x.size(0)):
                states.append(torch.sin(states[-1]) * x[i] + states[0])
            return torch.stack(states)

    class Pieces(torch.nn.Module):
        def forward(self, x):
            made = []
            for piece in torch.split(x, 2, dim=1):
                made.append(torch.exp(piece))
            return torch.cat(made, dim=1)

    class Unbound(torch.nn.Module):
        def forward(self, x):
            a, b, c = torch.unbind(x, 1)
            return torch.stack([a * b, b * c, c * a])

    return {"Recurrent": Recurrent(), "Pieces": Pieces(), "Unbound": Unbound()}


@pytest.mark.parametrize("name", ["Recurrent", "Pieces", "Unbound"])
def test_what_torch_exports(name):
    torch = pytest.importorskip("torch")
    module, file = scripted()[name], io.BytesIO()
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            torch.jit.script(module),
            (x,),
            file,
            dynamo=False,
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "N"}},
        )
    made = onnx_derivative(file.getvalue(), options=FILLED)
    y = module(x)
    y.sum().backward()
    found = run_named(made, **{"x": x.detach().numpy()})
    np.testing.assert_allclose(found["y"], y.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["x_grad"], x.grad.numpy(), rtol=1e-5, atol=1e-6)


STATIC = {
    "unbind and stack": """a = Constant<value_int=0>()  b = Constant<value_int=-1>()
        s = SplitToSequence<axis=1, keepdims=0>(x)  u = SequenceAt(s, a)  v = SequenceAt(s, b)
        z = Mul(u, v)  t = SequenceConstruct(z, u, z)
        y = ConcatFromSequence<axis=1, new_axis=1>(t)""",
    "a list built up": """e = SequenceEmpty()  a = Exp(x)  s = SequenceInsert(e, a)
        t = SequenceInsert(s, x)  z = Constant<value_int=0>()  u = SequenceInsert(t, a, z)
        w = SequenceErase(u, z)  y = ConcatFromSequence<axis=-1>(w)""",
    "pieces joined": """z = Exp(x)  k = Constant<value_ints=[1, 2]>()
        s = SplitToSequence<axis=-1>(z, k)  t = Identity(s)  v = ConcatFromSequence<axis=1>(t)
        y = Mul(v, v)""",
    "length": """s = SequenceConstruct(x, x)  n = SequenceLength(s)  f = Cast<to=1>(n)
        y = Mul(x, f)""",
    "Optional": """s = SequenceConstruct(x, x)  o = Optional(s)  e = OptionalGetElement(o)
        y = ConcatFromSequence<axis=0>(e)""",
}


@pytest.mark.parametrize("name", STATIC)
def test_known_sequences_leave_no_trace(name):
    model = parse_model(f"g (float[N,3] x) => (float[A,B] y) {{ {STATIC[name]} }}")
    left = all_operators(onnx_derivative(model))
    assert not [op for op in left if op.startswith(SEQUENCE_OPERATORS)], left
    report = check_gradient(model)
    assert report.ok, str(report)


@pytest.mark.parametrize("opset", [11, 13, 17])
def test_old_opsets(opset):
    text = """g (float[M,3] x, int64 i) => (float[A,B] y) { s = SplitToSequence(x)
        a = SequenceAt(s, i)  e = Exp(a)  t = SequenceInsert(s, e)
        y = ConcatFromSequence<axis=0>(t) }"""
    report = check_gradient(
        parse_model(text, opset=opset), feed={"x": array_of(4, 3), "i": np.array(-2)}
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("recompute", ["none", "cheap", "all"])
def test_two_passes(recompute):
    """No sequence can pass from the one to the other: its elements do, or what they are made of."""
    model = parse_model(LOOPS["grows, from elements around"])
    x, w = array_of(4, 3), array_of(1, 3)
    made = partition(model, recompute=recompute)
    kinds = {y.type.WhichOneof("value") for y in made.forward.graph.output}
    assert kinds == {"tensor_type"}
    feed = {"x": x, "w": w, "n": np.array(3)}
    saved = run_named(made.forward, **feed)
    back = {v.name for v in made.backward.graph.input}
    g = array_of(3, 3)
    given = {n: a for n, a in (feed | saved | {"y_grad": g}).items() if n in back}
    found = run_named(made.backward, **given)
    expected = run_named(onnx_derivative(model), **feed | {"y_grad": g})
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6)


# -- types, inputs and outputs --------------------------------------------------------------------


def test_types_and_shapes_of_elements():
    text = """g (float[N,3] x, float[3] w, bool c, int64 n) => (float[A,B] y) {
        zero = Constant<value_int=0>()  k = Constant<value_int=2>()
        made = SequenceConstruct(x, x)  mixed = SequenceConstruct(x, w)
        some = SplitToSequence<axis=1>(x)  flat = SplitToSequence<axis=1, keepdims=0>(x)
        even = SplitToSequence(x, k)  none = SequenceEmpty<dtype=11>()
        put = SequenceInsert(some, x)  less = SequenceErase(put)  at = SequenceAt(less, n)
        row = SequenceAt(flat, n)  whole = ConcatFromSequence<axis=1>(some)
        stack = ConcatFromSequence<axis=0, new_axis=1>(flat)
        maybe = Optional(made)  got = OptionalGetElement(maybe)
        either = If<then_branch = t () => (p) { p = SequenceInsert(made, x) },
            else_branch = f () => (q) { q = SequenceErase(made, zero) }>(c)
        empty = SequenceEmpty()
        grown = Loop<body = b (int64 i, bool d, o) => (e, r) { e = Identity(d)
            first = Mul(x, w)  r = SequenceInsert(o, first) }>(n, , empty)
        longer = Loop<body = b (int64 i, bool d, o2) => (e2, r2) { e2 = Identity(d)
            last = SequenceAt(o2, zero)  twice = Concat<axis=0>(last, last)
            r2 = SequenceInsert(o2, twice) }>(n, , grown)
        y0 = SequenceAt(longer, zero)  h = ReduceSum<keepdims=0>(at)  j = ReduceSum<keepdims=0>(row)
        y1 = Add(y0, h)  y2 = Add(y1, j)  a0 = ReduceSum<keepdims=0>(whole)
        a1 = ReduceSum<keepdims=0>(stack)  y3 = Add(y2, a0)  y4 = Add(y3, a1)
        v = SequenceAt(either, n)  g1 = SequenceAt(got, n)  m = SequenceAt(mixed, n)
        m1 = ReduceSum<keepdims=0>(m)  ev = SequenceAt(even, n)  e1 = ReduceSum<keepdims=0>(ev)
        y5 = Add(y4, m1)  y6 = Add(y5, e1)  y7 = Add(y6, v)  y8 = Add(y7, g1)
        dn = SequenceLength(none)  df = Cast<to=1>(dn)  y = Mul(y8, df) }"""
    graph = prepare(parse_model(text), keep=["got"]).graph
    values = {y.name: y for node in graph for y in node.outputs}
    tensor = ir.TensorType(ir.DataType.FLOAT)
    sequence = ir.SequenceType(tensor)
    expected = {
        "made": (sequence, ("N", 3)),
        "mixed": (sequence, None),
        "some": (sequence, ("N", 1)),
        "flat": (sequence, ("N",)),
        "even": (sequence, (None, 3)),
        "put": (sequence, ("N", None)),
        "less": (sequence, ("N", None)),
        "row": (tensor, ("N",)),
        "either": (sequence, ("N", 3)),
        "grown": (sequence, ("N", 3)),
        "longer": (sequence, (None, 3)),
    }
    for name, (kind, shape) in expected.items():
        value = values[name]
        dims = value.shape and tuple(d if isinstance(d, int) else d.value for d in value.shape)
        assert (value.type, dims) == (kind, shape), name
    assert len(values["y0"].shape) == len(values["at"].shape) == 2


def test_lengths_of_elements_are_not_the_same():
    """onnx gives one symbol to all elements of a sequence."""
    text = """g (float[4,3] x, int64[K] k, int64 i, int64 j) => (float[A,B] y) {
        s = SplitToSequence(x, k)  a = SequenceAt(s, i)  b = SequenceAt(s, j)
        t = Transpose(b)  c = MatMul(a, t)  y = Mul(c, c) }"""
    feed = {"x": array_of(4, 3), "k": np.array([1, 3]), "i": np.array(0), "j": np.array(1)}
    report = check_gradient(parse_model(text), feed=feed)
    assert report.ok, str(report)


def test_a_sequence_as_input():
    text = """g (seq(float[M,3]) s, float[3] w, int64 i) => (float[A,B] y) {
        a = SequenceAt(s, i)  b = ConcatFromSequence<axis=0>(s)  c = Mul(b, w)  e = Exp(a)
        f = ReduceSum<keepdims=0>(e)  y = Mul(c, f) }"""
    made = onnx_derivative(parse_model(text))
    assert [y.name for y in made.graph.output] == ["s_grad", "w_grad"]
    s, w, g = [array_of(2, 3), array_of(1, 3) / 2], array_of(3), array_of(3, 3)
    found = run_named(made, **{"s": s, "w": w, "i": np.array(-1), "y_grad": g})
    f, c = np.exp(s[1]).sum(), np.concatenate(s) * w
    first = g * w * f
    expected = [first[:2], first[2:] + np.exp(s[1]) * (g * c).sum()]
    for got, want in zip(found["s_grad"], expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["w_grad"], (g * np.concatenate(s) * f).sum(0), rtol=1e-5)


def test_a_sequence_as_output():
    text = """g (float[3] x) => (seq(float[3]) s, float[6] y)
        { e = Exp(x)  s = SequenceConstruct(e, x)  y = ConcatFromSequence<axis=0>(s) }"""
    made = onnx_derivative(parse_model(text))
    assert [x.name for x in made.graph.input] == ["x", "y_grad"]
    x, g = array_of(3), array_of(6)
    found = run_named(made, **{"x": x, "y_grad": g})
    np.testing.assert_allclose(found["x_grad"], g[:3] * np.exp(x) + g[3:], rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ("s = SequenceConstruct(e, x)", "select 'e'"),
        ("t = SequenceConstruct(e)  s = SequenceInsert(t, e)", "select a tensor"),
    ],
)
def test_only_sequences_as_outputs(body, hint):
    text = f"g (float[3] x) => (seq(float[3]) s) {{ e = Exp(x)  {body} }}"
    with pytest.raises(ValueError, match=naming("'s'", hint)):
        onnx_derivative(parse_model(text))
