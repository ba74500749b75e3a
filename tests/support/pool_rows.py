"""Rows for pooling, convolutions and Fourier transforms: every attribute, in one to three axes."""

from __future__ import annotations

import numpy as np

from tests.support.cases import add, ints


def node(op_type, attributes=""):
    return f"{op_type}<{attributes}>" if attributes else op_type


def apart(x):
    """Return numbers of distinct size, a tenth or more apart and from zero: no kink is near."""
    order = np.argsort(np.argsort(np.abs(x), axis=None)).reshape(x.shape)
    return np.where(x < 0, -1, 1) * (0.1 * order + 0.3)


LINE, PLANE, SPACE = {"x": (2, 2, 7)}, {"x": (2, 2, 6, 5)}, {"x": (1, 2, 4, 3, 4)}
WINDOWS = {
    "line": (LINE, "kernel_shape=[3]"),
    "line, strides": (LINE, "kernel_shape=[2], strides=[3]"),
    "line, dilations": (LINE, "kernel_shape=[2], dilations=[3], strides=[2]"),
    "line, ceil": (LINE, "kernel_shape=[2], strides=[2], ceil_mode=1"),
    "line, ceil, pads": (LINE, "kernel_shape=[3], strides=[3], ceil_mode=1, pads=[1, 2]"),
    "line, last window starts beyond": (
        {"x": (1, 1, 5)},
        "kernel_shape=[2], strides=[3], ceil_mode=1, pads=[1, 1]",
    ),
    "plane": (PLANE, "kernel_shape=[3, 2]"),
    "plane, pads": (PLANE, "kernel_shape=[3, 3], pads=[1, 0, 2, 1], strides=[2, 1]"),
    "plane, all": (
        PLANE,
        "kernel_shape=[3, 2], dilations=[1, 2], strides=[2, 2], pads=[1, 0, 1, 1], ceil_mode=1",
    ),
    "plane, same upper": (PLANE, 'kernel_shape=[2, 3], strides=[2, 3], auto_pad="SAME_UPPER"'),
    "plane, same lower": (PLANE, 'kernel_shape=[4, 3], strides=[3, 2], auto_pad="SAME_LOWER"'),
    "plane, same, every": (PLANE, 'kernel_shape=[2, 3], auto_pad="SAME_LOWER"'),
    "plane, valid": (PLANE, 'kernel_shape=[2, 3], strides=[3, 1], auto_pad="VALID"'),
    "plane, valid, ceil": (
        PLANE,
        'kernel_shape=[3, 2], strides=[2, 2], auto_pad="VALID", ceil_mode=1',
    ),
    "plane, one element": ({"x": (1, 1, 1, 1)}, "kernel_shape=[1, 1]"),
    "space": (SPACE, "kernel_shape=[2, 2, 3], strides=[2, 1, 1], pads=[0, 1, 1, 0, 0, 1]"),
    "space, same": (SPACE, 'kernel_shape=[2, 2, 2], strides=[2, 2, 3], auto_pad="SAME_UPPER"'),
    "space, ceil": (SPACE, "kernel_shape=[2, 2, 3], strides=[3, 2, 2], ceil_mode=1"),
    "space, dilations": (SPACE, "kernel_shape=[2, 2, 2], dilations=[2, 1, 3]"),
}
for name, (shapes, attributes) in WINDOWS.items():
    add(f"MaxPool {name}", f"y = MaxPool<{attributes}>(x)", shapes, apart)
    add(f"LpPool {name}", f"y = LpPool<{attributes}>(x)", shapes)
    for counted in (0, 1):
        pool = f"AveragePool<{attributes}, count_include_pad={counted}>"
        add(f"AveragePool {name}, {counted}", f"y = {pool}(x)", shapes)
for p in (1, 2, 3, 4):
    add(f"LpPool p={p}", f"y = LpPool<p={p}, kernel_shape=[3], strides=[2]>(x)", LINE, apart)
    add(f"GlobalLpPool p={p}", f"y = GlobalLpPool<p={p}>(x)", SPACE, apart)
add("GlobalLpPool line", "y = GlobalLpPool(x)", LINE)
add("MaxPool column major", "y = MaxPool<kernel_shape=[2, 3], storage_order=1>(x)", PLANE, apart)
for order in (0, 1):
    pool = f"MaxPool<kernel_shape=[2, 2], storage_order={order}>"
    add(
        f"MaxPool and its indices {order}",
        f"m, i = {pool}(x)  f = Cast<to=1>(i)  y = Mul(m, f)",
        PLANE,
        apart,
    )


add(
    "MaxPool, windows between elements",
    "m = MaxPool<kernel_shape=[2], dilations=[3], pads=[1, 1]>(x)  "
    "n = Constant<value_float=-9.0>()  y = Max(m, n)",
    {"x": (2, 2, 2)},
)
add(
    "MaxPool rounded up along one axis only",
    "y = MaxPool<kernel_shape=[3, 2], strides=[3, 2], pads=[1, 0, 2, 0], ceil_mode=1>(x)",
    {"x": (1, 1, 7, 5)},
    apart,
)
add("GlobalAveragePool space", "y = GlobalAveragePool(x)", SPACE)

# -- MaxUnpool -----------------------------------------------------------------------------------

AT = np.array([5, 7, 13, 15, 16, 22, 24, 31]).reshape(2, 1, 2, 2)
HALF = {"x": (2, 1, 2, 2)}
for name, attributes in {
    "": "strides=[2, 2]",
    ", pads": "strides=[4, 4], pads=[1, 1, 1, 1]",
}.items():
    unpool = f"MaxUnpool<kernel_shape=[2, 2], {attributes}>"
    add(f"MaxUnpool{name}", f"y = {unpool}(x, i)", HALF, given={"i": AT})
TWICE = np.array([5, 5, 5, 2, 16, 16, 31, 31]).reshape(2, 1, 2, 2)
UNPOOL = "MaxUnpool<kernel_shape=[2, 2], strides=[2, 2]>"
add("MaxUnpool, places taken twice", f"y = {UNPOOL}(x, i)", HALF, given={"i": TWICE})
add("MaxUnpool, all to one place", f"y = {UNPOOL}(x, i)", HALF, given={"i": 0 * TWICE})
for name, shape in {"as it is": (2, 1, 4, 4), "larger": (2, 1, 5, 6)}.items():
    given = {"i": AT, "s": ints(*shape)}
    add(f"MaxUnpool, output_shape {name}", f"y = {UNPOOL}(x, i, s)", HALF, given=given)
for name, strides in {"apart": "2, 2", "overlapping": "1, 1"}.items():
    pool = f"kernel_shape=[2, 2], strides=[{strides}]"
    body = f"m, i = MaxPool<{pool}>(x)  y = MaxUnpool<{pool}>(m, i)"
    add(f"MaxUnpool of windows {name}", body, {"x": (2, 2, 4, 4)}, apart)

# -- Conv, ConvTranspose: weights fed at run time, of which the table hides the shape ------------

CONVOLUTIONS = {
    "line": ("", (2, 2, 6), (3, 2, 3)),
    "line, all": (
        "strides=[2], dilations=[2], pads=[2, 1], group=2, kernel_shape=[2]",
        (2, 4, 7),
        (4, 2, 2),
    ),
    "plane": ("pads=[1, 0, 0, 1]", (2, 2, 4, 4), (3, 2, 2, 3)),
    "plane, groups": ("group=2, strides=[2, 1]", (2, 4, 5, 4), (6, 2, 2, 2)),
    "plane, depthwise": ("group=3, dilations=[2, 1]", (2, 3, 5, 4), (6, 1, 2, 2)),
    "plane, same upper": ('auto_pad="SAME_UPPER", strides=[2, 3]', (1, 2, 5, 7), (3, 2, 2, 3)),
    "plane, same lower": (
        'auto_pad="SAME_LOWER", strides=[3, 2], group=2',
        (2, 4, 6, 5),
        (2, 2, 2, 2),
    ),
    "plane, same, every": ('auto_pad="SAME_LOWER"', (1, 2, 4, 5), (3, 2, 2, 4)),
    "plane, same, smaller than the stride": (
        'auto_pad="SAME_UPPER", strides=[3, 3]',
        (1, 2, 7, 6),
        (2, 2, 2, 1),
    ),
    "plane, valid": ('auto_pad="VALID", strides=[2, 2]', (1, 2, 5, 6), (3, 2, 2, 3)),
    "plane, wide, groups": ("group=2, pads=[4, 4, 4, 4]", (1, 4, 5, 5), (4, 2, 9, 8)),
    "space": ("pads=[0, 1, 0, 1, 0, 0], strides=[1, 2, 1]", (1, 2, 3, 4, 3), (2, 2, 2, 2, 2)),
    "space, same": (
        'auto_pad="SAME_LOWER", strides=[2, 1, 2]',
        (1, 2, 3, 3, 4),
        (2, 2, 2, 2, 2),
    ),
}
# whose rank nothing tells where shapes are not known: they have no attribute of one entry per axis
SILENT = ("line", "plane, same, every")
for name, (attributes, x, w) in CONVOLUTIONS.items():
    shapes = {"x": x, "w": w, "b": (w[0],)}
    needs = "rank" if name in SILENT else ""
    add(f"Conv {name}", f"y = {node('Conv', attributes)}(x, w, b)", shapes, needs=needs)
TRANSPOSED = {
    "line": ("", (2, 2, 4), (2, 3, 3)),
    "line, all": (
        "strides=[3], dilations=[2], pads=[2, 1], group=2, output_padding=[2], kernel_shape=[2]",
        (2, 4, 4),
        (4, 3, 2),
    ),
    "plane, same upper": ('auto_pad="SAME_UPPER", strides=[2, 3]', (1, 2, 3, 3), (2, 3, 3, 4)),
    "plane, same lower": (
        'auto_pad="SAME_LOWER", strides=[2, 1], group=2, output_padding=[1, 0]',
        (1, 4, 3, 3),
        (4, 1, 3, 4),
    ),
    "plane, valid": ('auto_pad="VALID", strides=[2, 2]', (1, 2, 3, 3), (2, 3, 3, 2)),
    "plane, output_shape": ("strides=[2, 2], output_shape=[6, 8]", (1, 2, 3, 4), (2, 3, 3, 3)),
    "plane, output_shape upper": (
        'strides=[2, 2], output_shape=[6, 8], auto_pad="SAME_UPPER", output_padding=[1, 0]',
        (1, 2, 3, 4),
        (2, 3, 3, 3),
    ),
    "plane, output_shape smaller": (
        "strides=[2, 2], output_shape=[3, 4], dilations=[1, 2]",
        (1, 2, 3, 4),
        (2, 3, 3, 3),
    ),
    "plane, groups": ("group=3, pads=[1, 0, 0, 1]", (2, 3, 3, 3), (3, 2, 2, 3)),
    "space": ("strides=[1, 2, 1], output_padding=[0, 1, 0]", (1, 2, 2, 2, 3), (2, 2, 2, 2, 2)),
}
for name, (attributes, x, w) in TRANSPOSED.items():
    groups = int(attributes.split("group=")[1][0]) if "group" in attributes else 1
    shapes = {"x": x, "w": w, "b": (w[1] * groups,)}
    needs = "rank" if name in SILENT else ""
    add(
        f"ConvTranspose {name}",
        f"y = {node('ConvTranspose', attributes)}(x, w, b)",
        shapes,
        needs=needs,
    )

# -- DFT, STFT -----------------------------------------------------------------------------------

for last in (1, 2):
    for inverse in (0, 1):
        for length in ("", "4", "5", "9"):
            dft = f"DFT<inverse={inverse}>"
            id_ = f"DFT {last}, inverse {inverse}, {length or 'whole'}"
            body = (
                f"n = Constant<value_int={length}>()  y = {dft}(x, n)"
                if length
                else f"y = {dft}(x)"
            )
            add(id_, body, {"x": (2, 6, last)})
for n in (5, 6):
    add(f"DFT one-sided {n}", "y = DFT<onesided=1>(x)", {"x": (2, n, 1)})
    body = f"n = Constant<value_int={n}>()  y = DFT<onesided=1, inverse=1>(x, n)"
    add(f"DFT one-sided inverse {n}", body, {"x": (2, n // 2 + 1, 2)})
    for length in (4, 5, 9):
        given = {"n": np.array(length)}
        id_ = f"DFT one-sided {n}, {length} at run time"
        add(id_, "y = DFT<onesided=1>(x, n)", {"x": (2, n, 1)}, given=given)
add("DFT one-sided inverse", "y = DFT<onesided=1, inverse=1>(x)", {"x": (2, 4, 2)})
add(
    "DFT one-sided inverse of 1",
    "y = DFT<onesided=1, inverse=1>(x, n)",
    {"x": (2, 1, 2)},
    given={"n": np.array(1)},
)
add("DFT of 1", "y = DFT(x)", {"x": (2, 1, 1)})
for axis in (0, 1, 2, -2, -4):
    for given in ({"a": np.array(axis)}, {}):
        head = "" if given else f"a = Constant<value_int={axis}>()"
        name = f"DFT axis {axis}{' at run time' if given else ''}"
        shapes = {"x": (3, 4, 2, 1)}
        add(name, f"{head}  y = DFT(x, , a)", shapes, given=given)
        add(f"{name}, one-sided", f"{head}  y = DFT<onesided=1>(x, , a)", shapes, given=given)
        body = f"{head}  z = DFT<onesided=1>(x, , a)  w = Mul(z, z)  "
        body += f"n = Constant<value_int={shapes['x'][axis]}>()  "
        body += "y = DFT<inverse=1, onesided=1>(w, n, a)"
        add(f"{name}, there and back", body, shapes, given=given)
for length in (np.array(4), np.array(9, np.int32)):
    given = {"n": length, "a": np.array(1)}
    add(f"DFT length {length} at run time", "y = DFT(x, n, a)", {"x": (2, 6, 3, 2)}, given=given)
for axis in ("", "axis=0", "axis=-2", "axis=2"):
    for other in ("inverse=1", "onesided=1"):
        attributes = ", ".join(filter(None, (axis, other)))
        shapes = {"x": (3, 4, 2, 1)}
        add(f"DFT-17 {attributes}", f"y = DFT<{attributes}>(x)", shapes, opset=18)
given = {"n": np.array(3)}
add("DFT-17 length", "y = DFT<axis=0, onesided=1>(x, n)", {"x": (5, 2, 1)}, opset=19, given=given)
add(
    "DFT-17 back",
    "y = DFT<axis=0, onesided=1, inverse=1>(x, n)",
    {"x": (2, 2, 2)},
    opset=19,
    given=given,
)

for last in (1, 2):
    for onesided in ("", "onesided=0", "onesided=1"):
        for step in (1, 3, 4):
            given = {"s": np.array(step)}
            id_ = f"STFT {last}, step {step}, {onesided or 'default'}"
            shapes = {"x": (2, 9, last), "w": (4,)}
            add(id_, f"y = {node('STFT', onesided)}(x, s, w)", shapes, given=given)
body = "s = Constant<value_int=2>()  n = Constant<value_int=5>()"
add("STFT no window", f"{body}  y = STFT(x, s, , n)", {"x": (2, 9, 1)})
add("STFT both", f"{body}  y = STFT(x, s, w, n)", {"x": (1, 9, 1), "w": (5,)})
given = {"s": np.array(2, np.int32), "n": np.array(3, np.int32)}
add("STFT at run time", "y = STFT(x, s, w, n)", {"x": (2, 9, 2), "w": (3,)}, given=given)
add("STFT no window at run time", "y = STFT<onesided=0>(x, s, , n)", {"x": (2, 9, 1)}, given=given)
add(
    "STFT, rest and opset 18",
    "y = STFT(x, s, w)",
    {"x": (2, 10, 1), "w": (4,)},
    opset=18,
    given={"s": np.array(4)},
)
