"""Large weights: a step updates them in place, and gives what a step in one graph gives."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
import tracemalloc

import numpy as np
import onnx
import pytest
from onnx import ModelProto

import onnxgrad as og
from onnxgrad.model import weights as model_weights
from onnxgrad.optimizers import ema, muon, schedule_free
from onnxgrad.training.callbacks.base import Callbacks
from onnxgrad.training.run import states
from onnxgrad.training.run.runner import Runner
from tests.support.errors import naming
from tests.support.models import add_initializers, initializer_arrays, parse_model
from tests.support.paths import ROOT
from tests.support.running import in_sweep
from tests.support.trainings import ActAtStep, assert_close_arrays, interrupt_training

UNITS = 300  # so that w2 is a group of its own, and is updated in blocks
SHAPES = {"w1": (12, UNITS), "b1": (UNITS,), "w2": (UNITS, UNITS), "w3": (UNITS, 3)}
MORE = [{}, {"clip_norm": 0.1}, {"accumulate": 2}]
OPTIMIZERS = {
    "sgd": "sgd",
    "momentum": "momentum",
    "adam": "adam",
    "muon": muon(),  # not elementwise
    "ema": ema(og.optimizers.adam()),  # evaluates a slot
    "schedule_free": schedule_free(),  # has slots that are numbers
}


def model_of_three_layers(more: str = "y = Identity(u)", **weights) -> ModelProto:
    rng = np.random.default_rng(0)
    drawn = {name: (rng.normal(size=s) / 7).astype(np.float32) for name, s in SHAPES.items()}
    return parse_model(
        f"""g (float[N,12] x) => (float[N,3] y) {{
            h = MatMul(x, w1)  hb = Add(h, b1)  r = Relu(hb)  s = MatMul(r, w2)  t = Tanh(s)
            u = MatMul(t, w3)  {more} }}""",
        **drawn,
        **weights,
    )


def rows_of_classes(count: int = 64) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.normal(size=(count, 12)).astype(np.float32), rng.integers(0, 3, count)


@pytest.fixture
def small_limits(monkeypatch):
    """Let all weights count as large, and a part be small."""

    def set_limits() -> None:
        monkeypatch.setattr(model_weights, "LARGE", 0)
        monkeypatch.setattr(model_weights, "TENSOR_BYTES", 1000)
        monkeypatch.setattr(states, "PART", 4096)  # the last part is shorter

    return set_limits


def large_trainer(proto: ModelProto | None = None, **options) -> og.Trainer:
    options = {"optimizer": "adam", "learning_rate": 1e-2} | options
    return og.Trainer(proto or model_of_three_layers(), "cross_entropy", **options)


def fit_large(proto: ModelProto | None = None, **options) -> og.Trainer:
    return large_trainer(proto, **options).fit(*rows_of_classes(), epochs=3, batch_size=24)


def runner_of(fitted: og.Trainer) -> Runner:
    return fitted._last_loop.runner


def require_close(a: og.Trainer, b: og.Trainer, rtol: float = 0.0, atol: float = 0.0) -> None:
    assert a.state.buffers.keys() == b.state.buffers.keys()
    assert_close_arrays(
        a.state.weights | a.state.buffers, b.state.weights | b.state.buffers, rtol, atol
    )
    for name, slots in b.state.slots.items():
        for slot, array in slots.items():
            np.testing.assert_allclose(a.state.slots[name][slot], array, rtol, atol, err_msg=name)


@pytest.mark.parametrize("more", [{"clip_norm": 0.1, "accumulate": 2}, *map(in_sweep, MORE)])
@pytest.mark.parametrize("name", [*map(in_sweep, ["sgd", "momentum"]), *[*OPTIMIZERS][2:]])
def test_a_step_in_place_gives_the_same(name, more, small_limits):
    whole = fit_large(optimizer=OPTIMIZERS[name], **more)
    small_limits()
    parts = fit_large(optimizer=OPTIMIZERS[name], **more)
    assert not runner_of(whole).in_place
    assert runner_of(parts).in_place
    assert list(parts.state.weights) == list(whole.state.weights)
    orthogonal = name == "muon"  # its iterations amplify rounding
    require_close(parts, whole, rtol=1e-4 if orthogonal else 1e-5, atol=2e-6 * 5**orthogonal)
    losses = [[entry["loss"] for entry in t.history] for t in (parts, whole)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    X, y = rows_of_classes()
    np.testing.assert_allclose(parts.predict(X), whole.predict(X), rtol=1e-3, atol=1e-4)
    assert parts.evaluate(X, y)["loss"] == pytest.approx(whole.evaluate(X, y)["loss"], rel=1e-5)


def test_estimators_update_in_place(small_limits):
    X, y = rows_of_classes()
    y = X[:, :3] * 2
    options = {"max_iter": 3, "training_optimizer_name": "adam", "random_state": 0}

    def weights() -> dict[str, np.ndarray]:
        made = og.compat.OrtGradientOptimizer(
            og.add_loss_output(model_of_three_layers()), **options
        ).fit(X, y)
        return made.trained_coef_

    whole = weights()
    small_limits()
    assert_close_arrays(weights(), whole, rtol=1e-5, atol=1e-6)


def test_buffers_and_dropout(small_limits):
    zeros, ones = [0.0] * 3, [1.0] * 3
    norm = "y = BatchNormalization(u, scale, bias, mean, var)"
    proto = model_of_three_layers(norm, scale=ones, bias=zeros, mean=zeros, var=ones)
    options = {"batch_norm": "train", "dropout": {"r": 0.3}}
    whole = fit_large(proto, **options)
    small_limits()
    parts = fit_large(proto, **options)
    assert whole.state.buffers
    require_close(parts, whole, rtol=1e-5, atol=2e-6)


# -- what training must not change ---------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "rate"), [("sgd", 1e20), ("adam", 1e-3)])
def test_a_step_that_is_not_finite_changes_nothing(optimizer, rate, small_limits):
    """Loss and gradients are finite: the product with the rate is not, or the squares in a slot."""
    small_limits()
    X, _ = rows_of_classes(24)
    proto = model_of_three_layers("y = MatMul(h, w3)")
    weights = ["w1", "w3"]
    made = og.Trainer(proto, "mae", optimizer=optimizer, learning_rate=1e-3, train=weights)
    made.fit(X, np.zeros((24, 3)), epochs=2, batch_size=24)
    before = copy.deepcopy([made.state.weights, made.state.slots])
    made._change_job(learning_rates=[og.schedules.constant(rate)])
    with pytest.raises(og.ConvergenceError):
        made.partial_fit(X * np.float32(1e21), np.zeros((24, 3)), batch_size=24)
    assert made.state.step == 2
    np.testing.assert_equal([made.state.weights, made.state.slots], before)


def test_what_was_read_stays(small_limits):
    """Weights that a callback, or the caller, holds are not those that training updates."""
    small_limits()
    X, y = rows_of_classes()
    seen = []

    class Reader(og.callbacks.Callback):
        def on_step_end(self, trainer, state, control):
            arrays = [state.weights["w2"], state.slots["w2"]["m"]]
            seen.append((arrays, [a.copy() for a in arrays]))

    made = large_trainer(callbacks=[Reader()])
    made.fit(X, y, batch_size=24)
    after = made.state.weights["w2"]
    copy = after.copy()
    made.partial_fit(X, y, batch_size=24)
    np.testing.assert_array_equal(after, copy)
    assert not np.array_equal(made.state.weights["w2"], copy)
    assert len(seen) > 2
    for arrays, copies in seen:
        for array, one in zip(arrays, copies, strict=True):
            np.testing.assert_array_equal(array, one)


def test_the_model_of_the_caller_is_not_changed(small_limits):
    small_limits()
    proto = model_of_three_layers()
    before = proto.SerializeToString()
    made = fit_large(proto)
    assert proto.SerializeToString() == before
    np.testing.assert_equal(initializer_arrays(made.model), made.state.weights)


def test_a_callback_sets_weights_and_fails(small_limits):
    small_limits()
    X, y = rows_of_classes(24)
    new = {"w3": np.ones((UNITS, 3), np.float32)}

    class Setter(og.callbacks.Callback):
        def on_step_end(self, trainer, state, control):
            before.append(state.weights["w3"])
            state.weights = new
            raise RuntimeError("stop")

    before: list[np.ndarray] = []
    made = large_trainer(callbacks=[Setter()])
    with pytest.raises(RuntimeError, match="stop"):
        made.fit(X, y, batch_size=24)
    np.testing.assert_array_equal(made.state.weights["w3"], before[0])


def test_half_a_step_is_not_finite(small_limits, monkeypatch):
    """An update that breaks off cannot be undone: its weights must not pass for trained ones."""
    small_limits()
    X, y = rows_of_classes(24)
    real, calls = states.GroupUpdate.run, []

    def run(self, *arguments, write):
        calls.append(write)
        if calls.count(True) == 3:
            raise MemoryError
        return real(self, *arguments, write=write)

    made = large_trainer()
    monkeypatch.setattr(states.GroupUpdate, "run", run)
    with pytest.raises(MemoryError):
        made.fit(X, y, epochs=3, batch_size=24)
    weights = made.state.weights
    assert all(np.isnan(array).all() for array in weights.values())


def test_a_fit_that_ends_before_a_step_keeps_the_state(small_limits):
    small_limits()
    X, y = rows_of_classes(24)
    made = fit_large()
    before = copy.deepcopy(made.state.weights)
    history = list(made.history)

    callbacks = Callbacks([ActAtStep("train_begin", 0, interrupt_training)])
    made._change_job(callbacks=callbacks)
    with pytest.raises(KeyboardInterrupt):
        made.fit(X, y, batch_size=24)
    assert made.history == history
    np.testing.assert_equal(made.state.weights, before)


# -- models without elements ---------------------------------------------------------------------


def test_a_resumed_training_is_the_same(small_limits, tmp_path):
    small_limits()
    X, y = rows_of_classes()
    plain = large_trainer().fit(X, y, epochs=4, batch_size=24)
    large_trainer(callbacks=[og.Checkpoint(tmp_path)]).fit(X, y, epochs=2, batch_size=24)
    resumed = large_trainer().fit(X, y, epochs=4, batch_size=24, resume=tmp_path)
    require_close(resumed, plain)
    other = model_of_three_layers()
    array = initializer_arrays(other)["w2"] * np.float32(1.0001)
    other.graph.initializer[2].CopyFrom(onnx.numpy_helper.from_array(array, "w2"))
    with pytest.raises(ValueError, match="another training"):
        large_trainer(other).fit(X, y, epochs=4, batch_size=24, resume=tmp_path)


def test_a_weight_that_the_loss_does_not_reach_stays(small_limits):
    rounded = "i = Cast<to=7>(u)  v = Cast<to=1>(i)  z = MatMul(v, w4)  k = Round(z)  y = Add(u, k)"
    proto = model_of_three_layers(rounded, w4=np.full((3, 3), 2.0, np.float32))
    with pytest.warns(UserWarning, match=naming("w4", "not trained")):
        whole = fit_large(proto)
    small_limits()
    model_weights.TENSOR_BYTES = 0  # restored by the fixture
    with pytest.warns(UserWarning, match=naming("w4", "not trained")):
        parts = fit_large(proto)
    require_close(parts, whole, rtol=1e-5, atol=2e-6)


def test_what_trains_is_judged_by_all_elements(small_limits):
    proto = model_of_three_layers()
    whole = og.trainable(proto)
    small_limits()
    assert str(og.trainable(proto)) == str(whole)
    assert large_trainer(proto).trained == [t.name for t in whole.trained]


def test_the_failed_step_is_whole(small_limits):
    small_limits()
    X, y = rows_of_classes(24)
    made = large_trainer(optimizer="adam", learning_rate=3e38)
    with pytest.raises(og.ConvergenceError):
        made.fit(X, y, epochs=5, batch_size=24)
    _, arrays = made.failed_step()
    assert {"w2", "w2.m", "w2.v"} <= arrays.keys()


MEMORY = """
    from pathlib import Path
    import numpy as np, sys
    import onnxgrad as og, onnxgrad.training.trainer
    from onnxgrad.model import weights as model_weights
    from tests.support.models import add_initializers, parse_model

    def status(key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    model_weights.LARGE = 1 << 26
    nodes = " ".join(f"h{i + 1} = MatMul(h{i}, w{i})" for i in range(4))
    proto = parse_model(f"g (float[N,2304] h0) => (float[N,2304] h4) {{ {nodes} }}")
    weights = 4 * 2304**2 * 4
    before = status("VmRSS")
    for i in range(4):
        array = np.full((2304, 2304), 1e-4, np.float32)
        array[0] = i
        add_initializers(proto, {f"w{i}": array})
        del array
    X = np.ones((4, 2304), np.float32)
    epochs, folders = int(sys.argv[2]), sys.argv[3:]
    callbacks = [og.Checkpoint(folder) for folder in folders]
    trainer = og.Trainer(
        proto, "mse", optimizer=sys.argv[1], learning_rate=1e-9, callbacks=callbacks
    )
    del proto
    trainer.fit(X, X, epochs=epochs, batch_size=4, resume=next(iter(folders), None))
    print((status("VmHWM") - before) / weights)
"""


def memory_of_training(*arguments) -> float:
    """Return the peak of the memory of a training in a new process, over the size of its weights.

    The arguments are the optimizer, the epochs, and perhaps the folder of checkpoints.
    """
    texts = map(str, arguments)
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(MEMORY), *texts]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    made = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert not made.returncode, made.stderr
    return float(made.stdout)


LIMITS = [("sgd", 2.9), in_sweep("adam", 4.9)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("optimizer", "most"), LIMITS)
def test_weights_are_in_memory_once(optimizer, most):
    """The states and their gradients: 2 times the weights with sgd, 4 times with Adam."""
    assert memory_of_training(optimizer, 3) < most


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("optimizer", "most"), LIMITS)
def test_checkpoints_copy_no_weights(optimizer, most, tmp_path):
    """To write a checkpoint, and to resume it, takes the memory of a training without one."""
    assert memory_of_training(optimizer, 1, tmp_path) < most
    assert memory_of_training(optimizer, 2, tmp_path) < most


def test_saving_large_weights_makes_no_copy_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(model_weights, "LARGE", 1000)
    size = 8 * 300 * 300 * 4
    layers = " ".join(f"h{i + 1} = MatMul(h{i}, w{i})" for i in range(8))
    model = parse_model(f"f (float[N,300] h0) => (float[N,300] h8) {{ {layers} }}")
    rng = np.random.default_rng(0)
    for i in range(8):
        array = rng.standard_normal((300, 300)).astype(np.float32) / 20
        add_initializers(model, {f"w{i}": array})
    X = rng.standard_normal((4, 300)).astype(np.float32)
    trainer = og.Trainer(model, "mse", optimizer="sgd").fit(X, X)
    tracemalloc.start()
    trainer.save(tmp_path / "m.onnx")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 2
    saved = onnx.load(tmp_path / "m.onnx")
    assert saved == trainer.model
    np.testing.assert_equal(initializer_arrays(saved), trainer.state.weights)
    onnx.checker.check_model(saved, full_check=True)
