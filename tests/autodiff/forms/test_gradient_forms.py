"""Each rewrite that runs after the sweep, before and after, where other nodes read inner values."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad import DerivativeOptions, check_gradient, hvp, onnx_derivative, vjp
from onnxgrad.autodiff.forms import finish
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.traversal import all_nodes
from onnxgrad.model.convert import to_proto
from onnxgrad.operators import operator_of
from tests.support.emitters import assert_ordered, emitter_of
from tests.support.models import parse_model
from tests.support.running import in_sweep, run_named

FLOAT = ir.DataType.FLOAT
READ = pytest.mark.parametrize("read", [False, True], ids=["read once", "read again"])
ROWS = pytest.mark.parametrize("rows", ["N", in_sweep(0), 1, in_sweep(3)], ids=str)


def value_of(name: str, *shape: int | str, dtype: ir.DataType = FLOAT) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def assert_finished(op: Emit, results: list[ir.Value], read: bool, feed: dict) -> list[str]:
    """Finish the graph, compare its numbers with those before; return the operators of the rest.

    With `read`, a further output reads every inner value.
    """
    inner = [node.outputs[0] for node in op.graph] if read else []
    op.give([*results, *(op.Neg(v) for v in inner if v.dtype != ir.DataType.BOOL)])
    model = ir.Model(op.graph, ir_version=9)
    before = run_named(to_proto(model), feed)
    finish(model)
    proto = to_proto(model)
    assert_ordered(op.graph)
    if all(y.shape is not None for y in op.graph.outputs):
        onnx.checker.check_model(proto)
    after = run_named(proto, feed)
    assert before.keys() == after.keys()
    for name, wanted in before.items():
        assert after[name].shape == wanted.shape
        np.testing.assert_allclose(after[name], wanted, rtol=1e-5, atol=1e-6, err_msg=name)
    return [node.op_type for node in op.graph]


def quarters(*shape: int, seed: int = 0) -> np.ndarray:
    """Return multiples of 1/4, many of them equal and some zero."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32) / 4


@READ
@ROWS
@pytest.mark.parametrize("swap", [False, True])
def test_scalars_are_multiplied_first(rows, swap, read):
    x, s, t = value_of("x", rows, 2), value_of("s"), value_of("t")
    op = emitter_of(x, s, t)
    with op:
        inner = op.Mul(s, x) if swap else op.Mul(x, s)
        y = op.Mul(t, inner) if swap else op.Mul(inner, t)
    feed = {"x": quarters(3 if rows == "N" else rows, 2), "s": np.float32(3), "t": np.float32(0.5)}
    kinds = assert_finished(op, [y], read, feed)
    if not read:
        assert kinds == ["Mul", "Mul"]
        assert tuple(next(iter(op.graph)).outputs[0].shape) == ()


@READ
@ROWS
def test_scalars_of_members(rows, read):
    x, s, t = value_of("x", 4, rows, 2), value_of("s"), value_of("t", 4, 1, 1)
    op = emitter_of(x, s, t)
    y = op.Mul(op.Mul(x, s), t)
    n = 3 if rows == "N" else rows
    feed = {"x": quarters(4, n, 2), "s": np.float32(3), "t": quarters(4, 1, 1, seed=1)}
    assert_finished(op, [y], read, feed)
    if not read:
        assert tuple(next(iter(op.graph)).outputs[0].shape) == (4, 1, 1)


@READ
@ROWS
def test_terms_of_a_sum_are_scaled(rows, read):
    x, z, s, r, t = (
        value_of("x", rows, 2),
        value_of("z", rows, 2),
        value_of("s"),
        value_of("r"),
        value_of("t"),
    )
    op = emitter_of(x, z, s, r, t)
    with op:
        y = (x * s + r * z) * t
    n = 3 if rows == "N" else rows
    feed = {"x": quarters(n, 2), "z": quarters(n, 2, seed=1)}
    feed |= {"s": np.float32(3), "r": np.float32(-2), "t": np.float32(0.5)}
    kinds = assert_finished(op, [y], read, feed)
    if not read:
        assert kinds.count("Mul") == 4
        assert kinds[-1] == "Add"


@READ
def test_a_product_by_an_inverse_is_a_quotient(read):
    x, d = value_of("x", "N", 2), value_of("d", "N", 1)
    op = emitter_of(x, d)
    with op:
        y = (1.0 / d) * x
    kinds = assert_finished(op, [y], read, {"x": quarters(3, 2), "d": np.float32([[1], [2], [3]])})
    assert kinds == (["Div", "Mul", "Neg", "Neg"] if read else ["Div"])


def test_a_quotient_of_a_product_by_one():
    """onnxruntime removes the product after it has fused 1 / d with what reads it, and fails."""
    model = parse_model(
        "f (float[N] x, float[N] z) => (float[N] y) <float one = {1}> "
        "{ t = Atan(x)  u = Mul(t, one)  y = Add(u, z) }"
    )
    options = DerivativeOptions.FillGrad | DerivativeOptions.KeepOutputs
    x = np.float32([1, 2, 3])
    found = run_named(onnx_derivative(model, [], ["x", "z"], options), x=x, z=x)
    np.testing.assert_allclose(found["x_grad"], 1 / (1 + x * x), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_scalars_whose_product_is_too_small(dtype):
    """In float16, 1e-4 * 1e-4 is 0: a gradient must not be."""
    kind = ir.DataType.from_numpy(np.dtype(dtype))
    x, s, t = (
        value_of("x", 2, dtype=kind),
        value_of("s", dtype=kind),
        value_of("t", dtype=kind),
    )
    op = emitter_of(x, s, t)
    y = op.Mul(op.Mul(x, s), t)
    op.give([y])
    model = ir.Model(op.graph, ir_version=9)
    finish(model)
    feed = {"x": np.full(2, 1e4, dtype), "s": dtype(1e-4), "t": dtype(1e-4)}
    [found] = run_named(to_proto(model), feed).values()
    np.testing.assert_allclose(found, np.full(2, 1e-4), rtol=2e-3)


def test_products_of_the_file_stay():
    """s t may overflow where x s t does not."""
    model = parse_model(
        """f (float[2] x, float s, float t) => (float[2] y) { u = Mul(x, s)  y = Mul(u, t) }"""
    )
    gradient = onnx_derivative(model, inputs=["x"])
    feed = {"x": np.full(2, 1e-30, np.float32), "s": np.float32(1e30), "t": np.float32(1e10)}
    kept = onnx_derivative(model, inputs=["x"], options=DerivativeOptions.KeepOutputs)
    y = run_named(kept, feed | {"y_grad": np.zeros(2, np.float32)})["y"]
    np.testing.assert_allclose(y, np.full(2, 1e10), rtol=1e-5)
    assert [node.op_type for node in gradient.graph.node].count("Mul") == 2


@READ
@ROWS
def test_doubled(rows, read):
    x, s = value_of("x", rows, 2), value_of("s")
    op = emitter_of(x, s)
    u = op.Mul(x, s)
    y = op.Add(u, u)
    feed = {"x": quarters(3 if rows == "N" else rows, 2), "s": np.float32(3)}
    assert "Add" not in assert_finished(op, [y], read, feed)


@READ
@ROWS
def test_products_broadcast_by_themselves(rows, read):
    x, z = value_of("x", 3, 1), value_of("z", rows, 3, 2)
    op = emitter_of(x, z)
    y = op.Mul(op.set_type_like(op.Expand(x, op.shape_of(z)), z), z)
    feed = {"x": quarters(3, 1), "z": quarters(3 if rows == "N" else rows, 3, 2)}
    kinds = assert_finished(op, [y], read, feed)
    assert read or kinds == ["Mul"]


def test_an_expand_that_gives_the_shape_stays():
    x, z = value_of("x", 3, 1), value_of("z", 2)
    op = emitter_of(x, z)
    assert "Expand" in assert_finished(
        op, [op.Mul(op.Expand(x, [4, 3, 2]), z)], False, {"x": quarters(3, 1), "z": quarters(2)}
    )


@READ
@pytest.mark.parametrize("swap", [False, True])
def test_rows_are_added_to_a_sum(swap, read):
    x, u = value_of("x", 9, 3), value_of("u", 4, 3)
    index = ir.Value(name="i", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([4, 3]))
    op = emitter_of(x, u, index)
    with op:
        zeros = op.set_type_like(op.Expand(np.float32(0), [9, 3]), x)
        rows = op.ScatterElements(zeros, index, u, axis=0, reduction="add")
        rows = op.set_type_like(rows, x)
        y = op.Add(rows, x) if swap else op.Add(x, rows)
    feed = {"x": quarters(9, 3), "u": quarters(4, 3, seed=1), "i": np.int64([[0] * 3, [8] * 3] * 2)}
    left = assert_finished(op, [y], read, feed)
    assert ("Add" in left) == read


@READ
@ROWS
@pytest.mark.parametrize("keepdims", [0, 1])
def test_sums_of_squares(rows, keepdims, read):
    x = value_of("x", rows, 2)
    op = emitter_of(x)
    y = op.ReduceSum(op.Mul(x, x), [0], keepdims=keepdims)
    kinds = assert_finished(op, [y], read, {"x": quarters(3 if rows == "N" else rows, 2)})
    assert "ReduceSumSquare" in kinds
    assert read or kinds == ["ReduceSumSquare"]


def test_a_sum_over_no_axes_squares_nothing():
    x, axes = value_of("x", 2, 3), value_of("axes", 0, dtype=ir.DataType.INT64)
    op = emitter_of(x, axes)
    y = op.ReduceSum(op.Mul(x, x), axes, noop_with_empty_axes=1)
    feed = {"x": quarters(2, 3), "axes": np.zeros(0, np.int64)}
    assert assert_finished(op, [y], False, feed) == ["Mul", "ReduceSum"]


@READ
def test_axes_that_are_not_kept(read):
    x = value_of("x", 2, 3)
    op = emitter_of(x)
    y = op.Reshape(op.ReduceSum(x, [0], keepdims=1), [3])
    kinds = assert_finished(op, [y], read, {"x": quarters(2, 3)})
    assert read or kinds == ["ReduceSum"]


def test_axes_that_were_never_reduced():
    """With noop_with_empty_axes, a ReduceSum without axes returns its operand."""
    x, axes = value_of("x", 1, 3), value_of("axes", 0, dtype=ir.DataType.INT64)
    op = emitter_of(x, axes)
    total = op.ReduceSum(x, axes, keepdims=1, noop_with_empty_axes=1)
    total.shape = ir.Shape([1, 3])
    feed = {"x": quarters(1, 3), "axes": np.zeros(0, np.int64)}
    assert_finished(op, [op.Reshape(total, [3])], False, feed)


@READ
@pytest.mark.parametrize("count", [2, 3, 9, in_sweep(70)])
@pytest.mark.parametrize("order", [1, -1])
def test_parts_of_one_tensor(count, order, read):
    parts = [value_of(f"p{i}", 2, i % 3) for i in range(count)]
    op, starts = emitter_of(*parts), np.cumsum([0, *(i % 3 for i in range(count))])
    total = int(starts[-1])
    padded = [
        op.Pad(p, [0, int(a), 0, total - int(b)])
        for p, a, b in zip(parts, starts, starts[1:], strict=False)
    ]
    feed = {p.name: quarters(2, i % 3, seed=i) for i, p in enumerate(parts)}
    assert_finished(op, [op.total(padded[::order])], read, feed)


@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("overlap", [False, True])
def test_parts_that_do_not_adjoin(gap, overlap):
    a, b, c = value_of("a", 2, 2), value_of("b", 2, 3), value_of("c", 2, 7)
    op = emitter_of(a, b, c)
    start = 1 if overlap else 2 + gap
    terms = [op.Pad(a, [0, 0, 0, 5]), op.Pad(b, [0, start, 0, 4 - start]), c]
    feed = {"a": quarters(2, 2), "b": quarters(2, 3, seed=1), "c": quarters(2, 7, seed=2)}
    kinds = assert_finished(op, [op.total(terms)], False, feed)
    assert ("Concat" in kinds) == (not overlap and not gap)


@READ
@ROWS
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("repeated", [False, True])
def test_labels(rows, axis, repeated, read):
    """The gradient of a LogSoftmax whose result is gathered by labels."""
    columns = 2 if repeated else 1
    x, i, u = (
        value_of("x", rows, 5),
        value_of("i", rows, columns, dtype=ir.DataType.INT64),
        value_of("u", rows, columns),
    )
    op = emitter_of(x, i, u)
    with op:
        y = op.LogSoftmax(x, axis=axis)
        zeros = op.set_type_like(op.Expand(np.float32(0), op.Shape(x)), x)
        g = op.ScatterElements(zeros, i, u, axis=axis, reduction="add")
        op.set_type_like(g, x)
        dx = g - op.Exp(y) * op.ReduceSum(g, [axis], keepdims=1)
    n = 3 if rows == "N" else rows
    index = np.array([[1, 1], [0, 4], [3, 3]])[:n, :columns]
    feed = {"x": quarters(n, 5), "i": index, "u": quarters(n, columns, seed=1) + 1}
    kinds = assert_finished(op, [dx], read, feed)
    assert "Sub" not in kinds


def test_labels_of_some_rows():
    """Rows without a label have no sum: their gradient stays as it is."""
    x, i, u = (
        value_of("x", 3, 5),
        value_of("i", 2, 1, dtype=ir.DataType.INT64),
        value_of("u", 2, 1),
    )
    op = emitter_of(x, i, u)
    with op:
        zeros = op.set_type_like(op.Expand(np.float32(0), op.Shape(x)), x)
        g = op.set_type_like(op.ScatterElements(zeros, i, u, axis=1, reduction="add"), x)
        dx = g - op.Exp(op.LogSoftmax(x)) * op.ReduceSum(g, [1], keepdims=1)
    feed = {"x": quarters(3, 5), "i": np.array([[1], [4]]), "u": quarters(2, 1) + 1}
    assert "Sub" in assert_finished(op, [dx], False, feed)


def test_labels_that_members_of_a_stack_share():
    """The scores have an axis of members, and the labels none."""
    x, i, u = (
        value_of("x", 2, 3, 5),
        value_of("i", 3, 1, dtype=ir.DataType.INT64),
        value_of("u", 3, 1),
    )
    op = emitter_of(x, i, u)
    with op:
        zeros = op.Expand(np.float32(0), [3, 5])
        g = op.ScatterElements(zeros, i, u, axis=1, reduction="add")
        g.type, g.shape = x.type, ir.Shape([3, 5])
        dx = g - op.Exp(op.LogSoftmax(x)) * op.ReduceSum(g, [1], keepdims=1)
    feed = {"x": quarters(2, 3, 5), "i": np.array([[1], [4], [0]]), "u": quarters(3, 1) + 1}
    assert "Sub" in assert_finished(op, [dx], False, feed)


def test_parts_of_which_members_of_a_stack_share_one():
    a, b = value_of("a", 2, 2, 6), value_of("b", 6, 4)
    op = emitter_of(a, b)
    with op:
        y = op.Pad(a, [0, 0, 0, 0, 4, 0]) + op.Pad(b, [0, 2, 0, 0])
    assert "Concat" not in assert_finished(
        op, [y], False, {"a": quarters(2, 2, 6), "b": quarters(6, 4)}
    )


def test_a_gradient_that_others_wrote_is_joined():
    """The rewrites do not ask who wrote the pattern."""
    model = parse_model("""f (float[2] a, float[3] b) => (float[5] y)
        <int64[2] p = {0, 3}, int64[2] q = {2, 0}>
        { u = Pad(a, p)  v = Pad(b, q)  y = Add(u, v) }""")
    kept = onnx_derivative(model, options=DerivativeOptions.KeepOutputs)
    assert "Concat" in [node.op_type for node in kept.graph.node]
    feed = {"a": quarters(2), "b": quarters(3, seed=1), "y_grad": quarters(5, seed=2)}
    found = run_named(kept, feed)
    np.testing.assert_allclose(found["y"], np.concatenate([feed["a"], feed["b"]]))
    np.testing.assert_allclose(found["a_grad"], feed["y_grad"][:2])


def test_squares_of_integers_stay():
    x = value_of("x", 2, 3, dtype=ir.DataType.INT64)
    op = emitter_of(x)
    y = op.ReduceSum(op.Mul(x, x), [0])
    feed = {"x": np.arange(6).reshape(2, 3)}
    assert assert_finished(op, [y], False, feed) == ["Mul", "ReduceSum"]


def test_parts_that_the_file_broadcasts():
    model = parse_model("""f (float[2] a, float[1,3] b) => (float[y0,5] y)
        <int64[2] p = {0, 3}, int64[4] q = {1, 0, 0, 2}>
        { u = Pad(a, p)  v = Pad(b, q)  y = Add(u, v) }""")
    feed = {"a": quarters(2), "b": quarters(1, 3, seed=1)}
    before = run_named(model, feed)["y"]
    found = run_named(
        onnx_derivative(model, options=DerivativeOptions.KeepOutputs),
        feed | {"y_grad": np.ones_like(before)},
    )
    np.testing.assert_array_equal(found["y"], before)


CONVOLUTIONS = {
    "plain": ("Conv", {}, (4, 3, 3, 3)),
    "padded": ("Conv", {"pads": [1, 0, 2, 1]}, (4, 3, 3, 3)),
    "dilated": ("Conv", {"dilations": [2, 1]}, (4, 3, 3, 3)),
    "strided": ("Conv", {"strides": [3, 2]}, (4, 3, 3, 3)),
    "groups": ("Conv", {"group": 3, "pads": [1, 1, 1, 1]}, (6, 1, 3, 3)),
    "groups of two": ("Conv", {"group": 3, "strides": [2, 2]}, (3, 2, 3, 3)),
    "same": ("Conv", {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, (4, 3, 3, 3)),
    "patches": ("Conv", {"strides": [2, 2]}, (4, 3, 2, 2)),
    "points": ("Conv", {}, (4, 3, 1, 1)),
    "strided points": ("Conv", {"strides": [2, 2]}, (4, 3, 1, 1)),
    "a line": ("Conv", {}, (4, 3, 1, 3)),
    "strided line": ("Conv", {"strides": [2, 3]}, (4, 3, 1, 4)),
    "large": ("Conv", {}, (4, 3, 7, 7)),
    "one window": ("Conv", {}, (4, 3, 8, 8)),
    "transposed": ("ConvTranspose", {"strides": [2, 2]}, (3, 4, 3, 3)),
    "cropped": ("ConvTranspose", {"pads": [1, 1, 1, 1]}, (3, 4, 3, 3)),
}


@READ
@pytest.mark.parametrize("rows", ["N", in_sweep(1), in_sweep(3)], ids=str)
@pytest.mark.parametrize("size", [8, "L"], ids=str)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_weights_of_convolutions(name, size, rows, read):
    """A convolution of images with cotangents becomes products of matrices."""
    op_type, attributes, kernel = CONVOLUTIONS[name]
    channels = kernel[0] if op_type == "ConvTranspose" else kernel[1] * attributes.get("group", 1)
    x, w = value_of("x", rows, channels, size, size), value_of("w", *kernel)
    feed = {"x": quarters(3 if rows == "N" else rows, channels, 8, 8), "w": quarters(*kernel)}
    alone = emitter_of(x, w)
    alone.give([alone.emit(op_type, [x, w], attributes)])
    [y] = run_named(to_proto(ir.Model(alone.graph, ir_version=9)), feed).values()
    lengths = y.shape[1:] if size == 8 else (y.shape[1], "H", "W")
    x, w = value_of("x", rows, channels, size, size), value_of("w", *kernel)
    g = value_of("g", rows, *lengths)
    op = emitter_of(x, w, g)
    with op:
        node = op.emit(op_type, [x, w], attributes).producer()
        _, dw, _ = operator_of(node).rule(op, node, g)
    kinds = assert_finished(op, [dw], read, feed | {"g": quarters(*y.shape, seed=2)})
    fast = math.prod(kernel[2:]) <= 64
    assert ("MatMul" in kinds or "ReduceSum" in kinds) == fast
    assert read or ("Conv" not in kinds) == fast


EXCHANGED = """f (float[2,3,6,6] x, float[2,4,4,4] g) =>
    (float[4,3,3,3] w) <int64[2] first = {FIRST, 0}, int64[2] last = {3, 3}, int64[2] axes = {2, 3},
    float[4] b = {1, 2, 3, 4}>
    { s = Transpose<perm = [1, 0, 2, 3]>(x)  t = Transpose<perm = [1, 0, 2, 3]>(g)
      BODY  p = Slice(y, first, last, axes)  w = Transpose<perm = [1, 0, 2, 3]>(p) }"""


@pytest.mark.parametrize(
    ("body", "first", "found"),
    [
        ("y = Conv(s, t)", 0, True),
        ("y = Conv<pads = [0, 0, 1, 1]>(s, t)", 0, True),
        ("y = Conv(s, t, b)", 0, False),
        ('y = Conv<auto_pad = "VALID">(s, t)', 0, False),
        ("y = Conv<pads = [1, 1, 0, 0]>(s, t)", 1, False),
        ("u = Relu(s)  y = Conv(u, t)", 0, False),
    ],
)
def test_gradients_of_weights_that_others_wrote(body, first, found):
    text = EXCHANGED.replace("BODY", body).replace("FIRST", str(first))
    proto = parse_model(text)
    feed = {"x": quarters(2, 3, 6, 6), "g": quarters(2, 4, 4, 4, seed=1)}
    before = run_named(proto, feed)["w"]
    model = ir.from_proto(proto)
    finish(model)
    after = to_proto(model)
    assert ("Conv" not in {node.op_type for node in after.graph.node}) == found
    np.testing.assert_allclose(run_named(after, feed)["w"], before, rtol=1e-5, atol=1e-6)


POOLS = {
    "tiles": ({"kernel_shape": [2, 2], "strides": [2, 2]}, True),
    "overlap": ({"kernel_shape": [3, 3], "strides": [2, 2]}, False),
    "rest": ({"kernel_shape": [3, 3], "strides": [3, 3]}, False),
    "column major": ({"kernel_shape": [2, 2], "strides": [2, 2], "storage_order": 1}, True),
    "dilated": ({"kernel_shape": [2, 2], "strides": [2, 2], "dilations": [2, 2]}, False),
}


@READ
@ROWS
@pytest.mark.parametrize("size", [8, "L"], ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_maxima_of_windows(name, size, rows, read):
    attributes, tiles = POOLS[name]
    n, (stride, _), (k, _) = (
        3 if rows == "N" else rows,
        attributes["strides"],
        attributes["kernel_shape"],
    )
    count = (8 - (k - 1) * attributes.get("dilations", [1])[0] - 1) // stride + 1
    lengths = (count, count) if size == 8 else ("H", "W")
    x, g = value_of("x", rows, 2, size, size), value_of("g", rows, 2, *lengths)
    op = emitter_of(x, g)
    y = op.emit("MaxPool", [x], attributes)
    y.shape = g.shape
    with op:
        [dx] = operator_of(y.producer()).rule(op, y.producer(), g)
    feed = {"x": quarters(n, 2, 8, 8), "g": quarters(n, 2, count, count, seed=1)}
    kinds = assert_finished(op, [dx], read, feed)
    assert ("MaxUnpool" in kinds) == (tiles and size == 8)
    assert read or ("ScatterElements" in kinds) != (tiles and size == 8)


def test_columns_that_a_file_adds_to_zeros():
    """Indices of a MaxPool that count along an axis of two are no positions."""
    proto = parse_model("""f (float[1,2,4] x, float[1,2,2] g) => (float[1,2,4] y, float[1,2,2] m)
        <float zero = {0}, int64[2] flat = {1, 8}, int64[2] few = {1, 4},
         int64[3] shape = {1, 2, 4}>
        { m, i = MaxPool<kernel_shape = [2], strides = [2]>(x)  z = Expand(zero, flat)
          j = Reshape(i, few)  u = Reshape(g, few)
          s = ScatterElements<axis = 1, reduction = "max">(z, j, u)  y = Reshape(s, shape) }""")
    feed = {"x": quarters(1, 2, 4), "g": -1 - np.abs(quarters(1, 2, 2, seed=1))}
    model = ir.from_proto(proto)
    finish(model)
    assert "ScatterElements" in {node.op_type for node in model.graph}
    np.testing.assert_array_equal(
        run_named(to_proto(model), feed)["y"], run_named(proto, feed)["y"]
    )


def test_maxima_that_are_replaced_are_added_up():
    """Several maxima are moved to position 0, where MaxUnpool would keep the last of them."""
    x, g = value_of("x", 1, 1, 4, 4), value_of("g", 1, 1, 2, 2)
    op = emitter_of(x, g)
    window = {"kernel_shape": [2, 2], "strides": [2, 2]}
    y, maxima = op.emit_many("MaxPool", [x], window, 2)
    for v, dtype in ((y, FLOAT), (maxima, ir.DataType.INT64)):
        v.dtype, v.shape = dtype, ir.Shape([1, 1, 2, 2])
    index = op.set_type_like(op.Where(op.Greater(y, 10.0), maxima, np.int64(0)), maxima)
    zeros = op.Expand(np.float32(0), [16])
    flat = op.Reshape(index, [-1]), op.Reshape(g, [-1])
    dx = op.Reshape(op.ScatterElements(zeros, *flat, axis=0, reduction="add"), [1, 1, 4, 4])
    feed = {"x": quarters(1, 1, 4, 4), "g": np.ones((1, 1, 2, 2), np.float32)}
    assert_finished(op, [op.set_type_like(dx, x)], False, feed)


@pytest.mark.parametrize("same", [True, False])
def test_groups_whose_pixels_are_ordered_otherwise(same):
    """The windows of a group are those of x only if its pixels keep their shape."""
    pixels, windows = ((6, 4), (4, 2)) if same else ((4, 6), (2, 4))
    x, g = value_of("x", 2, 4, 6, 4), value_of("g", 2, 4, *windows)
    op = emitter_of(x, g)
    space = op.Shape(x, start=2) if same else op.Concat([pixels[0]], [pixels[1]], axis=0)
    split = op.Reshape(x, op.Concat([0, 2, -1], space, axis=0))
    split = op.Transpose(split, perm=[2, 1, 0, 3, 4])
    grouped = op.Reshape(split, op.Concat([0, -1], space, axis=0))
    y = op.Conv(grouped, op.Transpose(g, perm=[1, 0, 2, 3]), group=2)
    dw = op.Transpose(op.Slice(y, [0, 0], [3, 3], [2, 3]), perm=[1, 0, 2, 3])
    dw.shape, dw.dtype = ir.Shape([4, 2, 3, 3]), FLOAT
    feed = {"x": quarters(2, 4, 6, 4), "g": quarters(2, 4, *windows, seed=1)}
    assert ("Conv" not in assert_finished(op, [dw], False, feed)) == same


MASKED = """f (float[3,4] x, float[3,4] v) =>
    (float[3,4] y) { zero = Constant<value = float {0}>()  p = Softmax(x)  n = IsNaN(p)  BODY }"""
SCANNED = """s = Scan<num_scan_inputs = 1, body = each (float[4] row) => (float[4] z) {
    q = Softmax(row)  m = IsNaN(q)  o = Constant<value = float {0}>()  z = Where(m, o, q) }>(x)
    y = Mul(s, v)"""


@pytest.mark.parametrize(
    ("body", "replaced"),
    [
        ("y = Where(n, zero, p)", True),
        ("a = Where(n, zero, p)  y = Mul(a, v)", True),
        ("a = Where(n, zero, p)  b = Where(n, v, p)  y = Add(a, b)", True),
        (
            "q = Cast<to = 11>(p)  z = Cast<to = 11>(v)  a = Where(n, z, q)  y = Cast<to = 1>(a)",
            True,
        ),
        (SCANNED, True),
        ("y = Mul(p, v)", False),
        ("one = Constant<value = float {1}>()  a = Clip(p, zero, one)  y = Mul(a, v)", False),
    ],
)
@pytest.mark.parametrize("order", [1, 2])
def test_rows_of_nan_that_the_model_replaces(body, replaced, order):
    """A row of -inf has no gradient where a Where replaces its Softmax; others pay no guard."""
    proto = parse_model(MASKED.replace("BODY", body))
    gradient = (onnx_derivative if order == 1 else hvp)(proto, inputs=["x"])
    kinds = [node.op_type for node in all_nodes(ir.from_proto(gradient).graph)]
    assert ("IsNaN" in kinds) == replaced
    rng = np.random.default_rng(0)
    x, v = rng.standard_normal((2, 3, 4)).astype(np.float32)
    feed = {"x": x, "v": v} | {i.name: v for i in gradient.graph.input if i.name not in "xv"}
    wanted = run_named(gradient, feed)
    x[1] = -np.inf
    found = run_named(gradient, feed)
    for name in {*wanted} - {"y"}:
        assert not np.isnan(wanted[name]).any()
        np.testing.assert_allclose(found[name][[0, 2]], wanted[name][[0, 2]], rtol=1e-6)
        if replaced:
            np.testing.assert_array_equal(found[name][1], 0)


POOLED = {  # pools, and whether their windows tile the image: the gradient then repeats elements
    "disjoint": ("AveragePool<kernel_shape=[2, 3], strides=[2, 3]>", True),
    "norms": ("LpPool<kernel_shape=[2, 3], strides=[2, 3]>", True),
    "overlapping": ("AveragePool<kernel_shape=[3, 3], strides=[2, 3]>", False),
    "apart": ("AveragePool<kernel_shape=[2, 2], strides=[2, 3]>", False),
    "padded": ("AveragePool<kernel_shape=[2, 3], strides=[2, 3], pads=[1, 0, 1, 0]>", False),
}


@pytest.mark.parametrize("channels", [2, "C"], ids=str)
@pytest.mark.parametrize("name", POOLED)
def test_averages_of_windows_that_tile_an_image(name, channels):
    body, tiles = POOLED[name]
    model = parse_model(
        f"f (float[N,{channels},4,6] x) => (float[N,{channels},a,b] y) {{ y = {body}(x) }}"
    )
    made = onnx_derivative(model)
    kinds = {node.op_type for node in made.graph.node}
    assert ("Resize" in kinds, "ConvTranspose" in kinds) == (tiles, not tiles)
    assert check_gradient(model, feed={"x": quarters(2, 2, 4, 6) + 2}).ok


def test_a_convolution_by_ones_of_the_file_is_no_average():
    model = parse_model(
        "f (float[N,1,4,6] x) => (float[N,1,2,2] y) "
        "<float[1,1,2,3] w = {1, 1, 1, 1, 1, 1}> { y = Conv<strides=[2, 3]>(x, w) }"
    )
    kinds = [node.op_type for node in onnx_derivative(model, inputs=["x"]).graph.node]
    assert "Resize" not in kinds


@pytest.mark.parametrize(
    ("alpha", "multiplied"), [(0.25, True), (0, True), (2, False), (-1, False)]
)
def test_slopes_of_a_leaky_relu(alpha, multiplied):
    """A Where becomes a product if the larger of 1 and the slope is 1."""
    model = parse_model(
        f"f (float[N,3] x) => (float[N,3] y) {{ y = LeakyRelu<alpha = {float(alpha)}>(x) }}"
    )
    kinds = {node.op_type for node in onnx_derivative(model).graph.node}
    assert ("Where" not in kinds) == multiplied
    assert check_gradient(model, feed={"x": quarters(4, 3) + 0.125}).ok


# GELU as exporters write it, of s = x / sqrt(2), and how many nodes its gradient takes
GELUS = {
    "divided": ("s = Div(x, root) e = Erf(s) a = Add(e, one) p = Mul(x, a) y = Mul(p, half)", 7),
    "multiplied": (
        "s = Mul(x, inverse) e = Erf(s) a = Add(one, e) p = Mul(a, x) y = Mul(half, p)",
        7,
    ),
    "half first": ("s = Div(x, root) e = Erf(s) a = Add(e, one) b = Mul(a, half) y = Mul(x, b)", 6),
    "x halved": ("s = Div(x, root) e = Erf(s) a = Add(e, one) b = Mul(x, half) y = Mul(b, a)", 8),
    "vector": ("s = Div(x, roots) e = Erf(s) a = Add(e, one) p = Mul(x, a) y = Mul(p, half)", 9),
}


@pytest.mark.parametrize(("nodes", "most"), GELUS.values(), ids=GELUS)
def test_gradients_of_gelu(nodes, most):
    torch = pytest.importorskip("torch")
    numbers = {"root": 2**0.5, "inverse": 0.5**0.5, "one": 1, "half": 0.5, "roots": [2**0.5] * 8}
    used = {n: np.array(v, np.float32) for n, v in numbers.items() if n in nodes}
    model = parse_model(f"g (float[N, 8] x) => (float[N, 8] y) {{ {nodes} }}", **used)
    x = np.random.default_rng(0).normal(0, 2, (5, 8)).astype(np.float32)
    x[0] = [0.0, -0.0, 1e-20, -1e-20, 12.0, -12.0, 3e18, -3e18]
    g = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    g[1] = 0.0
    want = torch.tensor(x.astype(float), requires_grad=True)
    torch.nn.functional.gelu(want).backward(torch.tensor(g.astype(float)))
    assert want.grad is not None
    gradient = vjp(model)
    found = run_named(gradient, {"x": x, "y_grad": g})["x_grad"]
    np.testing.assert_allclose(found, want.grad.numpy(), rtol=2e-6, atol=2e-6)
    assert len(gradient.graph.node) - len(model.graph.node) <= most
    v = np.random.default_rng(2).normal(size=x.shape).astype(np.float32)[2:]
    feed = {"x": x[2:], "x_vector": v, "y_grad": np.ones_like(v)}
    second = run_named(hvp(model, outputs=["y"]), feed)
    slope = torch.tensor(x[2:].astype(float), requires_grad=True)
    [first] = torch.autograd.grad(torch.nn.functional.gelu(slope).sum(), slope, create_graph=True)
    [product] = torch.autograd.grad(first, slope, torch.tensor(v.astype(float)))
    np.testing.assert_allclose(second["x_hvp"], product.numpy(), rtol=1e-5, atol=1e-6)
