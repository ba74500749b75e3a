"""Rows of Einsum, CumSum, CumProd, Det, Range, Mod, Swish, and of corners of the older rules."""

from __future__ import annotations

import numpy as np

from tests.support.cases import add, ints, normal, positive, some_zeros

EQUATIONS = {
    "ij,jk->ik": [(2, 3), (3, 4)],
    "ij,jk": [(2, 3), (3, 4)],
    "kj,ji": [(2, 3), (3, 4)],
    " i j , j k -> k i ": [(2, 3), (3, 4)],
    "aB,Bc->ca": [(2, 3), (3, 4)],
    "bhqd,bhkd->bhqk": [(2, 1, 3, 4), (2, 1, 2, 4)],
    "ij->ji": [(2, 3)],
    "ji": [(2, 3)],
    "ij": [(2, 3)],
    "ij->": [(2, 3)],
    "ij->i": [(2, 3)],
    "ij->j": [(2, 3)],
    "ijk->ik": [(2, 3, 4)],
    "i,i": [(3,), (3,)],
    "i,j": [(3,), (2,)],
    "i,j->i": [(3,), (2,)],
    "i,j->": [(3,), (2,)],
    "ij,kl->": [(2, 3), (3, 2)],
    "ij,jk->i": [(2, 3), (3, 4)],
    "ij,kj->j": [(2, 3), (4, 3)],
    # one operand has an index alone, in front, in between, at the end
    "ijk,j->j": [(2, 3, 4), (3,)],
    "ijk,ik->k": [(2, 3, 4), (2, 4)],
    # three and more
    "ij,jk,kl->il": [(2, 3), (3, 4), (4, 2)],
    "i,i,i->i": [(3,), (3,), (3,)],
    "ij,jk,ki->": [(2, 3), (3, 4), (4, 2)],
    "i,j,k,l->lkji": [(2,), (3,), (2,), (1,)],
    "ij,i,j,->": [(2, 3), (2,), (3,), ()],
    # scalars
    "->": [()],
    ",": [(), ()],
    ",i->i": [(), (3,)],
    "i,->": [(3,), ()],
    # diagonals
    "ii->i": [(3, 3)],
    "ii": [(3, 3)],
    "iii->i": [(2, 2, 2)],
    "iii": [(2, 2, 2)],
    "iij->ij": [(3, 3, 2)],
    "iij->ji": [(3, 3, 2)],
    "iij->j": [(3, 3, 2)],
    "iji->j": [(3, 2, 3)],
    "jii->": [(2, 3, 3)],
    "ijij->ij": [(2, 3, 2, 3)],
    "ijji->i": [(2, 3, 3, 2)],
    "ii,i->i": [(3, 3), (3,)],
    "ii,jj->ij": [(3, 3), (2, 2)],
    "ii,ij->j": [(3, 3), (3, 2)],
    "iji,kk->jk": [(2, 3, 2), (2, 2)],
    # an ellipsis
    "...ij,...jk->...ik": [(2, 2, 3), (2, 3, 2)],
    "...ij,...jk": [(2, 2, 3), (2, 3, 2)],
    "...ij,jk->...ik": [(2, 2, 3), (3, 2)],
    "ij,...jk->...ik": [(2, 3), (2, 3, 2)],
    "ij,...jk->i...k": [(2, 3), (2, 3, 2)],
    "...ii->...i": [(2, 3, 3)],
    "...ii->...": [(2, 3, 3)],
    "ii...->...": [(3, 3, 2)],
    "i...i->i...": [(3, 2, 2, 3)],
    "i...->...i": [(2, 3, 4)],
    "i...j->j...i": [(2, 3, 2, 2)],
    "i...j,j->...": [(2, 3, 2, 2), (2,)],
    "i...,i...->...": [(2, 3), (2, 3)],
    "...i,...j,...k->...ijk": [(2, 3), (1, 2), (2, 2)],
    "...,...->...": [(2, 1), (1, 3)],
    "...,...": [(2, 3), (2, 3)],
    "...i,->...i": [(2, 3), ()],
    "...": [(2, 3)],
    "ij->...ij": [(2, 3)],
    # lengths of one that are repeated
    "...i,...i->...": [(1, 3), (2, 3)],
    "i...,j...->j...": [(2, 1, 3), (2, 2, 1)],
    "ij,jk->ik, one": [(2, 1), (3, 2)],
    "ij,ij->i, one": [(2, 3), (2, 1)],
    "ii,i->, one": [(1, 1), (3,)],
    # no dimensions behind an ellipsis
    "...ij->...ji": [(2, 3)],
    "i...j,...->...ij": [(2, 3), ()],
    # nothing
    "ij->j, empty": [(0, 3)],
    "ij->i, empty": [(0, 3)],
}
for name, shapes in EQUATIONS.items():
    operands = dict(zip("xyzw", shapes, strict=False))
    equation = name.split(", ")[0] if name.endswith(("one", "empty")) else name
    add(
        f"Einsum {name}",
        f'o = Einsum<equation="{equation}">({", ".join(operands)})',
        operands,
        outputs=("o",),
    )
add("Einsum of itself", 'y = Einsum<equation="ij,kj->ik">(x, x)')

for exclusive in (0, 1):
    for reverse in (0, 1):
        how = f"<exclusive={exclusive}, reverse={reverse}>"
        for axis in (0, -1):
            at = f"a = Constant<value_int={axis}>()"
            add(f"CumSum {how} {axis}", f"{at}  y = CumSum{how}(x, a)", {"x": (3, 2, 4)})
        at = {"a": np.array(1, np.int32)}
        add(f"CumSum {how} run time", f"y = CumSum{how}(x, a)", {"x": (2, 3)}, given=at)
        for domain in (normal, some_zeros):
            what = f"{how} {domain.__name__}"
            add(
                f"CumProd {what}",
                f"y = CumProd{how}(x, a)",
                {"x": (2, 4)},
                domain,
                given=at,
                opset=26,
            )
        at = f"a = Constant<value_int=-2>()  y = CumProd{how}(x, a)"
        add(f"CumProd {how}", at, {"x": (2, 3, 2)}, opset=26)


def zeros_in_rows(x):
    """None, one, two, three in a row, at the ends and between."""
    x = x.copy()
    for row, places in enumerate(([], [0], [2], [4], [0, 4], [1, 2], [0, 2, 3], [0, 1, 2, 3, 4])):
        x[row, places] = 0
    return x


for how in ("", "<exclusive=1>", "<reverse=1>", "<exclusive=1, reverse=1>"):
    body = f"a = Constant<value_int=1>()  y = CumProd{how}(x, a)"
    add(f"CumProd zeros {how}", body, {"x": (8, 5)}, zeros_in_rows, opset=26)
add("CumSum nothing", "a = Constant<value_int=0>()  y = CumSum(x, a)", {"x": (0, 2)})


def singular(x):
    """Matrices of full rank, of one less, of two less, zero, and a permutation."""
    x = x.copy()
    x[1, 0] = x[1, 1]
    x[2, 0] = x[2, 1] = 2 * x[2, 2]
    x[3] = 0
    x[4] = np.eye(3)[[2, 0, 1]]
    return x


for shape in (
    (1, 1),
    (2, 2),
    (3, 3),
    (4, 4),
    (2, 3, 3),
    (2, 1, 2, 2),
    (2, 1, 1),
    (0, 0),
    (0, 2, 2),
):
    add(f"Det {shape}", "y = Det(x)", {"x": shape})
add("Det opset 22", "y = Det(x)", {"x": (2, 2)}, opset=22)
add("Det singular", "y = Det(x)", {"x": (5, 3, 3)}, singular)

LIMITS = "l = Constant<value_float={}>()"
add("Range", f"{LIMITS.format(9.3)}  y = Range(s, l, d)", {"s": (), "d": ()}, positive)
add(
    "Range down",
    f"{LIMITS.format(-7.7)}  d = Neg(t)  y = Range(s, l, d)",
    {"s": (), "t": ()},
    positive,
)
add(
    "Range limit",
    "t = Constant<value_float=7.0>()  m = Add(l, t)  y = Range(s, m, d)",
    {"s": (), "l": (), "d": ()},
    positive,
)
add("Range of nothing", f"{LIMITS.format(-7.7)}  y = Range(s, l, d)", {"s": (), "d": ()}, positive)

for a, b in [((2, 3), (2, 3)), ((2, 3), (3,)), ((), (2, 3))]:
    add(
        f"Mod {a} {b}",
        "s = Constant<value_float=7.0>()  c = Mul(a, s)  y = Mod<fmod=1>(c, b)",
        {"a": a, "b": b},
    )
add("Swish", "y = Swish(x)", opset=24)
add("Swish alpha", "y = Swish<alpha=-0.7>(x)", opset=24)

for node in [
    "LeakyRelu<alpha=-0.3>", "Elu<alpha=-0.5>", "Selu<alpha=-1.0, gamma=-2.0>", "Celu<alpha=-0.5>",
    "HardSigmoid<alpha=-0.3, beta=0.4>", "HardSigmoid<alpha=0.3, beta=2.0>",
    "ThresholdedRelu<alpha=-0.5>", "ThresholdedRelu<alpha=0.0>", "Shrink<lambd=-0.5, bias=0.2>",
    "Shrink<lambd=0.0, bias=-0.3>",
]:  # fmt: skip
    add(node, f"y = {node}(x)", {"x": (3, 4)})
add("Elu opset 22", "y = Elu<alpha=0.5>(x)", opset=22)

for name in "L1 L2 SumSquare LogSum LogSumExp".split():
    domain = positive if name == "LogSum" else normal
    for keep in (0, 1):
        node = f"Reduce{name}<noop_with_empty_axes=1, keepdims={keep}>"
        empty = "a = Constant<value_ints: ints = []>()"
        add(f"{node}", f"y = {node}(x)", domain=domain)
        add(f"{node}, constant", f"{empty}  y = {node}(x, a)", domain=domain)
        add(f"{node}, run time", f"y = {node}(x, a)", domain=domain, given={"a": ints()})
        add(f"{node}, one axis", f"y = {node}(x, a)", domain=domain, given={"a": ints(-1)})

for shape in ((3, 1, 1), (1, 3, 1, 2), (1,), ()):
    if shape:
        add(f"PRelu slope {shape}", "y = PRelu(x, s)", {"x": (2, 3, 2, 2), "s": shape})


def signs(x):
    """Both signs, and zero."""
    return np.where(np.arange(x.size).reshape(x.shape) % 4 == 3, 0, x)


def away_from_zero(x):
    return x + np.sign(x)


add(
    "Pow negative base",
    "y = Pow(x, c)",
    {"x": (6,)},
    away_from_zero,
    given={"c": ints(3, 2, -1, 1, 0, -2)},
)
add("Pow zero base", "c = Constant<value_ints=[3, 2, 5, 1]>()  y = Pow(x, c)", {"x": (4,)}, signs)
add("Pow int32", "y = Pow(x, c)", {"x": (2, 3)}, given={"c": np.array([[3], [2]], np.int32)})
add("Pow broadcast base", "y = Pow(x, b)", {"x": (2, 1), "b": (2, 3)}, positive)
add("Pow double exponent", "d = Cast<to=11>(b)  y = Pow(x, d)", {"x": (2, 3), "b": (3,)}, positive)
add("Max of five", "y = Max(a, b, c, d, a)", {"a": (2, 3), "b": (3,), "c": (2, 1), "d": ()})
add("Min of five", "y = Min(a, b, c, d, a)", {"a": (2, 3), "b": (3,), "c": (2, 1), "d": ()})
add(
    "Where all broadcast",
    "y = Where(c, a, b)",
    {"a": (3,), "b": ()},
    given={"c": np.array([[True], [False]])},
)
add("Gemm beta 0", "y = Gemm<beta=0.0>(a, b, c)", {"a": (2, 4), "b": (4, 3), "c": (3,)})
add("Gemm alpha 0", "y = Gemm<alpha=0.0>(a, b, c)", {"a": (2, 4), "b": (4, 3), "c": (3,)})

for a, b in [
    ((3,), (2, 3, 2)), ((2, 3), (2, 3, 2)), ((2, 1, 2, 3), (3,)), ((2, 1, 2, 3), (2, 3, 2)),
    ((1, 2, 3), (2, 3, 2)), ((2, 2, 3), (1, 2, 3, 1)), ((3,), (2, 1, 3, 2)), ((1,), (1,)),
    ((2, 0), (0, 3)), ((0, 2, 3), (3, 2)),
]:  # fmt: skip
    add(f"MatMul {a} {b}", "y = MatMul(a, b)", {"a": a, "b": b})
