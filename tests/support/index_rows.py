"""Rows for operators that read or write at indices, and for those that rearrange whole axes."""

from __future__ import annotations

import numpy as np

from tests.support.cases import LAST, M, T, V, add, ints


def some_zero(x):
    """Every second element zero: places get none, one, two and three of them."""
    return np.where(np.arange(x.size).reshape(x.shape) % 2 == 0, 0, x)


def constant_nodes(**values):
    """Return the text of Constants, to stand before a node."""
    return "  ".join(f"{k} = Constant<value_ints: ints = {v}>()" for k, v in values.items())


# -- reading at indices --------------------------------------------------------------------------

for indices in ([[0, 2]], [[0], [2]], [[1, 1], [0, -1]]):
    body = "l = LogSoftmax<axis=-1>(x)  y = GatherElements<axis=1>(l, i)"
    some = {"i": np.array(indices)}
    add(
        f"GatherElements LogSoftmax {len(indices)} {len(indices[0])}",
        body,
        {"x": (2, 4)},
        given=some,
    )

for axis in (0, 1, 2, -1, -2):
    twice = np.array([[[0, -1], [1, 1]], [[1, 0], [-2, 0]]])
    node = f"GatherElements<axis={axis}>(x, i)"
    add(f"GatherElements fewer places {axis}", f"y = {node}", {"x": (2, 3, 3)}, given={"i": twice})
add("GatherElements constant", f"{constant_nodes(i=[3, -1, 3])}  y = GatherElements(x, i)", V)
int32 = np.array([[1, -1], [0, 1]], np.int32)
add("GatherElements int32", "y = GatherElements<axis=1>(x, i)", given={"i": int32})
empty = np.zeros((2, 0), np.int64)
add("GatherElements nothing", "y = GatherElements<axis=1>(x, i)", given={"i": empty})
add("GatherND negative", "y = GatherND(x, i)", T, given={"i": np.array([[-1], [0], [-1]])})
add("GatherND all of an index", "y = GatherND(x, i)", T, given={"i": np.array([[-1, 2, -4]])})
add("GatherND one place", "y = GatherND(x, i)", T, given={"i": ints(1, -1)})
places = np.array([[[1], [-1], [1]], [[0], [3], [0]]])
add("GatherND two batch axes", "y = GatherND<batch_dims=2>(x, i)", T, given={"i": places})
for axis in (2, -2, -3):
    for name, index in {"matrix": [[1, -2], [0, 1]], "scalar": -2}.items():
        body, given = f"y = Gather<axis={axis}>(x, i)", {"i": np.array(index)}
        add(f"Gather of rank 4, {axis} {name}", body, {"x": (2, 2, 3, 2)}, given=given)
add("Gather of vector", "y = Gather(x, i)", V, given={"i": np.array(-4)})
add("Gather nothing", "y = Gather<axis=1>(x, i)", given={"i": empty[0]})
for axis in (0, 1, -1, -3):
    given = {"c": np.array([False, True])}  # shorter than the axis
    add(f"Compress {axis}", f"y = Compress<axis={axis}>(x, c)", {"x": (2, 3, 4)}, given=given)
add("Compress flat", "y = Compress(x, c)", T, given={"c": np.arange(20) % 3 == 1})
add("Compress nothing", "y = Compress<axis=1>(x, c)", T, given={"c": np.zeros(3, bool)})
add("Compress of vector", "y = Compress<axis=0>(x, c)", V, given={"c": np.arange(4) != 1})

# -- writing at indices --------------------------------------------------------------------------

for axis in (0, 1, -1):
    i = np.array([[1, 0], [-1, -2]])
    node, shapes = f"ScatterElements<axis={axis}>(x, i, u)", {"x": (3, 3), "u": (2, 2)}
    add(f"ScatterElements {axis}", f"y = {node}", shapes, given={"i": i})
for reduction in ("none", "add", "mul", "max", "min"):
    kind = f'reduction="{reduction}"'
    twice = {"i": np.array([[1, 0, -3, 1], [3, 3, 3, -1]])}  # on one place up to four
    body, shapes = f"y = ScatterElements<axis=1, {kind}>(x, i, u)", {"x": (3, 4), "u": (2, 4)}
    name = f"ScatterElements {reduction}"
    add(f"{name}, repeated", body, shapes, given=twice)
    i = np.array([[[1, 0]], [[0, 0]]], np.int32)
    shapes = {"x": (2, 2, 2), "u": (2, 1, 2)}
    for axis in (0, -2, -1):
        body = f"y = ScatterElements<axis={axis}, {kind}>(x, i, u)"
        add(f"{name}, repeated {axis}", body, shapes, given={"i": i})
    body = f"y = ScatterElements<{kind}>(x, i, u)"
    add(f"{name}, of nothing", body, {"x": (3,), "u": (0,)}, given={"i": ints()})
    for k, i in {  # what is written: rows, elements, from indices of rank 1 to 3
        "rows": [[1], [-2], [1]],
        "elements": [[0, 1], [1, -1], [0, -3]],
        "ranks": [[[1], [0]], [[1], [1]]],
        "one": [-1],
    }.items():
        i = np.array(i)
        shapes = {"x": (2, 3), "u": i.shape[:-1] + (2, 3)[i.shape[-1] :]}
        add(
            f"ScatterND {reduction}, {k}", f"y = ScatterND<{kind}>(x, i, u)", shapes, given={"i": i}
        )
    body = f"y = ScatterND<{kind}>(x, i, u)"
    add(
        f"ScatterND {reduction}, nothing", body, {"x": (3,), "u": (0,)}, given={"i": empty.T[:, :1]}
    )
for name, node, i in [
    ("ScatterElements", "ScatterElements", ints(1, 0, -3, 1, 2, 2, 2)),
    ("ScatterND", "ScatterND", ints(1, 0, -3, 1, 2, 2, 2).reshape(-1, 1)),
]:
    body = f'y = {node}<reduction="mul">(x, i, u)'
    add(f"{name} mul, zeros", body, {"x": (4,), "u": (7,)}, some_zero, given={"i": i})
# the last write to a place holds
body = f"{constant_nodes(i=[1, 0, -3, 1, 3, 3, 3, -1], s=[2, 4])}  j = Reshape(i, s)"
shapes = {"x": (3, 4), "u": (2, 4)}
add("ScatterElements constant, repeated", f"{body}  y = ScatterElements<axis=1>(x, j, u)", shapes)
body = f"{constant_nodes(i=[1, 0, -1, -3, 0, -1], s=[3, 2])}  j = Reshape(i, s)  y = ScatterND(x, j, u)"
add("ScatterND constant, repeated", body, {"x": (2, 3, 2), "u": (3, 2)})
i = "i = Constant<value = int64[2,4] {1, 0, 1, 1, 3, 3, 3, 2}>()"
add("ScatterElements known, repeated", f"{i}  y = ScatterElements<axis=1>(x, i, u)", shapes)
i = "i = Constant<value = int64[3,2] {1, 0, 0, 1, 1, 0}>()"
add("ScatterND known, repeated", f"{i}  y = ScatterND(x, i, u)", {"x": (2, 3, 2), "u": (3, 2)})
rows = {"i": np.array([[1], [-3]])}
add("ScatterND rows", "y = ScatterND(x, i, u)", {"x": (3, 2), "u": (2, 2)}, given=rows)

for mode in ("linear", "circular"):
    at = ints(1, 0) if mode == "linear" else ints(3, 2)
    for axis in (1, 2, -1, -2, -3):
        node = f'TensorScatter<mode="{mode}", axis={axis}>'
        u = [2, 4, 5, 3]
        u[axis] = 2
        shapes = {"x": (2, 4, 5, 3), "u": tuple(u)}
        given = {"i": at if axis in (1, -3) else np.minimum(at, 1)}
        add(f"{node}", f"y = {node}(x, u, i)", shapes, given=given, opset=24)
    node = f'TensorScatter<mode="{mode}">'
    shapes = {"x": (2, 4, 3), "u": (2, 3, 3)}
    add(f"{node}, from the start", f"y = {node}(x, u)", shapes, opset=24)
    add(f"{node}, all", f"y = {node}(x, u)", {"x": (1, 2, 3), "u": (1, 2, 3)}, opset=24)
    add(f"{node}, nothing", f"y = {node}(x, u)", {"x": (1, 2, 3), "u": (1, 0, 3)}, opset=24)

# -- choosing ------------------------------------------------------------------------------------

for largest in (0, 1):
    for in_order in (0, 1):
        for axis in (0, 1, -1, -2):
            node = f"TopK<axis={axis}, largest={largest}, sorted={in_order}>"
            add(node, f"y, i = {node}(x, k)", T, given={"k": ints(2)})
add("TopK", f"{constant_nodes(k=[2])}  y, i = TopK(x, k)", V)
add("TopK all", "y, i = TopK(x, k)", V, given={"k": ints(4)})
add("TopK none", "y, i = TopK(x, k)", given={"k": ints(0)})
add(
    "TopK indices used", "y, i = TopK(x, k)  z = GatherElements<axis=1>(x, i)", given={"k": ints(2)}
)
add("TopK opset 24", "y, i = TopK<axis=0>(x, k)", given={"k": ints(1)}, opset=24)
for in_order in (0, 1):
    add(f"Unique flat, {in_order}", f"y = Unique<sorted={in_order}>(x)")
    for axis in (0, 1, -1):
        node = f"Unique<axis={axis}, sorted={in_order}>"
        add(node, f"y, i, j, c = {node}(x)", T)
    doubled = f"s = Concat<axis=1>(x, x)  y = Unique<axis=1, sorted={in_order}>(s)"
    add(f"Unique doubled, {in_order}", doubled)
add("Unique second left out", "y, , j = Unique(x)  f = Cast<to=1>(j)", V)

hot = np.array([[1, 0, -1], [-3, 5, 2]])  # 5 is out of range: off everywhere
for axis in (0, 1, 2, -1, -2, -3):
    body = f"y = OneHot<axis={axis}>(i, d, v)"
    add(f"OneHot {axis}", body, {"v": (2,)}, given={"i": hot, "d": np.array(3)})
add("OneHot", "y = OneHot(i, d, v)", {"v": (2,)}, given={"i": hot, "d": ints(4)})
add(
    "OneHot of floats",
    "f = Cast<to=1>(i)  e = Cast<to=1>(d)  y = OneHot(f, e, v)",
    {"v": (2,)},
    given={"i": hot, "d": np.array(3)},
)

# -- whole axes ----------------------------------------------------------------------------------


def tiles(name, shape, repeats):
    add(f"Tile {name}", f"{constant_nodes(r=list(repeats))}  y = Tile(x, r)", {"x": shape})
    add(f"Tile {name}, run time", "y = Tile(x, r)", {"x": shape}, given={"r": ints(*repeats)})


tiles("vector", (3,), [4])
tiles("matrix", (2, 3), [3, 2])
tiles("last", (2, 3, 2), [1, 1, 3])
tiles("ends", (2, 1, 2, 3), [2, 1, 1, 2])
tiles("once", (2, 3), [1, 1])
tiles("never", (2, 3), [2, 0])
tiles("nothing", (2, 0), [2, 3])
tiles("ones", (1, 1, 1, 1, 1), [2, 1, 2, 1, 2])
tiles("scalar", (), [])

for upper in (0, 1):
    for k in (None, 0, 1, -1, 9, -9):
        for shape in ((3, 3), (2, 4, 2), (1, 2, 2, 3)):
            node = f"Trilu<upper={upper}>"
            given = {} if k is None else {"k": np.array(k)}
            arguments = "x" if k is None else "x, k"
            add(f"{node} {k} {shape}", f"y = {node}({arguments})", {"x": shape}, given=given)
add("Trilu", "y = Trilu(x)", {"x": (3, 2)})
add("Trilu constant", "k = Constant<value_int=1>()  y = Trilu<upper=0>(x, k)", {"x": (3, 3)})
add("Trilu nothing", "y = Trilu(x)", {"x": (2, 0, 3)})

for batch, time in ((0, 1), (1, 0)):
    shape = {"x": (2, 4, 3) if time else (4, 2, 3)}
    body = f"y = ReverseSequence<batch_axis={batch}, time_axis={time}>(x, l)"
    add(f"ReverseSequence {batch}{time}", body, shape, given={"l": ints(3, 4)})
add("ReverseSequence", "y = ReverseSequence(x, l)", {"x": (3, 4)}, given={"l": ints(1, 2, 3, 1)})
add("ReverseSequence constant", f"{constant_nodes(l=[2, 1, 2])}  y = ReverseSequence(x, l)")

for to in ([2, 2], [5, 7], [3, 6], [6, 1], [3, 5], [4, 4]):
    add(f"CenterCropPad {to}", f"{constant_nodes(s=to)}  y = CenterCropPad(x, s)", {"x": (3, 5)})
    body, given = "y = CenterCropPad(x, s)", {"s": ints(*to)}
    add(f"CenterCropPad {to}, run time", body, {"x": (3, 5)}, given=given)
for axes in ([0, 2], [-1, -3], [1, -2 + 2]):
    given = {"s": ints(5, 2)}
    add(f"CenterCropPad axes {axes}", f"y = CenterCropPad<axes={axes}>(x, s)", T, given=given)
add("CenterCropPad one axis", f"{constant_nodes(s=[8])}  y = CenterCropPad<axes=[-2]>(x, s)", T)

for block, shape in ((2, (2, 8, 2, 3)), (3, (1, 9, 1, 2)), (1, (2, 3, 2, 2)), (2, (0, 4, 2, 2))):
    for mode in ("DCR", "CRD"):
        node = f'DepthToSpace<blocksize={block}, mode="{mode}">'
        add(f"{node} {shape}", f"y = {node}(x)", {"x": shape})
add("DepthToSpace", "y = DepthToSpace<blocksize=2>(x)", {"x": (1, 4, 2, 1)})
for block, shape in ((2, (2, 3, 4, 2)), (3, (1, 2, 3, 6)), (1, (2, 3, 2, 2)), (2, (0, 2, 2, 2))):
    body = f"y = SpaceToDepth<blocksize={block}>(x)"
    add(f"SpaceToDepth {block} {shape}", body, {"x": shape})

# -- Pad and Slice in full -----------------------------------------------------------------------

PADS = {"x": (3, 4, 5)}
MIXED = {  # begins, then ends
    "constant": [2, -1, 0, -1, 3, -2],
    "reflect": [1, -1, 0, 2, 1, -1],
    "edge": [2, -1, 3, -1, 2, -2],
    "wrap": [1, -1, 3, -1, 2, 2],
}
for mode, pads in MIXED.items():
    body = f'y = Pad<mode="{mode}">'
    add(f"Pad {mode} mixed", f"{constant_nodes(p=pads)}  {body}(x, p)", PADS)
    add(f"Pad {mode} mixed, run time", f"{body}(x, p)", PADS, given={"p": ints(*pads)})
    some = {"p": ints(pads[2], pads[0], pads[5], pads[3]), "a": ints(-1, 0)}
    add(f"Pad {mode} mixed, axes", f"{body}(x, p, , a)", PADS, given=some)
    a = constant_nodes(a=[1])
    add(f"Pad {mode} mixed, one axis", f"{a}  {body}(x, p, , a)", PADS, given={"p": ints(2, -1)})
given = {"p": ints(*MIXED["constant"])}
add("Pad value, mixed", "y = Pad(x, p, v)", {**PADS, "v": ()}, given=given)
add("Pad value of one element", "y = Pad(x, p, v)", {**PADS, "v": (1,)}, given=given)
given = {"p": ints(1, 2, 0, 1), "a": np.array([2, -3], np.int32)}
add("Pad value, axes", "y = Pad(x, p, v, a)", {**PADS, "v": ()}, given=given)
add(
    "Pad value of nothing",
    "y = Pad(x, p, v)",
    {"x": (0, 2), "v": ()},
    given={"p": ints(1, 0, 1, 1)},
)
add("Pad edge opset 18", 'y = Pad<mode="edge">(x, p)', M, given={"p": ints(1, 0, 0, 2)}, opset=18)

SLICES = [
    ("steps", [0, 1], [4, 5], [0, 2], [3, 2]),
    ("negative steps", [-1, 3], [-LAST, 0], [-1, 1], [-2, -1]),
    ("negative steps past the end", [99, -2], [-99, 0], [2, 0], [-3, -1]),
    ("steps of nothing", [3], [1], [2], [2]),
    ("negative steps of nothing", [0], [3], [2], [-1]),
    ("all axes", [0, -2, -1], [LAST, -1, -LAST], [-3, -2, -1], [1, 1, -1]),
    ("large steps", [1], [LAST], [1], [LAST]),
    ("step of int32's last", [1], [2**31 - 1], [1], [2]),
]
for name, *operands in SLICES:
    parts = dict(zip("seat", operands, strict=True))
    body = "y = Slice(x, s, e, a, t)"
    add(f"Slice {name}", f"{constant_nodes(**parts)}  {body}", {"x": (3, 4, 5)})
    given = {k: ints(*v) for k, v in parts.items()}
    add(f"Slice {name}, run time", body, {"x": (3, 4, 5)}, given=given)
    fixed = constant_nodes(**{k: parts[k] for k in "at"})
    some = {k: given[k] for k in "se"}
    add(f"Slice {name}, bounds at run time", f"{fixed}  {body}", {"x": (3, 4, 5)}, given=some)
add("Slice no axes, steps", "y = Slice(x, s, e, , t)", T, given={k: ints(1, -1) for k in "set"})
step = constant_nodes(s=[1], e=[3], a=[1])
add(
    "Slice, only the step at run time",
    f"{step}  y = Slice(x, s, e, a, t)",
    T,
    given={"t": ints(-1)},
)
int32 = {k: np.array([v], np.int32) for k, v in {"s": -2, "e": 2**31 - 1, "a": -1, "t": 1}.items()}
add("Slice int32", "y = Slice(x, s, e, a, t)", T, given=int32)
