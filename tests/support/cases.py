"""The table of rules: one row per case of an operator, as one line of `onnx.parser` text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime as ort

FLOAT = onnx.TensorProto.FLOAT
DTYPES = {onnx.TensorProto.FLOAT16: np.float16, onnx.TensorProto.DOUBLE: np.float64}


def normal(x):
    return x


def positive(x):
    return np.abs(x) + 0.5


def inside(x):
    """Within (-1, 1)."""
    return 0.9 * np.tanh(x)


def above_one(x):
    return np.abs(x) + 1.5


def some_zeros(x):
    return np.where(np.arange(x.size).reshape(x.shape) % 11 > 1, x, 0)


@dataclass
class Row:
    """`body` writes y from the float inputs of the given shapes; `given` feeds the other inputs."""

    id: str
    body: str
    shapes: dict[str, tuple[int, ...]]
    domain: Callable = normal
    given: dict[str, np.ndarray] = field(default_factory=dict)
    # what must be known of the shapes for a gradient: nothing, the rank, or every length
    needs: str = ""
    opset: int = 20
    outputs: tuple[str, ...] = ("y",)
    runs: bool = True  # as it is, on onnxruntime


KINDS = {np.dtype(np.int64): "int64", np.dtype(np.int32): "int32", np.dtype(bool): "bool"}


def row_model(row: Row, known: str = "lengths") -> onnx.ModelProto:
    """Return the model of a row, of whose inputs only so much is `known`.

    "symbols": lengths of two and more, as one symbol each; "others": all but those of the first
    float input; "rank", or "nothing".
    """
    inputs = [f"{typed('float', s)} {n}" for n, s in row.shapes.items()]
    inputs += [f"{typed(KINDS[a.dtype], a.shape)} {n}" for n, a in row.given.items()]
    outputs = ", ".join(f"float {name}" for name in row.outputs)
    made = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": {row.opset}]> '
        f"g ({', '.join(inputs)}) => ({outputs}) {{ {row.body} }}"
    )
    for y in made.graph.output:
        y.type.tensor_type.ClearField("shape")
    for x in made.graph.input:
        given = x.name in row.given
        if known == "nothing":
            x.type.tensor_type.ClearField("shape")
        for i, d in enumerate(x.type.tensor_type.shape.dim):
            if known == "rank" or (known == "others" and x.name == next(iter(row.shapes))):
                d.dim_param = f"{x.name}{i}"
            elif known == "symbols" and d.dim_value > 1 and not given:
                d.dim_param = f"n{d.dim_value}"
    return made


def typed(kind: str, shape: tuple[int, ...]) -> str:
    return f"{kind}{list(shape)}" if shape else kind


def row_feed(row: Row) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(len(row.id))
    drawn = {n: np.asarray(rng.standard_normal(s)) for n, s in row.shapes.items()}
    return {n: np.asarray(row.domain(x)) for n, x in drawn.items()} | row.given


def run_in_dtype(model: onnx.ModelProto, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Run a model on arrays of which those of float64 are in the dtype of its inputs."""
    feed = {}
    for x in model.graph.input:
        array = arrays[x.name]
        dtype = DTYPES.get(x.type.tensor_type.elem_type, np.float32)
        feed[x.name] = array.astype(dtype) if array.dtype == np.float64 else array
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.enable_mem_reuse = False  # onnxruntime reuses buffers by shapes that it infers wrongly
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return session.run(None, feed)


def ints(*values):
    return np.array(values, np.int64)


M = {"x": (2, 3)}
V = {"x": (4,)}
ROWS: list[Row] = []


def add(name, body, shapes=M, domain=normal, **options):
    ROWS.append(Row(name, body, dict(shapes), domain, **options))


for (
    name
) in "Neg Exp Sin Cos Tan Sinh Cosh Tanh Asinh Atan Erf Sigmoid Softplus Softsign Mish".split():
    add(name, f"y = {name}(x)")
for name in "Abs Relu LeakyRelu Elu Selu Celu HardSigmoid HardSwish ThresholdedRelu Gelu".split():
    add(name, f"y = {name}(x)")
for name in "Log Sqrt Reciprocal".split():
    add(name, f"y = {name}(x)", domain=positive)
for name in "Asin Acos Atanh".split():
    add(name, f"y = {name}(x)", domain=inside)
add("Acosh", "y = Acosh(x)", domain=above_one)
add("Abs negative", "n = Neg(x)  y = Abs(n)", domain=positive)
add("LeakyRelu alpha", "y = LeakyRelu<alpha=0.3>(x)")
add("Elu alpha", "y = Elu<alpha=0.3>(x)")
add("Selu both", "y = Selu<alpha=0.3, gamma=2.0>(x)")
add("Celu alpha", "y = Celu<alpha=0.3>(x)")
add("HardSigmoid both", "y = HardSigmoid<alpha=0.4, beta=0.2>(x)")
add("ThresholdedRelu alpha", "y = ThresholdedRelu<alpha=0.2>(x)")
add("Shrink", "y = Shrink(x)")
add("Shrink both", "y = Shrink<lambd=0.2, bias=0.1>(x)")
add("PRelu", "y = PRelu(x, s)", {"x": (2, 3), "s": (3,)})
add("PRelu one slope", "y = PRelu(x, s)", {"x": (2, 3), "s": (1, 1)})
add("Gelu tanh", 'y = Gelu<approximate="tanh">(x)')

for name in "Add Sub Mul".split():
    for left, right in [
        ((2, 3), (2, 3)),
        ((2, 3), (3,)),
        ((3,), (2, 3)),
        ((2, 1), (1, 3)),
        ((), (2,)),
    ]:
        add(f"{name} {left} {right}", f"y = {name}(a, b)", {"a": left, "b": right})
add("Mul itself", "y = Mul(x, x)")
add("Div", "y = Div(a, b)", {"a": (2, 3), "b": (3,)}, positive)
add("Div broadcast left", "y = Div(a, b)", {"a": (1, 3), "b": (2, 3)}, positive)
add("Pow", "y = Pow(a, b)", {"a": (2, 3), "b": (3,)}, positive)
add("Pow square", "c = Constant<value_float=2.0>()  y = Pow(x, c)")
add("Pow cube", "c = Constant<value_float=3.0>()  y = Pow(x, c)")
add("Pow int", "c = Constant<value_ints=[3, 0, 1]>()  y = Pow(x, c)")
add("Pow zero", "c = Constant<value_float=0.0>()  y = Pow(x, c)")
add(
    "Pow any",
    "c = Constant<value = float[3] {-1.0, 0.5, 0.0}>()  y = Pow(x, c)",
    {"x": (3,)},
    positive,
)
add("Pow itself", "y = Pow(x, x)", domain=positive)
add("Pow of higher rank", "c = Constant<value = float[1,1] {2.0}>()  y = Pow(x, c)", V)
add("Pow int at run time", "y = Pow(x, c)", V, given={"c": ints(3, 0, 2, 1).reshape(1, 4)})
for name in "Sum Mean Max Min".split():
    add(f"{name} of one", f"y = {name}(x)")
    add(f"{name} of three", f"y = {name}(a, b, c)", {"a": (2, 3), "b": (3,), "c": (2, 1)})
add(
    "Where",
    "z = Constant<value_float=0.0>()  c = Greater(a, z)  y = Where(c, a, b)",
    {"a": (2, 3), "b": (3,)},
)
add(
    "Where condition broadcast",
    "y = Where(c, a, b)",
    {"a": (2, 3), "b": (3,)},
    given={"c": np.array([[True], [False]])},
)
add("Clip", "y = Clip(x, l, h)", {"x": (2, 9), "l": (), "h": ()}, inside)
add(
    "Clip constants",
    "l = Constant<value_float=-0.5>()  h = Constant<value_float=0.5>()  y = Clip(x, l, h)",
)
add("Clip low", "y = Clip(x, l)", {"x": (2, 5), "l": ()})
add("Clip high", "y = Clip(x, , h)", {"x": (2, 5), "h": ()})
add("Clip none", "y = Clip(x)")
add("Clip low above high", "h = Neg(l)  y = Clip(x, l, h)", {"x": (4,), "l": ()}, positive)
add("Cast", "d = Cast<to=11>(x)  e = Mul(d, d)  y = Cast<to=1>(e)")
add("CastLike", "t = Constant<value_float=1.0>()  y = CastLike(x, t)")
add("Cast to int", "i = Cast<to=7>(x)  f = Cast<to=1>(i)  y = Mul(x, f)")
add("Identity", "y = Identity(x)")

add("MatMul", "y = MatMul(a, b)", {"a": (2, 3), "b": (3, 4)})
add("MatMul vector left", "y = MatMul(a, b)", {"a": (3,), "b": (3, 4)})
add("MatMul vector right", "y = MatMul(a, b)", {"a": (2, 2, 3), "b": (3,)})
add("MatMul vectors", "y = MatMul(a, b)", {"a": (3,), "b": (3,)})
add("MatMul batch", "y = MatMul(a, b)", {"a": (2, 2, 3), "b": (2, 3, 4)})
add("MatMul batch, shared", "y = MatMul(a, b)", {"a": (5, 2, 2, 3), "b": (3, 4)})
add(
    "MatMul batches broadcast",
    "y = MatMul(a, b)",
    {"a": (2, 1, 2, 3), "b": (5, 3, 4)},
)
add("MatMul shared left", "y = MatMul(a, b)", {"a": (2, 3), "b": (4, 3, 2)})
for ta in (0, 1):
    for tb in (0, 1):
        shapes = {"a": (4, 2) if ta else (2, 4), "b": (3, 4) if tb else (4, 3), "c": (3,)}
        node = f"Gemm<transA={ta}, transB={tb}, alpha=0.5, beta=2.0>"
        add(f"Gemm {ta}{tb}", f"y = {node}(a, b, c)", shapes)
add("Gemm without c", "y = Gemm(a, b)", {"a": (2, 4), "b": (4, 3)})
add("Gemm column", "y = Gemm(a, b, c)", {"a": (2, 4), "b": (4, 3), "c": (2, 1)})
for c in ((2, 3), (1, 3), (1,), (1, 1)):
    add(f"Gemm c {c}", "y = Gemm(a, b, c)", {"a": (2, 4), "b": (4, 3), "c": c})
add("Gemm scalar", "y = Gemm(a, b, c)", {"a": (2, 4), "b": (4, 3), "c": ()})

T = {"x": (2, 3, 4)}
for name in "Sum Mean Max Min Prod L1 L2 SumSquare LogSum LogSumExp".split():
    op, domain = f"Reduce{name}", positive if name == "LogSum" else normal
    add(f"{op} all", f"y = {op}<keepdims=0>(x)", T, domain)
    add(f"{op} all kept", f"y = {op}(x)", T, domain)
    add(f"{op} axes", f"a = Constant<value_ints=[0, -1]>()  y = {op}<keepdims=0>(x, a)", T, domain)
    add(f"{op} axis kept", f"a = Constant<value_ints=[1]>()  y = {op}(x, a)", T, domain)
    add(f"{op} run-time axes", f"y = {op}<keepdims=0>(x, a)", T, domain, given={"a": ints(2)})
    if name in ("Sum", "Mean", "Max", "Min", "Prod"):
        add(f"{op} of nothing", f"y = {op}<noop_with_empty_axes=1>(x)", T, domain)
        for keep in (0, 1):
            node = f"{op}<noop_with_empty_axes=1, keepdims={keep}>"
            given = {"a": ints()}
            add(f"{op} of nothing at run time, {keep}", f"y = {node}(x, a)", T, domain, given=given)
    add(f"{op} empty axes", f"a = Constant<value_ints: ints = []>()  y = {op}(x, a)", T, domain)
add("ReduceProd zeros", "a = Constant<value_ints=[2]>()  y = ReduceProd(x, a)", T, some_zeros)

add("Softmax", "y = Softmax(x)", T)
add("Softmax axis", "y = Softmax<axis=1>(x)", T)
add("LogSoftmax", "y = LogSoftmax(x)", T)
add("LogSoftmax axis", "y = LogSoftmax<axis=0>(x)", T)
add("LayerNormalization", "y = LayerNormalization(x, s, b)", {**T, "s": (4,), "b": (4,)})
add("LayerNormalization no bias", "y = LayerNormalization<epsilon=0.01>(x, s)", {**T, "s": (4,)})
add(
    "LayerNormalization axes",
    "y = LayerNormalization<axis=1>(x, s, b)",
    {**T, "s": (3, 4), "b": (3, 4)},
)
add("LayerNormalization scale broadcast", "y = LayerNormalization<axis=-2>(x, s)", {**T, "s": (4,)})
add("LayerNormalization all", "y = LayerNormalization<axis=0>(x, s)", {**M, "s": ()})
add(
    "LayerNormalization bias broadcast",
    "y = LayerNormalization<axis=-2>(x, s, b)",
    {**T, "s": (3, 1), "b": (1, 4)},
)
statistics = dict.fromkeys("sbmv", (3,))
add(
    "BatchNormalization",
    "y = BatchNormalization(x, s, b, m, v)",
    {"x": (2, 3, 4, 2), **statistics},
    positive,
    opset=15,
)
add(
    "BatchNormalization 2-D",
    "y = BatchNormalization<epsilon=0.1>(x, s, b, m, v)",
    {"x": (5, 3), **statistics},
    positive,
    opset=15,
)
add("Dropout", "y = Dropout(x)")
add("Dropout ratio", "r = Constant<value_float=0.3>()  y = Dropout(x, r)")
add(
    "Dropout not training",
    "r = Constant<value_float=0.3>()  y, m = Dropout(x, r, t)",
    given={"t": np.array(False)},
)

add("Reshape", "s = Constant<value_ints=[3, -1]>()  y = Reshape(x, s)", T)
add("Reshape 0", "s = Constant<value_ints=[0, -1]>()  y = Reshape(x, s)", T)
add("Reshape run time", "y = Reshape(x, s)", T, given={"s": ints(4, 6)})
add("Reshape allowzero", "y = Reshape<allowzero=1>(x, s)", {"x": (0, 3)}, given={"s": ints(3, 0)})
add("Reshape to many", "y = Reshape(x, s)", {"x": ()}, given={"s": ints(1, 1)})
add("Reshape from many", "y = Reshape(x, s)", {"x": (1, 1)}, given={"s": ints()})
add("Flatten", "y = Flatten(x)", T)
add("Flatten axis", "y = Flatten<axis=-1>(x)", T)
add("Squeeze", "y = Squeeze(x)", {"x": (1, 3, 1)})
add("Squeeze axes", "a = Constant<value_ints=[-1]>()  y = Squeeze(x, a)", {"x": (1, 3, 1)})
add("Squeeze run time", "y = Squeeze(x, a)", {"x": (1, 3, 1)}, given={"a": ints(0, -1)})
add("Unsqueeze", "a = Constant<value_ints=[-1, 0]>()  y = Unsqueeze(x, a)", T)
add("Unsqueeze run time", "y = Unsqueeze(x, a)", {"x": ()}, given={"a": ints(0, 1)})
add("Transpose", "y = Transpose(x)", T)
add("Transpose perm", "y = Transpose<perm=[1, 2, 0]>(x)", T)
add("Expand", "s = Constant<value_ints=[2, 3, 4]>()  y = Expand(x, s)", {"x": (3, 1)})
add("Expand smaller", "s = Constant<value_ints=[1]>()  y = Expand(x, s)", {"x": (3, 2)})
add("Expand run time", "y = Expand(x, s)", {"x": (3, 1)}, given={"s": ints(2, 1, 4)})
add("Expand like", "s = Shape(z)  y = Expand(x, s)", {"x": (3, 1), "z": (2, 1, 4)})
add("Concat", "y = Concat<axis=1>(a, b)", {"a": (2, 3), "b": (2, 1)})
add("Concat one", "y = Concat<axis=0>(x)")
add("Concat twice", "y = Concat<axis=-1>(x, x)")
add("Concat nothing", "y = Concat<axis=0>(a, b, a)", {"a": (2, 3), "b": (0, 3)})
add(
    "Split", "s = Constant<value_ints=[1, 3]>()  y, z = Split<axis=-1>(x, s)", T, outputs=("y", "z")
)
add("Split, one unused", "s = Constant<value_ints=[1, 3]>()  y, z = Split<axis=-1>(x, s)", T)
add("Split even", "y, z = Split<num_outputs=2>(x)", {"x": (4, 3)}, outputs=("y", "z"))
add("Split uneven", "y, z = Split<num_outputs=2, axis=1>(x)", T, outputs=("z", "y"))
add("Split, last only", "y, z, v = Split<num_outputs=3>(x)", {"x": (5, 3)}, outputs=("v",))
add("Split run time", "y, z = Split<axis=1>(x, s)", T, given={"s": ints(1, 2)}, outputs=("z",))


LAST = 2**63 - 1


def slices(name, starts, ends, axes=None, steps=None, shapes=T):
    """Add a Slice with constant bounds, and one with bounds known at run time."""
    parts = {"s": starts, "e": ends, "a": axes, "t": steps}
    used = {k: v for k, v in parts.items() if v is not None}
    arguments = ", ".join(k if k in used else "" for k in parts).rstrip(", ")
    body = "  ".join(f"{k} = Constant<value_ints={v}>()" for k, v in used.items())
    add(name, f"{body}  y = Slice(x, {arguments})", shapes)
    given = {k: ints(*v) for k, v in used.items()}
    add(f"{name}, run time", f"y = Slice(x, {arguments})", shapes, given=given)


slices("Slice", [0, 1], [2, 3])
slices("Slice axes", [1], [3], [-1])
slices("Slice negative", [-3], [-1], [2])
slices("Slice beyond", [1], [1000], [1])
slices("Slice steps", [0, 3], [3, 0], [1, 2], [2, -1])
slices("Slice reversed", [-1], [-1000], [1], [-1])
slices("Slice nothing", [2], [1], [2])
slices("Slice past the end", [9], [LAST], [1])
slices("Slice before the start", [0], [-9], [1])
slices("Slice the last", [-2], [LAST], [-1])
slices("Slice the first", [0], [2], [2])
slices("Slice all", [0], [LAST], [0])
slices("Slice without the last", [0, 1], [-1, LAST], [2, 0])

ONE = "a = Constant<value_ints=[1]>()"
zero, last = "s = Constant<value_ints=[0]>()", f"e = Constant<value_ints=[{LAST}]>()"
add("Slice, end at run time", f"{ONE}  {zero}  y = Slice(x, s, e, a)", T, given={"e": ints(-1)})
add("Slice, start at run time", f"{ONE}  {last}  y = Slice(x, s, e, a)", T, given={"s": ints(2)})
add("Slice, leading axes", "y = Slice(x, s, e)", T, given={"s": ints(0, 1), "e": ints(1, 3)})
add("Slice, ends at run time", f"{zero}  y = Slice(x, s, e)", T, given={"e": ints(1)})

PADS = {
    "constant": [0, 1, 2, 1],
    "reflect": [1, 2, 0, 1],
    "edge": [2, 0, 1, 1],
    "wrap": [0, 1, 1, 2],
}
for mode, pads in PADS.items():
    # wrap came with opset 19
    add(
        f"Pad {mode}",
        f'p = Constant<value_ints={pads}>()  y = Pad<mode="{mode}">(x, p)',
        {"x": (3, 4)},
    )
    add(
        f"Pad {mode}, axes",
        f'y = Pad<mode="{mode}">(x, p, , a)',
        {"x": (3, 4)},
        given={"p": ints(1, 2), "a": ints(-1)},
    )
add("Pad negative", "p = Constant<value_ints=[-1, 1, 0, -2]>()  y = Pad(x, p)", {"x": (3, 4)})
add("Pad value", "y = Pad(x, p, v)", {"x": (2, 3), "v": ()}, given={"p": ints(1, 0, 0, 2)})
add(
    "Pad reflect, value unused",
    'y = Pad<mode="reflect">(x, p, v)',
    {"x": (2, 3), "v": ()},
    given={"p": ints(1, 0, 0, 2)},
)

for axis in (0, 1, -1):
    for name, index in {
        "matrix": "[[0, 2], [-1, 0]]",
        "vector": "[1, 1, 0]",
        "scalar": "1",
    }.items():
        values = np.array(eval(index))
        add(
            f"Gather {axis} {name}",
            f"y = Gather<axis={axis}>(x, i)",
            {"x": (3, 4, 3)},
            given={"i": values},
        )
for at in (-1, -3, 0, 2):
    name, index = f"Gather constant scalar {at}", f"i = Constant<value_int={at}>()"
    add(name, f"{index}  y = Gather<axis=1>(x, i)", T)
    add(f"{name}, axis -2", f"{index}  y = Gather<axis=-2>(x, i)", T)
add("Gather constant", "i = Constant<value_ints=[1, 1]>()  y = Gather(x, i)", T)
for axis in (0, 1):
    at = np.array([1, -1, 1], np.int32)
    add(f"Gather int32 {axis}", f"y = Gather<axis={axis}>(x, i)", T, given={"i": at})
PLACES = np.array([[0, 1, 1], [1, 0, 0]])
add("GatherElements", "y = GatherElements<axis=1>(x, i)", {"x": (2, 4)}, given={"i": PLACES})
add("GatherND", "y = GatherND(x, i)", T, given={"i": np.array([[0, 1], [1, 2], [0, 1]])})
add(
    "GatherND batch",
    "y = GatherND<batch_dims=1>(x, i)",
    T,
    given={"i": np.array([[[0], [2], [0]], [[1], [1], [2]]])},
)
for reduction in ("none", "add"):
    given = {"i": np.array([[1, 0], [3, 2]])}
    add(
        f"ScatterElements {reduction}",
        f'y = ScatterElements<axis=1, reduction="{reduction}">(x, i, u)',
        {"x": (2, 4), "u": (2, 2)},
        given=given,
    )
    add(
        f"ScatterND {reduction}",
        f'y = ScatterND<reduction="{reduction}">(x, i, u)',
        {"x": (2, 4), "u": (2,)},
        given={"i": np.array([[1, 0], [0, 3]])},
    )

model, feed, run = row_model, row_feed, run_in_dtype
