"""What is claimed of shapes holds when the model runs, and is enough for short gradients."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad import ModelError, NoGradientRule
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.graph.infer import infer, name_rows
from onnxgrad.graph.walk import Walk
from onnxgrad.operators.outputs import output_shape, output_types
from onnxgrad.operators.shapes import broadcast, dims, equal, rank, static as lengths
from tests.support.cases import Row, row_feed, row_model
from tests.support.errors import naming
from tests.support.microsoft_rows import CASES, kernel_model
from tests.support.models import parse_model
from tests.support.packs import Pack, Part, failures
from tests.support.row_packs import RowPack, first_rows, kind_of, row_packs
from tests.support.stated_shapes import (
    all_values,
    assert_one_length_per_symbol,
    claims_and_shapes,
)
from tests.support.table import ROWS


def of_shape(shape: tuple | None, constant=None) -> ir.Value:
    made = ir.Value(shape=None if shape is None else ir.Shape(shape))
    if constant is not None:
        made.const_value = ir.tensor(np.array(constant, np.int64))
    return made


def prepared_graph(text: str) -> ir.Graph:
    return prepare(parse_model(text, opset=20)).graph


def test_three_states_of_a_length():
    assert dims(of_shape((2, "N", None))) == (2, "N", None)
    assert dims(of_shape(None)) is None
    assert dims(None) is None
    assert (
        rank(of_shape(())),
        rank(of_shape((2, "N"))),
        rank(of_shape(None)),
    ) == (0, 2, None)
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


def slice_bounds(*vectors: list[int]) -> list[ir.Value]:
    return [of_shape((len(v),), v) for v in vectors]


NKM = (of_shape(("N", 3, "K")), of_shape(("N", "K", "M")))


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "expected"),
    [
        (
            "Where",
            [of_shape(("N", 1)), of_shape(()), of_shape((1, 3))],
            {},
            ("N", 3),
        ),
        ("Clip", [of_shape(("N",)), None, of_shape(())], {}, ("N",)),
        ("MatMul", NKM, {}, ("N", 3, "M")),
        ("MatMul", [of_shape(("K",)), of_shape(("K", 2))], {}, None),
        ("Transpose", [of_shape(("N", 3, "K"))], {}, ("K", 3, "N")),
        ("Transpose", [of_shape(("N", 3, "K"))], {"perm": [1, 0, 2]}, (3, "N", "K")),
        (
            "Gemm",
            [of_shape(("N", 3)), of_shape((4, "N"))],
            {"transA": 1, "transB": 1},
            (3, 4),
        ),
        ("ReduceSum", [of_shape(("N", 3)), of_shape((1,), [-1])], {}, ("N", 1)),
        ("ReduceMax", [of_shape(("N", 3)), of_shape((1,), [0])], {"keepdims": 0}, (3,)),
        ("ReduceSum", [of_shape(("N", 3)), of_shape((0,), [])], {}, (1, 1)),
        ("ReduceSum", [of_shape(("N", 3)), of_shape((1,))], {}, (None, None)),
        ("ReduceSum", [of_shape(("N", 3))], {}, (1, 1)),
        ("ReduceMax", [of_shape(("N", 3))], {"keepdims": 0}, ()),
        ("ReduceSum", [of_shape(("N", 3))], {"noop_with_empty_axes": 1}, ("N", 3)),
        ("ReduceMax", [of_shape(("N", 3))], {"axes": [0]}, (1, 3)),
        ("Unsqueeze", [of_shape(("N",)), of_shape((2,), [-1, 0])], {}, (1, "N", 1)),
        ("Squeeze", [of_shape(("N", 1)), of_shape((1,), [-1])], {}, ("N",)),
        ("Reshape", [of_shape(("N", 6)), of_shape((2,), [0, -1])], {}, ("N", 6)),
        ("Reshape", [of_shape(("N", 6)), of_shape((2,), [-1, 3])], {}, ("2*N", 3)),
        ("Reshape", [of_shape(("N", 6)), of_shape((2,), [-1, 6])], {}, ("N", 6)),
        ("Reshape", [of_shape(("N", 6)), of_shape((2,), [-1, 4])], {}, (None, 4)),
        ("Reshape", [of_shape(("N", "M")), of_shape((1,), [-1])], {}, (None,)),
        ("Reshape", [of_shape((4, 6)), of_shape((2,), [3, -1])], {}, (3, 8)),
        (
            "Reshape",
            [of_shape((0, 6)), of_shape((2,), [3, 0])],
            {"allowzero": 1},
            (3, 0),
        ),
        ("Reshape", [of_shape(("N", 6)), of_shape((2,))], {}, (None, None)),
        ("Reshape", [of_shape(("N", 6)), of_shape(("M",))], {}, None),
        (
            "Resize",
            [of_shape(("N", 3, 4)), None, of_shape((3,))],
            {},
            (None, None, None),
        ),
        (
            "Resize",
            [of_shape(("N", 3, 4)), None, None, of_shape((2,))],
            {"axes": [-1, 1]},
            ("N", None, None),
        ),
        ("Slice", [of_shape(("N", 6)), *slice_bounds([0, 1], [10**9, -1], [0, 1])], {}, ("N", 4)),
        ("Slice", [of_shape(("N", 6)), *slice_bounds([-4], [10**9], [-1], [1])], {}, ("N", 4)),
        ("Slice", [of_shape(("N", 6)), *slice_bounds([0], [5], [0])], {}, None),
        ("Slice", [of_shape(("N", 6)), *slice_bounds([0], [10**9], [0], [2])], {}, None),
        ("Slice", [of_shape((5, 6)), *slice_bounds([9], [12])], {}, (0, 6)),
        ("Add", [of_shape(None), of_shape((2,))], {}, None),
        ("Det", [of_shape((2, 2))], {}, None),
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
    made = parse_model(text, opset=20)
    for i in (0, 2):  # what the parser makes of `?` is no name either
        made.graph.input[i].type.tensor_type.shape.dim[0].ClearField("dim_param")
    return {str(x.name): x for x in prepare(made).graph.inputs}


def test_the_rows_of_all_inputs_may_get_one_symbol():
    text = "g (float[N, 3] a, float[M, N] b, float[4] c) => (float[K] y) { y = Neg(c) }"
    made = parse_model(text, opset=20)
    model = ir.from_proto(made)
    name_rows(model.graph, "rows")
    assert [dims(x) for x in model.graph.inputs] == [("rows", 3), ("rows", "rows"), (4,)]


def test_symbols_pass_through_what_onnx_gives_up_on():
    g = prepared_graph("""g (float[N, 6] x) => (float[a, b] y) {
        s = Constant<value_ints=[-1, 3]>()  r = Reshape(x, s)  y = Exp(r) }""")
    assert dims(g.outputs[0]) == ("2*N", 3)


def test_a_length_is_not_below_zero():
    """Exporters let -1 stand for the length that is there."""
    g = prepared_graph("""g (float[N, 6] x) => (float[a, b] y) {
        n = Shape<end=1>(x)  least = Constant<value_ints=[-1]>()  below = Equal(n, least)
        k = Constant<value_ints=[5]>()  w = Where(below, k, n)  six = Constant<value_ints=[6]>()
        s = Concat<axis=0>(w, six)  y = Reshape(x, s) }""")
    assert dims(g.outputs[0]) == ("N", 6)


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [("", ("T", "N")), ("scan_input_axes=[1], ", ("N", "T"))],
    ids=["the first axis", "the second axis"],
)
def test_a_scan_stacks_along_the_axis_that_it_takes_apart(attributes, expected):
    g = prepared_graph(f"""g (float[T, N] x) => (float[a, b] y) {{
        y = Scan<num_scan_inputs=1, {attributes}body = b (float[k] v) => (float[k] w) {{
            w = Exp(v) }}>(x) }}""")
    assert dims(g.outputs[0]) == expected


def test_types_of_what_has_no_operand():
    kind = ir.TypeAndShape(ir.TensorType(ir.DataType.FLOAT), None)
    attributes = {"type": kind}
    assert output_types("Optional", [], attributes, 1) == [ir.OptionalType(kind.type)]
    assert output_types("Optional", [], {}, 1) == [None]
    assert output_types("SequenceAt", [None], {}, 1) == [None]
    assert output_types("SequenceEmpty", [], {}, 1) == [ir.SequenceType(kind.type)]


def test_a_declared_output_hides_nothing():
    """Exporters give outputs symbols, or lengths, of their own."""
    g = prepared_graph("g (float[N, 6] x) => (float[batch, 6] y) { y = Exp(x) }")
    assert dims(g.outputs[0]) == ("N", 6)
    g = prepared_graph(
        """g (float[N, 6] x, int64[k] s) => (float[batch, 6] y) { y = Reshape(x, s) }"""
    )
    assert dims(g.outputs[0]) == ("batch", 6)


def test_inference_that_fails_leaves_shapes_unknown():
    made = parse_model(
        "g (float[N] x) => (float y) { h = custom.What(x)  y = Exp(h) }", domains={"custom": 1}
    )
    model = ir.from_proto(made)
    infer(model)
    assert dims(next(iter(model.graph)).outputs[0]) is None


def test_lengths_that_a_loop_changes_are_forgotten_with_what_follows_from_them():
    g = prepared_graph("""g (float[N] x, int64 n, bool c) => (float y, float z)
        <float e = {1.0}, int64 two = {2}> {
        y, z = Loop(n, c, x) <body = b (int64 i, bool k, float[N] v) => (bool q, float w, float o) {
            q = Identity(k)  d = Shape(v)  s = Mul(d, two)  o = Expand(e, s)
            w = Concat<axis = 0>(v, o) }> }""")
    (loop,) = g
    body = loop.attributes["body"].as_graph()
    values = (*body.inputs, *body.outputs, *loop.outputs)
    assert not any(isinstance(d, str) and "N" in d for v in values for d in dims(v) or ())


# -- what is claimed, against what is there -----------------------------------------------------


def symbols_or_rank(i: int, row: Row) -> str:
    """Let lengths of every second row be unknown."""
    return ("symbols", "rank")[i % 2]


PROVEN = re.compile("Scatter|MaxPool|MaxUnpool|Sequence|Unique|TopK")  # by their indices


def packs_of_rows(rows: list[Row]) -> list[RowPack]:
    return row_packs(symbols_or_rank, [row for row in rows if kind_of(row).shapes])


def assert_stated_shapes(pack: RowPack, gradient: bool) -> None:
    def check(parts):
        made = Pack(parts, "float32")
        made.check_shapes(made.primal, gradient)
        return []

    assert failures(pack.parts(), check) == []


@pytest.mark.parametrize("pack", packs_of_rows(ROWS), ids=lambda pack: pack.id)
def test_stated_shapes_of_rows_are_those_at_run_time(pack):
    """Their gradients: `tests/operators/test_row_packs.py`."""
    assert_stated_shapes(pack, gradient=False)


ROWS_OF_GRADIENTS = [*first_rows(), *(row for row in ROWS if PROVEN.match(row.id))]


@pytest.mark.parametrize("pack", packs_of_rows(ROWS_OF_GRADIENTS), ids=lambda pack: pack.id)
def test_stated_shapes_of_gradients_are_those_at_run_time(pack):
    assert_stated_shapes(pack, gradient=True)


UNKNOWN_LENGTHS = {  # how many results have one: caches that grow, and what data or no rule state
    "GroupQueryAttention": 12, "MultiHeadAttention": 9, "Attention": 3, "LayerNormalization": 2,
    "DecoderMaskedMultiHeadAttention": 2, "Pad": 1, "ExpandDims": 1,
    "ConvTransposeWithDynamicPads": 1,
}  # fmt: skip


@pytest.mark.parametrize("known", ["symbols", "lengths"])
def test_stated_shapes_of_kernels_of_onnxruntime_are_those_at_run_time(known):
    compared, unknown = 0, Counter()
    for case in CASES:
        model = ir.from_proto(kernel_model(case, known))
        infer(model)
        if case.formula is None:
            values = all_values(kernel_model(case), case.feed)
        else:  # there is no kernel
            made = case.formula(*case.feed.values())
            made = made if isinstance(made, tuple) else (made,)
            values = dict(zip(filter(None, case.outputs), made, strict=True))
        claims, shapes = claims_and_shapes(ir.to_proto(model), values, case.feed)
        assert_one_length_per_symbol(claims, shapes)
        compared += len(claims.keys() & values.keys())
        unknown[case.id.split()[0]] += sum(lengths(claims.get(y)) is None for y in values)
    assert compared > 200
    if known == "lengths":
        assert +unknown == UNKNOWN_LENGTHS


LARGE = "l = Constant<value_ints=[{}]>()  e = Constant<value_float=1.0>()  c = Expand(e, l)"


def test_a_large_constant_that_nodes_compute_is_refused():
    text = f"g (float[2] x) => (float[n] y) {{ {LARGE.format(2**40)}  y = Sub(c, x) }}"
    with pytest.raises(ModelError, match=naming("Expand", "'c'", "constant_elements")):
        prepare(parse_model(text))
    prepare(parse_model(text.replace(str(2**40), "2")))


def filled_rows() -> list:
    return [
        pytest.param(row, known, id=f"{row.id}-{known}")
        for row in ROWS
        if kind_of(row).shapes
        for known in ("symbols", "rank")
    ]


@pytest.mark.sweep
@pytest.mark.parametrize(("row", "known"), filled_rows())
def test_stated_shapes_are_those_at_run_time(row, known):
    part = Part(row.id, row_model(row, known), row_feed(row), tuple(row.shapes))
    made = Pack([part], "float32")
    try:
        made.check_shapes(made.primal)
    except NoGradientRule:
        assert row.needs


def test_one_walk_infers_a_model(monkeypatch):
    """It does not begin again for lowerings, a function body, a stated shape, or sizes."""
    made = parse_model(
        """f (float[N,4,8,8] x, float[4] s) => (float[N,4,8,8] y) {
            a = com.microsoft.QuickGelu(x)  g = GroupNormalization<num_groups=2>(a, s, s)
            n = Shape(g)  r = Reshape(g, n)  c = Celu(r)  w = Swish(c)  y = Relu(w) }""",
        opset=24,
    )
    walks, inferred = [], Counter()
    start, anew = Walk.__init__, Walk.infer_anew

    def counted_start(walk, *given):
        walks.append(walk)
        start(walk, *given)

    def counted(walk, node):
        inferred[node] += 1
        anew(walk, node)

    monkeypatch.setattr(Walk, "__init__", counted_start)
    monkeypatch.setattr(Walk, "infer_anew", counted)
    prepared = prepare(made).graph
    assert len(walks) == 1
    assert len(inferred) > 10
    assert sum(inferred.values()) <= 2 * len(inferred)
    assert all(dims(y) == ("N", 4, 8, 8) for y in prepared.outputs)


def test_the_stated_shape_of_a_constant_is_not_believed():
    """As onnxruntime-genai's builder writes its constants: vectors that it states to be scalars."""
    made = parse_model("""f (float[N,4] x) => (float[A,B,C] y) {
            two = Constant<value = int64[1] {2}>()
            n = Shape<end = 1>(x)  l = Concat<axis = 0>(n, two, two)  y = Reshape(x, l) }""")
    made.graph.value_info.append(
        onnx.helper.make_tensor_value_info("two", onnx.TensorProto.INT64, [])
    )
    assert dims(prepare(made).graph.outputs[0]) == ("N", 2, 2)


@pytest.mark.parametrize(
    ("nodes", "named"),
    [
        ("y = ReduceMean(x)", "'x'"),
        ("m = ReduceMean(z)  s = Concat(n, n)  y = Expand(m, s)", "'y'"),
    ],
)
def test_more_elements_than_64_bits_count(nodes, named):
    """Sizes are computed in int64, also by the runtime."""
    text = f"""f (float[8589934592, 8589934592] x, float[2] z) => (float[K, L] y)
        <int64[1] n = {{8589934592}}> {{ {nodes.replace("Concat", "Concat<axis = 0>")} }}"""
    if "(x)" not in nodes:
        text = text.replace("float[8589934592, 8589934592] x, ", "")
    with pytest.raises(ModelError, match=naming(named, "(8589934592, 8589934592)")):
        prepare(parse_model(text))
