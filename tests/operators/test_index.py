"""Operators at indices: at kinks as PyTorch, in old opsets, and where many meet at one place."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgrad import DerivativeOptions, check_gradient, onnx_derivative
from tests.support.cases import row_model, run_in_dtype, typed
from tests.support.models import parse_model
from tests.support.table import ROWS

OPTIONS = DerivativeOptions.KeepOutputs | DerivativeOptions.FillGrad


def gradients_of_node(
    node: str, arrays: dict[str, np.ndarray], opset: int = 20
) -> list[np.ndarray]:
    """Return the gradient by each float input of `y = node`, for ones arriving."""
    kinds = {"f": "float", "i": "int64", "b": "bool"}
    given = ", ".join(f"{typed(kinds[a.dtype.kind], a.shape)} {n}" for n, a in arrays.items())
    text = f"g ({given}) => (float y) {{ {node} }}"
    made = parse_model(text, opset=opset, output_shapes=False)
    return run_in_dtype(onnx_derivative(made, options=OPTIONS), arrays)[:-1]


# on the places 0, 1, 2 come: x and two u alike; u below x; one u above it, twice
TIED = {
    "x": np.array([2.0, 3.0, 1.0, 0.0]),
    "i": np.array([0, 0, 1, 2, 2, 2]),
    "u": np.array([2.0, 2.0, 1.0, 5.0, 5.0, 4.0]),
}
ZEROS = {  # on a place: no zero, one, two, and x itself
    "x": np.array([2.0, 3.0, 4.0, 0.0]),
    "i": np.array([0, 0, 1, 1, 2, 2, 2, 3, 3]),
    "u": np.array([2.0, 0.5, 0.0, 5.0, 0.0, 0.0, 4.0, 2.0, 3.0]),
}


@pytest.mark.parametrize("node", ["ScatterElements", "ScatterND"])
@pytest.mark.parametrize(
    ("reduction", "torchs", "arrays"),
    [
        ("max", "amax", TIED),
        ("min", "amin", TIED),
        ("min", "amin", {**TIED, "x": -TIED["x"], "u": -TIED["u"]}),
        ("max", "amax", ZEROS),
        ("mul", "prod", ZEROS),
        ("mul", "prod", TIED),
        ("add", "sum", TIED),
    ],
)
def test_reductions_are_those_of_torch(node, reduction, torchs, arrays):
    torch = pytest.importorskip("torch")
    x, u = (torch.tensor(arrays[n], requires_grad=True) for n in "xu")
    x.scatter_reduce(0, torch.tensor(arrays["i"]), u, torchs).sum().backward()
    i = arrays["i"][:, None] if node == "ScatterND" else arrays["i"]
    found = gradients_of_node(f'y = {node}<reduction="{reduction}">(x, i, u)', {**arrays, "i": i})
    np.testing.assert_allclose(found[0], x.grad.numpy(), rtol=1e-6)
    np.testing.assert_allclose(found[1], u.grad.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("node", "x", "expected"),
    [
        ("k = Constant<value_ints=[2]>()  y, i = TopK(x, k)", [1, 3, 3, 3], [0, 1, 1, 0]),
        ("y = Unique(x)", [3, 1, 3, 1], [1, 1, 0, 0]),
        ("y = Unique<axis=1>(x)", [[3, 1, 3], [2, 1, 2]], [[1, 1, 0], [1, 1, 0]]),
        ("y = Unique<axis=0, sorted=0>(x)", [[3, 1], [3, 1]], [[1, 1], [0, 0]]),
    ],
)
def test_of_equal_ones_the_first_gets_the_gradient(node, x, expected):
    np.testing.assert_array_equal(gradients_of_node(node, {"x": np.array(x, float)})[0], expected)


def test_onehot_adds_up_what_is_hot_and_what_is_not():
    weighted = "o = OneHot<axis=0>(i, d, v)  y = Mul(o, w)"
    i, w = np.array([2, -1, 7, 0, -4]), np.arange(15.0).reshape(3, 5)
    arrays = {"i": i, "d": np.array(3), "v": np.array([0.5, 2.0]), "w": w}
    dv, _ = gradients_of_node(weighted, arrays)
    hot = w[2, 0] + w[2, 1] + w[0, 3]  # 7 and -4 are out of range
    np.testing.assert_allclose(dv, [w.sum() - hot, hot])


def test_places_read_often_get_all_of_their_gradient():
    i = np.random.default_rng(0).integers(-10, 10, (100_000, 1))
    x = np.zeros((10, 1))
    for node in ("GatherElements(x, i)", "GatherND(x, i)"):
        (dx,) = gradients_of_node(f"y = {node}", {"x": x, "i": i})
        np.testing.assert_array_equal(dx.ravel(), np.bincount(i.ravel() % 10))


def test_rows_of_a_table_are_added_in_its_own_shape():
    """A gradient that is reshaped at the end is copied, all of the table."""
    i = np.array([[2, -1, 2], [0, 2, -5]])
    arrays = {"x": np.zeros((5, 3, 2)), "i": i}
    (dx,) = gradients_of_node("y = Gather(x, i)", arrays)
    np.testing.assert_array_equal(dx[:, 0, 0], np.bincount(i.ravel() % 5, minlength=5))
    text = """<ir_version: 9, opset_import: ["": 20]>
        g (float[5, 3, 2] x, int64[2, N] i) => (float[2, N, 3, 2] y) { y = Gather(x, i) }"""
    last = onnx_derivative(onnx.parser.parse_model(text)).graph.node[-1]
    assert last.op_type == "ScatterElements"


@pytest.mark.parametrize("node", ["ScatterElements", "ScatterND"])
def test_only_the_last_write_to_a_place_has_a_gradient(node):
    rng, x, u = np.random.default_rng(0), (500, 3), (4000, 3)
    i = rng.integers(-x[0], x[0], u if node == "ScatterElements" else (u[0], 1))
    arrays = {"x": np.zeros(x), "i": i, "u": rng.standard_normal(u), "w": rng.standard_normal(x)}
    dx, du, _ = gradients_of_node(f"s = {node}(x, i, u)  y = Mul(s, w)", arrays)
    columns = np.broadcast_to(np.arange(x[1]), u)
    rows = np.broadcast_to(i % x[0], u)
    last = np.full(x, -1)
    np.maximum.at(last, (rows, columns), np.arange(u[0])[:, None])
    holds = last[rows, columns] == np.arange(u[0])[:, None]
    assert 0 < holds.sum() < holds.size
    np.testing.assert_allclose(du, np.where(holds, arrays["w"][rows, columns], 0), rtol=1e-6)
    np.testing.assert_allclose(dx, np.where(last < 0, arrays["w"], 0), rtol=1e-6)


@pytest.mark.parametrize(
    "body",
    [
        "k = Constant<value_ints=[2]>()  w, i = TopK<axis=0>(x, k)  "
        "y = ScatterElements<axis=0>(x, i, w)",
        "i = ArgMax<axis=1>(x)  w = ReduceSum(x, axes)  y = ScatterElements<axis=1>(x, i, w)",
        # as exporters write a mask
        "b = Cast<to=9>(x)  n = NonZero(b)  i = Transpose(n)  w = GatherND(x, i)  "
        "y = ScatterND(x, i, w)",
        # x[torch.arange(n), labels] = u
        "s = Shape<start=0, end=1>(x)  e = Squeeze(s)  r = Range(zero, e, one)  a = Expand(r, s)  "
        "c = Constant<value_ints=[-1]>()  k = Unsqueeze(a, c)  t = Unsqueeze(label, c)  "
        "i = Concat<axis=-1>(k, t)  y = ScatterND(x, i, v)",
    ],
)
def test_indices_that_cannot_repeat_cost_nothing(body):
    text = f"""<ir_version: 9, opset_import: ["": 20]>
        g (float[N, 3] x, int64[N] label, float[N] v) => (float[N, 3] y)
        <int64 zero = {{0}}, int64 one = {{1}}, int64[1] axes = {{1}}> {{ {body} }}"""
    nodes = onnx_derivative(onnx.parser.parse_model(text)).graph.node
    assert not [n for n in nodes if n.op_type in ("Equal", "Where")]


@pytest.mark.parametrize(
    "indices",
    [
        "f = Range(zero, most, half)  j = Cast<to=7>(f)",
        "f = Constant<value_floats=[0.2, 0.7, 1.2]>()  j = Cast<to=7>(f)",
        "k = Range(first, past, by)  s = Cast<to=2>(k)  j = Cast<to=7>(s)",
    ],
)
def test_distinct_numbers_that_are_one_index_after_a_cast(indices):
    text = f"""<ir_version: 9, opset_import: ["": 20]> g (float[4] x, float[3] u) => (float[4] y)
        <float zero = {{0}}, float most = {{1.5}}, float half = {{0.5}}, int64 first = {{1}},
         int64 past = {{514}}, int64 by = {{256}}, int64[2] column = {{3, 1}}> {{
            {indices}  i = Reshape(j, column)  y = ScatterND(x, i, u) }}"""
    report = check_gradient(
        onnx.parser.parse_model(text), feed={"x": X[0], "u": X[1, :3]}, weights=[]
    )
    assert report.ok, str(report)


def test_the_last_write_holds_in_every_iteration():
    text = """<ir_version: 9, opset_import: ["": 20]>
        g (float[4] x, int64[3, 3] i, float[3, 3] u) => (float[4] y, float[3, 4] all) {
            y, all = Scan<num_scan_inputs=2, body = step (s, j, v) => (t, q) {
                t = ScatterElements(s, j, v)  q = Mul(t, t)
            }>(x, i, u)
        }"""
    feed = {"x": X[0], "i": np.array([[0, 1, -4], [2, 2, 2], [3, 0, 1]]), "u": X[:3, :3]}
    report = check_gradient(onnx.parser.parse_model(text), feed=feed, order=2)
    assert report.ok, str(report)


def test_scatternd_is_written_without_reduction_only():
    """onnxruntime's adds from several threads, without a lock."""
    written = 0
    for row in ROWS:
        if "ScatterND" in row.body or "GatherND" in row.body:
            made = onnx_derivative(row_model(row), weights=[])
            nodes = [n for n in made.graph.node if n.op_type == "ScatterND"]
            own = [a for n in nodes for a in n.attribute if a.s != b"none"]
            assert not own, row.id
            written += len(nodes)
    assert written


X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
OLD = [
    (9, "y = Scatter<axis=1>(x, i, u)", {"i": np.array([[0, 3], [1, 2]]), "u": X[:2, :2]}),
    (10, "y = Scatter<axis=-2>(x, i, u)", {"i": np.array([[0, -1], [1, 0]]), "u": X[:2, :2]}),
    (9, "y, j = TopK<axis=0, k=2>(x)", {}),
    (10, "y, j = TopK(x, k)", {"k": np.array([3])}),
    (9, "y = Slice<axes=[1], starts=[-3], ends=[3]>(x)", {}),
    (9, 'y = Pad<mode="reflect", pads=[1, 0, 1, 2]>(x)', {}),
    (9, "y = Pad<value=2.0, pads=[1, 0, -1, 2]>(x)", {}),
    (16, 'y = ScatterND<reduction="mul">(x, i, u)', {"i": np.array([[1], [1]]), "u": X[:2]}),
]


@pytest.mark.parametrize(("opset", "body", "others"), OLD, ids=lambda v: str(v)[:30])
def test_old_forms_are_raised(opset, body, others):
    arrays = {"x": X, **others}
    given = ", ".join(
        f"{typed('float' if a.dtype.kind == 'f' else 'int64', a.shape)} {n}"
        for n, a in arrays.items()
    )
    text = f'<ir_version: 4, opset_import: ["": {opset}]> g ({given}) => (float[a, b] y) {{{body}}}'
    report = check_gradient(onnx.parser.parse_model(text), feed=arrays)
    assert report.ok, str(report)
