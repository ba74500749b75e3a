"""Which device runs: the number of a GPU reaches sessions, OrtValues and bindings.

There need not be a GPU: onnxruntime is replaced by one that notes what it is told, and computes on
the CPU.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

import numpy as np
import onnxruntime as ort
import pytest

from onnxgrad import ProviderError, add_loss_output
from onnxgrad.compat import (
    ElasticLearningPenalty,
    LearningRateSGD,
    LearningRateSGDNesterov,
    OrtDataLoader,
    OrtGradientForwardBackward,
    OrtGradientForwardBackwardOptimizer,
    OrtGradientOptimizer,
    SquareLearningLoss,
)
from onnxgrad.model.opsets import newest_ir_version, newest_opset
from onnxgrad.runtime.device import CPU, Device, read_providers
from tests.support.errors import naming
from tests.support.running import in_sweep
from tests.support.small_models import two_column_model

rng = np.random.default_rng(0)
X = rng.standard_normal((12, 2)).astype(np.float32)
Y = (X[:, :1] - X[:, 1:]).astype(np.float32)
WEIGHTS = [np.float32([[0.1], [0.2]]), np.float32([0.3])]
CUDA, PLAIN = "CUDAExecutionProvider", "CPUExecutionProvider"


@dataclass
class Machine:
    """What onnxruntime was told."""

    providers: list = field(default_factory=list)  # of every session
    values: list = field(default_factory=list)  # (kind, index) of every OrtValue
    outputs: list = field(default_factory=list)  # (kind, index) of every bound output
    devices: list = field(default_factory=list)  # (kind, index) of every OrtDevice

    def uses(self, kind: str, index: int, values: bool = True, outputs: bool = True) -> None:
        options = {"device_id": index} if kind == "cuda" else {}
        name = CUDA if kind == "cuda" else PLAIN
        assert all(given[0] == (name, options) for given in self.providers), self.providers
        assert set(self.values) == ({(kind, index)} if values else set())
        assert set(self.outputs) == ({(kind, index)} if outputs else set())


@pytest.fixture
def machine(monkeypatch) -> Machine:
    newest_opset(), newest_ir_version()  # found by sessions on the CPU, once in a process
    seen, real, value = Machine(), ort.InferenceSession, ort.OrtValue
    from_numpy, empty = value.ortvalue_from_numpy, value.ortvalue_from_shape_and_type
    make = ort.OrtDevice.make

    class Binding:
        def __init__(self, binding):
            self.binding = binding

        def bind_output(self, name, kind="cpu", index=0):
            seen.outputs.append((kind, index))
            self.binding.bind_output(name)

        def __getattr__(self, name):
            return getattr(self.binding, name)

    class Session:
        def __init__(self, model, options=None, providers=None, **more):
            seen.providers.append(providers)
            self.session = real(model, options, providers=[PLAIN], **more)

        def io_binding(self):
            return Binding(self.session.io_binding())

        def run_with_iobinding(self, binding, options=None):
            self.session.run_with_iobinding(binding.binding, options)

        def get_providers(self):
            return [name for name, _ in seen.providers[-1]]

        def __getattr__(self, name):
            return getattr(self.session, name)

    def value_of_array(array, kind="cpu", index=0):
        seen.values.append((kind, index))
        return from_numpy(array)

    def value_of_shape(shape, dtype, kind="cpu", index=0):
        seen.values.append((kind, index))
        return empty(shape, dtype)

    def make_device(kind, index, *more):
        seen.devices.append((kind, index))
        return make("cpu", 0, *more)

    monkeypatch.setattr(ort, "get_available_providers", lambda: [CUDA, PLAIN])
    monkeypatch.setattr(ort, "InferenceSession", Session)
    monkeypatch.setattr(ort.OrtDevice, "make", staticmethod(make_device))
    monkeypatch.setattr(value, "ortvalue_from_numpy", staticmethod(value_of_array))
    monkeypatch.setattr(value, "ortvalue_from_shape_and_type", staticmethod(value_of_shape))
    monkeypatch.setattr(value, "device_name", lambda self: "cuda")
    monkeypatch.setattr(value, "__dlpack_device__", lambda self: (2, 1), raising=False)
    return seen


# -- what a device is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "index"),
    [
        ("cpu", "cpu", 0), ("cpu:0", "cpu", 0), ("Cpu", "cpu", 0), ("cuda", "cuda", 0),
        ("cuda:0", "cuda", 0), ("cuda:1", "cuda", 1), ("cuda:12", "cuda", 12), ("gpu", "cuda", 0),
        ("gpu:3", "cuda", 3), ("Cuda", "cuda", 0), (Device("cuda", 2), "cuda", 2),
    ],
)  # fmt: skip
def test_forms(name, kind, index):
    assert Device.of(name) == Device(kind, index)
    assert Device.of(str(Device.of(name))) == Device(kind, index)


@pytest.mark.parametrize(
    "name",
    ["", "cuda:", "cuda:-1", "cuda:x", "cuda:1:2", " cuda", "cuda:1\n", "cuda:\u0661", "cpu:1",
     "tpu", "cpu2", "cuda1", None, 1, True, b"cpu", ["cpu"]],
)  # fmt: skip
def test_what_is_no_device(name):
    with pytest.raises(ProviderError, match=naming("device", "'cpu'", "'cuda'", "'cuda:1'")):
        Device.of(name)


def test_a_torch_device():
    torch = pytest.importorskip("torch")
    assert Device.of(torch.device("cuda:1")) == Device("cuda", 1)
    assert Device.of(torch.device("cpu")) == CPU
    with pytest.raises(ProviderError, match="device 'meta'"):
        Device.of(torch.device("meta"))


def test_providers_of_a_device(machine):
    assert Device("cuda", 1).providers == [(CUDA, {"device_id": 1}), (PLAIN, {})]
    assert CPU.providers == [(PLAIN, {})]


def test_a_session_that_falls_back_to_the_cpu(machine, monkeypatch):
    monkeypatch.setattr(ort.InferenceSession, "get_providers", lambda self: [PLAIN])
    with pytest.raises(ProviderError, match=CUDA):
        outer_trainer_on("cuda:1").fit(X, Y)


# -- everything that takes a device ----------------------------------------------------------------

OPTIONS = {"max_iter": 2, "random_state": 0}


def outer_trainer_on(device, **options) -> OrtGradientForwardBackwardOptimizer:
    return OrtGradientForwardBackwardOptimizer(
        two_column_model(), device=device, **OPTIONS, **options
    )


def inner_trainer_on(device) -> OrtGradientOptimizer:
    return OrtGradientOptimizer(add_loss_output(two_column_model()), device=device, **OPTIONS)


def forward_and_gradients(**options) -> list[np.ndarray]:
    made = OrtGradientForwardBackward(two_column_model(), **options).new_instance()
    (y,) = made.forward([X, *WEIGHTS], training=True)
    return [y, *made.backward([np.ones_like(y)])]


def fit_inner_on(device):
    inner_trainer_on(device).fit(X, Y, X_val=X, y_val=Y).get_state()


def fit_outer_on(device):
    outer_trainer_on(device, training_optimizer_name="adam").fit(X, Y, X_val=X, y_val=Y)


def read_states(device):
    made = outer_trainer_on(device, training_optimizer_name="momentum").fit(X, Y)
    made.get_state("weight")
    assert made.get_state("grad")["w"]
    made.get_full_state()


def call_loss(device):
    made = SquareLearningLoss().build_onnx_function(device=device)
    made.loss_gradient(Y, Device.of(device).ortvalue(X[:, :1]))
    made.loss_gradient(Y[:, 0], Device.of(device).ortvalue(X[:, 0].copy()))
    made.loss_scores(Y, Device.of(device).ortvalue(X[:, :1].copy()))


def call_penalty(device):
    made = ElasticLearningPenalty(l1=0.1, l2=0.2).build_onnx_function(device=device, n_tensors=1)
    made.penalty_loss(Device.of(device).ortvalue(X))
    made.penalty_gradient(Device.of(device).ortvalue(X))


def iterate_loader(device):
    for batch in OrtDataLoader(X, Y, batch_size=5, device=device).iter_ortvalue():
        assert len(batch) == 2


ENTRIES = {
    "OrtGradientOptimizer.fit": (fit_inner_on, True, True),
    "OrtGradientForwardBackwardOptimizer.fit": (fit_outer_on, True, True),
    "get_state": (read_states, True, True),
    "OrtGradientForwardBackward": (
        lambda device: forward_and_gradients(providers=device),
        False,
        True,
    ),
    "loss": (call_loss, True, True),
    "penalty": (call_penalty, True, True),
    "OrtDataLoader": (iterate_loader, True, False),
}


@pytest.mark.parametrize(
    ("name", "kind", "index"),
    [
        ("cuda:1", "cuda", 1),
        ("cpu", "cpu", 0),
        *map(in_sweep, ["gpu:1", "cuda", "gpu"], ["cuda"] * 3, [1, 0, 0]),
    ],
)
@pytest.mark.parametrize("entry", ENTRIES)
def test_the_number_of_the_device_reaches_onnxruntime(machine, entry, name, kind, index):
    call, values, outputs = ENTRIES[entry]
    call(name)
    machine.uses(kind, index, values, outputs)


@pytest.mark.parametrize("method", ["predict", "losses", "score"])
def test_predictions_run_on_the_device(machine, method):
    made = outer_trainer_on("cuda:1").fit(X, Y)
    machine.providers.clear()
    getattr(made, method)(X) if method == "predict" else getattr(made, method)(X, Y)
    assert machine.providers == [[(CUDA, {"device_id": 1}), (PLAIN, {})]]


def test_a_torch_device_wherever_a_name_goes(machine):
    torch = pytest.importorskip("torch")
    for call, values, outputs in ENTRIES.values():
        call(torch.device("cuda", 1))
        machine.uses("cuda", 1, values or bool(machine.values), outputs or bool(machine.outputs))


def test_results_are_those_of_the_cpu(machine):
    pairs = list(
        zip(forward_and_gradients(providers="cuda:1"), forward_and_gradients(), strict=True)
    )
    assert len(pairs) == 4
    for y, z in pairs:
        np.testing.assert_array_equal(y, z)


@pytest.mark.parametrize("rate", [LearningRateSGD, LearningRateSGDNesterov])
def test_a_learning_rate_checks_its_device(rate):
    rate().build_onnx_function(device="cpu")
    with pytest.raises(ProviderError, match="device 'tpu'"):
        rate().build_onnx_function(device="tpu")


@pytest.mark.parametrize("entry", [*ENTRIES])
def test_where_the_installed_onnxruntime_has_no_gpu(monkeypatch, entry):
    monkeypatch.setattr(ort, "get_available_providers", lambda: [PLAIN])
    with pytest.raises(ProviderError, match=f"device 'cuda:1': .* offers .*{PLAIN}"):
        ENTRIES[entry][0]("cuda:1") if entry not in ("loss", "penalty") else (
            SquareLearningLoss() if entry == "loss" else ElasticLearningPenalty()
        ).build_onnx_function(device="cuda:1")


def test_an_estimator_keeps_its_argument():
    made = outer_trainer_on("gpu:1")
    assert made.get_params(deep=False)["device"] == "gpu:1"
    assert pickle.loads(pickle.dumps(made)).device == "gpu:1"


# -- providers, as onnxruntime takes them ----------------------------------------------------------

ONE = {"device_id": 1}


@pytest.mark.parametrize(
    ("providers", "options", "index", "device"),
    [
        ([CUDA, PLAIN], None, None, Device("cuda", 0)),
        ([CUDA, PLAIN], None, 1, Device("cuda", 1)),
        ([CUDA, PLAIN], [ONE, {}], None, Device("cuda", 1)),
        ([CUDA, PLAIN], [{"device_id": "1"}, {}], None, Device("cuda", 1)),
        ([CUDA, PLAIN], [ONE, {}], 1, Device("cuda", 1)),
        ([(CUDA, ONE), PLAIN], None, None, Device("cuda", 1)),
        ([(CUDA, {"cudnn_conv_algo_search": "HEURISTIC"}), PLAIN], None, 1, Device("cuda", 1)),
        ("cuda", None, 1, Device("cuda", 1)),
        ("cuda:1", None, 1, Device("cuda", 1)),
        (Device("cuda", 1), None, None, Device("cuda", 1)),
        (None, None, 0, CPU),
        ([], None, None, CPU),
        ("cpu", None, None, CPU),
        ([PLAIN], [{}], 0, CPU),
    ],
)
def test_the_index_in_providers(machine, providers, options, index, device):
    pairs, own = read_providers(providers, options, index)
    assert own == device
    assert all(o["device_id"] == device.index for name, o in pairs if name == CUDA)
    forward_and_gradients(providers=providers, provider_options=options, device_index=index)
    assert {given[0][0] for given in machine.providers} == {pairs[0][0]}
    assert all(given == pairs for given in machine.providers)
    assert set(machine.outputs) == {(device.kind, device.index)}


def test_options_stay_those_of_the_caller(machine):
    options = {"arena_extend_strategy": "kSameAsRequested"}
    pairs, _ = read_providers([CUDA], [options], 1)
    assert pairs == [(CUDA, {**options, "device_id": 1})]
    assert options == {"arena_extend_strategy": "kSameAsRequested"}


@pytest.mark.parametrize(
    ("providers", "options", "index", "message"),
    [
        ([CUDA], [ONE], 2, r"GPUs, \[1, 2\]"),
        ("cuda:1", None, 2, r"GPUs, \[1, 2\]"),
        ("cuda:0", None, 1, r"GPUs, \[0, 1\]"),
        (None, None, 1, "device_index=1 .*providers='cuda:1'"),
        ("cpu", None, 1, "device_index=1 "),
        ("cuda:1", [ONE], None, "list of providers"),
        ([(CUDA, ONE)], [ONE], None, "provider_options"),
        ([CUDA, PLAIN], [ONE], None, "provider_options.*CPUExecutionProvider'\\], not 1"),
        (PLAIN, None, None, "providers='CPU.*'cuda:1'"),
        ("tpu", None, None, "providers='tpu'"),
        ([(CUDA, {"device_id": "one"})], None, None, "device_id .*'one'"),
        (["TPU"], None, None, "'TPU'"),
    ],
)
def test_providers_that_cannot_be(machine, providers, options, index, message):
    with pytest.raises(ValueError, match=message):
        OrtGradientForwardBackward(
            two_column_model(), providers=providers, provider_options=options, device_index=index
        )


def test_a_tensor_on_another_gpu(machine):
    made = OrtGradientForwardBackward(two_column_model(), providers="cuda:2").new_instance()
    with pytest.raises(ValueError, match=naming("'x'", "'cuda:1'", "'cuda:2'")):
        made.forward([Device("cuda", 1).ortvalue(X), *WEIGHTS])


def test_a_tensor_whose_gpu_onnxruntime_does_not_tell(machine, monkeypatch):
    monkeypatch.setattr(ort.OrtValue, "__dlpack_device__", None, raising=False)
    made = OrtGradientForwardBackward(two_column_model(), providers="cuda:2").new_instance()
    made.forward([Device("cuda", 2).ortvalue(X), *WEIGHTS])


# -- PyTorch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cuda:1", in_sweep("cuda:0")])
def test_a_module_runs_on_the_device_of_its_tensors(machine, monkeypatch, name):
    torch = pytest.importorskip("torch")
    from onnxgrad.torch import OnnxModule

    stream = type("Stream", (), {"synchronize": lambda self: None})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream())
    module = OnnxModule(two_column_model())
    weights = [p.detach().requires_grad_() for p in module.parameters()]
    variant = module._build_variant(torch.device(name), tuple(w.dtype for w in weights))
    x = torch.from_numpy(X)
    variant.graph((x, *weights))[0].sum().backward()
    torch.testing.assert_close(weights[0].grad.ravel(), x.sum(0))
    machine.uses("cuda", int(name[-1]), values=False, outputs=False)
    assert set(machine.devices) == {("cuda", int(name[-1]))}
    assert machine.providers


def test_moving_a_module_asks_for_its_device(monkeypatch):
    torch = pytest.importorskip("torch")
    from onnxgrad.torch import OnnxModule

    asked = []
    monkeypatch.setattr(Device, "check", lambda self: asked.append(self))
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *args: self)
    OnnxModule(two_column_model()).to("cuda:1")
    assert asked == [Device("cuda", 1)]
