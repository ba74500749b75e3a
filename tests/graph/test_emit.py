"""The emitter: what it writes, what it shares, what it leaves out."""

from __future__ import annotations

import threading
from itertools import product

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad.graph.emit import Emit
from onnxgrad.operators.shapes import dims
from tests.support.emitters import emitter_of
from tests.support.running import run

FLOAT = ir.DataType.FLOAT


def float_inputs(*shapes: tuple | None, dtype: ir.DataType = FLOAT) -> list[ir.Value]:
    return [
        ir.Value(name=f"x{i}", type=ir.TensorType(dtype), shape=None if s is None else ir.Shape(s))
        for i, s in enumerate(shapes)
    ]


def written_operators(op: Emit) -> list[str]:
    return [node.op_type for node in op.graph]


def run_values(op: Emit, ys: list[ir.Value], *arrays: np.ndarray) -> list[np.ndarray]:
    """Return values of the graph, computed by onnxruntime."""
    op.graph.outputs[:] = [op.copy_of(y) if y.producer() is None else y for y in ys]
    for y in op.graph.outputs:
        y.dtype = y.dtype or FLOAT
    fed = {str(x.name): a for x, a in zip(op.graph.inputs, arrays, strict=True)}
    return run(ir.to_proto(ir.Model(op.graph, ir_version=9)), fed)


def run_value(op: Emit, y: ir.Value, *arrays: np.ndarray) -> np.ndarray:
    return run_values(op, [y], *arrays)[0]


# -- writing ------------------------------------------------------------------------------------


def test_operators_and_numbers():
    x, z = float_inputs((2,), (2,))
    op = emitter_of(x, z)
    with op:
        y = -(1.0 - x * z / 2) + 3
    arrays = np.float32([[1, 2], [3, 4]])
    np.testing.assert_allclose(run_value(op, y, *arrays), [3.5, 6])
    assert written_operators(op) == ["Mul", "Div", "Sub", "Neg", "Add"]


@pytest.mark.parametrize("n", [3, np.int64([3]), np.int64(3)])
def test_arange(n):
    op = emitter_of(*float_inputs((1,)))
    with op:
        y = op.arange(n if isinstance(n, int) else op.const(n))
    np.testing.assert_array_equal(run_value(op, y, np.float32([0])), [0, 1, 2])


def test_arange_of_a_number_whose_rank_is_unknown():
    [x] = float_inputs(None)
    op = emitter_of(x)
    y = op.arange(op.ReduceProd(op.Shape(x), keepdims=0))
    np.testing.assert_array_equal(run_value(op, y, np.zeros((2, 3), np.float32)), range(6))


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize(
    ("parts", "lengths"), [(2, [2, 2]), ([1, 3], [1, 3]), (np.int64([1, 3]), [None, None])]
)
def test_split(parts, lengths, axis):
    (x,) = float_inputs(("N", 4))
    op = emitter_of(x)
    with op:
        left, right = op.split(x, op.const(parts) if isinstance(parts, np.ndarray) else parts, axis)
    assert [dims(left), dims(right)] == [("N", n) for n in lengths]
    a = np.arange(8, dtype=np.float32).reshape(2, 4)
    expected = np.split(a, [2 if lengths == [2, 2] else 1], axis=1)
    for y, part in zip((left, right), expected, strict=True):
        np.testing.assert_array_equal(run_value(op, y, a), part)


@pytest.mark.parametrize("dtype", ["FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE", "INT64"])
def test_a_number_is_of_its_neighbors_dtype(dtype):
    [x] = float_inputs((2,), dtype=ir.DataType[dtype])
    op = emitter_of(x)
    y = op.Add(2, x)
    assert y.dtype == y.producer().inputs[0].dtype == x.dtype
    picked = op.Where(op.Greater(x, 1), 0, x)
    assert picked.dtype == picked.producer().inputs[1].dtype == x.dtype
    assert picked.producer().inputs[0].dtype == ir.DataType.BOOL


def test_lists_are_int64_and_arrays_stay():
    [x] = float_inputs((2, 3))
    op = emitter_of(x)
    assert op.Expand(x, [2, 3]).producer().inputs[1].dtype == ir.DataType.INT64
    assert op.const(np.float64(1)).dtype == ir.DataType.DOUBLE
    assert op.const(np.array(["a", "bc"], object)).const_value.numpy().tolist() == [b"a", b"bc"]


def test_constants_are_shared_within_a_dtype():
    op = emitter_of()
    assert op.const(1.0) is op.const(1.0)
    assert op.const(1.0) is not op.const(1.0, ir.DataType.DOUBLE)
    assert op.const([1]) is not op.const(np.int64(1))
    assert op.const(0.0) is not op.const(-0.0)
    assert len(op.graph.initializers) == 6


def test_a_node_is_written_once():
    x, z = float_inputs((2,), (2,))
    op = emitter_of(x, z)
    assert op.Mul(x, z) is op.Mul(x, z)
    assert op.Mul(x, z) is not op.Mul(z, x)
    assert op.Softmax(x, axis=0) is op.Softmax(x, axis=0)
    assert op.Softmax(x, axis=0) is not op.Softmax(x, axis=-1)
    assert op.emit("Mul", [x, z], {}, fresh=True) is not op.Mul(x, z)
    assert op.emit("Mul", [x, z], {}, domain="mine") is not op.Mul(x, z)
    for random in ("RandomNormalLike", "Dropout", "Bernoulli"):
        assert getattr(op, random)(x) is not getattr(op, random)(x)
    assert op.emit_many("Split", [x], {"num_outputs": 2}, outputs=2)[1].producer() is (
        op.emit_many("Split", [x], {"num_outputs": 2}, outputs=2)[0].producer()
    )


def test_nodes_are_put_before_another():
    [x] = float_inputs((2,))
    op = emitter_of(x)
    last = op.Exp(x).producer()
    with op.at(last):
        op.Neg(x)
    op.Tanh(x)
    assert written_operators(op) == ["Neg", "Exp", "Tanh"]


def test_a_node_that_stands_behind_is_written_again():
    """Nodes are written at random places, and each before the nodes that read it."""
    [x] = float_inputs((2,))
    op, rng = emitter_of(x), np.random.default_rng(0)
    for operator in ("Relu", "Sin", "Cos", "Abs"):
        op.emit(operator, [x], {}, fresh=True)
    for _ in range(60):
        at = list(op.graph)[rng.integers(op.graph.num_nodes())]
        with op.at(at if rng.random() < 0.8 else None):
            op.Neg(op.Tanh(x) if rng.random() < 0.5 else op.Exp(op.Tanh(x)))
    operators = written_operators(op)
    assert operators.count("Neg") > operators.count("Sin")  # some stood behind
    assert len(operators) < 40  # and most were shared
    seen = {x}
    for node in op.graph:
        assert seen.issuperset(node.inputs), node.op_type
        seen.update(node.outputs)


def test_only_operators_are_attributes():
    with pytest.raises(AttributeError):
        _ = emitter_of().keras


def test_names_are_new():
    text = """<ir_version: 9, opset_import: ["": 20]>
        g (float[3] mul, int64 n, bool c) => (float[3] add) <float neg = {1.0}> {
          add = Loop(n, c, mul)<body = b (int64 i, bool d, float[3] exp)
            => (bool sub, float[3] tanh) <float[1] where = {2.0}>
            { sub = Identity(d)  tanh = Mul(exp, where) }> }"""
    op = Emit(ir.from_proto(onnx.parser.parse_model(text)).graph, names=["div"])
    x = op.graph.inputs[0]
    taken = "mul add neg exp sub tanh where div".split()
    assert not {op.name(n) for n in taken} & set(taken)
    assert op.Mul(x, x).name not in taken
    assert op.name("other") == "other" != op.name("other")


def test_every_thread_has_its_own():
    def write(number: float) -> None:
        [x] = float_inputs((2,))
        op = emitter_of(x)
        with op:
            y = x
            for _ in range(200):
                y = y * number + 1.0
        found[number] = (written_operators(op), run_value(op, y, np.zeros(2, np.float32))[0])

    found: dict[float, tuple] = {}
    threads = [threading.Thread(target=write, args=(n,)) for n in (0.25, 0.5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found[0.25][0] == found[0.5][0] == ["Mul", "Add"] * 200
    np.testing.assert_allclose([found[0.25][1], found[0.5][1]], [4 / 3, 2], rtol=1e-6)


def test_entering_takes_arithmetic_from_no_other_thread(monkeypatch):
    """The handler of onnx_ir is one for all threads: while one enters, another may multiply."""
    seen, install = [], ir.set_value_magic_handler
    monkeypatch.setattr(
        ir, "set_value_magic_handler", lambda handler: seen.append(handler) or install(handler)
    )
    [x] = float_inputs((2,))
    op = emitter_of(x)
    with op, op:
        _ = x * 2.0
    assert len(seen) >= 2
    assert None not in seen


def test_contexts_nest():
    a, b = float_inputs((2,)), float_inputs((2,))
    outer, inner = emitter_of(*a), emitter_of(*b)
    with outer:
        with inner:
            _ = -b[0]
        _ = a[0] * 2
    assert (written_operators(outer), written_operators(inner)) == (["Mul"], ["Neg"])


def test_outputs_get_the_name_asked_for():
    text = """<ir_version: 9, opset_import: ["": 20]> g (float[3] x) => (float[3] y) {
        x_grad = Exp(x)  y = Neg(x_grad) }"""
    graph = ir.from_proto(onnx.parser.parse_model(text)).graph
    op, [x] = Emit(graph), graph.inputs
    protected = set(graph.inputs) | set(graph.outputs)
    made = op.name_output(op.Sin(x), "x_grad", x, protected)
    assert (made.name, made.dtype, dims(made)) == ("x_grad", FLOAT, (3,))
    assert graph[0].outputs[0].name != "x_grad"  # an inner value gives way
    again = op.name_output(op.Cos(x), "y", x, protected)
    assert again.name != "y" == graph.outputs[0].name  # an output does not
    copy = op.name_output(x, "copy", x, protected)  # nor does a value become two
    assert copy.producer().op_type == "Identity"


# -- what needs no node -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "one", "dropped"),
    [
        ((2, 3), (), True),
        (("N", 3), (1, 3), True),
        ((2, 3), (2, 3), True),
        ((1, 3), (2, 1), False),
        (("N",), (2,), False),  # N may be 1
        ((2,), (1, 2), False),
        ((None,), (), False),
        (None, (), False),
    ],
)
def test_a_product_with_one(x, one, dropped):
    [x] = float_inputs(x)
    op = emitter_of(x)
    for y in (op.Mul(x, np.ones(one, np.float32)), op.Mul(np.ones(one, np.float32), x)):
        assert (y is x) == dropped
    assert op.Mul(x, np.float32(2)) is not x


def test_casts_and_reshapes_to_what_is_there():
    [x] = float_inputs((2, 3))
    op = emitter_of(x)
    assert op.Cast(x, to=FLOAT) is x
    assert op.Cast(x, to=ir.DataType.DOUBLE).dtype == ir.DataType.DOUBLE
    assert op.Reshape(x, [2, 3]) is x
    assert op.Reshape(x, [3, 2]) is not x


# -- shapes -------------------------------------------------------------------------------------

LENGTHS = [(), (1,), (3,), (2, 1), (1, 3), (2, 3), (4, 1, 3), (4, 2, 3), (1, 1, 1), (4, 2, 1)]
BROADCAST = [
    (g, x)
    for g, x in product(LENGTHS, LENGTHS)
    if len(x) <= len(g) and all(a in (1, b) for a, b in zip(x[::-1], g[::-1], strict=False))
]


def stated_shape(shape: tuple[int, ...], known: str, prefix: str) -> tuple | None:
    if known == "lengths":
        return shape
    if known == "symbols":  # of one name wherever they are equal; ones are known
        return tuple(n if n == 1 else f"n{n}" for n in shape)
    return None if known == "nothing" else tuple(f"{prefix}{i}" for i in range(len(shape)))


WAYS = ["lengths", "symbols", "rank", "nothing"]


def assert_results(method: str, pairs: list, of_g: str, of_x: str, expected) -> None:
    """Check a method of the emitter for the shapes of g and x, of which so much is stated.

    All pairs are in one graph, which runs once.
    """
    op, ys, arrays = emitter_of(), [], []
    for i, (g_shape, x_shape) in enumerate(pairs):
        g, x = float_inputs(stated_shape(g_shape, of_g, "g"), stated_shape(x_shape, of_x, "x"))
        if of_g == of_x == "rank":
            g.shape, x.shape = (ir.Shape([None] * len(s)) for s in (g_shape, x_shape))
        g.name, x.name = f"g{i}", f"x{i}"
        op.graph.inputs.extend([g, x])
        with op:
            ys.append(getattr(op, method)(g, x))
        arrays.append(np.arange(np.prod(g_shape), dtype=np.float32).reshape(g_shape))
        arrays.append(np.zeros(x_shape, np.float32))
    found = run_values(op, ys, *arrays)
    for (_, x_shape), y, array in zip(pairs, found, arrays[::2], strict=True):
        np.testing.assert_array_equal(y, expected(array, x_shape), f"{array.shape} {x_shape}")
        assert y.shape == x_shape


def sum_of_repeated(array: np.ndarray, shape: tuple) -> np.ndarray:
    wide = (1,) * (array.ndim - len(shape)) + shape
    axes = tuple(i for i, (a, b) in enumerate(zip(wide, array.shape, strict=True)) if a != b)
    return array.sum(axes).reshape(shape)


@pytest.mark.parametrize("of_x", WAYS)
@pytest.mark.parametrize("of_g", WAYS)
def test_sum_to(of_g, of_x):
    """The sum over what was repeated, however little is known; `None` lengths as well."""
    assert_results("sum_to", BROADCAST, of_g, of_x, sum_of_repeated)


def test_sum_to_needs_no_node_for_equal_shapes():
    g, x, one = float_inputs((2, "N"), (2, "N"), (1, "N"))
    op = emitter_of(g, x, one)
    assert op.sum_to(g, x) is g
    assert not op.written
    op.sum_to(g, one)
    assert written_operators(op) == ["ReduceSum"]


RESHAPED = [((), ()), ((), (1, 1)), ((1,), ()), ((6,), (2, 3)), ((2, 3), (3, 1, 2))]
RESHAPED += [((0, 3), (3, 0)), ((2, 0), (2, 0)), ((4, 6), (4, 2, 3))]
SPREAD = [((1, 3), (2, 3)), ((2, 1), (2, 3)), ((1, 1), (4, 4)), ((2, 3), (2, 3))]


@pytest.mark.parametrize("of_x", WAYS)
@pytest.mark.parametrize("of_g", WAYS)
def test_reshape_and_spread(of_g, of_x):
    assert_results("reshape_like", RESHAPED, of_g, of_x, np.reshape)
    assert_results("expand_to", SPREAD, of_g, of_x, np.broadcast_to)


def test_shape_and_size():
    x, y, z = float_inputs((2, 3), ("N", 3), None)
    op = emitter_of(x, y, z)
    assert op.known_value(op.shape_of(x)).tolist() == [2, 3]
    assert op.dim(x, -1) == op.dim(y, 1) == 3
    assert not op.written
    for v, axis in ((y, 0), (z, -1), (z, -2), (z, 0)):
        length = op.dim(v, axis)
        arrays = [np.zeros(s, np.float32) for s in ((2, 3), (5, 3), (4, 7))]
        assert run_value(op, length, *arrays).tolist() == [arrays[1 if v is y else 2].shape[axis]]


@pytest.mark.parametrize("shape", [(2, 3), (9, 9), ("N", 3), None])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_filled(shape, dtype):
    [x] = float_inputs(shape, dtype=ir.DataType.from_numpy(np.dtype(dtype)))
    op = emitter_of(x)
    array = np.zeros([d if isinstance(d, int) else 4 for d in shape or (1, 2)], dtype)
    for y, number in ((op.ones_like(x), 1), (op.zeros_like(x), 0)):
        assert y.dtype == x.dtype
        found = run_value(op, y, array)
        np.testing.assert_array_equal(found, np.full(array.shape, number, dtype))
        assert found.dtype == dtype


def test_what_is_constant():
    [x] = float_inputs(())
    op = emitter_of(x)
    assert op.known_value(x) is None
    assert op.known_value(None) is None
    assert op.known_value(op.const([1, 2])).tolist() == [1, 2]
    assert op.is_all(op.const(np.ones(3)), 1)
    assert not op.is_all(op.const(np.array([1.0, 2.0])), 1)
    assert not op.is_all(x, 1)
    weight = op.const(1.0)
    op.graph.inputs.append(op.graph.initializers.pop(weight.name))  # can be fed
    assert op.known_value(weight) is None
    assert not op.is_all(weight, 1)


def test_dtype_is_that_of_the_first_operand():
    n = float_inputs((1,))[0]
    op = emitter_of(n)
    n.dtype = ir.DataType.INT64
    assert op.Expand(np.float32(1), n).dtype == ir.DataType.FLOAT
    with op:
        assert (2 * n).dtype == ir.DataType.INT64
        assert op.Where(op.Equal(n, 1), 0.5, n).dtype == ir.DataType.INT64


def test_indices_are_integers():
    x, boxes, scores = float_inputs((4,), (1, 3, 4), (1, 1, 3))
    assert emitter_of(boxes, scores).NonMaxSuppression(boxes, scores).dtype == ir.DataType.INT64
    values, indices = emitter_of(x).emit_many("TopK", [x, [2]], {}, 2)
    assert (values.dtype, indices.dtype) == (ir.DataType.FLOAT, ir.DataType.INT64)


def test_swap():
    x, z = float_inputs(("N", 2, 3), None)
    op = emitter_of(x, z)
    assert dims(op.mT(x)) == ("N", 3, 2)
    assert op.mT(z).producer().op_type == "Einsum"


def test_total():
    x, y, z = float_inputs((2,), (2,), (2,))
    op = emitter_of(x, y, z)
    assert op.total([x]) is x
    assert op.total([x, y]).producer().op_type == "Add"
    assert op.total([x, y, z]).producer().op_type == "Sum"


def test_a_context_inside_of_itself():
    a, b = float_inputs((2,), (2,))
    op, other = emitter_of(a, b), emitter_of()
    with op:
        with other, op:
            a * b
        a + b
    assert written_operators(op) == ["Mul", "Add"]
    assert written_operators(other) == []
