"""Rows of the table of rules: normalizations, losses that are operators, quantization."""

from __future__ import annotations

import numpy as np

from tests.support.cases import KINDS, T, add, ints, positive

KINDS |= {np.dtype(t): t.__name__ for t in (np.int8, np.uint8, np.int16, np.uint16)}

for axis in (0, -2, 1, -1):
    shape = (3, 4, 2)[axis:]
    add(
        f"LayerNormalization statistics {axis}",
        f"y, m, r = LayerNormalization<axis={axis}, epsilon=0.1>(x, s, b)",
        {"x": (3, 4, 2), "s": shape, "b": shape},
        outputs=("y", "m", "r"),
    )
    add(
        f"RMSNormalization {axis}",
        f"y = RMSNormalization<axis={axis}, epsilon=0.1>(x, s)",
        {"x": (3, 4, 2), "s": shape},
        opset=23,
    )
for m, r in (("m", ""), ("", "r")):
    add(
        f"LayerNormalization only {m or r}",
        f"v, {m}, {r} = LayerNormalization(x, s)".replace(",  =", " ="),
        {**T, "s": (4,)},
        outputs=(m or r,),
    )
add("LayerNormalization 1-D", "y = LayerNormalization<axis=0>(x, s)", {"x": (5,), "s": (5,)})
add("LayerNormalization no rows", "y = LayerNormalization(x, s)", {"x": (0, 4), "s": (4,)})
add("RMSNormalization default", "y = RMSNormalization(x, s)", {**T, "s": (4,)}, opset=23)
add("RMSNormalization 1-D", "y = RMSNormalization(x, s)", {"x": (5,), "s": ()}, opset=23)
add(
    "RMSNormalization scale broadcast",
    "y = RMSNormalization<axis=1>(x, s)",
    {**T, "s": (3, 1)},
    opset=24,
)

ALL = ("y", "m", "v")
for name, shape in {"1-D": (4, 3), "": (2, 3, 2), "2": (2, 3, 2, 2), "3": (2, 3, 1, 2, 2)}.items():
    add(
        f"BatchNormalization training {name}",
        "y, m, v = BatchNormalization<training_mode=1, momentum=0.3, epsilon=0.1>(x, s, b, i, j)",
        {"x": shape, **dict.fromkeys("sbij", (3,))},
        positive,
        outputs=ALL,
        opset=15,
    )
    add(
        f"BatchNormalization inference {name}",
        "y = BatchNormalization<momentum=0.3, epsilon=0.1>(x, s, b, i, j)",
        {"x": shape, **dict.fromkeys("sbij", (3,))},
        positive,
        opset=15,
    )
for y in ALL:
    add(
        f"BatchNormalization training, only {y}",
        "y, m, v = BatchNormalization<training_mode=1>(x, s, b, i, j)",
        {"x": (2, 3, 4), **dict.fromkeys("sbij", (3,))},
        positive,
        outputs=(y,),
    )
for mode, outputs in ((0, "y"), (1, "y, m, v")):  # one axis: of one channel
    add(
        f"BatchNormalization of a vector, {mode}",
        f"{outputs} = BatchNormalization<training_mode={mode}>(x, s, b, i, j)",
        {"x": (5,), **dict.fromkeys("sbij", (1,))},
        positive,
    )

for shape in ((2, 3, 4), (2, 3, 2, 2), (1, 3, 2, 1, 2)):
    add(
        f"InstanceNormalization {len(shape)}",
        "y = InstanceNormalization<epsilon=0.1>(x, s, b)",
        {"x": shape, "s": (3,), "b": (3,)},
    )
    add(
        f"GroupNormalization {len(shape)}",
        "y = GroupNormalization<num_groups=3>(x, s, b)",
        {"x": (2, 6, *shape[2:]), "s": (6,), "b": (6,)},
        opset=21,
    )
    add(
        f"GroupNormalization per group {len(shape)}",
        "y = GroupNormalization<num_groups=3, epsilon=0.1>(x, s, b)",
        {"x": (2, 6, *shape[2:]), "s": (3,), "b": (3,)},
        opset=18,
    )
for groups in (1, 2, 4):
    add(
        f"GroupNormalization {groups} groups",
        f"y = GroupNormalization<num_groups={groups}, stash_type=1>(x, s, b)",
        {"x": (3, 4), "s": (4,), "b": (4,)},
        opset=22,
    )

for size in (1, 3, 5):
    attributes = f"size={size}, alpha=0.7, beta=0.6, bias=1.5"
    add(f"LRN {size}", f"y = LRN<{attributes}>(x)", {"x": (2, 4, 2, 2)})
add("LRN default", "y = LRN<size=3>(x)", {"x": (2, 2, 3, 1)})
for axes in ("", "<axes=[0, 1, 2, 3]>", "<axes=[-1]>", "<axes=[1, -2]>"):
    body = f"y = MeanVarianceNormalization{axes}(x)"
    add(f"MeanVarianceNormalization {axes}", body, {"x": (2, 3, 2, 5)})
add("MeanVarianceNormalization 2-D", "y = MeanVarianceNormalization<axes=[0]>(x)", {"x": (4, 3)})
for p in (1, 2):
    for axis in (0, 1, -1):
        body = f"y = LpNormalization<p={p}, axis={axis}>(x)"
        add(f"LpNormalization {p}, {axis}", body, T, opset=18 if axis else 22)
add("LpNormalization default", "y = LpNormalization(x)")

LABELS = {(): [2, 0, -1, 2], (2,): [[1, 0], [-1, -1], [2, 2], [1, -1]]}
for rest, labels in LABELS.items():
    for reduction in ("none", "sum", "mean"):
        for ignored in ("", ", ignore_index=-1"):
            attributes = f'reduction="{reduction}"{ignored}'
            given = np.array(labels, np.int32 if rest else np.int64)
            given = {"t": given if ignored else np.abs(given)}
            shapes = {"x": (4, 3, *rest), "w": (3,)}
            id_ = f"{reduction} {len(rest)}{ignored}"
            plain, weighted = ("(x, t)", {"x": shapes["x"]}), ("(x, t, w)", shapes)
            for operands, of in (plain, weighted):
                name = f"{id_}{' weights' * (len(of) - 1)}"
                domain = positive if len(of) > 1 else (lambda x: x)
                add(
                    f"NegativeLogLikelihoodLoss {name}",
                    f"y = NegativeLogLikelihoodLoss<{attributes}>{operands}",
                    of, domain, given=given, opset=22 if rest else 18,
                )  # fmt: skip
                add(
                    f"SoftmaxCrossEntropyLoss {name}",
                    f"y, f = SoftmaxCrossEntropyLoss<{attributes}>{operands}",
                    of, domain, given=given, outputs=("y", "f"),
                )  # fmt: skip
CUBE = {"t": np.array([[[[1, 5]], [[5, 0]]]]), "x": (1, 2, 2, 1, 2)}
for name in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"):
    body = f"y = {name}<ignore_index=5>(x, t)"
    add(f"{name} cube", body, {"x": CUBE["x"]}, given={"t": CUBE["t"]})
    add(f"{name} default", f"y = {name}(x, t)", {"x": (3, 4)}, given={"t": ints(3, 0, 0)})
add("SoftmaxCrossEntropyLoss log only", "y, f = SoftmaxCrossEntropyLoss(x, t)", {"x": (3, 4)},
    given={"t": ints(3, 0, 0)}, outputs=("f",))  # fmt: skip

BYTES = np.arange(-6, 18, dtype=np.int8).reshape(2, 3, 4)


def dequantized(name, attributes, scale, zero_point=None, x=BYTES, opset=21):
    """Add a row for a DequantizeLinear, with a zero point where one is given."""
    given = {"x": x} | ({} if zero_point is None else {"z": np.full(scale, zero_point, x.dtype)})
    operands = ", ".join(("x", "s", "z")[: 2 + (zero_point is not None)])
    body = f"y = DequantizeLinear{f'<{attributes}>' * bool(attributes)}({operands})"
    add(f"DequantizeLinear {name}", body, {"s": scale}, positive, given=given, opset=opset)


dequantized("per tensor", "", (), 3)
dequantized("without zero point", "", ())
dequantized("int32", "", (), None, BYTES.astype(np.int32), 18)
dequantized("uint8", "", (1,), 7, (BYTES + 6).astype(np.uint8))
dequantized("uint16", "axis=2", (4,), 7, (BYTES + 6).astype(np.uint16))
dequantized("vector per tensor", "", (), 3, BYTES[0, 0])
dequantized("one axis", "axis=0", (4,), 3, BYTES[0, 0])
for axis, length in ((0, 2), (1, 3), (2, 4), (-1, 4), (-3, 2)):
    dequantized(f"axis {axis}", f"axis={axis}", (length,), 1, opset=18 if axis else 23)
dequantized("default axis", "", (3,), 1)
dequantized("output dtype", "output_dtype=1", (3,), 1, opset=23)
dequantized("blocks", "axis=-1, block_size=2", (2, 3, 2), 1)
dequantized("blocks, the last shorter", "axis=1, block_size=2", (2, 2, 4))
dequantized("blocks, one", "axis=0, block_size=2", (1, 3, 4), 1)
dequantized("blocks of a vector", "axis=0, block_size=3", (2,), 1, BYTES[0, 0])
add("DynamicQuantizeLinear", "q, y, z = DynamicQuantizeLinear(x)", T)
add("DynamicQuantizeLinear positive", "q, y, z = DynamicQuantizeLinear(x)", T, positive)
