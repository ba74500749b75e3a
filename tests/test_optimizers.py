"""Optimizers and learning rates, against torch.optim and their formulas."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxgrad
from onnxgrad import (
    BaseLearningRate,
    LearningRateSGD,
    LearningRateSGDNesterov,
    OrtGradientOptimizer,
    add_loss_output,
)

LAST = 17_000  # of a weight that is too large to be packed with the others


def network(dtype: str = "float") -> onnx.ModelProto:
    """Return x w + b, then a product with one large weight."""
    kind = np.float32 if dtype == "float" else np.float64
    made = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g ({dtype}[N, 4] x) => ({dtype}[N, {LAST}] y)
        {{ h = MatMul(x, w)  i = Add(h, b)  j = Tanh(i)  y = MatMul(j, u) }}""")
    rng = np.random.default_rng(0)
    for name, shape in (("w", (4, 3)), ("b", (3,)), ("u", (3, LAST))):
        array = rng.standard_normal(shape).astype(kind) / 3
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    return made


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


TORCH = {
    "sgd": (onnxgrad.sgd(), lambda o, p: o.SGD(p, 0.1)),
    "momentum": (onnxgrad.momentum(0.8), lambda o, p: o.SGD(p, 0.1, momentum=0.8)),
    "nesterov": (onnxgrad.nesterov(0.8), lambda o, p: o.SGD(p, 0.1, momentum=0.8, nesterov=True)),
    "adam": (onnxgrad.adam(0.8, 0.9, 1e-3), lambda o, p: o.Adam(p, 0.1, (0.8, 0.9), 1e-3)),
    "adamw": (
        onnxgrad.adamw(weight_decay=0.1),
        lambda o, p: o.AdamW(p, 0.1, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize(("dtype", "rtol"), [("float", 2e-5), ("double", 1e-12)])
@pytest.mark.parametrize("name", TORCH)
def test_seven_steps_as_torch(name, dtype, rtol):
    torch = pytest.importorskip("torch")
    ours, theirs = TORCH[name]
    model, rng = network(dtype), np.random.default_rng(1)
    start = weights(model)
    x, y = rng.standard_normal((7, 4)), rng.standard_normal((7, LAST))
    trainer = OrtGradientOptimizer(
        add_loss_output(model),
        max_iter=7,
        batch_size=7,
        training_optimizer_name=ours,
        learning_rate=LearningRateSGD(0.1, learning_rate="constant"),
    ).fit(x, y)
    p = {n: torch.tensor(a, requires_grad=True) for n, a in start.items()}
    given = [torch.tensor(a.astype(start["w"].dtype)) for a in (x, y)]
    optimizer = theirs(torch.optim, list(p.values()))
    for _ in range(7):
        optimizer.zero_grad()
        made = torch.tanh(given[0] @ p["w"] + p["b"]) @ p["u"]
        (((made - given[1]) ** 2).sum() / 7).backward()
        optimizer.step()
    for n, value in p.items():
        assert trainer.trained_coef_[n].dtype == start[n].dtype
        np.testing.assert_allclose(
            trainer.trained_coef_[n], value.detach().numpy(), rtol=rtol, atol=rtol
        )


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_of_the_learning_rate(nesterov):
    """v <- m v - lr g;  w <- w + (m v - lr g if nesterov else v), with a rate that falls."""
    model = network("double")
    x, y = np.ones((2, 4)), np.zeros((2, LAST))
    rate = LearningRateSGDNesterov(0.1, power_t=0.5, momentum=0.7, nesterov=nesterov)
    trained = OrtGradientOptimizer(
        add_loss_output(model), ["u"], max_iter=4, batch_size=2, learning_rate=rate
    ).fit(x, y)
    w = weights(model)
    j, u, v = np.tanh(x @ w["w"] + w["b"]), w["u"], 0.0
    for t in range(4):
        step = 0.1 / (t + 1) ** 0.5 * (2 * j.T @ (j @ u)) / 2
        v = 0.7 * v - step
        u = u + (0.7 * v - step if nesterov else v)
    np.testing.assert_allclose(trained.trained_coef_["u"], u, rtol=1e-10)


@pytest.mark.parametrize(
    ("rule", "rates"),
    [
        ("constant", [0.5, 0.5, 0.5]),
        ("invscaling", [0.5, 0.5 / 2**0.25, 0.5 / 3**0.25]),
        ("optimal", [0.5, 1 / (0.1 * (20 + 1)), 1 / (0.1 * (20 + 2))]),
    ],
)
def test_rates_of_the_first_epochs(rule, rates):
    rate = LearningRateSGD(0.5, alpha=0.1, learning_rate=rule)
    assert list(rate.loop(3)) == pytest.approx(rates)
    rate.init_learning_rate()
    assert rate.value == pytest.approx(0.5)


def test_adaptive_divides_by_five_when_the_loss_stalls():
    rate = LearningRateSGD(1.0, learning_rate="adaptive").init_learning_rate()
    values = [rate.update_learning_rate(t, x).value for t, x in enumerate([5, 4, 4, 4, 3, 3, 3], 1)]
    assert values == pytest.approx([1, 1, 1, 0.2, 0.2, 0.2, 0.04])


def test_learning_rates_by_name_or_number():
    assert BaseLearningRate.select(0.25).eta0 == 0.25
    assert BaseLearningRate.select(2).eta0 == 2.0
    for name in ("SGD", "LearningRateSGD"):
        assert type(BaseLearningRate.select(name)) is LearningRateSGD
    for name in ("Nesterov", "SGDNesterov", "LearningRateSGDNesterov"):
        assert type(BaseLearningRate.select(name)) is LearningRateSGDNesterov
    rate = LearningRateSGD()
    assert BaseLearningRate.select(rate) is rate
    assert not rate.needs_grad
    assert LearningRateSGDNesterov().needs_grad
    for wrong in ("SDG", True, None):
        with pytest.raises(ValueError, match="Unknown learning rate"):
            BaseLearningRate.select(wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eta0": 0.0}, "eta0 must be a positive number"),
        ({"eta0": float("nan")}, "eta0 must be a positive number"),
        ({"learning_rate": "constnt"}, "Did you mean 'constant'"),
        ({"learning_rate": "optimal", "alpha": 0.0}, "alpha must be positive"),
    ],
)
def test_wrong_learning_rates(options, message):
    with pytest.raises(ValueError, match=message):
        LearningRateSGD(**options).init_learning_rate()
