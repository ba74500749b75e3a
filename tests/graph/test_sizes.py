"""Sizes that exporters compute at run time, and gradients of slices that tile a tensor."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest

from onnxgrad import DerivativeOptions, onnx_derivative
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.model.convert import to_proto
from onnxgrad.operators.shapes import dims
from tests.support.models import operator_names, parse_model
from tests.support.running import run

OPTIONS = DerivativeOptions.KeepOutputs | DerivativeOptions.FillGrad


def sized_model(inputs: str, body: str, outputs: str = "float[?] y") -> onnx.ModelProto:
    return parse_model(f"g ({inputs}) => ({outputs}) {{ {body} }}", output_shapes=False)


def ones_gradient(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx_derivative(model, options=OPTIONS)


HEADS = """
    shape = Shape(x)  zero = Constant<value_int=0>()  axes = Constant<value_ints=[0]>()
    rows = Gather(shape, zero)  last = Shape<start=-1>(x)  eight = Constant<value_ints=[8]>()
    width = Div(last, eight)  row = Unsqueeze(rows, axes)  length = Constant<value_ints=[5]>()
"""


@pytest.mark.parametrize("rows", [1, 3])
def test_a_view_becomes_a_constant_shape(rows):
    body = f"{HEADS} s = Concat<axis=0>(row, length, eight, width)  y = Reshape(x, s)"
    model = sized_model("float[N, 5, 32] x", body)
    derivative = ones_gradient(model)
    assert not {"Concat", "Gather", "Div"} & set(operator_names(derivative))
    x = np.random.default_rng(0).standard_normal((rows, 5, 32)).astype(np.float32)
    dx, y = run(derivative, x=x)
    np.testing.assert_array_equal(y, x.reshape(rows, 5, 8, 4))
    np.testing.assert_array_equal(dx, np.ones_like(x))


def test_symbols_are_multiplied_and_divided():
    body = f"""{HEADS} h = Mul(row, eight)  s = Concat<axis=0>(length, h, width)
        t = Transpose<perm=[1, 0, 2]>(x)  u = Reshape(t, s)  v = Transpose<perm=[1, 0, 2]>(u)
        back = Concat<axis=0>(row, eight, length, width)  y = Reshape(v, back)"""
    model = sized_model("float[N, 5, 32] x", body)
    prepared = prepare(model)
    assert dims(prepared.graph.outputs[0]) == ("N", 8, 5, 4)
    x = np.random.default_rng(0).standard_normal((2, 5, 32)).astype(np.float32)
    derivative = ones_gradient(model)
    assert not {"Concat", "Mul"} & set(operator_names(derivative))
    expected = x.transpose(1, 0, 2).reshape(5, 16, 4).transpose(1, 0, 2).reshape(2, 8, 5, 4)
    np.testing.assert_array_equal(run(derivative, x=x)[1], expected)


@pytest.mark.parametrize(
    ("inputs", "body", "shape"),
    [
        # lengths that are compared at run time
        ("float[N, 6] x, float[M, 2] z", "m = Shape<end=1>(z)  s = Concat<axis=0>(m, six)", None),
        # the elements of an input
        ("float[N, 6] x, int64[2] s", "", None),
        # two lengths that are copied
        ("float[N, M] x", "n = Shape(x)  s = Concat<axis=0>(n, one)", [0, 0, 1]),
    ],
)
def test_only_what_is_proven_becomes_a_constant(inputs, body, shape):
    constants = "six = Constant<value_ints=[6]>()  one = Constant<value_ints=[1]>()"
    model = sized_model(inputs, f"{constants} {body} y = Reshape(x, s)")
    (reshape,) = [n for n in prepare(model).graph if n.op_type == "Reshape"]
    written = reshape.inputs[1].const_value
    assert (None if written is None else written.numpy().tolist()) == shape


def test_widths_of_a_pad_that_are_listed_from_the_last_axis():
    """PyTorch's exporter writes pairs for the last axis first, and four nodes that turn them."""
    body = """given = Constant<value_ints=[2, 0, 0, 1]>()  four = Constant<value_ints=[4]>()
        zeros = ConstantOfShape<value=int64[1] {0}>(none)  all = Concat<axis=0>(given, zeros)
        pairs = Constant<value_ints=[-1, 2]>()  p = Reshape(all, pairs)
        last = Constant<value_ints=[-1]>()  first = Constant<value_ints=[0]>()
        low = Constant<value_ints=[-9223372036854775807]>()  r = Slice(p, last, low, first, last)
        c = Slice(r, first, three, first)
        t = Transpose<perm=[1, 0]>(c)  widths = Reshape(t, last)  y = Pad(x, widths)"""
    body = "none = Constant<value_ints=[2]>()  three = Constant<value_ints=[3]>() " + body
    model = sized_model("float[N, 4, 6] x", body)
    [pad] = [n for n in prepare(model).graph if n.op_type == "Pad"]
    assert dims(pad.outputs[0]) == ("N", 5, 8)
    x = np.random.default_rng(0).standard_normal((2, 4, 6)).astype(np.float32)
    np.testing.assert_array_equal(
        run(ones_gradient(model), x=x)[1], np.pad(x, [(0, 0), (0, 1), (2, 0)])
    )


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ("c = Concat<axis=1>(a, b)", [[1, 2, 5], [3, 4, 6]]),
        ("c = Slice(a, one, two, one)", [[2], [4]]),
        ("c = Slice(a, last, low, zero, last)", [[3, 4], [1, 2]]),
        ("c = Transpose(a)", [[1, 3], [2, 4]]),
        ("c = Gather<axis=1>(a, one)", [[2], [4]]),
        ("c = ReduceProd(a, one)", [[2], [12]]),
    ],
)
def test_integers_of_a_matrix(node, expected):
    """What is folded is what onnxruntime computes, along any axis."""
    model = parse_model(
        f"""g (float[N, k] x) => (int64[m, n] d, float[N, k] y) {{
            {node} d = Identity(c) y = Neg(x) }}""",
        a=np.array([[1, 2], [3, 4]]), b=np.array([[5], [6]]), zero=np.array([0]),
        one=np.array([1]), two=np.array([2]), last=np.array([-1]), low=np.array([-(2**62)]),
    )  # fmt: skip
    prepared = to_proto(prepare(model))
    np.testing.assert_array_equal(run(prepared, x=np.ones((1, 1), np.float32))[0], expected)


def test_arithmetic_beyond_int64_is_left_to_onnxruntime():
    big = "big = Constant<value_ints=[9223372036854775807]>()  n = Shape<start=1>(x)"
    model = sized_model(
        "float[N, 6] x", f"{big} e = Add(n, big)  w = Add(e, n)  y = Expand(x, n)", "w"
    )
    model.graph.output[0].name = "w"
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    prepare(model)


def test_numbers_that_do_not_fit_into_int32_are_left_to_onnxruntime():
    body = """big = Constant<value_ints=[4294967302]>()  b = Cast<to=6>(big)  c = Cast<to=7>(b)
        one = Constant<value_ints=[-1]>()  s = Concat<axis=0>(one, c)  y = Reshape(x, s)"""
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    np.testing.assert_array_equal(run(ones_gradient(sized_model("float[N, 6] x", body)), x=x)[1], x)


def test_a_causal_mask_of_static_length_has_a_constant_shape():
    body = """n = Shape<start=1, end=2>(x)  s = Concat<axis=0>(n, n)
        ones = ConstantOfShape<value=float[1] {1.0}>(s)  mask = Trilu<upper=0>(ones)
        y = MatMul(mask, x)"""
    assert not {"Concat"} & set(
        operator_names(ones_gradient(sized_model("float[N, 4, 2] x", body)))
    )


PARTS = {
    "slices": """a0 = Constant<value_ints=[0]>()  a1 = Constant<value_ints=[2]>()
        a2 = Constant<value_ints=[6]>()  last = Constant<value_ints=[-1]>()
        p = Slice(x, a0, a1, last)  q = Slice(x, a1, a2, last)""",
    "slices inside": """a0 = Constant<value_ints=[1]>()  a1 = Constant<value_ints=[3]>()
        a2 = Constant<value_ints=[5]>()  last = Constant<value_ints=[-1]>()
        p = Slice(x, a0, a1, last)  q = Slice(x, a1, a2, last)""",
    "a gap": """a0 = Constant<value_ints=[0]>()  a1 = Constant<value_ints=[2]>()
        a2 = Constant<value_ints=[3]>()  a3 = Constant<value_ints=[6]>()
        last = Constant<value_ints=[-1]>()
        p = Slice(x, a0, a1, last)  q = Slice(x, a2, a3, last)""",
    "an overlap": """a0 = Constant<value_ints=[0]>()  a1 = Constant<value_ints=[2]>()
        a2 = Constant<value_ints=[3]>()  a3 = Constant<value_ints=[6]>()
        last = Constant<value_ints=[-1]>()
        p = Slice(x, a0, a2, last)  q = Slice(x, a1, a3, last)""",
    "two axes": """a0 = Constant<value_ints=[0]>()  a1 = Constant<value_ints=[1]>()
        a2 = Constant<value_ints=[6]>()  last = Constant<value_ints=[-1]>()
        first = Constant<value_ints=[0]>()
        p = Slice(x, a0, a1, last)  q = Slice(x, a1, a2, first)""",
    "indices": """i = Constant<value_int=0>()  j = Constant<value_int=-5>()
        p = Gather<axis=-1>(x, i)  q = Gather<axis=-1>(x, j)""",
    "twice the same": """i = Constant<value_int=3>()
        p = Gather<axis=-1>(x, i)  z = Neg(x)  q = Gather<axis=-1>(x, i)""",
    "ranges": """i = Constant<value_ints=[0, 1, 2]>()  j = Constant<value_ints=[-3, -2, -1]>()
        p = Gather<axis=-1>(x, i)  q = Gather<axis=-1>(x, j)""",
    "a range across zero": """i = Constant<value_ints=[-1, 0, 1]>()
        j = Constant<value_ints=[3, 4]>()
        p = Gather<axis=-1>(x, i)  q = Gather<axis=-1>(x, j)""",
}


@pytest.mark.parametrize("first", ["4", "N"])
@pytest.mark.parametrize("parts", PARTS)
def test_gradients_of_parts(parts, first):
    total = """p2 = Mul(p, p)  q3 = Mul(q, q)  q4 = Mul(q3, q)
        u = ReduceSum<keepdims=0>(p2)  v = ReduceSum<keepdims=0>(q4)  y = Add(u, v)"""
    model = sized_model(f"float[{first}, 6] x", PARTS[parts] + total)
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    slices = {
        "slices": (np.s_[:, :2], np.s_[:, 2:6]),
        "slices inside": (np.s_[:, 1:3], np.s_[:, 3:5]),
        "a gap": (np.s_[:, :2], np.s_[:, 3:6]),
        "an overlap": (np.s_[:, :3], np.s_[:, 2:6]),
        "two axes": (np.s_[:, :1], np.s_[1:, :]),
        "indices": (np.s_[:, 0], np.s_[:, 1]),
        "twice the same": (np.s_[:, 3], np.s_[:, 3]),
        "ranges": (np.s_[:, :3], np.s_[:, 3:]),
        "a range across zero": (np.s_[:, [-1, 0, 1]], np.s_[:, 3:5]),
    }
    expected, (p, q) = np.zeros_like(x), slices[parts]
    expected[p] += 2 * x[p]
    expected[q] += 3 * x[q] ** 2
    derivative = ones_gradient(model)
    np.testing.assert_allclose(run(derivative, x=x)[0], expected, rtol=1e-5)
    if parts in ("slices", "ranges", "indices"):
        used = Counter(operator_names(derivative))
        assert used["Concat"] == 1
        assert not used["ScatterElements"]
        assert used["Pad"] == (parts == "indices")


@pytest.mark.parametrize("axes", ["", ", none"])
@pytest.mark.parametrize("noop", [0, 1])
def test_a_product_over_no_axes(axes, noop):
    body = f"""none = Constant<value_ints: ints = []>()  s = Shape(x)
        p = ReduceProd<noop_with_empty_axes={noop}, keepdims=1>(s{axes})  y = Reshape(x, p)"""
    model = sized_model("float[2, 3] x", body)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    dx, y = run(ones_gradient(model), x=x)
    np.testing.assert_array_equal(y, run(model, x=x)[0])
    np.testing.assert_array_equal(dx, np.ones_like(x))


@pytest.mark.parametrize(
    ("node", "length"),
    [
        ("t = Mul(n, two)", "2*N"), ("t = Mul(two, n)", "2*N"), ("t = Mul(n, one)", "N"),
        ("u = Mul(two, n)  t = Mul(u, three)", "6*N"), ("t = Mul(two, three)", 6),
        ("t = Mul(n, m)", None), ("t = Mul(n, zero)", None), ("t = Mul(n, minus)", None),
        ("t = Mul(n, given)", None), ("t = Mul(given, two)", None),
    ],
)  # fmt: skip
def test_products_of_lengths(node, length):
    """A symbol is multiplied by numbers from 1 on: other products are not known."""
    numbers = {"zero": 0, "one": 1, "two": 2, "three": 3, "minus": -1}
    text = f"""g (float[N, M] x, int64[1] given) => (float[?] y) {{ n = Shape<end=1>(x)
        m = Shape<start=1>(x)  {node}  y = ConstantOfShape(t) }}"""
    model = parse_model(text, output_shapes=False, **{k: np.int64([v]) for k, v in numbers.items()})
    [found] = dims(prepare(model).graph.outputs[0])
    assert found == length or (length is None and str(found).startswith("unk"))
