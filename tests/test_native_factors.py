"""The native form of sums of products: their common factor is multiplied once."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.native import Target, to_native
from onnxgrad.runtime.device import Device
from running import run

GELU = """u = Div(x, c)  e = Erf(u)  p = Mul(h, e)
    t = Mul(h, x)  w = Exp(u)  q = Mul(t, w)  r = Div(q, c)  y = Add(p, r)"""


def both(body: str, dtype: str = "float", outputs: str = "y", h: str = "N, 3"):
    """Return a model, and its native form."""
    results = ", ".join(f"{dtype}[N, 3] {name}" for name in outputs.split())
    text = f"""<ir_version: 9, opset_import: ["": 18]>
        g ({dtype}[N, 3] x, {dtype}[{h}] h) => ({results}) <{dtype} c = {{1.5}}> {{ {body} }}"""
    proto = onnx.parser.parse_model(text)
    model = to_ir(onnx.shape_inference.infer_shapes(proto, data_prop=True))
    to_native(model.graph, Target(Device.of("cpu"), 2))
    return proto, to_proto(model)


def operators(model: onnx.ModelProto) -> list[str]:
    return sorted(node.op_type for node in model.graph.node)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (GELU, ["Add", "Div", "Erf", "Exp", "Mul", "Mul"]),
        ("a = Exp(x)  p = Mul(h, a)  b = Erf(x)  q = Mul(b, h)  y = Add(p, q)", None),
        ("p = Mul(h, x)  q = Mul(h, h)  y = Add(p, q)", ["Add", "Mul"]),
        ("p = Mul(h, h)  a = Exp(x)  t = Mul(a, h)  q = Div(t, c)  y = Add(p, q)", None),
    ],
)
def test_a_common_factor_is_multiplied_once(body, expected):
    before, after = both(body)
    assert len(after.graph.node) < len(before.graph.node)
    if expected:
        assert operators(after) == expected
    rng = np.random.default_rng(0)
    x, h = (rng.standard_normal((4, 3)).astype(np.float32) for _ in range(2))
    np.testing.assert_allclose(run(after, x=x, h=h)[0], run(before, x=x, h=h)[0], rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"body": GELU, "dtype": "double"},
        {"body": GELU, "outputs": "y p"},  # a product that is an output
        {"body": GELU + "  z = Neg(q)", "outputs": "y z"},  # one that another node reads
        {"body": GELU, "h": "3"},  # the other factors are the larger ones
        {"body": "p = Mul(h, x)  y = Add(p, h)"},
        {"body": "a = Exp(x)  p = Mul(h, x)  q = Mul(x, a)  r = Sub(p, q)  y = Add(r, h)"},
    ],
)
def test_what_saves_no_pass_is_left_alone(options):
    before, after = both(**options)
    if "p" in options.get("outputs", "") or "z" in options.get("outputs", ""):
        assert len(after.graph.node) >= len(before.graph.node) - 1
        x, h = (np.random.default_rng(i).random((4, 3), np.float32) for i in range(2))
        for ours, theirs in zip(run(after, x=x, h=h), run(before, x=x, h=h), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    else:
        assert operators(before) == operators(after)
