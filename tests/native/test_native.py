"""The native form of a step: its numbers are those of the standard operators."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from onnx import numpy_helper

import onnxgrad as og
from onnxgrad import native
from onnxgrad.graph.traversal import all_nodes
from onnxgrad.native import blocked_layout
from onnxgrad.native.phases import PLAIN
from onnxgrad.training.step import epoch
from tests.support.models import parse_model

DOMAIN = blocked_layout.DOMAIN
needs_blocks = pytest.mark.skipif(
    not blocked_layout.block_size(), reason="this onnxruntime has no blocked convolution here"
)


class Case(NamedTuple):
    """`y = nodes` of x (N, C, H, W), after a convolution, so that the gradient of x counts.

    `native` are the convolutions in blocks after each other: forward, of x, of the weight.
    """

    id: str
    nodes: str
    x: tuple[int, ...]
    shapes: dict[str, tuple[int, ...]]
    native: int = 3


SQUARE = {"w": (32, 32, 3, 3)}
CASES = [
    Case("dense", "y = Conv<pads=[1,1,1,1]>(x, w)", (32, 9, 6), SQUARE),
    Case("bias", "y = Conv<pads=[1,1,1,1]>(x, w, b)", (32, 6, 9), SQUARE | {"b": (32,)}),
    Case("more channels", "y = Conv<pads=[1,1,1,1]>(x, w)", (32, 9, 6), {"w": (64, 32, 3, 3)}),
    Case("without padding", "y = Conv(x, w)", (32, 9, 6), SQUARE),
    Case("uneven padding", "y = Conv<pads=[2,0,1,2]>(x, w)", (32, 7, 6), SQUARE),
    Case("uneven kernel", "y = Conv<pads=[0,1,1,2]>(x, w)", (32, 7, 6), {"w": (32, 32, 2, 4)}),
    Case("5 x 5", "y = Conv<pads=[2,2,2,2]>(x, w)", (32, 5, 7), {"w": (32, 32, 5, 5)}),
    Case("strided", "y = Conv<strides=[2,2], pads=[1,1,1,1]>(x, w)", (32, 8, 8), SQUARE),
    Case("strided, odd", "y = Conv<strides=[2,2], pads=[1,1,1,1]>(x, w)", (32, 9, 9), SQUARE),
    Case("uneven strides", "y = Conv<strides=[3,2], pads=[1,0,1,1]>(x, w)", (32, 14, 9), SQUARE),
    Case("one stride", "y = Conv<strides=[1,2], pads=[1,0,1,1]>(x, w)", (32, 7, 9), SQUARE),
    Case("stride beyond", "y = Conv<strides=[4,4]>(x, w)", (32, 18, 19), SQUARE),
    Case("dilated", "y = Conv<dilations=[2,3], pads=[2,3,2,3]>(x, w)", (32, 8, 9), SQUARE),
    Case("dilated, no pads", "y = Conv<dilations=[2,1]>(x, w)", (32, 9, 7), SQUARE),
    Case(
        "dilated and strided",
        "y = Conv<dilations=[2,1], strides=[1,2], pads=[2,1,2,1]>(x, w)",
        (32, 9, 8),
        SQUARE,
        2,
    ),
    Case("same upper", 'y = Conv<auto_pad="SAME_UPPER", strides=[2,2]>(x, w)', (32, 9, 8), SQUARE),
    Case("same lower", 'y = Conv<auto_pad="SAME_LOWER">(x, w)', (32, 9, 8), {"w": (32, 32, 2, 4)}),
    Case(
        "by channel", "y = Conv<group=32, pads=[1,1,1,1]>(x, w)", (32, 8, 7), {"w": (32, 1, 3, 3)}
    ),
    Case(
        "by channel, strided",
        "y = Conv<group=32, strides=[2,2], pads=[1,1,1,1]>(x, w)",
        (32, 8, 9),
        {"w": (32, 1, 3, 3)},
    ),
    Case(
        "by channel, dilated",
        "y = Conv<group=32, dilations=[1,2], pads=[0,2,1,2]>(x, w)",
        (32, 8, 9),
        {"w": (32, 1, 3, 2)},
    ),
    Case("groups", "y = Conv<group=2, pads=[1,1,1,1]>(x, w)", (32, 6, 6), {"w": (32, 16, 3, 3)}, 0),
    Case("odd channels", "y = Conv<pads=[1,1,1,1]>(x, w)", (32, 6, 6), {"w": (7, 32, 3, 3)}, 0),
    Case("odd input", "y = Conv<pads=[1,1,1,1]>(x, w)", (20, 6, 6), {"w": (32, 20, 3, 3)}, 1),
    Case("few input", "y = Conv<pads=[1,1,1,1]>(x, w)", (3, 6, 6), {"w": (32, 3, 3, 3)}, 2),
    Case(
        "few input, strided", "y = Conv<strides=[2,2]>(x, w)", (3, 11, 10), {"w": (32, 3, 3, 3)}, 2
    ),
    Case("1 x 1", "y = Conv(x, w)", (32, 6, 6), {"w": (32, 32, 1, 1)}, 0),
    Case("few pixels", "y = Conv<pads=[1,1,1,1]>(x, w)", (32, 3, 3), SQUARE, 0),
    Case(
        "1 x 1 in blocks",
        "h = Conv(x, w)  y = Conv(h, v)",
        (32, 6, 6),
        SQUARE | {"v": (32, 32, 1, 1)},
        4,
    ),
    Case(
        "1 x 1, strided",
        "h = Conv(x, w)  y = Conv<strides=[2,2]>(h, v)",
        (32, 11, 10),
        SQUARE | {"v": (32, 32, 1, 1)},
        4,
    ),
    Case("transposed", "y = ConvTranspose(x, w)", (32, 6, 5), SQUARE),
    Case(
        "transposed, strided",
        "y = ConvTranspose<strides=[2,3], pads=[1,0,0,1], output_padding=[1,0]>(x, w)",
        (32, 5, 4),
        SQUARE,
    ),
    Case(
        "transposed, bias",
        "y = ConvTranspose<strides=[2,3], pads=[1,0,0,1], output_padding=[1,0]>(x, w, b)",
        (32, 5, 4),
        SQUARE | {"b": (32,)},
    ),
    Case(
        "transposed by channel, bias",
        "y = ConvTranspose<group=32, strides=[2,2]>(x, w, b)",
        (32, 5, 4),
        {"w": (32, 1, 3, 3), "b": (32,)},
        3,
    ),
    Case(
        "transposed, disjoint",
        "y = ConvTranspose<strides=[2,2]>(x, w)",
        (32, 5, 4),
        {"w": (32, 64, 2, 2)},
    ),
    Case("one dimension", "y = Conv<pads=[1,1]>(x, w)", (32, 40), {"w": (32, 32, 3)}, 0),
    *(
        Case(f"one dimension by channel, {id}", f"y = {nodes}", (32, 40), {"w": (32, 1, 4)}, n)
        for id, nodes, n in (
            ("padded", "Conv<group=32, pads=[1,2]>(x, w)", 3),
            ("strided", "Conv<group=32, strides=[2], pads=[2,1], kernel_shape=[4]>(x, w)", 3),
            ("dilated", "Conv<group=32, dilations=[2], pads=[3,3]>(x, w)", 3),
            ("transposed", "ConvTranspose<group=32, strides=[2], output_padding=[1]>(x, w)", 3),
            ("of the file", 'Conv<group=32, auto_pad="SAME_UPPER">(x, w)', 2),
            ("few windows", "Conv<group=32, strides=[3]>(x, w)", 1),
        )
    ),
    Case("three dimensions", "y = Conv(x, w)", (32, 4, 5, 4), {"w": (32, 32, 2, 2, 2)}, 0),
    Case("shared", "h = Conv<pads=[1,1,1,1]>(x, w)  y = Conv(h, w)", (32, 8, 7), SQUARE, 6),
    Case(
        "read twice",
        "h = Conv(x, w)  k = Conv(x, v)  y = Add(h, k)",
        (32, 8, 7),
        SQUARE | {"v": (32, 32, 3, 3)},
        5,
    ),
]


FEW = [
    Case("few", "y = Conv<pads=[1,1,1,1]>(x, w)", (5, 3, 4), {"w": (7, 5, 3, 3)}, 2),
    Case("bias", "y = Conv<pads=[0,0,1,1]>(x, w, b)", (5, 3, 4), {"w": (7, 5, 3, 3), "b": (7,)}, 2),
    Case(
        "strided",
        "y = Conv<strides=[2,2], pads=[1,1,1,1]>(x, w)",
        (5, 3, 4),
        {"w": (7, 5, 3, 3)},
        2,
    ),
    Case("odd", "y = Conv<strides=[3,2], pads=[1,1,1,1]>(x, w)", (5, 3, 3), {"w": (7, 5, 3, 3)}, 2),
    Case("1 x 1", "y = Conv(x, w)", (5, 3, 3), {"w": (7, 5, 1, 1)}, 2),
    Case("1 x 1, strided", "y = Conv<strides=[2,2]>(x, w)", (5, 3, 3), {"w": (7, 5, 1, 1)}, 1),
    Case("uneven", "y = Conv<pads=[0,2,1,0]>(x, w)", (5, 3, 3), {"w": (7, 5, 3, 4)}, 2),
    Case("wide pads", "y = Conv<pads=[1,2,1,2]>(x, w)", (5, 3, 3), {"w": (7, 5, 3, 3)}, 2),
    Case(
        "dilated",
        "y = Conv<dilations=[1,2], pads=[1,2,1,2]>(x, w)",
        (5, 3, 3),
        {"w": (7, 5, 3, 3)},
        2,
    ),
    Case("of the file", 'y = Conv<auto_pad="SAME_UPPER">(x, w)', (5, 3, 3), {"w": (7, 5, 3, 3)}, 1),
    Case(
        "transposed",
        "y = ConvTranspose<strides=[2,3], pads=[1,0,0,1], output_padding=[1,2]>(x, w)",
        (5, 3, 2),
        {"w": (5, 7, 3, 3)},
        1,
    ),
]


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("case", FEW, ids=lambda case: case.id)
def test_images_side_by_side(case, rows, monkeypatch):
    seen = []
    monkeypatch.setattr(native, "PHASES", [PLAIN])
    see_steps(monkeypatch, seen.extend)
    assert_same_as_plain(case, monkeypatch, rows, 3)
    wide = [n for n in seen if n.op_type.startswith("Conv") and n.inputs[0].shape[0] == 1]
    assert len(wide) == case.native


@pytest.fixture
def operators(monkeypatch):
    """Return the operators of the steps that are built, counted."""
    counts: Counter[tuple[str, str]] = Counter()
    see_steps(
        monkeypatch, lambda graph: counts.update((n.domain, n.op_type) for n in all_nodes(graph))
    )
    return counts


def see_steps(monkeypatch, see):
    """Call `see` with the graphs of steps in the native form."""

    def seen(graph, target):
        native.to_native(graph, target)
        see(graph)

    monkeypatch.setattr(epoch, "to_native", seen)


def changes(case: Case, rows: int, batch: int, others=()) -> dict[str, np.ndarray]:
    """Return what steps on batches of random rows add to each weight."""
    rng = np.random.default_rng(0)
    weights = {k: (rng.standard_normal(s) / 8).astype("f4") for k, s in case.shapes.items()}
    weights["a"] = rng.standard_normal((case.x[0], *[1] * len(case.x))).astype("f4")
    image = ", ".join(map(str, case.x))
    text = f"""g (float[N,{image}] r) => (float[N,1] o) {{
        x = Conv<group={case.x[0]}>(r, a)  {case.nodes}
        s = Mul(y, y)  f = Flatten(s)  o = ReduceMean<keepdims=1>(f, axes) }}"""
    model = parse_model(text, axes=np.int64([1]), **weights, **dict(others))
    trainer = og.Trainer(model, "squared_error", optimizer="sgd", learning_rate=0.1)
    X = rng.standard_normal((rows, *case.x)).astype("f4")
    labels = np.full((rows, 1), 3, np.float32)
    trainer.fit(X, labels, batch_size=batch, epochs=1, shuffle=False)
    after = {t.name: numpy_helper.to_array(t) for t in trainer.model.graph.initializer}
    return {k: after[k] - weights[k] for k in weights}


def assert_same_as_plain(case: Case, monkeypatch, rows: int, batch: int, others=()) -> None:
    """Assert that the native form changes the weights as the plain one does."""
    mine = changes(case, rows, batch, others)
    with monkeypatch.context() as plain:
        plain.setattr(epoch, "to_native", lambda graph, target: None)
        wanted = changes(case, rows, batch, others)
    for name, want in wanted.items():
        scale = np.abs(want).max()
        assert scale > 1e-6, name
        np.testing.assert_allclose(mine[name], want, rtol=0, atol=2e-4 * scale, err_msg=name)


@needs_blocks
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_convolutions_in_blocks(case, monkeypatch, operators):
    assert_same_as_plain(case, monkeypatch, 6, 4)  # the last batch is shorter
    assert operators[DOMAIN, "Conv"] == case.native


@needs_blocks
@pytest.mark.parametrize("rows", [1, 16, 34])
@pytest.mark.parametrize("case", CASES[:1] + CASES[7:8] + CASES[17:19], ids=lambda case: case.id)
def test_batches_of_any_size(case, rows, monkeypatch):
    assert_same_as_plain(case, monkeypatch, rows, rows)


BETWEEN = {
    "activation": "h = Conv(x, w)  k = Relu(h)  y = Conv(k, v)",
    "gate": "h = Conv(x, w)  k = Sigmoid(h)  l = Mul(h, k)  y = Conv(l, v)",
    "clipped": "h = Conv(x, w)  k = Clip(h, low, high)  y = Conv(k, v)",
    "leaky": "h = Conv(x, w)  k = LeakyRelu<alpha=0.1>(h)  y = Conv(k, v)",
    "residual": "h = Conv(x, w)  k = Conv<pads=[1,1,1,1]>(h, v)  y = Add(h, k)",
    "per channel": """h = Conv(x, w)  k = Mul(h, c)  l = Add(k, d)  m = Mul(l, l)
        n = Sub(d, m)  y = Conv(n, v)""",
    "less per channel": "h = Conv(x, w)  k = Sub(h, c)  y = Conv(k, v)",
    "normalized": "h = Conv(x, w)  k = BatchNormalization(h, s0, b0, m0, v0)  y = Conv(k, v)",
    "joined": "h = Conv(x, w)  k = Conv(x, v)  l = Concat<axis=1>(h, k)  y = Conv(l, u)",
    "below": "h = Conv(x, w)  k = Conv(x, v)  l = Concat<axis=2>(h, k)  y = Conv(l, w)",
    "joined with plain": """h = Conv(x, w)  k = Slice(x, start, end, axis)
        l = Concat<axis=1>(h, k)  y = Conv(l, u)""",
    "squeezed": "h = Conv(x, w)  p = GlobalAveragePool(h)  k = Mul(h, p)  y = Conv(k, v)",
    "double": "h = Conv(x, w)  k = Cast<to=11>(h)  l = Tanh(k)  m = Cast<to=1>(l)  y = Conv(m, v)",
    "pooled": "h = Conv(x, w)  k = MaxPool<kernel_shape=[2,2]>(h)  y = Conv(k, v)",
    "mean of pixels": "h = Conv(x, w)  y = GlobalAveragePool(h)",
    "sum": "h = Conv(x, w)  k = ReduceSum<keepdims=1>(h, pixels)  y = Add(h, k)",
}
SHAPES = {"w": (32, 32, 3, 3), "v": (32, 32, 3, 3), "u": (32, 64, 3, 3), "c": (32, 1, 1)}
SHAPES |= {"d": (1, 32, 1, 1), "s0": (32,), "b0": (32,)}
OTHERS = {
    "low": np.float32(-0.2),
    "high": np.float32(0.5),
    "m0": np.linspace(-1, 1, 32, dtype="f4"),
}
OTHERS |= {
    "v0": np.linspace(1, 2, 32, dtype="f4"),
    "pixels": [2, 3],
    "start": [0, 0],
    "end": [8, 8],
}


@needs_blocks
@pytest.mark.parametrize("name", BETWEEN)
def test_between_convolutions(name, monkeypatch, operators):
    words = set(re.findall(r"\w+", BETWEEN[name]))
    shapes = {k: s for k, s in SHAPES.items() if k in words}
    others = {k: np.asarray(a) for k, a in (OTHERS | {"axis": [2, 3]}).items() if k in words}
    case = Case(name, BETWEEN[name], (32, 10, 10), shapes)
    assert_same_as_plain(case, monkeypatch, 6, 4, others)
    assert operators[DOMAIN, "Conv"] >= 3


@needs_blocks
def test_two_threads(monkeypatch):
    monkeypatch.setattr("onnxgrad.runtime.session.threads", lambda work: 2)
    for case in CASES[0], CASES[7], CASES[18]:
        assert_same_as_plain(case, monkeypatch, 6, 4)


@needs_blocks
def test_frozen_weights_are_left_to_the_optimizer_of_onnxruntime(operators):
    weights = {k: np.full((32, 32, 3, 3), 0.01, "f4") for k in "vw"}
    text = """g (float[N,32,9,9] x) => (float[N,800] o) {
        h = Conv(x, w)  y = Conv(h, v)  o = Flatten(y) }"""
    trainer = og.Trainer(parse_model(text, **weights), "squared_error", freeze=["w"])
    trainer.fit(np.ones((4, 32, 9, 9), "f4"), np.ones((4, 800), "f4"), epochs=1)
    assert operators["", "Conv"] == 1
    assert operators[DOMAIN, "Conv"] == 2  # the second one, and its weight's gradient


def test_without_blocks_convolutions_stay(monkeypatch, operators):
    monkeypatch.setattr("onnxgrad.native.blocked_layout.block_size", lambda: 0)
    assert_same_as_plain(CASES[0], monkeypatch, 4, 4)
    assert not operators[DOMAIN, "Conv"]


def test_a_failing_session_means_no_blocks(monkeypatch):
    def failing(*_, **__):
        raise RuntimeError("not a registered function")

    monkeypatch.setattr(blocked_layout.ort, "InferenceSession", failing)
    assert blocked_layout.block_size.__wrapped__() == 0


def test_wrong_numbers_mean_no_blocks(monkeypatch):
    monkeypatch.setattr(blocked_layout, "_both", lambda x, w, block: [x, x + 1])
    assert blocked_layout.block_size.__wrapped__() == 0


NORMALIZED = {
    "conv": "h = Conv(x, w)  k = BatchNormalization(h, s0, b0, m0, v0)  y = Mul(k, k)",
    "activation": """h = Conv(x, w)  k = BatchNormalization(h, s0, b0, m0, v0)  l = Relu(k)
        y = Conv(l, v)""",
    "residual": """h = Conv<pads=[1,1,1,1]>(x, w)  a = Relu(h)  i = Conv<pads=[1,1,1,1]>(a, v)
        k = BatchNormalization<epsilon=0.1, momentum=0.7>(i, s0, b0, m0, v0)  l = Add(k, a)
        y = Relu(l)""",
    "added convolutions": """h = Conv(x, w)  k = BatchNormalization(h, s0, b0, m0, v0)
        i = Conv(x, v)  l = BatchNormalization(i, s1, b1, m1, v1)  n = Add(k, l)  y = Relu(n)""",
    "far from zero": """h = Conv(x, w, far)  k = BatchNormalization(h, s0, b0, m0, v0)
        y = Conv(k, v)""",
    "read twice": """h = Conv(x, w)  k = BatchNormalization(h, s0, b0, m0, v0)  l = Relu(k)
        n = Add(k, l)  y = Conv(n, v)""",
}


@needs_blocks
@pytest.mark.parametrize("name", NORMALIZED)
def test_statistics_of_the_batch_in_blocks(name, monkeypatch, operators):
    words = set(re.findall(r"\w+", NORMALIZED[name]))
    shapes = {"w": (32, 32, 3, 3), "v": (32, 32, 3, 3), "far": (32,)}
    shapes |= {f"{k}{i}": (32,) for k in "sbmv" for i in (0, 1)}
    rng = np.random.default_rng(0)
    weights = {k: rng.standard_normal(s).astype("f4") / 8 for k, s in shapes.items() if k in words}
    weights |= {k: np.ones(32, "f4") for k in weights if k in ("v0", "v1")}
    weights |= {k: w + 50 for k, w in weights.items() if k == "far"}
    text = f"""g (float[N,32,10,10] x) => (float[N,1] o) {{
        {NORMALIZED[name]}  s = Mul(y, y)  f = Flatten(s)  o = ReduceMean<keepdims=1>(f, axes) }}"""
    x = rng.standard_normal((6, 32, 10, 10)).astype("f4")

    def trained() -> dict[str, np.ndarray]:
        trainer = og.Trainer(
            parse_model(text, axes=np.int64([1]), **weights),
            "squared_error",
            optimizer="sgd",
            learning_rate=0.1,
            batch_norm="train",
        )
        trainer.fit(x, np.ones((6, 1), "f4"), batch_size=4, epochs=1, shuffle=False)
        return {t.name: numpy_helper.to_array(t) for t in trainer.model.graph.initializer}

    mine = trained()
    assert operators["", "BatchNormalization"] == 0
    with monkeypatch.context() as plain:
        plain.setattr(epoch, "to_native", lambda graph, target: None)
        wanted = trained()
    for key, start in weights.items():
        scale = np.abs(wanted[key] - start).max()
        assert scale > 1e-6 or key == "far", key  # a bias before a mean has no gradient
        np.testing.assert_allclose(mine[key], wanted[key], rtol=2e-5, atol=1e-3 * scale + 1e-6)
