"""Masks of Attention: as long as the keys, shorter, or of a length that is not stated."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.model.convert import to_proto
from tests.support.models import operator_names, parse_model
from tests.support.running import run_named

KEYS = 5
TEXT = f"""g (float[2,2,3,4] q, float[2,2,{KEYS},4] k, float[2,2,{KEYS},4] v, KIND[3,LENGTH] m)
    => (float y) {{ y = Attention(q, k, v, m) }}"""


@pytest.mark.parametrize("unknown", ["", "m", "k", "km"])
@pytest.mark.parametrize("length", [KEYS, 3])
@pytest.mark.parametrize("kind", ["float", "bool"])
def test_a_mask_hides_the_keys_beyond_it(kind, length, unknown):
    text = TEXT.replace("KIND", kind)
    model, whole = (
        parse_model(text.replace("LENGTH", str(n)), opset=23, output_shapes=False)
        for n in (length, KEYS)
    )
    for x in model.graph.input:
        if x.name in unknown:
            x.type.tensor_type.ClearField("shape")
    lowered = to_proto(prepare(model, on_demand=True))
    operators = operator_names(lowered)
    assert "Attention" not in operators
    assert ("Pad" in operators) == (length < KEYS or unknown != "")
    rng = np.random.default_rng(0)
    feed = {
        n: rng.normal(size=(2, 2, m, 4)).astype("f4") for n, m in (("q", 3), ("k", 5), ("v", 5))
    }
    mask = rng.normal(size=(3, KEYS)).astype("f4") if kind == "float" else np.eye(3, KEYS) > 0
    hidden = np.where(np.arange(KEYS) < length, mask, -np.inf if kind == "float" else False)
    expected = run_named(whole, feed, m=hidden.astype(mask.dtype))["y"]
    found = run_named(lowered, feed, m=mask[:, :length])["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
