"""Training on execution providers that copy tensors: a made-up one that computes on the CPU."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgrad import Checkpoint, ProviderError, Trainer, TrainerStack
from onnxgrad.optimizers import adamw, ema
from onnxgrad.training.device_check import check_device
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.moon import moon as moon

rng = np.random.default_rng(0)


def scaled_normal(*shape):
    return rng.normal(0, 0.4, shape).astype(np.float32)


MODEL = parse_model(
    """f (float[N,2,8,8] x) => (float[N,3] y) {
    a = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w, b)
    h = BatchNormalization(a, scale, bias, mean, variance)  r = Relu(h)
    p = MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(r)  f = Flatten(p)
    d = Dropout(f)  y = Gemm(d, v, c) }""",
    w=scaled_normal(4, 2, 3, 3), b=scaled_normal(4), v=scaled_normal(64, 3), c=scaled_normal(3),
    scale=1 + scaled_normal(4), bias=scaled_normal(4), mean=scaled_normal(4),
    variance=1 + scaled_normal(4) ** 2,
)  # fmt: skip
X = rng.normal(size=(30, 2, 8, 8)).astype(np.float32)
Y = rng.integers(0, 3, 30)
WEIGHT = rng.uniform(0.5, 2, 30).astype(np.float32)


def trained(device, model=MODEL, fit=None, **options):
    """Return a trainer after two epochs, with shorter last batches."""
    given = {"optimizer": "sgd", "learning_rate": 0.05, **options}
    trainer = Trainer(model, "cross_entropy", device=device, **given)
    return trainer.fit(X, Y, **{"epochs": 2, "batch_size": 8, **(fit or {})})


def compare_with_cpu(moon, **arguments) -> None:
    """Compare weights, statistics, losses and predictions of both devices."""
    there, here = trained("moon", **arguments), trained("cpu", **arguments)
    assert moon.computed
    for name, array in here.evaluated().items():
        np.testing.assert_allclose(there.evaluated()[name], array, rtol=1e-4, atol=2e-5)
    assert there.history[-1]["loss"] == pytest.approx(here.history[-1]["loss"], rel=1e-4)
    assert there.evaluate(X, Y)["loss"] == pytest.approx(here.evaluate(X, Y)["loss"], rel=1e-4)
    np.testing.assert_allclose(there.predict(X), here.predict(X), rtol=1e-3, atol=1e-4)


CASES = {
    "plain": {},
    "statistics of batches": {"batch_norm": "train"},
    "momentum, clipped": {"optimizer": "momentum", "clip_norm": 0.1},
    "micro-batches": {"accumulate": 2},
    "averages": {"optimizer": ema(adamw(0.01), 0.9)},
    "dropout": {"dropout": {"d": 0.3}},
    "sample weights": {"fit": {"sample_weight": WEIGHT}},
    "weights of classes": {"class_weight": "balanced"},
    "validation": {"fit": {"validation": 0.2}},
    "recomputed": {"recompute": "all"},
    "some weights": {"train": ["v", "c"]},
    "smoothed labels": {"loss_options": {"label_smoothing": 0.1}},
}


@pytest.mark.parametrize("name", CASES)
def test_trains_as_on_the_cpu(moon, name):
    moon.refuses = {"MaxPoolWithIndices", "MaxUnpool", "LogSoftmax"}
    compare_with_cpu(moon, **CASES[name])


def test_the_cpu_updates_weights(moon):
    trained("moon", optimizer="adamw")
    assert "Conv" in moon.computed
    assert "Pow" not in moon.computed  # of the bias correction


def test_a_fixed_batch(moon):
    model = onnx.ModelProto()
    model.CopyFrom(MODEL)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 2
    compare_with_cpu(moon, model=model, fit={"batch_size": 10})


def test_half_precision(moon):
    pytest.importorskip("onnxruntime.transformers.float16")
    from onnxruntime.transformers.float16 import convert_float_to_float16

    half = convert_float_to_float16(MODEL, keep_io_types=True, op_block_list=[])
    assert trained("moon", model=half, fit={"epochs": 1}).precision == "float32"


def test_a_stack(moon):
    stacks = [
        TrainerStack(MODEL, "cross_entropy", optimizer="sgd", learning_rate=[0.01, 0.05],
                     device=device).fit(X, Y, epochs=2, batch_size=8)
        for device in ("moon", "cpu")
    ]  # fmt: skip
    for name, array in stacks[1].state.weights.items():
        np.testing.assert_allclose(stacks[0].state.weights[name], array, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_goes_on(moon, tmp_path):
    def fit_to(epochs, folder, resume=None):
        return trained("moon", optimizer="adamw", callbacks=[Checkpoint(folder)],
                       fit={"epochs": epochs, "resume": resume})  # fmt: skip

    whole = fit_to(3, tmp_path / "whole")
    fit_to(2, tmp_path / "part")
    resumed = fit_to(3, tmp_path / "part", tmp_path / "part")
    for name, array in whole.state.weights.items():
        np.testing.assert_array_equal(resumed.state.weights[name], array)


def test_a_wrong_kernel_is_not_trained_with(moon):
    moon.mistakes = {"Conv": "ConvTranspose"}
    there = None
    with pytest.warns(UserWarning, match=naming("'moon'", "Conv")):
        there = trained("moon")
    for name, array in trained("cpu").state.weights.items():
        np.testing.assert_allclose(there.state.weights[name], array, rtol=1e-4, atol=2e-5)


def test_wrong_gradients_are_refused(moon, monkeypatch):
    moon.mistakes = {"Relu": "Tanh"}
    monkeypatch.setattr("onnxgrad.runtime.checked.compare_nodes", lambda *_: [])
    trainer = Trainer(MODEL, "cross_entropy", device="moon")
    before = {name: array.copy() for name, array in trainer.state.weights.items()}
    with pytest.raises(ProviderError, match=naming("'moon'", "device='cpu'")):
        trainer.fit(X, Y)
    for name, array in before.items():
        np.testing.assert_array_equal(trainer.state.weights[name], array)


def test_check_device(moon):
    moon.mistakes = {"Relu": "Tanh"}
    report = check_device(MODEL, "moon", "cross_entropy")
    assert report.ok
    assert [title.split()[0] for title in report.failing] == ["Relu"]
