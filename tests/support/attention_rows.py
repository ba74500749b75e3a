"""Rows of the table: attention in its variants."""

from __future__ import annotations

import numpy as np

from tests.support.cases import add, ints

BATCH, HEADS, ROWS, KEYS, SIZE = 2, 4, 3, 5, 2
Q, K, V = (BATCH, HEADS, ROWS, SIZE), (BATCH, HEADS, KEYS, SIZE), (BATCH, HEADS, KEYS, 3)
QKV = {"q": Q, "k": K, "v": V}
SHARED = {"q": Q, "k": (BATCH, 2, KEYS, SIZE), "v": (BATCH, 2, KEYS, 3)}
PACKED = {"q": (2, 3, 8), "k": (2, 5, 4), "v": (2, 5, 6)}
HIDDEN = np.tril(np.ones((ROWS, KEYS), bool), 1)
DARK = HIDDEN & (np.arange(ROWS) != 1)[:, None]  # row 1 sees nothing


def attention(name, attributes="", shapes=QKV, more="", **options):
    options = {"opset": 24} | options
    add(f"Attention-{name}", f"y = Attention{attributes}(q, k, v{more})", shapes, **options)


attention("plain")
attention("scale-softcap", "<scale=0.7, softcap=1.5>")
attention("causal", "<is_causal=1>")
attention("causal-more-rows", "<is_causal=1>", {"q": K, "k": Q, "v": Q})
attention("shared-heads", "<is_causal=1>", SHARED)
attention("packed", "<q_num_heads=4, kv_num_heads=2>", PACKED)
attention("float-mask", shapes={**QKV, "m": (ROWS, KEYS)}, more=", m")
attention("mask-of-heads", shapes={**SHARED, "m": (HEADS, 1, KEYS)}, more=", m", runs=False)
attention("short-mask", shapes={**QKV, "m": (BATCH, 1, ROWS, 4)}, more=", m", runs=False)
attention("boolean-mask", more=", m", given={"m": HIDDEN})
attention("dark-row", more=", m", given={"m": DARK})
attention("dark-row-causal", "<is_causal=1>", more=", m", given={"m": DARK})
attention("softmax-in-double", "<softmax_precision=11>")
attention(
    "lengths",
    "<is_causal=1>",
    more=", , , , n",
    given={"n": ints(4, 2)},  # of the second, the first row sees nothing
)
PAST = {**QKV, "a": (BATCH, HEADS, 2, SIZE), "b": (BATCH, HEADS, 2, 3)}
for mode in range(4):
    add(
        f"Attention-past-{mode}",
        f"y, p, s, z = Attention<is_causal=1, softcap=2.0, qk_matmul_output_mode={mode}>(q, k, v, m, a, b)",
        {**PAST, "m": (ROWS, 7)},
        outputs=("y", "p", "s", "z"),
        opset=24,
    )
for left, right, causal in ((1, -1, 0), (1, 0, 0), (-1, 1, 0), (1, 1, 1), (0, 0, 0)):
    attention(
        f"window-{left}-{right}-{causal}",
        f"<left_window_size={left}, right_window_size={right}, is_causal={causal}>",
        opset=25,
        runs=False,
    )
attention(
    "window-past",
    "<left_window_size=1>",
    {**PAST, "m": (1,)},
    ", m, a, b",
    opset=25,
    runs=False,
)

LINEAR = {"q": (2, 3, 8), "k": (2, 3, 4), "v": (2, 3, 6), "s": (2, 2, 2, 3)}
for update, more in {
    "linear": {},
    "gated": {"g": (2, 3, 4)},
    "delta": {"b": (2, 3, 1)},
    "gated_delta": {"g": (2, 3, 2), "b": (2, 3, 2)},
}.items():
    for state in ("s", ""):
        shapes = {n: shape for n, shape in {**LINEAR, **more}.items() if state or n != "s"}
        operands = ", ".join(n if n in shapes else "" for n in "qkvsgb").rstrip(", ")
        add(
            f"LinearAttention-{update}-{state}",
            f"""y, z = LinearAttention<q_num_heads=4, kv_num_heads=2,
                update_rule="{update}">({operands})""",
            shapes,
            opset=27,
            runs=False,
            outputs=("y", "z"),
            needs="rank",
        )
add(
    "RotaryEmbedding",
    "y = RotaryEmbedding(x, c, s)",
    {"x": (2, 4, 3, 6), "c": (2, 3, 3), "s": (2, 3, 3)},
    opset=23,
    needs="rank",
)
