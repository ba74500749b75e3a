"""Networks that onnxruntime has optimized, at all levels: what trains, and its gradient."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest

from onnxgrad import NoGradientRule, onnx_derivative, trainable
from onnxgrad.model.weights import constant_refs
from tests.support.optimized_models import optimized_model
from tests.support.running import in_sweep, run_named
from tests.support.trainable_exports import NETWORK_NAMES, exported_network, random_network

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

FOLDED = ("cnn", "detector", "weight norm")
QUICK = [("cnn", False, "extended"), ("rotary decoder", False, "extended"), ("gru", False, "basic"),
         ("depthwise", False, "all"), ("scaled logits", False, "extended")]  # fmt: skip
EXPORTS = [
    (name, dynamo, level)
    for dynamo in (False, True)
    for name in NETWORK_NAMES
    for level in ("basic", "extended", "all")
]


def gradients_by_value(
    model: onnx.ModelProto, feed: dict[str, np.ndarray], cotangents: list[np.ndarray]
) -> Counter:
    """Return the gradient with respect to each number of the trained tensors, by its value."""
    arrays = {r.name: r.array() for r in constant_refs(model)}
    names = [t.name for t in trainable(model) if t.trains]
    derivative = onnx_derivative(model, names, inputs=[])
    starts = {f"{y.name}_grad": g for y, g in zip(model.graph.output, cotangents, strict=True)}
    values = feed | {name: arrays[name] for name in names} | starts
    found = run_named(derivative, {x.name: values[x.name] for x in derivative.graph.input})
    total: Counter = Counter()
    for name in names:
        for value, slope in zip(arrays[name].flat, found[f"{name}_grad"].flat, strict=True):
            total[float(value)] += float(slope)
    return total


@pytest.mark.parametrize(
    ("name", "dynamo", "level"), [e if e in QUICK else in_sweep(*e) for e in EXPORTS]
)
def test_gradients_of_an_optimized_network_are_those_of_pytorch(name, dynamo, level):
    """Numbers are recognized by their values, wherever the optimizer has moved them."""
    net, inputs = random_network(name)
    model = optimized_model(exported_network(name, dynamo), level)
    ys = net(*inputs)
    ys = ys if isinstance(ys, tuple) else (ys,)
    rng = np.random.default_rng(0)
    starts = [rng.standard_normal(tuple(y.shape)).astype(np.float32) for y in ys]
    torch.autograd.backward(ys, [torch.tensor(g) for g in starts])
    slopes = {
        value: slope
        for p in net.parameters()
        if p.grad is not None
        for value, slope in zip(p.detach().ravel().tolist(), p.grad.ravel().tolist(), strict=True)
    }
    feed = {x.name: v.numpy() for x, v in zip(model.graph.input, inputs, strict=True)}
    if any(node.domain == "com.microsoft.nchwc" for node in model.graph.node):
        assert level == "all"
        with pytest.raises(NoGradientRule, match="ORT_ENABLE_EXTENDED"):
            gradients_by_value(model, feed, starts)
        return
    found = gradients_by_value(model, feed, starts)
    shared = found.keys() & slopes.keys()
    # the others are folded into one: the scales of a batch normalization into a convolution
    assert len(shared) > (0.06 if name in FOLDED else 0.95) * len(slopes)
    scale = max(map(abs, slopes.values()))
    for value in shared:
        assert abs(found[value] - slopes[value]) <= 2e-4 * scale
