"""Proofs about rows, against the numbers: parts of a batch must add up to the whole."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad.autodiff.row_proofs import (
    UnprovenRows,
    require_independent_rows,
    require_sums_over_rows,
)
from tests.support.models import parse_model
from tests.support.running import session_of

RNG = np.random.default_rng(0)
ARRAYS = {
    "x": RNG.normal(size=(6, 4)).astype("f"),
    "images": RNG.normal(size=(6, 2, 4, 4)).astype("f"),
    "steps": RNG.normal(size=(3, 6, 4)).astype("f"),
    "ids": RNG.integers(0, 5, (6, 3)),
}
AXES = {"x": 0, "images": 0, "steps": 1, "ids": 0}
MODEL = """f (float[N,4] x, float[N,2,4,4] images, float[3,N,4] steps, int64[N,3] ids) => (float s)
    <float[5,4] table = {{{table}}}, float[4,4] w = {{{w}}}, float[1,12,4] r = {{{r}}},
     float[1,12,3] h = {{{h}}}, float[4] v = {{0.5, -1.0, 2.0, 0.1}}, float two = {{2.0}},
     float[2,2,3,3] k = {{{k}}}, float[6,5] rows = {{{rows}}},
     int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] six = {{6}}, int64[1] last = {{-1}},
     int64[1] least = {{-100}},
     int64[3] heads = {{3, -1, 2}}, int64[2] flat = {{-1, 4}}, int64[2] pairs = {{-1, 2}},
     int64 first = {{0}}> {{
        {nodes} }}"""

SUMS = {
    "products": "a = MatMul(x, w)  b = Relu(a)  s = ReduceSum(b)",
    "gemm": "a = Gemm<transB = 1>(x, w, v)  b = Mul(a, a)  s = ReduceSum(b)",
    "turned": "a = Transpose(x)  b = Gemm<transA = 1>(a, w)  s = ReduceSumSquare(b)",
    "softmax": "a = LogSoftmax<axis = -1>(x)  b = ReduceSum(a, one)  s = ReduceSum(b)",
    "scaled": "a = ReduceSum(x)  b = Div(a, two)  c = Mul(two, b)  s = Neg(c)",
    "two": "a = ReduceSum(x)  b = ReduceSumSquare(x)  s = Sub(a, b)",
    "images": "a = Conv<pads = [1,1,1,1]>(images, k)  b = MaxPool<kernel_shape = [2,2]>(a)"
    "  c = Flatten(b)  s = ReduceSumSquare(c)",
    "words": "a = Gather(table, ids)  b = LayerNormalization<axis = -1>(a, v, v)"
    "  s = ReduceSumSquare(b)",
    "masked": "m = Greater(x, two)  a = Where(m, x, v)  b = Cast<to = 11>(a)"
    "  c = Cast<to = 1>(b)  s = ReduceSum(c)",
    "time first": "a = MatMul(steps, w)  b = Reshape(a, heads)  c = Transpose<perm = [1,0,2]>(b)"
    "  d = Softmax<axis = 1>(c)  s = ReduceSumSquare(d)",
    "time and rows in one axis": "a = Reshape(steps, flat)  b = Gemm(a, w)  c = Shape(steps)"
    "  d = Reshape(b, c)  e = Add(d, steps)  s = ReduceSumSquare(e)",
    "two elements a row": "a = Reshape(x, pairs)  b = Softmax<axis = 1>(a)  s = ReduceSumSquare(b)",
    "recurrent": "y, a = LSTM<hidden_size = 3>(steps, r, h)  b = Squeeze(a, zero)"
    "  s = ReduceSumSquare(b)",
    "expanded": "n = Shape<start = 0, end = 1>(ids)  c = Concat<axis = 0>(n, one)"
    "  a = Expand(two, c)  b = Mul(a, x)  s = ReduceSum(b)",
    "length of an axis": "n = Shape<start = 1>(x)  f = Cast<to = 1>(n)  a = Div(x, f)"
    "  b = ReduceSum(a)  s = Identity(b)",
    "largest of each row": "a = ArgMax<axis = 1>(x)  b = Cast<to = 1>(a)  s = ReduceSum(b)",
    "positions that nothing reads": "y, i = MaxPool<kernel_shape = [2,2]>(images)"
    "  s = ReduceSum(y)",
    "rows are counted": "n = Size(x)  s = Cast<to = 1>(n)",
}  # fmt: skip
MIXED = {
    "mean": "a = ReduceMean(x)  s = Identity(a)",
    "statistics": "m = ReduceMean(x, zero)  a = Sub(x, m)  s = ReduceSumSquare(a)",
    "softmax of rows": "a = Softmax<axis = 0>(x)  b = Mul(a, a)  s = ReduceSum(b)",
    "largest row": "a = ReduceMax(x, zero)  s = ReduceSum(a)",
    "cumulated": "a = CumSum(x, first)  s = ReduceSum(a)",
    "gram": "t = Transpose(x)  a = MatMul(x, t)  s = ReduceSumSquare(a)",
    "square of a sum": "a = ReduceSum(x)  s = Mul(a, a)",
    "exp of a sum": "a = ReduceSum(x)  s = Exp(a)",
    "a constant term": "a = ReduceSum(x)  s = Add(a, two)",
    "no rows": "s = ReduceSum(w)",
    "divided by rows": "a = ReduceSum(x)  n = Shape<start = 0, end = 1>(x)  f = Cast<to = 1>(n)"
    "  b = Div(a, f)  s = ReduceSum(b)",
    "divided by the size": "a = ReduceSum(x)  n = Size(x)  f = Cast<to = 1>(n)  s = Div(a, f)",
    "one row": "a = Gather(x, first)  s = ReduceSum(a)",
    "other rows": "a = Slice(x, one, six, zero)  s = ReduceSum(a)",
    "half of the rows": "a = Reshape(x, pairs)  n = Shape<start = 0, end = 1>(x)"
    "  b = Slice(a, zero, n, zero)  s = ReduceSum(b)",
    "reversed": "a = Slice(x, last, least, zero, last)  b = Mul(a, x)  s = ReduceSum(b)",
    "rows from the wrong axis": "a = Reshape(steps, flat)  b = Concat<axis = 1>(x, x, x)"
    "  c = Reshape(b, flat)  d = Mul(a, c)  s = ReduceSum(d)",
    "rows that meet rows of a table": "a = GatherElements<axis = 1>(rows, ids)"
    "  s = ReduceSumSquare(a)",
    "numbers of rows": "n = Shape<start = 0, end = 1>(x)  e = Squeeze(n)  o = Squeeze(one)"
    "  p = Range(first, e, o)  f = Cast<to = 1>(p)  g = Unsqueeze(f, one)  a = Mul(x, g)"
    "  s = ReduceSum(a)",
    "positions in the batch": "y, i = MaxPool<kernel_shape = [2,2]>(images)  f = Cast<to = 1>(i)"
    "  s = ReduceSum(f)",
    "any of the rows": "a = ReduceSum(ids)  b = Cast<to = 9>(a)  c = Cast<to = 1>(b)"
    "  d = ReduceSum(x)  s = Add(c, d)",
    "rounded": "a = ReduceSum(x)  b = Cast<to = 7>(a)  s = Cast<to = 1>(b)",
    "random": "q = RandomNormalLike(x)  a = Mul(q, x)  s = ReduceSum(a)",
    "random weights": "q = RandomNormal<shape = [4,4]>()  a = MatMul(x, q)  s = ReduceSum(a)",
}  # fmt: skip
ALSO_ADD_UP = ("random", "random weights")


APART = {
    "products": "a = MatMul(x, w)  s = Relu(a)",
    "two elements a row, and one again": "a = Reshape(x, pairs)  b = Softmax<axis = 1>(a)"
    "  s = Reshape(b, flat)",
    "log-probabilities beside a loss": "e = ArgMax<axis = 1, keepdims = 0>(x)"
    "  m, s = SoftmaxCrossEntropyLoss(x, e)",
    "time first, and rows first": "a = MatMul(steps, w)  s = Transpose<perm = [1,0,2]>(a)",
}
NOT_APART = {
    "two elements a row": "s = Reshape(x, pairs)",
    "rows after one another": "t = Transpose(x)  a = Reshape(t, last)  s = Identity(a)",
    "rows last": "s = Transpose(x)",
    "time first": "s = MatMul(steps, w)",
    "two outputs a row": "a = Concat<axis = 1>(x, x)  s = Reshape(a, flat)",
    "a sum": "s = ReduceSum(x, zero)",
    "a scalar": "s = ReduceSum(x)",
}


def numbers_as_text(n: int) -> str:
    return ", ".join(f"{v:.3f}" for v in RNG.normal(size=n))


def model_of_sum(nodes: str) -> onnx.ModelProto:
    sizes = {"table": 20, "w": 16, "r": 48, "h": 36, "k": 36, "rows": 30}
    constants = {name: numbers_as_text(n) for name, n in sizes.items()}
    return parse_model(MODEL.format(nodes=nodes, **constants), opset=20)


def prove_sums(proto: onnx.ModelProto) -> None:
    copy = ir.from_proto(proto)
    lengths = {name: array.shape for name, array in ARRAYS.items()}
    require_sums_over_rows(copy, AXES, lengths, list(copy.graph.outputs))


def totals_of_whole_and_parts(proto: onnx.ModelProto) -> tuple[float, float]:
    """Return the output for all rows, and its sum for two uneven parts."""
    session = session_of(proto)
    names = {x.name for x in session.get_inputs()}

    def output(rows: range) -> float:
        cut = {n: np.take(a, rows, AXES[n]) for n, a in ARRAYS.items() if n in names}
        return float(session.run(None, cut)[0].squeeze())

    return output(range(6)), output(range(2)) + output(range(2, 6))


@pytest.mark.parametrize("nodes", SUMS.values(), ids=SUMS)
def test_sums_are_proven(nodes):
    proto = model_of_sum(nodes)
    prove_sums(proto)
    whole, parts = totals_of_whole_and_parts(proto)
    assert parts == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("name", MIXED)
def test_other_values_are_refused(name):
    proto = model_of_sum(MIXED[name])
    with pytest.raises(UnprovenRows):
        prove_sums(proto)
    whole, parts = totals_of_whole_and_parts(proto)
    if name not in ALSO_ADD_UP:
        assert abs(parts - whole) > 1e-3, "the case does not show anything"


def prove_apart(nodes: str) -> onnx.ModelProto:
    proto = model_of_sum(nodes)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    require_independent_rows(
        ir.from_proto(proto), AXES, {n: array.shape for n, array in ARRAYS.items()}
    )
    return proto


@pytest.mark.parametrize("nodes", APART.values(), ids=APART)
def test_rows_that_are_apart(nodes):
    session = session_of(prove_apart(nodes))
    names = {x.name for x in session.get_inputs()}
    (whole,) = session.run(None, {n: a for n, a in ARRAYS.items() if n in names})
    for i in range(6):
        cut = {n: np.take(a, [i], AXES[n]) for n, a in ARRAYS.items() if n in names}
        np.testing.assert_allclose(session.run(None, cut)[0], whole[i : i + 1], rtol=1e-5)


@pytest.mark.parametrize("nodes", NOT_APART.values(), ids=NOT_APART)
def test_outputs_without_a_row_for_each(nodes):
    with pytest.raises(UnprovenRows):
        prove_apart(nodes)
