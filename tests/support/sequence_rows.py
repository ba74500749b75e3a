"""Rows for operators on sequences and Optionals.

Places that are fed are known only at run time: nothing is rewritten before.
"""

from __future__ import annotations

import numpy as np

from tests.support.cases import T, add, ints

AB = {"a": (2, 3), "b": (2, 3)}
UNEQUAL = {"a": (2, 3), "b": (1, 3)}
MADE = "s = SequenceConstruct(a, b)"
JOINED = "y = ConcatFromSequence<axis=0>(t)"


def placed(name, body, at, shapes):
    """Add a row whose operand i is a place known at run time, and one where it is a constant."""
    add(f"{name} {at}", body, shapes, given={"i": np.array(at)})
    add(f"{name} constant {at}", f"i = Constant<value_int={at}>()  {body}", shapes)


for at in (0, 1, -1, -2):
    placed("SequenceAt", f"{MADE}  y = SequenceAt(s, i)", at, AB)
int32 = {"i": np.array(-1, np.int32)}
add("SequenceAt int32", f"{MADE}  y = SequenceAt(s, i)", UNEQUAL, given=int32)
add(
    "SequenceAt often",
    """s = SequenceConstruct(a, b, a)  u = SequenceAt(s, i)  v = SequenceAt(s, j)
    w = SequenceAt(s, k)  z = Mul(u, v)  y = Mul(z, w)""",
    AB,
    given={"i": np.array(1), "j": np.array(-1), "k": np.array(-2)},
)
add(
    "SequenceAt beside another reader",
    f"{MADE}  u = SequenceAt(s, i)  t = Identity(s)  c = ConcatFromSequence<axis=0>(t)"
    "  y = MatMul(c, u)",
    {"a": (3, 3), "b": (3, 3)},
    given={"i": np.array(1)},
)
for at in (0, 1, 2, -1, -2):
    body = f"e = Exp(a)  {MADE}  t = SequenceInsert(s, e, i)  {JOINED}"
    placed("SequenceInsert", body, at, UNEQUAL)
add("SequenceInsert int32", body, UNEQUAL, given=int32)
pieces = "s = SplitToSequence<axis=1>(x)"
add("SequenceInsert at the end", f"{MADE}  t = SequenceInsert(s, a)  {JOINED}", UNEQUAL)
late = f"s = SplitToSequence(b)  t = SequenceInsert(s, a)  {JOINED}"
add("SequenceInsert into pieces", late, AB)
add(
    "SequenceInsert into nothing",
    f"s = SequenceEmpty()  r = SequenceInsert(s, a)  t = SequenceInsert(r, b)  {JOINED}",
    UNEQUAL,
)
for at in (0, 1, -1, -3):
    body = f"{pieces}  t = SequenceErase(s, i)  y = ConcatFromSequence<axis=1>(t)"
    placed("SequenceErase", body, at, T)
add(
    "SequenceErase the end",
    f"{pieces}  t = SequenceErase(s)  y = ConcatFromSequence<axis=1>(t)",
    T,
)

TWO = "u = SequenceAt(t, i)  v = SequenceAt(t, j)  w = ReduceSum<keepdims=0>(u)  y = Mul(v, w)"
PIECES = {
    "": ("", None),
    "axis": ("<axis=1>", None),
    "axes dropped": ("<axis=-2, keepdims=0>", None),
    "of two": ("<axis=2>", np.array(2)),
    "the last shorter": ("<axis=1>", np.array(2)),
    "of any length": ("<axis=2>", ints(1, 0, 3)),
    "in one": ("<axis=1, keepdims=0>", ints(3)),
}
for name, (attributes, lengths) in PIECES.items():
    given = {"i": np.array(0), "j": np.array(-1)}
    if lengths is None:
        add(f"SplitToSequence {name}", f"t = SplitToSequence{attributes}(x)  {TWO}", T, given=given)
        continue
    body = f"t = SplitToSequence{attributes}(x, k)  {TWO}"
    add(f"SplitToSequence {name}", body, T, given=given | {"k": lengths})
    value = f"value_ints={lengths.tolist()}" if lengths.ndim else f"value_int={lengths}"
    add(f"SplitToSequence {name}, constant", f"k = Constant<{value}>()  {body}", T, given=given)
for axis in (0, 2, -1, -3):
    joined = f"y = ConcatFromSequence<axis={axis}, new_axis=1>"
    add(f"ConcatFromSequence new axis {axis}", f"{MADE}  {joined}(s)", AB)
    late = f"{MADE}  t = SequenceErase(s, i)  r = SequenceInsert(t, a)  {joined}(r)"
    add(f"ConcatFromSequence new axis {axis}, run time", late, AB, given={"i": np.array(1)})
for axis in (0, -2):
    late = f"{MADE}  t = SequenceErase(s, i)  r = SequenceInsert(t, b)"
    body = f"{late}  y = ConcatFromSequence<axis={axis}>(r)"
    add(f"ConcatFromSequence {axis}, run time", body, UNEQUAL, given={"i": np.array(0)})
    add(f"ConcatFromSequence {axis}", f"{MADE}  y = ConcatFromSequence<axis={axis}>(s)", UNEQUAL)
for axis, dropped in ((1, 0), (1, 1), (-1, 0)):
    split = f"s = SplitToSequence<axis={axis}, keepdims={1 - dropped}>(x)"
    body = f"{split}  z = ConcatFromSequence<axis={axis}, new_axis={dropped}>(s)  y = Exp(z)"
    add(f"ConcatFromSequence of pieces {axis} {dropped}", body, T)
add(
    "SequenceLength",
    f"{MADE}  n = SequenceLength(s)  f = Cast<to=1>(n)  z = Mul(a, f)  y = Exp(z)",
    AB,
)
add(
    "SequenceMap",
    f"{MADE}  t = SequenceMap<body = f (float[N, 3] e) => (float[N, 3] q) {{ q = Exp(e) }}>(s)  {JOINED}",
    UNEQUAL,
)
add(
    "SequenceMap of two",
    f"""{MADE}  r = SequenceConstruct(b, a)
    u, t = SequenceMap<body = f (float[2, 3] e, float[2, 3] h, float[2, 3] k)
        => (float[2, 3] p, float[2, 3] q) {{ p = Mul(e, h)  q = Mul(p, k) }}>(s, r, a)
    v = ConcatFromSequence<axis=0>(u)  w = {JOINED[4:]}  y = Add(v, w)""",
    AB,
)
add("Optional", "o = Optional(x)  y = OptionalGetElement(o)", T)
add("OptionalGetElement of a tensor", "z = Exp(x)  y = OptionalGetElement(z)", T)
add(
    "Optional of a sequence",
    f"{MADE}  o = Optional(s)  e = OptionalGetElement(o)  y = SequenceAt(e, i)",
    AB,
    given={"i": np.array(1)},
)
add(
    "Optional chosen",
    """o = If<then_branch = t () => (u) { u = Optional(a) },
        else_branch = f () => (v) { v = Optional(b) }>(c)
    z = OptionalGetElement(o)  y = Exp(z)""",
    AB,
    given={"c": np.array(False)},
)
add(
    "Optional of nothing",
    """n = Optional<type = float[2, 3]>()  h = OptionalHasElement(n)  f = Cast<to=1>(h)
    z = Mul(x, f)  y = Sub(x, z)""",
    T,
)
