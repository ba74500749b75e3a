"""`Trainer` on residual networks of PyTorch: weights and running statistics follow PyTorch's.

In a "fresh" network, tensors have equal values, which exporters merge.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import onnxgrad as og  # noqa: E402
from tests.support.exports import export_module  # noqa: E402
from tests.support.models import initializer_arrays  # noqa: E402
from tests.support.running import in_sweep, run  # noqa: E402

fuse_conv_bn_eval = torch.nn.utils.fusion.fuse_conv_bn_eval
nn = torch.nn
ROWS, BATCH, EPOCHS, CLASSES = 80, 8, 5, 3  # 50 steps


class ResidualBlock(nn.Module):
    """A residual block; a change of channels or a stride needs a convolution beside it."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after, momentum=0.3)
        self.beside = nn.Sequential()
        if stride > 1 or before != after:
            self.beside = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x):
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + self.beside(x)).relu()


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.blocks = nn.Sequential(
            ResidualBlock(6, 6, 1), ResidualBlock(6, 8, 2), ResidualBlock(8, 8, 1)
        )
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.pool(self.blocks(self.stem(x))).flatten(1))


SHAPE, TOLERANCE = (3, 8, 8), 1e-4


def torch_network_of(state):
    """Return a network; in one that is not "fresh", no two tensors are equal."""
    torch.manual_seed(0)
    net = ResNet()
    if state == "trained":
        with torch.no_grad():
            for tensor in net.state_dict().values():
                if tensor.ndim == 1:
                    tensor += 0.3 * torch.rand(tensor.shape)
    return net


FORMS = {  # exporter, mode of the network, and options of the exporter
    "legacy-training": (False, "train", {"training": torch.onnx.TrainingMode.TRAINING}),
    "legacy-preserve-train": (False, "train", {"training": torch.onnx.TrainingMode.PRESERVE}),
    "legacy-preserve-eval": (False, "eval", {"training": torch.onnx.TrainingMode.PRESERVE}),
    "dynamo-train": (True, "train", {"optimize": False}),
    "dynamo-eval": (True, "eval", {"optimize": False}),
    "legacy-folded": (False, "eval", {"training": torch.onnx.TrainingMode.EVAL}),
    "dynamo-folded": (True, "eval", {"optimize": True}),
    "dynamo-folded-train": (True, "train", {"optimize": True}),
}
KEPT = [form for form in FORMS if "folded" not in form]


def export_form(form, state):
    dynamo, mode, options = FORMS[form]
    net, x = torch_network_of(state), torch.randn(4, *SHAPE)
    if dynamo:
        options = options | {"dynamic_shapes": ({0: torch.export.Dim("N", min=2)},)}
    else:
        options = options | {"dynamic_axes": {"x": {0: "N"}}}
    return export_module(
        net, (x,), dynamo=dynamo, train=mode == "train", input_names=["x"], **options
    )


def separable_images():
    """Return images that a network can tell apart, and their classes."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, ROWS)
    centers = rng.normal(size=(CLASSES, *SHAPE))
    X = centers[y] + rng.normal(size=(ROWS, *SHAPE))
    return X.astype(np.float32), y


OPTIMIZERS = {
    "momentum": (
        lambda: og.optimizers.momentum(),
        0.02,
        lambda p: torch.optim.SGD(p, 0.02, momentum=0.9),
    ),
    "adamw": (
        lambda: og.optimizers.adamw(weight_decay=0.05),
        0.003,
        lambda p: torch.optim.AdamW(p, 0.003, weight_decay=0.05),
    ),
}


def train_network(net, X, y, optimizer, shuffle=True):
    """Train a network by PyTorch, in the order in which `Trainer` draws rows; return the losses."""
    optimizer, losses = OPTIMIZERS[optimizer][2](net.parameters()), []
    for epoch in range(EPOCHS):
        order = np.random.default_rng([0, epoch]).permutation(len(X)) if shuffle else range(len(X))
        total = 0.0
        for first in range(0, len(X), BATCH):
            rows = order[first : first + BATCH]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(torch.tensor(X[rows])), torch.tensor(y[rows]))
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        losses.append(total / len(X))
    return losses


def stored_as(model, net):
    """Return `{tensor of the file: (name in the network, whether it is transposed)}`.

    The exporters keep the names of tensors, but for factors of MatMul, which they transpose.
    """
    state = {n: t.numpy() for n, t in net.state_dict().items()}
    names = {}
    for name, array in initializer_arrays(model).items():
        if array.dtype.kind == "f" and name not in state:
            equal = [n for n, a in state.items() if np.array_equal(a.T, array)]
            assert len(equal) == 1, name
            names[name] = equal[0], True
        elif array.dtype.kind == "f":
            names[name] = name, False
    return names


def assert_follows_network(trainer, net, names):
    """Assert that a trainer has the parameters and statistics of a network."""
    assert {names[n][0] for n in trainer.trained} == {n for n, _ in net.named_parameters()}
    expected = {n: t.detach().numpy() for n, t in net.state_dict().items()}
    for name, array in trainer.evaluated().items():
        torch_name, transposed = names[name]
        want = expected[torch_name].T if transposed else expected[torch_name]
        scale = max(abs(want).max(), 0.1)
        np.testing.assert_allclose(array / scale, want / scale, atol=TOLERANCE, err_msg=name)


def with_statistics_of(net, model):
    """Set the running statistics to those of the file: an export in training mode updates them."""
    stored = {n: torch.tensor(a) for n, a in initializer_arrays(model).items()}
    with torch.no_grad():
        for name, buffer in net.named_buffers():
            if name in stored:
                buffer.copy_(stored[name])
    return net


DEFAULT = {
    ("legacy-preserve-eval", "fresh", "momentum"),
}
CASES = [
    case if case in DEFAULT else in_sweep(*case)
    for case in itertools.product(KEPT, ("fresh", "trained"), OPTIMIZERS)
]


@pytest.mark.parametrize(("form", "state", "optimizer"), CASES)
def test_fifty_steps_with_statistics_of_the_batch(form, state, optimizer):
    model = export_form(form, state)
    net = with_statistics_of(torch_network_of(state), model).train()
    X, y = separable_images()
    choice, rate, _ = OPTIMIZERS[optimizer]
    trainer = og.Trainer(
        model, "cross_entropy", optimizer=choice(), learning_rate=rate, batch_norm="train"
    )
    names = stored_as(trainer.model, torch_network_of(state))
    trainer.fit(X, y, epochs=EPOCHS, batch_size=BATCH)
    losses = train_network(net, X, y, optimizer)
    assert trainer.state.step == 50
    assert losses[-1] < 0.6 * losses[0]
    np.testing.assert_allclose([e["loss"] for e in trainer.history], losses, rtol=TOLERANCE)
    assert_follows_network(trainer, net, names)
    kept = {names[n][0] for n in trainer.state.buffers}
    assert kept == {n for n, _ in net.named_buffers() if not n.endswith("tracked")}
    assert_predicts(trainer, net, X)


def assert_predicts(trainer, net, X):
    """Assert that the exported model is the network in evaluation mode."""
    with torch.no_grad():
        want = net.eval()(torch.tensor(X)).numpy()
    (got,) = run(trainer.model, {trainer.model.graph.input[0].name: X})
    np.testing.assert_allclose(got, want, rtol=10 * TOLERANCE, atol=10 * TOLERANCE)
    np.testing.assert_allclose(trainer.predict(X), got, rtol=1e-5, atol=1e-5)
    nodes = [n for n in trainer.model.graph.node if n.op_type == "BatchNormalization"]
    assert all(len(n.output) == 1 and _mode(n) == 0 for n in nodes)


def _mode(node):
    return next((a.i for a in node.attribute if a.name == "training_mode"), 0)


@pytest.mark.parametrize(
    "form",
    [form if form == "legacy-training" else in_sweep(form) for form in KEPT],
)
def test_fifty_steps_with_stored_statistics(form):
    model = export_form(form, "trained")
    net = with_statistics_of(torch_network_of("trained"), model).eval()
    X, y = separable_images()
    trainer = og.Trainer(
        model, "cross_entropy", optimizer=og.optimizers.momentum(), learning_rate=0.02
    )
    names = stored_as(trainer.model, torch_network_of("trained"))
    trainer.fit(X, y, epochs=EPOCHS, batch_size=BATCH, shuffle=False)
    losses = train_network(net, X, y, "momentum", shuffle=False)
    np.testing.assert_allclose([e["loss"] for e in trainer.history], losses, rtol=TOLERANCE)
    assert_follows_network(trainer, net, names)
    assert not trainer.state.buffers
    assert_predicts(trainer, net, X)


FOLDED = ["legacy-folded", in_sweep("dynamo-folded"), in_sweep("dynamo-folded-train")]


@pytest.mark.parametrize("form", FOLDED)
def test_statistics_that_the_exporter_folded(form):
    """The file has biased convolutions only: these train, and statistics of batches are refused."""
    model = export_form(form, "trained")
    X, y = separable_images()
    with pytest.raises(ValueError, match="fold"):
        og.Trainer(model, "cross_entropy", batch_norm="train").fit(X, y)
    net = folded(torch_network_of("trained").eval())
    trainer = og.Trainer(
        model, "cross_entropy", optimizer=og.optimizers.momentum(), learning_rate=0.02
    )
    trainer.fit(X, y, epochs=EPOCHS, batch_size=BATCH)
    losses = train_network(net, X, y, "momentum")
    np.testing.assert_allclose([e["loss"] for e in trainer.history], losses, rtol=TOLERANCE)
    assert len(trainer.trained) == len(list(net.parameters()))
    assert_predicts(trainer, net, X)


def folded(net):
    """Return the network with its normalizations folded into the convolutions before them."""
    for stage in net.modules():
        layers = list(stage.named_children())
        for (conv_name, conv), (norm_name, norm) in itertools.pairwise(layers):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(stage, conv_name, fuse_conv_bn_eval(conv, norm))
                setattr(stage, norm_name, nn.Identity())
    return net.requires_grad_(True)
