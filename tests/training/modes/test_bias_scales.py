"""Scales of rounded weights are large enough for the biases beside them."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrad.training.modes.stored_integers import leave_room_for_biases
from tests.support.models import initializer_arrays, parse_model

DATA_SCALE, LARGEST = 0.5, 2**31 - 1
BIAS = np.float32([0.01, 0.0, -7.0])


def scales_beside_biases(scales, bias=BIAS, attributes="", rounded=True):
    """Return the scales of the weights of a Gemm, given those before and the bias."""
    model = parse_model(
        f"""g (float[N,2] x) => (float[N,3] y) {{
            a = QuantizeLinear(x, t, z)  b = DequantizeLinear(a, t, z)
            c = QuantizeLinear{attributes}(w, s)  d = DequantizeLinear{attributes}(c, s)
            y = Gemm<transB=1>(b, d, bias) }}""",
        opset=21,
        w=np.zeros((3, 2), np.float32),
        t=np.float32(DATA_SCALE),
        z=np.uint8(3),
        s=np.float32(scales),
        bias=bias,
    )
    leave_room_for_biases(model.graph, [model.graph.node[2]] if rounded else [])
    return initializer_arrays(model)["s"]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_has_room_for_the_largest_bias(shape):
    (scale,) = scales_beside_biases(np.full(shape, 1e-12)).reshape(1)
    assert 0.999 * LARGEST < 7.0 / (DATA_SCALE * scale) <= LARGEST
    enough = np.full(shape, 0.25, np.float32)
    np.testing.assert_array_equal(scales_beside_biases(enough), enough)


def test_each_channel_has_room_for_its_own_bias():
    before = np.float32([1e-12, 1e-12, 0.25])
    after = scales_beside_biases(before, attributes="<axis=0>")
    np.testing.assert_array_equal(after[1:], before[1:])
    assert 0.999 * LARGEST < BIAS[0] / (DATA_SCALE * after[0]) <= LARGEST


def test_other_scales_stay():
    """Blocks, for which no kernel adds integers, and weights that do not train keep theirs."""
    blocks = np.full((3, 2), 1e-12, np.float32)
    after = scales_beside_biases(blocks, attributes="<axis=1, block_size=1>")
    np.testing.assert_array_equal(after, blocks)
    small = np.full(3, 1e-12, np.float32)
    after = scales_beside_biases(small, attributes="<axis=0>", rounded=False)
    np.testing.assert_array_equal(after, small)
