"""Rows of the table: RNN, GRU and LSTM."""

from __future__ import annotations

import numpy as np

from tests.support.cases import add

TIME, BATCH, INPUT, HIDDEN = 3, 2, 3, 2
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
FIRST = ("x", "w", "r")


def add_recurrent(
    name, attributes="", more="", directions=1, rows_first=False, lengths=None, **options
):
    """Add a case; `more` names the operands beside X, W and R: b, h, c, p."""
    kind, d = name.split()[0], directions
    wide = GATES[kind] * HIDDEN
    state = (BATCH, d, HIDDEN) if rows_first else (d, BATCH, HIDDEN)
    x = (BATCH, TIME, INPUT) if rows_first else (TIME, BATCH, INPUT)
    shapes = {"x": x, "w": (d, wide, INPUT), "r": (d, wide, HIDDEN)}
    shapes |= {"b": (d, 2 * wide), "h": state, "c": state, "p": (d, 3 * HIDDEN)}
    given = {} if lengths is None else {"n": np.array(lengths, np.int32)}
    used = [*FIRST, *more]
    operands = ", ".join(v if v in used or v in given else "" for v in "xwrbnhcp").rstrip(", ")
    outputs = ("y", "z", "a") if kind == "LSTM" else ("y", "z")
    add(
        name,
        f"{', '.join(outputs)} = {kind}<{attributes}>({operands})",
        {n: s for n, s in shapes.items() if n in used},
        given=given,
        outputs=outputs,
        **options,
    )


SIZE = f"hidden_size={HIDDEN}"
BOTH = f'direction="bidirectional", {SIZE}'
NUMBERS = "activation_alpha=[0.4, 0.7], activation_beta=[0.6, 1.3]"

add_recurrent("RNN", f"{SIZE}, clip=0.9", "bh", lengths=[3, 1])
add_recurrent("RNN of rows", f"{BOTH}, layout=1", "bh", 2, True, runs=False)
add_recurrent("RNN of two functions", f'{BOTH}, activations=["Softsign", "Elu"]', "b", 2)
add_recurrent("RNN numbers", f'{SIZE}, activations=["HardSigmoid"], {NUMBERS}', "b")
add_recurrent("GRU", SIZE, "bh")
add_recurrent("GRU linear", f"{BOTH}, linear_before_reset=1, clip=0.6", "bh", 2, lengths=[2, 3])
add_recurrent("GRU without bias", f'direction="reverse", linear_before_reset=1, {SIZE}', opset=14)
add_recurrent("GRU of rows", f"{SIZE}, layout=1", "h", 1, True, runs=False)
add_recurrent("GRU numbers", f'{SIZE}, activations=["HardSigmoid", "ScaledTanh"], {NUMBERS}', "b")
add_recurrent("LSTM", SIZE, "bhc")
add_recurrent("LSTM with peepholes", f"{BOTH}, clip=0.6", "bhcp", 2, lengths=[3, 2])
add_recurrent("LSTM coupled", f'direction="reverse", input_forget=1, {SIZE}', "b", lengths=[1, 3])
add_recurrent("LSTM of rows", "layout=1", "cp", 1, True, runs=False)
add_recurrent(
    "LSTM numbers",
    f'{SIZE}, activations=["HardSigmoid", "Softplus", "ScaledTanh"], {NUMBERS}',
    "p",
    opset=7,
)
