"""Forms of gradients for devices that lack kernels: the same numbers, and no indices of maxima."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from onnxgrad import Trainer, random_feed
from onnxgrad.native import Target
from onnxgrad.runtime.device import Device
from onnxgrad.training.data import Dataset
from onnxgrad.training.recipe import Recipe
from tests.support.models import parse_model

rng = np.random.default_rng(0)
LACKING = {"LogSoftmax", "MaxUnpool"}


def both_forms(model, x):
    """Return (plain model, results) and (model for a device, results) of the gradients."""
    trainer = Trainer(
        model, "squared_error", batch_norm="train" if has_statistics(model) else "frozen"
    )
    found = []
    for target in None, Target(Device.of("webgpu"), 1):
        recipe = Recipe.for_data(trainer._job, trainer.state, Dataset(None))
        gradients = recipe.gradient_model(target)
        objective = recipe.objective()
        feed = random_feed(gradients.graph.input, len(x), random_state=0)
        feed |= trainer.state.weights | objective.initial_buffers | {"x": x}
        session = ort.InferenceSession(gradients.SerializeToString())
        found.append((gradients, session.run(None, feed)))
    return found


def has_statistics(model) -> bool:
    return any(node.op_type == "BatchNormalization" for node in model.graph.node)


def compare_device_form(text, x, **weights):
    """Compare the results of both forms, and return the nodes of the form for a device."""
    (plain, expected), (model, found) = both_forms(parse_model(text, **weights), x)
    for y, like in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, like, rtol=1e-5, atol=1e-5)
    nodes = list(model.graph.node)
    assert LACKING.isdisjoint(node.op_type for node in nodes)
    assert any(n.op_type in LACKING or len(n.output) > 1 for n in plain.graph.node)
    return nodes


POOLS = {
    "2 x 2": ("kernel_shape=[2,2], strides=[2,2]", (8, 6)),
    "rest": ("kernel_shape=[2,2], strides=[2,2]", (9, 7)),
    "overlapping": ("kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]", (8, 8)),
    "overlapping, rest": ("kernel_shape=[3,2], strides=[2,1]", (8, 5)),
    "gaps": ("kernel_shape=[2,2], strides=[3,3]", (9, 8)),
    "padding at the end": ("kernel_shape=[3,3], strides=[2,2], pads=[0,0,1,1]", (8, 8)),
    "ceil": ("kernel_shape=[3,3], strides=[2,2], ceil_mode=1", (8, 8)),
    "line": ("kernel_shape=[3], strides=[2], pads=[1,0]", (11,)),
}


@pytest.mark.parametrize("name", POOLS)
def test_maxima_without_indices(name):
    attributes, lengths = POOLS[name]
    spatial = ",".join(map(str, lengths))
    x = rng.integers(-2, 3, (4, 3, *lengths)).astype(np.float32)  # with equal maxima
    nodes = compare_device_form(
        f"""f (float[N,3,{spatial}] x) => (float[N,M] y) {{
            s = Mul(x, w)  p = MaxPool<{attributes}>(s)  q = Mul(p, p)  y = Flatten(q) }}""",
        x, w=np.float32([[[1.0]], [[-2.0]], [[0.5]]][:3]).reshape(3, *[1] * len(lengths)),
    )  # fmt: skip
    assert all(len(n.output) == 1 for n in nodes if n.op_type == "MaxPool")


def test_a_layer_normalization():
    nodes = compare_device_form(
        """f (float[N,5,4] x) => (float[N,5,4] y) {
           h = Mul(x, v)  y = LayerNormalization<axis=-1, epsilon=0.1>(h, w, b) }""",
        rng.normal(size=(6, 5, 4)).astype(np.float32),
        v=np.ones(4, np.float32), w=np.float32([1, -2, 3, 1]), b=np.float32([0, 1, 2, 3]),
    )  # fmt: skip
    assert all(len(n.output) == 1 for n in nodes if n.op_type == "LayerNormalization")


def test_statistics_of_a_batch():
    nodes = compare_device_form(
        """f (float[N,3,4,4] x) => (float[N,3,4,4] y) {
           c = Conv<kernel_shape=[1,1]>(x, k)
           y = BatchNormalization<momentum=0.7>(c, w, b, m, v) }""",
        rng.normal(size=(6, 3, 4, 4)).astype(np.float32),
        k=rng.normal(size=(3, 3, 1, 1)).astype(np.float32), w=np.float32([1, 2, -1]),
        b=np.float32([0, 1, 0]), m=np.zeros(3, np.float32), v=np.ones(3, np.float32),
    )  # fmt: skip
    assert "BatchNormalization" not in {n.op_type for n in nodes}
    assert not any(n.op_type == "Sum" and len(n.input) == 1 for n in nodes)


def test_a_log_softmax():
    (_, expected), (model, found) = both_forms(
        parse_model(
            "f (float[N,4,3] x) => (float[N,4,3] y) { h = Mul(x, w)  y = LogSoftmax<axis=1>(h) }",
            w=np.float32([1, 2, 3]),
        ),
        rng.normal(size=(5, 4, 3)).astype(np.float32),
    )
    for y, like in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, like, rtol=1e-5, atol=1e-6)
    assert "LogSoftmax" not in {n.op_type for n in model.graph.node}
