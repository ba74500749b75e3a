"""Sums x + s y, which are one node of onnxruntime in the native form."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from onnxgrad.graph.rewrite import GROUPS, rewrite
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.native import Target
from onnxgrad.native.single_nodes import PLAIN
from onnxgrad.runtime.device import CPU
from tests.support.models import parse_model
from tests.support.running import run

NEWEST = tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 32)
has_gated_add = pytest.mark.skipif(not NEWEST, reason="onnxruntime has no GatedAdd")
SPECIAL = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3e38, 1, 1 / 3])
SUMS = {
    "x + y s": ("float[100] x, float[100] y, float s", "t = Mul(y, s)  z = Add(x, t)"),
    "s y + x": ("float[100] x, float[100] y, float[1] s", "t = Mul(s, y)  z = Add(t, x)"),
}


@has_gated_add
@pytest.mark.parametrize("s", [0.0, -1e-3, 1 / 3, np.inf, np.nan])
@pytest.mark.parametrize("name", ["x + y s", "s y + x"])
def test_scaled_sum_changes_no_bit(name, s):
    inputs, nodes = SUMS[name]
    model = parse_model(f"g ({inputs}) => (float[100] z) {{ {nodes} }}")
    x, y = (a.ravel() for a in np.meshgrid(SPECIAL, SPECIAL))
    feed = {"x": x, "y": y, "s": np.full((1,) if "[1]" in inputs else (), s, np.float32)}
    wanted, native_form = run(model, feed)[0], to_ir(model)
    assert rewrite(native_form.graph, GROUPS[PLAIN], Target(CPU, 1, 4))
    assert "GatedAdd" in {node.op_type for node in native_form.graph}
    got = run(to_proto(native_form), feed)[0]
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got[~nan].view(np.int32), wanted[~nan].view(np.int32))


@pytest.mark.parametrize(
    ("inputs", "nodes"),
    [
        ("double[9] x, double[9] y, double s", "t = Mul(y, s)  z = Add(x, t)"),
        ("float[3,3] x, float[3,3] y, float s", "t = Mul(y, s)  z = Add(x, t)"),
        ("float[9] x, float[1] y, float s", "t = Mul(y, s)  z = Add(x, t)"),
        ("float[9] x, float[9] y, float[9] s", "t = Mul(y, s)  z = Add(x, t)"),
        ("float[N] x, float[N] y, float s", "t = Mul(y, s)  z = Add(x, t)"),
        ("float[0] x, float[0] y, float s", "t = Mul(y, s)  z = Add(x, t)"),
        ("float[1] x, float[1] y, float[1] s", "t = Mul(y, s)  z = Add(x, t)"),
        ("float[9] x, float[9] y, float s", "t = Div(y, s)  z = Add(x, t)"),
    ],
)
def test_other_sums_stay(inputs, nodes):
    output = inputs.split(" ", 1)[0]
    model = to_ir(parse_model(f"g ({inputs}) => ({output} z) {{ {nodes} }}"))
    assert not rewrite(model.graph, GROUPS[PLAIN], Target(CPU, 1, 4))
