"""The table of rules: one row per case of an operator, as one line of `onnx.parser` text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


def normal(x):
    return x


def positive(x):
    return np.abs(x) + 0.5


def inside(x):
    """Within (-1, 1)."""
    return 0.9 * np.tanh(x)


def above_one(x):
    return np.abs(x) + 1.5


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
add("Cast", "d = Cast<to=11>(x)  e = Mul(d, d)  y = Cast<to=1>(e)")
add("CastLike", "t = Constant<value_float=1.0>()  y = CastLike(x, t)")
add("Identity", "y = Identity(x)")

add("MatMul", "y = MatMul(a, b)", {"a": (2, 3), "b": (3, 4)}, needs="rank")
add("MatMul vector left", "y = MatMul(a, b)", {"a": (3,), "b": (3, 4)}, needs="rank")
add("MatMul vector right", "y = MatMul(a, b)", {"a": (2, 2, 3), "b": (3,)}, needs="rank")
add("MatMul vectors", "y = MatMul(a, b)", {"a": (3,), "b": (3,)}, needs="rank")
add("MatMul batch", "y = MatMul(a, b)", {"a": (2, 2, 3), "b": (2, 3, 4)}, needs="rank")
add("MatMul batch, shared", "y = MatMul(a, b)", {"a": (5, 2, 2, 3), "b": (3, 4)}, needs="rank")
add(
    "MatMul batches broadcast",
    "y = MatMul(a, b)",
    {"a": (2, 1, 2, 3), "b": (5, 3, 4)},
    needs="rank",
)
add("MatMul shared left", "y = MatMul(a, b)", {"a": (2, 3), "b": (4, 3, 2)}, needs="rank")
for ta in (0, 1):
    for tb in (0, 1):
        shapes = {"a": (4, 2) if ta else (2, 4), "b": (3, 4) if tb else (4, 3), "c": (3,)}
        node = f"Gemm<transA={ta}, transB={tb}, alpha=0.5, beta=2.0>"
        add(f"Gemm {ta}{tb}", f"y = {node}(a, b, c)", shapes)
add("Gemm without c", "y = Gemm(a, b)", {"a": (2, 4), "b": (4, 3)})
add("Gemm column", "y = Gemm(a, b, c)", {"a": (2, 4), "b": (4, 3), "c": (2, 1)})
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
    add(f"{op} empty axes", f"a = Constant<value_ints: ints = []>()  y = {op}(x, a)", T, domain)

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
    needs="rank",
)
add("LayerNormalization scale broadcast", "y = LayerNormalization<axis=-2>(x, s)", {**T, "s": (4,)})
statistics = dict.fromkeys("sbmv", (3,))
add(
    "BatchNormalization",
    "y = BatchNormalization(x, s, b, m, v)",
    {"x": (2, 3, 4, 2), **statistics},
    positive,
    needs="rank",
    opset=15,
)
add(
    "BatchNormalization 2-D",
    "y = BatchNormalization<epsilon=0.1>(x, s, b, m, v)",
    {"x": (5, 3), **statistics},
    positive,
    needs="rank",
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
add("Flatten", "y = Flatten(x)", T)
add("Flatten axis", "y = Flatten<axis=-1>(x)", T)
add("Squeeze", "y = Squeeze(x)", {"x": (1, 3, 1)})
add("Squeeze axes", "a = Constant<value_ints=[-1]>()  y = Squeeze(x, a)", {"x": (1, 3, 1)})
add("Unsqueeze", "a = Constant<value_ints=[-1, 0]>()  y = Unsqueeze(x, a)", T)
add("Transpose", "y = Transpose(x)", T)
add("Transpose perm", "y = Transpose<perm=[1, 2, 0]>(x)", T)
add("Expand", "s = Constant<value_ints=[2, 3, 4]>()  y = Expand(x, s)", {"x": (3, 1)})
add("Expand smaller", "s = Constant<value_ints=[1]>()  y = Expand(x, s)", {"x": (3, 2)})
add("Expand run time", "y = Expand(x, s)", {"x": (3, 1)}, given={"s": ints(2, 1, 4)})
add("Concat", "y = Concat<axis=1>(a, b)", {"a": (2, 3), "b": (2, 1)})
add("Concat one", "y = Concat<axis=0>(x)")
add("Concat twice", "y = Concat<axis=-1>(x, x)")
add(
    "Split", "s = Constant<value_ints=[1, 3]>()  y, z = Split<axis=-1>(x, s)", T, outputs=("y", "z")
)
add("Split, one unused", "s = Constant<value_ints=[1, 3]>()  y, z = Split<axis=-1>(x, s)", T)
add("Split even", "y, z = Split<num_outputs=2>(x)", {"x": (4, 3)}, outputs=("y", "z"))
add("Split uneven", "y, z = Split<num_outputs=2, axis=1>(x)", T, outputs=("z", "y"))


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
add("Gather constant scalar", "i = Constant<value_int=-1>()  y = Gather<axis=1>(x, i)", T)
add("Gather constant", "i = Constant<value_ints=[1, 1]>()  y = Gather(x, i)", T)
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
