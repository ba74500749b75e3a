"""What is claimed of shapes holds when the model runs, and is enough for short gradients."""

from __future__ import annotations

from collections import Counter
from math import prod

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad import NoGradientRule, onnx_derivative
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.graph.inference.infer import infer, name_rows
from onnxgrad.graph.inference.walk import Walk
from onnxgrad.graph.output_shapes import output_shape
from onnxgrad.graph.shapes import broadcast, dims, equal, rank, static as lengths
from onnxgrad.model.convert import to_proto
from tests.support.cases import feed, model, run
from tests.support.table import ROWS


def value(shape: tuple | None, constant=None) -> ir.Value:
    made = ir.Value(shape=None if shape is None else ir.Shape(shape))
    if constant is not None:
        made.const_value = ir.tensor(np.array(constant, np.int64))
    return made


def graph(text: str) -> ir.Graph:
    made = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> {text}')
    return prepare(made).graph


def test_three_states_of_a_length():
    assert dims(value((2, "N", None))) == (2, "N", None)
    assert dims(value(None)) is None
    assert dims(None) is None
    assert (rank(value(())), rank(value((2, "N"))), rank(value(None))) == (0, 2, None)
    assert lengths((2, 3)) == (2, 3)
    assert lengths(()) == ()
    assert lengths((2, "N")) is None
    assert lengths(None) is None


def test_two_unknown_lengths_are_never_equal():
    assert equal((2, "N"), (2, "N"))
    assert equal((), ())
    assert not equal((2, None), (2, None))
    assert not equal(None, None)
    assert not equal(("N",), ("M",))


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(2, 1), (3,)], (2, 3)),
        ([(), ("N",)], ("N",)),
        ([("N", 1), (1, "N")], ("N", "N")),
        ([("N",), ("M",)], (None,)),
        ([("N",), (None,)], (None,)),
        ([("N",), (1,)], ("N",)),
        ([("N",), (5,)], (5,)),  # N is 5, or 1
        ([("N",), (0,)], (0,)),
        ([("N",), ("N",), (None, 1)], (None, "N")),
        ([(2,), None], None),
        ([], ()),
    ],
)
def test_broadcast(shapes, expected):
    assert broadcast(*shapes) == expected


NKM = (value(("N", 3, "K")), value(("N", "K", "M")))


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "expected"),
    [
        ("Where", [value(("N", 1)), value(()), value((1, 3))], {}, ("N", 3)),
        ("Clip", [value(("N",)), None, value(())], {}, ("N",)),
        ("MatMul", NKM, {}, ("N", 3, "M")),
        ("MatMul", [value(("K",)), value(("K", 2))], {}, None),
        ("Transpose", [value(("N", 3, "K"))], {}, ("K", 3, "N")),
        ("Transpose", [value(("N", 3, "K"))], {"perm": [1, 0, 2]}, (3, "N", "K")),
        ("Gemm", [value(("N", 3)), value((4, "N"))], {"transA": 1, "transB": 1}, (3, 4)),
        ("ReduceSum", [value(("N", 3)), value((1,), [-1])], {}, ("N", 1)),
        ("ReduceMax", [value(("N", 3)), value((1,), [0])], {"keepdims": 0}, (3,)),
        ("ReduceSum", [value(("N", 3)), value((0,), [])], {}, (1, 1)),
        ("ReduceSum", [value(("N", 3)), value((1,))], {}, None),
        ("ReduceSum", [value(("N", 3))], {}, (1, 1)),
        ("ReduceMax", [value(("N", 3))], {"keepdims": 0}, ()),
        ("ReduceSum", [value(("N", 3))], {"noop_with_empty_axes": 1}, ("N", 3)),
        ("ReduceMax", [value(("N", 3))], {"axes": [0]}, (1, 3)),
        ("Unsqueeze", [value(("N",)), value((2,), [-1, 0])], {}, (1, "N", 1)),
        ("Squeeze", [value(("N", 1)), value((1,), [-1])], {}, ("N",)),
        ("Reshape", [value(("N", 6)), value((2,), [0, -1])], {}, ("N", 6)),
        ("Reshape", [value(("N", 6)), value((2,), [-1, 3])], {}, ("2*N", 3)),
        ("Reshape", [value(("N", 6)), value((2,), [-1, 6])], {}, ("N", 6)),
        ("Reshape", [value(("N", 6)), value((2,), [-1, 4])], {}, (None, 4)),
        ("Reshape", [value(("N", "M")), value((1,), [-1])], {}, (None,)),
        ("Reshape", [value((4, 6)), value((2,), [3, -1])], {}, (3, 8)),
        ("Reshape", [value((0, 6)), value((2,), [3, 0])], {"allowzero": 1}, (3, 0)),
        ("Reshape", [value(("N", 6)), value((2,))], {}, (None, None)),
        ("Reshape", [value(("N", 6)), value(("M",))], {}, None),
        ("Resize", [value(("N", 3, 4)), None, value((3,))], {}, (None, None, None)),
        (
            "Resize",
            [value(("N", 3, 4)), None, None, value((2,))],
            {"axes": [-1, 1]},
            ("N", None, None),
        ),
        ("Add", [value(None), value((2,))], {}, None),
        ("Det", [value((2, 2))], {}, None),
    ],
)
def test_output_shape(operator, inputs, attributes, expected):
    assert output_shape(operator, inputs, attributes) == expected


def test_every_axis_without_a_name_gets_one():
    axes = [d for n in "abc" for d in dims(inputs_of_unnamed()[n])]
    assert axes == ["dim_1", "dim_2", 3, "N", "dim_0", "dim_3"]


def inputs_of_unnamed() -> dict[str, ir.Value]:
    text = (
        "g (float[?, unknown, 3] a, float[N, dim_0] b, float[?] c) => (float[N] y) { y = Neg(c) }"
    )
    made = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> {text}')
    for i in (0, 2):  # what the parser makes of `?` is no name either
        made.graph.input[i].type.tensor_type.shape.dim[0].ClearField("dim_param")
    return {str(x.name): x for x in prepare(made).graph.inputs}


def test_the_rows_of_all_inputs_may_get_one_symbol():
    text = "g (float[N, 3] a, float[M, N] b, float[4] c) => (float[K] y) { y = Neg(c) }"
    made = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> {text}')
    model = ir.from_proto(made)
    name_rows(model.graph, "rows")
    assert [dims(x) for x in model.graph.inputs] == [("rows", 3), ("rows", "rows"), (4,)]


def test_symbols_pass_through_what_onnx_gives_up_on():
    g = graph("""g (float[N, 6] x) => (float[a, b] y) {
        s = Constant<value_ints=[-1, 3]>()  r = Reshape(x, s)  y = Exp(r) }""")
    assert dims(g.outputs[0]) == ("2*N", 3)


def test_a_declared_output_hides_nothing():
    """Exporters give outputs symbols, or lengths, of their own."""
    g = graph("g (float[N, 6] x) => (float[batch, 6] y) { y = Exp(x) }")
    assert dims(g.outputs[0]) == ("N", 6)
    g = graph("""g (float[N, 6] x, int64[k] s) => (float[batch, 6] y) { y = Reshape(x, s) }""")
    assert dims(g.outputs[0]) == ("batch", 6)


def test_inference_that_fails_leaves_shapes_unknown():
    made = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 20, "custom": 1]>
        g (float[N] x) => (float y) { h = custom.What(x)  y = Exp(h) }""")
    model = ir.from_proto(made)
    infer(model)
    assert dims(next(iter(model.graph)).outputs[0]) is None


def test_lengths_that_a_loop_changes_are_forgotten_with_what_follows_from_them():
    g = graph("""g (float[N] x, int64 n, bool c) => (float y, float z)
        <float e = {1.0}, int64 two = {2}> {
        y, z = Loop(n, c, x) <body = b (int64 i, bool k, float[N] v) => (bool q, float w, float o) {
            q = Identity(k)  d = Shape(v)  s = Mul(d, two)  o = Expand(e, s)
            w = Concat<axis = 0>(v, o) }> }""")
    (loop,) = g
    body = loop.attributes["body"].as_graph()
    values = (*body.inputs, *body.outputs, *loop.outputs)
    assert not any(isinstance(d, str) and "N" in d for v in values for d in dims(v) or ())


# -- what is claimed, against what is there -----------------------------------------------------


def bind(claims: dict[str, tuple], shapes: dict[str, tuple[int, ...]]) -> None:
    """Check that one length per symbol explains all `shapes`."""
    lengths: dict[str, int] = {}
    for name, claim in claims.items():
        assert len(claim) == len(shapes[name]), name
        for d, n in zip(claim, shapes[name], strict=True):
            if isinstance(d, str) and "*" not in d:
                assert lengths.setdefault(d, n) == n, (name, claim, shapes[name])
    for name, claim in claims.items():
        for d, n in zip(claim, shapes[name], strict=True):
            if d is not None:
                parts = [int(p) if p.isdigit() else lengths[p] for p in str(d).split("*")]
                assert prod(parts) == n, (name, claim, shapes[name])


def claims_and_shapes(made: onnx.ModelProto, arrays: dict) -> tuple[dict, dict]:
    """Return for every value of the model the shape that it states, and that it has."""
    graph = ir.from_proto(made).graph
    stated = {str(v.name): dims(v) for n in graph for v in n.outputs if v.name}
    claims = {name: shape for name, shape in stated.items() if shape is not None}
    missing = set(stated) - {y.name for y in made.graph.output}
    made.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(missing))
    names = [y.name for y in made.graph.output]
    found = dict(zip(names, run(made, arrays), strict=True))
    for name, elements in [(n, a) for n, a in found.items() if not isinstance(a, np.ndarray)]:
        claim = claims.pop(name, None)  # of a sequence, that of all elements; None holds nothing
        for i, array in enumerate(elements or ()):
            found[f"{name}[{i}]"] = array
            claims |= {} if claim is None else {f"{name}[{i}]": claim}
        del found[name]
    shapes = {name: np.shape(array) for name, array in found.items()}
    inputs = {str(x.name): dims(x) for x in graph.inputs}
    claims |= {name: shape for name, shape in inputs.items() if shape is not None}
    return claims, shapes | {name: np.shape(arrays[name]) for name in inputs}


def rows() -> list:
    """Return the rows with both ways to know their shapes, of which one in turn is of the sweep.

    Kernels of onnxruntime give nothing other shapes, and so rows without elements are left out.
    """
    filled = [r for r in ROWS if r.runs and not any(0 in shape for shape in r.shapes.values())]
    return [
        pytest.param(row, known, id=f"{row.id}-{known}", marks=[pytest.mark.sweep] * (i % 2 != j))
        for i, row in enumerate(filled)
        for j, known in enumerate(("symbols", "rank"))
    ]


@pytest.mark.parametrize(("row", "known"), rows())
def test_stated_shapes_are_those_at_run_time(row, known):
    made, arrays = model(row, known), feed(row)
    bind(*claims_and_shapes(to_proto(prepare(made)), arrays))
    for name, y in zip(row.outputs, run(made, arrays), strict=True):
        arrays[f"{name}_grad"] = np.zeros(y.shape)
    try:
        gradient = onnx_derivative(made, weights=[])
    except NoGradientRule:
        return
    bind(*claims_and_shapes(gradient, arrays))


def test_one_walk_infers_a_model(monkeypatch):
    """It does not begin again for lowerings, a function body, a stated shape, or sizes."""
    made = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 24, "com.microsoft": 1]>
        f (float[N,4,8,8] x, float[4] s) => (float[N,4,8,8] y) {
            a = com.microsoft.QuickGelu(x)  g = GroupNormalization<num_groups=2>(a, s, s)
            n = Shape(g)  r = Reshape(g, n)  c = Celu(r)  w = Swish(c)  y = Relu(w) }""")
    walks, inferred = [], Counter()
    start, anew = Walk.__init__, Walk._infer_anew

    def counted_start(walk, *given):
        walks.append(walk)
        start(walk, *given)

    def counted(walk, node):
        inferred[node] += 1
        anew(walk, node)

    monkeypatch.setattr(Walk, "__init__", counted_start)
    monkeypatch.setattr(Walk, "_infer_anew", counted)
    prepared = prepare(made).graph
    assert len(walks) == 1
    assert len(inferred) > 10
    assert sum(inferred.values()) <= 2 * len(inferred)
    assert all(dims(y) == ("N", 4, 8, 8) for y in prepared.outputs)


def test_the_stated_shape_of_a_constant_is_not_believed():
    """As onnxruntime-genai's builder writes its constants: vectors that it states to be scalars."""
    made = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 20]>
        f (float[N,4] x) => (float[A,B,C] y) {
            two = Constant<value = int64[1] {2}>()
            n = Shape<end = 1>(x)  l = Concat<axis = 0>(n, two, two)  y = Reshape(x, l) }""")
    made.graph.value_info.append(
        onnx.helper.make_tensor_value_info("two", onnx.TensorProto.INT64, [])
    )
    assert dims(prepare(made).graph.outputs[0]) == ("N", 2, 2)
