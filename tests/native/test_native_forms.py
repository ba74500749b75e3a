"""The native form of a step computes what its standard operators compute."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad import native
from onnxgrad.runtime import session
from tests.support.models import initializer_arrays, parse_model
from tests.support.running import in_sweep


def train_in_phases(model, x, label, monkeypatch, phases):
    """Return the weights after three steps in these phases, and the operators that ran."""
    ran: list[onnx.ModelProto] = []
    load = session.ort.InferenceSession

    def recorded(data, *arguments, **options):
        ran.append(onnx.load_from_string(data))
        return load(data, *arguments, **options)

    monkeypatch.setattr(native, "PHASES", phases)
    if not phases:
        monkeypatch.setattr(native, "EPOCH", "none")
    monkeypatch.setattr(session.ort, "InferenceSession", recorded)
    trainer = og.Trainer(
        model, "squared_error", optimizer=og.optimizers.momentum(0.9), learning_rate=0.01
    )
    trainer.fit(x, label, epochs=3, batch_size=len(x), shuffle=False)
    attributes = [a for proto in ran for node in proto.graph.node for a in node.attribute]
    bodies = [a.g for a in attributes if a.name == "body"]
    return initializer_arrays(trainer.model), [node for body in bodies for node in body.node]


def compare_forms(model, x, label, monkeypatch, atol=1e-6):
    """Return the operators of the step without and with the native form; weights must agree."""
    phases = native.PHASES
    with monkeypatch.context() as patched:
        plain, before = train_in_phases(model, x, label, patched, ())
    other, after = train_in_phases(model, x, label, monkeypatch, phases)
    start = initializer_arrays(model)
    assert plain.keys() == other.keys()
    for name, w in plain.items():
        np.testing.assert_allclose(other[name], w, rtol=1e-4, atol=atol)
    assert any(np.abs(w - start[name]).max() > 1e-5 for name, w in other.items())
    return before, after


def test_two_pools_of_one_map(monkeypatch):
    rng = np.random.default_rng(0)
    w = rng.normal(size=(8, 1, 3, 3)).astype(np.float32)
    text = """g (float[N,1,8,8] x) => (float[N,384] y) {
          c = Conv<pads = [1, 1, 1, 1]>(x, w)  a = Relu(c)
          p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(a)
          q = MaxPool<kernel_shape = [2, 1], strides = [2, 1]>(a)
          r = Flatten(p)  s = Flatten(q)  y = Concat<axis = 1>(r, s) }"""
    model = parse_model(text, w=w)
    x = rng.normal(size=(4, 1, 8, 8)).astype(np.float32)
    compare_forms(model, x, np.zeros((4, 384), np.float32), monkeypatch)


RESIZES = [
    ("scale up", "", "1.0, 1.0, 2.0, 1.5", (8, 6)),
    ("scale down", ", antialias=1", "1.0, 1.0, 0.5, 0.5", (8, 6)),
    ("one axis", ', coordinate_transformation_mode="asymmetric"', "1.0, 1.0, 1.0, 3.0", (8, 6)),
    ("corners", ', coordinate_transformation_mode="align_corners"', "1.0, 1.0, 2.5, 2.0", (4, 7)),
    ("outside", ", exclude_outside=1, cubic_coeff_a=-0.5", "1.0, 1.0, 1.7, 2.2", (5, 7)),
]


@pytest.mark.parametrize(("attributes", "scales", "size"), [r[1:] for r in RESIZES])
@pytest.mark.parametrize("by_size", [False, in_sweep(True)])
def test_cubic_resize_by_products(attributes, scales, size, by_size, monkeypatch):
    rng = np.random.default_rng(0)
    factors = [float(s) for s in scales.split(",")]
    high, wide = (int(n * s) for n, s in zip(size, factors[2:], strict=True))
    if by_size:
        operands = f"s = Constant<value_ints=[2, 4, {high}, {wide}]>() y = Resize"
        operands, batch = f'{operands}<mode="cubic"{attributes}>(c, , , s)', 2
    else:
        operands = f"s = Constant<value_floats=[{scales}]>() y = Resize"
        operands, batch = f'{operands}<mode="cubic"{attributes}>(c, , s)', "N"
    w = rng.normal(size=(4, 2, 1, 1)).astype(np.float32)
    text = f"""g (float[{batch},2,{size[0]},{size[1]}] x) => (float[{batch},4,{high},{wide}] y) {{
            c = Conv(x, w)  {operands} }}"""
    model = parse_model(text, w=w)
    x = rng.normal(size=(2, 2, *size)).astype(np.float32)
    label = rng.normal(size=(2, 4, high, wide)).astype(np.float32)
    before, after = compare_forms(model, x, label, monkeypatch)
    resizes = [Counter(node.op_type for node in nodes)["Resize"] for nodes in (before, after)]
    assert resizes[0] > resizes[1]


@pytest.mark.parametrize("axes", ["[2, 3]", "[3, 2]"])
def test_cubic_resize_of_named_axes_by_products(axes, monkeypatch):
    rng = np.random.default_rng(0)
    model = parse_model(
        f"""g (float[N,2,4,5] x) => (float[N,4,h,w] y) {{ c = Conv(x, u)
        s = Constant<value_floats=[2.0, 2.0]>()
        y = Resize<mode="cubic", axes={axes}>(c, , s) }}""",
        u=rng.normal(size=(4, 2, 1, 1)).astype(np.float32),
    )
    x, label = (rng.normal(size=s).astype(np.float32) for s in ((2, 2, 4, 5), (2, 4, 8, 10)))
    before, after = compare_forms(model, x, label, monkeypatch)
    resizes = [Counter(node.op_type for node in nodes)["Resize"] for nodes in (before, after)]
    assert resizes[0] > resizes[1]


MASKS = {
    "Relu": "h = Relu(c)",
    "Clip": "h = Clip(c, low, high)",
    "Clip from below": "h = Clip(c, low)",
    "LeakyRelu": "h = LeakyRelu<alpha=0.2>(c)",
    "residual": "a = Conv<pads=[1,1,1,1]>(c, v)  b = Add(a, c)  h = Clip(b, low, high)",
    "per channel": "b = Mul(c, s)  h = Clip(b, low, high)",
}


def small_convolutions(nodes, rng, **more):
    text = f"g (float[N,2,7,6] x) => (float[N,3,3,2] y) {{ c = Conv(x, w)  {nodes} }}"
    weights = {"w": (5, 2, 3, 3), "u": (3, 5, 3, 3), "v": (5, 5, 3, 3), "s": (5, 1, 1)}
    arrays = {n: rng.normal(0, 0.3, s) for n, s in weights.items() if f" {n})" in nodes + " w)"}
    return parse_model(text, **{name: np.float32(a) for name, a in (arrays | more).items()})


@pytest.mark.parametrize("name", MASKS)
def test_masks_as_factors(name, monkeypatch):
    rng = np.random.default_rng(0)
    bounds = {"low": -0.1, "high": 0.5} if "Clip" in MASKS[name] else {}
    model = small_convolutions(f"{MASKS[name]}  y = Conv(h, u)", rng, **bounds)
    x = np.round(rng.normal(size=(4, 2, 7, 6)), 1).astype(np.float32)
    x[1] = 0  # so that c is 0
    label = rng.normal(size=(4, 3, 3, 2)).astype(np.float32)
    before, after = compare_forms(model, x, label, monkeypatch)
    wheres = [Counter(node.op_type for node in nodes)["Where"] for nodes in (before, after)]
    assert wheres[1] < wheres[0] or "Clip" not in name


def test_a_mask_of_an_infinite_gradient_stays(monkeypatch):
    rng = np.random.default_rng(0)
    nodes = "h = Clip(c, low)  r = Sqrt(h)  s = Mul(r, r)  y = Conv(s, u)"
    model = small_convolutions(nodes, rng, low=0.0)
    x = rng.normal(size=(4, 2, 7, 6)).astype(np.float32)
    phases = native.PHASES
    label = rng.normal(size=(4, 3, 3, 2)).astype(np.float32)
    plain, _ = train_in_phases(model, x, label, monkeypatch, ())
    other, _ = train_in_phases(model, x, label, monkeypatch, phases)
    for weight, same in zip(plain.values(), other.values(), strict=True):
        assert np.isfinite(weight).all()
        np.testing.assert_allclose(weight, same, rtol=1e-4, atol=1e-6)


POOLS = {
    "2 x 2": ("kernel_shape=[2,2], strides=[2,2]", (8, 6)),
    "2 x 2, odd": ("kernel_shape=[2,2], strides=[2,2]", (9, 7)),
    "2 x 2, rounded up": ("kernel_shape=[2,2], strides=[2,2], ceil_mode=1", (9, 7)),
    "3 x 2": ("kernel_shape=[3,2], strides=[3,2]", (9, 8)),
    "apart": ("kernel_shape=[2,1], strides=[3,2]", (8, 9)),
    "padding": ("kernel_shape=[3,3], strides=[3,3], pads=[1,0,2,1]", (8, 8)),
    "padding at the beginning": ("kernel_shape=[2,2], strides=[2,2], pads=[1,1,0,0]", (9, 9)),
    "column major": ("kernel_shape=[2,2], strides=[2,2], storage_order=1", (8, 6)),
    "overlapping": ("kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]", (8, 8)),
    "dilated": ("kernel_shape=[2,2], strides=[3,3], dilations=[2,2]", (9, 9)),
    "same": ('kernel_shape=[2,2], strides=[2,2], auto_pad="SAME_UPPER"', (9, 9)),
    "line": ("kernel_shape=[4], strides=[4]", (40,)),
}
REPEATED = ("2 x 2", "3 x 2", "padding at the beginning")
KEPT = ("overlapping", "dilated", "same", "column major", "line")


@pytest.mark.parametrize("channels", [20, in_sweep(32)])
@pytest.mark.parametrize("name", [in_sweep(n) if n in REPEATED else n for n in POOLS])
def test_max_pools_without_indices(name, channels, monkeypatch):
    rng = np.random.default_rng(0)
    attributes, lengths = POOLS[name]
    spatial = ",".join(map(str, lengths))
    ends = ",".join(["2"] * len(lengths))
    kernel = ",".join(["3"] * len(lengths))
    pads = ",".join(["1"] * 2 * len(lengths))
    text = f"""g (float[N,2,{spatial}] x) => (float[N,4] y) {{
            c = Conv<kernel_shape=[{kernel}], pads=[{pads}]>(x, w)  h = Relu(c)
            p = MaxPool<{attributes}>(h)  t = Mul(p, p)
            q = Conv<kernel_shape=[{ends}], pads=[{pads}]>(t, u)
            e = GlobalAveragePool(q)  y = Flatten(e) }}"""
    axes = len(lengths)
    shapes = {"w": (channels, 2, *[3] * axes), "u": (4, channels, *[2] * axes)}
    # numbers with many equal sums
    weights = {n: np.float32(rng.integers(-1, 2, shape) / 8) for n, shape in shapes.items()}
    model = parse_model(text, **weights)
    x = rng.integers(-1, 2, (5, 2, *lengths)).astype(np.float32)
    label = rng.normal(size=(5, 4)).astype(np.float32)
    before, after = compare_forms(model, x, label, monkeypatch, atol=1e-5)
    indices = [sum(len(n.output) > 1 for n in k if n.op_type == "MaxPool") for k in (before, after)]
    assert (indices[1] > 0) == (name in KEPT)
    assert indices[0] > 0
