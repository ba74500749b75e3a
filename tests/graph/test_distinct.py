"""Indices that are proven distinct: what is proven holds, and nothing else is claimed."""

from __future__ import annotations

import pytest

from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.operators.rule_nodes import distinct_along, distinct_positions, distinct_rows
from tests.support.models import parse_model

RANGE = "z = Constant<value_int=0>()  o = Constant<value_int=1>()  r = Range(z, n, o)"
TOP = "l = Constant<value_ints=[2]>()  t, i = TopK<axis=1>(x, l)"


def indices_of(body: str, kind: str = "int64"):
    """Return the value i that a body computes from x, p, v and n, or its constant c."""
    inputs = "float[2, 3, 4] x, float[1, 1, 4, 4] p, int64[3] v, int64 n, int64[m] k"
    body = body if "i = " in body else f"{body}  i = GatherElements(v, c)"
    model = prepare(parse_model(f"g ({inputs}) => ({kind}[a] i) {{ {body} }}", output_shapes=False))
    i = model.graph.outputs[0]
    return i.producer().inputs[1] if i.producer().op_type == "GatherElements" else i


@pytest.mark.parametrize(
    ("body", "axis", "proven"),
    [
        (f"{RANGE}  i = Identity(r)", -1, True),
        (f"{RANGE}  m = Neg(r)  i = Identity(m)", -1, False),
        (RANGE.replace("value_int=1", "value_int=-1") + "  i = Identity(r)", -1, False),
        (RANGE.replace("value_int=0", "value_int=-2") + "  i = Identity(r)", -1, False),
        (f"{RANGE}  f = Cast<to=6>(r)  i = Cast<to=7>(f)", -1, True),
        (f"{RANGE}  f = Cast<to=3>(r)  i = Cast<to=7>(f)", -1, False),
        ("i = Identity(v)", -1, False),
        ("i = Reshape(v, k)", -1, False),  # of unknown rank
        (TOP, -2, True),
        (TOP, -1, False),
        ("c = Constant<value = int64[2,3] {0, 2, 1, 0, 2, 1}>()", -1, True),
        ("c = Constant<value = int64[2,3] {0, 2, 1, 0, 2, 1}>()", -2, False),
        ("c = Constant<value = int64[2,3] {0, 2, 1, 1, 2, 0}>()", -1, False),
        ("c = Constant<value = int64[3] {0, 2, 2}>()", -1, False),
        ("c = Constant<value = int64[3] {0, 2, -1}>()", -1, False),
        ("c = Constant<value = int64[1,2] {0, 0}>()", -2, True),
        (f"{RANGE}  s = Constant<value_ints=[0]>()  i = Unsqueeze(r, s)", -1, True),
        (f"{RANGE}  s = Constant<value_ints=[-1]>()  i = Unsqueeze(r, s)", -2, True),
        (f"{RANGE}  s = Constant<value_ints=[2, 1]>()  i = Expand(r, s)", -1, True),
        (f"{RANGE}  s = Constant<value_ints=[2, 1]>()  i = Expand(r, s)", -2, False),
        (f"{RANGE}  i = Add(r, r)", -1, False),
    ],
)
def test_distinct_along_an_axis(body, axis, proven):
    assert distinct_along(indices_of(body), axis) == proven


@pytest.mark.parametrize(
    ("body", "proven"),
    [
        ("z = NonZero(x)  i = Transpose(z)", True),
        ("z = NonZero(x)  i = Transpose<perm=[1, 0]>(z)", True),
        ("z = NonZero(x)  i = Transpose<perm=[0, 1]>(z)", False),
        ("z = NonZero(x)  i = Identity(z)", False),
        (f"{RANGE}  s = Constant<value_ints=[-1]>()  i = Unsqueeze(r, s)", True),
        (
            f"{RANGE}  s = Constant<value_ints=[-1]>()  u = Unsqueeze(r, s)  w = Mul(u, u)"
            "  i = Concat<axis=1>(u, w)",
            True,
        ),
        (
            f"{RANGE}  s = Constant<value_ints=[-1]>()  u = Unsqueeze(r, s)  w = Mul(u, u)"
            "  i = Concat<axis=0>(w, u)",
            False,
        ),
    ],
)
def test_distinct_rows(body, proven):
    assert distinct_rows(indices_of(body)) == proven


@pytest.mark.parametrize(
    ("attributes", "proven"),
    [
        ("kernel_shape=[2, 2], strides=[2, 2]", True),
        ("kernel_shape=[2, 1], strides=[2, 1]", True),
        ("kernel_shape=[2, 2], strides=[2, 1]", False),
        ("kernel_shape=[2, 2]", False),
        ("kernel_shape=[1, 1]", True),
        ("kernel_shape=[2, 2], strides=[2, 2], dilations=[2, 1]", False),
    ],
)
def test_distinct_positions_of_a_pool(attributes, proven):
    assert distinct_positions(indices_of(f"m, i = MaxPool<{attributes}>(p)")) == proven


def test_positions_of_nothing_else_are_distinct():
    assert not distinct_positions(indices_of(f"{RANGE}  i = Identity(r)"))
