"""Explanations equal those of Captum, where the model also exists in PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrad import explain
from tests.support.exports import export_module

torch = pytest.importorskip("torch")
captum = pytest.importorskip("captum.attr")
nn = torch.nn
pytestmark = [
    pytest.mark.filterwarnings("ignore:Input Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:You are using the legacy:DeprecationWarning"),
]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 5, 3, stride=2)
        self.head = nn.Linear(5, 4)

    def forward(self, x):
        h = torch.tanh(self.conv(x))
        h = nn.functional.avg_pool2d(h, 2)
        h = torch.relu(self.second(h))
        return self.head(h.mean(dim=(2, 3)))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.act = nn.Softplus()

    def forward(self, x, z):
        return torch.softmax(self.second(self.act(self.first(torch.cat([x, z], 1)))), 1)


class Tiny(nn.Module):
    """A transformer with two layers of two heads, over token ids and a mask."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.qkv = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids, mask):
        h = self.embedding(ids)
        n, t, _ = h.shape
        for qkv in self.qkv:
            q, k, v = (a.reshape(n, t, 2, 4).transpose(1, 2) for a in qkv(h).chunk(3, -1))
            s = q @ k.transpose(-1, -2) / 2 + (1 - mask[:, None, None, :]) * -1e4
            p = torch.softmax(s, -1)
            h = self.norm(h + (p @ v).transpose(1, 2).reshape(n, t, 8))
        return self.head((h * mask[:, :, None]).sum(1))


def export_explained(module, arguments, axes):
    """Return the model of a module, whose inputs are the names of `axes`."""
    options = {"input_names": list(axes), "output_names": ["y"], "dynamic_axes": axes}
    return export_module(module, arguments, opset_version=18, **options)


def result_of_node(model, op_type, index=0):
    """Return the name of what the index-th node of this operator returns."""
    return [n for n in model.graph.node if n.op_type == op_type][index].output[0]


@pytest.fixture(scope="module")
def images():
    torch.manual_seed(0)
    module, x = Cnn(), torch.randn(3, 3, 12, 12)
    return module, x, export_explained(module, (x,), {"x": {0: "N"}})


@pytest.fixture(scope="module")
def two_inputs():
    torch.manual_seed(1)
    module, x = Mlp(), (torch.randn(5, 4), torch.randn(5, 2))
    return module, x, export_explained(module, x, {"x": {0: "N"}, "z": {0: "N"}})


@pytest.fixture(scope="module")
def tokens():
    torch.manual_seed(2)
    ids = torch.randint(1, 11, (3, 5))
    mask = torch.ones(3, 5)
    mask[1, 3:] = 0
    module = Tiny()
    axes = {"ids": {0: "N", 1: "T"}, "mask": {0: "N", 1: "T"}}
    return module, (ids, mask), export_explained(module, (ids, mask), axes)


TARGETS = [2, [0, 3, 1], np.array([1, 1, 0])]


@pytest.mark.parametrize(
    ("target", "absolute"), [(TARGETS[0], True), (TARGETS[1], False), (TARGETS[2], True)], ids=str
)
def test_saliency(images, target, absolute):
    module, x, model = images
    chosen = target if isinstance(target, int) else torch.tensor(target)
    theirs = captum.Saliency(module).attribute(x.clone(), chosen, abs=absolute)
    ours = explain.saliency(model, x, target, absolute=absolute)
    np.testing.assert_allclose(ours, theirs.detach(), **CLOSE)
    assert ours.dtype == np.float32


def test_saliency_of_several_inputs(two_inputs):
    module, x, model = two_inputs
    theirs = captum.Saliency(module).attribute(tuple(a.clone() for a in x), 1)
    ours = explain.saliency(model, {"x": x[0], "z": x[1]}, 1)
    assert list(ours) == ["x", "z"]
    for a, b in zip(ours.values(), theirs, strict=True):
        np.testing.assert_allclose(a, b.detach(), **CLOSE)


@pytest.mark.parametrize(
    "method", ["gausslegendre", "riemann_left", "riemann_middle", "riemann_right"]
)
def test_integrated_gradients(images, method):
    module, x, model = images
    baseline = torch.full_like(x[:1], 0.3)
    theirs, gap = captum.IntegratedGradients(module).attribute(
        x, baseline, 1, n_steps=17, method=method, return_convergence_delta=True
    )
    scores = explain.ScoreFunction(model)
    ours = explain.integrated_gradients(scores, x, 1, baseline, steps=17, method=method)
    np.testing.assert_allclose(ours, theirs.detach(), **CLOSE)
    ours_gap = explain.completeness_gap(scores, ours, x, 1, baseline)
    np.testing.assert_allclose(ours_gap, gap, atol=2e-5)


def test_integrated_gradients_of_an_embedding(tokens):
    module, (ids, mask), model = tokens
    method = captum.LayerIntegratedGradients(module, module.embedding)
    zeros = torch.zeros_like(ids)
    theirs = method.attribute(ids, zeros, [2, 0, 1], additional_forward_args=(mask,), n_steps=20)
    embedded = result_of_node(model, "Gather")
    feed = {"ids": ids, "mask": mask}
    ours = explain.integrated_gradients(
        model, feed, [2, 0, 1], {"ids": zeros}, wrt=embedded, steps=20
    )
    np.testing.assert_allclose(ours, theirs.detach(), **CLOSE)


def test_smooth_grad(images, monkeypatch):
    module, x, model = images
    rng = np.random.default_rng(3)
    noise = [rng.standard_normal(x.shape) for _ in range(4)]
    each = np.stack(noise, 1).reshape(12, *x.shape[1:])  # Captum repeats each row four times
    drawn = torch.tensor(each * 0.2, dtype=torch.float32)
    monkeypatch.setattr(torch, "normal", lambda mean, std: drawn.reshape(std.shape))
    theirs = captum.NoiseTunnel(captum.Saliency(module)).attribute(
        x, nt_samples=4, stdevs=0.2, target=1
    )
    ours = explain.smooth_grad(model, x, 1, samples=4, noise=0.2, random_state=3)
    np.testing.assert_allclose(ours, theirs.detach(), **CLOSE)


@pytest.mark.parametrize("relu", [True, False])
def test_grad_cam(images, relu):
    module, x, model = images
    theirs = captum.LayerGradCam(module, module.second).attribute(x, 2, relu_attributions=relu)
    ours = explain.grad_cam(model, x, result_of_node(model, "Conv", 1), 2, relu=relu)
    np.testing.assert_allclose(ours, theirs.detach(), **CLOSE)


@pytest.mark.parametrize("name", ["conv", "second"])
def test_layer_conductance(images, name):
    module, x, model = images
    layer = result_of_node(model, "Conv", ["conv", "second"].index(name))
    method = captum.LayerConductance(module, getattr(module, name))
    theirs = method.attribute(x, x * 0 + 0.1, target=1, n_steps=9)
    ours = explain.layer_conductance(model, x, layer, 1, 0.1, steps=9)
    np.testing.assert_allclose(ours, theirs.detach(), **CLOSE)


def test_layer_conductance_of_several_inputs(two_inputs):
    module, x, model = two_inputs
    theirs = captum.LayerConductance(module, module.first).attribute(x, target=[0, 1, 2, 0, 1])
    feed = {"x": x[0], "z": x[1]}
    ours = explain.layer_conductance(model, feed, result_of_node(model, "Gemm"), [0, 1, 2, 0, 1])
    np.testing.assert_allclose(ours, theirs.detach(), **CLOSE)


@pytest.mark.parametrize(
    ("window", "strides"), [((3, 4, 4), (3, 3, 4)), ((1, 5, 3), (1, 3, 2)), ((2, 6, 7), 2)]
)
def test_occlusion(images, window, strides):
    module, x, model = images
    theirs = captum.Occlusion(module).attribute(x, window, strides, 0.5, target=[0, 3, 1])
    ours = explain.occlusion(model, x, window, [0, 3, 1], 0.5, strides=strides)
    np.testing.assert_allclose(ours, theirs.detach(), **CLOSE)


def test_occlusion_of_several_inputs(two_inputs):
    module, x, model = two_inputs
    theirs = captum.Occlusion(module).attribute(x, ((2,), (1,)), target=1)
    ours = explain.occlusion(model, {"x": x[0], "z": x[1]}, {"x": 2, "z": 1}, 1)
    for a, b in zip(ours.values(), theirs, strict=True):
        np.testing.assert_allclose(a, b.detach(), **CLOSE)


@pytest.mark.parametrize("targeted", [True, False])
def test_fgsm(images, two_inputs, targeted):
    from captum.robust import FGSM

    module, x, model = images
    loss = nn.CrossEntropyLoss(reduction="none")
    attack = FGSM(module, loss, lower_bound=-1, upper_bound=1)
    attack.zero_thresh = 0  # Captum moves nothing where the gradient is below 1e-6
    theirs = attack.perturb(x, 0.1, torch.tensor([0, 3, 1]), targeted=targeted)
    options = {"targeted": targeted, "bounds": (-1, 1), "loss": "cross_entropy"}
    ours = explain.fgsm(model, x, 0.1, [0, 3, 1], **options)
    np.testing.assert_allclose(ours, theirs.detach(), **CLOSE)
    module, x, model = two_inputs
    mask = torch.tensor([[1.0, 0, 1, 1]])
    attack = FGSM(module)
    attack.zero_thresh = 0
    theirs = attack.perturb(x, 0.1, 1, targeted=targeted, mask=(mask, torch.ones(1, 2)))
    feed = {"x": x[0], "z": x[1]}
    ours = explain.fgsm(model, feed, 0.1, 1, targeted=targeted, mask={"x": mask})
    for a, b in zip(ours.values(), theirs, strict=True):
        np.testing.assert_allclose(a, b.detach(), **CLOSE)


@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_pgd(images, norm):
    from captum.robust import PGD

    module, x, model = images
    attack = PGD(module, nn.CrossEntropyLoss(reduction="none"), lower_bound=-2, upper_bound=2)
    attack.fgsm.zero_thresh = 0
    radius = 0.15 if norm == "Linf" else 1.5
    labels = torch.tensor([0, 3, 1])
    theirs = attack.perturb(x, radius, 0.06, 6, labels, norm=norm)
    ours = explain.pgd(
        model, x, radius, 0.06, 6, [0, 3, 1], norm=norm, bounds=(-2, 2), loss="cross_entropy"
    )
    np.testing.assert_allclose(ours, theirs.detach(), **CLOSE)


def test_influence(tmp_path):
    from captum.influence import TracInCP

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))

    torch.manual_seed(4)
    module, x, labels = Small(), torch.randn(9, 4), torch.randint(0, 3, (9,))
    model = export_explained(module, (x,), {"x": {0: "N"}})
    files, states = [], []
    for i in range(2):
        for p in module.parameters():
            p.data += 0.1 * torch.randn_like(p)
        files.append(str(tmp_path / f"{i}.pt"))
        torch.save(module.state_dict(), files[-1])
        states.append({name: p.detach().clone().numpy() for name, p in module.named_parameters()})
    rates = dict(zip(files, (0.5, 0.25), strict=True))

    def load(m, path):
        m.load_state_dict(torch.load(path))
        return rates[path]

    method = TracInCP(
        module, torch.utils.data.TensorDataset(x[:6], labels[:6]), files, load,
        loss_fn=nn.CrossEntropyLoss(reduction="sum"), batch_size=6,
        sample_wise_grads_per_batch=True,
    )  # fmt: skip
    theirs = method.influence((x[6:], labels[6:]))
    ours = explain.influence(
        model, x[:6], labels[:6], x[6:], labels[6:], "cross_entropy",
        checkpoints=states, learning_rates=[0.5, 0.25], batch_size=4,
    )  # fmt: skip
    assert ours.shape == (3, 6)
    np.testing.assert_allclose(ours, theirs.detach(), **CLOSE)
