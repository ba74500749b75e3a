"""The native form of a step computes what its standard operators compute."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxgrad as og
from onnxgrad import native
from onnxgrad.runtime import session


def trained(model, x, label, monkeypatch, passes):
    """Return the weights after three steps with these passes, and the operators that ran."""
    ran: list[onnx.ModelProto] = []
    load = session.ort.InferenceSession

    def recorded(data, *arguments, **options):
        ran.append(onnx.load_from_string(data))
        return load(data, *arguments, **options)

    monkeypatch.setattr(native, "PASSES", passes)
    monkeypatch.setattr(session.ort, "InferenceSession", recorded)
    trainer = og.Trainer(model, "squared_error", optimizer=og.momentum(0.9), learning_rate=0.01)
    trainer.fit(x, label, epochs=3, batch_size=len(x), shuffle=False)
    bodies = [
        a.g
        for proto in ran
        for node in proto.graph.node
        for a in node.attribute
        if a.name == "body"
    ]
    weights = {t.name: numpy_helper.to_array(t) for t in trainer.model.graph.initializer}
    return weights, [node for body in bodies for node in body.node]


def compare(model, x, label, monkeypatch):
    """Return the operators of the step without and with the native passes; weights must agree."""
    passes = native.PASSES
    plain, before = trained(model, x, label, monkeypatch, ())
    other, after = trained(model, x, label, monkeypatch, passes)
    start = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    assert plain.keys() == other.keys()
    for name, w in plain.items():
        np.testing.assert_allclose(other[name], w, rtol=1e-4, atol=1e-6)
    assert any(np.abs(w - start[name]).max() > 1e-5 for name, w in other.items())
    return before, after


@pytest.mark.parametrize("layers", [33, 80])
def test_packed_weights_are_split_and_joined_in_trees(layers, monkeypatch):
    rng = np.random.default_rng(0)
    lines = [f"h{i + 1} = Tanh(a{i})" for i in range(layers)]
    body = " ".join(f"a{i} = Gemm(h{i}, w{i}, b{i}) {line}" for i, line in enumerate(lines))
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g (float[N,3] h0) => (float[N,3] h{layers}) {{ {body} }}""")
    for i in range(layers):
        w, b = rng.normal(0, 0.5, (3, 3)), rng.normal(0, 0.1, 3)
        for name, array in ((f"w{i}", w), (f"b{i}", b)):
            tensor = numpy_helper.from_array(array.astype(np.float32), name)
            model.graph.initializer.append(tensor)
    x = rng.normal(size=(4, 3)).astype(np.float32)
    before, after = compare(model, x, x[:, ::-1].copy(), monkeypatch)
    assert max(len(node.output) for node in before) == 2 * layers
    assert max(max(len(n.input), len(n.output)) for n in after) <= 64


RESIZES = [
    ("scale up", "", "1.0, 1.0, 2.0, 1.5", (8, 6)),
    ("scale down", ", antialias=1", "1.0, 1.0, 0.5, 0.5", (8, 6)),
    ("one axis", ', coordinate_transformation_mode="asymmetric"', "1.0, 1.0, 1.0, 3.0", (8, 6)),
    ("corners", ', coordinate_transformation_mode="align_corners"', "1.0, 1.0, 2.5, 2.0", (4, 7)),
    ("outside", ", exclude_outside=1, cubic_coeff_a=-0.5", "1.0, 1.0, 1.7, 2.2", (5, 7)),
]


@pytest.mark.parametrize(("attributes", "scales", "size"), [r[1:] for r in RESIZES])
@pytest.mark.parametrize("by_size", [False, True])
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
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g (float[{batch},2,{size[0]},{size[1]}] x) => (float[{batch},4,{high},{wide}] y) {{
            c = Conv(x, w)  {operands} }}""")
    w = rng.normal(size=(4, 2, 1, 1)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    x = rng.normal(size=(2, 2, *size)).astype(np.float32)
    label = rng.normal(size=(2, 4, high, wide)).astype(np.float32)
    before, after = compare(model, x, label, monkeypatch)
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
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g (float[N,2,7,6] x) => (float[N,3,3,2] y) {{ c = Conv(x, w)  {nodes} }}""")
    weights = {"w": (5, 2, 3, 3), "u": (3, 5, 3, 3), "v": (5, 5, 3, 3), "s": (5, 1, 1)}
    arrays = {n: rng.normal(0, 0.3, s) for n, s in weights.items() if f" {n})" in nodes + " w)"}
    for name, array in (arrays | more).items():
        tensor = numpy_helper.from_array(np.asarray(array, np.float32), name)
        model.graph.initializer.append(tensor)
    return model


@pytest.mark.parametrize("name", MASKS)
def test_masks_as_factors(name, monkeypatch):
    rng = np.random.default_rng(0)
    bounds = {"low": -0.1, "high": 0.5} if "Clip" in MASKS[name] else {}
    model = small_convolutions(f"{MASKS[name]}  y = Conv(h, u)", rng, **bounds)
    x = np.round(rng.normal(size=(4, 2, 7, 6)), 1).astype(np.float32)
    x[1] = 0  # so that c is 0
    label = rng.normal(size=(4, 3, 3, 2)).astype(np.float32)
    before, after = compare(model, x, label, monkeypatch)
    wheres = [Counter(node.op_type for node in nodes)["Where"] for nodes in (before, after)]
    assert wheres[1] < wheres[0] or "Clip" not in name
    assert ("HardSigmoid" in {node.op_type for node in after}) == (name == "Relu")


def test_a_mask_of_an_infinite_gradient_stays(monkeypatch):
    rng = np.random.default_rng(0)
    nodes = "h = Clip(c, low)  r = Sqrt(h)  s = Mul(r, r)  y = Conv(s, u)"
    model = small_convolutions(nodes, rng, low=0.0)
    x = rng.normal(size=(4, 2, 7, 6)).astype(np.float32)
    passes = native.PASSES
    label = rng.normal(size=(4, 3, 3, 2)).astype(np.float32)
    plain, _ = trained(model, x, label, monkeypatch, ())
    other, _ = trained(model, x, label, monkeypatch, passes)
    for weight, same in zip(plain.values(), other.values(), strict=True):
        assert np.isfinite(weight).all()
        np.testing.assert_allclose(weight, same, rtol=1e-4, atol=1e-6)
