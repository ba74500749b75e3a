"""The emitter: what it writes, what it shares, what it leaves out."""

from __future__ import annotations

import threading
from itertools import product

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import dims

FLOAT = ir.DataType.FLOAT


def inputs(*shapes: tuple | None, dtype: ir.DataType = FLOAT) -> list[ir.Value]:
    return [
        ir.Value(name=f"x{i}", type=ir.TensorType(dtype), shape=None if s is None else ir.Shape(s))
        for i, s in enumerate(shapes)
    ]


def emitter(*values: ir.Value) -> Emit:
    return Emit(ir.Graph(values, [], nodes=[], opset_imports={"": 20}, name="g"))


def written(op: Emit) -> list[str]:
    return [node.op_type for node in op.graph]


def run(op: Emit, y: ir.Value, *arrays: np.ndarray) -> np.ndarray:
    """Return y, computed by onnxruntime."""
    if y.producer() is None:
        y = op.copy_of(y)
    y.dtype = y.dtype or FLOAT
    op.graph.outputs[:] = [y]
    proto = ir.to_proto(ir.Model(op.graph, ir_version=9))
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    fed = {str(x.name): a for x, a in zip(op.graph.inputs, arrays, strict=True)}
    return session.run(None, fed)[0]


# -- writing ------------------------------------------------------------------------------------


def test_operators_and_numbers():
    x, z = inputs((2,), (2,))
    op = emitter(x, z)
    with op:
        y = -(1.0 - x * z / 2) + 3
    arrays = np.float32([[1, 2], [3, 4]])
    np.testing.assert_allclose(run(op, y, *arrays), [3.5, 6])
    assert written(op) == ["Mul", "Div", "Sub", "Neg", "Add"]


@pytest.mark.parametrize("n", [3, np.int64([3]), np.int64(3)])
def test_arange(n):
    op = emitter(*inputs((1,)))
    with op:
        y = op.arange(n if isinstance(n, int) else op.const(n))
    np.testing.assert_array_equal(run(op, y, np.float32([0])), [0, 1, 2])


def test_arange_of_a_number_whose_rank_is_unknown():
    [x] = inputs(None)
    op = emitter(x)
    y = op.arange(op.ReduceProd(op.Shape(x), keepdims=0))
    np.testing.assert_array_equal(run(op, y, np.zeros((2, 3), np.float32)), range(6))


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize(
    ("parts", "lengths"), [(2, [2, 2]), ([1, 3], [1, 3]), (np.int64([1, 3]), [None, None])]
)
def test_split(parts, lengths, axis):
    (x,) = inputs(("N", 4))
    op = emitter(x)
    with op:
        left, right = op.split(x, op.const(parts) if isinstance(parts, np.ndarray) else parts, axis)
    assert [dims(left), dims(right)] == [("N", n) for n in lengths]
    a = np.arange(8, dtype=np.float32).reshape(2, 4)
    expected = np.split(a, [2 if lengths == [2, 2] else 1], axis=1)
    for y, part in zip((left, right), expected, strict=True):
        np.testing.assert_array_equal(run(op, y, a), part)


@pytest.mark.parametrize("dtype", ["FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE", "INT64"])
def test_a_number_is_of_its_neighbors_dtype(dtype):
    [x] = inputs((2,), dtype=ir.DataType[dtype])
    op = emitter(x)
    y = op.Add(2, x)
    assert y.dtype == y.producer().inputs[0].dtype == x.dtype
    picked = op.Where(op.Greater(x, 1), 0, x)
    assert picked.dtype == picked.producer().inputs[1].dtype == x.dtype
    assert picked.producer().inputs[0].dtype == ir.DataType.BOOL


def test_lists_are_int64_and_arrays_stay():
    [x] = inputs((2, 3))
    op = emitter(x)
    assert op.Expand(x, [2, 3]).producer().inputs[1].dtype == ir.DataType.INT64
    assert op.const(np.float64(1)).dtype == ir.DataType.DOUBLE
    assert op.const(np.array(["a", "bc"], object)).const_value.numpy().tolist() == [b"a", b"bc"]


def test_constants_are_shared_within_a_dtype():
    op = emitter()
    assert op.const(1.0) is op.const(1.0)
    assert op.const(1.0) is not op.const(1.0, ir.DataType.DOUBLE)
    assert op.const([1]) is not op.const(np.int64(1))
    assert op.const(0.0) is not op.const(-0.0)
    assert len(op.graph.initializers) == 6


def test_a_node_is_written_once():
    x, z = inputs((2,), (2,))
    op = emitter(x, z)
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
    [x] = inputs((2,))
    op = emitter(x)
    last = op.Exp(x).producer()
    with op.at(last):
        op.Neg(x)
    op.Tanh(x)
    assert written(op) == ["Neg", "Exp", "Tanh"]


def test_a_node_that_stands_behind_is_written_again():
    """Nodes are written at random places, and each before the nodes that read it."""
    [x] = inputs((2,))
    op, rng = emitter(x), np.random.default_rng(0)
    for operator in ("Relu", "Sin", "Cos", "Abs"):
        op.emit(operator, [x], {}, fresh=True)
    for _ in range(60):
        at = list(op.graph)[rng.integers(op.graph.num_nodes())]
        with op.at(at if rng.random() < 0.8 else None):
            op.Neg(op.Tanh(x) if rng.random() < 0.5 else op.Exp(op.Tanh(x)))
    operators = written(op)
    assert operators.count("Neg") > operators.count("Sin")  # some stood behind
    assert len(operators) < 40  # and most were shared
    seen = {x}
    for node in op.graph:
        assert seen.issuperset(node.inputs), node.op_type
        seen.update(node.outputs)


def test_only_operators_are_attributes():
    with pytest.raises(AttributeError):
        _ = emitter().keras


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
        [x] = inputs((2,))
        op = emitter(x)
        with op:
            y = x
            for _ in range(200):
                y = y * number + 1.0
        found[number] = (written(op), run(op, y, np.zeros(2, np.float32))[0])

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
    [x] = inputs((2,))
    op = emitter(x)
    with op, op:
        _ = x * 2.0
    assert len(seen) >= 2
    assert None not in seen


def test_contexts_nest():
    a, b = inputs((2,)), inputs((2,))
    outer, inner = emitter(*a), emitter(*b)
    with outer:
        with inner:
            _ = -b[0]
        _ = a[0] * 2
    assert (written(outer), written(inner)) == (["Mul"], ["Neg"])


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
    [x] = inputs(x)
    op = emitter(x)
    for y in (op.Mul(x, np.ones(one, np.float32)), op.Mul(np.ones(one, np.float32), x)):
        assert (y is x) == dropped
    assert op.Mul(x, np.float32(2)) is not x


def test_casts_and_reshapes_to_what_is_there():
    [x] = inputs((2, 3))
    op = emitter(x)
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


def stated(shape: tuple[int, ...], known: str, prefix: str) -> tuple | None:
    if known == "lengths":
        return shape
    if known == "symbols":  # of one name wherever they are equal; ones are known
        return tuple(n if n == 1 else f"n{n}" for n in shape)
    return None if known == "nothing" else tuple(f"{prefix}{i}" for i in range(len(shape)))


@pytest.mark.parametrize("of_x", ["lengths", "symbols", "rank", "nothing"])
@pytest.mark.parametrize("of_g", ["lengths", "symbols", "rank", "nothing"])
def test_sum_to(of_g, of_x):
    """The sum over what was repeated, however little is known; `None` lengths as well."""
    for g_shape, x_shape in BROADCAST:
        g, x = inputs(stated(g_shape, of_g, "g"), stated(x_shape, of_x, "x"))
        if of_g == of_x == "rank":
            g.shape = ir.Shape([None] * len(g_shape))
        op = emitter(g, x)
        with op:
            y = op.sum_to(g, x)
        array = np.arange(np.prod(g_shape), dtype=np.float32).reshape(g_shape)
        found = run(op, y, array, np.zeros(x_shape, np.float32))
        wide = (1,) * (len(g_shape) - len(x_shape)) + x_shape
        axes = tuple(i for i, (a, b) in enumerate(zip(wide, g_shape, strict=True)) if a != b)
        np.testing.assert_array_equal(found, array.sum(axes).reshape(x_shape), str((g, x)))


def test_sum_to_needs_no_node_for_equal_shapes():
    g, x, one = inputs((2, "N"), (2, "N"), (1, "N"))
    op = emitter(g, x, one)
    assert op.sum_to(g, x) is g
    assert not op.written
    op.sum_to(g, one)
    assert written(op) == ["ReduceSum"]


@pytest.mark.parametrize("of_x", ["lengths", "symbols", "rank", "nothing"])
@pytest.mark.parametrize("of_g", ["lengths", "symbols", "rank", "nothing"])
@pytest.mark.parametrize("how", ["reshape_like", "expand_to"])
def test_reshape_and_spread(how, of_g, of_x):
    pairs = {
        "reshape_like": [((), ()), ((), (1, 1)), ((1,), ()), ((6,), (2, 3)), ((2, 3), (3, 1, 2))],
        "expand_to": [((1, 3), (2, 3)), ((2, 1), (2, 3)), ((1, 1), (4, 4)), ((2, 3), (2, 3))],
    }
    pairs["reshape_like"] += [((0, 3), (3, 0)), ((2, 0), (2, 0)), ((4, 6), (4, 2, 3))]
    for g_shape, x_shape in pairs[how]:
        g, x = inputs(stated(g_shape, of_g, "g"), stated(x_shape, of_x, "x"))
        if of_g == of_x == "rank":
            g.shape = ir.Shape([None] * len(g_shape))
            x.shape = ir.Shape([None] * len(x_shape))
        op = emitter(g, x)
        with op:
            y = getattr(op, how)(g, x)
        array = np.arange(np.prod(g_shape), dtype=np.float32).reshape(g_shape)
        found = run(op, y, array, np.zeros(x_shape, np.float32))
        change = np.reshape if how == "reshape_like" else np.broadcast_to
        np.testing.assert_array_equal(found, change(array, x_shape), str((g, x)))
        assert found.shape == x_shape


def test_shape_and_size():
    x, y, z = inputs((2, 3), ("N", 3), None)
    op = emitter(x, y, z)
    assert op.known_value(op.shape_of(x)).tolist() == [2, 3]
    assert op.dim(x, -1) == op.dim(y, 1) == 3
    assert not op.written
    for v, axis in ((y, 0), (z, -1), (z, -2), (z, 0)):
        length = op.dim(v, axis)
        arrays = [np.zeros(s, np.float32) for s in ((2, 3), (5, 3), (4, 7))]
        assert run(op, length, *arrays).tolist() == [arrays[1 if v is y else 2].shape[axis]]


@pytest.mark.parametrize("shape", [(2, 3), (9, 9), ("N", 3), None])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_filled(shape, dtype):
    [x] = inputs(shape, dtype=ir.DataType.from_numpy(np.dtype(dtype)))
    op = emitter(x)
    array = np.zeros([d if isinstance(d, int) else 4 for d in shape or (1, 2)], dtype)
    for y, number in ((op.ones_like(x), 1), (op.zeros_like(x), 0)):
        assert y.dtype == x.dtype
        found = run(op, y, array)
        np.testing.assert_array_equal(found, np.full(array.shape, number, dtype))
        assert found.dtype == dtype


def test_what_is_constant():
    [x] = inputs(())
    op = emitter(x)
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
    n = inputs((1,))[0]
    op = emitter(n)
    n.dtype = ir.DataType.INT64
    assert op.Expand(np.float32(1), n).dtype == ir.DataType.FLOAT
    with op:
        assert (2 * n).dtype == ir.DataType.INT64
        assert op.Where(op.Equal(n, 1), 0.5, n).dtype == ir.DataType.INT64


def test_indices_are_integers():
    x, boxes, scores = inputs((4,), (1, 3, 4), (1, 1, 3))
    assert emitter(boxes, scores).NonMaxSuppression(boxes, scores).dtype == ir.DataType.INT64
    values, indices = emitter(x).emit_many("TopK", [x, [2]], {}, 2)
    assert (values.dtype, indices.dtype) == (ir.DataType.FLOAT, ir.DataType.INT64)


def test_swap():
    x, z = inputs(("N", 2, 3), None)
    op = emitter(x, z)
    assert dims(op.mT(x)) == ("N", 3, 2)
    assert op.mT(z).producer().op_type == "Einsum"


def test_total():
    x, y, z = inputs((2,), (2,), (2,))
    op = emitter(x, y, z)
    assert op.total([x]) is x
    assert op.total([x, y]).producer().op_type == "Add"
    assert op.total([x, y, z]).producer().op_type == "Sum"


def test_a_context_inside_of_itself():
    a, b = inputs((2,), (2,))
    op, other = emitter(a, b), emitter()
    with op:
        with other, op:
            a * b
        a + b
    assert written(op) == ["Mul", "Add"]
    assert written(other) == []
