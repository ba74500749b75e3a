"""The native form of a step: its numbers are those of the standard operators."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad import native
from onnxgrad.graph.traversal import all_nodes
from onnxgrad.native import blocked_layout
from onnxgrad.native.single_nodes import PLAIN
from onnxgrad.training.step import build
from tests.support.models import initializer_arrays, parse_model
from tests.support.running import in_sweep

DOMAIN = blocked_layout.DOMAIN
needs_blocks = pytest.mark.usefixtures("blocked_convolutions")
Shape = tuple[int, ...]


class BlockedConvolution(NamedTuple):
    """`y = nodes` of x (N, C, H, W), after a convolution, so that the gradient of x counts.

    `native` are the convolutions in blocks after each other: forward, of x, of the weight.
    """

    id: str
    nodes: str
    x: Shape
    shapes: dict[str, Shape]
    native: int = 3


def convolution(
    id: str, attributes: str, x: Shape, w: Shape = (32, 32, 3, 3), native: int = 3, b: int = 0
) -> BlockedConvolution:
    """Return the case of one convolution, transposed if its name says so; `b`: of its bias."""
    kind = "ConvTranspose" if "transposed" in id else "Conv"
    nodes = f"y = {kind}<{attributes}>(x, w{', b' if b else ''})"
    return BlockedConvolution(id, nodes, x, {"w": w} | ({"b": (b,)} if b else {}), native)


def by_channel(id: str, attributes: str, x: Shape, w: Shape, native: int = 3, b: int = 0):
    """Return the case of a convolution of each of 32 channels."""
    own = f"group=32, {attributes}".removesuffix(", ")
    return convolution(f"by channel, {id}", own, x, (32, 1, *w), native, b)


SQUARE = {"w": (32, 32, 3, 3)}
ODD_PADS = "strides=[2,3], pads=[1,0,0,1], output_padding=[1,0]"
DILATED = "dilations=[2,1], pads=[2,1,2,1]"
DENSE = convolution("dense", "pads=[1,1,1,1]", (32, 9, 6))
STRIDED = convolution("strided", "strides=[2,2], pads=[1,1,1,1]", (32, 8, 8))
STRIDED_CHANNELS = by_channel("strided", "strides=[2,2], pads=[1,1,1,1]", (32, 8, 9), (3, 3))
CASES = [
    DENSE,
    STRIDED_CHANNELS,
    convolution("bias", "pads=[1,1,1,1]", (32, 6, 9), b=32),
    convolution("uneven padding", "pads=[2,0,1,2]", (32, 7, 6)),
    convolution("uneven strides", "strides=[3,2], pads=[1,0,1,1]", (32, 14, 9)),
    convolution("dilated, no pads", "dilations=[2,1]", (32, 9, 7), native=2),
    convolution(
        "dilated and strided",
        "dilations=[2,1], strides=[1,2], pads=[2,1,2,1]",
        (32, 9, 8),
        native=2,
    ),
    convolution("same upper", 'auto_pad="SAME_UPPER", strides=[2,2]', (32, 9, 8)),
    convolution("dilated wide", "dilations=[1,3], pads=[0,3,1,2]", (32, 8, 25), (32, 32, 3, 3)),
    convolution("dilated far", "dilations=[6,5], pads=[6,5,6,5]", (32, 9, 10), native=2),
    by_channel("dilated", "dilations=[1,2], pads=[0,2,1,2]", (32, 8, 9), (3, 2)),
    convolution("groups", "group=2, pads=[1,1,1,1]", (32, 6, 6), (32, 16, 3, 3), 0),
    convolution("odd channels", "pads=[1,1,1,1]", (32, 6, 6), (7, 32, 3, 3), 0),
    convolution("odd input", "pads=[1,1,1,1]", (20, 6, 6), (32, 20, 3, 3), 1),
    convolution("few input, strided", "strides=[2,2]", (3, 11, 10), (32, 3, 3, 3), 2),
    convolution("few pixels", "pads=[1,1,1,1]", (32, 3, 3), native=0),
    convolution("transposed, bias", ODD_PADS, (32, 5, 4), b=32),
    by_channel("transposed, bias", "strides=[2,2]", (32, 5, 4), (3, 3), b=32),
    convolution("transposed, disjoint", "strides=[2,2]", (32, 5, 4), (32, 64, 2, 2)),
    convolution("three dimensions", "kernel_shape=[2,2,2]", (32, 4, 5, 4), (32, 32, 2, 2, 2), 0),
    by_channel("line, padded", "pads=[1,2]", (32, 40), (4,)),
    by_channel("line, transposed", "strides=[2], output_padding=[1]", (32, 40), (4,)),
    by_channel("line, few windows", "strides=[3]", (32, 40), (4,), 1),
    convolution("line, dense, bias", "pads=[2,1]", (32, 40), (32, 32, 3), b=32),
    convolution("line, dense, strided", "strides=[2], pads=[1,2]", (32, 41), (64, 32, 5)),
    convolution("line, dense, dilated", "dilations=[3], pads=[3,2]", (32, 40), (32, 32, 3)),
    convolution("line, few input", "dilations=[2], pads=[2,2]", (3, 40), (32, 3, 3), 2),
    convolution("line, transposed, dense", "strides=[3], pads=[1,0]", (32, 40), (32, 32, 5)),
    BlockedConvolution(
        "1 x 1, strided",
        "h = Conv(x, w)  y = Conv<strides=[2,2]>(h, v)",
        (32, 11, 10),
        SQUARE | {"v": (32, 32, 1, 1)},
        4,
    ),
    BlockedConvolution(
        "shared", "h = Conv<pads=[1,1,1,1]>(x, w)  y = Conv(h, w)", (32, 8, 7), SQUARE, 6
    ),
    BlockedConvolution(
        "read twice",
        "h = Conv(x, w)  k = Conv(x, v)  y = Add(h, k)",
        (32, 8, 7),
        SQUARE | {"v": (32, 32, 3, 3)},
        5,
    ),
]
MORE_CASES = [
    STRIDED,
    convolution("more channels", "pads=[1,1,1,1]", (32, 9, 6), (64, 32, 3, 3)),
    convolution("without padding", "kernel_shape=[3,3]", (32, 9, 6)),
    convolution("uneven kernel", "pads=[0,1,1,2]", (32, 7, 6), (32, 32, 2, 4)),
    convolution("5 x 5", "pads=[2,2,2,2]", (32, 5, 7), (32, 32, 5, 5)),
    convolution("strided, odd", "strides=[2,2], pads=[1,1,1,1]", (32, 9, 9)),
    convolution("one stride", "strides=[1,2], pads=[1,0,1,1]", (32, 7, 9)),
    convolution("stride beyond", "strides=[4,4]", (32, 18, 19)),
    convolution("dilated", "dilations=[2,3], pads=[2,3,2,3]", (32, 8, 9)),
    convolution("same lower", 'auto_pad="SAME_LOWER"', (32, 9, 8), (32, 32, 2, 4)),
    by_channel("dense", "pads=[1,1,1,1]", (32, 8, 7), (3, 3)),
    by_channel("dilated wide", "dilations=[2,4], pads=[1,4,2,3]", (32, 20, 23), (3, 3)),
    convolution("few input", "pads=[1,1,1,1]", (3, 6, 6), (32, 3, 3, 3), 2),
    convolution("1 x 1", "kernel_shape=[1,1]", (32, 6, 6), (32, 32, 1, 1), 0),
    BlockedConvolution(
        "1 x 1 in blocks",
        "h = Conv(x, w)  y = Conv(h, v)",
        (32, 6, 6),
        SQUARE | {"v": (32, 32, 1, 1)},
        4,
    ),
    convolution("transposed", "kernel_shape=[3,3]", (32, 6, 5)),
    convolution("transposed, strided", ODD_PADS, (32, 5, 4)),
    convolution("line", "pads=[1,1]", (32, 40), (32, 32, 3)),
    convolution("line, few pixels", "pads=[1,1]", (32, 9), (32, 32, 3), 0),
    convolution("line, groups", "group=2, pads=[1,1]", (32, 40), (32, 16, 3), 0),
    convolution("line, odd channels", "pads=[1,1]", (20, 40), (7, 20, 3), 0),
    by_channel("line, strided", "strides=[2], pads=[2,1], kernel_shape=[4]", (32, 40), (4,)),
    by_channel("line, dilated", "dilations=[2], pads=[3,3]", (32, 40), (4,)),
    by_channel("line, of the file", 'auto_pad="SAME_UPPER"', (32, 40), (4,)),
]
FEW_W = (7, 5, 3, 3)
FEW = [
    convolution("bias", "pads=[0,0,1,1]", (5, 3, 4), FEW_W, 2, 7),
    convolution("strided", "strides=[2,2], pads=[1,1,1,1]", (5, 3, 4), FEW_W, 2),
    convolution("1 x 1, strided", "strides=[2,2]", (5, 3, 3), (7, 5, 1, 1), 1),
    convolution("uneven", "pads=[0,2,1,0]", (5, 3, 3), (7, 5, 3, 4), 2),
    convolution("dilated", "dilations=[1,2], pads=[1,2,1,2]", (5, 3, 3), FEW_W, 2),
    convolution("of the file", 'auto_pad="SAME_UPPER"', (5, 3, 3), FEW_W, 1),
    convolution("transposed", ODD_PADS.replace("[1,0]", "[1,2]"), (5, 3, 2), (5, 7, 3, 3), 1),
]
MORE_FEW = [
    convolution("few", "pads=[1,1,1,1]", (5, 3, 4), FEW_W, 2),
    convolution("odd", "strides=[3,2], pads=[1,1,1,1]", (5, 3, 3), FEW_W, 2),
    convolution("1 x 1", "kernel_shape=[1,1]", (5, 3, 3), (7, 5, 1, 1), 2),
    convolution("wide pads", "pads=[1,2,1,2]", (5, 3, 3), FEW_W, 2),
]


@pytest.mark.parametrize("rows", [5, in_sweep(1)])
@pytest.mark.parametrize("case", [*FEW, *map(in_sweep, MORE_FEW)], ids=lambda case: case.id)
def test_images_side_by_side(case, rows, monkeypatch):
    counts = []

    def see(graph):
        convolutions = [node for node in graph if node.op_type.startswith("Conv")]
        counts.append(sum(node.inputs[0].shape[0] == 1 for node in convolutions))

    monkeypatch.setattr(native, "PHASES", [PLAIN])
    see_steps(monkeypatch, see)
    assert_same_as_plain(case, monkeypatch, rows, 3)
    assert sum(counts) == case.native


@pytest.fixture
def step_operators(monkeypatch):
    """Return the operators of the steps that are built, counted by domain and name."""
    counts: Counter[tuple[str, str]] = Counter()
    see_steps(
        monkeypatch, lambda graph: counts.update((n.domain, n.op_type) for n in all_nodes(graph))
    )
    return counts


def see_steps(monkeypatch, see):
    """Call `see` with the graphs of steps in the native form."""

    def seen(graph, target, in_order):
        native.to_native(graph, target, in_order)
        see(graph)

    monkeypatch.setattr(build, "to_native", seen)


def weight_changes(case, rows: int, batch: int, others=()) -> dict[str, np.ndarray]:
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
    after = initializer_arrays(trainer.model)
    return {k: after[k] - weights[k] for k in weights}


def assert_same_as_plain(case, monkeypatch, rows: int, batch: int, others=()) -> None:
    """Assert that the native form changes the weights as the plain one does."""
    mine = weight_changes(case, rows, batch, others)
    with monkeypatch.context() as plain:
        plain.setattr(build, "to_native", lambda *arguments: None)
        wanted = weight_changes(case, rows, batch, others)
    for name, want in wanted.items():
        scale = np.abs(want).max()
        assert scale > 1e-6, name
        np.testing.assert_allclose(mine[name], want, rtol=0, atol=2e-4 * scale, err_msg=name)


@needs_blocks
@pytest.mark.parametrize("case", [*CASES, *map(in_sweep, MORE_CASES)], ids=lambda case: case.id)
def test_convolutions_in_blocks(case, monkeypatch, step_operators):
    assert_same_as_plain(case, monkeypatch, 6, 4)  # the last batch is shorter
    assert step_operators[DOMAIN, "Conv"] == case.native


@needs_blocks
@pytest.mark.parametrize(
    ("case", "rows"),
    [
        (DENSE, 34),
        (STRIDED_CHANNELS, 1),
        *(in_sweep(DENSE, n) for n in (1, 16)),
        *(in_sweep(STRIDED, n) for n in (1, 16, 34)),
        *(in_sweep(STRIDED_CHANNELS, n) for n in (16, 34)),
    ],
)
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
    "sum of channels": """h = Conv(x, w, s0)  k = ReduceSum<keepdims=1>(h, all)  l = Tanh(k)
        y = Mul(h, l)""",
}
SHAPES = {"w": (32, 32, 3, 3), "v": (32, 32, 3, 3), "u": (32, 64, 3, 3), "c": (32, 1, 1)}
SHAPES |= {"d": (1, 32, 1, 1), "s0": (32,), "b0": (32,)}
OTHERS = {"low": -0.2, "high": 0.5, "pixels": [2, 3], "start": [0, 0], "end": [8, 8]}
OTHERS |= {
    "all": [0, 2, 3],
    "axis": [2, 3],
    "m0": list(np.linspace(-1, 1, 32)),
    "v0": list(np.linspace(1, 2, 32)),
}


ALIKE = ("activation", "leaky", "below", "less per channel", "normalized", "mean of pixels")


@needs_blocks
@pytest.mark.parametrize("name", [in_sweep(n) if n in ALIKE else n for n in BETWEEN])
def test_between_convolutions(name, monkeypatch, step_operators):
    words = set(re.findall(r"\w+", BETWEEN[name]))
    shapes = {k: s for k, s in SHAPES.items() if k in words}
    others = {k: a for k, a in OTHERS.items() if k in words}
    case = BlockedConvolution(name, BETWEEN[name], (32, 10, 10), shapes)
    assert_same_as_plain(case, monkeypatch, 6, 4, others)
    assert step_operators[DOMAIN, "Conv"] >= 3


@needs_blocks
@pytest.mark.parametrize("name", BETWEEN)
def test_between_convolutions_of_sequences(name, monkeypatch, step_operators):
    nodes = BETWEEN[name].replace("1,1,1,1", "1,1").replace("[2,2]", "[2]")
    words = set(re.findall(r"\w+", nodes))
    shapes = {k: s[:3] if len(s) == 4 else s for k, s in SHAPES.items() if k in words}
    shapes |= {"c": (32, 1)} if "c" in words else {}
    one_axis = OTHERS | {"pixels": [2], "all": [0, 2], "start": [0], "end": [38], "axis": [2]}
    others = {k: a for k, a in one_axis.items() if k in words}
    case = BlockedConvolution(name, nodes, (32, 40), shapes)
    assert_same_as_plain(case, monkeypatch, 6, 4, others)
    assert step_operators[DOMAIN, "Conv"] >= 3


LINES = [case for case in (*CASES, *MORE_CASES) if "line" in case.id]


@needs_blocks
@pytest.mark.parametrize(
    "case",
    [DENSE, STRIDED_CHANNELS, *LINES[:5], *map(in_sweep, LINES[5:])],
    ids=lambda case: case.id,
)
def test_two_threads(case, monkeypatch):
    monkeypatch.setattr("onnxgrad.runtime.session.thread_count", lambda work: 2)
    monkeypatch.setattr("onnxgrad.native.thread_count", lambda work: 2)
    assert_same_as_plain(case, monkeypatch, 6, 4)


@needs_blocks
def test_frozen_weights_are_left_to_the_optimizer_of_onnxruntime(step_operators):
    weights = {k: np.full((32, 32, 3, 3), 0.01, "f4") for k in "vw"}
    text = """g (float[N,32,9,9] x) => (float[N,800] o) {
        h = Conv(x, w)  y = Conv(h, v)  o = Flatten(y) }"""
    trainer = og.Trainer(parse_model(text, **weights), "squared_error", freeze=["w"])
    trainer.fit(np.ones((4, 32, 9, 9), "f4"), np.ones((4, 800), "f4"), epochs=1)
    assert step_operators["", "Conv"] == 1
    assert step_operators[DOMAIN, "Conv"] == 2  # the second one, and its weight's gradient


def test_without_blocks_convolutions_stay(monkeypatch, step_operators):
    monkeypatch.setattr("onnxgrad.native.blocked_layout.block_size", lambda: 0)
    assert_same_as_plain(DENSE, monkeypatch, 4, 4)
    assert not step_operators[DOMAIN, "Conv"]


def test_a_failing_session_means_no_blocks(monkeypatch):
    def failing(*_, **__):
        raise RuntimeError("not a registered function")

    monkeypatch.setattr(blocked_layout.ort, "InferenceSession", failing)
    assert blocked_layout.block_size.__wrapped__() == 0


def test_wrong_numbers_mean_no_blocks(monkeypatch):
    monkeypatch.setattr(blocked_layout.BlockedLayout, "to_nchw", lambda layout, y: layout.op.Neg(y))
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
@pytest.mark.parametrize("pixels", [(10, 10), (40,)], ids=["images", "sequences"])
@pytest.mark.parametrize("name", [*map(in_sweep, list(NORMALIZED)[:2]), *list(NORMALIZED)[2:]])
def test_statistics_of_the_batch_in_blocks(name, pixels, monkeypatch, step_operators):
    nodes = NORMALIZED[name]
    if len(pixels) == 1:
        nodes = nodes.replace("1,1,1,1", "1,1")
    words = set(re.findall(r"\w+", nodes))
    kernel = (32, 32, *[3] * len(pixels))
    shapes = {"w": kernel, "v": kernel, "far": (32,)}
    shapes |= {f"{k}{i}": (32,) for k in "sbmv" for i in (0, 1)}
    rng = np.random.default_rng(0)
    weights = {k: rng.standard_normal(s).astype("f4") / 8 for k, s in shapes.items() if k in words}
    weights |= {k: np.ones(32, "f4") for k in weights if k in ("v0", "v1")}
    weights |= {k: w + 50 for k, w in weights.items() if k == "far"}
    text = f"""g (float[N,32,{",".join(map(str, pixels))}] x) => (float[N,1] o) {{
        {nodes}  s = Mul(y, y)  f = Flatten(s)  o = ReduceMean<keepdims=1>(f, axes) }}"""
    x = rng.standard_normal((6, 32, *pixels)).astype("f4")

    def trained() -> dict[str, np.ndarray]:
        model = parse_model(text, axes=np.int64([1]), **weights)
        options = {"optimizer": "sgd", "learning_rate": 0.1, "batch_norm": "train"}
        trainer = og.Trainer(model, "squared_error", **options)
        trainer.fit(x, np.ones((6, 1), "f4"), batch_size=4, epochs=1, shuffle=False)
        return initializer_arrays(trainer.model)

    mine = trained()
    assert step_operators["", "BatchNormalization"] == 0
    with monkeypatch.context() as plain:
        plain.setattr(build, "to_native", lambda *arguments: None)
        wanted = trained()
    for key, start in weights.items():
        scale = np.abs(wanted[key] - start).max()
        assert scale > 1e-6 or key == "far", key  # a bias before a mean has no gradient
        np.testing.assert_allclose(mine[key], wanted[key], rtol=2e-5, atol=1e-3 * scale + 1e-6)
