"""Large weights: a step updates them in place, and gives what a step in one graph gives."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import tracemalloc

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

import onnxgrad as og
from onnxgrad.model import without_elements
from onnxgrad.optimizers import ema, muon, schedule_free
from onnxgrad.training.run import in_place
from onnxgrad.training.run.runner import Runner
from tests.support.running import in_sweep

SHAPES = {"w1": (12, 300), "b1": (300,), "w2": (300, 300), "w3": (300, 3)}
MORE = [{}, {"clip_norm": 0.1}, {"accumulate": 2}]
OPTIMIZERS = {
    "sgd": "sgd",
    "momentum": "momentum",
    "adam": "adam",
    "muon": muon(),  # not elementwise
    "ema": ema(og.adam()),  # evaluates a slot
    "schedule_free": schedule_free(),  # has slots that are numbers
}


def model(more: str = "") -> ModelProto:
    parsed = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g (float[N,12] x) => (float[N,3] y) {{
            h = MatMul(x, w1)  hb = Add(h, b1)  r = Relu(hb)  s = MatMul(r, w2)  t = Tanh(s)
            u = MatMul(t, w3)  {more or "y = Identity(u)"} }}""")
    rng = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        array = (rng.normal(size=shape) / 7).astype(np.float32)
        parsed.graph.initializer.append(numpy_helper.from_array(array, name))
    return parsed


def rows(count: int = 64) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.normal(size=(count, 12)).astype(np.float32), rng.integers(0, 3, count)


@pytest.fixture
def large(monkeypatch):
    """Let all weights count as large, and a part be small."""

    def set_limits() -> None:
        monkeypatch.setattr(without_elements, "LARGE", 0)
        monkeypatch.setattr(without_elements, "_EACH", 1000)
        monkeypatch.setattr(in_place, "PART", 4096)  # the last part is shorter

    return set_limits


def trainer(proto: ModelProto | None = None, **options) -> og.Trainer:
    options = {"optimizer": "adam", "learning_rate": 1e-2} | options
    return og.Trainer(proto or model(), "cross_entropy", **options)


def fitted(proto: ModelProto | None = None, **options) -> og.Trainer:
    X, y = rows()
    return trainer(proto, **options).fit(X, y, epochs=3, batch_size=24)


def runner(fitted: og.Trainer) -> Runner:
    return fitted._loop.runner


def require_equal(a: og.Trainer, b: og.Trainer, rtol: float = 0.0, atol: float = 0.0) -> None:
    for kind in ("weights", "buffers"):
        one, other = getattr(a.state, kind), getattr(b.state, kind)
        assert one.keys() == other.keys()
        for name, array in one.items():
            np.testing.assert_allclose(array, other[name], rtol, atol, err_msg=name)
    for name, slots in a.state.slots.items():
        for slot, array in slots.items():
            other = b.state.slots[name][slot]
            np.testing.assert_allclose(array, other, rtol, atol, err_msg=f"{name} {slot}")


@pytest.mark.parametrize("more", [{"clip_norm": 0.1, "accumulate": 2}, *map(in_sweep, MORE)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_in_place_gives_the_same(name, more, large):
    whole = fitted(optimizer=OPTIMIZERS[name], **more)
    large()
    parts = fitted(optimizer=OPTIMIZERS[name], **more)
    assert type(runner(whole)) is Runner
    assert runner(parts).in_place
    assert list(parts.state.weights) == list(whole.state.weights)
    orthogonal = name == "muon"  # its iterations amplify rounding
    require_equal(parts, whole, rtol=1e-4 if orthogonal else 1e-5, atol=2e-6 * 5**orthogonal)
    losses = [[entry["loss"] for entry in t.history] for t in (parts, whole)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    X, y = rows()
    np.testing.assert_allclose(parts.predict(X), whole.predict(X), rtol=1e-3, atol=1e-4)
    assert parts.evaluate(X, y)["loss"] == pytest.approx(whole.evaluate(X, y)["loss"], rel=1e-5)


def test_estimators_update_in_place(large):
    X, y = rows()
    y = X[:, :3] * 2
    options = {"max_iter": 3, "training_optimizer_name": "adam", "random_state": 0}

    def weights() -> dict[str, np.ndarray]:
        made = og.OrtGradientOptimizer(og.add_loss_output(model()), **options).fit(X, y)
        return made.trained_coef_

    whole = weights()
    large()
    for name, array in weights().items():
        np.testing.assert_allclose(array, whole[name], rtol=1e-5, atol=1e-6)


def test_buffers_and_dropout(large):
    proto = model("y = BatchNormalization(u, scale, bias, mean, var)")
    for name, value in {"scale": 1, "bias": 0, "mean": 0, "var": 1}.items():
        array = np.full(3, value, np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    options = {"batch_norm": "train", "dropout": {"r": 0.3}}
    whole = fitted(proto, **options)
    large()
    parts = fitted(proto, **options)
    assert whole.state.buffers
    require_equal(parts, whole, rtol=1e-5, atol=2e-6)


# -- what training must not change ---------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "rate"), [("sgd", 1e20), ("adam", 1e-3)])
def test_a_step_that_is_not_finite_changes_nothing(optimizer, rate, large):
    """Loss and gradients are finite: the product with the rate is not, or the squares in a slot."""
    large()
    X, _ = rows(24)
    proto = model("y = MatMul(h, w3)")
    weights = ["w1", "w3"]
    made = og.Trainer(proto, "mae", optimizer=optimizer, learning_rate=1e-3, train=weights)
    made.fit(X, np.zeros((24, 3)), epochs=2, batch_size=24)
    before = {name: array.copy() for name, array in made.state.weights.items()}
    slots = {n: {s: a.copy() for s, a in own.items()} for n, own in made.state.slots.items()}
    made.learning_rate = og.constant(rate)
    with pytest.raises(og.ConvergenceError):
        made.partial_fit(X * np.float32(1e21), np.zeros((24, 3)), batch_size=24)
    assert made.state.step == 2
    for name, array in before.items():
        np.testing.assert_array_equal(made.state.weights[name], array)
    for name, own in slots.items():
        for slot, array in own.items():
            np.testing.assert_array_equal(made.state.slots[name][slot], array)


def test_what_was_read_stays(large):
    """Weights that a callback, or the caller, holds are not those that training updates."""
    large()
    X, y = rows()
    seen = []

    class Reader(og.Callback):
        def on_step_end(self, trainer, state, control):
            arrays = [state.weights["w2"], state.slots["w2"]["m"]]
            seen.append((arrays, [a.copy() for a in arrays]))

    made = trainer(callbacks=[Reader()])
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


def test_the_model_of_the_caller_is_not_changed(large):
    large()
    proto = model()
    before = proto.SerializeToString()
    made = fitted(proto)
    assert proto.SerializeToString() == before
    arrays = {t.name: numpy_helper.to_array(t) for t in made.model.graph.initializer}
    for name, array in made.state.weights.items():
        np.testing.assert_array_equal(arrays[name], array)


def test_a_callback_sets_weights_and_fails(large):
    large()
    X, y = rows(24)
    new = {"w3": np.ones((300, 3), np.float32)}

    class Setter(og.Callback):
        def on_step_end(self, trainer, state, control):
            before.append(state.weights["w3"])
            state.weights = new
            raise RuntimeError("stop")

    before: list[np.ndarray] = []
    made = trainer(callbacks=[Setter()])
    with pytest.raises(RuntimeError, match="stop"):
        made.fit(X, y, batch_size=24)
    np.testing.assert_array_equal(made.state.weights["w3"], before[0])


def test_half_a_step_is_not_finite(large, monkeypatch):
    """An update that breaks off cannot be undone: its weights must not pass for trained ones."""
    large()
    X, y = rows(24)
    real, calls = in_place._Update.run, []

    def run(self, *arguments, write):
        calls.append(write)
        if calls.count(True) == 3:
            raise MemoryError
        return real(self, *arguments, write=write)

    made = trainer()
    monkeypatch.setattr(in_place._Update, "run", run)
    with pytest.raises(MemoryError):
        made.fit(X, y, epochs=3, batch_size=24)
    weights = made.state.weights
    assert all(np.isnan(array).all() for array in weights.values())


def test_a_fit_that_ends_before_a_step_keeps_the_state(large):
    large()
    X, y = rows(24)
    made = fitted()
    before = {name: array.copy() for name, array in made.state.weights.items()}
    history = list(made.history)

    class Stop(og.Callback):
        def on_train_begin(self, trainer, state, control):
            raise RuntimeError("stop")

    made.callbacks = type(made.callbacks)([Stop()])
    with pytest.raises(RuntimeError, match="stop"):
        made.fit(X, y, batch_size=24)
    assert made.history == history
    for name, array in before.items():
        np.testing.assert_array_equal(made.state.weights[name], array)


# -- models without elements ---------------------------------------------------------------------


def test_a_resumed_training_is_the_same(large, tmp_path):
    large()
    X, y = rows()
    plain = trainer().fit(X, y, epochs=4, batch_size=24)
    trainer(callbacks=[og.Checkpoint(tmp_path)]).fit(X, y, epochs=2, batch_size=24)
    resumed = trainer().fit(X, y, epochs=4, batch_size=24, resume=tmp_path)
    require_equal(resumed, plain)
    other = model()
    array = numpy_helper.to_array(other.graph.initializer[2]) * np.float32(1.0001)
    other.graph.initializer[2].CopyFrom(numpy_helper.from_array(array, "w2"))
    with pytest.raises(ValueError, match="another training"):
        trainer(other).fit(X, y, epochs=4, batch_size=24, resume=tmp_path)


def test_a_weight_that_the_loss_does_not_reach_stays(large):
    rounded = "i = Cast<to=7>(u)  v = Cast<to=1>(i)  z = MatMul(v, w4)  k = Round(z)  y = Add(u, k)"
    proto = model(rounded)
    array = np.full((3, 3), 2.0, np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(array, "w4"))
    with pytest.warns(UserWarning, match="w4"):
        whole = fitted(proto)
    large()
    without_elements._EACH = 0  # restored by the fixture
    with pytest.warns(UserWarning, match="w4"):
        parts = fitted(proto)
    require_equal(parts, whole, rtol=1e-5, atol=2e-6)


def test_what_trains_is_judged_by_all_elements(large):
    proto = model()
    whole = og.trainable(proto)
    large()
    assert str(og.trainable(proto)) == str(whole)
    assert trainer(proto).trained == [t.name for t in whole.trained]


def test_the_failed_step_is_whole(large):
    large()
    X, y = rows(24)
    made = trainer(optimizer="adam", learning_rate=3e38)
    with pytest.raises(og.ConvergenceError):
        made.fit(X, y, epochs=5, batch_size=24)
    _, arrays = made.failed_step()
    assert {"w2", "w2.m", "w2.v"} <= arrays.keys()


MEMORY = """
    from pathlib import Path
    import numpy as np, onnx, sys
    from onnx import numpy_helper
    import onnxgrad as og, onnxgrad.training.trainer
    from onnxgrad.model import without_elements

    def status(key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    without_elements.LARGE = 1 << 26
    nodes = " ".join(f"h{i + 1} = MatMul(h{i}, w{i})" for i in range(4))
    proto = onnx.parser.parse_model(f'''<ir_version: 8, opset_import: ["": 18]>
        g (float[N,3584] h0) => (float[N,3584] h4) {{ {nodes} }}''')
    weights = 4 * 3584**2 * 4
    before = status("VmRSS")
    for i in range(4):
        array = np.full((3584, 3584), 1e-4, np.float32)
        array[0] = i
        proto.graph.initializer.append(numpy_helper.from_array(array, f"w{i}"))
        del array
    trainer = og.Trainer(proto, "mse", optimizer=sys.argv[1], learning_rate=1e-9)
    del proto
    X = np.ones((4, 3584), np.float32)
    trainer.fit(X, X, epochs=3, batch_size=4)
    print((status("VmHWM") - before) / weights)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("optimizer", "most"), [("sgd", 2.9), in_sweep("adam", 4.9)])
def test_weights_are_in_memory_once(optimizer, most):
    """The states and their gradients: 2 times the weights with sgd, 4 times with Adam."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(MEMORY), optimizer]
    made = subprocess.run(command, capture_output=True, text=True)
    assert not made.returncode, made.stderr
    assert float(made.stdout) < most


def test_saving_large_weights_makes_no_copy_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(without_elements, "LARGE", 1000)
    size = 8 * 300 * 300 * 4
    layers = " ".join(f"h{i + 1} = MatMul(h{i}, w{i})" for i in range(8))
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]>'
        f"f (float[N,300] h0) => (float[N,300] h8) {{ {layers} }}"
    )
    rng = np.random.default_rng(0)
    for i in range(8):
        array = rng.standard_normal((300, 300)).astype(np.float32) / 20
        model.graph.initializer.append(numpy_helper.from_array(array, f"w{i}"))
    X = rng.standard_normal((4, 300)).astype(np.float32)
    trainer = og.Trainer(model, "mse", optimizer="sgd").fit(X, X)
    tracemalloc.start()
    trainer.save(tmp_path / "m.onnx")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 2
    saved = onnx.load(tmp_path / "m.onnx")
    assert saved == trainer.model
    for tensor in saved.graph.initializer:
        np.testing.assert_array_equal(
            numpy_helper.to_array(tensor), trainer.state.weights[tensor.name]
        )
    onnx.checker.check_model(saved, full_check=True)
