"""Each rewrite of the native form, before and after, where other nodes read every inner value.

The random graphs go through the rewrites that run after the sweep, too.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad.autodiff.forms import GRADIENT
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.graph.rewrite import GROUPS, rewrite
from onnxgrad.graph.traversal import all_nodes
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.native import PHASES, Target, max_pools, products
from onnxgrad.operators.shapes import is_real
from onnxgrad.runtime.device import CPU
from tests.support.emitters import assert_ordered
from tests.support.models import parse_model
from tests.support.running import in_sweep, run_named

FLOAT = ir.DataType.FLOAT


@pytest.fixture(autouse=True)
def small_things_are_rewritten(monkeypatch):
    monkeypatch.setattr(products, "LEAST_PRODUCT_LENGTH", 2)
    monkeypatch.setattr(max_pools, "LEAST_POOL_ELEMENTS", 1)


def rankless_model(inputs: dict[str, str], nodes: str, constants: str = "") -> onnx.ModelProto:
    """Return the model of nodes that compute y, of unknown rank."""
    listed = ", ".join(f"{shape} {name}" for name, shape in inputs.items())
    text = f"g ({listed}) => (float y) <{constants}> {{ {nodes} }}"
    return parse_model(text, opset=20, output_shapes=False)


def forward(inputs: dict[str, str], nodes: str, constants: str = "") -> ir.Model:
    model = to_ir(rankless_model(inputs, nodes, constants))
    infer(model)
    return model


def with_gradients(inputs: dict[str, str], nodes: str) -> ir.Model:
    """Return the model with the gradients of sum y^2 / 2 as further outputs."""
    model = prepare(rankless_model(inputs, nodes))
    graph, op = model.graph, Emit(model.graph)
    (y,) = graph.outputs
    wrt = [x for x in graph.inputs if is_real(x)]
    gradients = sweep(op, {y: op.copy_of(y)}, wrt)
    op.give([y, *gradients.values()])
    return model


def read_again(model: ir.Model) -> None:
    """Let a further output read every inner value of the graph."""
    op = Emit(model.graph)
    inner = [y for n in list(op.graph) for y in n.outputs if y.dtype in (FLOAT, ir.DataType.INT64)]
    op.give([*model.graph.outputs, *(op.Neg(y) for y in inner)])


def rewrite_and_compare(model: ir.Model, feed: dict[str, np.ndarray]) -> ir.Graph:
    """Apply all phases; assert that the order is right and the numbers stay after each of them."""
    names = [str(y.name) for y in model.graph.outputs]
    before = run_named(to_proto(model), feed)
    for phase in (GRADIENT, *PHASES):
        if not rewrite(model.graph, GROUPS[phase], Target(CPU, 1, 4)):
            continue
        assert_ordered(model.graph)
        proto = to_proto(model)
        standard = all(not node.domain for node in all_nodes(model.graph))
        if standard and all(y.shape is not None for y in model.graph.outputs):
            onnx.checker.check_model(proto)
        assert [y.name for y in model.graph.outputs] == names
        for name, value in run_named(proto, feed).items():
            scale = np.abs(before[name]).max(initial=1e-3)
            close = {"rtol": 1e-4, "atol": 2e-5 * scale, "err_msg": f"{phase}: {name}"}
            np.testing.assert_allclose(value, before[name], **close)
    return model.graph


def random(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    """Return operands with many equal and some zero elements."""
    rng = np.random.default_rng(seed)
    return {k: rng.integers(-3, 4, s).astype(np.float32) / 4 for k, s in shapes.items()}


def operators_of_graph(graph: ir.Graph) -> set[str]:
    """Return the operators of a graph and its subgraphs."""
    return {node.op_type for node in all_nodes(graph)}


READ = pytest.mark.parametrize("read", [False, True], ids=["read once", "read again"])
ROWS = pytest.mark.parametrize(  # of the graph, and of the feed
    ("rows", "n"),
    [("N", 3), ("static", 0), *(in_sweep(*pair) for pair in (("N", 0), ("N", 1), ("static", 1)))],
)


@READ
@ROWS
def test_wide_products(rows, n, read):
    r = n if rows == "static" else rows
    model = forward({"a": f"float[{r},3]", "b": f"float[{r},2]"}, "y = Gemm<transA = 1>(a, b)")
    if read:
        read_again(model)
    graph = rewrite_and_compare(model, random({"a": (n, 3), "b": (n, 2)}))
    assert "Transpose" in operators_of_graph(graph)


@READ
@ROWS
def test_scattered_rows(rows, n, read):
    r = n if rows == "static" else rows
    nodes = """j = Reshape(i, c)  d = Relu(x)  s = Shape(d)  k = Expand(j, s)
        t = Neg(w)  y = ScatterElements<axis = 0, reduction = "add">(t, k, d)"""
    shapes = {"x": f"float[{r},3]", "i": f"int64[{r}]", "w": "float[4,3]"}
    model = forward(shapes, nodes, "int64[2] c = {-1, 1}")
    if read:
        read_again(model)
    feed = random({"x": (n, 3), "w": (4, 3)}) | {"i": np.arange(n) % 2}
    graph = rewrite_and_compare(model, feed)
    assert "ScatterND" in operators_of_graph(graph)


@READ
@pytest.mark.parametrize(("rows", "n"), [("N", 3), in_sweep("static", 1)])
def test_cubic(rows, n, read):
    shape = f"float[{n if rows == 'static' else rows},2,4,6]"
    nodes = 'c = Relu(x)  y = Resize<mode = "cubic">(c, , s)'
    model = forward({"x": shape}, nodes, "float[4] s = {1.0, 1.0, 2.0, 1.5}")
    if read:
        read_again(model)
    graph = rewrite_and_compare(model, random({"x": (n, 2, 4, 6)}))
    assert "Resize" not in operators_of_graph(graph)


EDGES = np.float32([-np.inf, -200, -20, -1e-4, -0.0, 0, 1e-4, 0.7, 20, 200, np.inf, np.nan])


@READ
def test_softplus_of_large_and_small_numbers(read):
    """The digits of e^x stay, far below 0."""
    model = forward({"x": "float[12]"}, "y = Softplus(x)")
    if read:
        read_again(model)
    graph = rewrite_and_compare(model, {"x": EDGES})
    assert "Softplus" not in operators_of_graph(graph)
    found = run_named(to_proto(model), {"x": EDGES})["y"]
    with np.errstate(invalid="ignore"):
        exact = np.logaddexp(0, EDGES.astype(float))
    np.testing.assert_allclose(found, exact, rtol=3e-7, atol=1e-45)


@READ
@pytest.mark.parametrize("slope", [(1,), (3, 1), (2, 3, 4)])
def test_prelu(slope, read):
    kind = f"float[{','.join(map(str, slope))}]"
    model = with_gradients({"x": "float[N,3,4]", "s": kind}, "c = Neg(x)  y = PRelu(c, s)")
    if read:
        read_again(model)
    feed = random({"x": (2, 3, 4), "s": slope})
    graph = rewrite_and_compare(model, feed)
    assert "PRelu" not in operators_of_graph(graph)
    c = -feed["x"]
    found = run_named(to_proto(model), feed)["y"]
    np.testing.assert_array_equal(found, np.where(c > 0, c, feed["s"] * c))


BLOCKED = {  # the convolutions in blocks of channels and what is between them, with gradients
    "clipped": "c = Conv(x, w)  h = Clip(c, low, high)  y = Conv(h, v)",
    "gate": "c = Conv(x, w)  s = Sigmoid(c)  h = Mul(c, s)  y = Conv(h, v)",
    "per channel": "c = Conv(x, w)  a = Mul(c, k)  d = Sub(k, a)  h = Add(d, k)  y = Conv(h, v)",
    "residual": """c = Conv(x, w)  r = Relu(c)  d = Conv<pads = [1,1,1,1]>(r, v)  a = Add(d, c)
        h = Relu(a)  y = Conv(h, v)""",
    "channels": "c = Conv(x, w)  d = Conv(x, v)  h = Concat<axis = 1>(c, d)  y = Relu(h)",
    "pooled": """c = Conv(x, w)  h = MaxPool<kernel_shape = [2,2], strides = [2,2]>(c)
        y = Mul(h, h)""",
    "pooled, padded": """c = Conv(x, w)  y = MaxPool<kernel_shape = [3,3], strides = [3,3],
        pads = [1,0,2,1]>(c)""",
    "transposed": "c = ConvTranspose<strides = [2,2]>(x, w)  y = Relu(c)",
    "large kernel": "c = Conv<pads = [4,4,4,4]>(x, u)  y = Relu(c)",
    "reordered behind": """r = Relu(x)  c = Conv(r, p)  d = Conv<pads = [1,1,1,1]>(r, v)
        y = Add(c, d)""",
}
SHAPES = {"w": (32, 32, 3, 3), "v": (32, 32, 3, 3), "k": (32, 1, 1), "p": (32, 32, 1, 1),
          "u": (32, 32, 9, 9)}  # fmt: skip
SCALARS = {"low": np.float32(-0.5), "high": np.float32(0.5)}


@pytest.mark.usefixtures("blocked_convolutions")
@pytest.mark.parametrize("read", [in_sweep(False), True], ids=["read once", "read again"])
@pytest.mark.parametrize(("rows", "n"), [("N", 3), in_sweep("N", 1), in_sweep("static", 3)])
@pytest.mark.parametrize("name", BLOCKED)
def test_blocks(name, n, rows, read):
    shapes = {"x": (n, 32, 9, 8)} | {k: s for k, s in SHAPES.items() if f" {k})" in BLOCKED[name]}
    given = {k: a for k, a in SCALARS.items() if k in BLOCKED[name]}
    kinds = {k: f"float[{','.join(map(str, s))}]" for k, s in shapes.items()}
    kinds["x"] = kinds["x"].replace(f"[{n},", "[N,") if rows == "N" else kinds["x"]
    model = with_gradients(kinds | dict.fromkeys(given, "float"), BLOCKED[name])
    if read:
        read_again(model)
    graph = rewrite_and_compare(model, random(shapes) | given)
    assert {"ReorderInput", "ReorderOutput"} <= operators_of_graph(graph)


PLAIN = {
    "few pixels": ("y = Conv<pads = [1,1,1,1]>(x, w)", (3, 3), (5, 4, 3, 3)),
    "transposed": ("y = ConvTranspose<strides = [2,3]>(x, w)", (3, 2), (4, 5, 3, 3)),
    "pool": ("c = Conv<pads = [1,1,1,1]>(x, w)  p = Relu(c)  "
             "y = MaxPool<kernel_shape = [2,2], strides = [2,2]>(p)", (7, 6), (5, 4, 3, 3)),
}  # fmt: skip


@READ
@pytest.mark.parametrize(("rows", "n"), [("static", 3), in_sweep("N", 3), in_sweep("N", 1)])
@pytest.mark.parametrize("name", PLAIN)
def test_what_is_not_in_blocks(name, n, rows, read):
    nodes, pixels, weight = PLAIN[name]
    kinds = {"x": f"float[{n if rows == 'static' else 'N'},4,{pixels[0]},{pixels[1]}]"}
    model = with_gradients(kinds | {"w": f"float[{','.join(map(str, weight))}]"}, nodes)
    if read:
        read_again(model)
    rewrite_and_compare(model, random({"x": (n, 4, *pixels), "w": weight}))


# -- graphs that are dense in patterns ------------------------------------------------------------


class DenseDraw:
    """A random graph of few values that are read often: the nodes, with shapes as they are."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.batch = int(self.rng.choice([0, 1, 2, 3]))
        stated = "N" if self.rng.random() < 0.5 else self.batch
        x = ir.Value(name="x", type=ir.TensorType(FLOAT), shape=ir.Shape([stated, 4]))
        w = ir.Value(name="w", type=ir.TensorType(FLOAT), shape=ir.Shape([4, 4]))
        graph = ir.Graph([x, w], [], nodes=[], opset_imports={"": 20}, name="draw")
        self.op, self.values = Emit(graph), [x]  # all of shape [batch, 4]
        for _ in range(int(self.rng.integers(3, 14))):
            y = self.node()
            self.values.append(self.op.set_type_like(y, x) if y.shape is None else y)

    def pick(self) -> ir.Value:
        """Return a value, more often a late one."""
        return self.values[-1 - min(int(self.rng.geometric(0.4)) - 1, len(self.values) - 1)]

    def node(self) -> ir.Value:
        op, a, b = self.op, self.pick(), self.pick()
        w = next(v for v in op.graph.inputs if v.name == "w")
        fresh = {"fresh": bool(self.rng.random() < 0.3)}
        kind = int(self.rng.integers(17))
        if kind == 0:
            return op.emit("Mul", [a, b], {}, **fresh)
        if kind == 1:
            return op.emit(
                "Cast", [op.Cast(op.Relu(a), to=ir.DataType.BOOL)], {"to": FLOAT}, **fresh
            )
        if kind == 2:
            turned = op.emit("Transpose", [a], {"perm": [1, 0]}, **fresh)
            return op.Transpose(turned, perm=[1, 0])
        if kind == 3:
            parts = op.emit_many("Split", [a], {"axis": 1, "num_outputs": 4}, 4)
            for part in parts:
                part.shape = ir.Shape([a.shape[0], 1])
            return op.Concat(*(parts[i] for i in self.rng.permutation(4)), axis=1)
        if kind == 4:
            left, right = op.Slice(a, [0], [2], [1]), op.Slice(b, [2], [4], [1])
            return op.Concat(right, op.Concat(left, axis=1), axis=1)
        if kind == 5:
            return op.Reshape(op.emit("Reshape", [a, op.const([-1, 2])], {}, **fresh), [-1, 4])
        if kind == 6:
            return op.MatMul(a, op.Gemm(a, b, transA=1))
        if kind == 7:
            return op.MatMul(a, w)
        if kind == 8:
            mask = op.Equal(a, op.Clip(a, np.float32(-0.5), np.float32(0.5)))
            return op.Where(mask, b, np.float32(0))
        if kind == 9:
            return op.Mul(op.Mul(a, op.const(0.5)), b)
        if kind == 10:
            rows = op.Range(np.int64(0), op.Squeeze(op.Shape(a, end=1)), np.int64(1))
            index = op.Expand(op.Reshape(rows, [-1, 1]), op.Shape(a))
            return op.ScatterElements(b, index, a, axis=0, reduction="add")
        if kind == 11:
            half, third = op.ReduceMax(a, keepdims=0), op.const(0.25)
            terms = [op.Mul(a, half), op.emit("Mul", [third, b], {}, **fresh)]
            return op.Mul(op.Add(*terms) if self.rng.random() < 0.5 else terms[0], op.Neg(third))
        if kind == 12:
            total = op.ReduceSum(op.emit("Mul", [a, a], {}, **fresh), [1], keepdims=1)
            return op.Mul(op.set_type_like(op.Expand(total, op.Shape(b)), b), b)
        if kind == 13:
            cut = int(self.rng.integers(1, 4))
            parts = op.Slice(a, [0], [cut], [1]), op.Slice(b, [cut], [4], [1])
            padded = [op.Pad(parts[0], [0, 0, 0, 4 - cut]), op.Pad(parts[1], [0, cut, 0, 0])]
            return op.total([*padded, b][: int(self.rng.integers(2, 4))])
        if kind == 14:
            return op.Add(a, op.emit("Add", [b, a], {}, **fresh))
        if kind == 15:
            label = op.const(np.zeros((1, 1), np.int64))
            index = op.Expand(label, op.Concat(op.Shape(a, end=1), [1], axis=0))
            index.shape = ir.Shape([a.shape[0], 1])
            return op.Mul(op.GatherElements(op.LogSoftmax(a, axis=1), index, axis=1), b)
        return op.Tanh(op.Add(a, b))

    def model(self) -> ir.Model:
        op, read = self.op, list(self.rng.permutation(len(self.values)))
        op.give([self.values[-1], *(self.values[i] for i in read[:2] if i != len(read) - 1)])
        return ir.Model(op.graph, ir_version=9)


def check_draw(seed: int) -> int:
    """Check one draw, with or without its gradient; return how many nodes it has."""
    draw = DenseDraw(seed)
    model = draw.model()
    if seed % 2:
        graph = model.graph
        y, *others = graph.outputs
        gradients = sweep(draw.op, {y: draw.op.copy_of(y)}, list(graph.inputs))
        draw.op.give([y, *others, *gradients.values()])
    feed = random({"x": (draw.batch, 4), "w": (4, 4)}, seed)
    return rewrite_and_compare(model, feed).num_nodes()


@pytest.mark.parametrize("first", [0, *(in_sweep(n) for n in range(40, 2000, 40))])
def test_graphs_dense_in_patterns(first):
    assert sum(map(check_draw, range(first, first + 40))) > 40 * 5
