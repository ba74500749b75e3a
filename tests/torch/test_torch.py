"""`OnnxModule` against the same networks in PyTorch, and under all that PyTorch does to modules."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import threading

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.utils.checkpoint import checkpoint  # noqa: E402

from onnxgrad import ModelError, NoGradientRule, ProviderError  # noqa: E402
from onnxgrad.graph import select_model_inputs_outputs  # noqa: E402
from onnxgrad.torch import OnnxModule  # noqa: E402
from tests.support.errors import naming  # noqa: E402
from tests.support.models import add_initializers, parse_model  # noqa: E402
from tests.support.pages import code_of  # noqa: E402
from tests.support.parallel_worker import train_distributed_module  # noqa: E402
from tests.support.process_pool import results_of_group  # noqa: E402


def module_of(text: str, trainable=None, **weights) -> OnnxModule:
    """Return the module of a model of a text without its name."""
    return OnnxModule(parse_model(f"g {text}", **weights), trainable)


def random_normal(*shape: int, seed: int = 0, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def seeded_network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


def as_onnx(net: nn.Sequential) -> onnx.ModelProto:
    """Return the network in ONNX, the weights under the names that PyTorch has."""
    model = parse_model("""g (float[N, 6] x) => (float[N, 2] y) {
        a = Gemm <transB = 1> (x, w0, b0)  b = Relu(a)
        c = Gemm <transB = 1> (b, w2, b2)  d = Tanh(c)
        y = Gemm <transB = 1> (d, w4, b4)
    }""")
    for node in model.graph.node:
        for i in range(1, len(node.input)):
            node.input[i] = f"{node.input[i][1]}.{'weight' if i == 1 else 'bias'}"
    add_initializers(model, {name: value.numpy() for name, value in net.state_dict().items()})
    return model


@pytest.fixture(name="net")
def untrained_network() -> nn.Sequential:
    return seeded_network()


@pytest.fixture(name="module")
def module_of_network(net) -> OnnxModule:
    return OnnxModule(as_onnx(net))


def rows_and_targets(rows: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = random_normal(rows, 6, seed=1), random_normal(rows, 2, seed=2)
    return torch.tensor(x), torch.tensor(y)


def assert_near(found, expected, rtol: float = 1e-5, atol: float = 1e-6):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def assert_same_gradients(found: nn.Module, expected: nn.Module):
    pairs = zip(found.named_parameters(), expected.named_parameters(), strict=True)
    for (name, p), (key, q) in pairs:
        assert name == key
        assert_near(p.grad, q.grad)


# -- training as in PyTorch -------------------------------------------------------------------

OPTIMIZERS = {
    "nesterov": lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, 0.01, amsgrad=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_gives_the_losses_of_pytorch(name, net, module):
    x, y = rows_and_targets(32)
    curves = []
    for m in (net, module):
        optimizer, losses = OPTIMIZERS[name](m.parameters()), []
        for step in range(30):
            rows = slice(0, 32) if step % 2 else slice(3, 20)
            optimizer.zero_grad()
            loss = F.mse_loss(m(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[0][28] < 0.99 * curves[0][0]
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)
    for key, value in net.state_dict().items():
        assert_near(module.state_dict()[key], value, rtol=1e-4, atol=1e-5)


def test_lbfgs_calls_the_closure_again(net, module):
    x, y = rows_and_targets(16)
    found = []
    for m in (net, module):
        optimizer = torch.optim.LBFGS(m.parameters(), max_iter=5)

        def closure(m=m, optimizer=optimizer):
            optimizer.zero_grad()
            loss = F.mse_loss(m(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        found.append(F.mse_loss(m(x), y).item())
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_the_trained_model_comes_back(net, module, tmp_path):
    model = as_onnx(net)
    model.metadata_props.add(key="author", value="me")
    module, x = OnnxModule(model), rows_and_targets()[0]
    with torch.no_grad():
        for p in module.parameters():
            p += torch.randn_like(p)
    path = tmp_path / "trained.onnx"
    made = module.to_onnx(path)
    assert onnx.load(path) == made
    expected = copy.deepcopy(model)
    for tensor in expected.graph.initializer:
        value = module.state_dict()[tensor.name].numpy()
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    assert made == expected
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert_near(torch.tensor(session.run(None, {"x": x.numpy()})[0]), module(x).detach())
    assert model.graph.initializer[0] == as_onnx(net).graph.initializer[0]
    model.graph.name = "changed"
    assert module.to_onnx() == expected


def test_weights_of_another_dtype_come_back_in_that_of_the_model(net, module):
    module.double()
    with torch.no_grad():
        module.get_parameter("0.bias").fill_(1 / 3)
    tensor = next(t for t in module.to_onnx().graph.initializer if t.name == "0.bias")
    np.testing.assert_array_equal(numpy_helper.to_array(tensor), np.full(5, 1 / 3, np.float32))


# -- gradients --------------------------------------------------------------------------------


def test_inputs_and_weights_between_other_modules(net):
    torch.manual_seed(1)
    before, after = nn.Linear(3, 6), nn.Sequential(nn.Tanh(), nn.Linear(2, 1))
    x = torch.randn(5, 3, requires_grad=True)
    found = []
    for middle in (net, OnnxModule(as_onnx(net))):
        whole = nn.Sequential(before, middle, after)
        whole.zero_grad()
        x.grad = None
        whole(x).square().sum().backward()
        found.append([p.grad.clone() for p in (x, *whole.parameters())])
    assert len(found[0]) == 11
    for a, b in zip(*found, strict=True):
        assert_near(b, a)


@pytest.mark.parametrize("frozen", [["0.weight"], ["0.weight", "0.bias", "2.bias"], "all"])
def test_only_what_requires_a_gradient_has_one(net, module, frozen):
    x, y = rows_and_targets()
    x.requires_grad_()
    for m in (net, module):
        for name, p in m.named_parameters():
            p.requires_grad_(frozen != "all" and name not in frozen)
    wanted = torch.autograd.grad(F.mse_loss(net(x), y), x)[0]
    for m in (net, module):
        F.mse_loss(m(x), y).backward(inputs=None)
        assert_near(x.grad, wanted)
        x.grad = None
    for p, q in zip(net.parameters(), module.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            assert_near(q.grad, p.grad)


def test_frozen_weights_cost_nothing_but_can_change(net, module):
    x = rows_and_targets()[0]
    module.requires_grad_(False)
    module.get_parameter("4.bias").requires_grad_()
    module(x).sum().backward()
    [(_, _, models)] = next(iter(module._variants.values())).graph._session_pairs.values()
    assert models.names == ["4.bias"]
    assert models.saved == []
    with torch.no_grad():
        for p, q in zip(net.parameters(), module.parameters(), strict=True):
            p += 1
            q += 1
    assert_near(module(x), net(x))


def test_gradients_accumulate(net, module):
    x, y = rows_and_targets(12)
    for m in (net, module):
        for i in range(0, 12, 4):
            F.mse_loss(m(x[i : i + 4]), y[i : i + 4]).backward()
    assert_same_gradients(module, net)


def test_several_calls_before_one_backward(net, module):
    x, y = rows_and_targets()
    for m in (net, module):
        loss = F.mse_loss(m(x), y) + F.mse_loss(m(x * 2), y) * m(m(x).repeat(1, 3)).sum()
        loss.backward()
    assert_same_gradients(module, net)


def test_no_grad_and_inference_mode(module):
    x = rows_and_targets()[0].requires_grad_()
    expected = module(x)
    assert expected.requires_grad
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            y = module(x)
        assert not y.requires_grad
        assert_near(y, expected.detach())
    assert not module.requires_grad_(False)(x.detach()).requires_grad


TWO = """(float[N, 3] x, int64[N] i) => (float[N, 2] a, int64[N] best, float[N, 3] b, bool[N] c) {
    h = MatMul(x, w)  e = Gather(table, i)  a = Add(h, e)  best = ArgMax <axis=1, keepdims=0> (a)
    b = Sigmoid(x)  zero = Constant <value_int=0> ()  c = Equal(best, zero)
}"""


def test_several_outputs_and_integer_inputs():
    w, table = random_normal(3, 2), random_normal(5, 2, seed=1)
    module = module_of(TWO, w=w, table=table)
    x, i = torch.tensor(random_normal(4, 3, seed=2), requires_grad=True), torch.tensor([0, 3, 3, 1])
    a, best, b, c = module(x, i)
    tw, tt = (torch.tensor(v, requires_grad=True) for v in (w, table))
    ta, tb = x @ tw + F.embedding(i, tt), x.sigmoid()
    assert_near(a, ta)
    assert_near(b, tb)
    assert best.dtype == torch.int64
    assert c.dtype == torch.bool
    assert not best.requires_grad
    assert not c.requires_grad
    assert torch.equal(best, ta.argmax(1))
    assert torch.equal(c, best == 0)
    for mine, theirs in (((a.square().sum()), ta.square().sum()), (b.sum(), tb.sum())):
        found = torch.autograd.grad(mine, [x, *module.parameters()], retain_graph=True, **UNUSED)
        expected = torch.autograd.grad(theirs, [x, tw, tt], retain_graph=True, **UNUSED)
        for f, e in zip(found, expected, strict=True):
            assert_near(torch.zeros_like(f) if e is None else e, f)
    found = torch.autograd.grad(a.sum() + (2 * b).sum(), [x, *module.parameters()])
    expected = torch.autograd.grad(ta.sum() + (2 * tb).sum(), [x, tw, tt])
    for f, e in zip(found, expected, strict=True):
        assert_near(f, e)


UNUSED = {"allow_unused": True}


def test_boolean_inputs():
    module = module_of(
        "(bool[N] m, float[N] x) => (float[N] y) { y = Where(m, x, w) }", w=random_normal(3)
    )
    x, m = torch.ones(3, requires_grad=True), torch.tensor([True, False, True])
    module(m, x).sum().backward()
    assert x.grad.tolist() == [1, 0, 1]
    assert module.w.grad.tolist() == [0, 1, 0]


def test_shared_weights():
    model = parse_model(
        "g (float[N, 3] x) => (float[N, 3] y) { a = MatMul(x, w) b = Tanh(a) y = MatMul(b, w) }",
        w=random_normal(3, 3),
    )
    module = OnnxModule(model)
    assert [name for name, _ in module.named_parameters()] == ["w"]
    w, x = (
        torch.tensor(random_normal(3, 3), requires_grad=True),
        torch.tensor(random_normal(4, 3, seed=1)),
    )
    (torch.tanh(x @ w) @ w).square().sum().backward()
    module(x).square().sum().backward()
    assert_near(module.w.grad, w.grad)


def test_one_parameter_in_two_modules(net):
    one, two = (OnnxModule(as_onnx(net)) for _ in range(2))
    two.get_submodule("0").weight = one.get_submodule("0").weight
    x = rows_and_targets()[0]
    (one(x) + two(x)).sum().backward()
    net(x).mul(2).sum().backward()
    assert_near(one.get_parameter("0.weight").grad, net[0].weight.grad)


def test_convolutions_with_batch_normalization():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.conv2, self.fc = nn.Conv2d(4, 6, 3, stride=2), nn.Linear(6, 3)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.bn(self.conv1(x))), 2)
            return self.fc(F.relu(self.conv2(x)).mean((2, 3)))

    torch.manual_seed(0)
    net = Net()
    for name in ("weight", "bias", "running_mean"):
        nn.init.normal_(getattr(net.bn, name))
    net.eval()
    text = """(float[N, 1, 8, 8] x) => (float[N, 3] y) {
        a = Conv <pads = [1, 1, 1, 1]> (x, conv1_weight, conv1_bias)
        b = BatchNormalization (a, bn_weight, bn_bias, bn_running_mean, bn_running_var)
        c = Relu(b)  d = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (c)
        e = Conv <strides = [2, 2]> (d, conv2_weight, conv2_bias)  f = Relu(e)
        axes = Constant <value_ints = [2, 3]> ()  m = ReduceMean <keepdims = 0> (f, axes)
        y = Gemm <transB = 1> (m, fc_weight, fc_bias)
    }"""
    state = {k.replace(".", "_"): v.numpy() for k, v in net.state_dict().items() if v.dim()}
    module = module_of(text, **state)
    assert "bn_running_mean" not in module.state_dict()
    x, y = torch.randn(5, 1, 8, 8), torch.tensor([0, 2, 1, 1, 0])
    optimizers = [torch.optim.Adam(m.parameters(), 0.01) for m in (net, module)]
    for _ in range(5):
        losses = []
        for m, optimizer in zip((net, module), optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(m(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name, p in net.named_parameters():
        assert_near(module.get_parameter(name.replace(".", "_")), p, rtol=1e-4, atol=1e-5)


def test_no_path_means_no_gradient():
    module = module_of(
        "(float[N] x, float[N] z) => (float[N] y, float[N] s) { y = Mul(x, w) s = Sign(z) }",
        w=random_normal(3),
    )
    x, z = (torch.ones(3, requires_grad=True) for _ in range(2))
    y, s = module(x, z)
    (y.sum() + s.sum()).backward()
    assert z.grad is None
    assert_near(module.w.grad, torch.ones(3))
    assert gradcheck(module.double(), (x.double().detach().requires_grad_(), z.double()))
    nothing = module_of("(float[N] x) => (float[N] y) { y = Sign(x) }")
    nothing(x).sum().backward()
    zero = module_of("(float[N] x) => (float[N] y) { y = Floor(x) }")
    zero(x).sum().backward()
    [g] = torch.autograd.grad(module.float()(x, z)[0].sum(), x, create_graph=True)
    assert torch.autograd.grad(g.sum(), z, allow_unused=True) == (None,)


# -- gradients of gradients -------------------------------------------------------------------

CHECKED = {
    "mlp": ("(float[N,3] x) => (float[N,2] y) { a = MatMul(x, w) b = Add(a, c) d = Tanh(b) "
            "e = Softmax(d) y = Mul(e, d) }", {"w": (3, 2), "c": (2,)}, [(4, 3)]),
    "broadcast": ("(float[N,3] x, float[3] z) => (float[N,3] y) { a = Mul(x, z) b = Exp(a) "
                  "y = Div(b, w) }", {"w": (1, 3)}, [(2, 3), (3,)]),
    "layer normalization": ("(float[N,4] x) => (float[N,4] y) { y = LayerNormalization(x, w, b) }",
                            {"w": (4,), "b": (4,)}, [(3, 4)]),
    "shapes": ("(float[N,4] x) => (float[N,2,2] y, float z) { s = Constant <value_ints=[0,2,2]> () "
               "a = Reshape(x, s) b = Transpose <perm=[0,2,1]> (a) y = MatMul(a, b) "
               "q = Mul(y, w) z = ReduceSum <keepdims=0> (q) }", {"w": (2, 2)}, [(3, 4)]),
    "gather": ("(float[N,3] x) => (float[2,3] y) { i = Constant <value_ints=[0,0]> () "
               "a = Gather(x, i) b = Sin(a) y = Pow(b, w) }", {"w": ()}, [(3, 3)]),
    "no weight": ("(float[N] x) => (float[N] y) { y = Sigmoid(x) }", {}, [(3,)]),
    "mixed": ("(float[N] x) => (float[N] y) { a = Cast <to=11> (x) b = Exp(a) c = Cast <to=1> (b) "
              "y = Mul(c, w) }", {"w": (1,)}, [(3,)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKED)
def test_gradcheck(name):
    text, weights, shapes = CHECKED[name]
    module = module_of(
        text,
        list(weights),
        **{n: np.abs(random_normal(*s, seed=9)) + 0.5 for n, s in weights.items()},
    ).double()
    xs = [
        torch.tensor(random_normal(*s, seed=i, dtype=np.float64), requires_grad=True)
        for i, s in enumerate(shapes)
    ]
    if name == "gather":
        xs[0].data.abs_().add_(0.2)
    names = list(module.weight_names)

    def function(*values):
        inputs, parameters = values[: len(xs)], values[len(xs) :]
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), inputs)

    values = (*xs, *[p.detach().requires_grad_() for p in module.parameters()])
    assert gradcheck(function, values)
    assert gradgradcheck(function, values)


def test_model_in_float64():
    module = module_of(
        "(double[N] x) => (double[N] y) { a = Mul(x, w) y = Tanh(a) }", w=np.array([0.3])
    )
    x = torch.tensor([0.5, -0.2], dtype=torch.float64, requires_grad=True)
    assert gradcheck(module, (x,))
    assert gradgradcheck(module, (x,))


def test_gradient_penalty(net, module):
    x, _ = rows_and_targets()
    found = []
    for m in (net, module):
        z = x.clone().requires_grad_()
        [g] = torch.autograd.grad(m(z).sum(), z, create_graph=True)
        ((g.norm(dim=1) - 1) ** 2).mean().backward()
        found.append([torch.zeros_like(p) if p.grad is None else p.grad for p in m.parameters()])
    for theirs, mine in zip(*found, strict=True):
        assert_near(mine, theirs)
    assert found[1][0].abs().max() > 1e-3


def test_third_order():
    module = module_of("(float[N] x) => (float[N] y) { a = Mul(x, x) y = Mul(a, a) }")
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = module(x).sum()
    for expected in ([4.0, 32.0], [12.0, 48.0], [24.0, 48.0], [24.0, 24.0]):
        [y] = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert y.tolist() == expected


def test_random_nodes_have_no_gradient_of_gradients():
    module = module_of(
        "(float[N] x) => (float[N] y) { r = Constant <value_float=0.5> () "
        "t = Cast <to=9> (r) a = Dropout(x, r, t) y = Mul(a, a) }"
    )
    x = torch.ones(64, requires_grad=True)
    y = module(x)
    [g] = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert_near(g, y * 2)  # of the same draw: y is 4 where an element is kept
    with pytest.raises(RuntimeError, match=naming("Dropout", "'a'", "at random")):
        torch.autograd.grad(y.sum(), x, create_graph=True)


# -- what PyTorch does with modules -----------------------------------------------------------


def test_state_dict_goes_both_ways(net, module):
    assert list(module.state_dict()) == list(net.state_dict())
    other = seeded_network(seed=5)
    assert module.load_state_dict(other.state_dict()).missing_keys == []
    x = rows_and_targets()[0]
    assert_near(module(x), other(x))
    net.load_state_dict(module.state_dict())
    assert_near(net(x), other(x))
    module.load_state_dict(seeded_network(seed=6).double().state_dict(), assign=True)
    assert_near(module(x.double()), seeded_network(seed=6).double()(x.double()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(net, module, reentrant):
    x, y = rows_and_targets()
    x.requires_grad_()
    F.mse_loss(checkpoint(module, x, use_reentrant=reentrant), y).backward()
    found, x.grad = x.grad, None
    F.mse_loss(net(x), y).backward()
    assert_near(found, x.grad)
    assert_same_gradients(module, net)


def test_saved_tensors_pass_the_hooks_of_pytorch(net, module):
    x, _ = rows_and_targets()
    packed = []

    def pack(t):
        packed.append(t.shape)
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = module(x).square().sum()
    assert (7, 6) in packed
    with torch.no_grad():
        x.zero_()  # the clones are what counts
    loss.backward()
    net(rows_and_targets()[0]).square().sum().backward()
    assert_same_gradients(module, net)


def test_distributed_data_parallel(net):
    x, y = rows_and_targets(8)
    results = results_of_group(train_distributed_module, as_onnx(net).SerializeToString(), x, y)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()
    for state in results:
        assert state.keys() == net.state_dict().keys()
        for key, value in state.items():
            assert_near(torch.tensor(value), net.state_dict()[key])


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies(module, way):
    x = rows_and_targets()[0]
    expected = module(x).detach()
    if way == "deepcopy":
        made = copy.deepcopy(module)
    elif way == "pickle":
        made = pickle.loads(pickle.dumps(module))
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        made = torch.load(file, weights_only=False)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    assert_near(made(x), expected)
    made(x).sum().backward()
    assert made.get_parameter("0.weight").grad is not None
    assert module.get_parameter("0.weight").grad is None
    assert made.to_onnx() != module.to_onnx()


def test_changes_in_place_are_noticed(module):
    x = rows_and_targets()[0]
    y = module(x)
    with torch.no_grad():
        module.get_parameter("2.weight").add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()
    squashed = module_of("(float[N] x) => (float[N] y) { y = Tanh(x) }")
    y = squashed(torch.ones(2, requires_grad=True))
    y.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


def test_backward_twice(module):
    x = rows_and_targets()[0]
    y = module(x).sum()
    y.backward(retain_graph=True)
    first = module.get_parameter("0.weight").grad.clone()
    y.backward()
    assert_near(module.get_parameter("0.weight").grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_functional_call_and_parametrization(net, module):
    x = rows_and_targets()[0]
    other = seeded_network(seed=3)
    assert_near(torch.func.functional_call(module, other.state_dict(), (x,)), other(x))
    for m in (net, module):
        nn.utils.parametrizations.weight_norm(m.get_submodule("2"), "weight")
        m(x).square().sum().backward()
    assert_near(
        module.get_submodule("2").parametrizations.weight.original1.grad,
        net[2].parametrizations.weight.original1.grad,
    )


def test_compile_goes_around_it(net, module):
    x = rows_and_targets()[0]
    compiled = torch.compile(nn.Sequential(module, nn.Tanh()), backend="eager")
    assert_near(compiled(x), net(x).tanh())
    compiled(x).sum().backward()
    net(x).tanh().sum().backward()
    assert_same_gradients(module, net)


def test_threads_do_not_mix_results(net, module):
    xs = [torch.full((5, 6), float(i)) for i in range(8)]
    expected = [net(x).detach() for x in xs]
    wrong = []

    def work(i: int):
        for _ in range(30):
            x = xs[i].clone().requires_grad_()
            y = module(x)
            [g] = torch.autograd.grad(y[0].sum(), x)
            if not torch.allclose(y, expected[i], atol=1e-5) or g[1:].any():
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(xs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_train_and_eval_change_nothing(module):
    x = rows_and_targets()[0]
    assert_near(module.eval()(x), module.train()(x), rtol=0, atol=0)


# -- dtypes -----------------------------------------------------------------------------------


def test_double_and_back(net, module):
    x, y = rows_and_targets()
    before = module(x).detach()
    for m in (net.double(), module.double()):
        F.mse_loss(m(x.double()), y.double()).backward()
    for p, q in zip(module.parameters(), net.parameters(), strict=True):
        assert p.grad.dtype == torch.float64
        assert_near(p.grad, q.grad, rtol=1e-12, atol=1e-14)
    assert len(module._variants) == 1  # the sessions in float32 are gone
    assert_near(module.float()(x), before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_weights(dtype):
    kind = "float16" if dtype == torch.float16 else "bfloat16"
    model = parse_model(
        f"g ({kind}[N, 3] x) => (float[N, 3] y) {{ a = Add(x, w) y = Cast <to=1> (a) }}"
    )
    values = torch.tensor([0.1, 0.2, 0.3]).to(dtype)
    number = {"float16": 10, "bfloat16": 16}[kind]
    raw = values.view(torch.int16).numpy().tobytes()
    model.graph.initializer.append(onnx.helper.make_tensor("w", number, [3], raw, raw=True))
    module = OnnxModule(model)
    assert torch.equal(module.w, values)
    assert module.to_onnx().graph.initializer[0].raw_data == raw
    module.float()
    x = torch.ones(2, 3)
    module(x).sum().backward()
    assert_near(module(x).detach(), x + values.float())
    assert_near(module.w.grad, torch.full((3,), 2.0))


def test_half():
    module = module_of(
        "(float[N, 3] x) => (float[N, 2] y) { a = MatMul(x, w) y = Tanh(a) }", w=random_normal(3, 2)
    )
    x = torch.tensor(random_normal(4, 3, seed=1))
    y, w = module(x).detach(), module.w.detach()
    half = module.half()(x.half())
    assert half.dtype == torch.float16
    assert_near(half.float(), y, rtol=1e-2, atol=1e-2)
    half.sum().backward()
    expected = x.T @ (1 - torch.tanh(x @ w) ** 2)
    assert_near(module.w.grad.float(), expected, rtol=1e-2, atol=1e-2)


def test_autocast(net, module):
    """The layer in front returns bfloat16; the graph computes in float32."""
    torch.manual_seed(0)
    before, x = nn.Linear(6, 6), rows_and_targets()[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert before(x).dtype == torch.bfloat16
        y = nn.Sequential(before, module)(x)
    assert y.dtype == torch.float32
    y.square().sum().backward()
    h = before(x).detach().bfloat16().float()
    assert_near(y, net(h), rtol=1e-2, atol=1e-2)
    net(h).square().sum().backward()
    for p, q in zip(net.parameters(), module.parameters(), strict=True):
        assert_near(q.grad, p.grad, rtol=0.05, atol=0.05)
    assert before.weight.grad.abs().sum() > 0
    with pytest.raises(ValueError, match=r"takes torch\.float32, not torch\.bfloat16"):
        module(x.bfloat16())


def test_numbers_that_half_cannot_hold():
    text = "(float[2] x) => (float[2] y) { y = Add(x, c) }"
    module = module_of(text, [], c=np.float32([-3e38, -np.inf])).half()
    assert module(torch.zeros(2).half()).tolist() == [-65504, -np.inf]


def test_no_kernel_is_said():
    model = parse_model(
        "g (float[N,1,4,4] x) => (float[N,1,2,2] y) { y = Conv(x, w) }", w=random_normal(1, 1, 3, 3)
    )
    module = OnnxModule(model).double()
    with pytest.raises(RuntimeError, match=naming("on cpu", "Conv")):
        module(torch.ones(1, 1, 4, 4, dtype=torch.float64))


# -- memory -----------------------------------------------------------------------------------


def test_nothing_is_copied_on_the_way_in(module):
    """A weight that changes while it lies in onnxruntime would show: it is the same memory."""
    x, other = rows_and_targets()[0], seeded_network(seed=4)
    module(x)
    with torch.no_grad():
        for p, q in zip(module.parameters(), other.parameters(), strict=True):
            p.data.copy_(q)
    assert_near(module(x), other(x))


def test_outputs_own_their_memory(module):
    first = module(torch.zeros(3, 6))
    kept = first.detach().clone()
    for i in range(5):
        module(torch.full((3, 6), float(i + 1)))
    assert_near(first.detach(), kept, rtol=0, atol=0)
    del module
    assert_near(first.detach(), kept, rtol=0, atol=0)


@pytest.mark.parametrize(
    "text",
    [
        "(float[N] x) => (float[N] y) { y = Identity(x) }",
        "(float[N] x) => (float[N] x) { y = Identity(x) }",
        "(float[N] x) => (float[N] y) { z = Identity(x) y = Identity(z) }",
    ],
)
def test_an_output_is_never_the_input(text):
    module = module_of(text)
    assert module.output_names == [module._source.model.graph.output[0].name]
    for x in (torch.ones(3), torch.ones(3, requires_grad=True)):
        y = module(x)
        if x.requires_grad:
            (y * torch.arange(3.0)).sum().backward()
            assert x.grad.tolist() == [0, 1, 2]
        y.detach().zero_()
        assert x.tolist() == [1, 1, 1]


def test_an_output_that_is_a_weight_or_a_constant():
    text = "(float[N] x) => (float[2] w, float[2] c, float[N] y) { y = Neg(x) }"
    module = module_of(text, ["w"], w=random_normal(2), c=random_normal(2))
    w, c, _ = module(torch.ones(3))
    w.sum().backward()
    assert module.w.grad.tolist() == [1, 1]
    for v in (w, c):
        v.detach().zero_()
    again = module(torch.ones(3))
    assert_near(again[0].detach(), torch.tensor(random_normal(2)))
    assert_near(again[1], torch.tensor(random_normal(2)))


def test_tensors_that_are_not_contiguous(net, module):
    x = torch.tensor(random_normal(6, 7)).t()
    assert_near(module(x), net(x))
    assert_near(module(x[::2]), net(x[::2]))
    assert_near(module(torch.ones(1, 6).expand(4, 6)), net(torch.ones(4, 6)))
    for m in (net, module):
        m(x).t()[0].sum().backward()  # a gradient with strides
    assert_same_gradients(module, net)
    for m in (net, module):
        m(x).sum().backward()  # an expanded one
    assert_same_gradients(module, net)
    with torch.no_grad():
        module.get_submodule("0").weight.data = net[0].weight.data.t().contiguous().t()
    assert_near(module(x), net(x))


def test_a_sign_that_is_still_to_be_changed(net, module):
    z = torch.complex(torch.ones(7, 6), torch.tensor(random_normal(7, 6)))
    x = z.conj().imag
    assert x.is_neg()
    assert_near(module(x), net(x))
    for m in (net, module):
        m(x).backward(
            torch.complex(torch.ones(7, 2), torch.tensor(random_normal(7, 2))).conj().imag
        )
    assert_same_gradients(module, net)


def test_no_rows(net, module):
    x = torch.zeros(0, 6, requires_grad=True)
    y = module(x)
    assert y.shape == (0, 2)
    y.sum().backward()
    assert x.grad.shape == (0, 6)
    net(x).sum().backward()
    assert_same_gradients(module, net)


# -- weights and names ------------------------------------------------------------------------


def test_names_that_pytorch_refuses():
    names = ["a", "a.b", "type", "x..y", "training.w", "c/d:0", "type_", ".q", "weight_names"]
    model = parse_model("g (float[2] x0) => (float[2] y) { y = Identity(x0) }")
    del model.graph.node[:]
    last = "x0"
    for i, name in enumerate(names):
        model.graph.node.append(onnx.helper.make_node("Mul", [last, name], [f"r{i}"]))
        model.graph.initializer.append(numpy_helper.from_array(random_normal(2, seed=i), name))
        last = f"r{i}"
    model.graph.output[0].name = last
    module = OnnxModule(model)
    assert list(module.weight_names) == names
    assert set(module.state_dict()) == set(module.weight_names.values())
    assert module.weight_names == {
        "a": "a",
        "a.b": "a_.b",
        "type": "type__",
        "x..y": "x._.y",
        "training.w": "training_.w",
        "c/d:0": "c/d:0",
        "type_": "type_",
        ".q": "_.q",
        "weight_names": "weight_names_",
    }
    product = np.prod([random_normal(2, seed=i) for i in range(len(names))], axis=0)
    assert_near(module(torch.ones(2)).detach(), torch.tensor(product))
    assert module.to_onnx() == model


def test_weights_wherever_they_are():
    model = parse_model("""g (float[N, 2] x) => (float[N, 2] y) {
        c = Constant <value = float[2] {1.0, -2.0}> ()
        a = Mul(x, c)
        y = ai.onnx.ml.LinearRegressor <coefficients = [1.0, 2.0, 3.0, 4.0],
            intercepts = [0.5, -0.5], targets = 2> (a)
    }""")
    model.graph.node[-1].name = "linear"
    module = OnnxModule(model, ["c", "linear.coefficients", "linear.intercepts"])
    assert list(module.state_dict()) == ["c", "linear.coefficients", "linear.intercepts"]
    x = torch.tensor(random_normal(5, 2))
    w, c = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True), torch.tensor([1.0, -2.0])
    y = x * c @ w.T + torch.tensor([0.5, -0.5])
    assert_near(module(x), y)
    y.square().sum().backward()
    module(x).square().sum().backward()
    assert_near(module.get_parameter("linear.coefficients").grad, w.grad.ravel())
    with torch.no_grad():
        module.get_parameter("linear.coefficients").copy_(torch.arange(4.0))
        module.c.fill_(7)
    made = module.to_onnx()
    assert list(made.graph.node[-1].attribute[0].floats) == [0, 1, 2, 3]
    assert numpy_helper.to_array(made.graph.node[0].attribute[0].t).tolist() == [7, 7]


@pytest.mark.parametrize(
    ("trainable", "keys"),
    [
        (None, ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]),
        (["4.bias", "0.weight"], ["4.bias", "0.weight"]),
        (["*.bias", "4.*"], ["0.bias", "2.bias", "4.bias", "4.weight"]),
        ("2.*", ["2.weight", "2.bias"]),
        ([], []),
    ],
)
def test_trainable(net, trainable, keys):
    module = OnnxModule(as_onnx(net), trainable)
    assert list(module.state_dict()) == keys
    x = rows_and_targets()[0].requires_grad_()
    assert_near(module(x), net(x))
    module(x).sum().backward()
    net(rows_and_targets()[0]).sum().backward()
    for key in keys:
        assert_near(module.get_parameter(key).grad, net.get_parameter(key).grad)


def test_patterns_choose_among_weights_and_names_among_all():
    model = parse_model(
        "g (float[N, 2] x) => (float[N, 2] y) { a = Div(x, w_std) y = MatMul(a, w_0) }",
        w_std=random_normal(2),
        w_0=random_normal(2, 2),
    )
    assert list(OnnxModule(model).weight_names) == ["w_0"]
    assert list(OnnxModule(model, "w_*").weight_names) == ["w_0"]
    assert list(OnnxModule(model, ["w_*", "w_std"]).weight_names) == ["w_0", "w_std"]


def test_outputs_without_numbers_are_left_out():
    skl2onnx = pytest.importorskip("skl2onnx")
    from sklearn.linear_model import LogisticRegression

    x = random_normal(30, 2)
    classifier = LogisticRegression().fit(x, np.where(x[:, 0] > 0, "yes", "no"))
    model = skl2onnx.to_onnx(classifier, x[:1], target_opset=18)
    with pytest.raises(ValueError, match="select_model_inputs_outputs, such as 'probabilities'"):
        OnnxModule(model)
    whole = skl2onnx.to_onnx(
        classifier, x[:1], target_opset=18, options={id(classifier): {"zipmap": False}}
    )
    for given in (whole, select_model_inputs_outputs(model, ["probabilities"])):
        module = OnnxModule(given)
        assert module.output_names == ["probabilities"]
        assert_near(
            module(torch.tensor(x)).detach().double(),
            torch.tensor(classifier.predict_proba(x)).double(),
        )


def test_repr(module):
    text = repr(module)
    assert "x: float32[N, 6]" in text
    assert "y: float32[N, 2]" in text


def test_paths_and_bytes(net, tmp_path):
    model = as_onnx(net)
    onnx.save(model, tmp_path / "m.onnx")
    x = rows_and_targets()[0]
    for given in (tmp_path / "m.onnx", str(tmp_path / "m.onnx"), model.SerializeToString()):
        assert_near(OnnxModule(given)(x), net(x))


@pytest.mark.parametrize("recompute", ["none", "cheap", "all"])
def test_recompute(net, recompute):
    module = OnnxModule(as_onnx(net), recompute=recompute)
    x, y = rows_and_targets()
    for m in (net, module):
        F.mse_loss(m(x), y).backward()
    assert_same_gradients(module, net)
    [(_, _, models)] = next(iter(module._variants.values())).graph._session_pairs.values()
    assert len(models.saved) == (0 if recompute == "all" else 2)


# -- a frozen file as a loss ------------------------------------------------------------------


class FrozenEncoder(nn.Module):
    """One matrix of 64 MiB and a bias, in PyTorch and in ONNX."""

    def __init__(self) -> None:
        super().__init__()
        column = np.float32(0.1) * random_normal(4096)
        self.w = torch.tensor(np.outer(column, np.cos(np.arange(4096, dtype=np.float32))))
        self.b = torch.tensor(random_normal(4096, seed=3))

    def forward(self, x):
        return torch.tanh(x @ self.w.to(x.dtype) + self.b.to(x.dtype))

    def as_module(self) -> OnnxModule:
        text = """(float[N, 4096] x) => (float[N, 4096] y) {
            a = MatMul(x, w)  c = Add(a, b)  y = Tanh(c) }"""
        return module_of(text, [], w=self.w.numpy(), b=self.b.numpy())


@pytest.fixture(name="encoder", scope="module")
def frozen_encoder() -> FrozenEncoder:
    return FrozenEncoder()


def perceptual_gradient(encoder, generator: nn.Module, x, target) -> list[torch.Tensor]:
    """Return the gradients of the generator's weights, by a distance of an encoder's features."""
    with torch.no_grad():
        wanted = encoder(target)
    loss = F.mse_loss(encoder(generator(x)), wanted) + F.l1_loss(generator(x), target)
    return [loss.detach(), *torch.autograd.grad(loss, list(generator.parameters()))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_frozen_encoder_as_a_loss(encoder, dtype):
    """Its weights are large enough to be in memory once for all sessions."""
    torch.manual_seed(0)
    generator, module = nn.Linear(6, 4096).to(dtype), encoder.as_module().to(dtype).eval()
    x = torch.tensor(random_normal(3, 6), dtype=dtype)
    target = torch.tensor(random_normal(3, 4096, seed=1), dtype=dtype)
    assert list(module.parameters()) == list(module.buffers()) == []
    found = perceptual_gradient(module, generator, x, target)
    expected = perceptual_gradient(encoder, generator, x, target)
    tight = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-10}
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b, **{"atol": 1e-12, **tight})
    [variant] = module._variants.values()
    [(_, _, models)] = variant.graph._session_pairs.values()
    assert models.names == ["x"]
    assert max(models.forward.ByteSize(), models.backward.ByteSize()) < 1 << 20
    original = {t.name: numpy_helper.to_array(t) for t in module.to_onnx().graph.initializer}
    np.testing.assert_array_equal(original["w"], encoder.w.numpy())


def test_a_large_frozen_encoder_in_half_and_by_second_order(encoder):
    module = encoder.as_module()
    x = torch.tensor(random_normal(2, 4096)).requires_grad_()
    second = []
    for f in (module, encoder):
        [g] = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
        second += torch.autograd.grad(g.square().sum(), x)
    assert_near(second[0], second[1], rtol=1e-4, atol=1e-4)
    wanted, module = module(x).detach(), module.half()
    assert_near(module(x.half()).float(), wanted, rtol=0.05, atol=0.05)
    assert_near(pickle.loads(pickle.dumps(module))(x.half()), module(x.half()))


def test_a_compiled_step_with_a_frozen_encoder(net):
    module, generator = OnnxModule(as_onnx(net), []), nn.Linear(4, 6)
    x, target = torch.tensor(random_normal(5, 4)), rows_and_targets(5)[0]

    def loss_of(f):
        return F.mse_loss(f(generator(x)), f(target))

    compiled = torch.compile(lambda: loss_of(module), backend="eager")
    found = [*torch.autograd.grad(compiled(), list(generator.parameters()))]
    expected = torch.autograd.grad(loss_of(net), list(generator.parameters()))
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b)


# -- bad input --------------------------------------------------------------------------------


def test_a_file_of_one_row_takes_any_number():
    text = """f (float[1,2] x) => (float[1,3] y) {{ m = MatMul(x, w)  y = {} }}"""
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(2, 3)).astype("f"), torch.tensor(rng.normal(size=(5, 2)).astype("f"))
    module = OnnxModule(parse_model(text.format("Reshape(m, s)"), w=w, s=np.int64([1, -1])))
    found = module(x)
    torch.testing.assert_close(found, x @ torch.tensor(w))
    found.sum().backward()
    torch.testing.assert_close(module.w.grad, x.sum(0)[:, None].expand(2, 3))
    assert module.to_onnx().graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    of_row = OnnxModule(parse_model(text.format("Softmax<axis=0>(m)"), w=w))  # of one row: 1
    torch.testing.assert_close(of_row(x), torch.ones(5, 3))
    picked = text.replace("y =", "j = ArgMax<axis=1, keepdims=0>(m)  y =").replace("1,3", "1,1")
    one = parse_model(picked.format("Gather<axis=1>(m, j)"), w=w)
    with pytest.raises(ValueError, match=naming("'x'", "(1, 2)", "(5, 2)")):
        OnnxModule(one)(x)


def test_inputs_by_name():
    module = module_of(TWO, w=random_normal(3, 2), table=random_normal(5, 2))
    x, i = torch.ones(2, 3), torch.tensor([0, 1])
    expected = module(x, i)[0]
    assert_near(module(x, i=i)[0], expected)
    assert_near(module(i=i, x=x)[0], expected)
    with pytest.raises(ValueError, match=naming("inputs", "['i']")):
        module(x)
    with pytest.raises(ValueError, match=r"takes 2 inputs .* not 3"):
        module(x, i, i)
    with pytest.raises(ValueError, match="Unknown input 'j'"):
        module(x, j=i)
    with pytest.raises(ValueError, match=naming("'x'", "by position", "by name")):
        module(x, x=x)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (np.ones((2, 6), np.float32), TypeError, naming("'x'", "a tensor", "ndarray")),
        (torch.ones(2, 6).double(), ValueError, r"'x' takes torch.float32, not torch.float64"),
        (torch.ones(2, 6).bool(), ValueError, r"'x' takes torch.float32, not torch.bool"),
        (torch.ones(2, 6, device="meta"), ValueError, naming("'x'", "on meta", "on cpu")),
        (torch.ones(6), ValueError, r"'x' must have shape \(N, 6\), not \(6,\)"),
        (torch.ones(2, 5), ValueError, r"'x' must have shape \(N, 6\), not \(2, 5\): axis 1"),
        (torch.ones(2, 6, 1), ValueError, r"'x' must have shape \(N, 6\), not \(2, 6, 1\)"),
    ],
)
def test_bad_inputs(module, x, error, message, first, gradients):
    module.requires_grad_(gradients)
    good = rows_and_targets()[0]
    expected = None if first else module(good).detach()
    with pytest.raises(error, match=message):
        module(x)
    if expected is not None:
        assert_near(module(good).detach(), expected)


def test_lengths_that_must_be_the_same():
    module = module_of("(float[N, 2] a, float[N, 2] b) => (float[N, 2] y) { y = Add(a, b) }")
    one = torch.ones(1, 2, requires_grad=True)
    for _ in range(2):
        with pytest.raises(ValueError, match=naming("'N'", "3 as axis 0 of 'a'", "1 as")):
            module(torch.ones(3, 2), one)
        module(one, one).sum().backward()


@pytest.mark.parametrize("first", [True, False])
def test_a_weight_of_another_shape(module, first):
    x = rows_and_targets()[0]
    if not first:
        module(x)
    module.get_submodule("2").bias.data = torch.zeros(3)
    with pytest.raises(ValueError, match=naming("'2.bias'", "(4,)", "(3,)")):
        module(x)


def test_a_weight_on_another_device(module):
    x = rows_and_targets()[0]
    module(x)
    module.get_submodule("2").to("meta")
    with pytest.raises(ValueError, match=naming("'2.weight'", "on meta", "on cpu")):
        module(x)


def test_load_state_dict_changes_nothing_where_a_shape_differs(module):
    before = copy.deepcopy(module.state_dict())
    state = seeded_network(seed=3).state_dict() | {"4.bias": torch.zeros(3)}
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=naming("size mismatch", "4.bias", "(2,)", "(3,)")):
            module.load_state_dict(state, assign=assign)
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key])
    whole = nn.Sequential(module)
    with pytest.raises(RuntimeError, match=naming("size mismatch", "0.4.bias")):
        whole.load_state_dict({f"0.{key}": value for key, value in state.items()})


def test_weights_of_several_dtypes(module):
    module.get_submodule("2").double()
    with pytest.raises(ValueError, match=naming("'2.bias': 'torch.float64'")):
        module(rows_and_targets()[0])


def test_devices_without_provider(module, monkeypatch):
    x = rows_and_targets()[0]
    expected = module(x).detach()
    monkeypatch.setattr("onnxgrad.torch.module.Device.check", refuse)
    with pytest.raises(ProviderError, match="CPUExecutionProvider"):
        module.double()  # any move asks
    monkeypatch.undo()
    assert_near(module(x).detach(), expected, rtol=0, atol=0)
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    for move in (module.cuda, lambda: module.to("cuda"), lambda: module.to(device="mps")):
        if "CUDAExecutionProvider" not in ort.get_available_providers():
            with pytest.raises(ProviderError, match="CPUExecutionProvider"):
                move()
    assert_near(module(x).detach(), expected, rtol=0, atol=0)
    nowhere = copy.deepcopy(module).to("meta")
    with pytest.raises(ProviderError, match=r"'meta'.*CPUExecutionProvider"):
        nowhere(torch.ones(1, 6, device="meta"))


def refuse(device):
    raise ProviderError(f"{device}: the installed onnxruntime offers ['CPUExecutionProvider']")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"trainable": ["0.wieght"]},
            "pattern '0.wieght'. Did you mean '0.weight'",
        ),
        ({"trainable": ["q*"]}, r"Unknown weight or pattern 'q\*'.*Valid: '0.weight'"),
        ({"recompute": "lots"}, "Unknown recompute 'lots'.*'cheap'"),
    ],
)
def test_bad_arguments(net, arguments, message):
    with pytest.raises(ValueError, match=message):
        OnnxModule(as_onnx(net), **arguments)


def test_bad_models(tmp_path):
    with pytest.raises(ModelError):
        OnnxModule(b"nothing")
    with pytest.raises(ModelError):
        OnnxModule(tmp_path / "missing.onnx")
    with pytest.raises(TypeError):
        OnnxModule(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=naming("'s'", "STRING")):
        module_of("(string[N] s) => (int64[1] y) { y = Shape(s) }")
    integers = parse_model("g (float[N] x) => (float[N] y) { y = Expand(x, w) }", w=np.array([3]))
    with pytest.raises(ValueError, match="'w' holds INT64"):
        OnnxModule(integers, ["w"])


def test_no_rule():
    text = """(float[N] x) => (float[N] y) {
        t = Constant <value_ints = [1]> ()  c = Constant <value_int = 1> ()  b = Cast <to = 9> (c)
        y = Mul(x, w)
    }"""
    model = parse_model(f"g {text}", w=random_normal(1))
    model.graph.node[-1].CopyFrom(onnx.helper.make_node("Inverse", ["x"], ["y"], domain="my"))
    model.opset_import.add(domain="my", version=1)
    module = OnnxModule(model, [])
    with pytest.raises(NoGradientRule, match="my::Inverse"):
        module(torch.ones(2, requires_grad=True))
    with torch.no_grad(), pytest.raises(RuntimeError, match=naming("cannot run", "Inverse")):
        module(torch.ones(2))


# -- the package ------------------------------------------------------------------------------


def test_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import onnxgrad\n"
        "try:\n    import onnxgrad.torch\n"
        "except ImportError as e:\n    print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'onnxgrad[torch]'" in done.stdout, done.stderr


def test_example_of_the_documentation(tmp_path, monkeypatch, capsys):
    [code] = code_of("torch.md")
    monkeypatch.chdir(tmp_path)
    exec(code, {"__name__": "__main__"})
    first, last = map(float, capsys.readouterr().out.split())
    assert last < first / 2
    assert (tmp_path / "trained.onnx").exists()
