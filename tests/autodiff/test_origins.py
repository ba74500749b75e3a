"""Networks that onnxruntime has optimized, at all levels: what trains, and its gradient."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnxruntime as ort
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from onnxgrad import NoGradientRule, onnx_derivative, trainable  # noqa: E402
from onnxgrad.model.weights import constant_refs  # noqa: E402
from tests.support.running import run_named  # noqa: E402
from tests.training.parameters import test_trainable as exports  # noqa: E402

LEVELS = exports.LEVELS | {"all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL}
SLOW = pytest.mark.sweep


def gradients(model, feed: dict, cotangents: list[np.ndarray]) -> Counter:
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


def exported() -> list:
    """Return every network, exporter and level; most of them are of the sweep."""
    return [
        pytest.param(
            *param.values, level, id=f"{param.id}-{level}",
            marks=[SLOW] * bool(param.marks or level != "extended" or i % 3),
        )
        for i, param in enumerate(exports.exports())
        for level in ("basic", "extended", "all")
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "dynamo", "level"), exported())
def test_gradients_of_an_optimized_network_are_those_of_pytorch(
    name, dynamo, level, tmp_path, monkeypatch
):
    """Numbers are recognized by their values, wherever the optimizer has moved them."""
    monkeypatch.setattr(exports, "LEVELS", LEVELS)
    net, inputs = exports.network(name)
    model = exports.optimized(exports.exported(name, dynamo), level, tmp_path)
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
        with pytest.raises(NoGradientRule, match="optimized at ORT_ENABLE_EXTENDED at most"):
            gradients(model, feed, starts)
        return
    found = gradients(model, feed, starts)
    shared = found.keys() & slopes.keys()
    # the others are folded into one: the scales of a batch normalization into a convolution
    assert len(shared) > (0.06 if name in FOLDED else 0.95) * len(slopes)
    scale = max(map(abs, slopes.values()))
    for value in shared:
        assert abs(found[value] - slopes[value]) <= 2e-4 * scale


FOLDED = ("cnn", "detector", "weight norm")
