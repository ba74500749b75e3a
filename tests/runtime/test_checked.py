"""Sessions on execution providers that may be wrong: a made-up one, and WebGPU where it is."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from onnxgrad import ProviderError
from onnxgrad.runtime.checked import CheckedSession
from onnxgrad.runtime.device import CPU, Device
from onnxgrad.runtime.device_report import report_device
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.runtime.session import load_session, session
from onnxgrad.runtime.values import Binding
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.moon import MOON, moon as moon
from tests.support.running import webgpu_on_cpu

rng = np.random.default_rng(0)
X = rng.standard_normal((6, 3)).astype(np.float32)
MODEL = parse_model(
    "f (float[N,3] x) => (float[N,3] y, float[N,3] z) { a = Exp(x)  y = Sin(a)  z = Mul(a, y) }"
)
EXPECTED = [np.sin(np.exp(X)), np.exp(X) * np.sin(np.exp(X))]


def on_moon(model=MODEL):
    return session(model, Device.of("moon"), work=0.0)


def close_to_expected(results) -> None:
    for y, like in zip(results, EXPECTED, strict=True):
        np.testing.assert_allclose(y, like, rtol=1e-5, atol=1e-6)


# -- names of devices ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["moon", "Moon", MOON, "moon:0"])
def test_names_of_a_provider(moon, name):
    device = Device.of(name)
    assert device == Device("moon")
    assert device.providers == [(MOON, {}), ("CPUExecutionProvider", {})]
    assert device.memory == CPU.memory
    assert device.copies_tensors


def test_options_of_a_provider(moon):
    device = Device.of(("moon", {"phase": 3}))
    assert device.providers[0] == (MOON, {"phase": "3"})
    assert device != Device.of("moon")
    close_to_expected(session(MODEL, device, 0.0).run(None, {"x": X}))
    assert moon.options[0] == {"phase": "3"}


def test_a_number_of_a_provider(moon):
    assert Device.of("moon:2").providers[0] == (MOON, {"device_id": 2})
    assert str(Device.of("moon:2")) == "moon:2"


def test_tensorrt_uses_cuda_memory():
    device = Device.of("tensorrt:1")
    assert device.memory == ("cuda", 1)
    assert not device.copies_tensors


def test_a_provider_that_is_not_installed():
    with pytest.raises(ProviderError, match=naming("'openvino'", "device='cpu'", "onnxruntime-")):
        Device.of("openvino").check()


def write_plugin(folder: Path, library: str) -> None:
    sys.modules.pop("onnxruntime_ep_moon", None)  # of another test
    package = folder / "onnxruntime_ep_moon"
    package.mkdir()
    text = f"def get_library_path():\n    return {library!r}\n"
    (package / "__init__.py").write_text(text)


def test_a_plugin_is_registered(tmp_path, monkeypatch):
    write_plugin(tmp_path, "moon.so")
    monkeypatch.syspath_prepend(tmp_path)
    registered = []

    def register(name, path):
        registered.append(path)

    class EpDevice:
        ep_name = MOON

    monkeypatch.setattr(ort, "register_execution_provider_library", register)
    monkeypatch.setattr(ort, "get_ep_devices", lambda: [EpDevice] * 2 if registered else [])
    assert Device.of("moon").providers[0] == (MOON, {})
    assert registered == ["moon.so"]
    assert Device.of(MOON).check()
    assert registered == ["moon.so"]
    chosen = []

    class Options:
        def add_provider_for_devices(self, devices, options):
            chosen.append((devices, options))

    from onnxgrad.runtime.device import add_numbered_plugin_device

    assert not add_numbered_plugin_device(Options(), Device.of("moon").providers)
    assert add_numbered_plugin_device(Options(), Device.of("moon:1").providers)
    assert chosen == [([EpDevice], {})]
    with pytest.raises(ProviderError, match=naming(MOON, "device 2", "0 to 1")):
        add_numbered_plugin_device(Options(), Device.of("moon:2").providers)


def test_a_plugin_without_its_device(tmp_path, monkeypatch):
    write_plugin(tmp_path, "moon.so")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ort, "register_execution_provider_library", lambda name, path: None)
    with pytest.raises(ProviderError, match=naming("'moon'", "onnxruntime_ep_moon", "driver")):
        Device.of("moon").check()


def test_a_plugin_that_cannot_be_loaded(tmp_path, monkeypatch):
    write_plugin(tmp_path, str(tmp_path / "moon.so"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ProviderError, match=naming("'moon'", "onnxruntime_ep_moon", "moon.so")):
        Device.of("moon").check()


# -- the first run ---------------------------------------------------------------------------------


def test_a_provider_without_faults(moon):
    running = on_moon()
    assert isinstance(running, CheckedSession)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close_to_expected(running.run(None, {"x": X}))
    assert moon.computed == ["Exp", "Sin", "Mul"]


def test_a_node_that_fails_moves_to_the_cpu(moon):
    moon.fails = {"Sin"}
    running = on_moon()
    with pytest.warns(UserWarning, match=naming("'moon'", "1 node", "Sin")):
        close_to_expected(running.run(None, {"x": X}))
    assert moon.computed == ["Exp", "Mul"]
    close_to_expected(running.run(None, {"x": X}))  # without a warning


def test_a_later_run_is_compared_too(moon):
    """A weight of zero hides what is wrong, until it has changed."""
    model = parse_model(
        "f (float[N,3] x, float[3] w) => (float[N,3] y) { s = Sin(x)  y = Mul(s, w) }"
    )
    moon.mistakes = {"Sin": "Tanh"}
    running, weight = on_moon(model), np.zeros(3, np.float32)
    for _ in range(9):
        running.run(None, {"x": X, "w": weight})
        weight = np.ones(3, np.float32)
    with pytest.warns(UserWarning, match="Sin"):
        (y,) = running.run(None, {"x": X, "w": weight})
    np.testing.assert_allclose(y, np.sin(X), rtol=1e-5)


def test_a_node_that_no_session_takes_moves_to_the_cpu(moon):
    moon.refuses = {"Sin"}
    with pytest.warns(UserWarning, match=naming("'moon'", "Sin", "not supported")):
        close_to_expected(on_moon().run(None, {"x": X}))


def test_a_node_that_is_computed_wrongly_moves_to_the_cpu(moon):
    moon.mistakes = {"Sin": "Tanh"}
    with pytest.warns(UserWarning, match=naming("'moon'", "Sin", "'y' differs")):
        close_to_expected(on_moon().run(None, {"x": X}))


def test_results_that_no_node_explains_are_refused(moon, monkeypatch):
    moon.mistakes = {"Sin": "Tanh"}
    monkeypatch.setattr("onnxgrad.runtime.checked.compare_nodes", lambda *_: [])
    with pytest.raises(ProviderError, match=naming("'moon'", "'y'", "device='cpu'")):
        on_moon().run(None, {"x": X})


def test_a_node_in_a_subgraph(moon):
    moon.fails = {"If"}
    model = parse_model("""f (float[N,3] x, bool c) => (float[N,3] y) {
        y = If(c) <then_branch = g () => (t) { t = Sin(x) },
                   else_branch = h () => (e) { e = Neg(x) }> }""")
    with pytest.warns(UserWarning, match="If"):
        (y,) = on_moon(model).run(None, {"x": X, "c": np.array(True)})
    np.testing.assert_allclose(y, np.sin(X), rtol=1e-5)
    assert moon.computed == []


def test_a_model_that_draws_at_random_runs(moon):
    model = parse_model(
        "f (float[N,3] x) => (float[N,3] y) { r = RandomNormalLike(x)  y = Add(x, r) }"
    )
    on_moon(model).run(None, {"x": X})


def test_results_that_are_rounding_only(moon):
    """Two sums of the same numbers differ by rounding only: another number on each device."""
    model = parse_model(
        """f (float[N,3] x) => (float[3] y, float[N,3] z) {
        s = Abs(x)  a = ReduceSum<keepdims=0>(s, zero)  m = ReduceMean<keepdims=0>(x, zero)
        c = Sub(x, m)  y = ReduceSum<keepdims=0>(c, zero)  z = Exp(x) }""",
        zero=np.int64([0]),
    )
    moon.mistakes = {"Abs": "Identity"}  # of which no output depends
    rows = np.repeat(X, 50, axis=0)
    reference = load_session(model, providers=CPU.providers).run(["y"], {"x": rows})[0]
    moon.noise = {"y": 3 * np.abs(reference).max()}
    on_moon(model).run(None, {"x": rows})
    moon.noise = {"z": 0.5}
    with pytest.raises(ProviderError, match="'z'"):
        on_moon(model).run(None, {"x": rows})


def test_errors_of_the_model_itself_are_those_of_the_cpu(moon):
    model = parse_model("f (float[N,3] x) => (float[N,3] y) { y = doc.none.Nothing(x) }")
    with pytest.raises(Exception, match="Nothing"):
        load_session(model, providers=Device.of("moon").providers)


# -- bindings, predictions -------------------------------------------------------------------------


def test_a_binding(moon):
    moon.fails = {"Sin"}
    binding = Binding(on_moon(), Device.of("moon"))
    place = np.empty_like(X)
    with pytest.warns(UserWarning, match="Sin"):
        results = binding.run({"x": X}, ["y", "z"], into={"z": place})
    close_to_expected([results[0].numpy(), place])
    value = ort.OrtValue.ortvalue_from_numpy(2 * X)
    (y,) = binding.run({"x": value}, ["y"])
    np.testing.assert_allclose(y.numpy(), np.sin(np.exp(2 * X)), rtol=1e-4, atol=1e-5)


def test_a_predictor(moon):
    moon.mistakes = {"Exp": "Neg"}
    with pytest.warns(UserWarning, match="Exp"):
        found = Predictor(MODEL, device="moon").predict({"x": X}, rows=4)
    close_to_expected([found["y"], found["z"]])


# -- the report ------------------------------------------------------------------------------------


def test_a_report(moon, monkeypatch):
    moon.mistakes = {"Sin": "Tanh"}
    report = report_device(MODEL, {"x": X}, Device.of("moon"))
    assert report.ok
    assert report.nodes == 3
    assert [title.split()[0] for title in report.failing] == ["Sin"]
    assert report.fed_bytes == 3 * X.nbytes
    assert "Sin" in str(report)


# -- WebGPU ----------------------------------------------------------------------------------------

SCRIPT = """
import numpy as np, onnx, onnxgrad as og
from tests.support.models import parse_model
rng = np.random.default_rng(0)
w = lambda *s: rng.normal(0, 0.3, s).astype(np.float32)
model = parse_model('''f (float[N,2,10,10] x) => (float[N,3] y) {
    a = Conv<kernel_shape=[3,3]>(x, w, b)  c = Relu(a)
    p = MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(c)
    f = Flatten(p)  y = Gemm(f, v, d) }''', w=w(4, 2, 3, 3), b=w(4), v=w(64, 3), d=w(3))
X, y = rng.normal(size=(24, 2, 10, 10)).astype(np.float32), rng.integers(0, 3, 24)
trained = {}
for device in "cpu", "webgpu":
    trainer = og.Trainer(model, "cross_entropy", optimizer="adam", learning_rate=0.01,
                         device=device)
    trained[device] = trainer.fit(X, y, epochs=3, batch_size=8).state.weights
for name, array in trained["cpu"].items():
    np.testing.assert_allclose(trained["webgpu"][name], array, atol=1e-5)
print("trained alike")
"""


@pytest.mark.newest
def test_webgpu_trains_as_the_cpu():
    environment = os.environ | webgpu_on_cpu()
    done = subprocess.run(
        [sys.executable, "-W", "error:::onnxgrad", "-c", SCRIPT],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "trained alike" in done.stdout, done.stderr[-2000:]
