"""Optimizers and learning rates, against torch.optim and their formulas."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import onnxgrad
from onnxgrad import add_loss_output
from onnxgrad.compat import (
    BaseLearningRate,
    LearningRateSGD,
    LearningRateSGDNesterov,
    OrtGradientOptimizer,
)
from onnxgrad.optimizers import Chain, Optimizer, ScaleByLearningRate
from tests.support.errors import naming
from tests.support.models import initializer_arrays
from tests.support.optimizer_runs import two_product_model
from tests.support.running import in_sweep

LAST = 17_000  # of a weight that is too large to be packed with the others
RATE = LearningRateSGD(0.1, learning_rate="constant")
WITH_MOMENTUM = LearningRateSGDNesterov(0.1, learning_rate="constant", momentum=0.8, nesterov=False)
WITH_NESTEROV = LearningRateSGDNesterov(0.1, learning_rate="constant", momentum=0.8)
TORCH = {
    "sgd": ("SGDOptimizer", RATE, "SGD", {}),
    "momentum": (onnxgrad.optimizers.momentum(0.8), RATE, "SGD", {"momentum": 0.8}),
    "nesterov": (
        onnxgrad.optimizers.nesterov(0.8),
        RATE,
        "SGD",
        {"momentum": 0.8, "nesterov": True},
    ),
    "rate with momentum": ("SGDOptimizer", WITH_MOMENTUM, "SGD", {"momentum": 0.8}),
    "rate with nesterov": ("sgd", WITH_NESTEROV, "SGD", {"momentum": 0.8, "nesterov": True}),
    "adam": (
        onnxgrad.optimizers.adam(0.8, 0.9, 1e-3),
        RATE,
        "Adam",
        {"betas": (0.8, 0.9), "eps": 1e-3},
    ),
    "adamw": (onnxgrad.optimizers.adamw(weight_decay=0.1), RATE, "AdamW", {"weight_decay": 0.1}),
    "adamw by name": ("AdamWOptimizer", RATE, "AdamW", {"weight_decay": 0.01}),
}


@pytest.mark.parametrize(("dtype", "rtol"), [("double", 1e-12), in_sweep("float", 2e-5)])
@pytest.mark.parametrize("name", TORCH)
def test_seven_steps_as_torch(name, dtype, rtol):
    torch = pytest.importorskip("torch")
    ours, rate, theirs, parameters = TORCH[name]
    model, rng = two_product_model(LAST, dtype), np.random.default_rng(1)
    start = initializer_arrays(model)
    x, y = rng.standard_normal((7, 4)), rng.standard_normal((7, LAST))
    trainer = OrtGradientOptimizer(
        add_loss_output(model),
        max_iter=7,
        batch_size=7,
        training_optimizer_name=ours,
        learning_rate=rate,
    ).fit(x, y)
    p = {n: torch.tensor(a, requires_grad=True) for n, a in start.items()}
    given = [torch.tensor(a.astype(start["w"].dtype)) for a in (x, y)]
    optimizer = getattr(torch.optim, theirs)(p.values(), lr=0.1, **parameters)
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


@dataclass(frozen=True)
class Doubled(Optimizer):
    """u -> 2 u + the last u."""

    slots = ("last",)

    def update(self, op, u, slots, inputs):
        return 2.0 * u + slots["last"], {"last": u}


def weights_after(epochs, names, x, **options):
    """Return the weights `names` of a model after epochs of one batch of zeros as labels."""
    trainer = OrtGradientOptimizer(
        add_loss_output(two_product_model(LAST)), names, max_iter=epochs, batch_size=5, **options
    )
    return trainer.fit(x, np.zeros((len(x), LAST))).trained_coef_


def slope_of_u(start, x):
    """Return the function from u to the mean gradient of a row of (tanh(x w + b) u)^2."""
    j = np.tanh(x @ start["w"] + start["b"])
    return lambda u: 2 * j.T @ (j @ u) / len(x)


def test_an_optimizer_of_ones_own():
    """Parts with slots of one name each keep theirs."""
    chained, x = Chain((Doubled(), Doubled(), ScaleByLearningRate())), np.ones((2, 4))
    trained = weights_after(3, ["u"], x, training_optimizer_name=chained, learning_rate=RATE)
    start = initializer_arrays(two_product_model(LAST))
    slope, u, last, last2 = slope_of_u(start, x), start["u"], 0.0, 0.0
    for _ in range(3):
        g = slope(u)
        once, last = 2 * g + last, g
        u, last2 = u - 0.1 * (2 * once + last2), once
    np.testing.assert_allclose(trained["u"], u, rtol=1e-10)


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_of_a_rate_that_falls(nesterov):
    """v <- m v - lr g;  w <- w + (m v - lr g if nesterov else v)."""
    rate = LearningRateSGDNesterov(0.1, power_t=0.5, momentum=0.7, nesterov=nesterov)
    x = np.ones((2, 4))
    trained = weights_after(4, ["u"], x, learning_rate=rate)
    start = initializer_arrays(two_product_model(LAST))
    slope, u, v = slope_of_u(start, x), start["u"], 0.0
    for t in range(4):
        step = 0.1 / (t + 1) ** 0.5 * slope(u)
        v = 0.7 * v - step
        u = u + (0.7 * v - step if nesterov else v)
    np.testing.assert_allclose(trained["u"], u, rtol=1e-10)


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
    for number in (np.float32(0.25), np.float64(0.25), np.int64(2)):
        assert BaseLearningRate.select(number).eta0 == number
    for name in ("SGD", "LearningRateSGD"):
        assert type(BaseLearningRate.select(name)) is LearningRateSGD
    for name in ("Nesterov", "SGDNesterov", "LearningRateSGDNesterov"):
        assert type(BaseLearningRate.select(name)) is LearningRateSGDNesterov
    rate = LearningRateSGD()
    assert BaseLearningRate.select(rate) is rate
    assert not rate.needs_grad
    assert LearningRateSGDNesterov().needs_grad
    for wrong in ("SDG", True, None, [0.1], {"eta0": 0.1}):
        with pytest.raises(ValueError, match="learning rate"):
            BaseLearningRate.select(wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eta0": 0.0}, "eta0"),
        ({"eta0": float("nan")}, "eta0"),
        ({"learning_rate": "constnt"}, "'constant'"),
        ({"learning_rate": "optimal", "alpha": 0.0}, "alpha"),
    ],
)
def test_wrong_learning_rates(options, message):
    with pytest.raises(ValueError, match=message):
        LearningRateSGD(**options).init_learning_rate()


@pytest.mark.parametrize("kind", [LearningRateSGD, LearningRateSGDNesterov])
def test_an_unknown_rule_is_refused_at_once(kind):
    with pytest.raises(ValueError, match=naming("'constnt'", "'constant'")):
        kind(learning_rate="constnt")
    rate = kind().set_params(learning_rate="constnt")
    with pytest.raises(ValueError, match=naming("'constnt'", "'constant'")):
        rate.init_learning_rate()


@dataclass(frozen=True)
class TrustRatio(Optimizer):
    """u -> |w| / |u| u, with the norms of the whole tensors: You et al. 2020, arXiv:1904.00962."""

    def update(self, op, u, slots, inputs):
        def norm(x):
            return op.Sqrt(op.ReduceSum(x * x, keepdims=0))

        return u * (norm(inputs.weight) / norm(u)), {}


class Clipped(ScaleByLearningRate):
    """Inherits from a class that is elementwise, and is not."""

    def update(self, op, u, slots, inputs):
        u = u / op.Sqrt(op.ReduceSum(u * u, keepdims=0))
        return super().update(op, u, slots, inputs)


def step_by_trust_ratio(w, g):
    return np.linalg.norm(w) / np.linalg.norm(g) * g


def step_of_norm_one(w, g):
    return g / np.linalg.norm(g)


@pytest.mark.parametrize(
    ("optimizer", "step"),
    [
        (Chain((TrustRatio(), ScaleByLearningRate())), step_by_trust_ratio),
        (Chain((TrustRatio(), onnxgrad.optimizers.sgd())), step_by_trust_ratio),
        (Clipped(), step_of_norm_one),
    ],
)
def test_a_transform_of_whole_tensors_gets_each_small_weight_in_its_shape(optimizer, step):
    x = np.random.default_rng(1).standard_normal((5, 4))
    assert not optimizer.elementwise
    options = {"training_optimizer_name": optimizer, "learning_rate": RATE}
    trained = weights_after(3, ["w", "b"], x, **options)
    start = initializer_arrays(two_product_model(LAST))
    w, b, u = start["w"], start["b"], start["u"]
    for _ in range(3):
        j = np.tanh(x @ w + b)
        d = 2 / 5 * (j @ u) @ u.T * (1 - j * j)
        w, b = w - 0.1 * step(w, x.T @ d), b - 0.1 * step(b, d.sum(0))
    np.testing.assert_allclose(trained["w"], w, rtol=1e-9)
    np.testing.assert_allclose(trained["b"], b, rtol=1e-9)


def test_which_optimizers_are_elementwise():
    assert Chain((onnxgrad.optimizers.adam(), onnxgrad.optimizers.momentum())).elementwise
    assert not Doubled().elementwise
    assert not Chain((onnxgrad.optimizers.adam(), Doubled())).elementwise

    class Renamed(ScaleByLearningRate):
        pass

    class Stated(Doubled):
        elementwise = True

        def update(self, op, u, slots, inputs):
            return super().update(op, u, slots, inputs)

    class Written:  # what it defines for the optimizer is no claim of `Optimizer`
        def update(self, op, u, slots, inputs):
            return op.ReduceSum(u) * inputs.minus_learning_rate, {}

    class Mixed(Written, Optimizer):
        pass

    assert Renamed().elementwise
    assert Stated().elementwise
    assert not Mixed().elementwise
    assert not Mixed().rate_first
